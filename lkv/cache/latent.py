"""The functional cache for latent attention: made for a forward pass, cloned for free, consumed by every append."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

from lkv._storage import LayerBuffers
from lkv.cache.anchor import ArrayKind, anchored, is_jax
from lkv.cache.branch import BranchLayer
from lkv.cache.persistent import human_bytes
from lkv.devices import DeviceLocation
from lkv.dtypes import DType
from lkv.errors import CapacityError, ConsumedError
from lkv.layout import SlotSpec, check_count, check_index, slot_specs
from lkv.locks import ProcessLock

__all__ = ["Geometry", "LatentCache"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all branches of a functional cache have in common."""

    kind: ArrayKind
    location: DeviceLocation
    n_layers: int
    max_seq_len: int
    slots: tuple[SlotSpec, ...]
    dtype: DType


class LatentCache:
    """A cache with value semantics: N slots per layer, each ``[max_seq_len, *slot_trailing[s]]``, full of zeros.

    Parameters
    ----------
    anchor : numpy.ndarray, torch.Tensor, cupy.ndarray, jax.Array, View, Lease or Storage
        Says where to allocate and what to hand back: arrays of the same library, or views. Its content is not used.
    n_layers : int
        Layers of the model.
    max_seq_len : int
        Rows to allocate in every slot.
    slot_trailing : sequence of shapes
        The shape of one row of each slot: ``[(kv_lora_rank,), (qk_rope_head_dim,)]`` for MLA; ``()`` is a scalar.
    dtype : DType, str, numpy.dtype or torch.dtype
        Element type of all slots.
    slots : sequence of SlotSpec
        The long form of `slot_trailing`, with names and tags.

    Raises
    ------
    ArgumentTypeError
        If the anchor is no array of a known library.
    DeviceUnavailableError
        If its device cannot be used; says why.
    GeometryError
        If there is no layer, row or slot, a dimension is not positive, or the size does not fit.
    OutOfMemoryError
        If the memory does not suffice; nothing stays allocated.

    Notes
    -----
    `append` and `advance_by` consume the handle they are called on and return its successor; what is then asked of the
    old handle raises `ConsumedError`. A call that is refused consumes nothing. `clone`, `copy.copy` and `copy.deepcopy`
    alike make a second branch at no cost: the two share what they have in common, the first one to append goes on in
    place, and the other moves to memory of its own. No branch ever sees what another has written.

    Arrays that are handed out keep their memory and share it with the branch they came from: rows that this branch, and
    only this one, writes later show up in them. They are for reading; where a library has read-only arrays, they are.

    With a ``jax.Array`` the cache is a pytree and appends by functional update, also inside ``jit`` and ``lax.scan``:
    see `lkv.cache.latent_jax.JaxLatentCache`, which is what this class then makes.

    Branches may be used from different threads at once, and so may one handle, one call after the other.

    Examples
    --------
    >>> cache = LatentCache(np.empty(0), n_layers=1, max_seq_len=8, slot_trailing=[(4,), (2,)], dtype="float32")
    >>> cache = cache.append(0, [np.ones((3, 4), "f4"), np.ones((3, 2), "f4")]).advance_by(3)
    >>> cache.slot(0, 1).shape
    (3, 2)
    """

    __slots__ = ("__weakref__", "_geometry", "_keeps_tails", "_layers", "_lock", "_position", "_shared")

    _geometry: Geometry
    _position: int
    _layers: list[BranchLayer] | None  # None: consumed
    _shared: bool  # other branches have this list too: it must not be changed, and its rows are frozen
    _keeps_tails: bool  # of the branches that have it, this is the one to which rows claimed ahead belong
    _lock: ProcessLock

    def __new__(cls, anchor: Any = None, *args: Any, **more: Any) -> LatentCache:
        """Make an object of the class that suits the anchor."""
        if cls is LatentCache and is_jax(anchor):
            from lkv.cache.latent_jax import JaxLatentCache

            return object.__new__(JaxLatentCache)
        return object.__new__(cls)

    def __init__(
        self,
        anchor: Any,
        n_layers: SupportsIndex,
        max_seq_len: SupportsIndex,
        slot_trailing: Sequence[Sequence[int]] | None = None,
        dtype: Any = "bfloat16",
        *,
        slots: Sequence[SlotSpec] | None = None,
    ) -> None:
        count, capacity = check_count(n_layers, "n_layers", 1), check_count(max_seq_len, "max_seq_len", 1)
        specs, element = slot_specs(slot_trailing, slots), DType.of(dtype)
        self._geometry = Geometry(*anchored(anchor), count, capacity, specs, element)
        where = self._geometry.location
        layers = [BranchLayer(LayerBuffers(capacity, specs, element, where)) for _ in range(count)]
        self._start(layers, 0, shared=False, keeps_tails=True)

    def _start(self, layers: list[BranchLayer], position: int, *, shared: bool, keeps_tails: bool) -> None:
        self._layers = layers
        self._position = position
        self._shared = shared
        self._keeps_tails = keeps_tails
        self._lock = ProcessLock()  # re-entrant: a signal handler may look at the cache too

    @property
    def current_seq_len(self) -> int:
        """Rows that have been advanced over."""
        self._alive("current_seq_len")
        return self._position

    @property
    def max_seq_len(self) -> int:
        """Rows allocated."""
        return self._geometry.max_seq_len

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self._geometry.n_layers

    @property
    def n_slots(self) -> int:
        """Number of slots in each layer."""
        return len(self._geometry.slots)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """One `SlotSpec` per slot."""
        return self._geometry.slots

    @property
    def dtype(self) -> DType:
        """The element type of all slots."""
        return self._geometry.dtype

    @property
    def device(self) -> DeviceLocation:
        """Where the rows are."""
        return self._geometry.location

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers this branch stands on, also of those it shares."""
        return sum(layer.buffers.nbytes for layer in self._alive("nbytes"))

    def slot_trailing(self, slot: SupportsIndex) -> tuple[int, ...]:
        """Return the shape of one row of a slot."""
        return self._geometry.slots[check_index(slot, self.n_slots, "slot")].trailing

    def append(self, layer: SupportsIndex, new_slots: Sequence[Any]) -> Self:
        """Write new rows of one layer at `current_seq_len`, which does not move; consumes the cache.

        Rows of this layer behind the new ones read as zeros afterwards: appending again before `advance_by` replaces.

        Parameters
        ----------
        layer : int
            The layer.
        new_slots : list or tuple of array
            One array per slot, ``[n, *slot_trailing[s]]`` of the cache's dtype: NumPy, PyTorch, or anything with DLPack
            or the buffer protocol. All are checked before any is written; they may be reused at once.

        Returns
        -------
        LatentCache
            The cache with the rows.

        Raises
        ------
        LayerIndexError
            If there is no such layer.
        ShapeMismatchError, DTypeMismatchError, DeviceMismatchError
            If an array does not fit its slot, or the slots disagree in number or in rows.
        CapacityError
            If the rows do not fit.
        ConsumedError
            If the cache has been consumed.
        """
        return self._append("append", layer, new_slots)

    def advance_by(self, n: SupportsIndex) -> Self:
        """Move the position by `n` rows, after the last layer; consumes the cache.

        Rows that a layer has not been given read as zeros.

        Returns
        -------
        LatentCache
            The cache at its new position.

        Raises
        ------
        CapacityError
            If `current_seq_len` would exceed `max_seq_len`.
        ConsumedError
            If the cache has been consumed.
        """
        count = check_count(n, "n")
        with self._lock:
            self._alive("advance_by")
            self._check_room("advance_by", count)
            return self._succeeded(self._position + count)

    def slot(self, layer: SupportsIndex, slot: SupportsIndex) -> Any:
        """Return rows ``[0, current_seq_len)`` of a slot, at least one row, as an array of the anchor's kind.

        Raises
        ------
        LayerIndexError
            If there is no such layer or slot.
        ConsumedError
            If the cache has been consumed.
        """
        return self._rows("slot", layer, slot, whole=False)

    def slot_buffer_full(self, layer: SupportsIndex, slot: SupportsIndex) -> Any:
        """Return all ``[max_seq_len, *slot_trailing[s]]`` of a slot, zeros behind the rows of this branch.

        This branch has the buffer to itself from then on: it goes on in place at a stable address, until it is cloned
        and writes rows again that it had before.

        Raises
        ------
        LayerIndexError
            If there is no such layer or slot.
        ConsumedError
            If the cache has been consumed.
        """
        return self._rows("slot_buffer_full", layer, slot, whole=True)

    def clone(self) -> Self:
        """Return a second branch with the same content, which goes its own way; allocates and copies nothing."""
        return self._cloned("clone")

    def __copy__(self) -> Self:
        return self._cloned("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._cloned("deepcopy")

    def __repr__(self) -> str:
        geometry, layers = self._geometry, self._layers
        if layers is None:
            return f"{type(self).__name__}(consumed)"
        return (
            f"{type(self).__name__}({geometry.n_layers} layers x {self.n_slots} slots, "
            f"{self._position}/{geometry.max_seq_len} rows, {geometry.dtype}, {geometry.location}, "
            f"{geometry.kind.name} arrays, {human_bytes(sum(layer.buffers.nbytes for layer in layers))})"
        )

    def _alive(self, verb: str) -> list[BranchLayer]:
        layers = self._layers
        if layers is None:
            raise ConsumedError(
                f"{verb}: this handle was consumed by append or advance_by; use what they returned, or clone() before"
            )
        return layers

    def _check_room(self, verb: str, rows: int) -> None:
        if rows > self.max_seq_len - self._position:
            raise CapacityError(
                f"{verb}: {rows} rows at {self._position} do not fit max_seq_len {self.max_seq_len}",
                expected=self.max_seq_len,
                actual=self._position + rows,
            )

    def _append(self, verb: str, layer: SupportsIndex, arrays: Sequence[Any]) -> Self:
        with self._lock:
            index, rows = self._checked(verb, layer, arrays)
            self._check_room(verb, rows)
            if rows:
                layers = self._own()
                layers[index] = layers[index].written(self._position, arrays, rows, verb)
            return self._succeeded(self._position)

    def _append_rotating(self, verb: str, layer: SupportsIndex, arrays: Sequence[Any], position: SupportsIndex) -> Self:
        at = check_count(position, "position")
        with self._lock:
            index, rows = self._checked(verb, layer, arrays)
            if rows > self.max_seq_len:
                raise CapacityError(
                    f"{verb}: {rows} rows do not fit a window of {self.max_seq_len}",
                    expected=self.max_seq_len,
                    actual=rows,
                )
            if rows:
                layers, at = self._own(), at % self.max_seq_len
                layers[index] = layers[index].rotated(at, arrays, rows, self.max_seq_len, verb)
            return self._succeeded(self._position)

    def _checked(self, verb: str, layer: SupportsIndex, arrays: Sequence[Any]) -> tuple[int, int]:
        layers = self._alive(verb)
        index = check_index(layer, self.n_layers, "layer")
        return index, layers[index].buffers.check(arrays, verb)

    def _rows(self, verb: str, layer: SupportsIndex, slot: SupportsIndex, *, whole: bool) -> Any:
        with self._lock:
            layers = self._alive(verb)
            index, which = check_index(layer, self.n_layers, "layer"), check_index(slot, self.n_slots, "slot")
            rows = self.max_seq_len if whole else max(self._position, 1)
            if rows > layers[index].extent:
                layers = self._own()
                layers[index] = layers[index].covering(rows)
            return self._geometry.kind.from_view(layers[index].buffers.view(which, rows))

    def _own(self) -> list[BranchLayer]:
        """Return the layers for this branch to change."""
        layers = self._alive("append")
        if self._shared:
            layers = self._layers = [layer.shared(self._keeps_tails) for layer in layers]
            self._shared, self._keeps_tails = False, True
        return layers

    def _succeeded(self, position: int) -> Self:
        """Hand everything on to a new handle; this one is consumed."""
        made = self._branch(position, self._shared, self._keeps_tails)
        self._layers = None
        return made

    def _cloned(self, verb: str) -> Self:
        with self._lock:
            self._alive(verb)
            self._shared = True
            return self._branch(self._position, True, False)

    def _branch(self, position: int, shared: bool, keeps_tails: bool) -> Self:
        made = object.__new__(type(self))
        made._geometry = self._geometry
        made._start(self._alive("clone"), position, shared=shared, keeps_tails=keeps_tails)
        return made
