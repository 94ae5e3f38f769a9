"""Shared fixtures: the devices, the fixture folders; LILY_REQUIRE makes an absent device a failure."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from kernel_harness import Kernels
from lily import _core

ROOT = Path(__file__).resolve().parent.parent
_STATUS = {s.name: s for s in _core.devices()}
_REQUIRED = os.environ.get("LILY_REQUIRE", "").split(",")
# LILY_DEVICES names the ones to test; metal else counts where it is, or has to be.
_METAL = ("metal",) if _STATUS["metal"].available or "metal" in _REQUIRED else ()
DEVICES = tuple(filter(None, os.environ.get("LILY_DEVICES", "").split(","))) or (
    "cpu",
    "sim",
    "cuda",
    *_METAL,
)


def require_device(name: str) -> None:
    """Skips with the reason when the device is absent, or fails when LILY_REQUIRE names it."""
    status = _STATUS[name]
    if status.available:
        return
    if name in _REQUIRED:
        pytest.fail(f"device {name} is required and absent: {status.description}")
    pytest.skip(f"device {name} is absent: {status.description}")


def find_fixture(name: str) -> Path:
    """A file or folder of the shared fixtures (LILY_FIXTURES or shared/fixtures above the tree)."""
    places = [Path(os.environ["LILY_FIXTURES"])] if "LILY_FIXTURES" in os.environ else []
    places += [p / "shared/fixtures" for p in ROOT.parents]
    for place in places:
        if (place / name).exists():
            return place / name
    pytest.skip(f"fixture {name} is not here (set LILY_FIXTURES to its folder)")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn."""
    require_device(request.param)
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["exact", "bf16"])
def kernels(request: pytest.FixtureRequest, device: str) -> Kernels:
    """Single ops on each device in both activation modes."""
    on_card = device in ("cuda", "metal")
    return _on_card(device, request.param) if on_card else Kernels(device, request.param)


@functools.cache
def _on_card(device: str, exact: bool) -> Kernels:
    """One for all tests: a context takes 0.2 s to make, the driver compiles kernels for seconds."""
    return Kernels(device, exact)
