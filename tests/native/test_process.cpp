// fork(), and the end of the process. The last case ends it for good: it comes last.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "api.hpp"
#include "check.hpp"
#include "lease_queue.hpp"
#include "process.hpp"

using lkv::api;

namespace {

lkv_buffer *create(std::int64_t rows = 8) {
  lkv_buffer_desc d{};
  d.struct_size = sizeof d;
  d.rows = rows;
  d.row_bytes = 8;
  lkv_buffer *buffer;
  CHECK_OK(api.buffer_create(&d, &buffer));
  return buffer;
}

template <class Body>
void in_child(Body body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);
    body();
    std::fflush(nullptr);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void a_child_may_drop_what_it_inherited_but_not_lease_it() {
  lkv_buffer *buffer = create(), *contended = create();
  lkv_lease *read, *write, *other;
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 8, LKV_TRY, &write));
  CHECK_OK(api.lease_acquire(contended, LKV_READ, 0, 8, LKV_TRY, &read));
  CHECK_OK(api.lease_acquire(contended, LKV_READ, 0, 4, LKV_TRY, &other));
  in_child([&] {
    lkv_lease *lease;
    char byte = 0;
    for (std::int64_t timeout : {LKV_TRY, LKV_FOREVER, std::int64_t{1000}}) {
      CHECK_FAILS(LKV_E_FORKED, api.lease_acquire(buffer, LKV_READ, 0, 8, timeout, &lease));
      CHECK_FAILS(LKV_E_FORKED, api.lease_acquire(contended, LKV_WRITE, 0, 8, timeout, &lease));
    }
    CHECK_FAILS(LKV_E_FORKED, api.read_host(read, 0, &byte, 1));
    CHECK_FAILS(LKV_E_FORKED, api.buffer_release_rows(buffer, 0, 1));
    api.lease_downgrade(write);
    for (lkv_lease *mine : {write, read, other}) api.lease_release(mine);
    api.buffer_release(buffer);
    api.buffer_release(contended);
    lkv_buffer *fresh = create();
    CHECK_OK(api.lease_acquire(fresh, LKV_WRITE, 0, 8, LKV_TRY, &lease));
    CHECK_FAILS(LKV_E_DEADLOCK, api.lease_acquire(fresh, LKV_READ, 0, 8, LKV_FOREVER, &read));
    api.lease_release(lease);
    api.buffer_release(fresh);
    lkv::process::end();
  });
  for (lkv_lease *mine : {write, read, other}) api.lease_release(mine);
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 8, LKV_TRY, &write));
  api.lease_release(write);
  api.buffer_release(buffer);
  api.buffer_release(contended);
}

// Other threads hold the queue's mutex and the register's at any moment.
void a_fork_in_the_middle_of_everything_never_hangs_the_child() {
  lkv_buffer *shared = create();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; t++)
    threads.emplace_back([&, t] {
      while (!stop) {
        lkv_lease *lease;
        lkv_buffer *mine = create();
        if (api.lease_acquire(shared, t == 0 ? LKV_WRITE : LKV_READ, 0, 8, LKV_FOREVER, &lease) == LKV_OK)
          api.lease_release(lease);
        api.buffer_release(mine);
      }
    });
  for (int i = scaled(60); i > 0; i--)
    in_child([&] {
      lkv_lease *lease;
      CHECK(api.lease_acquire(shared, LKV_WRITE, 0, 8, LKV_FOREVER, &lease) == LKV_E_FORKED);
      api.buffer_release(shared);
      lkv_buffer *mine = create();
      CHECK_OK(api.lease_acquire(mine, LKV_WRITE, 0, 8, LKV_FOREVER, &lease));
      api.lease_release(lease);
      api.buffer_release(mine);
    });
  stop = true;
  for (auto &thread : threads) thread.join();
  api.buffer_release(shared);
}

void the_end_wakes_every_waiter_and_releases_stay_safe() {
  lkv_buffer *buffer = create();
  lkv_lease *held;
  CHECK_OK(api.lease_acquire(buffer, LKV_WRITE, 0, 8, LKV_TRY, &held));
  std::vector<std::thread> threads;
  for (std::int64_t timeout : {LKV_FOREVER, LKV_FOREVER, std::int64_t{600'000'000'000}})
    threads.emplace_back([buffer, timeout] {
      lkv_lease *lease;
      CHECK_FAILS(LKV_E_SHUTDOWN, api.lease_acquire(buffer, LKV_READ, 0, 8, timeout, &lease));
      CHECK(!lease);
    });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  lkv::process::end();
  for (auto &thread : threads) thread.join();
  lkv_lease *lease;
  std::thread([&] {
    CHECK_FAILS(LKV_E_SHUTDOWN, api.lease_acquire(buffer, LKV_READ, 0, 8, LKV_FOREVER, &lease));
    CHECK_FAILS(LKV_E_TIMEOUT, api.lease_acquire(buffer, LKV_READ, 0, 8, LKV_TRY, &lease));
  }).join();
  api.lease_release(held);
  CHECK_OK(api.lease_acquire(buffer, LKV_READ, 0, 8, LKV_FOREVER, &lease));
  api.lease_release(lease);
  api.buffer_release(buffer);
}

}  // namespace

int main(int, char **argv) {
  RUN(a_child_may_drop_what_it_inherited_but_not_lease_it);
  // What other threads owned at a fork is lost in the child, and ThreadSanitizer's own locks too.
  if (!argv[1] || argv[1][0] != '-') RUN(a_fork_in_the_middle_of_everything_never_hangs_the_child);
  RUN(the_end_wakes_every_waiter_and_releases_stay_safe);
}
