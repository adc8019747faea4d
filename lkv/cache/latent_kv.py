"""The persistent cache for latent attention: N slots per layer, of any widths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from lkv._storage import Storage, View
from lkv.cache.persistent import PersistentCache, Place, layer_set
from lkv.devices import DeviceLocation, resolve
from lkv.dtypes import DType
from lkv.errors import ArgumentTypeError, GeometryError
from lkv.layout import Layout, SlotSpec, check_count, checked_product, slot_specs

__all__ = ["LatentKvCache"]


class LatentKvCache(PersistentCache):
    """Buffers ``[max_seq_len, *slot_trailing[s]]`` for every slot ``s`` of every layer, and what is cached in them.

    Made by `with_capacity`. See `SlotTable` for `append`, `step` and `read`.

    Examples
    --------
    >>> cache = LatentKvCache.with_capacity(n_layers=2, max_seq_len=64, slot_trailing=[(512,), (64,)], dtype="f32")
    >>> with cache.step(1) as step:
    ...     for layer in range(2):
    ...         step.append(layer, [np.zeros((1, 512), "f4"), np.zeros((1, 64), "f4")])
    >>> cache.cached_len
    1
    """

    _kind = "LatentKvCache"
    _packed: bool
    _huge_pages: bool

    @classmethod
    def with_capacity(
        cls,
        n_layers: int,
        max_seq_len: int,
        slot_trailing: Sequence[Sequence[int]] | None = None,
        dtype: Any = "bfloat16",
        device: Any = "cpu",
        *,
        slots: Sequence[SlotSpec] | None = None,
        layers: Iterable[int] | None = None,
        layout: str = "separate",
        huge_pages: bool = False,
    ) -> Self:
        """Allocate a cache.

        Parameters
        ----------
        n_layers : int
            Layers of the model.
        max_seq_len : int
            Rows to allocate in every slot.
        slot_trailing : sequence of shapes
            The shape of one row of each slot: ``[(kv_lora_rank,), (qk_rope_head_dim,)]`` for MLA; ``()`` is a scalar.
        dtype : DType, str, numpy.dtype or torch.dtype
            Element type of all slots.
        device : str, DeviceLocation or torch.device
            Where to.
        slots : sequence of SlotSpec
            The long form of `slot_trailing`, with names and tags.
        layers : iterable of int, optional
            Populate only these: a stage of a pipeline.
        layout : {"separate", "packed"}
            A buffer for each slot, or one row ``[sum of widths]`` per token of which the slots are strided views.
        huge_pages : bool
            Ask the operating system for 2 MB pages: faster to fill, resident in larger steps.

        Raises
        ------
        GeometryError
            If there is no layer, row or slot, a dimension is not positive, or the size does not fit.
        OutOfMemoryError
            If the memory does not suffice; nothing stays allocated.
        DeviceUnavailableError
            If the device cannot be used; says why.
        """
        n_layers = check_count(n_layers, "n_layers", 1)
        max_seq_len = check_count(max_seq_len, "max_seq_len", 1)
        specs = slot_specs(slot_trailing, slots)
        element = DType.of(dtype)
        if layout not in ("separate", "packed"):
            raise ArgumentTypeError(f"layout: expected 'separate' or 'packed', got {layout!r}", actual=layout)
        populate = layer_set(layers, n_layers)
        _required(len(populate), max_seq_len, specs, element)
        location = resolve(device)
        cache = cls.__new__(cls)
        cache._packed = layout == "packed"
        cache._huge_pages = bool(huge_pages)
        shapes = [((0, *spec.trailing), 0) for spec in specs]
        cache._open(n_layers, max_seq_len, specs, shapes, element, location)
        cache._start(location, populate)
        return cache

    @staticmethod
    def bytes_required(
        n_layers: int,
        max_seq_len: int,
        slot_trailing: Sequence[Sequence[int]] | None = None,
        dtype: Any = "bfloat16",
        *,
        slots: Sequence[SlotSpec] | None = None,
        layers: Iterable[int] | None = None,
    ) -> int:
        """Return the bytes that `with_capacity` would allocate, exactly; allocates nothing."""
        n_layers = check_count(n_layers, "n_layers", 1)
        rows = check_count(max_seq_len, "max_seq_len", 1)
        return _required(len(layer_set(layers, n_layers)), rows, slot_specs(slot_trailing, slots), DType.of(dtype))

    @property
    def layout(self) -> str:
        """``"separate"`` or ``"packed"``."""
        return "packed" if self._packed else "separate"

    @property
    def _arrangement(self) -> str:
        return self.layout

    def pages(self, page_size: int) -> tuple[tuple[View, ...] | None, ...]:
        """Return the buffers as ``[n_pages, page_size, ...]`` for kernels that take a block table.

        The views are aliases: they hold the memory and no lease. Hold a step or a read lease while a kernel uses them.

        Returns
        -------
        tuple
            For each layer None, or one view per buffer: ``[n_pages, page_size, width]`` of all slots together when
            packed, else ``[n_pages, page_size, *slot_trailing[s]]`` per slot.

        Raises
        ------
        GeometryError
            If `page_size` does not divide `max_seq_len`.
        """
        page_size = check_count(page_size, "page_size", 1)
        if self.max_seq_len % page_size:
            raise GeometryError(
                f"page_size: expected a divisor of max_seq_len {self.max_seq_len}, got {page_size}",
                expected=self.max_seq_len,
                actual=page_size,
            )
        pages = (self.max_seq_len // page_size, page_size)

        def of_layer(layer: int) -> tuple[View, ...] | None:
            storages = [self.slot_storage(layer, slot) for slot in range(1 if self._packed else self.n_slots)]
            return tuple(s.alias((*pages, *s.shape[1:])) for s in storages if s is not None) or None

        return tuple(of_layer(layer) for layer in range(self.n_layers))

    def _like(self, location: DeviceLocation, populate: Sequence[int]) -> Self:
        return type(self).with_capacity(
            self.n_layers,
            self.max_seq_len,
            dtype=self.dtype,
            device=location,
            slots=self.slots,
            layers=populate,
            layout=self.layout,
            huge_pages=self._huge_pages,
        )

    def _new_layer(self) -> list[Place]:
        size = self.dtype.itemsize
        where, huge = self._home, self._huge_pages
        if not self._packed:
            shapes = [(self.max_seq_len, *spec.trailing) for spec in self.slots]
            storages = [Storage(shape, self.dtype, where, huge_pages=huge) for shape in shapes]
            return [(s, 0, 0, spec.width * size) for s, spec in zip(storages, self.slots, strict=True)]
        row = sum(spec.width for spec in self.slots)
        storage = Storage((self.max_seq_len, row), self.dtype, where, huge_pages=huge)
        return [(storage, offset * size, 0, row * size) for offset in self._offsets()]

    def _offsets(self) -> list[int]:
        widths = [spec.width for spec in self.slots]
        return [sum(widths[:slot]) for slot in range(len(widths))]

    def _layout(self, slot: int) -> Layout:
        inner = Layout.contiguous(self.slots[slot].trailing or (1,))
        shape = (self.max_seq_len, *self.slots[slot].trailing)
        if not self._packed:
            return Layout.contiguous(shape)
        row = sum(spec.width for spec in self.slots)
        strides = (row, *(inner.strides if self.slots[slot].trailing else ()))
        return Layout(shape, strides, self._offsets()[slot])


def _required(n_layers: int, rows: int, specs: Sequence[SlotSpec], dtype: DType) -> int:
    width = sum(spec.width for spec in specs)
    return checked_product((n_layers, rows, width, dtype.itemsize), "size of the cache") if n_layers else 0
