// Memory in huge pages, where the system gives them: what is walked over at random costs a miss of the address cache for
// every small page. Sizes below one huge page come from where all memory does.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace tokenspeed::check {

inline constexpr size_t kHugePage = size_t{2} << 20;

// An allocator for standard containers.
template <class T>
struct HugeAllocator {
  using value_type = T;

  HugeAllocator() noexcept = default;
  template <class U>
  HugeAllocator(const HugeAllocator<U>&) noexcept {}

  T* allocate(size_t count) {
    const size_t nbytes = count * sizeof(T);
    const bool is_huge = nbytes >= kHugePage;
    const size_t to = is_huge ? kHugePage : alignof(T) > 64 ? alignof(T) : 64;
    void* memory = std::aligned_alloc(to, (nbytes + to - 1) / to * to);
    if (memory == nullptr) throw std::bad_alloc();
    if (is_huge) madvise(memory, nbytes, MADV_HUGEPAGE);  // a wish: small pages do as well
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) noexcept { std::free(memory); }
  template <class U>
  bool operator==(const HugeAllocator<U>&) const noexcept {
    return true;
  }
};

template <class T>
using HugeVector = std::vector<T, HugeAllocator<T>>;

// Objects side by side in huge pages; those that are gone make room for new ones. Must outlive its objects. A chunk is
// given back with the pool.
template <class T>
class HugePool {
 public:
  struct Return {
    HugePool* pool;
    void operator()(T* object) const noexcept {
      std::destroy_at(object);
      pool->free_.push_back(reinterpret_cast<Memory*>(object));  // capacity was reserved when it was made
    }
  };
  using Owner = std::unique_ptr<T, Return>;

  HugePool() = default;
  HugePool(const HugePool&) = delete;
  HugePool& operator=(const HugePool&) = delete;

  template <class... Args>
  Owner make(Args&&... args) {
    if (free_.empty()) grow();
    Memory* at = free_.back();
    T* object = new (at) T(std::forward<Args>(args)...);
    free_.pop_back();
    return Owner(object, Return{this});
  }

 private:
  struct Memory {
    alignas(T) std::byte bytes[sizeof(T)];
  };

  void grow() {
    constexpr size_t kFirst = 16 << 10, kMost = kHugePage;  // bytes of a chunk
    const size_t nbytes = chunks_.empty() ? kFirst : kMost;
    const size_t count = nbytes / sizeof(Memory) > 0 ? nbytes / sizeof(Memory) : 1;
    free_.reserve(num_objects_ + count);
    chunks_.emplace_back(count);
    num_objects_ += count;
    for (size_t i = count; i > 0; --i) free_.push_back(&chunks_.back()[i - 1]);
  }

  std::vector<HugeVector<Memory>> chunks_;
  std::vector<Memory*> free_;
  size_t num_objects_ = 0;
};

}  // namespace tokenspeed::check
