"""What the caches do wherever their rows are: on the host, and on CUDA devices when ``LKV_TEST_CUDA`` asks for them."""

import gc

import numpy as np
import pytest
from helpers.cuda import LOCATIONS, on_host, rows_of

import lkv
from lkv import KvCache, LatentKvCache, Storage
from lkv._storage import host_memory
from lkv.devices import DeviceLocation
from lkv.errors import (
    CapacityError,
    DeviceMismatchError,
    DTypeMismatchError,
    GeometryError,
    IncompleteStepError,
    LayerIndexError,
    ShapeMismatchError,
    StepInProgressError,
)

SLOTS = [(16,), (4,), ()]


def latent(device, layout="separate", layers=3, rows=32, dtype="float32"):
    return LatentKvCache.with_capacity(layers, rows, SLOTS, dtype, device, layout=layout)


def rows_for(cache, n, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (n, *spec.trailing) if isinstance(cache, LatentKvCache) else (1, spec.trailing[0], n, spec.trailing[1])
        for spec in cache.slots
    ]
    return [(rng.random(shape) * 100).astype(cache.dtype.numpy) for shape in shapes]


def fill(cache, n, seed=0):
    given = [rows_for(cache, n, seed + layer) for layer in range(cache.n_layers)]
    with cache.step(n) as step:
        for layer, arrays in enumerate(given):
            step.append(layer, arrays)
    return given


def assert_rows(cache, *steps, axis=0):
    for layer in range(cache.n_layers):
        for s, actual in enumerate(rows_of(cache, layer)):
            expected = np.concatenate([step[layer][s] for step in steps], axis)
            assert actual.dtype == expected.dtype
            assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()


def make(kind, device):
    if kind == "kv":
        return KvCache.with_capacity(2, 3, 8, 32, "float16", device)
    return latent(device, kind)


every_kind = pytest.mark.parametrize("kind", ["separate", "packed", "kv"])


@every_kind
def test_steps_of_one_row_and_of_many_come_back(device, kind):
    cache = make(kind, device)
    steps = [fill(cache, n, seed=n) for n in (5, 1, 1, 10, 1)]
    assert cache.cached_len == 18
    assert_rows(cache, *steps, axis=2 if kind == "kv" else 0)


@every_kind
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "bool"])
def test_every_element_type_comes_back(device, kind, dtype):
    cache = KvCache.with_capacity(1, 2, 4, 8, dtype, device) if kind == "kv" else latent(device, kind, dtype=dtype)
    assert_rows(cache, fill(cache, 3))


def test_a_cache_knows_its_device(device):
    cache = latent(device)
    location = DeviceLocation.parse(device)
    assert cache.device_location == location == cache.rebind_location()
    assert cache.layers[0][0].storage.device == location == cache.layers[0][0].authority
    assert str(location) in repr(cache)
    with cache.read(0) as view:
        assert view[0].device == location
        assert view[0].__dlpack_device__() == ((1, 0) if device == "cpu" else (2, location.ordinal))


@every_kind
def test_an_append_and_an_advance_are_a_step_by_hand(device, kind):
    cache = make(kind, device)
    given = [rows_for(cache, 2, layer) for layer in range(cache.n_layers)]
    for layer, arrays in enumerate(given):
        cache.append(layer, arrays)
    assert cache.cached_len == 0
    assert cache.advance_by(2) == 2
    assert_rows(cache, given, axis=2 if kind == "kv" else 0)


def test_all_layers_go_in_at_once(device):
    cache = latent(device)
    given = [rows_for(cache, 4, layer) for layer in range(3)]
    with cache.step(4) as step:
        step.append_layers(given)
    stacked = [np.stack([arrays[s] for arrays in given]) for s in range(3)]
    with cache.step(4) as step:
        step.append_layers(stacked)
    assert_rows(cache, given, given)


@every_kind
def test_a_source_may_be_overwritten_right_after_the_append(device, kind):
    cache = make(kind, device)
    given = [rows_for(cache, 3, layer) for layer in range(cache.n_layers)]
    with cache.step(3) as step:
        for layer, arrays in enumerate(given):
            scratch = [array.copy() for array in arrays]
            step.append(layer, scratch)
            for array in scratch:
                array.fill(7)
    assert_rows(cache, given, axis=2 if kind == "kv" else 0)


def test_arrays_with_gaps_go_in(device):
    cache = latent(device)
    wide = [np.random.default_rng(s).random((8, *shape), np.float32) for s, shape in enumerate(SLOTS)]
    given = [array[::2] for array in wide]
    with cache.step(4) as step:
        for layer in range(3):
            step.append(layer, given)
    assert_rows(cache, [given] * 3)


@every_kind
def test_an_exception_publishes_nothing(device, kind):
    cache = make(kind, device)
    first = fill(cache, 2)
    with pytest.raises(ZeroDivisionError), cache.step(1) as step:
        step.append(0, rows_for(cache, 1, 99))
        raise ZeroDivisionError
    assert cache.cached_len == 2
    second = fill(cache, 1, seed=50)
    assert_rows(cache, first, second, axis=2 if kind == "kv" else 0)


@every_kind
def test_what_does_not_fit_is_refused_before_anything_is_written(device, kind):
    cache = make(kind, device)
    fill(cache, 1)
    good = rows_for(cache, 1)
    versions = [cache.slot_version(0, s) for s in range(cache.n_slots)]
    with cache.step(1) as step:
        with pytest.raises(DTypeMismatchError):
            step.append(0, [*good[:-1], good[-1].astype(np.float64)])
        with pytest.raises(ShapeMismatchError):
            step.append(0, [*good[:-1], np.concatenate([good[-1]] * 2)])
        with pytest.raises(ShapeMismatchError):
            step.append(0, good[:-1])
        with pytest.raises(LayerIndexError):
            step.append(cache.n_layers, good)
        step.abandon()
    assert [cache.slot_version(0, s) for s in range(cache.n_slots)] == versions
    with pytest.raises(CapacityError):
        cache.step(cache.max_seq_len, timeout=0)
    with pytest.raises(IncompleteStepError), cache.step(1):
        pass


def test_reserved_rows_can_be_filled_by_other_means(device):
    cache = latent(device)
    given = rows_for(cache, 3)
    with cache.step(3) as step:
        for layer in range(3):
            for target, array in zip(step.reserve(layer), given, strict=True):
                source = Storage(array.shape, "float32").alias()
                source.numpy()[...] = array
                target.copy_from(source)
            step.note_write(layer)
    assert_rows(cache, [given] * 3)


def test_a_step_sees_its_own_rows(device):
    cache = latent(device)
    first = fill(cache, 2)
    given = rows_for(cache, 1, 9)
    with cache.step(1) as step:
        step.append(1, given)
        seen = [on_host(view) for view in step.view(1)]
        step.abandon()
    for s in range(3):
        np.testing.assert_array_equal(seen[s], np.concatenate([first[1][s], given[s]]))


@every_kind
def test_a_rewound_cache_goes_on_where_it_was_cut(device, kind):
    cache = make(kind, device)
    first = fill(cache, 6)
    alloc_id = cache.alloc_id
    assert cache.truncate_to(4) == 4 and cache.alloc_id == alloc_id
    second = fill(cache, 3, seed=70)
    axis = 2 if kind == "kv" else 0
    kept = [[np.take(array, range(4), axis) for array in layer] for layer in first]
    assert_rows(cache, kept, second, axis=axis)


@every_kind
def test_a_wiped_cache_holds_zeros(device, kind):
    cache = make(kind, device)
    fill(cache, 5)
    alloc_id = cache.alloc_id
    cache.wipe()
    assert (cache.cached_len, cache.alloc_id) == (0, alloc_id)
    for layer in range(cache.n_layers):
        for slot in range(cache.n_slots):
            assert not any(on_host(cache.slot_storage(layer, slot).alias()).tobytes())


def test_a_cleared_cache_gives_its_memory_back_and_can_be_filled_anew(device):
    gc.collect()
    before = host_memory()["live_buffers"]
    cache = latent(device)
    fill(cache, 2)
    old = cache.alloc_id
    cache.clear()
    gc.collect()
    assert host_memory()["live_buffers"] == before and cache.alloc_id != old
    cache.repopulate()
    assert_rows(cache, fill(cache, 2, seed=5))


@every_kind
def test_gather_copies_the_chosen_rows(device, kind):
    cache = make(kind, device)
    given = fill(cache, 20)
    axis = 2 if kind == "kv" else 0
    for rows in ([3], [0, 1, 2, 3], [19, 0, 7, 8, 9, 7], [], [[1, 2], [5, 0]], range(20)):
        index = np.asarray(rows, np.int64)
        found = cache.gather(1, rows)
        assert len(found) == cache.n_slots
        for s, array in enumerate(found):
            actual = array if device == "cpu" else on_host(array)
            np.testing.assert_array_equal(actual, np.take(given[1][s], index, axis))
    with pytest.raises(LayerIndexError, match="got 20"):
        cache.gather(0, [20])


@every_kind
def test_a_cache_moves_to_every_device_and_back(device, kind):
    cache = make(kind, device)
    steps = [fill(cache, 3), fill(cache, 4, seed=30)]
    axis = 2 if kind == "kv" else 0
    for target in ["cpu", *LOCATIONS]:
        moved = cache.to(target)
        assert moved.device_location == DeviceLocation.parse(target)
        assert moved.alloc_id != cache.alloc_id
        assert (moved.n_layers, moved.max_seq_len, moved.dtype) == (cache.n_layers, cache.max_seq_len, cache.dtype)
        assert moved.slots == cache.slots and getattr(moved, "layout", "") == getattr(cache, "layout", "")
        assert_rows(moved, *steps, axis=axis)
        third = fill(moved, 1, seed=60)
        assert_rows(moved, *steps, third, axis=axis)
        assert cache.cached_len == 7
        assert_rows(moved.to(device), *steps, third, axis=axis)


def test_a_moved_cache_has_the_same_layers_populated(device):
    cache = LatentKvCache.with_capacity(5, 8, [(4,)], "float32", device, layers=[1, 3])
    with cache.step(2) as step:
        for layer in (1, 3):
            step.append(layer, [np.full((2, 4), layer, np.float32)])
    moved = cache.to(device)
    assert [layer is not None for layer in moved.layers] == [False, True, False, True, False]
    assert rows_of(moved, 3)[0].tolist() == [[3.0] * 4] * 2
    assert cache.to(device).cached_len == 2
    assert LatentKvCache.with_capacity(2, 4, [(4,)], "float32", device, layers=[]).to(device).cached_len == 0


def test_the_stages_of_a_pipeline_may_be_on_different_devices(device):
    places = [device, (["cpu", *LOCATIONS])[-1]]
    stages = [
        LatentKvCache.with_capacity(4, 8, [(4,)], "float32", place, layers=layers)
        for place, layers in zip(places, (range(0, 2), range(2, 4)), strict=True)
    ]
    for stage in stages:
        with stage.step(1) as step:
            for layer in range(4):
                if stage.layers[layer] is not None:
                    step.append(layer, [np.full((1, 4), layer, np.float32)])
    assert [str(stage.device_location) for stage in stages] == places
    assert [rows_of(stages[layer // 2], layer)[0][0, 0] for layer in range(4)] == [0, 1, 2, 3]


def test_a_second_step_is_refused_or_waits(device):
    cache = latent(device)
    with cache.step(1) as step:
        with pytest.raises(StepInProgressError):
            cache.truncate_to(0)
        step.abandon()
    with pytest.raises(GeometryError):
        cache.step(0)


def test_storages_copy_to_every_device(device):
    storage = Storage((10, 4), "float32", device)
    with storage.write() as lease:
        source = Storage((10, 4), "float32").alias()
        source.numpy()[...] = np.arange(40).reshape(10, 4)
        lease.copy_from(source)
    for target in ["cpu", *LOCATIONS]:
        copy = storage.copy(target)
        assert str(copy.device) == target
        assert on_host(copy.alias()).tolist() == np.arange(40).reshape(10, 4).tolist()


def test_views_refuse_what_does_not_fit(device):
    view = Storage((4, 4), "float32", device).alias()
    with pytest.raises(ShapeMismatchError):
        view.copy_from(Storage((4, 5), "float32").alias())
    with pytest.raises(DTypeMismatchError):
        view.copy_from(Storage((4, 4), "int32").alias())
    with Storage((4, 4), "float32", device).read() as lease, pytest.raises(lkv.errors.ReadOnlyError):
        lease.copy_from(view)


def test_rows_of_one_cache_go_into_another(device):
    source, target = latent(device), latent(device, "packed")
    given = fill(source, 3)
    with target.step(3) as step:
        for layer in range(3):
            with source.read(layer) as rows:
                step.append(layer, rows)
    assert_rows(target, given)


@pytest.mark.skipif(not LOCATIONS, reason="needs two kinds of memory")
def test_a_host_cache_refuses_rows_of_a_device():
    there, here = latent(LOCATIONS[0]), latent("cpu")
    fill(there, 1)
    with there.read(0) as rows, here.step(1) as step:
        with pytest.raises(DeviceMismatchError, match="the cache is on cpu"):
            step.append(0, list(rows))
        step.abandon()


def test_functional_branches_go_their_own_ways(device):
    anchor = Storage(4, "float32", device)
    cache = lkv.LatentCache(anchor, 1, 16, [(8,), (2,)], "float32")
    rows = [np.ones((2, 8), np.float32), np.full((2, 2), 2, np.float32)]
    cache = cache.append(0, rows).advance_by(2)
    other = cache.clone()
    cache = cache.append(0, [3 * row for row in rows]).advance_by(2)
    other = other.append(0, [5 * row for row in rows]).advance_by(2)
    assert on_host(cache.slot(0, 0))[:, 0].tolist() == [1, 1, 3, 3]
    assert on_host(other.slot(0, 0))[:, 0].tolist() == [1, 1, 5, 5]
    assert on_host(other.slot_buffer_full(0, 1))[:, 0].tolist() == [2, 2, 10, 10] + [0] * 12
