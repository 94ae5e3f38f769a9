// engine.h: Engine (a loaded model, immutable, shared) and Session (one timeline of tokens).
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

#include "loader.h"

namespace lily {

// KV memory in reference-counted blocks of 256 tokens, carved from slabs of about 256 MB.
class KvPool {
 public:
  KvPool(DeviceRef device, uint64_t block_bytes, uint64_t max_blocks);
  uint32_t acquire();  // a block with one reference; LilyError with both numbers when none is left
  void share(uint32_t block);
  void release(uint32_t block);
  bool shared(uint32_t block) const;
  uint64_t address(uint32_t block) const;
  Tensor tensor(uint32_t block) const;  // the block's bytes as u32
  std::vector<Tensor> slabs() const;
  uint64_t generation() const;  // grows with each new slab: recorded programs name the slabs

 private:
  const DeviceRef device_;
  const uint64_t block_bytes_, slab_blocks_, max_blocks_;
  mutable std::mutex mutex_;
  std::vector<Tensor> slabs_;
  uint64_t blocks_ = 0;  // of all slabs; the numbers of a smaller slab have gaps after them
  std::vector<uint32_t> references_, free_;
};

struct SamplingOptions {
  float temperature = 0, top_p = 1, min_p = 0, presence = 0, frequency = 0, repetition = 1;
  uint32_t top_k = 0, logprobs = 0;
  uint64_t seed = 0;
  std::vector<std::pair<uint32_t, float>> bias;  // token, added to its logit
};

struct SampledToken {
  uint32_t id = 0;
  float logprob = 0;
  std::vector<std::pair<uint32_t, float>> top;
};

struct MemoryTable {  // bytes, and the tokens that one session may have
  uint64_t weights, state, kv_per_block, decode_scratch, prefill_scratch, limit, context;
};
// Of a model that is not loaded; context 0 if the device cannot hold the weights.
MemoryTable memory_table(const Device& device, const LoadTable& table);

// Const after construction except for the KV pool, which locks. One device queue serves all sessions.
class Engine {
 public:
  // max_context 0: what the model allows and the device's memory holds.
  Engine(DeviceRef device, const LoadTable& table, uint32_t max_context, const Progress& progress);
  // With weights from elsewhere; `place` is called once it is known that they fit.
  Engine(DeviceRef device, const LoadTable& table, uint32_t max_context,
         const std::function<Weights()>& place);
  const DeviceRef device;
  const Config config;
  const uint32_t max_context;  // tokens of one session
  const uint32_t chunk;        // rows of one prefill chunk
  const Model model;
  KvPool kv;
  // The device is lost: every later call says so.
  void fail(const std::string& why);
  void check_alive() const;
  void close();
  MemoryTable memory() const;
  // Prefill scratch is shared: one prefill at a time, chunk by chunk.
  PrefillScratch& prefill_scratch(std::unique_lock<std::mutex>& lock);

 private:
  const uint64_t weight_bytes_;
  std::mutex prefill_mutex_;
  std::unique_ptr<PrefillScratch> prefill_scratch_;
  mutable std::mutex state_mutex_;
  std::string dead_;
};

// One timeline. One thread at a time: a second one gets an error. Every call leaves the session
// valid, also when it throws: at a prefix of the tokens it was given.
class Session {
 public:
  explicit Session(std::shared_ptr<Engine> engine);
  ~Session();

  // Makes the timeline `ids`; returns how many tokens were reused. Prefill is split at snapshot_at,
  // and a snapshot kept there. `poll`, when given, is called between chunks and may throw.
  uint32_t sync(std::span<const uint32_t> ids, std::span<const uint32_t> snapshot_at,
                const std::function<void()>& poll);
  // Draws the next token and appends it. With an allowed mask (one bit per id) sampling waits for
  // it and there is no lookahead.
  SampledToken step(const std::vector<uint32_t>* allowed);
  void rewind(uint32_t position, const std::function<void()>& poll);
  void snapshot();  // keeps the present position
  void set_sampling(const SamplingOptions& options);
  std::vector<float> logits();  // [vocab]: of the next token, or that the last step drew from
  // Appends ids and returns their logits [n][vocab], n <= 512.
  std::vector<float> forward(std::span<const uint32_t> ids, const std::function<void()>& poll);
  // Appends ids; log-probability of each target after its id, and the most likely id.
  std::pair<std::vector<float>, std::vector<uint32_t>> score(std::span<const uint32_t> ids,
                                                             std::span<const uint32_t> targets,
                                                             const std::function<void()>& poll);
  // Logits of up to 16 tokens after the present ones, changing nothing; then take the first n.
  std::vector<float> verify(std::span<const uint32_t> ids);
  void commit(uint32_t n);
  void cancel() { cancel_ = true; }  // from any thread: ends a running sync or step early

  std::vector<uint32_t> tokens() const;
  uint32_t position() const;
  std::vector<uint32_t> snapshots() const;
  // What step() submits for the token after the present ones: for tools that count.
  CommandList step_list();
  // conv f32[delta layers][3][channels] and delta f32[delta layers][Hv][128][128] at position().
  std::pair<std::vector<float>, std::vector<float>> recurrent_state();
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  struct Snapshot {
    std::vector<uint32_t> ids;
    State state;
    std::vector<uint32_t> blocks;  // full ones, each referenced
    Tensor partial;                // copy of the block in progress, if any
  };
  struct Flight {  // a submitted step: took ids_.back(), drew a token the caller has not seen
    Ticket ticket = 0;
    bool doubtful = false;  // may have been cancelled: no further step before it is known
  };
  struct Chunk {  // of a prefill
    uint32_t rows = 0, position = 0, logit_rows = 0;
    int state = 0;      // the one it starts from
    bool step = false;  // no chunk: the prompt has ended, a step is next
    bool operator==(const Chunk&) const = default;
  };
  struct Encoded {
    Chunk chunk;
    Tensor logits, ids;
    ProgramRef program;
  };
  static constexpr uint32_t kNone = ~0u;
  static constexpr uint32_t kRing = 4;  // entries of the sampler's ring: two steps are in flight

  // Every public call: one thread, a living engine, a valid session whatever happens.
  template <typename F>
  auto guarded(F&& f) {
    const auto lock = claim();
    engine_->check_alive();
    // A cancel from before this call may have stopped the step in flight, and nothing else.
    if (cancel_.exchange(false) && flight_) flight_->doubtful = true;
    try {
      return f();
    } catch (const DeviceError& error) {
      after_error(error);
      throw;
    }
  }
  std::unique_lock<std::mutex> claim() const;
  void land();  // waits for the flight and takes its state over; its token stays unseen
  // To the best state that holds a prefix of `ids` of at most `limit` tokens; the rest of the
  // timeline is dropped.
  void restore(std::span<const uint32_t> ids, uint32_t limit);
  void reset();  // empty
  void truncate_blocks(uint32_t position);
  void load_snapshot(const Snapshot& s);
  void save_snapshot();
  void drop_snapshot(size_t index);
  void own_blocks(uint32_t from, uint32_t to);  // writable blocks for positions [from, to)
  void set_block(uint32_t index, uint32_t block);
  void upload_pages();  // those the device's Step does not have yet
  void catch_up();      // consumes what of ids_ the state does not hold yet
  void consume(std::span<const uint32_t> ids, std::span<const uint32_t> snapshot_at,
               const std::function<void()>& poll);
  void prefill_chunk(std::span<const uint32_t> ids, uint32_t logit_rows, const Tensor& logits,
                     const std::function<void()>& poll, const Tensor* targets,
                     const Chunk& next);  // what is likely to follow, to be made ready meanwhile
  Encoded encode_chunk(const Chunk& chunk, const Tensor& logits, const PrefillScratch& scratch,
                       const Tensor* targets);
  void encode_ahead(const Chunk& chunk, const PrefillScratch& scratch);
  CommandList record_rows(std::span<const uint32_t> ids, bool write_state, const char* what);
  void decode_rows(std::span<const uint32_t> ids);  // logits of the last
  void check_room(const char* what, size_t more) const;
  template <typename F>
  void append_chunks(std::span<const uint32_t> ids, F&& chunk);
  void advance(uint32_t rows);  // the other state is current now
  Model::Decode decode_args(uint32_t rows, uint32_t splits, bool write_state,
                            const Tensor& logits) const;
  void run(CommandList list);  // submits and waits
  void wait(Ticket ticket, const std::function<void()>& poll);
  void copy(const Tensor& from, const Tensor& to, CommandList& list) const;
  void copy_block(const Tensor& from, const Tensor& to, uint32_t tokens, CommandList& list) const;
  void write_step(std::span<const uint32_t> ids, uint32_t position);
  void write_counts();
  static uint32_t splits_for(uint32_t end);  // of attention over `end` tokens, in buckets
  uint32_t step_splits(uint32_t position);   // of a step there; its scratch is ready
  CommandList record_step(int from, uint32_t splits);
  const ProgramRef& step_program(int from, uint32_t position);
  const ProgramRef& sample_program(int which);  // from logits_[which]
  void compile_ahead(uint32_t position, int state);
  Ticket submit_step();  // forward of Step's row, then its sample
  Ticket look_ahead();   // submit_step, or 0 when that cannot be now
  SampledToken take(Ticket ticket, uint32_t position);
  void after_error(const DeviceError& error);
  DecodeScratch& many_rows(uint32_t splits);
  Tensor step_part(uint64_t offset, uint64_t bytes) const;
  void record_sample(Recorder& r, int which);

  const std::shared_ptr<Engine> engine_;
  const DeviceRef device_;
  const Config& config_;
  mutable std::mutex busy_;
  std::atomic<bool> cancel_{false};

  std::vector<uint32_t> ids_;    // the timeline
  uint32_t consumed_ = 0;        // tokens of it that states_[current_] holds
  uint32_t previous_ = kNone;    // tokens that the other state holds, if it is valid
  uint32_t generated_from_ = 0;  // ids from here on were drawn by step
  State states_[2];
  int current_ = 0;
  bool logits_valid_ = false;  // logits_[current_] are those after consumed_ tokens
  int shown_ = -1;             // logits() reads this one
  Tensor logits_[2];           // f32[vocab]
  Tensor many_logits_;         // f32[16][vocab], when first needed
  Tensor step_, ring_, adjusted_, stats_;
  Step host_step_{};
  std::vector<uint32_t> blocks_;  // KV blocks of the timeline
  uint32_t pages_ = 0;            // of them the device's Step knows
  std::optional<Encoded> ahead_;
  std::vector<Snapshot> snapshots_;
  std::optional<Flight> flight_;
  SamplingOptions sampling_;
  bool counts_exact_ = false;  // the device's penalty counts match ids_
  std::unique_ptr<DecodeScratch> one_row_, many_rows_;
  uint32_t verified_at_ = kNone;  // consumed_ when verify ran, until the timeline moves
  std::vector<uint32_t> verified_;
  std::map<std::tuple<int, uint32_t, uint64_t>, ProgramRef>
      step_programs_;  // parity, splits, slabs
  ProgramRef sample_programs_[2];
};

}  // namespace lily
