"""The exceptions lkv raises; each one also derives from the builtin a caller would catch."""

from __future__ import annotations

__all__ = [
    "ArgumentTypeError",
    "CapacityError",
    "ConsumedError",
    "DTypeMismatchError",
    "DeviceError",
    "DeviceMismatchError",
    "DeviceUnavailableError",
    "ForkedError",
    "GeometryError",
    "IncompleteStepError",
    "LayerIndexError",
    "LeaseEndedError",
    "LeaseTimeoutError",
    "LkvError",
    "OutOfMemoryError",
    "PoisonedError",
    "ReadOnlyError",
    "RebindRefused",
    "RestoreError",
    "ShapeMismatchError",
    "ShutdownError",
    "StepInProgressError",
    "UnpopulatedLayerError",
    "WouldDeadlockError",
]


class LkvError(Exception):
    """Base of every exception that lkv raises on purpose.

    Parameters
    ----------
    message : str
        Names the argument, what was expected and what came.
    expected, actual : object, optional
        The two sides of the failed comparison, for callers that handle the error in code.
    """

    expected: object
    actual: object

    def __init__(self, message: str, *, expected: object = None, actual: object = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class ArgumentTypeError(LkvError, TypeError):
    """Raised when an argument is of a kind that is never accepted, such as a bool or a float for an index."""


class GeometryError(LkvError, ValueError):
    """Raised when a shape, a count or a size is degenerate or does not fit the address space."""


class ShapeMismatchError(LkvError, ValueError):
    """Raised when an array does not have the shape its slot takes, or rows disagree across slots."""


class DTypeMismatchError(LkvError, TypeError):
    """Raised when an element type is unknown, or is not the one a slot holds; lkv never casts."""


class DeviceMismatchError(LkvError, ValueError):
    """Raised when an array lives on another device than the storage it is meant for."""


class CapacityError(LkvError, ValueError):
    """Raised when a write would go past the rows that were allocated."""


class LayerIndexError(LkvError, IndexError):
    """Raised when a layer, a slot or a row index is negative or past the end."""


class UnpopulatedLayerError(LkvError, LookupError):
    """Raised when a layer that holds no storage is read or written."""


class IncompleteStepError(LkvError, RuntimeError):
    """Raised when a step would publish rows that some populated layer has not written."""


class StepInProgressError(LkvError, RuntimeError):
    """Raised when an operation needs the cache to itself while a step is open."""


class ConsumedError(LkvError, RuntimeError):
    """Raised when a functional cache is used after an append has handed back its successor."""


class LeaseTimeoutError(LkvError, TimeoutError):
    """Raised when a lease was not granted within the given time."""


class LeaseEndedError(LkvError, RuntimeError):
    """Raised when a lease or a step is used after its end."""


class ReadOnlyError(LkvError, ValueError):
    """Raised when read-only memory, or rows leased for reading, would be written."""


class ShutdownError(LkvError, RuntimeError):
    """Raised in a thread that waits for a lease while the interpreter ends."""


class WouldDeadlockError(LkvError, RuntimeError):
    """Raised when a thread would wait for rows that the same thread already leases."""


class PoisonedError(LkvError, RuntimeError):
    """Raised when a storage is read after a write into it failed half way."""


class ForkedError(LkvError, RuntimeError):
    """Raised when a child process uses a storage that was made before the fork."""


class OutOfMemoryError(LkvError, MemoryError):
    """Raised when a device cannot hold an allocation; nothing half-made stays behind.

    Parameters
    ----------
    message : str
        Names the device, the bytes asked for and the bytes free.
    device : object, optional
        Where the allocation was tried.
    requested, free : int, optional
        Bytes asked for and bytes free at that moment, `None` where unknown.
    """

    device: object
    requested: int | None
    free: int | None

    def __init__(
        self, message: str, *, device: object = None, requested: int | None = None, free: int | None = None
    ) -> None:
        super().__init__(message, expected=requested, actual=free)
        self.device = device
        self.requested = requested
        self.free = free


class DeviceUnavailableError(LkvError, RuntimeError):
    """Raised when a device is unknown or cannot be used here; the message says what is missing."""


class DeviceError(LkvError, RuntimeError):
    """Raised when a device operation fails while it runs."""


class RebindRefused(LkvError, RuntimeError):
    """Raised when a held plan may not move to another allocation; the plan is left as it was.

    Parameters
    ----------
    message : str
        Names the reason, and the slot where there is one.
    reason : object
        The `RebindRefusal` member.
    layer, which : int, optional
        The slot that refused.
    baked, incoming : object, optional
        What the plan was built over, and what was offered.
    """

    reason: object
    layer: int | None
    which: int | None
    baked: object
    incoming: object

    def __init__(
        self,
        message: str,
        *,
        reason: object = None,
        layer: int | None = None,
        which: int | None = None,
        baked: object = None,
        incoming: object = None,
    ) -> None:
        super().__init__(message, expected=baked, actual=incoming)
        self.reason = reason
        self.layer = layer
        self.which = which
        self.baked = baked
        self.incoming = incoming


class RestoreError(LkvError, ValueError):
    """Raised when a saved cache cannot be restored: the file is damaged or belongs to another geometry.

    Parameters
    ----------
    message : str
        Names the field, what was expected and what was found.
    field : str, optional
        What of the file does not fit.
    expected, actual : object, optional
        The two sides of the comparison.
    """

    field: str | None

    def __init__(
        self, message: str, *, field: str | None = None, expected: object = None, actual: object = None
    ) -> None:
        super().__init__(message, expected=expected, actual=actual)
        self.field = field
