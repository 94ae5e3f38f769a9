"""Owns the judging of a checkpoint through lily: greedy answers, teacher-forced losses, stories.

    python evaluate.py FOLDER [--device cpu] [--share 1] [--exact] [--answers FILE]
    python evaluate.py FOLDER --seed 2 --only copying addition   other questions, of these tasks
    python evaluate.py FOLDER --cheap [--device cpu]      what a test repeats, in exact mode

prints one JSON object. Nothing of it needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import encode
import held_out
import numpy as np
import stories

import data
import lily

STORIES = 20
# The cheap part: so many held-out samples of these tasks, of at most so many tokens.
CHEAP = [
    (data.arithmetic, "addition", 20), (data.copying, "copying", 20), (data.facts, "facts", 10),
    (data.tools, "tool call", 8), (data.tools, "tool answer", 8), (data.story, "story", 6),
]  # fmt: skip
CHEAP_TOKENS = 400


def answer(engine: lily.Engine, sample: data.Sample) -> lily.Completion:
    """The greedy answer to all but the last message."""
    if sample.raw is not None:
        return engine.generate(sample.raw[0] or "\n", max_tokens=600)
    return engine.chat(
        sample.messages[:-1],
        tools=sample.tools,
        thinking=sample.thinking,
        temperature=0,
        max_tokens=600,
    )


def calls(done: lily.Completion) -> list[Any]:
    return [(c.name, c.arguments) for c in done.tool_calls]


def is_right(sample: data.Sample, done: lily.Completion) -> bool:
    """Whether this is the one right answer, word for word."""
    wanted = sample.messages[-1]
    expected = [
        (c["function"]["name"], c["function"]["arguments"]) for c in wanted.get("tool_calls", ())
    ]
    return done.text == wanted["content"] and calls(done) == expected


def is_valid(sample: data.Sample, done: lily.Completion) -> bool:
    """Whether it is one call of a declared tool with arguments of its schema."""
    import jsonschema

    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in sample.tools}
    made = calls(done)
    if len(made) != 1 or made[0][0] not in schemas:
        return False
    schema = {**schemas[made[0][0]], "additionalProperties": False}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(made[0][1]))


def judge(
    engine: lily.Engine, samples: Sequence[data.Sample], kept: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Per task: share of right answers and their count; of tool calls also the valid ones."""
    right: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        if not sample.exact:
            continue
        done = answer(engine, sample)
        right[sample.task].append(is_right(sample, done))
        if sample.task == "tool call":
            right["tool call, valid"].append(is_valid(sample, done))
        if kept is not None and not right[sample.task][-1]:
            wanted = sample.messages[-1]
            kept.append({
                "task": sample.task, "question": sample.messages[-2]["content"],
                "wanted": wanted.get("tool_calls") or wanted["content"],
                "answer": calls(done) or done.text, "reasoning": done.reasoning,
                "finish": done.finish_reason,
            })  # fmt: skip
    return {
        task: {"right": round(sum(hits) / len(hits), 4), "of": len(hits)}
        for task, hits in sorted(right.items())
    }


def scored(engine: lily.Engine, document: encode.Encoded) -> tuple[Any, Any]:
    """(log-probability, likeliest id) of each token after the first."""
    ids = np.array(document.ids, np.uint32)
    session = engine.session()
    parts = [
        session.score(ids[at : at + 512][: len(ids) - 1 - at], ids[at + 1 : at + 513])
        for at in range(0, len(ids) - 1, 512)
    ]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def perplexity(engine: lily.Engine, documents: Sequence[encode.Encoded]) -> dict[str, Any]:
    """Of what the model has to say, per task and over all."""
    sums: dict[str, list[float]] = defaultdict(list)
    for document in documents:
        if len(document.ids) > encode.ROW:
            continue
        own = np.array(document.weights[1:]) == encode.OWN
        sums[document.task] += scored(engine, document)[0][own].tolist()
    every = [x for part in sums.values() for x in part]
    return {
        "over all": round(math.exp(-sum(every) / len(every)), 4),
        "tokens": len(every),
        **{task: round(math.exp(-sum(x) / len(x)), 4) for task, x in sorted(sums.items())},
    }


def tell(engine: lily.Engine, count: int = STORIES) -> dict[str, Any]:
    """Sampled stories: does each name its subject, end by itself, and not go in circles?"""
    subjects = random.Random(3).sample(data.w.ANIMALS, count)
    told = [
        engine.generate(
            f"Tell me a story about {data.w.a(subject)}.", temperature=0.8, seed=i, max_tokens=800
        )
        for i, subject in enumerate(subjects)
    ]
    return {
        "stories": count,
        "name their subject": sum(
            bool(re.search(rf"\b{s}\b", d.text)) for s, d in zip(subjects, told, strict=True)
        ),
        "end by themselves": sum(d.finish_reason == "stop" for d in told),
        "without four words three times": sum(not stories.repeats(d.text) for d in told),
        "texts": [d.text.strip() for d in told],
    }


def cheap(engine: lily.Engine) -> dict[str, Any]:
    """Right answers per task and the perplexity, of a few short samples: some seconds on a CPU."""
    encoder, rng = encode.Encoder(), random.Random(5)
    samples: list[data.Sample] = []
    for make, task, count in CHEAP:
        end = len(samples) + count
        while len(samples) < end:
            sample = data.draw_of(make, rng, held=True)
            if sample.task == task and len(encoder.encode(sample).ids) <= CHEAP_TOKENS:
                samples.append(sample)
    return {
        "answers": judge(engine, samples),
        "perplexity": perplexity(engine, [encoder.encode(s) for s in samples]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the questions")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="these, and no stories")
    parser.add_argument("--exact", action="store_true", help="activations in float32")
    parser.add_argument("--cheap", action="store_true")
    parser.add_argument("--answers", type=Path, help="where the wrong answers go")
    a = parser.parse_args()
    if a.cheap:
        with lily.Engine.load(a.folder, device=a.device, activations="float32") as engine:
            print(json.dumps(cheap(engine), indent=1))
        return
    started = time.monotonic()
    encoder = encode.Encoder()
    samples = held_out.samples(encoder, a.share, a.seed)
    samples = [s for s in samples if not a.only or s.task in a.only]
    wrong: list[dict[str, Any]] = []
    activations = "float32" if a.exact else "bfloat16"
    with lily.Engine.load(a.folder, device=a.device, activations=activations) as engine:
        result = {
            "device": engine.device,
            "activations": activations,
            "share": a.share,
            "seed": a.seed,
            "answers": judge(engine, samples, wrong),
            "perplexity": perplexity(engine, [encoder.encode(s) for s in samples]),
        }
        if not a.only:
            result["stories"] = tell(engine)
    result["seconds"] = round(time.monotonic() - started)
    print(json.dumps(result, indent=1))
    if a.answers:
        a.answers.write_text("".join(json.dumps(line) + "\n" for line in wrong))


if __name__ == "__main__":
    main()
