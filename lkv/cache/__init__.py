"""The four caches: two persistent ones over a shared table of slots, two functional ones."""

from lkv.cache.kv import KvCache, KvLayer, KvSlot
from lkv.cache.latent import LatentCache
from lkv.cache.latent_kv import LatentKvCache
from lkv.cache.lazy_kv import LazyKvCache
from lkv.cache.slots import LatentSlot

__all__ = ["KvCache", "KvLayer", "KvSlot", "LatentCache", "LatentKvCache", "LatentSlot", "LazyKvCache"]
