"""One decode step of a stack of MLA layers as an ONNX model, over the whole buffers of a cache.

Absorbed attention, as in `attend_absorbed`. Each layer reads its two cache inputs ``cache.<layer>.0``
``[max_seq_len, kv_lora_rank]`` and ``cache.<layer>.1`` ``[max_seq_len, qk_rope_head_dim]`` up to ``length`` rows, a
mask hiding the rest, and the new tokens' rows, which are outputs ``c_kv.<layer>`` and ``k_pe.<layer>`` for the cache to
append. So the shapes never change, and one model serves every step.

A hidden row gets weight 0, not none: it must hold finite numbers. The zeros of fresh memory do, and so do old rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from lkv.layout import check_count
from lkv.mla._arrays import Array
from lkv.mla.config import MLAConfig
from lkv.mla.layer import MLALayer
from lkv.mla.stack import MLAStack

__all__ = ["decode_feeds", "decode_model"]


def decode_model(stack: MLAStack, *, seq: int, max_seq_len: int) -> bytes:
    """Return the serialised model.

    Parameters
    ----------
    stack : MLAStack
        Built: its weights become part of the model.
    seq : int
        New tokens per run.
    max_seq_len : int
        Rows of the cache's buffers.

    Returns
    -------
    bytes
        A model with the inputs of `decode_feeds` and those of the cache, and the outputs ``logits``
        ``[seq, vocab_size]``, ``c_kv.<layer>`` and ``k_pe.<layer>``.

    Raises
    ------
    GeometryError
        If `seq` or `max_seq_len` is less than 1.
    ImportError
        If onnx is missing.
    """
    seq, rows = check_count(seq, "seq", 1), check_count(max_seq_len, "max_seq_len", 1)
    graph = _Graph(stack.config, seq, rows)
    graph.add("Gather", [graph.constant("embedding", stack.embedding), "token_ids"], name="h")
    hidden = "h"
    for index, layer in enumerate(stack.layers):
        hidden = graph.layer(index, layer, hidden)
    graph.add("MatMul", [graph.normalised(hidden), graph.constant("head", stack.head)], name="logits")
    return graph.serialised(len(stack.layers), stack.vocab_size)


def decode_feeds(config: MLAConfig, token_ids: Array, length: int) -> dict[str, Array]:
    """Return the inputs of one run that are not the cache's.

    Parameters
    ----------
    config : MLAConfig
        Geometry of the model.
    token_ids : integer array, shape ``[seq]``
        The new tokens.
    length : int
        Rows of the cache to see; the first new token stands at this position.

    Returns
    -------
    dict
        ``token_ids`` ``[seq]``, ``length`` ``[1]``, and ``cos`` and ``sin`` ``[seq, 1, qk_rope_head_dim / 2, 1]``.
    """
    ids = np.asarray(token_ids, np.int64)
    half = config.qk_rope_head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = ((length + np.arange(len(ids)))[:, None] * frequencies)[:, None, :, None]
    return {
        "token_ids": ids,
        "length": np.array([length], np.int64),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }


class _Graph:
    """Nodes and weights under construction; every value is known by its name."""

    def __init__(self, config: MLAConfig, seq: int, rows: int) -> None:
        try:
            self._onnx: Any = import_module("onnx")
        except ImportError as error:
            raise ImportError("decode_model needs onnx; pip install 'latent-kv[onnx]'") from error
        self.config, self.seq, self.rows = config, seq, rows
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        heads = config.n_heads
        causal = np.where(np.arange(seq) <= np.arange(seq)[:, None], 0.0, -np.inf)
        self.hide_new = self.constant("hide_new", np.tile(causal, (heads, 1)).astype(np.float32))
        seen = self.add("Less", [self.constant("row", np.arange(rows)[None]), "length"])
        zero, hidden = (self.constant(name, np.float32(value)) for name, value in (("zero", 0.0), ("hidden", -np.inf)))
        self.hide_old = self.add("Where", [seen, zero, hidden])

    def constant(self, name: str, value: Any) -> str:
        if name not in self.weights:
            self.weights[name] = self._onnx.numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def add(self, kind: str, inputs: list[str], *, name: str | None = None, **attributes: Any) -> str:
        output = name or f"v{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(kind, inputs, [output], **attributes))
        return output

    def split(self, value: str, sizes: list[int], axis: int) -> list[str]:
        outputs = [f"v{len(self.nodes)}.{part}" for part in range(len(sizes))]
        given = [value, self.constant(f"sizes {sizes}", np.array(sizes))]
        self.nodes.append(self._onnx.helper.make_node("Split", given, outputs, axis=axis))
        return outputs

    def shaped(self, value: str, *shape: int, name: str | None = None) -> str:
        return self.add("Reshape", [value, self.constant(f"shape {shape}", np.array(shape))], name=name)

    def normalised(self, value: str, weight: str | None = None, name: str | None = None) -> str:
        mean = self.add("ReduceMean", [self.add("Mul", [value, value])], axes=[-1], keepdims=1)
        eps = self.constant("eps", np.float32(self.config.rms_norm_eps))
        scale = self.add("Sqrt", [self.add("Add", [mean, eps])])
        if weight is None:
            return self.add("Div", [value, scale], name=name)
        return self.add("Mul", [self.add("Div", [value, scale]), weight], name=name)

    def rotated(self, value: str, heads: int) -> str:
        """RoPE on interleaved pairs of ``[seq, heads * rope]``, to ``[seq, heads, rope]``."""
        rope = self.config.qk_rope_head_dim
        a, b = self.split(self.shaped(value, self.seq, heads, rope // 2, 2), [1, 1], -1)
        first = self.add("Sub", [self.add("Mul", [a, "cos"]), self.add("Mul", [b, "sin"])])
        second = self.add("Add", [self.add("Mul", [a, "sin"]), self.add("Mul", [b, "cos"])])
        return self.shaped(self.add("Concat", [first, second], axis=-1), self.seq, heads, rope)

    def layer(self, index: int, layer: MLALayer, hidden: str) -> str:
        config, seq = self.config, self.seq
        heads, rank, rope = config.n_heads, config.kv_lora_rank, config.qk_rope_head_dim
        w = {name: self.constant(f"{index}.{name}", value) for name, value in layer.weights.items() if name != "w_uv"}
        x = self.normalised(hidden)
        latent = self.add("MatMul", [x, w["w_dkv"]])
        c_new = self.normalised(latent, w["kv_norm"], name=f"c_kv.{index}")
        k_new = self.shaped(self.rotated(self.add("MatMul", [x, w["w_kr"]]), 1), seq, rope, name=f"k_pe.{index}")
        q_latent, q_pe = self.queries(x, w)
        c_old, k_old = f"cache.{index}.0", f"cache.{index}.1"
        old = self.add("Add", [self.scores(q_latent, q_pe, c_old, k_old), self.hide_old])
        new = self.add("Add", [self.scores(q_latent, q_pe, c_new, k_new), self.hide_new])
        weights = self.add("Softmax", [self.add("Concat", [old, new], axis=1)], axis=1)
        on_old, on_new = self.split(weights, [self.rows, seq], 1)
        summed = self.add("Add", [self.add("MatMul", [on_old, c_old]), self.add("MatMul", [on_new, c_new])])
        w_uv = self.constant(f"{index}.w_uv.t", layer.weights["w_uv"].transpose(0, 2, 1))
        values = self.add("MatMul", [self.shaped(summed, heads, seq, rank), w_uv])
        by_token = self.add("Transpose", [values], perm=[1, 0, 2])
        out = self.add("MatMul", [self.shaped(by_token, seq, heads * config.v_head_dim), w["w_o"]])
        return self.add("Add", [hidden, out])

    def queries(self, x: str, w: dict[str, str]) -> tuple[str, str]:
        """Absorbed and rotary queries, heads before tokens: ``[n_heads * seq, kv_lora_rank]`` and ``[..., rope]``."""
        config, seq = self.config, self.seq
        heads, nope, rope = config.n_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        if config.q_lora_rank is None:
            q = self.add("MatMul", [x, w["w_q"]])
        else:
            q = self.add("MatMul", [self.normalised(self.add("MatMul", [x, w["w_dq"]]), w["q_norm"]), w["w_uq"]])
        q_nope, q_pe = self.split(self.shaped(q, seq, heads, nope + rope), [nope, rope], -1)
        absorbed = self.add("MatMul", [self.add("Transpose", [q_nope], perm=[1, 0, 2]), w["w_uk"]])
        turned = self.add("Transpose", [self.rotated(q_pe, heads)], perm=[1, 0, 2])
        return self.shaped(absorbed, heads * seq, config.kv_lora_rank), self.shaped(turned, heads * seq, rope)

    def scores(self, q_latent: str, q_pe: str, c_kv: str, k_pe: str) -> str:
        scale = self.config.softmax_scale
        content = self.add("Gemm", [q_latent, c_kv], alpha=scale, transB=1)
        return self.add("Gemm", [q_pe, k_pe, content], alpha=scale, beta=1.0, transB=1)

    def serialised(self, n_layers: int, vocab_size: int) -> bytes:
        helper, kinds = self._onnx.helper, self._onnx.TensorProto
        config, seq = self.config, self.seq
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        given: dict[str, tuple[int, list[int]]] = {
            "token_ids": (kinds.INT64, [seq]),
            "length": (kinds.INT64, [1]),
            "cos": (kinds.FLOAT, [seq, 1, rope // 2, 1]),
            "sin": (kinds.FLOAT, [seq, 1, rope // 2, 1]),
        }
        made: dict[str, tuple[int, list[int]]] = {"logits": (kinds.FLOAT, [seq, vocab_size])}
        for index in range(n_layers):
            given[f"cache.{index}.0"] = kinds.FLOAT, [self.rows, rank]
            given[f"cache.{index}.1"] = kinds.FLOAT, [self.rows, rope]
            made[f"c_kv.{index}"] = kinds.FLOAT, [seq, rank]
            made[f"k_pe.{index}"] = kinds.FLOAT, [seq, rope]
        inputs, outputs = (
            [helper.make_tensor_value_info(name, *rest) for name, rest in values.items()] for values in (given, made)
        )
        graph = helper.make_graph(self.nodes, "mla_decode_step", inputs, outputs, list(self.weights.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(model.SerializeToString())
