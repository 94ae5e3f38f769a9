"""Owns `lily bench`: prefill and decode at batch 1, measured by one fixed procedure.

Prompt token i is (i * 2654435761 mod 2^32) mod vocab. Prefill ends when the first token is on the
host and the next step submitted; then come exactly 64 decode steps, each timed. Before, the same
prompt is read once to warm up. `benchmarks/generate.py` runs the same in a fresh process per arm.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lily
from lily import _core, selftest
from lily.checkpoint import plan, read_checkpoint
from lily.engine import DEVICES, first_available, load_core
from lily.model_config import read_config
from lily.sampling import SamplingParams
from lily.stream import Progress

STEPS = 64
CONTEXTS = (256, 1024, 4096)
DRIFT = 0.03  # between two rounds, from which on a rate says nothing

# Ways to draw. The penalty is the one that the model's authors advise.
ARMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5, seed=1),
    "top-p": SamplingParams(temperature=1.0, top_k=0, top_p=0.95, presence_penalty=1.5, seed=1),
}

_WARM_STEPS = 3  # both programs of a step are recorded
_BEYOND = STEPS + 2  # tokens after the prompt: the first one, the steps, the one looked ahead at

Record = dict[str, Any]
Show = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Model:
    """A loaded model and what records say of it."""

    core: _core.Engine
    checkpoint_sha: str
    activations: str


def prompt(n: int, vocab: int) -> NDArray[np.uint32]:
    """Ids of a prompt that every engine can be given.

    >>> prompt(4, 248320).tolist()
    [0, 143281, 13666, 156947]
    """
    i = np.arange(n, dtype=np.uint64)
    return ((i * np.uint64(2654435761)) % np.uint64(1 << 32) % np.uint64(vocab)).astype(np.uint32)


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, np.uint32).tobytes()).hexdigest()


def checkpoint_sha(folder: Path) -> str:
    """Of config.json and the headers: the weights themselves are too large to read again."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            found.update(f.read(size))
    return found.hexdigest()


def fitting(folder: Path, contexts: Sequence[int] | None = None) -> list[int]:
    """The contexts to measure: those given, or of CONTEXTS what the model takes.

    ValueError where one leaves no room for the steps.
    """
    limit = read_config(folder).max_position - _BEYOND
    if contexts is None:
        return [c for c in CONTEXTS if c <= limit] or [limit]
    for context in contexts:
        if not 1 <= context <= limit:
            raise ValueError(
                f"a context is {context}, allowed 1 to {limit}: the model's {limit + _BEYOND} "
                f"tokens less {_BEYOND} for the answer"
            )
    return list(contexts)


def load(
    folder: Path,
    contexts: Sequence[int],
    device: str = "auto",
    activations: str = "bfloat16",
    progress: Progress | None = None,
) -> Model:
    """A model with room for the contexts. Needs no tokenizer."""
    if activations not in ("bfloat16", "float32"):
        raise ValueError(f"activations is {activations!r}, allowed ['bfloat16', 'float32']")
    if device not in ("auto", *DEVICES):
        raise ValueError(f"device is {device!r}, allowed {['auto', *DEVICES]}")
    loaded = plan(read_checkpoint(folder))
    core = load_core(
        loaded,
        first_available() if device == "auto" else device,
        activations == "float32",
        max(contexts) + _BEYOND,
        loaded.config.vocab,
        progress,
    )
    return Model(core, checkpoint_sha(folder), activations)


def measure(
    model: Model, context: int, arm: str, warm: bool = True, step: Callable[[], None] = lambda: None
) -> Record:
    """The record of one arm at one context. step: called after everything that is timed."""
    core, ids = model.core, prompt(context, model.core.vocab)
    options = ARMS[arm].for_core()
    if warm:
        session = _core.Session(core)
        session.set_sampling(**options)
        session.sync(ids)
        for _ in range(_WARM_STEPS):
            session.step()
    session = _core.Session(core)
    session.set_sampling(**options)
    start = time.perf_counter()
    session.sync(ids)
    session.step()  # returns with the next one on its way
    moments = [time.perf_counter()]
    tokens = []
    for _ in range(STEPS):
        tokens.append(session.step().id)
        moments.append(time.perf_counter())
        step()
    steps = [b - a for a, b in itertools.pairwise(moments)]
    return {
        "engine": "lily",
        "engine_version": lily.__version__,
        "device": f"{core.device}: {core.device_description}",
        "driver": core.device_description,
        "activations": model.activations,
        "checkpoint_sha": model.checkpoint_sha,
        "context": context,
        "arm": arm,
        "prefill_tok_s": round(context / (moments[0] - start), 2),
        "decode_tok_s": round(STEPS / sum(steps), 2),
        "step_ms": [round(1000 * s, 4) for s in steps],
        "token_digest": digest(tokens),
        "command": command_line(Path(sys.argv[0]).name, *sys.argv[1:]),
    }


def command_line(*words: str) -> str:
    """The words as typed, of absolute paths the last name: where a file lies is nobody else's
    matter, and records are shown around.

    >>> command_line("lily", "bench", "/home/nora/models/qwen", "--out=/tmp/x.jsonl")
    'lily bench qwen --out=x.jsonl'
    """
    return " ".join(re.sub(r"(^|=)/(.*/)?", r"\1", word) for word in words)


def rounds(
    model: Model, contexts: Sequence[int], arms: Sequence[str], count: int, show: Show
) -> list[Record]:
    """All arms, `count` times, every second time in reverse order; of one loaded model."""
    wanted = [(context, arm) for context in contexts for arm in arms]
    records: list[Record] = []
    done, what = 0, ""

    def step() -> None:
        nonlocal done
        done += 1
        show(done, count * len(wanted) * STEPS, what)

    for number in range(count):
        for context, arm in reversed(wanted) if number % 2 else wanted:
            what = f"{context} tokens, {arm}, {number + 1} of {count}"
            show(done, count * len(wanted) * STEPS, what)
            record = measure(model, context, arm, warm=number == 0, step=step)
            records.append({**record, "round": number + 1})
    return records


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Records of one key differ by round alone."""
    return record["engine"], record["context"], record.get("arm", "greedy")


def grouped(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def unsteady(records: Iterable[Record]) -> list[str]:
    """Why these records are not to be trusted: rates that drift, tokens that differ."""
    why = []
    for (engine, context, arm), same in grouped(records).items():
        name = f"{engine}, {context} tokens, {arm}"
        for rate in ("prefill_tok_s", "decode_tok_s"):
            values = [r[rate] for r in same]
            drift = max(values) / min(values) - 1
            if drift >= DRIFT:
                shown = " and ".join(f"{v:g}" for v in values)
                why.append(
                    f"{name}: {rate} is {shown}, {drift:.1%} apart, allowed below {DRIFT:.0%}"
                )
        if len({r["token_digest"] for r in same}) > 1:
            why.append(f"{name}: the tokens differ from round to round")
    return why


def table(records: Iterable[Record]) -> str:
    """Means of the rounds, for people.

    Beside a drawn arm its decode rate as a share of greedy's, beside another engine's the rates of
    lily in proportion to it.
    """
    groups = grouped(records)
    lines = [f"{'engine':10}{'arm':10}{'context':>8}{'prefill/s':>12}{'decode/s':>11}{'':3}ratios"]
    for (engine, context, arm), same in groups.items():
        prefill, decode = (_mean(same, r) for r in ("prefill_tok_s", "decode_tok_s"))
        notes = []
        greedy = groups.get((engine, context, "greedy"))
        if arm != "greedy" and greedy:
            notes.append(f"{decode / _mean(greedy, 'decode_tok_s'):.1%} of greedy")
        ours = groups.get(("lily", context, "greedy"))
        if engine != "lily" and ours:
            more = [_mean(ours, r) / _mean(same, r) for r in ("prefill_tok_s", "decode_tok_s")]
            notes.append(f"lily: {more[0]:.2f}x prefill, {more[1]:.2f}x decode")
        lines.append(
            f"{engine:10}{arm:10}{context:>8}{prefill:>12.1f}{decode:>11.1f}   {', '.join(notes)}"
        )
    return "\n".join(line.rstrip() for line in lines)


def report(model: str, records: Sequence[Record]) -> str:
    """What `lily bench` prints: JSON, a line for each record."""
    values = {**selftest.machine(), "model": model, "unsteady": unsteady(records)}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    inner = ",\n".join(f"  {json.dumps(record)}" for record in records)
    return "{\n" + ",\n".join([*lines, f' "records": [\n{inner}\n ]']) + "\n}"


def _mean(records: Sequence[Record], rate: str) -> float:
    return float(sum(r[rate] for r in records) / len(records))
