"""Owns the held-out questions that training and report are judged by."""

from __future__ import annotations

import random
from typing import Any

import encode

import data

HELD_OUT: list[tuple[str, Any, int]] = [
    ("", data.arithmetic, 500), ("", data.copying, 200), ("", data.tools, 300), ("", data.facts, 150),
    ("", data.sorting, 100), ("", data.counting, 100), ("", data.reading, 100), ("", data.as_json, 100),
    ("", data.story, 100), ("", data.talk, 60), ("", data.comparing, 40), ("", data.recall, 60),
    ("recall 1k", lambda rng: data.recall(rng, rng.randint(850, 1500), 1), 48),
    ("recall 2k", lambda rng: data.recall(rng, rng.randint(1800, 3000), 1), 48),
]  # fmt: skip
LENGTHS = {"recall 1k": (950, 1050), "recall 2k": (1900, 2047)}


def samples(encoder: encode.Encoder, share: float = 1.0, seed: int = 1) -> list[data.Sample]:
    """So much of the held-out questions; the same for equal arguments."""
    rng = random.Random(seed)
    found: list[data.Sample] = []
    for task, make, count in HELD_OUT:
        low, high = LENGTHS.get(task, (0, encode.ROW))
        end = len(found) + max(2, int(count * share))
        while len(found) < end:
            sample = data.draw_of(make, rng, held=True)
            if low <= len(encoder.encode(sample).ids) <= high:
                sample.task = task or sample.task
                found.append(sample)
    return found


def rows(share: float) -> encode.Rows:
    encoder = encode.Encoder()
    return encode.pack([encoder.encode(s) for s in samples(encoder, share)])
