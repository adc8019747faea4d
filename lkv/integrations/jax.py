"""Rows of a persistent cache as JAX arrays, without a copy where JAX allows it."""

from __future__ import annotations

from typing import Any

import jax

from lkv._storage import View
from lkv.errors import ArgumentTypeError, DeviceMismatchError

__all__ = ["as_jax"]


def as_jax(view: View, *, copy: bool | None = None) -> Any:
    """Hand rows to JAX on the CPU.

    Parameters
    ----------
    view : View or Lease
        Rows on the host, such as ``cache.read(layer)[slot]``: any shape, any dtype that JAX has enabled.
    copy : bool, optional
        True copies, and the array is JAX's own. False shares the memory or refuses. None shares it if the rows are
        contiguous and start at a multiple of 64 bytes, and copies otherwise.

    Returns
    -------
    jax.Array
        Of the view's shape and dtype, on JAX's first CPU device.

    Raises
    ------
    ArgumentTypeError
        If it is no view of lkv.
    DeviceMismatchError
        If the rows are not on the host.
    ValueError
        If `copy` is False and JAX cannot share the memory: the slots of a packed cache, and the heads of a `KvCache`
        that is not full, have gaps.

    Notes
    -----
    An array that shares memory keeps it alive, and keeps the lease unless that is ended explicitly; leaving
    ``with cache.read(layer)`` does end it. From then on the rows may be overwritten, after a rewind, under an array
    that JAX takes for immutable, so use such an array inside the block only, and call ``block_until_ready()`` on what
    was computed from it before leaving: JAX computes in the background. JAX never writes to it, not even when it is
    donated.
    """
    if not isinstance(view, View):
        raise ArgumentTypeError(f"view: expected a View of lkv, got {type(view).__name__}", actual=view)
    if not view.host_accessible:
        raise DeviceMismatchError(
            f"view: expected rows on the host, got rows on {view.device}", expected="cpu", actual=view.device
        )
    rows = view.numpy()
    if rows.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        raise ArgumentTypeError(f"view: JAX has no {view.dtype} while jax_enable_x64 is off", actual=view.dtype)
    array = jax.device_put(rows.copy() if copy else rows, jax.devices("cpu")[0], may_alias=True)
    shared = rows.size == 0 or array.unsafe_buffer_pointer() == view.address
    if copy is False and not shared:
        why = "they have gaps" if not rows.flags.c_contiguous else "they do not start at a multiple of 64 bytes"
        raise ValueError(f"view: JAX cannot share these rows: {why}; copy=None copies them")
    if not shared:
        array.block_until_ready()
    return array
