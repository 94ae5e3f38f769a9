"""Owns the way from a model's text to reasoning, content and tool calls, as it comes.

The form is the checkpoint's: `reasoning</think>content`, and calls within the content:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

One newline after `<parameter=KEY>` and one before `</parameter>` are markup, all else between them
is the value. What was seen of real answers is accepted: no `<tool_call>` around a function that
begins a line, no `</tool_call>` or `</function>` at the end, no `</parameter>` before the next
declared parameter or the end of the call. A function that is not declared is no call: its text
stays content. Marks inside a value are part of it unless what follows continues the call.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lily.messages import ToolCall, normalise_tools
from lily.tool_values import typed_value

Kind = Literal["reasoning", "content", "tool"]

MAX_KEY_CHARS = 256

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

_OPENING = re.compile(f"{_CALL}|{_FUNCTION}")
_VALUE_MARK = re.compile(f"{_PARAMETER_END}|{_FUNCTION_END}|{_PARAMETER}")
_BLANK = re.compile(r"[ \t\r\n]*")  # between tags


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one kind. A whole tool call is one piece: `call`, text its arguments as JSON."""

    kind: Kind
    text: str
    call: ToolCall | None = None


class OutputParser:
    """Divides one answer. Pieces depend on the whole text only, not on how it was fed in.

    tools: the declared tools; without any, `<tool_call>` is content. starts_in_thinking: as the
    prompt says. think_end: the id of `</think>`; given it, only that token ends the reasoning,
    which may then quote the tag. The blank lines around the marks belong to them.

    >>> parser = OutputParser(starts_in_thinking=True)
    >>> parser.push("Two and two.\\n</th"), parser.push("ink>\\n\\n4")
    ([Piece(kind='reasoning', text='Two and two.', call=None)], \
[Piece(kind='content', text='4', call=None)])
    >>> parser.finish("stop")
    ([], ())
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_thinking: bool = False,
        think_end: int | None = None,
    ) -> None:
        functions = [tool["function"] for tool in normalise_tools(tools)]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._thinks = starts_in_thinking
        self._think_end = think_end
        self.calls: list[ToolCall] = []
        self._buffer = ""  # not yet decided, or the call that is being read
        self._state: Callable[[bool], bool] = self._start
        self._pieces: list[Piece] = []
        self._wrote = False  # whether the present kind has any text
        self._space = ""  # of content, kept until what follows is known
        self._in_line = False  # the content's last line has text
        # The call that is being read: offsets into the buffer, and its parts.
        self._at = 0
        self._scan = 0
        self._name = ""
        self._key = ""
        self._texts: dict[str, str] = {}

    def push(self, text: str, token_id: int | None = None) -> list[Piece]:
        """The pieces that `text`, the next of the answer, completes. token_id: the token it is."""
        if self._think_end is not None and token_id == self._think_end and self._reasons():
            self._buffer += text.removesuffix(_THINK_END)
            self._run(final=False)
            if self._state == self._start:  # the answer so far may have been a `<think>`
                self._start(True)
            self._end_thinking(self._buffer, "")
        else:
            self._buffer += text
        self._run(final=False)
        return self._take()

    def finish(self, finish_reason: str) -> tuple[list[Piece], tuple[ToolCall, ...]]:
        """The last pieces and all calls. "stop": the model ended by itself, so that a call lacking
        only closing tags counts, and one that cannot be read is content; otherwise an unfinished
        call is left out.
        """
        self._run(final=finish_reason == "stop")
        if self._state in (self._start, self._reasoning):
            text = self._buffer.lstrip("\n") if not self._wrote else self._buffer
            self._write("reasoning" if self._reasons() else "content", text)
        elif self._state == self._content:
            self._text(self._buffer)
        elif self._state == self._after:
            pass  # at most a piece of </tool_call>
        elif finish_reason == "stop":
            self._text(self._buffer)
        else:
            self._space = ""
        self._buffer = ""
        if self._space and (self._in_line or not self.calls):
            self._write("content", self._space)
        return self._take(), tuple(self.calls)

    # ---- reasoning ------------------------------------------------------------------------------

    def _reasons(self) -> bool:
        return self._state == self._reasoning or (self._state == self._start and self._thinks)

    def _start(self, final: bool) -> bool:
        """A `<think>` that leads the answer opens reasoning, or repeats the prompt's."""
        if not final and _may_become(self._buffer, (_THINK,)):
            return False
        if self._buffer.startswith(_THINK):
            self._buffer = self._buffer[len(_THINK) :]
            self._thinks = True
        self._state = self._reasoning if self._thinks else self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        end = self._buffer.find(_THINK_END) if self._think_end is None else -1
        if end >= 0:
            self._end_thinking(self._buffer[:end], self._buffer[end + len(_THINK_END) :])
            return True
        keep = len(self._buffer)
        if self._think_end is None:
            keep = _partial_start(self._buffer, (_THINK_END,))
        sure = self._buffer[:keep].rstrip("\n")
        if not self._wrote:
            sure = sure.lstrip("\n")
            self._buffer = self._buffer.lstrip("\n")
        self._write("reasoning", sure)
        self._buffer = self._buffer[len(sure) :]
        return False

    def _end_thinking(self, text: str, rest: str) -> None:
        self._write("reasoning", text.rstrip("\n") if self._wrote else text.strip("\n"))
        self._buffer = rest
        self._state = self._content
        self._wrote = False

    # ---- content --------------------------------------------------------------------------------

    def _content(self, final: bool) -> bool:
        if not self._schemas:
            self._text(self._buffer)
            self._write("content", self._space)
            self._space = self._buffer = ""
            return False
        for mark in _OPENING.finditer(self._buffer):
            if mark[0] == _CALL or self._begins_line(mark.start()):
                self._text(self._buffer[: mark.start()])
                self._buffer = self._buffer[mark.start() :]
                self._state = self._head
                return True
        keep = _partial_start(self._buffer, (_CALL, _FUNCTION))
        self._text(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    def _begins_line(self, at: int) -> bool:
        before = self._space + self._buffer[:at]
        blank = before[len(before.rstrip()) :]
        return "\n" in blank or (blank == before and not self._in_line)

    def _text(self, text: str) -> None:
        """Content; the space at its end waits, for before a call it is markup."""
        body = text.rstrip()
        if body:
            lead = self._space + body
            if not self._wrote:
                lead = lead.lstrip() if self.calls else lead.lstrip("\n") if self._thinks else lead
            self._write("content", lead)
            self._space = ""
            self._in_line = True
        self._space += text[len(body) :]
        if not self._wrote and self._thinks:
            self._space = self._space.lstrip("\n")

    # ---- calls ----------------------------------------------------------------------------------

    def _head(self, final: bool) -> bool:
        """The buffer begins with an opening mark; is it a call of a declared function?"""
        at = 0
        if self._buffer.startswith(_CALL):
            at = self._skip_blank(len(_CALL))
            if not self._buffer.startswith(_FUNCTION, at):
                return self._wait_or_refuse(_may_become(self._buffer[at:], (_FUNCTION,)), final)
        at += len(_FUNCTION)
        for name in self._schemas:
            if self._buffer.startswith(name + ">", at):
                self._name, self._texts = name, {}
                self._at = at + len(name) + 1
                self._state = self._body
                return True
        names = [name + ">" for name in self._schemas]
        return self._wait_or_refuse(_may_become(self._buffer[at:], names), final)

    def _body(self, final: bool) -> bool:
        """Between parameters."""
        at = self._skip_blank(self._at)
        if self._buffer.startswith(_PARAMETER, at):
            return self._parameter(at + len(_PARAMETER), final)
        if self._buffer.startswith(_FUNCTION_END, at):
            self._complete(at + len(_FUNCTION_END))
            return True
        if self._buffer.startswith(_CALL_END, at):
            self._complete(at)
            return True
        rest = self._buffer[at:]
        if final and self._texts and _may_become(rest, (_FUNCTION_END, _CALL_END)):
            self._complete(len(self._buffer))
            return True
        waits = _may_become(rest, (_PARAMETER, _FUNCTION_END, _CALL_END))
        return self._wait_or_refuse(waits, final)

    def _parameter(self, at: int, final: bool) -> bool:
        declared = [key + ">" for key in self._properties()]
        rest = self._buffer[at : at + 1 + max([MAX_KEY_CHARS, *map(len, declared)])]
        waits = _may_become(rest, declared)  # declared keys may hold ">"
        if not waits:
            whole = max(filter(rest.startswith, declared), key=len, default=None)
            key, closed, _ = (whole[:-1], ">", "") if whole else rest.partition(">")
            if key and closed and (whole or "\n" not in key):
                self._key = key
                self._at = self._scan = at + len(key) + 1
                self._state = self._value
                return True
            waits = ">" not in rest and "\n" not in rest and len(rest) <= MAX_KEY_CHARS
        return self._wait_or_refuse(waits, final)

    def _value(self, final: bool) -> bool:
        for mark in _VALUE_MARK.finditer(self._buffer, self._scan):
            ends = self._ends_value(mark, final)
            if ends is None:
                self._scan = mark.start()
                return False
            if ends:
                text = self._buffer[self._at : mark.start()].removeprefix("\n").removesuffix("\n")
                self._texts[self._key] = text
                self._at = mark.end() if mark[0] == _PARAMETER_END else mark.start()
                self._state = self._body
                return True
        self._scan = max(self._scan, len(self._buffer) - len(_PARAMETER_END) + 1)
        return False

    def _ends_value(self, mark: re.Match[str], final: bool) -> bool | None:
        """Whether this mark ends the value or is part of it; None: what follows will tell."""
        begins_line = mark.start() > self._at and self._buffer[mark.start() - 1] == "\n"
        if mark[0] == _PARAMETER:
            others = self._properties().keys() - self._texts.keys() - {self._key}
            keys = [key + ">\n" for key in others]
            if not begins_line:
                return False
            return self._follows(mark.end(), keys, final, at_end=False)
        at = self._skip_blank(mark.end())
        if mark[0] == _PARAMETER_END:
            return self._follows(at, (_PARAMETER, _FUNCTION_END, _CALL_END), final, at_end=True)
        if not begins_line:
            return False
        return self._follows(at, (_CALL_END, _CALL, _FUNCTION), final, at_end=True)

    def _follows(self, at: int, marks: Sequence[str], final: bool, *, at_end: bool) -> bool | None:
        """Whether one of the marks is at `at`. at_end: so is the answer's own end."""
        if any(self._buffer.startswith(mark, at) for mark in marks):
            return True
        if not _may_become(self._buffer[at:], marks):
            return False
        return at_end if final else None

    def _complete(self, end: int) -> None:
        schema = self._schemas[self._name]
        properties = self._properties()
        arguments = {
            # A key that is not declared has no type: its text is all that is known.
            key: typed_value(text, properties[key], schema) if key in properties else text
            for key, text in self._texts.items()
        }
        call_id = f"call_{len(self.calls)}_{secrets.token_hex(8)}"
        call = ToolCall(call_id, self._name, arguments)
        self.calls.append(call)
        self._pieces.append(Piece("tool", call.arguments_json, call))
        self._buffer = self._buffer[end:]
        self._space = ""
        self._in_line = False
        self._state = self._after

    def _after(self, final: bool) -> bool:
        """After `</function>`: the envelope's end, if it is there."""
        at = self._skip_blank(0)
        if self._buffer.startswith(_CALL_END, at):
            self._buffer = self._buffer[at + len(_CALL_END) :]
        elif _may_become(self._buffer[at:], (_CALL_END,)):
            return False
        self._state = self._content
        return True

    def _properties(self) -> Mapping[str, Any]:
        properties = self._schemas[self._name].get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _wait_or_refuse(self, waits: bool, final: bool) -> bool:
        """An opening mark that begins no call is text; the search goes on after it."""
        if waits or final:
            return False
        mark = _CALL if self._buffer.startswith(_CALL) else _FUNCTION
        self._text(mark)
        self._buffer = self._buffer[len(mark) :]
        self._state = self._content
        return True

    # ---- common ---------------------------------------------------------------------------------

    def _run(self, final: bool) -> None:
        while self._state(final):
            pass

    def _skip_blank(self, at: int) -> int:
        match = _BLANK.match(self._buffer, at)
        return match.end() if match else at

    def _write(self, kind: Kind, text: str) -> None:
        if text:
            self._wrote = True
            if self._pieces and self._pieces[-1].kind == kind != "tool":
                text = self._pieces.pop().text + text
            self._pieces.append(Piece(kind, text))

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def _may_become(text: str, marks: Sequence[str]) -> bool:
    """Whether `text` is a beginning of a mark, and not the whole of it."""
    return any(len(text) < len(mark) and mark.startswith(text) for mark in marks)


def _partial_start(text: str, marks: Sequence[str]) -> int:
    """Where the end of `text` that may become a mark begins."""
    at = max(0, len(text) - max(map(len, marks)) + 1)
    while (at := text.find("<", at)) >= 0:
        if _may_become(text[at:], marks):
            return at
        at += 1
    return len(text)
