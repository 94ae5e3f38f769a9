"""The packaged model: its goldens on every device, its form, what the command says with it."""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import evaluate
import jsonschema
import make_goldens

import data
import lily
from kernel_harness import emulated
from lily.hub import PACKAGED_MODEL
from test_cli import Terminal
from text_harness import WEATHER

REPORT = Path(evaluate.__file__).parent / "REPORT.md"
GOLDENS: list[dict[str, Any]] = json.loads(make_goldens.GOLDENS.read_text())


@functools.cache
def engine(device: str, activations: str = "float32") -> lily.Engine:
    return lily.Engine.load(device=device, activations=activations)


def length(golden: dict[str, Any]) -> int:
    """Roughly the work: characters that are read, and tokens written, one by one."""
    read = len(golden.get("prompt", "")) + len(json.dumps(golden.get("messages", [])))
    return read + len(json.dumps(golden.get("tools", []))) + 20 * len(golden["answer"]["tokens"])


# ---- answers ------------------------------------------------------------------------------------


def test_goldens_are_of_every_task() -> None:
    assert len(GOLDENS) == 30
    assert {g["task"] for g in GOLDENS} == set(make_goldens.COUNTS)
    assert any(g.get("thinking") and len(g["messages"]) > 3 for g in GOLDENS)
    assert max(len(str(g.get("messages"))) for g in GOLDENS) > 1900  # some 1,000 tokens
    assert sum(len(g["answer"]["calls"]) for g in GOLDENS) >= 3


def test_greedy_answers_are_the_goldens(device: str) -> None:
    """In exact mode, token by token."""
    # The emulator takes seconds for a short question: the two shortest there.
    chosen = sorted(GOLDENS, key=length)[:2] if emulated(device) else GOLDENS
    for golden in chosen:
        done = make_goldens.ask(engine(device), golden)
        assert make_goldens.as_json(done) == golden["answer"], golden["task"]


def test_bf16_says_the_same() -> None:
    """Nearly: of thirty answers all but two at most are those of exact mode."""
    same = [
        make_goldens.as_json(make_goldens.ask(engine("cpu", "bfloat16"), g)) == g["answer"]
        for g in GOLDENS
    ]
    assert sum(same) >= len(GOLDENS) - 2


def test_the_cheap_part_of_the_report() -> None:
    """Its table says what comes out when it is done again."""
    section = REPORT.read_text().split("## The cheap part")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ,]+) \| (\d+) \| ([\d.]+ %|–) \| ([\d.]+|–) \|$", section, re.M)
    found = evaluate.cheap(engine("cpu"))
    counts = {task: count for _, task, count in evaluate.CHEAP}
    counts |= {"tool call, valid": counts["tool call"], "over all": sum(counts.values())}
    assert {row[0]: int(row[1]) for row in rows} == counts
    for task, _, right, loss in rows:
        if task in found["answers"]:
            answers = found["answers"][task]
            assert (answers["of"], f"{100 * answers['right']:.1f} %") == (counts[task], right), task
        if task != "tool call, valid":
            assert abs(float(loss) - found["perplexity"][task]) <= 1e-3, task


def test_any_talk_keeps_its_form() -> None:
    """What a model that has been trained says, warm: with tools, a schema, stop strings, cut short."""
    rng = random.Random(4)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [7, None]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    seen: Counter[str] = Counter()
    for i, make in enumerate((data.tools, data.as_json, data.facts, data.story) * 5):
        sample = data.draw_of(make, rng, held=True)
        messages = sample.messages[:-1] or [data.user("Tell me a story about an owl.")]
        options: dict[str, Any] = {"seed": i, "stop": rng.choice([None, [". The", "}"], ["e"]])}
        options["max_tokens"] = rng.choice([4, 40, 150])
        if make is data.as_json:
            options |= {"response_format": form, "stop": None}
        asked = {"tools": sample.tools, "thinking": rng.random() < 0.5, **options}
        stream = engine("cpu").stream_chat(messages, **asked)
        tokens = list(stream)
        done = engine("cpu").chat(messages, **asked)
        calls = [(call.name, call.arguments) for call in done.tool_calls]
        assert [(c.tool_call.name, c.tool_call.arguments) for c in tokens if c.tool_call] == calls
        for kind, text in (("content", done.text), ("reasoning", done.reasoning)):
            assert "".join(t.text for t in tokens if t.kind == kind) == text
            assert not re.search(r"</?think>|<\|", text)
        assert tokens[-1].finish_reason == done.finish_reason == stream.completion.finish_reason
        assert not any(stop in done.text for stop in options["stop"] or [])
        assert {name for name, _ in calls} <= {t["function"]["name"] for t in sample.tools}
        if make is data.as_json and done.finish_reason == "stop":
            jsonschema.validate(json.loads(done.text), schema)
            seen["schema"] += 1
        seen.update([done.finish_reason, "stop string" if done.stop_string else "none"])
    assert min(seen[x] for x in ("stop", "length", "tool_calls", "stop string", "schema")) >= 1


# ---- as a product -------------------------------------------------------------------------------


def test_it_is_small_and_like_any_checkpoint() -> None:
    files = {path.name: path.stat().st_size for path in PACKAGED_MODEL.iterdir()}
    assert sum(files.values()) <= 12_000_000
    assert [n for n in sorted(files) if n.endswith(".safetensors")] == [
        "model.safetensors",
        "mtp.safetensors",
    ]
    config = engine("cpu").plan.config
    assert config.layers == 8 and config.vocab == 4096
    assert (config.hidden, config.experts, config.top_k) == (256, 16, 4)


def test_the_first_command_tells_a_story(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from lily.cli import main; main()", "generate", "--device", "cpu", "Tell me a story about a fox."],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert " fox" in done.stdout and 60 < len(done.stdout.split()) < 300
    assert done.stdout.rstrip()[-1] in '.!"'


def test_a_talk_remembers_and_calls_a_tool(tmp_path: Path) -> None:
    """Turn three asks for what turn one told; then a tool of a file, as `lily chat` shows it."""
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    talk = Terminal("chat", "--device", "cpu", "--seed", "1", home=tmp_path)
    try:
        talk.prompt()
        for line in ("My name is Nora and I live in Oslo.", "What is the capital of France?"):
            talk.type(line + "\n")
            talk.wait_for(r"answer: \d+ tokens.* stop")
        talk.type("Where do I live?\n")
        assert "You live in Oslo." in talk.wait_for(r"answer: \d+ tokens.* stop")
        talk.type(f"/reset\n/tools {tmp_path}/tools.json\n")
        talk.wait_for("1 tools")
        talk.type("What is the weather in Lima?\n")
        call = re.search(r"weather\((\{.*\})\)", talk.wait_for("result of weather> "))
        assert call
        jsonschema.validate(json.loads(call[1]), WEATHER["function"]["parameters"])
        assert json.loads(call[1])["place"] == "Lima"
        talk.type('{"temperature": 21, "sky": "sunny"}\n')
        answer = talk.wait_for(r"answer: \d+ tokens.* stop")
        assert "sunny" in answer and "21" in answer
        talk.type("/exit\n")
        assert talk.leave() == 0
    finally:
        talk.close()
