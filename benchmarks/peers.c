/* The C side of the benchmarks: the limits that lkv is compared with, in loops, so that no call overhead is measured. */
#include <string.h>

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

/* Slabs one behind the other, so many times `rows` rows. */
void copy_slabs(const struct place *places, long n_places, long row, long rows, long slabs) {
  for (long at = row; at < row + slabs * rows; at += rows)
    for (const struct place *p = places; p < places + n_places; p++)
      memcpy(p->to + at * p->bytes, p->from, (size_t)rows * p->bytes);
}

int write_host_slabs(const lkv_api *api, const struct place *places, long n_places, long row, long rows, long slabs) {
  for (long at = row; at < row + slabs * rows; at += rows)
    for (const struct place *p = places; p < places + n_places; p++) {
      lkv_lease *lease;
      if (api->lease_acquire(p->buffer, LKV_WRITE, at, at + rows, LKV_TRY, &lease)) return -1;
      if (api->write_host(lease, 0, p->from, (size_t)rows * p->bytes)) return -1;
      api->lease_release(lease);
    }
  return 0;
}
