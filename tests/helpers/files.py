"""Saved caches to look at, to damage and to compare."""

import json
import zlib
from pathlib import Path

from helpers.caches import content, populated

import lkv


def rows_of(cache):
    """Copies of everything a cache has published, by layer."""
    return {layer: content(cache, layer) for layer in populated(cache)}


def parts(blob):
    """The header of a file and its data."""
    length = int.from_bytes(blob[:8], "little")
    return blob[8 : 8 + length], blob[8 + length :]


def joined(header, data):
    return len(header).to_bytes(8, "little") + header + data


def sealed(header):
    """A header whose checksum of itself is right, so that a change in it reaches the check that it is meant for."""
    header = header.rstrip(b" ")
    header += b" " * (-(8 + len(header)) % 64)
    at = header.index(b'"header":"', 2) + len(b'"header":"')
    header = header[:at] + b"0" * 8 + header[at + 8 :]
    return header[:at] + f"{zlib.crc32(header):08x}".encode() + header[at + 8 :]


def forged(blob, metadata=(), tensors=(), data=None):
    """A file with other metadata, and other fields of its tensors' entries, as if it had been saved so."""
    header, own = parts(blob)
    entries = json.loads(header)
    entries["__metadata__"].update(metadata)
    for name, fields in dict(tensors).items():
        entries[name].update(fields)
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return joined(sealed(text), own if data is None else data)


def saved_bytes(cache, folder, **more):
    path = Path(folder) / "saved.safetensors"
    lkv.save(cache, path, **{"fingerprint": "model", **more})
    return path.read_bytes()


def leftovers(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("."))
