"""LazyKvCache: keys and values by name, and windows that wrap round."""

import copy

import numpy as np
import pytest
from helpers.functional import live
from helpers.places import address_of, anchor, location, look, place
from hypothesis import HealthCheck, settings
from hypothesis import given as over
from hypothesis import strategies as st

from lkv import DType, LazyKvCache, Storage
from lkv._storage import View, host_memory
from lkv.cache.branch import BranchLayer
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    ConsumedError,
    DTypeMismatchError,
    GeometryError,
    LayerIndexError,
    ShapeMismatchError,
)

pytestmark = pytest.mark.usefixtures("everywhere")

HEADS, DIM = 2, 3


def make(like=None, layers=2, rows=8, dtype="float32"):
    return LazyKvCache(anchor() if like is None else like, layers, rows, HEADS, DIM, dtype)


def kv(values, dtype="float32"):
    """Keys whose rows hold the values, and values ten more than that."""
    flat = np.repeat(np.array(values, "f4"), HEADS * DIM)
    both = flat, flat + 10 * (flat != 0)
    return tuple(array.astype(DType.of(dtype).numpy).reshape(len(values), HEADS, DIM) for array in both)


def window(cache, layer=0):
    """One number per row, after a look that keys and values agree."""
    k, v = (look(full).astype("f4")[:, 0, 0] for full in (cache.k_buffer_full(layer), cache.v_buffer_full(layer)))
    assert np.array_equal(v, k + 10 * (k != 0))
    return k.astype(int).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_keys_and_values_come_back(dtype):
    k, v = kv([1, 2, 3], dtype)
    cache = make(dtype=dtype).append(1, k, v)
    assert cache.current_seq_len == 0 and cache.k(1).shape == (1, HEADS, DIM)
    cache = cache.advance_by(3)
    assert look(cache.k(1)).tobytes() == k.tobytes() and look(cache.v(1)).tobytes() == v.tobytes()
    assert look(cache.k(1)).dtype == DType.of(dtype).numpy and not look(cache.k(0)).astype("f4").any()
    assert look(cache.v_buffer_full(1))[:3].tobytes() == v.tobytes() and cache.k_buffer_full(1).shape == (8, HEADS, DIM)


@pytest.mark.host_only("anchors of the host")
def test_torch_anchors_get_tensors_and_lkv_anchors_views():
    torch = pytest.importorskip("torch")
    k, v = (torch.from_numpy(array) for array in kv([1, 2]))
    cache = make(torch.empty(0), dtype=torch.float32).append(0, k, v).advance_by(2)
    assert torch.equal(cache.k(0), k) and torch.equal(cache.v(0), v)
    cache = make(Storage(1)).append(0, k, v).advance_by(2)
    assert type(cache.k(0)) is View and np.array_equal(cache.v(0), v)


def test_properties_and_repr_tell_the_geometry():
    cache = make(layers=3)
    assert (cache.n_layers, cache.max_seq_len, cache.n_kv_heads, cache.head_dim) == (3, 8, HEADS, DIM)
    assert cache.dtype.name == "float32" and cache.device == location() and cache.current_seq_len == 0
    assert cache.nbytes == 3 * 2 * 8 * HEADS * DIM * 4
    kind = "numpy arrays" if place() == "cpu" else "lkv arrays"
    assert repr(cache) == f"LazyKvCache(3 layers x 2 slots, 0/8 rows, float32, {place()}, {kind}, 1.2 kB)"


@pytest.mark.host_only("anchors of the host")
@pytest.mark.parametrize("heads_and_dim", [(0, 1), (1, 0), (-1, 1), (1.0, 1), (True, 1)])
def test_a_degenerate_row_is_refused(heads_and_dim):
    with pytest.raises((GeometryError, ArgumentTypeError), match=r"n_kv_heads|head_dim"):
        LazyKvCache(np.empty(0), 1, 1, *heads_and_dim)


VERBS = {
    "append": lambda cache: cache.append(0, *kv([1])),
    "append_rotating": lambda cache: cache.append_rotating(0, *kv([1]), 9),
    "advance_by": lambda cache: cache.advance_by(1),
    "k": lambda cache: cache.k(0),
    "v": lambda cache: cache.v(0),
    "k_buffer_full": lambda cache: cache.k_buffer_full(0),
    "v_buffer_full": lambda cache: cache.v_buffer_full(0),
    "clone": lambda cache: cache.clone(),
    "current_seq_len": lambda cache: cache.current_seq_len,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("by", ["append", "append_rotating", "advance_by"])
def test_a_consumed_handle_refuses_every_verb_by_name(verb, by):
    old = make()
    VERBS[by](old)
    with pytest.raises(ConsumedError, match=f"^{verb}: "):
        VERBS[verb](old)
    assert repr(old) == "LazyKvCache(consumed)"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda k, v: (0, k, v[:1]),
            ShapeMismatchError,
            r"slot 1 \(v\): expected \(2, 2, 3\) float32, got \(1, 2, 3\)",
        ),
        (
            lambda k, v: (0, k[:, :1], v),
            ShapeMismatchError,
            r"slot 0 \(k\): expected \(n, 2, 3\) float32, got \(2, 1, 3\)",
        ),
        (lambda k, v: (0, k.astype("f2"), v), DTypeMismatchError, r"slot 0 \(k\)"),
        (lambda k, v: (2, k, v), LayerIndexError, r"layer"),
        (lambda k, v: (0, *kv([5] * 9)), CapacityError, r"9 rows"),
    ],
)
@pytest.mark.parametrize("verb", ["append", "append_rotating"])
def test_a_refused_append_changes_nothing(spoil, error, message, verb):
    cache = make().append(0, *kv([1, 2, 3])).advance_by(3)
    with pytest.raises(error, match=message):
        getattr(cache, verb)(*spoil(*kv([7, 8])), *([3] if verb == "append_rotating" else []))
    assert window(cache) == [1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("position", [-1, 1.5, True, None])
def test_a_rotating_position_is_a_count(position):
    cache = make()
    with pytest.raises((GeometryError, ArgumentTypeError), match=r"^position: "):
        cache.append_rotating(0, *kv([1]), position)
    assert window(cache) == [0] * 8


def test_single_rows_wrap_round():
    cache = make(rows=3, layers=1)
    for position in range(8):
        cache = cache.append_rotating(0, *kv([position + 1]), position)
        if cache.current_seq_len < 3:
            cache = cache.advance_by(1)
    assert window(cache) == [7, 8, 6] and look(cache.k(0))[:, 0, 0].tolist() == [7, 8, 6]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 12, 1_000_003])
def test_chunks_wrap_round(n, position):
    expected = [1, 2, 3, 4, 5]
    cache = make(rows=5).append(0, *kv(expected)).advance_by(5)
    for i in range(n):
        expected[(position + i) % 5] = 20 + i
    assert window(cache.append_rotating(0, *kv(range(20, 20 + n)), position)) == expected


def test_strided_chunks_wrap_round():
    torch = pytest.importorskip("torch")
    k, v = kv([21, 99, 22, 99, 23, 99])
    for arrays in ((k[::2], v[::2]), (torch.from_numpy(k)[::2], torch.from_numpy(v)[::2])):
        assert window(make(rows=4).append_rotating(0, *arrays, 3)) == [22, 23, 0, 21]


def test_rows_skipped_by_a_rotating_append_read_as_zeros():
    assert window(make().append_rotating(0, *kv([1]), 5)) == [0, 0, 0, 0, 0, 1, 0, 0]


def test_a_window_turns_in_place_when_one_branch_has_it():
    cache = make(rows=4, layers=1).append(0, *kv([1, 2, 3, 4])).advance_by(4)
    address, before = address_of(cache.k(0)), live()
    for position in range(4, 20):
        cache = cache.append_rotating(0, *kv([position]), position)
    assert address_of(cache.k(0)) == address and live() == before and window(cache) == [16, 17, 18, 19]


@pytest.mark.parametrize("first", [0, 1])
def test_turning_a_shared_window_leaves_the_other_branch_alone(first):
    cache = make(rows=4).append(0, *kv([1, 2, 3, 4])).advance_by(4)
    branches = [cache, cache.clone()]
    held = [branch.k_buffer_full(0) for branch in branches]
    for which in (first, 1 - first):
        branches[which] = branches[which].append_rotating(0, *kv([5 + which, 7 + which]), 7)
    for which in (0, 1):
        assert window(branches[which]) == [7 + which, 2, 3, 5 + which]
        assert look(held[which])[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_turning_a_shared_window_copies_once():
    cache = make(rows=4, layers=1).append(0, *kv([1, 2, 3, 4])).advance_by(4)
    other, before = cache.clone(), live()
    for position in range(4, 12):
        cache = cache.append_rotating(0, *kv([position]), position)
    assert live() == before + 2 and window(cache) == [8, 9, 10, 11] and window(other) == [1, 2, 3, 4]


def test_without_frozen_rows_a_turned_window_shows_in_the_other_branch(monkeypatch):
    monkeypatch.setattr(BranchLayer, "shared", lambda self, keeps_tail: self)
    with pytest.raises(AssertionError):
        test_turning_a_shared_window_leaves_the_other_branch_alone(0)


@pytest.mark.parametrize("how", [LazyKvCache.clone, copy.copy, copy.deepcopy])
def test_a_clone_allocates_nothing(how):
    cache = make().append(0, *kv([1])).advance_by(1)
    before = live()
    other = how(cache)
    assert live() == before and type(other) is LazyKvCache
    cache = cache.append(0, *kv([2]))
    assert window(other)[:2] == [1, 0] and window(cache)[:2] == [1, 2]


OPS = st.sampled_from(["append", "rotate", "advance", "clone", "full"])
STEP = st.tuples(st.integers(0, 3), OPS, st.integers(0, 4), st.integers(0, 9))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@over(st.lists(STEP, max_size=30))
def test_any_program_agrees_with_plain_lists(program):
    before, rows = host_memory()["live_buffers"], 4
    branches = [(make(rows=rows, layers=1), [0] * rows)]
    for number, (which, op, n, position) in enumerate(program, start=1):
        which %= len(branches)
        cache, model = branches[which]
        at = cache.current_seq_len
        if op == "append" and at + n <= rows:
            cache = cache.append(0, *kv([number] * n))
            model = model[:at] + [number] * n + [0] * (rows - at - n) if n else model
        elif op == "rotate":
            cache, model = cache.append_rotating(0, *kv([number] * n), position), list(model)
            for i in range(n):
                model[(position + i) % rows] = number
        elif op == "advance" and at + n <= rows:
            cache = cache.advance_by(n)
        elif op == "clone" and len(branches) < 4:
            branches.append((cache.clone(), model))
        elif op == "full":
            assert window(cache) == model
        branches[which] = (cache, model)
        kept = max(cache.current_seq_len, 1)
        assert look(cache.k(0))[:, 0, 0].tolist() == model[:kept]
    for cache, model in branches:
        assert window(cache) == model
    cache = None
    branches.clear()
    assert host_memory()["live_buffers"] <= before
