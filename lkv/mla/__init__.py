"""Reference Multi-head Latent Attention over a cache, for tests, the demo and adapters."""

from __future__ import annotations

from lkv.mla.attention import attend_absorbed, attend_expanded
from lkv.mla.config import PRESETS, MLAConfig
from lkv.mla.layer import MLALayer, apply_rope, rms_norm

__all__ = ["PRESETS", "MLAConfig", "MLALayer", "apply_rope", "attend_absorbed", "attend_expanded", "rms_norm"]
