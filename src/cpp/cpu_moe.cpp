// cpu_moe.cpp: twins of the mixture of experts.
#include <algorithm>
#include <type_traits>

#include "cpu_matrix.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

// ---- the router's choice ----
// Keys order as the logits do: NaN counts as -inf, -0 as 0; 0 lies below every key.
inline uint32_t logit_key(float l) {
  const uint32_t u = float_to_bits(l != l ? -INFINITY : l == 0.0f ? 0.0f : l);
  return u ^ ((u >> 31) ? 0xffffffffu : 0x80000000u);
}
inline float key_logit(uint32_t key) {
  return bits_to_float(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}
// The row's top_k entries, then the shared one where `shared`.
void choose(const float* logits, uint32_t experts, uint32_t top_k, bool shared, Route* route) {
  uint32_t keys[1024];
  for (uint32_t e = 0; e < experts; ++e) keys[e] = logit_key(logits[e]);
  float weights[LILY_MAX_TOP_K], first = 0.0f, sum = 0.0f;
  for (uint32_t j = 0; j < top_k; ++j) {
    uint32_t top = 0;
    for (uint32_t e = 0; e < experts; ++e) top = std::max(top, keys[e]);
    uint32_t id = 0;
    while (keys[id] != top) ++id;
    keys[id] = 0;
    const float l = key_logit(top);
    if (j == 0) first = l;
    weights[j] = std::exp(l - first);
    sum += weights[j];
    route[j].expert = id;
  }
  for (uint32_t j = 0; j < top_k; ++j) route[j].weight = weights[j] / sum;
  if (shared) route[top_k] = {experts, sigmoid(logits[experts])};
}

constexpr uint32_t kUnits = 64;  // units of an expert_up job
constexpr uint32_t kOuts = 64;   // outputs of an expert_down job, a multiple of LILY_OUT_ROWS

}  // namespace

void expert_up(const TwinCall& call) {
  const auto& p = params<ExpertUp>(call);
  const uint32_t rows = std::min(p.rows, step(call).rows), end = p.slot_begin + p.slots;
  const bool routed = p.slot_begin < p.top_k;
  const bool shared = end > p.top_k;
  const uint32_t k = routed ? p.routed.k : p.shared.k;
  const size_t routed_floats = routed ? prepared_floats(p.routed) : 0;
  const size_t shared_floats = shared ? prepared_floats(p.shared) : 0;
  float* prepared = scratch(0, rows * (routed_floats + shared_floats));
  float inv[LILY_MAX_ROWS];
  Route routes[LILY_MAX_ROWS][LILY_MAX_TOP_K + 1];
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    const Act* x = arg<Act>(call, 4);
    const float* gain = arg<float>(call, 5);
    float* scaled = scratch(1, k);
    for (uint32_t r = 0; r < rows; ++r) {
      float sum = 0.0f;
      for (uint32_t i = 0; i < p.ssq_parts; ++i) {
        sum += arg<float>(call, 6)[size_t(r) * p.ssq_parts + i];
      }
      inv[r] = 1.0f / std::sqrt(sum / float(k) + p.eps);
      for (uint32_t i = 0; i < k; ++i) scaled[i] = load(x, size_t(r) * k + i) * gain[i];
      float* at = prepared + r * (routed_floats + shared_floats);
      if (routed) prepare(p.routed, scaled, at);
      if (shared) prepare(p.shared, scaled, at + routed_floats);
      choose(arg<float>(call, 7) + size_t(r) * p.logits_stride, p.experts, p.top_k, shared,
             routes[r]);
      Route* out = arg<Route>(call, 9) + size_t(r) * (p.top_k + 1);
      for (uint32_t s = p.slot_begin; s < end; ++s) out[s] = routes[r][s];
    }
    const uint32_t width = std::max(routed ? p.routed.n / 2 : 0, shared ? p.shared.n / 2 : 0);
    const uint32_t blocks = (width + kUnits - 1) / kUnits;
    parallel(call, size_t(rows) * p.slots * blocks, [&](size_t job) {
      const uint32_t r = uint32_t(job / blocks / p.slots);
      const uint32_t slot = p.slot_begin + uint32_t(job / blocks % p.slots);
      const bool is_shared = slot == p.top_k;
      const Linear& w = is_shared ? p.shared : p.routed;
      const uint64_t expert = is_shared ? 0 : routes[r][slot].expert;
      const uint32_t u0 = uint32_t(job % blocks) * kUnits, u1 = std::min(u0 + kUnits, w.n / 2);
      if (u0 >= u1) return;
      float y[2 * kUnits];
      linear_rows(w, matrix_codes(w, arg<uint32_t>(call, is_shared ? 2 : 0), expert),
                  matrix_pairs(w, arg<uint32_t>(call, is_shared ? 3 : 1), expert), 2 * u0, 2 * u1,
                  1,
                  prepared + r * (routed_floats + shared_floats) + (is_shared ? routed_floats : 0),
                  y, 2 * kUnits);
      Act* h = arg<Act>(call, 8) + (size_t(r) * (p.top_k + 1) + slot) * p.h_stride;
      for (uint32_t u = u0; u < u1; ++u) {
        const float gate = y[2 * (u - u0)] * inv[r], up = y[2 * (u - u0) + 1] * inv[r];
        store(h, u, silu(gate) * up);
      }
    });
  });
}

void expert_down(const TwinCall& call) {
  const auto& p = params<ExpertDown>(call);
  const uint32_t rows = std::min(p.rows, step(call).rows), end = p.slot_begin + p.slots;
  const uint32_t n = p.slot_begin < p.top_k ? p.routed.n : p.shared.n;
  const auto matrix = [&](uint32_t slot) -> const Linear& {
    return slot == p.top_k ? p.shared : p.routed;
  };
  size_t floats = 0;  // of a row's prepared vectors
  size_t offset[LILY_MAX_TOP_K + 1];
  for (uint32_t s = p.slot_begin; s < end; ++s) {
    offset[s] = floats;
    floats += prepared_floats(matrix(s));
  }
  float* prepared = scratch(0, rows * floats);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    float* wide = scratch(1, p.h_stride);
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t s = p.slot_begin; s < end; ++s) {
        const Act* h = arg<Act>(call, 4) + (size_t(r) * (p.top_k + 1) + s) * p.h_stride;
        for (uint32_t i = 0; i < matrix(s).k; ++i) wide[i] = load(h, i);
        prepare(matrix(s), wide, prepared + r * floats + offset[s]);
      }
    }
    const uint32_t blocks = (n + kOuts - 1) / kOuts;
    parallel(call, size_t(rows) * blocks, [&](size_t job) {
      const uint32_t r = uint32_t(job / blocks);
      const uint32_t n0 = uint32_t(job % blocks) * kOuts, n1 = std::min(n0 + kOuts, n);
      float acc[kOuts] = {}, y[kOuts];
      for (uint32_t s = p.slot_begin; s < end; ++s) {
        const bool is_shared = s == p.top_k;
        const Linear& w = matrix(s);
        const Route& route = arg<Route>(call, 5)[size_t(r) * (p.top_k + 1) + s];
        const uint64_t expert = is_shared ? 0 : std::min(route.expert, p.experts - 1);
        linear_rows(w, matrix_codes(w, arg<uint32_t>(call, is_shared ? 2 : 0), expert),
                    matrix_pairs(w, arg<uint32_t>(call, is_shared ? 3 : 1), expert), n0, n1, 1,
                    prepared + r * floats + offset[s], y, kOuts);
        for (uint32_t i = 0; i < n1 - n0; ++i) acc[i] += route.weight * y[i];
      }
      Act* x = arg<Act>(call, 6) + size_t(r) * n;
      float* ssq = arg<float>(call, 7) + size_t(r) * (n / LILY_OUT_ROWS);
      add_rows(x, acc, ssq, n0, n1);
    });
  });
}

void route_rows(const TwinCall& call) {
  const auto& p = params<RouteRows>(call);
  parallel(call, p.rows, [&](size_t r) {
    choose(arg<float>(call, 0) + r * p.logits_stride, p.experts, p.top_k, true,
           arg<Route>(call, 1) + r * (p.top_k + 1));
  });
}

void group_rows(const TwinCall& call) {
  const auto& p = params<GroupRows>(call);
  const Route* route = arg<Route>(call, 0);
  uint32_t* order = arg<uint32_t>(call, 1);
  uint32_t* offsets = arg<uint32_t>(call, 2);
  uint32_t* tiles = arg<uint32_t>(call, 3);
  const uint32_t routed = p.rows * p.top_k, pairs = routed + p.rows;
  const auto expert = [&](uint32_t pair) {
    return pair < routed ? std::min(route[pair + pair / p.top_k].expert, p.experts - 1) : p.experts;
  };
  uint32_t next[1025] = {};
  for (uint32_t i = 0; i < pairs; ++i) ++next[expert(i)];
  uint32_t begin = 0, tile = 0;
  for (uint32_t e = 0; e <= p.experts; ++e) {
    const uint32_t count = next[e];
    offsets[e] = next[e] = begin;
    for (uint32_t i = 0; i < count; i += p.tile, ++tile) {
      tiles[1 + 2 * tile] = e;
      tiles[2 + 2 * tile] = begin + i;
    }
    begin += count;
  }
  offsets[p.experts + 1] = pairs;
  tiles[0] = tile;
  for (uint32_t i = 0; i < pairs; ++i) order[next[expert(i)]++] = i;
}

void moe_combine(const TwinCall& call) {
  const auto& p = params<MoeCombine>(call);
  const float* gain = arg<float>(call, 2);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.rows, [&](size_t r) {
      constexpr uint32_t kBlock = 64;  // hidden is a multiple of it
      const Route* route = arg<Route>(call, 1) + r * (p.top_k + 1);
      Act* x = arg<Act>(call, 3) + r * p.hidden;
      Act* h = arg<Act>(call, 4) + r * p.hidden;
      float squares[kBlock] = {};
      for (uint32_t c = 0; c < p.hidden; c += kBlock) {
        float sum[kBlock] = {};
        for (uint32_t j = 0; j <= p.top_k; ++j) {
          const size_t pair = j < p.top_k ? r * p.top_k + j : size_t(p.rows) * p.top_k + r;
          const Act* down = arg<Act>(call, 0) + pair * p.hidden + c;
          for (uint32_t i = 0; i < kBlock; ++i) sum[i] += route[j].weight * load(down, i);
        }
        for (uint32_t i = 0; i < kBlock; ++i) {
          store(x, c + i, load(x, c + i) + sum[i]);
          squares[i] += load(x, c + i) * load(x, c + i);
        }
      }
      float square = 0.0f;
      for (float s : squares) square += s;
      const float inv = 1.0f / std::sqrt(square / float(p.hidden) + p.eps);
      for (uint32_t i = 0; i < p.hidden; ++i) store(h, i, load(x, i) * inv * gain[i]);
    });
  });
}

}  // namespace LILY_CPU_NS
}  // namespace lily
