"""Owns the idle sessions of an engine: a prompt takes the one that holds most of it already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.errors import LilyError

KEPT = 2  # idle sessions: a conversation and an agent beside it

_BLOCK = 256  # tokens of one KV block

Ids = NDArray[np.uint32]


@dataclass
class Timeline:
    """A session, and the prefixes of which it keeps snapshots."""

    session: _core.Session
    marks: list[Ids] = field(default_factory=list)

    def reusable(self, ids: Ids) -> int:
        """How many leading tokens of `ids` need no work: a snapshot's, or all that it holds."""
        held = self.session.tokens
        kept = set(self.session.snapshots)
        best = max((len(m) for m in self.marks if len(m) in kept and _begins(m, ids)), default=0)
        if _begins(held[:-1], ids):  # the last token drawn may not be computed yet
            best = max(best, len(held) - 1)
        return best

    def prefill(
        self, ids: Ids, snapshot_at: Sequence[int], chunk: int, report: Callable[[int], None]
    ) -> int:
        """Makes the session hold `ids`; how many were there. Calls report(position) on the way.

        It stops at the same positions whatever was there, so that what was reused is, bit for bit,
        what would have been computed: only an answer that is read again is not.
        """
        ready = self.reusable(ids)
        stops = sorted({*range(chunk, len(ids), chunk), *snapshot_at, len(ids)})
        reused: int | None = None
        for stop in stops:
            if stop <= ready and stop < len(ids):
                continue
            kept = [stop] if stop in snapshot_at else []
            had = self.session.sync(ids[:stop], snapshot_at=kept)
            reused = had if reused is None else reused
            if kept:
                self._mark(ids[:stop])
            report(stop)
        return reused or 0

    def _mark(self, prefix: Ids) -> None:
        kept = set(self.session.snapshots)
        self.marks = [m for m in self.marks if len(m) in kept and not np.array_equal(m, prefix)]
        self.marks.append(prefix.copy())


class SessionPool:
    """Hands out sessions, one to a caller at a time, and keeps a few idle ones."""

    def __init__(self, core: _core.Engine) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._idle: list[Timeline] = []  # the longest unused first
        self._open = True
        table = core.memory()
        space = table.limit - table.weights - table.prefill_scratch
        self._capacity = max(0, space) // max(1, table.kv_per_block) * _BLOCK

    def take(self, ids: Ids, demand: int) -> Timeline:
        """A session for this prompt, which may grow to `demand` tokens."""
        with self._lock:
            best = max(self._idle, key=lambda timeline: timeline.reusable(ids), default=None)
            if best is not None and best.reusable(ids) > 0:
                self._idle.remove(best)
            else:
                best = None
            # The others may have to go, for all draw their memory from one budget.
            room = self._capacity - demand
            keep = KEPT if best is not None else KEPT - 1
            while self._idle and (len(self._idle) > keep or self._held() > room):
                self._idle.pop(0)
        return best or Timeline(_core.Session(self._core))

    def give(self, timeline: Timeline) -> None:
        """Takes a session back, as the most recently used."""
        with self._lock:
            if self._open:
                self._idle.append(timeline)
                del self._idle[:-KEPT]

    def drop_idle(self) -> None:
        """Frees the memory of all idle sessions."""
        with self._lock:
            self._idle.clear()

    def close(self) -> None:
        """Keeps none from now on."""
        self._open = False
        self.drop_idle()

    def _held(self) -> int:
        return sum(timeline.session.position + _BLOCK for timeline in self._idle)


def is_full(error: LilyError) -> bool:
    """Whether the KV memory is used up, so that dropping idle sessions may help."""
    return str(error).startswith("KV cache: ")


def _begins(prefix: Ids, ids: Ids) -> bool:
    """Whether `ids` begins with `prefix` and goes on."""
    return len(prefix) < len(ids) and np.array_equal(prefix, ids[: len(prefix)])
