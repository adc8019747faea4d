"""Tiny models of every MLA family of transformers: they are all there, and their decisions mean something."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_models import FAMILIES, ROWS, SLIDING, STATEFUL, caches_latents, installed_families, prompt, tiny  # noqa: E402
from helpers.hf_runs import forward, greedy, one_thread, own_cache  # noqa: E402, F401

from lkv.errors import LkvError  # noqa: E402
from lkv.integrations.transformers import LkvCache, absorb  # noqa: E402

INSTALLED = installed_families()


def test_every_mla_family_that_transformers_has_is_tested():
    assert set(INSTALLED) <= set(FAMILIES), "a family without a configuration in tests/helpers/hf_models.py"


@pytest.mark.parametrize("family", INSTALLED)
def test_greedy_text_of_a_tiny_model_varies_and_no_two_logits_are_close(family):
    tokens, logits = greedy(tiny(family), own_cache, length=7, new_tokens=60)
    assert len(tokens[0, 7:].unique()) > 12
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > 2e-4  # four times what absorbed attention may differ by


@pytest.mark.parametrize("family", INSTALLED)
def test_the_first_token_of_a_tiny_model_matters_to_the_last(family):
    model, ids = tiny(family), prompt(20)
    other = ids.clone()
    other[0, 0] = ids[0, 0] % 127 + 1
    logits, changed = (forward(model, these, own_cache(model))[0, -1] for these in (ids, other))
    assert (logits - changed).abs().max() > 1e-2


@pytest.mark.parametrize("family", [family for family in INSTALLED if "index_topk" in FAMILIES[family][1]])
def test_the_indexer_of_a_tiny_sparse_model_leaves_rows_out(family):
    dense = tiny(family, index_topk=ROWS)
    ids = prompt(60)
    sparse_logits, dense_logits = (forward(model, ids, own_cache(model)) for model in (tiny(family), dense))
    assert (sparse_logits - dense_logits)[:, :12].abs().max() < 1e-4  # no more rows than the indexer takes
    assert (sparse_logits[:, -1] - dense_logits[:, -1]).abs().max() > 1e-2


def test_the_window_of_tiny_sliding_models_leaves_rows_out():
    for family in SLIDING & set(INSTALLED):
        narrow, wide = tiny(family), tiny(family, sliding_window=ROWS)
        ids = prompt(60)
        narrow_logits, wide_logits = (forward(model, ids, own_cache(model)) for model in (narrow, wide))
        assert (narrow_logits[:, -1] - wide_logits[:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("family", [family for family in INSTALLED if caches_latents(family)])
def test_the_latents_of_a_family_are_in_one_cache_and_its_other_layers_are_as_they_were(family):
    model = tiny(family)
    cache, own = LkvCache(model, ROWS), own_cache(model)
    for each in (cache, own):
        forward(model, prompt(9), each)
    assert cache.get_seq_length() == 9
    assert {rows.cached_len for rows in cache.caches} == {9}
    assert len(cache.layers) == len(own.layers)
    for ours, theirs in zip(cache.layers, own.layers, strict=True):
        assert ours.is_croppable == getattr(theirs, "is_croppable", True)  # not in old versions
        if getattr(theirs, "keys", None) is None:  # linear attention, or rows shared with an earlier layer
            continue
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        if getattr(theirs, "indexer_keys", None) is not None:
            assert torch.equal(ours.indexer_keys, theirs.indexer_keys)


def test_families_that_this_version_caches_keys_and_values_of_are_refused_and_left_as_they_were():
    for family in INSTALLED:
        if not caches_latents(family):
            model = tiny(family)
            with pytest.raises(LkvError):
                forward(model, prompt(7), LkvCache(model, ROWS))
            with pytest.raises(LkvError):
                absorb(model)
            assert greedy(model, own_cache, new_tokens=5)[0].shape == (1, 12)


def test_a_model_of_another_kind_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM._from_config(config)
    with pytest.raises(LkvError):
        LkvCache(model, 8)
    with pytest.raises(LkvError):
        absorb(model)


def test_the_families_named_stateful_are_those_that_transformers_calls_so():
    assert {family for family in INSTALLED if tiny(family)._is_stateful} == STATEFUL & set(INSTALLED)
