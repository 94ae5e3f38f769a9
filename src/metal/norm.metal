// norm.metal: rms_norm, the row norm of prefill.
#include "util.h"

// One threadgroup a row: y = x * gain / sqrt(mean(x^2) + eps), rounded once.
#define NORM_THREADS 128
static inline void rms_norm_body(device const act_t* x, device const float* gain, device act_t* h,
                                 PARAM_REF(RmsNorm) p, threadgroup float* scratch, uint3 group,
                                 uint tid, uint lane, uint simd) {
  device const act_t* row = x + (ulong)group.x * p.k;
  device act_t* out = h + (ulong)group.x * p.k;
  float sum = 0.0f;
  for (uint i = tid * 4; i < p.k; i += NORM_THREADS * 4) {
    const float4 v = load4(row + i);
    UNROLL for (uint e = 0; e < 4; ++e)
      sum = fma(v[e], v[e], sum);
  }
  sum = group_sum(sum, scratch, lane, simd, NORM_THREADS / 32);
  const float inv = inv_sqrt(sum / float(p.k) + p.eps);
  for (uint i = tid * 4; i < p.k; i += NORM_THREADS * 4) {
    store4(out + i, load4(row + i) * inv * *(device const float4*)(gain + i));
  }
}
#define RMS_NORM(op, name, c0, c1, c2)                                                            \
  KERNEL(name)(IN(act_t, x, 0), IN(float, gain, 1), OUT(act_t, h, 2), PARAMS(RmsNorm, 3) IDS) {   \
    READ_IDS                                                                                      \
    SHARED(float, scratch, NORM_THREADS / 32);                                                    \
    rms_norm_body(x, gain, h, p, scratch, group, tid, lane, simd);                                \
  }
LILY_VARIANTS_rms_norm(RMS_NORM)
