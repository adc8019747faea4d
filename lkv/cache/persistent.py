"""What LatentKvCache and KvCache share: everything but where a slot's rows are."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from lkv._storage import LayerRows, SlotTable, Storage, View, gather_rows, rows_beside
from lkv.cache.html import cache_html
from lkv.cache.slots import LatentSlot, Layers
from lkv.devices import DeviceLocation, resolve
from lkv.dtypes import DType
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    DTypeMismatchError,
    GeometryError,
    LayerIndexError,
    UnpopulatedLayerError,
)
from lkv.ids import AllocId
from lkv.layout import Layout, check_count, check_index
from lkv.locks import ProcessLock

__all__ = ["PersistentCache", "human_bytes", "layer_set"]

# Storage, and in bytes: the offset of a slot inside it, the stride of outer dims, the stride of rows.
Place = tuple[Storage, int, int, int]


class Committed(NamedTuple):
    """What is leased of a cache: all of one allocation and of one moment."""

    rows: int
    layers: dict[int, LayerRows]
    dtype: DType
    max_seq_len: int


class PersistentCache(SlotTable):
    """A cache that lives across steps: N slots per layer, one published length, an allocation id.

    Made by the class methods of `LatentKvCache` and `KvCache`. Safe to share between threads.
    """

    _kind: ClassVar[str]  # in saved files
    _alloc_id: AllocId
    _location: DeviceLocation | None  # as far as it can be proven
    _home: DeviceLocation | None  # where repopulate() allocates
    _populate: frozenset[int]
    _changing: AbstractContextManager[None]  # held while storages and id disagree; a leaf, taken after a turn

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make an object without geometry, for the class methods to fill."""
        cache = super().__new__(cls)
        cache._changing = ProcessLock()
        return cache

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(f"{type(self).__name__} objects come from {type(self).__name__}.with_capacity(...)")

    def _new_layer(self) -> list[Place]:
        """Allocate the storages of one layer: a place for each slot. Nothing is published yet."""
        raise NotImplementedError

    @property
    def _arrangement(self) -> str:
        """How slots lie in memory, as saved files call it."""
        raise NotImplementedError

    def _layout(self, slot: int) -> Layout:
        """Shape, strides and offset of a whole slot inside its storage."""
        raise NotImplementedError

    def _start(self, location: DeviceLocation, populate: Iterable[int]) -> None:
        self._home = location
        self._populate = frozenset(populate)
        self._alloc_id = AllocId.next()
        self._put(self._allocate())

    def _allocate(self) -> dict[int, list[Place]]:
        return {layer: self._new_layer() for layer in sorted(self._populate)}

    def _put(self, fresh: dict[int, list[Place]]) -> None:
        for layer, places in fresh.items():
            for slot, place in enumerate(places):
                self._place(layer, slot, *place, shares=self.n_slots > 1 and place[0] is places[slot - 1][0])
        self._location = self._home

    @contextmanager
    def _new_id(self) -> Iterator[None]:
        """Change storages under a new id: from the start, so that an interrupt leaves no new memory under the old one.

        And again at the end: who took the id in between did not see the memory that it stands for.
        """
        self._alloc_id = AllocId.next()
        try:
            yield
        finally:
            self._alloc_id = AllocId.next()

    def _empty(self, keep: Container[int] = ()) -> None:
        # The length goes first: who looks in meanwhile finds no rows, never those of a storage that is leaving.
        self._rewind(True)
        for layer in range(self.n_layers):
            if layer not in keep:
                self._drop(layer)

    @property
    def alloc_id(self) -> AllocId:
        """Says which allocation this is: changes when memory changes, and only then."""
        return self._alloc_id

    @property
    def device_location(self) -> DeviceLocation | None:
        """Where the rows are; None when that cannot be proven."""
        return self._location

    @property
    def layers(self) -> Layers:
        """``layers[l]`` is None until populated, else a tuple of `LatentSlot`."""
        return Layers(self)

    def slot_trailing(self, slot: int) -> tuple[int, ...]:
        """Return the shape of one row of a slot."""
        return self.slots[check_index(slot, self.n_slots, "slot")].trailing

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        unique = {storage.id: storage.nbytes for storage in self._storages()}
        return sum(unique.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all populated layers."""
        populated = sum(self._populated(layer) for layer in range(self.n_layers))
        return populated * sum(spec.width for spec in self.slots) * self.dtype.itemsize

    def clear(self, timeout: float | None = None) -> None:
        """Drop every layer's storages; nothing is cached any more, and the allocation id is new.

        Arrays and leases that others hold keep the old memory alive.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a step of another thread; 0 tries, None waits for ever.

        Raises
        ------
        StepInProgressError
            Inside a step of the same thread, or with ``timeout=0`` if another thread's is open.
        LeaseTimeoutError
            If that step was not over in time.
        """
        with self._turn(0, "clear", timeout), self._changing, self._new_id():
            self._empty()

    def repopulate(self, timeout: float | None = None) -> None:
        """Allocate the layers again, full of zeros, under a new allocation id.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a step of another thread; 0 tries, None waits for ever.

        Raises
        ------
        OutOfMemoryError
            If the memory does not suffice beside the old; the cache is then as before.
        StepInProgressError
            Inside a step of the same thread, or with ``timeout=0`` if another thread's is open.
        LeaseTimeoutError
            If that step was not over in time.
        """
        with self._turn(0, "repopulate", timeout):
            fresh = self._allocate()
            with self._changing, self._new_id():
                self._empty(keep=fresh)
                self._put(fresh)

    def wipe(self, timeout: float | None = None) -> None:
        """Fill every row with zeros and cache nothing, under the same id: to hand the cache to another tenant.

        Waits for readers.

        Raises
        ------
        WouldDeadlockError
            If this thread itself has a view open.
        LeaseTimeoutError
            If the rows are still read after `timeout` seconds.
        StepInProgressError
            Inside a step of the same thread.
        """
        with self._turn(self.max_seq_len, "wipe", timeout) as turn:
            self._zero(turn)
            self._rewind(False)

    def to(self, device: Any, timeout: float | None = None) -> Self:
        """Return a new cache with the committed rows on a device, or a copy on the same one.

        Geometry, slots and populated layers are those of this cache; the allocation id is new.

        Parameters
        ----------
        device : str, DeviceLocation or torch.device
            Where to.
        timeout : float, optional
            Seconds to wait for the rows.

        Raises
        ------
        OutOfMemoryError
            If the memory does not suffice; nothing stays allocated.
        DeviceUnavailableError
            If the device cannot be used; says why.
        """
        location = resolve(device)
        if not self._populated_layers():
            return self._like(location, ())
        with self._committed("to", None, timeout) as held:
            made = self._like(location, tuple(held.layers))
            with made._turn(held.rows, "to") as turn:
                made._overwrite(turn, held.rows, held.layers.__getitem__)
        return made

    def fork(self, timeout: float | None = None) -> Self:
        """Return a new cache that holds the committed rows too, where this one is; the two go their own ways.

        The rows are copied: they share nothing that either may write. As `to`, in errors too.
        """
        storages = self._storages()
        return self.to(storages[0].device if storages else self._home or "cpu", timeout)

    def copy_from(self, other: PersistentCache, rows: int | None = None, timeout: float | None = None) -> int:
        """Replace what is cached by the first rows of another cache, on whatever device; ids stay.

        Readers see the old rows or the new ones. The cost goes by the rows copied.

        Parameters
        ----------
        other : LatentKvCache or KvCache
            Of the same kind, number of layers, element type and slots, names and tags included; capacity and layout
            may differ. Every populated layer of this cache must be populated there.
        rows : int, optional
            How many; by default all that it has committed.
        timeout : float, optional
            Seconds to wait for its rows, and for readers of this cache.

        Returns
        -------
        int
            The new `cached_len`.

        Raises
        ------
        GeometryError
            If kind, layers or slots differ, or fewer than `rows` rows are committed there.
        DTypeMismatchError
            If the element type differs.
        UnpopulatedLayerError
            If the other cache lacks a layer, or this one has none.
        CapacityError
            If the rows do not fit.
        LeaseTimeoutError, WouldDeadlockError, StepInProgressError
            If the rows of this cache are in use: for too long, by this thread, by a step of this thread.
        """
        if not isinstance(other, PersistentCache):
            raise ArgumentTypeError(f"other: expected a cache, got {type(other).__name__}", actual=other)
        if other is self:
            count = self.cached_len if rows is None else check_count(rows, "rows")
            self._check_committed("copy_from", count, self.cached_len)
            return self.truncate_to(count)
        with ExitStack() as stack:
            turn = None
            # In one order for all pairs of caches, so that two threads that copy to and fro do not wait for each other.
            if id(self) < id(other):
                most = self.max_seq_len if rows is None else check_count(rows, "rows")
                turn = stack.enter_context(self._turn(most, "copy_from", timeout))
            held = stack.enter_context(other._committed("copy_from", rows, timeout))
            if turn is None:
                turn = stack.enter_context(self._turn(held.rows, "copy_from", timeout))
            self._check_source(other, held)
            self._overwrite(turn, held.rows, held.layers.__getitem__)
        return held.rows

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: str | None,
        timeout: float | None = None,
        progress: bool | Callable[[int, int], object] | None = None,
    ) -> int:
        """Replace what is cached by the rows of a file that `lkv.save` wrote; ids stay.

        The file is checked from end to end before anything is changed, while readers and steps go on. Then the cache
        is written by a turn of its own: readers see the old rows or the new ones.

        Parameters
        ----------
        path : path
            The file. Every populated layer of this cache must be in it; more may be. Capacity, layout and device may
            differ from those of the cache that was saved.
        fingerprint : str or None
            What `lkv.save` was given.
        timeout : float, optional
            Seconds to wait for readers and for a step of another thread.
        progress : bool or callable, optional
            As for `lkv.load`.

        Returns
        -------
        int
            The new `cached_len`.

        Raises
        ------
        RestoreError
            If the file is damaged or does not fit: names the field, what was expected and what was found. Rows, length
            and versions are as before, as with all errors but `DeviceError`.
        OSError
            If the file cannot be read.
        LeaseTimeoutError, WouldDeadlockError, StepInProgressError
            If the rows are in use: for too long, by this thread, by a step of this thread.
        DeviceError
            If a device fails while it is written. Nothing is cached then.
        """
        from lkv.persist import restore

        return restore(self, path, fingerprint=fingerprint, timeout=timeout, progress=progress)

    @contextmanager
    def _committed(self, what: str, rows: int | None, timeout: float | None) -> Iterator[Committed]:
        """Lease the published rows and give out the first `rows` of every populated layer, all of one allocation."""
        while True:
            alloc_id, populated = self._alloc_id, self._populated_layers()
            if not populated:
                raise UnpopulatedLayerError(f"{what}: no layer of {self!r} holds storage")
            try:
                held = self.read(populated[0], timeout)
            except UnpopulatedLayerError:
                continue  # dropped since
            with held:
                count = held.hi if rows is None else check_count(rows, "rows")
                self._check_committed(what, count, held.hi)
                with self._changing:
                    if self._alloc_id != alloc_id:
                        continue
                    layers = {layer: rows_beside(self, held, layer, count) for layer in populated}
                    committed = Committed(count, layers, self.dtype, self.max_seq_len)
                yield committed
                return

    def _check_committed(self, what: str, rows: int, committed: int) -> None:
        if rows > committed:
            raise GeometryError(
                f"{what}: rows: expected at most {committed}, those committed, got {rows}",
                expected=committed,
                actual=rows,
            )

    def _check_source(self, other: PersistentCache, held: Committed) -> None:
        for name, own, its in (
            ("kind", self._kind, other._kind),
            ("n_layers", self.n_layers, other.n_layers),
            ("slots", self.slots, other.slots),
        ):
            if own != its:
                raise GeometryError(f"copy_from: {name}: expected {own}, got {its}", expected=own, actual=its)
        if self.dtype is not held.dtype:
            raise DTypeMismatchError(
                f"copy_from: expected {self.dtype}, got {held.dtype}; lkv never casts",
                expected=self.dtype,
                actual=held.dtype,
            )
        own_layers = self._populated_layers()
        missing = [layer for layer in own_layers if layer not in held.layers]
        if missing or not own_layers:
            who = f"layers {missing} of the other cache hold no" if missing else "no layer of this cache holds"
            raise UnpopulatedLayerError(f"copy_from: {who} storage", actual=missing)
        if held.rows > self.max_seq_len:
            raise CapacityError(
                f"copy_from: {held.rows} rows do not fit max_seq_len {self.max_seq_len}",
                expected=self.max_seq_len,
                actual=held.rows,
            )

    def _overwrite(self, turn: object, rows: int, source: Callable[[int], Iterable[View]]) -> None:
        """Make rows ``[0, rows)`` of every layer those of `source`, by a turn at them, and publish just these.

        Nothing is cached if that fails on the way.
        """
        try:
            for layer in self._populated_layers() if rows else ():
                for target, view in zip(self._writable(turn, layer, rows), source(layer), strict=True):
                    target.copy_from(view)
        except BaseException:
            self._rewind(False)
            raise
        self._replaced(rows)
        for storage in self._storages() if rows else ():
            storage.clear_poison()

    def _populated_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.n_layers) if self._populated(layer))

    def _like(self, location: DeviceLocation, populate: Sequence[int]) -> Self:
        """Make an empty cache of the same geometry elsewhere."""
        raise NotImplementedError

    def gather(
        self, layer: int, rows: Any, timeout: float | None = None
    ) -> tuple[np.ndarray[Any, Any], ...] | tuple[View, ...]:
        """Copy chosen published rows of a layer.

        Parameters
        ----------
        layer : int
            The layer.
        rows : array_like of int
            Row numbers in ``[0, cached_len)``, in any order, of any shape.
        timeout : float, optional
            Seconds to wait for the rows.

        Returns
        -------
        tuple of numpy.ndarray, or of View
            One array per slot, the chosen rows in place of the row dimension; on a device, views of new storages there.

        Raises
        ------
        LayerIndexError
            If a row is negative or not published.
        """
        index = np.asarray(rows)
        if index.dtype.kind not in "iu":
            if index.size:
                raise ArgumentTypeError(f"rows: expected integers, got {index.dtype}", actual=index.dtype)
            index = index.astype(np.int64)
        with self.read(layer, timeout) as view:
            if index.size and not (index.min() >= 0 and index.max() < view.hi):
                bad = index.min() if index.min() < 0 else index.max()
                raise LayerIndexError(
                    f"rows: expected published rows, below {view.hi}, got {bad}", expected=(0, view.hi), actual=bad
                )
            if not view[0].host_accessible:
                return tuple(gather_rows(slot, self._row_axis, index) for slot in view)
            return tuple(np.asarray(np.take(array, index, axis=self._row_axis)) for array in view.numpy())

    def rebind_location(self) -> DeviceLocation | None:
        """Return where the rows are for a plan that wants to re-bind; None when that cannot be proven."""
        return self._location

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        """Return the storage that a plan would bind for a slot; None when there is none."""
        return self.slot_storage(layer, which)

    def rebind_encoding(self, which: int) -> tuple[str, Layout]:
        """Return how a plan reads the slot: its tag, and its layout inside the storage."""
        return self.slots[which].tag, self._layout(which)

    def rebind_hold(self) -> AbstractContextManager[object]:
        """Keep id, location and storages as they are for a moment, so that a plan can take them together."""
        return self._changing

    _row_axis = 0

    def _storages(self) -> list[Storage]:
        found = (self.slot_storage(layer, slot) for layer in range(self.n_layers) for slot in range(self.n_slots))
        return [storage for storage in found if storage is not None]

    def _layer(self, layer: int) -> tuple[LatentSlot, ...] | None:
        storages = [self.slot_storage(layer, slot) for slot in range(self.n_slots)]
        return (
            tuple(
                LatentSlot(storage, self._layout(slot), self.slot_version(layer, slot), storage.device)
                for slot, storage in enumerate(storages)
                if storage is not None
            )
            or None
        )

    def _repr_html_(self) -> str:
        return cache_html(self)

    def __repr__(self) -> str:
        populated = sum(self._populated(layer) for layer in range(self.n_layers))
        layers = f"{self.n_layers}" if populated == self.n_layers else f"{populated} of {self.n_layers}"
        where = "device unknown" if self._location is None else str(self._location)
        used = human_bytes(self.cached_len * self.bytes_per_token)
        return (
            f"{type(self).__name__}({layers} layers x {self.n_slots} slots, {self.cached_len}/{self.max_seq_len} rows, "
            f"{self.dtype}, {where}, {self.alloc_id!r}, {used} of {human_bytes(self.nbytes)})"
        )


def layer_set(layers: Iterable[int] | None, n_layers: int) -> Sequence[int]:
    """Return the layers to populate, checked; None means all."""
    if layers is None:
        return range(n_layers)
    try:
        chosen = [check_index(layer, n_layers, "layers") for layer in layers]
    except TypeError as error:
        raise ArgumentTypeError(f"layers: expected integers, got {layers!r}", actual=layers) from error
    if len(set(chosen)) != len(chosen):
        raise GeometryError(f"layers: expected distinct layers, got {chosen}", actual=chosen)
    return chosen


def human_bytes(nbytes: float) -> str:
    """Format a number of bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
