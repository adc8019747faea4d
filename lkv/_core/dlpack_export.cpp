#include "dlpack_export.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "status.hpp"

namespace lkv {
namespace {

constexpr int most_dims = 8;

struct Held {
  lkv_buffer *buffer;
  lkv_lease *lease;
  std::int64_t shape[most_dims], strides[most_dims];

  void hold(lkv_buffer *b, lkv_lease *l) noexcept {
    buffer = b, lease = l;
    buffer->retain();
    if (lease) lease->retain();
  }
  void let_go() noexcept {
    if (lease) lease->release();
    buffer->release();
  }
};

template <class Managed>
struct Export {
  Managed tensor;
  Held held;

  static void destroy(Managed *self) {
    auto *whole = static_cast<Export *>(self->manager_ctx);
    whole->held.let_go();
    delete whole;
  }
};

void describe(DLTensor &tensor, Held &held, const ExportShape &shape) noexcept {
  const DTypeInfo &dtype = *dtype_info(shape.dtype);
  std::int64_t stride = 1;
  for (int i = shape.ndim - 1; i >= 0; i--) {
    held.shape[i] = shape.shape[i];
    held.strides[i] = shape.strides ? shape.strides[i] : stride;
    stride *= shape.shape[i];
  }
  tensor = {shape.data,
            {held.buffer->device->table.dl_device_type, held.buffer->device->ordinal},
            shape.ndim,
            {dtype.dl_code, dtype.dl_bits, 1},
            held.shape,
            held.strides,
            0};
}

template <class Managed>
Export<Managed> *make(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept {
  auto *made = new (std::nothrow) Export<Managed>;
  if (!made) {
    fail(LKV_E_NOMEM, "out of memory for a tensor's header");
    return nullptr;
  }
  made->held.hold(buffer, lease);
  describe(made->tensor.dl_tensor, made->held, shape);
  made->tensor.manager_ctx = made;
  made->tensor.deleter = Export<Managed>::destroy;
  return made;
}

// Elements from the first to behind the last that the tensor reaches; false when that overflows or runs backwards.
bool extent(const lkv_tensor_desc &desc, std::int64_t *out) noexcept {
  std::int64_t last = 0, stride = 1;
  bool empty = false;
  for (int i = desc.ndim - 1; i >= 0; i--) {
    const std::int64_t dim = desc.shape[i], step = desc.strides ? desc.strides[i] : stride;
    std::int64_t reach;
    if (dim < 0 || step < 0) return false;
    empty |= dim == 0;
    if (dim > 0 && (__builtin_mul_overflow(dim - 1, step, &reach) || __builtin_add_overflow(last, reach, &last)))
      return false;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(dim, 1), &stride)) return false;
  }
  *out = 0;
  return empty || !__builtin_add_overflow(last, std::int64_t{1}, out);
}

}  // namespace

DLManagedTensorVersioned *export_versioned(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept {
  auto *made = make<DLManagedTensorVersioned>(buffer, lease, shape);
  if (!made) return nullptr;
  made->tensor.version = {1, 1};
  made->tensor.flags = shape.read_only ? kDLFlagReadOnly : 0;
  return &made->tensor;
}

DLManagedTensor *export_legacy(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept {
  auto *made = make<DLManagedTensor>(buffer, lease, shape);
  return made ? &made->tensor : nullptr;
}

lkv_status lease_to_dlpack(lkv_lease *lease, const lkv_tensor_desc *desc, DLManagedTensorVersioned **out) noexcept {
  if (!out) return fail(LKV_E_INVALID, "lease_to_dlpack: out is NULL");
  *out = nullptr;
  if (!desc || desc->struct_size < sizeof *desc)
    return fail(LKV_E_INVALID, "lease_to_dlpack: desc is NULL or its struct_size is too small");
  lkv_lease_span leased;
  leased.struct_size = sizeof leased;
  if (lkv_status status = span(lease, &leased)) return status;
  const lkv_dtype code = desc->dtype ? desc->dtype : lease->buffer->dtype;
  const DTypeInfo *dtype = dtype_info(code);
  if (!dtype) return fail(LKV_E_INVALID, "lease_to_dlpack: %d is no dtype", desc->dtype);
  if (desc->ndim < 0 || desc->ndim > most_dims || (desc->ndim && !desc->shape))
    return fail(LKV_E_INVALID, "lease_to_dlpack: ndim %d is not in 0..8, or shape is NULL", desc->ndim);
  std::int64_t elements, nbytes;
  if (!extent(*desc, &elements) || __builtin_mul_overflow(elements, dtype->itemsize, &nbytes) ||
      desc->offset > leased.nbytes || static_cast<std::size_t>(nbytes) > leased.nbytes - desc->offset)
    return fail(LKV_E_INVALID, "lease_to_dlpack: the tensor does not lie inside the %zu bytes leased", leased.nbytes);
  char *const data = static_cast<char *>(leased.data) + desc->offset;
  if (reinterpret_cast<std::uintptr_t>(data) % dtype->itemsize)
    return fail(LKV_E_INVALID, "lease_to_dlpack: an offset of %zu does not align %d-byte elements", desc->offset,
                dtype->itemsize);
  *out = export_versioned(lease->buffer, lease,
                          {data, code, desc->ndim, desc->shape, desc->strides,
                           lease->mode == LKV_READ});
  return *out ? LKV_OK : LKV_E_NOMEM;
}

}  // namespace lkv
