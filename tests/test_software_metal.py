"""The software Metal: every rule is broken on purpose and noticed, every fault reaches lily's user."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lily
from lily import _core
from model_harness import CALM, DATA, fresh_engine, golden, ids_of

sys.path.insert(0, str(Path(__file__).resolve().parent / "apple/software_metal"))
from broken_rules import SoftwareMetal

PROBE = Path(os.environ.get("SOFTWARE_METAL_PROBE", "/nonexistent"))
pytestmark = pytest.mark.skipif(
    not PROBE.exists(), reason="the software Metal is not built: python tests/apple/run.py"
)

# case of the probe: (rule, words of its message)
BROKEN = {
    "offset_beyond": ("bounds", "offset 1024 of buffer 'number 0' of 1024 bytes"),
    "offset_beyond_later": ("bounds", "offset 1028 of buffer 'number 0' of 1024 bytes"),
    "offset_of_device_memory": ("offset alignment", "offset 2 at index 0"),
    "offset_of_constants": ("offset alignment", "offset 16 at index 2, must be a multiple of 256"),
    "index_31": ("argument index", "buffer 31, the last is 30"),
    "offset_for_nothing": ("argument index", "an offset for index 3, where no buffer is bound"),
    "bytes_31": ("argument index", "bytes 31, the last is 30"),
    "nothing_bound": ("missing argument", "nothing is bound at index 1"),
    "many_bytes": ("setBytes", "4097 bytes, 1 to 4096"),
    "threads_2048": ("threadgroup size", "2048 threads a group, 1 to 1024"),
    "threads_33": ("threadgroup size", "33 threads a group, no multiple of 32"),
    "ragged_group": ("threadgroup size", "a ragged last group"),
    "no_groups": ("grid", "without groups"),
    "threadgroup_length": ("threadgroup memory", "32784 bytes"),
    "large_group": ("kernel fault", "threadgroup memory: 32784 bytes in all, the limit is 32768"),
    "kernel_beyond": ("kernel fault", "out of bounds"),
    "no_length": ("buffer length", "0 bytes"),
    "page_alignment": ("page alignment", "multiples of 16384"),
    "fast_math": ("math mode", "fast math"),
    "fast_functions": ("math mode", "fast functions"),
    "no_function": ("pipeline", "a pipeline without a function"),
    "not_committed_to_set": ("residency", "is bound and in no residency set as committed"),
    "never_requested": ("residency", "was never requested"),
    "address_not_in_set": ("kernel fault", "out of bounds"),
    "address_used_for_reading": ("kernel fault", "declared as read only"),
    "sets_33": ("residency", "a queue takes at most 32 residency sets"),
    "address_not_used": ("kernel fault", "out of bounds"),
    "dispatch_after_end": ("encoder state", "dispatch after endEncoding"),
    "end_twice": ("encoder state", "endEncoding after endEncoding"),
    "two_encoders": ("encoder state", "a second encoder while one is open"),
    "commit_open": ("encoder state", "commit while an encoder is open"),
    "commit_twice": ("encoder state", "a second commit"),
    "handler_after_commit": ("encoder state", "a handler after commit"),
    "scheduled_handler_after_commit": ("encoder state", "a handler after commit"),
    "encoder_after_commit": ("encoder state", "an encoder after commit"),
    "signal_after_commit": ("encoder state", "encodeSignalEvent after commit"),
    "signal_inside": ("encoder state", "encodeSignalEvent while an encoder is open"),
    "encoder_dropped": ("encoder state", "released without endEncoding"),
    "no_pipeline": ("encoder state", "dispatch without a pipeline"),
    "wait_before_commit": ("encoder state", "waitUntilCompleted before commit"),
    "all_command_buffers": ("command buffers", "all 64 of the queue are in use"),
    "missing_barrier": ("missing barrier", "with no barrier between them"),
    "barrier_of_another": ("missing barrier", "with no barrier between them"),
    "barrier_too_early": ("missing barrier", "with no barrier between them"),
    "write_after_read": ("missing barrier", "byte 1020 of buffer"),
    "write_after_write": ("missing barrier", "overwrites what"),
    "resource_barrier_too_early": ("missing barrier", "with no barrier between them"),
    "tracked_reached_by_address": ("missing order", "with no fence or event between them"),
    "missing_fence": ("missing order", "with no fence or event between them"),
    "fence_not_waited_for": ("missing order", "with no fence or event between them"),
    "fence_not_updated": ("missing order", "with no fence or event between them"),
    "fence_too_early": ("missing order", "with no fence or event between them"),
    "fence_too_late": ("missing order", "with no fence or event between them"),
    "fence_of_oneself": ("fence", "waits for a fence that it has updated"),
    "missing_event": ("missing order", "with no fence or event between them"),
    "event_too_early": ("missing order", "with no fence or event between them"),
    "two_encoders_without_fence": ("missing order", "with no fence or event between them"),
    "buffer_released": ("use after release", "buffer 'number 0' was released while 1"),
    "buffer_released_before_commit": ("use after release", "before command buffer 'late'"),
    "pipeline_released": ("use after release", "pipeline 'copy_words' was released while 1"),
    "address_released": ("kernel fault", "out of bounds"),
    "no_pool": ("autorelease pool", "was called with no pool in place"),
    "string_without_pool": ("autorelease pool", "UTF8String was called with no pool in place"),
}
# Broken when the command buffer is on its way already, or no command buffer is concerned.
NOT_IN_ERROR = {
    "commit_twice",
    "handler_after_commit",
    "pipeline_released",
    "no_length",
    "page_alignment",
    "fast_math",
    "fast_functions",
    "no_function",
    "sets_33",
    "scheduled_handler_after_commit",
    "encoder_after_commit",
    "signal_after_commit",
    "wait_before_commit",
    "all_command_buffers",
    "no_pool",
    "string_without_pool",
}


def probe(case: str, seed: int = 1, report: Path | None = None) -> tuple[list[str], list[str]]:
    """Lines about command buffers, and the broken rules."""
    environment = os.environ | {"SOFTWARE_METAL_SEED": str(seed), "SOFTWARE_METAL_HANG": "0.3"}
    environment["SOFTWARE_METAL_REPORT"] = str(report) if report else ""
    done = subprocess.run(
        [PROBE, case], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (case, done.returncode, done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("leaked"))
    assert lines[end] == "leaked 0", (case, lines)
    return lines[:end], lines[end + 1 :]


def cases() -> list[str]:
    if not PROBE.exists():
        return []
    return subprocess.run([PROBE], capture_output=True, text=True, check=True).stdout.split()


def test_every_case_is_expected() -> None:
    clean = {case for case in cases() if case.startswith("clean_")}
    assert clean and set(cases()) - clean - {"event_never_signalled"} == set(BROKEN)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_noticed(case: str, tmp_path: Path) -> None:
    buffers, broken = probe(case, report=tmp_path / "report")
    rule, words = BROKEN[case]
    assert broken and all(line.startswith(rule + ": ") for line in broken), broken
    assert words in broken[0]
    assert (tmp_path / "report").read_text().splitlines() == broken
    if case not in NOT_IN_ERROR:
        assert any("status 5" in line for line in buffers), buffers


@pytest.mark.parametrize("case", [c for c in BROKEN if BROKEN[c][0].startswith("missing ")])
def test_missing_order_is_noticed_in_every_order(case: str) -> None:
    for seed in range(2, 10):
        _, broken = probe(case, seed)
        assert broken and broken[0].startswith(BROKEN[case][0]), seed


@pytest.mark.parametrize("case", [c for c in cases() if c.startswith("clean_")])
def test_nothing_is_said_of_what_keeps_the_rules(case: str) -> None:
    for seed in range(1, 9):
        buffers, broken = probe(case, seed)
        assert broken == [], seed
        assert buffers and all("status 4, error 0" in line for line in buffers), buffers


def test_an_event_that_nobody_signals_times_out() -> None:
    buffers, broken = probe("event_never_signalled")
    assert buffers == ["stuck: status 5, error 2"] and broken == []


# ---- faults, as lily's user meets them -----------------------------------------------------------
IDS = ids_of(golden(DATA / "golden_long_calm.safetensors")["ids"]) if PROBE.exists() else None
STEP = re.compile(r"metal: .*step \d+ \w+: .*MTLCommandBufferErrorDomain (\d+)\)")
# MTLCommandBufferError; a single 4 is a hang, more of them in a row are a lost device.
CODES = {
    1: "internal",
    2: "timeout",
    3: "page fault",
    4: "access revoked",
    8: "out of memory",
    9: "invalid resource",
    10: "memoryless",
    12: "stack overflow",
}
LOST = {7: "not permitted", 11: "device removed"}


@pytest.fixture
def metal() -> Iterator[SoftwareMetal]:
    software = SoftwareMetal()
    yield software
    software.repair()
    assert software.faults_left() == 0, "a fault that was asked for did not happen"
    assert software.broken() == []


@pytest.fixture(scope="module")
def model() -> _core.Engine:
    """Warm: every pipeline that the tests below use is there."""
    core = fresh_engine(CALM, "metal", True)
    session = _session(core)
    session.rewind(12)
    session.sync(IDS[:30])
    session.step()
    return core


@pytest.fixture(scope="module")
def want(model: _core.Engine) -> list[int]:
    """The tokens after 30."""
    return _drawn(model)


def _session(core: _core.Engine) -> _core.Session:
    session = _core.Session(core)
    session.sync(IDS[:20], snapshot_at=[12])
    return session


def _drawn(core: _core.Engine, n: int = 4) -> list[int]:
    session = _session(core)
    session.sync(IDS[:30])
    return [session.step().id for _ in range(n)]


def _objects(metal: SoftwareMetal) -> int:
    """Once the GPU's threads have let go of the last command buffer."""
    gc.collect()
    known = [metal.objects()]
    while len(known) < 5 or len(set(known[-5:])) > 1:
        time.sleep(0.005)
        known.append(metal.objects())
    return known[-1]


def test_tokens_and_logits_are_those_of_sim() -> None:
    """The same kernels by way of metal.mm, so not one bit may differ."""
    for exact in (True, False):
        found = []
        for device in ("metal", "sim"):
            session = _session(fresh_engine(CALM, device, exact))
            session.sync(IDS[:30])
            found.append(([session.step().id for _ in range(4)], session.logits()))
        assert found[0][0] == found[1][0]
        assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("code", "when"),
    [(code, "prefill") for code in CODES] + [(2, "decode"), (3, "decode"), (2, "ahead")],
)
def test_a_failed_command_buffer_leaves_a_whole_session(
    metal: SoftwareMetal, model: _core.Engine, want: list[int], code: int, when: str
) -> None:
    before = _objects(metal)
    session = _session(model)
    if when == "ahead":  # the step in flight behind the one that is asked for
        session.sync(IDS[:30])
        session.step()
    metal.inject(f"command_buffer={code}")
    with pytest.raises(lily.DeviceError) as caught:
        if when == "prefill":
            session.sync(IDS[:30])
        for _ in range(3):
            session.step()
    named = STEP.search(str(caught.value))
    assert named and int(named[1]) == code, caught.value
    assert session.position == 12 and session.snapshots == [12]
    assert session.sync(IDS[:30]) == 12
    assert [session.step().id for _ in range(2)] == want[:2]
    del session, caught
    assert _objects(metal) == before


@pytest.mark.parametrize(
    ("fault", "what"), [("no_command_buffer", "command buffer"), ("no_encoder", "encoder")]
)
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_nothing_to_encode_into_leaves_a_whole_session(
    metal: SoftwareMetal, model: _core.Engine, want: list[int], fault: str, what: str, when: str
) -> None:
    before = _objects(metal)
    session = _session(model)
    metal.inject(fault)
    said = rf"^metal: .*steps \d+ to \d+: Metal gives no {what}"
    with pytest.raises(lily.DeviceError, match=said) as caught:
        if when == "prefill":
            session.sync(IDS[:30])
        session.step()
    assert session.position == 12 and session.snapshots == [12]
    assert session.sync(IDS[:30]) == 12
    assert [session.step().id for _ in range(2)] == want[:2]
    del session, caught
    assert _objects(metal) == before


def _lose(metal: SoftwareMetal, code: int) -> None:
    engine = lily.Engine.load(CALM, device="metal")
    want = engine.generate(IDS[:20], max_tokens=3).tokens
    metal.inject(f"command_buffer={code}", 1)
    with pytest.raises(lily.DeviceError, match=r"metal: .*step \d+ \w+: "):
        engine.generate(IDS[20:50], max_tokens=3)
    for call in (
        lambda: engine.generate(IDS[:20], max_tokens=3),
        lambda: engine.chat("Why?", max_tokens=2),
        engine.session,
    ):
        with pytest.raises(lily.LilyError, match="the device is lost, the engine is closed: metal"):
            call()
    engine.close()
    metal.repair()
    with lily.Engine.load(CALM, device="metal") as fresh:
        assert fresh.generate(IDS[:20], max_tokens=3).tokens == want


@pytest.mark.parametrize("code", LOST, ids=LOST.values())
def test_a_lost_device_closes_the_engine(metal: SoftwareMetal, code: int) -> None:
    before = _objects(metal)
    _lose(metal, code)
    assert _objects(metal) == before


def test_memory_that_metal_refuses_at_any_moment(metal: SoftwareMetal) -> None:
    """From loading to the first token, each allocation in turn."""
    before, refused = _objects(metal), 0
    words = re.compile(
        r"metal: .*(Metal refuses it|no \d+ bytes)|Metal gives no 256 bytes of memory"
    )

    def use() -> None:
        session = _core.Session(fresh_engine(CALM, "metal", True, 512))
        session.sync(IDS[:3])
        session.step()

    while refused < 100:
        metal.inject("allocation", refused)
        try:
            use()
        except lily.LilyError as error:
            assert words.search(str(error)), error
            refused += 1
        else:
            break
        assert _objects(metal) == before, refused
    assert 10 < refused < 100
    metal.forget()


def test_a_refused_allocation_leaves_the_session_usable(
    metal: SoftwareMetal, model: _core.Engine, want: list[int]
) -> None:
    session = _session(model)
    metal.inject("allocation")
    with pytest.raises(lily.LilyError, match=r"metal: .*(Metal refuses it|no \d+ bytes)"):
        session.sync(IDS[:47])  # a list that was not compiled yet
    session.sync(IDS[:30])
    assert [session.step().id for _ in range(2)] == want[:2]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("compile", r"\.metal does not compile as MSL .*program_source:7:1: error"),
        ("pipeline", r"metal: pipeline \w+: "),
    ],
)
def test_kernels_that_cannot_be_made(
    metal: SoftwareMetal, fault: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LILY_CACHE", str(tmp_path))
    before = _objects(metal)
    core = fresh_engine(CALM, "metal", True, 512)
    for _ in _core.metal_files() if fault == "compile" else "p":
        metal.inject(fault)
    with pytest.raises(lily.DeviceError, match=words):
        _drawn(core, 1)
    assert len(_drawn(core, 1)) == 1  # asked for again, they are there
    del core
    assert _objects(metal) == before


@pytest.mark.parametrize("macos", ["14.0", "15.0", "26.0"])
def test_an_answer_on_each_macos(
    metal: SoftwareMetal, want: list[int], macos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without residency sets each encoder names what its kernels reach by address."""
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", macos)
    assert _drawn(fresh_engine(CALM, "metal", True), 2) == want[:2]


def test_nothing_stays_of_a_closed_engine(metal: SoftwareMetal) -> None:
    before = _objects(metal)
    with lily.Engine.load(CALM, device="metal") as engine:
        engine.generate(IDS[:20], max_tokens=3)
        engine.generate(IDS[:30], max_tokens=3)
        assert _objects(metal) > before
    del engine
    assert _objects(metal) == before
