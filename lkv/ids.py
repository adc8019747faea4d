"""Allocation identity."""

from __future__ import annotations

from lkv._storage import alloc_id_next

__all__ = ["AllocId"]


class AllocId(int):
    """Says which allocation a held plan is welded to: process-unique, never reused, from 1 upward."""

    __slots__ = ()

    @classmethod
    def next(cls) -> AllocId:
        """Mint the identity of a new allocation; safe from any thread."""
        return cls(alloc_id_next())

    def __repr__(self) -> str:
        return f"alloc {int(self)}"
