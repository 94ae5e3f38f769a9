// probe.metal: small kernels with which the rules are broken one by one.
#include "util.h"

struct CopyWords {
  uint from, to, count;
};
KERNEL(copy_words)(IN(uint, from, 0), OUT(uint, to, 1), PARAMS(CopyWords, 2) IDS) {
  READ_IDS
  const uint i = group.x * 32 + tid;
  if (i < p.count) to[p.to + i] = from[p.from + i];
}

// Reads words through an address.
struct Place {
  device const uint* words;
};
KERNEL(chase)(IN(Place, place, 0), OUT(uint, to, 1) IDS) {
  READ_IDS
  to[tid] = place->words[tid];
}

// Writes words through an address.
struct Target {
  device uint* words;
};
KERNEL(deliver)(IN(Target, place, 0), IN(uint, from, 1) IDS) {
  READ_IDS
  place->words[tid] = from[tid];
}

// Needs more threadgroup memory than there is.
KERNEL(large_group)(OUT(float, to, 0) IDS) {
  READ_IDS
  SHARED(float, all, 32 * 1024 / 4 + 4);
  all[tid] = float(tid);
  to[tid] = all[tid];
}
