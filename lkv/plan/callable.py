"""A plan that is a plain Python function over arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lkv._storage import Storage
from lkv.errors import ArgumentTypeError
from lkv.layout import check_count

__all__ = ["Buffers", "CallablePlan"]

Buffers: TypeAlias = tuple[tuple[Any, ...], ...]


class CallablePlan:
    """Calls ``step(buffers, *args, **kwargs)`` with arrays that alias whole storages.

    Parameters
    ----------
    step : callable
        Its first argument is ``buffers[layer][which]``: the array of a slot, None where none is bound. Packed slots
        share a storage, so each gets the whole row.
    view : callable, optional
        Makes an array from a `Storage`, without a copy; NumPy by default.
    """

    def __init__(self, step: Callable[..., Any], *, view: Callable[[Storage], Any] | None = None) -> None:
        self._step = step
        self._view = _numpy if view is None else view
        self._arrays: dict[tuple[int, int], Any] = {}
        self._buffers: Buffers | None = None

    @property
    def buffers(self) -> Buffers:
        """The arrays bound, ``[layer][which]``."""
        if self._buffers is None:
            n_layers = 1 + max((layer for layer, _ in self._arrays), default=-1)
            n_slots = 1 + max((which for _, which in self._arrays), default=-1)
            self._buffers = tuple(
                tuple(self._arrays.get((layer, which)) for which in range(n_slots)) for layer in range(n_layers)
            )
        return self._buffers

    def bind(self, layer: int, which: int, storage: Storage) -> None:
        """Read the slot from this storage from now on."""
        if not isinstance(storage, Storage):
            raise ArgumentTypeError(f"storage: expected a Storage, got {type(storage).__name__}", actual=storage)
        self._arrays[check_count(layer, "layer"), check_count(which, "which")] = self._view(storage)
        self._buffers = None

    def invalidate(self) -> None:
        """Do nothing: the function gets its arrays anew with every call."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._step(self.buffers, *args, **kwargs)


def _numpy(storage: Storage) -> Any:
    return storage.alias().numpy()
