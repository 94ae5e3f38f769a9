// cpu.cpp: the device "cpu": host memory, a thread pool, and the native twins of the kernels for
// the best instruction set of the processor.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "cpu_call.h"
#include "device.h"
#include "host_queue.h"
#include "ops.h"
#include "x86_level.h"

namespace lily {

// ---- the pool -----------------------------------------------------
class Pool {
 public:
  explicit Pool(size_t threads) {
    for (size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
  }
  size_t threads() const { return workers_.size() + 1; }
  void run(size_t n, void (*job)(void*, size_t), void* context) {
    if (n == 0) return;
    if (n == 1 || workers_.empty()) {
      for (size_t i = 0; i < n; ++i) job(context, i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      context_ = context;
      count_ = n;
      next_.store(0, std::memory_order_relaxed);
      busy_ = workers_.size();
      ++generation_;
    }
    wake_.notify_all();
    take();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take() {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) job_(context_, i);
  }
  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return closing_ || generation_ != seen; });
        if (closing_) return;
        seen = generation_;
      }
      take();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  void (*job_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  size_t count_ = 0, busy_ = 0;
  std::atomic<size_t> next_{0};
  uint64_t generation_ = 0;
  bool closing_ = false;
};
void pool_run(Pool& pool, size_t n, void (*job)(void*, size_t), void* context) {
  pool.run(n, job, context);
}
size_t pool_threads(const Pool& pool) { return pool.threads(); }

// ---- the twins, one table per instruction set --------------------------------------------------
#define LILY_TWIN_TABLE(NS)                                                  \
  namespace NS {                                                             \
  LILY_OPS(LILY_DECLARE_TWIN)                                                \
  static const Twin twins[] = {LILY_OPS(LILY_LIST_TWIN)};                    \
  }
#define LILY_DECLARE_TWIN(op, P) void op(const TwinCall& call);
#define LILY_LIST_TWIN(op, P) op,

#if defined(__x86_64__)
LILY_TWIN_TABLE(x86_v2)
LILY_TWIN_TABLE(x86_v3)
LILY_TWIN_TABLE(x86_v4)
#else
LILY_TWIN_TABLE(neon)
#endif

namespace {

struct Isa {
  const char* name;
  const Twin* twins;
};
Isa best_isa() {
#if defined(__x86_64__)
  const int level = x86_level();
  // A developer aid: run the twins of an older processor.
  const char* wanted = getenv("LILY_CPU_ISA");
  if (wanted && std::strcmp(wanted, "x86-64-v2") == 0) return {"x86-64-v2", x86_v2::twins};
  if (wanted && std::strcmp(wanted, "x86-64-v3") == 0 && level >= 3)
    return {"x86-64-v3", x86_v3::twins};
  if (level >= 4) return {"x86-64-v4", x86_v4::twins};
  if (level >= 3) return {"x86-64-v3", x86_v3::twins};
  return {"x86-64-v2", x86_v2::twins};
#else
  return {"NEON", neon::twins};
#endif
}

size_t usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread ::hardware_concurrency());
}

// Anonymous pages: zero cost until touched, so that tests may allocate sparse gigabytes.
class CpuBuffer : public Buffer {
 public:
  CpuBuffer(size_t bytes, std::string_view name, std::shared_ptr<std::atomic<uint64_t>> account)
      : account_(std::move(account)) {
    size = bytes;
    label = name;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
      throw LilyError(concat("cpu: ", name, ": no ", bytes, " bytes of memory"));
    host = static_cast<std::byte*>(at);
    *account_ += bytes;
  }
  ~CpuBuffer() override {
    munmap(host, size);
    *account_ -= size;
  }

 private:
  std::shared_ptr<std::atomic<uint64_t>> account_;
};

class CpuProgram : public Program {
 public:
  CommandList list;
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(bool exact)
      : Device(exact),
        isa_(best_isa()),
        pool_(usable_cores()),
        limit_(uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGE_SIZE))) {}
  std::string name() const override { return "cpu"; }
  std::string description() const override {
    return concat("native twins of the kernels, ", isa_.name, ", ", pool_.threads(), " threads");
  }
  Family family() const override { return Family::cpu; }
  uint64_t memory_limit() const override { return limit_; }

  BufferRef allocate(size_t bytes, std::string_view label, Memory) override {
    check(bytes <= limit_ && allocated() <= limit_ - bytes, "cpu: ", label, " needs ", bytes,
          " bytes, ", limit_ - std::min(limit_, allocated()), " of ", limit_, " are left");
    return std::make_shared<CpuBuffer>(bytes, label, allocated_);
  }
  void upload(const Tensor& to, const void* from) override {
    queue_.drain();
    std::memcpy(to.buffer->host + to.offset, from, to.bytes());
  }
  void download(const Tensor& from, void* to) override {
    queue_.drain();
    std::memcpy(to, from.buffer->host + from.offset, from.bytes());
  }
  uint64_t address(const Tensor& t) override {
    return reinterpret_cast<uint64_t>(t.buffer->host + t.offset);
  }
  ProgramRef compile(CommandList list, bool) override {
    auto program = std::make_shared<CpuProgram>();
    program->list = std::move(list);
    return program;
  }
  Ticket submit(const ProgramRef& program, const std::atomic<bool>* cancel) override {
    return queue_.push(
        [this, program, cancel] { run(static_cast<const CpuProgram&>(*program).list, cancel); });
  }
  void wait(Ticket ticket) override { queue_.wait(ticket); }

 private:
  void run(const CommandList& list, const std::atomic<bool>* cancel) {
    std::byte* args[32];
    for (const Launch& launch : list.launches) {
      if (cancel && cancel->load(std::memory_order_relaxed))
        throw Cancelled(list.label + ": cancelled");
      const Variant& v = variants()[launch.variant];
      for (size_t i = 0; i < launch.args.size(); ++i) {
        const Tensor& t = launch.args[i].tensor;
        args[i] = t.buffer ? t.buffer->host + t.offset : nullptr;
      }
      const Tensor& s = launch.step.tensor;
      const TwinCall call{v.c,     list.params.data() + launch.params_offset,
                          args,    s.buffer ? s.buffer->host + s.offset : nullptr,
                          exact(), &pool_};
      isa_.twins[size_t(v.op)](call);
    }
  }
  const Isa isa_;
  Pool pool_;
  const uint64_t limit_;
  HostQueue queue_;  // last: its worker uses the rest
};

}  // namespace

DeviceRef make_cpu(bool exact, std::string&) { return host_device<CpuDevice>(exact); }

}  // namespace lily
