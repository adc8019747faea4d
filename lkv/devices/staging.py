"""Pinned host memory through which bytes go to and from a GPU.

A copy engine reads host memory whenever it comes to it, so what it is to read must be nobody else's: the bytes are put
into pinned blocks first, and the caller's memory is free again. A block is used anew once the copies out of it are
done, which an event tells that was recorded behind them, for a lease that ended or by the block itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["Staging", "queue_copy"]

_BLOCK_BYTES = 4 << 20
_MOST_BLOCKS = 4
_DIRECT_BYTES = 1 << 16  # below, a download by way of pinned memory does not pay
_LINE = 64
_MOST_PITCH = 2**31 - 1  # of cudaMemcpy2D
_PINNED = 1  # cudaMemoryTypeHost
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_MOST_NOTES = 64


# dst, dst_pitch, src, src_pitch, width, height
_Part = tuple[int, int, int, int, int, int]


def queue_copy(runtime: Any, kind: int, part: _Part, stream: int) -> None:
    """Queue a copy of the kind that CUDA calls `kind` on a stream of the current device."""
    dst, dst_pitch, src, src_pitch, width, height = part
    if height == 1 or dst_pitch == width == src_pitch:
        runtime.memcpyAsync(dst, src, width * height, kind, stream)
    elif max(dst_pitch, src_pitch) <= _MOST_PITCH:
        runtime.memcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, kind, stream)
    else:
        for row in range(height):
            runtime.memcpyAsync(dst + row * dst_pitch, src + row * src_pitch, width, kind, stream)


class Staging:
    """The pinned memory of one device; the caller has made the device current.

    Parameters
    ----------
    cupy : module
        CuPy.
    ticks : iterator of int
        A clock that goes up by one with each look at it.
    """

    def __init__(self, cupy: Any, ticks: Iterator[int]) -> None:
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._ticks = ticks
        self._lock = threading.Lock()
        self._block: _Block | None = None
        self._busy: deque[_Block] = deque()
        # To forget an event is safe: a later one, or one of the block's own, stands for it.
        self._noted: deque[tuple[int, int, Any]] = deque(maxlen=_MOST_NOTES)
        self._download_lock = threading.Lock()
        self._download_blocks: list[_Block] = []

    def note(self, tick: int, stream: int, event: Any) -> None:
        """Say that an event was recorded on a stream after `tick`. Safe in a finaliser."""
        if self._block is not None:
            self._noted.append((tick, stream, event))

    def upload(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
        """Copy from the host. The source has been read when this returns."""
        with self._lock:
            if self._noted:
                self._attach_events()
            if height == 1 or width > _BLOCK_BYTES:
                for row in range(height):
                    self._upload_run(dst + row * dst_pitch, src + row * src_pitch, width, stream)
                return
            for part in _parts(dst, dst_pitch, src, src_pitch, width, height):
                self._upload_rows(part, stream)

    def _upload_run(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        for at in range(0, nbytes, _BLOCK_BYTES):
            part = min(_BLOCK_BYTES, nbytes - at)
            block, stage = self._room(part)
            ctypes.memmove(stage, src + at, part)
            block.reading(stream)
            self._runtime.memcpyAsync(dst + at, stage, part, _TO_DEVICE, stream)
            block.read(stream, next(self._ticks))

    def _upload_rows(self, part: _Part, stream: int) -> None:
        dst, dst_pitch, src, src_pitch, width, height = part
        block, stage = self._room(width * height)
        _host_bytes(stage, height, width, width)[...] = _host_bytes(src, height, width, src_pitch)
        block.reading(stream)
        queue_copy(self._runtime, _TO_DEVICE, (dst, dst_pitch, stage, width, width, height), stream)
        block.read(stream, next(self._ticks))

    def _room(self, nbytes: int) -> tuple[_Block, int]:
        """Return a block, and the address in it of `nbytes` that nobody uses."""
        block = self._block
        if block is None or block.size - block.used < nbytes:
            block = self._block = self._next_block(block)
        address = block.address + block.used
        block.used += -(-nbytes // _LINE) * _LINE
        return block, address

    def _next_block(self, full: _Block | None) -> _Block:
        if full is not None:
            self._attach_events()
            for stream in list(full.unmarked):
                full.events.append(self._record(stream))
            full.unmarked.clear()
            self._busy.append(full)
        if not self._busy or (len(self._busy) < _MOST_BLOCKS and not self._busy[0].idle()):
            return _Block(self._cuda.alloc_pinned_memory(_BLOCK_BYTES))
        block = self._busy.popleft()
        block.reuse()
        return block

    def _attach_events(self) -> None:
        """Let the blocks know the events that stand behind their copies."""
        while self._noted:
            tick, stream, event = self._noted.popleft()
            if self._block is not None:
                self._block.mark(tick, stream, event)

    def _record(self, stream: int) -> Any:
        event = self._cuda.Event(disable_timing=True)
        try:
            self._runtime.eventRecord(event.ptr, stream)
        except self._runtime.CUDARuntimeError:  # the stream is gone, its work may not be
            self._runtime.deviceSynchronize()
        return event

    def download(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy to the host. The destination is complete when this returns."""
        runtime = self._runtime
        if width * height <= _DIRECT_BYTES or runtime.pointerGetAttributes(dst).type == _PINNED:
            queue_copy(runtime, _TO_HOST, (dst, dst_pitch, src, src_pitch, width, height), stream)
            runtime.streamSynchronize(stream)
            return
        with self._download_lock:
            while len(self._download_blocks) < 2:
                self._download_blocks.append(_Block(self._cuda.alloc_pinned_memory(_BLOCK_BYTES)))
            arriving: deque[tuple[_Block, _Part]] = deque()
            for part in _parts(dst, dst_pitch, src, src_pitch, width, height):
                if len(arriving) == 2:
                    self._land(*arriving.popleft())
                block = self._download_blocks[0]
                self._download_blocks.reverse()
                block.reuse()
                _, _, source, pitch, run, rows = part
                queue_copy(runtime, _TO_HOST, (block.address, run, source, pitch, run, rows), stream)
                block.events.append(self._record(stream))
                arriving.append((block, part))
            while arriving:
                self._land(*arriving.popleft())

    @staticmethod
    def _land(block: _Block, part: _Part) -> None:
        block.reuse()
        dst, dst_pitch, _, _, width, height = part
        _host_bytes(dst, height, width, dst_pitch)[...] = _host_bytes(block.address, height, width, width)


def _parts(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int) -> Iterator[_Part]:
    """Cut a copy into pieces that fit a block."""
    if width > _BLOCK_BYTES:
        for row in range(height):
            for at in range(0, width, _BLOCK_BYTES):
                part = min(_BLOCK_BYTES, width - at)
                yield dst + row * dst_pitch + at, part, src + row * src_pitch + at, part, part, 1
        return
    most = _BLOCK_BYTES // width
    for row in range(0, height, most):
        rows = min(most, height - row)
        yield dst + row * dst_pitch, dst_pitch, src + row * src_pitch, src_pitch, width, rows


class _Block:
    """Pinned memory, filled from the front, and what still reads it."""

    __slots__ = ("_memory", "address", "events", "size", "unmarked", "used")

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address = int(memory.ptr)
        self.size = _BLOCK_BYTES
        self.used = 0
        self.unmarked: dict[int, float] = {}  # stream -> the tick after its last copy, until an event stands behind it
        self.events: list[Any] = []

    def reading(self, stream: int) -> None:
        """A copy is about to be queued on a stream."""
        self.unmarked[stream] = float("inf")

    def read(self, stream: int, tick: int) -> None:
        """The copy was queued before `tick`."""
        self.unmarked[stream] = tick

    def mark(self, tick: int, stream: int, event: Any) -> None:
        """An event was recorded on a stream, after `tick`."""
        if tick > self.unmarked.get(stream, float("inf")):
            del self.unmarked[stream]
            self.events.append(event)

    def idle(self) -> bool:
        """Whether nothing reads the block any more."""
        return all(event.done for event in self.events)

    def reuse(self) -> None:
        """Wait until nothing reads the block, and begin anew."""
        for event in self.events:
            event.synchronize()
        self.events.clear()
        self.used = 0


class _HostBytes:
    """Memory at an address, for NumPy."""

    def __init__(self, address: int, height: int, width: int, pitch: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (height, width),
            "strides": (pitch, 1),
        }


def _host_bytes(address: int, height: int, width: int, pitch: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(_HostBytes(address, height, width, pitch))
