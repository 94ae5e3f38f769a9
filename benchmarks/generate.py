"""Prefill and decode rates at batch 1, to be kept: two rounds of every arm, or a refusal.

    python benchmarks/generate.py MODEL [--device cuda] [--contexts 256,4096]
                                  [--arms greedy,sampled,top-p] [--mlx-python PYTHON]
                                  [--llama-bench PROGRAM --gguf FILE] [--out FILE]

An arm is an engine, a context and a way to draw; what is measured and how says lily/bench.py. Each
runs in a fresh process, and all of them twice, the second time in reverse order. Nothing is kept
when a rate drifts by 3 % or more, when tokens change from one round to the other, or when the tree
differs from its commit. Peers, where they are found: mlx-lm on the same checkpoint, llama-bench on
--gguf. checkpoint_sha is that of config.json and of every header.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily import bench
from lily.bench import Record

ROOT = Path(__file__).resolve().parent.parent
PEER_SECONDS = 3600


@dataclass(frozen=True)
class Arm:
    """One measurement: what runs it, in a process of its own."""

    engine: str
    context: int
    arm: str
    run: Callable[[], Record]


# ---- the tree -----------------------------------------------------------------------------------
def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def git_state() -> dict[str, Any]:
    """The commit, and whether the tree differs from it."""
    return {"git_sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}


# ---- arms ---------------------------------------------------------------------------------------
def lily_arm(options: argparse.Namespace, context: int, arm: str) -> Arm:
    command = [sys.executable, __file__, str(options.model), "--device", options.device]
    command += ["--activations", options.activations, "--one", f"{context},{arm}"]
    return Arm("lily", context, arm, lambda: last_record(command))


def mlx_arm(options: argparse.Namespace, version: str, context: int) -> Arm:
    script = Path(__file__).with_name("mlx_arm.py")
    sha = bench.checkpoint_sha(options.model)

    def run() -> Record:
        command = [options.mlx_python, str(script), str(options.model), str(context)]
        got = last_record(command)
        steps = got["seconds"][1:]
        return {
            "engine": "mlx-lm",
            "engine_version": version,
            "device": got["device"],
            "driver": got["driver"],
            "checkpoint_sha": sha,
            "context": context,
            "arm": "greedy",
            "prefill_tok_s": round(context / got["seconds"][0], 2),
            "decode_tok_s": round(len(steps) / sum(steps), 2),
            "step_ms": [round(1000 * s, 4) for s in steps],
            "token_digest": bench.digest(got["tokens"]),
        }

    return Arm("mlx-lm", context, "greedy", run)


def llama_arm(options: argparse.Namespace, context: int) -> Arm:
    """Its prompts are its own, so there are no tokens to compare; decode is at that depth."""
    base = [options.llama_bench, "-m", str(options.gguf), "-r", "1", "-fa", "1", "-o", "json"]

    def run() -> Record:
        (prefill,) = json.loads(output([*base, "-p", str(context), "-n", "0"]))
        (decode,) = json.loads(
            output([*base, "-p", "0", "-n", str(bench.STEPS), "-d", str(context)])
        )
        return {
            "engine": "llama.cpp",
            "engine_version": f"{decode['build_number']} ({decode['build_commit']})",
            "device": decode.get("gpu_info") or decode.get("cpu_info"),
            "driver": decode.get("backends"),
            "checkpoint_sha": None,
            "model": decode.get("model_type"),
            "context": context,
            "arm": "greedy",
            "prefill_tok_s": round(prefill["avg_ts"], 2),
            "decode_tok_s": round(decode["avg_ts"], 2),
            "step_ms": None,
            "token_digest": None,
        }

    return Arm("llama.cpp", context, "greedy", run)


def output(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PEER_SECONDS
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr}")
    return done.stdout


def last_record(command: Sequence[str]) -> Record:
    record: Record = json.loads(output(command).splitlines()[-1])
    return record


def find_mlx(python: str) -> tuple[str | None, str]:
    """(version, or None; what to say of it)"""
    ask = "import mlx_lm; print(mlx_lm.__version__)"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    except OSError as error:
        return None, f"mlx-lm: absent, {python}: {error.strerror}"
    if done.returncode != 0:
        return None, f"mlx-lm: absent, {python} cannot import mlx_lm (--mlx-python names another)"
    version = done.stdout.strip()
    return version, f"mlx-lm: {version}"


def find_llama(program: str, gguf: Path | None) -> tuple[str | None, str]:
    path = shutil.which(program)
    if path is None:
        return None, f"llama-bench: absent, there is no {program} (--llama-bench names another)"
    if gguf is None or not gguf.is_file():
        what = "--gguf names no file" if gguf is None else f"{gguf} is no file"
        return None, f"llama-bench: {path} is left out, {what}"
    return path, f"llama-bench: {path} on {gguf}"


def all_arms(options: argparse.Namespace, say: Callable[[str], None]) -> list[Arm]:
    version, about_mlx = find_mlx(options.mlx_python)
    llama, about_llama = find_llama(options.llama_bench, options.gguf)
    say(about_mlx)
    say(about_llama)
    arms = []
    for context in options.contexts:
        arms += [lily_arm(options, context, arm) for arm in options.arms]
        if version is not None:
            arms.append(mlx_arm(options, version, context))
        if llama is not None:
            arms.append(llama_arm(options, context))
    return arms


# ---- rounds -------------------------------------------------------------------------------------
def run_rounds(arms: Sequence[Arm], say: Callable[[str], None]) -> list[Record]:
    """Every arm twice, the second time in reverse order."""
    records = []
    for number, order in enumerate((list(arms), list(reversed(arms))), 1):
        for arm in order:
            start = time.perf_counter()
            record = {**arm.run(), "round": number}
            records.append(record)
            say(
                f"round {number}: {arm.engine}, {arm.context} tokens, {arm.arm}: "
                f"{record['prefill_tok_s']} and {record['decode_tok_s']} tok/s "
                f"({time.perf_counter() - start:.0f} s)"
            )
    return records


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def one(options: argparse.Namespace) -> None:
    """The child of an arm of lily's: loads, measures, prints the record."""
    context, arm = options.one.split(",")
    model = bench.load(options.model, [int(context)], options.device, options.activations)
    print(json.dumps(bench.measure(model, int(context), arm)))


def names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in bench.ARMS:
            raise argparse.ArgumentTypeError(f"arm {name!r}, known: {', '.join(bench.ARMS)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--activations", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--contexts", type=lambda t: [int(c) for c in t.split(",")], help="256,1024,4096 that fit"
    )
    parser.add_argument("--arms", default=["greedy"], type=names, help=", ".join(bench.ARMS))
    parser.add_argument("--mlx-python", default=sys.executable, help="a Python that has mlx-lm")
    parser.add_argument("--llama-bench", default="llama-bench", help="the program")
    parser.add_argument("--gguf", type=Path, help="llama-bench's model")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--git-sha", help="the commit installed, where the repository itself is not at hand"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        one(options)
        return 0
    options.contexts = bench.fitting(options.model, options.contexts)
    state = {"git_sha": options.git_sha, "dirty": False} if options.git_sha else git_state()
    if state["dirty"]:
        say("refused: the tree differs from its commit, so nobody could repeat this")
        return 1
    records = [
        {**record, **state, "command": bench.command_line("python", *sys.argv)}
        for record in run_rounds(all_arms(options, say), say)
    ]
    say(bench.table(records))
    if why := bench.unsteady(records):
        for line in why:
            say(f"refused: {line}")
        return 1
    lines = "".join(json.dumps(record) + "\n" for record in records)
    print(lines, end="")
    if options.out:
        with options.out.open("a") as f:
            f.write(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
