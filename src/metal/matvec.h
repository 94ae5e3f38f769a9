// matvec.h: a few rows of x times rows of quantised weights, as decoding needs it: codes taken where
// they lie in their words, x in registers or shared in threadgroup memory, sums over the simdgroup.
#ifndef LILY_MATVEC_H
#define LILY_MATVEC_H

#include "util.h"

// ---- codes and x in a lane's registers: 32 values of k of several rows ----------------------------
// Code j of a word where it lies, so times 2^code_shift: or-ed into the mantissa of 2^23, which is
// then subtracted. Exact, at most 20 bits; one shift a word at most and no conversion.
template <uint BITS>
static inline constexpr uint code_shift(uint j) {
  return BITS == 4 ? 4 * (j < 5 ? j : j - 5) : BITS == 8 ? 8 * (j & 1) : 0;
}
template <uint BITS>
static inline float code_in_place(uint w, uint j) {
  if (BITS == 16) return as_type<float>(j == 0 ? w << 16 : w & 0xffff0000u);
  const uint from = BITS == 4 ? (j < 5 ? w : w >> 20) : (j < 2 ? w : w >> 16);
  const uint mask = ((1u << (BITS & 15)) - 1u) << code_shift<BITS>(j);
  return as_type<float>(and_or(from, mask, 0x4b000000u)) - 8388608.0f;
}
// 2^-code_shift: x times it times the code in place is x times the code, exactly.
template <uint BITS>
static inline float code_unscale(uint j) {
  return as_type<float>((127u - code_shift<BITS>(j)) << 23);
}
// A lane's 32 values of x: fill v, then prepare: their sum, and each scaled for the code it meets.
struct LaneX {
  float4 v[8];
  float sum;
};
template <uint BITS>
static inline void prepare(thread LaneX& x) {
  float4 sum = x.v[0];
  UNROLL for (uint c = 1; c < 8; ++c)
    sum += x.v[c];
  x.sum = (sum.x + sum.y) + (sum.z + sum.w);
  UNROLL for (uint c = 0; c < 8; ++c) {
    UNROLL for (uint e = 0; e < 4; ++e)
      x.v[c][e] *= code_unscale<BITS>((4 * c + e) % (32 / BITS));
  }
}
// The codes of N rows over the lane's 32 values, with the pair of their group.
template <uint BITS, uint N>
struct RowCodes {
  uint w[N][BITS];
  uint pair[N];
};
// Offsets inside one matrix fit 32 bits (checked by the plans), which spares registers.
template <uint BITS, uint N>
static inline void load_row(device const uint* codes, device const uint* pairs,
                            thread const Linear& w, uint row, uint k0, uint j,
                            thread RowCodes<BITS, N>& to) {
  device const uint4* at = (device const uint4*)codes + (row * (w.k / 32) + k0 / 32) * (BITS / 4);
  UNROLL for (uint i = 0; i < BITS / 4; ++i) {
    const uint4 v = at[i];
    UNROLL for (uint c = 0; c < 4; ++c)
      to.w[j][4 * i + c] = v[c];
  }
  to.pair[j] = BITS == 16 ? 0 : pairs[row * (w.k >> w.group_shift) + (k0 >> w.group_shift)];
}
// acc[j] += row j . x over the lane's values: s * sum(q x) + b * sum(x). The order of sums depends
// on nothing but k.
template <uint BITS, uint N>
static inline void add_rows(thread const RowCodes<BITS, N>& rows, thread const LaneX& x,
                            uint scale_f16, thread float* acc) {
  UNROLL for (uint j = 0; j < N; ++j) {
    float d = 0.0f;
    UNROLL for (uint i = 0; i < 32; ++i) {
      d = fma(code_in_place<BITS>(rows.w[j][i * BITS / 32], i % (32 / BITS)), x.v[i / 4][i % 4], d);
    }
    const float2 sb = scale_bias(rows.pair[j], scale_f16);
    acc[j] += BITS == 16 ? d : fma(sb.x, d, sb.y * x.sum);
  }
}
// Rows a lane takes at once: as many loads in flight as registers allow.
template <uint BITS>
static inline constexpr uint rows_at_once() {
  return BITS == 4 ? 8 : BITS == 8 ? 4 : 2;
}

// ---- sums over the simdgroup --------------------------------------------------------------------
// Half of a lane's 2 N values go to the lane 4 N away, which sends those of the other half.
template <uint N>
static inline void exchange(thread float* s, uint lane) {
  const bool upper = (lane & (4 * N)) != 0;
  UNROLL for (uint i = 0; i < N; ++i) {
    const float mine = upper ? s[i + N] : s[i], sent = upper ? s[i] : s[i + N];
    s[i] = mine + simd_shuffle_xor(sent, (ushort)(4 * N));
  }
}
// Sums of 8 values over the simdgroup: lane gets that of value lane / 4. Each sum runs over the
// same pairs of lanes, so a value's bits do not depend on its place.
static inline float sum8(thread float* s, uint lane) {
  exchange<4>(s, lane);
  exchange<2>(s, lane);
  exchange<1>(s, lane);
  s[0] += simd_shuffle_xor(s[0], 2);
  return s[0] + simd_shuffle_xor(s[0], 1);
}

// The same of 4 values: lane gets that of value lane / 4 % 4.
static inline float sum4(thread float* s, uint lane) {
  exchange<2>(s, lane);
  exchange<1>(s, lane);
  s[0] += simd_shuffle_xor(s[0], 16);
  s[0] += simd_shuffle_xor(s[0], 2);
  return s[0] + simd_shuffle_xor(s[0], 1);
}

// ---- x in threadgroup memory --------------------------------------------------------------------
// x * gain of 1024 values in threadgroup memory, as the lanes of a matvec read them: value i, scaled
// for the code it meets, in v[i % 32 / 4][i / 32]; the sum of each lane's 32 values beside it.
struct SharedX {
  float4 v[8 * 32];
  float sum[32];
};
// Threads 0 .. threads - 1, a multiple of 32, fill `chunks` of them from x[0 .. count); count is a
// multiple of 64. What lies beyond is not written.
template <uint BITS>
static inline void fill_x(device const act_t* x, device const float* gain, uint count, uint chunks,
                          threadgroup SharedX* to, uint t, uint threads) {
  for (uint f0 = 0; f0 < chunks * 256 && f0 * 4 < count; f0 += threads) {
    const uint f = f0 + t, lane = f / 8 % 32, c = f % 8;
    const bool valid = f < chunks * 256 && f * 4 < count;
    float4 v = float4(0.0f);
    if (valid) v = load4(x + 4 * f) * *(device const float4*)(gain + 4 * f);
    float sum = (v.x + v.y) + (v.z + v.w);
    UNROLL for (ushort o = 1; o < 8; o <<= 1)
      sum += simd_shuffle_xor(sum, o);
    if (valid) {
      UNROLL for (uint e = 0; e < 4; ++e)
        v[e] *= code_unscale<BITS>((4 * c + e) % (32 / BITS));
      to[f / 256].v[c * 32 + lane] = v;
      if (c == 0) to[f / 256].sum[lane] = sum;
    }
  }
}

// acc[r * N + j] += weight row j . x row r over one chunk. Codes outside, rows inside: a code is unpacked
// once for all rows.
template <uint BITS, uint ROWS, uint N>
static inline void add_chunk(thread const RowCodes<BITS, N>& w, threadgroup const SharedX* xs,
                             uint x_stride, uint scale_f16, uint lane, thread float* acc) {
  float d[ROWS][N];
  UNROLL for (uint r = 0; r < ROWS; ++r) {
    UNROLL for (uint j = 0; j < N; ++j)
      d[r][j] = 0.0f;
  }
  UNROLL for (uint c = 0; c < 8; ++c) {
    float4 v[ROWS];
    UNROLL for (uint r = 0; r < ROWS; ++r)
      v[r] = xs[r * x_stride].v[c * 32 + lane];
    UNROLL for (uint j = 0; j < N; ++j) {
      UNROLL for (uint e = 0; e < 4; ++e) {
        const uint i = 4 * c + e;
        const float q = code_in_place<BITS>(w.w[j][i * BITS / 32], i % (32 / BITS));
        UNROLL for (uint r = 0; r < ROWS; ++r)
          d[r][j] = fma(q, v[r][e], d[r][j]);
      }
    }
  }
  UNROLL for (uint j = 0; j < N; ++j) {
    const float2 sb = scale_bias(w.pair[j], scale_f16);
    UNROLL for (uint r = 0; r < ROWS; ++r) {
      acc[r * N + j] +=
          BITS == 16 ? d[r][j] : fma(sb.x, d[r][j], sb.y * xs[r * x_stride].sum[lane]);
    }
  }
}

// x[first ...] += the sums of `parts` shares [parts][LILY_OUT_ROWS], in their order, and the outputs'
// sum of squares, by one simdgroup. row: where the row begins.
static inline void add_outputs(threadgroup const float* part, uint parts, device act_t* x,
                               device float* ssq, ulong row, uint first, uint lane) {
  float square = 0.0f;
  if (lane < LILY_OUT_ROWS) {
    float sum = 0.0f;
    for (uint s = 0; s < parts; ++s) sum += part[s * LILY_OUT_ROWS + lane];
    device act_t* at = x + row + first + lane;
    const float v = round_act(to_float(*at) + sum);
    *at = to_act(v);
    square = v * v;
  }
  const float total = simd_sum(square);
  if (lane == 0) ssq[(row + first) / LILY_OUT_ROWS] = total;
}

#endif  // LILY_MATVEC_H
