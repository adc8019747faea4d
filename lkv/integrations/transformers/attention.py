"""Attention over latents as they are cached: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 and appendix C."""

from __future__ import annotations

import torch

__all__ = ["chosen_rows", "crossover", "latent_attention", "with_chosen"]

# Rows widened, scored and weighed at a time: with 576 columns of float32, 2.3 MB.
_BLOCK = 1024
# In units of its multiplications, as measured on a CPU with 16 and 128 heads, in float32 and bfloat16.
_EXPANDING_COSTS = 2


def latent_attention(
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_pe: torch.Tensor,
    w_kv: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to latents without expanding them: the up-projections are applied to queries and results instead.

    Per head, ``score = (q_nope w_uk) . c_kv + q_pe . k_pe`` and ``out = (softmax(scaling score) c_kv) w_uv^T``. One
    pass over the rows in blocks, with a running maximum and sum. On the CPU, bfloat16 and float16 rows are widened to
    float32 block by block; elsewhere the products are of the rows' own type and the softmax is float32.

    Parameters
    ----------
    query : torch.Tensor, [batch, heads, n, qk_nope_head_dim + qk_rope_head_dim]
    c_kv : torch.Tensor, [batch, 1, rows, kv_lora_rank]
    k_pe : torch.Tensor, [batch, 1, rows, qk_rope_head_dim]
    w_kv : torch.Tensor, [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]
        ``w_uk`` and ``w_uv``, the weight of ``kv_b_proj``.
    mask : torch.Tensor, [batch or 1, heads or 1, n, rows], optional
        Boolean, True where a query attends, or of floats to add to the scores. None lets every query attend to every
        row; with more than one query, to the rows up to its own number. A query that attends to nothing gives zeros.
    scaling : float
        Of the scores.
    sinks : torch.Tensor, [heads], optional
        A score per head that takes part in the softmax and has no row.

    Returns
    -------
    torch.Tensor
        ``[batch, n, heads, v_head_dim]``, of the query's dtype.
    """
    batch, heads, n, _ = query.shape
    rows, rank = c_kv.shape[2:]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    products = wide if query.device.type == "cpu" else query.dtype
    nope = query.shape[3] - k_pe.shape[3]
    q_nope, q_pe = query.split([nope, k_pe.shape[3]], dim=-1)
    q_latent = _of_heads(_project_queries(_by_head(q_nope), w_kv), batch)
    q_latent = q_latent.to(products).mul_(scaling).reshape(batch, heads * n, rank)
    q_pe = (q_pe.to(products) * scaling).reshape(batch, heads * n, -1)
    c_kv, k_pe = c_kv[:, 0], k_pe[:, 0]
    if mask is None and n > 1:
        mask = torch.ones((1, 1, n, rows), dtype=torch.bool, device=query.device).tril()

    highest = total = context = None
    if sinks is not None:
        highest = sinks.to(wide).view(1, heads, 1).expand(batch, heads, n).reshape(batch, heads * n, 1)
        total = torch.ones_like(highest)
        context = highest.new_zeros(batch, heads * n, rank)
    block = max(_BLOCK // batch, 128)
    for lo in range(0, rows, block):
        latent = c_kv[:, lo : lo + block].to(products)
        rope = k_pe[:, lo : lo + block].to(products)
        scores = torch.bmm(q_pe, rope.transpose(1, 2))
        scores = torch.baddbmm(scores, q_latent, latent.transpose(1, 2)).to(wide)
        if mask is not None:
            _apply(scores.view(batch, heads, n, -1), mask[..., lo : lo + block])
        peak = scores.amax(-1, keepdim=True)
        if highest is None or total is None or context is None:
            highest = peak
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            context = torch.bmm(weights.to(products), latent).to(wide)
            continue
        peak = torch.maximum(highest, peak)
        fade = (highest - peak).exp_()
        highest = peak
        weights = scores.sub_(highest).exp_()
        total = total.mul_(fade).add_(weights.sum(-1, keepdim=True))
        context = context.mul_(fade).add_(torch.bmm(weights.to(products), latent))
    assert context is not None and total is not None
    context = context.div_(total).to(query.dtype).view(batch, heads, n, rank)
    if mask is not None:
        # Of a query that attends to nothing the result is zero, as PyTorch's own functions have it.
        seen = mask if mask.dtype == torch.bool else mask > -torch.inf
        context = context * seen.any(-1, keepdim=True)
    return _of_heads(_project_context(_by_head(context), w_kv[:, nope:]), batch).transpose(1, 2).contiguous()


def crossover(kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int) -> int:
    """Return the number of queries below which `latent_attention` takes less time than expanding all rows.

    A row costs ``n (2 kv_lora_rank + qk_rope_head_dim)`` multiplications per head here, and expanded
    ``kv_lora_rank (qk_nope_head_dim + v_head_dim) + n (qk_nope_head_dim + qk_rope_head_dim + v_head_dim)``.
    The expanded rows are written and read besides, so that the two take the same time at about twice as many queries as
    they take the same number of multiplications: at 340 with the dimensions of DeepSeek-V3.
    """
    more = 2 * kv_lora_rank - qk_nope_head_dim - v_head_dim
    return 2**31 if more <= 0 else _EXPANDING_COSTS * kv_lora_rank * (qk_nope_head_dim + v_head_dim) // more


def chosen_rows(
    indices: torch.Tensor, c_kv: torch.Tensor, k_pe: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the rows that a sparse model's indexer chose for its one query, and their mask.

    Parameters
    ----------
    indices : torch.Tensor of int, [batch, 1, k]
    c_kv, k_pe, mask
        As of `latent_attention`.
    """
    index = indices[:, 0].long()
    latent, rope = (torch.take_along_dim(rows, index[:, None, :, None], dim=2) for rows in (c_kv, k_pe))
    if mask is not None:
        mask = torch.take_along_dim(mask, index[:, None, None, :], dim=3)
    return latent, rope, mask


def with_chosen(indices: torch.Tensor, rows: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a mask that leaves every query the rows which its indexer chose, out of those of `mask`.

    Parameters
    ----------
    indices : torch.Tensor of int, [batch, n, k]
    rows : int
        Of the cache.
    mask : torch.Tensor, optional
        As of `latent_attention`.
    """
    batch, n, _ = indices.shape
    chosen = torch.zeros((batch, 1, n, rows), dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices[:, None].long(), True)
    if mask is None:
        return chosen.tril() if n > 1 else chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _apply(scores: torch.Tensor, mask: torch.Tensor) -> None:
    # The lowest number and not minus infinity: a padded query attends to nothing, and must not become NaN.
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    else:
        scores.add_(mask).clamp_(min=torch.finfo(scores.dtype).min)


def _project_queries(queries: torch.Tensor, w_kv: torch.Tensor) -> torch.Tensor:
    """Multiply ``[heads, m, qk_nope_head_dim]`` by ``w_uk``, to ``[heads, m, kv_lora_rank]``."""
    nope = queries.shape[2]
    if _is_narrow_on_cpu(queries):
        # PyTorch copies weights that have gaps before it multiplies them, and a part of w_kv has.
        return torch.bmm(torch.nn.functional.pad(queries, (0, w_kv.shape[1] - nope)), w_kv)
    return torch.bmm(queries, w_kv[:, :nope])


def _project_context(context: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Multiply ``[heads, m, kv_lora_rank]`` by ``w_uv`` transposed, to ``[heads, m, v_head_dim]``."""
    if _is_narrow_on_cpu(context):
        return torch.bmm(w_uv, context.transpose(1, 2)).transpose(1, 2)  # not copied as the first factor
    return torch.bmm(context, w_uv.transpose(1, 2))


def _is_narrow_on_cpu(states: torch.Tensor) -> bool:
    return states.dtype in (torch.bfloat16, torch.float16) and states.device.type == "cpu"


def _by_head(states: torch.Tensor) -> torch.Tensor:
    """Turn ``[batch, heads, n, width]`` to ``[heads, batch n, width]``: weights are then read once for the batch."""
    batch, heads, n, width = states.shape
    return states.transpose(0, 1).reshape(heads, batch * n, width)


def _of_heads(states: torch.Tensor, batch: int) -> torch.Tensor:
    heads, _, width = states.shape
    return states.reshape(heads, batch, -1, width).transpose(0, 1)
