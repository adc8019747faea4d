#!/usr/bin/env bash
# The Python tests over an extension that is built with AddressSanitizer and UndefinedBehaviorSanitizer:
# tests/asan.sh [pytest arguments]. PYTHON names the interpreter. Nothing is written into the checkout.
# Takes the packages of PYTHON's environment where it has them (torch, Cython, pytest ...).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/src"
git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
    tar --null -T - -cf - | tar -xf - -C "$work/src"
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
(cd "$work/src" && LKV_SANITIZE=address,undefined "$python" -m pip install -q --no-build-isolation --no-deps \
    --disable-pip-version-check --ignore-installed --target "$site" .)

# Compilers that tests start must not have the sanitizers preloaded.
mkdir "$work/bin"
for tool in cc c++ clang clang++ gcc g++ rustc; do
    found=$(command -v "$tool") || continue
    printf '#!/bin/sh\nunset LD_PRELOAD\nexec "%s" "$@"\n' "$found" >"$work/bin/$tool"
    chmod +x "$work/bin/$tool"
done
export PATH="$work/bin:$PATH"

cxx=${CXX:-c++}
export LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libubsan.so) $("$cxx" -print-file-name=libstdc++.so)"
# detect_leaks=0: CPython and NumPy keep what they allocate until the process ends; tests/test_leaks.py looks for leaks.
# allocator_may_return_null=1: tests ask for more memory than there is and expect an error.
# handle_abort=1: a stack for what would only be "Aborted".
export ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:handle_abort=1:detect_stack_use_after_return=1:strict_string_checks=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export PYTHONMALLOC=malloc # else Python's own arenas hide overruns of small objects
cd "$work/src"
rm -rf lkv # the tests must see the installed one
# It measures resident memory, and the sanitizer keeps what was freed.
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider \
    --deselect tests/test_storage.py::test_a_hundred_thousand_storages_come_and_go "$@"
