// moe.metal: the mixture of experts: the router's choice, both halves of the experts (decode),
// grouping of rows by expert and the weighted sum (prefill).
#include "util.h"

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
    const uint winner = simd_min(best == top ? at : 0xffffffffu);
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
static inline ulong expert_codes(PARAM_REF(Linear) w) {
  return (ulong)w.n * w.k * BITS / 32;
}
template <uint BITS>
static inline ulong expert_pairs(PARAM_REF(Linear) w) {
  return BITS == 16 ? 0 : (ulong)w.n * (w.k >> w.group_shift);
}

// ---- expert_up ----------------------------------------------------------------------------------
// A group: one row, one slot, 4 simdgroups of EXPERT_UP_UNITS units (a gate and an up row each).
#define EXPERT_UP_SIMDS 4
#define EXPERT_UP_UNITS 2
template <uint BITS>
static inline void expert_up_body(device const uint* codes, device const uint* pairs,
                                  device const act_t* x, device const float* gain,
                                  device const float* ssq, device act_t* h, PARAM_REF(Linear) w,
                                  uint ssq_parts, float eps, uint u0, uint lane) {
  const uint k = w.k;
  float acc[2 * EXPERT_UP_UNITS];
  UNROLL for (uint j = 0; j < 2 * EXPERT_UP_UNITS; ++j)
    acc[j] = 0.0f;
  for (uint k0 = lane * 32; k0 < k; k0 += 1024) {
    float xs[32], x_sum = 0.0f;
    UNROLL for (uint j = 0; j < 8; ++j) {
      const float4 v = load4(x + k0 + 4 * j), g = *(device const float4*)(gain + k0 + 4 * j);
      UNROLL for (uint e = 0; e < 4; ++e) {
        xs[4 * j + e] = v[e] * g[e];
        x_sum += xs[4 * j + e];
      }
    }
    UNROLL for (uint j = 0; j < 2 * EXPERT_UP_UNITS; ++j) {
      // The last unit of an odd width is computed again, stored once.
      acc[j] += dot32<BITS>(codes, pairs, w, min(2 * u0 + j, w.n - 2 + (j & 1)), k0, xs, x_sum);
    }
  }
  const float inv = inv_sqrt(sum_parts(ssq, ssq_parts, lane) / float(k) + eps);
  UNROLL for (uint j = 0; j < EXPERT_UP_UNITS; ++j) {
    const float gate = simd_sum(acc[2 * j]) * inv, up = simd_sum(acc[2 * j + 1]) * inv;
    if (lane == 0 && 2 * (u0 + j) < w.n) h[u0 + j] = to_act(silu(gate) * up);
  }
}
// One simdgroup chooses for the group; the first group of each slot also reports the slot's route.
#define EXPERT_UP(op, name, BITS, c1, c2)                                                         \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(uint, shared_codes, 2),                 \
               IN(uint, shared_pairs, 3), IN(act_t, x, 4), IN(float, gain, 5), IN(float, ssq, 6), \
               IN(float, logits, 7), OUT(act_t, h, 8), OUT(Route, route, 9), PARAMS(ExpertUp, 10), \
               STEP_IN(11) IDS) {                                                                 \
    READ_IDS                                                                                      \
    SHARED(uint, chosen, 1);                                                                      \
    const uint row = group.z, slot = p.slot_begin + group.y;                                      \
    if (row >= step->rows) return;                                                                \
    const ulong entry = (ulong)row * (p.top_k + 1) + slot;                                        \
    device const float* row_logits = logits + (ulong)row * p.logits_stride;                       \
    if (simd == 0) {                                                                              \
      if (slot == p.top_k) {                                                                      \
        if (group.x == 0 && lane == 0) {                                                          \
          route[entry].expert = p.experts;                                                        \
          route[entry].weight = sigmoid(row_logits[p.experts]);                                   \
        }                                                                                         \
      } else {                                                                                    \
        uint id, key;                                                                             \
        choose(row_logits, p.experts, group.x == 0 ? p.top_k : slot + 1, lane, id, key);          \
        if (lane == slot) chosen[0] = id;                                                         \
        if (group.x == 0) {                                                                       \
          const float weight = choice_weight(key, p.top_k, lane);                                 \
          if (lane == slot) {                                                                     \
            route[entry].expert = id;                                                             \
            route[entry].weight = weight;                                                         \
          }                                                                                       \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
    threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    const uint u0 = (group.x * EXPERT_UP_SIMDS + simd) * EXPERT_UP_UNITS;                         \
    device const act_t* row_x = x + (ulong)row * p.routed.k;                                      \
    device const float* row_ssq = ssq + (ulong)row * p.ssq_parts;                                 \
    if (slot == p.top_k) {                                                                        \
      if (2 * u0 >= p.shared.n) return;                                                           \
      expert_up_body<BITS>(shared_codes, shared_pairs, row_x, gain, row_ssq,                      \
                           h + entry * p.h_stride, p.shared, p.ssq_parts, p.eps, u0, lane);       \
    } else {                                                                                      \
      if (2 * u0 >= p.routed.n) return;                                                           \
      const ulong expert = chosen[0];                                                             \
      expert_up_body<BITS>(codes + expert * expert_codes<BITS>(p.routed),                         \
                           pairs + expert * expert_pairs<BITS>(p.routed), row_x, gain, row_ssq,   \
                           h + entry * p.h_stride, p.routed, p.ssq_parts, p.eps, u0, lane);       \
    }                                                                                             \
  }
LILY_VARIANTS_expert_up(EXPERT_UP)

// ---- expert_down --------------------------------------------------------------------------------
// A group: one row, LILY_OUT_ROWS outputs, two a simdgroup: lanes 0..15 one, lanes 16..31 the
// other, so that an expert of width 512 keeps every lane busy. A lane adds up its share of all
// slots, in slot order; one reduction at the end.
template <uint BITS>
static inline float expert_down_dot(device const uint* codes, device const uint* pairs,
                                    PARAM_REF(Linear) w, device const act_t* h, uint n, uint lane) {
  float acc = 0.0f;
  for (uint k0 = (lane & 15) * 32; k0 < w.k; k0 += 512) {
    float hs[32], h_sum = 0.0f;
    UNROLL for (uint j = 0; j < 8; ++j) {
      const float4 v = load4(h + k0 + 4 * j);
      UNROLL for (uint e = 0; e < 4; ++e) {
        hs[4 * j + e] = v[e];
        h_sum += v[e];
      }
    }
    acc += dot32<BITS>(codes, pairs, w, n, k0, hs, h_sum);
  }
  return acc;
}
#define EXPERT_DOWN(op, name, BITS, c1, c2)                                                       \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(uint, shared_codes, 2),                 \
               IN(uint, shared_pairs, 3), IN(act_t, h, 4), IN(Route, route, 5), OUT(act_t, x, 6), \
               OUT(float, ssq, 7), PARAMS(ExpertDown, 8), STEP_IN(9) IDS) {                       \
    READ_IDS                                                                                      \
    SHARED(float, squares, LILY_OUT_ROWS);                                                        \
    const uint row = group.y;                                                                     \
    if (row >= step->rows) return;                                                                \
    const uint hidden = p.slot_begin == p.top_k ? p.shared.n : p.routed.n;                        \
    const uint local = 2 * simd + (lane >> 4), n = group.x * LILY_OUT_ROWS + local;               \
    float acc = 0.0f;                                                                             \
    for (uint slot = p.slot_begin; slot < p.slot_begin + p.slots; ++slot) {                       \
      const ulong entry = (ulong)row * (p.top_k + 1) + slot;                                      \
      device const act_t* slot_h = h + entry * p.h_stride;                                        \
      float dot;                                                                                  \
      if (slot == p.top_k) {                                                                      \
        dot = expert_down_dot<BITS>(shared_codes, shared_pairs, p.shared, slot_h, n, lane);       \
      } else {                                                                                    \
        const ulong expert = min(route[entry].expert, p.experts - 1);                             \
        dot = expert_down_dot<BITS>(codes + expert * expert_codes<BITS>(p.routed),                \
                                    pairs + expert * expert_pairs<BITS>(p.routed), p.routed,      \
                                    slot_h, n, lane);                                             \
      }                                                                                           \
      acc = fma(route[entry].weight, dot, acc);                                                   \
    }                                                                                             \
    UNROLL for (ushort o = 8; o; o >>= 1) acc += simd_shuffle_xor(acc, o);                        \
    if ((lane & 15) == 0) {                                                                       \
      device act_t* at = x + (ulong)row * hidden + n;                                             \
      const float v = round_act(to_float(*at) + acc);                                             \
      *at = to_act(v);                                                                            \
      squares[local] = v * v;                                                                     \
    }                                                                                             \
    threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    if (tid == 0) {                                                                               \
      float total = 0.0f;                                                                         \
      UNROLL for (uint j = 0; j < LILY_OUT_ROWS; ++j) total += squares[j];                        \
      ssq[(ulong)row * (hidden / LILY_OUT_ROWS) + group.x] = total;                               \
    }                                                                                             \
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
// A group of 1024 threads per expert, all alike up to the counts of every expert; then each finds
// where its expert begins and lists its pairs in their order. Nothing depends on who comes first:
// atomics only count.
#define GROUP_THREADS 1024
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
// Expert of a pair; slots of a row follow each other in the route, the shared entry between rows.
static inline uint pair_expert(device const Route* route, PARAM_REF(GroupRows) p, uint pair) {
  return min(route[pair + pair / p.top_k].expert, p.experts - 1);
}
#define GROUP_ROWS(op, name, c0, c1, c2)                                                          \
  KERNEL(name)(IN(Route, route, 0), OUT(uint, order, 1), OUT(uint, offsets, 2),                   \
               OUT(uint, tiles, 3), PARAMS(GroupRows, 4) IDS) {                                   \
    READ_IDS                                                                                      \
    SHARED(atomic_uint, counts, 1024);                                                            \
    SHARED(uint, scratch, GROUP_THREADS / 32);                                                    \
    const uint expert = group.x, pairs = p.rows * p.top_k;                                        \
    atomic_store_explicit(&counts[tid], 0u, memory_order_relaxed);                                \
    threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    for (uint i = tid; i < pairs; i += GROUP_THREADS) {                                           \
      atomic_fetch_add_explicit(&counts[pair_expert(route, p, i)], 1u, memory_order_relaxed);     \
    }                                                                                             \
    threadgroup_barrier(mem_flags::mem_threadgroup);                                              \
    const uint count = atomic_load_explicit(&counts[tid], memory_order_relaxed);                  \
    const uint mine = atomic_load_explicit(&counts[expert], memory_order_relaxed);                \
    const uint my_tiles = (mine + p.tile - 1) / p.tile;                                           \
    const bool before = tid < expert;                                                             \
    uint begin, first_tile;                                                                       \
    group_prefix(before ? count : 0, begin, scratch, lane, simd);                                 \
    group_prefix(before ? (count + p.tile - 1) / p.tile : 0, first_tile, scratch, lane, simd);    \
    if (tid == 0) {                                                                               \
      offsets[expert] = begin;                                                                    \
      if (expert == p.experts - 1) {                                                              \
        offsets[p.experts] = pairs;                                                               \
        tiles[0] = first_tile + my_tiles;                                                         \
      }                                                                                           \
    }                                                                                             \
    for (uint i = tid; i < my_tiles; i += GROUP_THREADS) {                                        \
      tiles[1 + 2 * (first_tile + i)] = expert;                                                   \
      tiles[2 + 2 * (first_tile + i)] = begin + i * p.tile;                                       \
    }                                                                                             \
    if (mine == 0) return;                                                                        \
    for (uint i0 = 0; i0 < pairs; i0 += GROUP_THREADS) {                                          \
      const bool chosen = i0 + tid < pairs && pair_expert(route, p, i0 + tid) == expert;          \
      uint found;                                                                                 \
      const uint at = begin + group_prefix(chosen, found, scratch, lane, simd);                   \
      if (chosen) order[at] = i0 + tid;                                                           \
      begin += found;                                                                             \
    }                                                                                             \
  }
LILY_VARIANTS_group_rows(GROUP_ROWS)

// ---- moe_combine --------------------------------------------------------------------------------
// 256 threads a group, four values a thread: x is rounded once.
#define MOE_COMBINE(op, name, c0, c1, c2)                                                         \
  KERNEL(name)(IN(act_t, down, 0), IN(act_t, shared_out, 1), IN(Route, route, 2),                 \
               OUT(act_t, x, 3), PARAMS(MoeCombine, 4) IDS) {                                     \
    READ_IDS                                                                                      \
    const uint col = (group.x * 256 + tid) * 4, row = group.y;                                    \
    if (col >= p.hidden) return;                                                                  \
    device const Route* row_route = route + (ulong)row * (p.top_k + 1);                           \
    const ulong at = (ulong)row * p.hidden + col;                                                 \
    float4 sum = float4(0.0f);                                                                    \
    for (uint j = 0; j < p.top_k; ++j) {                                                          \
      sum += row_route[j].weight * load4(down + ((ulong)row * p.top_k + j) * p.hidden + col);     \
    }                                                                                             \
    if (p.shared) sum += row_route[p.top_k].weight * load4(shared_out + at);                      \
    store4(x + at, load4(x + at) + sum);                                                          \
  }
LILY_VARIANTS_moe_combine(MOE_COMBINE)
