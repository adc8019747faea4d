"""What is in a cache or in a saved file, slot by slot: sizes, norms, and rows that look wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lkv._storage import LayerRows
from lkv.cache.kv import KvCache
from lkv.cache.persistent import PersistentCache, human_bytes
from lkv.errors import ArgumentTypeError

if TYPE_CHECKING:
    from lkv.persist import SavedCache

__all__ = ["SlotSummary", "findings", "measure", "summary", "table"]

_CHUNK = 16 << 20
_SHOWN = 5

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """One slot of one layer.

    Attributes
    ----------
    layer, slot : int
    name : str
        Of the slot.
    rows : int
        Committed rows.
    nbytes : int
        Bytes of those.
    norm_min, norm_max, norm_mean : float or None
        Of the Euclidean norms of the rows, rounded to float32; rows with a NaN left out. None when no row is left.
    nan_count : int
        Elements that are NaN.
    nan_rows, zero_rows : tuple of int
        Rows with a NaN; rows whose every element is zero, as untouched memory is.
    version : int or None
        Of the slot when its rows were read; None for a file.
    """

    layer: int
    slot: int
    name: str
    rows: int
    nbytes: int
    norm_min: float | None
    norm_max: float | None
    norm_mean: float | None
    nan_count: int
    nan_rows: tuple[int, ...]
    zero_rows: tuple[int, ...]
    version: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes, JSON-serialisable; a norm that is infinite is None."""
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def summary(cache: PersistentCache | SavedCache, timeout: float | None = None) -> list[SlotSummary]:
    """Look at every committed row of a cache or of a saved file.

    Each layer is looked at under a read lease on its committed rows, so decoding goes on meanwhile. A cache on another
    device is copied to the host first.

    Parameters
    ----------
    cache : LatentKvCache, KvCache or SavedCache
        What to look at.
    timeout : float, optional
        Seconds to wait for the rows of a layer.

    Returns
    -------
    list of SlotSummary
        For every populated layer, its slots in order.

    Raises
    ------
    ArgumentTypeError
        If it is none of these.
    LeaseTimeoutError
        If the rows are still being rewritten after `timeout` seconds.
    """
    return [found for found, _ in measure(cache, timeout)]


def measure(cache: PersistentCache | SavedCache, timeout: float | None = None) -> Iterator[tuple[SlotSummary, _Array]]:
    """As `summary`, and with each slot the norms of its rows: float32 ``[rows]``, NaN for a row that has one."""
    for layer, versions, arrays in _layers(cache, timeout):
        for slot, (spec, version, rows) in enumerate(zip(cache.slots, versions, arrays, strict=True)):
            yield _measured(layer, slot, spec.name, version, rows)


def _layers(
    cache: PersistentCache | SavedCache, timeout: float | None
) -> Iterator[tuple[int, Sequence[int | None], list[_Array]]]:
    """Hand out for each layer versions and arrays with the rows along axis 0, which may be views."""
    if isinstance(cache, PersistentCache):
        axis = cache._row_axis
        populated = [layer for layer in range(cache.n_layers) if cache._populated(layer)]
        versions = {layer: [cache.slot_version(layer, slot) for slot in range(cache.n_slots)] for layer in populated}
        source = cache if _on_host(cache, populated, timeout) else cache.to("cpu", timeout)
        for layer in populated:
            with source.read(layer, timeout) as view:
                if source is cache:
                    versions[layer] = [cache.slot_version(layer, slot) for slot in range(cache.n_slots)]
                yield layer, versions[layer], _rows_first(view, axis)
    elif hasattr(cache, "tensor"):
        axis = KvCache._row_axis if cache.kind == KvCache.__name__ else 0
        n_slots = len(cache.slots)
        for layer in getattr(cache, "layers", None) or range(cache.n_layers):
            arrays = [np.moveaxis(cache.tensor(layer, slot), axis, 0) for slot in range(n_slots)]
            yield layer, [None] * n_slots, arrays
    else:
        raise ArgumentTypeError(
            f"cache: expected a LatentKvCache, a KvCache or a SavedCache, got {type(cache).__name__}", actual=cache
        )


def _rows_first(view: LayerRows, axis: int) -> list[_Array]:
    return [np.moveaxis(array, axis, 0) for array in view.numpy()]


def _on_host(cache: PersistentCache, populated: Sequence[int], timeout: float | None) -> bool:
    if not populated:
        return True
    with cache.read(populated[0], timeout) as view:
        return view[0].host_accessible


def _measured(layer: int, slot: int, name: str, version: int | None, rows: _Array) -> tuple[SlotSummary, _Array]:
    n = len(rows)
    row_bytes = rows.nbytes // n if n else 0
    norms, nan_count = np.zeros(n, np.float32), 0
    zero = np.zeros(n, bool)
    step = max(1, _CHUNK // max(1, row_bytes))
    for lo in range(0, n, step):
        chunk = rows[lo : lo + step]
        part: _Array = chunk.reshape(len(chunk), -1).astype(np.float32 if rows.dtype != np.float64 else np.float64)
        nan_count += int(np.isnan(part).sum())
        zero[lo : lo + step] = ~part.any(axis=1)
        with np.errstate(over="ignore"):
            norms[lo : lo + step] = np.sqrt(np.square(part, dtype=np.float64).sum(axis=1))
    has_nan = np.isnan(norms)
    known = norms[~has_nan]
    found = SlotSummary(
        layer=layer,
        slot=slot,
        name=name,
        rows=n,
        nbytes=rows.nbytes,
        norm_min=float(known.min()) if known.size else None,
        norm_max=float(known.max()) if known.size else None,
        norm_mean=float(known.mean(dtype=np.float64)) if known.size else None,
        nan_count=nan_count,
        nan_rows=tuple(map(int, has_nan.nonzero()[0])),
        zero_rows=tuple(map(int, zero.nonzero()[0])),
        version=version,
    )
    return found, norms


def findings(rows: Sequence[SlotSummary]) -> list[str]:
    """Return a line for every slot with NaN or untouched rows; empty when there is none."""
    lines = []
    for row in rows:
        where = f"layer {row.layer} slot {row.slot} ({row.name})"
        if row.nan_rows:
            lines.append(f"{where}: {row.nan_count} NaN in {_named(row.nan_rows)}")
        if row.zero_rows:
            lines.append(f"{where}: all zero, as if never written: {_named(row.zero_rows)}")
    return lines


def _named(rows: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for row in rows:
        if spans and spans[-1][1] + 1 == row:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    shown = ", ".join(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in spans[:_SHOWN])
    more = f" and {len(spans) - _SHOWN} more ranges" if len(spans) > _SHOWN else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}{more}"


def table(rows: Sequence[SlotSummary]) -> str:
    """Format summaries as text, a line per slot, columns aligned."""
    header = ("layer", "slot", "rows", "bytes", "norm min", "max", "mean", "NaN", "zero rows", "version")
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        norms = ("-" if norm is None else f"{norm:.4g}" for norm in (row.norm_min, row.norm_max, row.norm_mean))
        version = "-" if row.version is None else str(row.version)
        counts = (str(row.nan_count), str(len(row.zero_rows)), version)
        lines.append((str(row.layer), row.name, f"{row.rows:,}", human_bytes(row.nbytes), *norms, *counts))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    left = header.index("slot")
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column == left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
