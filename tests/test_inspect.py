"""lkv.inspect and the ``lkv inspect`` command: what is in a cache, and what looks wrong."""

import json
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from helpers.fake_devices import PlainDevice

from lkv import KvCache, LatentKvCache, cli, decoding, inspect
from lkv.errors import ArgumentTypeError

persist = pytest.importorskip("lkv.persist")


@pytest.fixture
def run(capsys):
    """Run the command in this process: exit status, stdout, stderr."""

    def call(*argv):
        try:
            status = cli.main([str(a) for a in argv])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def filled(dtype="float32", n=5, **more):
    """Row r of slot s of layer l is full of ``(l + 1) * (r + 1)``, negative in slot 1."""
    cache = LatentKvCache.with_capacity(2, 8, [(4,), ()], dtype, **more)
    values = np.arange(1, n + 1)
    for layer in range(2):
        if cache.layers[layer] is not None:
            wide = np.repeat(values[:, None], 4, 1) * (layer + 1)
            cache.append(layer, [a.astype(cache.dtype.numpy) for a in (wide, -values * (layer + 1))])
    cache.advance_by(n)
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8"])
@pytest.mark.parametrize("layout", ["separate", "packed"])
def test_a_line_for_every_slot_with_rows_bytes_and_norms(dtype, layout):
    cache = filled(dtype, layout=layout)
    size = cache.dtype.itemsize
    found = inspect.summary(cache)
    assert [(row.layer, row.slot, row.name, row.rows) for row in found] == [
        (layer, slot, f"slot{slot}", 5) for layer in range(2) for slot in range(2)
    ]
    assert [row.nbytes for row in found] == [5 * 4 * size, 5 * size] * 2
    assert [(row.norm_min, row.norm_max, row.norm_mean) for row in found] == [
        (2, 10, 6), (1, 5, 3), (4, 20, 12), (2, 10, 6)
    ]  # fmt: skip
    assert all((row.nan_count, row.nan_rows, row.zero_rows, row.version) == (0, (), (), 1) for row in found)
    assert inspect.findings(found) == []


def test_versions_are_those_of_the_slots():
    cache = filled()
    cache.bump_version(1, 0)
    assert [row.version for row in inspect.summary(cache)] == [1, 1, 2, 1]


def test_nan_and_untouched_rows_are_pointed_out():
    cache = LatentKvCache.with_capacity(1, 64, [(4,), (2,)], "bfloat16")
    rows = np.ones((40, 4), ml_dtypes.bfloat16)
    rows[7, 1] = rows[7, 2] = np.nan
    rows[[0, 3, 4, 5]] = 0
    rows[10:30:2] = 0
    cache.append(0, [rows, np.ones((40, 2), ml_dtypes.bfloat16)])
    cache.advance_by(40)
    first, second = inspect.summary(cache)
    assert (first.nan_count, first.nan_rows, first.zero_rows[:5]) == (2, (7,), (0, 3, 4, 5, 10))
    assert (first.norm_min, first.norm_max) == (0, 2) and second.zero_rows == ()
    assert inspect.findings([first, second]) == [
        "layer 0 slot 0 (slot0): 2 NaN in row 7",
        "layer 0 slot 0 (slot0): all zero, as if never written: rows 0, 3-5, 10, 12, 14 and 7 more ranges",
    ]


def test_rows_behind_the_committed_ones_do_not_count():
    cache = filled(n=3)
    cache.append(0, [np.full((2, 4), np.nan, "f4"), np.zeros(2, "f4")])
    assert inspect.findings(inspect.summary(cache)) == []
    empty = inspect.summary(LatentKvCache.with_capacity(1, 8, [(4,)]))
    assert (empty[0].rows, empty[0].nbytes, empty[0].norm_min, empty[0].norm_mean) == (0, 0, None, None)
    assert "-" in inspect.table(empty)


def test_rows_are_taken_in_pieces_without_a_difference(monkeypatch):
    whole = inspect.summary(filled())
    monkeypatch.setattr(inspect, "_CHUNK", 20)
    assert inspect.summary(filled()) == whole


def test_large_values_do_not_overflow_and_infinite_ones_are_told():
    cache = LatentKvCache.with_capacity(1, 8, [(4,)], "bfloat16")
    cache.append(0, [np.array([[1e30] * 4, [np.inf] * 4]).astype(ml_dtypes.bfloat16)])
    cache.advance_by(2)
    (row,) = inspect.summary(cache)
    assert row.norm_min == pytest.approx(2e30, rel=0.01) and row.norm_max == np.inf and row.nan_count == 0
    assert json.loads(json.dumps(row.as_dict(), allow_nan=False))["norm_max"] is None


def test_a_kv_cache_is_looked_at_along_its_rows():
    cache = KvCache.with_capacity(1, 2, 4, 8, "float32")
    k = np.ones((1, 2, 3, 4), "f4")
    k[0, :, 1] = 0
    cache.append(0, [k, 2 * np.ones((1, 2, 3, 4), "f4")])
    cache.advance_by(3)
    first, second = inspect.summary(cache)
    assert (first.name, first.rows, first.nbytes, first.zero_rows) == ("k", 3, 96, (1,))
    assert second.norm_mean == pytest.approx(np.sqrt(32))
    assert inspect.summary(KvCache.with_dims(2, 2, 4)) == []


def test_only_populated_layers_are_looked_at():
    assert [row.layer for row in inspect.summary(filled(layers=[1]))] == [1, 1]


def test_a_cache_on_another_device_is_copied_to_the_host():
    type("Inspected", (PlainDevice,), {"name": "inspected"})().register()
    there = filled().to("inspected:0")
    there.bump_version(0, 0)
    found = inspect.summary(there)
    assert [row.norm_mean for row in found] == [6, 3, 12, 6] and found[0].version == found[1].version + 1


def test_decoding_goes_on_meanwhile():
    cache = filled()
    measured = inspect.measure(cache)
    next(measured)
    done = threading.Thread(target=lambda: cache.append(0, [np.ones((1, 4), "f4"), np.ones(1, "f4")]))
    done.start()
    done.join(10)
    assert not done.is_alive()
    measured.close()
    cache.truncate_to(0)


def test_anything_else_is_refused():
    with pytest.raises(ArgumentTypeError, match="expected a LatentKvCache"):
        inspect.summary(np.zeros(3))


# ---- the command ----


def test_the_demo_prints_an_aligned_table(run):
    status, out, err = run("inspect", "--demo")
    assert (status, err) == (0, "")
    table = out.split("\n\n")[1].splitlines()
    assert len(table) == 1 + 4 * 2 and len({len(line) for line in table}) == 1
    assert table[0].split()[:4] == ["layer", "slot", "rows", "bytes"] and table[1].split()[:3] == ["0", "c_kv", "24"]
    assert out.endswith("no NaN, no untouched rows\n")


def test_json_is_one_object(run):
    status, out, _ = run("inspect", "--demo", "--json")
    report = json.loads(out)
    assert status == 0 and report["rows"] == 24 and len(report["slots"]) == 8 and report["findings"] == []
    assert report["slots"][0]["name"] == "c_kv" and report["slots"][0]["nbytes"] == 24 * 64 * 2


def test_what_looks_wrong_is_noted(run, monkeypatch):
    def spoilt():
        cache = filled(n=3)
        cache.append(0, [np.zeros((2, 4), "f4"), np.array([np.nan, 1], "f4")])
        cache.append(1, [np.ones((2, 4), "f4"), np.ones(2, "f4")])
        cache.advance_by(2)
        return cache

    monkeypatch.setattr(decoding, "small_cache", spoilt)
    status, out, _ = run("inspect", "--demo")
    assert status == 0 and out.splitlines()[-2:] == [
        "note: layer 0 slot 0 (slot0): all zero, as if never written: rows 3-4",
        "note: layer 0 slot 1 (slot1): 1 NaN in row 3",
    ]


def saved(tmp_path, cache, **more):
    path = tmp_path / "prefix.lkv"
    persist.save(cache, path, **{"fingerprint": "model 1", **more})
    return path


@pytest.mark.parametrize("layout", ["separate", "packed"])
def test_a_file_is_told_as_the_cache_was(run, tmp_path, layout):
    cache = filled("bfloat16", layout=layout)
    path = saved(tmp_path, cache)
    expected = [{**row.as_dict(), "version": None} for row in inspect.summary(cache)]
    assert [row.as_dict() for row in inspect.summary(persist.describe(path))] == expected
    status, out, _ = run("inspect", path, "--json")
    report = json.loads(out)
    assert status == 0 and report["fingerprint"] == "model 1" and report["kind"] == "LatentKvCache"
    assert report["slots"] == json.loads(json.dumps(expected))
    assert "fingerprint  model 1" in run("inspect", path)[1]


def test_a_file_of_a_kv_cache_or_of_some_layers_is_told_as_the_cache_was(tmp_path):
    kv = KvCache.with_capacity(2, 2, 4, 8, "float32")
    for layer in range(2):
        kv.append(layer, [np.arange(24, dtype="f4").reshape(1, 2, 3, 4)] * 2)
    kv.advance_by(3)
    for cache in (kv, filled(layers=[1])):
        found = inspect.summary(persist.describe(saved(tmp_path, cache)))
        assert [(row.layer, row.norm_mean, row.rows) for row in found] == [
            (row.layer, row.norm_mean, row.rows) for row in inspect.summary(cache)
        ]


@pytest.mark.parametrize("spoil", ["missing", "folder", "text", "empty", "cut", "bit"])
def test_a_bad_path_is_one_line_and_status_2(run, tmp_path, spoil):
    path = tmp_path / "bad.lkv"
    if spoil == "folder":
        path.mkdir()
    elif spoil in ("text", "empty"):
        path.write_text("not a cache" if spoil == "text" else "")
    elif spoil in ("cut", "bit"):
        good = saved(tmp_path, filled()).read_bytes()
        path.write_bytes(good[:-1] if spoil == "cut" else good[:-1] + bytes([good[-1] ^ 1]))
    status, out, err = run("inspect", path)
    assert (status, out) == (2, "")
    assert err.startswith("lkv inspect: error: ") and str(path) in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["a", "--demo"], ["--nonsense"]])
def test_a_request_that_makes_no_sense_is_one_line_and_status_2(run, argv):
    status, out, err = run("inspect", *argv)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1


# ---- the picture ----


def test_a_plot_is_a_picture(run, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "out.png"
    status, out, err = run("inspect", "--demo", "--plot", path)
    assert (status, err) == (0, "") and "c_kv" in out
    assert image.imread(path).shape[:2] > (400, 400)


def test_bad_rows_and_odd_caches_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot = pytest.importorskip("lkv.plot")
    image = pytest.importorskip("matplotlib.image")
    cache = LatentKvCache.with_capacity(70, 64, [(2,)], "float32", layers=range(5, 70))
    with cache.step(3) as step:
        for layer in range(5, 70):
            step.append(layer, [np.array([[0, 0], [np.nan, 1], [1, 2]], "f4")])
    plot.save_plot(inspect.measure(cache), tmp_path / "bad.png", "a $title_ with \\marks")
    pixels = image.imread(tmp_path / "bad.png")[..., :3]
    assert (pixels == (1, 0, 0)).all(axis=-1).sum() > 50
    for odd in (LatentKvCache.with_capacity(1, 8, [(2,)]), KvCache.with_dims(1, 1, 1)):
        plot.save_plot(inspect.measure(odd), tmp_path / "empty.png")


@pytest.mark.parametrize("path", ["nowhere/out.png", "out.nonsense"])
def test_a_plot_that_cannot_be_written_is_one_line_and_status_2(run, tmp_path, path):
    pytest.importorskip("matplotlib")
    status, out, err = run("inspect", "--demo", "--plot", tmp_path / path)
    assert (status, out) == (2, "")
    assert err.startswith("lkv inspect: error: --plot: ") and len(err.splitlines()) == 1


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run("inspect", "--demo", "--plot", "out.png")
    assert (status, out) == (2, "")
    assert err == (
        "lkv inspect: error: --plot: plots need matplotlib, which is not importable; pip install 'latent-kv[plot]'\n"
    )


def test_matplotlib_is_imported_for_a_plot_only():
    code = "import sys; from lkv.cli import main; main(['inspect', '--demo']); sys.exit('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
