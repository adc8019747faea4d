"""What a held plan can be, and why it may not move."""

from __future__ import annotations

from enum import Enum

__all__ = ["PlanValidity", "RebindRefusal"]


class PlanValidity(Enum):
    """What can be done with a held plan."""

    VALID = "valid"
    """It reads this very allocation: run it."""
    ALLOCATION_CHANGED = "allocation_changed"
    """It has the right geometry over another allocation: re-bind it."""
    STALE = "stale"
    """It was built for another geometry or another model: build anew."""


class RebindRefusal(Enum):
    """Why a plan was not moved to another allocation; `RebindRefused.reason` is one of these."""

    RESIDENCY_UNKNOWN = "residency_unknown"
    """Where the baked or the incoming rows are cannot be proven."""
    RESIDENCY_DIFFERS = "residency_differs"
    """The incoming rows are on another device, or on another one of the same type."""
    MISSING_SLOT = "missing_slot"
    """A slot that the plan reads holds no incoming storage: it would go on reading the old one."""
    UNBAKED_SLOT = "unbaked_slot"
    """A storage comes in for a slot that the plan never reads: part of the context would be left out."""
    STORAGE_DIFFERS = "storage_differs"
    """Element type, shape, rows, extent, layout or tag is another than the plan was built over."""
    POISONED = "poisoned"
    """A write into an incoming storage failed half-way."""
