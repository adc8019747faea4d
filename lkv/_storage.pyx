# distutils: language = c++
"""The compiled part of lkv: storages, leases, exports, and the half of the caches that runs per layer and token."""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_F_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_FULL_RO,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_Clear, PyErr_CheckSignals, PyErr_Occurred, PyErr_SetObject
from cpython.list cimport PyList_AsTuple
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject, Py_SIZE, Py_TYPE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetName
from cpython.sequence cimport PySequence_Fast_ITEMS
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import atexit
import importlib
import math
import sys
import threading

import numpy

from lkv import devices, dtypes, errors, layout

cnp.import_array()

include "_pyx/externs.pxi"
include "_pyx/status.pxi"
include "_pyx/interpreter.pxi"
include "_pyx/arrays.pxi"
include "_pyx/views.pxi"
include "_pyx/streams.pxi"
include "_pyx/storage.pxi"
include "_pyx/table.pxi"
include "_pyx/steps.pxi"
include "_pyx/rows.pxi"
include "_pyx/slots.pxi"
include "_pyx/devices.pxi"
include "_pyx/functional.pxi"


cdef int64_t monotonic_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t>now.tv_sec * 1_000_000_000 + now.tv_nsec


cdef object take_object(PyObject *owned):
    """A new reference that C handed out."""
    result = <object>owned
    Py_DECREF(result)
    return result


cdef object import_extra(str module, str extra):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not importable; pip install 'latent-kv[{extra}]'") from error


def alloc_id_next():
    """Return a new allocation id: process-unique, never reused, from 1 on."""
    return core_api.alloc_id_next()


def c_api_address():
    """Return the address of the C interface's table, ``lkv_api``, for programs that cannot import a capsule."""
    return <size_t>&core_api


def fork_generation():
    """Return a number that is another one in a child of `os.fork`."""
    return process_generation()


def host_memory():
    """Return what storages take of host memory, as a dict: ``live_bytes``, ``live_buffers``, ``limit``, ``free``."""
    return {"live_bytes": live_bytes(), "live_buffers": live_buffers(), "limit": cpu_limit(), "free": free_bytes()}


def set_host_limit(nbytes=None):
    """Let storages take at most so many bytes of host memory together; None lifts the limit."""
    set_limit(<size_t>-1 if nbytes is None else layout.check_count(nbytes, "nbytes"))


def build_info():
    """Return how the extension was built, as a dict."""
    return {
        "abi": (core_api.abi_major, core_api.abi_minor),
        "compiler": BUILD_COMPILER.decode(),
        "cython": CYTHON_VERSION.decode(),
        "debug": bool(BUILD_DEBUG),
        "sanitizer": BUILD_SANITIZER.decode(),
        "free_threading": bool(BUILD_FREE_THREADING),
    }


cdef extern from *:
    """
    #if defined(__clang__)
      #define LKV_COMPILER "clang " __clang_version__
    #else
      #define LKV_COMPILER "gcc " __VERSION__
    #endif
    #if defined(__SANITIZE_THREAD__)
      #define LKV_SANITIZER "thread"
    #elif defined(__SANITIZE_ADDRESS__)
      #define LKV_SANITIZER "address"
    #else
      #define LKV_SANITIZER ""
    #endif
    #ifdef LKV_DEBUG
      #define LKV_IS_DEBUG 1
    #else
      #define LKV_IS_DEBUG 0
    #endif
    #ifdef Py_GIL_DISABLED
      #define LKV_FREE_THREADING 1
    #else
      #define LKV_FREE_THREADING 0
    #endif
    """
    const char *BUILD_COMPILER "LKV_COMPILER"
    const char *BUILD_SANITIZER "LKV_SANITIZER"
    const char *CYTHON_VERSION "CYTHON_ABI"
    int BUILD_DEBUG "LKV_IS_DEBUG"
    int BUILD_FREE_THREADING "LKV_FREE_THREADING"


def _end_process():
    """Wake all waiters for good: registered to run when the interpreter ends."""
    with nogil:
        process_end()
        close_python()


fill_dtype_tables()
_C_API = PyCapsule_New(<void *>&core_api, "lkv._storage._C_API", NULL)
atexit.register(_end_process)
