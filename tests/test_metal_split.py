"""Where Metal cuts a list of launches into command buffers: by what the slowest GPU would need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from kernel_harness import CONST, linear, params
from lily import _core

BYTES_PER_SECOND, FLOPS, LIMIT = 68e9, 2.6e12, 0.5  # M1, and the longest command buffer


@pytest.fixture
def core() -> Iterator[_core.Kernels]:
    """The emulated device: large buffers take no memory until they are touched."""
    yield _core.Kernels("sim", False)


def call(op: str, p: ctypes.Structure, *args: tuple[_core.KernelBuffer, int, str]) -> tuple:
    views = [(buffer, 0, elements, dtype) for buffer, elements, dtype in args]
    return (op, np.frombuffer(bytes(p), np.uint8), views, [], [])


def matmul(core: _core.Kernels, rows: int, n: int = 4096, k: int = 4096) -> tuple:
    words, pairs = n * k // 8, n * k // 64
    return call(
        "matmul",
        params("matmul", w=linear(n, k), rows=rows, y_stride=n, y_offset=0, mode=0),
        (core.buffer(words * 4, "codes"), words, "u32"),
        (core.buffer(pairs * 4, "pairs"), pairs, "u32"),
        (core.buffer(rows * k * 2, "h"), rows * k, "bf16"),
        (core.buffer(rows * n * 2, "y"), rows * n, "bf16"),
    )


def copy(core: _core.Kernels, count: int) -> tuple:
    return call(
        "copy_bytes",
        params("copy_bytes", bytes=count),
        (core.buffer(count, "from"), count // 4, "u32"),
        (core.buffer(count, "to"), count // 4, "u32"),
    )


def test_arithmetic_counts_where_it_takes_longer_than_memory(core: _core.Kernels) -> None:
    _, seconds = core.command_buffers([matmul(core, 4096), matmul(core, 17), copy(core, 1 << 26)])
    assert seconds[0] == pytest.approx(2 * 4096**3 / FLOPS)
    assert seconds[1] == pytest.approx(2 * 17 * 4096**2 / FLOPS)
    assert seconds[2] == pytest.approx(2 * (1 << 26) / BYTES_PER_SECOND)


def test_attention_costs_the_keys_that_its_rows_see(core: _core.Kernels) -> None:
    rows, heads, dim = 512, 16, CONST["LILY_HEAD_DIM"]

    def flash(position: int) -> tuple:
        kv = core.buffer(1 << 20, "pages")
        step = core.buffer(1 << 16, "step")
        q, proj, y = (core.buffer(rows * heads * dim * 4, name) for name in ("q", "proj", "y"))
        p = params(
            "flash",
            rows=rows,
            position=position,
            slot=0,
            heads=heads,
            kv_heads=2,
            proj_stride=2 * heads * dim,
            layer=0,
            scale=1.0,
        )
        views = [(q, 0, rows * heads * dim, "bf16"), (proj, 0, 2 * rows * heads * dim, "bf16")]
        views.append((y, 0, rows * heads * dim, "bf16"))
        raw = np.frombuffer(bytes(p), np.uint8)
        return ("flash", raw, views, [(step, 0, 1 << 14, "u32")], [(kv, 0, 1 << 18, "u32")])

    _, seconds = core.command_buffers([flash(0), flash(100_000)])
    for got, position in zip(seconds, (0, 100_000), strict=True):
        assert got == pytest.approx(4 * rows * heads * dim * (position + rows / 2) / FLOPS)


def test_a_decode_step_costs_the_keys_and_values_it_reads(core: _core.Kernels) -> None:
    heads, kv_heads, dim, splits = 16, 2, CONST["LILY_HEAD_DIM"], 64
    stride = 2 * heads * dim + 2 * kv_heads * dim
    p = params(
        "attn_step",
        rows=1,
        heads=heads,
        kv_heads=kv_heads,
        rotary=64,
        proj_stride=stride,
        k_offset=2 * heads * dim,
        v_offset=2 * heads * dim + kv_heads * dim,
        layer=0,
        splits=splits,
        eps=1e-6,
        scale=1.0,
    )
    partial = heads * splits * CONST["LILY_PARTIAL"]
    sizes = [(stride, "bf16"), (dim, "f32"), (dim, "f32"), (32, "f32"), (partial, "f32")]
    views = [(core.buffer(4 * n, f"argument {i}"), 0, n, t) for i, (n, t) in enumerate(sizes)]
    raw = np.frombuffer(bytes(p), np.uint8)
    step, kv = core.buffer(1 << 16, "step"), core.buffer(1 << 20, "pages")
    one = ("attn_step", raw, views, [(step, 0, 1 << 14, "u32")], [(kv, 0, 1 << 18, "u32")])
    _, (seconds,) = core.command_buffers([one])
    read = 2 * splits * CONST["LILY_SPLIT"] * kv_heads * dim * 2
    bound = sum(n * (2 if t == "bf16" else 4) for n, t in sizes)
    assert seconds == pytest.approx((read + bound) / BYTES_PER_SECOND)


def test_a_buffer_ends_before_the_launch_that_would_exceed_the_limit(core: _core.Kernels) -> None:
    one = matmul(core, 4096)
    _, (seconds,) = core.command_buffers([one])
    fits = int(LIMIT / seconds)
    assert fits == 9
    assert core.command_buffers([one] * fits)[0] == [fits]
    assert core.command_buffers([one] * (fits + 1))[0] == [fits, fits + 1]
    assert core.command_buffers([one] * (3 * fits))[0] == [fits, 2 * fits, 3 * fits]


def test_every_launch_is_in_one_buffer_and_none_is_too_long(core: _core.Kernels) -> None:
    rng = np.random.default_rng(7)
    kinds = [matmul(core, 4096), matmul(core, 64), copy(core, 1 << 28), matmul(core, 8192, 8192)]
    calls = [kinds[i] for i in rng.integers(0, len(kinds), 300)]
    ends, seconds = core.command_buffers(calls)
    assert ends[-1] == len(calls) and ends == sorted(set(ends))
    for begin, end in zip([0, *ends], ends, strict=False):
        assert sum(seconds[begin:end]) <= LIMIT
        if end < len(calls):
            assert sum(seconds[begin : end + 1]) > LIMIT


def test_a_launch_that_is_too_long_has_a_buffer_of_its_own(core: _core.Kernels) -> None:
    long, short = matmul(core, 16384, 8192, 8192), copy(core, 1 << 20)
    ends, seconds = core.command_buffers([short, long, long, short])
    assert seconds[1] > LIMIT
    assert ends == [1, 2, 3, 4]


def test_nothing_needs_no_buffer(core: _core.Kernels) -> None:
    assert core.command_buffers([]) == ([], [])
