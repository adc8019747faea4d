"""The ``lkv`` command, end to end on the tiny preset."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import lkv
from lkv import _host, cli, decoding
from lkv.dtypes import ALL
from lkv.mla import PRESETS

SMALL = ["decode", "--prompt", "20", "--tokens", "10", "--layers", "2"]


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


@pytest.mark.parametrize("layout", ["separate", "packed"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_decode_passes_its_check_in_every_form(run, dtype, form, layout):
    status, out, err = run(*SMALL, "--dtype", dtype, "--form", form, "--layout", layout, "--json", "--quiet")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["check"]["passed"]
    assert report["check"]["tokens_checked"] == decoding.CHECKED_TOKENS
    assert report["check"]["tokens_equal"] == decoding.CHECKED_TOKENS
    assert report["cache"]["dtype"] == dtype
    assert report["cache"]["layout"] == layout
    assert report["timing"]["form"] == form


def test_the_default_run_prints_a_table_that_names_every_figure(run):
    status, out, _ = run("decode")
    assert status == 0
    labels = [line[:26].strip() for line in out.splitlines()]
    for label in (
        "model",
        "geometry",
        "cache",
        "bytes/token, layers run",
        "bytes/token, whole model",
        "rows",
        "resident",
    ):
        assert label in labels
    for label in ("prefill", "decode", "time in cache", "tokens", "check"):
        assert label in labels
    assert "tiny, 4 of 4 layers" in out
    assert "95 of 4,096" in out
    assert "passed: 8 of 8 tokens equal" in out


def test_the_columns_of_the_table_are_aligned(run):
    _, out, _ = run("info")
    lines = out.splitlines()
    column = len("free_threading") + 2
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_json_reports_rows_bytes_and_tokens(run):
    _, out, _ = run(*SMALL, "--json", "--max-seq-len", 64)
    report = json.loads(out)
    config = PRESETS["tiny"]
    assert len(out.splitlines()) == 1
    assert len(report["tokens"]) == 10
    assert report["cache"]["rows"] == 20 + 10 - 1
    assert report["cache"]["max_seq_len"] == 64
    assert report["cache"]["capacity_bytes"] == 64 * config.bytes_per_token("bfloat16", 2)
    assert report["bytes_per_token"]["layers_run"]["latent"] == config.bytes_per_token("bfloat16", 2)
    assert report["bytes_per_token"]["whole_model"]["expanded"] == config.expanded_bytes_per_token("bfloat16")
    assert 0 < report["timing"]["cache_percent"] < 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore")
def test_resident_memory_covers_the_rows_written(run):
    _, out, _ = run(*SMALL, "--json", "--prompt", 300, "--max-seq-len", 100_000)
    report = json.loads(out)
    written = report["cache"]["rows"] * report["bytes_per_token"]["layers_run"]["latent"]
    assert written <= report["cache"]["resident_bytes"] <= report["cache"]["capacity_bytes"] + 64 * 4096


def test_equal_seeds_give_equal_tokens(run):
    first, again, other = (json.loads(run(*SMALL, "--json", "--seed", seed)[1])["tokens"] for seed in (3, 3, 4))
    assert first == again != other


def test_the_chunk_of_the_prefill_does_not_change_the_tokens(run):
    tokens = [
        json.loads(run(*SMALL, "--json", "--dtype", "float32", "--chunk", chunk)[1])["tokens"]
        for chunk in (1, 7, 20, 99)
    ]
    assert all(t == tokens[0] for t in tokens)


def test_a_single_token_after_a_single_token_works(run):
    status, out, _ = run("decode", "--prompt", 1, "--tokens", 1, "--json")
    report = json.loads(out)
    assert status == 0
    assert report["timing"]["decode_tokens_per_second"] is None
    assert report["check"]["tokens_checked"] == 1
    assert run("decode", "--prompt", 1, "--tokens", 1)[0] == 0


def test_geometry_flags_replace_the_preset(run):
    dims = {
        "--hidden-size": 96,
        "--n-heads": 3,
        "--kv-lora-rank": 40,
        "--qk-nope-head-dim": 24,
        "--qk-rope-head-dim": 8,
        "--v-head-dim": 20,
        "--q-lora-rank": 0,
    }
    status, out, _ = run(*SMALL, "--json", *(x for pair in dims.items() for x in pair))
    model = json.loads(out)["model"]
    assert status == 0
    assert model["name"] == "tiny (changed)"
    assert model["q_lora_rank"] is None
    assert [model[flag[2:].replace("-", "_")] for flag in list(dims)[:-1]] == list(dims.values())[:-1]


def test_more_layers_than_the_preset_has_make_a_larger_model(run):
    _, out, _ = run("decode", "--prompt", 4, "--tokens", 2, "--layers", 6, "--json")
    model = json.loads(out)["model"]
    assert (model["layers_run"], model["n_layers"]) == (6, 6)


def test_no_check_skips_the_reference(run, monkeypatch):
    monkeypatch.setattr(decoding, "reference_logits", lambda *a: pytest.fail("the reference ran"))
    status, out, _ = run(*SMALL, "--no-check")
    assert status == 0
    assert "not run" in out


class SpoilingCache:
    """A cache whose appends go through `spoil(layer, rows)` first."""

    def __init__(self, cache, spoil):
        self._cache, self._spoil = cache, spoil

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def step(self, n):
        return SpoilingStep(self._cache.step(n), self._spoil)


class SpoilingStep:
    def __init__(self, step, spoil):
        self._manager, self._spoil = step, spoil

    def __enter__(self):
        self._step = self._manager.__enter__()
        return self

    def __exit__(self, *error):
        return self._manager.__exit__(*error)

    def append(self, layer, rows):
        self._step.append(layer, self._spoil(layer, rows))

    def view(self, layer):
        return self._step.view(layer)


SPOILS = {
    "no rotary keys": lambda layer, rows: [rows[0], np.zeros_like(rows[1])],
    "latents of one layer lost": lambda layer, rows: [np.zeros_like(rows[0]) if layer == 1 else rows[0], rows[1]],
    "rows in another order": lambda layer, rows: [np.ascontiguousarray(r[::-1]) for r in rows],
    "first row of a step lost": lambda layer, rows: [np.concatenate([np.zeros_like(r[:1]), r[1:]]) for r in rows],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_cache_that_returns_other_rows_fails_the_check(run, monkeypatch, spoil, dtype):
    real = decoding.LatentKvCache

    class Factory:
        @staticmethod
        def with_capacity(**geometry):
            return SpoilingCache(real.with_capacity(**geometry), SPOILS[spoil])

    monkeypatch.setattr(decoding, "LatentKvCache", Factory)
    status, out, _ = run(*SMALL, "--dtype", dtype, "--json")
    assert status == 1
    assert not json.loads(out)["check"]["passed"]
    status, out, _ = run(*SMALL, "--dtype", dtype)
    assert status == 1
    assert "FAILED" in out


def test_a_wrong_token_fails_the_check_even_when_the_logits_agree():
    logits = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    tokens = [int(row.argmax()) for row in logits]
    dtype = lkv.DType.of("float32")
    assert decoding.compare(tokens, logits, logits, dtype)["passed"]
    verdict = decoding.compare([tokens[0], (tokens[1] + 1) % 50], logits, logits, dtype)
    assert not verdict["passed"]
    assert verdict["tokens_equal"] == 1


POSITIVE = [
    "--layers",
    "--prompt",
    "--tokens",
    "--chunk",
    "--max-seq-len",
    "--hidden-size",
    "--n-heads",
    "--kv-lora-rank",
]
POSITIVE += ["--qk-nope-head-dim", "--qk-rope-head-dim", "--v-head-dim"]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "", "99999999999999999999"])
@pytest.mark.parametrize("flag", POSITIVE)
def test_a_size_that_is_no_positive_integer_is_refused_by_name(run, flag, value):
    status, out, err = run("decode", f"{flag}={value}")
    assert (status, out) == (2, "")
    assert err == f"lkv decode: error: argument {flag}: expected a positive integer, got {value!r}\n"


@pytest.mark.parametrize("flag", ["--seed", "--q-lora-rank"])
@pytest.mark.parametrize("value", ["-1", "x", "0.5"])
def test_a_count_below_zero_is_refused_by_name(run, flag, value):
    status, out, err = run("decode", f"{flag}={value}")
    assert (status, out) == (2, "")
    assert err == f"lkv decode: error: argument {flag}: expected an integer of at least 0, got {value!r}\n"


@pytest.mark.parametrize("flag", ["--preset", "--dtype", "--device", "--layout", "--form"])
def test_an_unknown_choice_is_refused_by_name(run, flag):
    status, out, err = run("decode", flag, "nonsense")
    assert (status, out) == (2, "")
    assert err.startswith(f"lkv decode: error: argument {flag}: invalid choice: 'nonsense'")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "lkv: error: the following arguments are required"),
        (["encode"], "lkv: error: argument {bench,decode,demo,info,inspect}: invalid choice: 'encode'"),
        (["decode", "--tok", "3"], "lkv: error: unrecognized arguments: --tok 3"),
        (["info", "--quiet"], "lkv: error: unrecognized arguments: --quiet"),
        (["decode", "--prompt"], "lkv decode: error: argument --prompt: expected one argument"),
        (["decode", "--qk-rope-head-dim", "3"], "lkv decode: error: --qk-rope-head-dim: expected an even int, got 3"),
        (
            ["decode", "--prompt", "9", "--tokens", "4", "--max-seq-len", "11"],
            "lkv decode: error: --max-seq-len: expected at least 12 (prompt + tokens - 1), got 11",
        ),
    ],
)
def test_a_request_that_cannot_be_run_is_one_line_and_status_2(run, argv, message):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


def test_the_smallest_capacity_that_fits_is_accepted(run):
    assert run("decode", "--prompt", 9, "--tokens", 4, "--max-seq-len", 12, "--layers", 1)[0] == 0


def test_layers_beyond_memory_are_refused_with_the_number_that_fits(run, monkeypatch):
    monkeypatch.setattr(_host, "free_memory", lambda: 4_000_000_000)
    status, out, err = run("decode", "--preset", "deepseek-v3", "--layers", 30)
    assert (status, out) == (2, "")
    assert err == "lkv decode: error: --layers: 30 layers need 22.5 GB, 4.0 GB are free; at most 4 fit\n"


def test_without_layers_a_third_of_free_memory_decides(monkeypatch):
    options = decoding.DecodeOptions("deepseek-v3", PRESETS["deepseek-v3"])
    for free, layers in [(1e9, 1), (12e9, 5), (1e12, 61)]:
        monkeypatch.setattr(_host, "free_memory", lambda free=free: int(free))
        assert decoding.fitting_layers(options) == layers


def test_layers_left_out_for_memory_are_said_in_the_table(run, monkeypatch):
    per_layer = PRESETS["tiny"].weights_per_layer * 4
    base = decoding.MLAStack.bytes_required(PRESETS["tiny"], 0)
    monkeypatch.setattr(_host, "free_memory", lambda: 3 * (base + int(2.9 * per_layer)))
    status, out, _ = run("decode", "--prompt", 4, "--tokens", 2)
    assert status == 0
    assert "tiny, 2 of 4 layers, as many as a third of free memory holds" in out
    assert "320 latent" in out
    assert "640 latent" in out


def test_an_interrupt_ends_quietly_with_130(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "decode", interrupted)
    assert run("decode") == (130, "", "")


def test_phases_go_to_stderr_one_line_each(run):
    _, out, err = run(*SMALL)
    assert [line.split()[1] for line in err.splitlines()] == ["weights", "prefill", "decode", "check"]
    assert "lkv:" not in out
    assert run(*SMALL, "--quiet")[2] == ""


def test_the_progress_bar_stays_off_stdout(run, monkeypatch, capsys):
    _, plain, _ = run(*SMALL, "--quiet", "--no-check")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = run(*SMALL, "--no-check")
    assert status == 0
    assert [line[:26] for line in out.splitlines()] == [line[:26] for line in plain.splitlines()]
    assert "\r" not in out
    assert "10/10" in err
    assert err.endswith("\r\x1b[K")
    json.loads(run(*SMALL, "--json")[1])


def test_info_names_versions_devices_types_and_build(run):
    status, out, err = run("info")
    assert (status, err) == (0, "")
    for text in (lkv.__version__, np.__version__, "cpu", "bfloat16", "C ABI", "compiler", lkv.get_include()):
        assert text in out


def test_info_as_json_is_one_object(run):
    status, out, err = run("info", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["dtypes"] == [dtype.name for dtype in ALL]
    assert report["devices"][0]["location"].startswith("cpu")
    assert len(report["build"]["abi"]) == 2
    assert set(report["optional"]) == {"torch", "cupy", "jax", "transformers", "onnxruntime"}


def test_info_imports_nothing_heavy():
    code = (
        "import sys; from lkv.cli import main; main(['info', '--json']); "
        "sys.exit(bool({'torch', 'jax', 'transformers', 'onnxruntime'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "lkv", *SMALL, "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["check"]["passed"]
    bad = subprocess.run(
        [sys.executable, "-m", "lkv", "decode", "--tokens", "0"], capture_output=True, text=True, check=False
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert len(bad.stderr.splitlines()) == 1


def test_the_version_flag_prints_the_version(run):
    assert run("--version") == (0, f"lkv {lkv.__version__}\n", "")
