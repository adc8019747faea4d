"""An MLA attention layer with seeded weights, and the norm and rotation it needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from lkv.errors import ShapeMismatchError
from lkv.mla._arrays import Array, compute_dtype, floating, require_shape
from lkv.mla.attention import attend_absorbed, attend_expanded
from lkv.mla.config import MLAConfig

__all__ = ["Form", "MLALayer", "apply_rope", "rms_norm"]

Form: TypeAlias = Literal["absorbed", "expanded"]


class MLALayer:
    """One MLA attention layer with seeded float32 weights.

    Weights are normal with variance ``1 / fan_in``, the query's times `QUERY_GAIN` so that attention picks rows
    instead of averaging them all.

    Parameters
    ----------
    config : MLAConfig
    seed : int or sequence of int, default 0
        Equal seeds give equal weights.

    Attributes
    ----------
    weights : dict of str to float32 array
        Named and shaped as `MLAConfig.weight_shapes` says.
    """

    QUERY_GAIN = 3.0

    def __init__(self, config: MLAConfig, seed: int | list[int] = 0) -> None:
        self.config = config
        rng = np.random.default_rng(seed)
        self.weights: dict[str, Array] = {}
        for name, shape in config.weight_shapes().items():
            if len(shape) == 1:
                self.weights[name] = np.ones(shape, np.float32)
                continue
            fan_in = shape[-1] if len(shape) == 3 else shape[0]
            gain = self.QUERY_GAIN if name in ("w_q", "w_uq") else 1.0
            weight = rng.standard_normal(shape, dtype=np.float32)
            weight *= np.float32(gain / math.sqrt(fan_in))
            self.weights[name] = weight

    def latents(self, h: Array, positions: ArrayLike) -> tuple[Array, Array]:
        """Compute the rows that go into the cache.

        Parameters
        ----------
        h : array, shape ``[n, hidden_size]``
            Normalised hidden states.
        positions : integer array, shape ``[n]``

        Returns
        -------
        c_kv : array, shape ``[n, kv_lora_rank]``
            ``RMSNorm(W^DKV h)``.
        k_pe : array, shape ``[n, qk_rope_head_dim]``
            ``RoPE(W^KR h)``.

        Raises
        ------
        ShapeMismatchError
            `h` or `positions` does not fit.
        """
        self._check_hidden(h)
        c_kv = rms_norm(h @ self.weights["w_dkv"], self.weights["kv_norm"], self.config.rms_norm_eps)
        return c_kv, apply_rope(h @ self.weights["w_kr"], positions, self.config.rope_theta)

    def queries(self, h: Array, positions: ArrayLike) -> tuple[Array, Array]:
        """Compute the queries of new tokens.

        Parameters
        ----------
        h : array, shape ``[n, hidden_size]``
            Normalised hidden states.
        positions : integer array, shape ``[n]``

        Returns
        -------
        q_nope : array, shape ``[n, n_heads, qk_nope_head_dim]``
        q_pe : array, shape ``[n, n_heads, qk_rope_head_dim]``

        Raises
        ------
        ShapeMismatchError
            `h` or `positions` does not fit.
        """
        self._check_hidden(h)
        config, w = self.config, self.weights
        if config.q_lora_rank is None:
            q = h @ w["w_q"]
        else:
            q = rms_norm(h @ w["w_dq"], w["q_norm"], config.rms_norm_eps) @ w["w_uq"]
        q = q.reshape(h.shape[0], config.n_heads, config.qk_nope_head_dim + config.qk_rope_head_dim)
        q_nope, q_pe = np.split(q, [config.qk_nope_head_dim], axis=-1)
        return q_nope, apply_rope(q_pe, positions, config.rope_theta)

    def attend(
        self, q_nope: ArrayLike, q_pe: ArrayLike, c_kv: ArrayLike, k_pe: ArrayLike, *, form: Form = "absorbed"
    ) -> Array:
        """Attend causally over `c_kv` and `k_pe` and project back by ``W^O``.

        Parameters and errors are those of `attend_absorbed`; the result is ``[Q, hidden_size]``.
        """
        run = {"absorbed": attend_absorbed, "expanded": attend_expanded}[form]
        scale = self.config.softmax_scale
        heads = run(q_nope, q_pe, c_kv, k_pe, self.weights["w_uk"], self.weights["w_uv"], softmax_scale=scale)
        return np.asarray(heads.reshape(heads.shape[0], -1) @ self.weights["w_o"])

    def forward(
        self,
        h: Array,
        positions: ArrayLike,
        rows: Callable[[Array, Array], tuple[ArrayLike, ArrayLike]] | None = None,
        *,
        form: Form = "absorbed",
    ) -> Array:
        """Run the layer on new tokens.

        Parameters
        ----------
        h : array, shape ``[n, hidden_size]``
            Normalised hidden states.
        positions : integer array, shape ``[n]``
        rows : callable, optional
            Takes the new ``(c_kv, k_pe)`` rows, stores them, and returns all rows up to and including them. Without
            it the new tokens see each other only.
        form : {"absorbed", "expanded"}

        Returns
        -------
        array, shape ``[n, hidden_size]``
        """
        new_rows = self.latents(h, positions)
        c_kv, k_pe = new_rows if rows is None else rows(*new_rows)
        return self.attend(*self.queries(h, positions), c_kv, k_pe, form=form)

    def _check_hidden(self, h: Array) -> None:
        require_shape("h", h.shape, (h.shape[0] if h.ndim else "n", self.config.hidden_size))


def apply_rope(x: ArrayLike, positions: ArrayLike, theta: float = 10000.0, interleaved: bool = True) -> Array:
    """Rotate the last axis of `x` by rotary position embedding.

    Pair ``i`` of token ``t`` turns by ``positions[t] * theta ** (-2 i / d)``. Angles are computed in float64.

    Parameters
    ----------
    x : array, shape ``[n, d]`` or ``[n, ..., d]``
        ``d`` is even.
    positions : integer array, shape ``[n]``
        Position of each token.
    theta : float, default 10000.0
        Base of the frequencies.
    interleaved : bool, default True
        Pairs are ``(2 i, 2 i + 1)``, as DeepSeek stores them; otherwise ``(i, i + d / 2)``.

    Returns
    -------
    array, shape of `x`
        float64 for float64 input, else float32.

    Raises
    ------
    ShapeMismatchError
        `x` has no even last axis, or `positions` is not ``[n]``.

    Notes
    -----
    RoFormer, arXiv:2104.09864, section 3.2.2. No frequency scaling (YaRN, LongRoPE) is applied.
    """
    x_in = floating("x", x)
    where = np.asarray(positions)
    if x_in.ndim < 2 or x_in.shape[-1] % 2:
        raise ShapeMismatchError(
            f"x: expected [n, ..., d] with even d, got {x_in.shape}", expected="[n, ..., even d]", actual=x_in.shape
        )
    require_shape("positions", where.shape, (x_in.shape[0],))
    dtype = compute_dtype(x_in)
    x_wide = x_in.astype(dtype, copy=False)
    half = x_in.shape[-1] // 2
    angle = where.astype(np.float64)[:, None] * theta ** (-np.arange(half, dtype=np.float64) / max(half, 1))
    angle = angle.reshape(angle.shape[0], *(1,) * (x_in.ndim - 2), half)
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    a, b = x_wide[..., first], x_wide[..., second]
    out = np.empty(x_in.shape, dtype)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def rms_norm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """Scale the last axis to unit root mean square, then by `weight` (arXiv:1910.07467).

    Parameters
    ----------
    x : array, shape ``[..., d]``
    weight : array, shape ``[d]``
    eps : float, default 1e-6
        Added to the mean square.

    Returns
    -------
    array, shape ``[..., d]``
    """
    mean_square = np.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]
    return np.asarray(x * (weight / np.sqrt(mean_square + eps)))
