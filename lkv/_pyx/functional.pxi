# The half of the functional caches that runs once per layer and token: one layer's buffers, written and forked.


@cython.final
cdef class LayerBuffers:
    """A buffer per slot of one layer, which the branches of a functional cache share.

    Parameters
    ----------
    capacity : int
        Rows to allocate, as zeros.
    slots : tuple of SlotSpec
        What a row of each slot is.
    dtype : DType
        Element type of all slots.
    device : DeviceLocation
        Where to.

    Notes
    -----
    Nothing here takes a lease. `claim` settles who writes which rows: below the claimed length the branches only read,
    except for rows that one of them has to itself.
    """
    cdef SlotTable table
    cdef object device

    def __init__(self, capacity, slots, dtype, device):
        if self.table is not None:
            raise TypeError("a LayerBuffers cannot be initialised twice")
        cdef SlotTable table = SlotTable.__new__(SlotTable)
        table._open(1, capacity, slots, [((0, *spec.trailing), 0) for spec in slots], dtype, device)
        for slot, spec in enumerate(slots):
            storage = Storage((capacity, *spec.trailing), dtype, device)
            table._place(0, slot, storage, 0, 0, spec.width * dtype.itemsize, False)
        self.device = device
        self.table = table

    cdef SlotTable held(self):
        if self.table is None:
            raise TypeError("the LayerBuffers was never initialised")
        return self.table

    @property
    def nbytes(self):
        """Bytes of all buffers."""
        return sum([storage.nbytes for storage in self.held().storages])

    @property
    def claimed(self):
        """Rows that branches have claimed."""
        return self.held().storages[0].claimed

    def claim(self, expected, new):
        """Move the claimed length from `expected` to `new` rows; False, and nothing moves, when it is another."""
        return self.held().storages[0].claim(expected, new)

    def check(self, arrays, what):
        """Return the rows that an array per slot brings; nothing is written.

        Raises
        ------
        ShapeMismatchError, DTypeMismatchError, DeviceMismatchError
            If an array does not fit its slot, or the slots disagree on the number of rows.
        ArgumentTypeError
            If it is no list or tuple, or something in it is no array.
        """
        return self.put(arrays, what, 0, -1)

    def write(self, at, arrays, rows, what):
        """Copy `rows` rows of an array per slot to rows from `at` on, going on at row 0 behind the last one."""
        if not 0 <= at < self.held().max_seq_len or not 0 <= rows <= self.held().max_seq_len:
            raise errors.CapacityError(f"{what}: {rows} rows at {at} do not fit max_seq_len {self.held().max_seq_len}",
                                       expected=self.held().max_seq_len, actual=rows)
        self.put(arrays, what, at, rows)

    cdef int64_t put(self, object arrays, str what, int64_t at, int64_t rows) except -1:
        """Checks; with `rows` known, copies too."""
        cdef ArrayRef[STACK_SLOTS] stack
        cdef ArrayRef *refs = stack
        cdef bint copies = rows >= 0
        cdef void *stream = NULL
        cdef Fault fault
        cdef lkv_status status
        cdef SlotTable owner = self.held()
        cdef Table *table = owner.table
        if table.n_slots > STACK_SLOTS:
            refs = <ArrayRef *>checked_malloc(table.n_slots * sizeof(ArrayRef))
        try:
            arrays = as_slots(owner, arrays, what)
            kept = borrow_all(owner, arrays, refs, what)
            if not table.check(0, refs, table.n_slots, &rows, &fault):
                raise_fault(owner, what, &fault, arrays, rows)
            if copies:
                current_stream(<Device *>table.device, &stream)
                await_sources(table, arrays, refs, stream)
                if rows * owner.token_bytes < RELEASE_GIL_FROM:
                    status = copy_round(table, at, refs, rows, &fault)
                else:
                    with nogil:
                        status = copy_round(table, at, refs, rows, &fault)
                if status == LKV_E_INVALID:
                    raise_fault(owner, what, &fault, arrays, rows)
                check(status, what)
                release_sources(table, arrays, refs, stream)
        finally:
            if refs != stack:
                free(refs)
        return rows

    def clear(self, lo, hi):
        """Write zeros to rows ``[lo, hi)`` of all slots."""
        cdef int64_t first = lo, last = hi
        cdef lkv_buffer *buffer
        cdef lkv_status status
        if not 0 <= first <= last <= self.held().max_seq_len:
            raise errors.LayerIndexError(f"clear: expected rows within [0, {self.held().max_seq_len}), got "
                                         f"[{lo}, {hi})", expected=(0, self.held().max_seq_len), actual=(lo, hi))
        for storage in self.held().storages:
            buffer = (<Storage>storage).buffer
            with nogil:
                status = clear_ordered(buffer, first, last)
            check(status, "clear")

    def view(self, slot, rows):
        """Return rows ``[0, rows)`` of a slot, read-only and without a lease; the view keeps the memory."""
        cdef int64_t which = slot, end = rows
        if not 0 <= which < self.held().n_slots or not 0 <= end <= self.held().max_seq_len:
            raise errors.LayerIndexError(f"view: no rows [0, {rows}) of slot {slot}", actual=(slot, rows))
        check(self.held().table.pass_to_read(end), "view")
        return slot_view(self.held(), 0, <int32_t>which, NULL, 0, end, True)

    def fork(self, rows):
        """Return buffers of their own for a branch: rows ``[0, rows)`` copied, zeros behind them, nothing claimed."""
        made = LayerBuffers(self.held().max_seq_len, self.held().slots, self.held().dtype, self.device)
        if rows:
            made.write(0, [self.view(slot, rows) for slot in range(self.held().n_slots)], rows, "copy")
            self.held().table.leave_read(rows)
        return made

    def __repr__(self):
        return (f"LayerBuffers({self.claimed}/{self.held().max_seq_len} rows claimed, {self.held().n_slots} slots, "
                f"{self.held().dtype}, {self.device})")


cdef lkv_status copy_round(Table *table, int64_t at, ArrayRef *refs, int64_t rows, Fault *fault) noexcept nogil:
    cdef int64_t first = min(rows, table.capacity - at)
    cdef int32_t slot
    cdef lkv_status status = table.write(0, at, refs, first, fault)
    if status != LKV_OK or first == rows:
        return status
    for slot in range(table.n_slots):
        refs[slot].data += first * (table.shape(slot).run if refs[slot].strides == NULL
                                    else refs[slot].strides[0] * refs[slot].stride_unit)
    return table.write(0, 0, refs, rows - first, fault)
