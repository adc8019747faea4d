"""What the adapter cannot do without, checked before anything else of it is imported."""

OLDEST = (5, 15)
SPARSE_OLDEST = (5, 18)  # the first in which models with an indexer cache latents

try:
    import torch  # noqa: F401
    import transformers
except ImportError as error:
    raise ImportError(
        f"lkv.integrations.transformers needs the extra 'transformers': pip install 'latent-kv[transformers]' ({error})"
    ) from error

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if VERSION < OLDEST:
    raise ImportError(
        f"lkv.integrations.transformers needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, got "
        f"{transformers.__version__}: older versions cache expanded keys and values, not latents"
    )
