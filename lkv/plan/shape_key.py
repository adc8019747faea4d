"""A key for everything about a model that a plan depends on."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterator
from enum import Enum

from lkv._storage import alloc_id_next
from lkv.dtypes import DType
from lkv.errors import ArgumentTypeError
from lkv.layout import as_int

__all__ = ["ModelInstanceId", "shape_key"]


class ModelInstanceId(int):
    """Stands for one loaded model: process-unique, never reused, unlike the address of an object."""

    __slots__ = ()

    @classmethod
    def next(cls) -> ModelInstanceId:
        """Mint the id of a model that has just been loaded; safe from any thread."""
        return cls(alloc_id_next())

    def __repr__(self) -> str:
        return f"model instance {int(self)}"


def shape_key(model_instance: int, /, **params: object) -> int:
    """Return a 64-bit key over a model instance and named structural parameters.

    Equal arguments give equal keys, in whatever order they are named, in this process and in others. Names, values and
    types all count: ``1``, ``True``, ``1.0`` and ``"1"`` differ, and no two strings run together.

    Parameters
    ----------
    model_instance : int
        A `ModelInstanceId`; two models of one architecture differ in it.
    **params : None, bool, int, float, str, bytes, DType, Enum, or list or tuple of these
        What the plan was specialised for: widths, flags, the kernel chosen.

    Raises
    ------
    ArgumentTypeError
        For a value of another kind.

    Examples
    --------
    >>> key = shape_key(ModelInstanceId.next(), hidden_size=2048, n_heads=16, form="absorbed")
    """
    digest = hashlib.blake2b(digest_size=8, person=b"lkv.shape_key")
    for piece in (*_pieces(as_int(model_instance, "model_instance"), "model_instance"), *_named(params)):
        digest.update(piece)
    return int.from_bytes(digest.digest(), "big")


def _named(params: dict[str, object]) -> Iterator[bytes]:
    for name in sorted(params):
        yield from _pieces(name, "name")
        yield from _pieces(params[name], name)


def _pieces(value: object, name: str) -> Iterator[bytes]:
    if isinstance(value, (list, tuple)):
        yield _framed(b"l", str(len(value)).encode())
        for index, item in enumerate(value):
            yield from _pieces(item, f"{name}[{index}]")
        return
    if value is None:
        yield _framed(b"n", b"")
    elif isinstance(value, bool):
        yield _framed(b"t", str(value).encode())
    elif isinstance(value, Enum):
        yield _framed(b"e", f"{type(value).__qualname__}.{value.name}".encode())
    elif isinstance(value, str):
        yield _framed(b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        yield _framed(b"b", value)
    elif isinstance(value, DType):
        yield _framed(b"d", value.name.encode())
    elif isinstance(value, float):
        yield _framed(b"f", struct.pack(">d", value))
    else:
        try:
            yield _framed(b"i", str(operator.index(value)).encode())  # type: ignore[arg-type]
        except TypeError:
            raise ArgumentTypeError(
                f"{name}: expected None, a bool, int, float, str, bytes, DType, Enum, or a list or tuple of these; "
                f"got {value!r}",
                actual=value,
            ) from None


def _framed(kind: bytes, body: bytes) -> bytes:
    return kind + len(body).to_bytes(8, "big") + body
