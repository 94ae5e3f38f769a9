"""Which tile the Metal device takes: by a timed trial, where the system has tensor operations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import test_attention
import test_delta
import test_linear
from kernel_harness import Kernels
from lily import _core
from test_metal import (
    SOFTWARE,
    TIMEOUT,
    SoftwareMetal,
    cache,
    no_rule_is_broken,
    pytestmark,
    software,
)

__all__ = ["cache", "no_rule_is_broken", "pytestmark", "software"]  # fixtures, and where it runs


def products(exact: bool = False) -> tuple[Kernels, str]:
    """A device that has computed a prefill product right, and what it says of itself."""
    kernels = Kernels("metal", exact)
    test_linear.test_matmul_formats(kernels, 4, 64, False)
    return kernels, kernels.core.description


@pytest.mark.parametrize(
    ("speed", "says"),
    [
        ("4", r"tensor operations \(0\.25 ms against 1 ms\)"),
        ("0.5", r"simdgroup matrices \(2 ms against 1 ms\)"),
    ],
)
def test_the_faster_tile_is_taken(
    software: SoftwareMetal, cache: Path, monkeypatch: pytest.MonkeyPatch, speed: str, says: str
) -> None:
    """By a trial, once; the next process knows."""
    monkeypatch.setenv("SOFTWARE_METAL_TENSOR", speed)
    assert re.search(says, products()[1])
    before = software.count("dispatches")
    assert re.search(says.split(" \\")[0] + r" \(by an earlier trial\)", products()[1])
    assert software.count("dispatches") - before < 10
    (kept,) = cache.glob("*.tile")
    kept.write_text("garbage")
    assert re.search(says, products()[1])


@pytest.mark.parametrize(
    ("wrong", "value", "off"), [("WRONG", "1", "1"), ("WRONG", "nan", "nan"), ("IDLE", "1", "nan")]
)
def test_a_tile_that_computes_something_else_is_not_taken(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch, wrong: str, value: str, off: str
) -> None:
    """In the first of all values: what comes after is right. Or it computes nothing."""
    monkeypatch.setenv("SOFTWARE_METAL_TENSOR", "4")
    monkeypatch.setenv(f"SOFTWARE_METAL_{wrong}", value)
    says = rf"simdgroup matrices \(tensor operations are off by -?{off} of \d"
    assert re.search(says, products()[1])


def test_without_memory_for_the_trial_there_is_none(
    software: SoftwareMetal, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTWARE_METAL_TENSOR", "4")
    monkeypatch.setenv("SOFTWARE_METAL_WORKING_SET", str(258 << 20))  # 256 MiB are kept back
    assert re.search(r"simdgroup matrices \(.*trial: y needs \d+ bytes", products()[1])
    monkeypatch.delenv("SOFTWARE_METAL_WORKING_SET")
    assert "tensor operations (0.25 ms" in products()[1]  # nothing was kept


def test_a_fault_in_the_trial_decides_nothing(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTWARE_METAL_TENSOR", "4")
    kernels = Kernels("metal", False)
    software.inject(f"command_buffer={TIMEOUT}")
    with pytest.raises(_core.DeviceError, match="trial of tiles"):
        test_linear.test_matmul_formats(kernels, 4, 64, False)
    test_linear.test_matmul_formats(kernels, 4, 64, False)
    assert "tensor operations (0.25 ms" in kernels.core.description


def test_a_system_without_tensor_operations(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "simdgroup matrices (the system has no other)" in products()[1]
    monkeypatch.setenv("SOFTWARE_METAL_TENSOR", "4")
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", "15.0")
    assert "simdgroup matrices (the system has no other)" in products()[1]
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", "26.0")
    assert "simdgroup matrices (exact mode)" in products(exact=True)[1]
    software.inject("compile", skip=len(_core.metal_files()))  # the first with tensor operations
    assert "simdgroup matrices (tensor operations do not compile here: " in products()[1]


def test_prefill_on_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four ops that have a tile, through the device."""
    monkeypatch.setenv("SOFTWARE_METAL_TENSOR", "4")
    kernels, says = products()
    if SOFTWARE is None and "tensor operations (" not in says:
        pytest.skip(f"this Mac takes the other tile: {says}")
    assert "tensor operations (" in says
    test_linear.test_expert_formats(kernels, 4, 64, False, True)
    shape = test_attention.Shape(heads=6, kv_heads=2)
    test_attention.test_flash(kernels, shape, 17, 0)
    test_delta.test_scan(kernels, 65)
