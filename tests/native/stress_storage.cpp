// Threads share buffers, leases and DLPack tensors, and drop them in any order.
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "dlpack_abi.h"
#include "lease.hpp"
#include "storage.hpp"

using lkv::api;

namespace {

constexpr int n_threads = 6;

template <class Body>
void in_threads(int n, Body body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < n; t++) threads.emplace_back(body, t);
  for (auto &thread : threads) thread.join();
}

lkv_buffer_desc desc(std::int64_t rows, std::int64_t row_bytes, lkv_buffer *queue_of = nullptr) {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = rows;
  d.row_bytes = row_bytes;
  d.queue_of = queue_of;
  return d;
}

lkv_buffer *create(std::int64_t rows, std::int64_t row_bytes, lkv_buffer *queue_of = nullptr) {
  const lkv_buffer_desc d = desc(rows, row_bytes, queue_of);
  lkv_buffer *buffer;
  CHECK_OK(api.buffer_create(&d, &buffer));
  return buffer;
}

lkv_buffer_info info(const lkv_buffer *buffer) {
  lkv_buffer_info i;
  i.struct_size = sizeof i;
  CHECK_OK(api.buffer_info(buffer, &i));
  return i;
}

DLManagedTensorVersioned *tensor_of(lkv_lease *lease) {
  lkv_lease_span span;
  span.struct_size = sizeof span;
  CHECK_OK(api.lease_data(lease, &span));
  const std::int64_t shape[] = {static_cast<std::int64_t>(span.nbytes)};
  lkv_tensor_desc d{};
  d.struct_size = sizeof d;
  d.ndim = 1;
  d.shape = shape;
  DLManagedTensorVersioned *tensor;
  CHECK_OK(api.lease_to_dlpack(lease, &d, &tensor));
  return tensor;
}

// Whatever a thread takes from another thread's hands, it drops.
template <class T>
class Hands {
 public:
  void give(T thing) {
    std::lock_guard<std::mutex> guard(mutex_);
    things_.push_back(thing);
  }
  bool take(T *out) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (things_.empty()) return false;
    *out = things_.front();
    things_.pop_front();
    return true;
  }

 private:
  std::mutex mutex_;
  std::deque<T> things_;
};

void the_last_of_buffer_lease_and_tensors_frees_the_memory_once() {
  static std::atomic<int> freed;
  freed = 0;
  const int rounds = scaled(2'000);
  const std::int64_t before = lkv::live_buffers();
  Hands<lkv_buffer *> buffers;
  Hands<lkv_lease *> leases;
  Hands<DLManagedTensorVersioned *> tensors;
  in_threads(n_threads, [&](int t) {
    Random random(static_cast<std::uint64_t>(t) + 1);
    for (int i = 0; i < rounds; i++) {
      auto *memory = static_cast<char *>(std::malloc(512));
      const lkv_buffer_desc d = desc(8, 64);
      lkv_buffer *buffer;
      CHECK_OK(api.buffer_wrap(&d, memory, [](void *p) { std::free(p), freed++; }, memory, &buffer));
      lkv_lease *lease;
      CHECK_OK(api.lease_acquire(buffer, random.below(2), 2, 6, LKV_FOREVER, &lease));
      for (int k = random.below(3); k > 0; k--) tensors.give(tensor_of(lease));
      if (random.one_in(2)) api.lease_retain(lease), leases.give(lease);
      if (random.one_in(2)) api.buffer_retain(buffer), buffers.give(buffer);
      if (random.one_in(4)) api.lease_end(lease);
      random.one_in(2) ? leases.give(lease) : api.lease_release(lease);
      random.one_in(2) ? buffers.give(buffer) : api.buffer_release(buffer);
      DLManagedTensorVersioned *tensor;
      if (tensors.take(&tensor)) {
        CHECK(static_cast<char *>(tensor->dl_tensor.data)[tensor->dl_tensor.shape[0] - 1] || true);
        tensor->deleter(tensor);
      }
      if (leases.take(&lease)) api.lease_release(lease);
      if (buffers.take(&buffer)) api.buffer_release(buffer);
    }
  });
  lkv_buffer *buffer;
  lkv_lease *lease;
  DLManagedTensorVersioned *tensor;
  while (tensors.take(&tensor)) tensor->deleter(tensor);
  while (leases.take(&lease)) api.lease_release(lease);
  while (buffers.take(&buffer)) api.buffer_release(buffer);
  CHECK(freed == rounds * n_threads);
  CHECK(lkv::live_buffers() == before);
}

void many_claims_of_a_length_have_one_winner() {
  const int rounds = scaled(20'000);
  lkv_buffer *buffer = create(rounds, 1);
  std::atomic<int> wins{0}, arrived{0};
  in_threads(2, [&](int) {
    for (int i = 0; i < rounds; i++) {
      const lkv_status status = api.buffer_claim(buffer, i, i + 1);
      CHECK(status == LKV_OK || status == LKV_E_CONFLICT);
      arrived++;
      if (status == LKV_OK) wins++;
      for (int spins = 0; arrived < 2 * (i + 1); spins++)
        if (spins > 500) std::this_thread::yield();
    }
  });
  CHECK(wins == rounds && info(buffer).claimed == rounds);
  api.buffer_release(buffer);
}

void each_write_lease_moves_the_version_once() {
  const int rounds = scaled(4'000);
  lkv_buffer *buffer = create(16, 8);
  std::atomic<std::uint64_t> writes{0};
  in_threads(n_threads, [&](int t) {
    Random random(static_cast<std::uint64_t>(t) + 11);
    for (int i = 0; i < rounds; i++) {
      const int lo = random.below(16);
      const lkv_mode mode = random.one_in(2) ? LKV_WRITE : LKV_READ;
      lkv_lease *lease;
      CHECK_OK(api.lease_acquire(buffer, mode, lo, lo + 1, LKV_FOREVER, &lease));
      writes += mode == LKV_WRITE;
      if (mode == LKV_WRITE && random.one_in(2)) CHECK_OK(api.lease_downgrade(lease));
      if (random.one_in(2)) api.lease_end(lease);
      if (random.one_in(4)) api.lease_end(lease);
      api.lease_release(lease);
    }
  });
  CHECK(info(buffer).version == writes);
  api.buffer_release(buffer);
}

// Downgrade, end and the readers of one handle, all at once.
void one_handle_used_by_many_threads_moves_the_version_once() {
  const int rounds = scaled(1'000);
  lkv_buffer *buffer = create(4, 8);
  for (int i = 0; i < rounds; i++) {
    lkv_lease *lease;
    CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 4, LKV_TRY, &lease));
    in_threads(3, [&](int t) {
      lkv_lease_span span;
      span.struct_size = sizeof span;
      if (t == 0) api.lease_downgrade(lease);
      if (t == 1) api.lease_end(lease);
      if (t == 2 && api.lease_data(lease, &span) == LKV_OK) CHECK(span.lo == 0 && span.hi == 4 && span.nbytes == 32);
    });
    api.lease_release(lease);
    CHECK(info(buffer).version == static_cast<std::uint64_t>(i) + 1);
  }
  api.buffer_release(buffer);
}

void a_reader_sees_whole_writes() {
  const int rounds = scaled(3'000);
  lkv_buffer *buffer = create(4, 4096);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    std::vector<char> rows(2 * 4096);
    while (!stop) {
      lkv_lease *lease;
      CHECK_OK(api.lease_acquire(buffer, LKV_READ, 1, 3, LKV_FOREVER, &lease));
      CHECK_OK(api.read_host(lease, 0, rows.data(), rows.size()));
      api.lease_release(lease);
      CHECK(std::memcmp(rows.data(), rows.data() + 1, rows.size() - 1) == 0);
    }
  });
  for (int i = 0; i < rounds; i++) {
    lkv_lease *lease;
    const std::vector<char> rows(4 * 4096, static_cast<char>(i));
    CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 4, LKV_FOREVER, &lease));
    CHECK_OK(api.write_host(lease, 0, rows.data(), rows.size()));
    api.lease_release(lease);
  }
  stop = true;
  reader.join();
  api.buffer_release(buffer);
}

void released_rows_are_zeros_and_only_those() {
  constexpr std::int64_t rows = 64, row_bytes = 3000;
  lkv_buffer *buffer = create(rows, row_bytes);
  Random random(3);
  for (int i = scaled(200); i > 0; i--) {
    lkv_lease *lease;
    CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, rows, LKV_TRY, &lease));
    std::memset(info(buffer).data, 7, rows * row_bytes);
    api.lease_release(lease);
    const int lo = random.below(rows + 1), hi = lo + random.below(rows + 1 - lo);
    lkv::populate_ahead(buffer, 0, hi, 1, 0, row_bytes);
    CHECK_OK(api.buffer_release_rows(buffer, lo, hi));
    const auto *data = static_cast<const char *>(info(buffer).data);
    for (std::int64_t byte = 0; byte < rows * row_bytes; byte += 1 + random.below(50)) {
      const bool inside = byte >= lo * row_bytes && byte < hi * row_bytes;
      CHECK(data[byte] == (inside ? 0 : 7));
    }
  }
  api.buffer_release(buffer);
}

void rows_in_use_are_not_released() {
  lkv_buffer *buffer = create(8, 8);
  lkv_lease *lease;
  CHECK_OK(api.lease_acquire(buffer, LKV_READ, 2, 4, LKV_TRY, &lease));
  CHECK_FAILS(LKV_E_TIMEOUT, api.buffer_release_rows(buffer, 3, 8));
  CHECK_OK(api.buffer_release_rows(buffer, 4, 8));
  CHECK_OK(api.buffer_release_rows(buffer, 3, 3));
  api.lease_release(lease);
  api.buffer_release(buffer);
}

// Leases stay exclusive while two threads try to move the buffer to queues with epochs of their own. One of them does.
void adoption_happens_once_and_never_lets_two_writers_in() {
  lkv::LeaseQueue *queues[2];
  for (auto &queue : queues) queue = new lkv::LeaseQueue;
  queues[0]->next_epoch();
  for (int round = scaled(400); round > 0; round--) {
    lkv_buffer *buffer = create(4, 8);
    std::atomic<int> inside{0}, adopted{0};
    in_threads(4, [&](int t) {
      for (int i = 0; i < 20; i++) {
        if (t < 2) {
          if (lkv::adopt(buffer, queues[t]) == LKV_OK) {
            adopted++;
            return;
          }
          api.buffer_release_rows(buffer, 0, 4);
          std::this_thread::yield();
          continue;
        }
        lkv_lease *lease;
        CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 4, LKV_FOREVER, &lease));
        CHECK(inside.fetch_add(1) == 0);
        static_cast<char *>(info(buffer).data)[0]++;
        CHECK(inside.fetch_sub(1) == 1);
        api.lease_release(lease);
      }
    });
    CHECK(adopted <= 1);
    if (!adopted) CHECK_OK(lkv::adopt(buffer, queues[0]));
    lkv::LeaseQueue *home = buffer->queue;
    CHECK_OK(lkv::adopt(buffer, home));
    CHECK_FAILS(LKV_E_EXISTS, lkv::adopt(buffer, queues[home == queues[0]]));
    api.buffer_release(buffer);
  }
  for (auto *queue : queues) queue->release_ref();
}

void a_lease_on_its_way_into_the_queue_of_before_is_asked_for_again() {
  auto *queue = new lkv::LeaseQueue;
  lkv_buffer *buffer = create(4, 8);
  lkv_lease *lease = lkv::new_lease(buffer, LKV_WRITE, 0, 4);
  CHECK_OK(lkv::adopt(buffer, queue));
  CHECK_OK(lease->queue->acquire(lease->request, LKV_TRY));
  CHECK(lkv::check_granted(lease) == LKV_E_CONFLICT);
  lease->queue->release(lease->request);
  lkv::discard(lease);
  api.buffer_release(buffer);
  queue->release_ref();
}

void rows_that_are_leased_are_not_adopted() {
  auto *queue = new lkv::LeaseQueue;
  lkv_buffer *buffer = create(4, 8);
  lkv_lease *lease;
  CHECK_OK(api.lease_acquire(buffer, LKV_READ, 0, 1, LKV_TRY, &lease));
  CHECK_FAILS(LKV_E_TIMEOUT, lkv::adopt(buffer, queue));
  api.lease_release(lease);
  CHECK_OK(lkv::adopt(buffer, queue));
  api.buffer_release(buffer);
  queue->release_ref();
}

void buffers_of_one_queue_exclude_each_other_and_outlive_the_first() {
  lkv_buffer *first = create(8, 8), *second = create(8, 16, first);
  lkv_lease *a, *b;
  CHECK_OK(api.lease_acquire(first, LKV_WRITE, 0, 4, LKV_TRY, &a));
  CHECK(api.lease_acquire(second, LKV_READ, 3, 5, LKV_TRY, &b) == LKV_E_TIMEOUT);
  CHECK_OK(api.lease_acquire(second, LKV_READ, 4, 5, LKV_TRY, &b));
  api.lease_release(a);
  api.buffer_release(first);
  api.lease_release(b);
  CHECK_OK(api.lease_acquire(second, LKV_WRITE, 0, 8, LKV_TRY, &b));
  api.lease_release(b);
  api.buffer_release(second);
}

void a_poisoned_write_stops_readers_until_it_is_cleared() {
  lkv_buffer *buffer = create(4, 8);
  lkv_lease *lease;
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 4, LKV_TRY, &lease));
  api.lease_release_poisoned(lease);
  CHECK(info(buffer).poisoned && info(buffer).version == 0);
  CHECK_FAILS(LKV_E_POISONED, api.lease_acquire(buffer, LKV_READ, 0, 4, LKV_FOREVER, &lease));
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 4, LKV_TRY, &lease));
  CHECK_OK(api.buffer_clear_poison(buffer));
  api.lease_release(lease);
  CHECK_OK(api.lease_acquire(buffer, LKV_READ, 0, 4, LKV_TRY, &lease));
  api.lease_release_poisoned(lease);  // of a read: nothing is poisoned
  CHECK(!info(buffer).poisoned && info(buffer).version == 1);
  api.buffer_release(buffer);
}

void ids_are_never_given_twice() {
  const int rounds = scaled(10'000);
  std::vector<std::uint64_t> ids[n_threads];
  in_threads(n_threads, [&](int t) {
    for (int i = 0; i < rounds; i++) ids[t].push_back(api.alloc_id_next());
  });
  std::uint64_t most = 0;
  for (auto &list : ids) most = list.back() > most ? list.back() : most;
  std::vector<bool> seen(most + 1);
  for (auto &list : ids)
    for (std::uint64_t id : list) {
      CHECK(id && !seen[id]);
      seen[id] = true;
    }
}

}  // namespace

int main() {
  RUN(the_last_of_buffer_lease_and_tensors_frees_the_memory_once);
  RUN(many_claims_of_a_length_have_one_winner);
  RUN(each_write_lease_moves_the_version_once);
  RUN(one_handle_used_by_many_threads_moves_the_version_once);
  RUN(a_reader_sees_whole_writes);
  RUN(released_rows_are_zeros_and_only_those);
  RUN(rows_in_use_are_not_released);
  RUN(adoption_happens_once_and_never_lets_two_writers_in);
  RUN(a_lease_on_its_way_into_the_queue_of_before_is_asked_for_again);
  RUN(rows_that_are_leased_are_not_adopted);
  RUN(buffers_of_one_queue_exclude_each_other_and_outlive_the_first);
  RUN(a_poisoned_write_stops_readers_until_it_is_cleared);
  RUN(ids_are_never_given_twice);
  CHECK(lkv::live_buffers() == 0);
}
