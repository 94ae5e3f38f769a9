"""Single ops at the shapes of the 35B: µs in a replayed program, GB/s, TFLOP/s, share of ceilings.

    python benchmarks/kernels.py [--device cuda] [--rows 1] [--prefill 4096] [--context 256]
                                 [--only PART] [--times 20] [--out FILE]

Every case is one program of several launches, each with weights (or experts, or state) of its own
that together exceed any cache, all depending on the one before: as in a step of decode. Ceilings:
the copy bandwidth, measured here with copy_bytes over 1 GB (bytes read plus written), and
--bf16-tflops, the card's measured matrix rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lily import _core

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from kernel_harness import CONST, STRUCTS, linear, make_step, params

# Qwen3.6-35B-A3B
HIDDEN, VOCAB, EPS = 2048, 248320, 1e-6
EXPERTS, TOP_K, WIDTH = 256, 8, 512
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 16, 2, 256, 64
DELTA_QKV = (2 * KEY_HEADS + VALUE_HEADS) * DIM
DELTA_STRIDE = DELTA_QKV + VALUE_HEADS * DIM + 2 * VALUE_HEADS
ATTN_STRIDE = HEADS * 2 * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM
K_OFFSET, V_OFFSET = HEADS * 2 * HEAD_DIM, HEADS * 2 * HEAD_DIM + KV_HEADS * HEAD_DIM
OUT_PARTS = HIDDEN // CONST["LILY_OUT_ROWS"]
BLOCK = CONST["LILY_KV_BLOCK"]
TILE = 64  # pairs of a grouped tile, see model.cpp
COLD = 256 << 20  # bytes of the weights that a program goes through


@dataclass
class Arg:
    """A buffer: dtype u32 (codes), pairs, act, f32; own: one a launch, else shared by all."""

    dtype: str
    elements: int
    own: bool = False
    scale: float = 1.0
    values: np.ndarray | None = None


@dataclass
class Case:
    name: str
    op: str
    params: Any
    args: list[Arg]
    bytes: int  # that must move: weights, state, cache, logits
    flops: int = 0
    step: bool = True
    unbound: bool = False
    context: int = 0  # tokens in the cache
    rows: int = 1


def weight_bytes(n: int, k: int, bits: int = 4) -> int:
    return n * k * bits // 8 + n * (k // 64) * 4


def matrix(n: int, k: int, bits: int = 4, experts: int = 1, own: bool = True) -> list[Arg]:
    return [
        Arg("u32", experts * n * k * bits // 32, own),
        Arg("pairs", experts * n * (k // 64), own),
    ]


def decode_cases(rows: int, context: int) -> Iterator[Case]:
    def project(name: str, n: int, bits: int = 4, f32: bool = False) -> Case:
        p = params(
            "project",
            w=linear(n, HIDDEN, bits),
            rows=rows,
            ssq_parts=OUT_PARTS,
            y_stride=n,
            y_offset=0,
            out_f32=int(f32),
            eps=EPS,
        )
        args = [
            *matrix(n, HIDDEN, bits),
            Arg("act", rows * HIDDEN),
            Arg("f32", HIDDEN),
            Arg("f32", rows * OUT_PARTS, scale=0.0),
            Arg("f32" if f32 else "act", rows * n),
        ]
        return Case(name, "project", p, args, weight_bytes(n, HIDDEN, bits), 2 * rows * n * HIDDEN)

    yield project("project delta", DELTA_STRIDE)
    yield project("project attention", ATTN_STRIDE)
    yield project("router", EXPERTS + 1, 8, True)
    yield project("lm_head", VOCAB, 4, True)
    state = VALUE_HEADS * DIM * DIM
    yield Case(
        "delta_step",
        "delta_step",
        params(
            "delta_step",
            rows=rows,
            key_heads=KEY_HEADS,
            value_heads=VALUE_HEADS,
            proj_stride=DELTA_STRIDE,
            z_offset=DELTA_QKV,
            a_offset=DELTA_QKV + VALUE_HEADS * DIM,
            b_offset=DELTA_QKV + VALUE_HEADS * DIM + VALUE_HEADS,
            head_parts=4,
            write_state=1,
            slots=1,
        ),
        [
            Arg("act", rows * DELTA_STRIDE),
            Arg("f32", DELTA_QKV * 4),
            Arg("f32", VALUE_HEADS, scale=-1.0),
            Arg("f32", VALUE_HEADS),
            Arg("f32", DIM),
            Arg("act", 3 * DELTA_QKV, True),
            Arg("f32", state, True, 0.01),
            Arg("act", 3 * DELTA_QKV, True),
            Arg("f32", state, True),
            Arg("act", rows * VALUE_HEADS * DIM),
            Arg("f32", rows * VALUE_HEADS * 4),
        ],
        8 * state,
    )
    yield Case(
        "delta_out",
        "delta_out",
        params(
            "delta_out",
            w=linear(HIDDEN, VALUE_HEADS * DIM),
            rows=rows,
            heads=VALUE_HEADS,
            head_parts=4,
            eps=EPS,
        ),
        [
            *matrix(HIDDEN, VALUE_HEADS * DIM),
            Arg("act", rows * VALUE_HEADS * DIM),
            Arg("f32", rows * VALUE_HEADS * 4, scale=0.0),
            Arg("act", rows * HIDDEN),
            Arg("f32", rows * OUT_PARTS),
        ],
        weight_bytes(HIDDEN, VALUE_HEADS * DIM),
    )
    splits = 1
    while splits * CONST["LILY_SPLIT"] < context + rows:
        splits *= 2
    combined = splits > 4
    yield Case(
        "attn_step",
        "attn_step",
        params(
            "attn_step",
            rows=rows,
            heads=HEADS,
            kv_heads=KV_HEADS,
            rotary=ROTARY,
            proj_stride=ATTN_STRIDE,
            k_offset=K_OFFSET,
            v_offset=V_OFFSET,
            layer=0,
            splits=splits,
            eps=EPS,
            scale=1 / 16,
        ),
        [
            Arg("act", rows * ATTN_STRIDE),
            Arg("f32", HEAD_DIM),
            Arg("f32", HEAD_DIM),
            Arg("f32", ROTARY // 2),
            Arg("f32", rows * HEADS * splits * CONST["LILY_PARTIAL"]),
        ],
        context * 2 * KV_HEADS * HEAD_DIM * 2,
        unbound=True,
        context=context,
    )
    if combined:
        yield Case(
            "attn_combine",
            "attn_combine",
            params("attn_combine", rows=rows, heads=HEADS, splits=splits),
            [
                Arg("f32", rows * HEADS * splits * CONST["LILY_PARTIAL"]),
                Arg("f32", rows * HEADS * CONST["LILY_PARTIAL"]),
            ],
            rows * HEADS * splits * CONST["LILY_PARTIAL"] * 4,
            context=context,
        )
    parts = 1 if combined else splits
    yield Case(
        "attn_out",
        "attn_out",
        params(
            "attn_out",
            w=linear(HIDDEN, HEADS * HEAD_DIM),
            rows=rows,
            heads=HEADS,
            splits=parts,
            combined=int(combined),
            proj_stride=ATTN_STRIDE,
        ),
        [
            *matrix(HIDDEN, HEADS * HEAD_DIM),
            Arg("f32", rows * HEADS * parts * CONST["LILY_PARTIAL"]),
            Arg("act", rows * ATTN_STRIDE),
            Arg("act", rows * HIDDEN),
            Arg("f32", rows * OUT_PARTS),
        ],
        weight_bytes(HIDDEN, HEADS * HEAD_DIM),
        context=context,
    )
    slots = TOP_K + 1
    yield Case(
        "expert_up",
        "expert_up",
        params(
            "expert_up",
            routed=linear(2 * WIDTH, HIDDEN),
            shared=linear(2 * WIDTH, HIDDEN),
            rows=rows,
            experts=EXPERTS,
            top_k=TOP_K,
            slot_begin=0,
            slots=slots,
            ssq_parts=OUT_PARTS,
            logits_stride=EXPERTS + 1,
            h_stride=WIDTH,
            eps=EPS,
        ),
        [
            *matrix(2 * WIDTH, HIDDEN, experts=EXPERTS, own=False),
            *matrix(2 * WIDTH, HIDDEN),
            Arg("act", rows * HIDDEN),
            Arg("f32", HIDDEN),
            Arg("f32", rows * OUT_PARTS, scale=0.0),
            Arg("f32", rows * (EXPERTS + 1), True),
            Arg("act", rows * slots * WIDTH),
            Arg("u32", rows * slots * 2, values=np.zeros(rows * slots * 2, np.uint32)),
        ],
        slots * weight_bytes(2 * WIDTH, HIDDEN),
    )
    rng = np.random.default_rng(3)
    route = np.zeros((rows, slots, 2), np.uint32)
    for r in range(rows):
        route[r, :TOP_K, 0] = rng.permutation(EXPERTS)[:TOP_K]
        route[r, TOP_K, 0] = EXPERTS
        route[r, :, 1] = np.float32(1 / slots).view(np.uint32)
    yield Case(
        "expert_down",
        "expert_down",
        params(
            "expert_down",
            routed=linear(HIDDEN, WIDTH),
            shared=linear(HIDDEN, WIDTH),
            rows=rows,
            experts=EXPERTS,
            top_k=TOP_K,
            slot_begin=0,
            slots=slots,
            h_stride=WIDTH,
        ),
        [
            *matrix(HIDDEN, WIDTH, experts=EXPERTS, own=False),
            *matrix(HIDDEN, WIDTH),
            Arg("act", rows * slots * WIDTH),
            Arg("route", rows * slots * 2, True, values=route.reshape(-1)),
            Arg("act", rows * HIDDEN),
            Arg("f32", rows * OUT_PARTS),
        ],
        slots * weight_bytes(HIDDEN, WIDTH),
    )


def sample_cases(rows: int) -> Iterator[Case]:
    blocks = -(-VOCAB // 1024)
    common = [
        Arg("f32", rows * VOCAB),
        Arg("f32", rows * VOCAB, scale=0.5),
        Arg("f32", rows * blocks * 8, values=block_stats(rows * blocks)),
    ]
    sizes = {"rows": rows, "vocab": VOCAB, "token_limit": VOCAB - 243}
    yield Case(
        "sample_scan",
        "sample_scan",
        params("sample_scan", **sizes),
        common,
        2 * 4 * rows * VOCAB,
    )
    entry = 4 + 2 * CONST["LILY_MAX_LOGPROBS"]
    yield Case(
        "sample_draw, greedy",
        "sample_draw",
        params("sample_draw", ring=4, **sizes),
        [*common, Arg("u32", rows * 4 * entry)],
        rows * blocks * 32,
    )
    p = params("embed", w=linear(VOCAB, HIDDEN), rows=rows)
    ids = np.arange(rows, dtype=np.uint32)
    args = [*matrix(VOCAB, HIDDEN, own=False), Arg("u32", rows, values=ids)]
    args += [Arg("act", rows * HIDDEN), Arg("f32", rows)]
    yield Case("embed", "embed", p, args, rows * weight_bytes(1, HIDDEN))


def with_counts(state: np.ndarray, rows: int) -> np.ndarray:
    """Step of one slot that samples greedily, with the counts of tokens that follow it."""
    step = STRUCTS["Step"].from_buffer_copy(state.tobytes())
    step.counts_offset = state.size
    step.prompt_counts_offset = state.size + 4 * VOCAB
    step.sampling[0].repetition = step.sampling[0].top_p = 1
    head = np.frombuffer(bytes(step), np.uint8)
    return np.concatenate([head, np.zeros(8 * VOCAB, np.uint8)])


def block_stats(blocks: int) -> np.ndarray:
    """What sample_scan leaves: finite maxima, ids inside the block, every token allowed."""
    stats = np.zeros((blocks, 8), np.float32)
    stats[:, [0, 3]] = np.random.default_rng(7).standard_normal((blocks, 1)).astype(np.float32)
    stats[:, 1] = 300
    ids = np.arange(blocks, dtype=np.uint32) * 1024
    for column, value in ((2, ids), (4, ids), (5, 1024), (7, 1)):
        stats[:, column] = np.full(blocks, value, np.uint32).view(np.float32)
    return stats.reshape(-1)


def prefill_cases(rows: int) -> Iterator[Case]:
    def matmul(name: str, n: int, k: int, bits: int = 4, mode: int = 0) -> Case:
        columns = n // 2 if mode == 3 else n
        y = Arg("f32" if mode == 1 else "act", rows * columns)
        p = params(
            "matmul", w=linear(n, k, bits), rows=rows, y_stride=columns, y_offset=0, mode=mode
        )
        args = [*matrix(n, k, bits), Arg("act", rows * k), y]
        return Case(
            name, "matmul", p, args, weight_bytes(n, k, bits), 2 * rows * n * k, False, rows=rows
        )

    yield matmul("matmul delta", DELTA_STRIDE, HIDDEN)
    yield matmul("matmul attention", ATTN_STRIDE, HIDDEN)
    yield matmul("matmul out", HIDDEN, VALUE_HEADS * DIM, mode=2)
    yield matmul("matmul router", EXPERTS + 1, HIDDEN, 8, 1)
    pairs = rows * (TOP_K + 1)
    rng = np.random.default_rng(5)
    chosen = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).reshape(-1)
    experts = np.concatenate([chosen, np.full(rows, EXPERTS)])  # the last: the shared one
    order = np.argsort(experts, kind="stable").astype(np.uint32)
    counts = np.bincount(experts, minlength=EXPERTS + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    tiles = [
        (e, first)
        for e in range(EXPERTS + 1)
        for first in range(int(offsets[e]), int(offsets[e + 1]), TILE)
    ]
    table = np.zeros(1 + 2 * (pairs // TILE + EXPERTS + 1), np.uint32)
    table[0] = len(tiles)
    table[1 : 1 + 2 * len(tiles)] = np.array(tiles, np.uint32).reshape(-1)
    for name, n, k, swiglu in (
        ("expert_matmul up", 2 * WIDTH, HIDDEN, 1),
        ("expert_matmul down", HIDDEN, WIDTH, 0),
    ):
        yield Case(
            name,
            "expert_matmul",
            params(
                "expert_matmul",
                w=linear(n, k),
                rows=rows,
                experts=EXPERTS,
                top_k=TOP_K,
                tile=TILE,
                swiglu=swiglu,
                shared=1,
            ),
            [
                *matrix(n, k, experts=EXPERTS),
                *matrix(n, k),
                Arg("act", (rows if swiglu else pairs) * k),
                Arg("u32", pairs, values=order),
                Arg("u32", EXPERTS + 2, values=offsets),
                Arg("u32", table.size, values=table),
                Arg("act", pairs * (n // 2 if swiglu else n)),
            ],
            int((counts > 0).sum()) * weight_bytes(n, k),
            2 * pairs * n * k,
            False,
            rows=rows,
        )
    route = np.zeros((rows, TOP_K + 1, 2), np.uint32)
    route[:, :TOP_K, 0] = chosen.reshape(rows, TOP_K)
    route[:, :, 1] = np.float32(0.1).view(np.uint32)
    keys, values = rows * KEY_HEADS * DIM, rows * VALUE_HEADS * DIM
    scores, gates = rows * VALUE_HEADS * CONST["LILY_CHUNK"], rows * VALUE_HEADS
    heads = {"rows": rows, "key_heads": KEY_HEADS, "value_heads": VALUE_HEADS}
    state = VALUE_HEADS * DIM * DIM

    def plain(name: str, p: Any, args: list[Arg], read: int, flops: int = 0) -> Case:
        return Case(name, name, p, args, read, flops, False, rows=rows)

    yield plain(
        "rms_norm",
        params("rms_norm", rows=rows, k=HIDDEN, eps=EPS),
        [Arg("act", rows * HIDDEN), Arg("f32", HIDDEN), Arg("act", rows * HIDDEN)],
        4 * rows * HIDDEN,
    )
    yield plain(
        "delta_prep",
        params(
            "delta_prep",
            **heads,
            proj_stride=DELTA_STRIDE,
            a_offset=DELTA_STRIDE - 64,
            b_offset=DELTA_STRIDE - 32,
        ),
        [
            Arg("act", rows * DELTA_STRIDE),
            Arg("f32", DELTA_QKV * 4),
            Arg("f32", VALUE_HEADS, scale=-1.0),
            Arg("f32", VALUE_HEADS),
            Arg("act", 3 * DELTA_QKV),
            Arg("act", 3 * DELTA_QKV),
            Arg("f32", keys),
            Arg("f32", keys),
            Arg("f32", values),
            Arg("f32", gates),
            Arg("f32", gates),
        ],
        2 * rows * DELTA_QKV + 4 * (2 * keys + values),
    )
    qkvgb = [
        Arg("f32", keys, scale=0.08),
        Arg("f32", keys, scale=0.08),
        Arg("f32", values),
        Arg("f32", gates, scale=-0.1),
        Arg("f32", gates, scale=0.1),
    ]
    yield plain(
        "delta_wy",
        params("delta_wy", **heads),
        [*qkvgb, Arg("f32", values), Arg("f32", values), Arg("f32", scores)],
        4 * (2 * keys + 3 * values + scores),
    )
    yield plain(
        "delta_scan",
        params("delta_scan", **heads),
        [
            Arg("f32", keys, scale=0.08),
            Arg("f32", keys, scale=0.08),
            Arg("f32", gates, scale=-0.1),
            Arg("f32", values, scale=0.01),
            Arg("f32", values),
            Arg("f32", scores, scale=0.1),
            Arg("f32", state, scale=0.01),
            Arg("f32", state),
            Arg("f32", values),
        ],
        4 * (2 * keys + 3 * values + scores),
    )
    yield plain(
        "gated_norm",
        params(
            "gated_norm",
            rows=rows,
            heads=VALUE_HEADS,
            proj_stride=DELTA_STRIDE,
            z_offset=DELTA_QKV,
            eps=EPS,
        ),
        [
            Arg("f32", values),
            Arg("act", rows * DELTA_STRIDE),
            Arg("f32", DIM),
            Arg("act", values),
        ],
        8 * values,
    )
    yield Case(
        "flash",
        "flash",
        params(
            "flash",
            rows=rows,
            position=0,
            slot=0,
            heads=HEADS,
            kv_heads=KV_HEADS,
            proj_stride=ATTN_STRIDE,
            layer=0,
            scale=1 / 16,
        ),
        [
            Arg("act", rows * HEADS * HEAD_DIM),
            Arg("act", rows * ATTN_STRIDE),
            Arg("act", rows * HEADS * HEAD_DIM),
        ],
        0,
        2 * HEADS * HEAD_DIM * rows * rows,  # causal: half of 4 h d rows^2
        unbound=True,
        context=rows - 1,
        rows=rows,
    )
    yield plain(
        "route_rows",
        params("route_rows", rows=rows, experts=EXPERTS, top_k=TOP_K, logits_stride=EXPERTS + 1),
        [Arg("f32", rows * (EXPERTS + 1)), Arg("u32", route.size)],
        rows * (EXPERTS + 1) * 4,
    )
    yield plain(
        "group_rows",
        params("group_rows", rows=rows, experts=EXPERTS, top_k=TOP_K, tile=TILE),
        [
            Arg("route", route.size, values=route.reshape(-1)),
            Arg("u32", pairs),
            Arg("u32", EXPERTS + 2),
            Arg("u32", table.size),
        ],
        route.size * 4,
    )
    yield plain(
        "moe_combine",
        params("moe_combine", rows=rows, hidden=HIDDEN, top_k=TOP_K, eps=EPS),
        [
            Arg("act", pairs * HIDDEN),
            Arg("route", route.size, values=route.reshape(-1)),
            Arg("f32", HIDDEN),
            Arg("act", rows * HIDDEN),
            Arg("act", rows * HIDDEN),
        ],
        2 * pairs * HIDDEN,
    )


class Bench:
    def __init__(self, device: str, exact: bool) -> None:
        self.core = _core.Kernels(device, exact)
        self.exact = exact
        self.rng = np.random.default_rng(1)
        self.noise = self.rng.integers(0, 1 << 32, 4 << 20, dtype=np.uint32)  # 16 MB

    def words(self, arg: Arg, count: int) -> np.ndarray:
        """`count` uint32 words: codes are noise, the rest numbers of the asked scale."""
        if arg.dtype == "u32":
            return self.noise[:count]
        normal = (self.rng.standard_normal((2, count)) * (abs(arg.scale) or 1)).astype(np.float32)
        if arg.scale <= 0:  # sums of squares, negative rates
            normal = np.abs(normal) * (1 if arg.scale == 0 else -1)
        bits = normal.view(np.uint32)
        if arg.dtype == "f32" or (arg.dtype == "act" and self.exact):
            return bits[0]
        if arg.dtype == "pairs":
            bits &= 0xBFFFFFFF  # scales below 2
        return (bits[0] >> 16) | (bits[1] & 0xFFFF0000)

    def buffer(self, arg: Arg) -> tuple[Any, int, int, str]:
        kind = {"pairs": "u32", "route": "u32", "act": "f32" if self.exact else "bf16"}.get(
            arg.dtype, arg.dtype
        )
        size = arg.elements * (2 if kind == "bf16" else 4)
        buffer = self.core.buffer(max(size, 16), arg.dtype)
        if arg.values is not None:
            values = arg.values
            if arg.dtype == "route":  # other experts each time
                values = values.copy().reshape(-1, TOP_K + 1, 2)
                values[:, :TOP_K, 0] = (values[:, :TOP_K, 0] + self.rng.integers(EXPERTS)) % EXPERTS
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            buffer.write(0, raw)
        else:
            count = (size + 3) // 4
            block = self.words(arg, min(count, 4 << 20))
            for at in range(0, count, block.size):
                part = np.ascontiguousarray(block[: count - at])
                buffer.write(4 * at, part.view(np.uint8))
        return buffer, 0, arg.elements, kind

    def run(self, case: Case, times: int) -> float:
        """Seconds of one launch."""
        own = sum(
            a.elements * {"act": 2}.get(a.dtype, 4) for a in case.args if a.own and a.values is None
        )
        spread = max(own, case.bytes)
        launches = int(min(max(COLD // max(spread, 1), 2), 32)) if case.bytes else 2
        if not any(a.own for a in case.args):
            launches = 4
        shared = {i: self.buffer(a) for i, a in enumerate(case.args) if not a.own}
        raw = np.frombuffer(bytes(case.params), np.uint8)
        pages, slabs = None, []
        if case.unbound:
            block = 2 * KV_HEADS * BLOCK * HEAD_DIM * (4 if self.exact else 2)
            blocks = (case.context + case.rows) // BLOCK + 1
            slab = self.buffer(Arg("act", blocks * block // (4 if self.exact else 2)))
            slabs = [(slab[0], 0, slab[0].nbytes // 4, "u32")]
            pages = (
                np.arange(blocks, dtype=np.uint64) * np.uint64(block) + np.uint64(slab[0].address)
            )[None]
        step = []
        if case.step or case.unbound:
            rows = min(int(case.params.rows), CONST["LILY_MAX_ROWS"])
            state = make_step(
                rows, [0] * rows, [case.context + r for r in range(rows)], [1] * rows, pages
            )
            if case.op.startswith("sample"):
                state = with_counts(state, rows)
            buffer = self.core.buffer(state.size, "step")
            buffer.write(0, state[: state.size // 4 * 4])
            step = [(buffer, 0, state.size // 4, "u32")]
        calls = []
        for _ in range(launches):
            views = [shared.get(i) or self.buffer(a) for i, a in enumerate(case.args)]
            calls.append((case.op, raw, views, step, slabs))
        return float(self.core.time(calls, times)) / launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--activations", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, default=1, help="rows of the decode cases")
    parser.add_argument("--context", default="256,4096", help="of the decode attention cases")
    parser.add_argument("--prefill", default="4096", help="rows of the prefill cases, 0: none")
    parser.add_argument("--only", default="", help="part of the names to run")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--bf16-tflops", type=float, default=790.0, help="the card's matrix rate")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    bench = Bench(a.device, a.activations == "float32")
    size = 1 << 30
    raw = np.frombuffer(bytes(params("copy_bytes", bytes=size)), np.uint8)
    pair = [bench.buffer(Arg("u32", size // 4)) for _ in range(2)]
    copy = 2 * size / bench.core.time([("copy_bytes", raw, pair, [], [])], 5)
    del pair
    print(f"copy_bytes: {copy / 1e9:.0f} GB/s, read and written")
    print(f"{'case':24} {'rows':>5} {'us':>9} {'GB/s':>7} {'copy':>5} {'TFLOP/s':>8} {'rate':>5}")
    contexts = [int(c) for c in a.context.split(",")]
    cases = [c for c in decode_cases(a.rows, contexts[0]) if a.rows]
    cases += [c for c in sample_cases(a.rows) if a.rows]
    for context in contexts[1:] if a.rows else []:
        cases += [c for c in decode_cases(a.rows, context) if c.context]
    for rows in (int(r) for r in a.prefill.split(",")):
        cases += list(prefill_cases(rows)) if rows else []
    for case in cases:
        if a.only not in case.name:
            continue
        seconds = bench.run(case, a.times)
        name = case.name + (f" @{case.context}" if case.context else "")
        rows = int(case.params.rows)
        rate, flops = case.bytes / seconds, case.flops / seconds
        print(
            f"{name:24} {rows:5} {seconds * 1e6:9.2f} {rate / 1e9:7.0f} {rate / copy:5.0%} "
            f"{flops / 1e12:8.1f} {flops / 1e12 / a.bf16_tflops:5.0%}",
            flush=True,
        )
        if a.out:
            record = {
                "case": name,
                "op": case.op,
                "rows": rows,
                "us": seconds * 1e6,
                "bytes": case.bytes,
                "flops": case.flops,
                "copy_gb_s": copy / 1e9,
                "device": a.device,
            }
            with a.out.open("a") as f:
                f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
