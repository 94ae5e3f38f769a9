// cpu_delta.cpp: native twins of the gated DeltaNet operations.
#include <algorithm>
#include <type_traits>

#include "cpu_matrix.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

using matrix::as_bits, matrix::as_float, matrix::broadcast, matrix::load_vec, matrix::store_vec,
    matrix::sum_lanes, matrix::transpose;
using matrix::kWide, matrix::VecF, matrix::VecI, matrix::VecU;

// e^x as the kernels compute it: x = n ln 2 + r, Taylor in r, scaled by two powers of two.
inline VecF exp_vec(VecF x) {
  const VecF low = broadcast(-104.0f), high = broadcast(89.0f);
  VecF c = x < low ? low : x;
  c = c > high ? high : c;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
  const VecF n = (c * 1.44269504f + round) - round;
  const VecF r = (c - n * 0.693145752f) - n * 1.42860677e-6f;
  VecF e = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
  e = e * r + 1.0f / 120.0f;
  e = e * r + 1.0f / 24.0f;
  e = e * r + 1.0f / 6.0f;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  const VecI k = __builtin_convertvector(n, VecI), half = k >> 1;
  return e * as_float((VecU)(half + 127) << 23) * as_float((VecU)(k - half + 127) << 23);
}
inline VecF silu_vec(VecF x) { return x / (1.0f + exp_vec(-x)); }

constexpr size_t kDim = LILY_DELTA_DIM, kChunk = LILY_CHUNK, kKept = LILY_CONV_WIDTH - 1;

// ---- one head's convolution and norm ------------------------------------------------------------
// The 128 channels of a head: weights by tap, and the inputs before the next row, oldest first.
struct HeadConv {
  float taps[LILY_CONV_WIDTH][kDim];
  float past[kKept][kDim];
};
template <typename Act>
void widen_head(const Act* from, float* to) {
  for (size_t i = 0; i < kDim; ++i) to[i] = load(from, i);
}
inline void load_taps(HeadConv& conv, const float* conv_w) {
  for (size_t i = 0; i < kDim; ++i) {
    for (size_t j = 0; j < LILY_CONV_WIDTH; ++j) conv.taps[j][i] = conv_w[LILY_CONV_WIDTH * i + j];
  }
}
// y = silu of the convolution at input `now`; the past moves on to it.
template <typename Act>
void conv_row(HeadConv& conv, const Act* now, float* y) {
  float row[kDim];
  widen_head(now, row);
  for (size_t i = 0; i < kDim; i += kWide) {
    VecF sum = load_vec(conv.taps[kKept] + i) * load_vec(row + i);
    for (size_t j = 0; j < kKept; ++j)
      sum += load_vec(conv.taps[j] + i) * load_vec(conv.past[j] + i);
    store_vec(y + i, silu_vec(sum));
  }
  std::memmove(conv.past[0], conv.past[1], (kKept - 1) * sizeof row);
  std::memcpy(conv.past[kKept - 1], row, sizeof row);
}
inline float dot_head(const float* a, const float* b) {
  VecF sum = {};
  for (size_t i = 0; i < kDim; i += kWide) sum += load_vec(a + i) * load_vec(b + i);
  return sum_lanes(sum);
}
void normalize_head(float* y, float scale) {
  const float factor = scale / std::sqrt(dot_head(y, y) + 1e-6f);
  for (size_t i = 0; i < kDim; ++i) y[i] *= factor;
}
const float kQueryScale = 0.0883883476f;  // 1 / sqrt(128)

// ---- delta_step ---------------------------------------------------------------------------------
// Rows begin <= r < end of one slot and one value head. A value row S[v] of the state stays in
// registers over all rows, so the state is read and written once.
template <typename Act>
void step_head(const TwinCall& call, uint32_t slot, uint32_t begin, uint32_t end, uint32_t h) {
  const auto& p = params<DeltaStep>(call);
  const size_t channels = (2 * p.key_heads + p.value_heads) * kDim, rows = end - begin;
  const uint32_t per_key = p.value_heads / p.key_heads;
  const size_t first[3] = {h / per_key * kDim, (p.key_heads + h / per_key) * kDim,
                           (2 * p.key_heads + h) * kDim};  // channels of q, k, v
  float mixed[3][LILY_MAX_ROWS][kDim], decay[LILY_MAX_ROWS], beta[LILY_MAX_ROWS];
  for (int part = 0; part < 3; ++part) {
    HeadConv conv;
    load_taps(conv, arg<float>(call, 1) + LILY_CONV_WIDTH * first[part]);
    for (size_t i = 0; i < kKept; ++i) {
      widen_head(arg<Act>(call, 5) + (slot * kKept + i) * channels + first[part], conv.past[i]);
    }
    for (size_t r = 0; r < rows; ++r) {
      const Act* now = arg<Act>(call, 0) + (begin + r) * size_t(p.proj_stride) + first[part];
      conv_row(conv, now, mixed[part][r]);
      if (part < 2) normalize_head(mixed[part][r], part == 0 ? kQueryScale : 1.0f);
    }
    // q and k belong to the first value head of their key head.
    if (p.write_state && (part == 2 || h % per_key == 0)) {
      for (size_t i = 0; i < kKept; ++i) {
        Act* to = arg<Act>(call, 7) + (slot * kKept + i) * channels + first[part];
        for (size_t c = 0; c < kDim; ++c) store(to, c, conv.past[i][c]);
      }
    }
  }
  for (size_t r = 0; r < rows; ++r) {
    const Act* at = arg<Act>(call, 0) + (begin + r) * size_t(p.proj_stride);
    const float a = load(at, p.a_offset + h) + arg<float>(call, 3)[h];
    decay[r] = std::exp(arg<float>(call, 2)[h] * softplus(a));
    beta[r] = sigmoid(load(at, p.b_offset + h));
  }

  const size_t state_at = (size_t(slot) * p.value_heads + h) * kDim * kDim;
  const float* state_in = arg<float>(call, 6) + state_at;
  float* state_out = arg<float>(call, 8) + state_at;
  float o[LILY_MAX_ROWS][kDim];
  constexpr size_t kVectors = kDim / kWide, kPair = 2;  // value rows at once: one waits for its sum
  for (size_t v = 0; v < kDim; v += kPair) {
    VecF s[kPair][kVectors];
    for (size_t e = 0; e < kPair; ++e) {
      for (size_t i = 0; i < kVectors; ++i) {
        s[e][i] = load_vec(state_in + (v + e) * kDim + i * kWide);
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      const float *q = mixed[0][r], *k = mixed[1][r];
      VecF sum[kPair][2] = {};
      for (size_t i = 0; i < kVectors; ++i) {
        const VecF key = load_vec(k + i * kWide);
        for (size_t e = 0; e < kPair; ++e) {
          s[e][i] *= decay[r];
          sum[e][i % 2] += s[e][i] * key;
        }
      }
      float write[kPair];
      for (size_t e = 0; e < kPair; ++e) {
        write[e] = beta[r] * (mixed[2][r][v + e] - sum_lanes(sum[e][0] + sum[e][1]));
        sum[e][0] = sum[e][1] = VecF{};
      }
      for (size_t i = 0; i < kVectors; ++i) {
        const VecF key = load_vec(k + i * kWide), query = load_vec(q + i * kWide);
        for (size_t e = 0; e < kPair; ++e) {
          s[e][i] += write[e] * key;
          sum[e][i % 2] += s[e][i] * query;
        }
      }
      for (size_t e = 0; e < kPair; ++e) o[r][v + e] = sum_lanes(sum[e][0] + sum[e][1]);
    }
    if (!p.write_state) continue;
    for (size_t e = 0; e < kPair; ++e) {
      for (size_t i = 0; i < kVectors; ++i) {
        store_vec(state_out + (v + e) * kDim + i * kWide, s[e][i]);
      }
    }
  }

  const float* gain = arg<float>(call, 4);
  for (size_t r = 0; r < rows; ++r) {
    const Act* z = arg<Act>(call, 0) + (begin + r) * size_t(p.proj_stride) + p.z_offset + h * kDim;
    float gate[kDim];
    widen_head(z, gate);
    for (size_t i = 0; i < kDim; i += kWide) store_vec(gate + i, silu_vec(load_vec(gate + i)));
    const size_t head = (begin + r) * p.value_heads + h;
    Act* u = arg<Act>(call, 9) + head * kDim;
    for (size_t i = 0; i < kDim; ++i) store(u, i, o[r][i] * gain[i] * gate[i]);
    const size_t part = kDim / p.head_parts;
    for (size_t i = 0; i < p.head_parts; ++i) {
      float sum = 0.0f;
      for (size_t c = i * part; c < (i + 1) * part; ++c) sum += o[r][c] * o[r][c];
      arg<float>(call, 10)[head * p.head_parts + i] = sum;
    }
  }
}

// ---- products of small matrices -----------------------------------------------------------------
constexpr size_t kStripRows = 4, kStripColumns = 2 * kWide;

// sum[i][j] = sum over d < depth of a[i * a_row + d * a_column] * b[d * b_row + j].
template <size_t M>
inline void strip_product(size_t depth, const float* a, size_t a_row, size_t a_column,
                          const float* b, size_t b_row, VecF (&sum)[M][2]) {
  for (size_t i = 0; i < M; ++i) sum[i][0] = sum[i][1] = VecF{};
  for (size_t d = 0; d < depth; ++d) {
    const VecF b0 = load_vec(b + d * b_row), b1 = load_vec(b + d * b_row + kWide);
    for (size_t i = 0; i < M; ++i) {
      const float x = a[i * a_row + d * a_column];
      sum[i][0] += x * b0;
      sum[i][1] += x * b1;
    }
  }
}
enum class Into { set, add, subtract };
template <Into INTO, size_t M>
inline void strip_into(size_t n, size_t depth, const float* a, size_t a_row, size_t a_column,
                       const float* b, size_t b_row, float* c, size_t c_row) {
  for (size_t j = 0; j < n; j += kStripColumns) {
    VecF sum[M][2];
    strip_product<M>(depth, a, a_row, a_column, b + j, b_row, sum);
    for (size_t i = 0; i < M; ++i) {
      for (size_t e = 0; e < 2; ++e) {
        float* to = c + i * c_row + j + e * kWide;
        VecF v = sum[i][e];
        if (INTO == Into::add) v = load_vec(to) + v;
        if (INTO == Into::subtract) v = load_vec(to) - v;
        store_vec(to, v);
      }
    }
  }
}
// c[m][n] (+= or -=) a[m][depth] b[depth][n]; n a multiple of kStripColumns. `lower`: a is lower
// triangular, its row i ends with column i.
template <Into INTO>
void multiply(size_t m, size_t n, size_t depth, const float* a, size_t a_row, size_t a_column,
              const float* b, size_t b_row, float* c, size_t c_row, bool lower = false) {
  const auto rows = [&](auto count, size_t i) {
    constexpr size_t kRows = decltype(count)::value;
    strip_into<INTO, kRows>(n, lower ? std::min(depth, i + kRows) : depth, a + i * a_row, a_row,
                            a_column, b, b_row, c + i * c_row, c_row);
  };
  const size_t whole = m / kStripRows * kStripRows;
  for (size_t i = 0; i < whole; i += kStripRows) {
    rows(std::integral_constant<size_t, kStripRows>(), i);
  }
  for (size_t i = whole; i < m; ++i) rows(std::integral_constant<size_t, 1>(), i);
}

// to[j][i] = from[i][j] for i < rows, j < columns, multiples of kWide; rows from `valid` on are zeros.
inline void flip(const float* from, size_t from_row, size_t rows, size_t columns, float* to,
                 size_t to_row, size_t valid) {
  for (size_t i0 = 0; i0 < rows; i0 += kWide) {
    for (size_t j0 = 0; j0 < columns; j0 += kWide) {
      VecU block[kWide];
      for (size_t i = 0; i < kWide; ++i) {
        const size_t row = i0 + i;
        block[i] = row < valid ? as_bits(load_vec(from + row * from_row + j0)) : VecU{};
      }
      transpose(block);
      for (size_t j = 0; j < kWide; ++j) store_vec(to + (j0 + j) * to_row + i0, as_float(block[j]));
    }
  }
}

// Running sums of a chunk's log decays. In double: small differences follow large sums.
inline void decay_sums(const float* g, size_t n, size_t stride, double* sums) {
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sums[i] = sum += g[i * stride];
}

// ---- delta_wy -----------------------------------------------------------------------------------
// One chunk of `n` rows from row0, all value heads of one key head.
void wy_chunk(const TwinCall& call, size_t row0, size_t n, size_t kh) {
  const auto& p = params<DeltaWy>(call);
  const size_t key_row = p.key_heads * kDim, heads = p.value_heads, value_row = heads * kDim;
  const float* q = arg<float>(call, 0) + row0 * key_row + kh * kDim;
  const float* k = arg<float>(call, 1) + row0 * key_row + kh * kDim;
  constexpr size_t kBoth = 2 * kDim;  // columns of w, then of u
  float* flipped = scratch(0, kDim * kChunk + 3 * kChunk * kChunk + kChunk * kBoth);
  float* kk = flipped + kDim * kChunk;  // [n][kChunk], as the next two
  float* qk = kk + kChunk * kChunk;
  float* a = qk + kChunk * kChunk;
  float* x = a + kChunk * kChunk;  // [n][kBoth]
  flip(k, key_row, kChunk, kDim, flipped, kChunk, n);
  for (size_t i = 0; i < n; i += kChunk / 2) {  // the upper right quarter is not used
    const size_t m = std::min(n - i, kChunk / 2), columns = i + kChunk / 2;
    multiply<Into::set>(m, columns, kDim, k + i * key_row, key_row, 1, flipped, kChunk,
                        kk + i * kChunk, kChunk);
    multiply<Into::set>(m, columns, kDim, q + i * key_row, key_row, 1, flipped, kChunk,
                        qk + i * kChunk, kChunk);
  }
  const size_t per_key = heads / p.key_heads;
  for (size_t h = kh * per_key; h < (kh + 1) * per_key; ++h) {
    const float* v = arg<float>(call, 2) + row0 * value_row + h * kDim;
    const float* beta = arg<float>(call, 4) + row0 * heads + h;
    double sums[kChunk];
    decay_sums(arg<float>(call, 3) + row0 * heads + h, n, heads, sums);
    for (size_t i = 0; i < n; ++i) {
      float decay[kChunk] = {};
      for (size_t j = 0; j <= i; ++j) decay[j] = float(sums[i] - sums[j]);
      for (size_t j = 0; j <= i; j += kWide) store_vec(decay + j, exp_vec(load_vec(decay + j)));
      float* scores = arg<float>(call, 7) + ((row0 + i) * heads + h) * kChunk;
      for (size_t j = 0; j <= i; ++j) {
        scores[j] = decay[j] * qk[i * kChunk + j];
        a[i * kChunk + j] = beta[i * heads] * decay[j] * kk[i * kChunk + j];
      }
      for (size_t j = i + 1; j < kChunk; ++j) scores[j] = 0.0f;
      const float grown = beta[i * heads] * std::exp(float(sums[i]));
      for (size_t c = 0; c < kDim; ++c) {
        x[i * kBoth + c] = grown * k[i * key_row + c];
        x[i * kBoth + kDim + c] = beta[i * heads] * v[i * value_row + c];
      }
    }
    // Forward substitution, 4 rows at a time: first all earlier rows, then the 4 among themselves.
    for (size_t i0 = 0; i0 < n; i0 += kStripRows) {
      const size_t m = std::min(kStripRows, n - i0);
      multiply<Into::subtract>(m, kBoth, i0, a + i0 * kChunk, kChunk, 1, x, kBoth, x + i0 * kBoth,
                               kBoth);
      for (size_t i = i0 + 1; i < i0 + m; ++i) {
        for (size_t j = i0; j < i; ++j) {
          const float factor = a[i * kChunk + j];
          for (size_t c = 0; c < kBoth; ++c) x[i * kBoth + c] -= factor * x[j * kBoth + c];
        }
      }
    }
    for (size_t i = 0; i < n; ++i) {
      const size_t to = (row0 + i) * value_row + h * kDim;
      std::memcpy(arg<float>(call, 5) + to, x + i * kBoth, kDim * sizeof(float));
      std::memcpy(arg<float>(call, 6) + to, x + i * kBoth + kDim, kDim * sizeof(float));
    }
  }
}

// ---- delta_scan ---------------------------------------------------------------------------------
constexpr size_t kScanColumns = 32;  // value columns of a job: their state fits the first cache

// All chunks of one value head's columns v0 .. v0 + kScanColumns - 1. The state lies as [k][v].
void scan_columns(const TwinCall& call, size_t h, size_t v0) {
  const auto& p = params<DeltaScan>(call);
  const size_t key_row = p.key_heads * kDim, heads = p.value_heads, value_row = heads * kDim;
  const size_t kh = h / (heads / p.key_heads), value_at = h * kDim + v0;
  const float *q = arg<float>(call, 0) + kh * kDim, *k = arg<float>(call, 1) + kh * kDim;
  const float *w = arg<float>(call, 3) + h * kDim, *u = arg<float>(call, 4) + value_at;
  const float* scores = arg<float>(call, 5) + h * kChunk;
  const float* state_in = arg<float>(call, 6) + (h * kDim + v0) * kDim;
  float* state_out = arg<float>(call, 7) + (h * kDim + v0) * kDim;
  float* o = arg<float>(call, 8) + value_at;
  constexpr size_t kV = kScanColumns;
  float* s = scratch(0, (kDim + 2 * kChunk) * kV);
  float* d = s + kDim * kV;  // [n][kV]: what each row writes
  float* out = d + kChunk * kV;
  flip(state_in, kDim, kV, kDim, s, kV, kV);
  for (size_t row0 = 0; row0 < p.rows; row0 += kChunk) {
    const size_t n = std::min<size_t>(kChunk, p.rows - row0);
    double sums[kChunk];
    decay_sums(arg<float>(call, 2) + row0 * heads + h, n, heads, sums);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(d + i * kV, u + (row0 + i) * value_row, kV * sizeof(float));
    }
    multiply<Into::subtract>(n, kV, kDim, w + row0 * value_row, value_row, 1, s, kV, d, kV);
    multiply<Into::set>(n, kV, kDim, q + row0 * key_row, key_row, 1, s, kV, out, kV);
    for (size_t i = 0; i < n; ++i) {
      const float grown = std::exp(float(sums[i]));
      for (size_t v = 0; v < kV; ++v) out[i * kV + v] *= grown;
    }
    multiply<Into::add>(n, kV, n, scores + row0 * heads * kChunk, heads * kChunk, 1, d, kV, out, kV,
                        true);
    const float kept = std::exp(float(sums[n - 1]));
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(o + (row0 + i) * value_row, out + i * kV, kV * sizeof(float));
      const float rest = std::exp(float(sums[n - 1] - sums[i]));
      for (size_t v = 0; v < kV; ++v) d[i * kV + v] *= rest;
    }
    for (size_t i = 0; i < kDim * kV; ++i) s[i] *= kept;
    multiply<Into::add>(kDim, kV, n, k + row0 * key_row, 1, key_row, d, kV, s, kV);
  }
  flip(s, kV, kDim, kV, state_out, kDim, kDim);
}

}  // namespace

void delta_step(const TwinCall& call) {
  const auto& p = params<DeltaStep>(call);
  const Step& now = step(call);
  const uint32_t rows = std::min(p.rows, now.rows);
  uint32_t begin[LILY_MAX_ROWS + 1], runs = 0;  // rows of one slot are neighbours
  for (uint32_t r = 0; r < rows; ++r) {
    if (r == 0 || now.slot[r] != now.slot[r - 1]) begin[runs++] = r;
  }
  begin[runs] = rows;
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, size_t(runs) * p.value_heads, [&](size_t job) {
      const size_t run = job / p.value_heads;
      step_head<Act>(call, now.slot[begin[run]], begin[run], begin[run + 1],
                     uint32_t(job % p.value_heads));
    });
  });
}

void delta_out(const TwinCall& call) {
  constexpr uint32_t kBlock = 64;  // outputs of a job, a multiple of LILY_OUT_ROWS
  const auto& p = params<DeltaOut>(call);
  const uint32_t rows = std::min(p.rows, step(call).rows), n = p.w.n;
  const size_t stride = prepared_floats(p.w);
  float *scaled = scratch(0, p.w.k), *prepared = scratch(1, rows * stride);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t h = 0; h < p.heads; ++h) {
        const size_t head = size_t(r) * p.heads + h;
        float sum = 0.0f;
        for (uint32_t i = 0; i < p.head_parts; ++i) {
          sum += arg<float>(call, 3)[head * p.head_parts + i];
        }
        const float inv = 1.0f / std::sqrt(sum / float(kDim) + p.eps);
        const Act* u = arg<Act>(call, 2) + head * kDim;
        for (size_t i = 0; i < kDim; ++i) scaled[h * kDim + i] = load(u, i) * inv;
      }
      prepare(p.w, scaled, prepared + r * stride);
    }
    parallel(call, (n + kBlock - 1) / kBlock, [&](size_t job) {
      const uint32_t n0 = uint32_t(job) * kBlock, n1 = std::min(n0 + kBlock, n);
      float y[LILY_MAX_ROWS * kBlock];
      linear_rows(p.w, arg<uint32_t>(call, 0), arg<uint32_t>(call, 1), n0, n1, rows, prepared, y,
                  kBlock);
      for (uint32_t r = 0; r < rows; ++r) {
        Act* x = arg<Act>(call, 4) + size_t(r) * n;
        float* ssq = arg<float>(call, 5) + size_t(r) * (n / LILY_OUT_ROWS);
        add_rows(x, y + r * kBlock, ssq, n0, n1);
      }
    });
  });
}

void delta_prep(const TwinCall& call) {
  constexpr size_t kRows = 64;  // rows of a job
  const auto& p = params<DeltaPrep>(call);
  const size_t heads = 2 * p.key_heads + p.value_heads, channels = heads * kDim;
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    const Act *proj = arg<Act>(call, 0), *conv_in = arg<Act>(call, 4);
    parallel(call, (p.rows + kRows - 1) / kRows * heads, [&](size_t job) {
      const size_t head = job % heads, r0 = job / heads * kRows;
      const size_t end = std::min<size_t>(r0 + kRows, p.rows);
      const int part = head < p.key_heads ? 0 : head < 2 * p.key_heads ? 1 : 2;  // q, k, v
      const size_t own_heads = part == 2 ? p.value_heads : p.key_heads;
      const size_t h = head - part * p.key_heads;
      float* to = arg<float>(call, 6 + part) + h * kDim;
      HeadConv conv;
      load_taps(conv, arg<float>(call, 1) + LILY_CONV_WIDTH * head * kDim);
      for (size_t i = 0; i < kKept; ++i) {
        widen_head(r0 + i < kKept ? conv_in + (r0 + i) * channels + head * kDim
                                  : proj + (r0 + i - kKept) * p.proj_stride + head * kDim,
                   conv.past[i]);
      }
      for (size_t r = r0; r < end; ++r) {
        const Act* at = proj + r * p.proj_stride;
        float* y = to + r * own_heads * kDim;
        conv_row(conv, at + head * kDim, y);
        if (part < 2) {
          normalize_head(y, part == 0 ? kQueryScale : 1.0f);
        } else {
          const float a = load(at, p.a_offset + h) + arg<float>(call, 3)[h];
          arg<float>(call, 9)[r * own_heads + h] = arg<float>(call, 2)[h] * softplus(a);
          arg<float>(call, 10)[r * own_heads + h] = sigmoid(load(at, p.b_offset + h));
        }
      }
      if (end == p.rows) {
        for (size_t i = 0; i < kKept; ++i) {
          Act* conv_out = arg<Act>(call, 5) + i * channels + head * kDim;
          for (size_t c = 0; c < kDim; ++c) store(conv_out, c, conv.past[i][c]);
        }
      }
    });
  });
}

void delta_wy(const TwinCall& call) {
  const auto& p = params<DeltaWy>(call);
  const size_t chunks = (p.rows + kChunk - 1) / kChunk;
  parallel(call, chunks * p.key_heads, [&](size_t job) {
    const size_t row0 = job / p.key_heads * kChunk;
    wy_chunk(call, row0, std::min<size_t>(kChunk, p.rows - row0), job % p.key_heads);
  });
}

void delta_scan(const TwinCall& call) {
  constexpr size_t kBlocks = kDim / kScanColumns;
  parallel(call, params<DeltaScan>(call).value_heads * kBlocks,
           [&](size_t job) { scan_columns(call, job / kBlocks, job % kBlocks * kScanColumns); });
}

void gated_norm(const TwinCall& call) {
  const auto& p = params<GatedNorm>(call);
  const float* gain = arg<float>(call, 2);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.rows, [&](size_t r) {
      for (size_t h = 0; h < p.heads; ++h) {
        const float* o = arg<float>(call, 0) + (r * p.heads + h) * kDim;
        float gate[kDim];
        widen_head(arg<Act>(call, 1) + r * p.proj_stride + p.z_offset + h * kDim, gate);
        const float inv = 1.0f / std::sqrt(dot_head(o, o) / float(kDim) + p.eps);
        for (size_t i = 0; i < kDim; i += kWide) {
          store_vec(gate + i,
                    load_vec(o + i) * inv * load_vec(gain + i) * silu_vec(load_vec(gate + i)));
        }
        Act* y = arg<Act>(call, 3) + (r * p.heads + h) * kDim;
        for (size_t i = 0; i < kDim; ++i) store(y, i, gate[i]);
      }
    });
  });
}

}  // namespace LILY_CPU_NS
}  // namespace lily
