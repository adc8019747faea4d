"""Fails unless a wheel holds what a user needs and none of the sources of the extension."""

import fnmatch
import sys
from zipfile import ZipFile

WANTED = [
    *("lkv/_storage.*.so", "lkv/_storage.pxd", "lkv/_storage.pyi", "lkv/py.typed", "lkv/include/lkv.h"),
    *("lkv/tiny/*.safetensors", "lkv/tiny/NOTICE"),
    *("lkv/bench/run.py", "lkv/bench/peers.c", "lkv/bench/threads.cpp"),
]
UNWANTED = ["*.pyx", "*.pxi", "*.cpp", "*.hpp", "*.c", "*.o", "tests/*", "lkv/_core/*", "lkv/_pyx/*"]


def main(path):
    names = ZipFile(path).namelist()
    missing = [pattern for pattern in WANTED if not fnmatch.filter(names, pattern)]
    surplus = sorted({name for pattern in UNWANTED for name in fnmatch.filter(names, pattern)} - set(WANTED))
    if missing or surplus:
        sys.exit(f"{path}: missing {missing}, surplus {surplus}")


main(sys.argv[1])
