import gc
import itertools
import math
import threading
import time

import numpy as np
import pytest
from helpers.storages import filled
from helpers.threads import PATIENCE, start, wait_until

from lkv import LatentKvCache, Storage, errors

ROWS = 100


@pytest.fixture
def storage():
    return Storage((ROWS, 4))


def is_free(storage, mode, lo, hi):
    """Would a lease of these rows be granted at once?"""
    try:
        getattr(storage, mode)(lo, hi, timeout=0).release()
    except errors.LeaseTimeoutError:
        return False
    return True


# ---- exclusion ----

RANGES = [(0, 10), (10, 20), (5, 15), (0, 100), (9, 11), (19, 100), (10, 10), (7, 7)]


@pytest.mark.parametrize(("held", "wanted"), list(itertools.product(("read", "write"), repeat=2)))
def test_two_leases_exclude_each_other_when_they_overlap_and_one_writes(storage, held, wanted):
    for (a, b), (c, d) in itertools.product(RANGES, repeat=2):
        conflict = max(a, c) < min(b, d) and "write" in (held, wanted)
        with getattr(storage, held)(a, b):
            assert is_free(storage, wanted, c, d) is not conflict, (a, b, c, d)
        assert is_free(storage, "write", 0, ROWS)


def test_a_lease_tells_what_it_is(storage):
    with storage.write(3, 7) as lease:
        assert (lease.mode, lease.lo, lease.hi, lease.active, lease.readonly) == ("write", 3, 7, True, False)
        assert lease.storage is storage and lease.shape == (4, 4) and len(lease) == 4 and lease.nbytes == 16
        assert "writable" in repr(lease)
    assert not lease.active and lease.mode == "write" and "ended" in repr(lease)
    with storage.read() as lease:
        assert (lease.mode, lease.lo, lease.hi, lease.readonly) == ("read", 0, ROWS, True)
        assert lease.device == storage.device and lease.dtype is storage.dtype


def test_many_leases_of_one_thread_live_together(storage):
    leases = [storage.read(0, 50) for _ in range(1000)] + [storage.write(50 + i, 51 + i) for i in range(50)]
    assert not is_free(storage, "write", 49, 50)
    for lease in leases[::2] + leases[1::2]:
        lease.release()
    assert is_free(storage, "write", 0, ROWS)


# ---- times ----


def test_a_try_fails_at_once(storage):
    with storage.write(0, 10):
        with pytest.raises(errors.LeaseTimeoutError, match="read: the rows are in use"):
            storage.read(timeout=0)
        with pytest.raises(errors.LeaseTimeoutError, match="write: the rows are in use"):
            storage.write(9, timeout=0)
        with pytest.raises(TimeoutError):
            storage.read_host(timeout=0)
        with pytest.raises(TimeoutError):
            storage.write_host(bytes(4), timeout=0)
    assert storage.refcount == 1


@pytest.mark.parametrize("timeout", [0.001, 0.05, 0.12])
def test_a_bounded_wait_ends_after_its_time(storage, timeout):
    with storage.read():
        begun = time.monotonic()
        with pytest.raises(errors.LeaseTimeoutError, match=f"not free within {timeout:g} s"):
            storage.write(timeout=timeout)
        assert time.monotonic() - begun >= timeout
    assert storage.refcount == 1
    assert is_free(storage, "write", 0, ROWS)


def test_a_change_of_the_wall_clock_moves_no_timeout(storage, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: math.inf)
    with storage.read(), pytest.raises(errors.LeaseTimeoutError):
        storage.write(timeout=0.02)


@pytest.mark.parametrize("timeout", [None, PATIENCE, math.inf, 1e300])
def test_a_wait_ends_with_the_lease_it_waits_for(storage, timeout):
    held = storage.write(0, 10)
    waiter = start(lambda: storage.read(timeout=timeout))
    time.sleep(0.12)  # longer than one look around for signals
    assert not waiter.done()
    held.release()
    waiter.result(PATIENCE).release()


def test_what_gave_up_waiting_holds_up_nobody(storage):
    reading = storage.read(0, 10)
    with pytest.raises(errors.LeaseTimeoutError):
        storage.write(0, 20, timeout=0.01)
    assert is_free(storage, "read", 0, 20)
    assert is_free(storage, "write", 10, 20)
    reading.release()


# ---- order ----


def test_readers_do_not_starve_a_waiting_writer(storage):
    first = storage.read()
    writer = start(storage.write)
    wait_until(lambda: not is_free(storage, "read", 0, ROWS))
    late = [start(storage.read) for _ in range(4)]
    time.sleep(0.02)
    assert not writer.done() and not any(reader.done() for reader in late)
    first.release()
    lease = writer.result(PATIENCE)
    time.sleep(0.02)
    assert not any(reader.done() for reader in late)
    lease.release()
    for reader in late:
        reader.result(PATIENCE).release()


def test_writers_do_not_starve_a_waiting_reader(storage):
    held = storage.write(0, 10)
    reader = start(lambda: storage.read(0, 20))
    wait_until(lambda: not is_free(storage, "write", 10, 20))
    writer = start(lambda: storage.write(0, 20))
    held.release()
    lease = reader.result(PATIENCE)
    assert not writer.done()
    lease.release()
    writer.result(PATIENCE).release()


def test_requests_go_in_the_order_in_which_they_came(storage):
    order = []
    held = storage.write(0, 1)
    futures = []
    for turn in range(8):

        def take(turn=turn):
            with storage.write(0, turn + 2):
                order.append(turn)

        futures.append(start(take))
        wait_until(lambda turn=turn: not is_free(storage, "read", turn + 1, turn + 2))
    held.release()
    for future in futures:
        future.result(PATIENCE)
    assert order == list(range(8))


def test_rows_that_do_not_overlap_never_wait_for_each_other(storage):
    held = storage.write(0, 10)
    blocked = start(lambda: storage.write(5, 15))
    wait_until(lambda: not is_free(storage, "read", 10, 15))
    assert is_free(storage, "write", 15, ROWS)
    assert is_free(storage, "read", 20, 30)
    held.release()
    blocked.result(PATIENCE).release()


# ---- the ends ----


def test_any_thread_may_release_a_lease(storage):
    lease = storage.write()
    waiter = start(storage.read)
    start(lease.release).result(PATIENCE)
    assert not lease.active
    waiter.result(PATIENCE).release()
    assert storage.version == 1


def test_a_lease_ends_once(storage):
    lease = storage.write()
    lease.release()
    lease.release()
    with storage.write() as second:
        lease.release()
        lease.__exit__(None, None, None)
        assert not is_free(storage, "read", 0, ROWS)
    lease.__exit__(ValueError, ValueError(), None)
    assert second is not lease and storage.version == 2 and not storage.poisoned


def test_eight_threads_that_release_one_lease_end_it_once(storage):
    for _ in range(50):
        version = storage.version
        lease, gate = storage.write(), threading.Barrier(8)
        for future in [start(lambda lease=lease, gate=gate: (gate.wait(), lease.release())) for _ in range(8)]:
            future.result(PATIENCE)
        assert storage.version == version + 1
        assert is_free(storage, "write", 0, ROWS)


def test_an_ended_lease_refuses_everything_new(storage):
    lease = storage.write()
    lease.release()
    for use in (
        lease.numpy,
        lease.__dlpack__,
        lambda: lease.__dlpack__(max_version=(1, 0)),
        lambda: lease.__dlpack__(copy=True),
        lambda: np.asarray(lease),
        lease.downgrade,
        lease.capsule,
        lease.__enter__,
    ):
        with pytest.raises(errors.LeaseEndedError):
            use()
    with pytest.raises(BufferError, match="ended"):
        memoryview(lease)
    assert lease.shape == (ROWS, 4) and lease.storage is storage


def test_a_downgrade_lets_readers_in_and_no_writer(storage):
    lease = storage.write()
    writer = start(storage.write)
    time.sleep(0.02)
    lease.downgrade()
    assert (lease.mode, lease.readonly, lease.active, storage.version) == ("read", True, True, 1)
    assert not writer.done()
    assert not lease.numpy().flags.writeable
    with pytest.raises(errors.GeometryError, match="reading already"):
        lease.downgrade()
    lease.release()
    writer.result(PATIENCE).release()
    with storage.write(0, 10) as lease:
        lease.downgrade()
        assert is_free(storage, "read", 0, 10) and not is_free(storage, "write", 0, 10)


# ---- deadlocks ----


@pytest.mark.parametrize(("held", "wanted"), [("read", "write"), ("write", "read"), ("write", "write")])
def test_a_wait_for_what_the_thread_holds_itself_is_refused_at_once(storage, held, wanted):
    with getattr(storage, held)(5, 15):
        with pytest.raises(errors.WouldDeadlockError, match=rf"{wanted}: .*own {held} lease of rows \[5, 15\)"):
            getattr(storage, wanted)(14, 20)
        with pytest.raises(errors.LeaseTimeoutError):
            getattr(storage, wanted)(14, 20, timeout=0.01)
    assert is_free(storage, "write", 0, ROWS)


def test_a_wait_for_oneself_through_the_writer_of_another_thread_is_refused(storage):
    mine = storage.read(0, 10)
    writer = start(lambda: storage.write(5, 20))
    wait_until(lambda: not is_free(storage, "read", 10, 20))
    with pytest.raises(errors.WouldDeadlockError, match=r"own read lease of rows \[0, 10\)"):
        storage.read(15, 30)
    mine.release()
    writer.result(PATIENCE).release()
    storage.read(15, 30).release()


def test_a_wait_for_another_thread_is_no_deadlock(storage):
    taken, done = threading.Event(), threading.Event()

    def hold():
        with storage.write(0, 10):
            taken.set()
            done.wait(PATIENCE)

    holder = start(hold)
    taken.wait(PATIENCE)
    with storage.read(50, 60):
        timer = threading.Timer(0.05, done.set)
        timer.start()
        storage.write(0, 50).release()
    holder.result(PATIENCE)


# ---- the interpreter meanwhile ----


def test_other_python_threads_run_while_one_waits(storage):
    held = storage.write()
    waiters = [start(storage.read) for _ in range(3)]
    count = 0
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        count += 1
    assert count > 1000
    assert not any(waiter.done() for waiter in waiters)
    held.release()
    for waiter in waiters:
        waiter.result(PATIENCE).release()


def test_a_wait_in_the_main_thread_lets_the_holder_run(storage):
    taken = threading.Event()

    def hold():
        with storage.write():
            taken.set()
            for _ in range(20):
                time.sleep(0.001)
                sum(range(1000))

    holder = start(hold)
    taken.wait(PATIENCE)
    storage.write(timeout=PATIENCE).release()
    holder.result(PATIENCE)


def test_no_row_is_ever_torn():
    rows, width = 64, 1024
    storage = Storage((rows, width), "i32")
    stop = threading.Event()

    def write(tag):
        draw, count = np.random.default_rng(tag), 0
        while not stop.is_set():
            lo, hi = sorted(draw.integers(0, rows + 1, 2).tolist())
            with storage.write(lo, hi) as lease:
                array = lease.numpy()
                array[:, : width // 2] = tag
                time.sleep(0)
                array[:, width // 2 :] = tag
                assert (array == tag).all(), f"rows [{lo}, {hi}) of writer {tag} were overwritten"
            count += 1
        return count

    def read(seed):
        draw, count = np.random.default_rng(seed), 0
        while not stop.is_set():
            lo, hi = sorted(draw.integers(0, rows + 1, 2).tolist())
            with storage.read(lo, hi) as lease:
                first = lease.numpy().copy()
                time.sleep(0)
                assert (first == first[:, :1]).all(), f"rows [{lo}, {hi}) are torn"
                assert (first == lease.numpy()).all(), f"rows [{lo}, {hi}) changed while they were read"
            count += 1
        return count

    writers = [start(write, tag) for tag in range(1, 5)]
    readers = [start(read, seed) for seed in range(10, 14)]
    time.sleep(3)
    stop.set()
    assert storage.version <= sum(writer.result(PATIENCE) for writer in writers)
    assert sum(reader.result(PATIENCE) for reader in readers) > 50
    assert storage.version == sum(writer.result() for writer in writers) > 50
    assert is_free(storage, "write", 0, rows) and storage.refcount == 1


# ---- exports keep the right ----

EXPORTS = {
    "numpy": lambda lease: lease.numpy(),
    "a slice of numpy": lambda lease: lease.numpy()[1:2, ::2],
    "memoryview": memoryview,
    "asarray": np.asarray,
    "from_dlpack": np.from_dlpack,
    "capsule": lambda lease: lease.__dlpack__(max_version=(1, 0)),
    "C capsule": lambda lease: lease.capsule(),
}


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
@pytest.mark.parametrize("mode", ["read", "write"])
def test_the_right_lives_as_long_as_what_was_exported(storage, mode, export):
    exported = export(getattr(storage, mode)(0, 10))
    gc.collect()
    assert not is_free(storage, "write", 5, 6)
    assert is_free(storage, "read", 5, 6) is (mode == "read")
    assert is_free(storage, "write", 10, 20)
    del exported
    assert is_free(storage, "write", 0, ROWS)
    assert storage.refcount == 1


def test_the_right_lives_as_long_as_a_tensor(storage):
    torch = pytest.importorskip("torch")
    for export in (lambda lease: lease.torch(), torch.from_dlpack):
        tensor = export(storage.write(0, 10))
        assert not is_free(storage, "read", 5, 6)
        part = tensor[3:4]
        del tensor
        assert not is_free(storage, "read", 5, 6)
        del part
        assert is_free(storage, "write", 0, ROWS)
    assert storage.version == 4


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_an_explicit_end_ends_the_right_although_exports_live(export):
    storage = filled((ROWS, 4))
    with storage.write(0, 10) as lease:
        exported = export(lease)
    assert is_free(storage, "write", 0, ROWS)
    assert storage.refcount > 1
    del lease
    content = storage.read_host(0, 10)
    del storage
    if export is EXPORTS["numpy"]:
        assert exported.tobytes() == content
    elif export is EXPORTS["memoryview"]:
        assert bytes(exported) == content


def test_the_last_export_ends_the_right_in_whatever_thread(storage):
    kept = [storage.write().numpy()]
    waiter = start(storage.read)
    time.sleep(0.02)
    assert not waiter.done()
    start(kept.clear).result(PATIENCE)
    waiter.result(PATIENCE).release()


def test_a_lease_in_a_cycle_is_released_by_the_collector(storage):
    class Node:
        pass

    node = Node()
    node.lease, node.self = storage.write(), node
    del node
    gc.collect()
    assert is_free(storage, "write", 0, ROWS)


def test_a_step_in_a_cycle_is_abandoned_by_the_collector():
    class Node:
        pass

    class Cache(LatentKvCache):
        pass

    for _ in range(3):
        cache = Cache.with_capacity(1, 8, [(4,)], "f32")
        step, node = cache.step(1), Node()
        node.step, node.self = step, node
        del node, step
        gc.collect()
        with cache.step(1, timeout=0) as step:
            step.append(0, [np.ones((1, 4), "f4")])
        assert cache.cached_len == 1
        cache.open = cache.step(1)  # the cache holds the step that holds the cache
        del cache, step
        gc.collect()
