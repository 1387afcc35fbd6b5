/* A clock that runs faster, and can be set, for one program: LD_PRELOAD it with EVERDECK_FAST_CLOCK=FILE.
 *
 * The file holds, as text: when it began on the real clock and on the monotonic one (ns), the rate, and what is added
 * to the wall clock (ns). It is read at each question, so a test can set the clock of a program that runs, and a program
 * that is started again goes on where the last one was. Waiting is shortened by the same rate. CLOCK_BOOTTIME is left
 * alone: leases between processes are counted in it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>

typedef int (*gettime_t)(clockid_t, struct timespec *);
typedef int (*wait_t)(int, struct epoll_event *, int, int);

static int told(long long *wall, long long *mono, double *rate, long long *added) {
    const char *path = getenv("EVERDECK_FAST_CLOCK");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file) return 0;
    int found = fscanf(file, "%lld %lld %lf %lld", wall, mono, rate, added);
    fclose(file);
    return found == 4;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static gettime_t real;
    if (!real) real = (gettime_t)dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    long long wall, mono, added;
    double rate;
    if (result != 0 || (clock != CLOCK_REALTIME && clock != CLOCK_MONOTONIC) || !told(&wall, &mono, &rate, &added))
        return result;
    long long began = clock == CLOCK_REALTIME ? wall : mono;
    long long now = at->tv_sec * 1000000000LL + at->tv_nsec;
    now = began + (long long)((double)(now - began) * rate) + (clock == CLOCK_REALTIME ? added : 0);
    at->tv_sec = now / 1000000000LL;
    at->tv_nsec = now % 1000000000LL;
    return 0;
}

int epoll_wait(int fd, struct epoll_event *events, int most, int milliseconds) {
    static wait_t real;
    if (!real) real = (wait_t)dlsym(RTLD_NEXT, "epoll_wait");
    long long wall, mono, added;
    double rate;
    if (milliseconds > 0 && told(&wall, &mono, &rate, &added))
        milliseconds = (int)((double)milliseconds / rate) + 1;
    return real(fd, events, most, milliseconds);
}
