/* A device that a third party adds from C: host memory behind addresses that trap when the CPU loads from them. */
#include "common.h"

/* Added to every address, so that only the device's own entries can reach the memory. */
static const uintptr_t veil = (uintptr_t)1 << 60;

struct counts {
  int allocations, copies, fills, fails;
};
static struct counts counts;

static void *hide(void *real) { return (void *)((uintptr_t)real + veil); }
static void *reveal(const void *hidden) { return (void *)((uintptr_t)hidden - veil); }

static lkv_status say_why(struct counts *it) {
  if (!it->fails) return LKV_OK;
  api->set_error("the pretended device was told to fail");
  return LKV_E_DEVICE;
}

static lkv_status take(void *ctx, size_t nbytes, void **out) {
  struct counts *it = ctx;
  lkv_status status = say_why(it);
  if (status) return status;
  if (nbytes > (size_t)1 << 20) return LKV_E_NOMEM;
  void *real = aligned_alloc(256, (nbytes + 255) / 256 * 256);
  if (!real) return LKV_E_NOMEM;
  memset(real, 0, nbytes);
  it->allocations++;
  *out = hide(real);
  return LKV_OK;
}

static void give_back(void *ctx, void *ptr, size_t nbytes) {
  (void)nbytes;
  ((struct counts *)ctx)->allocations--;
  free(reveal(ptr));
}

static lkv_status copy_2d(void *ctx, lkv_copy_kind kind, void *dst, size_t dst_pitch, const void *src,
                          size_t src_pitch, size_t width, size_t height, void *stream) {
  struct counts *it = ctx;
  lkv_status status = say_why(it);
  (void)stream;
  if (status) return status;
  it->copies++;
  unsigned char *to = kind == LKV_DEVICE_TO_HOST ? dst : reveal(dst);
  const unsigned char *from = kind == LKV_HOST_TO_DEVICE ? src : reveal(src);
  for (size_t i = 0; i < height; i++) memmove(to + i * dst_pitch, from + i * src_pitch, width);
  return LKV_OK;
}

static lkv_status fill_zero(void *ctx, void *ptr, size_t nbytes, void *stream) {
  struct counts *it = ctx;
  lkv_status status = say_why(it);
  (void)stream;
  if (status) return status;
  it->fills++;
  memset(reveal(ptr), 0, nbytes);
  return LKV_OK;
}

static lkv_status sync_it(void *ctx, void *stream) {
  (void)stream;
  return ((struct counts *)ctx)->fails ? LKV_E_DEVICE : LKV_OK; /* without a word: lkv says which entry it was */
}

/* Registers it; a second time it is there already. */
static PyObject *add(PyObject *self, PyObject *args) {
  const char *name;
  lkv_device *device;
  (void)self;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  const lkv_device_vtable vtable = {.struct_size = offsetof(lkv_device_vtable, event_record),
                                    .dl_device_type = 12,
                                    .allocate = take,
                                    .free = give_back,
                                    .copy_2d = copy_2d,
                                    .fill_zero = fill_zero,
                                    .sync = sync_it};
  return none_or_raise(api->device_register(name, 0, &vtable, &counts, &device));
}

static PyObject *state(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return Py_BuildValue("iii", counts.allocations, counts.copies, counts.fills);
}

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      PyErr_Format(PyExc_AssertionError, "%d: %s (%s)", __LINE__, #condition, api->last_error()); \
      goto done;                                                                      \
    }                                                                                 \
  } while (0)

static lkv_buffer *on(lkv_device *device, int64_t rows) {
  lkv_buffer *made = NULL;
  const lkv_buffer_desc desc = {.struct_size = sizeof desc, .device = device, .rows = rows, .row_bytes = 16};
  return api->buffer_create(&desc, &made) == LKV_OK ? made : NULL;
}

/* Everything the table does with rows, on the device. */
static PyObject *round_trip(PyObject *self, PyObject *args) {
  const char *name;
  lkv_device *device;
  lkv_buffer *there = NULL, *here = NULL;
  lkv_lease *far = NULL, *near = NULL, *next = NULL;
  unsigned char sent[128], got[128];
  lkv_buffer_info info = {.struct_size = sizeof info};
  lkv_lease_span span = {.struct_size = sizeof span};
  PyObject *result = NULL;
  (void)self;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  for (size_t i = 0; i < sizeof sent; i++) sent[i] = (unsigned char)(i + 1);
  CHECK(api->device_find(name, &device) == LKV_OK);
  CHECK((there = on(device, 8)) && (here = on(NULL, 8)));
  CHECK(api->buffer_info(there, &info) == LKV_OK && info.device == device && info.dl_device_type == 12);
  CHECK(api->lease_acquire(there, LKV_WRITE, 0, 8, LKV_TRY, &far) == LKV_OK);
  CHECK(api->lease_acquire(here, LKV_WRITE, 0, 8, LKV_TRY, &near) == LKV_OK);
  CHECK(api->lease_data(far, &span) == LKV_OK && (uintptr_t)span.data > veil);
  CHECK(api->read_host(far, 0, got, sizeof got) == LKV_OK && !got[0] && !got[127]);
  CHECK(api->write_host(far, 16, sent, 64) == LKV_OK);
  CHECK(api->copy(near, 0, far, 16, 64) == LKV_OK);           /* device to host */
  CHECK(api->copy(far, 96, near, 0, 32) == LKV_OK);           /* host to device */
  CHECK(api->copy_2d(far, 0, 8, far, 16, 32, 4, 2) == LKV_OK); /* within the device */
  CHECK(api->fill_zero(far, 40, 8) == LKV_OK);
  CHECK(api->read_host(far, 0, got, sizeof got) == LKV_OK);
  CHECK(!memcmp(got, sent, 4) && !memcmp(got + 8, sent + 32, 4) && got[16] == 1 && got[39] == 24 && !got[40]);
  CHECK(got[47] == 0 && got[48] == 33 && !memcmp(got + 96, sent, 32));
  CHECK(api->device_sync(device, NULL) == LKV_OK);
  api->lease_release(far);
  far = NULL;
  CHECK(api->buffer_release_rows(there, 0, 8) == LKV_OK);
  CHECK(api->lease_acquire(there, LKV_READ, 0, 8, LKV_TRY, &far) == LKV_OK);
  CHECK(api->read_host(far, 0, got, sizeof got) == LKV_OK && !got[16] && !got[127]);
  CHECK(!on(device, 1 << 20) && strstr(api->last_error(), "LKV_E_NOMEM"));

  counts.fails = 1;
  CHECK(!on(device, 1) && strstr(api->last_error(), "told to fail"));
  CHECK(api->device_sync(device, NULL) == LKV_E_DEVICE && strstr(api->last_error(), "sync failed"));
  CHECK(api->read_host(far, 0, got, 1) == LKV_E_DEVICE);
  CHECK(api->buffer_info(there, &info) == LKV_OK && !info.poisoned); /* a read harms nothing */
  CHECK(api->lease_acquire(there, LKV_WRITE, 8, 8, LKV_TRY, &next) == LKV_OK);
  api->lease_release(far);
  far = NULL;
  api->lease_release(next);
  CHECK(api->lease_acquire(there, LKV_WRITE, 0, 8, LKV_TRY, &next) == LKV_OK);
  CHECK(api->write_host(next, 0, sent, 1) == LKV_E_DEVICE && strstr(api->last_error(), "told to fail"));
  CHECK(api->buffer_info(there, &info) == LKV_OK && info.poisoned); /* a write that failed does */
  counts.fails = 0;
  CHECK(api->lease_acquire(there, LKV_READ, 0, 8, LKV_TRY, &far) == LKV_E_TIMEOUT);
  api->lease_release(next);
  next = NULL;
  CHECK(api->lease_acquire(there, LKV_READ, 0, 8, LKV_TRY, &far) == LKV_E_POISONED);
  CHECK(api->buffer_clear_poison(there) == LKV_OK);
  CHECK(api->lease_acquire(there, LKV_READ, 0, 8, LKV_TRY, &far) == LKV_OK);
  result = Py_NewRef(Py_None);
done:
  counts.fails = 0;
  api->lease_release(far);
  api->lease_release(near);
  api->lease_release(next);
  api->buffer_release(there);
  api->buffer_release(here);
  return result;
}

static PyMethodDef methods[] = {{"add", add, METH_VARARGS, NULL},
                                {"round_trip", round_trip, METH_VARARGS, NULL},
                                {"state", state, METH_NOARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "device", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_device(void) {
  api = lkv_import(LKV_ABI_MINOR);
  return api ? PyModule_Create(&module) : NULL;
}
