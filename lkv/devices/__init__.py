"""The devices that can hold a storage.

Others are added by `Device.register`, from C by ``device_register``, or by an installed package: an entry point of the
group ``lkv.devices``, named as the device type, is called when the type is first asked for, and registers its devices.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from lkv.devices import cpu, cuda
from lkv.devices.base import CopyKind, Device
from lkv.devices.location import DeviceLocation
from lkv.errors import ArgumentTypeError, DeviceUnavailableError

__all__ = ["CopyKind", "Device", "DeviceLocation", "available", "resolve"]

_BACKENDS = {"cpu": cpu, "cuda": cuda}


def resolve(device: object) -> DeviceLocation:
    """Return the location that a device argument means, once it is known to be usable.

    Parameters
    ----------
    device : str, DeviceLocation or torch.device
        ``"cpu"``, ``"cuda:1"``, or any object with a ``type`` and an ``index``.

    Raises
    ------
    DeviceUnavailableError
        If the device is unknown, or cannot be used here; the message says what is missing.
    ArgumentTypeError
        If the argument is nothing that names a device.
    """
    location = _location(device)
    backend = _BACKENDS.get(location.type)
    if backend is not None:
        backend.require(location)
    else:
        _require_registered(location)
    return location


def available() -> list[tuple[DeviceLocation, str]]:
    """Return each known location with its description, or with ``"unavailable: "`` and the reason."""
    return [entry for backend in _BACKENDS.values() for entry in backend.available()]


def _require_registered(location: DeviceLocation) -> None:
    from lkv._storage import device_known

    if device_known(location):
        return
    offered = entry_points(group="lkv.devices")
    if location.type in offered.names:
        offered[location.type].load()()  # registers the devices of its type
        if device_known(location):
            return
    known = ", ".join([*_BACKENDS, *sorted(offered.names)])
    raise DeviceUnavailableError(
        f"device: expected one of {known}, or a registered device; got {str(location)!r}",
        expected=tuple(_BACKENDS),
        actual=location,
    )


def _location(device: object) -> DeviceLocation:
    if isinstance(device, DeviceLocation):
        return device
    if isinstance(device, str):
        return DeviceLocation.parse(device)
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if isinstance(kind, str) and (index is None or type(index) is int):
        return DeviceLocation.parse(kind if index is None else f"{kind}:{index}")
    raise ArgumentTypeError(
        f"device: expected a str such as 'cpu' or 'cuda:0', a DeviceLocation or a torch.device; got {device!r}",
        actual=device,
    )
