// Every function of the C table with arguments out of their domain: the status that is expected, a message, no crash.
#include <cstring>
#include <string>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "cpu_device.hpp"
#include "dlpack_export.hpp"

using lkv::api;

namespace {

lkv_buffer_desc desc(std::int64_t rows = 8, std::int64_t row_bytes = 16) {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = rows;
  d.row_bytes = row_bytes;
  return d;
}

struct Buffer {
  lkv_buffer *it = nullptr;
  explicit Buffer(std::int64_t rows = 8, std::int64_t row_bytes = 16, std::uint32_t flags = 0) {
    lkv_buffer_desc d = desc(rows, row_bytes);
    d.flags = flags;
    CHECK_OK(api.buffer_create(&d, &it));
  }
  ~Buffer() { api.buffer_release(it); }
  operator lkv_buffer *() const { return it; }
};

struct Lease {
  lkv_lease *it = nullptr;
  Lease(lkv_buffer *buffer, lkv_mode mode, std::int64_t lo = 0, std::int64_t hi = 8) {
    CHECK_OK(api.lease_acquire(buffer, mode, lo, hi, LKV_TRY, &it));
  }
  ~Lease() { api.lease_release(it); }
  operator lkv_lease *() const { return it; }
};

template <class T>
T *nonnull() {
  return reinterpret_cast<T *>(std::uintptr_t{16});
}

lkv_status create(const lkv_buffer_desc &d) {
  auto *out = nonnull<lkv_buffer>();
  const lkv_status status = api.buffer_create(&d, &out);
  CHECK(status == LKV_OK || !out);
  api.buffer_release(out);
  return status;
}

void the_table_describes_itself() {
  CHECK(api.abi_major == LKV_ABI_MAJOR && api.abi_minor == LKV_ABI_MINOR && api.struct_size == sizeof(lkv_api));
  CHECK(LKV_HAS(&api, buffer_release_rows));
  for (const char *const *entry = reinterpret_cast<const char *const *>(&api.status_name);
       entry != reinterpret_cast<const char *const *>(&api + 1); entry++)
    CHECK(*entry);
}

void statuses_have_names_and_messages_are_kept() {
  CHECK(!std::strcmp(api.status_name(LKV_OK), "LKV_OK") && !std::strcmp(api.status_name(LKV_E_ABI), "LKV_E_ABI"));
  CHECK(!std::strcmp(api.status_name(-1), "LKV_E_UNKNOWN") && !std::strcmp(api.status_name(16), "LKV_E_UNKNOWN"));
  api.set_error("one");
  CHECK(!std::strcmp(api.last_error(), "one"));
  api.set_error(std::string(5000, 'x').c_str());
  CHECK(std::strlen(api.last_error()) > 100);
  api.set_error(nullptr);
  CHECK(!*api.last_error());
}

void releases_accept_null() {
  api.buffer_retain(nullptr);
  api.buffer_release(nullptr);
  api.lease_retain(nullptr);
  api.lease_release(nullptr);
  api.lease_end(nullptr);
  api.lease_release_poisoned(nullptr);
}

void a_buffer_must_have_a_size_that_fits() {
  lkv_buffer *out = nonnull<lkv_buffer>();
  CHECK_FAILS(LKV_E_INVALID, api.buffer_create(nullptr, &out));
  CHECK(!out);
  const lkv_buffer_desc good = desc();
  CHECK_FAILS(LKV_E_INVALID, api.buffer_create(&good, nullptr));
  const std::int64_t big = std::int64_t{1} << 40;
  for (auto [rows, row_bytes] : {std::pair<std::int64_t, std::int64_t>{0, 16}, {-1, 16}, {8, 0}, {8, -16}, {big, big},
                                 {INT64_MAX, 2}, {INT64_MAX, INT64_MAX}, {INT64_MIN, INT64_MIN}})
    CHECK_FAILS(LKV_E_INVALID, create(desc(rows, row_bytes)));
  CHECK_FAILS(LKV_E_NOMEM, create(desc(INT64_MAX, 1)));
  CHECK_FAILS(LKV_E_NOMEM, create(desc(std::int64_t{1} << 55, 1)));
  lkv_buffer_desc d = desc();
  d.struct_size = 8;
  CHECK_FAILS(LKV_E_INVALID, create(d));
  for (lkv_dtype dtype : {-1, 13, 9999}) {
    d = desc();
    d.dtype = dtype;
    CHECK_FAILS(LKV_E_INVALID, create(d));
  }
  d = desc(8, 6);
  d.dtype = LKV_F32;
  CHECK_FAILS(LKV_E_INVALID, create(d));
  for (std::uint32_t flags : {2u, 8u, ~0u}) {
    d = desc();
    d.flags = flags;
    CHECK_FAILS(LKV_E_INVALID, create(d));
  }
  const Buffer other(9);
  d = desc();
  d.queue_of = other;
  CHECK_FAILS(LKV_E_INVALID, create(d));
  d = desc(9);
  d.queue_of = other;
  CHECK_OK(create(d));
}

void a_short_description_means_the_defaults() {
  lkv_buffer_desc d = desc();
  d.dtype = 9999;
  d.flags = ~0u;
  d.struct_size = offsetof(lkv_buffer_desc, dtype);
  CHECK_OK(create(d));
}

void memory_is_bounded_and_given_back() {
  const std::size_t before = lkv::cpu::live_bytes();
  lkv::cpu::set_limit(before + (1 << 20));
  CHECK_FAILS(LKV_E_NOMEM, create(desc(1 << 20, 2)));
  CHECK(lkv::cpu::free_bytes() <= 1 << 20 && lkv::cpu::limit() == before + (1 << 20));
  CHECK_OK(create(desc(1 << 19, 2)));
  lkv::cpu::set_limit(0);
  CHECK_FAILS(LKV_E_NOMEM, create(desc()));
  CHECK(lkv::cpu::free_bytes() == 0);
  lkv::cpu::set_limit(SIZE_MAX);
  CHECK(lkv::cpu::live_bytes() == before);
}

void memory_is_aligned_and_zero_of_every_size() {
  for (std::int64_t rows : {1, 1000, 70'000, 5'000'000})
    for (std::uint32_t flags : {0u, static_cast<std::uint32_t>(LKV_HUGE_PAGES)}) {
      const Buffer buffer(rows, 1, flags);
      const Lease lease(buffer, LKV_READ, 0, rows);
      lkv_lease_span span;
      span.struct_size = sizeof span;
      CHECK_OK(api.lease_data(lease, &span));
      CHECK(reinterpret_cast<std::uintptr_t>(span.data) % 256 == 0);
      std::vector<char> content(static_cast<std::size_t>(rows), 1);
      CHECK_OK(api.read_host(lease, 0, content.data(), content.size()));
      for (char byte : content) CHECK(byte == 0);
    }
}

void wrapping_needs_memory_and_calls_the_deleter_once() {
  static int calls;
  calls = 0;
  const auto count = [](void *) { calls++; };
  std::vector<char> memory(128);
  lkv_buffer_desc d = desc();
  lkv_buffer *out;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_wrap(&d, nullptr, count, nullptr, &out));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_wrap(nullptr, memory.data(), count, nullptr, &out));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_wrap(&d, memory.data(), count, nullptr, nullptr));
  d.flags = LKV_HUGE_PAGES;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_wrap(&d, memory.data(), count, nullptr, &out));
  CHECK(calls == 0);
  d.flags = LKV_READ_ONLY_MEMORY;
  CHECK_OK(api.buffer_wrap(&d, memory.data(), count, nullptr, &out));
  lkv_lease *lease;
  CHECK_FAILS(LKV_E_READ_ONLY, api.lease_acquire(out, LKV_WRITE, 0, 8, LKV_TRY, &lease));
  CHECK_FAILS(LKV_E_READ_ONLY, api.buffer_release_rows(out, 0, 8));
  api.buffer_release(out);
  CHECK(calls == 1);
  d.flags = 0;
  memory[40] = 1;
  CHECK_OK(api.buffer_wrap(&d, memory.data(), nullptr, nullptr, &out));
  CHECK_OK(api.buffer_release_rows(out, 2, 3));
  CHECK(memory[40] == 0);
  api.buffer_release(out);
  CHECK(calls == 1);
}

void info_says_what_a_buffer_is() {
  const Buffer buffer;
  lkv_buffer_info info;
  info.struct_size = sizeof info;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_info(nullptr, &info));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_info(buffer, nullptr));
  info.struct_size = 8;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_info(buffer, &info));
  info.struct_size = offsetof(lkv_buffer_info, device);
  info.nbytes = 77;
  CHECK_OK(api.buffer_info(buffer, &info));
  CHECK(info.id && info.nbytes == 77);
  info.struct_size = sizeof info;
  CHECK_OK(api.buffer_info(buffer, &info));
  CHECK(info.nbytes == 128 && info.rows == 8 && info.row_bytes == 16 && info.dtype == LKV_U8 && info.refcount == 1);
  CHECK(info.dl_device_type == 1 && info.ordinal == 0 && !info.version && !info.poisoned && !info.read_only);
  CHECK_FAILS(LKV_E_INVALID, api.buffer_bump_version(nullptr));
  CHECK_OK(api.buffer_bump_version(buffer));
  CHECK_OK(api.buffer_info(buffer, &info));
  CHECK(info.version == 1);
  CHECK_FAILS(LKV_E_INVALID, api.buffer_clear_poison(nullptr));
}

void a_lease_is_of_rows_that_exist() {
  const Buffer buffer;
  auto *out = nonnull<lkv_lease>();
  CHECK_FAILS(LKV_E_INVALID, api.lease_acquire(nullptr, LKV_READ, 0, 1, LKV_TRY, &out));
  CHECK(!out);
  CHECK_FAILS(LKV_E_INVALID, api.lease_acquire(buffer, LKV_READ, 0, 1, LKV_TRY, nullptr));
  for (lkv_mode mode : {-1, 2, 1000}) CHECK_FAILS(LKV_E_INVALID, api.lease_acquire(buffer, mode, 0, 1, LKV_TRY, &out));
  for (auto [lo, hi] : {std::pair<std::int64_t, std::int64_t>{-1, 1}, {2, 1}, {0, 9}, {9, 9}, {INT64_MIN, INT64_MAX}})
    CHECK_FAILS(LKV_E_INVALID, api.lease_acquire(buffer, LKV_READ, lo, hi, LKV_TRY, &out));
  const Lease mine(buffer, LKV_WRITE), none(buffer, LKV_READ, 8, 8);
  CHECK_FAILS(LKV_E_TIMEOUT, api.lease_acquire(buffer, LKV_READ, 0, 1, LKV_TRY, &out));
  CHECK_FAILS(LKV_E_TIMEOUT, api.lease_acquire(buffer, LKV_READ, 0, 1, 1000, &out));
  CHECK_FAILS(LKV_E_DEADLOCK, api.lease_acquire(buffer, LKV_READ, 0, 1, LKV_FOREVER, &out));
}

void claims_only_grow_and_only_from_what_is_claimed() {
  const Buffer buffer;
  CHECK_FAILS(LKV_E_INVALID, api.buffer_claim(nullptr, 0, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_claim(buffer, -1, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_claim(buffer, 2, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_claim(buffer, 0, 9));
  CHECK_OK(api.buffer_claim(buffer, 0, 8));
  CHECK_FAILS(LKV_E_CONFLICT, api.buffer_claim(buffer, 0, 8));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_release_rows(nullptr, 0, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_release_rows(buffer, -1, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_release_rows(buffer, 2, 1));
  CHECK_FAILS(LKV_E_INVALID, api.buffer_release_rows(buffer, 0, 9));
}

void an_ended_lease_gives_nothing() {
  const Buffer buffer;
  const Lease lease(buffer, LKV_WRITE), other_rows(buffer, LKV_READ, 8, 8);
  api.lease_end(lease);
  lkv_lease_span span;
  span.struct_size = sizeof span;
  span.data = &span;
  char byte = 0;
  CHECK_FAILS(LKV_E_ENDED, api.lease_data(lease, &span));
  CHECK(!span.data);
  CHECK_FAILS(LKV_E_ENDED, api.lease_downgrade(lease));
  CHECK_FAILS(LKV_E_ENDED, api.read_host(lease, 0, &byte, 1));
  CHECK_FAILS(LKV_E_ENDED, api.write_host(lease, 0, &byte, 1));
  CHECK_FAILS(LKV_E_ENDED, api.fill_zero(lease, 0, 1));
  CHECK_FAILS(LKV_E_ENDED, api.copy(lease, 0, other_rows, 0, 0));
  lkv_tensor_desc d{};
  d.struct_size = sizeof d;
  DLManagedTensorVersioned *tensor;
  CHECK_FAILS(LKV_E_ENDED, api.lease_to_dlpack(lease, &d, &tensor));
}

void a_read_lease_does_not_write() {
  const Buffer buffer;
  const Lease lease(buffer, LKV_READ);
  char byte = 0;
  CHECK_FAILS(LKV_E_READ_ONLY, api.write_host(lease, 0, &byte, 1));
  CHECK_FAILS(LKV_E_READ_ONLY, api.fill_zero(lease, 0, 1));
  CHECK_FAILS(LKV_E_READ_ONLY, api.copy(lease, 0, lease, 0, 1));
  CHECK_FAILS(LKV_E_INVALID, api.lease_downgrade(lease));
  CHECK_FAILS(LKV_E_INVALID, api.lease_downgrade(nullptr));
}

void bytes_outside_the_leased_rows_are_out_of_reach() {
  const Buffer buffer;
  const Lease write(buffer, LKV_WRITE, 2, 4), read(buffer, LKV_READ, 4, 8);  // 32 and 64 bytes
  char bytes[64] = {};
  lkv_lease_span span;
  span.struct_size = 8;
  CHECK_FAILS(LKV_E_INVALID, api.lease_data(write, &span));
  CHECK_FAILS(LKV_E_INVALID, api.lease_data(write, nullptr));
  span.struct_size = sizeof span;
  CHECK_FAILS(LKV_E_INVALID, api.lease_data(nullptr, &span));
  CHECK_OK(api.lease_data(write, &span));
  CHECK(span.lo == 2 && span.hi == 4 && span.nbytes == 32 && span.mode == LKV_WRITE);
  CHECK_FAILS(LKV_E_INVALID, api.read_host(nullptr, 0, bytes, 1));
  CHECK_FAILS(LKV_E_INVALID, api.read_host(write, 0, nullptr, 1));
  CHECK_FAILS(LKV_E_INVALID, api.write_host(write, 0, nullptr, 1));
  using Range = std::pair<std::size_t, std::size_t>;
  for (auto [offset, n] : {Range{0, 33}, {32, 1}, {33, 0}, {SIZE_MAX, 2}, {2, SIZE_MAX}}) {
    CHECK_FAILS(LKV_E_INVALID, api.read_host(write, offset, bytes, n));
    CHECK_FAILS(LKV_E_INVALID, api.write_host(write, offset, bytes, n));
    CHECK_FAILS(LKV_E_INVALID, api.fill_zero(write, offset, n));
    CHECK_FAILS(LKV_E_INVALID, api.copy(write, offset, read, 0, n));
  }
  CHECK_FAILS(LKV_E_INVALID, api.copy(write, 0, read, 40, 32));
  CHECK_FAILS(LKV_E_INVALID, api.copy(write, 0, nullptr, 0, 1));
  CHECK_FAILS(LKV_E_INVALID, api.copy(nullptr, 0, read, 0, 1));
  CHECK_FAILS(LKV_E_INVALID, api.copy_2d(write, 0, 4, read, 0, 8, 8, 2));
  CHECK_FAILS(LKV_E_INVALID, api.copy_2d(write, 0, SIZE_MAX / 2, read, 0, 8, 8, 4));
  CHECK_FAILS(LKV_E_INVALID, api.copy_2d(write, 0, SIZE_MAX, read, 0, SIZE_MAX, 8, 2));
  CHECK_OK(api.write_host(write, 32, nullptr, 0));
  CHECK_OK(api.read_host(write, 32, nullptr, 0));
  CHECK_OK(api.fill_zero(write, 32, 0));
  CHECK_OK(api.copy(write, 32, read, 64, 0));
  CHECK_OK(api.copy_2d(write, 0, 8, read, 0, 8, 8, 0));
}

void strided_rows_are_no_bytes_to_go_by_but_all_together() {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = 4, d.row_bytes = 8, d.flags = LKV_STRIDED_ROWS;
  lkv_buffer *slab;
  CHECK_OK(api.buffer_create(&d, &slab));
  lkv_lease *some, *all;
  char bytes[32] = "strided";
  CHECK_OK(api.lease_acquire(slab, LKV_WRITE, 1, 2, LKV_TRY, &some));
  CHECK_FAILS(LKV_E_UNSUPPORTED, api.write_host(some, 0, bytes, 8));
  CHECK_FAILS(LKV_E_UNSUPPORTED, api.read_host(some, 0, bytes, 8));
  CHECK_FAILS(LKV_E_UNSUPPORTED, api.fill_zero(some, 0, 8));
  lkv_lease_span span;
  span.struct_size = sizeof span;
  CHECK_OK(api.lease_data(some, &span));
  lkv_buffer_info info;
  info.struct_size = sizeof info;
  CHECK_OK(api.buffer_info(slab, &info));
  CHECK(span.data == info.data && span.nbytes == 32 && span.lo == 1 && span.hi == 2 && info.strided);
  api.lease_release(some);
  CHECK_FAILS(LKV_E_UNSUPPORTED, api.buffer_release_rows(slab, 1, 2));
  CHECK_OK(api.lease_acquire(slab, LKV_WRITE, 0, 4, LKV_TRY, &all));
  CHECK_OK(api.write_host(all, 24, bytes, 8));
  CHECK_OK(api.read_host(all, 24, bytes + 8, 8));
  CHECK(!std::memcmp(bytes, bytes + 8, 8));
  api.lease_release(all);
  CHECK_OK(api.buffer_release_rows(slab, 0, 4));
  api.buffer_release(slab);
}

void copies_move_the_bytes_they_name() {
  const Buffer buffer(1 << 16, 2);
  const Lease write(buffer, LKV_WRITE, 0, 1 << 16);
  std::vector<unsigned char> bytes(1 << 17), back(1 << 17);
  for (std::size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<unsigned char>(i * 7 + i / 256);
  CHECK_OK(api.write_host(write, 0, bytes.data(), bytes.size()));
  CHECK_OK(api.copy(write, 13, write, 5, 50'000));  // overlapping
  std::memmove(&bytes[13], &bytes[5], 50'000);
  CHECK_OK(api.copy_2d(write, 100'000, 64, write, 1, 32, 24, 40));
  for (int i = 0; i < 40; i++) std::memmove(&bytes[100'000 + i * 64], &bytes[1 + i * 32], 24);
  CHECK_OK(api.fill_zero(write, 70'000, 1000));
  std::memset(&bytes[70'000], 0, 1000);
  CHECK_OK(api.read_host(write, 0, back.data(), back.size()));
  CHECK(bytes == back);
  CHECK_OK(api.copy_2d(write, 0, 8, write, 4, 8, 16 - 8, 2));  // overlapping runs: any order, no trap
}

void tensors_lie_inside_the_leased_rows() {
  const Buffer buffer;
  const Lease read(buffer, LKV_READ, 2, 6);  // 64 bytes
  const auto attempt = [&](lkv_dtype dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {},
                           std::size_t offset = 0) {
    const lkv_tensor_desc d{sizeof(lkv_tensor_desc), dtype, static_cast<std::int32_t>(shape.size()), shape.data(),
                            strides.empty() ? nullptr : strides.data(), offset};
    auto *tensor = nonnull<DLManagedTensorVersioned>();
    const lkv_status status = api.lease_to_dlpack(read, &d, &tensor);
    CHECK((status == LKV_OK) == (tensor != nullptr));
    if (tensor) tensor->deleter(tensor);
    return status;
  };
  CHECK_OK(attempt(0, {64}));
  CHECK_OK(attempt(LKV_F32, {4, 4}));
  CHECK_OK(attempt(LKV_F32, {2, 2}, {8, 1}, 20));
  CHECK_OK(attempt(LKV_F64, {}));
  CHECK_OK(attempt(0, {0, 100}));
  CHECK_OK(attempt(0, {5, 0}, {3, 100}));
  CHECK_OK(attempt(0, {1, 1, 1, 1, 1, 1, 1, 1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {65}));
  CHECK_FAILS(LKV_E_INVALID, attempt(LKV_F32, {4, 4}, {}, 4));
  CHECK_FAILS(LKV_E_INVALID, attempt(LKV_F32, {2}, {}, 2));  // not aligned
  CHECK_FAILS(LKV_E_INVALID, attempt(LKV_F32, {2, 2}, {15, 1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {2}, {-1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {-1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {1}, {}, SIZE_MAX));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {INT64_MAX, INT64_MAX}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {INT64_MAX, 2}, {1, 1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {2}, {INT64_MAX}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {3, 2}, {INT64_MAX / 2, 1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(LKV_F64, {INT64_MAX / 4}));
  CHECK_FAILS(LKV_E_INVALID, attempt(99, {1}));
  CHECK_FAILS(LKV_E_INVALID, attempt(0, {1, 1, 1, 1, 1, 1, 1, 1, 1}));
  lkv_tensor_desc d{};
  d.struct_size = sizeof d;
  DLManagedTensorVersioned *tensor;
  CHECK_FAILS(LKV_E_INVALID, api.lease_to_dlpack(read, nullptr, &tensor));
  CHECK_FAILS(LKV_E_INVALID, api.lease_to_dlpack(read, &d, nullptr));
  CHECK_FAILS(LKV_E_INVALID, api.lease_to_dlpack(nullptr, &d, &tensor));
  d.ndim = -1;
  CHECK_FAILS(LKV_E_INVALID, api.lease_to_dlpack(read, &d, &tensor));
  d.ndim = 1;
  CHECK_FAILS(LKV_E_INVALID, api.lease_to_dlpack(read, &d, &tensor));
  d.struct_size = 8;
  CHECK_FAILS(LKV_E_INVALID, api.lease_to_dlpack(read, &d, &tensor));
}

void a_tensor_says_where_and_what_it_is() {
  const Buffer buffer;
  const Lease write(buffer, LKV_WRITE, 2, 6);
  const std::int64_t shape[] = {2, 3};
  const lkv_tensor_desc d{sizeof(lkv_tensor_desc), LKV_BF16, 2, shape, nullptr, 8};
  DLManagedTensorVersioned *tensor;
  CHECK_OK(api.lease_to_dlpack(write, &d, &tensor));
  const DLTensor &t = tensor->dl_tensor;
  lkv_lease_span span;
  span.struct_size = sizeof span;
  CHECK_OK(api.lease_data(write, &span));
  CHECK(t.data == static_cast<char *>(span.data) + 8 && t.byte_offset == 0 && t.device.device_type == kDLCPU);
  CHECK(t.dtype.code == 4 && t.dtype.bits == 16 && t.dtype.lanes == 1 && t.ndim == 2);
  CHECK(t.shape[0] == 2 && t.shape[1] == 3 && t.strides[0] == 3 && t.strides[1] == 1);
  CHECK(tensor->version.major == 1 && tensor->flags == 0);
  tensor->deleter(tensor);
  CHECK_OK(api.lease_downgrade(write));
  CHECK_OK(api.lease_to_dlpack(write, &d, &tensor));
  CHECK(tensor->flags == kDLFlagReadOnly);
  tensor->deleter(tensor);
  DLManagedTensor *legacy = lkv::export_legacy(buffer, nullptr, {span.data, LKV_U8, 2, shape, nullptr, false});
  CHECK(legacy && legacy->dl_tensor.strides[0] == 3);
  legacy->deleter(legacy);
}

}  // namespace

int main() {
  RUN(the_table_describes_itself);
  RUN(statuses_have_names_and_messages_are_kept);
  RUN(releases_accept_null);
  RUN(a_buffer_must_have_a_size_that_fits);
  RUN(a_short_description_means_the_defaults);
  RUN(memory_is_bounded_and_given_back);
  RUN(memory_is_aligned_and_zero_of_every_size);
  RUN(wrapping_needs_memory_and_calls_the_deleter_once);
  RUN(info_says_what_a_buffer_is);
  RUN(a_lease_is_of_rows_that_exist);
  RUN(claims_only_grow_and_only_from_what_is_claimed);
  RUN(an_ended_lease_gives_nothing);
  RUN(a_read_lease_does_not_write);
  RUN(bytes_outside_the_leased_rows_are_out_of_reach);
  RUN(strided_rows_are_no_bytes_to_go_by_but_all_together);
  RUN(copies_move_the_bytes_they_name);
  RUN(tensors_lie_inside_the_leased_rows);
  RUN(a_tensor_says_where_and_what_it_is);
}
