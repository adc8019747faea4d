"""One decode step of MLA attention over the rows of a cache, beside the limit of one core.

The limit is ``max(bytes / bandwidth, flops / peak)`` of what reads the weights plus that of what reads the rows: the
queries must be projected before a row is read. Bandwidth and peak are those of a read and of a square product that
run as contenders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lkv import DType, LatentKvCache
from lkv.mla import attend_absorbed, attend_expanded

from .measure import Contender, Progress, Settings, Table, Target, compare
from .optional import missing, peer

__all__ = ["ROWS", "run"]

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
HEADS = {16: 3.0, 128: 1.5}  # and the target beside the limit
ROWS = (1_024, 4_096, 16_384, 32_768)
EXPANDED_UP_TO = 1 << 16  # heads times rows: about a second per call
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
PRODUCT = 768  # [768, 768] times the same is near the peak, and quick
READ_BYTES = 64 << 20


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure one layer and one query on one thread."""
    rows = ROWS[:2] if settings.quick else ROWS
    return [of_shape(heads, n, settings, progress) for heads in HEADS for n in rows]


def of_shape(heads: int, rows: int, settings: Settings, progress: Progress) -> Table:
    """Absorbed and expanded over rows of both types; the limit is of a product and a read measured in every round."""
    random = np.random.default_rng(0)
    q_nope, q_pe = normal(random, 1, heads, NOPE), normal(random, 1, heads, ROPE)
    w_uk, w_uv = normal(random, heads, NOPE, RANK), normal(random, heads, VALUE, RANK)
    torch = peer("torch")
    leases, contenders = [], []
    for short, dtype in DTYPES.items():
        cache = LatentKvCache.with_capacity(1, rows, [(RANK,), (ROPE,)], dtype)
        slabs = [random.standard_normal((rows, w), np.float32) for w in (RANK, ROPE)]
        with cache.step(rows) as step:
            step.append(0, [slab.astype(cache.dtype.numpy) for slab in slabs])
        lease = cache.read(0)
        leases.append(lease)

        def attend(form: Callable[..., Any], lease: Any = lease) -> Callable[[], Any]:
            c_kv, k_pe = lease.numpy()
            return lambda: form(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv)

        contenders.append(Contender(f"absorbed, {short} rows", attend(attend_absorbed), 1))
        if heads * rows <= EXPANDED_UP_TO and not settings.quick:
            contenders.append(Contender(f"expanded, {short} rows", attend(attend_expanded), 1))
        if torch is not None and short == "bf16":
            contenders += [Contender(f"{n}, {short} rows", c, 1) for n, c in in_torch(torch, lease, heads).items()]
    matrix, memory = normal(random, PRODUCT, PRODUCT), np.ones(READ_BYTES, np.uint8)
    contenders.append(Contender("product", lambda: matrix @ matrix, 1))
    contenders.append(Contender("read", memory.max, 1))

    table = compare(
        f"MLA decode attention, {heads} heads, {rows:,} rows",
        contenders,
        rounds=settings.rounds(16 if heads * rows < 1 << 18 else 8),
        settings=settings,
        progress=progress,
        base="limit, bf16 rows",
        targets=[
            Target("absorbed, bf16 rows", "absorbed, f32 rows", 1.25),
            Target("absorbed, bf16 rows", "limit, bf16 rows", HEADS[heads]),
            Target("absorbed, f32 rows", "limit, f32 rows", HEADS[heads]),
        ],
        missing=[*missing(["torch"]), *left_out(heads, rows, settings)],
        key=f"attention-{heads}-{rows}",
    )
    add_limits(table, heads, rows)
    for lease in leases:
        lease.release()
    return table


def add_limits(table: Table, heads: int, rows: int) -> None:
    """Replace the product and the read by the time that the step takes at their speed, round by round."""
    products, reads = table.samples.pop("product"), table.samples.pop("read")
    rates = [(2 * PRODUCT**3 / product, READ_BYTES / read) for product, read in zip(products, reads, strict=True)]
    projections = heads * RANK * (NOPE + VALUE)  # multiply-adds, and elements of weights
    attended = rows * heads * (2 * RANK + ROPE)
    for short, dtype in DTYPES.items():
        row_bytes = rows * (RANK + ROPE) * DType.of(dtype).itemsize
        parts = ((4 * projections, 2 * projections), (row_bytes, 2 * attended))
        limits = [sum(max(n / read, flops / product) for n, flops in parts) for product, read in rates]
        table.samples[f"limit, {short} rows"] = limits


def left_out(heads: int, rows: int, settings: Settings) -> list[str]:
    """Say it where the expanded form is not measured."""
    if settings.quick:
        return ["expanded: left out of a quick run"]
    return [] if heads * rows <= EXPANDED_UP_TO else ["expanded: left out, seconds per call"]


def normal(random: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


def in_torch(torch: Any, lease: Any, heads: int) -> dict[str, Callable[[], Any]]:
    """Return the absorbed form in PyTorch over bfloat16 rows: computed in their type, or widened to float32."""
    torch.set_num_threads(1)
    c_kv, k_pe = lease.torch()
    query, rotary, up = torch.randn(heads, RANK), torch.randn(heads, ROPE), torch.randn(heads, VALUE, RANK)
    narrow = [tensor.to(c_kv.dtype) for tensor in (query, rotary, up)]

    def attend(query: Any, rotary: Any, up: Any, latent: Any, keys: Any) -> Any:
        scores = query @ latent.T + rotary @ keys.T
        return torch.einsum("hr,hvr->hv", torch.softmax(scores, -1) @ latent, up)

    return {
        "torch": lambda: attend(*narrow, c_kv, k_pe),
        "torch, widened": lambda: attend(query, rotary, up, c_kv.float(), k_pe.float()),
    }
