"""A file with a saved cache, mapped: what it says of itself, checked, and its tensors where they lie."""

from __future__ import annotations

import mmap
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lkv._storage import Storage, View
from lkv.errors import RestoreError, UnpopulatedLayerError
from lkv.layout import check_index
from lkv.persist.header import HEADER_LIMIT, Header, refuse
from lkv.persist.progress import CHUNK, Meter, Progress

__all__ = ["SavedCache", "describe", "located"]


def describe(path: str | os.PathLike[str], *, verify: bool = True, progress: Progress = None) -> SavedCache:
    """Map a saved cache and check it.

    Parameters
    ----------
    path : path
        The file.
    verify : bool
        Check the rows against their checksums too, which reads the whole file.
    progress : bool or callable, optional
        As for `lkv.load`.

    Raises
    ------
    RestoreError
        If it is not a whole file of `lkv.save`: names the field, what was expected and what was found.
    OSError
        If it cannot be read.
    """
    saved = SavedCache(path)
    if verify:
        saved.verify(progress=progress)
    return saved


class SavedCache:
    """A mapped file whose header has been checked; `describe` makes it.

    The file must not be written or cut while this lives. `lkv.save` never does: it puts a new file in its place.

    Attributes
    ----------
    path : str
        The file.
    nbytes : int
        Bytes of the file.
    kind : str
        ``"LatentKvCache"`` or ``"KvCache"``.
    dtype : DType
        Element type of all slots.
    rows : int
        Rows of every slot.
    max_seq_len, n_layers : int
        Of the cache that was saved.
    layers : tuple of int
        The layers in the file, ascending: those that were populated.
    layout : str
        How the slots lay in memory: ``"separate"`` or ``"packed"``; ``"heads"`` for a `KvCache`.
    slots : tuple of SlotSpec
        Names, row shapes and tags.
    fingerprint : str or None
        The caller's name for the model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        with located(self.path):
            self._map = _mapped(self.path)
            self.nbytes = len(self._map)
            length, most = int.from_bytes(self._map[:8], "little"), min(self.nbytes - 8, HEADER_LIMIT)
            if length > most:
                refuse("header length", range(most + 1), length)
            self._begin = 8 + length
            header, checksums = Header.decode(self._map[8 : self._begin], self.nbytes - self._begin)
        self._header, self._checksums = header, 8 + checksums
        self._positions = {layer: position for position, layer in enumerate(header.layers)}
        self.kind, self.dtype, self.rows, self.layout = header.kind, header.dtype, header.rows, header.layout
        self.max_seq_len, self.n_layers, self.layers = header.max_seq_len, header.n_layers, header.layers
        self.slots, self.fingerprint = header.slots, header.fingerprint

    def tensor(self, layer: int, slot: int | str) -> np.ndarray[Any, Any]:
        """Return the rows of a slot, read-only and in the file's own memory.

        Parameters
        ----------
        layer : int
            One of `layers`.
        slot : int or str
            Its number or name.

        Returns
        -------
        numpy.ndarray
            ``[rows, *trailing]``, or ``[1, heads, rows, head_dim]`` for a `KvCache`.

        Raises
        ------
        UnpopulatedLayerError
            If the file has no such layer.
        LayerIndexError
            If there is no such slot.
        """
        names = [spec.name for spec in self.slots]
        which = names.index(slot) if slot in names else check_index(slot, len(names), "slot")
        if layer not in self._positions:
            raise UnpopulatedLayerError(f"layer: expected one of {self.layers}, got {layer}", actual=layer)
        shape = self._header.shape(which)
        begin = self._begin + self._header.offset(self._positions[layer], which)
        array: np.ndarray[Any, Any] = np.ndarray(shape, self.dtype.numpy, self._map, begin)
        return array

    def verify(self, layers: Iterable[int] | None = None, progress: Progress = None) -> None:
        """Compare the rows of some or all layers with their checksums.

        Raises
        ------
        RestoreError
            If a tensor is damaged: names the first.
        """
        chosen = self.layers if layers is None else tuple(layers)
        sizes = [self._header.nbytes(slot) for slot in range(len(self.slots))]
        with located(self.path), Meter(len(chosen) * sum(sizes), "verify", progress) as meter:
            for layer in chosen:
                for slot, spec in enumerate(self.slots):
                    at = self._checksums + (self._positions[layer] * len(sizes) + slot) * 9
                    expected, found = self._map[at : at + 8].decode(), f"{self._checksum(layer, slot, meter):08x}"
                    if expected != found:
                        refuse(f"layers.{layer}.{spec.name}: checksum", expected, found)

    def _checksum(self, layer: int, slot: int, meter: Meter) -> int:
        begin = self._begin + self._header.offset(self._positions[layer], slot)
        end, found = begin + self._header.nbytes(slot), 0
        with memoryview(self._map) as data:
            for at in range(begin, end, CHUNK):
                piece = data[at : min(at + CHUNK, end)]
                found = zlib.crc32(piece, found)
                meter.advance(len(piece))
        return found

    def views(self, layer: int) -> list[View]:
        """Return the rows of a layer as lkv's own views, one per slot; there must be rows."""
        return [Storage.wrap(self.tensor(layer, slot), readonly=True).read() for slot in range(len(self.slots))]

    def __repr__(self) -> str:
        return (
            f"SavedCache({self.path!r}, {self.kind}, {len(self.layers)} of {self.n_layers} layers x {len(self.slots)} "
            f"slots, {self.rows}/{self.max_seq_len} rows, {self.dtype}, fingerprint {self.fingerprint!r})"
        )


@contextmanager
def located(path: str) -> Iterator[None]:
    """Let a refusal say which file it is about."""
    try:
        yield
    except RestoreError as error:
        told = RestoreError(f"{path}: {error}", field=error.field, expected=error.expected, actual=error.actual)
        raise told from None


def _mapped(path: str) -> mmap.mmap:
    # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            refuse("file", "a regular file", stat.filemode(found.st_mode))
        if found.st_size < 8:
            refuse("file length", "at least 8 bytes", found.st_size)
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
