// linear.metal: dense projections: project (decode, norm folded in), matmul and expert_matmul
// (prefill).
#include "matvec.h"
#include "tile.h"

// ---- project ------------------------------------------------------------------------------------
// A group: ROWS input rows, 16 weight rows by turns, 4 of each turn a simdgroup. k goes in sweeps of
// CHUNKS * 1024 values, whose x all simdgroups share; a lane takes 32 values of a chunk and has the
// codes of a sweep under way while x is unpacked. Sums run chunk after chunk, whatever ROWS is.
#define PROJECT_SIMDS 4
#define PROJECT_N 4
#define PROJECT_TURN (PROJECT_SIMDS * PROJECT_N)
template <uint BITS, uint ROWS>
static inline constexpr uint project_chunks() {  // as registers and threadgroup memory allow
  return ROWS == 1 && BITS != 16 ? 2 : 1;
}
template <uint BITS, uint ROWS>
static inline void project_body(device const uint* codes, device const uint* pairs,
                                device const act_t* x, device const float* gain,
                                device const float* ssq, device uchar* y, PARAM_REF(Project) p,
                                device const Step* step, threadgroup SharedX* xs,
                                threadgroup float* inv, uint3 group, uint tid, uint lane,
                                uint simd) {
  constexpr uint CHUNKS = project_chunks<BITS, ROWS>(), SWEEP = CHUNKS * 1024;
  const Linear m = linear_of(p.w);
  const uint k = m.k, r0 = group.y * ROWS, base = group.x * LILY_PROJECT_ROWS(m.n);
  // Row 0 is always there: its weights' loads wait for nothing.
  if (r0 > 0 && r0 >= step->rows) return;
  const uint end = min(base + LILY_PROJECT_ROWS(p.w.n), p.w.n);
  const uint rows = min(p.rows, step->rows);
  for (uint n0 = base; n0 < end; n0 += PROJECT_TURN) {
    const uint first = n0 + simd * PROJECT_N;
    float acc[ROWS * PROJECT_N];
    UNROLL for (uint i = 0; i < ROWS * PROJECT_N; ++i)
      acc[i] = 0.0f;
    for (uint k0 = 0; k0 < k; k0 += SWEEP) {
      RowCodes<BITS, PROJECT_N> w[CHUNKS];
      UNROLL for (uint c = 0; c < CHUNKS; ++c) {
        const uint at = k0 + c * 1024 + lane * 32;
        UNROLL for (uint j = 0; j < PROJECT_N; ++j) {
          // Of a matrix whose n is no multiple of 16, the last row is computed again, not stored.
          if (at < k) load_row(codes, pairs, m, min(first + j, m.n - 1), at, j, w[c]);
        }
      }
      // One sweep covers k of the models at hand: x is unpacked for the first turn only.
      if (k > SWEEP || n0 == base) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (uint r = 0; r < ROWS; ++r) {
          // The last valid row again where there is no further one.
          const ulong row = r == 0 ? r0 : min(r0 + r, max(rows, 1u) - 1);
          fill_x<BITS>(x + row * k + k0, gain + k0, k - k0, CHUNKS, xs + r * CHUNKS, tid,
                       PROJECT_SIMDS * 32);
        }
        if (k0 == 0 && n0 == base && simd < ROWS) {
          const ulong row = simd == 0 ? r0 : min(r0 + simd, max(rows, 1u) - 1);
          const float sum = sum_parts(ssq + row * p.ssq_parts, p.ssq_parts, lane);
          if (lane == 0) inv[simd] = inv_sqrt(sum / float(k) + p.eps);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      UNROLL for (uint c = 0; c < CHUNKS; ++c) {
        if (k0 + c * 1024 + lane * 32 < k) {
          add_chunk<BITS, ROWS>(w[c], xs + c, CHUNKS, p.w.scale_f16, lane, acc);
        }
      }
    }
    UNROLL for (uint r = 0; r < ROWS; ++r) {
      const float v = sum4(acc + r * PROJECT_N, lane) * inv[r];
      const uint n = first + lane / 4;
      if ((lane & 19) == 0 && n < p.w.n && r0 + r < rows) {
        const ulong at = (ulong)(r0 + r) * p.y_stride + p.y_offset + n;
        if (p.out_f32) ((device float*)y)[at] = v;
        else ((device act_t*)y)[at] = to_act(v);
      }
    }
  }
}
#define PROJECT(op, name, BITS, ROWS, c2)                                                         \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(act_t, x, 2), IN(float, gain, 3),       \
               IN(float, ssq, 4), OUT(uchar, y, 5), PARAMS(Project, 6), STEP_IN(7) IDS) {         \
    READ_IDS                                                                                      \
    SHARED(SharedX, xs, ROWS * (project_chunks<BITS, ROWS>()));                                   \
    SHARED(float, inv, ROWS);                                                                     \
    project_body<BITS, ROWS>(codes, pairs, x, gain, ssq, y, p, step, xs, inv, group, tid, lane,   \
                             simd);                                                               \
  }
LILY_VARIANTS_project(PROJECT)

// ---- matrix tiles -------------------------------------------------------------------------------
// 64 rows of h times 128 rows of W: 8 simdgroups, each 32 x 32; of up to 32 rows each 16 x 32, of up to 16
// each 16 x 16, so that all have work. Integer codes are exact in bf16; what
// lies in one group is multiplied alone, then scaled and shifted in fp32: y += s (q.h) + b sum(h). The
// next step of k is on its way from memory while one is multiplied.
#define MATMUL_M 64
#define MATMUL_N 128
#define MATMUL_SIMDS 8
#ifdef LILY_EXACT
#define MATMUL_K 32  // of k a step: what threadgroup memory holds
#else
#define MATMUL_K 64
#endif
#define MATMUL_HALF (MATMUL_K / 2)          // of a row of W: a thread's share
#define MATMUL_PARTS (MATMUL_K / 32)        // groups of a step, at most
#define MATMUL_VALUES (16 / sizeof(act_t))  // of 16 bytes of h; 8 neighbours load 128 of a row
#define MATMUL_LD (MATMUL_K + MATMUL_VALUES)  // padded by 16 bytes, so that rows fall on different banks
#define MATMUL_ROWS 2                       // of h a thread loads of, 32 apart
#define MATMUL_QUAD 4                       // groups whose scales are loaded at once
#define MATMUL_QUAD_LD (MATMUL_N + 4)
#define MATMUL_STAGED 64                    // columns of the result that lie in threadgroup memory
#define MATMUL_STAGE (MATMUL_STAGED + 8)    // a row of them
#define MATMUL_POOL ((MATMUL_M + MATMUL_N) * MATMUL_LD * sizeof(act_t) / 16)  // uint4: operands, result
static_assert(MATMUL_M * MATMUL_STAGE * 4 <= MATMUL_POOL * 16, "the result fits");

// Whether W goes through tile_mma_codes.
template <uint BITS>
static inline constexpr bool is_coded() {
  return BITS == 4 && sizeof(act_t) == 2;
}
static inline float vector_sum(uint4 v) {
  float sum = 0.0f;
  UNROLL for (uint c = 0; c < 4; ++c) {
#ifdef LILY_EXACT
    sum += as_type<float>(v[c]);
#else
    sum += bf16_bits_to_float(v[c] & 0xffffu);
    sum += as_type<float>(v[c] & 0xffff0000u);
#endif
  }
  return sum;
}
// Code j of a word as a number.
template <uint BITS>
static inline float code_value(uint w, uint j) {
  const uint code = (w >> (BITS * j)) & ((1u << BITS) - 1u);
  return BITS == 16 ? bf16_bits_to_float(code) : float(code);
}
template <uint BITS>
static inline void load_share_codes(device const uint* at,
                                    thread uint (&w)[BITS * MATMUL_HALF / 32]) {
  if (BITS * MATMUL_HALF / 32 == 2) {
    const uint2 v = *(device const uint2*)at;
    w[0] = v.x;
    w[1] = v.y;
  } else {
    UNROLL for (uint i = 0; i < BITS * MATMUL_HALF / 128; ++i) {
      const uint4 v = load_along((device const uint4*)at + i);
      UNROLL for (uint c = 0; c < 4; ++c)
        w[(4 * i + c) % (BITS * MATMUL_HALF / 32)] = v[c];
    }
  }
}
template <uint WORDS>
static inline uint4 share_codes(thread const uint (&w)[WORDS]) {
  return uint4(w[0], w[1], w[2 % WORDS], w[3 % WORDS]);
}
template <uint BITS>
static inline void store_share_codes(threadgroup act_t* to,
                                     thread const uint (&w)[BITS * MATMUL_HALF / 32]) {
  UNROLL for (uint i = 0; i < MATMUL_HALF * sizeof(act_t) / 16; ++i) {
    uint4 v;
    UNROLL for (uint c = 0; c < 4; ++c) {
#ifdef LILY_EXACT
      const uint at = 4 * i + c;
      v[c] = as_type<uint>(code_value<BITS>(w[at * BITS / 32], at % (32 / BITS)));
#else
      const uint at = 8 * i + 2 * c;
      v[c] = (as_type<uint>(code_value<BITS>(w[at * BITS / 32], at % (32 / BITS))) >> 16) |
             as_type<uint>(code_value<BITS>(w[(at + 1) * BITS / 32], (at + 1) % (32 / BITS)));
#endif
    }
    ((threadgroup uint4*)to)[i] = v;
  }
}

// acc += h W^T over K of k of one group, from k of the step on. sums, scales: of the simdgroup's rows of
// h and of W; row: where its columns begin in tb.
template <uint BITS, uint K, uint M, uint N>
static inline void add_group(thread Tile<M, N>& acc, threadgroup const act_t* ta,
                             threadgroup const uint4* tb, uint row, uint k,
                             threadgroup const float* sums, threadgroup const float2* scales,
                             uint lane) {
  Tile<M, N> part;
  tile_zero(part);
  if (is_coded<BITS>()) {
    tile_mma_codes<K>(part, (threadgroup const bfloat*)ta, MATMUL_LD,
                      (threadgroup const uint*)tb + row * CODE_ROW(MATMUL_K), CODE_ROW(MATMUL_K),
                      k);
  } else {
    tile_mma(part, ta + k, MATMUL_LD, (threadgroup const act_t*)tb + row * MATMUL_LD + k, MATMUL_LD,
             K);
  }
  UNROLL for (uint i = 0; i < Tile<M, N>::kSize; ++i) {
    const float2 sb = scales[tile_col<M, N>(i, lane)];
    acc.v[i] = fma(sb.x, part.v[i], fma(sb.y, sums[tile_row<M, N>(i, lane)], acc.v[i]));
  }
}

// The row of W a thread loads codes of: even ones before odd ones of 8, so that 8 threads that store 16
// bytes each fall on different banks.
static inline uint weight_row(uint tid) {
  return (tid / 16 * 8) | (tid / 2 & 3) * 2 | (tid / 8 & 1);
}
// Codes and scales of the step at k: of that row of the tile; of one group of rows tid / 4 and 64
// further. What lies past the last row of W stays as it is: its columns are not written.
template <uint BITS>
static inline void load_step(device const uint* codes, device const uint* pairs,
                             PARAM_REF(Linear) w, uint k, uint n0, uint w_at, uint pair_at,
                             thread uint (&next_w)[BITS * MATMUL_HALF / 32],
                             thread uint (&next_pair)[2], uint tid) {
  if (n0 + weight_row(tid) < w.n) load_share_codes<BITS>(codes + w_at + k / 32 * BITS, next_w);
  if (BITS == 16 || k % (MATMUL_QUAD << w.group_shift) != 0) return;
  const uint groups = w.k >> w.group_shift, first = k >> w.group_shift;
  UNROLL for (uint i = 0; i < 2; ++i) {
    if (n0 + tid / MATMUL_QUAD + 64 * i < w.n && first + tid % MATMUL_QUAD < groups)
      next_pair[i] = pairs[pair_at + 64 * i * groups + first];
  }
}

// Where a simdgroup's M x N part of the tile begins: two rows of four parts, or one row of eight.
template <uint M, uint N>
static inline uint part_row(uint simd) {
  return N == 32 ? (simd & 1) * M : 0;
}
template <uint N>
static inline uint part_column(uint simd) {
  return N == 32 ? simd / 2 * N : simd * N;
}
// acc = h W^T of the simdgroup's part of the tile. rows: the rows of h this thread loads of, numbers tid / 8
// and 32 further of the tile; rows from `count` on, as many as the parts have, are not there.
template <uint BITS, uint M, uint N>
static inline void matrix_tile(device const uint* codes, device const uint* pairs,
                               PARAM_REF(Linear) w, device const act_t* h,
                               thread const uint (&rows)[MATMUL_ROWS], uint count, uint n0,
                               threadgroup uint4* pool, threadgroup float* sums,
                               threadgroup float2* scales, thread Tile<M, N>& acc, uint tid,
                               uint lane, uint simd) {
  threadgroup act_t* ta = (threadgroup act_t*)pool;
  threadgroup uint4* tb = pool + MATMUL_M * MATMUL_LD * sizeof(act_t) / 16;
  const uint row = part_row<M, N>(simd), column = part_column<N>(simd);
  const uint h_row = tid / 8, h_k = tid % 8 * MATMUL_VALUES;
  const uint w_row = weight_row(tid), w_k = (tid & 1) * MATMUL_HALF;
  const uint pair_row = tid / MATMUL_QUAD, quad = tid % MATMUL_QUAD;
  // The halves of a step lie in one group, or each in its own.
  const bool two_groups = MATMUL_PARTS == 2 && w.group_shift == 5;
  // Places as 32-bit numbers, for registers' sake: of h in 16 bytes, of codes and pairs in words.
  device const uint4* h4 = (device const uint4*)h;
  const uint pair_at = (n0 + pair_row) * (w.k >> w.group_shift) + quad;
  const uint w_at = (n0 + w_row) * (w.k / 32 * BITS) + w_k * BITS / 32;
  uint h_at[MATMUL_ROWS];
  UNROLL for (uint i = 0; i < MATMUL_ROWS; ++i)
    h_at[i] = rows[i] * (w.k / MATMUL_VALUES) + tid % 8;

  uint4 next_h[MATMUL_ROWS];
  uint next_w[BITS * MATMUL_HALF / 32], next_pair[2] = {0, 0};
  UNROLL for (uint i = 0; i < MATMUL_ROWS; ++i) {
    next_h[i] = uint4(0u);
    if (h_row + 32 * i < count) next_h[i] = h4[h_at[i]];
    else *(threadgroup uint4*)(ta + (h_row + 32 * i) * MATMUL_LD + h_k) = next_h[i];
  }
  UNROLL for (uint i = 0; i < BITS * MATMUL_HALF / 32; ++i)
    next_w[i] = 0;
  load_step<BITS>(codes, pairs, w, 0, n0, w_at, pair_at, next_w, next_pair, tid);

  tile_zero(acc);
  for (uint k0 = 0; k0 < w.k; k0 += MATMUL_K) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float row_sums[MATMUL_ROWS];
    UNROLL for (uint i = 0; i < MATMUL_ROWS; ++i) {
      row_sums[i] = vector_sum(next_h[i]);
      if (h_row + 32 * i >= count) continue;
      threadgroup act_t* to = ta + (h_row + 32 * i) * MATMUL_LD;
      if (is_coded<BITS>()) tile_put_values((threadgroup bfloat*)to, h_k, next_h[i]);
      else *(threadgroup uint4*)(to + h_k) = next_h[i];
    }
    if (is_coded<BITS>()) {
      tile_put_codes((threadgroup uint*)tb + w_row * CODE_ROW(MATMUL_K), w_k, share_codes(next_w));
    } else {
      store_share_codes<BITS>((threadgroup act_t*)tb + w_row * MATMUL_LD + w_k, next_w);
    }
    if (BITS != 16) {
      // Over the 4 neighbours of a half of the step: even lanes get the first row's sum, odd ones the
      // second's.
      const bool odd = (lane & 1) != 0, upper = (lane & 4) != 0;
      float sum =
          (odd ? row_sums[1] : row_sums[0]) + simd_shuffle_xor(odd ? row_sums[0] : row_sums[1], 1);
      sum += simd_shuffle_xor(sum, 2);
      const float both = sum + simd_shuffle_xor(sum, 4);
      if ((lane & 2) == 0 && (two_groups || !upper)) {
        sums[(upper ? MATMUL_M : 0) + h_row + (odd ? 32 : 0)] = two_groups ? sum : both;
      }
    }
    if (BITS != 16 && k0 % (MATMUL_QUAD << w.group_shift) == 0) {
      UNROLL for (uint i = 0; i < 2; ++i) {
        float2 sb = scale_bias(next_pair[i], w.scale_f16);
        if (is_coded<BITS>()) sb.y = fma(-CODE_OFFSET, sb.x, sb.y);
        scales[quad * MATMUL_QUAD_LD + pair_row + 64 * i] = sb;
      }
    }
    const uint k1 = k0 + MATMUL_K;
    if (k1 < w.k) {
      UNROLL for (uint i = 0; i < MATMUL_ROWS; ++i) {
        if (h_row + 32 * i < count) next_h[i] = h4[h_at[i] + k1 / MATMUL_VALUES];
      }
      load_step<BITS>(codes, pairs, w, k1, n0, w_at, pair_at, next_w, next_pair, tid);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (row >= count) continue;  // the whole simdgroup
    threadgroup const act_t* a = ta + row * MATMUL_LD;
    if (BITS == 16) {
      tile_mma(acc, a, MATMUL_LD, (threadgroup const act_t*)tb + column * MATMUL_LD, MATMUL_LD,
               MATMUL_K);
      continue;
    }
    threadgroup const float2* group_scales =
        scales + (k0 >> w.group_shift) % MATMUL_QUAD * MATMUL_QUAD_LD + column;
    if (two_groups) {
      UNROLL for (uint g = 0; g < MATMUL_PARTS; ++g) {
        add_group<BITS, 32>(acc, a, tb, column, g * 32, sums + g * MATMUL_M + row,
                            group_scales + g * MATMUL_QUAD_LD, lane);
      }
    } else {
      add_group<BITS, MATMUL_K>(acc, a, tb, column, 0, sums + row, group_scales, lane);
    }
  }
}
// Leaves columns [first, first + 64) of the tile in the pool as float[64][MATMUL_STAGE].
template <uint M, uint N>
static inline void stage_tile(thread const Tile<M, N>& acc, uint count, uint first,
                              threadgroup uint4* pool, uint lane, uint simd) {
  const uint row = part_row<M, N>(simd), column = part_column<N>(simd);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row < count && column / MATMUL_STAGED * MATMUL_STAGED == first) {
    tile_store(acc, (threadgroup float*)pool + row * MATMUL_STAGE + column - first, MATMUL_STAGE,
               lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// One row of a finished tile to y[at ...], by one simdgroup.
static inline void write_row(threadgroup const float* row, device uchar* y, ulong at, uint mode,
                             uint n0, uint n, uint lane) {
  if (mode == kMatmulSwiglu) {  // n is even, so gate and up are both there
    if (n0 + 2 * lane < n) {
      ((device act_t*)y)[at + n0 / 2 + lane] = to_act(silu(row[2 * lane]) * row[2 * lane + 1]);
    }
    return;
  }
  UNROLL for (uint c = 0; c < MATMUL_STAGED; c += 32) {
    const uint col = c + lane;
    if (n0 + col < n) {
      const ulong i = at + n0 + col;
      if (mode == kMatmulF32) ((device float*)y)[i] = row[col];
      else if (mode == kMatmulAdd)
        ((device act_t*)y)[i] = to_act(to_float(((device act_t*)y)[i]) + row[col]);
      else ((device act_t*)y)[i] = to_act(row[col]);
    }
  }
}

// ---- matmul -------------------------------------------------------------------------------------
template <uint BITS, uint M, uint N>
static inline void matmul_tile(device const uint* codes, device const uint* pairs,
                               device const act_t* h, device uchar* y, PARAM_REF(Matmul) p, uint m0,
                               uint n0, uint count, threadgroup uint4* pool,
                               threadgroup float* sums, threadgroup float2* scales, uint tid,
                               uint lane, uint simd) {
  uint rows[MATMUL_ROWS];
  UNROLL for (uint i = 0; i < MATMUL_ROWS; ++i)
    rows[i] = m0 + tid / 8 + 32 * i;
  Tile<M, N> acc;
  matrix_tile<BITS>(codes, pairs, p.w, h, rows, count, n0, pool, sums, scales, acc, tid, lane,
                    simd);
  for (uint c = 0; c < MATMUL_N && n0 + c < p.w.n; c += MATMUL_STAGED) {
    stage_tile(acc, count, c, pool, lane, simd);
    for (uint r = simd; r < count; r += MATMUL_SIMDS) {
      write_row((threadgroup const float*)pool + r * MATMUL_STAGE, y,
                (ulong)(m0 + r) * p.y_stride + p.y_offset, p.mode, n0 + c, p.w.n, lane);
    }
  }
}
template <uint BITS>
static inline void matmul_body(device const uint* codes, device const uint* pairs,
                               device const act_t* h, device uchar* y, PARAM_REF(Matmul) p,
                               threadgroup uint4* pool, threadgroup float* sums,
                               threadgroup float2* scales, uint3 group, uint tid, uint lane,
                               uint simd) {
  const uint tile = LILY_MATMUL_ROWS(p.w.n, p.rows);
  const uint n0 = group.x * MATMUL_N, m0 = group.y * tile, count = min(p.rows - m0, tile);
  if (count <= 16) {
    matmul_tile<BITS, 16, 16>(codes, pairs, h, y, p, m0, n0, count, pool, sums, scales, tid, lane,
                              simd);
  } else if (count <= 32) {
    matmul_tile<BITS, 16, 32>(codes, pairs, h, y, p, m0, n0, count, pool, sums, scales, tid, lane,
                              simd);
  } else {
    matmul_tile<BITS, 32, 32>(codes, pairs, h, y, p, m0, n0, count, pool, sums, scales, tid, lane,
                              simd);
  }
}
#define MATMUL(op, name, BITS, c1, c2)                                                            \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(act_t, h, 2), OUT(uchar, y, 3),         \
               PARAMS(Matmul, 4) IDS) {                                                           \
    READ_IDS                                                                                      \
    SHARED(uint4, pool, MATMUL_POOL);                                                             \
    SHARED(float, sums, MATMUL_PARTS * MATMUL_M);                                                 \
    SHARED(float2, scales, MATMUL_QUAD * MATMUL_QUAD_LD);                                         \
    matmul_body<BITS>(codes, pairs, h, y, p, pool, sums, scales, group, tid, lane, simd);         \
  }
LILY_VARIANTS_matmul(MATMUL)

// ---- expert_matmul ------------------------------------------------------------------------------
// One tile of the list a threadgroup: up to p.tile neighbours in `order` that chose one expert. The shared
// expert's tiles are the last ones.
struct ExpertTile {
  uint first, count;  // in order
  uint minus, share;  // pair i has row (i - minus) / share of h
};
template <uint BITS, uint M, uint N>
static inline void expert_tile(device const uint* codes, device const uint* pairs,
                               device const act_t* h, device const uint* order, device uchar* y,
                               PARAM_REF(ExpertMatmul) p, ExpertTile t, uint n0,
                               threadgroup uint4* pool, threadgroup float* sums,
                               threadgroup float2* scales, uint tid, uint lane, uint simd) {
  uint rows[MATMUL_ROWS];
  UNROLL for (uint i = 0; i < MATMUL_ROWS; ++i) {
    rows[i] = (order[t.first + min(tid / 8 + 32 * i, t.count - 1)] - t.minus) / t.share;
  }
  Tile<M, N> acc;
  matrix_tile<BITS>(codes, pairs, p.w, h, rows, t.count, n0, pool, sums, scales, acc, tid, lane,
                    simd);
  const uint mode = p.swiglu ? kMatmulSwiglu : kMatmulAct;
  const ulong columns = p.swiglu ? p.w.n / 2 : p.w.n;
  for (uint c = 0; c < MATMUL_N && n0 + c < p.w.n; c += MATMUL_STAGED) {
    stage_tile(acc, t.count, c, pool, lane, simd);
    for (uint i = simd; i < t.count; i += MATMUL_SIMDS) {
      write_row((threadgroup const float*)pool + i * MATMUL_STAGE, y, order[t.first + i] * columns,
                mode, n0 + c, p.w.n, lane);
    }
  }
}
template <uint BITS>
static inline void expert_matmul_body(device const uint* codes, device const uint* pairs,
                                      device const uint* shared_codes,
                                      device const uint* shared_pairs, device const act_t* h,
                                      device const uint* order, device const uint* offsets,
                                      device const uint* tiles, device uchar* y,
                                      PARAM_REF(ExpertMatmul) p, threadgroup uint4* pool,
                                      threadgroup float* sums, threadgroup float2* scales,
                                      uint3 group, uint tid, uint lane, uint simd) {
  if (group.y >= tiles[0]) return;  // the grid covers the longest list; the whole group leaves
  const uint expert = tiles[1 + 2 * group.y], n0 = group.x * MATMUL_N;
  const bool shared = expert == p.experts;
  if (shared && !p.shared) return;
  ExpertTile t;
  t.first = tiles[2 + 2 * group.y];
  t.count = min(offsets[expert + 1] - t.first, p.tile);
  t.minus = p.swiglu && shared ? p.rows * p.top_k : 0;
  t.share = p.swiglu && !shared ? p.top_k : 1;
  const ulong before = shared ? (ulong)0 : (ulong)expert * p.w.n;  // rows of the experts before
  codes = (shared ? shared_codes : codes) + before * row_bytes(p.w.k, BITS) / 4;
  pairs = shared ? shared_pairs : pairs;
  if (BITS != 16) pairs += before * (p.w.k >> p.w.group_shift);
  if (t.count <= 16) {
    expert_tile<BITS, 16, 16>(codes, pairs, h, order, y, p, t, n0, pool, sums, scales, tid, lane,
                              simd);
  } else if (t.count <= 32) {
    expert_tile<BITS, 16, 32>(codes, pairs, h, order, y, p, t, n0, pool, sums, scales, tid, lane,
                              simd);
  } else {
    expert_tile<BITS, 32, 32>(codes, pairs, h, order, y, p, t, n0, pool, sums, scales, tid, lane,
                              simd);
  }
}
#define EXPERT_MATMUL(op, name, BITS, c1, c2)                                                     \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(uint, shared_codes, 2),                 \
               IN(uint, shared_pairs, 3), IN(act_t, h, 4), IN(uint, order, 5),                    \
               IN(uint, offsets, 6), IN(uint, tiles, 7), OUT(uchar, y, 8),                        \
               PARAMS(ExpertMatmul, 9) IDS) {                                                     \
    READ_IDS                                                                                      \
    SHARED(uint4, pool, MATMUL_POOL);                                                             \
    SHARED(float, sums, MATMUL_PARTS * MATMUL_M);                                                 \
    SHARED(float2, scales, MATMUL_QUAD * MATMUL_QUAD_LD);                                         \
    expert_matmul_body<BITS>(codes, pairs, shared_codes, shared_pairs, h, order, offsets, tiles,  \
                             y, p, pool, sums, scales, group, tid, lane, simd);                   \
  }
LILY_VARIANTS_expert_matmul(EXPERT_MATMUL)
