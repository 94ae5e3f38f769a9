"""Mutants of the kernel text: drawn by seed, compiled for sim, run through the op's own tests.

python tests/mutate.py --seed 1 [--ops flash,project] [--json FILE]: exit code 0 when at least 95 %
are killed and every survivor is listed, with its reason, in mutation_survivors.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METAL = ROOT / "src/metal"
SHARED = METAL / "matvec.h"
INCLUDED = f'#include "{SHARED.name}"\n'
SURVIVORS = Path(__file__).with_name("mutation_survivors.md")
MUTANTS, KILLED = 3, 0.95  # an op; the share that must be
DEADLINE = 120  # seconds; a mutant that takes longer, and four times as long as the original, hangs

# The tests of each op: the file, and what pytest -k selects of it.
TESTS = {
    "embed": ("embed", "embed or ids"),
    "copy_bytes": ("embed", "copy_bytes"),
    "project": ("linear", "project"),
    "rms_norm": ("linear", "rms_norm"),
    "matmul": ("linear", "test_matmul"),
    "expert_matmul": ("linear", "test_expert"),
    "attn_step": ("attention", "test_step or prefill"),
    "attn_combine": ("attention", "combine"),
    "attn_out": ("attention", "test_out"),
    "qkv_rope": ("attention", "rope or prefill"),
    "flash": ("attention", "flash or prefill"),
    "delta_step": ("delta", "test_step or decode_step or small_keys"),
    "delta_out": ("delta", "test_out"),
    "delta_prep": ("delta", "prep or small_keys or prefill"),
    "delta_wy": ("delta", "wy or prefill"),
    "delta_scan": ("delta", "scan or prefill"),
    "gated_norm": ("delta", "gated_norm"),
    "expert_up": ("moe", "expert_up or together or apart or halves"),
    "expert_down": ("moe", "expert_down or together or apart or halves"),
    "route_rows": ("moe", "route_rows or odd_logits"),
    "group_rows": ("moe", "group_rows"),
    "moe_combine": ("moe", "moe_combine"),
    "score": ("sample", "test_score"),
    "sample_scan": ("sample", "not test_score"),
    "sample_draw": ("sample", "not test_score"),
}


# ---- the text ------------------------------------------------------------------------------------
def plain(text: str) -> str:
    """Code alone, everything at its place: comments, directives, continuations, pragmas and the
    sizes of threadgroup arrays are blank."""

    def blank(m: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", m[0])

    text = re.sub(r"//[^\n]*|/\*.*?\*/|\bSHARED\([^;]*;|_Pragma\([^)]*\)", blank, text, flags=re.S)
    text = re.sub(r"^#(?!define \w+\()[^\n]*", blank, text, flags=re.M)
    return text.replace("\\\n", " \n")


def closing(code: str, at: int) -> int:
    """Where the bracket that opens at `at` closes."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"nothing closes {code[at : at + 40]!r}")


def operand_end(code: str, at: int) -> int:
    """The end of the operand at `at`: up to an unmatched bracket or a weaker operator."""
    while code[at] not in ")]};,":
        if re.match(r" (&&|\|\||\?|:) ", code[at:]):
            break
        at = closing(code, at) + 1 if code[at] in "([{" else at + 1
    return at


def condition_start(code: str, at: int) -> int:
    """Where the condition of the `?` at `at` begins."""
    depth = 0
    while True:
        before = code[at - 1]
        depth += (before in ")]}") - (before in "([{")
        assigns = before == "=" and code[at - 2] not in "=!<>"
        if depth < 0 or (
            depth == 0 and (before in ",;{}?:" or assigns or code[:at].endswith("return"))
        ):
            return at
        at -= 1


@dataclass(frozen=True)
class Part:
    """A function or kernel macro: its signature's begin, its body [begin, end)."""

    head: int
    begin: int
    end: int


def parts(code: str, text: str) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for m in re.finditer(r"^(?:template <[^>]*>\n)?static inline [^(;]*?(\w+)\(", code, re.M):
        begin = code.index("{", m.end())
        found.setdefault(m[1], []).append(Part(m.start(), begin, closing(code, begin) + 1))
    for m in re.finditer(r"^#define (\w+)\(op, name.*?[^\\]\n", text, re.M | re.S):
        found[m[1]] = [Part(m.start(), code.index("{", m.start()), m.end())]
    return found


def parts_of(op: str, code: str, text: str) -> list[Part]:
    """The op's kernel and every function of the file that it calls."""
    known, todo, mine = parts(code, text), [], {}
    todo += re.findall(rf"^LILY_VARIANTS_{op}\((\w+)\)", text, re.M)
    while todo:
        name = todo.pop()
        if name in known and name not in mine:
            mine[name] = known[name]
            for part in known[name]:
                todo += re.findall(r"\w+", code[part.begin : part.end])
    return sorted((p for group in mine.values() for p in group), key=lambda p: p.begin)


# ---- the operators: what may become what ---------------------------------------------------------
Change = tuple[int, int, str]


def unrolled(code: str, part: Part) -> list[tuple[int, int]]:
    """Headers of loops over registers, up to the step. They may not run further: past the end of a
    register array the text means nothing, and sim sees memory alone."""
    headers = re.compile(r"\bUNROLL for \([^;]*;[^;]*;").finditer(code, part.begin, part.end)
    return [m.span() for m in headers]


def constants(code: str, part: Part) -> Iterator[Change]:
    registers = unrolled(code, part)
    for m in re.compile(r"(?<![\w.])\d+\.\d+(e-?\d+)?f\b").finditer(code, part.begin, part.end):
        value = float(m[0][:-1])
        yield m.start(), m.end(), f"{value * 1.5 if value else 1.0!r}f"
    for m in re.compile(r"(?<![\w.])([2-9]|\d\d+)(u?)(?![\w.])").finditer(
        code, part.begin, part.end
    ):
        if not any(begin < m.start() < end for begin, end in registers):
            yield m.start(), m.end(), f"{int(m[1]) + 1}{m[2]}"
    for m in re.compile(r"\b(0x[0-9a-f]+)(u?)\b").finditer(code, part.begin, part.end):
        yield m.start(), m.end(), f"{int(m[1], 16) - 1:#x}{m[2]}"


def bounds(code: str, part: Part) -> Iterator[Change]:
    other = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
    registers = unrolled(code, part)
    for m in re.compile(r"(?<= )(<=|>=|<|>)(?= )").finditer(code, part.begin, part.end):
        if not any(begin < m.start() < end for begin, end in registers):
            yield m.start(), m.end(), other[m[0]]
    for _, end in registers:
        yield end - 1, end, " - 1;"
    for m in re.compile(r" [-+] 1\b(?![.\w])").finditer(code, part.begin, part.end):
        yield m.start(), m.end(), ""


def barriers(code: str, part: Part) -> Iterator[Change]:
    pattern = re.compile(r"\b(threadgroup|simdgroup)_barrier\([^;]*;")
    for m in pattern.finditer(code, part.begin, part.end):
        yield m.start(), m.end(), ""


def indices(code: str, part: Part) -> Iterator[Change]:
    declaration = re.compile(r"\s*(const )?(float|uint|ulong|ushort|Tile|CodeWords)\S* [^=]*$")
    for m in re.compile(r"(?<=[\w\]])\[").finditer(code, part.begin, part.end):
        statement = max(code.rfind(c, 0, m.start()) for c in ";{}")
        if declaration.match(code, statement + 1, m.start()):
            continue
        end = closing(code, m.start())
        first = code[m.start() + 1 : end]
        yield m.start() + 1, end, f"({first}) + 1"
        if code[end + 1] == "[":
            last = closing(code, end + 1)
            yield m.start(), last + 1, f"[{code[end + 2 : last]}][{first}]"
    other = {"group.x": "group.y", "group.y": "group.x", "group.z": "group.x", "tid": "lane",
             "lane": "tid", "simd": "lane"}  # fmt: skip
    for m in re.compile(r"\b(group\.[xyz]|tid|lane|simd)\b(?!_)").finditer(
        code, part.begin, part.end
    ):
        yield m.start(), m.end(), other[m[0]]


def factors(code: str, part: Part) -> Iterator[Change]:
    """Products lose a factor, sums of floats a term."""
    names = {
        "sb.x",
        "sb.y",
        "p.eps",
        "p.scale",
        "eps",
        "exp_",
        "silu",
        "sigmoid",
        "float",
        "inv_norm",
    }
    for m in re.compile(r"\bfloat[24]?\*? ([^;({]*)").finditer(code, part.head, part.end):
        names |= set(re.findall(r"(?:^|, )(\w+)", m[1]))
    operand = re.compile(r" ([*+]) ([\w.]+)")
    for m in operand.finditer(code, part.begin, part.end):
        if m[2] in names or m[2].split(".")[0] in names:
            end = m.end()
            while code[end] in "([":
                end = closing(code, end) + 1
            yield m.start(), end, ""
    for m in re.compile(r"([\w.]+)(\[[^\[\]]*\])?(\.\w+)? \* ").finditer(
        code, part.begin, part.end
    ):
        if m[1] in names or m[3] == ".weight":
            yield m.start(), m.end(), ""
    for m in re.compile(r"\b([\w.]+)(\[[^;]*\])? \*= [^;]*;").finditer(code, part.begin, part.end):
        if m[1] in names:
            yield m.start(), m.end(), ";"
    for m in re.compile(r"\bfma\(").finditer(code, part.begin, part.end):
        end, at, args = closing(code, m.end() - 1), m.end(), []
        while at < end:
            stop = operand_end(code, at)
            args.append(code[at:stop].strip())
            at = stop + 1
        if len(args) == 3:
            yield m.start(), end + 1, f"(({args[0]}) * ({args[1]}))"
            yield m.start(), end + 1, f"(({args[0]}) + ({args[2]}))"


def masks(code: str, part: Part) -> Iterator[Change]:
    """Conditions hold always, guards that leave never; a conjunction loses a part."""
    for m in re.compile(r"\bif \(").finditer(code, part.begin, part.end):
        end = closing(code, m.end() - 1)
        leaves = re.match(r"\) (return|break|continue)\b", code[end:])
        yield m.end(), end, "false" if leaves else "true"
    for m in re.compile(r" \? ").finditer(code, part.begin, part.end):
        start = condition_start(code, m.start())
        yield start, m.start(), " true"
    for m in re.compile(r" && ").finditer(code, part.begin, part.end):
        yield m.start(), operand_end(code, m.end()), ""


OPERATORS = {"constant": constants, "bound": bounds, "barrier": barriers, "index": indices,
             "factor": factors, "mask": masks}  # fmt: skip


# ---- compiling -----------------------------------------------------------------------------------
def flags() -> list[str]:
    """Those of cmake/sim.cmake for this machine."""
    text = (ROOT / "cmake/sim.cmake").read_text()
    arm = platform.machine() == "aarch64"
    target = re.findall(r"set\(sim_target (.*)\)", text)[arm]
    options = re.search(r"set\(LILY_SIM_OPTIONS ([^)]*)\)", text)
    assert options
    return [*options[1].replace("${sim_target}", target).split(),
            f"-I{METAL}/clang", f"-I{METAL}"]  # fmt: skip


def source_of(op: str) -> Path:
    return next(p for p in METAL.glob("*.metal") if f"\nLILY_VARIANTS_{op}(" in p.read_text())


def text_of(op: str) -> str:
    """The op's file; the arithmetic that it shares with others, matvec.h, in the include's place."""
    return source_of(op).read_text().replace(INCLUDED, SHARED.read_text())


def place(op: str, text: str, at: int) -> tuple[str, int]:
    """File and line of a position in that text."""
    file, shared, line = source_of(op), SHARED.read_text(), text.count("\n", 0, at) + 1
    first = file.read_text().find(INCLUDED)
    if first < 0 or at < first:
        return file.name, line
    before, lines = text.count("\n", 0, first), shared.count("\n")
    return (SHARED.name, line - before) if line <= before + lines else (file.name, line - lines + 1)


def compiled(text: str, op: str, folder: Path, exact: bool) -> Path | None:
    """The object of the op's kernels alone; None when the text does not compile."""
    others = rf"^LILY_VARIANTS_(?!{op}\()\w+\(\w+\)"
    source, made = folder / "kernels.metal", folder / f"{'exact' if exact else 'act'}.o"
    source.write_text(re.sub(others, "", text, flags=re.M))
    define = ["-DLILY_EXACT"] if exact else []
    # Sim sees memory alone: registers left uninitialised hold NaN, an index past an array traps.
    watch = ["-ftrivial-auto-var-init=pattern", "-fsanitize=array-bounds",
             "-fsanitize-trap=array-bounds", "-fstrict-flex-arrays=3"]  # fmt: skip
    command = [sys.executable, "-m", "ziglang", "clang", *flags(), *watch, *define, "-w"]
    done = subprocess.run([*command, "-c", source.name, "-o", made.name], cwd=folder,
                          capture_output=True, text=True)  # fmt: skip
    return made if done.returncode == 0 else None


def library(text: str, op: str, folder: Path) -> Path:
    """The op's kernels in both modes, for LILY_SIM_KERNELS."""
    objects = [compiled(text, op, folder, exact) for exact in (False, True)]
    assert None not in objects, f"{op}: the text does not compile"
    made = folder / "kernels.so"
    command = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", *map(str, objects)]
    subprocess.run([*command, "-o", str(made)], check=True)
    return made


# ---- running -------------------------------------------------------------------------------------
@dataclass
class Mutant:
    op: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    killed_by: str = ""  # empty: survived
    seconds: float = 0.0

    def listed(self) -> str:
        """Why it may survive, by the list; empty when it is not there."""
        for op, before, after, why in re.findall(r"^- `(\w+)`: `(.*?)` -> `(.*?)`: (.+)$",
                                                 SURVIVORS.read_text(), re.M):  # fmt: skip
            if (op, before, after) == (self.op, self.before, self.after):
                return str(why)
        return ""


def killer(op: str, so: Path, deadline: float) -> str:
    """What of the op's tests on sim fails with the library, empty when nothing does. In one process:
    a crash has to be seen."""
    name, which = TESTS[op]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-x", "-q", "--tb=no", "-p",
               "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning",
               f"tests/test_{name}.py", "-k", f"sim and ({which})"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=os.environ | {"LILY_SIM_KERNELS": str(so)},
    )  # fmt: skip
    try:
        says, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"time: more than {deadline:.0f} s"
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"crash: {signal.Signals(-process.returncode).name}"
    failed = re.search(r"^FAILED \S*::(.*)", says, re.M)
    assert process.returncode == 1 and failed, f"{op}: pytest could not run:\n{says}"
    return failed[1][:160]


def in_line(text: str, at: int, end: int) -> tuple[int, int]:
    """The whole lines that hold [at, end)."""
    stop = text.find("\n", end)
    return text.rfind("\n", 0, at) + 1, len(text) if stop < 0 else stop


def drawn(op: str, seed: int, count: int, folder: Path) -> Iterator[tuple[Mutant, str]]:
    """Mutants of one op and their texts, of different operators while there are any; those that
    do not compile or whose objects equal the original's are drawn again."""
    text = text_of(op)
    code = plain(text)
    sites = {name: [c for part in parts_of(op, code, text) for c in find(code, part)]
             for name, find in OPERATORS.items()}  # fmt: skip
    rng = random.Random(f"{seed} {op}")
    for changes in sites.values():
        rng.shuffle(changes)
    order = [name for name in rng.sample(list(sites), len(sites)) if sites[name]]
    original = {exact: made.read_bytes() for exact in (False, True)
                if (made := compiled(text, op, folder, exact))}  # fmt: skip
    found = 0
    while found < count and order:
        name = order.pop(0)
        while sites[name]:
            start, end, after = sites[name].pop()
            changed = text[:start] + re.sub(r"\s+", " ", after) + text[end:]
            objects = {exact: compiled(changed, op, folder, exact) for exact in (False, True)}
            if None in objects.values():
                continue
            if all(made and made.read_bytes() == original[e] for e, made in objects.items()):
                continue
            begin, stop = in_line(text, start, end)
            rest = len(text) - stop
            lines = (text[begin:stop], changed[begin : len(changed) - rest])
            before, now = (re.sub(r"//.*|[\s\\]+", " ", s).strip() for s in lines)
            yield Mutant(op, *place(op, text, start), name, before, now), changed
            found += 1
            order.append(name)
            break


def mutants_of(op: str, seed: int, count: int = MUTANTS) -> list[Mutant]:
    """Draws and runs the mutants of one op; first the original, which has to pass."""
    done = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        failed = killer(op, library(text_of(op), op, folder), 600)
        assert not failed, f"{op}: the original text fails {failed}"
        deadline = max(DEADLINE, 4 * (time.monotonic() - start))
        for mutant, text in drawn(op, seed, count, folder):
            start = time.monotonic()
            mutant.killed_by = killer(op, library(text, op, folder), deadline)
            mutant.seconds = round(time.monotonic() - start, 1)
            done.append(mutant)
            print(f"{op:14} {mutant.file}:{mutant.line:<4} {mutant.operator:8} "
                  f"{mutant.killed_by or 'SURVIVED'} ({mutant.seconds} s)\n"
                  f"    - {mutant.before}\n    + {mutant.after}", flush=True)  # fmt: skip
    return done


def verdict(done: list[Mutant]) -> list[str]:
    """What is wrong with the results."""
    alive = [m for m in done if not m.killed_by]
    faults = [f"{m.op}: `{m.before}` -> `{m.after}` survived and is not listed in {SURVIVORS.name}"
              for m in alive if not m.listed()]  # fmt: skip
    if len(done) - len(alive) < KILLED * len(done):
        faults.append(
            f"{len(done) - len(alive)} of {len(done)} killed, at least {KILLED:.0%} must be"
        )
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=MUTANTS, help="mutants an op")
    parser.add_argument("--ops", default=",".join(TESTS), help="separated by commas")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    done = [m for op in options.ops.split(",") for m in mutants_of(op, options.seed, options.count)]
    killed = sum(bool(m.killed_by) for m in done)
    print(f"\nseed {options.seed}: {killed} of {len(done)} killed")
    for name in OPERATORS:
        mine = [m for m in done if m.operator == name]
        print(f"  {name:8} {sum(bool(m.killed_by) for m in mine):3} of {len(mine):3}")
    if options.json:
        options.json.write_text(json.dumps([asdict(m) for m in done], indent=1) + "\n")
    faults = verdict(done)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
