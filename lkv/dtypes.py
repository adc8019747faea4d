"""Element types: one table that maps names, sizes, DLPack, NumPy and PyTorch onto each other."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np

from lkv.errors import DTypeMismatchError

__all__ = ["ALL", "DType"]

_PREFIXES = ("torch.", "numpy.", "np.", "ml_dtypes.", "jax.numpy.", "jnp.")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DType:
    """An element type. The objects are interned: compare with `is` or `==`, get one through `DType.of`.

    Attributes
    ----------
    name, short : str
        The full name (``"bfloat16"``) and the short one (``"bf16"``).
    code : int
        The number that stands for the type in the C header.
    itemsize : int
        Bytes per element.
    dl_code, dl_bits : int
        The DLPack type code and width.
    numpy : numpy.dtype
        The NumPy type; from ml_dtypes for bfloat16 and the 8-bit floats.
    """

    name: str
    short: str
    code: int
    itemsize: int
    dl_code: int
    dl_bits: int
    numpy: np.dtype[Any]

    @staticmethod
    def of(value: object, argument: str = "dtype") -> DType:
        """Look up an element type by any of its usual spellings.

        Parameters
        ----------
        value : DType, str, numpy.dtype, type or torch.dtype
            ``"bf16"``, ``"torch.bfloat16"``, ``np.float32``, ``torch.float16`` and so on. As in PyTorch,
            ``"float"`` means float32 and ``"half"`` float16.
        argument : str
            The name to use in an error message.

        Returns
        -------
        DType
            The interned type.

        Raises
        ------
        DTypeMismatchError
            If the value names no type that lkv knows. Byte-swapped NumPy types are not known.
        """
        found = value if isinstance(value, DType) else _lookup(value)
        if found is None:
            known = ", ".join(f"{d.name} ({d.short})" if d.short != d.name else d.name for d in ALL)
            raise DTypeMismatchError(
                f"{argument}: expected one of {known}; got {value!r}",
                expected=tuple(d.name for d in ALL),
                actual=value,
            )
        return found

    @staticmethod
    def from_code(code: int) -> DType:
        """Return the type that a code of the C header stands for."""
        if type(code) is int and 1 <= code <= len(ALL):
            return ALL[code - 1]
        raise DTypeMismatchError(f"code: expected 1 to {len(ALL)}, got {code!r}", actual=code)

    @property
    def torch(self) -> Any:
        """The ``torch.dtype``; imports PyTorch when first used."""
        try:
            module = import_module("torch")
        except ImportError as error:
            raise ImportError(
                f"{self.name} as a torch.dtype needs PyTorch, which is not importable; pip install 'latent-kv[torch]'"
            ) from error
        return getattr(module, self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DType.of, (self.name,)


# The position in the table is the code of the C header, less one.
ALL: tuple[DType, ...] = tuple(
    DType(name, short, code, np.dtype(kind).itemsize, dl_code, np.dtype(kind).itemsize * 8, np.dtype(kind))
    for code, (name, short, dl_code, kind) in enumerate(
        (
            ("float64", "f64", 2, np.float64),
            ("float32", "f32", 2, np.float32),
            ("float16", "f16", 2, np.float16),
            ("bfloat16", "bf16", 4, ml_dtypes.bfloat16),
            ("float8_e4m3fn", "f8_e4m3fn", 10, ml_dtypes.float8_e4m3fn),
            ("float8_e5m2", "f8_e5m2", 12, ml_dtypes.float8_e5m2),
            ("int64", "i64", 0, np.int64),
            ("int32", "i32", 0, np.int32),
            ("int16", "i16", 0, np.int16),
            ("int8", "i8", 0, np.int8),
            ("uint8", "u8", 1, np.uint8),
            ("bool", "bool", 6, np.bool_),
        ),
        start=1,
    )
)

_BY_NUMPY: dict[np.dtype[Any], DType] = {d.numpy: d for d in ALL}
# Python's float and int are left out: NumPy reads them as 64 bits wide, PyTorch does not.
_BY_TYPE: dict[type, DType] = {d.numpy.type: d for d in ALL}
_BY_TYPE |= {kind: _BY_NUMPY[np.dtype(kind)] for kind in (bool, np.intc, np.int_, np.longlong)}
_BY_NAME: dict[str, DType] = {name: d for d in ALL for name in (d.name, d.short)}
_BY_NAME |= {
    alias: _BY_NAME[name]
    for alias, name in (
        ("double", "f64"),
        ("float", "f32"),
        ("single", "f32"),
        ("fp64", "f64"),
        ("fp32", "f32"),
        ("fp16", "f16"),
        ("half", "f16"),
        ("fp8_e4m3fn", "f8_e4m3fn"),
        ("fp8_e4m3", "f8_e4m3fn"),
        ("fp8_e5m2", "f8_e5m2"),
        ("long", "i64"),
        ("int", "i32"),
        ("short", "i16"),
        ("byte", "u8"),
        ("bool_", "bool"),
    )
}


def _lookup(value: object) -> DType | None:
    if isinstance(value, str):
        name = value.strip().lower()
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        return _BY_NAME.get(name)
    if isinstance(value, np.dtype):
        return _BY_NUMPY.get(value)
    if isinstance(value, type):
        inner = getattr(value, "dtype", None)  # the scalar types of JAX carry their NumPy type
        return _BY_NUMPY.get(inner) if isinstance(inner, np.dtype) else _BY_TYPE.get(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return _BY_NAME.get(str(value).removeprefix("torch."))
    return None
