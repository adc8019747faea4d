/* Where every member of every public struct is on a machine with 64-bit pointers and longs. What compiled programs were
 * built against never moves; members are only ever appended. Compiled as C11 and as C++17. */
#include <lkv.h>

#ifdef __cplusplus
#define CHECK(condition) static_assert(condition, #condition)
#else
#define CHECK(condition) _Static_assert(condition, #condition)
#endif
#define SIZE(type, bytes) CHECK(sizeof(type) == bytes)
#define AT(type, member, bytes) CHECK(offsetof(type, member) == bytes)

#if defined(__LP64__)
SIZE(lkv_device_vtable, 104);
AT(lkv_device_vtable, struct_size, 0);
AT(lkv_device_vtable, dl_device_type, 8);
AT(lkv_device_vtable, host_accessible, 12);
AT(lkv_device_vtable, allocate, 16);
AT(lkv_device_vtable, free, 24);
AT(lkv_device_vtable, copy_2d, 32);
AT(lkv_device_vtable, fill_zero, 40);
AT(lkv_device_vtable, sync, 48);
AT(lkv_device_vtable, event_record, 56);
AT(lkv_device_vtable, event_wait, 64);
AT(lkv_device_vtable, event_done, 72);
AT(lkv_device_vtable, event_free, 80);
AT(lkv_device_vtable, current_stream, 88);
AT(lkv_device_vtable, memory_info, 96);

SIZE(lkv_buffer_desc, 48);
AT(lkv_buffer_desc, struct_size, 0);
AT(lkv_buffer_desc, device, 8);
AT(lkv_buffer_desc, rows, 16);
AT(lkv_buffer_desc, row_bytes, 24);
AT(lkv_buffer_desc, dtype, 32);
AT(lkv_buffer_desc, flags, 36);
AT(lkv_buffer_desc, queue_of, 40);

SIZE(lkv_buffer_info, 104);
AT(lkv_buffer_info, struct_size, 0);
AT(lkv_buffer_info, id, 8);
AT(lkv_buffer_info, device, 16);
AT(lkv_buffer_info, dl_device_type, 24);
AT(lkv_buffer_info, ordinal, 28);
AT(lkv_buffer_info, data, 32);
AT(lkv_buffer_info, nbytes, 40);
AT(lkv_buffer_info, rows, 48);
AT(lkv_buffer_info, row_bytes, 56);
AT(lkv_buffer_info, claimed, 64);
AT(lkv_buffer_info, version, 72);
AT(lkv_buffer_info, refcount, 80);
AT(lkv_buffer_info, dtype, 88);
AT(lkv_buffer_info, poisoned, 92);
AT(lkv_buffer_info, read_only, 96);
AT(lkv_buffer_info, strided, 100);

SIZE(lkv_lease_span, 48);
AT(lkv_lease_span, struct_size, 0);
AT(lkv_lease_span, data, 8);
AT(lkv_lease_span, nbytes, 16);
AT(lkv_lease_span, lo, 24);
AT(lkv_lease_span, hi, 32);
AT(lkv_lease_span, mode, 40);
AT(lkv_lease_span, reserved, 44);

SIZE(lkv_tensor_desc, 40);
AT(lkv_tensor_desc, struct_size, 0);
AT(lkv_tensor_desc, dtype, 8);
AT(lkv_tensor_desc, ndim, 12);
AT(lkv_tensor_desc, shape, 16);
AT(lkv_tensor_desc, strides, 24);
AT(lkv_tensor_desc, offset, 32);

SIZE(lkv_api, 248);
AT(lkv_api, abi_major, 0);
AT(lkv_api, abi_minor, 4);
AT(lkv_api, struct_size, 8);
AT(lkv_api, status_name, 16);
AT(lkv_api, last_error, 24);
AT(lkv_api, set_error, 32);
AT(lkv_api, device_register, 40);
AT(lkv_api, device_find, 48);
AT(lkv_api, device_sync, 56);
AT(lkv_api, buffer_create, 64);
AT(lkv_api, buffer_wrap, 72);
AT(lkv_api, buffer_retain, 80);
AT(lkv_api, buffer_release, 88);
AT(lkv_api, buffer_info, 96);
AT(lkv_api, buffer_bump_version, 104);
AT(lkv_api, lease_acquire, 112);
AT(lkv_api, lease_retain, 120);
AT(lkv_api, lease_release, 128);
AT(lkv_api, lease_end, 136);
AT(lkv_api, lease_release_poisoned, 144);
AT(lkv_api, lease_downgrade, 152);
AT(lkv_api, lease_data, 160);
AT(lkv_api, buffer_clear_poison, 168);
AT(lkv_api, copy, 176);
AT(lkv_api, copy_2d, 184);
AT(lkv_api, fill_zero, 192);
AT(lkv_api, read_host, 200);
AT(lkv_api, write_host, 208);
AT(lkv_api, lease_to_dlpack, 216);
AT(lkv_api, alloc_id_next, 224);
AT(lkv_api, buffer_claim, 232);
AT(lkv_api, buffer_release_rows, 240);

SIZE(lkv_status, 4);
SIZE(lkv_dtype, 4);
SIZE(lkv_mode, 4);
SIZE(lkv_copy_kind, 4);
#endif

CHECK(LKV_OK == 0 && LKV_READ == 0 && LKV_WRITE == 1 && LKV_FOREVER < 0 && LKV_TRY == 0);
