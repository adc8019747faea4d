/* A simulated CUDA runtime in host memory: a test fixture, never part of the library.
 *
 * The functions that CuPy calls for memory, streams and events, with the names, arguments and status codes of NVIDIA's
 * "CUDA Runtime API" reference. No CUDA header, no driver, no NVIDIA code. What it shows that a plain stand-in by
 * malloc and memcpy would not:
 *   - a device address faults when the host touches it: the bytes are in another mapping (memory.c);
 *   - every device range is checked for its bounds and its life; fresh memory is 0xCC, no address is used twice;
 *   - work is queued, and runs as early (EAGER), as late (LAZY) or as oddly (RANDOM, seeded) as CUDA allows (streams.c);
 *   - any call can be made to fail, and all calls are counted (faults.c).
 */
#ifndef CUDASIM_H
#define CUDASIM_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  OK = 0,
  E_INVALID_VALUE = 1,
  E_NOMEM = 2,
  E_INITIALIZATION = 3,
  E_NO_DEVICE = 100,
  E_BAD_DEVICE = 101,
  E_BAD_HANDLE = 400,
  E_NOT_READY = 600,
  E_ILLEGAL_ADDRESS = 700,
  E_PEER_ALREADY = 704,
  E_PEER_NOT_ENABLED = 705,
  E_ALREADY_REGISTERED = 712,
  E_NOT_REGISTERED = 713,
  E_LAUNCH_FAILURE = 719,
  E_NOT_SUPPORTED = 801
};

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS }; /* cudaMemcpyKind */
enum { UNREGISTERED, PINNED_HOST, ON_DEVICE, MANAGED };                              /* cudaMemoryType */
enum { EAGER, LAZY, RANDOM };
enum { MOST_DEVICES = 16 };

/* ---- faults.c: what every entry point begins and ends with ---- */

typedef struct Api {
  const char *name;
  uint64_t calls;
  long fail_at; /* the call, counted from now, that fails; 0: none */
  int fail_with;
  struct Api *next;
} Api;

extern pthread_mutex_t sim_lock; /* guards everything but what is thread-local */
extern pthread_cond_t sim_progress;
extern uint64_t sim_calls;       /* of all entry points */
extern int sim_devices, sim_mode, sim_can_peer;
extern int sim_pageable_async; /* pageable host memory is read and written late, as where the GPU can page it */
extern int sim_sticky;         /* the error that every call returns once the context is lost */
extern __thread int sim_device;

Api *api_named(const char *name);
int api_enter(Api *api); /* takes the lock, unless it returns an error */
int leave(int error);    /* gives the lock back */
int keep_error(int error);
void *must_alloc(void *old, size_t nbytes);
uint64_t random_next(void);

#define ENTER(name)                              \
  do {                                           \
    static Api *api;                             \
    pthread_mutex_lock(&sim_lock);               \
    if (!api) api = api_named(name);             \
    int entered = api_enter(api);                \
    if (entered) return leave(entered);          \
  } while (0)

/* ---- memory.c ---- */

typedef struct Range {
  uintptr_t address;
  size_t size, mapped, charged;
  uint8_t *bytes; /* where the content is: for device memory, not at `address` */
  int device, type, live, owned;
} Range;

Range *range_at(const void *p);      /* holds p, one past the end included, live or not */
Range *live_range_at(const void *p); /* holds p and is live */
/* The bytes behind [p, p + n), host memory as it is; NULL when they are not in one live range. */
uint8_t *resolve(const void *p, size_t n, int *type, int *device);
int allocate(void **out, size_t nbytes, int type);
int allocate_pinned(void **out, size_t nbytes);
int register_host(void *p, size_t nbytes);
int release(void *p);
int release_pinned(void *p);
int unregister_host(void *p);
size_t memory_total(int device), memory_used(int device), memory_peak(int device);
void memory_limit(int device, size_t nbytes);
int live_allocations(void);

/* ---- streams.c ---- */

typedef struct Stream Stream;
typedef struct Event Event;

typedef struct Dependency {
  Stream *stream;
  uint64_t ticket;
} Dependency;

typedef struct Op {
  enum { COPY, SET, RECORD, WAIT, HOST_FUNCTION, CALLBACK, FREE } kind;
  uint8_t *dst;
  const uint8_t *src;
  size_t dst_pitch, src_pitch, width, height;
  int value;
  void *staged; /* the source, taken when the call was made */
  Event *event;
  void (*function)(void *);
  void (*callback)(void *, int, void *);
  void *argument, *user_stream;
  int n_dependencies;
  Dependency *dependencies;
  struct Op *next;
} Op;

struct Stream {
  uint32_t magic;
  int device, nonblocking, priority, legacy, running;
  unsigned flags;
  uint64_t enqueued, done; /* tickets */
  Op *head, *tail;
  Stream *next;
};

struct Event {
  uint32_t magic;
  int device, timing;
  Stream *stream; /* of the last record */
  uint64_t ticket;
  struct timespec when;
};

Stream *stream_new(int device, unsigned flags, int priority);
Stream *stream_of(void *handle); /* NULL: no live stream */
Event *event_new(unsigned flags);
Event *event_of(void *handle);
uint64_t enqueue(Stream *stream, Op op);
void depend(Op *op, Stream *stream, uint64_t ticket);
void run_until(Stream *stream, uint64_t ticket);
void run_legacy(Stream *stream); /* what the legacy default stream waits for */
void run_device(int device);     /* negative: all */
int pending_ops(void);

/* ---- copies.c ---- */

int copy(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, int kind,
         Stream *stream, int blocking);
int fill(void *p, int value, size_t nbytes, Stream *stream);
void copy_rows(uint8_t *dst, size_t dst_pitch, const uint8_t *src, size_t src_pitch, size_t width, size_t height);

#endif
