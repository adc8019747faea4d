import os
import threading
import time
from itertools import cycle

import numpy as np
import pytest
from helpers.caches import LAYOUTS, SLOT_SETS, content, fill, pattern, populated, same_rows, small, snapshot
from helpers.files import forged, parts, rows_of, saved_bytes, sealed
from helpers.threads import PATIENCE, start

import lkv
from lkv import KvCache, LatentKvCache, SlotSpec, errors
from lkv.persist import SavedCache, describe

SPECS = [SlotSpec("c_kv", (8,)), SlotSpec("k_pe", (3,), tag="rope:interleaved")]


def tagged(specs=SPECS, *, layers=2, rows=8, dtype="float32", **more):
    return LatentKvCache.with_capacity(layers, rows, dtype=dtype, slots=specs, **more)


def kv_cache(rows, capacity=8, layers=2, heads=2, device="cpu", seed=0):
    cache = KvCache.with_capacity(layers, heads, 4, capacity, "float32", device)
    if rows:
        with cache.step(rows) as step:
            for layer in range(layers):
                step.append(layer, [pattern((1, heads, rows, 4), seed=seed + 2 * layer + slot) for slot in range(2)])
    return cache


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


@pytest.fixture
def source(path):
    """A cache of five rows, in a file under the fingerprint "model"."""
    cache = tagged()
    fill(cache, 5)
    lkv.save(cache, path, fingerprint="model")
    return cache


def host_rows(cache):
    """What is published, by layer, from whatever device."""
    return rows_of(cache if cache.slot_storage(populated(cache)[0], 0).device.type == "cpu" else cache.to("cpu"))


def assert_same(cache, other, rows=None):
    expected, found = host_rows(other), host_rows(cache)
    axis = cache._row_axis
    for layer, arrays in found.items():
        taken = [np.take(array, range(array.shape[axis] if rows is None else rows), axis) for array in expected[layer]]
        assert same_rows(arrays, taken)


# ---- loading ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", SLOT_SETS)
@pytest.mark.parametrize("rows", [0, 5])
def test_a_loaded_cache_is_as_the_saved_one_was(path, slots, layout, rows):
    cache = small(slots, layout=layout, layers=3)
    if rows:
        fill(cache, rows)
    lkv.save(cache, path, fingerprint="model")
    loaded = lkv.load(path, fingerprint="model")
    assert type(loaded) is LatentKvCache
    for name in ("slots", "dtype", "n_layers", "max_seq_len", "layout", "cached_len", "device_location"):
        assert getattr(loaded, name) == getattr(cache, name)
    assert loaded.alloc_id != cache.alloc_id
    assert_same(loaded, cache)
    fill(loaded, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "int64"])
def test_every_kind_of_element_comes_back(path, dtype):
    cache = small("three", dtype=dtype)
    fill(cache, 5)
    lkv.save(cache, path, fingerprint=None)
    assert_same(lkv.load(path, fingerprint=None), cache)


def test_a_kv_cache_is_loaded(path):
    cache = kv_cache(5)
    lkv.save(cache, path, fingerprint=None)
    loaded = lkv.load(path, fingerprint=None, max_seq_len=64)
    assert (type(loaded), loaded.n_kv_heads, loaded.head_dim, loaded.max_seq_len) == (KvCache, 2, 4, 64)
    assert_same(loaded, cache)
    assert [populated(lkv.load(path, fingerprint=None, layers=[1]))] == [[1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda device: tagged(device=device),
        lambda device: tagged(device=device, layout="packed"),
        lambda device: kv_cache(0, device=device),
    ],
)
def test_rows_go_from_and_to_any_device(path, device, make):
    host, there = kv_cache(5) if isinstance(make("cpu"), KvCache) else tagged(), make(device)
    if not host.cached_len:
        fill(host, 5)
    there.copy_from(host)
    lkv.save(there, path, fingerprint=None)
    assert_same(lkv.load(path, fingerprint=None), host)
    loaded = lkv.load(path, fingerprint=None, device=device)
    assert str(loaded.device_location) in (device, str(there.device_location))
    assert_same(loaded, host)
    again = make(device)
    assert again.restore(path, fingerprint=None) == 5
    assert_same(again, host)


def test_capacity_may_be_any_that_holds_the_rows(path, source):
    for capacity in (5, 6, 1000):
        loaded = lkv.load(path, fingerprint="model", max_seq_len=capacity)
        assert loaded.max_seq_len == capacity
        assert_same(loaded, source)
    with pytest.raises(errors.RestoreError, match="rows: expected at most 4, found 5") as refused:
        lkv.load(path, fingerprint="model", max_seq_len=4)
    assert refused.value.field == "rows"
    with pytest.raises(errors.GeometryError):
        lkv.load(path, fingerprint="model", max_seq_len=0)


def test_a_stage_of_a_pipeline_loads_its_layers_only(path):
    cache = tagged(layers=6)
    fill(cache, 3)
    lkv.save(cache, path, fingerprint=None)
    stage = lkv.load(path, fingerprint=None, layers=[4, 2])
    assert populated(stage) == [2, 4]
    assert_same(stage, cache)
    lkv.save(stage, path, fingerprint=None)
    assert describe(path).layers == (2, 4)
    assert populated(lkv.load(path, fingerprint=None)) == [2, 4]
    with pytest.raises(errors.RestoreError, match=r"layers: expected \[3\]"):
        lkv.load(path, fingerprint=None, layers=[2, 3])


def test_a_file_is_described_with_its_tensors_in_place(path, source):
    saved = describe(path)
    assert isinstance(saved, SavedCache)
    assert (saved.kind, saved.rows, saved.max_seq_len, saved.n_layers) == ("LatentKvCache", 5, 8, 2)
    assert (saved.layers, saved.layout, saved.fingerprint) == ((0, 1), "separate", "model")
    assert saved.slots == tuple(SPECS) and saved.dtype is source.dtype
    assert saved.nbytes == path.stat().st_size and "5/8 rows" in repr(saved)
    for layer in range(2):
        arrays = [saved.tensor(layer, name) for name in ("c_kv", "k_pe")]
        assert same_rows(arrays, content(source, layer))
        assert saved.tensor(layer, 1).ctypes.data == arrays[1].ctypes.data
        assert not any(array.flags.writeable for array in arrays)
    with pytest.raises(errors.UnpopulatedLayerError, match="layer: expected one of"):
        saved.tensor(2, 0)
    with pytest.raises(errors.LayerIndexError):
        saved.tensor(0, 2)


# ---- restoring ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("before", [0, 3, 7])
def test_a_restore_replaces_the_rows_and_moves_each_version_once(path, source, before, layout):
    cache = tagged(layout=layout, rows=16)
    if before:
        fill(cache, before, seed=5)
    allocation, versions = cache.alloc_id, snapshot(cache)["versions"]
    assert cache.restore(path, fingerprint="model") == cache.cached_len == 5
    assert_same(cache, source)
    assert cache.alloc_id == allocation
    assert snapshot(cache)["versions"] == [[version + 1 for version in layer] for layer in versions]
    assert [cache.written_len(layer) for layer in range(2)] == [5, 5]
    fill(cache, 2)


def test_restoring_no_rows_rewinds(path):
    lkv.save(tagged(), path, fingerprint=None)
    cache = tagged()
    fill(cache, 3)
    assert cache.restore(path, fingerprint=None) == cache.cached_len == 0


def test_a_cache_with_fewer_layers_takes_its_own_and_one_with_more_is_refused(path):
    whole = tagged(layers=4)
    fill(whole, 3)
    lkv.save(whole, path, fingerprint=None)
    stage = LatentKvCache.with_capacity(4, 8, slots=SPECS, dtype="float32", layers=[1, 2])
    assert stage.restore(path, fingerprint=None) == 3
    assert_same(stage, whole)
    lkv.save(stage, path, fingerprint=None)
    before = snapshot(whole)
    with pytest.raises(errors.RestoreError, match=r"layers: expected \[0, 3\], found \(1, 2\)"):
        whole.restore(path, fingerprint=None)
    assert snapshot(whole) == before


def test_what_was_poisoned_is_good_again_when_all_its_rows_are_replaced(path, source):
    cache = tagged()
    fill(cache, 3)
    with pytest.raises(ZeroDivisionError), cache.slot_storage(1, 0).write():
        raise ZeroDivisionError
    cache.restore(path, fingerprint="model")
    assert_same(cache, source)


def test_restoring_one_cache_never_touches_another(path, source):
    cache, others = tagged(), [tagged(), source, small()]
    fill(others[0], 4)
    before = [snapshot(other) for other in others]
    cache.restore(path, fingerprint="model")
    fill(cache, 1)
    assert [snapshot(other) for other in others] == before


def test_a_reader_sees_the_old_rows_or_the_new_ones(tmp_path):
    paths = []
    for rows in (200, 500):
        cache = small(layers=3, rows=600)
        with cache.step(rows) as step:
            for layer in range(3):
                step.append(layer, [np.full((rows, *spec.trailing), rows, "f4") for spec in cache.slots])
        paths.append(tmp_path / f"{rows}")
        lkv.save(cache, paths[-1], fingerprint=None)
    cache.restore(paths[0], fingerprint=None)
    over, seen = threading.Event(), set()

    def read():
        while not over.is_set():
            for layer in range(3):
                with cache.read(layer) as view:
                    seen.add(view.hi)
                    assert all((array == view.hi).all() for array in view.numpy())

    readers = [start(read) for _ in range(2)]
    for path, _ in zip(cycle(paths), range(60)):
        cache.restore(path, fingerprint=None)
    over.set()
    for reader in readers:
        reader.result(PATIENCE)
    assert seen <= {200, 500} and seen


def test_a_restore_waits_for_readers_while_they_read_and_times_out(path, source):
    cache = tagged()
    fill(cache, 3, seed=4)
    before = snapshot(cache)
    with cache.read(1):
        waits = start(lambda: cache.restore(path, fingerprint="model", timeout=0.05))
        assert isinstance(waits.exception(PATIENCE), errors.LeaseTimeoutError)
        assert snapshot(cache) == before
        waits = start(lambda: cache.restore(path, fingerprint="model"))
        time.sleep(0.05)
        assert not waits.done()
    assert waits.result(PATIENCE) == 5


def test_a_thread_that_uses_the_rows_itself_is_told_so(path, source):
    cache = tagged()
    fill(cache, 3, seed=4)
    before = snapshot(cache)
    with cache.read(1), pytest.raises(errors.WouldDeadlockError):
        cache.restore(path, fingerprint="model")
    with cache.step(1) as step:
        with pytest.raises(errors.StepInProgressError):
            cache.restore(path, fingerprint="model")
        step.abandon()
    assert snapshot(cache) == before


def test_a_copy_that_fails_on_the_way_leaves_nothing_cached(path, source, monkeypatch):
    cache = tagged()
    fill(cache, 3)
    views = SavedCache.views

    def fails(self, layer):
        if layer == 1:
            raise errors.DeviceError("lost")
        return views(self, layer)

    monkeypatch.setattr(SavedCache, "views", fails)
    with pytest.raises(errors.DeviceError):
        cache.restore(path, fingerprint="model")
    assert cache.cached_len == 0
    fill(cache, 3)


# ---- refusals: each leaves every byte, length and version ----


def other_slots(**changes):
    return [SPECS[0], SlotSpec(**{"name": "k_pe", "trailing": (3,), "tag": "rope:interleaved", **changes})]


@pytest.mark.parametrize(
    ("make", "field", "message"),
    [
        (lambda: tagged(layers=3), "n_layers", "expected 3, found 2"),
        (lambda: tagged(dtype="int32"), "dtype", "expected 'int32', found 'float32'"),
        (lambda: tagged(SPECS[:1]), "number of slots", "expected 1, found 2"),
        (lambda: tagged([*SPECS, SlotSpec("third", (1,))]), "number of slots", "expected 3, found 2"),
        (lambda: tagged(other_slots(name="k")), "slot 1: name", "expected 'k', found 'k_pe'"),
        (lambda: tagged(other_slots(trailing=(4,))), "slot 1: trailing", r"expected \(4,\), found \(3,\)"),
        (lambda: tagged(other_slots(tag="rope:halves")), "slot 1: tag", "expected 'rope:halves', found 'rope:inter"),
        (lambda: tagged(rows=4), "rows", "expected at most 4, found 5"),
        (lambda: kv_cache(0), "kind", "expected 'KvCache', found 'LatentKvCache'"),
    ],
)
def test_a_file_of_another_geometry_is_refused_by_the_field_that_differs(path, source, make, field, message):
    cache = make()
    if isinstance(cache, LatentKvCache):
        fill(cache, 3)
    before = snapshot(cache)
    with pytest.raises(errors.RestoreError, match=message) as refused:
        cache.restore(path, fingerprint="model")
    assert refused.value.field == field and str(path) in str(refused.value)
    assert snapshot(cache) == before


def test_a_cache_without_storages_is_refused(path, source):
    source.clear()
    with pytest.raises(errors.RestoreError, match=r"layers: .*no layer of the cache holds storage"):
        source.restore(path, fingerprint="model")


@pytest.mark.parametrize(("saved", "given"), [("a", "b"), ("a", None), (None, "a"), (None, ""), ("null", None)])
def test_a_fingerprint_is_compared_and_its_absence_is_one_of_its_own(path, saved, given):
    cache = tagged()
    fill(cache, 3)
    lkv.save(cache, path, fingerprint=saved)
    before = snapshot(cache)
    for call in (cache.restore, lkv.load):
        with pytest.raises(errors.RestoreError, match=f"fingerprint: expected {given!r}, found {saved!r}") as refused:
            call(path, fingerprint=given)
        assert (refused.value.field, refused.value.expected, refused.value.actual) == ("fingerprint", given, saved)
        with pytest.raises(TypeError):
            call(path)
        with pytest.raises(errors.ArgumentTypeError, match="fingerprint"):
            call(path, fingerprint=b"a")
    assert snapshot(cache) == before
    lkv.load(path, fingerprint=saved)


def test_what_is_no_file_is_refused(tmp_path):
    cache = tagged()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"1234567")
    os.mkfifo(tmp_path / "pipe")
    for name in ("empty", "short", "pipe", "."):
        with pytest.raises(errors.RestoreError, match="file"):
            cache.restore(tmp_path / name, fingerprint=None)
    with pytest.raises(FileNotFoundError):
        lkv.load(tmp_path / "none", fingerprint=None)


FORGERIES = [
    ({"format": "other"}, {}, "format"),
    ({"version": "2"}, {}, "version"),
    ({"version": "0"}, {}, "version"),
    ({"version": "x"}, {}, "version"),
    ({"kind": "KvCache"}, {}, "layout"),
    ({"kind": "KvCache", "layout": "heads"}, {}, "slots"),
    ({"kind": "Cache"}, {}, "kind"),
    ({"layout": "diagonal"}, {}, "layout"),
    ({"dtype": "int32"}, {}, "layers.0.c_kv: dtype"),
    ({"dtype": "float16"}, {}, "data length"),
    ({"dtype": "f32"}, {}, "dtype"),
    ({"rows": "4"}, {}, "data length"),
    ({"rows": "9"}, {}, "rows"),
    ({"rows": "-5"}, {}, "rows"),
    ({"rows": "5.0"}, {}, "rows"),
    ({"rows": "05"}, {}, "rows"),
    ({"rows": "\u0665"}, {}, "rows"),
    ({"rows": str(1 << 63), "max_seq_len": str(1 << 63)}, {}, "max_seq_len"),
    ({"rows": "9" * 5000}, {}, "rows"),
    ({"max_seq_len": "4"}, {}, "rows"),
    ({"max_seq_len": "0"}, {}, "max_seq_len"),
    ({"n_layers": "1"}, {}, "layers"),
    ({"n_layers": "0", "layers": ""}, {}, "n_layers"),
    ({"layers": "0"}, {}, "data length"),
    ({"layers": "0,1"}, {}, "layers"),
    ({"layers": "1-0"}, {}, "layers"),
    ({"layers": "0-0,1"}, {}, "layers"),
    ({"layers": "0,0"}, {}, "layers"),
    ({"layers": "0-1,"}, {}, "layers"),
    ({"n_layers": "3", "layers": "1-2"}, {}, "tensor"),
    ({"n_layers": str((1 << 63) - 1), "layers": f"0-{(1 << 63) - 2}"}, {}, "n_layers"),
    ({"n_layers": "1000000000"}, {}, "n_layers"),
    ({"n_layers": "16000", "layers": "0-15999"}, {}, "layers"),
    ({"layers": "0-4999999999,4999999998-0"}, {}, "layers"),
    ({"slots": "[]"}, {}, "slots"),
    ({"slots": "[" * 9000}, {}, "slots"),
    ({"slots": '[["c_kv",[8],""],["c_kv",[3],""]]'}, {}, "slots"),
    ({"slots": '[["c_kv",[8.0],""],["k_pe",[3],""]]'}, {}, "slots"),
    ({"slots": '[["c_kv",[-8],""],["k_pe",[3],""]]'}, {}, "slots"),
    ({"slots": '[["c_kv",[true],""],["k_pe",[3],""]]'}, {}, "slots"),
    ({"slots": '[["c_kv", [8], ""], ["k_pe", [3], ""]]'}, {}, "slots"),
    ({"slots": '[["c_kv",[3],""],["k_pe",[8],""]]'}, {}, "layers.0.c_kv: shape"),
    ({"slots": '[["c_kv",[8],""],["other",[3],""]]'}, {}, "tensor"),
    ({"slots": '[["c_kv",[8],""]]'}, {}, "data length"),
    ({"slots": '[["c_kv",[8],""],["k_pe",[2],""],["third",[1],""]]'}, {}, "checksums"),
    ({"slots": "{}"}, {}, "slots"),
    ({"fingerprint": "7"}, {}, "fingerprint"),
    ({"fingerprint": "model"}, {}, "fingerprint"),
    ({"checksums": ""}, {}, "checksums"),
    ({"checksums": "0" * 35}, {}, "layers.0.c_kv: checksum"),
    ({}, {"layers.0.k_pe": {"dtype": "I32"}}, "layers.0.k_pe: dtype"),
    ({}, {"layers.0.k_pe": {"shape": [5, 4]}}, "layers.0.k_pe: shape"),
    ({}, {"layers.0.k_pe": {"shape": [3, 5]}}, "layers.0.k_pe: shape"),
    ({}, {"layers.0.k_pe": {"data_offsets": [156, 216]}}, "layers.0.k_pe: data_offsets"),
    ({}, {"layers.0.k_pe": {"data_offsets": [164, 220]}}, "layers.0.k_pe: data_offsets"),
    ({}, {"layers.1.k_pe": {"data_offsets": [0, 60]}}, "layers.1.k_pe: data_offsets"),
    ({}, {"layers.1.k_pe": {"data_offsets": [380, 1 << 63]}}, "layers.1.k_pe: data_offsets"),
    ({}, {"layers.1.k_pe": {"more": 1}}, "tensor"),
]


@pytest.mark.parametrize(("metadata", "tensors", "field"), FORGERIES)
def test_a_header_that_contradicts_itself_is_refused_by_the_field(path, source, metadata, tensors, field):
    path.write_bytes(forged(path.read_bytes(), metadata, tensors))
    before = snapshot(source)
    for call in (source.restore, lkv.load, lambda path, fingerprint: describe(path)):
        with pytest.raises(errors.RestoreError) as refused:
            call(path, fingerprint="model")
        assert refused.value.field == field, str(refused.value)
        assert len(str(refused.value)) < 1000
    assert snapshot(source) == before


def test_a_newer_version_is_said_to_be_one(path, source):
    path.write_bytes(forged(path.read_bytes(), {"version": "12"}))
    with pytest.raises(errors.RestoreError, match=r"version: expected '1', found '12' \(written by a newer lkv\)"):
        describe(path)


def test_the_forger_itself_forges_nothing_when_it_changes_nothing(path, source):
    assert forged(path.read_bytes()) == path.read_bytes()


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header.replace(b',"layers.1.k_pe"', b',"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}\\0'),
        lambda header: header.rstrip() + b"{}",
        lambda header: header.replace(b'"rows":"5",', b""),
        lambda header: header.replace(b'"rows":"5",', b'"rows":"5","rows":"5",'),
        lambda header: header.replace(b'"rows":"5"', b'"rows":5'),
        lambda header: header.replace(b'"rows":"5"', b'"rows":"\xff"'),
        lambda header: header.replace(b'"rows":"5"', b'"rows":"\\ud800"'),
        lambda header: header.replace(b'"k_pe', b'"\\ud800').replace(b'\\"k_pe\\"', b'\\"\\\\ud800\\"'),
        lambda header: header.replace(b'{"__metadata__"', b' {"__metadata__"'),
        lambda header: header[:100] + b'","header":"00000000"}',
        lambda header: header[:40] + b'"header":"',
    ],
)
def test_a_header_of_another_form_is_refused(path, source, edit):
    header, data = parts(path.read_bytes())
    changed = sealed(edit(header))
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data)
    with pytest.raises(errors.RestoreError):
        source.restore(path, fingerprint="model")


def test_another_header_checksum_or_padding_is_refused(tmp_path, source, path):
    blob = path.read_bytes()
    header, data = parts(blob)
    for changed in (header + b" " * 64, header.rstrip(b" ")):
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data)
        with pytest.raises(errors.RestoreError):
            describe(path)
    path.write_bytes(blob + b"\0")
    with pytest.raises(errors.RestoreError, match="data length: expected 440, found 441"):
        describe(path)
    assert saved_bytes(source, tmp_path) == blob


def test_progress_of_a_check_is_told(path, source):
    told = []
    source.restore(path, fingerprint="model", progress=lambda *step: told.append(step))
    lkv.load(path, fingerprint="model", progress=lambda *step: told.append(step))
    assert told[-1] == (440, 440) and len(told) == 8
