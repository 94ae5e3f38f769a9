"""Owns the shape of what callers hand in: messages, tools and tool calls, as OpenAI names them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64
MAX_NAME_CHARS = 128

# Parts that hold no text, by the words that name them.
_MEDIA = ("image", "video", "audio", "file")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asks for. arguments: one JSON object, in the order the model gave it."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def as_message_part(self) -> Json:
        """An entry of a message's tool_calls."""
        function = {"name": self.name, "arguments": self.arguments_json}
        return {"id": self.id, "type": "function", "function": function}


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The messages as a chat template reads them; ValueError names the place of what is wrong.

    Content becomes one string: parts joined in order, null as "". `developer` is another name of
    `system`; all system messages become one at the beginning, in order, a blank line between two,
    for the family's templates allow no other place. A message's reasoning may be called
    reasoning_content or reasoning. An assistant's content that holds its thinking still
    (`</think>`) is divided here. Arguments of tool calls may be JSON text. Fields that no template
    reads are left out. Lone surrogates become U+FFFD.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is a {_kind(messages)}, a list of messages is needed")
    if not messages:
        raise ValueError("messages is empty, at least one user message is needed")
    system: list[str] = []
    turns: list[Json] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is a {_kind(message)}, an object is needed")
        turn = _message(message, where)
        if turn["role"] == "system":
            system.append(turn["content"])
        else:
            turns.append(turn)
    if not any(turn["role"] == "user" for turn in turns):
        raise ValueError("messages has no user message, at least one is needed")
    if len(system) > 1:
        system = ["\n\n".join(text.strip() for text in system if text.strip())]
    return [{"role": "system", "content": text} for text in system] + turns


def normalise_tools(tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The declared tools as {"type": "function", "function": {...}}; a bare function is wrapped."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools is a {_kind(tools)}, a list of tools is needed")
    whole: list[Json] = []
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise ValueError(f"{where} is a {_kind(tool)}, an object is needed")
        plain: Json = plain_json(tool, where)
        if "function" not in plain and "name" in plain:
            plain = {"type": "function", "function": plain}
        function = plain.get("function")
        if plain.get("type", "function") != "function" or not isinstance(function, dict):
            raise ValueError(f'{where} is no function tool: {{"type": "function", "function": …}}')
        name = tool_name(function.get("name"), f"{where}.function.name")
        if name in names:
            raise ValueError(f"{where}.function.name is {name!r}, which another tool has")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise ValueError(f"{where}.function.parameters is a {_kind(parameters)}, not a schema")
        names.add(name)
        whole.append(plain)
    return whole


def tool_name(name: object, where: str) -> str:
    """A function's name: it stands inside a tag, so it holds neither space nor angle bracket."""
    if not isinstance(name, str):
        raise ValueError(f"{where} is a {_kind(name)}, a string is needed")
    odd = not name or not name.isprintable() or any(char in "<> " for char in name)
    if odd or len(name) > MAX_NAME_CHARS:
        raise ValueError(
            f"{where} is {name[:MAX_NAME_CHARS]!r} ({len(name)} characters), allowed are 1 to "
            f"{MAX_NAME_CHARS} printable ones without space, < and >"
        )
    return name


def plain_json(value: object, where: str, depth: int = 0) -> Any:
    """A copy of `value` made of JSON's own types only; what JSON cannot say is refused."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which JSON does not have")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, keys are strings")
        return {
            _unicode(key): plain_json(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where} is a {_kind(value)}, which is no JSON value")


def split_thinking(content: str) -> tuple[str, str]:
    """(reasoning, answer) of an assistant's text that holds both, as the family's templates do."""
    head, _, _ = content.partition("</think>")
    reasoning = head.rstrip("\n").rpartition("<think>")[2].lstrip("\n")
    return reasoning, content.rpartition("</think>")[2].lstrip("\n")


def _message(message: Mapping[str, Any], where: str) -> Json:
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role is {role!r}, allowed {list(ROLES)}")
    calls = message.get("tool_calls")
    if "content" not in message and not (role == "assistant" and calls):
        raise ValueError(f"{where} has no content")
    content = _content(message.get("content"), f"{where}.content")
    if role != "assistant":
        if calls:
            raise ValueError(f"{where}.tool_calls belong to an assistant, the role is {role!r}")
        turn: Json = {"role": "system" if role == "developer" else role, "content": content}
        for key in ("name", "tool_call_id"):
            if isinstance(message.get(key), str):
                turn[key] = _unicode(message[key])
        return turn
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning")
    if reasoning is None:
        # Before trimming it would matter: "<think>\n" may lead, blank lines may end.
        content = content.strip()
        if "</think>" in content:
            reasoning, content = split_thinking(content)
    elif not isinstance(reasoning, str):
        raise ValueError(f"{where}.reasoning_content is a {_kind(reasoning)}, not a string")
    turn = {"role": role, "content": content}
    if reasoning is not None:
        turn["reasoning_content"] = _unicode(reasoning)
    if calls:
        turn["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return turn


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise ValueError(f"{where} is a {_kind(content)}, a string or a list of parts is needed")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{where} is a {_kind(part)}, an object is needed")
    words = " ".join([str(part.get("type", "")), *map(str, part)])
    for media in _MEDIA:
        if media in words:
            raise ValueError(f"{where} holds {media} input, which is not supported: text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{where} is a part of type {part.get('type')!r} without text")
    return _unicode(text)


def _calls(calls: object, where: str) -> list[Json]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where} is a {_kind(calls)}, a list is needed")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: object, where: str) -> Json:
    if not isinstance(call, Mapping):
        raise ValueError(f"{where} is a {_kind(call)}, an object is needed")
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function is a {_kind(function)}, an object is needed")
    whole: Json = {"type": "function"}
    if isinstance(call.get("id"), str):
        whole["id"] = _unicode(call["id"])
    whole["function"] = {
        "name": tool_name(function.get("name"), f"{where}.function.name"),
        "arguments": _arguments(function.get("arguments"), f"{where}.function.arguments"),
    }
    return whole


def _arguments(arguments: object, where: str) -> Json:
    """A JSON object, given as one or as its text; none at all are no arguments."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} is a {_kind(arguments)}, a JSON object is needed")
    whole: Json = plain_json(arguments, where)
    return whole


def _unicode(text: str) -> str:
    """`text` with surrogate pairs joined and lone ones replaced: ids exist for Unicode only."""
    if text.isascii():
        return str(text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
