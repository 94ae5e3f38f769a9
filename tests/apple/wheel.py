"""The macOS wheel, built on Linux: `python tests/apple/wheel.py OUT [PYTHON]`.

Cross-compiles the checkout for Apple silicon, macOS 14 and later, with zig and the derived headers,
and puts the wheel into OUT. The Python that builds decides its kind: 3.12 or later gives
cp312-abi3 (for every later CPython), 3.11 gives cp311. PYTHON is another interpreter than this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pinned
import sdk

ROOT = Path(__file__).resolve().parents[2]
MACOS = "14.0"  # the oldest that the wheel is for; zig_cxx.py compiles for it


def build(out: Path, python: str = sys.executable) -> Path:
    """Builds with `python` in an environment of its own; returns the wheel."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sdk.write(Path(scratch) / "sdk")
        # Not pip's own isolation: the variables below would make it fetch tools for a Mac.
        subprocess.run([python, "-m", "venv", f"{scratch}/venv"], check=True)
        pip = [f"{scratch}/venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        tools = [*project["build-system"]["requires"], "cmake", "ninja"]
        subprocess.run([*pip, "install", "--quiet", *tools], check=True)
        version = subprocess.check_output(
            [pip[0], "-c", "import sys; print('%d%d' % sys.version_info[:2])"], text=True
        )
        environment = os.environ | {
            "PATH": f"{scratch}/venv/bin:{os.environ['PATH']}",
            # What setuptools and scikit-build-core take as the platform to build for.
            "_PYTHON_HOST_PLATFORM": f"macosx-{MACOS}-arm64",
            "ARCHFLAGS": "-arch arm64",
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.strip()}-darwin.so",
        }
        settings = {
            "build-dir": f"{scratch}/build",
            "cmake.define.CMAKE_TOOLCHAIN_FILE": ROOT / "cmake/macos-arm64.cmake",
            "cmake.define.LILY_APPLE_SDK": f"{scratch}/sdk",
            "cmake.define.LILY_PYTHON": pip[0],
        }
        command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", f"{scratch}/wheel"]
        for name, value in settings.items():
            command += ["-C", f"{name}={value}"]
        subprocess.run([*command, str(ROOT)], env=environment, check=True)
        (built,) = Path(scratch, "wheel").glob("*.whl")
        return Path(shutil.copy(built, out))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python tests/apple/wheel.py OUT [PYTHON]")
    try:
        print(build(Path(sys.argv[1]), *sys.argv[2:]))
    except (pinned.Unavailable, subprocess.CalledProcessError) as error:
        sys.exit(f"wheel.py: {error}")
