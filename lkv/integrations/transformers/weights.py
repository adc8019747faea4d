"""The up-projections of an MLA module, read out of its ``kv_b_proj``."""

from __future__ import annotations

from typing import Any

import torch

from lkv.errors import ArgumentTypeError, ShapeMismatchError

__all__ = ["UpProjections"]


class UpProjections:
    """``kv_b_proj`` by heads: ``w_uk`` and ``w_uv``, ``[heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]``.

    Of a plain linear layer this is a view, made on every call, so that training, loading and moving show. Of any
    other (quantised, with adapters) it is computed by passing the unit vectors through it, and again when its
    parameters, buffers or adapters change.

    Raises
    ------
    ArgumentTypeError
        If the weights cannot be read: split over devices, not loaded, or not linear.
    ShapeMismatchError
        If they are not of the module's dimensions.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.name = name
        self.rank = int(module.kv_lora_rank)
        self.width = int(module.qk_nope_head_dim) + int(module.v_head_dim)
        self._made: torch.Tensor | None = None
        self._made_of: object = None
        self.read(module)

    def read(self, module: torch.nn.Module) -> torch.Tensor:
        """Return the weights as they are now."""
        projection = module.kv_b_proj
        if getattr(projection, "bias", None) is not None:
            raise ArgumentTypeError(f"{self.name}: has a bias, which no known MLA model has")
        weight = projection.weight.detach() if type(projection) is torch.nn.Linear else self._made_from(module)
        if _is_sharded(weight):
            raise ArgumentTypeError(f"{self.name}: is split over devices, and lkv cannot absorb a part of the heads")
        if weight.device.type == "meta":
            raise ArgumentTypeError(
                f"{self.name}: holds no weights at this time (meta device: offloaded, or not loaded)"
            )
        if weight.ndim != 2 or weight.shape[1] != self.rank or weight.shape[0] % self.width:
            raise ShapeMismatchError(
                f"{self.name}: expected [heads * {self.width}, {self.rank}], got {list(weight.shape)}",
                expected=(-1, self.rank),
                actual=tuple(weight.shape),
            )
        return weight.view(-1, self.width, self.rank)

    def _made_from(self, module: Any) -> torch.Tensor:
        projection = module.kv_b_proj
        state = _state_of(projection)
        if self._made is None or state != self._made_of:
            # The weights of a norm, if nothing else, are in the dtype that the projection is called with.
            like = next((weight for weight in module.parameters() if weight.ndim == 1), torch.empty(0))
            try:
                with torch.no_grad():
                    made = projection(torch.eye(self.rank, dtype=like.dtype, device=like.device)).T.contiguous()
            except Exception as error:
                raise ArgumentTypeError(
                    f"{self.name}: a {type(projection).__name__}, whose weight cannot be read ({error})"
                ) from error
            self._made, self._made_of = made, state
        return self._made


def _state_of(projection: torch.nn.Module) -> object:
    tensors = [*projection.parameters(), *projection.buffers()]
    adapters = [
        [repr(getattr(part, name, None)) for name in ("active_adapters", "merged", "disable_adapters", "scaling")]
        for part in projection.modules()
    ]
    return [(tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device) for tensor in tensors], adapters


def _is_sharded(weight: torch.Tensor) -> bool:
    return hasattr(weight, "device_mesh")
