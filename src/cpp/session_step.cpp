// session_step.cpp: Session: a token a step with one step of lookahead, and how it is drawn.
#include <cstring>

#include "engine.h"

namespace lily {

void Session::land() {
  if (!flight_) return;
  const Ticket ticket = flight_->ticket;
  flight_.reset();
  previous_ = kNone;
  counts_exact_ = false;  // its sample was counted
  try {
    device_->wait(ticket);
  } catch (const Cancelled&) {
    return;  // the present state was only read
  }
  advance(1);
  logits_valid_ = true;
}

void Session::record_sample(Recorder& r, int which) {
  const uint32_t vocab = config_.vocab;
  r.sample_scan({1, vocab, config_.token_limit}, {logits_[which], adjusted_, stats_}, step_);
  r.sample_draw({1, vocab, config_.token_limit, kRing}, {logits_[which], adjusted_, stats_, ring_},
                step_);
}
const ProgramRef& Session::sample_program(int which) {
  ProgramRef& program = sample_programs_[which];
  if (!program) {
    CommandList list;
    list.label = "sample";
    Recorder r(*device_, list);
    record_sample(r, which);
    program = device_->compile(std::move(list), true);
  }
  return program;
}
uint32_t Session::step_splits(uint32_t position) {
  const uint32_t splits = splits_for(position + 1);
  if (!one_row_ || one_row_->splits != splits) {
    step_programs_.clear();
    one_row_ = std::make_unique<DecodeScratch>(*device_, config_, 1, splits, false);
  }
  return splits;
}
CommandList Session::record_step(int from, uint32_t splits) {
  const std::vector<Tensor> slabs = engine_->kv.slabs();
  CommandList list;
  list.label = "decode step";
  Recorder r(*device_, list);
  engine_->model.decode(
      r, *one_row_,
      {1, splits, true, step_, slabs, states_[from], states_[from ^ 1], logits_[from ^ 1]});
  record_sample(r, from ^ 1);
  return list;
}
const ProgramRef& Session::step_program(int from, uint32_t position) {
  const uint32_t splits = step_splits(position);
  ProgramRef& program = step_programs_[{from, splits, engine_->kv.generation()}];
  if (!program) program = device_->compile(record_step(from, splits), true);
  return program;
}
// What the first tokens need from the host is done while the device still computes the prompt.
void Session::compile_ahead(uint32_t position, int state) {
  try {
    sample_program(state);
    if (position + 1 < engine_->max_context) step_program(state, position);
  } catch (const std::exception&) {  // comes again when it is their turn
  }
}
CommandList Session::step_list() {
  return guarded([&] {
    catch_up();
    check_room("step_list", 1);
    const uint32_t position = uint32_t(ids_.size());
    own_blocks(position, position + 1);
    return record_step(current_, step_splits(position));
  });
}
// Takes the row in Step, which the sampler before it has set, at position ids_.size() - 1 or, for
// the lookahead, one further.
Ticket Session::submit_step() {
  const uint32_t position = uint32_t(ids_.size()) - (flight_ ? 0 : 1);
  const int from = flight_ ? current_ ^ 1 : current_;
  own_blocks(position, position + 1);
  return device_->submit(step_program(from, position), &cancel_);
}

// A lookahead that finds no memory, or is cancelled, is none of the caller's business yet.
Ticket Session::look_ahead() {
  try {
    return submit_step();
  } catch (const DeviceError&) {
    throw;
  } catch (const LilyError&) {
    return 0;
  }
}

SampledToken Session::take(Ticket ticket, uint32_t position) {
  device_->wait(ticket);
  Sampled s;
  std::memcpy(&s, ring_.buffer->host + ring_.offset + position % kRing * sizeof(Sampled), sizeof s);
  check<DeviceError>(s.status != 2, "decode step at position ", position,
                     ": the logits are all zero or not finite");
  check(s.status != 3, "step: the mask allows no token");
  check<DeviceError>(s.status == 1 && s.position == position && s.token < config_.token_limit,
                     "decode step at position ", position, ": the sampler reported status ",
                     s.status, ", token ", s.token, " at ", s.position);
  SampledToken t;
  t.id = s.token;
  t.logprob = s.logprob;
  const uint32_t reported = std::min(host_step_.sampling[0].logprobs, config_.vocab);
  for (uint32_t i = 0; i < reported; ++i) t.top.emplace_back(s.top_id[i], s.top_logprob[i]);
  return t;
}

SampledToken Session::step(const std::vector<uint32_t>* allowed) {
  return guarded([&] {
    check(!ids_.empty(), "step: the session is empty, sync a prompt first");
    if (ids_.size() >= engine_->max_context) {
      throw std::invalid_argument(
          concat("the context is full: ", ids_.size(), " of ", engine_->max_context, " tokens"));
    }
    verified_at_ = kNone;
    SlotSampling& options = host_step_.sampling[0];
    const uint32_t position = uint32_t(ids_.size());  // which the new token takes
    const bool lookahead = !allowed && position + 1 < engine_->max_context;
    if (flight_ && (allowed || flight_->doubtful)) land();  // it was sampled without the mask
    SampledToken token;
    if (flight_) {
      const Ticket ticket = flight_->ticket;
      const Ticket next = lookahead ? look_ahead() : 0;
      try {
        token = take(ticket, position);
      } catch (const LilyError& error) {
        flight_.reset();
        if (next) {
          try {
            device_->wait(next);
          } catch (const LilyError&) {
          }
        }
        // Cancelled, the next one was as well. Otherwise only the draw failed, and the next one has
        // overwritten the state before it.
        if (!dynamic_cast<const Cancelled*>(&error)) {
          advance(1);
          logits_valid_ = true;
        }
        previous_ = kNone;
        counts_exact_ = false;
        throw;
      }
      advance(1);
      logits_valid_ = true;
      flight_.reset();
      if (next) flight_ = Flight{next};
    } else {
      catch_up();
      if (!logits_valid_) {  // a restored state: its last token again
        const std::vector<uint32_t> wanted = ids_;
        restore(wanted, position);
        consume(std::span<const uint32_t>(wanted).subspan(consumed_), {}, {});
      }
      options.use_mask = allowed != nullptr;
      if (allowed) {
        check(allowed->size() == (config_.vocab + 31) / 32, "step: the mask has ", allowed->size(),
              " words, needs ", (config_.vocab + 31) / 32);
        device_->upload(step_part(host_step_.mask_offset, allowed->size() * 4), allowed->data());
      }
      write_counts();
      const uint32_t last = ids_.back();
      write_step({&last, 1}, position - 1);
      token = take(device_->submit(sample_program(current_), &cancel_), position);
    }
    generated_from_ =
        std::min(generated_from_, position);  // the call that wrote it may not have got so far
    ids_.push_back(token.id);
    shown_ = current_;
    if (lookahead && !flight_) {
      if (const Ticket ticket = look_ahead()) flight_ = Flight{ticket};
    }
    return token;
  });
}

void Session::set_sampling(const SamplingOptions& o) {
  guarded([&] {
    if (o.logprobs > LILY_MAX_LOGPROBS) {
      throw std::invalid_argument(
          concat("logprobs is ", o.logprobs, ", allowed 0 to ", LILY_MAX_LOGPROBS));
    }
    for (const auto& [token, value] : o.bias) {
      if (token >= config_.vocab)
        throw std::invalid_argument(
            concat("logit bias for token ", token, ", the vocabulary has ", config_.vocab));
    }
    land();
    sampling_ = o;
    SlotSampling& s = host_step_.sampling[0];
    s = {o.temperature,   o.top_p,      o.min_p,          o.presence,
         o.frequency,     o.repetition, o.top_k,          0,
         !o.bias.empty(), o.logprobs,   uint32_t(o.seed), uint32_t(o.seed >> 32)};
    if (!o.bias.empty()) {
      std::vector<float> bias(config_.vocab, 0.0f);
      for (const auto& [token, value] : o.bias) bias[token] = value;
      device_->upload(step_part(host_step_.bias_offset, config_.vocab * 4ull), bias.data());
    }
  });
}

}  // namespace lily
