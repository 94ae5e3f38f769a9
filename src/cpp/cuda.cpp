// cuda.cpp: the NVIDIA device: kernels from embedded PTX, CUDA graphs, memory, tickets.
#include "device.h"

#ifndef LILY_HAS_CUDA

namespace lily {
DeviceRef make_cuda(bool, std::string& why) {
  why = "this build has no CUDA kernels: no clang was found to compile them (pip package ziglang)";
  return nullptr;
}
}  // namespace lily

#else

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "cuda_driver.h"
#include "ops.h"

namespace lily {
namespace {

constexpr int kDriverNeeded = 11080;  // first to know PTX 7.8
constexpr size_t kStagingBytes = 16u << 20, kSmallCopy = 1u << 20;
constexpr unsigned kCopyThreads = 4;  // one core's memcpy is slower than the bus
constexpr size_t kMaxInFlight = 64;   // submissions, and so events

std::string version_text(int v) { return concat(v / 1000, ".", v % 1000 / 10); }
std::string gib(uint64_t bytes) {
  std::ostringstream out;
  out.precision(4);
  out << double(bytes) / double(1u << 30) << " GiB";
  return out.str();
}
bool env_set(const char* name) {
  const char* value = std::getenv(name);
  return value && *value && std::string_view(value) != "0";
}

// The context and stream. Shared by the device, its buffers and its programs, so that whoever lives
// longest can still free what it holds.
class Gpu {
 public:
  Gpu() = default;
  ~Gpu() {
    if (!context) return;
    driver.context_push(context);
    for (Staging& s : staging) {
      if (s.host) driver.host_free(s.host);
      if (s.done) driver.event_destroy(s.done);
    }
    for (cuda::Event e : idle_events) driver.event_destroy(e);
    for (auto& [file, module] : modules) driver.module_unload(module);
    if (stream) driver.stream_destroy(stream);
    driver.context_pop(nullptr);
    driver.context_release(id);
  }

  std::string error_text(cuda::Result r) const {
    const char *name = nullptr, *text = nullptr;
    driver.error_name(r, &name);
    driver.error_string(r, &text);
    return concat(name ? name : "CUDA error", " (", text ? text : "unknown", ", ", r, ")");
  }
  // Throws when `r` is an error; a fatal one closes the device for good.
  template <typename... Parts>
  void ok(cuda::Result r, const Parts&... label) {
    if (r == cuda::kSuccess) return;
    fail(r, concat(label..., ": ", error_text(r)));
  }
  [[noreturn]] void fail(cuda::Result r, const std::string& what) {
    const bool fatal = cuda::is_fatal(r);
    if (fatal) {
      const std::lock_guard lock(lost_mutex);
      if (lost_text.empty()) lost_text = what;
      lost = true;
    }
    throw DeviceError(concat("cuda: ", what), fatal);
  }
  void check_alive() {
    if (!lost) return;
    const std::lock_guard lock(lost_mutex);
    throw DeviceError(concat("cuda: the device was lost earlier: ", lost_text), true);
  }
  // Events go back to the pool when their last user is done, so a waiter never sees one reused.
  std::shared_ptr<cuda::Event> take_event(const std::shared_ptr<Gpu>& self) {
    cuda::Event event = nullptr;
    {
      const std::lock_guard lock(event_mutex);
      if (!idle_events.empty()) {
        event = idle_events.back();
        idle_events.pop_back();
      }
    }
    if (!event) ok(driver.event_create(&event, cuda::kEventNoTiming), "event");
    return {new cuda::Event(event), [self](cuda::Event* e) {
              const std::lock_guard lock(self->event_mutex);
              self->idle_events.push_back(*e);
              delete e;
            }};
  }

  struct Staging {
    std::byte* host = nullptr;
    cuda::Event done = nullptr;
  };
  cuda::Driver driver;
  cuda::DeviceId id = 0;
  cuda::Context context = nullptr;
  cuda::Stream stream = nullptr;
  std::mutex staging_mutex;
  Staging staging[2];
  std::mutex module_mutex;                 // guards modules
  std::map<size_t, cuda::Module> modules;  // by index into ptx_texts()

 private:
  std::mutex event_mutex;
  std::vector<cuda::Event> idle_events;
  std::atomic<bool> lost = false;
  std::mutex lost_mutex;
  std::string lost_text;
};

// Makes the context current on this thread for one call, and leaves the thread as it was.
class Current {
 public:
  explicit Current(Gpu& gpu) : gpu_(gpu) {
    gpu.check_alive();
    gpu.ok(gpu.driver.context_push(gpu.context), "make the context current");
  }
  ~Current() { gpu_.driver.context_pop(nullptr); }
  Current(const Current&) = delete;

 private:
  Gpu& gpu_;
};

struct CudaBuffer final : Buffer {
  ~CudaBuffer() override {
    // Nothing in flight uses it: programs hold their buffers and tickets hold their programs.
    gpu->driver.context_push(gpu->context);
    if (host) gpu->driver.host_free(host);
    else gpu->driver.memory_free(address);
    gpu->driver.context_pop(nullptr);
    *counter -= size;
  }
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<std::atomic<uint64_t>> counter;
  cuda::Address address = 0;
};

struct Kernel {
  cuda::Function function = nullptr;
  std::vector<uint64_t> pointers;  // args, then Step
  std::vector<void*> slots;        // what the driver takes: the address of each parameter's value
};

struct CudaProgram final : Program {
  ~CudaProgram() override {
    if (!exec) return;
    gpu->driver.context_push(gpu->context);
    gpu->driver.graph_exec_destroy(exec);
    gpu->driver.context_pop(nullptr);
  }
  std::shared_ptr<Gpu> gpu;
  CommandList list;  // keeps the buffers, and the params that `slots` point into
  std::vector<Kernel> kernels;
  cuda::GraphExec exec = nullptr;  // null: launched one by one
};
// Launch i as errors name it; written out only for one: a prefill prepares hundreds.
struct StepName {
  const CudaProgram& program;
  size_t i;
};
std::ostream& operator<<(std::ostream& out, const StepName& s) {
  const CommandList& list = s.program.list;
  return out << list.label << ": step " << s.i << " "
             << variants()[list.launches[s.i].variant].name;
}

// What the PTX says of a kernel's parameters: pointers, one struct by value, then perhaps Step.
struct Signature {
  size_t text = 0;  // index into ptx_texts()
  size_t before = 0, params_bytes = 0, after = 0;
};
// A kernel of a loaded module.
struct Loaded {
  cuda::Function function = nullptr;  // null: not looked up yet
  const Signature* signature = nullptr;
  int most_threads = 0;
};

std::unordered_map<std::string, Signature> read_signatures(bool exact) {
  std::unordered_map<std::string, Signature> all;
  const auto texts = ptx_texts();
  for (size_t t = 0; t < texts.size(); ++t) {
    if (texts[t].exact != exact) continue;
    std::string_view text = texts[t].text;
    constexpr std::string_view kEntry = ".entry ", kParam = ".param ", kBytes = ".b8 ";
    for (size_t at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at)) {
      at += kEntry.size();
      const size_t open = text.find('(', at), close = text.find(')', open);
      const std::string_view params = text.substr(open, close - open);
      Signature s;
      s.text = t;
      for (size_t p = params.find(kParam); p != params.npos;) {
        const size_t next = params.find(kParam, p + 1);
        const std::string_view one = params.substr(p, next - p);
        if (one.find(kBytes) != one.npos) {
          s.params_bytes = std::strtoul(one.data() + one.find('[') + 1, nullptr, 10);
        } else {
          ++(s.params_bytes ? s.after : s.before);
        }
        p = next;
      }
      all.emplace(text.substr(at, open - at), s);
      at = close;
    }
  }
  return all;
}

void copy_parallel(std::byte* to, const std::byte* from, size_t bytes) {
  const unsigned threads =
      bytes < kSmallCopy ? 1 : std::clamp(std::thread ::hardware_concurrency(), 1u, kCopyThreads);
  const size_t part = (bytes + threads - 1) / threads;
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) {
    const size_t at = std::min(i * part, bytes), count = std::min(part, bytes - at);
    others.emplace_back([=] { std::memcpy(to + at, from + at, count); });
  }
  std::memcpy(to, from, std::min(part, bytes));
  for (std::thread& t : others) t.join();
}

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<Gpu> gpu, bool exact, std::string description, uint64_t limit)
      : Device(exact),
        gpu_(std::move(gpu)),
        d_(gpu_->driver),
        description_(std::move(description)),
        limit_(limit),
        signatures_(read_signatures(exact)),
        poison_(env_set("LILY_POISON")),
        stepwise_(env_set("LILY_SYNC")) {}
  ~CudaDevice() override {
    d_.context_push(gpu_->context);
    d_.stream_wait(gpu_->stream);  // before programs in flight free their buffers
    d_.context_pop(nullptr);
    in_flight_.clear();
  }

  std::string name() const override { return "cuda"; }
  std::string description() const override { return description_; }
  Family family() const override { return Family::cuda; }
  uint64_t memory_limit() const override { return limit_; }

  BufferRef allocate(size_t bytes, std::string_view label, Memory memory) override {
    check(bytes > 0, "cuda: allocation of 0 bytes for ", label);
    const Current current(*gpu_);
    const uint64_t before = allocated_->fetch_add(bytes);
    auto refuse = [&](const std::string& why) {
      *allocated_ -= bytes;
      throw LilyError(
          concat("cuda: ", label, " needs ", bytes, " bytes (", gib(bytes), "), ", why));
    };
    if (bytes > limit_ || before > limit_ - bytes) {
      refuse(concat(before, " of ", limit_, " are in use, ", limit_ > before ? limit_ - before : 0,
                    " left"));
    }
    void* host = nullptr;
    cuda::Address address = 0;
    const cuda::Result r = memory == Memory::shared
                               ? d_.host_allocate(&host, bytes, cuda::kHostMapped)
                               : d_.memory_allocate(&address, bytes);
    if (r == cuda::kOutOfMemory) {
      size_t free = 0, total = 0;
      d_.memory_info(&free, &total);
      refuse(concat("the card has ", free, " free of ", total, ": other programs use it too"));
    }
    if (r != cuda::kSuccess) *allocated_ -= bytes;
    gpu_->ok(r, "allocate ", label);
    auto buffer = std::make_shared<CudaBuffer>();
    buffer->gpu = gpu_;
    buffer->counter = allocated_;
    buffer->size = bytes;
    buffer->label = label;
    buffer->host = static_cast<std::byte*>(host);
    buffer->address = address;
    if (host) gpu_->ok(d_.host_address(&buffer->address, host, 0), "map ", label);
    if (poison_ && host) std::memset(host, 0xff, bytes);
    if (poison_ && !host) gpu_->ok(d_.fill(address, 0xff, bytes, gpu_->stream), "poison ", label);
    return buffer;
  }

  void upload(const Tensor& to, const void* from) override {
    const CudaBuffer& buffer = resolve(to);
    const Current current(*gpu_);
    finish(last_ticket());
    const auto* source = static_cast<const std::byte*>(from);
    if (buffer.host) {
      std::memcpy(buffer.host + to.offset, source, to.bytes());
      return;
    }
    const cuda::Address base = buffer.address + to.offset;
    if (to.bytes() <= kSmallCopy) {
      gpu_->ok(d_.copy_in(base, source, to.bytes(), gpu_->stream), "upload ", buffer.label);
    } else {
      const std::lock_guard lock(gpu_->staging_mutex);
      for (size_t at = 0, i = 0; at < to.bytes(); at += kStagingBytes, ++i) {
        const size_t count = std::min(kStagingBytes, to.bytes() - at);
        Gpu::Staging& s = staging(i);
        if (i >= 2) gpu_->ok(d_.event_wait(s.done), "upload ", buffer.label);
        copy_parallel(s.host, source + at, count);
        gpu_->ok(d_.copy_in(base + at, s.host, count, gpu_->stream), "upload ", buffer.label);
        gpu_->ok(d_.event_record(s.done, gpu_->stream), "upload ", buffer.label);
      }
      gpu_->ok(d_.stream_wait(gpu_->stream), "upload ", buffer.label);  // before the lock goes
      return;
    }
    gpu_->ok(d_.stream_wait(gpu_->stream), "upload ", buffer.label);
  }

  void download(const Tensor& from, void* to) override {
    const CudaBuffer& buffer = resolve(from);
    const Current current(*gpu_);
    finish(last_ticket());
    auto* target = static_cast<std::byte*>(to);
    if (buffer.host) {
      gpu_->ok(d_.stream_wait(gpu_->stream), "download ", buffer.label);
      std::memcpy(target, buffer.host + from.offset, from.bytes());
      return;
    }
    const cuda::Address base = buffer.address + from.offset;
    if (from.bytes() <= kSmallCopy) {
      gpu_->ok(d_.copy_out(target, base, from.bytes(), gpu_->stream), "download ", buffer.label);
      gpu_->ok(d_.stream_wait(gpu_->stream), "download ", buffer.label);
      return;
    }
    const std::lock_guard lock(gpu_->staging_mutex);
    const size_t chunks = ceil_div(from.bytes(), kStagingBytes);
    auto size_of = [&](size_t i) {
      return std::min(kStagingBytes, from.bytes() - i * kStagingBytes);
    };
    for (size_t i = 0; i <= chunks; ++i) {  // chunk i comes in while chunk i - 1 is copied on
      if (i < chunks) {
        Gpu::Staging& s = staging(i);
        gpu_->ok(d_.copy_out(s.host, base + i * kStagingBytes, size_of(i), gpu_->stream),
                 "download ", buffer.label);
        gpu_->ok(d_.event_record(s.done, gpu_->stream), "download ", buffer.label);
      }
      if (i > 0) {
        Gpu::Staging& s = staging(i - 1);
        gpu_->ok(d_.event_wait(s.done), "download ", buffer.label);
        copy_parallel(target + (i - 1) * kStagingBytes, s.host, size_of(i - 1));
      }
    }
  }

  uint64_t address(const Tensor& t) override { return resolve(t).address + t.offset; }

  ProgramRef compile(CommandList list, bool reuse) override {
    const Current current(*gpu_);
    auto program = std::make_shared<CudaProgram>();
    program->gpu = gpu_;
    program->list = std::move(list);
    load_modules(program->list);
    program->kernels.resize(program->list.launches.size());
    for (size_t i = 0; i < program->kernels.size(); ++i) prepare(*program, i);
    if (reuse && !stepwise_ && !program->kernels.empty()) build_graph(*program);
    return program;
  }

  Ticket submit(const ProgramRef& ref, const std::atomic<bool>* cancel) override {
    const auto program = std::dynamic_pointer_cast<CudaProgram>(ref);
    check(program && program->gpu == gpu_, "cuda: the program was compiled for another device");
    const Current current(*gpu_);
    const std::lock_guard lock(mutex_);
    reap();
    while (in_flight_.size() >= kMaxInFlight) {
      const cuda::Result r = d_.event_wait(*in_flight_.front().done);
      if (r != cuda::kSuccess) fail_in_flight(r);
      reap();
    }
    Submission s;
    s.ticket = last_ticket_ + 1;
    s.program = program;
    s.cancelled = cancel && *cancel;
    s.done = gpu_->take_event(gpu_);
    if (!s.cancelled) launch(*program);
    gpu_->ok(d_.event_record(*s.done, gpu_->stream), program->list.label);
    in_flight_.push_back(std::move(s));
    return ++last_ticket_;
  }

  void wait(Ticket ticket) override {
    const Current current(*gpu_);
    finish(ticket);
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(cancelled_.begin(), cancelled_.end(),
                                    [&](const auto& c) { return c.first == ticket; });
    if (found != cancelled_.end()) throw Cancelled(concat(found->second, ": cancelled"));
  }

  double time_program(const ProgramRef& program, uint32_t n) override {
    check(n > 0, "time_program: 0 runs");
    const Current current(*gpu_);
    struct Timer {
      explicit Timer(Gpu& gpu) : driver(gpu.driver) {
        gpu.ok(driver.event_create(&event, 0), "timer");
      }
      ~Timer() { driver.event_destroy(event); }
      cuda::Driver& driver;
      cuda::Event event = nullptr;
    } from(*gpu_), to(*gpu_);
    gpu_->ok(d_.event_record(from.event, gpu_->stream), "timer");
    Ticket last = 0;
    for (uint32_t i = 0; i < n; ++i) last = submit(program, nullptr);
    gpu_->ok(d_.event_record(to.event, gpu_->stream), "timer");
    wait(last);
    gpu_->ok(d_.event_wait(to.event), "timer");
    float ms = 0;
    gpu_->ok(d_.event_elapsed(&ms, from.event, to.event), "timer");
    return double(ms) / 1000 / n;
  }

 private:
  struct Submission {
    Ticket ticket = 0;
    std::shared_ptr<CudaProgram> program;  // with its buffers
    std::shared_ptr<cuda::Event> done;
    bool cancelled = false;
  };

  const CudaBuffer& resolve(const Tensor& t) const {
    const auto* buffer = dynamic_cast<const CudaBuffer*>(t.buffer.get());
    check(buffer && buffer->gpu == gpu_, "cuda: the tensor is not of this device");
    check(t.offset <= buffer->size && t.bytes() <= buffer->size - t.offset, "cuda: ", buffer->label,
          " has ", buffer->size, " bytes, the tensor is ", t.bytes(), " from ", t.offset);
    return *buffer;
  }
  Gpu::Staging& staging(size_t i) {
    Gpu::Staging& s = gpu_->staging[i & 1];
    if (!s.done) gpu_->ok(d_.event_create(&s.done, cuda::kEventNoTiming), "staging buffer");
    if (!s.host) {
      void* host = nullptr;
      gpu_->ok(d_.host_allocate(&host, kStagingBytes, 0), "staging buffer");
      s.host = static_cast<std::byte*>(host);
    }
    return s;
  }

  // ---- programs ----
  std::string kernel_name(const Launch& l) const {
    return concat(variants()[l.variant].name, exact() ? "_f32" : "_bf16");
  }
  const Signature& signature(const Launch& l) const {
    const auto found = signatures_.find(kernel_name(l));
    check(found != signatures_.end(), "cuda: this build has no kernel ", kernel_name(l));
    return found->second;
  }
  // Looked up by name once: a prefill has hundreds of launches of a few kernels.
  const Loaded& loaded(const Launch& l) {
    const std::lock_guard lock(gpu_->module_mutex);
    Loaded& k = loaded_[l.variant];
    if (k.function) return k;
    const std::string name = kernel_name(l);
    k.signature = &signature(l);
    cuda::Function function = nullptr;
    gpu_->ok(d_.module_function(&function, gpu_->modules.at(k.signature->text), name.c_str()),
             name);
    gpu_->ok(d_.function_attribute(&k.most_threads, cuda::kFunctionMaxThreads, function), name);
    k.function = function;
    return k;
  }

  // The driver compiles PTX for the card at hand, seconds for all of it: only what is needed, and
  // files side by side.
  void load_modules(const CommandList& list) {
    const std::lock_guard lock(gpu_->module_mutex);
    std::map<size_t, std::string> missing;  // index into ptx_texts() -> error
    for (const Launch& l : list.launches) {
      if (loaded_[l.variant].function) continue;
      const size_t text = signature(l).text;
      if (!gpu_->modules.count(text)) missing[text];
    }
    std::mutex done_mutex;
    std::vector<std::thread> threads;
    for (auto& [text, error] : missing) {
      threads.emplace_back([this, &done_mutex, text = text, &error = error] {
        std::vector<char> log(8192, 0);
        int options[] = {cuda::kJitErrorLog, cuda::kJitErrorLogBytes};
        void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
        cuda::Module module = nullptr;
        cuda::Result r = d_.context_push(gpu_->context);
        if (r == cuda::kSuccess) {
          r = d_.module_load(&module, ptx_texts()[text].text, 2, options, values);
          d_.context_pop(nullptr);
        }
        const std::lock_guard lock(done_mutex);
        if (r == cuda::kSuccess) gpu_->modules[text] = module;
        else error = concat(gpu_->error_text(r), "\n", log.data());
      });
    }
    for (std::thread& t : threads) t.join();
    for (const auto& [text, error] : missing) {
      check<DeviceError>(error.empty(), "cuda: the driver cannot compile the kernels of ",
                         ptx_texts()[text].file, ".metal: ", error);
    }
  }

  // Handle and parameters of launch i, checked against what the kernel declares: a mismatch would
  // read past the parameters.
  void prepare(CudaProgram& program, size_t i) {
    Launch& l = program.list.launches[i];
    Kernel& kernel = program.kernels[i];
    const Loaded& k = loaded(l);
    const Signature& s = *k.signature;
    const size_t with_step = l.step.access != Access::none;
    const StepName name{program, i};
    check(s.before == l.args.size() && s.after == with_step, name, ": the kernel takes ", s.before,
          " buffers and ", s.after, " Step, the launch gives ", l.args.size(), " and ", with_step);
    check(s.params_bytes == l.params_size, name, ": the kernel's params have ", s.params_bytes,
          " bytes, the launch gives ", l.params_size);
    check(l.grid.x > 0 && l.grid.y > 0 && l.grid.z > 0 && l.grid.x <= 0x7fffffffu &&
              l.grid.y <= 65535 && l.grid.z <= 65535,
          name, ": grid ", l.grid.x, " x ", l.grid.y, " x ", l.grid.z,
          ", at most 2147483647 x 65535 x 65535");
    check(l.grid.threads <= uint32_t(k.most_threads), name, ": ", l.grid.threads,
          " threads a group, the kernel's registers allow ", k.most_threads);
    kernel.function = k.function;
    for (const Arg& a : l.args) kernel.pointers.push_back(a.tensor ? address(a.tensor) : 0);
    if (with_step) kernel.pointers.push_back(address(l.step.tensor));
    for (size_t a = 0; a < l.args.size(); ++a) kernel.slots.push_back(&kernel.pointers[a]);
    kernel.slots.push_back(program.list.params.data() + l.params_offset);
    if (with_step) kernel.slots.push_back(&kernel.pointers.back());
  }

  // One node a launch, an edge for each hazard that no other path implies already.
  void build_graph(CudaProgram& program) {
    const auto& launches = program.list.launches;
    struct Owner {
      ~Owner() {
        if (graph) driver.graph_destroy(graph);
      }
      cuda::Driver& driver;
      cuda::Graph graph = nullptr;
    } owner{d_};
    const std::string& label = program.list.label;
    gpu_->ok(d_.graph_create(&owner.graph, 0), label, ": graph");
    std::vector<cuda::GraphNode> nodes(launches.size());
    std::vector<std::vector<bool>> follows(launches.size());  // [i][j]: i runs after j
    for (size_t i = 0; i < launches.size(); ++i) {
      follows[i].assign(i, false);
      std::vector<cuda::GraphNode> after;
      for (size_t j = i; j-- > 0;) {  // the latest first: it may imply the earlier ones
        if (follows[i][j] || !conflicts(launches[j], launches[i])) continue;
        after.push_back(nodes[j]);
        follows[i][j] = true;
        for (size_t e = 0; e < j; ++e) {
          if (follows[j][e]) follows[i][e] = true;
        }
      }
      const Grid& g = launches[i].grid;
      const cuda::KernelNode node = {
          program.kernels[i].function,     g.x,    g.y, g.z, g.threads, 1, 1, 0,
          program.kernels[i].slots.data(), nullptr};
      gpu_->ok(d_.graph_add_kernel(&nodes[i], owner.graph, after.data(), after.size(), &node),
               StepName{program, i});
    }
    gpu_->ok(d_.graph_instantiate(&program.exec, owner.graph, 0), label, ": graph");
  }

  void launch(CudaProgram& program) {
    if (program.exec) {
      gpu_->ok(d_.graph_launch(program.exec, gpu_->stream), program.list.label);
      return;
    }
    for (size_t i = 0; i < program.kernels.size(); ++i) {
      const Grid& g = program.list.launches[i].grid;
      Kernel& k = program.kernels[i];
      cuda::Result r = d_.launch(k.function, g.x, g.y, g.z, g.threads, 1, 1, 0, gpu_->stream,
                                 k.slots.data(), nullptr);
      if (r == cuda::kSuccess && stepwise_) r = d_.stream_wait(gpu_->stream);
      gpu_->ok(r, StepName{program, i});
    }
  }

  // ---- tickets ----
  Ticket last_ticket() {
    const std::lock_guard lock(mutex_);
    return last_ticket_;
  }
  // Returns when everything up to `ticket` is complete. The mutex is free meanwhile, so that others
  // can submit.
  void finish(Ticket ticket) {
    std::shared_ptr<cuda::Event> done;
    {
      const std::lock_guard lock(mutex_);
      check(ticket <= last_ticket_, "cuda: ticket ", ticket, " was never given out, the last is ",
            last_ticket_);
      if (in_flight_.empty() || ticket < in_flight_.front().ticket) return;
      done = in_flight_[ticket - in_flight_.front().ticket].done;
    }
    const cuda::Result r = d_.event_wait(*done);
    const std::lock_guard lock(mutex_);
    if (r != cuda::kSuccess) fail_in_flight(r);
    reap();
  }
  // Drops what is complete, in order. Needs the mutex.
  void reap() {
    while (!in_flight_.empty()) {
      Submission& s = in_flight_.front();
      const cuda::Result r = d_.event_query(*s.done);
      if (r == cuda::kNotReady) return;
      if (r != cuda::kSuccess) fail_in_flight(r);
      if (s.cancelled) {
        cancelled_.emplace_back(s.ticket, s.program->list.label);
        if (cancelled_.size() > kMaxInFlight) cancelled_.pop_front();
      }
      in_flight_.pop_front();
    }
  }
  // The driver does not say which submission failed: it is the oldest that is not known to be done,
  // or one behind it.
  [[noreturn]] void fail_in_flight(cuda::Result r) {
    std::string labels;
    for (const Submission& s : in_flight_) {
      if (labels.size() < 200)
        labels += concat(labels.empty() ? "" : ", then ", s.program->list.label);
    }
    if (labels.empty()) labels = "copies";
    gpu_->fail(r, concat("in flight: ", labels, ": ", gpu_->error_text(r),
                         ". Run again with LILY_SYNC=1 to see which step fails"));
  }

  const std::shared_ptr<Gpu> gpu_;
  cuda::Driver& d_;
  const std::string description_;
  const uint64_t limit_;
  const std::unordered_map<std::string, Signature> signatures_;
  // By variant; guarded by module_mutex.
  std::vector<Loaded> loaded_ = std::vector<Loaded>(variants().size());
  const bool poison_;    // fresh memory is NaN
  const bool stepwise_;  // no graphs; each step is waited for, so an error names it
  std::mutex mutex_;     // guards all below and the order of launches
  Ticket last_ticket_ = 0;
  std::deque<Submission> in_flight_;
  std::deque<std::pair<Ticket, std::string>> cancelled_;  // the latest
};

}  // namespace

DeviceRef make_cuda(bool exact, std::string& why) {
  const auto gpu = std::make_shared<Gpu>();
  const cuda::Driver& d = gpu->driver;
  why = load_driver(gpu->driver);
  if (!why.empty()) return nullptr;
  try {
    int version = 0, count = 0, major = 0, minor = 0;
    gpu->ok(d.driver_version(&version), "driver version");
    if (version < kDriverNeeded) {
      why = concat("the NVIDIA driver is too old: it supports CUDA ", version_text(version),
                   ", lily's kernels (PTX 7.8) need CUDA ", version_text(kDriverNeeded));
      return nullptr;
    }
    const cuda::Result started = d.init(0);
    if (started != cuda::kNoDevice) gpu->ok(started, "start the driver");
    if (started == cuda::kSuccess) gpu->ok(d.device_count(&count), "count devices");
    if (count == 0) {
      why = "the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES may hide it)";
      return nullptr;
    }
    char name[128] = {};
    gpu->ok(d.device_get(&gpu->id, 0), "device 0");
    gpu->ok(d.device_name(name, sizeof(name) - 1, gpu->id), "device 0");
    gpu->ok(d.device_attribute(&major, cuda::kAttributeMajor, gpu->id), name);
    gpu->ok(d.device_attribute(&minor, cuda::kAttributeMinor, gpu->id), name);
    if (major < 8) {
      why =
          concat(name, " has compute capability ", major, ".", minor, ", lily needs 8.0 or later");
      return nullptr;
    }
    gpu->ok(d.context_retain(&gpu->context, gpu->id), name);
    const Current current(*gpu);
    gpu->ok(d.stream_create(&gpu->stream, cuda::kStreamNonBlocking), name);
    size_t free = 0, total = 0;
    gpu->ok(d.memory_info(&free, &total), name);
    // Left to the driver: modules, graphs, spilled registers, fragmentation.
    const size_t reserve = (512u << 20) + total / 64;
    return std::make_shared<CudaDevice>(gpu, exact,
                                        concat(name, ", compute capability ", major, ".", minor,
                                               ", ", gib(total), ", CUDA ", version_text(version)),
                                        free > reserve ? free - reserve : 0);
  } catch (const DeviceError& e) {
    why = e.what();
    return nullptr;
  }
}

}  // namespace lily

#endif  // LILY_HAS_CUDA
