"""`absorb` of a model and its end: what is changed, what may change meanwhile, and what is refused."""

import copy
import functools
import io
import pickle
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_cache import dynamic, same  # noqa: E402
from helpers.hf_models import caches_latents, installed_families, prompt, tiny  # noqa: E402
from helpers.hf_runs import forward, generate, one_thread  # noqa: E402, F401
from helpers.ids import named  # noqa: E402

from lkv.errors import ArgumentTypeError, GeometryError, ShapeMismatchError  # noqa: E402
from lkv.integrations.transformers import Absorbed, LkvCache, absorb  # noqa: E402

absorbing = sys.modules[absorb.__module__]
USABLE = [family for family in installed_families() if caches_latents(family)]
KINDS = [
    family for family in ("deepseek_v2", "deepseek_v3", "hy_v4", "kimi_linear", "mistral_large4") if family in USABLE
]
HUGE = 10**6


@pytest.fixture
def model():
    return tiny("deepseek_v3")


@pytest.fixture
def calls(monkeypatch):
    """How many queries each call of absorbed attention had."""
    counted, attend = [], absorbing.latent_attention

    def count(query, *args):
        counted.append(query.shape[2])
        return attend(query, *args)

    monkeypatch.setattr(absorbing, "latent_attention", count)
    return counted


def attributes(model):
    """Every attribute of every module, and every setting of every configuration."""
    found = {}
    for name, module in model.named_modules():
        found[name] = {
            key: id(value) if not isinstance(value, dict) else list(value) for key, value in vars(module).items()
        }
        config = getattr(module, "config", None)
        if config is not None:
            found[name]["settings"] = repr(sorted(vars(config).items(), key=lambda item: item[0]))
            found[name]["attention"] = config._attn_implementation
    return found


def attention(model, index=1):
    return [module for module in model.modules() if hasattr(module, "expand_kv")][index]


def text(model, cache=None):
    return generate(model, prompt(12), dynamic(model) if cache is None else cache, new_tokens=6)


def close(ours, theirs, atol=5e-5):
    for one, other in zip(ours, theirs, strict=True):
        if one.is_floating_point():
            assert (one - other).abs().max() < atol
        else:
            assert torch.equal(one, other)


def outputs(model, ids, **options):
    """What every attention module put out."""
    found, modules = [], [module for module in model.modules() if hasattr(module, "expand_kv")]
    hooks = [module.register_forward_hook(lambda *call: found.append(call[2][0].clone())) for module in modules]
    forward(model, ids, dynamic(model), **options)
    for hook in hooks:
        hook.remove()
    return found


# ---- and its end ----


@pytest.mark.parametrize("family", KINDS)
def test_undo_leaves_every_attribute_of_every_module_as_it_was(family):
    model = tiny(family)
    before, weights = attributes(model), list(model.state_dict())
    absorbed = absorb(model)
    assert attributes(model) != before
    assert list(model.state_dict()) == weights
    forward(model, prompt(5), dynamic(model))
    absorbed.undo()
    assert attributes(model) == before
    absorbed.undo()
    assert attributes(model) == before
    assert absorbed.n_layers == absorbed.crossover == 0
    assert repr(absorbed) == "Absorbed(undone)"
    again = absorb(model)
    assert again is not absorbed
    assert again.n_layers > 0


def test_an_exception_inside_the_block_undoes_too(model):
    before = attributes(model)
    with pytest.raises(ZeroDivisionError), absorb(model) as absorbed:
        assert isinstance(absorbed, Absorbed)
        forward(model, prompt(3), dynamic(model))
        1 / 0  # noqa: B018
    assert attributes(model) == before


def test_only_attention_over_latents_is_touched():
    for family in KINDS:
        model = tiny(family)
        before = attributes(model)
        with absorb(model) as absorbed:
            changed = {name for name, now in attributes(model).items() if before[name].keys() != now.keys()}
            mla = {name for name, module in model.named_modules() if hasattr(module, "expand_kv")}
            assert changed == mla
            assert absorbed.n_layers == len(mla)
            others = [module for module in model.modules() if hasattr(module, "config")]
            others = [module.config for module in others if not hasattr(module.config, "kv_lora_rank")]
            assert all(config._attn_implementation != "lkv_mla" for config in others if "vision" in config.model_type)


def test_a_model_absorbed_twice_has_one_handle(model):
    absorbed = absorb(model)
    assert absorb(model) is absorbed
    assert absorbed.n_layers == 3
    assert "3 layers" in repr(absorbed)
    standard = absorbed.crossover
    assert absorb(model, crossover=7) is absorbed
    assert absorbed.crossover == 7
    assert absorb(model).crossover == 7
    absorbed.undo()
    assert absorb(model).crossover == standard


def test_a_model_that_is_gone_takes_its_handle_along(model):
    import gc

    absorbed = absorb(model)
    count = len(absorbing._handles)
    del model
    gc.collect()
    absorbed.undo()
    assert len(absorbing._handles) <= count


# ---- crossover ----


@pytest.mark.parametrize(
    ("crossover", "expected"), [(0, []), (1, []), (2, [1]), (12, [1]), (13, [12, 1]), (HUGE, [12, 1]), (None, [12, 1])]
)
def test_the_crossover_says_how_many_queries_are_absorbed(model, calls, crossover, expected):
    plain = text(model)
    absorb(model, crossover=crossover)
    close(text(model), plain)
    assert sorted(set(calls), reverse=True) == expected


@pytest.mark.parametrize("crossover", [True, 1.0, "1", [1], -1, 2**63])
def test_a_crossover_that_is_no_count_is_refused(model, crossover):
    before = attributes(model)
    with pytest.raises((ArgumentTypeError, GeometryError), match="crossover"):
        absorb(model, crossover=crossover)
    assert attributes(model) == before


# ---- training ----


def gradients(model, ids):
    model.zero_grad()
    model(ids).logits.log_softmax(-1)[..., 3].sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_the_models_own_path(family, training, calls):
    model = tiny(family).train(training)
    ids = prompt(9, batch=2)
    torch.manual_seed(0)
    plain = gradients(model, ids)
    with absorb(model, crossover=HUGE):
        torch.manual_seed(0)
        same(gradients(model, ids), plain)
    assert calls == []


def test_in_training_mode_nothing_is_absorbed_even_without_gradients(model, calls):
    absorb(model.train())
    forward(model, prompt(4), dynamic(model))
    assert calls == []
    forward(model.eval(), prompt(4), dynamic(model))
    assert calls == 3 * [4]


# ---- the weights change ----


def test_weights_that_change_are_used_as_they_are(model):
    absorb(model)
    for change in (
        lambda weight: weight.mul_(0.5),
        lambda weight: weight.copy_(torch.randn_like(weight)),
        lambda weight: setattr(weight, "data", weight.data * 2),
    ):
        before = text(model)
        with torch.no_grad():
            change(attention(model).kv_b_proj.weight)
        after = text(model)
        assert not torch.equal(after[1], before[1])
        unabsorbed = copy.deepcopy(model)
        absorb(unabsorbed).undo()
        close(after, text(unabsorbed))
    state = {name: weight + 0.01 for name, weight in model.state_dict().items() if weight.is_floating_point()}
    model.load_state_dict(state, strict=False)
    after = text(model)
    absorb(model).undo()
    close(after, text(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_may_change_its_element_type_while_absorbed(model, dtype, calls):
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    ids = prompt(300)
    absorb(model, crossover=HUGE)
    model.to(dtype)
    absorbed = outputs(model, ids)[0]  # of later layers not: what is routed to other experts differs by more
    assert calls == 3 * [300]
    absorb(model).undo()
    plain = outputs(model, ids)[0]
    assert absorbed.dtype == dtype
    assert (absorbed - plain).abs().max() < 8 * torch.finfo(dtype).eps * plain.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_few_rows_of_a_narrow_type_are_expanded_which_is_faster(model, dtype, calls):
    few = absorbing._FEW_ROWS
    model.to(dtype)
    absorb(model)
    cache, own = LkvCache(model, few), dynamic(model)
    rows = forward(model, prompt(few - 1), cache)
    assert calls == []
    forward(model, prompt(1), cache)
    assert calls == 3 * [1]
    absorb(model).undo()
    assert torch.equal(rows, forward(model, prompt(few - 1), own))


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank change to it, as adapters make them."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base
        self.down = torch.nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = {"default": 1.0}
        self.active_adapters = ["default"]

    def forward(self, x):
        return self.base_layer(x) + self.scaling["default"] * (x @ self.down.T @ self.up.T)


def test_an_adapter_around_the_projection_is_used_and_seen_to_change(model, calls):
    attention(model).kv_b_proj = adapted = Adapted(attention(model).kv_b_proj)
    first = text(model)
    absorb(model)
    close(text(model), first)
    with torch.no_grad():
        adapted.up.normal_()
    second = text(model)
    assert not torch.equal(first[1], second[1])
    adapted.scaling["default"] = 0.25
    third = text(model)
    assert not torch.equal(third[1], second[1])
    adapted.base_layer.weight.data = 2 * adapted.base_layer.weight.data
    fourth = text(model)
    assert calls
    absorb(model).undo()
    close(fourth, text(model))
    adapted.base_layer.weight.data = 0.5 * adapted.base_layer.weight.data
    close(third, text(model))
    adapted.scaling["default"] = 1.0
    close(second, text(model))


def test_an_adapter_made_in_inference_mode_is_used(model):
    with torch.inference_mode():
        attention(model).kv_b_proj = Adapted(attention(model).kv_b_proj)
        plain = text(model)
        absorb(model)
        close(text(model), plain)


def test_a_projection_whose_weights_do_not_change_is_read_once(model, monkeypatch):
    attention(model).kv_b_proj = adapted = Adapted(attention(model).kv_b_proj)
    absorb(model)
    made = []
    monkeypatch.setattr(adapted, "forward", lambda x: (made.append(x.shape), Adapted.forward(adapted, x))[1])
    text(model)
    assert made == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
def test_a_quantised_projection_is_absorbed_as_it_computes(model, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in model.modules():
            if hasattr(module, "expand_kv"):
                torch.ao.quantization.quantize_dynamic(module, {"kv_b_proj"}, dtype=torch.qint8, inplace=True)
    assert type(attention(model).kv_b_proj) is not torch.nn.Linear
    ids = prompt(12)
    plain = forward(model, ids, dynamic(model))
    absorb(model)
    absorbed = forward(model, ids, dynamic(model))
    assert calls == 3 * [12]
    assert (absorbed - plain).abs().max() < 0.05 * plain.abs().max()  # it rounds its inputs, which are others here


# ---- what is refused ----


class Raises(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("no")


class Sharded(torch.Tensor):
    device_mesh = "two devices"


def refused():
    def on_meta(module):
        module.kv_b_proj.to("meta")

    def with_bias(module):
        module.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(module.kv_b_proj.out_features))

    def split(module):
        weight = module.kv_b_proj.weight.detach().as_subclass(Sharded)
        module.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)

    return {
        "raises": (ArgumentTypeError, lambda module: setattr(module, "kv_b_proj", Raises())),
        "meta": (ArgumentTypeError, on_meta),
        "bias": (ArgumentTypeError, with_bias),
        "split": (ArgumentTypeError, split),
        "adapter on meta": (
            ArgumentTypeError,
            lambda module: setattr(module, "kv_b_proj", Adapted(module.kv_b_proj).to("meta")),
        ),
        "adapter with a bias": (
            ArgumentTypeError,
            lambda module: setattr(module, "kv_b_proj", Adapted(torch.nn.Linear(32, 128, bias=True))),
        ),
        "shape": (ShapeMismatchError, lambda module: setattr(module, "kv_b_proj", torch.nn.Linear(32, 33, bias=False))),
        "width": (
            ShapeMismatchError,
            lambda module: setattr(module, "kv_b_proj", torch.nn.Linear(16, 128, bias=False)),
        ),
    }


@pytest.mark.parametrize("why", refused())
def test_weights_that_cannot_be_read_are_refused_by_name_and_nothing_is_changed(model, why):
    error, change = refused()[why]
    change(attention(model))
    before = attributes(model)
    with pytest.raises(error, match=r"model\.layers\.1\.self_attn\.kv_b_proj"):
        absorb(model)
    assert attributes(model) == before


@pytest.mark.parametrize("thing", [None, 3, "deepseek", object()], ids=named)
def test_what_is_no_module_is_refused(thing):
    with pytest.raises(ArgumentTypeError, match="model"):
        absorb(thing)


def test_a_module_without_attention_over_latents_is_refused():
    with pytest.raises(GeometryError, match="Linear"):
        absorb(torch.nn.Linear(2, 2))


# ---- what a user does with a model meanwhile ----


def test_another_attention_function_may_be_set_while_absorbed(model, calls):
    before = attributes(model)
    model.set_attn_implementation("eager")
    eager = text(model)
    model.set_attn_implementation("sdpa")
    absorbed = absorb(model)
    model.set_attn_implementation("eager")
    same(text(model), eager)
    assert calls == []
    model.set_attn_implementation("lkv_mla")
    close(text(model), eager)
    assert calls
    absorbed.undo()
    assert attributes(model) == before


def test_a_deep_copy_is_absorbed_as_well_and_undone_for_itself(model, calls):
    plain = text(model)
    before = attributes(model).keys()
    absorbed = absorb(model)
    other = copy.deepcopy(model)
    assert attention(other).expand_kv.args[0] is attention(other)
    with torch.no_grad():
        attention(other).kv_b_proj.weight.mul_(2)
    assert not torch.equal(text(other)[1], plain[1])
    close(text(model), plain)
    absorb(other).undo()
    assert other.config._attn_implementation == "sdpa"
    assert "expand_kv" not in vars(attention(other))
    assert model.config._attn_implementation == "lkv_mla"
    absorbed.undo()
    same(text(model), plain)
    assert attributes(other).keys() == before


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_an_absorbed_model_can_be_pickled(model, how, calls):
    plain = text(model)
    absorb(model)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    close(text(other), plain)
    assert calls
    absorb(other).undo()
    same(text(other), plain)


def test_an_absorbed_model_is_saved_as_if_it_were_not(model, tmp_path):
    plain = text(model)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    absorb(model)
    assert {name: weight.shape for name, weight in model.state_dict().items()} == {
        name: weight.shape for name, weight in weights.items()
    }
    model.save_pretrained(tmp_path)
    assert "lkv" not in (tmp_path / "config.json").read_text("utf-8")
    other = type(model).from_pretrained(tmp_path).eval()
    assert other.config._attn_implementation == "sdpa"
    assert "expand_kv" not in vars(attention(other))
    same(text(other), plain)


def test_beams_samples_and_padding_find_absorbed_attention_in_their_way(model, calls):
    ids, mask = prompt(20, batch=3), torch.ones(3, 20, dtype=torch.long)
    ids[1, :7], mask[1, :7] = 0, 0
    options = {"attention_mask": mask, "num_beams": 2, "new_tokens": 5}
    plain = generate(model, ids, dynamic(model), **options)
    absorb(model)
    close(generate(model, ids, LkvCache(model, 32), **options), plain)
    assert set(calls) == {20, 1}


# ---- masks, in float64 ----


@functools.cache
def in_float64(family):
    return tiny(family, dtype=torch.float64)


PADDED = [*KINDS, *[family for family in USABLE if family == "deepseek_v32"]]
TWO_DIMENSIONS_ONLY = {"kimi_linear", "deepseek_v32", "mistral_large4"}  # do not take a mask that is ready


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in PADDED for kind in ("left padding", "a sequence of padding")]
    + [(family, "floats") for family in PADDED if family not in TWO_DIMENSIONS_ONLY],
)
def test_masks_are_obeyed_to_1e_12(family, kind, calls):
    model = in_float64(family)
    ids = prompt(24, batch=3)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, :9] = 0
    if kind == "a sequence of padding":
        mask[2] = 0
    if kind == "floats":
        causal = torch.ones(24, 24, dtype=torch.bool).tril() & mask[:, None, None, :].bool()
        mask = torch.zeros(causal.shape, dtype=torch.float64).masked_fill(~causal, torch.finfo(torch.float64).min)
    plain = outputs(model, ids, attention_mask=mask)
    with absorb(model, crossover=HUGE):
        absorbed = outputs(model, ids, attention_mask=mask)
    assert calls
    seen = torch.ones(3, 24, dtype=torch.bool)
    seen[1, :9] = False
    seen[2] = kind != "a sequence of padding"
    for one, other in zip(absorbed, plain, strict=True):
        assert one.isfinite().all()
        assert (one - other)[seen].abs().max() < 1e-12


# ---- compiled ----


@pytest.mark.filterwarnings("ignore:::torch")
def test_a_compiled_model_gives_the_same_logits(calls):
    model = tiny("deepseek_v2", num_hidden_layers=1)
    ids = prompt(12)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        absorb(model)
        compiled = torch.compile(model, backend="eager")
        logits = compiled(ids, use_cache=False).logits
    assert (logits - plain).abs().max() < 5e-5
