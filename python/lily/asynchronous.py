"""Owns the asyncio side of streams: each step runs in a thread, a cancelled task ends the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from lily.results import Completion, Token
from lily.stream import Stream

T = TypeVar("T")


async def follow(stream: Stream) -> AsyncGenerator[Token]:
    """The tokens of a stream, each when it is asked for."""
    try:
        while (token := await _in_thread(stream, lambda: next(stream, None))) is not None:
            yield token
    finally:
        stream.close()


async def finish(stream: Stream) -> Completion:
    """What comes of a stream that is read to its end."""

    def read() -> Completion:
        for _ in stream:
            pass
        return stream.completion

    return await _in_thread(stream, read)


async def _in_thread(stream: Stream, work: Callable[[], T]) -> T:
    """Runs `work`, which reads the stream; if the task is cancelled, first ends the stream."""
    job = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        # The thread must be out of the stream before anyone closes it.
        while not job.done():
            stream.cancel()
            await asyncio.wait([job], timeout=0.02)
        job.exception()
        raise
