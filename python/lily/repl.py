"""Owns `lily chat`: reading lines and commands, showing answers, the talk's state."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import rich.console

import lily
from lily import terminal

HELP = """\
/help              this
/reset             forget the talk; the system message stays
/think on|off      reason before the answer, or not
/system [TEXT]     set the system message, or none; forgets the talk
/set               show the options; /set NAME VALUE sets one, /set NAME default unsets it
/tools [FILE]      declare the tools of a JSON file, or none
/exit              leave; so does Ctrl-D, and Ctrl-C twice
A line that ends in \\ goes on in the next one; lines between two \"\"\" are one message.
Ctrl-C interrupts an answer."""

HISTORY = 1000

_BLOCK = '"""'


@dataclass
class Talk:
    """What the next answer depends on."""

    engine: lily.Engine
    options: dict[str, Any]
    system: str | None = None
    thinking: bool = True
    tools: Sequence[dict[str, Any]] = ()
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """The talk so far as OpenAI has it."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def command(self, line: str) -> str:
        """Does what a line with a slash says; what to show. ValueError names what is wrong."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "help":
            return HELP
        if name == "reset":
            self.turns.clear()
            return "the talk is forgotten"
        if name == "think":
            if rest not in ("on", "off"):
                raise ValueError(f"/think is followed by {rest!r}, allowed on, off")
            self.thinking = rest == "on"
            return f"thinking is {rest}"
        if name == "system":
            self.system = rest or None
            self.turns.clear()
            return "the system message is set" if rest else "no system message"
        if name == "set":
            return self._set(rest)
        if name == "tools":
            tools = terminal.read_json(Path(rest)) if rest else []
            # What the template would refuse later is refused now.
            self.engine.template.render([{"role": "user", "content": "?"}], tools)
            self.tools = tools
            return f"{len(tools)} tools" if tools else "no tools"
        raise ValueError(f"/{name} is no command; /help lists them")

    def _set(self, rest: str) -> str:
        name, _, text = rest.partition(" ")
        defaults = _values(self.engine.defaults if self.thinking else self.engine.plain_defaults)
        if not name:
            params = lily.SamplingParams(**{**defaults, **self.options})
            return "\n".join(f"{key} = {value!r}" for key, value in _values(params).items())
        if name not in defaults:
            raise ValueError(f"{name} is no option; /set shows them")
        options = {key: value for key, value in self.options.items() if key != name}
        if text != "default":
            try:
                options[name] = json.loads(text)
            except ValueError:
                options[name] = text
        try:
            if isinstance(options.get("logit_bias"), dict):  # JSON's keys are strings
                bias = options["logit_bias"].items()
                options["logit_bias"] = {int(token): value for token, value in bias}
            lily.SamplingParams(**{**defaults, **options})
        except TypeError as error:
            raise ValueError(str(error)) from None
        self.options = options
        return f"{name} = {options[name]!r}" if name in options else f"{name} is the default"


def talk(state: Talk) -> None:
    """Runs the talk: in a terminal turn by turn, otherwise stdin is the only message."""
    if not sys.stdin.isatty():
        state.turns.append({"role": "user", "content": sys.stdin.read()})
        _plain_answer(state)
        return
    print("/help lists the commands, Ctrl-D leaves.")
    with _line_editing():
        _turns(state)


@contextmanager
def _line_editing() -> Iterator[None]:
    """Lines can be edited, and those of earlier talks come back, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    history = _history_file()
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


def _turns(state: Talk) -> None:
    interrupted = False  # the last thing that happened was a Ctrl-C
    while True:
        try:
            text = _message()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            print("Ctrl-C once more leaves.")
            continue
        interrupted = False
        if not text.strip():
            continue
        if text.strip() in ("/exit", "/quit"):
            return
        try:
            if text.startswith("/") and "\n" not in text:
                print(state.command(text.strip()))
                continue
            length = len(state.turns)
            state.turns.append({"role": "user", "content": text})
            try:
                interrupted = _answer(state)
            except BaseException:
                del state.turns[length:]  # what was refused is no part of the talk
                raise
        except (lily.LilyError, ValueError, OSError) as error:
            print("lily:", terminal.printable(str(error)), file=sys.stderr)


def _message() -> str:
    """One message: a line, lines that end in a backslash, or a block between triple quotes."""
    line = input("> ")
    if line.strip().startswith(_BLOCK):
        lines = [line.strip()[len(_BLOCK) :]]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(input("… "))
        lines[-1] = lines[-1].rstrip()[: -len(_BLOCK)]
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)


def _answer(state: Talk) -> bool:
    """Shows one answer, and after each tool call the next; whether Ctrl-C ended it."""
    console = rich.console.Console()
    while True:
        with terminal.reading_bar() as progress:
            stream = _stream(state, progress)
            interrupted = _show(console, stream)
        stream.close()
        done = stream.completion
        state.turns.append(_turn(done))
        terminal.stats(done)
        if interrupted or not done.tool_calls:
            return interrupted
        for call in done.tool_calls:
            result = input(f"result of {call.name}> ")
            message = {"role": "tool", "tool_call_id": call.id, "content": result}
            state.turns.append(message)


def _show(console: rich.console.Console, stream: lily.Stream) -> bool:
    last = "content"
    try:
        for token in stream:
            if not token.text:
                continue
            if token.kind != last and not (last == "content" and token.kind == "reasoning"):
                console.out("\n")
            last = token.kind
            text = token.text
            if token.tool_call is not None:
                text = f"{token.tool_call.name}({text})"
            style = {"reasoning": "dim", "tool": "cyan"}.get(token.kind)
            console.out(terminal.printable(text), style=style, highlight=False, end="")
            console.file.flush()
    except KeyboardInterrupt:
        console.out(" [interrupted]", style="dim", highlight=False)
        return True
    console.out("")
    return False


def _plain_answer(state: Talk) -> None:
    """The content alone, as it comes; calls as JSON, one a line."""
    show = terminal.printable if sys.stdout.isatty() else str
    with terminal.reading_bar() as progress:
        stream = _stream(state, progress)
        for token in stream:
            if token.kind == "content":
                print(show(token.text), end="", flush=True)
            elif token.tool_call is not None:
                print(json.dumps(token.tool_call.as_message_part(), ensure_ascii=False))
    print()
    terminal.stats(stream.completion)


def _stream(state: Talk, progress: terminal.Progress) -> lily.Stream:
    return state.engine.stream_chat(
        state.messages(),
        tools=state.tools,
        thinking=state.thinking,
        progress=progress,
        **state.options,
    )


def _turn(done: lily.Completion) -> dict[str, Any]:
    """An answer as a message of the talk."""
    turn: dict[str, Any] = {"role": "assistant", "content": done.text}
    if done.reasoning:
        turn["reasoning_content"] = done.reasoning
    if done.tool_calls:
        turn["tool_calls"] = [call.as_message_part() for call in done.tool_calls]
    return turn


def _values(params: lily.SamplingParams) -> dict[str, Any]:
    return {entry.name: getattr(params, entry.name) for entry in fields(params)}


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "lily/history"
