"""Owns stop strings: text is held back while it may begin one, and cut before it."""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOPS = 16
MAX_STOP_CHARS = 256


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The option `stop` as a tuple; TypeError and ValueError name what is wrong."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} strings, allowed are {MAX_STOPS}")
    for i, text in enumerate(stops):
        if not isinstance(text, str):
            raise TypeError(f"stop[{i}] is a {type(text).__name__}, a string is needed")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise ValueError(
                f"stop[{i}] has {len(text)} characters, allowed are 1 to {MAX_STOP_CHARS}"
            )
    return stops


class StopStrings:
    """Passes text on up to the first stop string, which may lie across pieces.

    The first is the one that is complete first; of those complete at the same place, the longest.
    So the cut does not depend on how the text was divided. Meant for the content of an answer:
    a stop string inside reasoning or a tool call ends nothing.

    >>> stops = StopStrings(["</answer>"])
    >>> stops.push("42</ans"), stops.push("wer> and more"), stops.hit
    ('42', '', '</answer>')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stop_strings(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far is certain to come before any stop string; "" after a hit."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        certain = min((_may_begin(text, s) for s in self._stops), default=len(text))
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held


def _may_begin(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `stop`."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return at
        at += 1
    return len(text)
