// MetalPerformancePrimitives.h: matrix products of tensors in threadgroup memory by one simdgroup, for
// plain clang: sim computes them as the whole simdgroup and draws the layout of the result by seed; on
// NVPTX they are correct, not fast.
#pragma once

#include <metal_tensor>

#ifndef __NVPTX__
extern "C" {
// Row << 16 | column of the lane's element i, a seeded bijection per (M, N).
__attribute__((const)) uint lily_sim_tile_map(uint m, uint n, uint i, uint lane);
// transposed: B is [N][ldb], else [K][ldb]; bf16: operand type. v: this lane's elements.
LILY_COLLECTIVE void lily_sim_tile_mma(float* v, uint m, uint n, uint k, const void* a, uint lda,
                                       const void* b, uint ldb, int transposed, int bf16);
// An operation that Metal does not have, or operands that do not fit it.
__attribute__((noreturn)) void lily_sim_tile_refuse(const char* why);
}
#endif

namespace mpp {
namespace tensor_ops {

// A descriptor is a number here: clang's C++17 takes no class as a template's value. The struct
// is there for its enum.
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
};
constexpr ulong matmul2d_descriptor(
    int m, int n, int k, bool left_transposed = false, bool right_transposed = false,
    bool relaxed = false,
    enum matmul2d_descriptor::mode mode = matmul2d_descriptor::mode::multiply) {
  return (ulong)m | (ulong)n << 12 | (ulong)right_transposed << 24 | (ulong)left_transposed << 25 |
         (ulong)relaxed << 26 | (ulong)mode << 27 | (ulong)(k + 1) << 32;
}

template <uint M, uint N>
struct lily_cooperative_tensor {
  float held[M * N / 32];
  LILY_MEMBER float& operator[](ushort i) { return held[i]; }
  LILY_MEMBER metal::array<int, 2> get_multidimensional_index(ushort i) const {
#ifdef __NVPTX__
    const uint at = i * 32u + (metal::lily_thread() & 31);
    return {{(int)(at % N), (int)(at / N)}};
#else
    const uint at = lily_sim_tile_map(M, N, i, metal::lily_thread() & 31);
    return {{(int)(at & 0xffff), (int)(at >> 16)}};
#endif
  }
};

template <ulong DESCRIPTOR, typename SCOPE>
struct matmul2d;
template <ulong DESCRIPTOR>
struct matmul2d<DESCRIPTOR, metal::execution_simdgroup> {
  enum : uint { M = DESCRIPTOR & 4095, N = DESCRIPTOR >> 12 & 4095 };
  enum : bool { TRANSPOSED = (DESCRIPTOR >> 24 & 1) != 0 };
  static_assert(M % 8 == 0 && N % 8 == 0 && (M % 16 == 0 || N % 16 == 0), "no such tile in Metal");
  static_assert((DESCRIPTOR >> 25 & 3) == 0, "A is not turned here, and fp32 operands not rounded");
  static_assert((DESCRIPTOR >> 27 & 1) == 1, "products are added to the result");
  static_assert(DESCRIPTOR >> 32 == 0, "K is the operands'");

  template <typename LEFT, typename RIGHT, typename RESULT>
  LILY_MEMBER lily_cooperative_tensor<M, N> get_destination_cooperative_tensor() const {
    static_assert(__is_same(RESULT, float) && __is_same(LEFT, RIGHT), "operand types");
    return {};
  }
  template <typename OPERAND>
  LILY_MEMBER void run(const OPERAND& a, const OPERAND& b, lily_cooperative_tensor<M, N>& c) const {
    const uint k = (uint)a.extents.held[0];
#ifdef __NVPTX__
    for (uint i = 0; i < M * N / 32; ++i) {
      const metal::array<int, 2> at = c.get_multidimensional_index((ushort)i);
      const int row = at[1], column = at[0], ld = b.strides[1];
      for (uint j = 0; j < k; ++j) {
        const float left = metal::lily_widen(a.data[row * a.strides[1] + (int)j]);
        const float right =
            metal::lily_widen(b.data[TRANSPOSED ? column * ld + (int)j : (int)j * ld + column]);
        c.held[i] = metal::fma(left, right, c.held[i]);
      }
    }
#else
    const uint inner = (uint)b.extents.held[TRANSPOSED ? 0 : 1];
    const uint columns = (uint)b.extents.held[TRANSPOSED ? 1 : 0];
    if (a.strides[0] != 1 || b.strides[0] != 1) lily_sim_tile_refuse("a stride of 1 comes first");
    if (a.extents.held[1] != (int)M || columns != N || inner != k)
      lily_sim_tile_refuse("operands of other extents than the descriptor's");
    lily_sim_tile_mma(c.held, M, N, k, a.data, (uint)a.strides[1], b.data, (uint)b.strides[1],
                      TRANSPOSED, sizeof(typename OPERAND::element) == 2);
#endif
  }
};

}  // namespace tensor_ops
}  // namespace mpp
