"""What was exported is dropped from anywhere: raw threads, an ending interpreter, a forked child."""

import os
import sys

import numpy as np
import pytest
from helpers import compilers

import lkv
from lkv import Lease, Storage

READ, WRITE, TRY = 0, 1, 0

# How a tensor comes to be in C code's hands. Nothing else keeps its memory, nor its lease, which nobody ended.
MAKERS = {
    "exported by C": """
storage = lkv.Storage((4, 4))
consumer.export_tensor(storage.write().capsule())
del storage
""",
    "exported by Python": """
storage = lkv.Storage((4, 4))
consumer.take_tensor(storage.write().__dlpack__(max_version=(1, 1)))
del storage
""",
    "over a Python object's memory": """
storage = lkv.Storage.wrap(numpy.zeros((4, 4), "u1"))
consumer.take_tensor(storage.write().__dlpack__(max_version=(1, 1)))
del storage
""",
    "over a cache": """
cache = lkv.LatentKvCache.with_capacity(1, 4, [(4,)], dtype="uint8")
cache.append(0, [numpy.zeros((1, 4), "u1")])
cache.advance_by(1)
consumer.take_tensor(cache.read(0)[0].__dlpack__(max_version=(1, 1)))
del cache
""",
    "over memory of C": """
storage = lkv.Storage.from_capsule(consumer.make_buffer(4, 4, 11, True))
consumer.take_tensor(storage.write().__dlpack__(max_version=(1, 1)))
del storage
""",
}
START = "import numpy, lkv, consumer\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("capi_lifetimes")


@pytest.fixture(scope="module")
def consumer(folder):
    return compilers.load(compilers.extension(compilers.CAPI / "consumer.c", folder, "consumer"), "consumer")


def say(folder, script):
    """What a fresh interpreter prints; fails when it crashes."""
    fresh = compilers.environment(PYTHONPATH=str(folder))
    return compilers.run(sys.executable, "-X", "faulthandler", "-c", START + script, env=fresh, timeout=60)


def test_a_tensor_of_a_lease_is_dropped_in_a_raw_thread_that_never_gets_the_gil(consumer):
    storage = Storage((4, 4))
    lease = storage.write()
    address, flags, *strides = consumer.export_tensor(lease.capsule())
    assert (address, flags, strides) == (storage.address, 0, [(2, 1)])
    del lease
    with pytest.raises(lkv.errors.LeaseTimeoutError):
        storage.read(timeout=0)
    consumer.drop_in_thread(True)
    assert storage.refcount == 1
    storage.read(timeout=0).release()


def test_a_tensor_of_a_read_lease_says_that_it_is_read_only(consumer):
    lease = Storage((4, 4)).read()
    assert consumer.export_tensor(lease.capsule())[1] == 1
    consumer.drop_in_thread(True)


def test_the_object_behind_the_memory_goes_with_a_tensor_that_a_raw_thread_drops(consumer):
    array = np.zeros((4, 4), "u1")
    before = sys.getrefcount(array)
    consumer.take_tensor(Storage.wrap(array).write().__dlpack__(max_version=(1, 1)))
    assert sys.getrefcount(array) > before
    consumer.drop_in_thread(False)
    assert sys.getrefcount(array) == before


def test_a_lease_of_c_outlives_the_storage_object(consumer):
    storage = Storage((4, 4))
    storage.write_host(bytes(range(16)))
    capsule = consumer.acquire(storage.capsule(), READ, 0, 4, TRY)
    del storage
    assert consumer.add(capsule, 0) == sum(range(16))
    assert Lease.from_capsule(capsule).numpy().sum() == sum(range(16))


@pytest.mark.parametrize("when", ["finalising", "finalised", "exit"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_tensor_is_dropped_in_a_raw_thread_while_or_after_the_interpreter_ends(consumer, folder, maker, when):
    assert say(folder, f"{MAKERS[maker]}\nconsumer.drop_at_exit({when!r})\n") == "dropped\n"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_tensor_is_dropped_in_a_python_atexit_handler(consumer, folder, maker):
    """Handlers run backwards: one of before the import of lkv comes after lkv has closed."""
    handler = "import atexit, sys\natexit.register(lambda: sys.modules['consumer'].drop_in_thread(False))\n"
    fresh = compilers.environment(PYTHONPATH=str(folder))
    script = f"{handler}{START}{MAKERS[maker]}"
    compilers.run(sys.executable, "-X", "faulthandler", "-c", script, env=fresh, timeout=60)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("order", ["before lkv closes", "after lkv has closed"])
def test_a_raw_thread_that_needs_the_gil_of_an_ending_interpreter_is_let_in_or_sent_away(
    consumer, folder, maker, order
):
    """Where it would have to wait for a GIL that never comes, the C library would end the thread amid our frames."""
    # The handler itself is a C function: after a Python function's call the interpreter would give the GIL away.
    handlers = "import atexit\nend = lkv._storage._end_process\natexit.register(consumer.drop_beside)\n"
    if order == "after lkv has closed":
        handlers += "atexit.unregister(end)\natexit.register(end)\n"
    script = f"{START}{MAKERS[maker]}{handlers}"
    fresh = compilers.environment(PYTHONPATH=str(folder))
    said = compilers.run(sys.executable, "-X", "faulthandler", "-c", script, env=fresh, timeout=60)
    assert said == "dropped\n"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_tensor_is_dropped_after_a_fork_in_parent_and_child(consumer, folder, maker):
    script = f"""
import os
{MAKERS[maker]}
child = os.fork()
consumer.drop_in_thread(False)
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert say(folder, script) == "7\n"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_forked_child_ends_like_any_other_process(consumer, folder, maker):
    script = f"""
import os, sys
{MAKERS[maker]}
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
consumer.drop_in_thread(False)
"""
    assert say(folder, script) == "5\n"


def test_a_child_that_was_forked_while_a_c_thread_held_rows_is_told_so(consumer, folder):
    script = """
import os
storage = lkv.Storage(64)
job = consumer.hold(storage.handle, 1, 30, False)
child = os.fork()
if child == 0:
    try:
        consumer.acquire(storage.capsule(), 0, 0, 1, -1)
    except RuntimeError as error:
        os._exit(3 if "LKV_E_FORKED" in str(error) else 4)
    os._exit(5)
consumer.let_go(job)
consumer.join(job)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert say(folder, script) == "3\n"


def test_a_c_thread_that_waits_for_ever_is_woken_when_the_process_ends(consumer, folder):
    script = """
storage = lkv.Storage(4)
lease = storage.write()
consumer.wait_until_exit(storage.capsule())
"""
    assert say(folder, script) == "LKV_E_SHUTDOWNdropped\n"


def test_a_c_thread_that_holds_rows_when_the_process_ends_harms_nothing(consumer, folder):
    assert (
        say(folder, "storage = lkv.Storage(4)\njob = consumer.hold(storage.handle, 1, 30, False)\nprint('end')")
        == "end\n"
    )


def test_dropping_objects_in_many_threads_while_the_interpreter_ends_never_hangs_or_crashes(consumer, folder):
    """Each last reference to a wrapped array asks for the GIL, at any moment of the shutdown."""
    script = """
import threading, time
def churn():
    while True:
        consumer.take_tensor(lkv.Storage.wrap(numpy.zeros(16, "u1")).read().__dlpack__(max_version=(1, 1)))
        consumer.drop_in_thread(False)
threading.Thread(target=churn, daemon=True).start()
time.sleep(0.05)
print("end")
"""
    for _ in range(5):
        assert say(folder, script) == "end\n"


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # by JAX, if a test module imported it
def test_forking_does_not_disturb_the_parent(consumer):
    storage = Storage((4, 4))
    lease = storage.write()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    consumer.add(lease.capsule(), 1)
    lease.release()
    assert storage.read_host() == bytes([1] * 16)
