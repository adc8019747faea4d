"""Real consumers of the C interface, built against the installed package: C, C++, Cython, Rust, an embedder."""

import ctypes
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from Cython.Compiler.Main import compile as to_c
from helpers import compilers

import lkv
from lkv import Lease, Storage
from lkv.errors import ArgumentTypeError, LeaseEndedError, LeaseTimeoutError, PoisonedError

READ, WRITE, TRY, FOREVER = 0, 1, 0, -1
U8, F32 = 11, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("capi")


@pytest.fixture(scope="module")
def consumer(folder):
    return compilers.load(compilers.extension(compilers.CAPI / "consumer.c", folder, "consumer"), "consumer")


@pytest.fixture(scope="module")
def device(folder):
    module = compilers.load(compilers.extension(compilers.CAPI / "device.c", folder, "device"), "device")
    module.add("veiled")
    return module


@pytest.fixture(scope="module")
def cpp(folder):
    built = compilers.extension(compilers.CAPI / "consumer.cpp", folder, "consumer_cpp")
    return compilers.load(built, "consumer_cpp")


@pytest.fixture(scope="module")
def cython(folder):
    name, source = "consumer_cython", folder / "consumer_cython.c"
    beside_lkv = str(Path(lkv.__file__).parents[1])  # an editable install is not on the path that Cython searches
    to_c(str(compilers.CAPI / f"{name}.pyx"), output_file=str(source), language_level=3, include_path=[beside_lkv])
    return compilers.load(compilers.extension(source, folder, name, flags=["-Wall", "-Werror"]), name)


@pytest.fixture(scope="module")
def rust(folder):
    out = folder / "libconsumer.so"
    flags = ["--edition", "2021", "-D", "warnings", "--crate-type", "cdylib", "-O"]
    compilers.run(compilers.tool("rustc"), *flags, compilers.CAPI / "consumer.rs", "-o", out)
    library = ctypes.PyDLL(str(out))  # keeps the GIL during a call
    library.attach.argtypes = [ctypes.c_size_t, ctypes.c_uint32]
    library.number_rows.argtypes = [ctypes.c_size_t]
    library.try_rows.argtypes = [ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64]
    library.explain.argtypes = [ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t]
    assert library.attach(table_address(), 0) == 0
    return library


def table_address():
    """The documented way from Python to the table, for those who do not speak Python's C interface."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(lkv._storage._C_API, b"lkv._storage._C_API")
    assert lkv.c_api_address() == address
    return address


def header_members():
    text = (Path(lkv.get_include()) / "lkv.h").read_text(encoding="utf-8")
    table = re.search(r"typedef struct lkv_api {(.*?)} lkv_api;", re.sub(r"/\*.*?\*/", "", text, flags=re.S), re.S)[1]
    return [name for name in re.findall(r"\(\*(\w+)\)\(", table) if name != "deleter"]


# ---- the table and its versions ----


def test_the_table_says_its_version(consumer):
    major, minor, size = consumer.table()
    assert (major, minor) == lkv._storage.build_info()["abi"]
    assert size == 16 + 8 * len(header_members())


def test_members_past_the_end_of_a_table_are_not_there(consumer):
    names = header_members()
    assert consumer.members(consumer.table()[2]) == names
    for count in range(len(names)):
        assert consumer.members(16 + 8 * count) == names[:count]
        assert consumer.members(16 + 8 * count + 7) == names[:count]


def test_a_member_past_the_end_is_never_called(consumer):
    capsule = Storage(4).capsule()
    full = consumer.table()[2]
    assert consumer.release_rows_if_there(capsule, full) is True
    assert consumer.release_rows_if_there(capsule, full - 8) is False


def test_a_library_that_is_too_old_is_an_import_error_naming_both_versions(consumer):
    major, minor = lkv._storage.build_info()["abi"]
    with pytest.raises(ImportError, match=rf"compiled for C ABI {major}\.{minor + 3}, .* has {major}\.{minor}"):
        consumer.import_minor(minor + 3)
    consumer.import_minor(minor)


@pytest.mark.parametrize(
    ("field", "offset", "change"), [("another major version", 0, 1), ("an older major version", 0, -1)]
)
def test_a_library_of_another_major_version_is_an_import_error_naming_both(consumer, folder, field, offset, change):
    major, minor = lkv._storage.build_info()["abi"]
    script = f"""
import ctypes, lkv
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
name = b"lkv._storage._C_API"
table = api.PyCapsule_GetPointer(lkv._storage._C_API, name)
size = ctypes.c_size_t.from_address(table + 8).value
copy = ctypes.create_string_buffer(ctypes.string_at(table, size), size)
ctypes.c_uint32.from_buffer(copy, {offset}).value += {change}
lkv._storage._C_API = api.PyCapsule_New(ctypes.addressof(copy), name, None)
try:
    import consumer
except ImportError as error:
    print(error)
"""
    said = compilers.run(sys.executable, "-c", script, env=compilers.environment(PYTHONPATH=str(folder)))
    assert f"compiled for C ABI {major}.{minor}, the installed library has {major + change}.{minor}" in said


def test_every_function_answers_bad_arguments_with_a_status_and_a_message(folder):
    refusals = compilers.load(compilers.extension(compilers.CAPI / "refusals.c", folder, "refusals"), "refusals")
    before = lkv._storage.host_memory()["live_buffers"]
    answers = refusals.walk()
    assert {function for function, *_ in answers} == set(header_members())
    assert len(answers) > 150
    for function, arguments, got, wanted, message, clean in answers:
        assert got == wanted, f"{function}({arguments}): {message}"
        assert clean, f"{function}({arguments}): the output is not NULL"
        assert got == "LKV_OK" or message, f"{function}({arguments}): no message"
    assert lkv._storage.host_memory()["live_buffers"] == before


# ---- storages and leases across the border ----


def test_a_storage_of_python_is_a_buffer_in_c(consumer):
    storage = Storage((4, 8), "float32")
    capsule = storage.capsule()
    info = consumer.info(storage.handle)
    assert (info["id"], info["data"], info["nbytes"]) == (storage.id, storage.address, 128)
    assert (info["rows"], info["row_bytes"], info["dtype"], info["refcount"]) == (4, 32, F32, 2)
    del capsule
    assert storage.refcount == 1


def test_the_slots_of_a_cache_are_buffers_in_c(consumer):
    cache = lkv.LatentKvCache.with_capacity(2, 8, [(16,), (4,)], dtype="uint8")
    lease = consumer.acquire(cache.slot_storage(1, 0).capsule(), WRITE, 0, 1, TRY)
    assert consumer.add(lease, 7) == 0
    with pytest.raises(LeaseTimeoutError):
        cache.step(1, timeout=0.001)  # one queue for all slots of all layers
    with pytest.raises(LeaseTimeoutError):
        cache.slot_storage(0, 1).write(0, 1, timeout=0)
    consumer.end(lease)
    consumer.add(consumer.acquire(cache.slot_storage(1, 1).capsule(), WRITE, 0, 1, TRY), 5)
    cache.note_write(1, 1)
    cache.note_write(0, 1)
    assert cache.advance_by(1) == 1
    with cache.read(1) as view:
        assert [rows.tolist() for rows in view.numpy()] == [[[7] * 16], [[5] * 4]]


@pytest.mark.parametrize(
    ("rows", "row_bytes", "dtype", "shape"), [(4, 8, U8, (4, 8)), (4, 1, U8, (4,)), (3, 8, F32, (3, 2))]
)
def test_a_buffer_of_c_is_a_storage_in_python(consumer, rows, row_bytes, dtype, shape):
    live = lkv._storage.host_memory()["live_buffers"]
    capsule = consumer.make_buffer(rows, row_bytes, dtype, False)
    storage = Storage.from_capsule(capsule)
    assert (storage.shape, storage.rows, storage.nbytes, storage.refcount) == (shape, rows, rows * row_bytes, 2)
    del capsule
    assert storage.refcount == 1
    with storage.write() as lease:
        lease.numpy()[...] = 3
    assert storage.version == 1
    del storage, lease
    assert lkv._storage.host_memory()["live_buffers"] == live


def test_memory_of_c_is_given_back_when_python_drops_the_last_export(consumer):
    before = consumer.deleted()
    array = Storage.from_capsule(consumer.make_buffer(4, 8, U8, True)).alias().numpy()
    assert consumer.deleted() == before
    assert array.sum() == 0
    del array
    assert consumer.deleted() == before + 1


def test_a_capsule_of_another_name_is_refused(consumer):
    buffer = Storage(4).capsule()
    with pytest.raises(ArgumentTypeError, match=r"expected one named 'lkv\.lease'"):
        Lease.from_capsule(buffer)
    with pytest.raises(ArgumentTypeError, match=r"expected one named 'lkv\.buffer'"):
        Storage.from_capsule(lkv._storage._C_API)
    with pytest.raises(ArgumentTypeError):
        Lease.from_capsule(None)
    with pytest.raises(ValueError, match="incorrect name"):
        consumer.span(buffer)


def test_a_lease_of_python_is_used_and_ended_by_c(consumer):
    storage = Storage((8, 4))
    lease = storage.write(2, 5)
    capsule = lease.capsule()
    assert consumer.span(capsule) == (storage.address + 8, 12, 2, 5, WRITE)
    consumer.add(capsule, 9)
    assert lease.numpy().tolist() == [[9] * 4] * 3
    consumer.end(capsule)
    assert not lease.active
    assert storage.version == 1
    with pytest.raises(LeaseEndedError):
        lease.numpy()
    with pytest.raises(RuntimeError, match="LKV_E_ENDED"):
        consumer.span(capsule)


def test_a_lease_of_c_is_used_and_ended_by_python(consumer):
    storage = Storage((8, 4))
    capsule = consumer.acquire(storage.capsule(), WRITE, 2, 5, TRY)
    with Lease.from_capsule(capsule) as lease:
        assert (lease.lo, lease.hi, lease.mode, lease.shape, lease.storage) == (2, 5, "write", (3, 4), storage)
        lease.numpy()[...] = 6
        with pytest.raises(LeaseTimeoutError):
            storage.read(timeout=0)
    assert storage.version == 1
    with pytest.raises(RuntimeError, match="LKV_E_ENDED"):
        consumer.span(capsule)
    assert storage.read_host(2, 3) == bytes([6] * 4)
    assert storage.read_host(1, 2) == bytes(4)


def test_a_read_lease_of_c_exports_read_only_arrays(consumer):
    storage = Storage((8, 4))
    lease = Lease.from_capsule(consumer.acquire(storage.capsule(), READ, 0, 8, TRY))
    assert lease.readonly
    assert not lease.numpy().flags.writeable


def test_a_lease_that_c_downgraded_no_longer_exports_writable_arrays(consumer):
    lease = Storage((8, 4)).write()
    consumer.downgrade(lease.capsule())
    assert lease.mode == "read"
    assert not lease.numpy().flags.writeable
    with pytest.raises(BufferError):
        lease.__dlpack__()


def test_the_right_lives_as_long_as_the_longer_of_the_two_handles(consumer):
    storage = Storage((8, 4))
    capsule = consumer.acquire(storage.capsule(), WRITE, 0, 8, TRY)
    lease = Lease.from_capsule(capsule)
    del capsule
    with pytest.raises(LeaseTimeoutError):
        storage.read(timeout=0)
    array = lease.numpy()
    del lease
    with pytest.raises(LeaseTimeoutError):
        storage.read(timeout=0)
    del array
    storage.read(timeout=0).release()


def test_a_write_that_c_says_failed_poisons_the_storage(consumer):
    storage = Storage((8, 4))
    consumer.poison(consumer.acquire(storage.capsule(), WRITE, 0, 8, TRY))
    assert (storage.poisoned, storage.version) == (True, 0)
    with pytest.raises(PoisonedError):
        storage.read()
    with pytest.raises(RuntimeError, match="LKV_E_POISONED"):
        consumer.acquire(storage.capsule(), READ, 0, 1, FOREVER)
    storage.clear_poison()
    assert consumer.add(consumer.acquire(storage.capsule(), READ, 0, 8, TRY), 0) == 0


def test_a_lease_is_taken_in_one_thread_and_released_in_another(consumer):
    assert consumer.acquire_here_release_there(Storage((8, 4)).capsule()) == ("LKV_E_TIMEOUT", "LKV_OK")


# ---- a device from C ----


def test_a_device_that_c_registers_is_used_through_its_own_entries_only(device):
    device.round_trip("veiled:0")
    allocations, copies, fills = device.state()
    assert allocations == 0  # all given back
    assert copies >= 7
    assert fills == 2


def test_a_device_is_registered_once(device):
    with pytest.raises(RuntimeError, match=r"LKV_E_EXISTS: .*veiled:0 is registered already"):
        device.add("veiled")


def test_python_sees_the_device_and_never_touches_its_memory(device):
    storage = Storage((4, 8), device="veiled:0")
    assert str(storage.device) == "veiled:0"
    storage.write_host(bytes(range(32)))
    assert storage.read_host(1, 2) == bytes(range(8, 16))
    assert storage.copy("cpu").read_host() == bytes(range(32))
    with storage.read() as lease, pytest.raises(lkv.errors.DeviceMismatchError, match="host memory"):
        lease.numpy()
    with storage.read() as lease, pytest.raises(BufferError):
        memoryview(lease)
    del storage, lease
    assert device.state()[0] == 0


def test_a_cache_lives_on_the_device(device):
    cache = lkv.LatentKvCache.with_capacity(2, 8, [(4,), (2,)], dtype="float32", device="veiled:0")
    rows = [np.arange(8, dtype="f4").reshape(2, 4), np.arange(4, dtype="f4").reshape(2, 2)]
    with cache.step(2) as step:
        for layer in range(2):
            step.append(layer, rows)
    assert np.frombuffer(cache.slot_storage(1, 0).read_host(0, 2), "f4").tolist() == rows[0].ravel().tolist()
    assert np.frombuffer(cache.slot_storage(1, 1).read_host(0, 2), "f4").tolist() == rows[1].ravel().tolist()
    cache.clear()
    assert device.state()[0] == 0


# ---- C++ ----


def test_cpp_threads_append_and_read_python_s_storage_while_the_gil_is_held(cpp):
    storage = Storage((200, 64), "float32")
    assert cpp.decode(storage.capsule()) == 3 * 200
    assert storage.version == 200
    with storage.read() as lease:
        assert (lease.numpy() == np.arange(200, dtype="f4")[:, None]).all()


def test_a_cpp_exception_inside_a_write_poisons_the_storage(cpp):
    storage = Storage((4, 4))
    with pytest.raises(RuntimeError, match="half-way"):
        cpp.fail(storage.capsule())
    assert storage.poisoned
    assert storage.refcount == 1


def test_a_storage_that_cpp_made_is_python_s(cpp):
    storage = Storage.from_capsule(cpp.ramp(3))
    assert (storage.shape, str(storage.dtype)) == ((3, 2), "float32")
    with storage.read() as lease:
        assert lease.numpy().tolist() == [[0, 1], [2, 3], [4, 5]]


# ---- Cython ----


def test_cython_sees_the_table(cython, consumer):
    assert cython.table() == consumer.table()


def test_cython_reaches_into_the_objects_it_cimports(cython):
    storage = Storage((6, 4))
    cython.fill(storage, 1, 3, 5)
    with storage.read(1, 4) as lease:
        assert cython.total(lease) == 5 * 8
        assert cython.geometry(lease) == ([3, 4], [4, 1], storage.address + 4)
    with pytest.raises(RuntimeError, match="LKV_E_ENDED"):
        cython.total(lease)
    with pytest.raises(RuntimeError, match="LKV_E_INVALID"):
        cython.fill(storage, 5, 7, 1)


# ---- Rust ----


def test_rust_threads_write_rows_while_the_gil_is_held(rust):
    storage = Storage((50, 16))
    assert rust.number_rows(storage.handle) == 0
    with storage.read() as lease:
        assert (lease.numpy() == np.arange(50, dtype="u1")[:, None]).all()
    del lease
    assert (storage.version, storage.refcount) == (50, 1)


def test_rust_is_told_what_went_wrong(rust):
    storage = Storage((8, 4))
    text = ctypes.create_string_buffer(200)
    status = rust.try_rows(storage.handle, 4, 9)
    rust.explain(status, text, 200)
    assert text.value == b"LKV_E_INVALID: rows: [4, 9) is not within [0, 8)"
    with storage.read(0, 1):
        assert rust.try_rows(storage.handle, 0, 8) == 3
        assert rust.try_rows(storage.handle, 1, 8) == 0


def test_rust_refuses_a_library_that_is_too_old(rust):
    assert rust.attach(table_address(), lkv._storage.build_info()["abi"][1] + 1) == 15


# ---- embedding ----


def test_a_program_that_embeds_python_decodes_in_threads_without_the_gil(folder):
    out = folder / "embed"
    link = compilers.embed_flags()
    flags = [*compilers.C11, "-O1", "-g", *compilers.includes()]
    compilers.run(compilers.tool("cc"), *flags, compilers.CAPI / "embed.c", "-o", out, *link)
    assert compilers.run(out, env=compilers.embedded_environment()) == "ok\n"
