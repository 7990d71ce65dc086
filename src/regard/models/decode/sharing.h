// Work that threads share out among themselves, piece by piece: part of products.c.
//
// All threads walk through the same stages. Whoever comes takes the next piece of a stage; a stage is over when its pieces are done,
// not when everybody has come, so a thread that the system has put aside holds up only the piece it is at. Waiting is a short spin,
// then sleep, which leaves the core to whoever can use it.
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS 600 /* looks at a stage before sleep, about twenty microseconds */

typedef struct {
    _Alignas(64) _Atomic int64_t next;
    _Atomic int64_t done;
    _Atomic int over;
} Stage;

typedef struct {
    Stage *stages;
    _Alignas(64) _Atomic int sleepers;
    _Atomic int bell;
    _Atomic int64_t slept; /* nanoseconds, of all threads */
} Crew;

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// The first of the next pieces of a stage, or `total` and more where none is left.
INLINE int64_t next_of(Crew *c, int64_t stage, int64_t some) {
    return atomic_fetch_add_explicit(&c->stages[stage].next, some, memory_order_relaxed);
}

// True for who did the last piece: nobody else goes on until `end_of`.
INLINE int is_last(Crew *c, int64_t stage, int64_t some, int64_t total) {
    return atomic_fetch_add(&c->stages[stage].done, some) + some == total;
}

INLINE int is_over(Crew *c, int64_t stage) { return atomic_load_explicit(&c->stages[stage].over, memory_order_acquire); }

static void end_of(Crew *c, int64_t stage) {
    atomic_store(&c->stages[stage].over, 1);
    if (atomic_load(&c->sleepers)) {
        atomic_fetch_add(&c->bell, 1);
        syscall(SYS_futex, &c->bell, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
}

static void wait_for(Crew *c, int64_t stage) {
    for (int i = 0; i < SPINS; i++) {
        if (is_over(c, stage)) return;
        _mm_pause();
    }
    int64_t since = nanoseconds();
    atomic_fetch_add(&c->sleepers, 1);
    while (1) {
        int seen = atomic_load(&c->bell);
        if (atomic_load(&c->stages[stage].over)) break;
        syscall(SYS_futex, &c->bell, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    atomic_fetch_sub(&c->sleepers, 1);
    atomic_fetch_add(&c->slept, nanoseconds() - since);
}

// How many threads are worth having: where they slept for one another, the cores are taken by somebody else, and one alone is faster.
// After a while more are tried again, at longer and longer intervals while that finds the cores taken.
#define FEWEST 8
#define MOST_ALONE 256
static _Atomic int alone_for, alone_next = FEWEST;

static int crew_size(int threads) {
    if (threads <= 1) return 1;
    int left = atomic_load(&alone_for);
    while (left > 0)
        if (atomic_compare_exchange_weak(&alone_for, &left, left - 1)) return 1;
    return threads;
}

static void learn_crowding(int64_t slept, int64_t took, int threads) {
    if (threads <= 1) return;
    if (slept * 5 > took) {
        int next = atomic_load(&alone_next);
        atomic_store(&alone_for, next);
        atomic_store(&alone_next, next * 2 > MOST_ALONE ? MOST_ALONE : next * 2);
    } else
        atomic_store(&alone_next, FEWEST);
}
