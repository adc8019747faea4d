# An open step of a persistent cache, and the call that writes all of its layers.


@cython.final
@cython.no_gc_clear  # the end of a step needs its cache
@cython.freelist(8)
cdef class Step:
    """An open step: the right to write the same rows of every layer, and to publish them together."""
    cdef SlotTable cache
    cdef lkv_lease *lease
    cdef uint64_t ticket                   # of the table while this step is open
    cdef readonly int64_t start
    """The first new row."""
    cdef readonly int64_t n
    """Number of new rows."""

    def __init__(self):
        raise TypeError("Step objects come from cache.step(n)")

    def __dealloc__(self):
        # A step that nobody ended is abandoned: what it wrote does not count.
        if self.lease != NULL:
            self.end(False)
            (<Handle *>self.lease).release()

    cdef int usable(self) except -1:
        if not self.open():
            raise errors.LeaseEndedError("the step has ended")
        if (<Handle *>self.lease).queue.forked():
            raise errors.ForkedError("the step was opened before fork() and cannot be used in the child")
        return 0

    cdef bint open(self) noexcept:
        return (self.lease != NULL and (<Handle *>self.lease).active()
                and self.cache.table.ticket() == self.ticket)

    cdef void close(self) noexcept:
        """Nobody writes for the step any more: who does in another thread is waited for."""
        cdef Table *table = self.cache.table
        table.close()
        # A child of fork() does not have the thread that would be waited for.
        if not table.queue.forked() and table.writing():
            with nogil:
                while table.writing():
                    yield_thread()

    cdef void end(self, bint publish) noexcept:
        if self.open():
            self.close()
        if (<Handle *>self.lease).active() and not publish:
            self.cache.table.forget_unpublished(self.start)
        (<Handle *>self.lease).end(False)

    @property
    def active(self):
        """Whether the step is still open."""
        return self.open()

    def append(self, layer, slots, *, copy=False):
        """Write this step's rows of one layer: one array per slot.

        As `SlotTable.append`, but locks nothing, and takes exactly `n` rows. Threads may append different layers.
        """
        cdef ArrayRef[STACK_SLOTS] stack
        cdef ArrayRef *refs = stack
        cdef int64_t index = as_index(layer, "layer"), rows = self.n
        cdef Fault fault
        cdef lkv_status status
        self.usable()
        cdef Table *table = self.cache.table
        expect_row(table, index, self.start)
        cdef void *stream = (<Handle *>self.lease).stream
        if table.n_slots > STACK_SLOTS:
            refs = <ArrayRef *>checked_malloc(table.n_slots * sizeof(ArrayRef))
        try:
            if copy or not borrow_plain(table, slots, refs):
                slots = as_slots(self.cache, slots, "append") if not copy else brought(self.cache, slots, "append")
                kept = borrow_all(self.cache, slots, refs, "append")
            if not table.check(index, refs, table.n_slots, &rows, &fault):
                raise_fault(self.cache, "append", &fault, slots, self.n)
            await_sources(table, slots, refs, stream)
            if rows * self.cache.token_bytes < RELEASE_GIL_FROM:
                status = table.write(self.ticket, stream, index, self.start, refs, rows, &fault)
            else:
                slots = tuple(slots)  # a list may change meanwhile
                with nogil:
                    status = table.write(self.ticket, stream, index, self.start, refs, rows, &fault)
            if status == LKV_E_INVALID:
                raise_fault(self.cache, "append", &fault, slots, self.n)
            check(status, "append")
            release_sources(table, slots, refs, stream)
            expect_row(table, index + 1, self.start)  # a model goes through its layers in order
        finally:
            if refs != stack:
                free(refs)

    def append_layers(self, slots):
        """Write this step's rows of all populated layers in one call.

        Parameters
        ----------
        slots : list or tuple
            Either one list of slot arrays per populated layer, or one array per slot with the populated layers
            stacked along a first dimension, ``[n_populated, n, *slot_trailing[s]]``. All are checked before any is
            written.
        """
        self.usable()
        append_all(self, slots)

    def reserve(self, layer):
        """Return the step's new rows of a layer, writable, for runtimes that compute straight into the cache.

        They hold whatever was there before: a rewind clears nothing. Say `note_write` when all of them are filled.
        """
        self.usable()
        cdef int64_t index = self.cache.layer_index(layer)
        if not self.cache.table.populated(index):
            raise errors.UnpopulatedLayerError(f"reserve: layer {index} holds no storage")
        self.cache.table.prepare(index, self.start, self.n)
        return make_rows(self.cache, index, self.lease, self.start, self.start + self.n, False, False)

    def note_write(self, layer):
        """Say that the rows handed out by `reserve`, or reached by a kernel through `alias`, are filled."""
        self.usable()
        self.cache.note(self.cache.layer_index(layer), self.start, self.n)

    def view(self, layer):
        """Return rows ``[0, cached_len + n)`` of a layer, read-only: what this step's attention reads.

        Raises
        ------
        IncompleteStepError
            If the step has not written the layer yet.
        """
        self.usable()
        cdef int64_t index = self.cache.layer_index(layer), end = self.start + self.n
        if self.cache.table.populated(index) and self.cache.table.written(index) < end:
            raise errors.IncompleteStepError(f"view: layer {index} has not been written in this step",
                                             expected=end, actual=self.cache.table.written(index))
        return make_rows(self.cache, index, self.lease, 0, end, True, False)

    def commit(self):
        """Publish the step and end it. Leaving the ``with`` block does the same.

        Raises
        ------
        IncompleteStepError
            If a populated layer was not written. The step is abandoned then.
        """
        self.usable()
        self.close()
        try:
            self.cache.check_complete("step", self.start + self.n)
        except BaseException:
            self.end(False)
            raise
        self.cache.table.queue.publish(self.start + self.n)
        self.end(True)

    def abandon(self):
        """End the step and publish nothing. Harmless after its end."""
        if self.open():
            self.end(False)

    def __enter__(self):
        self.usable()
        return self

    def __exit__(self, kind, value, traceback):
        if kind is not None:
            self.abandon()
        elif self.active:
            self.commit()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")

    def __repr__(self):
        state = "open" if self.active else "ended"
        return f"Step(rows [{self.start}, {self.start + self.n}), {state})"


cdef Step open_step(SlotTable cache, int64_t count, int64_t timeout_ns):
    cdef Step step = Step.__new__(Step)
    cdef Handle *handle = <Handle *>new_lease(cache.table.queue, cache.table.device, step_of, count)
    if handle == NULL:
        raise MemoryError("out of memory for a lease")
    try:
        raise_unless(acquire(handle.queue, &handle.request, timeout_ns), &handle.request, timeout_ns, "step")
        enter(handle, "step")
    except BaseException:
        discard(<lkv_lease *>handle)
        raise
    step.cache = cache
    step.lease = <lkv_lease *>handle
    step.start = handle.request.write_rows().lo
    step.n = count
    step.ticket = cache.table.ticket()
    if count > cache.table.capacity - step.start:
        handle.end(False)
        cache.check_room("step", step.start, count)
    cache.table.forget_unpublished(step.start)
    return step


cdef int append_all(Step step, object slots) except -1:
    cdef SlotTable cache = step.cache
    cdef Table *table = cache.table
    cdef void *stream = (<Handle *>step.lease).stream
    cdef int64_t n_slots = table.n_slots, layer, row = 0, rows, populated = 0
    cdef ArrayRef *refs
    cdef Fault fault
    cdef lkv_status status = LKV_OK
    if not isinstance(slots, (list, tuple)):
        raise errors.ArgumentTypeError(f"append_layers: expected a list or tuple, got {type(slots).__name__}",
                                       actual=slots)
    for layer in range(table.n_layers):
        populated += table.populated(layer)
    slots = tuple(slots)
    by_layer = len(slots) == 0 or isinstance(slots[0], (list, tuple, LayerRows))
    if by_layer and len(slots) != populated:
        raise errors.ShapeMismatchError(f"append_layers: expected {populated} layers, got {len(slots)}",
                                        expected=populated, actual=len(slots))
    if by_layer:
        slots = tuple([as_slots(cache, arrays, "append_layers") for arrays in slots])
    else:
        as_slots(cache, slots, "append_layers")
    refs = <ArrayRef *>checked_malloc(max(populated, 1) * n_slots * sizeof(ArrayRef))
    try:
        kept = borrow_layers(cache, slots, refs) if by_layer else borrow_stacked(cache, slots, refs, populated)
        for layer in range(table.n_layers):
            if not table.populated(layer):
                continue
            rows = step.n
            expect_row(table, layer, step.start)
            if not table.check(layer, refs + row * n_slots, n_slots, &rows, &fault):
                raise_fault(cache, f"append_layers: layer {layer}", &fault,
                            slots[row] if by_layer else [one_layer(array, row) for array in slots], step.n)
            row += 1
        for row in range(populated if by_layer else 1):
            await_sources(table, slots[row] if by_layer else slots, refs + row * n_slots, stream)
        if populated * step.n * cache.token_bytes < RELEASE_GIL_FROM:
            status = write_all(step, refs, &fault)
        else:
            with nogil:
                status = write_all(step, refs, &fault)
        if status == LKV_E_INVALID:
            raise_fault(cache, "append_layers", &fault, slots, step.n)
        check(status, "append_layers")
        for row in range(populated if by_layer else 1):
            release_sources(table, slots[row] if by_layer else slots, refs + row * n_slots, stream)
    finally:
        free(refs)
    return 0


cdef object one_layer(object array, int64_t row):
    try:
        return array[row]
    except Exception:
        return array  # it is only for a message


cdef lkv_status write_all(Step step, const ArrayRef *refs, Fault *fault) noexcept nogil:
    cdef Table *table = step.cache.table
    cdef int64_t layer
    cdef lkv_status status
    for layer in range(table.n_layers):
        if table.populated(layer):
            status = table.write(step.ticket, (<Handle *>step.lease).stream, layer, step.start, refs, step.n, fault)
            if status != LKV_OK:
                return status
            refs += table.n_slots
    return LKV_OK


cdef object borrow_layers(SlotTable cache, object slots, ArrayRef *refs):
    cdef object kept = None, one
    for arrays in slots:
        one = borrow_all(cache, arrays, refs, "append_layers")
        if one is not None:
            kept = (kept, one)
        refs += cache.table.n_slots
    return kept


cdef object borrow_stacked(SlotTable cache, object slots, ArrayRef *refs, int64_t populated):
    """One array per slot: its first dimension is taken apart."""
    cdef ArrayRef whole
    cdef int64_t layer, stride
    cdef int32_t slot
    cdef int i
    cdef object kept = None
    for slot in range(cache.table.n_slots):
        try:
            kept = (kept, borrow(slots[slot], &whole))
        except Exception as error:
            raise_borrow(cache, slot, "append_layers", error)
        if whole.ndim < 1 or whole.shape[0] != populated:
            raise errors.ShapeMismatchError(
                f"append_layers: slot {slot} ({cache.slots[slot].name}): expected {populated} layers stacked along the "
                f"first dimension, got {described(slots[slot])}", expected=populated)
        stride = whole.stride_unit if whole.strides != NULL else dtype_bytes(&whole)
        if whole.strides != NULL:
            stride *= whole.strides[0]
        else:
            for i in range(1, whole.ndim):
                stride *= whole.shape[i]
        whole.ndim -= 1
        whole.shape += 1
        if whole.strides != NULL:
            whole.strides += 1
        for layer in range(populated):
            refs[layer * cache.table.n_slots + slot] = whole
            refs[layer * cache.table.n_slots + slot].data = whole.data + layer * stride
    return kept


cdef inline int64_t dtype_bytes(const ArrayRef *ref) noexcept:
    return (ref.dl_bits + 7) // 8
