// A half-open range of rows.
#pragma once
#include <algorithm>
#include <cstdint>

namespace lkv {

struct Span {
  std::int64_t lo = 0, hi = 0;

  bool empty() const noexcept { return lo >= hi; }
  bool overlaps(const Span &other) const noexcept { return std::max(lo, other.lo) < std::min(hi, other.hi); }
  bool covers(const Span &other) const noexcept { return other.empty() || (lo <= other.lo && other.hi <= hi); }
  // Is the union one range?
  bool joins(const Span &other) const noexcept {
    return empty() || other.empty() || (lo <= other.hi && other.lo <= hi);
  }
  Span hull(const Span &other) const noexcept {
    if (empty()) return other;
    if (other.empty()) return *this;
    return {std::min(lo, other.lo), std::max(hi, other.hi)};
  }
};

}  // namespace lkv
