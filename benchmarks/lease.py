"""Leases from Python beside Python's own locks and those of fasteners and readerwriterlock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lkv import LatentKvCache, Storage

from .measure import Contender, Progress, Settings, Table, Target, compare
from .optional import missing, peer

__all__ = ["run"]

PAIRS = 2_000
READERS = 4

Block = Callable[[], AbstractContextManager[Any]]


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure ``with`` blocks alone, a writer and a reader that meet, and a writer among readers."""
    return [
        uncontended(settings, progress),
        contended(settings, progress),
        *fairness(settings, progress),
    ]


def locks(storage: Storage) -> dict[str, tuple[Block, Block]]:
    """Return what makes a block that reads and one that writes, for every kind of lock."""
    lock, rlock = threading.Lock(), threading.RLock()
    kinds: dict[str, tuple[Block, Block]] = {
        "threading.Lock": (lambda: lock, lambda: lock),
        "threading.RLock": (lambda: rlock, lambda: rlock),
        "lkv lease": (lambda: storage.read(0, 8), lambda: storage.write(0, 8)),
    }
    fasteners, rwlock = peer("fasteners"), peer("readerwriterlock.rwlock")
    if fasteners is not None:
        shared = fasteners.ReaderWriterLock()
        kinds["fasteners.ReaderWriterLock"] = (shared.read_lock, shared.write_lock)
    if rwlock is not None:
        fair = rwlock.RWLockFair()
        kinds["readerwriterlock.RWLockFair"] = (fair.gen_rlock, fair.gen_wlock)
    return kinds


MISSING = missing(["fasteners", "readerwriterlock"])


def repeated(make: Block) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(PAIRS):
            with make():
                pass

    return loop


def uncontended(settings: Settings, progress: Progress) -> Table:
    storage = Storage((4_096, 512), "bfloat16")
    cache = LatentKvCache.with_capacity(61, 4_096, [(512,), (64,)], "bfloat16")
    lock, rlock = threading.Lock(), threading.RLock()

    def held(lock: Any) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(PAIRS):
                with lock:
                    pass

        return loop

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

    contenders = [
        Contender("threading.Lock", held(lock), PAIRS),
        Contender("threading.RLock", held(rlock), PAIRS),
        Contender("storage.read(lo, hi)", read, PAIRS),
        Contender("storage.write(lo, hi)", write, PAIRS),
        Contender("cache.read(layer), two slots", cache_read, PAIRS),
        Contender("cache.step(1), abandoned", step, PAIRS),
    ]
    for name, blocks in locks(storage).items():
        if name.startswith(("fasteners", "readerwriterlock")):
            for what, make in zip(("read", "write"), blocks, strict=True):
                contenders.append(Contender(f"{name}, {what}", repeated(make), PAIRS))
    return compare(
        "a Python with block, uncontended",
        contenders,
        rounds=settings.rounds(60),
        settings=settings,
        progress=progress,
        targets=[
            Target("storage.read(lo, hi)", "threading.Lock", 0.7),
            Target("storage.write(lo, hi)", "threading.Lock", 0.7),
        ],
        missing=MISSING,
        key="locks-python",
    )


def contended(settings: Settings, progress: Progress) -> Table:
    """Two threads, each taking and giving back as fast as it can; the time is that of one pair of one thread."""
    storage = Storage((4_096, 512), "bfloat16")
    pairs = PAIRS // 10

    def loop(make: Block | None) -> None:
        for _ in range(pairs):
            if make is None:
                time.sleep(0)
            else:
                with make():
                    time.sleep(0)

    def meet(name: str, read: Block | None, write: Block | None) -> Contender:
        def both() -> None:
            other = threading.Thread(target=loop, args=(write,))
            other.start()
            loop(read)
            other.join()

        return Contender(name, both, pairs)

    return compare(
        "one writer and one reader in Python, each block gives the GIL away once",
        [
            *(meet(name, *blocks) for name, blocks in locks(storage).items()),
            meet("lkv lease, other rows", lambda: storage.read(0, 8), lambda: storage.write(8, 9)),
            meet("no lock", None, None),
        ],
        rounds=settings.rounds(24),
        settings=settings,
        progress=progress,
        clock="wall",
        missing=MISSING,
        key="locks-python-contended",
    )


def fairness(settings: Settings, progress: Progress) -> list[Table]:
    """One writer against four readers that overlap, each holding for 0.2 ms."""
    storage = Storage((4_096, 512), "bfloat16")
    kinds = locks(storage)
    seconds, rounds = (0.2, 2) if settings.quick else (1.0, 5)
    shuffle, order = random.Random(settings.seed).shuffle, list(kinds)
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    for done in range(rounds):
        shuffle(order)
        for place, name in enumerate(order, 1):
            results[name].append(one_writer(*kinds[name], seconds))
            progress("one writer and four readers in Python", (done + place / len(order)) / rounds)
    columns = (
        ("reads per second", "1/s", "python-fairness-reads"),
        ("writes per second", "1/s", "python-fairness-writes"),
        (f"longest wait of the writer in {seconds:g} s", "ms", "python-fairness-wait"),
    )
    return [
        Table(
            f"one writer and four overlapping readers in Python: {what}",
            unit,
            "threading.Lock",
            {name: [run[column] for run in runs] for name, runs in results.items()},
            missing=MISSING,
            key=key,
        )
        for column, (what, unit, key) in enumerate(columns)
    ]


def one_writer(read: Block, write: Block, seconds: float) -> tuple[float, float, float]:
    """Return reads and writes per second and the writer's longest wait in ms; at the end, a wait is cut off."""
    end = time.perf_counter() + seconds
    reads = [0] * READERS

    def reading(reader: int) -> None:
        while time.perf_counter() < end:
            with read():
                time.sleep(200e-6)
            reads[reader] += 1

    readers = [threading.Thread(target=reading, args=(reader,)) for reader in range(READERS)]
    for thread in readers:
        thread.start()
    writes, worst = 0, 0.0
    while time.perf_counter() < end:
        asked = time.perf_counter()
        with write():
            worst = max(worst, time.perf_counter() - asked)
        writes += 1
        time.sleep(200e-6)
    for thread in readers:
        thread.join()
    return sum(reads) / seconds, writes / seconds, 1e3 * worst
