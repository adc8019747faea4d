"""The C helper, compiled when first asked for, and lkv's C interface as an address."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lkv
from lkv._storage import _C_API

__all__ = ["Place", "api_address", "library", "places", "storages_of"]


class Place(ctypes.Structure):
    """As in peers.c."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("buffer", ctypes.c_void_p),
    )


@functools.cache
def library() -> Any:
    """Compile peers.c with the system's compiler and load it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "cc"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "peers.so"
        source = Path(__file__).with_name("peers.c")
        flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", f"-I{lkv.get_include()}"]
        subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True)
        loaded = ctypes.CDLL(str(made))
    pointer, number = ctypes.c_void_p, ctypes.c_long
    for name in ("copy_tokens", "copy_slab"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [pointer, number, number, number], None
    for name in ("copy_tokens_leased", "write_host_tokens", "write_host_slab"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [pointer, pointer, number, number, number], ctypes.c_int
    loaded.rwlock_pairs.argtypes = [number, ctypes.c_int]
    loaded.mutex_pairs.argtypes = [number]
    loaded.lease_pairs.argtypes = [pointer, pointer, number, ctypes.c_int]
    return loaded


@functools.cache
def api_address() -> int:
    """Return the address of lkv's table of C functions."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    return int(get(_C_API, b"lkv._storage._C_API"))


def places(targets: Sequence[tuple[lkv.Storage, int, int]]) -> ctypes.Array[Place]:
    """Describe storages to the C helper: each with the address of its source and the bytes of a row."""
    return (Place * len(targets))(*(Place(s.address, source, nbytes, s.handle) for s, source, nbytes in targets))


def storages_of(cache: lkv.LatentKvCache) -> list[lkv.Storage]:
    """Return the storages of a cache, layer by layer and slot by slot."""
    every = (cache.slot_storage(layer, slot) for layer in range(cache.n_layers) for slot in range(cache.n_slots))
    return [storage for storage in every if storage is not None]
