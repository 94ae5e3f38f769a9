// library.h: the compiler that is played: it knows the texts that this build's kernels come from, and
// finds a mistake in any other.
#pragma once

#include <string>
#include <string_view>

#include "gpu.h"

namespace software_metal {

struct CompiledText {
  const Text* text = nullptr;  // null: `error` says why, as a compiler would
  Form form = kBf16;
  std::string error;
};
CompiledText compile(std::string_view source);
const Kernel* find_kernel(const Text& text, std::string_view name);

}  // namespace software_metal
