#include "attention_impl.h"
#include "attention_tile_walk.h"

namespace tokenspeed::kernels {

void paged_attention_bf16_amx(const Invocation& inv) noexcept { amx::paged_attention<amx::TileEngine>(inv); }

}  // namespace tokenspeed::kernels
