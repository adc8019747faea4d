// Locks of the C and C++ libraries and leases of lkv in the same loops, and appends on several threads at once.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "lkv.h"

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double, std::nano>(Clock::now() - start).count(); }

// ---- five locks, each with a shared and an exclusive side ----

struct RwLock {
  pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
  template <class Hold> void read(Hold hold) { pthread_rwlock_rdlock(&lock), hold(), pthread_rwlock_unlock(&lock); }
  template <class Hold> void write(Hold hold) { pthread_rwlock_wrlock(&lock), hold(), pthread_rwlock_unlock(&lock); }
};

struct SharedMutex {
  std::shared_mutex lock;
  template <class Hold> void read(Hold hold) { lock.lock_shared(), hold(), lock.unlock_shared(); }
  template <class Hold> void write(Hold hold) { lock.lock(), hold(), lock.unlock(); }
};

struct Mutex {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  template <class Hold> void read(Hold hold) { write(hold); }
  template <class Hold> void write(Hold hold) { pthread_mutex_lock(&lock), hold(), pthread_mutex_unlock(&lock); }
};

struct Lease {
  const lkv_api *api;
  lkv_buffer *buffer;
  template <class Hold> void take(lkv_mode mode, Hold hold) {
    lkv_lease *lease;
    if (api->lease_acquire(buffer, mode, 0, 8, LKV_FOREVER, &lease)) std::abort();
    hold();
    api->lease_release(lease);
  }
  template <class Hold> void read(Hold hold) { take(LKV_READ, hold); }
  template <class Hold> void write(Hold hold) { take(LKV_WRITE, hold); }
};

template <class Use>
auto with_lock(long kind, const lkv_api *api, lkv_buffer *buffer, Use use) {
  switch (kind) {
    case 0: { RwLock lock; return use(lock); }
    case 1: { SharedMutex lock; return use(lock); }
    case 2: { Mutex lock; return use(lock); }
    default: { Lease lock{api, buffer}; return use(lock); }
  }
}

template <class Work>
void in_threads(long n, Work work) {
  std::vector<std::thread> threads;
  for (long t = 1; t < n; t++) threads.emplace_back(work, t);
  work(0);
  for (auto &thread : threads) thread.join();
}

}  // namespace

struct Place {  // as in peers.c
  char *to;
  const char *from;
  std::size_t bytes;
  lkv_buffer *buffer;
};

extern "C" {

void lock_pairs(long kind, const lkv_api *api, lkv_buffer *buffer, long n, long write) {
  with_lock(kind, api, buffer, [&](auto &lock) {
    const auto nothing = [] { std::atomic_signal_fence(std::memory_order_seq_cst); };
    for (long i = 0; i < n; i++) write ? lock.write(nothing) : lock.read(nothing);
  });
}

// One writer and one reader of the same rows for so many seconds: nanoseconds per operation of both together.
double contend(long kind, const lkv_api *api, lkv_buffer *buffer, double seconds) {
  return with_lock(kind, api, buffer, [&](auto &lock) {
    std::atomic<bool> stop{false};
    std::atomic<long> ready{0}, operations{0};
    const auto nothing = [] { std::atomic_signal_fence(std::memory_order_seq_cst); };
    const auto side = [&](bool write) {
      for (ready++; ready < 3;) std::this_thread::yield();
      long count = 0;
      for (; !stop.load(std::memory_order_relaxed); count++) write ? lock.write(nothing) : lock.read(nothing);
      operations += count;
    };
    std::thread reader(side, false), writer(side, true);
    ready++;
    const auto start = Clock::now();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    const double elapsed = since(start);
    reader.join(), writer.join();
    return elapsed / static_cast<double>(std::max(operations.load(), 1L));
  });
}

// One writer against four readers that overlap, each holding for 200 us: reads per second, writes per second, the
// writer's longest wait in ms. A writer that never gets in is cut off by the end.
void fairness(long kind, const lkv_api *api, lkv_buffer *buffer, double seconds, double *result) {
  with_lock(kind, api, buffer, [&](auto &lock) {
    const auto pause = [] { std::this_thread::sleep_for(std::chrono::microseconds(200)); };
    std::atomic<bool> stop{false};
    std::atomic<long> reads{0};
    long writes = 0;
    double worst = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
      threads.emplace_back([&] { for (; !stop; reads++) lock.read(pause); });
    threads.emplace_back([&] {
      for (; !stop; pause()) {
        const auto asked = Clock::now();
        lock.write([] {});
        worst = std::max(worst, since(asked));
        writes++;
      }
    });
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    for (auto &thread : threads) thread.join();
    result[0] = static_cast<double>(reads.load()) / seconds;
    result[1] = static_cast<double>(writes) / seconds;
    result[2] = worst / 1e6;
  });
}

// Each thread appends `tokens` rows to places of its own, `n_places` of them; memcpy alone when `api` is NULL.
long append_in_threads(const lkv_api *api, const Place *places, long n_places, long n_threads, long rows, long tokens) {
  std::atomic<long> refused{0};
  in_threads(n_threads, [&](long thread) {
    const Place *own = places + thread * n_places;
    for (long t = 0; t < tokens; t++)
      for (const Place *p = own; p < own + n_places; p++) {
        const long row = t % rows;
        if (api == nullptr) {
          std::memcpy(p->to + row * p->bytes, p->from, p->bytes);
          continue;
        }
        lkv_lease *lease;
        if (api->lease_acquire(p->buffer, LKV_WRITE, row, row + 1, LKV_TRY, &lease)) {
          refused++;
          continue;
        }
        if (api->write_host(lease, 0, p->from, p->bytes)) refused++;
        api->lease_release(lease);
      }
  });
  return refused;
}

// Each thread takes the shared side of one lock `n` times.
void lock_in_threads(long kind, const lkv_api *api, lkv_buffer *buffer, long n_threads, long n) {
  with_lock(kind, api, buffer, [&](auto &lock) {
    const auto nothing = [] { std::atomic_signal_fence(std::memory_order_seq_cst); };
    in_threads(n_threads, [&](long) {
      for (long i = 0; i < n; i++) lock.read(nothing);
    });
  });
}

}  // extern "C"
