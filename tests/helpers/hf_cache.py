"""What tests of `LkvCache` share: models, rows made by hand, and what a refused call must leave as it was."""

import functools

import torch
import transformers
from helpers.caches import snapshot
from helpers.hf_models import tiny

model_of = functools.cache(tiny)


def random_rows(widths, n, batch=2, dtype=torch.float32, seed=0, heads=1):
    """One tensor ``[batch, heads, n, width]`` per slot."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((batch, heads, n, width), generator=generator).to(dtype) for width in widths]


def push(cache, n, batch=2, dtype=torch.float32, seed=0):
    """Update every layer of a cache of deepseek_v3, as a forward pass does; returns what each update returned."""
    return [
        cache.update(*random_rows((32, 8), n, batch, dtype, 100 * seed + layer), layer)
        for layer in range(len(cache.layers))
    ]


def dynamic(cache_of=None):
    """transformers' own cache for the same model."""
    return transformers.DynamicCache(config=(cache_of or model_of("deepseek_v3")).config)


def rows_of(cache):
    """Copies of the keys and values of all layers that have them."""
    pairs = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [tensor.clone() for pair in pairs for tensor in pair]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


class Unchanged:
    """Checks that a block leaves every byte, length and identity of a cache as they were."""

    def __init__(self, cache):
        self.cache = cache

    def _all(self):
        return [snapshot(kept) for kept in self.cache.caches], self.cache.get_seq_length(), rows_of(self.cache)

    def __enter__(self):
        self.before = self._all()

    def __exit__(self, *exc):
        before, after = self.before, self._all()
        assert after[:2] == before[:2]
        same(after[2], before[2])
