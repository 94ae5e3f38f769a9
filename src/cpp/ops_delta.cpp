// ops_delta.cpp: plans of the gated DeltaNet operations.
#include <algorithm>

#include "ops.h"

namespace lily {
namespace {

constexpr uint64_t kDim = LILY_DELTA_DIM;
constexpr uint32_t kStepColumns = 32;   // value columns of a delta_step threadgroup
constexpr uint32_t kPrepRows = 32;      // rows of a delta_prep threadgroup
constexpr uint32_t kScanColumns = 16;   // value columns of a delta_scan threadgroup
constexpr uint32_t kGatedHeads = 4;     // heads of a gated_norm threadgroup
constexpr uint64_t kMaxGroups = 65535;  // of a grid's second and third dimension

void check_heads(const char* what, uint32_t key_heads, uint32_t value_heads) {
  check(key_heads >= 1 && value_heads >= 1 && value_heads % key_heads == 0, what, ": ", value_heads,
        " value heads are no multiple of ", key_heads, " key heads");
  check(value_heads <= kMaxGroups, what, ": ", value_heads, " value heads, supported ", kMaxGroups);
}
void check_columns(const char* what, const char* part, uint64_t offset, uint64_t columns,
                   uint64_t stride) {
  check(offset + columns <= stride, what, ": ", part, " at columns ", offset, " to ",
        offset + columns, " of rows of ", stride);
}
void check_stride(const char* what, uint64_t stride) {
  check(stride % 4 == 0, what, ": rows of ", stride, " values, need a multiple of 4");
}
uint64_t conv_channels(uint64_t key_heads, uint64_t value_heads) {
  return (2 * key_heads + value_heads) * kDim;
}
// Values of `rows` rows up to the last one read.
uint64_t strided(uint64_t rows, uint64_t stride, uint64_t columns) {
  return (rows - 1) * stride + columns;
}

}  // namespace

Plan plan(const DeltaStep& p, const Target& t) {
  check(p.rows >= 1 && p.rows <= LILY_MAX_ROWS, "delta_step: ", p.rows, " rows, supported 1 to ",
        LILY_MAX_ROWS);
  check(p.slots >= 1 && p.slots <= kMaxGroups, "delta_step: ", p.slots, " slots, supported 1 to ",
        kMaxGroups);
  check_heads("delta_step", p.key_heads, p.value_heads);
  const uint64_t channels = conv_channels(p.key_heads, p.value_heads);
  const uint64_t columns = p.value_heads * kDim;
  check_stride("delta_step", p.proj_stride);
  check_columns("delta_step", "q, k, v", 0, channels, p.proj_stride);
  check_columns("delta_step", "z", p.z_offset, columns, p.proj_stride);
  check_columns("delta_step", "a", p.a_offset, p.value_heads, p.proj_stride);
  check_columns("delta_step", "b", p.b_offset, p.value_heads, p.proj_stride);
  check(p.head_parts == kDim / kStepColumns, "delta_step: ", p.head_parts,
        " partial sums per head, makes ", kDim / kStepColumns);
  const uint64_t used =
      std::max({channels, p.z_offset + columns, uint64_t(p.a_offset) + p.value_heads,
                uint64_t(p.b_offset) + p.value_heads});
  // Not written in a verification; a slot without rows is left as it is.
  const Access written = p.write_state ? Access::write : Access::none;
  Plan plan;
  plan.variant = find_variant(Op::delta_step);
  plan.grid = {p.value_heads, p.head_parts, p.slots, 128};
  plan.needs = {
      {"proj", t.act, strided(p.rows, p.proj_stride, used), Access::read},
      {"conv_w", DType::f32, channels * LILY_CONV_WIDTH, Access::read},
      {"neg_exp_a", DType::f32, p.value_heads, Access::read},
      {"dt_bias", DType::f32, p.value_heads, Access::read},
      {"gain", DType::f32, kDim, Access::read},
      {"conv_in", t.act, p.slots * 3 * channels, Access::read},
      {"state_in", DType::f32, p.slots * columns * kDim, Access::read},
      {"conv_out", t.act, p.slots * 3 * channels, written},
      {"state_out", DType::f32, p.slots * columns * kDim, written},
      {"u", t.act, p.rows * columns, Access::write},
      {"head_ssq", DType::f32, uint64_t(p.rows) * p.value_heads * p.head_parts, Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const DeltaOut& p, const Target& t) {
  check_linear(p.w, "delta_out");
  check(p.rows >= 1 && p.rows <= LILY_MAX_ROWS, "delta_out: ", p.rows, " rows, supported 1 to ",
        LILY_MAX_ROWS);
  check(p.w.k == p.heads * kDim, "delta_out: ", p.heads, " heads of ", kDim,
        " values, weight expects ", p.w.k);
  check(p.w.n % LILY_OUT_ROWS == 0, "delta_out: ", p.w.n, " outputs, need a multiple of ",
        LILY_OUT_ROWS);
  check(p.head_parts >= 1, "delta_out: ", p.head_parts, " partial sums per head, needs 1 or more");
  Plan plan;
  plan.variant = find_variant(Op::delta_out, p.w.bits);
  plan.grid = {p.w.n / LILY_OUT_ROWS, p.rows, 1, 128};
  plan.needs = {
      {"codes", DType::u32, code_elements(p.w), Access::read},
      {"pairs", DType::u32, pair_elements(p.w), Access::read},
      {"u", t.act, uint64_t(p.rows) * p.w.k, Access::read},
      {"head_ssq", DType::f32, uint64_t(p.rows) * p.heads * p.head_parts, Access::read},
      {"x", t.act, uint64_t(p.rows) * p.w.n, Access::read_write},
      {"ssq", DType::f32, uint64_t(p.rows) * (p.w.n / LILY_OUT_ROWS), Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const DeltaPrep& p, const Target& t) {
  check(p.rows >= 1 && p.rows <= kMaxGroups * kPrepRows, "delta_prep: ", p.rows,
        " rows, supported 1 to ", kMaxGroups * kPrepRows);
  check_heads("delta_prep", p.key_heads, p.value_heads);
  const uint64_t channels = conv_channels(p.key_heads, p.value_heads);
  check_stride("delta_prep", p.proj_stride);
  check_columns("delta_prep", "q, k, v", 0, channels, p.proj_stride);
  check_columns("delta_prep", "a", p.a_offset, p.value_heads, p.proj_stride);
  check_columns("delta_prep", "b", p.b_offset, p.value_heads, p.proj_stride);
  const uint64_t used = std::max(
      {channels, uint64_t(p.a_offset) + p.value_heads, uint64_t(p.b_offset) + p.value_heads});
  const uint64_t keys = p.rows * p.key_heads * kDim, gates = uint64_t(p.rows) * p.value_heads;
  Plan plan;
  plan.variant = find_variant(Op::delta_prep);
  plan.grid = {2 * p.key_heads + p.value_heads, ceil_div(p.rows, kPrepRows), 1, 128};
  plan.needs = {
      {"proj", t.act, strided(p.rows, p.proj_stride, used), Access::read},
      {"conv_w", DType::f32, channels * LILY_CONV_WIDTH, Access::read},
      {"neg_exp_a", DType::f32, p.value_heads, Access::read},
      {"dt_bias", DType::f32, p.value_heads, Access::read},
      {"conv_in", t.act, 3 * channels, Access::read},
      {"conv_out", t.act, 3 * channels, Access::write},
      {"q", DType::f32, keys, Access::write},
      {"k", DType::f32, keys, Access::write},
      {"v", DType::f32, gates * kDim, Access::write},
      {"g", DType::f32, gates, Access::write},
      {"beta", DType::f32, gates, Access::write},
  };
  return plan;
}

Plan plan(const DeltaWy& p, const Target&) {
  check(p.rows >= 1, "delta_wy: ", p.rows, " rows, needs 1 or more");
  check_heads("delta_wy", p.key_heads, p.value_heads);
  const uint64_t keys = uint64_t(p.rows) * p.key_heads * kDim;
  const uint64_t gates = uint64_t(p.rows) * p.value_heads;
  Plan plan;
  plan.variant = find_variant(Op::delta_wy);
  plan.grid = {ceil_div(p.rows, LILY_CHUNK), p.value_heads, 1, 256};
  plan.needs = {
      {"q", DType::f32, keys, Access::read},
      {"k", DType::f32, keys, Access::read},
      {"v", DType::f32, gates * kDim, Access::read},
      {"g", DType::f32, gates, Access::read},
      {"beta", DType::f32, gates, Access::read},
      // A thread reads back the rows it has written.
      {"w", DType::f32, gates * kDim, Access::read_write},
      {"u", DType::f32, gates * kDim, Access::read_write},
      {"scores", DType::f32, gates * LILY_CHUNK, Access::write},
  };
  return plan;
}

Plan plan(const DeltaScan& p, const Target&) {
  check(p.rows >= 1, "delta_scan: ", p.rows, " rows, needs 1 or more");
  check_heads("delta_scan", p.key_heads, p.value_heads);
  const uint64_t keys = uint64_t(p.rows) * p.key_heads * kDim;
  const uint64_t gates = uint64_t(p.rows) * p.value_heads, state = p.value_heads * kDim * kDim;
  Plan plan;
  plan.variant = find_variant(Op::delta_scan);
  plan.grid = {p.value_heads, uint32_t(kDim / kScanColumns), 1, 128};
  plan.needs = {
      {"q", DType::f32, keys, Access::read},
      {"k", DType::f32, keys, Access::read},
      {"g", DType::f32, gates, Access::read},
      {"w", DType::f32, gates * kDim, Access::read},
      {"u", DType::f32, gates * kDim, Access::read},
      {"scores", DType::f32, gates * LILY_CHUNK, Access::read},
      {"state_in", DType::f32, state, Access::read},
      {"state_out", DType::f32, state, Access::write},
      {"o", DType::f32, gates * kDim, Access::write},
  };
  return plan;
}

Plan plan(const GatedNorm& p, const Target& t) {
  check(p.rows >= 1 && p.heads >= 1, "gated_norm: ", p.rows, " rows of ", p.heads,
        " heads, needs 1 or more of both");
  const uint64_t columns = p.heads * kDim;
  check_stride("gated_norm", p.proj_stride);
  check(p.z_offset % 4 == 0, "gated_norm: z at column ", p.z_offset, ", needs a multiple of 4");
  check_columns("gated_norm", "z", p.z_offset, columns, p.proj_stride);
  Plan plan;
  plan.variant = find_variant(Op::gated_norm);
  plan.grid = {p.rows, ceil_div(p.heads, kGatedHeads), 1, 128};
  plan.needs = {
      {"o", DType::f32, p.rows * columns, Access::read},
      {"proj", t.act, strided(p.rows, p.proj_stride, p.z_offset + columns), Access::read},
      {"gain", DType::f32, kDim, Access::read},
      {"y", t.act, p.rows * columns, Access::write},
  };
  return plan;
}

}  // namespace lily
