// cpu_linear.cpp: native twins of project, matmul, expert_matmul and rms_norm.
#include "cpu_matrix.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

constexpr uint32_t kBlock = 64;  // weight rows of one job

}  // namespace

void project(const TwinCall& call) {
  const Project& p = params<Project>(call);
  const uint32_t rows = step(call).rows < p.rows ? step(call).rows : p.rows, k = p.w.k;
  const float *gain = arg<float>(call, 3), *ssq = arg<float>(call, 4);
  const size_t stride = prepared_floats(p.w);
  float* x = scratch(0, k);
  float* prepared = scratch(1, stride * rows);
  float inv[LILY_MAX_ROWS];
  with_act(call, [&](auto* tag) {
    for (uint32_t r = 0; r < rows; ++r) {
      const auto* from = reinterpret_cast<decltype(tag)>(call.args[2]) + size_t(r) * k;
      for (uint32_t i = 0; i < k; ++i) x[i] = load(from, i) * gain[i];
      prepare(p.w, x, prepared + r * stride);
      float sum = 0.0f;
      for (uint32_t i = 0; i < p.ssq_parts; ++i) sum += ssq[size_t(r) * p.ssq_parts + i];
      inv[r] = 1.0f / std::sqrt(sum / float(k) + p.eps);
    }
  });
  parallel(call, (p.w.n + kBlock - 1) / kBlock, [&](size_t job) {
    const uint32_t n0 = uint32_t(job) * kBlock, n1 = n0 + kBlock < p.w.n ? n0 + kBlock : p.w.n;
    float y[LILY_MAX_ROWS * kBlock];
    linear_rows(p.w, arg<uint32_t>(call, 0), arg<uint32_t>(call, 1), n0, n1, rows, prepared, y,
                kBlock);
    with_act(call, [&](auto* tag) {
      for (uint32_t r = 0; r < rows; ++r) {
        const size_t at = size_t(r) * p.y_stride + p.y_offset + n0;
        for (uint32_t i = 0; i < n1 - n0; ++i) {
          const float v = y[r * kBlock + i] * inv[r];
          if (p.out_f32) arg<float>(call, 5)[at + i] = v;
          else store(reinterpret_cast<decltype(tag)>(call.args[5]), at + i, v);
        }
      }
    });
  });
}

void rms_norm(const TwinCall& call) {
  const RmsNorm& p = params<RmsNorm>(call);
  const float* gain = arg<float>(call, 1);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.rows, [&](size_t r) {
      const Act* x = arg<Act>(call, 0) + r * p.k;
      Act* h = arg<Act>(call, 2) + r * p.k;
      float part[16] = {};  // lanes, so that the sum vectorises
      for (uint32_t i = 0; i < p.k; i += 16) {
        for (uint32_t j = 0; j < 16; ++j) part[j] += load(x, i + j) * load(x, i + j);
      }
      float sum = 0.0f;
      for (float s : part) sum += s;
      const float inv = 1.0f / std::sqrt(sum / float(p.k) + p.eps);
      for (uint32_t i = 0; i < p.k; ++i) store(h, i, load(x, i) * inv * gain[i]);
    });
  });
}

void matmul(const TwinCall& call) {
  const Matmul& p = params<Matmul>(call);
  const size_t stride = prepared_floats(p.w);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.rows, [&](size_t r) {
      float* x = scratch(2, p.w.k);
      float* prepared = scratch(3, stride);
      float* v = scratch(4, p.w.n);
      for (uint32_t i = 0; i < p.w.k; ++i) x[i] = load(arg<Act>(call, 2), r * p.w.k + i);
      prepare(p.w, x, prepared);
      linear_rows(p.w, arg<uint32_t>(call, 0), arg<uint32_t>(call, 1), 0, p.w.n, 1, prepared, v,
                  p.w.n);
      const size_t at = r * p.y_stride + p.y_offset;
      Act* y = arg<Act>(call, 3);
      for (uint32_t i = 0; i < p.w.n; ++i) {
        if (p.mode == kMatmulAct) store(y, at + i, v[i]);
        if (p.mode == kMatmulF32) arg<float>(call, 3)[at + i] = v[i];
        if (p.mode == kMatmulAdd) store(y, at + i, load(y, at + i) + v[i]);
        if (p.mode == kMatmulSwiglu && i % 2 == 0) store(y, at + i / 2, silu(v[i]) * v[i + 1]);
      }
    });
  });
}

void expert_matmul(const TwinCall& call) {
  const ExpertMatmul& p = params<ExpertMatmul>(call);
  const size_t stride = prepared_floats(p.w);
  const uint32_t *order = arg<uint32_t>(call, 3), *offsets = arg<uint32_t>(call, 4);
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.experts, [&](size_t e) {
      float* x = scratch(2, p.w.k);
      float* prepared = scratch(3, stride);
      float* v = scratch(4, p.w.n);
      for (uint32_t i = offsets[e]; i < offsets[e + 1]; ++i) {
        const uint32_t pair = order[i];
        const Act* h = arg<Act>(call, 2) + size_t(p.swiglu ? pair / p.top_k : pair) * p.w.k;
        for (uint32_t j = 0; j < p.w.k; ++j) x[j] = load(h, j);
        prepare(p.w, x, prepared);
        linear_rows(p.w, matrix_codes(p.w, arg<uint32_t>(call, 0), e),
                    matrix_pairs(p.w, arg<uint32_t>(call, 1), e), 0, p.w.n, 1, prepared, v, p.w.n);
        Act* y = arg<Act>(call, 6) + size_t(pair) * (p.swiglu ? p.w.n / 2 : p.w.n);
        for (uint32_t j = 0; j < p.w.n; ++j) {
          if (!p.swiglu) store(y, j, v[j]);
          else if (j % 2 == 0) store(y, j / 2, silu(v[j]) * v[j + 1]);
        }
      }
    });
  });
}

}  // namespace LILY_CPU_NS
}  // namespace lily
