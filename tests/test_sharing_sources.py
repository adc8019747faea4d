"""Where appended rows come from: the cache itself, arrays that change behind the call, other threads at work."""

import gc
import time

import numpy as np
import pytest
from helpers.caches import LAYOUTS, content, fill, layer_rows, same_rows, small
from helpers.threads import PATIENCE, start

from lkv import LatentKvCache
from lkv._storage import host_memory

BIG = 1 << 20  # elements of a row that take long enough to write for another thread to look

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def big():
    return LatentKvCache.with_capacity(1, 4, [(BIG,)], "i64")


def tagged(tag):
    return [np.full((1, BIG), tag, np.int64)]


@every_layout
@pytest.mark.parametrize("inside", ["append", "step", "append_layers"])
def test_rows_of_the_cache_itself_may_be_fed_back(layout, inside):
    cache = small("three", layout=layout)
    given = fill(cache, 3)
    spellings = [lambda v: v, lambda v: v.numpy(), list, lambda v: [a[::-1] for a in v.numpy()]]
    for spell in spellings:
        with cache.read(0) as view:
            rows = spell(view)
            expected = [np.array(a) for a in (rows.numpy() if rows is view else rows)]
            if inside == "append":
                for layer in range(2):
                    cache.append(layer, rows)
                cache.advance_by(3)
            else:
                with cache.step(3) as step:
                    if inside == "append_layers":
                        step.append_layers([rows, rows])
                    else:
                        for layer in range(2):
                            step.append(layer, rows)
            assert same_rows([a[-3:] for a in content(cache, 1)], expected)
            cache.truncate_to(3)
    assert same_rows(content(cache, 0), given[0])


def test_a_step_may_append_what_it_views_and_what_it_reserved():
    cache = small("three", layout="packed")
    given = fill(cache, 2)
    with cache.step(2) as step:
        rows = layer_rows(cache, 2, 9)
        step.append(0, rows)
        step.append(1, [a[2:] for a in step.view(0).numpy()])
        for view, array in zip(step.reserve(1), rows, strict=True):
            view.numpy()[...] = array + 1
        step.append(1, list(step.reserve(1)))
    assert same_rows(content(cache, 0), [np.concatenate(p) for p in zip(given[0], rows, strict=True)])
    assert same_rows(content(cache, 1), [np.concatenate([g, r + 1]) for g, r in zip(given[1], rows, strict=True)])


@pytest.mark.parametrize("width", [1, 64, 1 << 16])
def test_sources_may_be_overwritten_as_soon_as_append_returns(width):
    cache = LatentKvCache.with_capacity(1, 40, [(width,), (3,)], "f32")
    rows = [np.empty((4, width), "f4"), np.empty((4, 3), "f4")]
    for turn in range(10):
        for array in rows:
            array[...] = turn
        cache.append(0, rows)
        for array in rows:
            array[...] = -1
        cache.advance_by(4)
    for array in content(cache, 0):
        assert (array == np.repeat(np.arange(10), 4)[:, None]).all()


@pytest.mark.parametrize("in_step", [False, True])
def test_a_list_that_changes_while_it_is_being_written_does_no_harm(in_step):
    cache = big()
    for attempt in range(10):
        rows = tagged(attempt)
        with cache.step(1) if in_step else cache.read(0) as lease:
            writer = start(lease.append if in_step else cache.append, 0, rows)
            time.sleep(attempt * 0.0003)
            rows.clear()
            try:
                writer.result(PATIENCE)
            except Exception as error:
                assert "got 0" in str(error)  # the list was empty before the call looked
                continue
            finally:
                if in_step:
                    written = lease.view(0).numpy()[0] if cache.written_len(0) else None
                    assert written is None or (written == attempt).all()
                    lease.abandon()
        if not in_step:
            cache.advance_by(1)
            assert (cache.read(0).numpy()[0] == attempt).all()
            cache.truncate_to(0)


def test_a_list_that_changes_while_the_append_waits_does_no_harm():
    cache = LatentKvCache.with_capacity(1, 8, [(512,), (3,)], "i64")
    for attempt in range(10):
        rows = [np.full((1, 512), attempt), np.full((1, 3), attempt)]
        with cache.step(1) as step:
            writer = start(cache.append, 0, rows)
            time.sleep(attempt * 0.003)
            rows.clear()
            others = [np.full((1, 512), -1) for _ in range(8)]  # where the rows were, if nobody kept them
            step.abandon()
        try:
            writer.result(PATIENCE)
        except Exception as error:
            assert "got 0" in str(error)  # the list was empty before the call looked
            continue
        cache.advance_by(1)
        assert all((array == attempt).all() for array in content(cache, 0)) and len(others) == 8
        cache.truncate_to(0)


@pytest.mark.parametrize("in_step", [False, True])
def test_a_large_append_lets_other_threads_run(in_step):
    cache = LatentKvCache.with_capacity(1, 16, [(BIG,)], "i64")
    rows = [np.ones((16, BIG), np.int64)]

    def append():
        begun = time.perf_counter()
        if not in_step:
            cache.append(0, rows)
            return time.perf_counter() - begun
        with cache.step(16) as step:
            step.append(0, rows)
            return time.perf_counter() - begun

    for _ in range(8):
        writer = start(append)
        last, gap = time.perf_counter(), 0.0
        while not writer.done():
            now = time.perf_counter()
            last, gap = now, max(gap, now - last)
        took = writer.result(PATIENCE)
        cache.truncate_to(0)
        if gap < took / 2:
            return
    pytest.fail(f"nobody else ran for {gap:.3f} s of an append of {took:.3f} s")


# ---- identity ----


def test_allocation_ids_are_never_used_twice():
    def make(count):
        ids = []
        for _ in range(count):
            cache = LatentKvCache.with_capacity(1, 1, [(1,)], "u8")
            ids.append(int(cache.alloc_id))
        return ids

    gc.collect()
    before = host_memory()["live_bytes"]
    made = [future.result(10 * PATIENCE) for future in [start(make, 50_000) for _ in range(2)]]
    assert all(ids == sorted(ids) for ids in made)
    assert len({*made[0], *made[1]}) == 100_000
    assert min(made[0] + made[1]) >= 1
    gc.collect()
    assert host_memory()["live_bytes"] == before
