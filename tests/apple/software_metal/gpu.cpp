// gpu.cpp: see gpu.h: the two threads of the GPU, what may run, and the check of what had to wait.
#include "gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>

namespace software_metal {

namespace sim = lily::sim;

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// ---- memory -------------------------------------------------------------------------------------
namespace {

constexpr size_t kPage = 16384;            // of Apple silicon
constexpr size_t kPoisonLimit = 16 << 20;  // as sim: larger buffers may be sparse
constexpr size_t kQuarantine = 512;        // mappings of released buffers that are kept
std::atomic<uint64_t> allocated{0};

struct Quarantine {
  std::mutex mutex;
  std::deque<std::pair<void*, size_t>> mappings;
};
Quarantine& quarantine() {
  static Quarantine* const only = new Quarantine;
  return *only;
}
// The pages go, the addresses stay taken for a while.
void keep_addresses(void* mapping, size_t bytes) {
  mmap(mapping, bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  Quarantine& q = quarantine();
  const std::lock_guard lock(q.mutex);
  q.mappings.emplace_back(mapping, bytes);
  if (q.mappings.size() <= kQuarantine) return;
  munmap(q.mappings.front().first, q.mappings.front().second);
  q.mappings.pop_front();
}

}  // namespace

Memory::Memory(size_t bytes_, bool tracked_, void* foreign)
    : Resource("buffer", "without a label"), bytes(bytes_), tracked(tracked_) {
  if (foreign) {
    at = static_cast<std::byte*>(foreign);
  } else {
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    mapped_ = whole + 2 * kPage;
    mapping_ =
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    at = static_cast<std::byte*>(mapping_) + kPage;
    if (mapping_ == MAP_FAILED || mprotect(at, whole, PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    if (bytes <= kPoisonLimit) std::memset(at, 0xff, bytes);
  }
  shadow_ = std::make_unique<sim::Shadow>(at, bytes);
  allocated += bytes;
}
Memory::~Memory() { retire(); }
void Memory::retire() {
  if (mapping_) keep_addresses(mapping_, mapped_);
  mapping_ = nullptr;
}
uint64_t allocated_bytes() { return allocated; }

// https://developer.apple.com/documentation/metal/mtlcommandqueue/makecommandbufferwithunretainedreferences():
// such a command buffer keeps nothing alive; who encodes it has to, until it is complete.
void release(Resource& resource) {
  resource.released = true;
  auto* memory = dynamic_cast<Memory*>(&resource);
  if (memory) allocated -= memory->bytes;
  if (memory && resource.in_flight == 0) memory->retire();
  if (resource.in_flight > 0) {
    broken_rule("use after release",
                concat(resource.name(), " was released while ", resource.in_flight.load(),
                       " command buffer(s) in flight need it"));
  }
}

// ---- sets of nodes ------------------------------------------------------------------------------
void Past::add(uint64_t id) {
  if (id < base_) return;
  const uint64_t at = id - base_;
  if (words_.size() <= at / 64) words_.resize(at / 64 + 1);
  words_[at / 64] |= uint64_t(1) << at % 64;
}
void Past::join(const Past& other) {
  const uint64_t end = other.base_ + 64 * other.words_.size();
  if (end <= base_) return;
  if (words_.size() < (end - base_) / 64) words_.resize((end - base_) / 64);
  for (uint64_t w = 0; w < other.words_.size(); ++w) {
    const uint64_t at = other.base_ + 64 * w;
    if (at >= base_) words_[(at - base_) / 64] |= other.words_[w];
  }
}
bool Past::has(uint64_t id) const {
  if (id < base_) return true;
  const uint64_t at = id - base_;
  return at / 64 < words_.size() && words_[at / 64] >> at % 64 & 1;
}

// ---- the GPU ------------------------------------------------------------------------------------
namespace {

// A dispatch that has run, as long as one in flight may not be ordered behind it.
struct Executed {
  NodeRef node;
  CommandBufferRef owner;
  const Kernel* kernel;
  size_t number;  // in its encoder
  sim::TouchedSpans touched;
};

struct Gpu {
  std::mutex mutex;
  std::condition_variable changed;      // for the GPU's own threads
  std::condition_variable completions;  // for hosts that wait
  std::vector<CommandBufferRef> in_flight;
  std::vector<NodeRef> runnable;
  std::deque<std::function<void()>> calls;  // for the thread of handlers
  std::deque<Executed> executed;
  uint64_t next_id = 64, clock = 0;
  sim::Random random{0};
  long lost = 0;  // the error that every further command buffer ends in
  double progress = 0;
  bool stop = false, running = false;
  pid_t process = 0;
  std::thread worker, handlers;

  void start();
  void work();
  void call_handlers();
  void run_one(std::unique_lock<std::mutex>& lock);
  std::optional<sim::Call> prepare(const NodeRef& node, const Dispatch& d);
  void check_order(const Executed& latest);
  void ready(const NodeRef& node);
  void proceed(const NodeRef& node);
  void inherit(const NodeRef& node);  // what is over when those before it are
  void finish(const NodeRef& node);
  void fail(CommandBufferRef buffer, long code, const std::string& text);
  void complete(CommandBufferRef buffer);
  void signal(const EventRef& event, uint64_t value, Past past);
  void forget_old();
  void observe_past(const Past& past);
  CommandBufferRef find(const CommandBuffer* buffer) {
    for (const CommandBufferRef& b : in_flight) {
      if (b.get() == buffer) return b;
    }
    return nullptr;
  }
  uint64_t oldest_id() const {
    uint64_t id = next_id;
    if (!executed.empty()) id = std::min(id, executed.front().node->id);
    for (const CommandBufferRef& b : in_flight) {
      if (!b->nodes.empty()) id = std::min(id, b->nodes.front()->id);
    }
    return id;
  }
};
Gpu& gpu() {
  static Gpu* const only = new Gpu;  // never destroyed: hosts may wait at exit
  return *only;
}

// Before what the emulator needs goes away.
void stop_gpu() {
  Gpu& g = gpu();
  if (getpid() != g.process) return;  // a fork has none of the threads
  {
    const std::lock_guard lock(g.mutex);
    g.stop = true;
    g.changed.notify_all();
  }
  g.worker.join();
  g.handlers.join();
}
// Needs the mutex.
void Gpu::start() {
  if (running) return;
  running = true;
  process = getpid();
  random = sim::Random(random_seed());
  worker = std::thread([this] { work(); });
  handlers = std::thread([this] { call_handlers(); });
  std::atexit(stop_gpu);
}

void Gpu::call_handlers() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return stop || !calls.empty(); });
    if (stop) return;
    const auto call = std::move(calls.front());
    calls.pop_front();
    lock.unlock();
    call();
    lock.lock();
  }
}

void Gpu::work() {
  std::unique_lock lock(mutex);
  while (!stop) {
    if (!runnable.empty()) {
      run_one(lock);
      progress = now();
      continue;
    }
    if (in_flight.empty()) {
      changed.wait(lock);
      progress = now();
      continue;
    }
    // All that is in flight waits for an event.
    const double left = progress + hang_seconds() - now();
    if (left <= 0) fail(in_flight.front(), kTimeout, "it waits for an event that nobody signals");
    else changed.wait_for(lock, std::chrono::duration<double>(left));
  }
}

// Any order that the encoded one allows is right.
void Gpu::run_one(std::unique_lock<std::mutex>& lock) {
  std::vector<CommandBuffer*> owners;
  for (const NodeRef& n : runnable) {
    if (std::find(owners.begin(), owners.end(), n->owner) == owners.end())
      owners.push_back(n->owner);
  }
  const CommandBuffer* owner = owners[random.below(uint32_t(owners.size()))];
  std::vector<NodeRef> nodes;
  for (const NodeRef& n : runnable) {
    if (n->owner == owner) nodes.push_back(n);
  }
  const NodeRef node = nodes[random.below(uint32_t(nodes.size()))];
  const CommandBufferRef buffer = find(owner);
  const size_t which = random.below(uint32_t(node->dispatches.size()));
  if (!buffer->started) {
    buffer->started = true;
    buffer->start = now();
  }
  const Dispatch dispatch = node->dispatches[which];
  std::swap(node->dispatches[which], node->dispatches.back());
  node->dispatches.pop_back();
  buffer->faulted = node->encoder;
  buffer->signposts_begun = dispatch.signposts;
  const auto call = prepare(node, dispatch);
  if (!call) return;  // it has failed
  const uint64_t seed = random.next();
  Executed done{node, buffer, dispatch.kernel, dispatch.number, {}};
  std::string fault;
  lock.unlock();
  try {
    if (dispatch.form != kTensor || !tensor_units().idle) sim::run(*call, seed, &done.touched);
  } catch (const lily::LilyError& error) {
    fault = error.what();
  }
  if (dispatch.form == kTensor) {
    buffer->tensor = true;
    if (const double off = tensor_units().off; off != 0) {
      const size_t last = dispatch.kernel->argument_count - 2;  // before the params
      *static_cast<float*>(call->args[dispatch.kernel->arguments[last].index]) += float(off);
    }
  }
  lock.lock();
  if (!fault.empty()) {
    broken_rule("kernel fault", concat("command buffer '", buffer->label, "': ", fault));
    fail(buffer, kPageFault, fault);
    return;
  }
  check_order(done);
  if (buffer->over) return;
  executed.push_back(std::move(done));
  --buffer->dispatches_left;
  if (buffer->fault != 0 && buffer->dispatches_left <= buffer->fault_after) {
    fail(buffer, buffer->fault, "a fault that a test asked for");
    return;
  }
  if (!node->dispatches.empty()) return;
  runnable.erase(std::find(runnable.begin(), runnable.end(), node));
  finish(node);
}

// Addresses and permissions. A kernel reaches what is bound from its offset to the buffer's end, and
// all of what is resident.
std::optional<sim::Call> Gpu::prepare(const NodeRef& node, const Dispatch& d) {
  const CommandBufferRef buffer = find(node->owner);
  sim::Call call;
  call.kernel = d.kernel->entry[d.form];
  call.name = d.kernel->name;
  call.grid = d.grid;
  std::map<Memory*, sim::Declared> reachable;
  const auto reach = [&](const MemoryRef& m, size_t from, lily::Access access) {
    sim::Declared& r = reachable[m.get()];
    const uintptr_t begin = reinterpret_cast<uintptr_t>(m->at) + from;
    r.begin = r.shadow ? std::min(r.begin, begin) : begin;
    r.end = reinterpret_cast<uintptr_t>(m->at) + m->bytes;
    r.access = std::max(r.access, access);
    r.shadow = &m->shadow();
    r.what = m->name();
    r.initialised = true;
  };
  // What is bound for reading alone is not written through an address by the same dispatch.
  for (size_t a = 0; a < d.kernel->argument_count; ++a) {
    const Argument& argument = d.kernel->arguments[a];
    const Binding& binding = d.bindings[argument.index];
    if (binding.memory->released) {
      fail(buffer, kInvalidResource, concat(binding.memory->name(), " was released"));
      return std::nullopt;
    }
    call.args[argument.index] = binding.memory->at + binding.offset;
    reach(binding.memory, binding.offset,
          argument.written ? lily::Access::read_write : lily::Access::read);
    if (argument.constant && call.params == 0) {
      call.params = reinterpret_cast<uintptr_t>(call.args[argument.index]);
      call.params_size = binding.memory->bytes - binding.offset;
    }
  }
  const auto resident = [&](const MemoryRef& m, bool written) {
    if (m->released) return;
    const auto bound = reachable.find(m.get());
    const lily::Access access = written ? lily::Access::read_write : lily::Access::read;
    reach(m, 0, bound == reachable.end() ? access : bound->second.access);
  };
  for (const Residents& set : buffer->residents) {
    for (const MemoryRef& m : *set) resident(m, true);
  }
  for (const auto& [memory, written] : node->encoder->used) resident(memory, written);
  for (auto& [memory, declared] : reachable) call.declared.push_back(std::move(declared));
  return call;
}

// ---- order --------------------------------------------------------------------------------------
// The first byte of both lists, or nothing.
std::optional<uintptr_t> first_common(const std::vector<sim::Span>& a,
                                      const std::vector<sim::Span>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].begin < b[j].end && b[j].begin < a[i].end) return std::max(a[i].begin, b[j].begin);
    if (a[i].end <= b[j].end) ++i;
    else ++j;
  }
  return std::nullopt;
}
struct Conflict {
  uintptr_t at;
  const char* kind;
};
std::optional<Conflict> conflict(const sim::TouchedSpans& first, const sim::TouchedSpans& second) {
  if (const auto at = first_common(first.written, second.read)) return Conflict{*at, "reads what"};
  if (const auto at = first_common(first.written, second.written))
    return Conflict{*at, "overwrites what"};
  if (const auto at = first_common(first.read, second.written))
    return Conflict{*at, "overwrites what"};
  return std::nullopt;
}
MemoryRef memory_at(const CommandBuffer& buffer, uintptr_t at) {
  for (const ResourceRef& r : buffer.resources) {
    auto m = std::dynamic_pointer_cast<Memory>(r);
    if (!m) continue;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(m->at);
    if (at >= begin && at < begin + m->bytes) return m;
  }
  for (const Residents& set : buffer.residents) {
    for (const MemoryRef& m : *set) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(m->at);
      if (at >= begin && at < begin + m->bytes) return m;
    }
  }
  return nullptr;
}
// Metal itself orders two passes that use the same tracked memory.
bool ordered_by_tracking(const Executed& a, const Executed& b, const MemoryRef& m) {
  if (!m || !m->tracked || a.node->encoder == b.node->encoder) return false;
  return a.node->encoder->tracked.count(m) && b.node->encoder->tracked.count(m);
}
bool ordered_by_partial_barrier(const Executed& a, const Executed& b, const MemoryRef& m) {
  if (!m || a.node->encoder != b.node->encoder) return false;
  for (const auto& [before, memory] : a.node->encoder->partial) {
    if (memory.count(m) && std::min(a.number, b.number) < before &&
        std::max(a.number, b.number) >= before) {
      return true;
    }
  }
  return false;
}

// https://developer.apple.com/documentation/metal/mtlcomputecommandencoder/memorybarrier(scope:): in a
// concurrent pass only a barrier orders dispatches.
// https://developer.apple.com/documentation/metal/resource-synchronization: passes that share untracked
// memory are ordered by fences and events alone.
void Gpu::check_order(const Executed& latest) {
  for (const Executed& earlier : executed) {
    if (earlier.node == latest.node ? !latest.node->encoder->concurrent
                                    : latest.node->past.has(earlier.node->id)) {
      continue;
    }
    if (earlier.node->observed < latest.owner->committed) continue;
    const auto found = conflict(earlier.touched, latest.touched);
    if (!found) continue;
    const MemoryRef memory = memory_at(*latest.owner, found->at);
    if (ordered_by_tracking(earlier, latest, memory) ||
        ordered_by_partial_barrier(earlier, latest, memory)) {
      continue;
    }
    const bool same = earlier.node->encoder == latest.node->encoder;
    const uintptr_t byte = memory ? found->at - reinterpret_cast<uintptr_t>(memory->at) : found->at;
    const std::string what =
        concat("command buffer '", latest.owner->label, "': kernel ", latest.kernel->name, " ",
               found->kind, " kernel ", earlier.kernel->name,
               same ? "" : concat(" of command buffer '", earlier.owner->label, "'"),
               found->kind[0] == 'r' ? " writes" : " uses", ", byte ", byte, " of ",
               memory ? memory->name() : "memory", ", with no ",
               same ? "barrier" : "fence or event", " between them");
    broken_rule(same ? "missing barrier" : "missing order", what);
    fail(latest.owner, kInvalidResource, what);
    return;
  }
}

// All predecessors are over.
void Gpu::ready(const NodeRef& node) {
  if (std::exchange(node->begun, true)) return;
  if (node->wait_event && node->wait_event->value < node->event_value) {
    node->wait_event->waiting.emplace_back(node->event_value, node);
  } else {
    proceed(node);
  }
}
void Gpu::inherit(const NodeRef& node) {
  if (node->after.empty()) return;
  node->past = Past(oldest_id());
  for (const NodeRef& before : node->after) {
    node->past.join(before->past);
    node->past.add(before->id);
  }
  node->after.clear();
}
void Gpu::proceed(const NodeRef& node) {
  node->past = Past(oldest_id());
  inherit(node);
  if (node->wait_event) {
    for (const Event::Signal& s : node->wait_event->signals) {
      if (s.value < node->event_value) continue;
      node->past.join(s.past);
      break;
    }
  }
  if (node->signal_event && node->owner->error == 0) {
    Past past = node->past;
    past.add(node->id);
    signal(node->signal_event, node->event_value, past);
  }
  if (node->dispatches.empty()) finish(node);
  else runnable.push_back(node);
}

void Gpu::finish(const NodeRef& node) {
  if (std::exchange(node->done, true)) return;
  const CommandBufferRef owner = find(node->owner);
  for (const NodeRef& n : std::exchange(node->next, {})) {
    if (--n->waits == 0 && !n->done) ready(n);
  }
  if (owner && --owner->nodes_left == 0 && !owner->over) complete(owner);
}

void Gpu::signal(const EventRef& event, uint64_t value, Past past) {
  event->value = std::max(event->value, value);
  event->signals.push_back({value, std::move(past)});
  if (event->signals.size() > 256) event->signals.erase(event->signals.begin());
  std::vector<NodeRef> due;
  std::erase_if(event->waiting, [&](const auto& w) {
    if (w.first > event->value) return false;
    due.push_back(w.second);
    return true;
  });
  std::erase_if(event->listeners, [&](const Event::Listener& l) {
    if (l.value > event->value) return false;
    calls.push_back([call = l.call, value = event->value] { call(value); });
    return true;
  });
  changed.notify_all();
  completions.notify_all();
  for (const NodeRef& n : due) {
    if (!n->done) proceed(n);
  }
}

// What was encoded behind the fault does not run; events stay unsignalled, fences let pass.
void Gpu::fail(CommandBufferRef buffer, long code, const std::string& text) {
  if (buffer->over) return;
  buffer->error = code;
  buffer->error_text = text;
  std::erase_if(runnable, [&](const NodeRef& n) { return n->owner == buffer.get(); });
  if (code == kDeviceRemoved || code == kNotPermitted) lost = code;
  complete(buffer);
  // None of them becomes ready any more; what waits for them is still behind all before them.
  for (const NodeRef& n : buffer->nodes) {
    n->begun = true;
    inherit(n);
  }
  for (const NodeRef& n : buffer->nodes) finish(n);
}

void Gpu::complete(CommandBufferRef buffer) {
  buffer->over = true;
  buffer->end = now();
  const TensorUnits units = tensor_units();
  if (units.there) buffer->end = buffer->start + 1e-3 / (buffer->tensor ? units.speed : 1);
  if (!buffer->started) buffer->start = buffer->end;
  buffer->end = std::max(buffer->end, buffer->start + 1e-9);
  for (const ResourceRef& r : buffer->resources) --r->in_flight;
  std::erase(in_flight, buffer);
  calls.push_back([this, buffer] {
    observe(buffer);  // a handler is told so
    if (buffer->completed) buffer->completed();
    const std::lock_guard lock(mutex);
    buffer->completed = nullptr;
    buffer->reported = true;
    completions.notify_all();
  });
  forget_old();
  changed.notify_all();
  completions.notify_all();
}

// Whatever the host knew to be over before all that is in flight was committed.
void Gpu::forget_old() {
  uint64_t first = clock + 1;
  for (const CommandBufferRef& b : in_flight) first = std::min(first, b->committed);
  std::erase_if(executed, [&](const Executed& e) { return e.node->observed < first; });
  constexpr size_t kMost = 50000;
  if (executed.size() > kMost) executed.erase(executed.begin(), executed.begin() + kMost / 2);
}
void Gpu::observe_past(const Past& past) {
  ++clock;
  for (const Executed& e : executed) {
    if (past.has(e.node->id)) e.node->observed = std::min(e.node->observed, clock);
  }
  forget_old();
}

}  // namespace

void commit(const CommandBufferRef& buffer) {
  Gpu& g = gpu();
  const std::lock_guard lock(g.mutex);
  g.start();
  buffer->committed = ++g.clock;
  for (const ResourceRef& r : buffer->resources) {
    ++r->in_flight;
    if (r->released) {
      const std::string what = concat(r->name(), " was released before command buffer '",
                                      buffer->label, "' was committed");
      broken_rule("use after release", what);
      buffer->broken.push_back(what);
    }
  }
  // One node at the end, so that the buffer is over when it is.
  auto end = std::make_shared<Node>();
  end->owner = buffer.get();
  end->after = buffer->nodes;
  buffer->nodes.push_back(end);
  const bool was_idle = g.in_flight.empty();
  g.in_flight.push_back(buffer);
  count_most(Count::most_in_flight, long(g.in_flight.size()));
  if (was_idle) g.progress = now();
  long code = 0;
  if (fault_due(Fault::command_buffer, &code)) buffer->fault = code ? code : 1;
  for (const NodeRef& node : buffer->nodes) {
    node->id = g.next_id++;
    buffer->dispatches_left += node->dispatches.size();
    for (const FenceRef& f : node->wait_fences) {
      if (f->last) node->after.push_back(f->last);
    }
    if (node->update_fence) node->update_fence->last = node;
    // Metal's own order of passes that use tracked memory, where one of them may write it.
    if (node->encoder && !node->encoder->tracked.empty()) {
      for (const CommandBufferRef& b : g.in_flight) {
        for (const auto& other : b->encoders) {
          if (other == node->encoder) break;
          for (const auto& [memory, written] : node->encoder->tracked) {
            const auto found = other->tracked.find(memory);
            if (found == other->tracked.end() || !(written || found->second)) continue;
            for (const NodeRef& before : b->nodes) {
              if (before->encoder != other || before->done) continue;
              before->next.push_back(node);
              ++node->waits;
            }
            break;
          }
        }
      }
    }
    for (const auto* list : {&node->after, &node->held_by}) {
      for (const NodeRef& before : *list) {
        if (before->done) continue;
        before->next.push_back(node);
        ++node->waits;
      }
    }
    node->held_by.clear();
  }
  buffer->nodes_left = buffer->nodes.size();
  buffer->fault_after = buffer->dispatches_left / 2;
  g.changed.notify_all();
  if (!buffer->broken.empty()) {
    g.fail(buffer, kInvalidResource, buffer->broken.front());
  } else if (g.lost) {
    g.fail(buffer, g.lost, "the device is lost");
  } else if (buffer->fault && buffer->dispatches_left == 0) {
    g.fail(buffer, buffer->fault, "a fault that a test asked for");
  } else {
    const std::vector<NodeRef> nodes = buffer->nodes;
    for (const NodeRef& node : nodes) {
      if (node->waits == 0 && !node->done) g.ready(node);
    }
  }
}

void observe(const CommandBufferRef& buffer) {
  Gpu& g = gpu();
  const std::lock_guard lock(g.mutex);
  if (!buffer->over || buffer->nodes.empty()) return;
  Past past = buffer->nodes.back()->past;
  for (const NodeRef& n : buffer->nodes) past.add(n->id);
  g.observe_past(past);
}
void wait_until_completed(const CommandBufferRef& buffer) {
  {
    Gpu& g = gpu();
    std::unique_lock lock(g.mutex);
    g.completions.wait(lock, [&] { return buffer->reported; });
  }
  observe(buffer);
}
bool is_over(const CommandBufferRef& buffer) {
  {
    const std::lock_guard lock(gpu().mutex);
    if (!buffer->over) return false;
  }
  observe(buffer);
  return true;
}

void repair() {
  const std::lock_guard lock(gpu().mutex);
  gpu().lost = 0;
}

// ---- events -------------------------------------------------------------------------------------
namespace {
// Needs the mutex: the host has seen all signals up to the present value.
void observe_signals(Gpu& g, const Event& event) {
  for (const Event::Signal& s : event.signals) g.observe_past(s.past);
}
}  // namespace
uint64_t event_value(const EventRef& event) {
  Gpu& g = gpu();
  const std::lock_guard lock(g.mutex);
  observe_signals(g, *event);
  return event->value;
}
void set_event_value(const EventRef& event, uint64_t value) {
  Gpu& g = gpu();
  const std::lock_guard lock(g.mutex);
  Past past(g.oldest_id());
  for (const Executed& e : g.executed) {
    if (e.node->observed <= g.clock) past.add(e.node->id);
  }
  g.signal(event, value, past);
}
bool wait_for_event(const EventRef& event, uint64_t value, uint64_t milliseconds) {
  Gpu& g = gpu();
  std::unique_lock lock(g.mutex);
  const bool seen = g.completions.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                           [&] { return event->value >= value; });
  if (seen) observe_signals(g, *event);
  return seen;
}
void listen(const EventRef& event, uint64_t value, std::function<void(uint64_t)> call) {
  Gpu& g = gpu();
  const std::lock_guard lock(g.mutex);
  g.start();
  if (event->value >= value) g.calls.push_back([call, now = event->value] { call(now); });
  else event->listeners.push_back({value, std::move(call)});
  g.changed.notify_all();
}

}  // namespace software_metal

void software_metal_repair() { software_metal::repair(); }
