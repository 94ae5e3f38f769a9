"""Prefill kernels at 4,096 rows and the 35B's widths on a GPU, against sampled float64 outputs."""

from __future__ import annotations

import numpy as np
import pytest

import kernel_harness as h
from conftest import require_device
from kernel_harness import In, InOut, Kernels
from test_linear import choose, group_pairs

ROWS, SAMPLES = 4096, 400


@pytest.fixture(params=[True, False], ids=["exact", "bf16"])
def card(request: pytest.FixtureRequest) -> Kernels:
    require_device("cuda")
    return Kernels("cuda", request.param)


def _samples(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Random places, and the corners where tiles are ragged."""
    r, c = rng.integers(0, rows, SAMPLES), rng.integers(0, columns, SAMPLES)
    r[:4], c[:4] = [0, 0, rows - 1, rows - 1], [0, columns - 1, 0, columns - 1]
    return r, c


def _check(kernels: Kernels, got: np.ndarray, want: np.ndarray, scale: float) -> None:
    """Exact: 2e-5 of the outputs' scale. bf16: one rounding of the result on top."""
    bound = 2e-5 * scale + (0 if kernels.exact else 2**-8 * np.abs(want))
    assert np.all(np.abs(h.from_act(got).astype(np.float64) - want) <= bound)


@pytest.mark.parametrize("mode", ["act", "f32", "add", "swiglu"])
def test_matmul_of_4096_rows(card: Kernels, mode: str) -> None:
    rng = np.random.default_rng(1)
    n, k = (12352, 2048) if mode in ("act", "f32") else (2048, 4096)
    w = h.weight(rng, n, k, 4, 64)
    x = card.act(rng.standard_normal((ROWS, k)))
    old = card.act(rng.standard_normal((ROWS, n)))
    columns = n // 2 if mode == "swiglu" else n
    number = {"act": 0, "f32": 1, "add": 2, "swiglu": 3}[mode]
    p = h.params("matmul", w=w.linear, rows=ROWS, y_stride=columns, y_offset=0, mode=number)
    y = {"f32": h.Out((ROWS, n), np.float32), "add": InOut(old)}.get(
        mode, card.out_act(ROWS, columns)
    )
    (got,) = card.run("matmul", p, [In(w.codes), In(w.pairs), In(x), y])
    r, c = _samples(rng, ROWS, columns)
    xs = h.from_act(x)[r].astype(np.float64)
    if mode == "swiglu":
        gate = (xs * w.values[0][2 * c]).sum(-1)
        want = gate / (1 + np.exp(-gate)) * (xs * w.values[0][2 * c + 1]).sum(-1)
    else:
        want = (xs * w.values[0][c]).sum(-1)
    if mode == "add":
        want += h.from_act(old)[r, c]
    assert np.isfinite(h.from_act(got)).all()
    if mode == "f32":
        assert np.abs(got[r, c] - want).max() <= 2e-5
    else:
        _check(card, got[r, c], want, 1.0)


@pytest.mark.parametrize("swiglu", [True, False], ids=["up", "down"])
def test_experts_of_4096_rows(card: Kernels, swiglu: bool) -> None:
    rng = np.random.default_rng(2)
    experts, top_k = 32, 8
    n, k = (1024, 2048) if swiglu else (2048, 512)
    w = h.weight(rng, n, k, 4, 64, experts=experts)
    chosen = choose(rng, ROWS, experts, top_k)
    order, offsets, tiles = group_pairs(chosen, experts, 64)
    pairs = ROWS * (top_k + 1)  # the shared expert's weights are expert 0's
    x = card.act(rng.standard_normal((ROWS if swiglu else pairs, k)))
    p = h.params(
        "expert_matmul",
        w=w.linear,
        rows=ROWS,
        experts=experts,
        top_k=top_k,
        tile=64,
        swiglu=int(swiglu),
        shared=1,
    )
    columns = n // 2 if swiglu else n
    args = [
        In(w.codes),
        In(w.pairs),
        In(w.codes[: w.codes.size // experts]),
        In(w.pairs[: w.pairs.size // experts]),
        In(x),
        In(order),
        In(offsets),
        In(tiles),
        card.out_act(pairs, columns),
    ]
    (got,) = card.run("expert_matmul", p, args)
    assert np.isfinite(h.from_act(got)).all()
    r, c = _samples(rng, pairs, columns)
    shared = r >= ROWS * top_k
    row = np.where(shared, r - ROWS * top_k, r // top_k)
    xs = h.from_act(x)[row if swiglu else r].astype(np.float64)
    e = np.where(shared, 0, chosen.reshape(-1)[np.minimum(r, ROWS * top_k - 1)])
    if swiglu:
        gate = (xs * w.values[e, 2 * c]).sum(-1)
        want = gate / (1 + np.exp(-gate)) * (xs * w.values[e, 2 * c + 1]).sum(-1)
    else:
        want = (xs * w.values[e, c]).sum(-1)
    _check(card, got[r, c], want, 1.0)
