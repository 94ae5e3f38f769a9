"""The public Python API and the command line, on the checkpoint in tests/data."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily import _core
from lily.sampling import Sampling

CALM = Path(__file__).resolve().parent / "data/mlx4_calm"
PROMPT = "The quick brown fox"
END = 2002  # <|im_end|>
LONG = (np.arange(8000) * 7919 % 2000).astype(np.uint32)  # seconds of prefill


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.Engine]:
    with lily.Engine.load(CALM, device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def exact() -> Iterator[lily.Engine]:
    with lily.Engine.load(CALM, device="cpu", activations="float32") as loaded:
        yield loaded


# ---- generate ----------------------------------------------------------------------------------


def test_generate_is_the_loop_over_a_session(engine: lily.Engine) -> None:
    ids = np.array(engine.tokenizer.encode(PROMPT), np.uint32)
    session = engine.session()
    assert session.sync(ids) == 0
    tokens = tuple(session.step().id for _ in range(24))
    done = engine.generate(PROMPT, max_tokens=24)
    assert done.tokens == tokens and done.finish_reason == "length"
    assert done.text == str(done) == engine.tokenizer.decode(list(tokens))
    assert engine.generate(ids, max_tokens=24) == done
    assert engine.generate(ids.tolist(), max_tokens=24) == done


def test_stream_is_generate_in_pieces(engine: lily.Engine) -> None:
    done = engine.generate(PROMPT, max_tokens=24)
    tokens = list(engine.stream(PROMPT, max_tokens=24))
    assert "".join(t.text for t in tokens) == done.text
    assert tuple(t.id for t in tokens) == done.tokens
    assert [t.finish_reason for t in tokens] == [None] * 23 + ["length"]


def test_a_stream_may_be_left(engine: lily.Engine) -> None:
    for token in engine.stream(PROMPT):
        assert token.finish_reason is None
        break
    assert len(engine.generate(PROMPT, max_tokens=3).tokens) == 3


def test_seeds(engine: lily.Engine) -> None:
    def draw(seed: int | None) -> tuple[int, ...]:
        return engine.generate(PROMPT, max_tokens=16, temperature=1.5, seed=seed).tokens

    assert draw(1) == draw(1)
    assert len({draw(1), draw(2), draw(2**64 - 1), draw(None), draw(None)}) == 5


def test_options_as_params_and_as_keywords(engine: lily.Engine) -> None:
    params = lily.SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    kept = engine.generate(PROMPT, max_tokens=12, temperature=0.9, seed=3)
    assert engine.generate(PROMPT, params) == kept
    assert engine.generate(PROMPT, params, seed=4) != kept
    session = engine.session(params)
    session.sync(np.array(engine.tokenizer.encode(PROMPT), np.uint32))
    assert tuple(session.step().id for _ in range(12)) == kept.tokens
    assert engine.generate(PROMPT, params, top_k=1) == engine.generate(PROMPT, max_tokens=12)


def test_an_end_token_ends_and_is_not_text(engine: lily.Engine) -> None:
    free = engine.generate(PROMPT, max_tokens=8)
    done = engine.generate(PROMPT, max_tokens=8, logit_bias={END: 100.0})
    assert (done.text, done.tokens, done.finish_reason) == ("", (), "stop")
    assert [t.id for t in engine.stream(PROMPT, logit_bias={END: 100.0})] == [END]
    barred = engine.generate(PROMPT, max_tokens=8, logit_bias={free.tokens[0]: -100.0})
    assert barred.tokens[0] != free.tokens[0]


def test_penalties_reach_the_sampler(engine: lily.Engine) -> None:
    few = dict.fromkeys(range(100, 108), 100.0)  # so that tokens come again
    free = engine.generate(PROMPT, max_tokens=32, logit_bias=few)
    assert set(free.tokens) <= set(few)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        options: Any = {name: 2.0}
        done = engine.generate(PROMPT, max_tokens=32, logit_bias=few, **options)
        assert done.tokens != free.tokens, name


def test_the_context_is_a_limit() -> None:
    with lily.Engine.load(CALM, device="cpu", max_context=20) as engine:
        assert engine.max_context == 20
        done = engine.generate(range(5, 17))
        assert done.finish_reason == "length" and len(done.tokens) == 8
        assert engine.generate(range(5, 24)).tokens  # 19: one place is left
        with pytest.raises(ValueError, match="prompt is too long: 20 tokens > 19 maximum"):
            engine.generate(range(5, 25))


# ---- errors ------------------------------------------------------------------------------------

NAN = float("nan")
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_tokens": 0}, ValueError, "max_tokens is 0, allowed 1 to 2147483647"),
    ({"max_tokens": 1.0}, TypeError, "max_tokens is a float"),
    ({"max_tokens": True}, TypeError, "max_tokens is a bool"),
    ({"temperature": -0.1}, ValueError, "temperature is -0.1, allowed 0 to 100"),
    ({"temperature": NAN}, ValueError, "temperature is nan, allowed 0 to 100"),
    ({"temperature": float("inf")}, ValueError, "temperature is inf"),
    ({"temperature": "hot"}, TypeError, "temperature is a str"),
    ({"top_p": -0.1}, ValueError, "top_p is -0.1, allowed 0 to 1"),
    ({"top_p": 1.01}, ValueError, "top_p is 1.01"),
    ({"top_p": NAN}, ValueError, "top_p is nan"),
    ({"top_k": -2}, ValueError, "top_k is -2, allowed -1 to 2147483647"),
    ({"top_k": 2.5}, TypeError, "top_k is a float"),
    ({"min_p": 1.5}, ValueError, "min_p is 1.5, allowed 0 to 1"),
    ({"presence_penalty": 2.1}, ValueError, "presence_penalty is 2.1, allowed -2 to 2"),
    ({"frequency_penalty": NAN}, ValueError, "frequency_penalty is nan"),
    ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0, allowed above 0"),
    ({"seed": -1}, ValueError, "seed is -1, allowed 0 to 18446744073709551615"),
    ({"seed": 2**64}, ValueError, "seed is 18446744073709551616"),
    ({"logit_bias": {5: 101}}, ValueError, "logit_bias of token 5 is 101, allowed -100 to 100"),
    ({"logit_bias": {-5: 1}}, ValueError, "logit_bias: a token is -5"),
    ({"logit_bias": [5]}, TypeError, "logit_bias is a list"),
    ({"temprature": 1.0}, TypeError, "temprature"),
    ({"stop": [""]}, ValueError, "stop[0] has 0 characters"),
    ({"stop": [3]}, TypeError, "stop[0] is a int"),
    ({"stop": ["x"] * 17}, ValueError, "stop has 17 strings, allowed are 16"),
    ({"logprobs": 1}, TypeError, "logprobs is a int"),
    ({"logprobs": True, "top_logprobs": 21}, ValueError, "top_logprobs is 21, allowed 0 to 20"),
    ({"top_logprobs": 2}, ValueError, "top_logprobs is 2, which needs logprobs=True"),
    ({"response_format": "json"}, TypeError, "response_format is a str"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options(
    engine: lily.Engine, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    calls: list[Callable[..., object]] = [
        lily.SamplingParams,
        engine.session,
        lambda **o: engine.generate(PROMPT, **o),
        lambda **o: engine.stream(PROMPT, **o),  # at the call, not at the first token
    ]
    for call in calls:
        with pytest.raises(error, match=re.escape(message)):
            call(**options)


def test_a_bias_outside_the_vocabulary(engine: lily.Engine) -> None:
    with pytest.raises(ValueError, match="token 2048, the vocabulary has 2048"):
        engine.generate(PROMPT, logit_bias={2048: 1.0})


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", ValueError, "prompt has 0 tokens"),
        ([], ValueError, "prompt has 0 tokens"),
        ([5, 2048], ValueError, "prompt[1] is 2048, allowed 0 to 2047"),
        ([5, -1], ValueError, "prompt[1] is -1, allowed 0 to 2047"),
        ([5, 6.0], TypeError, "prompt[1] is a float"),
        (b"text", TypeError, "prompt is a bytes, text or token ids are needed"),
        (None, TypeError, "prompt is a NoneType, text or token ids are needed"),
        ({5: 6}, TypeError, "prompt is a dict, text or token ids are needed"),
        (["text"], TypeError, "prompt[0] is a str"),
        (range(5, 9), None, ""),
        ([5] * 8192, ValueError, "prompt is too long: 8192 tokens > 8191 maximum"),
    ],
)
def test_prompts(
    engine: lily.Engine, prompt: Any, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert engine.generate(prompt, max_tokens=2).tokens
        return
    with pytest.raises(error, match=re.escape(message)):
        engine.generate(prompt, max_tokens=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, ValueError, "device is 'gpu', allowed ['auto', 'metal', 'cuda', "),
        ({"activations": "float16"}, ValueError, "'float16', allowed ['bfloat16', 'float32']"),
        ({"max_context": 0}, ValueError, "max_context is 0, allowed 1 to 8192"),
        ({"max_context": 8193}, ValueError, "max_context is 8193, allowed 1 to 8192"),
        ({"max_context": 10.0}, TypeError, "max_context is a float"),
        ({"device": "metal"}, lily.LilyError, "device metal does not exist here: "),
        ({"devise": "cpu"}, TypeError, "devise"),
    ],
)
def test_bad_load_options(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        lily.Engine.load(CALM, **options)


def test_auto_is_the_first_that_exists_and_never_sim() -> None:
    there = [s.name for s in lily.devices() if s.available]
    with lily.Engine.load(CALM, max_context=64) as engine:
        assert engine.device == next(d for d in ("metal", "cuda", "cpu") if d in there)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(lily.CheckpointError, match="no such folder"):
        lily.Engine.load(tmp_path / "none")
    for file in CALM.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    tokenizer = tmp_path / "tokenizer.json"
    with pytest.raises(lily.CheckpointError, match="the tokenizer is missing"):
        lily.Engine.load(tmp_path, device="cpu")
    tokenizer.write_text("{}")
    with pytest.raises(lily.CheckpointError, match="not a tokenizer"):
        lily.Engine.load(tmp_path, device="cpu")
    text = (CALM / "tokenizer.json").read_text()
    tokenizer.write_text(re.sub(r'"decoder":\s*\{[^}]*\}', '"decoder": {"type": "Fuse"}', text))
    with pytest.raises(lily.CheckpointError, match="the decoder is Fuse, supported is ByteLevel"):
        lily.Engine.load(tmp_path, device="cpu")


# ---- lifetime ----------------------------------------------------------------------------------


def test_close() -> None:
    with lily.Engine.load(CALM, device="cpu", max_context=64) as engine:
        assert repr(engine) == "<lily.Engine of 4 layers on cpu, 64 tokens of context>"
        session = engine.session()
        session.sync(np.array([5, 6, 7], np.uint32))
        session.step()
        stream = engine.stream(PROMPT)
        next(stream)
    assert repr(engine) == "<lily.Engine, closed>"
    later: list[Callable[[], object]] = [
        lambda: engine.generate(PROMPT),
        engine.session,
        lambda: engine.max_context,
        lambda: engine.device,
        session.step,
        session.logits,
        lambda: session.sync(np.array([5], np.uint32)),
        lambda: next(stream),
    ]
    for call in later:
        with pytest.raises(lily.LilyError, match="the engine is closed"):
            call()
    engine.close()


def test_progress_grows_and_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    with lily.Engine.load(CALM, device="cpu", progress=lambda *step: seen.append(step)):
        pass
    done = [step[0] for step in seen]
    assert done == sorted(done) and len({total for _, total in seen}) == 1
    assert done[-1] == seen[0][1] > 6_000_000


def test_an_error_in_progress_ends_the_load() -> None:
    def refuse(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        lily.Engine.load(CALM, device="cpu", progress=refuse)


# ---- threads -----------------------------------------------------------------------------------


def test_four_threads_get_what_one_gets(engine: lily.Engine) -> None:
    prompts = [PROMPT, "Once upon a time", "int main(", "0 1 2 3 4 5 6 7 8 9"]

    def run(prompt: str) -> lily.Completion:
        return engine.generate(prompt, max_tokens=24, temperature=0.8, seed=11)

    alone = [run(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, prompts)) == alone
        assert list(pool.map(run, [PROMPT] * 4)) == alone[:1] * 4


def _in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def _until_busy(session: lily.Session) -> str:
    """The error of a second thread, once the first one is at work."""
    for _ in range(1000):
        try:
            session.logits()
        except lily.LilyError as error:
            if "another thread" in str(error):
                return str(error)
        time.sleep(0.005)
    raise AssertionError("the session was never busy")


def test_two_threads_on_one_session(exact: lily.Engine) -> None:
    session, other = exact.session(), exact.session()
    thread, errors = _in_thread(lambda: session.sync(LONG[:3000]))
    assert _until_busy(session) == "session is in use by another thread"
    thread.join()
    other.sync(LONG[:3000])
    assert not errors and session.position == 3000
    assert np.array_equal(session.logits(), other.logits())
    assert [session.step().id for _ in range(4)] == [other.step().id for _ in range(4)]


def test_cancel_from_another_thread(exact: lily.Engine) -> None:
    session, other = exact.session(), exact.session()
    thread, errors = _in_thread(lambda: session.sync(LONG))
    _until_busy(session)
    time.sleep(0.2)
    start = time.monotonic()
    session.cancel()
    thread.join()
    assert time.monotonic() - start < 1.0
    assert isinstance(errors[0], _core.Cancelled)
    assert session.position < len(LONG)
    assert np.array_equal(session.tokens, LONG[: session.position])
    session.sync(LONG[:1200])
    other.sync(LONG[:1200])
    assert np.abs(session.logits() - other.logits()).max() <= 1e-4


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
import lily
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
engine = lily.Engine.load(sys.argv[1], device="cpu", activations="float32")
ids = (np.arange(8000) * 7919 % 2000).astype(np.uint32)
session, fresh = engine.session(), engine.session()
sent = []
def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.4, interrupt).start()
try:
    session.sync(ids)
    sys.exit("the prefill was over before Ctrl-C")
except KeyboardInterrupt:
    late = time.monotonic() - sent[0]
assert late < 1.0, late
assert session.position < 8000 and np.array_equal(session.tokens, ids[: session.position])
session.sync(ids[:1200])
fresh.sync(ids[:1200])
assert np.abs(session.logits() - fresh.logits()).max() <= 1e-4
assert [session.step().id for _ in range(8)] == [fresh.step().id for _ in range(8)]
print("went on")
"""


def test_ctrl_c_in_a_long_prefill() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, CALM], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("went on\n", "")


# ---- options -----------------------------------------------------------------------------------


def test_the_keywords_are_the_fields() -> None:
    fields = lily.SamplingParams.__dataclass_fields__
    assert list(Sampling.__annotations__) == list(fields)
    kinds = {
        name: re.sub(r"ForwardRef\('(.*)'.*\)", r"\1", str(kind))
        for name, kind in Sampling.__annotations__.items()
    }
    assert all(str(fields[name].type) in kind for name, kind in kinds.items()), kinds


# ---- the command -------------------------------------------------------------------------------

LILY = [sys.executable, "-c", "from lily.cli import main; main()"]


def _lily(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LILY, *arguments], capture_output=True, text=True, timeout=120)


def _generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _lily("generate", "--model", str(CALM), "--device", "cpu", *arguments)


def test_cli_generate(engine: lily.Engine) -> None:
    done = _generate("--max-tokens", "16", PROMPT)
    text = engine.generate(PROMPT, max_tokens=16).text
    assert (done.returncode, done.stdout, done.stderr) == (0, text + "\n", "")


def test_cli_generate_takes_all_options(exact: lily.Engine) -> None:
    done = _generate(
        *("--max-tokens", "16", "--temperature", "0.9", "--seed", "5"),
        *("--activations", "float32", PROMPT),
    )
    want = exact.generate(PROMPT, max_tokens=16, temperature=0.9, seed=5).text
    assert (done.returncode, done.stdout, done.stderr) == (0, want + "\n", "")


def test_cli_devices_and_version() -> None:
    done = _lily("devices")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["metal", "cuda", "cpu", "sim"]
    for line, status in zip(lines, lily.devices(), strict=True):
        assert line.split()[1] == ("yes" if status.available else "no")
        assert line.endswith(status.description)
    assert _lily("--version").stdout == f"lily {lily.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "--model", "/nowhere", "--max-tokens", "4", "x"], 1, "no such folder"),
        (["generate", "--model", str(CALM), "--device", "metal", "x"], 1, "does not exist here"),
        (["generate", "--model", str(CALM), "--device", "gpu", "x"], 2, "device is 'gpu'"),
        (["generate", "--model", str(CALM), "--activations", "f8", "x"], 2, "activations is 'f8'"),
        (["generate", "--model", str(CALM), "--max-tokens", "0", "x"], 2, "max_tokens is 0"),
        (["generate", "--model", str(CALM), "--max-tokens", "many", "x"], 2, "--max-tokens"),
        (["generate", "--model", str(CALM), "--temperature", "nan", "x"], 2, "temperature is nan"),
        (["generate", "--model", str(CALM), "--seed", "-1", "x"], 2, "seed is -1"),
        (["generate", "--model", str(CALM), "--device", "cpu", ""], 2, "prompt has 0 tokens"),
        (["generate", "--model", str(CALM)], 2, "text"),
        (["generate", "--modle", str(CALM), "x"], 2, "--modle"),
        (["generat"], 2, "generat"),
    ],
)
def test_cli_errors_are_one_line(arguments: list[str], code: int, message: str) -> None:
    done = _lily(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("lily: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_cli_shows_a_bar_to_a_terminal_only(engine: lily.Engine) -> None:
    ours, theirs = pty.openpty()
    command = [*LILY, "generate", "--model", str(CALM), "--device", "cpu", "--max-tokens", "4", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as child:
        os.close(theirs)
        assert child.stdout is not None
        out = child.stdout.read()
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert out == engine.generate("a", max_tokens=4).text + "\n"
    assert "loading" in shown and "MB" in shown


def test_cli_ctrl_c_keeps_what_was_printed(engine: lily.Engine) -> None:
    # As in the foreground: a job in the background ignores the signal.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            heed + LILY[-1],
            "generate",
            "--model",
            str(CALM),
            "--device",
            "cpu",
            PROMPT,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        begin = child.stdout.read(40)
        child.send_signal(signal.SIGINT)
        rest, errors = child.stdout.read(), child.stderr.read()
    assert (child.returncode, errors) == (130, b"")
    text = (begin + rest).decode()
    want = engine.generate(PROMPT, max_tokens=2000).text
    assert text.endswith("\n") and len(text) < len(want)
    assert want.startswith(text[:-1])


def test_cli_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        [*LILY, "generate", "--model", str(CALM), "--device", "cpu", PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1


def test_cli_strips_control_characters_for_a_terminal() -> None:
    from lily.terminal import printable

    assert printable("a\x1b[31mb\r\nc\td\x00\u009b1mé\u202e") == "a[31mb\nc\td1mé"
