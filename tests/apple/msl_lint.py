"""The lint of the kernel text: what of MSL can be checked without Apple's compiler.

python tests/apple/msl_lint.py [FOLDER]: lints the kernels of the folder (src/metal), prints what it
finds and the threadgroup memory of each kernel; exit code 1 when it finds anything.

The text is preprocessed as Apple's compiler does it and parsed as C++ for OpenCL over the
declarations of msl_stdlib/metal_stdlib: undeclared names, types, address spaces, writes through
const, statics, double and C++17 are clang's to refuse. Its syntax tree shows the rest: pointers
without an address space, members without `thread`, recursion, lambdas. Every Metal name must have a
row in msl_table.py, with the version that brought it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from msl_table import ROWS, Row

HERE = Path(__file__).resolve().parent
METAL = HERE.parent.parent / "src/metal"
STDLIB = HERE / "msl_stdlib"
VERSIONS = (310, 400)  # what the host asks for, by macOS
TENSOR = 400  # the version of the texts with tensor operations, of files that have a tile
# Metal's too, but words that other things are called by as well.
WORDS = {"mode", "run"}
MEMORY_LIMIT = 32 * 1024  # bytes of threadgroup memory
BUFFERS = 31  # arguments of a kernel

TABLE = {row.name: row for row in ROWS}
# Attributes of a kernel's parameters and the types they may have; buffer(n) apart.
IDS = {row.name: row.types for row in ROWS if row.kind == "attribute" and row.types}
FORBIDDEN = {
    "LambdaExpr": "a lambda (shown from MSL 4.0 on only)",
    "GotoStmt": "goto",
    "CXXNewExpr": "new",
    "CXXDeleteExpr": "delete",
    "CXXThrowExpr": "throw",
    "CXXTryStmt": "try",
    "CXXDynamicCastExpr": "dynamic_cast",
    "CXXTypeidExpr": "typeid",
    "GCCAsmStmt": "inline assembly",
    "StmtExpr": "a statement expression",
    "AddrLabelExpr": "the address of a label",
}
SPACE = re.compile(r"__(global|local|constant|private)\b")
SIZES = {"uchar": 1, "ushort": 2, "half": 2, "bfloat": 2, "int": 4, "uint": 4, "float": 4,
         "atomic_uint": 4, "ulong": 8, "SharedX": (8 * 32 * 4 + 32) * 4}  # fmt: skip


def clang(*arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ziglang", "clang", *arguments, "-nostdinc", f"-I{STDLIB}", "-"],
        input=text, capture_output=True, text=True,
    )  # fmt: skip


class Refused(Exception):
    """Text that not even the preprocessor takes."""


def preprocessed(text: str, version: int, *options: str) -> str:
    """What Apple's compiler gets to see, with #line markers; the library's own text is not in it."""
    done = clang(
        "-E", "-x", "c++", "-std=c++14", "-undef", f"-D__METAL_VERSION__={version}",
        "-DLILY_MSL_NAMES", *options, text=text,
    )  # fmt: skip
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


def apple_text(path: Path, version: int, exact: bool, tensor: bool = False) -> str:
    options = [f"-I{path.parent}", *(["-DLILY_EXACT=1"] if exact else []),
               *(["-DLILY_TILE_TENSOR=1"] if tensor else [])]  # fmt: skip
    return preprocessed(f'#include "{path.name}"\n', version, *options)


# ---- the syntax tree -----------------------------------------------------------------------------
@dataclass
class Node:
    depth: int
    kind: str
    address: str
    rest: str
    where: str

    @property
    def type(self) -> str:
        found = re.search(r"'([^']*)'", self.rest)
        return found[1] if found else ""

    @property
    def name(self) -> str:
        """Of a declaration: the word before its type."""
        found = re.search(r"([\w~]+|operator\S+)(?= '|$| definition)", self.rest)
        return found[1] if found else ""


def nodes(tree: str) -> Iterator[Node]:
    """The nodes of clang's dump that somebody wrote: not what the compiler adds to classes."""
    file, line, skip = "", 0, 10**9
    for text in tree.splitlines():
        m = re.match(r"([| `-]*)(\w+) (0x[0-9a-f]+) ?(.*)", text)
        if not m:
            continue
        for at in re.finditer(r"([^\s<>(),]+):(\d+):\d+", m[4].split("'")[0]):
            line = int(at[2])
            file = file if at[1] == "line" else at[1]
        depth = len(m[1])
        if depth <= skip:
            skip = depth if re.match(r"[^']*\bimplicit\b", m[4]) else 10**9
        if depth < skip:
            yield Node(depth, m[2], m[3], m[4], f"{Path(file).name}:{line}")


def without_space(kind: str) -> bool:
    """Whether something in a type points to or refers to no address space."""
    parts = re.split(r"[*&]+", re.sub(r"\[.*?\]", "", kind))
    return any(not SPACE.search(part) for part in parts[:-1])


@dataclass
class Tree:
    """What the lint wants to know of one file."""

    found: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # threadgroup bytes by function
    constructs: set[str] = field(default_factory=set)


CONSTRUCTS = [  # what the table has a row for: the node's kind and what its line holds
    ("FunctionTemplateDecl", r"", "function template"),
    ("ClassTemplateDecl", r"", "class template"),
    ("FunctionDecl", r"\bconstexpr \w+ '", "constexpr function"),
    ("EnumDecl", r"", "enum"),
    ("ParmVarDecl", r"'[^']*\(&", "reference to an array"),
    ("FunctionDecl", r"'[^('*]*\*", "pointer as result"),
    ("FieldDecl", r"'[^']*\*", "pointer in a struct"),
]


def read_tree(tree: str) -> Tree:
    done = Tree()
    calls: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    same: dict[str, str] = {}  # redeclaration -> first declaration
    inside: list[tuple[int, str]] = []  # functions around the node
    for node in nodes(tree):
        while inside and inside[-1][0] >= node.depth:
            inside.pop()
        if not node.where.startswith("metal_stdlib:"):
            done.constructs |= {name for kind, holds, name in CONSTRUCTS
                                if node.kind == kind and re.search(holds, node.rest)}  # fmt: skip
        if node.kind in FORBIDDEN:
            done.found.append(f"{node.where}: {FORBIDDEN[node.kind]}")
        if node.kind in {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl",
                         "CXXConversionDecl", "CXXDestructorDecl"}:  # fmt: skip
            before = re.match(r"(?:parent 0x\w+ )?prev (0x\w+)", node.rest)
            same[node.address] = same.get(before[1], before[1]) if before else node.address
            names[node.address] = node.name
            inside.append((node.depth, same[node.address]))
            calls.setdefault(same[node.address], set())
            if without_space(node.type.split("(")[0]):
                done.found.append(f"{node.where}: {node.name} returns a pointer or reference "
                                  "without an address space")  # fmt: skip
            static = re.search(r"' static\b", node.rest)
            of_class = node.kind != "FunctionDecl" and not static
            if of_class and not re.search(r"\) (const )?__private\b", node.type):
                done.found.append(f"{node.where}: member {node.name} does not end in `thread`")
            if re.search(r"\bvirtual\b", node.rest.rsplit("'", 1)[-1]):
                done.found.append(f"{node.where}: virtual {node.name}")
        elif node.kind in {"ParmVarDecl", "VarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl"}:
            # A pointer to a template's type has the space of that type.
            if without_space(node.type) and not node.where.startswith("metal_stdlib:"):
                done.found.append(f"{node.where}: {node.name or 'a parameter'} is a pointer or "
                                  "reference without an address space")  # fmt: skip
            if node.kind == "VarDecl" and re.match(r"__local [^*&]*$", node.type):
                array = re.match(r"__local ([\w:<> ]+?)((?:\[\d+\])*)$", last_type(node))
                assert array and inside, f"{node.where}: {node.rest}"
                function = names[inside[-1][1]]
                done.memory[function] = done.memory.get(function, 0) + size_of(array[1], array[2])
        elif node.kind in {"CStyleCastExpr", "CXXReinterpretCastExpr", "CXXStaticCastExpr",
                           "CXXConstCastExpr", "CXXFunctionalCastExpr"}:  # fmt: skip
            if without_space(node.type):
                done.found.append(f"{node.where}: a cast to a pointer or reference without an "
                                  "address space")  # fmt: skip
        elif node.kind in {"DeclRefExpr", "MemberExpr"} and inside:
            called = re.search(r"(?:Function|CXXMethod|->\S+|\.\S+) (0x[0-9a-f]+)", node.rest)
            if called:
                calls[inside[-1][1]].add(same.get(called[1], called[1]))
    done.found += [f"{names[f]} calls itself, by itself or through others" for f in cycles(calls)]
    return done


def last_type(node: Node) -> str:
    """A declaration's type without typedefs."""
    types = re.findall(r"'([^']*)'", node.rest.split(" cinit")[0])
    return types[-1] if types else ""


def size_of(element: str, counts: str) -> int:
    """Bytes of a threadgroup array, in units of 16."""
    name = element.replace("metal::", "").replace("lily_atomic<uint>", "atomic_uint").strip()
    name = {"unsigned int": "uint", "unsigned long": "ulong", "unsigned short": "ushort",
            "lily_atomic<unsigned int>": "atomic_uint"}.get(name, name)  # fmt: skip
    vector = re.fullmatch(r"([a-z]+)([234])", name)
    size = SIZES[vector[1]] * {"2": 2, "3": 4, "4": 4}[vector[2]] if vector else SIZES[name]
    for count in re.findall(r"\d+", counts):
        size *= int(count)
    return (size + 15) // 16 * 16


def cycles(calls: Mapping[str, set[str]]) -> list[str]:
    """The functions from which a chain of calls comes back to them."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = calls.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    return [f for f in calls if f in reached(f)]


def parse(text: str, version: int) -> tuple[list[str], str]:
    """clang's complaints about preprocessed text, and its tree."""
    done = clang(
        "-x", "cl", "-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc", "-Xclang",
        "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space", "-Wall",
        "-Wpre-c++17-compat-pedantic", "-Wno-unknown-attributes", "-Wno-unused-function",
        f"-D__METAL_VERSION__={version}", "-ferror-limit=20", "-fsyntax-only", "-Xclang",
        "-ast-dump", text="#include <metal_stdlib>\n" + text,
    )  # fmt: skip
    complaints = re.findall(
        r"^(\S+:\d+):\d+: (?:fatal )?(?:error|warning): (.*)$", done.stderr, re.M
    )
    if done.returncode != 0 and not complaints:
        complaints = [("clang", done.stderr.strip())]
    return [f"{Path(at).name}: {says}" for at, says in complaints], done.stdout


# ---- names ---------------------------------------------------------------------------------------
@cache
def declared() -> frozenset[str]:
    """Every name that Metal's library or language has, as far as msl_stdlib knows them."""
    text = (STDLIB / "metal_stdlib").read_text()
    macros = set(re.findall(r"^#define (\w+)", text, re.M)) - {"local", "global"}
    complaints, tree = parse("", 999)
    assert not complaints, complaints
    kinds = {"FunctionDecl", "TypedefDecl", "CXXRecordDecl", "EnumDecl", "EnumConstantDecl",
             "CXXMethodDecl", "NamespaceDecl"}  # fmt: skip
    names = {n.name for n in nodes(tree) if n.kind in kinds} | macros | {"half"}
    return frozenset(
        n for n in names - WORDS if n.isidentifier() and not n.lower().startswith("lily")
    )


def used_names(text: str) -> dict[str, int]:
    """Metal's names in preprocessed text and the line of their first use."""
    found: dict[str, int] = {}
    line = 0
    for row in text.splitlines():
        marker = re.match(r"# (\d+) ", row)
        if marker:
            line = int(marker[1])
            continue
        names = []
        if pragma := re.match(r"\s*#pragma (.*)", row):
            names = ["#pragma " + pragma[1].strip()]
        else:
            for inner in re.findall(r"\[\[(.*?)\]\]", row):
                names += re.findall(r"([A-Za-z_]\w*)", inner)
            plain = re.sub(r"\[\[.*?\]\]", "", row)
            names += [n for n in re.findall(r"[A-Za-z_]\w*", plain) if n in declared()]
        for name in names:
            found.setdefault(name, line)
        line += 1
    return found


def check_names(text: str, version: int, table: Mapping[str, Row]) -> Iterator[str]:
    for name, line in used_names(text).items():
        row = table.get(name)
        if row is None:
            yield f"line {line}: {name} has no row in the table of known-good MSL"
        elif row.since > version:
            yield f"line {line}: {name} came with MSL {dotted(row.since)}, the text is {dotted(version)}"


def dotted(version: int) -> str:
    return f"{version // 100}.{version // 10 % 10}"


# ---- kernels -------------------------------------------------------------------------------------
def split_top(text: str) -> list[str]:
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([<{") - (c in ")]>}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def signatures(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and parameters of every kernel."""
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    for m in re.finditer(r"\bkernel\s+(\w+)\s+(\w+)\s*\(", text):
        depth, at = 1, m.end()
        while depth:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
        if m[1] != "void":
            raise Refused(f"kernel {m[2]} returns {m[1]}")
        yield m[2], split_top(text[m.end() : at - 1])


def check_kernel(name: str, parameters: Iterable[str]) -> Iterator[str]:
    """Buffers 0, 1, ... in order: first device memory, then the params, then Step; ids after them."""
    buffers, stage = 0, 0
    for p in parameters:
        attributes = re.findall(r"\[\[\s*(.*?)\s*\]\]", p)
        plain = re.sub(r"\[\[.*?\]\]", "", p).strip()
        if len(attributes) != 1:
            yield f"kernel {name}: `{p}` has {len(attributes)} attributes, wants one"
            continue
        index = re.fullmatch(r"buffer\((\d+)\)", attributes[0])
        if index:
            if int(index[1]) != buffers:
                yield f"kernel {name}: `{p}` has index {index[1]}, its place is {buffers}"
            buffers += 1
            if re.fullmatch(r"device (const )?Step\s*\* step", plain):
                now = 2
            elif re.fullmatch(r"device (const )?\w+\s*\*\s*\w+", plain):
                now = 0
            elif re.fullmatch(r"constant \w+\s*&\s*\w+", plain):
                now = 1
            else:
                yield f"kernel {name}: `{p}` is no buffer: device T* or constant T&"
                continue
            if now < stage or (now == stage == 1):
                yield f"kernel {name}: `{p}` is out of order: arrays, params, Step"
            stage = now
        elif attributes[0] in IDS:
            if not re.fullmatch(rf"({'|'.join(IDS[attributes[0]])}) \w+", plain):
                yield f"kernel {name}: `{p}` wants the type {' or '.join(IDS[attributes[0]])}"
        else:
            yield f"kernel {name}: `{p}` has an unknown attribute"
    if buffers > BUFFERS:
        yield f"kernel {name}: {buffers} buffers, Metal has {BUFFERS}"


# ---- the whole -----------------------------------------------------------------------------------
@dataclass
class Report:
    found: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    kernels: dict[tuple[str, bool], int] = field(default_factory=dict)  # (name, exact) -> bytes


def lint_file(
    path: Path,
    exact: bool,
    table: Mapping[str, Row] = TABLE,
    versions: Iterable[int] = VERSIONS,
) -> Report:
    report = Report()
    text_of: dict[str, int] = {}
    raw = path.read_bytes()
    if not raw.isascii():
        report.found.append(f"{path.name}: not ASCII")
    forms = [(version, False) for version in versions]
    if has_tile(path) and TENSOR in versions:
        forms.append((TENSOR, True))
    for version, tensor in forms:
        mode = f"{path.stem} ({'exact' if exact else 'bf16'}, MSL {dotted(version)}"
        mode += ", tensors): " if tensor else "): "
        try:
            text = apple_text(path, version, exact, tensor)
            kernels = list(signatures(text))
        except Refused as refused:
            report.found.append(mode + str(refused).strip())
            continue
        report.used |= set(used_names(text))
        found = list(check_names(text, version, table))
        if text not in text_of:  # the same text need not be parsed twice
            text_of[text] = version
            complaints, tree = parse(text, version)
            seen = read_tree(tree)
            report.used |= seen.constructs
            found += complaints + seen.found
            for name, parameters in kernels:
                found += check_kernel(name, parameters)
                size = seen.memory.get(name, 0)
                report.kernels[name, exact] = size
                if size > MEMORY_LIMIT:
                    found.append(f"kernel {name}: {size} bytes of threadgroup memory, the limit "
                                 f"is {MEMORY_LIMIT}")  # fmt: skip
        report.found += [mode + says for says in found]
    return report


def has_tile(path: Path) -> bool:
    return b'#include "tile.h"' in path.read_bytes()


def variants(metal: Path) -> set[str]:
    """The kernels that the host knows."""
    text = (metal / "kernels.h").read_text()
    return set(re.findall(r"X\(\w+, (\w+), \w+, \w+, \w+\)", text)) - {"name"}


def lint(metal: Path = METAL, table: Mapping[str, Row] = TABLE) -> Report:
    whole = Report()
    for path in sorted([*metal.glob("*.metal"), *metal.glob("*.h")]):
        text = path.read_text()
        for name in set(re.findall(r"#\s*include <([^>]*)>", text)):
            whole.used.add(f"<{name}>")
            if f"<{name}>" not in table and not (name == "cstdint" and path.suffix == ".h"):
                whole.found.append(f"{path.name}: includes <{name}>, which the table lacks")
    whole.used.discard("<cstdint>")
    for path in sorted(metal.glob("*.metal")):
        for exact in (False, True):
            one = lint_file(path, exact, table)
            whole.found += one.found
            whole.used |= one.used
            twice = whole.kernels.keys() & one.kernels.keys()
            whole.found += [f"kernel {name} is there twice" for name, _ in sorted(twice)]
            whole.kernels |= one.kernels
    for exact in (False, True):
        mode = "exact" if exact else "bf16"
        there = {name for name, is_exact in whole.kernels if is_exact == exact}
        whole.found += [f"kernel {n} ({mode}) is not in kernels.h" for n in there - variants(metal)]
        whole.found += [f"kernel {n} ({mode}) is missing" for n in variants(metal) - there]
    whole.found += [f"row {name} of the table is not used" for name in table.keys() - whole.used]
    return whole


def main() -> int:
    report = lint(Path(sys.argv[1]) if len(sys.argv) > 1 else METAL)
    for name in sorted({name for name, _ in report.kernels}):
        sizes = [report.kernels.get((name, exact), 0) for exact in (False, True)]
        print(f"{name:22} {sizes[0]:6} bytes of threadgroup memory, {sizes[1]:6} exact")
    print(*report.found, sep="\n")
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())
