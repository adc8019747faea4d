/* Streams: queues of work that run when somebody waits, or earlier, as the schedule says. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static const uint32_t stream_magic = 0x53545231u, event_magic = 0x45564e31u;

static Stream *streams, *legacy_of[MOST_DEVICES];
static __thread Stream *per_thread[MOST_DEVICES];

Stream *stream_new(int device, unsigned flags, int priority) {
  Stream *stream = must_alloc(NULL, sizeof *stream);
  stream->magic = stream_magic;
  stream->device = device;
  stream->flags = flags;
  stream->nonblocking = flags & 1;
  stream->priority = priority;
  stream->next = streams;
  return streams = stream;
}

Stream *stream_of(void *handle) {
  const uintptr_t value = (uintptr_t)handle;
  if (value <= 1) { /* cudaStreamLegacy */
    Stream **legacy = &legacy_of[sim_device];
    if (!*legacy) {
      *legacy = stream_new(sim_device, 0, 0);
      (*legacy)->legacy = 1;
    }
    return *legacy;
  }
  if (value == 2) { /* cudaStreamPerThread */
    Stream **own = &per_thread[sim_device];
    if (!*own) *own = stream_new(sim_device, 0, 0);
    return *own;
  }
  for (Stream *stream = streams; stream; stream = stream->next)
    if (stream == handle) return stream->magic == stream_magic ? stream : NULL;
  return NULL;
}

Event *event_new(unsigned flags) {
  Event *event = must_alloc(NULL, sizeof *event);
  event->magic = event_magic;
  event->device = sim_device;
  event->timing = !(flags & 2);
  return event;
}

Event *event_of(void *handle) {
  Event *event = handle;
  return event && event->magic == event_magic ? event : NULL;
}

static void run_copy(const Op *op) {
  int type, device;
  const size_t dst_bytes = (op->height - 1) * op->dst_pitch + op->width;
  const size_t src_bytes = (op->height - 1) * op->src_pitch + op->width;
  uint8_t *dst = resolve(op->dst, dst_bytes, &type, &device);
  const uint8_t *src = op->staged ? op->staged : resolve(op->src, src_bytes, &type, &device);
  if (dst && src)
    copy_rows(dst, op->dst_pitch, src, op->src_pitch, op->width, op->height);
  else
    sim_sticky = E_ILLEGAL_ADDRESS;
}

static void run_set(const Op *op) {
  int type, device;
  uint8_t *dst = resolve(op->dst, op->width, &type, &device);
  if (dst)
    memset(dst, op->value, op->width);
  else
    sim_sticky = E_ILLEGAL_ADDRESS;
}

static void run(const Op *op) {
  for (int i = 0; i < op->n_dependencies; i++) run_until(op->dependencies[i].stream, op->dependencies[i].ticket);
  switch (op->kind) {
    case COPY:
      run_copy(op);
      break;
    case SET:
      run_set(op);
      break;
    case RECORD:
      clock_gettime(CLOCK_MONOTONIC, &op->event->when);
      break;
    case WAIT:
      break;
    case FREE:
      if (release(op->dst)) sim_sticky = E_ILLEGAL_ADDRESS;
      break;
    case HOST_FUNCTION:
    case CALLBACK: /* user code: not under the lock */
      pthread_mutex_unlock(&sim_lock);
      if (op->kind == HOST_FUNCTION)
        op->function(op->argument);
      else
        op->callback(op->user_stream, sim_sticky, op->argument);
      pthread_mutex_lock(&sim_lock);
      break;
  }
}

void run_until(Stream *stream, uint64_t ticket) {
  while (stream->done < ticket) {
    if (stream->running) {
      pthread_cond_wait(&sim_progress, &sim_lock);
      continue;
    }
    Op *op = stream->head;
    if (!op) return;
    stream->running = 1;
    run(op);
    stream->head = op->next;
    if (!stream->head) stream->tail = NULL;
    stream->done++;
    stream->running = 0;
    pthread_cond_broadcast(&sim_progress);
    free(op->dependencies);
    free(op->staged);
    free(op);
  }
}

void run_device(int device) {
  for (Stream *stream = streams; stream; stream = stream->next)
    if (device < 0 || stream->device == device) run_until(stream, stream->enqueued);
}

void run_legacy(Stream *stream) {
  for (Stream *other = streams; other; other = other->next)
    if (other->device == stream->device && !other->nonblocking) run_until(other, other->enqueued);
}

void depend(Op *op, Stream *stream, uint64_t ticket) {
  if (stream->done >= ticket) return;
  op->dependencies = must_alloc(op->dependencies, (size_t)(op->n_dependencies + 1) * sizeof *op->dependencies);
  op->dependencies[op->n_dependencies++] = (Dependency){stream, ticket};
}

/* The legacy default stream waits for the blocking streams of its device, and they for it. */
static void depend_on_legacy(Op *op, const Stream *stream) {
  Stream *legacy = legacy_of[stream->device];
  if (stream->legacy) {
    for (Stream *other = streams; other; other = other->next)
      if (other != stream && other->device == stream->device && !other->nonblocking) depend(op, other, other->enqueued);
  } else if (!stream->nonblocking && legacy) {
    depend(op, legacy, legacy->enqueued);
  }
}

static void run_some(void) {
  for (Stream *stream = streams; stream; stream = stream->next)
    for (uint64_t steps = random_next() % 3; steps && stream->done < stream->enqueued && !stream->running; steps--)
      run_until(stream, stream->done + 1);
}

uint64_t enqueue(Stream *stream, Op op) {
  Op *queued = must_alloc(NULL, sizeof *queued);
  *queued = op;
  queued->next = NULL;
  depend_on_legacy(queued, stream);
  if (stream->tail)
    stream->tail->next = queued;
  else
    stream->head = queued;
  stream->tail = queued;
  const uint64_t ticket = ++stream->enqueued;
  if (sim_mode == EAGER)
    run_until(stream, ticket);
  else if (sim_mode == RANDOM && random_next() % 2)
    run_some();
  return ticket;
}

int pending_ops(void) {
  int count = 0;
  for (const Stream *stream = streams; stream; stream = stream->next) count += (int)(stream->enqueued - stream->done);
  return count;
}

/* ---- for the tests ---- */

EXPORT int cudasim_pending(void) {
  pthread_mutex_lock(&sim_lock);
  const int count = pending_ops();
  pthread_mutex_unlock(&sim_lock);
  return count;
}
