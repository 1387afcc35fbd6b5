/* The kernel's own price: posix_spawn in a loop, kill in a loop, and a replacement as soon as SIGCHLD says so.
 *
 *     spawnloop PROGRAM ORDERS        ORDERS is a file with one argument per line, one line per worker
 *
 * Reads `start`, `stop` or `again` lines from stdin and answers `BEGIN_NS END_NS` on stdout.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 65536

extern char **environ;
static char *program, *orders[MOST];
static pid_t pids[MOST];
static int count;
static posix_spawnattr_t attributes;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void spawn(int index) {
    char *argv[] = {program, orders[index], NULL};
    if (posix_spawn(&pids[index], program, NULL, &attributes, argv, environ) != 0)
        exit(3);
}

static void replace_the_dead(void) {
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;)
        for (int index = 0; index < count; index++)
            if (pids[index] == pid) {
                spawn(index);
                break;
            }
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    program = argv[1];
    FILE *file = fopen(argv[2], "r");
    char line[4096];
    while (file != NULL && count < MOST && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        orders[count++] = strdup(line);
    }
    sigset_t watched, none;
    sigemptyset(&none);
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none); /* a blocked signal would be inherited through exec */
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    int watching = 0;
    for (;;) {
        struct pollfd sources[2] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = signals, .events = POLLIN}};
        poll(sources, 2, -1);
        if (watching && sources[1].revents) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) > 0)
                ;
            replace_the_dead();
        }
        if (!sources[0].revents)
            continue;
        char verb[16] = {0};
        if (read(STDIN_FILENO, verb, sizeof verb - 1) <= 0)
            return 0;
        uint64_t begin = now_ns();
        if (strncmp(verb, "start", 5) == 0) {
            for (int index = 0; index < count; index++)
                spawn(index);
            watching = 1;
        } else {
            watching = 0;
            for (int index = 0; index < count; index++)
                kill(pids[index], SIGTERM);
            for (int index = 0; index < count; index++)
                waitpid(pids[index], NULL, 0);
        }
        printf("%llu %llu\n", (unsigned long long)begin, (unsigned long long)now_ns());
        fflush(stdout);
    }
}
