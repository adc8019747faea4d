"""The host. Its memory functions are part of the core; here is only what Python asks of it."""

from __future__ import annotations

from lkv.devices.location import DeviceLocation
from lkv.errors import DeviceUnavailableError

__all__ = ["available", "require"]

_HOST = DeviceLocation("cpu")


def available() -> list[tuple[DeviceLocation, str]]:
    """Return the host as the one location of this type."""
    return [(_HOST, "host memory")]


def require(location: DeviceLocation) -> None:
    """Raise `DeviceUnavailableError` unless the location is the host."""
    if location != _HOST:
        raise DeviceUnavailableError(
            f"device: expected 'cpu', there is one host; got 'cpu:{location.ordinal}'", expected=_HOST, actual=location
        )
