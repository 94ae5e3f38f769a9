"""Counts of lily's own launches at the 35B's shapes, and what a simple formula predicts from them.

    python benchmarks/roofline.py [--contexts 256,4096,32768,131072] [--out FILE]

Per token and per prefill chunk: dispatches, levels (launches that have to follow one another),
bytes and flops; see recorded.py. Predicted decode on Apple GPUs, for both costs c of a level:

    t = bytes / (0.91 * bandwidth) + levels * c        c = 4.6 and 2.5 µs

A prediction is no measurement: nobody has run lily on a Mac. The same formula is checked against
what others measured on an M5 Max, its error printed beside. --out takes the counts as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import recorded
from generate import git_state

SHARE = 0.91  # of the nominal bandwidth that reading in order reaches
LEVEL_COSTS = (4.6e-6, 2.5e-6)
CONTEXTS = (256, 4096, 32768, 131072)
CHUNKS = (256, 1024, 4096)

# Nominal GB/s, as Apple states them. The weights take 19.5 GB: machines of 24 GB and more.
CHIPS = {
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max, 30 cores": 300,
    "M3 Max, 40 cores": 400,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max, 32 cores": 410,
    "M4 Max, 40 cores": 546,
    "M5": 153,
    "M5 Pro": 307,
    "M5 Max, 32 cores": 460,
    "M5 Max, 40 cores": 614,
}


@dataclass(frozen=True)
class Peer:
    """What somebody else measured on an M5 Max (614 GB/s), and the counts that go with it."""

    name: str
    context: int
    mb: float  # bytes of a token, from the sizes of weights, state and cache
    levels: int
    tok_s: float


# Perplexity's Lily: 595 dispatches in 415 levels, 605 in 425 beyond 256 tokens. mlx-lm: about 1,826
# launches, each counted as a level, of the same weights.
PEERS = (
    Peer("upstream Lily", 256, 1802, 415, 194.7),
    Peer("upstream Lily", 1024, 1818, 425, 193.3),
    Peer("upstream Lily", 4096, 1881, 425, 182.8),
    Peer("upstream Lily", 8192, 1965, 425, 180.5),
    Peer("upstream Lily", 16384, 2133, 425, 167.0),
    Peer("upstream Lily", 32768, 2468, 425, 151.1),
    Peer("upstream Lily", 65536, 3139, 425, 125.4),
    Peer("upstream Lily", 131072, 4481, 425, 92.7),
    Peer("mlx-lm", 256, 1802, 1826, 148.5),
)
PEER_GB_S = 614


def predicted(bytes_: float, levels: int, gb_s: float, level_cost: float) -> float:
    """Tokens a second."""
    return 1 / (bytes_ / (SHARE * gb_s * 1e9) + levels * level_cost)


def errors(level_cost: float) -> Iterator[tuple[Peer, float, float]]:
    """(peer, predicted tok/s, its relative error) of each measurement by others."""
    for peer in PEERS:
        rate = predicted(peer.mb * 1e6, peer.levels, PEER_GB_S, level_cost)
        yield peer, rate, rate / peer.tok_s - 1


def decode_counts(contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One record a context."""
    known: dict[Any, recorded.Touched] = {}
    rows = []
    for context in contexts:
        step = recorded.record(context).step
        by_op = recorded.touched(step, context, known)
        whole = recorded.in_all(by_op)
        rows.append(
            {
                "pass": "decode",
                "context": context,
                "dispatches": len(step),
                "levels": recorded.levels(step),
                "flops": sum(launch.flops for launch in step),
                "bytes": whole.traffic,
                "read_once": dict(whole.read_once),
                "written_once": dict(whole.written_once),
                "read_every_access": dict(whole.read),
                "ops": {
                    name: {
                        "launches": n,
                        "read": t.read_once.total(),
                        "written": t.written_once.total(),
                    }
                    for name, (n, t) in by_op.items()
                },
            }
        )
    return rows


def prefill_counts(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """One record a chunk of a prompt of that size; bytes are those declared, without KV pages."""
    rows = []
    for size in sizes:
        for index, chunk in enumerate(recorded.record(size).chunks):
            rows.append(
                {
                    "pass": "prefill",
                    "prompt": size,
                    "chunk": index,
                    "dispatches": len(chunk),
                    "levels": recorded.levels(chunk),
                    "flops": sum(launch.flops for launch in chunk),
                    "declared_bytes": recorded.declared_bytes(chunk),
                }
            )
    return rows


def report(decode: Sequence[dict[str, Any]], prefill: Sequence[dict[str, Any]]) -> str:
    lines = ["Decode, per token, as recorded (bytes: each once per launch, counted by sim)", ""]
    lines.append(f"{'context':>9}{'dispatches':>12}{'levels':>8}{'GB':>8}{'GFLOP':>8}")
    for r in decode:
        lines.append(
            f"{r['context']:>9}{r['dispatches']:>12}{r['levels']:>8}{r['bytes'] / 1e9:>8.3f}"
            f"{r['flops'] / 1e9:>8.1f}"
        )
    lines += ["", "of which MB", ""]
    kinds = list(decode[0]["read_once"])
    lines.append(f"{'context':>9}" + "".join(f"{k:>13}" for k in kinds))
    for r in decode:
        for what, name in (
            ("read_once", "read"),
            ("written_once", "written"),
            ("read_every_access", "all reads"),
        ):
            cells = "".join(f"{r[what].get(k, 0) / 1e6:>13.1f}" for k in kinds)
            lines.append(f"{r['context']:>9}{cells}  {name}")
    lines += [
        "",
        "Prefill, per chunk, as recorded (bytes as declared, without keys and values)",
        "",
    ]
    lines.append(f"{'prompt':>9}{'chunk':>7}{'dispatches':>12}{'levels':>8}{'GB':>8}{'TFLOP':>8}")
    for r in prefill:
        lines.append(
            f"{r['prompt']:>9}{r['chunk']:>7}{r['dispatches']:>12}{r['levels']:>8}"
            f"{r['declared_bytes'] / 1e9:>8.2f}{r['flops'] / 1e12:>8.2f}"
        )
    lines += ["", "The formula against what others measured on an M5 Max, tok/s", ""]
    lines.append(f"{'':15}{'context':>8}{'measured':>10}" + _costs("predicted, error"))
    for rows in zip(*(errors(c) for c in LEVEL_COSTS)):
        peer = rows[0][0]
        cells = "".join(f"{rate:>14.1f} {error:>+7.1%}" for _, rate, error in rows)
        lines.append(f"{peer.name:15}{peer.context:>8}{peer.tok_s:>10.1f}{cells}")
    lines += [
        "c = 4.6 µs was fitted to upstream's first row, 2.5 µs is what others read from mlx-lm's",
        "rates; the other rows are the check. Older chips may pay more for a launch: an M1 Ultra",
        "6.7 µs by that reading.",
        "",
        "PREDICTED decode of lily, tok/s; nobody has measured it. The left number of each pair is",
        "with c = 4.6 µs, the right one with 2.5 µs",
        "",
    ]
    lines.append(f"{'':18}{'GB/s':>6}" + "".join(f"{r['context']:>15}" for r in decode))
    for chip, gb_s in CHIPS.items():
        cells = []
        for r in decode:
            slow, fast = (predicted(r["bytes"], r["levels"], gb_s, c) for c in LEVEL_COSTS)
            cells.append(f"{slow:>7.0f} / {fast:>5.0f}")
        lines.append(f"{chip:18}{gb_s:>6}" + "".join(f"{c:>15}" for c in cells))
    return "\n".join(lines)


def _costs(what: str) -> str:
    return "".join(f"{f'{what}, {c * 1e6:.1f} µs':>29}" for c in LEVEL_COSTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    decode = decode_counts([int(c) for c in a.contexts.split(",")])
    prefill = prefill_counts(CHUNKS)
    print(report(decode, prefill))
    if a.out:
        about = {**git_state(), "device": "recorded as for metal, bytes counted by sim"}
        records = [about | r for r in (*decode, *prefill)]
        a.out.write_text("".join(json.dumps(r) + "\n" for r in records))


if __name__ == "__main__":
    main()
