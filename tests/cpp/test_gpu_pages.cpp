// The host tier of a GPU over drivers for tests: which copies are made, what waits for what, and which bytes end where.
#include <algorithm>
#include <vector>

#include "gpu_fixture.h"

using namespace tokenspeed::device;
using namespace tokenspeed::device::gpu;

namespace {

using Lines = std::vector<std::string>;
using Moves = std::vector<PageMove>;

constexpr uint64_t kPageBytes = 256;
constexpr int kDevicePages = 8, kHostPages = 6;

// Doubles what page 0 of region kv holds, and adds 1.
TestGraph reads_a_page() {
  const TestArg page = pointer_arg(RegionKind::Kv, 0, kPageBytes, kAccessRead);
  TestGraph graph{{"add"},
                  {add_node("look", page, pointer_arg(RegionKind::HostIo, kInputBytes, 256, kAccessWrite), 1, 2.0f, {})}};
  graph.binaries = {"kernels"};
  return graph;
}

// A device with a host tier, whose pages hold 64 times their number: 100 + h on the host, d on the device.
struct Tier : Ready {
  explicit Tier(Backend backend, double close_seconds = 10) : Ready(backend, 64 << 20, close_seconds) {
    device->allocate(RegionKind::Kv, kDevicePages * kPageBytes);
    device->allocate_host_pages(kHostPages, kPageBytes);
    look = device->load_graph(reads_a_page().encode(), kPageBytes);
    device->seal();
    const size_t before = driver.log().size();
    for (int d = 0; d < kDevicePages; ++d) {
      fill(0, d);
      move({}, {{d, 0}});
      run();
    }
    const std::string waited = driver.lines({"stream_wait"}, before)[0];
    main = number(waited, "stream=");
    copies = number(driver.lines({"copy_to_device"}, before)[0], "stream=");
    for (int h = 0; h < kHostPages; ++h) fill(h, 100 + h);
  }

  static int number(const std::string& line, const std::string& key) {
    return std::stoi(line.substr(line.find(key) + key.size()));
  }
  int32_t* page(int h) { return reinterpret_cast<int32_t*>(device->host_pages()->data()) + 64 * h; }
  void fill(int h, int32_t value) { std::fill_n(page(h), 64, value); }
  bool holds(int h, int32_t value) {
    return std::all_of(page(h), page(h) + 64, [=](int32_t found) { return found == value; });
  }
  void move(const Moves& out, const Moves& in) { device->move_pages(out, in); }
  Ticket submit(int set = 0) { return device->submit(graph, {1, 1, 1}, set); }
  void run() { device->wait(submit()); }
  // What the device's pages hold, brought to the host one by one.
  std::vector<int32_t> on_device() {
    std::vector<int32_t> found;
    for (int d = 0; d < kDevicePages; ++d) {
      move({{d, 0}}, {});
      run();
      found.push_back(*page(0));
      CHECK(holds(0, *page(0)));
    }
    return found;
  }
  // The copies since byte `from` of the log: "out 512" or "in 256".
  Lines copies_since(size_t from) {
    Lines found;
    for (const std::string& line : driver.lines({"copy_to_host", "copy_to_device"}, from)) {
      CHECK(number(line, "stream=") == copies);
      found.push_back((line[8] == 'h' ? "out " : "in ") + std::to_string(number(line, "bytes=")));
    }
    return found;
  }

  int look = 0;              // the graph that reads a page
  int main = 0, copies = 0;  // streams
};

}  // namespace

TEST(pages_leave_and_come_back) {
  for (const Backend backend : kBackends) {
    Tier t(backend);
    t.move({{3, 2}, {6, 0}}, {{3, 4}, {1, 2}});  // page 3 leaves, another comes in its place; what left comes elsewhere
    t.run();
    CHECK(t.holds(2, 3) && t.holds(0, 6) && t.holds(1, 101) && t.holds(4, 104));
    CHECK((t.on_device() == std::vector<int32_t>{0, 3, 2, 104, 4, 5, 6, 7}));
    const GpuCounters c = t.device->counters(false);
    CHECK(c.pages_moved_out == 2 + kDevicePages && c.pages_moved_in == 2 + kDevicePages && c.regions_allocated == 4);
    CHECK(c.bytes_allocated == 4096 + kIoBytes + (kDevicePages + kHostPages) * kPageBytes);
    CHECK(t.device->counters(true).regions_allocated == 0);
  }
}

TEST(a_move_is_these_calls) {
  for (const Backend backend : kBackends) {
    Tier t(backend);
    const size_t before = t.driver.log().size();
    t.move({{3, 2}}, {{1, 0}});
    const std::string calls = t.driver.log().substr(before);
    const int event = Tier::number(calls, "event=");
    const std::string copies = std::to_string(t.copies), main = std::to_string(t.main);
    CHECK(t.copies != t.main);
    CHECK(calls == "context_current\ncopy_to_host bytes=256 stream=" + copies + "\ncopy_to_device bytes=256 stream=" +
                       copies + "\nevent_record event=" + std::to_string(event) + " stream=" + copies +
                       "\nstream_wait stream=" + main + " event=" + std::to_string(event) + "\n");
    t.run();
  }
}

TEST(adjacent_pages_are_one_copy) {
  Tier t(Backend::Cuda);
  const auto copies = [&](const Moves& out, const Moves& in) {
    const size_t before = t.driver.log().size();
    t.move(out, in);
    t.run();
    return t.copies_since(before);
  };
  CHECK((copies({{2, 1}, {4, 3}, {3, 2}}, {}) == Lines{"out 768"}));
  CHECK((copies({{2, 2}, {3, 1}}, {{6, 4}, {7, 5}, {0, 0}}) == Lines{"out 256", "out 256", "in 256", "in 512"}));
  CHECK((copies({}, {}) == Lines{}));
  CHECK(t.holds(1, 3) && t.holds(2, 2) && t.holds(3, 4));
  CHECK((t.on_device() == std::vector<int32_t>{100, 1, 2, 3, 4, 5, 104, 105}));
}

// Each stream is moved by hand, piece by piece: what cannot move has to wait for another.
TEST(pages_move_beside_the_step_before_and_ahead_of_the_next) {
  for (const Backend backend : kBackends) {
    Tier t(backend);
    t.input(0)[0] = t.input(1)[0] = 1;
    const Ticket first = t.submit(0);
    t.move({{3, 2}}, {{3, 4}});
    const Ticket second = t.submit(1);
    CHECK(t.driver.work(t.copies) && t.holds(2, 3));  // before the first step has run
    CHECK(t.driver.work(t.main) && t.output(0)[0] == 13 && t.output(1)[0] == 0);
    CHECK(!t.driver.work(t.main));  // the second step waits for the other page
    CHECK(t.driver.work(t.copies) && !t.driver.work(t.copies));
    CHECK(t.driver.work(t.main));  // having waited
    CHECK(t.driver.work(t.main) && t.output(1)[0] == 13);
    t.device->wait(first);
    t.device->wait(second);
    CHECK(t.on_device()[3] == 104);
  }
}

TEST(a_step_finds_its_pages_whoever_is_fast) {
  for (const Backend backend : kBackends) {
    for (int order = 0; order < 128; ++order) {
      Tier t(backend);
      const Ticket first = t.submit(0);
      t.move({{0, 3}}, {{0, 2}, {5, 4}});
      const Ticket second = t.device->submit(t.look, {1, 1, 1}, 1);
      for (int i = 0; i < 7; ++i) t.driver.work((order >> i) % 2 == 0 ? t.copies : t.main);
      t.device->wait(second);
      CHECK(t.output(1)[0] == 2 * 102 + 1 && t.holds(3, 0));
      t.device->wait(first);
      // And the step after that need not move anything to find its pages.
      t.device->wait(t.device->submit(t.look, {1, 1, 1}, 0));
      CHECK(t.output(0)[0] == 2 * 102 + 1);
    }
  }
}

TEST(copies_of_the_next_move_wait_for_those_before) {
  Tier t(Backend::Cuda);
  t.move({{3, 2}}, {});
  t.move({{4, 2}}, {{3, 2}});  // the host page is free again, and so is the device page
  t.move({{3, 1}}, {{4, 1}});
  t.run();
  CHECK(t.holds(2, 4) && t.holds(1, 4));
  CHECK((t.on_device() == std::vector<int32_t>{0, 1, 2, 4, 4, 5, 6, 7}));
}

TEST(wrong_moves_queue_nothing) {
  for (const Backend backend : kBackends) {
    Tier t(backend);
    const size_t before = t.driver.log().size();
    CHECK(contains(error_of([&] { t.move({{0, 0}}, {{8, 0}}); }),
                   "a page cannot move in: device page 8 of 8, host page 0 of 6, from 0"));
    CHECK(contains(error_of([&] { t.move({{0, 6}}, {}); }), "a page cannot move out: device page 0 of 8, host page 6"));
    CHECK(contains(error_of([&] { t.move(Moves(7, {0, 0}), {}); }), "at most 6 pages can move out at once"));
    CHECK(t.driver.log().size() == before && t.device->counters(false).pages_moved_out == 0);
    CHECK((t.on_device() == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
    Ready none(backend);
    CHECK(contains(error_of([&] { none.device->move_pages({}, Moves{{0, 0}}); }), "there are no host pages: call"));
    CHECK(contains(error_of([&] { none.device->host_pages(); }), "there are no host pages"));
  }
}

// Nobody waits for a move that failed half way: it is over before anybody hears of it, and pages may be given away.
TEST(moves_that_fail_are_over) {
  for (const Backend backend : kBackends) {
    for (const char* entry : {"copy_to_host", "copy_to_device", "event_record", "stream_wait"}) {
      Tier t(backend);
      t.driver.fail(entry, entry == std::string("copy_to_host") ? 2 : 1, 1);
      const std::string error = error_of([&] { t.move({{3, 2}, {5, 3}}, {{3, 4}}); });
      CHECK(contains(error, std::string("the device Double ")) && contains(error, " cannot "));
      CHECK(t.holds(2, 3) && !t.driver.work(t.copies));
      CHECK(t.device->counters(false).pages_moved_out == 0);
      t.run();  // the device works on, with moves too
      t.move({{6, 1}}, {});
      t.run();
      CHECK(t.holds(1, 6));
    }
    Tier lost(backend);
    lost.driver.fail("copy_to_host", 1, 700);
    CHECK(throws<DeviceLostError>([&] { lost.move({{3, 2}}, {}); }));
    CHECK(throws<DeviceLostError>([&] { lost.move({{3, 2}}, {}); }));
  }
}

TEST(a_tier_that_cannot_be_made_leaves_none) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, GpuOptions{2, 0, driver.path});
    CHECK(contains(error_of([&] { device.allocate_host_pages(1, 64); }), "of region kv, which is not allocated"));
    device.allocate(RegionKind::Kv, 1024);
    CHECK(contains(error_of([&] { device.allocate_host_pages(1, 1025); }), "of 1 to 1024 bytes, the size of"));
    CHECK(contains(error_of([&] { device.allocate_host_pages(INT32_MAX, 1024); }), "lower --host-kv-gib, or free"));
    for (const char* entry : {"host_register", "host_address", "stream_create", "event_create"}) {
      driver.fail(entry, 1, 1);
      CHECK(contains(error_of([&] { device.allocate_host_pages(2, 512); }), "the device Double "));
    }
    CHECK(driver.lines({"host_register"}).size() == driver.lines({"host_unregister"}).size() + 1);  // one that failed
    CHECK(device.counters(false).regions_allocated == 1);
    device.allocate_host_pages(2, 512);
    CHECK(contains(error_of([&] { device.allocate_host_pages(2, 512); }), "host pages are allocated already"));
    device.seal();
    CHECK(contains(error_of([&] { device.allocate_host_pages(2, 512); }), "cannot allocate host pages"));
    CHECK(device.counters(false).regions_allocated == 2 && device.counters(true).refused == 1);
    device.close();
    CHECK(contains(error_of([&] { device.host_pages(); }), "the device is closed"));
  }
}

TEST(large_tiers_are_zeroed_by_many_threads) {
  const Double driver(Backend::Cuda);
  GpuDevice device(Backend::Cuda, 0, GpuOptions{1, 0, driver.path});
  device.allocate(RegionKind::Kv, 1 << 20);
  constexpr int64_t kPages = 600;  // of 1 MiB, less than three whole pieces
  device.allocate_host_pages(kPages, (1 << 20) - 8);
  const auto* words = reinterpret_cast<const uint64_t*>(device.host_pages()->data());
  CHECK(std::all_of(words, words + device.host_pages()->size() / 8, [](uint64_t word) { return word == 0; }));
}

TEST(closing_waits_for_moves) {
  for (const Backend backend : kBackends) {
    Tier t(backend);
    t.move({{3, 2}}, {});
    const auto pages = t.device->host_pages();
    t.device->close();
    CHECK(reinterpret_cast<const int32_t*>(pages->data())[2 * 64] == 3);
    Tier hung(backend, 0.05);
    hung.move({{3, 2}}, {});
    hung.driver.hang(true);
    hung.device->close();  // the driver may still write there: the memory stays
    hung.driver.hang(false);
  }
}

TEST_MAIN
