// ops_embed.cpp: plans of the token table's rows and of plain copies.
#include "ops.h"

namespace lily {

Plan plan(const Embed& p, const Target& t) {
  check_linear(p.w, "embed");
  check(p.rows >= 1, "embed: ", p.rows, " rows, needs 1 or more");
  Plan plan;
  plan.variant = find_variant(Op::embed, p.w.bits);
  plan.grid = {p.rows, 1, 1, 64};
  plan.needs = {
      {"codes", DType::u32, code_elements(p.w), Access::read},
      {"pairs", DType::u32, pair_elements(p.w), Access::read},
      {"ids", DType::u32, p.rows, Access::read},
      {"x", t.act, uint64_t(p.rows) * p.w.k, Access::write},
      {"ssq", DType::f32, p.rows, Access::write},
  };
  return plan;
}

Plan plan(const CopyBytes& p, const Target&) {
  constexpr uint64_t group_bytes = 16384;
  check(p.bytes > 0 && p.bytes % 4 == 0, "copy_bytes: ", p.bytes, " bytes, need a multiple of 4");
  check(p.bytes / group_bytes < INT32_MAX, "copy_bytes: ", p.bytes, " bytes, supported up to ",
        group_bytes * INT32_MAX);
  Plan plan;
  plan.variant = find_variant(Op::copy_bytes);
  plan.grid = {ceil_div(p.bytes, group_bytes), 1, 1, 256};
  plan.needs = {
      {"from", DType::u32, p.bytes / 4, Access::read},
      {"to", DType::u32, p.bytes / 4, Access::write},
  };
  return plan;
}

}  // namespace lily
