"""Interrupts, threads and arguments with code of their own, at the moments when storages change."""

import contextlib
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import lkv
from lkv import KvCache, KvLayer, LatentKvCache, Storage
from lkv.errors import ForkedError, GeometryError, UnpopulatedLayerError


def beside(churn, use, seconds=1.0):
    """Run `use` while another thread runs `churn`, with the interpreter changing threads as often as it can."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def loop():
        while not over.is_set():
            churn()

    thread = threading.Thread(target=loop)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(UnpopulatedLayerError):
                use()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_layer_is_seen_whole_or_not_at_all_while_it_is_dropped_and_made_again():
    cache = LatentKvCache.with_capacity(1, 4, [(2,)] * 6, "f32")

    def churn():
        cache.clear()
        cache.repopulate()

    def use():
        cache.slot_version(0, 5)
        cache.bump_version(0, 5)
        cache.layers[0]
        cache.read(0).release()

    beside(churn, use)


def test_a_layer_is_seen_whole_or_not_at_all_while_it_is_set():
    cache = KvCache.with_dims(1, 1, 2)

    def churn():
        cache.clear()
        cache.set_layer(0, KvLayer.allocate(1, 2, 4, "f32"))

    beside(churn, lambda: cache.read(0).release())


# The interrupt may land in a callback that another library has hung into the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_never_leaves_other_memory_under_the_same_id():
    cache = LatentKvCache.with_capacity(200, 16, [(4,), (2,)], "f32")

    def memory():
        return [storage and storage.id for storage in (cache.slot_storage(layer, 0) for layer in range(200))]

    armed = False

    def interrupt(*_):
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(300):
            alloc_id, storages = cache.alloc_id, memory()
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + i % 50 * 4e-5)
                cache.repopulate()
                armed = False
            except KeyboardInterrupt:
                armed = False
            assert cache.alloc_id != alloc_id or memory() == storages
            for layer in range(0, 200, 40):
                with contextlib.suppress(UnpopulatedLayerError):
                    cache.read(layer).release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("layout", ["separate", "packed"])
@pytest.mark.parametrize("shift", [1, 3])
def test_rows_that_overlap_their_new_place_arrive_as_they_were(layout, shift):
    cache = LatentKvCache.with_capacity(1, 64, [(4,), (4,)], "f32", layout=layout)
    rows = np.arange(24, dtype="f4").reshape(6, 4)
    cache.append(0, [rows, -rows])
    cache.advance_by(6)
    old = [slot.alias().numpy()[:6] for slot in (cache.slot_storage(0, 0), cache.slot_storage(0, 1))]
    if layout == "packed":
        old = [old[0][:, :4], old[0][:, 4:]]
    cache.truncate_to(shift)
    cache.append(0, [old[1][: 6 - shift], old[0][: 6 - shift]])
    cache.advance_by(6 - shift)
    first, second = cache.read(0).numpy()
    np.testing.assert_array_equal(first, np.concatenate([rows[:shift], -rows[: 6 - shift]]))
    np.testing.assert_array_equal(second, np.concatenate([-rows[:shift], rows[: 6 - shift]]))


def test_a_step_may_swap_the_slots_of_its_own_rows():
    cache = LatentKvCache.with_capacity(1, 8, [(4,), (4,)], "f32")
    a, b = np.full((2, 4), 1, "f4"), np.full((2, 4), 2, "f4")
    with cache.step(2) as step:
        step.append(0, [a, b])
        first, second = step.view(0)
        step.append(0, [second, first])
    first, second = cache.read(0).numpy()
    assert (first == 2).all() and (second == 1).all()


def test_a_subclass_that_lies_about_its_shape_is_refused():
    class Liar(Storage):
        shape = property(lambda self: (1, 1, 1 << 26, 64))
        rows = property(lambda self: 1 << 26)

    cache = KvCache.with_dims(1, 1, 64)
    with pytest.raises(GeometryError, match="storage: expected"):
        cache.set_layer(0, KvLayer(Liar((1, 1, 1, 64), "f32", axis=2), Liar((1, 1, 1, 64), "f32", axis=2)))


def test_an_argument_that_initialises_the_storage_itself_is_refused():
    storage = Storage.__new__(Storage)

    class Axis:
        def __index__(self):
            storage.__init__((1, 1 << 20))
            return 0

    with pytest.raises(TypeError, match="initialised twice"):
        storage.__init__(1, axis=Axis())
    assert storage.nbytes == 1 << 20 and storage.shape == (1, 1 << 20)


def test_one_row_far_ahead_makes_only_itself_resident():
    cache = LatentKvCache.with_capacity(1, 1 << 20, [(1024,)], "u8")
    cache.note_write(0, (1 << 20) - 1)
    cache.advance_by((1 << 20) - 1)

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    cache.append(0, [np.ones((1, 1024), "u1")])
    assert resident() - before < 64 << 20


def test_bits_of_bits_are_bits_of_the_array():
    array = np.zeros((2, 4), "u2")
    nested = lkv.bits(lkv.bits(array, "bfloat16"), "float16")
    assert nested.array is array and str(nested.dtype) == "float16"


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # by JAX, if a test module imported it
def test_a_child_refuses_a_functional_cache_that_another_thread_was_in():
    cache = lkv.LatentCache(np.empty(0), 1, 8, [(4,)], "f32")
    with cache._lock:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                threading.Thread(target=lambda: None).start()
                cache.slot(0, 0)
            except ForkedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cache.slot(0, 0).shape == (1, 4)
