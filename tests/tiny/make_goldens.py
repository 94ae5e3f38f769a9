"""Owns the goldens: questions of every task and the greedy answers of the packaged model to them.

python make_goldens.py     writes goldens.json
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import encode
import evaluate
import held_out

import data
import lily

GOLDENS = Path(__file__).resolve().parent / "goldens.json"
COUNTS = {
    "addition": 3, "subtraction": 2, "multiplication": 1, "word problem": 1, "comparing": 1,
    "copying": 3, "counting": 2, "sorting": 2, "recall": 1, "recall 1k": 1, "facts": 3,
    "reading": 1, "json": 2, "tool call": 3, "tool answer": 2, "story": 2,
}  # fmt: skip
# The likeliest token leads by this much in every step (nats): rounding on another device, some
# 1e-4 in exact mode, cannot make it another one.
LEAD = 0.01


def ask(engine: lily.Engine, question: dict[str, Any], **options: Any) -> lily.Completion:
    """The greedy answer to a question of the goldens."""
    if "prompt" in question:
        return engine.generate(question["prompt"], temperature=0, max_tokens=400, **options)
    return engine.chat(
        question["messages"],
        tools=question["tools"],
        thinking=question["thinking"],
        temperature=0,
        max_tokens=400,
        **options,
    )


def as_json(done: lily.Completion) -> dict[str, Any]:
    return {
        "reasoning": done.reasoning,
        "text": done.text,
        "calls": [[call.name, call.arguments] for call in done.tool_calls],
        "finish": done.finish_reason,
        "tokens": [int(token) for token in done.tokens],
    }


def question_of(sample: data.Sample) -> dict[str, Any]:
    if sample.raw is not None:
        return {"prompt": sample.raw[0]}
    return {
        "messages": sample.messages[:-1],
        "tools": sample.tools,
        "thinking": sample.thinking,
    }


def asks(sample: data.Sample) -> bool:
    """Whether it asks for what its task is: stories without a beginning and questions about one
    do not."""
    if sample.raw is not None:
        return sample.raw[0] != ""
    return sample.task != "story" or len(sample.messages[-1]["content"]) > 200


def lead(done: lily.Completion) -> float:
    """The smallest distance of the first from the second over all steps."""
    return min(step[0][1] - step[1][1] for step in done.top_logprobs)


def main() -> None:
    samples = held_out.samples(encode.Encoder(), 0.5, seed=2)
    random.Random(1).shuffle(samples)
    found: list[dict[str, Any]] = []
    with lily.Engine.load(device="cpu", activations="float32") as engine:
        for task, count in COUNTS.items():
            forms: list[tuple[bool, bool]] = []  # with thinking, as plain text: not all of one
            for sample in (s for s in samples if s.task == task):
                question = question_of(sample)
                form = (sample.thinking, sample.raw is not None)
                if len(forms) == count or forms.count(form) > (count - 1) // 2 or not asks(sample):
                    continue
                done = ask(engine, question, logprobs=True, top_logprobs=2)
                if lead(done) >= LEAD and (not sample.exact or evaluate.is_right(sample, done)):
                    forms.append(form)
                    found.append({"task": task, **question, "answer": as_json(done)})
    if len(found) != sum(COUNTS.values()):
        raise RuntimeError(f"{len(found)} goldens, wanted {sum(COUNTS.values())}")
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")
    print(len(found), sum(len(g["answer"]["tokens"]) for g in found), "tokens")


if __name__ == "__main__":
    main()
