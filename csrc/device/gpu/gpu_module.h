// A code object (cubin, hsaco) loaded onto the device, and its kernels.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/gpu/gpu_context.h"

namespace tokenspeed::device::gpu {

// A kernel of a loaded code object.
struct Function {
  Handle handle = nullptr;
  bool sizes_known = false;
  std::vector<size_t> sizes;     // of its parameters, where the driver tells
  bool prepared = false;
  uint32_t prepared_shared = 0;  // dynamic shared memory that it is prepared for
};

class Module {
 public:
  // Throws GraphError for bytes that are no code object of this kind of GPU, are cut short, or hold nothing for this
  // device; only machine code is accepted, so that nothing is ever compiled here.
  Module(std::shared_ptr<const Context> context, std::string name, std::span<const std::byte> bytes);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // The kernel of that name; found once. Null when there is none.
  Function* find(const std::string& symbol);
  const std::string& name() const noexcept { return name_; }

 private:
  std::shared_ptr<const Context> context_;
  std::string name_;
  Handle handle_ = nullptr;
  std::map<std::string, Function> functions_;  // addresses of elements stay
};

}  // namespace tokenspeed::device::gpu
