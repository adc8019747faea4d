# A Cython module that cimports lkv: Python's objects from inside, and the table without the GIL.
from libc.stdint cimport int64_t, uint64_t

from lkv._storage cimport (
    LKV_ABI_MINOR,
    LKV_OK,
    LKV_WRITE,
    Lease,
    Storage,
    View,
    lkv_api,
    lkv_import,
    lkv_lease,
    lkv_lease_span,
    lkv_status,
)

cdef const lkv_api *api = lkv_import(LKV_ABI_MINOR)


cdef int check(lkv_status status) except -1:
    if status != LKV_OK:
        raise RuntimeError(f"{api.status_name(status).decode()}: {api.last_error().decode()}")
    return 0


def table():
    return api.abi_major, api.abi_minor, api.struct_size


def geometry(View view):
    """Shape and strides as the extension type holds them."""
    return [view.dims[i] for i in range(view.ndim)], [view.steps[i] for i in range(view.ndim)], <size_t>view.data


def total(Lease lease):
    """The sum of the bytes under a lease that Python holds."""
    cdef lkv_lease_span span
    cdef uint64_t sum = 0
    cdef size_t i
    span.struct_size = sizeof(span)
    check(api.lease_data(lease.lease, &span))
    with nogil:
        for i in range(span.nbytes):
            sum += (<unsigned char *>span.data)[i]
    return sum


def fill(Storage storage, int64_t lo, int64_t hi, unsigned char value):
    """Writes rows of a storage, waiting without the GIL."""
    cdef lkv_lease *lease
    cdef lkv_lease_span span
    cdef lkv_status status
    cdef size_t i
    with nogil:
        status = api.lease_acquire(storage.buffer, LKV_WRITE, lo, hi, -1, &lease)
    check(status)
    span.struct_size = sizeof(span)
    try:
        check(api.lease_data(lease, &span))
        for i in range(span.nbytes):
            (<unsigned char *>span.data)[i] = value
    finally:
        api.lease_release(lease)
