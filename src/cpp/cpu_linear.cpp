// cpu_linear.cpp: native twins of project, matmul, expert_matmul and rms_norm.
#include "cpu_matrix.h"

namespace lily {
namespace LILY_CPU_NS {
namespace {

using namespace matrix;

constexpr uint32_t kBlock = 64;        // weight rows of a project job
constexpr uint32_t kRowBlock = 480;    // vectors packed at a time: bounds the scratch memory
constexpr uint32_t kPanelsPerJob = 8;  // of an expert
constexpr uint32_t kOwnRows = 96;      // of a job of the shared expert, which has all rows
static_assert(kRowBlock % kTileRows == 0 && kOwnRows % kTileRows == 0);

// Packs rows first .. first + count - 1, row(i) -> const Act*, tile after tile.
template <typename Row>
void pack_rows(uint32_t k, uint32_t count, Row&& row, float* packed) {
  for (uint32_t r = 0; r < count; r += kTileRows) {
    const uint32_t rows = count - r < kTileRows ? count - r : kTileRows;
    pack_tile(k, rows, [&](uint32_t i) { return row(r + i); }, packed + size_t(r) * k);
  }
}

// Outputs n0 .. n0 + columns - 1 of a row to y; y starts at the row's own output 0.
template <typename Act>
void write_outputs(uint32_t mode, const float* v, uint32_t n0, uint32_t columns, Act* y,
                   float* y32) {
  if (mode == kMatmulSwiglu) {
    for (uint32_t i = 0; i < columns / 2; ++i) store(y, n0 / 2 + i, silu(v[2 * i]) * v[2 * i + 1]);
  } else if (mode == kMatmulAdd) {
    for (uint32_t i = 0; i < columns; ++i) store(y, n0 + i, load(y, n0 + i) + v[i]);
  } else if (mode == kMatmulF32) {
    for (uint32_t i = 0; i < columns; ++i) y32[n0 + i] = v[i];
  } else {
    for (uint32_t i = 0; i < columns; ++i) store(y, n0 + i, v[i]);
  }
}

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
    using Act = std::remove_pointer_t<decltype(tag)>;
    for (uint32_t r = 0; r < rows; ++r) {
      const Act* from = arg<Act>(call, 2) + size_t(r) * k;
      for (uint32_t i = 0; i < k; ++i) x[i] = load(from, i) * gain[i];
      prepare(p.w, x, prepared + r * stride);
      float sum = 0.0f;
      for (uint32_t i = 0; i < p.ssq_parts; ++i) sum += ssq[size_t(r) * p.ssq_parts + i];
      inv[r] = 1.0f / std::sqrt(sum / float(k) + p.eps);
    }
    parallel(call, (p.w.n + kBlock - 1) / kBlock, [&](size_t job) {
      const uint32_t n0 = uint32_t(job) * kBlock;
      const uint32_t columns = p.w.n - n0 < kBlock ? p.w.n - n0 : kBlock;
      float y[LILY_MAX_ROWS * kBlock];
      linear_rows(p.w, arg<uint32_t>(call, 0), arg<uint32_t>(call, 1), n0, n0 + columns, rows,
                  prepared, y, kBlock);
      for (uint32_t r = 0; r < rows; ++r) {
        const size_t at = size_t(r) * p.y_stride + p.y_offset + n0;
        for (uint32_t i = 0; i < columns; ++i) {
          const float v = y[r * kBlock + i] * inv[r];
          if (p.out_f32) arg<float>(call, 5)[at + i] = v;
          else store(arg<Act>(call, 5), at + i, v);
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
  const uint32_t k = p.w.k;
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    for (uint32_t m0 = 0; m0 < p.rows; m0 += kRowBlock) {
      const uint32_t count = p.rows - m0 < kRowBlock ? p.rows - m0 : kRowBlock;
      const Act* h = arg<Act>(call, 2) + size_t(m0) * k;
      float* packed = scratch(0, size_t(count) * k);
      pack_rows(k, count, [&](uint32_t r) { return h + size_t(r) * k; }, packed);
      parallel(call, (p.w.n + kPanel - 1) / kPanel, [&](size_t job) {
        const uint32_t n0 = uint32_t(job) * kPanel;
        const uint32_t columns = p.w.n - n0 < kPanel ? p.w.n - n0 : kPanel;
        float* out = scratch(1, size_t(count) * kPanel);
        multiply_panel(p.w, arg<uint32_t>(call, 0), arg<uint32_t>(call, 1), n0, count, packed,
                       scratch(2, panel_scales_floats(p.w)), out);
        for (uint32_t r = 0; r < count; ++r) {
          const size_t at = size_t(m0 + r) * p.y_stride + p.y_offset;
          write_outputs(p.mode, out + r * kPanel, n0, columns, arg<Act>(call, 3) + at,
                        arg<float>(call, 3) + at);
        }
      });
    }
  });
}

void expert_matmul(const TwinCall& call) {
  const ExpertMatmul& p = params<ExpertMatmul>(call);
  const uint32_t k = p.w.k, columns = p.swiglu ? p.w.n / 2 : p.w.n;
  const uint32_t *order = arg<uint32_t>(call, 5), *offsets = arg<uint32_t>(call, 6);
  const uint32_t span = kPanelsPerJob * kPanel, spans = (p.w.n + span - 1) / span;
  const uint32_t own = p.shared ? (p.rows + kOwnRows - 1) / kOwnRows : 0;  // blocks of its rows
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, size_t(own + p.experts) * spans, [&](size_t job) {
      const uint32_t place = uint32_t(job / spans);  // the shared expert's blocks, then the others
      const bool shared = place < own;
      const uint32_t e = shared ? p.experts : place - own;
      const uint32_t m_begin = offsets[e] + (shared ? place * kOwnRows : 0);
      const uint32_t m_end =
          shared && offsets[e + 1] - m_begin > kOwnRows ? m_begin + kOwnRows : offsets[e + 1];
      const uint32_t n_begin = uint32_t(job % spans) * span;
      const uint32_t n_end = p.w.n - n_begin < span ? p.w.n : n_begin + span;
      const uint32_t* codes =
          matrix_codes(p.w, arg<uint32_t>(call, shared ? 2 : 0), shared ? 0 : e);
      const uint32_t* pairs =
          matrix_pairs(p.w, arg<uint32_t>(call, shared ? 3 : 1), shared ? 0 : e);
      for (uint32_t m0 = m_begin; m0 < m_end; m0 += kRowBlock) {
        const uint32_t left = m_end - m0, count = left < kRowBlock ? left : kRowBlock;
        float* packed = scratch(0, size_t(count) * k);
        pack_rows(
            k, count,
            [&](uint32_t r) {
              const uint32_t pair = order[m0 + r];
              const uint32_t row = !p.swiglu ? pair
                                   : shared  ? pair - p.rows * p.top_k
                                             : pair / p.top_k;
              return arg<Act>(call, 4) + size_t(row) * k;
            },
            packed);
        for (uint32_t n0 = n_begin; n0 < n_end; n0 += kPanel) {
          float* out = scratch(1, size_t(count) * kPanel);
          multiply_panel(p.w, codes, pairs, n0, count, packed, scratch(2, panel_scales_floats(p.w)),
                         out);
          for (uint32_t r = 0; r < count; ++r) {
            write_outputs<Act>(p.swiglu ? kMatmulSwiglu : kMatmulAct, out + r * kPanel, n0,
                               n_end - n0 < kPanel ? n_end - n0 : kPanel,
                               arg<Act>(call, 8) + size_t(order[m0 + r]) * columns, nullptr);
          }
        }
      }
    });
  });
}

}  // namespace LILY_CPU_NS
}  // namespace lily
