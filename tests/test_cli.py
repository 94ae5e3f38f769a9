"""The command: a talk in a real terminal, piped use, what a checkpoint is."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lily
from lily.cli import main
from lily.repl import Talk
from text_harness import CALM, WEATHER

LILY = [sys.executable, "-c", "from lily.cli import main; main()"]
MODEL = ["--model", str(CALM), "--device", "cpu"]
ENDLESS = ["--seed", "1", "--temperature", "1"]


class Terminal:
    """A command in a terminal of its own, driven as a person would."""

    def __init__(self, *arguments: str, home: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(home), "COLUMNS": "200"}
        self.child = subprocess.Popen(
            [*LILY, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str, seconds: float = 20) -> str:
        """What was shown up to the first match, which is taken out of `seen`."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            self._read(0.1)
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def prompt(self) -> None:
        """Waits for the prompt, then as long as a person does.

        Python's readline does not wake for a signal between showing its prompt and waiting for
        keys, and what is typed before the prompt is shown twice.
        """
        self.wait_for("> ")
        time.sleep(0.5)

    def leave(self, seconds: float = 20) -> int:
        end = time.monotonic() + seconds
        while self.child.poll() is None:
            assert time.monotonic() < end, f"it does not leave: {self.seen!r}"
            self._read(0.05)
        return self.child.returncode

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self._ours)

    def _read(self, seconds: float) -> None:
        if select.select([self._ours], [], [], seconds)[0]:
            try:
                self.seen += self._text.decode(os.read(self._ours, 65536))
            except OSError:  # the other side is closed
                time.sleep(0.02)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def terminal(home: Path) -> Iterator[Terminal]:
    opened = Terminal("chat", *MODEL, *ENDLESS, home=home)
    yield opened
    opened.close()


def _lily(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LILY, *arguments], input=text, capture_output=True, text=True, timeout=60
    )


# ---- a talk -------------------------------------------------------------------------------------

STATS = r"answer: \d+ tokens.*/s · (length|stop)"


def test_a_talk_of_three_turns(terminal: Terminal, home: Path) -> None:
    terminal.prompt()
    terminal.type("/set max_tokens 12\n")
    terminal.wait_for(r"max_tokens = 12\r\n")
    terminal.type("Why is the sky blue?\n")
    first = terminal.wait_for(STATS)
    assert "(12 of reasoning)" in first and "known" not in first
    terminal.type("/think off\n")
    terminal.wait_for(r"thinking is off\r\n")
    terminal.type("One line\\\nand another\n")
    second = terminal.wait_for(STATS)
    assert "… " in second and "of reasoning" not in second
    assert re.search(r"\(\d+ known\)", second)  # the beginning is not read again
    terminal.type('"""first\nsecond\nthird"""\n')
    third = terminal.wait_for(STATS)
    assert third.count("… ") == 2
    terminal.type("/exit\n")
    assert terminal.leave() == 0
    history = (home / "lily/history").read_text()
    assert "Why is the sky blue?" in history and "/think off" in history
    assert (home / "lily/history").stat().st_mode & 0o777 == 0o600


def test_ctrl_c_interrupts_an_answer_and_a_second_one_leaves(terminal: Terminal) -> None:
    terminal.prompt()
    terminal.type("/set logit_bias {}\n")
    terminal.prompt()
    terminal.type("Tell me everything.\n")
    terminal.wait_for(r"everything\.\r\n.*\S")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.wait_for(r"\[interrupted\]")
    terminal.wait_for("cancelled")
    terminal.prompt()
    terminal.type("/set max_tokens 3\n")  # it goes on
    terminal.wait_for("max_tokens = 3")
    terminal.type("Again?\n")
    terminal.wait_for(STATS)
    terminal.prompt()
    terminal.type("half a line\x03")
    terminal.wait_for("Ctrl-C once more leaves")
    terminal.prompt()
    terminal.type("\x03")
    assert terminal.leave() == 0


def test_two_ctrl_c_in_a_row_leave(terminal: Terminal) -> None:
    terminal.prompt()
    terminal.type("Tell me everything.\n")
    terminal.wait_for(r"everything\.\r\n.*\S")
    terminal.type("\x03")
    terminal.wait_for(r"\[interrupted\]")
    terminal.prompt()
    terminal.type("\x03")
    assert terminal.leave() == 0


def test_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.prompt()
    terminal.type("\x04")
    assert terminal.leave() == 0


def test_what_is_wrong_is_said_and_the_talk_goes_on(terminal: Terminal) -> None:
    for line, answer in (
        ("/nothing", "lily: /nothing is no command"),
        ("/think maybe", "lily: /think is followed by 'maybe', allowed on, off"),
        ("/set temperature hot", "lily: temperature is a str"),
        ("/set warmth 1", "lily: warmth is no option"),
        ("/set top_p 7", "lily: top_p is 7, allowed 0 to 1"),
        ("/tools none.json", "lily: .*none.json"),
        ('/set logit_bias {"x": 1}', "lily: .*invalid literal"),
        ("/help", "Ctrl-C interrupts an answer"),
    ):
        terminal.prompt()
        terminal.type(line + "\n")
        terminal.wait_for(answer)


def test_control_characters_of_the_model_do_not_reach_the_terminal(home: Path) -> None:
    """The bias makes the model say ESC, BEL and letters."""
    with lily.Engine.load(CALM, device="cpu", max_context=64) as engine:
        of = {engine.tokenizer.token_bytes(token): token for token in range(2000)}
    bias = {str(of[text]): 100 for text in (b"\x1b", b"\x07", b"[", b"m", b"a")}
    opened = Terminal("chat", *MODEL, *ENDLESS, "--no-think", "--max-tokens", "60", home=home)
    try:
        opened.prompt()
        opened.type(f"/set logit_bias {json.dumps(bias)}\n")
        opened.wait_for(r"logit_bias = .*\n")
        opened.prompt()
        opened.type("?\n")
        shown = opened.wait_for("60 tokens")
    finally:
        opened.close()
    answer = shown.split("?\r\n", 1)[1].split("\r\n")[0]
    answer = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", answer)  # what readline sends
    assert set(answer) <= set("[ma") and len(answer) > 5


# ---- the talk's state ---------------------------------------------------------------------------


def test_commands_change_the_state(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([WEATHER]))
    with lily.Engine.load(CALM, device="cpu", max_context=64) as engine:
        state = Talk(engine, {})
        state.turns.append({"role": "user", "content": "?"})
        assert state.command("/system You are brief.") == "the system message is set"
        assert state.messages() == [{"role": "system", "content": "You are brief."}]
        assert state.command("/system") == "no system message" and state.messages() == []
        assert state.command(f"/tools {tools}") == "1 tools" and state.tools == [WEATHER]
        tools.write_text('[{"type": "magic"}]')
        with pytest.raises(ValueError, match=r"tools\[0\] is no function tool"):
            state.command(f"/tools {tools}")
        tools.write_text("[")
        with pytest.raises(ValueError, match=r"tools.json is not JSON"):
            state.command(f"/tools {tools}")
        assert state.tools == [WEATHER] and state.command("/tools") == "no tools"
        state.command('/set stop ["a", "b"]')
        assert state.options == {"stop": ["a", "b"]}
        assert "top_k = 20" in state.command("/set")
        state.command("/set stop default")
        assert state.options == {}


# ---- piped --------------------------------------------------------------------------------------


def test_a_piped_talk_is_one_message_and_plain() -> None:
    done = _lily("chat", *MODEL, *ENDLESS, "--no-think", "--max-tokens", "16", text="Why?\nHow?\n")
    with lily.Engine.load(CALM, device="cpu") as engine:
        options = {"seed": 1, "temperature": 1.0, "max_tokens": 16}
        want = engine.chat("Why?\nHow?\n", thinking=False, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, want.text + "\n", "")


def test_generate_with_a_schema_from_stdin(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [{"a": 1}]}')
    done = _lily("generate", *MODEL, "--schema", str(schema), "-", text="In JSON: ")
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"a": 1}\n', "")
    schema.write_text('{"not": {}}')
    done = _lily("generate", *MODEL, "--schema", str(schema), "x")
    assert done.returncode == 2 and "the schema cannot be served" in done.stderr


def test_report_72_unknown_and_wrong_options() -> None:
    for arguments, message in (
        (["chat", *MODEL, "--temprature", "1"], "--temprature"),
        (["chat", *MODEL, "--top-p", "2"], "top_p is 2.0, allowed 0 to 1"),
        (["generate", "--device", "cpu"], "text"),
        (["info", "./none"], "no such folder"),
        (["info", str(CALM), "--revision", "main"], "is a folder, not a hub id"),
    ):
        done = _lily(*arguments, text="")
        assert done.returncode in (1, 2) and done.stdout == ""
        assert message in done.stderr and done.stderr.count("\n") == 1


# ---- info ---------------------------------------------------------------------------------------


def test_info_says_what_and_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lily", "info", str(CALM)])
    with pytest.raises(SystemExit, match="0"):
        main()
    text = capsys.readouterr().out
    assert "4 layers: 3 DeltaNet, 1 attention" in text
    assert "16 experts of which 4 at a time, vocabulary 2048, context 8192" in text
    first = next(status.name for status in lily.devices() if status.available)
    with lily.Engine.load(CALM, device=first) as engine:  # whose numbers are shown
        memory = engine.core.memory()
    assert memory.context == 8192
    assert re.search(rf"loaded weights +{memory.weights / 1e6:.1f} MB", text)
    assert re.search(rf"reading prompts +{memory.prefill_scratch / 1e6:.1f} MB", text)
    for status in lily.devices():
        line = re.search(rf"^{status.name} +(yes|no) +(.*)$", text, re.MULTILINE)
        assert line and (line[1] == "yes") == status.available
        wanted = r"8192 tokens of context" if status.available else re.escape(status.description)
        assert re.match(wanted, line[2])


def test_interrupt_is_no_error_of_the_shell(home: Path) -> None:
    """Ctrl-C while the model is loaded or reads ends the command with 130."""
    opened = Terminal("generate", *MODEL, "word " * 3000, home=home)
    try:
        time.sleep(1.0)
        opened.child.send_signal(signal.SIGINT)
        assert opened.leave() in (130, -signal.SIGINT)
    finally:
        opened.close()
