"""Owns the types of a tool call's values: a parameter's text becomes what its schema declares."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_ALL = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_REFS = 16


def typed_value(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """The value that `text` writes for a parameter of this schema.

    A string is taken verbatim. Of other types it is the value, and the text itself when it is
    none of them: the caller validates, nothing is lost. In a union the other types come before
    string. A schema that names no type takes JSON objects and arrays, anything else is a string.
    root: where "#/..." references begin.
    """
    types = _types(schema, root, 0)
    if types is None:
        types = frozenset({"object", "array"})
    trimmed = text.strip()
    for kind, read in _READERS:
        if kind in types:
            value = read(trimmed)
            if value is not _NOTHING:
                return value
    # Python's own spellings: this model writes them now and then.
    if "boolean" in types and trimmed.lower() in ("true", "false"):
        return trimmed.lower() == "true"
    if "null" in types and "string" not in types and trimmed == "None":
        return None
    return text


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    """The types a schema allows; None if it names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFS:
        return None
    found = _own_types(schema, root, depth)
    if found is not None and schema.get("nullable") is True:
        found |= {"null"}
    return found


def _own_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> frozenset[str] | None:
    kind = schema.get("type")
    if isinstance(kind, str | list):
        named = _ALL.intersection([kind] if isinstance(kind, str) else map(str, kind))
        return named or None
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            options = [_types(option, root, depth + 1) for option in schema[key]]
            known = [option for option in options if option is not None]
            if key == "allOf":
                return frozenset.intersection(*known) if known else None
            return frozenset().union(*known) if len(known) == len(options) else None
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    return frozenset({_type_of(schema["const"])}) if "const" in schema else None


def _type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference inside the document points to; None if nothing."""
    if not reference.startswith("#"):
        return None
    here: object = root
    for key in reference[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


_NOTHING = object()


def _null(text: str) -> object:
    return None if text == "null" else _NOTHING


def _boolean(text: str) -> object:
    return text == "true" if text in ("true", "false") else _NOTHING


def _integer(text: str) -> object:
    value = _number(text)
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)  # 3.0 is an integer to JSON schema
    return value if isinstance(value, int) else _NOTHING


def _number(text: str) -> object:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return _NOTHING
    try:
        value = float(text) if match[2] or match[3] else int(text)
    except ValueError:  # more digits than Python converts
        return _NOTHING
    return value if isinstance(value, int) or math.isfinite(value) else _NOTHING


def _container(text: str, kind: type) -> object:
    if text[:1] != ("{" if kind is dict else "["):
        return _NOTHING
    try:
        value = json.loads(text)
        # What cannot be written again would fail later: numbers out of range, lone surrogates.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return _NOTHING
    return value


_READERS = (
    ("null", _null),
    ("boolean", _boolean),
    ("integer", _integer),
    ("number", _number),
    ("object", lambda text: _container(text, dict)),
    ("array", lambda text: _container(text, list)),
)
