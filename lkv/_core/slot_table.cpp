#include "slot_table.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "cpu_device.hpp"
#include "status.hpp"

namespace lkv {
namespace {

// The stride of a dim of one element may be anything at all: it must not trap, and nobody goes by it.
std::int64_t stride_bytes(const ArrayRef &array, int dim, std::int64_t itemsize) noexcept {
  if (array.strides)
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(array.strides[dim]) *
                                     static_cast<std::uint64_t>(array.stride_unit));
  std::int64_t stride = itemsize;
  for (int i = array.ndim - 1; i > dim; i--) stride *= array.shape[i];
  return stride;
}

bool contiguous_behind(const ArrayRef &array, int axis, std::int64_t itemsize) noexcept {
  if (!array.strides) return true;
  std::int64_t stride = itemsize;
  for (int i = array.ndim - 1; i > axis; i--) {
    if (array.shape[i] != 1 && array.strides[i] * array.stride_unit != stride) return false;
    stride *= array.shape[i];
  }
  return true;
}

// Element by element, whatever the strides; the destination is in C order.
char *copy_elements(char *to, const char *from, const ArrayRef &array, int dim, std::int64_t itemsize) noexcept {
  if (contiguous_behind(array, dim - 1, itemsize)) {
    std::int64_t nbytes = itemsize;
    for (int i = dim; i < array.ndim; i++) nbytes *= array.shape[i];
    std::memcpy(to, from, static_cast<std::size_t>(nbytes));
    return to + nbytes;
  }
  const std::int64_t stride = stride_bytes(array, dim, itemsize);
  for (std::int64_t i = 0; i < array.shape[dim]; i++) to = copy_elements(to, from + i * stride, array, dim + 1, itemsize);
  return to;
}

bool refuse(Fault *fault, Fault::What what, std::int64_t layer, std::int32_t slot, std::int64_t expected,
            std::int64_t actual) noexcept {
  *fault = {what, slot, layer, expected, actual};
  return false;
}

// Rows without pages are written in pieces of so many bytes: what the kernel clears is still in the cache then.
constexpr std::int64_t fresh_piece = std::int64_t{256} << 10;

// Of each slot, so many bytes are fetched ahead: a processor has a dozen fetches or two under way at a time.
constexpr std::int64_t most_expected = std::int64_t{4} << 10, cache_line = 64;

bool host(std::int32_t device_type) noexcept { return device_type == 1 || device_type == 3; }

}  // namespace

SlotTable::SlotTable(std::int64_t layers, std::int32_t slots, std::int64_t rows, lkv_device *on)
    : n_layers(layers),
      n_slots(slots),
      capacity(rows),
      device(on),
      shapes_(new SlotShape[slots]),
      places_(new SlotPlace[layers * slots]),
      written_(new std::atomic<std::int64_t>[layers]),
      busy_(new std::atomic<bool>[layers]),
      whole_(new std::atomic<bool>[layers]),
      queue(new LeaseQueue) {
  for (std::int64_t i = 0; i < layers; i++) written_[i] = 0, busy_[i] = false, whole_[i] = false;
}

SlotTable::~SlotTable() {
  for (std::int64_t layer = 0; layer < n_layers; layer++) drop(layer);
  queue->release_ref();
}

bool SlotTable::describe(std::int32_t slot, const std::int64_t *dims, std::int32_t ndim, std::int32_t axis,
                         lkv_dtype dtype) noexcept {
  const DTypeInfo *info = dtype_info(dtype);
  if (ndim < 1 || ndim > most_dims || axis < 0 || axis >= ndim || !info) return false;
  SlotShape &shape = shapes_[slot];
  shape = {{}, ndim, axis, dtype, *info, info->itemsize, 1, info->itemsize};
  std::int64_t all = info->itemsize;
  for (int i = 0; i < ndim; i++) {
    if (i == axis) continue;
    shape.dims[i] = dims[i];
    if (dims[i] <= 0 || __builtin_mul_overflow(all, dims[i], &all)) return false;
    (i < axis ? shape.outer : shape.run) *= dims[i];
  }
  return !__builtin_mul_overflow(all, capacity, &all);
}

void SlotTable::place(std::int64_t layer, std::int32_t slot, lkv_buffer *buffer, std::int64_t offset,
                      std::int64_t outer_stride, std::int64_t row_stride, bool shares) noexcept {
  SlotPlace &place = at(layer, slot);
  buffer->retain();
  if (place.buffer) place.buffer->release();
  place.buffer = buffer;
  place.base = buffer->data + offset;
  place.outer_stride = outer_stride;
  place.row_stride = row_stride;
  place.own_version.reset();
  place.version = shares ? &place.own_version : &buffer->version;
  bool whole = true;
  for (std::int32_t s = 0; s < n_slots; s++) whole &= at(layer, s).buffer != nullptr;
  whole_[layer].store(whole, std::memory_order_release);
}

void SlotTable::drop(std::int64_t layer) noexcept {
  whole_[layer].store(false, std::memory_order_release);
  for (std::int32_t slot = 0; slot < n_slots; slot++) {
    SlotPlace &place = at(layer, slot);
    if (lkv_buffer *buffer = place.buffer) {
      place.buffer = nullptr;
      place.version = nullptr;
      place.own_version.reset();
      buffer->release();
    }
  }
  written_[layer].store(0, std::memory_order_release);
}

lkv_status SlotTable::clear(std::int64_t layer, void *stream) noexcept {
  const lkv_buffer *done = nullptr;  // packed slots share a storage
  for (std::int32_t slot = 0; slot < n_slots; slot++) {
    SlotPlace &place = at(layer, slot);
    place.version->bump();
    if (place.buffer == done) continue;
    done = place.buffer;
    if (lkv_status status = clear_rows(place.buffer, 0, place.buffer->rows, stream)) return status;
    if (place.version == &place.own_version) place.buffer->bump_version();
    place.buffer->poisoned.store(false, std::memory_order_release);
  }
  return LKV_OK;
}

bool SlotTable::check(std::int64_t layer, const ArrayRef *arrays, std::int64_t count, std::int64_t *rows,
                      Fault *fault) const noexcept {
  if (layer < 0 || layer >= n_layers) return refuse(fault, Fault::layer, layer, -1, n_layers, layer);
  if (!populated(layer)) return refuse(fault, Fault::unpopulated, layer, -1, 0, 0);
  if (count != n_slots) return refuse(fault, Fault::count, layer, -1, n_slots, count);
  std::int64_t n = *rows;
  for (std::int32_t s = 0; s < n_slots; s++) {
    const ArrayRef &array = arrays[s];
    const SlotShape &shape = shapes_[s];
    if (array.ndim != shape.ndim) return refuse(fault, Fault::rank, layer, s, shape.ndim, array.ndim);
    for (int i = 0; i < shape.ndim; i++)
      if (i != shape.axis && array.shape[i] != shape.dims[i])
        return refuse(fault, Fault::shape, layer, s, shape.dims[i], array.shape[i]);
    if (array.dl_code != shape.element.dl_code || array.dl_bits != shape.element.dl_bits)
      return refuse(fault, Fault::dtype, layer, s, shape.dtype, 0);
    if (!host(array.device_type) &&
        (array.device_type != device->table.dl_device_type || array.device_id != device->ordinal))
      return refuse(fault, Fault::device, layer, s, 0, array.device_type);
    if (n < 0) n = array.shape[shape.axis];
    if (n < 0 || array.shape[shape.axis] != n) return refuse(fault, Fault::rows, layer, s, n, array.shape[shape.axis]);
    if (!device->is_cpu() && n > 0 && !contiguous_behind(array, shape.axis, shape.itemsize))
      return refuse(fault, Fault::contiguity, layer, s, 0, 0);
  }
  *rows = n;
  return true;
}

lkv_status SlotTable::write(std::uint64_t right, void *stream, std::int64_t layer, std::int64_t from,
                            const ArrayRef *arrays, std::int64_t rows, Fault *fault) noexcept {
  if (!populated(layer)) {  // no more: dropped since it was checked
    refuse(fault, Fault::unpopulated, layer, -1, 0, 0);
    return LKV_E_INVALID;
  }
  if (rows > capacity - from) {
    refuse(fault, Fault::capacity, layer, -1, capacity, from + rows);
    return LKV_E_INVALID;
  }
  const auto over = [&] {
    refuse(fault, Fault::ended, layer, -1, 0, 0);
    return LKV_E_INVALID;
  };
  if (right != ticket()) return over();
  if (busy_[layer].exchange(true, std::memory_order_seq_cst)) {
    refuse(fault, Fault::busy, layer, -1, 0, 0);
    return LKV_E_INVALID;
  }
  // Busy first, then the ticket again; close() and writing() look in the other order. So one of the two sees the other.
  if (right != ticket()) {
    busy_[layer].store(false, std::memory_order_release);
    return over();
  }
  lkv_status status = LKV_OK;
  if (rows > 0) {
    unwrite(layer, from);
    if (feeds_back(layer, arrays, rows))
      status = fill_staged(layer, from, arrays, rows);
    else
      for (std::int32_t s = 0; s < n_slots && status == LKV_OK; s++)
        status = fill(shapes_[s], at(layer, s), from, arrays[s], rows, stream);
    if (status == LKV_OK) wrote(layer, from + rows, true);
  }
  busy_[layer].store(false, std::memory_order_release);
  return status;
}

lkv_status SlotTable::write(std::int64_t layer, std::int64_t from, const ArrayRef *arrays, std::int64_t rows,
                            Fault *fault) noexcept {
  if (!queues_work(device)) return write(ticket(), device->current_stream(), layer, from, arrays, rows, fault);
  void *const stream = device->current_stream();
  const Fences::Rows fenced{{}, {from, from + rows}, queue->epoch()};
  if (lkv_status status = queue->fences.pass(device, stream, fenced)) return status;
  const lkv_status status = write(ticket(), stream, layer, from, arrays, rows, fault);
  queue->fences.leave(device, stream, fenced);
  return status;
}

lkv_status SlotTable::pass_to_read(std::int64_t hi) noexcept {
  if (!queues_work(device)) return LKV_OK;
  return queue->fences.pass(device, device->current_stream(), {{0, hi}, {}, queue->epoch()});
}

void SlotTable::leave_read(std::int64_t hi) noexcept {
  if (queues_work(device)) queue->fences.leave(device, device->current_stream(), {{0, hi}, {}, queue->epoch()});
}

bool SlotTable::feeds_back(std::int64_t layer, const ArrayRef *arrays, std::int64_t rows) noexcept {
  if (!device->is_cpu()) return false;  // copies on a device are ordered, and between rows that differ
  const SlotPlace *const places = &at(layer, 0);
  for (std::int32_t s = 0; s < n_slots; s++) {
    const char *const first = arrays[s].data;
    const char *const last =
        rows == 1 ? first : first + (rows - 1) * stride_bytes(arrays[s], shapes_[s].axis, shapes_[s].itemsize);
    for (std::int32_t t = 0; t < n_slots; t++) {
      const char *const begin = places[t].buffer->data;
      const std::size_t nbytes = places[t].buffer->nbytes;
      if (static_cast<std::size_t>(first - begin) < nbytes || static_cast<std::size_t>(last - begin) < nbytes) return true;
    }
  }
  return false;
}

// All arrays are read before any slot is written: a slot may be fed to another, and rows to their neighbours.
lkv_status SlotTable::fill_staged(std::int64_t layer, std::int64_t from, const ArrayRef *arrays,
                                  std::int64_t rows) noexcept {
  std::int64_t nbytes = 0;
  for (std::int32_t s = 0; s < n_slots; s++) nbytes += shapes_[s].outer * shapes_[s].run * rows;
  std::unique_ptr<char[]> stage(new (std::nothrow) char[static_cast<std::size_t>(nbytes)]);
  if (!stage) return fail(LKV_E_NOMEM, "out of memory for %lld bytes of rows that are fed back", static_cast<long long>(nbytes));
  char *to = stage.get();
  for (std::int32_t s = 0; s < n_slots; s++) to = copy_elements(to, arrays[s].data, arrays[s], 0, shapes_[s].itemsize);
  lkv_status status = LKV_OK;
  const char *staged = stage.get();
  for (std::int32_t s = 0; s < n_slots && status == LKV_OK; s++) {
    ArrayRef array = arrays[s];
    array.data = staged;
    array.strides = nullptr;
    staged += shapes_[s].outer * shapes_[s].run * rows;
    status = fill(shapes_[s], at(layer, s), from, array, rows, nullptr);
  }
  return status;
}

// What was there is being overwritten: until all slots are in, the layer counts as not written.
void SlotTable::unwrite(std::int64_t layer, std::int64_t from) noexcept {
  if (written(layer) > from) written_[layer].store(from, std::memory_order_release);
}

void SlotTable::prepare(std::int64_t layer, std::int64_t from, std::int64_t rows) noexcept {
  unwrite(layer, from);
  for (std::int32_t s = 0; s < n_slots; s++) {
    SlotPlace &place = at(layer, s);
    populate_ahead(place.buffer, from, from + rows, shapes_[s].outer, place.outer_stride, place.row_stride);
  }
}

lkv_status SlotTable::append(std::int64_t layer, const ArrayRef *arrays, std::int64_t rows, bool checked,
                             Fault *fault) noexcept {
  if (has_streams(device)) return LKV_E_TIMEOUT;  // needs a lease, for its stream
  Request request = Request::step(rows);
  if (lkv_status status = queue->enqueue(request, LeaseQueue::Patience::none)) return status;
  const lkv_status status = checked ? write(ticket(), nullptr, layer, queue->length(), arrays, rows, fault)
                                    : append_leased(nullptr, layer, arrays, rows, fault);
  queue->release(request);
  return status;
}

lkv_status SlotTable::append_leased(void *stream, std::int64_t layer, const ArrayRef *arrays, std::int64_t rows,
                                    Fault *fault) noexcept {
  // Once more: until the lease was there, the layer may have become another.
  if (!check(layer, arrays, n_slots, &rows, fault)) return LKV_E_INVALID;
  return write(ticket(), stream, layer, queue->length(), arrays, rows, fault);
}

void SlotTable::expect(std::int64_t layer, std::int64_t row) const noexcept {
  if (layer < 0 || layer >= n_layers || row >= capacity || !device->is_cpu() || !populated(layer)) return;
  for (std::int32_t s = 0; s < n_slots; s++) {
    const SlotPlace &place = places_[layer * n_slots + s];
    const std::int64_t run = std::min(shapes_[s].run, most_expected), runs = std::min(shapes_[s].outer, most_expected / run);
    const char *first = place.base + row * place.row_stride;
    for (std::int64_t o = 0; o < runs; o++, first += place.outer_stride)
      for (const char *at = first, *const end = first + run; at < end; at += cache_line) __builtin_prefetch(at, 1);
  }
}

bool SlotTable::writing() const noexcept {
  for (std::int64_t i = 0; i < n_layers; i++)
    if (busy_[i].load(std::memory_order_seq_cst)) return true;
  return false;
}

lkv_status SlotTable::fill(const SlotShape &shape, const SlotPlace &place, std::int64_t at, const ArrayRef &array,
                           std::int64_t rows, void *stream) noexcept {
  lkv_buffer *const buffer = place.buffer;
  if (rows == 1 && shape.outer == 1 && device->is_cpu() && contiguous_behind(array, shape.axis, shape.itemsize)) {
    // A decode token on the host, by far the most frequent: one run.
    populate_ahead(buffer, at, at + 1, 1, 0, place.row_stride);
    std::memmove(place.base + at * place.row_stride, array.data, static_cast<std::size_t>(shape.run));
    return LKV_OK;
  }
  lkv_status status = LKV_OK;
  for (std::int64_t first = 0, n; first < rows && status == LKV_OK; first += n) {
    n = rows - first;
    if (n > 1 && buffer->paged && at + rows > buffer->resident.load(std::memory_order_relaxed))
      n = std::min(n, std::max<std::int64_t>(fresh_piece / (shape.outer * shape.run), 1));
    const bool fresh = populate_ahead(buffer, at + first, at + first + n, shape.outer, place.outer_stride, place.row_stride);
    status = copy_in(shape, place, at + first, array, first, n, fresh, stream);
  }
  return status;
}

lkv_status SlotTable::copy_in(const SlotShape &shape, const SlotPlace &place, std::int64_t at, const ArrayRef &array,
                              std::int64_t first, std::int64_t rows, bool fresh, void *stream) noexcept {
  const int axis = shape.axis;
  const std::int64_t step = first || rows > 1 ? stride_bytes(array, axis, shape.itemsize) : shape.run;
  const std::int64_t row = rows == 1 ? shape.run : step;
  const bool on_cpu = device->is_cpu();
  const bool direct = contiguous_behind(array, axis, shape.itemsize);
  const bool slab = direct && row >= shape.run;
  const bool own = array.device_type == device->table.dl_device_type && !on_cpu;
  const lkv_copy_kind kind = own ? LKV_DEVICE_TO_DEVICE : LKV_HOST_TO_DEVICE;
  for (std::int64_t o = 0; o < shape.outer; o++) {
    std::int64_t offset = 0, rest = o;
    for (int i = axis - 1; i >= 0; i--) {
      offset += rest % shape.dims[i] * stride_bytes(array, i, shape.itemsize);
      rest /= shape.dims[i];
    }
    const char *from = array.data + offset + first * step;
    char *to = place.base + o * place.outer_stride + at * place.row_stride;
    if (slab && on_cpu) {
      cpu::copy_2d(to, static_cast<std::size_t>(place.row_stride), from, static_cast<std::size_t>(row),
                   static_cast<std::size_t>(shape.run), static_cast<std::size_t>(rows), fresh);
      continue;
    }
    if (slab) {
      const lkv_status status = device->copy_2d(kind, to, place.row_stride, from, row, shape.run, rows, stream);
      if (status != LKV_OK) return status;
      continue;
    }
    for (std::int64_t r = 0; r < rows; r++, to += place.row_stride) {
      if (!direct) {
        copy_elements(to, from + r * row, array, axis + 1, shape.itemsize);
        continue;
      }
      const lkv_status status = device->copy_2d(kind, to, shape.run, from + r * row, shape.run, shape.run, 1, stream);
      if (status != LKV_OK) return status;
    }
  }
  return LKV_OK;
}

// `alone`: who holds `busy_` of the layer. No two layers share a storage.
void SlotTable::wrote(std::int64_t layer, std::int64_t upto, bool alone) noexcept {
  for (std::int32_t s = 0; s < n_slots; s++) {
    SlotPlace &place = at(layer, s);
    alone ? place.version->bump_alone() : place.version->bump();
    if (s == 0 && place.version == &place.own_version) place.buffer->bump_version();
  }
  written_[layer].store(upto, std::memory_order_release);
}

void SlotTable::forget_unpublished(std::int64_t length) noexcept {
  for (std::int64_t i = 0; i < n_layers; i++)
    if (written(i) > length) written_[i].store(length, std::memory_order_release);
}

std::int64_t SlotTable::incomplete(std::int64_t length) const noexcept {
  for (std::int64_t i = 0; i < n_layers; i++)
    if (populated(i) && written(i) < length) return i;
  return -1;
}

}  // namespace lkv
