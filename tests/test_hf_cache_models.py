"""`LkvCache` under a model: passes that fail, full caches, gradients, threads, files, and other layers beside."""

import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_cache import Unchanged, dynamic, model_of, push, random_rows, rows_of, same  # noqa: E402
from helpers.hf_models import SLIDING, STATEFUL, caches_latents, installed_families, prompt, tiny  # noqa: E402
from helpers.hf_runs import CACHE, forward, generate, one_thread  # noqa: E402, F401
from helpers.scripts import run  # noqa: E402
from helpers.threads import PATIENCE, start  # noqa: E402

import lkv  # noqa: E402
from lkv.errors import CapacityError, GeometryError, IncompleteStepError, LkvError, ShapeMismatchError  # noqa: E402
from lkv.integrations.transformers import LkvCache, absorb  # noqa: E402
from lkv.integrations.transformers.layers import LkvLayer  # noqa: E402

USABLE = [family for family in installed_families() if caches_latents(family)]
KINDS = ["deepseek_v3", "deepseek_v32", "dots3_note", "glm5_next", "kimi_linear", "mistral_large4"]
KINDS = [family for family in KINDS if family in USABLE]
# Of these every layer of attention is lkv's, so that a pass that failed leaves no trace.
ALL_OURS = [family for family in KINDS if family not in SLIDING | STATEFUL]


class Broken(Exception):
    pass


def writing_modules(model, cache):
    """The attention modules that have rows of their own in lkv's cache; others take those of an earlier layer."""
    found = (module for module in model.modules() if hasattr(module, "expand_kv"))
    return [module for module in found if isinstance(cache.layers[module.layer_idx], LkvLayer)]


def failing_pass(model, module, ids, cache):
    """A forward pass that ends before an attention module writes its rows."""

    def fail(*_):
        raise Broken

    hook = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(Broken):
            forward(model, ids, cache)
    finally:
        hook.remove()


# ---- passes that fail ----


@pytest.mark.parametrize("absorbed", [False, True], ids=["plain", "absorbed"])
@pytest.mark.parametrize("family", ALL_OURS)
def test_a_pass_that_failed_in_any_layer_leaves_no_trace(family, absorbed):
    model = tiny(family)
    if absorbed:
        absorb(model)
    prompts = [prompt(9, seed=seed) for seed in range(4)]
    for module in writing_modules(model, LkvCache(model, 64)):
        cache, undisturbed = LkvCache(model, 64), LkvCache(model, 64)
        length = 0
        for ids, n in zip(prompts, (5, 2, 1, 9), strict=True):
            failing_pass(model, module, prompt(n, seed=n + 50), cache)
            assert cache.get_seq_length() == length
            assert cache.get_mask_sizes(1, 0) == (length + 1, 0)
            assert torch.equal(forward(model, ids, cache), forward(model, ids, undisturbed))
            length += 9
        same(rows_of(cache), rows_of(undisturbed))


@pytest.mark.parametrize("family", ALL_OURS)
def test_after_a_first_pass_that_failed_another_batch_size_is_taken(family):
    model = model_of(family)
    cache = LkvCache(model, 64)
    failing_pass(model, writing_modules(model, cache)[-1], prompt(5, batch=3), cache)
    ids = prompt(6, batch=2)
    assert torch.equal(forward(model, ids, cache), forward(model, ids, LkvCache(model, 64)))


@pytest.mark.parametrize("family", ALL_OURS)
def test_every_verb_after_a_pass_that_failed_sees_the_rows_before_it(family):
    model = model_of(family)
    for verb in VERBS.values():
        cache, undisturbed = LkvCache(model, 64), LkvCache(model, 64)
        for each in (cache, undisturbed):
            forward(model, prompt(9, batch=3), each)
        failing_pass(model, writing_modules(model, cache)[-1], prompt(4, batch=3), cache)
        for each in (cache, undisturbed):
            verb(each)
        batch = cache.batch_size
        same([forward(model, prompt(2, batch), cache)], [forward(model, prompt(2, batch), undisturbed)])


def test_a_model_of_fewer_layers_is_found_out_by_its_third_pass():
    cache, model = LkvCache(model_of("deepseek_v3"), 64), tiny("deepseek_v3", num_hidden_layers=2)
    with pytest.raises(IncompleteStepError, match="fewer layers"):
        generate(model, prompt(5), cache)
    assert cache.get_seq_length() == 0


def test_a_pass_that_kept_failing_may_succeed_in_the_end():
    model = model_of("deepseek_v3")
    cache, undisturbed = LkvCache(model, 64), LkvCache(model, 64)
    for each in (cache, undisturbed):
        forward(model, prompt(9), each)
    last = writing_modules(model, cache)[-1]
    for _ in range(2):
        failing_pass(model, last, prompt(4), cache)
    with pytest.raises(IncompleteStepError, match=r"after layers \[0, 1\] of \[0, 1, 2\]"):
        forward(model, prompt(4), cache)
    assert cache.get_seq_length() == 9
    assert torch.equal(forward(model, prompt(4), cache), forward(model, prompt(4), undisturbed))
    same(rows_of(cache), rows_of(undisturbed))


# ---- errors out of a model ----


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_changes():
    model = model_of("deepseek_v3")
    cache = LkvCache(model, 16)
    forward(model, prompt(6), cache)
    with Unchanged(cache), pytest.raises(CapacityError):
        generate(model, prompt(20), cache)
    with Unchanged(cache), pytest.raises(CapacityError):
        forward(model, prompt(11), cache)
    forward(model, prompt(10), cache)
    assert cache.get_seq_length() == 16


def test_generate_that_runs_out_of_rows_leaves_those_that_fitted():
    model = model_of("deepseek_v3")
    cache, own = LkvCache(model, 16), dynamic(model)
    with pytest.raises(CapacityError):
        generate(model, prompt(10), cache, new_tokens=20)
    assert cache.get_seq_length() == 16
    generate(model, prompt(10), own, new_tokens=7)
    same(rows_of(cache), rows_of(own))
    sequences, _ = generate(model, prompt(10), LkvCache(model, 16), new_tokens=7)  # the last token needs no row
    assert sequences.shape == (1, 17)


@pytest.mark.parametrize("other", [{"kv_lora_rank": 24}, {"qk_rope_head_dim": 16}, {"num_hidden_layers": 4}], ids=str)
def test_a_model_of_another_geometry_is_refused(other):
    cache = LkvCache(model_of("deepseek_v3"), 32)
    forward(model_of("deepseek_v3"), prompt(5), cache)
    length = cache.get_seq_length()
    with pytest.raises(LkvError):
        forward(tiny("deepseek_v3", **other), prompt(3), cache)
    if "num_hidden_layers" not in other:  # three layers are in order
        assert cache.get_seq_length() == length
    empty = LkvCache(model_of("deepseek_v3"), 32)
    with pytest.raises(LkvError):
        forward(tiny("deepseek_v3", **other), prompt(3), empty)


def test_another_batch_is_refused_and_nothing_changes():
    model = model_of("deepseek_v3")
    cache = LkvCache(model, 32)
    forward(model, prompt(5, batch=2), cache)
    with Unchanged(cache), pytest.raises(ShapeMismatchError):
        forward(model, prompt(3, batch=3), cache)
    with Unchanged(cache), pytest.raises(LkvError):
        forward(tiny("deepseek_v3", dtype=torch.float64), prompt(3, batch=2), cache)


# ---- element types ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_models_of_other_element_types_give_the_same_logits(family, dtype):
    model = tiny(family, dtype=dtype)
    cache, own = LkvCache(model, 64), dynamic(model)
    for ids in (prompt(20, batch=2), prompt(1, batch=2), prompt(3, batch=2)):
        assert torch.equal(forward(model, ids, cache), forward(model, ids, own))
    assert {layer.keys.dtype for layer in cache.layers} == {dtype}
    same(rows_of(cache), rows_of(own))


# ---- autograd ----


def loss_of(model, cache, *pieces):
    logits = [model(ids, **{CACHE: cache}).logits for ids in pieces]
    return torch.cat(logits, dim=1).log_softmax(-1)[..., 3].sum()


def gradients(model, cache, *pieces):
    model.zero_grad()
    loss_of(model, cache, *pieces).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_under_autograd_the_first_rows_come_back_themselves():
    cache = LkvCache(model_of("deepseek_v3"), 16)
    for layer in range(3):
        rows = [tensor.requires_grad_() for tensor in random_rows((32, 8), 4, seed=layer)]
        returned = cache.update(*rows, layer)
        assert all(one is other for one, other in zip(returned, rows, strict=True))
    assert not cache.layers[0].keys.requires_grad
    rows = [tensor.requires_grad_() for tensor in random_rows((32, 8), 2, seed=9)]
    keys, values = cache.update(*rows, 0)
    (keys.sum() + 2 * values.sum()).backward()
    same([tensor.grad for tensor in rows], [torch.full_like(rows[0], 1.0), torch.full_like(rows[1], 2.0)])


@pytest.mark.parametrize("family", KINDS)
def test_the_gradients_of_a_pass_are_those_over_a_dynamic_cache(family):
    model = tiny(family)
    ids = prompt(9, batch=2)
    same(gradients(model, LkvCache(model, 32), ids), gradients(model, dynamic(model), ids))


def test_gradients_do_not_go_through_rows_that_are_cached():
    model = tiny("deepseek_v3")
    caches = [LkvCache(model, 32), dynamic(model)]
    for cache in caches:
        forward(model, prompt(9), cache)
    same(*(gradients(model, cache, prompt(4, seed=1)) for cache in caches))


def test_rows_cached_in_inference_mode_may_be_used_under_autograd():
    model = tiny("deepseek_v3").requires_grad_(False)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight.requires_grad_()
    found = []
    for cache, mode in ((LkvCache(model, 32), torch.inference_mode), (dynamic(model), torch.no_grad)):
        with mode():
            model(prompt(9), **{CACHE: cache})
        weight.grad = None
        loss_of(model, cache, prompt(2, seed=1)).backward()
        found.append([weight.grad])
    same(*found)


@pytest.mark.parametrize("family", ["deepseek_v3", *[family for family in KINDS if family == "deepseek_v32"]])
@pytest.mark.parametrize(
    "order",
    [("inference_mode", "no_grad", "enable_grad"), ("enable_grad", "inference_mode", "no_grad", "inference_mode")],
)
def test_inference_mode_no_grad_and_autograd_may_take_turns(family, order):
    model = model_of(family)
    cache, own = LkvCache(model, 64), dynamic(model)
    for seed, mode in enumerate(order):
        ids = prompt(5, seed=seed)
        with getattr(torch, mode)():
            logits = model(ids, **{CACHE: cache}).logits
        assert torch.allclose(logits, forward(model, ids, own), rtol=0, atol=1e-6)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([0]))
    with torch.inference_mode():
        cache.batch_repeat_interleave(2)
    assert forward(model, prompt(1, batch=2), cache).shape[0] == 2


# ---- threads and processes ----


@pytest.mark.parametrize("absorbed", [False, True], ids=["plain", "absorbed"])
def test_two_threads_generate_with_a_cache_each(absorbed):
    model = tiny("deepseek_v3")
    if absorbed:
        absorb(model)
    prompts = [prompt(12, seed=seed) for seed in range(2)]
    alone = [generate(model, ids, LkvCache(model, 64)) for ids in prompts]
    barrier = threading.Barrier(2)

    def go(ids):
        barrier.wait(PATIENCE)
        return [generate(model, ids, LkvCache(model, 64)) for _ in range(3)]

    for future, expected in zip([start(go, ids) for ids in prompts], alone, strict=True):
        for result in future.result(4 * PATIENCE):
            assert torch.equal(result[0], expected[0])
            assert torch.allclose(result[1], expected[1], rtol=0, atol=1e-5)


def test_a_forked_child_is_refused_the_cache_and_may_make_its_own():
    source = """
        import os, sys
        import torch, transformers
        from lkv.errors import ForkedError
        from lkv.integrations.transformers import LkvCache

        def push(cache):
            for layer in range(2):
                cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 8), layer)

        torch.set_num_threads(1)
        config = transformers.DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=32, qk_rope_head_dim=8)
        cache = LkvCache(config, 16)
        push(cache)
        child = os.fork()
        if child == 0:
            try:
                push(cache)
            except ForkedError:
                own = LkvCache(config, 16)
                push(own)
                os._exit(own.get_seq_length())
            os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        push(cache)
        print(cache.get_seq_length())
    """
    assert run(source) == "6\n"


# ---- files ----


def test_a_saved_cache_is_restored_and_generation_goes_on_as_if_nothing_had_been(tmp_path):
    model = model_of("deepseek_v3")
    cache, path = LkvCache(model, 64), tmp_path / "cache.safetensors"
    first, _ = generate(model, prompt(20, batch=2), cache, new_tokens=8)
    lkv.save(cache.caches[0], path, fingerprint="tiny")
    fresh = LkvCache(model, 96)
    (latents,) = fresh.open(batch_size=2)
    latents.restore(path, fingerprint="tiny")
    assert fresh.get_seq_length() == cache.get_seq_length() == 27
    assert fresh.batch_size == 2
    same(rows_of(fresh), rows_of(cache))
    same(generate(model, first, fresh), generate(model, first, cache))


def test_a_saved_cache_does_not_fit_another_batch(tmp_path):
    model = model_of("deepseek_v3")
    cache, path = LkvCache(model, 64), tmp_path / "cache.safetensors"
    forward(model, prompt(5, batch=2), cache)
    lkv.save(cache.caches[0], path, fingerprint=None)
    fresh = LkvCache(model, 64)
    (latents,) = fresh.open(batch_size=3)
    with Unchanged(fresh), pytest.raises(LkvError):
        latents.restore(path, fingerprint=None)


# ---- other layers beside ----

VERBS = {
    "crop": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("family", KINDS)
def test_a_verb_of_the_cache_reaches_every_layer(family, verb):
    model = model_of(family)
    cache, own = LkvCache(model, 64), dynamic(model)
    errors, logits = [], []
    for each in (cache, own):
        each.activate_past_recording() if verb == "crop" and hasattr(each, "activate_past_recording") else None
        forward(model, prompt(30, batch=3), each)
        errors.append(None)
        try:
            VERBS[verb](each)
        except Exception as error:
            errors[-1] = type(error)
            continue
        if verb == "reset" and each is own:  # before 5.18 it keeps the length
            each = dynamic(model)
        batch = {"repeat": 6, "select": 2}.get(verb, 3)
        logits += [[forward(model, prompt(2, batch), each), forward(model, prompt(1, batch), each)]]
    assert errors[0] == errors[1]
    if errors[0] is None:
        same(*logits)


@pytest.mark.parametrize("family", [family for family in KINDS if family in SLIDING | STATEFUL])
def test_layers_that_do_not_keep_all_of_their_past_are_left_to_transformers(family):
    model = model_of(family)
    cache, own = LkvCache(model, 64), dynamic(model)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds != [type(layer) for layer in own.layers]
    others = [(kind, type(layer)) for kind, layer in zip(kinds, own.layers, strict=True) if "Lkv" not in kind.__name__]
    assert others
    assert all(ours is theirs for ours, theirs in others)
    assert cache.is_sliding == own.is_sliding
    assert getattr(cache, "is_linear", None) == getattr(own, "is_linear", None)
    assert cache.get_max_length(0) in (64, own.get_max_length(0))
    for each in (cache, own):
        forward(model, prompt(30), each)
    assert cache.get_seq_length() == own.get_seq_length() == 30
    sliding = [index for index, slides in enumerate(cache.is_sliding) if slides]
    assert [cache.get_mask_sizes(3, index) for index in sliding] == [own.get_mask_sizes(3, index) for index in sliding]


SPARSE = [family for family in USABLE if family in ("deepseek_v32", "glm_moe_dsa", "axk2")]


@pytest.mark.parametrize("family", SPARSE)
def test_the_keys_of_an_indexer_have_a_cache_of_their_own(family):
    model = model_of(family)
    cache, own = LkvCache(model, 64), dynamic(model)
    for each in (cache, own):
        forward(model, prompt(20, batch=2), each)
        forward(model, prompt(1, batch=2), each)
    ours, theirs = ([layer.indexer_keys for layer in each.layers] for each in (cache, own))
    kept = [keys for keys in theirs if keys is not None]
    same([keys for keys in ours if keys is not None], kept)
    names = [[spec.name for spec in each.slots] for each in cache.caches]
    assert names == [["c_kv", "k_pe"]] + len(kept) * [["k_index"]]
    assert [each.cached_len for each in cache.caches] == (1 + len(kept)) * [21]
    assert {layer.is_indexer_initialized for layer in cache.layers} >= {True}


@pytest.mark.skipif(not SPARSE, reason="before transformers 5.18 sparse models cache no latents")
def test_an_indexer_out_of_turn_is_refused():
    cache = LkvCache(model_of("deepseek_v32"), 16)
    assert cache.layers[0].indexer_keys is None
    assert not cache.layers[0].is_indexer_initialized
    with pytest.raises(IncompleteStepError, match="update comes first"):
        cache.layers[0].update_indexer(torch.zeros(2, 3, 16))
    push(cache, 4)
    cache.layers[0].update_indexer(torch.zeros(2, 4, 16))
    push(cache, 4, seed=1)
    with Unchanged(cache), pytest.raises(IncompleteStepError):
        cache.layers[0].update_indexer(torch.zeros(2, 2, 16))
    push(cache, 4, seed=2)  # the pass before got no keys, and so did not come to its end
    assert cache.layers[0].update_indexer(torch.zeros(2, 4, 16)).shape == (2, 8, 16)


def test_open_after_rows_is_refused_for_every_family():
    for family in KINDS:
        model = model_of(family)
        cache = LkvCache(model, 64)
        forward(model, prompt(3), cache)
        with pytest.raises(GeometryError):
            cache.open()
