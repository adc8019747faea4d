import json
import os
import signal
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from helpers.caches import LAYOUTS, SLOT_SETS, content, fill, layer_rows, pattern, same_rows, small, snapshot
from helpers.files import leftovers, rows_of
from helpers.scripts import begin, run
from helpers.threads import PATIENCE, start

import lkv
from lkv import KvCache, LatentKvCache, SlotSpec, errors
from lkv._storage import SlotTable
from lkv.dtypes import ALL
from lkv.persist import progress, saving

safetensors = pytest.importorskip("safetensors")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def kv_cache(rows=5, layers=2, capacity=8):
    cache = KvCache.with_capacity(layers, 2, 4, capacity, "float32")
    with cache.step(rows) as step:
        for layer in range(layers):
            step.append(layer, [pattern((1, 2, rows, 4), seed=2 * layer + slot) for slot in range(2)])
    return cache


class Gate:
    """A progress callback that holds a save up after its first piece."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, done, total):
        self.reached.set()
        assert self.opened.wait(PATIENCE)


@pytest.fixture
def slow(path):
    """Begins a save that stays under way until the gate is opened; its future comes from `begin`."""
    gate, saves = Gate(), []

    def begin(cache, **more):
        saves.append(start(lambda: lkv.save(cache, path, fingerprint=None, progress=gate, **more)))
        assert gate.reached.wait(PATIENCE)
        return saves[-1]

    yield gate, begin
    gate.opened.set()
    for save in saves:
        save.exception(PATIENCE)


# ---- the format, read by its own library ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", SLOT_SETS)
def test_any_reader_of_safetensors_reads_the_committed_rows(path, slots, layout):
    cache = small(slots, layout=layout)
    given = fill(cache, 5)
    cache.append(0, layer_rows(cache, 1))  # not committed
    lkv.save(cache, path, fingerprint="model")
    with safetensors.safe_open(path, "numpy") as file:
        assert len(file.keys()) == 2 * cache.n_slots
        for layer, arrays in given.items():
            assert same_rows([file.get_tensor(f"layers.{layer}.{spec.name}") for spec in cache.slots], arrays)


@pytest.mark.parametrize("dtype", [d.name for d in ALL])
def test_every_element_type_is_written_as_safetensors_calls_it(path, dtype):
    torch = pytest.importorskip("torch")
    cache = small(dtype=dtype)
    given = fill(cache, 3)
    lkv.save(cache, path, fingerprint=None)
    with safetensors.safe_open(path, "pt") as file:
        for slot, array in enumerate(given[1]):
            tensor = file.get_tensor(f"layers.1.slot{slot}")
            assert tensor.dtype is cache.dtype.torch
            assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_a_kv_cache_is_written_with_its_heads_outermost(path):
    cache = kv_cache()
    lkv.save(cache, path, fingerprint=None)
    with safetensors.safe_open(path, "numpy") as file:
        for layer in range(2):
            assert same_rows([file.get_tensor(f"layers.{layer}.{name}") for name in "kv"], content(cache, layer))


def test_the_metadata_say_what_the_file_holds(path):
    specs = [SlotSpec('a "c_kv"', (8,)), SlotSpec("schlüssel", (3,), tag="rope:interleaved")]
    cache = LatentKvCache.with_capacity(9, 16, slots=specs, dtype="bf16", layers=[0, 1, 2, 5, 8], layout="packed")
    fill(cache, 4)
    lkv.save(cache, path, fingerprint='"header":"00000000"}')
    with safetensors.safe_open(path, "numpy") as file:
        found = file.metadata()
    assert found.pop("checksums").count(" ") == 9
    assert len(found.pop("header")) == 8
    assert json.loads(found.pop("slots")) == [['a "c_kv"', [8], ""], ["schlüssel", [3], "rope:interleaved"]]
    assert json.loads(found.pop("fingerprint")) == '"header":"00000000"}'
    assert found == {
        **{"format": "lkv-cache", "version": "1", "kind": "LatentKvCache", "dtype": "bfloat16", "rows": "4"},
        **{"max_seq_len": "16", "n_layers": "9", "layers": "0-2,5,8", "layout": "packed"},
    }
    assert same_rows(rows_of(lkv.load(path, fingerprint='"header":"00000000"}'))[8], content(cache, 8))


def test_data_begin_at_a_multiple_of_64_bytes(path):
    for rows in range(5):
        cache = small(slots=[(7,)] * (rows + 1), dtype="float64")
        lkv.save(cache, path, fingerprint="x" * rows)
        assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0


def test_only_the_first_rows_are_saved_on_request(path):
    cache = small()
    fill(cache, 5)
    lkv.save(cache, path, fingerprint=None, rows=3)
    assert same_rows(content(lkv.load(path, fingerprint=None), 1), [array[:3] for array in content(cache, 1)])
    with pytest.raises(errors.GeometryError, match="rows: expected at most 5, those committed, got 6"):
        lkv.save(cache, path, fingerprint=None, rows=6)


def test_saving_changes_nothing_in_the_cache(path):
    cache = small()
    fill(cache, 5)
    before = snapshot(cache)
    lkv.save(cache, path, fingerprint=None)
    assert snapshot(cache) == before


# ---- while decoding goes on ----


def test_appends_beside_a_slow_save_are_not_delayed_and_not_in_the_file(path, slow):
    gate, begin = slow
    cache = small(layers=4, rows=300)
    fill(cache, 5)
    before = rows_of(cache)
    save = begin(cache)
    for seed in range(200):
        fill(cache, 1, seed)
        assert cache.read(2, timeout=0).hi == 6 + seed
    assert not save.done()
    gate.opened.set()
    save.result(PATIENCE)
    loaded = rows_of(lkv.load(path, fingerprint=None))
    assert all(same_rows(loaded[layer], before[layer]) for layer in before)


def test_a_write_over_rows_being_saved_waits_or_times_out(path, slow):
    gate, begin = slow
    cache = small()
    fill(cache, 5)
    before = rows_of(cache)
    save = begin(cache)
    assert cache.truncate_to(2) == 2  # moves no row
    with pytest.raises(errors.LeaseTimeoutError):
        cache.step(1, timeout=0.05)
    with pytest.raises(errors.LeaseTimeoutError):
        cache.wipe(timeout=0.05)
    waits = start(lambda: fill(cache, 1, seed=9))
    time.sleep(0.05)
    assert not waits.done()
    gate.opened.set()
    waits.result(PATIENCE)
    save.result(PATIENCE)
    loaded = rows_of(lkv.load(path, fingerprint=None))
    assert all(same_rows(loaded[layer], before[layer]) for layer in before)
    assert cache.cached_len == 3


@pytest.mark.parametrize("change", [LatentKvCache.clear, LatentKvCache.repopulate])
def test_a_save_goes_on_with_the_old_rows_when_the_storages_are_exchanged(path, slow, change):
    gate, begin = slow
    cache = small()
    fill(cache, 5)
    before = rows_of(cache)
    save = begin(cache)
    change(cache)
    cache.repopulate()
    fill(cache, 3, seed=7)
    gate.opened.set()
    save.result(PATIENCE)
    loaded = rows_of(lkv.load(path, fingerprint=None))
    assert all(same_rows(loaded[layer], before[layer]) for layer in before)


def test_every_file_of_saves_among_steps_rewinds_and_exchanges_is_of_one_moment(tmp_path):
    cache = small(layers=3, rows=64)
    over = threading.Event()

    def uniform(n):
        value = np.float32(n)
        with cache.step(n) as step:
            for layer in range(3):
                step.append(layer, [np.full((n, *spec.trailing), value, "f4") for spec in cache.slots])

    def decode():
        for turn in range(1, 10**9):
            if over.is_set():
                return
            cache.truncate_to(0) if turn % 5 else cache.repopulate()
            uniform(turn % 40 + 1)

    decoding = start(decode)
    try:
        for number in range(60):
            lkv.save(cache, tmp_path / "file", fingerprint=None)
            saved = lkv.persist.describe(tmp_path / "file")
            for layer in range(3):
                for slot in range(2):
                    assert (saved.tensor(layer, slot) == saved.rows).all(), number
    finally:
        over.set()
        decoding.result(PATIENCE)


def test_storages_exchanged_between_the_lease_and_the_look_at_them_are_not_mixed_up(path, monkeypatch):
    cache = small(layers=3)
    fill(cache, 5)

    def read(self, *args):
        held = SlotTable.read(self, *args)
        if cache.cached_len == 5:
            cache.repopulate()
            fill(cache, 3, seed=9)
        return held

    monkeypatch.setattr(LatentKvCache, "read", read, raising=False)
    lkv.save(cache, path, fingerprint=None)
    loaded, expected = rows_of(lkv.load(path, fingerprint=None)), rows_of(cache)
    assert all(same_rows(loaded[layer], expected[layer]) for layer in expected)


def test_a_thread_saves_inside_its_own_step_what_came_before_it(path):
    cache = small()
    fill(cache, 4)
    with cache.step(1) as step:
        step.append(0, layer_rows(cache, 1))
        lkv.save(cache, path, fingerprint=None)
        step.append(1, layer_rows(cache, 1))
    assert lkv.load(path, fingerprint=None).cached_len == 4


# ---- what goes wrong ----


def old_file(path):
    cache = small()
    fill(cache, 2)
    lkv.save(cache, path, fingerprint="old")
    return path.read_bytes()


def test_a_file_that_grows_past_the_limit_leaves_the_old_one_whole(path):
    before = old_file(path)
    run(
        """
        import resource, sys
        import numpy as np
        import lkv
        cache = lkv.LatentKvCache.with_capacity(2, 4096, [(64,)], "float32")
        with cache.step(4096) as step:
            for layer in range(2):
                step.append(layer, [np.ones((4096, 64), "f4")])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            lkv.save(cache, sys.argv[1], fingerprint=None)
        except OSError as error:
            print(error.errno)
        else:
            sys.exit(3)
        lkv.save(cache, sys.argv[1] + "2", fingerprint=None, rows=100)
        """,
        str(path),
    )
    assert path.read_bytes() == before
    assert leftovers(path.parent) == []
    assert lkv.load(f"{path}2", fingerprint=None).cached_len == 100


@pytest.mark.parametrize("point", ["write", "fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(path, monkeypatch, point):
    before = old_file(path)
    cache = small()
    fill(cache, 5)

    def fails(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving.os, point, fails)
        with pytest.raises(OSError, match="No space left"):
            lkv.save(cache, path, fingerprint=None)
    assert path.read_bytes() == before
    assert leftovers(path.parent) == []
    assert cache.read(0, timeout=0).hi == 5
    fill(cache, 1)


def test_the_file_is_on_the_disk_before_it_takes_the_others_place(path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(fd):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def replaced(*args):
        done.append("replace")
        replace(*args)

    monkeypatch.setattr(saving.os, "fsync", synced)
    monkeypatch.setattr(saving.os, "replace", replaced)
    lkv.save(small(), path, fingerprint=None)
    assert done == ["file", "replace", "folder"]


def test_a_path_that_cannot_be_is_an_oserror(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    for path, kind in (
        (tmp_path / "folder", IsADirectoryError),
        (tmp_path / "file" / "below", NotADirectoryError),
        (tmp_path / "none" / "below", FileNotFoundError),
    ):
        with pytest.raises(kind):
            lkv.save(small(), path, fingerprint=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"old" and not list((tmp_path / "folder").iterdir())


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path):
    old_file(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    cache = small()
    fill(cache, 5)
    lkv.save(cache, tmp_path / "link", fingerprint=None)
    assert (tmp_path / "link").is_symlink()
    assert lkv.load(tmp_path / "real", fingerprint=None).cached_len == 5


def test_an_error_of_the_callers_own_callback_leaves_the_old_file(path):
    before = old_file(path)
    cache = small()
    fill(cache, 5)

    def fails(done, total):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lkv.save(cache, path, fingerprint=None, progress=fails)
    assert path.read_bytes() == before and leftovers(path.parent) == []


def test_a_kill_at_a_random_moment_leaves_the_old_file_or_the_new_one(path):
    source = """
        import sys, time
        import numpy as np
        import lkv
        caches = []
        for rows in (300, 900):
            cache = lkv.LatentKvCache.with_capacity(4, 1024, [(128,)], "float32")
            with cache.step(rows) as step:
                for layer in range(4):
                    step.append(layer, [np.full((rows, 128), rows, "f4")])
            caches.append(cache)
        print("ready", flush=True)
        while True:
            for cache in caches:
                lkv.save(cache, sys.argv[1], fingerprint=None, progress=lambda done, total: time.sleep(0.002))
        """
    random = np.random.default_rng(7)
    for _ in range(8):
        with begin(source, str(path)) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.02 + random.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL
        if path.exists():
            saved = lkv.persist.describe(path)
            assert all((saved.tensor(layer, 0) == saved.rows).all() for layer in range(4))
    assert path.exists()


def test_what_is_no_cache_no_fingerprint_or_has_no_layer_is_refused(path):
    cache = small()
    with pytest.raises(TypeError, match="fingerprint"):
        lkv.save(cache, path)
    with pytest.raises(errors.ArgumentTypeError, match="fingerprint: expected a str or None, got 7"):
        lkv.save(cache, path, fingerprint=7)
    with pytest.raises(errors.GeometryError, match="UTF-8"):
        lkv.save(LatentKvCache.with_capacity(1, 1, slots=[SlotSpec("\ud800", (1,))]), path, fingerprint=None)
    with pytest.raises(errors.ArgumentTypeError, match="cache: expected a LatentKvCache or a KvCache, got int"):
        lkv.save(3, path, fingerprint=None)
    cache.clear()
    with pytest.raises(errors.UnpopulatedLayerError, match="save: no layer"):
        lkv.save(cache, path, fingerprint=None)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("letter", ["x", '"', "\n", "\u00fc", "\u8a9e", "\U0001f600"])
def test_a_text_of_any_length_is_either_refused_or_comes_back(path, letter):
    saved = []
    for length in (1000, 3000, 4000, 5000, 8000, 16_000, 17_000):
        try:
            lkv.save(small(), path, fingerprint=letter * length)
        except errors.GeometryError as error:
            assert str(error).startswith("fingerprint: expected at most 16384 bytes")
        else:
            saved.append(length)
            lkv.load(path, fingerprint=letter * length)
    assert 3000 in saved and 17_000 not in saved


def test_poisoned_rows_are_not_saved(path):
    cache = small()
    fill(cache, 3)
    with pytest.raises(ZeroDivisionError), cache.slot_storage(1, 0).write():
        raise ZeroDivisionError
    with pytest.raises(errors.PoisonedError):
        lkv.save(cache, path, fingerprint=None)
    assert not path.exists()


# ---- cost and progress ----


@pytest.mark.parametrize("make", [lambda: kv_cache(rows=40_000, capacity=50_000), lambda: big(), lambda: big("packed")])
def test_a_save_makes_no_second_copy_of_the_rows(path, make):
    cache = make()
    tracemalloc.start()
    try:
        lkv.save(cache, path, fingerprint=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < min(progress.CHUNK + (1 << 20), path.stat().st_size)


def big(layout="separate"):
    cache = LatentKvCache.with_capacity(4, 10_000, [(512,), (64,)], "float32", layout=layout)
    with cache.step(10_000) as step:
        for layer in range(4):
            step.append(layer, [np.ones((10_000, 512), "f4"), np.ones((10_000, 64), "f4")])
    return cache


def test_progress_is_told_in_bytes_up_to_the_last(path):
    told = []
    lkv.save(big(), path, fingerprint=None, progress=lambda *step: told.append(step))
    total = 4 * 10_000 * (512 + 64) * 4
    assert told[-1] == (total, total) and [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 8


@pytest.mark.parametrize("bar", ["tqdm", "plain"])
def test_a_bar_is_shown_when_asked_for_or_after_a_second_on_a_terminal(path, monkeypatch, capsys, bar):
    if bar == "plain":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    cache = small()
    fill(cache, 5)

    def shown(**more):
        lkv.save(cache, path, fingerprint=None, **more)
        return capsys.readouterr().err

    assert "save: 100" in shown(progress=True)
    assert shown(progress=False) == "" and shown() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert shown() == ""
    monkeypatch.setattr(progress, "_PATIENCE", 0)
    assert "save: 100" in shown()
    assert shown(progress=False) == ""
