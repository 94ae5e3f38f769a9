// engine.cpp: Engine and its KV pool: loading, memory budget, what all sessions share.
#include "engine.h"

#include <algorithm>

namespace lily {

namespace {

constexpr uint64_t kSlabBytes = uint64_t(256) << 20;
constexpr uint64_t kPrefillBudget = uint64_t(448) << 20;
constexpr uint32_t kMaxChunk = 2048;
// Host devices look at the cancel flag between launches: their chunks are short, so that Ctrl-C acts.
constexpr uint32_t kHostChunk = 512;

uint32_t chunk_rows(const Device& device, const Config& c) {
  const uint64_t rows = kPrefillBudget / PrefillScratch::bytes_per_row(c, device.act());
  uint32_t chunk = kMaxChunk;
  while (chunk > 64 && chunk > rows) chunk /= 2;
  const bool host = device.family() == Family::cpu || device.family() == Family::sim;
  return host ? std::min(chunk, kHostChunk) : chunk;
}

}  // namespace

// ---- KvPool --------------------------------------------------------------------------------------
KvPool::KvPool(DeviceRef device, uint64_t block_bytes, uint64_t max_blocks)
    : device_(std::move(device)),
      block_bytes_(block_bytes),
      // An eighth at most: what sessions need beside their KV must find room as well.
      slab_blocks_(std::max<uint64_t>(
          1, std::min(kSlabBytes / std::max<uint64_t>(1, block_bytes), max_blocks / 8))),
      max_blocks_(max_blocks) {}

uint32_t KvPool::acquire() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    const uint64_t limit = device_->memory_limit(),
                   left = limit - std::min(limit, device_->allocated());
    const uint64_t n = std::min({slab_blocks_, max_blocks_ - blocks_, left / block_bytes_});
    check(n > 0, "KV cache: all ", blocks_, " blocks of ", LILY_KV_BLOCK,
          " tokens are in use, the memory budget allows ", max_blocks_, ", one more needs ",
          block_bytes_, " bytes and ", left, " are left");
    const uint64_t first = slabs_.size() * slab_blocks_;
    slabs_.push_back(device_->tensor(DType::u32, n * block_bytes_ / 4, "KV slab"));
    for (uint64_t i = n; i-- > 0;) free_.push_back(uint32_t(first + i));
    references_.resize(first + slab_blocks_, 0);
    blocks_ += n;
  }
  const uint32_t block = free_.back();
  free_.pop_back();
  references_[block] = 1;
  return block;
}
void KvPool::share(uint32_t block) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++references_[block];
}
void KvPool::release(uint32_t block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--references_[block] == 0) free_.push_back(block);
}
bool KvPool::shared(uint32_t block) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return references_[block] > 1;
}
Tensor KvPool::tensor(uint32_t block) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slabs_[block / slab_blocks_].slice(block % slab_blocks_ * (block_bytes_ / 4),
                                            block_bytes_ / 4);
}
uint64_t KvPool::address(uint32_t block) const { return device_->address(tensor(block)); }
std::vector<Tensor> KvPool::slabs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slabs_;
}
uint64_t KvPool::generation() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slabs_.size();
}

// ---- Engine --------------------------------------------------------------------------------------
namespace {

MemoryTable table_of(const Device& device, const Config& c, uint64_t weights, uint32_t chunk,
                     uint64_t context) {
  const uint64_t act = dtype_size(device.act());
  const uint64_t state = 2 * (uint64_t(c.delta_layers()) * 3 * c.channels() * act +
                              uint64_t(c.delta_layers()) * c.delta_width() * LILY_DELTA_DIM * 4);
  return {weights,
          state,
          kv_block_bytes(c, device.act()),
          2 * uint64_t(c.vocab) * 4,
          chunk * PrefillScratch::bytes_per_row(c, device.act()),
          device.memory_limit(),
          context};
}

// Tokens that the device's memory holds beside the weights, at most what the model allows.
uint64_t fitting_tokens(const Device& device, const LoadTable& table) {
  const Config& c = table.config;
  const uint64_t taken = weight_arena_bytes(table) +
                         chunk_rows(device, c) * PrefillScratch::bytes_per_row(c, device.act());
  const uint64_t limit = device.memory_limit(), left = limit - std::min(limit, device.allocated());
  const uint64_t blocks =
      left > taken ? (left - taken) / std::max<uint64_t>(1, kv_block_bytes(c, device.act())) : 0;
  return std::min<uint64_t>(blocks * LILY_KV_BLOCK, c.max_position);
}

// Tokens of one session: as asked, or for 0 what the model allows and the device's memory holds.
// Refused before anything is allocated, with both numbers.
uint32_t fitting_context(const Device& device, const LoadTable& table, uint32_t asked,
                         uint32_t chunk) {
  const Config& c = table.config;
  if (asked > c.max_position) {
    throw std::invalid_argument(
        concat("max_context is ", asked, ", the model takes 1 to ", c.max_position));
  }
  const uint64_t weights = weight_arena_bytes(table);
  const uint64_t scratch = chunk * PrefillScratch::bytes_per_row(c, device.act());
  const uint64_t block = std::max<uint64_t>(1, kv_block_bytes(c, device.act()));
  const uint64_t limit = device.memory_limit(), left = limit - std::min(limit, device.allocated());
  const uint64_t fits = fitting_tokens(device, table);
  const uint32_t context = asked ? asked : uint32_t(std::max<uint64_t>(fits, 1));
  const uint64_t kv = (uint64_t(context) + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK * block;
  check(context <= fits, "the model needs ", weights + scratch + kv, " bytes (weights ", weights,
        ", scratch ", scratch, ", KV for ", context, " tokens ", kv, "), ", device.name(), " has ",
        left, " left");
  return context;
}

// All that the memory holds beside the weights, which are loaded, and the prefill's scratch.
uint64_t kv_blocks(const Device& device, const Config& c, uint32_t chunk) {
  const uint64_t taken =
      device.allocated() + chunk * PrefillScratch::bytes_per_row(c, device.act());
  const uint64_t limit = device.memory_limit(), left = limit - std::min(limit, taken);
  return std::max<uint64_t>(1, left / std::max<uint64_t>(16, kv_block_bytes(c, device.act())));
}

}  // namespace

Engine::Engine(DeviceRef device_, const LoadTable& table, uint32_t max_context_,
               const Progress& progress)
    : Engine(device_, table, max_context_,
             std::function<Weights()>([&] { return load_weights(*device_, table, progress); })) {}
Engine::Engine(DeviceRef device_, const LoadTable& table, uint32_t max_context_,
               const std::function<Weights()>& place)
    : device(std::move(device_)),
      config(table.config),
      max_context(fitting_context(*device, table, max_context_, chunk_rows(*device, table.config))),
      chunk(chunk_rows(*device, table.config)),
      model(device, table.config, place()),
      kv(device, std::max<uint64_t>(16, kv_block_bytes(config, device->act())),
         kv_blocks(*device, config, chunk)),
      weight_bytes_(weight_arena_bytes(table)) {}

PrefillScratch& Engine::prefill_scratch(std::unique_lock<std::mutex>& lock) {
  lock = std::unique_lock<std::mutex>(prefill_mutex_);
  if (!prefill_scratch_)
    prefill_scratch_ = std::make_unique<PrefillScratch>(*device, config, chunk);
  return *prefill_scratch_;
}
void Engine::fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(state_mutex_);
  if (dead_.empty()) dead_ = why;
}
void Engine::close() { fail("the engine is closed"); }
void Engine::check_alive() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  check(dead_.empty(), dead_);
}
MemoryTable Engine::memory() const {
  return table_of(*device, config, weight_bytes_, chunk, max_context);
}
MemoryTable memory_table(const Device& device, const LoadTable& table) {
  return table_of(device, table.config, weight_arena_bytes(table), chunk_rows(device, table.config),
                  fitting_tokens(device, table));
}

}  // namespace lily
