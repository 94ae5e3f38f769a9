"""attn_step, attn_combine, attn_out, qkv_rope and flash on every device against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kernel_harness as h
import reference as ref
from conftest import require_device
from kernel_harness import In, InOut, Kernels, Out
from lily import _core

D, BLOCK, PARTIAL = h.CONST["LILY_HEAD_DIM"], h.CONST["LILY_KV_BLOCK"], h.CONST["LILY_PARTIAL"]
SPLIT = h.CONST["LILY_SPLIT"]
EPS, SCALE = 1e-6, 1 / 16
FORMATS = [(b, g, f16) for b in (4, 8) for g in (32, 64, 128) for f16 in (False, True)]
FORMATS += [(16, 64, False)]


def bound(want: np.ndarray, stored_bf16: bool) -> Any:
    """fp32 results to 2e-5 of the output's scale; bf16 ones to 1 ulp of the value beyond that."""
    return 2e-5 * np.sqrt((want * want).mean()) + (2.0**-8 * np.abs(want) if stored_bf16 else 0.0)


def close(got: np.ndarray, want: np.ndarray, what: str = "", slack: np.ndarray | float = 0) -> None:
    assert got.shape == want.shape
    error = np.abs(h.from_act(got).astype(np.float64) - want)
    bad = ~(error <= bound(want, got.dtype == np.uint16) + slack)  # NaN is bad too
    assert not bad.any(), (
        f"{what}: {bad.sum()} of {bad.size} off, first at {np.argwhere(bad)[0]}, "
        f"largest {np.nanmax(error)}"
    )


def same(a: np.ndarray, b: np.ndarray, what: str = "") -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    differ = a.view(np.uint8) != b.view(np.uint8)
    assert not differ.any(), f"{what}: {differ.sum()} bytes differ"


def poison(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    whole = np.empty(shape, dtype)
    whole.view(np.uint8)[...] = 0xFF
    return whole


def untouched(got: np.ndarray) -> bool:
    return bool((np.ascontiguousarray(got).view(np.uint8) == 0xFF).all())


@dataclass(frozen=True)
class Shape:
    heads: int = 16
    kv_heads: int = 2
    rotary: int = 64
    layers: int = 1
    layer: int = 0

    @property
    def k_offset(self) -> int:
        return self.heads * 2 * D

    @property
    def v_offset(self) -> int:
        return self.k_offset + self.kv_heads * D

    @property
    def stride(self) -> int:
        return self.v_offset + self.kv_heads * D + 8  # 8 columns that nothing reads

    def qkv(self) -> dict[str, int]:
        keys = ("heads", "kv_heads", "rotary", "layer", "k_offset", "v_offset")
        return {k: getattr(self, k) for k in keys} | {"proj_stride": self.stride}


QWEN35B = Shape()
SHAPES = [
    QWEN35B,
    Shape(heads=1, kv_heads=1, rotary=32),
    Shape(heads=8, kv_heads=2, rotary=0, layers=3, layer=1),
    Shape(heads=16, kv_heads=1, rotary=256),
    Shape(heads=6, kv_heads=2, rotary=20, layers=2, layer=1),
    Shape(heads=3, kv_heads=3, rotary=64, layers=2, layer=1),
]
shapes = pytest.mark.parametrize(
    "shape", SHAPES, ids=[f"{s.heads}over{s.kv_heads}r{s.rotary}l{s.layer}" for s in SHAPES]
)


class Inputs:
    """Random projections of some rows, gains and frequencies; heads as the reference wants them."""

    def __init__(self, kernels: Kernels, rng: np.random.Generator, shape: Shape, rows: int) -> None:
        self.shape = shape
        values = rng.standard_normal((rows, shape.stride)) * rng.uniform(0.5, 2.0, (rows, 1))
        values[-1, : shape.v_offset] *= 1e-3  # where eps counts
        self.proj = kernels.act(values)
        self.proj[:, -8:] = poison(1, self.proj.dtype)[0]
        self.q_gain, self.k_gain = (
            (rng.uniform(0.5, 1.5, D) * rng.choice([-1, 1], D)).astype(np.float32) for _ in "qk"
        )
        self.inv_freq = ref.rope_inv_freq(shape.rotary, 1e7)

    def fixed(self) -> list[h.Argument]:
        return [In(self.q_gain), In(self.k_gain), In(self.inv_freq)]

    def values(self, first: int, heads: int, width: int = D) -> np.ndarray:
        part = self.proj[:, first : first + heads * width]
        return h.from_act(part).astype(np.float64).reshape(len(self.proj), heads, width)

    def q(self, positions: Sequence[int]) -> np.ndarray:
        q, _ = ref.split_q_gate(
            self.values(0, self.shape.heads, 2 * D).reshape(-1, self.shape.k_offset), D
        )
        return self.turned(q, self.q_gain, positions)

    def gate(self) -> np.ndarray:
        return self.values(0, self.shape.heads, 2 * D)[..., D:]

    def k(self, positions: Sequence[int]) -> np.ndarray:
        return self.turned(
            self.values(self.shape.k_offset, self.shape.kv_heads), self.k_gain, positions
        )

    def v(self) -> np.ndarray:
        return self.values(self.shape.v_offset, self.shape.kv_heads)

    def turned(self, x: np.ndarray, gain: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        normed = ref.qk_norm(x, gain.astype(np.float64), EPS)
        return ref.rope(normed, np.asarray(positions), self.inv_freq)

    def only(self, rows: slice) -> Inputs:
        part = object.__new__(Inputs)
        part.__dict__.update(self.__dict__, proj=self.proj[rows])
        return part


class Cache:
    """KV blocks of some slots in shuffled places: `lengths[slot]` tokens are there, all else is
    poison. Pages that a slot does not own have address 0."""

    def __init__(
        self,
        kernels: Kernels,
        rng: np.random.Generator,
        shape: Shape,
        lengths: Sequence[int],
        capacity: Sequence[int],
    ) -> None:
        self.kernels, self.shape = kernels, shape
        counts = [-(-c // BLOCK) for c in capacity]
        block = (shape.layers, 2, shape.kv_heads, BLOCK, D)
        places = rng.permutation(sum(counts) + 1)  # one block belongs to nobody
        self.raw = poison((len(places), *block), kernels.act_dtype)
        self.place = np.split(places[: sum(counts)], np.cumsum(counts)[:-1])
        for slot, n in enumerate(lengths):
            for t in range(0, n, BLOCK):
                used = min(BLOCK, n - t)
                new = kernels.act(rng.standard_normal((2, shape.kv_heads, used, D)) * 1.2)
                self.raw[self.place[slot][t // BLOCK], shape.layer, :, :, :used] = new
        self.buffer = kernels.core.buffer(self.raw.nbytes, "KV slab")
        self.buffer.write(0, self.raw.view(np.uint8).reshape(-1))
        size = self.raw.nbytes // len(places)
        self.pages = np.zeros((len(lengths), max(counts) + 1), np.uint64)
        for slot, mine in enumerate(self.place):
            self.pages[slot, : len(mine)] = self.buffer.address + mine.astype(np.uint64) * size

    def appended(self, slot: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Takes over what the device holds; all but [first, end) of the slot must be as it was.
        Returns the slot's keys and values [end, kv_heads, D]."""
        now = np.empty_like(self.raw)
        self.buffer.read(0, now.view(np.uint8).reshape(-1))
        for t in range(first, end):
            at = (
                self.place[slot][t // BLOCK],
                self.shape.layer,
                slice(None),
                slice(None),
                t % BLOCK,
            )
            self.raw[at] = now[at]
        blocks = self.raw[self.place[slot][: -(-end // BLOCK)], self.shape.layer]
        both = h.from_act(blocks).astype(np.float64).transpose(1, 0, 3, 2, 4)
        return tuple(both.reshape(2, -1, self.shape.kv_heads, D)[:, :end])

    def unchanged(self) -> bool:
        """Whether the device holds nothing but what `appended` took over."""
        now = np.empty_like(self.raw)
        self.buffer.read(0, now.view(np.uint8).reshape(-1))
        return bool((now.view(np.uint8) == self.raw.view(np.uint8)).all())


# ---- attn_step -----------------------------------------------------------------------------------
def run_step(
    kernels: Kernels,
    x: Inputs,
    cache: Cache,
    rows: Sequence[tuple[int, int]],
    splits: int,
    spare: int = 0,
) -> np.ndarray:
    """rows: (slot, position) each. -> partial [rows + spare, heads, splits, 258]"""
    total = len(rows) + spare
    proj = np.concatenate([x.proj, poison((spare, x.shape.stride), x.proj.dtype)])
    p = h.params("attn_step", rows=total, splits=splits, eps=EPS, scale=SCALE, **x.shape.qkv())
    step = h.make_step(len(rows), [s for s, _ in rows], [t for _, t in rows], pages=cache.pages)
    args: list[h.Argument] = [
        In(proj),
        *x.fixed(),
        Out((total, x.shape.heads, splits, PARTIAL), np.float32),
    ]
    return kernels.run("attn_step", p, args, step, [cache.buffer])[0]


def check_step(
    kernels: Kernels, shape: Shape, rows: Sequence[tuple[int, int]], seed: int, spare: int = 0
) -> None:
    rng = np.random.default_rng(seed)
    slots = 1 + max(s for s, _ in rows)
    mine = [[t for s, t in rows if s == slot] for slot in range(slots)]
    lengths = [min(m, default=300) for m in mine]
    cache = Cache(kernels, rng, shape, lengths, [max(m, default=299) + 1 for m in mine])
    x = Inputs(kernels, rng, shape, len(rows))
    splits = max(t for _, t in rows) // SPLIT + 2  # one more than any row has
    partial = run_step(kernels, x, cache, rows, splits, spare)
    assert untouched(partial[len(rows) :]), "rows beyond the step's were written"
    positions = [t for _, t in rows]
    new_k, new_v, q = x.k(positions), x.v(), x.q(positions)
    for slot, times in enumerate(mine):
        if not times:
            continue
        which = [i for i, (s, _) in enumerate(rows) if s == slot]
        K, V = cache.appended(slot, times[0], times[-1] + 1)
        close(kernels.act(K[times]), new_k[which], "keys")
        same(V[times], new_v[which], "values")
        want = ref.attention_split(q[which], K, V, np.array(times), SCALE, SPLIT)
        for i, t, got in zip(range(len(times)), times, partial[which], strict=True):
            n = t // SPLIT + 1
            assert untouched(got[:, n:]), "splits beyond the row's were written"
            m, total, acc = (w[:n, i].swapaxes(0, 1) for w in want)
            assert np.abs(got[:, :n, 0] - m).max() <= 1e-5 * max(1, np.abs(m).max())
            assert np.abs(got[:, :n, 1] / total - 1).max() <= 5e-5
            close(got[:, :n, 2:], acc, f"row {which[i]} at {t}")
    assert cache.unchanged(), "written outside of the rows' own places"


@pytest.mark.parametrize("position", [0, 1, 127, 128, 129, 255, 256, 257, 384, 512, 1023])
def test_step_at_split_boundaries(kernels: Kernels, position: int) -> None:
    check_step(kernels, QWEN35B, [(0, position)], position)


@shapes
def test_step_rows_of_one_slot_cross_a_block(kernels: Kernels, shape: Shape) -> None:
    check_step(kernels, shape, [(0, t) for t in range(253, 258)], 1, spare=2)


@shapes
def test_step_rows_of_several_slots(kernels: Kernels, shape: Shape) -> None:
    rows = [(2, 0), (2, 1), (0, 511), (0, 512), (3, 40), (1, 255)]  # slots in any order
    check_step(kernels, shape, rows, 2)


@pytest.mark.parametrize("start", [0, 250, 256])
def test_step_sixteen_rows_of_one_slot(kernels: Kernels, start: int) -> None:
    check_step(kernels, Shape(heads=4, kv_heads=1), [(0, start + i) for i in range(16)], 3)


@pytest.mark.parametrize("position", [255, 1000])
def test_step_reads_keys_and_values_once_on_sim(position: int) -> None:
    """Each cached row once for all query heads of its KV head."""
    require_device("sim")
    kernels, rng, shape = Kernels("sim", False), np.random.default_rng(5), QWEN35B
    cache = Cache(kernels, rng, shape, [position], [position + 1])
    x = Inputs(kernels, rng, shape, 1)
    run_step(kernels, x, cache, [(0, position)], position // SPLIT + 1)
    once = position * 2 * shape.kv_heads * D * 2
    # Each split makes q: q, the partners of its rotated values, gains, frequencies.
    q = (position // SPLIT + 1) * shape.heads * D * (2 + 2 + 4 + 4 + 4)
    assert once <= kernels.bytes_read <= 1.1 * once + q


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=["35b", "6over2"])
def test_step_rows_together_equal_one_by_one(kernels: Kernels, shape: Shape) -> None:
    rows = [(0, 253), (0, 254), (0, 255), (0, 256), (0, 257), (2, 0), (2, 1), (1, 511), (1, 512)]
    lengths, capacity, splits = [253, 511, 0], [258, 513, 2], 5

    def fresh() -> tuple[Inputs, Cache]:
        rng = np.random.default_rng(4)
        return Inputs(kernels, rng, shape, len(rows)), Cache(kernels, rng, shape, lengths, capacity)

    x, cache = fresh()
    together = run_step(kernels, x, cache, rows, splits)
    _, alone = fresh()
    for i, row in enumerate(rows):
        same(
            run_step(kernels, x.only(slice(i, i + 1)), alone, [row], splits)[0],
            together[i],
            f"row {i}",
        )
    held = [
        c.appended(s, a, b)
        for c in (cache, alone)
        for s, a, b in zip((0, 1, 2), lengths, capacity, strict=True)
    ]
    for a, b in zip(held[:3], held[3:], strict=True):
        same(a[0], b[0], "keys")
        same(a[1], b[1], "values")


# ---- attn_combine and attn_out -------------------------------------------------------------------
def random_partials(
    rng: np.random.Generator, positions: Sequence[int], heads: int, splits: int
) -> np.ndarray:
    """Maxima far apart and near; entries past a row's splits are poison."""
    shape = (len(positions), heads, splits)
    partial = rng.standard_normal((*shape, PARTIAL)).astype(np.float32) * 20
    partial[..., 0] = rng.standard_normal(shape) * rng.choice([0.3, 3.0, 30.0], shape)
    partial[..., 1] = rng.uniform(1, SPLIT, shape)
    for r, t in enumerate(positions):
        partial[r, :, t // SPLIT + 1 :] = np.nan
    return partial


def combine(
    kernels: Kernels, partial: np.ndarray, positions: Sequence[int], spare: int = 0
) -> np.ndarray:
    rows, heads, splits = partial.shape[:3]
    p = h.params("attn_combine", rows=rows, heads=heads, splits=splits)
    step = h.make_step(rows - spare, [0] * rows, positions)
    out = Out((rows, heads, 1, PARTIAL), np.float32)
    return kernels.run("attn_combine", p, [In(partial), out], step)[0]


def run_out(
    kernels: Kernels,
    w: h.Weight,
    partial: np.ndarray,
    proj: np.ndarray,
    x: np.ndarray,
    positions: Sequence[int],
    combined: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    rows, heads, splits = partial.shape[:3]
    p = h.params("attn_out", w=w.linear, rows=rows, heads=heads, splits=splits,
                 combined=int(combined), proj_stride=proj.shape[1])  # fmt: skip
    step = h.make_step(len(positions), [0] * len(positions), positions)
    ssq = Out((rows, x.shape[1] // h.CONST["LILY_OUT_ROWS"]), np.float32)
    args: list[h.Argument] = [In(w.codes), In(w.pairs), In(partial), In(proj), InOut(x), ssq]
    y, squares = kernels.run("attn_out", p, args, step)[:2]
    return y, squares


def check_out(
    kernels: Kernels, w: h.Weight, positions: Sequence[int], seed: int, spare: int = 0
) -> None:
    rng = np.random.default_rng(seed)
    n, k = w.linear.n, w.linear.k
    rows, heads = len(positions), k // D
    splits = min(max(positions) // SPLIT + 2, h.CONST["LILY_FUSED_SPLITS"])
    partial = random_partials(rng, [*positions, *[0] * spare], heads, splits)
    proj = kernels.act(rng.standard_normal((rows + spare, heads * 2 * D + 8)) * 2)
    proj[:, -8:] = poison(1, proj.dtype)[0]
    x = kernels.act(rng.standard_normal((rows + spare, n)))
    y, squares = run_out(kernels, w, partial, proj, x, positions)
    for r, t in enumerate(positions):
        parts = partial[r : r + 1, :, : t // SPLIT + 1].astype(np.float64).transpose(2, 0, 1, 3)
        o = ref.attention_combine((parts[..., 0], parts[..., 1], parts[..., 2:]))
        _, gate = ref.split_q_gate(h.from_act(proj[r : r + 1, :-8]).astype(np.float64), D)
        o = ref.attn_gate(o, gate).reshape(1, -1)
        want = h.from_act(x[r : r + 1]).astype(np.float64) + ref.linear(o, w.values[0])
        close(y[r : r + 1], want, f"row {r}")
    stored = h.from_act(y[:rows]).astype(np.float64).reshape(rows, -1, h.CONST["LILY_OUT_ROWS"])
    want = (stored * stored).sum(-1)
    assert np.abs(squares[:rows] / want - 1).max() <= 1e-6
    same(y[rows:], x[rows:], "rows beyond the step's")
    assert untouched(squares[rows:])


@pytest.mark.parametrize(
    "bits,group,f16", FORMATS, ids=[f"q{b}g{g}{'f16' if f else 'bf16'}" for b, g, f in FORMATS]
)
def test_out_in_every_format(kernels: Kernels, bits: int, group: int, f16: bool) -> None:
    rng = np.random.default_rng(bits + group)
    w = h.weight(rng, 72, 6 * D, bits, group, f16)  # 1.5 chunks of 1024 values
    check_out(kernels, w, [700, 255, 256], 5, spare=1)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_out_rows(kernels: Kernels, rows: int) -> None:
    w = h.weight(np.random.default_rng(6), 8, D, 4, 64)
    check_out(kernels, w, [(i * 97) % 600 for i in range(rows)], rows)


def test_out_at_the_shape_of_35b(kernels: Kernels) -> None:
    w = h.weight(np.random.default_rng(7), 2048, 4096, 4, 64)
    check_out(kernels, w, [1023], 7)


@pytest.mark.parametrize("splits", [1, 2, 5, 8, 9, 63, 64, 65, 257, 1024, 1025])
def test_combine(kernels: Kernels, splits: int) -> None:
    rng = np.random.default_rng(splits)
    positions = [splits * SPLIT - 1, max(0, splits - 1) * SPLIT, 3, 0]
    partial = random_partials(rng, positions, 3, splits + 1)
    got = combine(kernels, partial, positions, spare=1)
    assert untouched(got[3])
    for r, t in enumerate(positions[:3]):
        parts = partial[r, :, : t // SPLIT + 1].astype(np.float64)
        m = parts[..., 0].max(1)
        weights = np.exp(parts[..., 0] - m[:, None])
        assert (got[r, :, 0, 0] == m).all()
        close(got[r, :, 0, 1], (weights * parts[..., 1]).sum(1), "sums")
        close(got[r, :, 0, 2:], (weights[..., None] * parts[..., 2:]).sum(1), "accumulators")


@pytest.mark.parametrize("splits", [1, 2, 4, 7, 8])
def test_out_combines_like_combine(kernels: Kernels, splits: int) -> None:
    rng = np.random.default_rng(8)
    positions = [splits * SPLIT - 1, 0]
    w = h.weight(rng, 64, 5 * D, 4, 64)
    partial = random_partials(rng, positions, 5, splits)
    proj, x = (
        kernels.act(rng.standard_normal((2, 10 * D))),
        kernels.act(rng.standard_normal((2, 64))),
    )
    fused = run_out(kernels, w, partial, proj, x, positions)
    apart = run_out(kernels, w, combine(kernels, partial, positions), proj, x, positions, True)
    same(fused[0], apart[0], "x")
    same(fused[1], apart[1], "sums of squares")


def test_out_rows_together_equal_one_by_one(kernels: Kernels) -> None:
    rng = np.random.default_rng(9)
    positions = [0, 255, 256, 700, 511, 3, 4]
    w = h.weight(rng, 72, 6 * D, 8, 32)
    partial = random_partials(rng, positions, 6, 700 // SPLIT + 1)
    proj, x = (
        kernels.act(rng.standard_normal((7, 12 * D))),
        kernels.act(rng.standard_normal((7, 72))),
    )
    together = run_out(kernels, w, partial, proj, x, positions)
    for r, t in enumerate(positions):
        one = slice(r, r + 1)
        alone = run_out(kernels, w, partial[one], proj[one], x[one], [t])
        for a, b in zip(alone, together, strict=True):
            same(a, b[one], f"row {r}")


# ---- qkv_rope ------------------------------------------------------------------------------------
def run_rope(kernels: Kernels, x: Inputs, cache: Cache, slot: int, position: int) -> np.ndarray:
    rows = len(x.proj)
    p = h.params("qkv_rope", rows=rows, position=position, slot=slot, eps=EPS, **x.shape.qkv())
    out = kernels.out_act(rows, x.shape.heads, D)
    step = h.make_step(0, pages=cache.pages)
    return kernels.run("qkv_rope", p, [In(x.proj), *x.fixed(), out], step, [cache.buffer])[0]


@shapes
@pytest.mark.parametrize("rows,position", [(1, 0), (17, 248), (70, 511)])
def test_rope(kernels: Kernels, shape: Shape, rows: int, position: int) -> None:
    rng = np.random.default_rng(10)
    cache = Cache(kernels, rng, shape, [100, position], [100, position + rows])
    x = Inputs(kernels, rng, shape, rows)
    q = run_rope(kernels, x, cache, 1, position)
    positions = range(position, position + rows)
    close(q, x.q(positions), "q")
    K, V = cache.appended(1, position, position + rows)
    close(kernels.act(K[position:]), x.k(positions), "keys")
    same(V[position:], x.v(), "values")
    assert cache.unchanged(), "written outside of the rows' own places"


def hard_angles(rng: np.random.Generator) -> np.ndarray:
    """fp32 angles up to 262,143: any, whole ones, and those nearest to multiples of pi / 2."""
    turns = rng.integers(1, 166_886, 4000)
    nearest = (turns * (np.pi / 2)).astype(np.float32)
    left = np.abs(nearest - turns * (np.pi / 2))
    return np.concatenate([
        nearest[np.argsort(left)[:256]],
        rng.uniform(0, 262_143, 256).astype(np.float32),
        np.exp(rng.uniform(-12, 12, 128)).astype(np.float32),
        np.arange(262_143 - 127, 262_144, dtype=np.float32),
    ])  # fmt: skip


@pytest.mark.parametrize("op", ["qkv_rope", "attn_step"])
def test_sin_cos(device: str, op: str) -> None:
    """A key of 128 ones and 128 zeros turns into its cosines and sines; at position 1 the frequency
    is the angle. Right to 2e-6 against float64."""
    kernels, shape = Kernels(device, True), Shape(heads=1, kv_heads=1, rotary=D)
    x = Inputs(kernels, np.random.default_rng(0), shape, 1)
    x.proj[:] = np.where(np.arange(shape.stride) % D < D // 2, 1, 0)
    x.q_gain[:] = x.k_gain[:] = np.sqrt(0.5 + EPS)
    for angles in hard_angles(np.random.default_rng(1)).reshape(-1, D // 2):
        cache = Cache(kernels, np.random.default_rng(2), shape, [1], [2])
        x.inv_freq = angles
        if op == "qkv_rope":
            run_rope(kernels, x, cache, 0, 1)
        else:
            run_step(kernels, x, cache, [(0, 1)], 1)
        K, _ = cache.appended(0, 1, 2)
        exact = angles.astype(np.float64)
        error = np.abs(K[1, 0] - np.concatenate([np.cos(exact), np.sin(exact)]))
        assert error.max() <= 2e-6, f"{error.max()} at {angles[error.argmax() % 128]}"


def test_rope_at_the_last_position(device: str) -> None:
    """Position 262,143 of the real frequencies, where the fp32 product decides."""
    kernels, shape = Kernels(device, True), Shape(heads=1, kv_heads=1)
    rng = np.random.default_rng(3)
    x = Inputs(kernels, rng, shape, 3)
    cache = Cache(kernels, rng, shape, [0], [1])
    cache.pages = np.full((1, 1024), cache.pages[0, 0])
    q = run_rope(kernels, x, cache, 0, 262_141)
    assert np.abs(q - x.q([262_141, 262_142, 262_143])).max() <= 1e-5 * np.abs(q).max()


# ---- flash ---------------------------------------------------------------------------------------
def run_flash(
    kernels: Kernels, x: Inputs, q: np.ndarray, cache: Cache, slot: int, position: int
) -> np.ndarray:
    s, rows = x.shape, len(x.proj)
    p = h.params("flash", rows=rows, position=position, slot=slot, heads=s.heads,
                 kv_heads=s.kv_heads, proj_stride=s.stride, layer=s.layer, scale=SCALE)  # fmt: skip
    step = h.make_step(0, pages=cache.pages)
    out = kernels.out_act(rows, s.heads * D)
    return kernels.run("flash", p, [In(q), In(x.proj), out], step, [cache.buffer])[0]


def check_flash(
    got: np.ndarray,
    x: Inputs,
    q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    rows: np.ndarray,
    position: int,
) -> None:
    qs, gate, positions = h.from_act(q[rows]).astype(np.float64), x.gate()[rows], rows + position
    want = ref.attn_gate(ref.attention(qs, K, V, positions, SCALE), gate)
    # Each weight, in the sum of values as in the sum of weights, is off by up to 2^-8 where P is
    # rounded to bf16, and by what an fp32 sum of 256 products does to its exponent.
    weight_error = 5e-6 if got.dtype == np.float32 else 2.0**-8
    largest = ref.attn_gate(ref.attention(qs, K, np.abs(V), positions, SCALE), gate)
    slack = weight_error * (largest + np.abs(want))
    close(got[rows].reshape(want.shape), want, "y", slack)


@shapes
@pytest.mark.parametrize(
    "rows,position", [(1, 0), (1, 31), (17, 0), (33, 37), (5, 253), (70, 300), (3, 511)]
)
def test_flash(kernels: Kernels, shape: Shape, rows: int, position: int) -> None:
    rng = np.random.default_rng(11)
    # Only the rows' tokens and those before exist: the rest of the last block is poison.
    cache = Cache(kernels, rng, shape, [20, position + rows], [20, position + rows])
    x = Inputs(kernels, rng, shape, rows)
    q = kernels.act(rng.standard_normal((rows, shape.heads, D)) * 1.5)
    got = run_flash(kernels, x, q, cache, 1, position)
    assert cache.unchanged()
    K, V = cache.appended(1, 0, position + rows)
    check_flash(got, x, q, K, V, np.arange(rows), position)


def test_flash_reads_keys_and_values_once_on_sim() -> None:
    """Once per 32 rows of scores: 4 queries of 8 heads."""
    require_device("sim")
    kernels, rng, shape = Kernels("sim", False), np.random.default_rng(5), QWEN35B
    cache = Cache(kernels, rng, shape, [204], [204])
    x = Inputs(kernels, rng, shape, 4)
    q = kernels.act(rng.standard_normal((4, shape.heads, D)))
    run_flash(kernels, x, q, cache, 0, 200)
    once = 204 * 2 * shape.kv_heads * D * 2 + 2 * q.nbytes  # and q and its gate
    assert once <= kernels.bytes_read <= 1.1 * once


def test_flash_of_sharp_scores(kernels: Kernels) -> None:
    """Scores of hundreds whose maximum grows from tile to tile: carried sums must be rescaled."""
    rng, shape = np.random.default_rng(12), Shape(heads=4, kv_heads=1)
    cache = Cache(kernels, rng, shape, [140], [140])
    growth = np.linspace(0.1, 30, 140)[:, None] * rng.choice([-1, 1], (140, 1))
    block = cache.raw[cache.place[0][0], 0, 0, 0]
    block[:140] = kernels.act(h.from_act(block[:140]) * growth)
    cache.buffer.write(0, cache.raw.view(np.uint8).reshape(-1))
    x = Inputs(kernels, rng, shape, 40)
    q = kernels.act(rng.standard_normal((40, 4, D)) * 2)
    got = run_flash(kernels, x, q, cache, 0, 100)
    K, V = cache.appended(0, 0, 140)
    qs, positions = h.from_act(q).astype(np.float64), np.arange(100, 140)
    assert np.abs(ref.attention_scores(qs, K, positions, SCALE, False)).max() > 200
    # A score of 300 is known to 300 * 2^-22 or so in fp32, and so is its weight.
    want = ref.attn_gate(ref.attention(qs, K, V, positions, SCALE), x.gate())
    slack = (2e-4 if kernels.exact else 2.0**-8) * np.abs(V).max()
    close(got.reshape(want.shape), want, "y", slack)


def test_prefill_equals_decode(device: str) -> None:
    """qkv_rope and flash over a chunk against attn_step and attn_combine of each row, fp32."""
    kernels, shape = Kernels(device, True), Shape(heads=8, kv_heads=2, layers=2, layer=1)
    rows, position = 20, 250

    def fresh() -> tuple[Inputs, Cache]:
        rng = np.random.default_rng(13)
        x = Inputs(kernels, rng, shape, rows)
        return x, Cache(kernels, rng, shape, [position], [position + rows])

    x, cache = fresh()
    prefill = run_flash(kernels, x, run_rope(kernels, x, cache, 0, position), cache, 0, position)
    _, other = fresh()
    gate = x.gate()
    for first in range(0, rows, 10):
        times = list(range(position + first, position + first + 10))
        part = x.only(slice(first, first + 10))
        partial = run_step(kernels, part, other, [(0, t) for t in times], 270 // SPLIT + 1)
        parts = combine(kernels, partial, times)[:, :, 0].astype(np.float64)
        o = parts[..., 2:] / parts[..., 1:2] * ref.sigmoid(gate[first : first + 10])
        close(prefill[first : first + 10], o.reshape(10, -1), f"rows from {first}")
    for a, b in zip(
        *(c.appended(0, position, position + rows) for c in (cache, other)), strict=True
    ):
        close(a.astype(np.float32), b, "cache")


def test_flash_of_a_real_chunk() -> None:
    """512 rows after 3,584 tokens in the shape of 35B, against sampled rows."""
    require_device("cpu")
    kernels, rng = Kernels("cpu", False), np.random.default_rng(14)
    cache = Cache(kernels, rng, QWEN35B, [4096], [4096])
    x = Inputs(kernels, rng, QWEN35B, 512)
    q = kernels.act(rng.standard_normal((512, 16, D)))
    got = run_flash(kernels, x, q, cache, 0, 3584)
    K, V = cache.appended(0, 0, 4096)
    check_flash(got, x, q, K, V, np.array([0, 1, 255, 256, 510, 511]), 3584)


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "op,change,message",
    [
        ("attn_step", {"heads": 17, "kv_heads": 1}, "17 query heads for 1 KV heads"),
        ("attn_step", {"heads": 5}, "5 query heads for 2 KV heads"),
        ("attn_step", {"rotary": 63}, "63 rotary dims"),
        ("attn_step", {"rotary": 258}, "258 rotary dims"),
        ("attn_step", {"rows": 17}, "17 rows, supported 1 to 16"),
        ("attn_step", {"splits": 0}, "0 splits"),
        ("attn_step", {"proj_stride": 8184}, "16 heads take 8192 columns of rows of 8184"),
        ("attn_step", {"v_offset": 9216}, "columns 9216 to 9728 of rows of 9224"),
        ("qkv_rope", {"k_offset": 8196}, "columns 8196"),
        ("qkv_rope", {"rows": 0}, "0 rows"),
        ("flash", {"kv_heads": 0}, "16 query heads for 0 KV heads"),
        ("attn_out", {"heads": 15}, "weight expects 4096 values, 15 heads give 3840"),
        ("attn_out", {"w": h.linear(68, 4096)}, "68 outputs, need a multiple of 8"),
        ("attn_out", {"splits": 9}, "9 splits, supported 1 to 8"),
        ("attn_combine", {"heads": 0}, "0 heads"),
    ],
)
def test_refusals(op: str, change: dict[str, Any], message: str) -> None:
    require_device("cpu")
    kernels = Kernels("cpu", True)
    qkv = QWEN35B.qkv()
    base: dict[str, dict[str, Any]] = {
        "attn_step": {"rows": 1, "splits": 1, "eps": EPS, "scale": SCALE, **qkv},
        "qkv_rope": {"rows": 1, "position": 0, "slot": 0, "eps": EPS, **qkv},
        "flash": {"rows": 1, "position": 0, "slot": 0, "heads": 16, "kv_heads": 2,
                  "proj_stride": 9224, "layer": 0, "scale": SCALE},
        "attn_out": {"w": h.linear(64, 4096), "rows": 1, "heads": 16, "splits": 1, "combined": 0,
                     "proj_stride": 8192},
        "attn_combine": {"rows": 1, "heads": 16, "splits": 1},
    }  # fmt: skip
    p = h.params(op, **{**base[op], **change})
    with pytest.raises(_core.LilyError, match=message):
        kernels.core.run([(op, np.frombuffer(bytes(p), np.uint8), [], [], [])])
