/* One process, with everything that must be true of it before its program runs, in one step.
 *
 * What a worker needs before its first instruction (its cgroup, its account, its limits, Landlock, seccomp) can only be
 * done by the process itself, between its birth and its exec. In Python that takes a second program, which costs the
 * start of an interpreter (20-40 ms); here it takes the system calls (0.1 ms). everdeck/kernel/native.py calls this
 * through ctypes, so it needs no headers of Python and is the same file for every version. Without it (no compiler when
 * the package was built, another processor) everdeck/kernel/launch.py does the same, more slowly.
 *
 * The child shares our memory until its exec (CLONE_VM | CLONE_VFORK), like posix_spawn: nothing is copied, and it makes
 * only system calls, never malloc, locks or stdio. Where the child changes its account it gets a copy instead ("apart"):
 * from that moment on processes of the other account may signal it, and one that was stopped would keep us waiting in
 * vfork for ever; from a copy we wait with a deadline.
 *
 * clone3 is called by hand because CLONE_INTO_CGROUP has no wrapper, and a child on our own stack must not return from
 * a function that was called before. See clone(2), vfork(2), "Standard library notes" in vfork(2), cgroups(7).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NO_CLONE3 435
#define NO_CLOSE_RANGE 436
#define NO_LANDLOCK_ADD_RULE 445
#define NO_LANDLOCK_RESTRICT_SELF 446
#define INTO_CGROUP 0x200000000ULL
#define WITH_PIDFD 0x00001000ULL
#define SHARED_MEMORY (0x00000100ULL | 0x00004000ULL) /* CLONE_VM | CLONE_VFORK */
#define SHARED_DESCRIPTORS 0x00000400ULL              /* CLONE_FILES */
#define HIGH 1000 /* everdeck.kernel.descriptors.HIGH */
#define PATIENCE_MILLISECONDS 30000
#define LOOK_MILLISECONDS 50
#define STACK_BYTES 65536
#define LAST_SIGNAL 64
#define NANOSECONDS 1000000000LL
#define CLEARED_HANDLERS 0x100000000ULL /* CLONE_CLEAR_SIGHAND, Linux 5.5 */
#define CLEARED_NUMBER 0x00200000ULL    /* CLONE_CHILD_CLEARTID */
#define FUTEX_OF_ALL 0                  /* FUTEX_WAIT; not the private kind, which the kernel does not wake here */
#define MOST_UNDER_WAY 4
#define SMALL_STACK_BYTES 16384

/* The order of everdeck.kernel.native.STEPS. */
enum step { CLONE, CGROUP, SESSION, DESCRIPTORS, OPEN_FILES, NICE, OOM, CAPABILITIES, GROUP, USER, CWD, PRIVILEGES,
            LANDLOCK, SECCOMP, EXEC, PATIENCE, HOME };

struct order {
    char *words; /* programs (each is tried), arguments, environment: one after another, each ended by a NUL */
    const char *cwd;
    const int *keep;
    const gid_t *groups;
    const char *oom_score_adj; /* NULL: as it is */
    const void *filter;        /* a struct sock_filter[] */
    int64_t uid, gid;          /* -1: as it is */
    int64_t open_files;        /* -1: as it is */
    int64_t open_files_soft;   /* -1: as it is; the hard limit stays */
    int32_t stdio[3];
    int32_t keep_count;
    int32_t groups_count;      /* -1: as they are */
    int32_t cgroup_fd;         /* -1: ours */
    int32_t umask;             /* -1: as it is */
    int32_t nice;              /* above 19: as it is */
    int32_t ruleset_fd;        /* -1: none */
    int32_t filter_length;     /* 0: none */
    int32_t no_core, no_capabilities, no_new_privileges, apart;
    int32_t programs_count, argv_count, env_count;
    int32_t below;             /* it needs no descriptor from this number on; 0: it may need any */
};

struct answer {
    int32_t pid, pidfd, step, error;
};

struct clone3_arguments { /* struct clone_args of linux/sched.h, as of 5.7 */
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

struct program_of_filter { /* struct sock_fprog */
    unsigned short length;
    const void *filter;
};

struct birth {
    const struct order *order;
    char **programs, **argv, **envp; /* NULL ends each */
    struct answer *told; /* in memory that we share; or */
    int report_fd;       /* a pipe, when we do not */
};

size_t everdeck_order_bytes(void) { return sizeof(struct order); }

struct rule { /* struct landlock_path_beneath_attr of linux/landlock.h */
    uint64_t access;
    int32_t fd;
} __attribute__((packed));

/* Let a Landlock ruleset reach these open files. 0, or an errno. */
int everdeck_add_rules(int ruleset, const struct rule *rules, int count)
{
    for (int i = 0; i < count; i++)
        if (syscall(NO_LANDLOCK_ADD_RULE, ruleset, 1 /* LANDLOCK_RULE_PATH_BENEATH */, &rules[i], 0U) < 0)
            return errno;
    return 0;
}

/* The same for paths, each ended by a NUL; those that do not exist are left out. */
int everdeck_allow_paths(int ruleset, const char *paths, int count, uint64_t access, uint64_t of_a_file)
{
    for (int i = 0; i < count; i++, paths += strlen(paths) + 1) {
        struct rule rule = {access, open(paths, O_PATH | O_CLOEXEC)};
        struct stat facts;
        if (rule.fd < 0)
            continue;
        if (fstat(rule.fd, &facts) < 0 || !S_ISDIR(facts.st_mode))
            rule.access = of_a_file;
        int refused = everdeck_add_rules(ruleset, &rule, 1);
        close(rule.fd);
        if (refused)
            return refused;
    }
    return 0;
}

static void fail(const struct birth *birth, enum step step)
{
    int32_t told[2] = {(int32_t)step, errno};
    if (birth->report_fd >= 0) {
        ssize_t written = write(birth->report_fd, told, sizeof told);
        (void)written;
    } else {
        birth->told->step = told[0];
        birth->told->error = told[1];
    }
    syscall(SYS_exit_group, 127);
}

static int place_descriptors(const struct order *order, int report_fd)
{
    int from[3];
    for (int i = 0; i < 3; i++) { /* out of the way first: a source may be one of 0, 1, 2 */
        from[i] = order->stdio[i];
        if (from[i] < 3 && (from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, 3)) < 0)
            return -1;
    }
    for (int i = 0; i < 3; i++)
        if (dup2(from[i], i) < 0)
            return -1;
    if (syscall(NO_CLOSE_RANGE, 3U, ~0U, 4U /* CLOSE_RANGE_CLOEXEC */) < 0)
        return -1;
    for (int i = 0; i < order->keep_count; i++)
        if (order->keep[i] > 2 && order->keep[i] != report_fd && fcntl(order->keep[i], F_SETFD, 0) < 0)
            return -1;
    return 0;
}

static int write_oom_score(const char *score)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    return fd < 0 || write(fd, score, strlen(score)) < 0 ? -1 : close(fd);
}

static int empty_capabilities(void)
{
    struct { uint32_t version; int pid; } header = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } sets[2];
    for (unsigned long one = 0; one < 64; one++)
        if (prctl(PR_CAPBSET_DROP, one, 0, 0, 0) < 0) {
            if (errno == EINVAL && one > 0) /* past the last one of this kernel */
                break;
            return -1;
        }
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (syscall(SYS_capget, &header, sets) < 0)
        return -1;
    sets[0].inheritable = sets[1].inheritable = 0;
    return (int)syscall(SYS_capset, &header, sets);
}

/* Raw calls: the C library's own would tell every thread of the program that started us to follow. */
static int become(const struct order *order, enum step *step)
{
    *step = GROUP;
    if (order->groups_count >= 0 && syscall(SYS_setgroups, (size_t)order->groups_count, order->groups) < 0)
        return -1;
    if (order->gid >= 0 && syscall(SYS_setresgid, (gid_t)order->gid, (gid_t)order->gid, (gid_t)order->gid) < 0)
        return -1;
    *step = USER;
    return order->uid >= 0
               ? (int)syscall(SYS_setresuid, (uid_t)order->uid, (uid_t)order->uid, (uid_t)order->uid)
               : 0;
}

static int default_signals(void)
{
    static const char zeros[64]; /* a struct sigaction of the kernel: SIG_DFL, no flags, empty mask */
    uint64_t none = 0;
    for (int number = 1; number <= LAST_SIGNAL; number++)
        if (number != SIGKILL && number != SIGSTOP)
            syscall(SYS_rt_sigaction, number, zeros, NULL, 8);
    return (int)syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, 8);
}

static void be_born(void *argument)
{
    const struct birth *birth = argument;
    const struct order *order = birth->order;
    enum step step = GROUP;
    struct rlimit none = {0, 0};
    /* Before anything else: until here the table is the one of the process that started us. */
    if (order->below > 0 && syscall(NO_CLOSE_RANGE, (unsigned)order->below, ~0U, 2U /* CLOSE_RANGE_UNSHARE */) < 0)
        fail(birth, DESCRIPTORS);
    if (setsid() < 0)
        fail(birth, SESSION);
    if (place_descriptors(order, birth->report_fd) < 0)
        fail(birth, DESCRIPTORS);
    if (order->oom_score_adj && write_oom_score(order->oom_score_adj) < 0)
        fail(birth, OOM);
    if (order->nice <= 19 && setpriority(PRIO_PROCESS, 0, order->nice) < 0)
        fail(birth, NICE);
    if (order->open_files >= 0) {
        struct rlimit files = {(rlim_t)order->open_files, (rlim_t)order->open_files};
        if (setrlimit(RLIMIT_NOFILE, &files) < 0)
            fail(birth, OPEN_FILES);
    } else if (order->open_files_soft >= 0) {
        struct rlimit files;
        if (getrlimit(RLIMIT_NOFILE, &files) < 0)
            fail(birth, OPEN_FILES);
        if ((rlim_t)order->open_files_soft < files.rlim_max)
            files.rlim_cur = (rlim_t)order->open_files_soft;
        if (setrlimit(RLIMIT_NOFILE, &files) < 0)
            fail(birth, OPEN_FILES);
    }
    if (order->no_core && setrlimit(RLIMIT_CORE, &none) < 0)
        fail(birth, PRIVILEGES);
    if (order->umask >= 0)
        umask((mode_t)order->umask);
    if (order->no_capabilities && empty_capabilities() < 0)
        fail(birth, CAPABILITIES);
    if (become(order, &step) < 0)
        fail(birth, step);
    if (chdir(order->cwd) < 0)
        fail(birth, CWD);
    if (order->no_new_privileges && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        fail(birth, PRIVILEGES);
    if (order->ruleset_fd >= 0 && syscall(NO_LANDLOCK_RESTRICT_SELF, order->ruleset_fd, 0U) < 0)
        fail(birth, LANDLOCK);
    default_signals();
    if (order->filter_length > 0) {
        struct program_of_filter program = {(unsigned short)order->filter_length, order->filter};
        if (syscall(SYS_seccomp, 1U /* SECCOMP_SET_MODE_FILTER */, 0U, &program) < 0)
            fail(birth, SECCOMP);
    }
    int refused = ENOENT;
    for (char **program = birth->programs; *program; program++) {
        execve(*program, birth->argv, birth->envp);
        if (errno != ENOENT && errno != ENOTDIR)
            refused = errno;
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
            break;
    }
    errno = refused;
    fail(birth, EXEC);
}

/* clone3 on a stack of its own, which runs "first" and never returns here in the child. */
static long born(struct clone3_arguments *arguments, void (*first)(void *), void *argument)
{
#if defined(__x86_64__)
    long answer = NO_CLONE3;
    register void (*begin)(void *) __asm__("r12") = first;
    register void *with __asm__("r13") = argument;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "mov %%r13, %%rdi\n\t"
                     "call *%%r12\n\t"
                     "hlt\n"
                     "1:"
                     : "+a"(answer)
                     : "D"(arguments), "S"(sizeof *arguments), "r"(begin), "r"(with)
                     : "rcx", "r11", "memory", "cc");
    return answer;
#elif defined(__aarch64__)
    register long number __asm__("x8") = NO_CLONE3;
    register struct clone3_arguments *given __asm__("x0") = arguments;
    register size_t second __asm__("x1") = sizeof *arguments;
    register void (*begin)(void *) __asm__("x19") = first;
    register void *with __asm__("x20") = argument;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, xzr\n\t"
                     "mov x0, x20\n\t"
                     "blr x19\n\t"
                     "brk #1\n"
                     "1:"
                     : "+r"(given)
                     : "r"(number), "r"(second), "r"(begin), "r"(with)
                     : "x30", "memory", "cc");
    return (long)given;
#else
    (void)arguments, (void)first, (void)argument;
    return -ENOSYS;
#endif
}

/* Wait for end-of-file, which is the exec. A child that its own new account keeps stopping is given up at once: others
 * wait for us. */
static void heard(struct answer *answer, int report_fd, int pidfd)
{
    struct pollfd waiting = {report_fd, POLLIN, 0};
    int32_t told[2];
    for (int waited = 0; waited < PATIENCE_MILLISECONDS; waited += LOOK_MILLISECONDS) {
        siginfo_t seen = {0};
        int ready = poll(&waiting, 1, LOOK_MILLISECONDS);
        if (ready > 0) {
            if (read(report_fd, told, sizeof told) == (ssize_t)sizeof told) {
                answer->step = told[0];
                answer->error = told[1];
            }
            return;
        }
        if (waitid(P_PIDFD, (id_t)pidfd, &seen, WSTOPPED | WNOHANG | WNOWAIT) == 0 && seen.si_pid != 0)
            break;
    }
    answer->step = PATIENCE;
    answer->error = ETIMEDOUT;
}

static char **listed(char **to, char **words, int32_t count)
{
    for (int32_t i = 0; i < count; i++, *words += strlen(*words) + 1)
        *to++ = *words;
    *to++ = NULL;
    return to;
}

/* A pidfd that is kept for as long as its worker lives stays above the numbers that a start needs: see "below". */
static int out_of_the_way(int pidfd)
{
    int high = fcntl(pidfd, F_DUPFD_CLOEXEC, HIGH);
    if (high < 0)
        return pidfd;
    close(pidfd);
    return high;
}

static int spawned(const struct order *order, char **lists, struct answer *answer)
{
    char stack[STACK_BYTES] __attribute__((aligned(16)));
    uint64_t all = ~0ULL, before;
    int report[2] = {-1, -1}, pidfd = -1;
    char *words = order->words;
    char **argv = listed(lists, &words, order->programs_count);
    char **envp = listed(argv, &words, order->argv_count);
    struct birth birth = {order, lists, argv, envp, answer, -1};
    listed(envp, &words, order->env_count);
    struct clone3_arguments arguments = {
        .flags = WITH_PIDFD, .pidfd = (uint64_t)(uintptr_t)&pidfd, .exit_signal = SIGCHLD,
        .stack = (uint64_t)(uintptr_t)stack, .stack_size = sizeof stack,
    };
    if (order->cgroup_fd >= 0) {
        arguments.flags |= INTO_CGROUP;
        arguments.cgroup = (uint64_t)order->cgroup_fd;
    }
    if (order->apart) {
        if (pipe2(report, O_CLOEXEC) < 0) {
            answer->step = CLONE;
            answer->error = errno;
            return -1;
        }
        birth.report_fd = report[1];
    } else {
        /* The copy of a table of thousands takes longer than all the rest, so the child copies what it needs. */
        arguments.flags |= SHARED_MEMORY | (order->below > 0 ? SHARED_DESCRIPTORS : 0);
    }
    /* No handler of ours may run in the child: it would be in our memory, with the child's rights. */
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, 8);
    long pid = born(&arguments, be_born, &birth);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, 8);
    if (report[1] >= 0)
        close(report[1]);
    if (pid < 0) {
        answer->step = CLONE;
        answer->error = (int32_t)-pid;
        /* Which of the two it was: the kernel has no other reason for these than the cgroup. */
        if (order->cgroup_fd >= 0 && (pid == -EBUSY || pid == -EOPNOTSUPP || pid == -EACCES || pid == -EBADF ||
                                      pid == -ENODEV || pid == -ENOENT))
            answer->step = CGROUP;
    } else if (report[0] >= 0) {
        heard(answer, report[0], pidfd);
    }
    if (report[0] >= 0)
        close(report[0]);
    if (answer->step < 0) {
        answer->pid = (int32_t)pid;
        answer->pidfd = out_of_the_way(pidfd);
        return 0;
    }
    if (pid > 0) {
        siginfo_t seen;
        if (answer->step == PATIENCE)
            syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0U);
        while (waitid(P_PIDFD, (id_t)pidfd, &seen, WEXITED) < 0 && errno == EINTR)
            ;
        close(pidfd);
    }
    return -1;
}

/* 0: exec'ed, and answer has pid and pidfd. -1: answer says which step was refused and why; nothing is left behind. */
int everdeck_start(const struct order *order, struct answer *answer)
{
    size_t count = (size_t)order->programs_count + (size_t)order->argv_count + (size_t)order->env_count + 3;
    char **lists = malloc(count * sizeof *lists);
    *answer = (struct answer){-1, -1, lists ? -1 : CLONE, lists ? 0 : ENOMEM};
    int failed = lists ? spawned(order, lists, answer) : -1;
    free(lists);
    return failed;
}

/* --- first starts -------------------------------------------------------------------------------------------------
 *
 * A worker that has no home yet and asks for nothing special: its directories, lock, note, log and process, for several
 * workers in one call, so that no step of them needs an interpreter. What cannot be done here is left to Python, which
 * does it step by step and tells why it failed.
 *
 * Here the child shares our memory without making us wait for its exec: the files of the next worker are made meanwhile.
 * So it must not touch what this thread uses, and errno is one of these: it makes its system calls by hand.
 */

struct batch {
    char *texts;     /* for each worker, each ended by a NUL: name, cgroup (may be empty), working directory, mark;
                        programs, arguments, environment */
    char *notes;     /* for each worker, ended by a NUL */
    const int32_t *counts; /* for each worker: programs, arguments, environment */
    const char *workers;   /* the directory of all homes, open as workers_fd */
    int64_t open_files_soft;
    int32_t count, workers_fd, null_fd, umask;
    int32_t cgroups_fd; /* the directory of all cgroups; -1: it is not open */
    int32_t die_locked; /* a test's: end this process when so many locks were taken; 0: never */
    int32_t inotify_fd; /* hears of the first write to each log after its mark; -1: nobody does */
};

struct made {
    int64_t start_ticks; /* -1: it has to be asked for */
    uint64_t pidfd_inode;
    int32_t pid, pidfd, step, error;
    int32_t watch; /* of its log, before its first instruction; -1: none */
    int32_t unused;
};

struct plain_birth {
    char **programs, **argv, **envp;
    const char *cwd;
    const unsigned char *ignored; /* by number: which signals we ignore */
    int64_t open_files_soft;
    int32_t null_fd, log_fd, lock_fd, umask, below;
    int32_t step, error; /* what it was refused; in memory that we share */
};

struct under_way {
    char stack[SMALL_STACK_BYTES] __attribute__((aligned(16)));
    struct plain_birth birth;
    struct made *made;
    char **lists;
    int32_t alive; /* the kernel puts 0 here when the child has another memory (its exec) or none, and wakes us */
    int cgroup_fd, pidfd;
};

static long raw(long number, long a, long b, long c, long d)
{
#if defined(__x86_64__)
    long answer = number;
    register long fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "+a"(answer) : "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory", "cc");
    return answer;
#elif defined(__aarch64__)
    register long with __asm__("x8") = number;
    register long first __asm__("x0") = a;
    register long second __asm__("x1") = b;
    register long third __asm__("x2") = c;
    register long fourth __asm__("x3") = d;
    __asm__ volatile("svc #0" : "+r"(first) : "r"(with), "r"(second), "r"(third), "r"(fourth) : "memory", "cc");
    return first;
#else
    (void)number, (void)a, (void)b, (void)c, (void)d;
    return -ENOSYS;
#endif
}

static void refuse(struct plain_birth *birth, enum step step, long answer)
{
    birth->error = (int32_t)-answer;
    birth->step = (int32_t)step;
    raw(SYS_exit_group, 127, 0, 0, 0);
}

static void be_born_plainly(void *argument)
{
    static const char zeros[64];
    struct plain_birth *birth = argument;
    struct rlimit files;
    uint64_t none = 0;
    long answer = 0, refused = -ENOENT;
    if (birth->below > 0)
        answer = raw(NO_CLOSE_RANGE, birth->below, ~0U, 2 /* CLOSE_RANGE_UNSHARE */, 0);
    if (answer < 0)
        refuse(birth, DESCRIPTORS, answer);
    if ((answer = raw(SYS_setsid, 0, 0, 0, 0)) < 0)
        refuse(birth, SESSION, answer);
    if ((answer = raw(SYS_dup3, birth->null_fd, 0, 0, 0)) < 0 || (answer = raw(SYS_dup3, birth->log_fd, 1, 0, 0)) < 0 ||
        (answer = raw(SYS_dup3, birth->log_fd, 2, 0, 0)) < 0)
        refuse(birth, DESCRIPTORS, answer);
    /* Now, not by the exec: that wakes whoever waits for it before it closes anything, and among what was copied are
     * the locks of those that are started beside this one. */
    if (birth->lock_fd > 3 && (answer = raw(NO_CLOSE_RANGE, 3, birth->lock_fd - 1, 0, 0)) < 0)
        refuse(birth, DESCRIPTORS, answer);
    if ((answer = raw(NO_CLOSE_RANGE, birth->lock_fd + 1, ~0U, 0, 0)) < 0 ||
        (answer = raw(SYS_fcntl, birth->lock_fd, F_SETFD, 0, 0)) < 0)
        refuse(birth, DESCRIPTORS, answer);
    if (birth->open_files_soft >= 0) {
        answer = raw(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, (long)&files);
        if ((rlim_t)birth->open_files_soft < files.rlim_max)
            files.rlim_cur = (rlim_t)birth->open_files_soft;
        if (answer < 0 || (answer = raw(SYS_prlimit64, 0, RLIMIT_NOFILE, (long)&files, 0)) < 0)
            refuse(birth, OPEN_FILES, answer);
    }
    if (birth->umask >= 0)
        raw(SYS_umask, birth->umask, 0, 0, 0);
    if ((answer = raw(SYS_chdir, (long)birth->cwd, 0, 0, 0)) < 0)
        refuse(birth, CWD, answer);
    /* Handlers were cleared by clone3; what we ignore would stay ignored over the exec. */
    for (int number = 1; number <= LAST_SIGNAL; number++)
        if (!birth->ignored || birth->ignored[number])
            raw(SYS_rt_sigaction, number, (long)zeros, 0, 8);
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, 8);
    for (char **program = birth->programs; *program; program++) {
        answer = raw(SYS_execve, (long)*program, (long)birth->argv, (long)birth->envp, 0);
        if (answer != -ENOENT && answer != -ENOTDIR)
            refused = answer;
        if (answer != -ENOENT && answer != -ENOTDIR && answer != -EACCES)
            break;
    }
    refuse(birth, EXEC, refused);
}

static int above_standard(int fd)
{
    if (fd < 0 || fd > 2)
        return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int refused = errno;
    close(fd);
    errno = refused;
    return high;
}

static int write_whole(int fd, const char *text)
{
    size_t length = strlen(text);
    return write(fd, text, length) == (ssize_t)length ? 0 : -1;
}

/* Its directories, its lock, which is taken, its note and its log with the mark of its start. New names only: whatever
 * is there already is Python's to judge. */
static int made_home(struct batch *batch, struct under_way *slot, const char *name, const char *note, const char *mark)
{
    struct plain_birth *birth = &slot->birth;
    char log[PATH_MAX];
    int home, note_fd;
    if (mkdirat(batch->workers_fd, name, 0700) < 0)
        return -1;
    home = openat(batch->workers_fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (home < 0)
        return -1;
    if (mkdirat(home, "log", 0700) < 0 || mkdirat(home, "data", 0700) < 0)
        goto failed;
    birth->lock_fd = above_standard(openat(home, "lock", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (birth->lock_fd < 0 || flock(birth->lock_fd, LOCK_EX | LOCK_NB) < 0)
        goto failed;
    if (batch->die_locked > 0 && --batch->die_locked == 0)
        kill(getpid(), SIGKILL);
    note_fd = openat(home, "note", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (note_fd >= 0) { /* no room for it: the registry has it, and the process itself can be asked */
        if (write_whole(note_fd, note) < 0)
            unlinkat(home, "note", 0);
        close(note_fd);
    }
    birth->log_fd = above_standard(
        openat(home, "log/current", O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_NOCTTY | O_CLOEXEC, 0600));
    if (birth->log_fd < 0)
        goto failed;
    int lost = write_whole(birth->log_fd, mark); /* a full disk loses the mark and nothing else */
    (void)lost;
    if (batch->inotify_fd >= 0) {
        /* By its path, as every later watch of it: a name below /proc/self/fd is made by the kernel when it is asked
         * for, which takes twice as long as all the rest. */
        if (snprintf(log, sizeof log, "%s/%s/log/current", batch->workers, name) < (int)sizeof log)
            slot->made->watch = inotify_add_watch(batch->inotify_fd, log, IN_MODIFY | IN_ONESHOT | IN_DONT_FOLLOW);
    }
    close(home);
    return 0;
failed:;
    int refused = errno;
    close(home);
    errno = refused;
    return -1;
}

static int made_cgroup(const struct batch *batch, struct under_way *slot, const char *cgroup)
{
    int all = AT_FDCWD;
    if (!*cgroup)
        return 0;
    if (batch->cgroups_fd >= 0) {
        all = batch->cgroups_fd;
        cgroup = strrchr(cgroup, '/') + 1;
    }
    if (mkdirat(all, cgroup, 0777) < 0)
        return -1;
    slot->cgroup_fd = openat(all, cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return slot->cgroup_fd < 0 ? -1 : 0;
}

/* Since the machine booted, as the kernel stamps a process that is born. */
static int64_t boot_nanoseconds(void)
{
    struct timespec now;
    return clock_gettime(CLOCK_BOOTTIME, &now) == 0 ? now.tv_sec * NANOSECONDS + now.tv_nsec : -1;
}

/* When it began, in the ticks of /proc, by the clock before and after: -1 if a tick ended in between, or nearly. */
static int64_t ticks_within(int64_t before, int64_t after)
{
    static const int64_t apart = 1000; /* more than two ways to read one clock differ */
    long per_second = sysconf(_SC_CLK_TCK);
    if (before < 0 || after < 0 || per_second <= 0 || NANOSECONDS % per_second != 0)
        return -1;
    int64_t first = (before - apart) / (NANOSECONDS / per_second), last = (after + apart) / (NANOSECONDS / per_second);
    return first == last ? first : -1;
}

/* The same by /proc: at once after the clone, because during its exec a reader has to wait. */
static int64_t start_ticks_of(int pid, int pidfd)
{
    char path[32], text[1024], *at;
    struct pollfd ended = {pidfd, POLLIN, 0};
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return -1;
    text[length] = 0;
    at = strrchr(text, ')'); /* field 2; the name may hold anything */
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    /* If it has ended, somebody may have reaped it, and another may have its number. */
    return at && poll(&ended, 1, 0) == 0 ? strtoll(at, NULL, 10) : -1;
}

static void begin_birth(struct under_way *slot)
{
    struct plain_birth *birth = &slot->birth;
    struct stat facts;
    uint64_t all = ~0ULL, before;
    int below = birth->lock_fd < HIGH && birth->log_fd < HIGH && birth->null_fd < HIGH;
    struct clone3_arguments arguments = {
        .flags = WITH_PIDFD | 0x00000100ULL /* CLONE_VM */ | CLEARED_HANDLERS | CLEARED_NUMBER |
                 (below ? SHARED_DESCRIPTORS : 0) | (slot->cgroup_fd >= 0 ? INTO_CGROUP : 0),
        .pidfd = (uint64_t)(uintptr_t)&slot->pidfd, .child_tid = (uint64_t)(uintptr_t)&slot->alive,
        .exit_signal = SIGCHLD, .stack = (uint64_t)(uintptr_t)slot->stack, .stack_size = sizeof slot->stack,
        .cgroup = slot->cgroup_fd >= 0 ? (uint64_t)slot->cgroup_fd : 0,
    };
    birth->below = below ? HIGH : 0;
    slot->alive = 1;
    /* No handler of ours may run in the child: it would be in our memory. */
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, 8);
    int64_t began = boot_nanoseconds();
    long pid = born(&arguments, be_born_plainly, birth);
    int64_t ended = boot_nanoseconds();
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, 8);
    if (pid < 0) {
        slot->alive = 0;
        slot->made->step = CLONE;
        slot->made->error = (int32_t)-pid;
        return;
    }
    slot->made->pid = (int32_t)pid;
    slot->made->pidfd = slot->pidfd = out_of_the_way(slot->pidfd);
    slot->made->start_ticks = ticks_within(began, ended);
    if (slot->made->start_ticks < 0)
        slot->made->start_ticks = start_ticks_of((int)pid, slot->pidfd);
    slot->made->pidfd_inode = fstat(slot->pidfd, &facts) == 0 ? (uint64_t)facts.st_ino : 0;
}

/* Wait for its exec, or for its end without one. */
static void end_birth(struct batch *batch, struct under_way *slot)
{
    struct plain_birth *birth = &slot->birth;
    struct made *made = slot->made;
    if (!made)
        return;
    while (__atomic_load_n(&slot->alive, __ATOMIC_ACQUIRE) != 0)
        syscall(SYS_futex, &slot->alive, FUTEX_OF_ALL, 1, NULL, NULL, 0);
    if (birth->step >= 0) {
        siginfo_t seen;
        while (waitid(P_PIDFD, (id_t)slot->pidfd, &seen, WEXITED) < 0 && errno == EINTR)
            ;
        close(slot->pidfd);
        made->step = birth->step;
        made->error = birth->error;
        made->pid = made->pidfd = -1;
    }
    if (made->step >= 0 && made->watch >= 0) {
        inotify_rm_watch(batch->inotify_fd, made->watch);
        made->watch = -1;
    }
    if (slot->cgroup_fd >= 0)
        close(slot->cgroup_fd);
    if (birth->log_fd >= 0)
        close(birth->log_fd);
    if (birth->lock_fd >= 0)
        close(birth->lock_fd);
    free(slot->lists);
    slot->lists = NULL;
    slot->made = NULL;
}

static void begin_start(struct batch *batch, int32_t index, char **texts, char **notes, struct under_way *slot,
                        struct made *made, const unsigned char *ignored)
{
    const int32_t *counts = batch->counts + 3 * index;
    char *words[4], *note = *notes, **to;
    int32_t total = counts[0] + counts[1] + counts[2];
    for (int i = 0; i < 4; i++, *texts += strlen(*texts) + 1)
        words[i] = *texts;
    *notes += strlen(note) + 1;
    *made = (struct made){-1, 0, -1, -1, -1, 0, -1, 0};
    slot->made = made;
    slot->cgroup_fd = slot->pidfd = -1;
    slot->alive = 0;
    slot->lists = malloc(((size_t)total + 3) * sizeof *slot->lists);
    slot->birth = (struct plain_birth){
        .cwd = words[2], .ignored = ignored, .open_files_soft = batch->open_files_soft, .null_fd = batch->null_fd,
        .log_fd = -1, .lock_fd = -1, .umask = batch->umask, .step = -1,
    };
    if (!slot->lists) {
        for (int32_t i = 0; i < total; i++)
            *texts += strlen(*texts) + 1;
        made->step = HOME;
        made->error = ENOMEM;
        return;
    }
    to = slot->birth.programs = slot->lists;
    to = slot->birth.argv = listed(to, texts, counts[0]);
    to = slot->birth.envp = listed(to, texts, counts[1]);
    listed(to, texts, counts[2]);
    if (made_home(batch, slot, words[0], note, words[3]) < 0 || made_cgroup(batch, slot, words[1]) < 0) {
        made->step = HOME;
        made->error = errno;
    } else {
        begin_birth(slot);
    }
}

size_t everdeck_batch_bytes(void) { return sizeof(struct batch) + sizeof(struct made); }

/* By number: which signals we ignore. Asked of the kernel, whose struct begins with the handler: sigaction(3) keeps 32
 * and 33 to itself. */
static void ask_ignored(unsigned char *ignored)
{
    for (int number = 1; number <= LAST_SIGNAL; number++) {
        struct {
            void (*handler)(int);
            char rest[56];
        } now;
        ignored[number] = syscall(SYS_rt_sigaction, number, NULL, &now, 8) == 0 && now.handler == SIG_IGN;
    }
}

/* Start them all; what came of each is in "made". 0, or -1 if there is no memory for it and nothing was begun. */
int everdeck_start_first(struct batch *batch, struct made *made)
{
    struct under_way *slots = malloc(MOST_UNDER_WAY * sizeof *slots);
    unsigned char ignored[LAST_SIGNAL + 1];
    char *texts = batch->texts, *notes = batch->notes;
    if (!slots)
        return -1;
    ask_ignored(ignored);
    for (int32_t i = 0; i < MOST_UNDER_WAY; i++)
        slots[i].made = NULL;
    for (int32_t i = 0; i < batch->count; i++) {
        struct under_way *slot = &slots[i % MOST_UNDER_WAY];
        end_birth(batch, slot);
        begin_start(batch, i, &texts, &notes, slot, &made[i], ignored);
    }
    for (int32_t i = 0; i < MOST_UNDER_WAY; i++)
        end_birth(batch, &slots[(batch->count + i) % MOST_UNDER_WAY]);
    free(slots);
    return 0;
}

/* Begin the first of them, and let the caller go on while it is exec'ed: whoever begins it ends it, and until then
 * keeps the batch and "made", which hold what is known by then. 0, or -1 as above. */
int everdeck_begin_first(struct batch *batch, struct made *made, struct under_way **lone_slot)
{
    struct under_way *slot = malloc(sizeof *slot);
    char *texts = batch->texts, *notes = batch->notes;
    *lone_slot = slot;
    if (!slot)
        return -1;
    /* Which signals we ignore is not asked for one alone: it sets all of them itself, while we go on. */
    begin_start(batch, 0, &texts, &notes, slot, made, NULL);
    return 0;
}

/* Wait until it is exec'ed or refused. */
void everdeck_end_first(struct batch *batch, struct under_way *slot)
{
    end_birth(batch, slot);
    free(slot);
}
