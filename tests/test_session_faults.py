"""What must not harm a session: stray cancels, bad arguments, forks, exits, memory that runs out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_harness import emulated
from lily import _core
from model_harness import CALM, DATA, engine, golden, ids_of

TESTS = Path(__file__).resolve().parent
INF = float("inf")


@pytest.fixture
def model(device: str) -> _core.Engine:
    return engine(CALM, device, True)


def _ids(n: int, start: int = 0) -> np.ndarray:
    return ids_of(golden(DATA / "golden_long_calm.safetensors")["ids"])[start : start + n]


def _logits(model: _core.Engine, ids: np.ndarray) -> np.ndarray:
    session = _core.Session(model)
    session.sync(ids)
    return session.logits()


@pytest.mark.parametrize("between", ["nothing", "logits"])
def test_a_cancel_between_two_steps_changes_nothing(model: _core.Engine, between: str) -> None:
    """It may stop the step in flight; the next call takes that one again before it goes ahead."""
    clean = _core.Session(model)
    clean.sync(_ids(30))
    want = [clean.step().id for _ in range(4 if emulated(model.device) else 8)]
    session = _core.Session(model)
    session.sync(_ids(30))
    got = []
    for _ in range(len(want)):
        got.append(session.step().id)
        session.cancel()
        time.sleep(0.002)
        if between == "logits":
            session.logits()
    assert got == want
    assert np.abs(session.logits() - _logits(model, session.tokens[:-1])).max() <= 1e-4


def test_a_draw_that_fails_ahead_leaves_the_session_whole(model: _core.Engine) -> None:
    """One token is allowed, and only once: the step in flight finds none, and a further one after
    it has run as well."""
    session = _core.Session(model)
    bias = [(i, -INF) for i in range(model.vocab) if i != 77]
    session.set_sampling(bias=bias, presence=INF)
    session.sync(_ids(30))
    assert session.step().id == 77
    with pytest.raises(_core.LilyError, match="allows no token"):
        session.step()
    assert np.array_equal(session.tokens, [*_ids(30), 77])
    session.set_sampling()
    drawn = [session.step().id for _ in range(3)]
    assert drawn[0] == int(_logits(model, session.tokens[:31]).argmax())
    assert drawn[2] == int(_logits(model, session.tokens[:33]).argmax())


def test_ids_beyond_the_vocabulary_are_refused(model: _core.Engine) -> None:
    ids = _ids(5)
    bad = np.array([3, model.vocab], np.uint32)
    session = _core.Session(model)
    session.sync(ids)
    for call in (session.sync, session.forward, session.verify, lambda x: session.score(x, x[:2])):
        with pytest.raises(ValueError, match="token 1 is 2048, the vocabulary has 2048"):
            call(bad)
    assert np.array_equal(session.tokens, ids)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([2**32 + 5, 2]),
        np.array([-1]),
        np.array([1.5]),
        np.array([True]),
        np.arange(10, dtype=np.uint32)[::2],
        np.zeros((2, 2), np.uint32),
        [1, 2],
    ],
    ids=["int64", "negative", "float", "bool", "strided", "matrix", "list"],
)
def test_only_uint32_rows_are_ids(ids: Any) -> None:
    """Nothing is wrapped or cut to fit."""
    session = _core.Session(engine(CALM, "cpu", True))
    session.sync(_ids(5))
    calls = (session.sync, session.forward, session.verify, lambda x: session.score(x, x))
    for call in (*calls, session.step):
        with pytest.raises(TypeError, match="uint32"):
            call(ids)
    assert session.position == 5


def test_refused_sampling_changes_nothing(model: _core.Engine) -> None:
    session = _core.Session(model)
    session.sync(_ids(24))
    want = _logits(model, _ids(24))
    with pytest.raises(ValueError, match="logprobs is 21, allowed 0 to 20"):
        session.set_sampling(logprobs=21)
    with pytest.raises(ValueError, match="logit bias for token 2048"):
        session.set_sampling(temperature=2.0, seed=1, bias=[(3, 1000.0), (2048, 1.0)])
    assert session.step().id == int(want.argmax())


@pytest.mark.parametrize(
    "options",
    [dict(temperature=v) for v in (float("nan"), INF, 1e-45, -1.0)]
    + [
        dict(temperature=1.0, **{k: v})
        for k in ("top_p", "min_p")
        for v in (float("nan"), 0, -1, INF)
    ]
    + [{k: v} for k in ("presence", "frequency", "repetition") for v in (float("nan"), INF, -INF)]
    + [
        dict(repetition=0.0),
        dict(temperature=1.0, top_k=2**32 - 1),
        dict(temperature=1.0, seed=2**64 - 1),
    ]
    + [dict(temperature=1.0, bias=[(5, v)]) for v in (INF, -INF, float("nan"))],
    ids=str,
)
def test_wild_sampling_draws_some_token(model: _core.Engine, options: dict[str, Any]) -> None:
    """The core is handed what lily.SamplingParams would refuse: it neither hangs nor faults."""
    if emulated(model.device) and (options.get("temperature") != 1.0 or "seed" in options):
        pytest.skip("sim: the same kernel text; what enters the searches of a draw is enough")
    session = _core.Session(model)
    session.set_sampling(**options)
    session.sync(_ids(8))
    for _ in range(2):
        assert session.step().id < model.vocab
    session.set_sampling()
    assert session.step().id == int(_logits(model, session.tokens[:-1]).argmax())


def test_a_row_scored_alone_leaves_its_logits(model: _core.Engine) -> None:
    session = _core.Session(model)
    session.sync(_ids(20))
    session.score(_ids(1, 20), _ids(1, 21))
    assert np.abs(session.logits() - _logits(model, _ids(21))).max() <= 1e-4


def test_a_cancelled_sync_shows_no_old_logits() -> None:
    session = _core.Session(engine(CALM, "cpu", True))
    session.sync(_ids(30))
    timer = threading.Timer(0.05, session.cancel)
    timer.start()
    with pytest.raises(_core.Cancelled):
        session.sync(_ids(5000, 100))
    timer.join()
    with pytest.raises(_core.LilyError, match="no position has been computed"):
        session.logits()


def test_reading_a_busy_session_is_an_error() -> None:
    session = _core.Session(engine(CALM, "cpu", True))

    def run() -> None:
        while True:  # the other thread may be the first
            try:
                session.sync(_ids(1500))
            except _core.LilyError:
                continue
            return

    thread = threading.Thread(target=run)
    thread.start()
    errors = 0
    while thread.is_alive():
        for name in ("tokens", "position", "snapshots"):
            try:
                getattr(session, name)
            except _core.LilyError as error:
                errors += "in use by another thread" in str(error)
    thread.join()
    assert errors > 0
    assert session.position == 1500


# ---- processes ----------------------------------------------------------------------------------
_PRELUDE = f"""
import gc, os, sys, threading, time
sys.path[:0] = {[str(TESTS), *sys.path]!r}
from test_session_faults import *
from test_session_faults import _core, _ids, _logits
"""

# ThreadSanitizer calls a leak what runs when the process ends.
_MAY_RUN_ON = {"TSAN_OPTIONS": f"{os.environ.get('TSAN_OPTIONS', '')}:report_thread_leaks=0"}


def _python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, (done.returncode, done.stdout + done.stderr)
    return done.stdout


_FORK = """
model = engine(CALM, "DEVICE", True)
session = _core.Session(model)
session.sync(_ids(10))
first = session.step().id
child = os.fork()
if child == 0:
    for call in (session.step, lambda: _core.Session(model)):
        try:
            call()
        except _core.LilyError as error:
            assert "belongs to process" in str(error), error
        else:
            os._exit(3)
    engine.cache_clear()
    del session, model
    gc.collect()
    own = _core.Session(engine(CALM, "DEVICE", True))
    own.sync(_ids(10))
    assert own.step().id == first
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert session.step().id == int(_logits(model, session.tokens[:-1]).argmax())
"""


@pytest.mark.skipif(
    "libtsan" in os.environ.get("LD_PRELOAD", ""), reason="ThreadSanitizer: no threads after a fork"
)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_fork_has_an_engine_of_its_own_only(device: str) -> None:
    """The threads of the parent's are not there: an error instead of waiting for ever."""
    _python(_FORK.replace("DEVICE", device))


@pytest.mark.parametrize(
    "call", ["session.step(); session.rewind(20)", "session.sync(_ids(600, k))"]
)
def test_the_interpreter_may_end_while_a_thread_computes(call: str) -> None:
    code = f"""
session = _core.Session(engine(CALM, "cpu", True))
session.sync(_ids(20))
kept = _core.Session(engine(CALM, "cpu", True))
kept.sync(_ids(20))
kept.step()
def work():
    for k in range(10**6):
        {call}
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(3):
        _python(code, **_MAY_RUN_ON)


# ---- memory -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small_memory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that makes the machine as small as LILY_TEST_PAGES says."""
    if sys.platform != "linux":
        pytest.skip("a preloaded library tells the size of the memory: Linux only")
    folder = tmp_path_factory.mktemp("memory")
    (folder / "pages.c").write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        "long __sysconf(int);\n"
        "long sysconf(int name) {\n"
        '  return name == _SC_PHYS_PAGES ? atol(getenv("LILY_TEST_PAGES")) : __sysconf(name);\n}\n'
    )
    compiler = shutil.which("cc")
    command = [compiler] if compiler else [sys.executable, "-m", "ziglang", "cc"]
    out = folder / "pages.so"
    subprocess.run(
        [*command, "-shared", "-fPIC", str(folder / "pages.c"), "-o", str(out)], check=True
    )
    return str(out)


_MEMORY = """
model = engine(CALM, "cpu", True, 1024)
held = []
try:
    while True:
        held.append(_core.Session(model))
        held[-1].sync(_ids(255))
except _core.LilyError as error:
    full = str(error)
assert full.startswith(("KV cache: all ", "cpu: ")), full
held.pop()
assert len(held) > 3
for session in held:
    assert np.array_equal(session.tokens, _ids(255))
held.pop()  # room for what was refused, not for much more
drawn, failed = 0, 0
for session in held:
    try:
        for _ in range(3):
            session.step()
            drawn += 1
    except _core.LilyError as error:
        assert str(error).startswith(("KV cache: all ", "cpu: ")), error
        failed += 1
print(len(held), drawn, failed)
tokens = [s.tokens for s in held]
first = max(tokens, key=len)
for t in tokens:  # no token is lost to a caller who did not get it
    assert np.array_equal(t, first[: len(t)])
assert sum(len(t) - 255 for t in tokens) == drawn
last = held[-1]
del held, session
gc.collect()
while last.position < 260:
    last.step()
assert np.array_equal(last.tokens[: len(first)], first)
print(last.tokens[255:].tolist())
"""


def test_sessions_stay_whole_when_the_kv_memory_is_used_up(small_memory: str) -> None:
    """Also in the lookahead: the token it was drawn for is handed over first."""
    pages = (200 << 20) // os.sysconf("SC_PAGE_SIZE")
    preload = f"{os.environ.get('LD_PRELOAD', '')} {small_memory}"  # a sanitizer has to be first
    out = _python(_MEMORY, LD_PRELOAD=preload, LILY_TEST_PAGES=str(pages))
    counts, tokens = out.splitlines()
    _, _, failed = (int(n) for n in counts.split())
    assert failed > 0
    session = _core.Session(engine(CALM, "cpu", True))
    session.sync(_ids(255))
    assert tokens == str([session.step().id for _ in range(5)])
