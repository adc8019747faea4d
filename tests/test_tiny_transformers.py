"""The model in the package is the one that transformers computes from the same weights."""

import inspect
import json

import numpy as np
import pytest

from lkv import cli
from lkv.tiny import TinyModel
from lkv.tiny.engines import ENGINES, as_transformers

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

# The keyword of a cache was `past_key_values` until transformers renamed it.
CACHE = "cache" if "cache" in inspect.signature(transformers.DeepseekV3Model.forward).parameters else "past_key_values"
PROMPTS = ['The "with" statement', "class ", "If the object is a", "In Python, a module"]
COUNT = 250


@pytest.fixture(autouse=True)
def one_thread():
    """Keep PyTorch from dividing products this small among processors that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return TinyModel.read()


@pytest.fixture(scope="module")
def plain(model):
    return as_transformers(model)


def test_scores_are_those_of_transformers_up_to_the_length_of_the_training(model, plain):
    tokens = np.array(model.encode(" ".join(PROMPTS) * 20)[:1024])
    with torch.no_grad():
        expected = plain(torch.from_numpy(tokens[None])).logits[0].numpy()
    engine = ENGINES["numpy"](model, 1024)
    prefill, decode = tokens[:600], tokens[600:]
    found = np.concatenate([engine.feed(prefill), *(engine.feed(token[None]) for token in decode)])
    difference = np.abs(found - expected).max(axis=1)
    assert difference[:300].max() < 1e-4
    assert difference.max() < 1e-3  # transformers computes the angles of the rotation in float32: it adds up


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_text_is_that_of_transformers_alone(model, plain, engine, prompt):
    tokens = []
    running = ENGINES[engine](model, 1024)
    running.generate(model.encode(prompt), COUNT, tokens.append)
    ids = torch.tensor([model.encode(prompt)])
    cache = {CACHE: transformers.DynamicCache(config=plain.config)}
    expected = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, **cache)
    assert model.decode(tokens) == model.decode(expected[0, ids.shape[1] :].tolist())
    assert running.cache.cached_len == ids.shape[1] + COUNT - 1


@pytest.mark.parametrize("temperature", ["0", "0.6"])
def test_the_command_prints_the_same_with_both_engines(capsys, temperature):
    reports = []
    for engine in ENGINES:
        assert cli.main(["demo", "--engine", engine, "--json", "--tokens", "200", "--temperature", temperature]) == 0
        out, err = capsys.readouterr()
        reports.append(json.loads(out))
        assert err == ""
    ours, theirs = reports
    assert ours["text"] == theirs["text"]
    assert ours["cache"] == theirs["cache"]
