import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.ids import named

from lkv.devices import DeviceLocation, available, resolve
from lkv.errors import ArgumentTypeError, DeviceUnavailableError


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.mark.parametrize(
    ("text", "location", "printed"),
    [
        ("cpu", DeviceLocation("cpu", 0), "cpu"),
        ("cpu:0", DeviceLocation("cpu", 0), "cpu"),
        ("cuda", DeviceLocation("cuda", 0), "cuda:0"),
        ("cuda:1", DeviceLocation("cuda", 1), "cuda:1"),
    ],
)
def test_a_location_is_read_and_printed(text, location, printed):
    assert DeviceLocation.parse(text) == location
    assert str(location) == printed
    assert DeviceLocation.parse(str(location)) == location
    assert pickle.loads(pickle.dumps(location)) == location


@pytest.mark.parametrize(
    "text", ["", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", ":0", "CPU", "cpu ", "cuda:1\n", "cuda:٣"]
)
def test_a_malformed_location_is_refused(text):
    with pytest.raises(DeviceUnavailableError, match="expected a name such as"):
        DeviceLocation.parse(text)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "cpu:0",
        DeviceLocation("cpu"),
        SimpleNamespace(type="cpu", index=None),
        SimpleNamespace(type="cpu", index=0),
    ],
)
def test_the_host_is_found_by_every_way_of_naming_it(device):
    assert resolve(device) == DeviceLocation("cpu", 0)


def test_a_torch_device_names_a_location():
    torch = pytest.importorskip("torch")
    assert resolve(torch.device("cpu")) == DeviceLocation("cpu")
    with pytest.raises(DeviceUnavailableError, match="'cuda:8'"):
        resolve(torch.device("cuda", 8))


def test_there_is_one_host():
    with pytest.raises(DeviceUnavailableError, match="cpu:1"):
        resolve("cpu:1")


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(DeviceUnavailableError, match="expected one of cpu, cuda, or a registered device; got 'tpu:0'"):
        resolve("tpu")


@pytest.mark.parametrize(
    "device", [None, 0, True, b"cpu", ("cpu", 0), SimpleNamespace(type="cpu", index=1.0)], ids=named
)
def test_something_that_names_no_device_is_refused(device):
    with pytest.raises(ArgumentTypeError, match=r"^device: expected"):
        resolve(device)


@pytest.mark.usefixtures("no_cupy")
def test_cuda_without_cupy_names_the_extras():
    with pytest.raises(DeviceUnavailableError, match=r"'cuda:8'.*latent-kv\[cuda12\].*latent-kv\[cuda13\]"):
        resolve("cuda:8")


def test_a_cupy_that_cannot_be_imported_is_told_from_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("import a_library_that_is_not_there")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceUnavailableError, match=r"'cuda:8'.*CuPy cannot be imported: .*a_library_that"):
        resolve("cuda:8")


@pytest.mark.usefixtures("no_cupy")
def test_every_known_device_is_listed_with_what_it_lacks():
    listed = {str(location): text for location, text in available()}
    assert listed["cpu"] == "host memory"
    assert listed["cuda:0"].startswith("unavailable: CuPy is not importable")


def test_importing_lkv_imports_no_cupy():
    code = "import sys, lkv, lkv.devices; lkv.Storage(8).copy(); print('cupy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
