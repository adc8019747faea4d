"""Rows of a `LatentKvCache` as transformers passes them around: tensors ``[batch, heads, rows, width]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lkv.cache import LatentKvCache
from lkv.errors import GeometryError, IncompleteStepError, ShapeMismatchError, UnpopulatedLayerError
from lkv.layout import SlotSpec

__all__ = ["BatchRows"]

# Of one slot: batch, heads, width.
_Shape = tuple[int, int, int]


class BatchRows:
    """The rows of some layers, in a `LatentKvCache` that the first rows to come decide the geometry of.

    A batch of B sequences of equal length is one row ``[B, width]`` per position. Rows of a forward pass count when
    the last layer has got its own: what a pass that failed half way left behind is overwritten by the next one.

    Parameters
    ----------
    names : sequence of str
        The slots.
    layers : sequence of int
        Which of the model's layers have rows.
    n_layers : int
        Of the model.
    max_seq_len : int
        Rows to allocate.
    device : str, torch.device or DeviceLocation, optional
        Where to; by default where the first rows are.
    huge_pages : bool
        As for `LatentKvCache.with_capacity`.

    Attributes
    ----------
    cache : LatentKvCache or None
        None until rows came.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[int],
        n_layers: int,
        max_seq_len: int,
        device: Any = None,
        huge_pages: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.layers = tuple(layers)
        self.n_layers = n_layers
        self.max_seq_len = max_seq_len
        self.device = device
        self.huge_pages = huge_pages
        self.cache: LatentKvCache | None = None
        self._geometry: tuple[tuple[_Shape, ...], torch.dtype, torch.device] | None = None
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._views_of: object = None  # the allocation id that the views belong to
        self._kept: tuple[int, ...] = ()  # the slots with any width: models without rotary keys have them 0 wide
        self._written: set[int] = set()  # layers that have got the rows of this forward pass
        self._pending = 0
        self._abandoned: set[int] = set()  # layers that the pass before it wrote, if that came to no end

    @property
    def length(self) -> int:
        """Rows that every layer has."""
        return 0 if self.cache is None else self.cache.cached_len

    @property
    def batch_size(self) -> int | None:
        """Sequences, or None until rows came."""
        return None if self._geometry is None else self._geometry[0][0][0]

    def length_of(self, layer: int) -> int:
        """Return the rows of one layer, those of the forward pass under way included."""
        return self.length + (self._pending if layer in self._written else 0)

    def append(self, layer: int, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Write the rows ``[batch, heads, n, width]`` of a layer and return all that it has.

        Raises
        ------
        ShapeMismatchError, DTypeMismatchError, DeviceMismatchError
            If they do not fit the rows before them, or those of the other layers in this forward pass.
        CapacityError
            If they do not fit into `max_seq_len` rows.
        IncompleteStepError
            If the last two passes ended early, and at the same layer.
        """
        again = layer in self._written
        if self.length == 0 and (again or not self._written):
            geometry = _geometry_of(rows)
            if geometry != self._geometry or self.cache is None or not self.cache.nbytes:
                self._open(*geometry)
        cache = self.cache
        assert cache is not None
        n = rows[0].shape[2]
        again = layer in self._written  # no longer, when rows of another geometry began anew
        if again and self._written == self._abandoned:
            self._abandoned = set()
            raise IncompleteStepError(
                f"update: two forward passes in a row ended after layers {sorted(self._written)} of "
                f"{list(self.layers)}: the model has fewer layers than the cache, or keeps failing",
                expected=self.layers,
                actual=tuple(sorted(self._written)),
            )
        if self._written and not again and n != self._pending:
            raise ShapeMismatchError(
                f"update: layer {layer}: expected {self._pending} rows, as in the layers before it, got {n}",
                expected=self._pending,
                actual=n,
            )
        cache.append(layer, [_rows_first(rows[slot]) for slot in self._kept])
        if again:
            self._abandoned, self._written = self._written, set()
        self._written.add(layer)
        self._pending = n
        end = cache.cached_len + n
        if len(self._written) == len(self.layers):
            cache.advance_by(n)
            self._written.clear()
            self._abandoned = set()
        return self._upto(layer, end)

    def view(self, layer: int) -> tuple[torch.Tensor, ...] | None:
        """Return all rows of a layer, one tensor ``[batch, heads, rows, width]`` per slot; None until rows came."""
        return None if self.cache is None else self._upto(layer, self.length_of(layer))

    def truncate_to(self, length: int) -> None:
        """Keep at most the first rows, and none of a forward pass that is under way."""
        self._written.clear()
        if self.cache is not None:
            self.cache.truncate_to(length)

    def open(self, batch_size: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate, before any rows came.

        Raises
        ------
        GeometryError
            If there are rows already.
        """
        if self.length or self._written:
            raise GeometryError(f"open: the cache holds {self.length} rows already", actual=self.length)
        self._open(tuple((batch_size, 1, width) for width in widths), dtype, device)

    def select(self, index: torch.Tensor) -> None:
        """Make sequence i of the batch what sequence ``index[i]`` was; the batch may grow or shrink."""
        if self.cache is None or self._geometry is None:
            return
        self._written.clear()
        n, batch = self.length, self._geometry[0][0][0]
        index = torch.arange(batch)[index.cpu()]  # an IndexError comes from here, before anything is changed
        if index.ndim != 1:
            raise ShapeMismatchError(f"index: expected [sequences], got {list(index.shape)}", actual=tuple(index.shape))
        if index.tolist() == list(range(batch)):
            return
        if len(index) == batch and n:
            for layer in self.layers:
                for slot in range(self.cache.n_slots):
                    storage = self.cache.slot_storage(layer, slot)
                    assert storage is not None
                    with storage.write(0, n) as lease:
                        rows = lease.torch()
                        rows.copy_(rows.index_select(1, index.to(rows.device)))
            return
        old, (shapes, dtype, device) = self.cache, self._geometry
        self._open(tuple((len(index), heads, width) for _, heads, width in shapes), dtype, device)
        if n:
            with self.cache.step(n) as step:
                for layer in self.layers:
                    with old.read(layer) as leased:
                        step.append(layer, [rows.index_select(1, index.to(rows.device)) for rows in leased.torch()])

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchRows:
        # As transformers continues one prompt in several ways; rows of a forward pass under way stay behind.
        made = BatchRows(self.names, self.layers, self.n_layers, self.max_seq_len, self.device, self.huge_pages)
        made.cache = None if self.cache is None else self.cache.fork()
        made._geometry, made._kept = self._geometry, self._kept
        memo[id(self)] = made
        return made

    def _open(self, shapes: tuple[_Shape, ...], dtype: torch.dtype, device: torch.device) -> None:
        if len({batch for batch, _, _ in shapes}) > 1:
            raise ShapeMismatchError(
                f"update: expected one batch size in all slots, got {[batch for batch, _, _ in shapes]}", actual=shapes
            )
        slots = [
            SlotSpec(name, (batch, width) if heads == 1 else (batch, heads, width))
            for name, (batch, heads, width) in zip(self.names, shapes, strict=True)
            if width
        ]
        self.cache = LatentKvCache.with_capacity(
            self.n_layers,
            self.max_seq_len,
            dtype=dtype,
            device=device if self.device is None else self.device,
            slots=slots,
            layers=self.layers,
            huge_pages=self.huge_pages,
        )
        self._geometry = shapes, dtype, device
        self._kept = tuple(slot for slot, (_, _, width) in enumerate(shapes) if width)
        self._written.clear()

    def _upto(self, layer: int, end: int) -> tuple[torch.Tensor, ...]:
        assert self.cache is not None
        if self._views_of != self.cache.alloc_id:
            self._views_of, self._views = self.cache.alloc_id, {}
        if layer not in self._views:
            self._views[layer] = self._whole(layer)
        return tuple([view.narrow(2, 0, end) for view in self._views[layer]])

    def _whole(self, layer: int) -> tuple[torch.Tensor, ...]:
        """All of a layer's memory, ``[batch, heads, max_seq_len, width]``: aliases, which hold no lease."""
        assert self.cache is not None and self._geometry is not None
        shapes, dtype, device = self._geometry
        with torch.inference_mode(False):
            views = [
                torch.empty((batch, heads, self.max_seq_len, 0), dtype=dtype, device=device)
                for batch, heads, _ in shapes
            ]
            for place, slot in enumerate(self._kept):
                storage = self.cache.slot_storage(layer, place)
                if storage is None:
                    raise UnpopulatedLayerError(f"layer {layer} holds no storage: the cache was cleared")
                whole = storage.alias().torch()
                views[slot] = (whole.unsqueeze(2) if whole.ndim == 3 else whole).permute(1, 2, 0, 3)
        return tuple(views)


def _geometry_of(rows: Sequence[torch.Tensor]) -> tuple[tuple[_Shape, ...], torch.dtype, torch.device]:
    shapes = tuple((tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in rows)
    return shapes, rows[0].dtype, rows[0].device


def _rows_first(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.squeeze(1).transpose(0, 1) if tensor.shape[1] == 1 else tensor.permute(2, 0, 1, 3)
