"""Builds programs and extension modules against the installed package, as an embedder would."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import lkv

CAPI = Path(__file__).parents[1] / "capi"
C11 = ("-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror")
CPP17 = ("-std=c++17", "-pedantic", "-Wall", "-Wextra", "-Wold-style-cast", "-Werror")


def tool(name):
    """The path of a compiler; skips the test when there is none."""
    found = shutil.which(os.environ.get({"cc": "CC", "c++": "CXX"}.get(name, ""), name))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def environment(**extra):
    """The environment of a fresh interpreter."""
    return os.environ | {"PYTHONSAFEPATH": "1"} | extra


def compiler_environment():
    """The environment without what a sanitized run preloads: compilers must not have it."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run(*command, env=None, timeout=240, **options):
    """Run a command; fail with its output when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=compiler_environment() if env is None else env,
        **options,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def includes():
    """The flags for the headers: lkv's under scrutiny, Python's not."""
    return [f"-I{lkv.get_include()}", "-isystem", sysconfig.get_path("include")]


def extension(source, folder, name, *, flags=None):
    """Compile an extension module; return its path."""
    out = folder / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    cpp = Path(source).suffix == ".cpp"
    flags = flags if flags is not None else (CPP17 if cpp else C11)
    run(
        tool("c++" if cpp else "cc"),
        *flags,
        "-O1",
        "-g",
        "-fPIC",
        "-shared",
        "-pthread",
        *includes(),
        source,
        "-o",
        out,
    )
    return out


def load(path, name):
    """Import an extension module from its path."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def embed_flags():
    """The flags that link a program with libpython; skips the test when it is static or missing."""
    variables = sysconfig.get_config_vars()
    folder = Path(variables["LIBDIR"])
    if not variables["Py_ENABLE_SHARED"] or not (folder / variables["LDLIBRARY"]).exists():
        pytest.skip("libpython is static or missing")
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-lpython{variables['LDVERSION']}", "-pthread"]


def embedded_environment():
    """An environment in which a program that embeds Python finds this one's packages: by the ``python3`` on PATH."""
    return environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
