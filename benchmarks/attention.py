"""One decode step of MLA attention over the rows of a cache: absorbed, expanded, and absorbed in torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Contender, Progress, Settings, Table, compare
from benchmarks.optional import peer
from lkv import LatentKvCache
from lkv.mla import attend_absorbed, attend_expanded

__all__ = ["run"]

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
SHAPES = ((4_096, 16), (16_384, 16), (4_096, 128))  # rows, heads


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure one layer, one query, on however many threads the libraries take."""
    return [of_shape(rows, heads, settings, progress) for rows, heads in SHAPES[: 1 if settings.quick else None]]


def of_shape(rows: int, heads: int, settings: Settings, progress: Progress) -> Table:
    random = np.random.default_rng(0)
    cache = LatentKvCache.with_capacity(1, rows, [(RANK,), (ROPE,)], "bfloat16")
    with cache.step(rows) as step:
        step.append(0, [bf16(random, rows, RANK), bf16(random, rows, ROPE)])
    q_nope, q_pe = normal(random, 1, heads, NOPE), normal(random, 1, heads, ROPE)
    w_uk, w_uv = normal(random, heads, NOPE, RANK), normal(random, heads, VALUE, RANK)
    lease = cache.read(0)
    c_kv, k_pe = lease.numpy()

    contenders = [
        Contender("attend_absorbed", lambda: attend_absorbed(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv), 1),
        Contender("attend_expanded", lambda: attend_expanded(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv), 1),
    ]
    torch = peer("torch")
    if torch is not None:
        contenders.append(Contender("torch absorbed, all rows widened", torch_absorbed(torch, lease, rows, heads), 1))
    table = compare(
        f"MLA decode attention, {rows:,} rows, {heads} heads, bf16 rows",
        contenders,
        rounds=settings.rounds(16),
        settings=settings,
        progress=progress,
        clock="wall",
        missing=[] if torch is not None else ["torch"],
    )
    lease.release()
    return table


def bf16(random: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def normal(random: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


def torch_absorbed(torch: Any, lease: Any, rows: int, heads: int) -> Any:
    c_kv, k_pe = lease.torch()
    query = torch.randn(heads, RANK)
    rotary = torch.randn(heads, ROPE)
    up = torch.randn(heads, VALUE, RANK)

    def attend() -> None:
        latent = c_kv.float()
        scores = query @ latent.T + rotary @ k_pe.float().T
        torch.einsum("hr,hvr->hv", torch.softmax(scores, -1) @ latent, up)

    return attend
