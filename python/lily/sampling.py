"""Owns the sampling options: their names, defaults and ranges."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

_SEEDS = 2**64


class Sampling(TypedDict, total=False):
    """The options as keywords; see SamplingParams."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn: penalties, bias, temperature, top-k, top-p, min-p, in this order.

    max_tokens: new tokens at most; None goes on to an end token or the end of the context.
    temperature: 0 takes the most likely token, with the lowest id among equals.
    top_p, top_k, min_p: 1, 0 and 0 switch them off.
    presence_penalty, frequency_penalty: subtracted for tokens generated before, once and per use.
    repetition_penalty: divides (or multiplies) the logits of tokens of the prompt and the answer.
    logit_bias: added to the logits of these ids.
    seed: None draws another one each time; equal seeds give equal tokens.

    A wrong name or type raises TypeError, a value out of its range ValueError.

    >>> SamplingParams(temperature=0.7, top_k=20).top_k
    20
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p is 1.5, allowed above 0, at most 1
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            whole("seed", self.seed, 0, _SEEDS - 1)
        whole("top_k", self.top_k, 0, 2**31 - 1)
        _real("temperature", self.temperature, 0, 100)
        _real("top_p", self.top_p, 0, 1, above=True)
        _real("min_p", self.min_p, 0, 1)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _real("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias is a {_kind(self.logit_bias)}, a mapping is needed")
        for token, bias in self.logit_bias.items():
            whole("logit_bias: a token", token, 0, 2**31 - 1)
            _real(f"logit_bias of token {token}", bias, -100, 100)

    def for_core(self) -> dict[str, Any]:
        """The keywords of the core's set_sampling; an absent seed is drawn here."""
        return {
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": int(self.top_k),
            "min_p": float(self.min_p),
            "presence": float(self.presence_penalty),
            "frequency": float(self.frequency_penalty),
            "repetition": float(self.repetition_penalty),
            "bias": [(int(token), float(bias)) for token, bias in self.logit_bias.items()],
            "seed": secrets.randbelow(_SEEDS) if self.seed is None else int(self.seed),
        }


def resolve(params: SamplingParams | None, overrides: Sampling) -> SamplingParams:
    """The given params, or the defaults, with these values in place of theirs."""
    return replace(params or SamplingParams(), **overrides)


def whole(name: str, value: object, low: int, high: int) -> None:
    """Refuses what is no integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is a {_kind(value)}, an integer is needed")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} is {value}, allowed {low} to {high}")


def _real(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {_kind(value)}, a number is needed")
    number = float(value)
    if math.isnan(number) or not low <= number <= high or (above and number == low):
        allowed = f"above {low:g}, at most {high:g}" if above else f"{low:g} to {high:g}"
        raise ValueError(f"{name} is {value}, allowed {allowed}")


def _kind(value: object) -> str:
    return type(value).__name__
