"""A device written in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import ClassVar

from lkv.devices.location import DeviceLocation

__all__ = ["CopyKind", "Device"]


class CopyKind(IntEnum):
    """Which ends of a copy are on the device."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class Device(ABC):
    """Subclass this, and `register` an instance, to let lkv keep storages where it does not know how to by itself.

    The methods are called from any thread, several at once, never under a lock of lkv. An exception becomes
    `DeviceError` (`OutOfMemoryError` for a `MemoryError`) for whoever asked. Addresses are integers; a stream is the
    integer that stands for a queue of work on the device, 0 for the default one.

    A device whose methods finish their work before they return needs only the abstract ones. One that queues work
    overrides `synchronize`, `current_stream` and the four event methods too: leases order work of different streams
    by events.

    Attributes
    ----------
    name : str
        The type in ``"name:ordinal"``.
    ordinal : int
        Which device of that type.
    dlpack_device_type : int
        DLPack's number for the type of memory; 12 (``kDLExtDev``) for what has no number of its own.
    host_accessible : bool
        Whether the CPU may load and store through the addresses.
    """

    name: ClassVar[str]
    ordinal: int = 0
    dlpack_device_type: ClassVar[int] = 12
    host_accessible: ClassVar[bool] = False

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` zeroed bytes, aligned to 256; raise `MemoryError` if there are not as many."""

    @abstractmethod
    def free(self, address: int, nbytes: int) -> None:
        """Take the memory back, without waiting. Not called any more once the interpreter ends."""

    @abstractmethod
    def copy_2d(
        self,
        kind: CopyKind,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        stream: int,
    ) -> None:
        """Copy `height` runs of `width` bytes, a pitch apart, after the earlier work of `stream`.

        When it returns, a host source may be overwritten, and a host destination is complete.
        """

    @abstractmethod
    def fill_zero(self, address: int, nbytes: int, stream: int) -> None:
        """Clear memory, after the earlier work of `stream`."""

    def synchronize(self, stream: int) -> None:
        """Return once the earlier work of `stream` is done."""
        raise NotImplementedError

    def current_stream(self) -> int:
        """Return the stream that the calling thread works on."""
        return 0

    def record_event(self, stream: int) -> object:
        """Return an event that is reached when the earlier work of `stream` is done."""
        raise NotImplementedError

    def wait_event(self, stream: int, event: object) -> None:
        """Let later work of `stream` wait for the event; the caller does not wait."""
        raise NotImplementedError

    def event_done(self, event: object) -> bool:
        """Return whether the event has been reached."""
        raise NotImplementedError

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes."""
        raise NotImplementedError

    @property
    def location(self) -> DeviceLocation:
        """The name and the ordinal."""
        return DeviceLocation(self.name, self.ordinal)

    def register(self) -> DeviceLocation:
        """Make the device known under its location, until the process ends.

        Raises
        ------
        DeviceError
            If a device of that name and ordinal is registered already.
        """
        from lkv._storage import register_device

        register_device(self)
        return self.location
