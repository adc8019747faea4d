/* A program that embeds CPython: Python makes the cache and publishes, C threads fill and read it. Prints "ok". */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <lkv.h>
#include <pthread.h>

enum { LAYERS = 4, TOKENS = 64, WIDTH = 32 };

static const lkv_api *api;
static lkv_buffer *slots[LAYERS];

#define MUST(condition)                                                                              \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, api ? api->last_error() : "no table");   \
      if (PyGILState_Check() && PyErr_Occurred()) PyErr_Print();                                     \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)

struct task {
  pthread_t thread;
  int layer, token;
};

static float value(int layer, int token) { return (float)(layer * 1000 + token + 1); }

/* Fills one row of one layer, then reads all of its rows. Never has the GIL. */
static void *work(void *argument) {
  const struct task *task = argument;
  lkv_buffer *buffer = slots[task->layer];
  lkv_lease *lease;
  float row[WIDTH], rows[TOKENS * WIDTH];
  for (int i = 0; i < WIDTH; i++) row[i] = value(task->layer, task->token);
  MUST(!PyGILState_Check());
  MUST(api->lease_acquire(buffer, LKV_WRITE, task->token, task->token + 1, LKV_FOREVER, &lease) == LKV_OK);
  MUST(api->write_host(lease, 0, row, sizeof row) == LKV_OK);
  api->lease_release(lease);
  MUST(api->lease_acquire(buffer, LKV_READ, 0, task->token + 1, LKV_FOREVER, &lease) == LKV_OK);
  MUST(api->read_host(lease, 0, rows, sizeof row * (size_t)(task->token + 1)) == LKV_OK);
  api->lease_release(lease);
  for (int token = 0; token <= task->token; token++)
    for (int i = 0; i < WIDTH; i++) MUST(rows[token * WIDTH + i] == value(task->layer, token));
  return NULL;
}

/* One token: a thread per layer, joined while this one holds the GIL; then Python publishes. */
static void decode(PyObject *cache, int token) {
  struct task tasks[LAYERS];
  for (int layer = 0; layer < LAYERS; layer++) {
    tasks[layer].layer = layer;
    tasks[layer].token = token;
    MUST(!pthread_create(&tasks[layer].thread, NULL, work, &tasks[layer]));
  }
  for (int layer = 0; layer < LAYERS; layer++) MUST(!pthread_join(tasks[layer].thread, NULL));
  for (int layer = 0; layer < LAYERS; layer++) {
    PyObject *none = PyObject_CallMethod(cache, "note_write", "ii", layer, 1);
    MUST(none);
    Py_DECREF(none);
  }
  PyObject *length = PyObject_CallMethod(cache, "advance_by", "i", 1);
  MUST(length && PyLong_AsLong(length) == token + 1);
  Py_DECREF(length);
}

static const char script[] =
    "import lkv\n"
    "cache = lkv.LatentKvCache.with_capacity(4, 64, [(32,)], dtype='float32')\n"
    "capsules = [cache.slot_storage(layer, 0).capsule() for layer in range(4)]\n";

static const char verdict[] =
    "for layer in range(4):\n"
    "    with cache.read(layer) as view:\n"
    "        rows = view.numpy()[0]\n"
    "        assert rows.shape == (64, 32)\n"
    "        assert all(rows[i, j] == layer * 1000 + i + 1 for i in range(64) for j in range(32))\n"
    "    assert cache.slot_storage(layer, 0).version >= 64\n";

int main(void) {
  Py_InitializeEx(0);
  MUST(PyRun_SimpleString(script) == 0);
  MUST(api = lkv_import(LKV_ABI_MINOR));
  PyObject *names = PyModule_GetDict(PyImport_AddModule("__main__"));
  PyObject *cache = PyDict_GetItemString(names, "cache"), *capsules = PyDict_GetItemString(names, "capsules");
  for (int layer = 0; layer < LAYERS; layer++) {
    MUST(slots[layer] = PyCapsule_GetPointer(PyList_GetItem(capsules, layer), "lkv.buffer"));
    api->buffer_retain(slots[layer]);
  }
  for (int token = 0; token < TOKENS; token++) decode(cache, token);
  MUST(PyRun_SimpleString(verdict) == 0);

  lkv_lease *lease;
  MUST(api->lease_acquire(slots[0], LKV_READ, 0, TOKENS, LKV_TRY, &lease) == LKV_OK);
  MUST(Py_FinalizeEx() == 0);
  /* Python is gone; the memory, the lease and the library are not. */
  float last[WIDTH];
  MUST(api->read_host(lease, sizeof last * (TOKENS - 1), last, sizeof last) == LKV_OK);
  MUST(last[0] == value(0, TOKENS - 1));
  api->lease_release(lease);
  for (int layer = 0; layer < LAYERS; layer++) api->buffer_release(slots[layer]);
  puts("ok");
  return 0;
}
