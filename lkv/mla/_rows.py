"""Cached rows, block by block, in the type attention computes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from lkv.mla._arrays import Array


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Rows ``[lo, hi)`` as one array ``[hi - lo, kv_lora_rank + qk_rope_head_dim]``."""

    lo: int
    hi: int
    rows: Array
    rank: int

    @property
    def c_kv(self) -> Array:
        """The latent part."""
        return self.rows[:, : self.rank]

    @property
    def k_pe(self) -> Array:
        """The rotary part."""
        return self.rows[:, self.rank :]


class RowBlocks:
    """Copies rows of any float type and stride into one scratch, a block at a time, latent and rotary key joined.

    Rows already of the computing type are copied as well: the copy stays in cache for the two products that read it,
    and one product over the joined rows is faster than two.
    """

    def __init__(self, c_kv: Array, k_pe: Array, dtype: np.dtype[Any], block_rows: int) -> None:
        self.dtype = dtype
        self.block_rows = min(block_rows, max(len(c_kv), 1))
        self._c_kv, self._k_pe = c_kv, k_pe
        self._scratch = np.empty((self.block_rows, c_kv.shape[1] + k_pe.shape[1]), dtype)

    def upto(self, end: int) -> Iterator[Block]:
        """Blocks covering rows ``[0, end)``; a block is valid until the next one is asked for."""
        rank = self._c_kv.shape[1]
        for lo in range(0, end, self.block_rows):
            hi = min(lo + self.block_rows, end)
            block = Block(lo, hi, self._scratch[: hi - lo], rank)
            np.copyto(block.c_kv, self._c_kv[lo:hi], casting="same_kind")
            np.copyto(block.k_pe, self._k_pe[lo:hi], casting="same_kind")
            yield block
