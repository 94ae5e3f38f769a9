"""The repository itself: files, lists, formats, stubs and documents agree with each other."""

from __future__ import annotations

import ast
import doctest
import fnmatch
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernel_harness
import lily
import reference
from lily import _core

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPS = kernel_harness.PARAMS  # op -> params struct, from LILY_OPS

TEXT = {".py", ".pyi", ".cpp", ".h", ".mm", ".metal", ".sh", ".cmake", ".toml", ".md", ".yml"}
# Files past 900 lines, and why they are not split.
LONG_FILES: dict[str, str] = {}


def tracked() -> list[Path]:
    """The repository's files, relative to its root."""
    if (ROOT / ".git").exists():
        listing = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        return [Path(name) for name in listing.split("\0") if name and (ROOT / name).exists()]
    skipped = {"build", "__pycache__", ".venv"}
    return [
        path.relative_to(ROOT)
        for path in ROOT.rglob("*")
        if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)
    ]


FILES = tracked()


LIBRARIES = {
    "metal_stdlib",
    "metal_simdgroup_matrix",
    "metal_tensor",
}  # C++ headers without a suffix


def sources() -> list[Path]:
    named = {"CMakeLists.txt", *LIBRARIES, "run", ".clang-format"}
    return [path for path in FILES if path.suffix in TEXT or path.name in named]


TITLE = re.compile(r"^#+ (.+)$", re.M)


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- documents ---------------------------------------------------------------------------------


def layout() -> Iterator[str]:
    """The paths and patterns of the README's layout; an indented line is in the folder above it."""
    block = README.split("## Layout")[1].split("```text\n")[1].split("```")[0]
    folder = ""
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        yield name if not line.startswith(" ") else folder + name


def test_the_layout_is_the_tree() -> None:
    shown = list(layout())
    assert len(shown) == len(set(shown)) > 50
    paths = [str(path) for path in FILES]
    for entry in shown:
        if entry == "benchmarks/results/*":
            continue  # comes with the first measurement
        inside = [p for p in paths if p.startswith(entry)] if entry.endswith("/") else []
        assert inside or fnmatch.filter(paths, entry), f"{entry} does not exist"
    files = [entry for entry in shown if not entry.endswith("/")]
    whole = [entry for entry in shown if entry.endswith("/")]
    # A folder stands for its contents unless the list goes into it.
    whole = [folder for folder in whole if not any(f.startswith(folder) for f in files)]
    for path in paths:
        if path.startswith(("src/", "python/", "tests/", "benchmarks/", "cmake/")):
            listed = any(fnmatch.fnmatchcase(path, entry) for entry in files)
            assert listed or path.startswith(tuple(whole)), f"{path} is not in the README's layout"


def test_files_named_in_the_documents_exist() -> None:
    paths = {str(path) for path in FILES}
    for document in ("README.md", "CONTRIBUTING.md"):
        named = re.findall(
            r"`((?:src|python|tests|benchmarks)/[\w/]+\.\w+)`", (ROOT / document).read_text()
        )
        assert named and set(named) <= paths, set(named) - paths


def test_links_between_the_documents_lead_somewhere() -> None:
    paths = {str(path) for path in FILES}
    found = 0
    for document in (path for path in FILES if path.suffix == ".md"):
        text = (ROOT / document).read_text()
        titles = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in TITLE.findall(text)}
        for file, title in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            target = os.path.normpath(document.parent / file)
            assert target in paths if file else title in titles, f"{document}: {file}#{title}"
            found += 1
    assert found >= 4


def test_the_two_commands() -> None:
    generate, test = README.split("```sh\n")[1].split("```")[0].splitlines()
    assert generate == 'pip install . && lily generate "Tell me a story about a fox."'
    assert test == "pip install '.[test]' && pytest"
    ci = ROOT / ".ci/run"
    assert os.access(ci, os.X_OK) and test in ci.read_text().splitlines()
    run("bash", "-n", str(ci))


def test_the_readmes_python_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = README.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 50


def test_the_readmes_ten_minutes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(re.findall(r"```pycon\n(.*?)```", README, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "README.md", "README.md", 0)
    assert len(test.examples) > 15
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert failed == 0


MODULES = [info.name for info in pkgutil.iter_modules(lily.__path__) if info.name != "_core"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    failed, _ = doctest.testmod(importlib.import_module(f"lily.{name}"))
    assert failed == 0


def test_public_names_are_documented() -> None:
    for name in lily.__all__:
        thing = getattr(lily, name)
        if isinstance(thing, str):
            continue
        ours = str(getattr(thing, "__module__", "")).startswith("lily.") and inspect.isclass(thing)
        assert thing.__doc__ or issubclass(thing, Exception), name
        if ours and thing.__module__ != "lily._core":
            for member, value in vars(thing).items():
                if callable(value) and not member.startswith("_"):
                    assert value.__doc__, f"{name}.{member}"
    for method in (lily.Engine, lily.Engine.generate, lily.Engine.stream, lily.Engine.session):
        assert ">>>" in (method.__doc__ or "")


def test_one_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and PROJECT["project"]["version"] == lily.__version__ == newest[1]


def test_the_test_extra_is_light() -> None:
    for need in PROJECT["project"]["optional-dependencies"]["test"]:
        assert not re.match(r"(torch|mlx|transformers)\b", need)


# ---- the package -------------------------------------------------------------------------------


def test_the_stub_is_current(tmp_path: Path) -> None:
    made = tmp_path / "_core.pyi"
    run(sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "lily._core", "-o", str(made))
    committed = ROOT / "python/lily/_core.pyi"
    assert made.read_text() == committed.read_text(), (
        "the bindings changed: python -m nanobind.stubgen -m lily._core -o python/lily/_core.pyi"
    )
    installed = Path(lily.__file__).parent
    assert (installed / "_core.pyi").read_text() == committed.read_text()
    assert (installed / "py.typed").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--output-format=concise"],
        ["ruff", "format", "--check", "--output-format=concise"],
        ["mypy"],
    ],
    ids=" ".join,
)
def test_python_is_clean(command: list[str]) -> None:
    run(sys.executable, "-m", *command)


def test_cpp_and_kernels_are_formatted() -> None:
    beside = Path(sys.executable).parent / "clang-format"
    tool = str(beside) if beside.exists() else shutil.which("clang-format")
    if tool is None:
        pytest.skip("clang-format is not installed")
    wanted = [p for p in FILES if p.suffix in {".cpp", ".h", ".mm", ".metal"}]
    wanted += [p for p in FILES if p.name in LIBRARIES]
    done = subprocess.run(
        [tool, "--dry-run", *map(str, wanted)], cwd=ROOT, capture_output=True, text=True
    )
    unformatted = set(re.findall(r"^(\S+?):\d+:\d+: warning", done.stderr, re.M))
    assert done.returncode == 0 and not unformatted, sorted(unformatted)


# ---- the lists of kernels.h --------------------------------------------------------------------

# What specifies each op in tests/reference.py.
REFERENCES: dict[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "project": ("project",),
    "delta_out": ("delta_out",),
    "attn_out": ("attention_combine", "attn_gate", "linear"),
    "expert_up": ("router", "expert_up"),
    "expert_down": ("expert_down",),
    "delta_step": ("delta_step",),
    "attn_step": ("qk_norm", "rope", "attention_split"),
    "attn_combine": ("attention_combine",),
    "rms_norm": ("rms_norm",),
    "matmul": ("linear", "swiglu"),
    "delta_prep": ("delta_conv", "delta_gates", "l2_norm"),
    "delta_wy": ("delta_rule_chunked",),
    "delta_scan": ("delta_rule_chunked", "delta_rule"),
    "gated_norm": ("gated_norm",),
    "qkv_rope": ("qk_norm", "rope"),
    "flash": ("attention", "attn_gate"),
    "route_rows": ("router", "shared_gate"),
    "group_rows": (),  # a stable sort by expert, written out in its test
    "expert_matmul": ("swiglu",),
    "moe_combine": ("moe", "rms_norm"),
    "score": ("score",),
    "sample_scan": ("penalties",),
    "sample_draw": ("sample",),
    "copy_bytes": (),  # the bytes themselves
}


def test_every_op_has_a_reference() -> None:
    assert set(REFERENCES) == set(OPS)
    for op, names in REFERENCES.items():
        for name in names:
            assert callable(getattr(reference, name, None)), f"{op}: reference.{name}"


def _texts(pattern: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(ROOT.glob(pattern))}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_a_plan_a_twin_and_a_case(op: str) -> None:
    def holders(pattern: str, text: str) -> list[str]:
        return [name for name, body in _texts(pattern).items() if re.search(text, body, re.M)]

    assert len(holders("src/metal/*.metal", rf"^ *LILY_VARIANTS_{op}\(")) == 1
    assert len(holders("src/cpp/ops_*.cpp", rf"^Plan plan\(const {OPS[op]}& ")) == 1
    assert len(holders("src/cpp/cpu_*.cpp", rf"^void {op}\(const TwinCall& call\)")) == 1
    cases = set(holders("tests/test_*.py", rf'"{op}"')) - {Path(__file__).name}
    assert cases, f"no test runs {op}"


def test_variants_are_those_of_the_header() -> None:
    listed = re.findall(r"X\((\w+), (\w+), \d+, \d+, \d+\)", kernel_harness.TEXT)
    assert _core.variants() == listed
    names = [name for _, name in listed]
    assert len(names) == len(set(names))
    assert {op for op, _ in listed} == set(OPS)


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources(), ids=str)
def test_form_of_a_file(path: Path) -> None:
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert "\t" not in text and not any(line != line.rstrip() for line in lines)
    if len(lines) > 900:
        assert str(path) in LONG_FILES, f"{len(lines)} lines"
    else:
        assert str(path) not in LONG_FILES
    # No path of the machine on which it was written.
    assert not re.search(r"(?<![\w.])/(work|tmp|root)/(main|lily|shared)\b", text)
    if path.suffix in {".py", ".pyi"}:
        assert ast.get_docstring(ast.parse(text)), "says what it owns"
    elif path.suffix == ".md":
        assert path.parts[0] == "tests" or lines[0].startswith("# ")
    else:
        first = lines[1] if lines[0].startswith("#!") else lines[0]
        mark = "//" if path.suffix in {".cpp", ".h", ".mm", ".metal", ""} else "#"
        mark = "#" if path.name in {"run", ".clang-format"} else mark
        assert re.match(rf"{mark} \S*{re.escape(path.name)}: ", first), first


def test_no_fast_math() -> None:
    for path in [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake")]:
        assert not re.search(r"^[^#]*fast-math", path.read_text(), re.M), path
