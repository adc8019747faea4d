"""The gate of instruction counts: what it lets pass, and what it names."""

import importlib.util
from pathlib import Path

import pytest

GATE = Path(__file__).parents[1] / "benchmarks" / "instructions.py"

pytestmark = pytest.mark.skipif(not GATE.is_file(), reason="benchmarks/ is only in a checkout")

BASELINE = {"an append": 1_000.0, "a lease": 2_000.0}
HERE = {"python": "3.11.7", "machine": "x86_64"}


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("instructions", GATE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_as_many_instructions_as_before_pass(gate):
    assert gate.complaints(BASELINE, BASELINE) == []


def test_fewer_instructions_pass(gate):
    assert gate.complaints(BASELINE, {"an append": 1.0, "a lease": 1.0}) == []


def test_not_quite_five_percent_more_pass(gate):
    assert gate.complaints(BASELINE, {**BASELINE, "an append": 1_049.0}) == []


def test_a_little_over_five_percent_more_fail(gate):
    (line,) = gate.complaints(BASELINE, {**BASELINE, "an append": 1_051.0})
    assert line == "an append: 1,051 instructions, +5.1% of the baseline's"


def test_an_operation_without_a_baseline_fails(gate):
    (line,) = gate.complaints(BASELINE, {**BASELINE, "a view": 10.0})
    assert line.startswith("a view: not in the baseline")


def test_an_operation_that_was_not_counted_fails(gate):
    (line,) = gate.complaints(BASELINE, {"an append": 1_000.0})
    assert line == "a lease: in the baseline, but not counted"


def test_another_minor_version_of_python_is_not_compared(gate):
    gate.check_comparable([HERE], {**HERE, "python": "3.11.2"})
    with pytest.raises(gate.NotComparable, match=r"baselines of Python 3\.11\.7 on x86_64; this is Python 3\.12\.1"):
        gate.check_comparable([HERE], {**HERE, "python": "3.12.1"})


def test_another_kind_of_processor_is_not_compared(gate):
    with pytest.raises(gate.NotComparable, match="on aarch64"):
        gate.check_comparable([HERE], {**HERE, "machine": "aarch64"})


def test_another_interpreter_is_told_by_what_it_takes_itself(gate):
    then = dict.fromkeys(gate.INTERPRETER, 100.0)
    assert gate.same_interpreter(then, dict.fromkeys(gate.INTERPRETER, 104.9))
    for name in gate.INTERPRETER:
        assert not gate.same_interpreter(then, {**then, name: 94.0})
        assert not gate.same_interpreter(then, {**then, name: 106.0})


def test_without_valgrind_nothing_is_compared(gate, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gate, "versions", lambda: dict(gate.json.loads(gate.BASELINE.read_text())[0]["taken_with"]))
    assert gate.main([]) == 2
    assert "valgrind and a C compiler are needed" in capsys.readouterr().err


def test_counts_are_read_from_what_callgrind_writes(gate, tmp_path):
    file = tmp_path / "counts.1"
    file.write_text("version: 1\ndesc: Trigger: Client Request: 100 with a lease\nevents: Ir\ntotals: 4711\n")
    assert gate.count_in(file) == (("with a lease", 100), 4711)
