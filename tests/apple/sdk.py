"""What stands in for an SDK on Linux: `python tests/apple/sdk.py OUT` writes headers and link stubs.

A stub (.tbd) tells the linker which names a library of macOS has; the library itself stays on the Mac.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import headers
import pinned

METAL = "/System/Library/Frameworks/Metal.framework/Versions/A/Metal"
FOUNDATION = "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation"
CORE_FOUNDATION = "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation"
OBJC = "/usr/lib/libobjc.A.dylib"
SYSTEM = "/usr/lib/libSystem.B.dylib"  # zig brings its stub

# Classes of Foundation.h by the library that has them. Which one is not in Apple's documentation
# but in every program that was linked on a Mac; the tests compare with some.
CLASSES = {
    FOUNDATION: ("NSError", "NSNumber", "NSProcessInfo", "NSString"),
    CORE_FOUNDATION: ("NSArray", "NSData", "NSDictionary", "NSURL"),
    OBJC: ("NSObject",),
}
SYMBOLS = {
    FOUNDATION: ("_NSLocalizedDescriptionKey", "_NSLog"),
    CORE_FOUNDATION: ("___CFConstantStringClassReference",),
    OBJC: (
        "___objc_personality_v0",
        "__objc_empty_cache",
        *(f"_objc_{verb}_x{register}" for verb in ("retain", "release") for register in range(29)),
        *(
            f"_objc_{name}"
            for name in (
                *(
                    "alloc",
                    "alloc_init",
                    "opt_class",
                    "opt_new",
                    "opt_respondsToSelector",
                    "opt_self",
                ),
                *("autorelease", "autoreleasePoolPop", "autoreleasePoolPush"),
                *("autoreleaseReturnValue", "claimAutoreleasedReturnValue"),
                *("retainAutoreleasedReturnValue", "unsafeClaimAutoreleasedReturnValue"),
                *("retain", "retainAutorelease", "retainAutoreleaseReturnValue", "retainBlock"),
                *("release", "storeStrong", "begin_catch", "end_catch", "terminate"),
                *("enumerationMutation", "msgSend", "msgSendSuper2", "getProtocol"),
            )
        ),
    ),
}
STUB = """--- !tapi-tbd
tbd-version:     4
targets:         [ arm64-macos ]
install-name:    '{name}'
current-version: 1
exports:
  - targets:         [ arm64-macos ]
    symbols:         [ {symbols} ]
    objc-classes:    [ {classes} ]
...
"""


def exports(header: str) -> dict[str, tuple[list[str], list[str]]]:
    """Symbols and classes by install name, Metal's from the text of its derived header."""
    found = {name: ([*SYMBOLS[name]], [*CLASSES[name]]) for name in SYMBOLS}
    constants = re.findall(r"^MTL_EXTERN NSString \*const (\w+)", header, re.M)
    functions = re.findall(r"^MTL_EXTERN .*?(\w+)\(void\)", header, re.M)
    classes = re.findall(r"^@interface (\w+)", header, re.M)
    return {METAL: ([f"_{name}" for name in [*constants, *functions]], classes), **found}


def write(out: Path) -> None:
    """Writes include/, Frameworks/ and lib/ below `out`."""
    headers.write(out / "include")
    header = (out / "include/Metal/Metal.h").read_text()
    for name, (symbols, classes) in exports(header).items():
        base = Path(name).name
        path = out / f"Frameworks/{base}.framework/{base}.tbd"
        if name == OBJC:
            path = out / "lib/libobjc.tbd"
        path.parent.mkdir(parents=True, exist_ok=True)
        quoted = ", ".join(f"'{symbol}'" for symbol in symbols)
        path.write_text(STUB.format(name=name, symbols=quoted, classes=", ".join(classes)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/apple/sdk.py OUT")
    try:
        write(Path(sys.argv[1]))
    except pinned.Unavailable as error:
        sys.exit(f"sdk.py: {error}")
