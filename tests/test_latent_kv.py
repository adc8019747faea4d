import ml_dtypes
import numpy as np
import pytest
from helpers.caches import LAYOUTS, SLOT_SETS, content, fill, layer_rows, pattern, populated, same_rows, small, snapshot
from helpers.places import all_readonly, arrays_of, latent_cache, location, look, place, put_in, refused_for_gaps

from lkv import AllocId, DType, LatentKvCache, SlotSpec, bits
from lkv._storage import host_memory
from lkv.errors import IncompleteStepError, LeaseEndedError, ShapeMismatchError

pytestmark = pytest.mark.usefixtures("everywhere")

DTYPES = ["f64", "f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2", "i64", "i32", "i16", "i8", "u8", "bool"]

every_shape = pytest.mark.parametrize("slots", SLOT_SETS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# ---- construction ----


@every_layout
@every_shape
def test_a_new_cache_says_what_it_is(slots, layout):
    cache = small(slots, layers=3, rows=16, dtype="f32", layout=layout)
    width = sum(int(np.prod(t)) for t in SLOT_SETS[slots])
    assert (cache.n_layers, cache.n_slots, cache.max_seq_len, cache.cached_len) == (3, len(SLOT_SETS[slots]), 16, 0)
    assert [cache.slot_trailing(s) for s in range(cache.n_slots)] == SLOT_SETS[slots]
    assert cache.dtype is DType.of("float32")
    assert cache.device_location == location() == cache.rebind_location()
    assert isinstance(cache.alloc_id, AllocId) and cache.alloc_id >= 1
    assert cache.layout == layout
    assert cache.bytes_per_token == 3 * width * 4
    assert cache.nbytes == 3 * 16 * width * 4


@pytest.mark.host_only("what the host has allocated")
@every_layout
@every_shape
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_required_is_exactly_what_is_allocated(slots, layout, dtype):
    before = host_memory()["live_bytes"]
    wanted = LatentKvCache.bytes_required(3, 7, SLOT_SETS[slots], dtype)
    assert host_memory()["live_bytes"] == before
    cache = small(slots, layers=3, rows=7, dtype=dtype, layout=layout)
    assert cache.nbytes == wanted == host_memory()["live_bytes"] - before
    assert LatentKvCache.bytes_required(3, 7, slots=cache.slots, dtype=dtype) == wanted
    del cache
    assert host_memory()["live_bytes"] == before


@pytest.mark.host_only("allocates nothing")
def test_bytes_required_counts_only_the_layers_that_will_be_populated():
    assert LatentKvCache.bytes_required(61, 10, [(4,)], "f32", layers=range(20, 30)) == 10 * 10 * 16
    assert LatentKvCache.bytes_required(61, 10, [(4,)], "f32", layers=[]) == 0


@pytest.mark.host_only("allocates nothing")
def test_bytes_required_is_exact_up_to_the_end_of_the_address_space():
    assert LatentKvCache.bytes_required(1, 2**63 - 1, [(1,)], "u8") == 2**63 - 1
    assert LatentKvCache.bytes_required(2**40, 2**20, [(1,)], "i32") == 2**62


@pytest.mark.host_only("pages of the host come as they are touched")
def test_a_large_capacity_costs_address_space_only():
    cache = latent_cache(4, 2**20, [(512,), (64,)], "bf16")
    assert cache.nbytes == 4 * 2**20 * 576 * 2
    fill(cache, 2)
    assert cache.cached_len == 2


@pytest.mark.parametrize(
    "spelling",
    ["bfloat16", "bf16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), DType.of("bf16")],
)
def test_the_dtype_may_be_spelled_in_any_usual_way(spelling):
    assert small(dtype=spelling).dtype is DType.of("bfloat16")


@pytest.mark.host_only("names its device itself")
def test_a_torch_dtype_and_a_torch_device_are_understood():
    torch = pytest.importorskip("torch")
    cache = LatentKvCache.with_capacity(1, 4, [(2,)], torch.float16, torch.device("cpu"))
    assert (cache.dtype.name, str(cache.device_location)) == ("float16", "cpu")


def test_counts_may_be_any_integers():
    cache = latent_cache(np.int64(2), np.uint8(4), [np.array([3]), [np.int32(2)]], "f32")
    assert (cache.n_layers, cache.max_seq_len, cache.slot_trailing(0), cache.slot_trailing(1)) == (2, 4, (3,), (2,))


def test_slots_may_be_named_and_tagged():
    specs = [SlotSpec("c_kv", (8,)), SlotSpec("k_pe", (3,), tag="rope:interleaved")]
    cache = latent_cache(1, 4, slots=specs, dtype="f32")
    assert cache.slots == tuple(specs)
    assert [s.tag for s in cache.slots] == ["", "rope:interleaved"]
    assert [s.name for s in small("two").slots] == ["slot0", "slot1"]


@pytest.mark.parametrize("layers", [[0], [3, 1], range(1, 3), (np.int64(2),), iter([0, 3])])
def test_only_the_chosen_layers_are_populated(layers):
    layers = list(layers)
    cache = latent_cache(4, 4, SLOT_SETS["two"], "f32", layers=iter(layers))
    assert populated(cache) == sorted(int(layer) for layer in layers)
    assert [layer is not None for layer in cache.layers] == [layer in layers for layer in range(4)]
    assert cache.nbytes == len(layers) * 4 * 11 * 4
    fill(cache, 2)
    assert cache.cached_len == 2


def test_the_stages_of_a_pipeline_cover_the_model_together():
    stages = [latent_cache(4, 8, [(2,)], "f32", layers=r) for r in (range(0, 2), range(2, 4))]
    for stage in stages:
        fill(stage, 3)
    assert [populated(stage) for stage in stages] == [[0, 1], [2, 3]]
    assert sum(stage.nbytes for stage in stages) == LatentKvCache.bytes_required(4, 8, [(2,)], "f32")


def test_a_cache_without_populated_layers_counts_rows():
    cache = latent_cache(2, 4, [(2,)], "f32", layers=[])
    assert cache.nbytes == 0
    with cache.step(3):
        pass
    assert cache.cached_len == 3
    assert cache.layers[0] is None


# ---- steps ----


@every_layout
@every_shape
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_appended_is_read_back_bit_for_bit(slots, layout, dtype):
    cache = small(slots, dtype=dtype, layout=layout)
    first, second = fill(cache, 3, seed=1), fill(cache, 2, seed=5)
    assert cache.cached_len == 5
    for layer in range(2):
        assert same_rows(
            content(cache, layer), [np.concatenate(p) for p in zip(first[layer], second[layer], strict=True)]
        )


def test_a_step_publishes_once_when_its_block_is_left():
    cache = small()
    rows = [layer_rows(cache, 2, layer) for layer in range(2)]
    with cache.step(2) as step:
        assert (step.start, step.n, step.active) == (0, 2, True)
        assert repr(step) == "Step(rows [0, 2), open)"
        for layer in range(2):
            step.append(layer, rows[layer])
            assert (cache.cached_len, cache.written_len(layer)) == (0, 2)
            assert same_rows(arrays_of(step.view(layer)), rows[layer])
    assert cache.cached_len == 2
    assert not step.active
    assert repr(step) == "Step(rows [0, 2), ended)"


def test_a_step_views_the_published_rows_and_its_own():
    cache = small()
    old = fill(cache, 3)
    with cache.step(2) as step:
        new = [layer_rows(cache, 2, 40 + layer) for layer in range(2)]
        for layer in range(2):
            step.append(layer, new[layer])
            rows = step.view(layer)
            assert (rows.layer, rows.lo, rows.hi, len(rows)) == (layer, 0, 5, 2)
            assert same_rows(arrays_of(rows), [np.concatenate(p) for p in zip(old[layer], new[layer], strict=True)])
            assert all_readonly(rows)
        assert cache.read(0).hi == 3
    with pytest.raises(LeaseEndedError):
        arrays_of(rows)


def test_a_layer_may_be_written_twice_in_a_step_and_the_last_counts():
    cache = small(layers=1)
    with cache.step(2) as step:
        step.append(0, layer_rows(cache, 2, 1))
        step.append(0, layer_rows(cache, 2, 2))
    assert same_rows(content(cache, 0), layer_rows(cache, 2, 2))


def test_commit_and_abandon_end_a_step_without_a_block():
    cache = small(layers=1)
    step = cache.step(1)
    step.append(0, layer_rows(cache, 1, 1))
    step.commit()
    assert (cache.cached_len, step.active) == (1, False)
    step = cache.step(1)
    step.append(0, layer_rows(cache, 1, 2))
    step.abandon()
    step.abandon()
    assert (cache.cached_len, cache.written_len(0), step.active) == (1, 1, False)
    with cache.step(1) as step:
        step.append(0, layer_rows(cache, 1, 3))
        step.commit()
    assert cache.cached_len == 2
    for use in (
        step.commit,
        lambda: step.append(0, layer_rows(cache, 1)),
        lambda: step.view(0),
        lambda: step.reserve(0),
        lambda: step.note_write(0),
        step.__enter__,
        lambda: step.append_layers([]),
    ):
        with pytest.raises(LeaseEndedError):
            use()


@every_layout
@every_shape
def test_reserved_rows_are_written_in_place(slots, layout):
    cache = small(slots, layout=layout)
    fill(cache, 2)
    rows = [layer_rows(cache, 3, 50 + layer) for layer in range(2)]
    with cache.step(3) as step:
        for layer in range(2):
            reserved = step.reserve(layer)
            assert (reserved.lo, reserved.hi) == (2, 5)
            for view, new in zip(reserved, rows[layer], strict=True):
                assert view.shape == new.shape
                put_in(view, new)
            assert cache.written_len(layer) == 2
            with pytest.raises(IncompleteStepError):
                step.view(layer)
            step.note_write(layer)
            assert cache.written_len(layer) == 5
    assert cache.cached_len == 5
    for layer in range(2):
        assert same_rows([array[2:] for array in content(cache, layer)], rows[layer])


def test_reserving_rows_again_takes_back_that_they_are_written():
    cache = small(layers=1)
    with pytest.raises(IncompleteStepError), cache.step(1) as step:
        step.append(0, layer_rows(cache, 1))
        step.reserve(0)
    assert cache.cached_len == 0


@every_layout
@every_shape
@pytest.mark.parametrize("form", ["by layer", "stacked"])
def test_all_layers_may_be_appended_in_one_call(slots, layout, form):
    cache = latent_cache(5, 8, SLOT_SETS[slots], "f32", layout=layout, layers=[0, 2, 3])
    rows = [layer_rows(cache, 2, layer) for layer in (0, 2, 3)]
    with cache.step(2) as step:
        step.append_layers(rows if form == "by layer" else [np.stack(p) for p in zip(*rows, strict=True)])
    assert cache.cached_len == 2
    for layer, expected in zip((0, 2, 3), rows, strict=True):
        assert same_rows(content(cache, layer), expected)


def test_stacked_arrays_may_be_strided():
    cache = small(layers=3)
    stacked = [np.stack(p) for p in zip(*[layer_rows(cache, 2, layer) for layer in range(3)], strict=True)]
    with cache.step(2) as step:
        step.append_layers([np.repeat(a, 2, axis=0)[::2] for a in stacked])
    with cache.step(2) as step:
        step.append_layers([a[::-1] for a in stacked])
    for layer in range(3):
        expected = [np.concatenate([a[layer], a[2 - layer]]) for a in stacked]
        assert same_rows(content(cache, layer), expected)


def test_a_layer_of_append_layers_may_be_the_view_of_another_cache():
    cache, other = small(), small()
    given = fill(other, 2)
    with cache.step(2) as step:
        step.append_layers([other.read(0), other.read(1)])
    assert all(same_rows(content(cache, layer), given[layer]) for layer in range(2))


SPELLINGS = {
    "fortran": np.asfortranarray,
    "reversed": lambda a: a[::-1].copy()[::-1],
    "every other row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "gaps inside the row": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "backwards inside the row": lambda a: a[..., ::-1].copy()[..., ::-1],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "memoryview": memoryview,
    "subclass": lambda a: a.view(type("Sub", (np.ndarray,), {})),
    "dlpack": lambda a: type(
        "Exporter", (), {"__dlpack__": lambda s, **k: a.__dlpack__(**k), "__dlpack_device__": lambda s: (1, 0)}
    )(),
    "array interface": lambda a: type("Face", (), {"__array_interface__": a.__array_interface__, "keep": a})(),
    "bits": lambda a: bits(a.view(np.uint32), "float32"),
    "torch": lambda a: pytest.importorskip("torch").from_numpy(a),
    "torch, transposed": lambda a: (
        pytest.importorskip("torch").from_numpy(np.ascontiguousarray(a.T)).permute(*range(a.ndim - 1, -1, -1))
    ),
}


@every_layout
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("slots", ["two", "rank2"])
def test_any_kind_of_array_may_be_appended(slots, layout, n, spelling):
    cache = small(slots, layers=1, layout=layout)
    rows = layer_rows(cache, n, 3)
    given = [SPELLINGS[spelling](a) for a in rows]
    if refused_for_gaps(given, 0):
        before = snapshot(cache)
        with pytest.raises(ShapeMismatchError, match="gaps inside a row"):
            cache.append(0, given)
        assert snapshot(cache) == before
        return
    cache.append(0, given)
    cache.advance_by(n)
    assert same_rows(content(cache, 0), rows)


def test_a_broadcast_row_is_written_as_often_as_it_appears():
    cache = small("one", layers=1)
    cache.append(0, [np.broadcast_to(np.arange(5, dtype="f4"), (4, 5))])
    cache.advance_by(4)
    assert np.array_equal(content(cache, 0)[0], np.tile(np.arange(5, dtype="f4"), (4, 1)))


# ---- append and advance_by ----


@every_layout
@every_shape
def test_append_and_advance_by_do_the_same_without_a_block(slots, layout):
    cache = small(slots, layout=layout)
    rows = [layer_rows(cache, 3, layer) for layer in range(2)]
    for layer in range(2):
        versions = [cache.slot_version(layer, s) for s in range(cache.n_slots)]
        assert cache.append(layer, tuple(rows[layer])) is None
        assert (cache.cached_len, cache.written_len(layer)) == (0, 3)
        assert [cache.slot_version(layer, s) - v for s, v in enumerate(versions)] == [1] * cache.n_slots
        assert cache.read(layer)[0].shape[0] == 0
    assert cache.advance_by(3) == 3 == cache.cached_len
    for layer in range(2):
        assert same_rows(content(cache, layer), rows[layer])


def test_fewer_rows_than_were_written_may_be_published():
    cache = small(layers=1)
    rows = layer_rows(cache, 5)
    cache.append(0, rows)
    assert cache.advance_by(2) == 2
    assert cache.written_len(0) == 5
    assert cache.advance_by(np.int64(3)) == 5
    assert same_rows(content(cache, 0), rows)


def test_a_second_append_replaces_the_rows_that_are_not_published():
    cache = small(layers=1)
    cache.append(0, layer_rows(cache, 5, 1))
    cache.append(0, layer_rows(cache, 3, 2))
    assert cache.written_len(0) == 3
    with pytest.raises(IncompleteStepError):
        cache.advance_by(5)
    cache.advance_by(3)
    assert same_rows(content(cache, 0), layer_rows(cache, 3, 2))


def test_appending_or_publishing_nothing_changes_nothing():
    cache = small()
    fill(cache, 2)
    before = snapshot(cache)
    cache.append(0, layer_rows(cache, 0))
    cache.note_write(1, 0)
    assert cache.advance_by(0) == 2
    assert snapshot(cache) == before


def test_a_runtime_that_writes_itself_says_so_with_note_write():
    cache = small("one")
    rows = pattern((2, 5))
    for layer in range(2):
        whole = np.concatenate([rows, np.zeros((6, 5), "f4")])
        put_in(cache.slot_storage(layer, 0).alias(), whole)
        cache.note_write(layer, 2)
        assert (cache.written_len(layer), cache.slot_version(layer, 0)) == (2, 1)
    assert cache.advance_by(2) == 2
    assert same_rows(content(cache, 0), [rows])


# ---- reading ----


def test_a_read_lease_covers_the_published_rows_and_ends_with_its_block():
    cache = small()
    given = fill(cache, 3)
    with cache.read(1) as view:
        assert (view.layer, view.lo, view.hi, len(view), view.active) == (1, 0, 3, 2, True)
        assert repr(view) == "LayerRows(layer 1, rows [0, 3), 2 slots)"
        assert same_rows(arrays_of(view), given[1])
        assert view[0].shape == (3, 8) and view[-1].shape == (3, 3)
        assert [v.shape for v in view] == [(3, 8), (3, 3)]
        assert all_readonly(view)
    assert not view.active
    assert "ended" in repr(view)
    with pytest.raises(LeaseEndedError):
        arrays_of(view)


@pytest.mark.host_only("tensors of devices have tests of their own")
def test_views_are_torch_tensors_over_the_same_memory():
    torch = pytest.importorskip("torch")
    cache = small(dtype="bf16", layout="packed")
    given = fill(cache, 3)
    with cache.read(1) as view:
        tensors = view.torch()
        assert [t.dtype for t in tensors] == [torch.bfloat16] * 2
        assert [t.stride() for t in tensors] == [(11, 1), (11, 1)]
        for tensor, array in zip(tensors, given[1], strict=True):
            assert torch.equal(tensor.view(torch.int16), torch.from_numpy(array.view(np.int16)))
        assert tensors[0].data_ptr() == cache.slot_storage(1, 0).address


@every_layout
@every_shape
def test_gather_copies_the_chosen_rows(slots, layout):
    cache = small(slots, dtype="bf16", layout=layout)
    given = fill(cache, 6)
    for rows in ([5, 0, 0, 3], np.array([[1, 2], [3, 4]], np.uint64), (), 4, range(6), []):
        got = cache.gather(1, rows)
        index = np.asarray(rows, np.int64)
        assert same_rows(arrays_of(got), [np.asarray(a[index]) for a in given[1]])
        assert all(a.flags.writeable if place() == "cpu" else not a.readonly for a in got)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_pages_are_the_buffers_as_a_block_table_sees_them(page_size):
    for layout, widths in (("separate", (8, 3)), ("packed", (11,))):
        cache = latent_cache(3, 8, SLOT_SETS["two"], "f32", layout=layout, layers=[0, 2])
        given = fill(cache, 8)
        pages = cache.pages(page_size)
        assert pages[1] is None
        assert [view.shape for view in pages[2]] == [(8 // page_size, page_size, w) for w in widths]
        flat = np.concatenate([look(view).reshape(8, -1) for view in pages[2]], axis=1)
        assert np.array_equal(flat, np.concatenate(given[2], axis=1))


def test_pages_of_scalar_and_rank_two_slots_keep_their_rows():
    assert [v.shape for v in small("scalar").pages(4)[0]] == [(2, 4, 5), (2, 4)]
    assert [v.shape for v in small("rank2").pages(4)[0]] == [(2, 4, 2, 3), (2, 4, 5)]
    assert [v.shape for v in small("rank2", layout="packed").pages(4)[0]] == [(2, 4, 11)]
