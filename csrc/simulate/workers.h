// Threads that do the same thing to many items, over and over.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace tokenspeed::simulate {

class Workers {
 public:
  // `num_threads` in all, the caller's among them; 1 at least.
  explicit Workers(int32_t num_threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls work(0) to work(count - 1), each once, at the same time and in any order; returns when all are done. Throws
  // what the item with the lowest number has thrown.
  void run(int32_t count, const std::function<void(int32_t)>& work);

 private:
  void serve();
  void take_items();

  std::vector<std::exception_ptr> errors_;  // by item
  const std::function<void(int32_t)>* work_ = nullptr;
  std::atomic<int32_t> next_{0};
  int32_t count_ = 0;
  std::atomic<uint32_t> round_{0};
  std::atomic<int32_t> busy_{0};
  bool stops_ = false;  // written before round_ is
  std::vector<std::thread> threads_;
};

}  // namespace tokenspeed::simulate
