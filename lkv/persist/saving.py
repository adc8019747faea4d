"""Saving: the rows of one moment, streamed into a new file that takes the old one's place when it is whole."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from lkv._storage import Storage, View
from lkv.cache.persistent import PersistentCache
from lkv.errors import ArgumentTypeError
from lkv.persist.header import Header
from lkv.persist.progress import CHUNK, Meter, Progress

__all__ = ["save"]


def save(
    cache: PersistentCache,
    path: str | os.PathLike[str],
    *,
    fingerprint: str | None,
    rows: int | None = None,
    timeout: float | None = None,
    progress: Progress = None,
) -> None:
    """Write the committed rows of a cache to a safetensors file.

    The file holds the rows of the moment the call began. They are leased for reading meanwhile: appends go on, and a
    write over them, after a rewind or by `wipe`, waits until the save is done. Nothing is held twice in memory but a
    few megabytes; of a cache on a device, one slot of one layer.

    Parameters
    ----------
    cache : LatentKvCache or KvCache
        What to save: the layers that are populated.
    path : path
        Where to. The rows go to a temporary file beside it, which takes its place once it is on the disk.
    fingerprint : str or None
        The caller's name for the model and whatever else the rows depend on; `load` must be given the same.
    rows : int, optional
        Save only the first so many rows.
    timeout : float, optional
        Seconds to wait for the lease.
    progress : bool or callable, optional
        None shows a bar from one second on if stderr is a terminal, True always, False never; or it is called with
        bytes done and in all.

    Raises
    ------
    GeometryError
        If fewer than `rows` are committed, or names, tags or fingerprint are not Unicode or longer than 16 kB.
    UnpopulatedLayerError
        If no layer is populated.
    LeaseTimeoutError
        If the lease was not granted in time.
    OSError
        If the file cannot be written; whatever was at `path` is untouched, and nothing else is left.
    """
    if not isinstance(cache, PersistentCache):
        raise ArgumentTypeError(
            f"cache: expected a LatentKvCache or a KvCache, got {type(cache).__name__}", actual=cache
        )
    if not isinstance(fingerprint, str | None):
        raise ArgumentTypeError(f"fingerprint: expected a str or None, got {fingerprint!r}", actual=fingerprint)
    target = os.path.realpath(os.fsdecode(path))
    if os.path.isdir(target):
        raise IsADirectoryError(21, "expected a file, got a folder", target)
    with cache._committed("save", rows, timeout) as held:
        header = Header(
            kind=cache._kind,
            dtype=held.dtype,
            rows=held.rows,
            max_seq_len=held.max_seq_len,
            n_layers=cache.n_layers,
            layers=tuple(held.layers),
            layout=cache._arrangement,
            slots=cache.slots,
            fingerprint=fingerprint,
        )
        views = [view for layer in held.layers.values() for view in layer]
        with Meter(header.data_nbytes, "save", progress) as meter, _Replacement(target) as file:
            file.write(header.encode([0] * len(views)))
            file.rewrite(header.encode([_write(file, view, meter) for view in views]))


def _write(file: _Replacement, view: View, meter: Meter) -> int:
    """Append a tensor to the file and return its CRC-32."""
    checksum = 0
    for piece in _pieces(_on_host(view)):
        checksum = zlib.crc32(piece, checksum)
        file.write(piece)
        meter.advance(len(piece))
    return checksum


class _Replacement:
    """A temporary file that takes another's place if all goes well, and is gone if not."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._folder = os.path.dirname(target)
        self._path = os.path.join(self._folder, f".lkv-{secrets.token_hex(8)}.tmp")

    def __enter__(self) -> _Replacement:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        return self

    def write(self, data: Any) -> None:
        """Write all of it."""
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.write(self._fd, view[done:])

    def rewrite(self, data: bytes) -> None:
        """Write over the beginning."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.write(data)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            try:
                if kind is None:
                    os.fsync(self._fd)
            finally:
                os.close(self._fd)
            if kind is None:
                os.replace(self._path, self._target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        if kind is None:
            _sync_folder(self._folder)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _on_host(view: View) -> np.ndarray[Any, Any]:
    if view.host_accessible:
        return view.numpy()
    if view.size == 0:
        return np.empty(view.shape, view.dtype.numpy)
    between = Storage(view.shape, view.dtype).alias()
    between.copy_from(view)
    return between.numpy()


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, in pieces of a few megabytes; copies only what is strided."""
    if array.size == 0:
        return
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8).data
        for at in range(0, len(flat), CHUNK):
            yield flat[at : at + CHUNK]
        return
    each, most = array[0].nbytes, CHUNK // 2  # two of them live at a time
    if each > most:
        for item in array:
            yield from _pieces(item)
        return
    for at in range(0, len(array), most // each):
        yield from _pieces(np.ascontiguousarray(array[at : at + most // each]))
