"""Peers that may be missing."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["peer"]


def peer(name: str) -> ModuleType | None:
    """Import a module, or return None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
