"""What a held plan must be able to do."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lkv._storage import Storage

__all__ = ["Plan"]


@runtime_checkable
class Plan(Protocol):
    """Something built once over fixed memory and run many times. `DecodeSession` calls these, one thread at a time."""

    def bind(self, layer: int, which: int, storage: Storage) -> None:
        """Read the slot from this storage from now on. An exception must leave the slot as it was.

        `Storage.alias` gives the memory without a lease.
        """

    def invalidate(self) -> None:
        """Drop whatever replays the present addresses without looking at them again, after its work is done.

        Called before the first `bind`, also when none follows: the next `run` must capture anew over what is bound.
        """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step over what is bound."""
