// util.h: what every kernel builds on: entry macros, activation type, loads and stores, rounding,
// transcendental functions, reductions, weight access. Identical results on every target.
#ifndef LILY_UTIL_H
#define LILY_UTIL_H

#define LILY_KERNEL_TEXT 1
#include <metal_stdlib>
using namespace metal;
#include "kernels.h"

// ---- kernel entry -----------------------------------------------------------------------------
// KERNEL(name)(IN(uint, codes, 0), OUT(float, y, 1), PARAMS(Project, 2), STEP_IN(3) IDS) { READ_IDS ... }
// Only Apple's compiler fills the attributed ids; elsewhere READ_IDS reads them.
#ifdef __METAL_VERSION__
#define KERNEL(name) kernel void name
#define IN(T, name, i) device const T* name [[buffer(i)]]
#define OUT(T, name, i) device T* name [[buffer(i)]]
#define PARAMS(T, i) constant T& p [[buffer(i)]]
#define STEP_IN(i) device const Step* step [[buffer(i)]]
#define STEP_OUT(i) device Step* step [[buffer(i)]]
#define IDS                                                                           \
  , uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]
#define READ_IDS (void)group, (void)tid, (void)lane, (void)simd;
#define SHARED(T, name, n) threadgroup T name[n]
#else
#ifdef LILY_EXACT
#define KERNEL(name) kernel void name##_f32
#else
#define KERNEL(name) kernel void name##_bf16
#endif
#define IN(T, name, i) device const T* name
#define OUT(T, name, i) device T* name
#ifdef __NVPTX__
#define PARAMS(T, i) const T p  // by value: kernel parameters live in PTX's own constant bank
#else
#define PARAMS(T, i) constant T& p
#endif
#define STEP_IN(i) device const Step* step
#define STEP_OUT(i) device Step* step
#define IDS
#define READ_IDS                                                        \
  const uint3 group = lily_group();                                           \
  const uint tid = lily_thread(), lane = lily_thread() & 31, simd = lily_thread() >> 5; \
  (void)group, (void)tid, (void)lane, (void)simd;
#ifdef __NVPTX__
#define SHARED(T, name, n) static threadgroup T name[n]
#else
#define SHARED(T, name, n)    \
  static const char name##_key[] = #name; \
  T* name = (T*)lily_sim_shared(name##_key, sizeof(T) * (n), alignof(T))
#endif
#endif

// A reference to params, or a part of them, as a function argument.
#ifdef __NVPTX__
#define PARAM_REF(T) const T&
#else
#define PARAM_REF(T) constant T&
#endif

#define UNROLL _Pragma("clang loop unroll(full)")

// ---- hints to the cache -----------------------------------------------------------------------
// Has the line of p on its way into the GPU's cache, where the target can be told so.
static inline void prefetch_line(device const uchar* p) {
#ifdef __NVPTX__
  asm volatile("prefetch.global.L2 [%0];" : : "l"(p));
#else
  (void)p;
#endif
}

// Loads of one step of a walk along a row, whose next steps are likely to lie in the same 256 bytes.
static inline uint4 load_along(device const uint4* p) {
#ifdef __NVPTX__
  uint4 v;
  asm volatile("ld.global.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else
  return *p;
#endif
}

// ---- activations ------------------------------------------------------------------------------
// bf16 in memory, float in registers. LILY_EXACT: fp32 throughout.
static inline float bf16_bits_to_float(uint bits) { return as_type<float>(bits << 16); }
// Round to nearest even; NaN stays NaN.
static inline uint float_to_bf16_bits(float f) {
  const uint u = as_type<uint>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u;
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
static inline float f16_bits_to_float(uint bits) { return float(as_type<half>((ushort)bits)); }

#ifdef LILY_EXACT
typedef float act_t;
static inline float to_float(act_t v) { return v; }
static inline act_t to_act(float v) { return v; }
static inline float4 load4(device const act_t* p) { return *(device const float4*)p; }
static inline void store4(device act_t* p, float4 v) { *(device float4*)p = v; }
#else
typedef bfloat act_t;
static inline float to_float(act_t v) { return bf16_bits_to_float(as_type<ushort>(v)); }
static inline act_t to_act(float v) { return as_type<bfloat>((ushort)float_to_bf16_bits(v)); }
static inline float4 load4(device const act_t* p) {
  const uint2 u = *(device const uint2*)p;
  return float4(bf16_bits_to_float(u.x & 0xffffu), as_type<float>(u.x & 0xffff0000u),
                bf16_bits_to_float(u.y & 0xffffu), as_type<float>(u.y & 0xffff0000u));
}
static inline void store4(device act_t* p, float4 v) {
  *(device uint2*)p = uint2(float_to_bf16_bits(v.x) | (float_to_bf16_bits(v.y) << 16),
                            float_to_bf16_bits(v.z) | (float_to_bf16_bits(v.w) << 16));
}
#endif
// The value a store would leave: what later readers see.
static inline float round_act(float v) { return to_float(to_act(v)); }

// (a & mask) | bits. CUDA has it as one instruction, which its assembler does not find by itself.
static inline uint and_or(uint a, uint mask, uint bits) {
#ifdef __NVPTX__
  uint r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "n"(mask), "r"(bits));
  return r;
#else
  return (a & mask) | bits;
#endif
}

// Unsigned integers in the order of the floats (-0 below 0, no NaN); 0 lies below all of them.
static inline uint order_key(float v) {
  const uint u = as_type<uint>(v);
  return u ^ ((u >> 31) ? 0xffffffffu : 0x80000000u);
}
static inline float key_value(uint key) {
  return as_type<float>(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}

// ---- transcendental functions -----------------------------------------------------------------
// 1 / sqrt(x) of a normal positive x: a guess from the halved exponent, three Newton steps (1.5 ulp).
// Unlike the exact sqrt and division it has no branches, which loads cannot be moved across.
static inline float inv_sqrt(float x) {
  const float half_x = 0.5f * x;
  float y = as_type<float>(0x5f3759dfu - (as_type<uint>(x) >> 1));
  UNROLL for (uint i = 0; i < 3; ++i)
    y = fma(y, fma(-half_x * y, y, 0.5f), y);
  return y;
}

// e^x: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor to r^7 (5e-9), scaled by two powers of two so that
// the ends of the range neither overflow early nor flush. NaN stays NaN, -inf gives 0.
static inline float exp_(float x) {
  if (x != x) return x;
  const float c = clamp(x, -104.0f, 89.0f);
  const float n = rint(c * 1.44269504f);
  float r = fma(n, -0.693145752f, c);
  r = fma(n, -1.42860677e-6f, r);
  float e = 1.0f / 5040.0f;
  e = fma(e, r, 1.0f / 720.0f);
  e = fma(e, r, 1.0f / 120.0f);
  e = fma(e, r, 1.0f / 24.0f);
  e = fma(e, r, 1.0f / 6.0f);
  e = fma(e, r, 0.5f);
  e = fma(e, r, 1.0f);
  e = fma(e, r, 1.0f);
  const int k = int(n), half_k = k / 2;
  return e * as_type<float>(uint(half_k + 127) << 23) *
         as_type<float>(uint(k - half_k + 127) << 23);
}

// 2 atanh(s) for small s: the odd series of the logarithm.
static inline float two_atanh(float s) {
  const float s2 = s * s;
  float t = fma(s2, 1.0f / 11.0f, 1.0f / 9.0f);
  t = fma(s2, t, 1.0f / 7.0f);
  t = fma(s2, t, 1.0f / 5.0f);
  t = fma(s2, t, 1.0f / 3.0f);
  return 2.0f * fma(s2 * t, s, s);
}
// Natural logarithm of a normal positive x; 0 gives -inf, negative NaN. x = m 2^e, m in [sqrt(1/2), sqrt 2).
static inline float log_(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -INFINITY : NAN;
  if (x == INFINITY) return x;
  const uint u = as_type<uint>(x) - 0x3f3504f3u;
  const float e = float(int(u) >> 23);
  const float m = as_type<float>((u & 0x007fffffu) + 0x3f3504f3u);
  const float l = two_atanh((m - 1.0f) / (m + 1.0f));
  return fma(e, 0.693145752f, fma(e, 1.42860677e-6f, l));
}
// 1 / y of a normal positive y below 2^126: a guess from the negated exponent, three Newton steps.
static inline float recip(float y) {
  float r = as_type<float>(0x7ef311c7u - as_type<uint>(y));
  UNROLL for (uint i = 0; i < 3; ++i)
    r = fma(r, fma(-y, r, 1.0f), r);
  return r;
}
// Below -80 the sigmoid is under 2e-35, to fp32 no different beside 1.
static inline float sigmoid(float x) { return recip(1.0f + exp_(-max(x, -80.0f))); }
static inline float silu(float x) { return x * sigmoid(x); }
// log(1 + e^x); the linear part from 20 on, as in transformers.
static inline float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = exp_(x);
  return e < 0.35f ? two_atanh(e / (2.0f + e)) : log_(1.0f + e);
}
// (sin, cos) of 0 <= |x| <= 262143 to 2e-6: x = n pi/2 + r with pi/2 in three parts, Taylor in r.
static inline float2 sin_cos(float x) {
  const float n = rint(x * 0.636619772f);
  float r = fma(n, -1.57079637f, x);
  r = fma(n, 4.37113883e-8f, r);
  r = fma(n, 1.71512451e-15f, r);
  const float r2 = r * r;
  float s = fma(r2, 1.0f / 362880.0f, -1.0f / 5040.0f);
  s = fma(s, r2, 1.0f / 120.0f);
  s = fma(s, r2, -1.0f / 6.0f);
  s = fma(s * r2, r, r);
  float c = fma(r2, -1.0f / 3628800.0f, 1.0f / 40320.0f);
  c = fma(c, r2, -1.0f / 720.0f);
  c = fma(c, r2, 1.0f / 24.0f);
  c = fma(c, r2, -0.5f);
  c = fma(c, r2, 1.0f);
  const int q = int(n) & 3;
  const float a = (q & 1) ? c : s, b = (q & 1) ? s : c;
  return float2((q & 2) ? -a : a, ((q + 1) & 2) ? -b : b);
}

// ---- reductions over a threadgroup ------------------------------------------------------------
// Every thread calls it with scratch of one float per simdgroup and gets the result; order fixed.
static inline float group_sum(float v, threadgroup float* scratch, uint lane, uint simd,
                              uint simds) {
  v = simd_sum(v);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) scratch[simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < simds; ++i) total += scratch[i];
  return total;
}
static inline float group_max(float v, threadgroup float* scratch, uint lane, uint simd,
                              uint simds) {
  v = simd_max(v);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) scratch[simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float best = scratch[0];
  for (uint i = 1; i < simds; ++i) best = max(best, scratch[i]);
  return best;
}
// Sum of a row's partial sums of squares, the same in every lane of the simdgroup.
static inline float sum_parts(device const float* parts, uint n, uint lane) {
  float v = 0.0f;
  for (uint i = lane; i < n; i += 32) v += parts[i];
  return simd_sum(v);
}

// ---- weights ----------------------------------------------------------------------------------
// A matrix of the params as a value, so that a kernel can choose between two.
static inline Linear linear_of(PARAM_REF(Linear) w) {
  Linear copy;
  copy.n = w.n;
  copy.k = w.k;
  copy.bits = w.bits;
  copy.group_shift = w.group_shift;
  copy.scale_f16 = w.scale_f16;
  return copy;
}
// Bytes of a row of codes and entries of a row of (scale, bias) pairs.
static inline ulong row_bytes(uint k, uint bits) { return (ulong)k * bits / 8; }
static inline float2 scale_bias(uint pair, uint scale_f16) {
  return scale_f16 ? float2(f16_bits_to_float(pair & 0xffffu), f16_bits_to_float(pair >> 16))
                   : float2(bf16_bits_to_float(pair & 0xffffu), as_type<float>(pair & 0xffff0000u));
}
// 32 consecutive codes of a row as floats: one lane's share of a step. `at` is 16-byte aligned.
template <uint BITS>
static inline void load_codes32(device const uint* at, thread float (&q)[32]) {
  if (BITS == 4) {
    const uint4 w = *(device const uint4*)at;
    UNROLL for (uint c = 0; c < 4; ++c) {
      UNROLL for (uint j = 0; j < 8; ++j)
        q[8 * c + j] = float((w[c] >> (4 * j)) & 15u);
    }
  } else if (BITS == 8) {
    UNROLL for (uint b = 0; b < 2; ++b) {
      const uint4 w = ((device const uint4*)at)[b];
      UNROLL for (uint c = 0; c < 4; ++c) {
        UNROLL for (uint j = 0; j < 4; ++j)
          q[16 * b + 4 * c + j] = float((w[c] >> (8 * j)) & 255u);
      }
    }
  } else {
    UNROLL for (uint b = 0; b < 4; ++b) {
      const uint4 w = ((device const uint4*)at)[b];
      UNROLL for (uint c = 0; c < 4; ++c) {
        q[8 * b + 2 * c] = bf16_bits_to_float(w[c] & 0xffffu);
        q[8 * b + 2 * c + 1] = as_type<float>(w[c] & 0xffff0000u);
      }
    }
  }
}
// ---- Step's trailing arrays -------------------------------------------------------------------
struct KvPage {
  device act_t* data;
};  // act[layers][2][kv_heads][LILY_KV_BLOCK][LILY_HEAD_DIM]
static inline device act_t* kv_block(device const Step* step, uint slot, uint block) {
  device const KvPage* pages =
      (device const KvPage*)((device const uchar*)step + step->pages_offset);
  return pages[(ulong)slot * step->pages_stride + block].data;
}

#endif  // LILY_UTIL_H
