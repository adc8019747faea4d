"""Arrays in and out, per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Contender, Progress, Settings, Table, Target, compare
from benchmarks.optional import peer
from lkv import LatentKvCache, Storage

__all__ = ["run"]

CALLS = 1_000
MORE = 7  # arrays beside the first: as many slots as are described without the heap


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure what it costs to look at an array, and to hand one out."""
    return [incoming(settings, progress), outgoing(settings, progress)]


def calls(name: str, function: Callable[..., Any], *arguments: Any) -> Contender:
    def none() -> None:
        for _ in range(CALLS):
            function()

    def one() -> None:
        (argument,) = arguments
        for _ in range(CALLS):
            function(argument)

    def two() -> None:
        first, second = arguments
        for _ in range(CALLS):
            function(first, second)

    return Contender(name, (none, one, two)[len(arguments)], CALLS)


def incoming(settings: Settings, progress: Progress) -> Table:
    """What one more array in an append costs: an append of eight beside an append of one, of two elements each."""
    torch = peer("torch")
    kinds: dict[str, Callable[[], Any]] = {
        "numpy": lambda: np.ones((1, 2), np.float16),
        "numpy, ml_dtypes": lambda: np.ones((1, 2), ml_dtypes.bfloat16),
        "View": lambda: Storage((1, 2), "float16").read(),
    }
    if torch is not None:
        kinds["torch"] = lambda: torch.ones((1, 2), dtype=torch.bfloat16)
    contenders = [calls("empty call", Storage(1).bump_version)]
    for name, make in kinds.items():
        for n in (1, 1 + MORE):
            arrays = [make() for _ in range(n)]
            cache = LatentKvCache.with_capacity(1, 8, [(2,)] * n, arrays[0].dtype)
            contenders.append(calls(f"append of {n}: {name}", cache.append, 0, arrays))
    table = compare(
        "import of an array, with its checks and a copy of 4 bytes",
        contenders,
        rounds=settings.rounds(60),
        settings=settings,
        progress=progress,
        missing=[] if torch is not None else ["torch"],
    )
    for name in kinds:
        few, many = (table.samples.pop(f"append of {n}: {name}") for n in (1, 1 + MORE))
        table.samples[name] = [(b - a) / MORE for a, b in zip(few, many, strict=True)]
        table.targets.append(Target(name, "empty call", 75, "value"))
    return table


def outgoing(settings: Settings, progress: Progress) -> Table:
    torch = peer("torch")
    storage = Storage((64, 512), "float16")
    lease = storage.write()
    made = [
        calls("empty call", storage.bump_version),
        calls(".numpy()", lease.numpy),
        calls("memoryview", memoryview, lease),
        calls("np.asarray", np.asarray, lease),
        calls("np.from_dlpack", np.from_dlpack, lease),
        calls("__dlpack__()", lease.__dlpack__),
    ]
    targets = [Target(".numpy()", "empty call", 100, "value")]
    if torch is not None:
        made += [calls(".torch()", lease.torch), calls("torch.from_dlpack", torch.from_dlpack, lease)]
        targets.append(Target(".torch()", "empty call", 650, "value"))
    return compare(
        "export of leased rows",
        made,
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        targets=targets,
        missing=[] if torch is not None else ["torch"],
    )
