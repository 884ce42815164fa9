#include "gpu_double.h"

#include <elf.h>

#include <algorithm>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace gpu_double {
namespace {

namespace status = tokenspeed::device::gpu::status;

struct KernelInfo {
  void (*run)(void**) = nullptr;
  std::vector<size_t> sizes;
};
struct Function {
  std::string name;
  int id;
};
struct Module {
  std::string image;
  std::vector<std::unique_ptr<Function>> functions;
  int id;
};
struct Stream;
struct Work {
  std::function<void()> run;
  Stream* after = nullptr;  // if not null: not before that stream has done `position` pieces
  uint64_t position = 0;
};
struct Stream {
  std::deque<Work> work;
  uint64_t submitted = 0, done = 0;
  bool running = false;
  int id;
};
struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  int id;
};
// A kernel with its own copy of its parameters.
struct Node {
  std::string kernel;
  std::vector<std::vector<std::byte>> parameters;
  int id;
};
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  int id;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::string log, answered;
  std::map<std::string, std::map<int, Status>> failures;  // by entry, then by number of calls to go
  Status sticky = 0;
  std::map<std::string, KernelInfo> kernels;
  std::map<const char*, unsigned> pinned;  // what was registered, with its flags
  std::map<int, Stream*> streams;
  Settings settings{"", 0, 0};
  uint64_t used = 0;
  bool hangs = false;
  int next_id = 1;
};

State& state() {
  static State* s = new State;  // never destroyed: threads may outlive main
  return *s;
}

template <typename T>
T& as(Handle handle) {
  return *static_cast<T*>(handle);
}
template <typename T>
Handle make(T** made = nullptr) {
  auto* object = new T{};
  object->id = state().next_id++;
  if (made != nullptr) *made = object;
  return object;
}

std::string hex(const std::vector<std::byte>& bytes) {
  std::string text;
  char digits[3];
  for (const std::byte b : bytes) {
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(b));
    text += digits;
  }
  return text;
}

// Parameters are as large as registered; of a kernel that is not, nothing is known.
Node node_of(const KernelLaunch& launch) {
  Node node;
  node.kernel = as<Function>(launch.function).name;
  const auto known = state().kernels.find(node.kernel);
  if (known == state().kernels.end()) return node;
  for (size_t i = 0; i < known->second.sizes.size(); ++i) {
    const auto* bytes = static_cast<const std::byte*>(launch.parameters[i]);
    node.parameters.emplace_back(bytes, bytes + known->second.sizes[i]);
  }
  return node;
}

void run(const Node& node) {
  void (*function)(void**) = nullptr;
  {
    const std::lock_guard lock(state().mutex);
    const auto known = state().kernels.find(node.kernel);
    if (known != state().kernels.end()) function = known->second.run;
  }
  if (function == nullptr) return;
  std::vector<void*> pointers;
  for (const auto& bytes : node.parameters) pointers.push_back(const_cast<std::byte*>(bytes.data()));
  function(pointers.data());
}

std::string describe(const Node& node, const KernelLaunch& launch) {
  const auto dims = [](const std::array<uint32_t, 3>& n) {
    return std::to_string(n[0]) + "x" + std::to_string(n[1]) + "x" + std::to_string(n[2]);
  };
  std::string text = "kernel=" + node.kernel + " grid=" + dims(launch.grid) + " block=" + dims(launch.block) +
                     " shared=" + std::to_string(launch.shared_bytes) + " params=";
  for (size_t i = 0; i < node.parameters.size(); ++i) text.append(i > 0 ? "," : "").append(hex(node.parameters[i]));
  return text;
}

void enqueue(Handle stream, std::function<void()> run, Stream* after = nullptr, uint64_t position = 0) {
  Stream& s = as<Stream>(stream);
  s.work.push_back({std::move(run), after, position});
  ++s.submitted;
}

bool waits(const Work& work) { return work.after != nullptr && work.after->done < work.position; }

// Does one piece of work, of this stream or of one that it waits for, without the lock: kernels may be anything. False
// if there is none to do now.
bool advance(std::unique_lock<std::mutex>& lock, Stream& stream) {
  if (stream.running || stream.work.empty() || state().hangs) return false;
  if (waits(stream.work.front())) return advance(lock, *stream.work.front().after);
  stream.running = true;
  const auto run = std::move(stream.work.front().run);
  stream.work.pop_front();
  lock.unlock();
  run();
  lock.lock();
  stream.running = false;
  ++stream.done;
  state().changed.notify_all();
  return true;
}

Status query(Stream* stream, uint64_t position) {
  std::unique_lock lock(state().mutex);
  if (stream == nullptr || stream->done >= position) return status::kSuccess;
  advance(lock, *stream);
  return stream->done >= position ? status::kSuccess : status::kNotReady;
}

Status synchronize(Stream* stream, uint64_t position) {
  std::unique_lock lock(state().mutex);
  while (stream != nullptr && stream->done < position && state().sticky == 0) {
    if (!advance(lock, *stream)) state().changed.wait(lock);
  }
  return state().sticky;
}

// How many bytes an ELF file has, by its own tables.
size_t image_size(const char* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof(header));
  uint64_t size = std::max<uint64_t>(sizeof(header), header.e_shoff + uint64_t{header.e_shnum} * sizeof(Elf64_Shdr));
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, image + header.e_shoff + static_cast<size_t>(i) * sizeof(section), sizeof(section));
    if (section.sh_type != SHT_NOBITS) size = std::max<uint64_t>(size, section.sh_offset + section.sh_size);
  }
  return size;
}

}  // namespace

Call::Call(const char* entry, const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.log += std::string(entry) + (text[0] != '\0' ? " " : "") + text + "\n";
  std::map<int, Status> later;
  for (const auto& [calls, code] : s.failures[entry]) {
    if (calls > 1) later[calls - 1] = code;
    if (calls == 1) code_ = code;
  }
  s.failures[entry] = std::move(later);
  if (code_ != 0 && tokenspeed::device::gpu::is_sticky(code_)) {
    s.sticky = code_;
    s.changed.notify_all();
  }
  if (s.sticky != 0) code_ = s.sticky;
}

Settings settings() {
  const std::lock_guard lock(state().mutex);
  return state().settings;
}

Status memory_info(size_t* free, size_t* total) {
  const std::lock_guard lock(state().mutex);
  *total = state().settings.memory_bytes;
  *free = *total - state().used;
  return status::kSuccess;
}

Status take(uint64_t bytes) {
  const std::lock_guard lock(state().mutex);
  if (bytes > state().settings.memory_bytes - state().used) return status::kOutOfMemory;
  state().used += bytes;
  return status::kSuccess;
}

void give(uint64_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().used -= bytes;
}

Status module_load(Handle* module, const void* image, uint16_t machine) {
  const auto* bytes = static_cast<const char*>(image);
  if (const Call call("module_load", "elf=%d", std::memcmp(bytes, ELFMAG, SELFMAG) == 0);
      call.fails()) {
    return call.code();
  }
  Elf64_Ehdr header;
  std::memcpy(&header, bytes, sizeof(header));
  if (header.e_machine != machine) return status::kInvalidImage;
  const std::lock_guard lock(state().mutex);
  Module* made = nullptr;
  *module = make<Module>(&made);
  made->image.assign(bytes, image_size(bytes));
  return status::kSuccess;
}

Status module_unload(Handle module) {
  const Call call("module_unload", "module=%d", as<Module>(module).id);
  delete static_cast<Module*>(module);
  return call.code();
}

Status module_function(Handle* function, Handle module, const char* symbol) {
  if (const Call call("module_function", "symbol=%s", symbol); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  Module& m = as<Module>(module);
  if (m.image.find(symbol) == std::string::npos) return status::kNotFound;
  m.functions.push_back(std::make_unique<Function>(Function{symbol, state().next_id++}));
  *function = m.functions.back().get();
  return status::kSuccess;
}

Status parameter_info(Handle function, size_t index, size_t* offset, size_t* size) {
  const std::lock_guard lock(state().mutex);
  const auto known = state().kernels.find(as<Function>(function).name);
  if (known == state().kernels.end()) return status::kNotSupported;
  if (index >= known->second.sizes.size()) return status::kInvalidValue;
  *offset = 0;
  for (size_t i = 0; i <= index; ++i) {
    *size = known->second.sizes[i];
    *offset = (*offset + *size - 1) / *size * *size + (i < index ? *size : 0);
  }
  return status::kSuccess;
}

namespace {

uint64_t submitted(Handle stream) {
  const std::lock_guard lock(state().mutex);
  return as<Stream>(stream).submitted;
}

}  // namespace

Status stream_create(Handle* stream) {
  if (const Call call("stream_create", "%s", ""); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  Stream* made = nullptr;
  *stream = make<Stream>(&made);
  state().streams[made->id] = made;
  return status::kSuccess;
}

Status stream_destroy(Handle stream) {
  const Call call("stream_destroy", "stream=%d", as<Stream>(stream).id);
  const std::lock_guard lock(state().mutex);
  state().streams.erase(as<Stream>(stream).id);
  delete static_cast<Stream*>(stream);
  return call.code();
}

Status stream_query(Handle stream) {
  if (const Call call("stream_query", "%s", ""); call.fails()) return call.code();
  return query(&as<Stream>(stream), submitted(stream));
}

Status stream_synchronize(Handle stream) {
  if (const Call call("stream_synchronize", "%s", ""); call.fails()) return call.code();
  return synchronize(&as<Stream>(stream), submitted(stream));
}

Status event_create(Handle* event, unsigned flags) {
  if (const Call call("event_create", "flags=%u", flags); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  *event = make<Event>();
  return status::kSuccess;
}

Status event_destroy(Handle event) {
  const Call call("event_destroy", "event=%d", as<Event>(event).id);
  delete static_cast<Event*>(event);
  return call.code();
}

Status event_record(Handle event, Handle stream) {
  Event& e = as<Event>(event);
  if (const Call call("event_record", "event=%d stream=%d", e.id, as<Stream>(stream).id);
      call.fails()) {
    return call.code();
  }
  const std::lock_guard lock(state().mutex);
  e.stream = &as<Stream>(stream);
  e.position = e.stream->submitted;
  return status::kSuccess;
}

namespace {

std::pair<Stream*, uint64_t> recorded(Handle event) {
  const std::lock_guard lock(state().mutex);
  return {as<Event>(event).stream, as<Event>(event).position};
}

}  // namespace

Status stream_wait(Handle stream, Handle event) {
  if (const Call call("stream_wait", "stream=%d event=%d", as<Stream>(stream).id, as<Event>(event).id); call.fails()) {
    return call.code();
  }
  const auto [after, position] = recorded(event);
  const std::lock_guard lock(state().mutex);
  if (after != nullptr) enqueue(stream, [] {}, after, position);
  return status::kSuccess;
}

Status event_query(Handle event) {
  if (const Call call("event_query", "event=%d", as<Event>(event).id); call.fails()) return call.code();
  const auto [stream, position] = recorded(event);
  return query(stream, position);
}

Status event_synchronize(Handle event) {
  if (const Call call("event_synchronize", "event=%d", as<Event>(event).id); call.fails()) return call.code();
  const auto [stream, position] = recorded(event);
  return synchronize(stream, position);
}

Status event_elapsed(float* milliseconds, Handle start, Handle end) {
  const Call call("event_elapsed", "%s", "");
  const auto [stream, begin] = recorded(start);
  *milliseconds = static_cast<float>(recorded(end).second - begin);  // a piece of work takes a millisecond
  return call.code();
}

Status copy(const char* entry, void* to, const void* from, size_t bytes, Handle stream) {
  if (const Call call(entry, "bytes=%zu stream=%d", bytes, as<Stream>(stream).id); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return status::kSuccess;
}

Status fill(void* to, unsigned char value, size_t bytes, Handle stream) {
  if (const Call call("fill", "bytes=%zu value=%d", bytes, value); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  enqueue(stream, [=] { std::memset(to, value, bytes); });
  return status::kSuccess;
}

Status graph_create(Handle* graph) {
  if (const Call call("graph_create", "%s", ""); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  *graph = make<Graph>();
  return status::kSuccess;
}

Status graph_destroy(Handle graph) {
  const Call call("graph_destroy", "graph=%d", as<Graph>(graph).id);
  delete static_cast<Graph*>(graph);
  return call.code();
}

Status add_kernel(Handle* node, Handle graph, const Handle* predecessors, size_t count, bool programmatic,
                  const KernelLaunch& launch) {
  Graph& g = as<Graph>(graph);
  std::unique_lock lock(state().mutex);
  auto made = std::make_unique<Node>(node_of(launch));
  made->id = static_cast<int>(g.nodes.size());
  std::string after;
  for (size_t i = 0; i < count; ++i) {
    after.append(i > 0 ? "," : "").append(std::to_string(as<Node>(predecessors[i]).id));
  }
  const std::string text = describe(*made, launch);
  lock.unlock();
  if (const Call call("add_kernel", "node=%d after=[%s] programmatic=%d %s", made->id, after.c_str(), programmatic,
                      text.c_str());
      call.fails()) {
    return call.code();
  }
  *node = made.get();
  g.nodes.push_back(std::move(made));
  return status::kSuccess;
}

Status set_cluster(Handle node, const unsigned cluster[3]) {
  return Call("set_cluster", "node=%d cluster=%ux%ux%u", as<Node>(node).id, cluster[0], cluster[1], cluster[2]).code();
}

Status graph_instantiate(Handle* exec, Handle graph) {
  if (const Call call("graph_instantiate", "nodes=%zu", as<Graph>(graph).nodes.size());
      call.fails()) {
    return call.code();
  }
  const std::lock_guard lock(state().mutex);
  Graph* made = nullptr;
  *exec = make<Graph>(&made);
  for (const auto& node : as<Graph>(graph).nodes) made->nodes.push_back(std::make_unique<Node>(*node));
  return status::kSuccess;
}

Status graph_exec_destroy(Handle exec) {
  const Call call("graph_exec_destroy", "exec=%d", as<Graph>(exec).id);
  delete static_cast<Graph*>(exec);
  return call.code();
}

Status graph_upload(Handle exec, Handle) { return Call("graph_upload", "exec=%d", as<Graph>(exec).id).code(); }

Status graph_launch(Handle exec, Handle stream) {
  const Graph& g = as<Graph>(exec);
  if (const Call call("graph_launch", "exec=%d stream=%d", g.id, as<Stream>(stream).id);
      call.fails()) {
    return call.code();
  }
  const std::lock_guard lock(state().mutex);
  enqueue(stream, [&g] {
    for (const auto& node : g.nodes) run(*node);
  });
  return status::kSuccess;
}

Status launch(const KernelLaunch& launch, Handle stream) {
  std::unique_lock lock(state().mutex);
  const Node node = node_of(launch);
  const std::string text = describe(node, launch);
  lock.unlock();
  if (const Call call("launch", "%s", text.c_str()); call.fails()) return call.code();
  lock.lock();
  enqueue(stream, [node] { run(node); });
  return status::kSuccess;
}

Status host_register(void* memory, size_t bytes, unsigned flags) {
  if (const Call call("host_register", "bytes=%zu flags=%u", bytes, flags); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  state().pinned[static_cast<const char*>(memory)] = flags;
  return status::kSuccess;
}

Status host_unregister(void* memory) {
  const Call call("host_unregister", "%s", "");
  const std::lock_guard lock(state().mutex);
  return state().pinned.erase(static_cast<const char*>(memory)) == 1 ? call.code() : status::kInvalidValue;
}

// The device reaches memory where the host does, if it was registered so.
Status host_address(Address* address, void* memory, unsigned flags) {
  if (const Call call("host_address", "flags=%u", flags); call.fails()) return call.code();
  const std::lock_guard lock(state().mutex);
  const auto registered = state().pinned.find(static_cast<const char*>(memory));
  if (registered == state().pinned.end() || (registered->second & tokenspeed::device::gpu::kHostMapped) == 0) {
    return status::kInvalidValue;
  }
  *address = reinterpret_cast<Address>(memory);
  return status::kSuccess;
}

}  // namespace gpu_double

using gpu_double::state;

extern "C" {

void double_reset() {
  const std::lock_guard lock(state().mutex);
  auto& s = state();
  s.log.clear();
  s.failures.clear();
  s.sticky = 0;
  s.kernels.clear();
  s.hangs = false;
  s.next_id = 1;
  s.streams.clear();
  s.settings = {"", 0, 0};
}

const char* double_log() {
  const std::lock_guard lock(state().mutex);
  state().answered = state().log;
  return state().answered.c_str();
}

void double_fail(const char* entry, int nth, int code) {
  const std::lock_guard lock(state().mutex);
  state().failures[entry][nth] = code;
}

void double_kernel(const char* symbol, void (*run)(void** parameters), const size_t* sizes, size_t count) {
  const std::lock_guard lock(state().mutex);
  state().kernels[symbol] = {run, {sizes, sizes + count}};
}

void double_device(const char* arch, int driver_version, uint64_t memory_bytes) {
  const std::lock_guard lock(state().mutex);
  auto& s = state().settings;
  std::snprintf(s.arch, sizeof(s.arch), "%s", arch);
  s.driver_version = driver_version;
  s.memory_bytes = memory_bytes;
}

void double_hang(bool hangs) {
  const std::lock_guard lock(state().mutex);
  state().hangs = hangs;
  state().changed.notify_all();
}

bool double_work(int stream) {
  std::unique_lock lock(state().mutex);
  gpu_double::Stream& s = *state().streams.at(stream);
  return !s.work.empty() && !gpu_double::waits(s.work.front()) && gpu_double::advance(lock, s);
}

}  // extern "C"
