# What another Cython module may cimport: the C interface, and the handles inside the extension types.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "lkv.h":
    ctypedef int32_t lkv_status
    ctypedef int32_t lkv_dtype
    ctypedef int32_t lkv_mode
    ctypedef int32_t lkv_copy_kind
    enum:
        LKV_ABI_MAJOR
        LKV_ABI_MINOR
        LKV_OK
        LKV_E_INVALID
        LKV_E_NOMEM
        LKV_E_TIMEOUT
        LKV_E_DEADLOCK
        LKV_E_POISONED
        LKV_E_FORKED
        LKV_E_SHUTDOWN
        LKV_E_DEVICE
        LKV_E_UNSUPPORTED
        LKV_E_NOT_FOUND
        LKV_E_EXISTS
        LKV_E_CONFLICT
        LKV_E_ENDED
        LKV_E_READ_ONLY
        LKV_E_ABI
        LKV_F64
        LKV_F32
        LKV_F16
        LKV_BF16
        LKV_F8_E4M3FN
        LKV_F8_E5M2
        LKV_I64
        LKV_I32
        LKV_I16
        LKV_I8
        LKV_U8
        LKV_BOOL
        LKV_READ
        LKV_WRITE
        LKV_HOST_TO_DEVICE
        LKV_DEVICE_TO_HOST
        LKV_DEVICE_TO_DEVICE
        LKV_HUGE_PAGES
        LKV_READ_ONLY_MEMORY
        LKV_STRIDED_ROWS
    ctypedef struct lkv_buffer:
        pass
    ctypedef struct lkv_lease:
        pass
    ctypedef struct lkv_device:
        pass
    ctypedef struct DLManagedTensorVersioned:
        pass
    ctypedef struct lkv_device_vtable:
        size_t struct_size
        int32_t dl_device_type
        int32_t host_accessible
        lkv_status (*allocate)(void *ctx, size_t nbytes, void **out) noexcept nogil
        void (*free)(void *ctx, void *ptr, size_t nbytes) noexcept nogil
        lkv_status (*copy_2d)(void *ctx, lkv_copy_kind kind, void *dst, size_t dst_pitch, const void *src,
                              size_t src_pitch, size_t width, size_t height, void *stream) noexcept nogil
        lkv_status (*fill_zero)(void *ctx, void *ptr, size_t nbytes, void *stream) noexcept nogil
        lkv_status (*sync)(void *ctx, void *stream) noexcept nogil
        lkv_status (*event_record)(void *ctx, void *stream, void **out_event) noexcept nogil
        lkv_status (*event_wait)(void *ctx, void *stream, void *event) noexcept nogil
        int32_t (*event_done)(void *ctx, void *event) noexcept nogil
        void (*event_free)(void *ctx, void *event) noexcept nogil
        lkv_status (*current_stream)(void *ctx, void **out_stream) noexcept nogil
        lkv_status (*memory_info)(void *ctx, size_t *out_free, size_t *out_total) noexcept nogil
    ctypedef struct lkv_buffer_desc:
        size_t struct_size
        lkv_device *device
        int64_t rows
        int64_t row_bytes
        lkv_dtype dtype
        uint32_t flags
        lkv_buffer *queue_of
    ctypedef struct lkv_buffer_info:
        size_t struct_size
        uint64_t id
        lkv_device *device
        int32_t dl_device_type
        int32_t ordinal
        void *data
        size_t nbytes
        int64_t rows
        int64_t row_bytes
        int64_t claimed
        uint64_t version
        uint64_t refcount
        lkv_dtype dtype
        int32_t poisoned
        int32_t read_only
        int32_t strided
    ctypedef struct lkv_lease_span:
        size_t struct_size
        void *data
        size_t nbytes
        int64_t lo
        int64_t hi
        lkv_mode mode
    ctypedef struct lkv_tensor_desc:
        size_t struct_size
        lkv_dtype dtype
        int32_t ndim
        const int64_t *shape
        const int64_t *strides
        size_t offset
    ctypedef struct lkv_api:
        uint32_t abi_major
        uint32_t abi_minor
        size_t struct_size
        const char *(*status_name)(lkv_status status) noexcept nogil
        const char *(*last_error)() noexcept nogil
        void (*set_error)(const char *message) noexcept nogil
        lkv_status (*device_register)(const char *name, int32_t ordinal, const lkv_device_vtable *vtable, void *ctx,
                                      lkv_device **out) noexcept nogil
        lkv_status (*device_find)(const char *name, lkv_device **out) noexcept nogil
        lkv_status (*device_sync)(lkv_device *device, void *stream) noexcept nogil
        lkv_status (*buffer_create)(const lkv_buffer_desc *desc, lkv_buffer **out) noexcept nogil
        lkv_status (*buffer_wrap)(const lkv_buffer_desc *desc, void *data, void (*deleter)(void *) noexcept nogil,
                                  void *ctx, lkv_buffer **out) noexcept nogil
        void (*buffer_retain)(lkv_buffer *buffer) noexcept nogil
        void (*buffer_release)(lkv_buffer *buffer) noexcept nogil
        lkv_status (*buffer_info)(const lkv_buffer *buffer, lkv_buffer_info *out) noexcept nogil
        lkv_status (*buffer_bump_version)(lkv_buffer *buffer) noexcept nogil
        lkv_status (*lease_acquire)(lkv_buffer *buffer, lkv_mode mode, int64_t lo, int64_t hi, int64_t timeout,
                                    lkv_lease **out) noexcept nogil
        void (*lease_retain)(lkv_lease *lease) noexcept nogil
        void (*lease_release)(lkv_lease *lease) noexcept nogil
        void (*lease_end)(lkv_lease *lease) noexcept nogil
        void (*lease_release_poisoned)(lkv_lease *lease) noexcept nogil
        lkv_status (*lease_downgrade)(lkv_lease *lease) noexcept nogil
        lkv_status (*lease_data)(const lkv_lease *lease, lkv_lease_span *out) noexcept nogil
        lkv_status (*buffer_clear_poison)(lkv_buffer *buffer) noexcept nogil
        lkv_status (*copy)(lkv_lease *dst, size_t dst_offset, const lkv_lease *src, size_t src_offset,
                           size_t nbytes) noexcept nogil
        lkv_status (*copy_2d)(lkv_lease *dst, size_t dst_offset, size_t dst_pitch, const lkv_lease *src,
                              size_t src_offset, size_t src_pitch, size_t width, size_t height) noexcept nogil
        lkv_status (*fill_zero)(lkv_lease *lease, size_t offset, size_t nbytes) noexcept nogil
        lkv_status (*read_host)(const lkv_lease *lease, size_t offset, void *dst, size_t nbytes) noexcept nogil
        lkv_status (*write_host)(lkv_lease *lease, size_t offset, const void *src, size_t nbytes) noexcept nogil
        lkv_status (*lease_to_dlpack)(lkv_lease *lease, const lkv_tensor_desc *desc,
                                      DLManagedTensorVersioned **out) noexcept nogil
        uint64_t (*alloc_id_next)() noexcept nogil
        lkv_status (*buffer_claim)(lkv_buffer *buffer, int64_t expected, int64_t claimed) noexcept nogil
        lkv_status (*buffer_release_rows)(lkv_buffer *buffer, int64_t lo, int64_t hi) noexcept nogil
    # The table, or an ImportError that names both versions.
    const lkv_api *lkv_import(uint32_t minor) except NULL


cdef class View:
    cdef lkv_buffer *buffer
    cdef lkv_lease *lease     # holds the buffer too, when it is a lease of this one
    cdef Storage storage      # of a Lease, as are lo and hi: here, so that both types share a free list
    cdef int64_t lo
    cdef int64_t hi
    cdef char *data
    cdef readonly int ndim
    """Number of dimensions."""
    cdef lkv_dtype code
    cdef bint read_only
    cdef int64_t dims[8]
    cdef int64_t steps[8]
    cdef Py_ssize_t byte_steps[8]


cdef class Lease(View):
    pass


cdef class Storage:
    cdef lkv_buffer *buffer
    cdef readonly tuple shape
    """The shape of the whole."""
    cdef readonly int axis
    """Which dimension counts the rows."""
    cdef object __weakref__
