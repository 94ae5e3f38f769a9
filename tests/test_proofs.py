"""The README's table of what was proved where is true: its tests exist, run there, and nobody means nobody."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTION = (ROOT / "README.md").read_text().split("## What was proved where")[1].split("\n## ")[0]
HEAD, _, *BODY = [
    [cell.strip() for cell in line.strip()[1:-1].split("|")]
    for line in SECTION.splitlines()
    if line.startswith("|")
]
COLUMNS = ["cpu", "sim", "cuda", "metal.mm", "Mac"]


def named(cell: str) -> list[Path]:
    return [ROOT / path for path in re.findall(r"`([^`]+)`", cell)]


def test_the_columns_are_the_devices() -> None:
    assert len(HEAD) == len(COLUMNS) + 1
    for title, name in zip(HEAD[1:], COLUMNS, strict=True):
        assert name in title
    assert len(BODY) >= 10


@pytest.mark.parametrize("row", BODY, ids=[r[0][:40] for r in BODY])
def test_what_a_row_names_is_there(row: list[str]) -> None:
    assert len(row) == len(HEAD)
    for column, cell in zip(COLUMNS, row[1:], strict=True):
        if cell in ("–", "nobody"):
            continue
        assert named(cell), f"{column}: {cell} names no test"
        for path in named(cell):
            text = path.read_text()
            assert path.suffix != ".py" or "\ndef test_" in text or path.parent.name == "benchmarks"
            # A test that runs on a device takes it from a fixture or names it.
            if column in ("cpu", "sim", "cuda") and path.name.startswith("test_"):
                fixtures = r"\b(kernels|device|model|engine)\b: |\"" + column
                assert re.search(fixtures, text), f"{path.name} has nothing for {column}"


def test_the_software_metal_runs_what_the_table_says() -> None:
    """A test is either of those that run.py runs on the device, or it is about the text alone."""
    sys.path.insert(0, str(ROOT / "tests/apple"))
    import run

    alone = {f"tests/test_{n}.py" for n in "host_bugs msl_lint apple_headers macos_wheel".split()}
    for row in BODY:
        for path in named(row[1 + COLUMNS.index("metal.mm")]):
            assert str(path.relative_to(ROOT)) in {*run.TESTS, *alone}, path


def test_nobody_ran_it_on_a_mac() -> None:
    """The day a measurement or report from a Mac is kept, the table has to say which."""
    records = [
        json.loads(line)
        for file in (ROOT / "benchmarks/results").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    macs = [r for r in records if r["device"].startswith("metal") and "oftware" not in r["device"]]
    cells = [row[-1] for row in BODY]
    assert records, "the GPU's measurements are kept there"
    if macs:
        assert any(cell != "nobody" for cell in cells)
    else:
        assert cells == ["nobody"] * len(cells)
        assert "No Mac has run it yet" in (ROOT / "README.md").read_text()
