"""What the operating system says about memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["free_memory", "resident_bytes"]

_UNKNOWN_FREE = 4 << 30


def free_memory() -> int:
    """Bytes a process may still take: the system's available memory, or the control group's rest if that is less."""
    bounds = [_available(), _cgroup_rest()]
    return min((bound for bound in bounds if bound is not None), default=_UNKNOWN_FREE)


def resident_bytes(spans: Iterable[tuple[int, int]]) -> int | None:
    """Bytes of the pages that hold the address ranges and are in memory (``mincore``); None where it is unknown.

    Parameters
    ----------
    spans : iterable of (int, int)
        Half-open address ranges inside mapped memory. A page under several of them counts once.
    """
    if not sys.platform.startswith("linux"):
        return None
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    page = mmap.PAGESIZE
    resident = end = 0
    for lo, hi in sorted((start // page * page, -(-stop // page) * page) for start, stop in spans):
        first = max(lo, end)
        if hi <= first:
            continue
        flags = np.empty((hi - first) // page, np.uint8)
        if mincore(first, hi - first, flags.ctypes.data) != 0:
            return None
        resident += page * int(np.count_nonzero(flags & 1))
        end = hi
    return resident


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_rest() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
