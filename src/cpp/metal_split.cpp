// metal_split.cpp: the cost of a launch from its params, and the cuts that follow from it.
#include "metal_split.h"

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace lily {
namespace {

constexpr double kBytesPerSecond = 68e9, kFlopsPerSecond = 2.6e12;  // M1
constexpr double kBufferSeconds = 0.5;

template <typename P>
P params_of(const CommandList& list, const Launch& l) {
  P p;
  std::memcpy(&p, list.params.data() + l.params_offset, sizeof p);
  return p;
}

double matrix(const Linear& w, double rows) { return 2.0 * rows * w.n * w.k; }
// Scores and weighted values of one query over `keys` keys, all heads.
double attend(double heads, double keys) { return 4.0 * heads * LILY_HEAD_DIM * keys; }
constexpr double kState = double(LILY_DELTA_DIM) * LILY_DELTA_DIM;

}  // namespace

double launch_flops(const CommandList& list, const Launch& l) {
  switch (variants()[l.variant].op) {
    case Op::project: {
      const auto p = params_of<Project>(list, l);
      return matrix(p.w, p.rows);
    }
    case Op::delta_out: {
      const auto p = params_of<DeltaOut>(list, l);
      return matrix(p.w, p.rows);
    }
    case Op::attn_out: {
      const auto p = params_of<AttnOut>(list, l);
      return matrix(p.w, p.rows);
    }
    case Op::expert_up: {
      const auto p = params_of<ExpertUp>(list, l);
      return matrix(p.routed, double(p.rows) * p.top_k) + matrix(p.shared, p.rows);
    }
    case Op::expert_down: {
      const auto p = params_of<ExpertDown>(list, l);
      return matrix(p.routed, double(p.rows) * p.top_k) + matrix(p.shared, p.rows);
    }
    case Op::delta_step: {  // decay, two products with the state, its update
      const auto p = params_of<DeltaStep>(list, l);
      return 7 * kState * p.rows * p.value_heads;
    }
    case Op::attn_step: {
      const auto p = params_of<AttnStep>(list, l);
      return p.rows * attend(p.heads, double(p.splits) * LILY_SPLIT);
    }
    case Op::matmul: {
      const auto p = params_of<Matmul>(list, l);
      return matrix(p.w, p.rows);
    }
    case Op::delta_wy: {  // two products of keys, T applied to two operands
      const auto p = params_of<DeltaWy>(list, l);
      return 8.0 * LILY_CHUNK * LILY_DELTA_DIM * p.rows * p.value_heads;
    }
    case Op::delta_scan: {  // three products with the state, one with the scores
      const auto p = params_of<DeltaScan>(list, l);
      return (6 * kState + 2.0 * LILY_CHUNK * LILY_DELTA_DIM) * p.rows * p.value_heads;
    }
    case Op::flash: {  // causal: half of the chunk's own keys
      const auto p = params_of<Flash>(list, l);
      return p.rows * attend(p.heads, p.position + p.rows / 2.0);
    }
    case Op::expert_matmul: {
      const auto p = params_of<ExpertMatmul>(list, l);
      return matrix(p.w, double(p.rows) * (p.top_k + p.shared));
    }
    default:
      return 0;
  }
}

double predicted_seconds(const CommandList& list, const Launch& launch) {
  double bytes = 0;
  const auto add = [&](const Arg& a) {
    if (a.access != Access::none) bytes += double(a.tensor.bytes());
    if (a.access == Access::read_write) bytes += double(a.tensor.bytes());
  };
  for (const Arg& a : launch.args) add(a);
  // Unbound ranges are whole slabs, of which a launch touches its sequence's part: each row of
  // attn_step all keys and values before it; in flash many rows share them, arithmetic decides.
  if (variants()[launch.variant].op == Op::attn_step) {
    const auto p = params_of<AttnStep>(list, launch);
    bytes += 2.0 * p.rows * p.splits * LILY_SPLIT * p.kv_heads * LILY_HEAD_DIM *
             double(dtype_size(launch.args[0].tensor.dtype));
  }
  return std::max(bytes / kBytesPerSecond, launch_flops(list, launch) / kFlopsPerSecond);
}

std::vector<size_t> command_buffer_ends(const CommandList& list) {
  std::vector<size_t> ends;
  double sum = 0;
  for (size_t i = 0; i < list.launches.size(); ++i) {
    const double cost = predicted_seconds(list, list.launches[i]);
    if (i > 0 && sum + cost > kBufferSeconds) {
      ends.push_back(i);
      sum = 0;
    }
    sum += cost;
  }
  if (!list.launches.empty()) ends.push_back(list.launches.size());
  return ends;
}

}  // namespace lily
