"""A plan that is a captured CUDA graph, through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from lkv._storage import Storage
from lkv.errors import ArgumentTypeError, DeviceUnavailableError
from lkv.plan.callable import CallablePlan

__all__ = ["CudaGraphPlan"]


class CudaGraphPlan(CallablePlan):
    """Captures ``step(buffers, inputs)`` once over the present addresses, then replays it.

    Parameters
    ----------
    step : callable
        Enqueues the work of one step on CuPy's current stream and returns its outputs. It must neither wait nor look
        at values, and running it twice must do no harm: it reads ``buffers[layer][which]``, and does not write them.
    inputs : mapping of str to cupy.ndarray
        Arrays at fixed addresses, for whatever changes from run to run: tokens, positions, the length.
    warmup : int, default 1
        Runs before the capture, which compile kernels and fill the plan's own memory pool.

    Raises
    ------
    DeviceUnavailableError
        If CuPy is not importable.

    Notes
    -----
    Outputs and scratch come from a pool that belongs to the plan, as the graph writes there with every replay. `run`
    replays on CuPy's current stream, behind the appends made on it.
    """

    def __init__(self, step: Callable[..., Any], inputs: Mapping[str, Any] | None = None, *, warmup: int = 1) -> None:
        try:
            self._cupy: Any = import_module("cupy")
        except ImportError as error:
            raise DeviceUnavailableError(
                "CudaGraphPlan needs CuPy, which is not importable; "
                "pip install 'latent-kv[cuda12]' or 'latent-kv[cuda13]'"
            ) from error
        super().__init__(step, view=_cupy_array)
        self.inputs = dict(inputs or {})
        self._warmup = warmup
        self._pool = self._cupy.cuda.MemoryPool()
        self._ordinal = 0
        self._graph: Any = None
        self._outputs: Any = None
        self._launched_on: Any = None

    @property
    def captured(self) -> bool:
        """Whether a capture is held."""
        return self._graph is not None

    def bind(self, layer: int, which: int, storage: Storage) -> None:
        """Read the slot from this storage from now on; a capture over the old address is dropped."""
        self.invalidate()
        super().bind(layer, which, storage)
        self._ordinal = storage.device.ordinal

    def invalidate(self) -> None:
        """Wait for the last replay, then drop the capture: the memory it reads may go afterwards."""
        graph, self._graph, self._outputs = self._graph, None, None
        if graph is not None and self._launched_on is not None:
            self._launched_on.synchronize()

    def run(self, **values: Any) -> Any:
        """Put values into the inputs and replay; captures first when no capture is held.

        Returns
        -------
        object
            What the step returned when it was captured: arrays that the next run overwrites.

        Raises
        ------
        ArgumentTypeError
            If there is no input of that name.
        """
        cupy = self._cupy
        with cupy.cuda.Device(self._ordinal):
            for name, value in values.items():
                if name not in self.inputs:
                    raise ArgumentTypeError(
                        f"{name}: expected one of {', '.join(self.inputs) or 'no inputs'}",
                        expected=tuple(self.inputs),
                        actual=name,
                    )
                cupy.copyto(self.inputs[name], cupy.asarray(value))
            stream = cupy.cuda.get_current_stream()
            if self._graph is None:
                self._capture(stream)
            self._launched_on = stream
            self._graph.launch(stream)
            return self._outputs

    def _capture(self, current: Any) -> None:
        cuda = self._cupy.cuda
        stream = cuda.Stream(non_blocking=True)
        stream.wait_event(current.record())
        with cuda.using_allocator(self._pool.malloc), stream:
            for _ in range(self._warmup):
                self._step(self.buffers, self.inputs)
            stream.synchronize()
            stream.begin_capture()
            try:
                outputs = self._step(self.buffers, self.inputs)
            except BaseException:
                with suppress(Exception):  # a capture that went wrong ends with an error of its own
                    stream.end_capture()
                raise
            self._graph, self._outputs = stream.end_capture(), outputs

    def __del__(self) -> None:
        with suppress(Exception):  # CuPy may be half gone when the interpreter ends
            self.invalidate()


def _cupy_array(storage: Storage) -> Any:
    return storage.alias().cupy()
