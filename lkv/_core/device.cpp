#include "device.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "cpu_device.hpp"
#include "status.hpp"

namespace lkv::devices {
namespace {

std::mutex adding;
std::atomic<lkv_device *> first{nullptr};

lkv_device cpu_device{"cpu", 0, {}, nullptr, nullptr};

lkv_device *lookup(const char *name, std::size_t length, std::int32_t ordinal) noexcept {
  if (length == 3 && ordinal == 0 && !std::strncmp(name, "cpu", 3)) return &cpu_device;
  for (lkv_device *d = first.load(std::memory_order_acquire); d; d = d->next)
    if (d->ordinal == ordinal && !std::strncmp(d->name, name, length) && !d->name[length]) return d;
  return nullptr;
}

}  // namespace

lkv_device *cpu() noexcept {
  static lkv_device *const ready = [] {
    cpu_device.table.struct_size = sizeof(lkv_device_vtable);
    cpu_device.table.dl_device_type = 1;
    cpu_device.table.host_accessible = 1;
    return &cpu_device;
  }();
  return ready;
}

lkv_status add(const char *name, std::int32_t ordinal, const lkv_device_vtable *table, void *context,
               lkv_device **out) noexcept {
  if (!out) return fail(LKV_E_INVALID, "device_register: out is NULL");
  *out = nullptr;
  if (!name || !*name || std::strlen(name) >= sizeof cpu_device.name || std::strchr(name, ':'))
    return fail(LKV_E_INVALID, "device_register: name must have 1 to 31 characters and no colon");
  if (ordinal < 0) return fail(LKV_E_INVALID, "device_register: ordinal %d is negative", ordinal);
  if (!table || table->struct_size < offsetof(lkv_device_vtable, sync))
    return fail(LKV_E_INVALID, "device_register: vtable is NULL or its struct_size is too small");
  if (!table->allocate || !table->free || !table->copy_2d || !table->fill_zero)
    return fail(LKV_E_INVALID, "device_register: allocate, free, copy_2d and fill_zero are required");
  auto *device = new (std::nothrow) lkv_device{};
  if (!device) return fail(LKV_E_NOMEM, "device_register: out of memory");
  std::strcpy(device->name, name);
  device->ordinal = ordinal;
  device->context = context;
  std::memcpy(&device->table, table, std::min(table->struct_size, sizeof device->table));
  const auto &t = device->table;
  const int events = !!t.event_record + !!t.event_wait + !!t.event_done + !!t.event_free;
  if (events != 0 && events != 4) {
    delete device;
    return fail(LKV_E_INVALID, "device_register: the four event entries go together");
  }
  std::lock_guard<std::mutex> guard(adding);
  if (lookup(name, std::strlen(name), ordinal)) {
    delete device;
    return fail(LKV_E_EXISTS, "device_register: %s:%d is registered already", name, ordinal);
  }
  device->next = first.load(std::memory_order_relaxed);
  first.store(device, std::memory_order_release);
  *out = device;
  return LKV_OK;
}

lkv_status find(const char *name, lkv_device **out) noexcept {
  if (!out) return fail(LKV_E_INVALID, "device_find: out is NULL");
  *out = nullptr;
  if (!name) return fail(LKV_E_INVALID, "device_find: name is NULL");
  const char *colon = std::strchr(name, ':');
  const std::size_t length = colon ? static_cast<std::size_t>(colon - name) : std::strlen(name);
  long ordinal = 0;
  if (colon) {
    char *end;
    errno = 0;
    ordinal = std::strtol(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end || errno || ordinal < 0 || ordinal > INT32_MAX)
      return fail(LKV_E_INVALID, "device_find: '%s' is not a name with an ordinal, like cuda:0", name);
  }
  cpu();
  *out = lookup(name, length, static_cast<std::int32_t>(ordinal));
  return *out ? LKV_OK : fail(LKV_E_NOT_FOUND, "no device '%s' is registered", name);
}

}  // namespace lkv::devices

namespace {

// A device may fail without a word.
template <class Call>
lkv_status explained(const lkv_device &device, const char *what, Call call) noexcept {
  const std::uint32_t before = lkv::messages();
  const lkv_status status = call();
  if (status != LKV_OK && lkv::messages() == before)
    lkv::fail(status, "%s:%d: %s failed with %s", device.name, device.ordinal, what, lkv::status_name(status));
  return status;
}

}  // namespace

lkv_status lkv_device::allocate(std::size_t nbytes, std::uint32_t flags, void **out) noexcept {
  if (is_cpu()) return lkv::cpu::allocate(nbytes, flags & LKV_HUGE_PAGES, out);
  return explained(*this, "allocate", [&]() noexcept {
    const lkv_status status = table.allocate(context, nbytes, out);
    return status == LKV_OK && !*out ? LKV_E_DEVICE : status;
  });
}

void lkv_device::release(void *data, std::size_t nbytes) noexcept {
  is_cpu() ? lkv::cpu::release(data, nbytes) : table.free(context, data, nbytes);
}

void *lkv_device::current_stream() noexcept {
  void *stream = nullptr;
  if (table.current_stream && table.current_stream(context, &stream) != LKV_OK) return nullptr;
  return stream;
}

lkv_status lkv_device::copy_2d(lkv_copy_kind kind, void *dst, std::size_t dst_pitch, const void *src,
                               std::size_t src_pitch, std::size_t width, std::size_t height,
                               void *stream) noexcept {
  if (is_cpu()) {
    lkv::cpu::copy_2d(dst, dst_pitch, src, src_pitch, width, height);
    return LKV_OK;
  }
  return explained(*this, "copy_2d", [&]() noexcept {
    return table.copy_2d(context, kind, dst, dst_pitch, src, src_pitch, width, height, stream);
  });
}

lkv_status lkv_device::fill_zero(void *data, std::size_t nbytes, void *stream) noexcept {
  if (is_cpu()) {
    std::memset(data, 0, nbytes);
    return LKV_OK;
  }
  return explained(*this, "fill_zero", [&]() noexcept {
    return table.fill_zero(context, data, nbytes, stream);
  });
}

lkv_status lkv_device::sync(void *stream) noexcept {
  if (!table.sync) return LKV_OK;
  return explained(*this, "sync", [&]() noexcept { return table.sync(context, stream); });
}
