// Orders leases over row ranges.
//
// Requests stand in one list in arrival order, held and waiting alike, and a request may go when it conflicts with
// nothing before it. That one rule gives exclusion, first-come fairness, and no waiting between requests that do not
// overlap. DESIGN.md beside this file says how the uncontended case gets by without the list.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "fences.hpp"
#include "lkv.h"
#include "span.hpp"

namespace lkv {

// One request: waiting in the queue, then held. It belongs to its owner, a lease or a stack frame, and must stay where
// it is from enqueue() to release() or withdraw().
class Request {
 public:
  enum class Kind : std::uint8_t {
    rows,       // the spans as given
    committed,  // read the published rows, [0, length) at the time of the grant
    step,       // read the published rows, write the `count` rows behind them, and be alone in moving the length
    exclusive   // write rows [0, count) and be alone in moving the length
  };

  // As the epoch of a request: it conflicts with the rows of every epoch.
  static constexpr std::uint32_t any_epoch = 0;

  static Request reading(Span rows, std::uint32_t epoch) noexcept { return {Kind::rows, rows, {}, 0, epoch}; }
  static Request writing(Span rows, std::uint32_t epoch) noexcept { return {Kind::rows, {}, rows, 0, epoch}; }
  static Request committed() noexcept { return {Kind::committed, {}, {}, 0, 0}; }
  static Request step(std::int64_t count) noexcept { return {Kind::step, {}, {}, count, 0}; }
  static Request exclusive(std::int64_t count) noexcept { return {Kind::exclusive, {}, {}, count, 0}; }

  const Span &read_rows() const noexcept { return read_; }
  const Span &write_rows() const noexcept { return write_; }
  std::uint32_t epoch() const noexcept { return epoch_; }
  Kind kind() const noexcept { return kind_; }
  bool held() const noexcept { return state_.load(std::memory_order_acquire) == State::held; }
  // After a try that failed: was another step in the way, or rows that are in use?
  bool blocked_by_step() const noexcept { return blocked_by_step_; }

 private:
  friend class LeaseQueue;
  enum class State : std::uint8_t { idle, waiting, held };

  Request(Kind kind, Span read, Span write, std::int64_t count, std::uint32_t epoch) noexcept
      : read_(read), write_(write), count_(count), epoch_(epoch), kind_(kind) {}

 public:
  Request(Request &&other) noexcept  // only before enqueue()
      : Request(other.kind_, other.read_, other.write_, other.count_, other.epoch_) {}

 private:
  bool relative() const noexcept { return kind_ != Kind::rows; }
  bool moves_length() const noexcept { return kind_ >= Kind::step; }
  void resolve(std::int64_t length, std::uint32_t epoch) noexcept;
  bool conflicts(const Request &other) const noexcept;

  Span read_, write_;
  std::int64_t count_;
  std::int64_t resolved_length_ = 0;
  std::uint64_t owner_ = 0;  // thread_number() of the thread that asked
  std::uint32_t epoch_;
  Kind kind_;
  std::atomic<State> state_{State::idle};
  bool linked_ = false;  // from here on: under the queue's mutex
  bool marked_ = false;
  bool blocked_by_step_ = false;
  Request *prev_ = nullptr, *next_ = nullptr;
  std::condition_variable *waiter_ = nullptr;
};

class LeaseQueue {
 public:
  LeaseQueue() noexcept;
  void retain() noexcept { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release_ref() noexcept;
  bool shared() const noexcept { return refs_.load(std::memory_order_acquire) > 1; }

  // LKV_OK: held. LKV_E_TIMEOUT: not in time, and no trace is left. Also LKV_E_DEADLOCK, LKV_E_FORKED, LKV_E_SHUTDOWN.
  lkv_status acquire(Request &request, std::int64_t timeout_ns) noexcept;
  void release(Request &request) noexcept;
  // Of a held Kind::rows request: its write rows become read rows, without a gap.
  void downgrade(Request &request) noexcept;

  // acquire() in pieces, for a caller that must look around while it waits and keep its place.
  enum class Patience { none, bounded, endless };
  // LKV_OK: held. LKV_E_TIMEOUT: queued (or, with Patience::none, not).
  lkv_status enqueue(Request &request, Patience patience) noexcept;
  // LKV_OK: held. LKV_E_TIMEOUT: still queued. LKV_E_SHUTDOWN: still queued.
  lkv_status wait(Request &request, std::int64_t timeout_ns) noexcept;
  // Takes a queued request out. False: it was granted meanwhile, and is held.
  bool withdraw(Request &request) noexcept;

  // The published length. Only the holder of a step or an exclusive request may move it.
  std::int64_t length() const noexcept { return length_.load(std::memory_order_acquire); }
  void publish(std::int64_t length) noexcept { length_.store(length, std::memory_order_release); }

  // Rows of different epochs never conflict: what is leased of a dropped allocation does not hold up the next one.
  std::uint32_t epoch() const noexcept { return epoch_.load(std::memory_order_acquire); }
  void next_epoch() noexcept { epoch_.fetch_add(1, std::memory_order_acq_rel); }

  bool forked() const noexcept;

  Fences fences;  // of leases that have ended, on devices that queue their work

  void wake_all() noexcept;

  LeaseQueue *register_prev_ = nullptr, *register_next_ = nullptr;  // of process::enrol

 private:
  ~LeaseQueue();
  std::unique_lock<std::mutex> lock() noexcept;
  bool try_alone(Request &request) noexcept;
  lkv_status join(Request &request, Patience patience) noexcept;
  void inflate() noexcept;
  void push(Request &request) noexcept;
  void drop(Request &request) noexcept;
  void deflate() noexcept;
  bool may_go(Request &request) const noexcept;
  void promote() noexcept;
  const Request *would_wait_for_itself(Request &request) noexcept;

  // 0: nobody. A pointer: that request is held, alone, and in no list. inflated: see the list.
  static constexpr std::uintptr_t inflated = 1;
  // What a contended hand-over touches is one cache line where a mutex has 40 bytes.
  alignas(64) std::atomic<std::uintptr_t> word_{0};
  std::mutex mutex_;  // leaf: nothing is called under it but notify
  Request *head_ = nullptr, *tail_ = nullptr;
  std::atomic<std::int64_t> length_{0};
  std::atomic<std::uint32_t> epoch_{1};
  std::atomic<std::uint32_t> refs_{1};
  const std::uint32_t generation_;
};

}  // namespace lkv
