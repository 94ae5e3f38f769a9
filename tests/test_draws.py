"""Draws follow the distribution: chi-square against the reference for each combination of options."""

from __future__ import annotations

import ctypes
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
import reference
from conftest import DEVICES, require_device
from kernel_harness import GUARD, STRUCTS, Kernels, emulated, params
from test_sample import Slot, make_step

CALM = Path(__file__).resolve().parent / "data/mlx4_calm"
ROWS = 16
TIMEOUT = 3600

# Every cut alone and all together, each with and without what changes the logits before.
CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"top_k": 60, "top_p": 0.95},
    {"top_k": 60, "min_p": 0.05},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.05},
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "presence": 0.7, "frequency": 0.3, "repetition": 1.2, "bias": True},
    {"temperature": 1.0, "mask": True},
]


def draws(logits: np.ndarray, slot: Slot, count: int, device: str = "cpu") -> np.ndarray:
    """`count` tokens from one distribution: rows differ in position only, which each draw advances."""
    k, vocab, ring = Kernels(device, True), logits.size, -(-count // ROWS)
    step = make_step(vocab, [slot], [0] * ROWS, [ring * row for row in range(ROWS)], ROWS)
    size = ctypes.sizeof(STRUCTS["Sampled"])
    rows = np.tile(logits, (ROWS, 1))
    padded = np.zeros((step.size + 15) // 16 * 16, np.uint8)
    padded[: step.size] = step
    shapes = [rows, np.zeros_like(rows), np.zeros((ROWS, -(-vocab // 1024), 8), np.float32)]
    placed = [k.place(array) for array in shapes]
    out = np.zeros((ROWS, ring, size // 4), np.uint32)
    held = k.place(out)
    views = [(b, GUARD, a.size, "f32") for b, a in zip(placed, shapes, strict=True)]
    steps = [(k.place(padded), GUARD, padded.size // 4, "u32")]
    limit = {"rows": ROWS, "vocab": vocab, "token_limit": vocab}

    def raw(op: str, **more: int) -> np.ndarray:
        return np.frombuffer(bytes(params(op, **limit, **more)), np.uint8)

    # One scan: the penalties stay those of the beginning, whatever is drawn.
    k.core.run([("sample_scan", raw("sample_scan"), views, steps, [])])
    last = (held, GUARD, out.size, "u32")
    draw = ("sample_draw", raw("sample_draw", ring=ring), [*views, last], steps, [])
    k.core.run([draw], True, ring)
    kind = np.dtype(
        {
            "names": ["status", "token"],
            "formats": ["<u4", "<u4"],
            "offsets": [STRUCTS["Sampled"].status.offset, STRUCTS["Sampled"].token.offset],
            "itemsize": size,
        }
    )
    drawn = k.fetch(held, out).reshape(-1).view(kind)
    assert (drawn["status"] == 1).all()
    return drawn["token"][:count].astype(np.int64)


def excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square as standard deviations (Wilson and Hilferty); rare ids count together."""
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    common = int((expected >= 8).sum())
    observed, wanted = counts[:common], expected[:common]
    if expected[common:].sum() >= 8:
        observed = np.append(observed, counts[common:].sum())
        wanted = np.append(wanted, expected[common:].sum())
    degrees = len(wanted) - 1
    if degrees < 1:
        return 0.0
    chi = float(((observed - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * degrees)
    return float(((chi / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


def check(
    vocab: int,
    count: int,
    cut: dict[str, Any],
    change: dict[str, Any],
    seed: int,
    device: str = "cpu",
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab) * 2.5).astype(np.float32)
    settings = {k: v for k, v in {**cut, **change}.items() if k not in ("bias", "mask")}
    top = np.argsort(-logits)
    slot = Slot(seed=seed + 77, settings=settings)
    if "presence" in change:
        slot.prompt = top[:40:3].tolist()
        slot.generated = [*top[1:30:2].tolist(), *top[1:9:2].tolist()]
    if change.get("bias"):
        slot.bias = {int(top[i]): float(v) for i, v in ((5, 1.5), (0, -2.0), (400, 3.0))}
    if change.get("mask"):
        slot.allowed = rng.random(vocab) < 0.4
    kept = slot.candidates(logits, vocab)
    weights = np.exp(kept - kept.max())
    expected = weights / weights.sum() * count
    counts = np.bincount(draws(logits, slot, count, device), minlength=vocab)
    off = excess(counts, expected)
    print(f"{device} {cut} {change}: {off:+.2f} deviations, p = {math.erfc(off / 2**0.5) / 2:.4f}")
    assert not counts[expected == 0].any(), "an id that was cut off"
    assert counts.sum() == count
    # 32 combinations: beyond 4.5 deviations by chance is a matter of 1e-4.
    assert abs(off) < 4.5


@pytest.mark.parametrize(("cut", "change"), list(product(CUTS, CHANGES)))
def test_draws_follow_the_distribution(cut: dict[str, Any], change: dict[str, Any]) -> None:
    check(3000, 8_000, cut, change, CUTS.index(cut) * 10 + CHANGES.index(change))


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(("cut", "change"), list(product(CUTS, CHANGES)))
def test_many_draws_from_the_full_vocabulary(
    device: str, cut: dict[str, Any], change: dict[str, Any]
) -> None:
    """The same draws on each device (see test_sample.py): a GPU has all of them in a minute."""
    if emulated(device):
        pytest.skip(f"{device} would take days")
    seed = CUTS.index(cut) * 10 + CHANGES.index(change) + 500
    check(248_320, 100_000, cut, change, seed, device)


def test_the_check_would_see_a_small_fault() -> None:
    """A distribution at temperature 1.05 is not that at 1."""
    logits = (np.random.default_rng(1).standard_normal(3000) * 2.5).astype(np.float32)
    counts = np.bincount(draws(logits, Slot(seed=5), 8_000), minlength=3000)

    def wanted(temperature: float) -> np.ndarray:
        kept = reference.candidates(logits.astype(np.float64), temperature=temperature)
        weights = np.exp(kept - kept.max())
        return weights / weights.sum() * 8_000

    assert abs(excess(counts, wanted(1.0))) < 4.5 < excess(counts, wanted(1.1))


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_the_first_of_one_is_greedy_at_any_temperature(device: str, activations: str) -> None:
    """In a text, and in a chat as it streams."""
    limit = 3 if emulated(device) else 8
    with lily.Engine.load(CALM, device=device, activations=activations) as engine:
        text = engine.generate("Once", max_tokens=limit)
        answer = engine.chat("Why?", thinking=False, max_tokens=limit, temperature=0)
        for params in ({"top_k": 1, "temperature": 1.5}, {"top_p": 0.0, "temperature": 1.5}):
            assert engine.generate("Once", max_tokens=limit, **params) == text
            stream = engine.stream_chat("Why?", thinking=False, max_tokens=limit, **params)
            assert tuple(token.id for token in stream) == stream.completion.tokens == answer.tokens


@pytest.mark.parametrize("other", [name for name in DEVICES if name != "cpu"])
def test_equal_seeds_give_equal_text_on_every_device(other: str) -> None:
    require_device(other)
    texts = []
    for device in ("cpu", other):
        with lily.Engine.load(CALM, device=device, activations="float32") as engine:
            warm = engine.generate("Once", temperature=1.2, top_p=0.9, seed=3, max_tokens=6)
            plain = engine.chat("Why?", thinking=False, seed=4, max_tokens=6)
            form = {"type": "regex", "regex": "[a-z]{4}"}
            held = engine.generate("Once", temperature=1.0, seed=5, response_format=form)
            stream = engine.stream_chat("Why?", seed=6, stop="e", max_tokens=6, logprobs=True)
            pieces = [(token.id, token.text, token.kind) for token in stream]
            texts.append((warm, plain, held, pieces, stream.completion.finish_reason))
    assert texts[0] == texts[1]
