// cpu_sample.cpp: twins of scoring and sampling. What decides which token is drawn rounds exactly
// as in the kernels: the same explicit fma, the same integer sums.
#include <algorithm>
#include <bit>

#include "cpu_matrix.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

constexpr uint32_t kBlock = 1024;     // tokens of a block of statistics
constexpr uint32_t kMaxBlocks = 512;  // of a row
constexpr float kMaxFloat = 3.402823466e+38f;

// ---- util.h's functions, operation by operation ----
inline float exp_same(float x) {
  float c = x > -104.0f ? x : -104.0f;
  c = c < 89.0f ? c : 89.0f;
  const float n = std::rint(c * 1.44269504f);
  float r = std::fma(n, -0.693145752f, c);
  r = std::fma(n, -1.42860677e-6f, r);
  float e = 1.0f / 5040.0f;
  e = std::fma(e, r, 1.0f / 720.0f);
  e = std::fma(e, r, 1.0f / 120.0f);
  e = std::fma(e, r, 1.0f / 24.0f);
  e = std::fma(e, r, 1.0f / 6.0f);
  e = std::fma(e, r, 0.5f);
  e = std::fma(e, r, 1.0f);
  e = std::fma(e, r, 1.0f);
  const int32_t k = int32_t(n), half = k / 2;
  e = e * bits_to_float(uint32_t(half + 127) << 23) * bits_to_float(uint32_t(k - half + 127) << 23);
  return x == x ? e : x;
}
inline float two_atanh(float s) {
  const float s2 = s * s;
  float t = std::fma(s2, 1.0f / 11.0f, 1.0f / 9.0f);
  t = std::fma(s2, t, 1.0f / 7.0f);
  t = std::fma(s2, t, 1.0f / 5.0f);
  t = std::fma(s2, t, 1.0f / 3.0f);
  return 2.0f * std::fma(s2 * t, s, s);
}
// Of a normal positive x.
inline float log_same(float x) {
  const uint32_t u = float_to_bits(x) - 0x3f3504f3u;
  const float e = float(int32_t(u) >> 23);
  const float m = bits_to_float((u & 0x007fffffu) + 0x3f3504f3u);
  const float l = two_atanh((m - 1.0f) / (m + 1.0f));
  return std::fma(e, 0.693145752f, std::fma(e, 1.42860677e-6f, l));
}

// ---- rows of floats ----
struct Best {
  float value;
  uint32_t id;
};
// The highest of n values and the first that has it; NaN counts as -inf.
Best best_of(const float* v, uint32_t n) {
  constexpr uint32_t kLanes = 16;
  float lanes[kLanes];
  for (float& lane : lanes) lane = -INFINITY;
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (uint32_t j = 0; j < kLanes; ++j) lanes[j] = v[i + j] > lanes[j] ? v[i + j] : lanes[j];
  }
  float top = -INFINITY;
  for (; i < n; ++i) top = v[i] > top ? v[i] : top;
  for (float lane : lanes) top = lane > top ? lane : top;
  for (i = 0; i < n && !(v[i] == top); ++i) continue;
  return {top, i < n ? i : 0};
}
// Sum of e^(v - top) in an order that depends on n alone: long rows by blocks, which keeps the
// rounding of one sum away from the next.
float exp_sum(const float* v, uint32_t n, float top) {
  constexpr uint32_t kLanes = 16;
  float total = 0.0f;
  for (uint32_t begin = 0; begin < n; begin += kBlock) {
    const uint32_t end = std::min(n, begin + kBlock);
    float lanes[kLanes] = {}, sum = 0.0f;
    uint32_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (uint32_t j = 0; j < kLanes; ++j) lanes[j] += exp_same(v[i + j] - top);
    }
    for (; i < end; ++i) sum += exp_same(v[i] - top);
    for (float lane : lanes) sum += lane;
    total += sum;
  }
  return total;
}

// ---- statistics of a block, see sample.metal ----
struct Stats {
  float raw_max, raw_sum;
  uint32_t raw_id;
  float max;
  uint32_t id, allowed, broken, nonzero;
};
static_assert(sizeof(Stats) == 32, "eight floats of the stats tensor");

// Step's arrays of one slot, null where the slot does not use them.
struct Rules {
  const SlotSampling* sampling;
  const uint32_t *counts, *prompt, *mask;
  const float* bias;
};
Rules rules_of(const TwinCall& call, uint32_t slot, uint32_t vocab) {
  const Step& s = step(call);
  const SlotSampling& sampling = s.sampling[slot];
  const auto words = [&](uint32_t offset, size_t stride) {
    return reinterpret_cast<const uint32_t*>(call.step + offset) + slot * stride;
  };
  const bool penalties =
      sampling.repetition != 1.0f || sampling.presence != 0.0f || sampling.frequency != 0.0f;
  return {
      &sampling, penalties ? words(s.counts_offset, vocab) : nullptr,
      penalties ? words(s.prompt_counts_offset, vocab) : nullptr,
      sampling.use_mask ? words(s.mask_offset, (vocab + 31) / 32) : nullptr,
      sampling.use_bias ? reinterpret_cast<const float*>(words(s.bias_offset, vocab)) : nullptr};
}
// What the draw sees: -inf for a token that may not be drawn, never NaN, -0 or +inf.
inline float adjust(float l, uint32_t token, const Rules& rules) {
  const SlotSampling& s = *rules.sampling;
  if (rules.mask && ((rules.mask[token / 32] >> (token & 31)) & 1) == 0) return -INFINITY;
  float v = l;
  if (rules.counts) {
    const uint32_t generated = rules.counts[token];
    const float lost = generated ? std::fma(s.frequency, float(generated), s.presence) : 0.0f;
    if (generated != 0 || rules.prompt[token] != 0) {
      v = l < 0.0f ? std::fma(l, s.repetition, -lost) : l / s.repetition - lost;
    }
  }
  if (rules.bias) v += rules.bias[token];
  if (s.temperature > 0.0f) v = v / s.temperature;
  if (!(v > -INFINITY)) return -INFINITY;
  return v == 0.0f ? 0.0f : v < kMaxFloat ? v : kMaxFloat;
}

// ---- what may be drawn ----
struct Token {
  float value;
  uint32_t id;
};
inline bool operator<(const Token& a, const Token& b) {  // by rank
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}
inline float relative(float v, float top) {
  const float share = exp_same(v - top);
  return share < 1.0f ? share : 1.0f;
}
inline uint64_t fixed_mass(float share) {
  const float scaled = share * 1048576.0f;
  const uint32_t high = uint32_t(scaled);
  return (uint64_t(high) << 20) + uint32_t((scaled - float(high)) * 1048576.0f);
}
inline uint64_t part_of(float share, uint64_t total) {
  const uint64_t s = uint32_t(share * 1073741824.0f);
  return (total >> 30) * s + (((total & 0x3fffffff) * s) >> 30);
}
// Tokens up to this one in rank stay.
inline bool is_kept(const Token& last, float v, uint32_t id) {
  return (v > last.value) | ((v == last.value) & (id <= last.id));
}
inline uint32_t bin_of(float v, float top) {
  const float distance = (top - v) * 32.0f;
  return uint32_t(distance < 1023.0f ? distance : 1023.0f);
}
// The last token that stays: of the first `top_k`, or (0) of those before which less than `top_p` of
// the mass lies. By bins of distance from the best; the bin where the limit falls is sorted. Bins and
// masses are computed for whole parts of a row, kept or not, which vectorises.
constexpr uint32_t kPart = 64;  // tokens; divides kBlock
Token keep_first(const float* adjusted, uint32_t vocab, float top, const Token& kept,
                 uint32_t top_k, float top_p) {
  uint64_t sums[1024] = {};
  uint32_t counts[1024] = {};
  for (uint32_t begin = 0; begin < vocab; begin += kPart) {
    const float* v = adjusted + begin;
    const uint32_t n = std::min(kPart, vocab - begin);
    uint32_t any = 0, bins[kPart];
    float shares[kPart];
    for (uint32_t i = 0; i < n; ++i) any |= v[i] >= kept.value;
    if (!any) continue;
    for (uint32_t i = 0; i < n; ++i) bins[i] = bin_of(v[i], top);
    if (top_k == 0) {
      for (uint32_t i = 0; i < n; ++i) shares[i] = relative(v[i], top);
    }
    for (uint32_t i = 0; i < n; ++i) {  // no branch: whether a token is kept cannot be foreseen
      const uint32_t in = is_kept(kept, v[i], begin + i);
      counts[bins[i]] += in;
      sums[bins[i]] += in * (top_k == 0 ? fixed_mass(shares[i]) : 1);
    }
  }
  uint64_t target = top_k, before = 0;
  if (top_k == 0) {
    uint64_t total = 0;
    for (uint64_t sum : sums) total += sum;
    target = std::max<uint64_t>(1, top_p > 0.0f ? part_of(top_p, total) : 0);
  }
  uint32_t bin = 0;
  while (before + sums[bin] < target) before += sums[bin++];
  static_assert(sizeof(Token) == 2 * sizeof(float), "tokens lie in scratch floats");
  Token* near = reinterpret_cast<Token*>(scratch(0, 2 * size_t(counts[bin])));
  uint32_t count = 0;
  for (uint32_t begin = 0; begin < vocab; begin += kPart) {
    const float* v = adjusted + begin;
    const uint32_t n = std::min(kPart, vocab - begin);
    uint32_t any = 0;
    for (uint32_t i = 0; i < n; ++i) any |= (v[i] >= kept.value) & (bin_of(v[i], top) == bin);
    if (!any) continue;
    for (uint32_t i = 0; i < n; ++i) {
      if (is_kept(kept, v[i], begin + i) && bin_of(v[i], top) == bin) {
        near[count++] = {v[i], begin + i};
      }
    }
  }
  std::sort(near, near + count);
  uint32_t last = 0;
  for (uint32_t i = 0; i < count && before < target; ++i) {
    last = i;
    before += top_k == 0 ? fixed_mass(relative(near[i].value, top)) : 1;
  }
  return near[last];
}

// ---- randomness, see sample.metal ----
// The random words of kPart tokens from 4 * block on, four of each block of the counter.
void philox(uint32_t k0, uint32_t k1, uint32_t block, uint32_t position, uint32_t* words) {
  constexpr uint32_t kBlocks = kPart / 4;
  uint32_t c[4][kBlocks] = {};
  for (uint32_t i = 0; i < kBlocks; ++i) {
    c[0][i] = block + i;
    c[1][i] = position;
  }
  for (int round = 0; round < 10; ++round) {
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const uint64_t a = uint64_t(0xd2511f53u) * c[0][i], b = uint64_t(0xcd9e8d57u) * c[2][i];
      c[0][i] = uint32_t(b >> 32) ^ c[1][i] ^ k0;
      c[1][i] = uint32_t(b);
      c[2][i] = uint32_t(a >> 32) ^ c[3][i] ^ k1;
      c[3][i] = uint32_t(a);
    }
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  for (uint32_t i = 0; i < kPart; ++i) words[i] = c[i % 4][i / 4];
}
inline float gumbel(uint32_t word) {
  const uint32_t n = word >> 8;
  if (n < 8388608u) return -log_same(-log_same((float(n) + 0.5f) * 5.9604644775390625e-8f));
  const float rest = (float(16777215u - n) + 0.5f) * 5.9604644775390625e-8f;
  return -log_same(two_atanh(rest / (2.0f - rest)));
}
// -log(-log(u)) lies between these, whatever the word.
constexpr float kGumbelMin = -2.9f, kGumbelMax = 17.4f;
// Never less than gumbel(word), and cheap: with k leading ones u < 1 - 2^-(k + 1), and
// -log(-log(u)) < -log(1 - u) <= (k + 1) log(2). All of 24 ones: 25 log(2).
inline float gumbel_bound(uint32_t word) {
  return 0.694f * float(std::min(std::countl_one(word), 24) + 1);
}

uint32_t draw(const TwinCall& call, const float* adjusted, const Stats* stats, uint32_t vocab,
              float top, uint32_t allowed, const SlotSampling& s, uint32_t position) {
  Token kept = {-kMaxFloat, 0xffffffffu};
  if (s.top_k > 0 && s.top_k < allowed) {
    kept = keep_first(adjusted, vocab, top, kept, s.top_k, 0.0f);
  }
  if (s.top_p < 1.0f) kept = keep_first(adjusted, vocab, top, kept, 0, s.top_p);
  const float least = s.min_p < 1.0f ? s.min_p : 1.0f;  // the best token always stays
  // Lower values cannot win: the best token's score is at least top + kGumbelMin.
  const float floor = top + (kGumbelMin - kGumbelMax);
  Best bests[kMaxBlocks];
  const uint32_t blocks = (vocab + kBlock - 1) / kBlock;
  parallel(call, blocks, [&](size_t b) {
    Best& best = bests[b];
    best = {-INFINITY, 0xffffffffu};
    if (stats[b].max < kept.value || stats[b].max < floor) return;
    const uint32_t end = std::min(vocab, uint32_t(b + 1) * kBlock);
    for (uint32_t begin = uint32_t(b) * kBlock; begin < end; begin += kPart) {
      const float* v = adjusted + begin;
      const uint32_t n = std::min(kPart, end - begin);
      uint32_t any = 0, words[kPart];
      for (uint32_t i = 0; i < n; ++i) any |= (v[i] >= floor) & (v[i] >= kept.value);
      if (!any) continue;
      philox(s.seed_low, s.seed_high, begin / 4, position, words);
      for (uint32_t i = 0; i < n; ++i) {
        // No branches but this one, which is rarely taken: most tokens cannot win any more.
        const bool may_win = v[i] + gumbel_bound(words[i]) > best.value;
        if (!(may_win & (v[i] >= floor) & is_kept(kept, v[i], begin + i))) continue;
        if (relative(v[i], top) < least) continue;
        const float score = v[i] + gumbel(words[i]);
        if (score > best.value) best = {score, begin + i};
      }
    }
  });
  Best best = bests[0];
  for (uint32_t b = 1; b < blocks; ++b) {
    if (bests[b].value > best.value) best = bests[b];
  }
  return best.id;
}

// The raw logits' highest tokens, each block offering one at a time.
void report_top(const float* logits, uint32_t vocab, const Stats* stats, float norm, uint32_t count,
                Sampled& entry) {
  const uint32_t blocks = (vocab + kBlock - 1) / kBlock;
  Token heads[kMaxBlocks];
  for (uint32_t b = 0; b < blocks; ++b) heads[b] = {stats[b].raw_max, stats[b].raw_id};
  for (uint32_t j = 0; j < std::min(count, std::min(vocab, uint32_t(LILY_MAX_LOGPROBS))); ++j) {
    uint32_t b = 0;
    for (uint32_t i = 1; i < blocks; ++i) {
      if (heads[i] < heads[b]) b = i;
    }
    const Token next = heads[b];
    entry.top_id[j] = next.id;
    entry.top_logprob[j] = next.value - norm;
    heads[b] = {-INFINITY, 0xffffffffu};
    for (uint32_t i = b * kBlock; i < std::min(vocab, (b + 1) * kBlock); ++i) {
      const Token token = {logits[i], i};
      if (next < token && token < heads[b]) heads[b] = token;
    }
  }
}

}  // namespace

void score(const TwinCall& call) {
  const auto& p = params<Score>(call);
  parallel(call, p.rows, [&](size_t r) {
    const float* row = arg<float>(call, 0) + r * p.vocab;
    const Best best = best_of(row, p.vocab);
    const float sum = exp_sum(row, p.vocab, best.value);
    const uint32_t target = arg<uint32_t>(call, 1)[r];
    arg<float>(call, 2)[r] = target < p.vocab ? row[target] - best.value - std::log(sum) : NAN;
    arg<uint32_t>(call, 3)[r] = best.id;
  });
}

void sample_scan(const TwinCall& call) {
  const auto& p = params<SampleScan>(call);
  const uint32_t rows = std::min(p.rows, step(call).rows);
  const uint32_t blocks = (p.vocab + kBlock - 1) / kBlock;
  parallel(call, size_t(rows) * blocks, [&](size_t job) {
    const size_t row = job / blocks;
    const uint32_t begin = uint32_t(job % blocks) * kBlock, n = std::min(kBlock, p.vocab - begin);
    const float* logits = arg<float>(call, 0) + row * p.vocab + begin;
    float* adjusted = arg<float>(call, 1) + row * p.vocab + begin;
    const Rules rules = rules_of(call, step(call).slot[row], p.vocab);
    uint32_t allowed = 0, broken = 0, nonzero = 0;
    for (uint32_t i = 0; i < n; ++i) {
      adjusted[i] = begin + i < p.token_limit ? adjust(logits[i], begin + i, rules) : -INFINITY;
      allowed += adjusted[i] > -INFINITY;
      broken |= (float_to_bits(logits[i]) & 0x7f800000u) == 0x7f800000u;
      nonzero |= logits[i] != 0.0f;
    }
    const Best raw = best_of(logits, n), best = best_of(adjusted, n);
    reinterpret_cast<Stats*>(arg<float>(call, 2))[job] = {
        raw.value,       exp_sum(logits, n, raw.value),
        begin + raw.id,  best.value,
        begin + best.id, allowed,
        broken,          nonzero};
  });
}

void sample_draw(const TwinCall& call) {
  const auto& p = params<SampleDraw>(call);
  Step& now = step(call);
  const uint32_t rows = std::min(p.rows, now.rows), blocks = (p.vocab + kBlock - 1) / kBlock;
  for (uint32_t row = 0; row < rows; ++row) {
    const float* logits = arg<float>(call, 0) + size_t(row) * p.vocab;
    const float* adjusted = arg<float>(call, 1) + size_t(row) * p.vocab;
    const Stats* stats = reinterpret_cast<const Stats*>(arg<float>(call, 2)) + size_t(row) * blocks;
    const uint32_t position = now.position[row] + 1, slot = now.slot[row];
    const SlotSampling& s = now.sampling[slot];
    Best best = {-INFINITY, 0};
    float raw_max = -INFINITY, sum = 0.0f;
    uint32_t allowed = 0, broken = 0, nonzero = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
      if (stats[b].max > best.value) best = {stats[b].max, stats[b].id};
      raw_max = std::max(raw_max, stats[b].raw_max);
      allowed += stats[b].allowed;
      broken |= stats[b].broken;
      nonzero |= stats[b].nonzero;
    }
    Sampled& entry = arg<Sampled>(call, 3)[size_t(row) * p.ring + position % p.ring];
    entry.token = 0xffffffffu;
    entry.status = broken || !nonzero ? 2 : allowed == 0 ? 3 : 1;
    entry.position = position;
    entry.logprob = NAN;
    for (uint32_t& id : entry.top_id) id = 0xffffffffu;
    for (float& logprob : entry.top_logprob) logprob = -INFINITY;
    if (entry.status != 1) continue;
    for (uint32_t b = 0; b < blocks; ++b) {
      sum += stats[b].raw_sum * exp_same(stats[b].raw_max - raw_max);
    }
    const float norm = raw_max + std::log(sum);
    const uint32_t token = s.temperature > 0.0f ? draw(call, adjusted, stats, p.vocab, best.value,
                                                       allowed, s, position)
                                                : best.id;
    report_top(logits, p.vocab, stats, norm, s.logprobs, entry);
    entry.token = token;
    entry.logprob = logits[token] - norm;
    now.id[row] = token;
    now.position[row] = position;
    ++reinterpret_cast<uint32_t*>(call.step + now.counts_offset)[size_t(slot) * p.vocab + token];
  }
}

}  // namespace LILY_CPU_NS
}  // namespace lily
