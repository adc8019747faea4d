import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parent.parent / "examples" / "slot_pool.py"
SMALL = ["--requests", "8", "--slots", "3", "--tokens", "5", "--layers", "2", "--quiet"]


@pytest.fixture(scope="module")
def example():
    if not EXAMPLE.is_file():
        pytest.skip("the examples are not beside the tests")
    spec = importlib.util.spec_from_file_location("slot_pool", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "slot_pool", module)
        spec.loader.exec_module(module)
        yield module


def test_every_request_is_served_as_if_alone_by_one_plan(example, capsys):
    assert example.main(SMALL) == 0
    said = capsys.readouterr().out
    assert "8 of 8 requests as if run alone" in said
    assert "1 built, 0 rebuilt" in said
    assert "plan builds saved" in said
    assert "contaminated" not in said


def test_without_the_guard_requests_read_each_other(example, capsys):
    assert example.main([*SMALL, "--unsafe"]) == 1
    said = capsys.readouterr().out
    assert "contaminated" in said
    assert "logits off by" in said


@pytest.mark.parametrize("bad", [["--slots", "0"], ["--max-seq-len", "8"], ["--tokens", "x"]])
def test_a_bad_argument_is_named(example, bad, capsys):
    with pytest.raises(SystemExit) as ended:
        example.main(bad)
    assert ended.value.code == 2
    assert bad[0] in capsys.readouterr().err
