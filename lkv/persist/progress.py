"""Says how far a save or a check of a file has come, from one second on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

__all__ = ["CHUNK", "Meter", "Progress"]

# None: a bar if it takes more than a second and somebody watches. True: always; False: never. Else (done, total) bytes.
Progress = bool | Callable[[int, int], object] | None

CHUNK = 8 << 20  # bytes from one report to the next

_PATIENCE = 1.0  # seconds


class Meter:
    """Counts bytes, and shows them as `progress` asks."""

    def __init__(self, total: int, what: str, progress: Progress) -> None:
        self._total, self._what, self._done = total, what, 0
        self._call = progress if callable(progress) else None
        self._shown = progress is True or (progress is None and sys.stderr is not None and sys.stderr.isatty())
        self._from = 0.0 if progress is True else time.monotonic() + _PATIENCE
        self._bar: Any = None

    def advance(self, nbytes: int) -> None:
        """Say that so many more bytes are done."""
        self._done += nbytes
        if self._call is not None:
            self._call(self._done, self._total)
        elif self._shown and time.monotonic() >= self._from:
            if self._bar is None:
                self._bar = _bar(self._total, self._what)
            self._bar.update(self._done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(total: int, what: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _PlainBar(total, what)
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1000)


class _PlainBar:
    """A line of text that is written anew at most ten times a second."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self.n = total, what, 0
        self._next = 0.0

    def update(self, nbytes: int) -> None:
        self.n += nbytes
        now = time.monotonic()
        if now >= self._next or self.n >= self._total:
            self._next = now + 0.1
            share = 100 * self.n // max(self._total, 1)
            print(f"\r{self._what}: {share:3d} % of {self._total / 1e6:.1f} MB", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)
