"""``python -m benchmarks [GROUP ...] [--quick] [--json PATH]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.measure import Settings, Table
from benchmarks.report import ProgressBar, as_json, as_text, machine, missed

GROUPS = ("append", "prefill", "lease", "locks", "alloc", "exchange", "attention")


def main(arguments: list[str] | None = None) -> int:
    """Run the groups; 1 when a target is missed and ``--strict`` was given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=sys.modules["benchmarks"].__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there")
    parser.add_argument("--seed", type=int, default=0, help="of the order of contenders")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(arguments)
    unknown = [group for group in options.groups if group not in GROUPS]
    if unknown:
        parser.error(f"unknown group {unknown[0]!r}; there are {', '.join(GROUPS)}")

    about, bar = machine(), ProgressBar()
    print(f"lkv {about['lkv']}, {about['processor']}, {about['cpus']} CPUs, load {about['load']:.1f}\n", flush=True)
    tables: list[Table] = []
    settings = Settings(options.quick, options.seed)
    for group in options.groups or GROUPS:
        made = importlib.import_module(f"benchmarks.{group}").run(settings, bar)
        bar.clear()
        print("\n".join(as_text(table) for table in made), flush=True)
        tables += made
    if options.json is not None:
        options.json.write_text(as_json(tables))
    targets = sum(len(table.targets) for table in tables)
    misses = missed(tables)
    print(f"{targets - misses} of {targets} targets met")
    return 1 if misses and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
