"""A plugin of pytest: the test during which a rule of Metal was broken fails, with the rule in words.

The rules are those of tests/apple/software_metal, inside the extension that is being tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from lily import _core


class SoftwareMetal:
    """What the software Metal offers to tests, see rules.h."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(_core.__file__)
        self.library.software_metal_count.restype = ctypes.c_long
        self.library.software_metal_objects.restype = ctypes.c_long

    def broken(self) -> list[str]:
        text = ctypes.create_string_buffer(1 << 20)
        self.library.software_metal_broken_rules(text, len(text))
        return text.value.decode().splitlines()

    def forget(self) -> None:
        self.library.software_metal_forget()

    def inject(self, fault: str, skip: int = 0) -> None:
        assert self.library.software_metal_inject(fault.encode(), skip), fault

    def faults_left(self) -> int:
        return int(self.library.software_metal_faults_left())

    def repair(self) -> None:
        self.library.software_metal_repair()

    def count(self, what: str) -> int:
        n = int(self.library.software_metal_count(what.encode()))
        assert n >= 0, what
        return n

    def objects(self) -> int:
        return int(self.library.software_metal_objects())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    metal = SoftwareMetal()
    before = len(metal.broken())
    result = yield
    broken = metal.broken()[before:]
    assert not broken, "rules of Metal were broken:\n" + "\n".join(broken)
    return result
