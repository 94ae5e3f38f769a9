"""Random calls on sessions of one engine; after each, a fresh session and the numpy sampler agree.

python tests/test_session_random.py SEED [CALLS]    a longer run of one seed
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import make_fixtures
import reference
from lily import _core
from lily.checkpoint import plan, read_checkpoint
from lily.engine import load_core

VOCAB, LIMIT, CONTEXT = 1000, 980, 560  # sampling leaves out ids from LIMIT on
TOLERANCE = 1e-4
SEEDS = range(8)
CALLS = 80

Ids = NDArray[np.uint32]
SAMPLING: dict[str, Any] = dict(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, presence=0.0, frequency=0.0, repetition=1.0
) | dict(seed=0, logprobs=0, bias=[])


def small_model(folder: Path) -> Path:
    """One layer of each kind, the smallest shapes, an odd vocabulary."""
    return make_fixtures.write_checkpoint(
        folder,
        "mlx4",
        seed=11,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        hidden_size=64,
        vocab_size=VOCAB,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        eos_token_id=2,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> _core.Engine:
    return load(tmp_path_factory.mktemp("random") / "model")


def load(folder: Path) -> _core.Engine:
    return load_core(plan(read_checkpoint(small_model(folder))), "cpu", True, CONTEXT, LIMIT)


class Timeline:
    """A session and what it should hold."""

    def __init__(self, engine: _core.Engine, rng: np.random.Generator) -> None:
        self.engine, self.rng = engine, rng
        self.session = _core.Session(engine)
        self.ids: list[int] = []
        self.prompt = 0  # ids before it were given, the others drawn
        self.sampling = dict(SAMPLING)
        self.shown: list[int] | None = None  # logits() are those after these ids; None: unknown
        self.verified: list[int] = []
        self.log: list[str] = []

    # ---- the truth ------------------------------------------------------------------------------
    def logits(self, ids: list[int], last: int = 1) -> NDArray[np.float32]:
        """Of the last ids, by a fresh session: all in one prefill."""
        fresh = _core.Session(self.engine)
        head, tail = ids[: len(ids) - last], ids[len(ids) - last :]
        if head:
            fresh.sync(np.array(head, np.uint32))
        return fresh.forward(np.array(tail, np.uint32))

    def close(self, got: NDArray[Any], want: NDArray[Any]) -> None:
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= TOLERANCE

    def check(self) -> None:
        assert self.session.tokens.tolist() == self.ids
        assert self.session.position == len(self.ids)
        if self.shown:
            self.close(self.session.logits(), self.logits(self.shown)[0])

    def check_draw(self, drawn: _core.SampledToken, allowed: NDArray[np.bool_] | None) -> None:
        """The token has the highest score, or one within rounding of it."""
        s = self.sampling
        logits = self.logits(self.ids)[0].astype(np.float64)
        kept = reference.candidates(
            logits,
            prompt=self.ids[: self.prompt],
            generated=self.ids[self.prompt :],
            bias=dict(s["bias"]),
            allowed=allowed,
            last_id=LIMIT - 1,
            temperature=s["temperature"] or 1.0,
            **{k: s[k] for k in ("repetition", "presence", "frequency", "top_k", "top_p", "min_p")},
        )
        if s["temperature"] > 0:
            kept = kept + reference.gumbel(s["seed"], len(self.ids), np.arange(VOCAB))
        assert kept[drawn.id] >= kept.max() - 5e-3
        raw = logits - logits.max()
        raw -= np.log(np.exp(raw).sum())
        assert abs(drawn.logprob - raw[drawn.id]) <= 1e-3
        assert len(drawn.top) == s["logprobs"]
        for rank, (token, logprob) in enumerate(drawn.top):
            assert abs(logprob - np.sort(raw)[-1 - rank]) <= 1e-3
            assert abs(logprob - raw[token]) <= 1e-3

    # ---- calls ----------------------------------------------------------------------------------
    def some(self, n: int) -> list[int]:
        return self.rng.integers(0, VOCAB, n).tolist()

    def length(self, room: int) -> int:
        """Mostly short; at times around the end of a block, or all there is."""
        choice = self.rng.integers(10)
        if choice == 0:
            return room
        if choice == 1:
            at = 256 - len(self.ids) % 256 + int(self.rng.integers(-1, 2))
            return max(0, min(room, at))
        return int(min(room, self.rng.integers(0, 40 if choice < 9 else 300)))

    def sync(self) -> None:
        keep = int(self.rng.integers(0, len(self.ids) + 1)) if self.rng.random() < 0.5 else None
        wanted = self.ids[:keep]
        wanted = wanted + self.some(self.length(CONTEXT - len(wanted)))
        stops = [int(s) for s in self.rng.integers(1, len(wanted) + 1, 2)] if wanted else []
        stops = stops[: self.rng.integers(3)]
        self.log[-1] += f" of {len(self.ids)} {keep=} {len(wanted)=} {stops=}"
        reused = self.session.sync(np.array(wanted, np.uint32), snapshot_at=stops)
        assert 0 <= reused <= len(wanted)
        self.ids, self.prompt = wanted, len(wanted)
        self.shown = list(wanted) or None
        self.verified = []

    def step(self, masked: bool = False) -> None:
        if not self.ids or len(self.ids) == CONTEXT:
            with pytest.raises((ValueError, _core.LilyError), match=r"empty|context is full"):
                self.session.step()
            return
        allowed = None
        mask = None
        if masked:
            allowed = self.rng.random(VOCAB) < self.rng.choice([0.01, 0.9])
            if not allowed[:LIMIT].any():
                allowed[3] = True
            bits = np.zeros((VOCAB + 31) // 32 * 32, np.uint8)
            bits[:VOCAB] = allowed
            mask = np.packbits(bits, bitorder="little").view(np.uint32)
        drawn = self.session.step(mask)
        self.check_draw(drawn, allowed)
        self.shown = list(self.ids)
        self.ids = [*self.ids, drawn.id]
        self.verified = []

    def steps(self) -> None:
        for _ in range(int(self.rng.integers(2, 6))):
            self.step()

    def nothing_allowed(self) -> None:
        if self.ids and len(self.ids) < CONTEXT:
            mask = np.zeros((VOCAB + 31) // 32, np.uint32)
            mask[LIMIT // 32 + 1 :] = 0xFFFFFFFF  # beyond the tokenizer's last id
            with pytest.raises(_core.LilyError, match="allows no token"):
                self.session.step(mask)
            self.verified = []
            self.shown = None

    def rewind(self) -> None:
        position = int(self.rng.integers(0, len(self.ids) + 1))
        if self.rng.random() < 0.5:
            position = max(0, len(self.ids) - int(self.rng.integers(0, 4)))
        self.log[-1] += f" to {position} of {len(self.ids)}"
        self.session.rewind(position)
        self.ids = self.ids[:position]
        self.prompt = min(self.prompt, position)
        self.shown = list(self.ids) or None
        self.verified = []

    def snapshot(self) -> None:
        self.session.snapshot()

    def verify(self) -> None:
        n = int(self.rng.integers(1, 17))
        ids = self.some(n)
        if len(self.ids) + n > CONTEXT:
            with pytest.raises(ValueError, match=f"> {CONTEXT} maximum"):
                self.session.verify(np.array(ids, np.uint32))
            return
        got = self.session.verify(np.array(ids, np.uint32))
        self.close(got, self.logits(self.ids + ids, n))
        self.verified = ids

    def commit(self) -> None:
        if not self.verified:
            with pytest.raises(_core.LilyError, match="nothing was verified"):
                self.session.commit(1)
            return
        n = int(self.rng.integers(1, len(self.verified) + 1))
        self.session.commit(n)
        self.ids = self.ids + self.verified[:n]
        self.shown = list(self.ids)
        self.verified = []

    def draft(self) -> None:
        self.verify()
        self.commit()

    def forward(self, score: bool = False) -> None:
        ids = self.some(self.length(min(512, CONTEXT - len(self.ids))))
        targets = self.some(len(ids))
        self.log[-1] += f" {len(ids)} after {len(self.ids)}"
        numbers = np.array(ids, np.uint32)
        if not ids:  # changes nothing
            assert self.session.forward(numbers).shape == (0, VOCAB)
            assert [x.shape for x in self.session.score(numbers, numbers)] == [(0,), (0,)]
            return
        want = self.logits(self.ids + ids, len(ids))
        if score:
            logprob, argmax = self.session.score(numbers, np.array(targets, np.uint32))
            scores, _ = reference.score(want.astype(np.float64), targets)
            assert np.abs(logprob - scores).max() <= 2e-4
            assert (want[np.arange(len(ids)), argmax] >= want.max(-1) - 2e-4).all()
        else:
            self.close(self.session.forward(numbers), want)
        self.ids = self.ids + ids
        self.prompt = len(self.ids)
        self.shown, self.verified = list(self.ids), []

    def set_sampling(self) -> None:
        s, rng = dict(SAMPLING), self.rng
        if rng.random() < 0.6:
            s |= dict(
                temperature=float(rng.choice([0.3, 1.0, 2.5])),
                seed=int(rng.integers(2**64, dtype=np.uint64)),
            )
            s |= dict(top_k=int(rng.choice([0, 5])))
        if rng.random() < 0.5:
            s |= dict(
                presence=float(rng.choice([0.5, -1.0, 100.0])), frequency=0.25, repetition=1.5
            )
        if rng.random() < 0.3:
            s |= dict(bias=[(int(rng.integers(VOCAB)), float(rng.choice([20.0, -5.0])))])
        s |= dict(logprobs=int(rng.choice([0, 3, 20])))
        self.session.set_sampling(**s)
        self.sampling = s

    def state(self) -> None:
        if self.ids:
            fresh = _core.Session(self.engine)
            fresh.sync(np.array(self.ids, np.uint32))
            for got, want in zip(
                self.session.recurrent_state(), fresh.recurrent_state(), strict=True
            ):
                self.close(got, want)

    def cancel(self) -> None:
        self.session.cancel()

    def cancelled(self) -> None:
        """A long call that another thread ends: whatever is left is a valid prefix."""
        before = list(self.ids)
        timer = threading.Timer(float(self.rng.random()) * 0.02, self.session.cancel)
        goal = before
        timer.start()
        try:
            if self.rng.random() < 0.5:
                goal = self.some(CONTEXT - 20)
                self.session.sync(np.array(goal, np.uint32), snapshot_at=[200])
            else:
                self.session.rewind(len(before) // 2)
        except _core.Cancelled:
            self.log[-1] += f" at {self.session.position}"
            with pytest.raises(_core.LilyError, match="no position has been computed"):
                self.session.logits()
        timer.join()
        self.ids = self.session.tokens.tolist()
        assert self.ids == goal[: len(self.ids)]
        self.prompt = len(self.ids) if goal is not before else min(self.prompt, len(self.ids))
        self.shown, self.verified = None, []

    CALLS = (
        (sync, ()),
        (step, ()),
        (step, (True,)),
        (steps, ()),
        (rewind, ()),
        (snapshot, ()),
        (verify, ()),
        (commit, ()),
        (draft, ()),
        (forward, ()),
        (forward, (True,)),
        (set_sampling, ()),
        (state, ()),
        (cancel, ()),
        (cancelled, ()),
        (nothing_allowed, ()),
    )

    def call(self) -> None:
        function, args = self.CALLS[self.rng.choice(len(self.CALLS), p=WEIGHTS)]
        self.log.append(f"{function.__name__}{args}")
        function(self, *args)  # type: ignore[operator]


_RATES = np.array([2, 4, 3, 4, 2, 1, 1, 2, 2, 1, 1, 2, 1, 2, 0.5, 0.5])
WEIGHTS = _RATES / _RATES.sum()


def run(engine: _core.Engine, seed: int, calls: int) -> None:
    rng = np.random.default_rng(seed)
    timelines = [Timeline(engine, rng) for _ in range(2)]
    for i in range(calls):
        timeline = timelines[rng.integers(len(timelines))]
        try:
            timeline.call()
            timeline.check()
        except BaseException as error:
            error.add_note(
                f"seed {seed}, call {i}, its session's: " + "; ".join(timeline.log[-12:])
            )
            raise


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_leave_what_a_fresh_session_has(model: _core.Engine, seed: int) -> None:
    run(model, seed, CALLS)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(
            load(Path(folder) / "model"),
            int(sys.argv[1]),
            int(sys.argv[2]) if sys.argv[2:] else 2000,
        )
