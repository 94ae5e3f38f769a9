// sim.cpp: the device "sim": runs the kernel text as compiled for the host, one emulated thread at a
// time, and refuses whatever a GPU would let pass: see sim_shadow.h and sim_scheduler.cpp.
#include "sim.h"

#ifndef LILY_HAS_SIM

namespace lily {
DeviceRef make_sim(bool, std::string& why) {
  why = "this build does not include the emulated device";
  return nullptr;
}
std::vector<LaunchRecord> sim_records(const Program&) {
  throw LilyError("sim: this build does not include the emulated device");
}
std::vector<LaunchRecord> sim_run_library(Device&, const std::string&,
                                          const std::vector<std::string>&, CommandList) {
  throw LilyError("sim: this build does not include the emulated device");
}
}  // namespace lily

#else

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "host_queue.h"
#include "ops.h"
#include "sim_emulator.h"
#include "x86_level.h"

#define X(op, name, c0, c1, c2)    \
  extern "C" void name##_bf16();   \
  extern "C" void name##_f32();
LILY_VARIANTS(X)
#undef X

namespace lily {
namespace {

struct Compiled {
  const char* name[2];
  sim::Kernel kernel[2];  // bf16, exact
};
// All kernels are called with kMaxArgs pointers, of which they take as many as they declare.
const Compiled kCompiled[] = {
#define X(op, name, c0, c1, c2) \
  {{#name "_bf16", #name "_f32"}, {reinterpret_cast<sim::Kernel>(&name##_bf16), reinterpret_cast<sim::Kernel>(&name##_f32)}},
    LILY_VARIANTS(X)
#undef X
};

// Small buffers are filled with NaNs. In large ones the shadow alone knows what is uninitialised:
// their pages come into being when touched, so tests may allocate sparse gigabytes.
constexpr size_t kPoisonLimit = 16 << 20;

class SimBuffer : public Buffer {
 public:
  SimBuffer(size_t bytes, std::string_view name, std::shared_ptr<std::atomic<uint64_t>> account)
      : pages_(map(bytes, name)), shadow_(pages_, bytes), account_(std::move(account)) {
    size = bytes;
    label = name;
    host = static_cast<std::byte*>(pages_);
    if (bytes <= kPoisonLimit) std::memset(pages_, 0xff, bytes);
    *account_ += bytes;
  }
  ~SimBuffer() override {
    munmap(pages_, size);
    *account_ -= size;
  }
  sim::Shadow& shadow() { return shadow_; }

 private:
  static void* map(size_t bytes, std::string_view name) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(at != MAP_FAILED, "sim: ", name, ": no ", bytes, " bytes of memory");
    return at;
  }
  void* pages_;
  sim::Shadow shadow_;
  std::shared_ptr<std::atomic<uint64_t>> account_;
};
SimBuffer& sim_buffer(const BufferRef& b) { return static_cast<SimBuffer&>(*b); }

class SimProgram : public Program {
 public:
  CommandList list;
  BufferRef params;
  std::vector<sim::Call> calls;
  std::vector<std::vector<uint32_t>> followers;  // launches that a hazard orders behind each
  std::vector<uint32_t> predecessors;            // how many each has
  mutable std::mutex mutex;                      // of records
  std::vector<LaunchRecord> records;
};

bool writes(Access a) { return a == Access::write || a == Access::read_write; }
bool reads(Access a) { return a == Access::read || a == Access::read_write; }

sim::Declared declare(const Arg& arg, std::string what) {
  sim::Declared d;
  const Tensor& t = arg.tensor;
  d.begin = reinterpret_cast<uintptr_t>(t.buffer->host) + t.offset;
  d.end = d.begin + t.bytes();
  d.access = arg.access;
  d.shadow = &sim_buffer(t.buffer).shadow();
  d.what = concat(what, " '", t.buffer->label, "'");
  d.counted = true;
  return d;
}

// Addresses, permissions and declared traffic of one launch.
sim::Call resolve(const Launch& launch, const Tensor& params, LaunchRecord& record) {
  sim::Call call;
  call.grid = launch.grid;
  size_t bound = 0;
  const auto add = [&](const Arg& arg, const std::string& what) {
    const size_t part = record.parts.size();
    record.parts.emplace_back();
    if (arg.access == Access::none || arg.tensor.elements == 0) return;
    call.declared.push_back(declare(arg, what));
    call.declared.back().part = part;
    if (reads(arg.access)) record.declared_read += arg.tensor.bytes();
    if (writes(arg.access)) record.declared_written += arg.tensor.bytes();
  };
  const auto bind = [&](const Tensor& t) {
    check(bound < sim::kMaxArgs, "sim: a kernel takes at most ", sim::kMaxArgs, " arguments");
    call.args[bound++] = t.buffer ? t.buffer->host + t.offset : nullptr;
  };
  for (const Arg& arg : launch.args) {
    add(arg, concat("argument ", bound));
    bind(arg.tensor);
  }
  for (const Arg& arg : launch.unbound) add(arg, "unbound range");
  if (launch.params_size > 0) {
    Tensor p = params;
    p.offset += launch.params_offset;
    p.elements = launch.params_size / 4;
    call.declared.push_back(declare(in(p), "params"));
    call.declared.back().counted = false;
    call.params = call.declared.back().begin;
    call.params_size = launch.params_size;
    bind(p);
  }
  if (launch.step.access != Access::none) {
    add(launch.step, "step");
    bind(launch.step.tensor);
  }
  record.variant = launch.variant;
  record.grid = launch.grid;
  return call;
}

// Kernels compiled as ours are; they find the hooks of this module, which Python loaded for itself
// alone.
void* open_library(const std::string& path) {
  Dl_info self;
  check(dladdr(reinterpret_cast<void*>(&make_sim), &self) != 0 &&
            dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL) != nullptr,
        "sim: cannot offer its hooks: ", dlerror());
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  check(library != nullptr, "sim: ", path, ": ", dlerror());
  return library;
}

class SimDevice : public Device {
 public:
  // replacements: an open library whose kernels come before ours of the same name, or null.
  SimDevice(bool exact, uint64_t seed, void* replacements)
      : Device(exact),
        replacements_(replacements),
        limit_(uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGE_SIZE))),
        seed_(seed) {}
  std::string name() const override { return "sim"; }
  std::string description() const override {
    return concat("emulated threads over the kernel text, every access checked, seed ",
                  seed_.state);
  }
  Family family() const override { return Family::sim; }
  uint64_t memory_limit() const override { return limit_; }

  BufferRef allocate(size_t bytes, std::string_view label, Memory) override {
    check(bytes > 0, "sim: ", label, " has no bytes");
    const uint64_t used = allocated();
    check(used <= limit_ && bytes <= limit_ - used, "sim: ", label, " needs ", bytes, " bytes, ",
          limit_ - std::min(limit_, used), " of ", limit_, " are left");
    return std::make_shared<SimBuffer>(bytes, label, allocated_);
  }
  void upload(const Tensor& to, const void* from) override {
    queue_.drain();
    std::memcpy(to.buffer->host + to.offset, from, to.bytes());
    sim_buffer(to.buffer).shadow().mark_initialised(to.offset, to.bytes());
  }
  void download(const Tensor& from, void* to) override {
    queue_.drain();
    std::memcpy(to, from.buffer->host + from.offset, from.bytes());
  }
  uint64_t address(const Tensor& t) override {
    return reinterpret_cast<uint64_t>(t.buffer->host + t.offset);
  }

  ProgramRef compile(CommandList list, bool) override {
    auto program = prepare(std::move(list));
    for (size_t i = 0; i < program->calls.size(); ++i) {
      const Compiled& compiled = kCompiled[program->list.launches[i].variant];
      program->calls[i].kernel = compiled.kernel[exact()];
      program->calls[i].name = compiled.name[exact()];
      if (!replacements_) continue;
      if (void* found = dlsym(replacements_, compiled.name[exact()])) {
        program->calls[i].kernel = reinterpret_cast<sim::Kernel>(found);
      }
    }
    return program;
  }
  // As compile, for kernels that are not ours: they must outlive the program.
  ProgramRef compile_foreign(CommandList list, const std::vector<std::string>& symbols,
                             const std::vector<sim::Kernel>& kernels) {
    auto program = prepare(std::move(list));
    for (size_t i = 0; i < program->calls.size(); ++i) {
      program->calls[i].kernel = kernels[i];
      program->calls[i].name = symbols[i];
    }
    return program;
  }

  Ticket submit(const ProgramRef& program, const std::atomic<bool>* cancel) override {
    return queue_.push(
        [this, program, cancel] { run(static_cast<SimProgram&>(*program), cancel); });
  }
  void wait(Ticket ticket) override { queue_.wait(ticket); }

 private:
  std::shared_ptr<SimProgram> prepare(CommandList list) {
    auto program = std::make_shared<SimProgram>();
    Tensor params;
    if (!list.params.empty()) {
      // Not the user's memory, so it counts for nobody.
      program->params = std::make_shared<SimBuffer>(list.params.size(), "params",
                                                    std::make_shared<std::atomic<uint64_t>>(0));
      std::memcpy(program->params->host, list.params.data(), list.params.size());
      sim_buffer(program->params).shadow().mark_initialised(0, list.params.size());
      params.buffer = program->params;
      params.dtype = DType::u32;
    }
    const size_t n = list.launches.size();
    const std::vector<uint32_t> levels = hazard_levels(list);
    program->records.resize(n);
    program->followers.resize(n);
    program->predecessors.resize(n);
    for (size_t i = 0; i < n; ++i) {
      program->calls.push_back(resolve(list.launches[i], params, program->records[i]));
      program->records[i].level = levels[i];
      for (size_t j = 0; j < i; ++j) {
        if (!conflicts(list.launches[j], list.launches[i])) continue;
        program->followers[j].push_back(uint32_t(i));
        ++program->predecessors[i];
      }
    }
    program->list = std::move(list);
    return program;
  }

  // On the queue's worker. Any order that the hazards allow is right; a drawn one is taken.
  void run(SimProgram& program, const std::atomic<bool>* cancel) {
    const CommandList& list = program.list;
    std::vector<uint32_t> missing = program.predecessors, ready;
    for (uint32_t i = 0; i < missing.size(); ++i) {
      if (missing[i] == 0) ready.push_back(i);
    }
    while (!ready.empty()) {
      check<Cancelled>(!(cancel && cancel->load(std::memory_order_relaxed)), list.label,
                       ": cancelled");
      std::swap(ready[seed_.below(uint32_t(ready.size()))], ready.back());
      const uint32_t i = ready.back();
      ready.pop_back();
      run_launch(program, i);
      for (const uint32_t next : program.followers[i]) {
        if (--missing[next] == 0) ready.push_back(next);
      }
    }
  }
  void run_launch(SimProgram& program, uint32_t i) {
    sim::Touched touched;
    std::vector<sim::Touched> parts;
    try {
      touched = sim::run(program.calls[i], seed_.next(), nullptr, &parts);
    } catch (const DeviceError& error) {
      throw DeviceError(concat("sim: ", program.list.label, ", launch ", i, " of ",
                               program.calls.size(), ": ", error.what()));
    }
    const std::lock_guard lock(program.mutex);
    LaunchRecord& record = program.records[i];
    const auto bytes = [](const sim::Touched& t) {
      return TouchedBytes{t.read, t.read_distinct, t.written, t.written_distinct};
    };
    record.touched = bytes(touched);
    for (size_t p = 0; p < record.parts.size(); ++p) {
      record.parts[p] = p < parts.size() ? bytes(parts[p]) : TouchedBytes{};
    }
  }

  void* const replacements_;
  const uint64_t limit_;
  sim::Random seed_;  // the worker's, once there is work
  HostQueue queue_;   // last: its worker uses the rest
};

}  // namespace

std::vector<LaunchRecord> sim_records(const Program& program) {
  const auto* mine = dynamic_cast<const SimProgram*>(&program);
  check(mine != nullptr, "sim: the program belongs to another device");
  const std::lock_guard lock(mine->mutex);
  return mine->records;
}

std::vector<LaunchRecord> sim_run_library(Device& device, const std::string& path,
                                          const std::vector<std::string>& symbols,
                                          CommandList list) {
  auto* sim = dynamic_cast<SimDevice*>(&device);
  check(sim != nullptr, "sim: kernels of a library run on the emulated device only, not on ",
        device.name());
  check(symbols.size() == list.launches.size(), "sim: ", symbols.size(), " symbols for ",
        list.launches.size(), " launches");
  void* library = open_library(path);
  const std::unique_ptr<void, int (*)(void*)> closer(library, dlclose);
  std::vector<sim::Kernel> kernels;
  for (const std::string& symbol : symbols) {
    kernels.push_back(reinterpret_cast<sim::Kernel>(dlsym(library, symbol.c_str())));
    check(kernels.back() != nullptr, "sim: ", path, " has no kernel ", symbol);
  }
  const ProgramRef program = sim->compile_foreign(std::move(list), symbols, kernels);
  sim->wait(sim->submit(program, nullptr));
  return sim_records(*program);
}

// LILY_SIM_SEED draws other orders and layouts; the same seed repeats the same ones. The kernels of
// LILY_SIM_KERNELS, a shared library, take the place of ours of the same name.
DeviceRef make_sim(bool exact, std::string& why) {
#if defined(__x86_64__)
  if (x86_level() < 3) {
    why = "the emulated device needs a processor with AVX2, FMA and F16C";
    return nullptr;
  }
#else
  (void)why;
#endif
  const char* text = std::getenv("LILY_SIM_SEED");
  char* end = nullptr;
  const uint64_t seed = text ? std::strtoull(text, &end, 10) : 1;
  check(text == nullptr || (end != text && *end == 0), "LILY_SIM_SEED is \"", text,
        "\", wants a number");
  const char* library = std::getenv("LILY_SIM_KERNELS");
  return host_device<SimDevice>(exact, seed, library ? open_library(library) : nullptr);
}

}  // namespace lily

#endif  // LILY_HAS_SIM
