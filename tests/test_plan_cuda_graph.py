"""`CudaGraphPlan` over a stand-in for CuPy that records what is enqueued while capturing and replays just that."""

import contextlib
import sys
import types

import numpy as np
import pytest
from helpers.plans import latent

from lkv import errors
from lkv.plan import CudaGraphPlan, DecodeSession, RebindRefused, cuda_graph


class FakeStream:
    def __init__(self, cuda, name="default"):
        self.cuda, self.name, self.recording = cuda, name, None

    def __enter__(self):
        self.cuda.streams.append(self)

    def __exit__(self, *exc):
        self.cuda.streams.pop()

    def record(self):
        return f"event of {self.name}"

    def wait_event(self, event):
        self.cuda.log.append(("wait", self.name, event))

    def synchronize(self):
        assert self.recording is None, "a capturing stream must not be waited for"
        self.cuda.log.append(("synchronize", self.name))

    def begin_capture(self):
        self.recording = []
        self.cuda.log.append(("begin", self.name))

    def end_capture(self):
        recorded, self.recording = self.recording, None
        self.cuda.log.append(("end", self.name))
        return FakeGraph(self.cuda, recorded)


class FakeGraph:
    def __init__(self, cuda, work):
        self.cuda, self.work = cuda, work

    def launch(self, stream):
        self.cuda.log.append(("launch", stream.name))
        for function, arrays in self.work:
            function(*arrays)


class FakeCuda:
    def __init__(self):
        self.log = []
        self.streams = [FakeStream(self)]
        self.pools = []

    def get_current_stream(self):
        return self.streams[-1]

    def Stream(self, non_blocking):
        assert non_blocking
        return FakeStream(self, "capture")

    def MemoryPool(self):
        return types.SimpleNamespace(malloc=object())

    @contextlib.contextmanager
    def using_allocator(self, malloc):
        self.pools.append(malloc)
        yield
        self.pools.pop()

    @contextlib.contextmanager
    def Device(self, ordinal):
        self.log.append(("device", ordinal))
        yield


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    module.cuda = FakeCuda()
    module.from_dlpack = np.from_dlpack
    module.asarray, module.copyto = np.asarray, np.copyto
    module.log = module.cuda.log

    def enqueue(function, *arrays):
        stream = module.cuda.get_current_stream()
        if stream.recording is None:
            function(*arrays)
        else:
            stream.recording.append((function, arrays))

    module.enqueue = enqueue
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(cuda_graph, "_cupy_array", lambda storage: storage.alias().numpy())
    return module


@pytest.fixture
def step(cupy):
    def rows_of(out, c_kv, k_pe, length):
        out[:] = c_kv[: length[0]].sum() + k_pe[: length[0]].sum()

    def step(buffers, inputs):
        assert cupy.cuda.pools, "scratch must come from the plan's own pool"
        out = np.empty(1)
        cupy.enqueue(rows_of, out, *buffers[0], inputs["length"])
        return out

    return step


def make(step, cache):
    plan = CudaGraphPlan(step, {"length": np.array([3])})
    return DecodeSession(plan, cache, seq=1, shape_key=0), plan


def expected(cache, length):
    return sum(cache.slot_storage(0, which).alias().numpy()[:length].sum() for which in range(2))


def kinds(log):
    return [entry[0] for entry in log]


def test_a_step_is_captured_once_and_replayed(cupy, step):
    cache = latent(2, 1, layers=1)
    session, plan = make(step, cache)
    assert not plan.captured
    assert session.run() == pytest.approx(expected(cache, 3))
    assert plan.captured
    order = ["device", "wait", "synchronize", "begin", "end", "launch"]
    assert kinds(cupy.log) == order
    assert session.run(length=[2]) == pytest.approx(expected(cache, 2))
    assert kinds(cupy.log) == [*order, "device", "launch"]


def test_a_rebound_graph_is_captured_anew_over_the_new_addresses(cupy, step):
    first, second = latent(2, 1, layers=1), latent(2, 2, layers=1)
    session, plan = make(step, first)
    session.run()
    cupy.log.clear()
    session.rebind_kv(second)
    assert kinds(cupy.log) == ["synchronize"], "the replay in flight still reads the old memory"
    assert not plan.captured
    assert session.run() == pytest.approx(expected(second, 3))
    assert kinds(cupy.log).count("begin") == 1


def test_a_refused_rebind_leaves_a_plan_that_captures_again_over_the_old_addresses(cupy, step):
    first = latent(2, 1, layers=1)
    session, plan = make(step, first)
    session.run()
    with pytest.raises(RebindRefused):
        session.rebind_kv(latent(3, 2, layers=1))
    assert not plan.captured
    assert session.run() == pytest.approx(expected(first, 3))


def test_control_a_graph_that_is_not_invalidated_replays_the_other_request(cupy, step, monkeypatch):
    first, second = latent(2, 1, layers=1), latent(2, 2, layers=1)
    session, plan = make(step, first)
    session.run()
    monkeypatch.setattr(plan, "invalidate", lambda: None)
    session.rebind_kv(second)
    assert session.run() == pytest.approx(expected(first, 3))
    assert expected(first, 3) != pytest.approx(expected(second, 3))


def test_a_step_that_fails_while_capturing_leaves_no_capture(cupy, step):
    calls = []

    def failing(buffers, inputs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no")
        return step(buffers, inputs)

    cache = latent(2, 1, layers=1)
    session, plan = make(failing, cache)
    with pytest.raises(RuntimeError, match="no"):
        session.run()
    assert not plan.captured
    assert kinds(cupy.log)[-1] == "end"
    assert len(cupy.cuda.streams) == 1
    assert session.run() == pytest.approx(expected(cache, 3))


def test_a_plan_that_goes_waits_for_its_replay(cupy, step):
    session, plan = make(step, latent(2, 1, layers=1))
    session.run()
    cupy.log.clear()
    del session, plan
    assert kinds(cupy.log) == ["synchronize"]


def test_an_unknown_input_is_named(cupy, step):
    session, _ = make(step, latent(2, 1, layers=1))
    with pytest.raises(errors.ArgumentTypeError, match="tokens: expected one of length"):
        session.run(tokens=[1])


def test_without_cupy_the_reason_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(errors.DeviceUnavailableError, match="latent-kv\\[cuda12\\]"):
        CudaGraphPlan(lambda buffers, inputs: None)
