import numpy as np
import pytest
from helpers.ids import named
from helpers.scripts import run
from helpers.storages import filled, live

from lkv import LatentKvCache, Storage, errors
from lkv._storage import host_memory, set_host_limit

# ---- arguments ----

NO_INTEGER = [True, 1.0, "1", b"1", (1,), np.float32(1), 2**63, 2**70, -(2**63) - 1, -1]
CALLS = [
    ("lo|rows", lambda s, v: s.read(v)),
    ("hi|rows", lambda s, v: s.read(0, v)),
    ("lo|rows", lambda s, v: s.write(v)),
    ("hi|rows", lambda s, v: s.write(0, v)),
    ("expected|claim", lambda s, v: s.claim(v, 4)),
    ("new|claim", lambda s, v: s.claim(0, v)),
    ("lo|rows", lambda s, v: s.read_host(v)),
    ("hi|rows", lambda s, v: s.read_host(0, v)),
    ("lo|data", lambda s, v: s.write_host(bytes(4), v)),
    ("lo|rows", lambda s, v: s.release_rows(v)),
    ("hi|rows", lambda s, v: s.release_rows(0, v)),
    ("shape", lambda s, v: s.alias((v,))),
    ("shape", lambda s, v: Storage((v,))),
    ("axis", lambda s, v: Storage((4, 4), axis=v)),
    ("axis", lambda s, v: Storage.wrap(np.zeros((4, 4)), axis=v)),
    ("address|shape", lambda s, v: Storage.from_address(v, 4)),
    ("shape", lambda s, v: Storage.from_address(s.address, (v,))),
    ("nbytes", lambda s, v: set_host_limit(v)),
]


@pytest.mark.parametrize(("name", "call"), CALLS)
@pytest.mark.parametrize("value", NO_INTEGER, ids=named)
def test_a_bad_integer_is_refused_by_name_and_changes_nothing(name, call, value):
    if "address" in name and value == 2**63:
        pytest.skip("an address")
    storage = filled((6, 4))
    before = (storage.version, storage.claimed, storage.refcount, storage.poisoned, storage.read_host())
    with pytest.raises(errors.LkvError, match=name):
        call(storage, value)
    assert (storage.version, storage.claimed, storage.refcount, storage.poisoned, storage.read_host()) == before
    assert host_memory()["limit"] == 2**64 - 1


@pytest.mark.parametrize(("lo", "hi"), [(3, 2), (0, 7), (7, 7), (-1, 2), (0, -1), (2**62, 2**62)])
def test_rows_outside_the_storage_are_refused(lo, hi):
    storage = filled((6, 4))
    for call in (storage.read, storage.write, storage.read_host, storage.release_rows):
        with pytest.raises(errors.LayerIndexError, match="rows"):
            call(lo, hi)
    assert storage.refcount == 1


@pytest.mark.parametrize("timeout", [True, "1", b"", -1, -0.5, float("nan"), 1j, [1], object()], ids=named)
def test_a_bad_timeout_is_refused_by_name(timeout):
    storage = Storage(4)
    for call in (storage.read, storage.write, storage.read_host):
        with pytest.raises(errors.LkvError, match="timeout"):
            call(timeout=timeout)
    assert storage.refcount == 1


@pytest.mark.parametrize(
    "timeout", [None, 0, 0.0, 1e-12, 1, 1.5, 2**70, 10**400, float("inf"), np.float64(1)], ids=named
)
def test_any_length_of_time_is_a_timeout(timeout):
    with Storage(4).read(timeout=timeout):
        pass


@pytest.mark.parametrize("shape", [None, 1.5, True, "4", b"4", object(), {}, [[4]], (None,), ("4",)], ids=named)
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(errors.LkvError, match="shape"):
        Storage(shape)


def test_numpy_integers_are_integers():
    storage = Storage(np.int64(6))
    with storage.read(np.uint8(1), np.int32(3)) as lease:
        assert (lease.lo, lease.hi) == (1, 3)
    assert storage.claim(np.int16(0), np.int64(2))


def test_an_unknown_element_type_or_device_is_refused():
    before = live()
    for dtype in (None, "u16", "complex64", 4, object()):
        with pytest.raises(errors.DTypeMismatchError, match="dtype"):
            Storage(4, dtype)
    for device in ("tpu", "cuda:99", "", None, 4, "cpu:1"):
        with pytest.raises(errors.LkvError, match="device"):
            Storage(4, device=device)
        with pytest.raises(errors.LkvError, match="device"):
            Storage(4).copy(device or "")
    assert live() <= before


# ---- objects that were never made ----


def test_a_storage_is_initialised_once():
    storage = filled(8)
    before = (storage.id, storage.read_host())
    with pytest.raises(TypeError, match="twice"):
        storage.__init__(4)
    assert (storage.id, storage.read_host()) == before
    late = Storage.__new__(Storage)
    with pytest.raises(errors.GeometryError):
        late.__init__(0)
    late.__init__(8)
    assert late.nbytes == 8


ABUSE = """
    import sys, warnings
    import numpy as np
    import lkv
    from lkv import _storage

    warnings.simplefilter("ignore")
    kind = getattr(_storage, sys.argv[1])
    skipped = {"__class__", "__init_subclass__", "__subclasshook__", "__new__", "__getattribute__"}
    arguments = [
        (), (0,), (1,), (0, 0), (0, 1), (None,), ("numpy",), (0, []), (0, [None, None]), ([],), (None, None, None),
        (0, 0, None, 0, 0, 0, False), (8, [], "f32", "cpu"), (0, "what", 0), (1, 8, [], [], "f32", "cpu"), (True,),
        (_storage.Exclusive.__new__(_storage.Exclusive),), (_storage.Storage.__new__(_storage.Storage), "what"),
    ]
    calls = errors = 0
    for name in dir(kind):
        if name in skipped:
            continue
        for args in arguments:
            made = kind.__new__(kind)
            calls += 1
            try:
                value = getattr(made, name)
                if callable(value):
                    value(*args)
            except Exception:
                errors += 1
    made = kind.__new__(kind)
    cache = lkv.LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
    for use in (
        repr, hash, len, list, bool, memoryview, bytes, np.asarray, np.from_dlpack, lkv.Storage.wrap,
        lkv.Storage.from_capsule, lambda x: lkv.bits(x, "f32"), lambda x: cache.append(0, [x]),
        lambda x: cache.append(0, x), lambda x: x.__dlpack__(dl_device=(1, 0)), lambda x: x.__dlpack__(stream=1),
        lambda x: x.__dlpack__(copy=True), lambda x: x.__dlpack__(max_version=(1, 0)), lambda x: x.__enter__(),
        lambda x: x.__exit__(None, None, None), lambda x: x == x, lambda x: kind.__init__(x),
    ):
        try:
            use(made)
        except Exception:
            pass
    assert errors > 20, errors
    print(calls, errors, cache.cached_len)
"""


@pytest.mark.parametrize(
    "kind", ["Storage", "View", "Lease", "Step", "LayerRows", "SlotTable", "LayerBuffers", "Bits", "Exclusive"]
)
def test_an_object_that_was_never_made_raises_and_does_not_crash(kind):
    assert run(ABUSE, kind).endswith(" 0\n")


def test_leases_views_and_steps_cannot_be_made_by_hand():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
    for kind in (type(cache.step(1)), type(Storage(1).alias()), type(Storage(1).read()), type(cache.read(0))):
        with pytest.raises(TypeError, match="come from"):
            kind()
