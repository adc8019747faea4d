import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.ids import named
from helpers.memory import resident, resident_of
from helpers.storages import filled, live, settled

from lkv import LatentKvCache, Storage, errors
from lkv._storage import alloc_id_next, host_memory, set_host_limit
from lkv.devices import DeviceLocation
from lkv.dtypes import ALL

PAGE = mmap.PAGESIZE


# ---- geometry ----


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "nbytes"),
    [
        (1, "u8", 1, 1),
        (2**31, "u8", 2**31, 2**31),
        (2**32, "u8", 2**32, 2**32),
        ((2**31, 4), "f32", 2**31, 2**35),
        ((3, 2**31), "i16", 3, 3 * 2**32),
        ((131072, 576), "bf16", 131072, 131072 * 576 * 2),
        ((1, 1, 1, 1, 1, 1, 1, 7), "f64", 1, 56),
    ],
)
def test_sizes_are_exact_and_take_address_space_only(shape, dtype, rows, nbytes):
    before = resident()
    storage = Storage(shape, dtype)
    assert (storage.rows, storage.nbytes) == (rows, nbytes)
    assert storage.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert storage.address % 256 == 0
    assert resident() - before < 8 << 20


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (2**63, "u8"),
        (2**62, "i16"),
        (2**60, "f64"),
        ((2**32, 2**31), "u8"),
        ((2**31, 2**31, 2), "u8"),
        ((2**21,) * 3, "u8"),
        (2**64, "u8"),
        (2**70, "u8"),
        (0, "u8"),
        (-1, "u8"),
        ((4, 0), "u8"),
        ((4, -4), "f32"),
        ((), "u8"),
        ((1,) * 9, "u8"),
    ],
)
def test_a_size_that_is_none_is_a_geometry_error_and_allocates_nothing(shape, dtype):
    before = live()
    with pytest.raises(errors.GeometryError, match="shape"):
        Storage(shape, dtype)
    assert live() <= before


@pytest.mark.parametrize("shape", [2**61, (2**31, 2**30), (2**15,) * 4])
def test_a_size_that_no_machine_has_is_out_of_memory(shape):
    before = live()
    with pytest.raises(errors.OutOfMemoryError) as caught:
        Storage(shape)
    assert caught.value.requested == np.prod([int(n) for n in np.atleast_1d(np.array(shape, object))])
    assert isinstance(caught.value, MemoryError)
    assert live() <= before


def test_the_last_row_of_more_than_4_gib_is_written_and_read():
    storage = Storage((5 << 20, 1024))
    before = resident()
    storage.write_host(bytes(range(256)) * 4, (5 << 20) - 1)
    assert storage.read_host((5 << 20) - 1) == bytes(range(256)) * 4
    assert storage.read_host((4 << 20) - 1, (4 << 20) + 1) == bytes(2048)
    with storage.read() as lease:
        assert lease.numpy()[-1, -1] == 255
        assert lease.numpy().nbytes == 5 << 30
    assert resident() - before < 16 << 20


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4096, 65535, 65536, 1 << 20, (8 << 20) + 3])
def test_fresh_memory_is_zero_and_aligned_also_where_another_storage_was(nbytes):
    for _ in range(3):
        storage = Storage(nbytes)
        assert storage.address % 256 == 0
        assert storage.read_host() == bytes(nbytes)
        storage.write_host(b"\xff" * nbytes)
        del storage


def test_huge_pages_change_nothing_that_can_be_seen():
    storage = Storage((4096, 1024), "f32", huge_pages=True)
    storage.write_host(b"\1" * 4096, 4095)
    assert storage.read_host(4095) == b"\1" * 4096
    assert storage.read_host(0, 1) == bytes(4096)
    assert storage.address % 256 == 0


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_element_type_has_its_size(dtype):
    storage = Storage((3, 5), dtype)
    assert storage.dtype is dtype
    assert storage.nbytes == 15 * dtype.itemsize
    assert storage.device == DeviceLocation("cpu")
    assert repr(storage).startswith(f"Storage((3, 5), {dtype}, cpu, id {storage.id}, version 0")


def test_rows_are_counted_along_the_axis():
    storage = Storage((1, 2, 8, 4), "f32", axis=2)
    assert (storage.rows, storage.axis) == (8, 2)
    with storage.write(2, 5) as lease:
        array = lease.numpy()
        assert array.shape == (1, 2, 3, 4)
        array[...] = np.arange(24).reshape(array.shape)
    with storage.read() as lease:
        whole = lease.numpy()
        assert (whole[:, :, 2:5].reshape(-1) == np.arange(24)).all()
        assert not whole[:, :, :2].any() and not whole[:, :, 5:].any()
    for refused in (storage.read_host, storage.release_rows, lambda: storage.write_host(bytes(4))):
        with pytest.raises(errors.ShapeMismatchError, match="axis 2"):
            refused()


# ---- identity ----


def test_ids_are_never_used_twice():
    ids = [Storage(1).id for _ in range(100)]
    assert sorted(set(ids)) == ids
    ids = [alloc_id_next() for _ in range(100)]
    assert sorted(set(ids)) == ids and ids[0] >= 1


def test_storages_are_equal_when_their_memory_is_the_same_object():
    storage = Storage(4)
    same = Storage.from_capsule(storage.capsule())
    assert same == storage and hash(same) == hash(storage) and same is not storage
    assert storage != Storage(4) and storage != 4
    assert same.id == storage.id and same.handle == storage.handle


def test_the_version_moves_once_for_every_completed_write():
    storage = Storage((4, 2))
    storage.write_host(b"ab")
    assert storage.version == 1
    with storage.write() as lease:
        lease.numpy()[...] = 1
        lease.numpy()[...] = 2
        assert storage.version == 1
    assert storage.version == 2
    lease.release()
    assert storage.version == 2
    with storage.read():
        pass
    storage.read_host()
    assert storage.version == 2
    lease = storage.write()
    lease.downgrade()
    assert storage.version == 3
    lease.release()
    assert storage.version == 3
    storage.bump_version()
    assert storage.version == 4
    storage.write()
    assert storage.version == 5
    storage.release_rows()
    assert storage.version == 6


def test_the_reference_count_tells_who_holds_the_memory():
    storage = Storage(4, "f32")
    assert storage.refcount == 1
    lease = storage.read()
    held = storage.refcount
    assert held > 1
    array = lease.numpy()
    assert storage.refcount == held
    capsule = lease.__dlpack__(max_version=(1, 0))
    assert storage.refcount > held
    del array, capsule
    lease.release()
    assert storage.refcount == held
    del lease
    assert storage.refcount == 1
    view = storage.alias()
    assert storage.refcount == 2
    del view
    capsule = storage.capsule()
    assert storage.refcount == 2
    del capsule
    assert storage.refcount == 1


# ---- poison ----


def test_an_exception_in_a_write_poisons_the_storage_until_it_is_cleared():
    storage = Storage(8)
    with pytest.raises(ZeroDivisionError), storage.write(0, 4):
        1 / 0  # noqa: B018
    assert storage.poisoned and storage.version == 0
    assert "poisoned" in repr(storage)
    for refused in (storage.read, storage.read_host, storage.copy, lambda: storage.read(6, 8, timeout=0)):
        with pytest.raises(errors.PoisonedError):
            refused()
    with storage.write(timeout=0) as lease:
        lease.numpy()[...] = 3
    assert storage.poisoned
    storage.clear_poison()
    assert storage.read_host() == b"\3" * 8
    assert storage.version == 1


def test_an_exception_in_a_read_or_after_a_downgrade_poisons_nothing():
    storage = Storage(8)
    with pytest.raises(ZeroDivisionError), storage.read():
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), storage.write() as lease:
        lease.downgrade()
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), storage.write() as lease:
        lease.release()
        1 / 0  # noqa: B018
    assert not storage.poisoned
    assert storage.version == 2


# ---- claims ----


def test_a_claim_has_one_winner():
    storage = Storage(1000)
    gate = threading.Barrier(8)

    def claim_all(_):
        won = 0
        gate.wait()
        for rows in range(1000):
            won += storage.claim(rows, rows + 1)
        return won

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(claim_all, range(8)))
    # A thread that runs ahead of the others finds a lower claimed length; all together no row is claimed twice.
    assert sum(won) == storage.claimed
    assert storage.claim(storage.claimed, storage.rows)
    assert storage.claimed == 1000


def test_a_claim_from_another_length_fails_and_moves_nothing():
    storage = Storage(10)
    assert storage.claim(0, 4)
    assert not storage.claim(0, 5)
    assert not storage.claim(5, 6)
    assert storage.claim(4, 4)
    assert storage.claimed == 4
    for wrong in [(4, 3), (4, 11), (-1, 4), (2**62, 2**62)]:
        with pytest.raises(errors.GeometryError, match="claim"):
            storage.claim(*wrong)
    assert storage.claimed == 4


# ---- bytes in and out ----


def test_copies_are_independent():
    storage = filled((16, 8), "bf16")
    copy = storage.copy()
    assert copy != storage and copy.id != storage.id
    assert (copy.shape, copy.dtype, copy.axis) == (storage.shape, storage.dtype, storage.axis)
    assert copy.read_host() == storage.read_host()
    copy.write_host(bytes(16), 3)
    assert storage.read_host(3, 4) != bytes(16)
    strided = Storage((1, 2, 8, 4), "f32", axis=2)
    assert strided.copy("cpu").axis == 2


def test_bytes_are_written_and_read_by_whole_rows():
    storage = Storage((6, 4))
    storage.write_host(b"abcdefgh", 2)
    assert storage.read_host(2, 4) == b"abcdefgh"
    assert storage.read_host(1, 3) == b"\0\0\0\0abcd"
    assert storage.read_host(3) == b"efgh" + bytes(8)
    assert storage.read_host(2, 2) == b""
    for source in (
        bytearray(b"ijkl"),
        memoryview(b"ijkl"),
        np.frombuffer(b"ijkl", np.uint8),
        np.array([[105], [106]], "i2"),
    ):
        storage.write_host(source, 5)
        assert storage.read_host(5) == bytes(memoryview(source).cast("B"))


@pytest.mark.parametrize("empty", [b"", bytearray(), memoryview(b""), np.zeros((0, 4), np.uint8)], ids=type)
def test_writing_nothing_does_nothing(empty):
    storage = Storage((6, 4))
    storage.write_host(empty, 6)
    assert storage.version == 0


@pytest.mark.parametrize(
    ("data", "lo", "error"),
    [
        (b"abc", 0, errors.ShapeMismatchError),
        (b"abcde", 0, errors.ShapeMismatchError),
        (bytes(28), 0, errors.CapacityError),
        (bytes(4), 6, errors.CapacityError),
        (bytes(8), 5, errors.CapacityError),
        (bytes(4), -1, errors.CapacityError),
        (b"", 7, errors.CapacityError),
        (bytes(4), 2**62, errors.CapacityError),
    ],
)
def test_a_write_that_does_not_fit_changes_nothing(data, lo, error):
    storage = filled((6, 4))
    before = storage.read_host()
    with pytest.raises(error, match="data"):
        storage.write_host(data, lo)
    assert storage.read_host() == before and storage.version == 1 and not storage.poisoned


@pytest.mark.parametrize("data", ["abcd", None, 4, 4.0, [1, 2, 3, 4], memoryview(b"abcdefgh")[::2]], ids=named)
def test_what_is_no_run_of_bytes_is_refused_by_name(data):
    storage = Storage((6, 4))
    with pytest.raises(errors.LkvError, match="data"):
        storage.write_host(data)
    assert storage.version == 0


# ---- giving pages back ----


def test_released_rows_read_as_zeros_and_are_no_longer_resident():
    row = PAGE // 4
    storage = filled((256, row))
    before = storage.read_host()
    assert resident_of(storage) == 64 * PAGE
    storage.release_rows(3, 202)
    after = storage.read_host()
    assert after == before[: 3 * row] + bytes(199 * row) + before[202 * row :]
    # Reading maps the zero page; that is not memory. Fresh pages count only once they are written.
    storage.release_rows(4, 200)
    assert resident_of(storage) <= 16 * PAGE
    storage.write_host(b"\7" * row, 100)
    assert storage.read_host(100, 101) == b"\7" * row


def test_resident_memory_of_the_process_falls_by_what_is_released():
    storage = Storage((64, 1 << 20))
    storage.write_host(b"\1" * (64 << 20))
    full = resident()
    storage.release_rows()
    assert full - resident() > 60 << 20
    assert storage.read_host(63) == bytes(1 << 20)


@pytest.mark.parametrize("size", [16, PAGE, 65536 - 1, 65536 + 1])
def test_rows_of_a_small_storage_are_zeroed_too(size):
    storage = Storage(size)
    storage.write_host(b"\1" * size)
    storage.release_rows(1, size - 1)
    assert storage.read_host() == b"\1" + bytes(size - 2) + b"\1"


def test_rows_in_use_are_not_released():
    storage = filled((8, PAGE))
    before = storage.read_host()
    for take in (storage.read, storage.write):
        with take(2, 3), pytest.raises(errors.LeaseTimeoutError, match="release_rows"):
            storage.release_rows(0, 4)
    assert storage.read_host() == before
    with storage.read(2, 3):
        storage.release_rows(3, 4)
    assert storage.read_host(3, 4) == bytes(PAGE)
    storage.release_rows(5, 5)


# ---- limits and leaks ----


@pytest.fixture
def limit():
    yield set_host_limit
    set_host_limit(None)


def test_the_host_limit_is_an_out_of_memory_error_that_leaks_nothing(limit):
    before = settled()
    limit(before[1] + 1000)
    kept = Storage(600)
    with pytest.raises(errors.OutOfMemoryError, match="cpu: out of memory: 500 bytes") as caught:
        Storage(500, "u8")
    assert (caught.value.device, caught.value.requested) == ("cpu", 500)
    assert caught.value.free == host_memory()["free"] == 400
    with pytest.raises(errors.OutOfMemoryError):
        kept.copy()
    with pytest.raises(errors.OutOfMemoryError):
        LatentKvCache.with_capacity(4, 8, [(4,), (2,)], "f32")
    assert live() == (before[0] + 1, before[1] + 600)
    Storage(400)
    del kept
    assert live() == before
    limit(0)
    with pytest.raises(errors.OutOfMemoryError):
        Storage(1)
    limit(None)
    Storage(1 << 20)
    assert live() == before


def test_memory_is_counted_while_it_is_held():
    before = settled()
    storage = Storage((3, 7), "f64")
    assert live() == (before[0] + 1, before[1] + 168)
    array = storage.read().numpy()
    del storage
    assert live() == (before[0] + 1, before[1] + 168)
    del array
    assert live() == before


def test_a_hundred_thousand_storages_come_and_go():
    before, grown = settled(), resident()
    for _ in range(100_000):
        Storage(64)
    assert live() == before
    assert resident() - grown < 4 << 20


def test_mappings_come_and_go():
    before, grown = settled(), resident()
    for _ in range(3000):
        Storage((1024, 1024)).write_host(bytes(1024))
    assert live() == before
    assert resident() - grown < 8 << 20
