// metal.mm: the Apple GPU: kernels from the embedded text, pipelines and their archive, memory and
// residency, command buffers in order, tickets and faults. The only Objective-C++ (ARC).
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "device.h"
#include "host_queue.h"
#include "metal_split.h"
#include "metal_text.h"
#include "metal_tickets.h"
#include "metal_tile.h"
#include "ops.h"

#if !__has_feature(objc_arc)
#error "metal.mm needs -fobjc-arc"
#endif

namespace lily {
namespace {

constexpr size_t kParamsAlignment = 256;  // what a Mac may ask of offsets into constant memory
constexpr size_t kArgumentAlignment = 4;  // and of others, at least
constexpr size_t kReserve = 256u << 20;   // left to pipelines, params and the driver
constexpr size_t kNothingBytes = 256;     // bound where an optional argument is absent
constexpr int kRevokedLimit = 3;          // hangs in a row after which the device counts as lost

NSString* ns(std::string_view s) {
  return [[NSString alloc] initWithBytes:s.data() length:s.size() encoding:NSUTF8StringEncoding];
}
std::string text(NSString* s) { return s ? [s UTF8String] : ""; }
std::string reason(NSError* e) {
  if (!e) return "no reason given";
  return concat(text(e.localizedDescription), " (", text(e.domain), " ", e.code, ")");
}
std::string gib(uint64_t bytes) {
  std::ostringstream out;
  out.precision(4);
  out << double(bytes) / double(1u << 30) << " GiB";
  return out.str();
}
std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Runs f with an autorelease pool of its own. An exception would leave a pool open that it passes,
// so it waits outside.
template <typename F>
auto pooled(F&& f) {
  std::exception_ptr error;
  @autoreleasepool {
    try {
      return f();
    } catch (...) {
      error = std::current_exception();
    }
  }
  std::rethrow_exception(error);
}

// The device and queue. Shared by the device object, its buffers, programs and handlers: whoever
// lives longest can still give back what it holds.
class Gpu {
 public:
  explicit Gpu(id<MTLDevice> device_) : device(device_), queue([device newCommandQueue]) {
    check<DeviceError>(queue != nil, "Metal gives no command queue");
    queue.label = @"lily";
    fence = [device newFence];
    check<DeviceError>(fence != nil, "Metal gives no fence");
    fence.label = @"order of command buffers";
    if (@available(macOS 15, *)) {
      MTLResidencySetDescriptor* descriptor = [[MTLResidencySetDescriptor alloc] init];
      descriptor.label = @"lily";
      // Paravirtual devices have none: then each encoder names what it reaches by address.
      id<MTLResidencySet> set = [device newResidencySetWithDescriptor:descriptor error:nil];
      if (set) {
        [queue addResidencySet:set];
        [set requestResidency];
        residency_ = set;
      }
    }
  }
  ~Gpu() {
    @autoreleasepool {
      if (@available(macOS 15, *)) {
        id<MTLResidencySet> set = residency_;
        if (set) {
          [queue removeResidencySet:set];
          [set endResidency];
        }
      }
    }
  }
  bool has_residency() const { return residency_ != nil; }
  // Committed at once: a command buffer sees the set as it is when the buffer is committed.
  void add_resident(id<MTLBuffer> buffer) {
    if (@available(macOS 15, *)) {
      const std::lock_guard lock(residency_mutex_);
      id<MTLResidencySet> set = residency_;
      [set addAllocation:buffer];
      [set commit];
    }
  }
  void remove_resident(id<MTLBuffer> buffer) {
    if (@available(macOS 15, *)) {
      const std::lock_guard lock(residency_mutex_);
      id<MTLResidencySet> set = residency_;
      [set removeAllocation:buffer];
      [set commit];
    }
  }

  // After these faults nothing runs any more: the GPU is gone, or the system takes no further work
  // of this process (at once, or because it hung again and again).
  void faulted(NSInteger code, const std::string& what) {
    const std::lock_guard lock(lost_mutex_);
    const bool revoked = code == MTLCommandBufferErrorAccessRevoked && ++revoked_ >= kRevokedLimit;
    if (!revoked && code != MTLCommandBufferErrorDeviceRemoved &&
        code != MTLCommandBufferErrorNotPermitted) {
      return;
    }
    if (!lost_) lost_text_ = what;
    lost_ = true;
  }
  void worked() {
    const std::lock_guard lock(lost_mutex_);
    revoked_ = 0;
  }
  void check_alive() {
    if (!lost_) return;
    const std::lock_guard lock(lost_mutex_);
    throw DeviceError(concat("metal: the device was lost earlier: ", lost_text_), true);
  }
  bool in_fork() const { return getpid() != process_; }

  const id<MTLDevice> device;
  const id<MTLCommandQueue> queue;
  // A fence, no event: a buffer that dies signals no event, and the buffers behind it would hang.
  id<MTLFence> fence;

 private:
  std::mutex residency_mutex_;
  id residency_ = nil;  // MTLResidencySet; nil where there is none
  std::atomic<bool> lost_ = false;
  std::mutex lost_mutex_;
  int revoked_ = 0;  // command buffers in a row
  std::string lost_text_;
  const pid_t process_ = getpid();
};

struct MetalBuffer final : Buffer {
  MetalBuffer(std::shared_ptr<Gpu> gpu_, id<MTLBuffer> buffer, std::string_view name,
              std::shared_ptr<std::atomic<uint64_t>> account_)
      : gpu(std::move(gpu_)), account(std::move(account_)), mtl(buffer) {
    size = buffer.length;
    label = name;
    mtl.label = ns(name);
    contents = static_cast<std::byte*>(mtl.contents);
    gpu->add_resident(mtl);
  }
  ~MetalBuffer() override {
    if (account) *account -= size;
    if (gpu->in_fork()) {  // Metal does not work in a fork: what it holds there is left alone
      (void)(__bridge_retained void*)mtl;
      return;
    }
    @autoreleasepool {
      // Nothing in flight uses it: programs hold their buffers and flights their programs.
      gpu->remove_resident(mtl);
      mtl = nil;
    }
  }
  const std::shared_ptr<Gpu> gpu;
  const std::shared_ptr<std::atomic<uint64_t>> account;  // null: it counts for nobody
  id<MTLBuffer> mtl;
  std::byte* contents;
};

// Shared: the GPU and the host have the same memory. Untracked: order is ours (barriers, fence).
std::shared_ptr<MetalBuffer> make_buffer(const std::shared_ptr<Gpu>& gpu, size_t bytes,
                                         std::string_view label,
                                         std::shared_ptr<std::atomic<uint64_t>> account) {
  id<MTLBuffer> buffer = [gpu->device
      newBufferWithLength:bytes
                  options:MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked];
  if (!buffer) return nullptr;
  return std::make_shared<MetalBuffer>(gpu, buffer, label, std::move(account));
}

// ---- pipelines ---------------------------------------------------------------------------------

// The kernels of one mode: all libraries at the first call, a pipeline when a program needs it. What
// the GPU's compiler made is kept in an archive in the user's cache; what that lacks is made anew. A
// file that does not compile fails the programs that need a kernel of it, and no others. Kernels with
// a tile are there in both forms.
class Pipelines {
 public:
  Pipelines(std::shared_ptr<Gpu> gpu, bool exact) : gpu_(std::move(gpu)), exact_(exact) {}

  // By variant, for every launch of the list.
  std::map<uint16_t, id<MTLComputePipelineState>> get(const CommandList& list, TileForm form) {
    const std::lock_guard lock(mutex_);
    if (plain_.by_kernel.empty() && !list.launches.empty()) load();
    const bool tensor = form == TileForm::tensor;
    if (tensor && tensor_.by_kernel.empty()) load_tensor();
    std::map<uint16_t, id<MTLComputePipelineState>> wanted;
    for (const Launch& l : list.launches) wanted[l.variant] = nil;
    std::vector<Build> builds;
    for (auto& [variant, pipeline] : wanted) {
      const std::string name = variants()[variant].name;
      Libraries& from = tensor && tensor_.by_kernel.count(name) ? tensor_ : plain_;
      const auto found = from.built.find(variant);
      if (found != from.built.end()) pipeline = found->second;
      else builds.push_back({variant, name, &from, nil, nil, false, ""});
    }
    in_parallel(builds, [this](Build& b) { build(b); });
    bool grown = false;
    for (Build& b : builds) {
      // Compiled anew when asked again.
      if (!b.pipeline && !b.from->broken.empty()) b.from->by_kernel.clear();
      check<DeviceError>(b.pipeline != nil, b.error);
      wanted[b.variant] = b.from->built[b.variant] = b.pipeline;
      if (b.missed && archive_) {
        grown |= [archive_ addComputePipelineFunctionsWithDescriptor:b.descriptor error:nil];
      }
    }
    if (grown) save();
    return wanted;
  }

  // What is kept of an earlier process' trial of tiles; empty when there was none.
  std::string kept_trial() {
    const std::lock_guard lock(mutex_);
    if (plain_.by_kernel.empty()) load();
    std::string kept;
    if (!path_.empty()) std::getline(std::ifstream(path_ + ".tile"), kept);
    return kept;
  }
  void keep_trial(const std::string& line) {
    const std::lock_guard lock(mutex_);
    if (path_.empty()) return;
    replace_file(path_ + ".tile", [&](const std::string& fresh) {
      std::ofstream out(fresh, std::ios::binary);
      out << line << "\n";
      return bool(out.flush());
    });
  }

 private:
  struct Library {
    std::string file, source;
    id<MTLLibrary> library;
    std::string error;
  };
  struct Libraries {
    std::map<std::string, id<MTLLibrary>> by_kernel;
    std::string broken;  // what the compiler said of the others
    std::map<uint16_t, id<MTLComputePipelineState>> built;
  };
  struct Build {
    uint16_t variant;
    std::string name;
    Libraries* from;
    MTLComputePipelineDescriptor* descriptor;
    id<MTLComputePipelineState> pipeline;
    bool missed;  // by the archive
    std::string error;
  };

  // Compiling takes long and is the compiler's own process: one call per core.
  template <typename T, typename F>
  static void in_parallel(std::vector<T>& items, F&& f) {
    std::atomic<size_t> next = 0;
    std::vector<std::thread> threads;
    const size_t cores = std::max(1u, std::thread ::hardware_concurrency());
    for (size_t t = 0; t < std::min(items.size(), cores); ++t) {
      threads.emplace_back([&] {
        for (size_t i = next++; i < items.size(); i = next++) {
          @autoreleasepool {
            f(items[i]);
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }

  void load() {
    std::vector<Library> libraries;
    uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    const auto mix = [&hash](std::string_view s) {
      for (const char c : s) hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
      hash = (hash ^ 0xff) * 0x100000001b3u;
    };
    MTLLanguageVersion version = MTLLanguageVersion3_1;
    if (@available(macOS 26, *)) version = MTLLanguageVersion4_0;
    for (const std::string& file : metal_files()) {
      libraries.push_back({file, metal_source(file, exact_), nil, ""});
      mix(libraries.back().source);
    }
    mix(std::to_string(version));
    mix(text(NSProcessInfo.processInfo.operatingSystemVersionString));  // with the build
    mix(text(gpu_->device.name));
    compile(libraries, version, plain_);
    open_archive(hash);
  }
  void load_tensor() {
    std::vector<Library> libraries;
    for (const std::string& file : metal_files()) {
      const std::string source = metal_source(file, exact_, true);
      if (source.find("\n#line 1 \"tile.h\"\n") == source.npos) continue;
      libraries.push_back({file, source, nil, ""});
    }
    if (@available(macOS 26, *)) compile(libraries, MTLLanguageVersion4_0, tensor_);
    if (!tensor_.broken.empty()) tensor_.by_kernel.clear();
    check<DeviceError>(!tensor_.by_kernel.empty(), "tensor operations: ", tensor_.broken);
  }

  void compile(std::vector<Library>& libraries, MTLLanguageVersion version, Libraries& to) {
    in_parallel(libraries, [&](Library& l) {
      MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
      options.languageVersion = version;
      // The text counts on IEEE arithmetic: infinities, NaN and the order of sums.
      if (@available(macOS 15, *)) {
        options.mathMode = MTLMathModeSafe;
        options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
      } else {
        options.fastMathEnabled = NO;
      }
      NSError* error = nil;
      l.library = [gpu_->device newLibraryWithSource:ns(l.source) options:options error:&error];
      l.library.label = ns(l.file);
      if (!l.library) l.error = reason(error);
    });
    to.broken.clear();
    for (const Library& l : libraries) {
      if (!l.library) {
        to.broken +=
            concat(to.broken.empty() ? "metal: " : "\n", l.file, ".metal does not compile as MSL ",
                   version >> 16, ".", version & 0xffff, ": ", l.error);
        continue;
      }
      NSArray<NSString*>* names = l.library.functionNames;
      for (NSUInteger i = 0; i < names.count; ++i) to.by_kernel[text(names[i])] = l.library;
    }
  }

  void open_archive(uint64_t key) {
    std::string folder = environment("LILY_CACHE");
    const std::string home = environment("HOME");
    if (folder.empty() && !home.empty()) folder = home + "/Library/Caches/lily";
    if (folder.empty()) return;
    std::ostringstream name;
    name << folder << "/pipelines-" << std::hex << key << ".metalarchive";
    path_ = name.str();
    MTLBinaryArchiveDescriptor* descriptor = [[MTLBinaryArchiveDescriptor alloc] init];
    std::error_code ignored;
    if (std::filesystem::exists(path_, ignored)) {
      descriptor.url = [NSURL fileURLWithPath:ns(path_)];
      archive_ = [gpu_->device newBinaryArchiveWithDescriptor:descriptor error:nil];
      descriptor.url = nil;
    }
    // None yet, or one that cannot be read: a new one takes its place.
    if (!archive_) archive_ = [gpu_->device newBinaryArchiveWithDescriptor:descriptor error:nil];
  }
  // Another process sees the old file or the new one. Without a place to write there is none.
  template <typename F>
  static void replace_file(const std::string& path, F&& write) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
    const std::string fresh = concat(path, ".", getpid());
    if (write(fresh)) std::filesystem::rename(fresh, path, ignored);
    std::filesystem::remove(fresh, ignored);
  }
  void save() {
    replace_file(path_, [this](const std::string& fresh) {
      return [archive_ serializeToURL:[NSURL fileURLWithPath:ns(fresh)] error:nil] == YES;
    });
  }

  void build(Build& b) {
    const auto library = b.from->by_kernel.find(b.name);
    if (library == b.from->by_kernel.end()) {
      b.error = b.from->broken.empty()
                    ? concat("metal: pipeline ", b.name, ": no kernel file defines it")
                    : concat(b.from->broken, "\n(wanted: ", b.name, ")");
      return;
    }
    b.descriptor = [[MTLComputePipelineDescriptor alloc] init];
    b.descriptor.label = ns(b.name);
    b.descriptor.computeFunction = [library->second newFunctionWithName:ns(b.name)];
    b.descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth = YES;
    NSError* error = nil;
    if (archive_) {
      b.descriptor.binaryArchives = @[ archive_ ];
      b.pipeline = [gpu_->device
          newComputePipelineStateWithDescriptor:b.descriptor
                                        options:MTLPipelineOptionFailOnBinaryArchiveMiss
                                     reflection:nil
                                          error:&error];
    }
    b.missed = b.pipeline == nil;
    if (!b.missed) return;
    b.pipeline = [gpu_->device newComputePipelineStateWithDescriptor:b.descriptor
                                                             options:MTLPipelineOptionNone
                                                          reflection:nil
                                                               error:&error];
    if (!b.pipeline) b.error = concat("metal: pipeline ", b.name, ": ", reason(error));
  }

  const std::shared_ptr<Gpu> gpu_;
  const bool exact_;
  std::mutex mutex_;          // guards all below
  Libraries plain_, tensor_;  // tensor: of the files with a tile, once asked for
  id<MTLBinaryArchive> archive_ = nil;
  std::string path_;
};

// ---- programs ----------------------------------------------------------------------------------

struct Kernel {
  id<MTLComputePipelineState> pipeline = nil;
  std::vector<__unsafe_unretained id<MTLBuffer>> buffers;  // in binding order; the list holds them
  std::vector<NSUInteger> offsets;
  bool barrier = false;  // before it: it needs what a launch since the last barrier did
  NSString* name = nil;
};
// One command buffer.
struct Part {
  size_t begin = 0, end = 0;
  NSString* label = nil;
  std::vector<__unsafe_unretained id<MTLResource>> reached;  // by address; empty with residency
};
struct MetalProgram final : Program {
  std::string step_name(size_t i) const {
    return concat("step ", i, " ", variants()[list.launches[i].variant].name);
  }
  std::shared_ptr<Gpu> gpu;
  CommandList list;  // keeps the buffers
  std::shared_ptr<MetalBuffer> params, nothing;
  std::vector<Kernel> kernels;
  std::vector<Part> parts;
};

// ---- faults ------------------------------------------------------------------------------------

// What the driver says of a failed command buffer, with the step that ran.
std::string fault_text(id<MTLCommandBuffer> buffer, const MetalProgram& program, const Part& part) {
  std::string where = concat(program.list.label, ": ", text(part.label));
  NSArray<id<MTLCommandBufferEncoderInfo>>* infos =
      buffer.error.userInfo[MTLCommandBufferEncoderInfoErrorKey];
  for (NSUInteger i = 0; i < infos.count; ++i) {
    id<MTLCommandBufferEncoderInfo> info = infos[i];
    NSArray<NSString*>* begun = info.debugSignposts;
    if (info.errorState == MTLCommandEncoderErrorStateFaulted && begun.count > 0) {
      where = concat(program.list.label, ": ", text(begun[begun.count - 1]));
    }
  }
  return concat(where, ": ", reason(buffer.error), ", status ", buffer.status);
}

// ---- the device --------------------------------------------------------------------------------

class MetalDevice final : public Device {
 public:
  MetalDevice(std::shared_ptr<Gpu> gpu, bool exact, std::string description)
      : Device(exact),
        gpu_(std::move(gpu)),
        description_(std::move(description)),
        working_set_(gpu_->device.recommendedMaxWorkingSetSize),
        longest_(gpu_->device.maxBufferLength),
        limit_(working_set_ > kReserve ? working_set_ - kReserve : 0),
        poison_(!environment("LILY_POISON").empty() && environment("LILY_POISON") != "0"),
        nothing_(make_buffer(gpu_, kNothingBytes, "nothing", nullptr)),
        pipelines_(gpu_, exact) {
    check<DeviceError>(nothing_ != nullptr, "Metal gives no ", kNothingBytes, " bytes of memory");
  }

  std::string name() const override { return "metal"; }
  std::string description() const override {
    const std::lock_guard lock(tile_mutex_);
    if (tile_.why.empty()) return description_;
    return concat(description_, ", ", tile_form_name(tile_.form), " (", tile_.why, ")");
  }
  Family family() const override { return Family::apple; }
  uint64_t memory_limit() const override { return limit_; }

  BufferRef allocate(size_t bytes, std::string_view label, Memory memory) override {
    check(bytes > 0, "metal: allocation of 0 bytes for ", label);
    enter();
    return pooled([&]() -> BufferRef {
      const uint64_t before = allocated_->fetch_add(bytes);
      std::shared_ptr<MetalBuffer> buffer;
      std::string why;
      if (bytes > longest_) {
        why = concat("one buffer has at most ", longest_);
      } else if (bytes > limit_ || before > limit_ - bytes) {
        why = concat(before, " of ", limit_, " are in use, ", limit_ > before ? limit_ - before : 0,
                     " left");
      } else if (!(buffer = make_buffer(gpu_, bytes, label, allocated_))) {
        why = concat("Metal refuses it with ", before, " of ", limit_, " in use");
      }
      if (!buffer) {
        *allocated_ -= bytes;
        throw LilyError(
            concat("metal: ", label, " needs ", bytes, " bytes (", gib(bytes), "), ", why));
      }
      if (poison_) std::memset(buffer->contents, 0xff, bytes);
      // The rest of the memory is the host's as well, but nothing may count on it: see Memory.
      if (memory == Memory::shared) buffer->host = buffer->contents;
      return buffer;
    });
  }

  void upload(const Tensor& to, const void* from) override {
    const MetalBuffer& buffer = resolve(to);
    enter();
    finish();
    std::memcpy(buffer.contents + to.offset, from, to.bytes());
  }
  void download(const Tensor& from, void* to) override {
    const MetalBuffer& buffer = resolve(from);
    enter();
    finish();
    std::memcpy(to, buffer.contents + from.offset, from.bytes());
  }
  uint64_t address(const Tensor& t) override {
    const MetalBuffer& buffer = resolve(t);
    return pooled([&] { return buffer.mtl.gpuAddress + t.offset; });
  }

  ProgramRef compile(CommandList list, bool) override {
    enter();
    const TileForm form = has_tile(list) ? tile_form() : TileForm::simdgroup;
    return compile_with(std::move(list), form);
  }
  ProgramRef compile_with(CommandList list, TileForm form) {
    return pooled([&]() -> ProgramRef {
      auto program = std::make_shared<MetalProgram>();
      program->gpu = gpu_;
      program->nothing = nothing_;
      program->list = std::move(list);
      const auto pipelines = pipelines_.get(program->list, form);
      program->kernels.resize(program->list.launches.size());
      std::vector<size_t> params = place_params(*program);
      for (size_t i = 0; i < program->kernels.size(); ++i) {
        prepare(*program, i, pipelines.at(program->list.launches[i].variant), params[i]);
      }
      size_t begin = 0;
      for (const size_t end : command_buffer_ends(program->list)) {
        prepare_part(*program, begin, end);
        begin = end;
      }
      return program;
    });
  }

  Ticket submit(const ProgramRef& ref, const std::atomic<bool>* cancel) override {
    return submit_timed(ref, cancel, nullptr);
  }

  void wait(Ticket ticket) override {
    queue_.check_process();
    std::exception_ptr ended;
    try {
      queue_.wait(ticket);
    } catch (...) {
      ended = std::current_exception();
    }
    tickets_->wait(ticket);  // also of what was cancelled half-way
    const std::string failure = tickets_->outcome(ticket);
    gpu_->check_alive();
    if (!failure.empty()) throw DeviceError(concat("metal: ", failure));
    if (ended) std::rethrow_exception(ended);
  }

  double time_program(const ProgramRef& program, uint32_t n) override {
    check(n > 0, "time_program: 0 runs");
    const auto timing = std::make_shared<Timing>();
    Ticket last = 0;
    for (uint32_t i = 0; i < n; ++i) last = submit_timed(program, nullptr, timing);
    wait(last);
    return timing->busy / n;
  }

 private:
  void enter() {
    queue_.check_process();
    gpu_->check_alive();
  }
  // Returns when everything submitted before the call is complete, whether it failed or not.
  void finish() {
    const Ticket last = tickets_->last();
    queue_.drain();
    tickets_->wait(last);
  }

  MetalBuffer& resolve(const Tensor& t) const {
    auto* buffer = dynamic_cast<MetalBuffer*>(t.buffer.get());
    check(buffer && buffer->gpu == gpu_, "metal: the tensor is not of this device");
    check(t.offset <= buffer->size && t.bytes() <= buffer->size - t.offset,
          "metal: ", buffer->label, " has ", buffer->size, " bytes, the tensor is ", t.bytes(),
          " from ", t.offset);
    return *buffer;
  }

  // The first list with a tile decides for all: by a trial, or by what an earlier process found.
  TileForm tile_form() {
    const std::lock_guard lock(tile_mutex_);
    if (!tile_.why.empty()) return tile_.form;
    bool there = false;
    if (@available(macOS 26, *)) there = [gpu_->device supportsFamily:MTLGPUFamilyMetal4];
    if (exact() || !there) {  // fp32 operands gain nothing
      tile_ = {TileForm::simdgroup, exact() ? "exact mode" : "the system has no other"};
      return tile_.form;
    }
    const std::string kept = pooled([&] { return pipelines_.kept_trial(); });
    for (const TileForm form : {TileForm::simdgroup, TileForm::tensor}) {
      if (kept == tile_form_name(form)) tile_ = {form, "by an earlier trial"};
    }
    if (!tile_.why.empty()) return tile_.form;
    try {
      tile_ = try_tiles(*this, [this](CommandList list, TileForm form) {
        return compile_with(std::move(list), form);
      });
    } catch (const DeviceError&) {
      throw;
    } catch (const LilyError& e) {  // no memory left for it
      tile_ = {TileForm::simdgroup, e.what()};
      return tile_.form;
    }
    pooled([&] { pipelines_.keep_trial(tile_form_name(tile_.form)); });
    return tile_.form;
  }

  // ---- programs ----
  // The params in a buffer of their own, each at an offset that a Mac takes. Returns the offsets.
  std::vector<size_t> place_params(MetalProgram& program) {
    std::vector<size_t> offsets;
    size_t bytes = 0;
    for (const Launch& l : program.list.launches) {
      offsets.push_back(bytes);
      bytes += (l.params_size + kParamsAlignment - 1) / kParamsAlignment * kParamsAlignment;
    }
    if (bytes == 0) return offsets;
    program.params = make_buffer(gpu_, bytes, concat("params of ", program.list.label), nullptr);
    check(program.params != nullptr, "metal: ", program.list.label, ": no ", bytes,
          " bytes for params");
    for (size_t i = 0; i < offsets.size(); ++i) {
      const Launch& l = program.list.launches[i];
      std::memcpy(program.params->contents + offsets[i],
                  program.list.params.data() + l.params_offset, l.params_size);
    }
    return offsets;
  }

  void prepare(MetalProgram& program, size_t i, id<MTLComputePipelineState> pipeline,
               size_t params) {
    const Launch& l = program.list.launches[i];
    Kernel& kernel = program.kernels[i];
    const std::string step = program.step_name(i), where = concat(program.list.label, ": ", step);
    kernel.name = ns(step);
    kernel.pipeline = pipeline;
    check(l.grid.x > 0 && l.grid.y > 0 && l.grid.z > 0, where, ": grid ", l.grid.x, " x ", l.grid.y,
          " x ", l.grid.z, " is empty");
    check(l.grid.threads <= pipeline.maxTotalThreadsPerThreadgroup, where, ": ", l.grid.threads,
          " threads a group, the kernel's registers allow ",
          pipeline.maxTotalThreadsPerThreadgroup);
    check(pipeline.threadExecutionWidth == 32, where, ": simdgroups of ",
          pipeline.threadExecutionWidth, " threads, the kernels are written for 32");
    check(pipeline.staticThreadgroupMemoryLength <= gpu_->device.maxThreadgroupMemoryLength, where,
          ": ", pipeline.staticThreadgroupMemoryLength,
          " bytes of threadgroup memory, the GPU has ", gpu_->device.maxThreadgroupMemoryLength);
    const auto bind = [&](id<MTLBuffer> buffer, size_t offset, size_t alignment) {
      check(offset % alignment == 0, where, ": argument ", kernel.buffers.size(), " begins at ",
            offset, ", must be a multiple of ", alignment);
      kernel.buffers.push_back(buffer);
      kernel.offsets.push_back(offset);
    };
    const auto bind_tensor = [&](const Tensor& t) {
      if (t) bind(resolve(t).mtl, t.offset, kArgumentAlignment);
      else bind(nothing_->mtl, 0, kArgumentAlignment);
    };
    for (const Arg& a : l.args) bind_tensor(a.tensor);
    if (l.params_size > 0) bind(program.params->mtl, params, kParamsAlignment);
    if (l.step.access != Access::none) bind_tensor(l.step.tensor);
  }

  // Barriers, and what the part reaches by address.
  void prepare_part(MetalProgram& program, size_t begin, size_t end) {
    const auto& launches = program.list.launches;
    Part part;
    part.begin = begin;
    part.end = end;
    part.label = ns(concat("steps ", begin, " to ", end - 1));
    size_t since = begin;  // the first launch that no barrier is behind
    for (size_t i = begin; i < end; ++i) {
      const auto needed = [&](const Launch& before) { return conflicts(before, launches[i]); };
      if (std::any_of(launches.begin() + since, launches.begin() + i, needed)) {
        program.kernels[i].barrier = true;
        since = i;
      }
      if (gpu_->has_residency()) continue;
      for (const Arg& a : launches[i].unbound) {
        auto& list = part.reached;
        id<MTLBuffer> buffer = resolve(a.tensor).mtl;
        if (std::find(list.begin(), list.end(), buffer) == list.end()) list.push_back(buffer);
      }
    }
    program.parts.push_back(std::move(part));
  }

  // ---- submissions ----
  Ticket submit_timed(const ProgramRef& ref, const std::atomic<bool>* cancel,
                      const std::shared_ptr<Timing>& timing) {
    const auto program = std::dynamic_pointer_cast<MetalProgram>(ref);
    check(program && program->gpu == gpu_, "metal: the program was compiled for another device");
    enter();
    const std::lock_guard lock(submit_mutex_);
    const Ticket ticket = tickets_->give();
    const Ticket pushed = queue_.push(
        [this, program, cancel, timing, ticket] { run(program, cancel, timing, ticket); });
    check(pushed == ticket, "metal: ticket ", pushed, " was expected to be ", ticket);
    return ticket;
  }

  // On the queue's worker: commits the program part by part as the GPU gets on, so that a flag
  // raised meanwhile stops the rest.
  void run(const std::shared_ptr<MetalProgram>& program, const std::atomic<bool>* cancel,
           const std::shared_ptr<Timing>& timing, Ticket ticket) {
    for (size_t p = 0; p < program->parts.size(); ++p) {
      tickets_->wait_for_room();
      if (tickets_->fails(ticket)) return;
      check<Cancelled>(!(cancel && cancel->load(std::memory_order_relaxed)), program->list.label,
                       ": cancelled");
      @autoreleasepool {
        auto flight = std::make_shared<Flight>();
        flight->ticket = ticket;
        flight->program = program;
        flight->timing = timing;
        commit(flight, *program, program->parts[p]);
      }
    }
  }

  void commit(const std::shared_ptr<Flight>& flight, const MetalProgram& program,
              const Part& part) {
    MTLCommandBufferDescriptor* descriptor = [[MTLCommandBufferDescriptor alloc] init];
    descriptor.retainedReferences = NO;  // the flight holds all of it
    descriptor.errorOptions = MTLCommandBufferErrorOptionEncoderExecutionStatus;
    id<MTLCommandBuffer> buffer = [gpu_->queue commandBufferWithDescriptor:descriptor];
    const std::string where = concat(program.list.label, ": ", text(part.label));
    if (!buffer) {
      tickets_->fail(flight->ticket, concat(where, ": Metal gives no command buffer"));
      return;
    }
    buffer.label = ns(where);
    id<MTLComputeCommandEncoder> encoder =
        [buffer computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
    if (!encoder) {
      tickets_->fail(flight->ticket, concat(where, ": Metal gives no encoder"));
      return;
    }
    encoder.label = buffer.label;
    encode(encoder, program, part);
    // Copies: a block keeps the variables it names, and these are members or references.
    const std::shared_ptr<Gpu> gpu = gpu_;
    const std::shared_ptr<Tickets> tickets = tickets_;
    const std::shared_ptr<Flight> landing = flight;
    const Part* const of = &part;  // the flight's program keeps it
    [buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      @autoreleasepool {
        complete(*gpu, *tickets, *landing, *of, done);
      }
    }];
    tickets_->take_off(flight);
    [buffer commit];
  }

  void encode(id<MTLComputeCommandEncoder> encoder, const MetalProgram& program, const Part& part) {
    if (fenced_) [encoder waitForFence:gpu_->fence];
    if (!part.reached.empty()) {
      [encoder useResources:part.reached.data()
                      count:part.reached.size()
                      usage:MTLResourceUsageRead | MTLResourceUsageWrite];
    }
    for (size_t i = part.begin; i < part.end; ++i) {
      const Kernel& k = program.kernels[i];
      const Grid& g = program.list.launches[i].grid;
      if (k.barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
      [encoder insertDebugSignpost:k.name];
      [encoder setComputePipelineState:k.pipeline];
      [encoder setBuffers:k.buffers.data()
                  offsets:k.offsets.data()
                withRange:NSMakeRange(0, k.buffers.size())];
      [encoder dispatchThreadgroups:MTLSizeMake(g.x, g.y, g.z)
              threadsPerThreadgroup:MTLSizeMake(g.threads, 1, 1)];
    }
    [encoder updateFence:gpu_->fence];
    fenced_ = true;
    [encoder endEncoding];
  }

  // On a thread of Metal's.
  static void complete(Gpu& gpu, Tickets& tickets, Flight& flight, const Part& part,
                       id<MTLCommandBuffer> buffer) {
    flight.start = buffer.GPUStartTime;
    flight.end = buffer.GPUEndTime;
    if (buffer.status == MTLCommandBufferStatusCompleted && !buffer.error) {
      gpu.worked();
    } else {
      flight.error = fault_text(buffer, static_cast<MetalProgram&>(*flight.program), part);
      gpu.faulted(buffer.error.code, flight.error);
    }
    flight.program.reset();  // before its waiters wake: they may count on it
    tickets.land(flight);
  }

  const std::shared_ptr<Gpu> gpu_;
  const std::string description_;
  const uint64_t working_set_, longest_, limit_;
  const bool poison_;  // fresh memory is NaN
  const std::shared_ptr<MetalBuffer> nothing_;
  Pipelines pipelines_;
  mutable std::mutex tile_mutex_;
  TileTrial tile_;  // without a reason: not decided yet
  const std::shared_ptr<Tickets> tickets_ = std::make_shared<Tickets>();
  bool fenced_ = false;      // the worker's: a buffer before this one updates the fence
  std::mutex submit_mutex_;  // a ticket is the queue's
  HostQueue queue_;          // last: its worker uses the rest
};

}  // namespace

DeviceRef make_metal(bool exact, std::string& why) {
  try {
    return pooled([&]() -> DeviceRef {
      NSProcessInfo* info = NSProcessInfo.processInfo;
      const std::string system = concat("macOS ", text(info.operatingSystemVersionString));
      const NSOperatingSystemVersion oldest = {14, 0, 0};
      if (![info isOperatingSystemAtLeastVersion:oldest]) {
        why = concat("this is ", system, ", lily needs macOS 14 or later");
        return nullptr;
      }
      // A program without graphics has no default device unless it links Core Graphics.
      id<MTLDevice> found = MTLCreateSystemDefaultDevice();
      NSArray<id<MTLDevice>>* all = MTLCopyAllDevices();
      if (!found && all.count > 0) found = all[0];
      if (!found) {
        why = "Metal finds no GPU (a session without one, or a virtual machine)";
        return nullptr;
      }
      const std::string name = text(found.name);
      if (![found supportsFamily:MTLGPUFamilyApple7]) {
        why = concat(name, " is no GPU of family Apple7 (M1) or later, which lily needs");
        return nullptr;
      }
      return host_device<MetalDevice>(
          std::make_shared<Gpu>(found), exact,
          concat(name, ", ", system, ", ", gib(found.recommendedMaxWorkingSetSize), " of ",
                 gib(info.physicalMemory), " for the GPU"));
    });
  } catch (const DeviceError& e) {
    why = e.what();
    return nullptr;
  }
}

}  // namespace lily
