// tile.h: the matrix tile of one simdgroup: Tile<M, N> accumulates in fp32; one interface over Metal
// 4's tensor operations, simdgroup matrices and mma.sync. Operands lie in threadgroup memory, as act_t
// or float.
//
//   tile_zero(t)                        tile_mma(t, A[M][lda], B[N][ldb], K)     t += A B^T
//   tile_mma_nn(t, A[M][lda], B[K][ldb], K)   t += A B      (K a multiple of 16)
//   t.v[i], 0 <= i < Tile::kSize: the lane's elements, at tile_row<M, N>(i, lane), tile_col<M, N>(i, lane)
//   tile_slot<M, N>(i) < Tile::kSlots: which of the lane's rows element i is in
//   tile_scale_rows(t, factor[kSlots])  tile_store(t, T* threadgroup, ld, lane)
// Products with 4-bit codes, of bf16 only, where a code q counts as CODE_OFFSET + q; rows are put piece by
// piece, each where the target wants it, K is a multiple of 32:
//   tile_put_values(row of A, k, 8 values)  tile_put_codes(row of B, k, 32 codes)
//   tile_mma_codes<K>(t, A[M][lda], B[N], row, k)  t += A B^T over k .. k + K; row = CODE_ROW(K): uints of
//   a row of B
// The (lane, i) -> (row, column) map is the target's own; sim draws it by seed. Products are
// collectives of the simdgroup. M is a multiple of 16, N of 8 (of 16 for bf16).
#ifndef LILY_TILE_H
#define LILY_TILE_H

#include "util.h"

#if defined(LILY_TILE_TENSOR) || (defined(LILY_SIM) && !defined(LILY_TILE_SIMDGROUP))
#ifdef __METAL_VERSION__
static_assert(__METAL_VERSION__ >= 400, "tensor operations came with MSL 4.0");
#endif
// clang-format off
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>  // needs the former
// clang-format on

// The layout is the system's: asked for, never known. Every element is a slot of its own, so code that
// assumes neighbours share rows fails here.
template <uint M, uint N>
struct Tile {
  enum { kSize = M * N / 32, kSlots = M * N / 32 };
  float v[M * N / 32];
};
template <typename T>
using TileOperand = tensor<threadgroup T, dextents<int, 2>, tensor_inline>;
// Extents are columns, rows: the contiguous one first.
template <typename T>
static inline TileOperand<T> tile_operand(threadgroup const T* at, uint columns, uint rows,
                                          uint ld) {
  return TileOperand<T>((threadgroup T*)at, dextents<int, 2>(int(columns), int(rows)),
                        array<int, 2>({1, int(ld)}));
}
// op: t += A B^T or A B by one simdgroup, of fp32 or bf16 operands of any K, without rounding them.
#define LILY_TILE_OP(TRANSPOSED)                                                                  \
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(                               \
      int(M), int(N), static_cast<int>(dynamic_extent), false, TRANSPOSED, false,                 \
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);                           \
  mpp::tensor_ops::matmul2d<descriptor, execution_simdgroup> op;
// which: 0 column, 1 row.
template <uint M, uint N>
static inline uint tile_place(uint i, uint which) {
  LILY_TILE_OP(true)
  auto c = op.template get_destination_cooperative_tensor<TileOperand<act_t>, TileOperand<act_t>,
                                                          float>();
  const auto place = c.get_multidimensional_index(ushort(i));
  return uint(place[which]);
}
template <uint M, uint N>
static inline uint tile_row(uint i, uint) {
  return tile_place<M, N>(i, 1);
}
template <uint M, uint N>
static inline uint tile_col(uint i, uint) {
  return tile_place<M, N>(i, 0);
}
template <uint M, uint N>
static inline constexpr uint tile_slot(uint i) {
  return i;
}
template <bool TRANSPOSED, uint M, uint N, typename T>
static inline void tile_mma_any(thread Tile<M, N>& t, threadgroup const T* a, uint lda,
                                threadgroup const T* b, uint ldb, uint k) {
  LILY_TILE_OP(TRANSPOSED)
  auto left = tile_operand(a, k, M, lda);
  auto right = tile_operand(b, TRANSPOSED ? k : N, TRANSPOSED ? N : k, ldb);
  auto c = op.template get_destination_cooperative_tensor<TileOperand<T>, TileOperand<T>, float>();
  UNROLL for (ushort i = 0; i < M * N / 32; ++i)
    c[i] = t.v[i];
  op.run(left, right, c);
  UNROLL for (ushort i = 0; i < M * N / 32; ++i)
    t.v[i] = c[i];
}
#undef LILY_TILE_OP

#elif defined(__METAL_VERSION__) || defined(LILY_TILE_SIMDGROUP)

// 8 x 8 pieces as simdgroup matrices, row by row. Of each a lane holds two neighbours of one row.
// Apple does not document which; relied upon is what public kernels on all chips from M1 on rely on
// (MLX's steel/gemm/mma.h, llama.cpp's flash attention): bits 4, 2, 1 of the lane are the row, bits
// 3, 0 the pair of columns.
template <uint M, uint N>
struct Tile {
  enum { kSize = M * N / 32, kSlots = M / 8 };
  float v[M * N / 32];
};
template <uint M, uint N>
static inline uint tile_row(uint i, uint lane) {
  return i / 2 / (N / 8) * 8 + ((lane >> 2) & 4) + ((lane >> 1) & 3);
}
template <uint M, uint N>
static inline uint tile_col(uint i, uint lane) {
  return i / 2 % (N / 8) * 8 + ((lane >> 1) & 4) + (lane & 1) * 2 + (i & 1);
}
template <uint M, uint N>
static inline constexpr uint tile_slot(uint i) {
  return i / 2 / (N / 8);
}

// bf16 operands stay 16 bits wide, the products are summed in fp32.
template <bool TRANSPOSED, uint M, uint N, typename T>
static inline void tile_mma_any(thread Tile<M, N>& t, threadgroup const T* a, uint lda,
                                threadgroup const T* b, uint ldb, uint k_count) {
  simdgroup_float8x8 d[M * N / 64];
  UNROLL for (uint i = 0; i < M * N / 64; ++i) {
    d[i].thread_elements()[0] = t.v[2 * i];
    d[i].thread_elements()[1] = t.v[2 * i + 1];
  }
  for (uint k = 0; k < k_count; k += 8) {
    simdgroup_matrix<T, 8, 8> ra[M / 8];
    UNROLL for (uint m = 0; m < M / 8; ++m)
      simdgroup_load(ra[m], a + m * 8 * lda + k, lda);
    UNROLL for (uint n = 0; n < N / 8; ++n) {
      simdgroup_matrix<T, 8, 8> rb;
      if (TRANSPOSED) simdgroup_load(rb, b + n * 8 * ldb + k, ldb, 0, true);
      else simdgroup_load(rb, b + k * ldb + n * 8, ldb);
      UNROLL for (uint m = 0; m < M / 8; ++m) {
        const uint i = m * (N / 8) + n;
        simdgroup_multiply_accumulate(d[i], ra[m], rb, d[i]);
      }
    }
  }
  UNROLL for (uint i = 0; i < M * N / 64; ++i) {
    t.v[2 * i] = d[i].thread_elements()[0];
    t.v[2 * i + 1] = d[i].thread_elements()[1];
  }
}

#elif defined(__NVPTX__)

template <uint M, uint N>
struct Tile {
  enum { kSize = M * N / 32, kSlots = M / 8 };
  float v[M * N / 32];
};
// mma.m16n8k16: lane = 4 g + t holds rows g, g + 8 and columns 2 t, 2 t + 1 of each 16 x 8 piece. The
// lane comes from its register: passed on it would cost another one.
static inline uint tile_lane() { return lily_thread() & 31; }
template <uint M, uint N>
static inline uint tile_row(uint i, uint) {
  return (i / 4) / (N / 8) * 16 + tile_lane() / 4 + ((i >> 1) & 1) * 8;
}
template <uint M, uint N>
static inline uint tile_col(uint i, uint) {
  return (i / 4) % (N / 8) * 8 + (tile_lane() & 3) * 2 + (i & 1);
}
template <uint M, uint N>
static inline constexpr uint tile_slot(uint i) {
  return (i / 4) / (N / 8) * 2 + ((i >> 1) & 1);
}

// Four 8 x 8 pieces of bf16: lane l gives the address of row l & 7 of piece l >> 3 (16 bytes, aligned)
// and gets of each piece two neighbours of row l / 4, or with TRANS of column l / 4.
template <bool TRANS>
static inline void tile_load(thread uint (&r)[4], threadgroup const bfloat* at) {
  const uint address = (uint)(ulong)at;
  if (TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}
// d[16 x 8] += a[16 x 16] b[16 x 8].
static inline void tile_mma16(thread float* d, thread const uint (&a)[4], uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <bool TRANSPOSED, uint M, uint N>
static inline void tile_mma_any(thread Tile<M, N>& t, threadgroup const bfloat* a, uint lda,
                                threadgroup const bfloat* b, uint ldb, uint k_count) {
  static_assert(N % 16 == 0, "columns are loaded by 16");
  // Pieces of A: rows 0 and 8 of k 0, then of k 8. Of B: k 0 and 8 of 8 columns, then of the next 8.
  const uint low = tile_lane() & 15, high = tile_lane() >> 4;
  const uint n_low = (tile_lane() & 7) + high * 8, k_low = (tile_lane() & 8);
  for (uint k = 0; k < k_count; k += 16) {
    uint ra[M / 16][4];
    UNROLL for (uint m = 0; m < M / 16; ++m)
      tile_load<false>(ra[m], a + (m * 16 + low) * lda + k + high * 8);
    UNROLL for (uint n0 = 0; n0 < N / 8; n0 += 2) {
      uint rb[4];
      if (TRANSPOSED) tile_load<false>(rb, b + (n0 * 8 + n_low) * ldb + k + k_low);
      else tile_load<true>(rb, b + (k + low) * ldb + n0 * 8 + high * 8);
      UNROLL for (uint n = n0; n < n0 + 2; ++n) {
        UNROLL for (uint m = 0; m < M / 16; ++m) {
          tile_mma16(t.v + (m * (N / 8) + n) * 4, ra[m], rb[(n - n0) * 2], rb[(n - n0) * 2 + 1]);
        }
      }
    }
  }
}
#ifdef LILY_EXACT
// fp32 operands where all is fp32: plain multiply-adds, the same layout.
template <bool TRANSPOSED, uint M, uint N>
static inline void tile_mma_any(thread Tile<M, N>& t, threadgroup const float* a, uint lda,
                                threadgroup const float* b, uint ldb, uint k_count) {
  const uint g = tile_lane() / 4, c = (tile_lane() & 3) * 2;
  for (uint k = 0; k < k_count; ++k) {
    float ra[M / 8];
    UNROLL for (uint s = 0; s < M / 8; ++s)
      ra[s] = a[((s / 2) * 16 + g + (s & 1) * 8) * lda + k];
    UNROLL for (uint n = 0; n < N / 8; ++n) {
      float rb[2];
      UNROLL for (uint e = 0; e < 2; ++e) {
        const uint col = n * 8 + c + e;
        rb[e] = TRANSPOSED ? b[col * ldb + k] : b[k * ldb + col];
      }
      UNROLL for (uint s = 0; s < M / 8; ++s) {
        UNROLL for (uint e = 0; e < 2; ++e) {
          thread float& d = t.v[((s / 2) * (N / 8) + n) * 4 + (s & 1) * 2 + e];
          d = fma(ra[s], rb[e], d);
        }
      }
    }
  }
}
#else
// fp32 operands beside bf16 ones: as two tf32 numbers each, of which three products are taken: what is
// lost is 2^-22 of each product. Rows are aligned to 16 bytes.
struct TilePair {
  uint high, low;
};
static inline TilePair tile_split(uint bits) {
  TilePair p;
  p.high = (bits + 0x1000u) & 0xffffe000u;  // to the nearest; the product ignores the bits below
  p.low = as_type<uint>(as_type<float>(bits) - as_type<float>(p.high)) + 0x1000u;
  return p;
}
// d[16 x 8] += a[16 x 8] b[8 x 8].
static inline void tile_mma8(thread float* d, uint a0, uint a1, uint a2, uint a3, uint b0,
                             uint b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
static inline void tile_mma8(thread float* d, thread const TilePair (&a)[4],
                             thread const TilePair (&b)[2]) {
  tile_mma8(d, a[0].low, a[1].low, a[2].low, a[3].low, b[0].high, b[1].high);
  tile_mma8(d, a[0].high, a[1].high, a[2].high, a[3].high, b[0].low, b[1].low);
  tile_mma8(d, a[0].high, a[1].high, a[2].high, a[3].high, b[0].high, b[1].high);
}
template <bool TRANSPOSED, uint M, uint N>
static inline void tile_mma_any(thread Tile<M, N>& t, threadgroup const float* a, uint lda,
                                threadgroup const float* b, uint ldb, uint k_count) {
  // tile_load moves 16 bytes of a row, which are 4 values here: one of them a lane.
  const uint g = tile_lane() / 4, c = tile_lane() & 3;
  const uint low = tile_lane() & 15, high = tile_lane() >> 4;
  for (uint k = 0; k < k_count; k += 8) {
    TilePair ra[M / 16][4];
    UNROLL for (uint m = 0; m < M / 16; ++m) {
      uint r[4];
      tile_load<false>(r, (threadgroup const bfloat*)(a + (m * 16 + low) * lda + k + high * 4));
      UNROLL for (uint i = 0; i < 4; ++i)
        ra[m][i] = tile_split(r[i]);
    }
    UNROLL for (uint n = 0; n < N / 8; ++n) {
      TilePair rb[2];
      UNROLL for (uint i = 0; i < 2; ++i) {
        const uint row = k + c + 4 * i, column = n * 8 + g;
        rb[i] =
            tile_split(as_type<uint>(TRANSPOSED ? b[column * ldb + row] : b[row * ldb + column]));
      }
      UNROLL for (uint m = 0; m < M / 16; ++m)
        tile_mma8(t.v + (m * (N / 8) + n) * 4, ra[m], rb);
    }
  }
}
#endif

#endif

// ---- codes --------------------------------------------------------------------------------------
// Code q becomes 16 + q, a nibble in the upper mantissa bits of 16. Two come out of a word at once,
// codes j and j + 4, so that k runs 0 4 1 5 2 6 3 7 within 8 in both operands.
#define CODE_OFFSET 16.0f
static inline uint code_pair(uint w) { return and_or(w, 0x00780078u, 0x41804180u); }
static inline uint4 code_pairs(uint q) {
  return uint4(code_pair(q << 3), code_pair(q >> 1), code_pair(q >> 5), code_pair(q >> 9));
}
static inline uint4 value_pairs(uint4 v) {
  return uint4((v.x & 0xffffu) | (v.z << 16), (v.x >> 16) | (v.z & 0xffff0000u),
               (v.y & 0xffffu) | (v.w << 16), (v.y >> 16) | (v.w & 0xffff0000u));
}
#ifdef __NVPTX__
// Codes stay as they are; a lane unpacks those of its column, words t and t + 4 of 64 values. It so
// meets pair j of words 0 .. 3 in one product, which is how rows of A lie: 16 bytes for each j.
#define CODE_ROW(K) ((K) / 8 + 4)
static inline void tile_put_values(threadgroup bfloat* row, uint k, uint4 v) {
  threadgroup uint* to = (threadgroup uint*)row + (k & 32) / 2 + (k / 8 & 3);
  const uint4 p = value_pairs(v);
  UNROLL for (uint j = 0; j < 4; ++j)
    to[4 * j] = p[j];
}
static inline void tile_put_codes(threadgroup uint* row, uint k, uint4 codes) {
  *(threadgroup uint4*)(row + k / 8) = codes;
}
template <uint K, uint M, uint N>
static inline void tile_mma_codes(thread Tile<M, N>& t, threadgroup const bfloat* a, uint lda,
                                  threadgroup const uint* b, uint row, uint k0) {
  const uint low = tile_lane() & 15, high = tile_lane() >> 4;
  threadgroup const uint* words = b + tile_lane() / 4 * row + (tile_lane() & 3) + k0 / 8;
  UNROLL for (uint k = 0; k < K; k += 32) {
    uint q[N / 8];
    UNROLL for (uint n = 0; n < N / 8; ++n)
      q[n] = words[n * 8 * row + k / 8];
    UNROLL for (uint s = 0; s < 2; ++s) {
      uint ra[M / 16][4];
      UNROLL for (uint m = 0; m < M / 16; ++m)
        tile_load<false>(ra[m], a + (m * 16 + low) * lda + k0 + k + s * 16 + high * 8);
      UNROLL for (uint n = 0; n < N / 8; ++n) {
        const uint4 rb = code_pairs(q[n]);
        UNROLL for (uint m = 0; m < M / 16; ++m)
          tile_mma16(t.v + (m * (N / 8) + n) * 4, ra[m], rb[2 * s], rb[2 * s + 1]);
      }
    }
  }
}
#else
#define CODE_ROW(K) (((K) + 8) / 2)
static inline void tile_put_values(threadgroup bfloat* row, uint k, uint4 v) {
  *(threadgroup uint4*)(row + k) = value_pairs(v);
}
static inline void tile_put_codes(threadgroup uint* row, uint k, uint4 codes) {
  UNROLL for (uint i = 0; i < 4; ++i)
    *(threadgroup uint4*)(row + k / 2 + 4 * i) = code_pairs(codes[i]);
}
template <uint K, uint M, uint N>
static inline void tile_mma_codes(thread Tile<M, N>& t, threadgroup const bfloat* a, uint lda,
                                  threadgroup const uint* b, uint row, uint k0) {
  tile_mma_any<true>(t, a + k0, lda, (threadgroup const bfloat*)b + k0, 2 * row, K);
}
#endif

// ---- common to all targets ----------------------------------------------------------------------
template <uint M, uint N>
static inline void tile_zero(thread Tile<M, N>& t) {
  UNROLL for (uint i = 0; i < M * N / 32; ++i)
    t.v[i] = 0.0f;
}
template <uint M, uint N, typename T>
static inline void tile_mma(thread Tile<M, N>& t, threadgroup const T* a, uint lda,
                            threadgroup const T* b, uint ldb, uint k) {
  tile_mma_any<true>(t, a, lda, b, ldb, k);
}
template <uint M, uint N, typename T>
static inline void tile_mma_nn(thread Tile<M, N>& t, threadgroup const T* a, uint lda,
                               threadgroup const T* b, uint ldb, uint k) {
  tile_mma_any<false>(t, a, lda, b, ldb, k);
}
template <uint M, uint N, uint SLOTS>
static inline void tile_scale_rows(thread Tile<M, N>& t, thread const float (&factor)[SLOTS]) {
  UNROLL for (uint i = 0; i < M * N / 32; ++i)
    t.v[i] *= factor[tile_slot<M, N>(i)];
}
static inline void tile_put(threadgroup float* to, float v) { *to = v; }
#ifndef LILY_EXACT
static inline void tile_put(threadgroup act_t* to, float v) { *to = to_act(v); }
#endif
template <uint M, uint N, typename T>
static inline void tile_store(thread const Tile<M, N>& t, threadgroup T* to, uint ld, uint lane) {
  UNROLL for (uint i = 0; i < M * N / 32; ++i)
    tile_put(to + tile_row<M, N>(i, lane) * ld + tile_col<M, N>(i, lane), t.v[i]);
}

#endif  // LILY_TILE_H
