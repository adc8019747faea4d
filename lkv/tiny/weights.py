"""Reads a safetensors file with NumPy alone."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lkv.mla._arrays import Array
from lkv.persist.header import _FILE_DTYPES, HEADER_LIMIT, refuse

__all__ = ["read_tensors"]

_DTYPES = {name: dtype for dtype, name in _FILE_DTYPES.items()}


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Read all tensors of a safetensors file, and the metadata in its header.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    tensors : dict of str to array
        Read-only.
    metadata : dict of str to str

    Raises
    ------
    RestoreError
        If the file is cut or no safetensors file: names the field, what was expected and what was found.
    OSError
        If it cannot be read.
    """
    data = Path(path).read_bytes()
    if len(data) < 8:
        refuse("file length", "at least 8 bytes", len(data))
    length = int.from_bytes(data[:8], "little")
    begin, most = 8 + length, min(len(data) - 8, HEADER_LIMIT)
    if length > most:
        refuse("header length", range(most + 1), length)
    try:
        entries = json.loads(data[8:begin])
    except ValueError as error:
        refuse("header", "JSON", str(error))
    if not isinstance(entries, dict):
        refuse("header", "an object", entries)
    metadata = entries.pop("__metadata__", {})
    return {name: _tensor(name, entry, memoryview(data)[begin:]) for name, entry in entries.items()}, metadata


def _tensor(name: str, entry: Any, data: memoryview) -> Array:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            refuse(name, "a tensor's entry", entry)
    if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        refuse(f"{name}: shape", "counts", shape)
    if dtype not in _DTYPES:
        refuse(f"{name}: dtype", tuple(_DTYPES), dtype)
    kind = _DTYPES[dtype].numpy
    if not 0 <= start <= end <= len(data) or end - start != prod(shape) * kind.itemsize:
        refuse(f"{name}: data_offsets", f"{prod(shape) * kind.itemsize} of {len(data)} bytes", (start, end))
    return np.frombuffer(data[start:end], kind).reshape(shape)
