"""What a device must do, as tests to run on one's own.

Subclass `DeviceConformance` under pytest, or call `check_device`::

    class TestMyDevice(DeviceConformance):
        location = "mine:0"
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np

from lkv._storage import Storage, host_memory
from lkv.cache.kv import KvCache
from lkv.cache.latent_kv import LatentKvCache
from lkv.devices import resolve
from lkv.errors import GeometryError, LkvError, OutOfMemoryError

__all__ = ["DeviceConformance", "check_device"]


class DeviceConformance:
    """Each method is one property of a device; `location` names the device.

    Attributes
    ----------
    location : str
        ``"name:ordinal"`` of a registered device.
    more_than_it_has : int
        Bytes that no allocation on the device can get.
    """

    location: ClassVar[str]
    more_than_it_has: ClassVar[int] = 1 << 62

    def test_the_location_resolves_to_itself(self) -> None:
        """The device is known under its name."""
        location = resolve(self.location)
        assert resolve(str(location)) == location
        assert Storage(16, device=self.location).device == location

    def test_fresh_memory_is_zero_and_aligned(self) -> None:
        """Also when freed memory is handed out again."""
        for nbytes in (1, 255, 4096, 1 << 20):
            for _ in range(3):
                storage = Storage(nbytes, device=self.location)
                assert storage.address % 256 == 0
                assert not any(storage.read_host())
                storage.write_host(b"\xff" * nbytes)

    def test_bytes_come_back_as_they_were_written(self) -> None:
        """Whole, in part, at both ends, and empty."""
        data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
        storage = Storage(data.size, device=self.location)
        storage.write_host(data.tobytes())
        assert storage.read_host() == data.tobytes()
        storage.write_host(b"abc", 0)
        storage.write_host(b"xyz", data.size - 3)
        storage.write_host(b"", 5)
        assert storage.read_host(0, 3) == b"abc"
        assert storage.read_host(data.size - 3) == b"xyz"
        assert storage.read_host(3, data.size - 3) == data[3:-3].tobytes()
        assert storage.read_host(7, 7) == b""

    def test_a_host_source_may_be_overwritten_at_once(self) -> None:
        """A write has taken its bytes when it returns."""
        storage = Storage(1 << 16, device=self.location)
        source = bytearray(b"\x01" * (1 << 16))
        storage.write_host(source)
        source[:] = b"\x02" * (1 << 16)
        assert set(storage.read_host()) == {1}

    def test_copies_reach_other_storages_and_devices(self) -> None:
        """On the device, to the host and back."""
        data = np.arange(5000, dtype=np.uint8).tobytes()
        there = Storage(5000, device=self.location)
        there.write_host(data)
        beside, home = there.copy(), there.copy("cpu")
        there.write_host(bytes(5000))
        assert beside.read_host() == home.read_host() == data
        assert home.copy(self.location).read_host() == data

    def test_a_latent_cache_keeps_its_rows(self) -> None:
        """Appends by steps, in both layouts, of one row and of many."""
        rng = np.random.default_rng(1)
        for layout in ("separate", "packed"):
            cache = LatentKvCache.with_capacity(2, 50, [(16,), (4,), ()], "float32", self.location, layout=layout)
            slots = [rng.random((2, 50, *cache.slot_trailing(s)), np.float32) for s in range(3)]
            for lo, hi in ((0, 1), (1, 30), (30, 50)):
                with cache.step(hi - lo) as step:
                    for layer in range(2):
                        step.append(layer, [array[layer, lo:hi] for array in slots])
            for layer in range(2):
                for s, array in enumerate(slots):
                    np.testing.assert_array_equal(_rows(cache, layer, s), array[layer])
            cache.wipe()
            assert not _rows(cache, 1, 0).any()

    def test_a_key_value_cache_keeps_its_rows(self) -> None:
        """Appends along axis 2 are strided copies."""
        rng = np.random.default_rng(2)
        cache = KvCache.with_capacity(1, 3, 8, 20, "float16", self.location)
        k, v = (rng.random((1, 3, 20, 8)).astype(np.float16) for _ in range(2))
        for lo, hi in ((0, 1), (1, 12), (12, 20)):
            with cache.step(hi - lo) as step:
                step.append(0, [k[:, :, lo:hi], v[:, :, lo:hi]])
        np.testing.assert_array_equal(_rows(cache, 0, 0), k)
        np.testing.assert_array_equal(_rows(cache, 0, 1), v)

    def test_too_much_memory_is_refused_and_nothing_stays(self) -> None:
        """The error carries the numbers."""
        before = host_memory()["live_buffers"]
        try:
            Storage(self.more_than_it_has, device=self.location)
        except OutOfMemoryError as error:
            assert error.requested == self.more_than_it_has, error.requested
            assert error.device == str(resolve(self.location)), error.device
        except GeometryError as error:
            raise AssertionError("more_than_it_has must be a size that fits the address space") from error
        else:
            raise AssertionError("an impossible allocation succeeded")
        assert host_memory()["live_buffers"] == before
        Storage(64, device=self.location)

    def test_memory_goes_with_the_last_reference(self) -> None:
        """A thousand storages leave none behind."""
        before = host_memory()["live_buffers"]
        for _ in range(1000):
            Storage(256, device=self.location)
        assert host_memory()["live_buffers"] == before

    def test_threads_may_work_on_it_at_once(self) -> None:
        """Eight threads write and read their own storages."""
        failures: list[object] = []

        def work(tag: int) -> None:
            try:
                storage = Storage(4096, device=self.location)
                for _ in range(50):
                    storage.write_host(bytes([tag]) * 4096)
                    if set(storage.read_host()) != {tag}:
                        failures.append(tag)
            except LkvError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(tag,)) for tag in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures


def check_device(location: str, *, more_than_it_has: int = DeviceConformance.more_than_it_has) -> list[str]:
    """Run every test of `DeviceConformance` on a device; return the names of those that passed.

    Raises
    ------
    AssertionError, LkvError
        From the first that fails.
    """
    suite = type("_", (DeviceConformance,), {"location": location, "more_than_it_has": more_than_it_has})()
    names = [name for name in dir(suite) if name.startswith("test_")]
    for name in names:
        getattr(suite, name)()
    return names


def _rows(cache: LatentKvCache | KvCache, layer: int, slot: int) -> np.ndarray[Any, Any]:
    """All rows of a slot, by way of the host."""
    seen = cache.layers[layer]
    assert seen is not None
    storage, layout = seen[slot].storage, seen[slot].layout
    flat = np.frombuffer(storage.copy("cpu").alias().numpy().tobytes(), cache.dtype.numpy)
    strides = [stride * cache.dtype.itemsize for stride in layout.strides]
    return np.lib.stride_tricks.as_strided(flat[layout.offset :], layout.shape, strides).copy()
