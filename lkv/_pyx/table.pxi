# The half of the persistent caches that runs once per layer and token: append, step, read.

cdef enum:
    STACK_SLOTS = 8            # more slots than this take their array descriptions from the heap
    MOST_PLACES = 1 << 26
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
        if n_layers * len(slots) > MOST_PLACES:
            raise errors.GeometryError(f"n_layers: expected at most {MOST_PLACES // len(slots)} with {len(slots)} "
                                       f"slots, got {n_layers}", actual=n_layers)
        cdef list storages = [None] * (n_layers * len(slots))
        cdef Table *table = new Table(n_layers, len(slots), max_seq_len, find_device(device))
        try:
            describe_slots(self, table, slots, shapes, dtype)
        except BaseException:
            del table
            raise
        self.slots = tuple(slots)
        self.dtype = dtype
        self.storages = storages
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

    def append(self, layer, slots, *, copy=False):
        """Write new rows of one layer behind the published ones, under a short lease; publish with `advance_by`.

        Parameters
        ----------
        layer : int
            The layer.
        slots : list or tuple of array
            One array per slot, ``[n, *slot_trailing[s]]`` (of a `KvCache`: ``[1, n_kv_heads, n, head_dim]``), of the
            cache's dtype: NumPy, PyTorch, or anything with DLPack or the buffer protocol. All are checked before any
            is written; they may be reused at once.
        copy : bool
            Take arrays of another device too, by way of a copy beside the cache. Host arrays always go in.

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
        expect_row(table, index, table.queue.length())
        if table.n_slots > STACK_SLOTS:
            refs = <ArrayRef *>checked_malloc(table.n_slots * sizeof(ArrayRef))
        try:
            if copy or not borrow_plain(table, slots, refs):
                slots = as_slots(self, slots, "append") if not copy else brought(self, slots, "append")
                kept = borrow_all(self, slots, refs, "append")
            if not table.check(index, refs, table.n_slots, &rows, &fault):
                raise_fault(self, "append", &fault, slots, rows)
            current_stream(<Device *>table.device, &stream)
            await_sources(table, slots, refs, stream)
            if rows * self.token_bytes < RELEASE_GIL_FROM:
                status = table.append(index, refs, rows, not BUILD_FREE_THREADING, &fault)
            else:
                slots = tuple(slots)  # a list may change meanwhile
                with nogil:
                    status = table.append(index, refs, rows, False, &fault)
            if status != LKV_OK:
                slots = tuple(slots)  # nor may it change while this waits
                self.append_waiting(status, index, refs, rows, &fault, slots)
            release_sources(table, slots, refs, stream)
            expect_row(table, index + 1, table.queue.length())  # a model goes through its layers in order
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

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")

    def note_write(self, layer, n, timeout=None):
        """Say that rows ``[cached_len, cached_len + n)`` of a layer have been filled by other means than `append`.

        Parameters
        ----------
        layer : int
            The layer.
        n : int
            Rows that are filled.
        timeout : float, optional
            Seconds to wait for a step of another thread; 0 tries, None waits for ever.

        Raises
        ------
        CapacityError
            If there are not as many rows.
        UnpopulatedLayerError
            If the layer holds no storage.
        StepInProgressError
            Inside a step of the same thread, or with ``timeout=0`` if another thread's is open.
        LeaseTimeoutError
            If that step was not over in time.
        """
        cdef int64_t index = self.layer_index(layer), count = as_index(n, "n")
        with take_turn(self, exclusive_of, 0, as_timeout(timeout), "note_write"):
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

    def advance_by(self, n, timeout=None):
        """Publish `n` rows that every populated layer has been given by `append` or `note_write`.

        Parameters
        ----------
        n : int
            Rows to publish.
        timeout : float, optional
            Seconds to wait for a step of another thread; 0 tries, None waits for ever.

        Returns
        -------
        int
            The new `cached_len`.

        Raises
        ------
        IncompleteStepError
            If a populated layer has not been written that far. Nothing is published.
        StepInProgressError
            Inside a step of the same thread, or with ``timeout=0`` if another thread's is open.
        LeaseTimeoutError
            If that step was not over in time.
        """
        cdef int64_t count = as_index(n, "n"), length
        self.held()
        with take_turn(self, exclusive_of, 0, as_timeout(timeout), "advance_by"):
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

    def truncate_to(self, new_len, timeout=None):
        """Rewind to `new_len` published rows; nothing is copied, freed or re-identified, and nothing ever grows.

        Parameters
        ----------
        new_len : int
            Rows to keep.
        timeout : float, optional
            Seconds to wait for a step of another thread; 0 tries, None waits for ever.

        Returns
        -------
        int
            The resulting `cached_len`; a `new_len` beyond it changes nothing.

        Raises
        ------
        StepInProgressError
            Inside a step of the same thread, or with ``timeout=0`` if another thread's is open.
        LeaseTimeoutError
            If that step was not over in time.
        """
        new_len = layout.as_int(new_len, "new_len")
        if new_len < 0:
            raise errors.GeometryError(f"new_len: expected at least 0, got {new_len}", actual=new_len)
        self.held()
        with take_turn(self, exclusive_of, 0, as_timeout(timeout), "truncate_to"):
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
        cdef int64_t timeout_ns = as_timeout(timeout)
        self.check_room("step", self.table.queue.length() if timeout_ns == 0 else 0, count)
        return open_step(self, count, timeout_ns)

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
        return self.table.at(index, which).version.now() if self.table.populated(index) else 0

    def bump_version(self, layer, slot):
        """Say that a slot was written by means lkv did not see. Out of range it does nothing."""
        cdef int64_t index = 0
        cdef int32_t which = 0
        if self.find_slot(layer, slot, &index, &which) and self.table.populated(index):
            self.table.at(index, which).version.bump()

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
        check_extent(self.table, <int32_t>which, held(storage), offset, outer_stride, row_stride)
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

    def _writable(self, Exclusive turn not None, layer, rows):
        """Return rows ``[0, rows)`` of a layer, writable, by a turn at them."""
        cdef int64_t index = self.layer_index(layer), count = rows
        self.check_room("rows", 0, count)
        if turn.lease == NULL:
            raise TypeError("the turn was never taken")
        if not self.table.populated(index):
            raise errors.UnpopulatedLayerError(f"layer {index} holds no storage")
        self.table.prepare(index, 0, count)
        return make_rows(self, index, turn.lease, 0, count, False, False)

    def _replaced(self, rows):
        """Publish rows ``[0, rows)`` of all layers, which a turn has just written. Needs that turn."""
        cdef int64_t layer, count = rows
        self.held()
        self.check_room("rows", 0, count)
        for layer in range(self.table.n_layers):
            if count and self.table.populated(layer):
                self.table.note_written(layer, count)
        self.table.queue.publish(count)
        self.table.forget_unpublished(count)

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


cdef int check_extent(Table *table, int32_t slot, Buffer *buffer, int64_t offset, int64_t outer_stride,
                      int64_t row_stride) except -1:
    """The last guard of the memory, whatever a subclass says of its storage."""
    cdef const SlotShape *shape = &table.shape(slot)
    cdef int64_t outer = shape.outer, run = shape.run
    end = offset + (outer - 1) * outer_stride + (table.capacity - 1) * row_stride + run
    if (offset < 0 or outer_stride < 0 or row_stride < run or buffer.rows != table.capacity
            or end > <int64_t>buffer.nbytes):
        raise errors.GeometryError(f"storage: expected {table.capacity} rows and {end} bytes, got {buffer.rows} and "
                                   f"{buffer.nbytes}", expected=end, actual=buffer.nbytes)
    return 0


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
