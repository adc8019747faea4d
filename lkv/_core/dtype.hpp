// The element types: code, size, DLPack's name for it.
#pragma once
#include <cstdint>

#include "lkv.h"

namespace lkv {

struct DTypeInfo {
  std::uint8_t itemsize, dl_code, dl_bits;
};

// NULL for a code that is none.
inline const DTypeInfo *dtype_info(lkv_dtype code) noexcept {
  static constexpr DTypeInfo table[] = {{0, 0, 0},  {8, 2, 64}, {4, 2, 32}, {2, 2, 16}, {2, 4, 16}, {1, 10, 8}, {1, 12, 8},
                                        {8, 0, 64}, {4, 0, 32}, {2, 0, 16}, {1, 0, 8},  {1, 1, 8},  {1, 6, 8}};
  return code >= LKV_F64 && code <= LKV_BOOL ? &table[code] : nullptr;
}

}  // namespace lkv
