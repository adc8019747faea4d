import os
import subprocess
import sys

import pytest
from helpers.fake_devices import PlainDevice, QueueingDevice

import lkv
from lkv import LatentKvCache, Storage
from lkv.errors import DeviceError, DeviceUnavailableError, OutOfMemoryError
from lkv.testing import DeviceConformance, check_device

PLAIN, QUEUEING = PlainDevice(), QueueingDevice()
PLAIN.register()
QUEUEING.register()


class TestCpu(DeviceConformance):
    location = "cpu"


class TestPlainPythonDevice(DeviceConformance):
    location = "plain:0"
    more_than_it_has = 1 << 40


class TestQueueingPythonDevice(DeviceConformance):
    location = "queueing:0"
    more_than_it_has = 1 << 40


def test_check_device_runs_the_whole_suite():
    assert len(check_device("cpu")) == sum(name.startswith("test_") for name in dir(DeviceConformance))


def test_check_device_fails_on_a_device_that_does_not_clear_its_memory():
    class Dirty(PlainDevice):
        name = "dirty"

        def allocate(self, nbytes):
            import ctypes

            address = super().allocate(nbytes)
            ctypes.memset(address, 7, nbytes)
            return address

    Dirty().register()
    with pytest.raises(AssertionError):
        check_device("dirty:0", more_than_it_has=1 << 40)


def test_a_second_device_of_the_same_name_is_refused():
    with pytest.raises(DeviceError, match="plain:0 is registered already"):
        PlainDevice().register()


def test_an_unknown_device_is_named_with_the_known_ones():
    with pytest.raises(DeviceUnavailableError, match="nowhere:3"):
        Storage(4, device="nowhere:3")


def test_an_exception_in_a_device_method_is_the_cause_of_the_error():
    storage = Storage(64, device="plain:0")
    PLAIN.fail_next = "copy_2d"
    with pytest.raises(DeviceError, match="injected failure of copy_2d") as caught:
        storage.write_host(bytes(64))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert storage.poisoned


def test_running_out_of_device_memory_carries_the_numbers():
    small = PlainDevice(ordinal=1, capacity=10_000)
    small.register()
    Storage(4000, device="plain:1")
    with pytest.raises(OutOfMemoryError) as caught:
        Storage(20_000, device="plain:1")
    assert (caught.value.device, caught.value.requested, caught.value.free) == ("plain:1", 20_000, 10_000)


@pytest.mark.parametrize("failing", range(6))
def test_a_cache_that_cannot_be_built_leaves_no_memory_behind(failing):
    device = PlainDevice(ordinal=10 + failing, capacity=(failing + 1) * 100 * 4 * 4)
    device.register()
    with pytest.raises(OutOfMemoryError):
        LatentKvCache.with_capacity(4, 100, [(4,), (4,)], "float32", str(device.location))
    assert not device.blocks


def test_a_failing_copy_in_a_step_publishes_nothing():
    import numpy as np

    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "float32", "plain:0")
    with cache.step(1) as step:
        step.append(0, [np.ones((1, 4), np.float32)])
    with pytest.raises(DeviceError), cache.step(1) as step:
        PLAIN.fail_next = "copy_2d"
        step.append(0, [np.ones((1, 4), np.float32)])
    assert cache.cached_len == 1


def test_an_installed_package_can_offer_devices_by_entry_point(tmp_path):
    package = tmp_path / "offered_device.py"
    package.write_text(
        "from helpers.fake_devices import PlainDevice\n"
        "class Offered(PlainDevice):\n    name = 'offered'\n"
        "def register():\n    Offered().register()\n"
    )
    info = tmp_path / "offered_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered-device\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lkv.devices]\noffered = offered_device:register\n")
    code = "import lkv; print(lkv.Storage(8, device='offered:0').device)"
    paths = os.pathsep.join(
        [str(tmp_path), os.path.dirname(os.path.dirname(os.path.abspath(lkv.__file__))), os.path.dirname(__file__)]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.stdout.strip() == "offered:0", done.stderr


def test_an_interpreter_may_end_with_device_memory_alive():
    code = (
        "from helpers.fake_devices import PlainDevice\nimport lkv\nPlainDevice().register()\n"
        "keep = [lkv.Storage(64, device='plain:0') for _ in range(3)]\nlease = keep[0].read()\n"
    )
    paths = os.pathsep.join(
        [os.path.dirname(os.path.dirname(os.path.abspath(lkv.__file__))), os.path.dirname(__file__)]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
