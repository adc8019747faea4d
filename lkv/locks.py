"""A lock that a child of fork() does not wait for."""

from __future__ import annotations

from threading import RLock
from types import TracebackType

from lkv._storage import fork_generation
from lkv.errors import ForkedError

__all__ = ["ProcessLock"]


class ProcessLock:
    """A re-entrant lock of one process: a signal handler may take it again, a child of that process may not.

    The child might wait for a thread that it does not have.
    """

    __slots__ = ("_generation", "_lock")

    def __init__(self) -> None:
        self._lock = RLock()
        self._generation = fork_generation()

    def __enter__(self) -> None:
        if self._generation != fork_generation():
            raise ForkedError("the object was made before fork() and cannot be used in the child")
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
