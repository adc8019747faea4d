"""Caches in files: saved while decoding goes on, checked before anything is restored."""

from lkv.persist.restoring import load, restore
from lkv.persist.saved import SavedCache, describe
from lkv.persist.saving import save

__all__ = ["SavedCache", "describe", "load", "restore", "save"]
