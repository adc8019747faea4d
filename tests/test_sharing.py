"""Caches in the hands of several threads."""

import gc
import itertools
import os
import random
import sys
import threading
import time

import numpy as np
import pytest
from helpers.caches import LAYOUTS, content, fill, layer_rows, same_rows, small, snapshot
from helpers.threads import PATIENCE, start

from lkv import LatentKvCache
from lkv._storage import host_memory
from lkv.errors import (
    CapacityError,
    IncompleteStepError,
    LeaseEndedError,
    LeaseTimeoutError,
    StepInProgressError,
    UnpopulatedLayerError,
    WouldDeadlockError,
)

SECONDS = float(os.environ.get("LKV_STRESS_SECONDS", "4"))
BIG = 1 << 20  # elements of a row that take long enough to write for another thread to look

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def waits(future, seconds=0.1):
    """Whether a thread has not come through after a while."""
    time.sleep(seconds)
    return not future.done()


def big(layers=1, rows=4):
    return LatentKvCache.with_capacity(layers, rows, [(BIG,)], "i64")


def tagged(tag):
    return [np.full((1, BIG), tag, np.int64)]


# ---- torn rows ----


class Tagged:
    """Rows of which every element tells the writer's round, and the row, layer and slot it was meant for."""

    layers, slots, rows = 2, [(64,), (7,)], 48

    def __init__(self, layout):
        self.cache = LatentKvCache.with_capacity(self.layers, self.rows, self.slots, "i64", layout=layout)

    def arrays(self, layer, lo, n, turn):
        rows = turn * self.rows + np.arange(lo, lo + n)
        tags = [(rows * self.layers + layer) * len(self.slots) + slot for slot in range(len(self.slots))]
        return [np.repeat(tag[:, None], width, axis=1) for tag, (width,) in zip(tags, self.slots, strict=True)]

    def step(self, n, turn, **more):
        with self.cache.step(n, **more) as step:
            for layer in range(self.layers):
                step.append(layer, self.arrays(layer, step.start, n, turn))

    def check(self, layer, arrays):
        """The number of rows, when each is whole, in its place, and of the same round in all slots."""
        turns = []
        for slot, array in enumerate(arrays):
            tag = array[:, 0]
            assert (array == tag[:, None]).all(), "torn row"
            assert (tag % len(self.slots) == slot).all(), "row of another slot"
            assert (tag // len(self.slots) % self.layers == layer).all(), "row of another layer"
            row = tag // len(self.slots) // self.layers
            assert (row % self.rows == np.arange(len(array))).all(), "row of another place"
            turns.append(row // self.rows)
        assert all((turn == turns[0]).all() for turn in turns), "slots of different rounds"
        assert (np.diff(turns[0]) >= 0).all(), "an old row behind a new one"
        return len(turns[0])


def run_for(seconds, *loops):
    """Calls each function over and over in a thread of its own; returns how often each came through."""
    until = time.monotonic() + seconds

    def loop(function):
        for count in itertools.count():
            if time.monotonic() > until:
                return count
            function()

    return [future.result(seconds + PATIENCE) for future in [start(loop, function) for function in loops]]


@every_layout
def test_two_readers_and_a_stepping_writer_never_see_a_torn_or_foreign_row(layout):
    shared = Tagged(layout)
    turn, dice, rows_seen = itertools.count(1), random.Random(7), []

    def write():
        n = dice.randint(1, 6)
        if shared.cache.cached_len + n > shared.rows or dice.random() < 0.05:
            shared.cache.truncate_to(dice.randint(0, shared.rows // 2))
        shared.step(n, next(turn))

    def read(layer):
        with shared.cache.read(layer) as view:
            first, again = [[array.copy() for array in view.numpy()] for _ in range(2)]
        assert same_rows(first, again), "rows changed under a read lease"
        rows_seen.append(shared.check(layer, first))

    counts = run_for(SECONDS, write, lambda: read(0), lambda: read(1))
    assert min(counts) > 50
    assert max(rows_seen) > 10


@every_layout
def test_writers_take_turns_and_no_row_is_lost_or_mixed(layout):
    shared = Tagged(layout)
    turn = itertools.count(1)

    def write():
        try:
            shared.step(2, next(turn))
        except CapacityError:
            shared.cache.truncate_to(1)

    def read():
        with shared.cache.read(1) as view:
            arrays = view.numpy()
            for array, slot in zip(arrays, range(2), strict=True):
                assert (array == array[:, :1]).all() and (array[:, 0] % 2 == slot).all()

    counts = run_for(SECONDS / 2, write, write, read)
    assert min(counts) > 20


@every_layout
def test_readers_beside_repopulate_see_whole_rows_or_none(layout):
    shared = Tagged(layout)
    turn = itertools.count(1)

    def write():
        shared.cache.repopulate()
        shared.step(5, next(turn))
        shared.step(3, next(turn))

    def read():
        with shared.cache.read(0) as view:
            assert shared.check(0, view.numpy()) in (0, 5, 8)

    counts = run_for(SECONDS / 2, write, read, read)
    assert min(counts) > 20


def test_readers_beside_clear_see_whole_rows_or_no_layer():
    shared = Tagged("packed")
    turn = itertools.count(1)

    def write():
        shared.step(5, next(turn))
        shared.cache.clear()
        shared.cache.repopulate()

    def read():
        try:
            with shared.cache.read(0) as view:
                assert shared.check(0, view.numpy()) in (0, 5)
        except UnpopulatedLayerError:
            pass

    assert min(run_for(SECONDS / 4, write, read, read)) > 20


def test_readers_of_rows_being_wiped_see_none_of_them():
    shared = Tagged("separate")
    turn = itertools.count(1)

    def write():
        shared.step(6, next(turn))
        shared.cache.wipe()

    def read():
        with shared.cache.read(1) as view:
            assert shared.check(1, view.numpy()) in (0, 6)

    assert min(run_for(SECONDS / 4, write, read, read)) > 20


# ---- who waits for whom ----


@every_layout
def test_a_slow_reader_does_not_hold_up_appends(layout):
    cache = small(rows=1 << 14, layout=layout)
    given = fill(cache, 4)
    view = cache.read(1)
    done, until = 0, time.monotonic() + min(2, SECONDS / 2)
    while time.monotonic() < until and cache.cached_len < cache.max_seq_len:
        fill(cache, 1)
        done += 1
    assert done > 100
    assert same_rows(view.numpy(), given[1])
    view.release()


def test_a_write_over_rows_being_read_waits_for_the_reader():
    cache = small()
    given = fill(cache, 4)
    view = cache.read(0)
    assert start(cache.truncate_to, 2).result(PATIENCE) == 2
    for call in (lambda: fill(cache, 1), lambda: cache.append(0, layer_rows(cache, 1)), cache.wipe):
        writer = start(call)
        assert waits(writer)
        assert same_rows(view.numpy(), given[0])
        view.release()
        writer.result(PATIENCE)
        cache.wipe()
        given = fill(cache, 4)
        view = cache.read(0)
        cache.truncate_to(2)


def test_rows_behind_those_being_read_are_written_at_once():
    cache = small()
    fill(cache, 4)
    cache.truncate_to(2)
    with cache.read(0) as view:
        assert view.hi == 2
        fill(cache, 6)
        assert cache.cached_len == 8
    cache.truncate_to(2)
    with cache.read(0):
        cache.append(0, layer_rows(cache, 1))


def test_a_timeout_bounds_the_wait_for_a_reader():
    cache = small()
    fill(cache, 4)
    view = cache.read(0)
    cache.truncate_to(2)
    with pytest.raises(LeaseTimeoutError, match="step: the rows are in use"):
        cache.step(1, timeout=0)
    with pytest.raises(LeaseTimeoutError, match=r"step: the rows were not free within 0\.05 s"):
        start(cache.step, 1, 0.05).result(PATIENCE)
    with pytest.raises(LeaseTimeoutError, match="wipe"):
        start(cache.wipe, 0.05).result(PATIENCE)
    view.release()
    cache.step(1, timeout=0).abandon()
    cache.wipe(timeout=0)


def test_a_second_step_waits_for_its_turn():
    cache = small()
    step = cache.step(2)
    with pytest.raises(StepInProgressError, match="step: another step is in progress"):
        cache.step(1, timeout=0)
    with pytest.raises(StepInProgressError):
        start(cache.step, 1, 0).result(PATIENCE)
    with pytest.raises(LeaseTimeoutError):
        start(cache.step, 1, 0.05).result(PATIENCE)
    second = start(fill, cache, 3)
    assert waits(second)
    for layer in range(2):
        step.append(layer, layer_rows(cache, 2, layer))
    step.commit()
    given = second.result(PATIENCE)
    assert cache.cached_len == 5
    assert same_rows([array[2:] for array in content(cache, 1)], given[1])


def test_a_step_that_waited_starts_where_the_other_left_off_or_not_at_all():
    cache = small(rows=4)
    step = cache.step(3)
    second = start(cache.step, 2)
    assert waits(second)
    for layer in range(2):
        step.append(layer, layer_rows(cache, 3))
    step.commit()
    with pytest.raises(CapacityError, match="step: 2 rows at 3 do not fit max_seq_len 4"):
        second.result(PATIENCE)
    cache.step(1, timeout=0).abandon()


@pytest.mark.parametrize("verb", ["truncate_to", "append", "advance_by", "note_write", "wipe", "clear", "repopulate"])
def test_every_verb_that_moves_the_length_waits_for_a_step_of_another_thread(verb):
    cache = small()
    fill(cache, 4)
    calls = {"truncate_to": (1,), "append": (0, layer_rows(cache, 1)), "advance_by": (0,), "note_write": (0, 1)}
    step = cache.step(1)
    other = start(getattr(cache, verb), *calls.get(verb, ()))
    assert waits(other)
    for layer in range(2):
        step.append(layer, layer_rows(cache, 1))
    step.commit()
    other.result(PATIENCE)
    assert cache.cached_len == {"truncate_to": 1, "append": 5, "advance_by": 5, "note_write": 5}.get(verb, 0)


def test_an_append_that_waited_goes_behind_what_was_published_meanwhile():
    cache = small()
    step = cache.step(3)
    rows = layer_rows(cache, 2, 9)
    other = start(cache.append, 1, rows)
    assert waits(other)
    for layer in range(2):
        step.append(layer, layer_rows(cache, 3))
    step.commit()
    other.result(PATIENCE)
    assert [cache.written_len(layer) for layer in range(2)] == [3, 5]
    cache.append(0, rows)
    cache.advance_by(2)
    assert same_rows([array[3:] for array in content(cache, 1)], rows)


# ---- what a thread may not do to itself ----


def test_a_step_inside_ones_own_step_would_deadlock():
    cache = small()
    with cache.step(1) as step:
        with pytest.raises(WouldDeadlockError, match="own step"):
            cache.step(1)
        assert step.active
        step.abandon()
    cache.step(1, timeout=0).abandon()


def test_writing_the_rows_of_ones_own_view_would_deadlock():
    cache = small()
    fill(cache, 4)
    with cache.read(0) as view:
        for call in (cache.wipe, lambda: (cache.truncate_to(1), cache.step(1))):
            with pytest.raises(WouldDeadlockError, match=r"own read lease of rows \[0, 4\)"):
                call()
        with pytest.raises(WouldDeadlockError, match=r"append.*own read lease of rows \[0, 4\)"):
            cache.append(0, layer_rows(cache, 1))
        assert view.active
    cache.wipe()


def test_two_threads_that_wait_for_each_other_are_told():
    cache = small()
    fill(cache, 4)
    with cache.read(0):
        cache.truncate_to(2)
        other = start(cache.step, 2)  # waits for this thread's view
        assert waits(other)
        with pytest.raises(WouldDeadlockError):
            cache.step(1)  # would wait for the other, and so for itself
    other.result(PATIENCE).abandon()


# ---- one step in several threads ----


def test_a_step_may_be_opened_in_one_thread_and_closed_in_another():
    cache = small()
    step = start(cache.step, 2).result(PATIENCE)
    for layer in range(2):
        step.append(layer, layer_rows(cache, 2, layer))
    step.commit()
    assert cache.cached_len == 2
    step = cache.step(1)
    start(step.abandon).result(PATIENCE)
    cache.step(1, timeout=0).abandon()


def test_threads_may_append_different_layers_of_one_step():
    cache = big(layers=4)
    for turn in range(4):
        with cache.step(1) as step:
            threads = [start(step.append, layer, tagged(10 * turn + layer)) for layer in range(4)]
            for thread in threads:
                thread.result(PATIENCE)
    for layer in range(4):
        with cache.read(layer) as view:
            assert [set(row) for row in view.numpy()[0][:, ::4096].tolist()] == [{10 * t + layer} for t in range(4)]


def test_the_same_layer_written_by_several_threads_is_never_mixed():
    cache = big()
    sources = [tagged(tag) for tag in range(3)]
    refused = []
    for _ in range(10):
        with cache.step(1) as step:
            threads = [start(step.append, 0, source) for source in sources]
            errors = [thread.exception(PATIENCE) for thread in threads]
            assert all(error is None or isinstance(error, StepInProgressError) for error in errors)
            refused += [str(error) for error in errors if error is not None]
            assert None in errors
            rows = step.view(0).numpy()[0][-1]
            assert (rows == rows[0]).all()
            step.abandon()
    assert set(refused) <= {"append: layer 0 is being written by another thread"}


@pytest.mark.parametrize("end", ["abandon", "commit", "drop"])
def test_the_end_of_a_step_leaves_no_writer_behind(end):
    cache = big()
    late, new = tagged(1), tagged(2)
    for attempt in range(12):
        step = cache.step(1)
        entered = threading.Event()

        def write(step=step, entered=entered):
            entered.set()
            step.append(0, late)

        writer = start(write)
        entered.wait(PATIENCE)
        time.sleep(attempt * 0.0005)
        if end == "commit":
            try:
                step.commit()
            except IncompleteStepError:
                assert cache.cached_len == 0
        elif end == "abandon":
            step.abandon()
        else:
            writer.exception(PATIENCE)
            del step, write
            gc.collect()
        cache.truncate_to(0)
        with cache.step(1) as step:
            step.append(0, new)
        error = writer.exception(PATIENCE)
        assert error is None or isinstance(error, LeaseEndedError), error
        assert (cache.read(0).numpy()[0] == 2).all()
        cache.truncate_to(0)


def test_a_dropped_step_is_abandoned_and_frees_the_lease():
    cache = small()
    fill(cache, 2)
    step = cache.step(1)
    for layer in range(2):
        step.append(layer, layer_rows(cache, 1))
    waiting = start(cache.step, 1)
    assert waits(waiting)
    del step
    gc.collect()
    waiting.result(PATIENCE).abandon()
    assert cache.cached_len == 2
    with pytest.raises(IncompleteStepError):
        cache.advance_by(1)


def test_a_view_holds_the_rows_of_its_step_no_longer_than_the_step():
    cache = small(layers=1)
    fill(cache, 2)
    with cache.step(1) as step:
        step.append(0, layer_rows(cache, 1))
        view = step.view(0)
        arrays = view.numpy()
    cache.truncate_to(0)
    fill(cache, 3, seed=8)
    assert not view.active
    assert arrays[0].shape == (3, 8)


# ---- old readers and new memory ----


@pytest.mark.parametrize("verb", ["clear", "repopulate"])
def test_new_memory_does_not_wait_for_readers_of_the_old(verb):
    cache = small()
    given = fill(cache, 6)
    view = cache.read(1)
    start(getattr(cache, verb)).result(PATIENCE)
    if verb == "clear":
        cache.repopulate()
    new = start(fill, cache, 8, 5).result(PATIENCE)
    assert same_rows(view.numpy(), given[1])
    assert same_rows(content(cache, 1), new[1])
    cache.wipe(timeout=0)
    assert same_rows(view.numpy(), given[1])
    view.release()


def test_a_reader_that_waited_reads_the_memory_that_is_there_when_it_comes_through():
    cache = small()
    fill(cache, 6)
    lease = cache.slot_storage(0, 0).write()
    reader = start(content, cache, 0)
    assert waits(reader)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5)  # the reader gets its lease now, and the interpreter not before the new rows are in
    try:
        lease.release()
        cache.repopulate()
        given = fill(cache, 2, seed=9)
    finally:
        sys.setswitchinterval(interval)
    rows = reader.result(PATIENCE)  # the new rows, or none if it came through before they were written
    assert not len(rows[0]) or same_rows(rows, given[0])


def test_old_arrays_stay_valid_while_memory_comes_and_goes():
    shared = Tagged("packed")
    kept = []
    for turn in range(1, 30):
        shared.step(4, turn)
        kept.append((turn, shared.cache.read(turn % 2)))
        shared.cache.repopulate()
    for turn, view in kept:
        assert same_rows(view.numpy(), shared.arrays(turn % 2, 0, 4, turn))
    before = host_memory()["live_buffers"]
    del kept, view
    assert host_memory()["live_buffers"] <= before - 28


def test_a_refused_wait_leaves_no_trace():
    cache = small()
    fill(cache, 4)
    before = snapshot(cache)
    with cache.read(0):
        for _ in range(20):
            with pytest.raises((WouldDeadlockError, LeaseTimeoutError)):
                cache.wipe(timeout=random.choice([None, 0, 0.001]))
    assert snapshot(cache) == before
    cache.step(1, timeout=0).abandon()
