"""metal.mm runs on Linux: `python tests/apple/run.py [--sanitize address|thread] [pytest arguments]`.

Derives the headers, builds the extension with src/cpp/metal.mm as it is and the software Metal in
build/software-metal, and runs the tests of kernels, models, sessions and engine on device "metal".
Fails when a test fails or any rule of Metal was broken, whoever was told.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import nanobind

APPLE = Path(__file__).resolve().parent
ROOT = APPLE.parents[1]
# What takes its devices from the fixture, and what is the software Metal's own.
TESTS = [
    f"tests/test_{name}.py"
    for name in (
        "linear attention delta moe embed sample model session session_faults flavours shapes "
        "metal software_metal"
    ).split()
]


def build(folder: Path, sanitizer: str | None, jobs: int) -> None:
    headers = folder / "headers"
    subprocess.run([sys.executable, APPLE / "headers.py", headers], check=True)
    flags = {None: "", "address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
        "LILY_SOFTWARE_METAL": headers,
        "LILY_TILE": "simdgroup",
        "LILY_CUDA": "OFF",
        "CMAKE_CXX_FLAGS": flags[sanitizer],
    }
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", folder, "-j", str(jobs)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", choices=["address", "thread"])
    parser.add_argument("--build", type=Path, help="build folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--no-tests", action="store_true", help="only build")
    options, rest = parser.parse_known_args()
    name = "software-metal" + (f"-{options.sanitize}" if options.sanitize else "")
    folder = (options.build or ROOT / "build" / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build(folder, options.sanitize, options.jobs)
    if options.no_tests:
        return 0
    report = folder / "broken_rules.txt"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "package"), str(APPLE / "software_metal")]),
        "LILY_DEVICES": "metal",
        "LILY_REQUIRE": "metal",
        "LILY_CACHE": str(folder / "cache"),
        "SOFTWARE_METAL_REPORT": str(report),
        "SOFTWARE_METAL_PROBE": str(folder / "software_metal_probe"),
    }
    chosen = rest if any(a.startswith("tests/") for a in rest) else [*TESTS, *rest]
    command = [sys.executable, "-m", "pytest", "-p", "broken_rules", *chosen]
    failed = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if report.exists():
        print(f"rules of Metal were broken:\n{report.read_text()}", file=sys.stderr)
        return 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
