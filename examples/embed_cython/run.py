"""Compiles sampler.pyx against this interpreter's lkv, and uses it on rows of a cache."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from Cython.Compiler.Main import compile as to_c

import lkv

headers = [f"-I{lkv.get_include()}", f"-I{sysconfig.get_path('include')}"]
with tempfile.TemporaryDirectory() as folder:
    source, built = Path(folder) / "sampler.c", Path(folder) / f"sampler{sysconfig.get_config_var('EXT_SUFFIX')}"
    sampler = Path(__file__).with_name("sampler.pyx")
    beside_lkv = str(Path(lkv.__file__).parents[1])  # for an editable install, which Cython does not find by itself
    to_c(str(sampler), output_file=str(source), language_level=3, include_path=[beside_lkv])
    compiler = [os.environ.get("CC", "cc"), "-O2", "-fPIC", "-shared"]
    subprocess.run([*compiler, *headers, source, "-o", built], check=True)
    sys.path.insert(0, folder)
    import sampler

cache = lkv.LatentKvCache.with_capacity(n_layers=1, max_seq_len=64, slot_trailing=[(8,)], dtype="float32")
with cache.step(4) as step:
    step.append(0, [np.arange(32, dtype="f4").reshape(4, 8)])
storage = cache.slot_storage(0, 0)
with storage.read(0, 2) as lease:
    print(sampler.largest_of_lease(lease))
print(sampler.largest_of_rows(storage, 0, cache.cached_len))
