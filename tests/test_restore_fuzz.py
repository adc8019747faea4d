"""Damaged files: each is refused within a second, for less memory than it has bytes, and changes nothing.

``LKV_FUZZ_SECONDS`` is how long the random tests together look for a file that is not; 10 by default.
"""

import json
import os
import random
import time
import tracemalloc
from contextlib import contextmanager

import pytest
from helpers.caches import fill, small, snapshot
from helpers.files import forged, joined, parts, saved_bytes, sealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lkv
from lkv import errors
from lkv._storage import host_memory
from lkv.persist import describe
from lkv.persist.header import HEADER_LIMIT

SECONDS = float(os.environ.get("LKV_FUZZ_SECONDS", "10"))
RANDOM_TESTS = 4
ALLOWANCE = 1 << 20  # bytes; for what Python itself allocates, whatever the file


def fuzzed(strategy):
    """A random test of an equal share of the time: hypothesis chooses the examples, the clock their number."""

    def decorate(test):
        ends = []

        @settings(
            max_examples=max(20, int(SECONDS / RANDOM_TESTS * 500)),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def wrapper(files, drawn):
            if not ends:
                ends.append(time.monotonic() + SECONDS / RANDOM_TESTS)
            if time.monotonic() < ends[0]:
                test(files, drawn)

        wrapper.__name__ = test.__name__
        return wrapper

    return decorate


class Files:
    """A saved cache, the cache that damaged versions of it are restored into, and a folder for them."""

    def __init__(self, folder, slots="two", layers=2, rows=5, capacity=8):
        self.cache = small(slots, layers=layers, rows=capacity)
        fill(self.cache, rows)
        self.blob = saved_bytes(self.cache, folder)
        self.cache.truncate_to(rows - 1)
        self.metadata = json.loads(parts(self.blob)[0])["__metadata__"]
        self.path = folder / "damaged.safetensors"
        self.before = snapshot(self.cache)

    def write(self, blob):
        self.path.write_bytes(blob)

    def refused(self, blob):
        """Restore a damaged file, expecting the refusal; returns the error."""
        self.write(blob)
        began = time.thread_time()
        with pytest.raises(errors.RestoreError) as refusal:
            self.cache.restore(self.path, fingerprint="model")
        assert time.thread_time() - began < 1
        assert self.cache.cached_len == self.before["lengths"][0]
        return refusal.value


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    files = Files(tmp_path_factory.mktemp("fuzz"))
    yield files
    assert snapshot(files.cache) == files.before


@contextmanager
def cheap(path):
    """Allocates no more than the file's size, neither in Python nor as storages."""
    held = host_memory()["live_bytes"]
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size + ALLOWANCE
    assert host_memory()["live_bytes"] == held


# ---- every cut, every bit ----


def test_a_file_cut_at_any_kilobyte_is_refused(tmp_path):
    files = Files(tmp_path, "three", layers=8, rows=500, capacity=600)
    assert len(files.blob) > 200_000
    for size in range(0, len(files.blob), 1024):
        error = files.refused(files.blob[:size])
        assert error.field in ("file length", "header length", "data length"), size
    assert snapshot(files.cache) == files.before


def test_a_file_cut_at_any_byte_is_refused(files):
    for size in range(len(files.blob)):
        files.refused(files.blob[:size])


def test_a_flip_of_any_bit_is_refused(files):
    chosen = range(len(files.blob) * 8)
    if SECONDS < 60:
        chosen = random.Random(3).sample(chosen, 2000)
    for bit in chosen:
        blob = bytearray(files.blob)
        blob[bit // 8] ^= 1 << bit % 8
        files.refused(bytes(blob))


# ---- random damage ----


@fuzzed(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_random_bytes_in_random_places_are_refused(files, changes):
    blob = bytearray(files.blob)
    for place, value in changes:
        blob[place % len(blob)] = value
    if bytes(blob) != files.blob:
        files.refused(bytes(blob))


@fuzzed(st.binary(max_size=300))
def test_random_files_are_refused(files, blob):
    files.refused(blob)
    files.refused(joined(sealed(b'{"__metadata__":{"header":"00000000"}' + blob + b"}"), b""))


INTEGERS = st.one_of(
    st.integers(-2, 10), st.sampled_from([1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64]), st.integers(0, 1 << 70)
)
TEXTS = st.one_of(
    INTEGERS.map(str),
    st.text(max_size=8),
    st.sampled_from(["null", "[]", "{}", "KvCache", "LatentKvCache", "packed", "heads", "float64", "int32", "0-1"]),
    st.lists(st.tuples(st.text(max_size=2), st.lists(INTEGERS, max_size=3), st.text(max_size=2)), max_size=3).map(
        lambda slots: str([list(slot) for slot in slots]).replace("'", '"').replace(" ", "")
    ),
    st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=3).map(
        lambda runs: ",".join(f"{a}-{b}" for a, b in runs)
    ),
)
FIELDS = st.sampled_from(
    ["version", "kind", "dtype", "rows", "max_seq_len", "n_layers", "layers", "layout", "slots", "fingerprint"]
)
# What another file may say and still be one that fits: nothing in it contradicts the rest.
HARMLESS = {"max_seq_len", "layout"}


@fuzzed(st.dictionaries(FIELDS, TEXTS, min_size=1, max_size=3))
def test_forged_metadata_are_refused_or_make_no_difference(files, metadata):
    blob = forged_or_none(files.blob, metadata)
    if blob is None or blob == files.blob:
        return
    files.write(blob)
    try:
        found = describe(files.path)
    except errors.RestoreError:
        return
    assert found.rows == 5
    changed = {name for name, value in metadata.items() if value != files.metadata[name]}
    if changed - HARMLESS:
        files.refused(blob)


def forged_or_none(blob, metadata):
    try:
        return forged(blob, metadata)
    except UnicodeEncodeError:
        return None


@fuzzed(
    st.dictionaries(
        st.sampled_from(["layers.0.slot0", "layers.0.slot1", "layers.1.slot0", "layers.1.slot1"]),
        st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "more"]),
            st.one_of(INTEGERS, st.lists(INTEGERS, max_size=3), st.sampled_from(["F32", "I32", "F64", "BOOL"])),
            min_size=1,
            max_size=2,
        ),
        min_size=1,
        max_size=2,
    )
)
def test_forged_tensors_are_refused(files, tensors):
    blob = forged(files.blob, tensors=tensors)
    if blob != files.blob:
        files.refused(blob)


# ---- claims beyond all bounds, for no memory and no time ----


@pytest.mark.parametrize("length", [2, 1 << 20, HEADER_LIMIT + 1, 100 << 20, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_header_of_a_claimed_length_is_not_believed(files, length):
    header, data = parts(files.blob)
    blob = length.to_bytes(8, "little") + header + data
    files.write(blob)
    for call in (lkv.load, files.cache.restore):
        with cheap(files.path), pytest.raises(errors.RestoreError):
            call(files.path, fingerprint="model")


@pytest.mark.parametrize("tensors", [100_000, 1_000_000])
def test_a_million_tensors_are_refused(files, tensors):
    entries = b",".join(b'"layers.%d.x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(tensors))
    metadata = parts(files.blob)[0].split(b'},"layers')[0]
    for start in (b"{", metadata + b"},"):
        blob = joined(sealed(start + entries + b"}") if start != b"{" else start + entries + b"}", b"")
        files.write(blob)
        with cheap(files.path):
            files.refused(blob)


@pytest.mark.parametrize(
    "metadata",
    [
        {"n_layers": "1000000000"},
        {"n_layers": "1000000", "layers": "0-999999"},
        {"n_layers": "16000", "layers": "0-15999"},
        {"n_layers": str((1 << 63) - 1), "layers": f"1-{(1 << 63) - 2}"},
        {"n_layers": "4000000", "layers": ",".join(str(2 * i) for i in range(1_000_000))},
        {"slots": "[" + ",".join('["a",[1],""]' for _ in range(100_000)) + "]"},
        {"slots": "[" * 1_000_000},
        {"rows": str(1 << 62), "max_seq_len": str(1 << 62)},
        {"rows": "0", "max_seq_len": str(1 << 62)},
        {"checksums": "0" * 8_000_000},
        {"fingerprint": '"' + "x" * 8_000_000 + '"'},
        {"fingerprint": "[" * 8_000_000},
    ],
)
def test_boundless_metadata_are_refused(files, metadata):
    blob = forged(files.blob, metadata)
    files.write(blob)
    for call in (lkv.load, files.cache.restore):
        began = time.thread_time()
        with cheap(files.path), pytest.raises(errors.RestoreError) as refusal:
            call(files.path, fingerprint="model")
        assert time.thread_time() - began < 1
        assert len(str(refusal.value)) < 1000


def test_a_third_slot_too_many_or_too_few_is_refused(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "three").mkdir()
    two, three = Files(tmp_path / "two", "two"), Files(tmp_path / "three", "three")
    assert two.refused(three.blob).field == three.refused(two.blob).field == "number of slots"
    assert snapshot(two.cache) == two.before and snapshot(three.cache) == three.before
