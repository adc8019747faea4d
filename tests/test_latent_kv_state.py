import copy
import gc
import pickle

import numpy as np
import pytest
from helpers.caches import LAYOUTS, SLOT_SETS, content, fill, layer_rows, populated, same_rows, small, snapshot
from helpers.places import arrays_of, latent_cache, location, look, place

import lkv
from lkv import LatentKvCache, LatentSlot, Layout
from lkv._storage import host_memory
from lkv.errors import IncompleteStepError

pytestmark = pytest.mark.usefixtures("everywhere")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def test_truncate_to_rewinds_and_never_grows():
    cache = small()
    given = fill(cache, 6)
    identity, before = cache.alloc_id, snapshot(cache)
    for beyond in (6, 7, 2**63, 10**30):
        assert cache.truncate_to(beyond) == 6
    assert snapshot(cache) == before
    assert cache.truncate_to(np.int64(4)) == 4 == cache.cached_len
    assert cache.alloc_id == identity
    assert same_rows(content(cache, 0), [a[:4] for a in given[0]])
    assert cache.truncate_to(0) == 0 == cache.cached_len
    assert snapshot(cache)["storages"] == before["storages"]


def test_after_a_rewind_the_old_rows_never_come_back():
    cache = small()
    fill(cache, 6)
    cache.truncate_to(2)
    assert [cache.written_len(layer) for layer in range(2)] == [2, 2]
    with pytest.raises(IncompleteStepError):
        cache.advance_by(1)
    new = fill(cache, 1, seed=9)
    assert same_rows([a[2:] for a in content(cache, 1)], new[1])
    with pytest.raises(IncompleteStepError):
        cache.advance_by(3)


def test_after_an_abandoned_step_its_rows_are_not_published_by_advance_by():
    cache = small()
    with pytest.raises(ZeroDivisionError), cache.step(2) as step:
        for layer in range(2):
            step.append(layer, layer_rows(cache, 2))
        raise ZeroDivisionError
    with pytest.raises(IncompleteStepError):
        cache.advance_by(2)
    assert cache.cached_len == 0


def test_opening_a_step_forgets_what_was_appended_and_not_published():
    cache = small(layers=1)
    cache.append(0, layer_rows(cache, 2))
    with pytest.raises(IncompleteStepError), cache.step(2):
        pass
    assert (cache.cached_len, cache.written_len(0)) == (0, 0)


# ---- identity ----


@every_layout
def test_wipe_zeroes_every_row_and_keeps_the_allocation(layout):
    cache = small(layout=layout)
    fill(cache, 6)
    identity, where = cache.alloc_id, snapshot(cache)["where"]
    versions = [cache.slot_version(layer, s) for layer in range(2) for s in range(2)]
    cache.append(0, layer_rows(cache, 2))
    cache.wipe()
    assert (cache.alloc_id, snapshot(cache)["where"], cache.cached_len) == (identity, where, 0)
    assert not any(any(content) for _, _, content in snapshot(cache)["storages"].values())
    assert all(cache.slot_version(layer, s) > versions[2 * layer + s] for layer in range(2) for s in range(2))
    with pytest.raises(IncompleteStepError):
        cache.advance_by(1)
    given = fill(cache, 8, seed=3)
    assert same_rows(content(cache, 1), given[1])


def test_wipe_heals_a_poisoned_storage():
    cache = small(layers=1)
    with pytest.raises(ZeroDivisionError), cache.slot_storage(0, 0).write():
        raise ZeroDivisionError
    with pytest.raises(lkv.errors.PoisonedError, match="layer 0, slot 0"):
        cache.read(0)
    cache.wipe()
    assert cache.read(0).hi == 0


@every_layout
def test_clear_drops_the_memory_and_renews_the_identity(layout):
    before = host_memory()
    cache = small(layout=layout)
    fill(cache, 4)
    identity = cache.alloc_id
    kept = cache.read(1)
    rows = [array.copy() for array in arrays_of(kept)]
    cache.clear()
    assert cache.alloc_id > identity
    assert (cache.cached_len, cache.nbytes, populated(cache), list(cache.layers)) == (0, 0, [], [None, None])
    assert [cache.slot_version(layer, 0) for layer in range(2)] == [0, 0]
    assert same_rows(arrays_of(kept), rows)
    with pytest.raises(lkv.errors.UnpopulatedLayerError):
        cache.append(0, layer_rows(cache, 1))
    del kept
    assert {k: host_memory()[k] for k in ("live_bytes", "live_buffers")} == {
        k: before[k] for k in ("live_bytes", "live_buffers")
    }


@every_layout
def test_repopulate_gives_zeros_under_a_new_identity(layout):
    cache = latent_cache(3, 8, SLOT_SETS["two"], "f32", layout=layout, layers=[0, 2])
    fill(cache, 4)
    identity, nbytes, where = cache.alloc_id, cache.nbytes, snapshot(cache)["where"]
    kept = cache.read(2)
    rows = [array.copy() for array in arrays_of(kept)]
    for again in range(2):
        cache.repopulate()
        assert cache.alloc_id > identity
        identity = cache.alloc_id
        assert (cache.cached_len, cache.nbytes, populated(cache)) == (0, nbytes, [0, 2])
        assert not any(any(bytes_) for _, _, bytes_ in snapshot(cache)["storages"].values())
        assert [cache.slot_version(layer, s) for layer in range(3) for s in range(2)] == [0] * 6
        given = fill(cache, 8, seed=again)
        assert same_rows(content(cache, 2), given[2])
    assert same_rows(arrays_of(kept), rows)
    assert snapshot(cache)["where"] != where
    cache.clear()
    cache.repopulate()
    assert (cache.nbytes, populated(cache)) == (nbytes, [0, 2])


def test_rewinding_wiping_and_stepping_keep_the_identity():
    cache = small()
    identity = cache.alloc_id
    fill(cache, 4)
    cache.truncate_to(1)
    cache.wipe()
    fill(cache, 2)
    assert cache.alloc_id == identity


def test_the_identity_of_every_cache_is_its_own():
    caches = [small() for _ in range(5)]
    assert len({cache.alloc_id for cache in caches}) == 5
    assert repr(caches[0].alloc_id) == f"alloc {int(caches[0].alloc_id)}"


# ---- looking in from outside ----


def test_layers_tell_where_every_slot_is():
    cache = latent_cache(2, 8, SLOT_SETS["rank2"], "bf16", layers=[1])
    assert (len(cache.layers), cache.layers[0], repr(cache.layers)) == (2, None, "Layers(1 of 2 populated)")
    first, second = cache.layers[1]
    assert isinstance(first, LatentSlot)
    assert first.storage == cache.slot_storage(1, 0) == cache.rebind_slot(1, 0)
    assert (first.layout, second.layout) == (Layout.contiguous((8, 2, 3)), Layout.contiguous((8, 5)))
    assert (first.version, first.authority) == (0, location())
    fill(cache, 1)
    assert cache.layers[1][0].version == 1 == cache.slot_version(1, 0)
    assert cache.layers[0:2] == [None, cache.layers[1]]


def test_packed_slots_are_strided_pieces_of_one_storage():
    cache = small("scalar", layout="packed")
    first, second = cache.layers[0]
    assert first.storage == second.storage
    assert first.storage.shape == (8, 6)
    assert (first.layout, second.layout) == (Layout((8, 5), (6, 1), 0), Layout((8,), (6,), 5))
    given = fill(cache, 8)
    flat = look(first.storage.alias()).reshape(-1)
    for slot, array in zip(cache.layers[0], given[0], strict=True):
        at = sum(i * s for i, s in zip(np.indices(array.shape), slot.layout.strides, strict=True)) + slot.layout.offset
        assert np.array_equal(flat[at], array)


def test_every_slot_has_a_version_of_its_own():
    for layout in LAYOUTS:
        cache = small("three", layout=layout)
        fill(cache, 1)
        cache.bump_version(1, 2)
        assert [[cache.slot_version(layer, s) for s in range(3)] for layer in range(2)] == [[1, 1, 1], [1, 1, 2]]


def test_out_of_range_bump_version_and_slot_storage_do_nothing():
    cache = latent_cache(2, 4, SLOT_SETS["two"], "f32", layers=[1])
    before = snapshot(cache)
    for layer, slot in ((-1, 0), (2, 0), (1, 2), (1, -1), (0, 0), (2**63, 0), (1, 2**64), (-(2**70), 0), (1, 2**32)):
        assert cache.bump_version(layer, slot) is None
        assert cache.slot_storage(layer, slot) is None
        assert cache.rebind_slot(layer, slot) is None
    assert snapshot(cache) == before


@pytest.mark.host_only("9.2 GB of address space")
def test_the_repr_tells_the_state():
    cache = latent_cache(61, 131_072, [(512,), (64,)], "bf16")
    with cache.step(1024) as step:
        for layer in range(61):
            step.note_write(layer)
    assert repr(cache) == (
        f"LatentKvCache(61 layers x 2 slots, 1024/131072 rows, bfloat16, {place()}, alloc {int(cache.alloc_id)}, "
        "72.0 MB of 9.2 GB)"
    )
    stage = latent_cache(4, 8, [(2,)], "f32", layers=[1])
    assert repr(stage).startswith(f"LatentKvCache(1 of 4 layers x 1 slots, 0/8 rows, float32, {place()}, alloc ")
    assert repr(stage).endswith(", 0 B of 64 B)")


def test_a_cache_is_not_made_copied_or_pickled_behind_its_back():
    with pytest.raises(TypeError, match="with_capacity"):
        LatentKvCache()
    empty = LatentKvCache.__new__(LatentKvCache)
    for use in (
        lambda: empty.n_layers,
        lambda: empty.cached_len,
        lambda: repr(empty),
        lambda: empty.step(1),
        lambda: empty.read(0),
        lambda: empty.append(0, []),
        lambda: empty.advance_by(1),
        empty.clear,
        lambda: empty.truncate_to(0),
        lambda: empty.slot_storage(0, 0),
        lambda: empty.bump_version(0, 0),
    ):
        with pytest.raises(TypeError):
            use()
    cache = small()
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copier(cache)


def test_a_subclass_may_hold_what_it_likes_also_its_own_step():
    class Mine(LatentKvCache):
        pass

    gc.collect()
    before = host_memory()["live_buffers"]
    for end in (None, "abandon"):
        cache = Mine.with_capacity(1, 4, [(2,)], "f32")
        cache.open = cache.step(1)
        cache.seen = cache.read(0)
        if end:
            cache.open.abandon()
        del cache
        gc.collect()
    assert host_memory()["live_buffers"] == before


def test_a_cycle_of_a_cache_and_its_open_step_goes_whichever_is_cleared_first():
    class Mine(LatentKvCache):
        pass

    gc.collect()
    before = host_memory()["live_buffers"]
    gc.disable()
    try:
        cache = Mine.with_capacity(1, 4, [(2,)], "f32")
        gc.freeze()
        cache.open = cache.step(1)
        gc.collect()
        gc.unfreeze()  # the collector now comes by the step before it comes by the cache
        del cache
        gc.collect()
    finally:
        gc.enable()
    assert host_memory()["live_buffers"] == before


@pytest.mark.host_only("huge pages")
def test_huge_pages_change_nothing_that_can_be_read():
    cache = latent_cache(1, 2**12, [(512,), (64,)], "f32", huge_pages=True)
    given = fill(cache, 100)
    assert same_rows(content(cache, 0), given[0])
    cache.wipe()
    given = fill(cache, 10, seed=4)
    assert same_rows(content(cache, 0), given[0])
