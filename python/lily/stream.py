"""Owns the loop of a generation: from prompt ids to Tokens, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.errors import LilyError
from lily.grammar import Grammar, everything_but
from lily.messages import ToolCall
from lily.parser import Kind, OutputParser, Piece
from lily.pool import SessionPool, Timeline, is_full
from lily.results import Completion, FinishReason, Timings, Token, Usage
from lily.sampling import SamplingParams
from lily.stops import StopStrings, stop_strings
from lily.tokenizer import Tokenizer

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """A checked generation. limit: tokens of the answer at most. parser: None for a raw text.

    grammar: of the content. thinks: the answer begins with reasoning, which think_end ends.
    """

    ids: NDArray[np.uint32]
    snapshot_at: tuple[int, ...]
    options: SamplingParams
    limit: int
    chunk: int
    vocab: int
    parser: OutputParser | None = None
    grammar: Grammar | None = None
    thinks: bool = False
    think_end: int | None = None


class Stream(Iterator[Token]):
    """The Tokens of one answer as they come.

    Leaving the loop and dropping it, close() and Ctrl-C end the work; cancel() does so from
    another thread. `completion` is what came so far.
    """

    def __init__(
        self,
        pool: SessionPool,
        tokenizer: Tokenizer,
        request: Request,
        progress: Progress | None = None,
    ) -> None:
        # The generator knows nothing of this object, so that dropping it ends the generator.
        self._generation = _Generation(pool, tokenizer, request, progress)
        self._tokens = self._generation.run()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """Ends it; its session is free again."""
        self._tokens.close()

    def cancel(self) -> None:
        """From any thread: ends it within a step; the thread that reads it gets Cancelled."""
        self._generation.cancel()

    @property
    def completion(self) -> Completion:
        """What came so far; finish_reason is "cancelled" unless it came to its end."""
        return self._generation.completion()


class _Generation:
    """The state behind a Stream."""

    def __init__(
        self, pool: SessionPool, tokenizer: Tokenizer, request: Request, progress: Progress | None
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._request = request
        self._progress = progress
        self._cancelled = threading.Event()
        self._timeline: Timeline | None = None
        self._grammar = request.grammar
        self._text = _Writer(tokenizer, request)
        self._drawn: list[_core.SampledToken] = []
        self._pieces: list[Piece] = []
        self._reason: FinishReason = "cancelled"
        self._cached = 0
        self._times = [0.0, 0.0, 0.0]  # begin, prompt read, last token

    def cancel(self) -> None:
        self._cancelled.set()
        timeline = self._timeline
        if timeline is not None:
            timeline.session.cancel()

    def completion(self) -> Completion:
        begin, read, last = self._times
        tokens = tuple(token.id for token in self._drawn)
        options, prompt = self._request.options, len(self._request.ids)
        reasoning = 0
        if self._request.thinks:
            end = self._request.think_end
            reasoning = tokens.index(end) + 1 if end in tokens else len(tokens)
        return Completion(
            "".join(p.text for p in self._pieces if p.kind == "content"),
            tokens,
            self._reason,
            "".join(p.text for p in self._pieces if p.kind == "reasoning"),
            self._calls(),
            self._text.stop_string,
            tuple(token.logprob for token in self._drawn) if options.logprobs else (),
            tuple(tuple(token.top) for token in self._drawn) if options.top_logprobs else (),
            Usage(prompt, len(tokens), self._cached, reasoning),
            Timings(
                read - begin,
                last - read,
                _rate(prompt - self._cached, read - begin),
                _rate(len(tokens), last - read),
            ),
        )

    def _calls(self) -> tuple[ToolCall, ...]:
        return tuple(piece.call for piece in self._pieces if piece.call is not None)

    def run(self) -> Generator[Token]:
        self._times = [time.monotonic()] * 3
        broken = False
        try:
            self._prefill()
            self._times[1] = self._times[2] = time.monotonic()
            yield from self._answer()
        except (_core.Cancelled, KeyboardInterrupt):
            raise
        except Exception:
            broken = True  # whatever is wrong with its session, nobody else shall have it
            raise
        finally:
            timeline, self._timeline = self._timeline, None
            if timeline is not None and not broken:
                self._pool.give(timeline)

    def _prefill(self) -> None:
        request = self._request
        demand = len(request.ids) + request.limit
        for last_try in (False, True):
            self._timeline = self._pool.take(request.ids, demand)
            self._timeline.session.set_sampling(**request.options.for_core())
            try:
                self._cached = self._timeline.prefill(
                    request.ids, request.snapshot_at, request.chunk, self._report
                )
                return
            except LilyError as error:
                if last_try or not is_full(error):
                    raise
                self._timeline = None
                self._pool.drop_idle()

    def _report(self, position: int) -> None:
        self._check_cancelled()
        if self._progress is not None:
            self._progress(position, len(self._request.ids))

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _core.Cancelled("the stream was cancelled")

    def _answer(self) -> Generator[Token]:
        request = self._request
        assert self._timeline is not None
        session = self._timeline.session
        thinks = request.thinks
        ends = self._tokenizer.stop_ids
        # An answer of a certain form cannot end before it has begun.
        barred = everything_but(sorted(ends), request.vocab) if self._grammar and thinks else None
        while True:
            self._check_cancelled()
            if self._grammar and not thinks:
                drawn = session.step(self._grammar.mask())
            else:
                drawn = session.step(barred) if barred is not None else session.step()
            self._times[2] = time.monotonic()
            if drawn.id in ends:
                yield from self._finish(drawn, [], "stop")
                return
            self._drawn.append(drawn)
            pieces = self._text.push(drawn.id)
            if self._grammar and not thinks:
                self._grammar.push(drawn.id)
            if thinks and drawn.id == request.think_end:
                thinks = False
                if self._grammar:  # what follows is content, whatever it looks like
                    pieces += self._text.end_parsing()
            complete = self._grammar is not None and not thinks and self._grammar.finished
            if complete or self._text.stop_string is not None:
                yield from self._finish(drawn, pieces, "stop")
                return
            if len(self._drawn) == request.limit:
                yield from self._finish(drawn, pieces, "length")
                return
            yield from self._emit(drawn, pieces, None)

    def _finish(
        self, drawn: _core.SampledToken, pieces: list[Piece], reason: FinishReason
    ) -> Generator[Token]:
        """The last tokens, with what was held back until now."""
        pieces = pieces + self._text.finish(reason)
        if self._text.stop_string is not None:
            reason = "stop"
        if reason == "stop" and (self._calls() or any(p.call for p in pieces)):
            reason = "tool_calls"
        yield from self._emit(drawn, pieces, reason)

    def _emit(
        self, drawn: _core.SampledToken, pieces: list[Piece], reason: FinishReason | None
    ) -> Generator[Token]:
        self._pieces += pieces
        if reason is not None:
            self._reason = reason
        shown = pieces or [Piece(self._text.kind, "")]
        options = self._request.options
        for i, piece in enumerate(shown):
            first, last = i == 0, i == len(shown) - 1
            yield Token(
                drawn.id if first else None,
                piece.text,
                piece.kind,
                drawn.logprob if first and options.logprobs else None,
                tuple(drawn.top) if first and options.logprobs else (),
                piece.call,
                reason if last else None,
                self._text.stop_string if last and reason is not None else None,
            )


class _Writer:
    """From ids to pieces of text: characters, kinds, stop strings; each holds back what it must."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._characters = tokenizer.stream()
        self._parser = request.parser
        self._stops = StopStrings(stop_strings(request.options.stop))
        self._think_end = request.think_end
        self.kind: Kind = "reasoning" if request.thinks else "content"  # of what comes next

    @property
    def stop_string(self) -> str | None:
        return self._stops.hit

    def push(self, token: int) -> list[Piece]:
        pieces = self._stop(self._parse(self._characters.push(token), token))
        if token == self._think_end:
            self.kind = "content"
        return pieces

    def end_parsing(self) -> list[Piece]:
        """What comes from now on is content."""
        assert self._parser is not None
        pieces, _ = self._parser.finish("length")
        self._parser = None
        return self._stop(pieces)

    def finish(self, reason: FinishReason) -> list[Piece]:
        if self._stops.hit is not None:
            return []
        pieces = self._parse(self._characters.finish(), None)
        if self._parser is not None:
            pieces += self._parser.finish(reason)[0]
        return self._stop(pieces) + self._content(self._stops.finish())

    def _parse(self, text: str, token: int | None) -> list[Piece]:
        if self._parser is None:
            return self._content(text)
        return self._parser.push(text, token)

    def _stop(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces up to the first stop string of the content."""
        passed: list[Piece] = []
        for piece in pieces:
            if self._stops.hit is not None:
                break
            self.kind = piece.kind
            if piece.kind == "content":
                passed += self._content(self._stops.push(piece.text))
            else:
                # Text on both sides of a call is not one text.
                passed += [*self._content(self._stops.finish()), piece]
        return passed

    def _content(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
