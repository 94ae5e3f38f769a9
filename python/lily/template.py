"""Owns the chat template: messages and tools become a prompt whose control tokens are its own.

What the callers wrote (content, reasoning, names, schemas, keys, values) can never become a
control token. Before rendering, every literal of an added token in it gives way to a sentinel,
digits that are random for each render; the rendered text is cut at the added tokens that are in it
now, which only the template can have written; then the sentinels give way to the literals, and the
text between the cuts is encoded without added tokens.

A template that looks for such literals in a message does not find them, which is meant:
- A user message that is wholly `<tool_response>…</tool_response>` is a query like any other;
  results of tools come as messages of the role "tool".
- An assistant's `<think>…</think>` is divided by lily.messages before rendering, as the family's
  templates would. A message with reasoning_content (even "") is not divided.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.sandbox

from lily.errors import CheckpointError, LilyError
from lily.messages import Json, normalise_messages, normalise_tools
from lily.safetensors_header import open_regular, read_json_object
from lily.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 2**20
MAX_PROMPT_CHARS = 2**25  # more than any context holds

_NONCE_DIGITS = 40  # 132 bits


class TemplateError(LilyError):
    """The chat template refuses the messages or cannot be rendered."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    ids: what the model reads. text: the same as text. starts_in_thinking: it ends with an open
    think block, so that the answer begins with reasoning. stable_prefixes: lengths of beginnings
    of `ids`, ascending, each ending before a turn, that stay the beginning when another user
    message follows the answer (templates drop old reasoning, so not all do): snapshot here.
    """

    ids: tuple[int, ...]
    text: str
    starts_in_thinking: bool
    stable_prefixes: tuple[int, ...]


class ChatTemplate:
    """A checkpoint's chat template, run in a sandbox.

    >>> template = ChatTemplate('''{%- for m in messages %}<|im_start|>{{ m.role }}
    ... {{ m.content }}<|im_end|>
    ... {% endfor %}<|im_start|>assistant
    ... <think>
    ... ''', Tokenizer.load("tests/data/mlx4_calm"))
    >>> prompt = template.render([{"role": "user", "content": "What does <think> mean?"}])
    >>> prompt.starts_in_thinking, prompt.text.count("<think>")
    (True, 2)
    >>> prompt.ids.count(template.tokenizer.added["<think>"])  # the other one is text
    1
    """

    def __init__(self, source: str, tokenizer: Tokenizer, origin: str = "chat template") -> None:
        self.tokenizer = tokenizer
        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{origin}: not a template: {error}") from error

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], tokenizer: Tokenizer | None = None
    ) -> ChatTemplate:
        """Reads chat_template.jinja of a checkpoint folder, else what tokenizer_config.json or
        chat_template.json have.
        """
        folder = Path(folder)
        origin, source = _find_source(folder)
        return cls(source, tokenizer or Tokenizer.load(folder), origin)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The prompt for these messages and declared tools.

        thinking: whether the answer begins with reasoning. preserve_thinking: whether reasoning of
        answers before the last user message stays in. Raises ValueError, which names the message
        or tool that is wrong, and TemplateError.
        """
        for name, flag in (("thinking", thinking), ("preserve_thinking", preserve_thinking)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is a {type(flag).__name__}, a bool is needed")
        veil = _Veil(self.tokenizer)
        shown = veil.hide(normalise_messages(messages))
        context = {
            **self.tokenizer.named,
            "tools": veil.hide(normalise_tools(tools)) or None,
            "enable_thinking": thinking,
            "preserve_thinking": preserve_thinking,
        }
        text = self._run(context, shown, add_generation_prompt)
        stable = _common_length(text, self._next_turn(context, shown))

        ids: list[int] = []
        pieces: list[str] = []
        prefixes: list[int] = []
        turn_start: str | None = None  # the first added token of all opens the turns
        end = 0
        for literal in self.tokenizer.literals(text):
            pieces.append(veil.lift(text[end : literal.start()]))
            ids += self.tokenizer.encode_plain(pieces[-1])
            turn_start = turn_start or literal[0]
            if literal[0] == turn_start and ids and literal.end() <= stable:
                prefixes.append(len(ids))
            pieces.append(literal[0])
            ids.append(self.tokenizer.added[literal[0]])
            end = literal.end()
        pieces.append(veil.lift(text[end:]))
        ids += self.tokenizer.encode_plain(pieces[-1])
        thinks = text.rstrip().endswith("<think>")
        return Prompt(tuple(ids), "".join(pieces), thinks, tuple(prefixes))

    def _next_turn(self, context: Json, messages: list[Json]) -> str:
        """The text when an answer and another query have come; "" if the template objects."""
        answer = {"role": "assistant", "content": "a"}
        try:
            return self._run(context, [*messages, answer, {"role": "user", "content": "q"}], False)
        except TemplateError:
            return ""

    def _run(self, context: Json, messages: list[Json], add_generation_prompt: bool) -> str:
        variables = {
            **context,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    raise TemplateError(
                        f"{self._origin}: the prompt has more than {MAX_PROMPT_CHARS} characters"
                    )
                pieces.append(piece)
        except _RefusedError as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from None
        except LilyError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise TemplateError(f"{self._origin}: {type(error).__name__}: {error}") from error
        return "".join(pieces)


class _Veil:
    """Hides the literals of added tokens in what callers wrote, for one render.

    Sentinels are digits: no filter for case, JSON, HTML or blanks changes them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        self._number = {literal: i for i, literal in enumerate(tokenizer.added)}
        self._literal = dict(enumerate(tokenizer.added))
        self._digits = len(str(len(self._number)))
        self._sentinel = re.compile(f"{self._nonce}([0-9]{{{self._digits}}})")

    def hide(self, value: Any) -> Any:
        """A copy of plain JSON with the strings and keys hidden."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self._hide_text(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def lift(self, text: str) -> str:
        """Rendered text with the literals in their places again."""
        lifted = self._sentinel.sub(lambda match: self._literal[int(match[1])], text)
        if self._nonce in lifted:
            raise TemplateError("the chat template has changed a control token's text in a message")
        return lifted

    def _hide_text(self, text: str) -> str:
        pieces: list[str] = []
        end = 0
        for literal in self._tokenizer.literals(text):
            number = self._number[literal[0]]
            pieces += (text[end : literal.start()], f"{self._nonce}{number:0{self._digits}}")
            end = literal.end()
        return "".join([*pieces, text[end:]])


class _RefusedError(jinja2.TemplateError):
    """raise_exception was called: the template's author foresaw it."""


class _Namespace(jinja2.utils.Namespace):
    """The template's own variables; names with an underscore in front are Python's."""

    def __init__(self, **values: Any) -> None:
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which also repetition and powers cannot take all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        for one, other in ((left, right), (right, left)):
            long = isinstance(one, str | bytes | list | tuple) and isinstance(other, int)
            if long and len(one) * other > MAX_PROMPT_CHARS:
                raise jinja2.exceptions.SecurityError(
                    f"{len(one)} items are repeated {other} times"
                )
        if operator == "**" and max(abs(left), abs(right)) > 1000:
            raise jinja2.exceptions.SecurityError(f"{left} ** {right} is out of bounds")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The names and settings that chat templates are written for."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {
        "range": jinja2.sandbox.safe_range,
        "dict": _new_dict,
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own it escapes nothing for HTML and keeps the order of keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _new_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _raise_exception(message: object = "") -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _find_source(folder: Path) -> tuple[str, str]:
    """(file name, template) of the first place that has one."""
    sidecar = folder / "chat_template.jinja"
    if os.path.lexists(sidecar):
        with open_regular(sidecar) as stream:
            text = stream.read(MAX_TEMPLATE_BYTES + 1)
        if len(text) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{sidecar.name}: more than {MAX_TEMPLATE_BYTES} bytes, the limit for this file"
            )
        try:
            return sidecar.name, text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{sidecar.name}: byte {error.start} is not UTF-8") from None
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        source = read_json_object(file).get("chat_template") if os.path.lexists(file) else None
        if isinstance(source, list):  # several, by name
            named = [entry for entry in source if isinstance(entry, dict)]
            source = next((e.get("template") for e in named if e.get("name") == "default"), None)
        if source is None:
            continue
        if not isinstance(source, str):
            raise CheckpointError(f"{file.name}: chat_template is no string: {source!r:.80}")
        return file.name, source
    raise CheckpointError(
        f"{folder}: no chat template in chat_template.jinja, tokenizer_config.json "
        "or chat_template.json"
    )


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
