// x86_level.h: which x86-64 level (psABI 1 to 4) this processor and operating system offer.
#pragma once
#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdint>
#include <initializer_list>

namespace lily {

// By cpuid itself: __builtin_cpu_supports needs a run-time part that not every compiler brings.
inline int x86_level() {
  struct {
    uint32_t a, b, c, d;
  } one{}, seven{}, extended{};
  const auto has = [](uint32_t word, std::initializer_list<int> bits) {
    for (int bit : bits) {
      if (!(word >> bit & 1)) return false;
    }
    return true;
  };
  __get_cpuid(1, &one.a, &one.b, &one.c, &one.d);
  __get_cpuid_count(7, 0, &seven.a, &seven.b, &seven.c, &seven.d);
  __get_cpuid(0x80000001, &extended.a, &extended.b, &extended.c, &extended.d);
  // sse3, ssse3, cmpxchg16b, sse4.1, sse4.2, popcnt
  if (!has(one.c, {0, 9, 13, 19, 20, 23})) return 1;
  uint32_t saved = 0, high = 0;  // the registers that the system saves
  if (has(one.c, {27})) asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  // fma, movbe, avx, f16c; bmi1, avx2, bmi2; lzcnt
  const bool avx = has(one.c, {12, 22, 28, 29}) && has(seven.b, {3, 5, 8}) && has(extended.c, {5});
  if (!avx || (saved & 0x06) != 0x06) return 2;
  // avx512 f, dq, cd, bw, vl
  return has(seven.b, {16, 17, 28, 30, 31}) && (saved & 0xe6) == 0xe6 ? 4 : 3;
}

}  // namespace lily

#endif
