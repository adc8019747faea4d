// Built with LKV_DEBUG: a released handle is a status and a message, not a crash.
#include <cstring>

#include "api.hpp"
#include "check.hpp"
#include "storage.hpp"

#ifndef LKV_DEBUG
#error "this test is about debug builds"
#endif

namespace {

const lkv_api &api = lkv::api;

lkv_buffer *made() {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = 4, d.row_bytes = 8;
  lkv_buffer *buffer;
  CHECK_OK(api.buffer_create(&d, &buffer));
  return buffer;
}

bool says_released() { return std::strstr(api.last_error(), "was released"); }

void a_released_buffer_is_refused() {
  lkv_buffer *const buffer = made();
  api.buffer_release(buffer);
  lkv_buffer_info info;
  info.struct_size = sizeof info;
  lkv_lease *lease;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_info(buffer, &info));
  CHECK(says_released());
  CHECK_FAILS(LKV_E_INVALID, api.lease_acquire(buffer, LKV_READ, 0, 1, LKV_TRY, &lease));
  CHECK(says_released());
  CHECK_FAILS(LKV_E_INVALID, api.buffer_bump_version(buffer));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_clear_poison(buffer));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_claim(buffer, 0, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_release_rows(buffer, 0, 1));
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = 4, d.row_bytes = 8, d.queue_of = buffer;
  lkv_buffer *other;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_create(&d, &other));
  api.set_error("");
  api.buffer_release(buffer);
  CHECK(says_released());
  api.set_error("");
  api.buffer_retain(buffer);
  CHECK(says_released());
}

void a_released_lease_is_refused() {
  lkv_buffer *const buffer = made();
  lkv_lease *lease, *held;
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 2, LKV_TRY, &lease));
  api.lease_release(lease);
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 2, LKV_TRY, &held));
  char bytes[8] = {};
  lkv_lease_span span;
  span.struct_size = sizeof span;
  CHECK_FAILS(LKV_E_INVALID, api.write_host(lease, 0, bytes, 8));
  CHECK(says_released());
  CHECK_FAILS(LKV_E_INVALID, api.read_host(lease, 0, bytes, 8));
  CHECK_FAILS(LKV_E_INVALID, api.fill_zero(lease, 0, 8));
  CHECK_FAILS(LKV_E_INVALID, api.lease_data(lease, &span));
  CHECK_FAILS(LKV_E_INVALID, api.lease_downgrade(lease));
  CHECK_FAILS(LKV_E_INVALID, api.copy(held, 0, lease, 0, 8));
  CHECK_FAILS(LKV_E_INVALID, api.copy(lease, 0, held, 0, 8));
  for (auto *release : {api.lease_release, api.lease_retain, api.lease_end, api.lease_release_poisoned}) {
    api.set_error("");
    release(lease);
    CHECK(says_released());
  }
  CHECK_OK(api.lease_data(held, &span));
  api.lease_release(held);
  api.buffer_release(buffer);
}

void released_handles_are_kept_for_a_while_only() {
  for (int i = 0; i < 20000; i++) api.buffer_release(made());
  CHECK(lkv::live_buffers() == 0);
}

}  // namespace

int main() {
  RUN(a_released_buffer_is_refused);
  RUN(a_released_lease_is_refused);
  RUN(released_handles_are_kept_for_a_while_only);
}
