// deltanet.metal: gated DeltaNet: the decode step and its output projection; for prefill the
// convolution, the chunked (WY) delta rule and the output gate.
#include "matvec.h"
#include "tile.h"

// ---- common -------------------------------------------------------------------------------------
static inline float dot4(float4 a, float4 b, float sum) {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
// The causal convolution: the last 3 inputs, oldest first, and the taps, of one channel or of 4.
struct ConvPast {
  float at[3];
};
struct ConvPast4 {
  float4 at[3];
};
struct ConvTaps4 {
  float4 of[4];
};  // by channel
// silu of the convolution at input `now`; the window moves on to it.
static inline float conv1(thread ConvPast& past, float now, float4 taps) {
  const float y = dot4(float4(past.at[0], past.at[1], past.at[2], now), taps, 0.0f);
  past.at[0] = past.at[1];
  past.at[1] = past.at[2];
  past.at[2] = now;
  return silu(y);
}
static inline float4 conv4(thread ConvPast4& past, float4 now, thread const ConvTaps4& taps) {
  const float4 a = past.at[0], b = past.at[1], c = past.at[2];
  past.at[0] = b;
  past.at[1] = c;
  past.at[2] = now;
  return float4(silu(dot4(float4(a.x, b.x, c.x, now.x), taps.of[0], 0.0f)),
                silu(dot4(float4(a.y, b.y, c.y, now.y), taps.of[1], 0.0f)),
                silu(dot4(float4(a.z, b.z, c.z, now.z), taps.of[2], 0.0f)),
                silu(dot4(float4(a.w, b.w, c.w, now.w), taps.of[3], 0.0f)));
}
static inline ConvTaps4 load_taps(device const float* conv_w, uint channel) {
  ConvTaps4 taps;
  UNROLL for (uint e = 0; e < 4; ++e)
    taps.of[e] = *(device const float4*)(conv_w + 4 * (channel + e));
  return taps;
}
// 1 / l2 norm of a head that lies 4 values a lane.
static inline float inv_norm(float4 v) { return inv_sqrt(simd_sum(dot4(v, v, 0.0f)) + 1e-6f); }
#define DELTA_Q_SCALE 0.0883883476f  // 1 / sqrt(128)

// ---- delta_step ---------------------------------------------------------------------------------
// Group = (value head, 32 of its value columns, slot); a simdgroup holds 8 rows S[v][:] of the state
// in registers, 4 key columns a lane, over all rows of the slot. q and k are made by each simdgroup
// for itself: cheaper than a barrier per row. A slot without rows is left alone: nothing is written.
#define DELTA_SIMDS 4
#define DELTA_COLUMNS 8
static inline void delta_step_body(device const act_t* proj, device const float* conv_w,
                                   device const float* neg_exp_a, device const float* dt_bias,
                                   device const float* gain, device const act_t* conv_in,
                                   device const float* state_in, device act_t* conv_out,
                                   device float* state_out, device act_t* u, device float* head_ssq,
                                   PARAM_REF(DeltaStep) p, device const Step* step,
                                   threadgroup float* squares, uint3 group, uint tid, uint lane,
                                   uint simd) {
  const uint h = group.x, slot = group.z, per_key = p.value_heads / p.key_heads;
  const uint rows = min(p.rows, step->rows);
  uint first = 0;
  while (first < rows && step->slot[first] != slot) ++first;
  uint end = first;
  while (end < rows && step->slot[end] == slot) ++end;
  if (first == end) return;

  const uint channels = (2 * p.key_heads + p.value_heads) * LILY_DELTA_DIM;
  const uint q0 = h / per_key * LILY_DELTA_DIM + 4 * lane, k0 = q0 + p.key_heads * LILY_DELTA_DIM;
  const uint v0 = (group.y * DELTA_SIMDS + simd) * DELTA_COLUMNS;  // first column of the simdgroup
  const uint mine = h * LILY_DELTA_DIM + v0 + (lane & 7);          // lanes 0 to 7: a column each
  const uint v_channel = 2 * p.key_heads * LILY_DELTA_DIM + mine;

  const ConvTaps4 q_taps = load_taps(conv_w, q0), k_taps = load_taps(conv_w, k0);
  const float4 v_taps = *(device const float4*)(conv_w + 4 * v_channel);
  ConvPast4 q_past, k_past;
  ConvPast v_past;
  UNROLL for (uint i = 0; i < 3; ++i) {
    device const act_t* at = conv_in + ((ulong)slot * 3 + i) * channels;
    q_past.at[i] = load4(at + q0);
    k_past.at[i] = load4(at + k0);
    v_past.at[i] = to_float(at[v_channel]);
  }
  const ulong state_at =
      (((ulong)slot * p.value_heads + h) * LILY_DELTA_DIM + v0) * LILY_DELTA_DIM + 4 * lane;
  float4 s[DELTA_COLUMNS];
  UNROLL for (uint j = 0; j < DELTA_COLUMNS; ++j) {
    s[j] = *(device const float4*)(state_in + state_at + j * LILY_DELTA_DIM);
  }
  const float a_scale = neg_exp_a[h], a_bias = dt_bias[h], v_gain = gain[v0 + (lane & 7)];

  for (uint r = first; r < end; ++r) {
    device const act_t* at = proj + (ulong)r * p.proj_stride;
    float4 q = conv4(q_past, load4(at + q0), q_taps), k = conv4(k_past, load4(at + k0), k_taps);
    const float v = conv1(v_past, to_float(at[v_channel]), v_taps);
    q *= inv_norm(q) * DELTA_Q_SCALE;
    k *= inv_norm(k);
    const float decay = exp_(a_scale * softplus(to_float(at[p.a_offset + h]) + a_bias));
    const float beta = sigmoid(to_float(at[p.b_offset + h]));
    float d[DELTA_COLUMNS];
    UNROLL for (uint j = 0; j < DELTA_COLUMNS; ++j) {
      s[j] *= decay;
      d[j] = dot4(s[j], k, 0.0f);
    }
    // Lanes 4 j to 4 j + 3 have the sum of column j; lane j has its v.
    const float change = beta * (simd_shuffle(v, (ushort)(lane / 4)) - sum8(d, lane));
    UNROLL for (uint j = 0; j < DELTA_COLUMNS; ++j) {
      s[j] += simd_shuffle(change, (ushort)(4 * j)) * k;
      d[j] = dot4(s[j], q, 0.0f);
    }
    const float sum = sum8(d, lane), at_column = simd_shuffle(sum, (ushort)(4 * (lane & 7)));
    const float o = lane < DELTA_COLUMNS ? at_column : 0.0f;
    if (lane < DELTA_COLUMNS) {
      const float z = to_float(at[p.z_offset + mine]);
      u[(ulong)r * p.value_heads * LILY_DELTA_DIM + mine] = to_act(o * v_gain * silu(z));
    }
    const float square = simd_sum(o * o);  // lanes from 8 on hold 0
    if (lane == 0) squares[(r - first) * DELTA_SIMDS + simd] = square;
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < end - first) {
    float sum = 0.0f;
    for (uint i = 0; i < DELTA_SIMDS; ++i) sum += squares[tid * DELTA_SIMDS + i];
    head_ssq[((ulong)(first + tid) * p.value_heads + h) * p.head_parts + group.y] = sum;
  }
  if (!p.write_state) return;
  UNROLL for (uint j = 0; j < DELTA_COLUMNS; ++j) {
    *(device float4*)(state_out + state_at + j * LILY_DELTA_DIM) = s[j];
  }
  // Each channel once: v by its own group; q and k of a key head by its first value head's first group.
  const bool writes_qk = h % per_key == 0 && group.y == 0;
  UNROLL for (uint i = 0; i < 3; ++i) {
    device act_t* to = conv_out + ((ulong)slot * 3 + i) * channels;
    if (lane < DELTA_COLUMNS) to[v_channel] = to_act(v_past.at[i]);
    if (writes_qk && simd == 0) store4(to + q0, q_past.at[i]);
    if (writes_qk && simd == 1) store4(to + k0, k_past.at[i]);
  }
}
#define DELTA_STEP(op, name, c0, c1, c2)                                                           \
  KERNEL(name)(IN(act_t, proj, 0), IN(float, conv_w, 1), IN(float, neg_exp_a, 2),                  \
               IN(float, dt_bias, 3), IN(float, gain, 4), IN(act_t, conv_in, 5),                   \
               IN(float, state_in, 6), OUT(act_t, conv_out, 7), OUT(float, state_out, 8),          \
               OUT(act_t, u, 9), OUT(float, head_ssq, 10), PARAMS(DeltaStep, 11), STEP_IN(12) IDS) { \
    READ_IDS                                                                                       \
    SHARED(float, squares, LILY_MAX_ROWS * DELTA_SIMDS);                                           \
    delta_step_body(proj, conv_w, neg_exp_a, dt_bias, gain, conv_in, state_in, conv_out,           \
                    state_out, u, head_ssq, p, step, squares, group, tid, lane, simd);             \
  }
LILY_VARIANTS_delta_step(DELTA_STEP)

// ---- delta_out ----------------------------------------------------------------------------------
// Group = 8 output rows of one input row; each of 4 simdgroups takes a quarter of k (1024 values by
// turns). A lane's 32 values lie inside one head.
#define DELTA_OUT_SIMDS 4
#define DELTA_OUT_HEADS (DELTA_OUT_SIMDS * 1024 / LILY_DELTA_DIM)  // of one turn
template <uint BITS>
static inline void delta_out_body(device const uint* codes, device const uint* pairs,
                                  device const act_t* u, device const float* head_ssq,
                                  device act_t* x, device float* ssq, PARAM_REF(DeltaOut) p,
                                  device const Step* step, threadgroup float* part,
                                  threadgroup float* inv, uint3 group, uint tid, uint lane,
                                  uint simd) {
  const Linear w = linear_of(p.w);
  const uint row = group.y, k = w.k, first = group.x * LILY_OUT_ROWS;
  // Row 0 is always there: its weights' loads wait for nothing.
  if (row > 0 && row >= step->rows) return;
  float acc[LILY_OUT_ROWS];
  UNROLL for (uint j = 0; j < LILY_OUT_ROWS; ++j)
    acc[j] = 0.0f;
  UNROLL for (uint n0 = 0; n0 < LILY_OUT_ROWS; n0 += rows_at_once<BITS>()) {
    for (uint base = 0; base < k; base += DELTA_OUT_SIMDS * 1024) {
      const uint k0 = base + simd * 1024 + 32 * lane;
      RowCodes<BITS, rows_at_once<BITS>()> rows;
      if (k0 < k) {
        UNROLL for (uint j = 0; j < rows_at_once<BITS>(); ++j)
          load_row(codes, pairs, w, first + n0 + j, k0, j, rows);
      }
      // The weights are under way while the norms of these heads are taken, by a thread each.
      const uint head = base / LILY_DELTA_DIM + tid;
      if (tid < DELTA_OUT_HEADS && head < p.heads) {
        device const float* parts = head_ssq + ((ulong)row * p.heads + head) * p.head_parts;
        float sum = 0.0f;
        for (uint i = 0; i < p.head_parts; ++i) sum += parts[i];
        inv[tid] = inv_sqrt(sum / float(LILY_DELTA_DIM) + p.eps);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (k0 < k) {
        LaneX xs;
        UNROLL for (uint c = 0; c < 8; ++c) {
          xs.v[c] = load4(u + (ulong)row * k + k0 + 4 * c) * inv[(k0 - base) / LILY_DELTA_DIM];
        }
        prepare<BITS>(xs);
        add_rows(rows, xs, p.w.scale_f16, acc + n0);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  const float v = sum8(acc, lane);
  if ((lane & 3) == 0) part[simd * LILY_OUT_ROWS + lane / 4] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0 && row < step->rows)
    add_outputs(part, DELTA_OUT_SIMDS, x, ssq, (ulong)row * p.w.n, first, lane);
}
#define DELTA_OUT(op, name, BITS, c1, c2)                                                     \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(act_t, u, 2), IN(float, head_ssq, 3), \
               OUT(act_t, x, 4), OUT(float, ssq, 5), PARAMS(DeltaOut, 6), STEP_IN(7) IDS) {   \
    READ_IDS                                                                                    \
    SHARED(float, part, DELTA_OUT_SIMDS * LILY_OUT_ROWS);                                     \
    SHARED(float, inv, DELTA_OUT_HEADS);                                                      \
    delta_out_body<BITS>(codes, pairs, u, head_ssq, x, ssq, p, step, part, inv, group, tid,   \
                         lane, simd);                                                         \
  }
LILY_VARIANTS_delta_out(DELTA_OUT)

// ---- delta_prep ---------------------------------------------------------------------------------
// Simdgroup = one head (of q, k, then v) of 8 consecutive rows, 4 channels a lane.
#define PREP_ROWS 8
#define PREP_SIMDS 4
static inline void delta_prep_body(device const act_t* proj, device const float* conv_w,
                                   device const float* neg_exp_a, device const float* dt_bias,
                                   device const act_t* conv_in, device act_t* conv_out,
                                   device float* q, device float* k, device float* v,
                                   device float* g, device float* beta, PARAM_REF(DeltaPrep) p,
                                   uint3 group, uint lane, uint simd) {
  const uint r0 = (group.y * PREP_SIMDS + simd) * PREP_ROWS, end = min(r0 + PREP_ROWS, p.rows);
  if (r0 >= end) return;
  const uint channels = (2 * p.key_heads + p.value_heads) * LILY_DELTA_DIM;
  const uint c0 = group.x * LILY_DELTA_DIM + 4 * lane;
  const bool is_q = group.x < p.key_heads, is_k = !is_q && group.x < 2 * p.key_heads;
  const uint h = is_q ? group.x : group.x - (is_k ? 1 : 2) * p.key_heads;
  const uint heads = is_q || is_k ? p.key_heads : p.value_heads;
  device float* to = (is_q ? q : is_k ? k : v) + h * LILY_DELTA_DIM + 4 * lane;

  const ConvTaps4 taps = load_taps(conv_w, c0);
  ConvPast4 past;
  UNROLL for (uint i = 0; i < 3; ++i) {
    if (r0 == 0) past.at[i] = load4(conv_in + (ulong)i * channels + c0);
    else past.at[i] = load4(proj + (ulong)(r0 + i - 3) * p.proj_stride + c0);
  }
  for (uint r = r0; r < end; ++r) {
    device const act_t* at = proj + (ulong)r * p.proj_stride;
    float4 y = conv4(past, load4(at + c0), taps);
    if (is_q || is_k) y *= inv_norm(y) * (is_q ? DELTA_Q_SCALE : 1.0f);
    *(device float4*)(to + (ulong)r * heads * LILY_DELTA_DIM) = y;
    if (!is_q && !is_k && lane == 0) {
      g[(ulong)r * heads + h] = neg_exp_a[h] * softplus(to_float(at[p.a_offset + h]) + dt_bias[h]);
      beta[(ulong)r * heads + h] = sigmoid(to_float(at[p.b_offset + h]));
    }
  }
  if (end == p.rows) {
    UNROLL for (uint i = 0; i < 3; ++i)
      store4(conv_out + (ulong)i * channels + c0, past.at[i]);
  }
}
#define DELTA_PREP(op, name, c0, c1, c2)                                                         \
  KERNEL(name)(IN(act_t, proj, 0), IN(float, conv_w, 1), IN(float, neg_exp_a, 2),                \
               IN(float, dt_bias, 3), IN(act_t, conv_in, 4), OUT(act_t, conv_out, 5),            \
               OUT(float, q, 6), OUT(float, k, 7), OUT(float, v, 8), OUT(float, g, 9),           \
               OUT(float, beta, 10), PARAMS(DeltaPrep, 11) IDS) {                                \
    READ_IDS                                                                                     \
    delta_prep_body(proj, conv_w, neg_exp_a, dt_bias, conv_in, conv_out, q, k, v, g, beta, p,    \
                    group, lane, simd);                                                          \
  }
LILY_VARIANTS_delta_prep(DELTA_PREP)

// ---- the chunked rule ---------------------------------------------------------------------------
// Running sums of the log decay inside a chunk are (high, low) pairs: a token of strong decay leaves
// a large sum behind, and the small differences that follow would lose their digits in one float.
static inline float2 add_pairs(float2 a, float2 b) {
  const float s = a.x + b.x, t = s - a.x;
  return float2(s, (a.x - (s - t)) + (b.x - t) + (a.y + b.y));
}
static inline float pair_difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }
// Log decays of rows 2 lane and 2 lane + 1 of a chunk. Rows past the end of the sequence decay by nothing.
static inline float2 load_decays(device const float* g, uint row0, uint rows, uint heads, uint h,
                                 uint lane) {
  const uint r = row0 + 2 * lane;
  return float2(r < rows ? g[(ulong)r * heads + h] : 0.0f,
                r + 1 < rows ? g[(ulong)(r + 1) * heads + h] : 0.0f);
}
// By one simdgroup: the sums up to and with the lane's two rows.
static inline void decay_sums(float2 decays, uint lane, thread float2& even, thread float2& odd) {
  even = float2(decays.x, 0.0f);
  odd = add_pairs(even, float2(decays.y, 0.0f));
  UNROLL for (ushort o = 1; o < 32; o <<= 1) {
    const float2 below = float2(simd_shuffle_up(odd.x, o), simd_shuffle_up(odd.y, o));
    if (lane >= o) odd = add_pairs(below, odd);
  }
  const float2 before = float2(simd_shuffle_up(odd.x, 1), simd_shuffle_up(odd.y, 1));
  if (lane > 0) even = add_pairs(before, even);
}
// `count` float4 columns of LILY_CHUNK rows (heads of `width` floats) into stage[row][ld]; zeros
// past the end of the sequence.
static inline void stage_rows(device const float* from, uint row0, uint rows, ulong row_floats,
                              uint count, threadgroup float* stage, uint ld, uint tid,
                              uint threads) {
  for (uint i = tid; i < LILY_CHUNK * count; i += threads) {
    const uint r = i / count, c = i % count;
    float4 v = float4(0.0f);
    if (row0 + r < rows) v = *(device const float4*)(from + (row0 + r) * row_floats + 4 * c);
    *(threadgroup float4*)(stage + r * ld + 4 * c) = v;
  }
}

// ---- delta_wy -----------------------------------------------------------------------------------
// Group = (chunk, value head), 8 simdgroups. First k k^T and q k^T, 4 x 4 of each a thread (rows 16
// apart, columns 16 apart: those above the diagonal drop out), then each thread solves one of the 256
// columns of w and u by forward substitution, 16 rows in registers, earlier ones read back.
#define WY_THREADS 256
#define WY_PIECE 32             // key columns staged at a time
#define WY_LD (WY_PIECE + 4)    // rows on different banks
#define WY_A_LD (LILY_CHUNK + 4)
static inline void delta_wy_body(device const float* q, device const float* k,
                                 device const float* v, device const float* g,
                                 device const float* beta, device float* w, device float* u,
                                 device float* scores, PARAM_REF(DeltaWy) p,
                                 threadgroup float* stage, threadgroup float2* sums,
                                 threadgroup float* betas, threadgroup float* factors, uint3 group,
                                 uint tid, uint lane, uint simd) {
  const uint row0 = group.x * LILY_CHUNK, h = group.y, rows = p.rows;
  const uint kh = h / (p.value_heads / p.key_heads);
  const ulong key_floats = (ulong)p.key_heads * LILY_DELTA_DIM;
  const ulong value_floats = (ulong)p.value_heads * LILY_DELTA_DIM;
  if (simd == 0) {
    float2 even, odd;
    decay_sums(load_decays(g, row0, rows, p.value_heads, h, lane), lane, even, odd);
    UNROLL for (uint e = 0; e < 2; ++e) {
      const uint i = 2 * lane + e, r = row0 + i;
      const float2 sum = e ? odd : even;
      const float b = r < rows ? beta[(ulong)r * p.value_heads + h] : 0.0f;
      sums[i] = sum;
      betas[i] = b;
      factors[i] = b * exp_(sum.x + sum.y);
    }
  }
  const uint cg = (lane & 7) + 8 * (simd & 1), rg = (lane >> 3) + 4 * (simd >> 1);
  threadgroup float* stage_q = stage + LILY_CHUNK * WY_LD;
  float kk[4][4], qk[4][4];
  UNROLL for (uint i = 0; i < 4; ++i) {
    UNROLL for (uint j = 0; j < 4; ++j)
      kk[i][j] = qk[i][j] = 0.0f;
  }
  for (uint d0 = 0; d0 < LILY_DELTA_DIM; d0 += WY_PIECE) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows(k + kh * LILY_DELTA_DIM + d0, row0, rows, key_floats, WY_PIECE / 4, stage, WY_LD,
               tid, WY_THREADS);
    stage_rows(q + kh * LILY_DELTA_DIM + d0, row0, rows, key_floats, WY_PIECE / 4, stage_q, WY_LD,
               tid, WY_THREADS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = 0; d < WY_PIECE; d += 4) {
      float4 cols[4];
      UNROLL for (uint j = 0; j < 4; ++j) {
        cols[j] = *(threadgroup const float4*)(stage + (cg + 16 * j) * WY_LD + d);
      }
      UNROLL for (uint i = 0; i < 4; ++i) {
        const float4 a = *(threadgroup const float4*)(stage + (rg + 16 * i) * WY_LD + d);
        const float4 b = *(threadgroup const float4*)(stage_q + (rg + 16 * i) * WY_LD + d);
        UNROLL for (uint j = 0; j <= i; ++j) {
          kk[i][j] = dot4(a, cols[j], kk[i][j]);
          qk[i][j] = dot4(b, cols[j], qk[i][j]);
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint i = 0; i < 4; ++i) {
    UNROLL for (uint j = 0; j < 4; ++j) {
      const uint r = rg + 16 * i, c = cg + 16 * j;
      // Above the diagonal the difference is positive and could overflow: never taken.
      const float decay = c <= r ? exp_(pair_difference(sums[r], sums[c])) : 0.0f;
      // A is kept transposed, [c][r], so that the substitution reads 4 rows at once; it uses what
      // lies below the diagonal.
      if (j <= i) stage[c * WY_A_LD + r] = betas[r] * decay * kk[i][j];
      if (row0 + r < rows) {
        scores[((ulong)(row0 + r) * p.value_heads + h) * LILY_CHUNK + c] = decay * qk[i][j];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint c = tid & (LILY_DELTA_DIM - 1);
  const bool is_u = tid >= LILY_DELTA_DIM;  // the same in a whole simdgroup
  device const float* from = is_u ? v + h * LILY_DELTA_DIM + c : k + kh * LILY_DELTA_DIM + c;
  const ulong from_floats = is_u ? value_floats : key_floats;
  threadgroup const float* factor = is_u ? betas : factors;
  device float* to = (is_u ? u : w) + row0 * value_floats + h * LILY_DELTA_DIM + c;
  const uint n = min(rows - row0, (uint)LILY_CHUNK);
  for (uint b = 0; b < n; b += 16) {
    float x[16];
    UNROLL for (uint i = 0; i < 16; ++i) {
      x[i] = b + i < n ? from[(row0 + b + i) * from_floats] * factor[b + i] : 0.0f;
    }
    for (uint j = 0; j < b; ++j) {
      const float done = to[j * value_floats];
      UNROLL for (uint e = 0; e < 4; ++e) {
        const float4 a = *(threadgroup const float4*)(stage + j * WY_A_LD + b + 4 * e);
        UNROLL for (uint f = 0; f < 4; ++f)
          x[4 * e + f] = fma(-a[f], done, x[4 * e + f]);
      }
    }
    UNROLL for (uint j = 0; j < 15; ++j) {
      UNROLL for (uint e = 0; e < 4; ++e) {
        if (4 * e + 3 > j) {
          const float4 a = *(threadgroup const float4*)(stage + (b + j) * WY_A_LD + b + 4 * e);
          UNROLL for (uint f = 0; f < 4; ++f) {
            if (4 * e + f > j) x[4 * e + f] = fma(-a[f], x[j], x[4 * e + f]);
          }
        }
      }
    }
    UNROLL for (uint i = 0; i < 16; ++i) {
      if (b + i < n) to[(b + i) * value_floats] = x[i];
    }
  }
}
#define DELTA_WY(op, name, c0, c1, c2)                                                            \
  KERNEL(name)(IN(float, q, 0), IN(float, k, 1), IN(float, v, 2), IN(float, g, 3),                \
               IN(float, beta, 4), OUT(float, w, 5), OUT(float, u, 6), OUT(float, scores, 7),     \
               PARAMS(DeltaWy, 8) IDS) {                                                          \
    READ_IDS                                                                                      \
    SHARED(float4, stage, 2 * LILY_CHUNK * WY_LD / 4); /* then A: LILY_CHUNK * WY_A_LD */         \
    SHARED(float2, sums, LILY_CHUNK);                                                             \
    SHARED(float, betas, LILY_CHUNK);                                                             \
    SHARED(float, factors, LILY_CHUNK);                                                           \
    delta_wy_body(q, k, v, g, beta, w, u, scores, p, (threadgroup float*)stage, sums, betas,      \
                  factors, group, tid, lane, simd);                                               \
  }
LILY_VARIANTS_delta_wy(DELTA_WY)

// ---- delta_scan ---------------------------------------------------------------------------------
// Group = (value head, 16 value columns), 4 simdgroups; the state [16 v][128 k] lives in threadgroup
// memory through all chunks. Per chunk: [w; q] S^T, from it the writes d = u - w S^T and o =
// exp(G) q S^T + scores d, then S = exp(G_last) S + d^T (exp(G_last - G) k). The chunks are a chain, so
// what one needs from memory is on its way while the one before is computed.
#define SCAN_THREADS 128
#define SCAN_V 16
#define SCAN_PIECE 32                     // key columns of w and q staged at a time
#define SCAN_LD (SCAN_PIECE + 4)          // rows on different banks
#define SCAN_WIDE_LD (LILY_CHUNK + 4)     // of 64 columns of scores and of d
#define SCAN_K_LD (LILY_CHUNK + 8)        // of 64 columns of k, which are read downwards
#define SCAN_STATE_LD (LILY_DELTA_DIM + 4)
#define SCAN_VECTORS (LILY_CHUNK * LILY_CHUNK / 4 / SCAN_THREADS)  // a thread's of 64 x 64 floats

// 64 rows of COLUMNS floats on their way from memory to threadgroup memory, COLUMNS / 8 vectors a thread.
template <uint COLUMNS>
static inline void load_stage(thread float4* v, device const float* from, ulong stride, uint row0,
                              uint rows, uint tid) {
  UNROLL for (uint i = 0; i < COLUMNS / 4 * LILY_CHUNK / SCAN_THREADS; ++i) {
    const uint at = i * SCAN_THREADS + tid;
    const uint r = row0 + at / (COLUMNS / 4), c = 4 * (at % (COLUMNS / 4));
    v[i] = float4(0.0f);  // past the end of the sequence
    if (r < rows) v[i] = *(device const float4*)(from + r * stride + c);
  }
}
// Pieces of w and q, the one's rows before the other's.
static inline void load_pieces(thread float4* v, device const float* w, ulong w_stride,
                               device const float* q, ulong q_stride, uint row0, uint rows,
                               uint tid) {
  load_stage<SCAN_PIECE>(v, w, w_stride, row0, rows, tid);
  load_stage<SCAN_PIECE>(v + SCAN_VECTORS / 2, q, q_stride, row0, rows, tid);
}
template <uint COLUMNS>
static inline void store_stage(thread const float4* v, threadgroup float* stage, uint ld,
                               uint tid) {
  UNROLL for (uint i = 0; i < SCAN_VECTORS; ++i) {
    const uint at = i * SCAN_THREADS + tid;
    *(threadgroup float4*)(stage + at / (COLUMNS / 4) * ld + 4 * (at % (COLUMNS / 4))) = v[i];
  }
}
static inline void delta_scan_body(
    device const float* q, device const float* k, device const float* g, device const float* w,
    device const float* u, device const float* scores, device const float* state_in,
    device float* state_out, device float* o, PARAM_REF(DeltaScan) p, threadgroup float* state,
    threadgroup float* d, threadgroup float* stage, threadgroup float* grown,
    threadgroup float* rest, uint3 group, uint tid, uint lane, uint simd) {
  const uint h = group.x, v0 = group.y * SCAN_V, rows = p.rows;
  const uint kh = h / (p.value_heads / p.key_heads);
  const ulong key_floats = (ulong)p.key_heads * LILY_DELTA_DIM;
  const ulong value_floats = (ulong)p.value_heads * LILY_DELTA_DIM;
  const ulong score_floats = (ulong)p.value_heads * LILY_CHUNK;
  device const float* head_w = w + h * LILY_DELTA_DIM;
  device const float* head_q = q + kh * LILY_DELTA_DIM;
  device const float* head_k = k + kh * LILY_DELTA_DIM;
  device const float* head_scores = scores + (ulong)h * LILY_CHUNK;
  // A simdgroup has rows 16 simd .. of products [64 rows][16 v] and columns 16 simd .. of [16 v][64 k].
  typedef Tile<16, SCAN_V> ScanTile;
  const uint first = 16 * simd;
  const ulong state_at = ((ulong)h * LILY_DELTA_DIM + v0) * LILY_DELTA_DIM;
  const ulong out_at = (ulong)h * LILY_DELTA_DIM + v0;
  float4 next[SCAN_VECTORS];
  load_pieces(next, head_w, value_floats, head_q, key_floats, 0, rows, tid);
  float2 next_g = load_decays(g, 0, rows, p.value_heads, h, lane);
  for (uint i = tid; i < SCAN_V * LILY_DELTA_DIM / 4; i += SCAN_THREADS) {
    *(threadgroup float4*)(state + i / 32 * SCAN_STATE_LD + 4 * (i % 32)) =
        *(device const float4*)(state_in + state_at + 4 * i);
  }
  for (uint row0 = 0; row0 < rows; row0 += LILY_CHUNK) {
    if (simd == 0) {
      float2 even, odd;
      decay_sums(next_g, lane, even, odd);
      const float2 last = float2(simd_shuffle(odd.x, 31), simd_shuffle(odd.y, 31));
      grown[2 * lane] = exp_(even.x + even.y);
      grown[2 * lane + 1] = exp_(odd.x + odd.y);
      rest[2 * lane] = exp_(pair_difference(last, even));
      rest[2 * lane + 1] = exp_(pair_difference(last, odd));
      next_g = load_decays(g, row0 + LILY_CHUNK, rows, p.value_heads, h, lane);
    }
    float wanted[ScanTile::kSize];
    UNROLL for (uint i = 0; i < ScanTile::kSize; ++i) {
      const uint r = row0 + first + tile_row<16, SCAN_V>(i, lane);
      wanted[i] = r < rows ? u[r * value_floats + out_at + tile_col<16, SCAN_V>(i, lane)] : 0.0f;
    }
    ScanTile read, out;  // w S^T, then q S^T and the rest of o
    tile_zero(read);
    tile_zero(out);
    for (uint d0 = 0; d0 < LILY_DELTA_DIM; d0 += SCAN_PIECE) {
      store_stage<SCAN_PIECE>(next, stage, SCAN_LD, tid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint d1 = d0 + SCAN_PIECE;
      if (d1 < LILY_DELTA_DIM) {
        load_pieces(next, head_w + d1, value_floats, head_q + d1, key_floats, row0, rows, tid);
      } else {
        load_stage<LILY_CHUNK>(next, head_scores, score_floats, row0, rows, tid);
      }
      tile_mma(read, stage + first * SCAN_LD, SCAN_LD, state + d0, SCAN_STATE_LD, SCAN_PIECE);
      tile_mma(out, stage + (LILY_CHUNK + first) * SCAN_LD, SCAN_LD, state + d0, SCAN_STATE_LD,
               SCAN_PIECE);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL for (uint i = 0; i < ScanTile::kSize; ++i) {
      const uint r = first + tile_row<16, SCAN_V>(i, lane);
      d[tile_col<16, SCAN_V>(i, lane) * SCAN_WIDE_LD + r] =
          row0 + r < rows ? wanted[i] - read.v[i] : 0.0f;
      out.v[i] *= grown[r];
    }
    store_stage<LILY_CHUNK>(next, stage, SCAN_WIDE_LD, tid);
    load_stage<LILY_CHUNK>(next, head_k, key_floats, row0, rows, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_mma(out, stage + first * SCAN_WIDE_LD, SCAN_WIDE_LD, d, SCAN_WIDE_LD, LILY_CHUNK);
    UNROLL for (uint i = 0; i < ScanTile::kSize; ++i) {
      const uint r = row0 + first + tile_row<16, SCAN_V>(i, lane);
      if (r < rows) o[r * value_floats + out_at + tile_col<16, SCAN_V>(i, lane)] = out.v[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (uint i = 0; i < SCAN_V * LILY_CHUNK / SCAN_THREADS; ++i) {
      const uint at = i * SCAN_THREADS + tid, r = at % LILY_CHUNK;
      d[at / LILY_CHUNK * SCAN_WIDE_LD + r] *= rest[r];
    }
    // The state, 64 key columns at a time.
    const float kept = grown[LILY_CHUNK - 1];
    for (uint d0 = 0; d0 < LILY_DELTA_DIM; d0 += LILY_CHUNK) {
      if (d0 > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      store_stage<LILY_CHUNK>(next, stage, SCAN_K_LD, tid);
      if (d0 == 0) {
        load_stage<LILY_CHUNK>(next, head_k + LILY_CHUNK, key_floats, row0, rows, tid);
      } else {
        load_pieces(next, head_w, value_floats, head_q, key_floats, row0 + LILY_CHUNK, rows, tid);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      Tile<SCAN_V, 16> part;
      threadgroup float* mine = state + d0 + first;
      UNROLL for (uint i = 0; i < Tile<SCAN_V, 16>::kSize; ++i) {
        part.v[i] =
            kept *
            mine[tile_row<SCAN_V, 16>(i, lane) * SCAN_STATE_LD + tile_col<SCAN_V, 16>(i, lane)];
      }
      tile_mma_nn(part, d, SCAN_WIDE_LD, stage + first, SCAN_K_LD, LILY_CHUNK);
      tile_store(part, mine, SCAN_STATE_LD, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = tid; i < SCAN_V * LILY_DELTA_DIM / 4; i += SCAN_THREADS) {
    *(device float4*)(state_out + state_at + 4 * i) =
        *(threadgroup const float4*)(state + i / 32 * SCAN_STATE_LD + 4 * (i % 32));
  }
}
#define DELTA_SCAN(op, name, c0, c1, c2)                                                         \
  KERNEL(name)(IN(float, q, 0), IN(float, k, 1), IN(float, g, 2), IN(float, w, 3),               \
               IN(float, u, 4), IN(float, scores, 5), IN(float, state_in, 6),                    \
               OUT(float, state_out, 7), OUT(float, o, 8), PARAMS(DeltaScan, 9) IDS) {           \
    READ_IDS                                                                                     \
    SHARED(float4, state, SCAN_V * SCAN_STATE_LD / 4);                                           \
    SHARED(float4, d, SCAN_V * SCAN_WIDE_LD / 4);                                                \
    SHARED(float4, stage, 2 * LILY_CHUNK * SCAN_LD / 4); /* or LILY_CHUNK * SCAN_K_LD */      \
    SHARED(float, grown, LILY_CHUNK);                                                            \
    SHARED(float4, rest, LILY_CHUNK / 4);                                                        \
    delta_scan_body(q, k, g, w, u, scores, state_in, state_out, o, p, (threadgroup float*)state, \
                    (threadgroup float*)d, (threadgroup float*)stage, grown,                     \
                    (threadgroup float*)rest, group, tid, lane, simd);                           \
  }
LILY_VARIANTS_delta_scan(DELTA_SCAN)

// ---- gated_norm ---------------------------------------------------------------------------------
// Simdgroup = one head of one row.
#define GATED_SIMDS 4
static inline void gated_norm_body(device const float* o, device const act_t* proj,
                                   device const float* gain, device act_t* y,
                                   PARAM_REF(GatedNorm) p, uint3 group, uint lane, uint simd) {
  const uint row = group.x, h = group.y * GATED_SIMDS + simd, c = h * LILY_DELTA_DIM + 4 * lane;
  if (h >= p.heads) return;
  const ulong at = (ulong)row * p.heads * LILY_DELTA_DIM + c;
  const float4 v = *(device const float4*)(o + at);
  const float inv = inv_sqrt(simd_sum(dot4(v, v, 0.0f)) / float(LILY_DELTA_DIM) + p.eps);
  const float4 z = load4(proj + (ulong)row * p.proj_stride + p.z_offset + c);
  const float4 gate = float4(silu(z.x), silu(z.y), silu(z.z), silu(z.w));
  store4(y + at, v * inv * *(device const float4*)(gain + 4 * lane) * gate);
}
#define GATED_NORM(op, name, c0, c1, c2)                                                 \
  KERNEL(name)(IN(float, o, 0), IN(act_t, proj, 1), IN(float, gain, 2), OUT(act_t, y, 3), \
               PARAMS(GatedNorm, 4) IDS) {                                               \
    READ_IDS                                                                             \
    gated_norm_body(o, proj, gain, y, p, group, lane, simd);                             \
  }
LILY_VARIANTS_gated_norm(GATED_NORM)
