import ctypes
import gc
import threading

import numpy as np
import pytest
from helpers.storages import filled, live
from helpers.threads import start

from lkv import Storage, errors

# ---- memory of others ----


class Owner:
    """Counts how often it was let go, and by which thread."""

    def __init__(self):
        self.array = np.zeros(16, np.float32)
        self.gone = []

    def storage(self, **options):
        token = Token(self.gone)
        return Storage.from_address(self.array.ctypes.data, 16, "f32", owner=token, **options)


class Token:
    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        self.gone.append(threading.get_ident())


def test_an_owner_is_released_once_with_the_last_reference():
    owner = Owner()
    storage = owner.storage()
    storage.write_host(np.arange(16, dtype="f4"))
    assert (owner.array == np.arange(16)).all()
    array = storage.read().numpy()
    alias = storage.alias()
    del storage
    assert not owner.gone
    del array
    assert not owner.gone
    del alias
    assert len(owner.gone) == 1


@pytest.mark.parametrize("export", [lambda s: s.read().numpy(), lambda s: memoryview(s.read()), lambda s: s.capsule()])
def test_an_owner_is_released_when_the_last_export_dies_in_another_thread(export):
    owner = Owner()
    kept = [export(owner.storage())]
    assert not owner.gone
    dropped = start(lambda: (kept.clear(), threading.get_ident())[1]).result(30)
    assert owner.gone == [dropped]


def test_an_owner_is_released_by_a_deleter_that_runs_without_the_gil():
    owner = Owner()
    capsule = owner.storage().alias().__dlpack__(max_version=(1, 0))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor_versioned")
    rename(capsule, b"used_dltensor_versioned")
    del capsule
    assert not owner.gone
    deleter = ctypes.c_void_p.from_address(address + 16).value
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(address)  # a foreign function runs without the GIL
    assert len(owner.gone) == 1


def test_a_failed_wrap_releases_its_owner_once():
    owner = Owner()
    for shape in (0, -1, 2**63, (1,) * 9, "4"):
        with pytest.raises(errors.LkvError):
            Storage.from_address(owner.array.ctypes.data, shape, "f32", owner=Token(owner.gone))
    gc.collect()
    assert len(owner.gone) == 5


def test_a_wrapped_array_shares_its_memory():
    array = np.arange(24, dtype=np.int32).reshape(6, 4)
    storage = Storage.wrap(array)
    assert (storage.shape, storage.dtype.name, storage.rows) == ((6, 4), "int32", 6)
    assert storage.address == array.ctypes.data
    with storage.write(2, 3) as lease:
        lease.numpy()[...] = -1
    assert (array[2] == -1).all()
    assert Storage.wrap(array, axis=1).rows == 4
    storage.release_rows(2, 3)
    assert not array[2].any() and array[1].all()


@pytest.mark.parametrize(
    "array",
    [bytearray(8), memoryview(bytearray(8)), np.zeros(8, np.float16), np.zeros((2, 1, 4), "?")[:, ::2]],
    ids=["bytearray", "memoryview", "numpy", "a dim of one"],
)
def test_any_array_in_c_order_can_be_wrapped(array):
    assert Storage.wrap(array).nbytes == memoryview(array).nbytes


def test_wrapped_views_keep_each_other_alive():
    first = Storage((4, 4), "bf16")
    second = Storage.wrap(first.alias())
    del first
    second.write_host(bytes(range(32)))
    assert second.read_host() == bytes(range(32))
    with second.read() as lease:
        assert Storage.wrap(lease).readonly


def test_a_wrapped_bytearray_cannot_be_resized():
    array = bytearray(8)
    storage = Storage.wrap(array)
    with pytest.raises(BufferError):
        array.append(1)
    del storage
    array.append(1)


@pytest.mark.parametrize("array", [b"12345678", memoryview(b"12345678"), np.zeros(8, np.uint8)], ids=type)
def test_read_only_memory_refuses_writers(array):
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    storage = Storage.wrap(array)
    assert storage.readonly
    assert storage.alias().readonly
    for refused in (storage.write, lambda: storage.write_host(b"1"), lambda: storage.release_rows(0, 1)):
        with pytest.raises(errors.ReadOnlyError):
            refused()
    assert storage.read_host() == bytes(array)
    assert not Storage.wrap(np.zeros(8), readonly=False).readonly
    assert Storage.wrap(np.zeros(8), readonly=True).readonly
    assert Owner().storage(readonly=True).readonly


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros((4, 4))[:, ::2], errors.ShapeMismatchError),
        (np.zeros((4, 4)).T, errors.ShapeMismatchError),
        (np.zeros(4)[::-1], errors.ShapeMismatchError),
        (np.zeros(4, ">f4"), errors.DTypeMismatchError),
        (np.zeros(4, "c8"), errors.DTypeMismatchError),
        (np.zeros(4, object), errors.DTypeMismatchError),
        (np.zeros(()), errors.GeometryError),
        (np.zeros((0, 4)), errors.GeometryError),
        ([1, 2], errors.ArgumentTypeError),
        (None, errors.ArgumentTypeError),
        (4, errors.ArgumentTypeError),
        ("1234", errors.ArgumentTypeError),
    ],
)
def test_what_cannot_be_wrapped_is_refused(array, error):
    before = live()
    with pytest.raises(error):
        Storage.wrap(array)
    assert live() <= before


# ---- aliases and capsules ----


def test_an_alias_is_an_export_without_a_lease():
    storage = filled((6, 4), "i16")
    view = storage.alias()
    with storage.write() as lease:
        lease.numpy()[...] = 5
        assert (view.numpy() == 5).all()
    view.numpy()[0, 0] = 9
    assert view.address == storage.address
    paged = storage.alias((3, 2, 4))
    assert paged.numpy().shape == (3, 2, 4) and paged.strides == (8, 4, 1)
    assert storage.alias([24]).numpy()[0] == 9
    assert storage.alias((1,) * 7 + (24,)).ndim == 8
    del storage
    assert paged.numpy()[0, 0, 0] == 9


@pytest.mark.parametrize(
    "shape", [(5, 4), (24, 2), (0,), (-24,), (2**40, 2**40), (1,) * 8 + (24,), 24, "24", (24.0,), (True, 24)]
)
def test_an_alias_of_another_size_is_refused(shape):
    storage = Storage((6, 4))
    with pytest.raises(errors.LkvError, match="shape"):
        storage.alias(shape)
    assert storage.refcount == 1


def test_a_capsule_holds_the_memory():
    storage = filled((6, 4), "f32")
    capsule = storage.capsule()
    content = storage.read_host()
    del storage
    again = Storage.from_capsule(capsule)
    del capsule
    assert again.read_host() == content
    assert (again.shape, again.dtype.name, again.refcount) == ((6, 4), "float32", 1)
    for wrong in (None, 4, again, np.zeros(4).__dlpack__(), again.read().capsule()):
        with pytest.raises(errors.ArgumentTypeError, match="capsule"):
            Storage.from_capsule(wrong)
