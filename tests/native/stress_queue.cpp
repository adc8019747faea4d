// Eight threads lease random rows in every way there is, and mark what they hold: who overlaps whom is seen at once.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.hpp"
#include "lease_queue.hpp"

using namespace lkv;

namespace {

constexpr int n_threads = 8, n_rows = 48, n_epochs = 32;

// What an allocation holds. `content` and `filled` are plain: ThreadSanitizer sees an access that no lease ordered.
struct Memory {
  std::uint64_t content[n_rows] = {};
  bool filled[n_rows] = {};
  std::atomic<int> readers[n_rows] = {}, writers[n_rows] = {};
};

struct World {
  LeaseQueue *queue = new LeaseQueue;
  Memory memory[n_epochs + 1];
  std::atomic<int> movers{0};
  std::atomic<long> granted{0}, refused{0};
  std::mutex mutex;
  std::vector<std::unique_ptr<Request>> handed_over;

  ~World() { queue->release_ref(); }
  Memory &of(const Request &request) { return memory[request.epoch()]; }

  void enter(const Request &request) {
    Memory &m = of(request);
    for (auto r = request.write_rows().lo; r < request.write_rows().hi && r < n_rows; r++) {
      CHECK(m.writers[r].fetch_add(1) == 0);
      CHECK(m.readers[r].load() == 0);
    }
    for (auto r = request.read_rows().lo; r < request.read_rows().hi; r++) {
      m.readers[r].fetch_add(1);
      CHECK(m.writers[r].load() == 0);
    }
    if (request.kind() >= Request::Kind::step) CHECK(movers.fetch_add(1) == 0);
  }

  void leave(const Request &request) {
    if (request.kind() >= Request::Kind::step) CHECK(movers.fetch_sub(1) == 1);
    Memory &m = of(request);
    for (auto r = request.write_rows().lo; r < request.write_rows().hi && r < n_rows; r++)
      CHECK(m.writers[r].fetch_sub(1) == 1);
    for (auto r = request.read_rows().lo; r < request.read_rows().hi; r++) CHECK(m.readers[r].fetch_sub(1) >= 1);
  }
};

class Worker {
 public:
  Worker(World &world, int number) : world_(world), queue_(*world.queue), random_(number + 1) {}

  void run(int rounds) {
    for (int i = 0; i < rounds; i++) {
      auto request = std::make_unique<Request>(any_request());
      if (!get(*request)) {
        world_.refused++;
        continue;
      }
      world_.granted++;
      world_.enter(*request);
      use(*request);
      if (random_.one_in(16)) {
        std::lock_guard<std::mutex> guard(world_.mutex);
        world_.handed_over.push_back(std::move(request));
        handed_over_ = true;
      } else {
        world_.leave(*request);
        queue_.release(*request);
      }
    }
  }

 private:
  Request any_request() {
    const int lo = random_.below(n_rows), hi = lo + random_.below(n_rows - lo + 1);
    switch (random_.below(16)) {
      case 0: case 1: case 2: return Request::committed();
      case 3: case 4: case 5: return Request::step(random_.below(4));
      case 6: return Request::exclusive(n_rows);
      case 7: case 8: case 9: case 10: return Request::writing({lo, hi}, queue_.epoch());
      default: return Request::reading({lo, hi}, queue_.epoch());
    }
  }

  bool get(Request &request) {
    lkv_status status;
    switch (random_.below(4)) {
      case 0: return queue_.acquire(request, LKV_TRY) == LKV_OK;
      case 1: return queue_.acquire(request, random_.below(50'000)) == LKV_OK;
      case 2:
        status = queue_.acquire(request, LKV_FOREVER);
        // A lease that another thread will release is still this thread's.
        if (status == LKV_E_DEADLOCK) CHECK(handed_over_);
        CHECK(status == LKV_OK || status == LKV_E_DEADLOCK);
        return status == LKV_OK;
      default: break;
    }
    status = queue_.enqueue(request, LeaseQueue::Patience::bounded);
    for (int slices = random_.below(4); status == LKV_E_TIMEOUT && slices; slices--)
      status = queue_.wait(request, random_.below(20'000));
    return status == LKV_OK || !queue_.withdraw(request);
  }

  void use(Request &request) {
    Memory &m = world_.of(request);
    const Span rows = request.write_rows(), seen = request.read_rows();
    std::uint64_t sum = 0, again = 0;
    for (auto r = seen.lo; r < seen.hi; r++) {
      sum += m.content[r];
      if (request.kind() == Request::Kind::committed || request.kind() == Request::Kind::step) CHECK(m.filled[r]);
    }
    for (auto r = rows.lo; r < rows.hi && r < n_rows; r++) m.content[r] = random_.next();
    if (random_.one_in(8)) std::this_thread::yield();
    if (random_.one_in(64)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    for (auto r = seen.lo; r < seen.hi; r++) again += m.content[r];
    CHECK(sum == again);
    switch (request.kind()) {
      case Request::Kind::step: return publish_step(request, m);
      case Request::Kind::exclusive: return rewind(m);
      case Request::Kind::committed: return;
      case Request::Kind::rows:
        if (rows.lo < rows.hi && random_.one_in(4)) downgrade(request, m, rows);
    }
  }

  void publish_step(const Request &request, Memory &m) {
    const Span rows = request.write_rows();
    CHECK(rows.lo == queue_.length());
    if (rows.hi > n_rows) return;
    for (auto r = rows.lo; r < rows.hi; r++) m.filled[r] = true;
    queue_.publish(rows.hi);
  }

  void rewind(Memory &m) {
    const std::int64_t keep = random_.one_in(2) ? queue_.length() / 2 : 0;
    for (auto r = keep; r < n_rows; r++) m.filled[r] = false;
    queue_.publish(keep);
    if (!random_.one_in(8) || queue_.epoch() >= n_epochs) return;
    queue_.publish(0);
    queue_.next_epoch();
  }

  void downgrade(Request &request, Memory &m, const Span &rows) {
    for (auto r = rows.lo; r < rows.hi; r++) {
      m.readers[r]++;
      m.writers[r]--;
    }
    queue_.downgrade(request);
    CHECK(request.held());
    for (auto r = rows.lo; r < rows.hi; r++) CHECK(m.writers[r].load() == 0);
  }

  World &world_;
  LeaseQueue &queue_;
  Random random_;
  bool handed_over_ = false;
};

void release_handed_over(World &world, const std::atomic<bool> &stop) {
  for (bool last = false; !last;) {
    last = stop.load();
    std::vector<std::unique_ptr<Request>> mine;
    {
      std::lock_guard<std::mutex> guard(world.mutex);
      mine.swap(world.handed_over);
    }
    for (auto &request : mine) {
      world.leave(*request);
      world.queue->release(*request);
    }
    std::this_thread::yield();
  }
}

// Nothing but steps, so that most find the queue empty: one may come and go while another is on its way in.
void steps_that_meet_start_where_the_last_one_ended() {
  auto *queue = new LeaseQueue;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; t++)
    threads.emplace_back([queue, t] {
      Random random(static_cast<std::uint64_t>(t) + 1);
      for (int i = scaled(300'000); i > 0; i--) {
        Request step = Request::step(1);
        if (queue->acquire(step, LKV_TRY) != LKV_OK) continue;
        CHECK(step.write_rows().lo == queue->length() && step.read_rows().hi == queue->length());
        queue->publish(step.write_rows().hi);
        queue->release(step);
        for (int k = random.below(40); k > 0; k--) std::atomic_signal_fence(std::memory_order_seq_cst);
      }
    });
  for (auto &thread : threads) thread.join();
  queue->release_ref();
}

}  // namespace

int main() {
  World world;
  std::atomic<bool> stop{false};
  std::thread reaper([&] { release_handed_over(world, stop); });
  std::vector<std::thread> threads;
  for (int t = 0; t < n_threads; t++) threads.emplace_back([&world, t] { Worker(world, t).run(scaled(20'000)); });
  for (auto &thread : threads) thread.join();
  stop = true;
  reaper.join();
  Request all = Request::writing({0, n_rows}, Request::any_epoch);
  CHECK_OK(world.queue->acquire(all, LKV_TRY));
  world.queue->release(all);
  CHECK(world.granted > 0);
  steps_that_meet_start_where_the_last_one_ended();
  std::printf("ok  %ld leases, %ld refused, %u epochs\n", world.granted.load(), world.refused.load(),
              world.queue->epoch());
}
