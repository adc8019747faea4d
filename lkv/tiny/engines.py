"""Two ways to run the same weights over a `LatentKvCache`: NumPy, and Hugging Face transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

from lkv.cache import LatentKvCache
from lkv.layout import SlotSpec
from lkv.mla._arrays import Array
from lkv.tiny.model import TinyModel

__all__ = ["ENGINES", "Engine", "NumpyEngine", "TransformersEngine"]

Put: TypeAlias = Callable[[int], None]


class Engine(Protocol):
    """Continues a text, in a cache that can be looked at meanwhile.

    Attributes
    ----------
    cache : LatentKvCache
        One row per token, except the last that was generated.
    """

    cache: LatentKvCache

    def __init__(self, model: TinyModel, max_seq_len: int) -> None: ...

    def generate(self, prompt: list[int], count: int, put: Put, temperature: float = 0.0, seed: int = 0) -> None:
        """Hand `count` tokens that follow the prompt to `put`, one by one.

        Temperature 0 takes the likeliest token. Above it, equal seeds give equal tokens, by either engine.
        """
        ...


class NumpyEngine:
    """`TinyModel` as it is."""

    def __init__(self, model: TinyModel, max_seq_len: int) -> None:
        latent, key = model.config.slot_trailing
        slots = [SlotSpec("c_kv", latent), SlotSpec("k_pe", key, tag="rope:interleaved")]
        self.cache = LatentKvCache.with_capacity(model.config.n_layers, max_seq_len, dtype="float32", slots=slots)
        self._model = model

    def generate(self, prompt: list[int], count: int, put: Put, temperature: float = 0.0, seed: int = 0) -> None:
        """Continue a text; see `Engine`."""
        stirred = _stirring(temperature, seed)
        new = prompt
        for _ in range(count):
            new = [int(stirred(self.feed(np.array(new))[-1]).argmax())]
            put(new[0])

    def feed(self, tokens: Array) -> Array:
        """Publish the rows of new tokens and return the scores ``[n, vocab_size]`` of what follows each."""
        cache = self.cache
        positions = np.arange(cache.cached_len, cache.cached_len + len(tokens))
        with cache.step(len(tokens)) as step:

            def rows(layer: int, c_kv: Array, k_pe: Array) -> tuple[Array, Array]:
                step.append(layer, [c_kv, k_pe])
                c_all, p_all = step.view(layer).numpy()
                return c_all, p_all

            return self._model.forward(tokens, positions, rows)


class TransformersEngine:
    """transformers' ``DeepseekV3ForCausalLM`` with the same weights, over an `LkvCache`, attending to latents.

    Raises
    ------
    ImportError
        If the extra ``transformers`` is not installed.
    """

    def __init__(self, model: TinyModel, max_seq_len: int) -> None:
        from lkv.integrations.transformers import LkvCache, absorb

        self.model = as_transformers(model)
        absorb(self.model)
        self._past = LkvCache(self.model, max_seq_len=max_seq_len)
        (self.cache,) = self._past.open()

    def generate(self, prompt: list[int], count: int, put: Put, temperature: float = 0.0, seed: int = 0) -> None:
        """Continue a text; see `Engine`."""
        import torch

        ids = torch.tensor([prompt])
        stirred = _stirring(temperature, seed)
        # Newer versions of transformers warn of the older name.
        name = "cache" if "cache" in inspect.signature(self.model.model.forward).parameters else "past_key_values"
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # they wait for each other longer than a model of this size computes
        try:
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                logits_processor=[lambda ids, scores: torch.from_numpy(stirred(scores[0].numpy()))[None]],
                streamer=_Streamer(put),
                **{name: self._past},
            )
        finally:
            torch.set_num_threads(threads)


def _stirring(temperature: float, seed: int) -> Callable[[Array], Array]:
    """Return what is done to scores before the largest is taken: with Gumbel noise, that is a draw by softmax."""
    random = np.random.default_rng(seed)

    def stirred(scores: Array) -> Array:
        if temperature == 0:
            return scores
        return np.asarray(scores + temperature * random.gumbel(size=scores.shape))  # a quotient may overflow

    return stirred


class _Streamer:
    """What ``generate`` tells of its tokens: first the prompt, then each new one."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._prompt_came = False

    def put(self, tokens: Any) -> None:
        if self._prompt_came:
            self._put(int(tokens))
        self._prompt_came = True

    def end(self) -> None:
        pass


def as_transformers(model: TinyModel) -> Any:
    """Return the weights as a transformers model in evaluation mode."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    made = DeepseekV3ForCausalLM(DeepseekV3Config(**model.architecture))
    state = {name: torch.from_numpy(tensor) for name, tensor in model.tensors.items()}
    made.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return made.eval()


ENGINES: dict[str, type[Engine]] = {"numpy": NumpyEngine, "transformers": TransformersEngine}
