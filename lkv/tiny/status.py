"""A line at the bottom of a terminal that stays while text scrolls above it."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

__all__ = ["StatusLine"]

_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class StatusLine:
    """Keeps the last line of a terminal out of its scrolling region and writes to it; leaving the block gives it back.

    Parameters
    ----------
    terminal : text file
        What `wanted` is true of. Text may scroll by through another file on the same terminal.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._size = (0, 0)

    @staticmethod
    def wanted(stream: TextIO | None) -> bool:
        """Whether a stream is a terminal that understands the control sequences; None is a closed one."""
        return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, text: str) -> None:
        """Replace the line's text, cut to the terminal's width."""
        columns, lines = self._size
        with suppress(OSError):  # a terminal that does not tell its size keeps the last known
            columns, lines = os.get_terminal_size(self._terminal.fileno())
        if lines < 3:
            return
        prepare = ""
        if (columns, lines) != self._size:  # down and up again: scrolls if the cursor is where the status goes
            prepare = f"\x1bD\x1b[A{_SAVE}\x1b[1;{lines - 1}r{_RESTORE}"
            self._size = columns, lines
        self._write(f"{prepare}{_SAVE}\x1b[{lines};1H{_CLEAR}{text[:columns]}{_RESTORE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._size != (0, 0):
            self._write(f"{_SAVE}\x1b[r\x1b[{self._size[1]};1H{_CLEAR}{_RESTORE}")

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()
