// The worker pool, memory regions and the CPU device. Also meant to run under the thread sanitizer.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "device/cpu_device.h"
#include "device/errors.h"
#include "device/thread_pool.h"
#include "device/weights.h"
#include "graph_bytes.h"
#include "test.h"

using namespace tokenspeed::device;
using tokenspeed::kernels::ArgValue;
using tokenspeed::kernels::Invocation;

namespace {
std::atomic<int64_t> num_allocations{0};
}

// Out of line, or the compiler pairs one half with its own notion of the other.
[[gnu::noinline]] void* operator new(size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}
bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  '%s' lacks '%s'\n", text.c_str(), part.c_str());
  return false;
}

// p values, i count, i step number: item i goes from step to step + 1, and says so if it was not at step.
std::atomic<int64_t> num_misordered{0};
void advance_items(const Invocation& inv) noexcept {
  auto* values = inv.ptr<int64_t>(0);
  const int64_t count = inv.i64(1), step = inv.i64(2);
  for (int64_t i; (i = inv.claim()) < count;) {
    if (values[i] != step) num_misordered.fetch_add(1);
    values[i] = step + 1;
  }
}
void nothing(const Invocation&) noexcept {}
void sleep_briefly(const Invocation& inv) noexcept {
  if (inv.claim() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}
void note_denormals(const Invocation& inv) noexcept {
  if (inv.claim() != 0) return;
  volatile float tiny = 1e-38f;
  *inv.ptr<float>(0) = tiny * 0.01f;
}

// A job of `length` tasks over the same items.
struct Chain {
  std::vector<int64_t> values;
  std::vector<std::array<ArgValue, 3>> args;
  std::vector<Task> tasks;

  Chain(size_t items, size_t length, int64_t first_step) : values(items, first_step), args(length) {
    for (size_t i = 0; i < length; ++i) {
      args[i][0].pointer = values.data();
      args[i][1].i64 = static_cast<int64_t>(items);
      args[i][2].i64 = first_step + static_cast<int64_t>(i);
      tasks.push_back({advance_items, args[i].data(), 3});
    }
  }
  Job job() const {
    Job j;
    j.tasks = tasks;
    return j;
  }
};

}  // namespace

TEST(tasks_run_in_order_and_every_item_once) {
  num_misordered = 0;
  for (const int workers : {1, 2, 3, 5}) {
    for (const size_t items : {1, 2, 7, 100}) {
      ThreadPool pool({workers, false, 128});
      Chain chain(items, 300, 0);
      pool.wait(pool.submit(chain.job()));
      for (int64_t value : chain.values) CHECK(value == 300);
    }
  }
  CHECK(num_misordered == 0);
}

TEST(jobs_queue_and_run_in_order) {
  num_misordered = 0;
  ThreadPool pool({2, false, 0});
  std::vector<Chain> chains;
  constexpr int kJobs = 200;
  Chain first(5, 20, 0);
  for (int i = 0; i < kJobs; ++i) chains.emplace_back(5, 20, i * 20);
  for (auto& chain : chains) {  // all over the items of the first: a job sees what the one before it left
    for (auto& args : chain.args) args[0].pointer = first.values.data();
  }
  Ticket last = 0;
  for (int i = 0; i < kJobs; ++i) {
    if (i >= 4) pool.wait(last - 3);
    last = pool.submit(chains[static_cast<size_t>(i)].job());
    CHECK(last == static_cast<Ticket>(i + 1));
  }
  pool.wait(last);
  CHECK(pool.done(last) && num_misordered == 0);
  for (int64_t value : first.values) CHECK(value == kJobs * 20);
}

TEST(a_full_queue_is_refused) {
  ThreadPool pool({1, false, 0});
  const Task task{sleep_briefly, nullptr, 0};
  Job job;
  job.tasks = {&task, 1};
  Ticket last = 0;
  for (uint32_t i = 0; i < ThreadPool::kMaxQueued; ++i) last = pool.submit(job);
  CHECK(contains(error_of([&] { pool.submit(job); }), "8 steps are in flight, which is the most: wait for one first"));
  pool.wait(last);
  pool.wait(pool.submit(job));
}

TEST(sleepers_wake_after_any_pause) {
  ThreadPool pool({3, false, 0});
  Chain chain(6, 5, 0);
  for (const int microseconds : {0, 10, 40, 60, 100, 300, 1000, 5000}) {
    for (int i = 0; i < 5; ++i) {
      std::fill(chain.values.begin(), chain.values.end(), 0);
      pool.wait(pool.submit(chain.job()));
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
  }
  CHECK(num_misordered == 0);
  CHECK(pool.sleeps() > 0);
}

TEST(several_may_stop_a_pool_at_once) {
  for (int round = 0; round < 20; ++round) {
    ThreadPool pool({3, false, 0});
    std::vector<std::thread> stoppers;
    for (int i = 0; i < 4; ++i) stoppers.emplace_back([&] { pool.stop(); });
    for (std::thread& stopper : stoppers) stopper.join();
  }
}

TEST(stop_finishes_what_was_submitted) {
  const Task task{sleep_briefly, nullptr, 0};
  Job job;
  job.tasks = {&task, 1};
  for (int i = 0; i < 20; ++i) {
    ThreadPool pool({2, false, 0});
    const Ticket ticket = i % 2 == 0 ? pool.submit(job) : 0;
    std::thread waiter([&] { pool.wait(ticket); });
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200 * i));
    pool.stop();
    CHECK(pool.done(ticket));
    waiter.join();
    CHECK(contains(error_of([&] { pool.submit(job); }), "the device is closed"));
  }
}

TEST(several_callers_may_submit_and_wait) {
  ThreadPool pool({2, false, 0});
  std::vector<std::thread> callers;
  std::atomic<int> done{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      Chain chain(3, 4, 0);
      for (int i = 0; i < 50; ++i) {
        std::fill(chain.values.begin(), chain.values.end(), 0);
        pool.wait(pool.submit(chain.job()));
        done += chain.values[2] == 4;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(done == 150);
}

TEST(workers_round_as_ieee_754) {
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);  // flush denormals, as some libraries set it
  {
    ThreadPool pool({1, false, 0});
    float value = -1.0f;
    ArgValue arg{};
    arg.pointer = &value;
    const Task task{note_denormals, &arg, 1};
    Job job;
    job.tasks = {&task, 1};
    pool.wait(pool.submit(job));
    __builtin_ia32_ldmxcsr(before);
    CHECK(value > 0.0f);
  }
}

TEST(numbers_of_workers_and_tasks_are_checked) {
  CHECK(contains(error_of([] { ThreadPool pool({0, false, 0}); }), "needs 1 to 1024 workers, but 0 were asked for"));
  ThreadPool pool({1, true, 0});
  CHECK(contains(error_of([&] { pool.submit(Job{}); }), "a job needs 1 to 1048560 tasks, but this one has 0"));
}

// i items, i nanoseconds: an item keeps its worker's core busy that long.
void spin_items(const Invocation& inv) noexcept {
  while (inv.claim() < inv.i64(0)) {
    const auto start = Clock::now();
    while (Clock::now() - start < std::chrono::nanoseconds(inv.i64(1))) {
    }
  }
}

TEST(a_step_costs_little_between_tasks) {  // printed, not checked: machines are shared
  constexpr int64_t kItems = 8, kNanoseconds = 1000;
  constexpr size_t kTasks = 40;
  std::array<ArgValue, 2> args{};
  args[0].i64 = kItems;
  args[1].i64 = kNanoseconds;
  const std::vector<Task> busy(kTasks, Task{spin_items, args.data(), 2}), empty(kTasks, Task{nothing, nullptr, 0});
  const auto best_of = [](ThreadPool& pool, std::span<const Task> tasks) {
    double best = 1;
    Job job;
    job.tasks = tasks;
    for (int i = 0; i < 100; ++i) {
      const auto start = Clock::now();
      pool.wait(pool.submit(job));
      best = std::min(best, seconds_since(start));
    }
    return best * 1e9;
  };
  for (const int workers : {1, 2}) {
    ThreadPool pool({workers, false, 0});
    const double submit = best_of(pool, {empty.data(), 1}), nothings = best_of(pool, empty) - submit;
    const double ideal = static_cast<double>(kItems * kNanoseconds) / workers;
    const double spins = (best_of(pool, busy) - submit) / static_cast<double>(kTasks) - ideal;
    std::printf("  %d workers: %.0f ns between tasks of 8 items of 1 us, %.0f ns without items; %.1f us to submit and wait\n",
                workers, spins, nothings / static_cast<double>(kTasks), submit * 1e-3);
  }
}

TEST(regions_are_aligned_and_zero) {
  for (const uint64_t nbytes : {1ul, 4096ul, 5ul << 20}) {
    Region region("region io", nbytes);
    CHECK(reinterpret_cast<uintptr_t>(region.data()) % Region::kHugePage == 0 && region.size() == nbytes);
    CHECK(std::all_of(region.data(), region.data() + nbytes, [](std::byte b) { return b == std::byte{0}; }));
    region.data()[nbytes - 1] = std::byte{1};
  }
}

TEST(memory_that_is_not_there_is_refused) {
  const std::string text = error_of([] { Region region("region kv", uint64_t{1} << 50); });
  CHECK(contains(text, "region kv needs 1125899906842624 bytes of memory, but "));
  CHECK(contains(text, " are available: lower max_model_len"));
  CHECK(contains(error_of([] { Region region("region kv", 0); }), "region kv needs at least 1 byte"));
  CHECK(contains(error_of([] { region_by_name("kvs"); }), "no region is called 'kvs': use one of weights, kv, arena"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they map terabytes themselves
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit tight{rlim_t{1} << 30, before.rlim_max};
  setrlimit(RLIMIT_AS, &tight);
  const std::string refused = error_of([] { Region region("region kv", uint64_t{2} << 30); });
  setrlimit(RLIMIT_AS, &before);
  CHECK(contains(refused, "region kv needs 2147483648 bytes of memory, but the system refused to map them (Cannot"));
#endif
}

namespace {

struct TempFile {
  std::string path = "/tmp/tokenspeed_test_XXXXXX";
  explicit TempFile(const std::vector<std::byte>& contents) {
    const int fd = mkstemp(path.data());
    CHECK(fd >= 0 && write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()));
    close(fd);
  }
  ~TempFile() { unlink(path.c_str()); }
};

std::vector<std::byte> counted_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
  return bytes;
}

}  // namespace

// At multiples of 64 bytes the file is mapped, elsewhere copied; 3 MiB puts the mapping in the middle of a huge page.
TEST(weights_arrive_whole_and_read_only) {
  const auto bytes = counted_bytes((9u << 20) + 12345);
  const TempFile file(bytes);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{64}, uint64_t{777}, uint64_t{4096}, (uint64_t{3} << 20) + 128}) {
    CpuDevice device(2, false);
    const uint64_t size = bytes.size() - offset - 1000;
    device.load_weights(file.path, offset, size);
    const auto region = device.region(RegionKind::Weights);
    const auto whole = [&] {
      return std::equal(region->data(), region->data() + size, bytes.begin() + static_cast<long>(offset));
    };
    const bool copied = offset % 64 != 0;
    CHECK(region->size() == size && region->read_only() && whole());
    CHECK(reinterpret_cast<uintptr_t>(region->data()) % 64 == 0);
    CHECK(device.counters().bytes_settled == (copied ? size : 0));
    CHECK(contains(error_of([&] { device.load_weights(file.path, 0, 8); }), "region weights is allocated already with"));
    CHECK(contains(error_of([&] { device.allocate(RegionKind::Weights, 8); }),
                   "is filled from a file: use load_weights"));
    device.seal();
    const std::byte* before = region->data();
    device.settle();
    CHECK(region->data() == before && whole() && device.counters().bytes_settled == size);
    CHECK(device.counters().allocations_after_seal == 0);
    device.settle();  // nothing is left to do
  }
}

TEST(settled_weights_do_not_follow_their_file) {
  const auto bytes = counted_bytes(5u << 20);
  const TempFile file(bytes);
  CpuDevice device(2, false);
  device.load_weights(file.path, 64, bytes.size() - 64);
  device.settle();
  CHECK(truncate(file.path.c_str(), 0) == 0);
  const auto region = device.region(RegionKind::Weights);
  CHECK(std::equal(region->data(), region->data() + region->size(), bytes.begin() + 64));
}

TEST(weights_are_read_while_they_settle) {
  const auto bytes = counted_bytes(16u << 20);
  const TempFile file(bytes);
  CpuDevice device(1, false);
  device.load_weights(file.path, 0, bytes.size());
  const auto region = device.region(RegionKind::Weights);
  std::atomic<bool> done{false}, wrong{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      do {
        if (std::memcmp(region->data(), bytes.data(), bytes.size()) != 0) wrong = true;
      } while (!done);
    });
  }
  // Addresses that a copy has left may be given to anybody at once, and stay theirs.
  std::vector<char*> others;
  readers.emplace_back([&] {
    do {
      void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      others.push_back(static_cast<char*>(page));
      *others.back() = 1;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    } while (!done);
  });
  device.settle();
  done = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(!wrong && device.counters().bytes_settled == bytes.size());
  for (char* page : others) CHECK(*page == 1 && munmap(page, 4096) == 0);
}

TEST(settling_a_file_that_shrank_keeps_what_is_mapped) {
  const auto bytes = counted_bytes(6u << 20);
  const TempFile file(bytes);
  CpuDevice device(1, false);
  device.load_weights(file.path, 0, bytes.size());
  CHECK(truncate(file.path.c_str(), 3 << 20) == 0);
  device.settle();
  const auto region = device.region(RegionKind::Weights);
  CHECK(device.counters().bytes_settled == 0);
  CHECK(std::equal(region->data(), region->data() + (3 << 20), bytes.begin()));
}

TEST(closing_ends_settling) {
  const TempFile file(counted_bytes(4u << 20));
  CpuDevice device(1, false);
  device.load_weights(file.path, 0, 4u << 20);
  device.close();
  device.settle();
  CHECK(device.counters().bytes_settled == 0);
}

TEST(weights_that_cannot_be_read_are_refused) {
  const TempFile file(counted_bytes(1000));
  CpuDevice device(1, false);
  CHECK(contains(error_of([&] { device.load_weights("/nonexistent/w", 0, 8); }),
                 "cannot open the weights file /nonexistent/w: No such file or directory"));
  CHECK(contains(error_of([&] { device.load_weights(file.path, 500, 501); }),
                 "the weights need 501 bytes at offset 500 of"));
  CHECK(contains(error_of([&] { device.load_weights(file.path, ~uint64_t{0}, 1); }), "but the file has 1000"));
  CHECK(contains(error_of([&] { device.load_weights("/tmp", 0, 8); }), ": Is a directory"));
  device.load_weights(file.path, 0, 1000);  // a failure leaves the region free
}

namespace {

// A device whose graph gathers rows of the arena into io: a kernel of the base instruction set.
struct GatherDevice {
  static constexpr int64_t kWidth = 4;
  CpuDevice device{2, false};
  std::byte *arena, *io;
  int graph;

  GatherDevice() {
    device.allocate(RegionKind::Arena, 1 << 16);
    device.allocate(RegionKind::Io, 1 << 16);
    arena = device.region(RegionKind::Arena)->data();
    io = device.region(RegionKind::Io)->data();
    graph = device.load_graph(gather_graph(kWidth).encode(), 0);
    for (int i = 0; i < 1000; ++i) reinterpret_cast<float*>(arena)[i] = static_cast<float>(i);
  }
  int32_t* rows(size_t io_offset) { return reinterpret_cast<int32_t*>(io + io_offset); }
  float* out(size_t io_offset) { return reinterpret_cast<float*>(io + io_offset + 1024); }
};

}  // namespace

TEST(steps_read_their_own_io_and_sizes) {
  GatherDevice d;
  for (int i = 0; i < 16; ++i) {
    d.rows(0)[i] = i;
    d.rows(8192)[i] = 100 + i;
  }
  const Ticket first = d.device.submit(d.graph, {0, 0, 3}, 0);
  const Ticket second = d.device.submit(d.graph, {0, 0, 5}, 8192);
  d.device.wait(second);
  d.device.wait(first);
  CHECK(d.out(0)[4] == 4.0f && d.out(0)[11] == 11.0f && d.out(0)[12] == 0.0f);
  CHECK(d.out(8192)[0] == 400.0f && d.out(8192)[19] == 419.0f && d.out(8192)[20] == 0.0f);
  const DeviceCounters c = d.device.counters();
  CHECK(c.steps == 2 && c.nodes == 2 && c.graphs_loaded == 1 && c.regions_allocated == 2 && c.busy_seconds > 0);
}

TEST(a_step_allocates_nothing) {
  GatherDevice d;
  d.device.wait(d.device.submit(d.graph, {0, 0, 3}, 0));
  d.device.seal();
  const int64_t before = num_allocations;
  for (int i = 0; i < 100; ++i) {
    d.device.submit(d.graph, {0, 0, 3}, 0);
    d.device.wait(d.device.submit(d.graph, {0, 0, 4}, 8192));
  }
  CHECK(num_allocations == before);
}

TEST(a_sealed_device_takes_steps_and_nothing_else) {
  GatherDevice d;
  d.device.seal();
  CHECK(contains(error_of([&] { d.device.allocate(RegionKind::Kv, 4096); }),
                 "the device is sealed, so it cannot allocate region kv: do so before seal()"));
  CHECK(contains(error_of([&] { d.device.load_graph({}, 0); }), "cannot load a launch graph"));
  CHECK(contains(error_of([&] { d.device.load_weights("/tmp/x", 0, 1); }), "cannot load weights"));
  d.device.wait(d.device.submit(d.graph, {0, 0, 1}, 0));
  const DeviceCounters c = d.device.counters();
  CHECK(c.refused_after_seal == 3 && c.allocations_after_seal == 0 && c.graphs_loaded_after_seal == 0);
}

TEST(wrong_calls_say_what_is_wrong) {
  GatherDevice d;
  CHECK(contains(error_of([&] { d.device.submit(1, {1, 1, 1}, 0); }),
                 "graph 1 is not loaded: this device has 1 graphs"));
  CHECK(contains(error_of([&] { d.device.submit(-1, {1, 1, 1}, 0); }), "graph -1 is not loaded"));
  CHECK(contains(error_of([&] { d.device.submit(d.graph, {1, -1, 1}, 0); }), "has 1 tokens, -1 sequences"));
  CHECK(contains(error_of([&] { d.device.submit(d.graph, {1, 1, 1}, 32); }), "io_offset is 32 of 65536"));
  CHECK(contains(error_of([&] { d.device.submit(d.graph, {1, 1, 1}, 65536 - 64); }),
                 "a step's inputs need 2048 bytes"));
  CHECK(contains(error_of([&] { d.device.wait(99); }), "ticket 99 was never given out: the last one is 0"));
  CHECK(contains(error_of([&] { d.device.region(RegionKind::State); }), "region state is not allocated"));
  CHECK(contains(error_of([&] { d.device.allocate(RegionKind::HostIo, 64); }), "region host_io is a GPU's: use io"));
  CHECK(contains(error_of([&] { d.device.allocate(RegionKind::Io, 64); }),
                 "region io is allocated already with 65536"));
}

TEST(profile_names_every_node) {
  GatherDevice d;
  const auto nodes = d.device.profile(d.graph, {0, 0, 2}, 0);
  CHECK(nodes.size() == 1 && nodes[0].first == "gather" && nodes[0].second > 0 && nodes[0].second < 1);
}

TEST(memory_outlives_the_device_while_it_is_viewed) {
  std::shared_ptr<Region> io;
  {
    GatherDevice d;
    io = d.device.region(RegionKind::Io);
    d.device.submit(d.graph, {0, 0, 3}, 0);
    d.device.close();
    d.device.close();
    CHECK(contains(error_of([&] { d.device.submit(d.graph, {0, 0, 3}, 0); }), "the device is closed: make a new one"));
    CHECK(contains(error_of([&] { d.device.region(RegionKind::Io); }), "the device is closed"));
    d.device.wait(1);
  }
  io->data()[0] = std::byte{7};
}

namespace {

// A device whose region kv has 6 pages, byte i of page p being p * 16 + i % 16, and 4 pages of host tier.
struct TierDevice {
  static constexpr uint64_t kPage = 300'001;  // two pieces, and no alignment

  CpuDevice device{3, false};
  std::byte* kv;

  explicit TierDevice(uint64_t page_bytes = kPage) {
    device.allocate(RegionKind::Kv, 6 * page_bytes + 5);
    device.allocate_host_pages(4, page_bytes);
    kv = device.region(RegionKind::Kv)->data();
    for (int32_t page = 0; page < 6; ++page) fill(page, page, page_bytes);
  }
  void fill(int32_t page, int32_t what, uint64_t page_bytes = kPage) {
    for (uint64_t i = 0; i < page_bytes; ++i) kv[static_cast<uint64_t>(page) * page_bytes + i] = byte_of(what, i);
  }
  bool holds(int32_t page, int32_t what, uint64_t page_bytes = kPage) const {
    for (uint64_t i = 0; i < page_bytes; ++i) {
      if (kv[static_cast<uint64_t>(page) * page_bytes + i] != byte_of(what, i)) return false;
    }
    return true;
  }
  static std::byte byte_of(int32_t what, uint64_t i) {
    return static_cast<std::byte>(static_cast<uint64_t>(what) * 16 + i % 16);
  }
  void move(std::vector<PageMove> out, std::vector<PageMove> in) { device.move_pages(out, in); }
};

}  // namespace

TEST(pages_move_to_the_host_and_back) {
  for (const uint64_t page_bytes : {TierDevice::kPage, uint64_t{1}, uint64_t{64}, uint64_t{512 << 10}}) {
    TierDevice d(page_bytes);
    d.move({{1, 3}, {2, 0}, {5, 1}}, {});
    for (const int32_t page : {1, 2, 5}) d.fill(page, 9, page_bytes);
    // Page 0 leaves and another comes in its place; what leaves to host page 2 comes back from there.
    d.move({{0, 2}}, {{0, 3}, {3, 0}, {1, 2}});
    const int32_t expected[] = {1, 0, 9, 2, 4, 9};
    for (int32_t page = 0; page < 6; ++page) CHECK(d.holds(page, expected[page], page_bytes));
    d.move({}, {{5, 1}});
    CHECK(d.holds(5, 5, page_bytes) && d.holds(4, 4, page_bytes));
    d.move({}, {});
    const DeviceCounters c = d.device.counters();
    CHECK(c.pages_moved_out == 4 && c.pages_moved_in == 4 && c.steps == 0);
    CHECK(c.regions_allocated == 2 && c.bytes_allocated == 10 * page_bytes + 5);
  }
}

TEST(pages_move_behind_the_steps_in_flight) {
  GatherDevice d;
  d.device.allocate(RegionKind::Kv, 2 << 20);
  d.device.allocate_host_pages(1, 1 << 20);
  d.device.seal();
  const std::vector<PageMove> moves = {{1, 0}};
  const Ticket ticket = d.device.submit(d.graph, {0, 0, 3}, 0);
  const int64_t before = num_allocations;
  d.device.move_pages(moves, moves);
  CHECK(num_allocations == before);
  d.rows(0)[0] = 7;  // the step before is over
  d.device.wait(d.device.submit(d.graph, {0, 0, 1}, 0));
  CHECK(ticket == 1 && d.out(0)[0] == 28.0f && d.device.counters().steps == 2);
}

TEST(wrong_moves_say_what_is_wrong_and_move_nothing) {
  TierDevice d;
  d.device.seal();
  CHECK(contains(error_of([&] { d.move({{0, 0}}, {{6, 0}}); }),
                 "a page cannot move in: device page 6 of 6, host page 0 of 4, from 0"));
  CHECK(contains(error_of([&] { d.move({{0, 0}, {1, 4}}, {}); }), "cannot move out: device page 1 of 6, host page 4"));
  CHECK(contains(error_of([&] { d.move({{-1, 0}}, {}); }), "device page -1 of 6"));
  CHECK(contains(error_of([&] { d.move({{0, -1}}, {}); }), "host page -1 of 4"));
  CHECK(contains(error_of([&] { d.move(std::vector<PageMove>(5, {0, 0}), {}); }),
                 "at most 4 pages can move out at once, each of them once, but 5 were asked for"));
  CHECK(d.device.counters().pages_moved_out == 0 && d.device.counters().pages_moved_in == 0);
  d.device.close();
  CHECK(contains(error_of([&] { d.move({{0, 0}}, {}); }), "the device is closed"));
}

TEST(a_host_tier_that_cannot_be_is_refused) {
  CpuDevice device(1, false);
  CHECK(contains(error_of([&] { device.allocate_host_pages(1, 64); }), "of region kv, which is not allocated"));
  device.allocate(RegionKind::Kv, 1024);
  CHECK(contains(error_of([&] { device.allocate_host_pages(0, 64); }),
                 "needs 1 to 2147483647 pages of 1 to 1024 bytes, the size of region kv, but 0 pages of 64 bytes"));
  CHECK(contains(error_of([&] { device.allocate_host_pages(1, 0); }), "but 1 pages of 0 bytes"));
  CHECK(contains(error_of([&] { device.allocate_host_pages(1, 1025); }), "but 1 pages of 1025 bytes"));
  CHECK(contains(error_of([&] { device.allocate_host_pages(int64_t{1} << 31, 1); }), "but 2147483648 pages"));
  device.close();
  CpuDevice large(1, false);
  large.allocate(RegionKind::Kv, 1 << 20);
  const std::string error = error_of([&] { large.allocate_host_pages(INT32_MAX, 1 << 20); });
  CHECK(contains(error, "the host tier needs 2147483647 pages of 1048576 bytes, but "));
  CHECK(contains(error, " pages: lower --host-kv-gib, or free memory"));
  CHECK(contains(error_of([&] { large.move_pages({}, std::vector<PageMove>{{0, 0}}); }), "there are no host pages"));
  large.allocate_host_pages(1, 1 << 20);
  CHECK(contains(error_of([&] { large.allocate_host_pages(1, 1 << 20); }), "host pages are allocated already"));
  CHECK(large.counters().regions_allocated == 2);
  large.seal();
  CHECK(contains(error_of([&] { large.allocate_host_pages(1, 64); }), "sealed, so it cannot allocate host pages"));
}

TEST(moves_of_adjacent_pages_are_one_run) {
  const auto runs_of = [](const std::vector<PageMove>& moves) {
    std::vector<PageRun> runs;
    merge_moves(moves, runs);
    std::string text;
    for (const PageRun& r : runs) {
      text += std::to_string(r.device_page) + ":" + std::to_string(r.host_page) + "x";
      text += std::to_string(r.num_pages) + " ";
    }
    return text;
  };
  CHECK(runs_of({}) == "");
  CHECK(runs_of({{4, 9}}) == "4:9x1 ");
  CHECK(runs_of({{6, 11}, {4, 9}, {5, 10}}) == "4:9x3 ");
  CHECK(runs_of({{4, 1}, {6, 9}, {5, 8}}) == "4:1x1 5:8x2 ");
  CHECK(runs_of({{4, 9}, {6, 10}, {7, 11}}) == "4:9x1 6:10x2 ");
  CHECK(runs_of({{0, 2}, {1, 1}, {2, 0}}) == "0:2x1 1:1x1 2:0x1 ");
  std::vector<PageMove> many;
  for (int32_t i = 0; i < 100; ++i) many.push_back({37 * i % 100, i});
  std::vector<PageRun> runs;
  runs.reserve(many.size());
  const int64_t before = num_allocations;
  merge_moves(many, runs);
  CHECK(num_allocations == before && runs.size() == 100);
}

TEST_MAIN
