/* Copies and fills: which of them wait for the host, and when host memory is read. */
#include "sim.h"

#include <string.h>

void copy_rows(uint8_t *dst, size_t dst_pitch, const uint8_t *src, size_t src_pitch, size_t width, size_t height) {
  for (size_t i = 0; i < height; i++) memmove(dst + i * dst_pitch, src + i * src_pitch, width);
}

static int right_direction(int kind, int dst_type, int src_type) {
  const int to = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE;
  const int from = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
  return (dst_type == MANAGED || to == (dst_type == ON_DEVICE)) &&
         (src_type == MANAGED || from == (src_type == ON_DEVICE));
}

int copy(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, int kind,
         Stream *stream, int blocking) {
  int dst_type, src_type, device;
  if (!width || !height) return OK;
  if (!stream) return E_BAD_HANDLE;
  if (kind < 0 || kind > BY_ADDRESS || dst_pitch < width || src_pitch < width) return E_INVALID_VALUE;
  const uint8_t *to = resolve(dst, (height - 1) * dst_pitch + width, &dst_type, &device);
  const uint8_t *from = resolve(src, (height - 1) * src_pitch + width, &src_type, &device);
  if (!to || !from || (kind != BY_ADDRESS && !right_direction(kind, dst_type, src_type))) return E_INVALID_VALUE;

  Op op = {.kind = COPY, .dst = dst, .src = src, .dst_pitch = dst_pitch, .src_pitch = src_pitch};
  op.width = width;
  op.height = height;
  const int to_host = dst_type == UNREGISTERED || dst_type == PINNED_HOST;
  const int from_host = src_type == UNREGISTERED || src_type == PINNED_HOST;
  int wait = 0;
  if (blocking) {
    wait = !(dst_type == ON_DEVICE && src_type == ON_DEVICE); /* between devices, cudaMemcpy does not wait either */
  } else if (to_host && from_host) {
    wait = 1;
  } else if (dst_type == UNREGISTERED) {
    wait = !sim_pageable_async;
  } else if (src_type == UNREGISTERED && !sim_pageable_async) {
    op.staged = must_alloc(NULL, width * height);
    op.src_pitch = width;
    copy_rows(op.staged, width, from, src_pitch, width, height);
  }
  const uint64_t ticket = enqueue(stream, op);
  if (wait) run_until(stream, ticket);
  return sim_sticky;
}

int fill(void *p, int value, size_t nbytes, Stream *stream) {
  int type, device;
  if (!nbytes) return OK;
  if (!stream) return E_BAD_HANDLE;
  if (!resolve(p, nbytes, &type, &device) || type == UNREGISTERED) return E_INVALID_VALUE;
  const uint64_t ticket = enqueue(stream, (Op){.kind = SET, .dst = p, .value = value, .width = nbytes, .height = 1});
  if (type == PINNED_HOST) run_until(stream, ticket);
  return sim_sticky;
}
