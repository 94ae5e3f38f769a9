// cpu_call.h: how the cpu device calls a native twin: the call and the thread pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../metal/kernels.h"

namespace lily {

// The pool, in cpu.cpp: calls job(context, i) for 0 <= i < n from all threads, returns when all
// are done. Results may not depend on which thread runs which i.
class Pool;
void pool_run(Pool& pool, size_t n, void (*job)(void* context, size_t i), void* context);
size_t pool_threads(const Pool& pool);

// One launch: arguments in binding order as host pointers, constants of the variant.
struct TwinCall {
  const uint32_t* c;  // the variant's constants
  const void* params;
  std::byte* const* args;
  std::byte* step;  // struct Step and its trailing arrays, or null
  bool exact;       // activations are fp32, else bf16
  Pool* pool;
};
using Twin = void (*)(const TwinCall&);

}  // namespace lily
