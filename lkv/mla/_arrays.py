"""Array arguments: what is accepted and how a bad one is reported."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lkv._storage import View, as_view
from lkv.dtypes import ALL
from lkv.errors import DTypeMismatchError, ShapeMismatchError

Array: TypeAlias = NDArray[Any]

FLOATS = tuple(dtype.name for dtype in ALL if "float" in dtype.name)


def floating(name: str, value: ArrayLike) -> Array:
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        array = np.asarray(value)
    else:  # NumPy itself takes no bfloat16 from PyTorch and JAX
        array = value.numpy() if isinstance(value, View) else as_view(value).numpy()
    if array.dtype.name not in FLOATS:
        raise DTypeMismatchError(
            f"{name}: expected one of {', '.join(FLOATS)}, got {array.dtype}", expected=FLOATS, actual=array.dtype
        )
    return array


def compute_dtype(*arrays: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if all(a.dtype == np.float64 for a in arrays) else np.float32)


def require_shape(name: str, actual: tuple[int, ...], expected: tuple[int | str, ...]) -> None:
    if actual != expected:
        raise ShapeMismatchError(f"{name}: expected shape {expected}, got {actual}", expected=expected, actual=actual)
