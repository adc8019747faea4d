"""The CUDA backend: what it says when it cannot be had, its memory, its errors, and how much it asks of the device."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda import LOCATIONS, MODE, REASON, SIMULATOR, needs_simulator, on_host, reset_cuda, rows_of

import lkv.cli
from lkv import KvCache, LatentKvCache, Storage
from lkv._storage import host_memory
from lkv.devices import DeviceLocation, available, cuda
from lkv.errors import DeviceError, DeviceUnavailableError, OutOfMemoryError

if MODE is None:
    pytest.skip(REASON, allow_module_level=True)

import cupy

LAUNCH_FAILURE = 719
MIB = 1 << 20


@pytest.fixture(autouse=True)
def lazily():
    if SIMULATOR is not None:
        SIMULATOR.schedule("lazy")
    yield
    reset_cuda()


def collected():
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    Storage(1, device="cuda:0")  # what was freed before goes back now
    cupy.get_default_memory_pool().free_all_blocks()


# ---- when it cannot be had ----


@needs_simulator
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (35, r"the NVIDIA driver is for CUDA 13\.2, CuPy needs \d+\.\d+"),
        (100, "there is no NVIDIA GPU$"),
        (999, "the CUDA runtime failed: cudaErrorUnknown"),
    ],
)
def test_what_is_missing_is_said(status, message):
    unknown = DeviceLocation("cuda", 9)
    SIMULATOR.fail("cudaGetDeviceCount", status)
    with pytest.raises(DeviceUnavailableError, match=message) as caught:
        cuda.require(unknown)
    assert str(caught.value).startswith("device: 'cuda:9' is unavailable: ")
    SIMULATOR.fail("cudaGetDeviceCount", status)
    [(location, text)] = cuda.available()
    assert location == DeviceLocation("cuda") and re.search(message, text) and text.startswith("unavailable: ")


@needs_simulator
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")
def test_a_machine_without_a_driver_says_so():
    code = "from lkv.devices import available\nprint(*available()[1])"
    listed = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert listed == "cuda:0 unavailable: there is no NVIDIA driver"


@needs_simulator
def test_hidden_gpus_are_hinted_at(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    SIMULATOR.fail("cudaGetDeviceCount", 100)
    with pytest.raises(DeviceUnavailableError, match="no NVIDIA GPU; CUDA_VISIBLE_DEVICES is ''"):
        cuda.require(DeviceLocation("cuda", 9))


def test_an_ordinal_beyond_the_last_is_refused():
    last = cupy.cuda.runtime.getDeviceCount() - 1
    with pytest.raises(DeviceUnavailableError, match=rf"'cuda:99' is unavailable: there .*'cuda:{last}'"):
        Storage(4, device="cuda:99")


def test_a_broken_cupy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailableError, match=r"CuPy is not importable.*latent-kv\[cuda12\]"):
        cuda.require(DeviceLocation("cuda", 9))


def test_every_device_is_listed():
    listed = [(str(location), text) for location, text in available() if location.type == "cuda"]
    assert [location for location, _ in listed] == [f"cuda:{i}" for i in range(cupy.cuda.runtime.getDeviceCount())]
    assert all(re.fullmatch(r".+, \d+\.\d GiB, CuPy \d+\..+", text) for _, text in listed), listed


def test_lkv_info_lists_devices(capsys):
    assert lkv.cli.main(["info", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert {"cpu", *LOCATIONS} <= {device["location"] for device in devices}


def test_a_cpu_path_never_imports_cupy():
    code = (
        "import sys, numpy as np, lkv, lkv.devices\n"
        "cache = lkv.LatentKvCache.with_capacity(1, 4, [(2,)], 'float32')\n"
        "with cache.step(1) as step: step.append(0, [np.ones((1, 2), 'float32')])\n"
        "cache.gather(0, [0]); cache.to('cpu'); lkv.Storage(4).copy('cpu')\n"
        "print('cupy' in sys.modules, 'cupy_backends' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False False"


# ---- memory ----


def test_memory_comes_from_the_pool_in_use():
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        storage = Storage(3 * MIB, device="cuda:0")
    assert pool.used_bytes() == 3 * MIB
    del storage
    cupy.cuda.runtime.deviceSynchronize()
    gc.collect()
    assert pool.used_bytes() == 0


def test_a_limit_of_the_pool_counts():
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        pool.set_limit(size=2 * MIB)
        kept = Storage(MIB, device="cuda:0")
        with pytest.raises(
            OutOfMemoryError, match=r"cuda:0: 2,097,152 bytes asked for, 1,048,576 of .* free"
        ) as caught:
            Storage(2 * MIB, device="cuda:0")
        assert (caught.value.device, caught.value.requested, caught.value.free) == ("cuda:0", 2 * MIB, MIB)
        assert kept.nbytes == MIB


@needs_simulator
def test_running_out_says_how_much_there_was():
    collected()
    SIMULATOR.total(0, SIMULATOR.used(0) + 4 * MIB)
    kept = Storage(MIB, device="cuda:0")
    with pytest.raises(OutOfMemoryError) as caught:
        Storage(4 * MIB, device="cuda:0")
    assert (caught.value.device, caught.value.requested, caught.value.free) == ("cuda:0", 4 * MIB, 3 * MIB)
    assert isinstance(caught.value, MemoryError)
    assert kept.nbytes == MIB and Storage(3 * MIB, device="cuda:0").nbytes == 3 * MIB


@needs_simulator
@pytest.mark.parametrize("fits", range(0, 8, 3))
def test_a_cache_that_cannot_be_built_is_freed_whole(fits):
    collected()
    before, buffers = SIMULATOR.used(0), host_memory()["live_buffers"]
    SIMULATOR.total(0, before + fits * MIB)
    with pytest.raises(OutOfMemoryError):
        LatentKvCache.with_capacity(4, 1024, [(256,), (256,)], "float32", "cuda:0")
    cupy.get_default_memory_pool().free_all_blocks()
    assert (SIMULATOR.used(0), host_memory()["live_buffers"]) == (before, buffers)


@needs_simulator
def test_memory_that_waits_to_be_freed_is_found_when_it_is_short():
    collected()
    SIMULATOR.total(0, SIMULATOR.used(0) + 4 * MIB)
    storage, source = Storage(4 * MIB, device="cuda:0"), Storage(4 * MIB).alias()
    with cupy.cuda.Stream(non_blocking=True), storage.write() as lease:
        lease.copy_from(source)
    del storage, lease
    gc.collect()
    assert SIMULATOR.pending()
    assert not any(Storage(4 * MIB, device="cuda:0").read_host())


@needs_simulator
@pytest.mark.parametrize("raw", [False, True])
def test_a_free_waits_for_nothing(raw):
    allocate = cupy.cuda.memory._malloc if raw else cupy.cuda.MemoryPool().malloc
    with cupy.cuda.using_allocator(allocate):
        storage = Storage(MIB, device="cuda:0")
    storage.write_host(bytes([1]) * MIB)
    pending = SIMULATOR.pending()
    assert pending
    with SIMULATOR.counting() as calls:
        del storage
        gc.collect()
    assert SIMULATOR.pending() >= pending
    assert not {"cudaFree", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"} & set(calls)


@needs_simulator
def test_a_free_is_made_up_for_later():
    collected()
    used = SIMULATOR.used(0)
    with cupy.cuda.using_allocator(cupy.cuda.memory._malloc):
        storage = Storage(MIB, device="cuda:0")
    storage.write_host(bytes(MIB))
    del storage
    gc.collect()
    assert SIMULATOR.used(0) - used >= MIB
    cupy.cuda.runtime.deviceSynchronize()
    Storage(1, device="cuda:0")
    cupy.get_default_memory_pool().free_all_blocks()
    assert SIMULATOR.used(0) == used


def test_a_storage_outlives_the_pool_it_came_from():
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        storage = Storage(1000, device="cuda:0")
    storage.write_host(bytes(range(250)) * 4)
    pool.free_all_blocks()
    del pool
    gc.collect()
    assert storage.read_host() == bytes(range(250)) * 4


def test_memory_outlives_the_stream_it_was_made_on():
    """The memory goes back by way of that stream, whose handle would be stale."""
    with cupy.cuda.Stream(non_blocking=True):
        storage = Storage(1000, device="cuda:0")
    other = cupy.cuda.Stream(non_blocking=True)
    with other:
        storage.write_host(b"\x05" * 1000)
    gc.collect()
    with SIMULATOR.counting() if SIMULATOR is not None else nullcontext({}) as calls:
        assert set(storage.read_host()) == {5}
        del storage
        collected()
    assert MODE == "gpu" or "cudaStreamDestroy" in calls


def test_an_allocator_that_aligns_to_less_is_made_up_for():
    def crooked(nbytes):
        return cupy.cuda.memory._malloc(nbytes + 16) + 16

    with cupy.cuda.using_allocator(crooked):
        storage = Storage(1000, device="cuda:0")
    assert storage.address % 256 == 0
    storage.write_host(b"\x05" * 1000)
    assert set(storage.read_host()) == {5}


def test_the_current_device_stays_what_it_was():
    with cupy.cuda.Device(0):
        for location in LOCATIONS:
            storage = Storage((4, 4), "float32", location)
            storage.write_host(bytes(64))
            storage.read_host()
            with storage.write() as lease:
                assert lease.shape == (4, 4)
            storage.copy().copy("cpu")
            del storage
            assert cupy.cuda.runtime.getDevice() == 0


def test_an_interpreter_may_end_with_everything_alive():
    if MODE == "gpu":
        start = ""
    else:
        start = (
            "import tempfile, cudasim\nwith tempfile.TemporaryDirectory() as t: cudasim.install(t).schedule('lazy')\n"
        )
    code = (
        f"{start}import lkv, numpy as np\n"
        "cache = lkv.LatentKvCache.with_capacity(2, 8, [(4,)], 'float32', 'cuda:0')\n"
        "step = cache.step(1)\nstep.append(0, [np.ones((1, 4), 'float32')])\n"
        "keep = [lkv.Storage(64, device='cuda:0').read(), cache.read(0), cache.slot_storage(0, 0).alias().cupy()]\n"
    )
    paths = [os.path.dirname(os.path.dirname(os.path.abspath(lkv.__file__))), os.path.dirname(__file__)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- copies ----


@pytest.mark.parametrize("nbytes", [1, 4095, 64 << 10, (64 << 10) + 1, 4 * MIB, 9 * MIB + 7])
def test_large_and_small_copies_arrive(nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    storage = Storage(nbytes, device="cuda:0")
    storage.write_host(data)
    assert storage.read_host() == data.tobytes()


@needs_simulator
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random1", "random2"])
def test_pageable_memory_is_never_left_to_the_device(schedule):
    """Where the GPU can page host memory, an asynchronous copy reads and writes it whenever it likes."""
    SIMULATOR.schedule(schedule)
    SIMULATOR.pageable_async(True)
    data = np.random.default_rng(0).integers(0, 256, 10 * MIB, np.uint8)
    scratch, storage = data.copy(), Storage(data.size, device="cuda:0")
    storage.write_host(scratch)
    scratch.fill(0)
    assert storage.read_host() == data.tobytes()
    assert storage.read_host(5, 50) == data[5:50].tobytes()


@needs_simulator
def test_a_pinned_source_may_be_overwritten_at_once():
    storage = Storage(4 * MIB, device="cuda:0")
    memory = cupy.cuda.alloc_pinned_memory(storage.nbytes)
    source = np.frombuffer(memory, np.uint8, storage.nbytes)
    source[:] = 3
    storage.write_host(source)
    source[:] = 4
    assert set(storage.read_host()) == {3}


def test_a_pinned_destination_is_complete():
    storage = Storage(4 * MIB, device="cuda:0")
    storage.write_host(b"\x07" * storage.nbytes)
    memory = cupy.cuda.alloc_pinned_memory(storage.nbytes)
    target = np.frombuffer(memory, np.uint8, storage.nbytes)
    Storage.wrap(target).alias().copy_from(storage.alias())
    assert (target == 7).all()


@needs_simulator
def test_the_staging_memory_is_bounded_and_used_again():
    storage, data = Storage(40 * MIB, device="cuda:0"), np.arange(40 * MIB, dtype=np.uint8)
    storage.write_host(data)
    with SIMULATOR.counting() as calls:
        storage.write_host(data)
    assert calls.get("cudaHostAlloc", 0) == 0
    assert storage.read_host() == data.tobytes()


def test_a_strided_source_is_packed_on_its_way():
    cache = KvCache.with_capacity(1, 4, 64, 256, "float32", "cuda:0")
    wide = np.random.default_rng(0).random((1, 4, 512, 64), np.float32)
    k, v = wide[:, :, ::2], wide[:, :, 1::2]
    with cache.step(256) as step:
        step.append(0, [k, v])
    for actual, expected in zip(rows_of(cache, 0), (k, v), strict=True):
        np.testing.assert_array_equal(actual, expected)


@needs_simulator
@pytest.mark.skipif(len(LOCATIONS) < 2, reason="there is one GPU")
@pytest.mark.parametrize("peer", [True, False])
def test_devices_copy_to_each_other(peer):
    SIMULATOR.peer(peer)
    storage = Storage((100, 10), "float32", "cuda:0")
    data = np.random.default_rng(0).random((100, 10), np.float32)
    storage.write_host(data)
    there = Storage((100, 10), "float32", "cuda:1")
    with SIMULATOR.counting() as calls:
        there.alias().copy_from(storage.alias())
    assert calls.get("cudaMemcpyAsync") == 1 and "cudaStreamSynchronize" not in calls
    assert on_host(there.alias()).tobytes() == data.tobytes()


# ---- what a step costs ----


@needs_simulator
@pytest.mark.parametrize("rows", ["numpy", "cupy"])
def test_one_token_is_a_copy_per_slot_and_no_synchronisation(rows):
    cache = LatentKvCache.with_capacity(61, 64, [(512,), (64,)], "bfloat16", "cuda:0")
    host = [np.ones((1, 512), cache.dtype.numpy), np.ones((1, 64), cache.dtype.numpy)]
    slots = host if rows == "numpy" else [cupy.asarray(array) for array in host]
    for _ in range(2):
        with SIMULATOR.counting() as calls, cache.step(1) as step:
            for layer in range(61):
                step.append(layer, slots)
    copies = {name: n for name, n in calls.items() if "Memcpy" in name}
    assert copies == {"cudaMemcpyAsync": 122}
    assert not [
        name for name in calls if "Synchronize" in name or "Alloc" in name or name in ("cudaFree", "cudaMemcpy")
    ]
    assert calls.get("cudaEventRecord", 0) <= 2 and calls.get("cudaStreamWaitEvent", 0) <= 2
    assert rows_of(cache, 60)[0].tobytes() == host[0].tobytes() * 2


@needs_simulator
def test_a_chunk_for_a_kv_cache_is_a_copy_per_head():
    cache = KvCache.with_capacity(1, 8, 64, 128, "float16", "cuda:0")
    rows = np.ones((1, 8, 16, 64), np.float16)
    with SIMULATOR.counting() as calls, cache.step(16) as step:
        step.append(0, [rows, rows])
    assert sum(n for name, n in calls.items() if "Memcpy" in name) == 16


# ---- failures ----


@needs_simulator
def test_a_failing_copy_in_a_step_publishes_nothing():
    cache = LatentKvCache.with_capacity(2, 8, [(4,)], "float32", "cuda:0")
    ones = [np.ones((1, 4), np.float32)]
    with cache.step(1) as step:
        step.append(0, ones)
        step.append(1, ones)
    cupy.cuda.runtime.deviceSynchronize()
    SIMULATOR.fail("cudaMemcpyAsync", 1)
    with pytest.raises(DeviceError, match="cudaErrorInvalidValue"), cache.step(1) as step:
        step.append(0, ones)
    assert cache.cached_len == 1
    with cache.step(1) as step:
        step.append(0, ones)
        step.append(1, ones)
    assert rows_of(cache, 1)[0].tolist() == [[1.0] * 4] * 2


@needs_simulator
def test_a_failing_write_poisons_the_storage():
    storage = Storage(64, device="cuda:0")
    SIMULATOR.fail("cudaMemcpyAsync", 1)
    with pytest.raises(DeviceError, match="cudaErrorInvalidValue"):
        storage.write_host(bytes(64))
    assert storage.poisoned
    storage.clear_poison()
    storage.write_host(b"\x01" * 64)
    assert set(storage.read_host()) == {1}


@needs_simulator
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # CuPy's events cannot be destroyed
def test_a_lost_context_is_an_error_everywhere_and_no_hang():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "cuda:0")
    storage = Storage(64, device="cuda:0")
    cupy.cuda.runtime.deviceSynchronize()
    SIMULATOR.fail("cudaMemcpyAsync", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match="cudaErrorLaunchFailure"), cache.step(1) as step:
        step.append(0, [np.ones((1, 4), np.float32)])
    assert cache.cached_len == 0
    with pytest.raises(DeviceError):
        storage.read_host()
    with pytest.raises(DeviceError):
        Storage(64, device="cuda:0")


@needs_simulator
def test_a_failing_zero_fill_leaves_no_memory_behind():
    collected()
    used = SIMULATOR.used(0)
    SIMULATOR.fail("cudaMemsetAsync", 1)
    with pytest.raises(DeviceError, match="cudaErrorInvalidValue"):
        Storage(MIB, device="cuda:0")
    cupy.get_default_memory_pool().free_all_blocks()
    assert SIMULATOR.used(0) == used


@needs_simulator
def test_threads_with_streams_of_their_own_do_not_disturb_each_other():
    for schedule in ("random1", "random2", "random3"):
        SIMULATOR.schedule(schedule)
        failures = []

        def work(tag, failures=failures):
            try:
                with cupy.cuda.Device(tag % len(LOCATIONS)), cupy.cuda.Stream(non_blocking=True):
                    cache = LatentKvCache.with_capacity(2, 64, [(16,)], "float32", LOCATIONS[tag % len(LOCATIONS)])
                    for n in range(30):
                        with cache.step(1) as step:
                            for layer in range(2):
                                step.append(layer, [np.full((1, 16), tag * 1000 + n, np.float32)])
                    found = rows_of(cache, 1)[0][:, 0].tolist()
                    if found != [tag * 1000 + n for n in range(30)]:
                        failures.append((tag, found))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(tag,)) for tag in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
