# Storage and Lease: the Python face of the core's buffers and leases.

cdef class Storage:
    """Reference-counted memory on one device, as rows that can be leased.

    Parameters
    ----------
    shape : int or tuple of int
        The shape of the whole; an int is that many rows of one element. Rows are counted along `axis`.
    dtype : DType, str, numpy.dtype or torch.dtype
        Element type.
    device : str or DeviceLocation
        ``"cpu"`` or ``"cuda:0"``.
    axis : int
        Which dimension counts the rows.
    huge_pages : bool
        Ask the operating system for huge pages: faster to fill, resident in steps of 2 MB.

    Raises
    ------
    GeometryError
        If the size is zero, negative, or does not fit the address space. Nothing is allocated.
    OutOfMemoryError
        If the device has not enough memory.

    Notes
    -----
    Fresh memory reads as zeros and, on the host, takes address space only, until it is written. A storage exports
    nothing itself: its leases do, and `alias` for runtimes that must keep an address.
    """

    def __init__(self, shape, dtype="uint8", device="cpu", *, axis=0, huge_pages=False):
        if self.buffer != NULL:
            raise TypeError("a Storage cannot be initialised twice")
        found = dtypes.DType.of(dtype)
        make(self, shape, found, axis, find_device(devices.resolve(device)), LKV_HUGE_PAGES if huge_pages else 0)

    @staticmethod
    def wrap(array, *, axis=0, readonly=None):
        """Make a storage over an array's own host memory, which it keeps alive.

        The garbage collector does not look into it: an array that refers back to its storage keeps both for ever.

        Parameters
        ----------
        array : array
            In C order, on the host: NumPy, PyTorch, anything with DLPack or the buffer protocol.
        axis : int
            Which dimension counts the rows.
        readonly : bool, optional
            Refuse write leases. By default as the array says.
        """
        cdef ArrayRef ref
        cdef Storage storage = Storage.__new__(Storage)
        kept = borrow(array, &ref)
        if ref.device_type not in (1, 3):
            raise errors.DeviceMismatchError("array: expected host memory", expected="cpu", actual=ref.device_type)
        cdef object dtype = code_name(DLDataType(ref.dl_code, ref.dl_bits, 1))
        cdef int64_t stride = dtype.itemsize
        cdef int i
        layout.check_dims([ref.shape[i] for i in range(ref.ndim)], "array", 1)
        for i in range(ref.ndim - 1, -1, -1):
            if ref.strides != NULL and ref.shape[i] != 1 and ref.strides[i] * ref.stride_unit != stride:
                raise errors.ShapeMismatchError("array: expected C order", expected="C order")
            stride *= ref.shape[i]
        if kept is not None and type(kept) is type(array):
            raise errors.ShapeMismatchError("array: a lazily negated view has no memory of its own; resolve it first")
        if readonly is None:
            readonly = not is_writable(array, kept)
        owner = keep_memory(array, kept, &ref)
        adopt_memory(storage, <void *>ref.data, tuple([ref.shape[i] for i in range(ref.ndim)]), dtype, axis, readonly,
                     owner)
        return storage

    @staticmethod
    def from_address(address, shape, dtype="uint8", *, owner=None, axis=0, readonly=False):
        """Make a storage over host memory at an address, which must stay valid as long as `owner` lives.

        The garbage collector does not look into it: an owner that refers back to its storage keeps both for ever.
        """
        cdef Storage storage = Storage.__new__(Storage)
        address = layout.check_count(address, "address", 1)
        adopt_memory(storage, <void *><size_t>address, shape, dtypes.DType.of(dtype), axis, readonly, owner)
        return storage

    @staticmethod
    def from_capsule(capsule):
        """Take the storage out of a capsule named ``"lkv.buffer"``: what C code made becomes Python's.

        The capsule's reference to the buffer is shared, not taken. The shape is ``(rows, row bytes)``, in elements.
        """
        if not PyCapsule_IsValid(capsule, "lkv.buffer"):
            raise errors.ArgumentTypeError("capsule: expected one named 'lkv.buffer'", actual=capsule)
        return storage_of(<Buffer *>PyCapsule_GetPointer(capsule, "lkv.buffer"))

    def capsule(self):
        """Return a capsule ``"lkv.buffer"`` around the ``lkv_buffer *``, for C code; it holds a reference."""
        held(self).retain()
        return PyCapsule_New(self.buffer, "lkv.buffer", drop_buffer_capsule)

    def __dealloc__(self):
        if self.buffer != NULL:
            (<Buffer *>self.buffer).release()

    @property
    def rows(self):
        """Number of rows, the size of dimension `axis`."""
        return held(self).rows

    @property
    def nbytes(self):
        """Bytes in all."""
        return held(self).nbytes

    @property
    def dtype(self):
        """The element type."""
        return dtypes.DType.from_code(held(self).dtype)

    @property
    def device(self):
        """Where the memory is."""
        return location_of(held(self).device)

    @property
    def id(self):
        """A process-unique number, never reused."""
        return held(self).id

    @property
    def address(self):
        """The address of the first byte; hold a lease while using it."""
        return <size_t>held(self).data

    @property
    def handle(self):
        """The ``lkv_buffer *`` as an integer, for foreign function interfaces; borrowed."""
        return <size_t>held(self)

    @property
    def readonly(self):
        """Whether the memory refuses write leases."""
        return held(self).read_only

    @property
    def version(self):
        """Moves by one with every completed write."""
        return held(self).version.now()

    def bump_version(self):
        """Say that the content changed in a way lkv did not see, such as a kernel through a raw pointer."""
        held(self).bump_version()

    @property
    def poisoned(self):
        """Whether a write failed half-way."""
        return loaded_bool(held(self).poisoned)

    def clear_poison(self):
        """Say that the content is good again, usually after writing it anew."""
        held(self).poisoned.store(False)

    @property
    def refcount(self):
        """References to the memory: of storages, caches, leases and exports. A snapshot, for tests."""
        return loaded_u32(held(self).refs)

    @property
    def claimed(self):
        """Rows that branches of a functional cache have claimed."""
        return loaded_i64(held(self).claimed)

    def claim(self, expected, new):
        """Move the claimed length from `expected` to `new` rows; False, and nothing moves, when it is another."""
        cdef int64_t from_rows = as_index(expected, "expected"), to_rows = as_index(new, "new")
        held(self)
        cdef lkv_status status = claim(self.buffer, from_rows, to_rows)
        if status == LKV_E_CONFLICT:
            return False
        check(status)
        return True

    def read(self, lo=0, hi=None, timeout=None):
        """Lease rows ``[lo, hi)`` for reading.

        Parameters
        ----------
        lo, hi : int
            The rows; to the end by default.
        timeout : float, optional
            Seconds to wait at most; 0 tries, None waits for ever.

        Returns
        -------
        Lease
            A context manager; without a ``with`` block it lives as long as anything exported from it.

        Raises
        ------
        LeaseTimeoutError
            If the rows were not free in time.
        WouldDeadlockError
            If this thread itself holds what it would wait for.
        PoisonedError
            If a write failed half-way.
        ForkedError
            In a child of the process that made the storage.
        """
        return make_lease(self, LKV_READ, lo, hi, timeout)

    def write(self, lo=0, hi=None, timeout=None):
        """Lease rows ``[lo, hi)`` for writing; as `read`.

        An exception that leaves the ``with`` block poisons the storage.
        """
        return make_lease(self, LKV_WRITE, lo, hi, timeout)

    def alias(self, shape=None):
        """Export all of the memory without a lease, for runtimes that must keep an address (graph capture).

        The memory lives as long as the export. Synchronising with writers is up to the caller.

        Parameters
        ----------
        shape : tuple of int, optional
            Another shape of as many elements, in C order, such as ``(n_pages, page_size, width)``.
        """
        held(self)
        cdef View view = View.__new__(View)
        cdef int64_t stride = 1
        cdef int i
        shape_rows(view, self, 0, held(self).rows)
        if shape is not None:
            dims = layout.check_dims(shape, "shape", 1)
            if len(dims) > 8 or layout.checked_product(dims, "shape") != layout.checked_product(self.shape, "shape"):
                raise errors.ShapeMismatchError(f"shape: expected as many elements as {self.shape}, got {dims}",
                                                expected=self.shape, actual=dims)
            view.ndim = len(dims)
            for i in range(view.ndim - 1, -1, -1):
                view.dims[i] = dims[i]
                view.steps[i] = stride
                stride *= view.dims[i]
        view.read_only = held(self).read_only
        hold(view, self.buffer, NULL)
        return view

    def copy(self, device=None):
        """Return a new storage with the same content, here or on another device."""
        held(self)
        cdef Storage made = Storage(self.shape, self.dtype, self.device if device is None else device, axis=self.axis)
        cdef Lease source = make_lease(self, LKV_READ, 0, None, None)
        cdef Lease target = make_lease(made, LKV_WRITE, 0, None, None)
        cdef size_t nbytes = held(self).nbytes
        cdef lkv_status status
        with source, target:
            if device_of(source) != device_of(target) and related(device_of(source), device_of(target)):
                copy_elements(target, source)
                return made
            with nogil:
                status = lease_copy_2d(target.lease, 0, nbytes, source.lease, 0, nbytes, nbytes, 1)
            check(status, "copy")
        return made

    def read_host(self, lo=0, hi=None, timeout=None):
        """Return rows ``[lo, hi)`` as bytes, from whatever device."""
        cdef Lease lease = make_lease(self, LKV_READ, lo, hi, timeout)
        cdef bytes out
        cdef char *to
        cdef size_t nbytes
        cdef lkv_status status
        with lease:
            row_major(self, "read_host")
            nbytes = (lease.hi - lease.lo) * held(self).row_bytes
            out = PyBytes_FromStringAndSize(NULL, nbytes)
            to = PyBytes_AS_STRING(out)
            with nogil:
                status = read_host(lease.lease, 0, to, nbytes)
            check(status, "read_host")
        return out

    def write_host(self, data, lo=0, timeout=None):
        """Write bytes to whole rows from `lo` on; the source may be reused at once.

        Parameters
        ----------
        data : bytes-like
            A whole number of rows.
        lo : int
            The first row.
        timeout : float, optional
            As in `read`.
        """
        cdef const unsigned char[::1] source = data if isinstance(data, bytes) else as_bytes(data)
        cdef size_t nbytes = source.shape[0]
        row_major(self, "write_host")
        if nbytes % held(self).row_bytes:
            raise errors.ShapeMismatchError(f"data: expected a multiple of {held(self).row_bytes} bytes, got {nbytes}",
                                            expected=held(self).row_bytes, actual=nbytes)
        cdef int64_t first = as_index(lo, "lo")
        if first < 0 or first > held(self).rows - <int64_t>(nbytes // held(self).row_bytes):
            raise errors.CapacityError(f"data: {nbytes // held(self).row_bytes} rows at {first} do not fit "
                                       f"{held(self).rows}", expected=held(self).rows, actual=first)
        if nbytes == 0:
            return
        cdef Lease lease = make_lease(self, LKV_WRITE, first, first + nbytes // held(self).row_bytes, timeout)
        cdef lkv_status status
        with lease:
            with nogil:
                status = write_host(lease.lease, 0, &source[0], nbytes)
            check(status, "write_host")

    def release_rows(self, lo=0, hi=None):
        """Give whole pages inside rows ``[lo, hi)`` back to the operating system; all of these rows read as zeros.

        Raises
        ------
        LeaseTimeoutError
            If the rows are leased.
        """
        row_major(self, "release_rows")
        cdef int64_t first = as_index(lo, "lo")
        cdef int64_t last = held(self).rows if hi is None else as_index(hi, "hi")
        check_rows(self, LKV_WRITE, first, last)
        cdef lkv_status status
        with nogil:
            status = release_rows(self.buffer, first, last)
        check(status, "release_rows")

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")

    def __eq__(self, other):
        return isinstance(other, Storage) and self.buffer == (<Storage>other).buffer

    def __hash__(self):
        return <Py_hash_t>(<size_t>self.buffer >> 4)

    def __repr__(self):
        if self.buffer == NULL:
            return "<Storage without memory>"
        state = ", poisoned" if self.poisoned else ""
        return f"Storage({self.shape}, {self.dtype}, {self.device}, id {self.id}, version {self.version}{state})"


cdef int make(Storage storage, object shape, object dtype, object axis, lkv_device *device,
              uint32_t flags) except -1:
    cdef lkv_buffer_desc desc
    cdef lkv_buffer *buffer
    cdef tuple described = describe(&desc, shape, dtype, axis)
    desc.device = device
    desc.flags |= flags
    cdef lkv_status status = create(&desc, &buffer)
    if status != LKV_OK:
        raise_status(status, "", desc.rows * desc.row_bytes, device)
    return fill(storage, buffer, described)


cdef int fill(Storage storage, lkv_buffer *buffer, tuple described) except -1:
    """Puts a buffer and its shape into a storage, together; takes the reference."""
    if storage.buffer != NULL:  # an argument's own code was here first
        (<Buffer *>buffer).release()
        raise TypeError("a Storage cannot be initialised twice")
    storage.shape, storage.axis = described
    storage.buffer = buffer
    return 0


cdef tuple describe(lkv_buffer_desc *desc, object shape, object dtype, object axis):
    dims = layout.check_dims(shape if hasattr(shape, "__iter__") else (shape,), "shape", 1)
    if not 1 <= len(dims) <= 8:
        raise errors.GeometryError(f"shape: expected 1 to 8 dims, got {len(dims)}", actual=len(dims))
    nbytes = layout.checked_product((*dims, dtype.itemsize), "shape")
    along = layout.check_index(axis, len(dims), "axis")
    memset(desc, 0, sizeof(desc[0]))
    desc.struct_size = sizeof(desc[0])
    desc.rows = dims[along]
    desc.row_bytes = nbytes // desc.rows
    desc.dtype = dtype.code
    if math.prod(dims[:along]) > 1:
        desc.flags = LKV_STRIDED_ROWS
    return dims, along


cdef int adopt_memory(Storage storage, void *data, object shape, object dtype, object axis, bint readonly,
                      object owner) except -1:
    cdef lkv_buffer_desc desc
    cdef lkv_buffer *buffer
    cdef tuple described = describe(&desc, shape, dtype, axis)
    if readonly:
        desc.flags |= LKV_READ_ONLY_MEMORY
    check(wrap(&desc, data, drop_owner, <void *>owner, &buffer), "array")
    Py_INCREF(owner)
    return fill(storage, buffer, described)


cdef Storage storage_of(Buffer *buffer):
    """A Storage around a buffer that C code made, of which the shape is not known."""
    cdef Storage storage = Storage.__new__(Storage)
    width = buffer.row_bytes // dtype_info(buffer.dtype).itemsize
    shape = (buffer.rows, width)
    storage.shape = shape if width > 1 else shape[:1]
    buffer.retain()
    storage.buffer = <lkv_buffer *>buffer
    return storage


cdef Buffer *held(Storage storage) except NULL:
    if storage.buffer == NULL:
        raise TypeError("the Storage was never initialised")
    return <Buffer *>storage.buffer


@cython.no_gc
cdef class Lease(View):
    """A held right to read or write some rows of a storage, and those rows as an array.

    Leaving its ``with`` block, or `release`, ends the right. The memory outlives it.
    """

    @property
    def storage(self):
        """The storage whose rows these are."""
        return self.storage

    @property
    def lo(self):
        """The first row."""
        return self.lo

    @property
    def hi(self):
        """The row behind the last."""
        return self.hi

    @property
    def mode(self):
        """``"read"`` or ``"write"``."""
        memory(self)
        return "write" if (<Handle *>self.lease).mode == LKV_WRITE else "read"

    @property
    def active(self):
        """Whether the right has not ended."""
        return self.lease != NULL and (<Handle *>self.lease).active()

    def release(self):
        """End the right. Doing it twice is harmless; another thread may do it."""
        if self.lease != NULL:
            (<Handle *>self.lease).end(False)

    def downgrade(self):
        """Turn a write lease into a read lease of the same rows without a gap; the version moves."""
        usable(self)
        check(downgrade(self.lease), "downgrade")
        self.read_only = True

    @staticmethod
    def from_capsule(capsule):
        """Take the lease out of a capsule named ``"lkv.lease"``: what C code acquired becomes Python's to use and end.

        The capsule's reference to the lease is shared, not taken. The shape is that of `Storage.from_capsule`.
        """
        cdef Handle *handle
        if not PyCapsule_IsValid(capsule, "lkv.lease"):
            raise errors.ArgumentTypeError("capsule: expected one named 'lkv.lease'", actual=capsule)
        handle = <Handle *>PyCapsule_GetPointer(capsule, "lkv.lease")
        handle.retain()
        return lease_object(storage_of(<Buffer *>handle.buffer), <lkv_lease *>handle, handle.rows.lo, handle.rows.hi)

    def capsule(self):
        """Return a capsule ``"lkv.lease"`` around the ``lkv_lease *``, for C code; it holds a reference."""
        usable(self)
        (<Handle *>self.lease).retain()
        return PyCapsule_New(self.lease, "lkv.lease", drop_lease_capsule)

    def __enter__(self):
        usable(self)
        return self

    def __exit__(self, kind, value, traceback):
        # An exception inside a write leaves rows of which nobody knows how far they were written.
        memory(self)
        (<Handle *>self.lease).end(kind is not None)


cdef void drop_buffer_capsule(object capsule) noexcept:
    (<Buffer *>PyCapsule_GetPointer(capsule, "lkv.buffer")).release()


cdef void drop_lease_capsule(object capsule) noexcept:
    (<Handle *>PyCapsule_GetPointer(capsule, "lkv.lease")).release()


cdef inline void hold(View view, lkv_buffer *buffer, lkv_lease *lease) noexcept:
    (<Buffer *>buffer).retain()
    view.buffer = buffer
    if lease != NULL:
        (<Handle *>lease).retain()
        view.lease = lease


cdef inline int shape_rows(View view, Storage storage, int64_t lo, int64_t hi) except -1:
    """Gives a view the shape of rows [lo, hi) of a storage."""
    cdef Buffer *buffer = <Buffer *>storage.buffer
    cdef tuple shape = storage.shape
    cdef int ndim = <int>PyTuple_GET_SIZE(shape), i
    cdef int64_t stride = 1, dim
    view.code = buffer.dtype
    view.ndim = ndim
    view.data = buffer.data
    for i in range(ndim - 1, -1, -1):
        dim = shape[i]
        view.dims[i] = dim
        view.steps[i] = stride
        if i == storage.axis:
            view.dims[i] = hi - lo
            view.data += lo * stride * dtype_info(buffer.dtype).itemsize
        stride *= dim
    return 0


cdef int row_major(Storage storage, str what) except -1:
    held(storage)
    if storage.axis != 0:
        raise errors.ShapeMismatchError(f"{what}: the rows of this storage are strided (axis {storage.axis}): lease",
                                        expected=0, actual=storage.axis)
    return 0


cdef int check_rows(Storage storage, lkv_mode mode, int64_t lo, int64_t hi) except -1:
    cdef lkv_status status = check_acquire(<lkv_buffer *>held(storage), mode, lo, hi)
    if status == LKV_E_INVALID:
        raise errors.LayerIndexError(f"rows: expected a range within [0, {held(storage).rows}), got [{lo}, {hi})",
                                     expected=(0, held(storage).rows), actual=(lo, hi))
    return check(status)


cdef Lease make_lease(Storage storage, lkv_mode mode, object lo, object hi, object timeout):
    cdef int64_t first = as_index(lo, "lo")
    cdef int64_t last = held(storage).rows if hi is None else as_index(hi, "hi")
    cdef int64_t timeout_ns = as_timeout(timeout)
    cdef Handle *handle
    cdef lkv_status status
    check_rows(storage, mode, first, last)
    while True:
        handle = <Handle *>new_row_lease(storage.buffer, mode, first, last)
        if handle == NULL:
            raise MemoryError("out of memory for a lease")
        try:
            status = acquire(handle.queue, &handle.request, timeout_ns)
        except BaseException:
            discard(<lkv_lease *>handle)
            raise
        if status != LKV_OK:
            try:
                raise_wait(status, &handle.request, timeout_ns, "read" if mode == LKV_READ else "write")
            finally:
                discard(<lkv_lease *>handle)
        status = check_granted(<lkv_lease *>handle)
        if status == LKV_OK:
            break
        handle.queue.release(handle.request)
        discard(<lkv_lease *>handle)
        if status != LKV_E_CONFLICT:
            check(status)
    return lease_object(storage, <lkv_lease *>handle, first, last)


cdef inline Lease lease_object(Storage storage, lkv_lease *handle, int64_t lo, int64_t hi):
    """The Lease around a handle, which it takes over."""
    cdef Lease lease = Lease.__new__(Lease)
    lease.lease = handle
    lease.buffer = storage.buffer
    lease.storage = storage
    lease.lo = lo
    lease.hi = hi
    lease.read_only = (<Handle *>handle).mode == LKV_READ
    shape_rows(lease, storage, lo, hi)
    return lease


cdef object as_bytes(object data):
    try:
        view = memoryview(data)
        if not view.c_contiguous:
            raise TypeError("the bytes have gaps")
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, BufferError) as error:
        raise errors.ArgumentTypeError(f"data: expected bytes in one run, got {type(data).__name__}: {error}",
                                       actual=data) from error


cdef bint is_writable(object array, object kept) except -1:
    if isinstance(array, View):
        return not (<View>array).read_only
    if isinstance(array, Bits):
        return is_writable((<Bits>array).array, kept[1])
    if isinstance(kept, Borrowed) and (<Borrowed>kept).versioned != NULL:
        return not (<Borrowed>kept).versioned.flags & kDLFlagReadOnly
    if isinstance(kept, tuple):
        array = kept[0]  # what NumPy made of it
    flags = getattr(array, "flags", None)
    if flags is not None and hasattr(flags, "writeable"):
        return flags.writeable
    if PyObject_CheckBuffer(array):
        return not memoryview(array).readonly
    return True
