"""Arrays into CUDA caches and out of them: CuPy, DLPack, the CUDA array interface, PyTorch."""

import gc

import ml_dtypes
import numpy as np
import pytest
from helpers.cuda import LOCATIONS, MODE, REASON, SIMULATOR, on_host, reset_cuda, rows_of

import lkv
from lkv import DType, KvCache, LatentCache, LatentKvCache, Storage, bits
from lkv.errors import (
    ArgumentTypeError,
    DeviceMismatchError,
    DTypeMismatchError,
    LeaseEndedError,
    ShapeMismatchError,
)

if MODE is None:
    pytest.skip(REASON, allow_module_level=True)

import cupy

SCHEDULES = ["eager", "lazy", "random1"] if MODE == "sim" else ["as it comes"]
NAMES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
NAMES += ["int64", "int32", "int16", "int8", "uint8", "bool"]
second_device = pytest.mark.skipif(len(LOCATIONS) < 2, reason="there is one GPU")


@pytest.fixture(params=SCHEDULES, autouse=True)
def schedule(request):
    if SIMULATOR is not None:
        SIMULATOR.schedule(request.param)
    yield request.param
    reset_cuda()


def storage_with(array, device="cuda:0"):
    """A storage on a device with the elements of a NumPy array."""
    storage = Storage(array.shape, DType.of(array.dtype), device)
    storage.write_host(array.tobytes())
    return storage


def sample(dtype="float32", shape=(6, 4)):
    return (
        (np.arange(np.prod(shape)) % 2 if dtype == "bool" else np.arange(np.prod(shape)))
        .reshape(shape)
        .astype(DType.of(dtype).numpy)
    )


# ---- in ----


def test_cupy_arrays_go_in():
    cache = LatentKvCache.with_capacity(1, 18, [(4,), ()], "float32", "cuda:0")
    rows = [sample(), np.arange(6, dtype=np.float32)]
    cache.append(0, [cupy.asarray(array) for array in rows])
    cache.advance_by(6)
    with cache.step(6) as step:
        step.append(0, tuple(cupy.asarray(array) for array in rows))
    with cache.step(6) as step:
        step.append_layers([[cupy.asarray(array) for array in rows]])
    for actual, expected in zip(rows_of(cache, 0), rows, strict=True):
        np.testing.assert_array_equal(actual, np.concatenate([expected] * 3))


def test_stacked_cupy_arrays_go_in():
    cache = LatentKvCache.with_capacity(3, 16, [(4,)], "float32", "cuda:0")
    stacked = np.random.default_rng(0).random((3, 5, 4), np.float32)
    with cache.step(5) as step:
        step.append_layers([cupy.asarray(stacked)])
    for layer in range(3):
        np.testing.assert_array_equal(rows_of(cache, layer)[0], stacked[layer])


def test_a_mix_of_host_and_device_arrays_goes_in():
    cache = LatentKvCache.with_capacity(1, 8, [(4,), (4,)], "float32", "cuda:0")
    with cache.step(6) as step:
        step.append(0, [sample(), cupy.asarray(sample())])
    assert [array.tolist() for array in rows_of(cache, 0)] == [sample().tolist()] * 2


def test_cupy_rows_with_gaps_between_them_go_in_by_one_strided_copy():
    cache = KvCache.with_capacity(1, 2, 4, 8, "float32", "cuda:0")
    wide = np.random.default_rng(0).random((1, 2, 12, 4), np.float32)
    on_device = cupy.asarray(wide)
    with cache.step(6) as step:
        step.append(0, [on_device[:, :, ::2], on_device[:, :, 1::2]])
    k, v = rows_of(cache, 0)
    np.testing.assert_array_equal(k, wide[:, :, ::2])
    np.testing.assert_array_equal(v, wide[:, :, 1::2])


def test_cupy_rows_with_gaps_inside_are_refused():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "cuda:0")
    with cache.step(6) as step:
        with pytest.raises(ShapeMismatchError, match="gaps inside a row"):
            step.append(0, [cupy.asarray(sample(shape=(4, 6))).T])
        step.abandon()


def test_bfloat16_goes_in_as_it_is_and_by_its_bits():
    cache = LatentKvCache.with_capacity(1, 16, [(4,)], "bfloat16", "cuda:0")
    rows = sample("bfloat16")
    with cache.step(6) as step:
        step.append(0, [cupy.asarray(rows)])
    with cache.step(6) as step:
        step.append(0, [bits(cupy.asarray(rows.view(np.uint16)), "bfloat16")])
    assert rows_of(cache, 0)[0].tobytes() == rows.tobytes() * 2
    with pytest.raises(DTypeMismatchError), cache.step(1) as step:
        step.append(0, [cupy.asarray(rows.view(np.float16)[:1])])


def test_what_does_not_fit_is_refused():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "cuda:0")
    with cache.step(6) as step:
        with pytest.raises(ShapeMismatchError):
            step.append(0, [cupy.asarray(sample(shape=(6, 5)))])
        with pytest.raises(DTypeMismatchError):
            step.append(0, [cupy.asarray(sample("int32"))])
        step.abandon()
    assert cache.cached_len == 0


def test_a_host_cache_refuses_device_arrays():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "cpu")
    with cache.step(6) as step:
        with pytest.raises(DeviceMismatchError, match="the cache is on cpu"):
            step.append(0, [cupy.asarray(sample())])
        step.abandon()
    with pytest.raises(DeviceMismatchError):
        Storage.wrap(cupy.asarray(sample()))


@second_device
def test_a_cache_refuses_arrays_of_another_device():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "cuda:1")
    with cache.step(6) as step:
        with pytest.raises(DeviceMismatchError, match="the cache is on cuda:1"):
            step.append(0, [cupy.asarray(sample())])
        with cupy.cuda.Device(1):
            step.append(0, [cupy.asarray(sample())])
    assert rows_of(cache, 0)[0].tolist() == sample().tolist()


def test_arrays_of_another_device_go_in_when_told_to_copy():
    for location in ["cpu", *LOCATIONS]:
        cache = LatentKvCache.with_capacity(1, 12, [(4,), (4,)], "float32", location)
        strided = cupy.asarray(sample(shape=(12, 4)))[::2]
        cache.append(0, [cupy.asarray(sample()), sample()], copy=True)
        cache.advance_by(6)
        with cupy.cuda.Stream(non_blocking=True), cache.step(6) as step:
            step.append(0, [strided, sample()], copy=True)
        first, second = rows_of(cache, 0)
        np.testing.assert_array_equal(first, np.concatenate([sample(), sample(shape=(12, 4))[::2]]))
        np.testing.assert_array_equal(second, np.concatenate([sample()] * 2))


# ---- out: CuPy ----


@pytest.mark.parametrize("dtype", NAMES)
def test_cupy_sees_the_same_memory(dtype):
    rows = sample(dtype)
    storage = storage_with(rows)
    with storage.read() as lease:
        array = lease.cupy()
        assert array.data.ptr == storage.address and array.shape == rows.shape and array.device.id == 0
        expected = rows if array.dtype == rows.dtype else rows.view(f"u{rows.itemsize}")
        assert array.dtype == expected.dtype
        assert array.get().tobytes() == expected.tobytes()


def test_cupy_does_not_know_float8_and_gets_its_bits():
    with storage_with(sample("float8_e5m2")).read() as lease:
        assert lease.cupy().dtype == np.uint8
    with storage_with(sample("bfloat16")).read() as lease:
        assert lease.cupy().dtype == ml_dtypes.bfloat16


def test_cupy_writes_through_a_write_lease():
    storage = Storage((6, 4), "float32", "cuda:0")
    with storage.write(2, 4) as lease:
        lease.cupy().set(sample(shape=(2, 4)))
    assert on_host(storage.alias())[2:4].tolist() == sample(shape=(2, 4)).tolist()
    assert not on_host(storage.alias())[:2].any()


def test_strided_slots_come_out_strided():
    cache = LatentKvCache.with_capacity(1, 8, [(4,), (2,)], "float32", "cuda:0", layout="packed")
    with cache.step(3) as step:
        step.append(0, [sample(shape=(3, 4)), sample(shape=(3, 2))])
    with cache.read(0) as rows:
        first, second = rows.cupy()
        assert first.strides == second.strides == (24, 4)
        assert second.data.ptr - first.data.ptr == 16
        assert rows[1].__cuda_array_interface__["strides"] == (24, 4)
        np.testing.assert_array_equal(on_host(rows[1]), sample(shape=(3, 2)))


def test_an_exported_array_keeps_the_memory_and_the_lease():
    storage = storage_with(sample())
    array = storage.read().cupy()
    assert storage.refcount > 1
    with pytest.raises(lkv.errors.WouldDeadlockError):
        storage.write()
    address = storage.address
    del storage
    gc.collect()
    assert array.data.ptr == address and array.get().tolist() == sample().tolist()


def test_host_memory_has_no_cupy_array():
    with Storage(4).read() as lease, pytest.raises(DeviceMismatchError, match="cupy: expected CUDA memory"):
        lease.cupy()


def test_device_memory_has_no_host_exports():
    with storage_with(sample()).read() as lease:
        with pytest.raises(DeviceMismatchError, match="numpy: expected host memory, the view is on cuda:0"):
            lease.numpy()
        with pytest.raises(BufferError):
            memoryview(lease)
        with pytest.raises(DeviceMismatchError):
            np.asarray(lease)


# ---- out: DLPack ----


def test_dlpack_names_the_device():
    for ordinal, location in enumerate(LOCATIONS):
        assert Storage(4, device=location).alias().__dlpack_device__() == (2, ordinal)


def test_cupy_takes_dlpack_without_a_copy():
    storage = storage_with(sample())
    with storage.write() as lease:
        array = cupy.from_dlpack(lease)
        assert array.data.ptr == storage.address and array.get().tolist() == sample().tolist()


@pytest.mark.parametrize("stream", [None, -1, 1, 2])
def test_dlpack_takes_every_word_for_a_stream(stream):
    with storage_with(sample()).write() as lease:
        assert "dltensor" in repr(lease.__dlpack__(stream=stream, max_version=(1, 0)))
    other = cupy.cuda.Stream(non_blocking=True)
    with storage_with(sample()).write() as lease:
        lease.__dlpack__(stream=other.ptr)


@pytest.mark.parametrize("stream", [0, -2, True, "1", 1.0])
def test_dlpack_refuses_what_names_no_stream(stream):
    with storage_with(sample()).write() as lease, pytest.raises(BufferError, match="stream: expected"):
        lease.__dlpack__(stream=stream)


def test_dlpack_copies_on_request():
    storage = storage_with(sample())
    with storage.read() as lease:
        copy = cupy.from_dlpack(lease, copy=True)
        assert copy.data.ptr != storage.address and copy.get().tolist() == sample().tolist()


def test_dlpack_brings_rows_to_the_host_on_request():
    storage = storage_with(sample())
    with storage.read() as lease:
        assert np.from_dlpack(lease, device="cpu").tolist() == sample().tolist()
        assert np.from_dlpack(lease, device="cpu", copy=True).tolist() == sample().tolist()
        with pytest.raises(BufferError):
            np.from_dlpack(lease, device="cpu", copy=False)
        with pytest.raises(BufferError, match="not on"):
            lease.__dlpack__(dl_device=(2, 7))


# ---- out: the CUDA array interface ----


@pytest.mark.parametrize("dtype", NAMES)
def test_the_cuda_array_interface_says_what_there_is(dtype):
    storage = storage_with(sample(dtype))
    with storage.read() as lease:
        if dtype.startswith(("bfloat", "float8")):
            assert not hasattr(lease, "__cuda_array_interface__")
            with pytest.raises(AttributeError, match="use DLPack"):
                _ = lease.__cuda_array_interface__
            return
        interface = lease.__cuda_array_interface__
        assert interface == {
            "version": 3,
            "shape": (6, 4),
            "typestr": DType.of(dtype).numpy.str,
            "data": (storage.address, True),
            "strides": None,
            "stream": 1,
        }
    with storage.write() as lease:
        assert lease.__cuda_array_interface__["data"] == (storage.address, False)


def test_cupy_takes_the_cuda_array_interface():
    storage = storage_with(sample())

    class Foreign:
        __cuda_array_interface__ = storage.write().__cuda_array_interface__

    array = cupy.asarray(Foreign())
    assert array.data.ptr == storage.address and array.get().tolist() == sample().tolist()


def test_the_cuda_array_interface_names_the_stream_of_the_lease():
    stream, storage = cupy.cuda.Stream(non_blocking=True), storage_with(sample())
    with stream:
        lease = storage.read()
        assert lease.__cuda_array_interface__["stream"] == stream.ptr
    lease.release()
    with pytest.raises(LeaseEndedError):
        _ = lease.__cuda_array_interface__


def test_host_memory_has_no_cuda_array_interface():
    with Storage(4).read() as lease:
        assert not hasattr(lease, "__cuda_array_interface__")


# ---- anchors and PyTorch ----


def test_a_cupy_array_anchors_a_functional_cache():
    for ordinal in range(len(LOCATIONS)):
        with cupy.cuda.Device(ordinal):
            anchor = cupy.zeros(3, np.float32)
            cache = LatentCache(anchor, 1, 8, [(4,)], "float32").append(0, [cupy.asarray(sample())]).advance_by(6)
            seen = cache.slot(0, 0)
            assert isinstance(seen, cupy.ndarray) and seen.device.id == ordinal
            assert seen.get().tolist() == sample().tolist()


def test_a_thing_that_exports_a_capsule_of_nothing_is_refused():
    class Liar:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **options):
            return None

    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "cuda:0")
    with cache.step(1) as step:
        with pytest.raises(ArgumentTypeError):
            step.append(0, [Liar()])
        step.abandon()


@pytest.mark.skipif(MODE != "gpu", reason="PyTorch cannot use the simulated runtime")
def test_torch_tensors_go_in_and_come_out():
    torch = pytest.importorskip("torch")
    cache = LatentKvCache.with_capacity(1, 16, [(4,)], "bfloat16", "cuda:0")
    rows = torch.arange(24, device="cuda", dtype=torch.bfloat16).reshape(6, 4)
    with cache.step(6) as step:
        step.append(0, [rows])
    with torch.cuda.stream(torch.cuda.Stream()), cache.step(6) as step:
        step.append(0, [rows + 1])
        rows = rows.clone()
    with cache.read(0) as view:
        [seen] = view.torch()
        assert seen.is_cuda and seen.data_ptr() == view[0].address
        assert torch.equal(seen[:6], rows) and torch.equal(seen[6:], rows + 1)
    storage = storage_with(sample())
    with storage.write() as lease:
        assert torch.as_tensor(lease, device="cuda").data_ptr() == storage.address
        assert torch.from_dlpack(lease).data_ptr() == storage.address
