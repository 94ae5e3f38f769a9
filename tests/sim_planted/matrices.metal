// matrices.metal: simdgroup matrices and tiles made of them, for test_tile.py: clean kernels, and some
// with one bug each. Groups have one simdgroup.
#include "tile.h"

#define ARGS_XY IN(float, x, 0), OUT(float, y, 1)
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define PUT(m)                             \
  y[2 * lane] = (m).thread_elements()[0];  \
  y[2 * lane + 1] = (m).thread_elements()[1];

// ---- matrices: x[16][16] --------------------------------------------------------------------------
KERNEL(matrix_layout)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 16);
  PUT(m)
}
KERNEL(matrix_turned)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x + 3, 16, 0, true);
  PUT(m)
}
KERNEL(matrix_copy)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 16 * 17);
  for (uint i = 0; i < 16; i += 8) {
    for (uint j = 0; j < 16; j += 8) {
      simdgroup_float8x8 m;
      simdgroup_load(m, x, 16, ulong2(j, i));
      simdgroup_store(m, (threadgroup float*)s, 17, ulong2(j, i));
    }
  }
  BARRIER;
  for (uint i = lane; i < 256; i += 32) y[i] = s[i / 16 * 17 + i % 16];
}
KERNEL(matrix_store_turned)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 16);
  simdgroup_store(m, y, 8, 0, true);
}
// y[2][8][8]: a a^T, then a a^T + 2.
KERNEL(matrix_products)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 a, b, c;
  simdgroup_load(a, x, 16);
  simdgroup_load(b, x, 16, 0, true);
  simdgroup_multiply(c, a, b);
  simdgroup_store(c, y, 8);
  simdgroup_multiply_accumulate(c, a, b, make_filled_simdgroup_matrix<float, 8, 8>(2.0f));
  simdgroup_store(c, y + 64, 8);
}
// x as bf16: y = a a^T, then a again, which passed through a store.
KERNEL(matrix_bf16)(ARGS_XY IDS) {
  READ_IDS
  SHARED(ushort, s, 256);
  SHARED(ushort, t, 64);
  for (uint i = lane; i < 256; i += 32) s[i] = (ushort)float_to_bf16_bits(x[i]);
  BARRIER;
  simdgroup_bfloat8x8 a, b;
  simdgroup_float8x8 c;
  simdgroup_load(a, (threadgroup const bfloat*)s, 16);
  simdgroup_load(b, (threadgroup const bfloat*)s, 16, 0, true);
  simdgroup_multiply(c, a, b);
  simdgroup_store(c, y, 8);
  simdgroup_store(a, (threadgroup bfloat*)t, 8);
  BARRIER;
  for (uint i = lane; i < 64; i += 32) y[64 + i] = bf16_bits_to_float(t[i]);
}

KERNEL(matrix_divergent)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  m.thread_elements()[0] = m.thread_elements()[1] = 0.0f;
  if (lane != 5) simdgroup_load(m, x, 16);
  PUT(m)
}
KERNEL(matrix_half_product)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 16);
  if (lane < 16) simdgroup_multiply(m, m, m);
  PUT(m)
}
KERNEL(matrix_lanes_differ)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x + (lane & 1), 16);
  PUT(m)
}
KERNEL(matrix_lines_differ)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x, lane == 31 ? 15 : 16);
  PUT(m)
}
KERNEL(matrix_short)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x + 137, 16);
  PUT(m)
}
KERNEL(matrix_misaligned)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, (device const float*)((device const uchar*)x + 2), 16);
  PUT(m)
}
KERNEL(matrix_into_input)(ARGS_XY IDS) {
  READ_IDS
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 16);
  simdgroup_store(m, (device float*)x, 16);
  PUT(m)
}
KERNEL(matrix_no_barrier)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  s[lane] = x[lane];
  s[32 + lane] = x[32 + lane];
  simdgroup_float8x8 m;
  simdgroup_load(m, (threadgroup const float*)s, 8);
  PUT(m)
}
KERNEL(matrix_read_too_early)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 16);
  simdgroup_store(m, (threadgroup float*)s, 8);
  y[lane] = s[63 - lane];
}

// ---- tiles: y[16][24] = a b^T + a c of x as bf16: a [16][32], b [24][32], c [32][24] ----------------
KERNEL(tile_bf16)(ARGS_XY IDS) {
  READ_IDS
  SHARED(ushort, s, 16 * 34 + 24 * 38 + 32 * 26);
  for (uint i = lane; i < 16 * 32; i += 32) {
    s[i / 32 * 34 + i % 32] = (ushort)float_to_bf16_bits(x[i]);
  }
  for (uint i = lane; i < 24 * 32; i += 32) {
    s[16 * 34 + i / 32 * 38 + i % 32] = (ushort)float_to_bf16_bits(x[512 + i]);
    s[16 * 34 + 24 * 38 + i / 24 * 26 + i % 24] = (ushort)float_to_bf16_bits(x[1280 + i]);
  }
  BARRIER;
  threadgroup const bfloat* a = (threadgroup const bfloat*)s;
  Tile<16, 24> t;
  tile_zero(t);
  tile_mma(t, a, 34, a + 16 * 34, 38, 32);
  tile_mma_nn(t, a, 34, a + 16 * 34 + 24 * 38, 26, 32);
  for (uint i = 0; i < Tile<16, 24>::kSize; ++i)
    y[tile_row<16, 24>(i, lane) * 24 + tile_col<16, 24>(i, lane)] = t.v[i];
}
