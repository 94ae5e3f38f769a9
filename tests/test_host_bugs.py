"""The tests of the Metal device can fail: seeded bugs of the host layer are found by them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import host_bugs
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("bug", host_bugs.BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_bug_is_in_one_place(bug: host_bugs.Bug) -> None:
    assert host_bugs.mutated(bug) != {
        name: (host_bugs.SOURCES / name).read_text() for name in host_bugs.FILES
    }


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in host_bugs.BUGS}) == len(host_bugs.BUGS) >= 25


def test_what_does_not_load_is_no_clean_run(tmp_path: Path) -> None:
    """Neither would be a build in which no test runs."""
    (tmp_path / "lily").mkdir()
    (tmp_path / "lily/__init__.py").write_text("raise ImportError('planted')\n")
    assert host_bugs.outcome(tmp_path, 300)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_bug_is_found() -> None:
    if sys.platform != "linux":
        pytest.skip("the software Metal stands in for a Mac on Linux")
    if importlib.util.find_spec("ziglang") is None or shutil.which("cmake") is None:
        pytest.skip("ziglang and cmake build the software Metal, one of them is not installed")
    command = [sys.executable, "tests/apple/run.py", "--no-tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-20000:]
    assert host_bugs.survivors(ROOT / "build/software-metal") == []
