"""Every block of code in README.md and docs/ runs, compiles, and prints what it says."""

import re
from pathlib import Path

import pytest
from helpers import documents

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.is_file()]
CI = ROOT / ".ci" / "run"

checkout = pytest.mark.skipif(
    not (ROOT / "README.md").is_file() or not (ROOT / "docs").is_dir(),
    reason="README.md and docs/ are only in a checkout",
)


@checkout
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.check_page(page, tmp_path)


@checkout
def test_what_is_left_to_ci_is_run_by_ci():
    commands = [
        command
        for page in PAGES
        for block in documents.blocks(page.read_text())
        if block.value == "CI runs it"
        for command in block.body.strip().splitlines()
    ]
    assert commands[:2] == ["pip install . && lkv demo", "pip install '.[test]' && pytest"]
    if CI.is_file():  # not in an sdist
        script = CI.read_text()
        assert [command for command in commands if command not in script] == []


@checkout
def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", navigation, re.M)) == pages


@checkout
def test_every_public_name_is_in_the_reference():
    import lkv
    from lkv import devices, errors, plan

    reference = "".join(page.read_text() for page in PAGES if page.parent.name == "api")
    names = set(re.findall(r"^::: ([\w.]+)$", reference, re.M))
    assert {f"lkv.{name}" for name in lkv.__all__ if name not in ("__version__", "errors")} <= names
    assert {module.__name__ for module in (devices, errors, plan)} <= names


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "printed\n1"),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2, x\n```\n", "1"),
        ("<!-- not run: no time -->\n```python\nx\n```\n", "no time"),
        ("```\nx\n```\n", "no check for a block of 'no language'"),
        ("```go\nx\n```\n", "no check for a block of 'go'"),
        ("- a list\n\n  ```python\n  x\n  ```\n", "indented"),
        ("```python\nx\n", "not closed"),
        ("```c\nint f(void) { return g(); }\n```\n", "page.md:1: "),
        ("```c\nint f(int x) { return 0; }\n```\n", "unused parameter"),
        ("<!-- in a function of (int x) -->\n```c\nx = y;\n```\n", "page.md:2: "),
        ("```cpp\nint f(int *x) { return (long)x; }\n```\n", "page.md:1: "),
        ("```rust\nfn unused() {}\n```\n", "page.md:1: "),
        ("```cython\nfrom lkv._storage cimport nothing_like_it\n```\n", "page.md:1: "),
        ("```console\nlkv no-such-command\n```\n", "page.md:1: "),
        ("```console\nrm -r x\n```\n", "cannot run 'rm -r x'"),
    ],
)
def test_a_wrong_block_is_found(page, says, tmp_path):
    with pytest.raises(AssertionError, match=re.escape(says)):
        documents.check_page(documents.written(tmp_path, "page.md", page), tmp_path)


def test_a_right_page_passes(tmp_path):
    page = (
        "```python\nx = [1, 2]\nprint(x, 'at', hex(id(x)), 'alloc 7')\n```\n\n```text\n[1, 2] at 0x... alloc 1\n```\n\n"
        "Text that is no output:\n\n```text\nanything\n```\n\n"
        "```c\n#include <lkv.h>\nlkv_lease *f(lkv_lease *x) { return x; }\n```\n\n"
        "<!-- in a function of (const lkv_api *api, lkv_buffer *x) -->\n```c\napi->buffer_retain(x);\n```\n\n"
        "```cython\nfrom lkv._storage cimport Storage\n\ndef f(Storage s):\n    return <size_t>s.buffer\n```\n\n"
        "```rust\n/// One.\npub fn one() -> i32 { 1 }\n```\n\n"
        "```console\nlkv --version # prints it\n```\n\n"
        "<!-- not run: needs a GPU -->\n```python\nimport no_such_module\n```\n"
    )
    documents.check_page(documents.written(tmp_path, "page.md", page), tmp_path)


def test_a_block_that_needs_what_is_not_installed_is_left_out_and_the_others_checked(tmp_path):
    page = "<!-- needs: no_such_module -->\n```python\nimport no_such_module\n```\n\n```python\nx = 1\n```\n\n"
    with pytest.raises(pytest.skip.Exception, match="some blocks need no_such_module, which is not installed"):
        documents.check_page(documents.written(tmp_path, "page.md", page), tmp_path)
    with pytest.raises(AssertionError, match="no check"):
        documents.check_page(documents.written(tmp_path, "page.md", page + "```go\nx\n```\n"), tmp_path)
