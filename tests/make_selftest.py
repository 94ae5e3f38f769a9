"""Writes what `lily selftest` compares with: python tests/make_selftest.py [FILE].

The calls come from the tests of the ops and the results from reference.py, both in float64. Inputs
are coarse numbers, and of large outputs a part is kept: the file is in every wheel.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kernel_harness as h
import reference as ref
import test_attention as attention
import test_delta as delta
import test_linear as linear
import test_moe as moe
import test_sample as sample
from kernel_harness import In, InOut, Kernels, Out
from lily import selftest_model
from lily.selftest import REFERENCES

KEPT = 144  # values of one output
EPS = 1e-6
NAMES = {"float32": "f32", "uint32": "u32", "uint64": "u64", "uint16": "bf16"}


def coarse(x: np.ndarray, step: float = 1 / 16) -> np.ndarray:
    """Numbers that compress, and that bf16 holds exactly while they are below 16."""
    return np.round(x / step) * step


class Recorder(Kernels):
    """Runs calls on cpu and keeps the last one as it went in."""

    def __init__(self, exact: bool) -> None:
        super().__init__("cpu", exact)
        self.mode = "exact" if exact else "bf16"

    def run(
        self,
        op: str,
        params_: ctypes.Structure,
        args: Sequence[h.Argument],
        step: ctypes.Structure | np.ndarray | None = None,
        unbound: Sequence[Any] = (),
        times: int = 1,
    ) -> list[np.ndarray]:
        self.op, self.params, self.args, self.step = op, bytes(params_), list(args), None
        self.slab, self.pages = None, 0
        if step is not None:
            raw = np.frombuffer(bytes(step), np.uint8)
            self.step = np.zeros((raw.size + 15) // 16 * 16, np.uint8)
            self.step[: raw.size] = raw
        if unbound:
            (buffer,) = unbound
            self.slab = np.empty(buffer.nbytes, np.uint8)
            buffer.read(0, self.slab)
            # Addresses become places in the slab, from 1 on.
            self.pages = h.STRUCTS["Step"].from_buffer_copy(self.step.tobytes()).pages_offset
            table = self.step[self.pages :].view(np.uint64)
            table[table > 0] -= np.uint64(buffer.address - 1)
        return super().run(op, params_, args, step, unbound, times)


class File:
    """The cases so far; equal arrays are stored once."""

    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []
        self.timed: list[dict[str, Any]] = []
        self.model: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def put(self, array: np.ndarray) -> str:
        array = np.ascontiguousarray(array).reshape(-1)
        digest = hashlib.sha256(array.tobytes() + array.dtype.name.encode())
        name = digest.hexdigest()[:10]
        self.arrays[name] = array
        return name

    def add(self, name: str, k: Recorder, *expect: dict[str, Any], mode: str = "") -> None:
        """The recorder's last call with what it should give."""
        args: list[dict[str, Any]] = []
        for a in k.args:
            if a is None or (isinstance(a, In | InOut) and a.array.size == 0):
                args.append({"none": True})
            elif isinstance(a, Out):
                kind = NAMES[np.dtype(a.dtype).name]
                args.append({"type": kind, "count": int(np.prod(a.shape))})
            else:
                entry = {"type": NAMES[a.array.dtype.name], "array": self.put(a.array)}
                args.append(entry | ({"written": True} if isinstance(a, InOut) else {}))
        case: dict[str, Any] = {
            "name": name,
            "mode": mode or k.mode,
            "op": k.op,
            "params": k.params.hex(),
            "args": args,
        }
        if k.step is not None:
            case["step"] = self.put(k.step)
        if k.slab is not None:
            case |= {"slab": self.put(k.slab), "pages": k.pages}
        case["expect"] = [
            {key: self.put(v) if isinstance(v, np.ndarray) else v for key, v in e.items()}
            for e in expect
        ]
        self.cases.append(case)

    def bytes(self) -> bytes:
        """See lily.selftest.References.load."""
        places, data = {}, b""
        for name, array in self.arrays.items():
            places[name] = [array.dtype.name, len(data), array.nbytes]
            data += array.tobytes() + bytes(-array.nbytes % 16)
        about = {"cases": self.cases, "model": self.model, "timed": self.timed, "arrays": places}
        raw = json.dumps(about, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 16)
        return zlib.compress(len(raw).to_bytes(16, "little") + raw + data, 9)


def expect(
    output: int | str,
    want: np.ndarray,
    kind: str,
    rel: float = 4e-5,
    at: np.ndarray | None = None,
    own: float | None = None,
) -> dict[str, Any]:
    """`want` is the output, or its places `at`. Allowed: rel of the root mean square, and of each
    value's own size `own`, which is one rounding where the output is bf16."""
    flat = want.reshape(-1)
    places = np.arange(flat.size) if at is None else at.reshape(-1)
    stride = max(1, -(-flat.size // KEPT)) | 1  # odd: it meets every column of even widths
    part: dict[str, Any] = {"output": output, "type": kind}
    if at is None:
        part["stride"] = stride
    else:
        part["at"] = places[::stride].astype(np.uint32)
    if kind == "u32":
        return part | {"values": flat[::stride].astype(np.uint32)}
    sizes = {"rel": rel, "own": own if own is not None else 2.0**-8 if kind == "bf16" else 0.0}
    return part | sizes | {"values": flat[::stride].astype(np.float32)}


def squares(output: int, k: Recorder, want: np.ndarray) -> dict[str, Any]:
    """Sums of squares of the stored values: in bf16 some of those are the next number."""
    parts = k.rounded(want).reshape(len(want), -1, h.CONST["LILY_OUT_ROWS"])
    return expect(output, (parts**2).sum(2), "f32", own=2e-5 if k.exact else 6e-3)


# ---- the ops -------------------------------------------------------------------------------------
def linears(f: File, k: Recorder, act: str) -> None:
    for bits in (4, 8, 16):
        tag = "b16" if bits == 16 else f"q{bits}"
        rng = np.random.default_rng(bits)
        w = h.weight(rng, 12, 128, bits, 32, f16=bits == 8)
        ids = np.array([11, 3, 0], np.uint32)
        k.run(
            "embed",
            h.params("embed", w=w.linear, rows=3),
            [In(w.codes), In(w.pairs), In(ids), k.out_act(3, 128), Out((3,), np.float32)],
        )
        want = ref.embed(ids, w.values[0])
        ssq = (k.rounded(want) ** 2).sum(1)
        sums = expect(4, ssq, "f32", own=2e-5 if k.exact else 6e-3)
        f.add(f"embed_{tag}", k, expect(3, want, act), sums)

        w = h.weight(rng, 11, 192, bits, 64)
        gain = rng.uniform(0.5, 1.5, 192).astype(np.float32)
        for rows in (1, 3):
            x = coarse(rng.standard_normal((rows, 192)) * 2)
            linear.run_project(k, w, k.act(x), gain, parts=3, f32=rows == 1)
            want = ref.project(x, w.values[0], gain.astype(np.float64), EPS)
            name = f"project_{tag}_r{1 if rows == 1 else 4}"
            f.add(name, k, expect(5, want, "f32" if rows == 1 else act))

        w = h.weight(rng, 34, 128, bits, 32)
        rows, mode = 17, {4: 3, 8: 0, 16: 1}[bits]
        x = coarse(rng.standard_normal((rows, 128)) * 2)
        columns = 17 if mode == 3 else 34
        kind = "f32" if mode == 1 else act
        p = h.params("matmul", w=w.linear, rows=rows, y_stride=columns, y_offset=0, mode=mode)
        out = Out((rows, columns), np.float32 if mode == 1 else k.act_dtype)
        k.run("matmul", p, [In(w.codes), In(w.pairs), In(k.act(x)), out])
        want = ref.linear(x, w.values[0])
        f.add(f"matmul_{tag}", k, expect(3, linear.swiglu_rows(want) if mode == 3 else want, kind))
        if bits == 4:
            old = coarse(rng.standard_normal((rows, 34)))
            p = h.params("matmul", w=w.linear, rows=rows, y_stride=34, y_offset=0, mode=2)
            k.run("matmul", p, [In(w.codes), In(w.pairs), In(k.act(x)), InOut(k.act(old))])
            f.add("matmul_q4 adding", k, expect(3, old + want, act))

        w, own = h.weight(rng, 14, 64, bits, 64, experts=4), h.weight(rng, 14, 64, bits, 64)
        chosen = linear.choose(rng, 9, 4, 2)
        x = coarse(rng.standard_normal((9, 64)) * 2)
        linear.run_experts(k, w, own, k.act(x), chosen, 64, True)
        want = ref.expert_up(x, w.values[:, 0::2], w.values[:, 1::2], chosen)
        shared = linear.swiglu_rows(ref.linear(x, own.values[0]))
        want = np.concatenate([want.reshape(18, -1), shared])
        f.add(f"expert_matmul_{tag}", k, expect(8, want, act))

        residuals(f, k, act, bits, tag)
        experts(f, k, act, bits, tag)
    rng = np.random.default_rng(5)
    x, gain = coarse(rng.standard_normal((3, 192))), rng.uniform(-1.5, 1.5, 192).astype(np.float32)
    k.run(
        "rms_norm",
        h.params("rms_norm", rows=3, k=192, eps=EPS),
        [In(k.act(x)), In(gain), k.out_act(3, 192)],
    )
    f.add("rms_norm", k, expect(2, ref.rms_norm(x, gain.astype(np.float64), EPS), act))


def residuals(f: File, k: Recorder, act: str, bits: int, tag: str) -> None:
    """delta_out and attn_out: x += W ..."""
    rng = np.random.default_rng(bits + 100)
    w = h.weight(rng, 8, 2 * delta.D, bits, 64)
    u, x = coarse(rng.standard_normal((2, 2 * delta.D))), coarse(rng.standard_normal((2, 8)) * 2)
    sums = coarse(rng.uniform(1, 60, (2, 2, 4))).astype(np.float32)
    delta.run_out(k, w, k.act(u), sums, k.act(x))
    heads = u.reshape(2, 2, delta.D)
    want = x + ref.delta_out(heads, sums.astype(np.float64).sum(2), w.values[0], EPS)
    f.add(f"delta_out_{tag}", k, expect(4, want, act), squares(5, k, want))

    w = h.weight(rng, 8, attention.D, bits, 64)
    positions = [2 * attention.SPLIT - 1, 7]
    partial = attention.random_partials(rng, positions, 1, 3)
    used = np.isfinite(partial)
    partial[used] = coarse(partial[used], 1 / 4)
    partial[..., 1] = np.where(used[..., 1], np.maximum(partial[..., 1], 1), np.nan)
    proj = coarse(rng.standard_normal((2, 2 * attention.D)) * 2)
    attention.run_out(k, w, partial, k.act(proj), k.act(x), positions)
    rows = []
    for r, t in enumerate(positions):
        parts = (
            partial[r : r + 1, :, : t // attention.SPLIT + 1]
            .astype(np.float64)
            .transpose(2, 0, 1, 3)
        )
        o = ref.attention_combine((parts[..., 0], parts[..., 1], parts[..., 2:]))
        _, gate = ref.split_q_gate(proj[r : r + 1], attention.D)
        rows.append(ref.linear(ref.attn_gate(o, gate).reshape(1, -1), w.values[0]))
    want = x + np.concatenate(rows)
    f.add(f"attn_out_{tag}", k, expect(4, want, act), squares(5, k, want))
    if bits == 4:
        attention.combine(k, partial, positions)
        parts = partial.astype(np.float64)
        parts[~used] = 0
        m = np.where(used[..., 0], parts[..., 0], -np.inf).max(2)
        weights = np.where(used[..., 0], np.exp(parts[..., 0] - m[..., None]), 0)
        total = np.concatenate(
            [
                m[..., None],
                (weights * parts[..., 1]).sum(2)[..., None],
                (weights[..., None] * parts[..., 2:]).sum(2),
            ],
            -1,
        )
        f.add("attn_combine", k, expect(1, total, "f32", own=1e-5))


def experts(f: File, k: Recorder, act: str, bits: int, tag: str) -> None:
    m = moe.Moe(
        2,
        hidden=64,
        width=64,
        shared_width=64,
        experts=3,
        bits=bits,
        seed=bits,
        odd=52,
    )
    m.x = coarse(m.x)
    x = k.rounded(m.x)
    moe.run_up(k, m)
    _, weights = m.route()
    outs = [expect(9, m.packed_route()[..., 0], "u32", at=2 * np.arange(2 * m.slots))]
    outs.append(expect(9, weights, "f32", at=2 * np.arange(2 * m.slots) + 1))
    stride, per_row = m.h_stride, m.slots * m.h_stride
    for s, want in enumerate(m.h(x)):
        at = np.arange(2)[:, None] * per_row + s * stride + np.arange(want.shape[1])
        outs.append(expect(8, want, act, at=at))
    f.add(f"expert_up_{tag}", k, *outs)
    hidden, route = coarse(m.random_h()), m.packed_route()
    moe.run_down(k, m, hidden, route, x)
    want = x + m.mixed(hidden, route, range(m.slots))
    f.add(f"expert_down_{tag}", k, expect(6, want, act), squares(7, k, want))


def deltas(f: File, k: Recorder, act: str) -> None:
    rng = np.random.default_rng(7)
    layer = delta.make_layer(rng, 1, 2)
    layer.conv_w[:] = coarse(layer.conv_w)
    rows = 3
    proj = coarse(rng.standard_normal((rows, layer.stride)))
    conv = coarse(rng.standard_normal((1, 3, layer.channels)))
    state = coarse(rng.standard_normal((1, 2, delta.D, delta.D)) * 0.5, 1 / 2).astype(np.float32)
    stored, before = k.act(proj), k.act(conv)
    delta.run_step(k, layer, stored, before, state)
    carried, after, u, _ = delta.step_reference(layer, stored, before[0], state[0])
    f.add(
        "delta_step",
        k,
        expect(7, carried, act, 0.0, own=0.0),
        expect(8, after, "f32"),
        expect(9, u, act),
    )
    delta.run_prep(k, layer, stored, before[0])
    want = delta.prep_reference(layer, stored, before[0])
    outs = [expect(5, want.conv_out, act, 0.0, own=0.0)]
    for i, part in enumerate((want.q, want.k, want.v, want.g, want.beta)):
        outs.append(expect(6 + i, part, "f32", own=4e-6))
    f.add("delta_prep", k, *outs)

    o = coarse(rng.standard_normal((2, 2, delta.D))).astype(np.float32)
    gain = coarse(rng.uniform(-0.5, 1.5, delta.D)).astype(np.float32)
    z = coarse(rng.standard_normal((2, 2 * delta.D)) * 3)
    p = h.params("gated_norm", rows=2, heads=2, proj_stride=2 * delta.D, z_offset=0, eps=EPS)
    k.run("gated_norm", p, [In(o), In(k.act(z)), In(gain), k.out_act(2, 2 * delta.D)])
    want = ref.gated_norm(o.astype(np.float64), z.reshape(o.shape), gain.astype(np.float64), EPS)
    f.add("gated_norm", k, expect(3, want, act))
    if not k.exact:
        return  # fp32 in both modes from here on
    x = delta.make_prepared(rng, 1, 1, 66)
    for name in ("q", "k", "v"):
        values = getattr(x, name)
        step = 2.0 ** np.floor(np.log2(np.abs(values).max() / 32))
        setattr(x, name, coarse(values, step).astype(np.float32))
    wy = delta.wy_reference(x)
    delta.run_wy(k, x)
    parts = (5, wy[0]), (6, wy[1]), (7, wy[2])
    f.add("delta_wy", k, *(expect(i, part, "f32") for i, part in parts), mode="both")
    state = coarse(rng.standard_normal((1, delta.D, delta.D)) * 0.5, 1 / 2).astype(np.float32)
    given = tuple(
        coarse(a, 2.0 ** np.floor(np.log2(np.abs(a).max() / 16))).astype(np.float32) for a in wy
    )
    delta.run_scan(k, x, given, state)
    # The scan alone, with w, u and scores as given: chunk by chunk.
    after, o = scan(x, given, state)
    f.add("delta_scan", k, expect(7, after, "f32"), expect(8, o, "f32"), mode="both")


def scan(
    x: delta.Prepared, wy: tuple[np.ndarray, ...], state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The chunks of one head in float64: o = q S exp(G) + scores v', v' = u - w S."""
    q, key, g = (a[:, 0].astype(np.float64) for a in (x.q, x.k, x.g))
    w, u, scores = (a[:, 0].astype(np.float64) for a in wy)
    s, o = state[0].astype(np.float64).T, np.empty((len(q), delta.D))  # s: [k, v]
    for start in range(0, len(q), delta.CHUNK):
        c = slice(start, start + delta.CHUNK)
        G = np.cumsum(g[c])
        new = u[c] - w[c] @ s
        o[c] = np.exp(G)[:, None] * (q[c] @ s) + scores[c, : len(G)] @ new
        s = np.exp(G[-1]) * s + (np.exp(G[-1] - G)[:, None] * key[c]).T @ new
    return s.T[None], o[:, None]


def attentions(f: File, k: Recorder, act: str) -> None:
    shape = attention.Shape(heads=2, kv_heads=1, rotary=64)
    rng = np.random.default_rng(8)

    def fresh(rows: int, before: int, filled: int) -> tuple[Any, Any]:
        """Rows after `before` tokens, of which `filled` are in the cache: 8 that come again and
        again, which compresses."""
        x = attention.Inputs(k, rng, shape, rows)
        x.proj[:, :-8] = k.act(coarse(rng.standard_normal((rows, shape.stride - 8)), 1 / 4))
        cache = attention.Cache(k, rng, shape, [0], [before + rows])
        few = coarse(rng.standard_normal((2, 1, 8, attention.D)), 1 / 4)
        many = np.concatenate([few] * -(-attention.BLOCK // 8), 2)[:, :, :filled]
        cache.raw[cache.place[0][0], 0, :, :, :filled] = k.act(many)
        cache.buffer.write(0, cache.raw.view(np.uint8).reshape(-1))
        return x, cache

    def places(cache: Any, first: int, rows: int) -> np.ndarray:
        """Of the rows' keys, then of their values, in the slab."""
        at = np.arange(cache.raw.size).reshape(cache.raw.shape)
        both = [
            at[cache.place[0][t // attention.BLOCK], 0, :, 0, t % attention.BLOCK]
            for t in range(first, first + rows)
        ]
        return np.stack(both, 1)  # [2, rows, D]

    def slab(x: Any, cache: Any, first: int, rows: int) -> list[dict[str, Any]]:
        at = places(cache, first, rows)
        positions = range(first, first + rows)
        keys = expect("slab", x.k(positions)[:, 0], act, at=at[0])
        values = expect("slab", x.v()[:, 0], act, 0.0, at=at[1], own=0.0)
        return [keys, values]

    before, rows = 255, 2  # the first row ends a block, the second begins the next
    x, cache = fresh(rows, before, before)
    where = [(0, before + r) for r in range(rows)]
    splits = (before + rows - 1) // attention.SPLIT + 1
    attention.run_step(k, x, cache, where, splits)
    times = np.arange(before, before + rows)
    held = h.from_act(cache.raw[cache.place[0][0], 0, :, 0, :before]).astype(np.float64)
    K, V = (
        np.concatenate([old, k.rounded(new[:, 0])])[:, None]
        for old, new in zip(held, (x.k(times), x.v()), strict=True)
    )
    m, total, acc = ref.attention_split(x.q(times), K, V, times, attention.SCALE, attention.SPLIT)
    want = np.concatenate([m[..., None], total[..., None], acc], -1).transpose(1, 2, 0, 3)
    at = np.arange(want.size).reshape(want.shape)
    count = (times // attention.SPLIT + 1)[:, None, None]
    real = np.broadcast_to(count > np.arange(splits), want.shape[:3])
    # In bf16 a key may be stored as the next number, and the scores follow it.
    split = expect(
        4,
        want[real],
        "f32",
        rel=1e-4 if k.exact else 2e-3,
        own=1e-4 if k.exact else 2e-3,
        at=at[real],
    )
    f.add("attn_step", k, split, *slab(x, cache, before, rows))

    x, cache = fresh(rows, before, 0)
    attention.run_rope(k, x, cache, 0, before)
    want = x.q(range(before, before + rows))
    f.add("qkv_rope", k, expect(4, want, act), *slab(x, cache, before, rows))

    x, cache = fresh(3, 37, 37)
    q = coarse(rng.standard_normal((3, 2, attention.D)), 1 / 8)
    both = np.concatenate([coarse(rng.standard_normal((2, 1, 16, attention.D)), 1 / 4)] * 3, 2)
    both = both[:, :, :40]
    cache.raw[cache.place[0][0], 0, :, :, :40] = k.act(both)
    cache.buffer.write(0, cache.raw.view(np.uint8).reshape(-1))
    attention.run_flash(k, x, k.act(q), cache, 0, 37)
    K, V = both[0].transpose(1, 0, 2), both[1].transpose(1, 0, 2)
    o = ref.attention(q, K, V, np.arange(37, 40), attention.SCALE)
    want = ref.attn_gate(o, x.gate()).reshape(3, -1)
    f.add("flash", k, expect(2, want, act, 5e-5 if k.exact else 2e-2))


def routing(f: File, k: Recorder, act: str) -> None:
    rng = np.random.default_rng(9)
    down, own, x = (coarse(rng.standard_normal(s)) for s in ((6, 64), (3, 64), (3, 64)))
    route = np.full((3, 3, 2), 5, np.uint32)
    weights = coarse(rng.uniform(0.1, 1, (3, 3))).astype(np.float32)
    route[..., 1] = weights.view(np.uint32)
    p = h.params("moe_combine", rows=3, hidden=64, top_k=2, eps=EPS)
    gain = coarse(rng.uniform(0.5, 1.5, 64)).astype(np.float32)
    outs = k.act(np.concatenate([down, own]))
    k.run(
        "moe_combine",
        p,
        [In(outs), In(route), In(gain), InOut(k.act(x)), k.out_act(3, 64)],
    )
    w = weights.astype(np.float64)
    want = x + (w[:, :2, None] * down.reshape(3, 2, 64)).sum(1) + w[:, 2:] * own
    normed = ref.rms_norm(k.rounded(want), gain.astype(np.float64), EPS)  # of x as stored
    f.add("moe_combine", k, expect(3, want, act), expect(4, normed, act))
    if not k.exact:
        return  # the rest knows no activations
    logits = np.round(rng.standard_normal((5, 33 + 1)) * 3, 1).astype(np.float32)
    moe.run_route(k, logits, 33, 4)
    idx, w = ref.router(logits[:, :33].astype(np.float64), 4)
    gate = ref.sigmoid(logits[:, 33:].astype(np.float64))
    ids = np.concatenate([idx, np.full((5, 1), 33)], 1)
    places = 2 * np.arange(25)
    chosen = expect(1, ids, "u32", at=places)
    shares = expect(1, np.concatenate([w, gate], 1), "f32", at=places + 1)
    f.add("route_rows", k, chosen, shares, mode="both")

    route = np.zeros((40, 3, 2), np.uint32)
    route[:, :2, 0] = np.array([0, 2, 3, 6])[np.argsort(rng.random((40, 4)), axis=1)[:, :2]]
    p = h.params("group_rows", rows=40, experts=7, top_k=2, tile=16)
    outs = [Out((n,), np.uint32) for n in (120, 9, 1 + 2 * (120 // 16 + 8))]
    k.run("group_rows", p, [In(route), *outs])
    groups = moe.grouping(route[:, :2, 0], 7, 16)
    f.add("group_rows", k, *(expect(1 + i, g, "u32") for i, g in enumerate(groups)), mode="both")


def sampling(f: File, k: Recorder) -> None:
    """fp32 in both modes; expected are also the words of the ring."""
    rng = np.random.default_rng(10)
    logits = np.round(sample.model_logits(rng, 2, 1100), 2)
    targets = np.array([17, logits[1].argmax()], np.uint32)
    outs = [Out((2,), np.float32), Out((2,), np.uint32)]
    k.run("score", h.params("score", rows=2, vocab=1100), [In(logits), In(targets), *outs])
    want, best = ref.score(logits.astype(np.float64), targets)
    f.add("score", k, expect(2, want, "f32"), expect(3, best, "u32"), mode="both")

    settings = {"temperature": 0.75, "presence": 0.5, "frequency": 0.25, "repetition": 1.25}
    extra = sample.full_slot(rng, 1100, logits[0])
    cuts = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
    slots = [sample.Slot(seed=6, settings=settings | cuts, **extra), sample.Slot(seed=2**40)]
    step, positions = sample.make_step(1100, slots, [1, 0], [17, 40], 2), [17, 40]
    plain = [sample.Slot(settings=settings, **extra), slots[1]]
    adjusted = np.stack([plain[s].candidates(logits[r], 1090) for r, s in ((0, 1), (1, 0))])
    sizes = {"rows": 2, "vocab": 1100, "token_limit": 1090}
    outs = [Out(logits.shape, np.float32), Out((2, 2, 8), np.float32)]
    seen, stats, _ = k.run(
        "sample_scan", h.params("sample_scan", **sizes), [In(logits), *outs], step
    )
    f.add("sample_scan", k, expect(1, adjusted, "f32", own=1e-6), mode="both")

    p = h.params("sample_draw", ring=3, **sizes)
    struct = h.STRUCTS["Sampled"]
    words = ctypes.sizeof(struct) // 4
    k.run("sample_draw", p, [In(logits), In(seen), In(stats), Out((2, 3, words), np.uint32)], step)
    log = ref.score(logits.astype(np.float64), np.zeros(2, np.uint32))
    drawn = [
        ref.draw(slots[s].candidates(logits[r], 1090), slots[s].seed, positions[r] + 1)
        for r, s in ((0, 1), (1, 0))
    ]
    log, _ = ref.score(logits.astype(np.float64), np.array(drawn, np.uint32))
    entry = np.array([(r * 3 + (t + 1) % 3) * words for r, t in enumerate(positions)])

    def at(field: str) -> np.ndarray:
        return entry + getattr(struct, field).offset // 4

    f.add(
        "sample_draw",
        k,
        expect(3, np.array(drawn), "u32", at=at("token")),
        expect(3, np.ones(2), "u32", at=at("status")),
        expect(3, np.array(positions) + 1, "u32", at=at("position")),
        expect(3, log, "f32", at=at("logprob")),
        mode="both",
    )
    data = rng.integers(0, 2**32, 1100, dtype=np.uint32)
    k.run("copy_bytes", h.params("copy_bytes", bytes=4400), [In(data), Out((1100,), np.uint32)])
    f.add("copy_bytes", k, expect(1, data, "u32"), mode="both")


# ---- speeds and the model ------------------------------------------------------------------------
def timed(f: File) -> None:
    """Kernels that read most of a token's bytes, at the 35B's shapes."""
    for name, n in (("project_q4_r1 12352 x 2048", 12352), ("project_q4_r1 248320 x 2048", 248320)):
        w = h.linear(n, 2048)
        p = h.params(
            "project", w=w, rows=1, ssq_parts=1, y_stride=n, y_offset=0, out_f32=0, eps=EPS
        )
        counts = [n * 256, n * 32, 2048, 2048, 1, n]
        kinds = ["u32", "u32", "bf16", "f32", "f32", "bf16"]
        fills = [0x9E3779B9, 0xBC003C00, 0x3F80BF80, 0x3F800000, 0x45000000, 0]
        args = [
            {"type": t, "count": c, "fill": v} for t, c, v in zip(kinds, counts, fills, strict=True)
        ]
        step = h.make_step(1)
        raw = np.zeros((step.size + 15) // 16 * 16, np.uint8)
        raw[: step.size] = step
        f.timed.append(
            {
                "name": name,
                "op": "project",
                "params": bytes(p).hex(),
                "args": args,
                "step": raw.tobytes().hex(),
                "bytes": n * 288 * 4,
            }
        )


def model(f: File) -> None:
    with tempfile.TemporaryDirectory() as folder:
        selftest_model.write(Path(folder))
        reference = ref.Model.load(folder)
    for name, length, count in (("whole", 280, 24), ("quick", 6, 3)):
        logits, state = reference.forward(selftest_model.prompt(length))
        first, tokens = logits[-1], []
        last = first
        for _ in range(count):
            ranked = np.sort(last)[::-1]
            assert ranked[0] - ranked[1] > 5e-3, "too close to call"
            tokens.append(int(last.argmax()))
            out, state = reference.forward([tokens[-1]], state)
            last = out[0]
        f.model[name] = {
            "prompt": length,
            "tokens": tokens,
            "logits": f.put(first.astype(np.float32)),
            "allowed": {"exact": 1e-5 * 5, "bf16": 0.15},
        }


def make() -> bytes:
    f = File()
    for exact in (True, False):
        k, act = Recorder(exact), "f32" if exact else "bf16"
        linears(f, k, act)
        deltas(f, k, act)
        attentions(f, k, act)
        routing(f, k, act)
        if exact:
            sampling(f, k)
    timed(f)
    model(f)
    return f.bytes()


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else REFERENCES).write_bytes(make())
