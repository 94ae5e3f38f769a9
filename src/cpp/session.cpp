// session.cpp: Session: sync, prefill, rewind, snapshots, verify and commit.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <thread>

#include "engine.h"

namespace lily {

namespace {

constexpr uint64_t kSnapshotBudget = uint64_t(512) << 20;
constexpr uint64_t kLogitBytes = uint64_t(64) << 20;  // logits of one chunk of forward and score

uint32_t sample_blocks(uint32_t vocab) { return (vocab + 1023) / 1024; }
uint32_t common_prefix(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  return uint32_t(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}
uint64_t align16(uint64_t n) { return (n + 15) / 16 * 16; }
void check_ids(std::span<const uint32_t> ids, uint32_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= vocab)
      throw std::invalid_argument(
          concat("token ", i, " is ", ids[i], ", the vocabulary has ", vocab));
  }
}

}  // namespace

Session::Session(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), device_(engine_->device), config_(engine_->config) {
  engine_->check_alive();
  Device& d = *device_;
  const uint32_t vocab = config_.vocab,
                 stride = (engine_->max_context + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK;
  for (State& s : states_) s = make_state(d, config_, "recurrent state");
  for (Tensor& t : logits_) t = d.tensor(DType::f32, vocab, "logits");
  adjusted_ = d.tensor(DType::f32, vocab, "adjusted logits");
  stats_ = d.tensor(DType::f32, sample_blocks(vocab) * 8, "logit statistics");
  ring_ = d.tensor(DType::u32, kRing * sizeof(Sampled) / 4, "sampled tokens", Memory::shared);

  Step& s = host_step_;
  uint64_t at = align16(sizeof(Step));
  const auto place = [&](uint32_t& offset, uint64_t bytes) {
    offset = uint32_t(at);
    at += align16(bytes);
  };
  s.pages_stride = stride;
  place(s.pages_offset, stride * 8ull);
  place(s.counts_offset, vocab * 4ull);
  place(s.prompt_counts_offset, vocab * 4ull);
  place(s.mask_offset, (vocab + 31) / 32 * 4ull);
  place(s.bias_offset, vocab * 4ull);
  step_ = d.tensor(DType::u32, at / 4, "step");
  s.sampling[0].top_p = s.sampling[0].repetition = 1;
  std::vector<std::byte> zero(at);
  std::memcpy(zero.data(), &s, sizeof s);
  d.upload(step_, zero.data());
  reset();
}

Session::~Session() {
  try {
    if (flight_) device_->wait(flight_->ticket);
  } catch (...) {  // the step is dropped with the session
  }
  for (uint32_t b : blocks_) engine_->kv.release(b);
  while (!snapshots_.empty()) drop_snapshot(snapshots_.size() - 1);
}

std::unique_lock<std::mutex> Session::claim() const {
  std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
  check(lock.owns_lock(), "session is in use by another thread");
  return lock;
}

void Session::after_error(const DeviceError& error) {
  if (error.lost) {
    engine_->fail(concat("the device is lost, the engine is closed: ", error.what()));
    return;
  }
  try {
    if (flight_) device_->wait(flight_->ticket);
  } catch (const LilyError&) {  // of the same fault
  }
  flight_.reset();
  step_programs_.clear();
  previous_ = kNone;
  if (snapshots_.empty()) reset();
  else load_snapshot(snapshots_.back());
}

// ---- small helpers -------------------------------------------------------------------------------
Tensor Session::step_part(uint64_t offset, uint64_t bytes) const {
  return step_.slice(offset / 4, bytes / 4);
}

void Session::copy(const Tensor& from, const Tensor& to, CommandList& list) const {
  Recorder r(*device_, list);
  const auto words = [](Tensor t) {
    t.elements = t.bytes() / 4;
    t.dtype = DType::u32;
    return t;
  };
  r.copy_bytes({from.bytes()}, {words(from), words(to)});
}

// The first `tokens` of a block: the rest of it holds nothing.
void Session::copy_block(const Tensor& from, const Tensor& to, uint32_t tokens,
                         CommandList& list) const {
  const uint64_t row = LILY_HEAD_DIM * dtype_size(device_->act()) / 4, head = LILY_KV_BLOCK * row;
  for (uint64_t at = 0; at < from.elements; at += head) {
    copy(from.slice(at, tokens * row), to.slice(at, tokens * row), list);
  }
}

void Session::run(CommandList list) {
  device_->wait(device_->submit(device_->compile(std::move(list), false), &cancel_));
}
// With a poll, looks at it while waiting: what it throws cancels the work.
void Session::wait(Ticket ticket, const std::function<void()>& poll) {
  if (!poll) return device_->wait(ticket);
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr result, stop;
  std::thread waiter([&] {
    try {
      device_->wait(ticket);
    } catch (...) {
      result = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(mutex);
  while (!changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return done; })) {
    if (stop) continue;
    lock.unlock();
    try {
      poll();
    } catch (...) {
      stop = std::current_exception();
      cancel_ = true;
    }
    lock.lock();
  }
  lock.unlock();
  waiter.join();
  if (stop) std::rethrow_exception(stop);
  if (result) std::rethrow_exception(result);
}

void Session::reset() {
  truncate_blocks(0);
  const State& s = states_[current_];
  std::vector<std::byte> zero(std::max(s.conv.bytes(), s.delta.bytes()));
  if (s.conv.elements) device_->upload(s.conv, zero.data());
  if (s.delta.elements) device_->upload(s.delta, zero.data());
  ids_.clear();
  consumed_ = 0;
  previous_ = verified_at_ = kNone;
  logits_valid_ = counts_exact_ = false;
  shown_ = -1;
}

void Session::set_block(uint32_t index, uint32_t block) {
  if (index == blocks_.size()) blocks_.push_back(block);
  else blocks_[index] = block;
  pages_ = std::min(pages_, index);
}
void Session::upload_pages() {
  std::vector<uint64_t> addresses;
  for (size_t b = pages_; b < blocks_.size(); ++b)
    addresses.push_back(engine_->kv.address(blocks_[b]));
  if (addresses.empty()) return;
  device_->upload(step_part(host_step_.pages_offset + pages_ * 8ull, addresses.size() * 8),
                  addresses.data());
  pages_ = uint32_t(blocks_.size());
}
void Session::truncate_blocks(uint32_t position) {
  const size_t keep = (position + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK;
  while (blocks_.size() > keep) {
    engine_->kv.release(blocks_.back());
    blocks_.pop_back();
  }
  pages_ = std::min(pages_, uint32_t(blocks_.size()));
}
void Session::own_blocks(uint32_t from, uint32_t to) {
  for (uint32_t b = from / LILY_KV_BLOCK; b <= (to - 1) / LILY_KV_BLOCK; ++b) {
    if (b == blocks_.size()) {
      set_block(b, engine_->kv.acquire());
    } else if (engine_->kv.shared(blocks_[b])) {  // copied before it is written
      const uint32_t old = blocks_[b], fresh = engine_->kv.acquire();
      CommandList list;
      list.label = "copy KV block";
      const uint32_t start = b * LILY_KV_BLOCK;
      if (from > start)
        copy_block(engine_->kv.tensor(old), engine_->kv.tensor(fresh), from - start, list);
      try {
        run(std::move(list));
      } catch (const LilyError&) {
        engine_->kv.release(fresh);
        throw;
      }
      set_block(b, fresh);
      engine_->kv.release(old);
    }
  }
  upload_pages();
}

void Session::write_step(std::span<const uint32_t> ids, uint32_t position) {
  Step& s = host_step_;
  s.rows = uint32_t(ids.size());
  for (uint32_t i = 0; i < ids.size(); ++i) {
    s.slot[i] = 0;
    s.position[i] = position + i;
    s.id[i] = ids[i];
  }
  device_->upload(step_part(0, sizeof(Step)), &s);
}

// Counts of generated and prompt tokens, needed by penalties only.
void Session::write_counts() {
  const bool needed =
      sampling_.presence != 0 || sampling_.frequency != 0 || sampling_.repetition != 1;
  if (!needed || counts_exact_) return;
  std::vector<uint32_t> generated(config_.vocab), prompt(config_.vocab);
  for (size_t i = 0; i < ids_.size(); ++i) ++(i < generated_from_ ? prompt : generated)[ids_[i]];
  device_->upload(step_part(host_step_.counts_offset, config_.vocab * 4ull), generated.data());
  device_->upload(step_part(host_step_.prompt_counts_offset, config_.vocab * 4ull), prompt.data());
  counts_exact_ = true;
}

// ---- passes --------------------------------------------------------------------------------------
uint32_t Session::splits_for(uint32_t end) {
  uint32_t splits = 1;
  while (splits * LILY_SPLIT < end) splits *= 2;
  return splits;
}

void Session::advance(uint32_t rows) {
  current_ ^= 1;
  previous_ = consumed_;
  consumed_ += rows;
}

Model::Decode Session::decode_args(uint32_t rows, uint32_t splits, bool write_state,
                                   const Tensor& logits) const {
  return {rows, splits, write_state, step_, {}, states_[current_], states_[current_ ^ 1], logits};
}

DecodeScratch& Session::many_rows(uint32_t splits) {
  if (!many_rows_ || many_rows_->splits < splits) {
    many_rows_ = std::make_unique<DecodeScratch>(*device_, config_, LILY_MAX_ROWS, splits, true);
  }
  if (!many_logits_)
    many_logits_ =
        device_->tensor(DType::f32, uint64_t(LILY_MAX_ROWS) * config_.vocab, "logits of rows");
  return *many_rows_;
}

// A pass of 1 to 16 tokens after the consumed ones through the decode route, logits of each.
CommandList Session::record_rows(std::span<const uint32_t> ids, bool write_state,
                                 const char* what) {
  const uint32_t rows = uint32_t(ids.size()), splits = splits_for(consumed_ + rows);
  own_blocks(consumed_, consumed_ + rows);
  write_step(ids, consumed_);
  DecodeScratch& scratch = many_rows(splits);
  const std::vector<Tensor> slabs = engine_->kv.slabs();
  CommandList list;
  list.label = concat(what, " of ", rows, " rows");
  Recorder r(*device_, list);
  Model::Decode d = decode_args(rows, splits, write_state, many_logits_);
  d.slabs = slabs;
  engine_->model.decode(r, scratch, d);
  return list;
}

void Session::decode_rows(std::span<const uint32_t> ids) {
  const uint32_t rows = uint32_t(ids.size());
  CommandList list = record_rows(ids, true, "decode");
  copy(many_logits_.slice(uint64_t(rows - 1) * config_.vocab, config_.vocab), logits_[current_ ^ 1],
       list);
  previous_ = kNone;
  run(std::move(list));
  advance(rows);
  logits_valid_ = true;
}

Session::Encoded Session::encode_chunk(const Chunk& chunk, const Tensor& logits,
                                       const PrefillScratch& scratch, const Tensor* targets) {
  const std::vector<Tensor> slabs = engine_->kv.slabs();
  Encoded e = {chunk, logits, device_->tensor(DType::u32, chunk.rows, "prompt ids"), {}};
  CommandList list;
  list.label = concat("prefill of ", chunk.rows, " rows at ", chunk.position);
  Recorder r(*device_, list);
  const Tensor& last = logits_[chunk.state ^ 1];
  engine_->model.prefill(r, scratch,
                         {chunk.rows, chunk.position, 0, e.ids, step_, slabs, states_[chunk.state],
                          states_[chunk.state ^ 1], chunk.logit_rows, logits});
  if (targets) r.score({chunk.rows, config_.vocab}, {logits, targets[0], targets[1], targets[2]});
  if (chunk.logit_rows && logits.buffer != last.buffer) {
    copy(logits.slice(uint64_t(chunk.logit_rows - 1) * config_.vocab, config_.vocab), last, list);
  }
  e.program = device_->compile(std::move(list), false);
  return e;
}

// What the next chunk needs from the host is done while the device computes this one.
void Session::encode_ahead(const Chunk& chunk, const PrefillScratch& scratch) {
  try {
    while (uint64_t(blocks_.size()) * LILY_KV_BLOCK < chunk.position + chunk.rows)
      set_block(uint32_t(blocks_.size()), engine_->kv.acquire());
    ahead_ = encode_chunk(chunk, logits_[chunk.state ^ 1], scratch, nullptr);
  } catch (const std::exception&) {  // comes again when it is the chunk's turn
  }
}

void Session::prefill_chunk(std::span<const uint32_t> ids, uint32_t logit_rows,
                            const Tensor& logits, const std::function<void()>& poll,
                            const Tensor* targets, const Chunk& next) {
  const uint32_t rows = uint32_t(ids.size());
  const Chunk chunk = {rows, consumed_, logit_rows, current_};
  std::optional<Encoded> encoded;
  std::swap(encoded, ahead_);
  own_blocks(consumed_, consumed_ + rows);
  std::unique_lock<std::mutex> lock;
  const PrefillScratch& scratch = engine_->prefill_scratch(lock);
  if (!encoded || targets || !(encoded->chunk == chunk) || encoded->logits.buffer != logits.buffer)
    encoded = encode_chunk(chunk, logits, scratch, targets);
  device_->upload(encoded->ids, ids.data());
  previous_ = kNone;  // the other state is being written
  const Ticket ticket = device_->submit(encoded->program, &cancel_);
  if (next.rows) encode_ahead(next, scratch);
  else if (next.step) compile_ahead(next.position, next.state);
  wait(ticket, poll);
  advance(rows);
  logits_valid_ = logit_rows > 0;
}

// Appends to ids_ as far as it gets; split at the snapshot positions.
void Session::consume(std::span<const uint32_t> ids, std::span<const uint32_t> snapshot_at,
                      const std::function<void()>& poll) {
  const uint32_t end = consumed_ + uint32_t(ids.size());
  std::vector<uint32_t> stops(snapshot_at.begin(), snapshot_at.end());
  std::sort(stops.begin(), stops.end());
  ahead_.reset();
  while (consumed_ < end) {
    uint32_t stop = end;
    for (uint32_t s : stops) {
      if (s > consumed_ && s < stop) stop = s;
    }
    const uint32_t rest = stop - consumed_, at = uint32_t(ids.size()) - (end - consumed_);
    const uint32_t rows = rest <= LILY_MAX_ROWS ? rest : std::min(rest, engine_->chunk);
    const auto piece = ids.subspan(at, rows);
    if (poll) poll();
    if (cancel_) throw Cancelled(concat("cancelled at ", consumed_, " of ", end, " tokens"));
    Chunk next = {0, consumed_ + rows, 0, current_ ^ 1, consumed_ + rows == end};
    if (rest - rows > LILY_MAX_ROWS) {
      next.rows = std::min(rest - rows, engine_->chunk);
      next.logit_rows = next.position + next.rows == end;
    }
    if (rows <= LILY_MAX_ROWS) decode_rows(piece);
    else prefill_chunk(piece, consumed_ + rows == end, logits_[current_ ^ 1], poll, nullptr, next);
    ids_.resize(consumed_ - rows);
    ids_.insert(ids_.end(), piece.begin(), piece.end());
    if (std::find(stops.begin(), stops.end(), consumed_) != stops.end()) save_snapshot();
  }
}

void Session::catch_up() {
  land();
  if (consumed_ < ids_.size()) {
    const std::vector<uint32_t> rest(ids_.begin() + consumed_, ids_.end());
    consume(rest, {}, {});
  }
}

// ---- snapshots -----------------------------------------------------------------------------------
void Session::save_snapshot() {
  for (const Snapshot& s : snapshots_) {
    if (s.ids.size() == consumed_ && std::equal(s.ids.begin(), s.ids.end(), ids_.begin())) return;
  }
  Snapshot s;
  s.ids.assign(ids_.begin(), ids_.begin() + consumed_);
  s.state = make_state(*device_, config_, "snapshot");
  const uint32_t full = consumed_ / LILY_KV_BLOCK;
  CommandList list;
  list.label = "snapshot";
  const State& from = states_[current_];
  if (from.conv.elements) copy(from.conv, s.state.conv, list);
  if (from.delta.elements) copy(from.delta, s.state.delta, list);
  if (consumed_ % LILY_KV_BLOCK) {
    const Tensor block = engine_->kv.tensor(blocks_[full]);
    s.partial = device_->tensor(DType::u32, block.elements, "snapshot of a KV block");
    copy_block(block, s.partial, consumed_ % LILY_KV_BLOCK, list);
  }
  run(std::move(list));
  s.blocks.assign(blocks_.begin(), blocks_.begin() + full);
  for (uint32_t b : s.blocks) engine_->kv.share(b);
  const uint64_t each =
      s.state.conv.bytes() + s.state.delta.bytes() + (s.partial ? s.partial.bytes() : 0);
  const size_t most = std::max<uint64_t>(2, kSnapshotBudget / std::max<uint64_t>(each, 1));
  while (snapshots_.size() >= most) drop_snapshot(0);
  snapshots_.push_back(std::move(s));
}
void Session::drop_snapshot(size_t index) {
  for (uint32_t b : snapshots_[index].blocks) engine_->kv.release(b);
  snapshots_.erase(snapshots_.begin() + std::ptrdiff_t(index));
}
// When it fails half-way (no block is left, cancelled), the session is empty.
void Session::load_snapshot(const Snapshot& s) {
  // Share before the old blocks go: they may be the same ones.
  for (uint32_t b : s.blocks) engine_->kv.share(b);
  truncate_blocks(0);
  try {
    for (size_t i = 0; i < s.blocks.size(); ++i) set_block(uint32_t(i), s.blocks[i]);
    CommandList list;
    list.label = "restore snapshot";
    const State& to = states_[current_];
    if (to.conv.elements) copy(s.state.conv, to.conv, list);
    if (to.delta.elements) copy(s.state.delta, to.delta, list);
    if (s.partial) {
      const uint32_t block = engine_->kv.acquire();
      set_block(uint32_t(s.blocks.size()), block);
      copy_block(s.partial, engine_->kv.tensor(block), uint32_t(s.ids.size()) % LILY_KV_BLOCK,
                 list);
    }
    run(std::move(list));
  } catch (const LilyError&) {
    reset();
    throw;
  }
  ids_ = s.ids;
  consumed_ = uint32_t(s.ids.size());
  previous_ = verified_at_ = kNone;
  logits_valid_ = counts_exact_ = false;
  shown_ = -1;
}

void Session::restore(std::span<const uint32_t> ids, uint32_t limit) {
  const uint32_t same = std::min(common_prefix(ids, ids_), limit);
  // Candidates that leave at least one token to run, since its logits are wanted.
  const Snapshot* best = nullptr;
  for (const Snapshot& s : snapshots_) {
    const bool fits = s.ids.size() < limit && common_prefix(s.ids, ids) == s.ids.size();
    if (fits && (!best || s.ids.size() > best->ids.size())) best = &s;
  }
  const uint32_t stored = best ? uint32_t(best->ids.size()) : 0;
  if (consumed_ <= same && consumed_ >= stored &&
      (consumed_ < limit || logits_valid_ || limit == 0)) {
    // The present state will do.
  } else if (previous_ != kNone && previous_ <= same && previous_ < limit && previous_ >= stored) {
    current_ ^= 1;
    consumed_ = previous_;
    previous_ = kNone;
    logits_valid_ = false;
  } else if (best) {
    load_snapshot(*best);
  } else {
    reset();
  }
  ids_.resize(consumed_);
  truncate_blocks(consumed_);
  verified_at_ = kNone;
  counts_exact_ = false;
  shown_ = -1;
}

// ---- public calls --------------------------------------------------------------------------------
uint32_t Session::sync(std::span<const uint32_t> ids, std::span<const uint32_t> snapshot_at,
                       const std::function<void()>& poll) {
  return guarded([&] {
    if (ids.size() > engine_->max_context) {
      throw std::invalid_argument(concat("prompt is too long: ", ids.size(), " tokens > ",
                                         engine_->max_context, " maximum"));
    }
    check_ids(ids, config_.vocab);
    for (uint32_t s : snapshot_at) {
      if (s == 0 || s > ids.size())
        throw std::invalid_argument(concat("snapshot_at is ", s, ", allowed 1 to ", ids.size()));
    }
    land();
    // A copy: the caller's memory may be ours (tokens()), and restore changes ids_.
    const std::vector<uint32_t> wanted(ids.begin(), ids.end());
    restore(wanted, uint32_t(wanted.size()));
    const uint32_t reused = consumed_;
    generated_from_ = uint32_t(wanted.size());
    consume(std::span(wanted).subspan(reused), snapshot_at, poll);
    if (std::find(snapshot_at.begin(), snapshot_at.end(), consumed_) != snapshot_at.end())
      save_snapshot();
    shown_ = logits_valid_ ? current_ : -1;
    return reused;
  });
}

void Session::rewind(uint32_t position, const std::function<void()>& poll) {
  guarded([&] {
    if (position > ids_.size())
      throw std::invalid_argument(
          concat("rewind to ", position, ", the session has ", ids_.size(), " tokens"));
    land();
    const std::vector<uint32_t> wanted(ids_.begin(), ids_.begin() + position);
    restore(wanted, position);
    consume(std::span(wanted).subspan(consumed_), {}, poll);
    shown_ = logits_valid_ ? current_ : -1;
  });
}

void Session::snapshot() {
  guarded([&] {
    catch_up();
    if (consumed_ > 0) save_snapshot();
  });
}

std::vector<float> Session::logits() {
  return guarded([&] {
    check(shown_ >= 0, "logits: no position has been computed yet");
    std::vector<float> out(config_.vocab);
    device_->download(logits_[shown_], out.data());
    return out;
  });
}

void Session::check_room(const char* what, size_t more) const {
  if (ids_.size() + more > engine_->max_context) {
    throw std::invalid_argument(
        concat(what, ": ", ids_.size() + more, " tokens > ", engine_->max_context, " maximum"));
  }
}

// The frame of forward and score: chunk(at, piece, logits) runs a prefill that leaves the piece's
// logits there.
template <typename F>
void Session::append_chunks(std::span<const uint32_t> ids, F&& chunk) {
  if (ids.empty()) return;
  catch_up();
  verified_at_ = kNone;
  shown_ = -1;
  const uint64_t vocab = config_.vocab;
  const uint32_t rows =
      uint32_t(std::clamp<uint64_t>(kLogitBytes / (vocab * 4), 16, engine_->chunk));
  const Tensor logits = device_->tensor(DType::f32, rows * vocab, "logits of a chunk");
  for (size_t at = 0; at < ids.size(); at += rows) {
    const auto piece = ids.subspan(at, std::min<size_t>(rows, ids.size() - at));
    chunk(at, piece, logits.slice(0, piece.size() * vocab));
    ids_.insert(ids_.end(), piece.begin(), piece.end());
    generated_from_ = uint32_t(ids_.size());
  }
  counts_exact_ = false;
  shown_ = logits_valid_ ? current_ : -1;
}

std::vector<float> Session::forward(std::span<const uint32_t> ids,
                                    const std::function<void()>& poll) {
  return guarded([&] {
    if (ids.size() > 512)
      throw std::invalid_argument(
          concat("forward: ", ids.size(), " tokens, at most 512 rows of logits"));
    check_ids(ids, config_.vocab);
    check_room("forward", ids.size());
    const uint64_t vocab = config_.vocab;
    std::vector<float> out(ids.size() * vocab);
    append_chunks(ids, [&](size_t at, std::span<const uint32_t> piece, const Tensor& logits) {
      prefill_chunk(piece, uint32_t(piece.size()), logits, poll, nullptr, {});
      device_->download(logits, out.data() + at * vocab);
    });
    return out;
  });
}

std::pair<std::vector<float>, std::vector<uint32_t>> Session::score(
    std::span<const uint32_t> ids, std::span<const uint32_t> targets,
    const std::function<void()>& poll) {
  return guarded([&] {
    if (targets.size() != ids.size())
      throw std::invalid_argument(
          concat("forward: ", targets.size(), " targets for ", ids.size(), " tokens"));
    check_ids(ids, config_.vocab);
    for (uint32_t t : targets) {
      if (t >= config_.vocab)
        throw std::invalid_argument(
            concat("forward: target ", t, ", the vocabulary has ", config_.vocab));
    }
    check_room("forward", ids.size());
    std::pair<std::vector<float>, std::vector<uint32_t>> out;
    out.first.resize(ids.size());
    out.second.resize(ids.size());
    append_chunks(ids, [&](size_t at, std::span<const uint32_t> piece, const Tensor& logits) {
      const uint64_t n = piece.size();
      const Tensor parts[3] = {device_->tensor(DType::u32, n, "targets"),
                               device_->tensor(DType::f32, n, "log-probabilities"),
                               device_->tensor(DType::u32, n, "argmax")};
      device_->upload(parts[0], targets.data() + at);
      prefill_chunk(piece, uint32_t(n), logits, poll, parts, {});
      device_->download(parts[1], out.first.data() + at);
      device_->download(parts[2], out.second.data() + at);
    });
    return out;
  });
}

std::vector<float> Session::verify(std::span<const uint32_t> ids) {
  return guarded([&] {
    if (ids.empty() || ids.size() > LILY_MAX_ROWS)
      throw std::invalid_argument(
          concat("verify: ", ids.size(), " tokens, allowed 1 to ", LILY_MAX_ROWS));
    check_ids(ids, config_.vocab);
    check_room("verify", ids.size());
    catch_up();
    verified_at_ = kNone;
    run(record_rows(ids, false, "verify"));
    verified_.assign(ids.begin(), ids.end());
    verified_at_ = consumed_;
    std::vector<float> out(ids.size() * uint64_t(config_.vocab));
    device_->download(many_logits_.slice(0, out.size()), out.data());
    return out;
  });
}

void Session::commit(uint32_t n) {
  guarded([&] {
    check(verified_at_ != kNone && verified_at_ == consumed_,
          "commit: nothing was verified at this position");
    if (n == 0 || n > verified_.size())
      throw std::invalid_argument(
          concat("commit of ", n, " tokens, verified were ", verified_.size()));
    const std::span<const uint32_t> ids(verified_.data(), n);
    write_step(ids, consumed_);
    CommandList list;
    list.label = concat("commit of ", n, " rows");
    Recorder r(*device_, list);
    engine_->model.commit(r, *many_rows_, decode_args(n, 1, true, {}));
    copy(many_logits_.slice(uint64_t(n - 1) * config_.vocab, config_.vocab), logits_[current_ ^ 1],
         list);
    previous_ = kNone;
    shown_ = -1;
    run(std::move(list));
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    advance(n);
    logits_valid_ = true;
    counts_exact_ = false;
    verified_at_ = kNone;
    shown_ = current_;
  });
}

std::vector<uint32_t> Session::tokens() const {
  const auto lock = claim();
  return ids_;
}
uint32_t Session::position() const {
  const auto lock = claim();
  return uint32_t(ids_.size());
}
std::vector<uint32_t> Session::snapshots() const {
  const auto lock = claim();
  std::vector<uint32_t> at;
  for (const Snapshot& s : snapshots_) at.push_back(uint32_t(s.ids.size()));
  return at;
}

std::pair<std::vector<float>, std::vector<float>> Session::recurrent_state() {
  return guarded([&] {
    catch_up();
    const State& s = states_[current_];
    std::vector<float> conv(s.conv.elements), delta(s.delta.elements);
    if (s.conv.dtype == DType::f32) {
      device_->download(s.conv, conv.data());
    } else {
      std::vector<uint16_t> raw(s.conv.elements);
      device_->download(s.conv, raw.data());
      for (size_t i = 0; i < raw.size(); ++i) {
        const uint32_t bits = uint32_t(raw[i]) << 16;
        std::memcpy(&conv[i], &bits, 4);
      }
    }
    device_->download(s.delta, delta.data());
    return std::make_pair(std::move(conv), std::move(delta));
  });
}

}  // namespace lily
