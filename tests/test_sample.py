"""Scores and sampling against the reference: settings, ties, faults, Step, equal draws."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import reference
from conftest import require_device
from kernel_harness import CONST, STRUCTS, In, Kernels, Out, emulated, params
from lily import LilyError

NONE = 0xFFFFFFFF
OFF = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
    "top_k": 0,
}


@dataclass
class Slot:
    """What one sequence brings to the draw."""

    seed: int = 1
    logprobs: int = 0
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: np.ndarray | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def candidates(self, logits: np.ndarray, limit: int) -> np.ndarray:
        """The reference's, with the settings as the kernel has them: in fp32."""
        values = {k: v if k == "top_k" else float(np.float32(v)) for k, v in self.settings.items()}
        bias = {i: float(np.float32(v)) for i, v in self.bias.items()}
        return reference.candidates(
            logits.astype(np.float64),
            prompt=self.prompt,
            generated=self.generated,
            bias=bias,
            allowed=self.allowed,
            last_id=limit - 1,
            **(OFF | values),
        )


def make_step(
    vocab: int, slots: list[Slot], slot_of_row: list[int], positions: list[int], rows: int
) -> np.ndarray:
    """Step bytes with the arrays of 16 slots behind it; slots without settings stay poison."""
    s, count = STRUCTS["Step"](), CONST["LILY_MAX_ROWS"]
    s.rows = rows
    words = (vocab + 31) // 32
    counts, prompt = np.zeros((2, count, vocab), np.uint32)
    mask = np.zeros((count, words), np.uint32)
    bias = np.full((count, vocab), np.nan, np.float32)
    for number, slot in enumerate(slots):
        to = s.sampling[number]
        for name, value in (OFF | slot.settings).items():
            setattr(to, name, value)
        to.seed_low, to.seed_high = slot.seed & NONE, slot.seed >> 32
        to.logprobs = slot.logprobs
        np.add.at(counts[number], slot.generated, 1)
        np.add.at(prompt[number], slot.prompt, 1)
        if slot.allowed is not None:
            to.use_mask = 1
            bits = np.zeros(words * 32, np.uint8)
            bits[:vocab] = slot.allowed
            mask[number] = np.packbits(bits, bitorder="little").view(np.uint32)
        if slot.bias:
            to.use_bias = 1
            bias[number] = 0
            for token, value in slot.bias.items():
                bias[number, token] = value
    for row, (slot_number, position) in enumerate(zip(slot_of_row, positions, strict=True)):
        s.slot[row], s.position[row], s.id[row] = slot_number, position, 7
    at = (ctypes.sizeof(s) + 15) // 16 * 16
    arrays = []
    for name, array in (
        ("counts", counts),
        ("prompt_counts", prompt),
        ("mask", mask),
        ("bias", bias),
    ):
        setattr(s, f"{name}_offset", at)
        arrays.append(array.reshape(-1).view(np.uint8))
        at += array.nbytes
    head = np.zeros((ctypes.sizeof(s) + 15) // 16 * 16, np.uint8)
    head[: ctypes.sizeof(s)] = np.frombuffer(bytes(s), np.uint8)
    return np.concatenate([head, *arrays])


@dataclass
class Result:
    adjusted: np.ndarray
    ring: Any  # Sampled[rows][ring], None where nothing was written
    step: Any
    counts: np.ndarray  # of generated tokens [slots, vocab]


def sample(
    k: Kernels, logits: np.ndarray, step: np.ndarray, limit: int | None = None, ring: int = 3
) -> Result:
    rows, vocab = logits.shape
    limit = limit or vocab
    blocks = -(-vocab // 1024)
    p = params("sample_scan", rows=rows, vocab=vocab, token_limit=limit)
    adjusted, stats, same = k.run(
        "sample_scan",
        p,
        [In(logits), Out(logits.shape, np.float32), Out((rows, blocks, 8), np.float32)],
        step,
    )
    assert (same[: step.size] == step).all(), "sample_scan only reads Step"
    p = params("sample_draw", rows=rows, vocab=vocab, token_limit=limit, ring=ring)
    size = ctypes.sizeof(STRUCTS["Sampled"])
    out, after = k.run(
        "sample_draw",
        p,
        [In(logits), In(adjusted), In(stats), Out((rows, ring, size // 4), np.uint32)],
        step,
    )
    entries = [
        [
            None if (e == NONE).all() else STRUCTS["Sampled"].from_buffer_copy(e.tobytes())
            for e in row
        ]
        for row in out
    ]
    s = STRUCTS["Step"].from_buffer_copy(after.tobytes())
    counts = after[s.counts_offset : s.prompt_counts_offset].view(np.uint32)
    return Result(adjusted, entries, s, counts.reshape(CONST["LILY_MAX_ROWS"], vocab))


def tokens(result: Result, positions: list[int], ring: int = 3) -> list[int]:
    """Of each row, from the one ring entry that was written."""
    found = []
    for row, position in zip(result.ring, positions, strict=True):
        assert [e is not None for e in row] == [i == (position + 1) % ring for i in range(ring)]
        assert row[(position + 1) % ring].position == position + 1
        found.append(row[(position + 1) % ring].token)
    return found


VOCAB, LIMIT = 2048, 2040


def model_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """A bulk of poor tokens and some good ones, as a language model gives them."""
    logits = rng.standard_normal((rows, vocab)) * 2 - 3
    for row in logits:
        row[rng.choice(vocab, 60, replace=False)] += rng.exponential(3, 60) + 3
    return logits.astype(np.float32)


def ties(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return np.round(model_logits(rng, rows, vocab) / 2).astype(np.float32) * 2


def full_slot(rng: np.random.Generator, vocab: int, logits: np.ndarray) -> dict[str, Any]:
    """Penalties, bias and a mask that hit the best tokens."""
    best = np.argsort(-logits)[:40]
    allowed = rng.random(vocab) < 0.7
    allowed[best[0]] = True
    return {
        "prompt": rng.choice(best, 10).tolist(),
        "generated": [*rng.choice(best, 30).tolist(), *rng.integers(0, vocab, 20).tolist()],
        "bias": {int(i): float(rng.normal() * 3) for i in rng.choice(best, 8)},
        "allowed": allowed,
    }


COMBINATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 40},
    "top_k_1": {"top_k": 1, "temperature": 1.5},
    "top_k_all": {"top_k": VOCAB, "temperature": 3.0},
    "top_p": {"top_p": 0.9},
    "top_p_all": {"top_p": 0.9999, "temperature": 4.0},
    "top_p_0": {"top_p": 0.0, "temperature": 5.0},
    "min_p": {"min_p": 0.05, "temperature": 1.5},
    "min_p_1": {"min_p": 1.0, "temperature": 1.5},
    "usual": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "all": {
        "temperature": 1.3,
        "top_k": 300,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition": 1.3,
        "presence": 0.7,
        "frequency": 0.21,
    },
    "rewarded": {"repetition": 0.8, "presence": -0.5, "frequency": -0.125, "temperature": 0.9},
    "greedy_all": {"temperature": 0.0, "repetition": 1.3, "presence": 0.7, "frequency": 0.21},
}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_draws_are_the_references(device: str, combination: str) -> None:
    """208 seeds at a vocabulary of 2048 (on sim 16), half of the rows full of ties."""
    k, settings = Kernels(device, True), COMBINATIONS[combination]
    rng = np.random.default_rng(len(combination))
    rows, wrong, drawn = 16, [], set()
    full = "all" in combination.split("_") or combination == "rewarded"
    for _ in range(1 if emulated(device) else 13):
        logits = np.concatenate([model_logits(rng, 8, VOCAB), ties(rng, 8, VOCAB)])
        order = rng.permutation(rows).tolist()
        positions = rng.integers(0, 2**18, rows).tolist()
        slots = [Slot() for _ in range(rows)]
        for row, number in enumerate(order):
            extra = full_slot(rng, VOCAB, logits[row]) if full else {}
            seed = int(rng.integers(0, 2**63)) * 2 + 1
            slots[number] = Slot(seed=seed, settings=settings, **extra)
        step = make_step(VOCAB, slots, order, positions, rows)
        result = sample(k, logits, step, LIMIT)
        for row, got in enumerate(tokens(result, positions)):
            slot = slots[order[row]]
            kept = slot.candidates(logits[row], LIMIT)
            want = reference.draw(kept, slot.seed, positions[row] + 1)
            drawn.add(got)
            if got != want:
                wrong.append((row, got, want, kept[got], kept[want]))
        if device != "cpu":
            on_cpu = sample(Kernels("cpu", True), logits, step, LIMIT)
            assert result.adjusted.tobytes() == on_cpu.adjusted.tobytes()
            assert tokens(result, positions) == tokens(on_cpu, positions)
    assert not wrong
    assert len(drawn) >= 5


@pytest.mark.parametrize(
    "combination", ["greedy", "plain", "top_k", "top_p", "usual", "all", "min_p"]
)
def test_a_real_vocabulary(device: str, combination: str) -> None:
    if emulated(device) and combination in ("top_k", "top_p", "min_p"):
        pytest.skip("sim: seconds each, and `usual` and `all` go the same ways")
    vocab, limit = 248_320, 248_077
    rng = np.random.default_rng(3)
    logits = model_logits(rng, 2, vocab)
    logits[:, limit:] += 30
    full = full_slot(rng, vocab, logits[0]) if combination == "all" else {}
    settings = COMBINATIONS[combination]
    slots = [Slot(seed=5, settings=settings, **full), Slot(seed=2**40, settings=settings)]
    rows = 1 if emulated(device) else 2
    step = make_step(vocab, slots, [1, 0][:rows], [17, 4][:rows], rows)
    result = sample(Kernels(device, True), logits[:rows], step, limit)
    want = [
        reference.draw(slots[s].candidates(logits[r], limit), slots[s].seed, position + 1)
        for r, s, position in ((0, 1, 17), (1, 0, 4))[:rows]
    ]
    assert tokens(result, [17, 4][:rows]) == want


def block_shapes() -> list[tuple[str, np.ndarray, list[dict[str, Any]]]]:
    """Logits of ten blocks, the last one short, and cuts at each border of a draw's passes."""
    rng, vocab = np.random.default_rng(8), 10_000
    noise = rng.standard_normal(vocab).astype(np.float32)
    flat = np.full(vocab, 2.0, np.float32)
    ks = [{"top_k": k} for k in (1, 9, 10, 11, 2048, 2049, 6000)]
    both = [{"top_k": 6000, "top_p": 0.6}, {"top_k": 4, "top_p": 0.6}]
    shapes = [
        ("flat", flat, [*ks, *both, {"top_p": 0.1}, {"top_p": 0.9}]),
        ("noise", noise, [*ks, *both, {"top_p": 0.3}, {"top_p": 0.97}, {"min_p": 0.2}]),
        ("peaked", noise * 9, [*ks, *both, {"top_p": 0.5}, {"top_p": 0.999}]),
    ]
    for count in (2048, 2049):  # that reach the best of the tenth block: a full list, one more
        edge = np.full(vocab, -5.0, np.float32)
        edge[4 * np.arange(count - 2)] = 10 + noise[: count - 2] / 8
        edge[8500] = 9.5
        edge[9500] = 9.0
        shapes.append((f"edge {count}", edge, [{"top_k": 10}, {"top_k": 10, "top_p": 0.9}]))
    masked = noise.copy()
    masked[np.arange(vocab) % 1024 != 7] = -np.inf  # one token a block
    shapes.append(("masked", masked, [{}, {"top_k": 3}, {"top_k": 9}, {"top_p": 0.7}]))
    return shapes


@pytest.mark.parametrize("shape", block_shapes(), ids=lambda s: s[0])
def test_draws_over_blocks_and_lists(
    device: str, shape: tuple[str, np.ndarray, list[dict[str, Any]]]
) -> None:
    """Few tokens are listed, many gone through block by block: every draw is the reference's."""
    _, logits, cuts = shape
    k, rows = Kernels(device, True), 3
    allowed = np.isfinite(logits)
    finite = np.where(allowed, logits, np.float32(-1))
    for cut in cuts:
        slots = [
            Slot(seed=7 * i + 1, settings=cut, allowed=None if allowed.all() else allowed)
            for i in range(rows)
        ]
        positions = [5, 1, 9]
        step = make_step(logits.size, slots, list(range(rows)), positions, rows)
        got = tokens(sample(k, np.tile(finite, (rows, 1)), step), positions)
        want = [
            reference.draw(slot.candidates(finite, logits.size), slot.seed, position + 1)
            for slot, position in zip(slots, positions, strict=True)
        ]
        assert got == want, cut


def test_adjusted_logits(device: str) -> None:
    """What sample_scan leaves, against the reference, with the masked at -inf."""
    rng = np.random.default_rng(2)
    logits = model_logits(rng, 2, 1500)
    settings = {"temperature": 0.7, "repetition": 1.3, "presence": 0.7, "frequency": 0.21}
    slots = [Slot(settings=settings, **full_slot(rng, 1500, logits[i])) for i in (0, 1)]
    result = sample(Kernels(device, True), logits, make_step(1500, slots, [0, 1], [1, 2], 2), 1400)
    for row in (0, 1):
        want = slots[row].candidates(logits[row], 1400)
        assert (np.isneginf(want) == np.isneginf(result.adjusted[row])).all()
        real = want > -np.inf
        assert np.allclose(result.adjusted[row][real], want[real], rtol=1e-6, atol=1e-5)


def test_counts_are_read_for_penalties_only_on_sim() -> None:
    """Without penalties, mask and bias a token costs its logit and seven words of settings."""
    require_device("sim")
    k, rng, vocab = Kernels("sim", True), np.random.default_rng(2), 2000
    logits = model_logits(rng, 1, vocab)
    words = []
    for settings in ({}, {"frequency": 0.5}):
        step = make_step(vocab, [Slot(settings=settings)], [0], [1], 1)
        p = params("sample_scan", rows=1, vocab=vocab, token_limit=vocab)
        out = [Out((1, vocab), np.float32), Out((1, 2, 8), np.float32)]
        k.run("sample_scan", p, [In(logits), *out], step)
        words.append(k.bytes_read / 4 - 2048)  # every thread reads how many rows there are
    assert words[0] <= 8 * vocab and words[1] >= words[0] + 2 * vocab


def test_limits_fall_where_they_should(device: str) -> None:
    """Exactly k tokens stay; top-p keeps the fewest that reach p; among equals the lowest ids."""
    vocab = 1100
    flat = np.ones(vocab, np.float32)  # every share is 1 / 1024 of the allowed
    allowed = np.arange(vocab) >= vocab - 1024
    halves = np.full(vocab, -60, np.float32)
    halves[[9, 4, 1050]] = np.log(np.float32([0.5, 0.25, 0.25]))
    cases = [
        (flat, {"top_k": 5}, set(range(76, 81))),
        (flat, {"top_p": 0.25}, set(range(76, 76 + 256))),
        (flat, {"top_k": 512, "top_p": 0.25}, set(range(76, 76 + 128))),
        (flat, {"top_p": 1e-12}, {76}),
        (flat, {"min_p": 1.0}, set(range(76, 1100))),
        (flat, {"min_p": 7.0, "top_k": 2}, {76, 77}),
        (halves, {"top_p": 0.49}, {9}),
        (halves, {"top_p": 0.51}, {9, 4}),
        (halves, {"top_p": 0.76}, {9, 4, 1050}),
        (halves, {"top_k": 2, "top_p": 0.99}, {9, 4}),
        (halves, {"min_p": 0.51}, {9}),
        (halves, {"min_p": 0.49}, {9, 4, 1050}),
    ]
    k, rows = Kernels(device, True), 4 if emulated(device) else 16
    for logits, settings, want in cases:
        seen: set[int] = set()
        for seed in range(1 if emulated(device) else 8):
            mask = allowed if logits is flat else None
            slots = [
                Slot(seed=1000 * seed + i, settings=settings, allowed=mask) for i in range(rows)
            ]
            positions = list(range(rows))
            step = make_step(vocab, slots, positions, positions, rows)
            seen |= set(tokens(sample(k, np.tile(logits, (rows, 1)), step), positions))
        assert seen <= want, settings
        assert len(seen) >= min(len(want), rows // 2), settings


def test_step_advances(device: str) -> None:
    """Id, position, counts and the ring of the valid rows; nothing else in Step."""
    rng = np.random.default_rng(4)
    logits = model_logits(rng, 5, 1300)
    slots = [Slot(generated=[3, 3, 5]) for _ in range(4)]
    order, positions = [2, 2, 0, 1, 3], [8, 9, 5, 70, 11]
    step = make_step(1300, slots, order, positions, 3)
    result = sample(Kernels(device, True), logits, step, ring=4)
    drawn = tokens(Result(result.adjusted, result.ring[:3], None, result.counts), positions[:3], 4)
    before = STRUCTS["Step"].from_buffer_copy(step.tobytes())
    want = STRUCTS["Step"].from_buffer_copy(step.tobytes())
    counts = step[before.counts_offset : before.prompt_counts_offset].view(np.uint32).copy()
    counts = counts.reshape(16, 1300)
    for row, token in enumerate(drawn):
        want.id[row], want.position[row] = token, positions[row] + 1
        counts[order[row], token] += 1
    assert bytes(result.step) == bytes(want)
    assert (result.counts == counts).all()
    assert all(entry is None for row in result.ring[3:] for entry in row)
    assert (result.adjusted[3:].view(np.uint32) == NONE).all()


def test_rows_together_are_rows_alone(device: str) -> None:
    k, rng = Kernels(device, False), np.random.default_rng(8)
    logits = model_logits(rng, 4, VOCAB)
    slots = [Slot(seed=i, settings=COMBINATIONS["usual"], logprobs=3) for i in range(4)]
    whole = sample(k, logits, make_step(VOCAB, slots, [0, 1, 2, 3], [9] * 4, 4))
    for row in range(4):
        alone = sample(k, logits[row : row + 1], make_step(VOCAB, slots, [row], [9], 1))
        assert bytes(alone.ring[0][1]) == bytes(whole.ring[row][1])
        assert alone.adjusted.tobytes() == whole.adjusted[row].tobytes()


@pytest.mark.parametrize("vocab", [3000, 36_000])
def test_logprobs(device: str, vocab: int) -> None:
    """Of the raw distribution over the whole vocabulary, whatever was penalised or masked."""
    rng = np.random.default_rng(6)
    logits = model_logits(rng, 4, vocab)
    logits[1] = np.round(logits[1])  # ties
    logits[2, 1024:2048] += 20  # the best lie in one block
    logits[0, -40:] += 20  # or in the last one
    logits[3] = 5
    counts = [20, 7, 20, 20]
    slots = [Slot(seed=3, logprobs=n, settings={"top_k": 9, "presence": 2.0}) for n in counts]
    slots[0].generated = [int(logits[0].argmax())]
    slots[3].logprobs = 99
    result = sample(
        Kernels(device, True), logits, make_step(vocab, slots, [0, 1, 2, 3], [0] * 4, 4), 2500
    )
    for row, count in enumerate(counts):
        entry, x = result.ring[row][1], logits[row].astype(np.float64)
        norm = x.max() + np.log(np.exp(x - x.max()).sum())
        assert entry.logprob == pytest.approx(x[entry.token] - norm, abs=2e-6, rel=1e-6)
        order = reference.by_rank(x)[:count]
        assert list(entry.top_id) == [*order, *[NONE] * (20 - count)]
        assert np.allclose(list(entry.top_logprob)[:count], x[order] - norm, rtol=1e-6, atol=2e-6)


def test_a_vocabulary_smaller_than_the_report(device: str) -> None:
    logits = np.array([[0.5, -1, 3, 0.5, -2]], np.float32)
    slots = [Slot(logprobs=20, settings={"temperature": 0.0})]
    result = sample(Kernels(device, True), logits, make_step(5, slots, [0], [0], 1))
    entry = result.ring[0][1]
    assert entry.token == 2 and list(entry.top_id)[:6] == [2, 0, 3, 1, 4, NONE]
    assert list(entry.top_logprob)[5:] == [-np.inf] * 15


@pytest.mark.parametrize("vocab", [1000, 2500])
def test_faults_are_reported_and_step_stays(device: str, vocab: int) -> None:
    """Zero or broken logits: status 2. Nothing allowed: status 3. Good rows beside them go on."""
    rng = np.random.default_rng(9)
    logits = model_logits(rng, 8, vocab)
    logits[0] = 0
    logits[1, vocab - 1] = np.nan
    logits[2, 5] = np.inf
    logits[3, vocab // 2] = -np.inf
    logits[4] = np.nan
    slots = [Slot(settings=COMBINATIONS["usual"], logprobs=5) for _ in range(8)]
    slots[5].allowed = np.zeros(vocab, bool)
    slots[6].allowed = np.arange(vocab) >= vocab - 3  # only tokens past the limit
    slots[7].allowed = np.arange(vocab) == vocab - 4
    logits[:, vocab - 4] = 0  # a zero that may be drawn
    positions = list(range(8))
    step = make_step(vocab, slots, positions, positions, 8)
    result = sample(Kernels(device, True), logits, step, vocab - 3)
    for row, status in enumerate([2, 2, 2, 2, 2, 3, 3, 1]):
        entry = result.ring[row][(row + 1) % 3]
        assert entry.status == status and entry.position == row + 1
        drawn = vocab - 4 if status == 1 else NONE
        assert entry.token == drawn
        assert (result.step.id[row], result.step.position[row]) == (
            (drawn, row + 1) if status == 1 else (7, row)
        )
        assert np.isnan(entry.logprob) == (status != 1)
        assert result.counts[row].sum() == (status == 1)


def test_one_logit_that_is_not_zero_is_enough(device: str) -> None:
    logits = np.zeros((2, 2500), np.float32)
    logits[0, 1500], logits[1, 3] = 1, -1
    slots = [Slot(settings={"temperature": 0.0}) for _ in range(2)]
    result = sample(Kernels(device, True), logits, make_step(2500, slots, [0, 1], [0, 0], 2))
    assert [entry[1].status for entry in result.ring] == [1, 1]
    assert tokens(result, [0, 0]) == [1500, 0]


def test_odd_settings_stay_in_the_table(device: str) -> None:
    """Settings that the host refuses still draw an allowed token and end."""
    rng = np.random.default_rng(10)
    logits = model_logits(rng, 8, VOCAB)
    nan, inf = float("nan"), float("inf")
    odd: list[dict[str, Any]] = [
        {"top_p": nan},
        {"min_p": nan},
        {"top_p": -1.0},
        {"temperature": 1e-38},
        {"repetition": 0.0},
        {"presence": nan},
        {"temperature": nan},
        {"frequency": inf},
    ]
    slots = [Slot(settings=s, generated=[5], bias={3: inf, 4: nan, 6: -inf}) for s in odd]
    positions = list(range(8))
    step = make_step(VOCAB, slots, positions, positions, 8)
    result = sample(Kernels(device, True), logits, step)
    for row, token in enumerate(tokens(result, positions)):
        assert token < VOCAB and result.adjusted[row, token] > -np.inf


@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 5), (3, 1024), (17, 1025), (2, 248_320), (5, 3001)]
)
def test_score(kernels: Kernels, rows: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.round(model_logits(rng, rows, vocab + 60), 1)[:, :vocab]  # ties of the best
    targets = rng.integers(0, vocab, rows).astype(np.uint32)
    targets[-1] = logits[-1].argmax()
    logprob, argmax = kernels.run(
        "score",
        params("score", rows=rows, vocab=vocab),
        [In(logits), In(targets), Out((rows,), np.float32), Out((rows,), np.uint32)],
    )
    want, best = reference.score(logits.astype(np.float64), targets)
    assert np.allclose(logprob, want, rtol=1e-6, atol=2e-6) and (argmax == best).all()


def test_score_of_nonsense(kernels: Kernels) -> None:
    logits = np.ones((3, 2000), np.float32)
    logits[0, 1999], logits[1] = np.nan, np.nan
    targets = np.array([1, 1, 2000], np.uint32)
    logprob, argmax = kernels.run(
        "score",
        params("score", rows=3, vocab=2000),
        [In(logits), In(targets), Out((3,), np.float32), Out((3,), np.uint32)],
    )
    assert np.isnan(logprob).all() and (argmax < 2000).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 17}, "17 rows, supported 1 to 16"),
        ({"vocab": 2**19 + 1}, "vocabulary of 524289, supported 1 to 524288"),
        ({"token_limit": 101}, "token limit 101 of a vocabulary of 100"),
        ({"ring": 0}, "ring of 0 entries, needs 1 or more"),
    ],
)
def test_plans_refuse(change: dict[str, int], message: str) -> None:
    p = params("sample_draw", **({"rows": 1, "vocab": 100, "token_limit": 100, "ring": 1} | change))
    with pytest.raises(LilyError, match=message):
        Kernels("cpu", True).run("sample_draw", p, [None] * 4, np.zeros(4096, np.uint8))
