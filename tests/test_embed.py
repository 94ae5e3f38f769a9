"""Rows of the token table and plain copies against numpy."""

from __future__ import annotations

import numpy as np
import pytest

import reference
from kernel_harness import In, Kernels, Out, params, weight
from lily import LilyError


@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "group", "f16"),
    [
        (1, 300, 2048, 4, 64, False),
        (2, 50, 2112, 4, 32, False),
        (5, 33, 128, 4, 128, True),
        (17, 20, 192, 8, 64, True),
        (4, 20, 4096, 8, 128, False),
        (3, 20, 64, 8, 32, True),
        (16, 20, 320, 16, 64, False),
    ],
)
def test_embed(
    kernels: Kernels, rows: int, n: int, k: int, bits: int, group: int, f16: bool
) -> None:
    rng = np.random.default_rng(k)
    w = weight(rng, n, k, bits, group, f16)
    ids = rng.integers(0, n, rows).astype(np.uint32)
    ids[-1] = n - 1
    x, ssq = kernels.run(
        "embed",
        params("embed", w=w.linear, rows=rows),
        [In(w.codes), In(w.pairs), In(ids), kernels.out_act(rows, k), Out((rows,), np.float32)],
    )
    want = reference.embed(ids, w.values[0])
    if kernels.exact:
        assert np.allclose(x, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    else:
        error = np.abs(reference.from_bf16(x) - want)
        assert (error <= 2.0**-8 * np.abs(want) + 1e-6 * np.abs(want).max()).all()
    stored = x.astype(np.float64) if kernels.exact else reference.from_bf16(x)
    assert np.allclose(ssq, (stored**2).sum(1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 16])
def test_ids_past_the_table_give_nan(kernels: Kernels, bits: int) -> None:
    w = weight(np.random.default_rng(1), 10, 128, bits)
    ids = np.array([9, 10, 0xFFFFFFFF], np.uint32)
    x, ssq = kernels.run(
        "embed",
        params("embed", w=w.linear, rows=3),
        [In(w.codes), In(w.pairs), In(ids), kernels.out_act(3, 128), Out((3,), np.float32)],
    )
    values = x if kernels.exact else (x.astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values[0]).all() and np.isnan(values[1:]).all()
    assert np.isfinite(ssq[0]) and np.isnan(ssq[1:]).all()


@pytest.mark.parametrize("size", [4, 16, 52, 4096, 16384, 16388, 200_000])
def test_copy_bytes(kernels: Kernels, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 2**32, size // 4, dtype=np.uint32)
    (got,) = kernels.run(
        "copy_bytes", params("copy_bytes", bytes=size), [In(data), Out(data.shape, np.uint32)]
    )
    assert (got == data).all()


def test_plans_refuse() -> None:
    k = Kernels("cpu", True)
    w = weight(np.random.default_rng(1), 10, 128)
    w.linear.k = 100
    with pytest.raises(LilyError, match=r"matrix \[10, 100\], k must be a multiple of 64"):
        k.run("embed", params("embed", w=w.linear, rows=1), [None] * 5)
    with pytest.raises(LilyError, match="22 bytes, need a multiple of 4"):
        k.run("copy_bytes", params("copy_bytes", bytes=22), [None] * 2)
