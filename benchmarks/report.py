"""Tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lkv
from lkv._storage import build_info

from .measure import Table, Target

__all__ = ["ProgressBar", "as_text", "from_json", "machine", "outcome", "summary", "to_json", "verdicts"]

Groups = Mapping[str, list[Table]]
PEERS = (
    *("numpy", "ml_dtypes", "torch", "transformers", "optimum-quanto", "jax", "mlx", "mlx-lm"),
    *("fasteners", "readerwriterlock"),
)
MARKS = {True: "met ", False: "MISS", None: " -- "}


class ProgressBar:
    """One line on a terminal, nothing elsewhere."""

    width = 30

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.shown = sys.stderr.isatty()

    def __call__(self, title: str, share: float) -> None:
        if self.shown:
            done = round(self.width * share)
            bar = "#" * done + "." * (self.width - done)
            print(f"\r\033[K{self.label} [{bar}] {title[:60]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def as_text(table: Table) -> str:
    """Format a table: per contender the median, its quartiles, and the ratio to the base with its quartiles."""
    width = max((len(name) for name in table.samples), default=0)
    lines = [table.title, f"  {'':{width}}  {table.unit:>10}  {'quartiles':>21}  {'x base':>8}  quartiles"]
    for name in table.samples:
        low, middle, high = table.quartiles(name)
        first, ratio, third = table.ratios(name)
        spread = f"{number(low)} .. {number(high)}"
        lines.append(f"  {name:{width}}  {number(middle):>10}  {spread:>21}  {ratio:8.2f}  {first:.2f} .. {third:.2f}")
    lines += [f"  not measured: {text}" for text in table.missing]
    lines += [f"  {verdict(table, target)}" for target in table.targets]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Format a measured number with three to four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def verdict(table: Table, target: Target) -> str:
    """Say whether a target is met."""
    value = table.value(target)
    measured = "not measured" if value is None else f"{value:.2f}"
    return f"{MARKS[table.met(target)]}  {described(table, target)}: {measured}"


def described(table: Table, target: Target) -> str:
    """Name a target."""
    if target.kind == "ratio":
        return f"{target.contender} <= {target.most:.3g} x {target.base}"
    over = f" over {target.base}" if target.kind == "over" else ""
    return f"{target.contender} <= {target.most:g} {table.unit}{over}"


def verdicts(groups: Groups) -> Iterator[str]:
    """Yield every target of every table with its outcome, under the table's title."""
    for table in (table for tables in groups.values() for table in tables if table.targets):
        yield f"  {table.title}"
        yield from (f"    {verdict(table, target)}" for target in table.targets)


def outcome(groups: Groups) -> tuple[int, int, int]:
    """Count the targets that are met, missed and not measured."""
    met = [table.met(target) for tables in groups.values() for table in tables for target in table.targets]
    return met.count(True), met.count(False), met.count(None)


def to_json(groups: Groups, about: Mapping[str, Any]) -> str:
    """Return all samples, as `from_json` takes them, and what they were measured on."""
    tables = {group: [dataclasses.asdict(table) for table in tables] for group, tables in groups.items()}
    return json.dumps({"machine": about, "groups": tables})


def from_json(text: str) -> dict[str, list[Table]]:
    """Return the tables that `to_json` wrote."""

    def table(fields: dict[str, Any]) -> Table:
        return Table(**{**fields, "targets": [Target(**target) for target in fields["targets"]]})

    return {group: [table(fields) for fields in tables] for group, tables in json.loads(text)["groups"].items()}


def summary(groups: Groups, about: Mapping[str, Any]) -> str:
    """Return quartiles, ratios and the outcome of every target."""
    tables = {group: [record(table) for table in tables] for group, tables in groups.items()}
    met, missed, unknown = outcome(groups)
    counts = {"met": met, "missed": missed, "not measured": unknown}
    return json.dumps({"machine": about, "targets": counts, "groups": tables}, indent=1) + "\n"


def record(table: Table) -> dict[str, Any]:
    """Return a table as plain data, without its samples."""
    return {
        "title": table.title,
        "key": table.key,
        "unit": table.unit,
        "base": table.base,
        "missing": table.missing,
        "rounds": max((len(samples) for samples in table.samples.values()), default=0),
        "quartiles": {name: [float(f"{q:.4g}") for q in table.quartiles(name)] for name in table.samples},
        "ratios": {name: [float(f"{q:.4g}") for q in table.ratios(name)] for name in table.samples},
        "targets": [
            {"target": described(table, target), "value": rounded(table.value(target)), "met": table.met(target)}
            for target in table.targets
        ],
    }


def rounded(value: float | None) -> float | None:
    """Keep four digits."""
    return None if value is None else float(f"{value:.4g}")


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
        "system": f"{platform.system()} {'.'.join(re.findall(r'[0-9]+', platform.release())[:2])}",
        "python": platform.python_version(),
        "lkv": lkv.__version__,
        "build": {name: list(v) if isinstance(v, tuple) else v for name, v in build_info().items()},
        "peers": {name: version(name) for name in PEERS},
        "load": os.getloadavg()[0],
    }


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
