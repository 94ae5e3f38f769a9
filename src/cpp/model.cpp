// model.cpp: the forward passes as pages of named steps: decode, commit, prefill.
#include "model.h"

#include <algorithm>

namespace lily {

uint32_t Config::attention_layers() const {
  return uint32_t(std::count(attention.begin(), attention.end(), true));
}

uint64_t kv_block_bytes(const Config& c, DType act) {
  return uint64_t(c.attention_layers()) * 2 * c.kv_heads * LILY_KV_BLOCK * LILY_HEAD_DIM *
         dtype_size(act);
}
State make_state(Device& device, const Config& c, std::string_view label) {
  return {device.tensor(device.act(), uint64_t(c.delta_layers()) * 3 * c.channels(), label),
          device.tensor(DType::f32, uint64_t(c.delta_layers()) * c.delta_width() * LILY_DELTA_DIM,
                        label)};
}
Tensor conv_of(const State& s, const Config& c, uint32_t i) {
  const uint64_t n = 3 * uint64_t(c.channels());
  return s.conv.slice(i * n, n);
}
Tensor delta_of(const State& s, const Config& c, uint32_t i) {
  const uint64_t n = uint64_t(c.delta_width()) * LILY_DELTA_DIM;
  return s.delta.slice(i * n, n);
}

namespace {

// v columns of a delta_step threadgroup, so partial sums of squares per head.
constexpr uint32_t kHeadParts = 4;
// Pairs of one tile of the grouped expert matmul.
constexpr uint32_t kExpertTile = 64;

uint32_t max_tiles(const Config& c, uint32_t rows) {
  return uint32_t(uint64_t(rows) * (c.top_k + 1) / kExpertTile + c.experts + 1);
}

// y[:, part] = W_part norm(x) for each matrix of the stack.
void project(Recorder& r, const Stack& stack, uint32_t rows, const Tensor& x, const Tensor& gain,
             const Tensor& ssq, uint32_t ssq_parts, float eps, const Tensor& y, uint32_t stride,
             bool f32, const Tensor& step) {
  for (const StackPart& part : stack) {
    const Matrix& m = part.matrix;
    r.project({m.w, rows, ssq_parts, stride, part.offset, f32, eps},
              {m.codes, m.pairs, x, gain, ssq, y}, step);
  }
}
bool same_form(const Linear& a, const Linear& b) {
  return a.n == b.n && a.k == b.k && a.bits == b.bits && a.group_shift == b.group_shift &&
         a.scale_f16 == b.scale_f16;
}
void matmul(Recorder& r, const Matrix& m, uint32_t rows, const Tensor& h, const Tensor& y,
            uint32_t stride, uint32_t offset, MatmulMode mode) {
  r.matmul({m.w, rows, stride, offset, uint32_t(mode)}, {m.codes, m.pairs, h, y});
}

}  // namespace

DecodeScratch::DecodeScratch(Device& device, const Config& c, uint32_t rows_, uint32_t splits_,
                             bool keep_)
    : rows(rows_), splits(splits_), keep(keep_) {
  const DType act = device.act();
  const auto a = [&](uint64_t n, const char* label) { return device.tensor(act, rows * n, label); };
  const auto f = [&](uint64_t n, const char* label) {
    return device.tensor(DType::f32, rows * n, label);
  };
  x = a(c.hidden, "x");
  ssq = f(std::max(1u, c.hidden / LILY_OUT_ROWS), "sums of squares");
  projected = a(c.attention_stride(), "attention projections");
  delta_projected = a(uint64_t(c.delta_stride()) * (keep ? std::max(1u, c.delta_layers()) : 1),
                      "DeltaNet projections");
  u = a(c.delta_width(), "u");
  head_ssq = f(c.value_heads * kHeadParts, "head sums of squares");
  partial = f(uint64_t(c.heads) * splits * LILY_PARTIAL, "attention partials");
  combined = f(uint64_t(c.heads) * LILY_PARTIAL, "combined attention");
  router = f(c.experts + 1, "router logits");
  h = a(uint64_t(c.top_k + 1) * c.expert_stride(), "expert activations");
  route = device.tensor(DType::u32, uint64_t(rows) * (c.top_k + 1) * 2, "routes");
}
Tensor DecodeScratch::delta_rows(const Config& c, uint32_t delta_layer) const {
  const uint64_t n = uint64_t(rows) * c.delta_stride();
  return delta_projected.slice(keep ? delta_layer * n : 0, n);
}

uint64_t PrefillScratch::bytes_per_row(const Config& c, DType act) {
  const uint64_t a = dtype_size(act);
  return a * (3 * uint64_t(c.hidden) + std::max(c.delta_stride(), c.attention_stride()) +
              std::max(c.delta_width(), c.attention_width()) + c.attention_width() +
              c.top_k * uint64_t(c.expert_width + c.hidden) + c.shared_width) +
         4 * (2 * uint64_t(c.key_heads) * LILY_DELTA_DIM + 4 * uint64_t(c.delta_width()) +
              (2 + LILY_CHUNK) * c.value_heads + c.experts + 1 + 4 * (c.top_k + 1) + 1);
}
PrefillScratch::PrefillScratch(Device& device, const Config& c, uint32_t rows_) : rows(rows_) {
  const DType act = device.act();
  const auto a = [&](uint64_t n, const char* label) { return device.tensor(act, rows * n, label); };
  const auto f = [&](uint64_t n, const char* label) {
    return device.tensor(DType::f32, rows * n, label);
  };
  const auto i = [&](uint64_t n, const char* label) { return device.tensor(DType::u32, n, label); };
  const uint64_t keys = uint64_t(c.key_heads) * LILY_DELTA_DIM;
  x = a(c.hidden, "x");
  ssq = f(1, "sums of squares");
  h = a(c.hidden, "h");
  projected = a(std::max(c.delta_stride(), c.attention_stride()), "projections");
  q = f(keys, "q");
  k = f(keys, "k");
  v = f(c.delta_width(), "v");
  g = f(c.value_heads, "g");
  beta = f(c.value_heads, "beta");
  w = f(c.delta_width(), "w");
  u = f(c.delta_width(), "u");
  scores = f(uint64_t(c.value_heads) * LILY_CHUNK, "scores");
  o = f(c.delta_width(), "o");
  y = a(std::max(c.delta_width(), c.attention_width()), "y");
  attn_q = a(c.attention_width(), "attention q");
  router = f(c.experts + 1, "router logits");
  route = i(uint64_t(rows) * (c.top_k + 1) * 2, "routes");
  order = i(uint64_t(rows) * (c.top_k + 1), "pair order");
  offsets = i(c.experts + 2, "expert offsets");
  tiles = i(1 + 2 * uint64_t(max_tiles(c, rows)), "expert tiles");
  expert_h = a(uint64_t(c.top_k) * c.expert_width + c.shared_width, "expert activations");
  expert_out = a(uint64_t(c.top_k + 1) * c.hidden, "expert outputs");
}

Model::Model(DeviceRef device_, Config config_, Weights weights)
    : config(std::move(config_)), device(std::move(device_)), w_(std::move(weights)) {}

// ---- decode: six levels a layer ----------------------------------------------------------------
void Model::decode(Recorder& r, DecodeScratch& s, const Decode& d) const {
  const Config& c = config;
  check(d.rows <= s.rows, "decode: ", d.rows, " rows, scratch has ", s.rows);
  check(d.splits <= s.splits, "decode: ", d.splits, " splits, scratch has ", s.splits);
  const uint32_t out_parts = c.hidden / LILY_OUT_ROWS;
  uint32_t parts = 1, delta_layer = 0, attention_layer = 0;

  const Tensor ids = [&] {  // Step.id, as a range of its own
    Tensor t = d.step;
    t.offset += offsetof(Step, id);
    t.elements = LILY_MAX_ROWS;
    return t;
  }();
  r.embed({w_.embed.w, d.rows}, {w_.embed.codes, w_.embed.pairs, ids, s.x, s.ssq});

  for (uint32_t i = 0; i < c.layers(); ++i) {
    const LayerWeights& w = w_.layers[i];
    if (c.attention[i]) {
      project(r, w.projections, d.rows, s.x, w.input_gain, s.ssq, parts, c.eps, s.projected,
              c.attention_stride(), false, d.step);
      r.attn_step({d.rows, c.heads, c.kv_heads, c.rotary, c.attention_stride(), c.k_offset(),
                   c.v_offset(), attention_layer, d.splits, c.eps, 1.0f / 16.0f},
                  {s.projected, w.q_gain, w.k_gain, w_.inv_freq, s.partial}, d.step, d.slabs);
      // Few splits are combined by every group of attn_out; many once, by a launch of their own.
      const bool combine = d.splits > 4;
      if (combine) r.attn_combine({d.rows, c.heads, d.splits}, {s.partial, s.combined}, d.step);
      r.attn_out(
          {w.out.w, d.rows, c.heads, combine ? 1 : d.splits, combine, c.attention_stride()},
          {w.out.codes, w.out.pairs, combine ? s.combined : s.partial, s.projected, s.x, s.ssq},
          d.step);
      ++attention_layer;
    } else {
      const Tensor projected = s.delta_rows(c, delta_layer);
      project(r, w.projections, d.rows, s.x, w.input_gain, s.ssq, parts, c.eps, projected,
              c.delta_stride(), false, d.step);
      delta_step(r, s, d, delta_layer, w, projected);
      r.delta_out({w.out.w, d.rows, c.value_heads, kHeadParts, c.eps},
                  {w.out.codes, w.out.pairs, s.u, s.head_ssq, s.x, s.ssq}, d.step);
      ++delta_layer;
    }
    parts = out_parts;
    moe_decode(r, s, d, w, parts);
  }
  r.project({w_.head.w, d.rows, parts, c.vocab, 0, 1, c.eps},
            {w_.head.codes, w_.head.pairs, s.x, w_.final_gain, s.ssq, d.logits}, d.step);
}

void Model::delta_step(Recorder& r, DecodeScratch& s, const Decode& d, uint32_t layer,
                       const LayerWeights& w, const Tensor& projected) const {
  const Config& c = config;
  r.delta_step({d.rows, c.key_heads, c.value_heads, c.delta_stride(), c.z_offset(), c.a_offset(),
                c.b_offset(), kHeadParts, d.write_state, 1},
               {projected, w.conv, w.neg_exp_a, w.dt_bias, w.delta_gain, conv_of(d.in, c, layer),
                delta_of(d.in, c, layer), conv_of(d.out, c, layer), delta_of(d.out, c, layer), s.u,
                s.head_ssq},
               d.step);
}

void Model::moe_decode(Recorder& r, DecodeScratch& s, const Decode& d, const LayerWeights& w,
                       uint32_t parts) const {
  const Config& c = config;
  project(r, w.router, d.rows, s.x, w.post_gain, s.ssq, parts, c.eps, s.router, c.experts + 1, true,
          d.step);
  // One launch for all slots; two where routed and shared matrices have different bits.
  struct Range {
    uint32_t begin, count;
  };
  const auto ranges = [&](const Matrix& a, const Matrix& b) {
    return a.w.bits == b.w.bits ? std::vector<Range>{{0, c.top_k + 1}}
                                : std::vector<Range>{{0, c.top_k}, {c.top_k, 1}};
  };
  const auto routed = [&](Range p, const Tensor& t) { return p.begin < c.top_k ? t : Tensor{}; };
  const auto shared = [&](Range p, const Tensor& t) {
    return p.begin + p.count > c.top_k ? t : Tensor{};
  };
  const Matrix &eu = w.expert_up, &su = w.shared_up, &ed = w.expert_down, &sd = w.shared_down;
  for (const Range p : ranges(eu, su)) {
    r.expert_up({eu.w, su.w, d.rows, c.experts, c.top_k, p.begin, p.count, parts, c.experts + 1,
                 c.expert_stride(), c.eps},
                {routed(p, eu.codes), routed(p, eu.pairs), shared(p, su.codes), shared(p, su.pairs),
                 s.x, w.post_gain, s.ssq, s.router, s.h, s.route},
                d.step);
  }
  for (const Range p : ranges(ed, sd)) {
    r.expert_down({ed.w, sd.w, d.rows, c.experts, c.top_k, p.begin, p.count, c.expert_stride()},
                  {routed(p, ed.codes), routed(p, ed.pairs), shared(p, sd.codes),
                   shared(p, sd.pairs), s.h, s.route, s.x, s.ssq},
                  d.step);
  }
}

void Model::commit(Recorder& r, DecodeScratch& s, const Decode& d) const {
  check(s.keep, "commit: the scratch kept no projections");
  check(d.write_state, "commit: the pass must write the state");
  uint32_t layer = 0;
  for (uint32_t i = 0; i < config.layers(); ++i) {
    if (config.attention[i]) continue;  // its K and V are in the cache already
    delta_step(r, s, d, layer, w_.layers[i], s.delta_rows(config, layer));
    ++layer;
  }
}

// ---- prefill -------------------------------------------------------------------------------------
void Model::prefill(Recorder& r, const PrefillScratch& s, const Prefill& d) const {
  const Config& c = config;
  const uint32_t rows = d.rows;
  check(rows <= s.rows, "prefill: ", rows, " rows, scratch has ", s.rows);
  uint32_t delta_layer = 0, attention_layer = 0;

  r.embed({w_.embed.w, rows}, {w_.embed.codes, w_.embed.pairs, d.ids, s.x, s.ssq});
  // h is the normed input of the next projection; from the second layer on the layer before leaves it.
  r.rms_norm({rows, c.hidden, c.eps}, {s.x, w_.layers[0].input_gain, s.h});
  for (uint32_t i = 0; i < c.layers(); ++i) {
    const LayerWeights& w = w_.layers[i];
    const uint32_t stride = c.attention[i] ? c.attention_stride() : c.delta_stride();
    for (const StackPart& part : w.projections) {
      matmul(r, part.matrix, rows, s.h, s.projected, stride, part.offset, kMatmulAct);
    }
    if (c.attention[i]) {
      r.qkv_rope({rows, d.position, d.slot, c.heads, c.kv_heads, c.rotary, stride, c.k_offset(),
                  c.v_offset(), attention_layer, c.eps},
                 {s.projected, w.q_gain, w.k_gain, w_.inv_freq, s.attn_q}, d.step, d.slabs);
      r.flash(
          {rows, d.position, d.slot, c.heads, c.kv_heads, stride, attention_layer, 1.0f / 16.0f},
          {s.attn_q, s.projected, s.y}, d.step, d.slabs);
      ++attention_layer;
    } else {
      r.delta_prep({rows, c.key_heads, c.value_heads, stride, c.a_offset(), c.b_offset()},
                   {s.projected, w.conv, w.neg_exp_a, w.dt_bias, conv_of(d.in, c, delta_layer),
                    conv_of(d.out, c, delta_layer), s.q, s.k, s.v, s.g, s.beta});
      r.delta_wy({rows, c.key_heads, c.value_heads},
                 {s.q, s.k, s.v, s.g, s.beta, s.w, s.u, s.scores});
      r.delta_scan({rows, c.key_heads, c.value_heads},
                   {s.q, s.k, s.g, s.w, s.u, s.scores, delta_of(d.in, c, delta_layer),
                    delta_of(d.out, c, delta_layer), s.o});
      r.gated_norm({rows, c.value_heads, stride, c.z_offset(), c.eps},
                   {s.o, s.projected, w.delta_gain, s.y});
      ++delta_layer;
    }
    matmul(r, w.out, rows, s.y, s.x, c.hidden, 0, kMatmulAdd);
    r.rms_norm({rows, c.hidden, c.eps}, {s.x, w.post_gain, s.h});
    moe_prefill(r, s, rows, w, i + 1 < c.layers() ? w_.layers[i + 1].input_gain : w_.final_gain);
  }
  if (d.logit_rows) {
    const Tensor last =
        s.h.slice(uint64_t(rows - d.logit_rows) * c.hidden, uint64_t(d.logit_rows) * c.hidden);
    matmul(r, w_.head, d.logit_rows, last, d.logits, c.vocab, 0, kMatmulF32);
  }
}

void Model::moe_prefill(Recorder& r, const PrefillScratch& s, uint32_t rows, const LayerWeights& w,
                        const Tensor& next_gain) const {
  const Config& c = config;
  for (const StackPart& part : w.router) {
    matmul(r, part.matrix, rows, s.h, s.router, c.experts + 1, part.offset, kMatmulF32);
  }
  r.route_rows({rows, c.experts, c.top_k, c.experts + 1}, {s.router, s.route});
  r.group_rows({rows, c.experts, c.top_k, kExpertTile}, {s.route, s.order, s.offsets, s.tiles});
  // y of the shared expert lies behind that of the routed ones.
  const auto half = [&](const Matrix& e, const Matrix& own, bool swiglu, const Tensor& h,
                        const Tensor& own_h, const Tensor& y, const Tensor& own_y) {
    const bool together = same_form(e.w, own.w);
    r.expert_matmul({e.w, rows, c.experts, c.top_k, kExpertTile, swiglu, together},
                    {e.codes, e.pairs, together ? own.codes : Tensor{},
                     together ? own.pairs : Tensor{}, h, s.order, s.offsets, s.tiles, y});
    if (together) return;
    matmul(r, own, rows, own_h, own_y, swiglu ? own.w.n / 2 : own.w.n, 0,
           swiglu ? kMatmulSwiglu : kMatmulAct);
  };
  const uint64_t pairs = uint64_t(rows) * c.top_k;
  const Tensor own_h = s.expert_h.slice(pairs * c.expert_width, uint64_t(rows) * c.shared_width);
  const Tensor own_out = s.expert_out.slice(pairs * c.hidden, uint64_t(rows) * c.hidden);
  half(w.expert_up, w.shared_up, true, s.h, s.h, s.expert_h, own_h);
  half(w.expert_down, w.shared_down, false, s.expert_h, own_h, s.expert_out, own_out);
  r.moe_combine({rows, c.hidden, c.top_k, c.eps}, {s.expert_out, s.route, next_gain, s.x, s.h});
}

}  // namespace lily
