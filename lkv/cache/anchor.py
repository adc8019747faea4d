"""What an anchor array says of a functional cache: where its memory is, and what kind of arrays it hands back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lkv._storage import Storage, View
from lkv.devices import DeviceLocation, resolve
from lkv.errors import ArgumentTypeError

__all__ = ["ArrayKind", "anchored", "is_jax"]


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """One library's arrays.

    Attributes
    ----------
    name : str
        What the library is called.
    accepts : callable
        Whether an object is one of its arrays; must not import the library.
    device : callable
        The anchor's device, in any form that `lkv.devices.resolve` takes.
    from_view : callable
        Turns a `View` into an array over the same memory.
    """

    name: str
    accepts: Callable[[object], bool]
    device: Callable[[Any], object]
    from_view: Callable[[View], Any]


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_cupy(value: object) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_jax(value: object) -> bool:
    """Whether an object is a ``jax.Array``, traced or not; does not import JAX."""
    jax = sys.modules.get("jax")
    array = getattr(jax, "Array", None)  # missing while another thread is importing it
    return array is not None and isinstance(value, array)


_KINDS = (
    ArrayKind("numpy", lambda value: isinstance(value, np.ndarray), lambda anchor: "cpu", View.numpy),
    ArrayKind("lkv", lambda value: isinstance(value, (View, Storage)), lambda anchor: anchor.device, lambda view: view),
    ArrayKind("torch", _is_torch, lambda anchor: anchor.device, View.torch),
    ArrayKind("cupy", _is_cupy, lambda anchor: f"cuda:{anchor.device.id}", View.cupy),
)


def anchored(anchor: object) -> tuple[ArrayKind, DeviceLocation]:
    """Return the kind of an anchor and the location of its memory.

    Raises
    ------
    ArgumentTypeError
        If it is no array of a known library.
    DeviceUnavailableError
        If lkv cannot allocate where it is.
    """
    for kind in _KINDS:
        if kind.accepts(anchor):
            return kind, resolve(kind.device(anchor))
    raise ArgumentTypeError(
        "anchor: expected a numpy.ndarray, a torch.Tensor, or a View, Lease or Storage of lkv, or a cupy.ndarray, "
        f"or for a LatentCache a jax.Array; got {type(anchor).__name__}",
        expected=tuple(kind.name for kind in _KINDS),
        actual=anchor,
    )
