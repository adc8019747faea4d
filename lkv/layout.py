"""Shapes, strides and slots, and the checks on counts and indices that every cache shares."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lkv.errors import ArgumentTypeError, GeometryError, LayerIndexError, LkvError

__all__ = ["Layout", "SlotSpec", "check_count", "check_index", "slot_specs"]

_MAX = sys.maxsize


def as_int(value: object, name: str) -> int:
    """Return an integer given as anything with ``__index__``, bool excepted.

    Raises
    ------
    ArgumentTypeError
        For a bool, a float, a string, None and anything else that is no integer.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ArgumentTypeError(
        f"{name}: expected an integer, got {value!r} of type {type(value).__name__}",
        expected="an integer",
        actual=value,
    )


def check_count(value: object, name: str, minimum: int = 0, *, error: type[LkvError] = GeometryError) -> int:
    """Return a count that is at least `minimum` and fits ``ptrdiff_t``.

    Raises
    ------
    ArgumentTypeError
        If it is no integer.
    GeometryError
        If it is out of range; `error` names another class to raise.
    """
    count = as_int(value, name)
    if minimum <= count <= _MAX:
        return count
    raise error(f"{name}: expected {minimum} to {_MAX}, got {count}", expected=(minimum, _MAX), actual=count)


def check_index(value: object, bound: int, name: str) -> int:
    """Return an index in ``[0, bound)``; negative ones are not counted from the end.

    Raises
    ------
    ArgumentTypeError
        If it is no integer.
    LayerIndexError
        If it is out of range.
    """
    index = as_int(value, name)
    if 0 <= index < bound:
        return index
    expected = f"0 <= {name} < {bound}" if bound else "no index, there is nothing to index"
    raise LayerIndexError(f"{name}: expected {expected}, got {index}", expected=bound, actual=index)


def check_dims(value: object, name: str, minimum: int = 0) -> tuple[int, ...]:
    """Return a shape or a tuple of strides as ints, each at least `minimum`."""
    return tuple(check_count(dim, f"{name}[{i}]", minimum) for i, dim in enumerate(_items(value, name)))


def checked_product(dims: Iterable[int], name: str) -> int:
    """Multiply sizes; a product that does not fit ``ptrdiff_t`` is a `GeometryError`."""
    return _fits(prod(dims), name)


def _items(value: object, name: str) -> tuple[Any, ...]:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray)):
        return tuple(value)
    raise ArgumentTypeError(
        f"{name}: expected a sequence, got {value!r} of type {type(value).__name__}",
        expected="a sequence",
        actual=value,
    )


def _fits(size: int, name: str) -> int:
    if size > _MAX:
        raise GeometryError(f"{name}: expected at most {_MAX}, got {size}", expected=_MAX, actual=size)
    return size


@dataclass(frozen=True, slots=True)
class Layout:
    """How the elements of an array lie in a buffer.

    Attributes
    ----------
    shape : tuple of int
        Elements along each axis.
    strides : tuple of int
        Elements, not bytes, from one index to the next along each axis.
    offset : int
        Elements before the first one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_dims(self.shape, "shape"))
        object.__setattr__(self, "strides", check_dims(self.strides, "strides"))
        object.__setattr__(self, "offset", check_count(self.offset, "offset"))
        if len(self.shape) != len(self.strides):
            raise GeometryError(
                f"strides: expected {len(self.shape)} of them for shape {self.shape}, got {self.strides}",
                expected=len(self.shape),
                actual=len(self.strides),
            )
        _fits(self.size, "size")
        _fits(self.extent, "extent")

    @classmethod
    def contiguous(cls, shape: Sequence[int], offset: int = 0) -> Layout:
        """Return the row-major layout of a shape."""
        dims = check_dims(shape, "shape")
        strides = tuple(checked_product(dims[axis + 1 :], "strides") for axis in range(len(dims)))
        return cls(dims, strides, offset)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """One past the highest element that is touched; 0 if there is none."""
        if self.size == 0:
            return 0
        return self.offset + 1 + sum((dim - 1) * step for dim, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        if self.size == 0:
            return True
        expected = 1
        for dim, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if dim != 1 and step != expected:
                return False
            expected *= dim
        return True

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of all elements together, gaps not counted."""
        return checked_product((self.size, check_count(itemsize, "itemsize", 1)), "nbytes")


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One slot of a layer: what a token leaves in it.

    Attributes
    ----------
    name : str
        Used in messages and in saved files.
    trailing : tuple of int
        The shape of one row; empty for a scalar per token.
    tag : str
        How the rows are to be read, such as ``"rope:interleaved"``. Rows of unlike tags are not interchangeable.
    """

    name: str
    trailing: tuple[int, ...]
    tag: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "tag"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise ArgumentTypeError(
                    f"{field}: expected a str, got {value!r} of type {type(value).__name__}",
                    expected="a str",
                    actual=value,
                )
        if not self.name:
            raise GeometryError("name: expected a name for the slot, got ''", expected="a name", actual="")
        object.__setattr__(self, "trailing", check_dims(self.trailing, f"trailing of {self.name}", minimum=1))
        checked_product(self.trailing, f"width of {self.name}")

    @property
    def width(self) -> int:
        """Elements per row."""
        return prod(self.trailing)


def slot_specs(
    slot_trailing: Sequence[Sequence[int]] | None = None, slots: Sequence[SlotSpec] | None = None
) -> tuple[SlotSpec, ...]:
    """Return the slots of a layer, given in either form.

    Parameters
    ----------
    slot_trailing : sequence of shapes, optional
        The short form; the slots are called ``slot0``, ``slot1`` and so on.
    slots : sequence of SlotSpec, optional
        The long form.

    Raises
    ------
    ArgumentTypeError
        If both forms or neither are given, or one is of the wrong kind.
    GeometryError
        If there is no slot, a dimension is not positive, or two slots share a name.
    """
    if (slot_trailing is None) == (slots is None):
        raise ArgumentTypeError(
            f"slots: expected either slot_trailing or slots, got slot_trailing={slot_trailing!r}, slots={slots!r}"
        )
    if slots is not None:
        name, specs = "slots", _items(slots, "slots")
        for i, spec in enumerate(specs):
            if not isinstance(spec, SlotSpec):
                raise ArgumentTypeError(
                    f"slots[{i}]: expected a SlotSpec, got {spec!r}", expected=SlotSpec, actual=spec
                )
    else:
        name = "slot_trailing"
        specs = tuple(SlotSpec(f"slot{i}", shape) for i, shape in enumerate(_items(slot_trailing, name)))
    if not specs:
        raise GeometryError(f"{name}: expected at least one slot, got none", expected=1, actual=0)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise GeometryError(f"slots: expected distinct names, got {names}", expected="distinct names", actual=names)
    return specs
