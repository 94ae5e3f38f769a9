"""Reads metal-cpp: Metal's protocols, classes, methods, enums, structs, blocks and constants as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Enum:
    namespace: str
    options: bool
    underlying: str
    members: dict[str, str]  # Objective-C name -> value, or "" for the next one


@dataclass(frozen=True)
class Method:
    namespace: str
    result: str
    arguments: tuple[str, ...]  # C++ parameters, as written


@dataclass
class Api:
    """One generation of metal-cpp. Keys are Objective-C names; types are still in C++."""

    classes: set[str] = field(default_factory=set)
    protocols: set[str] = field(default_factory=set)
    bases: dict[str, str] = field(default_factory=dict)
    copying: set[str] = field(default_factory=set)
    enums: dict[str, Enum] = field(default_factory=dict)
    structs: dict[str, tuple[str, list[tuple[str, str]]]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, str]] = field(default_factory=dict)  # namespace, type
    methods: dict[str, dict[tuple[str, str], Method]] = field(default_factory=dict)
    strings: set[str] = field(default_factory=set)  # constants of type NSString *
    unread: list[str] = field(default_factory=list)  # functions whose selector was not understood


def read(folder: Path) -> Api:
    """The declarations of `folder`, the one that holds Metal/Metal.hpp."""
    api = Api()
    bridge = _without_comments((folder / "Metal/MTLHeaderBridge.hpp").read_text())
    api.classes = set(re.findall(r"_DEF_CLS\((\w+)\)", bridge))
    api.protocols = set(re.findall(r"_DEF_PRO\((\w+)\)", bridge)) | {
        "MTLCaptureScope"
    }  # missing there
    selectors = dict(re.findall(r"_DEF_SEL\((\w+),\s*\"([^\"]+)\"\)", bridge))
    for path in sorted((folder / "Metal").glob("MTL*.hpp")):
        text = _without_comments(path.read_text())
        for namespace, body in _namespaces(text):
            _read_enums(api, namespace, body)
            _read_structs(api, namespace, body)
            _read_aliases(api, namespace, body)
            _read_bases(api, namespace, body)
        _read_methods(api, text, selectors)
        for name in re.findall(r"^_MTL_CONST\([\w:]+,\s*(\w+)\)", text, re.M):
            api.strings.add("MTL" + name)
    api.classes |= set(api.bases) - api.protocols
    return api


def split_arguments(text: str) -> list[str]:
    """Parts between the commas of the outermost level."""
    parts, depth, part = [], 0, ""
    for letter in text:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return [*parts, part.strip()] if part.strip() else parts


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def _namespaces(text: str) -> Iterator[tuple[str, str]]:
    for start in re.finditer(r"^namespace (MTL4?)\s*\n\{", text, flags=re.M):
        depth, at = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        yield start.group(1), text[start.end() : at - 1]


def _read_enums(api: Api, namespace: str, body: str) -> None:
    macro = r"_MTL_(?P<kind>ENUM|OPTIONS)\((?P<type>[^,]+),\s*(?P<name>\w+)\)\s*\{(?P<body>.*?)\};"
    plain = r"^\s*enum (?P<name>\w+)\s*:\s*(?P<type>[\w:]+)\s*\{(?P<body>.*?)\};"
    for found in [*re.finditer(macro, body, re.S), *re.finditer(plain, body, re.S | re.M)]:
        values = {}
        for entry in filter(None, map(str.strip, found["body"].split(","))):
            name, _, value = entry.partition("=")
            values[name.strip()] = value.strip()
        own = re.compile(rf"\b({'|'.join(values)})\b")  # a value may be made of other members
        members = {
            namespace + name: own.sub(rf"{namespace}\1", value) for name, value in values.items()
        }
        options = found.groupdict().get("kind") == "OPTIONS"
        api.enums[namespace + found["name"]] = Enum(
            namespace, options, found["type"].strip(), members
        )


def _read_structs(api: Api, namespace: str, body: str) -> None:
    pattern = r"^struct (\w+)\s*\n\{(.*?)^\}\s*(?:_MTL_PACKED)?\s*;"
    for name, inside in re.findall(pattern, body, flags=re.S | re.M):
        # Of a union of names and elements the elements are enough: same layout.
        if union := re.search(r"float elements\[\d\]", inside):
            inside = union.group() + ";"
        fields = [
            (kind, names)
            for kind, names in re.findall(r"^\s*([\w:]+)\s+([^;{}()]+);", inside, flags=re.M)
            if kind != "static"
        ]
        api.structs[namespace + name] = (namespace, fields)


def _read_aliases(api: Api, namespace: str, body: str) -> None:
    for name, meaning in re.findall(r"^\s*using (\w+)\s*=\s*(.*?);", body, flags=re.S | re.M):
        if "std::function" not in meaning:
            api.aliases[namespace + name] = (namespace, meaning.strip())


def _read_bases(api: Api, namespace: str, body: str) -> None:
    pattern = r"^class (\w+)\s*(?:final)?\s*:\s*public NS::(\w+)<([^>]*)>"
    for name, kind, arguments in re.findall(pattern, body, flags=re.M):
        if kind == "Copying":
            api.copying.add(namespace + name)
        base = [*split_arguments(arguments), ""][1]
        if base and "::" not in base:
            base = namespace + base
        api.bases[namespace + name] = base.replace("::", "")


_DEFINITION = re.compile(
    r"^_MTL_INLINE\s+(?P<result>[^\n{;]*?)\s*(?P<namespace>MTL4?)::(?P<owner>\w+)::(?P<name>\w+)"
    r"\((?P<arguments>.*?)\)\s*(?:const)?\s*\n\{(?P<body>.*?)^\}",
    re.S | re.M,
)
_MESSAGE = re.compile(
    r"sendMessage(?:Safe)?<.*?>\((?P<to>this|_MTL_PRIVATE_CLS\(\w+\)),\s*_MTL_PRIVATE_SEL\((?P<selector>\w+)\)",
    re.S,
)
# Bodies that send no message on purpose: made of others, or plain C++.
_OTHER = re.compile(r"return \w+\(\);|alloc<|::init<|std::function|Function& |__block|Make\(")


def _read_methods(api: Api, text: str, selectors: dict[str, str]) -> None:
    for found in _DEFINITION.finditer(text):
        owner = found["namespace"] + found["owner"]
        message = _MESSAGE.search(found["body"])
        if message is None:
            constructor = found["owner"] == found["name"] or owner in api.structs
            if not constructor and not _OTHER.search(found[0]):
                api.unread.append(f"{owner} {found['name']}")
            continue
        # A few selectors are used without being in the list; the names follow one scheme.
        symbol = message["selector"]
        selector = selectors.get(symbol, symbol.replace("_", ":"))
        arguments = split_arguments(found["arguments"])
        if selector.count(":") != len(arguments):
            api.unread.append(f"{owner} {selector}")
            continue
        kind = "-" if message["to"] == "this" else "+"
        method = Method(found["namespace"], found["result"].strip(), tuple(arguments))
        api.methods.setdefault(owner, {})[kind, selector] = method
