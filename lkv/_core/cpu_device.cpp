#include "cpu_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "status.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lkv::cpu {
namespace {

constexpr std::size_t alignment = 256;
constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t paged_from = std::size_t{64} << 10;
// From here on a contiguous copy goes around the cache: the rows of a prefill are not read again from there, and a
// store that need not fetch its line first moves a third less.
constexpr std::size_t stream_from = std::size_t{16} << 10;

std::atomic<std::size_t> live{0};
std::atomic<std::size_t> most{SIZE_MAX};

std::size_t page() noexcept {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

std::size_t round_up(std::size_t n, std::size_t unit) noexcept { return (n + unit - 1) / unit * unit; }

bool take(std::size_t nbytes) noexcept {
  std::size_t now = live.load(std::memory_order_relaxed);
  do {
    const std::size_t bound = limit();
    if (now > bound || nbytes > bound - now) return false;
  } while (!live.compare_exchange_weak(now, now + nbytes, std::memory_order_relaxed));
  return true;
}

// A mapping that starts at a huge page's boundary, so that the kernel can use huge pages from the first row on.
void *map_aligned(std::size_t nbytes, std::size_t unit) noexcept {
  const std::size_t whole = nbytes + unit;
  void *raw = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto at = reinterpret_cast<std::uintptr_t>(raw);
  const std::size_t before = round_up(at, unit) - at;
  if (before) munmap(raw, before);
  const std::size_t after = unit - before;
  char *data = static_cast<char *>(raw) + before;
  if (after) munmap(data + nbytes, after);
  return data;
}

void *map(std::size_t nbytes, bool huge_pages) noexcept {
  if (huge_pages && nbytes >= huge_page) {
    void *data = map_aligned(nbytes, huge_page);
    if (data) madvise(data, nbytes, MADV_HUGEPAGE);
    return data;
  }
  void *data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

#ifdef __SSE2__
inline void stream_line(char *dst, const char *src) noexcept {
  const auto *from = reinterpret_cast<const __m128i *>(src);
  auto *to = reinterpret_cast<__m128i *>(dst);
  const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2),
                d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}
#endif

void stream_copy(char *dst, const char *src, std::size_t n) noexcept {
#ifdef __SSE2__
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64;
  std::memcpy(dst, src, head);
  dst += head, src += head, n -= head;
  // The processor fetches ahead within a page only: of four pages at a time it fetches four times as much.
  constexpr std::size_t stripe = 4096, stripes = 4, step = 128;
  for (; n >= stripes * stripe; dst += stripes * stripe, src += stripes * stripe, n -= stripes * stripe)
    for (std::size_t at = 0; at < stripe; at += step)
      for (std::size_t s = at; s < stripes * stripe; s += stripe) {
        stream_line(dst + s, src + s);
        stream_line(dst + s + 64, src + s + 64);
      }
  for (; n >= 64; dst += 64, src += 64, n -= 64) stream_line(dst, src);
  _mm_sfence();
#endif
  std::memcpy(dst, src, n);
}

}  // namespace

bool paged(std::size_t nbytes) noexcept { return nbytes >= paged_from; }

lkv_status allocate(std::size_t nbytes, bool huge_pages, void **out) noexcept {
  *out = nullptr;
  void *data = nullptr;
  const bool granted = nbytes <= PTRDIFF_MAX - 2 * huge_page && take(nbytes);
  if (granted) {
    if (paged(nbytes)) {
      data = map(round_up(nbytes, page()), huge_pages);
    } else if ((data = std::aligned_alloc(alignment, round_up(nbytes, alignment)))) {
      std::memset(data, 0, nbytes);
    }
    if (!data) live.fetch_sub(nbytes, std::memory_order_relaxed);
  }
  if (!data)
    return fail(LKV_E_NOMEM, "cpu: out of memory: %zu bytes asked for, %zu bytes free", nbytes, free_bytes());
  *out = data;
  return LKV_OK;
}

void release(void *data, std::size_t nbytes) noexcept {
  live.fetch_sub(nbytes, std::memory_order_relaxed);
  if (paged(nbytes))
    munmap(data, round_up(nbytes, page()));
  else
    std::free(data);
}

void populate(void *data, std::size_t nbytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t lo = at / page() * page(), hi = round_up(at + nbytes, page());
  madvise(reinterpret_cast<void *>(lo), hi - lo, MADV_POPULATE_WRITE);
#else
  (void)data, (void)nbytes;
#endif
}

void clear_pages(void *data, std::size_t nbytes) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t end = at + nbytes, lo = round_up(at, page()), hi = end / page() * page();
  // Locked (pinned) pages cannot be dropped.
  if (lo >= hi || madvise(reinterpret_cast<void *>(lo), hi - lo, MADV_DONTNEED) != 0) {
    std::memset(data, 0, nbytes);
    return;
  }
  std::memset(data, 0, lo - at);
  std::memset(reinterpret_cast<void *>(hi), 0, end - hi);
}

void copy_2d(void *dst, std::size_t dst_pitch, const void *src, std::size_t src_pitch, std::size_t width,
             std::size_t height, bool fresh) noexcept {
  auto *to = static_cast<char *>(dst);
  auto *from = static_cast<const char *>(src);
  if (dst_pitch == width && src_pitch == width) width *= height, height = 1;
  if (height == 1) {
    const auto a = reinterpret_cast<std::uintptr_t>(to), b = reinterpret_cast<std::uintptr_t>(from);
    const bool overlap = (a > b ? a - b : b - a) < width;
    if (width < stream_from || fresh || overlap)
      std::memmove(to, from, width);
    else
      stream_copy(to, from, width);
    return;
  }
  if (to > from && dst_pitch == src_pitch) {  // they may overlap: the last run first
    for (std::size_t i = height; i--;) std::memmove(to + i * dst_pitch, from + i * src_pitch, width);
    return;
  }
  for (; height; height--, to += dst_pitch, from += src_pitch) std::memmove(to, from, width);
}

void set_limit(std::size_t nbytes) noexcept { most.store(nbytes, std::memory_order_relaxed); }
std::size_t limit() noexcept { return most.load(std::memory_order_relaxed); }
std::size_t live_bytes() noexcept { return live.load(std::memory_order_relaxed); }

std::size_t free_bytes() noexcept {
  const std::size_t machine = static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)) * page();
  const std::size_t used = live_bytes(), bound = limit();
  return std::min(machine, bound > used ? bound - used : 0);
}

}  // namespace lkv::cpu
