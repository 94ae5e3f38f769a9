"""Streams: characters, kinds, stop strings, leaving early, reuse of sessions, threads, asyncio."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily
from lily import _core
from lily.pool import KEPT, Timeline
from text_harness import CALL, CALM, END, WEATHER, bytewise, say

PROMPT = "The quick brown fox"
LONG = (np.arange(8000) * 7919 % 2000).astype(np.uint32)  # seconds of prefill in exact mode


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.Engine]:
    with lily.Engine.load(CALM, device="cpu") as loaded:
        yield loaded


@pytest.fixture
def cold() -> Iterator[lily.Engine]:
    """An engine whose pool is empty."""
    with lily.Engine.load(CALM, device="cpu", activations="float32") as loaded:
        yield loaded


def joined(tokens: list[lily.Token], kind: str = "content") -> str:
    return "".join(token.text for token in tokens if token.kind == kind)


# ---- text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_are_the_answer(engine: lily.Engine, seed: int) -> None:
    """At this temperature many bytes are no characters."""
    hot = {"temperature": 3.0, "seed": seed, "max_tokens": 60}
    tokens = list(engine.stream(PROMPT, **hot))
    done = engine.generate(PROMPT, **hot)
    assert joined(tokens) == done.text == engine.tokenizer.decode(done.tokens)
    assert [t.id for t in tokens if t.finish_reason != "stop"] == list(done.tokens)

    tokens = list(engine.stream_chat("Why?", thinking=seed % 2 == 0, tools=[WEATHER], **hot))
    done = engine.chat("Why?", thinking=seed % 2 == 0, tools=[WEATHER], **hot)
    assert (joined(tokens), joined(tokens, "reasoning")) == (done.text, done.reasoning)
    assert [t.finish_reason for t in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert tokens[-1].finish_reason == done.finish_reason


MIXED = "25 °C² 😀 👩‍👩‍👧 ď"


def test_report_37_no_field_splits_a_character(
    engine: lily.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"{MIXED}</think>\n\n{MIXED}"
    say(monkeypatch, engine, [*bytewise(engine, said), END])
    tokens = list(engine.stream_chat("?"))
    assert joined(tokens) == joined(tokens, "reasoning") == MIXED
    assert not any("\ufffd" in token.text for token in tokens)
    assert sum(token.id is not None for token in tokens) == len(bytewise(engine, said)) + 1


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    reasoning=st.text(max_size=12),
    content=st.text(max_size=12),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    data=st.data(),
)
def test_any_answer_cut_anywhere(
    engine: lily.Engine, reasoning: str, content: str, stop: list[str], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ids = [*bytewise(engine, f"{reasoning}</think>{content}"), END]
        ids = ids[: data.draw(st.integers(1, len(ids)))]
        say(patch, engine, ids)
        options = {"stop": stop, "max_tokens": len(ids)}
        tokens = list(engine.stream_chat("?", tools=[WEATHER], **options))
        say(patch, engine, ids)
        done = engine.chat("?", tools=[WEATHER], **options)
    assert (joined(tokens), joined(tokens, "reasoning")) == (done.text, done.reasoning)
    assert not any(s in done.text for s in stop)
    assert (done.stop_string in stop) if done.stop_string else True
    assert done.finish_reason in ("stop", "length")
    assert all(token.text or token.id is not None for token in tokens)


def test_report_35_stop_strings_across_tokens(
    engine: lily.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = say(monkeypatch, engine, [*bytewise(engine, "42</ans no</answer> and more"), END])
    stream = engine.stream(PROMPT, stop=["</answer>", "###"])
    tokens = list(stream)
    assert joined(tokens) == "42</ans no"
    assert (tokens[-1].finish_reason, tokens[-1].stop_string) == ("stop", "</answer>")
    assert script.steps == len("42</ans no</answer>")  # nothing is drawn after it
    assert stream.completion.stop_string == "</answer>"
    # What may begin one comes when it is clear that it does not.
    assert [t.text for t in tokens[:8]] == ["4", "2", "", "", "", "", "", "</ans "]


def test_stop_strings_are_for_content(engine: lily.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"I say STOP</think>Hm. {CALL.replace('Oslo', 'STOP')}\nSTOP!"
    say(monkeypatch, engine, [*bytewise(engine, said), END])
    done = engine.chat("?", tools=[WEATHER], stop="STOP")
    assert (done.reasoning, done.text, done.finish_reason) == ("I say STOP", "Hm.\n", "tool_calls")
    assert done.tool_calls[0].arguments == {"place": "STOP", "days": 3}
    assert done.stop_string == "STOP"


def test_report_5_truncated_thinking_stays_reasoning(
    engine: lily.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, engine, bytewise(engine, "Let me see </thi"))
    done = engine.chat("?", max_tokens=16)
    assert (done.text, done.reasoning, done.finish_reason) == ("", "Let me see </thi", "length")
    assert done.usage.reasoning_tokens == 16


@pytest.mark.parametrize("cut", [20, 60, len(CALL) - 40])
def test_report_22_a_truncated_call_has_no_values(
    engine: lily.Engine, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    ids = bytewise(engine, f"Well.\n{CALL}")
    say(monkeypatch, engine, ids)
    done = engine.chat("?", tools=[WEATHER], thinking=False, max_tokens=cut)
    assert (done.text, done.tool_calls, done.finish_reason) == ("Well.", (), "length")


def test_a_call_comes_whole(engine: lily.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, engine, [*bytewise(engine, f"On it.\n\n{CALL}"), END])
    tokens = list(engine.stream_chat("?", tools=[WEATHER], thinking=False))
    calls = [token.tool_call for token in tokens if token.tool_call]
    assert [(c.name, c.arguments) for c in calls] == [("weather", {"place": "Oslo", "days": 3})]
    assert joined(tokens) == "On it." and tokens[-1].finish_reason == "tool_calls"
    assert joined(tokens, "tool") == calls[0].arguments_json


# ---- log-probabilities, usage, timings ----------------------------------------------------------


def test_report_96_logprobs_and_usage_come_with_a_stream(engine: lily.Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=6, logprobs=True, top_logprobs=5, temperature=0.7)
    tokens = list(stream)
    session = engine.session()
    ids = list(engine.tokenizer.encode(PROMPT))
    for token in tokens:
        session.sync(np.array(ids, np.uint32))
        logits = session.logits().astype(np.float64)
        want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert token.id is not None and token.logprob == pytest.approx(want[token.id], abs=1e-3)
        assert [i for i, _ in token.top_logprobs] == np.argsort(-want, kind="stable")[:5].tolist()
        ids.append(token.id)
    done = stream.completion
    assert done.logprobs == tuple(token.logprob for token in tokens)
    assert done.top_logprobs == tuple(token.top_logprobs for token in tokens)
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids) - 6, 6)
    assert usage.total_tokens == len(ids)
    assert done.timings.prompt_seconds > 0 and done.timings.answer_per_second > 0
    bare = engine.generate(PROMPT, max_tokens=2)
    assert bare.logprobs == bare.top_logprobs == ()


def test_report_30_logprobs_with_tools_and_a_stream(engine: lily.Engine) -> None:
    options = {"tools": [WEATHER], "thinking": False, "max_tokens": 6, "seed": 1}
    stream = engine.stream_chat("?", logprobs=True, top_logprobs=2, **options)
    drawn = [token for token in stream if token.id is not None]
    assert all(token.logprob is not None and len(token.top_logprobs) == 2 for token in drawn)
    assert stream.completion == engine.chat("?", logprobs=True, top_logprobs=2, **options)


# ---- sampling edges (report 95) -----------------------------------------------------------------


def test_report_95_edges_of_the_options(engine: lily.Engine) -> None:
    greedy = engine.generate(PROMPT, max_tokens=12).tokens

    def draw(**options: object) -> tuple[int, ...]:
        options = {"temperature": 1.5, "seed": 4, "max_tokens": 12, **options}
        return engine.generate(PROMPT, **options).tokens  # type: ignore[arg-type]

    free = draw()
    assert free != greedy
    assert draw(temperature=0, top_p=0) == draw(top_p=0) == draw(top_k=1) == greedy
    assert draw(min_p=1) == greedy
    assert draw(top_k=0) == draw(top_k=-1) == draw(top_k=2048) == draw(top_k=248_320) == free
    hot = [draw(temperature=100, seed=seed) for seed in range(8)]
    assert max(max(tokens) for tokens in hot) < engine.tokenizer.size
    padding = dict.fromkeys(range(engine.tokenizer.size, 2048), 100.0)
    assert max(draw(logit_bias=padding)) < engine.tokenizer.size
    for name in ("presence_penalty", "frequency_penalty"):
        assert len(draw(**{name: 2.0})) == 12
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
        for value in (float("nan"), float("inf"), -float("inf")):
            with pytest.raises(ValueError, match=f"{name} is"):
                draw(**{name: value})
    with pytest.raises(ValueError, match="logit bias for token 2048, the vocabulary has 2048"):
        engine.stream(PROMPT, logit_bias={2048: 1.0})


def test_report_89_90_seeds_of_chats(engine: lily.Engine) -> None:
    def draw(seed: int | None) -> tuple[int, ...]:
        return engine.chat("Why?", max_tokens=16, seed=seed).tokens

    assert draw(1) == draw(1)
    assert len({draw(1), draw(2), draw(None), draw(None)}) == 4


def test_report_93_what_penalties_count(engine: lily.Engine) -> None:
    """Presence and frequency: generated tokens only; repetition: the prompt, too."""
    few = dict.fromkeys(range(100, 104), 100.0)
    prompt = [100, 101, 102, 103] * 12
    free = engine.generate(prompt, logit_bias=few, max_tokens=1).tokens
    for name in ("presence_penalty", "frequency_penalty"):
        options = {name: 2.0, "logit_bias": few, "max_tokens": 1}
        assert engine.generate(prompt, **options).tokens == free, name
    plain = engine.generate(prompt, max_tokens=1, temperature=0)
    session = engine.session()
    session.sync(np.array(prompt, np.uint32))
    logits = session.logits()
    seen = np.unique(prompt)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 50, logits[seen] * 50)
    assert plain.tokens == (int(np.argmax(session.logits())),)
    assert engine.generate(prompt, max_tokens=1, repetition_penalty=50).tokens == (
        int(np.argmax(logits)),
    )


def test_report_57_an_overflow_is_said_as_agents_know_it(engine: lily.Engine) -> None:
    with pytest.raises(ValueError, match=r"^prompt is too long: 9000 tokens > 8191 maximum$"):
        engine.generate([5] * 9000)


def test_report_53_54_55_limits_of_an_answer(engine: lily.Engine) -> None:
    assert len(engine.generate(PROMPT, max_tokens=1).tokens) == 1
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"max_tokens is {bad}, allowed 1 to"):
            engine.chat("?", max_tokens=bad)
    with pytest.raises(ValueError, match="messages is empty"):
        engine.chat([])
    assert engine.chat("", max_tokens=1).tokens  # an empty question is one


# ---- leaving early ------------------------------------------------------------------------------


def idle(engine: lily.Engine) -> int:
    return len(engine._pool._idle)


def test_leaving_the_loop_frees_the_session(cold: lily.Engine) -> None:
    for token in cold.stream(PROMPT):
        assert token.finish_reason is None
        assert idle(cold) == 0
        break
    assert idle(cold) == 1  # without a collection
    stream = cold.stream(PROMPT)
    next(stream)
    assert idle(cold) == 1
    stream.close()
    assert idle(cold) == 2 and stream.completion.finish_reason == "cancelled"
    assert list(stream) == []
    gc.collect()
    assert cold.generate(PROMPT, max_tokens=8) == cold.generate(PROMPT, max_tokens=8)


def test_a_stream_that_was_never_read_costs_nothing(cold: lily.Engine) -> None:
    del cold._pool._idle[:]
    cold.stream(PROMPT)
    cold.stream(PROMPT).close()
    assert idle(cold) == 0


def test_report_79_cancel_from_another_thread(cold: lily.Engine) -> None:
    stream = cold.stream(LONG)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            list(stream)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    stream.cancel()
    thread.join()
    assert time.monotonic() - start < 1.0 and isinstance(errors[0], _core.Cancelled)
    assert idle(cold) == 1
    with lily.Engine.load(CALM, device="cpu", activations="float32") as other:
        assert cold.generate(LONG[:600], max_tokens=8) == other.generate(LONG[:600], max_tokens=8)


INTERRUPTED = """
import os, signal, sys, threading
import lily
engine = lily.Engine.load(sys.argv[1], device="cpu", activations="float32")
signal.signal(signal.SIGINT, signal.default_int_handler)
before = engine.generate("Once upon", max_tokens=8)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    for token in engine.stream("The quick brown fox", logit_bias={2000: -100, 2002: -100}):
        pass
    sys.exit("it came to its end")
except KeyboardInterrupt:
    pass
assert engine.generate("Once upon", max_tokens=8) == before
print("went on")
"""


def test_ctrl_c_in_an_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, CALM], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("went on\n", "")


# ---- reuse --------------------------------------------------------------------------------------


def test_report_41_the_same_prompt_twice(cold: lily.Engine) -> None:
    first = cold.generate(LONG[:700], max_tokens=8)
    second = cold.generate(LONG[:700], max_tokens=8)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 699)
    assert first == second


def test_what_is_reused_is_what_would_have_been_computed(engine: lily.Engine) -> None:
    """In bf16, too: prompts are read in the same pieces, whatever was there."""
    prompt = LONG[:1300]
    with lily.Engine.load(CALM, device="cpu") as fresh:
        want = fresh.generate(prompt, max_tokens=12, logprobs=True)
    engine.generate(prompt, max_tokens=3)
    engine.generate(np.append(prompt[:1299], 7), max_tokens=3)  # another end
    done = engine.generate(prompt, max_tokens=12, logprobs=True)
    assert done.usage.cached_tokens == 1299
    assert done == want


def test_report_42_an_edited_prompt(cold: lily.Engine) -> None:
    cold.generate(LONG[:700], max_tokens=4)
    edited = LONG[:700].copy()
    edited[300] ^= 1
    done = cold.generate(edited, max_tokens=8)
    assert done.usage.cached_tokens == 0
    with lily.Engine.load(CALM, device="cpu", activations="float32") as other:
        assert other.generate(edited, max_tokens=8) == done


def test_the_pool_keeps_few_and_the_best_fits(cold: lily.Engine) -> None:
    prompts = [LONG[i : i + 60] for i in range(0, 300, 60)]
    for prompt in prompts:
        cold.generate(prompt, max_tokens=2)
        assert idle(cold) <= KEPT
    cached = [cold.generate(p, max_tokens=2).usage.cached_tokens for p in reversed(prompts)]
    assert cached[:KEPT] == [59] * KEPT and cached[-1] == 0


def test_idle_sessions_make_room(cold: lily.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 1000):
        cold.generate(LONG[start : start + 700], max_tokens=2)
    assert idle(cold) == 2
    cold._pool._capacity = 4096  # tokens: what may come and what is kept
    cold.generate(LONG[2000:2600], max_tokens=2400)
    assert idle(cold) == 2  # one of the old ones went
    cold.generate([5, 6], max_tokens=8000)
    assert idle(cold) == 1
    # When the memory is used up all the same, idle sessions go and the prompt is read once more.
    prefill, tries = Timeline.prefill, []

    def full_at_first(self: Timeline, *args: Any) -> int:
        tries.append(self)
        if len(tries) == 1:
            raise lily.LilyError("KV cache: all 9 blocks are in use")
        return prefill(self, *args)

    monkeypatch.setattr(Timeline, "prefill", full_at_first)
    cold._pool._capacity = 2**30
    assert len(cold.generate(LONG[:700], max_tokens=4).tokens) == 4
    assert len(tries) == 2 and tries[0] is not tries[1] and idle(cold) == 1

    def always_full(self: Timeline, *args: Any) -> int:
        raise lily.LilyError("KV cache: all 9 blocks are in use")

    monkeypatch.setattr(Timeline, "prefill", always_full)
    with pytest.raises(lily.LilyError, match="KV cache: all 9 blocks are in use"):
        cold.generate(LONG[:700], max_tokens=4)


def test_a_closed_engine_keeps_no_session(cold: lily.Engine) -> None:
    stream = cold.stream(PROMPT)
    next(stream)
    cold.close()
    with pytest.raises(lily.LilyError, match="the engine is closed"):
        next(stream)
    assert idle(cold) == 0


def test_the_prompts_progress(cold: lily.Engine) -> None:
    seen: list[tuple[int, int]] = []
    list(cold.stream(LONG[:1500], max_tokens=2, progress=lambda *at: seen.append(at)))
    assert [at for at, _ in seen] == [512, 1024, 1499, 1500]
    assert {total for _, total in seen} == {1500}


def test_report_48_and_81_streams_side_by_side(cold: lily.Engine) -> None:
    prompts = [PROMPT, "Once upon a time", "int main("]
    alone = [cold.generate(prompt, max_tokens=20).text for prompt in prompts]
    streams = [cold.stream(prompt, max_tokens=20) for prompt in prompts]
    texts = ["", "", ""]
    for _ in range(20):  # turn by turn in one thread
        for i, stream in enumerate(streams):
            texts[i] += next(stream).text
    assert texts == alone
    with ThreadPoolExecutor(3) as threads:
        again = threads.map(lambda prompt: cold.generate(prompt, max_tokens=20).text, prompts)
        assert list(again) == alone


# ---- asyncio ------------------------------------------------------------------------------------


def test_asyncio_gives_the_same(cold: lily.Engine) -> None:
    async def run() -> tuple[str, lily.Completion, lily.Completion, str]:
        text = "".join([t.text async for t in cold.astream(PROMPT, max_tokens=12)])
        both = await asyncio.gather(
            cold.achat("Why?", max_tokens=6, seed=1), cold.achat("How?", max_tokens=6, seed=2)
        )
        chat = [t async for t in cold.astream_chat("Why?", max_tokens=6, seed=1)]
        return text, both[0], both[1], joined(chat, "reasoning")

    text, why, how, streamed = asyncio.run(run())
    assert text == cold.generate(PROMPT, max_tokens=12).text
    assert why == cold.chat("Why?", max_tokens=6, seed=1)
    assert how == cold.chat("How?", max_tokens=6, seed=2)
    assert streamed == why.reasoning


def test_a_cancelled_task_ends_the_work(cold: lily.Engine) -> None:
    async def run() -> float:
        for work in (
            cold.achat([{"role": "user", "content": "word " * 3000}]),
            anext(cold.astream(LONG)),
        ):
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0.4)
            assert not task.done()
            start = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return time.monotonic() - start

    assert asyncio.run(run()) < 1.0
    assert idle(cold) >= 1
    assert len(cold.generate(PROMPT, max_tokens=4).tokens) == 4


def test_leaving_an_async_stream(cold: lily.Engine) -> None:
    async def run() -> None:
        stream = cold.astream(PROMPT)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(run())
    assert idle(cold) == 1
