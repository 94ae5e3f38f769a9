"""Gated DeltaNet on every device against the reference: decode step, output projection, prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kernel_harness as h
import reference as ref
from kernel_harness import In, InOut, Kernels, Out, emulated
from lily import _core

D = h.CONST["LILY_DELTA_DIM"]
CHUNK = h.CONST["LILY_CHUNK"]
OUT_ROWS = h.CONST["LILY_OUT_ROWS"]
PARTS = 4
EPS = 1e-6
F32: Any = np.float32


def close(got: np.ndarray, want: np.ndarray, axis: Any = None, rel: float = 2e-5) -> None:
    """Within rel of the output's scale (its root mean square over `axis`, so that a small head is
    not hidden by a large one); a bf16 result beyond that within its rounding."""
    assert got.shape == want.shape
    bound = rel * np.sqrt((want * want).mean(axis, keepdims=True)) + np.zeros(want.shape)
    if got.dtype == np.uint16:
        bound += 2.0**-8 * np.abs(want)
    error = np.abs(h.from_act(got).astype(np.float64) - want)
    bad = ~(error <= bound)  # NaN is bad too
    assert not bad.any(), (
        f"{bad.sum()} of {bad.size} off, first at {np.argwhere(bad)[0]}, "
        f"worst {np.nanmax(error / bound):.3g} times the bound"
    )


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def untouched(got: np.ndarray) -> bool:
    return bool((np.ascontiguousarray(got).view(np.uint8) == 0xFF).all())


@dataclass
class Layer:
    """Weights of one layer, and where its projections lie: q k v | z | a | b | 3 to 6 unused."""

    key_heads: int
    heads: int
    conv_w: np.ndarray  # [channels, 4]
    neg_exp_a: np.ndarray  # [heads]
    dt_bias: np.ndarray
    gain: np.ndarray  # [D]

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * D

    @property
    def z_offset(self) -> int:
        return self.channels

    @property
    def a_offset(self) -> int:
        return self.channels + self.heads * D

    @property
    def b_offset(self) -> int:
        return self.a_offset + self.heads

    @property
    def stride(self) -> int:
        return (self.b_offset + self.heads + 3) // 4 * 4 + 4

    def split(self, proj: np.ndarray) -> tuple[np.ndarray, ...]:
        cuts = [self.z_offset, self.a_offset, self.b_offset, self.b_offset + self.heads]
        return tuple(np.split(proj, cuts, axis=1)[:4])


def make_layer(rng: np.random.Generator, key_heads: int, heads: int) -> Layer:
    """Decay from almost none to e^-15 and more a token, by head."""
    return Layer(
        key_heads,
        heads,
        (rng.standard_normal(((2 * key_heads + heads) * D, 4)) * 0.6).astype(F32),
        -np.geomspace(0.002, 15.0, heads).astype(F32),
        rng.normal(0.0, 1.0, heads).astype(F32),
        rng.uniform(0.5, 1.5, D).astype(F32),
    )


def make_rows(kernels: Kernels, rng: np.random.Generator, layer: Layer, rows: int) -> np.ndarray:
    """Projections of `rows` tokens, as stored; a ranges from strong to weak decay."""
    proj = rng.standard_normal((rows, layer.stride)) * rng.uniform(0.3, 2.0, (rows, 1))
    proj[:, layer.a_offset : layer.b_offset] *= 3.0
    return kernels.act(proj)


def make_state(
    kernels: Kernels, rng: np.random.Generator, layer: Layer, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    conv = kernels.act(rng.standard_normal((slots, 3, layer.channels)))
    return conv, (rng.standard_normal((slots, layer.heads, D, D)) * 0.3).astype(F32)


def wide(x: np.ndarray) -> np.ndarray:
    return h.from_act(x).astype(np.float64)


# ---- delta_step ----------------------------------------------------------------------------------
def run_step(
    kernels: Kernels,
    layer: Layer,
    proj: np.ndarray,
    conv: np.ndarray,
    state: np.ndarray,
    slots: list[int] | None = None,
    valid: int | None = None,
    write: bool = True,
) -> tuple[np.ndarray, ...]:
    """conv_out, state_out, u, head_ssq."""
    rows = len(proj)
    p = h.params(
        "delta_step", rows=rows, key_heads=layer.key_heads, value_heads=layer.heads,
        proj_stride=layer.stride, z_offset=layer.z_offset, a_offset=layer.a_offset,
        b_offset=layer.b_offset, head_parts=PARTS, write_state=int(write), slots=len(conv),
    )  # fmt: skip
    args = [
        In(proj), In(layer.conv_w), In(layer.neg_exp_a), In(layer.dt_bias), In(layer.gain),
        In(conv), In(state), kernels.out_act(*conv.shape), Out(state.shape, F32),
        kernels.out_act(rows, layer.heads * D), Out((rows, layer.heads, PARTS), F32),
    ]  # fmt: skip
    step = h.make_step(rows if valid is None else valid, slots or [0] * rows)
    return tuple(kernels.run("delta_step", p, args, step=step)[:4])


def step_reference(
    layer: Layer, proj: np.ndarray, conv: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, ...]:
    """conv_out, state_out, u, head_ssq [rows, heads] of one slot."""
    qkv, z, a, b = layer.split(wide(proj))
    weights = (
        x.astype(np.float64) for x in (layer.conv_w, layer.neg_exp_a, layer.dt_bias, layer.gain)
    )
    u, sums, carried, after = ref.delta_step(
        qkv, z, a, b, *weights, wide(conv), state.astype(np.float64)
    )
    return carried, after, u.reshape(len(proj), -1), sums


def check_step(
    got: tuple[np.ndarray, ...],
    layer: Layer,
    proj: np.ndarray,
    conv: np.ndarray,
    state: np.ndarray,
) -> None:
    """One slot's results (conv_out, state_out, u, head_ssq) against the reference."""
    carried, after, u, sums = step_reference(layer, proj, conv, state)
    same_bits(got[0], np.concatenate([conv, proj[:, : layer.channels]])[-3:])
    np.testing.assert_array_equal(wide(got[0]), carried)
    close(got[1], after, (1, 2))
    heads = (len(proj), layer.heads, D)
    close(got[2].reshape(heads), u.reshape(heads), 2)
    close(got[3].sum(2, dtype=np.float64), sums, 1, 1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16])
def test_step_rows(kernels: Kernels, rows: int) -> None:
    """Against the reference; and rows together leave the same bits as one after the other."""
    rng = np.random.default_rng(rows)
    layer = make_layer(rng, 1, 2)
    proj = make_rows(kernels, rng, layer, rows)
    conv, state = make_state(kernels, rng, layer, 1)
    together = run_step(kernels, layer, proj, conv, state)
    check_step((together[0][0], together[1][0], *together[2:]), layer, proj, conv[0], state[0])
    singles = []
    for r in range(rows):
        conv, state, *outputs = run_step(kernels, layer, proj[r : r + 1], conv, state)
        singles.append(outputs)
    same_bits(together[0], conv)
    same_bits(together[1], state)
    same_bits(together[2], np.concatenate([s[0] for s in singles]))
    same_bits(together[3], np.concatenate([s[1] for s in singles]))


@pytest.mark.parametrize("key_heads,heads", [(1, 1), (2, 2), (2, 6), (3, 3)])
def test_step_heads(kernels: Kernels, key_heads: int, heads: int) -> None:
    """Any ratio of value to key heads; the parts are sums over 32 columns each."""
    rng = np.random.default_rng(10 * key_heads + heads)
    layer = make_layer(rng, key_heads, heads)
    layer.gain[:] = 1.0
    proj = make_rows(kernels, rng, layer, 2)
    proj[:, layer.z_offset : layer.a_offset] = kernels.act(np.full((2, heads * D), 40.0))
    conv, state = make_state(kernels, rng, layer, 1)
    got = run_step(kernels, layer, proj, conv, state)
    check_step((got[0][0], got[1][0], *got[2:]), layer, proj, conv[0], state[0])
    o = wide(got[2]).reshape(2, heads, PARTS, -1) / 40.0  # silu(40) = 40
    close(got[3], (o * o).sum(3), (1, 2), 2e-5 if kernels.exact else 4e-3)


def test_step_slots(kernels: Kernels) -> None:
    """Rows of several slots, runs of unequal length, fewer valid rows than the launch has: each
    slot is as if alone, the slot without rows and the rows past the last are left alone."""
    rng = np.random.default_rng(3)
    layer = make_layer(rng, 1, 2)
    slots = [2, 2, 2, 0, 4, 4, 1, 1]
    proj = make_rows(kernels, rng, layer, len(slots))
    conv, state = make_state(kernels, rng, layer, 5)
    got = run_step(kernels, layer, proj, conv, state, slots, valid=6)
    for slot in (2, 0, 4):
        rows = [r for r in range(6) if slots[r] == slot]
        part = slice(slot, slot + 1)
        alone = run_step(kernels, layer, proj[rows], conv[part], state[part])
        for whole, single in zip(got[:2], alone[:2], strict=True):
            same_bits(whole[part], single)
        for whole, single in zip(got[2:], alone[2:], strict=True):
            same_bits(whole[rows], single)
        check_step(
            (alone[0][0], alone[1][0], *alone[2:]), layer, proj[rows], conv[slot], state[slot]
        )
    for slot in (1, 3):
        assert untouched(got[0][slot]) and untouched(got[1][slot])
    assert untouched(got[2][6:]) and untouched(got[3][6:])


def test_step_verification(kernels: Kernels) -> None:
    """Without write_state the outputs are the same and no state is written."""
    rng = np.random.default_rng(4)
    layer = make_layer(rng, 1, 2)
    proj = make_rows(kernels, rng, layer, 4)
    conv, state = make_state(kernels, rng, layer, 1)
    written = run_step(kernels, layer, proj, conv, state)
    verified = run_step(kernels, layer, proj, conv, state, write=False)
    assert untouched(verified[0]) and untouched(verified[1])
    same_bits(verified[2], written[2])
    same_bits(verified[3], written[3])


def test_step_no_rows(kernels: Kernels) -> None:
    rng = np.random.default_rng(5)
    layer = make_layer(rng, 1, 1)
    proj = make_rows(kernels, rng, layer, 1)
    got = run_step(kernels, layer, proj, *make_state(kernels, rng, layer, 1), valid=0)
    assert all(untouched(x) for x in got)


def test_step_real_shape(kernels: Kernels) -> None:
    """The 35B's 16 key and 32 value heads, one token."""
    rng = np.random.default_rng(6)
    layer = make_layer(rng, 16, 32)
    proj = make_rows(kernels, rng, layer, 1)
    conv, state = make_state(kernels, rng, layer, 1)
    got = run_step(kernels, layer, proj, conv, state)
    check_step((got[0][0], got[1][0], *got[2:]), layer, proj, conv[0], state[0])


# ---- delta_out -----------------------------------------------------------------------------------
def run_out(
    kernels: Kernels,
    w: h.Weight,
    u: np.ndarray,
    sums: np.ndarray,
    x: np.ndarray,
    valid: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    rows, heads, parts = sums.shape
    p = h.params("delta_out", w=w.linear, rows=rows, heads=heads, head_parts=parts, eps=EPS)
    args = [
        In(w.codes),
        In(w.pairs),
        In(u),
        In(sums),
        InOut(x),
        Out((rows, x.shape[1] // OUT_ROWS), F32),
    ]
    y, ssq, _ = kernels.run(
        "delta_out", p, args, step=h.make_step(rows if valid is None else valid)
    )
    return y, ssq


def out_inputs(
    kernels: Kernels, rng: np.random.Generator, rows: int, heads: int, n: int, parts: int = PARTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u = kernels.act(rng.standard_normal((rows, heads * D)) * rng.uniform(0.1, 3.0, (rows, 1)))
    sums = rng.uniform(0.01, 60.0, (rows, heads, parts)).astype(F32)
    return u, sums, kernels.act(rng.standard_normal((rows, n)) * 2.0)


def check_out(
    y: np.ndarray,
    ssq: np.ndarray,
    values: np.ndarray,
    u: np.ndarray,
    sums: np.ndarray,
    x: np.ndarray,
) -> None:
    rows, heads, _ = sums.shape
    heads_u = wide(u).reshape(rows, heads, D)
    close(y, wide(x) + ref.delta_out(heads_u, sums.astype(np.float64).sum(2), values, EPS), 1)
    squares = wide(y).reshape(rows, -1, OUT_ROWS) ** 2  # of the stored values
    np.testing.assert_allclose(ssq, squares.sum(2), rtol=1e-6)


@pytest.mark.parametrize(
    "bits,group,f16",
    [(b, g, f) for b in (4, 8) for g in (32, 64, 128) for f in (False, True)] + [(16, 64, False)],
)
def test_out_formats(kernels: Kernels, bits: int, group: int, f16: bool) -> None:
    rng = np.random.default_rng(bits * group + f16)
    w = h.weight(rng, 40, 3 * D, bits, group, f16)
    u, sums, x = out_inputs(kernels, rng, 2, 3, 40)
    check_out(*run_out(kernels, w, u, sums, x), w.values[0], u, sums, x)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("heads,parts", [(1, 1), (10, 4)])
def test_out_rows_do_not_matter(kernels: Kernels, bits: int, heads: int, parts: int) -> None:
    """A row has the same bits alone and among 2 to 16; invalid rows are left alone. 10 heads: past
    one sweep of a simdgroup."""
    rng = np.random.default_rng(bits + heads)
    w = h.weight(rng, 16, heads * D, bits, 64)
    u, sums, x = out_inputs(kernels, rng, 16, heads, 16, parts)
    y, ssq = run_out(kernels, w, u, sums, x)
    check_out(y, ssq, w.values[0], u, sums, x)
    for rows, valid in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (16, 7), (2, 0)):
        part, part_ssq = run_out(kernels, w, u[:rows], sums[:rows], x[:rows], valid)
        same_bits(part[:valid], y[:valid])
        same_bits(part_ssq[:valid], ssq[:valid])
        same_bits(part[valid:], x[valid:rows])
        assert untouched(part_ssq[valid:])


def test_out_real_shape(kernels: Kernels) -> None:
    rng = np.random.default_rng(7)
    w = h.weight(rng, 2048, 32 * D, 4, 64)
    u, sums, x = out_inputs(kernels, rng, 1, 32, 2048)
    check_out(*run_out(kernels, w, u, sums, x), w.values[0], u, sums, x)


# ---- prefill -------------------------------------------------------------------------------------
@dataclass
class Prepared:
    conv_out: np.ndarray
    q: np.ndarray  # [rows, Hk, D], times 1 / sqrt(D)
    k: np.ndarray
    v: np.ndarray  # [rows, Hv, D]
    g: np.ndarray  # [rows, Hv]
    beta: np.ndarray


def run_prep(kernels: Kernels, layer: Layer, proj: np.ndarray, conv: np.ndarray) -> Prepared:
    rows, Hk, Hv = len(proj), layer.key_heads, layer.heads
    p = h.params(
        "delta_prep", rows=rows, key_heads=Hk, value_heads=Hv, proj_stride=layer.stride,
        a_offset=layer.a_offset, b_offset=layer.b_offset,
    )  # fmt: skip
    args = [
        In(proj), In(layer.conv_w), In(layer.neg_exp_a), In(layer.dt_bias), In(conv),
        kernels.out_act(*conv.shape), Out((rows, Hk, D), F32), Out((rows, Hk, D), F32),
        Out((rows, Hv, D), F32), Out((rows, Hv), F32), Out((rows, Hv), F32),
    ]  # fmt: skip
    return Prepared(*kernels.run("delta_prep", p, args))


def prep_reference(layer: Layer, proj: np.ndarray, conv: np.ndarray) -> Prepared:
    qkv, _, a, b = layer.split(wide(proj))
    mixed, carried = ref.delta_conv(qkv, layer.conv_w.astype(np.float64), wide(conv))
    q, k, v = ref.split_qkv(mixed, layer.key_heads, D, D)
    g, beta = ref.delta_gates(
        a, b, layer.neg_exp_a.astype(np.float64), layer.dt_bias.astype(np.float64)
    )
    return Prepared(carried, ref.l2_norm(q) / np.sqrt(D), ref.l2_norm(k), v, g, beta)


def run_wy(kernels: Kernels, x: Prepared) -> tuple[np.ndarray, ...]:
    """w, u, scores."""
    rows, Hv, _ = x.v.shape
    p = h.params("delta_wy", rows=rows, key_heads=x.k.shape[1], value_heads=Hv)
    args = [In(a) for a in (x.q, x.k, x.v, x.g, x.beta)]
    args += [Out((rows, Hv, D), F32), Out((rows, Hv, D), F32), Out((rows, Hv, CHUNK), F32)]
    return tuple(kernels.run("delta_wy", p, args))


def run_scan(
    kernels: Kernels, x: Prepared, wy: tuple[np.ndarray, ...], state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """state_out, o."""
    rows, Hv, _ = x.v.shape
    p = h.params("delta_scan", rows=rows, key_heads=x.k.shape[1], value_heads=Hv)
    args = [In(a) for a in (x.q, x.k, x.g, *wy, state)]
    args += [Out(state.shape, F32), Out((rows, Hv, D), F32)]
    state_out, o = kernels.run("delta_scan", p, args)
    return state_out, o


def make_prepared(
    rng: np.random.Generator, key_heads: int, heads: int, rows: int, strong: bool = False
) -> Prepared:
    """Inputs of the rule itself, correlated keys (so that T matters), decay by head; `strong`:
    tokens that wipe the state out stand between tokens of weak decay."""
    k = rng.standard_normal((rows, key_heads, D)) + rng.standard_normal((key_heads, D))
    q = rng.standard_normal((rows, key_heads, D)) + rng.standard_normal((key_heads, D))
    g = -np.geomspace(0.001, 3.0, heads) * rng.uniform(0.1, 2.0, (rows, heads))
    if strong:
        g = np.where(rng.random(g.shape) < 0.1, -rng.uniform(50.0, 400.0, g.shape), -0.01)
    return Prepared(
        np.zeros(0),
        (ref.l2_norm(q) / np.sqrt(D)).astype(F32),
        ref.l2_norm(k).astype(F32),
        (rng.standard_normal((rows, heads, D)) * 2.0).astype(F32),
        g.astype(F32),
        rng.uniform(0.05, 0.98, (rows, heads)).astype(F32),
    )


def wy_reference(x: Prepared) -> tuple[np.ndarray, ...]:
    rows, heads, _ = x.v.shape
    w, u, scores = (
        np.empty((rows, heads, D)),
        np.empty((rows, heads, D)),
        np.zeros((rows, heads, CHUNK)),
    )
    for start in range(0, rows, CHUNK):
        part = slice(start, start + CHUNK)
        for head in range(heads):
            kh = head // (heads // x.k.shape[1])
            q, k, v = (
                a.astype(np.float64) for a in (x.q[part, kh], x.k[part, kh], x.v[part, head])
            )
            G, b = (
                np.cumsum(x.g[part, head].astype(np.float64)),
                x.beta[part, head].astype(np.float64),
            )
            difference = np.where(np.tri(len(G), dtype=bool), G[:, None] - G, -np.inf)
            A = np.tril(b[:, None] * np.exp(difference) * (k @ k.T), -1)
            T = np.linalg.inv(np.eye(len(G)) + A)
            w[part, head], u[part, head] = T @ ((b * np.exp(G))[:, None] * k), T @ (b[:, None] * v)
            scores[part, head, : len(G)] = np.exp(difference) * (q @ k.T)
    return w, u, scores


def rule_reference(x: Prepared, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """state, o, token by token."""
    q, k, v, g, beta, s = (a.astype(np.float64) for a in (x.q, x.k, x.v, x.g, x.beta, state))
    o, after = ref.delta_rule(q * np.sqrt(D), k, v, g, beta, s)
    return after, o


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 17, 33, 130])
def test_prep(kernels: Kernels, rows: int) -> None:
    rng = np.random.default_rng(rows)
    layer = make_layer(rng, 2, 4)
    proj = make_rows(kernels, rng, layer, rows)
    conv = make_state(kernels, rng, layer, 1)[0][0]
    got, want = run_prep(kernels, layer, proj, conv), prep_reference(layer, proj, conv)
    same_bits(got.conv_out, np.concatenate([conv, proj[:, : layer.channels]])[-3:])
    for name in ("q", "k", "v"):
        close(getattr(got, name), getattr(want, name), 2, 1e-5)
    np.testing.assert_allclose(got.g, want.g, rtol=2e-6)
    np.testing.assert_allclose(got.beta, want.beta, rtol=2e-6)


def test_small_keys(kernels: Kernels) -> None:
    """Sums of squares of q and k around the 1e-6 that their norms add."""
    rng = np.random.default_rng(13)
    layer = make_layer(rng, 1, 2)
    proj = kernels.act(wide(make_rows(kernels, rng, layer, 3)) * 1e-4)
    conv, state = make_state(kernels, rng, layer, 1)
    conv = kernels.act(wide(conv) * 1e-4)
    got, want = run_prep(kernels, layer, proj, conv[0]), prep_reference(layer, proj, conv[0])
    for name in ("q", "k"):
        close(getattr(got, name), getattr(want, name), 2, 1e-5)
    step = run_step(kernels, layer, proj, conv, state)
    check_step((step[0][0], step[1][0], *step[2:]), layer, proj, conv[0], state[0])


def test_prep_gates_at_the_ends(kernels: Kernels) -> None:
    """a and b from -30 to 30: softplus falls to e^x and rises to x, sigmoid nears 0 and 1."""
    rng = np.random.default_rng(8)
    layer = make_layer(rng, 1, 2)
    proj = wide(make_rows(kernels, rng, layer, 121))
    proj[:, layer.a_offset : layer.b_offset + 2] = np.linspace(-30, 30, 121)[:, None]
    proj = kernels.act(proj)
    conv = make_state(kernels, rng, layer, 1)[0][0]
    got, want = run_prep(kernels, layer, proj, conv), prep_reference(layer, proj, conv)
    np.testing.assert_allclose(got.g, want.g, rtol=4e-6)
    np.testing.assert_allclose(got.beta, want.beta, rtol=4e-6)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 130])
def test_wy(kernels: Kernels, rows: int, strong: bool) -> None:
    rng = np.random.default_rng(rows)
    x = make_prepared(rng, 1, 2, rows, strong)
    w, u, scores = run_wy(kernels, x)
    want_w, want_u, want_scores = wy_reference(x)
    close(w, want_w, (0, 2))
    close(u, want_u, (0, 2))
    close(scores, want_scores, (0, 2), 1e-5)
    later = np.arange(CHUNK) > (np.arange(rows) % CHUNK)[:, None]
    assert not scores[np.broadcast_to(later[:, None], scores.shape)].any()


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 130])
def test_scan(kernels: Kernels, rows: int) -> None:
    """Alone: w, u and scores come from the reference."""
    rng = np.random.default_rng(rows)
    x = make_prepared(rng, 2, 4, rows)
    state = (rng.standard_normal((4, D, D)) * 0.3).astype(F32)
    wy = tuple(a.astype(F32) for a in wy_reference(x))
    after, o = run_scan(kernels, x, wy, state)
    want_after, want_o = rule_reference(x, state)
    close(after, want_after, (1, 2))
    close(o, want_o, (0, 2))


def check_prefill(kernels: Kernels, rows: int, key_heads: int, heads: int) -> None:
    """prep, wy and scan from the projections on, against the token-serial reference."""
    rng = np.random.default_rng(rows)
    layer = make_layer(rng, key_heads, heads)
    proj = make_rows(kernels, rng, layer, rows)
    conv, state = (a[0] for a in make_state(kernels, rng, layer, 1))
    x = run_prep(kernels, layer, proj, conv)
    after, o = run_scan(kernels, x, run_wy(kernels, x), state)
    want_after, want_o = rule_reference(prep_reference(layer, proj, conv), state)
    for got, want, axes in ((after, want_after, (1, 2)), (o, want_o, (0, 2))):
        error = np.linalg.norm(got - want, axis=axes) / np.linalg.norm(want, axis=axes)
        assert (error <= 2e-5).all(), f"relative errors by head: {error}"


def test_prefill_700(kernels: Kernels) -> None:
    check_prefill(kernels, 700, 1, 2)


def test_prefill_5000(kernels: Kernels) -> None:
    if emulated(kernels.device):
        pytest.skip("5,000 tokens take sim too long; it runs 700")
    check_prefill(kernels, 5000, 2, 4)


def test_prefill_strong_decay(kernels: Kernels) -> None:
    """Sums of hundreds with small differences behind them."""
    rng = np.random.default_rng(9)
    x = make_prepared(rng, 1, 2, 200, strong=True)
    state = (rng.standard_normal((2, D, D)) * 0.3).astype(F32)
    after, o = run_scan(kernels, x, run_wy(kernels, x), state)
    want_after, want_o = rule_reference(x, state)
    close(after, want_after, (1, 2))
    close(o, want_o, (0, 2))


def test_prefill_is_the_decode_step(kernels: Kernels) -> None:
    """130 rows at once and one after the other: the same outputs, states and carried inputs."""
    rng = np.random.default_rng(11)
    layer = make_layer(rng, 1, 2)
    layer.gain[:] = 1.0
    proj = wide(make_rows(kernels, rng, layer, 130))
    proj[:, layer.z_offset : layer.a_offset] = 40.0  # silu(40) = 40
    proj = kernels.act(proj)
    conv, state = make_state(kernels, rng, layer, 1)
    x = run_prep(kernels, layer, proj, conv[0])
    after, o = run_scan(kernels, x, run_wy(kernels, x), state[0])
    outputs = []
    for start in range(0, 130, 13):
        conv, state, u, _ = run_step(kernels, layer, proj[start : start + 13], conv, state)
        outputs.append(u)
    same_bits(conv[0], x.conv_out)
    close(after, state[0].astype(np.float64), (1, 2), 1e-5)
    u = np.concatenate(outputs).reshape(130, 2, D)
    close(u, o.astype(np.float64) * 40.0, (0, 2), 1e-5)


@pytest.mark.parametrize("rows,heads", [(1, 1), (17, 3), (5, 32)])
def test_gated_norm(kernels: Kernels, rows: int, heads: int) -> None:
    rng = np.random.default_rng(rows)
    o = (rng.standard_normal((rows, heads, D)) * rng.uniform(0.01, 5.0, (rows, heads, 1))).astype(
        F32
    )
    gain = rng.uniform(-0.5, 1.5, D).astype(F32)
    stride, z_offset = heads * D + 24, 8
    proj = kernels.act(rng.standard_normal((rows, stride)) * 3.0)
    p = h.params(
        "gated_norm", rows=rows, heads=heads, proj_stride=stride, z_offset=z_offset, eps=EPS
    )
    args = [In(o), In(proj), In(gain), kernels.out_act(rows, heads * D)]
    (y,) = kernels.run("gated_norm", p, args)
    z = wide(proj)[:, z_offset : z_offset + heads * D].reshape(o.shape)
    close(
        y.reshape(o.shape), ref.gated_norm(o.astype(np.float64), z, gain.astype(np.float64), EPS), 2
    )


# ---- what is refused -----------------------------------------------------------------------------
STEP = dict(
    rows=1, key_heads=1, value_heads=2, proj_stride=776, z_offset=512, a_offset=768, b_offset=770,
    head_parts=PARTS, write_state=1, slots=1,
)  # fmt: skip
PREP = dict(rows=1, key_heads=1, value_heads=2, proj_stride=776, a_offset=768, b_offset=770)


@pytest.mark.parametrize(
    "op,values,message",
    [
        ("delta_step", STEP | {"rows": 17}, "17 rows, supported 1 to 16"),
        ("delta_step", STEP | {"rows": 0}, "0 rows"),
        ("delta_step", STEP | {"key_heads": 3}, "2 value heads are no multiple of 3"),
        ("delta_step", STEP | {"key_heads": 0}, "no multiple of 0"),
        ("delta_step", STEP | {"proj_stride": 774}, "rows of 774"),
        ("delta_step", STEP | {"z_offset": 648}, "z at columns 648 to 904 of rows of 776"),
        ("delta_step", STEP | {"b_offset": 775}, "b at columns 775 to 777 of rows of 776"),
        ("delta_step", STEP | {"a_offset": 2**32 - 1}, "a at columns 4294967295"),
        ("delta_step", STEP | {"head_parts": 3}, "3 partial sums per head, makes 4"),
        ("delta_step", STEP | {"slots": 0}, "0 slots"),
        ("delta_prep", PREP | {"rows": 0}, "0 rows"),
        ("delta_prep", PREP | {"value_heads": 5}, "q, k, v at columns 0 to 896 of rows of 776"),
        ("delta_wy", dict(rows=0, key_heads=1, value_heads=2), "0 rows"),
        ("delta_scan", dict(rows=1, key_heads=2, value_heads=3), "3 value heads"),
        ("gated_norm", dict(rows=1, heads=2, proj_stride=256, z_offset=2, eps=EPS), "column 2"),
        ("gated_norm", dict(rows=1, heads=2, proj_stride=256, z_offset=4, eps=EPS), "4 to 260"),
        ("delta_out", dict(w=h.linear(16, 256), rows=1, heads=3, head_parts=4, eps=EPS), "3 heads"),
        (
            "delta_out",
            dict(w=h.linear(12, 256), rows=1, heads=2, head_parts=4, eps=EPS),
            "12 outputs",
        ),
        (
            "delta_out",
            dict(w=h.linear(16, 256), rows=1, heads=2, head_parts=0, eps=EPS),
            "0 partial",
        ),
    ],
)
def test_refused(op: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(_core.LilyError, match=message):
        Kernels("cpu", True).run(op, h.params(op, **values), [])


def test_short_tensor_is_refused() -> None:
    """A buffer that is smaller than the launch would touch is named with both numbers."""
    rng = np.random.default_rng(12)
    kernels = Kernels("cpu", True)
    x = make_prepared(rng, 1, 2, 5)
    x.k = x.k[:4]
    with pytest.raises(_core.LilyError, match="delta_wy: k has 512 values, needs 640"):
        run_wy(kernels, x)
