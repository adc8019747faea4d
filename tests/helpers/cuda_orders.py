"""Programs over two streams that come out right only if the backend orders what depends on each other.

Each takes the location of a device and raises AssertionError when some bytes are not what they must be. The streams do
not wait for the default stream, so nothing but lkv orders them; whichever runs first is chosen to hurt.
"""

import gc

import cupy
import numpy as np
from helpers.cuda import LOCATIONS, SIMULATOR, device_bytes
from helpers.cuda_library import LibraryArray

from lkv import LatentKvCache, Storage

KIB, MIB = 1 << 10, 1 << 20


def filled(value, nbytes, location="cpu"):
    storage = Storage(nbytes, device=location)
    storage.write_host(bytes([value]) * nbytes)
    return storage


class Streams:
    """Two streams of the first device, and a buffer that tests copy to."""

    def __init__(self):
        self.s, self.t = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.target = cupy.cuda.alloc(64 * KIB)
        self.target.memset(0, 64 * KIB)
        cupy.cuda.runtime.deviceSynchronize()

    def copy_out(self, address, nbytes, stream):
        """Queue a copy as a kernel of the test's would read: lkv does not see it."""
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(self.target.ptr, address, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def expect(self, value, nbytes, *stream_order):
        """After the streams have finished in this order, the copy must hold one value."""
        for stream in stream_order:
            stream.synchronize()
        found = set(device_bytes(self.target.ptr, nbytes))
        assert found == {value}, f"expected {value} everywhere, found {sorted(found)}"


def a_reader_on_another_stream_sees_the_write(location):
    streams, storage = Streams(), Storage(KIB, device=location)
    with streams.s:
        storage.write_host(b"\x05" * KIB)
    with streams.t, storage.read() as lease:
        streams.copy_out(lease.address, KIB, streams.t)
    streams.expect(5, KIB, streams.t)


def a_writer_on_another_stream_waits_for_the_reader(location):
    streams, storage = Streams(), filled(5, KIB, location)
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s, storage.read() as lease:
        streams.copy_out(lease.address, KIB, streams.s)
    with streams.t:
        storage.write_host(b"\x09" * KIB)
    streams.expect(5, KIB, streams.t, streams.s)


def a_write_is_remembered_after_leases_of_other_rows(location):
    streams, storage = Streams(), Storage((8, KIB), device=location)
    with streams.s:
        storage.write_host(b"\x05" * KIB, 0)
    with streams.t:
        for row in range(1, 8):
            storage.write_host(b"\x09" * KIB, row)
        with storage.read(0, 1) as lease:
            streams.copy_out(lease.address, KIB, streams.t)
    streams.expect(5, KIB, streams.t)


def the_last_of_two_writers_wins(location):
    streams, storage = Streams(), Storage(KIB, device=location)
    with streams.s:
        storage.write_host(b"\x05" * KIB)
    with streams.t:
        storage.write_host(b"\x09" * KIB)
    streams.t.synchronize()
    streams.s.synchronize()
    assert set(device_bytes(storage.address, KIB)) == {9}


def a_view_handed_to_another_stream_is_complete(location):
    streams = Streams()
    cache = LatentKvCache.with_capacity(2, 16, [(256,)], "uint8", location)
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s, cache.step(4) as step:
        for layer in range(2):
            step.append(layer, [np.full((4, 256), 7, np.uint8)])
    with streams.t, cache.read(1) as rows:
        streams.copy_out(rows[0].address, KIB, streams.t)
    streams.expect(7, KIB, streams.t)


def a_step_over_rewound_rows_waits_for_their_reader(location):
    streams = Streams()
    cache = LatentKvCache.with_capacity(1, 16, [(256,)], "uint8", location)
    with cache.step(4) as step:
        step.append(0, [np.full((4, 256), 7, np.uint8)])
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s, cache.read(0) as rows:
        streams.copy_out(rows[0].address, KIB, streams.s)
    cache.truncate_to(0)
    with streams.t, cache.step(4) as step:
        step.append(0, [np.full((4, 256), 8, np.uint8)])
    streams.expect(7, KIB, streams.t, streams.s)


def a_wipe_waits_for_the_reader(location):
    streams = Streams()
    cache = LatentKvCache.with_capacity(1, 4, [(256,)], "uint8", location)
    with cache.step(4) as step:
        step.append(0, [np.full((4, 256), 7, np.uint8)])
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s, cache.read(0) as rows:
        streams.copy_out(rows[0].address, KIB, streams.s)
    with streams.t:
        cache.wipe()
    streams.expect(7, KIB, streams.t, streams.s)


def a_wipe_is_done_for_the_stream_that_asked(location):
    streams = Streams()
    cache = LatentKvCache.with_capacity(1, 4, [(256,)], "uint8", location)
    with cache.step(4) as step:
        step.append(0, [np.full((4, 256), 7, np.uint8)])
    cupy.cuda.runtime.deviceSynchronize()
    with streams.t:
        cache.wipe()
    streams.t.synchronize()
    assert set(device_bytes(cache.slot_storage(0, 0).address, KIB)) == {0}


def fresh_memory_is_not_cleared_once_it_is_in_use(location):
    streams = Streams()
    with streams.s:
        storage = Storage(KIB, device=location)
    with streams.t:
        storage.write_host(b"\x05" * KIB)
    streams.t.synchronize()
    streams.s.synchronize()
    assert set(device_bytes(storage.address, KIB)) == {5}


def fresh_memory_is_clear_for_a_reader_on_another_stream(location):
    streams = Streams()
    with streams.s:
        filled(9, KIB, location)  # the pool hands this out again
        streams.s.synchronize()
        gc.collect()
        storage = Storage(KIB, device=location)
    with streams.t, storage.read() as lease:
        streams.copy_out(lease.address, KIB, streams.t)
    streams.expect(0, KIB, streams.t)


def memory_is_not_handed_out_again_while_it_is_read(location):
    streams = Streams()
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        with streams.s:
            storage = filled(5, KIB, location)
            streams.s.synchronize()
        with streams.t, storage.read() as lease:
            streams.copy_out(lease.address, KIB, streams.t)
        del storage, lease
        gc.collect()
        with streams.s:
            other = filled(9, KIB, location)
        streams.expect(5, KIB, streams.s, streams.t)
        del other


def memory_of_a_plain_allocator_is_not_handed_out_again_while_it_is_read(location):
    streams, kept = Streams(), []

    def allocate(nbytes, ordinal):
        memory = kept.pop() if kept else cupy.cuda.memory._malloc(KIB)
        lent[memory.ptr] = memory
        return memory.ptr

    def free(address, ordinal):
        kept.append(lent.pop(address))

    lent = {}
    allocator = cupy.cuda.PythonFunctionAllocator(allocate, free)
    with cupy.cuda.using_allocator(allocator.malloc):
        storage = filled(5, KIB, location)
        cupy.cuda.runtime.deviceSynchronize()
        with storage.read() as lease, streams.t:
            streams.copy_out(lease.address, KIB, streams.t)
            lease.release()
        del storage, lease
        gc.collect()
        with streams.s:
            other = filled(9, KIB, location)
        streams.expect(5, KIB, streams.s, streams.t)
        del other
        cupy.cuda.runtime.deviceSynchronize()
        Storage(1, device=location)


def a_source_may_be_overwritten_at_once(location):
    storage = Storage(KIB, device=location)
    memory = cupy.cuda.alloc_pinned_memory(KIB)
    source = np.frombuffer(memory, np.uint8, KIB)
    source[:] = 5
    storage.write_host(source)
    source[:] = 9
    assert set(storage.read_host()) == {5}


def a_pageable_source_may_be_overwritten_at_once(location):
    if SIMULATOR is not None:
        SIMULATOR.pageable_async(True)
    storage, source = Storage(KIB, device=location), bytearray(b"\x05" * KIB)
    storage.write_host(source)
    source[:] = b"\x09" * KIB
    assert set(storage.read_host()) == {5}


def a_source_larger_than_the_staging_memory_arrives(location):
    data = np.repeat(np.arange(48, dtype=np.uint8), MIB // 2)
    storage = Storage(data.size, device=location)
    storage.write_host(data)
    assert storage.read_host() == data.tobytes()


def many_small_sources_arrive(location):
    storage = Storage((400, 64 * KIB), device=location)
    for row in range(400):
        storage.write_host(bytes([row % 251]) * (64 * KIB), row)
    found = np.frombuffer(storage.read_host(), np.uint8).reshape(400, -1)
    assert [int(row.min()) for row in found] == [int(row.max()) for row in found] == [row % 251 for row in range(400)]


def a_destination_is_complete(location):
    for nbytes in (KIB, MIB):
        storage = filled(5, nbytes, location)
        memory = cupy.cuda.alloc_pinned_memory(nbytes)
        target = np.frombuffer(memory, np.uint8, nbytes)
        target[:] = 0
        Storage.wrap(target).alias().copy_from(storage.alias())
        assert set(target.tobytes()) == {5}


def a_large_destination_is_complete(location):
    storage = filled(5, 10 * MIB, location)
    cupy.cuda.runtime.deviceSynchronize()
    if SIMULATOR is not None:
        SIMULATOR.pageable_async(True)
    assert set(storage.read_host()) == {5}
    assert set(storage.read_host(0, KIB)) == {5}


def a_dlpack_consumer_on_another_stream_waits(location):
    streams, storage = Streams(), Storage(KIB, device=location)
    with streams.s:
        storage.write_host(b"\x05" * KIB)
        lease = storage.write()
    with streams.t:
        array = cupy.from_dlpack(lease)
        streams.copy_out(array.data.ptr, KIB, streams.t)
    streams.expect(5, KIB, streams.t)
    lease.release()


def a_cupy_consumer_on_another_stream_waits(location):
    streams, storage = Streams(), Storage(KIB, device=location)
    with streams.s:
        storage.write_host(b"\x05" * KIB)
        lease = storage.read()
    with streams.t:
        streams.copy_out(lease.cupy().data.ptr, KIB, streams.t)
    streams.expect(5, KIB, streams.t)
    lease.release()


def an_array_that_is_still_being_computed_is_waited_for(location):
    streams = Streams()
    cache = LatentKvCache.with_capacity(1, 4, [(256,)], "uint8", location)
    with streams.t:
        source = cupy.empty((4, 256), np.uint8)
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s:
        step = cache.step(4)
    with streams.t:
        source.data.memset_async(5, KIB)
        step.append(0, [source])
        source.data.memset_async(9, KIB)  # it may be used again at once
    step.commit()
    with streams.s, cache.read(0) as rows:
        streams.copy_out(rows[0].address, KIB, streams.s)
    streams.expect(5, KIB, streams.t, streams.s)


def an_array_of_a_library_with_its_own_stream_is_waited_for(location):
    for order in ("s", "t"), ("t", "s"):
        streams = Streams()
        cache = LatentKvCache.with_capacity(1, 4, [(256,)], "uint8", location)
        source = cupy.empty((4, 256), np.uint8)
        cupy.cuda.runtime.deviceSynchronize()
        LibraryArray.stream = streams.t.ptr
        with streams.s, cache.step(4) as step:
            source.data.memset_async(5, KIB, streams.t)
            step.append(0, [LibraryArray(source)])
            source.data.memset_async(9, KIB, streams.t)
        with streams.s, cache.read(0) as rows:
            streams.copy_out(rows[0].address, KIB, streams.s)
        streams.expect(5, KIB, *(getattr(streams, name) for name in order))


def a_device_waits_for_another(location):
    if len(LOCATIONS) < 2:
        return
    streams, storage, there = Streams(), Storage(KIB, device=location), Storage(KIB, device="cuda:1")
    with streams.s:
        storage.write_host(b"\x05" * KIB)
        with storage.read() as lease, there.write() as target:
            target.copy_from(lease)
    with streams.t:
        storage.write_host(b"\x09" * KIB)
    with cupy.cuda.Device(1):
        cupy.cuda.runtime.streamSynchronize(0)
    assert set(device_bytes(there.address, KIB)) == {5}


def a_cache_moves_while_its_rows_are_being_written(location):
    streams = Streams()
    cache = LatentKvCache.with_capacity(2, 8, [(256,)], "uint8", location)
    cupy.cuda.runtime.deviceSynchronize()
    with streams.s, cache.step(4) as step:
        for layer in range(2):
            step.append(layer, [np.full((4, 256), 7, np.uint8)])
    with streams.t:
        moved = cache.to(location)
        with moved.read(1) as rows:
            streams.copy_out(rows[0].address, KIB, streams.t)
    streams.expect(7, KIB, streams.t)


PROGRAMS = {
    name: program
    for name, program in globals().items()
    if callable(program)
    and getattr(program, "__module__", "") == __name__
    and name.startswith(("a_", "an_", "the_", "fresh_", "memory_", "many_"))
}
