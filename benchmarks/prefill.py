"""Slabs of a prefill into one layer: pages that are there, and pages that are not."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache

from .measure import Contender, Progress, Settings, Table, Target, compare
from .native import api_address, library, places, storages_of
from .optional import missing, peer

__all__ = ["run"]

WIDTHS = (512, 64)
ROW_BYTES = 2 * sum(WIDTHS)
CAPACITY = 262_144  # rows: 302 MB
ROWS = (1, 8, 32, 128, 512, 2_048, 8_192)
STREAMED_FROM = 32 << 10
FRESH_ROWS = (1, 128, 2_048, 8_192)


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure slabs of growing size into resident rows, then into fresh ones."""
    slabs = Slabs()
    tables = [slabs.resident(rows, settings, progress) for rows in ROWS]
    return [*tables, *(fresh(rows, settings, progress) for rows in FRESH_ROWS)]


class Slabs:
    """One layer whose memory all contenders write."""

    def __init__(self) -> None:
        self.cache = LatentKvCache.with_capacity(1, CAPACITY, [(w,) for w in WIDTHS], "bfloat16")
        self.storages = storages_of(self.cache)
        self.source = [np.ones((max(ROWS), w), ml_dtypes.bfloat16) for w in WIDTHS]
        self.cache.append(0, [np.ones((CAPACITY, w), ml_dtypes.bfloat16) for w in WIDTHS])
        spots = [(s, a.ctypes.data, 2 * w) for s, a, w in zip(self.storages, self.source, WIDTHS, strict=True)]
        self.places = places(spots)
        self.at = 0

    def resident(self, rows: int, settings: Settings, progress: Progress) -> Table:
        cache, native, api = self.cache, library(), api_address()
        address, n = ctypes.addressof(self.places), len(self.places)
        repeats = max(1, (1 << 20) // (rows * ROW_BYTES))
        slab = [array[:rows] for array in self.source]
        torch = peer("torch")
        if torch is not None:
            torch.set_num_threads(1)

        def place() -> None:
            self.at = self.at + repeats * rows
            if self.at + repeats * rows > CAPACITY:
                self.at = 0

        def publish() -> None:
            place()
            cache.truncate_to(0)
            if self.at:
                cache.note_write(0, self.at)
                cache.advance_by(self.at)

        def memcpy() -> None:
            native.copy_slabs(address, n, self.at, rows, repeats)

        def write_host() -> None:
            if native.write_host_slabs(api, address, n, self.at, rows, repeats):
                raise RuntimeError("a lease was refused")

        def each(one: Callable[[int], Any]) -> Callable[[], None]:
            def repeat() -> None:
                for at in range(self.at, self.at + repeats * rows, rows):
                    one(at)

            return repeat

        raw = [storage.alias().numpy().view(np.uint16) for storage in self.storages]
        raw_slab = [array.view(np.uint16) for array in slab]

        def numpy_slices(at: int) -> None:
            for target, source in zip(raw, raw_slab, strict=True):
                target[at : at + rows] = source

        def lkv_slab(arrays: list[Any]) -> Callable[[], None]:
            def repeat() -> None:
                for _ in range(repeats):
                    with cache.step(rows) as step:
                        step.append(0, arrays)

            return repeat

        contenders = [
            Contender("C memcpy", memcpy, repeats, place),
            Contender("C lease and write_host", write_host, repeats, place),
            Contender("numpy slice", each(numpy_slices), repeats, place),
            Contender("step.append, numpy", lkv_slab(slab), repeats, publish),
        ]
        if torch is not None:
            tensors = [torch.ones((rows, w), dtype=torch.bfloat16) for w in WIDTHS]
            targets = [storage.alias().torch() for storage in self.storages]

            def copy(at: int) -> None:
                for target, source in zip(targets, tensors, strict=True):
                    target[at : at + rows].copy_(source)

            def index_copy(at: int) -> None:
                index = torch.arange(at, at + rows)
                for target, source in zip(targets, tensors, strict=True):
                    target.index_copy_(0, index, source)

            contenders += [
                Contender("torch copy_", each(copy), repeats, place),
                Contender("torch index_copy_", each(index_copy), repeats, place),
                Contender("step.append, torch", lkv_slab(tensors), repeats, publish),
            ]
        most = 0.60 if rows * ROW_BYTES >= STREAMED_FROM else 1.05
        measured = ["C lease and write_host", *(f"step.append, {kind}" for kind in ("numpy", "torch"))]
        return compare(
            f"prefill of {rows:,} row{'s' * (rows > 1)} ({rows * ROW_BYTES / 1024:,.1f} KB) into resident pages",
            contenders,
            rounds=settings.rounds(40),
            settings=settings,
            progress=progress,
            targets=[Target(name, "C memcpy", most) for name in measured] if rows > 1 else [],
            missing=missing(["torch"]),
            key=f"prefill-{rows}",
        )


def fresh(rows: int, settings: Settings, progress: Progress) -> Table:
    """The first touch: every round writes into new memory, made before the clock starts."""
    sources: dict[str, list[Any]] = {"numpy": [np.ones((rows, w), ml_dtypes.bfloat16) for w in WIDTHS]}
    torch = peer("torch")
    if torch is not None:
        sources["torch"] = [torch.ones((rows, w), dtype=torch.bfloat16) for w in WIDTHS]
    made: dict[str, Any] = {}

    def make(name: str, huge_pages: bool) -> None:
        made.pop(name, None)
        slots = [(width,) for width in WIDTHS]
        made[name] = LatentKvCache.with_capacity(1, max(ROWS), slots, "bfloat16", huge_pages=huge_pages)

    def map_pages() -> None:
        maps = [mmap.mmap(-1, array.nbytes) for array in sources["numpy"]]
        made["memcpy"] = [np.frombuffer(pages, np.uint16) for pages in maps]

    def fill(name: str, kind: str) -> None:
        made[name].append(0, sources[kind])

    def memcpy_fresh() -> None:
        for target, array in zip(made["memcpy"], sources["numpy"], strict=True):
            ctypes.memmove(target.ctypes.data, array.ctypes.data, array.nbytes)

    resident = [np.ones(array.shape, np.uint16) for array in sources["numpy"]]
    spots = [(t.ctypes.data, a.ctypes.data, a.nbytes) for t, a in zip(resident, sources["numpy"], strict=True)]

    def memcpy() -> None:
        for spot in spots:
            ctypes.memmove(*spot)

    contenders = [
        Contender("C memcpy, resident", memcpy, 1),
        Contender("C memcpy, fresh 4 KB pages", memcpy_fresh, 1, map_pages),
    ]
    for kind in sources:
        for pages, huge in (("4 KB", False), ("huge", True)):
            name = f"append, {pages} pages, {kind}"
            contenders.append(Contender(name, partial(fill, name, kind), 1, partial(make, name, huge)))
    aims = [f"append, {pages} pages, {kind}" for pages in ("4 KB", "huge") for kind in ("numpy", "torch")]
    return compare(
        f"first touch: {rows:,} row{'s' * (rows > 1)} ({rows * ROW_BYTES / 1024:,.1f} KB) into fresh pages",
        contenders,
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        targets=[Target(name, "C memcpy, resident", 1.7) for name in aims] if rows == max(FRESH_ROWS) else [],
        missing=missing(["torch"]),
        key=f"fresh-{rows}",
    )
