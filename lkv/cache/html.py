"""How a persistent cache shows itself in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lkv.cache.persistent import PersistentCache

__all__ = ["cache_html"]

_OPEN_LAYERS = 16
_CELL = "text-align:left;padding:2px 10px 2px 0"


def cache_html(cache: PersistentCache) -> str:
    """Return a cache's geometry, fill, allocation id and slot versions as self-contained HTML.

    Takes no lease: what it shows may be a moment old. Has no scripts, and no styles that reach beyond it.
    """
    from lkv.cache.persistent import human_bytes

    populated = [layer for layer in range(cache.n_layers) if cache._populated(layer)]
    rows, capacity, token = cache.cached_len, cache.max_seq_len, cache.bytes_per_token
    percent = 100 * rows / capacity if capacity else 0.0
    location = cache.device_location
    some = "" if len(populated) == cache.n_layers else f", {len(populated)} populated"
    facts = [
        ("layers", f"{cache.n_layers}{some}"),
        ("rows", f"{rows:,} of {capacity:,} ({percent:.1f} %)"),
        ("dtype", str(cache.dtype)),
        ("device", "unknown" if location is None else str(location)),
        ("layout", str(getattr(cache, "layout", "separate"))),
        ("allocation id", str(int(cache.alloc_id))),
        ("bytes", f"{human_bytes(rows * token)} of {human_bytes(cache.nbytes)}, {human_bytes(token)} per token"),
    ]
    slots = (
        (str(slot), spec.name, str(spec.trailing), spec.tag or "-", human_bytes(spec.width * cache.dtype.itemsize))
        for slot, spec in enumerate(cache.slots)
    )
    versions = (
        (str(layer), *(str(cache.slot_version(layer, slot)) for slot in range(cache.n_slots))) for layer in populated
    )
    names = [spec.name for spec in cache.slots]
    return (
        '<div style="font-family:monospace;line-height:1.4">'
        f"<strong>{escape(type(cache).__name__)}</strong>"
        f'<div role="img" aria-label="{percent:.1f} % filled" style="width:320px;height:12px;margin:4px 0;'
        'border:1px solid #888;border-radius:3px;overflow:hidden">'
        f'<div style="width:{percent:.2f}%;height:100%;background:#4a90d9"></div></div>'
        f"{_table((), facts)}"
        f"{_table(('slot', 'name', 'row', 'tag', 'bytes per row'), slots)}"
        f"<details{' open' if len(populated) <= _OPEN_LAYERS else ''}><summary>versions</summary>"
        f"{_table(('layer', *names), versions)}</details></div>"
    )


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<table style="border-collapse:collapse;margin:4px 0">{top}<tbody>{body}</tbody></table>'
