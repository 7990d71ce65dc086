// Threads that share the items of one call: part of attention/rows.c and geometry/bend.c, each of which has its own.
//
// Items are taken one by one from a counter, and a call ends when all of them are done, not when all threads have come: one that
// was asked and has not been given a core yet holds nothing, and nobody waits for it. Whoever has to wait spins for some
// microseconds and then sleeps, because an idle core is what makes the scheduler fetch a thread that waits elsewhere.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#define HELPERS 63
#define SPINS 2000 /* some 20 µs */

typedef void (*Work)(void *of, int64_t item);

static struct {
    pthread_mutex_t one;  /* held by the call that has the helpers; another one at the same time works alone */
    pthread_mutex_t lock; /* of all below but `next` and `calls` */
    pthread_cond_t asked, left;
    Work work;
    void *of;
    int64_t items;
    int open, wanted, born, asleep;
    atomic_int inside;
    _Atomic int64_t next;
    atomic_uint calls;
} crew = {.one = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .asked = PTHREAD_COND_INITIALIZER,
          .left = PTHREAD_COND_INITIALIZER};

static void take_items(Work work, void *of, int64_t items) {
    for (int64_t i; (i = atomic_fetch_add(&crew.next, 1)) < items;) work(of, i);
}

static void *help(void *unused) {
    (void)unused;
    unsigned seen = 0;
    for (;;) {
        for (int n = 0; n < SPINS && atomic_load(&crew.calls) == seen; n++) _mm_pause();
        pthread_mutex_lock(&crew.lock);
        while (!crew.open || !crew.wanted) {
            crew.asleep++;
            pthread_cond_wait(&crew.asked, &crew.lock);
            crew.asleep--;
        }
        crew.wanted--;
        seen = atomic_load(&crew.calls);
        atomic_fetch_add(&crew.inside, 1);
        Work work = crew.work;
        void *of = crew.of;
        int64_t items = crew.items;
        pthread_mutex_unlock(&crew.lock);
        take_items(work, of, items);
        leave_room();
        pthread_mutex_lock(&crew.lock);
        if (atomic_fetch_sub(&crew.inside, 1) == 1) pthread_cond_signal(&crew.left);
        pthread_mutex_unlock(&crew.lock);
    }
    return 0;
}

// A forked child has none of the threads, and locks in whatever state they were.
static void forget_helpers(void) {
    pthread_mutex_init(&crew.one, 0);
    pthread_mutex_init(&crew.lock, 0);
    pthread_cond_init(&crew.asked, 0);
    pthread_cond_init(&crew.left, 0);
    crew.open = crew.wanted = crew.born = crew.asleep = 0;
    atomic_store(&crew.inside, 0);
}

static void watch_forks(void) { pthread_atfork(0, 0, forget_helpers); }

static void have_helpers(int count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (crew.born >= count) return;
    // Signals are for the threads that the program knows.
    sigset_t all, before;
    pthread_attr_t apart;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&apart);
    pthread_attr_setdetachstate(&apart, PTHREAD_CREATE_DETACHED);
    for (pthread_t t; crew.born < count && !pthread_create(&t, &apart, help, 0); crew.born++) continue;
    pthread_attr_destroy(&apart);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

// work(of, i) for each i below `items`, by at most so many threads; all are done when it returns.
static void share(Work work, void *of, int64_t items, int threads) {
    int helpers = threads - 1 < HELPERS ? threads - 1 : HELPERS;
    if (helpers > items - 1) helpers = (int)(items - 1);
    if (helpers < 1 || pthread_mutex_trylock(&crew.one)) {
        for (int64_t i = 0; i < items; i++) work(of, i);
        return;
    }
    have_helpers(helpers);
    pthread_mutex_lock(&crew.lock);
    crew.work = work, crew.of = of, crew.items = items;
    atomic_store(&crew.next, 0);
    crew.open = 1, crew.wanted = helpers;
    atomic_fetch_add(&crew.calls, 1);
    if (crew.asleep) pthread_cond_broadcast(&crew.asked);
    pthread_mutex_unlock(&crew.lock);
    take_items(work, of, items);
    for (int n = 0; n < SPINS && atomic_load(&crew.inside); n++) _mm_pause();
    pthread_mutex_lock(&crew.lock);
    crew.open = crew.wanted = 0;
    while (atomic_load(&crew.inside)) pthread_cond_wait(&crew.left, &crew.lock);
    pthread_mutex_unlock(&crew.lock);
    pthread_mutex_unlock(&crew.one);
}
