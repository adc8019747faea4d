/* lkv.h: the C interface of lkv, a cache for the decode state of transformer language models.
 *
 * C11 and C++17; Python.h is not needed. All functions live in one const table, `lkv_api`, that a program gets
 *   - in a C or C++ extension module: include Python.h first, then call lkv_import(LKV_ABI_MINOR);
 *   - in Cython: `cimport lkv._storage`, which has the same lkv_import();
 *   - elsewhere (Rust, Zig, Go, a plain C library): from its host, as an address. Python code reads it from the capsule
 *     `lkv._storage._C_API` with PyCapsule_GetPointer(capsule, LKV_CAPSULE_NAME), which ctypes.pythonapi has too. Such
 *     a program compares abi_major, abi_minor and struct_size itself, as lkv_import() does.
 *
 * Conventions that hold for every function unless its comment says otherwise
 *   - It returns an lkv_status. On failure a message is in thread-local text, last_error(), nothing was changed, and
 *     outputs are NULL. A success leaves the message alone.
 *   - Outputs come last. A non-NULL object output is a new reference that the caller must release.
 *   - Arguments are borrowed for the time of the call. Objects stay valid as long as the caller holds a reference.
 *   - A NULL argument, or a number out of its domain, is LKV_E_INVALID. Releases accept NULL and cannot fail.
 *   - A handle must not be used after its last reference was released; a library built with LKV_DEBUG notices and says
 *     LKV_E_INVALID.
 *   - A struct that is passed in or filled says its size first; members past that size are neither read nor written.
 *   - Thread rule ("any thread"): it may be called from any thread, with or without Python's GIL, several at once, also
 *     on the same object. It does not block and does not take the GIL. Exceptions to both are said: "may wait" is for
 *     leases, and a thread that holds the GIL must not wait for rows that another thread will only give back with the
 *     GIL. The GIL is taken (by lkv, for a moment) only when the buffer's device is one that was written in Python, or
 *     when the last reference goes to memory that belongs to a Python object (`Storage.wrap`).
 *   - In a child of fork(), objects of before the fork can be released and asked for info; leases of them and access to
 *     their rows are LKV_E_FORKED.
 *   - After the interpreter has ended, all of it still works, but a wait is LKV_E_SHUTDOWN, and memory that belongs to
 *     Python objects is no longer given back.
 *
 * Rows are half-open ranges [lo, hi) of token positions. Times are nanoseconds.
 */
#ifndef LKV_H
#define LKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LKV_ABI_MAJOR 1 /* differs: incompatible */
#define LKV_ABI_MINOR 0 /* members are only ever appended; a higher minor serves a lower one */
#define LKV_CAPSULE_NAME "lkv._storage._C_API"

/* ---- status ---------------------------------------------------------------------------------------------------- */

typedef int32_t lkv_status;
enum {
  LKV_OK = 0,
  LKV_E_INVALID = 1,     /* an argument is out of its domain; nothing was done */
  LKV_E_NOMEM = 2,       /* the device has not enough memory; nothing was kept */
  LKV_E_TIMEOUT = 3,     /* the lease was not granted in time */
  LKV_E_DEADLOCK = 4,    /* this thread holds, itself, the lease it would wait for */
  LKV_E_POISONED = 5,    /* a write failed half-way; clear_poison() says the content is good again */
  LKV_E_FORKED = 6,      /* the object was made before fork() and this is the child */
  LKV_E_SHUTDOWN = 7,    /* the process is ending; waiting is over */
  LKV_E_DEVICE = 8,      /* the device reported a failure */
  LKV_E_UNSUPPORTED = 9, /* the device or the object cannot do this */
  LKV_E_NOT_FOUND = 10,  /* no device of that name */
  LKV_E_EXISTS = 11,     /* a device of that name is registered already */
  LKV_E_CONFLICT = 12,   /* claim: the claimed length is not the expected one */
  LKV_E_ENDED = 13,      /* the lease has ended */
  LKV_E_READ_ONLY = 14,  /* a write through a read lease or onto read-only memory */
  LKV_E_ABI = 15         /* the library is too old or too new for the caller */
};

/* ---- vocabulary ------------------------------------------------------------------------------------------------ */

/* What a row is made of. The (code, bits) pair that DLPack uses is beside each. */
typedef int32_t lkv_dtype;
enum {
  LKV_F64 = 1,         /* (2, 64) */
  LKV_F32 = 2,         /* (2, 32) */
  LKV_F16 = 3,         /* (2, 16) */
  LKV_BF16 = 4,        /* (4, 16) */
  LKV_F8_E4M3FN = 5,   /* (10, 8) */
  LKV_F8_E5M2 = 6,     /* (12, 8) */
  LKV_I64 = 7,         /* (0, 64) */
  LKV_I32 = 8,         /* (0, 32) */
  LKV_I16 = 9,         /* (0, 16) */
  LKV_I8 = 10,         /* (0, 8) */
  LKV_U8 = 11,         /* (1, 8) */
  LKV_BOOL = 12        /* (6, 8) */
};

typedef int32_t lkv_mode;
enum { LKV_READ = 0, LKV_WRITE = 1 };

typedef int32_t lkv_copy_kind;
enum { LKV_HOST_TO_DEVICE = 1, LKV_DEVICE_TO_HOST = 2, LKV_DEVICE_TO_DEVICE = 3 };

#define LKV_FOREVER (INT64_C(-1)) /* timeout: wait without bound */
#define LKV_TRY (INT64_C(0))      /* timeout: do not wait */

typedef struct lkv_buffer lkv_buffer; /* a storage: reference-counted rows on one device */
typedef struct lkv_lease lkv_lease;   /* a held right to read or write some of its rows */
typedef struct lkv_device lkv_device; /* a place that memory is in; lives until the process ends */

struct DLManagedTensor;          /* of dlpack.h, which a caller of lease_to_dlpack includes itself */
struct DLManagedTensorVersioned;

/* ---- devices --------------------------------------------------------------------------------------------------- */

/* A device that a third party adds. Set struct_size to sizeof(lkv_device_vtable); entries past it count as NULL.
 * `ctx` is the pointer given to device_register(). Every entry may be called from any thread, several at once, and
 * never under a lock of lkv. An entry that fails returns a status other than LKV_OK and may describe it by
 * set_error(). `stream` is NULL for the device's default queue. Entries marked optional may be NULL. */
typedef struct lkv_device_vtable {
  size_t struct_size;
  int32_t dl_device_type; /* DLPack's DLDeviceType */
  int32_t host_accessible; /* nonzero: the CPU may load and store through the pointers */
  /* `*out`: nbytes (> 0), aligned to 256, filled with zeros. LKV_E_NOMEM when there is not enough. */
  lkv_status (*allocate)(void *ctx, size_t nbytes, void **out);
  void (*free)(void *ctx, void *ptr, size_t nbytes);
  /* `height` rows of `width` bytes; a pitch is the distance of two rows in bytes. Ordered after earlier work of
   * `stream`. A host source may be overwritten once this returned; a host destination is complete then. */
  lkv_status (*copy_2d)(void *ctx, lkv_copy_kind kind, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                        size_t width, size_t height, void *stream);
  lkv_status (*fill_zero)(void *ctx, void *ptr, size_t nbytes, void *stream);
  /* Returns once all earlier work of `stream` is done. Optional: NULL says that every entry completes before it
   * returns. */
  lkv_status (*sync)(void *ctx, void *stream);
  /* Events order work of different streams. Optional, all four or none. */
  lkv_status (*event_record)(void *ctx, void *stream, void **out_event);
  lkv_status (*event_wait)(void *ctx, void *stream, void *event); /* the stream waits, not the caller */
  int32_t (*event_done)(void *ctx, void *event);                  /* nonzero: reached */
  void (*event_free)(void *ctx, void *event);
  lkv_status (*current_stream)(void *ctx, void **out_stream); /* optional: the calling thread's */
  lkv_status (*memory_info)(void *ctx, size_t *out_free, size_t *out_total); /* optional */
} lkv_device_vtable;

/* ---- storages -------------------------------------------------------------------------------------------------- */

enum {
  LKV_HUGE_PAGES = 1,       /* buffer_create: ask the OS for huge pages */
  LKV_READ_ONLY_MEMORY = 2, /* buffer_wrap: write leases are refused */
  LKV_STRIDED_ROWS = 4      /* a row is not row_bytes in one place, as in a K/V slab [heads, rows, head_dim] */
};

/* What to create. Set struct_size to sizeof(lkv_buffer_desc) and zero the rest first. */
typedef struct lkv_buffer_desc {
  size_t struct_size;
  lkv_device *device; /* NULL: the CPU */
  int64_t rows;       /* > 0 */
  int64_t row_bytes;  /* > 0; rows * row_bytes must fit ptrdiff_t */
  lkv_dtype dtype;    /* must divide row_bytes; 0: LKV_U8 */
  uint32_t flags;
  lkv_buffer *queue_of; /* share the lease queue of this buffer (which must have as many rows); NULL: its own */
} lkv_buffer_desc;

/* What a storage is. Set struct_size to sizeof(lkv_buffer_info) before the call. */
typedef struct lkv_buffer_info {
  size_t struct_size;
  uint64_t id; /* process-unique, never reused */
  lkv_device *device;
  int32_t dl_device_type;
  int32_t ordinal;
  void *data; /* unsynchronised: hold a lease while using it */
  size_t nbytes;
  int64_t rows;
  int64_t row_bytes;
  int64_t claimed;
  uint64_t version;
  uint64_t refcount; /* a snapshot, for tests and diagnostics */
  lkv_dtype dtype;
  int32_t poisoned;
  int32_t read_only;
  int32_t strided; /* LKV_STRIDED_ROWS */
} lkv_buffer_info;

/* ---- leases ---------------------------------------------------------------------------------------------------- */

/* What a lease gives. Set struct_size to sizeof(lkv_lease_span) before the call. `data` is the first byte of row
 * `lo`. Of a storage with LKV_STRIDED_ROWS it is the storage's first byte, and `nbytes` its size: where the leased rows
 * are in there, and that no others are touched, is up to the caller. */
typedef struct lkv_lease_span {
  size_t struct_size;
  void *data;
  size_t nbytes;
  int64_t lo;
  int64_t hi;
  lkv_mode mode;
  int32_t reserved;
} lkv_lease_span;

/* The shape that lease_to_dlpack() exports. Strides are in elements; NULL: C order. `offset` is in bytes from the
 * first leased row. The tensor must lie inside the leased rows. */
typedef struct lkv_tensor_desc {
  size_t struct_size;
  lkv_dtype dtype; /* 0: the buffer's */
  int32_t ndim;    /* 0 to 8 */
  const int64_t *shape;
  const int64_t *strides;
  size_t offset;
} lkv_tensor_desc;

/* ---- the table ------------------------------------------------------------------------------------------------- */

typedef struct lkv_api {
  uint32_t abi_major;
  uint32_t abi_minor;
  size_t struct_size; /* of the library's table: members past it do not exist, see LKV_HAS */

  /* A status as its name, "LKV_E_NOMEM"; "LKV_E_UNKNOWN" for another number. Static text. Any thread. */
  const char *(*status_name)(lkv_status status);
  /* The message of the calling thread's last failure, "" if none. Owned by lkv, valid until this thread's next failing
   * call. Any thread, each has its own. */
  const char *(*last_error)(void);
  /* Sets that message: for the entries of an lkv_device_vtable. The text is copied; NULL empties it. Any thread. */
  void (*set_error)(const char *message);

  /* Adds a device, e.g. ("npu", 0). Name and table are copied; `ctx` is kept and passed to every entry, and must live
   * until the process ends, as does the device: the output is borrowed. LKV_E_EXISTS when (name, ordinal) is taken. Any
   * thread. */
  lkv_status (*device_register)(const char *name, int32_t ordinal, const lkv_device_vtable *vtable, void *ctx,
                                lkv_device **out);
  /* "cpu", "cuda:1"; a missing ordinal is 0. The output is borrowed and lives until the process ends.
   * LKV_E_NOT_FOUND. Any thread. */
  lkv_status (*device_find)(const char *name, lkv_device **out);
  /* Returns once all work that was queued on `stream` of `device` is done. Any thread; may block in the device. */
  lkv_status (*device_sync)(lkv_device *device, void *stream);

  /* A new storage full of zeros, version 0; the caller owns the reference. LKV_E_INVALID for sizes that do not fit,
   * LKV_E_NOMEM. Any thread. */
  lkv_status (*buffer_create)(const lkv_buffer_desc *desc, lkv_buffer **out);
  /* A storage over memory of the caller's that stays valid until `deleter(ctx)` is called: once, when the last
   * reference and the last export are gone, from whatever thread drops them, with or without the GIL, possibly while
   * the process ends. `deleter` may be NULL. On failure it is not called, and the memory stays the caller's. Any
   * thread. */
  lkv_status (*buffer_wrap)(const lkv_buffer_desc *desc, void *data, void (*deleter)(void *ctx), void *ctx,
                            lkv_buffer **out);
  /* Adds a reference, which somebody must release. The caller has one already. Any thread. */
  void (*buffer_retain)(lkv_buffer *buffer);
  /* Drops one reference, which must not be used again. The memory goes with the last one; leases and exports hold
   * references of their own. Any thread; may take the GIL (see above). */
  void (*buffer_release)(lkv_buffer *buffer);
  /* Describes a buffer as it is now. The device in it is borrowed and lives for ever. Any thread. */
  lkv_status (*buffer_info)(const lkv_buffer *buffer, lkv_buffer_info *out);
  /* Says that the content changed in a way the library did not see (a kernel through a raw pointer). Any thread. */
  lkv_status (*buffer_bump_version)(lkv_buffer *buffer);

  /* Waits at most `timeout` ns (LKV_TRY, LKV_FOREVER) for the right to read or write rows [lo, hi). Requests are
   * granted in order of arrival; those that do not conflict never wait for each other. LKV_E_TIMEOUT; LKV_E_DEADLOCK at
   * once when waiting for ever for rows that this thread leases itself, also when it has handed the lease to another
   * thread to end (wait with a bound then); LKV_E_POISONED for a read; LKV_E_READ_ONLY for
   * a write; LKV_E_FORKED; LKV_E_SHUTDOWN. The caller owns the lease, which holds a reference to the buffer. Any
   * thread; may wait, so do not hold the GIL unless `timeout` is LKV_TRY. */
  lkv_status (*lease_acquire)(lkv_buffer *buffer, lkv_mode mode, int64_t lo, int64_t hi, int64_t timeout,
                              lkv_lease **out);
  /* Adds a reference, which somebody must release. The caller has one already. Any thread. */
  void (*lease_retain)(lkv_lease *lease);
  /* Drops one reference, which must not be used again; the right ends with the last one (exports made from the lease
   * hold references), or before by lease_end(). Any thread, not only the one that acquired; may take the GIL. */
  void (*lease_release)(lkv_lease *lease);
  /* Ends the right now; the handle stays valid, and so does the memory, until released. A write lease's end moves the
   * buffer's version by one. Ending twice is harmless. Any thread. */
  void (*lease_end)(lkv_lease *lease);
  /* lease_end() of a write that failed half-way, then lease_release(): poisons the buffer, does not move its version.
   * Any thread; may take the GIL. */
  void (*lease_release_poisoned)(lkv_lease *lease);
  /* Turns a write lease into a read lease of the same rows, without a gap; moves the version. LKV_E_INVALID for a read
   * lease. Any thread. */
  lkv_status (*lease_downgrade)(lkv_lease *lease);
  /* Where the leased rows are. The address is good until the right ends. LKV_E_ENDED after that. Any thread. */
  lkv_status (*lease_data)(const lkv_lease *lease, lkv_lease_span *out);
  /* Says that the content is good again, usually after writing it anew. Any thread. */
  lkv_status (*buffer_clear_poison)(lkv_buffer *buffer);

  /* Bytes between two held leases, from `src_offset` within the source's leased rows to `dst_offset` within the
   * destination's; the two may overlap on the CPU. Between devices too, through host memory where neither reaches the
   * other. A failure of the device poisons the destination. Any thread. */
  lkv_status (*copy)(lkv_lease *dst, size_t dst_offset, const lkv_lease *src, size_t src_offset, size_t nbytes);
  /* copy() of `height` runs of `width` bytes, a pitch (at least the width) apart. Any thread. */
  lkv_status (*copy_2d)(lkv_lease *dst, size_t dst_offset, size_t dst_pitch, const lkv_lease *src, size_t src_offset,
                        size_t src_pitch, size_t width, size_t height);
  /* Clears bytes of leased rows. As all functions that take bytes of leased rows by their offset: LKV_E_UNSUPPORTED for
   * a lease on part of a storage with LKV_STRIDED_ROWS. A failure of the device poisons the buffer. Any thread. */
  lkv_status (*fill_zero)(lkv_lease *lease, size_t offset, size_t nbytes);
  /* Copies bytes of leased rows to host memory, complete when this returned. Any thread. */
  lkv_status (*read_host)(const lkv_lease *lease, size_t offset, void *dst, size_t nbytes);
  /* Copies host memory, which may be overwritten once this returned, to leased rows. LKV_E_READ_ONLY through a read
   * lease. A failure of the device poisons the buffer. Any thread. */
  lkv_status (*write_host)(lkv_lease *lease, size_t offset, const void *src, size_t nbytes);

  /* A DLPack 1.x tensor over leased rows; flagged read-only when the lease is. The description is copied. The caller
   * owns the tensor, which holds the memory, and a lease nobody ended, until its deleter is called: from any thread,
   * without the GIL, also while the interpreter ends. Any thread. */
  lkv_status (*lease_to_dlpack)(lkv_lease *lease, const lkv_tensor_desc *desc, struct DLManagedTensorVersioned **out);

  /* A new allocation id: process-unique, never 0. Cannot fail. Any thread. */
  uint64_t (*alloc_id_next)(void);

  /* Moves the claimed length of `buffer` from `expected` to `claimed` rows in one step, or LKV_E_CONFLICT: how branches
   * that share a storage agree on who extends it in place. Any thread. */
  lkv_status (*buffer_claim)(lkv_buffer *buffer, int64_t expected, int64_t claimed);
  /* Gives whole pages inside rows [lo, hi) back to the OS and leaves zeros in all of these rows. Takes a write lease
   * itself, without waiting: LKV_E_TIMEOUT when the rows are in use. Any thread. */
  lkv_status (*buffer_release_rows)(lkv_buffer *buffer, int64_t lo, int64_t hi);
} lkv_api;

/* Is `member` in the table that `api` points to? A table of an older library is shorter: check what came after the
 * minor version that lkv_import() was given. */
#define LKV_HAS(api, member) \
  ((api)->struct_size >= offsetof(lkv_api, member) + sizeof((api)->member))

#ifdef __cplusplus
} /* extern "C" */
#endif

/* With Python.h: the table, or NULL with an exception set: an ImportError that names both versions when the library is
 * another major version, or a lower minor one than `minor`. Needs the GIL. The table lives until the process ends. */
#ifdef Py_PYTHON_H
static inline const lkv_api *lkv_import(uint32_t minor) {
#ifdef __cplusplus
  const lkv_api *api = static_cast<const lkv_api *>(PyCapsule_Import(LKV_CAPSULE_NAME, 0));
#else
  const lkv_api *api = PyCapsule_Import(LKV_CAPSULE_NAME, 0);
#endif
  if (api != NULL && (api->abi_major != LKV_ABI_MAJOR || api->abi_minor < minor)) {
    PyErr_Format(PyExc_ImportError, "lkv: compiled for C ABI %d.%u, the installed library has %u.%u",
                 LKV_ABI_MAJOR, minor, api->abi_major, api->abi_minor);
    return NULL;
  }
  return api;
}
#endif

#endif /* LKV_H */
