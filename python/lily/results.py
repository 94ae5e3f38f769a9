"""Owns what a generation gives back: Token, Completion and their parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lily.messages import ToolCall
from lily.parser import Kind

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Token:
    """One step of a stream.

    id: the token drawn; None for a further piece of the same token, which happens where one token
    completes text of two kinds. text: the characters it completes, possibly none. kind:
    "reasoning", "content" or "tool"; a tool call comes as one piece: tool_call, and its arguments
    as JSON in text. logprob, top_logprobs: with the option logprobs only. finish_reason: set on
    the last one: "stop" for an end token (whose id this is; its own text is left out) or a stop
    string (which stop_string tells), "tool_calls" if the answer has any, "length" when max_tokens
    or the context is used up.
    """

    id: int | None
    text: str
    kind: Kind = "content"
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    tool_call: ToolCall | None = None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. cached_tokens: of the prompt, those that a session held already."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, and tokens per second, of a generation."""

    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0
    prompt_per_second: float = 0.0
    answer_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer; `str()` of it is the text.

    text: the content, without reasoning and tool calls. tokens: all ids drawn, without the end
    token. logprobs, top_logprobs: one entry per token, with the option logprobs only.
    finish_reason: as in Token, or "cancelled" for what a stream had given when it was left.
    Two are equal if their answers are, however long they took.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    usage: Usage = field(default_factory=Usage, compare=False)
    timings: Timings = field(default_factory=Timings, compare=False)

    def __str__(self) -> str:
        return self.text
