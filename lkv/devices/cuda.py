"""NVIDIA GPUs, through CuPy."""

from __future__ import annotations

from importlib.util import find_spec

from lkv.devices.location import DeviceLocation
from lkv.errors import DeviceUnavailableError

__all__ = ["available", "require"]


def available() -> list[tuple[DeviceLocation, str]]:
    """Return the first GPU with the reason why it cannot be used."""
    return [(DeviceLocation("cuda"), f"unavailable: {_missing()}")]


def require(location: DeviceLocation) -> None:
    """Raise `DeviceUnavailableError` that says what is missing."""
    raise DeviceUnavailableError(f"device: {str(location)!r} is unavailable: {_missing()}", actual=location)


def _missing() -> str:
    if find_spec("cupy") is None:
        return "CuPy is not importable; pip install 'latent-kv[cuda12]' or 'latent-kv[cuda13]'"
    return "this version of lkv has no CUDA backend yet"
