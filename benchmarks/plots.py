"""Tables and plots of the kept results: decode and prefill against the context.

    python benchmarks/plots.py [FILE ...] [--to FOLDER]

Without files all of benchmarks/results. A table per device goes to stdout, with --to also two SVG
files per device. Rounds are averaged; series differ by engine, way to draw and commit. Anchors are
others' numbers on that device, not measured by generate.py, and marked so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).resolve().parent / "results"
RATES = {"decode_tok_s": "decode, tok/s", "prefill_tok_s": "prefill, tok/s"}

# (part of the device's name, series, rates by context): random weights of the same shapes, batch 1.
ANCHORS: tuple[tuple[str, str, dict[str, dict[int, float]]], ...] = (
    (
        "NVIDIA H200",
        "llama.cpp, CUDA, ggml 0.25.3, Q4_0 (anchor)",
        {
            "decode_tok_s": {256: 265, 4096: 260, 32768: 243},
            "prefill_tok_s": {256: 7179, 1024: 9333, 4096: 10823, 16384: 11282},
        },
    ),
    (
        "NVIDIA H200",
        "mlx-lm 0.32.2, mlx-cuda 0.32.4 (anchor)",
        {
            "decode_tok_s": {256: 54, 4096: 28},
            "prefill_tok_s": {256: 341, 1024: 313, 4096: 273},
        },
    ),
)

_COLOURS = ("#1b6ca8", "#c8553d", "#4f8a4c", "#8b5fa8", "#b58b00", "#555555")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 420, 70, 330, 40, 50


@dataclass(frozen=True)
class Series:
    name: str
    points: dict[int, float]  # by context
    anchor: bool = False


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of rates in those files."""
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if "decode_tok_s" in record]


def devices(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["device"] for record in records))


def series(records: Sequence[Mapping[str, Any]], device: str, rate: str) -> list[Series]:
    """Of one device: what was measured, then the anchors."""
    found: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if record["device"] != device:
            continue
        name = f"{record['engine']} {record['engine_version']}"
        if record["engine"] == "lily":
            name += f", {record['git_sha'][:7]}"
        if record.get("arm", "greedy") != "greedy":
            name += f", {record['arm']}"
        found.setdefault(name, {}).setdefault(record["context"], []).append(record[rate])
    measured = [
        Series(name, {c: sum(v) / len(v) for c, v in sorted(points.items())})
        for name, points in found.items()
    ]
    return measured + [
        Series(name, rates[rate], True) for part, name, rates in ANCHORS if part in device
    ]


def table(lines: Sequence[Series], title: str) -> str:
    """In Markdown: a row a series, a column a context."""
    contexts = sorted({c for s in lines for c in s.points})
    rows = [[title, *(f"{c:,}" for c in contexts)], ["---", *["---:"] * len(contexts)]]
    for s in lines:
        cells = (f"{s.points[c]:,.0f}" if c in s.points else "–" for c in contexts)
        rows.append([s.name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def svg(lines: Sequence[Series], title: str) -> str:
    """Contexts on a logarithmic axis, rates from zero on; anchors are dashed."""
    contexts = sorted({c for s in lines for c in s.points})
    top = _above(max(v for s in lines for v in s.points.values()))
    low, high = math.log2(contexts[0]), math.log2(contexts[-1])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(context: int) -> float:
        share = (math.log2(context) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + share * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - value / top * (bottom - _TOP), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for i in range(6):
        value = top * i / 5
        out.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y(value)}" y2="{y(value)}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:,.0f}</text>'
        )
    for c in contexts:
        out.append(f'<text x="{x(c)}" y="{bottom + 18}" text-anchor="middle">{c:,}</text>')
    out.append(
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 38}" text-anchor="middle">'
        "tokens of context</text>"
    )
    for i, s in enumerate(lines):
        colour, dash = _COLOURS[i % len(_COLOURS)], ' stroke-dasharray="6 4"' if s.anchor else ""
        places = [(x(c), y(v)) for c, v in s.points.items()]
        path = " ".join(f"{a},{b}" for a, b in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        out += [f'<circle cx="{a}" cy="{b}" r="3" fill="{colour}"/>' for a, b in places]
        at, key = _TOP + 10 + 20 * i, right + 20
        out.append(
            f'<line x1="{key}" x2="{key + 24}" y1="{at}" y2="{at}" stroke="{colour}"{dash}/>'
            f'<text x="{key + 30}" y="{at + 4}">{escape(s.name)}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _above(value: float) -> float:
    """The next round number: 1, 2, 2.5 or 5 times a power of ten, times five steps."""
    step = 10 ** math.floor(math.log10(value / 5))
    return next(5 * step * f for f in (1, 2, 2.5, 5, 10) if 5 * step * f >= value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--to", type=Path)
    a = parser.parse_args(arguments)
    records = read(a.files or sorted(RESULTS.glob("*.jsonl")))
    for device in devices(records):
        print(f"## {device}\n")
        for rate, title in RATES.items():
            lines = series(records, device, rate)
            print(table(lines, title) + "\n")
            if a.to:
                a.to.mkdir(parents=True, exist_ok=True)
                slug = re.sub(r"\W+", "-", device.split(",")[0]).strip("-").lower()
                name = f"{slug}-{rate.split('_')[0]}.svg"
                (a.to / name).write_text(svg(lines, f"{title}: {device}"))


if __name__ == "__main__":
    main()
