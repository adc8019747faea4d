"""``lkv demo``: the tiny model writes text while its cache is watched."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TextIO

from lkv.cache import LatentKvCache
from lkv.cache.persistent import human_bytes
from lkv.decoding import UsageError
from lkv.errors import RestoreError
from lkv.tiny.engines import ENGINES, Engine
from lkv.tiny.model import TinyModel
from lkv.tiny.status import StatusLine

__all__ = ["add_parser"]

_PROMPT = 'The "with" statement'
_REFRESH = 0.1  # seconds


def add_parser(commands: Any, positive: Callable[[str], int], count: Callable[[str], int]) -> None:
    """Add the command to the parsers of ``lkv``; `positive` and `count` parse integers."""
    parser = commands.add_parser("demo", help="write text with a small model, and watch its cache", allow_abbrev=False)
    parser.set_defaults(run=_run)
    parser.add_argument("--prompt", default=_PROMPT, metavar="TEXT", help=f"to continue (default: {_PROMPT})")
    parser.add_argument(
        "--tokens", type=positive, default=300, metavar="N", help="characters to generate (default: 300)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.6, metavar="T", help="0 takes the likeliest (default: 0.6)"
    )
    parser.add_argument(
        "--seed", type=count, default=0, metavar="N", help="of the draws above temperature 0 (default: 0)"
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="numpy", help="what runs the model (default: numpy)")
    parser.add_argument(
        "--max-seq-len", type=positive, metavar="N", help="capacity in rows (default: 1024, as trained, or more)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print the text only")


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def _run(args: argparse.Namespace) -> int:
    try:
        return _demo(args)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at exit
        return 0


def _demo(args: argparse.Namespace) -> int:
    model = _model()
    engine = _engine(args, model)
    meter, tokens = _Meter(engine.cache), list[int]()
    text = None if args.json else sys.stdout
    with ExitStack() as opened:
        opened.callback(_write, text, "\n")
        screen = None
        if not (args.json or args.quiet) and StatusLine.wanted(sys.stderr):
            screen = opened.enter_context(StatusLine(sys.stderr))

        def put(token: int) -> None:
            tokens.append(token)
            _write(text, model.vocabulary[token])
            if meter.tick() and screen is not None:
                screen.show(meter.line())

        _write(text, args.prompt)
        engine.generate(model.encode(args.prompt), args.tokens, put, args.temperature, args.seed)
    report = _report(args, model, tokens, meter)
    if args.json:
        print(json.dumps(report))
    elif not args.quiet and sys.stderr is not None:
        latent, expanded = report["bytes_per_token"].values()
        other = human_bytes(report["cache"]["rows"] * expanded)
        print(f"lkv demo: {args.engine}, {meter.line()}", file=sys.stderr)
        print(f"lkv demo: expanded keys and values would take {other}, {expanded / latent:.1f}x", file=sys.stderr)
    return 0


def _model() -> TinyModel:
    try:
        return TinyModel.read()
    except (OSError, RestoreError) as error:
        raise UsageError(f"the weights in the package cannot be read: {error}") from error


def _engine(args: argparse.Namespace, model: TinyModel) -> Engine:
    if not args.prompt:
        raise UsageError("--prompt: expected at least one character")
    if unknown := sorted(set(args.prompt) - set(model.vocabulary)):
        raise UsageError(f"--prompt: expected characters that the model knows, got {', '.join(map(repr, unknown))}")
    rows = len(args.prompt) + args.tokens - 1
    capacity = args.max_seq_len or max(rows, model.architecture["max_position_embeddings"])
    if capacity < rows:
        raise UsageError(f"--max-seq-len: expected at least {rows} (prompt + tokens - 1), got {capacity}")
    try:
        return ENGINES[args.engine](model, capacity)
    except ImportError as error:
        raise UsageError(f"--engine: {error}") from error


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        stream.write(text)
        stream.flush()


class _Meter:
    """What a cache holds, and how fast tokens come."""

    def __init__(self, cache: LatentKvCache) -> None:
        self.cache = cache
        self._tokens = 0
        self._first = self._last = self._shown = -math.inf

    def tick(self) -> bool:
        """Count a token; whether it is time to show the figures again."""
        self._tokens += 1
        self._last = time.perf_counter()
        if self._tokens == 1:
            self._first = self._last
        due = self._last - self._shown >= _REFRESH
        self._shown = self._last if due else self._shown
        return due

    @property
    def tokens_per_second(self) -> float | None:
        """Of all tokens but the first, which waits for the prompt."""
        return (self._tokens - 1) / (self._last - self._first) if self._tokens > 1 else None

    @property
    def version(self) -> int:
        """Of the first layer's latents: grows with every write."""
        return self.cache.slot_version(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are cached."""
        return self.cache.cached_len * self.cache.bytes_per_token

    def line(self) -> str:
        """Return the figures as one line."""
        rate = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        rows = f"{self.cache.cached_len:,}/{self.cache.max_seq_len:,} rows"
        return f"{rows}, {human_bytes(self.nbytes)}, version {self.version}{rate}"


def _report(args: argparse.Namespace, model: TinyModel, generated: list[int], meter: _Meter) -> dict[str, Any]:
    cache = meter.cache
    return {
        "engine": args.engine,
        "prompt": args.prompt,
        "text": model.decode(generated),
        "tokens": generated,
        "temperature": args.temperature,
        "seed": args.seed,
        "cache": {
            "dtype": cache.dtype.name,
            "rows": cache.cached_len,
            "max_seq_len": cache.max_seq_len,
            "bytes": meter.nbytes,
            "capacity_bytes": cache.nbytes,
            "version": meter.version,
        },
        "bytes_per_token": {
            "latent": cache.bytes_per_token,
            "expanded": model.config.expanded_bytes_per_token(cache.dtype),
        },
        "tokens_per_second": meter.tokens_per_second,
    }
