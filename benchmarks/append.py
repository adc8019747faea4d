"""One decode token into every layer and slot of a DeepSeek-V3-sized cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache

from .measure import Contender, Progress, Settings, Table, Target, compare
from .native import api_address, library, places, storages_of
from .optional import missing, peer

__all__ = ["run"]

LAYERS, WIDTHS = 61, (512, 64)
COLD_ROWS = 4_224  # 297 MB: more than this machine's share of any cache
HOT_ROWS = 8
TOKENS = 8

Pair = list[Any]


class Rows:
    """A cache whose memory all contenders write, and the row that is next."""

    def __init__(self) -> None:
        self.cache = LatentKvCache.with_capacity(LAYERS, COLD_ROWS, [(w,) for w in WIDTHS], "bfloat16")
        self.storages = storages_of(self.cache)
        for storage in self.storages:
            with storage.write() as lease:
                lease.numpy().view(np.uint16)[:] = 1
        self.other = np.ones(32 << 20, np.uint8)
        self.limit = COLD_ROWS
        self.at = 0

    def within(self, limit: int) -> None:
        """Go round in so many rows from now on."""
        self.limit, self.at = limit, 0

    def move(self) -> None:
        """Go to the next rows."""
        if self.limit == COLD_ROWS:
            # As a model's weights do: processors slow their memory down while nobody asks for it.
            self.other.max()
        self.at = self.at + TOKENS if self.at + 2 * TOKENS <= self.limit else 0

    def publish(self) -> None:
        """Go to the next rows, with the cache's length there."""
        self.move()
        self.cache.truncate_to(0)
        if self.at:
            for layer in range(LAYERS):
                self.cache.note_write(layer, self.at)
            self.cache.advance_by(self.at)


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure with rows that are in cache, and with rows that are not."""
    rows = Rows()
    torch = peer("torch")
    tables = []
    for name, limit, rounds in (("hot", HOT_ROWS, 80), ("cold", COLD_ROWS, 160)):
        rows.within(limit)
        arrays = numpy_arrays()
        contenders = [*c_contenders(rows, arrays), *numpy_contenders(rows, arrays)]
        if torch is not None:
            contenders += torch_contenders(rows, torch)
        tables.append(
            compare(
                f"append of a decode token, {name} rows, per layer and slot",
                contenders,
                rounds=settings.rounds(rounds),
                settings=settings,
                progress=progress,
                targets=TARGETS if name == "cold" else [],
                missing=missing(["torch"]),
                key=f"append-{name}",
            )
        )
    return tables


TARGETS = [
    *(
        target
        for name in ("step.append", "cache.append")
        for target in (
            Target(f"{name}, numpy", "C memcpy", 3.5),
            Target(f"{name}, numpy", "numpy slice, bf16", 0.35),
            Target(f"{name}, torch", "C memcpy", 4.6),
            Target(f"{name}, torch", "torch copy_", 1 / 12),
        )
    ),
    Target("step.append_layers, numpy", "C memcpy", 1.6),
    Target("step.append_layers, torch", "C memcpy", 3.0),
    Target("step.append_layers, numpy stacked", "C memcpy", 1.5),
    Target("step.append_layers, torch stacked", "C memcpy", 1.5),
    Target("C memcpy under one lease", "C memcpy", 1.15),
]


def numpy_arrays() -> list[Pair]:
    """Return one row per layer and slot."""
    return [[np.ones((1, width), ml_dtypes.bfloat16) for width in WIDTHS] for _ in range(LAYERS)]


def contender(name: str, run: Callable[[], Any], prepare: Callable[[], Any]) -> Contender:
    return Contender(name, run, TOKENS * LAYERS * len(WIDTHS), prepare)


def c_contenders(rows: Rows, arrays: list[Pair]) -> list[Contender]:
    sources = [array for pair in arrays for array in pair]
    spots = places([(s, a.ctypes.data, a.nbytes) for s, a in zip(rows.storages, sources, strict=True)])
    at, n = ctypes.addressof(spots), len(spots)
    native, api = library(), api_address()
    kept = (spots, sources)

    def memcpy(kept: Any = kept) -> None:
        native.copy_tokens(at, n, rows.at, TOKENS)

    def leased() -> None:
        if native.copy_tokens_leased(api, at, n, rows.at, TOKENS):
            raise RuntimeError("the lease was refused")

    def write_host() -> None:
        if native.write_host_tokens(api, at, n, rows.at, TOKENS):
            raise RuntimeError("a lease was refused")

    return [
        contender("C memcpy", memcpy, rows.move),
        contender("C memcpy under one lease", leased, rows.move),
        contender("C lease and write_host per slot", write_host, rows.move),
    ]


def numpy_contenders(rows: Rows, arrays: list[Pair]) -> list[Contender]:
    targets = [storage.alias().numpy() for storage in rows.storages]
    sources = [array for pair in arrays for array in pair]
    raw_targets = [target.view(np.uint16) for target in targets]
    raw_sources = [source.view(np.uint16) for source in sources]
    stacked = [np.stack([pair[slot] for pair in arrays]) for slot in range(len(WIDTHS))]
    return [
        contender("numpy slice, uint16", slices(rows, raw_targets, raw_sources), rows.move),
        contender("numpy slice, bf16", slices(rows, targets, sources), rows.move),
        *lkv_contenders(rows, "numpy", arrays),
        contender("step.append_layers, numpy stacked", whole_tokens(rows, stacked), rows.publish),
    ]


def torch_contenders(rows: Rows, torch: Any) -> list[Contender]:
    torch.set_num_threads(1)
    targets = [storage.alias().torch() for storage in rows.storages]
    arrays = [[torch.ones((1, width), dtype=torch.bfloat16) for width in WIDTHS] for _ in range(LAYERS)]
    stacked = [torch.stack([pair[slot] for pair in arrays]) for slot in range(len(WIDTHS))]
    sources = [array for pair in arrays for array in pair]
    pairs = list(zip(targets, sources, strict=True))

    def copy() -> None:
        for row in range(rows.at, rows.at + TOKENS):
            for target, source in pairs:
                target[row : row + 1].copy_(source)

    def index_copy() -> None:
        for row in range(rows.at, rows.at + TOKENS):
            index = torch.tensor([row])
            for target, source in pairs:
                target.index_copy_(0, index, source)

    return [
        contender("torch copy_", copy, rows.move),
        contender("torch index_copy_", index_copy, rows.move),
        *lkv_contenders(rows, "torch", arrays),
        contender("step.append_layers, torch stacked", whole_tokens(rows, stacked), rows.publish),
    ]


def lkv_contenders(rows: Rows, kind: str, arrays: list[Pair]) -> list[Contender]:
    cache = rows.cache
    layers = [(layer, first, second) for layer, (first, second) in enumerate(arrays)]

    def step_append() -> None:
        for _ in range(TOKENS):
            with cache.step(1) as step:
                append = step.append
                for layer, first, second in layers:
                    append(layer, [first, second])

    def cache_append() -> None:
        append = cache.append
        for _ in range(TOKENS):
            for layer, first, second in layers:
                append(layer, [first, second])
            cache.advance_by(1)

    return [
        contender(f"step.append, {kind}", step_append, rows.publish),
        contender(f"cache.append, {kind}", cache_append, rows.publish),
        contender(f"step.append_layers, {kind}", whole_tokens(rows, arrays), rows.publish),
    ]


def whole_tokens(rows: Rows, slots: Sequence[Any]) -> Callable[[], None]:
    cache = rows.cache

    def append_layers() -> None:
        for _ in range(TOKENS):
            with cache.step(1) as step:
                step.append_layers(slots)

    return append_layers


def slices(rows: Rows, targets: list[Any], sources: list[Any]) -> Callable[[], None]:
    pairs = list(zip(targets, sources, strict=True))

    def assign() -> None:
        for row in range(rows.at, rows.at + TOKENS):
            for target, source in pairs:
                target[row : row + 1] = source

    return assign
