"""``python -m benchmarks.instructions [--update]``: instructions per call, counted, and compared with a baseline.

Times on a shared machine say little about a change of a few percent; the number of instructions under valgrind's
callgrind hardly depends on the machine. It does depend on how the interpreter was built, so there is a baseline for
each of them, found by what the interpreter itself takes. Exit status: 0; 1 when an operation takes more than 5 %
above the baseline, or only one of the two has it; 2 when nothing can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_suffix(".json")
MOST = 1.05
INTERPRETER = ("an empty loop", "an empty function of Python, (layer, [a, b])")
CALLS = 100  # counted once and twice: the difference is free of what a count costs itself

# Nothing that differs from process to process or with the number of processors.
SETTLED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Counts = Mapping[str, float]
Loop = Callable[[int], None]


class NotComparable(Exception):
    """The counts say nothing about the baseline's."""


def main(arguments: list[str] | None = None) -> int:
    """Count, print, compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"make these counts the baseline, {BASELINE.name}")
    parser.add_argument("--worker", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        perform(options.worker)
        return 0
    try:
        taken = versions()
        baselines = json.loads(BASELINE.read_text()) if BASELINE.exists() else []
        if not options.update:
            check_comparable([baseline["taken_with"] for baseline in baselines], taken)
        counts = measured()
        fitting = [
            b for b in baselines if alike(b["taken_with"], taken) and same_interpreter(b["instructions"], counts)
        ]
        if options.update:
            kept = [baseline for baseline in baselines if baseline not in fitting]
            found = [*kept, {"taken_with": taken, "instructions": counts}]
            BASELINE.write_text(json.dumps(found, indent=1) + "\n")
            print(as_text(fitting[0]["instructions"] if fitting else {}, counts))
            return 0
        if not fitting:
            raise NotComparable(
                f"no baseline is of an interpreter like this one ({taken['python']}, built by "
                f"{taken['python compiler']}): {INTERPRETER[0]} takes {counts[INTERPRETER[0]]:.0f} "
                "instructions here; --update adds a baseline"
            )
    except NotComparable as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 2
    (baseline, *_) = fitting
    print(as_text(baseline["instructions"], counts))
    for name, now in taken.items():
        if now != baseline["taken_with"].get(name):
            print(f"note: {name} is {now}; the baseline was taken with {baseline['taken_with'].get(name)}")
    lines = complaints(baseline["instructions"], counts)
    print("".join(f"FAIL {line}\n" for line in lines), end="")
    return 1 if lines else 0


def complaints(baseline: Counts, now: Counts) -> list[str]:
    """Return what is wrong with counts: an operation that takes too many, that is new, or that is not there."""
    lines = []
    for name in {**baseline, **now}:
        if name not in now:
            lines.append(f"{name}: in the baseline, but not counted")
        elif name not in baseline:
            lines.append(f"{name}: not in the baseline; --update puts it there")
        elif now[name] > baseline[name] * MOST:
            lines.append(
                f"{name}: {now[name]:,.0f} instructions, {percent(baseline[name], now[name])} of the baseline's"
            )
    return lines


def alike(then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether two baselines are of one minor version of Python and one kind of processor."""
    return then["machine"] == now["machine"] and then["python"].split(".")[:2] == now["python"].split(".")[:2]


def check_comparable(known: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> None:
    """Refuse a Python or a kind of processor that no baseline is of."""
    if not any(alike(then, now) for then in known):
        had = ", ".join(f"Python {then['python']} on {then['machine']}" for then in known) or "nothing"
        raise NotComparable(f"there are baselines of {had}; this is Python {now['python']} on {now['machine']}")


def same_interpreter(then: Counts, now: Counts) -> bool:
    """Whether the interpreter was built alike: by what it takes for what has no lkv in it."""
    return all(abs(now[name] / then[name] - 1) <= MOST - 1 for name in INTERPRETER)


def as_text(baseline: Counts, now: Counts) -> str:
    """Format both counts of every operation."""
    names = list({**baseline, **now})
    width = max(map(len, names))
    lines = [f"{'instructions per call':{width}}  {'baseline':>9}  {'now':>9}  change"]
    for name in names:
        then, new = (f"{counts[name]:,.0f}" if name in counts else "-" for counts in (baseline, now))
        change = percent(baseline[name], now[name]) if name in baseline and name in now else ""
        lines.append(f"{name:{width}}  {then:>9}  {new:>9}  {change:>6}")
    return "\n".join(lines)


def percent(then: float, now: float) -> str:
    return f"{now / then - 1:+.1%}"


def versions() -> dict[str, str]:
    """Return what decides the counts beside lkv's own source."""
    import ml_dtypes
    import numpy
    import torch

    from lkv._storage import build_info

    built = build_info()
    if built["debug"] or built["sanitizer"]:
        raise NotComparable("lkv is built for debugging")
    return {
        "python": platform.python_version(),
        "python compiler": platform.python_compiler(),
        "machine": platform.machine(),
        "compiler": built["compiler"],
        "cython": built["cython"],
        "numpy": numpy.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "torch": torch.__version__,
    }


def measured() -> dict[str, float]:
    """Return the instructions of one call of every operation."""
    valgrind = shutil.which("valgrind")
    compiler = os.environ.get("CC") or shutil.which("cc")
    if valgrind is None or compiler is None:
        raise NotComparable("valgrind and a C compiler are needed to count instructions, and one of them is missing")
    with tempfile.TemporaryDirectory() as folder:
        library, out = Path(folder) / "callgrind.so", Path(folder) / "counts"
        source = Path(__file__).with_name("callgrind.c")
        if subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source]).returncode:
            raise NotComparable(f"{compiler} does not compile {source.name}, which switches the counting on and off")
        counter = [valgrind, "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        worker = [sys.executable, "-P", __file__, "--worker", str(library)]
        subprocess.run([*counter, *worker], check=True, env={**os.environ, **SETTLED})
        made = sorted(Path(folder).glob("counts.*"), key=lambda path: int(path.suffix[1:]))
        totals = dict(map(count_in, made))
    names = dict.fromkeys(name for name, _ in totals)  # each twice
    return {name: (totals[name, 2 * CALLS] - totals[name, CALLS]) / CALLS for name in names}


def count_in(path: Path) -> tuple[tuple[str, int], int]:
    """Read one of callgrind's files: ``(name, calls), instructions``."""
    lines = path.read_text().splitlines()
    (trigger,) = (line for line in lines if line.startswith("desc: Trigger: Client Request: "))
    (total,) = (line for line in lines if line.startswith("totals: "))
    calls, _, name = trigger.removeprefix("desc: Trigger: Client Request: ").partition(" ")
    return (name, int(calls)), int(total.split()[1])


def perform(library: str) -> None:
    """Run every operation, under callgrind."""
    import ctypes
    import gc

    counter = ctypes.CDLL(library)
    begin, end = counter.count_from_here, counter.counted
    for name, loop in operations():
        loop(CALLS)
        gc.collect()
        gc.disable()
        for calls in (CALLS, 2 * CALLS):
            label = f"{calls} {name}".encode()
            begin()
            loop(calls)
            end(label)
        gc.enable()


def operations() -> Iterator[tuple[str, Loop]]:
    """Yield names, and loops of as many calls as they are told."""
    import ml_dtypes
    import numpy as np
    import torch

    layers, widths = 8, (512, 64)
    torch.set_num_threads(1)
    kinds = {
        "numpy": [[np.ones((1, w), ml_dtypes.bfloat16) for w in widths] for _ in range(layers)],
        "torch": [[torch.ones((1, w), dtype=torch.bfloat16) for w in widths] for _ in range(layers)],
    }
    yield from calls(kinds["numpy"][0])
    for kind, arrays in kinds.items():
        yield from appends(kind, arrays, widths)
    stacked = [np.stack([pair[slot] for pair in kinds["numpy"]]) for slot in range(len(widths))]
    yield "step.append_layers, stacked, 8 layers", whole_tokens(new_cache(layers, widths), stacked)
    yield from leases(kinds["numpy"][0])
    yield from exports(kinds["numpy"], widths)


def new_cache(layers: int, widths: tuple[int, ...]) -> Any:
    from lkv import LatentKvCache

    return LatentKvCache.with_capacity(layers, 1_024, [(width,) for width in widths], "bfloat16")


def calls(pair: list[Any]) -> Iterator[tuple[str, Loop]]:
    """What is in all the others: the loop, and a call that does nothing."""
    from lkv import Storage

    first, second = pair
    no_op = Storage(1).bump_version

    def nothing(layer: int, slots: list[Any]) -> None:
        pass

    def empty(n: int) -> None:
        for _ in range(n):
            pass

    def python(n: int) -> None:
        for _ in range(n):
            nothing(0, [first, second])

    def compiled(n: int) -> None:
        for _ in range(n):
            no_op()

    yield from zip(INTERPRETER, (empty, python), strict=True)
    yield "an empty method of lkv", compiled


def appends(kind: str, arrays: list[Any], widths: tuple[int, ...]) -> Iterator[tuple[str, Loop]]:
    """One decode token of two slots: into one layer, by either method, and into all."""
    first, second = arrays[0]
    cache, stepped = new_cache(1, widths), new_cache(1, widths)
    append = cache.append

    def short(n: int) -> None:
        for _ in range(n):
            append(0, [first, second])

    def whole(n: int) -> None:
        with stepped.step(1) as step:
            append = step.append
            for _ in range(n):
                append(0, [first, second])

    yield f"cache.append, {kind}", short
    yield f"step.append, {kind}", whole
    yield f"step.append_layers, {kind}, 8 layers", whole_tokens(new_cache(len(arrays), widths), arrays)


def whole_tokens(cache: Any, slots: list[Any]) -> Loop:
    def loop(n: int) -> None:
        with cache.step(1) as step:
            append_layers = step.append_layers
            for _ in range(n):
                append_layers(slots)

    return loop


def leases(pair: list[Any]) -> Iterator[tuple[str, Loop]]:
    """Rights, taken and given back."""
    from lkv import Storage

    storage, cache, one = Storage((64, 512), "bfloat16"), new_cache(8, (512, 64)), new_cache(1, (512, 64))

    def read(n: int) -> None:
        for _ in range(n):
            with storage.read(0, 8):
                pass

    def write(n: int) -> None:
        for _ in range(n):
            with storage.write(0, 8):
                pass

    def abandoned(n: int) -> None:
        for _ in range(n):
            with cache.step(1) as step:
                step.abandon()

    def published(n: int) -> None:
        for _ in range(n):
            with one.step(1) as step:
                step.append(0, pair)
        one.truncate_to(0)

    def advanced(n: int) -> None:
        for _ in range(n):
            cache.advance_by(0)

    yield "with storage.read(lo, hi)", read
    yield "with storage.write(lo, hi)", write
    yield "with cache.step(1), abandoned", abandoned
    yield "with cache.step(1), one append, published", published
    yield "cache.advance_by(0)", advanced


def exports(arrays: list[Any], widths: tuple[int, ...]) -> Iterator[tuple[str, Loop]]:
    """Rows handed out, by a view of a layer and by a lease."""
    from lkv import Storage

    cache = new_cache(len(arrays), widths)
    with cache.step(1) as step:
        step.append_layers(arrays)

    def read(n: int) -> None:
        for _ in range(n):
            with cache.read(3):
                pass

    def view(n: int) -> None:
        with cache.step(1) as step:
            step.append(3, arrays[3])
            for _ in range(n):
                step.view(3)
            step.abandon()

    yield "with cache.read(layer), two slots", read
    yield "step.view(layer), two slots", view
    lease = Storage((64, 512), "float16").write()
    array = lease.numpy()
    yield "Storage.wrap(array)", repeated(lambda: Storage.wrap(array))
    yield "lease.numpy()", repeated(lease.numpy)
    yield "lease.torch()", repeated(lease.torch)
    yield "lease.__dlpack__()", repeated(lease.__dlpack__)


def repeated(call: Callable[[], Any]) -> Loop:
    def loop(n: int) -> None:
        for _ in range(n):
            call()

    return loop


if __name__ == "__main__":
    sys.exit(main())
