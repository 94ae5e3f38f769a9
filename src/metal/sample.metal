// sample.metal: scores of given tokens; penalties, bias, mask and temperature; the draw and Step's
// advance. Whatever decides which token is drawn runs in one order of roundings on every device:
// explicit fma, integer sums, no value that depends on who comes first.
#include "util.h"

#define SAMPLE_BLOCK 1024  // tokens of a block of statistics, threads of score and sample_scan
#define SAMPLE_SIMDS 32
#define DRAW_THREADS 512  // of sample_draw, which wants more registers than 1024 threads have
#define DRAW_SIMDS 16

// ---- whole groups -------------------------------------------------------------------------------
struct Best {
  float value;
  uint id;
};
// The highest value of the group and the lowest id that has it. No value may be NaN; simds is a
// power of two.
static inline Best group_best(float value, uint id, threadgroup float* values,
                              threadgroup uint* ids, uint lane, uint simd, uint simds) {
  Best best;
  best.value = simd_max(value);
  best.id = simd_min(value == best.value ? id : 0xffffffffu);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    values[simd] = best.value;
    ids[simd] = best.id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint other = lane & (simds - 1);
  const float v = values[other];
  best.value = simd_max(v);
  best.id = simd_min(v == best.value ? ids[other] : 0xffffffffu);
  return best;
}
// Sum over the lanes up to this one. Shuffles have 32 bits.
static inline ulong simd_prefix(ulong v, uint lane) {
  UNROLL for (ushort o = 1; o < 32; o <<= 1) {
    const uint low = simd_shuffle_up((uint)v, o), high = simd_shuffle_up((uint)(v >> 32), o);
    if (lane >= o) v += ((ulong)high << 32) | low;
  }
  return v;
}
// Sum over the threads before this one, and over all.
static inline ulong group_prefix(ulong v, thread ulong& total, threadgroup ulong* scratch,
                                 uint lane, uint simd, uint simds) {
  const ulong sum = simd_prefix(v, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 31) scratch[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong sums = simd_prefix(lane < simds ? scratch[lane] : 0, lane);
  total = ((ulong)simd_shuffle((uint)(sums >> 32), 31) << 32) | simd_shuffle((uint)sums, 31);
  // What the simdgroups before this one have lies one lane below its own.
  const ushort below = simd > 0 ? simd - 1 : 0;
  const uint low = simd_shuffle((uint)sums, below), high = simd_shuffle((uint)(sums >> 32), below);
  return sum - v + (simd > 0 ? ((ulong)high << 32) | low : 0);
}

// ---- score --------------------------------------------------------------------------------------
// A group per row: its maximum, then the sum of exponentials.
#define SCORE(op, name, c0, c1, c2)                                                                \
  KERNEL(name)(IN(float, logits, 0), IN(uint, targets, 1), OUT(float, logprob, 2),                 \
               OUT(uint, argmax, 3), PARAMS(Score, 4) IDS) {                                       \
    READ_IDS                                                                                       \
    SHARED(float, values, SAMPLE_SIMDS);                                                           \
    SHARED(uint, ids, SAMPLE_SIMDS);                                                               \
    device const float* row = logits + (ulong)group.x * p.vocab;                                   \
    float top = -INFINITY, sum = 0.0f;                                                             \
    uint at = tid;                                                                                 \
    for (uint i = tid; i < p.vocab; i += SAMPLE_BLOCK) {                                           \
      if (row[i] > top) {                                                                          \
        top = row[i];                                                                              \
        at = i;                                                                                    \
      }                                                                                            \
    }                                                                                              \
    const Best best = group_best(top, at, values, ids, lane, simd, SAMPLE_SIMDS);                  \
    for (uint i = tid; i < p.vocab; i += SAMPLE_BLOCK) sum += exp_(row[i] - best.value);           \
    sum = group_sum(sum, values, lane, simd, SAMPLE_SIMDS);                                        \
    if (tid == 0) {                                                                                \
      const uint target = targets[group.x];                                                        \
      logprob[group.x] = target < p.vocab ? row[target] - best.value - log_(sum) : NAN;            \
      argmax[group.x] = best.id;                                                                   \
    }                                                                                              \
  }
LILY_VARIANTS_score(SCORE)

// ---- sample_scan --------------------------------------------------------------------------------
// A block's statistics: eight floats, three of them bits of integers.
#define STAT_RAW_MAX 0
#define STAT_RAW_SUM 1    // of exp(raw - raw max)
#define STAT_RAW_ID 2     // bits: the first token that has the raw maximum
#define STAT_MAX 3        // of the adjusted logits
#define STAT_ID 4         // bits: the first token that has it
#define STAT_ALLOWED 5    // bits: tokens that may be drawn
#define STAT_BROKEN 6     // bits: 1 when a raw logit is not finite
#define STAT_NONZERO 7    // bits: 1 when a raw logit is not zero

static inline device const uint* step_words(device const Step* step, uint offset, ulong first) {
  return (device const uint*)((device const uchar*)step + offset) + first;
}
// What the draw sees: penalties, bias, temperature; -inf for a token that may not be drawn. Never
// NaN, -0 or +inf.
static inline float adjust(float l, uint token, uint slot, uint vocab, uint limit,
                           device const Step* step) {
  device const SlotSampling* s = step->sampling + slot;
  const ulong at = (ulong)slot * vocab + token;
  if (token >= limit) return -INFINITY;
  if (s->use_mask) {
    const uint words = (vocab + 31) / 32;
    const uint mask = *step_words(step, step->mask_offset, (ulong)slot * words + token / 32);
    if (((mask >> (token & 31)) & 1) == 0) return -INFINITY;
  }
  float v = l;
  if (s->repetition != 1.0f || s->presence != 0.0f || s->frequency != 0.0f) {
    const uint generated = *step_words(step, step->counts_offset, at);
    const uint prompt = *step_words(step, step->prompt_counts_offset, at);
    const float lost = generated ? fma(s->frequency, float(generated), s->presence) : 0.0f;
    if (generated == 0 && prompt == 0) v = l;
    else if (l < 0.0f) v = fma(l, s->repetition, -lost);
    else v = l / s->repetition - lost;
  }
  if (s->use_bias) v += as_type<float>(*step_words(step, step->bias_offset, at));
  if (s->temperature > 0.0f) v = v / s->temperature;
  if (!(v > -INFINITY)) return -INFINITY;
  return v == 0.0f ? 0.0f : min(v, FLT_MAX);
}
// A group of 1024 threads per block and row, one token a thread.
#define SAMPLE_SCAN(op, name, c0, c1, c2)                                                          \
  KERNEL(name)(IN(float, logits, 0), OUT(float, adjusted, 1), OUT(float, stats, 2),                \
               PARAMS(SampleScan, 3), STEP_IN(4) IDS) {                                            \
    READ_IDS                                                                                       \
    SHARED(float, values, SAMPLE_SIMDS);                                                           \
    SHARED(uint, ids, SAMPLE_SIMDS);                                                               \
    SHARED(ulong, scratch, SAMPLE_SIMDS);                                                          \
    const uint row = group.y, token = group.x * SAMPLE_BLOCK + tid;                                \
    if (row >= step->rows) return;                                                                 \
    const ulong at = (ulong)row * p.vocab + token;                                                 \
    const bool real = token < p.vocab;                                                             \
    const float l = real ? logits[at] : -INFINITY;                                                 \
    float v = -INFINITY;                                                                           \
    if (real) {                                                                                    \
      v = adjust(l, token, step->slot[row], p.vocab, p.token_limit, step);                         \
      adjusted[at] = v;                                                                            \
    }                                                                                              \
    const float ordered = l == l ? l : -INFINITY;                                                  \
    const Best raw = group_best(ordered, token, values, ids, lane, simd, SAMPLE_SIMDS);            \
    const Best best = group_best(v, token, values, ids, lane, simd, SAMPLE_SIMDS);                 \
    const float e = real ? exp_(l - raw.value) : 0.0f;                                             \
    const float sum = group_sum(e, values, lane, simd, SAMPLE_SIMDS);                              \
    const ulong broken = real && !isfinite(l), nonzero = real && l != 0.0f;                        \
    ulong counts;                                                                                  \
    group_prefix((ulong)(v > -INFINITY) | (broken << 16) | (nonzero << 32), counts, scratch, lane, \
                 simd, SAMPLE_SIMDS);                                                              \
    if (tid == 0) {                                                                                \
      device float* to = stats + ((ulong)row * ((p.vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK) +     \
                                  group.x) * 8;                                                    \
      to[STAT_RAW_MAX] = raw.value;                                                                \
      to[STAT_RAW_SUM] = sum;                                                                      \
      to[STAT_RAW_ID] = as_type<float>(raw.id);                                                    \
      to[STAT_MAX] = best.value;                                                                   \
      to[STAT_ID] = as_type<float>(best.id);                                                       \
      to[STAT_ALLOWED] = as_type<float>((uint)counts & 0xffffu);                                   \
      to[STAT_BROKEN] = as_type<float>(((uint)counts >> 16) ? 1u : 0u);                            \
      to[STAT_NONZERO] = as_type<float>((uint)(counts >> 32) ? 1u : 0u);                           \
    }                                                                                              \
  }
LILY_VARIANTS_sample_scan(SAMPLE_SCAN)

// ---- what may be drawn --------------------------------------------------------------------------
// Tokens whose key is higher than `key`, and of those that have it the ids up to `cut`.
struct Kept {
  uint key, cut;
};
static inline bool is_kept(Kept kept, uint key, uint id) {
  return key > kept.key || (key == kept.key && id <= kept.cut);
}
// A token's probability relative to the best one's; as an integer in units of 2^-40.
static inline float relative(float v, float top) { return min(exp_(v - top), 1.0f); }
static inline ulong fixed_mass(float share) {
  const float scaled = share * 1048576.0f;
  const uint high = uint(scaled);
  return ((ulong)high << 20) + uint((scaled - float(high)) * 1048576.0f);
}
// Floor of share * total without a product of more than 64 bits; 0 < share < 1, total < 2^60.
static inline ulong part_of(float share, ulong total) {
  const ulong s = uint(share * 1073741824.0f);
  return (total >> 30) * s + (((total & 0x3fffffff) * s) >> 30);
}
// ---- where they are -----------------------------------------------------------------------------
// What the passes of a draw go through: the tokens of some blocks, or a list of tokens once they are
// few. The order of the list is nobody's: sums are of integers, and ids decide between equals.
#define LIST_TOKENS 2048
struct Candidates {
  threadgroup uint* blocks;  // in ascending order
  threadgroup uint* ids;
  threadgroup float* values;
  threadgroup atomic_uint* listed;
  uint count;  // tokens to go through
  bool list;
};
struct Candidate {
  uint id;
  float value;
};
static inline Candidate candidate(thread const Candidates& c, device const float* adjusted,
                                  uint vocab, uint i) {
  Candidate got;
  got.id = 0;
  got.value = -INFINITY;
  if (i >= c.count) return got;
  if (c.list) {
    got.id = c.ids[i];
    got.value = c.values[i];
  } else {
    got.id = c.blocks[i / SAMPLE_BLOCK] * SAMPLE_BLOCK + i % SAMPLE_BLOCK;
    if (got.id < vocab) got.value = adjusted[got.id];
  }
  return got;
}
// Several loads in flight a thread: candidates i, i + DRAW_THREADS, ..
#define DRAW_LOADS 8
static inline void load_candidates(thread const Candidates& c, device const float* adjusted,
                                   uint vocab, uint i, thread Candidate (&got)[DRAW_LOADS]) {
  UNROLL for (uint j = 0; j < DRAW_LOADS; ++j)
    got[j] = candidate(c, adjusted, vocab, i + j * DRAW_THREADS);
}
// The blocks whose maximum is at least `least`; -inf leaves out those that have nothing to draw.
static inline void choose_blocks(thread Candidates& c, float maximum, float least,
                                 threadgroup ulong* scratch, uint tid, uint lane, uint simd) {
  ulong count;
  const bool active = maximum >= least && maximum > -INFINITY;
  const ulong at = group_prefix(active, count, scratch, lane, simd, DRAW_SIMDS);
  if (active) c.blocks[at] = tid;
  c.count = (uint)count * SAMPLE_BLOCK;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
// Bins of 1/16 of distance from the best, and 512 finer ones of each: both rise as values fall.
static inline float bins_away(float v, float top) {
  return min((top - v) * 16.0f, float(DRAW_THREADS - 1));
}
struct Bin {
  float near, fine;  // fine < 0: all of the bin; near < 0: all bins
};
static inline Bin all_bins() {
  Bin bin;
  bin.near = bin.fine = -1.0f;
  return bin;
}
static inline bool in_bin(Bin bin, float away) {
  const float finer = (away - bin.near) * float(DRAW_THREADS);
  return bin.near < 0.0f || (away >= bin.near && away < bin.near + 1.0f &&
                             (bin.fine < 0.0f || (finer >= bin.fine && finer < bin.fine + 1.0f)));
}
// Lists the kept tokens of a bin from `least` on, if they are few enough.
static inline void list_candidates(thread Candidates& c, device const float* adjusted, uint vocab,
                                   float top, float least, Bin bin, Kept kept, uint tid) {
  if (tid == 0) atomic_store_explicit(c.listed, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < c.count; i += DRAW_LOADS * DRAW_THREADS) {
    Candidate got[DRAW_LOADS];
    load_candidates(c, adjusted, vocab, i, got);
    UNROLL for (uint j = 0; j < DRAW_LOADS; ++j) {
      const float v = got[j].value;
      if (v < least || !in_bin(bin, bins_away(v, top)) || !is_kept(kept, order_key(v), got[j].id))
        continue;
      const uint at = atomic_fetch_add_explicit(c.listed, 1u, memory_order_relaxed);
      if (at < LIST_TOKENS) {
        c.ids[at] = got[j].id;
        c.values[at] = v;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint found = atomic_load_explicit(c.listed, memory_order_relaxed);
  if (found <= LIST_TOKENS) {
    c.count = found;
    c.list = true;
  }
}

// ---- top-k and top-p ----------------------------------------------------------------------------
// In order of rank (value, then lowest id) a token stays while those before it have less than the
// target together: top_k tokens, or (by_mass) the part top_p of what all have. First by bins of
// distance, then by the finer ones of the bin where the limit falls, then by the bytes of the key; last
// by id among equal values. What lies behind the limit's bin is left out from then on, and only the
// finer bin's tokens are gone through.
#define KEEP_BINS DRAW_THREADS
static inline Kept keep_first(thread Candidates& c, device const float* adjusted, uint vocab,
                              float top, float block_max, Kept kept, bool by_mass,
                              device const SlotSampling* s, threadgroup atomic_uint* bins,
                              threadgroup ulong* scratch, threadgroup ulong* found, uint tid,
                              uint lane, uint simd) {
  Candidates border = c;
  Bin bin = all_bins();
  uint key = 0;
  ulong before = 0, target = s->top_k, total;
  _Pragma("clang loop unroll(disable)") for (uint level = 0; level < 6; ++level) {
    const uint shift = 40 - 8 * level;
    UNROLL for (uint j = 0; j < 3; ++j) {
      atomic_store_explicit(&bins[j * KEEP_BINS + tid], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < border.count; i += DRAW_LOADS * DRAW_THREADS) {
      Candidate got[DRAW_LOADS];
      load_candidates(border, adjusted, vocab, i, got);
      UNROLL for (uint j = 0; j < DRAW_LOADS; ++j) {
        const float v = got[j].value, away = bins_away(v, top);
        const uint k = order_key(v);
        if (!is_kept(kept, k, got[j].id) || !in_bin(bin, away)) continue;
        if (by_mass && top - v > 28.0f) continue;  // less than 2^-40 of the best: no mass
        uint at = uint(level == 0 ? away : (away - bin.near) * float(KEEP_BINS));
        if (level > 1) {
          if (level > 2 && (k >> (shift + 8)) != key) continue;
          at = 255 - ((k >> shift) & 255);
        }
        atomic_fetch_add_explicit(&bins[at], 1u, memory_order_relaxed);
        if (by_mass) {  // 64 bits in two words: whoever wraps the low one carries
          const ulong mass = fixed_mass(relative(v, top));
          const uint low = (uint)mass;
          const uint old =
              atomic_fetch_add_explicit(&bins[KEEP_BINS + at], low, memory_order_relaxed);
          const uint high = (uint)(mass >> 32) + (old + low < low ? 1 : 0);
          if (high)
            atomic_fetch_add_explicit(&bins[2 * KEEP_BINS + at], high, memory_order_relaxed);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint count = atomic_load_explicit(&bins[tid], memory_order_relaxed);
    ulong own = count;
    if (by_mass) {
      own = ((ulong)atomic_load_explicit(&bins[2 * KEEP_BINS + tid], memory_order_relaxed) << 32) |
            atomic_load_explicit(&bins[KEEP_BINS + tid], memory_order_relaxed);
    }
    const ulong first = before + group_prefix(own, total, scratch, lane, simd, DRAW_SIMDS);
    ulong reached = first + own;  // tokens up to this bin
    if (by_mass && level == 0) {
      const ulong part = s->top_p > 0.0f ? part_of(s->top_p, total) : 0;
      target = part > 0 ? part : 1;
      reached = group_prefix(count, total, scratch, lane, simd, DRAW_SIMDS) + count;
    }
    if (first < target && target <= first + own) {
      found[0] = tid;
      found[1] = count;
      found[2] = first;
      found[3] = reached;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    before = found[2];
    if (level > 1) {
      key = (key << 8) | (255 - (uint)found[0]);
      continue;
    }
    if (level == 0) bin.near = float((uint)found[0]);
    else bin.fine = float((uint)found[0]);
    if (border.list) continue;
    // The lowest value of the bin and a little less: what is behind the limit falls out later.
    const float least = bin.near == KEEP_BINS - 1.0f ? -FLT_MAX : top - (bin.near + 1.5f) / 16.0f;
    if (level == 0) {
      const bool few = found[3] <= LIST_TOKENS;
      choose_blocks(c, block_max, least, scratch, tid, lane, simd);
      if (few) list_candidates(c, adjusted, vocab, top, least, all_bins(), kept, tid);
      border = c;
    } else {
      list_candidates(border, adjusted, vocab, top, least, bin, kept, tid);
    }
  }
  // `ties` tokens have the last value that stays; `quota` of them do.
  const uint ties = (uint)found[1];
  const ulong each = by_mass ? fixed_mass(relative(key_value(key), top)) : 1;
  uint quota = 1, most = ties;
  while (quota < most) {
    const uint middle = quota + (most - quota + 1) / 2;
    if (before + (ulong)(middle - 1) * each < target) quota = middle;
    else most = middle - 1;
  }
  Kept result;
  result.key = key;
  result.cut = key == kept.key ? kept.cut : 0xffffffffu;
  if (quota < ties) {  // the quota-th of them by id is the last one
    if (border.list) {
      for (uint i = tid; i < border.count; i += DRAW_THREADS) {
        if (order_key(c.values[i]) != key || !is_kept(kept, key, c.ids[i])) continue;
        uint rank = 1;
        for (uint e = 0; e < border.count; ++e)
          rank += order_key(c.values[e]) == key && c.ids[e] < c.ids[i] ? 1 : 0;
        if (rank == quota) found[3] = c.ids[i];
      }
    } else {
      ulong seen = 0;
      for (uint i = tid; i - tid < c.count && seen < quota; i += DRAW_THREADS) {
        const Candidate got = candidate(c, adjusted, vocab, i);
        const uint k = order_key(got.value);
        const bool tie = k == key && is_kept(kept, k, got.id);
        const ulong at = seen + group_prefix(tie, total, scratch, lane, simd, DRAW_SIMDS);
        if (tie && at + 1 == quota) found[3] = got.id;
        seen += total;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    result.cut = (uint)found[3];
  }
  return result;
}

// ---- randomness ---------------------------------------------------------------------------------
// Philox4x32-10 of counter (block, position, 0, 0).
static inline uint4 philox(uint seed_low, uint seed_high, uint block, uint position) {
  uint4 c = uint4(block, position, 0, 0);
  uint k0 = seed_low, k1 = seed_high;
  UNROLL for (uint round = 0; round < 10; ++round) {
    const uint high0 = mulhi(0xd2511f53u, c.x), low0 = 0xd2511f53u * c.x;
    const uint high1 = mulhi(0xcd9e8d57u, c.z), low1 = 0xcd9e8d57u * c.z;
    c = uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c;
}
// -log(-log(u)) of u = (n + 1/2) 2^-24, n the upper 24 bits of the word: from 1/2 on through 1 - u,
// since only that is exact in fp32.
static inline float gumbel(uint word) {
  const uint n = word >> 8;
  float t;
  if (n < 8388608u) {
    t = -log_((float(n) + 0.5f) * 5.9604644775390625e-8f);
  } else {
    const float rest = (float(16777215u - n) + 0.5f) * 5.9604644775390625e-8f;
    t = two_atanh(rest / (2.0f - rest));
  }
  return -log_(t);
}

// ---- sample_draw --------------------------------------------------------------------------------
// The draw of a row that is not greedy, by a whole group. block_max: of the thread's block, -inf where
// there is none.
static inline uint draw(thread Candidates& c, device const float* adjusted, uint vocab, float top,
                        float block_max, uint blocks, uint allowed, device const SlotSampling* s,
                        uint position, threadgroup atomic_uint* bins, threadgroup ulong* scratch,
                        threadgroup ulong* found, threadgroup float* values, threadgroup uint* ids,
                        uint tid, uint lane, uint simd) {
  Kept kept;
  kept.key = order_key(-FLT_MAX);
  kept.cut = 0xffffffffu;
  float least = -INFINITY;
  const bool few = s->top_k > 0 && s->top_k < allowed;
  if (few && s->top_k <= blocks) {
    // The k-th of the blocks' maxima: k tokens are at least as high. The list is still empty.
    c.values[tid] = block_max;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint rank = 0;
    for (uint b = 0; b < blocks; ++b)
      rank += c.values[b] > block_max || (c.values[b] == block_max && b < tid) ? 1 : 0;
    if (rank + 1 == s->top_k) found[0] = as_type<uint>(block_max);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    least = as_type<float>((uint)found[0]);
  }
  choose_blocks(c, block_max, least, scratch, tid, lane, simd);
  if (least > -INFINITY || c.count <= LIST_TOKENS) {
    list_candidates(c, adjusted, vocab, top, least, all_bins(), kept, tid);
  }
  // First top-k by tokens, then top-p by mass; one copy of the code saves registers.
  _Pragma("clang loop unroll(disable)") for (uint by_mass = 0; by_mass < 2; ++by_mass) {
    if (by_mass ? s->top_p < 1.0f : few) {
      kept = keep_first(c, adjusted, vocab, top, block_max, kept, by_mass, s, bins, scratch, found,
                        tid, lane, simd);
    }
  }
  const float share = min(s->min_p, 1.0f);  // the best token always stays
  float best = -INFINITY;
  uint at = 0xffffffffu;
  // Four neighbours, of the list one token, to a block of random words.
  const uint step = c.list ? 1 : 4, seed_low = s->seed_low, seed_high = s->seed_high;
  for (uint i = step * tid; i < c.count; i += step * DRAW_THREADS) {
    Candidate got[4];
    bool any = false;
    UNROLL for (uint j = 0; j < 4; ++j) {
      got[j].id = 0;
      got[j].value = -INFINITY;
      if (j < step) got[j] = candidate(c, adjusted, vocab, i + j);
      const float v = got[j].value;
      if (!is_kept(kept, order_key(v), got[j].id) || relative(v, top) < share)
        got[j].value = -INFINITY;
      any = any || got[j].value > -INFINITY;
    }
    if (!any) continue;
    const uint4 words = philox(seed_low, seed_high, got[0].id / 4, position);
    UNROLL for (uint j = 0; j < 4; ++j) {
      if (got[j].value == -INFINITY) continue;
      const uint lane4 = got[j].id & 3;
      const uint word = lane4 == 0   ? words.x
                        : lane4 == 1 ? words.y
                        : lane4 == 2 ? words.z
                                     : words.w;
      const float score = got[j].value + gumbel(word);
      if (score > best || (score == best && got[j].id < at)) {
        best = score;
        at = got[j].id;
      }
    }
  }
  return group_best(best, at, values, ids, lane, simd, DRAW_SIMDS).id;
}
// A group per row, a thread for each block's statistics.
static inline void sample_draw_body(device const float* logits, device const float* adjusted,
                                    device const float* stats, device Sampled* entries, uint vocab,
                                    uint ring, device Step* step, uint row, thread Candidates& c,
                                    threadgroup atomic_uint* bins, threadgroup ulong* scratch,
                                    threadgroup ulong* found, threadgroup float* values,
                                    threadgroup uint* ids, uint tid, uint lane, uint simd) {
  const uint blocks = (vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK, slot = step->slot[row];
  const uint position = step->position[row] + 1;
  device const SlotSampling* s = step->sampling + slot;
  Best head, own;  // of this thread's block: raw and adjusted
  head.value = own.value = -INFINITY;
  head.id = own.id = 0xffffffffu;
  float sum = 0.0f;
  ulong counts = 0;
  if (tid < blocks) {
    device const float* b = stats + tid * 8;
    head.value = b[STAT_RAW_MAX];
    head.id = as_type<uint>(b[STAT_RAW_ID]);
    own.value = b[STAT_MAX];
    own.id = as_type<uint>(b[STAT_ID]);
    sum = b[STAT_RAW_SUM];
    counts = (ulong)as_type<uint>(b[STAT_ALLOWED]) | ((ulong)as_type<uint>(b[STAT_BROKEN]) << 32) |
             ((ulong)as_type<uint>(b[STAT_NONZERO]) << 48);
  }
  group_prefix(counts, counts, scratch, lane, simd, DRAW_SIMDS);
  const Best raw = group_best(head.value, head.id, values, ids, lane, simd, DRAW_SIMDS);
  const Best best = group_best(own.value, own.id, values, ids, lane, simd, DRAW_SIMDS);
  const bool broken = ((counts >> 32) & 0xffff) != 0 || (counts >> 48) == 0;
  const uint status = broken ? 2 : best.value == -INFINITY ? 3 : 1;
  device Sampled* entry = entries + (ulong)row * ring + position % ring;
  if (tid == 0) {
    for (uint j = 0; j < LILY_MAX_LOGPROBS; ++j) {
      entry->top_id[j] = 0xffffffffu;
      entry->top_logprob[j] = -INFINITY;
    }
    entry->token = 0xffffffffu;
    entry->status = status;
    entry->position = position;
    entry->logprob = NAN;
  }
  if (status != 1) return;  // the same for the whole group
  // A block's sum counts from its own maximum.
  sum = tid < blocks ? sum * exp_(head.value - raw.value) : 0.0f;
  const float norm = raw.value + log_(group_sum(sum, values, lane, simd, DRAW_SIMDS));
  uint token = best.id;
  if (s->temperature > 0.0f) {
    token = draw(c, adjusted, vocab, best.value, own.value, blocks, (uint)counts, s, position, bins,
                 scratch, found, values, ids, tid, lane, simd);
  }
  const uint reported = min(s->logprobs, (uint)LILY_MAX_LOGPROBS);
  for (uint j = 0; j < reported; ++j) {
    const Best next = group_best(head.value, head.id, values, ids, lane, simd, DRAW_SIMDS);
    if (next.value == -INFINITY) break;
    if (tid == 0) {
      entry->top_id[j] = next.id;
      entry->top_logprob[j] = next.value - norm;
    }
    // That block's next: lower, or equal with a higher id.
    const uint block = next.id / SAMPLE_BLOCK;
    Best rest;
    rest.value = -INFINITY;
    rest.id = 0xffffffffu;
    for (uint i = block * SAMPLE_BLOCK + tid; i < min(vocab, (block + 1) * SAMPLE_BLOCK);
         i += DRAW_THREADS) {
      const float l = logits[i];
      const bool after = l < next.value || (l == next.value && i > next.id);
      if (after && l > rest.value) {
        rest.value = l;
        rest.id = i;
      }
    }
    rest = group_best(rest.value, rest.id, values, ids, lane, simd, DRAW_SIMDS);
    if (tid == block) head = rest;
  }
  threadgroup_barrier(mem_flags::mem_device);  // all threads have read Step
  if (tid == 0) {
    entry->token = token;
    entry->logprob = logits[token] - norm;
    step->id[row] = token;
    step->position[row] = position;
    device atomic_uint* counted =
        (device atomic_uint*)((device uchar*)step + step->counts_offset) + (ulong)slot * vocab;
    atomic_fetch_add_explicit(counted + token, 1u, memory_order_relaxed);
  }
}
#define SAMPLE_DRAW(op, name, c0, c1, c2)                                                          \
  KERNEL(name)(IN(float, logits, 0), IN(float, adjusted, 1), IN(float, stats, 2),                  \
               OUT(Sampled, ring, 3), PARAMS(SampleDraw, 4), STEP_OUT(5) IDS) {                    \
    READ_IDS                                                                                       \
    SHARED(atomic_uint, bins, 3 * KEEP_BINS);                                                      \
    SHARED(ulong, scratch, DRAW_SIMDS);                                                            \
    SHARED(ulong, found, 4);                                                                       \
    SHARED(float, values, DRAW_SIMDS);                                                             \
    SHARED(uint, ids, DRAW_SIMDS);                                                                 \
    SHARED(uint, blocks_left, DRAW_THREADS);                                                       \
    SHARED(uint, list_ids, LIST_TOKENS);                                                           \
    SHARED(float, list_values, LIST_TOKENS);                                                       \
    SHARED(atomic_uint, listed, 1);                                                                \
    Candidates c;                                                                                  \
    c.blocks = blocks_left;                                                                        \
    c.ids = list_ids;                                                                              \
    c.values = list_values;                                                                        \
    c.listed = listed;                                                                             \
    c.count = 0;                                                                                   \
    c.list = false;                                                                                \
    const uint row = group.x;                                                                      \
    if (row >= step->rows) return;                                                                 \
    const ulong at = (ulong)row * p.vocab;                                                         \
    const ulong blocks = (p.vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;                              \
    sample_draw_body(logits + at, adjusted + at, stats + row * blocks * 8, ring, p.vocab, p.ring,  \
                     step, row, c, bins, scratch, found, values, ids, tid, lane, simd);             \
  }
LILY_VARIANTS_sample_draw(SAMPLE_DRAW)
