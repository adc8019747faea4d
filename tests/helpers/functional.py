"""Small functional caches, recognisable rows for them, and a look at all of their bytes."""

import gc

import numpy as np

from lkv import LatentCache
from lkv._storage import host_memory

from .places import anchor as here
from .places import look

TRAILING = [(4,), (2,), ()]
ROWS = 8


def make(anchor=None, layers=2, rows=ROWS, trailing=TRAILING, dtype="float32", **more):
    return LatentCache(here() if anchor is None else anchor, layers, rows, trailing, dtype, **more)


def given(cache, n, value):
    """One array per slot, full of one value."""
    return [np.full((n, *spec.trailing), value).astype(cache.dtype.numpy) for spec in cache.slots]


def put(cache, n, value, advance=True):
    """Append the same rows to every layer."""
    for layer in range(cache.n_layers):
        cache = cache.append(layer, given(cache, n, value))
    return cache.advance_by(n) if advance else cache


def column(cache, layer=0, slot=0):
    """The first element of every row of the whole buffer."""
    full = look(cache.slot_buffer_full(layer, slot))
    return full.reshape(len(full), -1)[:, 0].tolist()


def bytes_of(cache):
    """Every byte of every buffer, claimed or not, without claiming anything."""
    return [
        look(layer.buffers.view(slot, cache.max_seq_len)).tobytes()
        for layer in cache._layers
        for slot in range(cache.n_slots)
    ]


def live():
    gc.collect()
    return host_memory()["live_buffers"]
