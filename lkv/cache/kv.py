"""The persistent cache for plain attention: keys and values, heads outermost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from lkv._storage import Storage
from lkv.cache.persistent import PersistentCache, Place
from lkv.devices import DeviceLocation, resolve
from lkv.dtypes import DType
from lkv.errors import (
    ArgumentTypeError,
    DeviceMismatchError,
    DTypeMismatchError,
    GeometryError,
    ReadOnlyError,
    ShapeMismatchError,
)
from lkv.ids import AllocId
from lkv.layout import Layout, SlotSpec, check_count, check_index, checked_product

__all__ = ["KvCache", "KvLayer", "KvSlot"]


class KvSlot(IntEnum):
    """The two slots of a `KvCache`."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one layer: two storages ``[1, n_kv_heads, max_seq_len, head_dim]``, rows along axis 2.

    Attributes
    ----------
    k, v : Storage
        Of equal shape and element type.
    """

    k: Storage
    v: Storage

    @classmethod
    def allocate(
        cls, n_kv_heads: int, head_dim: int, max_seq_len: int, dtype: Any = "bfloat16", device: Any = "cpu"
    ) -> Self:
        """Allocate both, full of zeros."""
        shape = (1, n_kv_heads, max_seq_len, head_dim)
        return cls(Storage(shape, dtype, device, axis=2), Storage(shape, dtype, device, axis=2))


class KvCache(PersistentCache):
    """Keys and values of every layer, ``[1, n_kv_heads, max_seq_len, head_dim]``.

    Made by `with_capacity`, or by `with_dims` and filled by `set_layer`. Arrays to append are
    ``[1, n_kv_heads, n, head_dim]``, as are the views read.
    """

    _kind = "KvCache"
    _row_axis = 2
    _arrangement = "heads"
    _heads: int
    _head_dim: int

    @classmethod
    def with_capacity(
        cls,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        dtype: Any = "bfloat16",
        device: Any = "cpu",
    ) -> Self:
        """Allocate a cache with every layer populated.

        Raises
        ------
        GeometryError
            If a dimension is not positive or the size does not fit.
        OutOfMemoryError
            If the memory does not suffice; nothing stays allocated.
        DeviceUnavailableError
            If the device cannot be used; says why.
        """
        rows = check_count(max_seq_len, "max_seq_len", 1)
        element = DType.of(dtype)
        location = resolve(device)
        cache = cls._with_geometry(n_layers, n_kv_heads, head_dim, rows, element, location)
        cls.bytes_required(n_layers, n_kv_heads, head_dim, rows, element)
        cache._start(location, range(cache.n_layers))
        return cache

    @classmethod
    def with_dims(cls, n_layers: int, n_kv_heads: int, head_dim: int) -> Self:
        """Make a cache without memory; `set_layer` gives it layers, of which the first fixes capacity and dtype."""
        cache = cls._with_geometry(n_layers, n_kv_heads, head_dim, 0, DType.of("bfloat16"), DeviceLocation("cpu"))
        cache._location = cache._home = None
        cache._populate = frozenset()
        cache._alloc_id = AllocId.next()
        return cache

    @classmethod
    def _with_geometry(
        cls, n_layers: int, n_kv_heads: int, head_dim: int, rows: int, dtype: DType, location: DeviceLocation
    ) -> Self:
        n_layers = check_count(n_layers, "n_layers", 1)
        heads = check_count(n_kv_heads, "n_kv_heads", 1)
        width = check_count(head_dim, "head_dim", 1)
        cache = cls.__new__(cls)
        cache._heads, cache._head_dim = heads, width
        specs = [SlotSpec("k", (heads, width)), SlotSpec("v", (heads, width))]
        cache._open(n_layers, rows, specs, cache._shapes(), dtype, location)
        return cache

    @staticmethod
    def bytes_required(n_layers: int, n_kv_heads: int, head_dim: int, max_seq_len: int, dtype: Any = "bfloat16") -> int:
        """Return the bytes that `with_capacity` would allocate, exactly; allocates nothing."""
        counts = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "max_seq_len": max_seq_len}
        dims = [check_count(value, name, 1) for name, value in counts.items()]
        return checked_product((*dims, 2, DType.of(dtype).itemsize), "size of the cache")

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self._heads

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self._head_dim

    def set_layer(self, layer: int, kv: KvLayer) -> None:
        """Give a layer its storages; the allocation id is new, and the device location can no longer be proven.

        From now on the storages are leased together with the cache. Rows below `cached_len` count as written.

        Raises
        ------
        ShapeMismatchError, DTypeMismatchError, DeviceMismatchError
            If the storages do not fit the cache or each other. Nothing is changed.
        GeometryError
            If one of the storages belongs to another layer or another cache.
        LeaseTimeoutError
            If one of the storages is leased.
        ReadOnlyError
            If the memory of one may not be written.
        StepInProgressError
            Inside a step of the same thread.
        """
        layer = check_index(layer, self.n_layers, "layer")
        if not isinstance(kv, KvLayer):
            raise ArgumentTypeError(f"kv: expected a KvLayer, got {type(kv).__name__}", actual=kv)
        for name, storage in (("k", kv.k), ("v", kv.v)):
            if not isinstance(storage, Storage):
                raise ArgumentTypeError(f"kv.{name}: expected a Storage, got {type(storage).__name__}", actual=storage)
        with self._turn(0, "set_layer"):
            empty = not any(self._populated(other) for other in range(self.n_layers))
            fixes = empty and not self._populate  # capacity, dtype and device
            rows = kv.k.rows if fixes else self.max_seq_len
            dtype = kv.k.dtype if fixes else self.dtype
            device = kv.k.device if fixes else self._device()
            self._check_layer(layer, kv, rows, dtype, device)
            for storage in (kv.k, kv.v):
                self._adopt(storage, "set_layer")  # the last that can fail
            with self._changing, self._new_id():
                self._location = None
                if fixes:
                    self._rebase(rows, self._shapes(), dtype, device)
                for slot, storage in enumerate((kv.k, kv.v)):
                    self._place(layer, slot, storage, 0, *self._strides(), shares=False)
                self._note(layer)

    def _check_layer(self, layer: int, kv: KvLayer, rows: int, dtype: DType, device: DeviceLocation) -> None:
        shape = (1, self._heads, rows, self._head_dim)
        taken = {self.slot_storage(other, slot): other for other in range(self.n_layers) for slot in KvSlot}
        for name, storage in (("k", kv.k), ("v", kv.v)):
            if storage.shape != shape or storage.axis != 2:
                raise ShapeMismatchError(
                    f"kv.{name}: expected {shape} with rows along axis 2, got {storage.shape}, axis {storage.axis}",
                    expected=shape,
                    actual=storage.shape,
                )
            if storage.dtype is not dtype:
                raise DTypeMismatchError(
                    f"kv.{name}: expected {dtype}, got {storage.dtype}", expected=dtype, actual=storage.dtype
                )
            if storage.device != device:
                raise DeviceMismatchError(
                    f"kv.{name}: expected {device}, got {storage.device}", expected=device, actual=storage.device
                )
            if storage.readonly:
                raise ReadOnlyError(f"kv.{name}: expected memory that may be written, got read-only memory")
            if taken.get(storage, layer) != layer:
                raise GeometryError(f"kv.{name}: the storage is that of layer {taken[storage]} already", actual=storage)
            self._check_adoptable(storage, f"kv.{name}")
        if kv.k == kv.v:
            raise GeometryError("kv.v: expected another storage than kv.k, got the same", actual=kv.v)

    def _device(self) -> DeviceLocation:
        return self._home if self._home is not None else self._storages()[0].device

    def _shapes(self) -> list[tuple[tuple[int, ...], int]]:
        return [((1, self._heads, 0, self._head_dim), 2)] * 2

    def _strides(self) -> tuple[int, int]:
        row = self._head_dim * self.dtype.itemsize
        return self.max_seq_len * row, row

    def _like(self, location: DeviceLocation, populate: Sequence[int]) -> Self:
        dims = (self.n_layers, self._heads, self._head_dim)
        if not self.max_seq_len:
            return self.with_dims(*dims)
        made = self._with_geometry(*dims, self.max_seq_len, self.dtype, location)
        made._start(location, populate)
        return made

    def _new_layer(self) -> list[Place]:
        kv = KvLayer.allocate(self._heads, self._head_dim, self.max_seq_len, self.dtype, self._home)
        return [(storage, 0, *self._strides()) for storage in (kv.k, kv.v)]

    def _layout(self, slot: int) -> Layout:
        return Layout.contiguous((1, self._heads, self.max_seq_len, self._head_dim))
