// cpu_matrix.h: quantised matrices on the CPU: rows of W times a few prepared vectors (decode), and
// panels of W unpacked for many vectors (prefill).
// Vectors are GCC's, as wide as the instruction set; results depend on that width alone: a row's
// result is the same for any split of the rows and any number of vectors.
#pragma once

#include <cstdlib>
#include <utility>

#include "cpu_twin.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace lily {
namespace LILY_CPU_NS {
namespace {
namespace matrix {  // of which the rest of the twins see the names listed at the end

// ---- vectors ----------------------------------------------------------------------------------
#if defined(__AVX512F__)
constexpr uint32_t kWide = 16;
#elif defined(__AVX2__)
constexpr uint32_t kWide = 8;
#else
constexpr uint32_t kWide = 4;
#endif
typedef float VecF __attribute__((vector_size(4 * kWide)));
typedef uint32_t VecU __attribute__((vector_size(4 * kWide)));
typedef int32_t VecI __attribute__((vector_size(4 * kWide)));

inline VecF load_vec(const float* p) {
  VecF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_vec(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }
inline VecF broadcast(float f) { return f - VecF{}; }  // f - 0 is f; f + 0 would be an addition
inline VecF as_float(VecU u) { return reinterpret_cast<VecF>(u); }
inline VecU as_bits(VecF f) { return reinterpret_cast<VecU>(f); }
// The first min(n, kWide) words at p, then zeros; nothing behind them is read.
inline VecU load_words(const uint32_t* p, size_t n) {
  VecU v{};
  if (n >= kWide) {
    std::memcpy(&v, p, sizeof v);
  } else {
#ifdef __AVX512F__
    v = reinterpret_cast<VecU>(_mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p));
#else
    for (size_t i = 0; i < n; ++i) v[i] = p[i];
#endif
  }
  return v;
}
inline VecU lanes() {
  VecU v{};
  for (uint32_t i = 0; i < kWide; ++i) v[i] = i;
  return v;
}
// In halves, so always in the same order; by recursion, which stays in registers where a loop over
// the halves goes through memory.
template <uint32_t N>
inline float sum_halves(float (&part)[kWide]) {
  if constexpr (N > 1) {
    for (uint32_t i = 0; i < N / 2; ++i) part[i] += part[i + N / 2];
    return sum_halves<N / 2>(part);
  }
  return part[0];
}
inline float sum_lanes(VecF v) {
  float part[kWide];
  store_vec(part, v);
  return sum_halves<kWide>(part);
}

#ifdef __AVX512F__
// Lane i of the result is lane index[i] % 16 of v.
inline VecF pick(VecF v, VecU index) {
  return reinterpret_cast<VecF>(_mm512_maskz_permutexvar_ps(
      0xffff, reinterpret_cast<__m512i>(index), reinterpret_cast<__m512>(v)));
}
#endif

// Code `p` of each word as a number.
template <uint32_t BITS>
inline VecF code_value(VecU w, uint32_t p) {
  if constexpr (BITS == 16) {
    return as_float(p == 0 ? w << 16 : w & 0xffff0000u);
  } else {
    const VecU q = w >> (BITS * p);
#ifdef __AVX512F__
    if constexpr (BITS == 4) {  // a table of 16 looks at 4 bits only: no mask, no conversion
      const VecF numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      return pick(numbers, q);
    }
#endif
    return __builtin_convertvector(reinterpret_cast<VecI>(q & ((1u << BITS) - 1)), VecF);
  }
}
// Scales and biases of kWide pairs.
inline void split_pairs(VecU pairs, bool f16, VecF& scale, VecF& bias) {
  if (!f16) {
    scale = as_float(pairs << 16);
    bias = as_float(pairs & 0xffff0000u);
    return;
  }
  const auto value = [](VecU h) {  // f16 in the low half; subnormals too
    const VecU sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
    const VecU finite = as_bits(as_float(rest) * 0x1p112f);
    return as_float(sign | ((h & 0x7c00u) == 0x7c00u ? rest | 0x7f800000u : finite));
  };
  scale = value(pairs & 0xffffu);
  bias = value(pairs >> 16);
}

// ---- scratch ----------------------------------------------------------------------------------
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

// ---- layout -----------------------------------------------------------------------------------
// Matrix e of experts that lie one after the other.
inline const uint32_t* matrix_codes(const Linear& w, const uint32_t* codes, uint64_t e) {
  return codes + e * (uint64_t(w.n) * w.k * w.bits / 32);
}
inline const uint32_t* matrix_pairs(const Linear& w, const uint32_t* pairs, uint64_t e) {
  return w.bits == 16 ? pairs : pairs + e * (uint64_t(w.n) * (w.k >> w.group_shift));
}
inline size_t row_words(const Linear& w) { return size_t(w.k) * w.bits / 32; }
inline size_t groups(const Linear& w) { return w.bits == 16 ? 0 : w.k >> w.group_shift; }
inline size_t up_to_wide(size_t n) { return (n + kWide - 1) / kWide * kWide; }

// ---- decode: rows of W times prepared vectors ---------------------------------------------------
// kWide words of codes are loaded at once; code p of word i meets x[(word i) * codes per word + p].
// So a prepared vector holds x in the order (chunk of kWide words, p, lane), zeros behind its end,
// then the sum of each group.
inline size_t prepared_sums(const Linear& w) { return up_to_wide(row_words(w)) * (32 / w.bits); }
// Floats of a vector made ready for linear_rows with matrices of w's k, bits and group.
inline size_t prepared_floats(const Linear& w) {
  return (prepared_sums(w) + up_to_wide(groups(w)) + 15) / 16 * 16;
}

// x[k] as linear_rows wants it, into prepared[prepared_floats(w)].
inline void prepare(const Linear& w, const float* x, float* prepared) {
  const size_t per_word = 32 / w.bits, words = row_words(w), all = up_to_wide(words);
  for (size_t i = 0; i < all; ++i) {
    float* to = prepared + i / kWide * kWide * per_word + i % kWide;
    for (size_t p = 0; p < per_word; ++p) to[p * kWide] = i < words ? x[i * per_word + p] : 0.0f;
  }
  float* sums = prepared + prepared_sums(w);
  const size_t size = size_t(1) << w.group_shift, count = groups(w);
  for (size_t g = 0; g < up_to_wide(count); ++g) {
    VecF sum{};
    for (size_t i = 0; g < count && i < size; i += kWide) sum += load_vec(x + g * size + i);
    sums[g] = sum_lanes(sum);
  }
}

// J rows of W times R vectors. A group's products are summed alone, then scaled and shifted:
// s (q . x) + b sum(x).
template <uint32_t BITS, uint32_t J, uint32_t R>
inline void dot_rows(const Linear& w, const uint32_t* codes, const uint32_t* pairs,
                     const float* prepared, float* y, size_t y_stride) {
  constexpr uint32_t kPer = 32 / BITS;
  const size_t words = row_words(w), stride = prepared_floats(w), count = groups(w);
  const size_t chunks = up_to_wide(words) / kWide, ahead = J * words;
  VecF acc[J][R] = {};
  // Chunk c of the rows: the sums of q x in each lane.
  const auto chunk = [&](size_t c, VecF(&t)[J][R]) {
    VecU word[J];
    for (uint32_t j = 0; j < J; ++j) {
      const uint32_t* at = codes + j * words + c * kWide;
      word[j] = load_words(at, words - c * kWide);
      // The next rows lie in another page, where the processor's prefetchers do not look.
      __builtin_prefetch(at + ahead);
    }
    for (uint32_t p = 0; p < kPer; ++p) {
      VecF x[R];
      const float* at = prepared + (c * kPer + p) * kWide;
      for (uint32_t r = 0; r < R; ++r) x[r] = load_vec(at + r * stride);
      for (uint32_t j = 0; j < J; ++j) {
        const VecF q = code_value<BITS>(word[j], p);
        for (uint32_t r = 0; r < R; ++r) t[j][r] += q * x[r];
      }
    }
  };
  if constexpr (BITS == 16) {
    for (size_t c = 0; c < chunks; ++c) chunk(c, acc);
  } else {
    const size_t group_words = size_t(1) << w.group_shift >> (BITS == 4 ? 3 : 2);
    const uint32_t shift = w.group_shift - (BITS == 4 ? 3 : 2);
    const float* sums = prepared + prepared_sums(w);
    for (size_t g0 = 0; g0 < count; g0 += kWide) {  // kWide groups are group_words chunks
      VecF scale[J];
      for (uint32_t j = 0; j < J; ++j) {
        VecF bias;
        split_pairs(load_words(pairs + j * count + g0, count - g0), w.scale_f16, scale[j], bias);
        for (uint32_t r = 0; r < R; ++r) acc[j][r] += bias * load_vec(sums + r * stride + g0);
      }
      const size_t c0 = g0 / kWide * group_words;
      const size_t c1 = c0 + group_words < chunks ? c0 + group_words : chunks;
      for (size_t c = c0; c < c1; ++c) {
        VecF t[J][R] = {};
        chunk(c, t);
        const VecU group = (lanes() + uint32_t((c - c0) * kWide)) >> shift;  // of each lane's word
        for (uint32_t j = 0; j < J; ++j) {
#ifdef __AVX512F__
          const VecF s = pick(scale[j], group);
#else
          VecF s = broadcast(scale[j][group[0]]);
          if (group_words < kWide) {
            for (uint32_t i = 0; i < kWide; ++i) s[i] = scale[j][group[i]];
          }
#endif
          for (uint32_t r = 0; r < R; ++r) acc[j][r] += s * t[j][r];
        }
      }
    }
  }
  for (uint32_t j = 0; j < J; ++j) {
    for (uint32_t r = 0; r < R; ++r) y[r * y_stride + j] = sum_lanes(acc[j][r]);
  }
}
template <uint32_t BITS, uint32_t R>
inline void dot_range(const Linear& w, const uint32_t* codes, const uint32_t* pairs, uint64_t n0,
                      uint64_t n1, const float* prepared, float* y, size_t y_stride) {
  // Sums in flight: what 32 or 16 registers hold.
  constexpr uint32_t kJ = R == 1 ? 4 : kWide == 16 ? 8 / R : 4 / R;
  const size_t words = row_words(w), count = groups(w);
  uint64_t n = n0;
  for (; n + kJ <= n1; n += kJ) {
    dot_rows<BITS, kJ, R>(w, codes + n * words, pairs + n * count, prepared, y + (n - n0),
                          y_stride);
  }
  for (; n < n1; ++n) {
    dot_rows<BITS, 1, R>(w, codes + n * words, pairs + n * count, prepared, y + (n - n0), y_stride);
  }
}
template <uint32_t BITS>
inline void dot_vectors(const Linear& w, const uint32_t* codes, const uint32_t* pairs, uint64_t n0,
                        uint64_t n1, uint32_t rows, const float* prepared, float* y,
                        size_t y_stride) {
  const size_t stride = prepared_floats(w);
  for (; rows >= 4; rows -= 4, prepared += 4 * stride, y += 4 * y_stride) {
    dot_range<BITS, 4>(w, codes, pairs, n0, n1, prepared, y, y_stride);
  }
  if (rows >= 2) {
    dot_range<BITS, 2>(w, codes, pairs, n0, n1, prepared, y, y_stride);
    prepared += 2 * stride;
    y += 2 * y_stride;
  }
  if (rows % 2) dot_range<BITS, 1>(w, codes, pairs, n0, n1, prepared, y, y_stride);
}

// y[r * y_stride + i] = W[n0 + i] . x_r for n0 <= n0 + i < n1 and `rows` vectors that lie
// prepared_floats(w) apart, in fp32.
inline void linear_rows(const Linear& w, const uint32_t* codes, const uint32_t* pairs, uint64_t n0,
                        uint64_t n1, uint32_t rows, const float* prepared, float* y,
                        size_t y_stride) {
  if (w.bits == 4) dot_vectors<4>(w, codes, pairs, n0, n1, rows, prepared, y, y_stride);
  else if (w.bits == 8) dot_vectors<8>(w, codes, pairs, n0, n1, rows, prepared, y, y_stride);
  else dot_vectors<16>(w, codes, pairs, n0, n1, rows, prepared, y, y_stride);
}

// ---- prefill: panels of W times packed vectors --------------------------------------------------
// A panel is kPanel rows of W and kDepth of k as numbers s q + b, k-major: float[kDepth][kPanel],
// so that it stays in the first cache. Vectors are packed in tiles of kTileRows: float[k][rows of
// the tile]. An output is the sum of one chain of multiply-adds per kDepth: short chains round less.
constexpr uint32_t kPanel = 2 * kWide, kDepth = 128;
#if defined(__AVX512F__)
constexpr uint32_t kTileRows = 12;  // 24 of 32 registers accumulate
#else
constexpr uint32_t kTileRows = 6;  // 12 of 16
#endif

// kWide x kWide words: afterwards v[i] lane l is what v[l] lane i was. Log2(kWide) rounds, each
// swaps blocks of D between neighbours D apart.
template <uint32_t D, size_t... L>
inline void transpose_round(VecU (&v)[kWide], std::index_sequence<L...>) {
  for (uint32_t i = 0; i < kWide; ++i) {
    if (i & D) continue;
    const VecU a = v[i], b = v[i + D];
    v[i] = __builtin_shufflevector(a, b, (L & D ? int(L - D + kWide) : int(L))...);
    v[i + D] = __builtin_shufflevector(a, b, (L & D ? int(L + kWide) : int(L + D))...);
  }
}
inline void transpose(VecU (&v)[kWide]) {
  constexpr std::make_index_sequence<kWide> all;
  transpose_round<1>(v, all);
  transpose_round<2>(v, all);
  if constexpr (kWide > 4) transpose_round<4>(v, all);
  if constexpr (kWide > 8) transpose_round<8>(v, all);
}

// Scales and biases of rows n0 .. n0 + kPanel - 1 (the last row again where there is no further
// one): scales[group][scale, bias][kPanel].
inline size_t panel_scales_floats(const Linear& w) { return up_to_wide(groups(w)) * 2 * kPanel; }
inline void panel_scales(const Linear& w, const uint32_t* pairs, uint64_t n0, float* scales) {
  const size_t count = groups(w);
  for (uint32_t half = 0; half < kPanel; half += kWide) {
    for (size_t g0 = 0; g0 < count; g0 += kWide) {
      VecU v[kWide];
      for (uint32_t l = 0; l < kWide; ++l) {
        const uint64_t n = n0 + half + l < w.n ? n0 + half + l : w.n - 1;
        v[l] = load_words(pairs + n * count + g0, count - g0);
      }
      transpose(v);
      for (uint32_t i = 0; i < kWide; ++i) {
        VecF s, b;
        split_pairs(v[i], w.scale_f16, s, b);
        store_vec(scales + (g0 + i) * 2 * kPanel + half, s);
        store_vec(scales + (g0 + i) * 2 * kPanel + kPanel + half, b);
      }
    }
  }
}

// Values k0 .. k1 - 1 of the same rows; k0 is a multiple of kDepth.
template <uint32_t BITS>
inline void unpack_panel(const Linear& w, const uint32_t* codes, uint64_t n0, uint32_t k0,
                         uint32_t k1, const float* scales, float* panel) {
  constexpr uint32_t kPer = 32 / BITS;
  static_assert(kDepth % (kPer * kWide) == 0);
  const size_t words = row_words(w), end = k1 / kPer;
  const uint32_t shift = w.group_shift - (BITS == 4 ? 3 : 2);  // words of a group, unused for bf16
  for (uint32_t half = 0; half < kPanel; half += kWide) {
    float* to = panel + half;
    for (size_t w0 = k0 / kPer; w0 < end; w0 += kWide) {
      VecU v[kWide];
      for (uint32_t l = 0; l < kWide; ++l) {
        const uint64_t n = n0 + half + l < w.n ? n0 + half + l : w.n - 1;
        const uint32_t* at = codes + n * words + w0;
        v[l] = load_words(at, end - w0);
        __builtin_prefetch(at + kDepth / kPer);  // too many streams for the processor's prefetchers
      }
      transpose(v);
      for (uint32_t i = 0; i < kWide && w0 + i < end; ++i) {
        const float* sb = scales + ((w0 + i) >> shift) * 2 * kPanel + half;
        for (uint32_t p = 0; p < kPer; ++p, to += kPanel) {
          VecF value = code_value<BITS>(v[i], p);
          if constexpr (BITS != 16) value = value * load_vec(sb) + load_vec(sb + kPanel);
          store_vec(to, value);
        }
      }
    }
  }
}

// Rows of one tile, row(r) -> const Act*, into packed float[k][rows].
template <typename Row>
inline void pack_tile(uint32_t k, uint32_t rows, Row&& row, float* packed) {
  for (uint32_t r = 0; r < rows; ++r) {
    const auto* from = row(r);
    for (uint32_t i = 0; i < k; ++i) packed[size_t(i) * rows + r] = load(from, i);
  }
}

// out[M][kPanel] += tile (packed, M rows) times panel, `depth` of k.
template <uint32_t M>
inline void add_tile(uint32_t depth, const float* packed, const float* panel, float* out) {
  VecF acc[M][2] = {};
  for (uint32_t i = 0; i < depth; ++i) {
    const VecF w0 = load_vec(panel + size_t(i) * kPanel);
    const VecF w1 = load_vec(panel + size_t(i) * kPanel + kWide);
    for (uint32_t r = 0; r < M; ++r) {
      const VecF x = broadcast(packed[size_t(i) * M + r]);
      acc[r][0] += x * w0;
      acc[r][1] += x * w1;
    }
  }
  for (uint32_t r = 0; r < M; ++r) {
    float* to = out + r * kPanel;
    store_vec(to, load_vec(to) + acc[r][0]);
    store_vec(to + kWide, load_vec(to + kWide) + acc[r][1]);
  }
}
// The same for any number of rows up to kTileRows.
template <uint32_t M = kTileRows>
inline void add_rows(uint32_t rows, uint32_t depth, const float* packed, const float* panel,
                     float* out) {
  if (rows == M) return add_tile<M>(depth, packed, panel, out);
  if constexpr (M > 1) add_rows<M - 1>(rows, depth, packed, panel, out);
}

// out[count][kPanel] = packed rows times rows n0 .. n0 + kPanel - 1 of W. scales: scratch of
// panel_scales_floats(w).
inline void multiply_panel(const Linear& w, const uint32_t* codes, const uint32_t* pairs,
                           uint64_t n0, uint32_t count, const float* packed, float* scales,
                           float* out) {
  alignas(64) float panel[kDepth * kPanel];
  panel_scales(w, pairs, n0, scales);
  std::memset(out, 0, size_t(count) * kPanel * sizeof(float));
  for (uint32_t k0 = 0; k0 < w.k; k0 += kDepth) {
    const uint32_t k1 = w.k - k0 < kDepth ? w.k : k0 + kDepth;
    if (w.bits == 4) unpack_panel<4>(w, codes, n0, k0, k1, scales, panel);
    else if (w.bits == 8) unpack_panel<8>(w, codes, n0, k0, k1, scales, panel);
    else unpack_panel<16>(w, codes, n0, k0, k1, scales, panel);
    for (uint32_t r = 0; r < count; r += kTileRows) {
      const uint32_t rows = count - r < kTileRows ? count - r : kTileRows;
      add_rows(rows, k1 - k0, packed + size_t(r) * w.k + size_t(k0) * rows, panel,
               out + r * kPanel);
    }
  }
}

}  // namespace matrix

using matrix::linear_rows;
using matrix::matrix_codes;
using matrix::matrix_pairs;
using matrix::prepare;
using matrix::prepared_floats;
using matrix::scratch;

}  // namespace
}  // namespace LILY_CPU_NS
}  // namespace lily
