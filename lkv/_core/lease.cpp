#include "lease.hpp"

#include <cstring>
#include <memory>
#include <new>

#include "cpu_device.hpp"
#include "status.hpp"

namespace lkv {
namespace {

using ll = long long;

std::size_t leased_bytes(const lkv_lease *lease) noexcept {
  if (lease->buffer->strided) return lease->buffer->nbytes;
  return static_cast<std::size_t>((lease->rows.hi - lease->rows.lo) * lease->buffer->row_bytes);
}

char *leased_data(const lkv_lease *lease) noexcept {
  if (lease->buffer->strided) return lease->buffer->data;
  return lease->buffer->data + lease->rows.lo * lease->buffer->row_bytes;
}

lkv_status check_span(const char *what, const lkv_lease *lease, std::size_t offset, std::size_t pitch,
                      std::size_t width, std::size_t height, bool write) noexcept {
  if (released(lease)) return fail(LKV_E_INVALID, "%s: the lease was released", what);
  if (!lease || !lease->buffer) return fail(LKV_E_INVALID, "%s: lease is NULL or not of one storage", what);
  if (!lease->active()) return fail(LKV_E_ENDED, "%s: the lease has ended", what);
  if (lease->queue->forked()) return fail(LKV_E_FORKED, "%s: the storage was made before fork()", what);
  if (width && lease->buffer->strided && lease->rows.hi - lease->rows.lo < lease->buffer->rows)
    return fail(LKV_E_UNSUPPORTED, "%s: the rows of the storage are strided, and not all of them are leased", what);
  if (write && lease->mode != LKV_WRITE) return fail(LKV_E_READ_ONLY, "%s: the lease is for reading", what);
  if (height > 1 && pitch < width) return fail(LKV_E_INVALID, "%s: a pitch of %zu is below the width %zu", what, pitch, width);
  std::size_t last = 0, end;
  if ((height && __builtin_mul_overflow(height - 1, pitch, &last)) || __builtin_add_overflow(last, width, &end) ||
      __builtin_add_overflow(end, offset, &end) || end > leased_bytes(lease))
    return fail(LKV_E_INVALID, "%s: %zu x %zu bytes from offset %zu do not fit the %zu bytes leased", what, height, width,
                offset, leased_bytes(lease));
  return LKV_OK;
}

lkv_status poison_on_failure(lkv_status status, lkv_buffer *buffer) noexcept {
  if (status != LKV_OK) buffer->poisoned.store(true, std::memory_order_release);
  return status;
}

// Between two devices neither of which is the host: through a host buffer.
lkv_status copy_staged(lkv_lease *to, char *dst, std::size_t dst_pitch, const lkv_lease *from, const char *src,
                       std::size_t src_pitch, std::size_t width, std::size_t height) noexcept {
  std::unique_ptr<char[]> stage(new (std::nothrow) char[width]);
  if (!stage) return fail(LKV_E_NOMEM, "copy: out of host memory for %zu bytes", width);
  for (std::size_t i = 0; i < height; i++, dst += dst_pitch, src += src_pitch) {
    if (lkv_status s = from->device->copy_2d(LKV_DEVICE_TO_HOST, stage.get(), width, src, width, width, 1, from->stream)) return s;
    if (lkv_status s = to->device->copy_2d(LKV_HOST_TO_DEVICE, dst, width, stage.get(), width, width, 1, to->stream)) return s;
  }
  return LKV_OK;
}

// On one device: after the earlier work of both streams, and before the later work of both.
lkv_status copy_ordered(lkv_lease *dst, char *to, std::size_t dst_pitch, const lkv_lease *src, const char *from,
                        std::size_t src_pitch, std::size_t width, std::size_t height) noexcept {
  lkv_device *device = dst->device;
  if (lkv_status status = join_streams(device, src->stream, dst->stream)) return status;
  if (lkv_status status = device->copy_2d(LKV_DEVICE_TO_DEVICE, to, dst_pitch, from, src_pitch, width, height, dst->stream))
    return status;
  return join_streams(device, dst->stream, src->stream);
}

}  // namespace

lkv_lease *new_lease(lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi) noexcept {
  const lkv_buffer::Home home = buffer->home();
  const Span rows{lo, hi};
  auto *lease = new (std::nothrow) lkv_lease(
      mode, buffer, buffer->device, home.queue,
      mode == LKV_WRITE ? Request::writing(rows, home.epoch) : Request::reading(rows, home.epoch));
  if (lease)
    buffer->retain();
  else
    fail(LKV_E_NOMEM, "out of memory for a lease");
  return lease;
}

lkv_lease *new_lease(LeaseQueue *queue, lkv_device *device, Request::Kind kind, std::int64_t count) noexcept {
  const bool reads = kind == Request::Kind::committed;
  auto *lease = new (std::nothrow) lkv_lease(reads ? LKV_READ : LKV_WRITE, nullptr, device, queue,
                                             reads                         ? Request::committed()
                                             : kind == Request::Kind::step ? Request::step(count)
                                                                           : Request::exclusive(count));
  if (lease)
    queue->retain();
  else
    fail(LKV_E_NOMEM, "out of memory for a lease");
  return lease;
}

void discard(lkv_lease *lease) noexcept {
  if (lease->buffer)
    lease->buffer->release();
  else
    lease->queue->release_ref();
  dispose_of(lease);
}

lkv_status check_acquire(const lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi) noexcept {
  if (!buffer) return fail(LKV_E_INVALID, "lease_acquire: buffer is NULL");
  if (released(buffer)) return fail(LKV_E_INVALID, "lease_acquire: the buffer was released");
  if (mode != LKV_READ && mode != LKV_WRITE) return fail(LKV_E_INVALID, "lease_acquire: %d is no mode", mode);
  if (lo < 0 || hi < lo || hi > buffer->rows)
    return fail(LKV_E_INVALID, "rows: [%lld, %lld) is not within [0, %lld)", static_cast<ll>(lo), static_cast<ll>(hi),
                static_cast<ll>(buffer->rows));
  if (mode == LKV_WRITE && buffer->read_only) return fail(LKV_E_READ_ONLY, "the storage's memory is read-only");
  return LKV_OK;
}

lkv_status check_granted(lkv_lease *lease) noexcept {
  const lkv_buffer *buffer = lease->buffer;
  if (!buffer->still_at(lease->queue, lease->request.epoch())) return LKV_E_CONFLICT;
  if (lease->mode == LKV_READ && buffer->poisoned.load(std::memory_order_acquire))
    return fail(LKV_E_POISONED, "a write to the storage failed half-way; write it anew, then call clear_poison()");
  return lease->enter();
}

lkv_status acquire(lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi, std::int64_t timeout,
                   lkv_lease **out) noexcept {
  if (!out) return fail(LKV_E_INVALID, "lease_acquire: out is NULL");
  *out = nullptr;
  if (lkv_status status = check_acquire(buffer, mode, lo, hi)) return status;
  for (;;) {
    lkv_lease *lease = new_lease(buffer, mode, lo, hi);
    if (!lease) return LKV_E_NOMEM;
    if (lkv_status status = lease->queue->acquire(lease->request, timeout)) {
      discard(lease);
      return status;
    }
    lkv_status status = check_granted(lease);
    if (status == LKV_OK) {
      *out = lease;
      return LKV_OK;
    }
    lease->queue->release(lease->request);
    discard(lease);
    if (status != LKV_E_CONFLICT) return status;
  }
}

lkv_status downgrade(lkv_lease *lease) noexcept {
  if (released(lease)) return fail(LKV_E_INVALID, "lease_downgrade: the lease was released");
  if (!lease || !lease->buffer) return fail(LKV_E_INVALID, "lease_downgrade: lease is NULL or not of one storage");
  auto right = lkv_lease::Right::writing;
  if (!lease->right.compare_exchange_strong(right, lkv_lease::Right::reading, std::memory_order_acq_rel))
    return right == lkv_lease::Right::ended
               ? fail(LKV_E_ENDED, "lease_downgrade: the lease has ended")
               : fail(LKV_E_INVALID, "lease_downgrade: the lease is for reading already");
  lease->mode.store(LKV_READ, std::memory_order_relaxed);
  lease->buffer->bump_version();
  lease->queue->downgrade(lease->request);
  return LKV_OK;
}

lkv_status span(const lkv_lease *lease, lkv_lease_span *out) noexcept {
  if (!out || out->struct_size < sizeof *out)
    return fail(LKV_E_INVALID, "lease_data: out is NULL or its struct_size is too small");
  const std::size_t size = out->struct_size;
  std::memset(out, 0, sizeof *out);
  out->struct_size = size;
  if (lkv_status status = check_span("lease_data", lease, 0, 0, 0, 0, false)) return status;
  out->data = leased_data(lease);
  out->nbytes = leased_bytes(lease);
  out->lo = lease->rows.lo;
  out->hi = lease->rows.hi;
  out->mode = lease->mode;
  return LKV_OK;
}

lkv_status copy_2d(lkv_lease *dst, std::size_t dst_offset, std::size_t dst_pitch, const lkv_lease *src,
                   std::size_t src_offset, std::size_t src_pitch, std::size_t width, std::size_t height) noexcept {
  if (lkv_status status = check_span("copy: dst", dst, dst_offset, dst_pitch, width, height, true)) return status;
  if (lkv_status status = check_span("copy: src", src, src_offset, src_pitch, width, height, false)) return status;
  if (!width || !height) return LKV_OK;
  char *to = leased_data(dst) + dst_offset;
  const char *from = leased_data(src) + src_offset;
  lkv_device *a = dst->buffer->device, *b = src->buffer->device;
  lkv_status status;
  if (a == b)
    status = copy_ordered(dst, to, dst_pitch, src, from, src_pitch, width, height);
  else if (b->table.host_accessible && !a->is_cpu())
    status = a->copy_2d(LKV_HOST_TO_DEVICE, to, dst_pitch, from, src_pitch, width, height, dst->stream);
  else if (a->table.host_accessible)
    status = b->copy_2d(LKV_DEVICE_TO_HOST, to, dst_pitch, from, src_pitch, width, height, src->stream);
  else
    status = copy_staged(dst, to, dst_pitch, src, from, src_pitch, width, height);
  return poison_on_failure(status, dst->buffer);
}

lkv_status fill_zero(lkv_lease *lease, std::size_t offset, std::size_t nbytes) noexcept {
  if (lkv_status status = check_span("fill_zero", lease, offset, 0, nbytes, 1, true)) return status;
  if (!nbytes) return LKV_OK;
  return poison_on_failure(lease->device->fill_zero(leased_data(lease) + offset, nbytes, lease->stream), lease->buffer);
}

lkv_status read_host(const lkv_lease *lease, std::size_t offset, void *dst, std::size_t nbytes) noexcept {
  if (lkv_status status = check_span("read_host", lease, offset, 0, nbytes, 1, false)) return status;
  if (!dst && nbytes) return fail(LKV_E_INVALID, "read_host: dst is NULL");
  if (!nbytes) return LKV_OK;
  return lease->device->copy_2d(LKV_DEVICE_TO_HOST, dst, nbytes, leased_data(lease) + offset, nbytes, nbytes, 1,
                                lease->stream);
}

lkv_status write_host(lkv_lease *lease, std::size_t offset, const void *src, std::size_t nbytes) noexcept {
  if (lkv_status status = check_span("write_host", lease, offset, 0, nbytes, 1, true)) return status;
  if (!src && nbytes) return fail(LKV_E_INVALID, "write_host: src is NULL");
  if (!nbytes) return LKV_OK;
  lkv_buffer *const buffer = lease->buffer;
  char *const to = leased_data(lease) + offset;
  if (buffer->device->is_cpu()) {
    cpu::copy_2d(to, nbytes, src, nbytes, nbytes, 1, first_touch(buffer, to - buffer->data, nbytes));
    return LKV_OK;
  }
  return poison_on_failure(
      buffer->device->copy_2d(LKV_HOST_TO_DEVICE, to, nbytes, src, nbytes, nbytes, 1, lease->stream), buffer);
}

}  // namespace lkv

void lkv_lease::finish(Right had, bool poison) noexcept {
  if (had == Right::ended) return;
  if (buffer && had == Right::writing) {
    if (poison)
      buffer->poisoned.store(true, std::memory_order_release);
    else
      buffer->bump_version();
  }
  if (lkv::queues_work(device)) leave_queue();
  queue->release(request);
}

lkv_status lkv_lease::enter_queue() noexcept {
  stream = device->current_stream();
  return lkv::queues_work(device) ? queue->fences.pass(device, stream, fenced()) : LKV_OK;
}

// Before the rows are free for the next: it must find the fence. Whoever ends the lease may have worked on a stream of
// its own.
void lkv_lease::leave_queue() noexcept {
  if (queue->forked()) return;
  queue->fences.leave(device, stream, fenced());
  void *const now = device->current_stream();
  if (now != stream) queue->fences.leave(device, now, fenced());
}

void lkv_lease::release() noexcept {
  // Who has the only reference is alone with the lease, and needs none of the instructions that tell threads apart.
  if (refs.load(std::memory_order_acquire) != 1 && refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  finish(right.load(std::memory_order_relaxed), false);
  lkv::discard(this);
}
