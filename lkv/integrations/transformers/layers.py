"""The layers of an `LkvCache`, one for each layer of the model that has latents."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from lkv.errors import ArgumentTypeError, GeometryError, IncompleteStepError, ShapeMismatchError
from lkv.integrations.transformers.rows import BatchRows
from lkv.layout import check_count

__all__ = ["LkvIndexedLayer", "LkvLayer", "cropped", "repeated", "selected"]


class LkvLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer of an `LkvCache`.

    Its rows belong to steps of all layers: what takes rows away or moves them is asked of the cache.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False  # transformers would give both slots the same width

    def __init__(self, rows: BatchRows, index: int, widths: Sequence[int] | None) -> None:
        # Not the base class's: `keys`, `values` and `is_initialized` are properties here.
        self.rows = rows
        self.index = index
        self.widths = widths

    @property
    def is_initialized(self) -> bool:
        """Whether there is memory."""
        return self.rows.cache is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """Slot ``c_kv``, ``[batch, 1, length, kv_lora_rank]``: an alias, good until the next `update`."""
        view = self.rows.view(self.index)
        return None if view is None else view[0]

    @property
    def values(self) -> torch.Tensor | None:
        """Slot ``k_pe``, ``[batch, 1, length, qk_rope_head_dim]``."""
        view = self.rows.view(self.index)
        return None if view is None else view[1]

    @property
    def batch_size(self) -> int:
        """Sequences. Absent before there is memory, as transformers wants it."""
        batch = self.rows.batch_size
        if batch is None:
            raise AttributeError("batch_size is not known before the first update")
        return batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the first `update` allocates."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows of a forward pass and return all of the layer.

        Parameters
        ----------
        key_states, value_states : torch.Tensor, [batch, 1, n, kv_lora_rank], [batch, 1, n, qk_rope_head_dim]

        Returns
        -------
        tuple of torch.Tensor
            ``[batch, 1, length, width]`` each, sharing memory with the cache; under autograd copies in which the new
            rows carry their gradient.

        Raises
        ------
        ShapeMismatchError
            If they are no latents of this model, or do not fit the rows before them.
        CapacityError
            If they do not fit into ``max_seq_len``; nothing is changed.
        """
        if not self.rows.length:
            self._check(key_states, value_states)  # later rows are checked against the first
        latent, rope = self.rows.append(self.index, (key_states, value_states))
        return self._here(latent, key_states), self._here(rope, value_states)

    def get_seq_length(self) -> int:
        """Return the layer's rows, those of a forward pass under way included."""
        return self.rows.length_of(self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` new positions attend to, and the first one."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """Return the rows allocated."""
        return self.rows.max_seq_len

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Do nothing: rows stay where the cache keeps them."""

    def prefetch(self) -> None:
        """Do nothing, as `offload`."""

    def reset(self) -> None:
        """Forget everything."""
        self._alone("reset").truncate_to(0)

    def crop(self, tokens_to_remove: int) -> None:
        """As `LkvCache.crop`."""
        rows = self._alone("crop")
        rows.truncate_to(cropped(rows.length, tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """As `LkvCache.reorder_cache`."""
        self._alone("reorder_cache").select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As `LkvCache.batch_repeat_interleave`."""
        rows = self._alone("batch_repeat_interleave")
        rows.select(repeated(rows, repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """As `LkvCache.batch_select_indices`."""
        rows = self._alone("batch_select_indices")
        rows.select(selected(rows, indices))

    def _alone(self, what: str) -> BatchRows:
        if len(self.rows.layers) > 1:
            raise GeometryError(f"{what}: layer {self.index} shares its rows' length with others: ask the LkvCache")
        return self.rows

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.widths is None:
            return
        for name, states, width in zip(("c_kv", "k_pe"), (key_states, value_states), self.widths, strict=True):
            if states.ndim != 4 or states.shape[1] != 1 or states.shape[3] != width:
                raise ShapeMismatchError(
                    f"update: layer {self.index}, {name}: expected [batch, 1, n, {width}], got "
                    f"{list(states.shape)}{_hint(states)}",
                    expected=(-1, 1, -1, width),
                    actual=tuple(states.shape),
                )

    @staticmethod
    def _here(rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if rows.device != new.device:
            rows = rows.to(new.device, non_blocking=True)
        if new.requires_grad:
            n = new.shape[2]
            rows = new if rows.shape[2] == n else torch.cat([rows[:, :, :-n], new], dim=2)
        return rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()}/{self.rows.max_seq_len} rows)"


class LkvIndexedLayer(LkvLayer):
    """A layer of a sparse-attention model: the indexer's keys are a third slot.

    They come by a call of their own, after the other two, and not in every layer. So they have a cache of one layer.
    """

    indexer_position_ids: torch.Tensor | None = None

    def __init__(self, rows: BatchRows, index: int, widths: Sequence[int] | None) -> None:
        super().__init__(rows, index, widths)
        self.indexer = BatchRows(("k_index",), [0], 1, rows.max_seq_len, rows.device, rows.huge_pages)

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether the indexer's keys have memory."""
        return self.indexer.cache is not None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """Slot ``k_index``, ``[batch, length, index_head_dim]``."""
        view = self.indexer.view(0)
        return None if view is None else view[0][:, 0]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer's keys ``[batch, n, index_head_dim]`` of a forward pass and return all, after `update`.

        Raises
        ------
        IncompleteStepError
            If `update` was not called before.
        """
        before = self.get_seq_length() - indexer_key_states.shape[1]
        if not 0 <= before <= self.indexer.length:
            raise IncompleteStepError(
                f"update_indexer: layer {self.index}: expected rows up to {self.indexer.length} before, as its keys, "
                f"got {before}: update comes first",
                expected=self.indexer.length,
                actual=before,
            )
        self.indexer.truncate_to(before)  # what a pass that failed left
        (rows,) = self.indexer.append(0, (indexer_key_states[:, None],))
        return self._here(rows, indexer_key_states[:, None])[:, 0]


def cropped(length: int, tokens_to_remove: int) -> int:
    """Return the length that a crop leaves: see `LkvCache.crop`."""
    if isinstance(tokens_to_remove, bool):
        raise ArgumentTypeError(f"crop: expected an integer, got {tokens_to_remove!r}", actual=tokens_to_remove)
    try:
        count = operator.index(tokens_to_remove)
    except TypeError as error:
        raise ArgumentTypeError(
            f"crop: expected an integer, got {tokens_to_remove!r}", actual=tokens_to_remove
        ) from error
    return min(length, count) if count > 0 else max(0, length + count)


def repeated(rows: BatchRows, repeats: int) -> torch.Tensor:
    """Return the index of a batch in which every sequence is repeated."""
    return torch.arange(rows.batch_size or 0).repeat_interleave(check_count(repeats, "repeats", 1))


def selected(rows: BatchRows, indices: Any) -> torch.Tensor:
    """Return the index of a batch of chosen sequences."""
    batch = torch.arange(rows.batch_size or 0)
    return batch if rows.batch_size is None else batch[torch.as_tensor(indices, device="cpu")]


def _hint(states: torch.Tensor) -> str:
    if states.ndim != 4 or states.shape[1] == 1:
        return ""
    return ": expanded keys, as transformers caches them for models with sparse attention before 5.18"
