"""A server with a pool of request slots and one held ONNX Runtime plan, whose cache is swapped under it at every turn.

Requests arrive, get a slot, decode one token per round, and retire; a slot's cache is used again for the next request.
The plan was built over one cache. Before each step `refresh_session` keeps it, re-binds it, or builds it anew. Every
request's logits are compared with those of the same request run alone on a cache and a plan of its own.

    python examples/slot_pool.py             every output is its own request's
    python examples/slot_pool.py --unsafe    the guard is off: requests read each other's context, at full speed

Needs latent-kv[onnx]. The exit status is 1 when an output is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lkv import LatentKvCache
from lkv.mla import PRESETS
from lkv.mla.onnx_step import decode_feeds, decode_model
from lkv.mla.stack import MLAStack
from lkv.plan import DecodeSession, ModelInstanceId, OrtPlan, RefreshCounters, refresh_session, shape_key

CONFIG = PRESETS["tiny"]


@dataclass
class Request:
    number: int
    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @property
    def next_token(self) -> int:
        at = len(self.logits)
        return self.prompt[at] if at < len(self.prompt) else self.tokens[-1]

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.max_tokens

    def take(self, logits: np.ndarray[Any, Any]) -> None:
        self.logits.append(logits)
        if len(self.logits) >= len(self.prompt):
            self.tokens.append(int(logits.argmax()))


class Model:
    """Weights, and the plans and caches made for them."""

    def __init__(self, n_layers: int, max_seq_len: int, vocab_size: int) -> None:
        self.n_layers, self.max_seq_len = n_layers, max_seq_len
        self.stack = MLAStack(CONFIG, n_layers, vocab_size)
        list(self.stack.build())
        self.bytes = decode_model(self.stack, seq=1, max_seq_len=max_seq_len)
        self.key = shape_key(ModelInstanceId.next(), form="absorbed", vocab_size=vocab_size)
        self.build_seconds: list[float] = []

    def new_cache(self) -> LatentKvCache:
        return LatentKvCache.with_capacity(self.n_layers, self.max_seq_len, CONFIG.slot_trailing, "float32")

    def build(self, source: object) -> OrtPlan:
        start = time.perf_counter()
        plan = OrtPlan(self.bytes, threads=1)
        self.build_seconds.append(time.perf_counter() - start)
        return plan

    def step(self, request: Request, cache: LatentKvCache, session_for: Callable[[], DecodeSession]) -> None:
        """Run one token of a request: the plan reads the cache, the new rows are appended through it."""
        with cache.step(1) as step:
            out = session_for().run(**decode_feeds(CONFIG, np.array([request.next_token]), step.start))
            for layer in range(self.n_layers):
                step.append(layer, [out[f"c_kv.{layer}"], out[f"k_pe.{layer}"]])
            request.take(out["logits"][0].copy())


class Server:
    """A pool of slots, each with a request and its cache, and one plan for all of them."""

    def __init__(self, model: Model, n_slots: int, unsafe: bool) -> None:
        self.model, self.unsafe = model, unsafe
        self.slots: list[tuple[Request, LatentKvCache] | None] = [None] * n_slots
        self.idle: list[LatentKvCache] = []
        self.session: DecodeSession | None = None
        self.counters = RefreshCounters()
        self.rebind_seconds: list[float] = []
        self.admitted = 0

    def run(self, requests: list[Request], progress: Callable[[int], object]) -> None:
        """Serve until every request has retired; they arrive one every other round."""
        waiting, coming = deque[Request](), deque(requests)
        round_number = 0
        while coming or waiting or any(self.slots):
            if coming and round_number % 2 == 0:
                waiting.append(coming.popleft())
            for index, slot in enumerate(self.slots):
                if slot is None and waiting:
                    self.slots[index] = slot = waiting.popleft(), self.cache_for_another_tenant()
                if slot is not None:
                    self.serve(*slot)
                    if slot[0].done:
                        self.idle.append(slot[1])
                        self.slots[index] = None
                        progress(1)
            round_number += 1

    def cache_for_another_tenant(self) -> LatentKvCache:
        """Return an empty cache: a new one, or a retired request's, wiped or with new memory in turn."""
        self.admitted += 1
        if not self.idle:
            return self.model.new_cache()
        cache = self.idle.pop(0)
        if self.admitted % 2:
            cache.wipe()
        else:
            cache.repopulate()
        return cache

    def serve(self, request: Request, cache: LatentKvCache) -> None:
        def session() -> DecodeSession:
            if self.session is None or not self.unsafe:
                rebound, start = self.counters.rebound, time.perf_counter()
                self.session = refresh_session(
                    self.session, cache, self.model.build, seq=1, shape_key=self.model.key, counters=self.counters
                )
                if self.counters.rebound > rebound:
                    self.rebind_seconds.append(time.perf_counter() - start)
            return self.session

        self.model.step(request, cache, session)


def run_alone(model: Model, request: Request) -> Request:
    """Run the same request on a cache and a plan of its own."""
    alone = Request(request.number, request.prompt, request.max_tokens)
    cache = model.new_cache()
    session = DecodeSession(model.build(cache), cache, seq=1, shape_key=model.key)
    while not alone.done:
        model.step(alone, cache, lambda: session)
    return alone


def drift(request: Request, alone: Request) -> float:
    """Return how far the logits are from those of the request run alone, at worst."""
    return max(float(np.abs(a - b).max()) for a, b in zip(request.logits, alone.logits, strict=True))


@contextlib.contextmanager
def progress_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    if quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        done = 0

        def count(n: int) -> None:
            nonlocal done
            done += n
            sys.stderr.write(f"\r{label:>8} {done}/{total}" + ("\n" if done == total else ""))
            sys.stderr.flush()

        yield count
        return
    with tqdm(total=total, desc=f"{label:>8}", leave=False) as bar:
        yield bar.update


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A slot-pooled server over one held ONNX Runtime plan.")
    parser.add_argument("--slots", type=int, default=4, help="requests served at a time (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="requests in all (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=12, help="tokens to decode for each (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: %(default)s)")
    parser.add_argument("--max-seq-len", type=int, default=128, help="rows of each cache (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unsafe", action="store_true", help="run the plan without asking whose cache it reads")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    for name in ("slots", "requests", "tokens", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.max_seq_len < args.tokens + 16:
        parser.error(f"--max-seq-len: expected at least --tokens and 16 for the prompt, got {args.max_seq_len}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Serve, check, and print what happened."""
    args = parsed(argv)
    vocab_size = 256
    model = Model(args.layers, args.max_seq_len, vocab_size)
    rng = np.random.default_rng(args.seed)
    requests = [
        Request(number, rng.integers(vocab_size, size=int(rng.integers(2, 16))).tolist(), args.tokens)
        for number in range(args.requests)
    ]
    server = Server(model, args.slots, args.unsafe)
    start = time.perf_counter()
    with progress_bar("serve", len(requests), args.quiet) as progress:
        server.run(requests, progress)
    seconds = time.perf_counter() - start
    alone = []
    with progress_bar("check", len(requests), args.quiet) as progress:
        for request in requests:
            alone.append(run_alone(model, request))
            progress(1)

    drifts = [drift(request, own) for request, own in zip(requests, alone, strict=True)]
    wrong = [request.number for request, by in zip(requests, drifts, strict=True) if by != 0]
    tokens = sum(
        a != b for r, own in zip(requests, alone, strict=True) for a, b in zip(r.tokens, own.tokens, strict=True)
    )
    for label, value in summary(args, model, server, seconds):
        print(f"{label:<30}{value}")
    verdict = f"{len(requests) - len(wrong)} of {len(requests)} requests as if run alone"
    print(f"{'outputs':<30}{verdict}")
    if wrong:
        print(f"{'contaminated':<30}requests {', '.join(map(str, wrong))}")
        print(f"{'logits off by':<30}up to {max(drifts):.3g}; {tokens} of {len(requests) * args.tokens} tokens differ")
    return 1 if wrong else 0


def summary(args: argparse.Namespace, model: Model, server: Server, seconds: float) -> Iterator[tuple[str, str]]:
    counts = server.counters
    steps = counts.kept + counts.rebound + counts.built + counts.rebuilt
    yield "requests / slots / layers", f"{args.requests} / {args.slots} / {args.layers}"
    yield "guard", "off" if args.unsafe else "on"
    yield "served in", f"{seconds:.2f} s"
    if not args.unsafe:
        yield (
            "decisions",
            f"{steps}: {counts.kept} kept, {counts.rebound} re-bound, {counts.built} built, "
            + (f"{counts.rebuilt} rebuilt"),
        )
        yield "plan builds saved", f"{counts.kept + counts.rebound}"
    rebuild = 1e3 * float(np.median(model.build_seconds))
    yield "ms per admission, rebuild", f"{rebuild:.2f}"
    if server.rebind_seconds:
        rebind = 1e3 * float(np.median(server.rebind_seconds))
        yield "ms per admission, re-bind", f"{rebind:.3f} ({rebuild / rebind:.0f}x less)"


if __name__ == "__main__":
    sys.exit(main())
