// A version: how many writes have been completed, by any number of threads.
#pragma once
#include <atomic>
#include <cstdint>

namespace lkv {

class Version {
 public:
  std::uint64_t now() const noexcept {
    return bumps_.load(std::memory_order_acquire) + writes_.load(std::memory_order_acquire);
  }
  void bump() noexcept { bumps_.fetch_add(1, std::memory_order_acq_rel); }
  // Of those who call this, one at a time. A locked instruction would wait until the rows that were just copied have left
  // the processor's store buffer.
  void bump_alone() noexcept { writes_.store(writes_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
  void reset() noexcept {
    bumps_.store(0, std::memory_order_relaxed);
    writes_.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> bumps_{0}, writes_{0};
};

}  // namespace lkv
