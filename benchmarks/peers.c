/* The C side of the benchmarks: the limits that lkv is compared with, in loops, so that no call overhead is measured. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "lkv.h"

/* One slot of one layer: rows of `bytes` at `to`, of the storage `buffer`. */
struct place {
  char *to;
  const char *from;
  size_t bytes;
  lkv_buffer *buffer;
};

void copy_tokens(const struct place *places, long n_places, long row, long tokens) {
  for (long t = row; t < row + tokens; t++)
    for (const struct place *p = places; p < places + n_places; p++) memcpy(p->to + t * p->bytes, p->from, p->bytes);
}

int copy_tokens_leased(const lkv_api *api, const struct place *places, long n_places, long row, long tokens) {
  for (long t = row; t < row + tokens; t++) {
    lkv_lease *lease;
    if (api->lease_acquire(places->buffer, LKV_WRITE, t, t + 1, LKV_TRY, &lease)) return -1;
    for (const struct place *p = places; p < places + n_places; p++) memcpy(p->to + t * p->bytes, p->from, p->bytes);
    api->lease_release(lease);
  }
  return 0;
}

int write_host_tokens(const lkv_api *api, const struct place *places, long n_places, long row, long tokens) {
  for (long t = row; t < row + tokens; t++)
    for (const struct place *p = places; p < places + n_places; p++) {
      lkv_lease *lease;
      if (api->lease_acquire(p->buffer, LKV_WRITE, t, t + 1, LKV_TRY, &lease)) return -1;
      if (api->write_host(lease, 0, p->from, p->bytes)) return -1;
      api->lease_release(lease);
    }
  return 0;
}

void copy_slab(const struct place *places, long n_places, long row, long rows) {
  for (const struct place *p = places; p < places + n_places; p++)
    memcpy(p->to + row * p->bytes, p->from, (size_t)rows * p->bytes);
}

int write_host_slab(const lkv_api *api, const struct place *places, long n_places, long row, long rows) {
  for (const struct place *p = places; p < places + n_places; p++) {
    lkv_lease *lease;
    if (api->lease_acquire(p->buffer, LKV_WRITE, row, row + rows, LKV_TRY, &lease)) return -1;
    if (api->write_host(lease, 0, p->from, (size_t)rows * p->bytes)) return -1;
    api->lease_release(lease);
  }
  return 0;
}

/* ---- locks, uncontended ---- */

static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void rwlock_pairs(long n, int write) {
  for (long i = 0; i < n; i++) {
    if (write)
      pthread_rwlock_wrlock(&rwlock);
    else
      pthread_rwlock_rdlock(&rwlock);
    pthread_rwlock_unlock(&rwlock);
  }
}

void mutex_pairs(long n) {
  for (long i = 0; i < n; i++) {
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
  }
}

int lease_pairs(const lkv_api *api, lkv_buffer *buffer, long n, int write) {
  for (long i = 0; i < n; i++) {
    lkv_lease *lease;
    if (api->lease_acquire(buffer, write ? LKV_WRITE : LKV_READ, 0, 1, LKV_TRY, &lease)) return -1;
    api->lease_release(lease);
  }
  return 0;
}
