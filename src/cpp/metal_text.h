// metal_text.h: the kernel text as Apple's compiler gets it: one self-contained string per file.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lily {

// A file of src/metal, embedded by cmake/metal.cmake.
struct MetalText {
  std::string_view name;  // "linear.metal", "util.h"
  std::string_view text;
};
std::span<const MetalText> metal_texts();

// The kernel files by name without ".metal", sorted.
std::vector<std::string> metal_files();
// The text of one of them with its headers in place, each once, and every line's origin kept for
// the compiler's messages. exact: fp32 activations; tensor: the tile on tensor operations, MSL 4.0.
// The environment variable LILY_METAL_SOURCE names a folder to read instead of the embedded files.
std::string metal_source(std::string_view file, bool exact, bool tensor = false);

}  // namespace lily
