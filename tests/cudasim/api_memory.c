/* Entry points: allocation, copies, fills, and the stream-ordered allocator. */
#include "sim.h"

EXPORT int cudaMemGetInfo(size_t *out_free, size_t *out_total) {
  ENTER("cudaMemGetInfo");
  *out_total = memory_total(sim_device);
  *out_free = *out_total > memory_used(sim_device) ? *out_total - memory_used(sim_device) : 0;
  return leave(OK);
}

EXPORT int cudaMalloc(void **out, size_t nbytes) {
  ENTER("cudaMalloc");
  return leave(allocate(out, nbytes, ON_DEVICE));
}

EXPORT int cudaMallocManaged(void **out, size_t nbytes, unsigned flags) {
  (void)flags;
  ENTER("cudaMallocManaged");
  return leave(allocate(out, nbytes, MANAGED));
}

EXPORT int cudaFree(void *p) {
  ENTER("cudaFree");
  if (!p) return leave(OK);
  run_device(-1);
  return leave(release(p));
}

EXPORT int cudaHostAlloc(void **out, size_t nbytes, unsigned flags) {
  (void)flags;
  ENTER("cudaHostAlloc");
  return leave(allocate_pinned(out, nbytes));
}

EXPORT int cudaFreeHost(void *p) {
  ENTER("cudaFreeHost");
  return leave(p ? release_pinned(p) : OK);
}

EXPORT int cudaHostRegister(void *p, size_t nbytes, unsigned flags) {
  (void)flags;
  ENTER("cudaHostRegister");
  return leave(register_host(p, nbytes));
}

EXPORT int cudaHostUnregister(void *p) {
  ENTER("cudaHostUnregister");
  return leave(unregister_host(p));
}

EXPORT int cudaPointerGetAttributes(void *out, const void *p) {
  struct {
    int type, device;
    void *device_pointer, *host_pointer;
  } *attributes = out; /* CUDA 13 has reserved words behind these */
  ENTER("cudaPointerGetAttributes");
  const Range *range = range_at(p);
  if (!range || !range->live || (uintptr_t)p >= range->address + range->size) {
    attributes->type = UNREGISTERED;
    attributes->device = -2;
    attributes->device_pointer = NULL;
    attributes->host_pointer = range && range->type != PINNED_HOST ? NULL : (void *)p;
    return leave(OK);
  }
  attributes->type = range->type;
  attributes->device = range->device;
  attributes->device_pointer = (void *)p;
  attributes->host_pointer = range->type == ON_DEVICE ? NULL : (void *)p;
  return leave(OK);
}

/* ---- copies and fills ---- */

EXPORT int cudaMemcpy(void *dst, const void *src, size_t n, int kind) {
  ENTER("cudaMemcpy");
  return leave(copy(dst, n, src, n, n, 1, kind, stream_of(NULL), 1));
}

EXPORT int cudaMemcpyAsync(void *dst, const void *src, size_t n, int kind, void *stream) {
  ENTER("cudaMemcpyAsync");
  return leave(copy(dst, n, src, n, n, 1, kind, stream_of(stream), 0));
}

EXPORT int cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                        int kind) {
  ENTER("cudaMemcpy2D");
  return leave(copy(dst, dst_pitch, src, src_pitch, width, height, kind, stream_of(NULL), 1));
}

EXPORT int cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                             size_t height, int kind, void *stream) {
  ENTER("cudaMemcpy2DAsync");
  return leave(copy(dst, dst_pitch, src, src_pitch, width, height, kind, stream_of(stream), 0));
}

static int on_device(const void *p, size_t n, int device) {
  int type, real;
  if (device < 0 || device >= sim_devices) return E_BAD_DEVICE;
  return resolve(p, n, &type, &real) && type != UNREGISTERED && real == device ? OK : E_INVALID_VALUE;
}

static int copy_peer(void *dst, int dst_device, const void *src, int src_device, size_t n, void *stream, int blocking) {
  int error = on_device(dst, n, dst_device);
  if (!error) error = on_device(src, n, src_device);
  return error ? error : copy(dst, n, src, n, n, 1, DEVICE_TO_DEVICE, stream_of(stream), blocking);
}

EXPORT int cudaMemcpyPeer(void *dst, int dst_device, const void *src, int src_device, size_t n) {
  ENTER("cudaMemcpyPeer");
  return leave(copy_peer(dst, dst_device, src, src_device, n, NULL, 1));
}

EXPORT int cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device, size_t n, void *stream) {
  ENTER("cudaMemcpyPeerAsync");
  return leave(copy_peer(dst, dst_device, src, src_device, n, stream, 0));
}

EXPORT int cudaMemset(void *p, int value, size_t n) {
  ENTER("cudaMemset");
  return leave(fill(p, value, n, stream_of(NULL)));
}

EXPORT int cudaMemsetAsync(void *p, int value, size_t n, void *stream) {
  ENTER("cudaMemsetAsync");
  return leave(fill(p, value, n, stream_of(stream)));
}

/* ---- the stream-ordered allocator: usable at once, the free takes its place in the stream ---- */

enum { POOL_OF_DEVICE_0 = 0x1000, RELEASE_THRESHOLD = 4, RESERVED_HIGH = 6, USED_HIGH = 8 };

static uint64_t release_threshold[MOST_DEVICES];

EXPORT int cudaMallocAsync(void **out, size_t nbytes, void *stream) {
  ENTER("cudaMallocAsync");
  return leave(stream_of(stream) ? allocate(out, nbytes, ON_DEVICE) : E_BAD_HANDLE);
}

EXPORT int cudaMallocFromPoolAsync(void **out, size_t nbytes, void *pool, void *stream) {
  (void)pool;
  ENTER("cudaMallocFromPoolAsync");
  return leave(stream_of(stream) ? allocate(out, nbytes, ON_DEVICE) : E_BAD_HANDLE);
}

EXPORT int cudaFreeAsync(void *p, void *handle) {
  ENTER("cudaFreeAsync");
  Stream *stream = stream_of(handle);
  const Range *range = live_range_at(p);
  if (!stream) return leave(E_BAD_HANDLE);
  if (!range || range->address != (uintptr_t)p) return leave(E_INVALID_VALUE);
  enqueue(stream, (Op){.kind = FREE, .dst = p});
  return leave(sim_sticky);
}

EXPORT int cudaDeviceGetDefaultMemPool(void **pool, int device) {
  *pool = (void *)(uintptr_t)(POOL_OF_DEVICE_0 + device);
  return OK;
}

EXPORT int cudaDeviceGetMemPool(void **pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }

EXPORT int cudaDeviceSetMemPool(int device, void *pool) {
  (void)device;
  (void)pool;
  return OK;
}

EXPORT int cudaMemPoolCreate(void **pool, const void *properties) {
  return cudaDeviceGetDefaultMemPool(pool, ((const int *)properties)[3]);
}

EXPORT int cudaMemPoolDestroy(void *pool) {
  (void)pool;
  return OK;
}

EXPORT int cudaMemPoolTrimTo(void *pool, size_t keep) {
  (void)pool;
  (void)keep;
  return OK;
}

EXPORT int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  const int device = (int)(((uintptr_t)pool - POOL_OF_DEVICE_0) % MOST_DEVICES);
  if (attribute < RELEASE_THRESHOLD)
    *(int *)value = 1;
  else if (attribute == RELEASE_THRESHOLD)
    *(uint64_t *)value = release_threshold[device];
  else
    *(uint64_t *)value =
        attribute == RESERVED_HIGH || attribute == USED_HIGH ? memory_peak(device) : memory_used(device);
  return OK;
}

EXPORT int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
  const int device = (int)(((uintptr_t)pool - POOL_OF_DEVICE_0) % MOST_DEVICES);
  if (attribute == RELEASE_THRESHOLD) release_threshold[device] = *(uint64_t *)value;
  return OK;
}
