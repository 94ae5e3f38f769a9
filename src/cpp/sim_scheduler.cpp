// sim_scheduler.cpp: threads as fibers: groups, simdgroups, barriers, collectives, threadgroup
// memory, tiles. Which lane, simdgroup or group runs next is drawn by seed.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>

#include "sim_emulator.h"

// Saves the caller's registers and stack pointer, takes up the other stack. Jumps instead of
// returning: all fibers continue at one address, so the jump is predicted, a return would not be.
extern "C" void lily_sim_switch(void** save, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.text
.hidden lily_sim_switch
.globl lily_sim_switch
.type lily_sim_switch, @function
lily_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size lily_sim_switch, . - lily_sim_switch
)");
constexpr size_t kFrameWords = 8, kReturnWord = 6;  // registers, entry, and a return address of 0
#elif defined(__aarch64__)
asm(R"(
.text
.hidden lily_sim_switch
.globl lily_sim_switch
.type lily_sim_switch, %function
lily_sim_switch:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x19, x20, [sp], #160
  ret
.size lily_sim_switch, . - lily_sim_switch
)");
constexpr size_t kFrameWords = 20, kReturnWord = 11;
#else
#error "sim: no context switch for this processor"
#endif

namespace lily::sim {
namespace {

// Names of calls; also their identity.
constexpr const char* kBarrier = "threadgroup_barrier";
constexpr const char* kSimdBarrier = "simdgroup_barrier";
constexpr const char* kTileProduct = "tile_mma";
constexpr const char* kMatrixLoad = "simdgroup_load";
constexpr const char* kMatrixStore = "simdgroup_store";
constexpr const char* kMatrixProduct = "simdgroup_multiply_accumulate";
constexpr const char* kShuffles[] = {"simd_shuffle_xor", "simd_shuffle", "simd_shuffle_up",
                                     "simd_shuffle_down"};
constexpr size_t kGuard = 16384;  // a page of any supported system

uint32_t bit_of(uint32_t slot) { return 1u << slot; }
uint32_t rotate_right(uint32_t v, uint32_t by) { return v >> (by & 31) | v << (-by & 31); }

// ---- who runs next ------------------------------------------------------------------------------
// A set bit of a mask, in the order of the present turn.
uint32_t pick(uint32_t mask, uint32_t turn) {
  const uint32_t rotated = rotate_right(mask, turn);
  const uint32_t at = turn & 32 ? 31 - __builtin_clz(rotated) : __builtin_ctz(rotated);
  return (at + turn) & 31;
}

// Leaves the running lane, for good or until it can run again.
void run_next() {
  Emulator& e = emulator;
  if (e.simd->ready == 0) {
    if (e.ready_simds == 0) {
      lily_sim_switch(&e.lane->stack_pointer, e.main_stack_pointer);
      __builtin_unreachable();
    }
    e.simd = &e.simds[pick(e.ready_simds, e.turn)];
  }
  Lane* from = e.lane;
  Lane* to =
      &e.lanes[(e.simd - e.simds.data()) * kLanes + e.simd->lane_of[pick(e.simd->ready, e.turn)]];
  if (to == from) return;
  e.lane = to;
  e.stack = to->stack;
  lily_sim_switch(&from->stack_pointer, to->stack_pointer);
}

void block(const char* name, const void* site) {
  Emulator& e = emulator;
  e.lane->waits = name;
  e.lane->site = site;
  e.simd->ready &= ~bit_of(e.lane->slot);
  if (e.simd->ready == 0) e.ready_simds &= ~bit_of(uint32_t(e.simd - e.simds.data()));
}

void fiber_main() {
  Emulator& e = emulator;
  const auto& a = e.call->args;
  e.call->kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                 a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23]);
  ++e.ended;
  block(nullptr, nullptr);
  run_next();
}

uint32_t new_moment() {
  Emulator& e = emulator;
  if (++e.clock.now >= kMomentLimit) {
    Fault fault;
    fault.kind = FaultKind::too_long;
    fail(fault);
  }
  return e.clock.now;
}

// ---- meetings of a simdgroup --------------------------------------------------------------------
[[noreturn]] void fail_meeting(FaultKind kind, const char* call) {
  Fault fault;
  fault.kind = kind;
  fault.text = call;
  fault.other_thread = emulator.simd->first;
  fault.other_text = emulator.simd->call;
  fail(fault);
}
// True in the last lane to arrive, when it may compute for all; the others have waited until then.
inline bool meet(const char* call, const void* site, const TileCall* tile = nullptr) {
  Emulator& e = emulator;
  Simd& s = *e.simd;
  if (s.arrived == 0) {
    s.call = call;
    s.site = site;
    s.first = e.lane->thread;
    if (tile) s.tile = *tile;
  } else if (s.site != site || s.call != call) {
    fail_meeting(FaultKind::collective, call);
  } else if (tile && !(s.tile == *tile)) {
    fail_meeting(FaultKind::tile_operands, call);
  }
  const bool last = ++s.arrived == kLanes;
  block(call, site);
  if (!last) run_next();
  return last;
}
void part() {
  Emulator& e = emulator;
  e.simd->arrived = 0;
  e.simd->ready = ~0u;
  e.ready_simds |= bit_of(uint32_t(e.simd - e.simds.data()));
  e.turn = uint32_t(e.random.next() >> 32);
  // Now and then another simdgroup goes first.
  if ((e.turn >> 8 & 7) == 0) e.simd = &e.simds[pick(e.ready_simds, e.turn >> 16)];
  run_next();
}
Lane* lanes_of_simd() { return &emulator.lanes[(emulator.simd - emulator.simds.data()) * kLanes]; }

// ---- groups -------------------------------------------------------------------------------------
void start_stacks() {
  Emulator& e = emulator;
  if (e.arena) return;
  void* arena =
      mmap(nullptr, kSharedArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* stacks = mmap(nullptr, kMaxThreads * (kStackBytes + kGuard), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED || stacks == MAP_FAILED)
    throw LilyError("sim: no memory for its threads");
  for (uint32_t i = 0; i < kMaxThreads; ++i) {
    char* stack = static_cast<char*>(stacks) + i * (kStackBytes + kGuard) + kGuard;
    if (mprotect(stack, kStackBytes, PROT_READ | PROT_WRITE) != 0) {
      throw LilyError("sim: no memory for its threads");
    }
    e.lanes[i].stack = reinterpret_cast<uintptr_t>(stack);
    e.lanes[i].thread = i;
  }
  e.arena_shadow = std::make_unique<Shadow>(arena, kSharedArena);
  e.arena = static_cast<std::byte*>(arena);
}

void start_lane(Lane& lane) {
  // Stacks begin at different offsets in their pages, else all would compete for one cache set.
  const uintptr_t top = lane.stack + kStackBytes - (lane.thread * 5 % 61) * 64;
  void** frame = reinterpret_cast<void**>(top) - kFrameWords;
  std::fill_n(frame, kFrameWords, nullptr);
  frame[kReturnWord] = reinterpret_cast<void*>(&fiber_main);
  lane.stack_pointer = frame;
  lane.waits = nullptr;
}

// Why a group in which nobody can run stands still; it is fine when all have ended.
void find_deadlock(uint32_t threads) {
  Emulator& e = emulator;
  if (e.ended == threads) return;
  Fault fault;
  Lane* first = nullptr;  // a lane in a collective, else one at the barrier
  for (uint32_t i = 0; i < threads; ++i) {
    Lane& lane = e.lanes[i];
    if (lane.site == nullptr) continue;
    const bool collective = lane.waits != kBarrier;
    if (first == nullptr || (collective && fault.kind == FaultKind::barrier)) {
      first = &lane;
      fault.kind = collective ? FaultKind::collective : FaultKind::barrier;
    }
  }
  const uint32_t begin = fault.kind == FaultKind::collective ? first->thread / kLanes * kLanes : 0;
  const uint32_t end = fault.kind == FaultKind::collective ? begin + kLanes : threads;
  for (uint32_t i = begin; i < end; ++i) {
    if (e.lanes[i].site == first->site) continue;
    fault.other_thread = i;
    fault.other_text = e.lanes[i].waits;
  }
  fault.text = first->waits;
  e.lane = first;
  e.fault = fault;
}

void run_group(uint32_t linear, uint32_t threads) {
  Emulator& e = emulator;
  const Grid& grid = e.call->grid;
  e.group[0] = linear % grid.x;
  e.group[1] = linear / grid.x % grid.y;
  e.group[2] = linear / grid.x / grid.y;
  e.arena_shadow->forget(e.shared_used);
  std::fill_n(e.ranges.begin() + ptrdiff_t(e.fixed_ranges), e.shared_count, Range{});
  e.shared_count = e.shared_used = e.shared_bytes = 0;
  e.at_barrier = e.ended = 0;
  if (++e.clock.now >= kMomentLimit) {
    e.lane = &e.lanes[0];
    e.fault.kind = FaultKind::too_long;
    return;
  }
  e.clock.group = e.clock.barrier[0] = e.clock.barrier[1] = e.clock.now;
  e.group_begin.push_back(e.clock.now);
  const uint32_t simds = threads / kLanes;
  for (uint32_t s = 0; s < simds; ++s) {
    Simd& simd = e.simds[s];
    simd.ready = ~0u;
    simd.arrived = 0;
    simd.moment[0] = simd.moment[1] = e.clock.now;
    std::iota(simd.lane_of.begin(), simd.lane_of.end(), uint8_t(0));
    for (uint32_t i = kLanes - 1; i > 0; --i) {
      std::swap(simd.lane_of[i], simd.lane_of[e.random.below(i + 1)]);
    }
    for (uint32_t i = 0; i < kLanes; ++i) {
      Lane& lane = e.lanes[s * kLanes + simd.lane_of[i]];
      lane.slot = i;
      start_lane(lane);
    }
  }
  e.ready_simds = simds == 32 ? ~0u : (1u << simds) - 1u;
  e.turn = uint32_t(e.random.next() >> 32);
  e.simd = &e.simds[pick(e.ready_simds, e.turn)];
  e.lane =
      &e.lanes[(e.simd - e.simds.data()) * kLanes + e.simd->lane_of[pick(e.simd->ready, e.turn)]];
  e.stack = e.lane->stack;
  lily_sim_switch(&e.main_stack_pointer, e.lane->stack_pointer);
  if (e.fault.kind == FaultKind::none) find_deadlock(threads);
}

// ---- a launch -----------------------------------------------------------------------------------
bool writes(Access a) { return a == Access::write || a == Access::read_write; }
bool reads(Access a) { return a == Access::read || a == Access::read_write; }

// Cuts the declarations where they overlap, so that one range answers for each byte.
void build_ranges(const Call& call) {
  Emulator& e = emulator;
  std::vector<uintptr_t> cuts;
  for (const Declared& d : call.declared) {
    cuts.push_back(d.begin);
    cuts.push_back(d.end);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  e.ranges.clear();
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Range r;
    r.begin = cuts[i], r.end = cuts[i + 1];
    bool any = false;
    for (const Declared& d : call.declared) {
      if (d.begin > r.begin || d.end < r.end || d.access == Access::none) continue;
      any = true;
      r.readable |= reads(d.access);
      r.writable |= writes(d.access);
      r.counted |= d.counted;
      r.initialised |= d.initialised;
      r.word_delta = d.shadow->word_delta();
      r.half_delta = d.shadow->half_delta();
      r.byte_delta = d.shadow->byte_delta();
    }
    if (any) e.ranges.push_back(r);
  }
  // Granules belong to one range only if it begins and ends at multiples of 8.
  for (Range& r : e.ranges) {
    for (const Range& w : e.ranges) {
      r.stamped |= w.writable && w.begin / 8 <= (r.end - 1) / 8 && r.begin / 8 <= (w.end - 1) / 8;
    }
  }
  e.fixed_ranges = e.ranges.size();
  e.ranges.resize(e.fixed_ranges + kSharedArrays);
}

}  // namespace

void fail(const Fault& fault) {
  Emulator& e = emulator;
  e.fault = fault;
  lily_sim_switch(&e.lane->stack_pointer, e.main_stack_pointer);
  __builtin_unreachable();
}

Touched run(const Call& call, uint64_t seed, TouchedSpans* spans, std::vector<Touched>* parts) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  Emulator& e = emulator;
  start_stacks();
  static uint64_t tags = 0;
  e.tag = ++tags;
  e.call = &call;
  e.random = Random(seed);
  e.fault = {};
  e.clock = {};
  e.map = nullptr;
  e.maps.clear();
  build_ranges(call);
  std::vector<std::vector<Span>> noted(spans ? e.fixed_ranges : 0);
  for (size_t i = 0; i < noted.size(); ++i) e.ranges[i].granules = &noted[i];
  e.params = call.params;
  for (uint32_t i = 0; i < 5; ++i) {
    e.params_last[i] = call.params_size >> i ? call.params_size - (1u << i) + 1 : 0;
  }
  static Range nowhere;
  e.site.fill(&nowhere);
  const uint64_t groups = uint64_t(call.grid.x) * call.grid.y * call.grid.z;
  check<DeviceError>(groups < kMomentLimit, "kernel ", call.name, ": ", groups,
                     " groups, the emulator takes at most ", kMomentLimit);
  e.group_order.resize(groups);
  std::iota(e.group_order.begin(), e.group_order.end(), 0u);
  for (uint32_t i = uint32_t(groups); i > 1; --i) {
    std::swap(e.group_order[i - 1], e.group_order[e.random.below(i)]);
  }
  e.group_begin.clear();
  for (const uint32_t linear : e.group_order) {
    run_group(linear, call.grid.threads);
    if (e.fault.kind != FaultKind::none) throw DeviceError(describe(e.fault));
  }
  if (spans) {
    *spans = {};
    if (call.params_size > 0) spans->read.push_back({call.params, call.params + call.params_size});
    for (size_t i = 0; i < noted.size(); ++i) collect_spans(e.ranges[i], *spans);
  }
  Touched sum;
  const auto add = [](Touched& to, const Touched& t) {
    to.read += t.read;
    to.read_distinct += t.read_distinct;
    to.written += t.written;
    to.written_distinct += t.written_distinct;
  };
  for (size_t i = 0; i < e.fixed_ranges; ++i) {
    const Range& r = e.ranges[i];
    if (!r.counted) continue;
    add(sum, r.touched);
    if (!parts) continue;
    const auto holds = [&](const Declared& d) { return d.begin <= r.begin && r.end <= d.end; };
    const auto at = std::find_if(call.declared.begin(), call.declared.end(), holds);
    if (parts->size() <= at->part) parts->resize(at->part + 1);
    add((*parts)[at->part], r.touched);
  }
  return sum;
}

namespace {

// ---- tiles --------------------------------------------------------------------------------------
const TileMap& tile_map(uint32_t m, uint32_t n) {
  Emulator& e = emulator;
  if (e.map && e.map->m == m && e.map->n == n) return *e.map;
  for (const auto& known : e.maps) {
    if (known->m == m && known->n == n) return *(e.map = known.get());
  }
  auto map = std::make_unique<TileMap>();
  map->m = m, map->n = n;
  map->at.resize(size_t(m) * n);
  for (uint32_t i = 0; i < m * n; ++i) map->at[i] = i / n << 16 | i % n;
  for (uint32_t i = m * n; i > 1; --i) std::swap(map->at[i - 1], map->at[e.random.below(i)]);
  e.map = map.get();
  e.maps.push_back(std::move(map));
  return *e.map;
}

// An operand's rows: checked as reads by the whole simdgroup, then widened to float.
void read_operand(const void* from, uint32_t rows, uint32_t columns, uint32_t ld, bool bf16,
                  std::vector<float>& to) {
  const size_t size = bf16 ? 2 : 4;
  const uintptr_t at = reinterpret_cast<uintptr_t>(from);
  const Range* range = range_of(at);
  Fault fault;
  fault.kind = FaultKind::tile_space;
  fault.at = at;
  if (range && range->space != kGroupSpace) {
    fault.text = "not in threadgroup memory";
    fail(fault);
  }
  if (at % 4 != 0 || (bf16 && ld % 2 != 0)) {
    fault.text = "misaligned: rows begin at multiples of 4 bytes";
    fail(fault);
  }
  to.resize(size_t(rows) * columns);
  for (uint32_t r = 0; r < rows; ++r) {
    touch_bytes(at + r * ld * size, columns * size, false, true);
    float* row = &to[size_t(r) * columns];
    if (bf16) {
      const auto* in = reinterpret_cast<const uint16_t*>(at) + size_t(r) * ld;
      for (uint32_t c = 0; c < columns; ++c) {
        const uint32_t bits = uint32_t(in[c]) << 16;
        std::memcpy(&row[c], &bits, 4);
      }
    } else {
      std::memcpy(row, reinterpret_cast<const float*>(at) + size_t(r) * ld, columns * 4);
    }
  }
}

void multiply(const TileCall& t) {
  Emulator& e = emulator;
  read_operand(t.a, t.m, t.k, t.lda, t.bf16, e.tile_a);
  read_operand(t.b, t.transposed ? t.n : t.k, t.transposed ? t.k : t.n, t.ldb, t.bf16, e.tile_b);
  const TileMap& map = tile_map(t.m, t.n);
  const uint32_t size = t.m * t.n / kLanes;
  e.tile_c.resize(size_t(t.m) * t.n + t.n * t.k);
  float* c = e.tile_c.data();
  Lane* lanes = lanes_of_simd();
  for (uint32_t l = 0; l < kLanes; ++l) {
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t at = map.at[l * size + i];
      c[(at >> 16) * t.n + (at & 0xffff)] = lanes[l].tile[i];
    }
  }
  const float* b = e.tile_b.data();
  if (t.transposed) {  // [n][k] -> [k][n], so that the inner loop runs over columns
    float* turned = c + size_t(t.m) * t.n;
    for (uint32_t j = 0; j < t.n; ++j) {
      for (uint32_t k = 0; k < t.k; ++k) turned[size_t(k) * t.n + j] = b[size_t(j) * t.k + k];
    }
    b = turned;
  }
  for (uint32_t i = 0; i < t.m; ++i) {
    float* row = c + size_t(i) * t.n;
    for (uint32_t k = 0; k < t.k; ++k) {
      const float a = e.tile_a[size_t(i) * t.k + k];
      const float* at = b + size_t(k) * t.n;
      for (uint32_t j = 0; j < t.n; ++j) row[j] = std::fma(a, at[j], row[j]);
    }
  }
  for (uint32_t l = 0; l < kLanes; ++l) {
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t at = map.at[l * size + i];
      lanes[l].tile[i] = c[(at >> 16) * t.n + (at & 0xffff)];
    }
  }
}

// ---- 8 x 8 matrices -----------------------------------------------------------------------------
constexpr uint32_t kMatrix = 8;
using Matrix = std::array<std::array<float, kMatrix>, kMatrix>;
// Apple's layout: lane l has two neighbours of row (l / 4 & 4) + l / 2 % 4.
uint32_t matrix_row(uint32_t lane) { return (lane / 4 & 4) + lane / 2 % 4; }
uint32_t matrix_column(uint32_t lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

Matrix gather(size_t which) {
  Matrix m;
  for (uint32_t l = 0; l < kLanes; ++l) {
    std::memcpy(&m[matrix_row(l)][matrix_column(l)], &emulator.simd->matrices[l][which], 8);
  }
  return m;
}
void scatter(const Matrix& m) {
  for (uint32_t l = 0; l < kLanes; ++l) {
    std::memcpy(&emulator.simd->matrix[l], &m[matrix_row(l)][matrix_column(l)], 8);
  }
}
// Each of the 8 rows in memory is checked as one access of the whole simdgroup.
void move_matrix(const TileCall& t, bool write) {
  const size_t size = t.bf16 ? 2 : 4;
  const uintptr_t at = reinterpret_cast<uintptr_t>(t.a);
  if (at % size != 0) {
    Fault fault;
    fault.kind = FaultKind::tile_space;
    fault.at = at;
    fault.text = "misaligned: elements begin at multiples of their size";
    fail(fault);
  }
  Matrix m = {};
  if (write) m = gather(0);
  for (uint32_t r = 0; r < kMatrix; ++r) {
    const uintptr_t row = at + uint64_t(r) * t.lda * size;
    touch_bytes(row, kMatrix * size, write, !write);
    for (uint32_t c = 0; c < kMatrix; ++c) {
      float& v = t.transposed ? m[c][r] : m[r][c];
      uint32_t bits = 0;
      void* to = reinterpret_cast<void*>(row + c * size);
      if (write) {
        std::memcpy(&bits, &v, 4);
        if (t.bf16) bits >>= 16;  // a bf16 held as float: nothing is lost
        std::memcpy(to, &bits, size);
      } else {
        std::memcpy(&bits, to, size);
        if (t.bf16) bits <<= 16;
        std::memcpy(&v, &bits, 4);
      }
    }
  }
  scatter(m);
}
void multiply_matrices() {
  const Matrix a = gather(0), b = gather(1);
  Matrix c = gather(2);
  for (uint32_t r = 0; r < kMatrix; ++r) {
    for (uint32_t k = 0; k < kMatrix; ++k) {
      for (uint32_t j = 0; j < kMatrix; ++j) c[r][j] = std::fma(a[r][k], b[k][j], c[r][j]);
    }
  }
  scatter(c);
}

constexpr uint32_t kOutOfSimd = 0xffffffffu;  // undefined on Metal: a NaN

void shuffle(int op) {
  Simd& s = *emulator.simd;
  const auto take = [&s](auto from) {
    for (uint32_t l = 0; l < kLanes; ++l) {
      const uint32_t lane = from(l, s.argument[l]);
      s.result[l] = lane < kLanes ? s.given[lane] : kOutOfSimd;
    }
  };
  switch (op) {
    case 0:
      return take([](uint32_t l, uint32_t a) { return l ^ a; });
    case 1:
      return take([](uint32_t, uint32_t a) { return a; });
    case 2:
      return take([](uint32_t l, uint32_t a) { return l - a; });
    default:
      return take([](uint32_t l, uint32_t a) { return l + a; });
  }
}

constexpr const char* kReductions[] = {"simd_sum", "simd_max", "simd_min"};

// The same butterfly as on a GPU: all lanes end with the same bits.
template <typename T, typename Combine>
void butterfly(Combine combine) {
  Simd& s = *emulator.simd;
  for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2) {
    std::array<uint32_t, kLanes> next;
    for (uint32_t l = 0; l < kLanes; ++l) {
      T mine, other;
      std::memcpy(&mine, &s.given[l], 4);
      std::memcpy(&other, &s.given[l ^ offset], 4);
      const T both = combine(mine, other);
      std::memcpy(&next[l], &both, 4);
    }
    s.given = next;
  }
  s.result = s.given;
}
template <typename T>
void reduce_lanes(int op) {
  if (op == 0) return butterfly<T>([](T a, T b) { return T(a + b); });
  // NaNs lose, as in metal_stdlib.
  if (op == 1) return butterfly<T>([](T a, T b) { return a > b || b != b ? a : b; });
  return butterfly<T>([](T a, T b) { return a < b || b != b ? a : b; });
}

}  // namespace
}  // namespace lily::sim

// ---- what the kernel text calls: declared in metal_stdlib and tile.h -----------------------------
#define LILY_CALL extern "C" __attribute__((visibility("protected"), used))
#define LILY_SITE __builtin_return_address(0)
using lily::sim::emulator;
using lily::sim::Fault;
using lily::sim::FaultKind;
namespace sim = lily::sim;

LILY_CALL void lily_sim_group(uint32_t* xyz) { std::copy_n(emulator.group, 3, xyz); }
LILY_CALL uint32_t lily_sim_thread() { return emulator.lane->thread; }

// flags: 1 orders device memory, 2 threadgroup memory.
LILY_CALL void lily_sim_barrier(int flags) {
  sim::Emulator& e = emulator;
  const void* site = LILY_SITE;
  const uint32_t threads = e.call->grid.threads;
  if (e.at_barrier == 0) {
    e.barrier_site = site;
    e.barrier_thread = e.lane->thread;
  } else if (e.barrier_site != site) {
    Fault fault;
    fault.kind = FaultKind::barrier;
    fault.text = fault.other_text = sim::kBarrier;
    fault.other_thread = e.barrier_thread;
    sim::fail(fault);
  }
  const bool last = ++e.at_barrier == threads;
  sim::block(sim::kBarrier, site);
  if (!last) {
    sim::run_next();
    return;
  }
  e.at_barrier = 0;
  const uint32_t simds = threads / sim::kLanes, moment = sim::new_moment();
  for (uint32_t space = 0; space < 2; ++space) {
    if (!(flags & 1 << space)) continue;
    e.clock.barrier[space] = moment;
    for (uint32_t s = 0; s < simds; ++s) e.simds[s].moment[space] = moment;
  }
  for (uint32_t s = 0; s < simds; ++s) e.simds[s].ready = ~0u;
  e.ready_simds = simds == 32 ? ~0u : (1u << simds) - 1u;
  e.turn = uint32_t(e.random.next() >> 32);
  e.simd = &e.simds[sim::pick(e.ready_simds, e.turn >> 16)];
  sim::run_next();
}

LILY_CALL void lily_sim_simd_barrier(int flags) {
  if (!sim::meet(sim::kSimdBarrier, LILY_SITE)) return;
  const uint32_t moment = sim::new_moment();
  for (uint32_t space = 0; space < 2; ++space) {
    if (flags & 1 << space) emulator.simd->moment[space] = moment;
  }
  sim::part();
}

LILY_CALL uint32_t lily_sim_shuffle(uint32_t value, uint32_t argument, int op) {
  sim::Emulator& e = emulator;
  if (argument >= sim::kLanes) [[unlikely]] {
    Fault fault;
    fault.kind = FaultKind::lane_index;
    fault.text = sim::kShuffles[op];
    fault.size = argument;
    sim::fail(fault);
  }
  const uint32_t lane = e.lane->thread % sim::kLanes;
  e.simd->given[lane] = value;
  e.simd->argument[lane] = argument;
  if (sim::meet(sim::kShuffles[op], LILY_SITE)) {
    sim::shuffle(op);
    sim::part();
  }
  return e.simd->result[lane];
}

template <typename T>
static inline T reduce_in_simd(T value, int op, const void* site) {
  sim::Emulator& e = emulator;
  const uint32_t lane = e.lane->thread % sim::kLanes;
  std::memcpy(&e.simd->given[lane], &value, 4);
  if (sim::meet(sim::kReductions[op], site)) {
    sim::reduce_lanes<T>(op);
    sim::part();
  }
  std::memcpy(&value, &e.simd->result[lane], 4);
  return value;
}
LILY_CALL float lily_sim_reduce_float(float value, int op) {
  return reduce_in_simd(value, op, LILY_SITE);
}
LILY_CALL uint32_t lily_sim_reduce_uint(uint32_t value, int op) {
  return reduce_in_simd(value, op, LILY_SITE);
}

LILY_CALL uint32_t lily_sim_atomic_add(uint32_t* at, uint32_t value) {
  sim::touch_atomic(reinterpret_cast<uintptr_t>(at), true, true);
  const uint32_t old = *at;
  *at = old + value;
  return old;
}
LILY_CALL uint32_t lily_sim_atomic_load(uint32_t* at) {
  sim::touch_atomic(reinterpret_cast<uintptr_t>(at), true, false);
  return *at;
}
LILY_CALL void lily_sim_atomic_store(uint32_t* at, uint32_t value) {
  sim::touch_atomic(reinterpret_cast<uintptr_t>(at), false, true);
  *at = value;
}

// key: the array's name, its address tells declarations apart. An array of smaller elements than 16
// bytes begins at no multiple of 16: whoever reads it in wider pieces must declare it so.
LILY_CALL void* lily_sim_shared(const void* key, uint64_t bytes, uint64_t alignment) {
  sim::Emulator& e = emulator;
  for (size_t i = 0; i < e.shared_count; ++i) {
    const sim::SharedArray& known = e.shared[i];
    if (known.key != key) continue;
    if (known.bytes != bytes) {
      Fault fault;
      fault.kind = FaultKind::shared_changed;
      fault.text = static_cast<const char*>(key);
      fault.size = bytes;
      sim::fail(fault);
    }
    return reinterpret_cast<void*>(known.begin);
  }
  const uint64_t all = e.shared_bytes + (bytes + 15) / 16 * 16;
  if (all > sim::kSharedLimit || e.shared_count == sim::kSharedArrays) {
    Fault fault;
    fault.kind = FaultKind::shared_size;
    fault.size = all;
    sim::fail(fault);
  }
  const size_t offset =
      (e.shared_used + sim::kSharedGap + 15) / 16 * 16 + (alignment < 16 ? alignment : 0);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(e.arena) + offset;
  sim::Range& range = e.ranges[e.fixed_ranges + e.shared_count];
  range = {};
  range.begin = begin, range.end = begin + bytes;
  range.word_delta = e.arena_shadow->word_delta();
  range.half_delta = e.arena_shadow->half_delta();
  range.byte_delta = e.arena_shadow->byte_delta();
  range.readable = range.writable = range.stamped = true;
  range.space = sim::kGroupSpace;
  e.shared[e.shared_count++] = {key, bytes, begin};
  e.shared_used = offset + bytes;
  e.shared_bytes = all;
  return reinterpret_cast<void*>(begin);
}

LILY_CALL uint32_t lily_sim_tile_map(uint32_t m, uint32_t n, uint32_t i, uint32_t lane) {
  const uint32_t size = m * n / sim::kLanes;
  if (i >= size || lane >= sim::kLanes) {
    Fault fault;
    fault.kind = FaultKind::tile_index;
    fault.size = i;
    sim::fail(fault);
  }
  return sim::tile_map(m, n).at[lane * size + i];
}
LILY_CALL void lily_sim_tile_mma(float* v, uint32_t m, uint32_t n, uint32_t k, const void* a,
                                 uint32_t lda, const void* b, uint32_t ldb, int transposed,
                                 int bf16) {
  emulator.lane->tile = v;
  const sim::TileCall call = {m, n, k, a, b, lda, ldb, transposed != 0, bf16 != 0};
  if (!sim::meet(sim::kTileProduct, LILY_SITE, &call)) return;
  sim::multiply(call);
  sim::part();
}
LILY_CALL void lily_sim_tile_refuse(const char* why) {
  Fault fault;
  fault.kind = FaultKind::tile_refused;
  fault.text = why;
  sim::fail(fault);
}
LILY_CALL uint64_t lily_sim_matrix_load(const void* from, uint64_t ld, int transposed, int bytes) {
  sim::Simd& s = *emulator.simd;
  const uint32_t lane = emulator.lane->thread % sim::kLanes;
  const sim::TileCall call = {8, 8, 0, from, nullptr, uint32_t(ld), 0, transposed != 0, bytes == 2};
  if (sim::meet(sim::kMatrixLoad, LILY_SITE, &call)) {
    sim::move_matrix(call, false);
    sim::part();
  }
  return s.matrix[lane];
}
LILY_CALL void lily_sim_matrix_store(uint64_t v, void* to, uint64_t ld, int transposed, int bytes) {
  const uint32_t lane = emulator.lane->thread % sim::kLanes;
  emulator.simd->matrices[lane][0] = v;
  const sim::TileCall call = {8, 8, 0, to, nullptr, uint32_t(ld), 0, transposed != 0, bytes == 2};
  if (!sim::meet(sim::kMatrixStore, LILY_SITE, &call)) return;
  sim::move_matrix(call, true);
  sim::part();
}
LILY_CALL uint64_t lily_sim_matrix_multiply(uint64_t a, uint64_t b, uint64_t c) {
  sim::Simd& s = *emulator.simd;
  const uint32_t lane = emulator.lane->thread % sim::kLanes;
  s.matrices[lane] = {a, b, c};
  if (sim::meet(sim::kMatrixProduct, LILY_SITE)) {
    sim::multiply_matrices();
    sim::part();
  }
  return s.matrix[lane];
}
