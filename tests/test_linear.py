"""project, matmul, expert_matmul and rms_norm on every device against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernel_harness as h
import reference as ref
from conftest import require_device
from kernel_harness import In, InOut, Kernels, Out, emulated
from lily import _core

FORMATS = [(b, g, f16) for b in (4, 8) for g in (32, 64, 128) for f16 in (False, True)]
FORMATS += [(16, 64, False)]
ids = [f"q{b}g{g}{'f16' if f else 'bf16'}" for b, g, f in FORMATS]
all_formats = pytest.mark.parametrize("bits,group,f16", FORMATS, ids=ids)
MODES = {"act": 0, "f32": 1, "add": 2, "swiglu": 3}
EPS = 1e-6


def close(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """fp32 results to 2e-5 of the output's scale; bf16 ones to 1 ulp of the value beyond that."""
    assert got.shape == want.shape
    scale = np.sqrt((want * want).mean())
    bound = 2e-5 * scale + (2.0**-8 * np.abs(want) if got.dtype == np.uint16 else 0.0)
    error = np.abs(h.from_act(got).astype(np.float64) - want)
    bad = ~(error <= bound)  # NaN is bad too
    assert not bad.any(), f"{what}: {bad.sum()} of {bad.size} off, first at {np.argwhere(bad)[0]}"


def poison(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    whole = np.empty(shape, dtype)
    whole.view(np.uint8)[...] = 0xFF
    return whole


def untouched(got: np.ndarray) -> bool:
    return bool((got.view(np.uint8) == 0xFF).all())


def vectors(kernels: Kernels, rng: np.random.Generator, *shape: int) -> tuple[Any, np.ndarray]:
    """Random activations: as stored, and the float64 values that a kernel reads."""
    x = rng.standard_normal(shape) * rng.uniform(0.5, 2.0, (*shape[:-1], 1)) + 0.1
    return kernels.act(x), kernels.rounded(x)


def raw_weight(rng: np.random.Generator, n: int, k: int, bits: int = 4) -> h.Weight:
    """A big matrix as words only, group 64; rows() makes the float64 values of a few rows."""
    codes = rng.integers(0, 2**32, n * k * bits // 32, dtype=np.uint32)
    s = rng.choice([-1.0, 1.0], n * k // 64) * rng.uniform(0.5, 1.5, n * k // 64) / np.sqrt(k) / 4
    b = rng.standard_normal(s.shape) / np.sqrt(k)
    pairs = h.bf16(s).astype(np.uint32) | (h.bf16(b).astype(np.uint32) << 16)
    return h.Weight(codes, pairs, np.zeros(0), h.linear(n, k, bits, 64))


def rows_of(w: h.Weight, which: np.ndarray) -> np.ndarray:
    k, bits = w.linear.k, w.linear.bits
    pairs = w.pairs.reshape(-1, k // 64)[which]
    scales, biases = ref.from_bf16(pairs & 0xFFFF), ref.from_bf16(pairs >> 16)
    return ref.dequantize(w.codes.reshape(-1, k * bits // 32)[which], scales, biases, bits, 64)


# ---- project -----------------------------------------------------------------------------------
def run_project(
    kernels: Kernels,
    w: h.Weight,
    x: np.ndarray,
    gain: np.ndarray,
    valid: int | None = None,
    f32: bool = False,
    parts: int = 1,
    stride: int | None = None,
    offset: int = 0,
) -> np.ndarray:
    rows, k = x.shape
    squares = h.from_act(x).astype(np.float64) ** 2
    cuts = np.linspace(0, k, parts + 1).astype(int)[:-1]
    ssq = np.add.reduceat(squares, cuts, axis=1).astype(np.float32)
    stride = stride or w.linear.n
    p = h.params(
        "project",
        w=w.linear,
        rows=rows,
        ssq_parts=parts,
        y_stride=stride,
        y_offset=offset,
        out_f32=int(f32),
        eps=EPS,
    )
    y = Out(((rows - 1) * stride + offset + w.linear.n,), np.float32 if f32 else kernels.act_dtype)
    args = [In(w.codes), In(w.pairs), In(x), In(gain), In(ssq), y]
    flat, _ = kernels.run("project", p, args, step=h.make_step(rows if valid is None else valid))
    whole = poison(rows * stride, flat.dtype)
    whole[: flat.size] = flat
    return whole.reshape(rows, stride)


@all_formats
def test_project_formats(kernels: Kernels, bits: int, group: int, f16: bool) -> None:
    """Ragged n, several rows, a column range inside longer rows; the rest is left alone."""
    rng = np.random.default_rng(bits * group + f16)
    w = h.weight(rng, 37, 384, bits, group, f16)
    gain = rng.uniform(0.5, 1.5, 384).astype(np.float32)
    x, xv = vectors(kernels, rng, 3, 384)
    y = run_project(kernels, w, x, gain, parts=5, stride=50, offset=9)
    assert untouched(y[:, :9]) and untouched(y[:, 46:])
    close(np.ascontiguousarray(y[:, 9:46]), ref.project(xv, w.values[0], gain.astype(float), EPS))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_project_rows_do_not_matter(kernels: Kernels, bits: int) -> None:
    """A row's result is the same bits alone and among 2 to 16, and for fewer valid rows than the
    launch has; k is past one sweep of a simdgroup and ends in the middle of a sweep."""
    rng = np.random.default_rng(bits)
    w = h.weight(rng, 35, 1024 + 448, bits, 64)
    gain = rng.uniform(0.5, 1.5, w.linear.k).astype(np.float32)
    x, xv = vectors(kernels, rng, 16, w.linear.k)
    alone = np.concatenate(
        [run_project(kernels, w, x[i : i + 1], gain, f32=True) for i in range(16)]
    )
    close(alone, ref.project(xv, w.values[0], gain.astype(float), EPS))
    for rows in (2, 3, 4, 5, 16):
        y = run_project(kernels, w, x[:rows], gain, f32=True)
        np.testing.assert_array_equal(y.view(np.uint32), alone[:rows].view(np.uint32))
    for rows, valid in ((16, 6), (5, 4), (3, 1), (1, 0)):
        y = run_project(kernels, w, x[:rows], gain, f32=True, valid=valid)
        np.testing.assert_array_equal(y[:valid].view(np.uint32), alone[:valid].view(np.uint32))
        assert untouched(y[valid:])


@pytest.mark.parametrize("k", [64, 128, 192, 320, 512, 2048, 4096])
def test_project_k(kernels: Kernels, k: int) -> None:
    """Every tail of k, and few columns of k that would hide in a sum of thousands."""
    rng = np.random.default_rng(k)
    w = h.weight(rng, 21, k, 4, 64)
    gain = rng.uniform(0.5, 1.5, k).astype(np.float32)
    _, xv = vectors(kernels, rng, 2, k)
    xv[0] *= 1e-3  # where eps counts
    x, xv = kernels.act(xv), kernels.rounded(xv)
    y = run_project(kernels, w, x, gain, f32=True, parts=3)
    close(y, ref.project(xv, w.values[0], gain.astype(float), EPS))


@pytest.mark.parametrize("bits", [4, 16])
def test_project_reads_weights_once_on_sim(bits: int) -> None:
    """Each weight once per 4 valid rows: rows past the last cost nothing."""
    require_device("sim")
    kernels, rng = Kernels("sim", False), np.random.default_rng(bits)
    w = h.weight(rng, 48, 2048, bits, 64)
    x, _ = vectors(kernels, rng, 16, 2048)
    gain = np.ones(2048, np.float32)
    for rows, valid, sweeps in ((1, 1, 1), (4, 4, 1), (16, 4, 1), (16, 1, 1), (16, 5, 2)):
        run_project(kernels, w, x[:rows], gain, valid)
        # A threadgroup of 16 weight rows reads its rows of x, and the gain for each.
        once = w.codes.nbytes + w.pairs.nbytes + 48 // 16 * 2048 * (4 if rows > 1 else 1) * (2 + 4)
        assert sweeps * once <= kernels.bytes_read <= sweeps * once * 1.1


def test_project_real_shape(kernels: Kernels) -> None:
    """The stacked projections of a DeltaNet layer of the 35B: qkv | z | a | b."""
    rng = np.random.default_rng(5)
    n, k = 8192 + 4096 + 32 + 32, 2048
    w = raw_weight(rng, n, k)
    gain = rng.uniform(0.5, 1.5, k).astype(np.float32)
    x, xv = vectors(kernels, rng, 1, k)
    some = np.append(rng.choice(n, 500), [0, n - 1])
    y = run_project(kernels, w, x, gain)
    assert not np.isnan(h.from_act(y)).any()
    close(y[:, some], ref.project(xv, rows_of(w, some), gain.astype(float), EPS))


def test_project_head(kernels: Kernels) -> None:
    """The 35B's head, 248,320 rows, logits in fp32."""
    if emulated(kernels.device):
        pytest.skip("254 MB of codes are past sim's time")
    rng = np.random.default_rng(6)
    n, k = 248320, 2048
    w = raw_weight(rng, n, k)
    gain = rng.uniform(0.5, 1.5, k).astype(np.float32)
    x, xv = vectors(kernels, rng, 1, k)
    some = np.append(rng.choice(n, 500), [0, n - 1])
    y = run_project(kernels, w, x, gain, f32=True)
    assert not np.isnan(y).any()
    close(y[:, some], ref.project(xv, rows_of(w, some), gain.astype(float), EPS))


# ---- rms_norm ----------------------------------------------------------------------------------
@pytest.mark.parametrize("rows,k", [(1, 64), (5, 192), (17, 2048), (2, 4096 + 64)])
def test_rms_norm(kernels: Kernels, rows: int, k: int) -> None:
    rng = np.random.default_rng(rows)
    _, xv = vectors(kernels, rng, rows, k)
    xv[0] *= 1e-3  # where eps counts
    x, xv = kernels.act(xv), kernels.rounded(xv)
    gain = rng.uniform(-1.5, 1.5, k).astype(np.float32)
    p = h.params("rms_norm", rows=rows, k=k, eps=EPS)
    (y,) = kernels.run("rms_norm", p, [In(x), In(gain), kernels.out_act(rows, k)])
    close(y, ref.rms_norm(xv, gain.astype(float), EPS))


# ---- matmul ------------------------------------------------------------------------------------
def swiglu_rows(y: np.ndarray) -> np.ndarray:
    """Gate and up of interleaved outputs."""
    return ref.swiglu(y[..., 0::2], y[..., 1::2])


def check_matmul(
    kernels: Kernels, w: h.Weight, rows: int, mode: str, seed: int, stride: int, offset: int
) -> None:
    rng = np.random.default_rng(seed)
    x, xv = vectors(kernels, rng, rows, w.linear.k)
    want = ref.linear(xv, w.values[0])
    columns = w.linear.n // 2 if mode == "swiglu" else w.linear.n
    p = h.params(
        "matmul", w=w.linear, rows=rows, y_stride=stride, y_offset=offset, mode=MODES[mode]
    )
    size = (rows - 1) * stride + offset + columns
    inside = np.zeros(rows * stride, bool).reshape(rows, stride)
    inside[:, offset : offset + columns] = True
    inside = inside.reshape(-1)[:size]
    y: Out | InOut = Out((size,), np.float32 if mode == "f32" else kernels.act_dtype)
    if mode == "add":
        old, oldv = vectors(kernels, rng, rows, stride)
        y = InOut(old.reshape(-1)[:size])
        want = want + oldv[:, offset : offset + columns]
    if mode == "swiglu":
        want = swiglu_rows(want)
    (got,) = kernels.run("matmul", p, [In(w.codes), In(w.pairs), In(x), y])
    if isinstance(y, InOut):
        np.testing.assert_array_equal(got[~inside], y.array[~inside])
    else:
        assert untouched(got[~inside])
    close(got[inside].reshape(rows, columns), want, f"matmul {mode}")


@all_formats
def test_matmul_formats(kernels: Kernels, bits: int, group: int, f16: bool) -> None:
    rng = np.random.default_rng(bits * group + f16)
    w = h.weight(rng, 72, 256 if group == 128 else 192, bits, group, f16)
    mode = list(MODES)[(bits // 4 + group // 32 + f16) % 4]
    check_matmul(kernels, w, 5, mode, group, 80, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 65])
def test_matmul_rows(kernels: Kernels, rows: int, mode: str) -> None:
    """Row counts around the tiles of 16; the last tile of outputs is ragged."""
    w = h.weight(np.random.default_rng(rows), 130, 128, 4, 64)
    check_matmul(kernels, w, rows, mode, rows, 131, 1)


@pytest.mark.parametrize("bits,group", [(4, 32), (4, 64), (8, 64), (16, 64)])
@pytest.mark.parametrize("rows", [33, 60, 65, 100])
def test_matmul_tiles(kernels: Kernels, rows: int, bits: int, group: int) -> None:
    """128 tiles or more have 32 rows, or 64: 32 + 1, 32 + 28, 64 + 1, 64 + 36 rows here."""
    w = h.weight(np.random.default_rng(rows), 64 * 128 - 2, 64, bits, group)
    check_matmul(kernels, w, rows, "act", rows, 64 * 128, 1)


@pytest.mark.parametrize("n", [1, 7, 63, 64, 65])
def test_matmul_n(kernels: Kernels, n: int) -> None:
    w = h.weight(np.random.default_rng(n), n, 128, 8, 32)
    check_matmul(kernels, w, 33, "act", n, n, 0)
    if n % 2 == 0:
        check_matmul(kernels, w, 33, "swiglu", n, n // 2, 0)


@pytest.mark.parametrize(
    "n,k,mode",
    [(2048, 4096, "add"), (1024, 2048, "swiglu"), (2048, 512, "act"), (257, 2048, "f32")],
)
def test_matmul_real_shapes(kernels: Kernels, n: int, k: int, mode: str) -> None:
    """Out projection, shared gate and up, shared down, router and shared gate of the 35B."""
    if emulated(kernels.device) and n * k > 2**20:
        pytest.skip("more than a million weights are past sim's time")
    w = h.weight(np.random.default_rng(n), n, k, 8 if n == 257 else 4, 64)
    rows = 17 if emulated(kernels.device) else 129
    check_matmul(kernels, w, rows, mode, n, n // 2 if mode == "swiglu" else n, 0)


# ---- expert_matmul -----------------------------------------------------------------------------
def group_pairs(chosen: np.ndarray, experts: int, tile: int) -> tuple[np.ndarray, ...]:
    """order, offsets and the tile list of experts chosen [rows, top_k] and of the shared one, number
    `experts`; unused tiles are poison."""
    flat = np.concatenate([chosen.reshape(-1), np.full(len(chosen), experts)])
    order = np.argsort(flat, kind="stable").astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts + 1))])
    tiles = [(e, at) for e in range(experts + 1) for at in range(offsets[e], offsets[e + 1], tile)]
    listed = np.full(1 + 2 * (flat.size // tile + experts + 1), 0xFFFFFFFF, np.uint32)
    listed[0] = len(tiles)
    listed[1 : 1 + 2 * len(tiles)] = np.array(tiles).reshape(-1)
    return order, offsets.astype(np.uint32), listed


def choose(rng: np.random.Generator, rows: int, experts: int, top_k: int) -> np.ndarray:
    """Distinct experts of each row; expert 1 is in nearly all of them, expert 2 in none."""
    liking = rng.random((rows, experts))
    liking[:, 1] += 0.9
    if experts > top_k:
        liking[:, 2 % experts] = -1.0
    return np.argsort(-liking, axis=1)[:, :top_k]


def run_experts(
    kernels: Kernels,
    w: h.Weight,
    own: h.Weight | None,
    x: np.ndarray,
    chosen: np.ndarray,
    tile: int,
    swiglu: bool,
) -> np.ndarray:
    """Outputs of the routed pairs, then of the shared expert, whose weight is `own`, if it takes part.
    x: [rows, k], or in plain products a row for each of the pairs."""
    rows, top_k = chosen.shape
    order, offsets, tiles = group_pairs(chosen, len(w.values), tile)
    p = h.params(
        "expert_matmul",
        w=w.linear,
        rows=rows,
        experts=len(w.values),
        top_k=top_k,
        tile=tile,
        swiglu=int(swiglu),
        shared=int(own is not None),
    )
    pairs = rows * (top_k + (own is not None))
    out = kernels.out_act(pairs, w.linear.n // 2 if swiglu else w.linear.n)
    own_codes: list[h.Argument] = [None, None] if own is None else [In(own.codes), In(own.pairs)]
    lists = [In(order), In(offsets), In(tiles)]
    args = [In(w.codes), In(w.pairs), *own_codes, In(x), *lists, out]
    (y,) = kernels.run("expert_matmul", p, args)
    return y


def check_experts(
    kernels: Kernels,
    rng: np.random.Generator,
    w: h.Weight,
    own: h.Weight | None,
    rows: int,
    top_k: int,
    tile: int,
    swiglu: bool,
) -> None:
    chosen = choose(rng, rows, len(w.values), top_k)
    pairs = rows * top_k
    count = rows if swiglu else pairs + (rows if own else 0)
    x, xv = vectors(kernels, rng, count, w.linear.k)
    routed = np.repeat(xv, top_k, axis=0) if swiglu else xv[:pairs]
    want = np.einsum("pk,pnk->pn", routed, w.values[chosen.reshape(-1)])
    if own:
        want = np.concatenate([want, xv[-rows:] @ own.values[0].T])
    y = run_experts(kernels, w, own, x, chosen, tile, swiglu)
    close(y, swiglu_rows(want) if swiglu else want)


@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "plain"])
@all_formats
def test_expert_formats(kernels: Kernels, bits: int, group: int, f16: bool, swiglu: bool) -> None:
    rng = np.random.default_rng(bits * group + f16)
    w = h.weight(rng, 68, 128, bits, group, f16, experts=4)
    own = h.weight(rng, 68, 128, bits, group, f16)
    check_experts(kernels, rng, w, own, 9, 2, 64, swiglu)


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("rows", [1, 17, 70, 200])
def test_expert_tiles(kernels: Kernels, rows: int, tile: int) -> None:
    """Experts with no pair, one, and more than a tile; ragged n."""
    rng = np.random.default_rng(rows + tile)
    w, own = h.weight(rng, 66, 64, 4, 32, experts=7), h.weight(rng, 66, 64, 4, 32)
    check_experts(kernels, rng, w, own, rows, 3, tile, True)


@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "plain"])
def test_experts_without_the_shared_one(kernels: Kernels, swiglu: bool) -> None:
    """Its tiles are in the list and left out: y ends before its rows."""
    rng = np.random.default_rng(8)
    w = h.weight(rng, 66, 64, 4, 32, experts=6)
    check_experts(kernels, rng, w, None, 70, 3, 16, swiglu)


@pytest.mark.parametrize("swiglu", [True, False], ids=["up", "down"])
def test_expert_real_shapes(kernels: Kernels, swiglu: bool) -> None:
    """256 experts of the 35B, top-8, with 64 rows."""
    if emulated(kernels.device):
        pytest.skip("hundreds of MB of codes are past sim's time")
    rng = np.random.default_rng(9)
    rows, experts, top_k = 64, 256, 8
    n, k = (1024, 2048) if swiglu else (2048, 512)
    w = raw_weight(rng, experts * n, k)
    w.linear.n = n
    w.values = np.zeros((experts, 0, 0))  # far too many to be unpacked
    own = h.weight(rng, n, k)
    chosen = choose(rng, rows, experts, top_k)
    x, xv = vectors(kernels, rng, rows if swiglu else rows * (top_k + 1), k)
    y = run_experts(kernels, w, own, x, chosen, 64, swiglu)
    want = xv[-rows:] @ own.values[0].T
    close(y[-rows:], swiglu_rows(want) if swiglu else want)
    assert not np.isnan(h.from_act(y)).any()
    some = rng.choice(rows * top_k, 12)
    which = chosen.reshape(-1)[some][:, None] * n + np.arange(n)
    values = rows_of(w, which.reshape(-1)).reshape(len(some), n, k)
    want = np.einsum("pk,pnk->pn", xv[some // top_k if swiglu else some], values)
    close(y[some], swiglu_rows(want) if swiglu else want)


def test_expert_far_offsets(kernels: Kernels) -> None:
    """An expert behind 2^31 codes and 2^32 bytes; only it and the first have memory."""
    rng = np.random.default_rng(10)
    n, k, experts, last = 1024, 8192, 520, 519
    two = h.weight(rng, n, k, 8, 64, experts=2)
    code_bytes, pair_bytes = n * k, n * k // 64 * 4
    assert last * code_bytes > 2**32
    core = kernels.core
    codes = core.buffer(experts * code_bytes, "sparse codes")
    pairs = core.buffer(experts * pair_bytes, "sparse pairs")
    for at, part in ((0, 0), (last, 1)):
        codes.write(at * code_bytes, two.codes.reshape(2, -1)[part].view(np.uint8))
        pairs.write(at * pair_bytes, two.pairs.reshape(2, -1)[part].view(np.uint8))
    x, xv = vectors(kernels, rng, 3, k)
    chosen = np.array([[0], [last], [last]])
    lists = group_pairs(chosen, experts, 64)
    sizes = {"rows": 3, "experts": experts, "top_k": 1, "tile": 64}
    p = h.params("expert_matmul", w=two.linear, swiglu=0, shared=0, **sizes)
    none = core.buffer(16, "none")
    views = [
        (codes, 0, experts * code_bytes // 4, "u32"),
        (pairs, 0, experts * pair_bytes // 4, "u32"),
        *[(none, 0, 0, "u32")] * 2,
    ]
    name = "f32" if kernels.exact else "bf16"
    for array in (x, *lists):
        kind = name if array.dtype == kernels.act_dtype else "u32"
        views.append((kernels.place(array), h.GUARD, array.size, kind))
    got = poison((3, n), kernels.act_dtype)
    out = kernels.place(got)
    core.run(
        [
            (
                "expert_matmul",
                np.frombuffer(bytes(p), np.uint8),
                [*views, (out, h.GUARD, got.size, name)],
                [],
                [],
            )
        ]
    )
    want = np.stack([two.values[i] @ v for i, v in zip((0, 1, 1), xv, strict=True)])
    close(kernels.fetch(out, got), want)


# ---- refusals ----------------------------------------------------------------------------------
def refused(kernels: Kernels, op: str, says: str, args: list[Any], **values: Any) -> None:
    step = h.make_step(1) if op == "project" else None
    with pytest.raises(_core.LilyError, match=says):
        kernels.run(op, h.params(op, **values), args, step=step)


def test_refusals_name_both_numbers() -> None:
    kernels = Kernels("cpu", True)
    w = h.weight(np.random.default_rng(0), 8, 128, 4, 64)
    x, gain, ssq = np.ones((1, 128), np.float32), np.ones(128, np.float32), np.ones(1, np.float32)
    project = {
        "w": w.linear,
        "rows": 1,
        "ssq_parts": 1,
        "y_stride": 8,
        "y_offset": 0,
        "out_f32": 1,
        "eps": EPS,
    }
    args = [In(w.codes), In(w.pairs), In(x), In(gain), In(ssq), Out((1, 8), np.float32)]
    refused(kernels, "project", "17 rows, supported 1 to 16", args, **{**project, "rows": 17})
    refused(kernels, "project", "columns 1 to 9 of rows of 8", args, **{**project, "y_offset": 1})
    short = [*args[:2], In(x[:, :64].copy()), *args[3:]]
    refused(kernels, "project", "x has 64 values, needs 128", short, **project)
    matmul = {"w": w.linear, "rows": 1, "y_stride": 8, "y_offset": 0, "mode": 0}
    args = [In(w.codes), In(w.pairs), In(x), Out((1, 8), np.float32)]
    refused(kernels, "matmul", "mode 4, the last one is 3", args, **{**matmul, "mode": 4})
    for k, group, says in (
        (96, 32, "k must be a multiple of 64"),
        (192, 128, "192 is no multiple"),
    ):
        bad = h.linear(8, k, 4, group)
        refused(kernels, "matmul", says, args, **{**matmul, "w": bad})
    refused(
        kernels,
        "matmul",
        "5 bits, supported 4, 8, 16",
        args,
        **{**matmul, "w": h.linear(8, 128, 5, 64)},
    )
    odd = h.linear(7, 128, 4, 64)
    refused(kernels, "matmul", "n is 7", args, **{**matmul, "w": odd, "mode": 3})
    experts = {"w": w.linear, "rows": 1, "experts": 2, "top_k": 1, "tile": 64, "swiglu": 0}
    for says, change in (
        ("65 pairs, supported 1 to 64", {"tile": 65}),
        ("top-k 3, supported 1 to 16 of 2 experts", {"top_k": 3}),
        ("1 experts, supported 2 to 1024", {"experts": 1}),
        ("n is 7", {"w": odd, "swiglu": 1}),
        ("up to 65539 tiles, supported 65535", {"rows": 32768, "tile": 1}),
    ):
        refused(kernels, "expert_matmul", says, [], **{**experts, "shared": 1, **change})
    refused(kernels, "rms_norm", "rows of 100 values", [], rows=1, k=100, eps=EPS)
