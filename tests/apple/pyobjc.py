"""What pyobjc's metadata, made from the real SDK, says of Metal: enum values, methods' types, structs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

import pinned

WHEEL = pinned.Wheel(
    "pyobjc-framework-metal",
    "12.2.2",
    "macosx_10_13_universal2",
    "fb0421195ded2a02a83c94dbc1bf815b4a879c51804c43bcaf4680a6dc1b4aa2",
)


@dataclass
class Metadata:
    enums: dict[str, int] = field(default_factory=dict)
    strings: set[str] = field(default_factory=set)
    structs: dict[str, str] = field(default_factory=dict)  # name -> encoding
    # Methods of protocols: selector -> position (0 result, 2... arguments) -> encoding. Booleans,
    # objects and plain integers that need no bridging are left out of the metadata.
    methods: dict[str, dict[int, str]] = field(default_factory=dict)


def metadata() -> Metadata:
    """Read as data, never run; raises pinned.Unavailable."""
    path = pinned.fetch(WHEEL, "/_metadata.py") / "Metal/_metadata.py"
    found = Metadata()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            _constants(found, getattr(node.targets[0], "id", ""), str(node.value.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "r":
            owner, selector, facts = map(ast.literal_eval, node.args)
            if owner == b"NSObject":
                found.methods[selector.decode()] = _types(facts)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "createStructType":
            name, encoding = map(ast.literal_eval, node.args[:2])
            found.structs[name.removeprefix("Metal.")] = encoding.decode()
    return found


def _constants(found: Metadata, name: str, text: str) -> None:
    if name == "enums":
        for entry in filter(None, text.split("$")):
            constant, value = entry.rsplit("@", 1)
            found.enums[constant] = int(value)
    elif name == "constants":
        found.strings = {re.sub(r"@.*", "", entry) for entry in text.split("$") if entry}


def _types(facts: dict[str, Any]) -> dict[int, str]:
    places = {0: facts.get("retval", {}), **facts.get("arguments", {})}
    types = {}
    for place, fact in places.items():
        if "type" in fact:
            encoding = fact["type"]
            types[place] = encoding.decode() if isinstance(encoding, bytes) else encoding
    return types
