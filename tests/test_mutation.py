"""The tests of the kernels can fail: mutants of the kernel text, compiled for sim, are killed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import mutate
import test_linear
from conftest import require_device
from kernel_harness import PARAMS, Kernels


@pytest.fixture(autouse=True)
def compiler() -> None:
    require_device("sim")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: nothing here compiles mutants")


def test_every_op_is_mutated() -> None:
    """Each op has tests to be run, and text of every kind that its kernel holds is found."""
    assert set(mutate.TESTS) == set(PARAMS)
    for op in mutate.TESTS:
        text = mutate.text_of(op)
        code = mutate.plain(text)
        assert len(code) == len(text)
        parts = mutate.parts_of(op, code, text)
        assert mutate.place(op, text, 0) == (mutate.source_of(op).name, 1)
        at = text.index(f"\nLILY_VARIANTS_{op}(") + 1
        file, line = mutate.place(op, text, at)
        assert (mutate.METAL / file).read_text().split("\n")[line - 1].startswith("LILY_VARIANTS_")
        sites = [c for find in mutate.OPERATORS.values() for p in parts for c in find(code, p)]
        assert len(sites) > mutate.MUTANTS
        assert all(start < end and code[start:end] != after for start, end, after in sites)


def test_a_dropped_bias_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an ordinary case of project, which the original passes in the same way."""
    text = mutate.text_of("project")
    scaled = "fma(sb.x, d[r][j], sb.y * xs[r * x_stride].sum[lane])"
    assert text.count(scaled) == 1
    monkeypatch.setenv("LILY_SIM_KERNELS", str(mutate.library(text, "project", tmp_path)))
    test_linear.test_project_k(Kernels("sim", True), 192)
    mutant = text.replace(scaled, "sb.x * d[r][j]")
    other = tmp_path / "mutant"
    other.mkdir()
    monkeypatch.setenv("LILY_SIM_KERNELS", str(mutate.library(mutant, "project", other)))
    for exact in (True, False):
        with pytest.raises(AssertionError, match="off, first at"):
            test_linear.test_project_k(Kernels("sim", exact), 192)
    monkeypatch.delenv("LILY_SIM_KERNELS")
    test_linear.test_project_k(Kernels("sim", True), 192)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_mutants() -> None:
    """Three of each op: at least 95 % are killed, and the survivors are listed with their reasons."""
    done = [m for op in mutate.TESTS for m in mutate.mutants_of(op, seed=1)]
    assert len(done) == mutate.MUTANTS * len(mutate.TESTS)
    assert not mutate.verdict(done)
