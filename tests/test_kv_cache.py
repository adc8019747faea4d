import itertools

import numpy as np
import pytest
from helpers.caches import pattern, same_rows, snapshot
from helpers.places import arrays_of, kv_cache, kv_layer, look, new_storage, place, put_in, refused_for_gaps

from lkv import KvCache, KvLayer, KvSlot, Layout, Storage
from lkv._storage import host_memory, set_host_limit
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    DeviceMismatchError,
    DeviceUnavailableError,
    DTypeMismatchError,
    GeometryError,
    IncompleteStepError,
    LayerIndexError,
    LeaseTimeoutError,
    LkvError,
    OutOfMemoryError,
    ReadOnlyError,
    ShapeMismatchError,
    StepInProgressError,
    UnpopulatedLayerError,
)

pytestmark = pytest.mark.usefixtures("everywhere")

HEADS, WIDTH, ROWS = 3, 4, 8


def small(layers=2, heads=HEADS, width=WIDTH, rows=ROWS, dtype="f32"):
    return kv_cache(layers, heads, width, rows, dtype)


def kv_rows(cache, n, seed=0):
    shape = (1, cache.n_kv_heads, n, cache.head_dim)
    return [pattern(shape, cache.dtype, 2 * seed + slot) for slot in KvSlot]


def fill(cache, n, seed=0):
    given = [kv_rows(cache, n, seed + layer) for layer in range(cache.n_layers)]
    with cache.step(n) as step:
        for layer, arrays in enumerate(given):
            step.append(layer, arrays)
    return given


def content(cache, layer):
    with cache.read(layer) as view:
        return [array.copy() for array in arrays_of(view)]


def joined(*parts):
    return [np.concatenate(arrays, axis=2) for arrays in zip(*parts, strict=True)]


def refused(cache, error, match, call, *others):
    before = snapshot(cache), [(other.version, look(other.alias()).tobytes()) for other in others]
    with pytest.raises(error, match=match):
        call()
    assert before == (snapshot(cache), [(other.version, look(other.alias()).tobytes()) for other in others])


# ---- with_capacity ----


def test_a_new_cache_says_what_it_is():
    cache = small(dtype="bf16")
    assert (cache.n_layers, cache.n_slots, cache.n_kv_heads, cache.head_dim) == (2, 2, HEADS, WIDTH)
    assert (cache.max_seq_len, cache.cached_len, cache.dtype.name) == (ROWS, 0, "bfloat16")
    assert [spec.name for spec in cache.slots] == ["k", "v"]
    assert cache.slot_trailing(KvSlot.V) == (HEADS, WIDTH)
    assert cache.nbytes == KvCache.bytes_required(2, HEADS, WIDTH, ROWS, "bf16") == 2 * 2 * HEADS * WIDTH * ROWS * 2
    assert cache.bytes_per_token == cache.nbytes // ROWS
    k, v = cache.layers[1]
    assert k.storage == cache.slot_storage(1, KvSlot.K) == cache.rebind_slot(1, KvSlot.K)
    assert k.layout == v.layout == Layout.contiguous((1, HEADS, ROWS, WIDTH))
    assert (k.storage.shape, k.storage.axis) == ((1, HEADS, ROWS, WIDTH), 2)
    assert str(cache.device_location) == str(cache.rebind_location()) == place()
    fill(cache, 2)
    assert (
        repr(cache) == f"KvCache(2 layers x 2 slots, 2/8 rows, bfloat16, {place()}, {cache.alloc_id!r}, 192 B of 768 B)"
    )


def test_bytes_required_is_exact_up_to_the_end_of_the_address_space():
    assert KvCache.bytes_required(1, 1, 1, 2**62 - 1, "u8") == 2**63 - 2
    with pytest.raises(GeometryError):
        KvCache.bytes_required(1, 1, 1, 2**62, "u8")
    with pytest.raises(GeometryError):
        kv_cache(1, 1, 1, 2**62, "u8")


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_a_degenerate_geometry_is_refused(at, value):
    counts = [2, HEADS, WIDTH, ROWS]
    counts[at] = value
    for make in (kv_cache, KvCache.bytes_required):
        with pytest.raises(GeometryError):
            make(*counts, "f32")
    if at < 3:
        with pytest.raises(GeometryError):
            KvCache.with_dims(*counts[:3])


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("value", [True, 1.0, None, "2"])
def test_counts_of_a_wrong_type_are_refused(at, value):
    counts = [2, HEADS, WIDTH, ROWS]
    counts[at] = value
    for make in (kv_cache, KvCache.bytes_required):
        with pytest.raises(ArgumentTypeError):
            make(*counts, "f32")


@pytest.mark.host_only("names its device itself")
def test_an_unknown_dtype_or_device_is_refused():
    with pytest.raises(DTypeMismatchError):
        kv_cache(1, 1, 1, 1, "f12")
    with pytest.raises(DeviceUnavailableError):
        KvCache.with_capacity(1, 1, 1, 1, "f32", "tpu")
    with pytest.raises(TypeError, match="with_capacity"):
        KvCache()


@pytest.mark.host_only("the limit is the host's")
@pytest.mark.parametrize("fits", range(6))
def test_wherever_construction_fails_every_byte_comes_back(fits):
    start, size = host_memory()["live_bytes"], HEADS * WIDTH * ROWS * 4
    set_host_limit(start + (fits + 1) * size - 1)
    try:
        with pytest.raises(OutOfMemoryError):
            small(layers=3)
        assert host_memory()["live_bytes"] == start
    finally:
        set_host_limit(None)


# ---- the verbs ----


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 16, 33])
@pytest.mark.parametrize("width", [1, 4, 128])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "u8"])
def test_an_append_is_a_strided_copy_over_the_heads(heads, width, dtype):
    cache = small(heads=heads, width=width, rows=9, dtype=dtype)
    first, second, third = (fill(cache, n, seed=7 * n) for n in (4, 1, 3))
    for layer in range(2):
        assert same_rows(content(cache, layer), joined(first[layer], second[layer], third[layer]))
    whole = look(cache.slot_storage(1, KvSlot.K).alias())
    assert not whole[:, :, 8:].astype(np.float32).any()


@pytest.mark.parametrize(
    "spell",
    [
        lambda a: np.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        np.asfortranarray,
        lambda a: a[:, ::-1].copy()[:, ::-1],
        lambda a: a[:, :, ::-1].copy()[:, :, ::-1],
        lambda a: np.repeat(a, 2, axis=3)[..., ::2],
        lambda a: np.repeat(np.repeat(a, 2, axis=1), 3, axis=2)[:, ::2, ::3],
        lambda a: (
            pytest.importorskip("torch").from_numpy(np.ascontiguousarray(a.transpose(0, 2, 1, 3))).transpose(1, 2)
        ),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_keys_and_values_may_come_in_any_order_of_memory(spell, n):
    cache = small(layers=1)
    rows = kv_rows(cache, n)
    given = [spell(a) for a in rows]
    if refused_for_gaps(given, (0, 0, 0)):
        refused(cache, ShapeMismatchError, "gaps inside a row", lambda: cache.append(0, given))
        return
    cache.append(0, given)
    assert cache.advance_by(n) == n
    assert same_rows(content(cache, 0), rows)


def test_expanded_heads_of_grouped_queries_are_written_out():
    cache = small(layers=1, heads=6)
    k = pattern((1, 1, 2, WIDTH))
    cache.append(0, [np.broadcast_to(k, (1, 6, 2, WIDTH))] * 2)
    cache.advance_by(2)
    assert same_rows(content(cache, 0), [np.repeat(k, 6, axis=1)] * 2)


def test_reserve_view_gather_and_append_layers_count_rows_along_axis_two():
    cache = small()
    old = fill(cache, 2)
    new = [kv_rows(cache, 3, 20 + layer) for layer in range(2)]
    with cache.step(3) as step:
        for view, rows in zip(step.reserve(0), new[0], strict=True):
            assert view.shape == (1, HEADS, 3, WIDTH)
            put_in(view, rows)
        step.note_write(0)
        step.append(1, new[1])
        assert same_rows(arrays_of(step.view(0)), joined(old[0], new[0]))
    more = [kv_rows(cache, 2, 40 + layer) for layer in range(2)]
    with cache.step(2) as step:
        step.append_layers([np.stack(p) for p in zip(*more, strict=True)])
    expected = joined(old[1], new[1], more[1])
    assert same_rows(content(cache, 1), expected)
    assert same_rows(arrays_of(cache.gather(1, [6, 0, 3])), [a[:, :, [6, 0, 3]] for a in expected])


def test_truncation_keeps_the_rows_before_and_the_identity():
    cache = small()
    given, identity = fill(cache, 6), cache.alloc_id
    assert cache.truncate_to(9) == 6
    assert cache.truncate_to(2) == 2
    again = fill(cache, 1, seed=9)
    assert cache.alloc_id == identity
    assert same_rows(content(cache, 1), joined([a[:, :, :2] for a in given[1]], again[1]))
    cache.wipe()
    assert (cache.alloc_id, cache.cached_len) == (identity, 0)
    assert not any(any(content) for *_, content in snapshot(cache)["storages"].values())


def test_clear_and_repopulate_renew_the_identity():
    cache = small()
    fill(cache, 3)
    ids = [cache.alloc_id]
    for verb in (cache.clear, cache.repopulate, cache.repopulate):
        verb()
        ids.append(cache.alloc_id)
    assert ids == sorted(set(ids))
    given = fill(cache, ROWS)
    assert same_rows(content(cache, 1), given[1])


def test_rows_fit_up_to_the_last_and_not_beyond():
    cache = small()
    fill(cache, ROWS - 1)
    refused(cache, CapacityError, "append: 2 rows at 7", lambda: cache.append(0, kv_rows(cache, 2)))
    refused(cache, CapacityError, "step: 2 rows at 7", lambda: cache.step(2))
    fill(cache, 1)
    refused(cache, CapacityError, "append: 1 rows at 8", lambda: cache.append(0, kv_rows(cache, 1)))


@pytest.mark.parametrize("slot", KvSlot)
def test_one_bad_slot_and_nothing_is_written(slot):
    cache = small()
    fill(cache, 2)
    name = slot.name.lower()
    good = kv_rows(cache, 3)
    shapes = [(1, HEADS, 2, WIDTH), (1, HEADS + 1, 3, WIDTH), (2, HEADS, 3, WIDTH), (1, HEADS, 3, WIDTH + 1),
              (HEADS, 3, WIDTH), (1, 3, HEADS, WIDTH + 1), (1, HEADS, 3, WIDTH, 1)]  # fmt: skip
    for shape in shapes:
        rows = list(good)
        rows[slot] = pattern(shape)
        refused(cache, ShapeMismatchError, rf"^append: slot {int(slot)} \({name}\)|append: slot 1 \(v\)",
                lambda rows=rows: cache.append(1, rows))  # fmt: skip
    rows[slot] = good[slot].astype("f2")
    expected = rf"slot {int(slot)} \({name}\): expected \(1, 3, n, 4\) float32, got \(1, 3, 3, 4\) float16"
    refused(cache, DTypeMismatchError, expected, lambda: cache.append(1, rows))
    refused(cache, ShapeMismatchError, r"expected 2 slots \(k, v\), got 1", lambda: cache.append(1, good[:1]))


# ---- with_dims and set_layer ----


def allocated(rows=ROWS, dtype="f32", heads=HEADS, width=WIDTH):
    return kv_layer(heads, width, rows, dtype)


def adopting(layers=2):
    """A cache made of layers that were set, and these layers."""
    cache, given = KvCache.with_dims(layers, HEADS, WIDTH), [allocated() for _ in range(layers)]
    for layer, kv in enumerate(given):
        cache.set_layer(layer, kv)
    return cache, given


def test_a_cache_with_dims_only_holds_no_memory():
    before = host_memory()["live_bytes"]
    cache = KvCache.with_dims(2, HEADS, WIDTH)
    assert host_memory()["live_bytes"] == before
    assert (cache.max_seq_len, cache.cached_len, cache.nbytes, cache.device_location) == (0, 0, 0, None)
    assert list(cache.layers) == [None, None]
    with pytest.raises(UnpopulatedLayerError):
        cache.append(0, kv_rows(cache, 1))
    with pytest.raises(CapacityError):
        cache.step(1)
    assert "device unknown" in repr(cache)


def test_the_first_layer_fixes_capacity_and_dtype():
    cache = KvCache.with_dims(2, HEADS, WIDTH)
    cache.set_layer(1, allocated(rows=5, dtype="bf16"))
    assert (cache.max_seq_len, cache.dtype.name) == (5, "bfloat16")
    for other in (allocated(rows=6, dtype="bf16"), allocated(rows=5, dtype="f32")):
        with pytest.raises((ShapeMismatchError, DTypeMismatchError)):
            cache.set_layer(0, other)
    cache.set_layer(0, allocated(rows=5, dtype="bf16"))
    given = fill(cache, 5)
    assert same_rows(content(cache, 0), given[0])


def test_every_set_layer_renews_the_identity_and_forgets_the_location():
    cache = small()
    assert cache.device_location is not None
    ids = [cache.alloc_id]
    for layer in (0, 1, 0):
        cache.set_layer(layer, allocated())
        ids.append(cache.alloc_id)
        assert cache.device_location is None is cache.rebind_location()
    assert ids == sorted(set(ids))
    assert "device unknown" in repr(cache)


def test_the_storages_that_were_set_are_the_ones_written():
    cache, given = adopting()
    rows = fill(cache, 3)
    for layer, kv in enumerate(given):
        assert cache.slot_storage(layer, KvSlot.K) == kv.k and cache.slot_storage(layer, KvSlot.V) == kv.v
        assert np.array_equal(look(kv.v.alias())[:, :, :3], rows[layer][1])


def test_set_storages_are_leased_together_with_the_cache():
    cache, given = adopting()
    fill(cache, 3)
    step = cache.step(1)
    for storage in (given[0].k, given[1].v):
        with pytest.raises(LeaseTimeoutError):
            storage.read(3, 4, timeout=0)
        storage.read(0, 3, timeout=0).release()
    step.abandon()
    lease = given[0].k.read(2, 3)
    cache.truncate_to(0)
    with pytest.raises(LeaseTimeoutError):
        cache.step(3, timeout=0)
    cache.step(2, timeout=0).abandon()
    lease.release()
    cache.step(3, timeout=0).abandon()


def test_published_rows_of_a_layer_that_is_set_count_as_written():
    cache, _ = adopting()
    fill(cache, 3)
    fresh = allocated()
    with fresh.k.write(0, 3) as lease:
        put_in(lease, 5)
    cache.set_layer(1, fresh)
    assert (cache.cached_len, cache.written_len(1)) == (3, 3)
    assert (content(cache, 1)[0] == 5).all()
    fill(cache, 1)
    assert cache.cached_len == 4


def test_a_layer_may_be_set_to_what_it_is_already():
    cache, given = adopting()
    rows, identity = fill(cache, 2), cache.alloc_id
    cache.set_layer(0, given[0])
    assert cache.alloc_id > identity
    assert same_rows(content(cache, 0), rows[0])


def test_a_layer_that_was_not_set_is_not_waited_for():
    cache = KvCache.with_dims(3, HEADS, WIDTH)
    cache.set_layer(1, allocated())
    with cache.step(2) as step:
        step.append(1, kv_rows(cache, 2))
    assert cache.cached_len == 2
    cache.set_layer(2, allocated())
    with pytest.raises(IncompleteStepError, match="layer 2"), cache.step(1) as step:
        step.append(1, kv_rows(cache, 1))


MISFITS = {
    "another capacity": (lambda: allocated(rows=ROWS + 1), ShapeMismatchError),
    "other heads": (lambda: allocated(heads=HEADS + 1), ShapeMismatchError),
    "another width": (lambda: allocated(width=WIDTH - 1), ShapeMismatchError),
    "another dtype": (lambda: allocated(dtype="f16"), DTypeMismatchError),
    "rows along another axis": (
        lambda: KvLayer(*[new_storage((1, HEADS, ROWS, WIDTH), "f32", axis=1) for _ in KvSlot]), ShapeMismatchError),
    "bytes": (lambda: KvLayer(*[new_storage(HEADS * ROWS * WIDTH * 4) for _ in KvSlot]), ShapeMismatchError),
    "the same storage twice": (lambda: KvLayer(*[allocated().k] * 2), GeometryError),
    "values that do not fit the keys": (lambda: KvLayer(allocated().k, allocated(rows=4).v), ShapeMismatchError),
    "read-only keys": (
        lambda: KvLayer(Storage.wrap(np.zeros((1, HEADS, ROWS, WIDTH), "f4"), axis=2, readonly=True), allocated().v),
        ReadOnlyError),
    "a storage of another cache": (lambda: KvLayer(small().slot_storage(0, 0), allocated().v), LkvError),
    "no storages": (lambda: KvLayer("k", "v"), ArgumentTypeError),
    "arrays": (lambda: KvLayer(*[np.zeros((1, HEADS, ROWS, WIDTH), "f4")] * 2), ArgumentTypeError),
    "values only": (lambda: KvLayer(None, allocated().v), ArgumentTypeError),
    "a tuple": (lambda: (allocated().k, allocated().v), ArgumentTypeError),
}  # fmt: skip


@pytest.mark.parametrize("what", [w for w in MISFITS if w != "a storage of another cache"])
@pytest.mark.parametrize("state", ["empty", "half", "full"])
def test_a_layer_that_does_not_fit_changes_nothing(what, state):
    make, error = MISFITS[what]
    if what == "read-only keys" and place() != "cpu" and state != "empty":
        error = DeviceMismatchError  # an array that was wrapped is on the host
    cache = {"empty": lambda: KvCache.with_dims(2, HEADS, WIDTH), "half": lambda: KvCache.with_dims(2, HEADS, WIDTH),
             "full": small}[state]()  # fmt: skip
    if state == "half":
        cache.set_layer(1, allocated())
    kv = make()
    if state == "empty" and what in ("another capacity", "another dtype"):
        cache.set_layer(0, kv)
        return
    storages = [s for s in (getattr(kv, "k", None), getattr(kv, "v", None)) if isinstance(s, Storage)]
    refused(cache, error, "kv", lambda: cache.set_layer(0, kv), *storages)
    for storage in storages:
        if not storage.readonly:
            storage.write(timeout=0).release()


@pytest.mark.parametrize("which", KvSlot)
@pytest.mark.parametrize("full", [False, True])
def test_a_storage_of_another_cache_is_refused_and_both_caches_stay_whole(which, full):
    cache = small() if full else KvCache.with_dims(2, HEADS, WIDTH)
    other = small()
    given = fill(other, 2)
    mine = allocated()
    pair = [mine.k, mine.v]
    pair[which] = other.slot_storage(1, which)
    theirs = snapshot(other)
    refused(cache, GeometryError, "together with others already", lambda: cache.set_layer(0, KvLayer(*pair)), *pair)
    assert snapshot(other) == theirs
    cache.set_layer(0, mine)
    assert same_rows(content(other, 1), given[1])


@pytest.mark.parametrize("which", KvSlot)
def test_a_storage_of_another_layer_is_refused(which):
    cache, given = adopting()
    pair = [allocated().k, allocated().v]
    pair[which] = given[0].k
    refused(cache, GeometryError, "layer 0 already", lambda: cache.set_layer(1, KvLayer(*pair)), *pair)


@pytest.mark.parametrize("which", KvSlot)
@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_leased_storage_is_refused(which, mode):
    cache, kv = small(), allocated()
    lease = getattr((kv.k, kv.v)[which], mode)(0, 1)
    refused(cache, LeaseTimeoutError, r"kv\.", lambda: cache.set_layer(0, kv), kv.k, kv.v)
    lease.release()
    cache.set_layer(0, kv)


def test_a_storage_that_comes_back_after_clear_is_leased_with_the_cache_again():
    cache, given = adopting()
    fill(cache, 3)
    reader = cache.read(0)
    cache.clear()
    refused(cache, LeaseTimeoutError, "kv.k", lambda: cache.set_layer(0, given[0]), given[0].k)
    reader.release()
    for layer, kv in enumerate(given):
        cache.set_layer(layer, kv)
    step = cache.step(1)
    for kv in given:
        with pytest.raises(LeaseTimeoutError):
            kv.k.read(0, 1, timeout=0)
    step.abandon()
    rows = fill(cache, 2)
    assert same_rows(content(cache, 1), rows[1])


def test_storages_that_were_leased_together_stay_together():
    cache, given = adopting()
    del cache
    other = KvCache.with_dims(2, HEADS, WIDTH)
    refused(other, GeometryError, "together with others already", lambda: other.set_layer(0, given[0]), given[0].k)


def test_set_layer_is_refused_inside_ones_own_step_and_out_of_range():
    cache = small()
    kv = allocated()
    with cache.step(1) as step:
        refused(cache, StepInProgressError, "set_layer", lambda: cache.set_layer(0, kv), kv.k)
        step.abandon()
    for layer in (-1, 2, 2**70):
        refused(cache, LayerIndexError, "layer", lambda layer=layer: cache.set_layer(layer, kv), kv.k)
    for layer in (True, 0.0, None):
        refused(cache, ArgumentTypeError, "layer", lambda layer=layer: cache.set_layer(layer, kv), kv.k)


def test_a_reader_keeps_the_layer_that_was_replaced():
    cache, _ = adopting()
    rows = fill(cache, 3)
    with cache.read(0) as view:
        cache.set_layer(0, allocated())
        assert same_rows(arrays_of(view), rows[0])
    assert not content(cache, 0)[0].any()


def test_after_set_layer_repopulate_allocates_where_it_did_at_first():
    cache = small()
    cache.set_layer(0, allocated())
    cache.repopulate()
    assert cache.nbytes == KvCache.bytes_required(2, HEADS, WIDTH, ROWS, "f32")
    assert str(cache.device_location) == place()
    rows = fill(cache, 2)
    assert same_rows(content(cache, 0), rows[0])


def test_a_cache_of_set_layers_repopulates_to_none():
    cache, _ = adopting()
    identity = cache.alloc_id
    cache.repopulate()
    assert cache.alloc_id > identity
    assert (cache.nbytes, cache.cached_len, cache.device_location) == (0, 0, None)
    cache.set_layer(0, allocated(rows=3, dtype="u8"))
    assert (cache.max_seq_len, cache.dtype.name) == (3, "uint8")


def test_a_kv_layer_is_a_pair_of_storages():
    kv = allocated(rows=5, dtype="f16")
    assert kv.k.shape == kv.v.shape == (1, HEADS, 5, WIDTH)
    assert kv.k != kv.v
    with pytest.raises(AttributeError):
        kv.k = kv.v
    assert (KvSlot.K, KvSlot.V, list(itertools.islice(KvSlot, 3))) == (0, 1, [KvSlot.K, KvSlot.V])
