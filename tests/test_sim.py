"""The emulated device: every planted bug is refused in words, every clean kernel passes any order."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT, require_device
from lily import _core

SEEDS = range(1, 51)
N = 64
X = np.random.default_rng(3).standard_normal(3 * N).astype(np.float32)
DTYPES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.uint32): "u32",
    np.dtype(np.uint16): "bf16",
    np.dtype(np.uint64): "u64",
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The planted kernels, compiled as cmake/sim.cmake compiles ours."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: nothing here compiles the planted kernels")
    folder = tmp_path_factory.mktemp("planted")
    arm = platform.machine() == "aarch64"
    target = ["aarch64-linux-gnu"] if arm else ["x86_64-linux-gnu", "-march=x86-64-v3"]
    zig = [sys.executable, "-m", "ziglang"]
    metal = ROOT / "src/metal"
    made, out = folder / "planted.o", folder / "planted.so"
    subprocess.run(
        [
            *zig,
            "clang",
            "-target",
            *target,
            *"-x c++ -std=c++17 -O2 -fno-vectorize".split(),
            *"-fno-slp-vectorize -DLILY_SIM -fsanitize=thread -ffreestanding -nostdinc".split(),
            *"-mllvm -tsan-instrument-read-before-write=1 -mllvm".split(),
            *"-tsan-instrument-func-entry-exit=0 -fno-math-errno -ffp-contract=off -fPIC".split(),
            f"-I{metal}/clang",
            f"-I{metal}",
            "-c",
            str(Path(__file__).with_name("sim_planted") / "planted.metal"),
            "-o",
            str(made),
        ],
        check=True,
    )
    subprocess.run([*zig, "ld.lld", "-shared", str(made), "-o", str(out)], check=True)
    return str(out)


class Planted:
    """The library on one sim device."""

    def __init__(self, library: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        require_device("sim")
        monkeypatch.setenv("LILY_SIM_SEED", str(seed))
        self.library = library
        self.core = _core.Kernels("sim", False)

    def place(self, array: np.ndarray) -> Any:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        whole = np.zeros((raw.size + 3) // 4 * 4, np.uint8)
        whole[: raw.size] = raw
        buffer = self.core.buffer(whole.size, "x")
        buffer.write(0, whole)
        return (buffer, 0, array.size, DTYPES[array.dtype])

    def empty(self, count: int, dtype: Any = np.float32) -> Any:
        size = np.dtype(dtype).itemsize
        return (self.core.buffer(count * size, "y"), 0, count, DTYPES[np.dtype(dtype)])

    @staticmethod
    def read(view: Any) -> np.ndarray:
        buffer, offset, count, name = view
        dtype = next(d for d, n in DTYPES.items() if n == name)
        raw = np.empty(buffer.nbytes, np.uint8)
        buffer.read(0, raw)
        return raw[offset : offset + count * dtype.itemsize].view(dtype)

    def launch(
        self, name: str, args: list[Any], access: list[str], groups: int = 1, threads: int = N
    ) -> list[int]:
        call = (name + "_bf16", args, access, [groups, 1, 1, threads])
        return list(self.core.run_library(self.library, [call])[0])

    def run(
        self,
        name: str,
        x: np.ndarray = X[:N],
        out: int = N,
        groups: int = 1,
        threads: int = N,
        dtype: Any = np.float32,
    ) -> np.ndarray:
        """y after a launch over (x read, y written)."""
        y = self.empty(out, dtype)
        self.launch(name, [self.place(x), y], ["r", "w"], groups, threads)
        return self.read(y)


@pytest.fixture
def planted(library: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(library, 1, monkeypatch)


@pytest.fixture(params=SEEDS)
def seeded(
    request: pytest.FixtureRequest, library: str, monkeypatch: pytest.MonkeyPatch
) -> Planted:
    return Planted(library, request.param, monkeypatch)


REFUSED = [
    (
        "read_after",
        r"thread 63: out of bounds: reads 4 bytes at byte 256 of argument 0 'x', which ends at 256",
    ),
    (
        "read_before",
        r"thread 0: out of bounds: reads 4 bytes at 4 bytes before the start of argument 0 'x'",
    ),
    (
        "write_after",
        r"out of bounds: writes 4 bytes at byte 256 of argument 1 'y', which ends at 256",
    ),
    (
        "write_before",
        r"out of bounds: writes 4 bytes at 4 bytes before the start of argument 1 'y'",
    ),
    (
        "write_input",
        r"thread 3: undeclared write: writes 4 bytes at byte 20 of argument 0 'x', declared as read only",
    ),
    (
        "read_output",
        r"undeclared read: reads 4 bytes at byte \d+ of argument 1 'y', declared as written only",
    ),
    (
        "misaligned",
        r"misaligned: reads 16 bytes at byte \d+ of argument 0 'x', address 0x\w+ is no multiple of 16",
    ),
    (
        "no_argument",
        r"out of bounds: reads 4 bytes at address 0x\w+, near nothing that the launch declares",
    ),
    ("other_stack", r"out of bounds: reads 4 bytes at thread 0's own memory"),
    (
        "uninitialised_shared",
        r"thread 54: uninitialised: reads 4 bytes at byte 36 of threadgroup array 's', which nothing has written",
    ),
    (
        "missing_barrier",
        r"race: \w+ 4 bytes at byte \d+ of threadgroup array 's', which thread \d+ \w+ with no barrier for this memory"
        r"|uninitialised: reads 4 bytes at byte \d+ of threadgroup array 's'",
    ),
    (
        "missing_second_barrier",
        r"race: (reads|writes) 4 bytes at byte \d+ of threadgroup array 's', which thread \d+ (wrote|read) with no barrier",
    ),
    (
        "wrong_flag",
        r"race: reads 4 bytes at byte \d+ of threadgroup array 's', which thread \d+ wrote with no barrier",
    ),
    (
        "simd_barrier_only",
        r"race: .* which thread \d+ (wrote|read) with no barrier|uninitialised: .* array 's'",
    ),
    ("shuffle_is_no_barrier", r"race: reads 4 bytes .* which thread \d+ wrote with no barrier"),
    (
        "same_value",
        r"race: writes 4 bytes at byte 0 of threadgroup array 's', which thread \d+ wrote with no barrier",
    ),
    (
        "divergent_barrier",
        r"barrier in divergent control flow: it is in threadgroup_barrier, thread \d+ has ended",
    ),
    (
        "early_return",
        r"barrier in divergent control flow: it is in threadgroup_barrier, thread 63 has ended",
    ),
    (
        "two_barriers",
        r"barrier in divergent control flow: it is in threadgroup_barrier, thread \d+ in another call",
    ),
    (
        "divergent_sum",
        r"collective in divergent control flow: it is in simd_sum, thread \d+ of the same simdgroup has ended",
    ),
    (
        "two_sums",
        r"collective in divergent control flow: it is in simd_sum, thread \d+ of the same simdgroup in another call",
    ),
    (
        "sum_or_max",
        r"collective in divergent control flow: it is in simd_shuffle\w*, thread \d+ .* in simd_shuffle",
    ),
    (
        "shuffle_and_barrier",
        r"collective in divergent control flow: it is in simd_sum, thread 40 .* in threadgroup_barrier",
    ),
    ("lane_32", r"simd_shuffle: lane argument 32, a simdgroup has 32 lanes"),
    ("shared_too_much", r"threadgroup memory: 32784 bytes in all, the limit is 32768"),
    (
        "shared_misaligned",
        r"misaligned: reads 16 bytes at byte \d+ of threadgroup array 'a', address 0x\w+ is no multiple of 16",
    ),
    (
        "shared_after",
        r"thread 63: out of bounds: writes 4 bytes at byte 252 of threadgroup array 'a', which ends at 252",
    ),
]


@pytest.mark.parametrize("name,says", REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(planted: Planted, name: str, says: str) -> None:
    with pytest.raises(
        _core.DeviceError, match=rf"kernel {name}_bf16, group \(0, 0, 0\), .*({says})"
    ):
        planted.run(name)
    # The device is none the worse for it.
    np.testing.assert_array_equal(planted.run("copy"), X[:N])


@pytest.mark.parametrize(
    "name",
    [
        "missing_barrier",
        "missing_second_barrier",
        "simd_barrier_only",
        "two_sums",
        "shuffle_is_no_barrier",
        "same_value",
        "wrong_flag",
    ],
)
def test_refused_in_any_order(seeded: Planted, name: str) -> None:
    with pytest.raises(_core.DeviceError, match=r"race|uninitialised|divergent"):
        seeded.run(name)


def test_uninitialised_device_memory(planted: Planted) -> None:
    x, y = planted.empty(N), planted.empty(N)
    with pytest.raises(
        _core.DeviceError, match=r"uninitialised: reads 4 bytes at byte \d+ of argument 0 'y'"
    ):
        planted.launch("copy", [x, y], ["r", "w"])
    x[0].write(0, np.zeros(4 * N - 4, np.uint8))
    with pytest.raises(
        _core.DeviceError,
        match=r"thread 63: uninitialised: reads 4 bytes at byte 252 of argument 0",
    ):
        planted.launch("copy", [x, y], ["r", "w"])
    # What a launch has written counts, byte by byte.
    x[0].write(4 * N - 4, np.zeros(4, np.uint8))
    planted.launch("copy", [x, y], ["r", "w"])
    planted.launch("copy", [y, x], ["r", "w"])


def test_wide_loads_over_the_end(planted: Planted) -> None:
    """A 16-byte load whose last bytes are outside, or inside the buffer and never written."""
    x, y = planted.place(X[:N]), planted.empty(16)
    short = (x[0], 0, N - 1, "f32")
    says = r"out of bounds: reads 16 bytes at byte 240 of argument 0 'x', and byte 252 of argument 0 'x', which ends at 252"
    with pytest.raises(_core.DeviceError, match=says):
        planted.launch("wide_over_end", [short, y], ["r", "w"])
    padded = planted.empty(N)
    padded[0].write(0, X[: N - 1].view(np.uint8))
    with pytest.raises(_core.DeviceError, match=r"uninitialised: reads \d+ bytes at byte 252"):
        planted.launch("wide_over_end", [padded, y], ["r", "w"])
    planted.launch("wide_over_end", [x, y], ["r", "w"])


def test_declared_ranges(planted: Planted) -> None:
    """The declared view counts, not the buffer; an unbound access is none; aliases are merged."""
    x = planted.place(X)
    y = planted.empty(N)
    with pytest.raises(_core.DeviceError, match=r"out of bounds: reads 4 bytes at byte 252"):
        planted.launch("copy", [(x[0], 0, N - 1, "f32"), y], ["r", "w"])
    with pytest.raises(_core.DeviceError, match=r"out of bounds: reads 4 bytes"):
        planted.launch("copy", [x, y], ["", "w"])
    planted.launch("copy", [(x[0], 0, N, "f32"), (x[0], 4 * N, N, "f32")], ["r", "w"])
    np.testing.assert_array_equal(planted.read(x)[N : 2 * N], X[:N])
    # In place, the reads and the writes of one range each under their own declaration.
    planted.launch("copy", [(x[0], 0, N, "f32"), (x[0], 0, N, "f32")], ["r", "w"])
    # Overlapping by half: what one group reads another one writes.
    with pytest.raises(
        _core.DeviceError,
        match=r"race: \w+ 4 bytes at .* which group \(\d, 0, 0\), thread \d+ \w+ in",
    ):
        planted.launch(
            "copy", [(x[0], 0, 2 * N, "f32"), (x[0], 4 * N, 2 * N, "f32")], ["r", "w"], groups=2
        )


def test_stale_shared(planted: Planted) -> None:
    with pytest.raises(
        _core.DeviceError, match=r"group \(1, 0, 0\), .* uninitialised: reads .* array 's'"
    ):
        planted.run("stale_shared", groups=2)


def test_groups(seeded: Planted) -> None:
    says = r"race: writes 4 bytes at byte \d+ of argument 1 'y', which group \(\d, 0, 0\), thread \d+ wrote in the same"
    with pytest.raises(_core.DeviceError, match=says):
        seeded.run("groups_write_same", groups=3)
    y = seeded.place(X)
    says = r"race: \w+ 4 bytes at byte \d+ of argument 1 'x', which (group \(\d, 0, 0\), thread \d+|another group) \w+ in"
    with pytest.raises(_core.DeviceError, match=says):
        seeded.launch("groups_read_others", [seeded.place(X), y], ["r", "rw"], groups=3)


def test_atomics(seeded: Planted) -> None:
    which = np.arange(3 * N, dtype=np.uint32) % 5
    y = seeded.place(np.zeros(5, np.uint32))
    seeded.launch("count", [seeded.place(which), y], ["r", "rw"], groups=3)
    np.testing.assert_array_equal(seeded.read(y), np.bincount(which))
    with pytest.raises(_core.DeviceError, match=r"race: .* bytes .* of argument 1 'x'"):
        seeded.launch("count_and_peek", [seeded.place(which), y], ["r", "rw"], groups=3)
    with pytest.raises(_core.DeviceError, match=r"undeclared read"):
        seeded.launch("count", [seeded.place(which), y], ["r", "w"], groups=3)
    which[7] = 5
    with pytest.raises(
        _core.DeviceError, match=r"out of bounds: .* at byte 20 of argument 1 'x', which ends at 20"
    ):
        seeded.launch("count", [seeded.place(which), y], ["r", "rw"], groups=3)
    fresh = seeded.empty(6, np.uint32)
    with pytest.raises(_core.DeviceError, match=r"uninitialised"):
        seeded.launch("count", [seeded.place(which), fresh], ["r", "rw"], groups=3)


def test_bytes_are_apart(seeded: Planted) -> None:
    x = np.arange(N, dtype=np.uint16)
    np.testing.assert_array_equal(seeded.run("halves", x, dtype=np.uint16), x ^ 1)
    with pytest.raises(
        _core.DeviceError, match=r"race: writes \d bytes at byte (16|18) of threadgroup array 's'"
    ):
        seeded.run("overlapping_halves", x, dtype=np.uint16)


def test_in_place(seeded: Planted) -> None:
    y = seeded.place(X[:N])
    seeded.launch("in_place", [y], ["rw"])
    np.testing.assert_allclose(seeded.read(y), X[:N].sum() + np.arange(N), rtol=1e-5)
    with pytest.raises(
        _core.DeviceError,
        match=r"which (thread \d+|several threads|lanes of simdgroup \d) (read|wrote)",
    ):
        seeded.launch("in_place_too_early", [y], ["rw"])


def test_clean(seeded: Planted) -> None:
    x = X[:N]
    np.testing.assert_array_equal(seeded.run("copy", X, 3 * N, groups=3), X)
    np.testing.assert_array_equal(seeded.run("reverse"), x[::-1])
    np.testing.assert_array_equal(
        seeded.run("simd_reverse"), x.reshape(2, 32)[:, ::-1].reshape(-1) + np.float32(2)
    )
    np.testing.assert_array_equal(seeded.run("shared_ticket"), x * N)
    np.testing.assert_array_equal(seeded.run("shared_full"), x + x)
    np.testing.assert_allclose(
        seeded.run("prefix"), np.cumsum(x, dtype=np.float64), rtol=1e-4, atol=1e-5
    )
    sums = x.reshape(2, 32).astype(np.float64).sum(1)
    want = np.repeat([sums[0] / 8, sums[1] / 8 * 32 / 8], 32)
    np.testing.assert_allclose(seeded.run("simd_loops"), want, rtol=1e-4)
    loose = seeded.run("prefix_unguarded")
    assert np.isnan(loose[[0, 32]]).all()  # undefined values are NaNs, and no fault until used
    np.testing.assert_array_equal(loose[1:32], x[:31])


def test_tiles(seeded: Planted) -> None:
    x = np.random.default_rng(4).standard_normal((32, 32)).astype(np.float32)
    product = x.astype(np.float64) @ x.T
    got = seeded.run("tile_product", x, 1024, threads=32).reshape(32, 32)
    np.testing.assert_allclose(got, product, atol=1e-4)
    scaled = (x.astype(np.float64) @ x) * np.arange(1, 33)[:, None]
    got = seeded.run("tile_rows", x, 1024, threads=32).reshape(32, 32)
    np.testing.assert_allclose(got, scaled, atol=1e-3)
    # Nothing refuses a kernel that thinks it knows the layout, but no seed lets it be right.
    got = seeded.run("tile_assumed_layout", x, 1024, threads=32).reshape(32, 32)
    assert not np.allclose(got, product, atol=1e-2)


@pytest.mark.parametrize(
    "name,says",
    [
        (
            "tile_no_barrier",
            r"race: reads \d+ bytes .* of threadgroup array 'a', which thread \d+ wrote with no barrier",
        ),
        ("tile_short", r"out of bounds: reads 128 bytes at .* of threadgroup array 'a'"),
        (
            "tile_of_device",
            r"tile: operand at byte 0 of argument 0 'x' is not in threadgroup memory",
        ),
        ("tile_lanes_differ", r"tile_mma: its lanes pass different operands than thread \d+"),
    ],
)
def test_tiles_refused(planted: Planted, name: str, says: str) -> None:
    with pytest.raises(_core.DeviceError, match=says):
        planted.run(name, X[:1].repeat(1024), 1024, threads=32)


def test_launches_follow_their_hazards(seeded: Planted) -> None:
    """a = x + x; b = x + a; c = a + b; a = c + c (over what b and c have read); d = a + x."""
    x, a, b, c, d = seeded.place(X), *(seeded.empty(3 * N) for _ in range(4))
    steps = [(x, x, a), (x, a, b), (a, b, c), (c, c, a), (a, x, d)]
    calls = [("add_bf16", list(s), ["r", "r", "w"], [3, 1, 1, N]) for s in steps]
    seeded.core.run_library(seeded.library, calls)
    np.testing.assert_allclose(seeded.read(d), 11 * X, rtol=1e-6)


def test_records_count_bytes(planted: Planted) -> None:
    x, y = planted.place(X), planted.empty(3 * N)
    assert planted.launch("copy", [x, y], ["r", "w"], 3) == [768, 768, 768, 768, 768, 768]
    assert planted.launch("copy", [x, y], ["r", "w"], 1) == [768, 768, 256, 256, 256, 256]
    # every thread reads all 64 values, then writes its own
    assert planted.launch("in_place", [(y[0], 0, N, "f32")], ["rw"]) == [
        256,
        256,
        64 * 256,
        256,
        256,
        256,
    ]


def test_sparse_memory(planted: Planted) -> None:
    """Four gigabytes of which two pages are touched."""
    words = 1 << 30
    x, y = planted.empty(words), planted.empty(2)
    x[0].write(0, np.float32([3]).view(np.uint8))
    n = planted.place(np.uint64([words]))
    with pytest.raises(
        _core.DeviceError, match=r"thread 1: uninitialised: reads 4 bytes at byte 4294967292 of"
    ):
        planted.launch("ends", [x, n, y], ["r", "r", "w"])
    x[0].write(4 * words - 4, np.float32([5]).view(np.uint8))
    planted.launch("ends", [x, n, y], ["r", "r", "w"])
    np.testing.assert_array_equal(planted.read(y), [3, 5])


def test_memory_limit(planted: Planted) -> None:
    with pytest.raises(
        _core.LilyError, match=r"sim: huge needs 1152921504606846976 bytes, \d+ of \d+ are left"
    ):
        planted.core.buffer(1 << 60, "huge")


def test_one_seed_repeats_itself(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(seed: int) -> str:
        with pytest.raises(_core.DeviceError) as error:
            Planted(library, seed, monkeypatch).run("missing_second_barrier")
        return str(error.value)

    assert message(5) == message(5)
    assert len({message(seed) for seed in range(8)}) > 1
