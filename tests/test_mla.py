"""MLA attention: both forms against a textbook float64 implementation, and the layer built on them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.errors import DTypeMismatchError, GeometryError, ShapeMismatchError
from lkv.mla import PRESETS, MLAConfig, MLALayer, apply_rope, attend_absorbed, attend_expanded, rms_norm
from lkv.mla import attention as attention_module

FORMS = [attend_absorbed, attend_expanded]
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def textbook(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, softmax_scale=None, causal=True):
    """Scores, softmax and sum head by head and query by query in float64."""
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (
        np.asarray(a).astype(np.float64) for a in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv)
    )
    n_q, n_heads, nope = q_nope.shape
    scale = 1 / math.sqrt(nope + q_pe.shape[2]) if softmax_scale is None else softmax_scale
    out = np.zeros((n_q, n_heads, w_uv.shape[1]))
    for head in range(n_heads):
        keys = np.concatenate([c_kv @ w_uk[head].T, k_pe], axis=1)
        values = c_kv @ w_uv[head].T
        for i in range(n_q):
            seen = len(c_kv) - n_q + i + 1 if causal else len(c_kv)
            scores = keys[:seen] @ np.concatenate([q_nope[i, head], q_pe[i, head]]) * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ values[:seen]
    return out


def operands(seed, n_q, n_rows, n_heads=3, nope=8, rope=4, rank=12, v_dim=6, rows_dtype=np.float32, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "q_nope": rng.standard_normal((n_q, n_heads, nope)).astype(dtype) * 2,
        "q_pe": rng.standard_normal((n_q, n_heads, rope)).astype(dtype) * 2,
        "c_kv": rng.standard_normal((n_rows, rank)).astype(rows_dtype),
        "k_pe": rng.standard_normal((n_rows, rope)).astype(rows_dtype),
        "w_uk": (rng.standard_normal((n_heads, nope, rank)) / math.sqrt(rank)).astype(dtype),
        "w_uv": (rng.standard_normal((n_heads, v_dim, rank)) / math.sqrt(rank)).astype(dtype),
    }


def relative(actual, expected):
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_q=st.integers(1, 9),
    past=st.integers(0, 40),
    n_heads=st.integers(1, 5),
    nope=st.integers(1, 17),
    rope=st.integers(0, 9),
    rank=st.integers(1, 33),
    v_dim=st.integers(1, 17),
    rows_dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    block_rows=st.integers(1, 64),
)
def test_both_forms_are_the_textbook_result_for_any_dims(
    seed, n_q, past, n_heads, nope, rope, rank, v_dim, rows_dtype, causal, block_rows
):
    op = operands(seed, n_q, n_q + past, n_heads, nope, rope, rank, v_dim, rows_dtype)
    expected = textbook(**op, causal=causal)
    for form in FORMS:
        actual = form(**op, causal=causal, block_rows=block_rows)
        assert actual.dtype == np.float32
        assert actual.shape == (n_q, n_heads, v_dim)
        assert relative(actual, expected) < 2e-5


@pytest.mark.parametrize("rows_dtype", DTYPES[1:])
@pytest.mark.parametrize(("n_q", "n_rows"), [(1, 1), (1, 1500), (5, 700), (300, 300)])
def test_the_two_forms_agree_within_1e_5_in_float32(n_q, n_rows, rows_dtype):
    op = operands(7, n_q, n_rows, n_heads=4, nope=32, rope=16, rank=64, v_dim=32, rows_dtype=rows_dtype)
    assert relative(attend_absorbed(**op), attend_expanded(**op)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_float64_inputs_are_computed_in_float64(form):
    op = operands(1, 3, 50, rows_dtype=np.float64, dtype=np.float64)
    actual = form(**op)
    assert actual.dtype == np.float64
    assert relative(actual, textbook(**op)) < 1e-13


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows_dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.dtype(">f4")])
def test_other_float_rows_are_widened_too(form, rows_dtype):
    op = operands(2, 2, 30, rows_dtype=rows_dtype)
    assert relative(form(**op), textbook(**op)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights_dtype", DTYPES)
def test_weights_and_queries_of_any_float_type_are_taken(form, weights_dtype):
    op = operands(3, 2, 30, dtype=weights_dtype)
    assert relative(form(**op), textbook(**op)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows_dtype", DTYPES[1:])
def test_prefill_is_the_same_as_decoding_token_by_token(form, rows_dtype):
    op = operands(4, 20, 33, rows_dtype=rows_dtype)
    together = form(**op, block_rows=8)
    for i in range(20):
        seen = 33 - 20 + i + 1
        alone = form(
            op["q_nope"][i : i + 1], op["q_pe"][i : i + 1], op["c_kv"][:seen], op["k_pe"][:seen], op["w_uk"], op["w_uv"]
        )
        np.testing.assert_allclose(together[i], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("rows_dtype", [np.float32, ml_dtypes.bfloat16])
def test_block_boundaries_do_not_show(form, n_rows, rows_dtype):
    for n_q in (1, min(n_rows, 16), n_rows):
        op = operands(n_rows, n_q, n_rows, rows_dtype=rows_dtype)
        assert relative(form(**op, block_rows=16), textbook(**op)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_many_queries_are_split_into_tiles_without_a_trace(form, monkeypatch):
    op = operands(5, 23, 40)
    monkeypatch.setattr(attention_module, "_MAX_QUERY_COLUMNS", 3 * 5)
    assert relative(form(**op, block_rows=7), textbook(**op)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_strided_rows_give_the_same_result(form, rows_dtype):
    op = operands(6, 4, 50, rows_dtype=rows_dtype)
    expected = form(**op, block_rows=16)
    rank, rope = op["c_kv"].shape[1], op["k_pe"].shape[1]
    packed = np.concatenate([op["c_kv"], op["k_pe"]], axis=1)
    layouts = {
        "packed": (packed[:, :rank], packed[:, rank:]),
        "packed with room behind": tuple(
            np.pad(packed, ((0, 0), (0, 5)))[:, part] for part in (slice(0, rank), slice(rank, rank + rope))
        ),
        "packed the other way round": tuple(
            np.concatenate([op["k_pe"], op["c_kv"]], axis=1)[:, part] for part in (slice(rope, None), slice(0, rope))
        ),
        "every other row": tuple(np.repeat(op[name], 2, axis=0)[::2] for name in ("c_kv", "k_pe")),
        "reversed": tuple(np.ascontiguousarray(op[name][::-1])[::-1] for name in ("c_kv", "k_pe")),
        "column order": tuple(np.asfortranarray(op[name]) for name in ("c_kv", "k_pe")),
    }
    for name, (c_kv, k_pe) in layouts.items():
        actual = form(**op | {"c_kv": c_kv, "k_pe": k_pe}, block_rows=16)
        assert relative(actual, expected) < 1e-6, name


@pytest.mark.parametrize("form", FORMS)
def test_read_only_rows_are_enough_and_inputs_stay_as_they_were(form):
    op = operands(8, 2, 9)
    before = {name: array.copy() for name, array in op.items()}
    for array in op.values():
        array.flags.writeable = False
    form(**op)
    for name, array in op.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("form", FORMS)
def test_large_scores_do_not_overflow(form):
    op = operands(9, 2, 40)
    op["q_nope"] *= 1e4
    actual = form(**op, block_rows=8)
    assert np.isfinite(actual).all()
    assert relative(actual, textbook(**op)) < 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_the_softmax_scale_replaces_the_default(form):
    op = operands(10, 2, 20)
    assert relative(form(**op, softmax_scale=0.9), textbook(**op, softmax_scale=0.9)) < 1e-5
    assert relative(form(**op, softmax_scale=0.9), form(**op)) > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_no_queries_give_an_empty_result(form):
    assert form(**operands(0, 0, 0)).shape == (0, 3, 6)
    assert form(**operands(0, 0, 5)).shape == (0, 3, 6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("causal", "n_rows"), [(True, 0), (True, 1), (False, 0)])
def test_queries_without_a_row_to_see_are_refused(form, causal, n_rows):
    with pytest.raises(ShapeMismatchError, match="c_kv: expected at least") as caught:
        form(**operands(0, 2, n_rows), causal=causal)
    assert caught.value.actual == n_rows


BAD_SHAPES = {
    "q_nope": (2, 3, 7),
    "q_pe": (2, 3, 5),
    "c_kv": (9, 11),
    "k_pe": (8, 4),
    "w_uk": (3, 8, 11),
    "w_uv": (2, 6, 12),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BAD_SHAPES)
def test_a_dimension_that_does_not_fit_is_refused(form, name):
    op = operands(0, 2, 9)
    op[name] = np.zeros(BAD_SHAPES[name], np.float32)
    with pytest.raises(ShapeMismatchError) as caught:
        form(**op)
    assert caught.value.expected != caught.value.actual


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BAD_SHAPES)
def test_a_missing_dimension_is_refused_by_name(form, name):
    op = operands(0, 2, 9)
    op[name] = op[name][0]
    with pytest.raises(ShapeMismatchError, match=f"^{name}: expected"):
        form(**op)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BAD_SHAPES)
@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.complex64, bool, object])
def test_what_is_not_floating_point_is_refused_by_name(form, name, dtype):
    op = operands(0, 2, 9)
    op[name] = op[name].astype(dtype)
    with pytest.raises(DTypeMismatchError, match=f"^{name}: expected"):
        form(**op)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_no_rows_are_refused(form):
    with pytest.raises(GeometryError, match="block_rows"):
        form(**operands(0, 2, 9), block_rows=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_is_a_complex_rotation_of_pairs(interleaved):
    x = np.random.default_rng(0).standard_normal((5, 3, 8))
    positions = np.array([0, 1, 7, 100, 100_000])
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * positions[:, None] * 500.0 ** (-np.arange(4) / 4))[:, None]
    expected = np.empty_like(x)
    if interleaved:
        expected[..., 0::2], expected[..., 1::2] = turned.real, turned.imag
    else:
        expected[..., :4], expected[..., 4:] = turned.real, turned.imag
    np.testing.assert_allclose(apply_rope(x, positions, 500.0, interleaved), expected, atol=1e-12)


def test_rope_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 16))
    near = apply_rope(q, [12]) @ apply_rope(k, [5]).T
    far = apply_rope(q, [1012]) @ apply_rope(k, [1005]).T
    np.testing.assert_allclose(near, far, atol=1e-10)


def test_rope_widens_bfloat16_to_float32():
    x = np.ones((2, 4), ml_dtypes.bfloat16)
    assert apply_rope(x, [0, 1]).dtype == np.float32


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_rope_refuses_an_odd_or_missing_axis(shape):
    with pytest.raises(ShapeMismatchError, match=r"^x: expected"):
        apply_rope(np.zeros(shape, np.float32), np.arange(shape[0]))


def test_rope_refuses_positions_of_another_length():
    with pytest.raises(ShapeMismatchError, match=r"^positions: expected"):
        apply_rope(np.zeros((2, 4), np.float32), [0, 1, 2])


def test_rms_norm_gives_unit_root_mean_square():
    x = np.random.default_rng(2).standard_normal((3, 64)) * 10
    np.testing.assert_allclose(np.sqrt((rms_norm(x, np.ones(64)) ** 2).mean(axis=1)), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("preset", "latent", "expanded"),
    [("deepseek-v2-lite", 31_104, 276_480), ("deepseek-v3", 70_272, 4_997_120), ("minicpm3", 35_712, 793_600)],
)
def test_bytes_per_token_of_published_models(preset, latent, expanded):
    config = PRESETS[preset]
    assert config.bytes_per_token("bfloat16") == latent
    assert config.expanded_bytes_per_token("bfloat16") == expanded
    assert config.bytes_per_token(np.float32, n_layers=1) == 4 * sum(width for (width,) in config.slot_trailing)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None])
@pytest.mark.parametrize("name", ["hidden_size", "n_layers", "n_heads", "kv_lora_rank", "v_head_dim"])
def test_degenerate_geometry_is_refused_by_name(name, value):
    dims = {"hidden_size": 8, "n_layers": 1, "n_heads": 1, "kv_lora_rank": 4, "v_head_dim": 4}
    with pytest.raises(GeometryError, match=f"^{name}: expected"):
        MLAConfig(**dims | {name: value}, qk_nope_head_dim=4, qk_rope_head_dim=2)


def test_an_odd_rotary_width_is_refused():
    with pytest.raises(GeometryError, match=r"^qk_rope_head_dim: expected an even"):
        MLAConfig(8, 1, 1, 4, 4, 3, 4)


@pytest.fixture(scope="module", params=[None, 48], ids=["direct query", "compressed query"])
def layer(request):
    return MLALayer(MLAConfig(96, 1, 4, 64, 32, 16, 32, q_lora_rank=request.param), seed=5)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_layer_fed_in_pieces_gives_what_it_gives_in_one_go(layer, form):
    h = np.random.default_rng(3).standard_normal((30, 96), dtype=np.float32)
    whole = layer.forward(h, np.arange(30), form="expanded")
    stored_c, stored_p = np.zeros((30, 64), np.float32), np.zeros((30, 16), np.float32)
    for lo, hi in [(0, 11), (11, 12), (12, 13), (13, 30)]:

        def rows(c_kv, k_pe, lo=lo, hi=hi):
            stored_c[lo:hi], stored_p[lo:hi] = c_kv, k_pe
            return stored_c[:hi], stored_p[:hi]

        piece = layer.forward(h[lo:hi], np.arange(lo, hi), rows, form=form)
        np.testing.assert_allclose(piece, whole[lo:hi], rtol=1e-4, atol=1e-5)


def test_layer_shapes_are_the_documented_ones(layer):
    h = np.ones((3, 96), np.float32)
    c_kv, k_pe = layer.latents(h, np.arange(3))
    q_nope, q_pe = layer.queries(h, np.arange(3))
    assert [a.shape for a in (c_kv, k_pe, q_nope, q_pe)] == [(3, 64), (3, 16), (3, 4, 32), (3, 4, 16)]
    assert {a.dtype.name for a in (c_kv, k_pe, q_nope, q_pe)} == {"float32"}
    assert layer.attend(q_nope, q_pe, c_kv, k_pe).shape == (3, 96)
    assert layer.config.weights_per_layer == sum(w.size for w in layer.weights.values())


def test_equal_seeds_give_equal_weights_and_others_do_not():
    config = PRESETS["tiny"]
    first, same, other = (MLALayer(config, seed).weights["w_uk"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("shape", [(3, 95), (96,), ()])
def test_a_layer_refuses_hidden_states_of_another_width(layer, shape):
    with pytest.raises(ShapeMismatchError, match=r"^h: expected"):
        layer.forward(np.zeros(shape, np.float32), np.arange(3))
