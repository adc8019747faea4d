"""The one decision: keep a plan, re-bind it, or build anew."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from lkv._storage import fork_generation
from lkv.errors import ArgumentTypeError, RebindRefused
from lkv.plan.allocation import take
from lkv.plan.protocol import Plan
from lkv.plan.session import DecodeSession
from lkv.plan.source import KvRebindSource
from lkv.plan.validity import PlanValidity, RebindRefusal

__all__ = ["RefreshCounters", "refresh_session"]

_OUTCOMES = ("kept", "rebound", "rebuilt", "built")


class RefreshCounters:
    """How often plans were kept, re-bound and built; may be shared by any number of sessions and threads.

    Attributes
    ----------
    kept, rebound, rebuilt : int
        Sessions that were still good, that moved, and that were replaced.
    built : int
        Sessions where there was none before.
    refusals : dict of RebindRefusal to int
        Re-binds refused. All but the poisoned ones are among `rebuilt`, too.
    """

    def __init__(self) -> None:
        self.kept = self.rebound = self.rebuilt = self.built = 0
        self.refusals = dict.fromkeys(RebindRefusal, 0)
        self._lock = Lock()
        self._generation = fork_generation()

    def count(self, outcome: str) -> None:
        """Count ``"kept"``, ``"rebound"``, ``"rebuilt"`` or ``"built"``."""
        if outcome not in _OUTCOMES:
            raise ArgumentTypeError(f"outcome: expected one of {_OUTCOMES}, got {outcome!r}", actual=outcome)
        with self._guard():
            setattr(self, outcome, getattr(self, outcome) + 1)

    def count_refusal(self, reason: RebindRefusal) -> None:
        """Count a refusal."""
        if not isinstance(reason, RebindRefusal):
            raise ArgumentTypeError(f"reason: expected a RebindRefusal, got {reason!r}", actual=reason)
        with self._guard():
            self.refusals[reason] += 1

    def as_dict(self) -> dict[str, int]:
        """Return all counters under flat names, for a metrics exporter."""
        with self._guard():
            counts = {name: getattr(self, name) for name in _OUTCOMES}
            return counts | {f"refused_{reason.value}": n for reason, n in self.refusals.items()}

    def _guard(self) -> Lock:
        # A child of fork() counts on, and does not wait for a thread that it does not have.
        if self._generation != fork_generation():
            self._lock, self._generation = Lock(), fork_generation()
        return self._lock

    def __repr__(self) -> str:
        return f"RefreshCounters({', '.join(f'{name}={n}' for name, n in self.as_dict().items() if n)})"


def refresh_session(
    session: DecodeSession | None,
    source: KvRebindSource,
    build: Callable[[KvRebindSource], Plan],
    *,
    seq: int,
    shape_key: int,
    counters: RefreshCounters | None = None,
) -> DecodeSession:
    """Return a session that reads the source's present allocation: the same, the same re-bound, or a new one.

    Parameters
    ----------
    session : DecodeSession, optional
        The one held so far.
    source : KvRebindSource
        The cache about to be read.
    build : callable
        Takes the source and returns a new plan; called only when nothing held will do.
    seq : int
        Tokens per run.
    shape_key : int
        What else the plan depends on; see `shape_key`.
    counters : RefreshCounters, optional
        Where to count what happened.

    Raises
    ------
    RebindRefused
        Only for `RebindRefusal.POISONED`: another plan would read the same damaged rows. Other refusals end in a
        new plan.
    PoisonedError, UnpopulatedLayerError
        If a new plan is due and the source holds damaged memory or none; nothing is built.
    Exception
        What `build` or the plan raises.
    """
    outcome = "built"
    if session is not None:
        # The id is read last: of a source that changes meanwhile, a new geometry never meets an old id unseen.
        validity = session.validity_for(
            seq, source.max_seq_len, source.n_layers, source.dtype, shape_key, source.alloc_id
        )
        if validity is PlanValidity.VALID:
            _count(counters, "kept")
            return session
        if validity is PlanValidity.ALLOCATION_CHANGED and _rebind(session, source, counters):
            return session
        outcome = "rebuilt"
    take(source).require_usable()
    session = DecodeSession(build(source), source, seq=seq, shape_key=shape_key)
    _count(counters, outcome)
    return session


def _rebind(session: DecodeSession, source: KvRebindSource, counters: RefreshCounters | None) -> bool:
    try:
        session.rebind_kv(source)
    except RebindRefused as refused:
        if counters is not None and isinstance(refused.reason, RebindRefusal):
            counters.count_refusal(refused.reason)
        if refused.reason is RebindRefusal.POISONED:
            raise
        return False
    _count(counters, "rebound")
    return True


def _count(counters: RefreshCounters | None, outcome: str) -> None:
    if counters is not None:
        counters.count(outcome)
