// kernels.h: what kernels and host share: params of every op, struct Step, weight layout, the lists.
#ifndef LILY_KERNELS_H
#define LILY_KERNELS_H

#ifndef LILY_KERNEL_TEXT
#include <cstdint>
namespace lily {
using uint = uint32_t;
using ulong = uint64_t;
#endif

// ---- constants of the architecture ------------------------------------------------------------
#define LILY_MAX_ROWS 16     // rows of one decode-route launch
#define LILY_MAX_TOP_K 16    // experts per token
#define LILY_DELTA_DIM 128   // DeltaNet key and value head dim
#define LILY_CONV_WIDTH 4    // causal convolution, so 3 rows of it are carried
#define LILY_HEAD_DIM 256    // attention head dim
#define LILY_KV_BLOCK 256    // tokens of a KV block
#define LILY_SPLIT 128       // tokens of an attention split: half a block, so that few tokens already
                             // make several groups
#define LILY_FUSED_SPLITS 8  // splits that attn_out combines itself, at most
#define LILY_PARTIAL 258     // one attention partial: max, sum, then head_dim accumulators
#define LILY_OUT_ROWS 8      // output rows of one threadgroup of delta_out, attn_out, expert_down:
                             // one partial sum of squares each
#define LILY_LINE 128        // bytes of a line of the cache, for hints
#define LILY_CHUNK 64        // tokens of a delta-rule chunk
#define LILY_MAX_LOGPROBS 20 // alternatives reported with a sampled token

// ---- weight layout v1 -------------------------------------------------------------------------
// A matrix [n, k]: n rows of codes as in MLX (4 or 8 bits, least significant first) or of bf16,
// then beside it n * k / group pairs (scale, bias), each pair one uint: scale low, bias high.
// value = scale * code + bias. Experts: the same, matrix after matrix, codes and pairs apart.
// Gate and up rows interleave: row 2i is gate i, row 2i + 1 is up i.
struct Linear {
  uint n, k;
  uint bits;         // 4, 8: affine codes; 16: bf16, no pairs
  uint group_shift;  // log2 of the group: 5, 6, 7
  uint scale_f16;    // pairs are f16 (1) or bf16 (0)
};

// ---- what changes from token to token ---------------------------------------------------------
// One device buffer per session. Set by the host only in sync and rewind, else advanced by the
// sampling kernel. Behind the struct, at the byte offsets it names: the page table
// ulong[slots][pages_stride] of KV block addresses; uint[slots][vocab] counts of generated tokens
// and uint[slots][vocab] counts of prompt tokens; uint[slots][(vocab + 31) / 32] allowed mask;
// float[slots][vocab] bias.
struct Sampled {  // what a sampling step reports, one ring entry
  uint token;
  uint status;    // 1: right, 2: logits were not finite or all zero, 3: no token allowed
  uint position;  // position the token takes in its sequence
  float logprob;  // of the raw distribution
  uint top_id[LILY_MAX_LOGPROBS];
  float top_logprob[LILY_MAX_LOGPROBS];
};
struct SlotSampling {
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  float min_p;        // 0: off
  float presence, frequency;
  float repetition;  // 1: off
  uint top_k;        // 0: off
  uint use_mask, use_bias;
  uint logprobs;  // alternatives to report, at most LILY_MAX_LOGPROBS
  uint seed_low, seed_high;
};
struct Step {
  uint rows;                        // valid rows; further rows of a launch exit
  uint pages_offset, pages_stride;  // bytes, entries
  uint counts_offset, prompt_counts_offset, mask_offset, bias_offset;  // bytes
  uint pad;
  uint slot[LILY_MAX_ROWS];      // of each row; rows of one slot are neighbours, in position order
  uint position[LILY_MAX_ROWS];  // of the row's token in its sequence
  uint id[LILY_MAX_ROWS];        // token consumed by the row
  struct SlotSampling sampling[LILY_MAX_ROWS];  // by slot
};

// ---- params: constant from recording on -------------------------------------------------------
// Buffers of each op in binding order follow its params; `act` is the activation type (bf16 or
// fp32); [..] are shapes. R = rows of the launch. "io" is read and written.

struct Embed {
  Linear w;
  uint rows;
};
// codes, pairs, ids uint[R], x out act[R][k], ssq out float[R] (sum of squares of the stored row)

// Rows of W that a threadgroup of project takes: the longer W, the more share one unpacking of x.
#define LILY_PROJECT_ROWS(n) ((n) >= 65536 ? 64 : (n) >= 8192 ? 32 : 16)
// y[:, y_offset : y_offset + n] = W (gain * x) * rsqrt(sum(ssq) / k + eps): norm and projection.
struct Project {
  Linear w;
  uint rows, ssq_parts, y_stride, y_offset, out_f32;
  float eps;
};
// codes, pairs, x act[R][k], gain float[k], ssq float[R][ssq_parts], y out (act or float)[R][y_stride]; Step: rows

// x += W (u * rsqrt(mean of the head's squares + eps)); u is gated already (delta_step).
struct DeltaOut {
  Linear w;
  uint rows, heads, head_parts;
  float eps;
};
// codes, pairs, u act[R][k], head_ssq float[R][heads][head_parts], x io act[R][n], ssq out float[R][n / LILY_OUT_ROWS]; Step

// x += W (combine(partials) * sigmoid(gate)); gate at proj[row][head * 512 + 256 ...].
struct AttnOut {
  Linear w;
  uint rows, heads, splits, combined, proj_stride;
};
// codes, pairs, partial float[R][heads][splits][258], proj act[R][proj_stride], x io act[R][n], ssq out float[R][n / LILY_OUT_ROWS]; Step: rows, position
// splits: entries per head in `partial`, at most LILY_FUSED_SPLITS. Valid ones: 1 when combined, else
// position / LILY_SPLIT + 1.

struct Route {
  uint expert;
  float weight;
};
// Top-k of the softmax (ties to the lowest id, weights renormalised), gate/up of the chosen and the
// shared expert, SwiGLU. Slots slot_begin .. slot_begin + slots - 1 of 0 .. top_k; slot top_k is the shared one.
struct ExpertUp {
  Linear routed;  // n = 2 * width, of one expert
  Linear shared;  // n = 2 * shared width
  uint rows, experts, top_k, slot_begin, slots, ssq_parts, logits_stride, h_stride;
  float eps;
};
// codes, pairs, shared codes, shared pairs, x act[R][k], gain float[k], ssq float[R][ssq_parts],
// logits float[R][logits_stride] (experts, then the shared gate), h out act[R][top_k + 1][h_stride], route out Route[R][top_k + 1]; Step

// x += sum over slots of weight * W_slot h_slot, in slot order.
struct ExpertDown {
  Linear routed, shared;  // n = hidden, k = width
  uint rows, experts, top_k, slot_begin, slots, h_stride;
};
// codes, pairs, shared codes, shared pairs, h act[R][top_k + 1][h_stride], route Route[R][top_k + 1], x io act[R][n], ssq out float[R][n / LILY_OUT_ROWS]; Step

// Convolution + silu, l2 norm of q and k, gates, delta rule over the rows of each slot in order;
// u = o * gain * silu(z); head_ssq = partial sums of o^2.
struct DeltaStep {
  uint rows, key_heads, value_heads, proj_stride, z_offset, a_offset, b_offset, head_parts,
      write_state, slots;
};
// proj act[R][proj_stride] (q | k | v at 0), conv_w float[channels][4], neg_exp_a float[Hv], dt_bias float[Hv], gain float[128],
// conv_in act[slots][3][channels], state_in float[slots][Hv][128 v][128 k], conv_out out, state_out out (same shapes), u out act[R][Hv * 128], head_ssq out float[R][Hv][head_parts]; Step: rows, slot
// write_state 0 (verification): conv_out and state_out are bound but not touched.

// q/k norm, RoPE, append of k and v to the slot's KV pages, attention of each row over its splits of
// LILY_SPLIT tokens. KV block: act[layers][2][kv_heads][256][256] (k then v).
struct AttnStep {
  uint rows, heads, kv_heads, rotary, proj_stride, k_offset, v_offset, layer, splits;
  float eps, scale;
};
// proj act[R][proj_stride] (per head 256 q, 256 gate), q_gain float[256], k_gain float[256], inv_freq float[rotary / 2],
// partial out float[R][heads][splits][258]; unbound: KV pages io; Step: rows, slot, position, pages
struct AttnCombine {
  uint rows, heads, splits;
};
// partial float[R][heads][splits][258], combined out float[R][heads][1][258] (up to LILY_FUSED_SPLITS with the arithmetic of attn_out); Step

// ---- prefill: R rows of one slot, any number -------------------------------------------------
struct RmsNorm {
  uint rows, k;
  float eps;
};
// x act[R][k], gain float[k], h out act[R][k]

// Rows of a tile of 128 columns: fewer where there are few tiles, so that each keeps a GPU's core busy.
#define LILY_MATMUL_TILES(n, rows, tile) (((n) + 127) / 128 * (((rows) + (tile) - 1) / (tile)))
#define LILY_MATMUL_ROWS(n, rows) \
  (LILY_MATMUL_TILES(n, rows, 64) >= 128 ? 64u : LILY_MATMUL_TILES(n, rows, 32) >= 128 ? 32u : 16u)
enum MatmulMode { kMatmulAct = 0, kMatmulF32 = 1, kMatmulAdd = 2, kMatmulSwiglu = 3 };
struct Matmul {
  Linear w;
  uint rows, y_stride, y_offset, mode;
};
// codes, pairs, h act[R][k], y: mode 0 out act[R][y_stride], 1 out float[R][y_stride], 2 io act[R][y_stride] (+=),
// 3 out act[R][y_stride] with n / 2 columns: silu(even row) * odd row

struct DeltaPrep {
  uint rows, key_heads, value_heads, proj_stride, a_offset, b_offset;
};
// proj, conv_w, neg_exp_a, dt_bias, conv_in act[3][channels], conv_out out act[3][channels],
// q out float[R][Hk][128] (normalised, times 1/sqrt(128)), k out float[R][Hk][128], v out float[R][Hv][128], g out float[R][Hv] (log decay), beta out float[R][Hv]

// WY form of each chunk of 64 tokens, all chunks and value heads in parallel:
// with G the running sum of g inside the chunk, T = (I + tril(beta_i exp(G_i - G_j) k_i.k_j, -1))^-1:
// w = T (beta exp(G) k), u = T (beta v), scores_ij = exp(G_i - G_j) q_i.k_j for j <= i, else 0
// (j counts inside the chunk): all that needs no state, so that the scan has little left to do.
struct DeltaWy {
  uint rows, key_heads, value_heads;
};
// q, k, v, g, beta, w io float[R][Hv][128], u io float[R][Hv][128], scores out float[R][Hv][LILY_CHUNK]
// (w and u: rows written earlier by the same thread are read again)
// Scan over the chunks of each value head with the state carried: o and the new state.
struct DeltaScan {
  uint rows, key_heads, value_heads;
};
// q, k, g, w, u, scores, state_in float[Hv][128 v][128 k], state_out out, o out float[R][Hv][128]
struct GatedNorm {
  uint rows, heads, proj_stride, z_offset;
  float eps;
};
// o float[R][heads][128], proj act (z), gain float[128], y out act[R][heads * 128]

struct QkvRope {
  uint rows, position, slot, heads, kv_heads, rotary, proj_stride, k_offset, v_offset, layer;
  float eps;
};
// proj, q_gain, k_gain, inv_freq, q out act[R][heads][256]; unbound: KV pages write; Step: pages
struct Flash {
  uint rows, position, slot, heads, kv_heads, proj_stride, layer;
  float scale;
};
// q act[R][heads][256], proj act (gate), y out act[R][heads * 256] (times sigmoid(gate)); unbound: KV pages read; Step: pages

struct RouteRows {
  uint rows, experts, top_k, logits_stride;
};
// logits float[R][logits_stride], route out Route[R][top_k + 1] (last: shared, weight sigmoid of its logit)
struct GroupRows {
  uint rows, experts, top_k, tile;
};
// route (the experts of a row differ), order out uint[R * (top_k + 1)]: pairs sorted by expert, stable;
// pair row * top_k + slot, and R * top_k + row for the shared expert, which counts as expert `experts`;
// offsets out uint[experts + 2], tiles out uint[1 + 2 * max_tiles]: count, then (expert, first position in
// order) per tile of `tile` pairs, max_tiles = R * (top_k + 1) / tile + experts + 1
// shared 1: the shared expert takes part, 0: its tiles are left out, its matrix being of another form.
struct ExpertMatmul {
  Linear w;
  uint rows, experts, top_k, tile, swiglu, shared;
};
// codes, pairs, shared codes, shared pairs, h act: swiglu 1: [R][k], row of the pair; 0:
// [R * top_k + R * shared][k], row = pair, order, offsets, tiles, y out act[R * top_k + R * shared][n / 2 or n], row = pair
// x += the experts' weighted sum, and the norm that follows it: h = x * gain / sqrt(mean(x^2) + eps).
struct MoeCombine {
  uint rows, hidden, top_k;
  float eps;
};
// down act[R * top_k + R][hidden], route, gain float[hidden], x io act[R][hidden], h out act[R][hidden]

// ---- head and sampling ------------------------------------------------------------------------
struct Score {
  uint rows, vocab;
};
// logits float[R][vocab], targets uint[R], logprob out float[R], argmax out uint[R]
// Penalties, bias, temperature and the mask; per block of 1024 tokens its partial statistics.
struct SampleScan {
  uint rows, vocab, token_limit;
};
// logits float[R][vocab], adjusted out float[R][vocab], stats out float[R][blocks][8]; Step io
// Top-k, top-p, min-p, draw (Gumbel, Philox(seed; position, token)); log-probabilities of the raw
// logits; writes the ring entry position % ring and advances Step: id, position, counts.
struct SampleDraw {
  uint rows, vocab, token_limit, ring;
};
// logits, adjusted, stats, ring out Sampled[rows][ring]; Step io
struct CopyBytes {
  ulong bytes;
};
// from, to out (multiples of 4 bytes)

// ---- the lists --------------------------------------------------------------------------------
#define LILY_OPS(X)                                                                        \
  X(embed, Embed) X(project, Project) X(delta_out, DeltaOut) X(attn_out, AttnOut)          \
  X(expert_up, ExpertUp) X(expert_down, ExpertDown) X(delta_step, DeltaStep)               \
  X(attn_step, AttnStep) X(attn_combine, AttnCombine) X(rms_norm, RmsNorm)                 \
  X(matmul, Matmul) X(delta_prep, DeltaPrep) X(delta_wy, DeltaWy) X(delta_scan, DeltaScan) \
  X(gated_norm, GatedNorm) X(qkv_rope, QkvRope) X(flash, Flash) X(route_rows, RouteRows)   \
  X(group_rows, GroupRows) X(expert_matmul, ExpertMatmul) X(moe_combine, MoeCombine)       \
  X(score, Score) X(sample_scan, SampleScan) X(sample_draw, SampleDraw) X(copy_bytes, CopyBytes)

// X(op, name, c0, c1, c2): the pipelines of each op with their compile-time constants.
// Linear ops: c0 = bits; project: c1 = input rows a threadgroup takes.
#define LILY_VARIANTS_embed(X) \
  X(embed, embed_q4, 4, 0, 0) X(embed, embed_q8, 8, 0, 0) X(embed, embed_b16, 16, 0, 0)
#define LILY_VARIANTS_project(X)                                           \
  X(project, project_q4_r1, 4, 1, 0) X(project, project_q4_r4, 4, 4, 0)    \
  X(project, project_q8_r1, 8, 1, 0) X(project, project_q8_r4, 8, 4, 0)    \
  X(project, project_b16_r1, 16, 1, 0) X(project, project_b16_r4, 16, 4, 0)
#define LILY_VARIANTS_delta_out(X)                                           \
  X(delta_out, delta_out_q4, 4, 0, 0) X(delta_out, delta_out_q8, 8, 0, 0) \
  X(delta_out, delta_out_b16, 16, 0, 0)
#define LILY_VARIANTS_attn_out(X)                                         \
  X(attn_out, attn_out_q4, 4, 0, 0) X(attn_out, attn_out_q8, 8, 0, 0) \
  X(attn_out, attn_out_b16, 16, 0, 0)
#define LILY_VARIANTS_expert_up(X)                                           \
  X(expert_up, expert_up_q4, 4, 0, 0) X(expert_up, expert_up_q8, 8, 0, 0) \
  X(expert_up, expert_up_b16, 16, 0, 0)
#define LILY_VARIANTS_expert_down(X)                                               \
  X(expert_down, expert_down_q4, 4, 0, 0) X(expert_down, expert_down_q8, 8, 0, 0) \
  X(expert_down, expert_down_b16, 16, 0, 0)
#define LILY_VARIANTS_delta_step(X) X(delta_step, delta_step, 0, 0, 0)
#define LILY_VARIANTS_attn_step(X) X(attn_step, attn_step, 0, 0, 0)
#define LILY_VARIANTS_attn_combine(X) X(attn_combine, attn_combine, 0, 0, 0)
#define LILY_VARIANTS_rms_norm(X) X(rms_norm, rms_norm, 0, 0, 0)
#define LILY_VARIANTS_matmul(X) \
  X(matmul, matmul_q4, 4, 0, 0) X(matmul, matmul_q8, 8, 0, 0) X(matmul, matmul_b16, 16, 0, 0)
#define LILY_VARIANTS_delta_prep(X) X(delta_prep, delta_prep, 0, 0, 0)
#define LILY_VARIANTS_delta_wy(X) X(delta_wy, delta_wy, 0, 0, 0)
#define LILY_VARIANTS_delta_scan(X) X(delta_scan, delta_scan, 0, 0, 0)
#define LILY_VARIANTS_gated_norm(X) X(gated_norm, gated_norm, 0, 0, 0)
#define LILY_VARIANTS_qkv_rope(X) X(qkv_rope, qkv_rope, 0, 0, 0)
#define LILY_VARIANTS_flash(X) X(flash, flash, 0, 0, 0)
#define LILY_VARIANTS_route_rows(X) X(route_rows, route_rows, 0, 0, 0)
#define LILY_VARIANTS_group_rows(X) X(group_rows, group_rows, 0, 0, 0)
#define LILY_VARIANTS_expert_matmul(X)          \
  X(expert_matmul, expert_matmul_q4, 4, 0, 0)   \
  X(expert_matmul, expert_matmul_q8, 8, 0, 0)   \
  X(expert_matmul, expert_matmul_b16, 16, 0, 0)
#define LILY_VARIANTS_moe_combine(X) X(moe_combine, moe_combine, 0, 0, 0)
#define LILY_VARIANTS_score(X) X(score, score, 0, 0, 0)
#define LILY_VARIANTS_sample_scan(X) X(sample_scan, sample_scan, 0, 0, 0)
#define LILY_VARIANTS_sample_draw(X) X(sample_draw, sample_draw, 0, 0, 0)
#define LILY_VARIANTS_copy_bytes(X) X(copy_bytes, copy_bytes, 0, 0, 0)
#define LILY_VARIANTS(X)                                                                      \
  LILY_VARIANTS_embed(X) LILY_VARIANTS_project(X) LILY_VARIANTS_delta_out(X)                  \
  LILY_VARIANTS_attn_out(X) LILY_VARIANTS_expert_up(X) LILY_VARIANTS_expert_down(X)           \
  LILY_VARIANTS_delta_step(X) LILY_VARIANTS_attn_step(X) LILY_VARIANTS_attn_combine(X)        \
  LILY_VARIANTS_rms_norm(X) LILY_VARIANTS_matmul(X) LILY_VARIANTS_delta_prep(X)               \
  LILY_VARIANTS_delta_wy(X) LILY_VARIANTS_delta_scan(X) LILY_VARIANTS_gated_norm(X)           \
  LILY_VARIANTS_qkv_rope(X) LILY_VARIANTS_flash(X) LILY_VARIANTS_route_rows(X)                \
  LILY_VARIANTS_group_rows(X) LILY_VARIANTS_expert_matmul(X) LILY_VARIANTS_moe_combine(X)     \
  LILY_VARIANTS_score(X) LILY_VARIANTS_sample_scan(X) LILY_VARIANTS_sample_draw(X)            \
  LILY_VARIANTS_copy_bytes(X)

#ifndef LILY_KERNEL_TEXT
}  // namespace lily
#endif
#endif  // LILY_KERNELS_H
