// A storage: reference-counted rows on one device, with a version, a poison flag, a claimed length and a lease queue.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "device.hpp"
#include "dtype.hpp"
#include "lease_queue.hpp"
#include "lkv.h"
#include "released.hpp"
#include "version.hpp"

struct lkv_buffer {
  std::atomic<std::uint32_t> refs{1};
  std::atomic<bool> poisoned{false};
  bool read_only = false;
  bool strided = false;  // a row is not row_bytes in one place
  bool paged = false;  // anonymous pages of our own: may be populated ahead and given back
  bool huge = false;   // 2 MB of them come with the first touch: populating less ahead would only cost the call
  lkv_dtype dtype = LKV_U8;
  lkv_device *device = nullptr;
  char *data = nullptr;
  std::size_t nbytes = 0;
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;
  std::uint64_t id = 0;
  lkv::Version version;
  std::atomic<std::int64_t> claimed{0};
  std::atomic<std::int64_t> resident{0};  // rows that have pages, or are not worth asking for any
  std::atomic<lkv::LeaseQueue *> queue{nullptr};
  std::atomic<std::uint32_t> epoch{1};
  void (*deleter)(void *context) = nullptr;
  void *context = nullptr;
  bool foreign = false;
  lkv::Tagged tagged;
  void *stream = nullptr;  // where the memory was made, and is given back
  struct Retired {
    lkv::LeaseQueue *queue;
    Retired *next;
  } *retired = nullptr;  // queues of before adopt(), which a late thread may still be looking at

  // What a request on the rows is made with. adopt() changes both: whoever was granted one asks again.
  struct Home {
    lkv::LeaseQueue *queue;
    std::uint32_t epoch;
  };
  // Seeing a queue implies seeing its epoch, or a later one.
  Home home() const noexcept {
    lkv::LeaseQueue *const now = queue.load(std::memory_order_acquire);
    return {now, epoch.load(std::memory_order_acquire)};
  }
  bool still_at(const lkv::LeaseQueue *q, std::uint32_t e) const noexcept {
    const Home now = home();
    return now.queue == q && now.epoch == e;
  }

  void retain() noexcept { refs.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept;
  void bump_version() noexcept { version.bump(); }
};

namespace lkv {

lkv_status create(const lkv_buffer_desc *desc, lkv_buffer **out) noexcept;
lkv_status wrap(const lkv_buffer_desc *desc, void *data, void (*deleter)(void *), void *context,
                lkv_buffer **out) noexcept;
lkv_status claim(lkv_buffer *buffer, std::int64_t expected, std::int64_t claimed) noexcept;
lkv_status release_rows(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi) noexcept;

// From now on `buffer` is leased through `queue`. LKV_E_TIMEOUT when it is leased now, LKV_E_EXISTS
// when it shares a queue with others already.
lkv_status adopt(lkv_buffer *buffer, LeaseQueue *queue) noexcept;
// Would adopt() come through now? Changes nothing.
lkv_status adoptable(lkv_buffer *buffer, const LeaseQueue *queue) noexcept;

// Clears rows [lo, hi); the caller has the right to write them.
lkv_status clear_rows(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi, void *stream = nullptr) noexcept;

// The same without a lease: on the device's side, ordered all the same.
lkv_status clear_ordered(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi) noexcept;

// Gives rows [lo, hi) and some more pages, before they are written: a fault on each page costs six times the write.
// The rows are `outer` runs, `outer_stride` bytes apart, with rows `row_stride` bytes apart. True: some had none.
bool populate_more(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi, std::int64_t outer, std::int64_t outer_stride,
                   std::int64_t row_stride) noexcept;
inline bool populate_ahead(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi, std::int64_t outer,
                           std::int64_t outer_stride, std::int64_t row_stride) noexcept {
  if (hi <= buffer->resident.load(std::memory_order_relaxed) || !buffer->paged) return false;
  return populate_more(buffer, lo, hi, outer, outer_stride, row_stride);
}

// Are there bytes of [offset, offset + nbytes), about to be written, that may have no pages yet?
bool first_touch(lkv_buffer *buffer, std::ptrdiff_t offset, std::size_t nbytes) noexcept;

std::int64_t live_buffers() noexcept;

}  // namespace lkv
