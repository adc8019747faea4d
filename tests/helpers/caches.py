"""Small caches, recognisable rows for them, and everything about a cache that a refused call must leave alone."""

import numpy as np

from lkv import DType

from .places import arrays_of, latent_cache, look

# One, two and three unlike slots; a rank-2 slot, a scalar per token, and more slots than the stack path takes.
SLOT_SETS = {
    "one": [(5,)],
    "two": [(8,), (3,)],
    "three": [(8,), (3,), (4,)],
    "rank2": [(2, 3), (5,)],
    "scalar": [(5,), ()],
    "ten": [(i + 1,) for i in range(10)],
}
LAYOUTS = ["separate", "packed"]


def small(slots="two", *, layers=2, rows=8, dtype="float32", layout="separate", **more):
    trailing = SLOT_SETS[slots] if isinstance(slots, str) else slots
    return latent_cache(layers, rows, trailing, dtype, layout=layout, **more)


def pattern(shape, dtype="float32", seed=0):
    """An array whose elements tell where they belong; small integers, so that every element type holds them."""
    kind = DType.of(dtype).numpy
    count = int(np.prod(shape, dtype=np.int64))
    values = (np.arange(count) * 3 + seed * 17 + 1) % (2 if kind == np.bool_ else 29)
    return values.astype(kind).reshape(shape)


def layer_rows(cache, n, seed=0):
    """What an append to one layer of a LatentKvCache takes: one array per slot."""
    return [pattern((n, *spec.trailing), cache.dtype, seed * 31 + s) for s, spec in enumerate(cache.slots)]


def populated(cache):
    return [layer for layer in range(cache.n_layers) if cache.slot_storage(layer, 0) is not None]


def fill(cache, n, seed=0):
    """Publish `n` rows in every populated layer; returns what was written, by layer."""
    given = {layer: layer_rows(cache, n, seed + layer) for layer in populated(cache)}
    with cache.step(n) as step:
        for layer, arrays in given.items():
            step.append(layer, arrays)
    return given


def content(cache, layer):
    """Copies of the published rows of a layer."""
    with cache.read(layer) as view:
        return [array.copy() for array in arrays_of(view)]


def same_rows(actual, expected):
    """Whether two lists of arrays agree in shape, type and every bit."""
    return len(actual) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(actual, expected, strict=True)
    )


def snapshot(cache):
    """Every byte of every storage, all lengths, versions and identities."""
    storages = {}
    for layer in range(cache.n_layers):
        for slot in range(cache.n_slots):
            storage = cache.slot_storage(layer, slot)
            if storage is not None:
                storages[storage.id] = (storage.version, storage.poisoned, look(storage.alias()).tobytes())
    return {
        "geometry": (cache.max_seq_len, cache.dtype, cache.device_location, cache.alloc_id, cache.nbytes),
        "lengths": (cache.cached_len, [cache.written_len(layer) for layer in range(cache.n_layers)]),
        "versions": [[cache.slot_version(la, s) for s in range(cache.n_slots)] for la in range(cache.n_layers)],
        "where": [
            [getattr(cache.slot_storage(la, s), "id", None) for s in range(cache.n_slots)]
            for la in range(cache.n_layers)
        ],
        "storages": storages,
    }
