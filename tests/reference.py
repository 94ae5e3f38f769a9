"""The specification: every operation in plain numpy float64, then the whole model in one page.

Kernels on all devices are compared with the functions here; they have the same names. Inputs are
float64 or integers, outputs float64, no input is changed. T tokens, H hidden, Hq / Hkv attention
heads, D head width, Hk / Hv DeltaNet heads of Dk / Dv. A weight matrix is [out, in].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[Any]  # any integer dtype

# --------------------------------------------------------------------------------------------------
# Numbers: bf16, quantised codes


def from_bf16(bits: Ints) -> Array:
    """bf16 is the upper half of a float32: value = float32(bits << 16)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even: half of the dropped range is added, less one unit
    when the kept part is even, and the low half cut off. Finite x only."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def round_bf16(x: npt.ArrayLike) -> Array:
    """x rounded to the nearest bf16 value."""
    return from_bf16(to_bf16(x))


def unpack(codes_u32: Ints, bits: int) -> npt.NDArray[np.uint32]:
    """Code j of a row sits in word j * bits // 32 at bit (j * bits) % 32, lowest bits first.

    [..., words] -> [..., words * 32 / bits]
    """
    assert bits in (2, 4, 8), f"unpack: {bits} bits do not divide a word evenly here"
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.asarray(codes_u32, np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(*codes.shape[:-2], -1)


def dequantize(codes_u32: Ints, scales: Array, biases: Array, bits: int, group: int) -> Array:
    """w[.., j] = scale[.., j // group] * code[.., j] + bias[.., j // group] -> [..., in].

    MLX's affine form; scales may be negative, any number of leading axes (experts, rows).
    """
    codes = unpack(codes_u32, bits).astype(np.float64)
    assert codes.shape[-1] == scales.shape[-1] * group, (
        f"dequantize: {codes.shape[-1]} codes per row, {scales.shape[-1]} groups of {group}"
    )
    grouped = codes.reshape(*codes.shape[:-1], -1, group)
    return (grouped * scales[..., None] + biases[..., None]).reshape(codes.shape)


# --------------------------------------------------------------------------------------------------
# Elementwise and norms


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0.0, x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with full relative precision for large negative x."""
    return np.exp(-softplus(-x))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    """exp(x - max) / sum over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis; the gain as stored (1 + w is inside)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def l2_norm(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis: eps is added to the sum, not to the mean."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def embed(ids: Ints, table: Array) -> Array:
    """Rows of the embedding table: [T] -> [T, H]."""
    return table[np.asarray(ids)]


def linear(x: Array, W: Array) -> Array:
    """y = W x for each row: [T, in], [out, in] -> [T, out]."""
    return x @ W.T


def project(x: Array, W: Array, gain: Array, eps: float) -> Array:
    """W rms_norm(x): [T, H], [out, H] -> [T, out].

    Kernels fold the gain into x and scale the sums by 1 / rms afterwards.
    """
    return linear(rms_norm(x, gain, eps), W)


def lm_head(x: Array, W: Array, gain: Array, eps: float) -> Array:
    """Logits: the final norm, then the head's matrix. [T, H] -> [T, vocab]"""
    return project(x, W, gain, eps)


# --------------------------------------------------------------------------------------------------
# Gated DeltaNet


def delta_conv(qkv: Array, weight: Array, carried: Array) -> tuple[Array, Array]:
    """Causal depthwise convolution of width 4, then silu:

        y[t, c] = silu(sum_j weight[c, j] * qkv[t - 3 + j, c])

    qkv [T, C]; weight [C, 4], the last tap meets the current token; carried [3, C] are the inputs
    before qkv, oldest first. Returns y [T, C] and the last three inputs for the next call.
    """
    rows = np.concatenate([carried, qkv])
    tokens = len(qkv)
    mixed = np.sum([rows[j : j + tokens] * weight[:, j] for j in range(4)], axis=0)
    return silu(mixed), rows[tokens:]


def delta_gates(a: Array, b: Array, neg_exp_A: Array, dt_bias: Array) -> tuple[Array, Array]:
    """Log decay g = -exp(A_log) * softplus(a + dt_bias) and write strength beta = sigmoid(b).

    a, b [T, Hv]; neg_exp_A = -exp(A_log) and dt_bias [Hv] -> g, beta [T, Hv], g <= 0
    """
    return neg_exp_A * softplus(a + dt_bias), sigmoid(b)


def _per_value_head(x: Array, value_heads: int) -> Array:
    """Value head h uses key head h // (Hv / Hk): [T, Hk, Dk] -> [T, Hv, Dk]."""
    return np.repeat(x, value_heads // x.shape[1], axis=1)


def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule, token by token. Per value head, with S [Dv, Dk]:

        S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q / sqrt(Dk)

    q, k [T, Hk, Dk] already l2-normalised; v [T, Hv, Dv]; g, beta [T, Hv]; state [Hv, Dv, Dk].
    Returns o [T, Hv, Dv] and the state after the last token.
    """
    q = _per_value_head(q, v.shape[1]) / np.sqrt(q.shape[-1])
    k = _per_value_head(k, v.shape[1])
    o, state = np.empty(v.shape), state.copy()
    for t in range(len(v)):
        state *= np.exp(g[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - (state @ k[t][:, :, None])[:, :, 0])
        state += delta[:, :, None] * k[t][:, None, :]
        o[t] = (state @ q[t][:, :, None])[:, :, 0]
    return o, state


def delta_rule_chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, chunk: int = 64
) -> tuple[Array, Array]:
    """The same, a chunk at a time (WY form). With G_i the sum of g up to and with token i of the
    chunk and S the state before it, the rank-one writes d_i k_i^T satisfy a unit lower triangular
    system,

        (I + A) d = beta (v - exp(G) S k),    A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i,

    so with T = (I + A)^-1:  U = T (beta v),  W = T (beta exp(G) k),  d = U - W S^T, and then

        o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) d_j,
        S  <- exp(G_last) S + sum_j exp(G_last - G_j) d_j k_j^T.
    """
    heads = v.shape[1]
    q, k = _per_value_head(q, heads) / np.sqrt(q.shape[-1]), _per_value_head(k, heads)
    outputs = []
    for start in range(0, len(v), chunk):
        part = slice(start, start + chunk)
        qc, kc, vc = (x[part].transpose(1, 0, 2) for x in (q, k, v))  # [Hv, C, D]
        G, b = np.cumsum(g[part], axis=0).T, beta[part].T[:, :, None]  # [Hv, C], [Hv, C, 1]
        n = G.shape[1]
        upto = np.tril(np.ones((n, n), bool))
        # exp of a masked difference: above the diagonal G_i - G_j is positive and may overflow.
        decay = np.exp(np.where(upto, G[:, :, None] - G[:, None, :], -np.inf))  # [Hv, C, C]
        A = np.tril(b * decay * (kc @ kc.transpose(0, 2, 1)), -1)
        T = np.linalg.inv(np.eye(n) + A)
        U, W = T @ (b * vc), T @ (b * np.exp(G)[:, :, None] * kc)
        d = U - W @ state.transpose(0, 2, 1)  # [Hv, C, Dv]
        o = np.exp(G)[:, :, None] * (qc @ state.transpose(0, 2, 1))
        o += (decay * (qc @ kc.transpose(0, 2, 1))) @ d
        rest = np.exp(G[:, -1:] - G)[:, :, None]  # what is left of each write at the chunk's end
        state = np.exp(G[:, -1])[:, None, None] * state + d.transpose(0, 2, 1) @ (rest * kc)
        outputs.append(o.transpose(1, 0, 2))
    return np.concatenate(outputs), state


def gated_norm(o: Array, z: Array, gain: Array, eps: float) -> Array:
    """rms_norm of each head's output with the gain as stored [Dv], times silu(z), z as o.

    [T, Hv, Dv] -> [T, Hv, Dv]
    """
    return rms_norm(o, gain, eps) * silu(z)


def split_qkv(qkv: Array, key_heads: int, Dk: int, Dv: int) -> tuple[Array, Array, Array]:
    """Channels are all of q, then all of k, then all of v, head by head.

    [T, C] -> q [T, Hk, Dk], k [T, Hk, Dk], v [T, Hv, Dv]
    """
    q, k, v = np.split(qkv, [key_heads * Dk, 2 * key_heads * Dk], axis=1)
    heads = (len(qkv), key_heads, Dk)
    return q.reshape(heads), k.reshape(heads), v.reshape(len(qkv), -1, Dv)


def delta_step(
    qkv: Array,
    z: Array,
    a: Array,
    b: Array,
    conv_weight: Array,
    neg_exp_A: Array,
    dt_bias: Array,
    gain: Array,
    carried: Array,
    state: Array,
) -> tuple[Array, Array, Array, Array]:
    """The decode step between the two projections, for T rows of one slot: conv, gates, l2 norm of
    q and k, delta rule, output gate.

    The norm of each head is left open, so that no thread waits for a whole head: the results are
    u = o * gain * silu(z) [T, Hv, Dv] and the sum of squares of o per head [T, Hv], from which
    delta_out takes 1 / rms. qkv [T, C], z [T, Hv * Dv], a and b [T, Hv], carried [3, C],
    state [Hv, Dv, Dk]. Returns u, sums, carried, state.
    """
    _, Dv, Dk = state.shape
    mixed, carried = delta_conv(qkv, conv_weight, carried)
    q, k, v = split_qkv(mixed, (qkv.shape[1] - z.shape[1]) // (2 * Dk), Dk, Dv)
    g, beta = delta_gates(a, b, neg_exp_A, dt_bias)
    o, state = delta_rule(l2_norm(q), l2_norm(k), v, g, beta, state)
    return o * gain * silu(z.reshape(o.shape)), (o * o).sum(-1), carried, state


def delta_out(u: Array, sums: Array, W: Array, eps: float) -> Array:
    """y = W (u / sqrt(sums / Dv + eps)), each head divided by its own rms.

    u [T, Hv, Dv], sums [T, Hv], W [H, Hv * Dv] -> [T, H]
    """
    scaled = u / np.sqrt(sums / u.shape[-1] + eps)[:, :, None]
    return linear(scaled.reshape(len(u), -1), W)


# --------------------------------------------------------------------------------------------------
# Attention


def rope_inv_freq(rotary_dims: int, theta: float) -> npt.NDArray[np.float32]:
    """theta^(-2 i / rotary_dims), computed in double, kept as float32: [rotary_dims / 2]."""
    return (theta ** (-np.arange(0, rotary_dims, 2) / rotary_dims)).astype(np.float32)


def rope_angles(positions: Ints, inv_freq: npt.NDArray[np.float32]) -> Array:
    """position * inv_freq as a float32 product, whose rounding is the model's: [T, rotary / 2]."""
    return (np.asarray(positions, np.float32)[:, None] * inv_freq).astype(np.float64)


def rope(x: Array, positions: Ints, inv_freq: npt.NDArray[np.float32]) -> Array:
    """Turns the pairs (i, i + rotary / 2) of the first rotary dims by rope_angles; the rest stays.

    [T, heads, D] -> [T, heads, D]
    """
    angles = rope_angles(positions, inv_freq)[:, None, :]
    half = len(inv_freq)
    cos, sin, first, second = np.cos(angles), np.sin(angles), x[..., :half], x[..., half : 2 * half]
    return np.concatenate(
        [first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1
    )


def qk_norm(x: Array, gain: Array, eps: float) -> Array:
    """rms_norm of every head by itself with one shared gain [D], before rope: [T, heads, D]."""
    return rms_norm(x, gain, eps)


def attention_scores(q: Array, K: Array, positions: Ints, scale: float, causal: bool) -> Array:
    """scale * (q . k); when causal, -inf where the key's position lies after the query's.

    q [T, Hq, D]; K [S, Hkv, D], row s is the key of position s; positions [T] -> [T, Hq, S].
    Query head h reads KV head h // (Hq / Hkv).
    """
    tokens, q_heads, width = q.shape
    grouped = q.reshape(tokens, K.shape[1], -1, width).transpose(1, 0, 2, 3)  # [Hkv, T, Hq/Hkv, D]
    scores = grouped.reshape(K.shape[1], -1, width) @ K.transpose(1, 2, 0) * scale
    scores = scores.reshape(K.shape[1], tokens, -1, len(K)).transpose(1, 0, 2, 3)
    scores = scores.reshape(tokens, q_heads, len(K))
    if causal:
        later = np.arange(len(K)) > np.asarray(positions)[:, None]
        scores[np.broadcast_to(later[:, None, :], scores.shape)] = -np.inf
    return scores


def weighted_values(weights: Array, V: Array) -> Array:
    """sum_s weights[t, h, s] * V[s, h // (Hq / Hkv)]: [T, Hq, S], [S, Hkv, D] -> [T, Hq, D]."""
    tokens, q_heads, length = weights.shape
    grouped = weights.reshape(tokens, V.shape[1], -1, length).transpose(1, 0, 2, 3)
    out = grouped.reshape(V.shape[1], -1, length) @ V.transpose(1, 0, 2)
    out = out.reshape(V.shape[1], tokens, -1, V.shape[2]).transpose(1, 0, 2, 3)
    return out.reshape(tokens, q_heads, V.shape[2])


def attention(
    q: Array, K: Array, V: Array, positions: Ints, scale: float, causal: bool = True
) -> Array:
    """softmax(scale * q K^T + causal mask) V with grouped heads.

    q [T, Hq, D]; K, V [S, Hkv, D]; positions [T], the queries' own -> [T, Hq, D]
    """
    out, positions = np.empty(q.shape), np.asarray(positions)
    for t in range(0, len(q), 256):  # in pieces, each with the keys it can see: memory and time
        rows = slice(t, t + 256)
        seen = min(len(K), int(positions[rows].max()) + 1) if causal else len(K)
        scores = attention_scores(q[rows], K[:seen], positions[rows], scale, causal)
        out[rows] = weighted_values(softmax(scores), V[:seen])
    return out


def attention_split(
    q: Array, K: Array, V: Array, positions: Ints, scale: float, split: int = 256
) -> tuple[Array, Array, Array]:
    """Causal attention over each absolute range [n * split, (n + 1) * split) of keys by itself,
    not yet divided:

        m = max of the scores,  l = sum exp(score - m),  acc = sum exp(score - m) V

    -> m [N, T, Hq], l [N, T, Hq], acc [N, T, Hq, D]. A range that a row does not see has m = -inf,
    l = 0, acc = 0.
    """
    ms, ls, accs = [], [], []
    for start in range(0, len(K), split):
        keys = slice(start, start + split)
        scores = attention_scores(q, K[keys], np.asarray(positions) - start, scale, causal=True)
        m = scores.max(-1)
        weights = np.exp(scores - np.where(np.isinf(m), 0.0, m)[:, :, None])
        ms.append(m)
        ls.append(weights.sum(-1))
        accs.append(weighted_values(weights, V[keys]))
    return np.stack(ms), np.stack(ls), np.stack(accs)


def attention_combine(partials: tuple[Array, Array, Array]) -> Array:
    """sum_n e^(m_n - M) acc_n / sum_n e^(m_n - M) l_n, M = max m_n, in the order of the splits.

    (m, l, acc) as attention_split returns them -> [T, Hq, D]
    """
    m, ls, acc = partials
    top, total, out = m.max(0), np.zeros(ls.shape[1:]), np.zeros(acc.shape[1:])
    for n in range(len(m)):
        weight = np.exp(m[n] - top)
        total += weight * ls[n]
        out += weight[:, :, None] * acc[n]
    return out / total[:, :, None]


def split_q_gate(projected: Array, D: int) -> tuple[Array, Array]:
    """q_proj gives per head D query values, then D gate values.

    [T, Hq * 2 * D] -> q [T, Hq, D], gate [T, Hq, D]
    """
    heads = projected.reshape(len(projected), -1, 2 * D)
    return heads[..., :D], heads[..., D:]


def attn_gate(o: Array, gate: Array) -> Array:
    """The attention output times sigmoid(gate), before the output projection: [T, Hq, D]."""
    return o * sigmoid(gate)


# --------------------------------------------------------------------------------------------------
# Mixture of experts


def router(logits: Array, top_k: int) -> tuple[npt.NDArray[np.int64], Array]:
    """softmax over all experts, the top_k largest, their weights divided by their sum.

    Largest first, ties to the lowest id. [T, E] -> idx [T, top_k], weights [T, top_k].
    Kernels do this in float32, never lower.
    """
    idx = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(softmax(logits), idx, axis=-1)
    return idx, weights / weights.sum(-1, keepdims=True)


def shared_gate(x: Array, w: Array) -> Array:
    """sigmoid(w . x), one number per token: [T, H], [1, H] -> [T, 1]."""
    return sigmoid(linear(x, w))


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return silu(gate) * up


def expert_up(x: Array, gate: Array, up: Array, idx: Ints) -> Array:
    """The experts' first half: h[t, s] = swiglu(gate[e] x_t, up[e] x_t) with e = idx[t, s].

    x [T, H]; gate, up [E, I, H]; idx [T, top_k] -> [T, top_k, I]
    """
    h = np.empty((*idx.shape, gate.shape[1]))
    for e in np.unique(idx):
        t, s = np.nonzero(idx == e)
        h[t, s] = swiglu(linear(x[t], gate[e]), linear(x[t], up[e]))
    return h


def expert_down(h: Array, down: Array, idx: Ints, weights: Array) -> Array:
    """The experts' second half, combined: y[t] = sum_s weights[t, s] * down[idx[t, s]] h[t, s].

    h [T, top_k, I]; down [E, H, I]; idx, weights [T, top_k] -> [T, H]
    """
    y = np.empty((*idx.shape, down.shape[1]))
    for e in np.unique(idx):
        t, s = np.nonzero(idx == e)
        y[t, s] = linear(h[t, s], down[e])
    return (weights[:, :, None] * y).sum(1)


def moe(x: Array, idx: Ints, weights: Array, w: Mapping[str, Array]) -> Array:
    """Routed experts plus the shared one, which every token visits with weight shared_gate.

    x [T, H] -> [T, H]; w maps switch_mlp.{gate,up,down}_proj [E, ..], shared_expert.{gate,up,down}
    _proj and shared_expert_gate to their matrices.
    """
    h = expert_up(x, w["switch_mlp.gate_proj"], w["switch_mlp.up_proj"], idx)
    shared = swiglu(linear(x, w["shared_expert.gate_proj"]), linear(x, w["shared_expert.up_proj"]))
    return expert_down(h, w["switch_mlp.down_proj"], idx, weights) + shared_gate(
        x, w["shared_expert_gate"]
    ) * linear(shared, w["shared_expert.down_proj"])


# --------------------------------------------------------------------------------------------------
# Scores and sampling


def score(logits: Array, targets: Ints) -> tuple[Array, npt.NDArray[np.int64]]:
    """Log-probability of each row's target, and each row's argmax (ties to the lowest id).

    [T, vocab], [T] -> [T], [T]
    """
    top = logits.max(-1)
    logsum = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return logits[np.arange(len(logits)), np.asarray(targets)] - logsum, logits.argmax(-1)


def penalties(
    logits: Array,
    prompt: Iterable[int],
    generated: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Array:
    """Repetition: an id in the prompt or the generated text has its logit divided by it when
    positive, multiplied when negative. Then each generated id loses presence once, and frequency
    as often as it occurs. [vocab] -> [vocab]"""
    logits = logits.copy()
    seen = np.array(sorted({*prompt, *generated}), np.int64)
    logits[seen] = np.where(logits[seen] < 0, logits[seen] * repetition, logits[seen] / repetition)
    ids, counts = np.unique(np.array(generated, np.int64), return_counts=True)
    logits[ids] -= presence + frequency * counts
    return logits


def by_rank(logits: Array) -> npt.NDArray[np.int64]:
    """Ids from the largest logit to the smallest, ties to the lowest id."""
    return np.argsort(-logits, kind="stable")


def drop(logits: Array, ids: Ints) -> Array:
    """The logits with these ids (or this mask of ids) made impossible."""
    logits = logits.copy()
    logits[ids] = -np.inf
    return logits


def keep_top_k(logits: Array, top_k: int) -> Array:
    """Exactly the top_k largest stay, ties to the lowest id; 0 keeps all."""
    return drop(logits, by_rank(logits)[top_k:]) if top_k > 0 else logits


def keep_top_p(logits: Array, top_p: float) -> Array:
    """In order of rank, an id stays while those before it have less than top_p together; the first
    always stays."""
    order = by_rank(logits)
    probs = softmax(logits)[order]
    before = np.cumsum(probs) - probs
    before[0] = -np.inf
    return drop(logits, order[before >= top_p]) if top_p < 1.0 else logits


def keep_min_p(logits: Array, min_p: float) -> Array:
    """An id stays if its probability is at least min_p times the largest one."""
    probs = softmax(logits)
    return drop(logits, probs < min_p * probs.max())


def candidates(
    logits: Array,
    *,
    prompt: Iterable[int] = (),
    generated: Sequence[int] = (),
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    allowed: Ints | None = None,
    last_id: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Array:
    """What the draw sees, -inf where an id cannot be drawn: penalties, bias, masks, temperature,
    top-k, top-p, min-p, in this order.

    allowed is a mask [vocab] of the ids a grammar permits; ids above last_id, the tokenizer's last,
    are padding of the matrix. Temperature 0 is greedy: only the largest is kept.
    """
    logits = penalties(logits, prompt, generated, repetition, presence, frequency)
    for token, value in (bias or {}).items():
        logits[token] += value
    if last_id is not None:
        logits[last_id + 1 :] = -np.inf
    if allowed is not None:
        logits[~np.asarray(allowed, bool)] = -np.inf
    if not logits.max() > -np.inf:
        raise ValueError("sample: no id is allowed")
    if temperature == 0:
        return keep_top_k(logits, 1)
    return keep_min_p(keep_top_p(keep_top_k(logits / temperature, top_k), top_p), min_p)


def philox(seed: int, counter: Ints) -> npt.NDArray[np.uint32]:
    """Philox4x32-10: key = (low, high word of the 64-bit seed), counter [..., 4] -> [..., 4].

    Ten rounds; in each, two 32x32 -> 64 bit products mix the words, and the key grows by two Weyl
    constants between rounds.
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    word, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> word) ^ c1 ^ np.uint64(k0), p1 & low
        c2, c3 = (p0 >> word) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seed: int, position: int, token_id: npt.ArrayLike) -> Array:
    """In (0, 1), a function of (seed, position, id) alone: word id % 4 of philox at the counter
    (id // 4, position, 0, 0), its upper 24 bits plus one half, times 2^-24."""
    ids = np.asarray(token_id, np.int64)
    counter = np.zeros((*ids.shape, 4), np.uint64)
    counter[..., 0], counter[..., 1] = ids >> 2, position
    word = np.take_along_axis(philox(seed, counter), (ids & 3)[..., None], axis=-1)[..., 0]
    return ((word >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24


def gumbel(seed: int, position: int, token_id: npt.ArrayLike) -> Array:
    """-log(-log(uniform)): added to log-weights it makes the argmax a draw by weight."""
    return -np.log(-np.log(uniform(seed, position, token_id)))


def draw(kept: Array, seed: int, position: int) -> int:
    """argmax of kept + gumbel over the ids that are left, ties to the lowest id.

    position is the one that the drawn token will take.
    """
    ids = np.flatnonzero(kept > -np.inf)
    return int(ids[np.argmax(kept[ids] + gumbel(seed, position, ids))])


def sample(logits: Array, *, seed: int, position: int, **settings: Any) -> int:
    """One token from raw logits [vocab]; settings as in candidates."""
    return draw(candidates(logits, **settings), seed, position)


# --------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class State:
    """What the past leaves behind, by layer number: conv and delta of the DeltaNet layers, K and V
    of the attention layers. forward leaves the state it is given as it was."""

    position: int
    conv: dict[int, Array]  # [3, channels], oldest first
    delta: dict[int, Array]  # [Hv, Dv, Dk]
    K: dict[int, Array]  # [position, Hkv, D], after norm and rope
    V: dict[int, Array]  # [position, Hkv, D]


def read_tensors(folder: Path) -> dict[str, tuple[str, npt.NDArray[Any]]]:
    """All tensors of a folder's safetensors files as (dtype name, array); bf16 stays 16 bits."""
    kinds = {"U32": "<u4", "BF16": "<u2", "F32": "<f4", "F16": "<f2"}
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, info in safetensors.deserialize(file.read_bytes()):
            array = np.frombuffer(info["data"], kinds[info["dtype"]]).reshape(info["shape"])
            tensors[name] = (info["dtype"], array)
    return tensors


class Model:
    """A qwen3_5_moe model, all weights dequantised to float64."""

    def __init__(self, config: Mapping[str, Any], weights: dict[str, Array]) -> None:
        self.config, self.weights = config, weights
        rope = config["rope_parameters"]
        self.D, self.eps = config["head_dim"], config["rms_norm_eps"]
        rotary_dims = int(self.D * rope["partial_rotary_factor"])
        self.inv_freq = rope_inv_freq(rotary_dims, rope["rope_theta"])

    @classmethod
    def load(cls, folder: str | Path) -> Model:
        """Reads an MLX checkpoint: 4- or 8-bit affine, any group, settings per tensor, or plain
        bf16, f16, f32; the vision tower is left out."""
        config = json.loads((Path(folder) / "config.json").read_text())
        quantization, raw = config.get("quantization", {}), read_tensors(Path(folder))

        def value(name: str) -> Array:
            kind, array = raw[name]
            return from_bf16(array) if kind == "BF16" else array.astype(np.float64)

        weights = {}
        for name in raw:
            if name.startswith("vision_tower.") or name.endswith((".scales", ".biases")):
                continue
            base = name.removesuffix(".weight")
            short = base.removeprefix("language_model.").removeprefix("model.")
            if f"{base}.scales" in raw:
                own = {**quantization, **quantization.get(base, {})}
                scales, biases = value(f"{base}.scales"), value(f"{base}.biases")
                codes = raw[name][1]
                weights[short] = dequantize(codes, scales, biases, own["bits"], own["group_size"])
            else:
                weights[short] = value(name)
        return cls(config["text_config"], weights)

    def layer(self, i: int, part: str) -> dict[str, Array]:
        """The weights of one part (linear_attn, self_attn, mlp) of layer i by their short names."""
        prefix = f"layers.{i}.{part}."
        return {k[len(prefix) :]: w for k, w in self.weights.items() if k.startswith(prefix)}

    def empty(self) -> State:
        """The state before the first token."""
        c, kinds = self.config, self.config["layer_types"]
        Hv, Dv, Dk = (
            c["linear_num_value_heads"],
            c["linear_value_head_dim"],
            c["linear_key_head_dim"],
        )
        channels = 2 * c["linear_num_key_heads"] * Dk + Hv * Dv

        def where(kind: str, *shape: int) -> dict[int, Array]:
            return {i: np.zeros(shape) for i, k in enumerate(kinds) if k == kind}

        conv = where("linear_attention", 3, channels)
        delta = where("linear_attention", Hv, Dv, Dk)
        K, V = (where("full_attention", 0, c["num_key_value_heads"], self.D) for _ in "KV")
        return State(0, conv, delta, K, V)

    def forward(
        self,
        ids: Sequence[int] | Ints,
        state: State | None = None,
        trace: dict[str, Any] | None = None,
    ) -> tuple[Array, State]:
        """Logits [T, vocab] of ids that follow state, and the state after them.

        trace, a dict, receives the values inside: embed, L0.in_norm, L0.mixer, and so on.
        """
        old = state or self.empty()
        new = State(
            old.position + len(ids), *(dict(x) for x in (old.conv, old.delta, old.K, old.V))
        )
        w, log = self.weights, trace if trace is not None else {}
        x = log["embed"] = embed(np.asarray(ids), w["embed_tokens"])
        for i, kind in enumerate(self.config["layer_types"]):
            mixer = self.delta_net if kind == "linear_attention" else self.attention
            y = log[f"L{i}.in_norm"] = rms_norm(x, w[f"layers.{i}.input_layernorm"], self.eps)
            x = x + mixer(i, y, old, new, log)
            y = log[f"L{i}.post_norm"] = rms_norm(
                x, w[f"layers.{i}.post_attention_layernorm"], self.eps
            )
            mlp = self.layer(i, "mlp")
            idx, weights = router(linear(y, mlp["gate"]), self.config["num_experts_per_tok"])
            log[f"L{i}.router_idx"], log[f"L{i}.router_w"] = idx, weights
            m = log[f"L{i}.moe"] = moe(y, idx, weights, mlp)
            x = log[f"L{i}.out"] = x + m
        log["final_norm"] = rms_norm(x, w["norm"], self.eps)
        head = w["embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"]
        return lm_head(x, head, w["norm"], self.eps), new

    def delta_net(self, i: int, y: Array, old: State, new: State, log: dict[str, Any]) -> Array:
        """Gated DeltaNet on normalised y [T, H]; the layer's conv and delta state go into new."""
        p = self.layer(i, "linear_attn")
        qkv, z, a, b = (linear(y, p[f"in_proj_{n}"]) for n in ("qkv", "z", "a", "b"))
        mixed, new.conv[i] = delta_conv(qkv, p["conv1d"][:, :, 0], old.conv[i])
        _, Dv, Dk = old.delta[i].shape
        q, k, v = split_qkv(mixed, self.config["linear_num_key_heads"], Dk, Dv)
        g, beta = delta_gates(a, b, -np.exp(p["A_log"]), p["dt_bias"])
        o, new.delta[i] = delta_rule(l2_norm(q), l2_norm(k), v, g, beta, old.delta[i])
        o = gated_norm(o, z.reshape(o.shape), p["norm"], self.eps)
        out = log[f"L{i}.mixer"] = linear(o.reshape(len(y), -1), p["out_proj"])
        return out

    def attention(self, i: int, y: Array, old: State, new: State, log: dict[str, Any]) -> Array:
        """Gated attention on normalised y [T, H]; the layer's K and V go into new."""
        p, tokens = self.layer(i, "self_attn"), len(y)
        positions = np.arange(old.position, new.position)
        q, gate = split_q_gate(linear(y, p["q_proj"]), self.D)
        k, v = (linear(y, p[n]).reshape(tokens, -1, self.D) for n in ("k_proj", "v_proj"))
        q = rope(qk_norm(q, p["q_norm"], self.eps), positions, self.inv_freq)
        k = rope(qk_norm(k, p["k_norm"], self.eps), positions, self.inv_freq)
        new.K[i], new.V[i] = np.concatenate([old.K[i], k]), np.concatenate([old.V[i], v])
        o = attention(q, new.K[i], new.V[i], positions, self.D**-0.5)
        out = log[f"L{i}.mixer"] = linear(attn_gate(o, gate).reshape(tokens, -1), p["o_proj"])
        return out
