// In debug builds (LKV_DEBUG) a handle that was released is recognised when it is used again. Its memory is kept for a
// while for that: what it points to is freed, the handle itself is not.
#pragma once
#include <cstdint>

namespace lkv {

#ifdef LKV_DEBUG

constexpr std::uint64_t alive_tag = 0x6c6b762d616c6976;

struct Tagged {
  volatile std::uint64_t tag = alive_tag;
  ~Tagged() { tag = 0; }
};

// Frees the handle that was kept the longest once there are too many.
void keep_released(void *memory) noexcept;

// NULL is not released: it has an error of its own.
template <class Handle>
bool released(const Handle *handle) noexcept {
  return handle && handle->tagged.tag != alive_tag;
}

template <class Handle>
void dispose_of(Handle *handle) noexcept {
  handle->~Handle();
  keep_released(handle);
}

#else

struct Tagged {};

template <class Handle>
constexpr bool released(const Handle *) noexcept {
  return false;
}

template <class Handle>
void dispose_of(Handle *handle) noexcept {
  delete handle;
}

#endif

}  // namespace lkv
