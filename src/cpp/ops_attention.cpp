// ops_attention.cpp: plans of gated attention over paged KV: decode steps, prefill.
#include <algorithm>

#include "ops.h"

namespace lily {
namespace {

constexpr uint32_t kMaxRatio = 16;      // query heads of a KV head, see attention.metal
constexpr uint64_t kMaxGroups = 65535;  // of a grid's second and third dimension
constexpr uint32_t kRopeSimds = 4;

void check_rows(const char* what, uint64_t rows, uint64_t limit) {
  check(rows >= 1 && rows <= limit, what, ": ", rows, " rows, supported 1 to ", limit);
}
void check_splits(const char* what, uint64_t splits) {
  check(splits >= 1 && splits <= kMaxGroups, what, ": ", splits, " splits, supported 1 to ",
        kMaxGroups);
}
void check_heads(const char* what, uint32_t heads, uint32_t kv_heads) {
  check(kv_heads >= 1 && heads % kv_heads == 0 && heads / kv_heads >= 1 &&
            heads / kv_heads <= kMaxRatio,
        what, ": ", heads, " query heads for ", kv_heads, " KV heads, need 1 to ", kMaxRatio,
        " for each");
}
// Columns of proj: per query head 256 q and 256 gate, then wherever k and v are. Returns the last
// one used.
uint64_t check_proj(const char* what, uint32_t heads, uint32_t stride) {
  const uint64_t columns = uint64_t(heads) * 2 * LILY_HEAD_DIM;
  check(columns <= stride, what, ": ", heads, " heads take ", columns, " columns of rows of ",
        stride);
  check(stride % 8 == 0, what, ": rows of ", stride, " values, need a multiple of 8");
  return columns;
}
template <typename P>
uint64_t check_qkv(const char* what, const P& p) {
  check_heads(what, p.heads, p.kv_heads);
  check(p.rotary % 2 == 0 && p.rotary <= LILY_HEAD_DIM, what, ": ", p.rotary,
        " rotary dims, need an even number up to ", LILY_HEAD_DIM);
  uint64_t columns = check_proj(what, p.heads, p.proj_stride);
  for (const uint32_t offset : {p.k_offset, p.v_offset}) {
    const uint64_t end = uint64_t(offset) + uint64_t(p.kv_heads) * LILY_HEAD_DIM;
    check(offset % 8 == 0 && end <= p.proj_stride, what, ": k or v at columns ", offset, " to ",
          end, " of rows of ", p.proj_stride, ", need a multiple of 8 inside the row");
    columns = std::max(columns, end);
  }
  return columns;
}
uint64_t partials(uint64_t rows, uint64_t heads, uint64_t splits) {
  return rows * heads * splits * LILY_PARTIAL;
}
uint64_t strided(uint64_t rows, uint64_t stride, uint64_t columns) {
  return (rows - 1) * stride + columns;
}

}  // namespace

Plan plan(const AttnStep& p, const Target& t) {
  check_rows("attn_step", p.rows, LILY_MAX_ROWS);
  check_splits("attn_step", p.splits);
  const uint64_t columns = check_qkv("attn_step", p);
  Plan plan;
  plan.variant = find_variant(Op::attn_step);
  plan.grid = {p.kv_heads, p.splits, p.rows, 256};
  plan.needs = {
      {"proj", t.act, strided(p.rows, p.proj_stride, columns), Access::read},
      {"q_gain", DType::f32, LILY_HEAD_DIM, Access::read},
      {"k_gain", DType::f32, LILY_HEAD_DIM, Access::read},
      {"inv_freq", DType::f32, p.rotary / 2, Access::read},
      {"partial", DType::f32, partials(p.rows, p.heads, p.splits), Access::write},
  };
  plan.step = Access::read;
  plan.unbound = Access::read_write;
  return plan;
}

Plan plan(const AttnCombine& p, const Target&) {
  check_rows("attn_combine", p.rows, LILY_MAX_ROWS);
  check_splits("attn_combine", p.splits);
  check(p.heads >= 1, "attn_combine: ", p.heads, " heads, needs 1 or more");
  Plan plan;
  plan.variant = find_variant(Op::attn_combine);
  plan.grid = {p.heads, 2, p.rows, 1024};
  plan.needs = {
      {"partial", DType::f32, partials(p.rows, p.heads, p.splits), Access::read},
      {"combined", DType::f32, partials(p.rows, p.heads, 1), Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const AttnOut& p, const Target& t) {
  check_linear(p.w, "attn_out");
  check_rows("attn_out", p.rows, LILY_MAX_ROWS);
  check(p.splits >= 1 && p.splits <= LILY_FUSED_SPLITS, "attn_out: ", p.splits,
        " splits, supported 1 to ", LILY_FUSED_SPLITS);
  check(p.heads >= 1 && p.w.k == uint64_t(p.heads) * LILY_HEAD_DIM, "attn_out: weight expects ",
        p.w.k, " values, ", p.heads, " heads give ", uint64_t(p.heads) * LILY_HEAD_DIM);
  check(p.w.n % LILY_OUT_ROWS == 0, "attn_out: ", p.w.n, " outputs, need a multiple of ",
        LILY_OUT_ROWS);
  const uint64_t columns = check_proj("attn_out", p.heads, p.proj_stride);
  Plan plan;
  plan.variant = find_variant(Op::attn_out, p.w.bits);
  plan.grid = {p.w.n / LILY_OUT_ROWS, p.rows, 1, 128};
  plan.needs = {
      {"codes", DType::u32, code_elements(p.w), Access::read},
      {"pairs", DType::u32, pair_elements(p.w), Access::read},
      {"partial", DType::f32, partials(p.rows, p.heads, p.splits), Access::read},
      {"proj", t.act, strided(p.rows, p.proj_stride, columns), Access::read},
      {"x", t.act, uint64_t(p.rows) * p.w.n, Access::read_write},
      {"ssq", DType::f32, uint64_t(p.rows) * (p.w.n / LILY_OUT_ROWS), Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const QkvRope& p, const Target& t) {
  check_rows("qkv_rope", p.rows, UINT32_MAX - p.position);
  const uint64_t columns = check_qkv("qkv_rope", p);
  const uint64_t units = ceil_div(p.heads + 2 * uint64_t(p.kv_heads), kRopeSimds);
  check(units <= kMaxGroups, "qkv_rope: ", p.heads, " and 2 x ", p.kv_heads, " heads, supported ",
        kMaxGroups * kRopeSimds);
  Plan plan;
  plan.variant = find_variant(Op::qkv_rope);
  plan.grid = {p.rows, uint32_t(units), 1, kRopeSimds * 32};
  plan.needs = {
      {"proj", t.act, strided(p.rows, p.proj_stride, columns), Access::read},
      {"q_gain", DType::f32, LILY_HEAD_DIM, Access::read},
      {"k_gain", DType::f32, LILY_HEAD_DIM, Access::read},
      {"inv_freq", DType::f32, p.rotary / 2, Access::read},
      {"q", t.act, uint64_t(p.rows) * p.heads * LILY_HEAD_DIM, Access::write},
  };
  plan.step = Access::read;
  plan.unbound = Access::write;
  return plan;
}

Plan plan(const Flash& p, const Target& t) {
  check_rows("flash", p.rows, UINT32_MAX - p.position);
  check_heads("flash", p.heads, p.kv_heads);
  const uint64_t columns = check_proj("flash", p.heads, p.proj_stride);
  // FLASH_M of attention.metal: (query, head) pairs of a threadgroup.
  const uint32_t tile = 64 / uint32_t(dtype_size(t.act)), queries = tile / (p.heads / p.kv_heads);
  check(ceil_div(p.rows, queries) <= kMaxGroups, "flash: ", p.rows, " rows, supported ",
        kMaxGroups * queries);
  Plan plan;
  plan.variant = find_variant(Op::flash);
  plan.grid = {p.kv_heads, ceil_div(p.rows, queries), 1, 128};
  plan.needs = {
      {"q", t.act, uint64_t(p.rows) * p.heads * LILY_HEAD_DIM, Access::read},
      {"proj", t.act, strided(p.rows, p.proj_stride, columns), Access::read},
      {"y", t.act, uint64_t(p.rows) * p.heads * LILY_HEAD_DIM, Access::write},
  };
  plan.step = Access::read;
  plan.unbound = Access::read;
  return plan;
}

}  // namespace lily
