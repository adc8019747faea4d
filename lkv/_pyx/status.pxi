# Errors, and the one place where a thread waits for a lease.

cdef dict ERROR_CLASS = {
    LKV_E_INVALID: errors.GeometryError,
    LKV_E_TIMEOUT: errors.LeaseTimeoutError,
    LKV_E_DEADLOCK: errors.WouldDeadlockError,
    LKV_E_POISONED: errors.PoisonedError,
    LKV_E_FORKED: errors.ForkedError,
    LKV_E_SHUTDOWN: errors.ShutdownError,
    LKV_E_DEVICE: errors.DeviceError,
    LKV_E_UNSUPPORTED: errors.DeviceError,
    LKV_E_NOT_FOUND: errors.DeviceUnavailableError,
    LKV_E_EXISTS: errors.GeometryError,
    LKV_E_ENDED: errors.LeaseEndedError,
    LKV_E_READ_ONLY: errors.ReadOnlyError,
}


# What a device written in Python raised last in a thread.
cdef object LAST_CAUSE = threading.local()


cdef object raise_status(lkv_status status, str what, object requested=None, lkv_device *device=NULL):
    text = core_error().decode("utf-8", "replace")
    if what:
        text = f"{what}: {text}"
    cause = LAST_CAUSE.__dict__.pop("error", None) if status in (LKV_E_NOMEM, LKV_E_DEVICE) else None
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C inside a device's method
    if status == LKV_E_NOMEM:
        raise errors.OutOfMemoryError(text, device=None if device == NULL else str(location_of(device)),
                                      requested=requested, free=free_on(device)) from cause
    raise ERROR_CLASS.get(status, errors.LkvError)(text) from cause


cdef object free_on(lkv_device *device):
    cdef size_t free_now = 0, total = 0
    if device == cpu():
        return free_bytes()
    if device == NULL or (<Device *>device).table.memory_info == NULL:
        return None
    if (<Device *>device).table.memory_info((<Device *>device).context, &free_now, &total) != LKV_OK:
        return None
    return free_now


cdef int propagate() except -1:
    """For a C function of another library that failed with Python's error set."""
    if PyErr_Occurred() == NULL:
        raise SystemError("a foreign exchange function failed without an error")
    return -1


cdef inline int check(lkv_status status, str what="") except -1:
    if status != LKV_OK:
        raise_status(status, what)
    return 0


cdef extern from *:
    """
    // Most row and layer numbers fit one digit of Python's integers.
    static inline bool lkv_small_int(PyObject *value, int64_t *out) {
      if (!PyLong_CheckExact(value)) return false;
    #if PY_VERSION_HEX >= 0x030c0000
      if (!PyUnstable_Long_IsCompact((PyLongObject *)value)) return false;
      *out = PyUnstable_Long_CompactValue((PyLongObject *)value);
    #else
      const Py_ssize_t size = Py_SIZE(value);
      if (size != 0 && size != 1) return false;
      *out = size ? ((PyLongObject *)value)->ob_digit[0] : 0;
    #endif
      return true;
    }
    """
    bint small_int "lkv_small_int"(object value, int64_t *out) noexcept


cdef inline int64_t as_index(object value, str name) except? -1:
    """An integer argument; -1 without an error is for the caller to refuse."""
    cdef int64_t result = 0
    if small_int(value, &result):
        return result
    return as_large_index(value, name)


cdef int64_t as_large_index(object value, str name) except? -1:
    cdef int64_t result
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        value = layout.as_int(value, name)
    result = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow != 0:
        raise errors.GeometryError(f"{name}: {value} does not fit 64 bits", actual=value)
    return result


cdef int64_t as_timeout(object timeout) except? -2:
    """Seconds, or None for ever, as nanoseconds; -1 is for ever."""
    cdef double seconds
    if timeout is None:
        return -1
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise errors.ArgumentTypeError(
            f"timeout: expected seconds or None, got {timeout!r} of type {type(timeout).__name__}", actual=timeout)
    try:
        seconds = timeout
    except OverflowError:
        seconds = 1e300 if timeout > 0 else -1
    if not seconds >= 0:
        raise errors.GeometryError(f"timeout: expected at least 0 seconds, or None to wait for ever; got {timeout!r}",
                                   actual=timeout)
    return <int64_t>(seconds * 1e9) if seconds < 9e9 else -1


# Python runs signal handlers only in bytecode of the main thread, so a wait comes back to look this often.
cdef enum:
    SLICE_NS = 50_000_000


cdef lkv_status wait_for(LeaseQueue *queue, Request *request, int64_t timeout_ns) except? -1:
    """Waits for a queued request without the GIL, keeping its place; if not LKV_OK, it has been withdrawn."""
    cdef int64_t left = timeout_ns, begun = monotonic_ns() if timeout_ns > 0 else 0, this_time
    cdef lkv_status status
    while True:
        this_time = SLICE_NS if left < 0 or left > SLICE_NS else left
        with nogil:
            status = queue.wait(request[0], this_time)
        if status != LKV_E_TIMEOUT:
            break
        try:
            PyErr_CheckSignals()
        except BaseException:
            if not queue.withdraw(request[0]):
                queue.release(request[0])
            raise
        if timeout_ns > 0:
            left = timeout_ns - (monotonic_ns() - begun)
            if left <= 0:
                break
    if status == LKV_OK or not queue.withdraw(request[0]):
        return LKV_OK
    return status


cdef lkv_status acquire(LeaseQueue *queue, Request *request, int64_t timeout_ns) except? -1:
    """Tries with the GIL held, then waits without it."""
    cdef Patience patience = endless if timeout_ns < 0 else (bounded if timeout_ns > 0 else no_patience)
    cdef lkv_status status = queue.enqueue(request[0], patience)
    if status != LKV_E_TIMEOUT or timeout_ns == 0:
        return status
    return wait_for(queue, request, timeout_ns)


cdef int raise_wait(lkv_status status, Request *request, int64_t timeout_ns, str what) except -1:
    """The error of an acquire that did not come through."""
    if status == LKV_E_TIMEOUT:
        if timeout_ns > 0:
            raise errors.LeaseTimeoutError(f"{what}: the rows were not free within {timeout_ns / 1e9:g} s")
        if request.blocked_by_step():
            raise errors.StepInProgressError(f"{what}: another step is in progress")
        raise errors.LeaseTimeoutError(f"{what}: the rows are in use")
    raise_status(status, what)
