"""The absorbed attention of every family against the family's own, one attention module at a time."""

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_models import ROWS, caches_latents, installed_families, prompt, tiny  # noqa: E402
from helpers.hf_runs import CACHE, FULL, forward, one_thread, own_cache  # noqa: E402, F401
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from lkv.integrations.transformers import LkvCache, absorb  # noqa: E402

FAMILIES = [family for family in installed_families() if caches_latents(family)]
# A prompt in two parts, tokens, and what a draft would bring, for four sequences: that many rows are read in blocks.
STEPS = (150, 130, 1, 1, 7, 1)
BATCH = 4
PADDED = 260  # of the second sequence: its first block has nothing to attend to


def mla_modules(model):
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


def recorded(model, cache):
    """Every call of an attention module: the module, its keywords, the attention output, and which of it counts."""
    calls = []
    mask = torch.ones(BATCH, sum(STEPS), dtype=torch.long)
    mask[1, :PADDED] = 0
    end = 0

    def record(module, args, keywords, outputs):
        calls.append((module, keywords, outputs[0].clone(), mask[:, end - n : end].bool()))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in mla_modules(model)]
    for ids in prompt(sum(STEPS), BATCH).split(STEPS, dim=1):
        n = ids.shape[1]
        end += n
        forward(model, ids, cache, attention_mask=mask[:, :end])
    for hook in hooks:
        hook.remove()
    return calls


def added(mask, dtype):
    """A boolean mask as numbers to add to the scores: eager attention takes no other."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


@pytest.mark.parametrize("crossover", [None, ROWS] if FULL else [ROWS])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_attention_module_in_float64_agrees_with_its_own_to_1e_12(family, crossover):
    model = tiny(family, torch.float64)
    with absorb(model, crossover=crossover):
        calls = recorded(model, LkvCache(model, ROWS))
    assert len(calls) == len(STEPS) * len(mla_modules(model))
    cache = own_cache(model)
    for module, keywords, absorbed, counts in calls:
        keywords = {**keywords, CACHE: cache}
        if module.config._attn_implementation == "eager":
            keywords["attention_mask"] = added(keywords["attention_mask"], torch.float64)
        with torch.no_grad():
            expanded = module(**keywords)[0]
        assert (absorbed - expanded)[counts].abs().max() < 1e-12


class Core:
    """What the attention of a model's first MLA module is given and gives, by transformers' own code."""

    def __init__(self, model, monkeypatch):
        self.module = mla_modules(model)[0]
        self.calls = []
        self.latents = None
        self.expand = self.module.expand_kv
        code = sys.modules[type(self.module).__module__]
        self.attend = {"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"], "eager": code.eager_attention_forward}[
            self.module.config._attn_implementation
        ]
        monkeypatch.setattr(self.module, "expand_kv", self.expanding)
        monkeypatch.setattr(code, "eager_attention_forward", self.attending)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", self.attending)

    def expanding(self, c_kv, k_pe):
        self.latents = c_kv, k_pe
        return self.expand(c_kv, k_pe)

    def attending(self, module, query, key, value, mask, **keywords):
        out = self.attend(module, query, key, value, mask, **keywords)
        if module is self.module:
            self.calls.append((query, *self.latents, mask, keywords, out[0]))
        return out


def exact(module, query, c_kv, k_pe, mask, scaling, sinks=None):
    """Attention over expanded keys and values, all in float64."""
    query, c_kv, k_pe, weight = (values.double() for values in (query, c_kv, k_pe, module.kv_b_proj.weight))
    batch, heads, n, _ = query.shape
    rows = c_kv.shape[2]
    expanded = (c_kv[:, 0] @ weight.T).view(batch, rows, heads, -1).transpose(1, 2)
    nope, value = expanded.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    key = torch.cat([nope, k_pe.expand(-1, heads, -1, -1)], dim=-1)
    scores = query @ key.transpose(2, 3) * scaling
    if mask is None and n > 1:
        mask = torch.ones(n, rows, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores + added(mask, torch.float64)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, heads, 1, 1).expand(batch, -1, n, 1)], dim=-1)
    return (scores.softmax(-1)[..., :rows] @ value).transpose(1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_attention_is_no_further_from_float64_than_the_models_own(family, monkeypatch):
    model = tiny(family, torch.bfloat16)
    with monkeypatch.context() as patch:
        core = Core(model, patch)
        cache = own_cache(model)
        for ids in prompt(308).split([300, *[1] * 8], dim=1):
            forward(model, ids, cache)
    own_error, absorbed_error = [], []
    with absorb(model, crossover=ROWS), torch.no_grad():
        for query, c_kv, k_pe, mask, keywords, out in core.calls:
            reference = exact(core.module, query, c_kv, k_pe, mask, keywords["scaling"], keywords.get("s_aux"))
            attend = ALL_ATTENTION_FUNCTIONS[core.module.config._attn_implementation]
            absorbed, _ = attend(core.module, query, c_kv, k_pe, mask, **keywords)
            own_error.append((out.double() - reference).flatten())
            absorbed_error.append((absorbed.double() - reference).flatten())
    own_error, absorbed_error = torch.cat(own_error), torch.cat(absorbed_error)
    assert 0 < absorbed_error.abs().max() <= 1.05 * own_error.abs().max()  # both may be that of rounding the output
    assert absorbed_error.square().mean().sqrt() <= 1.25 * own_error.square().mean().sqrt()
