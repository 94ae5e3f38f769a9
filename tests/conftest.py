"""Shared fixtures: the devices, the fixture folders; LILY_REQUIRE makes an absent device a failure."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from kernel_harness import Kernels
from lily import _core

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ("cpu", "sim", "cuda")
_STATUS = {s.name: s for s in _core.devices()}


def require_device(name: str) -> None:
    """Skips with the reason when the device is absent, or fails when LILY_REQUIRE names it."""
    status = _STATUS[name]
    if status.available:
        return
    if name in os.environ.get("LILY_REQUIRE", "").split(","):
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
    return _on_card(request.param) if device == "cuda" else Kernels(device, request.param)


@functools.cache
def _on_card(exact: bool) -> Kernels:
    """One for all tests: a context takes 0.2 s to make, the driver compiles kernels for seconds."""
    return Kernels("cuda", exact)
