"""Prefill and decode speed of one checkpoint at batch 1: one JSON line per context.

    python benchmarks/generate.py MODEL [--device cuda] [--contexts 256,4096] [--steps 64]
                                  [--out FILE]

Prompt token i is (i * 2654435761 mod 2^32) mod vocab. Prefill is timed until the logits of the last
prompt token are there; decode over exactly --steps greedy steps after one warm-up step. The first
context is run once before it is timed. checkpoint_sha is that of config.json and of every header.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import lily
from lily import _core
from lily.checkpoint import plan, read_checkpoint
from lily.engine import load_core

ROOT = Path(__file__).resolve().parent.parent


def prompt(n: int, vocab: int) -> np.ndarray:
    i = np.arange(n, dtype=np.uint64)
    return ((i * np.uint64(2654435761)) % np.uint64(1 << 32) % np.uint64(vocab)).astype(np.uint32)


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def git_state() -> dict[str, object]:
    """The commit, and whether the tree differs from it."""
    return {"git_sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}


def checkpoint_sha(folder: Path) -> str:
    """Of config.json and the headers: the weights themselves are too large to read again."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            digest.update(f.read(size))
    return digest.hexdigest()


def measure(engine: _core.Engine, context: int, steps: int) -> tuple[float, float, list[int]]:
    """(prefill seconds, decode seconds, drawn tokens)."""
    session = _core.Session(engine)
    ids = prompt(context, engine.vocab)
    start = time.perf_counter()
    session.sync(ids)
    prefill = time.perf_counter() - start
    session.step()
    start = time.perf_counter()
    tokens = [session.step().id for _ in range(steps)]
    return prefill, time.perf_counter() - start, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--activations", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--git-sha", help="the commit installed, where the repository itself is not at hand"
    )
    a = parser.parse_args()
    contexts = [int(c) for c in a.contexts.split(",")]
    loaded = plan(read_checkpoint(a.model))
    limit = max(contexts) + a.steps + 2
    start = time.perf_counter()
    engine = load_core(loaded, a.device, a.activations == "float32", limit, loaded.config.vocab)
    seconds = time.perf_counter() - start
    weights = engine.memory().weights
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"load {seconds:.1f} s, {weights / seconds / 1e9:.2f} GB/s; weights {weights:,} B, "
        f"allocated {engine.allocated:,} B, peak RSS {peak:,} B",
        file=sys.stderr,
    )
    measure(engine, contexts[0], 4)
    for context in contexts:
        prefill, decode, tokens = measure(engine, context, a.steps)
        record = {
            "engine": "lily",
            "engine_version": lily.__version__,
            **({"git_sha": a.git_sha, "dirty": False} if a.git_sha else git_state()),
            "device": f"{engine.device}: {engine.device_description}",
            "driver": engine.device_description,
            "checkpoint_sha": checkpoint_sha(a.model),
            "context": context,
            "prefill_tok_s": round(context / prefill, 2),
            "decode_tok_s": round(a.steps / decode, 2),
            "token_digest": hashlib.sha256(np.array(tokens, np.uint32).tobytes()).hexdigest(),
            "command": " ".join(["python", *sys.argv]),
        }
        line = json.dumps(record)
        print(line, flush=True)
        if a.out:
            with a.out.open("a") as f:
                f.write(line + "\n")


if __name__ == "__main__":
    main()
