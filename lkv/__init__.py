"""A cache for the decode state of transformer language models."""

from __future__ import annotations

from pathlib import Path

from lkv import errors

try:
    from lkv._storage import LayerRows, Lease, Step, Storage, View, bits, c_api_address
except ModuleNotFoundError as error:
    if error.name != "lkv._storage":
        raise
    raise ImportError(
        f"{Path(__file__).parent} is lkv's source without its compiled module: "
        "start Python elsewhere to use an installed lkv, or build this one with pip install -e ."
    ) from error
from lkv._version import __version__
from lkv.cache import KvCache, KvLayer, KvSlot, LatentCache, LatentKvCache, LatentSlot, LazyKvCache
from lkv.dtypes import DType
from lkv.ids import AllocId
from lkv.layout import Layout, SlotSpec
from lkv.persist import load, save

__all__ = [
    "AllocId",
    "DType",
    "KvCache",
    "KvLayer",
    "KvSlot",
    "LatentCache",
    "LatentKvCache",
    "LatentSlot",
    "LayerRows",
    "Layout",
    "LazyKvCache",
    "Lease",
    "SlotSpec",
    "Step",
    "Storage",
    "View",
    "__version__",
    "bits",
    "c_api_address",
    "errors",
    "get_include",
    "load",
    "save",
]


def get_include() -> str:
    """Return the folder that holds ``lkv.h``, for a C or C++ compiler's ``-I``."""
    package = Path(__file__).resolve().parent
    installed = package / "include"
    return str(installed if (installed / "lkv.h").is_file() else package.parent / "include")
