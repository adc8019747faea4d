// A lease: a held request on a queue, reference-counted, ended once.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lease_queue.hpp"
#include "released.hpp"
#include "storage.hpp"

struct lkv_lease {
  enum class Right : std::uint8_t { reading, writing, ended };

  std::atomic<std::uint32_t> refs{1};
  std::atomic<Right> right;     // who takes it out of `writing` owes the buffer a version
  std::atomic<lkv_mode> mode;   // stays what it was when the right has ended
  lkv_buffer *buffer;      // NULL: of all storages of a cache
  lkv::LeaseQueue *queue;  // kept alive by the buffer, or by a reference when there is none
  const lkv::Span rows;    // of `buffer`
  lkv_device *const device;
  void *stream = nullptr;  // what the lease covers is queued here
  lkv::Request request;
  lkv::Tagged tagged;

  lkv_lease(lkv_mode m, lkv_buffer *b, lkv_device *d, lkv::LeaseQueue *q, lkv::Request &&r) noexcept
      : right(m == LKV_WRITE ? Right::writing : Right::reading), mode(m), buffer(b), queue(q),
        rows(m == LKV_WRITE ? r.write_rows() : r.read_rows()), device(d), request(static_cast<lkv::Request &&>(r)) {}

  // After the grant, on the device's side: the calling thread's stream waits for what others left queued.
  lkv_status enter() noexcept {
    return lkv::has_streams(device) ? enter_queue() : LKV_OK;
  }
  bool active() const noexcept { return right.load(std::memory_order_acquire) != Right::ended; }
  void retain() noexcept { refs.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept;
  void end(bool poison) noexcept { finish(right.exchange(Right::ended, std::memory_order_acq_rel), poison); }

 private:
  lkv_status enter_queue() noexcept;
  void leave_queue() noexcept;
  lkv::Fences::Rows fenced() const noexcept {
    return {request.read_rows(), request.write_rows(), request.epoch()};
  }
  void finish(Right had, bool poison) noexcept;
};

namespace lkv {

// A lease that is yet to be acquired through its queue; NULL when memory is out. Holds what it needs to stay valid.
lkv_lease *new_lease(lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi) noexcept;
// Of all storages that share the queue: published rows, a step of `count` rows, or rows [0, count) exclusively.
lkv_lease *new_lease(LeaseQueue *queue, lkv_device *device, Request::Kind kind, std::int64_t count) noexcept;
// Gives back one that was never acquired.
void discard(lkv_lease *lease) noexcept;

// Is [lo, hi) a range of the buffer, and may it be leased so? The checks of an acquire that need no waiting.
lkv_status check_acquire(const lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi) noexcept;
// After the grant: was the buffer adopted by another queue, or poisoned, meanwhile? LKV_E_CONFLICT: acquire again.
// Enters when all is well.
lkv_status check_granted(lkv_lease *lease) noexcept;

lkv_status acquire(lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi, std::int64_t timeout,
                   lkv_lease **out) noexcept;
lkv_status downgrade(lkv_lease *lease) noexcept;
lkv_status span(const lkv_lease *lease, lkv_lease_span *out) noexcept;

// `height` runs of `width` bytes inside the leased rows of each.
lkv_status copy_2d(lkv_lease *dst, std::size_t dst_offset, std::size_t dst_pitch, const lkv_lease *src,
                   std::size_t src_offset, std::size_t src_pitch, std::size_t width, std::size_t height) noexcept;
lkv_status fill_zero(lkv_lease *lease, std::size_t offset, std::size_t nbytes) noexcept;
lkv_status read_host(const lkv_lease *lease, std::size_t offset, void *dst, std::size_t nbytes) noexcept;
lkv_status write_host(lkv_lease *lease, std::size_t offset, const void *src, std::size_t nbytes) noexcept;

}  // namespace lkv
