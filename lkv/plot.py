"""Pictures of a cache: row norms over layers and positions, and bytes by layer."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import numpy as np

from lkv.inspect import SlotSummary

__all__ = ["require_matplotlib", "save_plot"]


def require_matplotlib() -> Any:
    """Import matplotlib without choosing a window system.

    Raises
    ------
    ImportError
        If it is not installed; names the extra.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not importable; pip install 'latent-kv[plot]'") from error


def save_plot(
    measured: Iterable[tuple[SlotSummary, np.ndarray[Any, Any]]], path: str | PathLike[str], title: str = ""
) -> None:
    """Draw what `lkv.inspect.measure` found: a heat map per slot, and a bar of bytes per layer.

    Parameters
    ----------
    measured : iterable of (SlotSummary, float32 array ``[rows]``)
        The norms of each slot's rows.
    path : str or path
        Where to; the ending chooses the format.
    title : str
        Of the picture.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If matplotlib does not know the format.
    OSError
        If the file cannot be written.
    """
    figures = require_matplotlib()
    found = list(measured)
    names = list(dict.fromkeys((row.slot, row.name) for row, _ in found))
    layers = sorted({row.layer for row, _ in found})
    figure = figures.Figure(figsize=(10, 2.6 * (len(names) + 1)), layout="constrained")
    figure.suptitle(title, parse_math=False)
    axes = figure.subplots(len(names) + 1, 1, squeeze=False)[:, 0]
    for axis, (slot, name) in zip(axes, names, strict=False):
        _heat_map(figure, axis, [(row, norms) for row, norms in found if row.slot == slot], layers)
        axis.set_title(f"row norms of {name} (red: NaN, grey: all zero)", parse_math=False)
    nbytes = [sum(row.nbytes for row, _ in found if row.layer == layer) for layer in layers]
    axes[-1].bar(range(len(layers)), nbytes)
    axes[-1].set_xticks(*_ticks(layers))
    axes[-1].set(title="bytes of committed rows", xlabel="layer", ylabel="bytes")
    figure.savefig(path, dpi=120)


def _heat_map(
    figure: Any, axis: Any, found: Sequence[tuple[SlotSummary, np.ndarray[Any, Any]]], layers: Sequence[int]
) -> None:
    width = max((len(norms) for _, norms in found), default=0)
    axis.set(xlabel="position", ylabel="layer")
    if not width:
        axis.text(0.5, 0.5, "no rows", ha="center", va="center", transform=axis.transAxes)
        return
    grid = np.full((len(layers), width), np.nan, np.float32)
    bad: list[tuple[int, int, str]] = []
    for row, norms in found:
        line = layers.index(row.layer)
        grid[line, : len(norms)] = np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)
        bad += [(line, position, "red") for position in row.nan_rows]
        bad += [(line, position, "0.5") for position in row.zero_rows]
    image = axis.imshow(grid, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axis)
    if bad:
        lines, positions, colours = zip(*bad, strict=True)
        axis.scatter(positions, lines, c=colours, marker="s", s=16)
    axis.set_yticks(*_ticks(layers))


def _ticks(layers: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return at most a dozen places on an axis of layers, and their labels."""
    places = list(range(0, len(layers), max(1, -(-len(layers) // 12))))
    return places, [str(layers[place]) for place in places]
