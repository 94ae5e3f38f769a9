// cpu_embed.cpp: twins of the token table's rows and of plain copies.
#include <algorithm>
#include <type_traits>

#include "cpu_twin.h"

namespace lily {
namespace LILY_CPU_NS {

void embed(const TwinCall& call) {
  const auto& p = params<Embed>(call);
  const uint32_t bits = p.w.bits, per_word = 32 / bits, k = p.w.k;
  const uint32_t mask = bits == 16 ? 0xffffu : (1u << bits) - 1;
  with_act(call, [&](auto* tag) {
    using Act = std::remove_pointer_t<decltype(tag)>;
    parallel(call, p.rows, [&](size_t r) {
      const uint64_t id = arg<uint32_t>(call, 2)[r];
      const uint32_t* codes = arg<uint32_t>(call, 0) + id * (k / per_word);
      const uint32_t* pairs = arg<uint32_t>(call, 1) + id * (k >> p.w.group_shift);
      Act* x = arg<Act>(call, 3) + r * k;
      float sums[64] = {}, sum = 0.0f;  // short sums: k is a multiple of 64
      for (uint32_t i = 0; i < k; ++i) {
        float v = NAN;  // of an id past the table: the fault shows
        if (id < p.w.n) {
          const uint32_t q = (codes[i / per_word] >> (i % per_word * bits)) & mask;
          float s, b;
          if (bits != 16) scale_bias(pairs[i >> p.w.group_shift], p.w.scale_f16, s, b);
          v = bits == 16 ? bf16_to_float(uint16_t(q)) : std::fma(s, float(q), b);
        }
        v = rounded(x, v);
        store(x, i, v);
        sums[i % 64] += v * v;
      }
      for (float part : sums) sum += part;
      arg<float>(call, 4)[r] = sum;
    });
  });
}

void copy_bytes(const TwinCall& call) {
  constexpr uint64_t kBlock = 1 << 20;
  const uint64_t bytes = params<CopyBytes>(call).bytes;
  parallel(call, (bytes + kBlock - 1) / kBlock, [&](size_t i) {
    const uint64_t at = i * kBlock;
    std::memcpy(call.args[1] + at, call.args[0] + at, std::min(kBlock, bytes - at));
  });
}

}  // namespace LILY_CPU_NS
}  // namespace lily
