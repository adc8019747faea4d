"""Threads whose results and errors reach the test."""

import threading
import time
from concurrent.futures import Future

PATIENCE = 30.0  # seconds until a test is sure that something hangs


def start(function, *args):
    """Run a function in a thread of its own; its result or error comes from the future."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(condition):
    """Wait until a condition holds; it must come true whatever the load."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)
