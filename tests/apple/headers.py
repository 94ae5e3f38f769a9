"""Derived headers: `python tests/apple/headers.py OUT` writes declarations of Metal and Foundation.

They stand in for an SDK's where there is none, to check and to cross-compile; nothing of them is
shipped. Metal.h is derived from metal-cpp of the SDKs of macOS 14, 15 and 26: what an older one
lacks is marked with the version that brought it, so that clang asks for `@available`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import metal_cpp
import pinned
from metal_cpp import Api, Method, split_arguments

GENERATIONS = (("14.0", pinned.MACOS_14), ("15.0", pinned.MACOS_15), ("26.0", pinned.MACOS_26))

PLAIN_TYPES = {
    "bool": "BOOL",
    "std::uint64_t": "uint64_t",
    "CGColorSpaceRef": "struct CGColorSpace *",
    "IOSurfaceRef": "struct __IOSurface *",
    "NS::Object": "id",
}
FOUNDATION_VALUES = {"NSUInteger", "NSInteger", "NSRange", "NSTimeInterval", "NSErrorDomain"}

# Where metal-cpp of macOS 26 departs from the SDK: (text, right text). The first was found by the
# comparison with pyobjc and by metal-cpp's older versions (48); the second is the documentation's.
CORRECTIONS = (
    ("MTLResourceStorageModeMemoryless = 1 << 5", "MTLResourceStorageModeMemoryless = 3 << 4"),
    ("newBufferWithBytesNoCopy:(const void *)", "newBufferWithBytesNoCopy:(void *)"),
)

# Element types of arrays, which metal-cpp does not tell, by selector; the documentation's.
ELEMENTS = {
    "binaryArchives": "id<MTLBinaryArchive>",
    "setBinaryArchives:": "id<MTLBinaryArchive>",
    "debugSignposts": "NSString *",
    "functionNames": "NSString *",
}

# What metal-cpp has no counterpart of; the names are documented.
EXTRA_STRINGS = ("MTLCommandBufferErrorDomain", "MTLLibraryErrorDomain")
PROLOGUE = """// Generated from metal-cpp by tests/apple/headers.py: declarations to check against, not an SDK.
#pragma once
#pragma clang system_header
#import <Foundation/Foundation.h>
#include <dispatch/dispatch.h>
#include <mach/mach_types.h>
#define MTL_EXTERN FOUNDATION_EXPORT
"""
SIZES = """NS_INLINE MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
  MTLSize size = {width, height, depth};
  return size;
}
NS_INLINE MTLOrigin MTLOriginMake(NSUInteger x, NSUInteger y, NSUInteger z) {
  MTLOrigin origin = {x, y, z};
  return origin;
}"""
FUNCTIONS = """MTL_EXTERN id<MTLDevice> MTLCreateSystemDefaultDevice(void) NS_RETURNS_RETAINED;
MTL_EXTERN NSArray<id<MTLDevice>> *MTLCopyAllDevices(void) NS_RETURNS_RETAINED;"""


class Writer:
    """Metal.h of the newest generation, with the age of each declaration from the older ones."""

    def __init__(self, generations: list[tuple[str, Api]]) -> None:
        self.generations = generations
        self.api = generations[-1][1]
        self.lines: list[str] = []

    def header(self) -> str:
        self.lines = [PROLOGUE]
        api = self.api
        self.lines += [f"@class {name};" for name in sorted(api.classes)]
        self.lines += [f"@protocol {name};" for name in sorted(api.protocols)]
        for name in api.enums:
            self._enum(name)
        blocks = {name for name, (_, meaning) in api.aliases.items() if "(^" in meaning}
        for name, (namespace, meaning) in api.aliases.items():
            if name not in blocks and self._name(meaning, namespace)[0] not in api.structs:
                spelled = self._type(meaning, namespace)
                if name.startswith(
                    "MTLAutoreleased"
                ):  # filled in by the callee: what ARC must know
                    spelled += "__autoreleasing "
                self.lines.append(f"typedef {spelled} {name};")
        self._structs()
        self.lines += ["typedef MTLSamplePosition MTLCoordinate2D;", SIZES]
        for name in blocks:
            namespace, meaning = api.aliases[name]
            self.lines.append(
                f"typedef {self._type(meaning, namespace).replace('(^)', f'(^{name})', 1)};"
            )
        for name in sorted(api.strings | set(EXTRA_STRINGS)):
            since = "" if name in EXTRA_STRINGS else self._since(lambda a, n=name: n in a.strings)
            self.lines.append(f"MTL_EXTERN NSString *const {name}{since};")
        self._owners(api.protocols, self._protocol)
        self._owners(api.classes, self._class)
        self.lines.append(FUNCTIONS)
        text = "\n".join(self.lines) + "\n"
        for wrong, right in CORRECTIONS:
            assert text.count(wrong) == 1, f"no longer in metal-cpp: {wrong}"
            text = text.replace(wrong, right)
        return text

    def _since(self, has) -> str:  # type: ignore[no-untyped-def]
        """The attribute for what `has` finds in some generations only."""
        version = next(version for version, api in self.generations if has(api))
        oldest = self.generations[0][0]
        return "" if version == oldest else f" API_AVAILABLE(macos({version}))"

    # ---- types ----

    def _name(self, cpp: str, namespace: str) -> tuple[str, bool]:
        """A C++ type's name in Objective-C, and whether a pointer to it is an object."""
        if cpp in PLAIN_TYPES:
            return PLAIN_TYPES[cpp], False
        api = self.api
        candidates = [cpp.replace("::", "")] if "::" in cpp else [namespace + cpp, "MTL" + cpp, cpp]
        for name in candidates:
            if name in api.protocols:
                return f"id<{name}>", True
            if name in api.classes:
                return f"{name} *", True
            if name in api.enums or name in api.structs or name in api.aliases:
                return name, False
        name = candidates[-1]
        if cpp.startswith("NS::") and name not in FOUNDATION_VALUES:
            return f"{name} *", True
        return name, False

    def _type(self, cpp: str, namespace: str, array: bool = False) -> str:
        """A C++ type in Objective-C, ready to stand before a name."""
        if "(^" in cpp:
            return self._block(cpp, namespace)
        const = cpp.strip().startswith("const ")
        core = re.sub(r"\b(const|class|struct)\b", " ", cpp)
        stars = core.count("*")
        name, is_object = self._name(core.replace("*", " ").strip(), namespace)
        if is_object or name == "id":
            stars -= 1
            const = False  # of objects, metal-cpp's const says nothing
        alias = self.api.aliases.get(name, ("", ""))[1]
        if alias.endswith("*") and stars and not alias.startswith("void"):
            const = False
        space = "" if name.endswith("*") else " "
        spelled = name + space + "*" * stars
        if array:
            return f"const {spelled}[]" if not stars else f"{'const ' * const}{spelled} const[]"
        return ("const " if const and stars else "") + spelled.rstrip(" ")

    def _block(self, cpp: str, namespace: str) -> str:
        found = re.match(r"^(?:const\s+)?(.*?)\(\^\s*\w*\s*\)\s*\((.*)\)$", cpp.strip(), re.S)
        assert found, cpp
        types = []
        for parameter in split_arguments(found[2]):
            named = re.match(r"^(.*[*\s])\w+$", parameter, re.S)
            bare = named and named[1].strip() not in ("", "const", "class")
            types.append(self._type(named[1] if named and bare else parameter, namespace))
        return f"{self._type(found[1], namespace)} (^)({', '.join(types) or 'void'})"

    def _parameter(self, cpp: str, namespace: str) -> tuple[str, str]:
        """Type and name of a C++ parameter."""
        if block := re.search(r"\(\^\s*(\w*)\s*\)", cpp):
            return self._type(cpp, namespace), block[1] or "block"
        found = re.match(r"^(.*?)(\w+)\s*(\[[^\]]*\])?$", cpp, re.S)
        assert found, cpp
        return self._type(found[1].strip(), namespace, array=bool(found[3])), found[2]

    # ---- declarations ----

    def _enum(self, name: str) -> None:
        enum = self.api.enums[name]
        since = self._since(lambda api: name in api.enums)
        macro = "NS_OPTIONS" if enum.options else "NS_ENUM"
        self.lines.append(f"typedef {macro}({self._type(enum.underlying, '')}, {name}) {{")
        for member, value in enum.members.items():
            own = self._since(
                lambda api, m=member: m in getattr(api.enums.get(name), "members", ())
            )
            own = "" if own == since else own
            given = re.sub(r"NS::(U?IntegerMax)", r"NS\1", value)
            self.lines.append(f"  {member}{own}" + (f" = {given}," if given else ","))
        self.lines.append(f"}}{since};")

    def _structs(self) -> None:
        waiting = dict(self.api.structs)
        while waiting:
            for name, (namespace, fields) in list(waiting.items()):
                kinds = [(self._name(kind, namespace)[0], names) for kind, names in fields]
                if any(kind in waiting for kind, _ in kinds):
                    continue
                inside = " ".join(f"{kind} {names};" for kind, names in kinds)
                self.lines.append(f"typedef struct {name} {{ {inside} }} {name};")
                del waiting[name]

    def _owners(self, names: set[str], write) -> None:  # type: ignore[no-untyped-def]
        done: set[str] = set()

        def visit(name: str) -> None:
            if name in done:
                return
            done.add(name)
            if self.api.bases.get(name) in names:
                visit(self.api.bases[name])
            write(name)

        for name in sorted(names):
            visit(name)

    def _protocol(self, name: str) -> None:
        since = self._since(lambda api: name in api.protocols)
        base = self.api.bases.get(name, "")
        parent = base if base in self.api.protocols else "NSObject"
        self.lines.append(f"{since.strip()}\n@protocol {name} <{parent}>")
        self._methods(name, since)

    def _class(self, name: str) -> None:
        since = self._since(lambda api: name in api.classes)
        base = self.api.bases.get(name, "")
        parent = base if base in self.api.classes else "NSObject"
        copying = " <NSCopying>" if name in self.api.copying else ""
        self.lines.append(f"{since.strip()}\n@interface {name} : {parent}{copying}")
        self._methods(name, since)

    def _methods(self, owner: str, owner_since: str) -> None:
        # What moved into a base stays declared here too: the base may be younger.
        methods: dict[tuple[str, str], Method] = {}
        for _, api in reversed(self.generations):
            methods = api.methods.get(owner, {}) | methods
        for (kind, selector), method in methods.items():
            since = self._since(lambda api, key=(kind, selector): key in api.methods.get(owner, {}))
            since = "" if since == owner_since else since
            words = f"({self._result(selector, method)}){self._words(selector, method)}"
            if element := ELEMENTS.get(selector):
                words = words.replace("NSArray *", f"NSArray<{element}> *")
            self.lines.append(f"{kind} {words}{since};")
        self.lines.append("@end")

    def _result(self, selector: str, method: Method) -> str:
        if re.match(r"init([A-Z]|$)", selector):
            return "instancetype"
        return self._type(method.result, method.namespace)

    def _words(self, selector: str, method: Method) -> str:
        if not method.arguments:
            return selector
        words = []
        for word, cpp in zip(selector.split(":"), method.arguments):
            kind, name = self._parameter(cpp, method.namespace)
            words.append(f"{word}:({kind}){name}")
        return " ".join(words)


def generations() -> list[tuple[str, Api]]:
    """metal-cpp of each SDK, oldest first; raises pinned.Unavailable."""
    found = []
    for version, wheel in GENERATIONS:
        folder = pinned.fetch(wheel, "/metal_cpp/")
        found.append((version, metal_cpp.read(folder / "mlx/include/metal_cpp")))
    return found


def write(out: Path) -> None:
    """Writes Metal/Metal.h and Foundation/Foundation.h below `out`; unchanged files stay as they are."""
    texts = {
        "Metal/Metal.h": Writer(generations()).header(),
        "Foundation/Foundation.h": (Path(__file__).parent / "Foundation.h").read_text(),
    }
    for name, text in texts.items():
        path = out / name
        if path.exists() and path.read_text() == text:
            continue  # its time must not change: builds depend on it
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(scratch, path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/apple/headers.py OUT")
    try:
        write(Path(sys.argv[1]))
    except pinned.Unavailable as error:
        sys.exit(f"headers.py: {error}")
