"""Leases from Python beside Python's own locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import Contender, Progress, Settings, Table, Target, compare
from lkv import LatentKvCache, Storage

__all__ = ["run"]

PAIRS = 2_000


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure uncontended ``with`` blocks, then a writer and a reader that meet."""
    return [uncontended(settings, progress), contended(settings, progress)]


def repeated(make: Callable[[], Any]) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(PAIRS):
            with make():
                pass

    return loop


def holding(lock: Any) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(PAIRS):
            with lock:
                pass

    return loop


def uncontended(settings: Settings, progress: Progress) -> Table:
    storage = Storage((4_096, 512), "bfloat16")
    cache = LatentKvCache.with_capacity(61, 4_096, [(512,), (64,)], "bfloat16")

    def read() -> None:
        for _ in range(PAIRS):
            with storage.read(0, 100):
                pass

    def write() -> None:
        for _ in range(PAIRS):
            with storage.write(100, 101):
                pass

    def cache_read() -> None:
        for _ in range(PAIRS):
            with cache.read(3):
                pass

    def step() -> None:
        for _ in range(PAIRS):
            with cache.step(1) as step:
                step.abandon()

    return compare(
        "a lease in a Python with block, uncontended",
        [
            Contender("threading.Lock", holding(threading.Lock()), PAIRS),
            Contender("threading.RLock", holding(threading.RLock()), PAIRS),
            Contender("storage.read(lo, hi)", read, PAIRS),
            Contender("storage.write(lo, hi)", write, PAIRS),
            Contender("cache.read(layer), two slots", cache_read, PAIRS),
            Contender("cache.step(1), abandoned", step, PAIRS),
        ],
        rounds=settings.rounds(60),
        settings=settings,
        progress=progress,
        targets=[
            Target("storage.read(lo, hi)", "threading.Lock", 0.7),
            Target("storage.write(lo, hi)", "threading.Lock", 0.7),
        ],
    )


def contended(settings: Settings, progress: Progress) -> Table:
    """Two threads, each taking and giving back as fast as it can; the time is that of one pair of one thread."""
    storage = Storage((4_096, 512), "bfloat16")
    pairs = PAIRS // 4

    def meet(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            other = threading.Thread(target=second)
            other.start()
            first()
            other.join()

        return both

    def leased(mode: Callable[..., Any], lo: int, hi: int) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(pairs):
                with mode(lo, hi):
                    time.sleep(0)

        return loop

    def locked(lock: Any) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(pairs):
                with lock:
                    time.sleep(0)

        return loop

    def alone() -> None:
        for _ in range(pairs):
            time.sleep(0)

    lock = threading.Lock()
    return compare(
        "one writer and one reader, each block gives the GIL away once",
        [
            Contender("threading.Lock", meet(locked(lock), locked(lock)), pairs),
            Contender("no lock", meet(alone, alone), pairs),
            Contender("lease, same rows", meet(leased(storage.write, 0, 8), leased(storage.read, 0, 8)), pairs),
            Contender("lease, other rows", meet(leased(storage.write, 8, 9), leased(storage.read, 0, 8)), pairs),
        ],
        rounds=settings.rounds(24),
        settings=settings,
        progress=progress,
        clock="wall",
    )
