"""Multi-head Latent Attention (MLA) in NumPy over the rows of a cache, absorbed and expanded.

MLA (DeepSeek-V2, arXiv:2405.04434) keeps two rows per token instead of a key and a value per head:

* the compressed latent ``c_kv = W^DKV h`` of width ``kv_lora_rank`` (section 2.1.2), from which every head's key part
  ``k_nope = W^UK c_kv`` and value ``v = W^UV c_kv`` follow;
* the rotary key ``k_pe = RoPE(W^KR h)`` of width ``qk_rope_head_dim``, shared by all heads (section 2.1.3).

A head attends with ``softmax((q_nope . k_nope + q_pe . k_pe) / sqrt(qk_nope_head_dim + qk_rope_head_dim)) v``.
`attend_expanded` computes that as written. `attend_absorbed` uses associativity (end of section 2.1.2): ``W^UK`` moves
into the query and ``W^UV`` behind the weighted sum, so that attention reads the cached rows themselves.

Both stream over blocks of rows with a running softmax (Milakov and Gimelshein, arXiv:1805.02867), so neither a
``[T, n_heads]`` score matrix nor a widened copy of all rows is ever held. Each block is widened into one reused
scratch, since matrix products of bfloat16 and float16 arrays do not go through BLAS.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lkv.errors import GeometryError, ShapeMismatchError
from lkv.mla._arrays import Array, compute_dtype, floating, require_shape
from lkv.mla._rows import Block, RowBlocks

__all__ = ["BLOCK_ROWS", "attend_absorbed", "attend_expanded"]

BLOCK_ROWS = 512
_MAX_QUERY_COLUMNS = 2048


def attend_absorbed(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    c_kv: ArrayLike,
    k_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    block_rows: int = BLOCK_ROWS,
) -> Array:
    """Attend with ``W^UK`` absorbed into the queries and ``W^UV`` applied to the weighted sum of latents.

    The cheap form for decoding: per row it costs ``n_heads * (2 * kv_lora_rank + qk_rope_head_dim)`` multiply-adds and
    no expansion of keys or values.

    Parameters
    ----------
    q_nope : array, shape ``[Q, n_heads, qk_nope_head_dim]``
        Content part of the queries of the Q newest tokens.
    q_pe : array, shape ``[Q, n_heads, qk_rope_head_dim]``
        Rotary part of the queries, already rotated.
    c_kv : array, shape ``[T, kv_lora_rank]``
        Latent rows, the new tokens' included. Rows may be strided.
    k_pe : array, shape ``[T, qk_rope_head_dim]``
        Rotary key rows, already rotated.
    w_uk : array, shape ``[n_heads, qk_nope_head_dim, kv_lora_rank]``
        Key up-projection.
    w_uv : array, shape ``[n_heads, v_head_dim, kv_lora_rank]``
        Value up-projection.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`` when not given.
    causal : bool, default True
        Query ``i`` sees rows ``[0, T - Q + i]``, so the last query sees them all. Needs ``Q <= T``.
    block_rows : int, default 512
        Rows per block.

    Returns
    -------
    array, shape ``[Q, n_heads, v_head_dim]``
        float64 when every input is float64, else float32, which is also what everything is accumulated in.

    Raises
    ------
    ShapeMismatchError
        A rank or dimension does not fit the others, or there is no row for a query to see.
    DTypeMismatchError
        An input is not a floating-point array.
    GeometryError
        `block_rows` is less than 1.

    Notes
    -----
    DeepSeek-V2, arXiv:2405.04434, end of section 2.1.2: ``q . (W^UK c) = (W^UK^T q) . c``.
    """
    op = _checked(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, softmax_scale, causal, block_rows)
    n_q, n_heads, _ = op.q_nope.shape
    rank, rope = op.c_kv.shape[1], op.k_pe.shape[1]
    rows = RowBlocks(op.c_kv, op.k_pe, op.dtype, block_rows)
    q_cat = np.empty((n_heads, n_q, rank + rope), op.dtype)
    np.matmul(op.q_nope.transpose(1, 0, 2), op.w_uk, out=q_cat[..., :rank])
    q_cat[..., rank:] = op.q_pe.transpose(1, 0, 2)
    q_cat *= op.scale

    out = np.empty((n_q, n_heads, op.w_uv.shape[1]), op.dtype)
    for q_lo, q_hi in _query_tiles(n_q, n_heads):
        columns = np.ascontiguousarray(q_cat[:, q_lo:q_hi].reshape(-1, rank + rope).T)

        def score(block: Block, scores: Array, columns: Array = columns) -> None:
            np.matmul(block.rows, columns, out=scores[0])

        def weigh(block: Block, weights: Array, acc: Array) -> None:
            np.matmul(block.c_kv.T, weights[0], out=acc[0])

        tile = _Tile(1, n_heads * (q_hi - q_lo), q_hi - q_lo, rank, op.first_hidden_row(q_lo, q_hi))
        latent = _stream(rows, tile, score, weigh)[0].T.reshape(n_heads, q_hi - q_lo, rank)
        out[q_lo:q_hi] = np.matmul(latent, op.w_uv.transpose(0, 2, 1)).transpose(1, 0, 2)
    return out


def attend_expanded(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    c_kv: ArrayLike,
    k_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    block_rows: int = BLOCK_ROWS,
) -> Array:
    """Attend over keys and values expanded per head from the latents: MLA as the paper writes it.

    Parameters, result and errors are those of `attend_absorbed`; the two agree up to rounding. Keys
    ``[n_heads, rows, qk_nope_head_dim]`` and values ``[n_heads, rows, v_head_dim]`` exist one block at a time.

    Notes
    -----
    DeepSeek-V2, arXiv:2405.04434, sections 2.1.2 (``k^C = W^UK c``, ``v^C = W^UV c``) and 2.1.3 (the rotary part).
    """
    op = _checked(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, softmax_scale, causal, block_rows)
    n_q, n_heads, nope = op.q_nope.shape
    v_dim, rank = op.w_uv.shape[1:]
    rows = RowBlocks(op.c_kv, op.k_pe, op.dtype, block_rows)
    up_k = op.w_uk.reshape(n_heads * nope, rank).T
    up_v = op.w_uv.reshape(n_heads * v_dim, rank).T
    nope_columns = op.q_nope.transpose(1, 2, 0) * op.scale
    pe_columns = op.q_pe.transpose(1, 2, 0) * op.scale

    out = np.empty((n_q, n_heads, v_dim), op.dtype)
    for q_lo, q_hi in _query_tiles(n_q, n_heads):

        def score(block: Block, scores: Array, tile: slice = slice(q_lo, q_hi)) -> None:
            keys = (block.c_kv @ up_k).reshape(-1, n_heads, nope).transpose(1, 0, 2)
            np.matmul(keys, nope_columns[..., tile], out=scores)
            scores += block.k_pe @ pe_columns[..., tile]

        def weigh(block: Block, weights: Array, acc: Array) -> None:
            values = (block.c_kv @ up_v).reshape(-1, n_heads, v_dim).transpose(1, 2, 0)
            np.matmul(values, weights, out=acc)

        tile = _Tile(n_heads, q_hi - q_lo, q_hi - q_lo, v_dim, op.first_hidden_row(q_lo, q_hi))
        out[q_lo:q_hi] = _stream(rows, tile, score, weigh).transpose(2, 0, 1)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Operands:
    """Checked arguments; queries and weights are in the computing dtype, rows as they came."""

    q_nope: Array
    q_pe: Array
    c_kv: Array
    k_pe: Array
    w_uk: Array
    w_uv: Array
    dtype: np.dtype[Any]
    scale: float
    causal: bool

    def first_hidden_row(self, q_lo: int, q_hi: int) -> Array:
        """First row each query of a tile does not see, ``[q_hi - q_lo]``, not decreasing."""
        n_q, n_rows = self.q_nope.shape[0], self.c_kv.shape[0]
        if not self.causal:
            return np.full(q_hi - q_lo, n_rows)
        return np.asarray(np.arange(q_lo, q_hi) + (n_rows - n_q + 1))


@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """Extent of the scores of some queries: `groups` products of `columns` (heads times queries) columns each."""

    groups: int
    columns: int
    n_queries: int
    out_dim: int
    first_hidden_row: Array


def _query_tiles(n_q: int, n_heads: int) -> Iterator[tuple[int, int]]:
    step = max(1, _MAX_QUERY_COLUMNS // n_heads)
    for lo in range(0, n_q, step):
        yield lo, min(lo + step, n_q)


def _stream(
    rows: RowBlocks,
    tile: _Tile,
    score: Callable[[Block, Array], None],
    weigh: Callable[[Block, Array, Array], None],
) -> Array:
    """Softmax-weighted sums over all visible rows, ``[groups, out_dim, columns]``.

    `score` fills ``[groups, rows, columns]``, columns being heads times queries with queries last; `weigh` writes the
    block's weighted sum into ``[groups, out_dim, columns]``. Sums are kept with columns last, as scores are: with few
    heads a BLAS is a quarter faster at that than at the transpose.
    """
    hidden = tile.first_hidden_row
    acc = np.empty((tile.groups, tile.out_dim, tile.columns), rows.dtype)
    part = np.empty_like(acc)
    buffer = np.empty(tile.groups * rows.block_rows * tile.columns, rows.dtype)
    for block in rows.upto(int(hidden[-1])):
        n = block.hi - block.lo
        scores = buffer[: tile.groups * n * tile.columns].reshape(tile.groups, n, tile.columns)
        score(block, scores)
        if block.hi > hidden[0]:
            mask = np.arange(block.lo, block.hi)[:, None] >= hidden
            np.copyto(scores.reshape(tile.groups, n, -1, tile.n_queries), -np.inf, where=mask[:, None, :])
        peak = scores.max(axis=1, keepdims=True)
        if block.lo == 0:
            top, total = peak, np.zeros_like(peak)
        np.maximum(peak, top, out=peak)
        scores -= peak
        np.exp(scores, out=scores)
        if block.lo == 0:
            weigh(block, scores, acc)
        else:
            shrink = np.exp(top - peak)
            total *= shrink
            acc *= shrink
            weigh(block, scores, part)
            acc += part
            top = peak
        total += scores.sum(axis=1, keepdims=True)
    acc /= total
    return acc


def _checked(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    c_kv: ArrayLike,
    k_pe: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    softmax_scale: float | None,
    causal: bool,
    block_rows: int,
) -> _Operands:
    given = {"q_nope": q_nope, "q_pe": q_pe, "c_kv": c_kv, "k_pe": k_pe, "w_uk": w_uk, "w_uv": w_uv}
    arrays = {name: floating(name, value) for name, value in given.items()}
    for name, array in arrays.items():
        rank = 2 if name in ("c_kv", "k_pe") else 3
        if array.ndim != rank:
            raise ShapeMismatchError(
                f"{name}: expected {rank} dimensions, got {array.ndim} {array.shape}", expected=rank, actual=array.shape
            )
    n_q, n_heads, nope = arrays["q_nope"].shape
    n_rows, rank = arrays["c_kv"].shape
    rope = arrays["k_pe"].shape[1]
    require_shape("q_pe", arrays["q_pe"].shape, (n_q, n_heads, rope))
    require_shape("k_pe", arrays["k_pe"].shape, (n_rows, rope))
    require_shape("w_uk", arrays["w_uk"].shape, (n_heads, nope, rank))
    require_shape("w_uv", arrays["w_uv"].shape, (n_heads, arrays["w_uv"].shape[1], rank))
    if min(n_heads, nope, rank) < 1:
        raise ShapeMismatchError(
            f"q_nope, c_kv: expected no empty head or latent, got {arrays['q_nope'].shape} and {(n_rows, rank)}",
            expected="n_heads, qk_nope_head_dim, kv_lora_rank >= 1",
            actual=(n_heads, nope, rank),
        )
    needed = n_q if causal else min(n_q, 1)
    if n_rows < needed:
        raise ShapeMismatchError(
            f"c_kv: expected at least {needed} rows for {n_q} {'causal ' if causal else ''}queries, got {n_rows}",
            expected=needed,
            actual=n_rows,
        )
    if block_rows < 1:
        raise GeometryError(f"block_rows: expected at least 1, got {block_rows}", expected=1, actual=block_rows)
    dtype = compute_dtype(*arrays.values())
    for name in ("q_nope", "q_pe", "w_uk", "w_uv"):
        arrays[name] = arrays[name].astype(dtype, copy=False)
    scale = 1.0 / math.sqrt(nope + rope) if softmax_scale is None else float(softmax_scale)
    return _Operands(**arrays, dtype=dtype, scale=scale, causal=causal)
