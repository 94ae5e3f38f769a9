// ops.h: one function per op: check shapes, choose the variant by a pure function, record the launch.
#pragma once

#include <initializer_list>
#include <span>

#include "../metal/kernels.h"
#include "device.h"

namespace lily {

enum class Op : uint8_t {
#define X(op, P) op,
  LILY_OPS(X)
#undef X
      count
};
// A pipeline: one compiled kernel. Devices name it `name` + "_bf16" or "_f32" (exact).
struct Variant {
  Op op;
  const char* name;
  uint32_t c[3];  // compile-time constants, see LILY_VARIANTS
};
std::span<const Variant> variants();
const char* op_name(Op op);

// What a launch needs, decided from params alone.
struct Need {
  const char* name;
  DType dtype;
  uint64_t elements;  // at least
  Access access;
};
struct Plan {
  uint16_t variant = 0;
  Grid grid;
  std::vector<Need> needs;  // in binding order
  Access step = Access::none;
  Access unbound = Access::none;  // KV pages
};
struct Target {
  Family family;
  DType act;
};
// The first variant of `op` whose constants match; throws when there is none.
uint16_t find_variant(Op op, uint32_t c0 = 0, uint32_t c1 = 0, uint32_t c2 = 0);
// Checks bits, group and k of a matrix; `what` names the op in errors.
void check_linear(const Linear& w, const char* what);
uint64_t code_elements(const Linear& w);  // uints of one matrix's codes
uint64_t pair_elements(const Linear& w);  // uints of its pairs; 0 for bf16
inline uint32_t ceil_div(uint64_t a, uint64_t b) { return uint32_t((a + b - 1) / b); }

// The pure functions: params and target in, variant, grid and needs out. Throw LilyError.
#define X(op, P) Plan plan(const P& p, const Target& t);
LILY_OPS(X)
#undef X

// Records launches into a command list. Tensors in binding order; `step` and `unbound` where the
// plan asks for them.
class Recorder {
 public:
  Recorder(const Device& device, CommandList& list)
      : target_{device.family(), device.act()}, list_(list) {}
#define X(op, P)                                                                         \
  void op(const P& p, std::initializer_list<Tensor> args, const Tensor& step = {},       \
          std::span<const Tensor> unbound = {}) {                                        \
    record(Op::op, plan(p, target_), &p, sizeof(P), {args.begin(), args.size()}, step, unbound); \
  }
  LILY_OPS(X)
#undef X
  // By run-time op: params as bytes of the op's struct. For tests and tools.
  void any(Op op, std::span<const std::byte> params, std::span<const Tensor> args,
           const Tensor& step, std::span<const Tensor> unbound);

 private:
  void record(Op op, const Plan& plan, const void* params, size_t size,
              std::span<const Tensor> args, const Tensor& step, std::span<const Tensor> unbound);
  Target target_;
  CommandList& list_;
};

}  // namespace lily
