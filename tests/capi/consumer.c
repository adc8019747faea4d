/* A C11 extension module that uses lkv as an embedder would: buffers, leases and tensors that cross the border. */
#include "common.h"

#include <time.h>

/* ---- the table ---- */

#define EACH_MEMBER(X)                                                                                                \
  X(status_name) X(last_error) X(set_error) X(device_register) X(device_find) X(device_sync) X(buffer_create)         \
  X(buffer_wrap) X(buffer_retain) X(buffer_release) X(buffer_info) X(buffer_bump_version) X(lease_acquire)            \
  X(lease_retain) X(lease_release) X(lease_end) X(lease_release_poisoned) X(lease_downgrade) X(lease_data)            \
  X(buffer_clear_poison) X(copy) X(copy_2d) X(fill_zero) X(read_host) X(write_host) X(lease_to_dlpack)                \
  X(alloc_id_next) X(buffer_claim) X(buffer_release_rows)

static PyObject *table(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return Py_BuildValue("IIn", api->abi_major, api->abi_minor, (Py_ssize_t)api->struct_size);
}

static PyObject *import_minor(PyObject *self, PyObject *args) {
  unsigned minor;
  (void)self;
  if (!PyArg_ParseTuple(args, "I", &minor) || !lkv_import(minor)) return NULL;
  Py_RETURN_NONE;
}

/* The members that a table of `size` bytes has, as LKV_HAS says. */
static PyObject *members(PyObject *self, PyObject *args) {
  Py_ssize_t size;
  (void)self;
  if (!PyArg_ParseTuple(args, "n", &size)) return NULL;
  lkv_api shorter = *api;
  shorter.struct_size = (size_t)size;
  PyObject *names = PyList_New(0);
#define X(member)                                        \
  if (names && LKV_HAS(&shorter, member)) {              \
    PyObject *name = PyUnicode_FromString(#member);      \
    if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names); \
    Py_XDECREF(name);                                    \
  }
  EACH_MEMBER(X)
#undef X
  return names;
}

static lkv_status trap(lkv_buffer *buffer, int64_t lo, int64_t hi) {
  (void)buffer, (void)lo, (void)hi;
  abort();
}

/* How a caller uses a member that its library may not have: False when it is not there. */
static PyObject *release_rows_if_there(PyObject *self, PyObject *args) {
  PyObject *capsule;
  Py_ssize_t size;
  (void)self;
  if (!PyArg_ParseTuple(args, "On", &capsule, &size)) return NULL;
  lkv_buffer *buffer = PyCapsule_GetPointer(capsule, "lkv.buffer");
  if (!buffer) return NULL;
  lkv_api shorter = *api;
  shorter.struct_size = (size_t)size;
  if ((size_t)size < sizeof shorter) shorter.buffer_release_rows = trap;
  if (!LKV_HAS(&shorter, buffer_release_rows)) Py_RETURN_FALSE;
  lkv_status status = shorter.buffer_release_rows(buffer, 0, 1);
  if (status) return raise_status(status);
  Py_RETURN_TRUE;
}

/* ---- buffers ---- */

static int deletions;

static void count_deletion(void *memory) {
  free(memory);
  deletions++;
}

static void drop_buffer(PyObject *capsule) { api->buffer_release(PyCapsule_GetPointer(capsule, "lkv.buffer")); }

static PyObject *make_buffer(PyObject *self, PyObject *args) {
  long long rows, row_bytes;
  int dtype, wraps;
  lkv_buffer *buffer;
  lkv_status status;
  (void)self;
  if (!PyArg_ParseTuple(args, "LLip", &rows, &row_bytes, &dtype, &wraps)) return NULL;
  lkv_buffer_desc desc = {.struct_size = sizeof desc, .rows = rows, .row_bytes = row_bytes, .dtype = dtype};
  if (wraps) {
    void *memory = calloc((size_t)rows, (size_t)row_bytes);
    if (!memory) return PyErr_NoMemory();
    status = api->buffer_wrap(&desc, memory, count_deletion, memory, &buffer);
    if (status) free(memory);
  } else {
    status = api->buffer_create(&desc, &buffer);
  }
  return status ? raise_status(status) : PyCapsule_New(buffer, "lkv.buffer", drop_buffer);
}

static PyObject *deleted(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return PyLong_FromLong(deletions);
}

static PyObject *info(PyObject *self, PyObject *args) {
  unsigned long long handle;
  (void)self;
  if (!PyArg_ParseTuple(args, "K", &handle)) return NULL;
  lkv_buffer_info it = {.struct_size = sizeof it};
  lkv_status status = api->buffer_info((lkv_buffer *)(uintptr_t)handle, &it);
  if (status) return raise_status(status);
  return Py_BuildValue("{sKsKsnsLsLsLsKsKsisi}", "id", (unsigned long long)it.id, "data",
                       (unsigned long long)(uintptr_t)it.data, "nbytes", (Py_ssize_t)it.nbytes, "rows",
                       (long long)it.rows, "row_bytes", (long long)it.row_bytes, "claimed", (long long)it.claimed,
                       "version", (unsigned long long)it.version, "refcount", (unsigned long long)it.refcount, "dtype",
                       (int)it.dtype, "poisoned", (int)it.poisoned);
}

/* ---- leases ---- */

static void drop_lease(PyObject *capsule) { api->lease_release(PyCapsule_GetPointer(capsule, "lkv.lease")); }

static PyObject *acquire(PyObject *self, PyObject *args) {
  PyObject *capsule;
  int mode;
  long long lo, hi, timeout;
  lkv_lease *lease;
  lkv_status status;
  (void)self;
  if (!PyArg_ParseTuple(args, "OiLLL", &capsule, &mode, &lo, &hi, &timeout)) return NULL;
  lkv_buffer *buffer = PyCapsule_GetPointer(capsule, "lkv.buffer");
  if (!buffer) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = api->lease_acquire(buffer, mode, lo, hi, timeout, &lease);
  Py_END_ALLOW_THREADS
  return status ? raise_status(status) : PyCapsule_New(lease, "lkv.lease", drop_lease);
}

static PyObject *span(PyObject *self, PyObject *args) {
  (void)self;
  lkv_lease *lease = unwrap(args, "lkv.lease");
  if (!lease) return NULL;
  lkv_lease_span it = {.struct_size = sizeof it};
  lkv_status status = api->lease_data(lease, &it);
  if (status) return raise_status(status);
  return Py_BuildValue("KnLLi", (unsigned long long)(uintptr_t)it.data, (Py_ssize_t)it.nbytes, (long long)it.lo,
                       (long long)it.hi, (int)it.mode);
}

static PyObject *end(PyObject *self, PyObject *args) {
  (void)self;
  lkv_lease *lease = unwrap(args, "lkv.lease");
  if (!lease) return NULL;
  api->lease_end(lease);
  Py_RETURN_NONE;
}

static PyObject *poison(PyObject *self, PyObject *args) {
  (void)self;
  lkv_lease *lease = unwrap(args, "lkv.lease");
  if (!lease) return NULL;
  api->lease_retain(lease); /* the capsule keeps its own */
  api->lease_release_poisoned(lease);
  Py_RETURN_NONE;
}

static PyObject *downgrade(PyObject *self, PyObject *args) {
  (void)self;
  lkv_lease *lease = unwrap(args, "lkv.lease");
  return lease ? none_or_raise(api->lease_downgrade(lease)) : NULL;
}

/* Adds a number to every byte under a lease, in place, and returns the sum of what was there. */
static PyObject *add(PyObject *self, PyObject *args) {
  PyObject *capsule;
  int by;
  unsigned long long sum = 0;
  (void)self;
  if (!PyArg_ParseTuple(args, "Oi", &capsule, &by)) return NULL;
  lkv_lease *lease = PyCapsule_GetPointer(capsule, "lkv.lease");
  if (!lease) return NULL;
  lkv_lease_span it = {.struct_size = sizeof it};
  lkv_status status = api->lease_data(lease, &it);
  if (status) return raise_status(status);
  for (size_t i = 0; i < it.nbytes; i++) {
    sum += ((unsigned char *)it.data)[i];
    if (by) ((unsigned char *)it.data)[i] = (unsigned char)(((unsigned char *)it.data)[i] + by);
  }
  return PyLong_FromUnsignedLongLong(sum);
}

/* ---- threads ---- */

struct job {
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  lkv_buffer *buffer;
  lkv_lease *lease;
  lkv_mode mode;
  int seconds, takes_gil, began, over;
  lkv_status status;
};

static void *acquire_all(void *argument) {
  struct job *job = argument;
  lkv_buffer_info it = {.struct_size = sizeof it};
  job->status = api->buffer_info(job->buffer, &it);
  if (!job->status) job->status = api->lease_acquire(job->buffer, job->mode, 0, it.rows, LKV_FOREVER, &job->lease);
  return NULL;
}

static void *release_it(void *argument) {
  api->lease_release(((struct job *)argument)->lease);
  return NULL;
}

/* One thread acquires, another releases; the caller holds the GIL meanwhile. */
static PyObject *acquire_here_release_there(PyObject *self, PyObject *args) {
  (void)self;
  lkv_buffer *buffer = unwrap(args, "lkv.buffer");
  if (!buffer) return NULL;
  struct job job = {.buffer = buffer, .mode = LKV_WRITE};
  lkv_lease *none;
  if (pthread_create(&job.thread, NULL, acquire_all, &job)) return PyErr_SetFromErrno(PyExc_OSError);
  pthread_join(job.thread, NULL);
  if (job.status) return raise_status(job.status);
  const lkv_status during = api->lease_acquire(buffer, LKV_READ, 0, 1, LKV_TRY, &none);
  if (pthread_create(&job.thread, NULL, release_it, &job)) return PyErr_SetFromErrno(PyExc_OSError);
  pthread_join(job.thread, NULL);
  const lkv_status after = api->lease_acquire(buffer, LKV_READ, 0, 1, LKV_TRY, &none);
  api->lease_release(none);
  return Py_BuildValue("ss", api->status_name(during), api->status_name(after));
}

static void *hold_it(void *argument) {
  struct job *job = argument;
  struct timespec until;
  acquire_all(job);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += job->seconds;
  pthread_mutex_lock(&job->mutex);
  job->began = 1;
  pthread_cond_signal(&job->changed);
  while (!job->over && pthread_cond_timedwait(&job->changed, &job->mutex, &until) == 0) continue;
  pthread_mutex_unlock(&job->mutex);
  if (job->takes_gil) PyGILState_Release(PyGILState_Ensure()); /* never comes back if the GIL is kept by who waits */
  api->lease_release(job->lease);
  return NULL;
}

/* A thread that holds all rows until it is told, or so many seconds; returns once it does. */
static PyObject *hold(PyObject *self, PyObject *args) {
  unsigned long long handle;
  int mode, seconds, takes_gil;
  (void)self;
  if (!PyArg_ParseTuple(args, "Kiip", &handle, &mode, &seconds, &takes_gil)) return NULL;
  struct job *job = calloc(1, sizeof *job);
  if (!job) return PyErr_NoMemory();
  job->buffer = (lkv_buffer *)(uintptr_t)handle;
  job->mode = mode;
  job->seconds = seconds;
  job->takes_gil = takes_gil;
  pthread_mutex_init(&job->mutex, NULL);
  pthread_cond_init(&job->changed, NULL);
  if (pthread_create(&job->thread, NULL, hold_it, job)) {
    free(job);
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  Py_BEGIN_ALLOW_THREADS
  pthread_mutex_lock(&job->mutex);
  while (!job->began) pthread_cond_wait(&job->changed, &job->mutex);
  pthread_mutex_unlock(&job->mutex);
  Py_END_ALLOW_THREADS
  return PyCapsule_New(job, "job", NULL);
}

static PyObject *let_go(PyObject *self, PyObject *args) {
  (void)self;
  struct job *job = unwrap(args, "job");
  if (!job) return NULL;
  pthread_mutex_lock(&job->mutex);
  job->over = 1;
  pthread_cond_signal(&job->changed);
  pthread_mutex_unlock(&job->mutex);
  Py_RETURN_NONE;
}

static PyObject *join(PyObject *self, PyObject *args) {
  (void)self;
  struct job *job = unwrap(args, "job");
  if (!job) return NULL;
  Py_BEGIN_ALLOW_THREADS
  pthread_join(job->thread, NULL);
  Py_END_ALLOW_THREADS
  const lkv_status status = job->status;
  free(job);
  return none_or_raise(status);
}

/* ---- tensors, and the end of the process ---- */

static DLManagedTensorVersioned *tensor;

/* Keeps the tensor of a lease, made by C. */
static PyObject *export_tensor(PyObject *self, PyObject *args) {
  (void)self;
  lkv_lease *lease = unwrap(args, "lkv.lease");
  if (!lease) return NULL;
  const int64_t shape[] = {2, 2};
  const lkv_tensor_desc desc = {.struct_size = sizeof desc, .ndim = 2, .shape = shape};
  lkv_status status = api->lease_to_dlpack(lease, &desc, &tensor);
  if (status) return raise_status(status);
  return Py_BuildValue("Ki(ii)", (unsigned long long)(uintptr_t)tensor->dl_tensor.data, (int)tensor->flags,
                       (int)tensor->dl_tensor.strides[0], (int)tensor->dl_tensor.strides[1]);
}

/* Keeps the tensor of a capsule that Python's __dlpack__ made. */
static PyObject *take_tensor(PyObject *self, PyObject *args) {
  PyObject *capsule;
  (void)self;
  if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
  tensor = PyCapsule_GetPointer(capsule, "dltensor_versioned");
  if (!tensor || PyCapsule_SetName(capsule, "used_dltensor_versioned")) return NULL;
  Py_RETURN_NONE;
}

static void *drop_it(void *argument) {
  (void)argument;
  tensor->deleter(tensor);
  tensor = NULL;
  return NULL;
}

static void drop_in_raw_thread(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, drop_it, NULL)) abort();
  pthread_join(thread, NULL);
}

/* Drops the kept tensor in a raw thread; with keeps_gil the caller holds the GIL meanwhile. */
static PyObject *drop_in_thread(PyObject *self, PyObject *args) {
  int keeps_gil;
  (void)self;
  if (!PyArg_ParseTuple(args, "p", &keeps_gil)) return NULL;
  if (keeps_gil) {
    drop_in_raw_thread();
  } else {
    Py_BEGIN_ALLOW_THREADS
    drop_in_raw_thread();
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

static void say(const char *text) {
  if (write(1, text, strlen(text)) < 0) abort();
}

static void drop_late(void) {
  drop_in_raw_thread();
  say("dropped\n");
}

static pthread_t late; /* what it drops must be gone when it has ended by itself */

static void *drop_when_finalizing(void *argument) {
  while (Py_IsInitialized() && !finalizing()) usleep(100);
  return drop_it(argument);
}

static void join_late(void) {
  pthread_join(late, NULL);
  say(tensor ? "the thread was ended\n" : "dropped\n");
}

/* Drops the kept tensor while or after the interpreter ends. */
static PyObject *drop_at_exit(PyObject *self, PyObject *args) {
  const char *when;
  (void)self;
  if (!PyArg_ParseTuple(args, "s", &when)) return NULL;
  if (!strcmp(when, "finalised")) {
    if (Py_AtExit(drop_late)) return PyErr_NoMemory();
  } else if (!strcmp(when, "exit")) {
    if (atexit(drop_late)) return PyErr_NoMemory();
  } else if (pthread_create(&late, NULL, drop_when_finalizing, NULL) || atexit(join_late)) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

/* Starts to drop the kept tensor and keeps the GIL until the thread must have asked for it, if it does. */
static PyObject *drop_beside(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  if (pthread_create(&late, NULL, drop_it, NULL) || atexit(join_late)) return PyErr_NoMemory();
  usleep(50000);
  Py_RETURN_NONE;
}

static void *wait_for_ever(void *argument) {
  struct job *job = argument;
  acquire_all(job);
  say(api->status_name(job->status));
  return NULL;
}

/* A thread that waits for rows which nobody will give back, until the process ends. */
static PyObject *wait_until_exit(PyObject *self, PyObject *args) {
  static struct job job;
  (void)self;
  job.buffer = unwrap(args, "lkv.buffer");
  job.mode = LKV_WRITE;
  if (!job.buffer) return NULL;
  if (pthread_create(&late, NULL, wait_for_ever, &job) || atexit(join_late)) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

#define METHOD(name) {#name, name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    METHOD(table),         METHOD(import_minor),   METHOD(members),      METHOD(release_rows_if_there),
    METHOD(make_buffer),   METHOD(deleted),        METHOD(info),         METHOD(acquire),
    METHOD(span),          METHOD(end),            METHOD(poison),       METHOD(downgrade),
    METHOD(add),           METHOD(hold),           METHOD(join),         METHOD(acquire_here_release_there),
    METHOD(export_tensor), METHOD(take_tensor),    METHOD(drop_in_thread), METHOD(drop_at_exit),
    METHOD(wait_until_exit), METHOD(drop_beside),  METHOD(let_go),       {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "consumer", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_consumer(void) {
  api = lkv_import(LKV_ABI_MINOR);
  return api ? PyModule_Create(&module) : NULL;
}
