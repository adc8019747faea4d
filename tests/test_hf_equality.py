"""Generation over an `LkvCache` is transformers' own: bit for bit by itself, to rounding when attention is absorbed.

Some runs are made with every family, the others with one of each kind; ``LKV_TEST_HF=full`` makes all with all, longer
and with both of transformers' attention functions.
"""

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers import hf_runs  # noqa: E402
from helpers.hf_models import EAGER_ONLY, ROWS, SLIDING, STATEFUL, YARN, caches_latents, installed_families, tiny  # noqa: E402
from helpers.hf_models import FAMILIES as MODELS  # noqa: E402
from helpers.hf_runs import FULL, one_thread, own_cache  # noqa: E402, F401

from lkv.integrations.transformers import LkvCache, absorb  # noqa: E402

FAMILIES = [family for family in installed_families() if caches_latents(family)]
ATTENTION = ["sdpa", "eager"] if FULL else ["sdpa"]
# One of each kind: dense, sparse with shared indices, sliding, linear, with layers that share rows or have no rope.
KINDS = {"deepseek_v3", "glm_moe_dsa", "dots3_note", "kimi_linear", "mistral_large4"}

# Largest difference of two logits, which are between 1 and 2 in the mean square and at most 10, in float32.
TOLERANCE = 5e-5

RUNS = [
    hf_runs.greedy_200_tokens,
    hf_runs.long_prompt,
    hf_runs.chunked_prefill,
    hf_runs.crop_and_continue,
    hf_runs.left_padded_batch,
]
MORE_RUNS = [
    hf_runs.one_token_prompt,
    hf_runs.recorded_crop,
    hf_runs.beams,
    hf_runs.sampling,
    hf_runs.prompt_lookup,
    hf_runs.assisted,
    hf_runs.continued_chat,
]
CASES = [(family, run) for family in FAMILIES for run in RUNS]
CASES += [(family, run) for family in FAMILIES for run in MORE_RUNS if FULL or family in KINDS]
CASE_IDS = [f"{family}-{run.__name__}" for family, run in CASES]

# What transformers refuses, or fails in, with its own cache too.
NO_ASSISTANT = (ValueError, "assisted generation is not supported with stateful models")
NO_CROP = (RuntimeError, "does not track past states")
REFUSED = {
    **{("prompt_lookup", family): NO_ASSISTANT for family in STATEFUL},
    **{("assisted", family): NO_ASSISTANT for family in STATEFUL},
    **{("crop_and_continue", family): NO_CROP for family in STATEFUL | SLIDING},
    # Fifty rows back in a window of 24.
    **{("recorded_crop", family): (RuntimeError, "size of tensor a .* must match") for family in SLIDING},
}

if transformers.__version__.startswith("5.15."):  # it calls the model without a token when all of a draft was right
    REFUSED["assisted", "glm4_moe_lite"] = (RuntimeError, "cannot reshape tensor of 0 elements")

# Other shapes of a family's configuration.
VARIANTS = [
    ("deepseek_v2", {"q_lora_rank": 24}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"attention_bias": True}),
    ("glm4_moe_lite", {"kv_lora_rank": 12, "qk_nope_head_dim": 20, "v_head_dim": 24}),
    ("minicpm3", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    ("youtu", {"num_hidden_layers": 1}),
]
VARIANT_IDS = [f"{family}-{'-'.join(overrides)}" for family, overrides in VARIANTS]

cached = functools.cache(tiny)


def model_of(family, attn="sdpa"):
    model = cached(family, attn=attn)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None  # what a vision model remembers of its last prompt, for calls without positions
    return model


def lkv_cache(model):
    return LkvCache(model, ROWS)


@functools.cache
def own(run, family, attn="sdpa"):
    """What transformers' own cache gives, as an exception where it refuses."""
    try:
        return run(model_of(family, attn=attn), own_cache)
    except (ValueError, RuntimeError) as error:
        if (run.__name__, family) not in REFUSED:
            raise
        return error


def check(expected, run, model, family, compare):
    if isinstance(expected, list):
        compare(expected, run(model, lkv_cache))
        return
    kind, message = REFUSED[run.__name__, family]
    with pytest.raises(kind, match=message):
        raise expected
    with pytest.raises(kind, match=message):
        run(model, lkv_cache)


def same(expected, actual):
    for wanted, got in zip(expected, actual, strict=True):
        assert torch.equal(wanted, got)


def close(expected, actual):
    for wanted, got in zip(expected, actual, strict=True):
        if wanted.is_floating_point():
            assert wanted.shape == got.shape
            assert (wanted - got).abs().max() <= TOLERANCE
        else:
            assert torch.equal(wanted, got)


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family, run", CASES, ids=CASE_IDS)
def test_the_cache_alone_changes_no_bit_of_any_logit(family, run, attn):
    check(own(run, family, attn), run, model_of(family, attn=attn), family, same)


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("family, run", CASES, ids=CASE_IDS)
def test_absorbed_attention_gives_the_same_tokens_from_logits_that_differ_by_rounding(family, run, attn):
    model = model_of(family, attn=attn)
    expected = own(run, family, attn)
    with absorb(model):
        check(expected, run, model, family, close)


@pytest.mark.parametrize("run", [hf_runs.chunked_prefill, hf_runs.left_padded_batch], ids=lambda run: run.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_long_queries_may_be_absorbed_too(family, run):
    model = model_of(family)
    expected = own(run, family)
    with absorb(model, crossover=ROWS):
        check(expected, run, model, family, close)


@pytest.mark.parametrize("run", [hf_runs.chunked_prefill, hf_runs.left_padded_batch], ids=lambda run: run.__name__)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EAGER_ONLY])
def test_a_crossover_of_0_expands_as_the_model_does(family, run):
    model = model_of(family)
    expected = own(run, family)
    with absorb(model, crossover=0):  # of a sparse model only the rows that the indexer chose
        check(expected, run, model, family, close if "index_topk" in MODELS[family][1] else same)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_absorbed_is_undone(family):
    model = model_of(family)
    names = list(vars(model))
    with absorb(model):
        hf_runs.chunked_prefill(model, lkv_cache)
    assert list(vars(model)) == names
    assert not any("expand_kv" in vars(module) for module in model.modules())
    same(own(hf_runs.chunked_prefill, family), hf_runs.chunked_prefill(model, own_cache))


@pytest.mark.parametrize("run", [hf_runs.greedy, hf_runs.chunked_prefill], ids=lambda run: run.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_absorbed_attention_works_over_transformers_own_cache(family, run):
    model = model_of(family)
    expected = own(run, family)
    with absorb(model):
        close(expected, run(model, own_cache))


@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_rows_are_stored_as_they_are(family):
    for dtype in (torch.bfloat16, torch.float16) if FULL else (torch.bfloat16,):
        model = tiny(family, dtype)
        same(hf_runs.chunked_prefill(model, own_cache), hf_runs.chunked_prefill(model, lkv_cache))


@pytest.mark.parametrize("run", [hf_runs.greedy, hf_runs.left_padded_batch], ids=lambda run: run.__name__)
@pytest.mark.parametrize("family, overrides", VARIANTS, ids=VARIANT_IDS)
def test_other_shapes_of_a_family_are_the_same(family, overrides, run):
    model = tiny(family, **overrides)
    expected = run(model, own_cache)
    same(expected, run(model, lkv_cache))
    with absorb(model):
        close(expected, run(model, lkv_cache))
