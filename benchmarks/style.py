"""How figures look: colours, ticks as people write numbers, and the two files of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["LIMIT", "LINES", "LKV", "PEER", "beside", "plain", "prepared", "save_figure"]

LKV, PEER, LIMIT = "#1f6feb", "#8b949e", "#d1242f"
LINES = ("#1f6feb", "#2da44e", "#bf8700", "#8250df", "#8b949e", "#57606a")


def prepared() -> Any:
    """Import pyplot without a window system, and set it up."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#d8dee4",
            "font.size": 9,
            "axes.titlesize": 10,
            "svg.hashsalt": "lkv",
        }
    )
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and as SVG; the same figure gives the same bytes."""
    written = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        written.append(folder / f"{name}.{suffix}")
        figure.savefig(written[-1], dpi=120, bbox_inches="tight", metadata=metadata)
    return written


def plain(axis: Any, ticks: Sequence[float]) -> None:
    """Number a logarithmic axis as people write."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.FixedLocator(ticks))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))
    axis.set_minor_locator(ticker.NullLocator())


def beside(axes: Any) -> None:
    """Put the legend where it hides nothing."""
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
