// metal_tile.h: which matrix tile an Apple GPU computes with: simdgroup matrices, which every one has, or
// Metal 4's tensor operations, which newer ones do in units of their own and older ones emulate.
#pragma once

#include <functional>
#include <string>

#include "device.h"

namespace lily {

enum class TileForm : uint8_t { simdgroup, tensor };
const char* tile_form_name(TileForm form);

// Whether a kernel of the list has a tile.
bool has_tile(const CommandList& list);

struct TileTrial {
  TileForm form = TileForm::simdgroup;
  std::string why;  // with the numbers
};
// Runs one prefill product with each form. Tensor operations are taken when they give the same values
// and are faster. compile makes a program of the given form; a DeviceError from it says that this
// system lacks tensor operations.
TileTrial try_tiles(Device& device,
                    const std::function<ProgramRef(CommandList, TileForm)>& compile);

}  // namespace lily
