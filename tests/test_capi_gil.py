"""No method waits for a lease with the GIL in hand: the C thread it waits for may need it to go on."""

import contextlib
import faulthandler
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import compilers

import lkv
from lkv import KvCache, KvLayer, LatentKvCache, Storage
from lkv.errors import LeaseTimeoutError, StepInProgressError

READ, WRITE = 0, 1
HELD_SECONDS = 20  # at most: it is let go long before


@pytest.fixture(scope="module")
def consumer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capi_gil")
    return compilers.load(compilers.extension(compilers.CAPI / "consumer.c", folder, "consumer"), "consumer")


@pytest.fixture(autouse=True)
def watchdog():
    """A deadlock with the GIL in hand stops every Python thread, pytest's own timeout too: this one needs no GIL."""
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


class Beside:
    """Another Python thread, which stands still while somebody keeps the GIL: it counts, then lets what is held go."""

    def __init__(self, let_go=None):
        self.let_go = let_go

    def __enter__(self):
        self.count, self.let_gone, self._stop = 0, False, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        while not self._stop:
            self.count += 1
            if self.count == 20 and self.let_go is not None:
                self.let_gone = True
                self.let_go()
            time.sleep(0.001)

    def __exit__(self, *_):
        self._stop = True
        self._thread.join()


def latent():
    cache = LatentKvCache.with_capacity(2, 16, [(4,), (2,)], dtype="float32")
    with cache.step(3) as step:
        for layer in range(2):
            step.append(layer, [np.ones((3, 4), "f4"), np.ones((3, 2), "f4")])
    return cache


def kv():
    cache = KvCache.with_capacity(2, 2, 4, 16, "float32")
    for layer in range(2):
        cache.append(layer, [np.zeros((1, 2, 3, 4), "f4")] * 2)
    cache.advance_by(3)
    return cache


def append(cache):
    trailing = [(1, 2, 1, 4)] * 2 if isinstance(cache, KvCache) else [(1, 4), (1, 2)]
    cache.append(0, [np.zeros(shape, "f4") for shape in trailing])


def type_of(cache):
    return latent if isinstance(cache, LatentKvCache) else kv


def restore(cache):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.safetensors"
        lkv.save(type_of(cache)(), path, fingerprint=None)
        cache.restore(path, fingerprint=None)


# Of a storage: what is called, whether it waits for rows that a writer has (or refuses at once).
STORAGE_CALLS = {
    "read": (lambda s: s.read().release(), True),
    "read with a timeout": (lambda s: s.read(timeout=30).release(), True),
    "write": (lambda s: s.write().release(), True),
    "copy": (lambda s: s.copy(), True),
    "read_host": (lambda s: s.read_host(), True),
    "write_host": (lambda s: s.write_host(bytes(64)), True),
    "release_rows": (lambda s: s.release_rows(), False),
}

# Of a cache: what is called, whether it waits for rows that a writer has, whether it waits for a step. What changes
# only the length, or drops the storages, has nothing to do with the rows.
CACHE_CALLS = {
    "append": (append, True, True),
    "step": (lambda c: c.step(1).abandon(), True, True),
    "read": (lambda c: c.read(0).release(), True, False),
    "gather": (lambda c: c.gather(0, [0, 2]), True, False),
    "to": (lambda c: c.to("cpu"), True, False),
    "wipe": (lambda c: c.wipe(), True, True),
    "note_write": (lambda c: c.note_write(0, 0), False, True),
    "advance_by": (lambda c: c.advance_by(0), False, True),
    "truncate_to": (lambda c: c.truncate_to(1), False, True),
    "clear": (lambda c: c.clear(), False, True),
    "repopulate": (lambda c: c.repopulate(), False, True),
    "fork": (lambda c: c.fork(), True, False),
    "copy_from": (lambda c: c.copy_from(type_of(c)()), True, True),
    "restore": (restore, True, True),
}


@contextlib.contextmanager
def held(consumer, storage, mode=WRITE, takes_gil=True):
    """A C thread that has all rows of a storage; yields what makes it let them go."""
    job = consumer.hold(storage.handle, mode, HELD_SECONDS, takes_gil)
    try:
        yield lambda: consumer.let_go(job)
    finally:
        consumer.let_go(job)
        consumer.join(job)


@contextlib.contextmanager
def step_open(cache):
    """Another Python thread that has a step open; yields what makes it end the step."""
    opened, over = threading.Event(), threading.Event()

    def decode():
        with cache.step(1) as step:
            opened.set()
            over.wait(HELD_SECONDS)
            step.abandon()

    thread = threading.Thread(target=decode)
    thread.start()
    opened.wait()
    try:
        yield over.set
    finally:
        over.set()
        thread.join()


def waited(call, let_go):
    """Whether a call came back only after another Python thread, which ran meanwhile, let go what it waits for."""
    with Beside(let_go) as other:
        call()
        return other.let_gone


def did_not_wait(call):
    begun = time.monotonic()
    call()
    return time.monotonic() - begun < HELD_SECONDS / 2


@pytest.mark.parametrize("takes_gil", [False, True], ids=["", "that needs the GIL"])
@pytest.mark.parametrize("name", STORAGE_CALLS)
def test_a_storage_waits_for_a_c_thread_without_the_gil(consumer, name, takes_gil):
    call, waits = STORAGE_CALLS[name]
    storage = Storage(64)
    with held(consumer, storage, takes_gil=takes_gil) as let_go:
        if waits:
            assert waited(lambda: call(storage), let_go)
        else:
            with pytest.raises(LeaseTimeoutError):
                call(storage)
    call(storage)


@pytest.mark.parametrize("make", [latent, kv])
@pytest.mark.parametrize("name", CACHE_CALLS)
def test_a_cache_waits_for_a_c_thread_that_has_the_rows_without_the_gil(consumer, name, make):
    call, waits, _ = CACHE_CALLS[name]
    cache = make()
    with held(consumer, cache.slot_storage(1, 1)) as let_go:
        assert waited(lambda: call(cache), let_go) if waits else did_not_wait(lambda: call(cache))


@pytest.mark.parametrize("name", CACHE_CALLS)
def test_a_cache_waits_for_a_step_of_another_thread_without_the_gil(name):
    call, _, waits = CACHE_CALLS[name]
    cache = latent()
    with step_open(cache) as let_go:
        assert waited(lambda: call(cache), let_go) if waits else did_not_wait(lambda: call(cache))


STORAGE_TIMEOUTS = {
    "read": lambda s: s.read(timeout=0.3),
    "write": lambda s: s.write(timeout=0.3),
    "read_host": lambda s: s.read_host(timeout=0.3),
    "write_host": lambda s: s.write_host(bytes(64), timeout=0.3),
}
CACHE_TIMEOUTS = {
    "step": lambda c: c.step(1, timeout=0.3),
    "read": lambda c: c.read(0, timeout=0.3),
    "wipe": lambda c: c.wipe(timeout=0.3),
    "gather": lambda c: c.gather(0, [0], timeout=0.3),
    "to": lambda c: c.to("cpu", timeout=0.3),
}


@pytest.mark.parametrize("name", STORAGE_TIMEOUTS)
def test_a_wait_that_times_out_lets_others_run_too(consumer, name):
    storage = Storage(64)
    with held(consumer, storage), Beside() as other:
        before = other.count
        with pytest.raises(LeaseTimeoutError):
            STORAGE_TIMEOUTS[name](storage)
        assert other.count > before + 2


@pytest.mark.parametrize("name", CACHE_TIMEOUTS)
def test_a_cache_call_that_times_out_lets_others_run_too(consumer, name):
    cache = latent()
    with held(consumer, cache.slot_storage(0, 0)), Beside() as other:
        before = other.count
        with pytest.raises((LeaseTimeoutError, StepInProgressError)):
            CACHE_TIMEOUTS[name](cache)
        assert other.count > before + 2


def test_set_layer_refuses_storages_that_a_c_thread_has_and_does_not_wait(consumer):
    cache = KvCache.with_dims(2, 2, 4)
    layer = KvLayer.allocate(2, 4, 16, "float32")
    with held(consumer, layer.v), pytest.raises(LeaseTimeoutError):
        cache.set_layer(0, layer)
    cache.set_layer(0, layer)


def test_set_layer_waits_for_a_step_of_another_thread_without_the_gil():
    cache = kv()
    with step_open(cache) as let_go:
        assert waited(lambda: cache.set_layer(0, KvLayer.allocate(2, 4, 16, "float32")), let_go)


@pytest.mark.parametrize("name", ["read", "read_host", "copy"])
def test_a_reader_beside_a_c_reader_does_not_wait(consumer, name):
    storage = Storage(64)
    with held(consumer, storage, READ):
        assert did_not_wait(lambda: STORAGE_CALLS[name][0](storage))


def test_every_method_with_a_timeout_is_in_these_tables():
    """A new way to wait needs a line above."""
    table = set(CACHE_CALLS) | {name.split()[0] for name in STORAGE_CALLS}
    for kind in (Storage, LatentKvCache, KvCache):
        for name in dir(kind):
            function = getattr(kind, name)
            text = f"{getattr(function, '__text_signature__', '')}{getattr(function, '__annotations__', '')}"
            if not name.startswith("_") and "timeout" in text:
                assert name in table, f"{kind.__name__}.{name} can wait and is not tested"
