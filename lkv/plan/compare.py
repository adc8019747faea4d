"""Whether a plan built over one allocation reads another correctly."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lkv.errors import RebindRefused
from lkv.plan.allocation import Allocation
from lkv.plan.validity import RebindRefusal

__all__ = ["CHECKS", "Refusal", "refusal"]


class Refusal(NamedTuple):
    """The first thing that speaks against a re-bind."""

    reason: RebindRefusal
    text: str
    layer: int | None = None
    which: int | None = None
    baked: object = None
    incoming: object = None

    def error(self) -> RebindRefused:
        """Return the exception that says so."""
        where = "" if self.layer is None else f" at layer {self.layer}, slot {self.which}"
        return RebindRefused(
            f"rebind_kv: {self.reason.name}{where}: {self.text}",
            reason=self.reason,
            layer=self.layer,
            which=self.which,
            baked=self.baked,
            incoming=self.incoming,
        )


def refusal(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """Return the first reason not to move a plan from what is baked into it to what comes; None when there is none."""
    return next((found for check in CHECKS if (found := check(baked, incoming)) is not None), None)


def residency_known(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """Both allocations say where they are."""
    if baked.location is not None and incoming.location is not None:
        return None
    side = "the plan was built over" if baked.location is None else "the source offers"
    return Refusal(
        RebindRefusal.RESIDENCY_UNKNOWN,
        f"{side} memory that cannot be proven to be on one device",
        baked=baked.location,
        incoming=incoming.location,
    )


def residency_same(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """The allocations, and each storage by its own account, are where the plan reads."""
    if None not in (baked.location, incoming.location) and baked.location != incoming.location:
        return Refusal(
            RebindRefusal.RESIDENCY_DIFFERS,
            f"expected {baked.location}, got {incoming.location}",
            baked=baked.location,
            incoming=incoming.location,
        )
    for key, old in baked.slots.items():
        new = incoming.slots.get(key)
        if new is not None and new.device != old.device:
            return Refusal(
                RebindRefusal.RESIDENCY_DIFFERS,
                f"expected {old.device}, got {new.device}",
                *key,
                old.device,
                new.device,
            )
    return None


def slots_present(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """Each slot that the plan reads has a storage."""
    for key, old in baked.slots.items():
        if key not in incoming.slots:
            return Refusal(
                RebindRefusal.MISSING_SLOT, f"expected a storage for {old.storage!r}, got none", *key, old.storage, None
            )
    return None


def slots_baked(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """Each storage is one of a slot that the plan reads."""
    for key, new in incoming.slots.items():
        if key not in baked.slots:
            return Refusal(RebindRefusal.UNBAKED_SLOT, f"expected none, got {new.storage!r}", *key, None, new.storage)
    return None


def storages_alike(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """Each storage has the element type, shape, row axis, extent, access and encoding that the plan was built over."""
    for key, old in baked.slots.items():
        new = incoming.slots.get(key)
        if new is not None and new.form != old.form:
            differing = (name for name in old._fields[2:] if getattr(old, name) != getattr(new, name))
            text = ", ".join(
                f"{name}: expected {getattr(old, name)!r}, got {getattr(new, name)!r}" for name in differing
            )
            return Refusal(RebindRefusal.STORAGE_DIFFERS, text, *key, old.storage, new.storage)
    return None


def unpoisoned(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """No storage was left half-written."""
    for key, new in incoming.slots.items():
        if new.storage.poisoned:
            old = baked.slots.get(key)
            return Refusal(
                RebindRefusal.POISONED,
                f"a write into {new.storage!r} failed half-way; write it anew, then call clear_poison() on it",
                *key,
                None if old is None else old.storage,
                new.storage,
            )
    return None


def geometry_same(baked: Allocation, incoming: Allocation) -> Refusal | None:
    """What the source says of itself is what the plan was built for, too."""
    if baked.geometry == incoming.geometry:
        return None
    return Refusal(
        RebindRefusal.STORAGE_DIFFERS,
        f"expected (max_seq_len, n_layers, dtype) {baked.geometry}, got {incoming.geometry}",
        baked=baked.geometry,
        incoming=incoming.geometry,
    )


Check = Callable[[Allocation, Allocation], Refusal | None]

CHECKS: tuple[Check, ...] = (
    residency_known,
    residency_same,
    slots_present,
    slots_baked,
    storages_alike,
    unpoisoned,
    geometry_same,
)
