// What a lease costs beside the locks of the C and C++ libraries, all in one process and in turns, so that ratios hold
// when the machine's speed does not. bench_queue [seconds per contended measurement [uncontended|contended|fairness]]
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "lease_queue.hpp"

using namespace lkv;
using Clock = std::chrono::steady_clock;

namespace {

double since(Clock::time_point start) { return std::chrono::duration<double, std::nano>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu % std::max(1u, std::thread::hardware_concurrency()), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

void work(int loops) {
  for (; loops > 0; loops--) std::atomic_signal_fence(std::memory_order_seq_cst);
}

using Section = std::function<void()>;

// Every contender as the same two critical sections.
struct Lock {
  virtual ~Lock() = default;
  virtual void read(const Section &hold) = 0;
  virtual void write(const Section &hold) = 0;
};

struct RwLock : Lock {
  pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
  void read(const Section &hold) override { pthread_rwlock_rdlock(&lock), hold(), pthread_rwlock_unlock(&lock); }
  void write(const Section &hold) override { pthread_rwlock_wrlock(&lock), hold(), pthread_rwlock_unlock(&lock); }
};

struct SharedMutex : Lock {
  std::shared_mutex lock;
  void read(const Section &hold) override { lock.lock_shared(), hold(), lock.unlock_shared(); }
  void write(const Section &hold) override { lock.lock(), hold(), lock.unlock(); }
};

struct Mutex : Lock {
  std::mutex lock;
  void read(const Section &hold) override { write(hold); }
  void write(const Section &hold) override { lock.lock(), hold(), lock.unlock(); }
};

struct Queue : Lock {
  LeaseQueue *queue = new LeaseQueue;
  ~Queue() override { queue->release_ref(); }
  void go(Request request, const Section &hold) {
    CHECK_OK(queue->acquire(request, LKV_FOREVER));
    hold();
    queue->release(request);
  }
  void read(const Section &hold) override { go(Request::reading({0, 8}, 1), hold); }
  void write(const Section &hold) override { go(Request::writing({0, 8}, 1), hold); }
};

// ---- uncontended: no indirection, the loops are the compiler's to see through ----

void uncontended() {
  constexpr int loops = 50'000, rounds = 31;
  std::atomic<bool> stop{false};  // glibc's mutex skips its atomic instructions in a process of one thread
  std::thread second([&] { while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  pthread_rwlock_t rw = PTHREAD_RWLOCK_INITIALIZER;
  std::shared_mutex shared;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  auto *queue = new LeaseQueue;
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = d.row_bytes = 8;
  lkv_buffer *buffer;
  CHECK_OK(api.buffer_create(&d, &buffer));
  const auto lease = [&](lkv_mode mode) {
    lkv_lease *held;
    CHECK_OK(api.lease_acquire(buffer, mode, 0, 8, LKV_FOREVER, &held));
    api.lease_release(held);
  };
  const auto queued = [&](Request request) {
    CHECK_OK(queue->acquire(request, LKV_FOREVER));
    queue->release(request);
  };
  std::vector<std::pair<std::string, std::vector<double>>> table;
  const auto measure = [&](std::size_t row, const char *name, auto call) {
    if (table.size() <= row) table.push_back({name, {}});
    const auto start = Clock::now();
    for (int i = 0; i < loops; i++) call();
    table[row].second.push_back(since(start) / loops);
  };
  for (int round = 0; round < rounds; round++) {
    measure(0, "pthread_rwlock read", [&] { pthread_rwlock_rdlock(&rw), pthread_rwlock_unlock(&rw); });
    measure(1, "pthread_rwlock write", [&] { pthread_rwlock_wrlock(&rw), pthread_rwlock_unlock(&rw); });
    measure(2, "std::shared_mutex read", [&] { shared.lock_shared(), shared.unlock_shared(); });
    measure(3, "std::shared_mutex write", [&] { shared.lock(), shared.unlock(); });
    measure(4, "pthread_mutex", [&] { pthread_mutex_lock(&mutex), pthread_mutex_unlock(&mutex); });
    measure(5, "LeaseQueue read", [&] { queued(Request::reading({0, 8}, 1)); });
    measure(6, "LeaseQueue write", [&] { queued(Request::writing({0, 8}, 1)); });
    measure(7, "LeaseQueue step", [&] { queued(Request::step(1)); });
    measure(8, "lkv_lease read", [&] { lease(LKV_READ); });
    measure(9, "lkv_lease write", [&] { lease(LKV_WRITE); });
  }
  const double unit = median(table[0].second);
  std::printf("uncontended acquire + release          ns  x rwlock read\n");
  for (auto &[name, times] : table)
    std::printf("  %-30s %8.1f  %6.2f\n", name.c_str(), median(times), median(times) / unit);
  stop = true;
  second.join();
  api.buffer_release(buffer);
  queue->release_ref();
}

// ---- one writer and one reader of the same rows ----

struct Contended {
  double ns_per_operation, ns_per_handover;
};

Contended contend(Lock &lock, int hold, double seconds) {
  std::atomic<bool> go{false}, stop{false};
  long operations[2] = {0, 0}, handovers = 0;
  int last = -1;  // plain: either side excludes the other
  const auto side = [&](int me) {
    pin(me);
    const Section inside = [&, me] {
      if (last != me) last = me, handovers++;
      work(hold);
    };
    while (!go) std::this_thread::yield();
    long count = 0;
    for (; !stop.load(std::memory_order_relaxed); count++) me ? lock.write(inside) : lock.read(inside);
    operations[me] = count;
  };
  std::thread reader(side, 0), writer(side, 1);
  const auto start = Clock::now();
  go = true;
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  reader.join(), writer.join();
  const double elapsed = since(start);
  return {elapsed / static_cast<double>(operations[0] + operations[1]),
          elapsed / static_cast<double>(std::max(handovers, 1L))};
}

template <class Call>
void each_lock(Call call) {
  RwLock rw;
  SharedMutex shared;
  Mutex mutex;
  Queue queue;
  call("pthread_rwlock", rw);
  call("std::shared_mutex", shared);
  call("std::mutex", mutex);
  call("LeaseQueue", queue);
}

void contended(const char *what, int hold, double seconds) {
  std::map<std::string, std::vector<double>> operation, handover;
  for (int round = 0; round < 5; round++)
    each_lock([&](const char *name, Lock &lock) {
      const Contended c = contend(lock, hold, seconds);
      operation[name].push_back(c.ns_per_operation);
      handover[name].push_back(c.ns_per_handover);
    });
  const double unit = median(operation["std::shared_mutex"]), per = median(handover["std::shared_mutex"]);
  std::printf("one writer, one reader, holding %s: ns per operation  x shared_mutex    per handover  x\n", what);
  for (auto &[name, times] : operation)
    std::printf("  %-36s %10.0f  %6.2f  %14.0f  %6.2f\n", name.c_str(), median(times), median(times) / unit,
                median(handover[name]), median(handover[name]) / per);
}

// ---- one writer against readers that overlap in time ----

void starve(const char *name, Lock &lock, double seconds) {
  std::atomic<bool> stop{false};
  std::atomic<long> reads{0};
  long writes = 0;
  double worst = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&] {
      while (!stop) {
        lock.read([] { std::this_thread::sleep_for(std::chrono::microseconds(200)); });
        reads++;
      }
    });
  threads.emplace_back([&] {
    while (!stop) {
      const auto asked = Clock::now();
      lock.write([] {});
      worst = std::max(worst, since(asked));
      writes++;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (auto &thread : threads) thread.join();
  std::printf("  %-36s %10.0f reads/s  %8.0f writes/s  worst wait of the writer %8.2f ms\n", name,
              static_cast<double>(reads.load()) / seconds, static_cast<double>(writes) / seconds, worst / 1e6);
}

}  // namespace

int main(int argc, char **argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0.2;
  const std::string only = argc > 2 ? argv[2] : "";
  const auto wanted = [&](const char *part) { return only.empty() || only == part; };
  if (wanted("uncontended")) uncontended();
  if (wanted("contended")) {
    constexpr int loops = 1'000'000;
    const auto start = Clock::now();
    work(loops);
    const double each = std::max(since(start) / loops, 0.05);
    contended("~0 ns", 0, seconds);
    contended("~100 ns", static_cast<int>(100 / each), seconds);
  }
  if (!wanted("fairness")) return 0;
  std::printf("one writer against four readers that overlap\n");
  each_lock([&](const char *name, Lock &lock) { starve(name, lock, 10 * seconds); });
}
