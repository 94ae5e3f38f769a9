// record.h: the launches that a session would submit, recorded without weights and without a device.
#pragma once

#include "loader.h"

namespace lily {

struct RecordedPasses {
  // Buffers by number: kept alive, so that no two have had the same place.
  std::vector<BufferRef> buffers;
  std::vector<CommandList> prefill;  // of the chunks of a prompt
  CommandList step;                  // of the token after it
};

// As a session on a device of that family makes them for a prompt of `context` tokens: the same
// Engine, Session, Model and plans, over a device that keeps nothing and runs nothing. The table's
// files are opened, none of their tensors is read.
RecordedPasses record_passes(Family family, bool exact, const LoadTable& table, uint32_t context);

}  // namespace lily
