// What leases leave behind on a device that queues its work: events that later leases must wait for, on the device.
//
// A lease ends when its holder is done asking, which is before the device is done working. Whoever leases the rows next,
// from another stream, makes its stream wait for the event that the lease left.
#pragma once
#include <cstdint>
#include <mutex>

#include "device.hpp"
#include "span.hpp"

namespace lkv {

class Fences {
 public:
  struct Rows {
    Span read, write;
    std::uint32_t epoch;
  };

  Fences() = default;
  Fences(const Fences &) = delete;
  ~Fences();

  // The work queued on `stream` so far uses these rows. Never fails: what cannot be recorded is waited for.
  void leave(lkv_device *device, void *stream, const Rows &rows) noexcept;
  // Lets later work of `stream` wait for what conflicts and comes from other streams.
  lkv_status pass(lkv_device *device, void *stream, const Rows &rows) noexcept;

 private:
  struct Event;
  struct Fence;
  void prune() noexcept;
  Event *next_conflict(lkv_device *device, void *stream, const Rows &rows, std::uint64_t before,
                       std::uint64_t *serial) noexcept;

  std::mutex mutex_;  // leaf: no device call under it
  Fence *first_ = nullptr;
  std::uint64_t serial_ = 0;
};

inline bool has_streams(const lkv_device *device) noexcept {
  return device->table.current_stream || device->table.event_record;
}

// Does the device work in queues, so that leases must leave fences?
inline bool queues_work(const lkv_device *device) noexcept { return device->table.event_record != nullptr; }

// Lets later work of stream `to` wait for the work queued on `from`.
lkv_status join_streams(lkv_device *device, void *from, void *to) noexcept;

}  // namespace lkv
