// loader.h: from a validated table of file ranges to weights in their final layout on a device.
#pragma once

#include "model.h"

namespace lily {

// Element types of checkpoint files.
enum class FileType : uint8_t { u32, bf16, f16, f32 };
FileType file_type(const std::string& name);  // "U32", "BF16", "F16", "F32"

struct FileRange {
  uint32_t file = 0;  // index into LoadTable::files
  uint64_t offset = 0, bytes = 0;
};
// One matrix [n, k], or `experts` of them `stride` bytes apart (weight), densely (scales, biases).
struct LinearEntry {
  int32_t layer = -1;        // -1: of no layer
  std::string name, tensor;  // role, and the name in the file for errors
  uint32_t bits = 0, group = 0, n = 0, k = 0, experts = 1;
  FileType scale_type = FileType::bf16;
  FileRange weight, scales, biases;
  uint64_t stride = 0;
};
struct VectorEntry {
  int32_t layer = -1;
  std::string name, tensor;
  FileType type = FileType::bf16;
  bool plus_one = false;  // the file holds a norm's gain minus one
  FileRange range;
};
struct LoadTable {
  Config config;
  std::vector<std::string> files;
  std::vector<LinearEntry> linears;
  std::vector<VectorEntry> vectors;
};

// Called on the loading thread with bytes done and in all; what it throws ends the load.
using Progress = std::function<void(uint64_t done, uint64_t total)>;

// Reads with parallel pread, checks that every scale, bias and vector is finite, and places the
// weights in arenas of at most 4 GB. Throws CheckpointError with file and tensor.
Weights load_weights(Device& device, const LoadTable& table, const Progress& progress);
// The same places without the bytes: for a device that only records.
Weights place_weights(Device& device, const LoadTable& table);
// What load_weights will allocate, in bytes.
uint64_t weight_arena_bytes(const LoadTable& table);

}  // namespace lily
