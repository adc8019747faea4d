"""The memory of a source, taken in one breath."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from lkv._storage import Storage
from lkv.devices import DeviceLocation
from lkv.dtypes import DType
from lkv.errors import ArgumentTypeError, LeaseTimeoutError, PoisonedError, UnpopulatedLayerError
from lkv.plan.source import KvRebindSource

__all__ = ["Allocation", "SlotMemory", "take"]

_ATTEMPTS = 1000


class SlotMemory(NamedTuple):
    """One slot: its storage, and what a plan takes for granted about it."""

    storage: Storage
    device: DeviceLocation
    dtype: DType
    shape: tuple[int, ...]
    axis: int
    nbytes: int
    readonly: bool
    encoding: Any

    @classmethod
    def of(cls, storage: Storage, encoding: Any) -> SlotMemory:
        """Look at a storage."""
        return cls(
            storage,
            storage.device,
            storage.dtype,
            storage.shape,
            storage.axis,
            storage.nbytes,
            storage.readonly,
            encoding,
        )

    @property
    def form(self) -> tuple[object, ...]:
        """All but the storage and its device: what must be equal for a plan to read another storage the same way."""
        return self[2:]


class Allocation(NamedTuple):
    """Id, geometry, location and all storages of a source, as they were together at one moment."""

    alloc_id: int
    max_seq_len: int
    n_layers: int
    dtype: DType
    location: DeviceLocation | None
    slots: Mapping[tuple[int, int], SlotMemory]

    @property
    def geometry(self) -> tuple[int, int, DType]:
        """``(max_seq_len, n_layers, dtype)``."""
        return self.max_seq_len, self.n_layers, self.dtype

    def require_usable(self) -> None:
        """Refuse memory that no plan should be built over.

        Raises
        ------
        UnpopulatedLayerError
            If there is no storage at all.
        PoisonedError
            If a write into one of the storages failed half-way.
        """
        if not self.slots:
            raise UnpopulatedLayerError("source: expected at least one populated layer, got none")
        for (layer, which), slot in self.slots.items():
            if slot.storage.poisoned:
                raise PoisonedError(
                    f"source: layer {layer}, slot {which}: a write failed half-way; write it anew, then call "
                    "clear_poison() on its storage"
                )


def take(source: KvRebindSource) -> Allocation:
    """Take everything a plan needs from a source, all of one allocation whatever other threads do to the source.

    Raises
    ------
    ArgumentTypeError
        If the object is no `KvRebindSource`.
    LeaseTimeoutError
        If a source without ``rebind_hold`` keeps changing its memory.
    """
    if not isinstance(source, KvRebindSource):
        raise ArgumentTypeError(
            f"source: expected a cache or another KvRebindSource, got {type(source).__name__}", actual=source
        )
    hold = getattr(source, "rebind_hold", nullcontext)
    for _ in range(_ATTEMPTS):
        with hold():
            found = _look(source)
            if source.alloc_id == found.alloc_id:
                return found
        time.sleep(0)
    raise LeaseTimeoutError(f"source: its memory changed each of {_ATTEMPTS} times it was looked at")


def _look(source: KvRebindSource) -> Allocation:
    alloc_id, n_slots = source.alloc_id, source.n_slots
    encoding_of = getattr(source, "rebind_encoding", lambda which: None)
    encodings = [encoding_of(which) for which in range(n_slots)]
    slots = {
        (layer, which): SlotMemory.of(storage, encodings[which])
        for layer in range(source.n_layers)
        for which in range(n_slots)
        if (storage := source.rebind_slot(layer, which)) is not None
    }
    return Allocation(
        alloc_id, source.max_seq_len, source.n_layers, DType.of(source.dtype), source.rebind_location(), slots
    )
