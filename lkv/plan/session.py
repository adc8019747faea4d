"""A plan together with the memory it is welded to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lkv._storage import Storage
from lkv.devices import DeviceLocation
from lkv.dtypes import DType
from lkv.errors import ArgumentTypeError, PoisonedError
from lkv.layout import as_int, check_count
from lkv.locks import ProcessLock
from lkv.plan.allocation import Allocation, take
from lkv.plan.compare import Refusal, refusal
from lkv.plan.protocol import Plan
from lkv.plan.source import KvRebindSource
from lkv.plan.validity import PlanValidity, RebindRefusal

__all__ = ["DecodeSession"]


class DecodeSession:
    """A held plan, and a record of what is baked into it.

    Takes id, geometry, location and all storages from the source in one breath, binds them into the plan, and keeps
    them alive: the cache may go, the session stays safe to run. A plan belongs to one session.

    Parameters
    ----------
    plan : Plan
        Anything with ``bind(layer, which, storage)``, ``invalidate()`` and ``run(...)``.
    source : KvRebindSource
        The cache to read.
    seq : int
        Tokens per run that the plan is built for.
    shape_key : int
        What else the plan depends on; see `shape_key`.

    Raises
    ------
    ArgumentTypeError
        If plan or source is not what it must be.
    UnpopulatedLayerError
        If the source holds no storage.
    PoisonedError
        If a write into one of the storages failed half-way.

    Notes
    -----
    `run` and `rebind_kv` exclude each other, so a session may be handed from thread to thread. `run` reads memory
    without a lease: hold a step or a read lease of the cache meanwhile, and decide by `refresh_session` inside it.
    """

    def __init__(self, plan: Plan, source: KvRebindSource, *, seq: int, shape_key: int) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentTypeError(
                f"plan: expected bind, invalidate and run methods, got {type(plan).__name__}", actual=plan
            )
        self._seq = check_count(seq, "seq", 1)
        self._shape_key = as_int(shape_key, "shape_key")
        self._plan = plan
        self._lock = ProcessLock()
        self._mixed: Allocation | None = None
        self._baked = take(source)
        self._baked.require_usable()
        self._invalidate()
        for (layer, which), slot in self._baked.slots.items():
            plan.bind(layer, which, slot.storage)

    @property
    def plan(self) -> Plan:
        """The plan. Running or binding it directly goes behind the session's back."""
        return self._plan

    @property
    def seq(self) -> int:
        """Tokens per run."""
        return self._seq

    @property
    def shape_key(self) -> int:
        """What else the plan was built for."""
        return self._shape_key

    @property
    def alloc_id(self) -> int:
        """The allocation that the plan reads."""
        return self._baked.alloc_id

    @property
    def location(self) -> DeviceLocation | None:
        """Where the rows are that the plan reads; None when that could not be proven."""
        return self._baked.location

    @property
    def max_seq_len(self) -> int:
        """Rows of the buffers that the plan reads."""
        return self._baked.max_seq_len

    @property
    def n_layers(self) -> int:
        """Layers of the source, populated or not."""
        return self._baked.n_layers

    @property
    def dtype(self) -> DType:
        """Element type of the source."""
        return self._baked.dtype

    @property
    def storages(self) -> Mapping[tuple[int, int], Storage]:
        """The storages bound, by layer and slot."""
        return {key: slot.storage for key, slot in self._baked.slots.items()}

    def validity_for(
        self, seq: int, max_seq_len: int, n_layers: int, dtype: Any, shape_key: int, alloc_id: int
    ) -> PlanValidity:
        """Compare what the plan is wanted for with what it was built for.

        Parameters
        ----------
        seq, max_seq_len, n_layers, dtype, shape_key
            The geometry wanted; if any differs the plan is `STALE`.
        alloc_id : int
            The allocation to read; if only this differs the answer is `ALLOCATION_CHANGED`.
        """
        baked = self._baked
        if (
            self._mixed is not None
            or seq != self._seq
            or shape_key != self._shape_key
            or max_seq_len != baked.max_seq_len
            or n_layers != baked.n_layers
            or (dtype is not baked.dtype and DType.of(dtype) is not baked.dtype)
        ):
            return PlanValidity.STALE
        return PlanValidity.VALID if alloc_id == baked.alloc_id else PlanValidity.ALLOCATION_CHANGED

    def is_valid_for(
        self, seq: int, max_seq_len: int, n_layers: int, dtype: Any, shape_key: int, alloc_id: int
    ) -> bool:
        """Return whether `validity_for` says `VALID`."""
        return self.validity_for(seq, max_seq_len, n_layers, dtype, shape_key, alloc_id) is PlanValidity.VALID

    def rebind_kv(self, source: KvRebindSource) -> None:
        """Move the plan to the source's present allocation, if it provably reads that one correctly.

        First the plan drops its capture; then what comes is compared with what is baked in, all of it; then all slots
        are switched. A plan that is `VALID` for the source is left alone.

        Raises
        ------
        RebindRefused
            With ``reason``, ``layer``, ``which``, ``baked`` and ``incoming``. Every binding is as it was.
        Exception
            What the plan's ``bind`` raises. The slots already switched are switched back; should that fail too, the
            session is `STALE` for ever and refuses to run.
        """
        with self._lock:
            incoming = take(source)
            if self._mixed is not None:
                raise Refusal(RebindRefusal.POISONED, "an earlier switch failed half-way; build the plan anew").error()
            if self.is_valid_for(self._seq, *incoming.geometry, self._shape_key, incoming.alloc_id):
                return
            self._invalidate()
            refused = refusal(self._baked, incoming)
            if refused is not None:
                raise refused.error()
            self._switch(incoming)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan.

        Raises
        ------
        PoisonedError
            If a switch failed half-way and could not be undone.
        """
        with self._lock:
            if self._mixed is not None:
                raise PoisonedError("run: a re-bind failed half-way and could not be undone; build the plan anew")
            return self._plan.run(*args, **kwargs)

    def _invalidate(self) -> None:
        self._plan.invalidate()

    def _switch(self, incoming: Allocation) -> None:
        moved = []
        try:
            for key, slot in incoming.slots.items():
                moved.append(key)
                self._plan.bind(*key, slot.storage)
        except BaseException:
            self._undo(moved, incoming)
            raise
        self._baked = incoming

    def _undo(self, moved: Iterable[tuple[int, int]], incoming: Allocation) -> None:
        try:
            for key in moved:
                self._plan.bind(*key, self._baked.slots[key].storage)
        except BaseException:
            self._mixed = incoming  # the plan may hold addresses of both
            raise

    def __repr__(self) -> str:
        where = "device unknown" if self.location is None else str(self.location)
        state = "" if self._mixed is None else ", bindings mixed"
        return (
            f"DecodeSession({type(self._plan).__name__}, seq {self._seq}, {self.n_layers} layers, "
            f"{len(self._baked.slots)} slots, {self.max_seq_len} rows, {self.dtype}, {where}, "
            f"alloc {int(self.alloc_id)}{state})"
        )
