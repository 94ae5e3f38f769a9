"""The mixture of experts' ops against the reference: choice, both expert halves, grouping, sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import reference
from kernel_harness import (
    In,
    InOut,
    Kernels,
    Out,
    Weight,
    emulated,
    linear,
    make_step,
    params,
    weight,
)
from lily import LilyError

EPS = 1e-6


@dataclass
class Moe:
    """Sizes of one case and its random tensors. rows are launched, live of them are valid."""

    rows: int
    hidden: int = 256
    width: int = 128
    shared_width: int = 128
    experts: int = 8
    top_k: int = 2
    bits: int = 4
    group: int = 64
    f16: bool = False
    ssq_parts: int = 3
    live: int = 0
    seed: int = 0
    odd: int = 0  # units that up has fewer than down takes

    def __post_init__(self) -> None:
        self.live = self.live or self.rows
        rng = self.rng = np.random.default_rng(self.seed)
        make = {"bits": self.bits, "group": self.group, "f16": self.f16}
        units, shared_units = self.width - self.odd, self.shared_width - self.odd
        self.up = weight(rng, 2 * units, self.hidden, experts=self.experts, **make)
        self.shared_up = weight(rng, 2 * shared_units, self.hidden, **make)
        self.down = weight(rng, self.hidden, self.width, experts=self.experts, **make)
        self.shared_down = weight(rng, self.hidden, self.shared_width, **make)
        self.x = rng.standard_normal((self.rows, self.hidden)) * 2
        self.x[-1] *= 5e-4  # where eps counts
        self.gain = rng.standard_normal(self.hidden).astype(np.float32) + 1
        self.logits = rng.standard_normal((self.rows, self.experts + 3)).astype(np.float32) * 2
        self.h_stride = max(self.width, self.shared_width) + 4
        self.slots = self.top_k + 1

    def up_params(self, **change: int) -> Any:
        slots = {"slot_begin": 0, "slots": self.slots} | change
        return params(
            "expert_up",
            routed=self.up.linear,
            shared=self.shared_up.linear,
            rows=self.rows,
            experts=self.experts,
            top_k=self.top_k,
            ssq_parts=self.ssq_parts,
            eps=EPS,
            logits_stride=self.logits.shape[1],
            h_stride=self.h_stride,
            **slots,
        )

    def down_params(self, **change: int) -> Any:
        slots = {"slot_begin": 0, "slots": self.slots} | change
        return params(
            "expert_down",
            routed=self.down.linear,
            shared=self.shared_down.linear,
            rows=self.rows,
            experts=self.experts,
            top_k=self.top_k,
            h_stride=self.h_stride,
            **slots,
        )

    def ssq(self, x: np.ndarray) -> np.ndarray:
        """Sums of squares of x's rows, in ssq_parts parts of very different size."""
        parts = (x**2).sum(1)[:, None] * np.linspace(0.1, 1, self.ssq_parts)
        return (parts / np.linspace(0.1, 1, self.ssq_parts).sum()).astype(np.float32)

    def route(self) -> tuple[np.ndarray, np.ndarray]:
        """Experts [R, top_k] and weights [R, top_k + 1] of the reference."""
        logits = self.logits[:, : self.experts].astype(np.float64)
        idx, weights = reference.router(logits, self.top_k)
        shared = reference.sigmoid(self.logits[:, self.experts, None].astype(np.float64))
        return idx, np.concatenate([weights, shared], 1)

    def h(self, x: np.ndarray) -> list[np.ndarray]:
        """[R, width] of each slot, from stored x."""
        y = reference.rms_norm(x, self.gain.astype(np.float64), EPS)
        up, shared = self.up.values, self.shared_up.values[0]
        routed = reference.expert_up(y, up[:, 0::2], up[:, 1::2], self.route()[0])
        own = reference.swiglu(y @ shared[0::2].T, y @ shared[1::2].T)
        return [*np.moveaxis(routed, 1, 0), own]

    def random_h(self) -> np.ndarray:
        return self.rng.standard_normal((self.rows, self.slots, self.h_stride)) * 0.5

    def packed_route(self) -> np.ndarray:
        idx, weights = self.route()
        packed = np.full((self.rows, self.slots, 2), self.experts, np.uint32)
        packed[:, :-1, 0] = idx
        packed[..., 1] = weights.astype(np.float32).view(np.uint32)
        return packed

    def mixed(self, h: np.ndarray, route: np.ndarray, slots: range) -> np.ndarray:
        """Sum over the slots of weight * W h: [R, hidden]."""
        weights = route[..., 1].copy().view(np.float32).astype(np.float64)
        y = np.zeros((self.rows, self.hidden))
        for s in slots:
            for r in range(self.rows):
                if s == self.top_k:
                    w = self.shared_down.values[0]
                else:
                    w = self.down.values[route[r, s, 0]]
                y[r] += weights[r, s] * (w @ h[r, s, : w.shape[1]])
        return y


def weights_of(w: Weight) -> list[In | None]:
    return [In(w.codes), In(w.pairs) if w.pairs.size else None]


def close(kernels: Kernels, got: np.ndarray, want: np.ndarray) -> None:
    """Exact: 2e-5 of the output's scale; bf16: one rounding of a value that is right in fp32."""
    scale = np.abs(want).max()
    got = kernels.rounded(got) if got.dtype == np.float32 else reference.from_bf16(got)
    bound = 2e-5 * scale if kernels.exact else 2.0**-8 * np.abs(want) + 2e-5 * scale
    assert (np.abs(got - want) <= bound).all(), np.abs(got - want).max() / scale


def run_up(k: Kernels, m: Moe, rows: slice = slice(None), **slots: int) -> list[np.ndarray]:
    x = k.rounded(m.x)
    p = m.up_params(**slots)
    p.rows = len(x[rows])
    return k.run(
        "expert_up",
        p,
        [
            *weights_of(m.up),
            *weights_of(m.shared_up),
            In(k.act(m.x)[rows]),
            In(m.gain),
            In(m.ssq(x)[rows]),
            In(m.logits[rows]),
            k.out_act(p.rows, m.slots, m.h_stride),
            Out((p.rows, m.slots, 2), np.uint32),
        ],
        make_step(min(m.live, p.rows)),
    )[:2]


def run_down(
    k: Kernels, m: Moe, h: np.ndarray, route: np.ndarray, x: np.ndarray, **slots: int
) -> list[np.ndarray]:
    p = m.down_params(**slots)
    p.rows = len(x)
    return k.run(
        "expert_down",
        p,
        [
            *weights_of(m.down),
            *weights_of(m.shared_down),
            In(k.act(h)),
            In(route),
            InOut(k.act(x)),
            Out((p.rows, m.hidden // 8), np.float32),
        ],
        make_step(min(m.live, p.rows)),
    )[:2]


def check_ssq(x: np.ndarray, ssq: np.ndarray) -> None:
    stored = x.astype(np.float64) if x.dtype == np.float32 else reference.from_bf16(x)
    want = (stored.reshape(*ssq.shape, 8) ** 2).sum(-1)
    assert np.allclose(ssq, want, rtol=1e-6, atol=0)


# Rows at every boundary; all bits, groups and scale types; ragged widths and hidden sizes; a
# shared expert narrower and wider than the others.
CASES = [
    Moe(1),
    Moe(2, bits=8),
    Moe(3, bits=16),
    Moe(4, hidden=64, width=64, shared_width=64, group=32, experts=2, top_k=1),
    Moe(5, hidden=1088, width=192, shared_width=64, group=64, f16=True, top_k=3),
    Moe(16, hidden=128, width=128, shared_width=256, group=128, experts=33, top_k=16),
    Moe(2, hidden=1024, width=640, shared_width=128, bits=8, group=128, f16=True),
    Moe(3, hidden=192, width=64, shared_width=192, bits=8, group=32, experts=5, top_k=5),
    Moe(1, hidden=320, width=576, shared_width=64, bits=16, experts=3),
    Moe(7, live=3, hidden=128, width=64, shared_width=64, group=32),
    Moe(2, hidden=128, width=128, shared_width=64, odd=1),
    Moe(2, hidden=128, width=64, shared_width=64, odd=3),
]
REAL = Moe(2, hidden=2048, width=512, shared_width=512, top_k=8, ssq_parts=256, seed=7)


def name(m: Moe) -> str:
    sizes = f"{m.rows}x{m.hidden}-{m.width}-{m.shared_width}"
    return f"{sizes}-q{m.bits}g{m.group}-{m.top_k}of{m.experts}"


@pytest.mark.parametrize("m", [*CASES, REAL], ids=name)
def test_expert_up(kernels: Kernels, m: Moe) -> None:
    h, route = run_up(kernels, m)
    idx, weights = m.route()
    live = slice(m.live)
    assert (route[live, :-1, 0] == idx[live]).all() and (route[live, -1, 0] == m.experts).all()
    got = route[..., 1].copy().view(np.float32)
    assert np.allclose(got[live], weights[live], rtol=2e-6, atol=1e-9)
    for s, want in enumerate(m.h(kernels.rounded(m.x))):
        close(kernels, h[live, s, : want.shape[1]], want[live])
        assert untouched(h[live, s, want.shape[1] :])
    assert untouched(h[m.live :]) and untouched(route[m.live :])


def untouched(a: np.ndarray) -> bool:
    return bool((np.ascontiguousarray(a).view(np.uint8) == 0xFF).all())


@pytest.mark.parametrize("m", [*CASES, REAL], ids=name)
def test_expert_down(kernels: Kernels, m: Moe) -> None:
    h, route, before = m.random_h(), m.packed_route(), kernels.rounded(m.x)
    x, ssq = run_down(kernels, m, h, route, before)
    live = slice(m.live)
    want = before + m.mixed(kernels.rounded(h), route, range(m.slots))
    close(kernels, x[live], want[live])
    check_ssq(x[live], ssq[live])
    assert (x[m.live :] == kernels.act(before)[m.live :]).all() and untouched(ssq[m.live :])


def test_rows_together_are_rows_alone(kernels: Kernels) -> None:
    m = Moe(16, hidden=192, width=128, shared_width=64, experts=16, top_k=4)
    h, route = run_up(kernels, m)
    full = m.random_h()
    x, ssq = run_down(kernels, m, full, route, kernels.rounded(m.x))
    for r in range(m.rows):
        one = slice(r, r + 1)
        h1, route1 = run_up(kernels, m, one)
        x1, ssq1 = run_down(kernels, m, full[one], route1, kernels.rounded(m.x)[one])
        for whole, alone in ((h, h1), (route, route1), (x, x1), (ssq, ssq1)):
            assert whole[one].tobytes() == alone.tobytes()


def test_slots_apart(kernels: Kernels) -> None:
    """Routed and shared experts in two launches, for unequal bits: unused tensors are absent."""
    m = Moe(3, experts=6, top_k=3)
    wide = weight(m.rng, 2 * m.shared_width, m.hidden, bits=8)
    narrow = weight(m.rng, m.hidden, m.shared_width, bits=8)
    x = kernels.rounded(m.x)
    xs, ssq, step = In(kernels.act(m.x)), In(m.ssq(x)), make_step(m.rows)
    h_out, route_out = kernels.out_act(3, 4, m.h_stride), Out((3, 4, 2), np.uint32)
    h, route, _ = kernels.run(
        "expert_up",
        m.up_params(slots=3),
        [*weights_of(m.up), None, None, xs, In(m.gain), ssq, In(m.logits), h_out, route_out],
        step,
    )
    assert untouched(h[:, 3]) and untouched(route[:, 3])
    p = m.up_params(slot_begin=3, slots=1)
    p.shared = wide.linear
    h, route, _ = kernels.run(
        "expert_up",
        p,
        [None, None, *weights_of(wide), xs, In(m.gain), ssq, In(m.logits), InOut(h), InOut(route)],
        step,
    )
    m.shared_up = wide
    for s, want in enumerate(m.h(x)):
        close(kernels, h[:, s, : want.shape[1]], want)
    assert (route[:, 3, 0] == 6).all() and (route[:, :3, 0] == m.route()[0]).all()

    full, packed = m.random_h(), m.packed_route()
    routed_x, _, _ = kernels.run(
        "expert_down",
        m.down_params(slots=3),
        [
            *weights_of(m.down),
            None,
            None,
            In(kernels.act(full)),
            In(packed),
            InOut(kernels.act(x)),
            Out((3, m.hidden // 8), np.float32),
        ],
        step,
    )
    close(kernels, routed_x, x + m.mixed(kernels.rounded(full), packed, range(3)))
    p = m.down_params(slot_begin=3, slots=1)
    p.shared = narrow.linear
    m.shared_down = narrow
    both_x, ssq_out, _ = kernels.run(
        "expert_down",
        p,
        [
            None,
            None,
            *weights_of(narrow),
            In(kernels.act(full)),
            In(packed),
            InOut(routed_x),
            Out((3, m.hidden // 8), np.float32),
        ],
        step,
    )
    stored = kernels.rounded(routed_x) if kernels.exact else reference.from_bf16(routed_x)
    close(kernels, both_x, stored + m.mixed(kernels.rounded(full), packed, range(3, 4)))
    check_ssq(both_x, ssq_out)


def test_fused_halves_are_the_reference_block(kernels: Kernels) -> None:
    """Both halves after each other give x + moe(norm(x))."""
    m = Moe(4, experts=12, top_k=4, width=192, hidden=192)
    x = kernels.rounded(m.x)
    h, route = run_up(kernels, m)
    wide = kernels.rounded(h) if kernels.exact else reference.from_bf16(h)
    out, _ = run_down(kernels, m, np.nan_to_num(wide), route, x)
    y = reference.rms_norm(x, m.gain.astype(np.float64), EPS)
    up, shared_up = m.up.values, m.shared_up.values[0]
    idx, weights = m.route()
    routed = reference.expert_up(y, up[:, 0::2], up[:, 1::2], idx)
    want = x + reference.expert_down(routed, m.down.values, idx, weights[:, :-1])
    shared = reference.swiglu(y @ shared_up[0::2].T, y @ shared_up[1::2].T)
    want += weights[:, -1:] * (shared @ m.shared_down.values[0].T)
    got = kernels.rounded(out) if kernels.exact else reference.from_bf16(out)
    bound = 2e-5 if kernels.exact else 1e-2  # in bf16 h is rounded between the halves
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


def test_expert_beyond_four_gigabytes(device: str) -> None:
    """The last expert's codes begin past 2^32 bytes and 2^31 values."""
    if emulated(device):
        pytest.skip("sim keeps a shadow of every byte: 5 GB of sparse memory are too much for it")
    k = Kernels(device, True)
    m = Moe(1, hidden=2048, width=2112, shared_width=64, experts=2, top_k=1)
    experts = 1000
    one = m.up.codes.size // 2
    assert (experts - 1) * one * 4 > 2**32 and (experts - 1) * 2 * m.width * m.hidden > 2**31
    codes = k.core.buffer(experts * one * 4, "codes")
    codes.write((experts - 1) * one * 4, m.up.codes[one:].view(np.uint8))
    pairs_one = m.up.pairs.size // 2
    pairs = k.core.buffer(experts * pairs_one * 4, "pairs")
    pairs.write((experts - 1) * pairs_one * 4, m.up.pairs[pairs_one:].view(np.uint8))
    logits = np.zeros((1, experts), np.float32)
    logits[0, -1] = 1
    p = params(
        "expert_up",
        routed=m.up.linear,
        shared=m.shared_up.linear,
        rows=1,
        experts=experts,
        top_k=1,
        slot_begin=0,
        slots=1,
        ssq_parts=3,
        logits_stride=experts,
        h_stride=m.h_stride,
        eps=EPS,
    )
    arrays = [
        m.x.astype(np.float32),
        m.gain,
        m.ssq(m.x),
        logits,
        np.zeros((2, m.h_stride), np.float32),
        np.zeros((2, 2), np.uint32),
    ]
    names = ["f32", "f32", "f32", "f32", "f32", "u32"]
    views = [(codes, 0, experts * one, "u32"), (pairs, 0, experts * pairs_one, "u32")]
    views += [(k.core.buffer(16, "none"), 0, 0, "u32")] * 2
    placed = [k.place(a) for a in arrays]
    views += [(b, 64, a.size, n) for b, a, n in zip(placed, arrays, names, strict=True)]
    step = make_step(1)
    raw = np.frombuffer(bytes(p), np.uint8)
    k.core.run(
        [("expert_up", raw, views, [(k.place(step), 64, step.size // 4, "u32")], [])], False, 1
    )
    h = k.fetch(placed[4], arrays[4])
    y = reference.rms_norm(k.rounded(m.x), m.gain.astype(np.float64), EPS)
    want = reference.swiglu(y @ m.up.values[1, 0::2].T, y @ m.up.values[1, 1::2].T)
    close(k, h[:1, : m.width], want)


# ---- the choice --------------------------------------------------------------------------------
def run_route(k: Kernels, logits: np.ndarray, experts: int, top_k: int) -> tuple[Any, Any]:
    rows, stride = logits.shape
    p = params("route_rows", rows=rows, experts=experts, top_k=top_k, logits_stride=stride)
    (route,) = k.run("route_rows", p, [In(logits), Out((rows, top_k + 1, 2), np.uint32)])
    return route[..., 0], route[..., 1].copy().view(np.float32)


@pytest.mark.parametrize(
    ("rows", "experts", "top_k"),
    [
        (1, 256, 8),
        (17, 256, 8),
        (2, 2, 1),
        (3, 2, 2),
        (4, 31, 16),
        (5, 33, 3),
        (2, 1024, 16),
        (3, 257, 1),
        (2, 513, 3),
        (2, 769, 2),
        (2, 512, 10),
        (65, 8, 2),
    ],
)
def test_route_rows(kernels: Kernels, rows: int, experts: int, top_k: int) -> None:
    rng = np.random.default_rng(experts + rows)
    logits = (rng.standard_normal((rows, experts + 2)) * 3).astype(np.float32)
    if experts > 2:
        logits[0] = np.round(logits[0] / 3)  # many ties
        logits[-1] = -np.abs(logits[-1]) - 50
        logits[-1, experts - 1] = -49  # the best is the last
    ids, weights = run_route(kernels, logits, experts, top_k)
    idx, want = reference.router(logits[:, :experts].astype(np.float64), top_k)
    assert (ids[:, :-1] == idx).all() and (ids[:, -1] == experts).all()
    assert np.allclose(weights[:, :-1], want, rtol=2e-6, atol=1e-9)
    gate = reference.sigmoid(logits[:, experts].astype(np.float64))
    assert np.allclose(weights[:, -1], gate, rtol=2e-6, atol=1e-9)


def test_odd_logits_choose_real_experts(kernels: Kernels) -> None:
    """NaN counts as -inf, the zeros are equal; nothing hangs or leaves the table."""
    logits = np.full((7, 9), 1, np.float32)
    logits[0, :8] = np.nan
    logits[1, [1, 5]] = np.nan, 3
    logits[2, :8] = -np.inf
    logits[3, [6, 7]] = np.inf
    logits[4, :8] = np.float32(-0.0)
    logits[4, 6] = 0.0
    logits[5, :8] = np.frombuffer(np.uint32(0xFFFFFFFF).tobytes(), np.float32)
    logits[6, :8] = np.float32(1e-45) * np.array([0, 1, 2, -1, 2, 1, 0, -2], np.float32)
    ids, weights = run_route(kernels, logits, 8, 3)
    want = [[0, 1, 2], [5, 0, 2], [0, 1, 2], [6, 7, 0], [0, 1, 2], [0, 1, 2], [2, 4, 1]]
    assert ids[:, :3].tolist() == want
    assert np.allclose(weights[1, :3], np.array([np.exp(2), 1, 1]) / (np.exp(2) + 2), rtol=1e-6)
    assert np.allclose(weights[[4, 6], :3], 1 / 3, rtol=1e-6)
    assert np.isnan(weights[[0, 2, 3, 5], 0]).all()


# ---- prefill -----------------------------------------------------------------------------------
def grouping(chosen: np.ndarray, count: int, tile: int) -> tuple[np.ndarray, ...]:
    """order, offsets and tiles of the experts chosen [rows, top_k] and the shared one, number `count`."""
    experts = np.concatenate([chosen.reshape(-1), np.full(len(chosen), count)])
    order = np.argsort(experts, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(experts, minlength=count + 1))])
    tiles = [(e, p) for e in range(count + 1) for p in range(offsets[e], offsets[e + 1], tile)]
    return order, offsets, np.array([len(tiles), *np.ravel(tiles)])


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "tile"),
    [
        (1, 8, 2, 64),
        (17, 8, 2, 5),
        (65, 16, 8, 64),
        (200, 33, 16, 32),
        (129, 12, 8, 1),
        (3, 16, 16, 2),
        (1024, 128, 1, 64),
        (1025, 129, 2, 64),
        (2049, 256, 3, 64),
        (2048, 256, 8, 64),
        (300, 1024, 10, 64),
    ],
)
def test_group_rows(kernels: Kernels, rows: int, experts: int, top_k: int, tile: int) -> None:
    """Up to and past the 1024 rows taken at once and the 128 experts of a group."""
    rng = np.random.default_rng(rows)
    liking = rng.random((rows, experts))
    if top_k <= experts // 2:
        liking[:, rng.permutation(experts)[experts // 2 :]] += 2  # nobody's choice
    route = np.zeros((rows, top_k + 1, 2), np.uint32)
    route[:, :top_k, 0] = np.argsort(liking, axis=1)[:, :top_k]
    route[:, top_k, 0] = 0xFFFFFFFF  # not read
    pairs = rows * (top_k + 1)
    p = params("group_rows", rows=rows, experts=experts, top_k=top_k, tile=tile)
    order, offsets, tiles = kernels.run(
        "group_rows",
        p,
        [
            In(route),
            Out((pairs,), np.uint32),
            Out((experts + 2,), np.uint32),
            Out((1 + 2 * (pairs // tile + experts + 1),), np.uint32),
        ],
    )
    want = grouping(route[:, :top_k, 0], experts, tile)
    assert (order == want[0]).all() and (offsets == want[1]).all()
    assert (tiles[: want[2].size] == want[2]).all() and untouched(tiles[want[2].size :])


def test_group_rows_of_experts_past_the_table(kernels: Kernels) -> None:
    """They count as the last one: a route that nothing has made leads nowhere else."""
    chosen = np.array([[0, 9], [4, 1], [2, 0xFFFFFFFF]])
    route = np.zeros((3, 3, 2), np.uint32)
    route[:, :2, 0] = chosen
    p = params("group_rows", rows=3, experts=4, top_k=2, tile=2)
    outs = [Out((n,), np.uint32) for n in (9, 6, 1 + 2 * (9 // 2 + 5))]
    order, offsets, tiles = kernels.run("group_rows", p, [In(route), *outs])
    want = grouping(np.minimum(chosen, 3), 4, 2)
    assert (order == want[0]).all() and (offsets == want[1]).all()
    assert (tiles[: want[2].size] == want[2]).all() and untouched(tiles[want[2].size :])


@pytest.mark.parametrize(
    ("rows", "hidden", "top_k"), [(1, 64, 1), (17, 192, 3), (5, 2048, 8), (33, 1088, 16)]
)
def test_moe_combine(kernels: Kernels, rows: int, hidden: int, top_k: int) -> None:
    rng = np.random.default_rng(hidden)
    down, own, x = (
        rng.standard_normal(s) for s in ((rows * top_k, hidden), (rows, hidden), (rows, hidden))
    )
    route = np.full((rows, top_k + 1, 2), 0xFFFFFFFF, np.uint32)
    weights = rng.uniform(0.05, 1, (rows, top_k + 1)).astype(np.float32)
    route[..., 1] = weights.view(np.uint32)
    p = params("moe_combine", rows=rows, hidden=hidden, top_k=top_k, eps=EPS)
    x[-1] *= 5e-4  # where eps counts
    down[top_k * (rows - 1) :], own[-1] = down[top_k * (rows - 1) :] * 5e-4, own[-1] * 5e-4
    gain = rng.standard_normal(hidden).astype(np.float32) + 1
    outs = kernels.act(np.concatenate([down, own]))
    got, h = kernels.run(
        "moe_combine",
        p,
        [In(outs), In(route), In(gain), InOut(kernels.act(x)), kernels.out_act(rows, hidden)],
    )
    w = weights.astype(np.float64)
    want = kernels.rounded(x)
    want = want + (w[:, :-1, None] * kernels.rounded(down).reshape(rows, top_k, hidden)).sum(1)
    want = want + w[:, -1:] * kernels.rounded(own)
    close(kernels, got, want)
    stored = kernels.rounded(got) if kernels.exact else reference.from_bf16(got)
    close(kernels, h, reference.rms_norm(stored, gain.astype(np.float64), EPS))


# ---- plans -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", 17, "17 rows, supported 1 to 16"),
        ("rows", 0, "0 rows, supported 1 to 16"),
        ("experts", 1, "1 experts, supported 2 to 1024"),
        ("experts", 1025, "1025 experts, supported 2 to 1024"),
        ("top_k", 17, "top-k 17, supported 1 to 16 of 33 experts"),
        ("slots", 18, "slots 0 to 18 of 17"),
        ("slots", 0, "slots 0 to 0 of 17"),
        ("h_stride", 258, "h rows of 258 values, need a multiple of 4"),
        ("h_stride", 252, "width 256 in h rows of 252"),
        ("logits_stride", 33, "34 logits in rows of 33"),
        ("ssq_parts", 0, "0 partial sums, needs 1 or more"),
        ("routed", linear(256, 128, 8, 128), "8 bits and the shared one 4"),
        ("routed", linear(255, 128, 4, 128), "gate and up rows come in pairs, n is 255 and 512"),
        ("routed", linear(256, 256, 4, 128), "shared expert takes 128 values, the routed ones 256"),
    ],
)
def test_expert_up_refuses(field: str, value: Any, message: str) -> None:
    m, k = CASES[5], Kernels("cpu", True)
    p = m.up_params()
    setattr(p, field, value)
    with pytest.raises(LilyError, match=message):
        k.run("expert_up", p, [None] * 10, make_step(1))
