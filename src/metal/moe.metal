// moe.metal: the mixture of experts: the router's choice, both halves of the experts (decode),
// grouping of rows by expert and the weighted sum (prefill).
#include "matvec.h"

// ---- the router's choice ------------------------------------------------------------------------
// NaN counts as -inf, -0 as 0.
static inline uint logit_key(float l) {
  return order_key(l != l ? -INFINITY : l == 0.0f ? 0.0f : l);
}
// Lane j < rounds of a simdgroup gets the j-th largest of the row's logits, ties to the lowest id.
// Lane l holds experts l, l + 32, ..; registers of absent experts are skipped eight at a time.
static inline void choose(device const float* logits, uint experts, uint rounds, uint lane,
                          thread uint& id, thread uint& key) {
  uint keys[32];
  UNROLL for (uint i = 0; i < 32; ++i) {
    keys[i] = lane + 32 * i < experts ? logit_key(logits[lane + 32 * i]) : 0;
  }
  id = 0;
  key = 0;
  for (uint round = 0; round < rounds; ++round) {
    uint best = 0, at = 0;
    UNROLL for (uint c = 0; c < 4; ++c) {
      if (256 * c < experts) {
        UNROLL for (uint i = 8 * c; i < 8 * c + 8; ++i) {
          if (keys[i] > best) {
            best = keys[i];
            at = lane + 32 * i;
          }
        }
      }
    }
    const uint top = simd_max(best);
    const uint winner = simd_min(best == top ? at : experts);
    if (lane == round) {
      id = winner;
      key = top;
    }
    UNROLL for (uint c = 0; c < 4; ++c) {
      if (256 * c < experts) {
        UNROLL for (uint i = 8 * c; i < 8 * c + 8; ++i) {
          if (lane + 32 * i == winner) keys[i] = 0;
        }
      }
    }
  }
}
// Lane's weight: softmax over all experts divided by the sum over the chosen, so over these alone.
static inline float choice_weight(uint key, uint top_k, uint lane) {
  const float l = key_value(key);
  const float e = exp_(l - simd_shuffle(l, 0));
  return e / simd_sum(lane < top_k ? e : 0.0f);
}

// uints of one expert's codes and pairs.
template <uint BITS>
static inline ulong expert_codes(thread const Linear& w) {
  return (ulong)w.n * w.k * BITS / 32;
}
template <uint BITS>
static inline ulong expert_pairs(thread const Linear& w) {
  return BITS == 16 ? 0 : (ulong)w.n * (w.k >> w.group_shift);
}

// ---- expert_up ----------------------------------------------------------------------------------
// A group: one row, one slot, 12 units (a gate and an up row each), two a simdgroup. k goes in sweeps
// as in project. One simdgroup chooses the expert while the others unpack x for all.
#define EXPERT_UP_SIMDS 6
#define EXPERT_UP_ROWS 4
#define EXPERT_UP_UNITS 12
template <uint BITS>
static inline constexpr uint expert_up_chunks() {
  return BITS == 16 ? 1 : 2;
}
// The simdgroup's weight rows from `first` on. x of the first sweep is there already.
template <uint BITS>
static inline void expert_up_rows(device const uint* codes, device const uint* pairs,
                                  device const act_t* x, device const float* gain,
                                  thread const Linear& w, uint first, threadgroup SharedX* xs,
                                  thread float (&acc)[EXPERT_UP_ROWS], uint tid, uint lane) {
  constexpr uint CHUNKS = expert_up_chunks<BITS>();
  UNROLL for (uint j = 0; j < EXPERT_UP_ROWS; ++j)
    acc[j] = 0.0f;
  for (uint k0 = 0; k0 < w.k; k0 += CHUNKS * 1024) {
    RowCodes<BITS, EXPERT_UP_ROWS> rows[CHUNKS];
    UNROLL for (uint c = 0; c < CHUNKS; ++c) {
      const uint at = k0 + c * 1024 + lane * 32;
      UNROLL for (uint j = 0; j < EXPERT_UP_ROWS; ++j) {
        // The last unit of a width that is no multiple of 12 is computed again, stored once.
        if (at < w.k) load_row(codes, pairs, w, min(first + j, w.n - 2 + (j & 1)), at, j, rows[c]);
      }
    }
    if (k0 > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fill_x<BITS>(x + k0, gain + k0, w.k - k0, CHUNKS, xs, tid, EXPERT_UP_SIMDS * 32);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL for (uint c = 0; c < CHUNKS; ++c) {
      if (k0 + c * 1024 + lane * 32 < w.k) {
        add_chunk<BITS, 1>(rows[c], xs + c, CHUNKS, w.scale_f16, lane, acc);
      }
    }
  }
}
#define EXPERT_UP(op, name, BITS, c1, c2)                                                         \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(uint, shared_codes, 2),                 \
               IN(uint, shared_pairs, 3), IN(act_t, x, 4), IN(float, gain, 5), IN(float, ssq, 6), \
               IN(float, logits, 7), OUT(act_t, h, 8), OUT(Route, route, 9), PARAMS(ExpertUp, 10), \
               STEP_IN(11) IDS) {                                                                 \
    READ_IDS                                                                                      \
    SHARED(uint, chosen, 1);                                                                      \
    SHARED(float, inv, 1);                                                                        \
    SHARED(SharedX, xs, (expert_up_chunks<BITS>()));                                              \
    const uint row = group.z, slot = p.slot_begin + group.y, u0 = group.x * EXPERT_UP_UNITS;      \
    const bool shared = slot == p.top_k;                                                          \
    const uint units = (shared ? p.shared.n : p.routed.n) / 2;                                    \
    if (u0 >= units || row >= step->rows) return;                                                 \
    const uint k = shared ? p.shared.k : p.routed.k;                                              \
    const ulong entry = (ulong)row * (p.top_k + 1) + slot;                                        \
    device const float* row_logits = logits + (ulong)row * p.logits_stride;                       \
    device const act_t* row_x = x + (ulong)row * k;                                               \
    if (simd > 0) {                                                                               \
      fill_x<BITS>(row_x, gain, k, expert_up_chunks<BITS>(), xs, tid - 32,                        \
                   (EXPERT_UP_SIMDS - 1) * 32);                                                   \
    } else if (shared) {                                                                          \
      if (group.x == 0 && lane == 0) {                                                            \
        route[entry].expert = p.experts;                                                          \
        route[entry].weight = sigmoid(row_logits[p.experts]);                                     \
      }                                                                                           \
    } else {                                                                                      \
      uint id, key;                                                                               \
      choose(row_logits, p.experts, group.x == 0 ? p.top_k : slot + 1, lane, id, key);            \
      if (lane == slot) chosen[0] = id;                                                           \
      if (group.x == 0) { /* the first group of each slot reports its route */                    \
        const float weight = choice_weight(key, p.top_k, lane);                                   \
        if (lane == slot) {                                                                       \
          route[entry].expert = id;                                                               \
          route[entry].weight = weight;                                                           \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
    if (simd == 1) {                                                                              \
      const float sum = sum_parts(ssq + (ulong)row * p.ssq_parts, p.ssq_parts, lane);             \
      if (lane == 0) inv[0] = inv_sqrt(sum / float(k) + p.eps);                                   \
    }                                                                                             \
    threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    const uint first = 2 * u0 + simd * EXPERT_UP_ROWS;                                            \
    float acc[EXPERT_UP_ROWS];                                                                    \
    const Linear w = shared ? linear_of(p.shared) : linear_of(p.routed);                          \
    const ulong expert = shared ? 0 : chosen[0];                                                  \
    expert_up_rows<BITS>((shared ? shared_codes : codes) + expert * expert_codes<BITS>(w),        \
                         (shared ? shared_pairs : pairs) + expert * expert_pairs<BITS>(w), row_x, \
                         gain, w, first, xs, acc, tid, lane);                                     \
    /* Lanes 0, 4, 8, 12: gate, up, gate, up. */                                                  \
    const float v = sum4(acc, lane) * inv[0], up = simd_shuffle_xor(v, 4);                        \
    const uint unit = u0 + simd * 2 + lane / 8;                                                   \
    if ((lane & 23) == 0 && unit < units) h[entry * p.h_stride + unit] = to_act(silu(v) * up);    \
  }
LILY_VARIANTS_expert_up(EXPERT_UP)

// ---- expert_down --------------------------------------------------------------------------------
// A group: one row, LILY_OUT_ROWS outputs, a simdgroup for each slot, so that all experts' weights
// are under way at once. Lanes 0..15 take the even outputs, lanes 16..31 the odd ones: an expert of
// width 512 keeps every lane busy. The slots' sums are added up in their order.
template <uint BITS>
static inline void expert_down_rows(device const uint* codes, device const uint* pairs,
                                    thread const Linear& w, device const act_t* h, uint first,
                                    threadgroup float* part, uint lane) {
  constexpr uint N = BITS == 16 ? 2 : LILY_OUT_ROWS / 2;
  float acc[LILY_OUT_ROWS / 2];
  UNROLL for (uint j = 0; j < LILY_OUT_ROWS / 2; ++j)
    acc[j] = 0.0f;
  UNROLL for (uint n0 = 0; n0 < LILY_OUT_ROWS / 2; n0 += N) {
    for (uint k0 = (lane & 15) * 32; k0 < w.k; k0 += 512) {
      RowCodes<BITS, N> rows;
      UNROLL for (uint j = 0; j < N; ++j)
        load_row(codes, pairs, w, first + 2 * (n0 + j) + (lane >> 4), k0, j, rows);
      LaneX hs;
      UNROLL for (uint c = 0; c < 8; ++c)
        hs.v[c] = load4(h + k0 + 4 * c);
      prepare<BITS>(hs);
      add_rows(rows, hs, w.scale_f16, acc + n0);
    }
  }
  exchange<2>(acc, lane);
  exchange<1>(acc, lane);
  float v = acc[0] + simd_shuffle_xor(acc[0], 2);
  v += simd_shuffle_xor(v, 1);
  if ((lane & 3) == 0) part[2 * ((lane & 15) / 4) + (lane >> 4)] = v;
}
#define EXPERT_DOWN(op, name, BITS, c1, c2)                                                       \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(uint, shared_codes, 2),                 \
               IN(uint, shared_pairs, 3), IN(act_t, h, 4), IN(Route, route, 5), OUT(act_t, x, 6), \
               OUT(float, ssq, 7), PARAMS(ExpertDown, 8), STEP_IN(9) IDS) {                       \
    READ_IDS                                                                                      \
    SHARED(float, part, (LILY_MAX_TOP_K + 1) * LILY_OUT_ROWS);                                    \
    const uint row = group.y, slot = p.slot_begin + simd, n = group.x * LILY_OUT_ROWS;            \
    if (row > 0 && row >= step->rows) return;                                                     \
    const uint hidden = p.slot_begin == p.top_k ? p.shared.n : p.routed.n;                        \
    const ulong entries = (ulong)row * (p.top_k + 1);                                             \
    device const act_t* slot_h = h + (entries + slot) * p.h_stride;                               \
    threadgroup float* mine = part + simd * LILY_OUT_ROWS;                                        \
    const bool shared = slot == p.top_k;                                                          \
    const Linear w = shared ? linear_of(p.shared) : linear_of(p.routed);                          \
    const ulong expert = shared ? 0 : min(route[entries + slot].expert, p.experts - 1);           \
    expert_down_rows<BITS>((shared ? shared_codes : codes) + expert * expert_codes<BITS>(w),      \
                           (shared ? shared_pairs : pairs) + expert * expert_pairs<BITS>(w), w,   \
                           slot_h, n, mine, lane);                                                \
    threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    if (simd > 0 || row >= step->rows) return;                                                    \
    float square = 0.0f;                                                                          \
    if (lane < LILY_OUT_ROWS) {                                                                   \
      float sum = 0.0f;                                                                           \
      for (uint s = 0; s < p.slots; ++s) {                                                        \
        const float weight = route[entries + p.slot_begin + s].weight;                            \
        sum = fma(weight, part[s * LILY_OUT_ROWS + lane], sum);                                   \
      }                                                                                           \
      device act_t* at = x + (ulong)row * hidden + n + lane;                                      \
      const float v = round_act(to_float(*at) + sum);                                             \
      *at = to_act(v);                                                                            \
      square = v * v;                                                                             \
    }                                                                                             \
    const float total = simd_sum(square);                                                         \
    if (lane == 0) ssq[(ulong)row * (hidden / LILY_OUT_ROWS) + group.x] = total;                  \
  }
LILY_VARIANTS_expert_down(EXPERT_DOWN)

// ---- route_rows ---------------------------------------------------------------------------------
// One simdgroup a row, four a group.
#define ROUTE_ROWS(op, name, c0, c1, c2)                                                          \
  KERNEL(name)(IN(float, logits, 0), OUT(Route, route, 1), PARAMS(RouteRows, 2) IDS) {            \
    READ_IDS                                                                                      \
    const uint row = group.x * 4 + simd;                                                          \
    if (row >= p.rows) return;                                                                    \
    device const float* row_logits = logits + (ulong)row * p.logits_stride;                       \
    device Route* to = route + (ulong)row * (p.top_k + 1);                                        \
    uint id, key;                                                                                 \
    choose(row_logits, p.experts, p.top_k, lane, id, key);                                        \
    const float weight = choice_weight(key, p.top_k, lane);                                       \
    if (lane < p.top_k) {                                                                         \
      to[lane].expert = id;                                                                       \
      to[lane].weight = weight;                                                                   \
    } else if (lane == p.top_k) {                                                                 \
      to[lane].expert = p.experts;                                                                \
      to[lane].weight = sigmoid(row_logits[p.experts]);                                           \
    }                                                                                             \
  }
LILY_VARIANTS_route_rows(ROUTE_ROWS)

// ---- group_rows ---------------------------------------------------------------------------------
// A group of 1024 threads for 128 experts. It counts the pairs of every expert, from which follows
// where its own begin; then, 1024 rows at a time, each of its experts gets a bit for each row that
// chose it, and the bits before a row's are its rank. The first group writes the lists of offsets and
// tiles as well. Nothing depends on who comes first: atomics add up counts, and bits of which each is
// added once.
#define GROUP_THREADS 1024
#define GROUP_EXPERTS 128
#define GROUP_ROWS_AT_ONCE 1024
#define GROUP_WORDS (GROUP_ROWS_AT_ONCE / 32)
#define GROUP_LD (GROUP_WORDS + 1)  // experts on different banks
// Sum over the lanes up to this one.
static inline uint simd_prefix(uint v, uint lane) {
  UNROLL for (ushort o = 1; o < 32; o <<= 1) {
    const uint below = simd_shuffle_up(v, o);
    if (lane >= o) v += below;
  }
  return v;
}
// Sum over the threads before this one, and over all. scratch: one uint a simdgroup.
static inline uint group_prefix(uint v, thread uint& total, threadgroup uint* scratch, uint lane,
                                uint simd) {
  const uint sum = simd_prefix(v, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 31) scratch[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint sums = simd_prefix(scratch[lane], lane);
  // What the simdgroups before this one have lies one lane below its own.
  const uint before = simd_shuffle(sums, simd > 0 ? simd - 1 : 0);
  total = simd_shuffle(sums, 31);
  return sum - v + (simd > 0 ? before : 0);
}
static inline uint add_relaxed(threadgroup atomic_uint* to, uint v) {
  return atomic_fetch_add_explicit(to, v, memory_order_relaxed);
}
static inline uint load_relaxed(threadgroup atomic_uint* from) {
  return atomic_load_explicit(from, memory_order_relaxed);
}
// Expert of a pair of a row and one of its top_k slots.
static inline uint pair_expert(device const Route* route, PARAM_REF(GroupRows) p, uint pair) {
  return min(route[pair + pair / p.top_k].expert, p.experts - 1);
}
static inline void group_rows_body(device const Route* route, device uint* order,
                                   device uint* offsets, device uint* tiles, PARAM_REF(GroupRows) p,
                                   threadgroup atomic_uint* counts, threadgroup atomic_uint* bits,
                                   threadgroup uint* next, threadgroup uint* scratch, uint3 group,
                                   uint tid, uint lane, uint simd) {
  const uint e0 = group.x * GROUP_EXPERTS, pairs = p.rows * p.top_k;
  atomic_store_explicit(&counts[tid], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < pairs; i += GROUP_THREADS)
    add_relaxed(&counts[pair_expert(route, p, i)], 1);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A thread an expert.
  const uint count = load_relaxed(&counts[tid]), count_tiles = (count + p.tile - 1) / p.tile;
  uint routed, routed_tiles;
  const uint begin = group_prefix(count, routed, scratch, lane, simd);
  const uint first_tile = group_prefix(count_tiles, routed_tiles, scratch, lane, simd);
  if (tid - e0 < GROUP_EXPERTS) next[tid - e0] = begin;
  if (group.x == 0) {
    if (tid < p.experts) offsets[tid] = begin;
    for (uint i = 0; i < count_tiles; ++i) {
      tiles[1 + 2 * (first_tile + i)] = tid;
      tiles[2 + 2 * (first_tile + i)] = begin + i * p.tile;
    }
    // The shared expert has all rows in their order.
    const uint shared_tiles = (p.rows + p.tile - 1) / p.tile;
    for (uint r = tid; r < p.rows; r += GROUP_THREADS) {
      order[routed + r] = routed + r;
    }
    for (uint i = tid; i < shared_tiles; i += GROUP_THREADS) {
      tiles[1 + 2 * (routed_tiles + i)] = p.experts;
      tiles[2 + 2 * (routed_tiles + i)] = routed + i * p.tile;
    }
    if (tid == 0) {
      offsets[p.experts] = routed;
      offsets[p.experts + 1] = routed + p.rows;
      tiles[0] = routed_tiles + shared_tiles;
    }
  }
  for (uint r0 = 0; r0 < p.rows; r0 += GROUP_ROWS_AT_ONCE) {
    for (uint i = tid; i < GROUP_EXPERTS * GROUP_LD; i += GROUP_THREADS) {
      atomic_store_explicit(&bits[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint end = min(p.rows - r0, (uint)GROUP_ROWS_AT_ONCE) * p.top_k;
    for (uint i = tid; i < end; i += GROUP_THREADS) {
      const uint row = i / p.top_k, e = pair_expert(route, p, r0 * p.top_k + i) - e0;
      if (e < GROUP_EXPERTS) add_relaxed(&bits[e * GROUP_LD + row / 32], 1u << (row & 31));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < end; i += GROUP_THREADS) {
      const uint row = i / p.top_k, e = pair_expert(route, p, r0 * p.top_k + i) - e0;
      if (e >= GROUP_EXPERTS) continue;
      threadgroup atomic_uint* own = bits + e * GROUP_LD;
      uint at = next[e] + popcount(load_relaxed(own + row / 32) & ((1u << (row & 31)) - 1u));
      for (uint w = 0; w < row / 32; ++w) at += popcount(load_relaxed(own + w));
      order[at] = r0 * p.top_k + i;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < GROUP_EXPERTS) {
      for (uint w = 0; w < GROUP_WORDS; ++w) {
        next[tid] += popcount(load_relaxed(bits + tid * GROUP_LD + w));
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
#define GROUP_ROWS(op, name, c0, c1, c2)                                                          \
  KERNEL(name)(IN(Route, route, 0), OUT(uint, order, 1), OUT(uint, offsets, 2),                   \
               OUT(uint, tiles, 3), PARAMS(GroupRows, 4) IDS) {                                   \
    READ_IDS                                                                                      \
    SHARED(atomic_uint, counts, 1024);                                                            \
    SHARED(atomic_uint, bits, GROUP_EXPERTS * GROUP_LD);                                          \
    SHARED(uint, next, GROUP_EXPERTS);                                                            \
    SHARED(uint, scratch, GROUP_THREADS / 32);                                                    \
    group_rows_body(route, order, offsets, tiles, p, counts, bits, next, scratch, group, tid,     \
                    lane, simd);                                                                  \
  }
LILY_VARIANTS_group_rows(GROUP_ROWS)

// ---- moe_combine --------------------------------------------------------------------------------
// A group a row, four values a thread at a time: x is rounded once, its square kept for the norm.
#define COMBINE_THREADS 256
static inline void moe_combine_body(device const act_t* down, device const Route* route,
                                    device const float* gain, device act_t* x, device act_t* h,
                                    PARAM_REF(MoeCombine) p, threadgroup float* scratch,
                                    uint3 group, uint tid, uint lane, uint simd) {
  const uint row = group.x;
  device const Route* own = route + (ulong)row * (p.top_k + 1);
  device act_t* row_x = x + (ulong)row * p.hidden;
  device act_t* row_h = h + (ulong)row * p.hidden;
  float square = 0.0f;
  for (uint c = tid * 4; c < p.hidden; c += COMBINE_THREADS * 4) {
    float4 sum = float4(0.0f);
    for (uint j = 0; j <= p.top_k; ++j) {
      const ulong pair = j < p.top_k ? (ulong)row * p.top_k + j : (ulong)p.rows * p.top_k + row;
      sum += own[j].weight * load4(down + pair * p.hidden + c);
    }
    store4(row_x + c, load4(row_x + c) + sum);
    const float4 v = load4(row_x + c);
    UNROLL for (uint e = 0; e < 4; ++e)
      square = fma(v[e], v[e], square);
  }
  square = group_sum(square, scratch, lane, simd, COMBINE_THREADS / 32);
  const float inv = inv_sqrt(square / float(p.hidden) + p.eps);
  for (uint c = tid * 4; c < p.hidden; c += COMBINE_THREADS * 4) {
    store4(row_h + c, load4(row_x + c) * inv * *(device const float4*)(gain + c));
  }
}
#define MOE_COMBINE(op, name, c0, c1, c2)                                                         \
  KERNEL(name)(IN(act_t, down, 0), IN(Route, route, 1), IN(float, gain, 2), OUT(act_t, x, 3),     \
               OUT(act_t, h, 4), PARAMS(MoeCombine, 5) IDS) {                                     \
    READ_IDS                                                                                      \
    SHARED(float, scratch, COMBINE_THREADS / 32);                                                 \
    moe_combine_body(down, route, gain, x, h, p, scratch, group, tid, lane, simd);                \
  }
LILY_VARIANTS_moe_combine(MOE_COMBINE)
