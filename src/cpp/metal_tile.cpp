// metal_tile.cpp: see metal_tile.h.
#include "metal_tile.h"

#include <algorithm>
#include <cmath>

#include "ops.h"

namespace lily {
namespace {

// 128 threadgroups: enough to fill a GPU, some tenths of a millisecond.
constexpr uint32_t kRows = 512, kOutputs = 2048, kInputs = 256, kRuns = 3;
// Both forms add the same products of a group in fp32, in an order of their own.
constexpr float kSame = 1e-4f;

// Codes, scales and activations from a fixed generator; nothing is zero throughout.
struct Product {
  explicit Product(Device& device) {
    Matmul& p = params;
    p.w = {kOutputs, kInputs, 4, 6, 0};
    p.rows = kRows, p.y_stride = kOutputs, p.y_offset = 0, p.mode = kMatmulF32;
    codes = device.tensor(DType::u32, code_elements(p.w), "trial: codes");
    pairs = device.tensor(DType::u32, pair_elements(p.w), "trial: pairs");
    h = device.tensor(device.act(), uint64_t(kRows) * kInputs, "trial: h");
    y = device.tensor(DType::f32, uint64_t(kRows) * kOutputs, "trial: y");
    fill(device, codes, [](uint32_t r) { return r; });
    // bf16 of +-2^-4 .. 2^-3 as scale, of the same as bias.
    fill(device, pairs, [](uint32_t r) { return (r & 0x807f807fu) | 0x3d803d80u; });
    // Two bf16 of +-0.5 .. 1.
    fill(device, h, [](uint32_t r) { return (r & 0x807f807fu) | 0x3f003f00u; });
  }
  template <typename F>
  void fill(Device& device, const Tensor& t, F value) {
    std::vector<uint32_t> words(t.bytes() / 4);
    for (uint32_t& w : words) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      w = value(uint32_t(state >> 32));
    }
    device.upload(t, words.data());
  }
  CommandList list(const Device& device) const {
    CommandList made;
    made.label = "trial of tiles";
    Recorder(device, made).matmul(params, {codes, pairs, h, y});
    return made;
  }
  Matmul params{};
  Tensor codes, pairs, h, y;
  uint64_t state = 1;
};

}  // namespace

const char* tile_form_name(TileForm form) {
  return form == TileForm::tensor ? "tensor operations" : "simdgroup matrices";
}

bool has_tile(const CommandList& list) {
  return std::any_of(list.launches.begin(), list.launches.end(), [](const Launch& l) {
    const Op op = variants()[l.variant].op;
    return op == Op::matmul || op == Op::expert_matmul || op == Op::flash || op == Op::delta_scan;
  });
}

TileTrial try_tiles(Device& device,
                    const std::function<ProgramRef(CommandList, TileForm)>& compile) {
  Product product(device);
  std::vector<float> found[2];
  double seconds[2];
  const std::vector<uint32_t> nan(product.y.elements, 0xffffffffu);
  for (const TileForm form : {TileForm::simdgroup, TileForm::tensor}) {
    const size_t i = size_t(form);
    ProgramRef program;
    try {
      program = compile(product.list(device), form);
    } catch (const DeviceError& e) {
      if (form == TileForm::simdgroup) throw;
      return {TileForm::simdgroup, concat("tensor operations do not compile here: ", e.what())};
    }
    device.upload(product.y, nan.data());
    device.wait(device.submit(program));
    found[i].resize(product.y.elements);
    device.download(product.y, found[i].data());
    seconds[i] = device.time_program(program, 1);
    for (uint32_t run = 1; run < kRuns; ++run) {
      seconds[i] = std::min(seconds[i], device.time_program(program, 1));
    }
  }
  float largest = 0.0f, difference = 0.0f;
  for (size_t j = 0; j < found[0].size(); ++j) {
    largest = std::max(largest, std::abs(found[0][j]));
    const float apart = std::abs(found[0][j] - found[1][j]);
    if (apart > difference || std::isnan(apart)) difference = apart;  // NaN stays
  }
  const auto milliseconds = [](double s) { return concat(s * 1e3, " ms"); };
  const std::string times = concat(milliseconds(seconds[1]), " against ", milliseconds(seconds[0]));
  if (!(difference <= kSame * largest)) {  // as of NaN
    return {TileForm::simdgroup,
            concat("tensor operations are off by ", difference, " of ", largest, " (", times, ")")};
  }
  return {seconds[1] < seconds[0] ? TileForm::tensor : TileForm::simdgroup, times};
}

}  // namespace lily
