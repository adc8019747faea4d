"""No public call leaves anything behind: not a reference, not a buffer, not a byte."""

import contextlib
import ctypes
import gc
import sys
import tempfile

import numpy as np
import pytest
from helpers.memory import resident

import lkv
from lkv import KvCache, KvLayer, LatentKvCache, Lease, Storage
from lkv._storage import LayerRows, Step, View, host_memory
from lkv.errors import LkvError

CALLS = 200
RESIDENT_GROWTH = 4 << 20  # a leak of 20 KB per call; smaller ones show in the heap
NEW = np.ones((1, 4), "f4"), np.ones((1, 2), "f4")
KV_NEW = [np.ones((1, 2, 1, 4), "f4")] * 2


class HeapInfo(ctypes.Structure):
    """mallinfo2 of the GNU C library."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("arena", "o", "s", "hblks", "hblkhd", "u", "f", "uordblks", "fo", "k")
    ]


def heap():
    """Bytes that malloc has handed out and not taken back; 0 where that is not known."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    info.restype = HeapInfo
    now = info()
    return now.uordblks + now.hblkhd


def storage():
    made = Storage((16, 4), "float32")
    made.write_host(bytes(256))
    return made


def lease():
    return storage().read()


def latent():
    cache = LatentKvCache.with_capacity(2, 16, [(4,), (2,)], dtype="float32")
    for layer in range(2):
        cache.append(layer, NEW)
    cache.advance_by(1)
    return cache


def store_and_restore(cache):
    with tempfile.TemporaryDirectory() as folder:
        lkv.save(cache, f"{folder}/file", fingerprint=None)
        cache.restore(f"{folder}/file", fingerprint=None)
        lkv.load(f"{folder}/file", fingerprint=None)


def kv():
    cache = KvCache.with_capacity(2, 2, 4, 16, "float32")
    for layer in range(2):
        cache.append(layer, KV_NEW)
    cache.advance_by(1)
    return cache


def in_step(body):
    """A call on a step, which publishes nothing."""

    def call(cache):
        step = cache.step(1)
        body(step)
        step.abandon()

    return call


def write_layers(step):
    for layer in range(2):
        step.append(layer, NEW)


def commit(cache):
    step = cache.step(1)
    write_layers(step)
    step.commit()
    cache.truncate_to(1)


def view_layer(step):
    step.append(0, NEW)
    with step.view(0) as rows:
        rows.numpy()


def note_write(step):
    step.reserve(0).numpy()[0][...] = 1
    step.note_write(0)


def torch_of(exporter):
    pytest.importorskip("torch")
    exporter.torch()


def cupy_of(exporter):
    with contextlib.suppress(Exception):  # host memory is not CuPy's, if there is a CuPy at all
        exporter.cupy()


def write_lease(storage, use):
    use(storage.write(0, 4))


def hold_rebind(cache):
    with cache.rebind_hold():
        pass


def set_layer(cache):
    cache.set_layer(0, KvLayer.allocate(2, 4, 16, "float32"))


def publish(cache, rows):
    for layer in range(2):
        cache.append(layer, rows)
    cache.advance_by(1)
    cache.truncate_to(1)


# (class, method) -> what to make once, what to call many times with it. Properties are read without a line here.
TABLE = {
    (Storage, "alias"): (storage, lambda s: s.alias((4, 4, 4)).numpy()),
    (Storage, "bump_version"): (storage, lambda s: s.bump_version()),
    (Storage, "capsule"): (storage, lambda s: s.capsule()),
    (Storage, "claim"): (storage, lambda s: s.claim(s.claimed, s.claimed)),
    (Storage, "clear_poison"): (storage, lambda s: s.clear_poison()),
    (Storage, "copy"): (storage, lambda s: s.copy()),
    (Storage, "from_address"): (storage, lambda s: Storage.from_address(s.address, 16, owner=s)),
    (Storage, "from_capsule"): (storage, lambda s: Storage.from_capsule(s.capsule())),
    (Storage, "read"): (storage, lambda s: s.read(1, 3).numpy()),
    (Storage, "read_host"): (storage, lambda s: s.read_host(1, 3)),
    (Storage, "release_rows"): (storage, lambda s: s.release_rows()),
    (Storage, "wrap"): (storage, lambda s: Storage.wrap(s.alias()).read().numpy()),
    (Storage, "write"): (storage, lambda s: write_lease(s, lambda w: w.numpy())),
    (Storage, "write_host"): (storage, lambda s: s.write_host(bytes(32), 2)),
    (Lease, "capsule"): (lease, lambda r: r.capsule()),
    (Lease, "copy_from"): (storage, lambda s: write_lease(s, lambda w: w.copy_from(w))),
    (Lease, "cupy"): (lease, cupy_of),
    (Lease, "downgrade"): (storage, lambda s: write_lease(s, lambda w: w.downgrade())),
    (Lease, "from_capsule"): (lease, lambda r: Lease.from_capsule(r.capsule()).numpy()),
    (Lease, "numpy"): (lease, lambda r: r.numpy()),
    (Lease, "release"): (storage, lambda s: s.read().release()),
    (Lease, "torch"): (lease, torch_of),
    (View, "copy_from"): (storage, lambda s: s.alias().copy_from(s.alias())),
    (View, "cupy"): (lambda: storage().alias(), cupy_of),
    (View, "numpy"): (lambda: storage().alias(), lambda v: v.numpy()),
    (View, "torch"): (lambda: storage().alias(), torch_of),
    (Step, "abandon"): (latent, in_step(lambda step: step.abandon())),
    (Step, "append"): (latent, in_step(write_layers)),
    (Step, "append_layers"): (latent, in_step(lambda step: step.append_layers([NEW, NEW]))),
    (Step, "commit"): (latent, commit),
    (Step, "note_write"): (latent, in_step(note_write)),
    (Step, "reserve"): (latent, in_step(lambda step: step.reserve(1).numpy())),
    (Step, "view"): (latent, in_step(view_layer)),
    (LayerRows, "cupy"): (lambda: latent().read(0), cupy_of),
    (LayerRows, "numpy"): (lambda: latent().read(0), lambda rows: rows.numpy()),
    (LayerRows, "release"): (latent, lambda c: c.read(0).release()),
    (LayerRows, "torch"): (lambda: latent().read(0), torch_of),
    (LatentKvCache, "pages"): (latent, lambda c: [view.numpy() for layer in c.pages(4) for view in layer]),
    (LatentKvCache, "with_capacity"): (latent, lambda c: latent()),
    (LatentKvCache, "append"): (latent, lambda c: c.append(0, NEW)),
    (LatentKvCache, "advance_by"): (latent, lambda c: publish(c, NEW)),
    (LatentKvCache, "bytes_required"): (latent, lambda c: c.bytes_required(2, 16, [(4,)])),
    (KvCache, "append"): (kv, lambda c: c.append(0, KV_NEW)),
    (KvCache, "advance_by"): (kv, lambda c: publish(c, KV_NEW)),
    (KvCache, "bytes_required"): (kv, lambda c: c.bytes_required(2, 2, 4, 16)),
    (KvCache, "set_layer"): (kv, set_layer),
    (KvCache, "with_capacity"): (kv, lambda c: kv()),
    (KvCache, "with_dims"): (kv, lambda c: set_layer(KvCache.with_dims(2, 2, 4))),
}
for kind, make in ((LatentKvCache, latent), (KvCache, kv)):
    TABLE |= {
        (kind, "bump_version"): (make, lambda c: c.bump_version(0, 0)),
        (kind, "clear"): (make, lambda c: (c.clear(), c.repopulate())),
        (kind, "copy_from"): (make, lambda c, make=make: c.copy_from(make())),
        (kind, "fork"): (make, lambda c: c.fork()),
        (kind, "gather"): (make, lambda c: c.gather(0, [0, 0])),
        (kind, "note_write"): (make, lambda c: c.note_write(0, 1)),
        (kind, "read"): (make, lambda c: c.read(0)[1].numpy()),
        (kind, "rebind_encoding"): (make, lambda c: c.rebind_encoding(0)),
        (kind, "rebind_hold"): (make, hold_rebind),
        (kind, "rebind_location"): (make, lambda c: c.rebind_location()),
        (kind, "rebind_slot"): (make, lambda c: c.rebind_slot(0, 0)),
        (kind, "repopulate"): (make, lambda c: c.repopulate()),
        (kind, "restore"): (make, store_and_restore),
        (kind, "slot_storage"): (make, lambda c: c.slot_storage(1, 1)),
        (kind, "slot_trailing"): (make, lambda c: c.slot_trailing(1)),
        (kind, "slot_version"): (make, lambda c: c.slot_version(1, 1)),
        (kind, "step"): (make, lambda c: c.step(1).abandon()),
        (kind, "to"): (make, lambda c: c.to("cpu")),
        (kind, "truncate_to"): (make, lambda c: c.truncate_to(1)),
        (kind, "wipe"): (make, lambda c: c.wipe()),
        (kind, "written_len"): (make, lambda c: c.written_len(0)),
    }

# What is refused must leave as little behind.
REFUSED = {
    "a lease of rows that are not there": (storage, lambda s: s.read(3, 99)),
    "a lease that is taken": (lambda: (s := storage(), s.write()), lambda pair: pair[0].read(timeout=0)),
    "a lease that times out": (lambda: (s := storage(), s.write()), lambda pair: pair[0].read(timeout=1e-6)),
    "a lease that would wait for itself": (lambda: (s := storage(), s.write()), lambda pair: pair[0].read()),
    "a storage too large": (storage, lambda s: Storage((1 << 40, 1 << 40))),
    "a storage without memory": (storage, lambda s: Storage(1 << 62)),
    "a capsule of another name": (storage, lambda s: Lease.from_capsule(s.capsule())),
    "an array that lies wrong": (storage, lambda s: Storage.wrap(np.ones((4, 4), order="F"))),
    "rows of the wrong shape": (latent, lambda c: c.append(0, [NEW[0], NEW[0]])),
    "rows of the wrong type": (latent, lambda c: c.append(0, [NEW[0].astype("f8"), NEW[1]])),
    "too few slots": (latent, lambda c: c.append(0, NEW[:1])),
    "no arrays": (latent, lambda c: c.append(0, [object(), None])),
    "more rows than there is room for": (latent, lambda c: c.step(99)),
    "a step inside a step": (lambda: (c := latent(), c.step(1)), lambda pair: pair[0].truncate_to(0)),
    "a step that is not complete": (latent, lambda c: c.step(1).commit()),
    "an ended lease": (lambda: (r := lease(), r.release()), lambda pair: pair[0].numpy()),
    "rows that are not published": (latent, lambda c: c.gather(0, [5])),
    "a cache too large": (latent, lambda c: LatentKvCache.with_capacity(4, 1 << 40, [(1 << 20,)])),
    "a layer that fits nowhere": (kv, lambda c: c.set_layer(0, KvLayer.allocate(1, 4, 16, "float32"))),
}


def numbers(subject):
    """All that must not grow."""
    gc.collect()
    memory = host_memory()
    counts = [s.refcount for s in storages(subject)]
    blocks = sys.getallocatedblocks()
    # Without the interpreter's own allocator (PYTHONMALLOC=malloc) the heap is full of its objects, which come and go;
    # a sanitizer keeps what was freed as well.
    bytes_held = (heap(), resident()) if blocks else (0, 0)
    return memory["live_buffers"], memory["live_bytes"], counts, blocks, *bytes_held


def storages(subject):
    for item in subject if isinstance(subject, tuple) else (subject,):
        if isinstance(item, Storage):
            yield item
        elif isinstance(item, Lease):
            yield item.storage


def assert_nothing_stays(subject, call):
    for _ in range(30):  # caches fill, lists reach their size
        call(subject)
    for _ in range(4):
        buffers, nbytes, counts, blocks, used, pages = numbers(subject)
        for _ in range(CALLS):
            call(subject)
        now = numbers(subject)
        assert now[:3] == (buffers, nbytes, counts)
        # The interpreter's own caches move too, but not every time; a leak does.
        if now[3] - blocks < CALLS // 4 and now[4] - used < 8 * CALLS and now[5] - pages < RESIDENT_GROWTH:
            return
    grown = f"{now[3] - blocks} blocks, {now[4] - used} bytes of heap, {now[5] - pages} resident"
    pytest.fail(f"{CALLS} calls, again and again: {grown}")


def name_of(entry):
    return f"{entry[0].__name__}.{entry[1]}"


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_a_call_leaves_nothing_behind(entry):
    make, call = TABLE[entry]
    assert_nothing_stays(make(), call)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_nothing_behind(name):
    make, call = REFUSED[name]

    def refused(subject):
        with pytest.raises((LkvError, MemoryError)):
            call(subject)

    assert_nothing_stays(make(), refused)


SUBJECTS = {
    Storage: storage,
    Lease: lease,
    View: lambda: storage().alias(),
    Step: lambda: latent().step(1),
    LayerRows: lambda: latent().read(0),
    LatentKvCache: latent,
    KvCache: kv,
}


def public(kind):
    return [name for name in dir(kind) if not name.startswith("_")]


@pytest.mark.parametrize("kind", SUBJECTS)
def test_properties_and_the_usual_operators_leave_nothing_behind(kind):
    names = [name for name in public(kind) if not callable(getattr(kind, name))]

    def call(subject):
        for name in names:
            getattr(subject, name)
        repr(subject), hash(subject), subject == subject, subject != 1

    assert_nothing_stays(SUBJECTS[kind](), call)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_exports_and_context_managers_leave_nothing_behind(kind):
    def call(_):
        made = SUBJECTS[kind]()
        for exporter in [made] if isinstance(made, View) else made if isinstance(made, LayerRows) else []:
            memoryview(exporter), np.from_dlpack(exporter), np.asarray(exporter), len(exporter)
            exporter.__dlpack__(max_version=(1, 1)), exporter.__dlpack__(copy=True), exporter.__dlpack_device__()
        if isinstance(made, Step):
            made.abandon()
        elif hasattr(made, "__enter__"):
            with made:
                pass

    assert_nothing_stays(None, call)


@pytest.mark.parametrize("kind", SUBJECTS)
def test_the_table_has_a_line_for_every_public_method(kind):
    methods = {name for name in public(kind) if callable(getattr(kind, name))}
    covered = {name for owner, name in TABLE if owner is kind}
    assert methods == covered


def test_a_leak_is_noticed():
    kept = []
    with pytest.raises(AssertionError):
        assert_nothing_stays(None, lambda _: kept.append(lkv.Storage(1)))
    if not sys.getallocatedblocks():
        pytest.skip("the allocator does not count (PYTHONMALLOC=malloc)")
    with pytest.raises(pytest.fail.Exception, match="blocks"):
        assert_nothing_stays(None, lambda _: kept.append(object()))
