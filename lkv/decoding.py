"""The run behind ``lkv decode``: real-size MLA layers decode through a cache and are checked without one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np

from lkv import _host
from lkv.cache import LatentKvCache
from lkv.dtypes import DType
from lkv.errors import LkvError
from lkv.layout import SlotSpec
from lkv.mla._arrays import Array
from lkv.mla.config import PRESETS, MLAConfig
from lkv.mla.layer import Form
from lkv.mla.stack import MLAStack

__all__ = ["CHECKED_TOKENS", "DecodeOptions", "Progress", "UsageError", "decode", "fitting_layers", "small_cache"]

CHECKED_TOKENS = 8
_MEMORY_SHARE = 1 / 3
_MEMORY_LIMIT = 0.9
_TOLERANCE = {"float32": 1e-3, "float16": 8 * 2.0**-10, "bfloat16": 8 * 2.0**-7}


Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Starts a phase, given its label and units, and hands out the function that counts them."""


class UsageError(Exception):
    """Raised when the options ask for what cannot be run; the message is one line."""


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """What to run.

    Parameters
    ----------
    name : str
        What to call the model.
    config : MLAConfig
    prompt, tokens : int
        Length of the prompt and of what is generated.
    n_layers : int, optional
        Layers to run; as many as fit in a third of free memory when None.
    dtype, device, layout : str
        Of the cache.
    max_seq_len : int, optional
        Capacity in rows; at least 4096 and a power of two when None.
    chunk : int
        Prompt tokens per step.
    seed : int
    form : {"absorbed", "expanded"}
    check : bool
        Compare the first tokens with a run that has no cache.
    """

    name: str
    config: MLAConfig
    prompt: int = 64
    tokens: int = 32
    n_layers: int | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    layout: str = "separate"
    max_seq_len: int | None = None
    chunk: int = 128
    seed: int = 0
    form: Form = "absorbed"
    check: bool = True

    @property
    def n_rows(self) -> int:
        """Rows the run writes: the last token generated is never fed back."""
        return self.prompt + self.tokens - 1


def decode(options: DecodeOptions, progress: Progress) -> dict[str, Any]:
    """Prefill a random prompt, decode greedily through a `LatentKvCache`, and measure.

    Parameters
    ----------
    options : DecodeOptions
    progress : Progress

    Returns
    -------
    dict
        JSON-serialisable: ``model``, ``cache``, ``bytes_per_token``, ``timing``, ``tokens`` and ``check`` (None when
        it was not asked for).

    Raises
    ------
    UsageError
        Capacity or memory does not allow the run.
    """
    config, dtype = options.config, DType.of(options.dtype)
    capacity = options.max_seq_len or max(4096, 1 << (options.n_rows - 1).bit_length())
    if capacity < options.n_rows:
        raise UsageError(f"--max-seq-len: expected at least {options.n_rows} (prompt + tokens - 1), got {capacity}")
    n_layers = fitting_layers(options)
    try:
        cache = LatentKvCache.with_capacity(
            n_layers=n_layers,
            max_seq_len=capacity,
            slot_trailing=config.slot_trailing,
            dtype=options.dtype,
            device=options.device,
            layout=options.layout,
        )
    except LkvError as error:
        raise UsageError(str(error)) from error

    stack = MLAStack(config, n_layers, seed=options.seed)
    with progress("weights", n_layers) as count:
        for _ in stack.build():
            count(1)
    prompt = np.random.default_rng([options.seed, n_layers]).integers(stack.vocab_size, size=options.prompt)
    run = _CachedRun(stack, cache, dtype, options.form)

    start = time.perf_counter()
    with progress("prefill", options.prompt) as count:
        for lo in range(0, options.prompt, options.chunk):
            logits = run.feed(prompt[lo : lo + options.chunk])
            count(min(options.chunk, options.prompt - lo))
    prefilled = time.perf_counter()
    tokens = [int(logits.argmax())]
    kept = [logits]
    with progress("decode", options.tokens) as count:
        count(1)
        while len(tokens) < options.tokens:
            logits = run.feed(np.array(tokens[-1:]))
            tokens.append(int(logits.argmax()))
            if len(kept) < CHECKED_TOKENS:
                kept.append(logits)
            count(1)
    finished = time.perf_counter()

    check = None
    if options.check:
        n = len(kept)
        with progress("check", n) as count:
            ids = np.concatenate([prompt, np.array(tokens[: n - 1], dtype=prompt.dtype)])
            check = compare(tokens[:n], np.stack(kept), reference_logits(stack, ids, n, dtype), dtype)
            count(n)
    decode_seconds = finished - prefilled
    return {
        "model": {
            "name": options.name,
            "layers_run": n_layers,
            "layers_requested": options.n_layers,
            **dataclasses.asdict(config),
        },
        "cache": {
            "dtype": dtype.name,
            "device": options.device,
            "layout": options.layout,
            "rows": cache.cached_len,
            "max_seq_len": capacity,
            "capacity_bytes": capacity * config.bytes_per_token(dtype, n_layers),
            "resident_bytes": resident_bytes(cache, capacity),
        },
        "bytes_per_token": {
            scope: {
                "latent": config.bytes_per_token(dtype, layers),
                "expanded": config.expanded_bytes_per_token(dtype, layers),
            }
            for scope, layers in (("layers_run", n_layers), ("whole_model", config.n_layers))
        },
        "timing": {
            "form": options.form,
            "prefill_tokens": options.prompt,
            "prefill_tokens_per_second": options.prompt / (prefilled - start),
            "decode_tokens": options.tokens,
            "decode_tokens_per_second": (options.tokens - 1) / decode_seconds if options.tokens > 1 else None,
            "cache_percent": 100 * run.cache_seconds / (finished - start),
        },
        "tokens": tokens,
        "check": check,
    }


def small_cache(tokens: int = 24, seed: int = 0) -> LatentKvCache:
    """Run random tokens through the tiny preset; return the bfloat16 cache with their rows."""
    config, dtype = PRESETS["tiny"], DType.of("bfloat16")
    latent, key = config.slot_trailing
    slots = [SlotSpec("c_kv", latent), SlotSpec("k_pe", key, tag="rope:interleaved")]
    cache = LatentKvCache.with_capacity(config.n_layers, 2 * tokens, dtype=dtype, slots=slots)
    stack = MLAStack(config, config.n_layers, seed=seed)
    for _ in stack.build():
        pass
    run = _CachedRun(stack, cache, dtype, "absorbed")
    ids = np.random.default_rng(seed).integers(stack.vocab_size, size=tokens)
    run.feed(ids[:-4])
    for token in ids[-4:]:
        run.feed(np.array([token]))
    return cache


class _CachedRun:
    """Feeds tokens to a stack through a cache and times every call into the cache."""

    def __init__(self, stack: MLAStack, cache: LatentKvCache, dtype: DType, form: Form) -> None:
        self.cache_seconds = 0.0
        self._stack, self._cache, self._dtype, self._form = stack, cache, dtype, form

    def feed(self, token_ids: Array) -> Array:
        """Publish the tokens' rows and return the logits ``[vocab_size]`` that follow the last one."""
        n = len(token_ids)
        positions = np.arange(self._cache.cached_len, self._cache.cached_len + n)
        with ExitStack() as opened:
            with self._timed():
                step = opened.enter_context(self._cache.step(n))

            def rows(layer: int, c_kv: Array, k_pe: Array) -> tuple[Array, Array]:
                new_rows = [c_kv.astype(self._dtype.numpy), k_pe.astype(self._dtype.numpy)]
                with self._timed():
                    step.append(layer, new_rows)
                    c_all, p_all = step.view(layer).numpy()
                return c_all, p_all

            h = self._stack.forward(token_ids, positions, rows, form=self._form)
            with self._timed():
                opened.close()
        return np.asarray(self._stack.logits(h[-1:])[0])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.cache_seconds += time.perf_counter() - start


def reference_logits(stack: MLAStack, token_ids: Array, n_last: int, dtype: DType) -> Array:
    """Logits at the last `n_last` tokens from expanded attention over the whole sequence, without a cache.

    Rows are rounded to `dtype`, as the cache rounds them. Returns float32 ``[n_last, vocab_size]``.
    """

    def rows(layer: int, c_kv: Array, k_pe: Array) -> tuple[Array, Array]:
        return c_kv.astype(dtype.numpy), k_pe.astype(dtype.numpy)

    h = stack.forward(token_ids, np.arange(len(token_ids)), rows, form="expanded")
    return stack.logits(h[-n_last:])


def compare(tokens: list[int], logits: Array, reference: Array, dtype: DType) -> dict[str, Any]:
    """Judge decoded tokens and their logits against the reference's.

    The difference is the largest over tokens of ``|logits - reference| / |reference|`` (Euclidean norms). It may reach
    a few roundings of the cache's type: rows that differ in the last float32 bit can round to neighbouring values. A
    token may differ from the reference's only where the reference itself holds the two for equal within that.

    Parameters
    ----------
    tokens : list of int, length n
    logits, reference : float32 arrays, shape ``[n, vocab_size]``
    dtype : DType
        Of the cache.

    Returns
    -------
    dict
        ``passed``, ``tokens_checked``, ``tokens_equal``, ``logit_difference``, ``tolerance``.
    """
    index = np.arange(len(tokens))
    error = np.abs(logits - reference)
    difference = float((np.linalg.norm(error, axis=1) / np.linalg.norm(reference, axis=1)).max())
    tolerance = _TOLERANCE[dtype.name]
    gap = reference.max(axis=1) - reference[index, tokens]
    tied = gap <= 2 * error.max(axis=1)
    return {
        "passed": bool(difference <= tolerance and tied.all()),
        "tokens_checked": len(tokens),
        "tokens_equal": int((gap == 0).sum()),
        "logit_difference": difference,
        "tolerance": tolerance,
    }


def fitting_layers(options: DecodeOptions) -> int:
    """Layers to run: those asked for, or as many of the model's as fit in a third of free memory.

    Raises
    ------
    UsageError
        They do not fit in free memory.
    """
    config, free = options.config, _host.free_memory()

    def needed(n_layers: int) -> int:
        cache = options.n_rows * config.bytes_per_token(options.dtype, n_layers)
        return MLAStack.bytes_required(config, n_layers) + cache

    per_layer = needed(1) - needed(0)
    n_layers = options.n_layers
    if n_layers is None:
        n_layers = min(config.n_layers, max(1, int((free * _MEMORY_SHARE - needed(0)) // per_layer)))
    if needed(n_layers) > free * _MEMORY_LIMIT:
        fit = max(0, int((free * _MEMORY_LIMIT - needed(0)) // per_layer))
        most = f"at most {fit} fit" if fit else "none fits"
        raise UsageError(
            f"{'--layers' if fit else 'geometry'}: {n_layers} {'layer needs' if n_layers == 1 else 'layers need'} "
            f"{needed(n_layers) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; {most}"
        )
    return n_layers


def resident_bytes(cache: LatentKvCache, capacity: int) -> int | None:
    """Bytes of the cache's buffers that the host holds in memory, or None where the system does not tell."""
    spans: list[tuple[int, int]] = []
    for layer in range(cache.n_layers):
        with cache.read(layer) as view:
            for rows in view.numpy():
                start = rows.ctypes.data
                spans.append((start, start + (capacity - 1) * rows.strides[0] + rows[0].nbytes))
    return _host.resident_bytes(spans)
