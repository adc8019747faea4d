"""The C interface does not change without a new version."""

import hashlib
import re
from pathlib import Path

import pytest
from helpers import compilers

import lkv

HASHES = compilers.CAPI / "abi_hashes.txt"
LAYOUT = compilers.CAPI / "layout.c"


def header():
    return (Path(lkv.get_include()) / "lkv.h").read_text(encoding="utf-8")


def without_comments(text):
    return " ".join(re.sub(r"/\*.*?\*/", " ", text, flags=re.S).split())


def declarations(name):
    """The members of a public struct, normalised."""
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name} ?;", without_comments(header()))
    return [line.strip() for line in body[1].split(";") if line.strip()]


def member(declaration):
    return (re.search(r"\(\*(\w+)\)", declaration) or re.search(r"(\w+);?$", declaration))[1]


def structs():
    return re.findall(r"typedef struct (\w+) {", without_comments(header()))


def version(name):
    return int(re.search(rf"#define LKV_ABI_{name} (\d+)", header())[1])


def digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def of_the_rest():
    """Everything else that a compiled program has in it: the other structs, and the numbers of the constants."""
    text = without_comments(header())
    others = [line for name in structs() if name != "lkv_api" for line in (name, *declarations(name))]
    typedefs = re.findall(r"typedef (?!struct)[^;]+;", text)
    enums = re.findall(r"enum {(.*?)}", text)
    return digest([*others, *typedefs, *enums])


def recorded():
    """(major, minor) -> (members of the table, their hash, hash of the rest)."""
    rows = [line.split() for line in HASHES.read_text().splitlines() if line and not line.startswith("#")]
    return {tuple(map(int, row[0].split("."))): (int(row[1]), row[2], row[3]) for row in rows}


def line_now():
    table = declarations("lkv_api")
    return f"{version('MAJOR')}.{version('MINOR')} {len(table)} {digest(table)} {of_the_rest()}"


def test_the_interface_is_the_one_that_is_recorded_for_its_version():
    advice = "lkv.h changed: raise LKV_ABI_MINOR (members appended) or LKV_ABI_MAJOR, and add to"
    assert line_now() in HASHES.read_text().splitlines(), f"{advice} {HASHES.name}:\n{line_now()}"


def test_members_of_the_table_are_only_ever_appended():
    table = declarations("lkv_api")
    for (major, minor), (count, known, _) in recorded().items():
        if major == version("MAJOR"):
            assert digest(table[:count]) == known, f"the first {count} members are not those of {major}.{minor}"


def test_every_version_up_to_this_one_is_recorded_once():
    rows = [line.split()[0] for line in HASHES.read_text().splitlines() if line and not line.startswith("#")]
    assert len(rows) == len(set(rows))
    assert {minor for major, minor in recorded() if major == version("MAJOR")} == set(range(version("MINOR") + 1))


def test_a_changed_table_is_noticed(monkeypatch):
    changed = header().replace("uint64_t (*alloc_id_next)(void);", "uint32_t (*alloc_id_next)(void);")
    monkeypatch.setattr(f"{__name__}.header", lambda: changed)
    with pytest.raises(AssertionError, match="raise LKV_ABI_MINOR"):
        test_the_interface_is_the_one_that_is_recorded_for_its_version()


def test_a_changed_struct_is_noticed(monkeypatch):
    changed = header().replace("int64_t row_bytes;  /* > 0", "int32_t row_bytes;  /* > 0")
    assert changed != header()
    monkeypatch.setattr(f"{__name__}.header", lambda: changed)
    with pytest.raises(AssertionError, match="raise LKV_ABI_MINOR"):
        test_the_interface_is_the_one_that_is_recorded_for_its_version()


def test_a_changed_comment_is_not():
    assert without_comments("int a; /* one\n * two */ int b;") == "int a; int b;"


@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        ("cc", compilers.C11),
        ("clang", compilers.C11),
        ("c++", (*compilers.CPP17, "-x", "c++")),
        ("clang++", (*compilers.CPP17, "-x", "c++")),
    ],
)
def test_the_header_stands_alone_and_members_are_where_they_were(compiler, flags):
    compilers.run(compilers.tool(compiler), *flags, f"-I{lkv.get_include()}", "-fsyntax-only", LAYOUT)


def test_the_layout_asserts_name_every_member_of_every_struct():
    text = LAYOUT.read_text()
    for name in structs():
        assert f"SIZE({name}, " in text
        for declaration in declarations(name):
            assert f"AT({name}, {member(declaration)}, " in text


def test_every_function_of_the_table_says_what_it_does_and_from_which_threads():
    body = re.search(r"typedef struct lkv_api {(.*?)} lkv_api;", header(), flags=re.S)[1]
    pieces = re.findall(r"(/\*(?:(?!\*/).)*\*/)\s*([^;/]*;)", body, flags=re.S)
    commented = {member(" ".join(declaration.split())): comment for comment, declaration in pieces}
    for name in [member(line) for line in declarations("lkv_api")[3:]]:
        assert re.search(r"any\s[\s*]*thread", commented[name], flags=re.I), f"{name}: no word about threads"


def test_cython_users_see_the_same_table_and_structs():
    text = Path(lkv.__file__).with_name("_storage.pxd").read_text()
    for name in structs():
        body = re.search(rf"    ctypedef struct {name}:\n((?:        .*\n)+)", text)[1]
        found = set(re.findall(r"^ {8}\S.*?\(\*(\w+)\)\(", body, flags=re.M)) | set(
            re.findall(r"(\w+)$", body, flags=re.M)
        )
        missing = {member(line) for line in declarations(name)} - {"reserved"} - found
        assert not missing, f"{name} in _storage.pxd lacks {missing}"


def test_cython_users_see_the_same_constants():
    text = Path(lkv.__file__).with_name("_storage.pxd").read_text()
    constants = re.findall(r"\bLKV_\w+(?= =)", " ".join(re.findall(r"enum {(.*?)}", without_comments(header()))))
    assert len(constants) > 30
    assert [name for name in constants if not re.search(rf"\b{name}\b", text)] == []
