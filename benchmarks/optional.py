"""Peers that may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

__all__ = ["missing", "peer"]


def peer(name: str) -> ModuleType | None:
    """Import a module, or return None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def missing(names: Sequence[str]) -> list[str]:
    """Return those that cannot be imported, as a table says it."""
    return [f"{name}: not installed" for name in names if peer(name) is None]
