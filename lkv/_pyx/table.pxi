# The half of the persistent caches that runs once per layer and token: append, step, read.

cdef enum:
    STACK_SLOTS = 8            # more slots than this take their array descriptions from the heap
    RELEASE_GIL_FROM = 65536   # bytes; below, giving the GIL away costs more than the copy


cdef class SlotTable:
    """Layers of slots with one published length; `lkv.cache` builds its caches on it."""
    cdef Table *table
    cdef int64_t token_bytes               # of one layer
    cdef list storages                     # [layer * n_slots + slot] -> Storage or None
    cdef readonly tuple slots
    """One `SlotSpec` per slot."""
    cdef readonly object dtype
    """The element type of all slots."""
    cdef object __weakref__

    def _open(self, n_layers, max_seq_len, slots, shapes, dtype, device):
        """Fix the geometry, once; `shapes` are ``(dims, axis)`` of what an append hands to each slot."""
        if self.table != NULL:
            raise TypeError("a cache cannot be initialised twice")
        cdef Table *table = new Table(n_layers, len(slots), max_seq_len, find_device(device))
        try:
            describe_slots(self, table, slots, shapes, dtype)
        except BaseException:
            del table
            raise
        self.slots = tuple(slots)
        self.dtype = dtype
        self.storages = [None] * (n_layers * len(slots))
        self.table = table

    def __dealloc__(self):
        del self.table

    cdef Table *held(self) except NULL:
        if self.table == NULL:
            raise TypeError("the cache was never initialised")
        return self.table

    @property
    def n_layers(self):
        """Number of layers, populated or not."""
        return self.held().n_layers

    @property
    def n_slots(self):
        """Number of slots in each layer."""
        return self.held().n_slots

    @property
    def max_seq_len(self):
        """Rows allocated."""
        return self.held().capacity

    @property
    def cached_len(self):
        """Rows published."""
        return self.held().queue.length()

    def written_len(self, layer):
        """Return the rows of a layer that have been written, published or not."""
        return self.held().written(self.layer_index(layer))

    cdef int64_t layer_index(self, object layer) except -1:
        cdef int64_t index = as_index(layer, "layer")
        if not 0 <= index < self.held().n_layers:
            raise errors.LayerIndexError(f"layer: expected 0 to {self.table.n_layers - 1}, got {index}",
                                         expected=(0, self.table.n_layers - 1), actual=index)
        return index

    def append(self, layer, slots):
        """Write new rows of one layer behind the published ones, under a short lease; publish with `advance_by`.

        Parameters
        ----------
        layer : int
            The layer.
        slots : list or tuple of array
            One array per slot, ``[n, *slot_trailing[s]]`` of the cache's dtype: NumPy, PyTorch, or anything with
            DLPack or the buffer protocol. All are checked before any is written; they may be reused at once.

        Raises
        ------
        ShapeMismatchError, DTypeMismatchError, DeviceMismatchError
            If an array does not fit its slot, or the slots disagree on the number of rows.
        CapacityError
            If the rows do not fit.
        StepInProgressError
            Inside a step of the same thread.
        """
        cdef ArrayRef[STACK_SLOTS] stack
        cdef ArrayRef *refs = stack
        cdef int64_t index = as_index(layer, "layer"), rows = -1
        cdef Fault fault
        cdef lkv_status status
        cdef Table *table = self.held()
        cdef void *stream = NULL
        if table.n_slots > STACK_SLOTS:
            refs = <ArrayRef *>checked_malloc(table.n_slots * sizeof(ArrayRef))
        try:
            slots = as_slots(self, slots, "append")
            kept = borrow_all(self, slots, refs, "append")
            if not table.check(index, refs, table.n_slots, &rows, &fault):
                raise_fault(self, "append", &fault, slots, rows)
            current_stream(<Device *>table.device, &stream)
            await_sources(table, slots, refs, stream)
            if rows * self.token_bytes < RELEASE_GIL_FROM:
                status = table.append(index, refs, rows, &fault)
            else:
                with nogil:
                    status = table.append(index, refs, rows, &fault)
            if status != LKV_OK:
                self.append_waiting(status, index, refs, rows, &fault, slots)
            release_sources(table, slots, refs, stream)
        finally:
            if refs != stack:
                free(refs)

    cdef int append_waiting(self, lkv_status status, int64_t layer, ArrayRef *refs, int64_t rows, Fault *fault,
                            object slots) except -1:
        """The rest of an append that did not go through at once."""
        cdef Exclusive turn
        if status == LKV_E_TIMEOUT:
            turn = take_turn(self, step_of, rows, -1, "append")
            with turn:
                with nogil:
                    status = self.table.append_leased((<Handle *>turn.lease).stream, layer, refs, rows, fault)
        if status == LKV_E_INVALID:
            raise_fault(self, "append", fault, slots, rows)
        return check(status, "append")

    def note_write(self, layer, n):
        """Say that rows ``[cached_len, cached_len + n)`` of a layer have been filled by other means than `append`."""
        cdef int64_t index = self.layer_index(layer), count = as_index(n, "n")
        with take_turn(self, exclusive_of, 0, -1, "note_write"):
            self.note(index, self.table.queue.length(), count)

    cdef int note(self, int64_t layer, int64_t start, int64_t count) except -1:
        if not self.table.populated(layer):
            raise errors.UnpopulatedLayerError(f"note_write: layer {layer} holds no storage")
        self.check_room("note_write", start, count)
        if count:
            self.table.note_written(layer, start + count)
        return 0

    cdef int check_room(self, str what, int64_t start, int64_t count) except -1:
        if count < 0:
            raise errors.GeometryError(f"{what}: n: expected at least 0, got {count}", actual=count)
        if count > self.table.capacity - start:
            raise errors.CapacityError(f"{what}: {count} rows at {start} do not fit max_seq_len {self.table.capacity}",
                                       expected=self.table.capacity, actual=start + count)
        return 0

    def advance_by(self, n):
        """Publish `n` rows that every populated layer has been given by `append` or `note_write`.

        Returns
        -------
        int
            The new `cached_len`.

        Raises
        ------
        IncompleteStepError
            If a populated layer has not been written that far. Nothing is published.
        """
        cdef int64_t count = as_index(n, "n"), length
        self.held()
        with take_turn(self, exclusive_of, 0, -1, "advance_by"):
            length = self.table.queue.length()
            self.check_room("advance_by", length, count)
            self.check_complete("advance_by", length + count)
            self.table.queue.publish(length + count)
        return length + count

    cdef int check_complete(self, str what, int64_t length) except -1:
        cdef int64_t layer = self.table.incomplete(length)
        if layer >= 0:
            raise errors.IncompleteStepError(f"{what}: layer {layer} has been written up to row "
                                             f"{self.table.written(layer)}, expected {length}; nothing was published",
                                             expected=length, actual=self.table.written(layer))
        return 0

    def truncate_to(self, new_len):
        """Rewind to `new_len` published rows; nothing is copied, freed or re-identified, and nothing ever grows.

        Waits for a step of another thread.

        Returns
        -------
        int
            The resulting `cached_len`; a `new_len` beyond it changes nothing.

        Raises
        ------
        StepInProgressError
            Inside a step of the same thread.
        """
        new_len = layout.as_int(new_len, "new_len")
        if new_len < 0:
            raise errors.GeometryError(f"new_len: expected at least 0, got {new_len}", actual=new_len)
        self.held()
        with take_turn(self, exclusive_of, 0, -1, "truncate_to"):
            if new_len < self.table.queue.length():
                self.table.queue.publish(new_len)
                self.table.forget_unpublished(new_len)
            return self.table.queue.length()

    def step(self, n, timeout=None):
        """Open a step of `n` new tokens: one lease over all layers and slots, published once at its end.

        Parameters
        ----------
        n : int
            Rows that every populated layer is about to get.
        timeout : float, optional
            Seconds to wait for a step of another thread, or for readers of the rows; None waits for ever.

        Returns
        -------
        Step
            A context manager: leaving the block publishes, an exception publishes nothing.

        Raises
        ------
        CapacityError
            If the rows do not fit.
        StepInProgressError
            With ``timeout=0``, if another step is open.
        WouldDeadlockError
            If this thread has a step open itself, or reads rows that would be written.
        """
        cdef int64_t count = as_index(n, "n")
        if count < 1:
            raise errors.GeometryError(f"n: expected at least 1, got {count}", actual=count)
        self.held()
        self.check_room("step", self.table.queue.length() if timeout == 0 else 0, count)
        return open_step(self, count, as_timeout(timeout))

    def read(self, layer, timeout=None):
        """Lease the published rows of one layer for reading.

        Returns
        -------
        LayerRows
            A context manager with one view per slot: ``.numpy()``, ``.torch()``, ``[s]``.
        """
        cdef int64_t index = self.layer_index(layer)
        cdef int64_t timeout_ns = as_timeout(timeout)
        cdef LayerRows rows
        while True:
            rows = read_rows(self, index, timeout_ns)
            # The storages may have been exchanged between the grant and the look at them.
            if (<Handle *>rows.lease).request.epoch() == self.table.queue.epoch():
                return rows
            (<Handle *>rows.lease).end(False)

    def slot_version(self, layer, slot):
        """Return the version of a slot: moves by one with every append to its layer. 0 when unpopulated."""
        cdef int64_t index = self.layer_index(layer)
        cdef int which = layout.check_index(slot, self.table.n_slots, "slot")
        return loaded(self.table.at(index, which).version[0]) if self.table.populated(index) else 0

    def bump_version(self, layer, slot):
        """Say that a slot was written by means lkv did not see. Out of range it does nothing."""
        cdef int64_t index = 0
        cdef int32_t which = 0
        if self.find_slot(layer, slot, &index, &which) and self.table.populated(index):
            self.table.at(index, which).version.fetch_add(1)

    def slot_storage(self, layer, slot):
        """Return the `Storage` behind a slot, or None when the layer is unpopulated or out of range."""
        cdef int64_t index = 0
        cdef int32_t which = 0
        if self.find_slot(layer, slot, &index, &which):
            return self.storages[index * self.table.n_slots + which]
        return None

    cdef int find_slot(self, object layer, object slot, int64_t *index, int32_t *which) except -1:
        """Whether there is such a slot, with integers of any size."""
        layer, slot = layout.as_int(layer, "layer"), layout.as_int(slot, "slot")
        if not (0 <= layer < self.held().n_layers and 0 <= slot < self.table.n_slots):
            return False
        index[0] = layer
        which[0] = slot
        return True

    def _populated(self, layer):
        return self.held().populated(self.layer_index(layer))

    def _check_adoptable(self, Storage storage not None, what):
        """Refuse a storage that is leased now, or is part of another cache. Changes nothing."""
        check(adoptable(<lkv_buffer *>held(storage), self.held().queue), what)

    def _adopt(self, Storage storage not None, what):
        """Lease a storage together with the whole cache from now on."""
        check(adopt(<lkv_buffer *>held(storage), self.held().queue), what)

    def _place(self, layer, slot, Storage storage not None, offset, outer_stride, row_stride, shares):
        """Put a slot of a layer into a storage, which from now on is leased with the whole cache."""
        cdef int64_t index = self.layer_index(layer)
        cdef int64_t which = layout.check_index(slot, self.table.n_slots, "slot")
        with cython.critical_section(self):
            check(adopt(<lkv_buffer *>held(storage), self.held().queue), "storage")
            self.table.place(index, <int32_t>which, storage.buffer, offset, outer_stride, row_stride, shares)
            self.storages[index * self.table.n_slots + which] = storage

    def _drop(self, layer):
        """Take the storages out of a layer."""
        cdef int64_t index = self.layer_index(layer)
        with cython.critical_section(self):
            self.table.drop(index)
            for slot in range(self.table.n_slots):
                self.storages[index * self.table.n_slots + slot] = None

    def _rewind(self, new_epoch):
        """Publish nothing; with a new epoch, leases on what was dropped do not hold up what comes. Needs a turn."""
        self.held().queue.publish(0)
        self.table.forget_unpublished(0)
        if new_epoch:
            self.table.queue.next_epoch()

    def _rebase(self, max_seq_len, shapes, dtype, device):
        """Change the geometry of a cache that holds no storage. Needs a turn."""
        self.held().rebase(max_seq_len, find_device(device))
        self.dtype = dtype
        describe_slots(self, self.table, self.slots, shapes, dtype)

    def _note(self, layer):
        """Count the published rows of a layer as written. Needs a turn."""
        self.held().note_written(self.layer_index(layer), self.table.queue.length())

    def _zero(self, Exclusive turn not None):
        """Clear all rows of all slots, by a turn at all rows."""
        cdef int64_t layer
        cdef lkv_status status = LKV_OK
        cdef void *stream
        self.held()
        if turn.lease == NULL:
            raise TypeError("the turn was never taken")
        stream = (<Handle *>turn.lease).stream
        with nogil:
            for layer in range(self.table.n_layers):
                if self.table.populated(layer):
                    status = self.table.clear(layer, stream)
                    if status != LKV_OK:
                        break
        check(status, "wipe")

    def _turn(self, rows, what, timeout=None):
        """Wait to be alone in moving the length and to write rows ``[0, rows)``; a context manager."""
        self.held()
        return take_turn(self, exclusive_of, rows, as_timeout(timeout), what)


cdef int describe_slots(SlotTable cache, Table *table, object slots, object shapes, object dtype) except -1:
    cdef int64_t[8] dims
    cdef int i, ndim
    cache.token_bytes = 0
    for slot, (shape, axis) in enumerate(shapes):
        ndim = len(shape)
        for i in range(min(ndim, 8)):
            dims[i] = shape[i]
        if not table.describe(slot, dims, ndim, axis, dtype.code):
            raise errors.GeometryError(f"slot {slot} ({slots[slot].name}): {table.capacity} rows of {shape} do not fit "
                                       f"(at most 7 trailing dims, {sys.maxsize} bytes)", actual=shape)
        cache.token_bytes += table.shape(slot).outer * table.shape(slot).run
    return 0


@cython.final
@cython.freelist(8)
cdef class Exclusive:
    """A held turn at changing a cache's length or storages."""
    cdef lkv_lease *lease

    def __dealloc__(self):
        if self.lease != NULL:
            (<Handle *>self.lease).release()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if self.lease != NULL:
            (<Handle *>self.lease).end(False)


cdef Exclusive take_turn(SlotTable cache, RequestKind kind, int64_t rows, int64_t timeout_ns, str what):
    cdef Exclusive turn = Exclusive.__new__(Exclusive)
    cdef Handle *handle = <Handle *>new_lease(cache.table.queue, cache.table.device, kind, rows)
    cdef lkv_status status
    if handle == NULL:
        raise MemoryError("out of memory for a lease")
    try:
        status = acquire(handle.queue, &handle.request, timeout_ns)
        if status == LKV_E_DEADLOCK and handle.request.blocked_by_step():
            raise errors.StepInProgressError(f"{what}: this thread has a step open on the cache")
        raise_unless(status, &handle.request, timeout_ns, what)
        enter(handle, what)
    except BaseException:
        discard(<lkv_lease *>handle)
        raise
    turn.lease = <lkv_lease *>handle
    return turn


cdef inline int enter(Handle *handle, str what) except -1:
    cdef lkv_status status = handle.enter()
    if status != LKV_OK:
        handle.queue.release(handle.request)
        raise_status(status, what)
    return 0


cdef inline int raise_unless(lkv_status status, Request *request, int64_t timeout_ns, str what) except -1:
    if status != LKV_OK:
        raise_wait(status, request, timeout_ns, what)
    return 0


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
        if table.writing():
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

    def append(self, layer, slots):
        """Write this step's rows of one layer: one array ``[n, *slot_trailing[s]]`` per slot.

        As `SlotTable.append`, but locks nothing, and takes exactly `n` rows. Threads may append different layers.
        """
        cdef ArrayRef[STACK_SLOTS] stack
        cdef ArrayRef *refs = stack
        cdef int64_t index = as_index(layer, "layer"), rows = self.n
        cdef Fault fault
        cdef lkv_status status
        self.usable()
        cdef Table *table = self.cache.table
        cdef void *stream = (<Handle *>self.lease).stream
        if table.n_slots > STACK_SLOTS:
            refs = <ArrayRef *>checked_malloc(table.n_slots * sizeof(ArrayRef))
        try:
            slots = as_slots(self.cache, slots, "append")
            kept = borrow_all(self.cache, slots, refs, "append")
            if not table.check(index, refs, table.n_slots, &rows, &fault):
                raise_fault(self.cache, "append", &fault, slots, self.n)
            await_sources(table, slots, refs, stream)
            if rows * self.cache.token_bytes < RELEASE_GIL_FROM:
                status = table.write(self.ticket, stream, index, self.start, refs, rows, &fault)
            else:
                with nogil:
                    status = table.write(self.ticket, stream, index, self.start, refs, rows, &fault)
            if status == LKV_E_INVALID:
                raise_fault(self.cache, "append", &fault, slots, self.n)
            check(status, "append")
            release_sources(table, slots, refs, stream)
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

        Say `note_write` when they are filled.
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
        return self

    def __exit__(self, kind, value, traceback):
        self.release()

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


# ---- arrays in, errors out ----

cdef void *checked_malloc(size_t nbytes) except NULL:
    cdef void *memory = malloc(nbytes)
    if memory == NULL:
        raise MemoryError(f"out of memory for {nbytes} bytes")
    return memory


cdef inline object borrow_all(SlotTable cache, tuple slots, ArrayRef *refs, str what):
    """Describes one array per slot; returns what to keep, beside the slots, until they have been copied."""
    cdef object kept = None, one
    cdef Py_ssize_t i
    for i in range(cache.table.n_slots):
        if borrow_known(<object>PyTuple_GET_ITEM(slots, i), &refs[i]):
            continue
        try:
            one = borrow(slots[i], &refs[i])
        except Exception as error:
            raise_borrow(cache, i, what, error)
        if one is not None:
            kept = (kept, one)
    return kept


cdef int raise_borrow(SlotTable cache, Py_ssize_t slot, str what, object error) except -1:
    where = f"{what}: slot {slot} ({cache.slots[slot].name})"
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, errors.LkvError):
        raise type(error)(f"{where}: {error}", expected=error.expected, actual=error.actual) from None
    raise errors.ArgumentTypeError(f"{where}: its own library refuses to export it: {type(error).__name__}: {error}",
                                   actual=error) from error


cdef inline tuple as_slots(SlotTable cache, object slots, str what):
    """One array per slot, held: a list may change while the arrays of it are read."""
    cdef tuple arrays
    if type(slots) is list:
        arrays = PyList_AsTuple(slots)
    elif type(slots) is tuple:
        arrays = slots
    else:
        arrays = other_slots(cache, slots, what)
    if PyTuple_GET_SIZE(arrays) != cache.table.n_slots:
        raise_count(cache, len(arrays), what)
    return arrays


cdef tuple other_slots(SlotTable cache, object slots, str what):
    if isinstance(slots, (list, tuple)):
        return tuple(slots)
    if isinstance(slots, LayerRows):
        return (<LayerRows>slots).views or ()
    raise errors.ArgumentTypeError(f"{what}: slots: expected a list or tuple of {cache.table.n_slots} arrays, got "
                                   f"{type(slots).__name__}", expected=cache.table.n_slots, actual=slots)


cdef int raise_count(SlotTable cache, Py_ssize_t count, str what) except -1:
    names = ", ".join([spec.name for spec in cache.slots])
    raise errors.ShapeMismatchError(f"{what}: expected {cache.table.n_slots} slots ({names}), got {count}",
                                    expected=cache.table.n_slots, actual=count)


cdef int raise_fault(SlotTable cache, str what, Fault *fault, object slots, int64_t rows) except -1:
    cdef int kind = fault.what
    if kind == fault_layer:
        raise errors.LayerIndexError(f"{what}: layer: expected 0 to {fault.expected - 1}, got {fault.actual}",
                                     expected=(0, fault.expected - 1), actual=fault.actual)
    if kind == fault_unpopulated:
        raise errors.UnpopulatedLayerError(f"{what}: layer {fault.layer_index} holds no storage")
    if kind == fault_count:
        raise_count(cache, fault.actual, what)
    if kind == fault_capacity:
        raise errors.CapacityError(f"{what}: {rows} rows at {fault.actual - rows} do not fit max_seq_len {fault.expected}",
                                   expected=fault.expected, actual=fault.actual)
    if kind == fault_busy:
        raise errors.StepInProgressError(f"{what}: layer {fault.layer_index} is being written by another thread")
    if kind == fault_ended:
        raise errors.LeaseEndedError(f"{what}: the step has ended")
    cdef const SlotShape *shape = &cache.table.shape(fault.slot)
    count = fault.expected if kind == fault_rows else ("n" if rows < 0 else rows)
    expected = ", ".join([str(count) if i == shape.axis else str(shape.dims[i]) for i in range(shape.ndim)])
    array = slots[fault.slot]
    text = (f"{what}: slot {fault.slot} ({cache.slots[fault.slot].name}): expected ({expected}{',' * (shape.ndim == 1)}) "
            f"{cache.dtype}, got {described(array)}")
    if kind == fault_device:
        raise errors.DeviceMismatchError(f"{text}: the cache is on {location_of(cache.table.device)}",
                                         expected=str(location_of(cache.table.device)), actual=fault.actual)
    if kind == fault_dtype:
        raise errors.DTypeMismatchError(f"{text}; lkv never casts: convert it, or wrap raw bits with lkv.bits()",
                                        expected=str(cache.dtype), actual=str(getattr(array, "dtype", None)))
    if kind == fault_contiguity:
        raise errors.ShapeMismatchError(f"{text} with gaps inside a row")
    raise errors.ShapeMismatchError(text, expected=expected, actual=getattr(array, "shape", None))


cdef str described(object array):
    shape = getattr(array, "shape", None)
    dtype = getattr(array, "dtype", None)
    if not isinstance(shape, tuple):
        return type(array).__name__
    if isinstance(dtype, numpy.dtype) and not dtype.isnative:
        dtype = f"{dtype.name} in foreign byte order"
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


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
