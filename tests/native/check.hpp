// What the native tests share: CHECK, named cases, a repeatable random source, iteration counts from the environment.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "lkv.h"

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::fflush(nullptr);                                                               \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (0)

// The call fails with this status and says why.
#define CHECK_FAILS(status, call)              \
  do {                                         \
    lkv::api.set_error("");                    \
    CHECK((call) == (status));                 \
    CHECK(lkv::api.last_error()[0] != '\0');   \
  } while (0)

#define CHECK_OK(call) CHECK((call) == LKV_OK)

// LKV_TEST_PERCENT scales every iteration count; the sanitizers and valgrind run with less.
inline int scaled(int count) {
  const char *percent = std::getenv("LKV_TEST_PERCENT");
  const long long n = static_cast<long long>(count) * (percent ? std::atoi(percent) : 100) / 100;
  return n > 0 ? static_cast<int>(n) : 1;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  std::uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }
  int below(int bound) { return static_cast<int>((next() >> 11) % static_cast<std::uint64_t>(bound)); }
  bool one_in(int n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

#define RUN(test)                           \
  do {                                      \
    test();                                 \
    std::printf("ok  %s\n", #test);         \
    std::fflush(stdout);                    \
  } while (0)
