// sim_shadow.cpp: the check of every access, and the hooks through which the kernels' accesses come.
#include "sim_shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "sim_emulator.h"

namespace lily::sim {

Emulator emulator;

// ---- shadow memory ------------------------------------------------------------------------------
namespace {
void* map_pages(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    throw LilyError(concat("sim: no address space for ", bytes, " bytes of shadow"));
  return at;
}
constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
}  // namespace

Shadow::Shadow(const void* data, size_t bytes)
    : data_(reinterpret_cast<uintptr_t>(data)), bytes_(round_up(bytes, 8)) {
  words_ = static_cast<uint64_t*>(map_pages(bytes_));
  halves_ = static_cast<Half*>(map_pages(2 * bytes_));
  bytes_of_halves_ = static_cast<HalfBytes*>(map_pages(8 * bytes_));
}
Shadow::~Shadow() {
  munmap(words_, bytes_);
  munmap(halves_, 2 * bytes_);
  munmap(bytes_of_halves_, 8 * bytes_);
}
void Shadow::mark_initialised(size_t offset, size_t bytes) {
  while (bytes > 0) {
    const size_t first = offset % 8, count = std::min(8 - first, bytes);
    words_[offset / 8] |= ((1u << count) - 1u) << first;
    offset += count, bytes -= count;
  }
}
void Shadow::forget(size_t bytes) { std::memset(words_, 0, round_up(bytes, 8)); }

// ---- order --------------------------------------------------------------------------------------
namespace {

#define LILY_INLINE inline __attribute__((always_inline))

// Whether an earlier access by `simd` is ordered before what the running lane does now.
bool ordered(uint32_t moment, uint32_t simd, Space space) {
  const Emulator& e = emulator;
  if (moment < e.clock.group) return false;
  return moment < e.clock.barrier[space] ||
         (simd == e.lane->thread / kLanes && moment < e.simd->moment[space]);
}
bool same_thread(uint32_t stamp, bool by_simd) {
  return !by_simd && (stamp & kThreadMask) == emulator.lane->thread &&
         stamp >> kMomentShift >= emulator.clock.group;
}
bool conflicts_with_write(uint32_t stamp, Space space, bool atomic, bool by_simd) {
  if (atomic && (stamp & kAtomic)) return false;
  return !same_thread(stamp, by_simd) &&
         !ordered(stamp >> kMomentShift, (stamp & kThreadMask) / kLanes, space);
}
bool conflicts_with_read(uint32_t stamp, Space space) {
  if (stamp & kOthers) return true;
  const uint32_t moment = stamp >> kMomentShift;
  if (!(stamp & kMany)) {
    return !same_thread(stamp, false) && !ordered(moment, (stamp & kThreadMask) / kLanes, space);
  }
  // Several simdgroups are ordered by the group's barriers only.
  const uint32_t simd = stamp & kManySimds ? ~0u : stamp & (kLanes - 1);
  return !ordered(moment, simd, space);
}
// The readers of a byte after one more read. What is ordered before the new read may be forgotten:
// whoever conflicts with it conflicts with the new one or was refused already.
uint32_t add_reader(uint32_t stamp, uint32_t mine, Space space) {
  const Emulator& e = emulator;
  if (stamp == 0) return mine;
  const uint32_t moment = stamp >> kMomentShift;
  if (moment < e.clock.group) return mine | kOthers;
  const uint32_t others = stamp & kOthers;
  if (moment < e.clock.barrier[space]) return mine | others;
  if ((stamp & kMany) && (stamp & kManySimds)) return stamp;
  const uint32_t my_simd = e.lane->thread / kLanes;
  const uint32_t simd = stamp & kMany ? stamp & (kLanes - 1) : (stamp & kThreadMask) / kLanes;
  if (simd != my_simd) {
    return e.clock.barrier[space] << kMomentShift | kMany | kManySimds | others;
  }
  if (moment < e.simd->moment[space] || (stamp & ~kOthers) == mine) return mine | others;
  return moment << kMomentShift | kMany | my_simd | others;
}

__attribute__((noinline)) void race(uintptr_t at, uint64_t size, bool write, bool atomic,
                                    uint32_t other, bool other_read) {
  Fault fault;
  fault.kind = FaultKind::race;
  fault.at = at, fault.size = size, fault.write = write, fault.atomic = atomic;
  fault.other = other, fault.other_read = other_read;
  fail(fault);
}
[[noreturn]] __attribute__((noinline)) void fail_access(FaultKind kind, uintptr_t at, uint64_t size,
                                                        bool write) {
  Fault fault;
  fault.kind = kind, fault.at = at, fault.size = size, fault.write = write;
  fail(fault);
}

// ---- one access ---------------------------------------------------------------------------------
struct How {  // constants at every use
  bool write, atomic = false;
  bool by_simd = false;    // all lanes of the simdgroup read
  bool unordered = false;  // another access stands for its order
  bool whole = false;      // 1, 2, 4 or 8 bytes at a multiple of that
};

// An access in the running lane's moment: its stamps and what it is ordered behind.
struct Order {
  How how;
  Space space;
  uint32_t mine, many, many_simds;
  uint32_t group, rounds;

  LILY_INLINE Order(Space space_, How how_) : how(how_), space(space_) {
    const Emulator& e = emulator;
    const uint32_t moment = e.simd->moment[space] << kMomentShift;
    many = moment | kMany | e.lane->thread / kLanes;
    mine = how.by_simd  ? many
           : how.atomic ? moment | kAtomic | e.lane->thread
                        : moment | e.lane->thread;
    many_simds = e.clock.barrier[space] << kMomentShift | kMany | kManySimds;
    group = e.clock.group;
    rounds = e.clock.barrier[space] - group;
  }
  // Of this group and a barrier ago, as most stamps are that are not the lane's own.
  LILY_INLINE bool past(uint32_t stamp) const { return (stamp >> kMomentShift) - group < rounds; }
  LILY_INLINE bool known_reader(uint32_t r) const {
    return r == mine || r == many || r == many_simds;
  }
  LILY_INLINE void judge(uint32_t w, uint32_t r, uintptr_t at, unsigned n) const {
    if (w != 0 && w != mine && !past(w) && conflicts_with_write(w, space, how.atomic, how.by_simd))
        [[unlikely]] {
      race(at, n, how.write, how.atomic, w, false);
    }
    if (how.write && r != 0 && r != mine && (!past(r) || (r & kOthers)) &&
        conflicts_with_read(r, space)) [[unlikely]] {
      race(at, n, how.write, how.atomic, r, true);
    }
  }
  // The stamps after an access that was in order.
  LILY_INLINE void note(Half& half) const {
    if (how.write) {
      half.written = mine;
      half.read = 0;
    } else if (!known_reader(half.read)) {
      half.read = add_reader(half.read, mine, space);
    }
  }
};

__attribute__((noinline)) void check_split(const Order& order, Half& half, HalfBytes& bytes,
                                           uintptr_t at, unsigned n) {
  if (half.written != kSplit) std::fill_n(bytes.byte, 4, half);
  for (unsigned i = 0; i < n; ++i) {
    Half& byte = bytes.byte[(at & 3) + i];
    order.judge(byte.written, byte.read, at + i, n);
    order.note(byte);
  }
  // One history again, when the same or when whatever was written is a barrier ago.
  half = bytes.byte[0];
  for (unsigned i = 1; i < 4; ++i) {
    const Half byte = bytes.byte[i];
    const bool alike =
        byte.written == half.written || (order.past(byte.written) && order.past(half.written));
    if (!alike || byte.read != half.read) {
      half.written = kSplit;
      return;
    }
  }
}

// n bytes of one half.
LILY_INLINE void check_half(const Order& order, const Range& range, uintptr_t at, unsigned n) {
  const uintptr_t start = at & ~uintptr_t(3);
  Half& half = *reinterpret_cast<Half*>(2 * start + range.half_delta);
  if (half.written != kSplit) [[likely]] {
    if (n == 4) {
      order.judge(half.written, half.read, at, n);
      order.note(half);
      return;
    }
    // A part of them, by which nothing changes.
    if (order.how.write ? half.written == order.mine && half.read == 0
                        : order.known_reader(half.read)) {
      order.judge(half.written, half.read, at, n);
      return;
    }
  }
  check_split(order, half, *reinterpret_cast<HalfBytes*>(8 * start + range.byte_delta), at, n);
}

// n bytes of one granule.
LILY_INLINE void check_order(const Range& range, uintptr_t at, unsigned n, How how) {
  const Order order(range.space, how);
  if (how.whole) {
    check_half(order, range, at, std::min(n, 4u));
    if (n == 8) check_half(order, range, at + 4, 4);
    return;
  }
  const unsigned first = std::min(n, 4 - unsigned(at & 3));
  check_half(order, range, at, first);
  if (n > first) check_half(order, range, at + first, n - first);
}

__attribute__((noinline)) void note_granule(std::vector<Span>& all, uintptr_t granule) {
  if (!all.empty() && all.back().end == granule) all.back().end += 8;
  else all.push_back({granule, granule + 8});
}

// n bytes of one granule of a range.
LILY_INLINE void touch(Range& range, uintptr_t at, unsigned n, How how) {
  const uintptr_t granule = at & ~uintptr_t(7);
  uint64_t& word = *reinterpret_cast<uint64_t*>(granule + range.word_delta);
  const uint64_t mask = (n == 8 ? 0xffu : (1u << n) - 1u) << (at & 7);
  uint64_t w = word;
  const bool stale = w >> kTagShift != emulator.tag;
  if (stale) {
    w = (w & 0xff) | emulator.tag << kTagShift;
    if (range.granules) note_granule(*range.granules, granule);
  }
  uint64_t seen;
  if (how.write) {
    seen = mask << kWrittenShift;
    if ((w & seen) != seen) range.touched.written_distinct += __builtin_popcountll(seen & ~w);
    range.touched.written += n;
    seen |= mask;
  } else {
    if ((w & mask) != mask && !range.initialised) [[unlikely]] {
      fail_access(FaultKind::uninitialised, at + __builtin_ctzll((mask & ~w) >> (at & 7)), n,
                  false);
    }
    seen = mask << kReadShift;
    if ((w & seen) != seen) range.touched.read_distinct += __builtin_popcountll(seen & ~w);
    range.touched.read += n;
  }
  word = w | seen;
  if (range.stamped) {
    if (stale) {
      Half* halves = reinterpret_cast<Half*>(2 * granule + range.half_delta);
      halves[0] = halves[1] = {0, 0};
    }
    if (!how.unordered) check_order(range, at, n, how);
  }
}

Range* find(uintptr_t at, uint64_t n) {
  Emulator& e = emulator;
  for (size_t i = 0; i < e.fixed_ranges + e.shared_count; ++i) {
    Range& r = e.ranges[i];
    if (at >= r.begin && at < r.end && n <= r.end - at) return &r;
  }
  return nullptr;
}
// Declarations overlap: an access over the cut of two ranges is right when one declaration holds it.
bool declared(uintptr_t at, uint64_t n) {
  for (const Declared& d : emulator.call->declared) {
    if (at >= d.begin && at < d.end && n <= d.end - at) return true;
  }
  return false;
}

LILY_INLINE void check_permission(const Range& range, uintptr_t at, uint64_t n, bool write) {
  if (!(write ? range.writable : range.readable)) [[unlikely]] {
    fail_access(write ? FaultKind::not_writable : FaultKind::not_readable, at, n, write);
  }
}

void touch_any(uintptr_t at, uint64_t bytes, How how) {
  if (at - emulator.stack < kStackBytes || bytes == 0) return;
  Range* range = find(at, bytes);
  if (range == nullptr && !declared(at, bytes)) {
    fail_access(FaultKind::undeclared, at, bytes, how.write);
  }
  const uintptr_t end = at + bytes;
  for (uintptr_t p = at; p < end;) {
    if (range == nullptr || p >= range->end) range = find(p, 1);
    check_permission(*range, at, bytes, how.write);
    const unsigned n = unsigned(std::min<uint64_t>({8 - (p & 7), range->end - p, end - p}));
    touch(*range, p, n, how);
    p += n;
  }
}

__attribute__((noinline)) Range* find_for(uintptr_t at, unsigned n, bool write, size_t site) {
  Range* range = find(at, n);
  if (range) emulator.site[site] = range;
  else touch_any(at, n, {.write = write});
  return range;
}

// Not inline: the hooks below then have no registers to save where they return at once.
template <unsigned N, bool WRITE>
__attribute__((noinline)) void check_access(uintptr_t at, const void* caller) {
  Emulator& e = emulator;
  const uintptr_t c = reinterpret_cast<uintptr_t>(caller);
  const size_t site = (c ^ c >> 11) % kSites;
  Range* range = e.site[site];
  if (at < range->begin || at + N > range->end) [[unlikely]] {
    range = find_for(at, N, WRITE, site);
    if (range == nullptr) return;
  }
  check_permission(*range, at, N, WRITE);
  if (at % N != 0) [[unlikely]]
    fail_access(FaultKind::misaligned, at, N, WRITE);
  constexpr How how = {.write = WRITE, .whole = true};
  if constexpr (N <= 8) {
    touch(*range, at, N, how);
  } else {
    touch(*range, at, 8, how);
    touch(*range, at + 8, 8, how);
  }
}

template <unsigned N, bool WRITE>
LILY_INLINE void access(uintptr_t at, const void* caller) {
  const Emulator& e = emulator;
  if (at - e.stack < kStackBytes) return;
  if (!WRITE && at - e.params < e.params_last[__builtin_ctz(N)]) return;
  check_access<N, WRITE>(at, caller);
}

}  // namespace

void touch_bytes(uintptr_t at, uint64_t bytes, bool write, bool by_simd) {
  touch_any(at, bytes, {.write = write, .by_simd = by_simd});
}
void touch_atomic(uintptr_t at, bool read, bool write) {
  if (at % 4 != 0) fail_access(FaultKind::misaligned, at, 4, write);
  Range* range = find(at, 4);
  if (range == nullptr) fail_access(FaultKind::undeclared, at, 4, write);
  if (read) {
    check_permission(*range, at, 4, false);
    touch(*range, at, 4, {.write = false, .unordered = true});
  }
  if (write) {
    check_permission(*range, at, 4, true);
    touch(*range, at, 4, {.write = true, .atomic = true});
  } else if (range->stamped) {
    // A load leaves an atomic's stamp too: it is at odds with plain writes, not with atomic ones.
    check_order(*range, at, 4, {.write = true, .atomic = true});
  }
}
const Range* range_of(uintptr_t at) { return find(at, 1); }

// Bytes of a noted granule, by its word's marks.
namespace {
void add_bytes(std::vector<Span>& spans, uintptr_t granule, unsigned marks) {
  for (unsigned i = 0; i < 8; ++i) {
    if (!(marks >> i & 1)) continue;
    const uintptr_t at = granule + i;
    if (!spans.empty() && spans.back().end == at) ++spans.back().end;
    else spans.push_back({at, at + 1});
  }
}
}  // namespace
void collect_spans(const Range& range, TouchedSpans& spans) {
  std::vector<Span>& noted = *range.granules;
  std::sort(noted.begin(), noted.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (const Span& s : noted) {
    for (uintptr_t granule = s.begin; granule < s.end; granule += 8) {
      const uint64_t word = *reinterpret_cast<const uint64_t*>(granule + range.word_delta);
      add_bytes(spans.read, granule, word >> kReadShift & 0xff);
      add_bytes(spans.written, granule, word >> kWrittenShift & 0xff);
    }
  }
}

// ---- words --------------------------------------------------------------------------------------
namespace {

std::string group_name(uint32_t linear, const Grid& grid) {
  return concat("(", linear % grid.x, ", ", linear / grid.x % grid.y, ", ",
                linear / grid.x / grid.y, ")");
}

std::string where(uintptr_t at) {
  const Emulator& e = emulator;
  struct Place {
    uintptr_t begin, end;
    std::string what;
  };
  std::vector<Place> places;
  for (const Declared& d : e.call->declared) places.push_back({d.begin, d.end, d.what});
  for (size_t i = 0; i < e.shared_count; ++i) {
    const SharedArray& a = e.shared[i];
    places.push_back({a.begin, a.begin + a.bytes,
                      concat("threadgroup array '", static_cast<const char*>(a.key), "'")});
  }
  const Place* nearest = nullptr;
  uint64_t distance = uint64_t(1) << 30;
  for (const Place& p : places) {
    if (at >= p.begin && at < p.end) return concat("byte ", at - p.begin, " of ", p.what);
    const uint64_t away = at < p.begin ? p.begin - at : at - p.end + 1;
    if (away < distance) nearest = &p, distance = away;
  }
  for (const Lane& lane : e.lanes) {
    if (at - lane.stack < kStackBytes) return concat("thread ", lane.thread, "'s own memory");
  }
  if (nearest == nullptr) {
    return concat("address ", reinterpret_cast<void*>(at),
                  ", near nothing that the launch declares");
  }
  if (at < nearest->begin)
    return concat(nearest->begin - at, " bytes before the start of ", nearest->what);
  return concat("byte ", at - nearest->begin, " of ", nearest->what, ", which ends at ",
                nearest->end - nearest->begin);
}

std::string other_party(const Fault& f) {
  const Emulator& e = emulator;
  const uint32_t moment = f.other >> kMomentShift;
  std::string who;
  if (f.other_read && (f.other & kMany)) {
    who = f.other & kManySimds ? "several threads"
                               : concat("lanes of simdgroup ", f.other & (kLanes - 1));
  } else {
    who = concat("thread ", f.other & kThreadMask);
  }
  const char* verb = f.other_read ? " read" : f.other & kAtomic ? " changed atomically" : " wrote";
  const bool other_group = moment < e.clock.group || (f.other_read && (f.other & kOthers));
  if (!other_group) {
    return concat("which ", who, verb, " with no barrier for this memory between them");
  }
  if (moment >= e.clock.group) return concat("which another group", verb, " in the same launch");
  const auto after = std::upper_bound(e.group_begin.begin(), e.group_begin.end(), moment);
  const uint32_t order = uint32_t(after - e.group_begin.begin()) - 1;
  return concat("which group ", group_name(e.group_order[order], e.call->grid), ", ", who, verb,
                " in the same launch");
}

}  // namespace

std::string describe(const Fault& f) {
  const Emulator& e = emulator;
  const std::string head = concat("kernel ", e.call->name, ", group (", e.group[0], ", ",
                                  e.group[1], ", ", e.group[2], "), thread ", e.lane->thread, ": ");
  const std::string bytes = concat(f.atomic  ? "changes "
                                   : f.write ? "writes "
                                             : "reads ",
                                   f.size, f.atomic ? " bytes atomically at " : " bytes at ");
  switch (f.kind) {
    case FaultKind::undeclared: {
      // The first byte that is wrong says more than the first of the access.
      uintptr_t at = f.at;
      while (at < f.at + f.size - 1 && find(at, 1)) ++at;
      return concat(head, "out of bounds: ", bytes, where(f.at), at == f.at ? "" : ", and ",
                    at == f.at ? "" : where(at));
    }
    case FaultKind::not_readable:
      return concat(head, "undeclared read: ", bytes, where(f.at), ", declared as written only");
    case FaultKind::not_writable:
      return concat(head, "undeclared write: ", bytes, where(f.at), ", declared as read only");
    case FaultKind::uninitialised:
      return concat(head, "uninitialised: ", bytes, where(f.at), ", which nothing has written");
    case FaultKind::misaligned:
      return concat(head, "misaligned: ", bytes, where(f.at), ", address ",
                    reinterpret_cast<void*>(f.at), " is no multiple of ", f.size);
    case FaultKind::race:
      return concat(head, "race: ", bytes, where(f.at), ", ", other_party(f));
    case FaultKind::collective:
    case FaultKind::barrier: {
      const bool barrier = f.kind == FaultKind::barrier;
      return concat(head, barrier ? "barrier" : "collective",
                    " in divergent control flow: it is in ", f.text, ", thread ", f.other_thread,
                    barrier ? " " : " of the same simdgroup ",
                    f.other_text == nullptr  ? "has ended"
                    : f.other_text == f.text ? "in another call of it"
                                             : concat("in ", f.other_text));
    }
    case FaultKind::shared_size:
      return concat(head, "threadgroup memory: ", f.size, " bytes in all, the limit is ",
                    kSharedLimit, " (and ", kSharedArrays, " arrays)");
    case FaultKind::shared_changed:
      return concat(head, "threadgroup array '", f.text, "': ", f.size,
                    " bytes, another thread had another size");
    case FaultKind::lane_index:
      return concat(head, f.text, ": lane argument ", f.size, ", a simdgroup has 32 lanes");
    case FaultKind::tile_index:
      return concat(head, "tile: element ", f.size, " does not exist");
    case FaultKind::tile_operands:
      return concat(head, f.text, ": its lanes pass different operands than thread ",
                    f.other_thread);
    case FaultKind::tile_refused:
      return concat(head, "matmul2d: ", f.text);
    case FaultKind::tile_space:
      return concat(head, "tile: operand at ", where(f.at), " is ", f.text);
    case FaultKind::too_long:
      return concat(head, "more than ", kMomentLimit,
                    " barriers in one launch: too long for the emulator");
    case FaultKind::none:
      break;
  }
  return head + "unknown fault";
}

}  // namespace lily::sim

// ---- hooks --------------------------------------------------------------------------------------
// The names that -fsanitize=thread calls. Protected: kernels of a library loaded by a test find
// them too, and nothing in the process can take their place. Where the host's code is under that
// sanitizer itself, the kernels' objects are made to call others.
#ifdef LILY_SIM_OWN_HOOKS
#define LILY_NAME(rest) __lily_##rest
#else
#define LILY_NAME(rest) __tsan_##rest
#endif
#define LILY_HOOK extern "C" __attribute__((visibility("protected"), used))
#define LILY_CALLER __builtin_return_address(0)

#define LILY_HOOKS(N)                                                                            \
  LILY_HOOK void LILY_NAME(read##N)(void* at) {                                                      \
    lily::sim::access<N, false>(reinterpret_cast<uintptr_t>(at), LILY_CALLER);                   \
  }                                                                                              \
  LILY_HOOK void LILY_NAME(write##N)(void* at) {                                                     \
    lily::sim::access<N, true>(reinterpret_cast<uintptr_t>(at), LILY_CALLER);                    \
  }
LILY_HOOKS(1)
LILY_HOOKS(2)
LILY_HOOKS(4)
LILY_HOOKS(8)
LILY_HOOKS(16)

// Accesses whose type promises less than natural alignment.
#define LILY_UNALIGNED_HOOKS(N)                                                                  \
  LILY_HOOK void LILY_NAME(unaligned_read##N)(void* at) {                                            \
    lily::sim::touch_bytes(reinterpret_cast<uintptr_t>(at), N, false, false);                    \
  }                                                                                              \
  LILY_HOOK void LILY_NAME(unaligned_write##N)(void* at) {                                           \
    lily::sim::touch_bytes(reinterpret_cast<uintptr_t>(at), N, true, false);                     \
  }
LILY_UNALIGNED_HOOKS(2)
LILY_UNALIGNED_HOOKS(4)
LILY_UNALIGNED_HOOKS(8)
LILY_UNALIGNED_HOOKS(16)

LILY_HOOK void LILY_NAME(read_range)(void* at, unsigned long n) {
  lily::sim::touch_bytes(reinterpret_cast<uintptr_t>(at), n, false, false);
}
LILY_HOOK void LILY_NAME(write_range)(void* at, unsigned long n) {
  lily::sim::touch_bytes(reinterpret_cast<uintptr_t>(at), n, true, false);
}
LILY_HOOK void* LILY_NAME(memcpy)(void* to, const void* from, unsigned long n) {
  LILY_NAME(read_range)(const_cast<void*>(from), n);
  LILY_NAME(write_range)(to, n);
  return std::memcpy(to, from, n);
}
LILY_HOOK void* LILY_NAME(memmove)(void* to, const void* from, unsigned long n) {
  LILY_NAME(read_range)(const_cast<void*>(from), n);
  LILY_NAME(write_range)(to, n);
  return std::memmove(to, from, n);
}
LILY_HOOK void* LILY_NAME(memset)(void* to, int value, unsigned long n) {
  LILY_NAME(write_range)(to, n);
  return std::memset(to, value, n);
}
LILY_HOOK void LILY_NAME(init)() {}
LILY_HOOK void LILY_NAME(func_entry)(void*) {}
LILY_HOOK void LILY_NAME(func_exit)() {}
