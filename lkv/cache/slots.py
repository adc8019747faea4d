"""What a populated layer consists of, seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from lkv._storage import Storage
from lkv.devices import DeviceLocation
from lkv.layout import Layout, check_index

if TYPE_CHECKING:
    from lkv.cache.persistent import PersistentCache

__all__ = ["LatentSlot", "Layers"]


@dataclass(frozen=True, slots=True)
class LatentSlot:
    """One slot of a populated layer, as it was when looked at.

    Attributes
    ----------
    storage : Storage
        The memory; packed slots share one.
    layout : Layout
        Shape, strides and offset of the whole slot inside the storage, in elements.
    version : int
        Moves by one with every write to the slot; compare with a later look.
    authority : DeviceLocation
        Where the copy of the rows is that counts; lkv keeps one.
    """

    storage: Storage
    layout: Layout
    version: int
    authority: DeviceLocation


class Layers(Sequence["tuple[LatentSlot, ...] | None"]):
    """The layers of a cache: ``layers[l]`` is None until populated, else a tuple of its slots."""

    __slots__ = ("_cache",)

    def __init__(self, cache: PersistentCache) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return self._cache.n_layers

    @overload
    def __getitem__(self, index: int) -> tuple[LatentSlot, ...] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[LatentSlot, ...] | None]: ...
    def __getitem__(self, index: int | slice) -> tuple[LatentSlot, ...] | list[tuple[LatentSlot, ...] | None] | None:
        if isinstance(index, slice):
            return [self._cache._layer(layer) for layer in range(len(self))[index]]
        return self._cache._layer(check_index(index, len(self), "layer"))

    def __repr__(self) -> str:
        populated = sum(layer is not None for layer in self)
        return f"Layers({populated} of {len(self)} populated)"
