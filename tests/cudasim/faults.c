/* Entry points: counted, made to fail on request, dead once the context is lost. And the errors' names. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  int code;
  const char *name, *message;
} errors[] = {
    {OK, "cudaSuccess", "no error"},
    {E_INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {E_NOMEM, "cudaErrorMemoryAllocation", "out of memory"},
    {E_INITIALIZATION, "cudaErrorInitializationError", "initialization error"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {E_NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {E_BAD_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {E_BAD_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {E_NOT_READY, "cudaErrorNotReady", "device not ready"},
    {E_ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {E_PEER_ALREADY, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {E_PEER_NOT_ENABLED, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {E_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the range is already mapped"},
    {E_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {E_LAUNCH_FAILURE, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {E_NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {999, "cudaErrorUnknown", "unknown error"},
};

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sim_progress = PTHREAD_COND_INITIALIZER;
uint64_t sim_calls;
int sim_devices = 2, sim_mode = EAGER, sim_can_peer = 1, sim_pageable_async, sim_sticky;
__thread int sim_device;

static __thread int last_error;
static Api *apis;
static int in_use;
static uint64_t random_state = 1;
static char missing[4096];

/* CUDA does not survive a fork: in the child of a process that used it every call fails. */
static void after_fork(void) {
  if (in_use) sim_sticky = E_INITIALIZATION;
  pthread_mutex_init(&sim_lock, NULL);
  pthread_cond_init(&sim_progress, NULL);
}

static __attribute__((constructor)) void start(void) {
  const char *text;
  if ((text = getenv("CUDASIM_DEVICES"))) sim_devices = atoi(text);
  if (sim_devices < 0 || sim_devices > MOST_DEVICES) sim_devices = MOST_DEVICES;
  const size_t total = (text = getenv("CUDASIM_TOTAL")) ? strtoull(text, NULL, 0) : (size_t)64 << 20;
  for (int i = 0; i < MOST_DEVICES; i++) memory_limit(i, total);
  pthread_atfork(NULL, NULL, after_fork);
}

void *must_alloc(void *old, size_t nbytes) {
  void *p = realloc(old, nbytes);
  if (!p) abort();
  if (!old) memset(p, 0, nbytes);
  return p;
}

uint64_t random_next(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

Api *api_named(const char *name) {
  for (Api *api = apis; api; api = api->next)
    if (!strcmp(api->name, name)) return api;
  Api *api = must_alloc(NULL, sizeof *api);
  api->name = strdup(name);
  api->next = apis;
  return apis = api;
}

int api_enter(Api *api) {
  api->calls++;
  sim_calls++;
  in_use = 1;
  if (api->fail_at > 0 && --api->fail_at == 0) {
    if (api->fail_with == E_ILLEGAL_ADDRESS || api->fail_with == E_LAUNCH_FAILURE) sim_sticky = api->fail_with;
    return api->fail_with;
  }
  return sim_sticky;
}

int keep_error(int error) {
  if (error && error != E_NOT_READY) last_error = error;
  return error;
}

int leave(int error) {
  pthread_mutex_unlock(&sim_lock);
  return keep_error(error);
}

/* ---- the runtime's own functions for errors ---- */

EXPORT int cudaGetLastError(void) {
  const int error = last_error;
  last_error = OK;
  return error;
}

EXPORT int cudaPeekAtLastError(void) { return last_error; }

EXPORT const char *cudaGetErrorName(int error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == error) return errors[i].name;
  return "cudaErrorSimulated";
}

EXPORT const char *cudaGetErrorString(int error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == error) return errors[i].message;
  return "simulated error";
}

/* ---- for the tests ---- */

EXPORT void cudasim_set_mode(int mode, uint64_t seed) {
  pthread_mutex_lock(&sim_lock);
  run_device(-1);
  sim_mode = mode;
  random_state = seed * 2654435761u + 1;
  pthread_mutex_unlock(&sim_lock);
}

EXPORT void cudasim_set_devices(int count) { sim_devices = count; }
EXPORT void cudasim_set_peer(int on) { sim_can_peer = on; }
EXPORT void cudasim_set_pageable_async(int on) { sim_pageable_async = on; }

EXPORT void cudasim_clear_error(void) {
  pthread_mutex_lock(&sim_lock);
  sim_sticky = last_error = OK;
  for (Api *api = apis; api; api = api->next) api->fail_at = 0;
  pthread_mutex_unlock(&sim_lock);
}

EXPORT void cudasim_fail(const char *name, long nth, int error) {
  pthread_mutex_lock(&sim_lock);
  Api *api = api_named(name);
  api->fail_at = nth;
  api->fail_with = error;
  pthread_mutex_unlock(&sim_lock);
}

/* The calls of the i-th known entry point, and its name; NULL past the last. */
EXPORT const char *cudasim_counter(int i, uint64_t *calls) {
  const char *name = NULL;
  pthread_mutex_lock(&sim_lock);
  Api *api = apis;
  while (api && i-- > 0) api = api->next;
  if (api) {
    name = api->name;
    *calls = api->calls;
  }
  pthread_mutex_unlock(&sim_lock);
  return name;
}

EXPORT const char *cudasim_missing(void) { return missing; }

/* What an entry point that is not simulated does: it says its name and fails. */
EXPORT int cudasim_unimplemented(const char *name) {
  pthread_mutex_lock(&sim_lock);
  if (!strstr(missing, name) && strlen(missing) + strlen(name) + 2 < sizeof missing) {
    strcat(missing, name);
    strcat(missing, " ");
  }
  return leave(E_NOT_SUPPORTED);
}
