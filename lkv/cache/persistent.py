"""What LatentKvCache and KvCache share: everything but where a slot's rows are."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Self

import numpy as np

from lkv._storage import SlotTable, Storage, View, gather_rows, rows_beside
from lkv.cache.slots import LatentSlot, Layers
from lkv.devices import DeviceLocation, resolve
from lkv.errors import ArgumentTypeError, GeometryError, LayerIndexError
from lkv.ids import AllocId
from lkv.layout import Layout, check_index

__all__ = ["PersistentCache", "human_bytes", "layer_set"]

# Storage, and in bytes: the offset of a slot inside it, the stride of outer dims, the stride of rows.
Place = tuple[Storage, int, int, int]


class PersistentCache(SlotTable):
    """A cache that lives across steps: N slots per layer, one published length, an allocation id.

    Made by the class methods of `LatentKvCache` and `KvCache`. Safe to share between threads.
    """

    _alloc_id: AllocId
    _location: DeviceLocation | None  # as far as it can be proven
    _home: DeviceLocation | None  # where repopulate() allocates
    _populate: frozenset[int]
    _changing: AbstractContextManager[bool]  # held while storages and id disagree; a leaf, taken after a turn

    def __new__(cls) -> Self:
        """Make an object without geometry, for the class methods to fill."""
        cache = super().__new__(cls)
        cache._changing = RLock()
        return cache

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} objects come from {type(self).__name__}.with_capacity(...)")

    def _new_layer(self) -> list[Place]:
        """Allocate the storages of one layer: a place for each slot. Nothing is published yet."""
        raise NotImplementedError

    def _layout(self, slot: int) -> Layout:
        """Shape, strides and offset of a whole slot inside its storage."""
        raise NotImplementedError

    def _start(self, location: DeviceLocation, populate: Iterable[int]) -> None:
        self._home = location
        self._populate = frozenset(populate)
        self._put(self._allocate())

    def _allocate(self) -> dict[int, list[Place]]:
        return {layer: self._new_layer() for layer in sorted(self._populate)}

    def _put(self, fresh: dict[int, list[Place]]) -> None:
        for layer, places in fresh.items():
            for slot, place in enumerate(places):
                self._place(layer, slot, *place, shares=self.n_slots > 1 and place[0] is places[slot - 1][0])
        self._location = self._home
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

    def clear(self) -> None:
        """Drop every layer's storages; nothing is cached any more, and the allocation id is new.

        Arrays and leases that others hold keep the old memory alive.

        Raises
        ------
        StepInProgressError
            Inside a step of the same thread; a step of another thread is waited for.
        """
        with self._turn(0, "clear"), self._changing:
            self._empty()
            self._alloc_id = AllocId.next()

    def repopulate(self) -> None:
        """Allocate the layers again, full of zeros, under a new allocation id.

        Raises
        ------
        OutOfMemoryError
            If the memory does not suffice beside the old; the cache is then as before.
        StepInProgressError
            Inside a step of the same thread.
        """
        with self._turn(0, "repopulate"):
            fresh = self._allocate()
            with self._changing:
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
        populated = [layer for layer in range(self.n_layers) if self._populated(layer)]
        made = self._like(location, populated)
        if not populated:
            return made
        with self.read(populated[0], timeout) as held:
            if held.hi == 0:
                return made
            with made.step(held.hi) as step:
                for layer in populated:
                    for target, source in zip(step.reserve(layer), rows_beside(self, held, layer), strict=True):
                        target.copy_from(source)
                    step.note_write(layer)
        return made

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
                    f"rows: expected 0 to {view.hi - 1}, got {bad}", expected=(0, view.hi), actual=bad
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
