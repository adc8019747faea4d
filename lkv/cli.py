"""The ``lkv`` command: ``decode`` runs MLA layers, ``demo`` writes text, ``inspect`` looks into a cache, ``info``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

import lkv
from lkv import _storage, decoding, devices, inspect
from lkv.dtypes import ALL
from lkv.errors import GeometryError, RestoreError
from lkv.mla.config import PRESETS
from lkv.tiny import command as tiny_demo

__all__ = ["main"]

_GEOMETRY = (
    "hidden_size",
    "n_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "q_lora_rank",
)
_OPTIONAL = {
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "jax": ("jax",),
    "transformers": ("transformers",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process when None.

    Returns
    -------
    int
        Exit status: 0, 1 for a failed check, 2 for a request that cannot be run, 130 when interrupted.

    Raises
    ------
    SystemExit
        With status 2 for arguments that do not parse, 0 after ``--help``.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except decoding.UsageError as error:
        print(f"lkv {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lkv", description="A cache for the decode state of language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lkv {lkv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{bench,decode,demo,info,inspect}")

    bench = commands.add_parser(
        "bench",
        help="measure lkv beside its peers and limits",
        add_help=False,
        prefix_chars="\0",  # options are for the benchmarks to parse
    )
    bench.set_defaults(run=_bench)
    bench.add_argument("arguments", nargs="*")

    decode = commands.add_parser(
        "decode", help="decode tokens through a latent cache and check them", allow_abbrev=False
    )
    decode.set_defaults(run=_decode)
    decode.add_argument("--preset", choices=list(PRESETS), default="tiny", help="model geometry (default: tiny)")
    for name in _GEOMETRY:
        flag, kind = "--" + name.replace("_", "-"), _count if name == "q_lora_rank" else _positive
        note = "; 0 projects queries directly" if name == "q_lora_rank" else ""
        decode.add_argument(flag, type=kind, metavar="N", help=f"instead of the preset's{note}")
    decode.add_argument(
        "--layers", type=_positive, metavar="N", help="default: as many as a third of free memory holds"
    )
    decode.add_argument("--prompt", type=_positive, default=64, metavar="N", help="prompt tokens (default: 64)")
    decode.add_argument("--tokens", type=_positive, default=32, metavar="N", help="tokens to generate (default: 32)")
    decode.add_argument(
        "--chunk", type=_positive, default=128, metavar="N", help="prompt tokens per step (default: 128)"
    )
    decode.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of the cache (default: bfloat16)",
    )
    decode.add_argument(
        "--device", choices=["cpu"], default="cpu", help="of the cache; attention runs in NumPy (default: cpu)"
    )
    decode.add_argument(
        "--layout", choices=["separate", "packed"], default="separate", help="of the cache (default: separate)"
    )
    decode.add_argument("--max-seq-len", type=_positive, metavar="N", help="capacity in rows (default: 4096 or more)")
    decode.add_argument(
        "--form", choices=["absorbed", "expanded"], default="absorbed", help="of the attention (default: absorbed)"
    )
    decode.add_argument("--seed", type=_count, default=0, metavar="N", help="of weights and prompt (default: 0)")
    decode.add_argument("--no-check", action="store_true", help="skip the comparison with a run without a cache")
    decode.add_argument("--json", action="store_true", help="print one JSON object")
    decode.add_argument("--quiet", action="store_true", help="print the result only")

    tiny_demo.add_parser(commands, _positive, _count)

    info = commands.add_parser("info", help="versions, devices, element types and build", allow_abbrev=False)
    info.set_defaults(run=_info)
    info.add_argument("--json", action="store_true", help="print one JSON object")

    look = commands.add_parser(
        "inspect", help="rows, norms, NaN and untouched rows of a saved cache", allow_abbrev=False
    )
    look.set_defaults(run=_inspect)
    source = look.add_mutually_exclusive_group(required=True)
    source.add_argument("path", nargs="?", metavar="PATH", help="a file that lkv.save made")
    source.add_argument("--demo", action="store_true", help="a small cache of the tiny preset instead")
    look.add_argument("--plot", metavar="FILE", help="draw row norms and bytes by layer (extra: plot)")
    look.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _positive(text: str) -> int:
    return _integer(text, 1, "a positive integer")


def _count(text: str) -> int:
    return _integer(text, 0, "an integer of at least 0")


def _integer(text: str, least: int, expected: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _decode(args: argparse.Namespace) -> int:
    changes = {name: getattr(args, name) for name in _GEOMETRY if getattr(args, name) is not None}
    changes |= {"q_lora_rank": None} if changes.get("q_lora_rank") == 0 else {}
    preset = PRESETS[args.preset]
    try:
        config = dataclasses.replace(preset, n_layers=max(preset.n_layers, args.layers or 0), **changes)
    except GeometryError as error:
        raise decoding.UsageError(f"--{str(error).replace('_', '-')}") from error
    options = decoding.DecodeOptions(
        name=args.preset if config == preset else f"{args.preset} (changed)",
        config=config,
        prompt=args.prompt,
        tokens=args.tokens,
        n_layers=args.layers,
        dtype=args.dtype,
        device=args.device,
        layout=args.layout,
        max_seq_len=args.max_seq_len,
        chunk=args.chunk,
        seed=args.seed,
        form=args.form,
        check=not args.no_check,
    )
    quiet = args.quiet
    report = decoding.decode(options, _silent if quiet else _bar if sys.stderr.isatty() and not args.json else _lines)
    print(json.dumps(report) if args.json else _table(_decode_rows(report)))
    return 1 if report["check"] is not None and not report["check"]["passed"] else 0


def _decode_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, cache, timing, check = report["model"], report["cache"], report["timing"], report["check"]
    layers = f"{model['layers_run']} of {model['n_layers']} layers"
    cut = model["layers_requested"] is None and model["layers_run"] < model["n_layers"]
    yield "model", f"{model['name']}, {layers}{', as many as a third of free memory holds' if cut else ''}"
    q_lora = "" if model["q_lora_rank"] is None else f", q_lora_rank {model['q_lora_rank']}"
    yield "geometry", f"hidden_size {model['hidden_size']}, n_heads {model['n_heads']}{q_lora}"
    yield "", ", ".join(f"{name} {model[name]}" for name in _GEOMETRY[2:6])
    yield "cache", f"{cache['dtype']}, {cache['device']}, {cache['layout']}"
    for scope, label in (("layers_run", "layers run"), ("whole_model", "whole model")):
        latent, expanded = (report["bytes_per_token"][scope][kind] for kind in ("latent", "expanded"))
        ratio = f"{expanded / latent:.1f}x"
        yield f"bytes/token, {label}", f"{latent:,} latent, {expanded:,} expanded K/V, {ratio}"
    yield "rows", f"{cache['rows']:,} of {cache['max_seq_len']:,}"
    resident = cache["resident_bytes"]
    held = "not measured" if resident is None else f"{resident / 1e6:.2f} MB"
    yield "resident", f"{held} of {cache['capacity_bytes'] / 1e6:,.2f} MB"
    yield "prefill", f"{timing['prefill_tokens']:,} tokens, {timing['prefill_tokens_per_second']:,.1f} tokens/s"
    rate = timing["decode_tokens_per_second"]
    speed = "" if rate is None else f", {rate:,.1f} tokens/s"
    yield "decode", f"{timing['decode_tokens']:,} tokens{speed}, {timing['form']} attention"
    yield "time in cache", f"{timing['cache_percent']:.2f} %"
    shown = " ".join(map(str, report["tokens"][:12]))
    yield "tokens", shown + (" ..." if len(report["tokens"]) > 12 else "")
    if check is None:
        yield "check", "not run"
    else:
        yield (
            "check",
            f"{'passed' if check['passed'] else 'FAILED'}: {check['tokens_equal']} of {check['tokens_checked']} tokens "
            f"equal without a cache, logits differ by {check['logit_difference']:.1e} (limit {check['tolerance']:.1e})",
        )


def _bench(args: argparse.Namespace) -> int:
    status: int = _benchmarks().main(args.arguments)
    return status


def _benchmarks() -> ModuleType:
    checkout = Path(lkv.__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "run.py").is_file():
        return importlib.import_module("lkv.bench.run")
    if str(checkout) not in sys.path:  # a checkout has beside the package what a wheel has in it
        sys.path.append(str(checkout))
    return importlib.import_module("benchmarks.run")


def _info(args: argparse.Namespace) -> int:
    report: dict[str, Any] = {
        "lkv": lkv.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})",
        "numpy": _version("numpy"),
        "ml_dtypes": _version("ml_dtypes"),
        "optional": {name: _version(*distributions) for name, distributions in _OPTIONAL.items()},
        "devices": [{"location": str(location), "text": text} for location, text in devices.available()],
        "dtypes": [dtype.name for dtype in ALL],
        "build": dict(_storage.build_info()),
        "include": lkv.get_include(),
    }
    print(json.dumps(report) if args.json else _table(_info_rows(report)))
    return 0


def _info_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("lkv", "python", "numpy", "ml_dtypes"):
        yield name, report[name] or "not installed"
    for name, version in report["optional"].items():
        yield name, version or "not installed"
    for device in report["devices"]:
        yield "device", f"{device['location']}  {device['text']}"
    yield "dtypes", " ".join(report["dtypes"])
    build = report["build"]
    yield "C ABI", ".".join(map(str, build["abi"]))
    for name, value in build.items():
        if name != "abi":
            yield name, str(value) if value not in (None, "") else "none"
    yield "include", report["include"]


def _inspect(args: argparse.Namespace) -> int:
    try:
        plot = importlib.import_module("lkv.plot") if args.plot is not None else None
        if plot is not None:
            plot.require_matplotlib()
        cache: Any = decoding.small_cache() if args.demo else importlib.import_module("lkv.persist").describe(args.path)
        measured = list(inspect.measure(cache))
    except (OSError, RestoreError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise decoding.UsageError(reason if str(args.path) in reason else f"{args.path}: {reason}") from error
    except ImportError as error:
        raise decoding.UsageError(f"--plot: {error}") from error
    rows = [row for row, _ in measured]
    notes = inspect.findings(rows)
    if plot is not None:
        try:
            plot.save_plot(measured, args.plot, title="demo" if args.demo else args.path)
        except (OSError, ValueError) as error:
            raise decoding.UsageError(f"--plot: {error}") from error
    described = {
        "source": "demo" if args.demo else args.path,
        "kind": type(cache).__name__ if args.demo else cache.kind,
        "dtype": str(cache.dtype),
        "n_layers": cache.n_layers,
        "rows": cache.cached_len if args.demo else cache.rows,
        "fingerprint": None if args.demo else cache.fingerprint,
    }
    if args.json:
        print(json.dumps({**described, "slots": [row.as_dict() for row in rows], "findings": notes}))
        return 0
    print(_table((name, "none" if value is None else str(value)) for name, value in described.items()))
    print(f"\n{inspect.table(rows)}")
    print("\n" + ("\n".join(f"note: {note}" for note in notes) or "no NaN, no untouched rows"))
    return 0


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _table(rows: Iterator[tuple[str, str]]) -> str:
    pairs = list(rows)
    width = max(len(label) for label, _ in pairs)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in pairs)


@contextmanager
def _silent(label: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda n: None


@contextmanager
def _lines(label: str, total: int) -> Iterator[Callable[[int], None]]:
    print(f"lkv: {label} ({total})", file=sys.stderr)
    yield lambda n: None


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        with _plain_bar(label, total, sys.stderr) as count:
            yield count
        return
    with tqdm(total=total, desc=f"{label:>8}", file=sys.stderr, leave=False) as bar:
        yield bar.update


@contextmanager
def _plain_bar(label: str, total: int, stream: TextIO, width: int = 40) -> Iterator[Callable[[int], None]]:
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        filled = width * done // total
        stream.write(f"\r{label:>8} [{'#' * filled}{'.' * (width - filled)}] {done}/{total}")
        stream.flush()

    try:
        count(0)
        yield count
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
