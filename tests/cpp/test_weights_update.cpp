// Regions of the CPU device, read and written, and weights that are replaced while it is sealed.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/cpu_device.h"
#include "device/errors.h"
#include "graph_bytes.h"
#include "temp_file.h"
#include "test.h"

using namespace tokenspeed::device;

namespace {

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const DeviceError& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  '%s' lacks '%s'\n", text.c_str(), part.c_str());
  return false;
}

bool holds(const Region& region, const Bytes& bytes, uint64_t at) {
  return std::equal(region.data(), region.data() + region.size(), bytes.begin() + static_cast<long>(at));
}

constexpr size_t kBytes = (5u << 20) + 12345;
const Bytes kOld = counted_bytes(kBytes, 2654435761u), kNew = counted_bytes(kBytes + 4096, 40503u);
constexpr uint64_t kUnlimited = ~uint64_t{0};

}  // namespace

// Mapped from the middle of a huge page, mapped and moved, or copied: in each case the addresses stay and the file too.
TEST(an_update_takes_the_place_of_any_weights) {
  for (const uint64_t offset : {uint64_t{0}, (uint64_t{3} << 20) + 128, uint64_t{777}}) {
    for (const bool settled : {false, true}) {
      for (const uint64_t other : {uint64_t{0}, uint64_t{64}, uint64_t{555}}) {
        const TempFile before(kOld), after(kNew);
        CpuDevice device(2, false);
        const uint64_t size = kBytes - offset - 100;
        device.load_weights(before.path, offset, size);
        if (settled) device.settle();
        device.seal();
        const auto region = device.region(RegionKind::Weights);
        const std::byte* address = region->data();
        device.update_weights(after.path, other, size);
        CHECK(region->data() == address && region->read_only() && holds(*region, kNew, other));
        CHECK(device.counters().bytes_settled == size && device.counters().allocations_after_seal == 0);
        device.settle();  // nothing is left to do
        CHECK(truncate(after.path.c_str(), 0) == 0 && holds(*region, kNew, other));
        CpuDevice fresh(1, false);
        fresh.load_weights(before.path, offset, size);
        CHECK(holds(*fresh.region(RegionKind::Weights), kOld, offset));
        device.update_weights(before.path, offset, size);  // and back
        CHECK(holds(*region, kOld, offset));
      }
    }
  }
}

TEST(without_memory_for_both_weights_are_read_into_their_place) {
  const TempFile before(kOld), after(kNew);
  ThreadPool pool(PoolOptions{2, false, 0});
  for (const uint64_t offset : {uint64_t{64}, uint64_t{777}}) {
    Weights weights(pool, before.path, offset, kBytes - offset);
    const auto region = weights.region();
    WeightsUpdate update(pool, *region, after.path, 99, 1 << 20);
    CHECK(!update.staged() && holds(*region, kOld, offset));
    update.apply();
    CHECK(region->read_only() && holds(*region, kNew, 99));
    CHECK(holds(*Weights(pool, before.path, offset, kBytes - offset).region(), kOld, offset));
    WeightsUpdate cut(pool, *region, after.path, 0, 0);
    CHECK(truncate(after.path.c_str(), 100) == 0);
    CHECK(contains(error_of([&] { cut.apply(); }), "the file became shorter while it was read"));
    CHECK(truncate(after.path.c_str(), 0) == 0);
    const int fd = ::open(after.path.c_str(), O_WRONLY);
    CHECK(write(fd, kNew.data(), kNew.size()) == static_cast<ssize_t>(kNew.size()));
    close(fd);
  }
}

TEST(an_update_that_was_staged_needs_its_file_no_more) {
  const TempFile before(kOld), after(kNew);
  ThreadPool pool(PoolOptions{1, false, 0});
  Weights weights(pool, before.path, 0, kBytes);
  WeightsUpdate dropped(pool, *weights.region(), after.path, 0, kUnlimited);
  WeightsUpdate update(pool, *weights.region(), after.path, 0, kUnlimited);
  CHECK(update.staged() && holds(*weights.region(), kOld, 0));
  CHECK(truncate(after.path.c_str(), 0) == 0);
  update.apply();
  CHECK(holds(*weights.region(), kNew, 0));
}

TEST(an_update_that_cannot_be_read_changes_nothing) {
  const TempFile before(kOld), after(kNew);
  CpuDevice device(1, false);
  CHECK(contains(error_of([&] { device.update_weights(after.path, 0, 8); }), "region weights is not allocated"));
  device.load_weights(before.path, 0, kBytes);
  const auto refused = [&](const std::string& path, uint64_t offset, uint64_t nbytes, const char* why) {
    CHECK(contains(error_of([&] { device.update_weights(path, offset, nbytes); }), why));
    CHECK(holds(*device.region(RegionKind::Weights), kOld, 0));
  };
  refused("/nonexistent/w", 0, kBytes, "cannot open the weights file /nonexistent/w: No such file or directory");
  refused(after.path, 0, kBytes + 1, "region weights has 5255225 bytes, but the update has 5255226: pack the weights for");
  refused(after.path, 4097, kBytes, "the weights need 5255225 bytes at offset 4097 of");
  refused(after.path, kUnlimited, kBytes, "but the file has 5259321");
  refused("/tmp", 0, kBytes, "the weights need");
  device.settle();  // which nothing has stopped
  CHECK(device.counters().bytes_settled == kBytes);
  device.close();
  CHECK(contains(error_of([&] { device.update_weights(after.path, 0, kBytes); }), "the device is closed"));
}

TEST(an_update_and_settling_do_not_meet) {
  const TempFile before(kOld), after(kNew);
  for (int round = 0; round < 8; ++round) {
    CpuDevice device(1, false);
    device.load_weights(before.path, 64, kBytes - 64);
    std::thread settling([&] { device.settle(); });
    device.update_weights(after.path, 1, kBytes - 64);
    settling.join();
    CHECK(holds(*device.region(RegionKind::Weights), kNew, 1));
    CHECK(device.counters().bytes_settled == kBytes - 64);
  }
}

namespace {

// A device whose graph gathers rows of region weights into io: a kernel of the base instruction set.
struct GatherWeights {
  static constexpr int64_t kWidth = 4;
  CpuDevice device{2, false};
  int graph;

  explicit GatherWeights(const std::string& path) {
    device.load_weights(path, 0, kBytes);
    device.allocate(RegionKind::Arena, 1 << 16);
    device.allocate(RegionKind::Io, 1 << 16);
    graph = device.load_graph(gather_graph(kWidth).encode(), 0);
    device.seal();
  }
};

}  // namespace

TEST(regions_are_read_and_written_behind_the_steps_in_flight) {
  const TempFile file(kOld);
  GatherWeights d(file.path);
  std::vector<float> rows(1000);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  d.device.write(RegionKind::Arena, 0, std::as_bytes(std::span(rows)));
  const std::vector<int32_t> wanted = {3, 1, 2};
  d.device.write(RegionKind::Io, 0, std::as_bytes(std::span(wanted)));
  for (int i = 0; i < 4; ++i) d.device.submit(d.graph, {3, 3, 3}, 0);
  std::vector<float> out(12);
  d.device.read(RegionKind::Io, 1024, std::as_writable_bytes(std::span(out)));
  for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == static_cast<float>(wanted[i / 4] * 4 + static_cast<int>(i % 4)));
  Bytes bytes(1000);
  d.device.read(RegionKind::Weights, kBytes - 1000, bytes);
  CHECK(std::equal(bytes.begin(), bytes.end(), kOld.end() - 1000));
  CHECK(d.device.address(RegionKind::Arena) ==
        reinterpret_cast<uintptr_t>(d.device.region(RegionKind::Arena)->data()));
  CHECK(d.device.counters().allocations_after_seal == 0);
}

TEST(ranges_are_checked) {
  const TempFile file(kOld);
  GatherWeights d(file.path);
  Bytes bytes(8);
  d.device.read(RegionKind::Arena, 65528, bytes);
  d.device.read(RegionKind::Arena, 65536, {});
  CHECK(contains(error_of([&] { d.device.read(RegionKind::Arena, 65529, bytes); }),
                 "region arena has 65536 bytes, but 8 at offset 65529 were asked for: stay within the region"));
  CHECK(contains(error_of([&] { d.device.read(RegionKind::Arena, kUnlimited, bytes); }), "region arena has 65536"));
  CHECK(contains(error_of([&] { d.device.write(RegionKind::Io, kUnlimited - 3, bytes); }), "region io has 65536"));
  CHECK(contains(error_of([&] { d.device.write(RegionKind::Weights, 0, bytes); }),
                 "region weights is not written to: use update_weights"));
  CHECK(contains(error_of([&] { d.device.read(RegionKind::Kv, 0, bytes); }), "region kv is not allocated"));
  CHECK(contains(error_of([&] { d.device.address(RegionKind::Kv); }), "region kv is not allocated"));
}

TEST(steps_and_updates_take_turns) {
  const TempFile before(kOld), after(kNew);
  GatherWeights d(before.path);
  std::atomic<bool> done{false};
  std::thread steps([&] {
    while (!done) d.device.wait(d.device.submit(d.graph, {1, 1, 1}, 0));
  });
  for (int i = 0; i < 4; ++i) d.device.update_weights(i % 2 == 0 ? after.path : before.path, 0, kBytes);
  done = true;
  steps.join();
  CHECK(holds(*d.device.region(RegionKind::Weights), kOld, 0));
}

TEST_MAIN
