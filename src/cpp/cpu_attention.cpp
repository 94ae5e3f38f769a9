// cpu_attention.cpp: native twins of attn_step, attn_combine, attn_out, qkv_rope and flash.
#include <type_traits>

#include "cpu_matrix.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

constexpr uint32_t kDim = LILY_HEAD_DIM, kSplit = LILY_SPLIT, kPartial = LILY_PARTIAL;
constexpr uint32_t kMaxRatio = 16;  // query heads of a KV head

using matrix::broadcast;
using matrix::kWide;
using matrix::load_vec;
using matrix::store_vec;
using matrix::sum_lanes;
using matrix::VecF;
using matrix::VecI;

// ---- softmax ------------------------------------------------------------------------------------
// The largest of n values, a multiple of the width, and top.
inline float max_of(const float* p, uint32_t n, float top) {
  VecF best = load_vec(p);
  for (uint32_t i = kWide; i < n; i += kWide) {
    const VecF v = load_vec(p + i);
    best = v > best ? v : best;
  }
  for (uint32_t i = 0; i < kWide; ++i) top = best[i] > top ? best[i] : top;
  return top;
}
// e^x for x <= 88; 0 below -87. n = x / ln 2, rounded by adding 1.5 * 2^23, whose low bits hold n.
inline VecF exp_vec(VecF x) {
  const VecF least = broadcast(-87.0f);
  const VecF c = x > least ? x : least;
  const VecF shifted = c * 1.44269504f + 12582912.0f;
  const VecF n = shifted - 12582912.0f;
  const VecF r = c - n * 0.693145752f - n * 1.42860677e-6f;
  VecF e = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
  e = e * r + 1.0f / 120.0f;
  e = e * r + 1.0f / 24.0f;
  e = e * r + 1.0f / 6.0f;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  const VecI power = (reinterpret_cast<VecI>(shifted) - 0x4b400000 + 127) << 23;
  return x > least ? e * reinterpret_cast<VecF>(power) : VecF{};
}
// p[i] = e^(p[i] - top) for n values, a multiple of the width; their sum.
inline float exp_sum(float* p, uint32_t n, float top) {
  VecF sum = {};
  for (uint32_t i = 0; i < n; i += kWide) {
    const VecF e = exp_vec(load_vec(p + i) - top);
    store_vec(p + i, e);
    sum += e;
  }
  return sum_lanes(sum);
}

template <typename Act>
void to_floats(const Act* from, float* to) {  // one head
  for (uint32_t i = 0; i < kDim; ++i) to[i] = load(from, i);
}

// ---- common -------------------------------------------------------------------------------------
// sin and cos of a position's angles.
struct Turn {
  float sin[kDim / 2], cos[kDim / 2];
};
void make_turn(Turn& turn, uint32_t position, const float* inv_freq, uint32_t rotary) {
  for (uint32_t i = 0; i < rotary / 2; ++i) {
    const float angle = float(position) * inv_freq[i];
    turn.sin[i] = std::sin(angle);
    turn.cos[i] = std::cos(angle);
  }
}
// One head: RMS norm with gain, then rope. Never inlined: a new key has the same bits in every job
// that needs it.
template <typename Act>
__attribute__((noinline)) void norm_rope(const Act* x, const float* gain, const Turn& turn,
                                         uint32_t rotary, float eps, float* y) {
  to_floats(x, y);
  VecF sum = {};
  for (uint32_t i = 0; i < kDim; i += kWide) sum += load_vec(y + i) * load_vec(y + i);
  const float inv = 1.0f / std::sqrt(sum_lanes(sum) / float(kDim) + eps);
  for (uint32_t i = 0; i < kDim; ++i) y[i] = y[i] * inv * gain[i];
  const uint32_t pairs = rotary / 2;
  for (uint32_t i = 0; i < pairs; ++i) {
    const float a = y[i], b = y[i + pairs];
    y[i] = a * turn.cos[i] - b * turn.sin[i];
    y[i + pairs] = b * turn.cos[i] + a * turn.sin[i];
  }
}
// Keys of a KV head in a block of the slot; its values follow kv_heads * LILY_KV_BLOCK * kDim further.
template <typename Act>
Act* kv_keys(const TwinCall& call, uint32_t slot, uint32_t block, uint32_t layer, uint32_t kv_heads,
             uint32_t kv_head) {
  return reinterpret_cast<Act*>(kv_block(call, slot, block)) +
         (size_t(2 * layer) * kv_heads + kv_head) * LILY_KV_BLOCK * kDim;
}

// ---- attn_step ----------------------------------------------------------------------------------
constexpr uint32_t kKeys = 4;  // keys of a split taken together

template <typename Act>
void step_split(const TwinCall& call, uint32_t row, uint32_t kv_head, uint32_t split) {
  const AttnStep& p = params<AttnStep>(call);
  const Step& s = step(call);
  const Act* proj = arg<Act>(call, 0);
  const float *q_gain = arg<float>(call, 1), *k_gain = arg<float>(call, 2);
  const float* inv_freq = arg<float>(call, 3);
  const uint32_t position = s.position[row], start = split * kSplit, slot = s.slot[row];
  if (start > position) return;
  const uint32_t ratio = p.heads / p.kv_heads;
  const uint32_t n = position - start < kSplit ? position - start + 1 : kSplit;
  // Keys from the slot's first row on are appended by other jobs of this launch, so they come from
  // proj; the first `cached` keys of the split come from the cache.
  uint32_t first = row;
  while (first > 0 && s.slot[first - 1] == slot) --first;
  const uint32_t p0 = s.position[first];
  const uint32_t cached = p0 <= start ? 0 : p0 - start < n ? p0 - start : n;
  Act* keys = kv_keys<Act>(call, slot, start / LILY_KV_BLOCK, p.layer, p.kv_heads, kv_head) +
              size_t(start % LILY_KV_BLOCK) * kDim;
  Act* values = keys + size_t(p.kv_heads) * LILY_KV_BLOCK * kDim;
  const auto proj_row = [&](uint32_t i) {
    return proj + size_t(first + (start + i - p0)) * p.proj_stride;
  };

  alignas(64) float q[kMaxRatio][kDim], scores[kMaxRatio][kSplit], acc[kMaxRatio][kDim];
  alignas(64) float rows[kKeys][kDim] = {};  // past n: zeros or earlier keys, scores unread
  Turn turn;
  make_turn(turn, position, inv_freq, p.rotary);
  for (uint32_t h = 0; h < ratio; ++h) {
    norm_rope(proj + size_t(row) * p.proj_stride + size_t(kv_head * ratio + h) * 2 * kDim, q_gain,
              turn, p.rotary, p.eps, q[h]);
    for (float& v : q[h]) v *= p.scale;
  }

  for (uint32_t b = 0; b < n; b += kKeys) {
    for (uint32_t j = 0; j < kKeys && b + j < n; ++j) {
      const uint32_t i = b + j;
      if (i < cached) {
        to_floats(keys + size_t(i) * kDim, rows[j]);
        continue;
      }
      make_turn(turn, start + i, inv_freq, p.rotary);
      norm_rope(proj_row(i) + p.k_offset + kv_head * kDim, k_gain, turn, p.rotary, p.eps, rows[j]);
      for (float& v : rows[j]) v = rounded(keys, v);  // as the cache holds it
      if (start + i == position) {                    // the row's own: this job appends it
        for (uint32_t d = 0; d < kDim; ++d) store(keys, size_t(i) * kDim + d, rows[j][d]);
        std::memcpy(values + size_t(i) * kDim, proj_row(i) + p.v_offset + kv_head * kDim,
                    kDim * sizeof(Act));
      }
    }
    for (uint32_t h = 0; h < ratio; ++h) {
      VecF dot[kKeys] = {};
      for (uint32_t d = 0; d < kDim; d += kWide) {
        const VecF qd = load_vec(q[h] + d);
        for (uint32_t j = 0; j < kKeys; ++j) dot[j] += qd * load_vec(rows[j] + d);
      }
      for (uint32_t j = 0; j < kKeys; ++j) scores[h][b + j] = sum_lanes(dot[j]);
    }
  }

  float* out = arg<float>(call, 4) +
               ((size_t(row) * p.heads + kv_head * ratio) * p.splits + split) * kPartial;
  for (uint32_t h = 0; h < ratio; ++h) {
    for (uint32_t i = n; i < kSplit; ++i) scores[h][i] = -INFINITY;
    const float top = max_of(scores[h], kSplit, -INFINITY);
    float* o = out + size_t(h) * p.splits * kPartial;
    o[0] = top;
    o[1] = exp_sum(scores[h], kSplit, top);
    std::memset(acc[h], 0, sizeof(acc[h]));
  }
  for (uint32_t b = 0; b < n; b += kKeys) {
    for (uint32_t j = 0; j < kKeys; ++j) {
      const uint32_t i = b + j < n ? b + j : n - 1;  // past n: weight 0
      to_floats(i < cached ? values + size_t(i) * kDim : proj_row(i) + p.v_offset + kv_head * kDim,
                rows[j]);
    }
    for (uint32_t h = 0; h < ratio; ++h) {
      const float* w = scores[h] + b;
      for (uint32_t d = 0; d < kDim; d += kWide) {
        VecF a = load_vec(acc[h] + d);
        for (uint32_t j = 0; j < kKeys; ++j) a += w[j] * load_vec(rows[j] + d);
        store_vec(acc[h] + d, a);
      }
    }
  }
  for (uint32_t h = 0; h < ratio; ++h) {
    std::memcpy(out + size_t(h) * p.splits * kPartial + 2, acc[h], sizeof(acc[h]));
  }
}

// ---- combine ------------------------------------------------------------------------------------
// The partials of a head's n splits as one, in their order.
__attribute__((noinline)) void combine(const float* parts, uint32_t n, float& top, float& total,
                                       float* acc) {
  top = parts[0];
  for (uint32_t s = 1; s < n; ++s) {
    const float m = parts[size_t(s) * kPartial];
    top = m > top ? m : top;
  }
  total = 0.0f;
  for (uint32_t d = 0; d < kDim; ++d) acc[d] = 0.0f;
  for (uint32_t s = 0; s < n; ++s) {
    const float* part = parts + size_t(s) * kPartial;
    const float w = std::exp(part[0] - top);
    total += part[1] * w;
    for (uint32_t d = 0; d < kDim; ++d) acc[d] += part[2 + d] * w;
  }
}
uint32_t valid_splits(const TwinCall& call, uint32_t row) {
  return step(call).position[row] / kSplit + 1;
}
uint32_t valid_rows(const TwinCall& call, uint32_t rows) {
  return step(call).rows < rows ? step(call).rows : rows;
}
// o / total * sigmoid(gate) of one head.
template <typename Act>
void gated(const float* o, float total, const Act* gate, float* y) {
  alignas(64) float g[kDim];
  to_floats(gate, g);
  const float inv = 1.0f / total;
  for (uint32_t d = 0; d < kDim; d += kWide) {
    // Beyond +-80 the sigmoid is 1 or 0 to fp32; the bound keeps exp in range.
    const VecF x = -load_vec(g + d), most = broadcast(80.0f);
    store_vec(y + d, load_vec(o + d) * inv / (exp_vec(x < most ? x : most) + 1.0f));
  }
}

// ---- flash --------------------------------------------------------------------------------------
// A job takes up to kRows (query, head) pairs of one KV head over all their keys, kBlock at a time.
// Both products are C[rows][n] += A[rows][k] B[k][n] with B packed in panels of kPanel columns.
constexpr uint32_t kRows = 64, kBlock = 64, kPanel = 2 * kWide;
constexpr uint32_t kTileRows = kWide == 16 ? 8 : 4;  // accumulators that fit the registers

void multiply(const float* a, uint32_t lda, const float* b, float* c, uint32_t ldc, uint32_t rows,
              uint32_t n, uint32_t k) {
  for (uint32_t n0 = 0; n0 < n; n0 += kPanel, b += size_t(k) * kPanel) {
    for (uint32_t r = 0; r < rows; r += kTileRows) {
      const float* ar = a + size_t(r) * lda;
      float* cr = c + size_t(r) * ldc + n0;
      VecF acc[kTileRows][2];
      for (uint32_t i = 0; i < kTileRows; ++i) {
        for (uint32_t j = 0; j < 2; ++j) acc[i][j] = load_vec(cr + size_t(i) * ldc + j * kWide);
      }
      for (uint32_t x = 0; x < k; ++x) {
        const VecF b0 = load_vec(b + size_t(x) * kPanel);
        const VecF b1 = load_vec(b + size_t(x) * kPanel + kWide);
        for (uint32_t i = 0; i < kTileRows; ++i) {
          const float ai = ar[size_t(i) * lda + x];
          acc[i][0] += ai * b0;
          acc[i][1] += ai * b1;
        }
      }
      for (uint32_t i = 0; i < kTileRows; ++i) {
        for (uint32_t j = 0; j < 2; ++j) store_vec(cr + size_t(i) * ldc + j * kWide, acc[i][j]);
      }
    }
  }
}
// Keys as B[dim][key], values as B[key][dim]; past `valid` zeros, whatever unused memory holds.
template <typename Act>
void pack_keys(const Act* keys, uint32_t valid, float* to) {
  for (uint32_t n0 = 0; n0 < kBlock; n0 += kPanel, to += size_t(kDim) * kPanel) {
    for (uint32_t d = 0; d < kDim; ++d) {
      for (uint32_t j = 0; j < kPanel; ++j) {
        to[size_t(d) * kPanel + j] = n0 + j < valid ? load(keys, size_t(n0 + j) * kDim + d) : 0.0f;
      }
    }
  }
}
template <typename Act>
void pack_values(const Act* values, uint32_t valid, float* to) {
  for (uint32_t d0 = 0; d0 < kDim; d0 += kPanel, to += size_t(kBlock) * kPanel) {
    for (uint32_t j = 0; j < kBlock; ++j) {
      for (uint32_t d = 0; d < kPanel; ++d) {
        to[size_t(j) * kPanel + d] = j < valid ? load(values, size_t(j) * kDim + d0 + d) : 0.0f;
      }
    }
  }
}

template <typename Act>
void flash_block(const TwinCall& call, uint32_t kv_head, uint32_t q0, uint32_t queries) {
  const Flash& p = params<Flash>(call);
  const uint32_t ratio = p.heads / p.kv_heads, rows = queries * ratio;
  const uint32_t padded = (rows + kTileRows - 1) / kTileRows * kTileRows;
  const uint32_t last = p.position + q0 + queries - 1;
  float* q = scratch(2, padded * kDim);
  float* o = scratch(3, padded * kDim);
  float* weights = scratch(4, padded * kBlock);
  float* keys = scratch(5, kBlock * kDim);
  float* values = scratch(6, kBlock * kDim);
  float top[kRows], total[kRows];
  for (uint32_t i = 0; i < padded * kDim; ++i) q[i] = o[i] = 0.0f;
  for (uint32_t r = 0; r < rows; ++r) {
    const size_t head = size_t(q0 + r / ratio) * p.heads + kv_head * ratio + r % ratio;
    to_floats(arg<Act>(call, 0) + head * kDim, q + r * kDim);
    for (uint32_t d = 0; d < kDim; ++d) q[r * kDim + d] *= p.scale;
    top[r] = -INFINITY;
    total[r] = 0.0f;
  }
  for (uint32_t key0 = 0; key0 <= last; key0 += kBlock) {
    const Act* k = kv_keys<Act>(call, p.slot, key0 / LILY_KV_BLOCK, p.layer, p.kv_heads, kv_head) +
                   size_t(key0 % LILY_KV_BLOCK) * kDim;
    pack_keys(k, last - key0 + 1, keys);
    pack_values(k + size_t(p.kv_heads) * LILY_KV_BLOCK * kDim, last - key0 + 1, values);
    std::memset(weights, 0, padded * kBlock * sizeof(float));
    multiply(q, kDim, keys, weights, kBlock, padded, kBlock, kDim);
    for (uint32_t r = 0; r < rows; ++r) {
      float* w = weights + r * kBlock;
      const uint32_t position = p.position + q0 + r / ratio;
      const uint32_t seen = position < key0 ? 0 : position - key0 + 1;
      for (uint32_t j = seen; j < kBlock; ++j) w[j] = -INFINITY;
      // Key 0 is seen by every row, so m is finite.
      const float m = max_of(w, kBlock, top[r]), factor = std::exp(top[r] - m);
      total[r] = total[r] * factor + exp_sum(w, kBlock, m);
      top[r] = m;
      for (uint32_t d = 0; d < kDim; ++d) o[r * kDim + d] *= factor;
    }
    multiply(weights, kBlock, values, o, kDim, padded, kDim, kBlock);
  }
  for (uint32_t r = 0; r < rows; ++r) {
    const size_t at = q0 + r / ratio;
    const uint32_t head = kv_head * ratio + r % ratio;
    float y[kDim];
    gated(o + r * kDim, total[r],
          arg<Act>(call, 1) + at * p.proj_stride + size_t(2 * head + 1) * kDim, y);
    Act* to = arg<Act>(call, 2) + (at * p.heads + head) * kDim;
    for (uint32_t d = 0; d < kDim; ++d) store(to, d, y[d]);
  }
}

}  // namespace

void attn_step(const TwinCall& call) {
  const AttnStep& p = params<AttnStep>(call);
  const uint32_t per_row = p.kv_heads * p.splits;
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, size_t(valid_rows(call, p.rows)) * per_row, [&](size_t i) {
      const uint32_t rest = uint32_t(i % per_row);
      step_split<Act>(call, uint32_t(i / per_row), rest / p.splits, rest % p.splits);
    });
  });
}

void attn_combine(const TwinCall& call) {
  const AttnCombine& p = params<AttnCombine>(call);
  parallel(call, size_t(valid_rows(call, p.rows)) * p.heads, [&](size_t i) {
    float* out = arg<float>(call, 1) + i * kPartial;
    combine(arg<float>(call, 0) + i * p.splits * kPartial,
            valid_splits(call, uint32_t(i / p.heads)), out[0], out[1], out + 2);
  });
}

void attn_out(const TwinCall& call) {
  const AttnOut& p = params<AttnOut>(call);
  const uint32_t rows = valid_rows(call, p.rows), k = p.w.k;
  const size_t stride = prepared_floats(p.w);
  float* o = scratch(0, size_t(rows) * k);
  float* prepared = scratch(1, rows * stride);
  constexpr uint32_t kOut = 64;  // weight rows of one job
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, size_t(rows) * p.heads, [&](size_t i) {
      const uint32_t row = uint32_t(i / p.heads), head = uint32_t(i % p.heads);
      float top, total;
      alignas(64) float acc[kDim];
      combine(arg<float>(call, 2) + i * p.splits * kPartial,
              p.combined ? 1 : valid_splits(call, row), top, total, acc);
      gated(acc, total,
            arg<Act>(call, 3) + size_t(row) * p.proj_stride + size_t(2 * head + 1) * kDim,
            o + i * kDim);
    });
    for (uint32_t r = 0; r < rows; ++r) prepare(p.w, o + size_t(r) * k, prepared + r * stride);
    parallel(call, (p.w.n + kOut - 1) / kOut, [&](size_t job) {
      const uint32_t n0 = uint32_t(job) * kOut, n1 = n0 + kOut < p.w.n ? n0 + kOut : p.w.n;
      float y[LILY_MAX_ROWS * kOut];
      linear_rows(p.w, arg<uint32_t>(call, 0), arg<uint32_t>(call, 1), n0, n1, rows, prepared, y,
                  kOut);
      for (uint32_t r = 0; r < rows; ++r) {
        Act* x = arg<Act>(call, 4) + size_t(r) * p.w.n;
        float* ssq = arg<float>(call, 5) + size_t(r) * (p.w.n / LILY_OUT_ROWS);
        add_rows(x, y + r * kOut, ssq, n0, n1);
      }
    });
  });
}

void qkv_rope(const TwinCall& call) {
  const QkvRope& p = params<QkvRope>(call);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.rows, [&](size_t row) {
      const uint32_t position = p.position + uint32_t(row);
      const Act* from = arg<Act>(call, 0) + row * p.proj_stride;
      Turn turn;
      make_turn(turn, position, arg<float>(call, 3), p.rotary);
      float y[kDim];
      for (uint32_t h = 0; h < p.heads; ++h) {
        norm_rope(from + size_t(h) * 2 * kDim, arg<float>(call, 1), turn, p.rotary, p.eps, y);
        Act* q = arg<Act>(call, 4) + (row * p.heads + h) * kDim;
        for (uint32_t d = 0; d < kDim; ++d) store(q, d, y[d]);
      }
      for (uint32_t h = 0; h < p.kv_heads; ++h) {
        norm_rope(from + p.k_offset + h * kDim, arg<float>(call, 2), turn, p.rotary, p.eps, y);
        Act* k = kv_keys<Act>(call, p.slot, position / LILY_KV_BLOCK, p.layer, p.kv_heads, h) +
                 size_t(position % LILY_KV_BLOCK) * kDim;
        for (uint32_t d = 0; d < kDim; ++d) store(k, d, y[d]);
        std::memcpy(k + size_t(p.kv_heads) * LILY_KV_BLOCK * kDim, from + p.v_offset + h * kDim,
                    kDim * sizeof(Act));
      }
    });
  });
}

void flash(const TwinCall& call) {
  const Flash& p = params<Flash>(call);
  const uint32_t queries = kRows / (p.heads / p.kv_heads),
                 blocks = (p.rows + queries - 1) / queries;
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, size_t(p.kv_heads) * blocks, [&](size_t i) {
      const uint32_t q0 = uint32_t(i / p.kv_heads) * queries;
      flash_block<Act>(call, uint32_t(i % p.kv_heads), q0,
                       queries < p.rows - q0 ? queries : p.rows - q0);
    });
  });
}

}  // namespace LILY_CPU_NS
}  // namespace lily
