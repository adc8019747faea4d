// What happens to the whole process: fork, and the end.
#pragma once
#include <atomic>
#include <cstdint>

namespace lkv {

class LeaseQueue;

namespace process {

namespace detail {
extern std::atomic<std::uint32_t> generation;
extern std::atomic<bool> ending;
}  // namespace detail

// Counts the forks above this process. A queue made under another generation must not be waited on: the threads
// that would release it are not in this process.
inline std::uint32_t generation() noexcept { return detail::generation.load(std::memory_order_relaxed); }

// The same for who has no queue yet: before the first one, nothing counts forks.
std::uint32_t watched_generation() noexcept;

inline bool ending() noexcept { return detail::ending.load(std::memory_order_acquire); }

// Wakes every waiter with LKV_E_SHUTDOWN, now and for ever. Releases stay safe.
void end() noexcept;

// A number for the calling thread that no other thread of this process ever had.
std::uint64_t thread_number() noexcept;

// Every live queue is known, so that end() finds the waiters.
void enrol(LeaseQueue &queue) noexcept;
void strike(LeaseQueue &queue) noexcept;

}  // namespace process
}  // namespace lkv
