"""NVIDIA GPUs, through CuPy, which is imported when a CUDA device is first asked for.

Memory comes from CuPy's current allocator and work goes to CuPy's current stream, so a pool, a limit or a stream that a
program chose there counts here too. No kernel is launched: copies, fills and events are all that is needed.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any, ClassVar

from lkv.devices.base import CopyKind, Device
from lkv.devices.location import DeviceLocation
from lkv.devices.staging import Staging, queue_copy
from lkv.errors import DeviceUnavailableError

__all__ = ["CudaDevice", "available", "require"]

_MEMORY_ALLOCATION, _INSUFFICIENT_DRIVER, _NO_DEVICE = 2, 35, 100  # cudaError_t
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice
_ALIGNMENT = 256

_registering = threading.Lock()


class CudaDevice(Device):
    """One GPU.

    Freed memory goes back to its allocator once the work that lkv was told of is done: at the call itself if it is done
    then, else at a later call. `free` waits for nothing.

    Parameters
    ----------
    ordinal : int
        CUDA's number for the device.
    cupy : module
        CuPy.
    """

    name: ClassVar[str] = "cuda"
    dlpack_device_type: ClassVar[int] = 2

    def __init__(self, ordinal: int, cupy: Any) -> None:
        self.ordinal = ordinal
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._blocks: dict[int, _Block] = {}
        # Finalisers come here at any moment of any call: these two are only changed by single operations.
        self._freed: deque[_Block] = deque()
        self._ticks = itertools.count(1)
        self._staging = Staging(cupy, self._ticks)

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` zeroed bytes from CuPy's current allocator."""
        self._collect()
        with self._cuda.Device(self.ordinal):
            block = _Block(self._take(nbytes), self._cuda.get_current_stream())
            self._runtime.memsetAsync(block.address, 0, nbytes, block.stream.ptr)
        self._blocks[block.address] = block
        return block.address

    def _take(self, nbytes: int) -> Any:
        try:
            return self._allocate_aligned(nbytes)
        except MemoryError as error:
            if self._collect(wait=True):
                with suppress(MemoryError):
                    return self._allocate_aligned(nbytes)
            free, total = self.memory_info()
            raise MemoryError(
                f"{self.location}: {nbytes:,} bytes asked for, {free:,} of {total:,} free ({error})"
            ) from error

    def _allocate_aligned(self, nbytes: int) -> Any:
        try:
            memory = self._cuda.alloc(nbytes)
            if memory.ptr % _ALIGNMENT:
                memory = self._cuda.alloc(nbytes + _ALIGNMENT)
        except self._runtime.CUDARuntimeError as error:  # of an allocator without a pool
            if error.status == _MEMORY_ALLOCATION:
                raise MemoryError(str(error)) from error
            raise
        return memory

    def free(self, address: int, nbytes: int) -> None:
        """Give the memory back to its allocator, now or once the device is done with it.

        What leases covered, the stream that the memory was taken on has been told to wait for.
        """
        block = self._blocks.pop(address)
        if self._capturing() or not self._reached(block):
            self._freed.append(block)
        else:
            self._give_back(block)

    def _capturing(self) -> bool:
        """Whether the calling thread records a graph, which a question to the device would end."""
        return bool(self._runtime.streamIsCapturing(self.current_stream()))

    def _reached(self, block: _Block, wait: bool = False) -> bool:
        """Whether all that may use the memory is done, or is before what the allocator will do with it."""
        try:
            return self._await(block, wait)
        except self._runtime.CUDARuntimeError:  # the context is lost, and with it all work
            return True

    def _await(self, block: _Block, wait: bool) -> bool:
        if block.awaited is None:
            streams = {self.current_stream()}  # somebody may have used it after its last lease
            if block.ordered:
                streams.discard(block.stream.ptr)
            else:
                streams.add(block.stream.ptr)
            block.awaited = [self._record(stream) for stream in streams]
        if wait:
            for event in block.awaited:
                event.synchronize()
        block.awaited = [event for event in block.awaited if not event.done]
        return not block.awaited

    def _collect(self, wait: bool = False) -> bool:
        """Give back what was freed before and is done with; return whether there was any."""
        found = False
        if not self._freed or self._capturing():
            return found
        for _ in range(len(self._freed)):
            try:
                block = self._freed.popleft()
            except IndexError:  # another thread was here
                break
            if self._reached(block, wait):
                self._give_back(block)
                found = True
            else:
                self._freed.append(block)
        return found

    def _give_back(self, block: _Block) -> None:
        before = self._enter()  # CuPy frees on the stream's number, and 0 is one of each device
        try:
            del block.memory
        finally:
            self._leave(before)

    def copy_2d(
        self,
        kind: CopyKind,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        stream: int,
    ) -> None:
        """Copy `height` runs of `width` bytes after the earlier work of `stream`.

        A source on another CUDA device is copied as well, directly where the two devices reach each other.
        """
        if dst_pitch == width == src_pitch:
            width, height = width * height, 1
        before = self._enter()
        try:
            if kind == CopyKind.HOST_TO_DEVICE:
                self._staging.upload(dst, dst_pitch, src, src_pitch, width, height, stream)
            elif kind == CopyKind.DEVICE_TO_HOST:
                self._staging.download(dst, dst_pitch, src, src_pitch, width, height, stream)
            else:
                queue_copy(self._runtime, _ON_DEVICE, (dst, dst_pitch, src, src_pitch, width, height), stream)
        finally:
            self._leave(before)

    def _enter(self) -> int:
        """Make the device current; cheaper than CuPy's context manager. Return what `_leave` takes."""
        before = int(self._runtime.getDevice())
        if before != self.ordinal:
            self._runtime.setDevice(self.ordinal)
        return before

    def _leave(self, before: int) -> None:
        if before != self.ordinal:
            self._runtime.setDevice(before)

    def fill_zero(self, address: int, nbytes: int, stream: int) -> None:
        """Clear memory, after the earlier work of `stream`."""
        with self._cuda.Device(self.ordinal):
            self._runtime.memsetAsync(address, 0, nbytes, stream)

    def synchronize(self, stream: int) -> None:
        """Return once the earlier work of `stream` is done."""
        with self._cuda.Device(self.ordinal):
            self._runtime.streamSynchronize(stream)

    def current_stream(self) -> int:
        """Return CuPy's current stream of the calling thread on this device."""
        return int(self._cuda.get_current_stream(self.ordinal).ptr)

    def record_event(self, stream: int) -> Any:
        """Return an event that is reached when the earlier work of `stream` is done."""
        tick = next(self._ticks)
        event = self._record(stream)
        self._staging.note(tick, stream, event)
        self._collect()
        return event

    def _record(self, stream: int) -> Any:
        before = self._enter()
        try:
            event = self._cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        finally:
            self._leave(before)
        return event

    def wait_event(self, stream: int, event: Any) -> None:
        """Let later work of `stream` wait for an event of this or another CUDA device."""
        before = self._enter()
        try:
            self._runtime.streamWaitEvent(stream, event.ptr)
        finally:
            self._leave(before)

    def event_done(self, event: Any) -> bool:
        """Return whether the event has been reached."""
        return bool(event.done)

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes that CuPy's current allocator could still give, cached blocks included, and the total."""
        with self._cuda.Device(self.ordinal):
            free, total = self._runtime.memGetInfo()
            pool = getattr(self._cuda.get_allocator(), "__self__", None)
            if isinstance(pool, (self._cuda.MemoryPool, self._cuda.MemoryAsyncPool)):
                free += pool.free_bytes()
                if limit := pool.get_limit():
                    free = min(free, limit - pool.used_bytes())
        return max(int(free), 0), int(total)

    def describe(self) -> str:
        """Return the GPU's name and memory."""
        name = self._runtime.getDeviceProperties(self.ordinal)["name"].decode()
        with self._cuda.Device(self.ordinal):
            total = self._runtime.memGetInfo()[1]
        return f"{name}, {total / 2**30:.1f} GiB"


class _Block:
    """Memory of an allocator, kept until it is freed and done with."""

    __slots__ = ("address", "awaited", "memory", "ordered", "stream")

    def __init__(self, memory: Any, stream: Any) -> None:
        self.memory = memory
        self.address = -(-int(memory.ptr) // _ALIGNMENT) * _ALIGNMENT
        self.stream = stream  # the object: the stream lives as long as memory that goes back by way of it
        # These hand memory out again in the order of the stream that it was taken on.
        self.ordered = type(memory.mem).__name__ in ("PooledMemory", "MemoryAsync")
        self.awaited: list[Any] | None = None


def available() -> list[tuple[DeviceLocation, str]]:
    """Return each GPU with its description, or the first one with the reason why there is none."""
    try:
        cupy, count = _usable()
    except _Missing as missing:
        return [(DeviceLocation("cuda"), f"unavailable: {missing}")]
    version = f"CuPy {cupy.__version__}"
    return [(DeviceLocation("cuda", i), f"{CudaDevice(i, cupy).describe()}, {version}") for i in range(count)]


def require(location: DeviceLocation) -> None:
    """Make a CUDA device known to lkv, or raise `DeviceUnavailableError` that says what is missing."""
    from lkv._storage import device_known

    if device_known(location):
        return
    try:
        cupy, count = _usable()
    except _Missing as missing:
        raise DeviceUnavailableError(f"device: {str(location)!r} is unavailable: {missing}", actual=location) from None
    if location.ordinal >= count:
        there = (
            "there is one GPU, 'cuda:0'" if count == 1 else f"there are {count} GPUs, the last is 'cuda:{count - 1}'"
        )
        raise DeviceUnavailableError(
            f"device: {str(location)!r} is unavailable: {there}", expected=count, actual=location
        )
    with _registering:
        if not device_known(location):
            CudaDevice(location.ordinal, cupy).register()


class _Missing(Exception):
    """What CUDA devices lack, in words."""


def _usable() -> tuple[Any, int]:
    """Return CuPy and the number of GPUs, of which there is one at least."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name not in ("cupy", None):
            raise _Missing(f"CuPy cannot be imported: {error}") from error
        raise _Missing("CuPy is not importable; pip install 'latent-kv[cuda12]' or 'latent-kv[cuda13]'") from error
    except Exception as error:  # a broken installation may fail in any way
        raise _Missing(f"CuPy cannot be imported: {type(error).__name__}: {error}") from error
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status == _INSUFFICIENT_DRIVER:
            raise _Missing(_driver(runtime)) from error
        if error.status != _NO_DEVICE:
            raise _Missing(f"the CUDA runtime failed: {error}") from error
        count = 0
    if count == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        raise _Missing(f"there is no NVIDIA GPU{hint}")
    return cupy, count


def _driver(runtime: Any) -> str:
    version = int(runtime.driverGetVersion())
    if not version:
        return "there is no NVIDIA driver"
    needed, found = (f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.runtimeGetVersion(), version))
    return f"the NVIDIA driver is for CUDA {found}, CuPy needs {needed}"
