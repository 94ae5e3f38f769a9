// ops.cpp: the lists as tables, shape checks common to all ops, recording of launches.
#include "ops.h"

#include <cstring>

namespace lily {

std::span<const Variant> variants() {
  static const Variant table[] = {
#define X(op, name, c0, c1, c2) {Op::op, #name, {c0, c1, c2}},
      LILY_VARIANTS(X)
#undef X
  };
  return table;
}

const char* op_name(Op op) {
  static const char* names[] = {
#define X(op, P) #op,
      LILY_OPS(X)
#undef X
  };
  return names[size_t(op)];
}

uint16_t find_variant(Op op, uint32_t c0, uint32_t c1, uint32_t c2) {
  const auto all = variants();
  for (size_t i = 0; i < all.size(); ++i) {
    const Variant& v = all[i];
    if (v.op == op && v.c[0] == c0 && v.c[1] == c1 && v.c[2] == c2) return uint16_t(i);
  }
  throw LilyError(concat(op_name(op), ": no variant for constants ", c0, ", ", c1, ", ", c2));
}

void check_linear(const Linear& w, const char* what) {
  check(w.bits == 4 || w.bits == 8 || w.bits == 16, what, ": ", w.bits,
        " bits, supported 4, 8, 16");
  check(w.bits == 16 || (w.group_shift >= 5 && w.group_shift <= 7), what, ": group of 2^",
        w.group_shift, ", supported 32, 64, 128");
  check(w.n > 0 && w.k > 0 && w.k % 64 == 0, what, ": matrix [", w.n, ", ", w.k,
        "], k must be a multiple of 64");
  check(w.bits == 16 || w.k % (1u << w.group_shift) == 0, what, ": k ", w.k,
        " is no multiple of the group ", 1u << w.group_shift);
  // Kernels count inside one matrix with 32 bits.
  check(code_elements(w) < 1ull << 32, what, ": matrix [", w.n, ", ", w.k, "] of ", w.bits,
        " bits takes ", code_elements(w) * 4, " bytes, supported up to ", 1ull << 34);
}
uint64_t code_elements(const Linear& w) { return uint64_t(w.n) * w.k * w.bits / 32; }
uint64_t pair_elements(const Linear& w) {
  return w.bits == 16 ? 0 : uint64_t(w.n) * (w.k >> w.group_shift);
}

void Recorder::record(Op op, const Plan& plan, const void* params, size_t size,
                      std::span<const Tensor> args, const Tensor& step,
                      std::span<const Tensor> unbound) {
  const char* name = op_name(op);
  check(args.size() == plan.needs.size(), name, ": ", args.size(), " arguments, needs ",
        plan.needs.size());
  Launch launch;
  launch.variant = plan.variant;
  launch.grid = plan.grid;
  check(plan.grid.threads % 32 == 0 && plan.grid.threads >= 32 && plan.grid.threads <= 1024, name,
        ": ", plan.grid.threads, " threads a group, need a multiple of 32 up to 1024");
  for (size_t i = 0; i < args.size(); ++i) {
    const Need& need = plan.needs[i];
    check(bool(args[i]) || need.elements == 0, name, ": ", need.name, " is missing");
    check(need.elements == 0 || args[i].dtype == need.dtype, name, ": ", need.name, " is ",
          dtype_name(args[i].dtype), ", needs ", dtype_name(need.dtype));
    check(args[i].elements >= need.elements, name, ": ", need.name, " has ", args[i].elements,
          " values, needs ", need.elements);
    Tensor used = args[i];
    used.elements = need.elements;  // the declared range is what the kernel may touch, no more
    launch.args.push_back({used, need.elements ? need.access : Access::none});
  }
  if (plan.step != Access::none) {
    check(bool(step), name, ": needs the session's Step");
    launch.step = {step, plan.step};
  }
  if (plan.unbound != Access::none) {
    check(!unbound.empty(), name, ": needs the KV slabs");
    for (const Tensor& t : unbound) launch.unbound.push_back({t, plan.unbound});
  }
  launch.params_offset = uint32_t(list_.params.size());
  launch.params_size = uint32_t(size);
  list_.params.resize(list_.params.size() + (size + 15) / 16 * 16);
  std::memcpy(list_.params.data() + launch.params_offset, params, size);
  list_.launches.push_back(std::move(launch));
}

void Recorder::any(Op op, std::span<const std::byte> params, std::span<const Tensor> args,
                   const Tensor& step, std::span<const Tensor> unbound) {
  switch (op) {
#define X(op_, P)                                                                           \
  case Op::op_: {                                                                           \
    check(params.size() == sizeof(P), #op_ ": params have ", params.size(), " bytes, need ", \
          sizeof(P));                                                                       \
    P p;                                                                                    \
    std::memcpy(&p, params.data(), sizeof(P));                                              \
    record(op, plan(p, target_), &p, sizeof(P), args, step, unbound);                       \
    return;                                                                                 \
  }
    LILY_OPS(X)
#undef X
    case Op::count:
      break;
  }
  throw LilyError("unknown op");
}

}  // namespace lily
