"""9.2 GB of capacity: what it costs at once, as it fills, and what goes back; each contender in its own process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache
from lkv._host import free_memory

from .measure import Progress, Settings, Table, Target
from .native import storages_of
from .optional import peer

__all__ = ["run"]

LAYERS, WIDTHS, ROWS = 61, (512, 64), 131_072
FEW, MANY = 1_000, 20_000
ROW_BYTES = LAYERS * sum(WIDTHS) * 2
NAMES = {
    "lkv": "4 KB pages, numpy",
    "lkv-torch": "4 KB pages, torch",
    "lkv-huge": "huge pages, numpy",
    "zeros": "np.zeros",
    "torch": "torch.zeros",
    "static": "transformers StaticCache",
}
RESIDENT_AT_ONCE = ("torch", "static")  # 9.2 GB, seconds: once is enough


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure each contender in processes of its own."""
    rounds = 1 if settings.quick else 3
    chosen, absent = contenders(settings)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    order = [name for name in chosen for _ in range(1 if name in RESIDENT_AT_ONCE else rounds)]
    random.Random(settings.seed).shuffle(order)
    for done, name in enumerate(order, 1):
        if name in RESIDENT_AT_ONCE and 2 * free_memory() < 3 * ROW_BYTES * ROWS:  # others need some, too
            absent.append(f"{NAMES[name]}: left out, it takes 9.2 GB, and {free_memory() / 1e9:.1f} GB are free")
            del results[name]
            continue
        results[name].append(in_a_process(name))
        progress("allocation", done / len(order))
    for name in RESIDENT_AT_ONCE:
        if name in results:
            results[name] *= rounds
    small, both, huge = (NAMES["lkv"],), (NAMES["lkv"], NAMES["lkv-torch"]), NAMES["lkv-huge"]
    beside = "beside the bytes they need"
    return [
        table("time to allocate 9.2 GB of capacity", "ms", "allocate", results, absent, aims(small, 2.0)),
        table("resident once allocated", "MB", "resident", results, absent, aims(small, 2.0)),
        table(f"resident after {FEW:,} tokens, {beside}", "x", "few", results, absent, aims(both, 1.1)),
        table(f"resident after {MANY:,} tokens, {beside}", "x", "many", results, [], aims(both, 1.1)),
        table("append that touches pages first, per layer and slot", "ns", "first", results, [], []),
        table("the same, beside the same rows when resident", "x", "beside", results, [], aims((*both, huge), 1.7)),
        table(f"giving {MANY:,} tokens back to the host", "ms", "give", results, [], []),
        table("of that memory, what the host got back", "%", "got", results, [], []),
    ]


def contenders(settings: Settings) -> tuple[list[str], list[str]]:
    """Return those that can be measured here, and why the others cannot."""
    needs = {"lkv-torch": "torch", "torch": "torch", "static": "transformers"}
    chosen, absent = [], []
    for name, shown in NAMES.items():
        if name in needs and peer(needs[name]) is None:
            absent.append(f"{shown}: {needs[name]} is not installed")
        elif name in RESIDENT_AT_ONCE and settings.quick:
            absent.append(f"{shown}: left out of a quick run")
        else:
            chosen.append(name)
    return chosen, absent


def aims(names: tuple[str, ...], most: float) -> list[Target]:
    return [Target(name, "np.zeros", most, "value") for name in names]


def table(title: str, unit: str, key: str, results: dict[str, Any], absent: list[str], targets: list[Target]) -> Table:
    """Return one number of every contender that has it; of those that give back, one per way."""
    samples: dict[str, list[float]] = {}
    for name, runs in results.items():
        for found in [found for found in runs[0] if found.split(":")[0] == key]:
            way = found.partition(":")[2]
            samples[f"{NAMES[name]}{', ' * bool(way)}{way}"] = [one[found] for one in runs]
    base = next((name for name in samples if name.startswith("np.zeros")), next(iter(samples)))
    return Table(title, unit, base, samples, targets=targets, missing=absent, key=f"alloc-{key}")


def in_a_process(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", f"{__package__}.alloc", name]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def resident() -> int:
    """Return the anonymous memory of this process in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def measure(name: str) -> dict[str, float]:
    """Measure in this process; `found` is named as the tables are keyed, a way of giving back behind a colon."""
    make = prepared(name)
    before = resident()
    begun = time.perf_counter_ns()
    cache = make()
    found = {"allocate": (time.perf_counter_ns() - begun) / 1e6, "resident": (resident() - before) / 1e6}
    first = appended(cache, 0, FEW)
    found["few"] = (resident() - before) / (FEW * ROW_BYTES)
    if name in RESIDENT_AT_ONCE:
        return found
    found["first"], found["beside"] = first, first / appended(cache, 0, FEW)
    appended(cache, FEW, MANY)
    found["many"] = (resident() - before) / (MANY * ROW_BYTES)
    for way, give in cache.give_back().items():
        appended(cache, 0, MANY)
        held = resident()
        begun = time.perf_counter_ns()
        give()
        found[f"give:{way}"] = (time.perf_counter_ns() - begun) / 1e6
        found[f"got:{way}"] = 100 * (held - resident()) / (held - before)
    return found


def appended(cache: Any, lo: int, hi: int) -> float:
    """Append tokens and return the CPU time per layer and slot in ns."""
    begun = time.thread_time_ns()
    for row in range(lo, hi):
        cache.append(row)
    return (time.thread_time_ns() - begun) / ((hi - lo) * LAYERS * len(WIDTHS))


def prepared(name: str) -> Callable[[], Any]:
    """Import and make everything that is not the allocation itself."""
    token: list[Any] = [np.ones((1, width), ml_dtypes.bfloat16) for width in WIDTHS]
    if name in ("lkv", "lkv-huge"):
        return lambda: InLkv(token, name == "lkv-huge")
    if name == "zeros":
        return lambda: InNumpy([array.view(np.uint16) for array in token])
    torch: Any = peer("torch")
    torch.set_num_threads(1)
    tensors = [torch.ones((1, width), dtype=torch.bfloat16) for width in WIDTHS]
    if name == "lkv-torch":
        return lambda: InLkv(tensors, False)
    if name == "torch":
        return lambda: InTorch(torch, tensors)
    return lambda: InStaticCache(peer("transformers"), [tensor[None, None] for tensor in tensors])


class InLkv:
    def __init__(self, token: list[Any], huge_pages: bool) -> None:
        slots = [(width,) for width in WIDTHS]
        self.cache = LatentKvCache.with_capacity(LAYERS, ROWS, slots, "bfloat16", huge_pages=huge_pages)
        self.token = token

    def append(self, row: int) -> None:
        if row < self.cache.cached_len:
            self.cache.truncate_to(row)
        with self.cache.step(1) as step:
            for layer in range(LAYERS):
                step.append(layer, self.token)

    def give_back(self) -> dict[str, Callable[[], Any]]:
        return {"cache.wipe": self.cache.wipe, "storage.release_rows": self.release_rows}

    def release_rows(self) -> None:
        self.cache.truncate_to(0)
        for storage in storages_of(self.cache):
            storage.release_rows()


class InNumpy:
    def __init__(self, token: list[Any]) -> None:
        self.buffers = self.made()
        self.token = token

    def made(self) -> list[list[Any]]:
        return [[np.zeros((ROWS, width), np.uint16) for width in WIDTHS] for _ in range(LAYERS)]

    def append(self, row: int) -> None:
        for layer in self.buffers:
            for target, source in zip(layer, self.token, strict=True):
                target[row : row + 1] = source

    def give_back(self) -> dict[str, Callable[[], Any]]:
        return {"new arrays": self.renew}

    def renew(self) -> None:
        self.buffers.clear()
        self.buffers = self.made()


class InTorch:
    def __init__(self, torch: Any, token: list[Any]) -> None:
        self.token = token
        self.buffers = [[torch.zeros((ROWS, w), dtype=torch.bfloat16) for w in WIDTHS] for _ in range(LAYERS)]

    def append(self, row: int) -> None:
        for layer in self.buffers:
            for target, source in zip(layer, self.token, strict=True):
                target[row : row + 1].copy_(source)


class InStaticCache:
    def __init__(self, transformers: Any, token: list[Any]) -> None:
        config = transformers.LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=1, num_key_value_heads=1)
        self.cache = transformers.StaticCache(config=config, max_cache_len=ROWS)
        self.token = token
        self.append(0)  # allocates

    def append(self, row: int) -> None:
        for layer in range(LAYERS):
            self.cache.update(*self.token, layer)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
