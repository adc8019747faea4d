import pickle
from importlib.metadata import requires, version
from importlib.resources import files
from pathlib import Path

import pytest

import lkv


def test_the_version_is_that_of_the_distribution():
    assert lkv.__version__ == version("latent-kv")


def test_the_include_folder_holds_the_header():
    header = Path(lkv.get_include()) / "lkv.h"
    assert "lkv_api" in header.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["py.typed", "_storage.pyi", "_storage.pxd"])
def test_the_package_ships_its_types(name):
    assert files("lkv").joinpath(name).is_file()


@pytest.mark.parametrize("name", lkv.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(lkv, name) is not None


def test_only_numpy_and_ml_dtypes_are_needed_at_run_time():
    needed = {line.split(";")[0].split(">")[0].strip() for line in requires("latent-kv") if "extra ==" not in line}
    assert needed == {"numpy", "ml_dtypes"}


def test_allocation_ids_are_positive_distinct_and_print_as_such():
    first, second = lkv.AllocId.next(), lkv.AllocId.next()
    assert 0 < first < second
    assert (repr(lkv.AllocId(7)), str(lkv.AllocId(7))) == ("alloc 7", "alloc 7")
    assert pickle.loads(pickle.dumps(first)) == first
    assert type(pickle.loads(pickle.dumps(first))) is lkv.AllocId
