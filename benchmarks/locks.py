"""Leases in C beside the locks of the C and C++ libraries."""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

from lkv import Storage

from .measure import Contender, Progress, Settings, Table, Target, compare
from .native import api_address, threads

__all__ = ["KINDS", "run"]

KINDS = {"pthread_rwlock": 0, "std::shared_mutex": 1, "pthread_mutex": 2, "lkv lease": 3}  # as in threads.cpp
PAIRS = 20_000


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure a lock alone, between a writer and a reader, and between a writer and four readers."""
    storage = Storage((4_096, 512), "bfloat16")
    done = threading.Event()  # the C library skips atomic instructions in a process of one thread
    threading.Thread(target=done.wait, daemon=True).start()
    try:
        return [
            uncontended(storage, settings, progress),
            contended(storage, settings, progress),
            *fairness(storage, settings, progress),
        ]
    finally:
        done.set()


def uncontended(storage: Storage, settings: Settings, progress: Progress) -> Table:
    native, api, buffer = threads(), api_address(), storage.handle

    def pairs(name: str, write: int) -> Contender:
        return Contender(
            f"{name}, {'write' if write else 'read'}",
            lambda: native.lock_pairs(KINDS[name], api, buffer, PAIRS, write),
            PAIRS,
        )

    return compare(
        "acquire and release in C, uncontended",
        [pairs(name, write) for name in KINDS for write in (0, 1)],
        rounds=settings.rounds(60),
        settings=settings,
        progress=progress,
        targets=[
            Target("lkv lease, read", "pthread_rwlock, read", 1.0),
            Target("lkv lease, write", "pthread_rwlock, write", 1.0),
        ],
        key="locks-c",
    )


def contended(storage: Storage, settings: Settings, progress: Progress) -> Table:
    """A writer and a reader of the same rows, each as fast as it can: elapsed time per operation of both together."""
    native, api, buffer, rounds = threads(), api_address(), storage.handle, settings.rounds(24)
    samples: dict[str, list[float]] = {name: [] for name in KINDS}
    title = "one writer and one reader in C, per operation"
    for done, name in in_turns(rounds, settings):
        samples[name].append(native.contend(KINDS[name], api, buffer, 0.1))
        progress(title, done)
    targets = [Target("lkv lease", "std::shared_mutex", 0.1)]
    return Table(title, "ns", "std::shared_mutex", samples, targets=targets, key="locks-c-contended")


def fairness(storage: Storage, settings: Settings, progress: Progress) -> list[Table]:
    """One writer against four readers that overlap, each holding for 0.2 ms."""
    native, api, buffer = threads(), api_address(), storage.handle
    seconds, rounds = (0.2, 2) if settings.quick else (1.0, 5)
    results: dict[str, list[Any]] = {name: [] for name in KINDS}
    for done, name in in_turns(rounds, settings):
        numbers = (ctypes.c_double * 3)()
        native.fairness(KINDS[name], api, buffer, seconds, numbers)
        results[name].append(list(numbers))
        progress("one writer and four readers in C", done)
    tables = []
    for column, (what, unit, key) in enumerate(
        (
            ("reads per second", "1/s", "fairness-reads"),
            ("writes per second", "1/s", "fairness-writes"),
            (f"longest wait of the writer in {seconds:g} s", "ms", "fairness-wait"),
        )
    ):
        samples = {name: [run[column] for run in runs] for name, runs in results.items()}
        title = f"one writer and four overlapping readers in C: {what}"
        tables.append(Table(title, unit, "std::shared_mutex", samples, key=key))
    return tables


def in_turns(rounds: int, settings: Settings) -> Any:
    """Yield every lock once per round, in random order, with the share that will be done."""
    shuffle, order = random.Random(settings.seed).shuffle, list(KINDS)
    for done in range(rounds):
        shuffle(order)
        for place, name in enumerate(order, 1):
            yield (done + place / len(order)) / rounds, name
