// sim_shadow.h: what the emulated device knows about every byte: initialised, touched by this
// launch, and who read or wrote it last. Every access of a kernel is checked against it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device.h"

namespace lily::sim {

// ---- shadow of one mapping ----------------------------------------------------------------------
// 8 bytes of data (a granule) have one word: bits 0-7 initialised, 8-15 read and 16-23 written by
// the launch whose tag is in bits 24-63. A word of another tag counts as neither read nor written.
constexpr unsigned kReadShift = 8, kWrittenShift = 16, kTagShift = 24;
// ... and every four bytes have the stamps of their last accesses, right while the granule's word has
// the launch's tag; with `written` kSplit they differ byte by byte. Only ranges that a launch may write
// use theirs. All are anonymous pages: never touched means never initialised.
struct Half {
  uint32_t written, read;
};
struct HalfBytes {
  Half byte[4];
};
constexpr uint32_t kSplit = ~0u;
// A stamp: who accessed a byte, and in which moment (see Clock): moment << 12 | who. 0 is nobody.
constexpr unsigned kMomentShift = 12;
constexpr uint32_t kMomentLimit = 1u << (32 - kMomentShift);
constexpr uint32_t kThreadMask = 0x3ff;
constexpr uint32_t kAtomic = 0x400;  // of `written`: by an atomic operation
constexpr uint32_t kOthers = 0x400;  // of `read`: a group before this one has read it as well
constexpr uint32_t kMany = 0x800;    // of `read`: by several lanes; thread field = their simdgroup
constexpr uint32_t kManySimds = 0x200;  // of `read`, with kMany: by lanes of several simdgroups

class Shadow {
 public:
  Shadow(const void* data, size_t bytes);  // data starts at a multiple of 8
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  void mark_initialised(size_t offset, size_t bytes);
  void forget(size_t bytes);  // the first bytes become uninitialised and untouched
  uintptr_t word_delta() const { return reinterpret_cast<uintptr_t>(words_) - data_; }
  uintptr_t half_delta() const { return reinterpret_cast<uintptr_t>(halves_) - 2 * data_; }
  uintptr_t byte_delta() const { return reinterpret_cast<uintptr_t>(bytes_of_halves_) - 8 * data_; }

 private:
  uintptr_t data_;
  size_t bytes_;
  uint64_t* words_;
  Half* halves_;
  HalfBytes* bytes_of_halves_;
};

// ---- ranges of a launch -------------------------------------------------------------------------
enum Space : uint8_t { kDeviceSpace = 0, kGroupSpace = 1 };

struct Touched {
  uint64_t read = 0, read_distinct = 0, written = 0, written_distinct = 0;  // bytes
};

// The bytes themselves: spans in ascending order with gaps between them.
struct Span {
  uintptr_t begin, end;
};
struct TouchedSpans {
  std::vector<Span> read, written;
};

// What a launch declares: an argument, an unbound range, params, step; or a threadgroup array.
struct Declared {
  uintptr_t begin = 0, end = 0;
  Access access = Access::none;
  const Shadow* shadow = nullptr;
  std::string what;          // for messages
  size_t part = 0;           // which argument, by the caller's count
  bool counted = false;      // part of the launch's traffic
  bool initialised = false;  // by somebody who does not tell the shadow
};

// A piece of memory with one set of permissions: declarations cut where they overlap.
struct Range {
  uintptr_t begin = 1, end = 0;
  // Add to an address of a granule, to 2 and to 8 times that of four bytes.
  uintptr_t word_delta = 0, half_delta = 0, byte_delta = 0;
  bool readable = false, writable = false;
  bool stamped = false;  // somebody may write here, or in a granule that it shares
  bool counted = false;
  bool initialised = false;
  Space space = kDeviceSpace;
  Touched touched;
  std::vector<Span>* granules = nullptr;  // where granules are noted as they are first touched
};

// Order between accesses of one launch. A moment is a number taken at every synchronisation:
// everything after it carries that number. Threads of a group are ordered by moments of the group's
// barriers, lanes of a simdgroup also by the moments of its own barriers; groups never are.
struct Clock {
  uint32_t now = 0;
  uint32_t group = 0;            // moment in which the running group began
  uint32_t barrier[2] = {0, 0};  // of the last threadgroup barrier, per space
};

// ---- faults -------------------------------------------------------------------------------------
// Found inside a fiber, put into words outside of it: a fiber that failed is abandoned, so it must
// own nothing.
enum class FaultKind : uint8_t {
  none,
  undeclared,
  not_readable,
  not_writable,
  uninitialised,
  misaligned,
  race,
  collective,
  barrier,
  shared_size,
  shared_changed,
  lane_index,
  tile_index,
  tile_operands,
  tile_refused,
  tile_space,
  too_long
};
struct Fault {
  FaultKind kind = FaultKind::none;
  bool write = false, atomic = false;
  bool other_read = false;  // race: the earlier access read
  uint32_t other = 0;       // race: its stamp
  uintptr_t at = 0;
  uint64_t size = 0;
  const char* text = nullptr;  // what the thread was doing, where it is no access
  uint32_t other_thread = 0;
  const char* other_text = nullptr;
};

}  // namespace lily::sim
