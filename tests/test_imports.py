import array
import contextlib
import gc

import ml_dtypes
import numpy as np
import pytest
from helpers.appends import SLOTS, a_cache, append, refuse, rows, same, state
from helpers.dlpack import Odd
from helpers.ids import named
from helpers.memory import resident
from helpers.storages import live

import lkv
from lkv import LatentKvCache, Storage, errors
from lkv.dtypes import ALL


@pytest.fixture(params=["separate", "packed"])
def cache(request):
    return a_cache(layout=request.param)


def fail():
    raise RuntimeError("no luck today")


# ---- NumPy ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("layout", ["separate", "packed"])
def test_numpy_arrays_of_every_type_arrive_bit_for_bit(dtype, layout):
    cache = a_cache(dtype, layout=layout)
    draw = np.random.default_rng(0)
    arrays = [
        draw.integers(0, 2 if dtype.name == "bool" else 256, (2, *s.trailing, dtype.itemsize), "u1") for s in SLOTS
    ]
    arrays = [one.view(dtype.numpy)[..., 0] for one in arrays]
    assert same(append(cache, arrays), arrays)


LAYOUTS = {
    "a tuple": tuple,
    "Fortran order": lambda a: [np.asfortranarray(one) for one in a],
    "gaps between rows": lambda a: [np.repeat(one, 2, axis=0)[::2] for one in a],
    "gaps between elements": lambda a: [np.repeat(one, 3, axis=-1)[..., ::3] for one in a],
    "rows backwards": lambda a: [one[::-1].copy()[::-1] for one in a],
    "elements backwards": lambda a: [one[..., ::-1].copy()[..., ::-1] for one in a],
    "read-only": lambda a: [np.frombuffer(one.tobytes(), one.dtype).reshape(one.shape) for one in a],
    "transposed": lambda a: [one.T.copy().T for one in a],
    "misaligned": lambda a: [np.frombuffer(b"x" + one.tobytes(), "u1")[1:].view("f4").reshape(one.shape) for one in a],
    "a subclass": lambda a: [one.view(np.recarray) for one in a],
    "int64 as long long": lambda a: a,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_any_memory_layout_arrives_in_order(cache, layout, n):
    assert same(append(cache, layout(rows(n))), rows(n))


def test_a_broadcast_row_arrives_as_often_as_it_is_shown(cache):
    one = rows(1)
    wide = [np.broadcast_to(part, (3, *part.shape[1:])) for part in one]
    assert wide[0].strides[0] == 0
    assert same(append(cache, wide), [np.repeat(part, 3, axis=0) for part in one])
    scalar = [np.broadcast_to(np.float32(7), (3, *spec.trailing)) for spec in SLOTS]
    assert same(append(cache, scalar), [np.full((3, *spec.trailing), 7, "f4") for spec in SLOTS])


def test_zero_rows_are_nothing(cache):
    before = state(cache)
    cache.append(0, rows(0))
    assert state(cache) == before
    torch = pytest.importorskip("torch")
    cache.append(0, [torch.from_numpy(one) for one in rows(0)])
    assert state(cache) == before


def test_a_matrix_and_a_memmap_are_arrays(tmp_path):
    cache = LatentKvCache.with_capacity(1, 4, [(4,)], "f32")
    file = np.memmap(tmp_path / "rows", "f4", "w+", shape=(1, 4))
    file[...] = 5
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1, 2, 3, 4]], "f4")
    for row in (matrix, file):
        cache.append(0, [row])
        cache.advance_by(1)
    with cache.read(0) as view:
        assert view[0].numpy().tolist() == [[1, 2, 3, 4], [5, 5, 5, 5]]


def test_a_masked_array_is_refused_by_slot_as_its_mask_would_be_lost(cache):
    before, (first, *others) = state(cache), rows(1)
    with pytest.raises(errors.ArgumentTypeError, match=r"slot 0.*masked.*filled"):
        cache.append(0, [np.ma.masked_array(first, first > 0), *others])
    assert state(cache) == before
    assert same(append(cache, [np.ma.masked_array(first).filled(0), *others]), rows(1))


def test_long_long_is_int64():
    cache = LatentKvCache.with_capacity(1, 4, [(4,)], "i64")
    cache.append(0, [np.arange(4, dtype=np.longlong).reshape(1, 4)])
    cache.append(0, [np.arange(4, dtype=np.int_).reshape(1, 4)])


def test_foreign_byte_order_is_refused_and_the_message_says_so(cache):
    refuse(cache, rows(2, ">f4"), errors.DTypeMismatchError, "slot 0 (c_kv)", "float32 in foreign byte order")
    refuse(cache, [memoryview(one) for one in rows(2, ">f4")], errors.DTypeMismatchError, "slot 0 (c_kv)")


@pytest.mark.parametrize(
    "dtype", ["f8", "f2", "i4", "u4", "u2", "c8", "?", "S4", "U1", "M8[s]", object, "f4,f4", ml_dtypes.bfloat16]
)
def test_no_type_is_ever_cast(cache, dtype):
    arrays = rows(2)
    arrays[1] = np.zeros(arrays[1].shape, dtype)
    words = "append: slot 1 (k_pe): expected (n, 2, 3) float32, got (2, 2, 3)", "never casts"
    assert refuse(cache, arrays, errors.DTypeMismatchError, *words)


def test_types_of_one_size_are_told_apart():
    for mine, other in (
        ("bf16", "f2"),
        ("f8_e5m2", "u1"),
        ("f8_e4m3fn", ml_dtypes.float8_e5m2),
        ("u8", "i1"),
        ("bool", "u1"),
    ):
        assert refuse(a_cache(mine), rows(2, other), errors.DTypeMismatchError)
    for other in (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        assert refuse(a_cache("f8_e4m3fn"), rows(2, other), errors.DTypeMismatchError)


@pytest.mark.parametrize(
    ("slot", "shape"),
    [
        (0, (2, 5)),
        (0, (2,)),
        (0, (2, 4, 1)),
        (0, ()),
        (1, (2, 3, 2)),
        (1, (2, 6)),
        (2, (2, 1)),
        (1, (3, 2, 3)),
        (2, (1,)),
    ],
)
def test_a_wrong_shape_is_refused_by_slot(cache, slot, shape):
    arrays = rows(2)
    arrays[slot] = np.zeros(shape, "f4")
    assert refuse(cache, arrays, errors.ShapeMismatchError, f"slot {slot} ({SLOTS[slot].name})", str(shape))


def test_the_number_of_slots_is_checked(cache):
    for arrays in ([], rows()[:2], [*rows(), rows()[0]]):
        assert refuse(
            cache, arrays, errors.ShapeMismatchError, "expected 3 slots (c_kv, k_pe, score)", f"got {len(arrays)}"
        )


# ---- what is no array ----

NO_ARRAYS = [None, "text", 4, 1.5, [1.0, 2.0], (1.0,), {1: 2}, object(), Storage, iter(()), True, lkv.SlotSpec]


@pytest.mark.parametrize("thing", NO_ARRAYS, ids=named)
@pytest.mark.parametrize("slot", [0, 2])
def test_what_is_no_array_is_refused_by_slot(cache, thing, slot):
    arrays = rows(2)
    arrays[slot] = thing
    assert refuse(
        cache, arrays, errors.ArgumentTypeError, f"append: slot {slot} ({SLOTS[slot].name})", type(thing).__name__
    )


@pytest.mark.parametrize("slots", [None, "abc", 3, np.zeros((3, 2)), {}, iter(()), object()], ids=type)
def test_what_is_no_list_of_slots_is_refused(cache, slots):
    before = state(cache)
    for use in (cache.append, lambda layer, slots: cache.step(2, timeout=0).append(layer, slots)):
        with pytest.raises(errors.ArgumentTypeError, match="slots: expected a list or tuple of 3 arrays"):
            use(0, slots)
        gc.collect()
    assert state(cache) == before


# ---- buffers ----


def test_buffers_are_arrays():
    cache = LatentKvCache.with_capacity(1, 64, [(4,), ()], "u8")
    for first, second in [
        (memoryview(b"abcdefgh").cast("B", (2, 4)), b"xy"),
        (np.arange(8, dtype="u1").reshape(2, 4).data, bytearray(b"zw")),
        (memoryview(bytes(range(16))).cast("B", (4, 4))[::2], array.array("B", [1, 2])),
        (memoryview(np.arange(8, dtype="u1").reshape(4, 2)[::-1].T), memoryview(b"abcd")[::-2]),
    ]:
        cache.append(0, [first, second])
        cache.advance_by(2)
        with cache.read(0) as view:
            assert view[0].numpy()[-2:].tolist() == memoryview(first).tolist()
            assert view[1].numpy()[-2:].tolist() == memoryview(second).tolist()


@pytest.mark.parametrize(
    ("code", "dtype"),
    [("f", "f32"), ("d", "f64"), ("b", "i8"), ("B", "u8"), ("h", "i16"), ("i", "i32"), ("q", "i64"), ("l", "i64")],
)
def test_the_formats_of_buffers_are_types(code, dtype):
    cache = LatentKvCache.with_capacity(1, 4, [()], dtype)
    cache.append(0, [array.array(code, [1, 2, 3])])
    cache.advance_by(3)
    assert cache.read(0)[0].numpy().tolist() == [1, 2, 3]
    for other in set("fdbBhiqHILQ") - {code} - ({"q", "l"} if dtype == "i64" else set()):
        with pytest.raises(errors.DTypeMismatchError):
            cache.append(0, [array.array(other, [1])])


def test_a_buffer_may_be_reused_at_once():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "u8")
    source = bytearray(b"abcd")
    cache.append(0, [memoryview(source).cast("B", (1, 4))])
    source[:] = b"wxyz"
    source.clear()
    cache.advance_by(1)
    assert bytes(memoryview(cache.read(0)[0])) == b"abcd"


# ---- PyTorch ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_tensors_of_every_type_arrive_bit_for_bit(dtype):
    torch = pytest.importorskip("torch")
    arrays = rows(2, np.uint8, 0)
    arrays = [(one % 2).astype(dtype.numpy) for one in arrays]
    tensors = [torch.from_numpy(one.view(np.uint8)).view(dtype.torch).view(one.shape) for one in arrays]
    assert same(append(a_cache(dtype), tensors), arrays)


TENSORS = {
    "plain": lambda torch, t: t,
    "requires grad": lambda torch, t: t.clone().requires_grad_(),
    "a result of autograd": lambda torch, t: t.clone().requires_grad_() * 1,
    "a parameter": lambda torch, t: torch.nn.Parameter(t),
    "strided": lambda torch, t: t.repeat_interleave(2, 0)[::2],
    "gaps": lambda torch, t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda torch, t: t.permute(*range(t.ndim)[::-1]).contiguous().permute(*range(t.ndim)[::-1]),
    "an offset": lambda torch, t: torch.cat([t, t])[len(t) :],
    "inference mode": lambda torch, t: infer(torch, t),
    "negated lazily": lambda torch, t: torch.complex(t, -t).conj().imag,
    "real part": lambda torch, t: torch.complex(t, -t).conj().real,
}


def infer(torch, tensor):
    with torch.inference_mode():
        return tensor * 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", TENSORS.values(), ids=TENSORS)
def test_tensors_of_any_kind_arrive_as_pytorch_shows_them(cache, kind, n):
    torch = pytest.importorskip("torch")
    tensors = [kind(torch, torch.from_numpy(one)) for one in rows(n)]
    assert same(append(cache, tensors), rows(n))


def test_a_broadcast_tensor_arrives(cache):
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(()).expand(3, *spec.trailing) for spec in SLOTS]
    assert same(append(cache, tensors), [np.ones((3, *spec.trailing), "f4") for spec in SLOTS])


def test_a_lazily_negated_scalar_arrives_with_its_sign():
    torch = pytest.importorskip("torch")
    cache = LatentKvCache.with_capacity(1, 4, [()], "f32")
    row = torch.complex(torch.ones(1), torch.ones(1)).conj().imag
    assert row.is_neg()
    cache.append(0, [row])
    cache.advance_by(1)
    assert cache.read(0)[0].numpy().tolist() == [-1]


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex", "quantized", "fake", "zero"])
def test_tensors_without_rows_in_memory_are_refused_by_slot(cache, kind):
    torch = pytest.importorskip("torch")
    plain = torch.ones(2, 2, 3)
    if kind == "meta":
        tensor = plain.to("meta")
    elif kind == "sparse":
        tensor = plain.to_sparse()
    elif kind == "complex":
        tensor = torch.complex(plain, plain).conj()
    elif kind == "quantized":
        tensor = pytest.importorskip("torch").zeros(2, 2, 3, dtype=torch.uint16)
    elif kind == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        tensor = FakeTensorMode().from_tensor(plain)
    else:
        tensor = torch._efficientzerotensor(2, 2, 3)
    arrays = rows(2)
    arrays[1] = tensor
    assert refuse(cache, arrays, errors.LkvError, "append: slot 1 (k_pe)")


def test_a_tensor_of_another_type_is_refused_by_slot(cache):
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(one) for one in rows(2)]
    arrays[2] = arrays[2].bfloat16()
    assert refuse(cache, arrays, errors.DTypeMismatchError, "slot 2 (score): expected (n,) float32, got (2,) bfloat16")


# ---- lkv's own ----


def test_rows_of_a_cache_are_appended_to_it_again(cache):
    append(cache, rows(2))
    with cache.read(1) as view:
        cache.append(0, view)
        cache.append(1, list(view))
    cache.advance_by(2)
    with cache.read(0) as view:
        assert same(view.numpy(), [np.concatenate([one, one]) for one in rows(2)])


def test_rows_of_a_storage_are_appended(cache):
    storages = [Storage(one.shape, "f32") for one in rows(2)]
    for storage, one in zip(storages, rows(2), strict=True):
        storage.write_host(one)
    leases = [storage.read() for storage in storages]
    assert same(append(cache, leases), rows(2))
    assert same(append(cache, [storage.alias() for storage in storages]), rows(2))
    leases[1].release()
    assert refuse(cache, leases, errors.LeaseEndedError, "slot 1 (k_pe)", "ended")
    assert refuse(cache, storages, errors.ArgumentTypeError, "slot 0 (c_kv)", "Storage")


def test_rows_may_overlap_the_rows_they_are_written_to():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
    alias = cache.slot_storage(0, 0).alias()
    alias.numpy()[...] = np.arange(32).reshape(8, 4)
    cache.append(0, [alias.numpy()[1:4]])
    assert alias.numpy()[:3].tolist() == np.arange(4, 16).reshape(3, 4).tolist()


def test_bits_stand_for_another_type():
    cache = a_cache("bf16")
    arrays = rows(2, ml_dtypes.bfloat16)
    assert same(append(cache, [lkv.bits(one.view("u2"), "bf16") for one in arrays]), arrays)
    assert same(append(cache, [lkv.bits(lkv.bits(one.view("i2"), "f16"), "bf16") for one in arrays]), arrays)
    torch = pytest.importorskip("torch")
    assert same(append(cache, [lkv.bits(torch.from_numpy(one.view("i2")), torch.bfloat16) for one in arrays]), arrays)
    made = lkv.bits(np.zeros((2, 4), "u2"), "bf16")
    assert (made.shape, made.dtype.name, repr(made)) == ((2, 4), "bfloat16", "bits((2, 4), bfloat16)")
    assert refuse(a_cache("f16"), [made, *rows(2, "f2")[1:]], errors.DTypeMismatchError, "slot 0 (c_kv)", "bfloat16")
    for wrong in (np.zeros(2, "u1"), np.zeros(2, "f4"), [1, 2], b"ab"):
        with pytest.raises(errors.DTypeMismatchError, match="bits: expected elements of 2 bytes"):
            lkv.bits(wrong, "bf16")
    for wrong in (None, 4, "text"):
        with pytest.raises(errors.ArgumentTypeError):
            lkv.bits(wrong, "bf16")


@pytest.mark.parametrize(
    "source", [[1, 2, 3], bytearray(b"\1\2\3"), memoryview(b"\1\2\3"), array.array("b", [1, 2, 3])], ids=type
)
def test_bits_are_made_of_lists_and_buffers_too(source):
    dtype = "i64" if isinstance(source, list) else "i8"
    cache = LatentKvCache.with_capacity(1, 4, [()], dtype)
    cache.append(0, [lkv.bits(source, dtype)])
    cache.advance_by(3)
    assert cache.read(0)[0].numpy().tolist() == [1, 2, 3]


# ---- nothing leaks ----


def test_appends_and_refusals_leave_nothing_behind(cache):
    torch = pytest.importorskip("torch")
    good = rows(2)
    sources = [
        good,
        [torch.from_numpy(one) for one in good],
        [memoryview(one) for one in good],
        [lkv.bits(one.view("i4"), "f32") for one in good],
        [one.view(np.recarray) for one in good],
        [Odd(fail), *good[1:]],
        [*good[:2], None],
        [good[0].astype("f8"), *good[1:]],
    ]

    def use():
        for arrays in sources:
            with contextlib.suppress(errors.LkvError):
                cache.append(0, arrays)

    for _ in range(100):
        use()
    gc.collect()
    before, grown = live(), resident()
    for _ in range(3000):
        use()
    assert live() <= before
    assert resident() - grown < 2 << 20
