"""The C and C++ helpers, compiled when first asked for, and lkv's C interface as an address."""

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

__all__ = ["CompilerMissing", "Place", "api_address", "library", "places", "storages_of", "threads"]

_LANGUAGES = {
    ".c": ("C", "CC", ("cc", "gcc", "clang"), "-std=gnu11"),
    ".cpp": ("C++", "CXX", ("c++", "g++", "clang++"), "-std=c++17"),
}


class CompilerMissing(RuntimeError):
    """The limits are loops in C and C++, and there is no compiler for them."""


class Place(ctypes.Structure):
    """As in peers.c and threads.cpp."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("buffer", ctypes.c_void_p),
    )


@functools.cache
def library() -> Any:
    """Compile and load peers.c: copies on one thread."""
    loaded = _compiled("peers.c")
    pointer, number = ctypes.c_void_p, ctypes.c_long
    places_at = [pointer, number, number]  # how many, from which row
    loaded.copy_tokens.argtypes, loaded.copy_tokens.restype = [*places_at, number], None
    loaded.copy_slabs.argtypes, loaded.copy_slabs.restype = [*places_at, number, number], None
    loaded.copy_tokens_leased.argtypes = loaded.write_host_tokens.argtypes = [pointer, *places_at, number]
    loaded.write_host_slabs.argtypes = [pointer, *places_at, number, number]
    return loaded


@functools.cache
def threads() -> Any:
    """Compile and load threads.cpp: locks, and work on several threads."""
    loaded = _compiled("threads.cpp")
    pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
    loaded.lock_pairs.argtypes = [number, pointer, pointer, number, number]
    loaded.contend.argtypes, loaded.contend.restype = [number, pointer, pointer, real], real
    loaded.fairness.argtypes = [number, pointer, pointer, real, ctypes.POINTER(real)]
    loaded.append_in_threads.argtypes = [pointer, pointer, number, number, number, number]
    loaded.lock_in_threads.argtypes = [number, pointer, pointer, number, number]
    return loaded


@functools.cache
def api_address() -> int:
    """Return the address of lkv's table of C functions."""
    return lkv.c_api_address()


def places(targets: Sequence[tuple[lkv.Storage, int, int]]) -> ctypes.Array[Place]:
    """Describe storages to the C helper: each with the address of its source and the bytes of a row."""
    return (Place * len(targets))(*(Place(s.address, source, nbytes, s.handle) for s, source, nbytes in targets))


def storages_of(cache: lkv.LatentKvCache) -> list[lkv.Storage]:
    """Return the storages of a cache, layer by layer and slot by slot."""
    every = (cache.slot_storage(layer, slot) for layer in range(cache.n_layers) for slot in range(cache.n_slots))
    return [storage for storage in every if storage is not None]


def _compiled(name: str) -> ctypes.CDLL:
    source = Path(__file__).with_name(name)
    language, variable, usual, standard = _LANGUAGES[source.suffix]
    found = os.environ.get(variable) or next(filter(shutil.which, usual), None)
    if found is None:
        raise CompilerMissing(
            f"{name} needs a {language} compiler: none of {', '.join(usual)} is on PATH; install one or set {variable}"
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "peers.so"
        flags = [standard, "-O2", "-Wall", "-shared", "-fPIC", "-pthread", f"-I{lkv.get_include()}"]
        subprocess.run([*found.split(), *flags, "-o", str(made), str(source)], check=True)
        return ctypes.CDLL(str(made))
