import os
import signal
import time

import pytest
from helpers.scripts import begin, run

LONG = bool(os.environ.get("LKV_LONG"))
HAS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")


# ---- Ctrl-C ----

INTERRUPTED = """
    import os, signal, sys, threading, time
    import lkv

    storage = lkv.Storage((16, 4))
    cache = lkv.LatentKvCache.with_capacity(1, 16, [(4,)], "f32")
    taken, done = threading.Event(), threading.Event()

    def hold():
        with storage.write(0, 8), cache.step(2) as step:
            taken.set()
            done.wait(60)
            step.abandon()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    waits = {
        "read": lambda: storage.read(),
        "write": lambda: storage.write(4, 12, timeout=60),
        "write_host": lambda: storage.write_host(bytes(64)),
        "step": lambda: cache.step(1),
        "advance_by": lambda: cache.advance_by(0),
    }
    sent = [0.0]

    def interrupt():
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    for name, wait in waits.items():
        timer = threading.Timer(0.1, interrupt)
        timer.start()
        try:
            wait()
        except KeyboardInterrupt:
            late = time.monotonic() - sent[0]
        else:
            sys.exit(f"{name} was not interrupted")
        timer.join()
        assert late < 0.5, (name, late)
        # The place in the queue is given up: who comes later is not held up by it.
        storage.write(8, 16, timeout=0).release()
    done.set()
    holder.join()
    with storage.write(timeout=5), cache.step(1) as step:
        step.abandon()
    assert storage.refcount == 1
    print("fine")
"""


def test_ctrl_c_interrupts_a_wait_and_the_queue_goes_on():
    assert run(INTERRUPTED) == "fine\n"


def test_a_signal_handler_that_returns_lets_the_wait_go_on_in_its_place():
    source = """
        import signal, threading, time
        import lkv

        storage = lkv.Storage(16)
        calls = []
        signal.signal(signal.SIGALRM, lambda *_: calls.append(time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        taken = threading.Event()

        def hold():
            with storage.write():
                taken.set()
                time.sleep(0.5)

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        before = len(calls)
        with storage.read():
            assert len(calls) - before >= 3, len(calls) - before
        try:
            with storage.read():
                storage.write(timeout=0.3)
        except TimeoutError:
            print("fine")
        signal.setitimer(signal.ITIMER_REAL, 0)
    """
    assert run(source) == "fine\n"


def test_ctrl_c_from_outside_ends_a_process_that_waits():
    source = """
        import threading
        import lkv

        storage = lkv.Storage(16)
        lease = threading.Thread(target=lambda: kept.append(storage.write()))
        kept = []
        lease.start()
        lease.join()
        print("waiting", flush=True)
        storage.read()
    """
    with begin(source) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err


# ---- fork ----

FORKED = """
    import os, sys, threading, warnings
    import numpy as np
    import lkv
    from lkv import errors

    warnings.simplefilter("ignore", DeprecationWarning)
    storage = lkv.Storage((64, 64), "f32")
    storage.write_host(bytes(range(256)))
    cache = lkv.LatentKvCache.with_capacity(2, 64, [(64,), ()], "f32")
    row = [np.ones((1, 64), "f4"), np.ones(1, "f4")]
    for layer in range(2):
        cache.append(layer, row)
    cache.advance_by(1)
    array = storage.read(0, 1).numpy()
    lease, written, view, step = storage.read(0, 32), storage.write(32, 64), cache.read(0), cache.step(1)
    step.append(0, row)
    other = lkv.Storage(64)
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            with other.write():
                pass

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()

    def refused(use, *args):
        try:
            use(*args)
        except errors.ForkedError:
            return
        except BaseException as error:
            os.write(2, f"{use} {args}: {error!r}\\n".encode())
            os._exit(3)
        os.write(2, f"{use} {args}: no error\\n".encode())
        os._exit(4)

    def child():
        refused(storage.read)
        refused(storage.read, 8, 9, 0)
        refused(storage.write, 8, 9, 0.01)
        refused(other.write)
        refused(other.read_host)
        refused(other.write_host, b"1")
        refused(other.release_rows)
        refused(other.copy)
        refused(cache.append, 0, row)
        refused(cache.advance_by, 0)
        refused(cache.truncate_to, 0)
        refused(cache.read, 0)
        refused(cache.step, 1)
        refused(cache.wipe)
        refused(cache.clear)
        refused(cache.gather, 0, [0])
        refused(step.append, 1, row)
        refused(step.reserve, 0)
        refused(step.view, 0)
        refused(step.commit)
        assert bytes(array) == bytes(range(256))
        assert view[0].numpy().tolist() == [[1.0] * 64]
        assert storage.nbytes == 16384 and storage.id and repr(cache) and cache.cached_len == 1
        for held in (lease, written, view):
            held.release()
        step.abandon()
        fresh = lkv.Storage((64, 4))
        fresh.write_host(b"abcd")
        with fresh.read(0, 1) as rows:
            assert bytes(rows) == b"abcd"
        mine = lkv.LatentKvCache.with_capacity(1, 8, [(64,), ()], "f32")
        with mine.step(1) as own:
            own.append(0, row)
        assert mine.cached_len == 1

    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            os.write(2, f"{type(error)}: {error}\\n".encode())
            os._exit(5)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stop.set()
    for thread in threads:
        thread.join()
    # The parent has lost nothing.
    step.append(1, row)
    step.commit()
    assert cache.cached_len == 2
    view.release()
    written.release()
    lease.release()
    del array
    storage.write(timeout=5).release()
    print("fine")
"""


@HAS_FORK
def test_a_child_is_refused_what_was_made_before_the_fork_and_exits_cleanly():
    assert run(FORKED) == "fine\n"


@HAS_FORK
def test_a_child_that_leaves_open_blocks_of_its_parent_exits_cleanly():
    source = """
        import os, sys
        import lkv
        from lkv import errors

        storage = lkv.Storage(16)
        cache = lkv.LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
        pid = 0
        try:
            with storage.write() as lease, cache.step(1) as step:
                pid = os.fork()
                if pid == 0:
                    sys.exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                step.abandon()
        finally:
            if pid == 0:
                os.write(1, b"child\\n")
        assert storage.version == 1 and not storage.poisoned
        print("parent")
    """
    assert run(source) == "child\nparent\n"


@HAS_FORK
def test_multiprocessing_by_fork_works_with_exports_of_the_parent():
    source = """
        import multiprocessing, warnings
        import numpy as np
        import lkv

        warnings.simplefilter("ignore", DeprecationWarning)
        storage = lkv.Storage((8, 4), "f32")
        lease = storage.write()
        lease.numpy()[...] = 3
        lease.downgrade()
        array = lease.numpy()

        def total(row):
            own = lkv.Storage(4, "f32")
            with own.write() as lease:
                lease.numpy()[...] = array[row]
            with own.read() as lease:
                return float(lease.numpy().sum())

        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(sum(pool.map(total, range(8))))
    """
    assert run(source) == "96.0\n"


@HAS_FORK
def test_a_fork_while_others_wait_hangs_nobody():
    source = """
        import os, threading, time, warnings
        import lkv

        warnings.simplefilter("ignore", DeprecationWarning)
        storage = lkv.Storage(64)
        stop = threading.Event()

        def churn(lo):
            while not stop.is_set():
                with storage.write(lo, lo + 32):
                    storage.release_rows(60, 64) if lo < 16 else None

        threads = [threading.Thread(target=churn, args=(8 * i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            pid = os.fork()
            if pid == 0:
                try:
                    storage.read(timeout=0)
                except lkv.errors.ForkedError:
                    lkv.Storage(8).write_host(b"1")
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join(30)
        print("fine")
    """
    assert run(source) == "fine\n"


# ---- the end of the interpreter ----

# Imports once; every child of it ends the way a whole interpreter does.
ENDS = """
    import atexit, os, sys, threading, time, warnings
    import numpy as np
    import lkv

    warnings.simplefilter("ignore", DeprecationWarning)
    runs = int(sys.argv[1])

    def scene(turn):
        storage = lkv.Storage((64, 64), "f32")
        cache = lkv.LatentKvCache.with_capacity(1, 64, [(64,)], "f32")
        row = [np.ones((1, 64), "f4")]
        globals().update(storage=storage, cache=cache)
        globals().update(array=storage.read(0, 8).numpy(), lease=storage.write(8, 16))
        globals().update(view=memoryview(storage.read(16)))
        globals().update(step=cache.step(1), wrapped=lkv.Storage.wrap(np.zeros(64)).alias().numpy())
        ready = threading.Barrier(8)

        def wait(use):
            ready.wait()
            try:
                use()
            except lkv.errors.ShutdownError:
                pass

        def churn():
            other = lkv.Storage(64)
            ready.wait()
            while True:
                with other.write():
                    pass
                lkv.Storage.wrap(np.zeros(8))

        def steps():
            own = lkv.LatentKvCache.with_capacity(1, 8, [(64,)], "f32")
            ready.wait()
            while True:
                with own.step(1) as open_step:
                    open_step.append(0, row)
                own.truncate_to(0)

        work = [
            lambda: wait(lambda: storage.write(0, 12)), lambda: wait(lambda: storage.read(8, 9)),
            lambda: wait(lambda: storage.write(timeout=100)), lambda: wait(lambda: cache.step(1)),
            lambda: wait(lambda: cache.advance_by(0)), churn, steps,
        ]
        for target in work:
            threading.Thread(target=target, daemon=True).start()
        ready.wait()
        time.sleep(0.001 * (turn % 5))
        if turn % 3 == 1:
            class Node: pass
            node = Node()
            node.me, node.held = node, (lkv.Storage(8).write(), cache, step)
        if turn % 3 == 2:
            atexit.register(lambda: storage.version and lkv.Storage(8).write_host(b"1"))
        sys.exit(turn % 2)

    for turn in range(runs):
        pid = os.fork()
        if pid == 0:
            scene(turn)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == turn % 2, (turn, code)
    print("fine")
"""


@HAS_FORK
def test_the_interpreter_ends_whatever_is_held_or_waited_for():
    count = "500" if LONG else "50"
    with begin(ENDS, count) as one, begin(ENDS, count) as two:
        for process in (one, two):
            out, err = process.communicate(timeout=250)
            assert (process.returncode, out) == (0, "fine\n"), err


WHOLE = """
    import sys, threading
    import numpy as np
    import lkv

    storage = lkv.Storage(64)
    kept = [storage.write(0, 8), storage.read(8, 16).numpy(), memoryview(storage.read(8, 16))]
    cache = lkv.LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
    step = cache.step(1)
    if "torch" in sys.argv:
        import torch
        tensors = [storage.read(8, 16).torch(), torch.from_dlpack(lkv.Storage((4, 4), "bf16").write())]
    for use in (storage.write, lambda: storage.write(timeout=50), lambda: cache.step(1)):
        threading.Thread(target=use, daemon=True).start()
    print("end")
"""


@pytest.mark.parametrize("turn", range(10 if LONG else 2))
def test_a_process_ends_with_waiters_in_daemon_threads(turn):
    assert run(WHOLE) == "end\n"


def test_a_process_ends_with_tensors_in_its_globals():
    pytest.importorskip("torch")
    assert run(WHOLE, "torch") == "end\n"


@pytest.mark.parametrize("block", ["storage.write()", "storage.read()", "cache.step(1)", "cache.read(0)"])
def test_sys_exit_inside_a_block_ends_with_its_code(block):
    source = f"""
        import sys
        import lkv

        storage = lkv.Storage(64)
        cache = lkv.LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
        with {block} as held:
            sys.exit(7)
    """
    run(source, code=7)


def test_an_exit_handler_registered_before_lkv_runs_after_its_end_and_still_may_use_it():
    source = """
        import atexit

        def last():
            with storage.read() as lease:
                assert bytes(lease) == b"abcd"
            storage.write(timeout=1).release()
            with cache.step(1) as step:
                step.append(0, [np.ones((1, 4), "f4")])
            try:
                held = storage.write()
                storage.write(timeout=5)
            except (lkv.errors.ShutdownError, lkv.errors.LeaseTimeoutError) as error:
                print(type(error).__name__, cache.cached_len)

        atexit.register(last)
        import numpy as np
        import lkv

        storage = lkv.Storage(4)
        storage.write_host(b"abcd")
        cache = lkv.LatentKvCache.with_capacity(1, 8, [(4,)], "f32")
        atexit.register(lambda: print(bytes(storage.read())))
    """
    assert run(source) == "b'abcd'\nShutdownError 1\n"


def test_objects_that_use_a_storage_while_modules_are_torn_down_are_safe():
    source = """
        import lkv

        class Late:
            def __init__(self):
                self.storage = lkv.Storage(64)
                self.lease = self.storage.write()

            def __del__(self):
                self.lease.release()
                self.storage.write_host(b"x" * 64)
                print(self.storage.read_host(0, 4))

        late = Late()
        late.me = late
    """
    assert run(source) == "b'xxxx'\n"


def test_a_subinterpreter_refuses_the_module_or_uses_it():
    source = """
        import sys, warnings
        import lkv

        warnings.simplefilter("ignore")
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        code = "import lkv\\nlkv.Storage(8).write_host(b'1')"
        made = interpreters.create()
        try:
            run = getattr(interpreters, "exec", None) or interpreters.run_string
            failed = run(made, code)
        except Exception as error:
            failed = error
        interpreters.destroy(made)
        lkv.Storage(8).write_host(b"1")
        print("fine")
    """
    assert run(source).endswith("fine\n")
