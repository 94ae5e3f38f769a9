// attention.metal: gated attention over paged KV: attn_step, attn_combine, attn_out (decode),
// qkv_rope, flash (prefill).
#include "matvec.h"
#include "tile.h"

#define KV_HEAD ((ulong)LILY_KV_BLOCK * LILY_HEAD_DIM)  // values of one KV head in a block

// ---- common -------------------------------------------------------------------------------------
// A lane's share of a head: 8 neighbouring values.
static inline void load8(device const act_t* p, thread float (&v)[8]) {
#ifdef LILY_EXACT
  UNROLL for (uint j = 0; j < 2; ++j) {
    const float4 f = load4(p + 4 * j);
    UNROLL for (uint e = 0; e < 4; ++e)
      v[4 * j + e] = f[e];
  }
#else
  const uint4 u = *(device const uint4*)p;
  UNROLL for (uint j = 0; j < 4; ++j) {
    v[2 * j] = bf16_bits_to_float(u[j] & 0xffffu);
    v[2 * j + 1] = as_type<float>(u[j] & 0xffff0000u);
  }
#endif
}
static inline void store8(device act_t* p, thread const float (&v)[8]) {
  store4(p, float4(v[0], v[1], v[2], v[3]));
  store4(p + 4, float4(v[4], v[5], v[6], v[7]));
}
// Keys of a KV head in a block; its values follow kv_heads further.
static inline device act_t* kv_keys(device const Step* step, uint slot, uint block, uint layer,
                                    uint kv_heads, uint kv_head) {
  return kv_block(step, slot, block) + ((ulong)(2 * layer) * kv_heads + kv_head) * KV_HEAD;
}

// One head by one simdgroup: RMS norm with gain, then rope; lane gets values lane * 8 ... The pair
// of a rotated value may lie in any lane, so it is read again instead of exchanged.
static inline void norm_rope(device const act_t* x, device const float* gain,
                             device const float* inv_freq, uint rotary, uint position, float eps,
                             uint lane, thread float (&y)[8]) {
  load8(x + lane * 8, y);
  float sum = 0.0f;
  UNROLL for (uint e = 0; e < 8; ++e)
    sum = fma(y[e], y[e], sum);
  const float inv = inv_sqrt(simd_sum(sum) / float(LILY_HEAD_DIM) + eps);
  const uint pairs = rotary / 2;
  UNROLL for (uint e = 0; e < 8; ++e) {
    const uint d = lane * 8 + e;
    y[e] = y[e] * inv * gain[d];
    if (d < rotary) {
      const bool first = d < pairs;
      const uint other = first ? d + pairs : d - pairs;
      const float o = to_float(x[other]) * inv * gain[other];
      const float2 sc = sin_cos(float(position) * inv_freq[first ? d : other]);
      y[e] = fma(y[e], sc.y, first ? -(o * sc.x) : o * sc.x);
    }
  }
}

// ---- attn_step ----------------------------------------------------------------------------------
// A threadgroup: one row, one KV head with all its query heads, one split of 128 keys. Scores first
// (8 simdgroups, 8 keys at a time each), then their softmax, then values (4 groups of 64 threads, 8
// keys at a time, 4 values a thread). Which lane adds what depends on the place in the split alone.
#define STEP_THREADS 256
#define STEP_SIMDS 8
#define STEP_HEADS 16  // most query heads of a KV head
#define STEP_KEYS 8

// q in shared memory: a head's 256 values so that the lanes' float4 fall on different banks.
static inline void load_q(threadgroup const float* q, uint lane, thread float (&v)[8]) {
  UNROLL for (uint j = 0; j < 2; ++j) {
    const float4 f = *(threadgroup const float4*)(q + 128 * j + 4 * lane);
    UNROLL for (uint e = 0; e < 4; ++e)
      v[4 * j + e] = f[e];
  }
}
static inline float dot8(thread const float (&a)[8], thread const float (&b)[8]) {
  float d = 0.0f;
  UNROLL for (uint e = 0; e < 8; ++e)
    d = fma(a[e], b[e], d);
  return d;
}

// pool: [heads][256] of q, then [heads][128] of scores; at last [4][4 heads][256] of sums.
static inline void attn_step_body(device const act_t* proj, device const float* q_gain,
                                  device const float* k_gain, device const float* inv_freq,
                                  device float* partial, PARAM_REF(AttnStep) p,
                                  device const Step* step, threadgroup float* pool, uint3 group,
                                  uint tid, uint lane, uint simd) {
  const uint kv_head = group.x, split = group.y, row = group.z;
  if (row >= step->rows) return;
  const uint position = step->position[row], start = split * LILY_SPLIT;
  if (start > position) return;
  const uint slot = step->slot[row], ratio = p.heads / p.kv_heads;
  const uint n = min(position - start + 1, (uint)LILY_SPLIT);  // keys of this split
  // Keys from the slot's first row on are appended by other groups of this launch, so they come
  // from proj; the first `cached` keys of the split come from the cache.
  uint first = row;
  while (first > 0 && step->slot[first - 1] == slot) --first;
  const uint p0 = step->position[first];
  const uint cached = p0 > start ? min(p0 - start, n) : 0;
  device act_t* keys = kv_keys(step, slot, start / LILY_KV_BLOCK, p.layer, p.kv_heads, kv_head) +
                       start % LILY_KV_BLOCK * LILY_HEAD_DIM;
  device act_t* values = keys + p.kv_heads * KV_HEAD;
  device const act_t* new_k = proj + p.k_offset + kv_head * LILY_HEAD_DIM;
  device const act_t* new_v = proj + p.v_offset + kv_head * LILY_HEAD_DIM;
  threadgroup float* q = pool;
  threadgroup float* scores = pool + STEP_HEADS * LILY_HEAD_DIM;
  device float* out =
      partial + (((ulong)row * p.heads + kv_head * ratio) * p.splits + split) * LILY_PARTIAL;
  const ulong out_head = (ulong)p.splits * LILY_PARTIAL;

  for (uint i = tid * LILY_LINE; i < cached * LILY_HEAD_DIM * sizeof(act_t);
       i += STEP_THREADS * LILY_LINE) {
    prefetch_line((device const uchar*)keys + i);
    prefetch_line((device const uchar*)values + i);
  }
  for (uint h = simd; h < ratio; h += STEP_SIMDS) {
    float y[8];
    norm_rope(proj + (ulong)row * p.proj_stride + (kv_head * ratio + h) * 2 * LILY_HEAD_DIM, q_gain,
              inv_freq, p.rotary, position, p.eps, lane, y);
    UNROLL for (uint e = 0; e < 8; ++e) {
      q[h * LILY_HEAD_DIM + e / 4 * 128 + lane * 4 + e % 4] = y[e] * p.scale;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint b = simd * STEP_KEYS; b < cached; b += STEP_SIMDS * STEP_KEYS) {
    float k[STEP_KEYS][8];
    UNROLL for (uint j = 0; j < STEP_KEYS; ++j) {
      load8(keys + min(b + j, cached - 1) * LILY_HEAD_DIM + lane * 8, k[j]);
    }
    for (uint h = 0; h < ratio; ++h) {
      float qh[8], s[8];
      load_q(q + h * LILY_HEAD_DIM, lane, qh);
      UNROLL for (uint j = 0; j < STEP_KEYS; ++j)
        s[j] = dot8(qh, k[j]);
      const float score = sum8(s, lane);
      const uint i = b + lane / 4;
      if ((lane & 3) == 0 && i < cached) scores[h * LILY_SPLIT + i] = score;
    }
  }
  for (uint i = cached + simd; i < n; i += STEP_SIMDS) {
    const ulong from = (ulong)(first + (start + i - p0)) * p.proj_stride;
    float k[8];
    norm_rope(new_k + from, k_gain, inv_freq, p.rotary, start + i, p.eps, lane, k);
    UNROLL for (uint e = 0; e < 8; ++e)
      k[e] = round_act(k[e]);     // as the cache holds it
    if (start + i == position) {  // the row's own: this group appends it
      float v[8];
      load8(new_v + from + lane * 8, v);
      store8(keys + i * LILY_HEAD_DIM + lane * 8, k);
      store8(values + i * LILY_HEAD_DIM + lane * 8, v);
    }
    for (uint h = 0; h < ratio; ++h) {
      float qh[8], s[8];
      load_q(q + h * LILY_HEAD_DIM, lane, qh);
      UNROLL for (uint j = 0; j < 8; ++j)
        s[j] = dot8(qh, k);
      const float score = sum8(s, lane);  // not simd_sum: a cached key's bits
      if (lane == 0) scores[h * LILY_SPLIT + i] = score;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint h = simd; h < ratio; h += STEP_SIMDS) {
    threadgroup float* s = scores + h * LILY_SPLIT;
    float e[4], top = -INFINITY, sum = 0.0f;
    UNROLL for (uint i = 0; i < LILY_SPLIT / 32; ++i) {
      e[i] = i * 32 + lane < n ? s[i * 32 + lane] : -INFINITY;
      top = max(top, e[i]);
    }
    top = simd_max(top);
    UNROLL for (uint i = 0; i < LILY_SPLIT / 32; ++i) {
      e[i] = i * 32 + lane < n ? exp_(e[i] - top) : 0.0f;
      s[i * 32 + lane] = e[i];
      sum += e[i];
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      out[h * out_head] = top;
      out[h * out_head + 1] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint part = simd / 2, d = (tid & 63) * 4;
  float acc[STEP_HEADS][4];
  UNROLL for (uint h = 0; h < STEP_HEADS; ++h) {
    UNROLL for (uint e = 0; e < 4; ++e)
      acc[h][e] = 0.0f;
  }
  for (uint b = part * STEP_KEYS; b < n; b += 4 * STEP_KEYS) {
    float4 v[STEP_KEYS];
    UNROLL for (uint j = 0; j < STEP_KEYS; ++j) {
      const uint i = min(b + j, n - 1);  // beyond: weight 0
      device const act_t* from = new_v + (ulong)(first + (start + i - p0)) * p.proj_stride;
      if (i < cached) from = values + i * LILY_HEAD_DIM;
      v[j] = load4(from + d);
    }
    UNROLL for (uint h = 0; h < STEP_HEADS; ++h) {
      if (h < ratio) {
        UNROLL for (uint j = 0; j < STEP_KEYS; j += 4) {
          const float4 w = *(threadgroup const float4*)(scores + h * LILY_SPLIT + b + j);
          UNROLL for (uint c = 0; c < 4; ++c) {
            UNROLL for (uint e = 0; e < 4; ++e)
              acc[h][e] = fma(w[c], v[j + c][e], acc[h][e]);
          }
        }
      }
    }
  }
  for (uint h0 = 0; h0 < ratio; h0 += 4) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (uint h = 0; h < STEP_HEADS; ++h) {
      if (h >= h0 && h < min(h0 + 4, ratio)) {
        *(threadgroup float4*)(pool + (part * 4 + h - h0) * LILY_HEAD_DIM + d) =
            float4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint h = h0; h < min(h0 + 4, ratio); ++h) {
      threadgroup const float* sums = pool + (h - h0) * LILY_HEAD_DIM + tid;
      float total = 0.0f;
      UNROLL for (uint c = 0; c < 4; ++c)
        total += sums[c * 4 * LILY_HEAD_DIM];
      out[h * out_head + 2 + tid] = total;
    }
  }
}
#define ATTN_STEP(op, name, c0, c1, c2)                                                            \
  KERNEL(name)(IN(act_t, proj, 0), IN(float, q_gain, 1), IN(float, k_gain, 2),                     \
               IN(float, inv_freq, 3), OUT(float, partial, 4), PARAMS(AttnStep, 5),                \
               STEP_IN(6) IDS) {                                                                   \
    READ_IDS                                                                                       \
    SHARED(float4, pool, STEP_HEADS * (LILY_HEAD_DIM + LILY_SPLIT) / 4);                                      \
    attn_step_body(proj, q_gain, k_gain, inv_freq, partial, p, step, (threadgroup float*)pool,     \
                   group, tid, lane, simd);                                                        \
  }
LILY_VARIANTS_attn_step(ATTN_STEP)

// ---- attn_combine -------------------------------------------------------------------------------
// The partials of a head's n splits as one: weights e^(max - top), sums in the order of the splits.
// One split comes out as it is: exp(0) = 1.
static inline uint valid_splits(device const Step* step, uint row) {
  return step->position[row] / LILY_SPLIT + 1;
}

// A group a head and half of its values; 8 threads a value, which take 8 splits by turns: up to 8
// splits are so added up in their order, as attn_out does itself. The weights of 1024 splits at a time.
#define COMBINE_THREADS 1024
#define COMBINE_VALUES 128
#define COMBINE_PARTS (COMBINE_THREADS / COMBINE_VALUES)
#define COMBINE_AT_ONCE LILY_FUSED_SPLITS
static inline void attn_combine_body(device const float* partial, device float* combined,
                                     PARAM_REF(AttnCombine) p, device const Step* step,
                                     threadgroup float* weights, threadgroup float* sums,
                                     threadgroup float* scratch, uint3 group, uint tid, uint lane,
                                     uint simd) {
  const uint head = group.x, row = group.z;
  if (row >= step->rows) return;
  const uint value = tid % COMBINE_VALUES, part = tid / COMBINE_VALUES;
  const ulong at = (ulong)row * p.heads + head;
  device const float* parts = partial + at * p.splits * LILY_PARTIAL;
  const uint n = valid_splits(step, row);
  float top = -INFINITY, total = 0.0f, acc = 0.0f;
  for (uint s = tid; s < n; s += COMBINE_THREADS) top = max(top, parts[(ulong)s * LILY_PARTIAL]);
  top = group_max(top, scratch, lane, simd, COMBINE_THREADS / 32);
  for (uint s0 = 0; s0 < n; s0 += COMBINE_THREADS) {
    const uint count = min(n - s0, (uint)COMBINE_THREADS);
    device const float* from = parts + (ulong)s0 * LILY_PARTIAL;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < count) {
      weights[tid] = exp_(from[tid * LILY_PARTIAL] - top);
      sums[tid] = from[tid * LILY_PARTIAL + 1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    from += 2 + group.y * COMBINE_VALUES + value;
    for (uint s = part * COMBINE_AT_ONCE; s < count; s += COMBINE_PARTS * COMBINE_AT_ONCE) {
      float a[COMBINE_AT_ONCE];
      UNROLL for (uint i = 0; i < COMBINE_AT_ONCE; ++i)
        a[i] = from[min(s + i, count - 1) * LILY_PARTIAL];
      UNROLL for (uint i = 0; i < COMBINE_AT_ONCE; ++i) {
        if (s + i < count) {
          total = fma(sums[s + i], weights[s + i], total);
          acc = fma(a[i], weights[s + i], acc);
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  weights[tid] = acc;
  if (value == 0) sums[part] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (part > 0) return;
  for (uint i = 1; i < COMBINE_PARTS; ++i) {
    acc += weights[i * COMBINE_VALUES + value];
    total += sums[i];
  }
  device float* out = combined + at * LILY_PARTIAL;
  if (group.y == 0 && value == 0) {
    out[0] = top;
    out[1] = total;
  }
  out[2 + group.y * COMBINE_VALUES + value] = acc;
}
#define ATTN_COMBINE(op, name, c0, c1, c2)                                                         \
  KERNEL(name)(IN(float, partial, 0), OUT(float, combined, 1), PARAMS(AttnCombine, 2),             \
               STEP_IN(3) IDS) {                                                                   \
    READ_IDS                                                                                       \
    SHARED(float, weights, COMBINE_THREADS);                                                       \
    SHARED(float, sums, COMBINE_THREADS);                                                          \
    SHARED(float, scratch, COMBINE_THREADS / 32);                                                  \
    attn_combine_body(partial, combined, p, step, weights, sums, scratch, group, tid, lane, simd); \
  }
LILY_VARIANTS_attn_combine(ATTN_COMBINE)

// ---- attn_out -----------------------------------------------------------------------------------
// Group = 8 output rows of one input row; each of 4 simdgroups takes a quarter of k (1024 values by
// turns). A lane combines and gates the 32 values of a head that it multiplies.
#define OUT_SIMDS 4
template <uint BITS>
static inline void attn_out_body(device const uint* codes, device const uint* pairs,
                                 device const float* partial, device const act_t* proj,
                                 device act_t* x, device float* ssq, PARAM_REF(AttnOut) p,
                                 device const Step* step, threadgroup float* part, uint3 group,
                                 uint lane, uint simd) {
  const Linear w = linear_of(p.w);
  const uint row = group.y, k = w.k, first = group.x * LILY_OUT_ROWS;
  // Row 0 is always there: its weights' loads wait for nothing.
  if (row > 0 && row >= step->rows) return;
  float acc[LILY_OUT_ROWS];
  UNROLL for (uint j = 0; j < LILY_OUT_ROWS; ++j)
    acc[j] = 0.0f;
  UNROLL for (uint n0 = 0; n0 < LILY_OUT_ROWS; n0 += rows_at_once<BITS>()) {
    for (uint base = 0; base < k; base += OUT_SIMDS * 1024) {
      const uint k0 = base + simd * 1024 + 32 * lane;
      RowCodes<BITS, rows_at_once<BITS>()> rows;
      if (k0 < k) {
        UNROLL for (uint j = 0; j < rows_at_once<BITS>(); ++j)
          load_row(codes, pairs, w, first + n0 + j, k0, j, rows);
      }
      // For the order alone: the weights' loads stay ahead of the branches that follow.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (k0 < k) {
        const uint head = k0 / LILY_HEAD_DIM, d = k0 % LILY_HEAD_DIM;
        const uint splits = p.combined ? 1 : valid_splits(step, row);
        device const float* parts =
            partial + ((ulong)row * p.heads + head) * p.splits * LILY_PARTIAL;
        LaneX xs;
        UNROLL for (uint c = 0; c < 8; ++c)
          xs.v[c] = float4(0.0f);
        device const act_t* gates =
            proj + (ulong)row * p.proj_stride + (2 * head + 1) * LILY_HEAD_DIM + d;
        float4 gate[8];
        UNROLL for (uint c = 0; c < 8; ++c)
          gate[c] = load4(gates + 4 * c);
        float top = -INFINITY, total = 0.0f;
        for (uint s0 = 0; s0 < splits; s0 += 4) {
          UNROLL for (uint s = 0; s < 4; ++s)
            top = max(top, parts[min(s0 + s, splits - 1) * LILY_PARTIAL]);
        }
        for (uint s = 0; s < splits; ++s) {
          device const float* from = parts + s * LILY_PARTIAL;
          const float weight = exp_(from[0] - top);
          total = fma(from[1], weight, total);
          UNROLL for (uint c = 0; c < 8; ++c) {
            UNROLL for (uint e = 0; e < 4; e += 2) {  // 258 values: 8-byte aligned only
              const float2 a = *(device const float2*)(from + 2 + d + 4 * c + e);
              xs.v[c][e] = fma(a.x, weight, xs.v[c][e]);
              xs.v[c][e + 1] = fma(a.y, weight, xs.v[c][e + 1]);
            }
          }
        }
        const float inv_total = recip(total);  // of 1 or more: the largest score's weight is 1
        UNROLL for (uint c = 0; c < 8; ++c) {
          UNROLL for (uint e = 0; e < 4; ++e)
            xs.v[c][e] *= inv_total * sigmoid(gate[c][e]);
        }
        prepare<BITS>(xs);
        add_rows(rows, xs, p.w.scale_f16, acc + n0);
      }
    }
  }
  const float v = sum8(acc, lane);
  if ((lane & 3) == 0) part[simd * LILY_OUT_ROWS + lane / 4] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0 && row < step->rows)
    add_outputs(part, OUT_SIMDS, x, ssq, (ulong)row * p.w.n, first, lane);
}
#define ATTN_OUT(op, name, BITS, c1, c2)                                                           \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(float, partial, 2), IN(act_t, proj, 3),  \
               OUT(act_t, x, 4), OUT(float, ssq, 5), PARAMS(AttnOut, 6), STEP_IN(7) IDS) {         \
    READ_IDS                                                                                         \
    SHARED(float, part, OUT_SIMDS * LILY_OUT_ROWS);                                                \
    attn_out_body<BITS>(codes, pairs, partial, proj, x, ssq, p, step, part, group, lane, simd);    \
  }
LILY_VARIANTS_attn_out(ATTN_OUT)

// ---- qkv_rope -----------------------------------------------------------------------------------
// A simdgroup a head of a row: query heads, then key heads, then value heads.
#define ROPE_SIMDS 4
static inline void qkv_rope_body(device const act_t* proj, device const float* q_gain,
                                 device const float* k_gain, device const float* inv_freq,
                                 device act_t* q, PARAM_REF(QkvRope) p, device const Step* step,
                                 uint3 group, uint lane, uint simd) {
  const uint row = group.x, position = p.position + row;
  uint head = group.y * ROPE_SIMDS + simd;
  device const act_t* from = proj + (ulong)row * p.proj_stride;
  float y[8];
  if (head < p.heads) {
    norm_rope(from + head * 2 * LILY_HEAD_DIM, q_gain, inv_freq, p.rotary, position, p.eps, lane,
              y);
    store8(q + ((ulong)row * p.heads + head) * LILY_HEAD_DIM + lane * 8, y);
    return;
  }
  head -= p.heads;
  if (head >= 2 * p.kv_heads) return;
  const bool value = head >= p.kv_heads;
  if (value) {
    load8(from + p.v_offset + (head - p.kv_heads) * LILY_HEAD_DIM + lane * 8, y);
  } else {
    norm_rope(from + p.k_offset + head * LILY_HEAD_DIM, k_gain, inv_freq, p.rotary, position, p.eps,
              lane, y);
  }
  // Value head h follows as "key head" kv_heads + h.
  device act_t* to = kv_keys(step, p.slot, position / LILY_KV_BLOCK, p.layer, p.kv_heads, head);
  store8(to + position % LILY_KV_BLOCK * LILY_HEAD_DIM + lane * 8, y);
}
#define QKV_ROPE(op, name, c0, c1, c2)                                                             \
  KERNEL(name)(IN(act_t, proj, 0), IN(float, q_gain, 1), IN(float, k_gain, 2),                     \
               IN(float, inv_freq, 3), OUT(act_t, q, 4), PARAMS(QkvRope, 5), STEP_IN(6) IDS) {     \
    READ_IDS                                                                                       \
    qkv_rope_body(proj, q_gain, k_gain, inv_freq, q, p, step, group, lane, simd);                  \
  }
LILY_VARIANTS_qkv_rope(QKV_ROPE)

// ---- flash --------------------------------------------------------------------------------------
// A threadgroup of 4 simdgroups: M rows, each a (query, head) pair of one KV head, over all keys
// they see, 32 at a time. Scores are Tiles of 16 rows a simdgroup; through shared memory each row's
// softmax is taken by 128 / M threads; the output is a Tile of a quarter of each piece's columns.
// Keys and values pass through shared memory in pieces of the head, so that 32 KB serve both
// modes: M = 32, pieces of 128 in bf16; M = 16, pieces of 64 in fp32.
#define FLASH_SIMDS 4
#define FLASH_KEYS 32
#define FLASH_M (64 / (uint)sizeof(act_t))
#define FLASH_PIECE (256 / (uint)sizeof(act_t))
#define FLASH_PIECES (LILY_HEAD_DIM / FLASH_PIECE)
#define FLASH_PAD (16 / (uint)sizeof(act_t))  // 16 bytes: rows fall on different banks
#define FLASH_LDQ (LILY_HEAD_DIM + FLASH_PAD)
#define FLASH_LDK (FLASH_PIECE + FLASH_PAD)
#define FLASH_LDS (FLASH_KEYS + 1)
#define FLASH_LDP (FLASH_KEYS + FLASH_PAD)
#define FLASH_SHARE (FLASH_SIMDS * 32 / FLASH_M)  // threads of a row in the softmax
#define FLASH_COLS (FLASH_PIECE / FLASH_SIMDS)
// Of the scores a simdgroup has 16 rows and so many keys.
#define FLASH_SCORE_ROWS (FLASH_M / 16)
#define FLASH_SCORE_KEYS (FLASH_KEYS * FLASH_SCORE_ROWS / FLASH_SIMDS)

// A piece of 32 rows of K or V on its way to threadgroup memory. Rows past the last key become 0: P is 0
// there, but 0 times what unused memory holds need not be 0.
#define FLASH_VECTORS (FLASH_KEYS * 16 / (FLASH_SIMDS * 32))
struct FlashPiece {
  uint4 v[FLASH_VECTORS];
};
static inline device const act_t* flash_keys(device const Step* step, PARAM_REF(Flash) p,
                                             uint kv_head, uint key0) {
  return kv_keys(step, p.slot, key0 / LILY_KV_BLOCK, p.layer, p.kv_heads, kv_head) +
         key0 % LILY_KV_BLOCK * LILY_HEAD_DIM;
}
// Piece c of `rows` keys or values.
static inline void flash_load(thread FlashPiece& piece, device const act_t* from, uint c, uint rows,
                              uint tid) {
  UNROLL for (uint i = 0; i < FLASH_VECTORS; ++i) {
    const uint at = i * FLASH_SIMDS * 32 + tid, key = at / 16;
    piece.v[i] = uint4(0);
    if (key < rows) {
      piece.v[i] = *(device const uint4*)(from + key * LILY_HEAD_DIM + c * FLASH_PIECE +
                                          at % 16 * FLASH_PAD);
    }
  }
}
static inline void flash_put(thread const FlashPiece& piece, threadgroup act_t* to, uint tid) {
  UNROLL for (uint i = 0; i < FLASH_VECTORS; ++i) {
    const uint at = i * FLASH_SIMDS * 32 + tid;
    *(threadgroup uint4*)(to + at / 16 * FLASH_LDK + at % 16 * FLASH_PAD) = piece.v[i];
  }
}
static inline void flash_body(device const act_t* q, device const act_t* proj, device act_t* y,
                              PARAM_REF(Flash) p, device const Step* step, threadgroup act_t* tq,
                              threadgroup act_t* tk, threadgroup act_t* tp, threadgroup float* ts,
                              threadgroup float* factors, uint3 group, uint tid, uint lane,
                              uint simd) {
  const uint kv_head = group.x, ratio = p.heads / p.kv_heads, queries = FLASH_M / ratio;
  const uint q0 = group.y * queries, used = min(queries, p.rows - q0) * ratio;  // rows that exist
  const uint last = p.position + min(q0 + queries, p.rows) - 1;                 // last key seen
  for (uint i = tid; i < FLASH_M * LILY_HEAD_DIM / FLASH_PAD; i += FLASH_SIMDS * 32) {
    const uint at = i * FLASH_PAD, r = at / LILY_HEAD_DIM, c = at % LILY_HEAD_DIM;
    uint4 v = uint4(0);
    if (r < used) {
      const ulong head = (ulong)(q0 + r / ratio) * p.heads + kv_head * ratio + r % ratio;
      v = *(device const uint4*)(q + head * LILY_HEAD_DIM + c);
    }
    *(threadgroup uint4*)(tq + r * FLASH_LDQ + c) = v;
  }
  Tile<FLASH_M, FLASH_COLS> o[FLASH_PIECES];
  UNROLL for (uint c = 0; c < FLASH_PIECES; ++c)
    tile_zero(o[c]);
  const uint score_row = simd % FLASH_SCORE_ROWS * 16;
  const uint score_key = simd / FLASH_SCORE_ROWS * FLASH_SCORE_KEYS;
  // This thread's row in the softmax, the last key it sees, running maximum and sum.
  const uint row = tid / FLASH_SHARE, share = tid % FLASH_SHARE;
  const uint row_last = min(p.position + q0 + row / ratio, last);
  float top = -INFINITY, total = 0.0f;
  // The next piece is on its way from memory while one is multiplied.
  device const act_t* keys = flash_keys(step, p, kv_head, 0);
  FlashPiece next;
  flash_load(next, keys, 0, last + 1, tid);
  for (uint key0 = 0; key0 <= last; key0 += FLASH_KEYS) {
    device const act_t* values = keys + p.kv_heads * KV_HEAD;
    const uint valid = last - key0 + 1;
    Tile<16, FLASH_SCORE_KEYS> s;
    tile_zero(s);
    for (uint c = 0; c < FLASH_PIECES; ++c) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      flash_put(next, tk, tid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (c + 1 < FLASH_PIECES) flash_load(next, keys, c + 1, valid, tid);
      else flash_load(next, values, 0, valid, tid);
      tile_mma(s, tq + score_row * FLASH_LDQ + c * FLASH_PIECE, FLASH_LDQ,
               tk + score_key * FLASH_LDK, FLASH_LDK, FLASH_PIECE);
    }
    tile_store(s, ts + score_row * FLASH_LDS + score_key, FLASH_LDS, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    flash_put(next, tk, tid);
    flash_load(next, values, 1, valid, tid);
    {
      float e[FLASH_KEYS / FLASH_SHARE], m = top, sum = 0.0f;
      UNROLL for (uint i = 0; i < FLASH_KEYS / FLASH_SHARE; ++i) {
        const uint key = i * FLASH_SHARE + share;
        e[i] = key0 + key <= row_last ? ts[row * FLASH_LDS + key] * p.scale : -INFINITY;
        m = max(m, e[i]);
      }
      UNROLL for (ushort w = 1; w < FLASH_SHARE; w <<= 1)
        m = max(m, simd_shuffle_xor(m, w));
      UNROLL for (uint i = 0; i < FLASH_KEYS / FLASH_SHARE; ++i) {
        // P is rounded to act for the product with V; the sum takes what was rounded, so that the
        // weights still add up to 1. Key 0 is seen by every row, so m is finite.
        e[i] = round_act(exp_(e[i] - m));
        tp[row * FLASH_LDP + i * FLASH_SHARE + share] = to_act(e[i]);
        sum += e[i];
      }
      UNROLL for (ushort w = 1; w < FLASH_SHARE; w <<= 1)
        sum += simd_shuffle_xor(sum, w);
      const float factor = exp_(top - m);
      total = fma(total, factor, sum);
      top = m;
      if (share == 0) factors[row] = factor;
    }
    UNROLL for (uint c = 0; c < FLASH_PIECES; ++c) {
      if (c > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        flash_put(next, tk, tid);
        if (c + 1 < FLASH_PIECES) {
          flash_load(next, values, c + 1, valid, tid);
        } else if (valid > FLASH_KEYS) {
          keys = flash_keys(step, p, kv_head, key0 + FLASH_KEYS);
          flash_load(next, keys, 0, valid - FLASH_KEYS, tid);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float f[Tile<FLASH_M, FLASH_COLS>::kSlots];
      UNROLL for (uint i = 0; i < Tile<FLASH_M, FLASH_COLS>::kSize; ++i) {
        f[tile_slot<FLASH_M, FLASH_COLS>(i)] = factors[tile_row<FLASH_M, FLASH_COLS>(i, lane)];
      }
      tile_scale_rows(o[c], f);
      tile_mma_nn(o[c], tp, FLASH_LDP, tk + simd * FLASH_COLS, FLASH_LDK, FLASH_KEYS);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (share == 0) factors[row] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint c = 0; c < FLASH_PIECES; ++c) {
    UNROLL for (uint i = 0; i < Tile<FLASH_M, FLASH_COLS>::kSize; ++i) {
      const uint r = tile_row<FLASH_M, FLASH_COLS>(i, lane);
      const uint d = c * FLASH_PIECE + simd * FLASH_COLS + tile_col<FLASH_M, FLASH_COLS>(i, lane);
      if (r < used) {
        const ulong at = q0 + r / ratio;
        const uint head = kv_head * ratio + r % ratio;
        const float gate = to_float(proj[at * p.proj_stride + (2 * head + 1) * LILY_HEAD_DIM + d]);
        const float v = o[c].v[i] / factors[r] * sigmoid(gate);
        y[(at * p.heads + head) * LILY_HEAD_DIM + d] = to_act(v);
      }
    }
  }
}
#define FLASH(op, name, c0, c1, c2)                                                                \
  KERNEL(name)(IN(act_t, q, 0), IN(act_t, proj, 1), OUT(act_t, y, 2), PARAMS(Flash, 3),            \
               STEP_IN(4) IDS) {                                                                   \
    READ_IDS                                                                                       \
    SHARED(uint4, tq, FLASH_M * FLASH_LDQ / FLASH_PAD);                                            \
    SHARED(uint4, tk, FLASH_KEYS * FLASH_LDK / FLASH_PAD);                                         \
    SHARED(uint4, tp, FLASH_M * FLASH_LDP / FLASH_PAD);                                            \
    SHARED(float, ts, FLASH_M * FLASH_LDS);                                                        \
    SHARED(float, factors, FLASH_M);                                                               \
    flash_body(q, proj, y, p, step, (threadgroup act_t*)tq, (threadgroup act_t*)tk,                \
               (threadgroup act_t*)tp, ts, factors, group, tid, lane, simd);                       \
  }
LILY_VARIANTS_flash(FLASH)
