"""The table of bug reports names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_named_test_exists() -> None:
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", (HERE / "BUG_REPORTS.md").read_text())
    assert len(named) > 30
    for file, name in named:
        assert f"\ndef {name}(" in (HERE / file).read_text(), f"{file}::{name}"


def test_every_test_of_a_report_is_named() -> None:
    table = (HERE / "BUG_REPORTS.md").read_text()
    for file in HERE.glob("test_*.py"):
        for name in re.findall(r"^def (test_report_\w+)\(", file.read_text(), re.MULTILINE):
            assert f"{file.name}::{name}" in table, f"{file.name}::{name} is not in the table"
