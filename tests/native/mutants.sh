#!/usr/bin/env bash
# Negative controls: breaks a copy of the core in one place at a time; the test named beside it must then fail.
set -euo pipefail
cd "$(dirname "$0")"
core=../../lkv/_core
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
compile=("${CXX:-g++}" -std=c++17 -O1 -pthread -I../../include)
mkdir "$work/whole"
survivors=0

printf '%s\n' "$core"/*.cpp |
    xargs -P "$(nproc)" -I{} sh -c '"$@" -c {} -o "$0/$(basename {} .cpp).o"' "$work/whole" "${compile[@]}"

# what goes wrong, the file, an edit of sed, the test that must notice, the unit to compile if the file is a header
mutant() {
    local what=$1 file=$2 edit=$3 test=$4 unit=${5:-${2%.*}}
    rm -rf "$work/core" "$work/objects"
    cp -r "$core" "$work/core"
    sed -i -e "$edit" "$work/core/$file"
    if cmp -s "$core/$file" "$work/core/$file"; then
        echo "no such place: $what" && survivors=$((survivors + 1)) && return
    fi
    cp -r "$work/whole" "$work/objects"
    "${compile[@]}" -I"$work/core" -c "$work/core/$unit.cpp" -o "$work/objects/$unit.o"
    "${compile[@]}" -I"$work/core" "$test.cpp" "$work/objects"/*.o -o "$work/mutated"
    for _ in $(seq 24); do # some are a matter of luck, and a machine with one core to spare has little of it
        (timeout 10 "$work/mutated" || exit 1) >/dev/null 2>&1 || { echo "caught    $what ($test)" && return; }
    done
    echo "SURVIVED  $what ($test)" && survivors=$((survivors + 1))
}

mutant "a request overtakes those that wait" lease_queue.cpp \
    's/if (!p->conflicts(request)) continue;/if (!p->held() || !p->conflicts(request)) continue;/' model_queue
mutant "rows that overlap by one do not conflict" span.hpp \
    's/std::max(lo, other.lo) < std::min/std::max(lo, other.lo) + 1 < std::min/' stress_queue lease_queue
mutant "a withdrawn request leaves those behind it waiting" lease_queue.cpp \
    '/^bool LeaseQueue::withdraw/,/^}/s/promote();//' test_queue
mutant "a release leaves those behind it waiting" lease_queue.cpp \
    '/^void LeaseQueue::release(/,/^}/s/promote();//' model_queue
mutant "a downgrade lets nobody in" lease_queue.cpp \
    '/^void LeaseQueue::downgrade/,/^}/s/promote();//' model_queue
mutant "a step that moved ignores what came behind it" lease_queue.cpp \
    's/if (!request.relative()) return true;/return true;/' stress_queue
mutant "rows of a lone request are those of a length gone by" lease_queue.cpp \
    's/if (request.relative() && (request.resolved_length_/if (false \&\& (request.resolved_length_/' stress_queue
mutant "two steps at once" lease_queue.cpp \
    's/if (moves_length() && other.moves_length()) return true;//' stress_queue
mutant "epochs do not matter" lease_queue.cpp 's/(epoch_ == other.epoch_ ||/(true ||/' test_queue
mutant "one's own rows are waited for through others" lease_queue.cpp \
    's/if (!p->marked_) continue;/if (!p->marked_ || !p->conflicts(request)) continue;/' test_queue
mutant "a grant wakes nobody" lease_queue.cpp \
    '/^void LeaseQueue::promote/,/^}/s/if (p->waiter_) p->waiter_->notify_one();//' test_queue
mutant "the end wakes nobody" lease_queue.cpp \
    '/^void LeaseQueue::wake_all/,/^}/s/p->waiter_->notify_one();/continue;/' test_process
mutant "the child does not notice the fork" process.cpp \
    's/detail::generation.fetch_add(1/detail::generation.fetch_add(0/' test_process
mutant "released rows keep their content" storage.cpp 's/cpu::clear_pages(at, nbytes);//' stress_storage
mutant "a write does not move the version" lease.cpp \
    '/lkv_lease::finish/,/^}/s/buffer->bump_version();/;/' stress_storage
mutant "an append does not move the version" slot_table.cpp 's/alone ? place.version->bump_alone()/alone ? void()/' test_slots
mutant "a claim has many winners" storage.cpp \
    's/if (buffer->claimed.comp.*/if (buffer->claimed == expected) return buffer->claimed = claimed, LKV_OK;/' \
    stress_storage
mutant "adoption forgets the lease it was taken through" lease.cpp \
    's/if (!buffer->still_at(/if (false \&\& !buffer->still_at(/' stress_storage
mutant "an export does not hold the memory" dlpack_export.cpp \
    's/if (lease) lease->retain();/buffer->refs--, lease->refs += !!lease;/' stress_storage
mutant "a failed write does not poison" lease.cpp \
    's/if (status != LKV_OK) buffer->poisoned/if (false) buffer->poisoned/' test_devices
mutant "a slot is written before the last is checked" slot_table.cpp \
    's/if (array.ndim != shape.ndim) return/if (s == 0 \&\& array.ndim != shape.ndim) return/' test_slots
mutant "the last row is one too far" slot_table.cpp \
    's/if (rows > capacity - from)/if (rows > capacity - from + 1)/' test_slots

[ "$survivors" = 0 ] || { echo "$survivors survived"; exit 1; }
