#include "released.hpp"

#ifdef LKV_DEBUG

#include <cstddef>
#include <mutex>
#include <new>

namespace lkv {
namespace {

constexpr std::size_t kept_handles = 4096;

std::mutex keeping;
void *kept[kept_handles];
std::size_t next;

}  // namespace

void keep_released(void *memory) noexcept {
  void *oldest;
  {
    std::lock_guard<std::mutex> guard(keeping);
    oldest = kept[next];
    kept[next] = memory;
    next = (next + 1) % kept_handles;
  }
  ::operator delete(oldest);
}

}  // namespace lkv

#endif
