// sim_emulator.h: the state of the one emulation that runs at a time, and the calls that start it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim_shadow.h"

namespace lily::sim {

constexpr uint32_t kLanes = 32, kMaxThreads = 1024, kMaxArgs = 24;
constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kSharedLimit = 32 * 1024;  // threadgroup memory of one group
constexpr size_t kSharedGap = 64;           // between threadgroup arrays
constexpr size_t kSharedArrays = 24;
constexpr size_t kSharedArena = kSharedLimit + (kSharedArrays + 1) * (kSharedGap + 32);

#define LILY_SIM_POINTERS_4 void*, void*, void*, void*
using Kernel = void (*)(LILY_SIM_POINTERS_4, LILY_SIM_POINTERS_4, LILY_SIM_POINTERS_4,
                        LILY_SIM_POINTERS_4, LILY_SIM_POINTERS_4, LILY_SIM_POINTERS_4);
#undef LILY_SIM_POINTERS_4

// One kernel call with its addresses resolved.
struct Call {
  Kernel kernel = nullptr;
  std::string name;
  Grid grid;
  std::array<void*, kMaxArgs> args = {};
  uintptr_t params = 0;
  uint64_t params_size = 0;
  std::vector<Declared> declared;
};

// Runs all groups and checks every access. Throws DeviceError. One call at a time in the process.
// `spans`, where given, takes the bytes that were touched; params count as read. `parts` takes what was
// done to each part; where two overlap, the first declared has it.
Touched run(const Call& call, uint64_t seed, TouchedSpans* spans = nullptr,
            std::vector<Touched>* parts = nullptr);

// Small and fast: only the order of things hangs on it.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return uint32_t((next() >> 32) * n >> 32); }
};

// ---- threads as fibers --------------------------------------------------------------------------
struct Lane {
  void* stack_pointer;
  uintptr_t stack;    // its lowest address
  uint32_t thread;    // in the group
  uint32_t slot;      // its bit in its simdgroup's `ready`
  const char* waits;  // the call it waits in; null when it has ended
  const void* site;   // where that call is
  float* tile;        // its part of a tile collective
};

// Operands of a tile collective, on which the lanes must agree.
struct TileCall {
  uint32_t m, n, k;
  const void* a;
  const void* b;
  uint32_t lda, ldb;
  bool transposed, bf16;
  bool operator==(const TileCall&) const = default;
};

struct Simd {
  uint32_t ready;  // slots of the lanes that can run
  uint32_t arrived;
  const char* call;  // the first arrival's: name, site, thread and operands
  const void* site;
  uint32_t first;
  TileCall tile;
  uint32_t moment[2];                                    // of its last synchronisation, per space
  std::array<uint8_t, kLanes> lane_of;                   // slot -> lane
  std::array<uint32_t, kLanes> given, argument, result;  // of a shuffle, by lane
  // Of 8 x 8 matrices: each lane's two elements of a, b and c; the result.
  std::array<std::array<uint64_t, 3>, kLanes> matrices;
  std::array<uint64_t, kLanes> matrix;
};

struct TileMap {
  uint32_t m = 0, n = 0;
  std::vector<uint32_t> at;  // [lane][i] -> row << 16 | column
};

struct SharedArray {
  const void* key;
  uint64_t bytes;
  uintptr_t begin;
};

constexpr size_t kSites = 2048;

struct Emulator {
  // Read by every access.
  uintptr_t stack = 0;  // of the lane that runs
  uint64_t tag = 0;     // of the launch
  // Params are read all the time, are initialised and never written: only their bounds are checked.
  // params_last[i]: offsets at which a read of 2^i bytes may begin.
  uintptr_t params = 0, params_last[5] = {};
  Lane* lane = nullptr;
  Simd* simd = nullptr;
  Clock clock;
  std::array<Range*, kSites> site = {};  // the range last seen from a call site

  // The launch.
  const Call* call = nullptr;
  Random random{0};
  std::vector<Range> ranges;  // declared ones, then kSharedArrays for threadgroup arrays
  size_t fixed_ranges = 0;
  std::vector<uint32_t> group_order, group_begin;  // by order of execution; first moment of each
  uint32_t group[3] = {0, 0, 0};

  // The group that runs.
  std::array<Simd, kMaxThreads / kLanes> simds;
  std::array<Lane, kMaxThreads> lanes;
  uint32_t ready_simds = 0;  // those with a lane that can run
  uint32_t at_barrier = 0, ended = 0, barrier_thread = 0;
  const void* barrier_site = nullptr;
  uint32_t turn = 0;  // rotation of the order in which lanes are taken, and its direction (bit 5)
  void* main_stack_pointer = nullptr;
  Fault fault;

  // Threadgroup memory.
  std::byte* arena = nullptr;
  std::unique_ptr<Shadow> arena_shadow;
  std::array<SharedArray, kSharedArrays> shared;
  size_t shared_count = 0, shared_used = 0, shared_bytes = 0;

  // Tiles.
  TileMap* map = nullptr;  // the one asked for last
  std::vector<std::unique_ptr<TileMap>> maps;
  std::vector<float> tile_a, tile_b, tile_c;
};
extern Emulator emulator __attribute__((visibility("hidden")));

// Ends the running lane's group with a fault.
[[noreturn]] void fail(const Fault& fault);
// The same checks as the hooks make, for the runtime's own accesses on behalf of a kernel.
// `by_simd`: all lanes of the simdgroup read.
void touch_bytes(uintptr_t at, uint64_t bytes, bool write, bool by_simd);
void touch_atomic(uintptr_t at, bool read, bool write);
// The bytes of a range that the launch touched, added to `spans`.
void collect_spans(const Range& range, TouchedSpans& spans);
// The range that holds an address, or null.
const Range* range_of(uintptr_t at);
std::string describe(const Fault& fault);

}  // namespace lily::sim
