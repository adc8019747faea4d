"""Leases in C beside the locks of the C library, uncontended. Contention: ``tests/native/run.sh bench``."""

from __future__ import annotations

from benchmarks.measure import Contender, Progress, Settings, Table, Target, compare
from benchmarks.native import api_address, library
from lkv import Storage

__all__ = ["run"]

PAIRS = 20_000


def run(settings: Settings, progress: Progress) -> list[Table]:
    """Measure acquire and release, through the C interface."""
    native, api, storage = library(), api_address(), Storage((4_096, 512), "bfloat16")

    def leases(write: int) -> None:
        if native.lease_pairs(api, storage.handle, PAIRS, write):
            raise RuntimeError("a lease was refused")

    return [
        compare(
            "a lease in C, uncontended",
            [
                Contender("pthread_rwlock, read", lambda: native.rwlock_pairs(PAIRS, 0), PAIRS),
                Contender("pthread_rwlock, write", lambda: native.rwlock_pairs(PAIRS, 1), PAIRS),
                Contender("pthread_mutex", lambda: native.mutex_pairs(PAIRS), PAIRS),
                Contender("lease_acquire, read", lambda: leases(0), PAIRS),
                Contender("lease_acquire, write", lambda: leases(1), PAIRS),
            ],
            rounds=settings.rounds(60),
            settings=settings,
            progress=progress,
            targets=[
                Target("lease_acquire, read", "pthread_rwlock, read", 1.0),
                Target("lease_acquire, write", "pthread_rwlock, write", 1.0),
            ],
        )
    ]
