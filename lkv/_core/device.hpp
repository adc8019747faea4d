// Devices: a name, an ordinal and a vtable; the registry finds them. A device, once registered, lives for ever.
#pragma once
#include <cstddef>
#include <cstdint>

#include "lkv.h"

struct lkv_device {
  char name[32];
  std::int32_t ordinal;
  lkv_device_vtable table;
  void *context;
  lkv_device *next;

  // Every other device brings an allocator of its own.
  bool is_cpu() const noexcept { return !table.allocate; }
  lkv_status allocate(std::size_t nbytes, std::uint32_t flags, void **out) noexcept;
  void release(void *data, std::size_t nbytes) noexcept;
  lkv_status copy_2d(lkv_copy_kind kind, void *dst, std::size_t dst_pitch, const void *src, std::size_t src_pitch,
                     std::size_t width, std::size_t height, void *stream = nullptr) noexcept;
  lkv_status fill_zero(void *data, std::size_t nbytes, void *stream = nullptr) noexcept;
  lkv_status sync(void *stream) noexcept;
  void *current_stream() noexcept;
};

namespace lkv::devices {

lkv_device *cpu() noexcept;
lkv_status add(const char *name, std::int32_t ordinal, const lkv_device_vtable *table, void *context,
               lkv_device **out) noexcept;
lkv_status find(const char *name, lkv_device **out) noexcept;

}  // namespace lkv::devices
