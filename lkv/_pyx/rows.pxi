# What a step or a read lease shows of one layer.


@cython.final
@cython.freelist(32)
cdef class LayerRows:
    """Rows of one layer, one view per slot, under one lease."""
    cdef tuple views
    cdef lkv_lease *lease
    cdef bint ends
    cdef readonly int64_t layer
    """The layer."""
    cdef readonly int64_t lo
    """The first row."""
    cdef readonly int64_t hi
    """The row behind the last."""

    def __init__(self):
        raise TypeError("LayerRows objects come from cache.read() and from steps")

    def __dealloc__(self):
        if self.lease != NULL:
            (<Handle *>self.lease).release()

    def __len__(self):
        return len(self.views)

    def __getitem__(self, slot):
        return self.views[slot]

    def __iter__(self):
        return iter(self.views)

    def numpy(self):
        """Return a tuple of NumPy arrays over the same memory, one per slot."""
        return tuple([(<View>view).numpy() for view in self.views])

    def torch(self):
        """Return a tuple of PyTorch tensors over the same memory, one per slot."""
        return tuple([(<View>view).torch() for view in self.views])

    def cupy(self):
        """Return a tuple of CuPy arrays over the same memory, one per slot."""
        return tuple([(<View>view).cupy() for view in self.views])

    @property
    def active(self):
        """Whether the lease has not ended."""
        return self.lease != NULL and (<Handle *>self.lease).active()

    def release(self):
        """End the right to read. Views that belong to a step end with the step."""
        if self.ends and self.lease != NULL:
            (<Handle *>self.lease).end(False)

    def __enter__(self):
        if not self.active:
            raise errors.LeaseEndedError("the lease has ended")
        return self

    def __exit__(self, kind, value, traceback):
        self.release()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")

    def __repr__(self):
        state = "" if self.active else ", ended"
        return f"LayerRows(layer {self.layer}, rows [{self.lo}, {self.hi}), {len(self)} slots{state})"


cdef LayerRows read_rows(SlotTable cache, int64_t layer, int64_t timeout_ns):
    cdef Handle *handle = <Handle *>new_lease(cache.table.queue, cache.table.device, committed_rows, 0)
    if handle == NULL:
        raise MemoryError("out of memory for a lease")
    try:
        raise_unless(acquire(handle.queue, &handle.request, timeout_ns), &handle.request, timeout_ns, "read")
        enter(handle, "read")
    except BaseException:
        discard(<lkv_lease *>handle)
        raise
    try:
        return make_rows(cache, layer, <lkv_lease *>handle, 0, handle.request.read_rows().hi, True, True)
    finally:
        handle.release()  # the views hold it now; without any, the right ends here


cdef LayerRows make_rows(SlotTable cache, int64_t layer, lkv_lease *lease, int64_t lo, int64_t hi, bint read_only,
                         bint ends):
    cdef LayerRows rows
    cdef tuple views = PyTuple_New(cache.table.n_slots)
    cdef View view
    cdef int32_t slot
    with cython.critical_section(cache):
        if not cache.table.populated(layer):
            raise errors.UnpopulatedLayerError(f"layer {layer} holds no storage")
        for slot in range(cache.table.n_slots):
            view = slot_view(cache, layer, slot, lease, lo, hi, read_only)
            Py_INCREF(view)
            PyTuple_SET_ITEM(views, slot, view)
    rows = LayerRows.__new__(LayerRows)
    rows.views = views
    rows.layer = layer
    rows.lo = lo
    rows.hi = hi
    rows.ends = ends
    (<Handle *>lease).retain()
    rows.lease = lease
    return rows


cdef View slot_view(SlotTable cache, int64_t layer, int32_t slot, lkv_lease *lease, int64_t lo, int64_t hi,
                    bint read_only):
    cdef View view = View.__new__(View)
    cdef const SlotShape *shape = &cache.table.shape(slot)
    cdef SlotPlace *place = &cache.table.at(layer, slot)
    cdef int64_t stride = 1, outer
    cdef int i, itemsize = shape.itemsize
    if read_only and loaded_bool((<Buffer *>place.buffer).poisoned):
        raise errors.PoisonedError(f"layer {layer}, slot {slot}: a write failed half-way; write it anew, then call "
                                   f"clear_poison() on its storage")
    view.code = shape.dtype
    view.read_only = read_only
    view.ndim = shape.ndim
    view.data = place.base + lo * place.row_stride
    outer = place.outer_stride // itemsize
    for i in range(shape.ndim - 1, -1, -1):
        view.dims[i] = shape.dims[i]
        if i > shape.axis:
            view.steps[i] = stride
            stride *= shape.dims[i]
        elif i == shape.axis:
            view.dims[i] = hi - lo
            view.steps[i] = place.row_stride // itemsize
        else:
            view.steps[i] = outer
            outer *= shape.dims[i]
    hold(view, place.buffer, lease)
    return view
