// Request slots: indexes into the per-request device state (the last-token table). One per running request.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "check/check.h"

namespace tokenspeed::cache {

class SlotPool;

// Owns one slot; gives it back when it dies.
class SlotLease {
 public:
  SlotLease(SlotLease&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), slot_(std::exchange(other.slot_, -1)) {}
  SlotLease& operator=(SlotLease&& other) noexcept {
    if (this != &other) {
      release();
      pool_ = std::exchange(other.pool_, nullptr);
      slot_ = std::exchange(other.slot_, -1);
    }
    return *this;
  }
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
  ~SlotLease() { release(); }

  int32_t slot() const noexcept {
    TS_ASSERT(pool_ != nullptr, "a slot lease was used after it moved away");
    return slot_;
  }

 private:
  friend class SlotPool;
  SlotLease(SlotPool* pool, int32_t slot) noexcept : pool_(pool), slot_(slot) {}
  inline void release() noexcept;

  SlotPool* pool_;  // null once moved from
  int32_t slot_;
};

// Slots 0 .. num_slots-1, last in, first out. Must outlive its leases. Not thread-safe.
class SlotPool {
 public:
  explicit SlotPool(int32_t num_slots) : num_slots_(num_slots) {
    TS_ASSERT(num_slots >= 0, "a pool cannot have a negative number of slots");
    free_.reserve(static_cast<size_t>(num_slots));
    for (int32_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
  }
  ~SlotPool() { TS_ASSERT(num_free() == num_slots_, "a slot pool must outlive its leases"); }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  [[nodiscard]] std::optional<SlotLease> acquire() noexcept {
    if (free_.empty()) return std::nullopt;
    const int32_t slot = free_.back();
    free_.pop_back();
    return SlotLease{this, slot};
  }

  int32_t num_slots() const noexcept { return num_slots_; }
  int32_t num_free() const noexcept { return static_cast<int32_t>(free_.size()); }

 private:
  friend class SlotLease;
  void give_back(int32_t slot) noexcept {
    TS_ASSERT(num_free() < num_slots_, "more slots came back than were leased");
    free_.push_back(slot);  // capacity was reserved: does not allocate
  }

  int32_t num_slots_;
  std::vector<int32_t> free_;
};

inline void SlotLease::release() noexcept {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(slot_);
}

}  // namespace tokenspeed::cache
