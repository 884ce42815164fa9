// The parts of the prefix index: its hash, its table and its queue, each beside something plain.
#include <bit>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "cache/prefix_hash.h"
#include "cache/prefix_nodes.h"
#include "test.h"

using namespace tokenspeed::cache;

namespace {

std::vector<int32_t> random_page(std::mt19937& random, size_t size) {
  std::vector<int32_t> tokens(size);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
  return tokens;
}

}  // namespace

// Routers may store hashes: a change of the function is a change of what they read. The values are those of a
// transcription to another language.
TEST(hashes_are_the_same_everywhere) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 37; ++i) tokens.push_back(i * 1009);
  CHECK(hash_page(0, std::span(tokens).first(1)) == 0x358850b1c89ab7a9);
  CHECK(hash_page(7, std::span(tokens).first(16)) == 0xb45017245575ed67);
  CHECK(hash_page(~uint64_t{0}, tokens) == 0x36f694f8c2e21d50);
  CHECK(hash_bytes(3, "digest of an artifact") == 0x89d0bcd7ac49518c);
}

TEST(every_bit_of_the_input_moves_half_of_the_hash) {
  std::mt19937 random(5);
  for (const size_t size : {1, 2, 7, 16, 24, 64}) {
    std::vector<int32_t> tokens = random_page(random, size);
    for (size_t i = 0; i < size; ++i) {
      for (int bit = 0; bit < 17; ++bit) {
        int moved = 0;
        for (int round = 0; round < 32; ++round) {
          const uint64_t parent = uint64_t{random()} << 32 | random();
          tokens[(i + 1) % size] = static_cast<int32_t>(random() % 128000);
          const uint64_t before = hash_page(parent, tokens);
          tokens[i] ^= 1 << bit;
          moved += std::popcount(before ^ hash_page(parent, tokens));
        }
        CHECK(moved > 32 * 32 * 85 / 100 && moved < 32 * 32 * 115 / 100);
      }
    }
  }
  int moved = 0;
  const std::vector<int32_t> tokens = random_page(random, 16);
  for (int bit = 0; bit < 64; ++bit) {
    moved += std::popcount(hash_page(0, tokens) ^ hash_page(uint64_t{1} << bit, tokens));
  }
  CHECK(moved > 64 * 32 * 9 / 10 && moved < 64 * 32 * 11 / 10);
}

TEST(similar_pages_have_different_hashes_and_slots) {
  std::set<uint64_t> hashes;
  std::vector<int> slots(1024);
  const int num_pages = 100'000;
  for (int32_t i = 0; i < num_pages; ++i) {  // few tokens differ, by little
    const std::vector<int32_t> tokens = {0, 0, i % 50, 0, 0, 0, 0, i / 50 % 50, 0, 0, 0, 0, 0, i / 2500, 0, 0};
    const uint64_t hash = hash_page(1, tokens);
    hashes.insert(hash);
    slots[hash >> 54] += 1;
  }
  CHECK(hashes.size() == num_pages);
  for (const int count : slots) CHECK(count > 40 && count < 170);  // 97.7 on average, deviation 9.9
  std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6};
  const uint64_t hash = hash_page(1, tokens);
  std::swap(tokens[0], tokens[4]);
  CHECK(hash_page(1, tokens) != hash);
  CHECK(hash_page(0, std::vector<int32_t>{0}) != hash_page(0, std::vector<int32_t>{0, 0}));
  CHECK(hash_bytes(0, "a") != hash_bytes(0, std::string_view("a\0", 2)) && hash_bytes(0, "") != hash_bytes(1, ""));
}

TEST(the_table_holds_what_was_inserted) {
  for (const uint64_t mask : {~uint64_t{0}, uint64_t{0xff} << 56, uint64_t{3} << 32, uint64_t{0}}) {
    const int32_t num_nodes = 60;
    HashTable table(num_nodes);
    std::map<int32_t, uint64_t> held;
    std::mt19937 random(11);
    for (int i = 0; i < 20'000; ++i) {
      const auto node = static_cast<int32_t>(random() % num_nodes);
      const auto found = held.find(node);
      if (found == held.end()) {
        held[node] = (uint64_t{random()} << 32 | random()) & mask;
        table.insert(held[node], node);
      } else {
        table.erase(found->second, node);
        held.erase(found);
      }
      const auto wanted = static_cast<int32_t>(random() % num_nodes);
      const auto expected = held.find(wanted);
      const uint64_t hash = expected != held.end() ? expected->second : random() & mask;
      const int32_t got = table.find(hash, [&](int32_t some) { return some == wanted; });
      CHECK(got == (expected != held.end() ? wanted : kNoIndex));
      if (i % 100 != 0) continue;
      for (const auto& [some, its_hash] : held) {
        CHECK(table.find(its_hash, [&](int32_t other) { return other == some; }) == some);
      }
    }
  }
}

TEST(the_queue_is_in_order_of_use) {
  for (const int kind : {0, 1, 2}) {  // pushed in order of use, some before all, anywhere
    Nodes nodes(200);
    LruQueue queue;
    std::map<uint64_t, int32_t> held;
    std::mt19937 random(17);
    uint64_t newest = 1'000'000'000;
    int num_in_heap = 0;
    for (int i = 0; i < 30'000; ++i) {
      const auto node = static_cast<int32_t>(random() % nodes.size());
      PrefixNode& picked = nodes[static_cast<size_t>(node)];
      if (random() % 3 == 0 && !held.empty()) {
        const int32_t front = queue.front(nodes);
        queue.remove(nodes, front);
        CHECK(held.erase(nodes[static_cast<size_t>(front)].last_used) == 1);
      } else if (picked.place == PrefixNode::Place::None) {
        picked.last_used = ++newest;
        if (kind == 1 && random() % 2 == 0) picked.last_used = 1'000'000'000 - newest % 1'000'000'000;
        if (kind == 2) picked.last_used = uint64_t{random()} << 20 | newest % 1024;
        if (!held.try_emplace(picked.last_used, node).second) continue;
        queue.push(nodes, node);
        num_in_heap += picked.place == PrefixNode::Place::Heap;
      } else {
        queue.remove(nodes, node);
        held.erase(picked.last_used);
      }
      CHECK(queue.front(nodes) == (held.empty() ? kNoIndex : held.begin()->second));
    }
    CHECK(kind == 2 ? num_in_heap > 1000 : num_in_heap == 0);
  }
}

TEST_MAIN
