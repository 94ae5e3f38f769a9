"""metal.mm runs on Linux: `python tests/apple/run.py [--sanitize address|thread] [pytest arguments]`.

Derives the headers, builds the extension with src/cpp/metal.mm as it is and the software Metal in
build/software-metal, and runs the tests of kernels, models, sessions and engine on device "metal".
Fails when a test fails or any rule of Metal was broken, whoever was told.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
        "metal metal_tile software_metal selftest"
    ).split()
]


def sanitizer_flags(sanitizer: str | None) -> tuple[list[str], list[Path]]:
    """zig's clang inserts the checks, its driver knows no runtime for them: gcc's serves."""
    if sanitizer is None:
        return [], []
    libraries = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}[sanitizer]
    gcc = shutil.which("gcc")
    if gcc is None:
        raise SystemExit("the sanitizers' runtime comes with gcc, which is not here")
    paths = []
    for library in libraries:
        asked = [gcc, f"-print-file-name={library}"]
        path = Path(
            subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        )
        if not path.is_absolute():
            raise SystemExit(f"gcc has no {library} here")
        paths.append(path.resolve())
    ignore = f"-fsanitize-ignorelist={APPLE / 'software_metal/sanitizer_ignore.txt'}"
    flags = [
        "-g1",
        "-fno-omit-frame-pointer",
        "-Xclang",
        f"-fsanitize={sanitizer}",
        "-Xclang",
        ignore,
    ]
    if sanitizer == "address":
        # No vptr, no function: gcc's runtime has no counterpart of clang's.
        flags += ["-fsanitize=undefined", "-fno-sanitize=vptr,function", "-fno-sanitize-trap=all"]
        flags += ["-fno-sanitize-recover=undefined"]
    else:
        flags += ["-fno-sanitize=all"]
    return flags, paths


def build(folder: Path, sanitizer: str | None, jobs: int) -> None:
    headers = folder / "headers"
    subprocess.run([sys.executable, APPLE / "headers.py", headers], check=True)
    flags, runtime = sanitizer_flags(sanitizer)
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
        "LILY_SOFTWARE_METAL": headers,
        "LILY_TILE": "simdgroup",
        "LILY_CUDA": "OFF",
        "CMAKE_CXX_FLAGS": " ".join(flags),
        "LILY_SANITIZE": sanitizer or "",
    }
    for kind in ("EXE", "MODULE", "SHARED"):
        definitions[f"CMAKE_{kind}_LINKER_FLAGS"] = " ".join(map(str, runtime))
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
    logs = folder / "sanitizer"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    if options.sanitize:
        preload = os.pathsep.join(map(str, sanitizer_flags(options.sanitize)[1]))
        # Python's own leaks are no concern; fibers have no fake stacks.
        common = f"log_path={logs}/report:print_stacktrace=1"
        environment |= {
            "LD_PRELOAD": preload,
            "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return=0:{common}",
            "UBSAN_OPTIONS": common,
            "TSAN_OPTIONS": f"halt_on_error=0:{common}",
        }
    chosen = rest if any(a.startswith("tests/") for a in rest) else [*TESTS, *rest]
    command = [sys.executable, "-m", "pytest", "-p", "broken_rules", *chosen]
    failed = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if report.exists():
        print(f"rules of Metal were broken:\n{report.read_text()}", file=sys.stderr)
        return 1
    for log in sorted(logs.iterdir()):
        print(log.read_text(), file=sys.stderr)
        failed = failed or 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
