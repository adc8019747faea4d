# A Cython module that cimports lkv. Run: python examples/embed_cython/run.py
#
# It reaches into the Python objects (storage.buffer, lease.lease) and waits for rows without the GIL.
from libc.stdint cimport int64_t

from lkv._storage cimport (
    LKV_ABI_MINOR,
    LKV_OK,
    LKV_READ,
    Lease,
    Storage,
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


cdef float largest(lkv_lease_span *span) noexcept nogil:
    cdef float best = (<float *>span.data)[0]
    cdef size_t i
    for i in range(1, span.nbytes // sizeof(float)):
        best = max(best, (<float *>span.data)[i])
    return best


def largest_of_lease(Lease lease):
    """Of rows that Python has leased."""
    cdef lkv_lease_span span
    span.struct_size = sizeof(span)
    check(api.lease_data(lease.lease, &span))
    return largest(&span)


def largest_of_rows(Storage storage, int64_t lo, int64_t hi):
    """Of rows that are leased here, however long that takes."""
    cdef lkv_lease *lease
    cdef lkv_lease_span span
    cdef lkv_status status
    cdef float best
    span.struct_size = sizeof(span)
    with nogil:
        status = api.lease_acquire(storage.buffer, LKV_READ, lo, hi, -1, &lease)
    check(status)
    try:
        check(api.lease_data(lease, &span))
        with nogil:
            best = largest(&span)
    finally:
        api.lease_release(lease)
    return best
