"""`LatentCache` over JAX arrays: a pytree that appends by functional update, in place where buffers may be donated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from lkv._storage import LayerRows, Storage, View
from lkv.cache.anchor import ArrayKind, is_jax
from lkv.cache.latent import Geometry, LatentCache
from lkv.cache.persistent import human_bytes
from lkv.devices import DeviceLocation
from lkv.dtypes import DType
from lkv.errors import (
    ArgumentTypeError,
    CapacityError,
    ConsumedError,
    DeviceMismatchError,
    DTypeMismatchError,
    GeometryError,
    OutOfMemoryError,
    ShapeMismatchError,
)
from lkv.layout import SlotSpec, check_count, check_index, checked_product, slot_specs
from lkv.locks import ProcessLock

__all__ = ["JaxLatentCache"]

_OVERFLOW = -1


class JaxLatentCache(LatentCache):
    """What ``LatentCache(anchor, ...)`` makes of a ``jax.Array``; the parameters are those of `LatentCache`.

    The leaves of the pytree are the buffers ``[max_seq_len, *slot_trailing[s]]`` and the position, an int32 scalar; the
    geometry, and how far each layer is written ahead of the position, are static. Inside ``jit``, `append` and
    `advance_by` stage updates; a function that takes the cache with ``donate_argnums`` and returns it updates it in
    place. Outside, `append` donates the buffers that no clone, pytree or caller knows of, and copies those of the layer
    once otherwise.

    Raises
    ------
    ArgumentTypeError
        If the anchor is spread over several devices.
    DTypeMismatchError
        If JAX has the 64-bit types switched off and `dtype` is one of them.
    GeometryError
        If there is no layer, row or slot, a dimension is not positive, or a slot has more rows than int32 counts.
    OutOfMemoryError
        If the memory does not suffice. Unlike in other kinds of caches, all of it is resident from the start.

    Notes
    -----
    Shapes, dtypes, counts and indices are checked while tracing. A traced position is not known then, so rows that do
    not fit are noticed when the program runs: the position becomes -1 and stays there, the last rows of the layer
    become NaN (in integer slots nothing is written), and every verb called on the returned handle outside of the traced
    function raises `CapacityError`. Under ``checkify.checkify`` the same is an error of that function.
    """

    __slots__ = ("_ahead", "_buffers", "_mine")

    _position: Any  # int, or an int32 array or tracer; _OVERFLOW once rows did not fit
    _buffers: tuple[tuple[Any, ...], ...] | None  # None: consumed
    _ahead: tuple[int, ...]  # rows of each layer that may differ from zero at and behind the position
    _mine: frozenset[int]  # layers whose buffers nobody else has: they may be donated

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
        if capacity > np.iinfo(np.int32).max:
            raise GeometryError(f"max_seq_len: expected at most {2**31 - 1}, got {capacity}", actual=capacity)
        size = checked_product((count, capacity, sum(spec.width for spec in specs), element.itemsize), "size")
        if element.itemsize == 8 and not jax.config.jax_enable_x64:
            raise DTypeMismatchError(
                f"dtype: expected at most 32 bits while jax_enable_x64 is off, got {element}", actual=element
            )
        device = None if _traced(anchor) else _device_of(anchor)
        self._geometry = Geometry(_KIND, _location(device), count, capacity, specs, element)
        shapes = [(capacity, *spec.trailing) for spec in specs]
        try:
            buffers = tuple(
                tuple(jnp.zeros(shape, element.numpy, device=device) for shape in shapes) for _ in range(count)
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(
                f"LatentCache: {self.device} cannot hold {size} bytes", device=self.device, requested=size
            ) from error
        self._begin(buffers, 0, (0,) * count, frozenset(range(count)))

    def _begin(
        self, buffers: tuple[tuple[Any, ...], ...], position: Any, ahead: tuple[int, ...], mine: frozenset[int]
    ) -> None:
        self._buffers, self._position, self._ahead, self._mine = buffers, position, ahead, mine
        self._lock = ProcessLock()

    @property
    def current_seq_len(self) -> Any:
        """Rows that have been advanced over: an int, or a traced int32 scalar, which is -1 once rows did not fit."""
        self._held("current_seq_len")
        return self._at("current_seq_len")

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers this branch stands on, also of those it shares."""
        return sum(buffer.nbytes for layer in self._held("nbytes") for buffer in layer)

    def advance_by(self, n: SupportsIndex) -> Self:
        """Move the position by `n` rows, known while tracing; consumes the cache. As `LatentCache.advance_by`."""
        if _traced(n):
            raise ArgumentTypeError("n: expected an integer known while tracing, got a traced one", actual=n)
        count = check_count(n, "n")
        with self._lock:
            buffers, at = self._held("advance_by"), self._at("advance_by")
            self._check_fits("advance_by", count, at)
            position = at + count
            if _traced(at):
                position = jnp.where(_fits("advance_by", at, count, self.max_seq_len), position, _OVERFLOW)
            ahead = tuple(max(rows - count, 0) for rows in self._ahead)
            return self._followed(buffers, position, ahead, self._mine)

    def __repr__(self) -> str:
        geometry, buffers, position = self._geometry, self._buffers, self._position
        if buffers is None:
            return "LatentCache(consumed)"
        size = geometry.n_layers * geometry.max_seq_len * sum(spec.width for spec in geometry.slots)
        rows = "traced" if _traced(position) else "unknown" if np.ndim(position) else str(position)
        return (
            f"LatentCache({geometry.n_layers} layers x {self.n_slots} slots, "
            f"{'overflowed' if rows == str(_OVERFLOW) else rows}/{geometry.max_seq_len} rows, {geometry.dtype}, "
            f"{geometry.location}, jax arrays, {human_bytes(size * geometry.dtype.itemsize)})"
        )

    def _held(self, verb: str, layer: int = 0) -> tuple[tuple[Any, ...], ...]:
        buffers = self._buffers
        if buffers is None:
            raise ConsumedError(
                f"{verb}: this handle was consumed by append or advance_by; use what they returned, or clone() before"
            )
        if any(is_jax(buffer) and not _traced(buffer) and buffer.is_deleted() for buffer in buffers[layer]):
            raise ConsumedError(f"{verb}: the buffers of this handle were donated to a function; use what it returned")
        return buffers

    def _at(self, verb: str) -> Any:
        """Return the position, an int if it is known; waits for the computation that an array comes from."""
        position = self._position
        if _traced(position):
            return position
        if np.ndim(position):
            raise ArgumentTypeError(f"{verb}: this is a batch of caches; call it inside jax.vmap", actual=position)
        position = self._position = int(position)
        if position < 0:
            raise CapacityError(
                f"{verb}: in a traced function more rows were appended than max_seq_len {self.max_seq_len} takes",
                expected=self.max_seq_len,
            )
        return position

    def _check_fits(self, verb: str, rows: int, at: Any) -> None:
        if rows > self.max_seq_len - (0 if _traced(at) else at):
            raise CapacityError(
                f"{verb}: {rows} rows at {'a traced position' if _traced(at) else at} do not fit max_seq_len "
                f"{self.max_seq_len}",
                expected=self.max_seq_len,
                actual=rows if _traced(at) else at + rows,
            )

    def _append(self, verb: str, layer: SupportsIndex, arrays: Sequence[Any]) -> Self:
        with self._lock:
            self._held(verb)
            index = check_index(layer, self.n_layers, "layer")
            buffers, at = self._held(verb, index), self._at(verb)
            given, rows = self._arrays(verb, arrays)
            self._check_fits(verb, rows, at)
            if not rows:
                return self._followed(buffers, at, self._ahead, self._mine)
            position, mine, extent = at, self._mine, max(rows, self._ahead[index])
            if _traced(at):
                fits = _fits(verb, at, rows, self.max_seq_len)
                written = _write(buffers[index], given, at, extent, fits)
                position, mine = jnp.where(fits, at, _OVERFLOW), mine - {index}
            elif any(_traced(array) for array in (*buffers[index], *given)):
                written, mine = _write(buffers[index], given, at, extent), mine - {index}
            else:
                write = _write_in_place if index in mine else _write_copy
                written, mine = write(buffers[index], given, np.int32(at), extent), mine | {index}
            ahead = (*self._ahead[:index], rows, *self._ahead[index + 1 :])
            return self._followed((*buffers[:index], written, *buffers[index + 1 :]), position, ahead, mine)

    def _arrays(self, verb: str, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
        """Check an array per slot; return arrays that JAX takes, of which the caller's memory is no part, and rows."""
        if not isinstance(arrays, (list, tuple, LayerRows)):
            raise ArgumentTypeError(
                f"{verb}: slots: expected a list or tuple, got {type(arrays).__name__}", actual=arrays
            )
        if len(arrays) != self.n_slots:
            names = ", ".join(spec.name for spec in self.slots)
            raise ShapeMismatchError(
                f"{verb}: expected {self.n_slots} slots ({names}), got {len(arrays)}",
                expected=self.n_slots,
                actual=len(arrays),
            )
        given: list[Any] = []
        rows: int | None = None
        for slot, (spec, value) in enumerate(zip(self.slots, arrays, strict=True)):
            array = value if is_jax(value) else _host_array(value)
            first = "n" if rows is None else str(rows)
            expected = f"({', '.join([first, *map(str, spec.trailing)])}{'' if spec.trailing else ','})"
            message = (
                f"{verb}: slot {slot} ({spec.name}): expected {expected} {self.dtype}, got {array.shape} {array.dtype}"
            )
            shape = (array.shape[0] if rows is None and array.ndim else rows, *spec.trailing)
            if array.shape != shape:
                raise ShapeMismatchError(message, expected=shape, actual=array.shape)
            if array.dtype != self.dtype.numpy:
                raise DTypeMismatchError(message, expected=self.dtype, actual=array.dtype)
            if is_jax(array):
                self._check_device(verb, slot, array)
            rows = array.shape[0]
            given.append(array)
        return tuple(array if is_jax(array) else np.array(array, order="C") for array in given), rows or 0

    def _check_device(self, verb: str, slot: int, array: Any) -> None:
        ours = self._held(verb)[0][0]
        if _traced(array) or _traced(ours) or array.devices() == ours.devices():
            return
        raise DeviceMismatchError(
            f"{verb}: slot {slot} ({self.slots[slot].name}): expected an array on {ours.device}, got one on "
            f"{array.device}",
            expected=ours.devices(),
            actual=array.devices(),
        )

    def _rows(self, verb: str, layer: SupportsIndex, slot: SupportsIndex, *, whole: bool) -> Any:
        with self._lock:
            self._held(verb)
            index, which = check_index(layer, self.n_layers, "layer"), check_index(slot, self.n_slots, "slot")
            buffers, at = self._held(verb, index), self._at(verb)
            if not whole and _traced(at):
                raise ArgumentTypeError(
                    f"{verb}: the position is traced, so the number of rows is not known; mask slot_buffer_full with "
                    "current_seq_len",
                    actual=at,
                )
            rows = self.max_seq_len if whole else max(at, 1)
            if rows < self.max_seq_len:
                return jax.lax.slice_in_dim(buffers[index][which], 0, rows)
            self._mine -= {index}
            return buffers[index][which]

    def _followed(
        self, buffers: tuple[tuple[Any, ...], ...], position: Any, ahead: tuple[int, ...], mine: frozenset[int]
    ) -> Self:
        made = self._made(buffers, position, ahead, mine)
        self._buffers = None
        return made

    def _cloned(self, verb: str) -> Self:
        with self._lock:
            buffers = self._held(verb)
            self._mine = frozenset()
            return self._made(buffers, self._position, self._ahead, frozenset())

    def _made(
        self, buffers: tuple[tuple[Any, ...], ...], position: Any, ahead: tuple[int, ...], mine: frozenset[int]
    ) -> Self:
        made = object.__new__(type(self))
        made._geometry = self._geometry
        made._begin(buffers, position, ahead, mine)
        return made

    def _flatten(self) -> tuple[tuple[Any, Any], tuple[Geometry, tuple[int, ...]]]:
        with self._lock:
            buffers, position = self._held("flatten"), self._position
            self._mine = frozenset()
            if isinstance(position, int):
                first = buffers[0][0]
                # On the device of the buffers, as what a compiled function returns: else its next call compiles again.
                eager = is_jax(first) and not _traced(first)
                position = jax.device_put(np.int32(position), first.sharding) if eager else np.int32(position)
            return (buffers, position), (self._geometry, self._ahead)

    def _flatten_with_keys(self) -> tuple[tuple[Any, Any], tuple[Geometry, tuple[int, ...]]]:
        (buffers, position), static = self._flatten()
        key = jax.tree_util.GetAttrKey
        return ((key("buffers"), buffers), (key("current_seq_len"), position)), static

    @classmethod
    def _unflatten(cls, static: tuple[Geometry, tuple[int, ...]], children: tuple[Any, Any]) -> Self:
        made = object.__new__(cls)
        made._geometry, ahead = static
        made._begin(children[0], children[1], ahead, frozenset())
        return made


def _write(buffers: tuple[Any, ...], arrays: tuple[Any, ...], at: Any, extent: int, fits: Any = None) -> Any:
    """Return the buffers with the arrays in their rows from `at` on, and zeros behind them up to `extent` rows.

    Where `fits` is false, the last rows become NaN instead, or stay as they are where there is no NaN.
    """
    written = []
    for buffer, array in zip(buffers, arrays, strict=True):
        start = (at, *(0,) * (buffer.ndim - 1))
        rows = jnp.asarray(array, buffer.dtype)
        if extent > rows.shape[0]:
            rows = jnp.concatenate([rows, jnp.zeros((extent - rows.shape[0], *rows.shape[1:]), rows.dtype)])
        if fits is not None and jnp.issubdtype(buffer.dtype, jnp.inexact):
            rows = jnp.where(fits, rows, jnp.array(jnp.nan, buffer.dtype))
        elif fits is not None:
            rows = jnp.where(fits, rows, jax.lax.dynamic_slice(buffer, start, rows.shape))
        written.append(jax.lax.dynamic_update_slice(buffer, rows, start))
    return tuple(written)


_write_copy = jax.jit(_write, static_argnums=3)
_write_in_place = jax.jit(_write, static_argnums=3, donate_argnums=0)


def _fits(verb: str, at: Any, rows: int, capacity: int) -> Any:
    fits = (at >= 0) & (at <= capacity - rows)
    checkify.debug_check(fits, f"{verb}: {rows} rows at {{at}} do not fit max_seq_len {capacity}", at=at)
    return fits


def _host_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    return (value if isinstance(value, View) else Storage.wrap(value).read()).numpy()


def _traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def _device_of(anchor: Any) -> Any:
    devices = anchor.devices()
    if len(devices) != 1:
        raise ArgumentTypeError(f"anchor: expected an array on one device, got one on {len(devices)}", actual=anchor)
    return next(iter(devices))


def _location(device: Any) -> DeviceLocation:
    if device is None:
        with jax.ensure_compile_time_eval():
            device = _device_of(jnp.zeros(()))
    return DeviceLocation({"gpu": "cuda"}.get(device.platform, device.platform), device.local_hardware_id or 0)


_KIND = ArrayKind(
    "jax", is_jax, lambda anchor: str(_location(_device_of(anchor))), lambda view: jnp.array(view.numpy())
)

jax.tree_util.register_pytree_with_keys(
    JaxLatentCache, JaxLatentCache._flatten_with_keys, JaxLatentCache._unflatten, JaxLatentCache._flatten
)
