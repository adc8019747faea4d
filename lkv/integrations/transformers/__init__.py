"""Hugging Face transformers over lkv: `LkvCache` keeps an MLA model's latents, `absorb` makes it attend to them.

Needs the extra ``transformers``: 5.15 or newer, the first in which MLA models cache latents.
"""

import lkv.integrations.transformers._requires  # noqa: F401  (first: it says what is missing)
from lkv.integrations.transformers.absorb import Absorbed, absorb
from lkv.integrations.transformers.cache import LkvCache

__all__ = ["Absorbed", "LkvCache", "absorb"]
