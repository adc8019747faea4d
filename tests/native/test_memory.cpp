// Host memory runs out at the first, the second, … allocation of a call: LKV_E_NOMEM, and nothing is left behind.
#include <cstdlib>
#include <new>

#include "api.hpp"
#include "check.hpp"
#include "device.hpp"
#include "dlpack_export.hpp"
#include "lease.hpp"

using lkv::api;

namespace {

int fail_at = -1;  // counts down to the allocation that fails
int blocks = 0;

void *take(std::size_t n, std::size_t alignment = 16) {
  if (fail_at >= 0 && fail_at-- == 0) return nullptr;
  blocks++;
  return std::aligned_alloc(alignment, (n + alignment - 1) / alignment * alignment);
}

void give(void *p) {
  blocks -= p != nullptr;
  std::free(p);
}

}  // namespace

void *operator new(std::size_t n) {
  if (void *p = take(n)) return p;
  throw std::bad_alloc();
}
void *operator new(std::size_t n, std::align_val_t a) {
  if (void *p = take(n, static_cast<std::size_t>(a))) return p;
  throw std::bad_alloc();
}
void *operator new(std::size_t n, const std::nothrow_t &) noexcept { return take(n); }
void *operator new[](std::size_t n, const std::nothrow_t &) noexcept { return take(n); }
void *operator new(std::size_t n, std::align_val_t a, const std::nothrow_t &) noexcept {
  return take(n, static_cast<std::size_t>(a));
}
void operator delete(void *p) noexcept { give(p); }
void operator delete(void *p, std::size_t) noexcept { give(p); }
void operator delete(void *p, std::align_val_t) noexcept { give(p); }
void operator delete(void *p, std::size_t, std::align_val_t) noexcept { give(p); }
void operator delete[](void *p) noexcept { give(p); }
void operator delete[](void *p, std::size_t) noexcept { give(p); }

namespace {

// `call` returns a status, and undoes itself when it succeeded.
template <class Call>
void fails_cleanly(int allocations, Call call) {
  const int before = blocks;
  for (int k = 0; k < allocations; k++) {
    fail_at = k;
    CHECK_FAILS(LKV_E_NOMEM, call());
    fail_at = -1;
    CHECK(blocks == before);
  }
  fail_at = allocations;
  CHECK_OK(call());
  fail_at = -1;
}

lkv_status outside(void *, std::size_t nbytes, void **out) {
  *out = std::calloc(1, nbytes);
  return *out ? LKV_OK : LKV_E_NOMEM;
}
void outside_free(void *, void *p, std::size_t) { std::free(p); }
lkv_status outside_copy(void *, lkv_copy_kind, void *, std::size_t, const void *, std::size_t, std::size_t, std::size_t,
                        void *) {
  return LKV_OK;
}
lkv_status outside_zero(void *, void *, std::size_t, void *) { return LKV_OK; }

lkv_device *add_device(int ordinal) {
  lkv_device_vtable t{};
  t.struct_size = sizeof t;
  t.allocate = outside, t.free = outside_free, t.copy_2d = outside_copy, t.fill_zero = outside_zero;
  lkv_device *device = nullptr;
  fail_at = 0;
  CHECK_FAILS(LKV_E_NOMEM, api.device_register("outside", ordinal, &t, nullptr, &device));
  fail_at = -1;
  CHECK_OK(api.device_register("outside", ordinal, &t, nullptr, &device));
  return device;
}

lkv_buffer *create(lkv_device *device = nullptr) {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.device = device;
  d.rows = d.row_bytes = 8;
  lkv_buffer *buffer = nullptr;
  api.buffer_create(&d, &buffer);
  return buffer;
}

void a_storage_that_cannot_be_made_leaves_nothing() {
  static char memory[64];
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = d.row_bytes = 8;
  const auto make = [&] {
    lkv_buffer *buffer;
    const lkv_status status = api.buffer_create(&d, &buffer);
    api.buffer_release(buffer);
    return status;
  };
  const auto wrap = [&] {
    lkv_buffer *buffer;
    const lkv_status status = api.buffer_wrap(&d, memory, [](void *) {}, nullptr, &buffer);
    api.buffer_release(buffer);
    return status;
  };
  fails_cleanly(2, make);
  fails_cleanly(2, wrap);
  d.queue_of = create();
  fails_cleanly(1, make);
  api.buffer_release(d.queue_of);
}

void a_lease_or_tensor_that_cannot_be_made_leaves_nothing() {
  lkv_buffer *buffer = create();
  lkv_lease *lease;
  fails_cleanly(1, [&] {
    const lkv_status status = api.lease_acquire(buffer, LKV_WRITE, 0, 8, LKV_TRY, &lease);
    api.lease_release(lease);
    return status;
  });
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 8, LKV_TRY, &lease));
  fails_cleanly(1, [&] {
    lkv_tensor_desc d{};
    d.struct_size = sizeof d;
    DLManagedTensorVersioned *tensor;
    const lkv_status status = api.lease_to_dlpack(lease, &d, &tensor);
    if (tensor) tensor->deleter(tensor);
    return status;
  });
  api.lease_release(lease);
  fail_at = 0;
  CHECK(!lkv::export_legacy(buffer, nullptr, {buffer->data, LKV_U8, 0, nullptr, nullptr, false}));
  fail_at = -1;
  auto *queue = new lkv::LeaseQueue;
  for (auto kind : {lkv::Request::Kind::committed, lkv::Request::Kind::step, lkv::Request::Kind::exclusive})
    fails_cleanly(1, [&] {
      lease = lkv::new_lease(queue, lkv::devices::cpu(), kind, 2);
      if (!lease) return LKV_E_NOMEM;
      const lkv_status status = queue->acquire(lease->request, LKV_TRY);
      lease->release();
      return static_cast<decltype(LKV_E_NOMEM)>(status);
    });
  fail_at = 0;
  CHECK(lkv::adopt(buffer, queue) == LKV_E_NOMEM);
  fail_at = -1;
  queue->release_ref();
  api.buffer_release(buffer);
}

void a_copy_without_memory_for_its_stage_fails() {
  lkv_buffer *from = create(add_device(0)), *to = create(add_device(1));
  lkv_lease *src, *dst;
  CHECK_OK(api.lease_acquire(from, LKV_READ, 0, 8, LKV_TRY, &src));
  CHECK_OK(api.lease_acquire(to, LKV_WRITE, 0, 8, LKV_TRY, &dst));
  fails_cleanly(1, [&] { return api.copy(dst, 0, src, 0, 64); });
  api.lease_release(src);
  api.lease_release(dst);
  api.buffer_release(from);
  api.buffer_release(to);
}

}  // namespace

int main() {
  int *volatile probe = new (std::nothrow) int;
  delete probe;
  if (fail_at = 0, probe = new (std::nothrow) int, fail_at = -1, probe) {
    delete probe;
    std::printf("skipped: valgrind has operators new of its own\n");
    return 0;
  }
  RUN(a_storage_that_cannot_be_made_leaves_nothing);
  RUN(a_lease_or_tensor_that_cannot_be_made_leaves_nothing);
  RUN(a_copy_without_memory_for_its_stage_fails);
  CHECK(lkv::live_buffers() == 0);
}
