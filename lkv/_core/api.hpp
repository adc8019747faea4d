// The C interface: the one const table, and what the extension module adds to it.
#pragma once
#include "lkv.h"

namespace lkv {

extern const lkv_api api;

}  // namespace lkv
