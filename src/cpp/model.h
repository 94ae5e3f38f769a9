// model.h: shapes, weights, recurrent state and scratch of the model, and its three passes.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops.h"

namespace lily {

struct Config {
  std::vector<bool> attention;                      // per layer: full attention, else DeltaNet
  uint32_t hidden = 0, vocab = 0, token_limit = 0;  // ids from token_limit on are never sampled
  uint32_t heads = 0, kv_heads = 0, rotary = 0;
  uint32_t key_heads = 0, value_heads = 0;
  uint32_t experts = 0, top_k = 0, expert_width = 0, shared_width = 0;
  uint32_t max_position = 0;
  double rope_theta = 0;
  float eps = 0;

  uint32_t layers() const { return uint32_t(attention.size()); }
  uint32_t attention_layers() const;
  uint32_t delta_layers() const { return layers() - attention_layers(); }
  uint32_t channels() const { return (2 * key_heads + value_heads) * LILY_DELTA_DIM; }
  uint32_t delta_width() const { return value_heads * LILY_DELTA_DIM; }
  uint32_t attention_width() const { return heads * LILY_HEAD_DIM; }
  uint32_t z_offset() const { return channels(); }  // columns of a DeltaNet projection: qkv|z|a|b
  uint32_t a_offset() const { return z_offset() + delta_width(); }
  uint32_t b_offset() const { return a_offset() + value_heads; }
  uint32_t delta_stride() const { return (b_offset() + value_heads + 7) / 8 * 8; }
  uint32_t k_offset() const {
    return 2 * attention_width();
  }  // of an attention one: (q|gate)..|k|v
  uint32_t v_offset() const { return k_offset() + kv_heads * LILY_HEAD_DIM; }
  uint32_t attention_stride() const { return v_offset() + kv_heads * LILY_HEAD_DIM; }
  uint32_t expert_stride() const { return std::max(expert_width, shared_width); }
};

// One matrix, or the same for all experts one after another.
struct Matrix {
  Linear w{};
  Tensor codes, pairs;  // u32; pairs absent for bf16
};
// Stacked projection: matrices of the same input whose outputs lie side by side.
struct StackPart {
  Matrix matrix;
  uint32_t offset;  // first output column
};
using Stack = std::vector<StackPart>;

struct LayerWeights {
  Tensor input_gain, post_gain;  // f32[hidden]
  Stack projections;
  Matrix out;
  Tensor conv, neg_exp_a, dt_bias, delta_gain;  // DeltaNet: f32[channels][4], [Hv], [Hv], [128]
  Tensor q_gain, k_gain;                        // attention: f32[256]
  Stack router;                                 // experts, then the shared gate
  Matrix expert_up, expert_down, shared_up, shared_down;
};
struct Weights {
  Matrix embed, head;
  Tensor final_gain, inv_freq;
  std::vector<LayerWeights> layers;
};

// Recurrent state of one slot: conv act[delta layers][3][channels], delta f32[delta layers][Hv][128][128].
struct State {
  Tensor conv, delta;
};

// Buffers of the decode route, for up to `rows` rows.
struct DecodeScratch {
  DecodeScratch(Device& device, const Config& c, uint32_t rows, uint32_t splits, bool keep);
  uint32_t rows, splits;
  bool keep;  // projections of each DeltaNet layer in a place of its own, for commit
  Tensor x, ssq, projected, delta_projected, u, head_ssq, partial, combined, router, h, route;
  Tensor delta_rows(const Config& c, uint32_t delta_layer) const;
};
// Buffers of the prefill route, for chunks of up to `rows` rows.
struct PrefillScratch {
  PrefillScratch(Device& device, const Config& c, uint32_t rows);
  static uint64_t bytes_per_row(const Config& c, DType act);
  uint32_t rows;
  Tensor x, ssq, h, projected, q, k, v, g, beta, w, u, scores, o, y, router, route, order, offsets,
      tiles, expert_h, expert_out, attn_q;
};

class Model {
 public:
  Model(DeviceRef device, Config config, Weights weights);
  const Config config;
  const DeviceRef device;

  struct Decode {  // rows of decode-route kernels; Step holds ids, positions, slots
    uint32_t rows, splits;
    bool write_state;
    Tensor step;
    std::span<const Tensor> slabs;
    State in, out;
    Tensor logits;  // f32[rows][vocab]
  };
  void decode(Recorder& r, DecodeScratch& s, const Decode& d) const;
  // The state after the first `rows` rows of a pass with write_state false and scratch kept.
  void commit(Recorder& r, DecodeScratch& s, const Decode& d) const;

  struct Prefill {  // one chunk of one slot
    uint32_t rows, position, slot;
    Tensor ids, step;
    std::span<const Tensor> slabs;
    State in, out;
    uint32_t logit_rows;  // head for the last so many rows, 0: none
    Tensor logits;        // f32[logit_rows][vocab]
  };
  void prefill(Recorder& r, const PrefillScratch& s, const Prefill& d) const;

 private:
  void delta_step(Recorder& r, DecodeScratch& s, const Decode& d, uint32_t delta_layer,
                  const LayerWeights& w, const Tensor& projected) const;
  void moe_decode(Recorder& r, DecodeScratch& s, const Decode& d, const LayerWeights& w,
                  uint32_t parts) const;
  void moe_prefill(Recorder& r, const PrefillScratch& s, uint32_t rows, const LayerWeights& w,
                   const Tensor& next_gain) const;
  const Weights w_;
};

// One layer's part of a state.
Tensor conv_of(const State& s, const Config& c, uint32_t delta_layer);
Tensor delta_of(const State& s, const Config& c, uint32_t delta_layer);
State make_state(Device& device, const Config& c, std::string_view label);
// Bytes of one KV block: act[attention layers][2][kv_heads][256][256].
uint64_t kv_block_bytes(const Config& c, DType act);

}  // namespace lily
