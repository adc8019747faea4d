"""Whose rows are whose: one layer of one branch of a functional cache.

Branches share buffers as long as they agree, and a claimed length settles which one may write behind what they share. A
claim is never granted twice, whatever becomes of it, so rows behind the claimed length have never been written: zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lkv._storage import LayerBuffers

__all__ = ["BranchLayer"]


class BranchLayer(NamedTuple):
    """A layer as one branch has it; never changed, only replaced.

    Attributes
    ----------
    buffers : LayerBuffers
        The memory, shared or not.
    extent : int
        Rows that hold what this branch has written or inherited; as far as it is concerned, zeros follow.
    frozen : int
        Rows ``[0, frozen)`` are shared with other branches: never written in place.
    mine : int
        Rows ``[frozen, mine)`` are claimed for this branch; those from `extent` on are zeros. At least `extent`.
    """

    buffers: LayerBuffers
    extent: int = 0
    frozen: int = 0
    mine: int = 0

    def shared(self, keeps_tail: bool) -> BranchLayer:
        """Return the layer after a clone; the rows claimed behind the extent stay with one of the two."""
        return BranchLayer(self.buffers, self.extent, self.extent, self.mine if keeps_tail else self.extent)

    def covering(self, rows: int) -> BranchLayer:
        """Return the layer with rows ``[0, rows)`` safe to hand out: no other branch will ever write them."""
        return self._claimed(rows) or self._forked(self.extent, rows)

    def written(self, at: int, arrays: Sequence[Any], rows: int, what: str) -> BranchLayer:
        """Write checked arrays to rows ``[at, at + rows)`` and drop what this branch had behind them."""
        end = at + rows
        layer = (self._claimed(end) if at >= self.frozen else None) or self._forked(min(at, self.extent), end)
        layer.buffers.write(at, arrays, rows, what)
        if layer.extent > end:
            layer.buffers.clear(end, layer.extent)
        return BranchLayer(layer.buffers, end, layer.frozen, layer.mine)

    def rotated(self, at: int, arrays: Sequence[Any], rows: int, capacity: int, what: str) -> BranchLayer:
        """Write checked arrays to the rows from `at` on, wrapping round at the capacity; other rows stay."""
        lo, hi = (at, at + rows) if at + rows <= capacity else (0, capacity)
        layer = (self._claimed(hi) if lo >= self.frozen else None) or self._forked(self.extent, hi)
        layer.buffers.write(at, arrays, rows, what)
        return BranchLayer(layer.buffers, max(layer.extent, hi), layer.frozen, layer.mine)

    def _claimed(self, rows: int) -> BranchLayer | None:
        if rows <= self.mine:
            return self
        if not self._claim(self.mine, rows):
            return None
        return BranchLayer(self.buffers, self.extent, self.frozen, rows)

    def _claim(self, expected: int, rows: int) -> bool:
        return self.buffers.claim(expected, rows)

    def _forked(self, keep: int, rows: int) -> BranchLayer:
        mine = max(keep, rows)
        buffers = self.buffers.fork(keep)
        buffers.claim(0, mine)
        return BranchLayer(buffers, extent=keep, frozen=0, mine=mine)
