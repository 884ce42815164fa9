// paged_attention of every instruction set that this machine has: against float64, and bit for bit against
// itself and its siblings.
#include "attention_checks.h"
#include "linear.h"

using namespace tokenspeed::testing;
namespace k = tokenspeed::kernels;

namespace {

bool has_avx512() { return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"); }
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_amx() {
  static const bool usable = k::request_amx_permission();
  return usable;
}

const AttentionVariant f32_avx2{"f32 avx2", k::rope_kv_write_f32_avx2, k::paged_attention_f32_avx2, true};
const AttentionVariant bf16_avx2{"bf16 avx2", k::rope_kv_write_bf16_avx2, k::paged_attention_bf16_avx2, true};
AttentionVariant f32_avx512() {
  return {"f32 avx512", k::rope_kv_write_f32_avx512, k::paged_attention_f32_avx512, has_avx512()};
}
AttentionVariant bf16_avx512() {
  return {"bf16 avx512", k::rope_kv_write_bf16_avx512, k::paged_attention_bf16_avx512, has_avx512()};
}
AttentionVariant bf16_pairs() {
  return {"bf16 avx512bf16", k::rope_kv_write_bf16_avx512, k::paged_attention_bf16_avx512bf16, has_avx512bf16()};
}
AttentionVariant bf16_amx() {
  return {"bf16 amx", k::rope_kv_write_bf16_avx512, k::paged_attention_bf16_amx, has_amx()};
}

template <class T>
void check_all(const AttentionVariant& variant) {
  if (!variant.available) {
    std::printf("skipped %s: this machine lacks it\n", variant.name);
    return;
  }
  check_reference<T>(variant, 1.0f, kAttentionShapes);
  check_reference<T>(variant, 30.0f, kFewAttentionShapes);
  check_invariance<T>(variant, 1.0f, kAttentionShapes);
  check_invariance<T>(variant, 30.0f, kFewAttentionShapes);
  check_many_decodes<T>(variant);
}

template <class T>
void check_siblings(const AttentionVariant& a, const AttentionVariant& b) {
  if (!a.available || !b.available) return;
  for (const Shape& shape : kAttentionShapes) {
    const std::vector<Sequence> sequences{{shape, 180, 1}, {shape, 75, 2, 20.0f}};
    const KvWorld<T> one(shape, 2, 192, 3), two(shape, 2, 192, 4);
    CHECK(equal_bits(outputs(a, one, sequences, 200, 1, 5), outputs(b, two, sequences, 50, 2, 6), b.name));
  }
}

}  // namespace

TEST(f32_avx2) { check_all<float>(f32_avx2); }
TEST(f32_avx512) { check_all<float>(f32_avx512()); }
TEST(bf16_avx2) { check_all<uint16_t>(bf16_avx2); }
TEST(bf16_avx512) { check_all<uint16_t>(bf16_avx512()); }
TEST(bf16_avx512bf16) { check_all<uint16_t>(bf16_pairs()); }
TEST(bf16_amx) { check_all<uint16_t>(bf16_amx()); }
TEST(avx512_has_the_bits_of_avx2_f32) { check_siblings<float>(f32_avx2, f32_avx512()); }
TEST(avx512_has_the_bits_of_avx2_bf16) { check_siblings<uint16_t>(bf16_avx2, bf16_avx512()); }

TEST(workspace_grows_with_splits_and_stops_at_64_sequences) {
  static_assert(k::attention_workspace_bytes(2, 9, 64, 3) == 2 * 9 * 3 * 80 * sizeof(float));
  static_assert(k::attention_workspace_bytes(64, 9, 64, 3) == k::attention_workspace_bytes(500, 9, 64, 3));
  CHECK(k::attention_workspace_bytes(1, 1, 16, 1) == 128);
}

TEST_MAIN
