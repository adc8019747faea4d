"""One to eight threads that append to caches of their own, or read one cache: under the GIL, and in C."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache, Storage

from .append import WIDTHS
from .locks import KINDS
from .measure import Contender, Progress, Settings, Table, compare
from .native import api_address, places, storages_of, threads

__all__ = ["THREADS", "run"]

THREADS = (1, 2, 4, 8)
LAYERS, CAPACITY = 8, 4_096
TOKENS, PAIRS, SLABS, SLAB = 64, 400, 4, 2_048


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure elapsed time per operation of all threads together: halved by a second thread is perfect scaling."""
    caches = [Own() for _ in range(max(THREADS))]
    return [
        appending(caches, settings, progress),
        slabs(caches, settings, progress),
        appending_in_c(caches, settings, progress),
        reading(settings, progress),
        reading_in_c(settings, progress),
    ]


class Own:
    """The cache of one thread, and what it appends."""

    def __init__(self) -> None:
        self.cache = LatentKvCache.with_capacity(LAYERS, CAPACITY, [(w,) for w in WIDTHS], "bfloat16")
        self.token = [[np.ones((1, w), ml_dtypes.bfloat16) for w in WIDTHS] for _ in range(LAYERS)]
        self.slab = [np.ones((SLAB, w), ml_dtypes.bfloat16) for w in WIDTHS]
        self.targets = [storage.alias().numpy() for storage in storages_of(self.cache)]
        for layer in range(LAYERS):
            for _ in range(CAPACITY // SLAB):
                self.cache.append(layer, self.slab)

    def rewind(self) -> None:
        """Make room."""
        self.cache.truncate_to(0)

    def append(self) -> None:
        """Append tokens, layer by layer."""
        for _ in range(TOKENS):
            with self.cache.step(1) as step:
                for layer, pair in enumerate(self.token):
                    step.append(layer, pair)

    def assign(self) -> None:
        """Do the same with slices of NumPy."""
        sources = [array for pair in self.token for array in pair]
        pairs = list(zip(self.targets, sources, strict=True))
        for row in range(TOKENS):
            for target, source in pairs:
                target[row : row + 1] = source

    def prefill(self) -> None:
        """Append slabs, for which the GIL is released."""
        for layer in range(SLABS):
            self.cache.append(layer, self.slab)


def together(name: str, works: Sequence[Callable[[], Any]], each: int, prepare: Callable[[], Any]) -> Contender:
    """Run as many threads as there are works, from a common start."""

    def run() -> None:
        start = threading.Barrier(len(works))

        def wait_and(work: Callable[[], Any]) -> None:
            start.wait()
            work()

        others = [threading.Thread(target=wait_and, args=(work,)) for work in works[1:]]
        for thread in others:
            thread.start()
        wait_and(works[0])
        for thread in others:
            thread.join()

    return Contender(f"{name}, {len(works)} thread{'s' * (len(works) > 1)}", run, each * len(works), prepare)


def measured(title: str, contenders: list[Contender], key: str, settings: Settings, progress: Progress) -> Table:
    return compare(
        f"{title}, on {os.cpu_count()} CPUs",
        contenders,
        rounds=settings.rounds(24),
        settings=settings,
        progress=progress,
        clock="wall",
        key=key,
    )


def appending(caches: list[Own], settings: Settings, progress: Progress) -> Table:
    def rewind() -> None:
        for own in caches:
            own.rewind()

    each = TOKENS * LAYERS * len(WIDTHS)
    ways = {"numpy slice, bf16": Own.assign, "step.append, numpy": Own.append}
    return measured(
        "threads with caches of their own, tokens in Python, per layer and slot",
        [
            together(name, [lambda own=own, way=way: way(own) for own in caches[:n]], each, rewind)
            for name, way in ways.items()
            for n in THREADS
        ],
        "scaling-append",
        settings,
        progress,
    )


def slabs(caches: list[Own], settings: Settings, progress: Progress) -> Table:
    def rewind() -> None:
        for own in caches:
            own.rewind()

    return measured(
        f"threads with caches of their own, slabs of {SLAB:,} rows in Python, per slab",
        [together("cache.append, numpy", [own.prefill for own in caches[:n]], SLABS, rewind) for n in THREADS],
        "scaling-prefill",
        settings,
        progress,
    )


def appending_in_c(caches: list[Own], settings: Settings, progress: Progress) -> Table:
    every = [
        (storage, source.ctypes.data, source.nbytes)
        for own in caches
        for storage, source in zip(storages_of(own.cache), (a for pair in own.token for a in pair), strict=True)
    ]
    spots, per_thread, tokens = places(every), LAYERS * len(WIDTHS), 50 * TOKENS
    native, address = threads(), ctypes.addressof(spots)

    def work(api: int | None, n: int) -> Callable[[], None]:
        def append(kept: Any = spots) -> None:
            if native.append_in_threads(api, address, per_thread, n, CAPACITY, tokens):
                raise RuntimeError("a lease was refused")

        return append

    ways = {"C memcpy": None, "lkv lease and write_host": api_address()}
    return measured(
        "threads with buffers of their own, tokens in C, per layer and slot",
        [
            Contender(f"{name}, {n} thread{'s' * (n > 1)}", work(api, n), tokens * per_thread * n)
            for name, api in ways.items()
            for n in THREADS
        ],
        "scaling-append-c",
        settings,
        progress,
    )


def reading(settings: Settings, progress: Progress) -> Table:
    cache = LatentKvCache.with_capacity(LAYERS, CAPACITY, [(w,) for w in WIDTHS], "bfloat16")
    for layer in range(LAYERS):
        cache.append(layer, [np.ones((64, w), ml_dtypes.bfloat16) for w in WIDTHS])
    cache.advance_by(64)
    lock = threading.Lock()

    def leased() -> None:
        for _ in range(PAIRS):
            with cache.read(3) as rows:
                rows.numpy()

    def locked() -> None:
        for _ in range(PAIRS):
            with lock:
                pass

    def nothing() -> None:
        return None

    ways = {"threading.Lock": locked, "cache.read(layer).numpy()": leased}
    return measured(
        "threads that read one cache in Python, per read",
        [together(name, [way] * n, PAIRS, nothing) for name, way in ways.items() for n in THREADS],
        "scaling-read",
        settings,
        progress,
    )


def reading_in_c(settings: Settings, progress: Progress) -> Table:
    native, api, storage, pairs = threads(), api_address(), Storage((4_096, 512), "bfloat16"), 50 * PAIRS
    return measured(
        "threads that read one buffer in C, per acquire and release",
        [
            Contender(
                f"{name}, {n} thread{'s' * (n > 1)}",
                lambda kind=KINDS[name], n=n: native.lock_in_threads(kind, api, storage.handle, n, pairs),
                pairs * n,
            )
            for name in ("pthread_rwlock", "std::shared_mutex", "lkv lease")
            for n in THREADS
        ],
        "scaling-read-c",
        settings,
        progress,
    )
