"""A tiny model of every family of transformers that has Multi-head Latent Attention, built in moments on the CPU.

The weights are drawn from a fixed seed and large enough that a greedy text varies and no two logits are close; what an
initialisation leaves constant (norms, sinks, gates, router biases) is disturbed, so that leaving it out shows.
"""

import pathlib
import re

import torch
import transformers

ROWS = 640  # positions: the longest prompt of the tests, and 200 tokens more
VOCABULARY = 128
MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": ROWS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    **MLA,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
LOCAL_EXPERTS = {"moe_intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
GROUPS = {"n_group": 2, "topk_group": 1}
LOW_RANK = {"q_lora_rank": 24}
SPARSE = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 8}
LINEAR = {"linear_head_dim": 16, "linear_num_heads": 4}
SHARED_INDEX = {"indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": ROWS / 64, "original_max_position_embeddings": 64}

# family: (class, settings of the text configuration, settings of the configurations beside it)
FAMILIES: dict[str, tuple[str, dict, dict]] = {
    "axk1": ("AXK1ForCausalLM", TEXT | EXPERTS | GROUPS | LOW_RANK, {}),
    "axk2": ("AXK2ForCausalLM", TEXT | EXPERTS | LOW_RANK | SPARSE | {"gated_norm_rank": 8}, {}),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        TEXT
        | GROUPS
        | LOCAL_EXPERTS
        | {"head_dim": 16, "layer_group_size": 2, "num_hidden_layers": 4, "first_k_dense_replace": 1}
        | {"num_mtp_layers": 0},
        {},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        TEXT | EXPERTS | {"q_lora_rank": None, "first_k_dense_replace": 1},
        {},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        TEXT | EXPERTS | GROUPS | LOW_RANK | {"first_k_dense_replace": 1, "num_mtp_layers": 0},
        {},
    ),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        TEXT | EXPERTS | GROUPS | LOW_RANK | SPARSE | {"first_k_dense_replace": 1},
        {},
    ),
    "dots3_note": (
        "Dots3NoteForCausalLM",
        TEXT
        | EXPERTS
        | LOW_RANK
        | SPARSE
        | {"num_hidden_layers": 4, "head_dim": 24, "shared_experts_intermediate_size": 32, "sliding_window": 24}
        | {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"]}
        | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 20, "swa_kv_lora_rank": 40}
        | {"swa_head_dim": 28, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 16},
        {},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", TEXT | EXPERTS | LOW_RANK, {}),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        TEXT
        | EXPERTS
        | LOW_RANK
        | SPARSE
        | LINEAR
        | {"num_hidden_layers": 4, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 2}
        | {"layer_types": ["linear_attention", "indexed_attention"] * 2, "indexer_types": ["full"] * 4}
        | {"mlp_layer_types": ["dense", "sparse"] * 2},
        {
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 28, "out_hidden_size": 64}
            | {"intermediate_size": 32, "projection_intermediate_size": 32}
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", TEXT | EXPERTS | LOW_RANK | SPARSE | SHARED_INDEX, {}),
    "hy_v4": ("HYV4ForCausalLM", TEXT | EXPERTS | LOW_RANK | SPARSE | SHARED_INDEX | {"hc_mult": 2}, {}),
    "hy_v4_vl": (
        "HYV4VLForConditionalGeneration",
        TEXT
        | EXPERTS
        | LOW_RANK
        | SPARSE
        | SHARED_INDEX
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
        | {"hc_mult": 2},
        {
            "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
            | {"num_hidden_layers": 1, "out_hidden_size": 64, "max_image_size": 64}
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        TEXT
        | LINEAR
        | LOCAL_EXPERTS
        | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        {},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {name: value for name, value in TEXT.items() if name not in ("intermediate_size", "num_hidden_layers")}
        | LOW_RANK
        | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "head_dim": 8}
        | {"moe_topk": 2, "n_routed_experts": 6, "zero_expert_num": 2},
        {},
    ),
    "minicpm3": ("MiniCPM3ForCausalLM", TEXT | LOW_RANK | {"dim_model_base": 32, "tie_word_embeddings": False}, {}),
    "mistral4": (
        "Mistral4ForCausalLM",
        TEXT
        | EXPERTS
        | LOW_RANK
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        {},
    ),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        TEXT
        | EXPERTS
        | SPARSE
        | {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 0, 1, 0], "kv_source_layers": [0, 0, 2, 0, 2]}
        | {"indexer_types": ["full", "shared", "full", "full", "shared"]}
        | {"rope_parameters": YARN | {"attention_factor": 1.0}},
        {
            "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32}
            | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        },
    ),
    "youtu": (
        "YoutuForCausalLM",
        TEXT | LOW_RANK | {"embedding_initializer_range": 0.2, "tie_word_embeddings": False},
        {},
    ),
}
EAGER_ONLY = {"hy_v4", "hy_v4_vl"}  # attention sinks: the family declares no sdpa
STATEFUL = {"bailing_hybrid", "glm5_next", "kimi_linear"}  # layers of linear attention beside the others
SLIDING = {"dots3_note"}


def installed_families() -> list[str]:
    """The families of the installed transformers whose attention expands latents, found in its sources."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    return sorted(
        {path.parent.name for path in models.glob("*/modeling_*.py") if "def expand_kv(" in path.read_text("utf-8")}
    )


def caches_latents(family: str) -> bool:
    """Whether the installed version keeps latents for the family: before 5.18 sparse ones kept keys and values."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return version >= (5, 18) or "index_topk" not in FAMILIES[family][1]


def tiny(family: str, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **overrides) -> torch.nn.Module:
    """A seeded model in evaluation mode. ``attn`` is "eager" whatever is asked where the family has nothing else."""
    class_name, text, beside = FAMILIES[family]
    model_class = getattr(transformers, class_name)
    text = text | overrides
    if beside:
        config = model_class.config_class(text_config=text, **beside, tie_word_embeddings=False)
    elif family == "dots3_note":
        config = transformers.AutoConfig.for_model("dots3_note_text", **text)
    else:
        config = model_class.config_class(**text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2025)
        model = model_class._from_config(config, attn_implementation="eager" if family in EAGER_ONLY else attn)
        disturb(model)
    cast(model, dtype)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products know no float64
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@torch.no_grad()
def disturb(model: torch.nn.Module) -> None:
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for values in [*model.parameters(), *biases]:
        if values.numel() > 0 and (values == values.flatten()[0]).all():
            values += 0.1 * torch.randn_like(values)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, but to a narrow type not those that transformers keeps in float32 when it loads a model."""
    kept = [*(model._keep_in_fp32_modules_strict or ()), *(model._keep_in_fp32_modules or ())]
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in kept) or "$^")
    for name, values in model.named_parameters():
        if dtype.itemsize > 4 or not pattern.search(name):
            values.data = values.data.to(dtype)


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids ``[batch, length]``, none of them the padding."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)
