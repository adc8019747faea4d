"""The unmodified CuPy wheel on a machine without a GPU: a fixture of the tests, asked for by ``LKV_TEST_CUDA=sim``.

CuPy links NVIDIA's CUDA runtime statically into one extension module; all of its memory, stream and array code calls
the runtime through that. The wheel keeps the module's symbols, so `install` finds the runtime's entry points and sends
them, in this process's memory only, to the C files beside this one. CuPy's own code runs as shipped; NVIDIA's does not.

What passes here is right in order, lifetime, errors and arguments. It says nothing of speed, kernels or drivers.
"""

import ctypes
import importlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

from cudasim import elf

__all__ = ["CUPY_VERSION", "SCHEDULES", "Simulator", "build", "install"]

CUPY_VERSION = "14.2.0"
SCHEDULES = {"eager": (0, 1), "lazy": (1, 1), **{f"random{seed}": (2, seed) for seed in range(1, 6)}}

_RUNTIME = "cupy_backends.cuda.api.runtime"
_SOURCES = Path(__file__).parent


def build(folder):
    """Compile the simulator with the system's C compiler; return the library's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libcudasim.{os.getpid()}.so"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    flags = ["-std=gnu11", "-O2", "-g", *warnings, "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    sources = sorted(map(str, _SOURCES.glob("*.c")))
    subprocess.run([compiler, *flags, "-o", str(library), *sources], check=True)
    return str(library)


class Simulator:
    """What a test may ask of the simulated devices: schedules, limits, faults, counts and the true content."""

    def __init__(self, library, kept):
        self._library, self._kept = library, kept
        library.cudasim_set_mode.argtypes = [ctypes.c_int, ctypes.c_uint64]
        library.cudasim_set_total.argtypes = [ctypes.c_int, ctypes.c_size_t]
        library.cudasim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        library.cudasim_peek.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.cudasim_counter.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]
        library.cudasim_counter.restype = library.cudasim_missing.restype = ctypes.c_char_p
        library.cudasim_used.restype = ctypes.c_size_t

    def schedule(self, name):
        """Finish what is queued, then run work as a schedule of `SCHEDULES` says."""
        self._library.cudasim_set_mode(*SCHEDULES[name])

    def total(self, device, nbytes):
        """Give a device so many bytes."""
        self._library.cudasim_set_total(device, nbytes)

    def devices(self, count):
        """Let there be so many devices."""
        self._library.cudasim_set_devices(count)

    def peer(self, on):
        """Say whether the devices may reach each other's memory."""
        self._library.cudasim_set_peer(int(on))

    def pageable_async(self, on):
        """Read and write pageable host memory late, as a system does whose GPU can page it."""
        self._library.cudasim_set_pageable_async(int(on))

    def used(self, device=0):
        """Bytes of a device that are allocated."""
        return self._library.cudasim_used(device)

    def live(self):
        """Allocations on all devices."""
        return self._library.cudasim_live_allocations()

    def pending(self):
        """Operations that are queued and have not run."""
        return self._library.cudasim_pending()

    def fail(self, name, error, nth=1):
        """Let the n-th call of an entry point from now on fail; 700 and 719 end the context."""
        self._library.cudasim_fail(name.encode(), nth, error)

    def clear_error(self):
        """Revive the context, and take back what `fail` asked for."""
        self._library.cudasim_clear_error()

    def peek(self, address, nbytes):
        """Return device bytes as they are at this moment, without waiting for anything."""
        out = ctypes.create_string_buffer(nbytes)
        if self._library.cudasim_peek(address, out, nbytes):
            raise ValueError(f"{nbytes} bytes at {address:#x} are not in one live allocation")
        return out.raw

    def counts(self):
        """Return how often each entry point has been called."""
        found, calls = {}, ctypes.c_uint64()
        for i in range(1000):
            name = self._library.cudasim_counter(i, ctypes.byref(calls))
            if name is None:
                break
            found[name.decode()] = calls.value
        return found

    @contextmanager
    def counting(self):
        """Give a dict that holds, after the block, the calls made in it."""
        before, during = self.counts(), {}
        yield during
        during.update({name: n - before.get(name, 0) for name, n in self.counts().items() if n > before.get(name, 0)})

    def missing(self):
        """Names of entry points that were called and are not simulated."""
        return self._library.cudasim_missing().decode().split()


_installed = None


def install(folder):
    """Compile the simulator into `folder` and send CuPy's runtime calls of this process to it, once.

    Raises
    ------
    LayoutError
        If CuPy is of another version, or laid out in another way, than the simulator was written for.
    """
    global _installed
    if _installed is None:
        _check_version()
        _installed = _install(build(folder))
    return _installed


def _check_version():
    found = {name: _version(name) for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy")}
    if found["cupy-cuda12x"] != CUPY_VERSION:
        raise elf.LayoutError(
            f"the simulated CUDA runtime is for cupy-cuda12x {CUPY_VERSION}; found {found}: pip install '.[test-cuda]'"
        )


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(path):
    library = ctypes.CDLL(path)
    os.unlink(path)
    runtime = importlib.import_module(_RUNTIME).__file__
    defined = elf.functions(runtime)
    entries = {name: at for name, at in defined.items() if name.startswith("cuda") and not name.startswith("cuda_")}
    if "cudaMalloc" not in entries or "PyInit_runtime" not in defined:
        raise elf.LayoutError(f"{runtime} has no symbols of the CUDA runtime: this build of CuPy cannot be simulated")
    loaded = ctypes.cast(ctypes.PyDLL(runtime).PyInit_runtime, ctypes.c_void_p).value
    base = loaded - defined["PyInit_runtime"][0]
    kept, targets = [], {}
    for name, (value, size) in entries.items():
        function = getattr(library, name, None) or _refusal(library, name, kept)
        targets[base + value, size] = ctypes.cast(function, ctypes.c_void_p).value
    elf.redirect(targets)
    _without_cub()
    return Simulator(library, kept)


def _refusal(library, name, kept):
    """What stands in for an entry point that is not simulated: it fails and leaves its name."""
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: library.cudasim_unimplemented(name.encode()))
    kept.append(function)
    return function


def _without_cub():
    """CUB has a runtime of its own, which would fail in silence and hand back memory that nobody wrote."""
    os.environ["CUPY_ACCELERATORS"] = ""
    if "cupy" in sys.modules:
        accelerators = importlib.import_module("cupy._core._accelerator")
        accelerators.set_routine_accelerators([])
        accelerators.set_reduction_accelerators([])
