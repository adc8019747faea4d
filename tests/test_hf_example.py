"""The example that writes text with transformers' cache and with lkv's gives the same text with both."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import compilers

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_runs import one_thread  # noqa: E402, F401

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "generate_hf.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="examples/ is only in a checkout")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the example in this process, and return what it printed."""
    monkeypatch.setattr(transformers.logging, "set_verbosity_error", lambda: None)  # a setting of the process

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_random_weights_give_the_same_ids_with_both_caches():
    arguments = ["--config", "tiny", "--prompt-tokens", "40", "--tokens", "9", "--seed", "3", "--threads", "1"]
    command = [sys.executable, "-W", "error", str(EXAMPLE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=compilers.environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    ids, _, table, _, verdict = re.split(r"\n(\n)", done.stdout)
    assert len(json.loads(ids)) == 9
    nbytes = (40 + 9 - 1) * 2 * (32 + 8) * 4  # rows, layers, columns, float32; the last token is never fed
    assert re.search(rf"^bytes cached at the end +{nbytes:,} +{nbytes:,}$", table, re.M)
    assert verdict.startswith("the same 9 tokens")


def test_a_checkpoint_writes_text_and_a_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.DeepseekV3Config(
        vocab_size=6,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate("abcdef")}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)

    printed = run("--model", tmp_path, "--prompt", "b c d", "--tokens", 5, "--plot", tmp_path / "plot.png")
    assert re.match(r"[a-f]( [a-f]){4}\n\n", printed)
    assert "ms for the prompt of 3 " in printed
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "tiny", "--prompt", "once"], "--prompt: there is no tokenizer"),
        (["--config", "tiny", "--tokens", "0"], "--tokens: expected a positive number, got 0"),
        (["--model", "no/such/folder"], "expected a folder with a config.json, got no/such/folder"),
    ],
)
def test_what_cannot_be_run_is_said(run, capsys, arguments, says):
    with pytest.raises(SystemExit) as refused:
        run(*arguments)
    assert says in f"{refused.value.code} {capsys.readouterr().err}"
