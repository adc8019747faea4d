"""A decode step of transformers' MLA models, with its own caches and with lkv's: ``python -m benchmarks.decode_hf``.

Two layers of DeepSeek-V2-Lite's and DeepSeek-V3's attention, at their dimensions, in a model whose MLPs are 64 wide:
what a cache changes is what is timed. `mlp_ms` is what an MLP of the real size adds to a layer, whatever the cache.
Cached rows are random latents, put there by `Cache.update`. Contenders take turns, one step each per round.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import itertools
import json
import os
import platform
import random
import signal
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import linear

from lkv.integrations.transformers import LkvCache, absorb

from .style import LIMIT, LKV, PEER, plain, prepared, save_figure

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS = {  # hidden size, heads, q_lora_rank, columns of the MLP
    "V2-Lite": ("deepseek_v2", 2048, 16, None, 10_944),
    "V3": ("deepseek_v3", 7168, 128, 1536, 18_432),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LENGTHS = (16, 128, 1024, 8192, 32_768)
CONTENDERS = ("no history", "LkvCache + absorb", "LkvCache", "DynamicCache", "StaticCache")
LOOKS: dict[str, dict[str, Any]] = {  # those on top last
    "StaticCache": {"color": "#bf8700"},
    "DynamicCache": {"color": PEER, "lw": 4},
    "no history": {"color": LIMIT, "ls": ":"},
    "LkvCache + absorb": {"color": LKV},
    "LkvCache": {"color": LKV, "ls": "--"},
}
CHUNKS = (1, 16, 64, 128, 256, 384, 512, 1024)
CHUNK_ROWS = 4096
ROUNDS, LEAST, BUDGET = 21, 2, 5.0  # steps of a contender, but no more than take so many seconds of CPU time
SPARE = 64  # rows behind those cached, for steps that a StaticCache cannot take back
# The keyword of a cache was `past_key_values` until transformers renamed it.
CACHE = "cache" if "cache" in inspect.signature(transformers.DeepseekV3Model.forward).parameters else "past_key_values"


def main() -> None:
    args = arguments()
    if args.plot:
        importlib.import_module("matplotlib")  # before the measurements, not behind them
    if args.samples:
        draw(merged(args.samples), args.plot)
        return
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"machine": machine(args), "decode": [], "chunks": []}
    for name, dtype in itertools.product(args.models, args.dtypes):
        if args.what != "chunks":
            for cell in decode(name, dtype, args):
                report["decode"].append(cell)
                save(report, args.json)
                print(as_text(cell), flush=True)
        if args.what != "decode":
            for row in chunks(name, dtype, args):
                report["chunks"].append(row)
                save(report, args.json)
                print(chunk_as_text(row), flush=True)
    if args.plot and report["decode"]:
        draw(report["decode"], args.plot)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="see that it runs; the numbers mean nothing")
    parser.add_argument("--what", choices=("all", "decode", "chunks"), default="all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=None, help=f"default: {LENGTHS}")
    parser.add_argument("--without", nargs="+", choices=CONTENDERS[2:], default=[], help="contenders to leave out")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default: 1)")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of CPU time for a step (default: 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw decode_hf.png and .svg (extra: plot)")
    parser.add_argument(
        "--samples", type=Path, nargs="+", metavar="FILE", help="draw what --json wrote before; later files win"
    )
    args = parser.parse_args()
    if args.samples and not args.plot:
        parser.error("--samples: expected --plot FOLDER beside it")
    args.rounds, args.chunk_rows, args.chunks = ROUNDS, CHUNK_ROWS, CHUNKS
    if args.quick:
        args.rounds, args.chunk_rows, args.chunks = 3, 256, (1, 64)
    args.lengths = args.lengths or (LENGTHS[:2] if args.quick else LENGTHS)
    return args


def decode(name: str, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield, for each number of cached rows, what a step takes with every contender."""
    model = build(name, dtype, args.layers)
    mlp_ms = mlp(name, dtype)
    left_out, too_slow = set(args.without), set()
    for rows in sorted(args.lengths):
        names = [n for n in CONTENDERS if n not in left_out | too_slow]
        contenders = {n: Contender(model, n, 1 if n == "no history" else rows) for n in names}
        samples: dict[str, list[dict[str, float]]] = {n: [] for n in contenders}
        logits: dict[str, torch.Tensor] = {}
        errors = dict.fromkeys(left_out, "left out") | dict.fromkeys(too_slow, f"> {args.limit:g} s with fewer rows")
        for count in range(args.rounds + 1):
            names = list(contenders)
            random.Random(count).shuffle(names)
            for n in names:
                if enough(samples[n], args.rounds):
                    continue
                try:
                    with limit(args.limit):
                        sample, got = contenders[n].step()
                except TimeoutError:
                    errors[n] = f"> {args.limit:g} s"
                    too_slow.add(n)
                    del contenders[n]
                else:
                    samples[n].append(sample)
                    logits.setdefault(n, got)  # of the first step: later ones come behind more rows in a StaticCache
        expected = logits.get("DynamicCache", logits["LkvCache + absorb"])
        yield {
            "model": name,
            "dtype": dtype,
            "rows": rows,
            "layers": args.layers,
            "mlp_ms": mlp_ms,
            "load": os.getloadavg()[0],
            "samples": {n: warm(taken) for n, taken in samples.items() if taken and n not in errors},
            "errors": errors,
            "gap": {n: float((got - expected).abs().max()) for n, got in logits.items() if n != "no history"},
            "largest_logit": float(expected.abs().max()),
        }
        del contenders
        gc.collect()


def chunks(name: str, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what a prefill chunk on top of cached rows takes, by its length, absorbed and expanded. One layer."""
    model = build(name, dtype, 1)
    for n in args.chunks:
        samples: dict[str, list[dict[str, float]]] = {"absorbed": [], "expanded": []}
        cache = filled(LkvCache(model, args.chunk_rows + max(args.chunks)), model, args.chunk_rows)
        ids = torch.arange(n)[None] % model.config.vocab_size
        for count in range(args.rounds // 3 + 1):
            for way in random.Random(count).sample(list(samples), 2):
                if enough(samples[way], args.rounds // 3):
                    continue
                with absorb(model, crossover=2**31 if way == "absorbed" else 0):
                    sample, _ = timed(model, ids, cache)
                cache.crop(-n)
                samples[way].append(sample)
        taken = {way: warm(found) for way, found in samples.items()}
        yield {"model": name, "dtype": dtype, "rows": args.chunk_rows, "queries": n, "samples": taken}


class Contender:
    """A cache that holds rows, and the way to attend to them."""

    def __init__(self, model: Any, name: str, rows: int) -> None:
        self.model, self.absorbs, self.crops = model, "absorb" in name, name != "StaticCache"
        if name == "StaticCache":
            cache = transformers.StaticCache(config=model.config, max_cache_len=rows + SPARE)
        elif "Lkv" in name:
            cache = LkvCache(model, rows + SPARE)
        else:
            cache = transformers.DynamicCache(config=model.config)
        self.cache = filled(cache, model, rows)
        self.ids = torch.tensor([[1]])

    def step(self) -> tuple[dict[str, float], torch.Tensor]:
        handle = absorb(self.model) if self.absorbs else None
        try:
            sample, logits = timed(self.model, self.ids, self.cache)
        finally:
            if handle is not None:
                handle.undo()
        if self.crops:
            self.cache.crop(-1)
        return sample, logits


def build(name: str, dtype: str, layers: int) -> Any:
    """A model at the dimensions of a published one but for its MLPs and vocabulary, with random weights."""
    kind, hidden, heads, q_lora_rank, _ = MODELS[name]
    config = transformers.AutoConfig.for_model(
        kind,
        **MLA,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=q_lora_rank,
        intermediate_size=64,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        vocab_size=1024,
        max_position_embeddings=2 * max(LENGTHS),
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    return model.eval()


def filled(cache: Any, model: Any, rows: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    for layer in range(model.config.num_hidden_layers):
        latents = [torch.randn((1, 1, rows, width), generator=generator) for width in (512, 64)]
        cache.update(*(part.to(model.dtype) for part in latents), layer)
    return cache


def timed(model: Any, ids: torch.Tensor, cache: Any) -> tuple[dict[str, float], torch.Tensor]:
    """One forward pass: milliseconds of CPU time (of all threads) and on the wall, and the last logits."""
    cpu_time = time.thread_time if torch.get_num_threads() == 1 else time.process_time  # the first is finer
    with torch.inference_mode():
        cpu, wall = cpu_time(), time.perf_counter()
        logits = model(input_ids=ids, logits_to_keep=1, **{CACHE: cache}).logits
        wall, cpu = time.perf_counter() - wall, cpu_time() - cpu
    return {"cpu": 1e3 * cpu, "wall": 1e3 * wall}, logits[0, -1].float()


def mlp(name: str, dtype: str) -> float:
    """Milliseconds of an MLP of the real size and one token: what a mixture of experts reads is about as much."""
    _, hidden, _, _, columns = MODELS[name]
    up = torch.empty(2 * columns, hidden, dtype=DTYPES[dtype]).normal_(std=0.02)
    down = torch.empty(hidden, columns, dtype=DTYPES[dtype]).normal_(std=0.02)
    x = torch.randn(1, hidden, dtype=DTYPES[dtype])
    taken = []
    for _ in range(4):
        begun = time.process_time()
        gate, rest = linear(x, up).chunk(2, dim=-1)
        linear(torch.nn.functional.silu(gate) * rest, down)
        taken.append(1e3 * (time.process_time() - begun))
    return statistics.median(taken[1:])


def enough(samples: list[dict[str, float]], rounds: int) -> bool:
    spent = sum(sample["cpu"] for sample in samples)
    return len(samples) > rounds or (len(samples) >= LEAST and spent > 1e3 * BUDGET)


def warm(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the first, which faults pages in, where enough others are left."""
    return samples[1:] if len(samples) > 3 else samples


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError behind the PyTorch operation in which so many seconds of CPU time are over."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def quartiles(samples: list[dict[str, float]], clock: str = "cpu") -> tuple[float, float, float]:
    values = [sample[clock] for sample in samples]
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def as_text(cell: dict[str, Any]) -> str:
    """Quartiles of a step's CPU time, and how many times that of ``LkvCache + absorb`` it is."""
    base = quartiles(cell["samples"]["LkvCache + absorb"])[1]
    lines = [
        f"{cell['model']}, {cell['layers']} layers, {cell['dtype']}, {cell['rows']:,} rows cached: "
        f"ms of CPU time per token; a real MLP adds {cell['mlp_ms']:.1f} per layer; load {cell['load']:.1f}"
    ]
    for name in CONTENDERS:
        if name in cell["errors"]:
            lines.append(f"  {name:18} {cell['errors'][name]}")
            continue
        low, middle, high = quartiles(cell["samples"][name])
        gap = f"  logits differ by {cell['gap'][name]:.1e}" if name in cell["gap"] else ""
        n = len(cell["samples"][name])
        lines.append(
            f"  {name:18} {middle:10,.1f}  {low:10,.1f} .. {high:10,.1f}  x {middle / base:8.2f}  {n} steps{gap}"
        )
    return "\n".join(lines)


def chunk_as_text(row: dict[str, Any]) -> str:
    absorbed, expanded = (quartiles(row["samples"][way]) for way in ("absorbed", "expanded"))
    return (
        f"{row['model']}, 1 layer, {row['dtype']}, {row['rows']:,} rows and {row['queries']:5,} queries: absorbed "
        f"{absorbed[1]:9,.1f} ms ({absorbed[0]:,.1f} .. {absorbed[2]:,.1f}), expanded {expanded[1]:9,.1f} "
        f"({expanded[0]:,.1f} .. {expanded[2]:,.1f}), x {expanded[1] / absorbed[1]:.2f}"
    )


def save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def machine(args: argparse.Namespace) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": args.threads,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def merged(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The cells of several runs: where two measured the same, that of the later file."""
    cells = [cell for path in paths for cell in json.loads(path.read_text())["decode"]]
    return list({(cell["model"], cell["dtype"], cell["rows"]): cell for cell in cells}.values())


def draw(cells: list[dict[str, Any]], folder: Path) -> None:
    """Milliseconds per token over rows cached, one panel per model and dtype."""
    models, dtypes = (list(dict.fromkeys(cell[by] for cell in cells)) for by in ("model", "dtype"))
    size = (4.2 * len(models), 3.0 * len(dtypes) + 1)
    figure, grid = prepared().subplots(len(dtypes), len(models), figsize=size, squeeze=False, sharex=True, sharey=True)
    for (i, dtype), (j, model) in itertools.product(enumerate(dtypes), enumerate(models)):
        axes = grid[i][j]
        here = sorted(
            (cell for cell in cells if (cell["model"], cell["dtype"]) == (model, dtype)), key=lambda cell: cell["rows"]
        )
        for name, look in LOOKS.items():
            points = [(cell["rows"], *quartiles(cell["samples"][name])) for cell in here if name in cell["samples"]]
            if points:
                rows, low, middle, high = zip(*points, strict=True)
                axes.plot(rows, middle, label=name, marker="o", ms=4, **look)
                axes.fill_between(rows, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.set(xscale="log", yscale="log", title=f"{model}, {dtype}")
        plain(axes.xaxis, sorted({cell["rows"] for cell in cells}))
        plain(axes.yaxis, [10**power for power in range(7)])
    for axes in grid[-1]:
        axes.set_xlabel("rows cached (log)")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"ms per token, {cells[0]['layers']} layers (log)")
    figure.suptitle("A decode step of transformers' MLA models: medians and quartiles")
    figure.tight_layout()
    figure.legend(*grid[0][0].get_legend_handles_labels(), ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0))
    folder.mkdir(parents=True, exist_ok=True)
    save_figure(figure, folder, "decode_hf")


if __name__ == "__main__":
    main()
