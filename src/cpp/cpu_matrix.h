// cpu_matrix.h: quantised matrices on the CPU: rows of W times a few prepared vectors (decode).
// A row's result depends on the row and the vector alone: not on n0, n1 or how many vectors.
#pragma once

#include <cstdlib>

#include "cpu_twin.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

// This thread's scratch memory, one growing block per slot; contents last until the slot's next
// use. Jobs may read a block that the calling thread filled, under a slot that they do not use.
constexpr int kScratchSlots = 8;
struct ScratchBlock {
  float* data = nullptr;
  size_t floats = 0;
  ~ScratchBlock() { std::free(data); }
};
inline float* scratch(int slot, size_t floats) {
  static thread_local ScratchBlock blocks[kScratchSlots];
  ScratchBlock& b = blocks[slot];
  if (b.floats < floats) {
    std::free(b.data);
    b.floats = (floats + 1023) / 1024 * 1024;
    b.data = static_cast<float*>(std::aligned_alloc(64, b.floats * sizeof(float)));
    if (!b.data) std::abort();
  }
  return b.data;
}

// Matrix e of experts that lie one after the other.
inline const uint32_t* matrix_codes(const Linear& w, const uint32_t* codes, uint64_t e) {
  return codes + e * (uint64_t(w.n) * w.k * w.bits / 32);
}
inline const uint32_t* matrix_pairs(const Linear& w, const uint32_t* pairs, uint64_t e) {
  return w.bits == 16 ? pairs : pairs + e * (uint64_t(w.n) * (w.k >> w.group_shift));
}

inline uint32_t groups(const Linear& w) { return w.bits == 16 ? 0 : w.k >> w.group_shift; }

// Floats of a vector made ready for linear_rows with matrices of w's k, bits and group.
inline size_t prepared_floats(const Linear& w) { return (w.k + groups(w) + 15) / 16 * 16; }

// x[k] as linear_rows wants it, into prepared[prepared_floats(w)].
inline void prepare(const Linear& w, const float* x, float* prepared) {
  float* sums = prepared + w.k;
  for (uint32_t i = 0; i < w.k; ++i) prepared[i] = x[i];
  const uint32_t size = 1u << w.group_shift;
  for (uint32_t g = 0; g < groups(w); ++g) {
    float s = 0.0f;
    for (uint32_t i = 0; i < size; ++i) s += x[g * size + i];
    sums[g] = s;
  }
}

// y[r * y_stride + i] = W[n0 + i] . x_r for n0 <= n0 + i < n1 and `rows` vectors that lie
// prepared_floats(w) apart: per group s (q . x) + b sum(x) in fp32.
inline void linear_rows(const Linear& w, const uint32_t* codes, const uint32_t* pairs, uint64_t n0,
                        uint64_t n1, uint32_t rows, const float* prepared, float* y,
                        size_t y_stride) {
  const uint32_t per_word = 32 / w.bits, mask = w.bits == 16 ? 0xffffu : (1u << w.bits) - 1;
  for (uint64_t n = n0; n < n1; ++n) {
    const uint32_t* row = codes + n * (w.k / per_word);
    const uint32_t* row_pairs = pairs + n * groups(w);
    for (uint32_t r = 0; r < rows; ++r) {
      const float* x = prepared + r * prepared_floats(w);
      const float* sums = x + w.k;
      float total = 0.0f;
      const uint32_t size = w.bits == 16 ? w.k : 1u << w.group_shift;
      for (uint32_t g = 0; g * size < w.k; ++g) {
        float d = 0.0f;
        for (uint32_t i = g * size; i < (g + 1) * size; ++i) {
          const uint32_t q = (row[i / per_word] >> (i % per_word * w.bits)) & mask;
          d += (w.bits == 16 ? bf16_to_float(uint16_t(q)) : float(q)) * x[i];
        }
        if (w.bits == 16) {
          total = d;
        } else {
          float s, b;
          scale_bias(row_pairs[g], w.scale_f16, s, b);
          total += s * d + b * sums[g];
        }
      }
      y[r * y_stride + (n - n0)] = total;
    }
  }
}

}  // namespace
}  // namespace LILY_CPU_NS
}  // namespace lily
