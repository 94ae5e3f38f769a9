// planted.metal: kernels with one bug each, which the emulated device has to refuse, and clean ones
// beside them, which it has to pass. Groups have 64 threads unless test_sim.py says otherwise.
#include "tile.h"

#define ARGS_XY IN(float, x, 0), OUT(float, y, 1)
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)

// ---- bounds and permissions -----------------------------------------------------------------------
KERNEL(copy)(ARGS_XY IDS) { READ_IDS y[group.x * 64 + tid] = x[group.x * 64 + tid]; }
KERNEL(read_after)(ARGS_XY IDS) { READ_IDS y[tid] = x[tid + 1]; }
KERNEL(read_before)(ARGS_XY IDS) { READ_IDS y[tid] = x[(int)tid - 1]; }
KERNEL(write_after)(ARGS_XY IDS) { READ_IDS y[tid + 1] = x[tid]; }
KERNEL(write_before)(ARGS_XY IDS) { READ_IDS y[(int)tid - 1] = x[tid]; }
KERNEL(wide_over_end)(ARGS_XY IDS) {
  READ_IDS
  if (tid < 16) {
    const float4 v = *(device const float4*)(x + 4 * tid);
    y[tid] = v.x + v.w;
  }
}
KERNEL(write_input)(ARGS_XY IDS) {
  READ_IDS y[tid] = 1.0f;
  if (tid == 3) ((device float*)x)[5] = 2.0f;
}
KERNEL(read_output)(ARGS_XY IDS) { READ_IDS y[tid] += x[tid]; }
KERNEL(misaligned)(ARGS_XY IDS) {
  READ_IDS
  const float4 v = *(device const float4*)(x + min(tid, 60u));
  y[tid] = v.x + v.y + v.z + v.w;
}
KERNEL(no_argument)(ARGS_XY IDS) { READ_IDS y[tid] = x[tid + (1u << 29)]; }
KERNEL(other_stack)(ARGS_XY IDS) {
  READ_IDS
  SHARED(ulong, at, 1);
  float mine[2] = {x[tid], 1.0f};
  if (tid == 0) at[0] = (ulong)mine;
  BARRIER;
  y[tid] = ((thread float*)at[0])[tid & 1];
}

// ---- initialised ----------------------------------------------------------------------------------
KERNEL(uninitialised_shared)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  if (tid != 9) s[tid] = x[tid];
  BARRIER;
  y[tid] = s[63 - tid];
}
// What a group leaves in threadgroup memory is gone for the next one.
KERNEL(stale_shared)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  if (group.x == 0) s[tid] = x[tid];
  if (group.x == 1) y[tid] = s[tid];
}

// ---- order within a group -------------------------------------------------------------------------
KERNEL(reverse)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  s[tid] = x[tid];
  BARRIER;
  y[tid] = s[63 - tid];
}
KERNEL(missing_barrier)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  s[tid] = x[tid];
  y[tid] = s[63 - tid];
}
// The loop's second round overwrites what slower threads still read.
KERNEL(missing_second_barrier)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  float sum = 0.0f;
  for (uint i = 0; i < 2; ++i) {
    s[tid] = x[tid] + float(i);
    BARRIER;
    sum += s[63 - tid];
  }
  y[tid] = sum;
}
KERNEL(wrong_flag)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  s[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_device);
  y[tid] = s[63 - tid];
}
KERNEL(simd_barrier_only)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  s[tid] = x[tid];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = s[63 - tid];
}
// Enough where both sides are lanes of one simdgroup.
KERNEL(simd_reverse)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  for (uint i = 0; i < 3; ++i) {
    s[tid] = x[tid] + float(i);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[tid] = s[simd * 32 + 31 - lane];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
// A shuffle moves values, it orders no memory.
KERNEL(shuffle_is_no_barrier)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 64);
  s[tid] = x[tid];
  const float sum = simd_sum(x[tid]);
  y[tid] = s[simd * 32 + 31 - lane] + sum;
}
KERNEL(same_value)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, s, 1);
  s[0] = x[0];
  BARRIER;
  y[tid] = s[0];
}
// Neighbours write halves of one word: right, as bytes are apart.
KERNEL(halves)(IN(ushort, x, 0), OUT(ushort, y, 1) IDS) {
  READ_IDS
  SHARED(ushort, s, 64);
  s[tid] = x[tid];
  BARRIER;
  y[tid] = s[tid ^ 1];
}
KERNEL(overlapping_halves)(IN(ushort, x, 0), OUT(ushort, y, 1) IDS) {
  READ_IDS
  SHARED(uint, s, 33);
  threadgroup ushort* halves = (threadgroup ushort*)s;
  halves[tid] = x[tid];
  if (tid == 8) s[4] = 7;
  BARRIER;
  y[tid] = halves[tid];
}
// Every thread reads every value before anyone overwrites it, in device memory.
KERNEL(in_place)(OUT(float, y, 0) IDS) {
  READ_IDS
  float sum = 0.0f;
  for (uint i = 0; i < 64; ++i) sum += y[i];
  threadgroup_barrier(mem_flags::mem_device);
  y[tid] = sum + float(tid);
}
KERNEL(in_place_too_early)(OUT(float, y, 0) IDS) {
  READ_IDS
  float sum = 0.0f;
  for (uint i = 0; i < 64; ++i) sum += y[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = sum + float(tid);
}

// ---- order between groups -------------------------------------------------------------------------
KERNEL(groups_write_same)(ARGS_XY IDS) { READ_IDS y[tid] = x[tid] + float(group.x); }
KERNEL(groups_read_others)(IN(float, x, 0), OUT(float, y, 1) IDS) {
  READ_IDS
  const uint n = 64 * 3;
  const uint at = group.x * 64 + tid;
  y[at] = x[at] + y[(at + 64) % n];
}
KERNEL(count)(IN(uint, x, 0), OUT(atomic_uint, y, 1) IDS) {
  READ_IDS
  atomic_fetch_add_explicit(y + x[group.x * 64 + tid], 1, memory_order_relaxed);
}
KERNEL(count_and_peek)(IN(uint, x, 0), OUT(atomic_uint, y, 1) IDS) {
  READ_IDS
  atomic_fetch_add_explicit(y + x[group.x * 64 + tid], 1, memory_order_relaxed);
  if (group.x == 2 && tid == 0) ((device uint*)y)[1] = 0;
}
KERNEL(shared_ticket)(ARGS_XY IDS) {
  READ_IDS
  SHARED(atomic_uint, next, 1);
  SHARED(uint, seen, 64);
  if (tid == 0) atomic_store_explicit(next, 0, memory_order_relaxed);
  BARRIER;
  const uint mine = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
  seen[mine] = 1;
  BARRIER;
  y[tid] = x[tid] * float(seen[tid] * atomic_load_explicit(next, memory_order_relaxed));
}

// ---- control flow ---------------------------------------------------------------------------------
KERNEL(divergent_barrier)(ARGS_XY IDS) {
  READ_IDS
  y[tid] = x[tid];
  if (tid < 32) BARRIER;
}
KERNEL(early_return)(ARGS_XY IDS) {
  READ_IDS
  if (tid == 63) return;
  y[tid] = x[tid];
  BARRIER;
}
KERNEL(two_barriers)(ARGS_XY IDS) {
  READ_IDS
  if (tid & 1) {
    BARRIER;
    y[tid] = x[tid];
  } else {
    y[tid] = 2.0f * x[tid];
    BARRIER;
  }
}
KERNEL(divergent_sum)(ARGS_XY IDS) {
  READ_IDS
  float v = x[tid];
  if (lane < 16) v = simd_sum(v);
  y[tid] = v;
}
KERNEL(two_sums)(ARGS_XY IDS) {
  READ_IDS
  float v = x[tid];
  if (lane & 1) v = simd_sum(v);
  else v = simd_sum(2.0f * v);
  y[tid] = v;
}
KERNEL(sum_or_max)(ARGS_XY IDS) {
  READ_IDS
  float v = x[tid];
  if (lane == 7) v = simd_shuffle(v, 1);
  else v = simd_shuffle_xor(v, 1);
  y[tid] = v;
}
KERNEL(shuffle_and_barrier)(ARGS_XY IDS) {
  READ_IDS
  float v = x[tid];
  if (tid == 40) BARRIER;
  else v = simd_sum(v);
  y[tid] = v;
}
KERNEL(lane_32)(ARGS_XY IDS) { READ_IDS y[tid] = simd_shuffle(x[tid], (ushort)(lane + 1)); }
// Trip counts differ between simdgroups, not within one: fine.
KERNEL(simd_loops)(ARGS_XY IDS) {
  READ_IDS
  float v = x[tid];
  for (uint i = 0; i <= simd; ++i) v = simd_sum(v) * 0.125f;
  y[tid] = v;
}
// Each lane takes the values below it: the undefined ones of a shuffle up are not used.
KERNEL(prefix)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, totals, 2);
  float v = x[tid];
  for (ushort d = 1; d < 32; d <<= 1) {
    const float below = simd_shuffle_up(v, d);
    if (lane >= d) v += below;
  }
  if (lane == 31) totals[simd] = v;
  BARRIER;
  y[tid] = simd == 1 ? v + totals[0] : v;
}
KERNEL(prefix_unguarded)(ARGS_XY IDS) {
  READ_IDS
  y[tid] = simd_shuffle_up(x[tid], 1);
}

// ---- threadgroup memory ---------------------------------------------------------------------------
KERNEL(shared_full)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, a, 8000);
  SHARED(float, b, 192);
  a[tid] = b[tid] = x[tid];
  y[tid] = a[tid] + b[tid];
}
KERNEL(shared_too_much)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, a, 8000);
  SHARED(float, b, 193);
  a[tid] = b[tid] = x[tid];
  y[tid] = a[tid] + b[tid];
}
KERNEL(shared_misaligned)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, a, 64);
  a[tid] = x[tid];
  BARRIER;
  const float4 v = *(threadgroup const float4*)(a + (tid & 15) * 4);
  y[tid] = v.x + v.w;
}
KERNEL(shared_after)(ARGS_XY IDS) {
  READ_IDS
  SHARED(float, a, 63);
  a[tid] = x[tid];
  y[tid] = a[tid];
}

// ---- tiles: y[32][32] = x[32][32] x[32][32]^T, one simdgroup --------------------------------------
#define STAGE                                                    \
  READ_IDS                                                       \
  SHARED(float, a, 32 * 33);                                     \
  for (uint i = lane; i < 1024; i += 32) a[i / 32 * 33 + i % 32] = x[i];
#define TILE_PRODUCT                                             \
  BARRIER;                                                       \
  Tile<32, 32> t;                                                \
  tile_zero(t);                                                  \
  tile_mma(t, (threadgroup const float*)a, 33, (threadgroup const float*)a, 33, 32);
KERNEL(tile_product)(ARGS_XY IDS) {
  STAGE
  TILE_PRODUCT
  for (uint i = 0; i < Tile<32, 32>::kSize; ++i)
    y[tile_row<32, 32>(i, lane) * 32 + tile_col<32, 32>(i, lane)] = t.v[i];
}
// x x, row r times 1 + r; stored through threadgroup memory.
KERNEL(tile_rows)(ARGS_XY IDS) {
  STAGE
  BARRIER;
  Tile<32, 32> t;
  tile_zero(t);
  tile_mma_nn(t, (threadgroup const float*)a, 33, (threadgroup const float*)a, 33, 32);
  float factor[Tile<32, 32>::kSlots];
  for (uint i = 0; i < Tile<32, 32>::kSize; ++i)
    factor[tile_slot<32, 32>(i)] = 1.0f + float(tile_row<32, 32>(i, lane));
  tile_scale_rows(t, factor);
  BARRIER;
  tile_store(t, (threadgroup float*)a, 33, lane);
  BARRIER;
  for (uint i = lane; i < 1024; i += 32) y[i] = a[i / 32 * 33 + i % 32];
}
KERNEL(tile_assumed_layout)(ARGS_XY IDS) {
  STAGE
  TILE_PRODUCT
  for (uint i = 0; i < Tile<32, 32>::kSize; ++i) y[i * 32 + lane] = t.v[i];
}
KERNEL(tile_no_barrier)(ARGS_XY IDS) {
  STAGE
  Tile<32, 32> t;
  tile_zero(t);
  tile_mma(t, (threadgroup const float*)a, 33, (threadgroup const float*)a, 33, 32);
  for (uint i = 0; i < Tile<32, 32>::kSize; ++i)
    y[tile_row<32, 32>(i, lane) * 32 + tile_col<32, 32>(i, lane)] = t.v[i];
}
KERNEL(tile_short)(ARGS_XY IDS) {
  STAGE
  BARRIER;
  Tile<32, 32> t;
  tile_zero(t);
  tile_mma(t, (threadgroup const float*)a, 33, (threadgroup const float*)a + 33, 33, 32);
  for (uint i = 0; i < Tile<32, 32>::kSize; ++i)
    y[tile_row<32, 32>(i, lane) * 32 + tile_col<32, 32>(i, lane)] = t.v[i];
}
KERNEL(tile_of_device)(ARGS_XY IDS) {
  READ_IDS
  Tile<32, 32> t;
  tile_zero(t);
  tile_mma(t, (threadgroup const float*)x, 32, (threadgroup const float*)x, 32, 32);
  for (uint i = 0; i < Tile<32, 32>::kSize; ++i)
    y[tile_row<32, 32>(i, lane) * 32 + tile_col<32, 32>(i, lane)] = t.v[i];
}
KERNEL(tile_lanes_differ)(ARGS_XY IDS) {
  STAGE
  BARRIER;
  Tile<16, 8> t;
  tile_zero(t);
  tile_mma(t, (threadgroup const float*)a + (lane & 1), 33, (threadgroup const float*)a, 33, 16);
  for (uint i = 0; i < Tile<16, 8>::kSize; ++i)
    y[tile_row<16, 8>(i, lane) * 8 + tile_col<16, 8>(i, lane)] = t.v[i];
}

// ---- several launches -----------------------------------------------------------------------------
KERNEL(add)(IN(float, x, 0), IN(float, z, 1), OUT(float, y, 2) IDS) {
  READ_IDS
  y[group.x * 64 + tid] = x[group.x * 64 + tid] + z[group.x * 64 + tid];
}
// First and last word of a range too large to be there in full.
KERNEL(ends)(IN(float, x, 0), IN(ulong, n, 1), OUT(float, y, 2) IDS) {
  READ_IDS
  if (tid == 0) y[0] = x[0];
  if (tid == 1) y[1] = x[n[0] - 1];
}
