"""The functional cache for plain attention: two equal slots, keys and values."""

from __future__ import annotations

from typing import Any, Self, SupportsIndex

from lkv.cache.anchor import is_jax
from lkv.cache.latent import LatentCache
from lkv.devices import DeviceLocation
from lkv.dtypes import DType
from lkv.errors import ArgumentTypeError
from lkv.layout import SlotSpec, check_count

__all__ = ["LazyKvCache"]


class LazyKvCache:
    """A `LatentCache` of two slots ``[max_seq_len, n_kv_heads, head_dim]``: keys and values.

    Parameters
    ----------
    anchor : numpy.ndarray, torch.Tensor, View, Lease or Storage
        Says where to allocate and what to hand back: NumPy arrays, PyTorch tensors or views. Its content is not used.
    n_layers : int
        Layers of the model.
    max_seq_len : int
        Rows to allocate: the length of the context, or of the window for `append_rotating`.
    n_kv_heads, head_dim : int
        The shape of one row.
    dtype : DType, str, numpy.dtype or torch.dtype
        Element type.

    Raises
    ------
    ArgumentTypeError, DeviceUnavailableError, GeometryError, OutOfMemoryError
        As `LatentCache`.

    Notes
    -----
    `append`, `append_rotating` and `advance_by` consume the handle and return its successor. What `LatentCache` says of
    clones, of the arrays handed out and of threads holds here too.
    """

    __slots__ = ("__weakref__", "_cache")

    _cache: LatentCache

    def __init__(
        self,
        anchor: Any,
        n_layers: SupportsIndex,
        max_seq_len: SupportsIndex,
        n_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        dtype: Any = "bfloat16",
    ) -> None:
        if is_jax(anchor):
            raise ArgumentTypeError(
                "anchor: LazyKvCache takes no jax.Array; use LatentCache with two slots", actual=anchor
            )
        row = (check_count(n_kv_heads, "n_kv_heads", 1), check_count(head_dim, "head_dim", 1))
        slots = (SlotSpec("k", row), SlotSpec("v", row))
        self._cache = LatentCache(anchor, n_layers, max_seq_len, dtype=dtype, slots=slots)

    def _of(self, cache: LatentCache) -> Self:
        made = object.__new__(type(self))
        made._cache = cache
        return made

    @property
    def current_seq_len(self) -> int:
        """Rows that have been advanced over."""
        return self._cache.current_seq_len

    @property
    def max_seq_len(self) -> int:
        """Rows allocated."""
        return self._cache.max_seq_len

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self._cache.n_layers

    @property
    def n_kv_heads(self) -> int:
        """Heads in a row."""
        return self._cache.slot_trailing(0)[0]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self._cache.slot_trailing(0)[1]

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._cache.dtype

    @property
    def device(self) -> DeviceLocation:
        """Where the rows are."""
        return self._cache.device

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers this branch stands on, also of those it shares."""
        return self._cache.nbytes

    def append(self, layer: SupportsIndex, k: Any, v: Any) -> Self:
        """Write new rows ``[n, n_kv_heads, head_dim]`` of one layer at `current_seq_len`; consumes the cache.

        As `LatentCache.append`.
        """
        return self._of(self._cache._append("append", layer, (k, v)))

    def append_rotating(self, layer: SupportsIndex, k: Any, v: Any, position: SupportsIndex) -> Self:
        """Write new rows of one layer at ``position % max_seq_len``, going on at row 0; consumes the cache.

        For sliding windows: row ``p % max_seq_len`` holds position ``p``. Advance while the window fills; a full one
        has ``current_seq_len == max_seq_len`` and stays there.

        Parameters
        ----------
        layer : int
            The layer.
        k, v : array
            ``[n, n_kv_heads, head_dim]``, at most `max_seq_len` rows.
        position : int
            Of the first new row in the sequence; does not wrap.

        Returns
        -------
        LazyKvCache
            The cache with the rows; those not written stay as they are.

        Raises
        ------
        CapacityError
            If there are more rows than the window has.
        LayerIndexError, ShapeMismatchError, DTypeMismatchError, DeviceMismatchError, ConsumedError
            As `append`.
        """
        return self._of(self._cache._append_rotating("append_rotating", layer, (k, v), position))

    def advance_by(self, n: SupportsIndex) -> Self:
        """Move the position by `n` rows, after the last layer; consumes the cache. As `LatentCache.advance_by`."""
        return self._of(self._cache.advance_by(n))

    def k(self, layer: SupportsIndex) -> Any:
        """Return the keys in rows ``[0, current_seq_len)``, at least one row, as an array of the anchor's kind."""
        return self._cache._rows("k", layer, 0, whole=False)

    def v(self, layer: SupportsIndex) -> Any:
        """Return the values in rows ``[0, current_seq_len)``, at least one row, as an array of the anchor's kind."""
        return self._cache._rows("v", layer, 1, whole=False)

    def k_buffer_full(self, layer: SupportsIndex) -> Any:
        """Return all rows of the keys, zeros behind those of this branch. As `LatentCache.slot_buffer_full`."""
        return self._cache._rows("k_buffer_full", layer, 0, whole=True)

    def v_buffer_full(self, layer: SupportsIndex) -> Any:
        """Return all rows of the values, zeros behind those of this branch. As `LatentCache.slot_buffer_full`."""
        return self._cache._rows("v_buffer_full", layer, 1, whole=True)

    def clone(self) -> Self:
        """Return a second branch with the same content, which goes its own way; allocates and copies nothing."""
        return self._of(self._cache.clone())

    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __repr__(self) -> str:
        return repr(self._cache).replace(type(self._cache).__name__, type(self).__name__, 1)
