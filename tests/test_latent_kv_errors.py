import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers.caches import LAYOUTS, SLOT_SETS, fill, layer_rows, pattern, populated, small, snapshot
from helpers.ids import named
from helpers.places import latent_cache

from lkv import LatentKvCache, SlotSpec
from lkv._storage import host_memory, set_host_limit
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    DeviceUnavailableError,
    DTypeMismatchError,
    GeometryError,
    IncompleteStepError,
    LayerIndexError,
    LkvError,
    OutOfMemoryError,
    ShapeMismatchError,
    StepInProgressError,
    UnpopulatedLayerError,
)

pytestmark = pytest.mark.usefixtures("everywhere")
every_shape = pytest.mark.parametrize("slots", SLOT_SETS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

NO_INTEGERS = [True, False, 1.5, 1.0, None, "1", [1], np.float32(1), np.bool_(True)]


@pytest.fixture
def host_limit():
    yield set_host_limit
    set_host_limit(None)


@pytest.fixture
def unchanged():
    """A check that the calls inside a block leave a cache as it was, to the last byte."""

    class Unchanged:
        def __init__(self, cache, error, match=None):
            self.cache, self.raises = cache, pytest.raises(error, match=match)

        def __enter__(self):
            self.before = snapshot(self.cache)
            return self.raises.__enter__()

        def __exit__(self, *exc):
            outcome = self.raises.__exit__(*exc)
            assert snapshot(self.cache) == self.before
            return outcome

    return Unchanged


# ---- geometry ----

DEGENERATE = {
    "no layers": dict(n_layers=0),
    "negative layers": dict(n_layers=-1),
    "no rows": dict(max_seq_len=0),
    "negative rows": dict(max_seq_len=-4),
    "no slots": dict(slot_trailing=[]),
    "a zero dim": dict(slot_trailing=[(4,), (0,)]),
    "a negative dim": dict(slot_trailing=[(4, -1)]),
    "a zero dim in rank 2": dict(slot_trailing=[(4, 0)]),
    "a size of 2**63": dict(n_layers=1, max_seq_len=2**62, slot_trailing=[(1,)], dtype="f16"),
    "rows beyond 64 bits": dict(max_seq_len=2**64),
    "layers beyond 64 bits": dict(n_layers=2**63),
    "a dim beyond 64 bits": dict(slot_trailing=[(2**63,)]),
    "a width of 2**63": dict(slot_trailing=[(2**32, 2**31)]),
    "a sum of widths of 2**63": dict(max_seq_len=1, n_layers=1, slot_trailing=[(2**62,), (2**62,)], dtype="u8"),
    "duplicate layers": dict(layers=[0, 1, 0]),
    "more layers than memory": dict(n_layers=2**62),
}


@pytest.mark.parametrize("what", DEGENERATE)
def test_a_degenerate_geometry_is_refused_and_takes_no_memory(what):
    arguments = dict(n_layers=2, max_seq_len=4, slot_trailing=[(4,)], dtype="f32") | DEGENERATE[what]
    before = host_memory()
    for make in (latent_cache, LatentKvCache.bytes_required):
        with pytest.raises(GeometryError):
            make(**arguments)
    for layout in LAYOUTS:
        with pytest.raises(GeometryError):
            latent_cache(**arguments, layout=layout)
    assert host_memory()["live_buffers"] == before["live_buffers"]


def test_a_row_of_more_dims_than_an_array_takes_is_refused():
    assert latent_cache(1, 2, [(1,) * 7], "f32").slot_trailing(0) == (1,) * 7
    for rank in (8, 9, 20):
        for layout in LAYOUTS:
            with pytest.raises(GeometryError, match=r"slot 0 \(slot0\).*at most 7"):
                latent_cache(1, 2, [(1,) * rank], "f32", layout=layout)


def test_two_slots_of_one_name_are_refused():
    with pytest.raises(GeometryError, match="distinct names"):
        latent_cache(1, 4, slots=[SlotSpec("k", (2,)), SlotSpec("k", (3,))])


WRONG_TYPES = [
    *[dict(n_layers=value) for value in NO_INTEGERS],
    *[dict(max_seq_len=value) for value in NO_INTEGERS],
    *[dict(slot_trailing=[(value,)]) for value in NO_INTEGERS if value != [1]],
    dict(slot_trailing=None),
    dict(slot_trailing=4),
    dict(slot_trailing=(512, 64)),
    dict(slot_trailing="4"),
    dict(slot_trailing=["4"]),
    dict(slots=[SlotSpec("k", (2,))]),
    dict(slot_trailing=None, slots=[(2,)]),
    dict(slot_trailing=None, slots=SlotSpec("k", (2,))),
    dict(layers=1),
    dict(layers="01"),
    dict(layers=[True]),
    dict(layers=[0.0]),
]


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=named)
def test_arguments_of_a_wrong_type_are_refused(wrong):
    arguments = dict(n_layers=2, max_seq_len=4, slot_trailing=[(4,)], dtype="f32") | wrong
    for make in (latent_cache, LatentKvCache.bytes_required):
        with pytest.raises(ArgumentTypeError):
            make(**arguments)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 2**64], range(1, 4)])
def test_layers_out_of_range_are_refused(layers):
    with pytest.raises(LayerIndexError):
        latent_cache(2, 4, [(4,)], layers=layers)


@pytest.mark.parametrize("dtype", ["f12", "complex64", None, 4, float, np.uint16, np.dtype(">f4"), object])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(DTypeMismatchError, match="dtype: expected one of"):
        latent_cache(1, 4, [(4,)], dtype)
    with pytest.raises(DTypeMismatchError):
        LatentKvCache.bytes_required(1, 4, [(4,)], dtype)


@pytest.mark.host_only("names its device itself")
@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:64", "CPU!", ""])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(DeviceUnavailableError):
        LatentKvCache.with_capacity(1, 4, [(4,)], "f32", device)


@pytest.mark.host_only("names its device itself")
@pytest.mark.parametrize("device", [None, 0, b"cpu", ["cpu"]])
def test_a_device_of_a_wrong_type_is_refused(device):
    with pytest.raises(ArgumentTypeError, match="device"):
        LatentKvCache.with_capacity(1, 4, [(4,)], "f32", device)


@pytest.mark.parametrize("layout", ["interleaved", None, 1, True, ["packed"]])
def test_an_unknown_layout_is_refused(layout):
    with pytest.raises(ArgumentTypeError, match="layout: expected 'separate' or 'packed', got"):
        latent_cache(1, 4, [(4,)], "f32", layout=layout)


# ---- out of memory ----


@pytest.mark.host_only("the limit is the host's")
@every_layout
@pytest.mark.parametrize("slots", ["one", "two", "three", "scalar"])
def test_wherever_construction_fails_every_byte_comes_back(host_limit, slots, layout):
    start = host_memory()["live_bytes"]
    sizes = [4 * 4 * int(np.prod(t)) for t in SLOT_SETS[slots]]
    if layout == "packed":
        sizes = [sum(sizes)]
    allowed = 0
    for layer, size in itertools.product(range(3), sizes):
        allowed += size
        host_limit(start + allowed - 1)
        with pytest.raises(OutOfMemoryError, match=f"{size} bytes") as caught:
            small(slots, layers=3, rows=4, layout=layout)
        assert host_memory()["live_bytes"] == start, (layer, size)
        assert (caught.value.requested, caught.value.device) == (size, "cpu")
    host_limit(start + allowed)
    assert small(slots, layers=3, rows=4, layout=layout).nbytes == allowed


@pytest.mark.host_only("the limit is the host's")
@every_layout
def test_while_the_error_is_being_handled_the_memory_is_back_already(host_limit, layout):
    start = host_memory()["live_bytes"]
    host_limit(start + 700)
    try:
        small("two", layers=3, rows=8, layout=layout)
    except MemoryError:
        assert host_memory()["live_bytes"] == start
        cache = small("two", layers=1, rows=8, layout=layout)
    assert cache.nbytes == 352


@pytest.mark.host_only("the limit is the host's")
@every_layout
def test_when_repopulate_fails_the_cache_is_as_before(host_limit, unchanged, layout):
    cache = small(layout=layout)
    fill(cache, 3)
    live = host_memory()["live_bytes"]
    for spare in (0, cache.nbytes // 2, cache.nbytes - 1):
        host_limit(live + spare)
        with unchanged(cache, OutOfMemoryError):
            cache.repopulate()
        assert host_memory()["live_bytes"] == live
    fill(cache, 1)
    host_limit(live + cache.nbytes)
    cache.repopulate()
    assert host_memory()["live_bytes"] == live


# ---- capacity ----


@every_layout
@every_shape
@pytest.mark.parametrize("chunk", [1, 3])
def test_rows_fit_up_to_the_last_and_not_beyond(unchanged, slots, layout, chunk):
    cache = small(slots, rows=2 * chunk + 1, layout=layout)
    fill(cache, chunk), fill(cache, chunk)
    for n in {2, 3, chunk + 1}:
        with unchanged(
            cache, CapacityError, rf"append: {n} rows at {2 * chunk} do not fit max_seq_len {2 * chunk + 1}"
        ):
            cache.append(0, layer_rows(cache, n))
        for timeout in (None, 0, 1.5):
            with unchanged(cache, CapacityError, rf"step: {n} rows at {2 * chunk} do not fit"):
                cache.step(n, timeout=timeout)
        with unchanged(cache, CapacityError):
            cache.note_write(0, n)
        with unchanged(cache, CapacityError):
            cache.advance_by(n)
    fill(cache, 1)
    assert cache.cached_len == cache.max_seq_len
    with unchanged(cache, CapacityError):
        cache.append(0, layer_rows(cache, 1))
    with unchanged(cache, CapacityError):
        cache.step(1)
    cache.append(0, layer_rows(cache, 0))


@pytest.mark.parametrize("n", [2**31, 2**62, 2**63 - 1])
def test_no_number_of_rows_overflows(unchanged, n):
    cache = small("one", rows=4, dtype="u8")
    fill(cache, 2)
    for call in (cache.step, cache.advance_by, lambda n: cache.note_write(0, n)):
        with unchanged(cache, CapacityError):
            call(n)
    with unchanged(cache, CapacityError):
        cache.append(0, [np.broadcast_to(np.zeros(5, "u1"), (min(n, sys.maxsize // 5), 5))])


@pytest.mark.parametrize("n", [0, -1, -(2**63)])
def test_a_step_of_no_rows_is_refused(unchanged, n):
    cache = small()
    with unchanged(cache, GeometryError, "n: expected at least 1"):
        cache.step(n)


@pytest.mark.parametrize("n", [-1, -(2**62)])
def test_a_negative_number_of_rows_is_refused(unchanged, n):
    cache = small()
    fill(cache, 2)
    with unchanged(cache, GeometryError):
        cache.advance_by(n)
    with unchanged(cache, GeometryError):
        cache.note_write(0, n)
    with unchanged(cache, GeometryError, "new_len: expected at least 0, got"):
        cache.truncate_to(n)


@pytest.mark.parametrize("wrong", NO_INTEGERS, ids=named)
def test_what_is_no_integer_is_refused_everywhere(unchanged, wrong):
    cache = small()
    fill(cache, 2)
    rows = layer_rows(cache, 1)
    for call in (
        lambda: cache.step(wrong), lambda: cache.advance_by(wrong), lambda: cache.truncate_to(wrong),
        lambda: cache.append(wrong, rows), lambda: cache.read(wrong), lambda: cache.note_write(wrong, 1),
        lambda: cache.note_write(0, wrong), lambda: cache.written_len(wrong), lambda: cache.slot_version(wrong, 0),
        lambda: cache.slot_version(0, wrong), lambda: cache.slot_trailing(wrong), lambda: cache.bump_version(wrong, 0),
        lambda: cache.slot_storage(0, wrong), lambda: cache.layers[wrong], lambda: cache.pages(wrong),
        lambda: cache.gather(wrong, [0]),
    ):  # fmt: skip
        with unchanged(cache, ArgumentTypeError):
            call()


@pytest.mark.parametrize("layer", [-1, 2, 2**31, 2**62])
def test_a_layer_out_of_range_is_refused_everywhere(unchanged, layer):
    cache = small()
    fill(cache, 2)
    for call in (
        lambda: cache.append(layer, layer_rows(cache, 1)), lambda: cache.read(layer), lambda: cache.written_len(layer),
        lambda: cache.note_write(layer, 1), lambda: cache.slot_version(layer, 0), lambda: cache.layers[layer],
        lambda: cache.gather(layer, [0]),
    ):  # fmt: skip
        with unchanged(cache, LayerIndexError, r"layer: expected 0"):
            call()
    with cache.step(1) as step:
        for call in (lambda: step.append(layer, layer_rows(cache, 1)), lambda: step.view(layer),
                     lambda: step.reserve(layer), lambda: step.note_write(layer)):  # fmt: skip
            with unchanged(cache, LayerIndexError):
                call()
        step.abandon()


@pytest.mark.parametrize("slot", [-1, 2, 2**40])
def test_a_slot_out_of_range_is_refused(slot):
    cache = small()
    with pytest.raises(LayerIndexError):
        cache.slot_version(0, slot)
    with pytest.raises(LayerIndexError):
        cache.slot_trailing(slot)


def test_an_unpopulated_layer_is_refused(unchanged):
    cache = latent_cache(2, 8, SLOT_SETS["two"], "f32", layers=[1])
    for call in (lambda: cache.append(0, layer_rows(cache, 1)), lambda: cache.read(0), lambda: cache.note_write(0, 1),
                 lambda: cache.gather(0, [])):  # fmt: skip
        with unchanged(cache, UnpopulatedLayerError, "layer 0 holds no storage"):
            call()
    assert cache.slot_version(0, 0) == 0
    with cache.step(1) as step:
        for call in (lambda: step.append(0, layer_rows(cache, 1)), lambda: step.view(0), lambda: step.reserve(0),
                     lambda: step.note_write(0)):  # fmt: skip
            with unchanged(cache, UnpopulatedLayerError):
                call()
        step.abandon()


@pytest.mark.parametrize("timeout", ["1", True, [1], -1, -0.5, float("nan")])
def test_a_timeout_is_a_number_of_seconds(unchanged, timeout):
    cache = small()
    for call in (cache.wipe, lambda timeout: cache.step(1, timeout), lambda timeout: cache.read(0, timeout),
                 lambda timeout: cache.gather(0, [], timeout)):  # fmt: skip
        with unchanged(cache, (ArgumentTypeError, GeometryError), "timeout"):
            call(timeout)


@pytest.mark.parametrize("page_size", [3, 16, 0, -1])
def test_a_page_size_must_divide_the_capacity(page_size):
    with pytest.raises(GeometryError, match="page_size"):
        small(rows=8).pages(page_size)


@pytest.mark.parametrize("rows", [[3], [-1], 3, [[0, 1], [2, 7]], np.array([2**63], np.uint64), [-(2**63)]])
def test_rows_that_are_not_published_are_not_gathered(rows):
    cache = small()
    fill(cache, 3)
    cache.append(0, layer_rows(cache, 2))
    with pytest.raises(LayerIndexError, match="rows: expected published rows, below 3, got"):
        cache.gather(0, rows)
    assert cache.gather(0, [2])[0].shape == (1, 8)


@pytest.mark.parametrize("rows", [[0.0], [True], ["0"], [None], slice(0, 1)])
def test_rows_that_are_no_integers_are_not_gathered(rows):
    cache = small()
    fill(cache, 3)
    with pytest.raises(ArgumentTypeError, match="rows: expected integers"):
        cache.gather(0, rows)


# ---- one bad slot ----


def bad_slots(cache, n):
    """Every way in which one array of `layer_rows(cache, n)` can be wrong: (what, slot, array, error)."""
    for slot, spec in enumerate(cache.slots):
        good = pattern((n, *spec.trailing), cache.dtype)
        yield "a row too many", slot, pattern((n + 1, *spec.trailing), cache.dtype), ShapeMismatchError
        yield "a row too few", slot, pattern((n - 1, *spec.trailing), cache.dtype), ShapeMismatchError
        yield "a dim too many", slot, good[None], ShapeMismatchError
        yield "a dim too few", slot, good[0], ShapeMismatchError
        yield "a dim of one", slot, good[..., None], ShapeMismatchError
        if spec.trailing:
            yield (
                "too wide",
                slot,
                pattern((n, *spec.trailing[:-1], spec.trailing[-1] + 1), cache.dtype),
                ShapeMismatchError,
            )
            yield "rows last", slot, pattern((*spec.trailing, n + 9), cache.dtype), ShapeMismatchError
        for dtype in (np.float16, np.float64, np.int32, ml_dtypes.bfloat16, np.uint32, np.complex64, bool, object):
            yield f"{np.dtype(dtype)}", slot, np.zeros(good.shape, dtype), DTypeMismatchError
        yield "foreign byte order", slot, good.astype(">f4"), DTypeMismatchError
        yield "a memoryview of other elements", slot, memoryview(np.zeros(good.shape, "i4")), DTypeMismatchError
        for what in (None, 3, "rows", object(), [1.0], {}):
            yield f"{type(what).__name__}", slot, what, ArgumentTypeError


@every_layout
@every_shape
@pytest.mark.parametrize("inside", ["append", "step", "append_layers", "stacked"])
def test_one_bad_slot_and_nothing_is_written(unchanged, slots, layout, inside):
    cache = small(slots, layout=layout)
    fill(cache, 2)
    step = None if inside == "append" else cache.step(3)
    for what, slot, array, error in bad_slots(cache, 3):
        rows = layer_rows(cache, 3, 7)
        rows[slot] = array
        if inside == "append" and what.startswith("a row") and cache.n_slots == 1:
            continue  # a lone slot sets the number of rows itself
        if inside == "stacked" and not isinstance(array, np.ndarray):
            continue
        with unchanged(cache, error):
            if inside == "append":
                cache.append(1, rows)
            elif inside == "step":
                step.append(1, rows)
            elif inside == "append_layers":
                step.append_layers([layer_rows(cache, 3, 6), rows])
            else:
                stacked = [np.stack([a, a]) for a in rows]
                stacked[slot] = stacked[slot].astype(array.dtype)
                step.append_layers(stacked)


@pytest.mark.parametrize("inside", ["append", "step", "append_layers"])
def test_a_wrong_number_of_slots_is_refused(unchanged, inside):
    cache = small("two")
    fill(cache, 2)
    good = layer_rows(cache, 1)
    step = None if inside == "append" else cache.step(1)
    for rows in ([], good[:1], [*good, good[0]], tuple(good) * 5):
        with unchanged(cache, ShapeMismatchError, rf"expected 2 slots \(slot0, slot1\), got {len(rows)}"):
            if inside == "append":
                cache.append(0, rows)
            elif inside == "step":
                step.append(0, rows)
            else:
                step.append_layers([rows, good])
    for rows in (good[0], None, {0: good[0], 1: good[1]}, iter(good), "ab", 5):
        with unchanged(cache, ArgumentTypeError, r"slots: expected a list or tuple of 2 arrays, got"):
            if inside == "append":
                cache.append(0, rows)
            elif inside == "step":
                step.append(0, rows)
            else:
                step.append_layers([good, rows])


def test_append_layers_wants_as_many_layers_as_are_populated(unchanged):
    cache = latent_cache(4, 8, SLOT_SETS["two"], "f32", layers=[1, 3])
    good = layer_rows(cache, 1)
    with cache.step(1) as step:
        for layers in ([], [good], [good] * 3, [good] * 4):
            with unchanged(cache, ShapeMismatchError, f"expected 2 layers, got {len(layers)}"):
                step.append_layers(layers)
        for layers in (1, 3, 4):
            with unchanged(cache, ShapeMismatchError, r"slot 0 \(slot0\): expected 2 layers stacked"):
                step.append_layers([np.stack([array] * layers) for array in good])
        for wrong in (None, {}, good[0], "ab"):
            with unchanged(cache, ArgumentTypeError):
                step.append_layers(wrong)
        with unchanged(cache, ShapeMismatchError, r"append_layers: layer 3: slot 1 \(slot1\)"):
            step.append_layers([good, [good[0], good[1][:, :2]]])
        step.append_layers([good, good])


def test_a_step_takes_exactly_its_number_of_rows(unchanged):
    cache = small()
    with cache.step(2) as step:
        for n in (0, 1, 3):
            with unchanged(
                cache, ShapeMismatchError, rf"append: slot 0 \(slot0\): expected \(2, 8\) float32, got \({n}, 8\)"
            ):
                step.append(0, layer_rows(cache, n))
        step.abandon()


def test_an_array_on_another_device_is_refused(unchanged):
    torch = pytest.importorskip("torch")
    cache = small()
    good = layer_rows(cache, 1)
    with unchanged(cache, (LkvError, RuntimeError, BufferError)):
        cache.append(0, [torch.zeros(1, 8, device="meta"), good[1]])


def test_messages_say_what_was_expected_and_what_came():
    specs = [SlotSpec("c_kv", (512,)), SlotSpec("k_pe", (64,)), SlotSpec("gate", ())]
    cache = latent_cache(1, 4, slots=specs, dtype="bf16")
    good = layer_rows(cache, 1)
    cases = [
        (1, np.zeros((1, 64), np.float16), "append: slot 1 (k_pe): expected (n, 64) bfloat16, got (1, 64) float16; lkv "
         "never casts: convert it, or wrap raw bits with lkv.bits()"),
        (0, pattern((1, 1, 512), "bf16"), "append: slot 0 (c_kv): expected (n, 512) bfloat16, got (1, 1, 512) "
         "bfloat16"),
        (1, pattern((1, 65), "bf16"), "append: slot 1 (k_pe): expected (n, 64) bfloat16, got (1, 65) bfloat16"),
        (1, pattern((2, 64), "bf16"), "append: slot 1 (k_pe): expected (1, 64) bfloat16, got (2, 64) bfloat16"),
        (2, pattern((1, 1), "bf16"), "append: slot 2 (gate): expected (n,) bfloat16, got (1, 1) bfloat16"),
        (0, np.zeros((1, 512), ">f4"), "append: slot 0 (c_kv): expected (n, 512) bfloat16, got (1, 512) float32 in "
         "foreign byte order; lkv never casts: convert it, or wrap raw bits with lkv.bits()"),
    ]  # fmt: skip
    for slot, array, message in cases:
        rows = list(good)
        rows[slot] = array
        with pytest.raises(LkvError) as caught:
            cache.append(0, rows)
        assert str(caught.value) == message
        assert caught.value.expected is not None and caught.value.actual is not None


# ---- incomplete steps ----


@every_layout
@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("end", ["block", "commit"])
def test_a_step_that_missed_a_layer_publishes_nothing(layout, missing, end):
    cache = small(layers=3, layout=layout)
    fill(cache, 2)
    before = cache.alloc_id, [cache.written_len(layer) for layer in range(3)]
    with pytest.raises(IncompleteStepError, match=f"step: layer {missing} has been written up to row 2, expected 4"):  # noqa: SIM117
        with cache.step(2) as step:
            for layer in range(3):
                if layer != missing:
                    step.append(layer, layer_rows(cache, 2))
            if end == "commit":
                step.commit()
    assert (cache.cached_len, step.active) == (2, False)
    assert (cache.alloc_id, [cache.written_len(layer) for layer in range(3)]) == before
    with pytest.raises(IncompleteStepError):
        cache.advance_by(2)
    fill(cache, 2)
    assert cache.cached_len == 4


def test_without_its_guard_an_incomplete_step_would_be_published():
    """The negative control: told that the missing layer was written, the same step goes through."""
    cache = small()
    with cache.step(2) as step:
        step.append(0, layer_rows(cache, 2))
        step.note_write(1)
    assert cache.cached_len == 2


def test_an_exception_publishes_nothing_and_passes_through():
    cache = small()
    fill(cache, 2)
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), cache.step(1) as step:
            for layer in populated(cache):
                step.append(layer, layer_rows(cache, 1))
            raise error
        assert (cache.cached_len, step.active) == (2, False)
    fill(cache, 1)
    assert cache.cached_len == 3


def test_advance_by_names_the_layer_that_is_behind(unchanged):
    cache = small(layers=3)
    cache.append(0, layer_rows(cache, 3))
    cache.append(2, layer_rows(cache, 1))
    with unchanged(cache, IncompleteStepError, "advance_by: layer 1 has been written up to row 0, expected 1"):
        cache.advance_by(1)
    cache.append(1, layer_rows(cache, 3))
    with unchanged(cache, IncompleteStepError, "layer 2 has been written up to row 1, expected 3"):
        cache.advance_by(3)
    assert cache.advance_by(1) == 1


def test_inside_ones_own_step_the_other_verbs_are_refused(unchanged):
    cache = small()
    fill(cache, 3)
    with cache.step(1) as step:
        for verb, call in {
            "append": lambda: cache.append(0, layer_rows(cache, 1)),
            "advance_by": lambda: cache.advance_by(1),
            "note_write": lambda: cache.note_write(0, 1),
            "truncate_to": lambda: cache.truncate_to(1),
            "clear": cache.clear,
            "repopulate": cache.repopulate,
            "wipe": cache.wipe,
        }.items():
            with unchanged(cache, StepInProgressError, f"^{verb}: "):
                call()
        assert step.active
        for layer in range(2):
            step.append(layer, layer_rows(cache, 1))
    assert cache.cached_len == 4
