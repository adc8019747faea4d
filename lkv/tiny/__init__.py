"""A small character model with Multi-head Latent Attention, its weights in the package, for ``lkv demo``."""

from __future__ import annotations

from lkv.tiny.engines import as_transformers
from lkv.tiny.model import TinyModel

__all__ = ["TinyModel", "as_transformers"]
