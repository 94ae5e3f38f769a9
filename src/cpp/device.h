// device.h: the device contract: buffers, tensors, launches, command lists, tickets and errors.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lily {

struct LilyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A fault of the device itself; `lost` means that no later call on it can succeed.
struct DeviceError : LilyError {
  DeviceError(const std::string& what, bool lost_ = false) : LilyError(what), lost(lost_) {}
  bool lost;
};
struct CheckpointError : LilyError {
  using LilyError::LilyError;
};
// Work ended early because its cancel flag was raised.
struct Cancelled : LilyError {
  using LilyError::LilyError;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
template <typename Error = LilyError, typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) throw Error(concat(parts...));
}

enum class DType : uint8_t { u32, u64, bf16, f32 };
constexpr size_t dtype_size(DType t) { return t == DType::bf16 ? 2 : t == DType::u64 ? 8 : 4; }
const char* dtype_name(DType t);

// Device memory. Freed when the last reference goes; programs keep theirs alive until they end.
class Buffer {
 public:
  virtual ~Buffer() = default;
  size_t size = 0;
  std::string label;
  std::byte* host = nullptr;  // host view; set for Memory::shared, and always on cpu and sim
};
using BufferRef = std::shared_ptr<Buffer>;
enum class Memory { device, shared };  // shared: small, written by the device and read by the host

// A contiguous view of a buffer.
struct Tensor {
  BufferRef buffer;
  size_t offset = 0;  // bytes
  DType dtype = DType::f32;
  uint64_t elements = 0;
  size_t bytes() const { return elements * dtype_size(dtype); }
  Tensor slice(uint64_t first, uint64_t count) const;  // in elements; checked
  explicit operator bool() const { return buffer != nullptr; }
};

enum class Access : uint8_t { none, read, write, read_write };
struct Arg {
  Tensor tensor;
  Access access = Access::none;
};
inline Arg in(const Tensor& t) { return {t, Access::read}; }
inline Arg out(const Tensor& t) { return {t, Access::write}; }
inline Arg inout(const Tensor& t) { return {t, Access::read_write}; }

struct Grid {
  uint32_t x = 1, y = 1, z = 1;  // threadgroups
  uint32_t threads = 32;         // per threadgroup, a multiple of 32, at most 1024
};

// One kernel call. Arguments are bound in order: args, then params, then step.
struct Launch {
  uint16_t variant = 0;  // index into variants(), see ops.h
  Grid grid;
  std::vector<Arg> args;
  std::vector<Arg> unbound;  // ranges reached through addresses (KV slabs)
  Arg step;                  // struct Step of the session; access none when the kernel ignores it
  uint32_t params_offset = 0, params_size = 0;
};

// What ops.cpp records: plain data, the same for every device.
struct CommandList {
  std::string label;
  std::vector<Launch> launches;
  std::vector<std::byte> params;  // arena of params structs, each 16-byte aligned
};

// The dependency level of each launch: 0 for no hazard with an earlier one, else 1 + the highest
// level it must follow (read after write, write after read, write after write on byte ranges).
std::vector<uint32_t> hazard_levels(const CommandList& list);
// True when b (recorded after a) has to wait for a.
bool conflicts(const Launch& a, const Launch& b);

// A command list made ready for one device; may be submitted any number of times.
class Program {
 public:
  virtual ~Program() = default;
};
using ProgramRef = std::shared_ptr<Program>;
using Ticket = uint64_t;

enum class Family : uint8_t { cpu, sim, cuda, apple };

// Threads: every member may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu", "sim", "cuda", "metal"
  virtual std::string description() const = 0;
  virtual Family family() const = 0;
  virtual uint64_t memory_limit() const = 0;  // bytes that allocate may hand out in all
  uint64_t allocated() const { return *allocated_; }
  bool exact() const { return exact_; }  // activations are fp32
  DType act() const { return exact_ ? DType::f32 : DType::bf16; }

  // Contents are undefined. Throws LilyError with both numbers when over memory_limit.
  virtual BufferRef allocate(size_t bytes, std::string_view label,
                             Memory memory = Memory::device) = 0;
  // Host copies: ordered after all work submitted before the call, done when they return.
  virtual void upload(const Tensor& to, const void* from) = 0;
  virtual void download(const Tensor& from, void* to) = 0;
  virtual uint64_t address(const Tensor& t) = 0;  // what a kernel sees as pointer

  // reuse: the program will be submitted many times (a CUDA graph), else once.
  virtual ProgramRef compile(CommandList list, bool reuse) = 0;
  // Runs in order after everything submitted before. The flag, when given, outlives the ticket.
  virtual Ticket submit(const ProgramRef& program, const std::atomic<bool>* cancel = nullptr) = 0;
  // Returns when that submission is complete; throws DeviceError (naming the step) or Cancelled.
  virtual void wait(Ticket ticket) = 0;
  // Seconds of one run: the mean of n in a row, by the device's own clock where it has one.
  virtual double time_program(const ProgramRef& program, uint32_t n);

  Tensor tensor(DType dtype, uint64_t elements, std::string_view label,
                Memory memory = Memory::device);

 protected:
  explicit Device(bool exact) : exact_(exact) {}
  // shared with the buffers, which may outlive the device object
  std::shared_ptr<std::atomic<uint64_t>> allocated_ = std::make_shared<std::atomic<uint64_t>>(0);
  const bool exact_;
};
using DeviceRef = std::shared_ptr<Device>;

struct DeviceStatus {
  std::string name;  // "cpu", "sim", "cuda", "metal"
  bool available;
  std::string description;  // what it is, or why it is missing
};
std::vector<DeviceStatus> device_statuses();
// Throws LilyError that says why the device does not exist here. `exact`: fp32 activations.
DeviceRef make_device(const std::string& name, bool exact);

// One factory per device file; `why` is filled when the result is null.
DeviceRef make_cpu(bool exact, std::string& why);
DeviceRef make_sim(bool exact, std::string& why);
DeviceRef make_cuda(bool exact, std::string& why);
DeviceRef make_metal(bool exact, std::string& why);

}  // namespace lily
