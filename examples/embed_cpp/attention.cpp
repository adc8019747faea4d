// A C++ extension module that attends over a cache. Run: python examples/embed_cpp/run.py
//
// A lease is an object whose destructor releases it; one lease covers the rows of all slots of all layers.
#include <Python.h>
#include <lkv.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

const lkv_api *api;

class Rows {
 public:
  Rows(lkv_buffer *buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi) {
    check(api->lease_acquire(buffer, mode, lo, hi, LKV_FOREVER, &lease_));
    span_.struct_size = sizeof span_;
    check(api->lease_data(lease_, &span_));
  }
  ~Rows() { api->lease_release(lease_); }
  Rows(const Rows &) = delete;
  Rows &operator=(const Rows &) = delete;
  const float *begin() const { return static_cast<const float *>(span_.data); }
  const float *end() const { return begin() + span_.nbytes / sizeof(float); }

 private:
  static void check(lkv_status status) {
    if (status != LKV_OK) throw std::runtime_error(std::string(api->status_name(status)) + ": " + api->last_error());
  }
  lkv_lease *lease_ = nullptr;
  lkv_lease_span span_{};
};

float dot(lkv_buffer *buffer, std::int64_t rows) {
  float sum = 0;
  for (float x : Rows(buffer, LKV_READ, 0, rows)) sum += x * x;
  return sum;
}

// scores(capsules, rows): a thread per layer; waiting and computing are done without the GIL.
PyObject *scores(PyObject *, PyObject *args) {
  PyObject *capsules;
  long long rows;
  if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &capsules, &rows)) return nullptr;
  std::vector<lkv_buffer *> buffers;
  for (Py_ssize_t i = 0; i < PyList_Size(capsules); i++) {
    void *buffer = PyCapsule_GetPointer(PyList_GetItem(capsules, i), "lkv.buffer");
    if (!buffer) return nullptr;
    buffers.push_back(static_cast<lkv_buffer *>(buffer));
  }
  std::vector<float> sums(buffers.size(), -1);
  Py_BEGIN_ALLOW_THREADS
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < buffers.size(); i++)
    threads.emplace_back([&, i] { try { sums[i] = dot(buffers[i], rows); } catch (const std::exception &) {} });
  for (auto &thread : threads) thread.join();
  Py_END_ALLOW_THREADS
  PyObject *list = PyList_New(static_cast<Py_ssize_t>(sums.size()));
  for (std::size_t i = 0; list && i < sums.size(); i++)
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyFloat_FromDouble(sums[i]));
  return list;
}

PyMethodDef methods[] = {{"scores", scores, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "attention", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_attention() { return (api = lkv_import(LKV_ABI_MINOR)) ? PyModule_Create(&module) : nullptr; }
