"""The character model: DeepSeek-V3 as transformers lays it out, without experts, in NumPy over `lkv.mla`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lkv.mla._arrays import Array, require_shape
from lkv.mla.config import MLAConfig
from lkv.mla.layer import MLALayer, rms_norm
from lkv.mla.stack import Rows
from lkv.tiny.weights import read_tensors

__all__ = ["TinyModel"]

_WEIGHTS = Path(__file__).with_name("pydoc.safetensors")


class TinyModel:
    """A decoder over characters, in float32; `read` makes it.

    Parameters
    ----------
    tensors : dict of str to array
        Named as in the state of transformers' ``DeepseekV3ForCausalLM``. The head is the embedding.
    architecture : dict
        Arguments of transformers' ``DeepseekV3Config``.
    vocabulary : str
        Characters; the index of one is its token.

    Attributes
    ----------
    config : MLAConfig
        Geometry of the attention.
    tensors : dict of str to float32 array
    architecture, vocabulary
        As given.

    Raises
    ------
    ShapeMismatchError
        A weight of the attention does not fit the architecture.
    """

    def __init__(self, tensors: dict[str, Array], architecture: dict[str, Any], vocabulary: str) -> None:
        self.tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
        self.architecture, self.vocabulary = architecture, vocabulary
        same = ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        self.config = MLAConfig(
            **{name: architecture[name] for name in (*same, "rope_theta", "rms_norm_eps")},
            n_layers=architecture["num_hidden_layers"],
            n_heads=architecture["num_attention_heads"],
        )
        self._embedding, self._norm = self.tensors["model.embed_tokens.weight"], self.tensors["model.norm.weight"]
        self._blocks = [_Block(self.config, self.tensors, f"model.layers.{i}.") for i in range(self.config.n_layers)]
        self._tokens = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def read(cls, path: str | Path = _WEIGHTS) -> TinyModel:
        """Read a model that ``examples/tiny_mla/train.py`` wrote; the one in the package by default.

        Raises
        ------
        RestoreError
            If the file is damaged.
        """
        tensors, metadata = read_tensors(path)
        return cls(tensors, json.loads(metadata["config"]), metadata["vocabulary"])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text whose characters are all in the vocabulary."""
        return [self._tokens[character] for character in text]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.vocabulary[token] for token in tokens)

    def forward(self, tokens: Array, positions: Array, rows: Rows) -> Array:
        """Run new tokens through all layers.

        Parameters
        ----------
        tokens, positions : integer arrays, shape ``[n]``
        rows : callable
            Takes ``(layer, c_kv, k_pe)`` with the new rows of a layer, stores them, and returns all its rows.

        Returns
        -------
        float32 array, shape ``[n, vocab_size]``
            Scores of the characters that follow each of the tokens.
        """
        h = self._embedding[tokens]
        for index, block in enumerate(self._blocks):
            h = block.forward(h, positions, partial(rows, index))
        return np.asarray(rms_norm(h, self._norm, self.config.rms_norm_eps) @ self._embedding.T)


class _Block:
    """Attention and a gated MLP, each behind an RMSNorm and beside a residual stream."""

    def __init__(self, config: MLAConfig, tensors: dict[str, Array], prefix: str) -> None:
        def matrix(name: str) -> Array:
            return np.ascontiguousarray(tensors[f"{prefix}{name}.weight"].T)

        self._eps = config.rms_norm_eps
        self._before_attention = tensors[prefix + "input_layernorm.weight"]
        self._before_mlp = tensors[prefix + "post_attention_layernorm.weight"]
        self._gate, self._up, self._down = map(matrix, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))

        w_dkv, w_kr = np.split(matrix("self_attn.kv_a_proj_with_mqa"), [config.kv_lora_rank], axis=1)
        w_ukv = tensors[prefix + "self_attn.kv_b_proj.weight"].reshape(config.n_heads, -1, config.kv_lora_rank)
        w_uk, w_uv = np.split(w_ukv, [config.qk_nope_head_dim], axis=1)
        weights = {
            "w_q": matrix("self_attn.q_proj"),
            "w_dkv": w_dkv,
            "kv_norm": tensors[prefix + "self_attn.kv_a_layernorm.weight"],
            "w_kr": w_kr,
            "w_uk": w_uk,
            "w_uv": w_uv,
            "w_o": matrix("self_attn.o_proj"),
        }
        for name, shape in config.weight_shapes().items():
            require_shape(prefix + name, weights[name].shape, shape)
        self._attention = MLALayer(config)
        self._attention.weights = weights

    def forward(self, h: Array, positions: Array, rows: Any) -> Array:
        h = h + self._attention.forward(rms_norm(h, self._before_attention, self._eps), positions, rows)
        x = rms_norm(h, self._before_mlp, self._eps)
        return np.asarray(h + (_silu(x @ self._gate) * (x @ self._up)) @ self._down)


def _silu(x: Array) -> Array:
    return np.asarray(x * (0.5 + 0.5 * np.tanh(0.5 * x)))
