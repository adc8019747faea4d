import time
from itertools import combinations

import numpy as np
import pytest
from helpers.caches import LAYOUTS, content, fill, layer_rows, pattern, populated, same_rows, small, snapshot
from helpers.files import rows_of
from helpers.places import anchor, latent_cache, look
from helpers.places import kv_cache as new_kv_cache
from helpers.threads import PATIENCE, start

from lkv import KvCache, LatentCache, LatentKvCache, SlotSpec, errors
from lkv._storage import SlotTable

pytestmark = pytest.mark.usefixtures("everywhere")


def kv_cache(rows, capacity=8):
    cache = new_kv_cache(2, 2, 4, capacity, "float32")
    with cache.step(rows) as step:
        for layer in range(2):
            step.append(layer, [pattern((1, 2, rows, 4), seed=2 * layer + slot) for slot in range(2)])
    return cache


def assert_same(cache, expected):
    found = rows_of(cache)
    assert found and all(same_rows(found[layer], expected[layer]) for layer in found)


# ---- fork ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fork_holds_the_committed_rows_and_shares_nothing(layout):
    cache = small("three", layers=3, layout=layout)
    fill(cache, 5)
    cache.append(0, layer_rows(cache, 1))
    expected, before = rows_of(cache), snapshot(cache)
    fork = cache.fork()
    assert snapshot(cache) == before
    assert (fork.cached_len, fork.written_len(0), fork.layout) == (5, 5, layout)
    assert fork.alloc_id != cache.alloc_id
    assert_same(fork, expected)
    spans = [
        (storage.address, storage.address + storage.nbytes)
        for one in (cache, fork)
        for storage in {one.slot_storage(layer, slot) for layer in range(3) for slot in range(3)}
    ]
    assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(spans, 2))


def test_a_fork_and_its_origin_go_their_own_ways():
    for cache in (small(), kv_cache(5)):
        if not cache.cached_len:
            fill(cache, 5)
        expected, fork = rows_of(cache), cache.fork()
        cache.wipe()
        assert_same(fork, expected)
        other = fork.fork()
        fork.clear()
        assert_same(other, expected)


def test_a_fork_has_the_same_layers_or_none():
    cache = latent_cache(4, 8, [(5,)], "float32", layers=[1, 3])
    assert populated(cache.fork()) == [1, 3]
    fill(cache, 2)
    assert populated(cache.fork()) == [1, 3]
    cache.clear()
    assert populated(cache.fork()) == []
    assert KvCache.with_dims(2, 2, 4).fork().n_layers == 2


@pytest.mark.host_only("pages of the host come as they are touched")
def test_a_fork_costs_by_its_rows_and_a_functional_clone_nothing():
    def took(call, best=9.0):
        for _ in range(5):
            began = time.perf_counter()
            kept = call()
            best = min(best, time.perf_counter() - began)
            del kept
        return best

    times = []
    for rows in (64, 16_384):
        cache = latent_cache(2, 1 << 20, [(512,)], "float32")
        with cache.step(rows) as step:
            for layer in range(2):
                step.append(layer, [np.ones((rows, 512), "f4")])
        times.append(took(cache.fork))
        functional = LatentCache(np.empty(0, "f4"), 2, 1 << 20, [(512,)], "float32")
        for layer in range(2):
            functional = functional.append(layer, [np.ones((rows, 512), "f4")])
        functional = functional.advance_by(rows)
        times.append(took(functional.clone))
    fork_few, clone_few, fork_many, clone_many = times
    assert fork_few < fork_many / 10  # of 4 GB of capacity each
    assert clone_many < fork_few and clone_many < 20 * clone_few + 1e-4


def test_a_fork_is_what_a_clone_is_but_for_the_cost():
    cache = small(layers=1)
    given = fill(cache, 3)[0]
    functional = LatentCache(anchor(), 1, 8, [spec.trailing for spec in cache.slots], "float32")
    functional = functional.append(0, given)
    functional = functional.advance_by(3)
    fork, clone = cache.fork(), functional.clone()
    more = [layer_rows(cache, 2, seed) for seed in (1, 2)]
    for one, rows in ((cache, more[0]), (fork, more[1])):
        one.append(0, rows)
        one.advance_by(2)
    functional, clone = functional.append(0, more[0]), clone.append(0, more[1])
    functional = functional.advance_by(2)
    clone = clone.advance_by(2)
    for persistent, branch in ((cache, functional), (fork, clone)):
        assert same_rows(content(persistent, 0), [look(branch.slot(0, slot)) for slot in range(2)])


# ---- copy_from ----


@pytest.mark.parametrize("rows", [None, 0, 3, 5])
@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_another_cache_replace_those_here(rows, before, layout):
    source = small(layers=3, rows=6)
    fill(source, 5)
    cache = latent_cache(3, 9, [(8,), (3,)], "float32", layout=layout, layers=[0, 2])
    if before:
        fill(cache, before, seed=9)
    unchanged, allocation, count = snapshot(source), cache.alloc_id, 5 if rows is None else rows
    assert cache.copy_from(source, rows) == cache.cached_len == count
    assert_same(cache, {layer: [array[:count] for array in arrays] for layer, arrays in rows_of(source).items()})
    assert snapshot(source) == unchanged and cache.alloc_id == allocation
    fill(cache, 2)


def test_a_kv_cache_copies_too():
    source, cache = kv_cache(5), kv_cache(2, capacity=16)
    cache.copy_from(source, 4)
    assert_same(cache, {la: [array[:, :, :4] for array in arrays] for la, arrays in rows_of(source).items()})


def test_a_copy_from_itself_is_a_rewind():
    cache = small()
    fill(cache, 5)
    versions = snapshot(cache)["versions"]
    assert cache.copy_from(cache, 3) == cache.cached_len == 3
    assert snapshot(cache)["versions"] == versions
    with pytest.raises(errors.GeometryError):
        cache.copy_from(cache, 4)


@pytest.mark.parametrize(
    ("make", "rows", "error", "message"),
    [
        (lambda: small(layers=3), None, errors.GeometryError, "n_layers: expected 2, got 3"),
        (lambda: small("three"), None, errors.GeometryError, "slots: expected"),
        (lambda: small(dtype="int32"), None, errors.DTypeMismatchError, "expected float32, got int32"),
        (lambda: kv_cache(2), None, errors.GeometryError, "kind: expected LatentKvCache, got KvCache"),
        (lambda: small(rows=20), 12, errors.CapacityError, "12 rows do not fit max_seq_len 8"),
        (lambda: small(rows=20), 13, errors.GeometryError, "rows: expected at most 12, those committed, got 13"),
        (lambda: small(rows=20), -1, errors.GeometryError, "rows: expected 0 to"),
        (lambda: small(rows=20), 1.0, errors.ArgumentTypeError, "rows: expected an integer"),
        (lambda: latent_cache(2, 8, [(8,), (3,)], "f32", layers=[1]), None,
         errors.UnpopulatedLayerError, r"layers \[0\] of the other cache hold no storage"),
        (lambda: latent_cache(2, 8, [(8,), (3,)], "f32", layers=[]), None,
         errors.UnpopulatedLayerError, "copy_from: no layer"),
        (lambda: latent_cache(2, 8, slots=[SlotSpec("slot0", (8,), "x"), SlotSpec("slot1", (3,))],
                                             dtype="f32"), None, errors.GeometryError, "slots: expected"),
        (lambda: 7, None, errors.ArgumentTypeError, "other: expected a cache, got int"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(make, rows, error, message):
    cache, other = small(), make()
    fill(cache, 3)
    if isinstance(other, LatentKvCache) and populated(other):
        fill(other, 12 if other.max_seq_len == 20 else 2)
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        cache.copy_from(other, rows)
    assert snapshot(cache) == before


def test_a_copy_waits_for_readers_here_and_writers_there():
    cache, other = small(), small()
    fill(cache, 3)
    fill(other, 4)
    before = snapshot(cache)
    with cache.read(0):
        waits = start(lambda: cache.copy_from(other, timeout=0.05))
        assert isinstance(waits.exception(PATIENCE), errors.LeaseTimeoutError)
        with pytest.raises(errors.WouldDeadlockError):
            cache.copy_from(other)
    with other.slot_storage(0, 0).write(0, 1):
        waits = start(lambda: cache.copy_from(other, timeout=0.05))
        assert isinstance(waits.exception(PATIENCE), errors.LeaseTimeoutError)
    assert snapshot(cache) == before
    assert cache.copy_from(other) == 4


def test_two_caches_copied_to_and_fro_by_two_threads_hang_nobody():
    caches = [small(layers=3, rows=200) for _ in range(2)]
    for cache, value in zip(caches, (1, 2), strict=True):
        with cache.step(100) as step:
            for layer in range(3):
                step.append(layer, [np.full((100, *spec.trailing), value, "f4") for spec in cache.slots])

    def copy(to, source):
        for _ in range(150):
            to.copy_from(source)

    threads = [start(copy, *caches), start(copy, *reversed(caches)), start(copy, *caches)]
    for thread in threads:
        thread.result(PATIENCE)
    for cache in caches:
        values = {float(v) for arrays in rows_of(cache).values() for array in arrays for v in np.unique(array)}
        assert values in ({1.0}, {2.0})


@pytest.mark.parametrize("turn_first", [True, False])
def test_all_rows_are_those_committed_when_the_other_cache_is_leased(monkeypatch, turn_first):
    cache, other = sorted([small(), small()], key=id, reverse=not turn_first)
    fill(other, 2)
    fill(cache, 1)

    def read(self, *args):
        fill(other, 3)
        return SlotTable.read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LatentKvCache, "read", read, raising=False)
        assert cache.copy_from(other) == 5
    assert_same(cache, rows_of(other))


def test_a_fork_while_the_storages_are_exchanged_is_of_one_moment():
    cache = small(layers=3, rows=64)

    def uniform(n):
        with cache.step(n) as step:
            for layer in range(3):
                step.append(layer, [np.full((n, *spec.trailing), n, "f4") for spec in cache.slots])

    def exchange():
        for turn in range(400):
            cache.repopulate()
            uniform(turn % 60 + 1)

    exchanging = start(exchange)
    while not exchanging.done():
        fork = cache.fork()
        assert all((array == fork.cached_len).all() for arrays in rows_of(fork).values() for array in arrays)
    exchanging.result(PATIENCE)
