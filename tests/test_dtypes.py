import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers.ids import named

from lkv import DType
from lkv.dtypes import ALL
from lkv.errors import DTypeMismatchError

# name, short name, code of the C header, bytes, DLPack code, DLPack bits
TABLE = [
    ("float64", "f64", 1, 8, 2, 64),
    ("float32", "f32", 2, 4, 2, 32),
    ("float16", "f16", 3, 2, 2, 16),
    ("bfloat16", "bf16", 4, 2, 4, 16),
    ("float8_e4m3fn", "f8_e4m3fn", 5, 1, 10, 8),
    ("float8_e5m2", "f8_e5m2", 6, 1, 12, 8),
    ("int64", "i64", 7, 8, 0, 64),
    ("int32", "i32", 8, 4, 0, 32),
    ("int16", "i16", 9, 2, 0, 16),
    ("int8", "i8", 10, 1, 0, 8),
    ("uint8", "u8", 11, 1, 1, 8),
    ("bool", "bool", 12, 1, 6, 8),
]


def test_the_table_is_the_one_of_the_c_header():
    assert [(d.name, d.short, d.code, d.itemsize, d.dl_code, d.dl_bits) for d in ALL] == TABLE


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_type_is_found_by_each_of_its_names_and_forms(dtype):
    forms = [dtype, dtype.name, dtype.short, dtype.numpy, dtype.numpy.type, f"torch.{dtype.name}", f"np.{dtype.name}"]
    assert all(DType.of(form) is dtype for form in forms)
    assert DType.from_code(dtype.code) is dtype


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_numpy_agrees_on_the_width(dtype):
    assert dtype.numpy.itemsize == dtype.itemsize
    assert dtype.dl_bits == 8 * dtype.itemsize


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("half", "float16"),
        ("float", "float32"),
        ("double", "float64"),
        ("torch.half", "float16"),
        ("BF16", "bfloat16"),
        (" bf16 ", "bfloat16"),
        ("ml_dtypes.bfloat16", "bfloat16"),
        ("fp8_e4m3fn", "float8_e4m3fn"),
        ("long", "int64"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (np.longlong, "int64"),
        (np.dtype("<f4"), "float32"),
        (bool, "bool"),
    ],
)
def test_usual_spellings_are_understood(spelling, name):
    assert DType.of(spelling).name == name


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "f",
        "complex64",
        "bfloat",
        4,
        True,
        1.0,
        float,
        int,
        object,
        np.floating,
        np.float32(1),
        np.uint16,
        np.dtype(">f4"),
        np.dtype([("a", "f4")]),
        np.zeros(2, "f4"),
        ml_dtypes.float8_e4m3fnuz,
        [],
    ],
    ids=named,
)
def test_an_unknown_type_is_refused_with_the_argument_and_the_known_names(value):
    with pytest.raises(DTypeMismatchError, match=r"^kind: expected one of float64 \(f64\), .*, bool; got ") as caught:
        DType.of(value, "kind")
    assert isinstance(caught.value, TypeError)
    assert caught.value.actual is value


@pytest.mark.parametrize("code", [0, 13, -1, True, 4.0, None, "4"])
def test_an_unknown_code_is_refused(code):
    with pytest.raises(DTypeMismatchError):
        DType.from_code(code)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_pickling_and_copying_give_the_interned_object(dtype):
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert copy.copy(dtype) is dtype
    assert copy.deepcopy(dtype) is dtype


def test_types_are_equal_only_to_themselves_and_hashable():
    assert len(set(ALL)) == len(ALL)
    assert DType.of("f32") == DType.of("float32") != DType.of("f16")
    assert DType.of("f32") != "float32"


def test_a_type_is_immutable():
    with pytest.raises(AttributeError):
        DType.of("f32").itemsize = 8


def test_a_type_prints_its_name():
    assert str(DType.of("bf16")) == f"{DType.of('bf16')}" == "bfloat16"
    assert repr(DType.of("bf16")) == "DType(bfloat16)"


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_torch_types_map_both_ways(dtype):
    torch = pytest.importorskip("torch")
    assert isinstance(dtype.torch, torch.dtype)
    assert dtype.torch.itemsize == dtype.itemsize
    assert DType.of(dtype.torch) is dtype


def test_an_unknown_torch_type_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeMismatchError, match=r"torch\.complex64"):
        DType.of(torch.complex64)


def test_a_missing_torch_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"latent-kv\[torch\]"):
        _ = DType.of("bf16").torch


def test_looking_types_up_imports_no_torch():
    code = "import sys, lkv; lkv.DType.of('torch.bfloat16'); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
