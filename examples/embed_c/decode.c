/* A C runtime that embeds Python. Run: python examples/embed_c/run.py
 *
 * Python makes the cache and publishes; a C thread per layer computes straight into it, without the GIL. */
#include <Python.h>
#include <lkv.h>
#include <pthread.h>

enum { LAYERS = 3, TOKENS = 8, WIDTH = 4 };
static const lkv_api *api;
static int token;

static void must(int ok, const char *what) {
  if (ok) return;
  if (PyErr_Occurred()) PyErr_Print();
  fprintf(stderr, "%s: %s\n", what, api ? api->last_error() : "no lkv");
  exit(1);
}

/* The kernel: fills row `token` of one layer under a write lease, then attends over what is before it. */
static void *layer_thread(void *buffer) {
  lkv_lease *lease;
  lkv_lease_span span = {.struct_size = sizeof span};
  float sum = 0;
  must(!api->lease_acquire(buffer, LKV_WRITE, token, token + 1, LKV_FOREVER, &lease), "write");
  must(!api->lease_data(lease, &span), "write");
  for (int i = 0; i < WIDTH; i++) ((float *)span.data)[i] = (float)token;
  api->lease_release(lease);

  must(!api->lease_acquire(buffer, LKV_READ, 0, token + 1, LKV_FOREVER, &lease), "read");
  must(!api->lease_data(lease, &span), "read");
  for (size_t i = 0; i < span.nbytes / sizeof(float); i++) sum += ((float *)span.data)[i];
  api->lease_release(lease);
  must(sum == (float)(WIDTH * token * (token + 1) / 2), "a sum over the context");
  return NULL;
}

int main(void) {
  lkv_buffer *slots[LAYERS];
  pthread_t threads[LAYERS];
  Py_InitializeEx(0);
  must(!PyRun_SimpleString("import lkv\n"
                           "cache = lkv.LatentKvCache.with_capacity(3, 8, [(4,)], dtype='float32')\n"
                           "slots = [cache.slot_storage(layer, 0).capsule() for layer in range(3)]\n"
                           "def publish():\n"
                           "    for layer in range(3): cache.note_write(layer, 1)\n"
                           "    print(cache.advance_by(1), 'tokens')\n"),
       "the cache");
  must((api = lkv_import(LKV_ABI_MINOR)) != NULL, "the table");
  PyObject *names = PyModule_GetDict(PyImport_AddModule("__main__"));
  for (int i = 0; i < LAYERS; i++) {
    slots[i] = PyCapsule_GetPointer(PyList_GetItem(PyDict_GetItemString(names, "slots"), i), "lkv.buffer");
    must(slots[i] != NULL, "a slot");
    api->buffer_retain(slots[i]);
  }
  for (token = 0; token < TOKENS; token++) {
    for (int i = 0; i < LAYERS; i++) must(!pthread_create(&threads[i], NULL, layer_thread, slots[i]), "a thread");
    for (int i = 0; i < LAYERS; i++) pthread_join(threads[i], NULL); /* with the GIL in hand: they do not need it */
    must(!PyRun_SimpleString("publish()"), "publish");
  }
  must(!Py_FinalizeEx(), "the end of Python"); /* the memory outlives it, as long as the references do */
  for (int i = 0; i < LAYERS; i++) api->buffer_release(slots[i]);
  return 0;
}
