"""zig's clang by itself on Objective-C++ for Apple: no libc++ to build first, 1.5 s a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ziglang

TARGET = "arm64-apple-macos14"  # the oldest macOS that is supported
WARNINGS = ("-Wall", "-Wextra", "-Wunguarded-availability-new", "-Werror")

# What zig's own driver says of the libc++ in its package.
_LIBCPP = (
    "HARDENING_MODE_DEFAULT=_LIBCPP_HARDENING_MODE_NONE",
    "ASSERTION_SEMANTIC_DEFAULT=_LIBCPP_ASSERTION_SEMANTIC_IGNORE",
    "ABI_VERSION=1",
    "ABI_NAMESPACE=__1",
    "HAS_THREADS=1",
    "HAS_THREAD_API_PTHREAD=1",
    "HAS_MONOTONIC_CLOCK=1",
    "HAS_FILESYSTEM=1",
    "HAS_RANDOM_DEVICE=1",
    "HAS_LOCALIZATION=1",
    "HAS_WIDE_CHARACTERS=1",
    "HAS_UNICODE=1",
    "HAS_TERMINAL=1",
    "HAS_MUSL_LIBC=0",
    "HAS_VENDOR_AVAILABILITY_ANNOTATIONS=0",
    "PSTL_BACKEND_SERIAL=1",
    "HAS_TIME_ZONE_DATABASE=0",
    "HAS_C8RTOMB_MBRTOC8=0",
)


def command(headers: Path, *options: str) -> list[str]:
    """Compiles against the derived headers and zig's Darwin headers only."""
    zig = Path(ziglang.__file__).parent / "lib"
    system = ("libcxx/include", "libcxxabi/include", "include", "libc/include/any-darwin-any")
    return [
        *(sys.executable, "-m", "ziglang", "clang", "-target", TARGET, "-nostdinc", "-nostdinc++"),
        *(f"-D_LIBCPP_{define}" for define in _LIBCPP),
        *(f"-isystem{zig / folder}" for folder in system),
        f"-isystem{headers}",
        *("-x", "objective-c++", "-std=c++20", "-fobjc-arc", "-fblocks", *options),
    ]


def precompile(headers: Path, text: str, out: Path, *options: str) -> None:
    """Makes `out` of the includes of `text`; checks that use it take a third of the time."""
    includes = "".join(
        line for line in text.splitlines(True) if line.startswith(("#import", "#include"))
    )
    kind = ("-x", "objective-c++-header", "-fpch-instantiate-templates", "-o", str(out))
    whole = command(headers, *options, *kind, "-")
    subprocess.run(whole, input=includes, text=True, check=True, timeout=120)


def check(headers: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Parses `text` as a file of its own; warnings are errors."""
    whole = command(headers, "-fsyntax-only", *WARNINGS, *options, "-")
    return subprocess.run(whole, input=text, capture_output=True, text=True, timeout=120)
