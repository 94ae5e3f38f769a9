// metal_split.h: where a long command list is cut into command buffers, by predicted cost.
#pragma once

#include <vector>

#include "device.h"

namespace lily {

// Floating-point operations of the ops that can be bound by them, 0 of the rest: those move bytes.
double launch_flops(const CommandList& list, const Launch& launch);

// Seconds of one launch on the slowest GPU we support (M1: 68 GB/s, 2.6 TFLOP/s), both at their
// peak: the larger of its declared bytes and its arithmetic.
double predicted_seconds(const CommandList& list, const Launch& launch);

// Ends (one past the last launch) of the command buffers of a list, in order. The system kills work
// that keeps the GPU for seconds: half a second at peak rates leaves a factor for real ones. A
// launch is never cut, so one that costs more has a buffer of its own.
std::vector<size_t> command_buffer_ends(const CommandList& list);

}  // namespace lily
