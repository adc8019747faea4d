"""The header of a saved cache. It follows from its metadata, so a reader writes it anew and compares."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NoReturn

from lkv.dtypes import ALL, DType
from lkv.errors import GeometryError, LkvError, RestoreError
from lkv.layout import SlotSpec, slot_specs

__all__ = ["HEADER_LIMIT", "VERSION", "Header", "refuse"]

VERSION = 1
HEADER_LIMIT = 16 << 20  # bytes; a cache of 100 layers and three slots needs about 40 kB
KINDS = {"LatentKvCache": ("separate", "packed"), "KvCache": ("heads",)}

_FORMAT = "lkv-cache"
_ALIGNMENT = 64
_FIELD_LIMIT = 16 << 10  # bytes of a value in the header; the checksums may be more
_SLOTS_LIMIT = 1 << 15  # of all layers together; a cache keeps a few bytes for each, populated or not
_SHORTEST_ENTRY = 48  # bytes of a tensor's entry
_FIELDS = (
    *("format", "version", "kind", "dtype", "rows", "max_seq_len", "n_layers"),
    *("layers", "layout", "slots", "fingerprint", "checksums", "header"),
)
_FILE_DTYPES = {
    **{d: d.short.upper() for d in ALL},
    DType.of("float8_e4m3fn"): "F8_E4M3",
}

_START = b'{"__metadata__":{'
_STRING = rb'("(?:[^"\\\x00-\x1f]|\\.){0,%d}+")' % _FIELD_LIMIT
_FIELD = re.compile(_STRING + rb":" + _STRING)
_CHECKSUMS = re.compile(rb'("checksums"):("[0-9a-f ]*+")')
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_RANGES = re.compile(r"(?:(?:0|[1-9][0-9]{0,18})(?:-[1-9][0-9]{0,18})?(?:,(?!$)|$))++")


def refuse(field: str, expected: object, found: object, hint: str = "") -> NoReturn:
    """Raise the `RestoreError` that names a field, what was expected and what was found."""
    wanted, came = (text if len(text) <= 200 else f"{text[:200]}..." for text in map(_shown, (expected, found)))
    raise RestoreError(
        f"{field}: expected {wanted}, found {came}{hint and f' ({hint})'}", field=field, expected=expected, actual=found
    )


def _shown(value: object) -> str:
    if isinstance(value, range):
        return f"at most {value[-1]}"
    return str(value) if isinstance(value, _Words) else repr(value)


class _Words(str):
    """A description, shown without quotes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of the cache it holds.

    Attributes
    ----------
    kind : str
        ``"LatentKvCache"`` or ``"KvCache"``.
    dtype : DType
        Element type of all slots.
    rows : int
        Rows saved of every slot.
    max_seq_len, n_layers : int
        Of the cache that was saved.
    layers : tuple of int
        The layers that were populated, in order: those in the file.
    layout : str
        How slots lay in memory: ``"separate"`` or ``"packed"``; ``"heads"`` for a `KvCache`. In the file each slot is
        a tensor of its own.
    slots : tuple of SlotSpec
        Names, row shapes and tags.
    fingerprint : str or None
        The caller's name for the model that computed the rows.
    """

    kind: str
    dtype: DType
    rows: int
    max_seq_len: int
    n_layers: int
    layers: tuple[int, ...]
    layout: str
    slots: tuple[SlotSpec, ...]
    fingerprint: str | None

    def shape(self, slot: int) -> tuple[int, ...]:
        """Return the shape of a slot's tensors."""
        if self.kind == "KvCache":
            heads, width = self.slots[slot].trailing
            return (1, heads, self.rows, width)
        return (self.rows, *self.slots[slot].trailing)

    def nbytes(self, slot: int) -> int:
        """Return the bytes of one of a slot's tensors."""
        return prod(self.shape(slot)) * self.dtype.itemsize

    def offset(self, position: int, slot: int) -> int:
        """Return where in the data the tensor of a slot begins; `position` counts the layers in the file."""
        sizes = [self.nbytes(other) for other in range(len(self.slots))]
        return position * sum(sizes) + sum(sizes[:slot])

    @property
    def data_nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.offset(len(self.layers), 0)

    def encode(self, checksums: Sequence[int]) -> bytes:
        """Return the header with its length before it, for tensors of these CRC-32s.

        Raises
        ------
        GeometryError
            If a name is not Unicode, there are too many layers, or a field or the header is too long.
        """
        fields = {
            "format": _FORMAT,
            "version": str(VERSION),
            "kind": self.kind,
            "dtype": self.dtype.name,
            "rows": str(self.rows),
            "max_seq_len": str(self.max_seq_len),
            "n_layers": str(self.n_layers),
            "layers": _ranges(self.layers),
            "layout": self.layout,
            "slots": _json([_listed(spec) for spec in self.slots]),
            "fingerprint": _json(self.fingerprint),
            "checksums": " ".join(f"{checksum:08x}" for checksum in checksums),
            "header": "0" * 8,
        }
        sizes = {name: len(_json(value).encode(errors="surrogatepass")) for name, value in fields.items()}
        del sizes["checksums"]
        for name, size in sizes.items():
            if size > _FIELD_LIMIT:
                raise GeometryError(
                    f"{name}: expected at most {_FIELD_LIMIT} bytes, got {size}", expected=_FIELD_LIMIT, actual=size
                )
        metadata = ",".join(f"{_json(name)}:{_json(fields[name])}" for name in _FIELDS)
        text = f'{{"__metadata__":{{{metadata}}}{"".join(self._entries())}}}'
        try:
            header = text.encode()
        except UnicodeEncodeError as error:
            raise GeometryError(f"slots, fingerprint: expected text that UTF-8 can express: {error}") from error
        header += b" " * (-(8 + len(header)) % _ALIGNMENT)
        if self.n_layers * len(self.slots) > _SLOTS_LIMIT:
            raise GeometryError(
                f"n_layers: expected at most {_SLOTS_LIMIT} slots in all, got {self.n_layers * len(self.slots)}",
                expected=_SLOTS_LIMIT,
                actual=self.n_layers * len(self.slots),
            )
        if len(header) > HEADER_LIMIT:
            raise GeometryError(f"header: expected at most {HEADER_LIMIT} bytes, got {len(header)}", actual=len(header))
        own = f'"header":"{zlib.crc32(header):08x}"}}'.encode()
        header = header.replace(b'"header":"00000000"}', own, 1)
        return len(header).to_bytes(8, "little") + header

    def _entries(self) -> Iterator[str]:
        begin = 0
        for layer in self.layers:
            for slot, spec in enumerate(self.slots):
                end = begin + self.nbytes(slot)
                entry = {
                    "dtype": _FILE_DTYPES[self.dtype],
                    "shape": self.shape(slot),
                    "data_offsets": (begin, end),
                }
                yield f",{_json(f'layers.{layer}.{spec.name}')}:{_json(entry)}"
                begin = end

    @classmethod
    def decode(cls, header: bytes, data_nbytes: int) -> tuple[Header, int]:
        """Check a header; also returns where in it the checksums begin: 8 hexadecimal digits each, a space between.

        Parameters
        ----------
        header : bytes
            Without the length before it.
        data_nbytes : int
            Bytes of the file behind it.

        Raises
        ------
        RestoreError
            If it is not exactly what `encode` returns for the metadata in it, or the data have another length.
        """
        values, checksums, end = _metadata(header)
        view, digits = memoryview(header), end - 10
        own = zlib.crc32(view[digits + 8 :], zlib.crc32(b"0" * 8, zlib.crc32(view[:digits])))
        if values["header"] != f"{own:08x}" or view[digits : digits + 8] != values["header"].encode():
            refuse("header checksum", f"{own:08x}", values["header"])
        found = cls._interpreted(values, len(header))
        if data_nbytes != found.data_nbytes:
            refuse("data length", found.data_nbytes, data_nbytes)
        tensors = len(found.layers) * len(found.slots)
        if len(checksums) != tensors * 9 - 1:
            refuse("checksums", _Words(f"{tensors * 9 - 1} characters"), len(checksums))
        found._compare(header, end)
        return found, checksums.start

    @classmethod
    def _interpreted(cls, values: dict[str, str], nbytes: int) -> Header:
        kind, layout = values["kind"], values["layout"]
        if kind not in KINDS:
            refuse("kind", tuple(KINDS), kind)
        if layout not in KINDS[kind]:
            refuse("layout", KINDS[kind], layout)
        dtype = next((known for known in ALL if known.name == values["dtype"]), None)
        if dtype is None:
            refuse("dtype", tuple(known.name for known in ALL), values["dtype"])
        slots = _slots(values["slots"], kind)
        n_layers = _number("n_layers", values["n_layers"], 1)
        if n_layers * len(slots) > _SLOTS_LIMIT:
            refuse("n_layers", range(_SLOTS_LIMIT // len(slots) + 1), n_layers)
        max_seq_len = _number("max_seq_len", values["max_seq_len"], 1)
        rows = _number("rows", values["rows"], 0)
        if rows > max_seq_len:
            refuse("rows", _Words(f"at most max_seq_len {max_seq_len}"), rows)
        layers = _expanded(values["layers"], n_layers, nbytes // (_SHORTEST_ENTRY * len(slots)))
        fingerprint = _parsed("fingerprint", values["fingerprint"])
        if not isinstance(fingerprint, str | None):
            refuse("fingerprint", _Words("a string or null"), fingerprint)
        return cls(kind, dtype, rows, max_seq_len, n_layers, layers, layout, slots, fingerprint)

    def _compare(self, header: bytes, at: int) -> None:
        try:
            for entry in self._entries():
                wanted = entry.encode()
                if header[at : at + len(wanted)] != wanted:
                    _refuse_entry(wanted, header[at : at + len(wanted) + 200])
                at += len(wanted)
        except UnicodeEncodeError:
            refuse("slots", _Words("names that UTF-8 can express"), [spec.name for spec in self.slots])
        wanted = b"}" + b" " * (-(8 + at + 1) % _ALIGNMENT)
        if header[at:] != wanted:
            refuse("header", _Words(f"an end after {len(self.layers) * len(self.slots)} tensors"), header[at : at + 99])


def _metadata(header: bytes) -> tuple[dict[str, str], range, int]:
    """Return the metadata's values, where the checksums are, and where the tensors' entries begin."""
    if not header.startswith(_START):
        refuse("header", _START, header[: len(_START)])
    at, values, checksums = len(_START), dict[str, str](), range(0)
    for name in _FIELDS:
        found = (_CHECKSUMS if name == "checksums" else _FIELD).match(header, at)
        if found is None:
            refuse("metadata", _Words(f"{name} and a value of bounded length"), header[at : at + 40])
        if found[1] != f'"{name}"'.encode():
            refuse("metadata", _Words(name), found[1])
        if name == "checksums":
            checksums = range(found.start(2) + 1, found.end(2) - 1)
        else:
            values[name] = _parsed(name, found[2])
        if name == "format" and values[name] != _FORMAT:
            refuse("format", _FORMAT, values[name])
        if name == "version" and values[name] != str(VERSION):
            newer = _NUMBER.fullmatch(values[name]) and int(values[name]) > VERSION
            refuse("version", str(VERSION), values[name], "written by a newer lkv" if newer else "")
        at = found.end()
        behind = b"}" if name == _FIELDS[-1] else b","
        if header[at : at + 1] != behind:
            refuse("metadata", behind, header[at : at + 1], f"behind {name}")
        at += 1
    return values, checksums, at


def _refuse_entry(wanted: bytes, found: bytes) -> NoReturn:
    """Say in which field the entry of a tensor is not the one that the metadata ask for."""
    ((name, expected),) = json.loads(b"{" + wanted[1:] + b"}").items()
    other: object = None
    actual: Any = None
    with suppress(ValueError, RecursionError):
        ((other, actual),) = json.loads(b"{" + found[1 : found.index(b"}") + 1] + b"}").items()
    if other is not None and other != name:
        refuse("tensor", name, other)
    for field in expected if isinstance(actual, dict) else ():
        if actual.get(field) != expected[field]:
            refuse(f"{name}: {field}", expected[field], actual.get(field))
    refuse("tensor", wanted[1:], found[1:])


def _parsed(name: str, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        refuse(name, _Words("JSON"), text)


def _number(name: str, text: str, minimum: int) -> int:
    if not _NUMBER.fullmatch(text) or not minimum <= int(text) < 1 << 63:
        refuse(name, _Words(f"an integer from {minimum} to {(1 << 63) - 1}"), text)
    return int(text)


def _slots(text: str, kind: str) -> tuple[SlotSpec, ...]:
    listed: Any = _parsed("slots", text)
    try:
        specs = slot_specs(slots=[SlotSpec(name, trailing, tag) for name, trailing, tag in listed])
    except (LkvError, TypeError, ValueError):
        specs = ()
    if not specs or _json([_listed(spec) for spec in specs]) != text:
        refuse("slots", _Words("a list of name, row shape and tag"), text)
    if kind == "KvCache":
        k = specs[0].trailing
        wanted = (SlotSpec("k", k), SlotSpec("v", k))
        if len(k) != 2 or specs != wanted:
            refuse("slots", _Words("k and v of equal shape (heads, width)"), text)
    return specs


def _listed(spec: SlotSpec) -> tuple[object, ...]:
    return (spec.name, spec.trailing, spec.tag)


def _ranges(layers: Sequence[int]) -> str:
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _expanded(text: str, n_layers: int, most: int) -> tuple[int, ...]:
    if not _RANGES.fullmatch(text):
        refuse("layers", _Words("ranges of layers"), text)
    if text.count(",") >= most:
        refuse("layers", _Words(f"at most {most} for a header of this length"), text)
    runs = [(int(run[0]), int(run[-1])) for run in (part.split("-") for part in text.split(","))]
    ends = [-1, *(last for _, last in runs)]
    if ends[-1] >= n_layers or any(not end < first <= last for (first, last), end in zip(runs, ends, strict=False)):
        refuse("layers", _Words(f"ascending ranges below n_layers {n_layers}"), text)
    count = sum(last - first + 1 for first, last in runs)
    if count > most:
        refuse("layers", _Words(f"at most {most} for a header of this length"), count)
    layers = tuple(layer for first, last in runs for layer in range(first, last + 1))
    if _ranges(layers) != text:
        refuse("layers", _ranges(layers), text)
    return layers


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
