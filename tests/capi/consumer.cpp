// A C++17 extension module: leases as objects, and threads that never see the GIL.
#include <Python.h>
#include <lkv.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

const lkv_api *api = nullptr;

void check(lkv_status status) {
  if (status != LKV_OK) throw std::runtime_error(std::string(api->status_name(status)) + ": " + api->last_error());
}

class Buffer {
 public:
  Buffer(std::int64_t rows, std::int64_t row_bytes, lkv_dtype dtype) {
    lkv_buffer_desc desc{};
    desc.struct_size = sizeof desc;
    desc.rows = rows;
    desc.row_bytes = row_bytes;
    desc.dtype = dtype;
    check(api->buffer_create(&desc, &it_));
  }
  explicit Buffer(lkv_buffer *borrowed) : it_(borrowed) { api->buffer_retain(it_); }
  Buffer(Buffer &&other) noexcept : it_(std::exchange(other.it_, nullptr)) {}
  Buffer(const Buffer &other) : Buffer(other.it_) {}
  Buffer &operator=(Buffer other) noexcept {
    std::swap(it_, other.it_);
    return *this;
  }
  ~Buffer() { api->buffer_release(it_); }
  lkv_buffer *get() const noexcept { return it_; }
  lkv_buffer_info info() const {
    lkv_buffer_info info{};
    info.struct_size = sizeof info;
    check(api->buffer_info(it_, &info));
    return info;
  }

 private:
  lkv_buffer *it_ = nullptr;
};

class Lease {
 public:
  Lease(const Buffer &buffer, lkv_mode mode, std::int64_t lo, std::int64_t hi, std::int64_t timeout = LKV_FOREVER) {
    check(api->lease_acquire(buffer.get(), mode, lo, hi, timeout, &it_));
  }
  Lease(Lease &&other) noexcept : it_(std::exchange(other.it_, nullptr)) {}
  Lease(const Lease &) = delete;
  Lease &operator=(const Lease &) = delete;
  // An exception that leaves a write poisons the storage, as in Python.
  ~Lease() { std::uncaught_exceptions() > entered_ ? api->lease_release_poisoned(it_) : api->lease_release(it_); }

  template <class T>
  std::pair<T *, std::size_t> rows() const {
    lkv_lease_span span{};
    span.struct_size = sizeof span;
    check(api->lease_data(it_, &span));
    return {static_cast<T *>(span.data), span.nbytes / sizeof(T)};
  }

 private:
  lkv_lease *it_ = nullptr;
  int entered_ = std::uncaught_exceptions();
};

// One appender and several readers over one storage: every reader sees whole rows only. Returns the rows seen.
std::int64_t decode(const Buffer &buffer, std::int64_t rows, int readers) {
  const std::int64_t width = buffer.info().row_bytes / 4;
  std::atomic<std::int64_t> published{0}, seen{0};
  std::atomic<bool> torn{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < readers; i++)
    threads.emplace_back([&, view = buffer] {
      for (std::int64_t last = 0; last < rows;) {
        const std::int64_t now = published.load(std::memory_order_acquire);
        if (now == last) {
          std::this_thread::yield();
          continue;
        }
        const Lease lease(view, LKV_READ, last, now);
        const auto [data, count] = lease.rows<float>();
        for (std::size_t k = 0; k < count; k++)
          if (data[k] != static_cast<float>(last + static_cast<std::int64_t>(k) / width)) torn = true;
        seen += now - last;
        last = now;
      }
    });
  for (std::int64_t row = 0; row < rows; row++) {
    const std::vector<float> token(static_cast<std::size_t>(width), static_cast<float>(row));
    {
      const Lease lease(buffer, LKV_WRITE, row, row + 1);
      std::memcpy(lease.rows<float>().first, token.data(), token.size() * sizeof(float));
    }
    published.store(row + 1, std::memory_order_release);
  }
  for (auto &thread : threads) thread.join();
  if (torn) throw std::runtime_error("a reader saw a torn row");
  return seen;
}

lkv_buffer *buffer_of(PyObject *capsule) {
  void *pointer = PyCapsule_GetPointer(capsule, "lkv.buffer");
  if (!pointer) throw std::invalid_argument("no lkv.buffer");
  return static_cast<lkv_buffer *>(pointer);
}

template <class Body>
PyObject *guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::exception &error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// decode() over Python's storage, the GIL held all the while: none of the threads needs it.
PyObject *decode_py(PyObject *, PyObject *capsule) {
  return guarded([&] {
    const Buffer buffer(buffer_of(capsule));
    return PyLong_FromLongLong(decode(buffer, buffer.info().rows, 3));
  });
}

// An exception inside a write.
PyObject *fail_py(PyObject *, PyObject *capsule) {
  return guarded([&]() -> PyObject * {
    const Buffer buffer(buffer_of(capsule));
    const Lease lease(buffer, LKV_WRITE, 0, 1);
    throw std::runtime_error("half-way");
  });
}

// A storage that C++ makes, fills and hands over.
PyObject *ramp_py(PyObject *, PyObject *count) {
  return guarded([&]() -> PyObject * {
    const long long rows = PyLong_AsLongLong(count);
    Buffer buffer(rows, 8, LKV_F32);
    {
      const Lease lease(buffer, LKV_WRITE, 0, rows, LKV_TRY);
      auto [data, n] = lease.rows<float>();
      for (std::size_t i = 0; i < n; i++) data[i] = static_cast<float>(i);
    }
    const Buffer kept = std::move(buffer);
    api->buffer_retain(kept.get());
    return PyCapsule_New(kept.get(), "lkv.buffer", [](PyObject *capsule) {
      api->buffer_release(static_cast<lkv_buffer *>(PyCapsule_GetPointer(capsule, "lkv.buffer")));
    });
  });
}

PyMethodDef methods[] = {{"decode", decode_py, METH_O, nullptr},
                         {"fail", fail_py, METH_O, nullptr},
                         {"ramp", ramp_py, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "consumer_cpp", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_consumer_cpp() {
  api = lkv_import(LKV_ABI_MINOR);
  return api ? PyModule_Create(&module) : nullptr;
}
