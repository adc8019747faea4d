"""A plan that is a PyTorch function, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from lkv._storage import Storage
from lkv.plan.callable import CallablePlan

__all__ = ["TorchPlan"]


class TorchPlan(CallablePlan):
    """Calls ``step(buffers, *args, **kwargs)`` with tensors that alias whole storages; `torch.compile` if asked.

    Parameters
    ----------
    step : callable
        As for `CallablePlan`, over PyTorch tensors.
    compile : bool or mapping, default False
        Compile the step; a mapping holds the arguments of `torch.compile`.

    Raises
    ------
    ImportError
        If PyTorch is missing or older than 2.10.

    Notes
    -----
    The tensors are arguments of the compiled function, which checks their shapes and strides and holds no address of
    them: a re-bound plan does not compile again. Modes of `torch.compile` that capture CUDA graphs copy their
    arguments, which for a cache is all of it, at every step; use `CudaGraphPlan`.
    """

    def __init__(self, step: Callable[..., Any], *, compile: bool | Mapping[str, Any] = False) -> None:
        torch = import_module("torch")
        options = compile if isinstance(compile, Mapping) else {}
        super().__init__(step if compile is False else torch.compile(step, **options), view=_tensor)


def _tensor(storage: Storage) -> Any:
    return storage.alias().torch()
