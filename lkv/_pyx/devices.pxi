# Devices written in Python: a vtable whose entries take the GIL and call a `lkv.devices.Device`.

cdef lkv_status failed(object error) noexcept:
    """Keeps the exception for the `raise` that follows in this thread, and its text for callers from C."""
    LAST_CAUSE.error = error
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    core_api.set_error(text)
    return LKV_E_NOMEM if isinstance(error, MemoryError) else LKV_E_DEVICE


cdef lkv_status py_allocate(void *device, size_t nbytes, void **out) noexcept with gil:
    try:
        out[0] = <void *><size_t>(<object>device).allocate(nbytes)
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef void py_free(void *device, void *address, size_t nbytes) noexcept with gil:
    (<object>device).free(<size_t>address, nbytes)  # an exception has nowhere to go: it is reported as unraisable


cdef tuple COPY_KINDS = (None, *devices.base.CopyKind)  # by number; calling the enum costs more than the look-up


cdef lkv_status py_copy_2d(void *device, lkv_copy_kind kind, void *dst, size_t dst_pitch, const void *src,
                           size_t src_pitch, size_t width, size_t height, void *stream) noexcept with gil:
    try:
        (<object>device).copy_2d(COPY_KINDS[kind], <size_t>dst, dst_pitch, <size_t>src, src_pitch, width,
                                 height, <size_t>stream)
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef lkv_status py_fill_zero(void *device, void *address, size_t nbytes, void *stream) noexcept with gil:
    try:
        (<object>device).fill_zero(<size_t>address, nbytes, <size_t>stream)
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef lkv_status py_sync(void *device, void *stream) noexcept with gil:
    try:
        (<object>device).synchronize(<size_t>stream)
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef lkv_status py_event_record(void *device, void *stream, void **out) noexcept with gil:
    try:
        event = (<object>device).record_event(<size_t>stream)
        Py_INCREF(event)
        out[0] = <void *>event
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef lkv_status py_event_wait(void *device, void *stream, void *event) noexcept with gil:
    try:
        (<object>device).wait_event(<size_t>stream, <object>event)
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef int32_t py_event_done(void *device, void *event) noexcept with gil:
    try:
        return bool((<object>device).event_done(<object>event))
    except BaseException as error:
        failed(error)
        return 0


cdef void py_event_free(void *device, void *event) noexcept with gil:
    Py_DECREF(<object>event)


cdef lkv_status py_current_stream(void *device, void **out) noexcept with gil:
    try:
        out[0] = <void *><size_t>(<object>device).current_stream()
        return LKV_OK
    except BaseException as error:
        return failed(error)


cdef lkv_status py_memory_info(void *device, size_t *out_free, size_t *out_total) noexcept with gil:
    try:
        out_free[0], out_total[0] = (<object>device).memory_info()
        return LKV_OK
    except BaseException as error:
        return failed(error)


# A C thread may come here when the interpreter is gone: the GIL can no longer be asked for. Memory is then leaked.

cdef inline int32_t left(int32_t result) noexcept nogil:
    leave_python()
    return result


cdef lkv_status safe_allocate(void *device, size_t nbytes, void **out) noexcept nogil:
    return left(py_allocate(device, nbytes, out)) if enter_python() else LKV_E_SHUTDOWN


cdef void safe_free(void *device, void *address, size_t nbytes) noexcept nogil:
    if enter_python():
        py_free(device, address, nbytes)
        leave_python()


cdef lkv_status safe_copy_2d(void *device, lkv_copy_kind kind, void *dst, size_t dst_pitch, const void *src,
                             size_t src_pitch, size_t width, size_t height, void *stream) noexcept nogil:
    if not enter_python():
        return LKV_E_SHUTDOWN
    return left(py_copy_2d(device, kind, dst, dst_pitch, src, src_pitch, width, height, stream))


cdef lkv_status safe_fill_zero(void *device, void *address, size_t nbytes, void *stream) noexcept nogil:
    return left(py_fill_zero(device, address, nbytes, stream)) if enter_python() else LKV_E_SHUTDOWN


cdef lkv_status safe_sync(void *device, void *stream) noexcept nogil:
    return left(py_sync(device, stream)) if enter_python() else LKV_E_SHUTDOWN


cdef lkv_status safe_event_record(void *device, void *stream, void **out) noexcept nogil:
    return left(py_event_record(device, stream, out)) if enter_python() else LKV_E_SHUTDOWN


cdef lkv_status safe_event_wait(void *device, void *stream, void *event) noexcept nogil:
    return left(py_event_wait(device, stream, event)) if enter_python() else LKV_E_SHUTDOWN


cdef int32_t safe_event_done(void *device, void *event) noexcept nogil:
    return left(py_event_done(device, event)) if enter_python() else 1


cdef void safe_event_free(void *device, void *event) noexcept nogil:
    if enter_python():
        py_event_free(device, event)
        leave_python()


cdef lkv_status safe_current_stream(void *device, void **out) noexcept nogil:
    return left(py_current_stream(device, out)) if enter_python() else LKV_E_SHUTDOWN


cdef lkv_status safe_memory_info(void *device, size_t *out_free, size_t *out_total) noexcept nogil:
    return left(py_memory_info(device, out_free, out_total)) if enter_python() else LKV_E_SHUTDOWN


def register_device(device):
    """Make a `lkv.devices.Device` known to the core, until the process ends."""
    cdef lkv_device_vtable table
    cdef lkv_device *made
    base = devices.base.Device
    if not isinstance(device, base):
        raise errors.ArgumentTypeError(f"device: expected a lkv.devices.Device, got {type(device).__name__}",
                                       actual=device)
    kind = type(device)
    memset(&table, 0, sizeof(table))
    table.struct_size = sizeof(table)
    table.dl_device_type = device.dlpack_device_type
    table.host_accessible = device.host_accessible
    table.allocate = safe_allocate
    table.free = safe_free
    table.copy_2d = safe_copy_2d
    table.fill_zero = safe_fill_zero
    if kind.synchronize is not base.synchronize:
        table.sync = safe_sync
    if kind.record_event is not base.record_event:
        table.event_record = safe_event_record
        table.event_wait = safe_event_wait
        table.event_done = safe_event_done
        table.event_free = safe_event_free
    if kind.current_stream is not base.current_stream:
        table.current_stream = safe_current_stream
    if kind.memory_info is not base.memory_info:
        table.memory_info = safe_memory_info
    cdef lkv_status status = core_api.device_register(device.name.encode(), device.ordinal, &table, <void *>device,
                                                      &made)
    if status == LKV_E_EXISTS:
        raise errors.DeviceError(core_error().decode())
    check(status, "register")
    Py_INCREF(device)  # as long as the process, as is the registration


def device_known(location):
    """Return whether the core knows a device of this name and ordinal."""
    cdef lkv_device *device
    return device_find(str(location).encode(), &device) == LKV_OK
