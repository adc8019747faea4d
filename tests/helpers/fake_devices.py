"""Devices in Python over host memory that lkv may not touch directly: a plain one, and one that queues its work."""

import ctypes
import itertools
import threading
from collections import deque

from lkv.devices import CopyKind, Device


class PlainDevice(Device):
    """Every call is done when it returns. `fail_next` makes one method fail once."""

    name = "plain"

    def __init__(self, ordinal=0, capacity=1 << 30):
        self.ordinal = ordinal
        self.capacity = capacity
        self.blocks = {}
        self.lock = threading.Lock()
        self.fail_next = None
        self.calls = deque(maxlen=1000)

    def _called(self, method):
        self.calls.append(method)
        if self.fail_next == method:
            self.fail_next = None
            raise RuntimeError(f"injected failure of {method}")

    def allocate(self, nbytes):
        self._called("allocate")
        with self.lock:
            used = sum(len(block) for block in self.blocks.values())
            if nbytes > self.capacity - used:
                raise MemoryError(f"{nbytes} bytes asked for, {self.capacity - used} free")
            block = (ctypes.c_char * (nbytes + 256))()
            address = -(-ctypes.addressof(block) // 256) * 256
            self.blocks[address] = block
            return address

    def free(self, address, nbytes):
        with self.lock:
            del self.blocks[address]

    def copy_2d(self, kind, dst, dst_pitch, src, src_pitch, width, height, stream):
        assert kind in tuple(CopyKind)
        self._called("copy_2d")
        for row in range(height):
            ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

    def fill_zero(self, address, nbytes, stream):
        self._called("fill_zero")
        ctypes.memset(address, 0, nbytes)

    def memory_info(self):
        with self.lock:
            used = sum(len(block) - 256 for block in self.blocks.values())
        return self.capacity - used, self.capacity


class QueueingDevice(PlainDevice):
    """Work waits in its stream's queue until somebody synchronises: the laziest order that a real device may take."""

    name = "queueing"

    def __init__(self, ordinal=0, capacity=1 << 30):
        super().__init__(ordinal, capacity)
        self.queues = {}
        self.reached = set()
        self.tickets = itertools.count(1)
        self.of_thread = threading.local()
        self.draining = threading.RLock()

    def use_stream(self, stream):
        self.of_thread.stream = stream

    def current_stream(self):
        return getattr(self.of_thread, "stream", 0)

    def _push(self, stream, work):
        with self.draining:
            self.queues.setdefault(stream, deque()).append(work)

    def copy_2d(self, kind, dst, dst_pitch, src, src_pitch, width, height, stream):
        self._called("copy_2d")
        if kind == CopyKind.HOST_TO_DEVICE:
            taken = [ctypes.string_at(src + row * src_pitch, width) for row in range(height)]

            def upload():
                for row, data in enumerate(taken):
                    ctypes.memmove(dst + row * dst_pitch, data, width)

            self._push(stream, upload)
            return

        def move():
            for row in range(height):
                ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

        self._push(stream, move)
        if kind == CopyKind.DEVICE_TO_HOST:
            self.synchronize(stream)

    def fill_zero(self, address, nbytes, stream):
        self._called("fill_zero")
        self._push(stream, lambda: ctypes.memset(address, 0, nbytes))

    def free(self, address, nbytes):
        with self.draining:
            for stream in list(self.queues):
                self.synchronize(stream)
        super().free(address, nbytes)

    def synchronize(self, stream):
        with self.draining:
            queue = self.queues.get(stream, ())
            while queue:
                queue.popleft()()

    def record_event(self, stream):
        self._called("record_event")
        event = (stream, next(self.tickets))
        self._push(stream, lambda: self.reached.add(event))
        return event

    def wait_event(self, stream, event):
        self._called("wait_event")

        def wait():
            if event not in self.reached:
                self.synchronize(event[0])

        self._push(stream, wait)

    def event_done(self, event):
        with self.draining:
            return event in self.reached
