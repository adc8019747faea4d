"""The model in the package, and ``lkv demo`` that runs it."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

import lkv.tiny
from lkv import cli, errors
from lkv.tiny import TinyModel
from lkv.tiny.engines import NumpyEngine
from lkv.tiny.weights import read_tensors

FOLDER = Path(lkv.tiny.__file__).parent
WEIGHTS = FOLDER / "pydoc.safetensors"
SENTENCE = (
    "If a class attribute is found that is a user-defined function object, it is transformed into a method object."
)
COMMAND = [sys.executable, "-m", "lkv", "demo"]


@pytest.fixture(scope="module")
def model():
    return TinyModel.read()


@pytest.fixture
def run(capsys):
    """Run the command in this process: exit status, stdout, stderr."""

    def call(*argv):
        try:
            status = cli.main(["demo", *map(str, argv)])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def generated(model, prompt, count, **options):
    tokens = []
    NumpyEngine(model, 1024).generate(model.encode(prompt), count, tokens.append, **options)
    return model.decode(tokens)


# ---- the weights ----


def test_the_weights_take_at_most_four_megabytes_and_have_their_notice_beside_them():
    assert WEIGHTS.stat().st_size <= 4_000_000
    assert "Python Software Foundation; All Rights Reserved" in (FOLDER / "NOTICE").read_text(encoding="utf-8")


def test_the_reader_finds_what_the_safetensors_package_finds():
    numpy_reader = pytest.importorskip("safetensors.numpy")
    tensors, metadata = read_tensors(WEIGHTS)
    expected = numpy_reader.load_file(WEIGHTS)
    assert {name: (a.dtype, a.tolist()) for name, a in tensors.items()} == {
        name: (a.dtype, a.tolist()) for name, a in expected.items()
    }
    assert all(np.isfinite(a).all() for a in tensors.values())
    assert len(metadata["vocabulary"]) == json.loads(metadata["config"])["vocab_size"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int64", "bool"])
def test_the_reader_reads_every_type_and_shape(tmp_path, dtype):
    numpy_writer = pytest.importorskip("safetensors.numpy")
    file = tmp_path / "some.safetensors"
    arrays = {
        "a": np.arange(6).reshape(2, 3).astype(np.dtype(dtype)),
        "b": np.ones((), dtype),
        "c": np.ones((0, 4), dtype),
    }
    numpy_writer.save_file(arrays, file)
    tensors, metadata = read_tensors(file)
    assert metadata == {}
    for name, array in arrays.items():
        assert (tensors[name].dtype, tensors[name].shape, tensors[name].tolist()) == (
            array.dtype,
            array.shape,
            array.tolist(),
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "file length: expected 'at least 8 bytes', found 0"),
        (b"\x09" + b"\0" * 7 + b"{}", "header length: expected at most 2, found 9"),
        (b"\x02" + b"\0" * 7 + b"{[", "header: expected 'JSON'"),
        (b"\x02" + b"\0" * 7 + b"[]", "header: expected 'an object', found []"),
        ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, "a: dtype: expected"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "a: data_offsets: expected '8 of 4 bytes'"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}, "a: data_offsets: expected '4 of 4 bytes'"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a: data_offsets: expected '8 of 4 bytes'"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "a: shape: expected 'counts', found [-1]"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 'a: expected "a tensor\'s entry"'),
        ({"a": 5}, 'a: expected "a tensor\'s entry"'),
    ],
)
def test_a_damaged_file_is_refused_by_field(tmp_path, content, words):
    if isinstance(content, dict):
        header = json.dumps(content).encode()
        content = len(header).to_bytes(8, "little") + header + b"1234"
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(content)
    with pytest.raises(errors.RestoreError) as refusal:
        read_tensors(file)
    assert words in str(refusal.value)


def test_weights_of_another_shape_are_refused_by_name():
    tensors, metadata = read_tensors(WEIGHTS)
    architecture = json.loads(metadata["config"])
    with pytest.raises(errors.ShapeMismatchError, match=r"model\.layers\.0\.w_q"):
        TinyModel(tensors, architecture | {"hidden_size": 100}, metadata["vocabulary"])


# ---- the model ----


def test_the_model_has_learnt_its_text(model):
    tokens = np.array(model.encode(SENTENCE))
    scores = NumpyEngine(model, 1024).feed(tokens)[:-1].astype(float)
    surprise = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), tokens[1:]]
    assert surprise.mean() < 1.5  # nats per character; knowing nothing takes 4.5


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_scores_do_not_depend_on_how_the_tokens_come(model, chunk):
    tokens = np.array(model.encode(SENTENCE))
    whole = model.forward(tokens, np.arange(len(tokens)), lambda layer, c_kv, k_pe: (c_kv, k_pe))
    engine = NumpyEngine(model, 1024)
    parts = [engine.feed(tokens[lo : lo + chunk]) for lo in range(0, len(tokens), chunk)]
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-4
    assert engine.cache.cached_len == len(tokens)


def test_a_text_is_the_tokens_of_its_characters(model):
    assert model.decode(model.encode(SENTENCE)) == SENTENCE


def test_greedy_text_follows_from_the_prompt_alone(model):
    first = generated(model, SENTENCE, 50, seed=1)
    assert first == generated(model, SENTENCE, 50, seed=2)
    assert first[10:] == generated(model, SENTENCE + first[:10], 40)


def test_drawn_text_follows_from_the_seed(model):
    first, again, other = (generated(model, SENTENCE, 50, temperature=1.0, seed=seed) for seed in (3, 3, 4))
    assert first == again != other


def test_a_low_temperature_draws_the_likeliest(model):
    assert generated(model, SENTENCE, 50, temperature=1e-6) == generated(model, SENTENCE, 50)


# ---- the command ----


def test_the_text_goes_to_stdout_and_the_figures_to_stderr(run):
    status, out, err = run("--prompt", "The object", "--tokens", 40)
    assert (status, len(out)) == (0, len("The object") + 40 + 1)
    assert out.startswith("The object")
    first, second = err.splitlines()
    assert first.startswith("lkv demo: numpy, 49/1,024 rows, 62.7 kB, version 40, ")
    assert first.endswith(" tokens/s")
    assert second == "lkv demo: expanded keys and values would take 301.1 kB, 4.8x"


def test_quiet_prints_the_text_only(run):
    status, out, err = run("--tokens", 5, "--quiet")
    assert (status, len(out), err) == (0, len('The "with" statement') + 5 + 1, "")


def test_json_reports_text_rows_and_bytes(run, model):
    text = run("--prompt", "class", "--tokens", 30, "--quiet")[1]
    status, out, err = run("--prompt", "class", "--tokens", 30, "--json", "--max-seq-len", 34)
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["prompt"] + report["text"] + "\n" == text
    assert model.decode(report["tokens"]) == report["text"]
    assert report["cache"]["rows"] == report["cache"]["max_seq_len"] == 34
    assert report["cache"]["bytes"] == report["cache"]["capacity_bytes"] == 34 * report["bytes_per_token"]["latent"]
    assert report["bytes_per_token"]["latent"] == model.config.bytes_per_token("float32")
    assert report["cache"]["version"] == 30
    assert report["tokens_per_second"] > 0


def test_one_token_has_no_rate(run):
    assert json.loads(run("--tokens", 1, "--json")[1])["tokens_per_second"] is None
    assert "tokens/s" not in run("--tokens", 1)[2]


def test_the_seed_draws_other_text_at_a_temperature(run):
    first, again, other = (run("--quiet", "--tokens", 40, "--temperature", 1, "--seed", n)[1] for n in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "a é ü"], "--prompt: expected characters that the model knows, got 'é', 'ü'"),
        (["--prompt", ""], "--prompt: expected at least one character"),
        (["--prompt", "abc", "--tokens", "10", "--max-seq-len", "11"], "--max-seq-len: expected at least 12"),
        (["--tokens", "0"], "argument --tokens: expected a positive integer, got '0'"),
        (["--temperature", "-1"], "argument --temperature: expected a number of at least 0, got '-1'"),
        (["--temperature", "inf"], "argument --temperature: expected a number of at least 0, got 'inf'"),
        (["--temperature", "nan"], "argument --temperature: expected a number of at least 0, got 'nan'"),
        (["--temperature", "warm"], "argument --temperature: expected a number of at least 0, got 'warm'"),
        (["--engine", "abacus"], "argument --engine: invalid choice: 'abacus'"),
    ],
)
def test_a_request_that_cannot_be_run_is_one_line_and_status_2(run, options, words):
    status, out, err = run(*options)
    assert (status, out) == (2, "")
    assert err.startswith(f"lkv demo: error: {words}")
    assert err.count("\n") == 1


def test_a_temperature_near_zero_draws_the_likeliest_without_a_warning(run):
    likeliest = run("--tokens", 20, "--temperature", 0, "--quiet")
    assert run("--tokens", 20, "--temperature", 1e-300, "--quiet") == likeliest


def test_weights_that_cannot_be_read_are_one_line_and_status_2(run, monkeypatch, tmp_path):
    damaged = tmp_path / "weights.safetensors"
    damaged.write_bytes(WEIGHTS.read_bytes()[:1000])
    read = TinyModel.read
    for path in (damaged, tmp_path / "none"):
        monkeypatch.setattr(TinyModel, "read", lambda path=path: read(path))
        status, out, err = run()
        assert (status, out) == (2, "")
        assert err.startswith("lkv demo: error: the weights in the package cannot be read") and err.count("\n") == 1


def test_an_engine_that_is_not_installed_says_what_to_install(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lkv.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out, err = run("--engine", "transformers")
    assert (status, out) == (2, "")
    assert "pip install 'latent-kv[transformers]'" in err
    assert err.count("\n") == 1


def test_numpy_is_all_that_the_numpy_engine_imports():
    code = (
        "import sys; from lkv.cli import main; main(['demo', '--tokens', '3']);"
        "sys.exit(bool({'torch', 'transformers', 'safetensors', 'matplotlib', 'tqdm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen([*COMMAND, "--tokens", "900"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(4) == b"The "
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_terminal_shows_the_figures_on_its_last_line_and_gets_it_back():
    seen = on_a_terminal([*COMMAND, "--tokens", "50"], lines=10, columns=40)
    status = seen.index("\x1b[10;1H\x1b[2K20/1,024 rows")
    assert seen.index("\x1b[1;9r") < status < seen.index("\x1b[r") < seen.index("lkv demo: numpy, 69/1,024 rows")


@pytest.mark.parametrize("change", [{"TERM": "dumb"}, {"lines": 2}])
def test_a_terminal_that_cannot_keep_a_line_shows_the_summary_only(change):
    seen = on_a_terminal([*COMMAND, "--tokens", "50"], **{"lines": 10, "columns": 40, **change})
    assert "\x1b" not in seen
    assert "lkv demo: numpy, 69/1,024 rows" in seen


def on_a_terminal(command, lines, columns, TERM="xterm"):
    """What a command writes to a terminal of this size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": TERM})
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 4096):
            seen += piece
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(ours)
    assert process.wait() == 0
    return seen.decode()
