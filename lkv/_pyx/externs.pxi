# The core, as C++ sees it. `Buffer` and `Handle` are lkv_buffer and lkv_lease with their members.

cdef extern from "status.hpp" namespace "lkv" nogil:
    const char *status_name(lkv_status status) noexcept
    const char *core_error "lkv::last_error"() noexcept

cdef extern from "process.hpp" namespace "lkv::process" nogil:
    void process_end "lkv::process::end"() noexcept
    uint32_t process_generation "lkv::process::watched_generation"() noexcept

cdef extern from "<thread>" nogil:
    void yield_thread "std::this_thread::yield"() noexcept

cdef extern from "lease_queue.hpp" namespace "lkv" nogil:
    cdef cppclass Span:
        int64_t lo
        int64_t hi
    cdef cppclass Request:
        const Span &read_rows() noexcept
        const Span &write_rows() noexcept
        uint32_t epoch() noexcept
        bint held() noexcept
        bint blocked_by_step() noexcept
    enum RequestKind "lkv::Request::Kind":
        committed_rows "lkv::Request::Kind::committed"
        step_of "lkv::Request::Kind::step"
        exclusive_of "lkv::Request::Kind::exclusive"
    enum Patience "lkv::LeaseQueue::Patience":
        no_patience "lkv::LeaseQueue::Patience::none"
        bounded "lkv::LeaseQueue::Patience::bounded"
        endless "lkv::LeaseQueue::Patience::endless"
    cdef cppclass LeaseQueue:
        lkv_status enqueue(Request &request, Patience patience) noexcept
        lkv_status wait(Request &request, int64_t timeout_ns) noexcept
        bint withdraw(Request &request) noexcept
        void release(Request &request) noexcept
        int64_t length() noexcept
        void publish(int64_t length) noexcept
        uint32_t epoch() noexcept
        void next_epoch() noexcept
        bint forked() noexcept

cdef extern from "device.hpp" nogil:
    cdef cppclass Device "lkv_device":
        char name[32]
        int32_t ordinal
        lkv_device_vtable table
        void *context
        bint is_cpu() noexcept
    lkv_device *cpu "lkv::devices::cpu"() noexcept
    lkv_status device_find "lkv::devices::find"(const char *name, lkv_device **out) noexcept

cdef extern from "cpu_device.hpp" namespace "lkv::cpu" nogil:
    void set_limit(size_t nbytes) noexcept
    size_t cpu_limit "lkv::cpu::limit"() noexcept
    size_t live_bytes() noexcept
    size_t free_bytes() noexcept

cdef extern from "dtype.hpp" namespace "lkv" nogil:
    cdef cppclass DTypeInfo:
        unsigned char itemsize
        unsigned char dl_code
        unsigned char dl_bits
    const DTypeInfo *dtype_info(lkv_dtype code) noexcept

cdef extern from *:
    """
    #include <atomic>
    template <class T> static inline T loaded(const std::atomic<T> &value) noexcept {
      return value.load(std::memory_order_acquire);
    }
    """
    cdef cppclass atomic_i64 "std::atomic<std::int64_t>":
        pass
    cdef cppclass atomic_u32 "std::atomic<std::uint32_t>":
        pass
    cdef cppclass atomic_bool "std::atomic<bool>":
        void store(bint value) nogil
    int64_t loaded_i64 "loaded"(const atomic_i64 &) noexcept nogil
    uint32_t loaded_u32 "loaded"(const atomic_u32 &) noexcept nogil
    bint loaded_bool "loaded"(const atomic_bool &) noexcept nogil

cdef extern from "version.hpp" namespace "lkv" nogil:
    cdef cppclass Version:
        uint64_t now() noexcept
        void bump() noexcept

cdef extern from "storage.hpp" nogil:
    cdef cppclass Buffer "lkv_buffer":
        atomic_u32 refs
        atomic_bool poisoned
        bint read_only
        lkv_dtype dtype
        lkv_device *device
        char *data
        size_t nbytes
        int64_t rows
        int64_t row_bytes
        uint64_t id
        Version version
        atomic_i64 claimed
        void retain() noexcept
        void release() noexcept
        void bump_version() noexcept

cdef extern from "storage.hpp" namespace "lkv" nogil:
    lkv_status create(const lkv_buffer_desc *desc, lkv_buffer **out) noexcept
    lkv_status wrap(const lkv_buffer_desc *desc, void *data, void (*deleter)(void *) noexcept nogil, void *context,
                    lkv_buffer **out) noexcept
    lkv_status claim(lkv_buffer *buffer, int64_t expected, int64_t claimed) noexcept
    lkv_status release_rows(lkv_buffer *buffer, int64_t lo, int64_t hi) noexcept
    lkv_status adopt(lkv_buffer *buffer, LeaseQueue *queue) noexcept
    lkv_status adoptable(lkv_buffer *buffer, const LeaseQueue *queue) noexcept
    lkv_status clear_ordered(lkv_buffer *buffer, int64_t lo, int64_t hi) noexcept
    int64_t live_buffers() noexcept

cdef extern from "lease.hpp" nogil:
    cdef cppclass Handle "lkv_lease":
        atomic_u32 refs
        lkv_mode mode
        lkv_buffer *buffer
        LeaseQueue *queue
        Span rows
        void *stream
        Request request
        lkv_status enter() noexcept
        bint active() noexcept
        void retain() noexcept
        void release() noexcept
        void end(bint poison) noexcept

cdef extern from "lease.hpp" namespace "lkv" nogil:
    lkv_lease *new_row_lease "lkv::new_lease"(lkv_buffer *buffer, lkv_mode mode, int64_t lo, int64_t hi) noexcept
    lkv_lease *new_lease(LeaseQueue *queue, lkv_device *device, RequestKind kind, int64_t count) noexcept
    void discard(lkv_lease *lease) noexcept
    lkv_status check_acquire(const lkv_buffer *buffer, lkv_mode mode, int64_t lo, int64_t hi) noexcept
    lkv_status check_granted(lkv_lease *lease) noexcept
    lkv_status downgrade(lkv_lease *lease) noexcept
    lkv_status read_host(const lkv_lease *lease, size_t offset, void *dst, size_t nbytes) noexcept
    lkv_status write_host(lkv_lease *lease, size_t offset, const void *src, size_t nbytes) noexcept
    lkv_status lease_copy_2d "lkv::copy_2d"(lkv_lease *dst, size_t dst_offset, size_t dst_pitch, const lkv_lease *src,
                                            size_t src_offset, size_t src_pitch, size_t width, size_t height) noexcept

cdef extern from "dlpack_abi.h" nogil:
    ctypedef struct DLPackVersion:
        uint32_t major
        uint32_t minor
    ctypedef struct DLDevice:
        int32_t device_type
        int32_t device_id
    ctypedef struct DLDataType:
        unsigned char code
        unsigned char bits
        unsigned short lanes
    ctypedef struct DLTensor:
        void *data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void *manager_ctx
        void (*deleter)(DLManagedTensor *) noexcept nogil
    ctypedef struct Versioned "DLManagedTensorVersioned":
        DLPackVersion version
        void *manager_ctx
        void (*deleter)(Versioned *) noexcept nogil
        uint64_t flags
        DLTensor dl_tensor
    ctypedef struct ExchangeHeader "DLPackExchangeAPIHeader":
        DLPackVersion version
        void *prev_api
    ctypedef struct ExchangeAPI "DLPackExchangeAPI":
        ExchangeHeader header
        int (*managed_tensor_allocator)(DLTensor *prototype, Versioned **out, void *error_ctx,
                                        void (*set_error)(void *, const char *, const char *) noexcept) noexcept
        int (*managed_tensor_from_py_object_no_sync)(void *py_object, Versioned **out) noexcept
        int (*managed_tensor_to_py_object_no_sync)(Versioned *tensor, void **out_py_object) noexcept
        int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out) noexcept
        int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream) noexcept
    enum:
        kDLCPU
        kDLFlagReadOnly
        kDLFlagIsCopied

cdef extern from "dlpack_export.hpp" namespace "lkv" nogil:
    cdef cppclass ExportShape:
        void *data
        lkv_dtype dtype
        int32_t ndim
        const int64_t *shape
        const int64_t *strides
        bint read_only
    Versioned *export_versioned(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept
    DLManagedTensor *export_legacy(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept

cdef extern from "slot_table.hpp" namespace "lkv" nogil:
    cdef cppclass ArrayRef:
        const char *data
        const int64_t *shape
        const int64_t *strides
        int64_t stride_unit
        int32_t ndim
        int32_t device_type
        int32_t device_id
        unsigned char dl_code
        unsigned char dl_bits
    cdef cppclass SlotShape:
        int64_t dims[8]
        int32_t ndim
        int32_t axis
        lkv_dtype dtype
        int32_t itemsize
        int64_t outer
        int64_t run
    cdef cppclass SlotPlace:
        lkv_buffer *buffer
        char *base
        int64_t outer_stride
        int64_t row_stride
        Version *version
    cdef cppclass Fault:
        int32_t what
        int32_t slot
        int64_t layer_index
        int64_t expected
        int64_t actual
    enum FaultKind "lkv::Fault::What":
        fault_none "lkv::Fault::none"
        fault_layer "lkv::Fault::layer"
        fault_unpopulated "lkv::Fault::unpopulated"
        fault_count "lkv::Fault::count"
        fault_rank "lkv::Fault::rank"
        fault_shape "lkv::Fault::shape"
        fault_dtype "lkv::Fault::dtype"
        fault_device "lkv::Fault::device"
        fault_rows "lkv::Fault::rows"
        fault_capacity "lkv::Fault::capacity"
        fault_busy "lkv::Fault::busy"
        fault_contiguity "lkv::Fault::contiguity"
        fault_ended "lkv::Fault::ended"
    cdef cppclass Table "lkv::SlotTable":
        Table(int64_t n_layers, int32_t n_slots, int64_t capacity, lkv_device *device) except +
        bint describe(int32_t slot, const int64_t *dims, int32_t ndim, int32_t axis, lkv_dtype dtype) noexcept
        void place(int64_t layer, int32_t slot, lkv_buffer *buffer, int64_t offset, int64_t outer_stride,
                   int64_t row_stride, bint shares) noexcept
        void drop(int64_t layer) noexcept
        void rebase(int64_t capacity, lkv_device *device) noexcept
        lkv_status clear(int64_t layer, void *stream) noexcept
        bint populated(int64_t layer) noexcept
        SlotPlace &at(int64_t layer, int32_t slot) noexcept
        const SlotShape &shape(int32_t slot) noexcept
        int64_t written(int64_t layer) noexcept
        bint check(int64_t layer, const ArrayRef *arrays, int64_t count, int64_t *rows, Fault *fault) noexcept
        lkv_status write(int64_t layer, int64_t at, const ArrayRef *arrays, int64_t rows, Fault *fault) noexcept
        lkv_status write(uint64_t ticket, void *stream, int64_t layer, int64_t at, const ArrayRef *arrays, int64_t rows,
                         Fault *fault) noexcept
        lkv_status append(int64_t layer, const ArrayRef *arrays, int64_t rows, bint checked, Fault *fault) noexcept
        void expect(int64_t layer, int64_t row) noexcept
        lkv_status pass_to_read(int64_t hi) noexcept
        void leave_read(int64_t hi) noexcept
        lkv_status append_leased(void *stream, int64_t layer, const ArrayRef *arrays, int64_t rows,
                                 Fault *fault) noexcept
        uint64_t ticket() noexcept
        void close() noexcept
        bint writing() noexcept
        void prepare(int64_t layer, int64_t start, int64_t rows) noexcept
        void note_written(int64_t layer, int64_t upto) noexcept
        void forget_unpublished(int64_t length) noexcept
        int64_t incomplete(int64_t length) noexcept
        const int64_t n_layers
        const int32_t n_slots
        const int64_t capacity
        lkv_device *device
        LeaseQueue *queue

cdef extern from "api.hpp" namespace "lkv" nogil:
    const lkv_api core_api "lkv::api"
