"""`lily bench` and benchmarks/generate.py: what is measured, what is refused, what peers say."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import generate
import numpy as np
import plots
import pytest

from lily import _core, bench, cli
from lily.bench import Record
from lily.hub import PACKAGED_MODEL
from test_cli import Terminal, _lily

ROOT = Path(__file__).resolve().parent.parent
RESULTS = [
    json.loads(line)
    for file in sorted((ROOT / "benchmarks/results").glob("*.jsonl"))
    for line in file.read_text().splitlines()
]
RATES = [r for r in RESULTS if "decode_tok_s" in r]
MODEL = str(PACKAGED_MODEL)
CONTEXT = 40


@pytest.fixture(scope="module")
def model() -> bench.Model:
    return bench.load(PACKAGED_MODEL, [CONTEXT], "cpu")


def record(**values: Any) -> Record:
    plain = {"engine": "lily", "context": 256, "arm": "greedy", "token_digest": "a"}
    return {**plain, "prefill_tok_s": 1000.0, "decode_tok_s": 100.0, "round": 1} | values


# ---- what is measured --------------------------------------------------------------------------


def test_the_prompt() -> None:
    ids = bench.prompt(5000, 4097)
    assert ids.dtype == np.uint32
    assert ids.tolist() == [(i * 2654435761) % 2**32 % 4097 for i in range(5000)]


def test_a_record(model: bench.Model) -> None:
    """64 steps after the first token, which belongs to the prefill; the same ones each time."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    got = bench.measure(model, CONTEXT, "greedy", step=step)
    assert steps == bench.STEPS == len(got["step_ms"])
    assert got["decode_tok_s"] == pytest.approx(64_000 / sum(got["step_ms"]), rel=1e-3)
    assert got["prefill_tok_s"] > 0 and got["context"] == CONTEXT
    assert got["device"].startswith("cpu: ") and got["activations"] == "bfloat16"
    session = _core.Session(model.core)
    session.sync(bench.prompt(CONTEXT, model.core.vocab))
    tokens = [session.step().id for _ in range(1 + bench.STEPS)]
    assert got["token_digest"] == bench.digest(tokens[1:])
    assert bench.measure(model, CONTEXT, "greedy", warm=False)["token_digest"] == bench.digest(
        tokens[1:]
    )


def test_arms_draw_as_they_say(model: bench.Model) -> None:
    greedy, sampled, wide = (bench.ARMS[a] for a in ("greedy", "sampled", "top-p"))
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0, 0, 1)
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (1, 20, 0.95)
    assert (wide.temperature, wide.top_k, wide.top_p) == (1, 0, 0.95)
    assert sampled.presence_penalty == wide.presence_penalty > 0
    digests = [bench.measure(model, CONTEXT, a)["token_digest"] for a in ("greedy", "sampled") * 2]
    assert digests[0] == digests[2] != digests[1] == digests[3]


def test_records_have_what_those_that_are_kept_have(model: bench.Model) -> None:
    got = {**bench.measure(model, CONTEXT, "greedy"), **generate.git_state(), "round": 1}
    for kept in RATES:
        assert set(kept) <= set(got)
    for name, value in RATES[0].items():
        assert type(got[name]) is type(value), name


def test_contexts_that_fit(tmp_path: Path) -> None:
    assert bench.fitting(PACKAGED_MODEL) == [256, 1024]
    assert bench.fitting(PACKAGED_MODEL, [4030, 1]) == [4030, 1]
    for wrong in (0, 4031):
        with pytest.raises(ValueError, match=f"a context is {wrong}, allowed 1 to 4030"):
            bench.fitting(PACKAGED_MODEL, [5, wrong])
    small = tmp_path / "config.json"
    config = json.loads((PACKAGED_MODEL / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 128
    small.write_text(json.dumps(config))
    assert bench.fitting(tmp_path) == [62]


def test_the_longest_context_looks_ahead_at_every_step() -> None:
    """The last of the timed steps submits one more, as all before it: the room is asked for."""
    model = bench.load(PACKAGED_MODEL, [CONTEXT], "cpu")
    assert model.core.max_context == CONTEXT + bench.STEPS + 2
    session = _core.Session(model.core)
    session.sync(bench.prompt(CONTEXT, model.core.vocab))
    for _ in range(bench.STEPS + 2):
        session.step()
    with pytest.raises(ValueError, match="the context is full"):
        session.step()


def test_what_load_refuses() -> None:
    with pytest.raises(ValueError, match="device is 'tpu', allowed"):
        bench.load(PACKAGED_MODEL, [5], "tpu")
    with pytest.raises(ValueError, match="activations is 'half', allowed"):
        bench.load(PACKAGED_MODEL, [5], "cpu", "half")


# ---- what is refused ---------------------------------------------------------------------------


def test_drift_and_changed_tokens() -> None:
    def second(**values: Any) -> list[str]:
        return bench.unsteady([record(), record(round=2, **values)])

    assert second() == second(prefill_tok_s=1029.0) == second(decode_tok_s=97.1) == []
    assert second(prefill_tok_s=1030.0) == [
        "lily, 256 tokens, greedy: prefill_tok_s is 1000 and 1030, 3.0% apart, allowed below 3%"
    ]
    assert "decode_tok_s is 100 and 97, 3.1% apart" in second(decode_tok_s=97.0)[0]
    assert second(token_digest="b") == [
        "lily, 256 tokens, greedy: the tokens differ from round to round"
    ]
    apart = [record(), record(arm="sampled", decode_tok_s=50.0, token_digest="b")]
    assert bench.unsteady(apart) == []  # other arms are no second round
    silent = [record(token_digest=None), record(token_digest=None, round=2)]
    assert bench.unsteady(silent) == []


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three arms that say what the test wants; what is run is written down."""
    ran: list[Any] = []
    values: dict[str, Any] = {}

    def arm(engine: str, context: int) -> generate.Arm:
        def run() -> Record:
            ran.append((engine, context))
            change = values if len(ran) > 3 else {}
            return record(engine=engine, context=context, **change)

        return generate.Arm(engine, context, "greedy", run)

    three = [arm("lily", 256), arm("mlx-lm", 256), arm("lily", 1024)]
    monkeypatch.setattr(generate, "all_arms", lambda options, say: three)
    monkeypatch.setattr(generate, "git_state", lambda: {"git_sha": "c0ffee", "dirty": False})
    return [ran, values]


def test_two_rounds_in_alternating_order(
    arms: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"older": 1}\n')
    assert generate.main([MODEL, "--out", str(out)]) == 0
    order = [("lily", 256), ("mlx-lm", 256), ("lily", 1024)]
    assert arms[0] == order + order[::-1]
    lines = out.read_text().splitlines()
    assert lines[0] == '{"older": 1}' and "\n".join(lines[1:]) + "\n" == capsys.readouterr().out
    kept = [json.loads(line) for line in lines[1:]]
    assert [r["round"] for r in kept] == [1, 1, 1, 2, 2, 2]
    assert {(r["git_sha"], r["dirty"]) for r in kept} == {("c0ffee", False)}


@pytest.mark.parametrize(
    "values, why",
    [
        ({"decode_tok_s": 97.0}, "refused: lily, 256 tokens, greedy: decode_tok_s is 100 and 97"),
        ({"prefill_tok_s": 1100.0}, "prefill_tok_s is 1000 and 1100, 10.0% apart"),
        ({"token_digest": "b"}, "the tokens differ"),
    ],
)
def test_refused(
    arms: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    why: str,
) -> None:
    arms[1].update(values)
    out = tmp_path / "out.jsonl"
    assert generate.main([MODEL, "--out", str(out)]) == 1
    shown = capsys.readouterr()
    assert why in shown.err and shown.out == "" and not out.exists()


def test_a_dirty_tree_is_refused_at_once(
    arms: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "git_state", lambda: {"git_sha": "c0ffee", "dirty": True})
    assert generate.main([MODEL]) == 1
    assert "the tree differs from its commit" in capsys.readouterr().err and arms[0] == []
    assert generate.main([MODEL, "--git-sha", "abc"]) == 0  # where no tree is at hand
    assert json.loads(capsys.readouterr().out.splitlines()[0])["git_sha"] == "abc"


def test_the_tree_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "a").write_text("1")
    for command in (("init", "-q"), ("add", "a"), (*me, "commit", "-qm", "a")):
        generate.git(*command)
    clean = generate.git_state()
    assert len(clean["git_sha"]) == 40 and clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert generate.git_state() == {**clean, "dirty": True}


def test_wrong_arms_and_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate.main([MODEL, "--arms", "greedy,hot"])
    assert "arm 'hot', known: greedy, sampled, top-p" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a context is 9999"):
        generate.main([MODEL, "--contexts", "9999"])


# ---- arms in processes of their own --------------------------------------------------------------


def _options(**values: Any) -> argparse.Namespace:
    plain = {"model": PACKAGED_MODEL, "device": "cpu", "activations": "float32"}
    return argparse.Namespace(**plain | values)


def test_an_arm_of_lily() -> None:
    arm = generate.lily_arm(_options(), CONTEXT, "sampled")
    got = arm.run()
    assert (got["engine"], got["context"], got["arm"]) == ("lily", CONTEXT, "sampled")
    assert got["activations"] == "float32" and len(got["step_ms"]) == 64
    assert got["checkpoint_sha"] == bench.checkpoint_sha(PACKAGED_MODEL)


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(SystemExit, match=r"failed \(1\)[\s\S]*device is 'tpu'"):
        generate.lily_arm(_options(device="tpu"), CONTEXT, "greedy").run()


FAKE_MLX = {
    "mlx/core.py": """
__version__ = "7.8"
array = list
default_device = lambda: "Device(gpu, 0)"
device_info = lambda: {"device_name": "Fake M9"}
""",
    "mlx_lm/__init__.py": """
__version__ = "1.2.3"
def load(folder, return_config):
    assert folder.endswith("model") and return_config
    return "model", None, {"text_config": {"vocab_size": 4096}}
""",
    "mlx_lm/generate.py": """
import time
def generate_step(ids, model, max_tokens):
    assert model == "model" and ids == [i * 2654435761 % 2**32 % 4096 for i in range(40)]
    time.sleep(0.2)
    for i in range(max_tokens):
        time.sleep(0.001)
        yield i + 7, None
""",
}


def test_mlx_lm_on_the_same_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arm over a stand-in that takes 0.2 s for the prompt and a millisecond a token."""
    for name, text in FAKE_MLX.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    version, about = generate.find_mlx(sys.executable)
    assert (version, about) == ("1.2.3", "mlx-lm: 1.2.3")
    got = generate.mlx_arm(_options(mlx_python=sys.executable), "1.2.3", CONTEXT).run()
    assert (got["engine"], got["device"]) == ("mlx-lm", "Device(gpu, 0): Fake M9")
    assert 20 < got["prefill_tok_s"] < 200 and len(got["step_ms"]) == 64
    assert 100 < got["decode_tok_s"] < 1000
    assert got["token_digest"] == bench.digest(range(8, 72))


FAKE_LLAMA = """#!/bin/sh
while [ $# -gt 0 ]; do case "$1" in -p) p=$2;; -n) n=$2;; -d) d=$2;; -m) m=$2;; esac; shift; done
[ -f "$m" ] || exit 3
echo "[{\\"build_number\\": 99, \\"build_commit\\": \\"abc\\", \\"gpu_info\\": \\"a card\\", \\"backends\\": \\"B\\",
 \\"model_type\\": \\"35B\\", \\"avg_ts\\": $((p * 10 + n + ${d:-0}))}]"
"""


def test_llama_bench_at_depth(tmp_path: Path) -> None:
    program, gguf = tmp_path / "llama-bench", tmp_path / "x.gguf"
    program.write_text(FAKE_LLAMA)
    program.chmod(0o755)
    assert generate.find_llama(str(program), None)[0] is None
    assert "is no file" in generate.find_llama(str(program), gguf)[1]
    gguf.touch()
    path, about = generate.find_llama(str(program), gguf)
    assert path == str(program) and str(gguf) in about
    got = generate.llama_arm(_options(llama_bench=path, gguf=gguf), 256).run()
    assert (got["engine"], got["engine_version"]) == ("llama.cpp", "99 (abc)")
    assert (got["prefill_tok_s"], got["decode_tok_s"]) == (2560, 64 + 256)
    assert got["token_digest"] is None and got["device"] == "a card"


def test_peers_that_are_absent_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    options = _options(
        contexts=[16], arms=["greedy"], mlx_python=str(tmp_path / "none"),
        llama_bench="no-such-llama-bench", gguf=None,
    )  # fmt: skip
    arms = generate.all_arms(options, said.append)
    assert [(arm.engine, arm.context, arm.arm) for arm in arms] == [("lily", 16, "greedy")]
    assert said[0].startswith("mlx-lm: absent") and "No such file" in said[0]
    assert said[1].startswith("llama-bench: absent, there is no no-such-llama-bench")
    version, about = generate.find_mlx("/bin/false")
    assert version is None and "cannot import mlx_lm" in about


# ---- what is shown -----------------------------------------------------------------------------


def test_ratios_stand_beside_the_numbers() -> None:
    text = bench.table(
        [
            record(round=1, decode_tok_s=99.0),
            record(round=2, decode_tok_s=101.0),
            record(arm="sampled", decode_tok_s=97.0),
            record(engine="mlx-lm", prefill_tok_s=250.0, decode_tok_s=50.0),
        ]
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1:] == [
        "lily greedy 256 1000.0 100.0",
        "lily sampled 256 1000.0 97.0 97.0% of greedy",
        "mlx-lm greedy 256 250.0 50.0 lily: 4.00x prefill, 2.00x decode",
    ]


def test_kept_results_stay_readable() -> None:
    assert RATES and bench.table(RATES).count("\n") == len({bench.key(r) for r in RATES})


def test_records_keep_no_folders_of_the_machine() -> None:
    typed = ["bench", "/home/nora/a b/qwen", "--out=/tmp/x.jsonl", "benchmarks/generate.py", "1/2"]
    assert bench.command_line(*typed) == "bench qwen --out=x.jsonl benchmarks/generate.py 1/2"
    kept = (ROOT / "benchmarks/results/h200.jsonl").read_text().splitlines()
    for command in (json.loads(line)["command"] for line in kept):
        assert command == bench.command_line(*command.split())


def test_piped_the_command_is_json() -> None:
    done = _lily("bench", "--device", "cpu", "--contexts", "20,30", "--sampled", "--rounds", "1")
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    assert report["model"] == "the packaged model" and report["unsteady"] == []
    keys = [(r["context"], r["arm"]) for r in report["records"]]
    assert keys == [(c, a) for c in (20, 30) for a in ("greedy", "sampled", "top-p")]
    assert report["kernels"] and "lily" in report


def test_in_a_terminal_it_shows_a_bar_and_a_table(tmp_path: Path) -> None:
    arguments = ["bench", "--model", MODEL, "--device", "cpu", "--contexts", "24"]
    opened = Terminal(*arguments, home=tmp_path)
    try:
        opened.wait_for(r"24 tokens, greedy, 2 of 2", 60)
        opened.wait_for(r"engine +arm +context")
        opened.wait_for(r"lily +greedy +24 ")
        opened.wait_for(r'"records": \[')
        assert opened.leave() == 0
    finally:
        opened.close()


def test_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--contexts", "1,x"], "contexts is '1,x', numbers with commas between are needed"),
        (["--contexts", "5000"], "a context is 5000, allowed 1 to 4030"),
        (["--rounds", "0"], "--rounds"),
        (["--device", "tpu"], "device is 'tpu', allowed"),
    ):
        monkeypatch.setattr(sys, "argv", ["lily", "bench", *arguments])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


# ---- plots -------------------------------------------------------------------------------------


def test_tables_and_plots_of_the_kept_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kept device; anchors are named as such, in the table and in the legend."""
    plots.main(["--to", str(tmp_path)])
    text = capsys.readouterr().out
    for device in plots.devices(RATES):
        assert f"## {device}\n" in text
        drawn = plots.series(RATES, device, "decode_tok_s")
        assert all(s.anchor == ("(anchor)" in s.name) for s in drawn)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert "cuda-nvidia-h200-decode.svg" in names and "cuda-nvidia-h200-prefill.svg" in names
    for file in tmp_path.iterdir():
        root = ElementTree.parse(file).getroot()
        lines = root.findall("{*}polyline")
        assert len(lines) >= 1 and len(root.findall("{*}circle")) >= len(lines)
        assert sum(line.get("stroke-dasharray") is not None for line in lines) == 2


def test_a_plot_puts_points_where_they_belong() -> None:
    records = [
        record(context=c, decode_tok_s=v, device="cpu: x", engine_version="1", git_sha="abcdefghi")
        for c, v in ((256, 100.0), (256, 120.0), (1024, 55.0), (4096, 0.001))
    ]
    (line,) = plots.series(records, "cpu: x", "decode_tok_s")
    assert line.name == "lily 1, abcdefg" and line.points == {256: 110, 1024: 55, 4096: 0.001}
    assert "| lily 1, abcdefg | 110 | 55 | 0 |" in plots.table([line], "decode")
    root = ElementTree.fromstring(plots.svg([line], "a < b"))
    (drawn,) = root.findall("{*}polyline")
    (x0, y0), (x1, y1), (x2, y2) = (
        tuple(map(float, p.split(","))) for p in str(drawn.get("points")).split()
    )
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # a factor of four each
    assert y2 - y0 == pytest.approx(2 * (y2 - y1), abs=0.3)  # 110, 55, 0
