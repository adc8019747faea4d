"""Builds the one extension module; everything else is in pyproject.toml.

Switches, all environment variables:
LKV_WERROR=1 turns warnings into errors, LKV_DEBUG=1 builds without optimisation and with the core's own checks,
LKV_COVERAGE=1 adds gcov and Cython line tracing, LKV_SANITIZE=address,undefined (or thread) the sanitizers.
"""

import os
import sys
from glob import glob

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup


def on(name):
    return os.environ.get(name, "0") not in ("", "0")


macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
directives = {
    "language_level": 3,
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "freethreading_compatible": True,
}
compile_args = ["-std=c++17", "-O3", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
link_args = ["-pthread"]

if sys.platform == "linux":
    compile_args.append("-fno-plt")
if on("LKV_WERROR"):
    compile_args.append("-Werror")
if on("LKV_DEBUG"):
    compile_args += ["-O0", "-g", "-UNDEBUG"]
    macros.append(("LKV_DEBUG", "1"))
if on("LKV_COVERAGE"):
    compile_args += ["-O0", "-g", "--coverage"]
    link_args.append("--coverage")
    macros.append(("CYTHON_TRACE", "1"))
    directives["linetrace"] = True
if sanitizers := os.environ.get("LKV_SANITIZE"):
    compile_args += ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    link_args.append(f"-fsanitize={sanitizers}")

storage = Extension(
    "lkv._storage",
    sources=["lkv/_storage.pyx", *sorted(glob("lkv/_core/*.cpp"))],
    depends=[*glob("include/*.h"), *glob("lkv/_core/*.h*"), *glob("lkv/*.pxd"), *glob("lkv/_pyx/*.pxi")],
    include_dirs=["include", "lkv/_core", np.get_include()],
    define_macros=macros,
    extra_compile_args=compile_args,
    extra_link_args=link_args,
    language="c++",
)

setup(
    packages=[*find_packages(include=["lkv", "lkv.*"]), "lkv.include", "lkv.bench"],
    package_dir={"lkv.include": "include", "lkv.bench": "benchmarks"},
    ext_modules=cythonize([storage], compiler_directives=directives),
)
