# Rows on a device: the stream on which they are ready, and how elements move between views of any memory.

cdef extern from "<cstring>" nogil:
    int strcmp(const char *a, const char *b) noexcept

# DLPack's and CUDA's names for the default stream of old; 0 is what CuPy and lkv call it.
cdef enum:
    CUDA = 2
    LEGACY_STREAM = 1


cdef inline Device *device_of(View view) except NULL:
    return <Device *>memory(view).device


cdef int current_stream(Device *device, void **out) except -1:
    out[0] = NULL
    if device.table.current_stream != NULL:
        check(device.table.current_stream(device.context, out), "current_stream")
    return 0


cdef int stream_of(View view, void **out) except -1:
    """The stream that a view's rows are ready on: its lease's, or the calling thread's."""
    if view.lease != NULL:
        out[0] = (<Handle *>view.lease).stream
        return 0
    return current_stream(device_of(view), out)


cdef bint related(Device *one, Device *other) noexcept:
    """Whether two devices are of one kind, and so take each other's events and addresses."""
    return one == other or (one.table.copy_2d == other.table.copy_2d and strcmp(one.name, other.name) == 0)


cdef int order(Device *first, void *done_on, Device *second, void *goes_on) except -1:
    """Lets later work of a stream of `second` wait for the earlier work of a stream of `first`."""
    cdef void *event = NULL
    cdef lkv_status status
    if (first == second and done_on == goes_on) or first.table.sync == NULL:
        return 0
    if first.table.event_record == NULL or not related(first, second):
        return check(first.table.sync(first.context, done_on), "sync")
    check(first.table.event_record(first.context, done_on, &event), "event_record")
    status = second.table.event_wait(second.context, goes_on, event)
    first.table.event_free(first.context, event)
    return check(status, "event_wait")


cdef int await_rows(View view, object stream) except -1:
    """Makes a consumer's stream, in DLPack's terms, wait for the rows."""
    cdef void *ready = NULL
    cdef void *consumer = NULL
    cdef Device *device = device_of(view)
    if device.table.sync == NULL:
        if stream is not None:
            raise BufferError(f"stream: expected None for {view.device}, got {stream!r}")
        return 0
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream < -1 or
                               (stream == 0 and device.table.dl_device_type == CUDA)):
        raise BufferError(f"stream: expected None, -1 or a stream's address, 1 or 2 for the default ones, "
                          f"got {stream!r}")
    if stream == -1:
        return 0
    if stream is not None and stream != LEGACY_STREAM:
        consumer = <void *><size_t>stream
    elif device.table.dl_device_type != CUDA:
        current_stream(device, &consumer)
    stream_of(view, &ready)
    return order(device, ready, device, consumer)


cdef int await_rows_here(View view) except -1:
    """Makes the calling thread's current stream wait for the rows."""
    cdef void *ready = NULL
    cdef void *here = NULL
    stream_of(view, &ready)
    current_stream(device_of(view), &here)
    return order(device_of(view), ready, device_of(view), here)


# ---- arrays that come in from the device itself ----

cdef inline int await_sources(Table *table, object slots, const ArrayRef *refs, void *stream) except -1:
    """Makes a stream that will read device arrays wait for the streams that compute them."""
    if (<Device *>table.device).table.event_record != NULL:
        order_sources(<Device *>table.device, slots, refs, stream, True)
    return 0


cdef inline int release_sources(Table *table, object slots, const ArrayRef *refs, void *stream) except -1:
    """Makes the streams that device arrays are worked on with wait until they have been read."""
    if (<Device *>table.device).table.event_record != NULL:
        order_sources(<Device *>table.device, slots, refs, stream, False)
    return 0


cdef int order_sources(Device *device, tuple slots, const ArrayRef *refs, void *stream, bint before) except -1:
    cdef void *works = NULL
    cdef void *last = stream
    cdef Py_ssize_t i
    for i in range(len(slots)):
        if refs[i].device_type != device.table.dl_device_type or refs[i].device_id != device.ordinal:
            continue
        worked_on(slots[i], device, &works)
        if works == last:
            continue
        last = works
        if before:
            order(device, works, device, stream)
        else:
            order(device, stream, device, works)
    return 0


cdef int worked_on(object array, Device *device, void **out) except -1:
    """The stream that an array is computed on, as far as its library tells; else the one the thread works on."""
    cdef ExchangeAPI *api
    if isinstance(array, Bits):
        array = (<Bits>array).array
    if isinstance(array, View):
        return stream_of(<View>array, out)
    api = find_exchange(type(array))
    if api == NULL or api.current_work_stream == NULL:
        return current_stream(device, out)
    if api.current_work_stream(device.table.dl_device_type, device.ordinal, out) != 0:
        propagate()
    return 0


cdef tuple brought(SlotTable cache, object slots, str what):
    """One array per slot; those of another device copied to where the cache is."""
    return tuple([brought_here(cache.held().device, array) for array in as_slots(cache, slots, what)])


cdef object brought_here(lkv_device *target, object array):
    cdef ArrayRef ref
    cdef Device *here = <Device *>target
    cdef Device *there
    cdef View source, copy
    cdef void *works = NULL
    cdef void *now = NULL
    cdef int i
    kept = borrow(array, &ref)
    if ref.device_type in (1, 3) or (ref.device_type == here.table.dl_device_type and ref.device_id == here.ordinal):
        return array
    if ref.data == NULL:  # nothing to read
        return fresh_view(tuple([ref.shape[i] for i in range(ref.ndim)]),
                          code_name(DLDataType(ref.dl_code, ref.dl_bits, 1)), location_of(target))
    source = borrowed_view(&ref, (array, kept))
    copy = fresh_view(source.shape, source.dtype, location_of(target))
    there = device_of(source)
    worked_on(array, there, &works)
    current_stream(there, &now)
    order(there, works, there, now)
    copy_elements(copy, source)
    order(there, now, there, works)
    return copy


cdef View borrowed_view(const ArrayRef *ref, object owner):
    """A view over an array's own memory, which `owner` keeps."""
    cdef lkv_buffer_desc desc
    cdef View view = View.__new__(View)
    cdef int64_t reach = 1, stride = 1
    cdef int i
    dtype = code_name(DLDataType(ref.dl_code, ref.dl_bits, 1))
    if not 0 <= ref.ndim <= 8:
        raise errors.ShapeMismatchError(f"array: expected at most 8 dims, got {ref.ndim}", actual=ref.ndim)
    view.ndim = ref.ndim
    for i in range(ref.ndim - 1, -1, -1):
        view.dims[i] = ref.shape[i]
        view.steps[i] = ref.strides[i] * ref.stride_unit // dtype.itemsize if ref.strides != NULL else stride
        stride *= max(ref.shape[i], 1)
        if ref.shape[i] > 1 and view.steps[i] < 0:
            raise errors.ShapeMismatchError("array: a copy of negative strides is not supported")
        reach += max(ref.shape[i] - 1, 0) * view.steps[i]
    memset(&desc, 0, sizeof(desc))
    desc.struct_size = sizeof(desc)
    desc.device = device_of_dlpack(DLDevice(ref.device_type, ref.device_id))
    desc.rows = reach
    desc.row_bytes = dtype.itemsize
    desc.dtype = dtype.code
    check(wrap(&desc, <void *>ref.data, drop_owner, <void *>owner, &view.buffer), "array")
    Py_INCREF(owner)
    view.data = <char *>ref.data
    view.code = dtype.code
    view.read_only = True
    return view


def as_view(array):
    """Return a read-only view over an array's own memory, whatever its library; nothing is copied."""
    cdef ArrayRef ref
    kept = borrow(array, &ref)
    return borrowed_view(&ref, keep_memory(array, kept, &ref))


cdef dict export_options(object array):
    """What `__dlpack__` of a CUDA array must know: the stream that will read it."""
    cdef lkv_device *device = NULL
    cdef void *stream = NULL
    try:
        kind, ordinal = array.__dlpack_device__()
    except (AttributeError, TypeError, ValueError):
        return {}
    if kind != CUDA:
        return {}
    if device_find(f"cuda:{ordinal}".encode(), &device) != LKV_OK:
        return {"stream": -1}  # no storage is there, and nobody will read it
    current_stream(<Device *>device, &stream)
    return {"stream": <size_t>stream or LEGACY_STREAM}


cdef int await_rows_on(View view, ExchangeAPI *api) except -1:
    """Makes the stream that another library works on wait for the rows."""
    cdef void *ready = NULL
    cdef void *works = NULL
    cdef Device *device = device_of(view)
    if api.current_work_stream == NULL:
        return await_rows_here(view)
    if api.current_work_stream(device.table.dl_device_type, device.ordinal, &works) != 0:
        propagate()
    stream_of(view, &ready)
    return order(device, ready, device, works)


cdef dict cuda_array_interface(View view):
    cdef void *ready = NULL
    cdef int i, itemsize
    memory(view)
    itemsize = dtype_info(view.code).itemsize
    if device_of(view).table.dl_device_type != CUDA:
        raise AttributeError(f"__cuda_array_interface__: the rows are on {view.device}")
    if view.code not in FORMAT:
        raise AttributeError(f"__cuda_array_interface__ has no word for {view.dtype}: use DLPack")
    usable(view)
    stream_of(view, &ready)
    strides = None if contiguous(view) else tuple([view.steps[i] * itemsize for i in range(view.ndim)])
    return {
        "version": 3,
        "shape": view.shape,
        "typestr": NUMPY_DTYPE[view.code].str,
        "data": (<size_t>view.data, view.read_only),
        "strides": strides,
        "stream": <size_t>ready or LEGACY_STREAM,
    }


cdef object cupy_array(View view):
    cdef int i, itemsize
    cdef int64_t last = 0
    cupy = import_extra("cupy", "cuda12' or 'latent-kv[cuda13")
    usable(view)
    itemsize = dtype_info(view.code).itemsize
    if device_of(view).table.dl_device_type != CUDA:
        try:
            return cupy.from_dlpack(view)
        except Exception as error:
            raise errors.DeviceMismatchError(f"cupy: expected CUDA memory, the view is on {view.device}",
                                             expected="cuda", actual=str(view.device)) from error
    await_rows_here(view)
    for i in range(view.ndim):
        last += max(view.dims[i] - 1, 0) * view.steps[i]
    owned = cupy.cuda.UnownedMemory(<size_t>view.data, (last + 1) * itemsize, view, device_of(view).ordinal)
    strides = tuple([view.steps[i] * itemsize for i in range(view.ndim)])
    return cupy.ndarray(view.shape, cupy_dtype(cupy, view.code), cupy.cuda.MemoryPointer(owned, 0), strides)


cdef dict CUPY_DTYPE = {}


cdef object cupy_dtype(object cupy, lkv_dtype code):
    """NumPy's dtype, or unsigned integers of the same size where CuPy does not know it."""
    found = CUPY_DTYPE.get(code)
    if found is None:
        found = NUMPY_DTYPE[code]
        try:
            cupy.empty(0, found)
        except (TypeError, ValueError):
            found = numpy.dtype(f"u{found.itemsize}")
        CUPY_DTYPE[code] = found
    return found


# ---- elements from view to view ----

cdef int copy_elements(View to, View source) except -1:
    """Copies all elements to a view of the same shape and type, after what either's stream has queued."""
    cdef Device *there
    cdef Device *here
    usable(to)
    usable(source)
    there, here = device_of(source), device_of(to)
    if to.read_only:
        raise errors.ReadOnlyError("copy_from: the rows are leased for reading")
    if to.shape != source.shape:
        raise errors.ShapeMismatchError(f"copy_from: expected {to.shape}, got {source.shape}", expected=to.shape,
                                        actual=source.shape)
    if to.code != source.code:
        raise errors.DTypeMismatchError(f"copy_from: expected {to.dtype}, got {source.dtype}; lkv never casts",
                                        expected=str(to.dtype), actual=str(source.dtype))
    if to.size == 0:
        return 0
    if here.table.host_accessible and there.table.host_accessible:
        to.numpy()[...] = source.numpy()
    elif there.table.host_accessible:
        move(here, LKV_HOST_TO_DEVICE, to, source)
    elif here.table.host_accessible:
        move(there, LKV_DEVICE_TO_HOST, to, source)
    elif related(here, there):
        move(here, LKV_DEVICE_TO_DEVICE, to, source)
    else:
        between = fresh_view(source.shape, source.dtype, "cpu")
        copy_elements(between, source)
        copy_elements(to, between)
    return 0


cdef int move(Device *device, lkv_copy_kind kind, View to, View source) except -1:
    """Lets a device copy, on its own view's stream; another device's stream is waited for, and waits."""
    cdef void *own = NULL
    cdef void *others = NULL
    stream_of(source if kind == LKV_DEVICE_TO_HOST else to, &own)
    if kind != LKV_DEVICE_TO_DEVICE:
        return move_runs(device, kind, to, source, own)
    stream_of(source, &others)
    order(device_of(source), others, device, own)
    move_runs(device, kind, to, source, own)
    return order(device, own, device_of(source), others)


cdef int move_runs(Device *device, lkv_copy_kind kind, View to, View source, void *stream) except -1:
    """One strided copy for each index of the dims before the two innermost pieces."""
    cdef int64_t[8] index
    cdef int64_t run = dtype_info(to.code).itemsize, height = 1, to_pitch, from_pitch, itemsize = run
    cdef int dim = to.ndim - 1, i
    cdef char *dst
    cdef const char *src
    cdef lkv_status status
    while dim >= 0 and (to.dims[dim] == 1 or (to.steps[dim] * itemsize == run and source.steps[dim] * itemsize == run)):
        run *= to.dims[dim]
        dim -= 1
    to_pitch = from_pitch = run
    if dim >= 0:
        height = to.dims[dim]
        to_pitch, from_pitch = to.steps[dim] * itemsize, source.steps[dim] * itemsize
        dim -= 1
    for i in range(dim + 1):
        index[i] = 0
    while True:
        dst, src = to.data, source.data
        for i in range(dim + 1):
            dst += index[i] * to.steps[i] * itemsize
            src += index[i] * source.steps[i] * itemsize
        with nogil:
            status = device.table.copy_2d(device.context, kind, dst, to_pitch, src, from_pitch, run, height, stream)
        check(status, "copy")
        i = dim
        while i >= 0:
            index[i] += 1
            if index[i] < to.dims[i]:
                break
            index[i] = 0
            i -= 1
        if i < 0:
            return 0


cdef View narrowed(View view, int axis, int64_t lo, int64_t hi):
    """The part of a view between two indices of one dim."""
    cdef View part = View.__new__(View)
    cdef int i
    part.ndim = view.ndim
    part.code = view.code
    part.read_only = view.read_only
    for i in range(view.ndim):
        part.dims[i] = view.dims[i]
        part.steps[i] = view.steps[i]
    part.dims[axis] = hi - lo
    part.data = view.data + lo * view.steps[axis] * dtype_info(view.code).itemsize
    hold(part, view.buffer, view.lease)
    return part


def gather_rows(View view not None, axis, rows):
    """Return a view of a new storage beside `view`, with only these indices of one dim; none may be out of range.

    The dims of `rows` take that one's place.
    """
    cdef const int64_t[::1] chosen = numpy.ascontiguousarray(rows, numpy.int64).reshape(-1)
    cdef int which = axis
    cdef int64_t count = chosen.shape[0], begin = 0, end
    cdef View made = fresh_view((*view.shape[:which], count, *view.shape[which + 1:]), view.dtype, view.device)
    while begin < count:
        end = begin + 1
        while end < count and chosen[end] == chosen[end - 1] + 1:
            end += 1
        copy_elements(narrowed(made, which, begin, end),
                      narrowed(view, which, chosen[begin], chosen[begin] + end - begin))
        begin = end
    return in_shape(made, (*view.shape[:which], *rows.shape, *view.shape[which + 1:]))


def rows_beside(SlotTable cache not None, LayerRows rows not None, layer, hi=None):
    """Return the same rows of another layer under the lease that `rows` holds; those before `hi`, if given."""
    if rows.lease == NULL:
        raise TypeError("the rows were never leased")
    cdef int64_t end = rows.hi if hi is None else min(max(<int64_t>hi, rows.lo), rows.hi)
    return make_rows(cache, cache.layer_index(layer), rows.lease, rows.lo, end, True, False)
