"""Sessions: reuse, rewind, snapshots, masks, cancel: always equal to a fresh session."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kernel_harness import emulated
from lily import _core
from model_harness import CALM, DATA, engine, golden, ids_of


@pytest.fixture
def model(device: str) -> _core.Engine:
    return engine(CALM, device, True)


def _ids(n: int, start: int = 0) -> np.ndarray:
    return ids_of(golden(DATA / "golden_long_calm.safetensors")["ids"])[start : start + n]


def _fresh(model: _core.Engine, ids: np.ndarray) -> np.ndarray:
    session = _core.Session(model)
    session.sync(ids)
    return session.logits()


def _close(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() <= 1e-4


def test_sync_reuses_the_common_prefix(model: _core.Engine) -> None:
    ids = _ids(60)
    session = _core.Session(model)
    assert session.sync(ids[:40]) == 0
    assert session.sync(ids[:40]) == 40  # nothing to do
    assert session.sync(ids) == 40
    _close(session.logits(), _fresh(model, ids))
    other = np.concatenate([ids[:30], _ids(20, 1000)])
    assert session.sync(other) == 0  # no snapshot below 30
    _close(session.logits(), _fresh(model, other))
    assert np.array_equal(session.tokens, other)


def test_sync_goes_on_from_a_snapshot(model: _core.Engine) -> None:
    ids = _ids(60)
    session = _core.Session(model)
    session.sync(ids, snapshot_at=[20, 41])
    assert session.snapshots == [20, 41]
    other = np.concatenate([ids[:50], _ids(8, 1000)])
    assert session.sync(other) == 41
    _close(session.logits(), _fresh(model, other))
    back = np.concatenate([ids[:25], _ids(8, 2000)])
    assert session.sync(back) == 20
    _close(session.logits(), _fresh(model, back))


def test_drawn_tokens_count_as_timeline(model: _core.Engine) -> None:
    ids = _ids(30)
    session = _core.Session(model)
    session.sync(ids)
    drawn = [session.step().id for _ in range(5)]
    whole = np.concatenate([ids, np.array(drawn, np.uint32)])
    assert np.array_equal(session.tokens, whole)
    longer = np.concatenate([whole, _ids(20, 500)])
    assert session.sync(longer) == 35  # also what was in flight
    _close(session.logits(), _fresh(model, longer))


def test_step_after_sync_equals_a_fresh_session(model: _core.Engine) -> None:
    ids = _ids(30)
    session = _core.Session(model)
    session.sync(ids)
    first = [session.step().id for _ in range(6)]
    session.sync(ids[:20])
    session.sync(ids)
    assert [session.step().id for _ in range(6)] == first


@pytest.mark.parametrize("position", [0, 1, 2, 19, 20, 21, 254, 255, 256, 257, 270])
def test_rewind_to_any_position(model: _core.Engine, device: str, position: int) -> None:
    if emulated(device) and position != 256:
        pytest.skip("sim: one position is enough, each replays the prompt")
    ids = _ids(270)
    session = _core.Session(model)
    session.sync(ids, snapshot_at=[20, 255])
    for _ in range(3):
        session.step()
    session.rewind(position)
    assert session.position == position
    assert np.array_equal(session.tokens, ids[:position])
    more = np.concatenate([ids[:position], _ids(30, 700)])
    session.sync(more)
    _close(session.logits(), _fresh(model, more))


def test_a_rewind_draws_the_same_tokens(model: _core.Engine) -> None:
    ids = _ids(24)
    session = _core.Session(model)
    session.set_sampling(temperature=1.0, top_k=20, top_p=0.95, seed=7)
    session.sync(ids, snapshot_at=[24])
    first = [session.step().id for _ in range(8)]
    session.rewind(27)
    assert np.array_equal(session.tokens[24:], np.array(first[:3], np.uint32))
    assert [session.step().id for _ in range(5)] == first[3:]
    session.set_sampling(temperature=1.0, top_k=20, top_p=0.95, seed=8)
    session.rewind(24)
    assert [session.step().id for _ in range(8)] != first


def test_a_masked_step_draws_allowed_tokens_only(model: _core.Engine) -> None:
    ids = _ids(24)
    plain = _core.Session(model)
    plain.sync(ids)
    greedy = [plain.step().id for _ in range(3)]
    session = _core.Session(model)
    session.sync(ids)
    assert session.step().id == greedy[0]
    allowed = np.zeros((model.vocab + 31) // 32, np.uint32)
    for token in (7, 1234, 1999):
        allowed[token // 32] |= np.uint32(1 << (token % 32))
    assert session.step(allowed).id in (7, 1234, 1999)  # what was in flight is undone
    want = _fresh(model, session.tokens)
    follow = session.step().id
    assert follow == int(want.argmax())
    with pytest.raises(_core.LilyError, match="allows no token"):
        session.step(np.zeros_like(allowed))
    assert session.step().id == int(_fresh(model, session.tokens[:-1]).argmax())


def test_penalties_see_prompt_and_generated_tokens(model: _core.Engine) -> None:
    ids = _ids(24)
    session = _core.Session(model)
    session.set_sampling(temperature=0.0, presence=1000.0)
    session.sync(ids)
    drawn = [session.step().id for _ in range(10)]
    assert len(set(drawn)) == len(drawn)  # nothing twice
    session.rewind(28)
    again = [session.step().id for _ in range(6)]
    assert again == drawn[4:]


def test_cancel_in_a_prefill_leaves_a_valid_prefix(device: str) -> None:
    model = engine(CALM, device, True)
    ids = _ids(700 if emulated(device) else 5000)
    session = _core.Session(model)
    timer = threading.Timer(0.15, session.cancel)
    timer.start()
    start = time.monotonic()
    try:
        session.sync(ids)
        assert device in ("cuda", "metal"), "the prefill ended before it was cancelled"
    except _core.Cancelled:
        # A command buffer on its way ends first, which emulated takes long.
        assert time.monotonic() - start < 10 or (device == "metal" and emulated(device))
    timer.join()
    position = session.position
    assert np.array_equal(session.tokens, ids[:position])
    short = ids[: min(position, 600) + 40]
    session.sync(short)
    _close(session.logits(), _fresh(model, short))


def test_cancel_between_steps_goes_on(model: _core.Engine) -> None:
    """A cancelled step draws nothing; the next one draws what would have come."""
    ids = _ids(24)
    clean = _core.Session(model)
    clean.sync(ids)
    want = [clean.step().id for _ in range(8)]
    session = _core.Session(model)
    session.sync(ids)
    got: list[int] = []

    def pester() -> None:
        for _ in range(40):
            time.sleep(0.003)
            session.cancel()

    thread = threading.Thread(target=pester)
    thread.start()
    while len(got) < 4:
        try:
            got.append(session.step().id)
        except _core.Cancelled:
            assert np.array_equal(session.tokens[24:], np.array(got, np.uint32))
    thread.join()
    while len(got) < 8:
        got.append(session.step().id)
    assert got == want


def test_two_threads_on_one_session_get_an_error(model: _core.Engine) -> None:
    session = _core.Session(model)
    errors: list[str] = []
    ids = _ids(120 if emulated(model.device) else 600)

    def other() -> None:
        while thread.is_alive():
            try:
                session.logits()
            except _core.LilyError as error:
                errors.append(str(error))

    def sync() -> None:
        while True:  # the other thread may be the first
            try:
                session.sync(ids)
            except _core.LilyError:
                continue
            return

    thread = threading.Thread(target=sync)
    thread.start()
    other()
    thread.join()
    assert any("in use by another thread" in e for e in errors)
    _close(session.logits(), _fresh(model, ids))


def test_bad_arguments_are_refused_and_lose_nothing(model: _core.Engine) -> None:
    ids = _ids(20)
    session = _core.Session(model)
    with pytest.raises(_core.LilyError, match="empty"):
        session.step()
    session.sync(ids)
    want = session.logits()
    bad = ids.copy()
    bad[3] = model.vocab
    for call, error in (
        (lambda: session.sync(bad), "token 3 is 2048, the vocabulary has 2048"),
        (lambda: session.rewind(21), "rewind to 21, the session has 20"),
        (lambda: session.verify(ids[:0]), "verify: 0 tokens"),
        (lambda: session.verify(np.zeros(17, np.uint32)), "17 tokens, allowed 1 to 16"),
        (lambda: session.sync(ids, snapshot_at=[21]), "snapshot_at is 21, allowed 1 to 20"),
        (lambda: session.sync(np.zeros(8193, np.uint32)), "8193 tokens > 8192"),
        (lambda: session.forward(np.zeros(513, np.uint32)), "513 tokens, at most 512"),
    ):
        with pytest.raises(ValueError, match=error):
            call()
    with pytest.raises(_core.LilyError, match="nothing was verified"):
        session.commit(1)
    assert np.array_equal(session.logits(), want)
    assert session.sync(ids) == 20


def test_the_context_limit(device: str) -> None:
    model = engine(CALM, device, True, 24)
    ids = _ids(22)
    session = _core.Session(model)
    session.sync(ids)
    drawn = [session.step().id, session.step().id]
    with pytest.raises(ValueError, match="the context is full: 24 of 24"):
        session.step()
    assert session.position == 24
    want = _core.Session(engine(CALM, device, True))
    want.sync(ids)
    assert [want.step().id, want.step().id] == drawn


def test_snapshots_survive_when_their_blocks_are_overwritten(model: _core.Engine) -> None:
    """Shared blocks are copied before they are written; the snapshot's own timeline stays right."""
    ids = _ids(300)
    session = _core.Session(model)
    session.sync(ids, snapshot_at=[290])
    other = np.concatenate([ids[:100], _ids(40, 2000)])
    session.sync(other)
    more = np.concatenate([ids[:290], _ids(5, 3000)])
    assert session.sync(more) == 290
    _close(session.logits(), _fresh(model, more))


def test_score_equals_forward(model: _core.Engine) -> None:
    ids = _ids(90)
    targets = _ids(90, 1)
    logits = _core.Session(model).forward(ids).astype(np.float64)
    session = _core.Session(model)
    logprob, argmax = session.score(ids, targets)
    top = logits.max(-1, keepdims=True)
    want = (logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))[
        np.arange(90), targets
    ]
    assert np.abs(logprob - want).max() <= 1e-4
    assert np.array_equal(argmax, logits.argmax(-1))
    assert session.step().id == int(logits[-1].argmax())
