"""CUDA for the tests, on request only.

``LKV_TEST_CUDA=gpu`` takes the GPUs of the machine, ``LKV_TEST_CUDA=sim`` a simulated CUDA runtime of two devices;
without it the CUDA tests are skipped. ``LKV_TEST_CUDA_SCHEDULE`` names the schedule of the cache tests under ``sim``.
"""

import gc
import os
import tempfile

import numpy as np
import pytest

from lkv import Storage

__all__ = [
    "LOCATIONS",
    "MODE",
    "REASON",
    "SCHEDULE",
    "SIMULATOR",
    "device_bytes",
    "needs_cuda",
    "needs_simulator",
    "on_host",
    "reset_cuda",
    "rows_of",
]

MODE = os.environ.get("LKV_TEST_CUDA") or None
SCHEDULE = os.environ.get("LKV_TEST_CUDA_SCHEDULE") or "lazy"
SIMULATED_BYTES = 64 << 20

REASON = "LKV_TEST_CUDA is not set: 'sim' runs this on a simulated CUDA runtime, 'gpu' on the machine's GPUs"


def _start():
    if MODE not in (None, "sim", "gpu"):
        raise pytest.UsageError(f"LKV_TEST_CUDA: expected 'sim' or 'gpu', got {MODE!r}")
    if MODE is None:
        return None, []
    if MODE == "sim":
        import cudasim

        if SCHEDULE not in cudasim.SCHEDULES:
            raise pytest.UsageError(f"LKV_TEST_CUDA_SCHEDULE: expected one of {[*cudasim.SCHEDULES]}, got {SCHEDULE!r}")
        with tempfile.TemporaryDirectory() as folder:
            return cudasim.install(folder), ["cuda:0", "cuda:1"]
    import cupy

    return None, [f"cuda:{i}" for i in range(min(cupy.cuda.runtime.getDeviceCount(), 2))]


SIMULATOR, LOCATIONS = _start()

needs_cuda = pytest.mark.skipif(MODE is None, reason=REASON)
needs_simulator = pytest.mark.skipif(
    MODE != "sim", reason=REASON if MODE is None else "a GPU cannot be told to do this"
)


def reset_cuda():
    """Finish all work, drop what CuPy keeps, and take back what a test asked of the simulator."""
    import cupy

    gc.collect()  # an error that a test caught holds its frame, and so its caches

    if SIMULATOR is not None:
        SIMULATOR.clear_error()
        SIMULATOR.devices(2)
        SIMULATOR.peer(True)
        SIMULATOR.pageable_async(False)
        SIMULATOR.schedule("eager")
    for i in range(len(LOCATIONS)):
        if SIMULATOR is not None:
            SIMULATOR.total(i, SIMULATED_BYTES)
        with cupy.cuda.Device(i):
            cupy.cuda.runtime.deviceSynchronize()
            cupy.get_default_memory_pool().free_all_blocks()
    if SIMULATOR is not None:
        missing = SIMULATOR.missing()
        assert not missing, f"not simulated: {missing}"


def device_bytes(address, nbytes):
    """Bytes at a device address: at this very moment in the simulator, after all work on a GPU."""
    if SIMULATOR is not None:
        return SIMULATOR.peek(address, nbytes)
    import cupy

    out = np.empty(nbytes, np.uint8)
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.runtime.memcpy(out.ctypes.data, address, nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return out.tobytes()


def on_host(view):
    """Return the elements of a view as a NumPy array of their own, from whatever device."""
    if 0 in view.shape:
        return np.empty(view.shape, view.dtype.numpy)
    copy = Storage(view.shape, view.dtype).alias()
    copy.copy_from(view)
    return copy.numpy()


def rows_of(cache, layer):
    """Return the published rows of a layer, slot by slot, by way of the host."""
    with cache.read(layer) as views:
        return [on_host(view) for view in views]
