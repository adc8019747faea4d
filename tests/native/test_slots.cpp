// The slot table: what fits is copied to its place whatever its strides, what does not is refused before a byte moves.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "slot_table.hpp"

using namespace lkv;
using Dims = std::vector<std::int64_t>;

namespace {

// Host memory that calls itself another device; it fails when told to.
struct Far {
  int fail_after = -1;
  lkv_device *device = nullptr;
} far_away;

lkv_status far_allocate(void *, std::size_t nbytes, void **out) {
  return (*out = std::calloc(1, nbytes)) ? LKV_OK : LKV_E_NOMEM;
}
void far_free(void *, void *data, std::size_t) { std::free(data); }
lkv_status far_copy(void *, lkv_copy_kind, void *dst, std::size_t dst_pitch, const void *src, std::size_t src_pitch,
                    std::size_t width, std::size_t height, void *) {
  if (far_away.fail_after >= 0 && far_away.fail_after-- == 0) return LKV_E_DEVICE;
  CHECK(dst_pitch >= width && src_pitch >= width && (height <= 1 || src_pitch < 1u << 20));
  for (std::size_t i = 0; i < height; i++)
    std::memcpy(static_cast<char *>(dst) + i * dst_pitch, static_cast<const char *>(src) + i * src_pitch, width);
  return LKV_OK;
}
lkv_status far_zero(void *, void *data, std::size_t nbytes, void *) {
  if (far_away.fail_after >= 0 && far_away.fail_after-- == 0) return LKV_E_DEVICE;
  std::memset(data, 0, nbytes);
  return LKV_OK;
}

void register_far() {
  lkv_device_vtable t{};
  t.struct_size = sizeof t;
  t.dl_device_type = 7;
  t.allocate = far_allocate, t.free = far_free, t.copy_2d = far_copy, t.fill_zero = far_zero;
  CHECK_OK(api.device_register("far", 0, &t, nullptr, &far_away.device));
}

// An array of two-byte elements with any strides, over memory of its own.
struct Array {
  Dims shape, strides;
  std::vector<std::uint16_t> memory;
  std::int64_t first = 0;
  ArrayRef ref;

  Array(const Dims &dims, std::uint64_t seed, std::int32_t device_type = 1) : shape(dims), strides(dims.size()) {
    std::int64_t n = 1;
    for (std::size_t i = dims.size(); i-- > 0; n *= dims[i]) strides[i] = n;
    fill(n, seed);
    ref = {nullptr, nullptr, nullptr, 2, static_cast<std::int32_t>(dims.size()), device_type, 0, 4, 16};
  }
  // Spread out: axis `order[0]` has the largest stride; every second element is unused; flipped axes run backwards.
  Array(const Dims &dims, std::uint64_t seed, const std::vector<int> &order, unsigned flipped) : Array(dims, seed) {
    std::int64_t n = 2;
    for (std::size_t i = order.size(); i-- > 0; n *= dims[order[i]]) strides[order[i]] = n;
    fill(n, seed);
    for (std::size_t i = 0; i < dims.size(); i++) {
      if (!(flipped >> i & 1)) continue;
      first += (dims[i] - 1) * strides[i];
      strides[i] = -strides[i];
    }
  }
  void fill(std::int64_t n, std::uint64_t seed) {
    memory.resize(static_cast<std::size_t>(std::max<std::int64_t>(n, 1)));
    Random random(seed + 1);
    for (auto &element : memory) element = static_cast<std::uint16_t>(random.next() | 1);
  }
  ArrayRef get(bool with_strides = true) {
    ref.data = reinterpret_cast<const char *>(memory.data() + first);
    ref.shape = shape.data();
    ref.strides = with_strides ? strides.data() : nullptr;
    return ref;
  }
  std::uint16_t at(const Dims &index) const {
    std::int64_t offset = first;
    for (std::size_t i = 0; i < index.size(); i++) offset += index[i] * strides[i];
    return memory[static_cast<std::size_t>(offset)];
  }
};

lkv_buffer *create(std::int64_t rows, std::int64_t row_bytes, lkv_device *device) {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.device = device;
  d.rows = rows;
  d.row_bytes = row_bytes;
  lkv_buffer *buffer;
  CHECK_OK(api.buffer_create(&d, &buffer));
  return buffer;
}

// One layer of bf16 slots; `dims` has any number at `axis`. Packed: all in one buffer, side by side.
struct Layer {
  std::int64_t capacity;
  std::vector<Dims> dims;
  int axis;
  std::unique_ptr<SlotTable> table;
  Fault fault{};

  Layer(std::int64_t rows, std::vector<Dims> slots, int on_axis, bool packed = false,
        lkv_device *device = devices::cpu())
      : capacity(rows), dims(std::move(slots)), axis(on_axis) {
    const auto n = static_cast<std::int32_t>(dims.size());
    table = std::make_unique<SlotTable>(2, n, capacity, device);
    std::int64_t whole = 0;
    for (std::int32_t s = 0; s < n; s++) {
      const Dims &d = dims[static_cast<std::size_t>(s)];
      CHECK(table->describe(s, d.data(), static_cast<std::int32_t>(d.size()), axis, LKV_BF16));
      whole += row_bytes(s);
    }
    lkv_buffer *shared = packed ? create(capacity, whole, device) : nullptr;
    std::int64_t offset = 0;
    for (std::int32_t s = 0; s < n; s++) {
      lkv_buffer *buffer = packed ? shared : create(capacity, row_bytes(s), device);
      const std::int64_t run = table->shape(s).run;
      table->place(1, s, buffer, offset, capacity * run, packed ? whole : run, packed);
      if (packed) offset += run;
      else buffer->release();
    }
    if (shared) shared->release();
  }
  std::int64_t row_bytes(std::int32_t s) const { return table->shape(s).outer * table->shape(s).run; }

  std::uint16_t stored(std::int32_t s, const Dims &index) const {
    const SlotShape &shape = table->shape(s);
    std::int64_t outer = 0, inner = 0;
    for (int i = 0; i < shape.ndim; i++) {
      if (i < axis) outer = outer * shape.dims[i] + index[static_cast<std::size_t>(i)];
      if (i > axis) inner = inner * shape.dims[i] + index[static_cast<std::size_t>(i)];
    }
    const SlotPlace &place = table->at(1, s);
    const std::int64_t row = index[static_cast<std::size_t>(axis)];
    std::uint16_t value;
    std::memcpy(&value, place.base + outer * place.outer_stride + row * place.row_stride + inner * 2, 2);
    return value;
  }

  Dims with_rows(std::int32_t s, std::int64_t rows) const {
    Dims d = dims[static_cast<std::size_t>(s)];
    d[static_cast<std::size_t>(axis)] = rows;
    return d;
  }

  lkv_status put(std::vector<ArrayRef> refs, std::int64_t from, std::int64_t rows = -1) {
    fault = {};
    if (!table->check(1, refs.data(), static_cast<std::int64_t>(refs.size()), &rows, &fault)) return LKV_E_INVALID;
    return table->write(1, from, refs.data(), rows, &fault);
  }

  // Every element of rows [from, from + rows) of slot `s` is the array's, all others are zeros.
  void expect(std::int32_t s, const Array &array, std::int64_t from) const {
    const std::int64_t rows = array.shape[static_cast<std::size_t>(axis)];
    Dims index(array.shape.size(), 0), whole = with_rows(s, capacity);
    for (bool more = true; more;) {
      Dims source = index;
      source[static_cast<std::size_t>(axis)] -= from;
      const std::int64_t row = source[static_cast<std::size_t>(axis)];
      CHECK(stored(s, index) == (row >= 0 && row < rows ? array.at(source) : 0));
      more = false;
      for (std::size_t i = index.size(); i-- > 0 && !more;) (more = ++index[i] < whole[i]) || (index[i] = 0);
    }
  }
};

bool untouched(const Layer &layer) {
  for (std::int32_t s = 0; s < layer.table->n_slots; s++) {
    const lkv_buffer *buffer = layer.table->at(1, s).buffer;
    if (std::any_of(buffer->data, buffer->data + buffer->nbytes, [](char byte) { return byte != 0; })) return false;
    if (layer.table->at(1, s).version->now()) return false;
  }
  return layer.table->written(1) == 0;
}

void any_strides_arrive_in_order_in_any_layout() {
  std::uint64_t seed = 0;
  for (lkv_device *device : {devices::cpu(), far_away.device})
    for (bool packed : {false, true})
      for (int axis : {0, 1, 2}) {
        if (packed && axis) continue;
        const std::vector<Dims> dims = {{3, 2, 4}, {3, 5, 2}};
        std::vector<int> order = {0, 1, 2};
        do {
          for (unsigned flipped = 0; flipped < 8; flipped++)
            for (std::int64_t rows : {0, 1, 3}) {
              Layer layer(7, dims, axis, packed, device);
              Array a(layer.with_rows(0, rows), seed++, order, flipped), b(layer.with_rows(1, rows), seed++);
              const lkv_status status = layer.put({a.get(), b.get(seed % 2)}, 2);
              if (status != LKV_OK) {
                CHECK(device == far_away.device && layer.fault.what == Fault::contiguity && untouched(layer));
                continue;
              }
              if (!rows) CHECK(untouched(layer));
              layer.expect(0, a, 2);
              layer.expect(1, b, 2);
              CHECK(layer.table->written(1) == (rows ? 2 + rows : 0));
              CHECK(layer.table->at(1, 1).version->now() == (rows ? 1u : 0u));
              CHECK(layer.table->at(1, 0).buffer->version.now() == (rows ? 1u : 0u));
            }
        } while (std::next_permutation(order.begin(), order.end()));
      }
}

void rows_that_are_one_row_repeated_are_copied_row_by_row() {
  for (lkv_device *device : {devices::cpu(), far_away.device}) {
    Layer layer(6, {{0, 4}}, 0, false, device);
    Array one({1, 4}, 5);
    one.shape[0] = 5, one.strides[0] = 0;
    CHECK_OK(layer.put({one.get()}, 1));
    layer.expect(0, one, 1);
  }
}

void the_stride_of_a_dim_of_one_may_be_anything() {
  for (std::int64_t stride : {INT64_MAX, INT64_MIN, std::int64_t{-3}, std::int64_t{0}})
    for (lkv_device *device : {devices::cpu(), far_away.device}) {
      Layer layer(4, {{0, 1, 4}, {0, 4, 1}}, 0, false, device);
      Array a({1, 1, 4}, 1), b({1, 4, 1}, 2);
      a.strides[0] = a.strides[1] = b.strides[0] = b.strides[2] = stride;
      CHECK_OK(layer.put({a.get(), b.get()}, 3));
      a.strides[0] = a.strides[1] = b.strides[0] = b.strides[2] = 0;
      layer.expect(0, a, 3);
      layer.expect(1, b, 3);
    }
}

void what_does_not_fit_is_named_and_nothing_is_written() {
  Layer layer(4, {{0, 4}, {0, 2, 3}}, 0);
  Array a({2, 4}, 1), b({2, 2, 3}, 2);
  const auto refused = [&](Fault::What what, std::int32_t slot, std::vector<ArrayRef> refs, std::int64_t rows = -1) {
    CHECK(layer.put(refs, 0, rows) == LKV_E_INVALID);
    CHECK(layer.fault.what == what && layer.fault.slot == slot && layer.fault.layer_index == 1 && untouched(layer));
  };
  const ArrayRef good = a.get(), last = b.get();
  refused(Fault::count, -1, {good});
  refused(Fault::count, -1, {good, last, last});
  refused(Fault::rank, 1, {good, good});
  Array wide({2, 5}, 3), fewer({1, 2, 3}, 4), none({0, 2, 3}, 5);
  refused(Fault::shape, 0, {wide.get(), last});
  CHECK(layer.fault.expected == 4 && layer.fault.actual == 5);
  refused(Fault::rows, 1, {good, fewer.get()});
  refused(Fault::rows, 1, {good, none.get()});
  refused(Fault::rows, 0, {good, last}, 3);
  ArrayRef bad = last;
  bad.dl_code = 2;
  refused(Fault::dtype, 1, {good, bad});
  bad = last;
  bad.dl_bits = 8;
  refused(Fault::dtype, 1, {good, bad});
  bad = last;
  bad.device_type = 2;
  refused(Fault::device, 1, {good, bad});
  const Dims backwards = {-2, 4};
  bad = good;
  bad.shape = backwards.data();
  refused(Fault::rows, 0, {bad, last});
  const std::vector<ArrayRef> both = {good, last};
  std::int64_t rows = -1;
  for (std::int64_t index : {-1, 2}) {
    CHECK(!layer.table->check(index, both.data(), 2, &rows, &layer.fault) && layer.fault.what == Fault::layer);
    CHECK(layer.fault.expected == 2 && layer.fault.actual == index);
  }
  CHECK(!layer.table->check(0, both.data(), 2, &rows, &layer.fault) && layer.fault.what == Fault::unpopulated);
  CHECK(rows == -1);
}

void rows_end_at_the_capacity() {
  Layer layer(4, {{0, 4}}, 0);
  Array two({2, 4}, 1), four({4, 4}, 2), none({0, 4}, 3), five({5, 4}, 4);
  CHECK(layer.put({two.get()}, 3) == LKV_E_INVALID && layer.fault.what == Fault::capacity);
  CHECK(layer.fault.expected == 4 && layer.fault.actual == 5);
  CHECK(layer.put({five.get()}, 0) == LKV_E_INVALID && layer.fault.what == Fault::capacity);
  CHECK(untouched(layer));
  CHECK_OK(layer.put({none.get()}, 4));
  CHECK_OK(layer.put({two.get()}, 2));
  layer.expect(0, two, 2);
  CHECK_OK(layer.put({four.get()}, 0));
  layer.expect(0, four, 0);
}

void an_append_goes_behind_the_published_rows_unless_a_step_is_on() {
  Layer layer(8, {{0, 4}}, 0);
  Array two({2, 4}, 1);
  const ArrayRef ref = two.get();
  Fault fault{};
  layer.table->queue->publish(3);
  CHECK_OK(layer.table->append(1, &ref, 2, false, &fault));
  layer.expect(0, two, 3);
  CHECK(layer.table->queue->length() == 3 && layer.table->written(1) == 5);
  CHECK(layer.table->incomplete(5) == -1 && layer.table->incomplete(6) == 1);
  Request step = Request::step(2);
  CHECK_OK(layer.table->queue->acquire(step, LKV_TRY));
  CHECK(layer.table->append(1, &ref, 2, false, &fault) == LKV_E_TIMEOUT);
  layer.table->queue->release(step);
  layer.table->queue->publish(7);
  CHECK(layer.table->append(1, &ref, 2, false, &fault) == LKV_E_INVALID && fault.what == Fault::capacity);
  layer.table->forget_unpublished(4);
  CHECK(layer.table->written(1) == 4);
  layer.table->drop(1);
  CHECK(layer.table->append(1, &ref, 2, false, &fault) == LKV_E_INVALID && fault.what == Fault::unpopulated);
  CHECK(!layer.table->populated(1) && layer.table->written(1) == 0);
}

void a_row_that_is_expected_is_not_touched() {
  for (bool packed : {false, true}) {
    Layer layer(8, {{0, 4}, {0, 5000}}, 0, packed);
    for (std::int64_t which : {-1, 0, 1, 2, 1 << 20})
      for (std::int64_t row : {0, 7, 8, 1 << 20}) layer.table->expect(which, row);
    CHECK(untouched(layer));
    layer.table->drop(1);
    layer.table->expect(1, 0);
  }
  Layer many(8, {{3, 0, 4}, {700, 0, 2}}, 1), elsewhere(8, {{0, 4}}, 0, false, far_away.device);
  many.table->expect(1, 7);
  elsewhere.table->expect(1, 0);
  CHECK(untouched(many) && untouched(elsewhere));
}

void versions_count_the_writes_of_all_threads() {
  Version version;
  CHECK(version.now() == 0);
  const auto bump = [&] {
    for (int i = 0; i < scaled(10000); i++) version.bump();
  };
  std::thread one(bump), other(bump);
  for (int i = 0; i < scaled(10000); i++) version.bump_alone();
  one.join();
  other.join();
  CHECK(version.now() == 3 * static_cast<std::uint64_t>(scaled(10000)));
  version.reset();
  CHECK(version.now() == 0);
}

void a_layer_that_failed_half_way_does_not_count_as_written() {
  Layer layer(8, {{0, 4}, {0, 2}}, 0, false, far_away.device);
  Array a({2, 4}, 1), b({2, 2}, 2), on_device({2, 4}, 3, 7);
  CHECK_OK(layer.put({on_device.get(), b.get()}, 0));
  for (int call : {0, 1}) {
    far_away.fail_after = call;
    CHECK(layer.put({a.get(), b.get()}, 1) == LKV_E_DEVICE && layer.fault.what == Fault::none);
    CHECK(layer.table->written(1) == 1 && layer.table->at(1, 0).version->now() == 1);
  }
  CHECK_OK(layer.put({a.get(), b.get()}, 1));
  CHECK(layer.table->written(1) == 3);
  Array repeated({1, 4}, 4);
  repeated.shape[0] = 2, repeated.strides[0] = 0;
  far_away.fail_after = 1;
  CHECK(layer.put({repeated.get(), b.get()}, 1) == LKV_E_DEVICE);
}

void two_threads_do_not_write_one_layer_at_once() {
  Layer layer(1 << 12, {{0, 64}}, 0);
  Array rows({1 << 12, 64}, 1);
  const ArrayRef ref = rows.get();
  std::atomic<int> busy{0}, done{0};
  const auto write = [&] {
    for (int i = scaled(100); i > 0; i--) {
      Fault fault{};
      if (layer.table->write(1, 0, &ref, 1 << 12, &fault) == LKV_OK)
        done++;
      else
        CHECK(fault.what == Fault::busy && ++busy);
    }
  };
  std::thread other(write);
  write();
  other.join();
  CHECK(layer.table->at(1, 0).version->now() == static_cast<std::uint64_t>(done.load()) && done > 0);
}

void rows_that_are_fed_back_arrive_as_they_were() {
  Layer layer(4, {{0, 4}, {0, 4}}, 0);
  SlotTable &table = *layer.table;
  auto *const a = reinterpret_cast<std::uint16_t *>(table.at(1, 0).base);
  auto *const b = reinterpret_cast<std::uint16_t *>(table.at(1, 1).base);
  for (std::uint16_t i = 0; i < 12; i++) a[i] = i, b[i] = static_cast<std::uint16_t>(100 + i);
  const std::int64_t shape[] = {3, 4};
  const ArrayRef swapped[] = {{reinterpret_cast<const char *>(b), shape, nullptr, 0, 2, 1, 0, 4, 16},
                              {reinterpret_cast<const char *>(a), shape, nullptr, 0, 2, 1, 0, 4, 16}};
  Fault fault{};
  CHECK_OK(table.write(1, 1, swapped, 3, &fault));
  for (std::uint16_t i = 0; i < 12; i++) CHECK(a[4 + i] == 100 + i && b[4 + i] == i);
  for (std::uint16_t i = 0; i < 4; i++) CHECK(a[i] == i && b[i] == 100 + i);
}

void after_close_nobody_writes_for_the_step_any_more() {
  Layer layer(1, {{0, 4096}}, 0);
  SlotTable &table = *layer.table;
  std::atomic<std::uint64_t> step{table.ticket()};
  std::atomic<int> written{0};
  std::atomic<bool> stop{false};
  const auto write = [&](std::uint16_t mark) {
    const std::vector<std::uint16_t> row(4096, mark);
    const std::int64_t shape[] = {1, 4096};
    const ArrayRef ref{reinterpret_cast<const char *>(row.data()), shape, nullptr, 0, 2, 1, 0, 4, 16};
    while (!stop) {
      Fault fault{};
      if (table.write(step.load(), nullptr, 1, 0, &ref, 1, &fault) == LKV_OK)
        written++;
      else
        CHECK(fault.what == Fault::busy || fault.what == Fault::ended);
    }
  };
  std::thread one(write, 1), other(write, 2);
  const auto *row = reinterpret_cast<const std::uint16_t *>(table.at(1, 0).base);
  for (int i = scaled(5000); i > 0 || written < 10; i--) {
    step.store(table.ticket());
    std::this_thread::yield();
    table.close();
    while (table.writing()) std::this_thread::yield();
    for (int k = 1; k < 4096; k++) CHECK(row[k] == row[0]);  // alone now, as the next step would be
  }
  stop = true;
  one.join(), other.join();
}

void clearing_a_layer_leaves_zeros_and_no_poison() {
  for (bool packed : {false, true}) {
    Layer layer(64, {{0, 512}, {0, 64}}, 0, packed);
    Array a({64, 512}, 1), b({64, 64}, 2);
    CHECK_OK(layer.put({a.get(), b.get()}, 0));
    layer.table->at(1, 0).buffer->poisoned = true;
    CHECK_OK(layer.table->clear(1));
    CHECK(!layer.table->at(1, 0).buffer->poisoned);
    CHECK(layer.table->at(1, 0).version->now() == 2 && layer.table->at(1, 1).version->now() == 2);
    const Array none_a({0, 512}, 1), none_b({0, 64}, 1);
    layer.expect(0, none_a, 0);
    layer.expect(1, none_b, 0);
    CHECK_OK(layer.put({a.get(), b.get()}, 0));
    layer.expect(0, a, 0);
  }
  Layer layer(8, {{0, 4}}, 0, false, far_away.device);
  far_away.fail_after = 0;
  CHECK(layer.table->clear(1) == LKV_E_DEVICE);
}

void geometry_that_does_not_fit_is_refused() {
  SlotTable table(1, 1, std::int64_t{1} << 32, devices::cpu());
  const std::int64_t good[] = {0, 4}, zero[] = {0, 0}, negative[] = {0, -1}, big[] = {0, std::int64_t{1} << 31},
                     huge[] = {0, INT64_MAX}, many[] = {0, 1, 1, 1, 1, 1, 1, 1, 1};
  CHECK(table.describe(0, good, 2, 0, LKV_F32));
  for (const std::int64_t *dims : {zero, negative, big, huge}) CHECK(!table.describe(0, dims, 2, 0, LKV_F32));
  CHECK(!table.describe(0, many, 9, 0, LKV_F32) && !table.describe(0, good, 0, 0, LKV_F32));
  CHECK(!table.describe(0, good, 2, 2, LKV_F32) && !table.describe(0, good, 2, -1, LKV_F32));
  CHECK(!table.describe(0, good, 2, 0, 99));
  table.rebase(4, devices::cpu());
  CHECK(table.describe(0, big, 2, 0, LKV_F32) && table.capacity == 4);
  bool thrown = false;
  try {
    SlotTable too_big(INT64_MAX / 2, 1, 4, devices::cpu());
  } catch (const std::bad_alloc &) {
    thrown = true;
  }
  CHECK(thrown);
}

}  // namespace

int main() {
  register_far();
  RUN(any_strides_arrive_in_order_in_any_layout);
  RUN(rows_that_are_one_row_repeated_are_copied_row_by_row);
  RUN(the_stride_of_a_dim_of_one_may_be_anything);
  RUN(what_does_not_fit_is_named_and_nothing_is_written);
  RUN(rows_end_at_the_capacity);
  RUN(an_append_goes_behind_the_published_rows_unless_a_step_is_on);
  RUN(a_row_that_is_expected_is_not_touched);
  RUN(versions_count_the_writes_of_all_threads);
  RUN(a_layer_that_failed_half_way_does_not_count_as_written);
  RUN(two_threads_do_not_write_one_layer_at_once);
  RUN(rows_that_are_fed_back_arrive_as_they_were);
  RUN(after_close_nobody_writes_for_the_step_any_more);
  RUN(clearing_a_layer_leaves_zeros_and_no_poison);
  RUN(geometry_that_does_not_fit_is_refused);
  CHECK(live_buffers() == 0);
}
