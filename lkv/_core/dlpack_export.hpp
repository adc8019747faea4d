// DLPack tensors over a storage's memory. Their deleters are plain C: no Python, any thread, any time.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dlpack_abi.h"
#include "lease.hpp"
#include "storage.hpp"

namespace lkv {

struct ExportShape {
  void *data;  // of the first element
  lkv_dtype dtype;
  std::int32_t ndim;
  const std::int64_t *shape;
  const std::int64_t *strides;  // in elements; NULL: C order
  bool read_only;
};

// Holds `buffer` and, unless it is NULL, `lease`. NULL when memory is out.
DLManagedTensorVersioned *export_versioned(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept;
DLManagedTensor *export_legacy(lkv_buffer *buffer, lkv_lease *lease, const ExportShape &shape) noexcept;

lkv_status lease_to_dlpack(lkv_lease *lease, const lkv_tensor_desc *desc, DLManagedTensorVersioned **out) noexcept;

}  // namespace lkv
