"""What a plan can be bound to."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lkv._storage import Storage
from lkv.devices import DeviceLocation

__all__ = ["KvRebindSource"]


@runtime_checkable
class KvRebindSource(Protocol):
    """A cache that says which allocation it is, and hands out its storages; `LatentKvCache` and `KvCache` do.

    Two more methods are used where a source has them. ``rebind_hold()`` returns a context manager within which id,
    location and storages do not change; without it they are read again until the id has stayed the same.
    ``rebind_encoding(which)`` returns a comparable value that says how a slot is read, beyond what its storage says
    itself: lkv's caches return the tag, and the layout inside the storage. Plans move only between equal ones, and a
    source that does not say is unlike one that does.
    """

    @property
    def alloc_id(self) -> int:
        """Changes when memory changes, and only then."""

    @property
    def n_layers(self) -> int:
        """Number of layers, populated or not."""

    @property
    def n_slots(self) -> int:
        """Number of slots in each layer."""

    @property
    def max_seq_len(self) -> int:
        """Rows allocated."""

    @property
    def dtype(self) -> Any:
        """The element type."""

    def rebind_location(self) -> DeviceLocation | None:
        """Return where all rows are; None when that cannot be proven."""

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        """Return the storage of a slot; None when there is none."""
