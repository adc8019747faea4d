/* What the C test modules share. */
#ifndef TESTS_CAPI_COMMON_H
#define TESTS_CAPI_COMMON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <lkv.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The part of dlpack.h that is needed. */
typedef struct {
  void *data;
  struct {
    int32_t device_type, device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensorVersioned {
  struct {
    uint32_t major, minor;
  } version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

static const lkv_api *api;

static inline PyObject *raise_status(lkv_status status) {
  return PyErr_Format(PyExc_RuntimeError, "%s: %s", api->status_name(status), api->last_error());
}

static inline PyObject *none_or_raise(lkv_status status) {
  if (status != LKV_OK) return raise_status(status);
  Py_RETURN_NONE;
}

static inline void *unwrap(PyObject *args, const char *name) {
  PyObject *capsule;
  return PyArg_ParseTuple(args, "O", &capsule) ? PyCapsule_GetPointer(capsule, name) : NULL;
}

static inline int finalizing(void) {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

#endif
