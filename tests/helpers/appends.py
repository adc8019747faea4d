"""Appends to a small cache, and refusals that must change nothing."""

import numpy as np
import pytest
from helpers.storages import live

from lkv import LatentKvCache, SlotSpec, errors

SLOTS = [SlotSpec("c_kv", (4,)), SlotSpec("k_pe", (2, 3)), SlotSpec("score", ())]


def a_cache(dtype="f32", **options):
    return LatentKvCache.with_capacity(n_layers=2, max_seq_len=8, slots=SLOTS, dtype=dtype, **options)


def rows(n=2, dtype="f4", start=1):
    """One array per slot, in C order, every element another."""
    shapes = [(n, *spec.trailing) for spec in SLOTS]
    return [(np.arange(np.prod(s)) + start + 100 * i).reshape(s).astype(dtype) for i, s in enumerate(shapes)]


def stored(cache, layer=0):
    """What was written to a layer, whether published or not."""
    n = cache.written_len(layer)
    return [s.numpy()[:n].copy() for s in aliases(cache, layer)]


def aliases(cache, layer):
    with cache.step(1) as step:
        yield from step.reserve(layer)
        step.abandon()


def append(cache, arrays):
    """Append to a cache of no rows, publish, and return the rows."""
    cache.truncate_to(0)
    for layer in range(2):
        cache.append(layer, arrays)
    cache.advance_by(cache.written_len(0))
    with cache.read(1) as view:
        return [one.copy() for one in view.numpy()]


def state(cache):
    cells = [storage.read_host() for storage in cache._storages()]
    versions = [cache.slot_version(layer, slot) for layer in range(2) for slot in range(3)]
    return cells, versions, cache.cached_len, [cache.written_len(layer) for layer in range(2)]


def refuse(cache, arrays, error, *words):
    """Expect a refusal that says these words, in each way of appending, and changes nothing."""
    before, memory = state(cache), live()
    with pytest.raises(error) as caught:
        cache.append(0, arrays)
    for word in words:
        assert word in str(caught.value)
    assert state(cache) == before
    with pytest.raises(errors.LkvError), cache.step(2) as step:
        step.append(0, arrays)
    with pytest.raises(errors.LkvError), cache.step(2) as step:
        step.append_layers([arrays, arrays])
    assert state(cache) == before
    del caught
    assert live() <= memory
    return True


def same(got, wanted):
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(got, wanted, strict=True)
    )
