"""A seeded stack of MLA attention layers that reads and writes token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from lkv.mla._arrays import Array
from lkv.mla.config import MLAConfig
from lkv.mla.layer import Form, MLALayer, rms_norm

__all__ = ["MLAStack", "Rows"]

Rows: TypeAlias = Callable[[int, Array, Array], tuple[ArrayLike, ArrayLike]]

_EMBEDDING, _HEAD, _LAYERS = range(3)


class MLAStack:
    """Token embedding, `n_layers` attention layers on a residual stream with RMSNorm, and a head over the vocabulary.

    There are no feed-forward blocks: they hold most of a model's weights and never touch the cache.

    Parameters
    ----------
    config : MLAConfig
        Geometry of one layer. Its `n_layers` is the whole model's.
    n_layers : int
        Layers to build.
    vocab_size : int, default 1024
    seed : int, default 0
        Equal seeds give equal weights.
    """

    def __init__(self, config: MLAConfig, n_layers: int, vocab_size: int = 1024, seed: int = 0) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = _normal([seed, _EMBEDDING], (vocab_size, config.hidden_size), 1.0)
        self.head = _normal([seed, _HEAD], (config.hidden_size, vocab_size), 1 / math.sqrt(config.hidden_size))
        self.layers: list[MLALayer] = []
        self._norm = np.ones(config.hidden_size, np.float32)
        self._seed = seed
        self._n_layers = n_layers

    @staticmethod
    def bytes_required(config: MLAConfig, n_layers: int, vocab_size: int = 1024) -> int:
        """Bytes of weights of a stack with `n_layers` layers; allocates nothing."""
        return 4 * (n_layers * config.weights_per_layer + 2 * vocab_size * config.hidden_size)

    def build(self) -> Iterator[MLALayer]:
        """Make the layers' weights one by one, handing out each finished layer."""
        for index in range(len(self.layers), self._n_layers):
            self.layers.append(MLALayer(self.config, [self._seed, _LAYERS, index]))
            yield self.layers[-1]

    def forward(self, token_ids: Array, positions: Array, rows: Rows, *, form: Form = "absorbed") -> Array:
        """Run all layers on new tokens.

        Parameters
        ----------
        token_ids, positions : integer arrays, shape ``[n]``
        rows : callable
            Takes ``(layer, c_kv, k_pe)`` with the new rows of a layer, stores them, and returns all its rows.
        form : {"absorbed", "expanded"}

        Returns
        -------
        float32 array, shape ``[n, hidden_size]``
            Hidden states after the last layer, for `logits`.
        """
        h = self.embedding[token_ids]
        for index, layer in enumerate(self.layers):

            def exchange(c_kv: Array, k_pe: Array, index: int = index) -> tuple[ArrayLike, ArrayLike]:
                return rows(index, c_kv, k_pe)

            h = h + layer.forward(self._normalised(h), positions, exchange, form=form)
        return np.asarray(h)

    def logits(self, h: Array) -> Array:
        """Score the vocabulary: ``[n, hidden_size]`` to float32 ``[n, vocab_size]``."""
        return np.asarray(self._normalised(h) @ self.head)

    def _normalised(self, h: Array) -> Array:
        return rms_norm(h, self._norm, self.config.rms_norm_eps)


def _normal(seed: list[int], shape: tuple[int, int], scale: float) -> Array:
    weight = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    weight *= np.float32(scale)
    return weight
