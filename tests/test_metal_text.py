"""The text that Apple's compiler is given: every file as in the tree, each header once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lily import LilyError, _core

SOURCE = Path(__file__).resolve().parent.parent / "src/metal"
FILES = sorted(p.stem for p in SOURCE.glob("*.metal"))
ORIGIN = re.compile(r'#line (\d+) "(.+)"')


@pytest.fixture(autouse=True)
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILY_METAL_SOURCE", raising=False)


def origins(text: str) -> dict[tuple[str, int], str]:
    """Every line of the text by the file and line that it says it is from."""
    found: dict[tuple[str, int], str] = {}
    name, at = "", 0
    for line in text.removesuffix("\n").split("\n"):
        if m := ORIGIN.fullmatch(line):
            name, at = m[2], int(m[1])
            continue
        assert (name, at) not in found, f"{name}:{at} is there twice"
        found[name, at] = line
        at += 1
    return found


def test_the_files_are_those_of_the_tree() -> None:
    assert _core.metal_files() == FILES
    assert len(FILES) >= 7


@pytest.mark.parametrize("file", FILES)
def test_the_text_is_the_tree_s_with_each_header_once(file: str) -> None:
    text = _core.metal_source(file, False)
    assert not re.search(r'^#include "', text, re.MULTILINE)
    assert text.count("#include <metal_stdlib>") == 1
    lines = origins(text)
    names = {name for name, _ in lines}
    assert {f"{file}.metal", "util.h", "kernels.h"} <= names
    for name in names:
        for number, line in enumerate((SOURCE / name).read_text().splitlines(), 1):
            if line.startswith('#include "'):
                assert (name, number) not in lines
                assert line.split('"')[1] in names
            else:
                assert lines.pop((name, number)) == line, f"{name}:{number}"
    assert not lines, "lines that no file has"


@pytest.mark.parametrize("file", FILES)
def test_a_header_is_in_place_before_what_needs_it(file: str) -> None:
    text = _core.metal_source(file, False)
    order = [m[2] for m in map(ORIGIN.fullmatch, text.split("\n")) if m and m[1] == "1"]
    assert order[0] == f"{file}.metal"
    assert len(order) == len(set(order))
    assert text.index("struct Step {") < text.index("KERNEL(")


@pytest.mark.parametrize("file", FILES)
def test_exact_is_one_define_at_the_start(file: str) -> None:
    plain, exact = _core.metal_source(file, False), _core.metal_source(file, True)
    assert exact == "#define LILY_EXACT 1\n" + plain


@pytest.mark.parametrize("file", FILES)
def test_tensor_operations_are_one_define_too(file: str) -> None:
    for exact in (False, True):
        plain, tensor = (
            _core.metal_source(file, exact),
            _core.metal_source(file, exact, tensor=True),
        )
        exact_define = "#define LILY_EXACT 1\n" if exact else ""
        define = exact_define + "#define LILY_TILE_TENSOR 1\n"
        assert tensor == define + plain.removeprefix(exact_define)


def test_an_unknown_file_is_refused() -> None:
    with pytest.raises(LilyError, match=r"no kernel file nosuch\.metal"):
        _core.metal_source("nosuch", False)


def test_a_folder_takes_the_place_of_the_embedded_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (*SOURCE.glob("*.metal"), *SOURCE.glob("*.h")):
        shutil.copy(path, tmp_path)
    before = {f: _core.metal_source(f, True) for f in FILES}
    monkeypatch.setenv("LILY_METAL_SOURCE", str(tmp_path))
    assert {f: _core.metal_source(f, True) for f in FILES} == before
    (tmp_path / "more.metal").write_text('#include "util.h"\n#include "kernels.h"\n// the end')
    assert _core.metal_files() == sorted([*FILES, "more"])
    text = _core.metal_source("more", False)
    assert text.endswith('#line 3 "more.metal"\n// the end\n')
    assert [m[2] for m in map(ORIGIN.fullmatch, text.split("\n")) if m and m[1] == "1"] == [
        "more.metal",
        "util.h",
        "kernels.h",
    ]


def test_a_folder_that_lacks_something_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LILY_METAL_SOURCE", str(tmp_path))
    with pytest.raises(LilyError, match=re.escape(f"no kernel files in {tmp_path}")):
        _core.metal_files()
    (tmp_path / "one.metal").write_text('#include "two.h"\n')
    with pytest.raises(LilyError, match=re.escape(f"{tmp_path}, which has no readable two.h")):
        _core.metal_source("one", False)
    (tmp_path / "one.metal").write_text('\n#include "two.h\n')
    with pytest.raises(LilyError, match=r"one\.metal:2: the include has no closing quote"):
        _core.metal_source("one", False)
    monkeypatch.setenv("LILY_METAL_SOURCE", str(tmp_path / "nowhere"))
    with pytest.raises(LilyError, match="nowhere"):
        _core.metal_files()
