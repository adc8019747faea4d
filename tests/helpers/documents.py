"""Takes the fenced blocks out of a Markdown page, and checks each by what its language says."""

import contextlib
import doctest
import gc
import importlib.util
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import compilers

import lkv

# The only reasons for which a block may be left out.
NOT_RUN = ("needs a GPU", "CI runs it", "installs packages", "takes minutes")
NOT_CODE = ("text", "toml", "json")

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\S*)[^\n]*\n(?P<body>.*?)^(?P=fence)[ ]*$", re.M | re.S)
_COMMENT = re.compile(r"<!--\s*(?P<name>not run|needs|in a function of)\s*:?\s*(?P<value>.*?)\s*-->\s*\Z", re.S)
_VARIES = re.compile(r"\balloc \d+")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    `after` is the text between the block before and this one, `mark` and `value` the comment right in front of it.
    """

    language: str
    body: str
    line: int
    after: str
    mark: str = ""
    value: str = ""


def blocks(page):
    """All fenced blocks of a page, in order."""
    found, end = [], 0
    for match in _FENCE.finditer(page):
        after = page[end : match.start()]
        comment = _COMMENT.search(after)
        mark = comment.groupdict() if comment else {"name": "", "value": ""}
        line = page.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], match["body"], line, after, mark["name"], mark["value"]))
        end = match.end()
    if len(re.findall(r"^\s*```", page, re.M)) != 2 * len(found):
        raise AssertionError("a fence is indented or not closed")
    return found


def check_page(path, scratch):
    """Run or compile every block of a page. Says the line of what fails."""
    gc.collect()  # a page may count what lives
    namespace, printed, skipped = {"__name__": "page"}, None, set()
    for block in blocks(path.read_text()):
        where = f"{path.name}:{block.line}"
        if block.mark == "not run":
            assert block.value in NOT_RUN, f"{where}: not run: {block.value!r} is none of {NOT_RUN}"
            printed = None
            continue
        if block.mark == "needs" and importlib.util.find_spec(block.value) is None:
            skipped.add(block.value)
            printed = None
            continue
        if block.language == "python":
            printed = run_python(block, where, namespace)
        elif block.language == "text" and printed is not None and not block.after.strip():
            check_output(block.body, printed, where)
            printed = None
        elif block.language not in NOT_CODE:
            CHECKS.get(block.language, unknown)(block, where, scratch)
            printed = None
    if skipped:
        pytest.skip(f"some blocks need {', '.join(sorted(skipped))}, which is not installed; the others are right")


def run_python(block, where, namespace):
    """Run a block in the page's namespace; return what it printed."""
    out = io.StringIO()
    code = compile("\n" * block.line + block.body, where, "exec")
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def check_output(expected, printed, where):
    """Compare; ``...`` stands for anything, and the number of an allocation may be another."""
    same = (_VARIES.sub("alloc N", text) for text in (expected, printed))
    assert doctest.OutputChecker().check_output(*same, doctest.ELLIPSIS), f"{where}: printed\n{printed}"


def check_c(block, where, scratch):
    """Compile; a block in front of which ``in a function of (...)`` stands is the body of a function."""
    body = block.body
    if block.mark == "in a function of":
        body = f"#include <lkv.h>\nvoid page{block.value};\nvoid page{block.value} {{\n{body}}}\n"
    source = written(scratch, f"line{block.line}.c", body)
    compiled(where, compilers.tool("cc"), *compilers.C11, "-fsyntax-only", *compilers.includes(), source)


def check_cpp(block, where, scratch):
    """Compile."""
    source = written(scratch, f"line{block.line}.cpp", block.body)
    compiled(where, compilers.tool("c++"), *compilers.CPP17, "-fsyntax-only", *compilers.includes(), source)


def check_rust(block, where, scratch):
    """Compile as a library, warnings being errors."""
    source = written(scratch, f"line{block.line}.rs", block.body)
    rustc = (compilers.tool("rustc"), "--edition=2021", "--crate-type=lib", "--emit=metadata", "-Dwarnings")
    compiled(where, *rustc, "--out-dir", scratch, source)


def check_cython(block, where, scratch):
    """Translate to C."""
    pytest.importorskip("Cython")
    source = written(scratch, f"line{block.line}.pyx", block.body)
    beside_lkv = Path(lkv.__file__).parents[1]
    compiled(where, sys.executable, "-m", "cython", "-3", "-Werror", "-I", beside_lkv, source)


def check_console(block, where, scratch):
    """Run the commands ``lkv ...`` and ``python -m lkv ...``; anything else has to say why it is not run."""
    for line in block.body.splitlines():
        words = shlex.split(line, comments=True)
        command = words[1:] if words[:1] == ["lkv"] else words[3:] if words[:3] == ["python", "-m", "lkv"] else None
        assert command is not None or not words, f"{where}: this test cannot run {line!r}; say why it is not run"
        if words:
            compiled(where, sys.executable, "-m", "lkv", *command, env=compilers.environment(), cwd=scratch)


def unknown(block, where, scratch):
    """Refuse a language for which there is no check."""
    raise AssertionError(f"{where}: no check for a block of {block.language or 'no language'!r}")


CHECKS = {
    "c": check_c,
    "cpp": check_cpp,
    "rust": check_rust,
    "cython": check_cython,
    "console": check_console,
}


def written(folder, name, text):
    """Write a source file; return its path."""
    path = folder / name
    path.write_text(text)
    return path


def compiled(where, *command, **options):
    """Run a command; a failure says where in the page it comes from."""
    try:
        compilers.run(*command, **options)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None
