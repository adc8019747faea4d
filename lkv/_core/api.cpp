#include "api.hpp"

#include <algorithm>
#include <cstring>

#include "device.hpp"
#include "dlpack_export.hpp"
#include "lease.hpp"
#include "process.hpp"
#include "status.hpp"
#include "storage.hpp"

namespace lkv {
namespace {

// These functions return nothing: what they are told of a released handle is in the message.
template <class Handle>
bool forgotten(const Handle *handle, const char *what) noexcept {
  if (!released(handle)) return false;
  fail(LKV_E_INVALID, "%s: the handle was released before", what);
  return true;
}

lkv_status device_sync(lkv_device *device, void *stream) noexcept {
  return device ? device->sync(stream) : fail(LKV_E_INVALID, "device_sync: device is NULL");
}

void buffer_retain(lkv_buffer *buffer) noexcept {
  if (buffer && !forgotten(buffer, "buffer_retain")) buffer->retain();
}

void buffer_release(lkv_buffer *buffer) noexcept {
  if (buffer && !forgotten(buffer, "buffer_release")) buffer->release();
}

lkv_status buffer_info(const lkv_buffer *buffer, lkv_buffer_info *out) noexcept {
  if (!buffer) return fail(LKV_E_INVALID, "buffer_info: buffer is NULL");
  if (released(buffer)) return fail(LKV_E_INVALID, "buffer_info: the buffer was released");
  if (!out || out->struct_size < offsetof(lkv_buffer_info, device))
    return fail(LKV_E_INVALID, "buffer_info: out is NULL or its struct_size is too small");
  const lkv_buffer_info full{out->struct_size,
                             buffer->id,
                             buffer->device,
                             buffer->device->table.dl_device_type,
                             buffer->device->ordinal,
                             buffer->data,
                             buffer->nbytes,
                             buffer->rows,
                             buffer->row_bytes,
                             buffer->claimed.load(std::memory_order_acquire),
                             buffer->version.now(),
                             buffer->refs.load(std::memory_order_relaxed),
                             buffer->dtype,
                             buffer->poisoned.load(std::memory_order_acquire),
                             buffer->read_only,
                             buffer->strided};
  std::memcpy(out, &full, std::min(full.struct_size, sizeof full));
  return LKV_OK;
}

lkv_status buffer_bump_version(lkv_buffer *buffer) noexcept {
  if (!buffer) return fail(LKV_E_INVALID, "buffer_bump_version: buffer is NULL");
  if (released(buffer)) return fail(LKV_E_INVALID, "buffer_bump_version: the buffer was released");
  buffer->bump_version();
  return LKV_OK;
}

lkv_status buffer_clear_poison(lkv_buffer *buffer) noexcept {
  if (!buffer) return fail(LKV_E_INVALID, "buffer_clear_poison: buffer is NULL");
  if (released(buffer)) return fail(LKV_E_INVALID, "buffer_clear_poison: the buffer was released");
  buffer->poisoned.store(false, std::memory_order_release);
  return LKV_OK;
}

void lease_retain(lkv_lease *lease) noexcept {
  if (lease && !forgotten(lease, "lease_retain")) lease->retain();
}

void lease_release(lkv_lease *lease) noexcept {
  if (lease && !forgotten(lease, "lease_release")) lease->release();
}

void lease_end(lkv_lease *lease) noexcept {
  if (lease && !forgotten(lease, "lease_end")) lease->end(false);
}

void lease_release_poisoned(lkv_lease *lease) noexcept {
  if (!lease || forgotten(lease, "lease_release_poisoned")) return;
  lease->end(true);
  lease->release();
}

lkv_status copy(lkv_lease *dst, std::size_t dst_offset, const lkv_lease *src, std::size_t src_offset,
                std::size_t nbytes) noexcept {
  return copy_2d(dst, dst_offset, nbytes, src, src_offset, nbytes, nbytes, 1);
}

std::uint64_t alloc_id_next() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

extern const lkv_api api{
    LKV_ABI_MAJOR,    LKV_ABI_MINOR,  sizeof(lkv_api),        status_name,     last_error,    set_error,
    devices::add,     devices::find,  device_sync,            create,          wrap,          buffer_retain,
    buffer_release,   buffer_info,    buffer_bump_version,    acquire,         lease_retain,  lease_release,
    lease_end,        lease_release_poisoned, downgrade,      span,            buffer_clear_poison, copy,
    copy_2d,          fill_zero,      read_host,              write_host,      lease_to_dlpack, alloc_id_next,
    claim,            release_rows,
};

}  // namespace lkv
