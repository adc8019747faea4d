"""9.2 GB of capacity: what it costs at once and after the first thousand tokens, each contender in its own process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import lkv
from benchmarks.measure import Progress, Settings, Table, Target

__all__ = ["run"]

LAYERS, WIDTHS, ROWS, TOKENS = 61, (512, 64), 131_072, 1_000
NEEDED = LAYERS * sum(WIDTHS) * 2 * TOKENS
CONTENDERS = {
    "lkv": "4 KB pages",
    "lkv-huge": "huge pages",
    "zeros": "np.zeros",
}


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure each contender in processes of its own."""
    rounds = 2 if settings.quick else 5
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    order = [name for name in CONTENDERS for _ in range(rounds)]
    random.Random(settings.seed).shuffle(order)
    for done, name in enumerate(order, 1):
        results[name].append(in_a_process(name))
        progress("allocation", done / len(order))
    return [
        table("time to allocate 9.2 GB of capacity", "ms", "allocate", results, 2.0),
        table("resident once allocated", "MB", "resident", results, 2.0),
        table("resident after 1,000 tokens, beside the bytes they need", "x", "after", results, 1.1),
        table("first-touch append, per layer and slot", "ns", "append", results, None),
    ]


def table(title: str, unit: str, key: str, results: dict[str, list[dict[str, float]]], most: float | None) -> Table:
    samples = {CONTENDERS[name]: [one[key] for one in runs] for name, runs in results.items()}
    targets = [] if most is None else [Target("4 KB pages", "np.zeros", most, "value")]
    return Table(title, unit, "np.zeros", samples, targets=targets)


def in_a_process(name: str) -> dict[str, float]:
    package = Path(lkv.__file__).parent.parent
    path = os.pathsep.join([str(Path(__file__).parent.parent), str(package)])
    command = [sys.executable, "-m", "benchmarks.alloc", name]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def resident() -> int:
    """Return the anonymous memory of this process in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def measure(name: str) -> dict[str, float]:
    token = [np.ones((1, width), ml_dtypes.bfloat16) for width in WIDTHS]
    make = {"lkv": make_lkv, "lkv-huge": make_huge, "zeros": make_zeros}[name]
    before = resident()
    begun = time.perf_counter_ns()
    append = make(token)
    took = time.perf_counter_ns() - begun
    at_once = resident() - before
    begun = time.thread_time_ns()
    for row in range(TOKENS):
        append(row)
    used = time.thread_time_ns() - begun
    return {
        "allocate": took / 1e6,
        "resident": at_once / 1e6,
        "after": (resident() - before) / NEEDED,
        "append": used / (TOKENS * LAYERS * len(WIDTHS)),
    }


def make_lkv(token: list[Any], huge_pages: bool = False) -> Callable[[int], None]:
    slots = [(width,) for width in WIDTHS]
    cache = lkv.LatentKvCache.with_capacity(LAYERS, ROWS, slots, "bfloat16", huge_pages=huge_pages)

    def append(row: int) -> None:
        with cache.step(1) as step:
            for layer in range(LAYERS):
                step.append(layer, token)

    return append


def make_huge(token: list[Any]) -> Callable[[int], None]:
    return make_lkv(token, True)


def make_zeros(token: list[Any]) -> Callable[[int], None]:
    buffers = [[np.zeros((ROWS, width), np.uint16) for width in WIDTHS] for _ in range(LAYERS)]
    raw = [array.view(np.uint16) for array in token]

    def append(row: int) -> None:
        for layer in buffers:
            for target, source in zip(layer, raw, strict=True):
                target[row : row + 1] = source

    return append


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
