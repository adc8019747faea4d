"""Order between streams: programs that go wrong without it, and backends with a bug each, which those must find."""

import itertools

import numpy as np
import pytest
from helpers.cuda import MODE, REASON, SIMULATOR, needs_simulator, reset_cuda

from lkv import LatentKvCache, Storage
from lkv.devices import CopyKind, cuda, staging

if MODE is None:
    pytest.skip(REASON, allow_module_level=True)

import cupy
from helpers.cuda_orders import KIB, PROGRAMS, Streams

SCHEDULES = ["eager", "lazy", *[f"random{seed}" for seed in range(1, 6)]] if MODE == "sim" else ["as it comes"]


@pytest.fixture(autouse=True)
def cleanly():
    yield
    reset_cuda()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_backend_orders(program, schedule):
    if SIMULATOR is not None:
        SIMULATOR.schedule(schedule)
    PROGRAMS[program]("cuda:0")


# ---- streams that have nothing to do with each other ----


@needs_simulator
def test_streams_over_different_rows_do_not_wait_for_each_other():
    SIMULATOR.schedule("lazy")
    streams, storage = Streams(), Storage((8, KIB), device="cuda:0")
    with streams.s:
        storage.write_host(bytes(4 * KIB), 0)
    with streams.t:
        storage.write_host(bytes(4 * KIB), 4)
    streams.t.synchronize()
    assert not streams.s.done


@needs_simulator
def test_readers_on_different_streams_do_not_wait_for_each_other():
    SIMULATOR.schedule("lazy")
    streams, storage = Streams(), Storage(KIB, device="cuda:0")
    for stream in (streams.s, streams.t):
        with stream, storage.read() as lease:
            streams.copy_out(lease.address, KIB, stream)
    streams.t.synchronize()
    assert not streams.s.done


@needs_simulator
def test_an_append_does_not_wait_for_a_reader_of_the_committed_rows():
    SIMULATOR.schedule("lazy")
    streams = Streams()
    cache = LatentKvCache.with_capacity(1, 16, [(256,)], "uint8", "cuda:0")
    with cache.step(4) as step:
        step.append(0, [np.full((4, 256), 7, np.uint8)])
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s, cache.read(0) as rows:
        streams.copy_out(rows[0].address, KIB, streams.s)
    with streams.t, cache.step(1) as step:
        step.append(0, [np.full((1, 256), 8, np.uint8)])
    streams.t.synchronize()
    assert not streams.s.done


@needs_simulator
def test_one_stream_alone_never_waits():
    SIMULATOR.schedule("lazy")
    with SIMULATOR.counting() as calls:
        storage = Storage((8, KIB), device="cuda:0")
        for row in range(8):
            storage.write_host(bytes(KIB), row)
            storage.write_host(bytes(KIB), 0)
            storage.copy()
    assert "cudaStreamWaitEvent" not in calls


# ---- backends with a bug each ----


class Sound(cuda.CudaDevice):
    """The control: the shipped backend under another name."""

    def __init__(self):
        super().__init__(0, cupy)


class DoesNotWait(Sound):
    def wait_event(self, stream, event):
        pass


class LeavesNoEvents(Sound):
    def record_event(self, stream):
        return cupy.cuda.Event(disable_timing=True)


class RecordsOnTheDefaultStream(Sound):
    def record_event(self, stream):
        return super().record_event(0)


class RecordsTooEarly(Sound):
    """The event that stands for a lease is the one from before its last work."""

    def __init__(self):
        super().__init__()
        self.early = {}

    def current_stream(self):
        stream = super().current_stream()
        self.early[stream] = self._record(stream)
        return stream

    def record_event(self, stream):
        return self.early.get(stream) or super().record_event(stream)


class TakesEveryEventForReached(Sound):
    def event_done(self, event):
        return True


class KnowsOneStream(Sound):
    def current_stream(self):
        return 0


class CopiesOnTheDefaultStream(Sound):
    def copy_2d(self, kind, dst, dst_pitch, src, src_pitch, width, height, stream):
        super().copy_2d(kind, dst, dst_pitch, src, src_pitch, width, height, 0)


class ClearsOnTheDefaultStream(Sound):
    def fill_zero(self, address, nbytes, stream):
        super().fill_zero(address, nbytes, 0)


class HandsOutMemoryThatIsBeingCleared(Sound):
    """Clears it on a stream that nobody waits for."""

    def __init__(self):
        super().__init__()
        self.clearing = cupy.cuda.Stream(non_blocking=True)

    def allocate(self, nbytes):
        block = cuda._Block(self._take(nbytes), cupy.cuda.get_current_stream())
        self._blocks[block.address] = block
        cupy.cuda.runtime.memsetAsync(block.address, 0, nbytes, self.clearing.ptr)
        return block.address


class FreesAtOnce(Sound):
    def free(self, address, nbytes):
        del self._blocks[address]


class Unstaged(staging.Staging):
    """Leaves the caller's memory to the copy engine."""

    def upload(self, dst, dst_pitch, src, src_pitch, width, height, stream):
        part = (dst, dst_pitch, src, src_pitch, width, height)
        staging.queue_copy(self._runtime, CopyKind.HOST_TO_DEVICE, part, stream)


class ReadsTheSourceLate(Sound):
    def __init__(self):
        super().__init__()
        self._staging = Unstaged(cupy, itertools.count(1))


class HastyBlock(staging._Block):
    __slots__ = ()

    def reuse(self):
        self.events.clear()
        self.used = 0


class ReusesStagingMemoryTooEarly(Sound):
    def __init__(self):
        super().__init__()
        self._staging._next_block = self.hasty(self._staging._next_block)

    @staticmethod
    def hasty(next_block):
        def of(full):
            block = next_block(full)
            block.__class__ = HastyBlock
            return block

        return of


class Unfinished(staging.Staging):
    """Returns from a download before the bytes are there; into pinned memory, which nobody frees meanwhile."""

    def download(self, dst, dst_pitch, src, src_pitch, width, height, stream):
        if self._runtime.pointerGetAttributes(dst).type != staging._PINNED:
            super().download(dst, dst_pitch, src, src_pitch, width, height, stream)
            return
        part = (dst, dst_pitch, src, src_pitch, width, height)
        staging.queue_copy(self._runtime, CopyKind.DEVICE_TO_HOST, part, stream)


class ReturnsBeforeTheBytesAreThere(Sound):
    def __init__(self):
        super().__init__()
        self._staging = Unfinished(cupy, itertools.count(1))


BUGS = [
    DoesNotWait,
    LeavesNoEvents,
    RecordsOnTheDefaultStream,
    RecordsTooEarly,
    TakesEveryEventForReached,
    KnowsOneStream,
    CopiesOnTheDefaultStream,
    ClearsOnTheDefaultStream,
    HandsOutMemoryThatIsBeingCleared,
    FreesAtOnce,
    ReadsTheSourceLate,
    ReusesStagingMemoryTooEarly,
    ReturnsBeforeTheBytesAreThere,
]


def location_of(backend):
    if "name" not in vars(backend):
        backend.name = f"copy{[Sound, *BUGS].index(backend)}"
        backend().register()
    return f"{backend.name}:0"


def found_by(backend):
    """The programs that go wrong with a backend, under the lazy schedule."""
    location, found = location_of(backend), []
    for name, program in PROGRAMS.items():
        SIMULATOR.schedule("lazy")
        try:
            program(location)
        except AssertionError:
            found.append(name)
        SIMULATOR.pageable_async(False)
    return found


@needs_simulator
def test_the_programs_find_nothing_in_a_sound_backend():
    assert found_by(Sound) == []


@needs_simulator
@pytest.mark.parametrize("backend", BUGS, ids=lambda backend: backend.__name__)
def test_the_lazy_schedule_finds(backend, record_property):
    found = found_by(backend)
    record_property("found by", found)
    assert found
