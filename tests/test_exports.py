import ctypes
import gc
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers import dlpack
from helpers.ids import named
from helpers.memory import resident
from helpers.storages import filled, live
from helpers.threads import PATIENCE, start

from lkv import KvCache, LatentKvCache, Storage, errors
from lkv._storage import View
from lkv.dtypes import ALL

torch = pytest.importorskip("torch")

BUILTIN = [dtype for dtype in ALL if dtype.numpy.num < 32]
EXTRA = [dtype for dtype in ALL if dtype.numpy.num >= 32]


@pytest.fixture
def storage():
    return filled((6, 4), "f32")


def strided():
    """The rows of a K/V slab: not in C order."""
    return filled((1, 2, 8, 4), "f32", axis=2)


def empty_rows():
    cache = LatentKvCache.with_capacity(1, 8, [(4,), ()], "f32")
    return cache.read(0)


# ---- the buffer protocol ----

SIMPLE, WRITABLE, FORMAT, ND, STRIDES = 0, 1, 4, 8, 0x18
C_ORDER, F_ORDER, ANY_ORDER, INDIRECT = 0x20 | STRIDES, 0x40 | STRIDES, 0x80 | STRIDES, 0x100 | STRIDES


class PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def buffer(array, flags):
    """What a consumer in C gets for its flags."""
    got = PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(array), ctypes.byref(got), flags)
    seen = (
        got.len,
        bool(got.readonly),
        got.format,
        tuple(got.shape[: got.ndim]) if got.shape else None,
        tuple(got.strides[: got.ndim]) if got.strides else None,
    )
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(got))
    return seen


def test_a_consumer_gets_what_it_asks_for(storage):
    with storage.read(1, 4) as lease:
        assert buffer(lease, SIMPLE) == (48, True, None, None, None)
        assert buffer(lease, ND) == (48, True, None, (3, 4), None)
        assert buffer(lease, STRIDES) == (48, True, None, (3, 4), (16, 4))
        assert buffer(lease, STRIDES | FORMAT) == (48, True, b"f", (3, 4), (16, 4))
        assert buffer(lease, C_ORDER) == buffer(lease, ANY_ORDER) == buffer(lease, INDIRECT) == buffer(lease, STRIDES)
        for flags in (WRITABLE, F_ORDER):
            with pytest.raises(BufferError):
                buffer(lease, flags)
    with storage.write() as lease:
        held = storage.refcount
        assert buffer(lease, WRITABLE | FORMAT)[:3] == (96, False, b"f")
        assert storage.refcount == held
    del lease
    assert storage.refcount == 1


def test_strided_rows_go_only_to_who_takes_strides():
    storage = strided()
    with storage.read(2, 5) as lease:
        assert buffer(lease, STRIDES)[3:] == ((1, 2, 3, 4), (256, 128, 16, 4))
        assert memoryview(lease).tolist() == lease.numpy().tolist()
        for flags in (SIMPLE, ND, C_ORDER, F_ORDER, ANY_ORDER):
            with pytest.raises(BufferError):
                buffer(lease, flags)
    with storage.read() as lease:
        assert buffer(lease, C_ORDER)[0] == 256
    with storage.read(3, 3) as lease:
        assert buffer(lease, SIMPLE)[0] == 0
    with Storage(8).read() as lease:
        assert buffer(lease, F_ORDER) == buffer(lease, C_ORDER)


@pytest.mark.parametrize("dtype", BUILTIN, ids=str)
def test_formats_are_those_of_numpy(dtype):
    storage = filled((3, 2), dtype)
    with storage.write() as lease:
        view = memoryview(lease)
        assert (view.format, view.itemsize) == (memoryview(lease.numpy()).format, dtype.itemsize)
        assert (view.readonly, view.shape, view.c_contiguous) == (False, (3, 2), True)
        assert bytes(view) == storage.alias().numpy().tobytes()
        view.cast("B")[0] = 1
        assert lease.numpy().view(np.uint8)[0, 0] == 1


@pytest.mark.parametrize("dtype", EXTRA, ids=str)
def test_a_type_without_a_format_is_refused_by_the_buffer_protocol_alone(dtype):
    storage = Storage((3, 2), dtype)
    with storage.write() as lease:
        held = storage.refcount
        with pytest.raises(BufferError, match=f"{dtype} has no format"):
            memoryview(lease)
        assert storage.refcount == held
        assert lease.numpy().dtype == np.asarray(lease).dtype == dtype.numpy


def test_a_memoryview_keeps_the_right_until_it_is_released(storage):
    view = memoryview(storage.write())
    with pytest.raises(errors.LeaseTimeoutError):
        storage.read(timeout=0)
    view.release()
    storage.read(timeout=0).release()


# ---- NumPy ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_numpy_array_shares_the_memory_of_every_type(dtype):
    storage = Storage((5, 3), dtype)
    with storage.write(1, 4) as lease:
        array = lease.numpy()
        assert (array.dtype, array.shape, array.strides) == (dtype.numpy, (3, 3), (3 * dtype.itemsize, dtype.itemsize))
        assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned and not array.flags.owndata
        assert array.ctypes.data == lease.address == storage.address + 3 * dtype.itemsize
        array[...] = np.arange(9).reshape(3, 3) % 2
        assert (lease.numpy() == array).all()
    with storage.read(1, 4) as lease:
        assert (lease.numpy().astype("f4") == np.arange(9).reshape(3, 3) % 2).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "bool"])
def test_a_read_only_array_cannot_be_made_writeable(dtype):
    for storage in (filled((6, 4), dtype), filled((1, 2, 8, 4), dtype, axis=2)):
        array = storage.read(1, 3).numpy()
        for view in (array, array[..., 1:], array.view(np.uint8)):
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_an_array_is_made_as_asked(storage):
    with storage.read() as lease:
        same = np.asarray(lease)
        assert same.ctypes.data == lease.address and not same.flags.writeable
        assert np.asarray(lease, dtype="f4").ctypes.data == lease.address
        copied = np.array(lease)
        assert copied.ctypes.data != lease.address and copied.flags.writeable and (copied == same).all()
        wide = np.asarray(lease, dtype="f8")
        assert wide.dtype == "f8" and (wide == same).all()
        assert np.array(lease, dtype="f8", copy=True).dtype == "f8"
        with pytest.raises(ValueError, match="copy"):
            np.array(lease, dtype="f8", copy=False)
        assert np.array(lease, copy=False).ctypes.data == lease.address
        assert (np.from_dlpack(lease) == same).all() and not np.from_dlpack(lease).flags.writeable
    with storage.write() as lease:
        np.from_dlpack(lease)[0, 0] = 77
        assert same[0, 0] == 77
        np.from_dlpack(lease, copy=True)[0, 0] = 78
        assert same[0, 0] == 77
        assert np.from_dlpack(lease, device="cpu").ctypes.data == lease.address


def test_views_of_no_rows_and_of_scalars_are_arrays_too():
    rows = empty_rows()
    for view, shape in zip(rows, [(0, 4), (0,)], strict=True):
        assert view.shape == view.numpy().shape == tuple(view.torch().shape) == shape
        assert np.from_dlpack(view).shape == memoryview(view).shape == shape
        assert tuple(torch.from_dlpack(view).shape) == shape
        assert np.from_dlpack(view, copy=True).shape == shape
        assert view.size == view.nbytes == len(view) == 0
    cache = LatentKvCache.with_capacity(1, 8, [(4,), ()], "f32", layout="packed")
    cache.append(0, [np.arange(12, dtype="f4").reshape(3, 4), np.arange(3, dtype="f4")])
    cache.advance_by(3)
    with cache.read(0) as rows:
        scalars = rows[1]
        assert (scalars.shape, scalars.strides) == ((3,), (5,))
        assert scalars.numpy().tolist() == scalars.torch().tolist() == memoryview(scalars).tolist() == [0, 1, 2]
        assert np.from_dlpack(rows[0]).tolist() == np.arange(12).reshape(3, 4).tolist()
        assert np.from_dlpack(scalars, copy=True).strides == (4,)


# ---- DLPack ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_versioned_capsule_says_all_there_is_to_say(dtype):
    storage = Storage((6, 4), dtype)
    for mode, flags in (("read", dlpack.READ_ONLY), ("write", 0)):
        with getattr(storage, mode)(2, 5) as lease:
            capsule = lease.__dlpack__(max_version=(1, 0))
            assert dlpack.capsule_name(capsule) == "dltensor_versioned"
            managed = dlpack.versioned(capsule)
            tensor = managed.tensor
            assert (managed.major, managed.flags) == (1, flags)
            assert dlpack.dims(tensor) == ((3, 4), (4, 1))
            assert (tensor.code, tensor.bits, tensor.lanes) == (dtype.dl_code, dtype.dl_bits, 1)
            assert (tensor.device_type, tensor.device_id) == lease.__dlpack_device__() == (1, 0)
            assert tensor.data + tensor.byte_offset == lease.address


@pytest.mark.parametrize(
    "options", [{}, {"max_version": None}, {"max_version": (0, 8)}, {"max_version": ()}, {"stream": None}]
)
def test_a_consumer_of_old_gets_a_legacy_capsule_of_writable_rows_only(storage, options):
    with storage.write(2, 5) as lease:
        capsule = lease.__dlpack__(**options)
        assert dlpack.capsule_name(capsule) == "dltensor"
        tensor = dlpack.legacy(capsule).tensor
        assert dlpack.dims(tensor) == ((3, 4), (4, 1)) and tensor.data == lease.address
    with storage.read(2, 5) as lease:
        with pytest.raises(BufferError, match="read-only"):
            lease.__dlpack__(**options)
        assert dlpack.capsule_name(lease.__dlpack__(**options, copy=True)) == "dltensor"
    del lease, capsule
    assert storage.refcount == 1


@pytest.mark.parametrize("version", [(1, 0), (1, 3), (1, 99), (2, 0), [1, 0]])
def test_a_consumer_of_today_gets_version_1(storage, version):
    capsule = storage.read().__dlpack__(max_version=version)
    assert dlpack.versioned(capsule).major == 1


@pytest.mark.parametrize("version", [1, "1.0", ("1", 0), object()], ids=named)
def test_what_is_no_version_is_refused(storage, version):
    with pytest.raises(TypeError):
        storage.write().__dlpack__(max_version=version)
    assert storage.refcount == 1


def test_strides_are_set_also_in_c_order_and_for_slabs():
    lease = strided().read(2, 5)
    assert dlpack.dims(dlpack.versioned(lease.__dlpack__(max_version=(1, 0))).tensor) == ((1, 2, 3, 4), (64, 32, 4, 1))
    lease = Storage(3).read()
    assert dlpack.dims(dlpack.versioned(lease.__dlpack__(max_version=(1, 0))).tensor) == ((3,), (1,))


def test_a_copy_is_flagged_and_has_its_own_memory(storage):
    with storage.read() as lease:
        for view in (lease, empty_rows()[0], strided().read(2, 5)):
            capsule = view.__dlpack__(max_version=(1, 0), copy=True)
            managed = dlpack.versioned(capsule)
            assert managed.flags == dlpack.IS_COPIED
            assert managed.tensor.data != view.address
            shape, strides = dlpack.dims(managed.tensor)
            assert shape == view.shape and strides[-1] == 1
        assert dlpack.versioned(lease.__dlpack__(max_version=(1, 0), copy=False)).tensor.data == lease.address
    del capsule, managed


def test_a_device_or_a_stream_that_is_not_there_is_refused(storage):
    with storage.write() as lease:
        assert lease.__dlpack__(dl_device=(1, 0)) is not None
        for options in ({"dl_device": (2, 0)}, {"dl_device": (1, 1)}, {"stream": 1}, {"stream": -1}):
            for copy in (None, True, False):
                with pytest.raises(BufferError, match=next(iter(options))):
                    lease.__dlpack__(max_version=(1, 0), copy=copy, **options)


def test_a_capsule_nobody_takes_frees_what_it_holds(storage):
    before = live()
    for options in ({}, {"max_version": (1, 0)}, {"copy": True}, {"copy": True, "max_version": (1, 0)}):
        capsule = storage.write().__dlpack__(**options)
        del capsule
        assert storage.refcount == 1
    assert live() <= before


# ---- PyTorch ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_tensor_shares_the_memory_of_every_type(dtype):
    storage = Storage((6, 4), dtype)
    with storage.write(2, 5) as lease:
        for tensor in (lease.torch(), torch.from_dlpack(lease)):
            assert tensor.dtype is dtype.torch and tuple(tensor.shape) == (3, 4) and tensor.stride() == (4, 1)
            assert tensor.data_ptr() == lease.address and tensor.is_contiguous()
        lease.numpy()[...] = np.arange(12).reshape(3, 4) % 2
        assert (tensor.float().numpy() == np.arange(12).reshape(3, 4) % 2).all()
        tensor.view(torch.uint8)[...] = 1
        assert lease.numpy().tobytes() == b"\1" * (12 * dtype.itemsize)


def test_a_tensor_of_a_slab_has_its_strides():
    with strided().read(2, 5) as lease:
        tensor = lease.torch()
        assert tensor.stride() == (64, 32, 4, 1)
        assert (tensor.numpy() == lease.numpy()).all()


def test_a_tensor_outlives_its_storage_and_its_lease():
    before = live()
    storage = filled((6, 4), "bf16")
    with storage.read() as lease:
        content = lease.numpy().tobytes()
        tensor = lease.torch()
    del storage, lease
    assert tensor.view(torch.uint8).numpy().tobytes() == content
    for _ in range(3):
        tensor = tensor.clone() if tensor.is_leaf and _ == 2 else tensor[:]
    assert live() <= before


def test_tensors_die_in_other_threads():
    before = live()
    for export in (lambda lease: lease.torch(), torch.from_dlpack, lambda lease: torch.asarray(lease.numpy())):
        storage = filled((64, 64), "f32")
        kept = [export(storage.write(row, row + 1)) for row in range(64)]
        futures = [start(lambda part: [part.pop().sum() for _ in range(8)], kept[i::8]) for i in range(8)]
        kept.clear()
        for future in futures:
            future.result(PATIENCE)
        del futures, future
        storage.read(timeout=PATIENCE).release()
        del storage
    assert live() <= before


def test_a_tensor_takes_part_in_autograd(storage):
    with storage.read() as lease:
        weights = torch.ones(4, requires_grad=True)
        (lease.torch() @ weights).sum().backward()
        assert torch.equal(weights.grad, lease.torch().sum(0))


def test_the_view_of_a_cache_is_a_tensor_per_slot():
    cache = KvCache.with_capacity(n_layers=1, n_kv_heads=2, head_dim=4, max_seq_len=8, dtype="bf16")
    with cache.step(3) as step:
        for tensor in step.reserve(0).torch():
            tensor.fill_(1.5)
        step.note_write(0)
        assert all(bool((tensor == 1.5).all()) for tensor in step.view(0).torch())
    with cache.read(0) as rows:
        assert [tuple(tensor.shape) for tensor in rows.torch()] == [(1, 2, 3, 4)] * 2
        assert all((array == ml_dtypes.bfloat16(1.5)).all() for array in rows.numpy())


def test_exporting_to_numpy_does_not_import_torch():
    code = "import sys, lkv, numpy as np; np.asarray(lkv.Storage(4).read()); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the exchange table ----


@pytest.fixture
def table():
    return dlpack.exchange(View)


def test_the_table_is_of_version_1_and_full(table):
    assert (table.major, table.previous) == (1, None)
    assert all((table.allocate, table.from_object, table.to_object, table.borrow, table.stream))
    stream = ctypes.c_void_p(1)
    assert table.stream(1, 0, ctypes.byref(stream)) == 0 and stream.value is None


def test_a_view_is_borrowed_as_a_tensor(table, storage):
    tensor = dlpack.DLTensor()
    with storage.read(1, 3) as lease:
        assert table.borrow(lease, ctypes.byref(tensor)) == 0
        assert (tensor.data, tensor.code, tensor.bits, tensor.lanes) == (lease.address, 2, 32, 1)
        assert dlpack.dims(tensor) == ((2, 4), (4, 1))
        assert (tensor.device_type, tensor.device_id) == (1, 0)
    with pytest.raises(errors.LeaseEndedError):
        table.borrow(lease, ctypes.byref(tensor))


def test_a_view_is_taken_as_a_managed_tensor(table, storage):
    managed = ctypes.POINTER(dlpack.Versioned)()
    lease = storage.read(1, 3)
    assert table.from_object(lease, ctypes.byref(managed)) == 0
    assert managed.contents.flags == dlpack.READ_ONLY
    assert dlpack.dims(managed.contents.tensor) == ((2, 4), (4, 1))
    del lease
    with pytest.raises(errors.LeaseTimeoutError):
        storage.write(timeout=0)
    managed.contents.deleter(managed)
    storage.write(timeout=0).release()
    assert storage.refcount == 1
    lease = storage.read()
    lease.release()
    with pytest.raises(errors.LeaseEndedError):
        table.from_object(lease, ctypes.byref(managed))
    assert not managed


@pytest.mark.parametrize("stranger", [None, 4, np.zeros(4), Storage(4)], ids=type)
def test_what_is_no_view_is_refused_by_the_table(table, stranger):
    with pytest.raises(TypeError):
        table.from_object(stranger, ctypes.byref(ctypes.POINTER(dlpack.Versioned)()))
    with pytest.raises(TypeError):
        table.borrow(stranger, ctypes.byref(dlpack.DLTensor()))


def to_view(table, managed):
    made = ctypes.c_void_p()
    assert table.to_object(ctypes.pointer(managed), ctypes.byref(made)) == 0
    view = ctypes.cast(made, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(view))
    return view


def test_a_managed_tensor_becomes_a_view_that_frees_it_once(table):
    producer = dlpack.Producer(np.arange(24, dtype="f4").reshape(4, 6)[::2, ::3])
    view = to_view(table, producer.managed)
    assert (view.shape, view.strides, view.readonly) == ((2, 2), (12, 3), False)
    assert (view.numpy() == producer.array).all()
    array = view.numpy()
    array[0, 0] = 9
    assert producer.array[0, 0] == 9
    del view
    assert producer.deleted == 0
    del array
    assert producer.deleted == 1
    producer = dlpack.Producer(np.zeros((2, 2)), flags=dlpack.READ_ONLY)
    assert to_view(table, producer.managed).readonly
    assert producer.deleted == 1


def test_a_managed_tensor_of_nothing_becomes_an_empty_view(table):
    producer = dlpack.Producer(np.zeros((0, 4), "f4"), null=True)
    view = to_view(table, producer.managed)
    assert view.shape == view.numpy().shape == (0, 4)
    assert producer.deleted == 1


@pytest.mark.parametrize(
    "options", [{"code": 5}, {"bits": 4}, {"lanes": 2}, {"device": 99}, {"null": True}], ids=lambda o: next(iter(o))
)
def test_a_managed_tensor_that_lkv_cannot_hold_is_refused_and_freed(table, options):
    producer, made = dlpack.Producer(np.zeros((2, 2)), **options), ctypes.c_void_p()
    before = live()
    with pytest.raises(errors.LkvError):
        table.to_object(ctypes.pointer(producer.managed), ctypes.byref(made))
    assert made.value is None and producer.deleted == 1 and live() <= before


def prototype(shape, code=2, bits=32, device=1):
    return dlpack.DLTensor(None, device, 0, len(shape), code, bits, 1, (ctypes.c_int64 * 9)(*shape), None, 0)


@pytest.mark.parametrize("shape", [(3, 4), (7,), (), (0, 4), (1,) * 8])
def test_the_allocator_makes_what_the_prototype_says(table, shape):
    before, failed = live(), []
    out = ctypes.POINTER(dlpack.Versioned)()
    on_error = dlpack.SET_ERROR(lambda *error: failed.append(error))
    assert table.allocate(prototype(shape), ctypes.byref(out), None, on_error) == 0
    tensor = out.contents.tensor
    assert dlpack.dims(tensor)[0] == shape and (tensor.code, tensor.bits, out.contents.flags) == (2, 32, 0)
    assert ctypes.string_at(tensor.data, 4 * int(np.prod(shape))) == bytes(4 * int(np.prod(shape)))
    out.contents.deleter(out)
    assert live() <= before and not failed


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (prototype((-1,)), b"GeometryError"),
        (prototype((2**40, 2**40)), b"GeometryError"),
        (prototype((2**61,)), b"GeometryError"),
        (prototype((2**58,)), b"OutOfMemoryError"),
        (prototype((1,) * 9), b"GeometryError"),
        (prototype((4,), code=77), b"DTypeMismatchError"),
        (prototype((4,), device=99), b"DeviceUnavailableError"),
    ],
)
def test_the_allocator_reports_by_the_callback(table, wrong, kind):
    before, failed = live(), []
    out = ctypes.POINTER(dlpack.Versioned)()
    on_error = dlpack.SET_ERROR(lambda context, kind, message: failed.append((context, kind, message)))
    assert table.allocate(wrong, ctypes.byref(out), 1234, on_error) == -1
    assert not out and live() <= before
    assert failed[0][:2] == (1234, kind) and failed[0][2]


# ---- nothing leaks ----

REPEATED = {
    "numpy": lambda lease: lease.numpy(),
    "memoryview": memoryview,
    "capsule": lambda lease: lease.__dlpack__(max_version=(1, 0)),
    "legacy capsule": lambda lease: lease.__dlpack__(),
    "copied capsule": lambda lease: lease.__dlpack__(copy=True),
    "np.from_dlpack": np.from_dlpack,
    "torch": lambda lease: lease.torch(),
    "torch.from_dlpack": torch.from_dlpack,
    "C capsule": lambda lease: lease.capsule(),
    "shape": lambda lease: (lease.shape, lease.strides, lease.dtype, lease.device, repr(lease)),
}


@pytest.mark.parametrize("export", REPEATED.values(), ids=REPEATED)
def test_ten_thousand_exports_leave_nothing_behind(export):
    storage = Storage((64, 1024), "f32")
    for _ in range(100):
        export(storage.write())
    gc.collect()
    before, grown = live(), resident()
    for _ in range(10_000):
        export(storage.write())
    assert storage.refcount == 1 and live() <= before
    assert resident() - grown < 2 << 20


def test_exports_that_fail_leave_nothing_behind(storage):
    lease, ended = storage.read(), storage.read()
    ended.release()
    before, grown, held = live(), resident(), storage.refcount
    for _ in range(10_000):
        for use in (lease.__dlpack__, ended.numpy, ended.torch, ended.__dlpack__, lambda: memoryview(ended)):
            with pytest.raises((BufferError, errors.LeaseEndedError)):
                use()
    assert storage.refcount == held and live() <= before
    assert resident() - grown < 4 << 20
