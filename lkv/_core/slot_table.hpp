// The compiled half of the caches: for every layer an ordered list of slots, each a place in some storage, and what has
// been written of it. Checks a whole layer's arrays before it writes any, and copies them.
//
// The lengths and the leases are the queue's; who may call what here holds a request on it (see DESIGN.md).
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "storage.hpp"

namespace lkv {

constexpr int most_dims = 8;

// An array of somebody else's, borrowed for a call.
struct ArrayRef {
  const char *data;
  const std::int64_t *shape;
  const std::int64_t *strides;  // NULL: C order
  std::int64_t stride_unit;     // bytes in one step of `strides`
  std::int32_t ndim;
  std::int32_t device_type, device_id;
  std::uint8_t dl_code, dl_bits;
};

// What one append hands to a slot: an array of `ndim` dims, of which dims[axis] is the number of rows.
struct SlotShape {
  std::int64_t dims[most_dims];
  std::int32_t ndim, axis;
  lkv_dtype dtype;
  DTypeInfo element;
  std::int32_t itemsize;
  std::int64_t outer;  // product of the dims before the axis
  std::int64_t run;    // bytes of the dims behind it: one row of one outer index
};

// Where a slot of a layer is.
struct SlotPlace {
  lkv_buffer *buffer = nullptr;
  char *base = nullptr;
  std::int64_t outer_stride = 0, row_stride = 0;  // in bytes
  Version *version = nullptr;
  Version own_version;  // of a slot that shares its storage with others
};

// Why a call was refused.
struct Fault {
  enum What : std::int32_t {
    none, layer, unpopulated, count, rank, shape, dtype, device, rows, capacity, busy, contiguity, ended
  };
  What what;
  std::int32_t slot;
  std::int64_t layer_index;
  std::int64_t expected, actual;
};

class SlotTable {
 public:
  // Throws std::bad_alloc.
  SlotTable(std::int64_t n_layers, std::int32_t n_slots, std::int64_t capacity, lkv_device *device);
  ~SlotTable();

  // Slot by slot, before anything else. False: the dims do not fit (rank, overflow).
  bool describe(std::int32_t slot, const std::int64_t *dims, std::int32_t ndim, std::int32_t axis, lkv_dtype dtype) noexcept;
  // Puts a slot of a layer into `buffer`, `offset` bytes from its start; takes a reference.
  void place(std::int64_t layer, std::int32_t slot, lkv_buffer *buffer, std::int64_t offset, std::int64_t outer_stride,
             std::int64_t row_stride, bool shares) noexcept;
  void drop(std::int64_t layer) noexcept;

  // Another geometry, while no layer is populated; describe() the slots anew.
  void rebase(std::int64_t rows, lkv_device *on) noexcept { capacity = rows, device = on; }
  // Zeros in all rows of a layer, and no poison. The caller holds the right to write them.
  lkv_status clear(std::int64_t layer, void *stream = nullptr) noexcept;

  // All of its slots are placed.
  bool populated(std::int64_t layer) const noexcept { return whole_[layer].load(std::memory_order_acquire); }
  SlotPlace &at(std::int64_t layer, std::int32_t slot) noexcept { return places_[layer * n_slots + slot]; }
  const SlotShape &shape(std::int32_t slot) const noexcept { return shapes_[slot]; }
  std::int64_t written(std::int64_t layer) const noexcept { return written_[layer].load(std::memory_order_acquire); }

  // Do these arrays fit a layer, and how many rows do they bring? `rows` < 0: any number, else exactly so many.
  bool check(std::int64_t layer, const ArrayRef *arrays, std::int64_t count, std::int64_t *rows, Fault *fault) const noexcept;
  // Copies checked arrays to rows [at, at + rows), on the device by way of `stream`. The caller holds the right to write
  // them, and `ticket` of that time.
  lkv_status write(std::uint64_t ticket, void *stream, std::int64_t layer, std::int64_t at, const ArrayRef *arrays,
                   std::int64_t rows, Fault *fault) noexcept;
  // The same, where there are no steps and no leases: on the device's side, ordered all the same.
  lkv_status write(std::int64_t layer, std::int64_t at, const ArrayRef *arrays, std::int64_t rows, Fault *fault) noexcept;
  // Around a reading of rows [0, hi) without a lease.
  lkv_status pass_to_read(std::int64_t hi) noexcept;
  void leave_read(std::int64_t hi) noexcept;
  // Checks, and writes at the published length, under a short lease. LKV_E_TIMEOUT: somebody is in the way, wait first.
  // `checked`: they were, and nothing of the layer can have changed since.
  lkv_status append(std::int64_t layer, const ArrayRef *arrays, std::int64_t rows, bool checked, Fault *fault) noexcept;
  // The same for the holder of such a lease.
  lkv_status append_leased(void *stream, std::int64_t layer, const ArrayRef *arrays, std::int64_t rows,
                           Fault *fault) noexcept;

  // Says that a row of a layer is about to be written: its memory is on the way while the arrays are looked at.
  void expect(std::int64_t layer, std::int64_t row) const noexcept;

  // Stands for the right to write; a step takes it when it opens.
  std::uint64_t ticket() const noexcept { return ticket_.load(std::memory_order_seq_cst); }
  // Before a step ends: whoever writes for it in another thread is waited for, whoever comes later is refused.
  void close() noexcept { ticket_.fetch_add(1, std::memory_order_seq_cst); }
  bool writing() const noexcept;

  // Makes pages for rows that will be written by other means; until then they do not count as written.
  void prepare(std::int64_t layer, std::int64_t from, std::int64_t rows) noexcept;
  // Says that rows [length, length + rows) of a layer have been written, by whatever means.
  void note_written(std::int64_t layer, std::int64_t upto) noexcept { wrote(layer, upto, false); }
  // What was written beyond `length` does not count any more.
  void forget_unpublished(std::int64_t length) noexcept;
  // The first populated layer that has not been written up to `length`, or -1.
  std::int64_t incomplete(std::int64_t length) const noexcept;

  const std::int64_t n_layers;
  const std::int32_t n_slots;
  std::int64_t capacity;
  lkv_device *device;

 private:
  lkv_status fill(const SlotShape &shape, const SlotPlace &place, std::int64_t at, const ArrayRef &array,
                  std::int64_t rows, void *stream) noexcept;
  // Rows [first, first + rows) of the array to the rows from `at` on.
  lkv_status copy_in(const SlotShape &shape, const SlotPlace &place, std::int64_t at, const ArrayRef &array,
                     std::int64_t first, std::int64_t rows, bool fresh, void *stream) noexcept;
  void wrote(std::int64_t layer, std::int64_t upto, bool alone) noexcept;
  void unwrite(std::int64_t layer, std::int64_t from) noexcept;
  // Is one of the arrays part of what is about to be written?
  bool feeds_back(std::int64_t layer, const ArrayRef *arrays, std::int64_t rows) noexcept;
  lkv_status fill_staged(std::int64_t layer, std::int64_t at, const ArrayRef *arrays, std::int64_t rows) noexcept;

  std::unique_ptr<SlotShape[]> shapes_;
  std::unique_ptr<SlotPlace[]> places_;
  std::unique_ptr<std::atomic<std::int64_t>[]> written_;
  std::unique_ptr<std::atomic<bool>[]> busy_, whole_;
  std::atomic<std::uint64_t> ticket_{0};

 public:
  LeaseQueue *const queue;  // last: nothing can throw once it is made
};

}  // namespace lkv
