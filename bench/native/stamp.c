/* The worker of every measurement: says when it began to run, then waits to be ended.
 *
 *     stamp BOARD:SLOT:MODE[:COUNT]
 *
 * One argument, so that every manager can pass it without quoting;
 * $STAMP is read where a manager chooses the arguments itself (workerdeck).
 *
 * MODE   plain   wait for a signal
 *        deaf    ignore SIGTERM, SIGINT and SIGHUP
 *        talk    print a line every 50 ms, and die of it when nobody reads any more (SIGPIPE)
 *        child   fork one process that stays in the group, then wait
 *        setsid  fork one process in a session of its own, then wait
 *        daemon  fork twice, as a daemon does, then wait
 *        lines   print COUNT numbered lines of 100 bytes, one write each; stamp again when done; wait
 *        blocks  the same lines in writes of 64,000 bytes
 */
#define _GNU_SOURCE
#include "board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 100
#define LINES_PER_BLOCK 640

static struct board *board;
static int slot;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void stamp(uint64_t at_ns, enum kind kind) {
    uint32_t index = __atomic_fetch_add(&board->next, 1, __ATOMIC_ACQ_REL);
    if (index >= board->capacity)
        _exit(3);
    board->entries[index] = (struct entry){.at_ns = at_ns, .pid = getpid(), .slot = slot, .kind = kind};
    uint32_t published = __atomic_add_fetch(&board->published, 1, __ATOMIC_ACQ_REL);
    if (published == __atomic_load_n(&board->target, __ATOMIC_ACQUIRE))
        syscall(SYS_futex, &board->published, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void wait_for_the_end(void) {
    for (;;)
        pause();
}

static void planted(void) {
    stamp(now_ns(), KIND_PLANTED);
    wait_for_the_end();
}

static void write_all(const char *bytes, size_t left) {
    while (left > 0) {
        ssize_t written = write(STDOUT_FILENO, bytes, left);
        if (written < 0)
            _exit(4);
        bytes += written;
        left -= (size_t)written;
    }
}

static void print_lines(long count, long per_write) {
    char *block = malloc((size_t)per_write * LINE_BYTES);
    for (long line = 0; line < count;) {
        long here = 0;
        for (; here < per_write && line < count; here++, line++) {
            char *text = block + here * LINE_BYTES;
            char number[24];
            memset(text, '.', LINE_BYTES - 1);
            snprintf(number, sizeof number, "%010ld ", line);
            memcpy(text, number, 11);
            text[LINE_BYTES - 1] = '\n';
        }
        write_all(block, (size_t)here * LINE_BYTES);
    }
    stamp(now_ns(), KIND_DONE);
}

int main(int argc, char **argv) {
    uint64_t began = now_ns();
    const char *given = getenv("STAMP");
    if (given == NULL)
        given = argc > 1 ? argv[1] : "";
    char *order = strdup(given);
    char *path = strtok(order, ":"), *number = strtok(NULL, ":"), *mode = strtok(NULL, ":"), *count = strtok(NULL, ":");
    if (path == NULL || number == NULL || mode == NULL)
        return 2;
    slot = atoi(number);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) < 0)
        return 2;
    board = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (board == MAP_FAILED)
        return 2;
    close(fd);

    if (strcmp(mode, "deaf") == 0) {
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
    }
    stamp(began, KIND_WORKER);

    if (strcmp(mode, "talk") == 0) {
        const struct timespec pace = {.tv_nsec = 50 * 1000 * 1000};
        for (;;) {
            write_all("still here\n", 11);
            nanosleep(&pace, NULL);
        }
    }
    if (strcmp(mode, "child") == 0 && fork() == 0)
        planted();
    if (strcmp(mode, "setsid") == 0 && fork() == 0) {
        setsid();
        planted();
    }
    if (strcmp(mode, "daemon") == 0) {
        pid_t between = fork();
        if (between == 0) {
            setsid();
            if (fork() == 0)
                planted();
            _exit(0);
        }
        waitpid(between, NULL, 0);
    }
    if (strcmp(mode, "lines") == 0)
        print_lines(atol(count), 1);
    if (strcmp(mode, "blocks") == 0)
        print_lines(atol(count), LINES_PER_BLOCK);
    wait_for_the_end();
}
