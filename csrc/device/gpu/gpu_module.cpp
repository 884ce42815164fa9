#include "device/gpu/gpu_module.h"

#include <elf.h>

#include <cstring>

namespace tokenspeed::device::gpu {
namespace {

template <typename Record>
Record record_at(std::span<const std::byte> bytes, uint64_t offset) {
  Record record;
  std::memcpy(&record, bytes.data() + offset, sizeof(record));
  return record;
}

bool within(uint64_t offset, uint64_t length, uint64_t size) { return offset <= size && length <= size - offset; }

// Drivers are given an address and no length, so they would read past the end of a file that was cut short.
// Returns what is wrong with the bytes, or null.
const char* fault_of(std::span<const std::byte> bytes, uint16_t machine) {
  if (bytes.size() < sizeof(Elf64_Ehdr)) return "is too short for an ELF file";
  const auto header = record_at<Elf64_Ehdr>(bytes, 0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return "is no ELF file";
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return "is no 64-bit ELF file";
  if (header.e_machine != machine) return "holds code for another kind of processor";
  if (header.e_phnum > 0 && (header.e_phentsize != sizeof(Elf64_Phdr) ||
                             !within(header.e_phoff, uint64_t{header.e_phnum} * sizeof(Elf64_Phdr), bytes.size()))) {
    return "is cut short";
  }
  if (header.e_shnum > 0 && (header.e_shentsize != sizeof(Elf64_Shdr) ||
                             !within(header.e_shoff, uint64_t{header.e_shnum} * sizeof(Elf64_Shdr), bytes.size()))) {
    return "is cut short";
  }
  for (uint64_t i = 0; i < header.e_phnum; ++i) {
    const auto segment = record_at<Elf64_Phdr>(bytes, header.e_phoff + i * sizeof(Elf64_Phdr));
    if (!within(segment.p_offset, segment.p_filesz, bytes.size())) return "is cut short";
  }
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto section = record_at<Elf64_Shdr>(bytes, header.e_shoff + i * sizeof(Elf64_Shdr));
    const bool holds_bytes = section.sh_type != SHT_NOBITS && section.sh_type != SHT_NULL;
    if (holds_bytes && !within(section.sh_offset, section.sh_size, bytes.size())) return "is cut short";
  }
  return nullptr;
}

}  // namespace

Module::Module(std::shared_ptr<const Context> context, std::string name, std::span<const std::byte> bytes)
    : context_(std::move(context)), name_(std::move(name)) {
  const std::string what = "the code object " + name_;
  if (const char* fault = fault_of(bytes, context_->driver().elf_machine())) {
    throw GraphError(what + " is damaged: need " + std::string(backend_name(context_->driver().backend())) +
                     " machine code for " + context_->info().arch + ", but it " + fault +
                     ": copy or build the artifact again");
  }
  context_->bind();
  const Status code = context_->call().module_load(&handle_, bytes.data());
  switch (code) {
    case status::kNoBinaryForGpu:
      throw GraphError(what + " was built for another GPU: need code for " + context_->info().arch + " (" +
                       context_->info().name + "): build the artifact for this GPU's target");
    case status::kInvalidImage:
    case status::kInvalidSource:
      throw GraphError(what + " is damaged: the driver does not accept it (" + context_->driver().describe(code) +
                       "): copy or build the artifact again");
    default:
      context_->check(code, [&] { return "load " + what; });
  }
}

Module::~Module() {
  context_->bind_quietly();
  context_->call().module_unload(handle_);
}

Function* Module::find(const std::string& symbol) {
  if (const auto found = functions_.find(symbol); found != functions_.end()) return &found->second;
  Function function;
  const Status code = context_->call().module_function(&function.handle, handle_, symbol.c_str());
  if (code == status::kNotFound) return nullptr;
  context_->check(code, [&] { return "find kernel " + symbol + " in " + name_; });
  context_->check(context_->driver().parameter_sizes(function.handle, &function.sizes, &function.sizes_known),
                  [&] { return "tell the parameters of kernel " + symbol; });
  return &functions_.emplace(symbol, std::move(function)).first->second;
}

}  // namespace tokenspeed::device::gpu
