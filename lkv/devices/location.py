"""Where memory lives: a device type and an ordinal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lkv.errors import ArgumentTypeError, DeviceUnavailableError

__all__ = ["DeviceLocation"]

_SPELLING = re.compile(r"([a-z][a-z0-9_]*)(?::([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class DeviceLocation:
    """A device type and an ordinal, such as ``cuda:0``.

    Attributes
    ----------
    type : str
        ``"cpu"``, ``"cuda"`` or the name of a registered device.
    ordinal : int
        Which device of that type.
    """

    type: str
    ordinal: int = 0

    @classmethod
    def parse(cls, text: str) -> DeviceLocation:
        """Read ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; without an ordinal it is 0."""
        if not isinstance(text, str):
            raise ArgumentTypeError(f"device: expected a str, got {text!r}", expected="a str", actual=text)
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise DeviceUnavailableError(
                f"device: expected a name such as 'cpu' or 'cuda:0', got {text!r}",
                expected="type[:ordinal]",
                actual=text,
            )
        return cls(match[1], int(match[2] or 0))

    def __str__(self) -> str:
        return self.type if self.type == "cpu" and self.ordinal == 0 else f"{self.type}:{self.ordinal}"
