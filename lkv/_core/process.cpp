#include "process.hpp"

#include <pthread.h>

#include <mutex>

#include "lease_queue.hpp"

namespace lkv::process {
namespace detail {
std::atomic<std::uint32_t> generation{1};
std::atomic<bool> ending{false};
}  // namespace detail

namespace {

// Never destroyed: a queue may be released by a thread that outlives static destructors.
struct Register {
  std::mutex mutex;
  LeaseQueue *first = nullptr;
};

Register &queues() noexcept {
  static Register *const all = [] {
    static std::aligned_storage_t<sizeof(Register), alignof(Register)> place;
    auto *made = new (&place) Register;
    // The register's mutex is the only lock of the core that a child of fork() may use: it must not be held by a
    // thread that the child does not have.
    pthread_atfork([] { queues().mutex.lock(); }, [] { queues().mutex.unlock(); },
                   [] {
                     queues().mutex.unlock();
                     detail::generation.fetch_add(1, std::memory_order_relaxed);
                   });
    return made;
  }();
  return *all;
}

}  // namespace

std::uint32_t watched_generation() noexcept {
  queues();
  return generation();
}

void end() noexcept {
  Register &all = queues();
  std::lock_guard<std::mutex> guard(all.mutex);
  detail::ending.store(true, std::memory_order_release);
  for (LeaseQueue *queue = all.first; queue; queue = queue->register_next_) queue->wake_all();
}

std::uint64_t thread_number() noexcept {
  static std::atomic<std::uint64_t> next{1};
  static thread_local std::uint64_t mine = 0;
  if (!mine) mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

void enrol(LeaseQueue &queue) noexcept {
  Register &all = queues();
  std::lock_guard<std::mutex> guard(all.mutex);
  queue.register_next_ = all.first;
  if (all.first) all.first->register_prev_ = &queue;
  all.first = &queue;
}

void strike(LeaseQueue &queue) noexcept {
  Register &all = queues();
  std::lock_guard<std::mutex> guard(all.mutex);
  (queue.register_prev_ ? queue.register_prev_->register_next_ : all.first) = queue.register_next_;
  if (queue.register_next_) queue.register_next_->register_prev_ = queue.register_prev_;
}

}  // namespace lkv::process
