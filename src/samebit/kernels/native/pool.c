// A small thread pool: the caller takes part, helpers claim tasks one by one. A helper that the system does not run delays
// nobody but the task it holds. Helpers spin for some microseconds, then sleep. Knows nothing of kernels.
#define _GNU_SOURCE
#include "simd.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MAX_HELPERS 255
#define SPINS 1000

static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER, sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_ulong generation, open_generation;
static atomic_long next_task;
static atomic_int working, sleeping;
static task_t job;
static void *job_context;
static long job_count;
static int job_helpers, helpers;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

static void claim_tasks(void) {
  for (long i; (i = atomic_fetch_add(&next_task, 1)) < job_count;) job(job_context, i);
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
    if (atomic_load(&open_generation) == seen && me < job_helpers) claim_tasks();
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
    if (pthread_create(&thread, NULL, help, (void *)(intptr_t)helpers)) return;
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
  job_helpers = threads - 1 < count - 1 ? threads - 1 : (int)(count - 1);
  atomic_store(&next_task, 0);
  unsigned long current = atomic_load(&generation) + 1;
  atomic_store(&open_generation, current);
  atomic_store(&generation, current);
  if (atomic_load(&sleeping)) {
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
  }
  claim_tasks();
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
