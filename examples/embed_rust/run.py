"""Compiles lib.rs with rustc, hands it the table's address, and publishes what it decodes."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import lkv

with tempfile.TemporaryDirectory() as folder:
    built = Path(folder) / "libruntime.so"
    flags = ["--edition", "2021", "--crate-type", "cdylib", "-O"]
    subprocess.run(["rustc", *flags, Path(__file__).with_name("lib.rs"), "-o", built], check=True)
    runtime = ctypes.CDLL(str(built))

cache = lkv.LatentKvCache.with_capacity(n_layers=3, max_seq_len=8, slot_trailing=[(4,)], dtype="float32")
handles = (ctypes.c_size_t * 3)(*(cache.slot_storage(layer, 0).handle for layer in range(3)))
for token in range(8):
    status = runtime.decode(ctypes.c_size_t(lkv.c_api_address()), handles, ctypes.c_size_t(3), ctypes.c_int64(token))
    assert status == 0, status
    for layer in range(3):
        cache.note_write(layer, 1)
    print(cache.advance_by(1), "tokens")
with cache.read(2) as view:
    print(view.numpy()[0][:, 0])
