"""What one device keeps between requests."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lkv._storage import Storage
from lkv.devices import DeviceLocation, resolve
from lkv.errors import ArgumentTypeError, DeviceMismatchError
from lkv.locks import ProcessLock
from lkv.plan.session import DecodeSession

__all__ = ["InferenceContext"]


class InferenceContext:
    """The long-lived storages of a device, by node id, and the decode session held between requests.

    Safe to share between threads. Taking the session leaves none behind, so two requests never run one plan at once.

    Parameters
    ----------
    device : str, DeviceLocation or torch.device
        Where the storages are.

    Raises
    ------
    DeviceUnavailableError
        If the device cannot be used; says why.
    """

    def __init__(self, device: Any = "cpu") -> None:
        self._device = resolve(device)
        self._storages: dict[Hashable, Storage] = {}
        self._session: DecodeSession | None = None
        self._lock = ProcessLock()

    @property
    def device(self) -> DeviceLocation:
        """Where the storages are."""
        return self._device

    def insert(self, node_id: Hashable, storage: Storage) -> Storage | None:
        """Keep a storage under a node id; returns the one that was there.

        Raises
        ------
        ArgumentTypeError
            If it is no `Storage`.
        DeviceMismatchError
            If it is on another device.
        """
        if not isinstance(storage, Storage):
            raise ArgumentTypeError(f"storage: expected a Storage, got {type(storage).__name__}", actual=storage)
        if storage.device != self._device:
            raise DeviceMismatchError(
                f"storage: expected {self._device}, got {storage.device}", expected=self._device, actual=storage.device
            )
        with self._lock:
            before = self._storages.get(node_id)
            self._storages[node_id] = storage
        return before

    def get(self, node_id: Hashable) -> Storage | None:
        """Return the storage of a node; None when there is none."""
        return self._storages.get(node_id)

    def remove(self, node_id: Hashable) -> Storage | None:
        """Let go of a node's storage and return it; None when there is none."""
        with self._lock:
            return self._storages.pop(node_id, None)

    def contains(self, node_id: Hashable) -> bool:
        """Return whether a node has a storage."""
        return node_id in self._storages

    def __contains__(self, node_id: Hashable) -> bool:
        return self.contains(node_id)

    def __len__(self) -> int:
        return len(self._storages)

    def clear_persistent(self) -> None:
        """Let go of all storages. The held session stays; what its plan holds lives on with it."""
        with self._lock:
            dropped, self._storages = self._storages, {}
        dropped.clear()

    def take_decode_session(self) -> DecodeSession | None:
        """Take the held session out; None when there is none."""
        with self._lock:
            session, self._session = self._session, None
        return session

    def put_decode_session(self, session: DecodeSession) -> DecodeSession | None:
        """Hold a session for the next request; returns the one it displaces.

        Raises
        ------
        ArgumentTypeError
            If it is no `DecodeSession`.
        """
        if not isinstance(session, DecodeSession):
            raise ArgumentTypeError(f"session: expected a DecodeSession, got {type(session).__name__}", actual=session)
        with self._lock:
            before, self._session = self._session, session
        return before

    def has_decode_session(self) -> bool:
        """Return whether a session is held."""
        return self._session is not None

    def __repr__(self) -> str:
        held = "no session" if self._session is None else repr(self._session)
        return f"InferenceContext({self._device}, {len(self)} storages, {held})"
