// Fences over a device whose streams only exist as names, and whose events are reached when the test says so.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "fences.hpp"

using namespace lkv;

namespace {

struct Event {
  void *stream;
};

std::atomic<int> live{0}, waits{0}, syncs{0};
std::atomic<bool> reached{false}, broken{false};
void *const one = &live, *const two = &waits;

lkv_status record(void *, void *stream, void **out) {
  if (broken) return LKV_E_DEVICE;
  *out = new Event{stream};
  live++;
  return LKV_OK;
}
lkv_status wait(void *, void *stream, void *event) {
  CHECK(static_cast<Event *>(event)->stream != stream);
  waits++;
  return broken ? LKV_E_DEVICE : LKV_OK;
}
std::int32_t done(void *, void *) { return reached; }
void free_event(void *, void *event) {
  delete static_cast<Event *>(event);
  live--;
}
lkv_status sync(void *, void *) {
  syncs++;
  return LKV_OK;
}

lkv_device device{"streams", 0, {}, nullptr, nullptr}, other = device, plain = device;

void set_up() {
  for (lkv_device *d : {&device, &other}) {
    d->table.event_record = record, d->table.event_wait = wait;
    d->table.event_done = done, d->table.event_free = free_event;
    d->table.sync = sync;
  }
}

Fences::Rows read(std::int64_t lo, std::int64_t hi, std::uint32_t epoch = 1) { return {{lo, hi}, {}, epoch}; }
Fences::Rows write(std::int64_t lo, std::int64_t hi, std::uint32_t epoch = 1) { return {{}, {lo, hi}, epoch}; }

int waits_of(Fences &fences, void *stream, const Fences::Rows &rows) {
  waits = 0;
  CHECK_OK(fences.pass(&device, stream, rows));
  return waits;
}

void only_conflicting_work_of_other_streams_is_waited_for() {
  Fences fences;
  fences.leave(&device, one, write(4, 8));
  CHECK(waits_of(fences, two, read(0, 5)) == 1 && waits_of(fences, two, write(7, 9)) == 1);
  CHECK(waits_of(fences, one, write(0, 9)) == 0);
  CHECK(waits_of(fences, two, write(0, 4)) == 0 && waits_of(fences, two, read(8, 9)) == 0);
  CHECK(waits_of(fences, two, write(0, 9, 2)) == 0);
}

void readers_wait_for_no_reader() {
  Fences fences;
  fences.leave(&device, one, read(0, 8));
  CHECK(waits_of(fences, two, read(0, 8)) == 0 && waits_of(fences, two, write(0, 8)) == 1);
}

void rows_that_adjoin_on_one_stream_share_a_fence() {
  Fences fences;
  for (int row = 0; row < 10; row++) fences.leave(&device, one, {{0, row}, {row, row + 1}, 1});
  CHECK(live == 1 && waits_of(fences, two, write(0, 10)) == 1);
  fences.leave(&device, one, write(20, 21));
  fences.leave(&device, two, write(21, 22));
  CHECK(live == 3);
}

void what_has_been_reached_is_forgotten() {
  Fences fences;
  fences.leave(&device, one, write(0, 1));
  fences.leave(&device, one, write(5, 6));
  reached = true;
  fences.leave(&device, two, write(9, 10));
  reached = false;
  CHECK(live == 1 && waits_of(fences, one, write(0, 10)) == 1);
}

void no_rows_leave_no_fence() {
  Fences fences;
  fences.leave(&device, one, read(3, 3));
  CHECK(live == 0);
}

void what_cannot_be_recorded_is_waited_for_at_once() {
  Fences fences;
  syncs = 0;
  broken = true;
  fences.leave(&device, one, write(0, 8));
  broken = false;
  CHECK(syncs == 1 && live == 0 && waits_of(fences, two, write(0, 8)) == 0);
}

void work_of_another_device_is_waited_for_by_the_caller() {
  Fences fences;
  fences.leave(&other, one, write(0, 8));
  syncs = 0;
  CHECK(waits_of(fences, one, read(0, 8)) == 0 && syncs == 1);
}

void a_wait_that_fails_is_reported() {
  Fences fences;
  fences.leave(&device, one, write(0, 8));
  broken = true;
  CHECK(fences.pass(&device, two, read(0, 8)) == LKV_E_DEVICE);
  CHECK(join_streams(&device, one, two) == LKV_E_DEVICE);
  broken = false;
}

void streams_join_through_an_event() {
  waits = 0;
  CHECK_OK(join_streams(&device, one, one));
  CHECK_OK(join_streams(&plain, one, two));
  CHECK(waits == 0 && !queues_work(&plain));
  CHECK_OK(join_streams(&device, one, two));
  CHECK(waits == 1 && live == 0);
}

void spans_know_what_they_cover() {
  const Span some{2, 4}, none{3, 3};
  CHECK(some.covers({2, 4}) && some.covers(none) && !some.covers({1, 3}) && !some.covers({3, 5}));
  CHECK(some.joins({4, 5}) && some.joins({0, 2}) && !some.joins({5, 6}) && some.joins(none) && none.joins(some));
  CHECK(some.hull({6, 7}).hi == 7 && none.hull(some).lo == 2 && some.hull(none).hi == 4);
  CHECK(none.empty() && !some.empty());
}

void threads_share_fences_and_free_each_event_once() {
  Fences fences;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; t++)
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t) + 1);
      void *const stream = t % 2 ? one : two;
      for (int i = scaled(5'000); i > 0; i--) {
        const int lo = random.below(16);
        CHECK_OK(fences.pass(&device, stream, write(lo, lo + 2)));
        fences.leave(&device, stream, random.one_in(2) ? read(lo, lo + 2) : write(lo, lo + 1));
        if (random.one_in(8)) reached = !reached;
      }
    });
  for (auto &thread : threads) thread.join();
  reached = false;
}

}  // namespace

int main() {
  set_up();
  RUN(only_conflicting_work_of_other_streams_is_waited_for);
  RUN(readers_wait_for_no_reader);
  RUN(rows_that_adjoin_on_one_stream_share_a_fence);
  RUN(what_has_been_reached_is_forgotten);
  RUN(no_rows_leave_no_fence);
  RUN(what_cannot_be_recorded_is_waited_for_at_once);
  RUN(work_of_another_device_is_waited_for_by_the_caller);
  RUN(a_wait_that_fails_is_reported);
  RUN(streams_join_through_an_event);
  RUN(spans_know_what_they_cover);
  RUN(threads_share_fences_and_free_each_event_once);
  CHECK(live == 0);
}
