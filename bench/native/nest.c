/* Runs one measurement and leaves nothing behind, however the measurement ends.
 *
 *     nest COMMAND...
 *
 * The kernel hands every orphan below us to us (PR_SET_CHILD_SUBREAPER), so whatever a manager spawned, daemonised
 * or forgot is still a descendant. We reap as a good pid 1 does. When the command ends, or when our stdin reaches
 * end of file because the harness is gone, all that is left below us is killed: only processes of this run.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

static int parent_of(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return -1;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    char *end = strrchr(text, ')'); /* a process name may hold anything, also ')' */
    int parent = -1;
    if (end == NULL || sscanf(end + 1, " %*c %d", &parent) != 1)
        return -1;
    return parent;
}

/* Kill our direct children; theirs become ours and die in the next round. A child cannot be reaped, and its pid
 * cannot be reused, while we are in here: only we wait for it. */
static int kill_children(void) {
    int killed = 0;
    DIR *proc = opendir("/proc");
    struct dirent *item;
    while ((item = readdir(proc)) != NULL) {
        int pid = atoi(item->d_name);
        if (pid > 0 && parent_of(pid) == getpid() && kill(pid, SIGKILL) == 0)
            killed++;
    }
    closedir(proc);
    return killed;
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM);
    sigaddset(&watched, SIGINT);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC);

    pid_t command = fork();
    if (command == 0) {
        sigprocmask(SIG_UNBLOCK, &watched, NULL);
        dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
        execvp(argv[1], argv + 1);
        _exit(127);
    }
    int status = 0, over = 0;
    while (!over) {
        struct pollfd sources[2] = {{.fd = signals, .events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};
        poll(sources, 2, -1);
        if (sources[1].revents)
            over = 1, status = 124 << 8;
        if (sources[0].revents) {
            struct signalfd_siginfo info;
            if (read(signals, &info, sizeof info) == (ssize_t)sizeof info && info.ssi_signo != SIGCHLD)
                over = 1, status = 124 << 8;
        }
        int ended;
        for (pid_t pid; (pid = waitpid(-1, &ended, WNOHANG)) > 0;)
            if (pid == command)
                over = 1, status = ended;
    }
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        kill_children();
        if (waitpid(-1, NULL, 0) < 0 && errno == ECHILD)
            break;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
