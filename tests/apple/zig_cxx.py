"""`zig cc` and `zig c++` for Apple silicon as CMake and nanobind call a compiler on a Mac."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import finish

# macOS 14. Its pyconfig.h would say the rest; without it POSIX macros of Linux's hide BSD functions.
TARGET = ["-target", "aarch64-macos.14.0", "-D_DARWIN_C_SOURCE"]
# zig's linker has no counterpart of these, and needs none.
IGNORED = {"-Wl,-headerpad_max_install_names", "-Wl,-search_paths_first", "-Wl,-x", "-Wl,-S"}


def main() -> int:
    driver, *given = sys.argv[1:]
    linking = "-bundle" in given
    options = []
    for option in given:
        if option == "-bundle":
            options.append("-dynamiclib")  # zig 0.17 crashes on -bundle; a dylib loads as well
        elif option.endswith("darwin-ld-cpython.sym"):
            options.append("-Wl,-undefined,dynamic_lookup")  # zig reads no list of names
        elif option not in IGNORED:
            options.append(option)
    command = [sys.executable, "-m", "ziglang", driver, *TARGET, *options]
    code = subprocess.run(command).returncode
    if linking and code == 0:
        finish.finish(Path(options[options.index("-o") + 1]))
    return code


if __name__ == "__main__":
    sys.exit(main())
