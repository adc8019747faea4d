#!/usr/bin/env bash
# Tests of the core without Python: run.sh [plain|debug|thread|address|valgrind|coverage|mutants|all]...,
# or run.sh bench.
# CXX names the compiler, LKV_TEST_PERCENT scales the iteration counts. Nothing is written into the checkout.
set -euo pipefail
cd "$(dirname "$0")"
core=../../lkv/_core
include=../../include
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
jobs=$(nproc)
percent=${LKV_TEST_PERCENT:-100}
programs=(test_queue test_fences test_api test_devices test_slots test_memory test_process
    model_queue stress_queue stress_storage)
common=(-std=c++17 -g -pthread -fPIC -Wall -Wextra -Werror -I"$include" -I"$core")

build() { # folder, flags...
    local out=$work/$1 compile
    shift
    mkdir -p "$out"
    compile=("${CXX:-g++}" "${common[@]}" "$@")
    ls "$core"/*.cpp | xargs -P "$jobs" -I{} sh -c '"$@" -c {} -o "$0/$(basename {} .cpp).o"' "$out" "${compile[@]}"
    printf '%s\n' "${programs[@]}" |
        xargs -P "$jobs" -I{} sh -c '"$@" {}.cpp "$0"/*.o -o "$0/{}"' "$out" "${compile[@]}"
}

run() { # folder, percent, command before the program...
    local out=$work/$1 share=$(($2 * percent / 100)) program
    shift 2
    for program in "${programs[@]}"; do
        echo "-- $program"
        LKV_TEST_PERCENT=$share timeout 150 "$@" "$out/$program" ${arguments:-}
    done
}

plain() {
    build plain -O2
    run plain 100
    [ -n "${CXX:-}" ] || ! command -v clang++ >/dev/null || clang_agrees
}

clang_agrees() { # with the warnings, in both builds; test_released.cpp is of the debug build alone
    local check=(xargs -P "$jobs" -n 1 clang++ "${common[@]}" -fsyntax-only)
    ls "$core"/*.cpp ./*.cpp | grep -v test_released | "${check[@]}"
    ls "$core"/*.cpp ./*.cpp | "${check[@]}" -DLKV_DEBUG
}

debug() {
    local programs=(test_released test_queue test_api test_slots)
    build debug -O1 -DLKV_DEBUG -fsanitize=address,undefined -fno-sanitize-recover=all
    run debug 10
}

thread() {
    build thread -O1 -fsanitize=thread
    arguments=-single TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" run thread 20
}

address() {
    build address -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
    ASAN_OPTIONS="detect_stack_use_after_return=1 strict_string_checks=1" run address 40
}

valgrind() {
    build valgrind -O1
    arguments=-single run valgrind 2 valgrind --quiet --error-exitcode=9 --leak-check=full --fair-sched=yes
}

coverage() {
    build coverage -O0 --coverage
    run coverage 10
    local line
    line=$(cd "$work/coverage" && gcov -n ./*.gcda 2>/dev/null | awk -v core="_core/" '
        /^File/ { file = $2; gsub(/\047/, "", file); wanted = index(file, core) }
        /^Lines executed/ && wanted {
            split($0, part, /[:% ]+/); n = part[5]; hit[file] = part[3] * n / 100; all[file] = n
        }
        END {
            for (file in all) {
                h += hit[file]; a += all[file]
                name = file; sub(/.*\//, "", name)
                if (hit[file] < all[file] - 0.5) printf "%s: %d of %d lines\n", name, hit[file] + 0.5, all[file]
            }
            printf "%.1f\n", 100 * h / a
        }')
    echo "$line" | sed '$s/.*/coverage of the core: & % of its lines/'
    awk -v percent="$(echo "$line" | tail -1)" 'BEGIN { exit !(percent >= 95) }'
}

bench() {
    programs=(bench_queue)
    build bench -O3
    "$work/bench/bench_queue" "$@"
}

mutants() { ./mutants.sh; }

all() { for mode in plain debug thread address valgrind coverage mutants; do step "$mode"; done; }

step() {
    case $1 in
    plain | debug | thread | address | valgrind | coverage | mutants) echo "== $1 (${SECONDS}s)" && "$1" ;;
    all) all ;;
    *) sed -n 2,4p run.sh && exit 2 ;;
    esac
}

if [ "${1:-}" = bench ]; then "$@" && exit; fi
for mode in "${@:-plain}"; do step "$mode"; done
echo "== passed (${SECONDS}s)"
