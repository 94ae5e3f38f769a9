"""A session that plays back given ids, so that a test decides what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily.pool import Timeline

CALM = Path(__file__).resolve().parent / "data/mlx4_calm"
END = 2002  # <|im_end|>

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=place>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


class _Drawn:
    def __init__(self, token: int) -> None:
        self.id, self.logprob, self.top = token, -1.0, [(token, -1.0)]


class Script:
    """As much of a Session as a stream uses."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self.tokens = np.zeros(0, np.uint32)
        self.snapshots: list[int] = []
        self.steps = 0
        self.masks: list[Any] = []

    @property
    def position(self) -> int:
        return len(self.tokens)

    def set_sampling(self, **options: object) -> None:
        self.options = options

    def sync(self, ids: Any, *, snapshot_at: Sequence[int] = ()) -> int:
        self.tokens = np.array(ids, np.uint32)
        return 0

    def step(self, allowed: Any = None) -> _Drawn:
        self.masks.append(allowed)
        token = self._ids[self.steps]
        self.steps += 1
        return _Drawn(token)

    def cancel(self) -> None:
        pass


def say(monkeypatch: pytest.MonkeyPatch, engine: lily.Engine, ids: Sequence[int]) -> Script:
    """The next answers of this engine are these ids, from their beginning."""
    script = Script(ids)
    timeline = Timeline(script)  # type: ignore[arg-type]
    monkeypatch.setattr(engine._pool, "take", lambda prompt, demand: timeline)
    monkeypatch.setattr(engine._pool, "give", lambda given: None)
    return script


def bytewise(engine: lily.Engine, text: str) -> list[int]:
    """The ids of `text`, a token for every byte; control tokens stay whole."""
    tokenizer = engine.tokenizer
    single = {
        tokenizer.token_bytes(i): i for i in range(2000) if len(tokenizer.token_bytes(i)) == 1
    }
    ids: list[int] = []
    at = 0
    for literal in tokenizer.literals(text):
        ids += [single[bytes([b])] for b in text[at : literal.start()].encode()]
        ids.append(tokenizer.added[literal[0]])
        at = literal.end()
    return ids + [single[bytes([b])] for b in text[at:].encode()]
