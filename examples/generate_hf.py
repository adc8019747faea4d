"""Greedy text from a transformers MLA model, twice: with its own DynamicCache, and with LkvCache and absorb.

    python examples/generate_hf.py --model FOLDER --prompt "Once upon a time"   a checkpoint: DeepSeek-V2-Lite, ...
    python examples/generate_hf.py --config v2-lite --prompt-tokens 8000        random weights, real dimensions

Both must say the same; the table says what a token took. Needs latent-kv[transformers]; --plot needs latent-kv[plot].
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from lkv import plot
from lkv.integrations.transformers import LkvCache, absorb

NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank")
MLA_NAMES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# All layers are dense and the vocabulary is cut. A dense MLP reads about as much as the experts of a token.
CONFIGS = {
    "tiny": ("deepseek_v3", (64, 128, 4, None), (32, 16, 8, 16)),
    "v2-lite": ("deepseek_v2", (2048, 10_944, 16, None), (512, 128, 64, 128)),
    "v3": ("deepseek_v3", (7168, 18_432, 128, 1536), (512, 128, 64, 128)),
}
WARM_UP = 32  # tokens of the prompt in a short run before each, not timed
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
LOOKS: tuple[dict[str, Any], ...] = (  # the second on top, where both are the same
    {"color": "#8b949e", "linewidth": 2.5},
    {"color": "#1f6feb", "linewidth": 1.2, "linestyle": "--"},
)


def main() -> None:
    args = arguments()
    if args.threads or args.config == "tiny":  # work so small that threads cost more than they save
        torch.set_num_threads(args.threads or 1)
    transformers.logging.set_verbosity_error()
    model, tokenizer = load(args)
    ids = prompt(args, model, tokenizer)
    plain = Run("DynamicCache", transformers.DynamicCache(config=model.config))
    ours = Run("LkvCache + absorb", LkvCache(model, ids.shape[1] + args.tokens))
    short = ids[:, :WARM_UP]
    generate(model, short, 2, Run("warm-up", transformers.DynamicCache(config=model.config)))
    generate(model, ids, args.tokens, plain)
    with absorb(model):
        generate(model, short, 2, Run("warm-up", LkvCache(model, WARM_UP + 2)))
        generate(model, ids, args.tokens, ours)
    print(ours.tokens if tokenizer is None else tokenizer.decode(ours.tokens))
    print(f"\n{table(ids.shape[1], plain, ours)}\n\n{agreement(plain, ours)}")
    if args.plot:
        name = args.config or args.model.resolve().name
        dtype, threads = str(model.dtype).removeprefix("torch."), torch.get_num_threads()
        draw(args.plot, f"{name}, {dtype}, {threads} thread{'s' * (threads > 1)}", ids.shape[1], plain, ours)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint of an MLA model")
    source.add_argument("--config", choices=CONFIGS, help="random weights at these dimensions, dense layers")
    parser.add_argument("--layers", type=positive, default=2, metavar="N", help="of --config (default: 2)")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--prompt", metavar="TEXT", help="for a checkpoint that has a tokenizer")
    begin.add_argument("--prompt-tokens", type=positive, default=256, metavar="N", help="random ids (default: 256)")
    parser.add_argument("--tokens", type=positive, default=32, metavar="N", help="to generate (default: 32)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's, or float32 with --config"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="of PyTorch (default: its own choice, 1 for tiny)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random weights and ids (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and bytes over the position (extra: plot)")
    args = parser.parse_args()
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model: expected a folder with a config.json, got {args.model}")
    if args.plot is not None:
        try:
            plot.require_matplotlib()  # before the work, not behind it
        except ImportError as error:
            parser.error(f"--plot: {error}")
    return args


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model, and its tokenizer if it has one."""
    if args.model is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype or "auto")
        has_one = any((args.model / name).is_file() for name in TOKENIZER_FILES)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(args.model) if has_one else None
    family, sizes, mla_sizes = CONFIGS[args.config]
    config = transformers.AutoConfig.for_model(
        family,
        **dict(zip(NAMES + MLA_NAMES, sizes + mla_sizes, strict=True)),
        num_key_value_heads=sizes[2],
        num_hidden_layers=args.layers,
        first_k_dense_replace=args.layers,
        vocab_size=1024,
        max_position_embeddings=1 << 17,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype or "float32"))
    return model.eval(), None


def prompt(args: argparse.Namespace, model: Any, tokenizer: Any) -> torch.Tensor:
    """Return token ids ``[1, length]``."""
    if args.prompt is not None and tokenizer is None:
        sys.exit("--prompt: there is no tokenizer; give --prompt-tokens")
    if args.prompt is not None:
        ids: torch.Tensor = tokenizer(args.prompt, return_tensors="pt").input_ids
        return ids
    generator = torch.Generator().manual_seed(args.seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (1, args.prompt_tokens), generator=generator)


@dataclass
class Run:
    """A text under way; `model.generate` calls `put` with the prompt, then with every token."""

    name: str
    cache: Any
    tokens: list[int] = field(default_factory=list)
    logits: tuple[torch.Tensor, ...] = ()
    ms: list[float] = field(default_factory=list)  # up to each token; the first is that of the prompt
    nbytes: list[int] = field(default_factory=list)  # cached behind it
    last: float | None = None
    bar: Any = None

    def put(self, ids: torch.Tensor) -> None:
        if self.last is not None:
            self.ms.append(1e3 * (time.perf_counter() - self.last))
            rows = [getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values")]
            self.nbytes.append(sum(tensor.nbytes for tensor in rows if tensor is not None))
            self.bar.update()
        self.last = time.perf_counter()

    def end(self) -> None:
        self.bar.close()


def generate(model: Any, ids: torch.Tensor, count: int, run: Run) -> None:
    tqdm = importlib.import_module("tqdm").tqdm  # transformers needs it too
    run.bar = tqdm(total=count, desc=run.name, unit="token", leave=False, disable=not sys.stderr.isatty())
    # The keyword of a cache was `past_key_values` until transformers renamed it.
    keyword = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        streamer=run,
        **{keyword: run.cache},
    )
    run.tokens, run.logits = out.sequences[0, ids.shape[1] :].tolist(), out.logits


def table(length: int, *runs: Run) -> str:
    rows = [
        ("", [run.name for run in runs]),
        (f"ms for the prompt of {length:,}", [f"{run.ms[0]:,.1f}" for run in runs]),
        ("ms per token, median", [f"{statistics.median(run.ms[1:] or [0]):,.2f}" for run in runs]),
        ("least and most", [f"{min(run.ms[1:] or [0]):,.2f} .. {max(run.ms[1:] or [0]):,.2f}" for run in runs]),
        ("bytes cached at the end", [f"{run.nbytes[-1]:,}" for run in runs]),
    ]
    return "\n".join(f"{label:32}" + "".join(f"{value:>24}" for value in values) for label, values in rows)


def agreement(plain: Run, ours: Run) -> str:
    """Say whether both wrote the same, and if not, where they part and how close the two tokens are there."""
    at = next((i for i, (a, b) in enumerate(zip(plain.tokens, ours.tokens, strict=False)) if a != b), None)
    steps = len(ours.tokens) if at is None else at + 1
    logits = list(zip(plain.logits, ours.logits, strict=False))[:steps]
    gap = max(float((a - b).abs().max()) for a, b in logits)
    if at is None:
        return f"the same {steps} tokens; logits differ by at most {gap:.1e}"
    margin = float(plain.logits[at][0, plain.tokens[at]] - plain.logits[at][0, ours.tokens[at]])
    return (
        f"the same {at} tokens, then {plain.tokens[at]} and {ours.tokens[at]}, {margin:.1e} apart in the logits of "
        f"DynamicCache; up to there logits differ by at most {gap:.1e}"
    )


def draw(path: Path, title: str, length: int, *runs: Run) -> None:
    figure = plot.require_matplotlib().Figure(figsize=(8, 3.2), layout="constrained")
    for axes, label in zip(figure.subplots(1, 2), ("ms per token", "bytes cached"), strict=True):
        for run, look in zip(runs, LOOKS, strict=True):
            values = run.ms[1:] if label == "ms per token" else run.nbytes[1:]
            axes.plot(range(length + 1, length + 1 + len(values)), values, label=run.name, **look)
        axes.set(ylim=(0, None), ylabel=label, xlabel="position")
        axes.legend(frameon=False)
    figure.suptitle(f"{title}: every token behind a prompt of {length:,}", fontsize="medium")
    figure.savefig(path)


if __name__ == "__main__":
    main()
