// Our KV pages as FlashInfer sees them.
#pragma once

#include <flashinfer/layout.cuh>
#include <flashinfer/page.cuh>

#include <cstdint>
#include <new>

namespace tokenspeed {

// Makes `to` anew, in place, so that its padding stays what it was. `kv` is the layer's K of page 0:
// K [num_heads][page_size][head_dim], then V of the same shape, and pages are `page_stride` bytes apart.
template <typename Element>
void make_pages(flashinfer::paged_kv_t<Element, int32_t>& to, void* kv, int64_t page_stride, uint32_t num_heads,
                uint32_t page_size, uint32_t head_dim, uint32_t num_seqs, int32_t* page_table, int32_t* indptr,
                int32_t* last_page) {
  const int64_t strides[] = {page_stride / static_cast<int64_t>(sizeof(Element)),
                             static_cast<int64_t>(page_size) * head_dim, static_cast<int64_t>(head_dim)};
  auto* const k = static_cast<Element*>(kv);
  new (&to) flashinfer::paged_kv_t<Element, int32_t>(num_heads, page_size, head_dim, num_seqs,
                                                     flashinfer::QKVLayout::kHND, k, k + num_heads * strides[1],
                                                     strides, page_table, indptr, last_page);
}

}  // namespace tokenspeed
