// Named cases of the lease queue that the random tests do not spell out.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "lease_queue.hpp"

using namespace lkv;
using Patience = LeaseQueue::Patience;
using Clock = std::chrono::steady_clock;

namespace {

// A queue of its own for each case, and that is all its holder must know of reference counts.
struct Queue {
  LeaseQueue *const queue = new LeaseQueue;
  ~Queue() { queue->release_ref(); }
  LeaseQueue *operator->() const { return queue; }
};

Request read(std::int64_t lo, std::int64_t hi) { return Request::reading({lo, hi}, 1); }
Request write(std::int64_t lo, std::int64_t hi) { return Request::writing({lo, hi}, 1); }

template <class Call>
void elsewhere(Call call) {
  std::thread(call).join();
}

void a_reader_behind_a_waiting_writer_waits_for_it() {
  Queue queue;
  Request first = read(0, 4), writer = write(0, 4), second = read(0, 4);
  CHECK_OK(queue->acquire(first, LKV_TRY));
  elsewhere([&] { CHECK(queue->enqueue(writer, Patience::bounded) == LKV_E_TIMEOUT); });
  CHECK_FAILS(LKV_E_TIMEOUT, queue->acquire(second, LKV_TRY));
  CHECK(!second.blocked_by_step());
  CHECK(queue->enqueue(second, Patience::bounded) == LKV_E_TIMEOUT);
  queue->release(first);
  CHECK(writer.held() && !second.held());
  queue->release(writer);
  CHECK(second.held());
  queue->release(second);
}

void withdrawing_a_writer_lets_the_readers_behind_it_go() {
  Queue queue;
  Request first = read(0, 4), writer = write(0, 4), second = read(0, 4);
  CHECK_OK(queue->acquire(first, LKV_TRY));
  queue->enqueue(writer, Patience::bounded);
  queue->enqueue(second, Patience::bounded);
  CHECK(queue->withdraw(writer));
  CHECK(second.held() && !queue->withdraw(second));
  queue->release(first);
  queue->release(second);
}

void empty_ranges_conflict_with_nothing() {
  Queue queue;
  Request all = write(0, 8), nothing = write(4, 4), none_read = read(0, 0);
  CHECK_OK(queue->acquire(all, LKV_TRY));
  CHECK_OK(queue->acquire(nothing, LKV_TRY));
  CHECK_OK(queue->acquire(none_read, LKV_TRY));
  for (Request *request : {&all, &nothing, &none_read}) queue->release(*request);
}

void a_step_reads_what_is_published_and_leaves_its_readers_alone() {
  Queue queue;
  queue->publish(5);
  Request reader = Request::committed(), late = Request::committed();
  Request step = Request::step(3), second = Request::step(1);
  CHECK_OK(queue->acquire(reader, LKV_TRY));
  CHECK_OK(queue->acquire(step, LKV_TRY));
  CHECK(step.read_rows().hi == 5 && step.write_rows().lo == 5 && step.write_rows().hi == 8);
  CHECK_FAILS(LKV_E_TIMEOUT, queue->acquire(second, LKV_TRY));
  CHECK(second.blocked_by_step());
  CHECK(queue->enqueue(second, Patience::bounded) == LKV_E_TIMEOUT);
  CHECK_OK(queue->acquire(late, LKV_TRY));
  queue->publish(8);
  CHECK(late.read_rows().hi == 5 && reader.read_rows().hi == 5);
  queue->release(step);
  CHECK(second.held() && second.write_rows().lo == 8);
  for (Request *request : {&reader, &second, &late}) queue->release(*request);
}

// The step was let past by the writer when it stood for other rows.
void a_step_that_moved_while_waiting_waits_for_what_holds_its_new_rows() {
  Queue queue;
  queue->publish(2);
  Request first = Request::step(6), second = Request::step(2), writer = write(8, 9);
  CHECK_OK(queue->acquire(first, LKV_TRY));
  CHECK(queue->enqueue(second, Patience::bounded) == LKV_E_TIMEOUT);
  CHECK_OK(queue->acquire(writer, LKV_TRY));
  queue->publish(8);
  queue->release(first);
  CHECK(!second.held());
  queue->release(writer);
  CHECK(second.held() && second.write_rows().lo == 8);
  queue->release(second);
}

void rows_of_another_epoch_are_other_rows() {
  Queue queue;
  Request old = write(0, 8), exclusive = Request::exclusive(8), any = Request::writing({0, 8}, Request::any_epoch);
  CHECK_OK(queue->acquire(old, LKV_TRY));
  CHECK(queue->acquire(exclusive, LKV_TRY) == LKV_E_TIMEOUT);
  queue->next_epoch();
  CHECK_OK(queue->acquire(exclusive, LKV_TRY));
  CHECK(queue->acquire(any, LKV_TRY) == LKV_E_TIMEOUT);
  queue->release(old);
  CHECK(queue->acquire(any, LKV_TRY) == LKV_E_TIMEOUT);
  queue->release(exclusive);
  CHECK_OK(queue->acquire(any, LKV_TRY));
  queue->release(any);
}

void a_downgrade_lets_readers_in_but_no_writer() {
  Queue queue;
  Request writer = write(0, 4), reader = read(0, 4), second = write(0, 4);
  CHECK_OK(queue->acquire(writer, LKV_TRY));
  CHECK(queue->acquire(reader, LKV_TRY) == LKV_E_TIMEOUT);
  queue->downgrade(writer);
  CHECK_OK(queue->acquire(reader, LKV_TRY));
  CHECK(queue->acquire(second, LKV_TRY) == LKV_E_TIMEOUT);
  queue->release(writer);
  queue->release(reader);
  queue->downgrade(writer);  // of a request that is not held: nothing
  CHECK_OK(queue->acquire(second, LKV_TRY));
  queue->release(second);
  queue->release(second);  // twice is harmless
}

void waiting_for_ones_own_rows_is_refused_at_once() {
  Queue queue;
  Request mine = read(0, 8), writer = write(4, 6), step = Request::step(1), second = Request::step(1);
  CHECK_OK(queue->acquire(mine, LKV_TRY));
  CHECK_FAILS(LKV_E_DEADLOCK, queue->acquire(writer, LKV_FOREVER));
  CHECK(std::strstr(api.last_error(), "read lease of rows [0, 8)"));
  queue->release(mine);
  CHECK_OK(queue->acquire(step, LKV_FOREVER));
  CHECK_FAILS(LKV_E_DEADLOCK, queue->acquire(second, LKV_FOREVER));
  CHECK(second.blocked_by_step());
  queue->release(step);
}

void waiting_for_ones_own_rows_through_another_waiter_is_refused_at_once() {
  Queue queue;
  Request mine = read(0, 8), theirs = write(4, 6), again = read(5, 6);
  CHECK_OK(queue->acquire(mine, LKV_TRY));
  elsewhere([&] { CHECK(queue->enqueue(theirs, Patience::endless) == LKV_E_TIMEOUT); });
  CHECK_FAILS(LKV_E_DEADLOCK, queue->acquire(again, LKV_FOREVER));
  CHECK(queue->withdraw(theirs));
  CHECK_OK(queue->acquire(again, LKV_FOREVER));
  queue->release(again);
  queue->release(mine);
}

void waiting_for_a_place_that_waits_for_ones_own_rows_behind_it_is_refused_at_once() {
  Queue queue;
  queue->publish(2);
  Request first = Request::step(6), second = Request::step(2), mine = write(8, 9), again = Request::committed();
  elsewhere([&] { CHECK_OK(queue->acquire(first, LKV_TRY)); });
  elsewhere([&] { CHECK(queue->enqueue(second, Patience::endless) == LKV_E_TIMEOUT); });
  CHECK_OK(queue->acquire(mine, LKV_TRY));
  queue->publish(8);
  queue->release(first);
  Request third = Request::step(1);
  CHECK_FAILS(LKV_E_DEADLOCK, queue->acquire(third, LKV_FOREVER));
  CHECK_OK(queue->acquire(again, LKV_FOREVER));
  queue->release(mine);
  CHECK(second.held());
  queue->release(second);
  queue->release(again);
}

void waiting_for_others_is_no_deadlock_whatever_else_is_held() {
  Queue queue;
  Request mine = read(0, 4), theirs = read(4, 8), waiting = write(4, 8), wanted = read(5, 6);
  CHECK_OK(queue->acquire(mine, LKV_TRY));
  elsewhere([&] { CHECK_OK(queue->acquire(theirs, LKV_TRY)); });
  elsewhere([&] { CHECK(queue->enqueue(waiting, Patience::endless) == LKV_E_TIMEOUT); });
  CHECK(queue->enqueue(wanted, Patience::endless) == LKV_E_TIMEOUT);
  CHECK(queue->withdraw(wanted));
  queue->release(theirs);
  CHECK(waiting.held());
  queue->release(waiting);
  queue->release(mine);
}

void a_bounded_wait_ends_in_time_and_leaves_no_trace() {
  Queue queue;
  Request mine = write(0, 4), second = write(0, 4);
  CHECK_OK(queue->acquire(mine, LKV_TRY));
  const auto start = Clock::now();
  CHECK_FAILS(LKV_E_TIMEOUT, queue->acquire(second, 20'000'000));
  CHECK(Clock::now() - start >= std::chrono::milliseconds(20));
  queue->release(mine);
  CHECK_OK(queue->acquire(second, 1));
  queue->release(second);
}

// A bound so large that the clock plus it overflows is still a long time.
void the_longest_bound_waits(std::int64_t bound) {
  Queue queue;
  Request mine = write(0, 4), second = write(0, 4);
  CHECK_OK(queue->acquire(mine, LKV_TRY));
  std::atomic<bool> granted{false};
  std::thread other([&] {
    CHECK_OK(queue->acquire(second, bound));
    granted = true;
    queue->release(second);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!granted);
  queue->release(mine);
  other.join();
}

void the_longest_bounds_wait() {
  the_longest_bound_waits(INT64_MAX);
  the_longest_bound_waits(INT64_MIN);
}

void a_step_of_absurd_length_does_not_overflow() {
  Queue queue;
  queue->publish(5);
  Request step = Request::step(INT64_MAX);
  CHECK_OK(queue->acquire(step, LKV_TRY));
  CHECK(step.write_rows().lo == 5 && step.write_rows().hi == INT64_MAX);
  queue->release(step);
}

void a_writer_among_readers_that_overlap_in_time_gets_its_turn() {
  Queue queue;
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; i++)
    readers.emplace_back([&] {
      while (!stop) {
        Request request = read(0, 8);
        CHECK_OK(queue->acquire(request, LKV_FOREVER));
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        queue->release(request);
      }
    });
  for (int i = 0; i < 20; i++) {
    Request request = write(0, 8);
    CHECK_OK(queue->acquire(request, 10'000'000'000));
    queue->release(request);
  }
  stop = true;
  for (auto &reader : readers) reader.join();
}

}  // namespace

int main() {
  RUN(a_reader_behind_a_waiting_writer_waits_for_it);
  RUN(withdrawing_a_writer_lets_the_readers_behind_it_go);
  RUN(empty_ranges_conflict_with_nothing);
  RUN(a_step_reads_what_is_published_and_leaves_its_readers_alone);
  RUN(a_step_that_moved_while_waiting_waits_for_what_holds_its_new_rows);
  RUN(rows_of_another_epoch_are_other_rows);
  RUN(a_downgrade_lets_readers_in_but_no_writer);
  RUN(waiting_for_ones_own_rows_is_refused_at_once);
  RUN(waiting_for_ones_own_rows_through_another_waiter_is_refused_at_once);
  RUN(waiting_for_a_place_that_waits_for_ones_own_rows_behind_it_is_refused_at_once);
  RUN(waiting_for_others_is_no_deadlock_whatever_else_is_held);
  RUN(a_bounded_wait_ends_in_time_and_leaves_no_trace);
  RUN(the_longest_bounds_wait);
  RUN(a_step_of_absurd_length_does_not_overflow);
  RUN(a_writer_among_readers_that_overlap_in_time_gets_its_turn);
}
