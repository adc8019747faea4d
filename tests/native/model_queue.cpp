// Random schedules of one thread, compared after every operation with a model that says which requests may go.
#include <memory>
#include <vector>

#include "check.hpp"
#include "lease_queue.hpp"

using namespace lkv;

namespace {

constexpr int n_rows = 24;
using Mask = std::uint64_t;

Mask bits(std::int64_t lo, std::int64_t hi) {
  Mask mask = 0;
  for (auto row = lo; row < hi && row < 64; row++) mask |= Mask{1} << row;
  return mask;
}

struct Entry {
  std::unique_ptr<Request> request;
  Request::Kind kind;
  Mask reads = 0, writes = 0;
  std::int64_t count = 0;
  std::uint32_t epoch = 0;
  bool held = false;

  bool relative() const { return kind != Request::Kind::rows; }
  bool moves() const { return kind == Request::Kind::step || kind == Request::Kind::exclusive; }
};

bool conflict(const Entry &a, const Entry &b) {
  if (a.moves() && b.moves()) return true;
  return a.epoch == b.epoch && ((a.writes & (b.reads | b.writes)) || (a.reads & b.writes));
}

struct Model {
  std::vector<Entry> entries;  // in order of arrival
  std::int64_t length = 0;
  std::uint32_t epoch = 1;

  void resolve(Entry &entry) const {
    if (!entry.relative()) return;
    entry.epoch = epoch;
    entry.reads = entry.kind == Request::Kind::exclusive ? 0 : bits(0, length);
    if (entry.kind == Request::Kind::step) entry.writes = bits(length, length + entry.count);
    if (entry.kind == Request::Kind::exclusive) entry.writes = bits(0, entry.count);
  }

  bool may_go(std::size_t i) const {
    for (std::size_t k = 0; k < entries.size(); k++) {
      const bool matters = k < i || (k > i && entries[i].relative() && entries[k].held);
      if (matters && conflict(entries[k], entries[i])) return false;
    }
    return true;
  }

  void settle() {
    for (std::size_t i = 0; i < entries.size(); i++) {
      if (entries[i].held) continue;
      resolve(entries[i]);
      entries[i].held = may_go(i);
    }
  }
};

class Schedule {
 public:
  explicit Schedule(std::uint64_t seed) : random_(seed) {}
  ~Schedule() {
    while (!model_.entries.empty()) take_out(model_.entries.size() - 1);
    queue_->release_ref();
  }

  void run(int operations) {
    for (int i = 0; i < operations; i++) {
      operate();
      compare();
    }
  }

 private:
  void operate() {
    const auto n = static_cast<int>(model_.entries.size());
    switch (n ? random_.below(8) : 0) {
      case 0: case 1: case 2: case 3:
        if (n < 10) return arrive();
        [[fallthrough]];
      case 4: case 5: return take_out(random_.below(n));
      case 6: return move_length();
      default: return downgrade();
    }
  }

  void arrive() {
    const int lo = random_.below(n_rows), hi = lo + random_.below(n_rows - lo) / 2;
    const std::uint32_t epoch = random_.one_in(6) ? std::max(model_.epoch, 2u) - 1 : model_.epoch;
    Entry entry;
    entry.epoch = epoch;
    entry.kind = static_cast<Request::Kind>(random_.one_in(2) ? 0 : random_.below(4));
    entry.count = entry.kind == Request::Kind::exclusive ? n_rows : random_.below(5);
    const bool write = random_.one_in(2);
    if (entry.kind == Request::Kind::rows) (write ? entry.writes : entry.reads) = bits(lo, hi);
    entry.request.reset(new Request(entry.kind == Request::Kind::committed   ? Request::committed()
                                    : entry.kind == Request::Kind::step      ? Request::step(entry.count)
                                    : entry.kind == Request::Kind::exclusive ? Request::exclusive(entry.count)
                                    : write                                  ? Request::writing({lo, hi}, epoch)
                                                                             : Request::reading({lo, hi}, epoch)));
    const int patience = random_.below(3);
    const lkv_status status = queue_->enqueue(*entry.request, static_cast<LeaseQueue::Patience>(patience));
    model_.resolve(entry);
    model_.entries.push_back(std::move(entry));
    Entry &last = model_.entries.back();
    last.held = model_.may_go(model_.entries.size() - 1);
    if (last.held) {
      CHECK(status == LKV_OK);
    } else if (patience == static_cast<int>(LeaseQueue::Patience::bounded)) {
      CHECK(status == LKV_E_TIMEOUT);
    } else {
      // Whatever is in the way is this thread's own.
      CHECK(status == (patience ? LKV_E_DEADLOCK : LKV_E_TIMEOUT));
      model_.entries.pop_back();
    }
  }

  void take_out(std::size_t i) {
    const std::unique_ptr<Request> request = std::move(model_.entries[i].request);
    const bool held = model_.entries[i].held;
    model_.entries.erase(model_.entries.begin() + static_cast<std::ptrdiff_t>(i));
    if (held) {
      CHECK(!queue_->withdraw(*request));
      queue_->release(*request);
    } else {
      CHECK(queue_->withdraw(*request));
    }
    model_.settle();
  }

  void move_length() {
    for (const Entry &entry : model_.entries) {
      if (!entry.held || !entry.moves()) continue;
      model_.length = random_.below(n_rows);
      queue_->publish(model_.length);
      if (entry.kind != Request::Kind::exclusive || !random_.one_in(3)) return;
      model_.epoch++;
      queue_->next_epoch();
      return;
    }
  }

  void downgrade() {
    for (Entry &entry : model_.entries) {
      if (!entry.held || entry.relative() || !entry.writes) continue;
      entry.reads = entry.writes;
      entry.writes = 0;
      queue_->downgrade(*entry.request);
      return model_.settle();
    }
  }

  void compare() const {
    for (const Entry &entry : model_.entries) {
      CHECK(entry.request->held() == entry.held);
      if (!entry.held) continue;
      const Span &reads = entry.request->read_rows(), &writes = entry.request->write_rows();
      CHECK(bits(reads.lo, reads.hi) == entry.reads && bits(writes.lo, writes.hi) == entry.writes);
      CHECK(entry.request->epoch() == entry.epoch);
    }
    CHECK(queue_->length() == model_.length && queue_->epoch() == model_.epoch);
  }

  LeaseQueue *queue_ = new LeaseQueue;
  Model model_;
  Random random_;
};

}  // namespace

int main() {
  const int schedules = scaled(40'000);
  for (int i = 0; i < schedules; i++) Schedule(static_cast<std::uint64_t>(i)).run(60);
  std::printf("ok  %d schedules agree with the model\n", schedules);
}
