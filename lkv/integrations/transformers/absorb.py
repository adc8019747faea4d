"""Make a transformers model attend to its latents as they are cached, without a change to its code."""

from __future__ import annotations

import functools
import sys
import weakref
from types import TracebackType
from typing import Any, Self

import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lkv.errors import ArgumentTypeError, GeometryError
from lkv.integrations.transformers._requires import SPARSE_OLDEST, VERSION
from lkv.integrations.transformers.attention import chosen_rows, crossover, latent_attention, with_chosen
from lkv.integrations.transformers.weights import UpProjections
from lkv.layout import check_count

__all__ = ["Absorbed", "absorb"]

NAME = "lkv_mla"
_STATE = "_lkv_absorbed"
_FEW_ROWS = 64
_NOT_ABSORBED = ("softcap", "position_bias")  # arguments of an attention function that change what it computes


def absorb(model: torch.nn.Module, *, crossover: int | None = None) -> Absorbed:
    """Let every MLA layer of a model attend in latent space: no step expands the history by ``kv_b_proj`` any more.

    Works with any cache that hands latents back. Modules are found by their ``expand_kv`` and ``kv_b_proj``; the
    attention function and its mask are registered with transformers under the name ``lkv_mla``. Under autograd and in
    training the model's own expansion runs.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Changed in place, until `Absorbed.undo`.
    crossover : int, optional
        Queries per sequence from which on a forward pass expands, as the model itself does; prefill in long chunks is
        cheaper that way. By default where the two were measured to take the same time, see
        `lkv.integrations.transformers.attention.crossover`. 0 always expands.

    Returns
    -------
    Absorbed
        Undoes it: ``absorb(model).undo()``, or ``with absorb(model): ...``. The same object for as long as the model is
        absorbed; another `crossover` then replaces the first.

    Raises
    ------
    ArgumentTypeError
        If it is no module, or the weight of a ``kv_b_proj`` cannot be read: split over devices, or not loaded.
    GeometryError
        If there is no MLA layer that caches latents: models with sparse attention do so from transformers 5.18 on.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}", actual=model)
    limit = None if crossover is None else check_count(crossover, "crossover")
    found = _handles.get(model)
    if found is not None and not found._holds():
        found.undo()  # another attention function was chosen since, which is then what it was before
        found = None
    if found is None:
        found = Absorbed(model, limit)
        _handles[model] = found
    elif limit is not None:
        found._set(limit)
    return found


class Absorbed:
    """A model whose MLA layers attend in latent space; made by `absorb`."""

    def __init__(self, model: torch.nn.Module, limit: int | None) -> None:
        named = {name: module for name, module in model.named_modules() if _is_mla(module)}
        if not named:
            raise GeometryError(
                f"model: {type(model).__name__} has no MLA attention with expand_kv and kv_b_proj", actual=model
            )
        if VERSION < SPARSE_OLDEST and any(hasattr(module, "indexer") for module in named.values()):
            raise GeometryError(
                f"model: {type(model).__name__} has sparse attention, and caches latents from transformers "
                f"{SPARSE_OLDEST[0]}.{SPARSE_OLDEST[1]} on; this is {transformers.__version__}",
                expected=SPARSE_OLDEST,
                actual=VERSION,
            )
        states = {
            name: _State(UpProjections(module, f"{name}.kv_b_proj"), _limit(module, limit), _implementation(module))
            for name, module in named.items()
        }
        self._model = weakref.ref(model)
        self._absorbed = [(module, states[name]) for name, module in named.items()]
        for module, state in self._absorbed:
            setattr(module, _STATE, state)
            module.expand_kv = functools.partial(_latents, module)
        for module, _ in self._absorbed:
            module.config._attn_implementation_internal = NAME

    def undo(self) -> None:
        """Leave the model as it was before. Further calls do nothing."""
        absorbed, self._absorbed = self._live(), []
        for module, _ in absorbed:
            del module.__dict__[_STATE], module.__dict__["expand_kv"]
        for module, state in absorbed:
            # A configuration may be shared with another model that is absorbed, or name another function since.
            if module.config._attn_implementation_internal == NAME and not _states_with(module.config):
                module.config._attn_implementation_internal = state.implementation
        model = self._model()
        if model is not None and _handles.get(model) is self:
            del _handles[model]

    @property
    def n_layers(self) -> int:
        """MLA layers absorbed; 0 after `undo`."""
        return len(self._live())

    @property
    def crossover(self) -> int:
        """Queries per sequence from which on layers expand: the least of any layer."""
        return min((state.crossover for _, state in self._live()), default=0)

    def _set(self, limit: int) -> None:
        for _, state in self._live():
            state.crossover = limit

    def _live(self) -> list[tuple[Any, _State]]:
        """The modules that nobody else has absorbed or undone since."""
        return [(module, state) for module, state in self._absorbed if module.__dict__.get(_STATE) is state]

    def _holds(self) -> bool:
        live = self._live()
        named = all(module.config._attn_implementation_internal == NAME for module, _ in live)
        return named and 0 < len(live) == len(self._absorbed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self._live():
            return "Absorbed(undone)"
        return (
            f"Absorbed({type(self._model()).__name__}, {self.n_layers} layers, expands from {self.crossover} queries)"
        )


class _State:
    """What an absorbed module carries."""

    def __init__(self, projections: UpProjections, limit: int, implementation: str | None) -> None:
        self.projections = projections
        self.crossover = limit
        self.implementation = implementation  # of attention, before


_handles: weakref.WeakKeyDictionary[torch.nn.Module, Absorbed] = weakref.WeakKeyDictionary()


def _is_mla(module: torch.nn.Module) -> bool:
    wanted = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "config")
    return all(hasattr(module, name) for name in wanted)


def _implementation(module: Any) -> str | None:
    """Return what the module's attention was before any model with its configuration was absorbed."""
    own: str | None = module.config._attn_implementation_internal
    if own != NAME:
        return own
    copied = module.__dict__.get(_STATE)  # of a copy of an absorbed model
    states = _states_with(module.config) if copied is None else [copied]
    return states[0].implementation if states else own


def _states_with(config: Any) -> list[_State]:
    live = (pair for handle in list(_handles.values()) for pair in handle._live())
    return [state for module, state in live if module.config is config]


def _limit(module: Any, limit: int | None) -> int:
    if limit is not None:
        return limit
    return crossover(module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim)


def _latents(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Someone may have set another attention function since, which wants keys and values.
    if self.config._attn_implementation != NAME:
        expanded: tuple[torch.Tensor, torch.Tensor] = type(self).expand_kv(self, kv_nope, k_rot)
        return expanded
    return kv_nope, k_rot


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks an attention function to: `key` and `value` are the two latents."""
    state: _State | None = module.__dict__.get(_STATE)
    rest = dict(kwargs, dropout=dropout, scaling=module.scaling if scaling is None else scaling)
    if state is None:
        return _expanded(module, query, key, value, attention_mask, is_causal=is_causal, **rest), None
    unknown = [name for name in _NOT_ABSORBED if kwargs.get(name) is not None]
    if unknown:
        raise ArgumentTypeError(f"{type(module).__name__}: lkv does not know how to attend with {', '.join(unknown)}")
    n = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and n > 1 and not causal:  # below, None is causal
        attention_mask = torch.ones((1, 1, 1, key.shape[2]), dtype=torch.bool, device=key.device)
    if indices is not None and n > 1:
        attention_mask = with_chosen(indices, key.shape[2], attention_mask)
    elif indices is not None:
        key, value, attention_mask = chosen_rows(indices, key, value, attention_mask)
    learning = _is_learning(module, query, key, value, attention_mask)
    if n < state.crossover and not learning and not _is_short(key):
        w_kv = state.projections.read(module)
        sinks = kwargs.get("s_aux")
        return latent_attention(query, key, value, w_kv, attention_mask, rest["scaling"], sinks), None
    key, value = type(module).expand_kv(module, key, value)
    return _expanded(module, query, key, value, attention_mask, is_causal=is_causal, **rest), None


def _is_learning(module: Any, *given: torch.Tensor | None) -> bool:
    """Whether gradients may be wanted, of what is given or of ``kv_b_proj``, which may be all that is trained."""
    if module.training or not torch.is_grad_enabled():
        return bool(module.training)
    tensors = (*given, *module.kv_b_proj.parameters())
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _is_short(latents: torch.Tensor) -> bool:
    """Whether there are so few rows that expanding them takes less time than the two projections in narrow types."""
    narrow = latents.dtype in (torch.bfloat16, torch.float16) and latents.device.type == "cpu"
    return narrow and latents.shape[2] < _FEW_ROWS


def _expanded(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """Attend to keys and values, as the model itself does."""
    if kwargs.get("s_aux") is None:
        attended: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
        return attended
    # PyTorch's function knows no sinks; models that have them bring their own, which wants a mask to add.
    n, rows = query.shape[2], key.shape[2]
    if mask is None and n > 1:
        mask = torch.ones((1, 1, n, rows), dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, lowest)
    attended = sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **kwargs)[
        0
    ]
    return attended


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
