"""Run transformers' own tests twice, as they are and with lkv's cache and attention in their place, and compare.

    python tools/transformers_suite.py path/to/transformers [tests/models/deepseek_v3 ...]

The checkout's sources are imported, so its dependencies and those of its tests must be installed; lkv is taken from
where this Python finds it. In the second run every ``DynamicCache`` made for an MLA configuration is an `LkvCache`,
full-attention layers of any other are one-layer `LkvLayer`, and MLA models are absorbed by their first forward pass.
Exits with 1 if a test fails only then.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

TESTS = ["tests/models/deepseek_v2", "tests/models/deepseek_v3", "tests/utils/test_cache_utils.py"]
ROWS = 4096
SWAP, RESULTS = "LKV_SUITE_SWAP", "LKV_SUITE_RESULTS"


def main() -> int:
    """Run both and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path, help="of github.com/huggingface/transformers")
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"paths in it (default: {' '.join(TESTS)})")
    parser.add_argument("-k", dest="only", default="", help="as for pytest")
    parser.add_argument(
        "-m", dest="marks", default="not torch_compile_test", help="as for pytest (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    options = parser.parse_args()
    plain = run(options, swapped=False)
    swapped = run(options, swapped=True)
    regressed = report(plain, swapped)
    return 1 if regressed or not plain else 0


def run(options: argparse.Namespace, swapped: bool) -> dict[str, tuple[str, str]]:
    """Return the outcome of every test by its id, and the last line of what went wrong."""
    checkout = options.checkout.resolve()
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.jsonl")
        paths = [checkout / "src", pathlib.Path(__file__).resolve().parent, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
            "HF_HUB_OFFLINE": "1",
            RESULTS: str(results),
            SWAP: str(int(swapped)),
        }
        command = [sys.executable, "-m", "pytest", "-p", pathlib.Path(__file__).stem, "-q", "--tb=short", "-rf"]
        command += [f"--timeout={options.timeout}", "-p", "no:cacheprovider", *options.tests]
        command += ["-m", options.marks] if options.marks else []
        command += ["-k", options.only] if options.only else []
        print(f"== {'swapped' if swapped else 'as they are'}: {' '.join(command)}", flush=True)
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        lines = results.read_text("utf-8").splitlines() if results.exists() else []
    outcomes: dict[str, tuple[str, str]] = {}
    for test, outcome, reason in map(json.loads, lines):
        if outcomes.get(test, ("",))[0] != "failed":  # by a subtest
            outcomes[test] = outcome, reason
    return outcomes


def report(plain: dict[str, tuple[str, str]], swapped: dict[str, tuple[str, str]]) -> list[str]:
    """Print a table of what differs; return the tests that fail only when swapped."""
    print("\n| | passed | failed | skipped |\n|---|---|---|---|")
    for name, outcomes in (("as they are", plain), ("swapped", swapped)):
        number = [sum(outcome == kind for outcome, _ in outcomes.values()) for kind in ("passed", "failed", "skipped")]
        print(f"| {name} | {' | '.join(map(str, number))} |")
    print("\n| test | as it is | swapped | why |\n|---|---|---|---|")
    different = [
        test for test in plain | swapped if plain.get(test, ("absent",))[0] != swapped.get(test, ("absent",))[0]
    ]
    for test in different:
        (before, _), (after, reason) = plain.get(test, ("absent", "")), swapped.get(test, ("absent", ""))
        print(f"| `{test.rpartition('/')[2]}` | {before} | {after} | {reason.replace('|', '/')[:300]} |")
    return [test for test in different if swapped.get(test, ("absent",))[0] in ("failed", "absent")]


# From here on: in the Python that runs the tests, as a plugin of pytest.


def pytest_configure() -> None:
    """Swap before any test module is imported."""
    if os.environ.get(SWAP) == "1":
        swap_caches()
        swap_attention()


def pytest_runtest_logreport(report: object) -> None:
    """Note the outcome of a test, of its subtests together."""
    if report.when == "call" or report.outcome != "passed":
        reason = "" if report.outcome == "passed" else str(report.longrepr).strip().splitlines()[-1]
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = reason if crash is None else f"{crash.message.splitlines()[0]} ({pathlib.Path(crash.path).name})"
        with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
            print(json.dumps([report.nodeid, report.outcome, reason]), file=file)


def pytest_terminal_summary(terminalreporter: object) -> None:
    """Tell how much was swapped: a table of no differences means something only then."""
    if counts:
        terminalreporter.write_line(f"lkv: {', '.join(f'{count} {what}' for what, count in counts.items())}")


counts: collections.Counter[str] = collections.Counter()


def swap_caches() -> None:
    """Make ``DynamicCache`` an `LkvCache` for MLA configurations, and put `LkvLayer` into all others."""
    from transformers import cache_utils

    from lkv.errors import GeometryError
    from lkv.integrations.transformers.cache import LkvCache, LkvLayer
    from lkv.integrations.transformers.rows import BatchRows

    dynamic, initialise = cache_utils.DynamicCache, cache_utils.DynamicCache.__init__
    making = False  # while an LkvCache looks what layers a DynamicCache would have

    class OneLayer(LkvLayer):
        """Rows of its own, of whatever heads and widths come first."""

        def __init__(self) -> None:
            super().__init__(BatchRows(("keys", "values"), [0], 1, ROWS), 0, None)
            counts["LkvLayer of other models"] += 1

    class Swapped(LkvCache):
        """What ``isinstance`` and iteration take for a ``DynamicCache``."""

        __class__ = property(lambda self: dynamic)
        __iter__ = dynamic.__iter__

    def new(cls: type, ddp_cache_data: object = None, config: object = None, **options: object) -> object:
        nonlocal making
        if cls is dynamic and config is not None and ddp_cache_data is None and not making:
            making = True
            try:
                made = Swapped(config, ROWS)
                counts["LkvCache"] += 1
                return made
            except GeometryError:  # no MLA
                pass
            finally:
                making = False
        return object.__new__(cls)

    def init(self: cache_utils.Cache, *args: object, **options: object) -> None:
        initialise(self, *args, **options)
        if making:
            return
        if self.layer_class_to_replicate is cache_utils.DynamicLayer:
            self.layer_class_to_replicate = OneLayer
        for index, layer in enumerate(self.layers):
            if type(layer) is cache_utils.DynamicLayer and not layer.is_initialized:
                self.layers[index] = OneLayer()

    dynamic.__new__, dynamic.__init__ = new, init


def swap_attention() -> None:
    """Absorb an MLA model when it is first called, which is when its weights are there."""
    import torch
    from transformers import PreTrainedModel

    from lkv.errors import GeometryError
    from lkv.integrations.transformers import absorb as _  # noqa: F401

    absorbing = sys.modules["lkv.integrations.transformers.absorb"]
    attend = absorbing.latent_attention

    def counted(*args: object) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a count would be compiled in, and again for every number
            counts["absorbed attention"] += 1
        return attend(*args)

    absorbing.latent_attention = counted

    def before_forward(module: torch.nn.Module, args: object) -> None:
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == "sdpa":
            with contextlib.suppress(GeometryError):  # no MLA
                absorbing.absorb(module)

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)


if __name__ == "__main__":
    sys.exit(main())
