"""Owns the options of a generation: their names, defaults and ranges."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from lily.errors import CheckpointError
from lily.safetensors_header import read_json_object
from lily.stops import stop_strings

MAX_TOP_LOGPROBS = 20  # what the core reports with a token

_SEEDS = 2**64
# What generation_config.json may say about sampling, by our names, which are its own.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")


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
    stop: str | Sequence[str] | None
    logprobs: bool
    top_logprobs: int
    response_format: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn: penalties, bias, temperature, top-k, top-p, min-p, in this order.

    max_tokens: new tokens at most; None goes on to an end token or the end of the context.
    temperature: 0 takes the most likely token, with the lowest id among equals.
    top_p, top_k, min_p: 1, 0 (or -1) and 0 switch them off; top_p 0 takes the most likely token.
    presence_penalty, frequency_penalty: subtracted for tokens generated before, once and per use.
    repetition_penalty: divides (or multiplies) the logits of tokens of the prompt and the answer.
    logit_bias: added to the logits of these ids.
    seed: None draws another one each time; equal seeds give equal tokens.
    stop: one or several strings that end the answer and are left out of it.
    logprobs, top_logprobs: whether tokens come with their log-probability, and with how many of
    the likeliest others, of the model's own distribution.
    response_format: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}
    or {"type": "regex", "regex": …}; the answer (not the reasoning) then matches it.

    A wrong name or type raises TypeError, a value out of its range ValueError.

    >>> SamplingParams(temperature=0.7, top_k=20).top_k
    20
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p is 1.5, allowed 0 to 1
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
    stop: str | Sequence[str] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            whole("seed", self.seed, 0, _SEEDS - 1)
        whole("top_k", self.top_k, -1, 2**31 - 1)
        _real("temperature", self.temperature, 0, 100)
        _real("top_p", self.top_p, 0, 1)
        _real("min_p", self.min_p, 0, 1)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _real("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias is a {_kind(self.logit_bias)}, a mapping is needed")
        for token, bias in self.logit_bias.items():
            whole("logit_bias: a token", token, 0, 2**31 - 1)
            _real(f"logit_bias of token {token}", bias, -100, 100)
        if self.stop is not None and not isinstance(self.stop, Sequence):
            raise TypeError(f"stop is a {_kind(self.stop)}, a string or several are needed")
        stop_strings(self.stop)
        if not isinstance(self.logprobs, bool):
            raise TypeError(f"logprobs is a {_kind(self.logprobs)}, a bool is needed")
        whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, which needs logprobs=True")
        if self.response_format is not None and not isinstance(self.response_format, Mapping):
            raise TypeError(
                f"response_format is a {_kind(self.response_format)}, a mapping is needed"
            )

    def for_core(self) -> dict[str, Any]:
        """The keywords of the core's set_sampling; an absent seed is drawn here."""
        return {
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": max(0, int(self.top_k)),
            "min_p": float(self.min_p),
            "presence": float(self.presence_penalty),
            "frequency": float(self.frequency_penalty),
            "repetition": float(self.repetition_penalty),
            "logprobs": int(self.top_logprobs),
            "bias": [(int(token), float(bias)) for token, bias in self.logit_bias.items()],
            "seed": secrets.randbelow(_SEEDS) if self.seed is None else int(self.seed),
        }


def resolve(
    params: SamplingParams | None, overrides: Sampling, defaults: SamplingParams | None = None
) -> SamplingParams:
    """The given params, else the defaults, with these values in place of theirs."""
    return replace(params or defaults or SamplingParams(), **overrides)


def checkpoint_defaults(folder: Path) -> SamplingParams:
    """What generation_config.json advises; plain defaults, which are greedy, where it is absent.

    >>> checkpoint_defaults(Path("tests/data/mlx4_calm")).top_k
    20
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    advice = read_json_object(file)
    values: Any = {name: advice[name] for name in _DEFAULTED if advice.get(name) is not None}
    if advice.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file.name}: {error}") from None


def plain_defaults(advised: SamplingParams) -> SamplingParams:
    """The options of chats without thinking.

    The family's checkpoints hold the advice for thinking; for plain answers its model card has a
    cooler one. Any other advice is somebody's own and holds for both. Nothing here penalises: what
    helps a plain answer against repetition spoils reasoning, code and JSON.

    >>> plain_defaults(SamplingParams(temperature=1.0, top_p=0.95, top_k=20)).temperature
    0.7
    >>> plain_defaults(SamplingParams(temperature=0.9)).temperature
    0.9
    """
    if advised == SamplingParams(temperature=1.0, top_p=0.95, top_k=20):
        return replace(advised, temperature=0.7, top_p=0.8)
    return advised


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
