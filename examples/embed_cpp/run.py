"""Compiles attention.cpp against this interpreter's lkv, and attends over a cache with it."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import lkv

headers = [f"-I{lkv.get_include()}", f"-I{sysconfig.get_path('include')}"]
with tempfile.TemporaryDirectory() as folder:
    built = Path(folder) / f"attention{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread"]
    subprocess.run([*compiler, *headers, Path(__file__).with_name("attention.cpp"), "-o", built], check=True)
    sys.path.insert(0, folder)
    import attention

cache = lkv.LatentKvCache.with_capacity(n_layers=4, max_seq_len=64, slot_trailing=[(8,)], dtype="float32")
with cache.step(3) as step:
    for layer in range(4):
        step.append(layer, [np.full((3, 8), layer, "f4")])
slots = [cache.slot_storage(layer, 0).capsule() for layer in range(4)]
print(attention.scores(slots, cache.cached_len))
