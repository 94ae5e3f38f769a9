"""Owns what the commands show besides results: bars, statistics, text that is safe to show."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.console
import rich.markup
import rich.progress

import lily
from lily.hub import fetch, is_hub_id

# Joiners of emoji and scripts: no control characters, though Python does not call them printable.
_JOINERS = "\u200c\u200d"

_WORTH_A_BAR = 1024  # tokens still to read

Progress = Callable[[int, int], None]


def printable(text: str) -> str:
    """Without control characters: a model's output must not steer a terminal.

    >>> printable("red: \\x1b[31m, a bell: \\a, lines\\n")
    'red: [31m, a bell: , lines\\n'
    """
    return "".join(c for c in text if c.isprintable() or c in "\n\t" or c in _JOINERS)


def read_json(file: Path) -> Any:
    """The contents of a JSON file; ValueError names it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def load(
    model: str,
    device: str,
    activations: str,
    max_context: int | None,
    revision: str | None,
) -> lily.Engine:
    """Downloads and loads a model, each with a bar of bytes when somebody is looking."""
    folder: str | Path = model
    if is_hub_id(model):
        folder, revision = download(model, revision), None
    with bytes_bar("loading") as progress:
        return lily.Engine.load(
            folder,
            device=device,
            activations=activations,
            max_context=max_context,
            revision=revision,
            progress=progress,
        )


def download(model: str, revision: str | None) -> Path:
    """The folder of a model; of a hub id with a bar."""
    if not is_hub_id(model):
        return fetch(model, revision=revision)
    with bytes_bar("downloading") as progress:
        return fetch(model, revision=revision, progress=progress)


def stats(done: lily.Completion) -> None:
    """A line about an answer, for a person at a terminal."""
    console = _console()
    if not console.is_terminal:
        return
    usage, times = done.usage, done.timings
    thought = f" ({usage.reasoning_tokens} of reasoning)" if usage.reasoning_tokens else ""
    cached = f" ({usage.cached_tokens} known)" if usage.cached_tokens else ""
    console.out(
        f"prompt: {usage.prompt_tokens} tokens{cached}, {times.prompt_per_second:.0f}/s · "
        f"answer: {usage.completion_tokens} tokens{thought}, {times.answer_per_second:.1f}/s · "
        f"{done.finish_reason}",
        style="dim",
        highlight=False,
    )


@contextmanager
def reading_bar() -> Iterator[Progress]:
    """A bar of prompt tokens: it comes with the first part of a long one and goes at its end."""
    console = _console()
    bars: list[rich.progress.Progress] = []

    def show(done: int, total: int) -> None:
        if not console.is_terminal:
            return
        if not bars and total - done >= _WORTH_A_BAR:
            bar = rich.progress.Progress(
                rich.progress.TextColumn("reading"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            bar.add_task("reading", total=total)
            bar.start()
            bars.append(bar)
        if bars:
            bars[0].update(rich.progress.TaskID(0), completed=done)
            if done == total:
                bars.pop().stop()

    try:
        yield show
    finally:
        if bars:
            bars.pop().stop()


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Says in a line what is being done, when somebody is looking."""
    console = _console()
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield lambda what: status.update(rich.markup.escape(what))


@contextmanager
def steps_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar of steps (done, in all, of what), when somebody is looking."""
    console = _console()
    if not console.is_terminal:
        yield lambda done, total, what: None
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=rich.markup.escape(what)
        )


def note(text: str) -> None:
    """Lines beside a result, for a person at a terminal."""
    console = _console()
    if console.is_terminal:
        console.out(text, highlight=False)


def verdict(passed: int, failed: list[str]) -> None:
    """The end of a self test, for a person at a terminal."""
    console = _console()
    if not console.is_terminal:
        return
    if not failed:
        console.print(f"[green]all {passed} checks passed[/]")
        return
    console.print(f"[red]{len(failed)} of {passed + len(failed)} checks failed:[/]")
    for name in failed:
        console.out(f"  {name}", highlight=False)


@contextmanager
def bytes_bar(what: str) -> Iterator[Progress | None]:
    """A bar of bytes, when somebody is looking."""
    console = _console()
    if not console.is_terminal:
        yield None
        return
    columns = (
        rich.progress.TextColumn(what),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _console() -> rich.console.Console:
    return rich.console.Console(file=sys.stderr)
