"""Chats: what the template and the parser make of them, defaults, tools, reuse over turns, typing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily.sampling import checkpoint_defaults
from text_harness import CALL, CALM, END, WEATHER, bytewise, say

SYSTEM = {
    "role": "system",
    "content": "You answer at length, and you never mind being asked twice.",
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.Engine]:
    with lily.Engine.load(CALM, device="cpu", activations="float32") as loaded:
        yield loaded


def copy_of_calm(folder: Path, **changed: object) -> Path:
    """The tiny checkpoint, with other contents of some files (by stem); None: without it."""
    for file in CALM.iterdir():
        if file.stem not in changed:
            (folder / file.name).symlink_to(file)
        elif changed[file.stem] is not None:
            (folder / file.name).write_text(json.dumps(changed[file.stem]))
    return folder


# ---- what is read and drawn ---------------------------------------------------------------------


def test_a_chat_is_a_stream_over_the_rendered_prompt(engine: lily.Engine) -> None:
    messages = [SYSTEM, user("Why is the sky blue?")]
    done = engine.chat(messages, thinking=False, max_tokens=16, temperature=0)
    prompt = engine.template.render(messages, thinking=False)
    session = engine.session()
    session.sync(np.array(prompt.ids, np.uint32))
    assert done.tokens == tuple(session.step().id for _ in range(16))
    assert done.text == engine.tokenizer.decode(done.tokens).lstrip("\n") and not done.reasoning
    assert done.usage.prompt_tokens == len(prompt.ids)
    text = engine.chat("Why is the sky blue?", thinking=False, max_tokens=9, temperature=0)
    assert text == engine.chat(
        [user("Why is the sky blue?")], thinking=False, max_tokens=9, temperature=0
    )


def test_report_4_thinking_is_an_option(engine: lily.Engine) -> None:
    thought = engine.chat("2+2", max_tokens=12, seed=1)
    assert thought.reasoning and not thought.text and thought.usage.reasoning_tokens == 12
    plain = engine.chat("2+2", max_tokens=12, seed=1, thinking=False)
    assert plain.text and not plain.reasoning and plain.usage.reasoning_tokens == 0


def test_the_checkpoint_says_how_to_draw(engine: lily.Engine) -> None:
    assert (engine.defaults.temperature, engine.defaults.top_k) == (1.0, 20)
    assert engine.defaults == checkpoint_defaults(CALM)
    seeded = engine.chat("Why?", max_tokens=12, seed=1)
    assert seeded == engine.chat("Why?", params=engine.defaults, max_tokens=12, seed=1)
    assert seeded != engine.chat("Why?", params=lily.SamplingParams(), max_tokens=12, seed=1)
    assert engine.chat("Why?", max_tokens=24) != engine.chat("Why?", max_tokens=24)
    assert engine.chat("Why?", max_tokens=12, temperature=0) == engine.chat(
        "Why?", max_tokens=12, top_k=1, temperature=1.5
    )


def test_report_92_thinking_and_plain_have_their_own_defaults(
    engine: lily.Engine, tmp_path: Path
) -> None:
    """The family's advice is for thinking: plain chats are cooler, and nothing is penalised in
    either; advice of the checkpoint's own holds for both."""
    plain = engine.plain_defaults
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.8, 20)
    assert plain.presence_penalty == engine.defaults.presence_penalty == 0
    thought = engine.chat("Why?", max_tokens=12, seed=1)
    assert thought == engine.chat("Why?", params=engine.defaults, max_tokens=12, seed=1)
    for seed in range(3):
        short = engine.chat("Why?", thinking=False, max_tokens=12, seed=seed)
        same = dict(thinking=False, max_tokens=12, seed=seed)
        assert short == engine.chat("Why?", params=plain, **same)
        assert short == engine.chat(
            "Why?", params=engine.defaults, **same, temperature=0.7, top_p=0.8
        )
    advice = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.5}
    folder = copy_of_calm(tmp_path, generation_config=advice)
    with lily.Engine.load(folder, device="cpu", max_context=64) as other:
        assert other.plain_defaults == other.defaults == lily.SamplingParams(**advice)


def test_defaults_of_other_checkpoints(tmp_path: Path) -> None:
    advice = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05, "min_p": None}
    folder = copy_of_calm(tmp_path, generation_config=advice)
    with lily.Engine.load(folder, device="cpu", max_context=64) as engine:
        assert engine.defaults == lily.SamplingParams(repetition_penalty=1.05)
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(lily.CheckpointError, match=r"generation_config.json: top_p is 2, allowed"):
        lily.Engine.load(folder, device="cpu")
    (tmp_path / "generation_config.json").unlink()
    assert checkpoint_defaults(tmp_path) == lily.SamplingParams()


def test_a_checkpoint_without_a_template_still_generates(tmp_path: Path) -> None:
    folder = copy_of_calm(tmp_path, chat_template=None)
    with lily.Engine.load(folder, device="cpu", max_context=64) as engine:
        assert engine.generate("Once", max_tokens=2).tokens
        with pytest.raises(lily.CheckpointError, match="no chat template"):
            engine.chat("Once")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"messages": []}, ValueError, "messages is empty"),
        ({"messages": [SYSTEM]}, ValueError, "no user message"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            ValueError,
            r"messages\[0\].role is 'robot'",
        ),
        ({"messages": "?", "tools": [{}]}, ValueError, r"tools\[0\]"),
        ({"messages": "?", "thinking": 1}, TypeError, "thinking is a int"),
        ({"messages": "?", "temprature": 1}, TypeError, "temprature"),
        ({"messages": "?", "stop": 5}, TypeError, "stop is a int, a string or several are needed"),
        (
            {"messages": "word " * 9000},
            ValueError,
            r"prompt is too long: \d+ tokens > 8191 maximum",
        ),
        (
            {"messages": "?", "tools": [WEATHER], "response_format": {"type": "json_object"}},
            ValueError,
            "response_format and tools exclude each other",
        ),
    ],
)
def test_what_is_wrong_is_named_at_the_call(
    engine: lily.Engine, call: dict[str, Any], error: type[Exception], message: str
) -> None:
    for method in (engine.chat, engine.stream_chat):
        with pytest.raises(error, match=message):
            method(**call)


def test_a_session_takes_no_options_of_answers(engine: lily.Engine) -> None:
    for options in ({"stop": "a"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(ValueError, match="stop and response_format belong to answers"):
            engine.session(**options)
    assert engine.session(max_tokens=3, response_format={"type": "text"}).position == 0


# ---- tools --------------------------------------------------------------------------------------


def test_a_tool_loop(engine: lily.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [user("The weather in Oslo?")]
    said = f"I should look.\n</think>\n\nLooking.\n\n{CALL}\n{CALL.replace('Oslo', 'Rome')}"
    say(monkeypatch, engine, [*bytewise(engine, said), END])
    done = engine.chat(messages, tools=[WEATHER])
    assert (done.reasoning, done.text) == ("I should look.", "Looking.")
    assert done.finish_reason == "tool_calls"
    assert [call.arguments["place"] for call in done.tool_calls] == ["Oslo", "Rome"]
    assert done.tool_calls[0].id != done.tool_calls[1].id
    # The answer goes back as a message, and the prompt goes on as the model wrote it.
    history = {
        "role": "assistant",
        "content": done.text,
        "reasoning_content": done.reasoning,
        "tool_calls": [call.as_message_part() for call in done.tool_calls],
    }
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in done.tool_calls
    ]
    first = engine.template.render(messages, [WEATHER])
    second = engine.template.render([*messages, history, *results], [WEATHER])
    assert second.text.startswith(first.text + said)


def test_without_tools_calls_are_text(engine: lily.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, engine, [*bytewise(engine, CALL), END])
    done = engine.chat("?", thinking=False)
    assert (done.text, done.tool_calls, done.finish_reason) == (CALL, (), "stop")


# ---- turns --------------------------------------------------------------------------------------


def test_report_43_44_the_next_turn_reuses_the_last(engine: lily.Engine) -> None:
    messages = [SYSTEM, user("Tell me of the sea. " * 20)]
    engine.generate([7] * 40, max_tokens=1)  # so that the pool holds something else, too
    first = engine.chat(messages, max_tokens=8, temperature=0)
    same = engine.chat(messages, max_tokens=8, temperature=0)
    assert first.usage.cached_tokens == 0 and first == same
    assert 0 < first.usage.prompt_tokens - same.usage.cached_tokens < 12  # the last turn's head
    turn = [*messages, {"role": "assistant", "content": "The sea."}, user("And then?")]
    second = engine.chat(turn, max_tokens=8, temperature=0)
    assert second.usage.cached_tokens == same.usage.cached_tokens
    with lily.Engine.load(CALM, device="cpu", activations="float32") as fresh:
        assert fresh.chat(turn, max_tokens=8, temperature=0) == second


def test_another_question_reuses_the_system_part(engine: lily.Engine) -> None:
    system = {"role": "system", "content": "Mind the gap. " * 30}
    engine.chat([system, user("One?")], max_tokens=2)
    done = engine.chat([system, user("Two, and more of it?")], max_tokens=2)
    assert done.usage.cached_tokens > 100


def test_a_plain_talk_goes_on_where_it_was(engine: lily.Engine) -> None:
    """Without thinking the answer stays in the prompt as it was drawn, if it encodes to the same."""
    messages = [user("Say it. " * 12)]
    first = engine.chat(messages, thinking=False, max_tokens=8, temperature=0)
    again = [*messages, {"role": "assistant", "content": first.text}, user("More?")]
    second = engine.chat(again, thinking=False, max_tokens=4, temperature=0)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 12


# ---- typing -------------------------------------------------------------------------------------

USER = """
import asyncio
from collections.abc import Callable

import numpy as np

import lily


def use(engine: lily.Engine, report: Callable[[int, int], None]) -> str:
    params = lily.SamplingParams(temperature=0.7, top_p=0.9, stop=["."], logit_bias={5: 1.0})
    done: lily.Completion = engine.generate("Once", params, max_tokens=4)
    call: lily.ToolCall | None = next(iter(done.tool_calls), None)
    usage: lily.Usage = done.usage
    timings: lily.Timings = done.timings
    stream: lily.Stream = engine.stream([1, 2, 3], progress=report)
    for token in stream:
        piece: lily.Token = token
        if piece.kind == "reasoning" and piece.logprob is not None:
            stream.close()
    messages = [{"role": "user", "content": "?"}]
    chat = engine.chat(messages, tools=[], thinking=False, params=params, seed=1)
    for token in engine.stream_chat("?", preserve_thinking=True):
        print(token.text, token.top_logprobs)
    session: lily.Session = engine.session(params)
    reused: int = session.sync(np.array(engine.tokenizer.encode("a"), np.uint32))
    drawn: lily.SampledToken = session.step()
    statuses: list[lily.DeviceStatus] = lily.devices()
    return f"{chat}{call}{usage.total_tokens}{timings}{reused}{drawn.id}{statuses}"


async def later(engine: lily.Engine) -> lily.Completion:
    async for token in engine.astream("Once", max_tokens=3):
        print(token.text)
    async for token in engine.astream_chat("Once"):
        print(token.kind)
    return await engine.achat("?", temperature=0.5)


def main() -> None:
    try:
        with lily.Engine.load("folder", device="cpu", max_context=10, revision=None) as engine:
            print(use(engine, print), asyncio.run(later(engine)), engine.defaults.top_k)
    except (lily.CheckpointError, lily.DeviceError, lily.TemplateError, lily.LilyError) as error:
        print(error, lily.__version__)
"""


def test_a_users_script_is_typed(tmp_path: Path) -> None:
    for name in lily.__all__:
        assert f"lily.{name}" in USER, f"the script does not use {name}"
    (tmp_path / "use.py").write_text(USER)
    wrong = USER.replace("max_tokens=4", "max_token=4").replace("seed=1", 'seed="1"')
    (tmp_path / "misuse.py").write_text(wrong)
    environment = {**os.environ, "MYPYPATH": str(Path(__file__).resolve().parents[1] / "python")}
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
    for script, code in (("use.py", 0), ("misuse.py", 1)):
        done = subprocess.run(
            [*command, "--cache-dir", str(tmp_path / "cache"), script],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("error:") == 2 and "max_token" in done.stdout
