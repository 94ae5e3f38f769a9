"""`lily selftest`: what it compares with is current, and whatever is wrong ends up in the report."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
import make_selftest
from conftest import require_device
from lily import _core, cli, selftest, selftest_model
from lily.selftest import Bench, References, Report, compare

STORED = References.load()


def quiet(what: str) -> None:
    assert what


def report_of(device: str, stored: References = STORED) -> Report:
    return selftest.run(device, quiet, quick=True, references=stored)


def failed(report: Report) -> list[str]:
    return [failure["check"] for failure in report.failures]


# ---- the stored file -----------------------------------------------------------------------------
def test_the_stored_results_are_current(tmp_path: Path) -> None:
    """The calls are those of the ops as they are, the results those of reference.py."""
    file = tmp_path / "new"
    file.write_bytes(make_selftest.make())
    new = References.load(file)
    assert selftest.REFERENCES.stat().st_size <= 400_000

    def same(a: Any, b: Any, where: str) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            assert a.keys() == b.keys(), where
            for key in a:
                same(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, list) and isinstance(b, list):
            assert len(a) == len(b), where
            for i, (x, y) in enumerate(zip(a, b)):
                same(x, y, f"{where}[{i}]")
        elif a in STORED.arrays:
            old, now = STORED.arrays[a], new.arrays[b]
            assert old.dtype == now.dtype, where
            if old.dtype == np.float32:  # sums in float64 depend on the machine in the last digit
                np.testing.assert_allclose(now, old, rtol=2e-6, atol=1e-6, err_msg=where)
            else:
                np.testing.assert_array_equal(now, old, where)
        else:
            assert a == b, where

    same(STORED.cases, new.cases, "cases")
    same(STORED.model, new.model, "model")
    same(STORED.timed, new.timed, "timed")


def test_every_pipeline_is_run_in_both_modes() -> None:
    for mode in selftest.MODES:
        names = {c["name"] for c in STORED.cases if c["mode"] in (mode, "both")}
        assert {name for _, name in _core.variants()} <= names
    assert all(len(case["expect"]) > 0 for case in STORED.cases)


@pytest.mark.parametrize("mode", selftest.MODES)
def test_a_wrong_value_is_seen_wherever_one_is_kept(mode: str) -> None:
    """Each stored place of each output of each case: off by little more than is allowed, and NaN."""
    bench = Bench("cpu", selftest.MODES[mode])
    for case in STORED.cases:
        if case["mode"] not in (mode, "both"):
            continue
        got = bench.run(case, STORED.arrays)
        assert compare(got, case, STORED.arrays) <= 1
        for part in case["expect"]:
            want = STORED.arrays[part["values"]]
            at = (
                STORED.arrays[part["at"]] if "at" in part else np.arange(want.size) * part["stride"]
            )
            finite = (
                np.flatnonzero(np.isfinite(want)) if want.dtype == np.float32 else range(want.size)
            )
            for i in (finite[0], finite[len(finite) // 2], finite[-1]):
                for wrong in wrong_values(part, want, int(i)):
                    broken = {name: data.copy() for name, data in got.items()}
                    broken[str(part["output"])].view(wrong.dtype)[at[i]] = wrong
                    with pytest.raises(ValueError, match=rf"output {part['output']}: \d+ of"):
                        compare(broken, case, STORED.arrays)


def wrong_values(part: dict[str, Any], want: np.ndarray, i: int) -> list[Any]:
    if part["type"] == "u32":
        return [np.uint32(want[i] ^ 1)]
    finite = want[np.isfinite(want)].astype(np.float64)
    allowed = part["rel"] * np.sqrt((finite**2).mean()) + part["own"] * abs(want[i])
    if part["type"] == "f32":
        return [
            np.float32(want[i] + 1.1 * allowed + 1e-6 * abs(want[i]) + 1e-30),
            np.float32(np.nan),
        ]
    off = np.float32(want[i] + 2.5 * allowed + 2.0**-6 * abs(want[i]) + 1e-30)
    return [np.uint16(off.view(np.uint32) >> 16), np.uint16(0x7FC0)]


# ---- devices -------------------------------------------------------------------------------------
def test_a_right_device_passes(device: str) -> None:
    report = report_of(device)
    assert not report.failures
    assert report.passed >= 2 * len(_core.variants()) + 8
    values = json.loads(report.text())
    assert values["device"] == device and values["failed"] == 0 and values["quick"]
    assert values["lily"] == lily.__version__ and values["description"]
    assert values["model"][f"{device} exact"]["same_tokens"]
    assert values["copy_gb_per_s"] > 0 and values["level_us"] > 0 and values["launch_us"] > 0
    for mode in selftest.MODES:
        results = values["kernels_ms_error"][mode].values()
        assert all(ms > 0 and 0 <= error <= 1 for ms, error in results)


def test_the_whole_form_times_kernels_at_real_shapes() -> None:
    report = selftest.run("cpu", quiet)
    assert not report.failures and not report.values["quick"]
    assert len(report.values["us_and_gb_per_s"]) == len(STORED.timed) == 2
    assert report.values["model"]["cpu exact"]["same_tokens"]


def test_a_device_that_is_not_here_is_a_failure_with_its_reason() -> None:
    absent = [s.name for s in _core.devices() if not s.available]
    if not absent:
        pytest.skip("every device is here")
    report = report_of(absent[0])
    assert failed(report)[:2] == [f"exact: start {absent[0]}", f"bf16: start {absent[0]}"]
    assert all("does not exist here" in failure["error"] for failure in report.failures)
    assert report.values["model"]["cpu exact"]["same_tokens"]  # what can be told is told


# ---- planted failures ----------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_wrong_kernel_is_named_and_the_rest_goes_on(device: str) -> None:
    require_device(device)
    wrong = deepcopy(STORED)
    (case,) = (c for c in wrong.cases if c["name"] == "attn_step" and c["mode"] == "exact")
    name = case["expect"][0]["values"]
    wrong.arrays[name] = wrong.arrays[name].copy()
    wrong.arrays[name][3] *= 1.01
    report = report_of(device, wrong)
    assert failed(report) == ["exact: attn_step"]
    assert "output 4: 1 of " in report.failures[0]["error"]
    assert report.passed == report_of(device).passed - 1


def test_a_kernel_that_does_not_compile_is_reported_with_the_compilers_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    text = "linear.metal does not compile: program_source:7:3: error: unknown type name 'flaot'"

    class Broken(_core.Kernels):
        def __init__(self, device: str, exact: bool) -> None:
            super().__init__(device, exact)
            made.append(exact)

        def run(self, calls: Any, reuse: bool = False, times: int = 1) -> Any:
            if calls[0][0] in ("project", "matmul"):
                raise _core.DeviceError(text + "\n" + "x" * 10_000)
            return super().run(calls, reuse, times)

    monkeypatch.setattr(_core, "Kernels", Broken)
    report = report_of("cpu")
    assert {check.split()[1].split("_")[0] for check in failed(report)} == {"project", "matmul"}
    assert len(report.failures) == 2 * 10
    assert all(text in f["error"] and len(f["error"]) <= 4000 for f in report.failures)
    assert len(made) == 3 + len(report.failures)  # after a fault the device is made anew
    assert report.values["model"]["cpu exact"]["same_tokens"]


def test_on_metal_a_file_that_does_not_compile_fails_its_own_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_device("metal")
    folder = shutil.copytree(make_selftest.h.ROOT / "src/metal", tmp_path / "metal")
    with (folder / "deltanet.metal").open("a") as file:
        file.write("kernel void half_a_kernel(\n")
    monkeypatch.setenv("LILY_METAL_SOURCE", str(folder))
    report = report_of("metal")
    kernels = {name.split()[1] for name in failed(report) if "model on metal" not in name}
    assert kernels == {name for op, name in _core.variants() if op.startswith(("delta", "gated"))}
    assert len(report.failures) == 2 * len(kernels) + 2  # and no model runs
    said = r"metal: deltanet\.metal does not compile as MSL \d\.\d: .*error"
    assert all(re.search(said, failure["error"]) for failure in report.failures)
    assert report.values["model"]["cpu exact"]["same_tokens"] and report.values["level_us"] > 0


def test_a_write_past_an_output_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(_core.Kernels):
        def run(self, calls: Any, reuse: bool = False, times: int = 1) -> Any:
            done = super().run(calls, reuse, times)
            if calls[0][0] == "embed":
                buffer = calls[0][2][3][0]
                buffer.write(buffer.nbytes - 64, np.zeros(4, np.uint8))
            return done

    monkeypatch.setattr(_core, "Kernels", Wide)
    report = report_of("cpu")
    assert failed(report) == [
        f"{m}: embed_{w}" for m in selftest.MODES for w in ("q4", "q8", "b16")
    ]
    assert "written outside of its" in report.failures[0]["error"]


def test_other_tokens_and_logits_are_failures() -> None:
    wrong = deepcopy(STORED)
    quick = wrong.model["quick"]
    quick["tokens"][-1] += 1
    report = report_of("cpu", wrong)
    assert failed(report) == ["exact: model on cpu"]
    assert f"expected {quick['tokens']}" in report.failures[0]["error"]
    wrong.arrays[quick["logits"]] = wrong.arrays[quick["logits"]] * np.float32(1.5)
    report = report_of("cpu", wrong)
    assert failed(report) == ["exact: model on cpu", "bf16: model on cpu"]
    assert all("logits are off by" in failure["error"] for failure in report.failures)


def test_a_failure_of_the_speeds_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(_core.Kernels):
        def time(self, calls: Any, times: int) -> float:
            raise MemoryError("no room")

    monkeypatch.setattr(_core, "Kernels", Slow)
    report = report_of("cpu")
    assert failed(report) == ["copy", "launches in turn", "launches together"]
    assert json.loads(report.text())["copy_gb_per_s"] is None


# ---- the small model and the command ---------------------------------------------------------------
def test_the_model_is_the_same_everywhere(tmp_path: Path) -> None:
    """Its numbers are no generator's of numpy, which may change with the version."""
    selftest_model.write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == "453f8dd1ed34d924"
    assert selftest_model.prompt(4).tolist() == [119, 478, 440, 38]


def run_cli(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lily", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    assert run_cli(monkeypatch, "selftest", "--device", "cpu", "--quick", "--json", str(file)) == 0
    out, err = capsys.readouterr()
    assert not err and out == file.read_text()
    assert json.loads(out)["failures"] == []

    monkeypatch.setattr(selftest, "_copy", lambda *_: 1 / 0)
    assert run_cli(monkeypatch, "selftest", "--device", "cpu", "--quick") == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert failures == [{"check": "copy", "error": "ZeroDivisionError: division by zero"}]

    assert run_cli(monkeypatch, "selftest", "--device", "tpu") == 2
    assert "device is 'tpu', allowed" in capsys.readouterr().err
