"""Owns the command `lily`: generate and devices. Results on stdout, all else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import typer

import lily

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lily {lily.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Runs Qwen3.6-35B-A3B and its family on this machine."""


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The text to go on with.")],
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    max_tokens: Annotated[
        int | None, typer.Option(help="New tokens at most; without it, to the model's end.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Equal seeds draw equal tokens.")] = None,
    device: Annotated[str, typer.Option(help="auto, metal, cuda, cpu or sim.")] = "auto",
    activations: Annotated[str, typer.Option(help="bfloat16, or float32: exact.")] = "bfloat16",
) -> None:
    """Continues TEXT and prints what is new, as it comes."""
    # First, so that a bad option does not cost a long load.
    params = lily.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with _load(model, device, activations) as engine:
        show = _printable if sys.stdout.isatty() else str
        stream = engine.stream(text, params)
        try:
            for token in stream:
                print(show(token.text), end="", flush=True)
        finally:  # also after Ctrl-C
            print()


@app.command()
def devices() -> None:
    """Lists the devices and why one is missing."""
    for status in lily.devices():
        print(f"{status.name:6} {'yes' if status.available else 'no':4} {status.description}")


def _load(model: Path, device: str, activations: str) -> lily.Engine:
    """Loads with a bar of bytes when somebody is looking."""

    def load(progress: Callable[[int, int], None] | None) -> lily.Engine:
        return lily.Engine.load(model, device=device, activations=activations, progress=progress)

    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        return load(None)
    columns = (
        rich.progress.TextColumn("loading"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        return load(lambda done, total: bar.update(task, completed=done, total=total))


def _printable(text: str) -> str:
    """Without control characters: a model's output must not steer a terminal."""
    return "".join(char for char in text if char in "\n\t" or char.isprintable())


def main() -> None:
    """Runs the command line. Exit codes: 1 failure, 2 wrong use, 130 interrupted."""
    sys.exit(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:  # an option that does not exist or does not parse
        return _fail(error.format_message(), error.exit_code)
    except ValueError as error:
        return _fail(str(error), 2)
    except (lily.LilyError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        print(flush=True)
        return 130


def _fail(message: str, code: int) -> int:
    if message:  # none: the help was shown instead
        print("lily:", " ".join(message.split()), file=sys.stderr)
    return code
