"""Owns the command `lily`. Results on stdout, all else on stderr; bars are for terminals."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import lily
from lily import bench, selftest, terminal
from lily.describe import describe
from lily.engine import DEVICES
from lily.hub import PACKAGED_MODEL
from lily.repl import Talk, talk

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PACKAGED = str(PACKAGED_MODEL)
Model = Annotated[
    str,
    typer.Option(
        envvar="LILY_MODEL",
        show_default="the small one of the package",
        help="Folder of a checkpoint, or a hub id.",
    ),
]
Device = Annotated[
    str, typer.Option(help="auto (the first of metal, cuda, cpu that is here) or a name.")
]
Activations = Annotated[str, typer.Option(help="bfloat16, or float32: exact, slower.")]
MaxContext = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer; less takes less memory.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="New tokens at most; without it, to the model's end.")
]
Seed = Annotated[int | None, typer.Option(help="Equal seeds draw equal tokens.")]
Temperature = Annotated[
    float | None, typer.Option(help="0: the likeliest token; 1: as the model has it.")
]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest with this share in all.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many of the likeliest; 0: all.")]
MinP = Annotated[
    float | None, typer.Option(help="Leave out what has less than this part of the best.")
]
Presence = Annotated[
    float | None, typer.Option(help="Against tokens of the answer, once; -2 to 2.")
]
Frequency = Annotated[float | None, typer.Option(help="Against tokens of the answer, per use.")]
Repetition = Annotated[float | None, typer.Option(help="Against tokens of all text; 1: off.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
]
Schema = Annotated[
    Path | None, typer.Option(help="File of a JSON schema that the answer has to match.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lily {lily.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Runs Qwen3.6-35B-A3B and its family on this machine."""


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The text to go on with; - reads it from stdin.")],
    model: Model = PACKAGED,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    repetition_penalty: Repetition = None,
    seed: Seed = None,
    stop: Stop = None,
    schema: Schema = None,
    device: Device = "auto",
    activations: Activations = "bfloat16",
    max_context: MaxContext = None,
    revision: Revision = None,
) -> None:
    """Continues TEXT and prints what is new, as it comes. Greedy, unless told otherwise."""
    # First, so that a bad option does not cost a long load.
    params = lily.SamplingParams(
        **_given(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
            response_format=_form(schema),
        )
    )
    prompt = sys.stdin.read() if text == "-" else text
    with terminal.load(model, device, activations, max_context, revision) as engine:
        show = terminal.printable if sys.stdout.isatty() else str
        with terminal.reading_bar() as progress:
            stream = engine.stream(prompt, params, progress=progress)
            try:
                for token in stream:
                    print(show(token.text), end="", flush=True)
            finally:  # also after Ctrl-C
                print()
        terminal.stats(stream.completion)


@app.command()
def chat(
    model: Model = PACKAGED,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    think: Annotated[bool, typer.Option(help="Reason before the answer.")] = True,
    tools: Annotated[Path | None, typer.Option(help="File of tools, as JSON.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    repetition_penalty: Repetition = None,
    seed: Seed = None,
    stop: Stop = None,
    schema: Schema = None,
    device: Device = "auto",
    activations: Activations = "bfloat16",
    max_context: MaxContext = None,
    revision: Revision = None,
) -> None:
    """A talk in the terminal; /help lists its commands. Piped input is one message.

    Options that are not given are those that the model advises.
    """
    given = _given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        response_format=_form(schema),
    )
    lily.SamplingParams(**given)
    declared = terminal.read_json(tools) if tools else []
    with terminal.load(model, device, activations, max_context, revision) as engine:
        talk(Talk(engine, given, system=system, thinking=think, tools=declared))


@app.command()
def info(
    model: Annotated[
        str,
        typer.Argument(
            show_default="the small one of the package",
            help="Folder of a checkpoint, or a hub id.",
        ),
    ] = PACKAGED,
    revision: Revision = None,
    activations: Activations = "bfloat16",
) -> None:
    """Says what MODEL is, where it can run and what memory it takes; loads no weights."""
    print(describe(model, revision, activations))


@app.command()
def devices() -> None:
    """Lists the devices and why one is missing."""
    for status in lily.devices():
        print(f"{status.name:6} {'yes' if status.available else 'no':4} {status.description}")


@app.command("selftest")
def check_device(
    device: Device = "auto",
    to: Annotated[
        Path | None, typer.Option("--json", help="File that the report goes to, too.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens, small buffers; sim is always quick.")
    ] = False,
) -> None:
    """Tests a device: every kernel, a small model, speeds; prints a report to send us."""
    if device not in ("auto", *DEVICES):
        raise ValueError(f"device is {device!r}, allowed {['auto', *DEVICES]}")
    with terminal.working() as show:
        report = selftest.run(device, show, quick)
    print(report.text())
    if to is not None:
        to.write_text(report.text() + "\n")
    terminal.verdict(report.passed, [failure["check"] for failure in report.failures])
    if report.failures:
        raise typer.Exit(1)


@app.command("bench")
def measure_speed(
    model: Model = PACKAGED,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the prompts, with commas between.",
            show_default="256,1024,4096, as far as the model takes them",
        ),
    ] = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Measure drawn tokens, too, not only the likeliest.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, max=9, help="How often; from two on, drift shows.")
    ] = 2,
    device: Device = "auto",
    activations: Activations = "bfloat16",
    revision: Revision = None,
) -> None:
    """Measures how fast prompts are read and answers written; prints JSON to paste."""
    folder = terminal.download(model, revision)
    lengths = bench.fitting(folder, None if contexts is None else _lengths(contexts))
    with terminal.bytes_bar("loading") as progress:
        loaded = bench.load(folder, lengths, device, activations, progress)
    with terminal.steps_bar() as show:
        arms = list(bench.ARMS) if sampled else ["greedy"]
        records = bench.rounds(loaded, lengths, arms, rounds, show)
    terminal.note("\n".join([bench.table(records), *bench.unsteady(records)]))
    print(bench.report("the packaged model" if model == PACKAGED else Path(model).name, records))


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"contexts is {text!r}, numbers with commas between are needed") from None


def _given(**values: Any) -> Any:
    """The options that were given: what is not has its own default, which differs by command."""
    return {name: value for name, value in values.items() if value is not None}


def _form(schema: Path | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": terminal.read_json(schema)}}


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
