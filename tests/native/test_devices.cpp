// Devices that a third party adds: host memory behind pointers that only their own entries may follow, and that fail on
// command.
#include <cstring>
#include <string>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "device.hpp"
#include "storage.hpp"

using lkv::api;

namespace {

// Pointers are handed out shifted, so that nobody but the device can follow them.
struct Fake {
  std::uintptr_t shift;
  int live = 0, copies = 0, fail_after = -1, streams = 0;
  bool silent = false, null = false;
  lkv_device *device = nullptr;

  lkv_status trip() {
    if (fail_after < 0 || fail_after-- > 0) return LKV_OK;
    if (!silent) api.set_error("tripped");
    return LKV_E_DEVICE;
  }
  void *out(void *p) const { return reinterpret_cast<void *>(reinterpret_cast<std::uintptr_t>(p) + shift); }
  char *in(const void *p) const { return reinterpret_cast<char *>(reinterpret_cast<std::uintptr_t>(p) - shift); }
};

Fake &of(void *context) { return *static_cast<Fake *>(context); }

lkv_status allocate(void *context, std::size_t nbytes, void **out) {
  if (of(context).null) return LKV_OK;
  if (lkv_status status = of(context).trip()) return status;
  *out = of(context).out(std::calloc(1, nbytes));
  of(context).live++;
  return LKV_OK;
}

void release(void *context, void *data, std::size_t) {
  std::free(of(context).in(data));
  of(context).live--;
}

lkv_status copy_2d(void *context, lkv_copy_kind kind, void *dst, std::size_t dst_pitch, const void *src,
                   std::size_t src_pitch, std::size_t width, std::size_t height, void *stream) {
  Fake &fake = of(context);
  if (lkv_status status = fake.trip()) return status;
  CHECK(width <= dst_pitch && width <= src_pitch);
  char *to = kind == LKV_DEVICE_TO_HOST ? static_cast<char *>(dst) : fake.in(dst);
  const char *from = kind == LKV_HOST_TO_DEVICE ? static_cast<const char *>(src) : fake.in(src);
  for (; height; height--, to += dst_pitch, from += src_pitch) std::memcpy(to, from, width);
  fake.copies++;
  fake.streams += stream == context;
  return LKV_OK;
}

lkv_status fill_zero(void *context, void *data, std::size_t nbytes, void *) {
  if (lkv_status status = of(context).trip()) return status;
  std::memset(of(context).in(data), 0, nbytes);
  return LKV_OK;
}

lkv_status sync(void *context, void *) { return of(context).trip(); }

lkv_status current_stream(void *context, void **out) {
  *out = context;
  return LKV_OK;
}

lkv_status no_stream(void *, void **) { return LKV_E_DEVICE; }
lkv_status record(void *, void *, void **) { return LKV_OK; }
lkv_status wait(void *, void *, void *) { return LKV_OK; }
std::int32_t done(void *, void *) { return 1; }
void free_event(void *, void *) {}

lkv_device_vtable table() {
  lkv_device_vtable t{};
  t.struct_size = sizeof t;
  t.dl_device_type = 12;
  t.allocate = allocate;
  t.free = release;
  t.copy_2d = copy_2d;
  t.fill_zero = fill_zero;
  return t;
}

Fake one{std::uintptr_t{1} << 52}, two{std::uintptr_t{1} << 53}, open_to_host{0};

lkv_status add(const char *name, std::int32_t ordinal, const lkv_device_vtable &t, Fake &fake) {
  return api.device_register(name, ordinal, &t, &fake, &fake.device);
}

void a_device_is_registered_once_and_found_by_name() {
  lkv_device_vtable t = table();
  t.current_stream = current_stream;
  t.sync = sync;
  CHECK_OK(add("fake", 0, t, one));
  t.current_stream = no_stream;
  t.sync = nullptr;
  t.event_record = record, t.event_wait = wait, t.event_done = done, t.event_free = free_event;
  CHECK_OK(add("fake", 1, t, two));
  t = table();
  t.host_accessible = 1;
  t.struct_size = offsetof(lkv_device_vtable, sync);
  t.sync = sync;  // past the end that struct_size gives
  CHECK_OK(add("cpu", 1, t, open_to_host));
  lkv_device *out;
  CHECK_FAILS(LKV_E_EXISTS, api.device_register("fake", 1, &t, nullptr, &out));
  CHECK_FAILS(LKV_E_EXISTS, api.device_register("cpu", 1, &t, nullptr, &out));
  CHECK_FAILS(LKV_E_EXISTS, api.device_register("cpu", 0, &t, nullptr, &out));
  CHECK(!out);
  CHECK(api.device_find("fake", &out) == LKV_OK && out == one.device);
  CHECK(api.device_find("fake:1", &out) == LKV_OK && out == two.device);
  CHECK(api.device_find("cpu:1", &out) == LKV_OK && out == open_to_host.device);
  CHECK(api.device_find("cpu", &out) == LKV_OK && out == lkv::devices::cpu());
  CHECK(api.device_find("cpu:0", &out) == LKV_OK && out == lkv::devices::cpu());
}

void names_that_no_device_has_are_refused() {
  lkv_device *out;
  const std::string endless(100, 'x');
  for (const char *name : {"", "nope", "fak", "fakes", "fake:2", "cpu:7", endless.c_str()})
    CHECK_FAILS(LKV_E_NOT_FOUND, api.device_find(name, &out));
  for (const char *name : {"fake:", "fake:x", "fake:-1", "fake:+1", "fake: 1", "fake:1x", "fake:1:1",
                           "fake:99999999999", "fake:99999999999999999999999"})
    CHECK_FAILS(LKV_E_INVALID, api.device_find(name, &out));
  CHECK_FAILS(LKV_E_INVALID, api.device_find(nullptr, &out));
  CHECK_FAILS(LKV_E_INVALID, api.device_find("cpu", nullptr));
}

void a_table_without_its_required_entries_is_refused() {
  lkv_device *out;
  const lkv_device_vtable good = table();
  const auto refused = [&](const lkv_device_vtable &t) {
    CHECK_FAILS(LKV_E_INVALID, api.device_register("bad", 0, &t, nullptr, &out));
    CHECK(!out);
  };
  lkv_device_vtable t = good;
  t.allocate = nullptr, refused(t), t = good;
  t.free = nullptr, refused(t), t = good;
  t.copy_2d = nullptr, refused(t), t = good;
  t.fill_zero = nullptr, refused(t), t = good;
  t.event_wait = wait, refused(t), t = good;
  t.struct_size = offsetof(lkv_device_vtable, fill_zero), refused(t);
  CHECK_FAILS(LKV_E_INVALID, api.device_register("bad", 0, nullptr, nullptr, &out));
  CHECK_FAILS(LKV_E_INVALID, api.device_register("bad", -1, &good, nullptr, &out));
  CHECK_FAILS(LKV_E_INVALID, api.device_register("bad", 0, &good, nullptr, nullptr));
  const std::string too_long(32, 'x');
  for (const char *name : {static_cast<const char *>(nullptr), "", "a:b", too_long.c_str()})
    CHECK_FAILS(LKV_E_INVALID, api.device_register(name, 0, &good, nullptr, &out));
}

struct Held {
  lkv_buffer *buffer = nullptr;
  lkv_lease *lease = nullptr;

  Held(lkv_device *device, lkv_mode mode) {
    lkv_buffer_desc d{};
    d.struct_size = sizeof d;
    d.device = device;
    d.rows = 16;
    d.row_bytes = 8;
    CHECK_OK(api.buffer_create(&d, &buffer));
    CHECK_OK(api.lease_acquire(buffer, mode, 0, 16, LKV_TRY, &lease));
  }
  ~Held() {
    api.lease_release(lease);
    api.buffer_release(buffer);
  }
  std::string read() const {
    std::string text(128, '?');
    CHECK_OK(api.read_host(lease, 0, &text[0], text.size()));
    return text;
  }
  bool poisoned() const {
    lkv_buffer_info info;
    info.struct_size = sizeof info;
    CHECK_OK(api.buffer_info(buffer, &info));
    return info.poisoned;
  }
};

void bytes_go_between_any_two_devices() {
  lkv_device *const devices[] = {lkv::devices::cpu(), one.device, two.device, open_to_host.device};
  std::string text(128, ' ');
  for (std::size_t i = 0; i < text.size(); i++) text[i] = static_cast<char>('!' + i % 90);
  for (lkv_device *from : devices)
    for (lkv_device *to : devices) {
      const Held src(from, LKV_WRITE), dst(to, LKV_WRITE);
      CHECK(dst.read() == std::string(128, '\0'));
      CHECK_OK(api.write_host(src.lease, 0, text.data(), text.size()));
      CHECK_OK(api.copy(dst.lease, 0, src.lease, 0, 128));
      CHECK(dst.read() == text);
      CHECK_OK(api.fill_zero(dst.lease, 0, 128));
      CHECK_OK(api.copy_2d(dst.lease, 1, 16, src.lease, 2, 32, 4, 4));
      const std::string got = dst.read();
      for (int i = 0; i < 4; i++) CHECK(got.substr(1 + i * 16, 4) == text.substr(2 + i * 32, 4));
      CHECK(got[0] == '\0' && got[5] == '\0');
    }
  CHECK(one.live == 0 && two.live == 0 && open_to_host.live == 0);
  CHECK(one.streams == one.copies && two.streams == 0);
}

void a_failed_allocation_keeps_nothing() {
  const std::int64_t before = lkv::live_buffers();
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.device = one.device;
  d.rows = d.row_bytes = 8;
  lkv_buffer *out;
  one.fail_after = 0;
  CHECK_FAILS(LKV_E_DEVICE, api.buffer_create(&d, &out));
  CHECK(!out && !std::strcmp(api.last_error(), "tripped"));
  one.fail_after = 0, one.silent = true;
  CHECK_FAILS(LKV_E_DEVICE, api.buffer_create(&d, &out));
  CHECK(std::strstr(api.last_error(), "fake:0"));
  one.silent = false, one.null = true;
  CHECK_FAILS(LKV_E_DEVICE, api.buffer_create(&d, &out));
  one.null = false;
  CHECK(lkv::live_buffers() == before && one.live == 0);
}

void a_failed_write_poisons_and_a_failed_read_does_not() {
  char bytes[128] = {};
  for (bool silent : {false, true})
    for (int call = 0; call < 5; call++) {
      const Held dst(one.device, LKV_WRITE), src(call == 4 ? two.device : one.device, LKV_READ);
      one.silent = silent;
      one.fail_after = 0;
      const lkv_status status = call == 0   ? api.write_host(dst.lease, 0, bytes, 8)
                                : call == 1 ? api.fill_zero(dst.lease, 0, 8)
                                : call == 2 ? api.copy(dst.lease, 0, src.lease, 0, 8)
                                : call == 3 ? api.read_host(src.lease, 0, bytes, 8)
                                            : api.copy_2d(dst.lease, 0, 8, src.lease, 0, 8, 8, 3);
      CHECK(status == LKV_E_DEVICE && *api.last_error());
      CHECK(dst.poisoned() == (call != 3) && !src.poisoned());
    }
  one.silent = false;
  const Held from(one.device, LKV_READ), to(two.device, LKV_WRITE);
  one.fail_after = 0;
  CHECK(api.copy(to.lease, 0, from.lease, 0, 8) == LKV_E_DEVICE && to.poisoned());
}

void releasing_rows_clears_them_on_the_device() {
  const Held held(one.device, LKV_WRITE);
  const std::string text(128, 'x');
  CHECK_OK(api.write_host(held.lease, 0, text.data(), text.size()));
  api.lease_end(held.lease);
  CHECK_OK(api.buffer_release_rows(held.buffer, 1, 2));
  one.fail_after = 0;
  CHECK_FAILS(LKV_E_DEVICE, api.buffer_release_rows(held.buffer, 2, 3));
  lkv_lease *lease;
  CHECK_OK(api.lease_acquire(held.buffer, LKV_READ, 0, 4, LKV_TRY, &lease));
  char bytes[32];
  CHECK_OK(api.read_host(lease, 0, bytes, 32));
  CHECK(bytes[7] == 'x' && bytes[8] == 0 && bytes[15] == 0 && bytes[16] == 'x');
  api.lease_release(lease);
}

void sync_reaches_the_device_and_its_failure_the_caller() {
  CHECK_OK(api.device_sync(one.device, nullptr));
  CHECK_OK(api.device_sync(two.device, nullptr));
  CHECK_OK(api.device_sync(open_to_host.device, nullptr));
  CHECK_OK(api.device_sync(lkv::devices::cpu(), nullptr));
  one.fail_after = 0;
  CHECK_FAILS(LKV_E_DEVICE, api.device_sync(one.device, nullptr));
  CHECK_FAILS(LKV_E_INVALID, api.device_sync(nullptr, nullptr));
}

}  // namespace

int main() {
  RUN(a_device_is_registered_once_and_found_by_name);
  RUN(names_that_no_device_has_are_refused);
  RUN(a_table_without_its_required_entries_is_refused);
  RUN(bytes_go_between_any_two_devices);
  RUN(a_failed_allocation_keeps_nothing);
  RUN(a_failed_write_poisons_and_a_failed_read_does_not);
  RUN(releasing_rows_clears_them_on_the_device);
  RUN(sync_reaches_the_device_and_its_failure_the_caller);
  CHECK(one.live == 0 && two.live == 0 && lkv::live_buffers() == 0);
}
