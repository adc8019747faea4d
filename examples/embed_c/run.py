"""Compiles decode.c against the lkv and the libpython of this interpreter, and runs it."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import lkv

libdir, version = sysconfig.get_config_vars("LIBDIR", "LDVERSION")
headers = [f"-I{lkv.get_include()}", f"-I{sysconfig.get_path('include')}"]
python = [f"-L{libdir}", f"-Wl,-rpath,{libdir}", f"-lpython{version}", "-pthread"]
with tempfile.TemporaryDirectory() as folder:
    program = Path(folder) / "decode"
    source = Path(__file__).with_name("decode.c")
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", *headers, source, "-o", program, *python], check=True)
    # The embedded interpreter finds its packages by the python3 that is first on PATH.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    sys.exit(subprocess.run([program], env=os.environ | {"PATH": path}).returncode)
