"""LatentCache over JAX arrays, and rows of a persistent cache handed to JAX."""

import copy
import gc
import subprocess
import sys
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from helpers.functional import ROWS, TRAILING, column, make, put

import lkv
from lkv import DType, KvCache, LatentCache, LatentKvCache, LazyKvCache
from lkv.devices import DeviceLocation
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    ConsumedError,
    DTypeMismatchError,
    GeometryError,
    LayerIndexError,
    LeaseTimeoutError,
    OutOfMemoryError,
    ShapeMismatchError,
)

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
checkify = pytest.importorskip("jax.experimental.checkify")
as_jax = pytest.importorskip("lkv.integrations.jax").as_jax


def fresh(layers=2, **more):
    return make(jnp.zeros(0), layers=layers, **more)


def rows(n, value, dtype="float32"):
    return [jnp.full((n, *trailing), value, dtype) for trailing in TRAILING]


def step(cache, value):
    """Append one row full of a value to every layer; return the cache and the sum of its first buffer."""
    for layer in range(cache.n_layers):
        cache = cache.append(layer, [jnp.full((1, *t), value, "float32") for t in TRAILING])
    cache = cache.advance_by(1)
    return cache, cache.slot_buffer_full(0, 2).sum()


def pointers(cache):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)[:-1]]


# ---- eager ----


def test_a_jax_anchor_makes_a_latent_cache_of_jax_arrays():
    cache = fresh()
    assert isinstance(cache, LatentCache) and type(cache).__mro__[1] is LatentCache
    assert repr(cache) == "LatentCache(2 layers x 3 slots, 0/8 rows, float32, cpu, jax arrays, 448 B)"
    assert isinstance(cache.slot(0, 0), jax.Array) and cache.slot(0, 0).shape == (1, 4)
    assert cache.device == DeviceLocation("cpu") and cache.nbytes == 448 and cache.slot_trailing(1) == (2,)
    assert cache.current_seq_len == 0 and cache.dtype.name == "float32"


def same_story(anchor):
    """Everything the verbs can do, as bytes."""
    seen = []
    cache = put(make(anchor), 2, 1)
    cache = put(cache, 3, 2, advance=False)
    other = cache.clone()
    cache = put(cache, 1, 3, advance=False)
    copied = copy.deepcopy(cache).advance_by(4)
    cache = put(cache.advance_by(1), 0, 9).advance_by(2)
    other = put(other.advance_by(2), 4, 5)
    for branch in (cache, other, copied, put(make(anchor), 8, 7), make(anchor)):
        seen.append(branch.current_seq_len)
        for layer in range(2):
            for slot in range(3):
                seen += [
                    np.asarray(a).tolist() for a in (branch.slot(layer, slot), branch.slot_buffer_full(layer, slot))
                ]
    return seen


def test_jax_and_numpy_tell_the_same_story():
    assert same_story(jnp.zeros(0)) == same_story(np.zeros(0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "bool"])
def test_rows_come_back_bit_for_bit(dtype):
    kind = DType.of(dtype).numpy
    arrays = [np.arange(2 * int(np.prod(t))).reshape(2, *t).astype(kind) for t in TRAILING]
    cache = fresh(dtype=dtype).append(1, arrays).advance_by(2)
    for slot, array in enumerate(arrays):
        assert cache.slot(1, slot).dtype == kind and np.asarray(cache.slot(1, slot)).tobytes() == array.tobytes()


def test_arrays_of_any_kind_are_taken_and_may_be_reused():
    torch = pytest.importorskip("torch")
    source = np.ones((2, 2), "f4")
    persistent = LatentKvCache.with_capacity(1, 4, [(2,)] * 4, "float32")
    persistent.append(0, [source] * 4)
    persistent.advance_by(2)
    cache = make(jnp.zeros(0), trailing=[(2,)] * 4)
    cache = cache.append(0, [source, torch.from_numpy(source), memoryview(source), lkv.Storage.wrap(source).read()])
    with persistent.read(0) as view:
        cache = cache.append(1, view)
    source[:] = 9
    persistent.truncate_to(0)
    persistent.append(0, [source] * 4)
    cache = cache.advance_by(2)
    assert all(cache.slot(layer, slot).sum() == 4 for layer in range(2) for slot in range(4))
    bits = lkv.bits(np.full((1, 2), 0x3F80, "u2"), "bf16")
    cache = make(jnp.zeros(0), trailing=[(2,)], dtype="bf16").append(0, [bits]).advance_by(1)
    assert cache.slot(0, 0).astype("f4").tolist() == [[1.0, 1.0]]


def test_an_eager_append_is_in_place_while_nobody_else_has_the_buffers():
    cache = put(fresh(), 1, 1)
    seen = [buffer.unsafe_buffer_pointer() for buffer in cache._buffers[0]]
    for value in range(2, 5):
        cache = put(cache, 1, value)
        assert cache.slot(0, 0).shape == (value, 4)
    assert [buffer.unsafe_buffer_pointer() for buffer in cache._buffers[0]] == seen


@pytest.mark.parametrize("look", ["slot_buffer_full", "slot", "clone", "leaves"])
def test_what_was_handed_out_never_changes(look):
    cache = put(fresh(), ROWS - 1 if look != "slot" else ROWS, 1)
    taken = {
        "slot_buffer_full": lambda: cache.slot_buffer_full(0, 0),
        "slot": lambda: cache.slot(0, 0),
        "clone": cache.clone,
        "leaves": lambda: jax.tree.leaves(cache)[0],
    }[look]()
    before = column(taken) if look == "clone" else np.asarray(taken).copy()
    if look != "slot":
        cache = put(cache, 1, 5)
    else:
        cache = jax.tree.unflatten(jax.tree.structure(cache), [*jax.tree.leaves(cache)[:-1], jnp.int32(0)])
        cache = put(cache, 1, 5)
    assert column(cache)[7 if look != "slot" else 0] == 5
    assert column(taken) == before if look == "clone" else np.array_equal(taken, before)


def test_consumed_handles_refuse():
    old = fresh()
    new = old.append(0, rows(1, 1))
    for verb in (
        lambda: old.append(0, rows(1, 1)),
        lambda: old.advance_by(1),
        lambda: old.slot(0, 0),
        lambda: old.slot_buffer_full(0, 0),
        lambda: old.current_seq_len,
        lambda: old.nbytes,
        old.clone,
        lambda: jax.tree.leaves(old),
    ):
        with pytest.raises(ConsumedError, match="consumed"):
            verb()
    assert repr(old) == "LatentCache(consumed)" and new.current_seq_len == 0


# ---- refusals ----

BAD = [
    ("layer", 2, lambda a: a, LayerIndexError, r"layer: expected 0 <= layer < 2, got 2"),
    ("bool layer", True, lambda a: a, ArgumentTypeError, r"layer: expected an integer"),
    ("too few", 0, lambda a: a[:2], ShapeMismatchError, r"append: expected 3 slots \(slot0, slot1, slot2\), got 2"),
    (
        "width",
        0,
        lambda a: [a[0], a[0], a[2]],
        ShapeMismatchError,
        r"slot 1 .*: expected \(2, 2\) float32, got \(2, 4\)",
    ),
    (
        "rank",
        0,
        lambda a: [a[1], a[1], a[1]],
        ShapeMismatchError,
        r"slot 0 .*: expected \(n, 4\) float32, got \(2, 2\)",
    ),
    ("rows", 0, lambda a: [a[0], a[1], a[2][:1]], ShapeMismatchError, r"slot 2 \(slot2\): expected \(2,\) float32"),
    ("scalar", 0, lambda a: [a[2][0], a[1], a[2]], ShapeMismatchError, r"got \(\)"),
    ("dtype", 0, lambda a: [a[0], a[1].astype("float16"), a[2]], DTypeMismatchError, r"got \(2, 2\) float16"),
    ("no sequence", 0, lambda a: a[0], ArgumentTypeError, r"slots: expected a list or tuple"),
    ("no array", 0, lambda a: [a[0], a[1], 7], ArgumentTypeError, r"DLPack"),
    ("capacity", 0, lambda a: [jnp.repeat(x, 5, 0)[:9] for x in a], CapacityError, r"append: 9 rows at .* do not fit"),
]


@pytest.mark.parametrize(("layer", "spoil", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
@pytest.mark.parametrize("traced", [False, True])
def test_a_bad_append_is_refused_at_trace_time_and_consumes_nothing(layer, spoil, error, message, traced):
    ran = []

    def program(cache, arrays):
        with pytest.raises(error, match=message):
            cache.append(layer, spoil(arrays))
        ran.append(True)
        return cache.append(0, arrays).advance_by(2)

    cache = (jax.jit(program) if traced else program)(fresh(), rows(2, 3))
    assert ran == [True] and column(cache) == [3, 3, 0, 0, 0, 0, 0, 0]


def test_the_capacity_is_exact_and_known_while_tracing_when_the_position_is():
    cache = put(fresh(), 5, 1)
    with pytest.raises(CapacityError, match=r"append: 4 rows at 5 do not fit max_seq_len 8"):
        put(cache.clone(), 4, 2)
    with pytest.raises(CapacityError, match=r"advance_by: 4 rows at 5"):
        cache.advance_by(4)
    assert put(cache, 3, 2).current_seq_len == 8

    def inside(x):
        made = put(make(x), 6, 1)
        assert made.current_seq_len == 6 and made.slot(0, 0).shape == (6, 4)
        with pytest.raises(CapacityError, match=r"append: 3 rows at 6"):
            put(made, 3, 1)
        return made

    cache = jax.jit(inside)(jnp.zeros(0))
    assert column(cache) == [1] * 6 + [0] * 2 and cache.current_seq_len == 6


def test_degenerate_geometry_is_refused():
    for change in ({"layers": 0}, {"rows": 0}, {"trailing": []}, {"trailing": [(0,)]}, {"rows": 1 << 31}):
        with pytest.raises(GeometryError):
            make(jnp.zeros(0), **change)
    for dtype in ("float64", "int64"):
        with pytest.raises(DTypeMismatchError, match="jax_enable_x64"):
            fresh(dtype=dtype)
    with pytest.raises(ArgumentTypeError, match="LatentCache with two slots"):
        LazyKvCache(jnp.zeros(0), 1, 8, 2, 4)


def test_out_of_memory_is_said_as_everywhere(monkeypatch):
    def zeros(*args, **more):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(jnp, "zeros", zeros)
    with pytest.raises(OutOfMemoryError, match="cannot hold 448 bytes"):
        make(jnp.ones(1))


# ---- under jit and scan ----


def test_a_jitted_step_compiles_once_and_writes_donated_buffers_in_place():
    run = jax.jit(step, donate_argnums=0)
    cache = put(fresh(), 2, 9)
    before = pointers(cache)
    for value in range(3):
        cache, total = run(cache, jnp.float32(value))
        assert pointers(cache) == before
    assert run._cache_size() == 1 and total == 21
    assert cache.current_seq_len == 5 and column(cache) == [9, 9, 0, 1, 2, 0, 0, 0]


def test_the_compiled_step_aliases_every_buffer_and_takes_no_temporary_copy():
    cache = fresh(rows=1 << 16)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, jnp.float32(0)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes and memory.temp_size_in_bytes < 4096
    assert "input_output_alias" in compiled.as_text()
    undonated = jax.jit(step).lower(cache, jnp.float32(0)).compile().memory_analysis()
    assert undonated.alias_size_in_bytes == 0


def test_a_scan_decodes_in_place():
    run = jax.jit(lambda cache, values: jax.lax.scan(step, cache, values), donate_argnums=0)
    cache = fresh()
    before = pointers(cache)
    cache, totals = run(cache, jnp.arange(1, 6, dtype="float32"))
    assert totals.tolist() == [1, 3, 6, 10, 15] and column(cache) == [1, 2, 3, 4, 5, 0, 0, 0]
    assert pointers(cache) == before and cache.slot(1, 2).tolist() == [1, 2, 3, 4, 5]


def test_a_handle_whose_buffers_were_donated_says_so():
    cache = fresh()
    jax.jit(step, donate_argnums=0)(cache, jnp.float32(1))
    for verb in (lambda: cache.slot(0, 0), lambda: cache.append(0, rows(1, 1)), lambda: cache.advance_by(1)):
        with pytest.raises(ConsumedError, match="donated"):
            verb()


def test_without_donation_the_handle_given_stays_good():
    cache = put(fresh(), 1, 4)
    after, _ = jax.jit(step)(cache, jnp.float32(5))
    assert column(cache) == [4] + [0] * 7 and column(after) == [4, 5] + [0] * 6
    assert column(put(cache, 1, 6)) == [4, 6] + [0] * 6 and column(after) == [4, 5] + [0] * 6


def test_handles_are_consumed_inside_a_trace_too():
    def program(cache):
        successor = cache.append(0, rows(1, 1))
        with pytest.raises(ConsumedError):
            cache.append(0, rows(1, 1))
        other = successor.clone().append(0, rows(1, 2))
        return successor.advance_by(1), other.advance_by(1)

    first, second = jax.jit(program)(fresh())
    assert column(first)[0] == 1 and column(second)[0] == 2


def test_appending_again_before_advance_by_replaces_longer_content_in_a_trace():
    def program(cache):
        return cache.append(0, rows(5, 2)).append(0, rows(2, 3)).advance_by(1)

    cache = jax.jit(program)(put(fresh(), 2, 1))
    assert column(cache) == [1, 1, 3, 3, 0, 0, 0, 0]
    assert column(cache.append(0, rows(0, 0)).append(0, rows(1, 4))) == [1, 1, 3, 4, 0, 0, 0, 0]


def test_a_traced_position_has_no_slot_but_a_length():
    def program(cache):
        with pytest.raises(ArgumentTypeError, match="mask slot_buffer_full with current_seq_len"):
            cache.slot(0, 0)
        with pytest.raises(ArgumentTypeError, match="known while tracing"):
            cache.clone().advance_by(cache.current_seq_len)
        assert "traced/8 rows" in repr(cache)
        return jnp.where(jnp.arange(ROWS) < cache.current_seq_len, cache.slot_buffer_full(0, 2), 100).sum()

    assert jax.jit(program)(put(fresh(), 3, 1)) == 503


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_overflow_at_a_traced_position_is_never_silent(dtype):
    def program(cache):
        cache = cache.append(0, rows(3, 5, dtype)).advance_by(3)
        return cache, cache.current_seq_len, cache.slot_buffer_full(0, 2)

    run = jax.jit(program)
    cache, length, _ = run(put(fresh(dtype=dtype), 5, 1))
    assert length == 8
    cache, length, buffer = run(cache)
    assert length == -1
    if dtype == "int8":
        assert buffer.tolist() == [1] * 5 + [5] * 3
    else:
        assert buffer[:5].tolist() == [1] * 5 and jnp.isnan(buffer[5:]).all()
    again, length, _ = run(cache)
    assert length == -1 and "overflowed/8 rows" in repr(again)
    for verb in (
        lambda: again.slot(0, 0),
        lambda: again.slot_buffer_full(0, 0),
        lambda: again.current_seq_len,
        lambda: again.append(0, rows(1, 1, dtype)),
        lambda: again.advance_by(0),
    ):
        with pytest.raises(CapacityError, match="more rows were appended than max_seq_len 8 takes"):
            verb()


def test_advancing_too_far_at_a_traced_position_is_never_silent():
    cache = jax.jit(lambda cache: cache.advance_by(6))(put(fresh(), 3, 1))
    with pytest.raises(CapacityError):
        cache.slot(0, 0)


def test_overflow_is_an_error_under_checkify():
    run = jax.jit(checkify.checkify(lambda cache, values: jax.lax.scan(step, cache, values)))
    error, _ = run(put(fresh(), 5, 1), jnp.zeros(3))
    assert error.get() is None
    error, _ = run(put(fresh(), 5, 1), jnp.zeros(4))
    with pytest.raises(checkify.JaxRuntimeError, match="append: 1 rows at 8 do not fit max_seq_len 8"):
        error.throw()


def test_a_batch_by_vmap_and_gradients():
    prefill = jax.vmap(lambda x: make(x, 1, trailing=[(4,)]).append(0, [x]).advance_by(2))
    batch = prefill(jnp.arange(24, dtype="float32").reshape(3, 2, 4))
    with pytest.raises(ArgumentTypeError, match=r"inside jax.vmap"):
        batch.slot(0, 0)
    sums = jax.vmap(lambda cache: cache.append(0, [jnp.ones((1, 4))]).slot_buffer_full(0, 0).sum())(batch)
    assert sums.tolist() == [32, 96, 160]
    gradient = jax.grad(lambda x, cache: 2 * step(cache, x)[1])
    assert gradient(jnp.float32(1), fresh()) == 2


def test_it_is_a_pytree_with_named_leaves():
    cache = put(fresh(1), 2, 1)
    leaves, structure = jax.tree.flatten(cache)
    assert [leaf.shape for leaf in leaves] == [(8, 4), (8, 2), (8,), ()] and leaves[-1].dtype == "int32"
    assert column(jax.tree.unflatten(structure, leaves)) == column(cache)
    doubled = jax.tree.map(lambda leaf: leaf * 2, cache)
    assert column(doubled)[:5] == [2, 2, 0, 0, 0] and doubled.current_seq_len == 4
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert names[0] == ".buffers[0][0]" and names[-1] == ".current_seq_len"
    assert jax.tree.structure(fresh(1)) == structure != jax.tree.structure(fresh(1, rows=9))
    assert jax.eval_shape(step, cache, jnp.float32(0))[0]._buffers[0][0].shape == (8, 4)


def test_a_model_that_attends_over_the_cache_gives_the_same_tokens_jitted_and_not():
    query = jax.random.normal(jax.random.key(0), (4,))

    def attend(cache, x):
        cache = cache.append(0, [x[None]]).advance_by(1)
        keys = cache.slot_buffer_full(0, 0)
        scores = jnp.where(jnp.arange(ROWS) < cache.current_seq_len, keys @ query, -jnp.inf)
        return cache, jax.nn.softmax(scores) @ keys

    xs = jax.random.normal(jax.random.key(1), (6, 4))
    cache, eager = make(jnp.zeros(0), 1, trailing=[(4,)]), []
    for x in xs:
        cache, out = attend(cache, x)
        eager.append(out)
    _, scanned = jax.jit(partial(jax.lax.scan, attend))(make(jnp.zeros(0), 1, trailing=[(4,)]), xs)
    assert np.allclose(np.stack(eager), scanned, atol=1e-6)


# ---- imports ----


def test_importing_lkv_does_not_import_jax_and_a_numpy_cache_neither():
    code = (
        "import sys, numpy as np, lkv, lkv.cli; lkv.LatentCache(np.empty(0), 1, 8, [(4,)], 'f32'); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


# ---- handover of a persistent cache's rows ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_rows_of_a_persistent_cache_reach_jax_without_a_copy(dtype):
    kind = DType.of(dtype).numpy
    cache = LatentKvCache.with_capacity(2, 64, [(512,), (64,)], dtype)
    with cache.step(3) as opened:
        for layer in range(2):
            opened.append(layer, [np.full((3, 512), layer + 1).astype(kind), np.ones((3, 64)).astype(kind)])
    with cache.read(1) as view:
        latents, keys = (as_jax(rows, copy=False) for rows in view)
        assert latents.unsafe_buffer_pointer() == view[0].address and latents.unsafe_buffer_pointer() % 64 == 0
        assert latents.shape == (3, 512) and latents.dtype == kind and keys.shape == (3, 64)
        assert float(latents.astype("float32").sum()) == 3 * 512 * 2


def test_what_has_gaps_is_copied_or_refused():
    packed = LatentKvCache.with_capacity(1, 64, [(512,), (64,)], "float32", layout="packed")
    packed.append(0, [np.ones((3, 512), "f4"), np.full((3, 64), 2, "f4")])
    packed.advance_by(3)
    heads = KvCache.with_capacity(1, 2, 4, 8, "float32")
    heads.append(0, [np.ones((1, 2, 3, 4), "f4")] * 2)
    heads.advance_by(3)
    for cache, total in ((packed, 384), (heads, 24)):
        with cache.read(0) as view:
            with pytest.raises(ValueError, match="they have gaps; copy=None"):
                as_jax(view[1], copy=False)
            copied = as_jax(view[1])
        cache.wipe()
        assert copied.sum() == total


def test_a_copy_is_independent_of_the_cache():
    cache = LatentKvCache.with_capacity(1, 64, [(512,)], "float32")
    cache.append(0, [np.ones((3, 512), "f4")])
    cache.advance_by(3)
    with cache.read(0) as view:
        copied = as_jax(view[0], copy=True)
        assert copied.unsafe_buffer_pointer() != view[0].address
    cache.wipe()
    assert copied.sum() == 3 * 512


def test_jax_never_writes_to_rows_it_was_handed():
    cache = LatentKvCache.with_capacity(1, 64, [(512,)], "float32")
    cache.append(0, [np.ones((3, 512), "f4")])
    cache.advance_by(3)
    with cache.read(0) as view:
        shared = as_jax(view[0], copy=False)
        out = jax.jit(lambda x: x * 0, donate_argnums=0)(shared).block_until_ready()
        assert out.unsafe_buffer_pointer() != view[0].address and view[0].numpy().sum() == 3 * 512


def test_an_array_keeps_a_lease_that_nobody_ended_and_the_memory_always():
    cache = LatentKvCache.with_capacity(1, 64, [(512,)], "float32")
    cache.append(0, [np.ones((3, 512), "f4")])
    cache.advance_by(3)
    shared = as_jax(cache.slot_storage(0, 0).read(0, 3), copy=False)
    gc.collect()
    with pytest.raises(LeaseTimeoutError):
        cache.slot_storage(0, 0).write(0, 3, timeout=0)
    del shared
    gc.collect()
    cache.slot_storage(0, 0).write(0, 3, timeout=0).release()
    with cache.read(0) as view:
        shared = as_jax(view[0], copy=False)
    cache.slot_storage(0, 0).write(0, 3, timeout=0).release()
    del cache, view
    gc.collect()
    assert shared.sum() == 3 * 512


def test_what_cannot_be_handed_over_is_refused():
    with pytest.raises(ArgumentTypeError, match="expected a View"):
        as_jax(np.zeros(3))
    with pytest.raises(ArgumentTypeError, match="jax_enable_x64"):
        as_jax(lkv.Storage((2, 2), "float64").read())
    with LatentKvCache.with_capacity(1, 8, [(4,)]).read(0) as view:
        assert as_jax(view[0], copy=False).shape == (0, 4)


def test_rows_go_from_a_persistent_cache_into_a_functional_one():
    cache = LatentKvCache.with_capacity(1, 64, [(4,)], "bfloat16")
    cache.append(0, [np.ones((3, 4), ml_dtypes.bfloat16)])
    cache.advance_by(3)
    functional = make(jnp.zeros(0), 1, rows=64, trailing=[(4,)], dtype="bf16")
    with cache.read(0) as view:
        functional = functional.append(0, [as_jax(view[0])]).advance_by(view.hi)
        functional.slot_buffer_full(0, 0).block_until_ready()
    cache.wipe()
    assert functional.slot(0, 0).astype("f4").sum() == 12
