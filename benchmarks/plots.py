"""The figures of the documentation, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .attention import EXPANDED_UP_TO, HEADS, ROWS
from .frameworks import LENGTHS as COPIED
from .length import COPIED as CONCATENATED
from .length import LENGTHS
from .measure import Table
from .prefill import ROWS as SLABS
from .scaling import THREADS
from .style import LIMIT, LINES, LKV, PEER, beside, plain, prepared, save_figure

__all__ = ["draw"]

Tables = Mapping[str, Table]


def draw(groups: Mapping[str, Sequence[Table]], out: Path) -> list[Path]:
    """Draw what was measured into a folder; a figure whose tables were not is left as it is."""
    pyplot = prepared()
    tables = {table.key: table for made in groups.values() for table in made}
    written: list[Path] = []
    for name, (needed, drawing) in FIGURES.items():
        if any(key not in tables for key in needed):
            continue
        figure = drawing(pyplot, tables)
        written += save_figure(figure, out, name)
        pyplot.close(figure)
    return written


def ratio_bars(axes: Any, ratios: Mapping[str, tuple[float, float, float]], base: str) -> None:
    """Draw medians with quartiles, longest below; contenders of lkv stand out."""
    names = sorted(ratios, key=lambda name: ratios[name][1])
    middles = [ratios[name][1] for name in names]
    spread = [
        [max(0.0, middle - ratios[name][0]) for name, middle in zip(names, middles, strict=True)],
        [max(0.0, ratios[name][2] - middle) for name, middle in zip(names, middles, strict=True)],
    ]
    colours = [LIMIT if name == base else LKV if is_lkv(name) else PEER for name in names]
    axes.barh(names, middles, xerr=spread, color=colours, error_kw={"lw": 0.8, "ecolor": "#24292f"}, height=0.7)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), high * 2.2)
    plain(axes.xaxis, [10**power for power in range(0, 9, 1 if high < 100_000 else 2)])
    for place, middle in enumerate(middles):
        axes.text(max(middle, ratios[names[place]][2]) * 1.1, place, shown(middle), va="center", fontsize=8)


def shown(value: float) -> str:
    """Write a number as people do, with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def is_lkv(name: str) -> bool:
    """Whether a contender is one of lkv's."""
    return name.startswith(("step.", "cache.", "storage.", "lkv", "C memcpy under", "C lease", "append", "absorbed"))


def append(pyplot: Any, tables: Tables) -> Any:
    """One bar per contender of the decode append, cold rows; a panel per table, each with a memcpy of its own."""
    panels = {
        "append-cold": "Beside plain copies",
        "frameworks-cold": "With the caches of frameworks",
        "frameworks-growing": "With caches that copy what is cached",
    }
    shown_here = [tables[key] for key in panels if key in tables]
    counts = [len(table.samples) for table in shown_here]
    figure, grid = pyplot.subplots(
        len(counts), 1, figsize=(8, 0.24 * sum(counts) + 0.7 * len(counts) + 0.5), height_ratios=counts, squeeze=False
    )
    column = grid[:, 0]
    for axes, table in zip(column, shown_here, strict=True):
        ratio_bars(axes, {name: table.ratios(name) for name in table.samples}, table.base)
        axes.set_title(panels[table.key], loc="left")
    limits = [axes.get_xlim() for axes in column]
    for axes in column:
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    figure.supxlabel("x memcpy of the same bytes, in the same table (log); whiskers: quartiles", fontsize=9)
    figure.suptitle("One decode token, 1,024 + 128 bytes per layer, cold rows: per layer and slot", fontsize=11)
    figure.tight_layout()
    return figure


def prefill(pyplot: Any, tables: Tables) -> Any:
    """Ratio against rows, resident pages."""
    figure, axes = pyplot.subplots(figsize=(8, 4))
    names = ("step.append, numpy", "step.append, torch", "C lease and write_host", "numpy slice", "torch copy_")
    for colour, name in zip(LINES, (*names, "torch index_copy_"), strict=True):
        line(axes, [(rows, tables[f"prefill-{rows}"], name) for rows in SLABS], name, colour)
    axes.axhline(1, color=LIMIT, lw=1, label="C memcpy")
    axes.axhline(0.6, color=LIMIT, lw=1, ls=":", label="target from 32 rows up")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SLABS, [f"{rows:,}" for rows in SLABS])
    plain(axes.yaxis, (0.5, 1, 2, 4, 8, 16))
    axes.set_xlabel("rows of 1,152 bytes")
    axes.set_ylabel("times C memcpy (log)")
    axes.set_title("Prefill slabs into resident pages")
    beside(axes)
    return figure


def line(axes: Any, points: Sequence[tuple[int, Table, str]], label: str, colour: str, base: str | None = None) -> None:
    """Draw medians of ratios with quartiles over a number; points that were not measured are left out."""
    found = [(x, table.ratios(name, base)) for x, table, name in points if name in table.samples]
    if found:
        places = [x for x, _ in found]
        axes.plot(places, [ratio[1] for _, ratio in found], marker="o", ms=4, color=colour, label=label)
        axes.fill_between(places, [r[0] for _, r in found], [r[2] for _, r in found], color=colour, alpha=0.15, lw=0)


def locks(pyplot: Any, tables: Tables) -> Any:
    """Acquire and release in C and in Python, alone and contended, and what a writer waits among readers."""
    figure, grid = pyplot.subplots(3, 2, figsize=(10, 8))
    panels = (
        ("locks-c", "C, uncontended: ns"),
        ("locks-python", "Python with block, uncontended: ns"),
        ("locks-c-contended", "C, one writer and one reader: ns"),
        ("locks-python-contended", "Python, one writer and one reader: ns"),
        ("fairness-wait", "C, four readers: {}, ms"),
        ("python-fairness-wait", "Python, four readers: {}, ms"),
    )
    for axes, (key, title) in zip(grid.flat, panels, strict=True):
        table = tables[key]
        ratio_bars(axes, {name: table.quartiles(name) for name in table.samples}, "")
        axes.set_title(title.format(table.title.partition(": ")[2]))
    figure.tight_layout()
    return figure


def attention(pyplot: Any, tables: Tables) -> Any:
    """Time against rows, for both numbers of heads."""
    figure, grid = pyplot.subplots(1, len(HEADS), figsize=(10, 4.2), sharey=True)
    series = {
        "absorbed, bf16 rows": (LKV, "-"),
        "absorbed, f32 rows": (LKV, "--"),
        "expanded, bf16 rows": ("#8250df", "-"),
        "torch, bf16 rows": ("#2da44e", "-"),
        "torch, widened, bf16 rows": (PEER, "-"),
        "limit, bf16 rows": (LIMIT, ":"),
    }
    for axes, heads in zip(grid, HEADS, strict=True):
        for name, (colour, style) in series.items():
            measured = [(rows, tables[f"attention-{heads}-{rows}"]) for rows in ROWS]
            found = [(rows, table.quartiles(name)[1] / 1e6) for rows, table in measured if name in table.samples]
            if found:
                label = f"{name}, up to {EXPANDED_UP_TO:,} heads x rows" if name.startswith("expanded") else name
                axes.plot(*zip(*found, strict=True), color=colour, ls=style, marker="o", ms=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ROWS, [f"{rows:,}" for rows in ROWS])
        plain(axes.yaxis, (1, 10, 100, 1_000, 10_000))
        axes.set_xlabel("rows cached")
        axes.set_title(f"{heads} heads")
    grid[0].set_ylabel("ms per layer, one thread (log)")
    figure.suptitle("MLA decode attention over the rows of a cache")
    figure.tight_layout()
    figure.legend(
        *grid[0].get_legend_handles_labels(), ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=8
    )
    return figure


def length(pyplot: Any, tables: Tables) -> Any:
    """What an append costs beside how much is cached."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    here, copying = tables["length"], tables.get("frameworks-growing")
    series = {
        "lkv step.append": [(rows, here, f"step.append at {rows:,} rows") for rows in LENGTHS],
        "lkv read, .numpy()": [(rows, here, f"read, .numpy() at {rows:,} rows") for rows in LENGTHS],
        "torch.cat": [(rows, here, f"torch.cat at {rows:,} rows") for rows in CONCATENATED],
    }
    if copying is not None:
        for name in ("transformers DynamicCache", "transformers QuantizedCache, quanto int4"):
            series[name] = [(rows, copying, f"{name}, {rows:,} rows") for rows in COPIED]
    for (label, points), colour in zip(series.items(), LINES, strict=False):
        found = [(rows, table.quartiles(name)) for rows, table, name in points if name in table.samples]
        if found:
            places = [rows for rows, _ in found]
            axes.plot(places, [q[1] / 1e3 for _, q in found], marker="o", ms=4, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows cached (log)")
    axes.set_ylabel("µs per layer and slot (log)")
    axes.set_title("An append beside what is cached")
    plain(axes.xaxis, (100, 1_000, 10_000, 100_000))
    plain(axes.yaxis, (0.1, 1, 10, 100, 1_000))
    beside(axes)
    return figure


def scaling(pyplot: Any, tables: Tables) -> Any:
    """Throughput of threads, as a multiple of one thread's."""
    figure, grid = pyplot.subplots(1, 2, figsize=(10, 4.6), sharey=True)
    panels = {
        "Caches of their own": (
            ("scaling-append", "step.append, numpy", "step.append, GIL held"),
            ("scaling-append", "numpy slice, bf16", "numpy slice, GIL held"),
            ("scaling-prefill", "cache.append, numpy", "2,048-row slabs, GIL released"),
            ("scaling-append-c", "lkv lease and write_host", "C lease and write_host"),
            ("scaling-append-c", "C memcpy", "C memcpy"),
        ),
        "One cache, read": (
            ("scaling-read", "cache.read(layer).numpy()", "cache.read, GIL held"),
            ("scaling-read", "threading.Lock", "threading.Lock, GIL held"),
            ("scaling-read-c", "lkv lease", "C lease"),
            ("scaling-read-c", "pthread_rwlock", "C pthread_rwlock"),
        ),
    }
    for axes, (title, series) in zip(grid, panels.items(), strict=True):
        for i, ((key, name, label), colour) in enumerate(zip(series, LINES, strict=False)):
            shift = 1 + 0.03 * (i - (len(series) - 1) / 2)  # whiskers beside each other
            names = [(n, f"{name}, {n} thread{'s' * (n > 1)}") for n in THREADS]
            speedups = [tables[key].ratios(f"{name}, 1 thread", base=at) for _, at in names]
            middles = [middle for _, middle, _ in speedups]
            spread = [[middle - low for low, middle, _ in speedups], [high - middle for _, middle, high in speedups]]
            places = [n * shift for n in THREADS]
            axes.errorbar(
                places, middles, yerr=spread, marker="o", ms=4, lw=1.2, elinewidth=0.8, color=colour, label=label
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(THREADS, [str(n) for n in THREADS])
        axes.axhline(1, color=PEER, lw=0.8)
        axes.set_xlabel("threads")
        axes.set_title(title)
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    grid[0].set_ylim(0, None)
    grid[0].set_ylabel("throughput, times one thread's")
    figure.suptitle("More threads: medians and quartiles")
    figure.tight_layout()
    return figure


FIGURES = {
    "append": (("append-cold",), append),
    "prefill": ([f"prefill-{rows}" for rows in SLABS], prefill),
    "locks": (("locks-c", "locks-python", "fairness-wait", "python-fairness-wait"), locks),
    "attention": ([f"attention-{heads}-{rows}" for heads in HEADS for rows in ROWS], attention),
    "length": (("length",), length),
    "scaling": (("scaling-append", "scaling-append-c", "scaling-read", "scaling-read-c"), scaling),
}
