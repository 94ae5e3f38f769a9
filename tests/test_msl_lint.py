"""The lint of the kernel text: our text passes, mistakes that Apple's compiler refuses do not."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msl_lint
import pytest
from msl_table import ROWS, Row

from lily import _core

if importlib.util.find_spec("ziglang") is None:
    pytest.skip("ziglang is not installed: nothing here parses kernels", allow_module_level=True)

FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"
BODY = "  float sum = 0.0f;\n"  # in the body of rms_norm
BEFORE = "#define NORM_THREADS 128\n"  # at file scope


def test_the_kernels_are_clean() -> None:
    """In both modes and every version that the host asks for; each row of the table is used."""
    spare = Row("function", "simd_product", 210, "MLX reduction/ops.h")
    report = msl_lint.lint(table=msl_lint.TABLE | {spare.name: spare})
    assert report.found == ["row simd_product of the table is not used"]
    assert {n for n, _ in report.kernels} == msl_lint.variants(msl_lint.METAL)
    # Known by hand: of 16 heads q, 256 floats, and scores of a split, 128; the flash pools.
    assert report.kernels["attn_step", False] == report.kernels["attn_step", True] == 16 * 384 * 4
    assert report.kernels["flash", False] == 32 * 264 * 2 + 32 * 136 * 2 + 32 * 40 * 2 + 32 * 34 * 4
    assert max(report.kernels.values()) <= msl_lint.MEMORY_LIMIT


def test_the_table_is_in_order() -> None:
    assert len(msl_lint.TABLE) == len(ROWS)
    for row in ROWS:
        assert row.since <= min(msl_lint.VERSIONS) or row.since == msl_lint.TENSOR, row
        assert re.match(r"(MLX|llama\.cpp|SPIRV-Cross|Lily) \S+", row.shown_by), row


@pytest.mark.parametrize("exact", [False, True], ids=["bf16", "exact"])
@pytest.mark.parametrize("path", sorted(msl_lint.METAL.glob("*.metal")), ids=lambda p: p.stem)
def test_the_host_hands_over_what_was_linted(path: Path, exact: bool) -> None:
    """The embedded text, its headers inlined, is the same to the compiler."""

    def words(text: str) -> list[str]:
        return re.sub(r"^#(?! *pragma).*$", "", text, flags=re.M).split()

    embedded = msl_lint.preprocessed(_core.metal_source(path.stem, exact), 310)
    assert words(embedded) == words(msl_lint.apple_text(path, 310, exact))


# Mistakes: what is replaced in which file by what; what the lint says.
MISTAKES = {
    "no address space": ("norm", "device const act_t* row = x", "const act_t* row = x",
                         r"row is a pointer or reference without an address space"),
    "no address space in a template": ("util", "load_codes32(device const uint* at", "load_codes32(const uint* at",
                                       r"at is a pointer or reference without an address space"),
    "no address space of a type parameter": (
        "tile", "threadgroup const T* b, uint ldb, uint k_count) {\n  simdgroup", "const T* b, uint ldb, uint k_count) {\n  simdgroup",
        r"b is a pointer .*without an address space"),
    "reference without one": ("deltanet", "thread ConvPast& past", "ConvPast& past", r"past is a pointer or reference without"),
    "cast without one": ("norm", BODY, BODY + "  sum = *(float*)scratch;\n", r"cast"),
    "result without one": ("util", "static inline device act_t* kv_block", "static inline act_t* kv_block",
                           r"kv_block returns a pointer or reference without an address space"),
    "another address space": ("norm", "threadgroup float* scratch", "device float* scratch", r"no matching function for call to"),
    "unknown function": ("norm", "sum = fma(", "sum = mad_sat_rte(", r"use of undeclared identifier 'mad_sat_rte'"),
    "function that Metal has, unlisted": ("norm", BODY, BODY + "  sum = trunc(sum);\n", r"undeclared identifier 'trunc'"),
    "write through constant": ("norm", BODY, BODY + "  p.k = 1;\n", r"read-only variable is not assignable"),
    "write through const": ("norm", BODY, BODY + "  row[0] = to_act(sum);\n", r"no viable overloaded '='"),
    "write to a const parameter": ("norm", BODY, BODY + "  ((device const float*)gain)[0] = sum;\n", r"read-only variable is not assignable"),
    "misspelt attribute": ("util", "uint tid [[thread_index_in_threadgroup]]", "uint tid [[thread_index_in_threadgrp]]",
                           r"unknown attribute"),
    "position of two components": ("util", ", uint3 group [[", ", uint2 group [[", r"wants the type uint3|no matching function"),
    "index twice": ("norm", "IN(float, gain, 1)", "IN(float, gain, 0)", r"has index 0, its place is 1"),
    "index left out": ("norm", "PARAMS(RmsNorm, 3)", "PARAMS(RmsNorm, 4)", r"has index 4, its place is 3"),
    "Step before the params": ("linear", "PARAMS(Project, 6), STEP_IN(7)", "STEP_IN(6), PARAMS(Project, 7)", r"out of order"),
    "newer function": ("norm", BODY, BODY + f"  {FENCE}\n", r"undeclared identifier|atomic_thread_fence has no row"),
    "member without thread": ("norm", BEFORE, BEFORE + "struct Pair {\n  float a;\n  float get() { return a; }\n};\n",
                              r"member get does not end in `thread`"),
    "constructor without thread": ("norm", BEFORE, BEFORE + "struct Pair {\n  float a;\n  Pair(float b) : a(b) {}\n};\n",
                                   r"member Pair does not end in `thread`"),
    "virtual": ("norm", BEFORE, BEFORE + "struct Pair {\n  virtual float get() thread { return 1.0f; }\n};\n", r"virtual"),
    "double": ("norm", BODY, BODY + "  const double two = 2.0f;\n", r"type 'double'"),
    "double literal": ("norm", "float sum = 0.0f", "float sum = 0.0", r"double precision constant"),
    "lambda": ("norm", BODY, BODY + "  const auto twice = [](float v) { return 2.0f * v; };\n  sum = twice(sum);\n", r"a lambda"),
    "recursion": ("norm", BEFORE, BEFORE + "static inline uint fall(uint n) { return n ? fall(n - 1) : 0; }\n", r"fall calls itself"),
    "recursion through another": (
        "norm", BEFORE, BEFORE + "static inline uint odd(uint n);\n"
        "static inline uint even(uint n) { return n ? odd(n - 1) : 1; }\nstatic inline uint odd(uint n) { return n ? even(n - 1) : 0; }\n",
        r"(odd|even) calls itself"),
    "recursion of a template": (
        "norm", BEFORE, BEFORE + "template <uint N>\nstatic inline uint fall(uint n) { return n ? fall<N>(n - N) : 0; }\n"
        "static inline uint start(uint n) { return fall<2>(n); }\n", r"fall calls itself"),
    "goto": ("norm", BODY, BODY + "again:\n  if (sum < 0.0f) goto again;\n", r"goto"),
    "static in a function": ("norm", BODY, BODY + "  static uint calls = 0;\n", r"static local variable"),
    "global variable": ("norm", BEFORE, BEFORE + "uint calls;\n", r"program scope variable must reside in constant address space|without"),
    "threadgroup array outside a kernel": ("norm", BODY, BODY + "  threadgroup float more[4];\n", r"__local|local address space"),
    "C++17": ("norm", BODY, BODY + "  if constexpr (NORM_THREADS == 128) sum = 0.0f;\n", r"incompatible with C\+\+ standards before C\+\+17"),
    "too much threadgroup memory": ("norm", "SHARED(float, scratch, NORM_THREADS / 32)", "SHARED(float, scratch, 8193)",
                                    r"32784 bytes of threadgroup memory, the limit is 32768"),
    "sum of 64 bits": ("norm", BODY, BODY + "  const ulong all = simd_sum((ulong)tid);\n  sum = float(all);\n", r"call to 'simd_sum' is ambiguous"),
    "atomic operand of another type": ("moe", "&counts[tid], 0u,", "&counts[tid], 0,", r"no matching function for call to 'atomic_store_explicit'"),
    "matrix of another type": ("tile", "simdgroup_matrix<T, 8, 8> rb;", "simdgroup_float8x8 rb;", r"no matching function for call to 'simdgroup_load'"),
    "min of two types": ("norm", BODY, BODY + "  sum = float(min(p.k, 4));\n", r"call to 'min' is ambiguous"),
    "bfloat arithmetic": ("norm", BODY, BODY + "  sum = float(x[0] * x[1]);\n", r"invalid operands to binary expression"),
    "tensor operation in the text of every Mac": (
        "tile", "#if defined(LILY_TILE_TENSOR) ||", "#if 1 ||", r"tensor operations came with MSL 4.0|'metal_tensor' file not found"),
    "missing header": ("norm", '#include "util.h"', '#include "utils.h"', r"'utils.h' file not found"),
    "other header": ("norm", BEFORE, "#include <metal_logging>\n" + BEFORE, r"'metal_logging' file not found"),
    "not ASCII": ("norm", "// One threadgroup", "// One \u00b5 threadgroup", r"not ASCII"),
}  # fmt: skip
USED_BY = {"util": "norm", "tile": "linear"}  # the file that is linted for a header's mistake


def changed(folder: Path, stem: str, before: str, after: str) -> Path:
    """The kernels with one change; the path to lint."""
    shutil.copytree(msl_lint.METAL, folder / "metal")
    path = next((folder / "metal").glob(f"{stem}.*"))
    text = path.read_text()
    assert text.count(before) >= 1, f"{path.name} has no {before!r}"
    path.write_text(text.replace(before, after, 1))
    if path.suffix == ".h":
        path = path.with_name(USED_BY[stem] + ".metal")
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name: str, tmp_path: Path) -> None:
    stem, before, after, says = MISTAKES[name]
    found = msl_lint.lint_file(changed(tmp_path, stem, before, after), False, versions=[310]).found
    assert any(re.search(says, f) for f in found), found


# The same of the text with tensor operations.
TENSOR_MISTAKES = {
    "rows first": ("return uint(place[which]);", "return uint(place[which][0]);", r"subscripted value is not an array"),
    "operand in another space": ("tensor<threadgroup T,", "tensor<device T,", r"no matching constructor"),
    "const operand": ("(threadgroup T*)at", "at", r"no matching constructor"),
    "no scope": ("matmul2d<descriptor, execution_simdgroup>", "matmul2d<descriptor, 32>", r"must be a type"),
    "misspelt mode": ("mode::multiply_accumulate", "mode::accumulate", r"no member named 'accumulate'"),
    "mask that is not there": ("c[i] = t.v[i];", "if (c.get_mask(i)) c[i] = t.v[i];", r"no member named 'get_mask'"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_MISTAKES)
def test_mistakes_with_tensors_are_refused(name: str, tmp_path: Path) -> None:
    before, after, says = TENSOR_MISTAKES[name]
    path = changed(tmp_path, "tile", before, after)
    found = msl_lint.lint_file(path, False, versions=[msl_lint.TENSOR]).found
    assert any(re.search(says, f) for f in found), found
    assert not msl_lint.lint_file(path, False, versions=[310]).found


def test_newer_names_behind_their_guard(tmp_path: Path) -> None:
    """A name of MSL 3.2 with a row: only where the version is asked for, and only if it has it."""
    guarded = f"#if __METAL_VERSION__ >= 320\n  {FENCE}\n#endif\n"
    new = {n: Row("function", n, 320, "MLX fence.metal")
           for n in ("atomic_thread_fence", "memory_order_seq_cst", "thread_scope_device", "mem_device")}  # fmt: skip
    table = msl_lint.TABLE | new
    path = changed(tmp_path, "norm", BODY, BODY + guarded)
    assert not msl_lint.lint_file(path, False, table).found
    path.write_text(path.read_text().replace("#if __METAL_VERSION__ >= 320", "#if 1"))
    found = msl_lint.lint_file(path, False, table).found
    assert any("came with MSL 3.2, the text is 3.1" in f for f in found)
    assert any("use of undeclared identifier" in f for f in found)
    assert not any("MSL 4.0): " in f for f in found)
    later = msl_lint.TABLE | {"simd_sum": Row("function", "simd_sum", 410, "MLX dot.h")}
    found = msl_lint.lint_file(msl_lint.METAL / "norm.metal", False, later).found
    assert len(found) == 2 and all("simd_sum came with MSL 4.1" in f for f in found)


def test_what_is_right_passes(tmp_path: Path) -> None:
    """Members that end in thread, constant tables, recursion's look-alikes."""
    fine = (
        "constant float kHalves[2] = {0.5f, 0.25f};\n"
        "struct Pair {\n  float a;\n  float get() const thread { return a; }\n"
        "  static inline float two() { return 2.0f; }\n};\n"
        "static inline float fall(float n) { return n * kHalves[0]; }\n"
        "static inline float fall(uint n) { return fall(float(n)); }\n"
    )
    path = changed(tmp_path, "norm", BEFORE, BEFORE + fine)
    path.write_text(
        path.read_text().replace(
            BODY, BODY + "  Pair one;\n  one.a = fall(tid);\n  sum = one.get() + Pair::two();\n"
        )
    )
    assert not msl_lint.lint_file(path, False).found


def test_the_command(tmp_path: Path) -> None:
    """Prints what it finds and says so with its exit code."""
    path = changed(tmp_path, "norm", "sum = fma(", "sum = mad_sat_rte(")
    for other in path.parent.glob("*.metal"):
        if other != path:
            other.unlink()
    done = subprocess.run(
        [sys.executable, msl_lint.__file__, str(path.parent)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "undeclared identifier 'mad_sat_rte'" in done.stdout
    assert re.search(r"^rms_norm +16 bytes of threadgroup memory, +16 exact$", done.stdout, re.M)
