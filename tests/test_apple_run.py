"""The documented command for Metal without a Mac, plain and under clang's sanitizers."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Host code is what the sanitizers look at: faults, order, lifetimes. Kernels have the shadow.
HOST = ["tests/test_metal.py", "tests/test_software_metal.py", "tests/test_embed.py"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sanitizer", [None, "address", "thread"])
def test_the_host_code_runs_on_the_software_metal(sanitizer: str | None) -> None:
    if sys.platform != "linux":
        pytest.skip("the software Metal stands in for a Mac on Linux")
    if importlib.util.find_spec("ziglang") is None or shutil.which("cmake") is None:
        pytest.skip("ziglang and cmake build the software Metal, one of them is not installed")
    if sanitizer and shutil.which("gcc") is None:
        pytest.skip("the sanitizers' runtime comes with gcc, which is not here")
    options = ["--sanitize", sanitizer] if sanitizer else []
    command = [sys.executable, "tests/apple/run.py", *options, *HOST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-20000:]
