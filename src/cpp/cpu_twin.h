// cpu_twin.h: what the native twins of the kernels build on: the call, the thread pool, activations,
// weight rows. Files that include it are compiled once per instruction set (LILY_CPU_NS names it);
// everything here is internal to such a file, so that no instance leaks to an older processor.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu_call.h"

#ifndef LILY_CPU_NS
#error "cpu_twin.h: LILY_CPU_NS names the instruction set"
#endif

namespace lily {
namespace LILY_CPU_NS {

// The twins, each in one of the cpu_*.cpp files. A missing one is a link error.
#define X(op, P) void op(const TwinCall& call);
LILY_OPS(X)
#undef X

namespace {  // internal linkage: see the head of the file

template <typename P>
const P& params(const TwinCall& call) {
  return *static_cast<const P*>(call.params);
}
template <typename T>
T* arg(const TwinCall& call, size_t i) {
  return reinterpret_cast<T*>(call.args[i]);
}
inline Step& step(const TwinCall& call) { return *reinterpret_cast<Step*>(call.step); }

template <typename F>
void parallel(const TwinCall& call, size_t n, F&& f) {
  pool_run(*call.pool, n, [](void* context, size_t i) { (*static_cast<F*>(context))(i); }, &f);
}

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float bf16_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }
// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float f16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3ffu;
  if (exp == 0) return bits_to_float(sign | 0x3f800000u) * float(man) * 5.9604644775390625e-8f;
  if (exp == 31) return bits_to_float(sign | 0x7f800000u | (man << 13));
  return bits_to_float(sign | ((exp + 112) << 23) | (man << 13));
}

// Activations: code is written once, `template <typename Act>`, and dispatched on call.exact.
struct Bf16 {
  uint16_t bits;
};
inline float load(const Bf16* p, size_t i) { return bf16_to_float(p[i].bits); }
inline float load(const float* p, size_t i) { return p[i]; }
inline void store(Bf16* p, size_t i, float v) { p[i].bits = float_to_bf16(v); }
inline void store(float* p, size_t i, float v) { p[i] = v; }
// The value a store would leave.
inline float rounded(const Bf16*, float v) { return bf16_to_float(float_to_bf16(v)); }
inline float rounded(const float*, float v) { return v; }
// with_act(call, [&](auto* tag) { using Act = std::remove_pointer_t<decltype(tag)>; ... });
template <typename F>
void with_act(const TwinCall& call, F&& f) {
  if (call.exact) f(static_cast<float*>(nullptr));
  else f(static_cast<Bf16*>(nullptr));
}

// x[n0, n1) += y, stored rounded; ssq: the sum of squares of each LILY_OUT_ROWS stored values.
template <typename Act>
void add_rows(Act* x, const float* y, float* ssq, uint32_t n0, uint32_t n1) {
  for (uint32_t n = n0; n < n1; n += LILY_OUT_ROWS) {
    float sum = 0.0f;
    for (uint32_t j = n; j < n + LILY_OUT_ROWS; ++j) {
      const float v = rounded(x, load(x, j) + y[j - n0]);
      store(x, j, v);
      sum += v * v;
    }
    ssq[n / LILY_OUT_ROWS] = sum;
  }
}

inline void scale_bias(uint32_t pair, bool f16, float& scale, float& bias) {
  scale = f16 ? f16_to_float(uint16_t(pair)) : bf16_to_float(uint16_t(pair));
  bias = f16 ? f16_to_float(uint16_t(pair >> 16)) : bits_to_float(pair & 0xffff0000u);
}
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline std::byte* kv_block(const TwinCall& call, uint32_t slot, uint32_t block) {
  const Step& s = step(call);
  uint64_t address;
  std::memcpy(&address, call.step + s.pages_offset + (uint64_t(slot) * s.pages_stride + block) * 8,
              8);
  return reinterpret_cast<std::byte*>(address);
}

}  // namespace
}  // namespace LILY_CPU_NS
}  // namespace lily
