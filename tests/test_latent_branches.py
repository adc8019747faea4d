"""Branches of a LatentCache: cheap to make, and none ever sees another's rows."""

import copy
import math
import threading

import numpy as np
import pytest
from helpers.functional import column, live, make, put
from helpers.places import address_of, anchor, look, new_storage, place
from helpers.threads import start
from hypothesis import HealthCheck, settings
from hypothesis import given as over
from hypothesis import strategies as st

from lkv import LatentCache
from lkv._storage import host_memory
from lkv.cache.branch import BranchLayer
from lkv.errors import CapacityError

pytestmark = pytest.mark.usefixtures("everywhere")


def two_branches(first, *, extra=0, advanced=True):
    """Fork after two rows (and some not advanced over); a third row in each branch, `first` first."""
    cache = put(put(make(), 2, 1), extra, 9, advance=False) if extra else put(make(), 2, 1)
    branches = [cache, cache.clone()]
    for which in (first, 1 - first):
        branches[which] = put(branches[which], 1, 2 + which, advance=advanced)
    return branches


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_branches_go_their_own_ways(first, extra):
    a, b = two_branches(first, extra=extra)
    assert column(a) == [1, 1, 2] + [0] * 5 and column(b) == [1, 1, 3] + [0] * 5
    assert column(put(a, 1, 4), 1, 1) == [1, 1, 2, 4] + [0] * 4
    assert column(put(b, 2, 5), 1, 2) == [1, 1, 3, 5, 5] + [0] * 3


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("looks", [0, 1])
def test_the_full_buffer_of_one_branch_never_shows_the_other(first, looks):
    cache = put(make(), 2, 1)
    branches = [cache, cache.clone()]
    early = branches[looks].slot_buffer_full(0, 0)
    for which in (first, 1 - first):
        branches[which] = put(branches[which], 2, 2 + which)
    assert look(early)[:, 0].tolist() in ([1, 1] + [2 + looks] * 2 + [0] * 4, [1, 1] + [0] * 6)
    for which in (0, 1):
        assert column(branches[which]) == [1, 1] + [2 + which] * 2 + [0] * 4


def test_the_branch_that_holds_a_full_buffer_goes_on_in_place():
    cache = put(make(layers=1), 2, 1)
    address = address_of(cache.slot_buffer_full(0, 0))
    other = put(cache.clone(), 1, 2)
    cache = put(cache, 6, 3)
    assert address_of(cache.slot_buffer_full(0, 0)) == address
    assert address_of(other.slot_buffer_full(0, 0)) != address
    assert column(cache) == [1] * 2 + [3] * 6 and column(other) == [1, 1, 2] + [0] * 5


def test_slot_never_shows_rows_that_another_branch_may_write():
    cache = put(make(), 2, 1)
    a, b = cache.clone().advance_by(3), cache
    early = a.slot(0, 0)
    b = put(b, 3, 7)
    assert look(early)[:, 0].tolist() == look(a.slot(0, 0))[:, 0].tolist() == [1, 1, 0, 0, 0]
    assert column(b) == [1, 1, 7, 7, 7, 0, 0, 0]
    c, d = make(), make()
    empty = c.slot(0, 0)
    d = put(c.clone(), 2, 5)
    assert look(empty).tolist() == [[0] * 4] and column(d) == [5, 5] + [0] * 6 and column(c) == [0] * 8


def test_a_branch_that_wrote_less_does_not_inherit_what_another_wrote_after():
    cache = put(make(), 2, 1)
    other = cache.clone()
    cache = put(cache, 3, 2)
    assert column(other.advance_by(3)) == [1, 1] + [0] * 6
    assert column(cache) == [1, 1, 2, 2, 2, 0, 0, 0]


def test_an_overwrite_after_a_clone_leaves_the_other_branch_alone():
    cache = put(make(), 3, 1, advance=False)
    other = cache.clone()
    held = other.slot_buffer_full(0, 0)
    cache = put(cache, 1, 2, advance=False)
    assert column(other) == look(held)[:, 0].tolist() == [1, 1, 1] + [0] * 5
    assert column(cache) == [2] + [0] * 7


def test_the_first_branch_to_append_pays_nothing():
    cache = put(make(), 2, 1)
    before = live()
    branches = [cache.clone() for _ in range(3)]
    assert live() == before
    branches[1] = put(branches[1], 1, 2)
    assert live() == before
    branches[0] = put(branches[0], 1, 3)
    assert live() == before + 6
    assert [column(branch)[:4] for branch in branches] == [[1, 1, 3, 0], [1, 1, 2, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("how", [LatentCache.clone, copy.copy, copy.deepcopy])
def test_a_clone_allocates_nothing_and_is_independent(how):
    cache = put(make(layers=4), 2, 1)
    before = live()
    clones = [how(cache) for _ in range(100)]
    assert live() == before and all(type(clone) is LatentCache for clone in clones)
    put(cache, 1, 2)
    assert column(clones[0]) == [1, 1] + [0] * 6


def test_clones_of_clones_are_independent():
    tree = [put(make(layers=1), 1, 1)]
    for depth in range(4):
        tree += [put(branch.clone(), 1, 10 * depth + i + 2) for i, branch in enumerate(tree)]
    paths = [column(branch) for branch in tree]
    assert len({tuple(path) for path in paths}) == 16
    assert [path[0] for path in paths] == [1] * 16 and not any(path[5:] != [0, 0, 0] for path in paths)


def test_a_thousand_forks_give_every_storage_back():
    before = live()
    cache = put(make(), 2, 1)
    with_cache = live()
    for i in range(1000):
        fork = put(cache.clone(), 1, i % 100 + 3)
        assert look(fork.slot(1, 0))[2, 0] == i % 100 + 3
    del fork
    assert live() == with_cache == before + 6
    kept = [put(cache.clone(), 1, i % 100 + 3) for i in range(100)]
    assert live() == with_cache + 6 * 100
    del kept, cache
    assert live() == before


def test_eight_threads_append_from_one_shared_prefix():
    cache = put(make(layers=2, rows=64, trailing=[(4096,), (3,)]), 8, 1)
    branches = [cache.clone() for _ in range(8)]
    ready = threading.Barrier(8)

    def grow(branch, value):
        ready.wait()
        for _ in range(6):
            branch = put(branch, 8, value)
        return branch

    futures = [start(grow, branch, value) for value, branch in enumerate(branches, start=2)]
    for value, future in enumerate(futures, start=2):
        grown = future.result(60)
        for layer in range(2):
            for slot in range(2):
                rows = look(grown.slot(layer, slot))
                assert (rows[:8] == 1).all() and (rows[8:] == value).all() and len(rows) == 56
    assert column(cache) == [1] * 8 + [0] * 56


def test_arrays_outlive_the_cache():
    anchors = [new_storage(1)]
    if place() == "cpu":
        anchors += [np.empty(0), pytest.importorskip("torch").empty(0)]
    for made_after in anchors:
        before = live()
        cache = put(make(made_after), 2, 3)
        held = [cache.slot(0, 0), cache.slot_buffer_full(1, 1)]
        cache = cache.advance_by(1)
        del cache
        assert live() == before + 2
        assert look(held[0]).tolist() == [[3] * 4] * 2 and look(held[1]).sum() == 12
        del held
        assert live() == before


# ---- the guards themselves ----


def always(self, expected, rows):
    return True


SABOTAGE = {
    "claims that always succeed": ("_claim", always),
    "clones that inherit the tail": ("shared", lambda self, keeps: self._replace(frozen=self.extent)),
    "clones that freeze nothing": ("shared", lambda self, keeps: self),
    "arrays handed out unclaimed": ("covering", lambda self, rows: self),
}


def every_divergence():
    for first in (0, 1):
        for extra in (0, 3):
            test_branches_go_their_own_ways(first, extra)
        for looks in (0, 1):
            test_the_full_buffer_of_one_branch_never_shows_the_other(first, looks)
    test_slot_never_shows_rows_that_another_branch_may_write()
    test_an_overwrite_after_a_clone_leaves_the_other_branch_alone()


@pytest.mark.parametrize("what", SABOTAGE)
def test_without_a_guard_branches_see_each_other(what, monkeypatch):
    every_divergence()
    monkeypatch.setattr(BranchLayer, *SABOTAGE[what])
    with pytest.raises(AssertionError):
        every_divergence()


# ---- any program at all, against plain arrays ----

LAYERS, CAPACITY, SHAPES = 2, 5, [(2,), ()]
WHICH = st.integers(0, 7)
OPS = st.one_of(
    st.tuples(st.just("append"), WHICH, st.integers(0, LAYERS - 1), st.integers(0, 3)),
    st.tuples(st.just("advance"), WHICH, st.integers(0, 2)),
    st.tuples(st.just("clone"), WHICH),
    st.tuples(st.just("drop"), WHICH),
    st.tuples(st.just("slot"), WHICH, st.integers(0, LAYERS - 1), st.integers(0, 1)),
    st.tuples(st.just("full"), WHICH, st.integers(0, LAYERS - 1), st.integers(0, 1)),
)


class Branch:
    """A cache beside the arrays it should equal; `name` tells branches apart in what they write."""

    def __init__(self, cache, rows, name, position=0):
        self.cache, self.rows, self.name, self.position = cache, rows, name, position

    def append(self, layer, n, value):
        arrays = [np.full(n * math.prod(shape), value, "f4").reshape(n, *shape) for shape in SHAPES]
        if self.position + n > CAPACITY:
            with pytest.raises(CapacityError):
                self.cache.append(layer, arrays)
            return
        self.cache = self.cache.append(layer, arrays)
        if n:
            for rows in self.rows[layer]:
                rows[self.position : self.position + n] = value
                rows[self.position + n :] = 0

    def advance(self, n):
        if self.position + n > CAPACITY:
            with pytest.raises(CapacityError):
                self.cache.advance_by(n)
            return
        self.cache = self.cache.advance_by(n)
        self.position += n

    def clone(self, name):
        return Branch(self.cache.clone(), [[r.copy() for r in layer] for layer in self.rows], name, self.position)


class Export:
    """An array handed out: what it showed never changes below the position, and only its own branch adds to it."""

    def __init__(self, branch, layer, slot, full):
        verb = branch.cache.slot_buffer_full if full else branch.cache.slot
        self.array, self.name = verb(layer, slot), branch.name
        self.stable = branch.position
        expected = branch.rows[layer][slot]
        if not full:
            expected = expected[: max(branch.position, 1)]
        assert np.array_equal(look(self.array), expected)
        self.seen = expected.copy()

    def check(self, writers):
        array = look(self.array)
        assert np.array_equal(array[: self.stable], self.seen[: self.stable])
        changed = array[array != self.seen]
        assert {writers[value] for value in changed.tolist() if value} <= {self.name}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@over(st.lists(OPS, max_size=40))
def test_any_program_agrees_with_plain_arrays(program):
    before = host_memory()["live_buffers"]
    zeros = [[np.zeros((CAPACITY, *shape), "f4") for shape in SHAPES] for _ in range(LAYERS)]
    branches = [Branch(LatentCache(anchor(), LAYERS, CAPACITY, SHAPES, "f32"), zeros, 0)]
    exports, writers, names = [], {}, 1
    for number, (op, which, *rest) in enumerate(program, start=1):
        branch = branches[which % len(branches)]
        if op == "append":
            writers[number] = branch.name
            branch.append(*rest, number)
        elif op == "advance":
            branch.advance(*rest)
        elif op == "clone" and len(branches) < 5:
            branches.append(branch.clone(names))
            names += 1
        elif op == "drop" and len(branches) > 1:
            branches.remove(branch)
        elif op in ("slot", "full"):
            exports.append(Export(branch, *rest, full=op == "full"))
        for export in exports:
            export.check(writers)
    for branch in branches:
        for layer in range(LAYERS):
            exports += [Export(branch, layer, slot, full) for slot in range(2) for full in (False, True)]
    for export in exports:
        export.check(writers)
    assert all(branch.cache.current_seq_len == branch.position for branch in branches)
    branch = export = None
    branches.clear()
    exports.clear()
    assert host_memory()["live_buffers"] <= before
