#include "storage.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "cpu_device.hpp"
#include "status.hpp"

namespace lkv {
namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::uint64_t> next_id{1};

// A few percent beyond what is needed, so that resident memory stays close to the bytes written.
constexpr std::int64_t ahead_least = std::int64_t{16} << 10;
constexpr std::int64_t ahead_most = std::int64_t{2} << 20;
constexpr std::int64_t ahead_share = 16;

lkv_status describe(const char *what, const lkv_buffer_desc *desc, lkv_buffer **out, lkv_buffer_desc *full) noexcept {
  if (!out) return fail(LKV_E_INVALID, "%s: out is NULL", what);
  *out = nullptr;
  if (!desc || desc->struct_size < offsetof(lkv_buffer_desc, dtype))
    return fail(LKV_E_INVALID, "%s: desc is NULL or its struct_size is too small", what);
  std::memset(full, 0, sizeof *full);
  std::memcpy(full, desc, std::min(desc->struct_size, sizeof *full));
  if (!full->device) full->device = devices::cpu();
  if (!full->dtype) full->dtype = LKV_U8;
  const DTypeInfo *dtype = dtype_info(full->dtype);
  if (!dtype) return fail(LKV_E_INVALID, "%s: %d is no dtype", what, full->dtype);
  std::int64_t nbytes;
  if (full->rows <= 0 || full->row_bytes <= 0 || __builtin_mul_overflow(full->rows, full->row_bytes, &nbytes) ||
      nbytes > PTRDIFF_MAX)
    return fail(LKV_E_INVALID, "%s: %lld rows of %lld bytes is not a size", what, static_cast<long long>(full->rows),
                static_cast<long long>(full->row_bytes));
  if (full->row_bytes % dtype->itemsize)
    return fail(LKV_E_INVALID, "%s: a row of %lld bytes is no whole number of %d-byte elements", what,
                static_cast<long long>(full->row_bytes), dtype->itemsize);
  if (released(full->queue_of)) return fail(LKV_E_INVALID, "%s: queue_of was released", what);
  if (full->queue_of && full->queue_of->rows != full->rows)
    return fail(LKV_E_INVALID, "%s: queue_of has %lld rows, expected %lld", what,
                static_cast<long long>(full->queue_of->rows), static_cast<long long>(full->rows));
  return LKV_OK;
}

lkv_buffer *make(const lkv_buffer_desc &desc) noexcept {
  auto *buffer = new (std::nothrow) lkv_buffer;
  LeaseQueue *queue = desc.queue_of ? desc.queue_of->queue.load(std::memory_order_acquire) : nullptr;
  if (queue)
    queue->retain();
  else if (buffer)
    queue = new (std::nothrow) LeaseQueue;
  if (!buffer || !queue) {
    delete buffer;
    fail(LKV_E_NOMEM, "out of memory for a storage's header");
    return nullptr;
  }
  buffer->device = desc.device;
  buffer->rows = desc.rows;
  buffer->row_bytes = desc.row_bytes;
  buffer->nbytes = static_cast<std::size_t>(desc.rows) * static_cast<std::size_t>(desc.row_bytes);
  buffer->dtype = desc.dtype;
  buffer->read_only = desc.flags & LKV_READ_ONLY_MEMORY;
  buffer->strided = desc.flags & LKV_STRIDED_ROWS;
  buffer->id = next_id.fetch_add(1, std::memory_order_relaxed);
  buffer->queue.store(queue, std::memory_order_release);
  buffer->epoch.store(queue->epoch(), std::memory_order_release);
  live.fetch_add(1, std::memory_order_relaxed);
  return buffer;
}

// Whoever leases a row waits for what is queued on the buffer's own stream.
void fence_all(lkv_buffer *buffer) noexcept {
  const lkv_buffer::Home home = buffer->home();
  home.queue->fences.leave(buffer->device, buffer->stream, {{}, {0, buffer->rows}, home.epoch});
}

// The buffer's own stream waits for whoever has leased a row.
void pass_all(lkv_buffer *buffer) noexcept {
  const lkv_buffer::Home home = buffer->home();
  if (home.queue->fences.pass(buffer->device, buffer->stream, {{}, {0, buffer->rows}, home.epoch}) != LKV_OK)
    buffer->device->sync(nullptr);
}

void dispose(lkv_buffer *buffer) noexcept {
  while (lkv_buffer::Retired *old = buffer->retired) {
    buffer->retired = old->next;
    old->queue->release_ref();
    delete old;
  }
  buffer->queue.load(std::memory_order_acquire)->release_ref();
  live.fetch_sub(1, std::memory_order_relaxed);
  dispose_of(buffer);
}

}  // namespace

lkv_status create(const lkv_buffer_desc *desc, lkv_buffer **out) noexcept {
  lkv_buffer_desc full;
  if (lkv_status status = describe("buffer_create", desc, out, &full)) return status;
  if (full.flags & ~static_cast<std::uint32_t>(LKV_HUGE_PAGES | LKV_STRIDED_ROWS))
    return fail(LKV_E_INVALID, "buffer_create: flags 0x%x are unknown", full.flags);
  lkv_buffer *buffer = make(full);
  if (!buffer) return LKV_E_NOMEM;
  void *data = nullptr;
  if (lkv_status status = full.device->allocate(buffer->nbytes, full.flags, &data)) {
    dispose(buffer);
    return status;
  }
  buffer->data = static_cast<char *>(data);
  buffer->paged = full.device->is_cpu() && cpu::paged(buffer->nbytes);
  buffer->huge = full.flags & LKV_HUGE_PAGES;
  if (queues_work(full.device)) {
    buffer->stream = full.device->current_stream();
    fence_all(buffer);  // of the zeros
  }
  *out = buffer;
  return LKV_OK;
}

lkv_status wrap(const lkv_buffer_desc *desc, void *data, void (*deleter)(void *), void *context,
                lkv_buffer **out) noexcept {
  lkv_buffer_desc full;
  if (lkv_status status = describe("buffer_wrap", desc, out, &full)) return status;
  if (!data) return fail(LKV_E_INVALID, "buffer_wrap: data is NULL");
  if (full.flags & ~static_cast<std::uint32_t>(LKV_READ_ONLY_MEMORY | LKV_STRIDED_ROWS))
    return fail(LKV_E_INVALID, "buffer_wrap: flags 0x%x are unknown", full.flags);
  lkv_buffer *buffer = make(full);
  if (!buffer) return LKV_E_NOMEM;
  buffer->data = static_cast<char *>(data);
  buffer->foreign = true;
  buffer->deleter = deleter;
  buffer->context = context;
  *out = buffer;
  return LKV_OK;
}

lkv_status claim(lkv_buffer *buffer, std::int64_t expected, std::int64_t claimed) noexcept {
  if (!buffer) return fail(LKV_E_INVALID, "buffer_claim: buffer is NULL");
  if (released(buffer)) return fail(LKV_E_INVALID, "buffer_claim: the buffer was released");
  if (expected < 0 || claimed < expected || claimed > buffer->rows)
    return fail(LKV_E_INVALID, "buffer_claim: from %lld to %lld of %lld rows", static_cast<long long>(expected),
                static_cast<long long>(claimed), static_cast<long long>(buffer->rows));
  std::int64_t now = expected;
  if (buffer->claimed.compare_exchange_strong(now, claimed, std::memory_order_acq_rel)) return LKV_OK;
  return fail(LKV_E_CONFLICT, "buffer_claim: %lld rows are claimed, expected %lld", static_cast<long long>(now),
              static_cast<long long>(expected));
}

lkv_status clear_rows(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi, void *stream) noexcept {
  if (lo == hi) return LKV_OK;
  char *at = buffer->data + lo * buffer->row_bytes;
  const auto nbytes = static_cast<std::size_t>((hi - lo) * buffer->row_bytes);
  if (!buffer->paged) return buffer->device->fill_zero(at, nbytes, stream);
  cpu::clear_pages(at, nbytes);
  buffer->resident.store(std::min(buffer->resident.load(std::memory_order_relaxed), lo), std::memory_order_relaxed);
  return LKV_OK;
}

lkv_status clear_ordered(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi) noexcept {
  if (!queues_work(buffer->device)) return clear_rows(buffer, lo, hi);
  const lkv_buffer::Home home = buffer->home();
  const Fences::Rows rows{{}, {lo, hi}, home.epoch};
  void *const stream = buffer->device->current_stream();
  if (lkv_status status = home.queue->fences.pass(buffer->device, stream, rows)) return status;
  const lkv_status status = clear_rows(buffer, lo, hi, stream);
  home.queue->fences.leave(buffer->device, stream, rows);
  return status;
}

lkv_status release_rows(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi) noexcept {
  if (!buffer) return fail(LKV_E_INVALID, "buffer_release_rows: buffer is NULL");
  if (released(buffer)) return fail(LKV_E_INVALID, "buffer_release_rows: the buffer was released");
  if (lo < 0 || hi < lo || hi > buffer->rows)
    return fail(LKV_E_INVALID, "buffer_release_rows: [%lld, %lld) is not within [0, %lld)", static_cast<long long>(lo),
                static_cast<long long>(hi), static_cast<long long>(buffer->rows));
  if (buffer->read_only) return fail(LKV_E_READ_ONLY, "buffer_release_rows: the memory is read-only");
  if (buffer->strided && hi - lo < buffer->rows)
    return fail(LKV_E_UNSUPPORTED, "buffer_release_rows: the rows are strided: all of them, or none");
  const lkv_buffer::Home home = buffer->home();
  Request request = Request::writing({lo, hi}, home.epoch);
  if (lkv_status status = home.queue->acquire(request, LKV_TRY)) return status;
  lkv_status status;
  if (buffer->still_at(home.queue, home.epoch)) {
    status = clear_ordered(buffer, lo, hi);
    buffer->bump_version();
  } else {
    status = fail(LKV_E_TIMEOUT, "the rows are in use");
  }
  home.queue->release(request);
  return status;
}

lkv_status adoptable(lkv_buffer *buffer, const LeaseQueue *queue) noexcept {
  const lkv_buffer::Home home = buffer->home();
  if (home.queue != queue && home.queue->shared())
    return fail(LKV_E_EXISTS, "the storage is leased together with others already");
  Request request = Request::writing({0, buffer->rows}, home.epoch);
  if (lkv_status status = home.queue->acquire(request, LKV_TRY)) return status;
  home.queue->release(request);
  return LKV_OK;
}

lkv_status adopt(lkv_buffer *buffer, LeaseQueue *queue) noexcept {
  LeaseQueue *old = buffer->queue.load(std::memory_order_acquire);
  if (old == queue) {
    // It may come back after the cache had dropped it: then what is leased of it is of an older epoch.
    const std::uint32_t epoch = buffer->epoch.load(std::memory_order_acquire);
    if (epoch == queue->epoch()) return LKV_OK;
    Request request = Request::writing({0, buffer->rows}, epoch);
    if (lkv_status status = queue->acquire(request, LKV_TRY)) return status;
    if (queues_work(buffer->device)) pass_all(buffer);
    buffer->epoch.store(queue->epoch(), std::memory_order_release);
    if (queues_work(buffer->device)) fence_all(buffer);
    queue->release(request);
    return LKV_OK;
  }
  if (old->shared()) return fail(LKV_E_EXISTS, "the storage is leased together with others already");
  auto *retired = new (std::nothrow) lkv_buffer::Retired{old, nullptr};
  if (!retired) return fail(LKV_E_NOMEM, "out of memory");
  // Of any epoch: between the two stores below, others make requests with the new epoch on the old queue.
  Request request = Request::writing({0, buffer->rows}, Request::any_epoch);
  if (lkv_status status = old->acquire(request, LKV_TRY)) {
    delete retired;
    return status;
  }
  if (buffer->queue.load(std::memory_order_acquire) != old) {  // another thread was first
    old->release(request);
    delete retired;
    return fail(LKV_E_TIMEOUT, "the rows are in use");
  }
  queue->retain();
  if (queues_work(buffer->device)) pass_all(buffer);
  buffer->epoch.store(queue->epoch(), std::memory_order_release);
  buffer->queue.store(queue, std::memory_order_release);
  if (queues_work(buffer->device)) fence_all(buffer);
  // One reference does not say one user: a thread that borrows it may be on its way into the old queue.
  retired->next = buffer->retired;
  buffer->retired = retired;
  old->release(request);
  return LKV_OK;
}

bool populate_more(lkv_buffer *buffer, std::int64_t lo, std::int64_t hi, std::int64_t outer, std::int64_t outer_stride,
                   std::int64_t row_stride) noexcept {
  const std::int64_t known = buffer->resident.load(std::memory_order_relaxed);
  const std::int64_t from = std::max(known, lo);  // rows that were skipped get theirs when they are touched
  std::int64_t to = hi;
  if (!buffer->huge) {
    const std::int64_t ahead = std::clamp(hi * row_stride / ahead_share, ahead_least, ahead_most) / row_stride + 1;
    if (hi - from < ahead) to = std::min(buffer->rows, hi + ahead);  // else the call is worth it as it is
    for (std::int64_t o = 0; o < outer; o++)
      cpu::populate(buffer->data + o * outer_stride + from * row_stride, static_cast<std::size_t>((to - from) * row_stride));
  }
  buffer->resident.store(to, std::memory_order_relaxed);
  return true;
}

bool first_touch(lkv_buffer *buffer, std::ptrdiff_t offset, std::size_t nbytes) noexcept {
  if (!buffer->paged) return false;
  const std::int64_t known = buffer->resident.load(std::memory_order_relaxed);
  const std::int64_t lo = offset / buffer->row_bytes, hi = (offset + static_cast<std::int64_t>(nbytes)) / buffer->row_bytes;
  if (hi <= known) return false;
  if (lo <= known) buffer->resident.store(hi, std::memory_order_relaxed);
  return true;
}

std::int64_t live_buffers() noexcept { return live.load(std::memory_order_relaxed); }

}  // namespace lkv

void lkv_buffer::release() noexcept {
  if (refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (!foreign && lkv::queues_work(device) && !home().queue->forked()) lkv::pass_all(this);
  if (!foreign)
    device->release(data, nbytes);
  else if (deleter)
    deleter(context);
  lkv::dispose(this);
}
