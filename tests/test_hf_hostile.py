"""What others do to an absorbed model or to a cache behind its back: nothing of it may be silently wrong."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_cache import dynamic, model_of, push, random_rows  # noqa: E402
from helpers.hf_models import caches_latents, installed_families, prompt, tiny  # noqa: E402
from helpers.hf_runs import forward, one_thread  # noqa: E402, F401

from lkv.errors import ArgumentTypeError, LayerIndexError, ShapeMismatchError, UnpopulatedLayerError  # noqa: E402
from lkv.integrations.transformers import LkvCache, absorb  # noqa: E402
from lkv.integrations.transformers.attention import latent_attention  # noqa: E402

CLOSE = {"rtol": 0, "atol": 5e-5}
SPARSE = [family for family in ("deepseek_v32", "glm_moe_dsa") if family in installed_families()]
SPARSE = [family for family in SPARSE if caches_latents(family)]


@pytest.fixture
def model():
    return tiny("deepseek_v3")


# ---- absorb ----


@pytest.mark.parametrize("how", ["argument", "module"])
def test_a_model_that_attends_both_ways_still_does(model, how):
    ids, given = prompt(9, batch=2), {"is_causal": False} if how == "argument" else {}
    if how == "module":
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    with torch.no_grad():
        own = model(ids, **given).logits
        absorb(model)
        torch.testing.assert_close(model(ids, **given).logits, own, **CLOSE)


def test_the_projection_may_be_all_that_is_trained(model):
    def gradient():
        model.zero_grad()
        model(prompt(9)).logits.square().mean().backward()
        return projection.weight.grad.clone()

    projection = model.model.layers[0].self_attn.kv_b_proj
    model.requires_grad_(False)
    projection.requires_grad_(True)
    own = gradient()
    absorb(model)
    assert torch.equal(gradient(), own)


@pytest.mark.parametrize("how", ["hook", "pre-hook", "own forward", "weight norm"])
def test_a_projection_that_does_more_than_multiply_is_asked_what_it_does(model, how):
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        if how == "hook":
            projection.register_forward_hook(lambda module, given, out: out * 1.5)
        elif how == "pre-hook":
            projection.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))
        elif how == "own forward":
            weight = projection.weight
            projection.forward = lambda states, weight=weight: torch.nn.functional.linear(states, weight) * 1.5
        else:
            torch.nn.utils.parametrizations.weight_norm(projection)
    ids = prompt(9)
    with torch.no_grad():
        own = model(ids).logits
        absorb(model)
        torch.testing.assert_close(model(ids).logits, own, **CLOSE)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_attends_to_nothing_gives_zeros_as_pytorch_has_it(kind):
    query, c_kv, k_pe = torch.randn(1, 2, 3, 12), torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 4)
    mask = torch.tensor([[False] * 3, [True, False, False], [True] * 3])[None, None]
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out = latent_attention(query, c_kv, k_pe, torch.randn(2, 16, 16), mask, 0.3)
    assert not out[:, 0].any()
    assert out[:, 1:].abs().amin() > 0


def test_padded_positions_too_are_those_of_the_model(model):
    ids, seen = prompt(9, batch=2), torch.ones(2, 9, dtype=torch.long)
    seen[0, :4] = 0
    with torch.no_grad():
        own = model(ids, attention_mask=seen).logits
        absorb(model)
        torch.testing.assert_close(model(ids, attention_mask=seen).logits, own, **CLOSE)


def test_another_attention_function_chosen_meanwhile_is_what_undoing_leaves(model):
    absorb(model)
    model.set_attn_implementation("eager")
    again = absorb(model)
    assert (again.n_layers, model.config._attn_implementation) == (len(model.model.layers), "lkv_mla")
    again.undo()
    assert model.config._attn_implementation == "eager"


def test_of_a_model_and_a_part_of_it_the_last_absorbed_counts(model):
    part, whole = absorb(model.model), absorb(model)
    part.undo()
    assert "undone" in repr(part) and part.crossover == 0
    assert whole.n_layers == len(model.model.layers) and absorb(model) is whole
    whole.undo()
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_configuration_are_undone_one_by_one(model):
    other, ids = type(model)(model.config).eval(), prompt(9)
    with torch.no_grad():
        own = model(ids).logits, other(ids).logits
        first, second = absorb(model), absorb(other)
        first.undo()
        assert torch.equal(model(ids).logits, own[0])
        torch.testing.assert_close(other(ids).logits, own[1], **CLOSE)
    assert second.n_layers == len(other.model.layers)
    second.undo()
    assert model.config._attn_implementation == "sdpa"


# ---- the cache ----


@pytest.mark.parametrize("family", SPARSE)
def test_a_pass_that_failed_between_rows_and_indexer_keys_leaves_no_trace(family):
    model, ids = model_of(family), prompt(20)
    cache, theirs = LkvCache(model, 64), dynamic(model)
    forward(model, ids[:, :17], cache)
    forward(model, ids[:, :17], theirs)
    last = [module for module in model.modules() if getattr(module, "indexer", None) is not None][-1]

    def fail(*_):
        raise MemoryError

    hook = last.indexer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        forward(model, ids[:, 17:], cache)
    hook.remove()
    assert cache.get_seq_length() == 17
    assert torch.equal(forward(model, ids[:, 17:], cache), forward(model, ids[:, 17:], theirs))
    assert cache.get_seq_length() == 20


def test_a_cache_that_was_cleared_behind_its_back_says_so_and_begins_anew():
    cache = LkvCache(model_of("deepseek_v3"), 16)
    push(cache, 3)
    cache.caches[0].clear()
    with pytest.raises(UnpopulatedLayerError, match="cleared"):
        _ = cache.layers[0].keys
    cache.reset()
    push(cache, 2)
    assert cache.get_seq_length() == 2


def test_slots_of_one_layer_have_one_batch_size():
    cache = LkvCache(model_of("deepseek_v3"), 16)
    (c_kv, _), (_, k_pe) = random_rows((32, 8), 3, batch=2), random_rows((32, 8), 3, batch=1)
    with pytest.raises(ShapeMismatchError, match="one batch size"):
        cache.update(c_kv, k_pe, 0)
    assert cache.caches == ()


def test_what_holds_no_latents_is_refused_early():
    cache = LkvCache(model_of("deepseek_v3"), 16)
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(ArgumentTypeError, match="floating-point"):
            cache.open(dtype=dtype)
    with pytest.raises(ArgumentTypeError, match="model: expected"):
        LkvCache(transformers.DeepseekV3Config, 16)


def test_a_model_with_more_layers_than_the_cache_is_told_so():
    cache = LkvCache(model_of("deepseek_v3"), 16)
    rows = random_rows((32, 8), 3)
    with pytest.raises(LayerIndexError, match="the model has more layers"):
        cache.update(*rows, len(cache.layers))
    assert cache.caches == () and cache.get_seq_length() == 0
