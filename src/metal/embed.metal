// embed.metal: rows of the quantised token table, and plain copies.
#include "util.h"

// ---- embed --------------------------------------------------------------------------------------
// A group per row, 32 values a thread and step: value = scale * code + bias, rounded. An id past
// the table leaves NaN, so that the fault shows instead of another token's row.
#define EMBED_SIMDS 2
template <uint BITS>
static inline float embed_body(device const uint* codes, device const uint* pairs, uint id,
                               device act_t* x, PARAM_REF(Linear) w, uint tid) {
  float sum = 0.0f;
  for (uint k0 = tid * 32; k0 < w.k; k0 += EMBED_SIMDS * 1024) {
    float q[32];
    float2 sb = float2(1.0f, 0.0f);
    if (id < w.n) {
      load_codes32<BITS>(codes + ((ulong)id * row_bytes(w.k, BITS) + (ulong)k0 * BITS / 8) / 4, q);
      if (BITS != 16) {
        const ulong row = (ulong)id * (w.k >> w.group_shift);
        sb = scale_bias(pairs[row + (k0 >> w.group_shift)], w.scale_f16);
      }
    } else {
      UNROLL for (uint j = 0; j < 32; ++j)
        q[j] = NAN;
    }
    UNROLL for (uint j = 0; j < 8; ++j) {
      float4 v;
      UNROLL for (uint e = 0; e < 4; ++e) {
        v[e] = round_act(BITS == 16 ? q[4 * j + e] : fma(sb.x, q[4 * j + e], sb.y));
        sum = fma(v[e], v[e], sum);
      }
      store4(x + k0 + 4 * j, v);
    }
  }
  return sum;
}
#define EMBED(op, name, BITS, c1, c2)                                                              \
  KERNEL(name)(IN(uint, codes, 0), IN(uint, pairs, 1), IN(uint, ids, 2), OUT(act_t, x, 3),         \
               OUT(float, ssq, 4), PARAMS(Embed, 5) IDS) {                                         \
    READ_IDS                                                                                       \
    SHARED(float, scratch, EMBED_SIMDS);                                                           \
    const uint row = group.x;                                                                      \
    const float sum = embed_body<BITS>(codes, pairs, ids[row], x + (ulong)row * p.w.k, p.w, tid);  \
    const float total = group_sum(sum, scratch, lane, simd, EMBED_SIMDS);                          \
    if (tid == 0) ssq[row] = total;                                                                \
  }
LILY_VARIANTS_embed(EMBED)

// ---- copy_bytes ---------------------------------------------------------------------------------
// 256 threads a group, sixteen words a thread: rows of an odd vocabulary begin at any word.
#define COPY_BYTES(op, name, c0, c1, c2)                                                           \
  KERNEL(name)(IN(uint, from, 0), OUT(uint, to, 1), PARAMS(CopyBytes, 2) IDS) {                    \
    READ_IDS                                                                                       \
    const ulong words = p.bytes / 4;                                                               \
    UNROLL for (uint j = 0; j < 16; ++j) {                                                         \
      const ulong i = (ulong)group.x * 4096 + j * 256 + tid;                                       \
      if (i < words) to[i] = from[i];                                                              \
    }                                                                                              \
  }
LILY_VARIANTS_copy_bytes(COPY_BYTES)
