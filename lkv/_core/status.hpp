// Status codes and the thread-local message of the last failure: the one error channel of the core.
#pragma once
#include <cstdint>

#include "lkv.h"

namespace lkv {

const char *status_name(lkv_status status) noexcept;
const char *last_error() noexcept;
void set_error(const char *message) noexcept;
// How many messages this thread has set so far: tells whether a call into a device left one.
std::uint32_t messages() noexcept;

// Sets the message and returns `status`, so that a failing function reads `return fail(LKV_E_INVALID, "...", ...)`.
[[gnu::format(printf, 2, 3), gnu::cold]] lkv_status fail(lkv_status status, const char *format, ...) noexcept;

}  // namespace lkv
