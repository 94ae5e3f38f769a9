// ops_linear.cpp: plans of the dense projections and the row norm.
#include "ops.h"

namespace lily {
namespace {

constexpr uint32_t kTileRows = 64, kTileOutputs = 128;  // of a matmul tile, see linear.metal
constexpr uint32_t kNormThreads = 128;

// Values of a strided output up to the last one written.
uint64_t strided(uint64_t rows, uint64_t stride, uint64_t offset, uint64_t columns) {
  return (rows - 1) * stride + offset + columns;
}
void check_columns(const char* what, uint64_t stride, uint64_t offset, uint64_t columns) {
  check(offset + columns <= stride, what, ": columns ", offset, " to ", offset + columns,
        " of rows of ", stride);
}
void check_rows(const char* what, uint64_t rows, uint64_t limit) {
  check(rows >= 1 && rows <= limit, what, ": ", rows, " rows, supported 1 to ", limit);
}
// A grid's second dimension is at most 65,535 threadgroups.
constexpr uint64_t kMaxGroups = 65535;

}  // namespace

Plan plan(const Project& p, const Target& t) {
  check_linear(p.w, "project");
  check_rows("project", p.rows, LILY_MAX_ROWS);
  check(p.ssq_parts >= 1, "project: ", p.ssq_parts, " partial sums, needs 1 or more");
  check_columns("project", p.y_stride, p.y_offset, p.w.n);
  const uint32_t at_once = p.rows == 1 ? 1 : 4;
  Plan plan;
  plan.variant = find_variant(Op::project, p.w.bits, at_once);
  plan.grid = {ceil_div(p.w.n, LILY_PROJECT_ROWS(p.w.n)), ceil_div(p.rows, at_once), 1, 128};
  plan.needs = {
      {"codes", DType::u32, code_elements(p.w), Access::read},
      {"pairs", DType::u32, pair_elements(p.w), Access::read},
      {"x", t.act, uint64_t(p.rows) * p.w.k, Access::read},
      {"gain", DType::f32, p.w.k, Access::read},
      {"ssq", DType::f32, uint64_t(p.rows) * p.ssq_parts, Access::read},
      {"y", p.out_f32 ? DType::f32 : t.act, strided(p.rows, p.y_stride, p.y_offset, p.w.n),
       Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const RmsNorm& p, const Target& t) {
  check_rows("rms_norm", p.rows, UINT32_MAX);
  check(p.k > 0 && p.k % 64 == 0, "rms_norm: rows of ", p.k, " values, need a multiple of 64");
  Plan plan;
  plan.variant = find_variant(Op::rms_norm);
  plan.grid = {p.rows, 1, 1, kNormThreads};
  plan.needs = {
      {"x", t.act, uint64_t(p.rows) * p.k, Access::read},
      {"gain", DType::f32, p.k, Access::read},
      {"h", t.act, uint64_t(p.rows) * p.k, Access::write},
  };
  return plan;
}

Plan plan(const Matmul& p, const Target& t) {
  check_linear(p.w, "matmul");
  check_rows("matmul", p.rows, kMaxGroups * kTileRows);
  check(p.mode <= kMatmulSwiglu, "matmul: mode ", p.mode, ", the last one is ",
        uint32_t(kMatmulSwiglu));
  const bool swiglu = p.mode == kMatmulSwiglu;
  check(!swiglu || p.w.n % 2 == 0, "matmul: swiglu pairs rows, but n is ", p.w.n);
  const uint64_t columns = swiglu ? p.w.n / 2 : p.w.n;
  check_columns("matmul", p.y_stride, p.y_offset, columns);
  Plan plan;
  plan.variant = find_variant(Op::matmul, p.w.bits);
  plan.grid = {ceil_div(p.w.n, kTileOutputs), ceil_div(p.rows, LILY_MATMUL_ROWS(p.w.n, p.rows)), 1,
               256};
  plan.needs = {
      {"codes", DType::u32, code_elements(p.w), Access::read},
      {"pairs", DType::u32, pair_elements(p.w), Access::read},
      {"h", t.act, uint64_t(p.rows) * p.w.k, Access::read},
      {"y", p.mode == kMatmulF32 ? DType::f32 : t.act,
       strided(p.rows, p.y_stride, p.y_offset, columns),
       p.mode == kMatmulAdd ? Access::read_write : Access::write},
  };
  return plan;
}

}  // namespace lily
