"""``lkv bench [GROUP ...] [--quick] [--out DIR]``: every group in a process of its own, tables, JSON and figures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .measure import Settings, Table
from .native import CompilerMissing
from .report import ProgressBar, as_text, from_json, machine, outcome, summary, to_json, verdicts

__all__ = ["main"]

GROUPS = {
    "append": "one decode token into every layer and slot: C, NumPy, PyTorch",
    "frameworks": "the same beside the caches of transformers, mlx-lm and JAX",
    "prefill": "slabs of 1 to 8,192 rows, on resident and on fresh pages",
    "lease": "leases from Python beside Python's locks, alone and contended",
    "locks": "leases in C beside the locks of the C and C++ libraries, alone, contended, and a writer among readers",
    "alloc": "9.2 GB of capacity: time, resident memory, and what wiping gives back",
    "exchange": "arrays in and out, and which types are fast",
    "attention": "a decode step of MLA attention over the rows of a cache, beside its limit",
    "length": "an append and a read at 1,000 and at 130,000 rows",
    "scaling": "one to eight threads, in Python and in C",
}
FIGURES = Path(__file__).parents[1] / "docs" / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups; 1 when one fails, or a target is missed and ``--strict`` was given."""
    parser = argparse.ArgumentParser(
        prog="lkv bench",
        description="Measure lkv beside its peers and limits.",
        epilog="groups:\n" + "\n".join(f"  {name:<11} {text}" for name, text in GROUPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="all by default")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results.json and the figures go there (extra: bench)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there")
    parser.add_argument("--seed", type=int, default=0, help="of the order of contenders")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--samples-to", type=Path, help=argparse.SUPPRESS)  # of the one group of a child process
    options = parser.parse_args(arguments)
    unknown = [group for group in options.groups if group not in GROUPS]
    if unknown:
        parser.error(f"unknown group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    if options.samples_to is not None:
        return _measure(options)
    figures, drawable = options.out, importlib.util.find_spec("matplotlib") is not None
    if figures is not None and not drawable:
        parser.error("--out: the figures need matplotlib: pip install 'latent-kv[bench]'")
    if figures is None and drawable and not options.groups and not options.quick and FIGURES.is_dir():
        figures = FIGURES  # a full run of a checkout renews what its documentation shows
    for name, path in (("--json", options.json), ("--out", figures and figures / "results.json")):
        try:  # now, and not when everything has been measured
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
        except OSError as error:
            parser.error(f"{name}: {error}")
    return _run(options, figures)


def _run(options: argparse.Namespace, out: Path | None) -> int:
    about, begun = machine(), time.monotonic()
    print(f"lkv {about['lkv']}, {about['processor']}, {about['cpus']} CPUs, load {about['load']:.1f}\n", flush=True)
    tables: dict[str, list[Table]] = {}
    failed: list[str] = []
    chosen = options.groups or list(GROUPS)
    for number, group in enumerate(chosen, 1):
        try:
            tables[group] = _in_a_process(group, options, f"{number}/{len(chosen)} {group}")
        except subprocess.CalledProcessError as error:
            failed.append(f"{group}: failed with status {error.returncode}, nothing measured")
            print(failed[-1] + "\n", flush=True)
        else:
            print("\n".join(as_text(table) for table in tables[group]), flush=True)
    about["load at the end"], about["seconds"] = os.getloadavg()[0], round(time.monotonic() - begun)
    print("\n".join(["targets", *verdicts(tables), *failed]))
    if options.json is not None:
        options.json.write_text(to_json(tables, about))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(summary(tables, about))
        drawn = importlib.import_module(f"{__package__}.plots").draw(tables, out)
        print(f"written: {out}/results.json and {len(drawn)} figures")
    met, missed, unknown = outcome(tables)
    print(f"{met} of {met + missed} targets met{f', {unknown} not measured' if unknown else ''}")
    return 1 if failed or (missed and options.strict) else 0


def _in_a_process(group: str, options: argparse.Namespace, label: str) -> list[Table]:
    """Libraries of one group must not disturb another's, and one thread each makes CPU times comparable."""
    folders = [str(Path(__file__).parents[1])] if __package__ == "benchmarks" else []  # a checkout is not installed
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.json"
        command = [sys.executable, "-m", f"{__package__}.run", group, "--seed", str(options.seed)]
        command += ["--samples-to", str(samples), *(["--quick"] if options.quick else [])]
        environment = {**os.environ, **one, "PYTHONPATH": path, "LKV_BENCH_LABEL": label}
        subprocess.run(command, env=environment, check=True)
        return from_json(samples.read_text())[group]


def _measure(options: argparse.Namespace) -> int:
    (group,) = options.groups
    bar = ProgressBar(os.environ.get("LKV_BENCH_LABEL", group))
    try:
        tables = importlib.import_module(f"{__package__}.{group}").run(Settings(options.quick, options.seed), bar)
    except CompilerMissing as error:
        print(f"{group}: {error}", file=sys.stderr)
        return 3
    finally:
        bar.clear()
    options.samples_to.write_text(to_json({group: tables}, {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
