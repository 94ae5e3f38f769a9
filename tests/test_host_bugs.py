"""The tests of the Metal device can fail: seeded bugs of the host layer are found by them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
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


def test_an_editable_lily_is_not_the_one_that_is_tested(tmp_path: Path) -> None:
    """Its finder answers before PYTHONPATH does."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "editable.py").write_text(
        "import importlib.util, sys\n"
        "class ScikitBuildRedirectingFinder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'lily':\n"
        "            return importlib.util.spec_from_file_location(name, __file__)\n"
        "sys.meta_path.insert(0, ScikitBuildRedirectingFinder())\n"
    )
    (site / "editable.pth").write_text("import editable\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/lily.py").write_text("")
    found = []
    for places in (["package"], ["package", ROOT / "tests/apple/software_metal"]):
        where = os.pathsep.join(str(tmp_path / place) for place in places)
        command = [tmp_path / "venv/bin/python", "-c", "import lily; print(lily.__file__)"]
        environment = os.environ | {"PYTHONPATH": where}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(Path(done.stdout.strip()).name)
    assert found == ["editable.py", "lily.py"]


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
