// sim.h: what tools and tests can ask of the emulated device beyond the device contract.
#pragma once

#include <string>
#include <vector>

#include "device.h"

namespace lily {

// Bytes: every access counted, and every byte once.
struct TouchedBytes {
  uint64_t read = 0, read_distinct = 0, written = 0, written_distinct = 0;
};

// What one launch did when its program ran last; bytes of args, unbound ranges and Step.
struct LaunchRecord {
  uint16_t variant = 0;
  Grid grid;
  uint32_t level = 0;  // see hazard_levels
  uint64_t declared_read = 0, declared_written = 0;
  TouchedBytes touched;
  std::vector<TouchedBytes> parts;  // of each argument, each unbound range, Step
};

// The records of a program of a sim device, in the order of its list; call after wait().
std::vector<LaunchRecord> sim_records(const Program& program);

// Runs kernels of a shared library compiled as ours are, one symbol a launch (the launches' variants
// count for nothing): how tests plant bugs. `device` is a sim device.
std::vector<LaunchRecord> sim_run_library(Device& device, const std::string& path,
                                          const std::vector<std::string>& symbols,
                                          CommandList list);

}  // namespace lily
