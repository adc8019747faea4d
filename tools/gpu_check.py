"""What only a GPU can tell, in one run of under three minutes without a network.

``python tools/gpu_check.py [--json FILE]`` on a machine with a GPU and an installed lkv: the CUDA tests with
``LKV_TEST_CUDA=gpu``, bandwidths, the latency of an append against plain CuPy copies and PyTorch, an out-of-memory
round trip, order against a kernel that takes its time, a CUDA graph over a held address, and PyTorch in and out. It
prints a table and writes JSON. ``--sim`` runs what can be run on the simulated runtime, to check the script itself:
its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTHS = 61, (512, 64)
TEST_SECONDS = 100

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
extern "C" __global__ void set(unsigned char *to, unsigned char value, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
    to[i] = value;
}
"""


class Skipped(Exception):
    """A check that cannot run here, and why."""


class Checks:
    """The checks, over one GPU or the simulator.

    Parameters
    ----------
    simulated : bool
        Whether the runtime is the simulated one.
    """

    def __init__(self, simulated: bool) -> None:
        self.simulated = simulated
        self.cupy: Any = importlib.import_module("cupy")
        self.lkv: Any = importlib.import_module("lkv")
        self.runtime = self.cupy.cuda.runtime
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.big = (8 << 20) if simulated else (1 << 30)
        self.rounds = 3 if simulated else 200

    def kernels(self) -> Any:
        """Compile the two kernels of these checks."""
        if self.simulated:
            raise Skipped("the simulator runs no kernels")
        return self.cupy.RawModule(code=_SPIN)

    def torch(self) -> Any:
        """Import PyTorch, if it can use the GPU."""
        if self.simulated:
            raise Skipped("PyTorch cannot use the simulator")
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise Skipped(f"PyTorch is not importable: {error}") from error
        if not torch.cuda.is_available():
            raise Skipped(f"PyTorch {torch.__version__} finds no GPU")
        return torch

    def machine(self) -> dict[str, Any]:
        """Say what it ran on."""
        properties = self.runtime.getDeviceProperties(0)
        free, total = self.runtime.memGetInfo()
        return {
            "gpu": properties["name"].decode(),
            "count": self.runtime.getDeviceCount(),
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
            "driver": self.runtime.driverGetVersion(),
            "cuda_runtime": self.runtime.runtimeGetVersion(),
            "cupy": self.cupy.__version__,
            "torch": _version("torch"),
            "numpy": np.__version__,
            "lkv": self.lkv.__version__,
            "python": platform.python_version(),
        }

    def tests(self) -> dict[str, Any]:
        """Run the CUDA tests."""
        files = sorted(str(path) for path in [*ROOT.glob("tests/test_cuda_*.py"), ROOT / "tests/test_cache_devices.py"])
        mode = "sim" if self.simulated else "gpu"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", *files]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "LKV_TEST_CUDA": mode},
                capture_output=True,
                text=True,
                timeout=TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return {"passed": False, "summary": f"not done within {error.timeout:g} s"}
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return {"passed": done.returncode == 0, "summary": lines[-1], "failed": failed[:50]}

    def bandwidth(self) -> dict[str, float]:
        """Measure GB/s of large copies: CuPy's own calls, and a storage's."""
        n, runtime, stream = self.big, self.runtime, self.stream
        a, b = self.cupy.cuda.alloc(n), self.cupy.cuda.alloc(n)
        memory = self.cupy.cuda.alloc_pinned_memory(n)
        pinned = np.frombuffer(memory, np.uint8, n)
        pageable = np.ones(n, np.uint8)
        storage = self.lkv.Storage(n, device="cuda:0")
        other = self.lkv.Storage(n, device="cuda:0")
        host = self.lkv.Storage.wrap(np.empty(n, np.uint8)).alias()

        def download() -> None:
            host.copy_from(storage.alias())

        def between() -> None:
            other.alias().copy_from(storage.alias())

        with stream:
            return {
                "h2d pinned, cupy": self._rate(
                    lambda: runtime.memcpyAsync(a.ptr, pinned.ctypes.data, n, 1, stream.ptr)
                ),
                "h2d pageable, cupy": self._rate(
                    lambda: runtime.memcpyAsync(a.ptr, pageable.ctypes.data, n, 1, stream.ptr)
                ),
                "h2d, lkv": self._rate(lambda: storage.write_host(pageable)),
                "d2h pinned, cupy": self._rate(
                    lambda: runtime.memcpyAsync(pinned.ctypes.data, a.ptr, n, 2, stream.ptr)
                ),
                "d2h pageable, cupy": self._rate(
                    lambda: runtime.memcpyAsync(pageable.ctypes.data, a.ptr, n, 2, stream.ptr)
                ),
                "d2h, lkv": self._rate(download),
                "d2d, cupy": self._rate(lambda: runtime.memcpyAsync(b.ptr, a.ptr, n, 3, stream.ptr)),
                "d2d, lkv": self._rate(between),
            }

    def _rate(self, call: Callable[[], object], times: int = 3) -> float:
        call()
        self.stream.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            call()
        self.stream.synchronize()
        return round(self.big * times / (time.perf_counter() - begun) / 1e9, 2)

    def append_latency(self) -> dict[str, dict[str, float]]:
        """Measure microseconds of one token's append to 61 layers x 2 slots: to issue it, and until it is done."""
        bfloat16 = self.lkv.DType.of("bfloat16").numpy
        host = [np.ones((1, width), bfloat16) for width in WIDTHS]
        there = [self.cupy.asarray(array) for array in host]
        found = {}
        for name, rows in (("lkv, numpy rows", host), ("lkv, cupy rows", there)):
            cache = self.lkv.LatentKvCache.with_capacity(LAYERS, 4096, [(w,) for w in WIDTHS], "bfloat16", "cuda:0")

            def by_lkv(cache: Any = cache, rows: Any = rows) -> None:
                with cache.step(1) as step:
                    for layer in range(LAYERS):
                        step.append(layer, rows)

            found[name] = self._latency(by_lkv)
        buffers = [self.cupy.cuda.alloc(4096 * width * 2) for _ in range(LAYERS) for width in WIDTHS]
        sources = [(array.data.ptr, array.nbytes) for array in there] * LAYERS
        pairs = [(buffer.ptr, *source) for buffer, source in zip(buffers, sources, strict=True)]

        def by_cupy() -> None:
            for to, source, nbytes in pairs:
                self.runtime.memcpyAsync(to, source, nbytes, 3, self.stream.ptr)

        found["cupy, memcpyAsync in a loop"] = self._latency(by_cupy)
        try:
            torch = self.torch()
        except Skipped:
            return found
        targets = [torch.zeros(4096, w, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS) for w in WIDTHS]
        rows = [torch.ones(1, w, device="cuda", dtype=torch.bfloat16) for w in WIDTHS] * LAYERS

        def by_torch() -> None:
            for target, row in zip(targets, rows, strict=True):
                target[7:8].copy_(row)

        found["torch, slice.copy_ in a loop"] = self._latency(by_torch)
        return found

    def _latency(self, call: Callable[[], object]) -> dict[str, float]:
        call()
        issued, done = [], []
        with self.stream:
            for _ in range(self.rounds):
                self.runtime.deviceSynchronize()
                begun = time.perf_counter()
                call()
                issued.append(time.perf_counter() - begun)
                self.runtime.deviceSynchronize()
                done.append(time.perf_counter() - begun)
        return {"issue_us": round(float(np.median(issued)) * 1e6, 1), "done_us": round(float(np.median(done)) * 1e6, 1)}

    def out_of_memory(self) -> dict[str, Any]:
        """Ask for more than there is, and go on."""
        pool = self.cupy.get_default_memory_pool()
        pool.free_all_blocks()
        before = self.runtime.memGetInfo()[0]
        total = self.runtime.memGetInfo()[1]
        rows = total // (4 * LAYERS * 1024)  # all layers together: four times the memory, the first ones fit
        try:
            self.lkv.LatentKvCache.with_capacity(LAYERS, rows, [(4096,)], "float32", "cuda:0")
            message = "no error"
        except self.lkv.errors.OutOfMemoryError as error:
            message = str(error)
        pool.free_all_blocks()
        lost = before - self.runtime.memGetInfo()[0]
        storage = self.lkv.Storage(1 << 20, device="cuda:0")
        works = not any(storage.read_host())
        return {"passed": message != "no error" and lost <= 0 and works, "message": message, "bytes_lost": lost}

    def order(self) -> dict[str, Any]:
        """Write behind a kernel that takes its time, and read on another stream."""
        module = self.kernels()
        spin, fill = module.get_function("spin"), module.get_function("set")
        n, wrong, early = 1 << 20, 0, 0
        storage, target = self.lkv.Storage(n, device="cuda:0"), self.cupy.zeros(n, np.uint8)
        other = self.cupy.cuda.Stream(non_blocking=True)
        self.runtime.deviceSynchronize()
        for i in range(1, 21):
            with self.stream, storage.write() as lease:
                spin((1,), (1,), (20_000_000,))
                fill((64,), (256,), (lease.cupy(), np.uint8(i), np.int64(n)))
            early += not self.stream.done
            with other, storage.read() as lease:
                target.data.copy_from_device_async(lease.cupy().data, n, other)
            other.synchronize()
            wrong += int((target.get() != i).sum())
        return {
            "passed": wrong == 0 and early > 0,
            "wrong_bytes": wrong,
            "still_running_at_lease_end": f"{early} of 20",
        }

    def graph(self) -> dict[str, Any]:
        """Capture a copy out of a held address, and replay it over what was appended since."""
        self.kernels()
        cache = self.lkv.LatentKvCache.with_capacity(1, 64, [(256,)], "uint8", "cuda:0")
        held = cache.slot_storage(0, 0).alias().cupy()
        target = self.cupy.zeros(256, np.uint8)
        self.runtime.deviceSynchronize()
        stream, found = self.cupy.cuda.Stream(non_blocking=True), []
        with stream:
            stream.begin_capture()
            target.data.copy_from_device_async(held[0].data, 256, stream)
            captured = stream.end_capture()
        address = cache.slot_storage(0, 0).address
        for value in (1, 2, 3):
            cache.truncate_to(0)
            with stream:
                with cache.step(1) as step:
                    step.append(0, [np.full((1, 256), value, np.uint8)])
                with cache.read(0):
                    captured.launch(stream)
            stream.synchronize()
            found.append(int(target.get()[0]))
        return {"passed": found == [1, 2, 3] and address == held.data.ptr, "replayed": found}

    def torch_both_ways(self) -> dict[str, Any]:
        """Append PyTorch tensors on a stream of PyTorch's, and read them back as tensors."""
        torch = self.torch()
        cache = self.lkv.LatentKvCache.with_capacity(1, 4096, [(512,)], "bfloat16", "cuda:0")
        stream, wrong = torch.cuda.Stream(), 0
        for i in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                rows = torch.full((16, 512), float(i), device="cuda", dtype=torch.bfloat16)
                with cache.step(16) as step:
                    step.append(0, [rows])
                rows.fill_(-1)
            with cache.read(0) as view:
                [tensor] = view.torch()
                wrong += int((tensor[-16:] != i).sum())
        with cache.read(0) as view:
            [tensor] = view.torch()
            same = tensor.data_ptr() == view[0].address and tensor.is_cuda
        with self.lkv.Storage((4, 4), "float32", "cuda:0").write() as lease:
            interface = torch.as_tensor(lease, device="cuda").data_ptr() == lease.address
        return {"passed": wrong == 0 and same and interface, "wrong_elements": wrong}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(simulated: bool) -> dict[str, Any]:
    """Run all checks; one that fails does not keep the others from running."""
    checks = Checks(simulated)
    report: dict[str, Any] = {"simulated": simulated, "machine": checks.machine()}
    for name in ("bandwidth", "append_latency", "out_of_memory", "order", "graph", "torch_both_ways", "tests"):
        begun = time.perf_counter()
        try:
            report[name] = getattr(checks, name)()
        except Skipped as reason:
            report[name] = {"skipped": str(reason)}
        except Exception as error:
            report[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    report["passed"] = all(part.get("passed", True) for part in report.values() if isinstance(part, dict))
    return report


def table(report: dict[str, Any]) -> str:
    """Format a report as a Markdown table."""
    rows = [("check", "result"), ("---", "---")]
    for name, part in report.items():
        if not isinstance(part, dict):
            rows.append((name, str(part)))
            continue
        for key, value in part.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            rows.append((f"{name.replace('_', ' ')}: {key}", re.sub(r"\s+", " ", text)))
    return "\n".join(f"| {left} | {right} |" for left, right in rows)


def main() -> int:
    """Run the checks, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where to (default: gpu-check.json)")
    parser.add_argument("--sim", action="store_true", help="on the simulated runtime, to check this script")
    args = parser.parse_args()
    if args.sim:
        sys.path.insert(0, str(ROOT / "tests"))
        os.environ["CUDASIM_TOTAL"] = str(1 << 30)
        with tempfile.TemporaryDirectory() as folder:
            importlib.import_module("cudasim").install(folder).schedule("lazy")
        del os.environ["CUDASIM_TOTAL"]
    report = run(args.sim)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
