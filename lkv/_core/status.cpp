#include "status.hpp"

#include <cstdarg>
#include <cstdio>

namespace lkv {
namespace {
// A fixed array: no destructor to run at thread exit, and a failure to allocate can still be described.
thread_local char message[512];
thread_local std::uint32_t count;
}  // namespace

const char *status_name(lkv_status status) noexcept {
  static const char *const names[] = {
      "LKV_OK",         "LKV_E_INVALID",  "LKV_E_NOMEM",     "LKV_E_TIMEOUT",   "LKV_E_DEADLOCK", "LKV_E_POISONED",
      "LKV_E_FORKED",   "LKV_E_SHUTDOWN", "LKV_E_DEVICE",    "LKV_E_UNSUPPORTED", "LKV_E_NOT_FOUND", "LKV_E_EXISTS",
      "LKV_E_CONFLICT", "LKV_E_ENDED",    "LKV_E_READ_ONLY", "LKV_E_ABI"};
  constexpr auto count = static_cast<lkv_status>(sizeof names / sizeof *names);
  return status >= 0 && status < count ? names[status] : "LKV_E_UNKNOWN";
}

const char *last_error() noexcept { return message; }

std::uint32_t messages() noexcept { return count; }

void set_error(const char *text) noexcept {
  count++;
  std::snprintf(message, sizeof message, "%s", text ? text : "");
}

lkv_status fail(lkv_status status, const char *format, ...) noexcept {
  count++;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace lkv
