/* Every function of the table with arguments out of their domain: what it answers, for Python to judge. */
#include "common.h"

static PyObject *answers;
static const char *const junk = "junk";

static void note(const char *function, const char *arguments, lkv_status got, lkv_status wanted, int clean) {
  PyObject *row = Py_BuildValue("sssssi", function, arguments, api->status_name(got), api->status_name(wanted),
                                api->last_error(), clean);
  if (row) PyList_Append(answers, row);
  Py_XDECREF(row);
}

/* A call that must fail. */
#define REFUSES(wanted, function, ...) \
  (api->set_error(""), note(#function, #__VA_ARGS__, api->function(__VA_ARGS__), wanted, 1))
/* The same for one with an object output, which must come back NULL. */
#define REFUSES_OUT(wanted, out, function, ...)                         \
  do {                                                                  \
    (out) = (void *)junk;                                               \
    api->set_error("");                                                 \
    const lkv_status got = api->function(__VA_ARGS__);                  \
    note(#function, #__VA_ARGS__, got, wanted, (out) == NULL);          \
  } while (0)
/* A call that cannot fail. */
#define TAKES(function, ...) (api->function(__VA_ARGS__), note(#function, #__VA_ARGS__, LKV_OK, LKV_OK, 1))

static lkv_buffer_desc desc(int64_t rows, int64_t row_bytes) {
  lkv_buffer_desc d;
  memset(&d, 0, sizeof d);
  d.struct_size = sizeof d;
  d.rows = rows;
  d.row_bytes = row_bytes;
  return d;
}

static void deleted(void *context) { *(int *)context += 1; }

static lkv_status entry_of_a_device(void *context, size_t nbytes, void **out) {
  (void)context, (void)nbytes, (void)out;
  return LKV_E_NOMEM;
}

static void messages(void) {
  char text[4096];
  memset(text, 'x', sizeof text);
  text[sizeof text - 1] = 0;
  TAKES(set_error, NULL);
  note("last_error", "", api->last_error() ? LKV_OK : LKV_E_INVALID, LKV_OK, 1);
  TAKES(set_error, text);
  TAKES(set_error, "");
  TAKES(status_name, -1);
  TAKES(status_name, INT32_MAX);
  note("alloc_id_next", "", api->alloc_id_next() ? LKV_OK : LKV_E_INVALID, LKV_OK, 1);
}

static void devices(void) {
  lkv_device *out, *cpu;
  lkv_device_vtable table;
  memset(&table, 0, sizeof table);
  api->device_find("cpu", &cpu);
  REFUSES(LKV_E_INVALID, device_find, "cpu", NULL);
  REFUSES_OUT(LKV_E_INVALID, out, device_find, NULL, &out);
  REFUSES_OUT(LKV_E_NOT_FOUND, out, device_find, "", &out);
  REFUSES_OUT(LKV_E_NOT_FOUND, out, device_find, "no such device", &out);
  REFUSES_OUT(LKV_E_NOT_FOUND, out, device_find, "cpu:1", &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_find, "cpu:", &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_find, "cpu:-1", &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_find, "cpu:0x", &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_find, "cpu:99999999999999999999", &out);
  REFUSES(LKV_E_INVALID, device_sync, NULL, NULL);
  REFUSES(LKV_E_INVALID, device_register, "a", 0, &table, NULL, NULL);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, NULL, 0, &table, NULL, &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "", 0, &table, NULL, &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "a:0", 0, &table, NULL, &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "0123456789012345678901234567890123456789", 0, &table, NULL, &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "a", -1, &table, NULL, &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "a", 0, NULL, NULL, &out);
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "a", 0, &table, NULL, &out); /* struct_size 0 */
  table.struct_size = sizeof table;
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "a", 0, &table, NULL, &out); /* no entries */
  table.allocate = entry_of_a_device;
  REFUSES_OUT(LKV_E_INVALID, out, device_register, "a", 0, &table, NULL, &out);
}

static void sizes(void) {
  lkv_buffer *out;
  lkv_buffer_desc d = desc(8, 16);
  int calls = 0;
  char memory[128];
  REFUSES(LKV_E_INVALID, buffer_create, &d, NULL);
  REFUSES_OUT(LKV_E_INVALID, out, buffer_create, NULL, &out);
  REFUSES(LKV_E_INVALID, buffer_wrap, &d, memory, deleted, &calls, NULL);
  REFUSES_OUT(LKV_E_INVALID, out, buffer_wrap, NULL, memory, deleted, &calls, &out);
  REFUSES_OUT(LKV_E_INVALID, out, buffer_wrap, &d, NULL, deleted, &calls, &out);
  static const int64_t bad[][2] = {{0, 16}, {-1, 16}, {8, 0}, {8, -1}, {INT64_MAX, 2}, {INT64_MAX, INT64_MAX},
                                   {INT64_MIN, INT64_MIN}, {(int64_t)1 << 32, (int64_t)1 << 32}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    d = desc(bad[i][0], bad[i][1]);
    REFUSES_OUT(LKV_E_INVALID, out, buffer_create, &d, &out);
    REFUSES_OUT(LKV_E_INVALID, out, buffer_wrap, &d, memory, deleted, &calls, &out);
  }
  d = desc(INT64_MAX, 1);
  REFUSES_OUT(LKV_E_NOMEM, out, buffer_create, &d, &out);
  d = desc(8, 16);
  d.dtype = 77;
  REFUSES_OUT(LKV_E_INVALID, out, buffer_create, &d, &out);
  d.dtype = -1;
  REFUSES_OUT(LKV_E_INVALID, out, buffer_wrap, &d, memory, deleted, &calls, &out);
  d = desc(8, 15);
  d.dtype = LKV_F16;
  REFUSES_OUT(LKV_E_INVALID, out, buffer_create, &d, &out);
  d = desc(8, 16);
  d.flags = 1u << 31;
  REFUSES_OUT(LKV_E_INVALID, out, buffer_create, &d, &out);
  REFUSES_OUT(LKV_E_INVALID, out, buffer_wrap, &d, memory, deleted, &calls, &out);
  d = desc(8, 16);
  d.struct_size = 0;
  REFUSES_OUT(LKV_E_INVALID, out, buffer_create, &d, &out);
  d.struct_size = sizeof(size_t);
  REFUSES_OUT(LKV_E_INVALID, out, buffer_wrap, &d, memory, deleted, &calls, &out);
  note("buffer_wrap", "the deleter of what was refused", calls ? LKV_E_INVALID : LKV_OK, LKV_OK, 1);
}

static void of_a_buffer(lkv_buffer *buffer) {
  lkv_buffer *out;
  lkv_buffer_info info;
  lkv_lease *lease, *mine;
  lkv_buffer_desc d = desc(9, 16);
  d.queue_of = buffer;
  REFUSES_OUT(LKV_E_INVALID, out, buffer_create, &d, &out); /* not as many rows */
  info.struct_size = sizeof info;
  REFUSES(LKV_E_INVALID, buffer_info, NULL, &info);
  REFUSES(LKV_E_INVALID, buffer_info, buffer, NULL);
  info.struct_size = 0;
  REFUSES(LKV_E_INVALID, buffer_info, buffer, &info);
  REFUSES(LKV_E_INVALID, buffer_bump_version, NULL);
  REFUSES(LKV_E_INVALID, buffer_clear_poison, NULL);
  TAKES(buffer_retain, NULL);
  TAKES(buffer_release, NULL);
  REFUSES(LKV_E_INVALID, buffer_claim, NULL, 0, 1);
  REFUSES(LKV_E_INVALID, buffer_claim, buffer, -1, 1);
  REFUSES(LKV_E_INVALID, buffer_claim, buffer, 2, 1);
  REFUSES(LKV_E_INVALID, buffer_claim, buffer, 0, INT64_MAX);
  REFUSES(LKV_E_CONFLICT, buffer_claim, buffer, 1, 2);
  REFUSES(LKV_E_INVALID, buffer_release_rows, NULL, 0, 1);
  REFUSES(LKV_E_INVALID, lease_acquire, buffer, LKV_READ, 0, 1, LKV_TRY, NULL);
  REFUSES_OUT(LKV_E_INVALID, lease, lease_acquire, NULL, LKV_READ, 0, 1, LKV_TRY, &lease);
  REFUSES_OUT(LKV_E_INVALID, lease, lease_acquire, buffer, 2, 0, 1, LKV_TRY, &lease);
  REFUSES_OUT(LKV_E_INVALID, lease, lease_acquire, buffer, -1, 0, 1, LKV_TRY, &lease);
  static const int64_t bad[][2] = {{1, 0}, {-1, 1}, {0, 9}, {9, 9}, {INT64_MIN, INT64_MAX}, {0, INT64_MAX}, {-1, -1}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const int64_t lo = bad[i][0], hi = bad[i][1];
    REFUSES_OUT(LKV_E_INVALID, lease, lease_acquire, buffer, LKV_READ, lo, hi, LKV_TRY, &lease);
    REFUSES_OUT(LKV_E_INVALID, lease, lease_acquire, buffer, LKV_WRITE, lo, hi, LKV_FOREVER, &lease);
    REFUSES(LKV_E_INVALID, buffer_release_rows, buffer, lo, hi);
  }
  api->lease_acquire(buffer, LKV_WRITE, 0, 8, LKV_TRY, &mine);
  REFUSES_OUT(LKV_E_TIMEOUT, lease, lease_acquire, buffer, LKV_READ, 0, 1, LKV_TRY, &lease);
  REFUSES_OUT(LKV_E_TIMEOUT, lease, lease_acquire, buffer, LKV_READ, 0, 1, 1000, &lease);
  REFUSES_OUT(LKV_E_DEADLOCK, lease, lease_acquire, buffer, LKV_WRITE, 7, 8, LKV_FOREVER, &lease);
  REFUSES(LKV_E_TIMEOUT, buffer_release_rows, buffer, 0, 1);
  api->lease_release_poisoned(mine);
  REFUSES_OUT(LKV_E_POISONED, lease, lease_acquire, buffer, LKV_READ, 0, 1, LKV_TRY, &lease);
  api->buffer_clear_poison(buffer);
}

static void of_a_lease(lkv_lease *write, lkv_lease *read, lkv_lease *ended) {
  char bytes[64];
  lkv_lease_span span;
  TAKES(lease_retain, NULL);
  TAKES(lease_release, NULL);
  TAKES(lease_end, NULL);
  TAKES(lease_end, ended);
  TAKES(lease_release_poisoned, NULL);
  REFUSES(LKV_E_INVALID, lease_downgrade, NULL);
  REFUSES(LKV_E_INVALID, lease_downgrade, read);
  REFUSES(LKV_E_ENDED, lease_downgrade, ended);
  REFUSES(LKV_E_INVALID, lease_data, write, NULL);
  span.struct_size = sizeof(size_t);
  REFUSES(LKV_E_INVALID, lease_data, write, &span);
  span.struct_size = sizeof span;
  REFUSES(LKV_E_INVALID, lease_data, NULL, &span);
  span.data = bytes;
  REFUSES(LKV_E_ENDED, lease_data, ended, &span);
  note("lease_data", "span.data", span.data ? LKV_E_INVALID : LKV_OK, LKV_OK, 1);
  REFUSES(LKV_E_INVALID, read_host, NULL, 0, bytes, 1);
  REFUSES(LKV_E_INVALID, read_host, read, 0, NULL, 1);
  REFUSES(LKV_E_ENDED, read_host, ended, 0, bytes, 1);
  REFUSES(LKV_E_INVALID, write_host, NULL, 0, bytes, 1);
  REFUSES(LKV_E_INVALID, write_host, write, 0, NULL, 1);
  REFUSES(LKV_E_ENDED, write_host, ended, 0, bytes, 1);
  REFUSES(LKV_E_READ_ONLY, write_host, read, 0, bytes, 1);
  REFUSES(LKV_E_INVALID, fill_zero, NULL, 0, 1);
  REFUSES(LKV_E_ENDED, fill_zero, ended, 0, 1);
  REFUSES(LKV_E_READ_ONLY, fill_zero, read, 0, 1);
  static const size_t bad[][2] = {{0, 33}, {32, 1}, {33, 0}, {SIZE_MAX, 2}, {2, SIZE_MAX}, {SIZE_MAX, SIZE_MAX}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const size_t offset = bad[i][0], n = bad[i][1];
    REFUSES(LKV_E_INVALID, read_host, write, offset, bytes, n);
    REFUSES(LKV_E_INVALID, write_host, write, offset, bytes, n);
    REFUSES(LKV_E_INVALID, fill_zero, write, offset, n);
    REFUSES(LKV_E_INVALID, copy, write, offset, read, 0, n);
    REFUSES(LKV_E_INVALID, copy, write, 0, read, offset, n);
    REFUSES(LKV_E_INVALID, copy_2d, write, offset, n, read, 0, n, n, 2);
  }
  REFUSES(LKV_E_INVALID, copy, NULL, 0, read, 0, 1);
  REFUSES(LKV_E_INVALID, copy, write, 0, NULL, 0, 1);
  REFUSES(LKV_E_READ_ONLY, copy, read, 0, write, 0, 1);
  REFUSES(LKV_E_ENDED, copy, write, 0, ended, 0, 1);
  REFUSES(LKV_E_INVALID, copy_2d, NULL, 0, 8, read, 0, 8, 8, 1);
  REFUSES(LKV_E_INVALID, copy_2d, write, 0, 8, NULL, 0, 8, 8, 1);
  REFUSES(LKV_E_INVALID, copy_2d, write, 0, 4, read, 0, 8, 8, 2);
  REFUSES(LKV_E_INVALID, copy_2d, write, 0, 8, read, 0, 4, 8, 2);
  REFUSES(LKV_E_INVALID, copy_2d, write, 0, 8, read, 0, 8, 8, SIZE_MAX);
  REFUSES(LKV_E_INVALID, copy_2d, write, 0, SIZE_MAX / 2, read, 0, 8, 8, 4);
}

static void tensors(lkv_lease *lease, lkv_lease *ended) {
  DLManagedTensorVersioned *out;
  lkv_tensor_desc d;
  int64_t shape[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, strides[2] = {1, 1};
  memset(&d, 0, sizeof d);
  d.struct_size = sizeof d;
  REFUSES(LKV_E_INVALID, lease_to_dlpack, lease, &d, NULL);
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, NULL, &d, &out);
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, NULL, &out);
  REFUSES_OUT(LKV_E_ENDED, out, lease_to_dlpack, ended, &d, &out);
  d.ndim = 1;
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out); /* shape NULL */
  d.shape = shape;
  static const int32_t ndims[] = {-1, 9, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof ndims / sizeof *ndims; i++) {
    d.ndim = ndims[i];
    REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
  }
  d.ndim = 2;
  static const int64_t bad[][4] = {{33, 1, 1, 1},         {-1, 1, 1, 1},  {INT64_MAX, INT64_MAX, 1, 1}, {2, 2, -1, 1},
                                   {2, 2, INT64_MAX, 1},  {2, 17, 17, 1}, {INT64_MAX, 2, 1, 1},
                                   {INT64_MIN, 1, 1, 1}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    shape[0] = bad[i][0], shape[1] = bad[i][1], strides[0] = bad[i][2], strides[1] = bad[i][3];
    d.strides = strides;
    REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
  }
  shape[0] = shape[1] = 1;
  d.strides = NULL;
  d.offset = 33;
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
  d.offset = SIZE_MAX;
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
  d.offset = 1;
  d.dtype = LKV_F32; /* not aligned */
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
  d.offset = 0;
  d.dtype = 99;
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
  d.dtype = 0;
  d.struct_size = 0;
  REFUSES_OUT(LKV_E_INVALID, out, lease_to_dlpack, lease, &d, &out);
}

static PyObject *walk(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  lkv_buffer *buffer = NULL;
  lkv_lease *write, *read, *ended;
  lkv_buffer_desc d = desc(8, 16);
  answers = PyList_New(0);
  if (!answers || api->buffer_create(&d, &buffer)) return NULL;
  messages();
  devices();
  sizes();
  of_a_buffer(buffer);
  api->lease_acquire(buffer, LKV_WRITE, 2, 4, LKV_TRY, &write); /* 32 bytes */
  api->lease_acquire(buffer, LKV_READ, 4, 6, LKV_TRY, &read);
  api->lease_acquire(buffer, LKV_WRITE, 6, 8, LKV_TRY, &ended);
  api->lease_end(ended);
  of_a_lease(write, read, ended);
  tensors(write, ended);
  api->lease_release(write);
  api->lease_release(read);
  api->lease_release(ended);
  api->buffer_release(buffer);
  return answers;
}

static PyMethodDef methods[] = {{"walk", walk, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "refusals", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_refusals(void) {
  api = lkv_import(LKV_ABI_MINOR);
  return api ? PyModule_Create(&module) : NULL;
}
