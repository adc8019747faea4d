"""The decode append and a prefill slab beside the caches of transformers, mlx-lm and JAX."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from lkv import LatentKvCache

from .append import HOT_ROWS, LAYERS, TOKENS, WIDTHS
from .measure import Contender, Progress, Settings, Table, Target, compare
from .native import library, places, storages_of
from .optional import missing, peer

__all__ = ["run"]

CAPACITY = 2_304
SLOW_LAYERS = 4  # of those whose append costs micro- to milliseconds
LENGTHS = (128, 1_024, 4_096)
SLAB = 2_048
PEERS = ("torch", "transformers", "jax", "mlx.core", "mlx_lm")


def stay(row: int) -> None:
    """For what needs no preparation."""


@dataclass(frozen=True)
class Peer:
    """What appends rows to all its layers at a given row, once it was told to go there.

    `append_many` does it so many times, where a loop in Python would weigh.
    """

    name: str
    layers: int
    append: Callable[[int], Any]
    go_to: Callable[[int], Any] = stay
    threaded: bool = False
    append_many: Callable[[int, int], Any] | None = None

    def tokens(self, row: int) -> None:
        """Append tokens from a row on."""
        if self.append_many is not None:
            self.append_many(row, TOKENS)
            return
        for at in range(row, row + TOKENS):
            self.append(at)


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure tokens on hot and on cold rows, a slab, and caches whose append grows with what is cached."""
    absent = missing(PEERS)
    made = everyone(LAYERS, CAPACITY, 1)
    return [
        tokens("hot", HOT_ROWS, made, absent, settings, progress),
        tokens("cold", CAPACITY, made, absent, settings, progress),
        slab(absent, settings, progress),
        growing(settings, progress),
    ]


def tokens(name: str, limit: int, made: list[Peer], absent: list[str], settings: Settings, progress: Progress) -> Table:
    """One token into all layers; cold: rows go on through buffers that no cache of the processor holds."""
    at = {"row": 0}

    def contender(one: Peer) -> Contender:
        def ready() -> None:
            at["row"] = at["row"] + TOKENS if at["row"] + 2 * TOKENS <= limit else 0
            one.go_to(at["row"])
            if name == "hot":  # the contenders before took the processor's caches
                one.tokens(at["row"])
                one.go_to(at["row"])

        return Contender(
            one.name, lambda: one.tokens(at["row"]), TOKENS * one.layers * len(WIDTHS), ready, one.threaded
        )

    aims = [Target(f"lkv {way}, torch", "transformers StaticCache", 1 / 30) for way in ("step.append", "cache.append")]
    return compare(
        f"append of a decode token beside frameworks, {name} rows, per layer and slot",
        [contender(one) for one in made],
        rounds=settings.rounds(80),
        settings=settings,
        progress=progress,
        targets=aims if name == "cold" else [],
        missing=absent,
        key=f"frameworks-{name}",
    )


def slab(absent: list[str], settings: Settings, progress: Progress) -> Table:
    """A prefill slab into one layer, rows resident."""

    def contender(one: Peer) -> Contender:
        return Contender(one.name, lambda: one.append(0), 1, lambda: one.go_to(0), one.threaded)

    return compare(
        f"prefill of {SLAB:,} rows into one layer, beside frameworks",
        [contender(one) for one in everyone(1, SLAB + 256, SLAB)],
        rounds=settings.rounds(40),
        settings=settings,
        progress=progress,
        missing=absent,
        key="frameworks-prefill",
    )


def everyone(layers: int, capacity: int, rows: int) -> list[Peer]:
    """Return every contender, each with buffers of its own that are resident."""
    made = [*with_lkv(layers, capacity, rows)]
    torch, transformers, jax, mlx_lm = (peer(name) for name in ("torch", "transformers", "jax", "mlx_lm"))
    if torch is not None and transformers is not None:
        made.append(static_cache(torch, transformers, layers, capacity, rows))
    if mlx_lm is not None:
        made.append(mlx_cache(layers, capacity, rows))
    if jax is not None:
        made.append(donated(jax, min(layers, SLOW_LAYERS), capacity, rows, "bf16"))
        made.append(donated(jax, layers, capacity, rows, "uint16"))
    return made


def with_lkv(layers: int, capacity: int, rows: int) -> list[Peer]:
    cache = LatentKvCache.with_capacity(layers, capacity, [(w,) for w in WIDTHS], "bfloat16")
    storages = storages_of(cache)
    for storage in storages:
        with storage.write() as lease:
            lease.numpy().view(np.uint16)[:] = 1
    arrays = [[np.ones((rows, w), ml_dtypes.bfloat16) for w in WIDTHS] for _ in range(layers)]
    flat = [array for pair in arrays for array in pair]
    row_bytes = [2 * w for _ in range(layers) for w in WIDTHS]
    spots = places([(s, a.ctypes.data, n) for s, a, n in zip(storages, flat, row_bytes, strict=True)])
    native, address, n_places = library(), ctypes.addressof(spots), len(spots)

    def memcpy(row: int, kept: Any = (spots, flat)) -> None:
        native.copy_slabs(address, n_places, row, rows, 1)

    def memcpy_many(row: int, n: int) -> None:
        native.copy_slabs(address, n_places, row, rows, n)

    def publish(row: int) -> None:
        cache.truncate_to(0)
        if row:
            for layer in range(layers):
                cache.note_write(layer, row)
            cache.advance_by(row)

    def stepping(arrays: list[list[Any]]) -> Callable[[int], None]:
        def append(row: int) -> None:
            with cache.step(rows) as step:
                for layer, pair in enumerate(arrays):
                    step.append(layer, pair)

        return append

    def appending(arrays: list[list[Any]]) -> Callable[[int], None]:
        def append(row: int) -> None:
            for layer, pair in enumerate(arrays):
                cache.append(layer, pair)
            cache.advance_by(rows)

        return append

    made = [
        Peer("C memcpy", layers, memcpy, append_many=memcpy_many),
        Peer("lkv step.append, numpy", layers, stepping(arrays), publish),
    ]
    torch = peer("torch")
    if torch is not None:
        tensors = [[torch.ones((rows, w), dtype=torch.bfloat16) for w in WIDTHS] for _ in range(layers)]
        made.append(Peer("lkv step.append, torch", layers, stepping(tensors), publish))
        made.append(Peer("lkv cache.append, torch", layers, appending(tensors), publish))
    return made


def heads_of(torch: Any, rows: int) -> list[Any]:
    """Return what transformers takes as keys and values: ``[1, 1, rows, width]``."""
    return [torch.ones((1, 1, rows, width), dtype=torch.bfloat16) for width in WIDTHS]


def config_of(transformers: Any, layers: int) -> Any:
    return transformers.LlamaConfig(num_hidden_layers=layers, num_attention_heads=1, num_key_value_heads=1)


def static_cache(torch: Any, transformers: Any, layers: int, capacity: int, rows: int) -> Peer:
    cache = transformers.StaticCache(config=config_of(transformers, layers), max_cache_len=capacity)
    keys, values = heads_of(torch, rows)
    for layer in range(layers):
        cache.update(keys, values, layer)
        cache.layers[layer].keys.fill_(1)
        cache.layers[layer].values.fill_(1)

    def append(row: int) -> None:
        for layer in range(layers):
            cache.update(keys, values, layer)

    def go_to(row: int) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(row)

    return Peer("transformers StaticCache", layers, append, go_to)


def mlx_cache(layers: int, capacity: int, rows: int) -> Peer:
    mx, module = peer("mlx.core"), peer("mlx_lm.models.cache")
    if mx is None or module is None:
        raise ImportError("mlx_lm without mlx")
    caches = [module.KVCache() for _ in range(layers)]
    fill = [mx.ones((1, 1, capacity, width), mx.bfloat16) for width in WIDTHS]
    new = [mx.ones((1, 1, rows, width), mx.bfloat16) for width in WIDTHS]
    mx.eval(new, [cache.update_and_fetch(*fill) for cache in caches])

    def append(row: int) -> None:
        for cache in caches:
            cache.update_and_fetch(*new)
        mx.eval([(cache.keys, cache.values) for cache in caches])

    def go_to(row: int) -> None:
        for cache in caches:
            cache.offset = row

    return Peer("mlx-lm KVCache, one eval", layers, append, go_to, threaded=True)


def donated(jax: Any, layers: int, capacity: int, rows: int, kind: str) -> Peer:
    jnp = jax.numpy
    dtype = {"bf16": jnp.bfloat16, "uint16": jnp.uint16}[kind]
    state = [[jnp.ones((capacity, w), dtype) for w in WIDTHS] for _ in range(layers)]
    new = [[jnp.ones((rows, w), dtype) for w in WIDTHS] for _ in range(layers)]

    def update(state: Any, new: Any, row: Any) -> Any:
        one = jax.lax.dynamic_update_slice
        return [[one(s, n, (row, 0)) for s, n in zip(*layer, strict=True)] for layer in zip(state, new, strict=True)]

    compiled = jax.jit(update, donate_argnums=0)
    held = {"state": jax.block_until_ready(compiled(state, new, 0))}

    def append(row: int) -> None:
        held["state"] = jax.block_until_ready(compiled(held["state"], new, row))

    return Peer(f"jax dynamic_update_slice, donated, {kind}", layers, append, threaded=True)


def growing(settings: Settings, progress: Progress) -> Table:
    """Caches that copy or unpack what is cached at every append, per layer and slot, at several lengths."""
    torch, transformers = peer("torch"), peer("transformers")
    absent = missing(["torch", "transformers", "optimum.quanto"])
    operations, longest = SLOW_LAYERS * len(WIDTHS), max(LENGTHS)

    def contender(one: Peer) -> Contender:
        return Contender(
            f"{one.name}, {longest:,} rows",
            lambda: one.tokens(longest),
            TOKENS * operations,
            lambda: one.go_to(longest),
        )

    contenders = [contender(one) for one in with_lkv(SLOW_LAYERS, longest + TOKENS, 1)]
    if torch is not None and transformers is not None:
        config = config_of(transformers, SLOW_LAYERS)
        makers: dict[str, Callable[[], Any]] = {"DynamicCache": transformers.DynamicCache}
        if peer("optimum.quanto") is not None:
            makers["QuantizedCache, quanto int4"] = lambda: transformers.QuantizedCache("quanto", config)
        else:
            makers["QuantizedCache, fp8"] = lambda: transformers.QuantizedCache("fp8", config)
        for name, make in makers.items():
            contenders += [grown(torch, f"transformers {name}", make, rows, operations) for rows in LENGTHS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(
            "append of a decode token to caches that copy, per layer and slot",
            contenders,
            rounds=settings.rounds(16),
            settings=settings,
            progress=progress,
            missing=absent,
            key="frameworks-growing",
        )


def grown(torch: Any, name: str, make: Callable[[], Any], rows: int, operations: int) -> Contender:
    """A new cache of so many rows for every round: an append leaves it longer, and not all can be cropped."""
    slabs, new = heads_of(torch, rows), heads_of(torch, 1)
    held: dict[str, Any] = {}

    def fill() -> None:
        cache = held["cache"] = make()
        for layer in range(SLOW_LAYERS):
            cache.update(*slabs, layer)

    def append() -> None:
        for layer in range(SLOW_LAYERS):
            held["cache"].update(*new, layer)

    return Contender(f"{name}, {rows:,} rows", append, operations, fill)
