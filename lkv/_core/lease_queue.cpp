#include "lease_queue.hpp"

#include <chrono>

#include "process.hpp"
#include "status.hpp"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace lkv {
namespace {

inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A waiter spins before it parks for as long as it may take a parked one to wake up: then two threads that take turns
// keep meeting awake, and a wait for a holder that is not running wastes no more than its wake-up costs anyway.
constexpr std::chrono::microseconds spin_time(20);
constexpr int spins_per_look = 16;  // at the clock
constexpr int mutex_spins = 100;

constexpr std::int64_t longest_wait = INT64_MAX / 4;  // a clock's time plus this does not overflow

}  // namespace

void Request::resolve(std::int64_t length, std::uint32_t epoch) noexcept {
  if (kind_ == Kind::rows) return;
  epoch_ = epoch;
  resolved_length_ = length;
  if (kind_ == Kind::exclusive) {
    write_ = {0, count_};
    return;
  }
  read_ = {0, length};
  if (kind_ == Kind::step) write_ = {length, count_ > INT64_MAX - length ? INT64_MAX : length + count_};
}

bool Request::conflicts(const Request &other) const noexcept {
  if (moves_length() && other.moves_length()) return true;
  return (epoch_ == other.epoch_ || epoch_ == any_epoch || other.epoch_ == any_epoch) &&
         (write_.overlaps(other.write_) || write_.overlaps(other.read_) || read_.overlaps(other.write_));
}

LeaseQueue::LeaseQueue() noexcept : generation_(process::generation()) { process::enrol(*this); }

LeaseQueue::~LeaseQueue() { process::strike(*this); }

void LeaseQueue::release_ref() noexcept {
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

bool LeaseQueue::forked() const noexcept { return generation_ != process::generation(); }

std::unique_lock<std::mutex> LeaseQueue::lock() noexcept {
  for (int i = 0; i < mutex_spins; i++) {
    std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (guard) return guard;
    relax();
  }
  return std::unique_lock<std::mutex>(mutex_);
}

// The whole of an uncontended acquire: one compare-and-swap.
bool LeaseQueue::try_alone(Request &request) noexcept {
  if (forked() || word_.load(std::memory_order_relaxed) != 0) return false;
  request.owner_ = process::thread_number();
  request.resolve(length(), epoch());
  request.state_.store(Request::State::held, std::memory_order_relaxed);
  std::uintptr_t idle = 0;
  if (!word_.compare_exchange_strong(idle, reinterpret_cast<std::uintptr_t>(&request), std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
    request.state_.store(Request::State::idle, std::memory_order_relaxed);
    return false;
  }
  // A whole step may have come and gone between reading the length and the swap.
  if (request.relative() && (request.resolved_length_ != length() || request.epoch_ != epoch())) {
    release(request);
    return false;
  }
  return true;
}

lkv_status LeaseQueue::enqueue(Request &request, Patience patience) noexcept {
  return try_alone(request) ? LKV_OK : join(request, patience);
}

// The rest of enqueue(), when others are there or were a moment ago.
[[gnu::noinline]] lkv_status LeaseQueue::join(Request &request, Patience patience) noexcept {
  if (forked()) return fail(LKV_E_FORKED, "the storage was made before fork() and cannot be leased in the child");
  request.owner_ = process::thread_number();
  auto guard = lock();
  inflate();
  request.resolve(length(), epoch());
  request.state_.store(Request::State::waiting, std::memory_order_relaxed);
  push(request);
  if (may_go(request)) {
    request.state_.store(Request::State::held, std::memory_order_release);
    return LKV_OK;
  }
  if (patience == Patience::none) {
    drop(request);
    guard.unlock();
    return fail(LKV_E_TIMEOUT, "%s", request.blocked_by_step_ ? "another step is in progress" : "the rows are in use");
  }
  if (patience == Patience::endless) {
    if (const Request *mine = would_wait_for_itself(request)) {
      const bool writes = mine->write_.hi > mine->write_.lo;
      const Span rows = writes ? mine->write_ : mine->read_;
      const bool step = request.blocked_by_step_ = mine->moves_length();
      drop(request);
      guard.unlock();
      return fail(LKV_E_DEADLOCK, "this thread would wait for its own %s of rows [%lld, %lld)",
                  step ? "step" : writes ? "write lease" : "read lease", static_cast<long long>(rows.lo),
                  static_cast<long long>(rows.hi));
    }
  }
  return LKV_E_TIMEOUT;
}

lkv_status LeaseQueue::wait(Request &request, std::int64_t timeout_ns) noexcept {
  const auto start = std::chrono::steady_clock::now();
  const auto until = start + std::chrono::nanoseconds(std::clamp(timeout_ns, std::int64_t{0}, longest_wait));
  const auto awake = timeout_ns < 0 ? start + spin_time : std::min(until, start + spin_time);
  do {
    for (int i = 0; i < spins_per_look; i++) {
      if (request.held()) return LKV_OK;
      relax();
    }
  } while (std::chrono::steady_clock::now() < awake);
  auto guard = lock();
  std::condition_variable wake;
  request.waiter_ = &wake;
  lkv_status status = LKV_OK;
  while (!request.held()) {
    if (process::ending()) {
      status = LKV_E_SHUTDOWN;
      break;
    }
    if (timeout_ns < 0) {
      wake.wait(guard);
    } else if (wake.wait_until(guard, until) == std::cv_status::timeout && !request.held()) {
      status = LKV_E_TIMEOUT;
      break;
    }
  }
  request.waiter_ = nullptr;
  guard.unlock();
  return status == LKV_E_SHUTDOWN ? fail(status, "the process is ending") : status;
}

bool LeaseQueue::withdraw(Request &request) noexcept {
  auto guard = lock();
  if (request.held()) return false;
  drop(request);
  promote();
  return true;
}

lkv_status LeaseQueue::acquire(Request &request, std::int64_t timeout_ns) noexcept {
  if (try_alone(request)) return LKV_OK;
  const Patience patience = timeout_ns < 0 ? Patience::endless : timeout_ns ? Patience::bounded : Patience::none;
  lkv_status status = join(request, patience);
  if (status != LKV_E_TIMEOUT || patience == Patience::none) return status;
  status = wait(request, timeout_ns);
  if (status == LKV_OK || !withdraw(request)) return LKV_OK;
  if (status == LKV_E_TIMEOUT) fail(status, "the rows were not free within %.3f s", static_cast<double>(timeout_ns) / 1e9);
  return status;
}

void LeaseQueue::release(Request &request) noexcept {
  if (forked()) return;  // the mutex may be held by a thread that this process does not have
  // Once the swap is done the request is unknown to every other thread and may go.
  std::uintptr_t alone = reinterpret_cast<std::uintptr_t>(&request);
  if (word_.compare_exchange_strong(alone, 0, std::memory_order_acq_rel, std::memory_order_relaxed)) return;
  auto guard = lock();
  if (!request.linked_) return;
  drop(request);
  promote();
}

void LeaseQueue::downgrade(Request &request) noexcept {
  if (forked()) return;
  auto guard = lock();
  inflate();
  if (request.linked_) {
    request.read_ = request.write_;
    request.write_ = {};
    promote();
  }
  deflate();
}

void LeaseQueue::wake_all() noexcept {
  if (forked()) return;
  auto guard = lock();
  for (Request *p = head_; p; p = p->next_)
    if (p->waiter_) p->waiter_->notify_one();
}

// ---- under the mutex ----

// Moves a request that is held alone into the list. Its own release() then fails its swap and comes here.
void LeaseQueue::inflate() noexcept {
  std::uintptr_t word = word_.load(std::memory_order_acquire);
  while (word != inflated) {
    if (!word_.compare_exchange_weak(word, inflated, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    if (word != 0) push(*reinterpret_cast<Request *>(word));
    return;
  }
}

void LeaseQueue::push(Request &request) noexcept {
  request.prev_ = tail_;
  request.next_ = nullptr;
  (tail_ ? tail_->next_ : head_) = &request;
  tail_ = &request;
  request.linked_ = true;
}

void LeaseQueue::drop(Request &request) noexcept {
  (request.prev_ ? request.prev_->next_ : head_) = request.next_;
  (request.next_ ? request.next_->prev_ : tail_) = request.prev_;
  request.linked_ = false;
  deflate();
}

void LeaseQueue::deflate() noexcept {
  if (!head_) word_.store(0, std::memory_order_release);
}

bool LeaseQueue::may_go(Request &request) const noexcept {
  for (const Request *p = request.prev_; p; p = p->prev_) {
    if (!p->conflicts(request)) continue;
    request.blocked_by_step_ = p->moves_length() && request.moves_length();
    return false;
  }
  if (!request.relative()) return true;
  // What came behind it was let past the rows it stood for then. The length has moved since, and its rows with it.
  for (const Request *p = request.next_; p; p = p->next_)
    if (p->held() && p->conflicts(request)) return false;
  return true;
}

void LeaseQueue::promote() noexcept {
  for (Request *p = head_; p; p = p->next_) {
    if (p->held()) continue;
    p->resolve(length(), epoch());
    if (!may_go(*p)) continue;
    p->state_.store(Request::State::held, std::memory_order_release);
    // Under the mutex: the waiter's condition variable is on its stack and gone once it has seen the grant.
    if (p->waiter_) p->waiter_->notify_one();
  }
}

// Follows, backwards through the list, everything that `request` would wait for, itself or through other waiters.
const Request *LeaseQueue::would_wait_for_itself(Request &request) noexcept {
  for (Request *p = head_; p; p = p->next_) p->marked_ = false;
  request.marked_ = true;
  for (Request *p = request.prev_; p; p = p->prev_) {
    for (const Request *q = p->next_; q && !p->marked_; q = q->next_)
      p->marked_ = q->marked_ && !q->held() && p->conflicts(*q);
    if (!p->marked_) continue;
    if (p->owner_ == request.owner_) return p;
    if (p->held() || !p->relative()) continue;
    for (const Request *q = p->next_; q; q = q->next_)
      if (q->held() && q->owner_ == request.owner_ && q->conflicts(*p)) return q;
  }
  return nullptr;
}

}  // namespace lkv
