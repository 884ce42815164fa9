#include "simulate/workers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tokenspeed::simulate {

Workers::Workers(int32_t num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("simulator: need 1 to 1024 threads, have " + std::to_string(num_threads));
  }
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  for (int32_t i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
}

Workers::~Workers() {
  stops_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::run(int32_t count, const std::function<void(int32_t)>& work) {
  errors_.assign(static_cast<size_t>(count), nullptr);
  work_ = &work;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int32_t>(threads_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  take_items();
  for (int32_t left = busy_.load(std::memory_order_acquire); left != 0; left = busy_.load(std::memory_order_acquire)) {
    busy_.wait(left, std::memory_order_acquire);
  }
  const auto failed = std::find_if(errors_.begin(), errors_.end(), [](const auto& e) { return e != nullptr; });
  if (failed != errors_.end()) std::rethrow_exception(*failed);
}

void Workers::take_items() {
  for (int32_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count_;
       i = next_.fetch_add(1, std::memory_order_relaxed)) {
    try {
      (*work_)(i);
    } catch (...) {
      errors_[static_cast<size_t>(i)] = std::current_exception();
    }
  }
}

void Workers::serve() {
  for (uint32_t seen = 0;; ++seen) {
    round_.wait(seen, std::memory_order_acquire);
    if (stops_) return;
    take_items();
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

}  // namespace tokenspeed::simulate
