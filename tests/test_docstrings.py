"""Docstrings are there, and say the same as signatures, stubs and errors do."""

import ast
import builtins
import importlib
import inspect
import re
from itertools import zip_longest
from pathlib import Path

import pytest

import lkv
from lkv import _storage, errors

MODULES = (
    "lkv",
    "lkv.devices",
    "lkv.errors",
    "lkv.inspect",
    "lkv.mla",
    "lkv.persist",
    "lkv.plan",
    "lkv.plot",
    "lkv.testing",
)
COMPILED = ("Bits", "LayerRows", "Lease", "SlotTable", "Step", "Storage", "View")
STUB = Path(lkv.__file__).with_name("_storage.pyi")
SECTIONS = ("Parameters", "Returns", "Raises", "Attributes", "Notes", "Examples", "Yields", "Warns", "See Also")


def _public():
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and not hasattr(found, "__origin__"):  # no constant, no module, no alias of a type
                yield f"{module.__name__}.{name}", found
    for name in COMPILED:
        yield f"lkv._storage.{name}", getattr(_storage, name)


def _members():
    """Public methods and properties, with the classes they are written in."""
    for path, found in PUBLIC.items():
        if inspect.isclass(found):
            for name, member in vars(found).items():
                inner = getattr(member, "__func__", member)
                described = isinstance(inner, property) or inspect.isroutine(inner) or inspect.isgetsetdescriptor(inner)
                if described and not name.startswith("_"):
                    yield f"{path}.{name}", inner


def sections(docstring):
    """The summary, and the numpydoc sections of a docstring by name, as lines."""
    lines, found, current = inspect.cleandoc(docstring).splitlines(), {}, []
    summary = lines[0] if lines else ""
    for line, following in zip_longest(lines, lines[1:], fillvalue=""):
        if following and set(following) == {"-"} and len(following) == len(line):
            current = found.setdefault(line, [])
        elif not (line and set(line) == {"-"}):
            current.append(line)
    return summary, found


def names(lines):
    """The names that a section describes: ``lo, hi : int`` are two."""
    heads = [line for line in lines if line and not line[0].isspace()]
    return [name.strip(" *") for head in heads for name in head.partition(" : ")[0].split(",")]


def parameters(path, found):
    """The names in a signature; None where Python knows none."""
    if inspect.isclass(found) and path.rpartition(".")[0] in ("lkv._storage", "lkv") and found.__name__ in STUBS:
        known = STUBS[found.__name__].get("__init__")
    else:
        # A class may have a __new__ of another form; people read __init__.
        call = found.__init__ if inspect.isfunction(getattr(found, "__init__", None)) else found
        try:
            known = list(inspect.signature(call).parameters)
        except (TypeError, ValueError):
            known = None
    return known and [name for name in known if name not in ("self", "cls")]


def stubs():
    """Parameters of every method and function in the stub of the compiled module."""
    tree, found = ast.parse(STUB.read_text()), {}
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                owner = node.name if isinstance(node, ast.ClassDef) else ""
                given = inner.args
                every = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                found.setdefault(owner, {})[inner.name] = every
    return found


PUBLIC = dict(_public())
MEMBERS = dict(_members())
STUBS = stubs()
ALL = PUBLIC | MEMBERS


@pytest.mark.parametrize("path", ALL)
def test_a_public_name_has_a_summary_in_one_line(path):
    docstring = ALL[path].__doc__ or ""
    if inspect.isclass(ALL[path]) and docstring == getattr(ALL[path].__base__, "__doc__", None):
        docstring = ""
    summary, found = sections(docstring)
    assert re.search(r"[.:]$|[.)] ?`*$", summary), f"{path}: {summary!r} is no sentence"
    assert len(summary) <= 120
    assert set(found) <= set(SECTIONS), path
    assert all(any(line.strip() for line in lines) for lines in found.values()), f"{path}: an empty section"


@pytest.mark.parametrize("path", [path for path in ALL if "Parameters\n" in (ALL[path].__doc__ or "")])
def test_the_parameters_described_are_those_of_the_signature(path):
    described = names(sections(ALL[path].__doc__)[1]["Parameters"])
    known = parameters(path, ALL[path])
    assert known is not None, f"{path} has parameters and no signature"
    assert described == [name for name in known if name in described], f"{path}: {described} of {known}"
    assert set(known) - set(described) <= {"args", "kwargs"}, f"{path}: {set(known) - set(described)} not described"


@pytest.mark.parametrize("path", [path for path in ALL if "Raises\n" in (ALL[path].__doc__ or "")])
def test_what_is_raised_is_an_exception_that_there_is(path):
    for name in names(sections(ALL[path].__doc__)[1]["Raises"]):
        assert issubclass(getattr(errors, name, None) or getattr(builtins, name), BaseException), f"{path}: {name}"


@pytest.mark.parametrize("owner", STUBS)
def test_the_stub_has_the_parameters_of_the_compiled_module(owner):
    container = getattr(_storage, owner) if owner else _storage
    for name, expected in STUBS[owner].items():
        if name.startswith("__"):
            continue  # special methods of compiled classes have no signature, or are of a newer Python
        try:
            signature = inspect.signature(getattr(container, name))
        except (TypeError, ValueError):
            continue
        assert list(signature.parameters) == expected, f"{owner}.{name}"


@pytest.mark.parametrize("owner", COMPILED)
def test_the_stub_has_every_public_name_of_a_compiled_class(owner):
    node = next(node for node in ast.parse(STUB.read_text()).body if getattr(node, "name", "") == owner)
    declared = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    declared |= {inner.target.id for inner in node.body if isinstance(inner, ast.AnnAssign)}
    public = {name for name in vars(getattr(_storage, owner)) if not name.startswith("_")}
    assert public == {name for name in declared if not name.startswith("_")}


def test_the_checks_find_what_is_wrong():
    summary, found = sections(
        "Do it.\n\n    More.\n\n    Parameters\n    ----------\n    a, b : int\n        Two.\n    *c\n"
    )
    assert summary == "Do it."
    assert names(found["Parameters"]) == ["a", "b", "c"]
    assert parameters("x", lambda self, a, *, b: 0) == ["a", "b"]
    assert STUBS["Storage"]["read"] == ["self", "lo", "hi", "timeout"]
