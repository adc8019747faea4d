"""Rounds of contenders in random order, compared round by round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Contender", "Progress", "Settings", "Table", "Target", "compare"]

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    quick: bool = False
    seed: int = 0

    def rounds(self, full: int) -> int:
        """Return the number of rounds: `full`, or what suffices to see that a benchmark runs."""
        return max(5, full // 8) if self.quick else full


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a table.

    Attributes
    ----------
    name : str
        Its row in the table.
    run : callable
        One round; everything that it takes is timed.
    operations : int
        What a round's time is divided by.
    prepare : callable, optional
        Before each round, not timed.
    threaded : bool
        Its library computes on threads of its own, whose CPU time counts too.
    """

    name: str
    run: Callable[[], Any]
    operations: int
    prepare: Callable[[], Any] | None = None
    threaded: bool = False


@dataclass(frozen=True)
class Target:
    """What a contender must reach.

    Attributes
    ----------
    contender, base : str
        Names in the table.
    most : float
        The bound.
    kind : str
        Of what: the ratio to the base, the nanoseconds over the base, or the contender's own value.
    """

    contender: str
    base: str
    most: float
    kind: Literal["ratio", "over", "value"] = "ratio"


@dataclass
class Table:
    """The outcome of one group of contenders.

    Attributes
    ----------
    title, unit, base : str
        What it says, what the numbers are, and which row is 1.00.
    samples : dict
        For each contender one number per round, in the same order of rounds.
    wall : dict
        The same on the wall clock, where the main number is thread CPU time.
    missing : list of str
        Peers that are not installed, and contenders left out for another reason, which is said.
    key : str
        What the figures find it by.
    """

    title: str
    unit: str
    base: str
    samples: dict[str, list[float]]
    wall: dict[str, list[float]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    key: str = ""

    def quartiles(self, name: str) -> tuple[float, float, float]:
        """Return lower quartile, median and upper quartile of a contender."""
        return quartiles(self.samples[name])

    def ratios(self, name: str, base: str | None = None) -> tuple[float, float, float]:
        """Return the quartiles of the ratio to a base, taken within each round."""
        pairs = zip(self.samples[name], self.samples[base or self.base], strict=True)
        return quartiles([a / b if b else float("inf") for a, b in pairs])

    def met(self, target: Target) -> bool | None:
        """Say whether a target is met; None when a contender of it is missing."""
        value = self.value(target)
        return None if value is None else value <= target.most

    def value(self, target: Target) -> float | None:
        """Return what a target is compared with; None when a contender of it is missing."""
        if target.contender not in self.samples or target.base not in self.samples:
            return None
        own = self.quartiles(target.contender)[1]
        if target.kind == "ratio":
            return self.ratios(target.contender, target.base)[1]
        return own - self.quartiles(target.base)[1] if target.kind == "over" else own


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compare(
    title: str,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    settings: Settings,
    progress: Progress,
    base: str | None = None,
    clock: Literal["cpu", "wall"] = "cpu",
    **more: Any,
) -> Table:
    """Run every contender once per round, in random order.

    Parameters
    ----------
    title : str
        Of the table.
    contenders : sequence of Contender
        The first is the base unless another is named.
    rounds : int
        How many; two more before them are not counted.
    clock : {"cpu", "wall"}
        What the ratios are taken of: CPU time, which other load disturbs least, or elapsed time, where threads wait for
        each other.
    **more
        Further fields of the table.
    """
    order = list(contenders)
    shuffle = random.Random(settings.seed).shuffle
    cpu: dict[str, list[float]] = {c.name: [] for c in contenders}
    wall: dict[str, list[float]] = {c.name: [] for c in contenders}
    for count in range(-2, rounds):
        shuffle(order)
        for contender in order:
            if contender.prepare is not None:
                contender.prepare()
            cpu_time = time.process_time_ns if contender.threaded else time.thread_time_ns
            begun, used = time.perf_counter_ns(), cpu_time()
            contender.run()
            used, begun = cpu_time() - used, time.perf_counter_ns() - begun
            if count >= 0:
                cpu[contender.name].append(used / contender.operations)
                wall[contender.name].append(begun / contender.operations)
        progress(title, (count + 3) / (rounds + 2))
    main, other = (wall, {}) if clock == "wall" else (cpu, wall)
    return Table(title, "ns", base or contenders[0].name, main, other, **more)
