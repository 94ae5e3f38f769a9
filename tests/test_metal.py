"""The Metal device around the kernels: order, tickets, faults, pipelines and their archive, memory.

On a Mac these run on its GPU; what needs a fault or another machine runs on the software Metal.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kernel_harness import In, Out, linear, params
from kernel_harness import Kernels as Ops
from lily import LilyError, _core
from model_harness import CALM, fresh_engine

sys.path.append(str(Path(__file__).resolve().parent / "apple/software_metal"))
from broken_rules import SoftwareMetal

STATUS = next(s for s in _core.devices() if s.name == "metal")
pytestmark = pytest.mark.skipif(not STATUS.available, reason=f"no Metal: {STATUS.description}")
SOURCE = Path(__file__).resolve().parent.parent / "src/metal"
TIMEOUT, REVOKED, REMOVED, NOT_PERMITTED = 2, 4, 11, 7  # MTLCommandBufferError


try:
    SOFTWARE = SoftwareMetal()
except AttributeError:  # Apple's, or none
    SOFTWARE = None


@pytest.fixture(autouse=True)
def no_rule_is_broken() -> Iterator[None]:
    before = SOFTWARE.broken() if SOFTWARE else []
    yield
    if SOFTWARE:
        assert SOFTWARE.broken() == before
        assert SOFTWARE.faults_left() == 0
        # What the device does without is slower or nameless, and wrong in no other way.
        for what in ("serial_encoders", "tracked_buffers", "unlabelled"):
            assert SOFTWARE.count(what) == 0, what


@pytest.fixture
def software() -> SoftwareMetal:
    if SOFTWARE is None:
        pytest.skip("faults and other machines are played by the software Metal only")
    return SOFTWARE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts without an archive."""
    monkeypatch.setenv("LILY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def status() -> _core.DeviceStatus:
    return next(s for s in _core.devices() if s.name == "metal")


# ---- programs of copies ------------------------------------------------------------------------
class Copies:
    """Words in device memory, and programs that copy ranges between them."""

    def __init__(self, words: int, buffers: int, seed: int, exact: bool = False) -> None:
        self.core = _core.Kernels("metal", exact)
        rng = np.random.default_rng(seed)
        self.words = words
        self.host = rng.integers(0, 1 << 32, (buffers, words), dtype=np.uint32)
        self.buffers = [self.core.buffer(words * 4, f"buffer {i}") for i in range(buffers)]
        for buffer, values in zip(self.buffers, self.host, strict=True):
            buffer.write(0, values.view(np.uint8))

    def call(self, a: int, at: int, b: int, to: int, count: int) -> tuple:
        raw = np.frombuffer(bytes(params("copy_bytes", bytes=count * 4)), np.uint8)
        views = [(self.buffers[a], at * 4, count, "u32"), (self.buffers[b], to * 4, count, "u32")]
        return ("copy_bytes", raw, views, [], [])

    def run(self, moves: list[tuple[int, int, int, int, int]], times: int = 1) -> None:
        """On the device and, in order, on the host."""
        self.core.run([self.call(*m) for m in moves], times > 1, times)
        for a, at, b, to, count in moves * times:
            self.host[b, to : to + count] = self.host[a, at : at + count].copy()

    def check(self) -> None:
        for i, buffer in enumerate(self.buffers):
            got = np.empty(self.words, np.uint32)
            buffer.read(0, got.view(np.uint8))
            assert np.array_equal(got, self.host[i]), f"buffer {i}"


def random_moves(
    rng: np.random.Generator, words: int, buffers: int, n: int
) -> list[tuple[int, int, int, int, int]]:
    moves = []
    for _ in range(n):
        a, b = rng.choice(buffers, 2, replace=False)
        count = int(rng.integers(1, words // 4))
        at, to = rng.integers(0, words - count, 2)
        moves.append((int(a), int(at), int(b), int(to), count))
    return moves


@pytest.mark.parametrize("seed", range(6))
def test_launches_that_touch_the_same_bytes_keep_their_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    copies = Copies(600, 3, seed)
    copies.run(random_moves(rng, 600, 3, 24))
    copies.check()


@pytest.mark.parametrize("seed", range(3))
def test_programs_in_flight_keep_their_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    copies = Copies(300, 3, seed)
    for _ in range(3):
        copies.run(random_moves(rng, 300, 3, 5), times=5)
    copies.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_program_waits_for_the_one_before_while_that_still_runs(seed: int) -> None:
    """The first launch takes long enough for the next program to be committed behind it."""
    words = 100_000
    copies = Copies(words, 3, seed)
    copies.run([(0, 0, 1, 0, words), (1, 0, 2, 1, words - 1), (2, 0, 0, 0, words)], times=5)
    copies.check()


def test_one_command_buffer_waits_while_another_runs(software: SoftwareMetal) -> None:
    words = 100_000
    copies = Copies(words, 2, 3)
    for _ in range(20):  # the host has to be quicker than the GPU once
        copies.run([(0, 0, 1, 0, words)], times=4)
        if software.count("most_in_flight") > 1:
            break
    assert software.count("most_in_flight") == 2
    copies.check()


def test_a_hazard_with_an_older_launch_than_the_last_counts() -> None:
    copies = Copies(64, 6, 1)
    copies.run([(0, 0, 1, 0, 64), (2, 0, 3, 0, 64), (4, 0, 5, 0, 64), (1, 0, 2, 0, 64)])
    copies.check()


def test_launches_without_a_hazard_share_a_barrier(software: SoftwareMetal) -> None:
    copies = Copies(64, 6, 1)
    before = software.count("barriers")
    copies.run([(0, 0, 1, 0, 64), (2, 0, 3, 0, 64), (4, 0, 5, 0, 64)])
    assert software.count("barriers") == before
    copies.run([(0, 0, 1, 0, 64), (2, 0, 3, 0, 64), (1, 0, 4, 0, 64), (3, 0, 5, 0, 64)])
    assert software.count("barriers") == before + 1
    copies.check()


def test_a_host_copy_waits_for_all_that_was_submitted() -> None:
    copies = Copies(2000, 2, 3)
    for i in range(4):
        copies.run([(i % 2, 0, 1 - i % 2, 0, 2000)], times=3)
        copies.host[0, :7] = i
        copies.buffers[0].write(0, copies.host[0, :8].view(np.uint8))
    copies.check()


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_host_copy_waits_for_what_another_thread_submitted(
    software: SoftwareMetal, how: str
) -> None:
    words = 100_000
    copies = Copies(words, 3, 3)
    first = copies.host[0].copy()
    calls = [copies.call(0, 0, 1, 0, words)] * 6 + [copies.call(0, 0, 2, 0, words)]
    start = software.count("command_buffers")
    thread = threading.Thread(target=copies.core.run, args=(calls, True, 2))
    thread.start()
    while software.count("command_buffers") < start + 2:
        time.sleep(0.0005)
    if how == "write":
        copies.buffers[0].write(0, np.zeros(words * 4, np.uint8))
    got = np.empty(words, np.uint32)
    copies.buffers[2].read(0, got.view(np.uint8))
    assert np.array_equal(got, first)
    thread.join()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MOST_THREADS", "128", "256 threads a group, the kernel's registers allow 128"),
        ("SIMD", "16", "simdgroups of 16 threads, the kernels are written for 32"),
        ("STATIC_MEMORY", "40000", "40000 bytes of threadgroup memory, the GPU has 32768"),
    ],
)
def test_a_pipeline_that_does_not_fit_its_launch_is_refused(
    software: SoftwareMetal,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    copies = Copies(64, 2, 4)
    monkeypatch.setenv(f"SOFTWARE_METAL_{variable}", value)
    with pytest.raises(LilyError, match=f"kernels: step 0 copy_bytes: {message}"):
        copies.run([(0, 0, 1, 0, 64)])


def test_an_argument_that_begins_inside_a_word_is_refused() -> None:
    core = _core.Kernels("metal", False)
    raw = np.frombuffer(bytes(params("rms_norm", rows=1, k=64, eps=1e-6)), np.uint8)
    x, gain, y = (core.buffer(256, name) for name in ("x", "gain", "y"))
    for at, other, message in ((2, 0, "argument 0 begins at 2"), (4, 6, "argument 2 begins at 6")):
        views = [(x, at, 64, "bf16"), (gain, 0, 64, "f32"), (y, other, 64, "bf16")]
        with pytest.raises(LilyError, match=f"step 0 rms_norm: {message}, must be a multiple of 4"):
            core.run([("rms_norm", raw, views, [], [])])


@pytest.mark.parametrize("count", [1, 4096, 4097, 12_000])
def test_the_whole_grid_runs(count: int) -> None:
    copies = Copies(12_001, 2, 5)
    copies.run([(0, 1, 1, 0, count)])
    copies.check()


def test_arguments_params_and_step_are_bound_in_order() -> None:
    ids = np.array([3, 0, 299], np.uint32)
    rng = np.random.default_rng(1)
    table = rng.integers(1, 0x7F00, (300, 64)).astype(np.uint16)
    ops = Ops("metal", False)
    x, _ = ops.run(
        "embed",
        params("embed", w=linear(300, 64, 16), rows=3),
        [
            In(table.view(np.uint32)),
            In(np.zeros(0, np.uint32)),
            In(ids),
            ops.out_act(3, 64),
            Out((3,), np.float32),
        ],
    )
    assert np.array_equal(x, table[ids])


# ---- long lists --------------------------------------------------------------------------------
def heavy(core: _core.Kernels) -> tuple:
    """A launch that costs a fifth of a second by its shapes and does nothing: it has no tiles."""
    rows, n, k = 512, 4096, 65536
    w = linear(n, k)
    flags = {"top_k": 1, "tile": 64, "swiglu": 1, "shared": 1}
    p = params("expert_matmul", w=w, rows=rows, experts=2, **flags)
    tiles = 1 + 2 * (2 * rows // 64 + 3)
    codes, pairs = n * k // 8, n * k // 64
    sizes = [2 * codes, 2 * pairs, codes, pairs, rows * k // 2, 2 * rows, 4, tiles, rows * n // 2]
    views = []
    for i, words in enumerate(sizes):
        buffer = core.buffer(words * 4, f"argument {i}")
        if words <= max(2 * rows, tiles):
            buffer.write(0, np.zeros(words * 4, np.uint8))
        dtype = "bf16" if i in (4, 8) else "u32"
        views.append((buffer, 0, words * (2 if dtype == "bf16" else 1), dtype))
    return ("expert_matmul", np.frombuffer(bytes(p), np.uint8), views, [], [])


def long_list(copies: Copies) -> list[tuple]:
    big = heavy(copies.core)
    first, second = copies.call(0, 0, 1, 0, 64), copies.call(1, 0, 2, 0, 64)
    calls = [first, *[big] * 5, second]
    assert copies.core.command_buffers(calls)[0] == [3, 5, 7]
    return calls


def test_a_long_list_runs_in_parts_each_once(software: SoftwareMetal) -> None:
    copies = Copies(64, 3, 2)
    calls = long_list(copies)
    before = software.count("command_buffers"), software.count("dispatches")
    copies.core.run(calls)
    assert software.count("command_buffers") == before[0] + 3
    assert software.count("dispatches") == before[1] + 7
    copies.host[1], copies.host[2] = copies.host[0], copies.host[0]
    copies.check()


def test_a_flag_stops_the_parts_that_are_not_committed(software: SoftwareMetal) -> None:
    copies = Copies(64, 3, 2)
    calls = long_list(copies) * 4
    start = software.count("command_buffers")
    total = len(copies.core.command_buffers(calls)[0])
    caught: list[BaseException] = []

    def run() -> None:
        try:
            copies.core.run(calls)
        except _core.Cancelled as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while software.count("command_buffers") == start and thread.is_alive():
        time.sleep(0.001)
    copies.core.cancel()
    thread.join()
    assert "kernels: cancelled" in str(caught[0])
    assert software.count("command_buffers") < start + total
    copies.core.cancel(False)
    copies.host[1] = copies.host[2] = copies.host[0]
    copies.run([(0, 0, 1, 0, 64), (1, 0, 2, 0, 64)])
    copies.check()


def test_a_flag_raised_before_stops_all() -> None:
    copies = Copies(64, 2, 2)
    copies.core.cancel()
    with pytest.raises(_core.Cancelled):
        copies.core.run([copies.call(0, 0, 1, 0, 64)])
    copies.check()
    copies.core.cancel(False)
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


# ---- faults ------------------------------------------------------------------------------------
def test_a_fault_names_its_step_and_the_next_run_is_right(software: SoftwareMetal) -> None:
    copies = Copies(64, 7, 4)
    moves = [(i, 0, i + 1, 0, 64) for i in range(6)]
    software.inject(f"command_buffer={TIMEOUT}")  # in the middle: three of the chain have run
    with pytest.raises(
        _core.DeviceError, match=r"^metal: kernels: step 2 copy_bytes: .*MTLCommandBuffer.* 2\)"
    ):
        copies.core.run([copies.call(*m) for m in moves])
    for buffer, values in zip(copies.buffers, copies.host, strict=True):
        buffer.write(0, values.view(np.uint8))
    copies.run(moves)
    copies.check()


@pytest.mark.parametrize("which", range(4))
def test_what_is_behind_a_fault_does_not_count_as_done(software: SoftwareMetal, which: int) -> None:
    copies = Copies(64, 2, 4)
    calls = [copies.call(0, 0, 1, 0, 64)]
    software.inject(f"command_buffer={TIMEOUT}", which)
    with pytest.raises(_core.DeviceError, match=r"kernels: step 0 copy_bytes: ") as caught:
        copies.core.run(calls, True, 4)
    assert ("behind a submission that failed" in str(caught.value)) == (which < 3)
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


@pytest.mark.parametrize("part", range(3))
def test_a_fault_in_a_part_stops_the_rest(software: SoftwareMetal, part: int) -> None:
    copies = Copies(64, 3, 4)
    calls = long_list(copies)
    software.inject(f"command_buffer={TIMEOUT}", part)
    start = software.count("command_buffers")
    steps = (r"[0-2]", r"[34]", r"[56]")[part]
    with pytest.raises(_core.DeviceError, match=rf"metal: kernels: step {steps} \w+: "):
        copies.core.run(calls)
    assert software.count("command_buffers") <= start + min(part + 2, 3)
    copies.run([(0, 0, 1, 0, 64), (1, 0, 2, 0, 64)])
    copies.check()


@pytest.mark.parametrize(
    ("fault", "what"), [("no_command_buffer", "command buffer"), ("no_encoder", "encoder")]
)
@pytest.mark.parametrize("which", range(2))
def test_metal_that_gives_nothing_to_encode_into(
    software: SoftwareMetal, fault: str, what: str, which: int
) -> None:
    copies = Copies(64, 2, 4)
    calls = [copies.call(0, 0, 1, 0, 64)]
    software.inject(fault, which)
    with pytest.raises(
        _core.DeviceError, match=f"^metal: .*kernels: steps 0 to 0: Metal gives no {what}"
    ):
        copies.core.run(calls, True, 3)
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


@pytest.mark.parametrize("code", [REMOVED, NOT_PERMITTED])
def test_a_lost_device_says_so_ever_after(software: SoftwareMetal, code: int) -> None:
    copies = Copies(64, 2, 4)
    calls = [copies.call(0, 0, 1, 0, 64)]
    software.inject(f"command_buffer={code}")
    with pytest.raises(_core.DeviceError, match=r"lost.*kernels: step 0 copy_bytes"):
        copies.core.run(calls)
    software.repair()
    data = np.zeros(256, np.uint8)
    for call in (
        lambda: copies.core.run(calls),
        lambda: copies.core.buffer(16, "more"),
        lambda: copies.buffers[0].read(0, data),
        lambda: copies.buffers[0].write(0, data),
    ):
        with pytest.raises(_core.DeviceError, match="the device was lost earlier: kernels: step 0"):
            call()
    fresh = Copies(64, 2, 4)
    fresh.run([(0, 0, 1, 0, 64)])
    fresh.check()


def test_hang_after_hang_loses_the_device(software: SoftwareMetal) -> None:
    copies = Copies(64, 2, 4)
    calls = [copies.call(0, 0, 1, 0, 64)]

    def revoked(message: str) -> None:
        software.inject(f"command_buffer={REVOKED}")
        with pytest.raises(_core.DeviceError, match=message):
            copies.core.run(calls)

    revoked("^metal: kernels: step 0")
    revoked("^metal: kernels: step 0")
    copies.run([(0, 0, 1, 0, 64)])  # a success between: counted anew
    revoked("^metal: kernels: step 0")
    revoked("^metal: kernels: step 0")
    revoked("the device was lost")
    software.repair()


def test_a_lost_device_closes_the_engine(software: SoftwareMetal) -> None:
    engine = fresh_engine(CALM, "metal", False)
    session = _core.Session(engine)
    session.sync(np.arange(5, dtype=np.uint32))
    software.inject(f"command_buffer={REMOVED}")
    with pytest.raises(_core.DeviceError, match="lost"):
        for _ in range(3):
            session.step()
    software.repair()
    with pytest.raises(LilyError, match="the device is lost, the engine is closed"):
        session.step()
    with pytest.raises(LilyError, match="the device is lost, the engine is closed"):
        _core.Session(engine)


# ---- pipelines ---------------------------------------------------------------------------------
def used() -> None:
    copies = Copies(64, 2, 4)
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


def built(software: SoftwareMetal) -> tuple[int, int]:
    """Pipelines that a first use compiles, and those it finds in the archive."""
    before = software.count("pipelines_compiled"), software.count("pipelines_loaded")
    used()
    return (
        software.count("pipelines_compiled") - before[0],
        software.count("pipelines_loaded") - before[1],
    )


def test_pipelines_are_built_once_and_found_again(software: SoftwareMetal, cache: Path) -> None:
    compiled, loaded = built(software)
    assert compiled > 0 and loaded <= compiled
    assert built(software) == (0, 1)
    (only,) = cache.iterdir()
    assert re.fullmatch(r"pipelines-[0-9a-f]+\.metalarchive", only.name)
    copies = Copies(64, 2, 4)
    before = software.count("pipelines_compiled"), software.count("pipelines_loaded")
    for _ in range(3):
        copies.run([(0, 0, 1, 0, 64)])
    after = software.count("pipelines_compiled"), software.count("pipelines_loaded")
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_archive_is_made_anew(software: SoftwareMetal, cache: Path, damage: str) -> None:
    first = built(software)
    (archive,) = cache.iterdir()
    good = archive.read_bytes()
    archive.write_bytes({"cut": good[: len(good) // 2], "garbage": b"?" * 99, "empty": b""}[damage])
    assert built(software) == first
    assert [p.name for p in cache.iterdir()] == [archive.name]
    assert built(software) == (0, 1)


def test_an_archive_grows_with_what_is_used(software: SoftwareMetal, cache: Path) -> None:
    used()
    ops = Ops("metal", False)
    x = np.ones((1, 64), np.float32)
    args = [In(ops.act(x)), In(np.ones(64, np.float32)), ops.out_act(1, 64)]
    ops.run("rms_norm", params("rms_norm", rows=1, k=64, eps=1e-6), args)
    assert len(list(cache.iterdir())) == 1
    before = software.count("pipelines_compiled")
    ops = Ops("metal", False)
    ops.run("rms_norm", params("rms_norm", rows=1, k=64, eps=1e-6), args)
    used()
    assert software.count("pipelines_compiled") == before


def test_archives_are_of_one_system_and_mode(
    software: SoftwareMetal, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used()
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", "26.1")
    assert built(software)[0] > 0
    _core.Kernels("metal", True)
    copies = Copies(64, 2, 4, exact=True)
    copies.run([(0, 0, 1, 0, 64)])
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setenv("SOFTWARE_METAL_FAMILY", "8")
    assert built(software)[0] > 0
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("fault", ["archive_read", "archive_write"])
def test_an_archive_that_fails_is_no_error(
    software: SoftwareMetal, cache: Path, fault: str
) -> None:
    if fault == "archive_read":
        used()
    software.inject(fault)
    used()
    assert len(list(cache.iterdir())) == (fault == "archive_read")  # no half of one stays
    used()
    assert len(list(cache.iterdir())) == 1


def test_without_a_place_for_it_there_is_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_CACHE", "/proc/nowhere")
    used()
    monkeypatch.delenv("LILY_CACHE")
    monkeypatch.delenv("HOME")
    used()


def test_the_home_folder_s_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    used()
    assert len(list((tmp_path / "Library/Caches/lily").iterdir())) == 1


@pytest.mark.parametrize(("macos", "language"), [("14.0", "3.1"), ("15.0", "3.1"), ("26.0", "4.0")])
def test_a_compile_error_carries_the_compiler_s_text(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch, macos: str, language: str
) -> None:
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", macos)
    copies = Copies(64, 2, 4)
    for _ in _core.metal_files():
        software.inject("compile")
    with pytest.raises(
        _core.DeviceError,
        match=rf"metal: \w+\.metal does not compile as MSL {language}: .*MTLLibraryErrorDomain",
    ):
        copies.run([(0, 0, 1, 0, 64)])
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


def test_a_pipeline_error_names_the_kernel(software: SoftwareMetal) -> None:
    copies = Copies(64, 2, 4)
    software.inject("pipeline")
    with pytest.raises(_core.DeviceError, match="metal: pipeline copy_bytes: "):
        copies.run([(0, 0, 1, 0, 64)])
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


def test_kernels_come_from_a_folder_when_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LILY_METAL_SOURCE", str(SOURCE))
    used()
    (tmp_path / "only.metal").write_text("// no kernel\n")
    monkeypatch.setenv("LILY_METAL_SOURCE", str(tmp_path))
    copies = Copies(64, 2, 4)
    with pytest.raises(LilyError, match=r"only\.metal does not compile|no kernel file defines it"):
        copies.run([(0, 0, 1, 0, 64)])


def test_a_file_that_does_not_compile_fails_its_own_kernels(
    software: SoftwareMetal, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is mended. And the archive of the text as it was is left alone."""
    used()
    shutil.copytree(SOURCE, tmp_path / "metal")
    with (tmp_path / "metal/norm.metal").open("a") as file:
        file.write("#error not finished\n")
    monkeypatch.setenv("LILY_METAL_SOURCE", str(tmp_path / "metal"))
    assert built(software)[0] > 0
    assert len(list(cache.iterdir())) == 2
    ops = Ops("metal", False)
    ones = np.ones((1, 64), np.float32)
    args = [In(ops.act(ones)), In(3 * ones[0]), ops.out_act(1, 64)]
    with pytest.raises(_core.DeviceError, match=r"norm\.metal does not compile.*not finished"):
        ops.run("rms_norm", params("rms_norm", rows=1, k=64, eps=1e-6), args)
    shutil.copy(SOURCE / "norm.metal", tmp_path / "metal")
    (y,) = ops.run("rms_norm", params("rms_norm", rows=1, k=64, eps=1e-6), args)
    assert np.array_equal(y, ops.act(3 * ones))


# ---- memory ------------------------------------------------------------------------------------
def test_memory_is_refused_with_both_numbers(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    monkeypatch.setenv("SOFTWARE_METAL_WORKING_SET", str(300 * mib))  # of which 256 are kept back
    core = _core.Kernels("metal", False)
    first = core.buffer(30 * mib, "first")
    for _ in range(3):
        message = (
            f"second needs {20 * mib} bytes .*, {30 * mib} of {44 * mib} are in use, {14 * mib}"
        )
        with pytest.raises(LilyError, match=message):
            core.buffer(20 * mib, "second")
    core.buffer(14 * mib, "fits")
    del first
    core.buffer(44 * mib, "all")
    with pytest.raises(LilyError, match=f"most needs {45 * mib} bytes"):
        core.buffer(45 * mib, "most")


def test_a_buffer_that_is_too_long_is_refused(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    monkeypatch.setenv("SOFTWARE_METAL_WORKING_SET", str(2 * gib))  # half of it in one buffer
    core = _core.Kernels("metal", False)
    with pytest.raises(
        LilyError, match=f"x needs {gib + 4} bytes .*, one buffer has at most {gib}"
    ):
        core.buffer(gib + 4, "x")


def test_memory_that_metal_refuses_counts_for_nothing(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    monkeypatch.setenv("SOFTWARE_METAL_WORKING_SET", str(300 * mib))
    core = _core.Kernels("metal", False)
    for _ in range(3):
        software.inject("allocation")
        with pytest.raises(LilyError, match=f"x needs {30 * mib} bytes .*Metal refuses it"):
            core.buffer(30 * mib, "x")
    core.buffer(44 * mib, "all")


def test_memory_for_params_that_metal_refuses_is_an_error(software: SoftwareMetal) -> None:
    copies = Copies(64, 2, 4)
    software.inject("allocation")
    with pytest.raises(LilyError, match=r"kernels: no \d+ bytes for params"):
        copies.run([(0, 0, 1, 0, 64)])
    copies.run([(0, 0, 1, 0, 64)])
    copies.check()


def test_freed_memory_is_given_back(software: SoftwareMetal) -> None:
    copies = Copies(64, 2, 4)
    copies.run([(0, 0, 1, 0, 64)])
    before = software.objects()
    for _ in range(5):
        copies.core.buffer(4096, "short-lived")
    assert software.objects() == before
    copies.run([(0, 0, 1, 0, 64)])


def test_a_buffer_of_nothing_is_refused() -> None:
    buffer = _core.Kernels("metal", False).buffer(0, "nothing")
    assert buffer.nbytes == 0  # Device::tensor asks for sixteen bytes at least


def test_fresh_memory_can_be_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.zeros(17 << 20, np.uint8)  # the software Metal poisons up to 16 MiB by itself
    for value, poisoned in (("1", True), ("0", False)):
        monkeypatch.setenv("LILY_POISON", value)
        _core.Kernels("metal", False).buffer(data.nbytes, "fresh").read(0, data)
        assert (data == 0xFF).all() == poisoned


def test_addresses_are_of_the_gpu() -> None:
    core = _core.Kernels("metal", False)
    a, b = core.buffer(4096, "a"), core.buffer(4096, "b")
    assert a.address and abs(a.address - b.address) >= 4096


def test_nothing_is_left_behind(software: SoftwareMetal) -> None:
    used()
    gc.collect()
    before = software.objects()
    for _ in range(2):
        used()
        copies = Copies(64, 2, 4)
        software.inject(f"command_buffer={TIMEOUT}")
        with pytest.raises(_core.DeviceError):
            copies.run([(0, 0, 1, 0, 64)], times=3)
        del copies
    gc.collect()
    assert software.objects() == before


# ---- which machines ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("SOFTWARE_METAL_MACOS", "13.6", r"this is macOS .*13\.6.*, lily needs macOS 14 or later"),
        ("SOFTWARE_METAL_FAMILY", "6", r"is no GPU of family Apple7 \(M1\) or later"),
        ("no_device", "2", "Metal finds no GPU"),
        ("no_queue", "1", "Metal gives no command queue"),
        ("no_event", "1", "Metal gives no fence"),
    ],
)
def test_says_why_it_is_absent(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    faults = 0 if variable.isupper() else int(value)
    monkeypatch.setenv(variable, value)
    for _ in range(faults):
        software.inject(variable)
    got = status()
    assert not got.available and re.search(reason, got.description)
    for _ in range(faults):
        software.inject(variable)
    with pytest.raises(LilyError, match=reason):
        _core.Kernels("metal", False)


def test_a_device_that_is_not_the_default_one_is_found(software: SoftwareMetal) -> None:
    """As in a program without graphics."""
    software.inject("no_device")
    assert status().available


@pytest.mark.parametrize("family", ["7", "9"])
def test_describes_the_machine(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setenv("SOFTWARE_METAL_FAMILY", family)
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", "14.2")
    monkeypatch.setenv("SOFTWARE_METAL_WORKING_SET", str(3 << 29))
    got = status()
    assert got.available
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    assert re.fullmatch(
        rf".*Apple{family}, macOS .*14\.2.*, 1\.5 GiB of {memory:.4g} GiB for the GPU",
        got.description,
    )


def test_time_is_that_of_the_gpu() -> None:
    copies = Copies(100_000, 2, 4)
    calls = [copies.call(0, 0, 1, 0, 100_000)]
    copies.core.run(calls)
    start = time.perf_counter()
    seconds = copies.core.time(calls, 8)
    assert 0 < 8 * seconds <= time.perf_counter() - start


def test_a_fork_is_told_that_it_has_no_device() -> None:
    copies = Copies(64, 2, 4)
    copies.run([(0, 0, 1, 0, 64)])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (
            lambda: copies.core.buffer(16, "more"),
            lambda: copies.core.run([copies.call(0, 0, 1, 0, 64)]),
            lambda: copies.buffers[0].write(0, np.zeros(256, np.uint8)),
        ):
            try:
                call()
            except LilyError as error:
                os.write(write, f"{error}\n".encode())
        del copies
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        told = lines.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(told) == 3 and all("the engine belongs to process" in line for line in told)
    copies.check()


# ---- the model, last: it takes longest ---------------------------------------------------------
def test_a_prefill_and_steps_are_those_of_the_cpu() -> None:
    """With another session between, whose keys lie beside the first one's."""
    ids = np.random.default_rng(3).integers(0, 200, 20).astype(np.uint32)
    results = []
    for device in ("cpu", "metal"):
        engine = fresh_engine(CALM, device, True)
        session, other = _core.Session(engine), _core.Session(engine)
        session.sync(ids)
        other.sync(ids[::-1].copy()[:5])
        results.append(([session.step().id for _ in range(3)], session.logits()))
    assert results[0][0] == results[1][0]
    assert np.abs(results[0][1] - results[1][1]).max() <= 1e-4


@pytest.mark.parametrize("macos", ["14.0", "26.0"])
def test_memory_reached_by_address_is_resident(
    software: SoftwareMetal, monkeypatch: pytest.MonkeyPatch, macos: str
) -> None:
    """Sets from macOS 15 on; each encoder names it before that, or where the device has no sets."""
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", macos)
    session = _core.Session(fresh_engine(CALM, "metal", True))
    session.sync(np.arange(3, 22, dtype=np.uint32))
    with_sets = session.logits()
    session.step()  # by the decode route, which reaches it as well
    monkeypatch.setenv("SOFTWARE_METAL_MACOS", "26.0")
    software.inject("no_residency_set")
    session = _core.Session(fresh_engine(CALM, "metal", True))
    session.sync(np.arange(3, 22, dtype=np.uint32))
    assert np.array_equal(session.logits(), with_sets)
