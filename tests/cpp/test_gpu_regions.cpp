// Regions of the GPU device, read and written, and weights that are replaced while it is sealed, over drivers for tests.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "gpu_fixture.h"
#include "temp_file.h"

using namespace tokenspeed::device;
using namespace tokenspeed::device::gpu;

namespace {

constexpr uint64_t kBytes = 100000;
const Bytes kOld = counted_bytes(kBytes, 2654435761u), kNew = counted_bytes(kBytes + 777, 40503u);

// "Ready", with weights.
struct WithWeights : Ready {
  explicit WithWeights(Backend backend) : Ready(backend), before(kOld), after(kNew) {
    device->load_weights(before.path, 0, kBytes, {1, 0});
    device->seal();
  }
  void update(uint64_t offset = 0, int threads = 2) {
    device->update_weights(after.path, offset, kBytes, {threads, 4096});
  }
  bool holds(const Bytes& bytes, uint64_t at = 0) {
    Bytes now(kBytes);
    device->read(RegionKind::Weights, 0, now);
    return std::equal(now.begin(), now.end(), bytes.begin() + static_cast<long>(at));
  }
  int32_t step() {
    input(0)[0] = 1;
    output(0)[0] = 0;
    device->wait(device->submit(graph, {1, 1, 1}, 0));
    return output(0)[0];
  }

  TempFile before, after;
};

}  // namespace

TEST(an_update_keeps_the_address_and_allocates_nothing) {
  for (const Backend backend : kBackends) {
    for (const int threads : {0, 1, 3}) {
      WithWeights r(backend);
      CHECK(r.holds(kOld));
      const Address address = r.device->address(RegionKind::Weights);
      r.update(777, threads);
      CHECK(r.holds(kNew, 777) && r.device->address(RegionKind::Weights) == address && r.step() == 13);
      const GpuCounters sealed = r.device->counters(true);
      CHECK(sealed.regions_allocated + sealed.graphs_loaded + sealed.modules_loaded + sealed.refused == 0);
      CHECK(r.driver.lines({"host_register"}).size() == r.driver.lines({"host_unregister"}).size() + 1);  // io's is left
    }
  }
}

TEST(an_update_waits_for_the_steps_in_flight) {
  for (const Backend backend : kBackends) {
    WithWeights r(backend);
    r.input(0)[0] = 1;
    const Ticket ticket = r.device->submit(r.graph, {1, 1, 1}, 0);
    CHECK(r.output(0)[0] == 0);  // nothing has run yet
    const size_t from = r.driver.log().size();
    r.update();
    CHECK(r.output(0)[0] == 13 && r.holds(kNew));
    const auto lines = r.driver.lines({"stream_synchronize", "copy_to_device"}, from);
    const auto first_copy = std::find_if(lines.begin(), lines.end(), [](const std::string& l) { return l[0] == 'c'; });
    CHECK(first_copy != lines.begin() && first_copy != lines.end());
    r.device->wait(ticket);
  }
}

TEST(an_update_that_cannot_be_read_changes_nothing) {
  for (const Backend backend : kBackends) {
    WithWeights r(backend);
    const auto refused = [&](const std::string& path, uint64_t offset, uint64_t nbytes, const char* why) {
      CHECK(contains(error_of([&] { r.device->update_weights(path, offset, nbytes, {}); }), why));
      CHECK(r.holds(kOld) && r.step() == 13);
    };
    refused("/nonexistent/w", 0, kBytes, "cannot open the weights file /nonexistent/w: No such file or directory");
    refused(r.after.path, 0, kBytes - 8, "region weights has 100000 bytes, but the update has 99992: pack the weights");
    refused(r.after.path, 778, kBytes, "the weights need 100000 bytes at offset 778 of");
    refused("/proc/self/mem", 0, kBytes, "the weights need");
    r.driver.fail("host_register", 1, 1);
    refused(r.after.path, 0, kBytes, "cannot pin");
    r.driver.fail("stream_synchronize", 1, 1);  // of reading alone
    refused(r.after.path, 0, kBytes, "cannot copy weights to the device: ");
    Ready bare(backend);
    CHECK(contains(error_of([&] { bare.device->update_weights(r.after.path, 0, 8, {}); }),
                   "region weights is not allocated: allocate it first"));
  }
}

TEST(an_update_that_ends_half_way_stops_all_steps_until_the_next) {
  for (const Backend backend : kBackends) {
    WithWeights r(backend);
    r.driver.fail("copy_to_device", 3, 1);
    const std::string error = error_of([&] { r.update(); });
    CHECK(contains(error, "cannot copy weights to the device: "));
    CHECK(contains(error, "; what region weights holds is unknown since an update of it failed: call update_weights"));
    CHECK(contains(error_of([&] { r.step(); }), "what region weights holds is unknown"));
    CHECK(contains(error_of([&] { r.device->profile(r.graph, {1, 1, 1}, 0); }), "what region weights holds is unknown"));
    CHECK(contains(error_of([&] { r.device->update_weights("/nonexistent/w", 0, kBytes, {}); }), "cannot open"));
    CHECK(contains(error_of([&] { r.step(); }), "what region weights holds is unknown"));
    r.update();
    CHECK(r.holds(kNew) && r.step() == 13);
  }
}

TEST(a_device_that_is_lost_in_an_update_says_so) {
  for (const Backend backend : kBackends) {
    WithWeights r(backend);
    r.driver.fail("copy_to_device", 2, status::kIllegalAddress);
    CHECK(throws<DeviceLostError>([&] { r.update(); }));
    CHECK(throws<DeviceLostError>([&] { r.step(); }));
    CHECK(throws<DeviceLostError>([&] { r.device->address(RegionKind::Weights); }));
  }
}

TEST(regions_are_read_and_written_behind_the_steps_in_flight) {
  for (const Backend backend : kBackends) {
    WithWeights r(backend);
    const std::vector<int32_t> in = {5, 6, 7};
    r.device->write(RegionKind::HostIo, kIn, std::as_bytes(std::span(in)));
    r.device->submit(r.graph, {3, 1, 1}, 0);
    std::vector<int32_t> between(3), out(3);
    r.device->read(RegionKind::Arena, 512, std::as_writable_bytes(std::span(between)));
    r.device->read(RegionKind::HostIo, kInputBytes, std::as_writable_bytes(std::span(out)));
    CHECK(between == std::vector<int32_t>({11, 13, 15}) && out == std::vector<int32_t>({21, 23, 25}));
    r.device->write(RegionKind::Arena, 0, std::as_bytes(std::span(in)));
    r.device->read(RegionKind::Arena, 0, std::as_writable_bytes(std::span(out)));
    CHECK(out == in);
    CHECK(*reinterpret_cast<int32_t*>(r.device->address(RegionKind::Arena)) == 5);  // the double's memory is the host's
    CHECK(r.device->address(RegionKind::HostIo) == reinterpret_cast<Address>(r.device->host_io()->data()));
    CHECK(r.device->counters(true).regions_allocated == 0);
  }
}

TEST(ranges_are_checked) {
  for (const Backend backend : kBackends) {
    WithWeights r(backend);
    Bytes bytes(8);
    const size_t from = r.driver.log().size();
    CHECK(contains(error_of([&] { r.device->read(RegionKind::Arena, 4089, bytes); }),
                   "region arena has 4096 bytes, but 8 at offset 4089 were asked for: stay within the region"));
    CHECK(contains(error_of([&] { r.device->write(RegionKind::Arena, ~uint64_t{0}, bytes); }), "region arena has 4096"));
    CHECK(contains(error_of([&] { r.device->write(RegionKind::Weights, 0, bytes); }),
                   "region weights is not written to: use update_weights"));
    CHECK(contains(error_of([&] { r.device->read(RegionKind::Kv, 0, bytes); }), "region kv is not allocated"));
    r.device->read(RegionKind::Arena, 4096, {});
    CHECK(r.driver.lines({"copy_to_device", "copy_to_host"}, from).empty());
    r.driver.fail("copy_to_host", 1, 1);
    CHECK(contains(error_of([&] { r.device->read(RegionKind::Arena, 0, bytes); }), "cannot copy bytes of region arena"));
    r.device->close();
    CHECK(contains(error_of([&] { r.device->read(RegionKind::Arena, 0, bytes); }), "the device is closed"));
  }
}

TEST(closing_gives_up_on_a_read_that_hangs) {
  for (const Backend backend : kBackends) {
    Ready r(backend, 64 << 20, 0.05);
    r.driver.hang(true);
    Bytes bytes(8);
    std::atomic<bool> ended{false};
    std::thread reader([&] {
      error_of([&] { r.device->read(RegionKind::Arena, 0, bytes); });
      ended = true;
    });
    while (r.driver.lines({"stream_synchronize"}).empty()) std::this_thread::yield();
    r.device->close();
    CHECK(!ended);
    r.driver.hang(false);
    reader.join();
  }
}

TEST_MAIN
