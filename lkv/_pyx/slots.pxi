# One array per slot: borrowed, or refused in words.


cdef void *checked_malloc(size_t nbytes) except NULL:
    cdef void *memory = malloc(nbytes)
    if memory == NULL:
        raise MemoryError(f"out of memory for {nbytes} bytes")
    return memory


cdef inline void expect_row(Table *table, int64_t layer, int64_t row) noexcept:
    """Fetches the memory of a row that will be written, while the arrays for it are looked at."""
    if not BUILD_FREE_THREADING:  # without the right to the rows, only the GIL keeps the layers as they are
        table.expect(layer, row)


cdef inline bint borrow_plain(Table *table, object slots, ArrayRef *refs) noexcept:
    """As borrow_all, of arrays that need no keeping, in a list or tuple: no Python code runs that could change it.

    False, without an error, when it takes more. Until the GIL is released, the list or tuple keeps the arrays.
    """
    cdef int32_t i
    cdef PyObject **items
    if type(slots) is not tuple and (type(slots) is not list or BUILD_FREE_THREADING):
        return False
    if Py_SIZE(slots) != table.n_slots or not (<Device *>table.device).is_cpu():
        return False
    items = PySequence_Fast_ITEMS(slots)
    for i in range(table.n_slots):
        if not borrow_known(<object>items[i], &refs[i]):
            return False
    return True


cdef inline object borrow_all(SlotTable cache, tuple slots, ArrayRef *refs, str what):
    """Describes one array per slot; returns what to keep, beside the slots, until they have been copied."""
    cdef object kept = None, one
    cdef ArrayRef again
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
    if kept is not None:  # code of the arrays ran, and may have moved what others had been asked for before
        for i in range(cache.table.n_slots):
            if borrow_known(<object>PyTuple_GET_ITEM(slots, i), &again):
                refs[i] = again
    return kept


cdef str first_line(object error):
    """What an error says, without the backtrace that some libraries add."""
    return str(error).partition("\n")[0]


cdef int raise_borrow(SlotTable cache, Py_ssize_t slot, str what, object error) except -1:
    where = f"{what}: slot {slot} ({cache.slots[slot].name})"
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, errors.LkvError):
        raise type(error)(f"{where}: {error}", expected=error.expected, actual=error.actual) from None
    raise errors.ArgumentTypeError(f"{where}: its own library refuses to export it: {type(error).__name__}: "
                                   f"{first_line(error)}",
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
        raise errors.CapacityError(f"{what}: {rows} rows at {fault.actual - rows} do not fit max_seq_len "
                                   f"{fault.expected}", expected=fault.expected, actual=fault.actual)
    if kind == fault_busy:
        raise errors.StepInProgressError(f"{what}: layer {fault.layer_index} is being written by another thread")
    if kind == fault_ended:
        raise errors.LeaseEndedError(f"{what}: the step has ended")
    cdef const SlotShape *shape = &cache.table.shape(fault.slot)
    count = fault.expected if kind == fault_rows else ("n" if rows < 0 else rows)
    expected = ", ".join([str(count) if i == shape.axis else str(shape.dims[i]) for i in range(shape.ndim)])
    array = slots[fault.slot]
    expected += "," * (shape.ndim == 1)
    text = (f"{what}: slot {fault.slot} ({cache.slots[fault.slot].name}): expected ({expected}) "
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
