"""Train the character model behind ``lkv demo``: DeepSeek-V3 attention, dense MLPs, text that ships with Python.

Needs torch, transformers and safetensors; ``--plot`` needs matplotlib. Steps, seed and threads are fixed, so a second
run with the same versions on the same kind of processor gives the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import platform
import pydoc_data.topics
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

CONFIG = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "first_k_dense_replace": 4,  # no layer has experts
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS_PER_STEP = 2048
LENGTHS = (256, 512, 256, 1024)  # of a step's sequences, in turn: the model is to stay sane up to the longest
PEAK_RATE, LAST_RATE, WARMUP = 3e-3, 1e-4, 100
BLOCK, HELD_OUT = 2000, 0.05  # characters per block of text, share of blocks for validation
EVERY = 100
NOTE = "trained on the documentation topics in Python's pydoc_data.topics, (c) Python Software Foundation, PSF License"


def main() -> None:
    args = arguments()
    if args.plot:
        importlib.import_module("matplotlib")  # before the training, not behind it
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    text = read_text()
    vocabulary = "".join(sorted(set(text)))
    train, held_out = (encode(part, vocabulary) for part in split(text, args.seed))
    torch.manual_seed(args.seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=len(vocabulary), **CONFIG))
    log = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "characters": {"train": len(train), "held_out": len(held_out)},
            "vocabulary": len(vocabulary),
        },
        "run": {
            "steps": args.steps,
            "tokens": args.steps * TOKENS_PER_STEP,
            "seed": args.seed,
            "threads": args.threads,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "curve": [],
    }
    wall, cpu = time.perf_counter(), time.process_time()
    for point in fit(model, train, held_out, args.steps, args.seed):
        log["curve"].append(point)
        print(
            *(f"{name} {value:.4g}" for name, value in point.items()),
            f"cpu {time.process_time() - cpu:.0f} s",
            flush=True,
        )
    log["minutes"] = {
        "wall": round((time.perf_counter() - wall) / 60, 1),
        "cpu": round((time.process_time() - cpu) / 60, 1),
    }
    weights = rounded(model)
    log["held_out_loss"] = round(held_out_loss(model, held_out), 4)
    config = {"vocab_size": len(vocabulary), **CONFIG}
    metadata = {"format": "pt", "config": json.dumps(config), "vocabulary": vocabulary, "note": NOTE}
    saved = safetensors.torch.save(weights, metadata)
    args.out.write_bytes(saved)
    begin = 8 + int.from_bytes(saved[:8], "little")  # safetensors writes the metadata in no fixed order
    log["tensors_sha256"] = hashlib.sha256(saved[begin:]).hexdigest()
    args.log.write_text(json.dumps(log, indent=1) + "\n")
    if args.plot:
        draw(log, args.plot)
    print(f"loss on held-out text, weights in float16: {log['held_out_loss']} nats per character")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("weights.safetensors"), help="default: weights.safetensors")
    parser.add_argument("--log", type=Path, default=Path("training.json"), help="default: training.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss over the steps")
    parser.add_argument("--steps", type=int, default=1200, help="default: 1200")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--threads", type=int, default=1, help="of PyTorch; another number rounds differently (default: 1)"
    )
    return parser.parse_args()


def read_text() -> str:
    """The topics as ASCII: each paragraph once, no rulers, no runs of spaces."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    quotes_and_dashes = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")
    text = text.translate(quotes_and_dashes).replace("\u2026", "...")
    text = text.encode("ascii", "ignore").decode()
    text = re.sub(r"^[ ]*([*=\-~^+|])[*=\-~^+| ]{3,}$", "", text, flags=re.MULTILINE)
    text = re.sub(r" +", " ", re.sub(r" +$", "", text, flags=re.MULTILINE))
    return "\n\n".join(dict.fromkeys(re.split(r"\n{2,}", text.strip("\n")))) + "\n"


def split(text: str, seed: int) -> tuple[str, str]:
    """Training and validation text, divided by random blocks of whole paragraphs."""
    blocks = [""]
    for paragraph in text.split("\n\n"):
        blocks[-1] += paragraph + "\n\n"
        if len(blocks[-1]) >= BLOCK:
            blocks.append("")
    chosen = set(random.Random(seed).sample(range(len(blocks)), round(len(blocks) * HELD_OUT)))
    parts = ("".join(block for i, block in enumerate(blocks) if (i in chosen) is held) for held in (False, True))
    return next(parts), next(parts)


def encode(text: str, vocabulary: str) -> torch.Tensor:
    ids = {character: i for i, character in enumerate(vocabulary)}
    return torch.tensor([ids[character] for character in text])


def fit(model, train: torch.Tensor, held_out: torch.Tensor, steps: int, seed: int) -> Iterator[dict[str, float]]:
    """Train in place; every `EVERY` steps and at the end, tell where the losses are."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    draw_from = torch.Generator().manual_seed(seed)
    mean = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        length = LENGTHS[step % len(LENGTHS)]
        starts = torch.randint(len(train) - length, (TOKENS_PER_STEP // length,), generator=draw_from)
        batch = train[starts[:, None] + torch.arange(length + 1)]
        loss = next_character_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean += loss.item()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            since = step % EVERY + 1
            yield {
                "step": step + 1,
                "rate": round(rate(step, steps), 7),
                "train": round(mean / since, 4),
                "held_out": round(held_out_loss(model, held_out), 4),
            }
            mean = 0.0


def rate(step: int, steps: int) -> float:
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / WARMUP) * (LAST_RATE + (PEAK_RATE - LAST_RATE) * cosine)


def next_character_loss(model, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, text: torch.Tensor, length: int = 512) -> float:
    model.eval()
    windows = text[: (len(text) - 1) // length * length].view(-1, length)
    after = text[length : len(windows) * length + 1 : length, None]
    batches = torch.cat([windows, after], dim=1).split(8)
    total = sum(next_character_loss(model, batch).item() * len(batch) for batch in batches)
    model.train()
    return total / len(windows)


@torch.no_grad()
def rounded(model) -> dict[str, torch.Tensor]:
    """Round the weights to float16 in place and return them; the head is the embedding."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    return {name: tensor.half() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def draw(log: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per character", title="loss of the tiny MLA model")
    steps = [point["step"] for point in log["curve"]]
    for name, label in (("train", "training, mean since the last point"), ("held_out", "held-out text")):
        axes.plot(steps, [point[name] for point in log["curve"]], label=label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
