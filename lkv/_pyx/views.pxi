# What leases and caches hand out: a piece of a storage with a shape, that NumPy, PyTorch, CuPy and anything with DLPack
# or the buffer protocol can see without a copy.

cdef extern from *:
    """
    static PyObject *lkv_new_array(PyObject *descr, int ndim, npy_intp *dims, npy_intp *strides, void *data,
                                   int writeable, PyObject *base) {
      Py_INCREF(descr);
      PyObject *array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)descr, ndim, dims, strides, data,
                                             writeable ? NPY_ARRAY_WRITEABLE : 0, NULL);
      if (!array) return NULL;
      Py_INCREF(base);
      if (PyArray_SetBaseObject((PyArrayObject *)array, base) < 0) {
        Py_DECREF(array);
        return NULL;
      }
      PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_UPDATE_ALL);
      return array;
    }
    """
    object lkv_new_array(object descr, int ndim, cnp.npy_intp *dims, cnp.npy_intp *strides, void *data, int writeable,
                         object base)


@cython.no_gc  # a storage refers to nothing that could refer back
@cython.freelist(32)
cdef class View:
    """Some rows of a storage as an array of a fixed shape, made by leases and caches.

    It holds the memory, and a lease nobody ended; ending the lease ends the right to use what was exported before.
    Exports to other libraries share the memory: ``view.numpy()``, ``view.torch()``, ``view.cupy()``,
    ``np.from_dlpack(view)``, ``memoryview(view)``.
    """
    __dlpack_c_exchange_api__ = make_exchange_capsule()

    def __dealloc__(self):
        # Releases only: never waits, never needs another object.
        if self.buffer != NULL and (self.lease == NULL or (<Handle *>self.lease).buffer != self.buffer):
            (<Buffer *>self.buffer).release()
        if self.lease != NULL:
            (<Handle *>self.lease).release()

    def __init__(self):
        raise TypeError(f"{type(self).__name__} objects come from leases and caches")

    @property
    def shape(self):
        """The array's shape."""
        return tuple([self.dims[i] for i in range(self.ndim)])

    @property
    def strides(self):
        """The array's strides in elements."""
        return tuple([self.steps[i] for i in range(self.ndim)])

    @property
    def dtype(self):
        """The element type."""
        return dtypes.DType.from_code(self.code)

    @property
    def device(self):
        """Where the memory is."""
        return location_of(memory(self).device)

    @property
    def host_accessible(self):
        """Whether the CPU may load and store the elements."""
        return (<Device *>memory(self).device).table.host_accessible != 0

    @property
    def readonly(self):
        """Whether exports forbid writing."""
        return self.read_only

    @property
    def nbytes(self):
        """Bytes of the elements."""
        memory(self)
        return self.size * dtype_info(self.code).itemsize

    @property
    def size(self):
        """Number of elements."""
        cdef int64_t size = 1
        for i in range(self.ndim):
            size *= self.dims[i]
        return size

    @property
    def address(self):
        """The address of the first element."""
        return <size_t>self.data

    def __len__(self):
        if self.ndim == 0:
            raise TypeError("len() of a 0-d view")
        return self.dims[0]

    def numpy(self):
        """Return the rows as a NumPy array over the same memory; not writeable from a read lease.

        Raises
        ------
        DeviceMismatchError
            If the memory is not the host's.
        LeaseEndedError
            If the lease has ended.
        """
        usable(self)
        on_host(self, "numpy")
        cdef int i, itemsize = dtype_info(self.code).itemsize
        for i in range(self.ndim):
            self.byte_steps[i] = self.steps[i] * itemsize
        return lkv_new_array(NUMPY_DTYPE[self.code], self.ndim, <cnp.npy_intp *>self.dims,
                             <cnp.npy_intp *>self.byte_steps, self.data, not self.read_only, self)

    def torch(self):
        """Return the rows as a PyTorch tensor over the same memory.

        PyTorch has no read-only tensors: a tensor from a read lease must not be written.
        """
        cdef ExchangeAPI *api = torch_exchange()
        cdef void *tensor = NULL
        cdef Versioned *exported
        usable(self)
        if device_of(self).table.sync != NULL:
            await_rows_on(self, api)
        exported = export(self)
        exported.flags = 0
        if api.managed_tensor_to_py_object_no_sync(exported, &tensor) != 0:
            propagate()
        return take_object(<PyObject *>tensor)

    def cupy(self):
        """Return the rows as a CuPy array over the same memory, ready for CuPy's current stream.

        CuPy has no read-only arrays: an array from a read lease must not be written. Element types that CuPy does not
        know come as unsigned integers of the same size.

        Raises
        ------
        DeviceMismatchError
            If the memory is not a CUDA device's.
        """
        return cupy_array(self)

    @property
    def __cuda_array_interface__(self):
        """The rows by version 3 of the protocol; an AttributeError for other memory, bfloat16 and float8."""
        return cuda_array_interface(self)

    def copy_from(self, View source not None):
        """Copy all elements of a view of the same shape and type here, from whatever device."""
        copy_elements(self, source)

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"copy: a {array.dtype} view as {numpy.dtype(dtype)} needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __getbuffer__(self, Py_buffer *out, int flags):
        cdef int i, itemsize = dtype_info(self.code).itemsize if self.code else 1
        out.obj = None
        try:
            usable(self)
            on_host(self, "memoryview")
        except errors.LkvError as error:
            raise BufferError(str(error)) from error
        if flags & PyBUF_WRITABLE and self.read_only:
            raise BufferError("the rows are leased for reading")
        if self.code not in FORMAT:
            raise BufferError(f"{self.dtype} has no format in the buffer protocol: use numpy() or DLPack")
        for i in range(self.ndim):
            self.byte_steps[i] = self.steps[i] * itemsize
        if not contiguous(self):
            if not flags & PyBUF_STRIDES == PyBUF_STRIDES:
                raise BufferError("the rows are strided and the consumer cannot take strides")
            if flags & (PyBUF_C_CONTIGUOUS | PyBUF_ANY_CONTIGUOUS) & ~PyBUF_STRIDES:
                raise BufferError("the rows are strided and the consumer expects C order")
        if flags & PyBUF_F_CONTIGUOUS & ~PyBUF_STRIDES and not one_dimensional(self):
            raise BufferError("the rows are in C order and the consumer expects Fortran order")
        out.buf = self.data
        out.obj = self
        out.len = self.nbytes
        out.itemsize = itemsize
        out.readonly = self.read_only
        out.ndim = self.ndim
        out.format = <char *>(<bytes>FORMAT[self.code]) if flags & PyBUF_FORMAT else NULL
        out.shape = <Py_ssize_t *>self.dims if flags & PyBUF_ND else NULL
        out.strides = <Py_ssize_t *>self.byte_steps if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        out.suboffsets = NULL
        out.internal = NULL

    def __dlpack_device__(self):
        cdef Device *device = <Device *>memory(self).device
        return device.table.dl_device_type, device.ordinal

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export a DLPack capsule, versioned when `max_version` allows it.

        Raises
        ------
        BufferError
            If the rows are read-only and the consumer cannot be told so, or another device is asked for.
        """
        cdef DLManagedTensor *legacy
        cdef Versioned *tensor
        cdef bint versioned = max_version is not None and tuple(max_version) >= (1,)
        memory(self)
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            if tuple(dl_device) != (kDLCPU, 0) or copy is False:
                raise BufferError(f"dl_device: the memory is on {self.__dlpack_device__()}, not on {tuple(dl_device)}")
            copy = True
        else:
            await_rows(self, stream)
        if copy:
            target = self.device if dl_device is None or tuple(dl_device) == self.__dlpack_device__() else "cpu"
            capsule = copied_view(self, target).__dlpack__(stream=stream, max_version=max_version)
            if versioned:
                tensor = <Versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
                tensor.flags |= kDLFlagIsCopied
            return capsule
        if versioned:
            tensor = export(self)
            try:
                return PyCapsule_New(tensor, "dltensor_versioned", drop_versioned_capsule)
            except BaseException:
                tensor.deleter(tensor)
                raise
        if self.read_only:
            raise BufferError("the rows are read-only, and a consumer of DLPack before 1.0 cannot be told so")
        usable(self)
        legacy = export_legacy(self.buffer, self.lease, export_shape(self))
        if legacy == NULL:
            raise MemoryError("out of memory for a tensor's header")
        try:
            return PyCapsule_New(legacy, "dltensor", drop_legacy_capsule)
        except BaseException:
            legacy.deleter(legacy)
            raise

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")

    def __repr__(self):
        if self.buffer == NULL:
            return f"<{type(self).__name__} without memory>"
        state = "ended, " if self.lease != NULL and not (<Handle *>self.lease).active() else ""
        return (f"{type(self).__name__}({self.shape}, {self.dtype}, {self.device}, {state}"
                f"{'read-only' if self.read_only else 'writable'})")


cdef Buffer *memory(View view) except NULL:
    if view.buffer == NULL:
        raise TypeError(f"the {type(view).__name__} was never initialised")
    return <Buffer *>view.buffer


cdef ExchangeAPI *TORCH = NULL


cdef ExchangeAPI *torch_exchange() except NULL:
    global TORCH
    if TORCH == NULL:
        TORCH = find_exchange(import_extra("torch", "torch").Tensor)
        if TORCH == NULL:
            raise ImportError("torch() needs PyTorch 2.10 or newer; pip install 'latent-kv[torch]'")
    return TORCH


cdef int usable(View view) except -1:
    memory(view)
    if view.lease != NULL and not (<Handle *>view.lease).active():
        raise errors.LeaseEndedError("the lease has ended; arrays exported before are memory-safe, but no longer "
                                     "protected from writers")
    if view.lease != NULL and (<Handle *>view.lease).mode == LKV_READ:
        view.read_only = True  # C code may have downgraded it
    return 0


cdef int on_host(View view, str what) except -1:
    if not (<Device *>(<Buffer *>view.buffer).device).table.host_accessible:
        raise errors.DeviceMismatchError(f"{what}: expected host memory, the view is on {view.device}",
                                         expected="cpu", actual=str(view.device))
    return 0


cdef ExportShape export_shape(View view) noexcept:
    cdef ExportShape shape
    shape.data = view.data
    shape.dtype = view.code
    shape.ndim = view.ndim
    shape.shape = view.dims
    shape.strides = view.steps
    shape.read_only = view.read_only
    return shape


cdef Versioned *export(View view) except NULL:
    cdef Versioned *tensor
    usable(view)
    tensor = export_versioned(view.buffer, view.lease, export_shape(view))
    if tensor == NULL:
        raise MemoryError("out of memory for a tensor's header")
    return tensor


cdef bint one_dimensional(View view) noexcept:
    cdef int i, long_dims = 0
    for i in range(view.ndim):
        if view.dims[i] == 0:
            return True
        long_dims += view.dims[i] > 1
    return long_dims <= 1 and contiguous(view)


cdef bint contiguous(View view) noexcept:
    cdef int64_t stride = 1
    cdef int i
    for i in range(view.ndim):
        if view.dims[i] == 0:
            return True
    for i in range(view.ndim - 1, -1, -1):
        if view.dims[i] != 1 and view.steps[i] != stride:
            return False
        stride *= view.dims[i]
    return True


@cython.final
cdef class Bits:
    """Raw bits to be taken for another element type of the same size; made by `bits`."""
    cdef readonly object array
    """What was wrapped."""
    cdef lkv_dtype code

    def __init__(self):
        raise TypeError("Bits objects come from bits(array, dtype)")

    @property
    def dtype(self):
        """The element type the bits stand for."""
        return dtypes.DType.from_code(self.code)

    @property
    def shape(self):
        """The array's shape."""
        return tuple(self.array.shape)

    def __repr__(self):
        return f"bits({self.shape}, {self.dtype})"


def bits(array, dtype):
    """Say that an array's raw bits stand for another element type: ``bits(u16_array, "bfloat16")``.

    Parameters
    ----------
    array : array
        Anything a cache takes; usually unsigned integers.
    dtype : DType, str, numpy.dtype or torch.dtype
        What the bits stand for; must have the array's item size.

    Returns
    -------
    Bits
        To be appended in place of an array. Nothing is copied.

    Raises
    ------
    DTypeMismatchError
        If the sizes differ.
    """
    cdef ArrayRef ref
    cdef Bits made = Bits.__new__(Bits)
    found = dtypes.DType.of(dtype)
    if isinstance(array, (list, memoryview, bytearray)):
        array = numpy.asarray(array)
    if isinstance(array, Bits):
        array = (<Bits>array).array
    kept = borrow(array, &ref)
    if ref.dl_bits != found.dl_bits:
        raise errors.DTypeMismatchError(f"bits: expected elements of {found.itemsize} bytes for {found}, got "
                                        f"{ref.dl_bits // 8}", expected=found.itemsize, actual=ref.dl_bits // 8)
    made.array = array
    made.code = found.code
    return made


cdef void drop_versioned_capsule(object capsule) noexcept:
    cdef Versioned *tensor
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        tensor = <Versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        tensor.deleter(tensor)


cdef void drop_legacy_capsule(object capsule) noexcept:
    cdef DLManagedTensor *tensor
    if PyCapsule_IsValid(capsule, "dltensor"):
        tensor = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
        tensor.deleter(tensor)


cdef object copied_view(View view, object device):
    """The same elements in a storage of their own, writable."""
    usable(view)
    cdef View copy = fresh_view(view.shape, view.dtype, device)
    copy_elements(copy, view)
    return copy


cdef View fresh_view(tuple shape, object dtype, object device):
    """A view of a new storage; unlike a storage's, its shape may be empty or hold zeros."""
    cdef Storage storage = Storage(max(layout.checked_product(shape, "shape"), 1), dtype, device)
    return in_shape(storage.alias(), shape)


cdef View in_shape(View view, tuple shape):
    """Gives a view in C order another shape of as many elements."""
    cdef int64_t stride = 1
    cdef int i
    if len(shape) > 8:
        raise errors.GeometryError(f"shape: expected at most 8 dims, got {len(shape)}", actual=len(shape))
    view.ndim = <int>len(shape)
    for i in range(view.ndim - 1, -1, -1):
        view.dims[i] = shape[i]
        view.steps[i] = stride
        stride *= max(view.dims[i], 1)
    return view


cdef lkv_device *device_of_dlpack(DLDevice device) except NULL:
    if device.device_type in (1, 3):
        return cpu()
    if device.device_type == 2:
        return find_device(devices.resolve(devices.DeviceLocation("cuda", device.device_id)))
    raise errors.DeviceUnavailableError(f"device: DLPack device type {device.device_type} is not known")


cdef lkv_device *find_device(object location) except NULL:
    cdef lkv_device *device
    check(device_find(str(location).encode(), &device), "device")
    return device


cdef object location_of(lkv_device *device):
    return devices.DeviceLocation((<Device *>device).name.decode(), (<Device *>device).ordinal)


# ---- the exchange table of View: other libraries take views, and make them, without a Python call ----

cdef int exchange_allocate(DLTensor *prototype, Versioned **out, void *error_ctx,
                           void (*set_error)(void *, const char *, const char *) noexcept) noexcept with gil:
    out[0] = NULL
    try:
        shape = layout.check_dims([prototype.shape[i] for i in range(prototype.ndim)], "shape")
        out[0] = export(fresh_view(shape, code_name(prototype.dtype), location_of(device_of_dlpack(prototype.device))))
        return 0
    except BaseException as error:
        text = str(error).encode()
        set_error(error_ctx, type(error).__name__.encode(), text)
        return -1


cdef object code_name(DLDataType dtype):
    for known in dtypes.ALL:
        if known.dl_code == dtype.code and known.dl_bits == dtype.bits and dtype.lanes == 1:
            return known
    raise errors.DTypeMismatchError(f"dtype: DLPack ({dtype.code}, {dtype.bits}) x {dtype.lanes} is not known")


cdef int exchange_from_object(void *array, Versioned **out) noexcept with gil:
    out[0] = NULL
    try:
        out[0] = export(<View?>(<object>array))
        return 0
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        return -1


cdef int exchange_to_object(Versioned *tensor, void **out) noexcept with gil:
    out[0] = NULL
    try:
        view = view_of_tensor(tensor)
        Py_INCREF(view)
        out[0] = <void *>view
        return 0
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        return -1


cdef int exchange_borrow(void *array, DLTensor *out) noexcept with gil:
    cdef View view
    cdef const DTypeInfo *info
    try:
        view = <View?>(<object>array)
        usable(view)
        info = dtype_info(view.code)
        out.data = view.data
        out.device.device_type = (<Device *>(<Buffer *>view.buffer).device).table.dl_device_type
        out.device.device_id = (<Device *>(<Buffer *>view.buffer).device).ordinal
        out.ndim = view.ndim
        out.dtype.code = info.dl_code
        out.dtype.bits = info.dl_bits
        out.dtype.lanes = 1
        out.shape = view.dims
        out.strides = view.steps
        out.byte_offset = 0
        return 0
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        return -1


cdef int exchange_stream(int32_t device_type, int32_t device_id, void **out) noexcept with gil:
    out[0] = NULL
    try:
        return current_stream(<Device *>device_of_dlpack(DLDevice(device_type, device_id)), out)
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        return -1


cdef void drop_tensor(void *context) noexcept nogil:
    cdef Versioned *tensor = <Versioned *>context
    if tensor.deleter != NULL:
        tensor.deleter(tensor)


cdef View view_of_tensor(Versioned *tensor):
    """A view over memory that came as a DLPack tensor; takes the tensor over, also when it fails."""
    cdef lkv_buffer_desc desc
    cdef View view = View.__new__(View)
    cdef DLTensor *array = &tensor.dl_tensor
    cdef int64_t reach = 1, stride = 1
    cdef bint empty = False
    cdef int i
    try:
        dtype = code_name(array.dtype)
        if not 0 <= array.ndim <= 8:
            raise errors.ShapeMismatchError(f"tensor: expected at most 8 dims, got {array.ndim}")
        view.ndim = array.ndim
        for i in range(array.ndim - 1, -1, -1):
            view.dims[i] = array.shape[i]
            view.steps[i] = array.strides[i] if array.strides != NULL else stride
            stride *= max(array.shape[i], 1)
            empty |= array.shape[i] == 0
            if array.shape[i] > 1 and view.steps[i] < 0:
                raise errors.ShapeMismatchError("tensor: negative strides are not supported")
            reach += max(array.shape[i] - 1, 0) * view.steps[i]
        if empty:  # there may be no memory at all
            view = fresh_view(view.shape, dtype, location_of(device_of_dlpack(array.device)))
            drop_tensor(tensor)
            return view
        memset(&desc, 0, sizeof(desc))
        desc.struct_size = sizeof(desc)
        desc.device = device_of_dlpack(array.device)
        desc.rows = reach
        desc.row_bytes = dtype.itemsize
        desc.dtype = dtype.code
        desc.flags = LKV_READ_ONLY_MEMORY if tensor.flags & kDLFlagReadOnly else 0
        check(wrap(&desc, <char *>array.data + array.byte_offset, drop_tensor, tensor, &view.buffer), "tensor")
    except BaseException:
        drop_tensor(tensor)
        raise
    view.data = <char *>array.data + array.byte_offset
    view.code = dtype.code
    view.read_only = (tensor.flags & kDLFlagReadOnly) != 0
    return view


cdef ExchangeAPI EXCHANGE


cdef object make_exchange_capsule():
    EXCHANGE.header.version.major = 1
    EXCHANGE.header.version.minor = 3
    EXCHANGE.header.prev_api = NULL
    EXCHANGE.managed_tensor_allocator = exchange_allocate
    EXCHANGE.managed_tensor_from_py_object_no_sync = exchange_from_object
    EXCHANGE.managed_tensor_to_py_object_no_sync = exchange_to_object
    EXCHANGE.dltensor_from_py_object_no_sync = exchange_borrow
    EXCHANGE.current_work_stream = exchange_stream
    return PyCapsule_New(&EXCHANGE, "dlpack_exchange_api", NULL)
