"""Storages with a content, and how many there are."""

import gc

import numpy as np

from lkv import Storage
from lkv._storage import host_memory


def live():
    """Storages alive and their bytes."""
    return host_memory()["live_buffers"], host_memory()["live_bytes"]


def settled():
    """As live, without what only the collector would free."""
    gc.collect()
    return live()


def filled(shape, dtype="uint8", **options):
    """A storage of which no byte is zero, written once."""
    storage = Storage(shape, dtype, **options)
    with storage.write() as lease:
        lease.numpy().reshape(-1).view(np.uint8)[...] = np.arange(storage.nbytes) % 251 + 1
    return storage
