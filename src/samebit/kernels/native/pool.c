// A small thread pool: the caller takes part, tasks are claimed one by one. A thread that the system does not run delays
// nobody but the task it holds. Each thread begins with its own share of the tasks and then helps with the others', so that
// step by step it meets the same weights and pages in its caches. Helpers spin for a while, then sleep. Knows no kernel.
#define _GNU_SOURCE
#include "simd.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MAX_THREADS 256
#define SPINS 10000        // of a helper, up to 0.5 ms: it stays at hand between the kernels of a step
#define CALLER_SPINS 1000  // then it makes room, in case the helper it waits for is queued behind it
#define OWN_LINE _Alignas(64)

static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER, sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
// A share is the next task and the end of its tasks in one word, so that a claim is never of a job that is over. Who has
// claimed a task may read the job: it stays until all its tasks are done.
static struct { OWN_LINE _Atomic uint64_t next_and_end; } shares[MAX_THREADS];
static OWN_LINE atomic_ulong generation;
static task_t job;
static void *job_context;
static atomic_int job_threads;
static int helpers;
static OWN_LINE atomic_long done;
static OWN_LINE atomic_int sleeping;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

static uint64_t share_word(long next, long end) { return (uint64_t)next << 32 | (uint64_t)end; }

static void run_tasks(int me) {
  for (int n = 0, threads = atomic_load(&job_threads); n < threads; n++) {
    _Atomic uint64_t *share = &shares[(me + n) % threads].next_and_end;
    for (uint64_t word = atomic_load(share); word >> 32 < (uint32_t)word;)
      if (atomic_compare_exchange_weak(share, &word, word + share_word(1, 0))) {
        job(job_context, (long)(word >> 32));
        atomic_fetch_add(&done, 1);
        word = atomic_load(share);
      }
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
    run_tasks(me);
  }
  return NULL;
}

static void after_fork(void) {  // threads do not survive a fork
  helpers = 0;
  atomic_store(&sleeping, 0);
  pthread_mutex_init(&caller_lock, NULL);
  pthread_mutex_init(&sleep_lock, NULL);
  pthread_cond_init(&wake, NULL);
}

static void start_helpers(int wanted) {
  static int registered;
  if (!registered) registered = !pthread_atfork(NULL, NULL, after_fork);
  while (helpers < wanted && helpers < MAX_THREADS - 1) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(helpers + 1))) return;
    pthread_detach(thread);
    helpers++;
  }
}

_Thread_local long launches;
long num_launches(void) { return launches; }

void pool_run(task_t task, void *context, long count, int threads) {
  if (threads < 2 || count < 2 || pthread_mutex_trylock(&caller_lock)) {
    for (long i = 0; i < count; i++) task(context, i);
    return;
  }
  if (threads > count) threads = (int)count;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  start_helpers(threads - 1);
  job = task, job_context = context;
  atomic_store(&done, 0);
  atomic_store(&job_threads, threads);
  for (long s = 0; s < threads; s++)
    atomic_store(&shares[s].next_and_end, share_word(count * s / threads, count * (s + 1) / threads));
  atomic_fetch_add(&generation, 1);
  if (atomic_load(&sleeping)) {
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
  }
  run_tasks(0);
  for (int i = 0; atomic_load(&done) < count; i++)
    if (i < CALLER_SPINS) relax(); else sched_yield();
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
