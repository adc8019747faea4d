"""Arrays in and out, per call: which types are fast, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache, Storage, bits
from lkv._storage import as_view
from lkv.errors import LkvError

from .measure import Contender, Progress, Settings, Table, Target, compare
from .optional import missing, peer

__all__ = ["run"]

CALLS = 1_000
MORE = 7  # arrays beside the first: as many slots as are described without the heap


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure what it costs to look at an array, to share its memory, and to hand one out."""
    return [incoming(settings, progress), shared(settings, progress), outgoing(settings, progress)]


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


def kinds() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return for each type of array the element type of a cache that takes it, and what makes one of two elements."""
    half, bf16 = "float16", "bfloat16"
    made: dict[str, tuple[str, Callable[[], Any]]] = {
        "numpy": (half, lambda: np.ones((1, 2), np.float16)),
        "numpy, ml_dtypes": (bf16, lambda: np.ones((1, 2), ml_dtypes.bfloat16)),
        "numpy uint16 through lkv.bits": (bf16, lambda: bits(np.ones((1, 2), np.uint16), bf16)),
        "numpy, not contiguous": (half, lambda: np.ones((1, 4), np.float16)[:, ::2]),
        "View of lkv": (half, lambda: Storage((1, 2), half).read()),
    }
    torch, jax = peer("torch"), peer("jax")
    if torch is not None:
        made["torch"] = (bf16, lambda: torch.ones((1, 2), dtype=torch.bfloat16))
        made["torch, not contiguous"] = (bf16, lambda: torch.ones((1, 4), dtype=torch.bfloat16)[:, ::2])
    if jax is not None:
        made["jax"] = (half, lambda: jax.numpy.ones((1, 2), half))
        made["jax, bfloat16"] = (bf16, lambda: jax.numpy.ones((1, 2), bf16))
    return made


def incoming(settings: Settings, progress: Progress) -> Table:
    """What one more array in an append costs: an append of eight beside an append of one, of two elements each."""
    contenders = [calls("empty call", Storage(1).bump_version)]
    made = kinds()
    for name, (dtype, make) in made.items():
        for n in (1, 1 + MORE):
            cache = LatentKvCache.with_capacity(1, 8, [(2,)] * n, dtype)
            contenders.append(calls(f"append of {n}: {name}", cache.append, 0, [make() for _ in range(n)]))
    table = compare(
        "import of an array, with its checks and a copy of 4 bytes",
        contenders,
        rounds=settings.rounds(60),
        settings=settings,
        progress=progress,
        missing=[*missing(["torch", "jax", "cupy"]), *(refused(value) for value in ([[1.0, 2.0]], 1.0))],
        key="import",
    )
    for name in made:
        few, many = (table.samples.pop(f"append of {n}: {name}") for n in (1, 1 + MORE))
        table.samples[name] = [(b - a) / MORE for a, b in zip(few, many, strict=True)]
    for name in ("numpy", "numpy, ml_dtypes", "View of lkv", "torch"):
        table.targets.append(Target(name, "empty call", 75, "value"))
    return table


def refused(value: Any) -> str:
    """Say what an append answers to something that is no array."""
    cache = LatentKvCache.with_capacity(1, 8, [(2,)], "float16")
    try:
        cache.append(0, [value])
    except LkvError as error:
        return f"{type(value).__name__}: refused, {type(error).__name__}"
    raise RuntimeError(f"a {type(value).__name__} was taken for an array")


def shared(settings: Settings, progress: Progress) -> Table:
    """Make a storage of an array's memory, without a copy, and drop it again."""
    torch = peer("torch")
    array = np.ones((64, 512), np.float16)
    made = [
        calls("np.frombuffer", np.frombuffer, array),
        calls("np.from_dlpack", np.from_dlpack, array),
        calls("Storage.wrap, numpy", Storage.wrap, array),
        calls("as_view, numpy", as_view, array),
    ]
    if torch is not None:
        tensor = torch.ones((64, 512), dtype=torch.float16)
        made += [
            calls("torch.from_numpy", torch.from_numpy, array),
            calls("torch.from_dlpack", torch.from_dlpack, array),
            calls("Storage.wrap, torch", Storage.wrap, tensor),
            calls("as_view, torch", as_view, tensor),
        ]
    return compare(
        "memory of an array, shared without a copy",
        made,
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        missing=missing(["torch"]),
        key="wrap",
    )


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
    targets = [Target(".numpy()", "empty call", 100, "value"), Target(".torch()", "empty call", 650, "value")]
    if torch is not None:
        made += [calls(".torch()", lease.torch), calls("torch.from_dlpack", torch.from_dlpack, lease)]
    return compare(
        "export of leased rows",
        made,
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        targets=targets,
        missing=missing(["torch"]),
        key="export",
    )
