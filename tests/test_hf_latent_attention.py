"""`latent_attention`, which knows no model, against softmax over expanded keys and values in float64."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from helpers.hf_runs import one_thread  # noqa: E402, F401

from lkv.integrations.transformers.attention import (  # noqa: E402
    chosen_rows,
    crossover,
    latent_attention,
    with_chosen,
)

RANK, NOPE, ROPE, VALUE = 12, 6, 4, 5
SCALING = 1 / math.sqrt(NOPE + ROPE)
LOWEST = torch.finfo(torch.float64).min


def made(rows, n=1, batch=1, heads=2, dtype=torch.float64, rope=ROPE):
    generator = torch.Generator().manual_seed(rows + n)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query, c_kv, k_pe = draw(batch, heads, n, NOPE + rope), draw(batch, 1, rows, RANK), draw(batch, 1, rows, rope)
    return query, c_kv, k_pe, draw(heads, NOPE + VALUE, RANK)


def naive(query, c_kv, k_pe, w_kv, mask=None, sinks=None):
    """Keys and values expanded, row by row as the paper writes it."""
    query, c_kv, k_pe, w_kv = (tensor.double() for tensor in (query, c_kv, k_pe, w_kv))
    batch, heads, n, _ = query.shape
    rows = c_kv.shape[2]
    expanded = torch.einsum("btr,hwr->bhtw", c_kv[:, 0], w_kv)
    key = torch.cat([expanded[..., :NOPE], k_pe.expand(-1, heads, -1, -1)], dim=-1)
    scores = query @ key.transpose(2, 3) * SCALING
    if mask is None and n > 1:
        mask = torch.ones(n, rows, dtype=torch.bool).tril()
    if mask is not None:
        scores = torch.where(mask, scores, LOWEST) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, heads, 1, 1).expand(batch, -1, n, 1)], dim=-1)
    return (scores.softmax(-1)[..., :rows] @ expanded[..., NOPE:]).transpose(1, 2)


def masks(kind, batch, heads, n, rows):
    """Masks of the shapes that transformers builds: those that see all rows up to their own, some less."""
    generator = torch.Generator().manual_seed(n)
    causal = torch.ones(n, rows, dtype=torch.bool).tril(rows - n)
    some = causal & (torch.rand(batch, heads, n, rows, generator=generator) > 0.4)
    some[..., 0] = True
    return {
        "none": None,
        "causal": causal[None, None],
        "batch": some[:, :1],
        "heads": some[:1],
        "full": some,
        "floats": torch.zeros(some.shape, dtype=torch.float64).masked_fill(~some, LOWEST),
        "bias": torch.randn(batch, 1, n, rows, generator=generator, dtype=torch.float64),
    }[kind]


@pytest.mark.parametrize("rows", [1, 2, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (3, 1)])
@pytest.mark.parametrize("mask", ["none", "causal", "batch", "heads", "full", "floats", "bias"])
def test_attention_over_latents_is_attention_over_expanded_rows(rows, batch, heads, mask):
    for n in (1, min(3, rows)):
        given = made(rows, n, batch, heads)
        chosen = masks(mask, batch, heads, n, rows)
        out = latent_attention(*given, chosen, SCALING)
        assert out.shape == (batch, n, heads, VALUE)
        assert out.is_contiguous()
        assert (out - naive(*given, chosen)).abs().max() < 1e-12


@pytest.mark.parametrize("rows", [1, 1025, 2049])
@pytest.mark.parametrize("mask", ["none", "full", "floats"])
def test_sinks_take_part_in_the_softmax(rows, mask):
    given, chosen = made(rows, 1, 3), masks(mask, 3, 2, 1, rows)
    for sinks in (torch.tensor([0.3, -1.0]), torch.tensor([50.0, -50.0])):
        sinks = sinks.double()
        out = latent_attention(*given, chosen, SCALING, sinks)
        assert (out - naive(*given, chosen, sinks)).abs().max() < 1e-12


def test_a_model_without_rotary_keys_has_rows_of_no_width():
    given = made(1030, 1, rope=0)
    assert (latent_attention(*given, None, SCALING) - naive(*given)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [torch.bool, torch.float64, torch.float32])
def test_a_query_that_sees_nothing_is_not_nan_and_disturbs_no_other(kind):
    given = made(1500, 4, batch=2)
    mask = torch.ones(2, 1, 4, 1500, dtype=torch.bool)
    mask[0, :, :2] = False  # padding
    mask[1, ..., :1400] = False  # more than a block of rows that nobody sees
    shown = (
        mask if kind == torch.bool else torch.zeros(mask.shape, dtype=kind).masked_fill(~mask, torch.finfo(kind).min)
    )
    out, expected = latent_attention(*given, shown, SCALING), naive(*given, mask)
    assert out.isfinite().all()
    assert (out[0, 2:] - expected[0, 2:]).abs().max() < 1e-12
    assert (out[1] - expected[1]).abs().max() < 1e-12


def test_rows_masked_by_minus_infinity_have_no_weight():
    given = made(1500, 2)
    mask = torch.zeros(1, 1, 2, 1500, dtype=torch.float64)
    mask[..., :1400] = -math.inf
    out = latent_attention(*given, mask, SCALING)
    assert (out - naive(*given, mask)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rows_are_attended_to_in_float32(dtype):
    query, c_kv, k_pe, w_kv = made(2049, 1, batch=2, dtype=dtype)
    out = latent_attention(query, c_kv, k_pe, w_kv, None, SCALING)
    expected = naive(query, c_kv, k_pe, w_kv)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_scores_of_any_size_do_not_overflow():
    query, c_kv, k_pe, w_kv = made(1500, 1, dtype=torch.float32)
    out = latent_attention(1000 * query, c_kv, k_pe, w_kv, None, SCALING)
    assert out.isfinite().all()
    assert (out - naive(1000 * query, c_kv, k_pe, w_kv)).abs().max() < 1e-2


def test_what_it_is_given_stays_as_it_was():
    given = [*made(1500, 3, batch=2), torch.ones(2, 1, 3, 1500, dtype=torch.bool)]
    copies = [tensor.clone() for tensor in given]
    latent_attention(*given, SCALING)
    assert all(torch.equal(one, other) for one, other in zip(given, copies, strict=True))


def test_rows_of_a_cache_need_not_be_contiguous():
    query, c_kv, k_pe, w_kv = made(1030, 1, batch=3)
    strided = [rows.transpose(0, 2).contiguous().transpose(0, 2) for rows in (c_kv, k_pe)]
    out, again = (latent_attention(query, *rows, w_kv, None, SCALING) for rows in ((c_kv, k_pe), strided))
    assert (out - again).abs().max() < 1e-12


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_rows_that_an_indexer_chose_are_those_attended_to(n, masked):
    given = query, c_kv, k_pe, w_kv = made(20, n, batch=2)
    indices = torch.tensor([[[0, 3, 7], [1, 2, 0], [2, 1, 0]], [[5, 1, 0], [1, 0, 2], [0, 2, 1]]])[:, :n].to(
        torch.int32
    )
    seen = torch.zeros(2, 1, n, 20, dtype=torch.bool).scatter_(-1, indices[:, None].long(), True)
    mask = masks("causal", 2, 2, n, 20).expand(2, -1, -1, -1) if masked else None
    expected = naive(*given, seen & (mask if masked else torch.ones(n, 20, dtype=torch.bool).tril() if n > 1 else seen))
    out = latent_attention(*given, with_chosen(indices, 20, mask), SCALING)
    assert (out - expected).abs().max() < 1e-12
    if n == 1:
        latent, rope, left = chosen_rows(indices, c_kv, k_pe, mask)
        assert latent.shape == (2, 1, 3, RANK)
        assert (latent_attention(query, latent, rope, w_kv, left, SCALING) - expected).abs().max() < 1e-12


def test_the_crossover_of_deepseek_v3_is_at_341_queries():
    assert crossover(512, 128, 64, 128) == 341
    assert crossover(32, 16, 8, 64) > 1000  # latents no wider than keys and values: never worth expanding
