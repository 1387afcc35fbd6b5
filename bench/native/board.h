/* The board: a file mapped by every worker and by the harness.
 *
 * A worker claims an entry with one atomic add, fills it, and publishes it with a second add.
 * Whoever reaches the harness's target wakes it through the futex on `published`, so the harness
 * sleeps in the kernel while the clock runs: it neither polls nor scans /proc.
 */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

enum kind { KIND_WORKER = 0, KIND_PLANTED = 1, KIND_DONE = 2 };

struct entry {
    uint64_t at_ns; /* CLOCK_MONOTONIC, the same clock in every process */
    int32_t pid;
    int32_t slot;
    int32_t kind;
    int32_t pad[3];
};

struct board {
    uint32_t published; /* futex word: entries that may be read */
    uint32_t next;      /* entries that were claimed */
    uint32_t target;    /* wake the harness when `published` gets here */
    uint32_t capacity;
    uint32_t pad[12];
    struct entry entries[];
};

#endif
