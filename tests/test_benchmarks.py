"""The benchmarks: how rounds are compared, what a report says, and that a group runs from end to end."""

from __future__ import annotations

import importlib
import json

import pytest

from lkv import cli


def part(name):
    """Import a module of the benchmarks from where ``lkv bench`` takes them."""
    return importlib.import_module(f"{cli._benchmarks().__package__}.{name}")


@pytest.fixture
def measure():
    return part("measure")


@pytest.fixture
def report():
    return part("report")


@pytest.fixture
def table(measure):
    return measure.Table(
        "an append",
        "ns",
        "memcpy",
        {"memcpy": [10.0, 20.0, 40.0], "lkv": [20.0, 40.0, 80.0]},
        targets=[
            measure.Target("lkv", "memcpy", 3.0),
            measure.Target("lkv", "memcpy", 1.5),
            measure.Target("lkv", "memcpy", 15.0, "over"),
            measure.Target("lkv", "memcpy", 39.0, "value"),
            measure.Target("torch", "memcpy", 3.0),
        ],
        missing=["torch: not installed"],
    )


def test_ratios_are_taken_within_each_round(table):
    assert table.quartiles("lkv") == (30.0, 40.0, 60.0)
    assert table.ratios("lkv") == (2.0, 2.0, 2.0)


def test_a_target_is_met_missed_or_not_measured(table, report):
    assert [table.met(target) for target in table.targets] == [True, False, False, False, None]
    assert report.outcome({"append": [table]}) == (1, 3, 1)


def test_every_contender_runs_once_per_round_and_the_warm_up_is_not_counted(measure):
    runs = {"a": 0, "b": 0}

    def contender(name):
        def run():
            runs[name] += 1

        return measure.Contender(name, run, 1)

    table = measure.compare(
        "two",
        [contender("a"), contender("b")],
        rounds=6,
        settings=measure.Settings(),
        progress=lambda title, share: None,
    )
    assert runs == {"a": 8, "b": 8}
    assert {name: len(samples) for name, samples in table.samples.items()} == {"a": 6, "b": 6}
    assert table.base == "a"


def test_a_table_in_text_names_outcomes_and_what_is_missing(table, report):
    text = report.as_text(table)
    assert "met   lkv <= 3 x memcpy: 2.00" in text
    assert "MISS  lkv <= 1.5 x memcpy: 2.00" in text
    assert " --   torch <= 3 x memcpy: not measured" in text
    assert "not measured: torch: not installed" in text


def test_tables_are_the_same_after_json(table, report):
    assert report.from_json(report.to_json({"append": [table]}, {})) == {"append": [table]}


def test_the_summary_has_outcomes_and_what_is_missing(table, report):
    summary = json.loads(report.summary({"append": [table]}, {"cpus": 2}))
    assert summary["targets"] == {"met": 1, "missed": 3, "not measured": 1}
    (made,) = summary["groups"]["append"]
    assert made["missing"] == ["torch: not installed"]
    assert made["ratios"]["lkv"] == [2.0, 2.0, 2.0]
    assert [target["met"] for target in made["targets"]] == [True, False, False, False, None]


def test_a_peer_that_is_not_installed_is_named():
    optional = part("optional")
    assert optional.peer("no_such_module") is None
    assert optional.missing(["json", "no_such_module"]) == ["no_such_module: not installed"]


def test_without_a_compiler_the_error_says_what_is_needed(monkeypatch, tmp_path):
    native = part("native")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(native.CompilerMissing, match=r"peers\.c needs a C compiler: none of cc, gcc, clang is on PATH"):
        native._compiled("peers.c")


def test_an_unknown_group_is_refused_with_the_groups_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "apend"])
    assert stop.value.code == 2
    assert "unknown group 'apend'; there are append, frameworks," in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(capsys, tmp_path):
    (tmp_path / "file").touch()
    for option, path in (("--json", tmp_path), ("--out", tmp_path / "file")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "length", "--quick", option, str(path)])
        captured = capsys.readouterr()
        assert stop.value.code == 2 and not captured.out
        assert f"{option}: " in captured.err


def test_a_group_runs_from_end_to_end_and_leaves_json_and_a_figure(capfd, tmp_path):
    pytest.importorskip("matplotlib")
    samples = tmp_path / "samples.json"
    assert cli.main(["bench", "length", "--quick", "--out", str(tmp_path / "out"), "--json", str(samples)]) == 0
    out, _ = capfd.readouterr()
    assert "step.append at 130,000 rows" in out
    summary = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [table["key"] for table in summary["groups"]["length"]] == ["length"]
    assert summary["machine"]["cpus"] > 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "length.png", "length.svg"}
    assert len(json.loads(samples.read_text())["groups"]["length"][0]["samples"]["step.append at 1,000 rows"]) == 5


def test_the_build_of_the_kernel_is_not_reported(report, monkeypatch):
    monkeypatch.setattr(report.platform, "system", lambda: "Linux")
    monkeypatch.setattr(report.platform, "release", lambda: "6.18.44-custom-1")
    assert report.machine()["system"] == "Linux 6.18"


def test_a_figure_of_decode_steps_comes_from_several_runs_and_the_later_one_wins(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    decode_hf = part("decode_hf")

    def run(name, milliseconds):
        cells = [
            {
                "model": "V3",
                "dtype": "f32",
                "rows": rows,
                "layers": 2,
                "samples": {"LkvCache": [{"cpu": cpu, "wall": cpu}]},
            }
            for rows, cpu in milliseconds.items()
        ]
        (tmp_path / name).write_text(json.dumps({"decode": cells}))
        return tmp_path / name

    files = [run("first.json", {16: 10.0, 128: 20.0}), run("second.json", {16: 11.0})]
    cells = decode_hf.merged(files)
    assert {cell["rows"]: cell["samples"]["LkvCache"][0]["cpu"] for cell in cells} == {16: 11.0, 128: 20.0}
    monkeypatch.setattr("sys.argv", ["decode_hf", "--samples", *map(str, files), "--plot", str(tmp_path / "out")])
    decode_hf.main()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"decode_hf.png", "decode_hf.svg"}
