"""The up-projections of an MLA module, read out of its ``kv_b_proj``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lkv.errors import ArgumentTypeError, ShapeMismatchError

__all__ = ["UpProjections"]


class UpProjections:
    """``kv_b_proj`` by heads: ``w_uk`` and ``w_uv``, ``[heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]``.

    Of a plain linear layer this is a view, made on every call, so that training, loading and moving show. Of any
    other (quantised, with adapters, with hooks) it is computed by passing the unit vectors through it, and again when
    its parameters, buffers, adapters or hooks change.

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
        plain = _is_plain(projection)
        self._check([projection.weight] if plain else [*projection.parameters(), *projection.buffers()])
        if plain and projection.bias is not None:
            self._refuse_bias()
        weight = projection.weight.detach() if plain else self._made_from(module)
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
            inputs = torch.cat([torch.eye(self.rank), torch.zeros(1, self.rank)]).to(like.device, like.dtype)
            try:
                with torch.no_grad():
                    made = projection(inputs)
            except Exception as error:
                raise ArgumentTypeError(
                    f"{self.name}: a {type(projection).__name__}, whose weight cannot be read ({error})"
                ) from error
            if made[-1].any():
                self._refuse_bias()
            made = made[:-1].T.contiguous()
            self._made, self._made_of = made, state
        return self._made

    def _check(self, tensors: list[torch.Tensor]) -> None:
        if any(_is_sharded(tensor) for tensor in tensors):
            raise ArgumentTypeError(f"{self.name}: is split over devices, and lkv cannot absorb a part of the heads")
        if any(tensor.device.type == "meta" for tensor in tensors):
            raise ArgumentTypeError(
                f"{self.name}: holds no weights at this time (meta device: offloaded, or not loaded)"
            )

    def _refuse_bias(self) -> NoReturn:
        raise ArgumentTypeError(f"{self.name}: has a bias, which no known MLA model has")


def _is_plain(projection: torch.nn.Module) -> bool:
    hooked = projection._forward_hooks or projection._forward_pre_hooks
    patched = "forward" in vars(projection) and not hasattr(projection, "_hf_hook")  # accelerate's only moves inputs
    return type(projection) is torch.nn.Linear and not hooked and not patched


def _state_of(projection: torch.nn.Module) -> object:
    tensors = [*projection.parameters(), *projection.buffers()]
    adapters = [
        [repr(getattr(part, name, None)) for name in ("active_adapters", "merged", "disable_adapters", "scaling")]
        for part in projection.modules()
    ]
    # Tensors made in inference mode have no version.
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    hooks = [*projection._forward_hooks], [*projection._forward_pre_hooks]
    return [(tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors], versions, adapters, hooks


def _is_sharded(weight: torch.Tensor) -> bool:
    return hasattr(weight, "device_mesh")
