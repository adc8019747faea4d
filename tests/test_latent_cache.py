"""LatentCache: consumed handles, refusals, arrays of the anchor's kind."""

import copy
import ctypes
import threading

import ml_dtypes
import numpy as np
import pytest
from helpers.fake_devices import PlainDevice
from helpers.functional import ROWS, TRAILING, bytes_of, column, given, live, make, put
from helpers.memory import resident
from helpers.places import anchor, latent_cache, location, look, new_storage, place
from helpers.threads import start

import lkv
from lkv import DType, LatentCache, SlotSpec, Storage
from lkv._storage import View, host_memory, set_host_limit
from lkv.cache.branch import BranchLayer
from lkv.devices import DeviceLocation
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    ConsumedError,
    DeviceError,
    DeviceMismatchError,
    DeviceUnavailableError,
    DTypeMismatchError,
    GeometryError,
    LayerIndexError,
    OutOfMemoryError,
    ShapeMismatchError,
)

pytestmark = pytest.mark.usefixtures("everywhere")

DTYPES = ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "bool"]


# ---- append, advance, read ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_bit_for_bit(dtype):
    kind = DType.of(dtype).numpy
    random = np.random.default_rng(0)
    cache = make(dtype=dtype)
    arrays = [random.integers(0, 2, (5, *t)).astype(np.uint8 if kind.itemsize == 1 else "u2") for t in TRAILING]
    arrays = [a.astype(kind) if kind.itemsize in (1, 4) else a.view(kind) for a in arrays]
    cache = cache.append(1, arrays).advance_by(5)
    for slot, array in enumerate(arrays):
        out = look(cache.slot(1, slot))
        assert out.dtype == kind and out.shape == array.shape and out.tobytes() == array.tobytes()
        assert look(cache.slot_buffer_full(1, slot))[:5].tobytes() == array.tobytes()
        assert not look(cache.slot_buffer_full(1, slot))[5:].astype("f4").any()
        assert not look(cache.slot_buffer_full(0, slot)).astype("f4").any()


def test_append_does_not_move_the_position_and_advance_by_does():
    cache = make().append(0, given(make(), 3, 1))
    assert cache.current_seq_len == 0
    cache = cache.advance_by(2)
    assert cache.current_seq_len == 2 and cache.slot(0, 0).shape == (2, 4)
    assert cache.advance_by(0).current_seq_len == 2


def test_slot_of_an_empty_cache_is_one_row_of_zeros():
    cache = make()
    assert look(cache.slot(0, 0)).tolist() == [[0, 0, 0, 0]] and look(cache.slot(0, 2)).tolist() == [0]


def test_what_was_advanced_over_but_not_written_reads_as_zeros():
    cache = put(make(), 2, 5).advance_by(3)
    assert look(cache.slot(0, 0))[:, 0].tolist() == [5, 5, 0, 0, 0]
    cache = put(cache, 1, 6)
    assert column(cache) == [5, 5, 0, 0, 0, 6, 0, 0]


def test_appending_again_before_advance_by_replaces_longer_content():
    cache = put(make(), 2, 1)
    cache = put(cache, 5, 2, advance=False)
    cache = put(cache, 2, 3, advance=False)
    assert look(cache.advance_by(6).slot(1, 2)).tolist() == [1, 1, 3, 3, 0, 0, 0, 0]
    assert column(put(put(make(), 7, 1, advance=False), 1, 2)) == [2, 0, 0, 0, 0, 0, 0, 0]


def test_rows_that_are_not_cleared_would_reappear(monkeypatch):
    def careless(self, at, arrays, rows, what):
        layer = self.covering(at + rows)
        layer.buffers.write(at, arrays, rows, what)
        return layer._replace(extent=at + rows)

    monkeypatch.setattr(BranchLayer, "written", careless)
    with pytest.raises(AssertionError):
        test_appending_again_before_advance_by_replaces_longer_content()


def test_zero_rows_change_nothing():
    cache = put(make(), 3, 1, advance=False)
    assert column(cache.append(0, given(cache, 0, 0))) == [1, 1, 1, 0, 0, 0, 0, 0]
    full = put(make(), ROWS, 1)
    assert full.append(0, given(full, 0, 1)).current_seq_len == 8


def test_arrays_of_any_kind_are_taken():
    torch = pytest.importorskip("torch")
    trailing = [(2,)] * 6
    rows = np.arange(4, dtype="f4").reshape(2, 2)
    source = Storage.wrap(rows)
    persistent = latent_cache(1, 4, trailing, "float32")
    persistent.append(0, [rows] * 6)
    persistent.advance_by(2)

    class OnlyDlpack:
        def __dlpack__(self, **more):
            return rows.__dlpack__(**more)

        def __dlpack_device__(self):
            return rows.__dlpack_device__()

    cache = make(trailing=trailing)
    strided = np.zeros((4, 4), "f4")
    strided[::2, ::2] = rows
    spread = np.zeros((4, 2), "f4")
    spread[::2] = rows
    gapped = strided[::2, ::2] if place() == "cpu" else spread[::2]  # a device takes no gaps inside a row
    kinds = [torch.from_numpy(rows), source.read(), source.alias(), OnlyDlpack(), memoryview(rows), gapped]
    cache = cache.append(0, kinds)
    with persistent.read(0) as view:
        cache = cache.append(1, view)
    cache = cache.advance_by(2)
    for layer in range(2):
        for slot in range(6):
            assert np.array_equal(look(cache.slot(layer, slot)), rows)


def test_raw_bits_are_taken_for_the_element_type():
    bits = np.array([[0x3F80, 0x4000]], "u2")
    cache = make(trailing=[(2,)], dtype="bf16").append(0, [lkv.bits(bits, "bf16")]).advance_by(1)
    assert look(cache.slot(0, 0)).astype("f4").tolist() == [[1.0, 2.0]]


def test_the_arrays_given_may_be_reused_at_once():
    cache = make()
    arrays = given(cache, 2, 1)
    cache = cache.append(0, arrays).advance_by(2)
    for array in arrays:
        array[...] = 9
    assert column(cache)[:2] == [1, 1]


# ---- kinds of anchors ----


@pytest.mark.host_only("NumPy or Torch anchors")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_torch_anchor_gets_tensors_back(dtype):
    torch = pytest.importorskip("torch")
    kind = DType.of(dtype).torch
    cache = make(torch.empty(3), dtype=kind)
    arrays = [torch.ones((3, *t)).to(kind) for t in TRAILING]
    cache = cache.append(0, arrays).advance_by(3)
    assert isinstance(cache.slot(0, 1), torch.Tensor) and cache.slot(0, 1).dtype == kind
    assert torch.equal(cache.slot(0, 1).float(), torch.ones(3, 2))
    full = cache.slot_buffer_full(0, 2)
    assert full.shape == (ROWS,) and full.float().tolist() == [1] * 3 + [0] * 5


@pytest.mark.host_only("NumPy or Torch anchors")
def test_a_torch_anchor_on_a_device_that_is_not_there_is_unavailable():
    torch = pytest.importorskip("torch")
    with pytest.raises(DeviceUnavailableError, match="meta"):
        make(torch.empty(1, device="meta"))


@pytest.mark.parametrize("form", ["storage", "view", "lease"])
def test_an_anchor_of_lkv_gets_views_back(form):
    storage = new_storage((2, 2), "float32")
    anchor = {"storage": storage, "view": storage.alias(), "lease": storage.read()}[form]
    cache = put(make(anchor), 2, 1)
    view = cache.slot(0, 0)
    assert type(view) is View and view.readonly and view.shape == (2, 4) and view.device == location()
    assert look(view).tolist() == [[1] * 4] * 2


@pytest.mark.host_only("NumPy or Torch anchors")
@pytest.mark.parametrize("anchor", [None, 1, [1.0], "cpu", memoryview(b"abc"), np.float32(1)])
def test_an_anchor_of_no_known_kind_is_refused(anchor):
    with pytest.raises(ArgumentTypeError, match=r"anchor: expected a numpy.ndarray, a torch.Tensor, or a View"):
        LatentCache(anchor, 1, 1, [(1,)], "f32")


@pytest.mark.host_only("NumPy or Torch anchors")
def test_numpy_arrays_cannot_be_written():
    cache = put(make(dtype="bf16"), 2, 1)
    assert cache.slot(0, 0).dtype == ml_dtypes.bfloat16
    for array in (cache.slot(0, 0), cache.slot_buffer_full(0, 0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


# ---- consumed handles ----

VERBS = {
    "append": lambda cache: cache.append(0, given(make(), 1, 1)),
    "advance_by": lambda cache: cache.advance_by(1),
    "slot": lambda cache: cache.slot(0, 0),
    "slot_buffer_full": lambda cache: cache.slot_buffer_full(0, 0),
    "clone": lambda cache: cache.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "current_seq_len": lambda cache: cache.current_seq_len,
    "nbytes": lambda cache: cache.nbytes,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("by", ["append", "advance_by"])
def test_a_consumed_handle_refuses_every_verb_by_name(verb, by):
    old = make()
    VERBS[by](old)
    with pytest.raises(ConsumedError, match=f"^{verb}: "):
        VERBS[verb](old)
    assert repr(old) == "LatentCache(consumed)" and old.n_layers == 2 and old.dtype.name == "float32"


def test_a_consumed_handle_holds_no_memory():
    before = live()
    old = make()
    new = old.append(0, given(old, 1, 1))
    del new
    assert live() == before and repr(old)


def test_of_two_threads_with_one_handle_one_wins():
    for _ in range(50):
        cache, ready = make(layers=1), threading.Barrier(2)

        def race(value, cache=cache, ready=ready):
            ready.wait()
            return cache.append(0, given(cache, 3, value))

        futures = [start(race, value) for value in (1, 2)]
        errors = [future.exception(30) for future in futures]
        assert sorted(type(error) for error in errors if error) == [ConsumedError]
        winner = errors.index(None)
        assert column(futures[winner].result())[:4] == [winner + 1] * 3 + [0]


# ---- refusals ----

BAD_APPENDS = [
    ("layer past the end", 2, lambda a: a, LayerIndexError, r"layer: expected 0 <= layer < 2, got 2"),
    ("negative layer", -1, lambda a: a, LayerIndexError, r"got -1"),
    ("bool layer", True, lambda a: a, ArgumentTypeError, r"layer: expected an integer"),
    (
        "a slot missing",
        0,
        lambda a: a[:2],
        ShapeMismatchError,
        r"append: expected 3 slots \(slot0, slot1, slot2\), got 2",
    ),
    ("a slot too many", 0, lambda a: [*a, a[0]], ShapeMismatchError, r"got 4"),
    (
        "wrong width",
        0,
        lambda a: [a[0], a[0], a[2]],
        ShapeMismatchError,
        r"append: slot 1 \(slot1\): expected \(n, 2\) float32, got \(2, 4\) float32",
    ),
    (
        "wrong rank",
        0,
        lambda a: [a[0], a[1], a[1]],
        ShapeMismatchError,
        r"slot 2 \(slot2\): expected \(n,\) float32, got \(2, 2\)",
    ),
    (
        "rows disagree",
        0,
        lambda a: [a[0], a[1], a[2][:1]],
        ShapeMismatchError,
        r"slot 2 .*: expected \(2,\) .*got \(1,\)",
    ),
    ("wrong dtype", 0, lambda a: [a[0], a[1].astype("f2"), a[2]], DTypeMismatchError, r"float32, got \(2, 2\) float16"),
    ("swapped bytes", 0, lambda a: [a[0].astype(">f4"), a[1], a[2]], DTypeMismatchError, r"foreign byte order"),
    (
        "one row too many",
        0,
        lambda a: [np.repeat(x, 3, 0)[:6] for x in a],
        CapacityError,
        r"append: 6 rows at 3 do not",
    ),
    ("no array", 0, lambda a: [a[0], a[1], 7], ArgumentTypeError, r"DLPack"),
    ("no sequence", 0, lambda a: a[0], ArgumentTypeError, r"append: slots: expected a list or tuple"),
]


@pytest.mark.parametrize(
    ("layer", "spoil", "error", "message"), [b[1:] for b in BAD_APPENDS], ids=[b[0] for b in BAD_APPENDS]
)
@pytest.mark.parametrize("forked", [False, True])
def test_a_refused_append_writes_nothing_and_consumes_nothing(layer, spoil, error, message, forked):
    cache = put(put(make(), 3, 1), 1, 2, advance=False)
    other = put(cache.clone(), 2, 3, advance=False) if forked else None
    before = bytes_of(cache), cache.nbytes, host_memory()["live_buffers"]
    with pytest.raises(error, match=message):
        cache.append(layer, spoil(given(cache, 2, 9)))
    assert (bytes_of(cache), cache.nbytes, host_memory()["live_buffers"]) == before
    assert column(put(cache, 2, 4)) == [1, 1, 1, 4, 4, 0, 0, 0]
    assert other is None or column(other) == [1, 1, 1, 3, 3, 0, 0, 0]


def test_the_capacity_is_exact():
    cache = put(make(), 5, 1)
    assert put(cache.clone(), 2, 2).current_seq_len == 7
    assert column(put(cache.clone(), 3, 2)) == [1] * 5 + [2] * 3
    with pytest.raises(CapacityError, match=r"append: 4 rows at 5 do not fit max_seq_len 8"):
        put(cache.clone(), 4, 2)
    assert cache.clone().advance_by(3).current_seq_len == 8
    with pytest.raises(CapacityError, match=r"advance_by: 4 rows at 5"):
        cache.advance_by(4)
    full = cache.advance_by(3)
    with pytest.raises(CapacityError):
        full.append(0, given(full, 1, 1))


@pytest.mark.parametrize("n", [-1, 1.0, True, None, "1"])
def test_advance_by_takes_a_count(n):
    cache = make()
    with pytest.raises((GeometryError, ArgumentTypeError), match=r"^n: expected"):
        cache.advance_by(n)
    assert cache.current_seq_len == 0


@pytest.mark.parametrize("verb", ["slot", "slot_buffer_full"])
@pytest.mark.parametrize(("layer", "slot"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_reading_a_slot_that_is_not_there_is_refused(verb, layer, slot):
    with pytest.raises(LayerIndexError):
        getattr(make(), verb)(layer, slot)


@pytest.mark.parametrize(
    "change",
    [{"layers": 0}, {"layers": -1}, {"rows": 0}, {"trailing": []}, {"trailing": [(0,)]}, {"trailing": [(4,), (-1,)]},
     {"rows": 1 << 62}, {"trailing": [(1,) * 8]}, {"trailing": None, "slots": []}],
)  # fmt: skip
def test_a_degenerate_geometry_is_refused_and_leaves_nothing(change):
    before = live()
    with pytest.raises(GeometryError):
        make(**change)
    assert live() == before


@pytest.mark.host_only("the limit is the host's")
def test_out_of_memory_leaves_nothing_half_made_and_the_handle_usable():
    before = live()
    cache = put(make(trailing=[(64,)], rows=4096, layers=1), 1, 1)
    other = put(cache.clone(), 1, 2)
    set_host_limit(host_memory()["live_bytes"] + 4096)
    try:
        with pytest.raises(OutOfMemoryError):
            put(cache, 1, 3)
        with pytest.raises(OutOfMemoryError):
            make(trailing=[(1,), (64,)], rows=4096)
        assert host_memory()["live_buffers"] == before + 1
    finally:
        set_host_limit()
    assert column(put(cache, 1, 3))[:3] == [1, 3, 0] and column(other)[:3] == [1, 2, 0]


# ---- other devices ----

FUNCTIONAL = type("Functional", (PlainDevice,), {"name": "functional"})()
FUNCTIONAL.register()


def on_device():
    return make(Storage(1, "u8", "functional:0"), layers=1, trailing=[(4,)])


def device_rows(cache):
    """The first element of every row; the device's memory is the host's in truth."""
    view = cache.slot_buffer_full(0, 0)
    return list((ctypes.c_float * (ROWS * 4)).from_address(view.address))[::4]


@pytest.mark.host_only("a device of its own")
def test_the_anchors_device_holds_the_rows():
    cache = put(on_device(), 2, 1)
    view = cache.slot(0, 0)
    assert cache.device == view.device == DeviceLocation("functional") and device_rows(cache) == [1, 1] + [0] * 6
    with pytest.raises(DeviceMismatchError):
        view.numpy()
    with pytest.raises(DeviceMismatchError, match=r"the cache is on cpu"):
        make(layers=1, trailing=[(4,)]).append(0, [view])


@pytest.mark.host_only("a device of its own")
def test_branches_on_a_device_go_their_own_ways():
    cache = put(put(on_device(), 2, 1), 3, 2, advance=False)
    other = put(cache.clone(), 1, 3)
    cache = put(put(cache, 1, 4, advance=False), 4, 5, advance=False)
    assert device_rows(cache) == [1, 1, 5, 5, 5, 5, 0, 0] and device_rows(put(other, 1, 6)) == [1, 1, 3, 6, 0, 0, 0, 0]
    cache = cache.append(0, [cache.slot(0, 0)])
    assert device_rows(cache) == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.host_only("a device of its own")
@pytest.mark.parametrize("forked", [False, True])
def test_a_failed_write_consumes_nothing_and_never_shows(forked):
    cache = put(on_device(), 2, 1)
    other = put(cache.clone(), 1, 9) if forked else None
    FUNCTIONAL.fail_next = "copy_2d"
    with pytest.raises(DeviceError, match=r"injected"):
        put(cache, 3, 2)
    assert device_rows(put(cache.clone(), 1, 3)) == [1, 1, 3] + [0] * 5
    assert device_rows(cache) == [1, 1] + [0] * 6 and (other is None or device_rows(other) == [1, 1, 9] + [0] * 5)


# ---- the rest ----


def test_properties_tell_the_geometry():
    cache = LatentCache(anchor(), 3, 16, dtype="bf16", slots=[SlotSpec("c_kv", (8,)), SlotSpec("k_pe", (2, 3))])
    assert (cache.n_layers, cache.max_seq_len, cache.n_slots, cache.current_seq_len) == (3, 16, 2, 0)
    assert cache.slot_trailing(1) == (2, 3) and cache.dtype.name == "bfloat16" and cache.device == location()
    assert cache.nbytes == 3 * 16 * 14 * 2
    kind = "numpy arrays" if place() == "cpu" else "lkv arrays"
    assert repr(cache) == f"LatentCache(3 layers x 2 slots, 0/16 rows, bfloat16, {place()}, {kind}, 1.3 kB)"
    with pytest.raises(ShapeMismatchError, match=r"slot 1 \(k_pe\): expected \(n, 2, 3\) bfloat16, got \(1, 6\)"):
        cache.append(0, [np.zeros((1, 8), ml_dtypes.bfloat16), np.zeros((1, 6), ml_dtypes.bfloat16)])
    with pytest.raises(LayerIndexError):
        cache.slot_trailing(2)


def test_more_slots_than_the_stack_takes():
    cache = put(make(trailing=[(1,)] * 10), 3, 1)
    assert [look(cache.slot(1, slot)).sum() for slot in range(10)] == [3] * 10


@pytest.mark.host_only("pages of the host come as they are touched")
def test_a_large_capacity_takes_address_space_only():
    before = resident()
    cache = put(make(rows=1 << 22, trailing=[(1024,)], dtype="bf16"), 4, 1)
    branches = [put(cache.clone(), 1, value) for value in range(4)]
    assert [column_value.slot(0, 0)[4, 0] for column_value in branches] == [0, 1, 2, 3]
    assert resident() - before < 64 << 20
