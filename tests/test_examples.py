"""Every example that embeds lkv runs, from the one command that its first lines name."""

import sys
from pathlib import Path

import pytest
from helpers import compilers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SAYS = {
    "embed_c": ("cc", "decode.c", "".join(f"{n} tokens\n" for n in range(1, 9))),
    "embed_cpp": ("c++", "attention.cpp", "[0.0, 24.0, 96.0, 216.0]\n"),
    "embed_rust": ("rustc", "lib.rs", "".join(f"{n} tokens\n" for n in range(1, 9)) + "[0. 1. 2. 3. 4. 5. 6. 7.]\n"),
    "embed_cython": ("cc", "sampler.pyx", "15.0\n31.0\n"),
}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is only in a checkout")


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_by_the_command_at_its_top(name):
    compiler, source, expected = SAYS[name]
    top = "".join((EXAMPLES / name / source).read_text().splitlines()[:1])
    assert f"Run: python examples/{name}/run.py" in top
    compilers.tool(compiler)
    if name == "embed_c":
        compilers.embed_flags()
    assert compilers.run(sys.executable, f"examples/{name}/run.py", env=compilers.environment(), cwd=ROOT) == expected


@pytest.mark.parametrize("name", SAYS)
def test_an_example_is_short(name):
    for source in (EXAMPLES / name).iterdir():
        if source.is_file():
            assert len(source.read_text().splitlines()) < 80, source
