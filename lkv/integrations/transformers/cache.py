"""A transformers ``Cache`` whose attention layers keep their latents in a `LatentKvCache`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils

from lkv.cache import LatentKvCache
from lkv.errors import ArgumentTypeError, GeometryError, LayerIndexError, ShapeMismatchError
from lkv.integrations.transformers.layers import LkvIndexedLayer, LkvLayer, cropped, repeated, selected
from lkv.integrations.transformers.rows import BatchRows
from lkv.layout import check_count

__all__ = ["LkvCache"]


class LkvCache(cache_utils.Cache):  # type: ignore[misc]
    """The latents of an MLA model, preallocated: ``model.generate(..., cache=LkvCache(model, 32768))``.

    Every attention layer that keeps all of its past gets slots ``c_kv`` (``kv_lora_rank`` wide) and ``k_pe``
    (``qk_rope_head_dim`` wide) of one `LatentKvCache`, in the dtype and on the device of the model. Sliding-window,
    linear-attention and shared layers beside them stay transformers' own.

    A forward pass publishes its rows once, when its last layer has written: after one that failed, the rows are as
    before it. What layers of transformers' own beside them keep does not go back; `reset` a cache that has some.
    One thread at a time may use a cache; a model may be used with several caches at once.

    Parameters
    ----------
    model : transformers.PreTrainedModel or PreTrainedConfig
        An MLA model or its configuration. Only the configuration is read.
    max_seq_len : int
        Positions to allocate, those of the prompt included. Memory becomes resident as it is written.
    device : str, torch.device or DeviceLocation, optional
        Where the rows are kept; by default where the model computes them. Rows kept elsewhere are brought over for
        every layer and pass.
    huge_pages : bool
        As for `LatentKvCache.with_capacity`.

    Raises
    ------
    ArgumentTypeError
        If `model` is neither.
    GeometryError
        If it is no MLA model, has no layer that keeps all of its past, or `max_seq_len` is not positive.

    Notes
    -----
    ``cache=`` was called ``past_key_values=`` before transformers 5.24.

    Memory is allocated by the first rows, which tell batch size, dtype and device; `open` does so before. A cache that
    is empty again takes another batch size.
    """

    def __init__(self, model: Any, max_seq_len: int, *, device: Any = None, huge_pages: bool = False) -> None:
        config = _text_config(model)
        self.max_seq_len = check_count(max_seq_len, "max_seq_len", 1)
        layers = list(cache_utils.DynamicCache(config=config).layers)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, layer in enumerate(layers):
            if type(layer) in _REPLACED and _has_rows(config, index):
                groups.setdefault(_widths(config, index), []).append(index)
        if not groups:
            raise GeometryError(f"model: {type(config).__name__} has no attention layer that keeps all of its past")
        # One, but for models in which some layers have no rotary key.
        self._groups: list[BatchRows] = []
        for widths, chosen in groups.items():
            rows = BatchRows(("c_kv", "k_pe"), chosen, len(layers), self.max_seq_len, device, huge_pages)
            self._groups.append(rows)
            for index in chosen:
                layers[index] = _REPLACED[type(layers[index])](rows, index, widths)
        self._others = tuple(layer for layer in layers if not isinstance(layer, LkvLayer))
        super().__init__(layers=layers)
        self._model_dtype = getattr(model, "dtype", None)
        self._model_device = getattr(model, "device", None)

    @property
    def caches(self) -> tuple[LatentKvCache, ...]:
        """Where the rows are, to save, restore, inspect or bind; empty until the first came or `open` was called.

        The first holds the latents. There are more only in models whose layers differ in their widths, and for the
        indexer keys of sparse-attention models: one cache of one layer for each layer that has an indexer.
        """
        return tuple(rows.cache for rows in self._all_rows() if rows.cache is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of address space; resident is what has been written."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the rows that are cached."""
        return sum(cache.cached_len * cache.bytes_per_token for cache in self.caches)

    @property
    def _length(self) -> int:
        # Rows of other widths, and indexer keys where a layer has some, may be behind after a pass that failed.
        return min(rows.length for rows in self._all_rows() if rows.cache is not None or rows in self._groups)

    def open(
        self,
        batch_size: int = 1,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[LatentKvCache, ...]:
        """Allocate now, so that `caches` can be restored into, and return them.

        Not those of indexer keys: what a sparse-attention model computed cannot be restored.

        Parameters
        ----------
        batch_size : int
        dtype, device : optional
            By default the model's, if the cache was made from a model.

        Raises
        ------
        GeometryError
            If there are rows already.
        ArgumentTypeError
            If the cache was made from a configuration and `dtype` is not given.
        """
        batch_size = check_count(batch_size, "batch_size", 1)
        dtype = self._model_dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentTypeError(f"dtype: expected a floating-point torch.dtype, got {dtype!r}", actual=dtype)
        device = torch.device(self._model_device or "cpu") if device is None else torch.device(device)
        for rows in self._groups:
            rows.open(batch_size, self.layers[rows.layers[0]].widths, dtype, device)
        return self.caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows of a forward pass to a layer and return all of it: see `LkvLayer.update`."""
        if not 0 <= layer_idx < len(self.layers):
            raise LayerIndexError(
                f"update: layer_idx: expected 0 to {len(self.layers) - 1}, got {layer_idx}: the model has more layers",
                expected=(0, len(self.layers) - 1),
                actual=layer_idx,
            )
        layer = self.layers[layer_idx]
        if isinstance(layer, LkvLayer) and layer_idx == layer.rows.layers[0] and layer.rows.length > self._length:
            layer.rows.truncate_to(self._length)  # ahead of others: the last pass failed
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions that are cached in all layers; rows of a pass that failed do not count."""
        if isinstance(self._layer_or_none(layer_idx), LkvLayer) or layer_idx == 0:
            return self._length
        return int(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` new positions of a layer attend to, and the first one."""
        if isinstance(self._layer_or_none(layer_idx), LkvLayer):
            return self._length + int(query_length), 0
        kv_length, offset = super().get_mask_sizes(query_length, layer_idx)
        return kv_length, offset

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return `max_seq_len`; of a layer that is not lkv's, what transformers says."""
        layer = None if layer_idx is None else self._layer_or_none(layer_idx)
        return self.max_seq_len if layer is None or isinstance(layer, LkvLayer) else _max_length(layer)

    get_max_cache_shape = get_max_length  # its name before transformers 5.21

    def crop(self, tokens_to_remove: int) -> None:
        """Take back positions: ``-n`` removes the last n, as transformers 5.18 and newer say it.

        A positive number, as older versions say it, is the length to keep. Removing more than there is empties the
        cache, keeping more changes nothing, as with a ``DynamicCache``.

        Raises
        ------
        ArgumentTypeError
            If it is no integer.
        """
        new_length = cropped(self._length, tokens_to_remove)
        remove = self._length - new_length
        for layer in self._others:
            layer.crop(-remove)
        self._truncate_to(new_length)

    def crop_to_prefix(self, cached_ids: Any, input_ids: Any) -> int:
        """Keep the longest common prefix of what is cached and a new prompt, and return its length.

        ``generate`` takes a used cache at its word: that the new `input_ids` begin with the tokens cached. Call this
        before, when they may not. At least one token of `input_ids` is left to compute.

        Parameters
        ----------
        cached_ids : torch.Tensor or array_like, [length] or [batch, length]
            The tokens that the cache was filled with: what the last ``generate`` returned.
        input_ids : torch.Tensor or array_like, of the same batch
            What is to be continued.

        Raises
        ------
        ShapeMismatchError
            If the batches differ.
        """
        old, new = (torch.as_tensor(ids) for ids in (cached_ids, input_ids))
        old, new = (ids[None] if ids.ndim == 1 else ids for ids in (old, new))
        if old.ndim != 2 or new.ndim != 2 or old.shape[0] != new.shape[0]:
            raise ShapeMismatchError(
                f"input_ids: expected [{old.shape[0]}, length] like cached_ids, got {list(new.shape)}",
                expected=tuple(old.shape),
                actual=tuple(new.shape),
            )
        most = min(self._length, old.shape[1], max(new.shape[1] - 1, 0))
        differs = (old[:, :most] != new[:, :most].to(old.device)).any(0).nonzero()
        keep = int(differs[0]) if len(differs) else most
        self.crop(keep - self._length)
        return keep

    def reset(self) -> None:
        """Forget everything; memory and allocation id stay, and the next rows may be of another batch size."""
        for layer in self._others:
            layer.reset()
        self._truncate_to(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i of the batch what sequence ``beam_idx[i]`` was."""
        self._select(beam_idx)
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch; the rows move to a new allocation."""
        self._select(repeated(self._groups[0], repeats))
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep some sequences of the batch, given by numbers or a mask; the rows move to a new allocation."""
        self._select(selected(self._groups[0], indices))
        for layer in self._others:
            layer.batch_select_indices(indices)

    def _truncate_to(self, length: int) -> None:
        for rows in self._all_rows():
            rows.truncate_to(length)

    def _select(self, index: torch.Tensor) -> None:
        for rows in self._all_rows():
            rows.select(index)

    def _all_rows(self) -> Iterator[BatchRows]:
        yield from self._groups
        for layer in self.layers:
            if isinstance(layer, LkvIndexedLayer):
                yield layer.indexer

    def _layer_or_none(self, index: int) -> Any:
        return self.layers[index] if index < len(self.layers) else None

    def __repr__(self) -> str:
        batch = self._groups[0].batch_size
        if batch is None:
            n_layers = sum(len(rows.layers) for rows in self._groups)
            return f"LkvCache({n_layers} of {len(self.layers)} layers, 0/{self.max_seq_len} rows, not allocated)"
        return f"LkvCache(batch {batch}, {', '.join(repr(rows.cache) for rows in self._groups)})"


_REPLACED: dict[type, type[LkvLayer]] = {cache_utils.DynamicLayer: LkvLayer}
if hasattr(cache_utils, "DynamicIndexedLayer"):
    _REPLACED[cache_utils.DynamicIndexedLayer] = LkvIndexedLayer


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", model)
    if isinstance(config, type) or not hasattr(config, "get_text_config"):
        raise ArgumentTypeError(
            f"model: expected a transformers model or configuration, got {type(model).__name__}", actual=model
        )
    config = config.get_text_config(decoder=True)
    return config


def _has_rows(config: Any, index: int) -> bool:
    """Whether a layer has latents of its own, and does not take those of another."""
    modes = getattr(config, "kv_sharing_modes", None)
    return modes is None or modes[index] not in ("reuse", "reuse_but_indexer")


def _widths(config: Any, index: int) -> tuple[int, int]:
    per_layer = getattr(config, "per_layer_config", None)
    of_layer = config if per_layer is None else per_layer[index]
    rank = getattr(of_layer, "kv_lora_rank", None)
    if not rank:
        raise GeometryError(f"model: expected an MLA model, got {type(config).__name__} without kv_lora_rank")
    rotates = getattr(config, "no_rope_layers", None)  # 1 where a layer has a rotary key
    return int(rank), int(of_layer.qk_rope_head_dim) if rotates is None or rotates[index] else 0


def _max_length(layer: Any) -> int:
    return int(layer.get_max_length() if hasattr(layer, "get_max_length") else layer.get_max_cache_shape())
