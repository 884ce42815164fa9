// Measures the waiting queue and the deadlines of csrc/scheduler at a steady depth. Prints for each operation the
// median and the 90th percentile, over batches, of nanoseconds of this thread's processor time.
//
//   bench_waiting_queue [--entries N] [--tenants N]
//
// Requests lie scattered over the heap, each with other data of its own, as those of the scheduler do.
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "scheduler/deadlines.h"
#include "scheduler/waiting_queue.h"

namespace {

using namespace tokenspeed::scheduler;

constexpr size_t kBatch = 500;
constexpr int kNumBatches = 200;

double now_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

// One operation's batches.
class Samples {
 public:
  template <class Items, class Operation>
  void batch(const Items& items, Operation operation) {
    const double begin = now_ns();
    for (const auto& item : items) operation(item);
    ns_.push_back((now_ns() - begin) / static_cast<double>(items.size()));
  }
  void print(const char* name) {
    std::sort(ns_.begin(), ns_.end());
    std::printf("  %-40s %8.1f %8.1f\n", name, ns_[ns_.size() / 2], ns_[ns_.size() * 9 / 10]);
  }

 private:
  std::vector<double> ns_;
};

struct Request {
  QueueEntry entry;
  char more[1000];
};

// `num_entries` requests wait; each batch brings kBatch more, and as many are admitted, preempted, or leave.
class Traffic {
 public:
  Traffic(size_t num_entries, int32_t num_tenants, int32_t num_classes, int64_t aging_ns)
      : queue_(aging_ns), num_tenants_(num_tenants), num_classes_(num_classes) {
    for (size_t i = 0; i < num_entries + kBatch; ++i) requests_.push_back(std::make_unique<Request>());
    std::shuffle(requests_.begin(), requests_.end(), random_);
    for (size_t i = 0; i < num_entries; ++i) push(*requests_[i]);
  }

  void measure() {
    Samples pushed, looked, admitted, charged, stepped, preempted, resumed, ended, left;
    for (int batch = 0; batch < kNumBatches; ++batch) {
      const std::vector<Request*> coming = some([](const QueueEntry& e) { return !e.is_waiting(); });
      pushed.batch(coming, [&](Request* r) { push(*r); });
      std::vector<Request*> running(kBatch);
      looked.batch(running, [&](Request*) { found_ += queue_.front(now_).entry->arrival().number; });
      for (Request*& slot : running) slot = nullptr;
      admitted.batch(running, [&, at = size_t{0}](Request*) mutable {
        QueueEntry& entry = *queue_.front(now_).entry;
        queue_.admit(entry);
        queue_.charge(entry, 1 + entry.arrival().number % 1000);
        running[at++] = reinterpret_cast<Request*>(&entry);  // its first member
      });
      charged.batch(running, [&](Request* r) { queue_.charge(r->entry, 1); });
      stepped.batch(std::array{0}, [&](int) {
        for (Request* r : running) queue_.charge(r->entry, 1);
        found_ += queue_.front(now_).entry->arrival().number;
      });
      preempted.batch(running, [&](Request* r) { queue_.push_preempted(r->entry); });
      resumed.batch(running, [&](Request*) { queue_.admit(*queue_.front(now_).entry); });
      ended.batch(running, [&](Request* r) { queue_.remove(r->entry); });

      const std::vector<Request*> leaving = some([](const QueueEntry& e) { return e.is_waiting(); });
      left.batch(leaving, [&](Request* r) { queue_.remove(r->entry); });
      for (Request* request : leaving) push(*request);
    }
    pushed.print("push");
    looked.print("front, nothing changed");
    admitted.print("front, admit, charge");
    charged.print("charge a running request");
    stepped.print("charge 500 running requests, front");
    preempted.print("push_preempted");
    resumed.print("front, admit of a preempted request");
    ended.print("remove of a running request");
    left.print("remove of any waiting request");
  }
  int64_t found() const { return found_; }

 private:
  void push(Request& request) {
    now_ += 1000;
    const uint64_t dice = random_();
    const auto priority = static_cast<int32_t>(dice % static_cast<uint64_t>(num_classes_));
    const auto tenant = static_cast<int32_t>((dice >> 32) % static_cast<uint64_t>(num_tenants_));
    queue_.push(request.entry, {priority, tenant, number_++, now_});
  }
  // kBatch different requests of a kind, at random.
  template <class Which>
  std::vector<Request*> some(Which which) {
    std::vector<Request*> found;
    const size_t first = random_() % requests_.size();
    for (size_t i = 0; i < requests_.size() && found.size() < kBatch; ++i) {
      Request& request = *requests_[(first + i) % requests_.size()];
      if (which(request.entry)) found.push_back(&request);
    }
    return found;
  }

  WaitingQueue queue_;
  int32_t num_tenants_, num_classes_;
  std::mt19937_64 random_{1};
  std::vector<std::unique_ptr<Request>> requests_;
  int64_t now_ = 0, number_ = 0, found_ = 0;
};

void measure_deadlines(size_t num_entries) {
  Deadlines deadlines;
  std::mt19937_64 random(1);
  int64_t next_id = 0;
  const auto add = [&](int64_t id) { deadlines.add(id, static_cast<int64_t>(random() >> 20)); };
  for (size_t i = 0; i < num_entries; ++i) add(next_id++);
  Samples added, looked, removed;
  std::vector<int64_t> out;
  for (int batch = 0; batch < kNumBatches; ++batch) {
    std::vector<int64_t> ids(kBatch);
    for (int64_t& id : ids) id = next_id++;
    added.batch(ids, add);
    looked.batch(ids, [&](int64_t) { deadlines.expired(-1, out); });
    removed.batch(ids, [&](int64_t id) { deadlines.remove(id - static_cast<int64_t>(num_entries)); });
  }
  std::printf("deadlines, %zu\n", deadlines.size());
  added.print("add");
  looked.print("expired, none is");
  removed.print("remove");
}

}  // namespace

int main(int argc, char** argv) {
  size_t num_entries = 10000;
  int32_t num_tenants = 1000;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--entries") == 0) num_entries = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--tenants") == 0) num_tenants = static_cast<int32_t>(std::atoi(argv[i + 1]));
  }
  if (num_entries < kBatch || num_tenants < 1) {
    std::fprintf(stderr, "need: --entries of %zu or more, --tenants of 1 or more\n", kBatch);
    return 2;
  }
  struct Case {
    const char* name;
    int32_t num_tenants, num_classes;
    int64_t aging_ns;
  };
  int64_t found = 0;
  for (const Case& c : {Case{"one tenant, one class, no aging", 1, 1, 0},
                        Case{"all tenants, one class, no aging", num_tenants, 1, 0},
                        Case{"all tenants, all classes, no aging", num_tenants, kNumPriorities, 0},
                        Case{"all tenants, all classes, aging", num_tenants, kNumPriorities, 1'000'000}}) {
    Traffic traffic(num_entries, c.num_tenants, c.num_classes, c.aging_ns);
    std::printf("%s: %zu waiting, %d tenants\n", c.name, num_entries, c.num_tenants);
    std::printf("  %-40s %8s %8s\n", "ns per operation", "median", "p90");
    traffic.measure();
    found += traffic.found();
  }
  measure_deadlines(num_entries);
  return found == 0;  // what front returned was used
}
