"""Owns the tiny model in PyTorch: batched, chunked, differentiable; rows hold several documents.

A row [T] is several documents one after another; `position` counts from 0 in each. States, taps and
attention end where a document begins, as if each were alone. Shapes: B rows, T tokens, C of them in
a chunk, N chunks, H value heads, D = 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import layout as lay
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
FORGET = 30.0  # exp(-30) of an older document is left: less than one rounding of fp32
Weights = dict[str, Tensor]


# ---- weights ----------------------------------------------------------------------------------


def fake_quantised(w: Tensor, bits: int) -> Tensor:
    """The values that affine codes of groups of 64 give back; the gradient passes unchanged.

    As MLX rounds: the edge of larger magnitude is met exactly, codes are chosen before scale and
    bias are rounded to bf16.
    """
    with torch.no_grad():
        scale, bias, codes = affine(w, bits)
        value = (scale.bfloat16().float() * codes + bias.bfloat16().float()).view(w.shape)
    return w + (value - w).detach()


def affine(w: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, bias, codes) in fp32 of groups of 64 of the bf16 values of w."""
    groups = w.bfloat16().float().reshape(-1, lay.GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    top = (1 << bits) - 1
    falling = low.abs() > high.abs()
    scale = ((high - low) / top).clamp_min(1e-7)
    scale = torch.where(falling, scale, -scale)
    edge = torch.where(falling, low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps == 0, scale, edge / steps)
    bias = torch.where(steps == 0, torch.zeros_like(edge), edge)
    return scale, bias, torch.round((groups - bias) / scale).clamp(0, top)


class Parameters:
    """fp32 masters in three flat tensors by how they are rounded; same shapes lie side by side."""

    def __init__(self, device: str, seed: int = 0) -> None:
        order = sorted(lay.specs(), key=lambda s: (s.bits, s.muon, s.shape[-2:], s.name))
        self.specs = order
        self.place: dict[str, tuple[int, int]] = {}  # bits, offset
        sizes = {4: 0, 8: 0, 16: 0}
        for spec in order:
            self.place[spec.name] = (spec.bits, sizes[spec.bits])
            sizes[spec.bits] += spec.size
        self.flat = {
            bits: torch.zeros(size, device=device, requires_grad=True)
            for bits, size in sizes.items()
        }
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for spec in order:
                values = torch.randn(spec.shape, generator=generator) * spec.std
                if spec.bits == 16:
                    values = _first_vector(spec, generator)
                self.view(spec.name).copy_(values)

    def view(self, name: str) -> Tensor:
        """One tensor's master, by its own shape."""
        return self._cut(self.flat, name)

    def _cut(self, flat: dict[int, Tensor], name: str) -> Tensor:
        bits, at = self.place[name]
        spec = next(s for s in self.specs if s.name == name)
        return flat[bits][at : at + spec.size].view(spec.shape)

    def weights(
        self, dtype: torch.dtype, quantised: bool, fake: Callable[..., Tensor] = fake_quantised
    ) -> Weights:
        """All tensors as the forward pass reads them: gates and vectors in fp32."""
        flat = dict(self.flat)
        if quantised:
            flat[4], flat[8] = fake(flat[4], 4), fake(flat[8], 8)
            flat[16] = flat[16] + (flat[16].bfloat16().float() - flat[16]).detach()
        flat[4] = flat[4].to(dtype)
        out: Weights = {}
        for bits in (4, 8, 16):
            specs = [s for s in self.specs if s.bits == bits]
            for spec, part in zip(specs, flat[bits].split([s.size for s in specs]), strict=True):
                out[spec.name] = part.view(spec.shape)
        return out

    def muon_groups(self) -> list[tuple[int, int, int, int]]:
        """(offset, count, rows, columns) in the flat of 4 bits; the rest is Adam's."""
        groups: list[tuple[int, int, int, int]] = []
        for spec in self.specs:
            if not spec.muon:
                continue
            rows, columns = spec.shape[-2:]
            count, at = spec.size // (rows * columns), self.place[spec.name][1]
            if groups and groups[-1][2:] == (rows, columns):
                groups[-1] = (groups[-1][0], groups[-1][1] + count, rows, columns)
            else:
                groups.append((at, count, rows, columns))
        return groups


def _first_vector(spec: lay.Spec, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(spec.shape, generator=generator)
    if spec.name.endswith("A_log"):
        return torch.log(1 + 7 * uniform)
    if spec.name.endswith("dt_bias"):  # steps of 0.001 to 0.1: memories of 2 to 1000 tokens
        step = torch.exp(math.log(1e-3) + uniform * math.log(100))
        return step + torch.log(-torch.expm1(-step))
    if spec.name.endswith("conv1d.weight"):
        return (uniform - 0.5) * 0.5 + F.one_hot(torch.tensor(3), 4)
    return torch.ones(spec.shape)


def of_layer(weights: Weights, prefix: str) -> Weights:
    """A layer's tensors by their names in it, the same for every layer of a kind."""
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


# ---- parts ------------------------------------------------------------------------------------


def rms(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + lay.EPS) * gain).to(x.dtype)


def l2(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


class UnitInverse(torch.autograd.Function):
    """(I + a)^-1 of strictly lower triangular a [.., C, C], by halves: as stable as substitution."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size = a.shape[-1]
        at = torch.arange(size, device=a.device)
        inverse = torch.eye(size, device=a.device, dtype=a.dtype) - torch.where(
            (at[:, None] // 2 == at // 2), a, 0.0
        )
        half = 2
        while half < size:
            # Rows of a second half, columns of its first half: C of [[A, 0], [C, B]].
            joins = (at[:, None] // (2 * half) == at // (2 * half)) & (
                at[:, None] // half > at // half
            )
            inverse = inverse - inverse @ (torch.where(joins, a, 0.0) @ inverse)
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT)


class Scan(torch.autograd.Function):
    """States before each chunk: s[n + 1] = d[n] s[n] - m[n] s[n] + a[n], from zero.

    m, a [N, G, D, D] and d [N, G, 1, 1] in fp32, G = B H.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor, a: Tensor, d: Tensor) -> Tensor:
        states = torch.empty_like(a)
        states[0] = 0
        for n in range(len(a) - 1):
            kept = torch.addcmul(a[n], states[n], d[n])
            torch.baddbmm(kept, m[n], states[n], alpha=-1, out=states[n + 1])
        ctx.save_for_backward(m, d, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, d, states = ctx.saved_tensors
        after = torch.empty_like(grad)  # the gradient of s[n + 1] by n, which is that of a[n]
        after[-1] = 0
        for n in range(len(grad) - 1, 0, -1):
            kept = torch.addcmul(grad[n], after[n], d[n])
            torch.baddbmm(kept, m[n].mT, after[n], alpha=-1, out=after[n - 1])
        return -(after @ states.mT), after, (after * states).sum((-1, -2), keepdim=True)


def delta_chunks(x: Tensor, w: Weights, position: Tensor) -> tuple[Tensor, ...]:
    """A DeltaNet layer up to what its scan needs, and what its end needs.

    Everything of a chunk that does not depend on the state before it (the WY form):
    values u and their dependence r on the state, v_new = u - r s; m, a, d of Scan.
    """
    b, t, _ = x.shape
    h = rms(x, w["input_layernorm.weight"])
    mixed = F.linear(h, w["linear_attn.in_proj_qkv.weight"])
    taps = w["linear_attn.conv1d.weight"]  # the last tap is the token itself
    conv = mixed.float() * taps[:, 3]
    for back in (1, 2, 3):
        older = F.pad(mixed, (0, 0, back, 0))[:, :t].float()
        conv = conv + older * taps[:, 3 - back] * (position >= back)[..., None]
    conv = F.silu(conv)
    n, heads, dim = t // CHUNK, lay.VALUE_HEADS, lay.DELTA_DIM
    key_width = lay.KEY_HEADS * dim
    q, k, v = conv.split([key_width, key_width, heads * dim], -1)
    repeats = heads // lay.KEY_HEADS
    q = (l2(q.reshape(b, t, -1, dim)) * dim**-0.5).repeat_interleave(repeats, 2)
    k = l2(k.reshape(b, t, -1, dim)).repeat_interleave(repeats, 2)
    beta = torch.sigmoid(F.linear(h, w["linear_attn.in_proj_b.weight"]).float())
    step = F.softplus(
        F.linear(h, w["linear_attn.in_proj_a.weight"]).float() + w["linear_attn.dt_bias"]
    )
    g = -torch.exp(w["linear_attn.A_log"]) * step - FORGET * (position == 0)[..., None]

    def chunked(y: Tensor) -> Tensor:  # [B, T, H, ..] to [G, N, C, ..]
        y = y.reshape(b, n, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)
        return y.reshape(b * heads, n, CHUNK, -1)

    q, k, v, beta, g = (chunked(y) for y in (q, k, v, beta, g))
    g = g.squeeze(-1).cumsum(-1)
    at = torch.arange(CHUNK, device=x.device)
    decay = torch.exp(
        torch.where(at[:, None] >= at, g[..., :, None] - g[..., None, :], -float("inf"))
    )
    dtype = x.dtype
    narrow = k.to(dtype)
    overlap = (k * beta).to(dtype) @ narrow.mT
    inverse = UnitInverse.apply(torch.where(at[:, None] > at, overlap.float() * decay, 0.0))
    inverse = inverse.to(dtype)
    u = inverse @ (v * beta).to(dtype)
    r = inverse @ (k * (beta * torch.exp(g)[..., None])).to(dtype)
    within = ((q.to(dtype) @ narrow.mT).float() * decay).to(dtype)
    late = (k * torch.exp(g[..., -1:] - g)[..., None]).to(dtype).mT
    m, a = ((late @ y).float().transpose(0, 1).contiguous() for y in (r, u))
    d = torch.exp(g[..., -1]).T.contiguous()[..., None, None]
    early = (q * torch.exp(g)[..., None]).to(dtype)
    z = F.linear(h, w["linear_attn.in_proj_z.weight"])
    return m, a, d, u, r, within, early, z


def delta_end(
    x: Tensor,
    w: Weights,
    states: Tensor,
    u: Tensor,
    r: Tensor,
    within: Tensor,
    early: Tensor,
    z: Tensor,
) -> Tensor:
    b, t, _ = x.shape
    s = states.transpose(0, 1).contiguous().to(x.dtype)
    out = early @ s + within @ (u - r @ s)  # [G, N, C, D]
    out = out.view(b, lay.VALUE_HEADS, t, lay.DELTA_DIM).transpose(1, 2)
    normed = rms(out, w["linear_attn.norm.weight"]).float()
    gated = (normed.reshape(b, t, -1) * F.silu(z.float())).to(x.dtype)
    return x + F.linear(gated, w["linear_attn.out_proj.weight"])


def attention_start(
    x: Tensor, w: Weights, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, t, _ = x.shape
    h = rms(x, w["input_layernorm.weight"])
    both = F.linear(h, w["self_attn.q_proj.weight"]).view(b, t, lay.HEADS, 2 * lay.HEAD_DIM)
    q, gate = both.chunk(2, -1)  # per head: query, then gate
    k = F.linear(h, w["self_attn.k_proj.weight"]).view(b, t, lay.KV_HEADS, lay.HEAD_DIM)
    v = F.linear(h, w["self_attn.v_proj.weight"]).view(b, t, lay.KV_HEADS, lay.HEAD_DIM)
    q = rotated(rms(q, w["self_attn.q_norm.weight"]), cos, sin)
    k = rotated(rms(k, w["self_attn.k_norm.weight"]), cos, sin)
    repeats = lay.HEADS // lay.KV_HEADS
    k, v = (y.repeat_interleave(repeats, 2).contiguous() for y in (k, v))
    return q.contiguous(), k, v, gate.reshape(b, t, -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = lay.ROTARY // 2
    wide = x[..., : lay.ROTARY].float()
    one, two = wide[..., :half], wide[..., half:]
    turned = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
    return torch.cat((turned.to(x.dtype), x[..., lay.ROTARY :]), -1)


def attention_end(x: Tensor, w: Weights, mixed: Tensor, gate: Tensor) -> Tensor:
    gated = mixed.reshape(gate.shape) * torch.sigmoid(gate.float()).to(x.dtype)
    return x + F.linear(gated, w["self_attn.o_proj.weight"])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, position: Tensor, _: Tensor) -> Tensor:
    """[B, T, heads, 256] each; a token sees those of its document up to itself."""
    t = q.shape[1]
    at = torch.arange(t, device=q.device)
    first = at - position  # [B, T]
    seen = (at <= at[:, None]) & (at >= first[..., None])
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, _: Tensor, bounds: Tensor) -> Tensor:
    """The same on a GPU in bf16; bounds [documents + 1] of all rows together."""
    b, t, heads, dim = q.shape
    flat = [y.reshape(b * t, heads, dim) for y in (q, k, v)]
    out = torch.ops.aten._flash_attention_forward(
        *flat, bounds, bounds, t, t, 0.0, True, False, scale=dim**-0.5
    )[0]
    return out.view(b, t, heads, dim)


def experts(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """The layer's second half, and the load-balancing loss (1 when even).

    Every expert sees every token; those not chosen are multiplied by zero: with 16 narrow ones
    that is one wide feed-forward and quicker than moving tokens.
    """
    h = rms(x, w["post_attention_layernorm.weight"])
    probs = torch.softmax(F.linear(h.float(), w["mlp.gate.weight"]), -1)
    best, chosen = probs.topk(lay.TOP_K, -1)
    shares = torch.zeros_like(probs).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
    gate = F.linear(h, w["mlp.switch_mlp.gate_proj.weight"].flatten(0, 1))
    up = F.linear(h, w["mlp.switch_mlp.up_proj.weight"].flatten(0, 1))
    inner = (F.silu(gate.float()) * up.float()).unflatten(-1, (lay.EXPERTS, lay.WIDTH))
    inner = (inner * shares[..., None]).flatten(-2).to(x.dtype)
    down = w["mlp.switch_mlp.down_proj.weight"].permute(1, 0, 2).reshape(lay.HIDDEN, -1)
    y = F.linear(inner, down)
    gate = F.linear(h, w["mlp.shared_expert.gate_proj.weight"])
    up = F.linear(h, w["mlp.shared_expert.up_proj.weight"])
    inner = (F.silu(gate.float()) * up.float()).to(x.dtype)
    shared = F.linear(inner, w["mlp.shared_expert.down_proj.weight"])
    weight = torch.sigmoid(F.linear(h.float(), w["mlp.shared_expert_gate.weight"]))
    load = (shares > 0).float().mean((0, 1))
    balance = lay.EXPERTS / lay.TOP_K * (load * probs.mean((0, 1))).sum()
    return x + y + (weight * shared.float()).to(x.dtype), balance


def head(
    x: Tensor, gain: Tensor, table: Tensor, target: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(weighted mean of the losses, whether each target is the likeliest token)."""
    logits = F.linear(rms(x, gain), table).float()
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    loss = (losses * weight.flatten()).sum() / weight.sum().clamp_min(1e-6)
    return loss, logits.argmax(-1) == target


def join(embedded: Tensor, hidden: Tensor, w: Weights) -> Tensor:
    """The next token's embedding and this one's hidden state, for the layer that looks ahead."""
    both = (
        rms(embedded, w["pre_fc_norm_embedding.weight"]),
        rms(hidden, w["pre_fc_norm_hidden.weight"]),
    )
    return F.linear(torch.cat(both, -1), w["fc.weight"])


# ---- the whole --------------------------------------------------------------------------------


def angles(position: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, 32]."""
    power = torch.arange(0, lay.ROTARY, 2, device=position.device, dtype=torch.float64)
    turn = (1.0 / lay.THETA ** (power / lay.ROTARY)).float()
    angle = position[..., None, None].float() * turn
    return torch.cos(angle), torch.sin(angle)


class Model:
    """The forward pass from parts that may be compiled one by one."""

    def __init__(self, attention: Callable[..., Tensor] = masked_attention) -> None:
        self.attention = attention
        self.delta_chunks: Callable[..., Any] = delta_chunks
        self.delta_end: Callable[..., Any] = delta_end
        self.attention_start: Callable[..., Any] = attention_start
        self.attention_end: Callable[..., Any] = attention_end
        self.experts: Callable[..., Any] = experts
        self.head: Callable[..., Any] = head
        self.join: Callable[..., Any] = join

    def compile(self) -> None:
        parts = ("delta_chunks", "delta_end", "attention_start", "attention_end")
        for part in (*parts, "experts", "head", "join"):
            setattr(self, part, torch.compile(getattr(self, part), dynamic=False))

    def layer(
        self, x: Tensor, w: Weights, full: bool, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        position, bounds, cos, sin = context
        if full:
            q, k, v, gate = self.attention_start(x, w, cos, sin)
            x = self.attention_end(x, w, self.attention(q, k, v, position, bounds), gate)
        else:
            m, a, d, *rest = self.delta_chunks(x, w, position)
            x = self.delta_end(x, w, Scan.apply(m, a, d), *rest)
        out: tuple[Tensor, Tensor] = self.experts(x, w)
        return out

    def hidden(
        self, weights: Weights, ids: Tensor, position: Tensor, bounds: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The stream before the final norm, the mean balance loss, what each layer was given."""
        context = (position, bounds, *angles(position))
        x = F.embedding(ids, weights["model.embed_tokens.weight"])
        balance = torch.zeros((), device=x.device)
        for layer in range(lay.LAYERS):
            w = of_layer(weights, f"model.layers.{layer}.")
            x, part = self.layer(x, w, lay.is_full(layer), context)
            balance = balance + part / (lay.LAYERS + 1)
        return x, balance, context

    def logits(self, weights: Weights, x: Tensor, norm: str = "model.norm.weight") -> Tensor:
        return F.linear(rms(x, weights[norm]), weights["lm_head.weight"]).float()

    def ahead(
        self, weights: Weights, ids: Tensor, x: Tensor, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The stream of the layer that predicts the token after the next, and its balance loss."""
        following = F.embedding(ids.roll(-1, 1), weights["model.embed_tokens.weight"])
        x = self.join(following, x, of_layer(weights, "mtp."))
        return self.layer(x, of_layer(weights, "mtp.layers.0."), True, context)

    def losses(
        self, weights: Weights, ids: Tensor, position: Tensor, bounds: Tensor, weight: Tensor
    ) -> dict[str, Tensor]:
        """Losses and hits; `weight` [B, T] is that of each token as a target, in its own place."""
        x, balance, context = self.hidden(weights, ids, position, bounds)
        table = weights["lm_head.weight"]
        # The last token of a document has no next one, the last two none after it.
        first = weight.roll(-1, 1) * (position.roll(-1, 1) > 0)
        first[:, -1] = 0
        loss, hit = self.head(x, weights["model.norm.weight"], table, ids.roll(-1, 1), first)
        second = weight.roll(-2, 1) * (position.roll(-2, 1) > 1)
        second[:, -2:] = 0
        y, part = self.ahead(weights, ids, x, context)
        mtp, mtp_hit = self.head(y, weights["mtp.norm.weight"], table, ids.roll(-2, 1), second)
        return {
            "loss": loss,
            "mtp": mtp,
            "balance": balance + part / (lay.LAYERS + 1),
            "hit": hit,
            "mtp_hit": mtp_hit,
            "first": first,
            "second": second,
        }
