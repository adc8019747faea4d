"""A plan that is an ONNX Runtime session with its inputs bound to a cache's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lkv._storage import Storage
from lkv.errors import ArgumentTypeError, DTypeMismatchError, GeometryError, LayerIndexError, ShapeMismatchError

__all__ = ["OrtPlan", "cache_input"]


def cache_input(layer: int, which: int) -> str:
    """Return the name a model gives to the input that reads a slot: ``cache.<layer>.<which>``."""
    return f"cache.{layer}.{which}"


class OrtPlan:
    """Runs an ONNX model whose cache inputs are the cache's own buffers, at full capacity, without a copy.

    Parameters
    ----------
    model : bytes, str, path or onnxruntime.InferenceSession
        The model. All of its shapes are fixed.
    name_of : callable, default `cache_input`
        From layer and slot to the name of the input that reads it.
    providers : sequence, optional
        Execution providers, as for `onnxruntime.InferenceSession`.
    threads : int, optional
        Threads of one operator.

    Raises
    ------
    ImportError
        If onnxruntime is missing.
    GeometryError
        If an input or an output has no fixed shape.
    ArgumentTypeError
        If a provider is set to capture CUDA graphs by itself: it would replay old addresses whatever is bound.

    Notes
    -----
    Packed slots share one storage ``[max_seq_len, sum of widths]``: a model reads them through one input, or two of
    that shape.
    """

    def __init__(
        self,
        model: Any,
        *,
        name_of: Callable[[int, int], str] = cache_input,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        threads: int | None = None,
    ) -> None:
        self._ort: Any = _onnxruntime()
        self._session = self._open(model, providers, threads)
        options = self._session.get_provider_options()
        if any(_is_on(of_one.get("enable_cuda_graph")) for of_one in options.values()):
            raise ArgumentTypeError(
                "providers: expected none with enable_cuda_graph, whose capture cannot be re-bound; use CudaGraphPlan",
                actual=options,
            )
        self._name_of = name_of
        self._inputs = {argument.name: argument for argument in self._session.get_inputs()}
        for argument in (*self._inputs.values(), *self._session.get_outputs()):
            if not all(isinstance(dim, int) for dim in argument.shape):
                raise GeometryError(
                    f"{argument.name}: expected a fixed shape, got {argument.shape}", actual=argument.shape
                )
        self._binding = self._session.io_binding()
        self._bound: dict[tuple[int, int], Any] = {}
        self._outputs: dict[str, NDArray[Any]] = {}
        for argument in self._session.get_outputs():
            array = np.zeros(argument.shape, _numpy_dtype(argument.type))
            self._outputs[argument.name] = array
            self._binding.bind_ortvalue_output(argument.name, self._ort.OrtValue.ortvalue_from_numpy(array))

    def _open(self, model: Any, providers: Sequence[Any], threads: int | None) -> Any:
        if isinstance(model, self._ort.InferenceSession):
            return model
        options = self._ort.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        return self._ort.InferenceSession(model, options, providers=list(providers))

    @property
    def session(self) -> Any:
        """The `onnxruntime.InferenceSession`. Several plans may share one."""
        return self._session

    def address(self, layer: int, which: int) -> int:
        """Return the address that the slot is read from, as ONNX Runtime has it."""
        return int(self._bound[layer, which].data_ptr())

    def bind(self, layer: int, which: int, storage: Storage) -> None:
        """Read the slot from this storage from now on.

        Raises
        ------
        LayerIndexError
            If the model reads no such slot.
        ShapeMismatchError, DTypeMismatchError
            If the storage is not what the model's input takes.
        """
        name = self._name_of(layer, which)
        argument = self._inputs.get(name)
        if argument is None:
            raise LayerIndexError(f"bind: the model has no input {name!r} for layer {layer}, slot {which}", actual=name)
        if tuple(argument.shape) != storage.shape:
            raise ShapeMismatchError(
                f"{name}: expected {tuple(argument.shape)}, got {storage.shape}",
                expected=tuple(argument.shape),
                actual=storage.shape,
            )
        value = self._value(storage)
        if value.data_type() != argument.type:
            raise DTypeMismatchError(
                f"{name}: expected {argument.type}, got {value.data_type()}",
                expected=argument.type,
                actual=value.data_type(),
            )
        self._binding.bind_ortvalue_input(name, value)
        self._bound[layer, which] = value

    def _value(self, storage: Storage) -> Any:
        alias = storage.alias()
        from_dlpack = getattr(self._ort.OrtValue, "from_dlpack", None)
        if from_dlpack is None or alias.readonly:
            return self._ort.OrtValue.ortvalue_from_numpy(alias.numpy())
        return from_dlpack(alias)

    def invalidate(self) -> None:
        """Do nothing: ONNX Runtime looks its bindings up in every run."""

    def run(self, **feeds: Any) -> Mapping[str, NDArray[Any]]:
        """Run the model.

        Parameters
        ----------
        **feeds : array_like
            The inputs that are not the cache's.

        Returns
        -------
        dict of str to numpy.ndarray
            The outputs, in arrays that the next run overwrites.

        Raises
        ------
        ArgumentTypeError
            If the model has no such input.
        ShapeMismatchError, DTypeMismatchError
            If a value does not fit its input.
        """
        for name, value in feeds.items():
            self._feed(name, value)
        self._session.run_with_iobinding(self._binding)
        return self._outputs

    def _feed(self, name: str, value: Any) -> None:
        argument = self._inputs.get(name)
        if argument is None:
            raise ArgumentTypeError(f"run: the model has no input {name!r}", expected=tuple(self._inputs), actual=name)
        array = np.ascontiguousarray(value)
        if array.dtype != _numpy_dtype(argument.type):
            raise DTypeMismatchError(
                f"{name}: expected {argument.type}, got {array.dtype}", expected=argument.type, actual=array.dtype
            )
        if array.shape != tuple(argument.shape):
            raise ShapeMismatchError(
                f"{name}: expected {tuple(argument.shape)}, got {array.shape}",
                expected=tuple(argument.shape),
                actual=array.shape,
            )
        self._binding.bind_cpu_input(name, array)


def _onnxruntime() -> Any:
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise ImportError(
            "OrtPlan needs onnxruntime, which is not importable; pip install 'latent-kv[onnx]'"
        ) from error


_NUMPY_NAME = {"float": "float32", "double": "float64"}


def _numpy_dtype(onnx_type: str) -> np.dtype[Any]:
    name = onnx_type.removeprefix("tensor(").removesuffix(")")
    return np.dtype(_NUMPY_NAME.get(name, name))


def _is_on(option: object) -> bool:
    return str(option).lower() in ("1", "true")
