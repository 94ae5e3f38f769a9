// gpu.h: the GPU that is played, without Objective-C: memory, kernels, work and its order. Dispatches
// run one after the other on sim's emulator; which one comes next is drawn by seed among all that
// the encoded order lets run, of all command buffers in flight.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../../src/cpp/sim_emulator.h"
#include "rules.h"

namespace software_metal {

constexpr size_t kBufferArguments = 31;  // indices 0 to 30

// ---- what command buffers refer to --------------------------------------------------------------
// Whatever an encoder is given and somebody can release while the GPU still needs it.
struct Resource {
  Resource(std::string kind_, std::string label_)
      : kind(std::move(kind_)), label(std::move(label_)) {}
  virtual ~Resource() = default;
  std::string name() const { return concat(kind, " '", label, "'"); }
  const std::string kind;
  std::string label;
  std::atomic<int> in_flight = 0;      // command buffers committed and not complete
  std::atomic<bool> released = false;  // its Objective-C object is gone
};
using ResourceRef = std::shared_ptr<Resource>;
// The object is gone: reports a command buffer in flight that needs it.
void release(Resource& resource);

// The bytes of a buffer, between two pages that nobody may touch. Addresses are not given out again
// soon, so that whoever uses released memory is found.
class Memory : public Resource {
 public:
  // `foreign`: memory of the host's that the buffer wraps.
  Memory(size_t bytes, bool tracked, void* foreign = nullptr);
  ~Memory() override;
  std::byte* at = nullptr;
  const size_t bytes;
  const bool tracked;  // Metal orders passes that use it
  const lily::sim::Shadow& shadow() const { return *shadow_; }
  void retire();  // its pages go now; for memory that nothing in flight needs

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  std::unique_ptr<lily::sim::Shadow> shadow_;
};
using MemoryRef = std::shared_ptr<Memory>;
uint64_t allocated_bytes();

// ---- kernels ------------------------------------------------------------------------------------
struct Argument {
  uint32_t index;
  bool written;    // no const
  bool constant;   // of the constant address space
  uint32_t align;  // of the type
};
// Of the text: bf16, LILY_EXACT, LILY_TILE_TENSOR.
enum Form : uint8_t { kBf16, kExact, kTensor };

struct Kernel {
  const char* name;
  const char* file;            // "linear.metal"
  lily::sim::Kernel entry[3];  // by Form; null where a kernel has no such form
  const Argument* arguments;
  size_t argument_count;
};
// One kernel file with its headers in place, as it has to be handed over.
struct Text {
  const char* file;
  const char* const* pieces;
  size_t piece_count;
};
// Of the generated table.
extern const Kernel kKernels[];
extern const size_t kKernelCount;
extern const Text kTexts[];
extern const size_t kTextCount;

// ---- order --------------------------------------------------------------------------------------
// A set of nodes by id. Ids below `base` belong to work that is over for everybody.
class Past {
 public:
  explicit Past(uint64_t base = 0) : base_(base / 64 * 64) {}
  void add(uint64_t id);
  void join(const Past& other);
  bool has(uint64_t id) const;

 private:
  uint64_t base_;
  std::vector<uint64_t> words_;
};

struct CommandBuffer;
struct Encoder;
struct Node;
using NodeRef = std::shared_ptr<Node>;

struct Fence : Resource {
  explicit Fence(std::string label_) : Resource("fence", std::move(label_)) {}
  NodeRef last;  // the update that was committed last
};
struct Event : Resource {
  explicit Event(std::string label_) : Resource("event", std::move(label_)) {}
  struct Signal {
    uint64_t value;
    Past past;  // what is known to be over when the value is seen
  };
  struct Listener {
    uint64_t value;
    std::function<void(uint64_t)> call;
  };
  uint64_t value = 0;  // all below: the GPU's mutex
  std::vector<Signal> signals;
  std::vector<std::pair<uint64_t, NodeRef>> waiting;
  std::vector<Listener> listeners;
};
using FenceRef = std::shared_ptr<Fence>;
using EventRef = std::shared_ptr<Event>;

struct Binding {
  MemoryRef memory;
  size_t offset = 0;
};
struct Dispatch {
  const Kernel* kernel = nullptr;
  Form form = kBf16;
  lily::Grid grid;
  std::array<Binding, kBufferArguments> bindings;
  size_t number = 0, signposts = 0;  // dispatches and signposts of its encoder before it
};

// Work without order in itself, after all of its predecessors.
struct Node {
  CommandBuffer* owner = nullptr;
  std::shared_ptr<Encoder> encoder;  // null between encoders
  std::vector<NodeRef> after;        // until the node is ready
  std::vector<NodeRef> held_by;      // as `after`, but for some memory only: proves no order
  std::vector<Dispatch> dispatches;  // in no order
  std::vector<FenceRef> wait_fences;
  FenceRef update_fence;
  EventRef wait_event, signal_event;
  uint64_t event_value = 0;

  uint64_t id = 0;  // from commit on
  unsigned waits = 0;
  std::vector<NodeRef> next;
  Past past;
  bool begun = false, done = false;
  uint64_t observed = ~uint64_t(0);  // when the host learned that it is over
};

struct Encoder {
  CommandBuffer* owner = nullptr;
  std::string label;
  bool concurrent = false;
  std::vector<std::string> signposts;
  std::map<MemoryRef, bool> used;     // useResource; whether it may be written
  std::map<MemoryRef, bool> tracked;  // tracked memory it binds or uses; whether it may write it
  // A new node is after `before` (what the last barrier closed) and `waits` (fences since then).
  std::vector<NodeRef> before, waits, open;  // open: the nodes since the last barrier
  NodeRef current;                           // takes the next dispatch
  std::vector<NodeRef> held;                 // by the last barrier for some resources
  std::set<FenceRef> updated;
  // Barriers for some resources only: the number of dispatches before, and the memory.
  std::vector<std::pair<size_t, std::set<MemoryRef>>> partial;
  size_t dispatched = 0;
};

// What commit made of the residency sets.
using Residents = std::shared_ptr<const std::vector<MemoryRef>>;

struct CommandBuffer {
  std::string label;
  std::vector<NodeRef> nodes;  // in the order of encoding
  std::vector<std::shared_ptr<Encoder>> encoders;
  std::set<ResourceRef> resources;
  std::vector<Residents> residents;
  std::vector<std::string> broken;  // rules broken while it was encoded: it will not run
  std::function<void()> completed;  // on the thread of handlers

  // All below: the GPU's mutex.
  uint64_t committed = 0;  // when
  size_t nodes_left = 0, dispatches_left = 0;
  bool tensor = false;  // some kernel ran on tensor operations
  bool started = false, over = false, reported = false;
  long error = 0;  // MTLCommandBufferError
  std::string error_text;
  std::shared_ptr<Encoder> faulted;
  size_t signposts_begun = 0;
  long fault = 0;          // an error that a test asked for ...
  size_t fault_after = 0;  // ... when this many dispatches are left
  double start = 0, end = 0;
};
using CommandBufferRef = std::shared_ptr<CommandBuffer>;

// ---- the GPU ------------------------------------------------------------------------------------
void commit(const CommandBufferRef& buffer);
// The host has seen that the buffer is over.
void observe(const CommandBufferRef& buffer);
// Returns when the buffer is over and its handlers have run.
void wait_until_completed(const CommandBufferRef& buffer);
bool is_over(const CommandBufferRef& buffer);

uint64_t event_value(const EventRef& event);  // the host's look counts as observing
void set_event_value(const EventRef& event, uint64_t value);
bool wait_for_event(const EventRef& event, uint64_t value, uint64_t milliseconds);
void listen(const EventRef& event, uint64_t value, std::function<void(uint64_t)> call);

void repair();  // a device that was lost is back
double now();
constexpr long kTimeout = 2, kPageFault = 3, kAccessRevoked = 4, kNotPermitted = 7,
               kInvalidResource = 9, kDeviceRemoved = 11;  // of MTLCommandBufferError

}  // namespace software_metal
