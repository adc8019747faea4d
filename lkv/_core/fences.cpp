#include "fences.hpp"

#include <atomic>
#include <new>


namespace lkv {

// Counted: a fence may be dropped by one thread while another still waits through its event.
struct Fences::Event {
  std::atomic<int> refs{1};
  lkv_device *device;
  void *stream;
  void *event;

  static void release(Event *event) noexcept {
    if (event && event->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      event->device->table.event_free(event->device->context, event->event);
      delete event;
    }
  }
};

struct Fences::Fence {
  Event *event;
  Rows rows;
  std::uint64_t serial;
  Fence *next;

  bool conflicts(const Rows &other) const noexcept {
    return rows.epoch == other.epoch && (rows.write.overlaps(other.write) || rows.write.overlaps(other.read) ||
                                         rows.read.overlaps(other.write));
  }
  // One stream works in order: its later event stands for the earlier one too.
  bool absorbs(const Fence &earlier) const noexcept {
    return event->stream == earlier.event->stream && event->device == earlier.event->device && rows.epoch == earlier.rows.epoch &&
           rows.read.joins(earlier.rows.read) && rows.write.joins(earlier.rows.write);
  }
};

Fences::~Fences() {
  while (Fence *fence = first_) {
    first_ = fence->next;
    Event::release(fence->event);
    delete fence;
  }
}

void Fences::leave(lkv_device *device, void *stream, const Rows &rows) noexcept {
  if (rows.read.empty() && rows.write.empty()) return;
  prune();
  auto *event = new (std::nothrow) Event;
  auto *fence = new (std::nothrow) Fence;
  void *recorded = nullptr;
  if (!event || !fence || device->table.event_record(device->context, stream, &recorded) != LKV_OK) {
    delete event;
    delete fence;
    device->sync(stream);
    return;
  }
  event->device = device;
  event->stream = stream;
  event->event = recorded;
  *fence = {event, rows, 0, nullptr};
  Fence *dropped = nullptr;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    fence->serial = ++serial_;
    for (Fence **at = &first_; *at;) {
      Fence *earlier = *at;
      if (!fence->absorbs(*earlier)) {
        at = &earlier->next;
        continue;
      }
      fence->rows.read = fence->rows.read.hull(earlier->rows.read);
      fence->rows.write = fence->rows.write.hull(earlier->rows.write);
      *at = earlier->next;
      earlier->next = dropped;
      dropped = earlier;
    }
    fence->next = first_;
    first_ = fence;
  }
  while (dropped) {
    Fence *next = dropped->next;
    Event::release(dropped->event);
    delete dropped;
    dropped = next;
  }
}

lkv_status Fences::pass(lkv_device *device, void *stream, const Rows &rows) noexcept {
  std::uint64_t serial = UINT64_MAX;  // newest first, so that what is added meanwhile is not waited for
  while (Event *event = next_conflict(device, stream, rows, serial, &serial)) {
    const lkv_status status = event->device == device
                                  ? device->table.event_wait(device->context, stream, event->event)
                                  : event->device->sync(event->stream);  // no stream here can wait for it
    Event::release(event);
    if (status != LKV_OK) return status;
  }
  return LKV_OK;
}

Fences::Event *Fences::next_conflict(lkv_device *device, void *stream, const Rows &rows, std::uint64_t before,
                                     std::uint64_t *serial) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  for (Fence *fence = first_; fence; fence = fence->next) {
    const bool own = fence->event->device == device && fence->event->stream == stream;
    if (fence->serial >= before || own || !fence->conflicts(rows)) continue;
    *serial = fence->serial;
    fence->event->refs.fetch_add(1, std::memory_order_relaxed);
    return fence->event;
  }
  return nullptr;
}

// Forgets fences whose events have been reached. The question goes to the device, so not under the mutex.
void Fences::prune() noexcept {
  std::uint64_t before = UINT64_MAX;
  for (;;) {
    Event *event = nullptr;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (Fence *fence = first_; fence && !event; fence = fence->next) {
        if (fence->serial >= before) continue;
        before = fence->serial;
        event = fence->event;
        event->refs.fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (!event) return;
    Fence *gone = nullptr;
    if (event->device->table.event_done(event->device->context, event->event)) {
      std::lock_guard<std::mutex> guard(mutex_);
      for (Fence **at = &first_; *at; at = &(*at)->next) {
        if ((*at)->serial != before) continue;
        gone = *at;
        *at = gone->next;
        break;
      }
    }
    if (gone) {
      Event::release(gone->event);
      delete gone;
    }
    Event::release(event);
  }
}

lkv_status join_streams(lkv_device *device, void *from, void *to) noexcept {
  if (from == to || !queues_work(device)) return LKV_OK;
  void *event;
  if (lkv_status status = device->table.event_record(device->context, from, &event)) return status;
  const lkv_status status = device->table.event_wait(device->context, to, event);
  device->table.event_free(device->context, event);
  return status;
}

}  // namespace lkv
