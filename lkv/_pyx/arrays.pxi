# Arrays of other libraries, borrowed for a call: NumPy by its C interface, PyTorch and others by DLPack's exchange
# table, everything else by a DLPack capsule or the buffer protocol.

# NumPy's type number -> dtype code, 0 for what lkv has no word for; ml_dtypes registers its own behind 256.
cdef int[32] BUILTIN_CODE
cdef int EXTRA_COUNT = 0
cdef int[8] EXTRA_NUMBER
cdef int[8] EXTRA_CODE
cdef list NUMPY_DTYPE = [None] * (LKV_BOOL + 1)   # by code; keeps the descriptors alive
cdef dict FORMAT = {}                             # code -> struct format


cdef int fill_dtype_tables() except -1:
    global EXTRA_COUNT
    cdef int number, i
    for i in range(32):
        BUILTIN_CODE[i] = 0
    for dtype in dtypes.ALL:
        NUMPY_DTYPE[dtype.code] = dtype.numpy
        number = dtype.numpy.num
        if number < 32:
            BUILTIN_CODE[number] = dtype.code
            FORMAT[dtype.code] = dtype.numpy.char.encode()
        else:
            EXTRA_NUMBER[EXTRA_COUNT] = number
            EXTRA_CODE[EXTRA_COUNT] = dtype.code
            EXTRA_COUNT += 1
    # On LP64 both C types are 64 bits wide and NumPy keeps them apart.
    BUILTIN_CODE[<int>cnp.NPY_LONGLONG] = BUILTIN_CODE[<int>cnp.NPY_LONG] = LKV_I64
    return 0


cdef inline int numpy_code(cnp.ndarray array) noexcept:
    cdef int number = cnp.PyArray_TYPE(array), i
    if not cnp.PyArray_ISNOTSWAPPED(array):
        return 0
    if 0 <= number < 32:
        return BUILTIN_CODE[number]
    for i in range(EXTRA_COUNT):
        if EXTRA_NUMBER[i] == number:
            return EXTRA_CODE[i]
    return 0


cdef inline void set_code(ArrayRef *ref, int code) noexcept:
    cdef const DTypeInfo *info = dtype_info(code)
    ref.dl_code = info.dl_code if info != NULL else 255
    ref.dl_bits = info.dl_bits if info != NULL else 0


cdef inline void set_tensor(ArrayRef *ref, const DLTensor *tensor) noexcept:
    ref.data = <const char *>tensor.data + tensor.byte_offset
    ref.shape = tensor.shape
    ref.strides = tensor.strides
    ref.ndim = tensor.ndim
    ref.device_type = tensor.device.device_type
    ref.device_id = tensor.device.device_id
    ref.dl_code = tensor.dtype.code if tensor.dtype.lanes == 1 else 255
    ref.dl_bits = tensor.dtype.bits
    ref.stride_unit = (tensor.dtype.bits + 7) // 8


cdef inline int set_exchanged(ArrayRef *ref, const DLTensor *tensor) except -1:
    """As set_tensor, of what another library said: there is memory behind it, or nothing to read."""
    cdef int i
    set_tensor(ref, tensor)
    if tensor.data == NULL:
        for i in range(tensor.ndim):
            if tensor.shape[i] == 0:
                return 0
        raise errors.ArgumentTypeError("array: it has a shape, but no memory")
    return 0


cdef inline bint dense(const DLTensor *tensor) noexcept:
    """More than one element, in C order."""
    cdef int64_t stride = 1
    cdef int i
    if tensor.strides == NULL:
        return True
    for i in range(tensor.ndim - 1, -1, -1):
        if tensor.shape[i] != 1:
            if tensor.strides[i] != stride:
                return False
            stride *= tensor.shape[i]
    return stride != 1


# Types whose exchange table is known. Entries are only added, and each holds its type.
cdef enum:
    MOST_TYPES = 16
cdef (void *)[MOST_TYPES] KNOWN_TYPE
cdef (ExchangeAPI *)[MOST_TYPES] KNOWN_API
cdef bint[MOST_TYPES] KNOWN_LAZY   # PyTorch: a view may be negated, which DLPack cannot say
cdef int KNOWN_COUNT = 0
cdef list KNOWN_KEPT = []


cdef ExchangeAPI *find_exchange(object kind) except? NULL:
    """The exchange table of a type of arrays; NULL without an error when it has none."""
    global KNOWN_COUNT
    cdef ExchangeAPI *api
    cdef int i
    for i in range(KNOWN_COUNT):
        if KNOWN_TYPE[i] == <void *>kind:
            return KNOWN_API[i]
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    api = <ExchangeAPI *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    if api.header.version.major != 1:
        return NULL
    if KNOWN_COUNT < MOST_TYPES:
        KNOWN_KEPT.append((kind, capsule))
        KNOWN_TYPE[KNOWN_COUNT] = <void *>kind
        KNOWN_API[KNOWN_COUNT] = api
        KNOWN_LAZY[KNOWN_COUNT] = is_lazy(kind)
        KNOWN_COUNT += 1
    return api


cdef bint is_lazy(object kind) except -1:
    return hasattr(kind, "is_neg") and hasattr(kind, "resolve_neg")


cdef object borrow_exchanged(object array, ExchangeAPI *api, bint lazy, ArrayRef *ref):
    """Borrows by an exchange table that lends; a negated view comes as a copy."""
    cdef DLTensor tensor
    if api.dltensor_from_py_object_no_sync(<void *>array, &tensor) != 0:
        propagate()
    set_exchanged(ref, &tensor)
    # Only the imaginary part of a conjugate is a negated view, so it has gaps; asking costs more than looking.
    if lazy and not dense(&tensor) and array.is_neg():
        array = array.resolve_neg()
        if api.dltensor_from_py_object_no_sync(<void *>array, &tensor) != 0:
            propagate()
        set_exchanged(ref, &tensor)
        return array
    return None


cdef object keep_memory(object array, object kept, ArrayRef *ref):
    """What keeps an array's memory, not only the array: a library may give a tensor other memory later."""
    cdef Borrowed owned
    cdef ExchangeAPI *api = NULL
    if kept is None and not cnp.PyArray_Check(array) and not isinstance(array, View):
        api = find_exchange(type(array))
    if api == NULL:
        return array, kept
    owned = Borrowed.__new__(Borrowed)
    if api.managed_tensor_from_py_object_no_sync(<void *>array, &owned.versioned) != 0:
        propagate()
    set_exchanged(ref, &owned.versioned.dl_tensor)
    return owned


@cython.final
cdef class Borrowed:
    """Keeps what stands behind an ArrayRef until the call is over."""
    cdef Versioned *versioned
    cdef DLManagedTensor *legacy
    cdef Py_buffer buffer
    cdef bint has_buffer
    cdef object kept

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.legacy != NULL and self.legacy.deleter != NULL:
            self.legacy.deleter(self.legacy)
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)


cdef object borrow_capsule(object array, ArrayRef *ref):
    cdef Borrowed kept = Borrowed.__new__(Borrowed)
    options = export_options(array)
    try:
        capsule = array.__dlpack__(max_version=(1, 3), **options)
    except TypeError:
        capsule = array.__dlpack__(**options)
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        kept.versioned = <Versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        if kept.versioned.version.major != 1:
            raise errors.DTypeMismatchError(
                f"array: expected DLPack 1.x, got a capsule of version {kept.versioned.version.major}")
        set_exchanged(ref, &kept.versioned.dl_tensor)
    elif PyCapsule_IsValid(capsule, "dltensor"):
        kept.legacy = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
        PyCapsule_SetName(capsule, "used_dltensor")
        set_exchanged(ref, &kept.legacy.dl_tensor)
    else:
        raise errors.ArgumentTypeError(f"array: its __dlpack__() returned no DLPack capsule, but {capsule!r}")
    return kept


cdef int format_code(Py_buffer *buffer) except -1:
    text = buffer.format.decode() if buffer.format != NULL else "B"
    if text[:1] in "@=" or (text[:1] == "<" and sys.byteorder == "little"):
        text = text[1:]
    if len(text) != 1 or text not in "?bBhilqefd":
        return 0
    if text in "ilq":
        return LKV_I64 if buffer.itemsize == 8 else LKV_I32
    return {"?": LKV_BOOL, "b": LKV_I8, "B": LKV_U8, "h": LKV_I16, "e": LKV_F16, "f": LKV_F32, "d": LKV_F64}[text]


cdef object borrow_buffer(object array, ArrayRef *ref):
    cdef Borrowed kept = Borrowed.__new__(Borrowed)
    PyObject_GetBuffer(array, &kept.buffer, PyBUF_FULL_RO)
    kept.has_buffer = True
    if kept.buffer.suboffsets != NULL:
        raise errors.ShapeMismatchError("array: buffers with suboffsets are not supported")
    ref.data = <const char *>kept.buffer.buf
    ref.shape = <const int64_t *>kept.buffer.shape
    ref.strides = <const int64_t *>kept.buffer.strides
    ref.stride_unit = 1
    ref.ndim = kept.buffer.ndim
    ref.device_type = kDLCPU
    ref.device_id = 0
    set_code(ref, format_code(&kept.buffer))
    return kept


cdef inline bint borrow_known(object array, ArrayRef *ref) noexcept:
    """As much of borrow() as runs no Python code and keeps nothing; False, without an error, when it takes more."""
    cdef DLTensor tensor
    cdef int i
    if cnp.PyArray_CheckExact(array):
        ref.data = <const char *>cnp.PyArray_DATA(<cnp.ndarray>array)
        ref.shape = <const int64_t *>cnp.PyArray_DIMS(<cnp.ndarray>array)
        ref.strides = <const int64_t *>cnp.PyArray_STRIDES(<cnp.ndarray>array)
        ref.stride_unit = 1
        ref.ndim = cnp.PyArray_NDIM(<cnp.ndarray>array)
        ref.device_type = kDLCPU
        ref.device_id = 0
        set_code(ref, numpy_code(<cnp.ndarray>array))
        if (ref.dl_bits == 0 and cnp.PyArray_ISNUMBER(<cnp.ndarray>array)
                and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>array)):
            ref.dl_bits = <unsigned char>min(8 * cnp.PyArray_ITEMSIZE(<cnp.ndarray>array), 255)  # for bits()
        return True
    for i in range(KNOWN_COUNT):
        if KNOWN_TYPE[i] == <void *>Py_TYPE(array) and KNOWN_API[i].dltensor_from_py_object_no_sync != NULL:
            if KNOWN_API[i].dltensor_from_py_object_no_sync(<void *>array, &tensor) != 0:
                PyErr_Clear()
                return False
            set_tensor(ref, &tensor)
            return tensor.data != NULL and (not KNOWN_LAZY[i] or dense(&tensor))
    return False


cdef inline object borrow(object array, ArrayRef *ref):
    """Describes an array; returns what to keep until the call is over, or None."""
    cdef int i
    if borrow_known(array, ref):
        return None
    for i in range(KNOWN_COUNT):
        if KNOWN_TYPE[i] == <void *>Py_TYPE(array) and KNOWN_API[i].dltensor_from_py_object_no_sync != NULL:
            return borrow_exchanged(array, KNOWN_API[i], KNOWN_LAZY[i], ref)
    return borrow_slow(array, ref)


cdef object borrow_slow(object array, ArrayRef *ref):
    """Every kind of array that borrow() does not know by its type; returns what to keep until the call is over."""
    cdef ExchangeAPI *api
    cdef Borrowed kept
    cdef object inner
    if isinstance(array, Bits):
        inner = borrow((<Bits>array).array, ref)
        set_code(ref, (<Bits>array).code)
        return array, inner
    if isinstance(array, cnp.ndarray):
        if isinstance(array, numpy.ma.MaskedArray):
            raise errors.ArgumentTypeError("array: masked, and a cache keeps no masks: take array.filled(value)",
                                           actual=array)
        inner = numpy.asarray(array)  # a subclass, as a plain array
        return inner, borrow(inner, ref)
    api = find_exchange(type(array))
    if api != NULL:
        if api.dltensor_from_py_object_no_sync != NULL:
            return borrow_exchanged(array, api, is_lazy(type(array)), ref)
        kept = Borrowed.__new__(Borrowed)
        if api.managed_tensor_from_py_object_no_sync(<void *>array, &kept.versioned) != 0:
            propagate()
        set_exchanged(ref, &kept.versioned.dl_tensor)
        return kept
    if hasattr(array, "__dlpack__"):
        return borrow_capsule(array, ref)
    if PyObject_CheckBuffer(array):
        return borrow_buffer(array, ref)
    if hasattr(array, "__array_interface__"):
        inner = numpy.asarray(array)
        return inner, borrow(inner, ref)
    raise errors.ArgumentTypeError(
        f"array: expected something with DLPack or the buffer protocol, got {type(array).__name__}", actual=array)
