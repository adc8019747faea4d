"""Python programs in a process of their own."""

import os
import subprocess
import sys
import textwrap


def begin(source, *args, **popen):
    """Start a program; a crash of it leaves a traceback."""
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source), *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ.copy(), **{**pipes, **popen})


def run(source, *args, code=0, timeout=120):
    """Run a program to its end, expect its exit code, and return what it printed."""
    with begin(source, *args) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out
