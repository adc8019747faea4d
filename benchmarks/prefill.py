"""Slabs of a prefill into one layer: pages that are there, and pages that are not."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Contender, Progress, Settings, Table, Target, compare
from benchmarks.native import api_address, library, places, storages_of
from benchmarks.optional import peer
from lkv import LatentKvCache

__all__ = ["run"]

WIDTHS = (512, 64)
ROW_BYTES = 2 * sum(WIDTHS)
CAPACITY = 262_144  # rows: 302 MB
ROWS = (1, 8, 32, 128, 512, 2_048, 8_192)
STREAMED_FROM = 32 << 10
FRESH_ROWS = 8_192


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure slabs of growing size into resident rows, then one large slab into fresh ones."""
    slabs = Slabs()
    tables = [slabs.resident(rows, settings, progress) for rows in ROWS]
    return [*tables, fresh(settings, progress)]


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

        def move() -> None:
            self.at = self.at + rows if self.at + 2 * rows <= CAPACITY else 0

        def each(one: Callable[[int], Any]) -> Callable[[], None]:
            def repeat() -> None:
                for _ in range(repeats):
                    move()
                    one(self.at)

            return repeat

        def write_host(at: int) -> None:
            if native.write_host_slab(api, address, n, at, rows):
                raise RuntimeError("a lease was refused")

        def lkv_slab(arrays: list[Any]) -> Callable[[], None]:
            def repeat() -> None:
                for _ in range(repeats):
                    with cache.step(rows) as step:
                        step.append(0, arrays)

            return repeat

        def publish() -> None:
            move()
            if self.at + repeats * rows > CAPACITY:
                self.at = 0
            cache.truncate_to(0)
            if self.at:
                cache.note_write(0, self.at)
                cache.advance_by(self.at)

        contenders = [
            Contender("C memcpy", each(lambda at: native.copy_slab(address, n, at, rows)), repeats),
            Contender("C lease and write_host", each(write_host), repeats),
            Contender("step.append, numpy", lkv_slab(slab), repeats, publish),
        ]
        if torch is not None:
            tensors = [torch.ones((rows, w), dtype=torch.bfloat16) for w in WIDTHS]
            targets = [storage.alias().torch() for storage in self.storages]

            def copy(at: int) -> None:
                for target, source in zip(targets, tensors, strict=True):
                    target[at : at + rows].copy_(source)

            contenders += [
                Contender("torch copy_", each(copy), repeats),
                Contender("step.append, torch", lkv_slab(tensors), repeats, publish),
            ]
        large = rows * ROW_BYTES >= STREAMED_FROM
        return compare(
            f"prefill of {rows:,} rows ({rows * ROW_BYTES / 1024:,.1f} KB) into resident pages",
            contenders,
            rounds=settings.rounds(40),
            settings=settings,
            progress=progress,
            targets=[Target("step.append, numpy", "C memcpy", 0.60)] if large else [],
            missing=[] if torch is not None else ["torch"],
        )


def fresh(settings: Settings, progress: Progress) -> Table:
    """The first touch: every round writes into new memory, made before the clock starts."""
    source = [np.ones((FRESH_ROWS, w), ml_dtypes.bfloat16) for w in WIDTHS]
    made: dict[str, Any] = {}

    def make(name: str, huge_pages: bool) -> None:
        made.pop(name, None)
        slots = [(width,) for width in WIDTHS]
        made[name] = LatentKvCache.with_capacity(1, FRESH_ROWS, slots, "bfloat16", huge_pages=huge_pages)

    def map_pages() -> None:
        maps = [mmap.mmap(-1, array.nbytes) for array in source]
        made["memcpy"] = [np.frombuffer(pages, np.uint16) for pages in maps]

    def fill(name: str) -> None:
        made[name].append(0, source)

    def memcpy_fresh() -> None:
        for target, array in zip(made["memcpy"], source, strict=True):
            ctypes.memmove(target.ctypes.data, array.ctypes.data, array.nbytes)

    resident = [np.ones(array.shape, np.uint16) for array in source]
    spots = [(t.ctypes.data, a.ctypes.data, a.nbytes) for t, a in zip(resident, source, strict=True)]

    def memcpy() -> None:
        for spot in spots:
            ctypes.memmove(*spot)

    return compare(
        f"first touch: {FRESH_ROWS:,} rows ({FRESH_ROWS * ROW_BYTES >> 10:,} KB) into fresh pages",
        [
            Contender("C memcpy, resident", memcpy, 1),
            Contender("C memcpy, fresh 4 KB pages", memcpy_fresh, 1, map_pages),
            Contender("append, 4 KB pages", partial(fill, "small"), 1, partial(make, "small", False)),
            Contender("append, huge pages", partial(fill, "huge"), 1, partial(make, "huge", True)),
        ],
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        targets=[
            Target("append, 4 KB pages", "C memcpy, resident", 1.7),
            Target("append, huge pages", "C memcpy, resident", 1.7),
        ],
    )
