// A small thread pool: the caller takes part, tasks are claimed one by one. A thread that the system does not run delays
// nobody but the task it holds. Each thread begins with its own share of the tasks and then helps with the others', so that
// step by step it meets the same weights and pages in its caches. Helpers spin for a while, then sleep. Knows no kernel.
#define _GNU_SOURCE
#include "simd.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MAX_HELPERS 255
#define SPINS 10000  // some 100 us: a helper stays at hand between the kernels of a step
#define OWN_LINE _Alignas(64)

static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER, sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
// The job is written by the caller and read by helpers; the counters that both write have lines of their own.
static OWN_LINE atomic_ulong generation;
static atomic_ulong open_generation;
static task_t job;
static void *job_context;
static long job_count;
static int job_threads, helpers;
static struct { OWN_LINE atomic_long next; } shares[MAX_HELPERS + 1];
static OWN_LINE atomic_int working;
static OWN_LINE atomic_int sleeping;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

static long share_start(int share) { return job_count * share / job_threads; }

static void claim_tasks(int me) {
  for (int n = 0; n < job_threads; n++) {
    int share = (me + n) % job_threads;
    long end = share_start(share + 1);
    for (long i; (i = atomic_fetch_add(&shares[share].next, 1)) < end;) job(job_context, i);
  }
}

static void *help(void *argument) {
  int me = (int)(intptr_t)argument;
  for (unsigned long seen = 0;;) {
    for (int i = 0; i < SPINS && atomic_load(&generation) == seen; i++) relax();
    if (atomic_load(&generation) == seen) {
      pthread_mutex_lock(&sleep_lock);
      atomic_fetch_add(&sleeping, 1);
      while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &sleep_lock);
      atomic_fetch_sub(&sleeping, 1);
      pthread_mutex_unlock(&sleep_lock);
    }
    seen = atomic_load(&generation);
    // Join first, then look whether the job is still open: the caller closes first, then waits for those who joined.
    atomic_fetch_add(&working, 1);
    if (atomic_load(&open_generation) == seen && me < job_threads) claim_tasks(me);
    atomic_fetch_sub(&working, 1);
  }
  return NULL;
}

static void after_fork(void) {  // threads do not survive a fork
  helpers = 0;
  atomic_store(&working, 0);
  atomic_store(&sleeping, 0);
  pthread_mutex_init(&caller_lock, NULL);
  pthread_mutex_init(&sleep_lock, NULL);
  pthread_cond_init(&wake, NULL);
}

static void start_helpers(int wanted) {
  static int registered;
  if (!registered) registered = !pthread_atfork(NULL, NULL, after_fork);
  while (helpers < wanted && helpers < MAX_HELPERS) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(helpers + 1))) return;
    pthread_detach(thread);
    helpers++;
  }
}

void pool_run(task_t task, void *context, long count, int threads) {
  if (threads < 2 || count < 2 || pthread_mutex_trylock(&caller_lock)) {
    for (long i = 0; i < count; i++) task(context, i);
    return;
  }
  start_helpers(threads - 1);
  job = task, job_context = context, job_count = count;
  job_threads = threads < count ? threads : (int)count;
  if (job_threads > MAX_HELPERS + 1) job_threads = MAX_HELPERS + 1;
  for (int s = 0; s < job_threads; s++) atomic_store(&shares[s].next, share_start(s));
  unsigned long current = atomic_load(&generation) + 1;
  atomic_store(&open_generation, current);
  atomic_store(&generation, current);
  if (atomic_load(&sleeping)) {
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
  }
  claim_tasks(0);
  atomic_store(&open_generation, 0);
  for (int i = 0; atomic_load(&working); i++)
    if (i < SPINS) relax(); else sched_yield();
  pthread_mutex_unlock(&caller_lock);
}

void *scratch(int which, size_t bytes) {
  static _Thread_local struct { void *memory; size_t bytes; } held[4];
  if (held[which].bytes < bytes) {
    free(held[which].memory);
    held[which].bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    held[which].memory = aligned_alloc(64, held[which].bytes);
    if (!held[which].memory) abort();
  }
  return held[which].memory;
}
