"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lkv
from benchmarks.measure import Table, Target
from lkv._storage import build_info

__all__ = ["ProgressBar", "as_json", "as_text", "machine", "missed"]


class ProgressBar:
    """One line on a terminal, nothing elsewhere."""

    width = 30

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __call__(self, title: str, share: float) -> None:
        if self.shown:
            done = round(self.width * share)
            bar = "#" * done + "." * (self.width - done)
            print(f"\r\033[K[{bar}] {title[:70]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def as_text(table: Table) -> str:
    """Format a table: per contender the median, its quartiles, and the ratio to the base with its quartiles."""
    width = max(len(name) for name in table.samples)
    lines = [table.title, f"  {'':{width}}  {table.unit:>10}  {'quartiles':>21}  {'x base':>8}  quartiles"]
    for name in table.samples:
        low, middle, high = table.quartiles(name)
        first, ratio, third = table.ratios(name)
        spread = f"{number(low)} .. {number(high)}"
        lines.append(f"  {name:{width}}  {number(middle):>10}  {spread:>21}  {ratio:8.2f}  {first:.2f} .. {third:.2f}")
    lines += [f"  {name}: not installed, left out" for name in table.missing]
    lines += [f"  {verdict(table, target)}" for target in table.targets]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Format a measured number with three to four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def verdict(table: Table, target: Target) -> str:
    """Say whether a target is met."""
    value = table.value(target)
    if value is None:
        return f"  --  {described(table, target)}: not measured"
    return f"{'  ok' if value <= target.most else 'MISS'}  {described(table, target)}: {value:.2f}"


def described(table: Table, target: Target) -> str:
    """Name a target."""
    if target.kind == "ratio":
        return f"{target.contender} <= {target.most:.2f} x {target.base}"
    over = f" over {target.base}" if target.kind == "over" else ""
    return f"{target.contender} <= {target.most:g} {table.unit}{over}"


def missed(tables: Sequence[Table]) -> int:
    """Count the targets that are not met."""
    values = [(table.value(target), target.most) for table in tables for target in table.targets]
    return sum(value is not None and value > most for value, most in values)


def as_json(tables: Sequence[Table]) -> str:
    """Return all samples, the targets and what they were measured on."""
    return json.dumps({"machine": machine(), "tables": [record(table) for table in tables]}, indent=1)


def record(table: Table) -> dict[str, Any]:
    """Return a table as plain data."""
    return {
        "title": table.title,
        "unit": table.unit,
        "base": table.base,
        "missing": table.missing,
        "rows": {
            name: {
                "median": table.quartiles(name)[1],
                "ratio": table.ratios(name)[1],
                "samples": table.samples[name],
                "wall": table.wall.get(name, []),
            }
            for name in table.samples
        },
        "targets": [
            {
                "contender": target.contender,
                "base": target.base,
                "kind": target.kind,
                "most": target.most,
                "value": table.value(target),
            }
            for target in table.targets
        ],
    }


def machine() -> dict[str, Any]:
    """Return what a reader of the numbers wants to know of the machine."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else ""
    return {
        "processor": model or platform.processor(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "lkv": lkv.__version__,
        "build": {name: list(v) if isinstance(v, tuple) else v for name, v in build_info().items()},
        "load": os.getloadavg()[0],
    }
