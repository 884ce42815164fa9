// The sampling kernel: the generator against published vectors, every output against a plain float64 sampler,
// the distribution of draws, and independence of row and batch.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "device/cpu_features.h"
#include "philox.h"
#include "sample.h"
#include "test.h"

using namespace tokenspeed::kernels;

namespace {

const tokenspeed::device::CpuFeatures kCpu = tokenspeed::device::CpuFeatures::detect();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<KernelFn> runnable() {
  std::vector<KernelFn> all;
  if (kCpu.avx2) all.push_back(sample_avx2);
  if (kCpu.avx512) all.push_back(sample_avx512);
  return all;
}

struct RowParams {
  int32_t target = -1;
  float temperature = 0.0f, top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = 0;
  uint64_t seed = 0;
  int32_t draw_position = 0, num_logprobs = -1, state_slot = -1, adjustment = -1;
};

struct Outputs {
  std::vector<int32_t> token, rank, top_ids, last_tokens;
  std::vector<float> logprob, top_logprobs;
};

// Runs the kernel as one worker over all rows.
Outputs sample(KernelFn fn, const std::vector<float>& logits, const std::vector<RowParams>& rows,
               const std::vector<float>& adjusted = {}, int64_t num_shards = 1) {
  const size_t num_rows = rows.size(), top = num_rows * kMaxTopLogprobs;
  std::vector<int32_t> target, top_k, position, num_logprobs, slot, adjustment;
  std::vector<float> temperature, top_p, min_p;
  std::vector<uint64_t> seed;
  for (const RowParams& r : rows) {
    target.push_back(r.target);
    temperature.push_back(r.temperature);
    top_p.push_back(r.top_p);
    min_p.push_back(r.min_p);
    top_k.push_back(r.top_k);
    seed.push_back(r.seed);
    position.push_back(r.draw_position);
    num_logprobs.push_back(r.num_logprobs);
    slot.push_back(r.state_slot);
    adjustment.push_back(r.adjustment);
  }
  Outputs out{std::vector<int32_t>(num_rows, -9), std::vector<int32_t>(num_rows, -9), std::vector<int32_t>(top, -9),
              std::vector<int32_t>(64, -9), std::vector<float>(num_rows), std::vector<float>(top)};
  const void* pointers[] = {logits.data(),          adjusted.data(),     target.data(),      temperature.data(),
                            top_p.data(),           min_p.data(),        top_k.data(),       seed.data(),
                            position.data(),        num_logprobs.data(), slot.data(),        adjustment.data(),
                            out.last_tokens.data(), out.token.data(),    out.logprob.data(), out.rank.data(),
                            out.top_ids.data(),     out.top_logprobs.data()};
  std::vector<ArgValue> args(21);
  for (int i = 0; i < 18; ++i) args[static_cast<size_t>(i)].pointer = const_cast<void*>(pointers[i]);
  args[18].i64 = static_cast<int64_t>(num_rows);
  args[19].i64 = static_cast<int64_t>(logits.size() / num_rows);
  args[20].i64 = num_shards;
  std::vector<std::byte> scratch(kSampleScratchBytes + 64);
  std::atomic<int64_t> next{0};
  const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  fn(Invocation{args.data(), 21, 0, 1, &next, reinterpret_cast<std::byte*>(aligned), kSampleScratchBytes});
  return out;
}

int32_t draw(KernelFn fn, const std::vector<float>& logits, const RowParams& params) {
  return sample(fn, logits, {params}).token[0];
}

std::vector<float> random_logits(size_t count, unsigned seed, float spread = 3.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> v(count);
  for (float& x : v) x = normal(engine);
  return v;
}

float cleaned(float v) { return std::isnan(v) ? -kInf : v; }

std::vector<int32_t> order_of(const std::vector<float>& logits) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return cleaned(logits[static_cast<size_t>(a)]) > cleaned(logits[static_cast<size_t>(b)]);
  });
  return order;
}

// The definition in sample.h, with sorting and float64.
std::vector<int32_t> expected_keep(const std::vector<float>& logits, const RowParams& p) {
  std::vector<int32_t> order = order_of(logits);
  if (p.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(p.top_k)));
  const float best = logits[static_cast<size_t>(order[0])];
  const auto z = [&](int32_t id) { return (cleaned(logits[static_cast<size_t>(id)]) - best) / p.temperature; };
  double total = 0, sum = 0;
  for (int32_t id : order) total += std::exp(static_cast<double>(z(id)));
  size_t count = order.size();
  for (size_t i = 0; p.top_p < 1.0f && i < order.size(); ++i) {
    sum += std::exp(static_cast<double>(z(order[i])));
    if (sum >= static_cast<double>(p.top_p) * total) {
      count = i + 1;
      break;
    }
  }
  order.resize(count);
  while (p.min_p > 0 && order.size() > 1 && z(order.back()) < std::log(p.min_p)) order.pop_back();
  return order;
}

int32_t expected_draw(const std::vector<float>& logits, const RowParams& p) {
  if (p.temperature == 0.0f) return order_of(logits)[0];
  const std::vector<int32_t> keep = expected_keep(logits, p);
  const float best = logits[static_cast<size_t>(keep[0])];
  double top = -std::numeric_limits<double>::infinity();
  int32_t winner = -1;
  for (int32_t id : keep) {
    const auto block = philox4x32({static_cast<uint32_t>(p.draw_position), static_cast<uint32_t>(id / 4), 0, 0},
                                  {static_cast<uint32_t>(p.seed), static_cast<uint32_t>(p.seed >> 32)});
    const double u = (block[static_cast<size_t>(id % 4)] + 0.5) / 4294967296.0;
    const float z = (cleaned(logits[static_cast<size_t>(id)]) - best) / p.temperature;
    const double score = static_cast<double>(z) - std::log(-std::log(u));
    if (score > top || (score == top && id < winner)) {
      top = score;
      winner = id;
    }
  }
  return winner;
}

// Pearson's statistic of `draws` draws against probabilities, in standard deviations above its mean.
double chi_square_excess(const std::vector<double>& probabilities, const std::vector<int>& counts, int draws) {
  double statistic = 0, rest = 0, rest_count = 0;
  int cells = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = probabilities[i] * draws;
    if (expected < 8) {
      rest += expected;
      rest_count += counts[i];
      continue;
    }
    statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
    ++cells;
  }
  if (rest > 1) statistic += (rest_count - rest) * (rest_count - rest) / rest;
  return (statistic - cells) / std::sqrt(2.0 * cells);
}

}  // namespace

TEST(philox_gives_the_published_vectors) {  // Random123's kat_vectors for philox4x32 with 10 rounds
  using Block = std::array<uint32_t, 4>;
  const uint32_t ones = 0xffffffffu;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == (Block{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  CHECK(philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
        (Block{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  CHECK(philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}) ==
        (Block{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(greedy_takes_the_lowest_id_of_equals) {
  for (KernelFn fn : runnable()) {
    std::vector<float> logits(1000, -1.0f);
    logits[700] = logits[701] = logits[32] = 5.0f;
    const Outputs out = sample(fn, logits, {RowParams{.num_logprobs = 4, .state_slot = 7}});
    CHECK(out.token[0] == 32 && out.rank[0] == 1 && out.last_tokens[7] == 32 && out.last_tokens[6] == -9);
    const std::vector<int32_t> want = {32, 700, 701, 0};
    CHECK(std::equal(want.begin(), want.end(), out.top_ids.begin()));
    CHECK(out.top_ids[4] == -1 && out.top_logprobs[4] == -kInf);
    const double norm = std::log(3.0 + 997.0 * std::exp(-6.0));
    CHECK(std::abs(out.logprob[0] + norm) < 1e-6);
    CHECK(std::abs(out.top_logprobs[3] - (-6.0 - norm)) < 1e-6);
  }
}

TEST(logprobs_ranks_and_likeliest_agree_with_float64) {
  for (const size_t vocab : {5, 64, 1001, 49152}) {
    const auto logits = random_logits(vocab, static_cast<unsigned>(vocab));
    const std::vector<int32_t> order = order_of(logits);
    double sum = 0;
    for (float v : logits) sum += std::exp(static_cast<double>(v) - logits[static_cast<size_t>(order[0])]);
    const auto logprob = [&](int32_t id) {
      const double best = logits[static_cast<size_t>(order[0])];
      return logits[static_cast<size_t>(id)] - best - std::log(sum);
    };
    for (KernelFn fn : runnable()) {
      for (const size_t rank : {size_t{1}, size_t{3}, vocab / 2, vocab}) {
        const int32_t target = order[rank - 1];
        const Outputs out = sample(fn, logits, {RowParams{.target = target, .num_logprobs = 20, .state_slot = 0}});
        CHECK(out.token[0] == target);
        CHECK(out.rank[0] == static_cast<int32_t>(rank));
        CHECK(out.last_tokens[0] == -9);  // a prompt row draws nothing
        CHECK(std::abs(out.logprob[0] - logprob(target)) < 2e-6 * (1 + std::abs(logprob(target))));
        for (size_t i = 0; i < std::min<size_t>(vocab, 20); ++i) {
          CHECK(out.top_ids[i] == order[i]);
          CHECK(std::abs(out.top_logprobs[i] - logprob(order[i])) < 1e-5);
        }
      }
    }
  }
}

TEST(draws_equal_the_definition) {
  std::mt19937 engine(11);
  const auto pick = [&](std::vector<float> v) { return v[engine() % v.size()]; };
  for (int trial = 0; trial < 300; ++trial) {
    const size_t vocab = trial % 3 == 0 ? 49152 : 1 + engine() % 3000;
    auto logits = random_logits(vocab, engine(), pick({0.1f, 1.0f, 3.0f, 8.0f}));
    if (trial % 2 == 0) {  // many exact ties
      for (float& v : logits) v = std::round(v * 4) / 4;
    }
    if (trial % 5 == 0) logits[engine() % vocab] = kNan;
    RowParams p;
    p.temperature = pick({0.2f, 0.7f, 1.0f, 2.5f});
    p.top_p = pick({1.0f, 0.95f, 0.5f, 0.01f, 0.0f, 0.999f});
    p.min_p = pick({0.0f, 0.0f, 0.05f, 0.5f, 1.0f});
    p.top_k = static_cast<int32_t>(pick({0, 0, 1, 2, 40, 64, 65, 700, 100000}));
    p.seed = (uint64_t{engine()} << 32) | engine();
    p.draw_position = static_cast<int32_t>(engine() % 8192);
    const int32_t want = expected_draw(logits, p);
    for (KernelFn fn : runnable()) CHECK(draw(fn, logits, p) == want);
  }
}

TEST(a_flat_row_overflows_the_candidates_and_stays_exact) {
  auto logits = random_logits(49152, 21, 0.01f);
  for (const float top_p : {0.5f, 0.9f}) {
    RowParams p{.temperature = 1.0f, .top_p = top_p, .seed = 5};
    const int32_t want = expected_draw(logits, p);
    for (KernelFn fn : runnable()) CHECK(draw(fn, logits, p) == want);
    p.top_k = 20000;
    const int32_t want_k = expected_draw(logits, p);
    for (KernelFn fn : runnable()) CHECK(draw(fn, logits, p) == want_k);
  }
  const std::vector<float> equal(49152, 1.5f);
  const RowParams p{.temperature = 1.0f, .top_p = 0.25f, .seed = 9};
  const int32_t want = expected_draw(equal, p);
  CHECK(want < 12288);
  for (KernelFn fn : runnable()) CHECK(draw(fn, equal, p) == want);
}

TEST(draws_follow_the_distribution) {
  constexpr int kDraws = 40000;
  const size_t vocab = 200;
  const auto logits = random_logits(vocab, 31, 2.0f);
  const std::vector<RowParams> cases = {
      {.temperature = 1.0f}, {.temperature = 0.6f, .top_k = 25}, {.temperature = 1.7f, .top_p = 0.8f},
      {.temperature = 1.0f, .min_p = 0.1f}};
  KernelFn fn = runnable().back();
  for (const RowParams& base : cases) {
    std::vector<double> probability(vocab, 0.0);
    const auto keep = expected_keep(logits, base);
    double sum = 0;
    for (int32_t id : keep) {
      const auto i = static_cast<size_t>(id);
      sum += probability[i] = std::exp(logits[i] / base.temperature);
    }
    for (double& p : probability) p /= sum;
    std::vector<int> by_position(vocab, 0), by_seed(vocab, 0);
    std::vector<float> batch;
    constexpr size_t kRows = 100;
    for (size_t r = 0; r < kRows; ++r) batch.insert(batch.end(), logits.begin(), logits.end());
    for (int start = 0; start < kDraws; start += kRows) {
      std::vector<RowParams> positions(kRows, base), seeds(kRows, base);
      for (size_t r = 0; r < kRows; ++r) {
        positions[r].draw_position = start + static_cast<int>(r);
        seeds[r].seed = static_cast<uint64_t>(start) + r;
      }
      for (int32_t token : sample(fn, batch, positions).token) ++by_position[static_cast<size_t>(token)];
      for (int32_t token : sample(fn, batch, seeds).token) ++by_seed[static_cast<size_t>(token)];
    }
    CHECK(chi_square_excess(probability, by_position, kDraws) < 4);
    CHECK(chi_square_excess(probability, by_seed, kDraws) < 4);
    for (size_t i = 0; i < vocab; ++i) CHECK(probability[i] > 0 || by_position[i] + by_seed[i] == 0);
  }
}

TEST(rows_do_not_depend_on_place_or_company) {
  const size_t vocab = 3001, num_rows = 12;
  const auto logits = random_logits(vocab * num_rows, 41);
  std::vector<RowParams> rows;
  for (size_t r = 0; r < num_rows; ++r) {
    rows.push_back({.temperature = 0.3f * static_cast<float>(r % 4), .top_p = r % 3 == 0 ? 0.9f : 1.0f,
                    .top_k = r % 5 == 0 ? 30 : 0, .seed = r * 77, .draw_position = static_cast<int32_t>(r),
                    .num_logprobs = static_cast<int32_t>(r)});
  }
  std::vector<Outputs> results;
  for (KernelFn fn : runnable()) {
    results.push_back(sample(fn, logits, rows));
    const Outputs& all = results.back();
    for (size_t r = 0; r < num_rows; ++r) {
      const auto row = logits.begin() + static_cast<long>(r * vocab);
      const std::vector<float> one(row, row + static_cast<long>(vocab));
      const Outputs alone = sample(fn, one, {rows[r]});
      CHECK(alone.token[0] == all.token[r] && alone.rank[0] == all.rank[r]);
      CHECK(std::memcmp(&alone.logprob[0], &all.logprob[r], 4) == 0);
      CHECK(std::memcmp(alone.top_logprobs.data(), &all.top_logprobs[r * kMaxTopLogprobs], kMaxTopLogprobs * 4) == 0);
    }
  }
  for (const Outputs& out : results) {  // both instruction sets: the same bits
    CHECK(out.token == results[0].token && out.logprob == results[0].logprob && out.top_ids == results[0].top_ids);
    CHECK(out.top_logprobs == results[0].top_logprobs);
  }
}

TEST(a_vocabulary_is_folded_in_shards_of_float32_sums) {  // also of sizes that are no multiples of 16
  for (const auto& [vocab, num_shards] : std::vector<std::pair<size_t, size_t>>{
           {1001, 7}, {1000, 8}, {37, 37}, {49152, 4}, {48, 3}, {100, 1}}) {
    const auto logits = random_logits(3 * vocab, static_cast<unsigned>(vocab + num_shards));
    const std::vector<RowParams> rows = {{.num_logprobs = 5}, {.target = 3}, {.temperature = 1.0f, .seed = 8}};
    std::vector<Outputs> results;
    for (KernelFn fn : runnable()) {
      results.push_back(sample(fn, logits, rows, {}, static_cast<int64_t>(num_shards)));
      const Outputs& out = results.back();
      const Outputs whole = sample(fn, logits, rows);
      CHECK(out.token == whole.token && out.rank == whole.rank && out.top_ids == whole.top_ids);
      for (size_t r = 0; r < rows.size(); ++r) {
        const std::vector<float> row(logits.begin() + static_cast<long>(r * vocab),
                                     logits.begin() + static_cast<long>((r + 1) * vocab));
        const float best = *std::max_element(row.begin(), row.end());
        float sum = 0;
        for (size_t shard = 0; shard < num_shards; ++shard) {
          double exact = 0;
          for (size_t i = 0; i < vocab / num_shards; ++i) {
            exact += std::exp(static_cast<double>(row[shard * (vocab / num_shards) + i] - best));
          }
          sum += static_cast<float>(exact);
        }
        const auto norm = static_cast<float>(std::log(static_cast<double>(sum)));
        const float expected = (row[static_cast<size_t>(out.token[r])] - best) - norm;
        CHECK(std::abs(out.logprob[r] - expected) < 1e-6f * (1 + std::abs(expected)));
        const Outputs alone = sample(fn, row, {rows[r]}, {}, static_cast<int64_t>(num_shards));
        CHECK(std::memcmp(&alone.logprob[0], &out.logprob[r], 4) == 0);
      }
      const float* top = out.top_logprobs.data();
      CHECK(out.token[0] == out.top_ids[0] && top[0] == out.logprob[0] && top[4] <= top[3] && top[5] == -kInf);
    }
    for (const Outputs& out : results) {  // both instruction sets: the same bits
      CHECK(out.logprob == results[0].logprob && out.top_logprobs == results[0].top_logprobs);
    }
  }
}

TEST(shards_are_added_in_float32_and_in_order) {
  constexpr size_t kVocab = 64;
  std::vector<float> first(kVocab, -16.7f), last(kVocab, -16.7f);  // e^-16.7 is lost beside 1 in float32
  first.front() = last.back() = 0.0f;
  const auto after = static_cast<float>(-std::log(static_cast<double>(static_cast<float>(1 + 63 * std::exp(-16.7)))));
  for (KernelFn fn : runnable()) {
    CHECK(sample(fn, first, {RowParams{}}, {}, kVocab).logprob[0] == 0.0f);
    CHECK(sample(fn, last, {RowParams{}}, {}, kVocab).logprob[0] == after);
    CHECK(sample(fn, first, {RowParams{}}).logprob[0] < 0.0f);
  }
}

TEST(strange_logits_give_a_token_in_range) {
  const std::vector<std::vector<float>> rows = {
      std::vector<float>(100, kNan), std::vector<float>(100, -kInf), std::vector<float>(100, kInf), {kNan}, {0.0f}};
  for (KernelFn fn : runnable()) {
    for (const float temperature : {0.0f, 1.0f, 1e-30f, kNan}) {
      for (const auto& logits : rows) {
        const RowParams p{.temperature = temperature, .top_p = 0.5f, .min_p = 0.1f, .top_k = 5, .num_logprobs = 3};
        const Outputs out = sample(fn, logits, {p});
        CHECK(out.token[0] == 0 && out.rank[0] == 1);
        CHECK(std::isnan(out.logprob[0]) == (logits != std::vector<float>{0.0f}));
      }
      std::vector<float> mixed(100, kNan);
      mixed[41] = -3.0f;
      mixed[77] = -kInf;
      const Outputs out = sample(fn, mixed, {RowParams{.temperature = temperature, .top_p = kNan}});
      CHECK(out.token[0] == 41 && out.logprob[0] == 0.0f);
    }
  }
}

TEST(a_row_with_an_adjustment_draws_from_it_and_is_scored_without) {
  const int64_t vocab = 1000;
  const auto logits = random_logits(2 * vocab, 61, 2.0f), adjusted = random_logits(2 * vocab, 62, 2.0f);
  const std::vector<float> second(adjusted.begin() + vocab, adjusted.end());
  for (KernelFn fn : runnable()) {
    for (RowParams p : {RowParams{}, RowParams{.temperature = 1.0f, .seed = 5}, RowParams{.temperature = 1.0f, .top_k = 9},
                        RowParams{.temperature = 0.9f, .top_p = 0.4f, .seed = 6}}) {
      p.num_logprobs = 3;
      RowParams own = p, scored = p;
      own.adjustment = 1;
      own.state_slot = 2;
      const Outputs out = sample(fn, logits, {p, own}, adjusted);
      CHECK(out.token[1] == draw(fn, second, p) && out.last_tokens[2] == out.token[1]);
      scored.target = out.token[1];
      const Outputs expected = sample(fn, logits, {p, scored});
      CHECK(out.token == expected.token && out.rank == expected.rank && out.logprob == expected.logprob);
      CHECK(out.top_ids == expected.top_ids && out.top_logprobs == expected.top_logprobs);
    }
  }
}

TEST(a_row_takes_tens_of_microseconds) {  // printed, not checked: machines are shared
  const auto logits = random_logits(49152, 51, 2.5f);
  const std::vector<std::pair<const char*, RowParams>> cases = {
      {"greedy", {}},
      {"greedy, 20 logprobs", {.num_logprobs = 20}},
      {"temperature 1", {.temperature = 1.0f}},
      {"top_k 50", {.temperature = 0.8f, .top_k = 50}},
      {"top_k 1000", {.temperature = 0.8f, .top_k = 1000}},
      {"top_p 0.9", {.temperature = 0.8f, .top_p = 0.9f}},
      {"top_p 0.9, temperature 3", {.temperature = 3.0f, .top_p = 0.9f}}};
  for (const auto& [name, params] : cases) {
    for (KernelFn fn : runnable()) {
      double best = 1;
      for (int i = 0; i < 20; ++i) {
        const auto start = std::chrono::steady_clock::now();
        (void)draw(fn, logits, params);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      std::printf("  %s %s: %.1f us\n", name, fn == sample_avx2 ? "avx2" : "avx512", best * 1e6);
    }
  }
}

TEST_MAIN
