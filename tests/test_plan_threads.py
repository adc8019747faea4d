"""Plans and sources that several threads use at once."""

import random
import threading
import time
from contextlib import nullcontext
from queue import SimpleQueue

import numpy as np
import pytest
from helpers.plans import ROWS, Source, Welded, latent
from helpers.threads import PATIENCE, start

from lkv import AllocId, LatentKvCache, Storage, errors
from lkv.plan import CallablePlan, DecodeSession, RefreshCounters, refresh_session
from lkv.plan.allocation import take

SLOTS = [(8,), (3,)]
PROMPTS = 16
STEPS = 6


def logits_of(buffers, length):
    """Attend over what the plan is bound to."""
    c_kv, k_pe = buffers[-1]
    scores = c_kv[:length] @ np.linspace(-1, 1, 8, dtype=np.float32) + k_pe[:length].sum(1)
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ c_kv[:length] + buffers[0][0][:length].sum(0)


def rows_of(prompt):
    rng = np.random.default_rng(prompt)
    return [rng.standard_normal((2, STEPS, *shape), np.float32) for shape in SLOTS]


def serve(cache, prompt, session, refresh):
    """Decode one request over a cache that is empty; yields the session and each step's logits."""
    arrays = rows_of(prompt)
    for at in range(STEPS):
        with cache.step(1) as step:
            for layer in range(2):
                step.append(layer, [array[layer, at : at + 1] for array in arrays])
            session = refresh(session, cache)
            yield session, session.run(at + 1)


def admit(cache, how):
    """Empty a cache for the next request in one of the ways there are."""
    if how == "wipe":
        cache.wipe()
    elif how == "new":
        return LatentKvCache.with_capacity(2, ROWS, SLOTS, "float32")
    elif how == "repopulate":
        cache.repopulate()
    else:
        cache.clear()
        cache.repopulate()
    return cache


def swarm(seconds, refresh, n_threads=8):
    """Admit and retire on `n_threads` sessions over shared caches; return the steps done and those that were wrong."""
    expected = {}
    for prompt in range(PROMPTS):
        cache = LatentKvCache.with_capacity(2, ROWS, SLOTS, "float32")
        fresh = lambda session, source: DecodeSession(CallablePlan(logits_of), source, seq=1, shape_key=0)  # noqa: E731
        expected[prompt] = [logits for _, logits in serve(cache, prompt, None, fresh)]
    free = SimpleQueue()
    for _ in range(n_threads + 2):
        free.put(LatentKvCache.with_capacity(2, ROWS, SLOTS, "float32"))
    deadline = time.monotonic() + seconds

    def work(seed):
        rng = random.Random(seed)
        session, done, wrong = None, 0, 0
        while time.monotonic() < deadline:
            cache = admit(free.get(), rng.choice(["wipe", "new", "repopulate", "clear"]))
            prompt = rng.randrange(PROMPTS)
            for at, (used, logits) in enumerate(serve(cache, prompt, session, refresh)):
                session = used
                done += 1
                wrong += not np.array_equal(logits, expected[prompt][at])
            free.put(cache)
        return done, wrong

    results = [future.result(seconds + PATIENCE) for future in [start(work, seed) for seed in range(n_threads)]]
    return [sum(column) for column in zip(*results, strict=True)]


def test_eight_threads_on_shared_caches_each_read_their_own_request():
    counters = RefreshCounters()

    def refresh(session, cache):
        return refresh_session(
            session, cache, lambda source: CallablePlan(logits_of), seq=1, shape_key=0, counters=counters
        )

    done, wrong = swarm(10, refresh)
    assert (done > 1000, wrong) == (True, 0)
    assert counters.built == 8
    assert counters.rebuilt == 0
    assert counters.rebound > 100
    assert counters.kept + counters.rebound + counters.built == done


def test_control_eight_threads_that_keep_their_plans_read_other_requests():
    def refresh(session, cache):
        return session or DecodeSession(CallablePlan(logits_of), cache, seq=1, shape_key=0)

    done, wrong = swarm(1, refresh)
    assert wrong > done / 10, "the contamination is not shown"


class Halting(LatentKvCache):
    """Stops half-way through taking new storages until it is told to go on."""

    halt = None

    def _place(self, layer, slot, *place, **more):
        super()._place(layer, slot, *place, **more)
        if self.halt is not None and (layer, slot) == (0, 1):
            self.halt.reached.set()
            assert self.halt.go.wait(PATIENCE)


class Halt:
    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()


def half_way():
    cache = Halting.with_capacity(2, ROWS, SLOTS, "float32")
    cache.halt = Halt()
    old = {storage.id for storage in cache._storages()}
    change = start(cache.repopulate)
    assert cache.halt.reached.wait(PATIENCE)
    return cache, old, change


def test_a_source_is_taken_in_one_breath_while_another_thread_gives_it_new_memory():
    cache, old, change = half_way()
    before = cache.alloc_id
    taking = start(take, cache)
    time.sleep(0.05)
    assert not taking.done(), "half of the new memory could be seen"
    cache.halt.go.set()
    change.result(PATIENCE)
    found = taking.result(PATIENCE)
    assert found.alloc_id == cache.alloc_id != before
    assert old.isdisjoint(slot.storage.id for slot in found.slots.values())


def test_control_without_the_hold_a_source_is_taken_with_memory_of_two_allocations(monkeypatch):
    cache, old, change = half_way()
    monkeypatch.setattr(Halting, "rebind_hold", lambda self: nullcontext())
    found = take(cache)
    assert {slot.storage.id in old for slot in found.slots.values()} == {True, False}
    cache.halt.go.set()
    change.result(PATIENCE)


def test_a_session_is_never_made_of_two_allocations():
    cache = latent(3)
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            cache.clear()
            cache.repopulate()

    change = start(churn)
    seen = set()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        found = take(cache)
        assert len(found.slots) in (0, 6)
        ids = sorted(slot.storage.id for slot in found.slots.values())
        assert not ids or ids[-1] - ids[0] == 5, "storages of two allocations"
        seen.add(found.alloc_id)
    stop.set()
    change.result(PATIENCE)
    assert len(seen) > 10


class Shifting(Source):
    """Has no hold, and takes new memory while it is looked at, a given number of times."""

    shifts = 0

    def rebind_slot(self, layer, which):
        found = super().rebind_slot(layer, which)
        if self.shifts and which == 0:
            self.shifts -= 1
            self.storages = {key: Storage((ROWS, 4), "float32") for key in self.storages}
            self.alloc_id = AllocId.next()
        return found


def shifting(times):
    source = Shifting({(0, which): Storage((ROWS, 4), "float32") for which in range(2)}, location=None)
    source.shifts = times
    return source


def test_a_source_without_a_hold_is_read_again_until_its_id_stays():
    source = shifting(3)
    found = take(source)
    assert found.alloc_id == source.alloc_id
    assert {key: slot.storage for key, slot in found.slots.items()} == source.storages


def test_control_read_once_such_a_source_mixes_allocations():
    from lkv.plan import allocation

    source = shifting(1)
    found = allocation._look(source)
    assert found.slots[0, 0].storage != source.storages[0, 0]
    assert found.slots[0, 1].storage == source.storages[0, 1]


def test_a_source_that_never_holds_still_is_an_error():
    with pytest.raises(errors.LeaseTimeoutError, match="1000 times"):
        take(shifting(10**9))


def test_running_and_rebinding_one_session_exclude_each_other():
    class Slow(Welded):
        inside = 0

        def run(self):
            self.inside += 1
            time.sleep(0.002)
            self.inside -= 1
            return self.addresses.copy()

        def bind(self, *slot):
            assert self.inside == 0
            super().bind(*slot)

    caches = [latent(2, 1), latent(2, 2)]
    session = DecodeSession(Slow(), caches[0], seq=1, shape_key=0)
    whole = [{storage.address for storage in cache._storages()} for cache in caches]
    stop = threading.Event()

    def run():
        while not stop.is_set():
            assert set(session.run().values()) in whole

    runs = [start(run) for _ in range(2)]
    for turn in range(100):
        session.rebind_kv(caches[turn % 2])
    stop.set()
    for future in runs:
        future.result(PATIENCE)
