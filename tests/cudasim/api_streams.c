/* Entry points: streams and events. */
#include "sim.h"

EXPORT int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
  ENTER("cudaStreamCreate");
  *out = stream_new(sim_device, flags, priority);
  return leave(OK);
}

EXPORT int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
EXPORT int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }

EXPORT int cudaStreamGetFlags(void *handle, unsigned *flags) {
  ENTER("cudaStreamGetFlags");
  const Stream *stream = stream_of(handle);
  if (!stream) return leave(E_BAD_HANDLE);
  *flags = stream->flags;
  return leave(OK);
}

EXPORT int cudaStreamGetPriority(void *handle, int *priority) {
  ENTER("cudaStreamGetPriority");
  const Stream *stream = stream_of(handle);
  if (!stream) return leave(E_BAD_HANDLE);
  *priority = stream->priority;
  return leave(OK);
}

/* What is queued still runs. */
EXPORT int cudaStreamDestroy(void *handle) {
  ENTER("cudaStreamDestroy");
  Stream *stream = (uintptr_t)handle > 2 ? stream_of(handle) : NULL;
  if (!stream) return leave(E_BAD_HANDLE);
  stream->magic = 0;
  return leave(OK);
}

EXPORT int cudaStreamSynchronize(void *handle) {
  ENTER("cudaStreamSynchronize");
  Stream *stream = stream_of(handle);
  if (!stream) return leave(E_BAD_HANDLE);
  if (stream->legacy) run_legacy(stream);
  run_until(stream, stream->enqueued);
  return leave(sim_sticky);
}

/* Asking makes no progress, but asking the same again does: a loop that polls must end. */
static int polled_again(const void *handle) {
  static const void *last;
  static uint64_t last_call;
  const int again = handle == last && sim_calls == last_call + 1;
  last = handle;
  last_call = sim_calls;
  return again || sim_mode != LAZY;
}

EXPORT int cudaStreamQuery(void *handle) {
  ENTER("cudaStreamQuery");
  Stream *stream = stream_of(handle);
  if (!stream) return leave(E_BAD_HANDLE);
  if (stream->done == stream->enqueued) return leave(sim_sticky);
  if (polled_again(handle) && !stream->running) run_until(stream, stream->done + 1);
  return leave(E_NOT_READY);
}

EXPORT int cudaStreamIsCapturing(void *handle, int *status) {
  (void)handle;
  *status = 0;
  return OK;
}

EXPORT int cudaLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
  ENTER("cudaLaunchHostFunc");
  Stream *stream = stream_of(handle);
  if (!stream) return leave(E_BAD_HANDLE);
  enqueue(stream, (Op){.kind = HOST_FUNCTION, .function = function, .argument = argument});
  return leave(OK);
}

EXPORT int cudaStreamAddCallback(void *handle, void (*callback)(void *, int, void *), void *argument, unsigned flags) {
  (void)flags;
  ENTER("cudaStreamAddCallback");
  Stream *stream = stream_of(handle);
  if (!stream) return leave(E_BAD_HANDLE);
  enqueue(stream, (Op){.kind = CALLBACK, .callback = callback, .argument = argument, .user_stream = handle});
  return leave(OK);
}

EXPORT int cudaEventCreateWithFlags(void **out, unsigned flags) {
  ENTER("cudaEventCreate");
  *out = event_new(flags);
  return leave(OK);
}

EXPORT int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

/* Kept as a tombstone: a queued record may still write to it. */
EXPORT int cudaEventDestroy(void *handle) {
  ENTER("cudaEventDestroy");
  Event *event = event_of(handle);
  if (!event) return leave(E_BAD_HANDLE);
  event->magic = 0;
  return leave(OK);
}

EXPORT int cudaEventRecord(void *handle, void *stream_handle) {
  ENTER("cudaEventRecord");
  Event *event = event_of(handle);
  Stream *stream = stream_of(stream_handle);
  if (!event || !stream || event->device != stream->device) return leave(E_BAD_HANDLE);
  event->stream = stream;
  event->ticket = stream->enqueued + 1;
  enqueue(stream, (Op){.kind = RECORD, .event = event});
  return leave(sim_sticky);
}

EXPORT int cudaEventQuery(void *handle) {
  ENTER("cudaEventQuery");
  Event *event = event_of(handle);
  if (!event) return leave(E_BAD_HANDLE);
  if (!event->stream || event->stream->done >= event->ticket) return leave(sim_sticky);
  if (polled_again(handle) && !event->stream->running) run_until(event->stream, event->stream->done + 1);
  return leave(E_NOT_READY);
}

EXPORT int cudaEventSynchronize(void *handle) {
  ENTER("cudaEventSynchronize");
  Event *event = event_of(handle);
  if (!event) return leave(E_BAD_HANDLE);
  if (event->stream) run_until(event->stream, event->ticket);
  return leave(sim_sticky);
}

EXPORT int cudaStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
  (void)flags;
  ENTER("cudaStreamWaitEvent");
  Event *event = event_of(handle);
  Stream *stream = stream_of(stream_handle);
  if (!event || !stream) return leave(E_BAD_HANDLE);
  Op op = {.kind = WAIT};
  if (event->stream) depend(&op, event->stream, event->ticket);
  enqueue(stream, op);
  return leave(sim_sticky);
}

EXPORT int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
  ENTER("cudaEventElapsedTime");
  const Event *a = event_of(from), *b = event_of(to);
  if (!a || !b || !a->timing || !b->timing || !a->stream || !b->stream || a->device != b->device)
    return leave(E_BAD_HANDLE);
  if (a->stream->done < a->ticket || b->stream->done < b->ticket) return leave(E_NOT_READY);
  *milliseconds = (float)(b->when.tv_sec - a->when.tv_sec) * 1e3f + (float)(b->when.tv_nsec - a->when.tv_nsec) / 1e6f;
  return leave(OK);
}
