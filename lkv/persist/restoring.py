"""Restoring: a file is checked from end to end before a cache is changed, and then put in its place at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lkv.cache.kv import KvCache
from lkv.cache.latent_kv import LatentKvCache
from lkv.cache.persistent import PersistentCache, layer_set
from lkv.devices import DeviceLocation, resolve
from lkv.errors import ArgumentTypeError, GeometryError, RestoreError
from lkv.layout import check_count
from lkv.persist.header import refuse
from lkv.persist.progress import Progress
from lkv.persist.saved import SavedCache, located

__all__ = ["load", "restore"]


def load(
    path: str | os.PathLike[str],
    *,
    fingerprint: str | None,
    device: Any = "cpu",
    max_seq_len: int | None = None,
    layers: Iterable[int] | None = None,
    progress: Progress = None,
) -> LatentKvCache | KvCache:
    """Make a cache of the rows in a file that `save` wrote.

    The whole file is checked before anything is allocated.

    Parameters
    ----------
    path : path
        The file.
    fingerprint : str or None
        What `save` was given.
    device : str, DeviceLocation or torch.device
        Where to allocate; need not be where the saved cache was.
    max_seq_len : int, optional
        Rows to allocate, at least those in the file; by default as many as the saved cache had.
    layers : iterable of int, optional
        Populate and read only these of the layers in the file: a stage of a pipeline.
    progress : bool or callable, optional
        How far the check has come. None shows a bar from one second on if stderr is a terminal, True always, False
        never; or it is called with bytes done and in all.

    Returns
    -------
    LatentKvCache or KvCache
        As the saved one was.

    Raises
    ------
    RestoreError
        If the file is damaged, from a newer lkv, under another fingerprint, has more rows than `max_seq_len` or lacks a
        layer: names the field, what was expected and what was found.
    OSError
        If the file cannot be read.
    OutOfMemoryError, DeviceUnavailableError
        If the cache cannot be allocated there.
    """
    capacity = None if max_seq_len is None else check_count(max_seq_len, "max_seq_len", 1)
    location = resolve(device)
    saved = SavedCache(path)
    with located(saved.path):
        _check_fingerprint(saved, fingerprint)
        if capacity is not None and saved.rows > capacity:
            refuse("rows", range(capacity + 1), saved.rows, "max_seq_len")
        chosen = saved.layers if layers is None else tuple(sorted(layer_set(layers, saved.n_layers)))
        if missing := set(chosen) - set(saved.layers):
            refuse("layers", sorted(missing), saved.layers)
    saved.verify(chosen, progress)
    with located(saved.path):
        cache = _made(saved, saved.max_seq_len if capacity is None else capacity, chosen, location)
    _put(cache, saved, None, chosen)
    return cache


def restore(
    cache: PersistentCache,
    path: str | os.PathLike[str],
    *,
    fingerprint: str | None,
    timeout: float | None = None,
    progress: Progress = None,
) -> int:
    """Replace the rows of a cache by those in a file; see `PersistentCache.restore`."""
    saved = SavedCache(path)
    with located(saved.path):
        _check_fingerprint(saved, fingerprint)
        layers = _check_fit(cache, saved)
    saved.verify(layers, progress)
    _put(cache, saved, timeout, layers)
    return saved.rows


def _check_fingerprint(saved: SavedCache, fingerprint: str | None) -> None:
    if not isinstance(fingerprint, str | None):
        raise ArgumentTypeError(f"fingerprint: expected a str or None, got {fingerprint!r}", actual=fingerprint)
    if saved.fingerprint != fingerprint:
        refuse("fingerprint", fingerprint, saved.fingerprint)


def _check_fit(cache: PersistentCache, saved: SavedCache) -> tuple[int, ...]:
    """Return the layers of the cache, if the file has what each of them holds."""
    for field, expected, found in (
        ("kind", cache._kind, saved.kind),
        ("n_layers", cache.n_layers, saved.n_layers),
        ("dtype", cache.dtype.name, saved.dtype.name),
        ("number of slots", cache.n_slots, len(saved.slots)),
    ):
        if expected != found:
            refuse(field, expected, found)
    for slot, (own, other) in enumerate(zip(cache.slots, saved.slots, strict=True)):
        for field in ("name", "trailing", "tag"):
            if getattr(own, field) != getattr(other, field):
                refuse(f"slot {slot}: {field}", getattr(own, field), getattr(other, field))
    layers = cache._populated_layers()
    if missing := [layer for layer in layers if layer not in saved.layers]:
        refuse("layers", missing, saved.layers, "every populated layer of the cache must be in the file")
    if not layers:
        refuse("layers", (), saved.layers, "no layer of the cache holds storage")
    if saved.rows > cache.max_seq_len:
        refuse("rows", range(cache.max_seq_len + 1), saved.rows, "max_seq_len")
    return layers


def _put(cache: PersistentCache, saved: SavedCache, timeout: float | None, layers: tuple[int, ...]) -> None:
    with cache._turn(saved.rows, "restore", timeout) as turn:
        with located(saved.path):
            if _check_fit(cache, saved) != layers:
                refuse("layers", layers, cache._populated_layers(), "changed while the file was being checked")
        cache._overwrite(turn, saved.rows, saved.views)


def _made(
    saved: SavedCache, max_seq_len: int, layers: tuple[int, ...], location: DeviceLocation
) -> LatentKvCache | KvCache:
    try:
        if saved.kind == "LatentKvCache":
            return LatentKvCache.with_capacity(
                saved.n_layers,
                max_seq_len,
                dtype=saved.dtype,
                device=location,
                slots=saved.slots,
                layers=layers,
                layout=saved.layout,
            )
        heads, width = saved.slots[0].trailing
        KvCache.bytes_required(saved.n_layers, heads, width, max_seq_len, saved.dtype)
        cache = KvCache._with_geometry(saved.n_layers, heads, width, max_seq_len, saved.dtype, location)
        cache._start(location, layers)
    except GeometryError as error:
        raise RestoreError(
            f"geometry: {error}", field="geometry", expected=error.expected, actual=error.actual
        ) from error
    return cache
