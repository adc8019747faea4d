"""What a user of transformers does with a cache, as functions of a model and of what makes a cache for it.

Each returns a list of tensors that two caches must agree on: token ids (integers) and logits.
"""

import copy
import inspect
import os

import pytest
import torch
import transformers
from helpers.hf_models import prompt

FULL = os.environ.get("LKV_TEST_HF") == "full"
TOKENS = 24 if FULL else 12  # that a run generates

# The keyword of a cache was `past_key_values` until transformers renamed it.
CACHE = "cache" if "cache" in inspect.signature(transformers.DeepseekV3Model.forward).parameters else "past_key_values"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small take longer to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def own_cache(model):
    return transformers.DynamicCache(config=model.config)


def forward(model, ids, cache, **options):
    """Logits ``[batch, rows, vocabulary]`` of one more call over ``cache``."""
    with torch.no_grad():
        return model(ids, **{CACHE: cache}, **options).logits


def generate(model, ids, cache, new_tokens=TOKENS, **options):
    """Sequences ``[batch, rows]`` and the logits ``[steps, batch, vocabulary]`` that chose them."""
    options = {"do_sample": False, "max_new_tokens": new_tokens, CACHE: cache} | options
    output = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return [output.sequences, torch.stack(output.logits)]


def greedy(model, new_cache, length=7, new_tokens=TOKENS):
    return generate(model, prompt(length), new_cache(model), new_tokens)


def greedy_200_tokens(model, new_cache):
    return greedy(model, new_cache, new_tokens=200)


def one_token_prompt(model, new_cache):
    return greedy(model, new_cache, length=1)


def long_prompt(model, new_cache):
    return greedy(model, new_cache, length=300)


def chunked_prefill(model, new_cache, length=300, chunk=64):
    """A prompt in several calls, then single tokens that follow each other."""
    cache = new_cache(model)
    logits = [forward(model, ids, cache) for ids in prompt(length).split(chunk, dim=1)]
    for _ in range(8):
        logits.append(forward(model, logits[-1][:, -1:].argmax(-1), cache))
    return [torch.cat(logits, dim=1).argmax(-1), torch.cat(logits, dim=1)]


def crop_and_continue(model, new_cache, record=False):
    """Rows taken away, one and then fifty, and other tokens written in their place."""
    cache = new_cache(model)
    if record:
        cache.activate_past_recording()
    logits = [forward(model, prompt(120), cache)]
    for removed in (1, 50):
        cache.crop(-removed)
        logits.append(forward(model, prompt(9, seed=removed), cache))
        for _ in range(3):
            logits.append(forward(model, logits[-1][:, -1:].argmax(-1), cache))
    return [torch.cat(logits, dim=1).argmax(-1), torch.cat(logits, dim=1)]


def recorded_crop(model, new_cache):
    """The same where layers keep a state or a window, which transformers can rewind if it was told to record."""
    return crop_and_continue(model, new_cache, record=True)


def left_padded_batch(model, new_cache):
    """Three prompts of 40, 23 and 5 tokens in one batch."""
    ids, mask = prompt(40, batch=3), torch.ones(3, 40, dtype=torch.long)
    for row, padding in enumerate((0, 17, 35)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return generate(model, ids, new_cache(model), attention_mask=mask)


def beams(model, new_cache):
    return generate(model, prompt(20, batch=2), new_cache(model), num_beams=3, num_return_sequences=2)


def sampling(model, new_cache):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return generate(
            model, prompt(20), new_cache(model), do_sample=True, temperature=0.9, top_k=20, num_return_sequences=2
        )


def prompt_lookup(model, new_cache):
    return generate(model, prompt(12).repeat(1, 4), new_cache(model), prompt_lookup_num_tokens=5)


def assisted(model, new_cache):
    """The model assisted by itself with a layer's output projection disturbed: right often, but not always."""
    return generate(model, prompt(20), new_cache(model), assistant_model=assistant_of(model))


def assistant_of(model):
    assistant = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = assistant.get_output_embeddings().weight
        head += 0.15 * torch.randn_like(head)
    return assistant


def continued_chat(model, new_cache):
    """A second turn over the same cache, given the whole text as `generate` wants it."""
    cache = new_cache(model)
    first = generate(model, prompt(30), cache, new_tokens=10)
    turn = torch.cat([first[0], prompt(25, seed=1)], dim=1)
    return first + generate(model, turn, cache, new_tokens=12)
