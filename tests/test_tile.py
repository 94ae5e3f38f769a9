"""The tile on simdgroup matrices, as Apple's compiler gets it: alone, and in the prefill kernels."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kernel_harness as h
import mutate
import test_attention
import test_delta
import test_linear
from conftest import require_device
from kernel_harness import Kernels
from lily import _core
from test_sim import SEEDS, Planted

PLANTED = Path(__file__).with_name("sim_planted")
X = np.random.default_rng(5).standard_normal((16, 16)).astype(np.float32)


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    require_device("sim")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: nothing here compiles kernels")


def build(
    folder: Path, *sources: Path, modes: tuple[str, ...] = ("bf16",), metal: Path = mutate.METAL
) -> str:
    """The files with Apple's tile as a library for sim."""
    zig = [sys.executable, "-m", "ziglang"]
    include = [f"-I{metal}", *mutate.flags()]  # before the tree's own
    objects = []
    for source in sources:
        for mode in modes:
            objects.append(folder / f"{source.stem}_{mode}.o")
            define = ["-DLILY_EXACT"] if mode == "exact" else []
            subprocess.run(
                [*zig, "clang", *include, *define, "-DLILY_TILE_SIMDGROUP", "-c", str(source), "-o",
                 str(objects[-1])], check=True,
            )  # fmt: skip
    made = folder / "kernels.so"
    subprocess.run([*zig, "ld.lld", "-shared", *map(str, objects), "-o", str(made)], check=True)
    return str(made)


@pytest.fixture(scope="session")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The files that have tiles."""
    with_tiles = [p for p in mutate.METAL.glob("*.metal") if '"tile.h"' in p.read_text()]
    assert {p.stem for p in with_tiles} == {"linear", "attention", "deltanet"}
    return build(tmp_path_factory.mktemp("prefill"), *with_tiles, modes=("bf16", "exact"))


@pytest.fixture(scope="session")
def planted_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    sources = [PLANTED / "planted.metal", PLANTED / "matrices.metal"]
    return build(tmp_path_factory.mktemp("tiles"), *sources)


@pytest.fixture
def planted(planted_library: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(planted_library, 1, monkeypatch)


@pytest.fixture(params=SEEDS[:8])
def seeded(
    request: pytest.FixtureRequest, planted_library: str, monkeypatch: pytest.MonkeyPatch
) -> Planted:
    return Planted(planted_library, request.param, monkeypatch)


# ---- matrices ------------------------------------------------------------------------------------
def by_lane(m: np.ndarray) -> np.ndarray:
    """The elements of an 8 x 8 matrix in the order of the lanes that hold them, as MLX has it."""
    lane = np.arange(32)
    quad = lane // 4
    row, column = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
    return np.stack([m[row, column], m[row, column + 1]], 1).reshape(-1)


def test_matrices(seeded: Planted) -> None:
    run = functools.partial(seeded.run, x=X, threads=32)
    a = X[:8, :8]
    np.testing.assert_array_equal(run("matrix_layout", out=64), by_lane(a))
    np.testing.assert_array_equal(run("matrix_turned", out=64), by_lane(X[:8, 3:11].T))
    np.testing.assert_array_equal(run("matrix_copy", out=256).reshape(16, 16), X)
    np.testing.assert_array_equal(run("matrix_store_turned", out=64).reshape(8, 8), a.T)
    product = a.astype(np.float64) @ a.T
    got = run("matrix_products", out=128).reshape(2, 8, 8)
    np.testing.assert_allclose(got, [product, product + 2], atol=1e-5)
    rough = h.from_bf16(h.bf16(a)).astype(np.float64)
    got = run("matrix_bf16", out=128).reshape(2, 8, 8)
    np.testing.assert_allclose(got, [rough @ rough.T, rough], atol=1e-5)


@pytest.mark.parametrize(
    "name,says",
    [
        (
            "matrix_divergent",
            r"collective in divergent control flow: it is in simdgroup_load, thread 5 of the same simdgroup has ended",
        ),
        (
            "matrix_half_product",
            r"collective in divergent control flow: it is in simdgroup_multiply_accumulate, thread \d+",
        ),
        (
            "matrix_lanes_differ",
            r"simdgroup_load: its lanes pass different operands than thread \d+",
        ),
        (
            "matrix_lines_differ",
            r"simdgroup_load: its lanes pass different operands than thread \d+",
        ),
        (
            "matrix_short",
            r"out of bounds: reads 32 bytes at byte 996 of argument 0 'x', and byte 1024 .*, which ends at 1024",
        ),
        ("matrix_misaligned", r"tile: operand at byte 2 of argument 0 'x' is misaligned"),
        ("matrix_into_input", r"undeclared write: writes 32 bytes at byte 0 of argument 0 'x'"),
        (
            "matrix_no_barrier",
            r"race: reads \d+ bytes .* of threadgroup array 's', which thread \d+ wrote with no barrier",
        ),
        (
            "matrix_read_too_early",
            r"race: reads 4 bytes .* of threadgroup array 's', which thread \d+ wrote with no barrier",
        ),
    ],
)
def test_matrices_refused(planted: Planted, name: str, says: str) -> None:
    with pytest.raises(_core.DeviceError, match=says):
        planted.run(name, X, 64, threads=32)


# ---- tiles ---------------------------------------------------------------------------------------
def test_tiles(seeded: Planted) -> None:
    x = np.random.default_rng(4).standard_normal((32, 32)).astype(np.float32)
    product = x.astype(np.float64) @ x.T
    got = seeded.run("tile_product", x, 1024, threads=32).reshape(32, 32)
    np.testing.assert_allclose(got, product, atol=1e-4)
    scaled = (x.astype(np.float64) @ x) * np.arange(1, 33)[:, None]
    got = seeded.run("tile_rows", x, 1024, threads=32).reshape(32, 32)
    np.testing.assert_allclose(got, scaled, atol=1e-3)
    x = np.random.default_rng(6).standard_normal(2048).astype(np.float32)
    rough = h.from_bf16(h.bf16(x)).astype(np.float64)
    a, b, c = np.split(rough, [512, 1280])
    want = a.reshape(16, 32) @ (b.reshape(24, 32).T + c.reshape(32, 24))
    got = seeded.run("tile_bf16", x, 16 * 24, threads=32).reshape(16, 24)
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "name,says",
    [
        ("tile_no_barrier", r"race: reads \d+ bytes .* of threadgroup array 'a', which thread \d+"),
        ("tile_short", r"out of bounds: reads 32 bytes at .* of threadgroup array 'a'"),
        ("tile_lanes_differ", r"simdgroup_load: its lanes pass different operands than thread"),
    ],
)
def test_tiles_refused(planted: Planted, name: str, says: str) -> None:
    with pytest.raises(_core.DeviceError, match=says):
        planted.run(name, X[:1].repeat(64), 1024, threads=32)


# ---- the prefill kernels -------------------------------------------------------------------------
both = pytest.mark.parametrize("exact", [True, False], ids=["exact", "bf16"])


@both
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_linear_kernels(
    prefill: str, monkeypatch: pytest.MonkeyPatch, bits: int, exact: bool
) -> None:
    monkeypatch.setenv("LILY_SIM_KERNELS", prefill)
    kernels = Kernels("sim", exact)
    test_linear.test_matmul_formats(kernels, bits, 64, False)
    test_linear.test_expert_formats(kernels, bits, 64, False, bits == 8)
    if bits == 4:
        test_linear.test_matmul_rows(kernels, 65, "swiglu")
        test_linear.test_expert_tiles(kernels, 70, 32)


@both
@pytest.mark.parametrize("rows,position", [(17, 0), (5, 253)])
def test_flash(
    prefill: str, monkeypatch: pytest.MonkeyPatch, rows: int, position: int, exact: bool
) -> None:
    monkeypatch.setenv("LILY_SIM_KERNELS", prefill)
    shape = test_attention.Shape(heads=6, kv_heads=2)
    test_attention.test_flash(Kernels("sim", exact), shape, rows, position)


@both
@pytest.mark.parametrize("rows", [17, 130])
def test_scan(prefill: str, monkeypatch: pytest.MonkeyPatch, rows: int, exact: bool) -> None:
    monkeypatch.setenv("LILY_SIM_KERNELS", prefill)
    test_delta.test_scan(Kernels("sim", exact), rows)


def test_a_wrong_layout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an ordinary case, so the library's tile is the one that ran."""
    wrong = tmp_path / "metal"
    shutil.copytree(mutate.METAL, wrong)
    text = (wrong / "tile.h").read_text()
    row = "((lane >> 2) & 4) + ((lane >> 1) & 3)"
    assert text.count(row) == 1
    (wrong / "tile.h").write_text(text.replace(row, row.replace("(lane >> 1)", "(~lane >> 1)")))
    library = build(tmp_path, wrong / "linear.metal", metal=wrong)
    monkeypatch.setenv("LILY_SIM_KERNELS", library)
    with pytest.raises(AssertionError, match="off, first at"):
        test_linear.test_matmul_formats(Kernels("sim", False), 4, 64, False)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["matmul", "expert_matmul", "flash", "delta_scan"])
def test_all_tests_of(prefill: str, op: str) -> None:
    """Every op that has a tile passes all its tests with this one."""
    assert not mutate.killer(op, Path(prefill), 600)


def test_every_op_with_a_tile_is_here() -> None:
    found = set()
    for path in mutate.METAL.glob("*.metal"):
        text = path.read_text()
        code = mutate.plain(text)
        for op in re.findall(r"^LILY_VARIANTS_(\w+)\(", text, re.M):
            parts = mutate.parts_of(op, code, text)
            if any("Tile<" in code[p.begin : p.end] for p in parts):
                found.add(op)
    assert found == {"matmul", "expert_matmul", "flash", "delta_scan"}
