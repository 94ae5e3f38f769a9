// ops_moe.cpp: plans of the mixture of experts.
#include <algorithm>

#include "ops.h"

namespace lily {
namespace {

constexpr uint32_t kUpUnits = 12;        // units of an expert_up threadgroup, see moe.metal
constexpr uint32_t kRouteRows = 4;       // rows of a route_rows threadgroup
constexpr uint32_t kGroupExperts = 128;  // of a group_rows threadgroup
constexpr uint32_t kTileRows = 64, kTileOutputs = 128;  // of a matrix tile, see linear.metal
constexpr uint64_t kMaxGroups = 65535;                  // of a grid's second dimension

void check_rows(const char* what, uint64_t rows, uint64_t limit) {
  check(rows >= 1 && rows <= limit, what, ": ", rows, " rows, supported 1 to ", limit);
}
void check_experts(const char* what, uint32_t experts, uint32_t top_k) {
  check(experts >= 2 && experts <= 1024, what, ": ", experts, " experts, supported 2 to 1024");
  check(top_k >= 1 && top_k <= LILY_MAX_TOP_K && top_k <= experts, what, ": top-k ", top_k,
        ", supported 1 to ", LILY_MAX_TOP_K, " of ", experts, " experts");
}

// The slots of a decode launch, slot top_k being the shared expert.
struct Slots {
  bool routed, shared;
  uint32_t last;
  uint64_t entries;  // of [R][top_k + 1], up to the last one touched
};
template <typename P>
Slots check_slots(const P& p, const char* what) {
  check_rows(what, p.rows, LILY_MAX_ROWS);
  check_experts(what, p.experts, p.top_k);
  const uint64_t end = uint64_t(p.slot_begin) + p.slots;
  check(p.slots >= 1 && end <= p.top_k + 1, what, ": slots ", p.slot_begin, " to ", end, " of ",
        p.top_k + 1);
  const Slots s{p.slot_begin < p.top_k, end == p.top_k + 1, uint32_t(end) - 1,
                uint64_t(p.rows) * (p.top_k + 1) - (p.top_k + 1 - end)};
  if (s.routed) check_linear(p.routed, what);
  if (s.shared) check_linear(p.shared, what);
  check(!s.routed || !s.shared || p.routed.bits == p.shared.bits, what, ": routed experts have ",
        p.routed.bits, " bits and the shared one ", p.shared.bits, ", which takes two launches");
  check(p.h_stride % 4 == 0, what, ": h rows of ", p.h_stride, " values, need a multiple of 4");
  return s;
}
void check_width(const char* what, bool used, uint32_t width, uint32_t h_stride) {
  check(!used || width <= h_stride, what, ": width ", width, " in h rows of ", h_stride);
}
// Tiles of all experts' pairs, at most.
template <typename P>
uint64_t max_tiles(const P& p) {
  return uint64_t(p.rows) * (p.top_k + 1) / p.tile + p.experts + 1;
}
uint64_t codes_of(bool used, const Linear& w, uint64_t experts) {
  return used ? experts * code_elements(w) : 0;
}
uint64_t pairs_of(bool used, const Linear& w, uint64_t experts) {
  return used ? experts * pair_elements(w) : 0;
}

}  // namespace

Plan plan(const ExpertUp& p, const Target& t) {
  const Slots s = check_slots(p, "expert_up");
  const Linear& w = s.routed ? p.routed : p.shared;
  check(!s.shared || p.shared.k == w.k, "expert_up: the shared expert takes ", p.shared.k,
        " values, the routed ones ", w.k);
  check((!s.routed || p.routed.n % 2 == 0) && (!s.shared || p.shared.n % 2 == 0),
        "expert_up: gate and up rows come in pairs, n is ", p.routed.n, " and ", p.shared.n);
  check_width("expert_up", s.routed, p.routed.n / 2, p.h_stride);
  check_width("expert_up", s.shared, p.shared.n / 2, p.h_stride);
  check(p.ssq_parts >= 1, "expert_up: ", p.ssq_parts, " partial sums, needs 1 or more");
  const uint32_t logits = p.experts + (s.shared ? 1 : 0);
  check(logits <= p.logits_stride, "expert_up: ", logits, " logits in rows of ", p.logits_stride);
  const uint32_t width = std::max(s.routed ? p.routed.n / 2 : 0, s.shared ? p.shared.n / 2 : 0);
  const uint32_t last_width = (s.shared ? p.shared.n : p.routed.n) / 2;
  Plan plan;
  plan.variant = find_variant(Op::expert_up, w.bits);
  plan.grid = {ceil_div(width, kUpUnits), p.slots, p.rows, 16 * kUpUnits};
  plan.needs = {
      {"codes", DType::u32, codes_of(s.routed, p.routed, p.experts), Access::read},
      {"pairs", DType::u32, pairs_of(s.routed, p.routed, p.experts), Access::read},
      {"shared codes", DType::u32, codes_of(s.shared, p.shared, 1), Access::read},
      {"shared pairs", DType::u32, pairs_of(s.shared, p.shared, 1), Access::read},
      {"x", t.act, uint64_t(p.rows) * w.k, Access::read},
      {"gain", DType::f32, w.k, Access::read},
      {"ssq", DType::f32, uint64_t(p.rows) * p.ssq_parts, Access::read},
      {"logits", DType::f32, (p.rows - 1) * uint64_t(p.logits_stride) + logits, Access::read},
      {"h", t.act, (s.entries - 1) * p.h_stride + last_width, Access::write},
      {"route", DType::u32, 2 * s.entries, Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const ExpertDown& p, const Target& t) {
  const Slots s = check_slots(p, "expert_down");
  const Linear& w = s.routed ? p.routed : p.shared;
  check(!s.shared || p.shared.n == w.n, "expert_down: the shared expert gives ", p.shared.n,
        " values, the routed ones ", w.n);
  check(w.n % LILY_OUT_ROWS == 0, "expert_down: ", w.n, " outputs, need a multiple of ",
        LILY_OUT_ROWS);
  check_width("expert_down", s.routed, p.routed.k, p.h_stride);
  check_width("expert_down", s.shared, p.shared.k, p.h_stride);
  Plan plan;
  plan.variant = find_variant(Op::expert_down, w.bits);
  plan.grid = {w.n / LILY_OUT_ROWS, p.rows, 1, 32 * p.slots};
  plan.needs = {
      {"codes", DType::u32, codes_of(s.routed, p.routed, p.experts), Access::read},
      {"pairs", DType::u32, pairs_of(s.routed, p.routed, p.experts), Access::read},
      {"shared codes", DType::u32, codes_of(s.shared, p.shared, 1), Access::read},
      {"shared pairs", DType::u32, pairs_of(s.shared, p.shared, 1), Access::read},
      {"h", t.act, (s.entries - 1) * p.h_stride + (s.shared ? p.shared.k : p.routed.k),
       Access::read},
      {"route", DType::u32, 2 * s.entries, Access::read},
      {"x", t.act, uint64_t(p.rows) * w.n, Access::read_write},
      {"ssq", DType::f32, uint64_t(p.rows) * (w.n / LILY_OUT_ROWS), Access::write},
  };
  plan.step = Access::read;
  return plan;
}

Plan plan(const RouteRows& p, const Target&) {
  check_rows("route_rows", p.rows, UINT32_MAX / (LILY_MAX_TOP_K + 1));
  check_experts("route_rows", p.experts, p.top_k);
  check(p.experts + 1 <= p.logits_stride, "route_rows: ", p.experts + 1, " logits in rows of ",
        p.logits_stride);
  Plan plan;
  plan.variant = find_variant(Op::route_rows);
  plan.grid = {ceil_div(p.rows, kRouteRows), 1, 1, 32 * kRouteRows};
  plan.needs = {
      {"logits", DType::f32, (p.rows - 1) * uint64_t(p.logits_stride) + p.experts + 1,
       Access::read},
      {"route", DType::u32, 2 * uint64_t(p.rows) * (p.top_k + 1), Access::write},
  };
  return plan;
}

Plan plan(const GroupRows& p, const Target&) {
  check_rows("group_rows", p.rows, UINT32_MAX / (2 * (LILY_MAX_TOP_K + 1)));
  check_experts("group_rows", p.experts, p.top_k);
  check(p.tile >= 1 && p.tile <= 1024, "group_rows: tiles of ", p.tile,
        " pairs, supported 1 to 1024");
  const uint64_t pairs = uint64_t(p.rows) * (p.top_k + 1);
  Plan plan;
  plan.variant = find_variant(Op::group_rows);
  plan.grid = {ceil_div(p.experts, kGroupExperts), 1, 1, 1024};
  plan.needs = {
      {"route", DType::u32, 2 * (pairs - 1), Access::read},
      {"order", DType::u32, pairs, Access::write},
      {"offsets", DType::u32, uint64_t(p.experts) + 2, Access::write},
      {"tiles", DType::u32, 1 + 2 * max_tiles(p), Access::write},
  };
  return plan;
}

Plan plan(const ExpertMatmul& p, const Target& t) {
  check_rows("expert_matmul", p.rows, UINT32_MAX / (LILY_MAX_TOP_K + 1));
  check_experts("expert_matmul", p.experts, p.top_k);
  check_linear(p.w, "expert_matmul");
  check(p.tile >= 1 && p.tile <= kTileRows, "expert_matmul: tiles of ", p.tile,
        " pairs, supported 1 to ", kTileRows);
  check(!p.swiglu || p.w.n % 2 == 0, "expert_matmul: swiglu pairs rows, but n is ", p.w.n);
  const uint64_t tiles = max_tiles(p);
  check(tiles <= kMaxGroups, "expert_matmul: up to ", tiles, " tiles, supported ", kMaxGroups);
  const uint64_t rows = p.rows, pairs = rows * (p.top_k + (p.shared ? 1 : 0));
  Plan plan;
  plan.variant = find_variant(Op::expert_matmul, p.w.bits);
  plan.grid = {ceil_div(p.w.n, kTileOutputs), uint32_t(tiles), 1, 256};
  plan.needs = {
      {"codes", DType::u32, codes_of(true, p.w, p.experts), Access::read},
      {"pairs", DType::u32, pairs_of(true, p.w, p.experts), Access::read},
      {"shared codes", DType::u32, codes_of(p.shared, p.w, 1), Access::read},
      {"shared pairs", DType::u32, pairs_of(p.shared, p.w, 1), Access::read},
      {"h", t.act, (p.swiglu ? rows : pairs) * p.w.k, Access::read},
      {"order", DType::u32, rows * (p.top_k + 1), Access::read},
      {"offsets", DType::u32, uint64_t(p.experts) + 2, Access::read},
      {"tiles", DType::u32, 1 + 2 * tiles, Access::read},
      {"y", t.act, pairs * (p.swiglu ? p.w.n / 2 : p.w.n), Access::write},
  };
  return plan;
}

Plan plan(const MoeCombine& p, const Target& t) {
  check_rows("moe_combine", p.rows, UINT32_MAX / (LILY_MAX_TOP_K + 1));
  check(p.top_k >= 1 && p.top_k <= LILY_MAX_TOP_K, "moe_combine: top-k ", p.top_k,
        ", supported 1 to ", LILY_MAX_TOP_K);
  check(p.hidden > 0 && p.hidden % 64 == 0, "moe_combine: rows of ", p.hidden,
        " values, need a multiple of 64");
  const uint64_t values = uint64_t(p.rows) * p.hidden;
  Plan plan;
  plan.variant = find_variant(Op::moe_combine);
  plan.grid = {p.rows, 1, 1, 256};
  plan.needs = {
      {"down", t.act, values * (p.top_k + 1), Access::read},
      {"route", DType::u32, 2 * uint64_t(p.rows) * (p.top_k + 1), Access::read},
      {"gain", DType::f32, p.hidden, Access::read},
      {"x", t.act, values, Access::read_write},
      {"h", t.act, values, Access::write},
  };
  return plan;
}

}  // namespace lily
