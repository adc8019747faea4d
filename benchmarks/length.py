"""What an append and a read cost beside how many rows are cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache

from .append import WIDTHS
from .measure import Contender, Progress, Settings, Table, Target, compare
from .optional import missing, peer

__all__ = ["LENGTHS", "run"]

LAYERS, CAPACITY, TOKENS = 4, 131_072, 64
LENGTHS = (1_000, 4_000, 16_000, 64_000, 130_000)
COPIED = (1_000, 4_000, 16_000)


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure the same rows of one cache again and again, so that length is all that differs."""
    cache = LatentKvCache.with_capacity(LAYERS, CAPACITY, [(w,) for w in WIDTHS], "bfloat16")
    token = [np.ones((1, w), ml_dtypes.bfloat16) for w in WIDTHS]
    torch = peer("torch")

    def go_to(rows: int) -> Callable[[], None]:
        def publish() -> None:
            cache.truncate_to(0)
            for layer in range(LAYERS):
                cache.note_write(layer, rows)
            cache.advance_by(rows)

        return publish

    def append() -> None:
        for _ in range(TOKENS):
            with cache.step(1) as step:
                for layer in range(LAYERS):
                    step.append(layer, token)

    def read() -> None:
        for _ in range(TOKENS):
            for layer in range(LAYERS):
                with cache.read(layer) as rows:
                    rows.numpy()

    operations = TOKENS * LAYERS * len(WIDTHS)
    ways = {"step.append": append, "read, .numpy()": read}
    contenders = [
        Contender(f"{name} at {rows:,} rows", way, operations, go_to(rows))
        for rows in LENGTHS
        for name, way in ways.items()
    ]
    if torch is not None:
        contenders += [copied(torch, rows) for rows in COPIED]
    first, last = f"at {min(LENGTHS):,} rows", f"at {max(LENGTHS):,} rows"
    table = compare(
        "an append and a read at growing length, per layer and slot",
        contenders,
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        base=f"step.append {first}",
        targets=[
            Target(f"step.append {last}", f"step.append {first}", 1.1),
            Target(f"read, .numpy() {last}", f"read, .numpy() {first}", 1.1),
        ],
        missing=missing(["torch"]),
        key="length",
    )
    return [table]


def copied(torch: Any, rows: int) -> Contender:
    """As a cache that concatenates does it."""
    torch.set_num_threads(1)
    cached = [torch.ones((rows, w), dtype=torch.bfloat16) for w in WIDTHS]
    new = [torch.ones((1, w), dtype=torch.bfloat16) for w in WIDTHS]

    def append() -> None:
        for old, one in zip(cached, new, strict=True):
            torch.cat([old, one])

    return Contender(f"torch.cat at {rows:,} rows", append, len(WIDTHS))
