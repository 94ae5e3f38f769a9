// rules.h: the rules that were broken, the faults that tests ask for, and the machine that is played.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "../../../src/cpp/device.h"

namespace software_metal {

using lily::concat;

// ---- broken rules -------------------------------------------------------------------------------
// Metal's own validation stops the process at some of these and lets others pass as wrong results.
// Here each is kept until somebody asks, and written to the file SOFTWARE_METAL_REPORT as a line.
void broken_rule(std::string_view rule, const std::string& what);

// ---- faults that tests ask for ------------------------------------------------------------------
enum class Fault {
  allocation,      // newBuffer gives nil
  command_buffer,  // ends in an error of the given MTLCommandBufferError code
  compile,         // newLibraryWithSource fails
  pipeline,        // newComputePipelineState fails
  archive_read,    // an existing binary archive is refused
  archive_write,   // serializeToURL fails
  no_device,
  no_queue,
  no_residency_set,
  no_event,  // and no fence
  no_command_buffer,
  no_encoder
};
constexpr int kFaults = 12;
// True when this call is the one that was asked to fail; `code` is what came with the fault.
bool fault_due(Fault fault, long* code = nullptr);

enum class Count {
  dispatches,
  barriers,
  command_buffers,
  pipelines_compiled,
  pipelines_loaded,
  // No rule of Metal's, but what the device promises of itself.
  serial_encoders,
  tracked_buffers,
  unlabelled,     // command buffers and encoders
  most_in_flight  // command buffers committed and not complete, at any time
};
void count(Count what);
void count_most(Count what, long n);

// ---- the machine that is played -----------------------------------------------------------------
std::pair<long, long> macos_version();  // SOFTWARE_METAL_MACOS, "26.0" unless set
long apple_family();                    // SOFTWARE_METAL_FAMILY, 9 unless set (MTLGPUFamilyApple9)
uint64_t physical_memory();
uint64_t working_set();  // SOFTWARE_METAL_WORKING_SET, three quarters of the memory unless set
// What every pipeline says of itself: SOFTWARE_METAL_MOST_THREADS (1024 unless set) a group,
// SOFTWARE_METAL_SIMD (32) of a simdgroup, SOFTWARE_METAL_STATIC_MEMORY (0: not known before a kernel
// runs, and sim refuses more than there is) bytes of threadgroup memory.
struct PipelineLimits {
  uint32_t most_threads, simd, static_memory;
};
PipelineLimits pipeline_limits();
// SOFTWARE_METAL_TENSOR=4: the family Metal 4 is there, and a command buffer with a kernel on tensor
// operations takes a quarter of the millisecond that is said of any other. SOFTWARE_METAL_WRONG=1: such
// a kernel adds that, which may be nan, to the first value of its last result. SOFTWARE_METAL_IDLE=1: it
// writes nothing.
struct TensorUnits {
  bool there;
  double speed;
  double off;
  bool idle;
};
TensorUnits tensor_units();
uint64_t random_seed();  // SOFTWARE_METAL_SEED, 1 unless set
double hang_seconds();   // SOFTWARE_METAL_HANG, 5 unless set: how long an event may stay away

}  // namespace software_metal

// For tests, through ctypes.
#define SOFTWARE_METAL_API extern "C" __attribute__((visibility("default"), used))

// How many rules were broken since the last call of _forget; their text, a line each, goes to `text`.
SOFTWARE_METAL_API int software_metal_broken_rules(char* text, int bytes);
SOFTWARE_METAL_API void software_metal_forget();
// "allocation", "command_buffer=2", ...: the call after `skip` further ones fails. 0 for an unknown
// name. The variable SOFTWARE_METAL_FAULTS holds the same at start: "pipeline@3,command_buffer=2@0".
SOFTWARE_METAL_API int software_metal_inject(const char* fault, int skip);
// Faults asked for that have not happened yet; software_metal_forget drops them.
SOFTWARE_METAL_API int software_metal_faults_left();
// A device that was lost is back.
SOFTWARE_METAL_API void software_metal_repair();
// How often something happened: "dispatches" and the others of Count; -1 for an unknown name.
SOFTWARE_METAL_API long software_metal_count(const char* what);
// Living Objective-C objects, classes and literals apart.
SOFTWARE_METAL_API long software_metal_objects();
