"""Attention geometry of MLA models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from lkv.dtypes import DType
from lkv.errors import GeometryError

__all__ = ["PRESETS", "MLAConfig"]


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Attention geometry of an MLA model, named as in the published configuration files.

    Parameters
    ----------
    hidden_size, n_layers, n_heads : int
        Width of the residual stream, attention layers, heads per layer.
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int
        Width of the latent; per head of the content key, of the rotary key (even) and of the value.
    q_lora_rank : int, optional
        Width of the compressed query; None when queries are projected directly.
    rope_theta : float, default 10000.0
    rms_norm_eps : float, default 1e-6

    Raises
    ------
    GeometryError
        A dimension is not a positive int, or `qk_rope_head_dim` is odd.
    """

    hidden_size: int
    n_layers: int
    n_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:8]:
            value = getattr(self, field.name)
            if value is None and field.name == "q_lora_rank":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise GeometryError(
                    f"{field.name}: expected a positive int, got {value!r}", expected="int >= 1", actual=value
                )
        if self.qk_rope_head_dim % 2:
            raise GeometryError(
                f"qk_rope_head_dim: expected an even int, got {self.qk_rope_head_dim}",
                expected="even int",
                actual=self.qk_rope_head_dim,
            )

    @property
    def slot_trailing(self) -> list[tuple[int, ...]]:
        """Slots of a latent cache: ``[(kv_lora_rank,), (qk_rope_head_dim,)]``."""
        return [(self.kv_lora_rank,), (self.qk_rope_head_dim,)]

    @property
    def softmax_scale(self) -> float:
        """``1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)``."""
        return 1.0 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def weights_per_layer(self) -> int:
        """Number of weights in one attention layer, norms included."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight of a layer, matrices as ``[in, out]`` except `w_uk` and `w_uv`."""
        q_width = self.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            query: dict[str, tuple[int, ...]] = {"w_q": (self.hidden_size, q_width)}
        else:
            query = {
                "w_dq": (self.hidden_size, self.q_lora_rank),
                "q_norm": (self.q_lora_rank,),
                "w_uq": (self.q_lora_rank, q_width),
            }
        return query | {
            "w_dkv": (self.hidden_size, self.kv_lora_rank),
            "kv_norm": (self.kv_lora_rank,),
            "w_kr": (self.hidden_size, self.qk_rope_head_dim),
            "w_uk": (self.n_heads, self.qk_nope_head_dim, self.kv_lora_rank),
            "w_uv": (self.n_heads, self.v_head_dim, self.kv_lora_rank),
            "w_o": (self.n_heads * self.v_head_dim, self.hidden_size),
        }

    def bytes_per_token(self, dtype: object, n_layers: int | None = None) -> int:
        """Bytes a token takes as latent and rotary key in `n_layers` layers (the whole model's when None)."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        return width * DType.of(dtype).itemsize * (self.n_layers if n_layers is None else n_layers)

    def expanded_bytes_per_token(self, dtype: object, n_layers: int | None = None) -> int:
        """Bytes a token takes as keys and values of every head in `n_layers` layers (the whole model's when None)."""
        width = self.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return width * DType.of(dtype).itemsize * (self.n_layers if n_layers is None else n_layers)


PRESETS: Mapping[str, MLAConfig] = MappingProxyType(
    {
        "deepseek-v2-lite": MLAConfig(2048, 27, 16, 512, 128, 64, 128),
        "deepseek-v3": MLAConfig(7168, 61, 128, 512, 128, 64, 128, q_lora_rank=1536),
        "minicpm3": MLAConfig(2560, 62, 40, 256, 64, 32, 64, q_lora_rank=768, rms_norm_eps=1e-5),
        "tiny": MLAConfig(128, 4, 4, 64, 32, 16, 32, q_lora_rank=48),
    }
)
