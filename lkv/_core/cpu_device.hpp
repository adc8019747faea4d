// Host memory: lazily zero-filled pages, and copies that know when to go around the cache.
#pragma once
#include <cstddef>

#include "lkv.h"

namespace lkv::cpu {

// Zero-filled, 256-byte aligned. Large blocks are anonymous mappings: address space now, memory when written.
lkv_status allocate(std::size_t nbytes, bool huge_pages, void **out) noexcept;
void release(void *data, std::size_t nbytes) noexcept;

// Is a block of this size made of pages of its own, which can be populated ahead and given back?
bool paged(std::size_t nbytes) noexcept;
// Makes the pages of [data, data + nbytes) resident. They stay zero. Best effort: a first touch does the same.
void populate(void *data, std::size_t nbytes) noexcept;
// Whole pages inside [data, data + nbytes) go back to the OS, the rest is cleared: all of it reads as zeros.
void clear_pages(void *data, std::size_t nbytes) noexcept;

// `height` runs of `width` bytes, in this order. Only a contiguous copy is right for ranges that overlap. `fresh`: the
// kernel has just made the destination's pages, or makes them now, and the zeros it puts there are in the cache.
void copy_2d(void *dst, std::size_t dst_pitch, const void *src, std::size_t src_pitch, std::size_t width,
             std::size_t height, bool fresh = false) noexcept;

// Host memory that storages may take together; allocations past it fail with LKV_E_NOMEM. SIZE_MAX: no limit.
void set_limit(std::size_t nbytes) noexcept;
std::size_t limit() noexcept;
std::size_t live_bytes() noexcept;
std::size_t free_bytes() noexcept;

}  // namespace lkv::cpu
