// ops_sample.cpp: plans of scoring and sampling.
#include "ops.h"

namespace lily {
namespace {

constexpr uint32_t kBlock = 1024;  // tokens of a block of statistics, see sample.metal
constexpr uint32_t kDrawThreads = 512;
constexpr uint32_t kMaxBlocks = kDrawThreads;  // a draw has one thread for each
constexpr uint32_t kStats = 8;

void check_sampling(const char* what, uint32_t rows, uint32_t vocab, uint32_t token_limit) {
  check(rows >= 1 && rows <= LILY_MAX_ROWS, what, ": ", rows, " rows, supported 1 to ",
        LILY_MAX_ROWS);
  check(vocab >= 1 && vocab <= kBlock * kMaxBlocks, what, ": vocabulary of ", vocab,
        ", supported 1 to ", kBlock * kMaxBlocks);
  check(token_limit >= 1 && token_limit <= vocab, what, ": token limit ", token_limit,
        " of a vocabulary of ", vocab);
}
uint64_t stats_elements(uint32_t rows, uint32_t vocab) {
  return uint64_t(rows) * ceil_div(vocab, kBlock) * kStats;
}

}  // namespace

Plan plan(const Score& p, const Target&) {
  check(p.rows >= 1, "score: ", p.rows, " rows, needs 1 or more");
  check(p.vocab >= 1, "score: vocabulary of ", p.vocab, ", needs 1 or more");
  Plan plan;
  plan.variant = find_variant(Op::score);
  plan.grid = {p.rows, 1, 1, 1024};
  plan.needs = {
      {"logits", DType::f32, uint64_t(p.rows) * p.vocab, Access::read},
      {"targets", DType::u32, p.rows, Access::read},
      {"logprob", DType::f32, p.rows, Access::write},
      {"argmax", DType::u32, p.rows, Access::write},
  };
  return plan;
}

Plan plan(const SampleScan& p, const Target&) {
  check_sampling("sample_scan", p.rows, p.vocab, p.token_limit);
  const uint64_t values = uint64_t(p.rows) * p.vocab;
  Plan plan;
  plan.variant = find_variant(Op::sample_scan);
  plan.grid = {ceil_div(p.vocab, kBlock), p.rows, 1, 1024};
  plan.needs = {
      {"logits", DType::f32, values, Access::read},
      {"adjusted", DType::f32, values, Access::write},
      {"stats", DType::f32, stats_elements(p.rows, p.vocab), Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const SampleDraw& p, const Target&) {
  check_sampling("sample_draw", p.rows, p.vocab, p.token_limit);
  check(p.ring >= 1, "sample_draw: ring of ", p.ring, " entries, needs 1 or more");
  const uint64_t values = uint64_t(p.rows) * p.vocab;
  Plan plan;
  plan.variant = find_variant(Op::sample_draw);
  plan.grid = {p.rows, 1, 1, kDrawThreads};
  plan.needs = {
      {"logits", DType::f32, values, Access::read},
      {"adjusted", DType::f32, values, Access::read},
      {"stats", DType::f32, stats_elements(p.rows, p.vocab), Access::read},
      {"ring", DType::u32, uint64_t(p.rows) * p.ring * (sizeof(Sampled) / 4), Access::write},
  };
  plan.step = Access::read_write;
  return plan;
}

}  // namespace lily
