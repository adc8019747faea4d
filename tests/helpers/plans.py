"""Plans and sources for tests: a plan that is welded to addresses, and a source that says whatever it is told."""

import ctypes

import numpy as np
from helpers.fake_devices import PlainDevice

from lkv import AllocId, KvCache, LatentKvCache
from lkv.dtypes import DType
from lkv.plan import DecodeSession

ROWS = 8
SLOTS = {1: [(5,)], 2: [(8,), (3,)], 3: [(8,), (3,), (4,)]}


class Welded:
    """Reads addresses as a kernel would: with the shapes and types it was built for, keeping no memory alive.

    With `capture`, the first run records the addresses and later ones replay them until `invalidate`, like a graph.
    """

    def __init__(self, capture=False, fail_at=()):
        self.capture = capture
        self.fail_at = set(fail_at)  # numbers of the calls of bind that fail
        self.forms = {}
        self.addresses = {}
        self.captured = None
        self.events = []
        self.calls = 0

    def bind(self, layer, which, storage):
        self.calls += 1
        if self.calls in self.fail_at:
            raise RuntimeError(f"bind {self.calls} failed")
        self.events.append("bind")
        self.forms.setdefault((layer, which), (storage.shape, storage.dtype.numpy, storage.nbytes))
        self.addresses[layer, which] = storage.address

    def invalidate(self):
        self.events.append("invalidate")
        self.captured = None

    def run(self):
        self.events.append("run")
        addresses = self.captured or self.addresses
        if self.capture:
            self.captured = dict(addresses)
        return {
            key: np.frombuffer(ctypes.string_at(addresses[key], nbytes), kind).reshape(shape)
            for key, (shape, kind, nbytes) in self.forms.items()
        }


class Source:
    """A `KvRebindSource` made of given storages, claiming given things."""

    def __init__(self, storages, *, location, dtype="float32", n_layers=None, n_slots=None, max_seq_len=ROWS):
        self.storages = dict(storages)
        self.location = location
        self.dtype = DType.of(dtype)
        self.n_layers = n_layers or 1 + max(layer for layer, _ in self.storages)
        self.n_slots = n_slots or 1 + max(which for _, which in self.storages)
        self.max_seq_len = max_seq_len
        self.alloc_id = AllocId.next()

    def rebind_location(self):
        return self.location

    def rebind_slot(self, layer, which):
        return self.storages.get((layer, which))


def latent(n_slots=2, seed=0, *, layers=2, rows=ROWS, device="cpu", layout="separate", dtype="float32", slots=None):
    slots = SLOTS[n_slots] if slots is None else slots
    return filled(LatentKvCache.with_capacity(layers, rows, slots, dtype, device, layout=layout), seed)


def kv(seed=0, *, layers=2):
    return filled(KvCache.with_capacity(layers, 2, 4, ROWS, "float32"), seed)


def filled(cache, seed):
    """Publish 3 rows that tell whose they are."""
    return stepped(cache, 3, seed)


def stepped(cache, n, seed):
    rng = np.random.default_rng([seed, cache.cached_len])
    kind = cache.dtype.numpy
    with cache.step(n) as step:
        for layer in range(cache.n_layers):
            if cache.slot_storage(layer, 0) is not None:
                shapes = [_append_shape(cache, spec, n) for spec in cache.slots]
                step.append(layer, [(rng.random(shape) * 100 + 1).astype(kind) for shape in shapes])
    return cache


def _append_shape(cache, spec, n):
    if isinstance(cache, KvCache):
        return (1, cache.n_kv_heads, n, cache.head_dim)
    return (n, *spec.trailing)


def content(source):
    """What a plan should read: every byte of every storage."""
    return {
        (layer, which): np.frombuffer(ctypes.string_at(storage.address, storage.nbytes), storage.dtype.numpy)
        .reshape(storage.shape)
        .copy()
        for layer in range(source.n_layers)
        for which in range(source.n_slots)
        if (storage := source.rebind_slot(layer, which)) is not None
    }


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


def held(source, **more):
    """A session over a new welded plan, and the plan."""
    plan = Welded(**more)
    return DecodeSession(plan, source, seq=1, shape_key=7), plan


def validity(session, source):
    return session.validity_for(
        session.seq, source.max_seq_len, source.n_layers, source.dtype, session.shape_key, source.alloc_id
    )


class RecyclingDevice(PlainDevice):
    """Hands out the block that was freed last, if one of the size is left: allocators do."""

    name = "recycling"

    def __init__(self, ordinal=0):
        super().__init__(ordinal)
        self.freed = {}

    def allocate(self, nbytes):
        left = self.freed.get(nbytes)
        if left:
            address = left.pop()
            ctypes.memset(address, 0, nbytes)
            return address
        return super().allocate(nbytes)

    def free(self, address, nbytes):
        self.freed.setdefault(nbytes, []).append(address)


class PlanDevice(PlainDevice):
    name = "planned"


_LOCATIONS = {}


def locations():
    """Two devices of one type and a recycling one, registered once."""
    if not _LOCATIONS:
        for device in (PlanDevice(0), PlanDevice(1), RecyclingDevice()):
            location = device.register()
            _LOCATIONS[str(location)] = location
    return _LOCATIONS
