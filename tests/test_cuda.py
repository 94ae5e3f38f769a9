"""The NVIDIA device: what it says and does around the kernels (under a fake driver), its embedded
kernels, and, where a card is, graphs against plain launches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import require_device
from kernel_harness import In, Kernels, Out, make_step, params, weight
from lily import _core

TESTS = Path(__file__).resolve().parent
_TEXT = Path(_core.__file__).read_bytes()
_BUILT = b".visible .entry" in _TEXT
pytestmark = pytest.mark.skipif(not _BUILT, reason="this build has no CUDA kernels (no clang)")


# ---- the embedded kernels --------------------------------------------------------------------
def test_every_variant_is_embedded_in_both_modes() -> None:
    entries = set(re.findall(rb"\.visible \.entry (\w+)\(", _TEXT))
    wanted = {f"{name}_{mode}".encode() for _, name in _core.variants() for mode in ("bf16", "f32")}
    assert not wanted - entries, "no kernel"
    assert not entries - wanted, "not in LILY_VARIANTS"


def test_no_kernel_keeps_arrays_in_local_memory() -> None:
    kernels = _TEXT.split(b".visible .entry ")[1:]
    assert not [k.split(b"(")[0].decode() for k in kernels if b".local " in k]


def test_ptx_runs_on_old_drivers() -> None:
    assert set(re.findall(rb"\n\.version ([\d.]+)\n", _TEXT)) == {b"7.8"}
    assert set(re.findall(rb"\n\.target (\w+)\n", _TEXT)) == {b"sm_80"}


# ---- under the fake driver -------------------------------------------------------------------
Run = Callable[..., str]


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python code in a process whose libcuda.so.1 is the fake; returns all it printed."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    compiler = shutil.which("c++")
    command = [compiler] if compiler else [sys.executable, "-m", "ziglang", "c++"]
    command += ["-std=c++20", "-O1", "-shared", "-fPIC", str(TESTS / "fake_libcuda.cpp")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)

    def run(code: str, settings: str = "", clean: bool = True, **env: str) -> str:
        path = os.pathsep.join([str(TESTS), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", _PRELUDE + code],
            env=os.environ
            | {"LD_LIBRARY_PATH": str(folder), "LILY_FAKE_CUDA": settings, "PYTHONPATH": path}
            | env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        text = done.stdout + done.stderr
        assert done.returncode == 0, text
        assert "misuse" not in text
        if clean:
            assert "released: 0 buffers, 0 pinned, 0 handles left" in text
        return text

    return run


_PRELUDE = """
import gc
import numpy as np
from kernel_harness import In, Kernels, Out, make_step, params, weight
from lily import _core

def status():
    return next(s for s in _core.devices() if s.name == "cuda")

def project(kernels, times=1, reuse=False, count=1):
    w = weight(np.random.default_rng(1), 32, 64)
    b = [kernels.core.buffer(n, "b") for n in (1024, 128, 256, 256, 64, 256, 256, 4096)]
    raw = np.frombuffer(bytes(params("project", w=w.linear, rows=1, ssq_parts=1, y_stride=32,
                                     y_offset=0, out_f32=1, eps=1e-6)), np.uint8)
    codes, pairs, x, gain, ssq, y0, y1, step = b
    act = "f32" if kernels.exact else "bf16"
    def call(to, gain_from):
        views = [(codes, 0, 256, "u32"), (pairs, 0, 32, "u32"), (x, 0, 64, act),
                 (gain_from, 0, 64, "f32"), (ssq, 0, 1, "f32"), (to, 0, 32, "f32")]
        return ("project", raw, views, [(step, 0, 1024, "u32")], [])
    calls = [call(y0, gain), call(y1, gain), call(y0, y1), call(y1, y0)][:count]
    kernels.core.run(calls, reuse, times)
"""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("version=11040", "supports CUDA 11.4, lily's kernels (PTX 7.8) need CUDA 11.8"),
        ("count=0", "finds no GPU"),
        ("major=7", "Fake GPU has compute capability 7.5, lily needs 8.0 or later"),
        ("fail=cuInit:803:1", "start the driver"),
        ("fail=cuDevicePrimaryCtxRetain:2:1", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_says_why_it_is_absent(fake: Run, settings: str, reason: str) -> None:
    text = fake("s = status(); print(s.available, s.description)", settings, clean=False)
    assert text.startswith("False") and reason in text


def test_no_driver() -> None:
    status = next(s for s in _core.devices() if s.name == "cuda")
    if status.available or "libcuda.so.1 was not found" not in status.description:
        pytest.skip(f"a driver is installed: {status.description}")
    with pytest.raises(_core.LilyError, match=r"no NVIDIA driver: libcuda\.so\.1 was not found"):
        Kernels("cuda", False)


def test_describes_the_card(fake: Run) -> None:
    text = fake("print(status().description)")
    assert "Fake GPU, compute capability 9.5, 4 GiB, CUDA 13.0" in text


REFUSED = """
try:
    k = Kernels("cuda", False)
    {}
    print("not refused")
except _core.LilyError as e:
    print(type(e).__name__, e)
k = None
gc.collect()
"""


def test_memory_limit_is_checked_before_allocation(fake: Run) -> None:
    text = fake(REFUSED.format('a = k.core.buffer(1 << 30, "a"); k.core.buffer(3 << 30, "kv")'))
    limit = (4 << 30) - (512 << 20) - (4 << 30) // 64
    assert f"LilyError cuda: kv needs {3 << 30} bytes" in text
    assert f"{1 << 30} of {limit} are in use, {limit - (1 << 30)} left" in text


def test_memory_taken_by_other_programs(fake: Run) -> None:
    text = fake(REFUSED.format('k.core.buffer(1 << 20, "kv")'), "fail=cuMemAlloc:2:1")
    assert f"LilyError cuda: kv needs {1 << 20} bytes" in text
    assert f"the card has {4 << 30} free of {4 << 30}" in text


@pytest.mark.parametrize("settings", ["", "pending=1"])
def test_large_copies_go_through_two_staging_buffers(fake: Run, settings: str) -> None:
    code = """
k = Kernels("cuda", False)
data = np.random.default_rng(0).integers(0, 256, (70 << 20) + 12, dtype=np.uint8)
b = k.core.buffer(data.size + 64, "weights")
b.write(20, data)
back = np.zeros_like(data)
b.read(20, back)
print("same", (back == data).all())
del b, k
"""
    assert "same True" in fake(code, settings)


def test_many_submissions_need_few_events(fake: Run) -> None:
    text = fake('k = Kernels("cuda", False); project(k, 1000, True); del k', "pending=1")
    most = re.search(r"at most (\d+) handles", text)
    assert most and int(most[1]) < 64 + 8


def test_graph_edges_are_the_hazards_nothing_else_implies(fake: Run) -> None:
    # y0 = f(gain), y1 = f(gain), y0 = f(y1), y1 = f(y0): the third waits for both, the fourth
    # for the third alone, which implies the others.
    text = fake('k = Kernels("cuda", True); project(k, reuse=True, count=4); del k')
    assert "graph: 4 nodes, 3 edges" in text


LOST = """
k = Kernels("cuda", False)
for _ in range(2):
    try:
        project(k, 3, {reuse}, 2)
    except _core.DeviceError as e:
        print("DeviceError", e)
del k
"""


def test_a_fault_names_the_program_and_closes_the_device(fake: Run) -> None:
    text = fake(LOST.format(reuse=True), "pending=1,fail=cuEventSynchronize:700:1")
    first, second = re.findall("DeviceError .*", text)
    assert "in flight: kernels, then kernels" in first and "CUDA_ERROR_ILLEGAL_ADDRESS" in first
    assert "LILY_SYNC=1" in first
    assert "the device was lost earlier" in second and "CUDA_ERROR_ILLEGAL_ADDRESS" in second


def test_stepwise_runs_name_the_step(fake: Run) -> None:
    text = fake(LOST.format(reuse=True), "fail=cuStreamSynchronize:700:2", LILY_SYNC="1")
    assert "kernels: step 1 project_q4_r1: CUDA_ERROR_ILLEGAL_ADDRESS" in text
    assert "graph:" not in text


def test_a_failed_compilation_names_the_file_and_can_be_tried_again(fake: Run) -> None:
    code = """
k = Kernels("cuda", False)
try:
    project(k)
except _core.DeviceError as e:
    print(e)
project(k)
print("second went well")
del k
"""
    text = fake(code, "fail=cuModuleLoadDataEx:218:1")
    assert "the driver cannot compile the kernels of linear.metal" in text
    assert "second went well" in text


@pytest.mark.parametrize(
    "call",
    ["cuMemAlloc", "cuMemcpyHtoDAsync", "cuModuleGetFunction", "cuFuncGetAttribute",
     "cuGraphCreate", "cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphLaunch",
     "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize"],
)  # fmt: skip
@pytest.mark.parametrize("error", [1, 700])
def test_any_failing_call_is_an_error_and_leaks_nothing(fake: Run, call: str, error: int) -> None:
    code = REFUSED.format(
        'k.core.buffer(64, "b").write(0, np.zeros(64, np.uint8)); project(k, 2, True, 4)'
    )
    text = fake(code, f"pending=1,fail={call}:{error}:1")
    assert "DeviceError cuda: " in text


def test_fresh_memory_is_poisoned_on_request(fake: Run) -> None:
    code = """
k = Kernels("cuda", False)
b = k.core.buffer(4096, "b")
raw = np.zeros(4096, np.uint8)
b.read(0, raw)
print("poisoned", (raw == 255).all())
del b, k
"""
    assert "poisoned True" in fake(code, LILY_POISON="1")


# ---- on a card -------------------------------------------------------------------------------
@pytest.mark.parametrize("exact", [True, False])
def test_graphs_and_plain_launches_agree_bitwise(exact: bool) -> None:
    require_device("cuda")
    kernels = Kernels("cuda", exact)
    rng = np.random.default_rng(3)
    w = weight(rng, 1000, 2048)
    p = params("project", w=w.linear, rows=3, ssq_parts=2, y_stride=1008, y_offset=0, out_f32=1,
               eps=1e-6)  # fmt: skip
    arrays = [w.codes, w.pairs, kernels.act(rng.standard_normal((3, 2048))),
              rng.uniform(-1.5, 1.5, 2048).astype(np.float32),
              rng.uniform(500, 1500, (3, 2)).astype(np.float32)]  # fmt: skip
    runs = []
    for reuse in (False, True):
        y = kernels.place(np.full((3, 1008), np.nan, np.float32))
        step = kernels.place(make_step(3))
        views = [(kernels.place(a), 64, a.size, {2: "bf16", 4: "f32"}[a.itemsize]) for a in arrays]
        views[:2] = [(*v[:3], "u32") for v in views[:2]]
        views.append((y, 64, 2 * 1008 + 1000, "f32"))
        raw = np.frombuffer(bytes(p), np.uint8)
        call = ("project", raw, views, [(step, 64, make_step(3).size // 4, "u32")], [])
        kernels.core.run([call], reuse, 100)
        runs.append(kernels.fetch(y, np.empty((3, 1008), np.float32)))
    assert np.isfinite(runs[0][:, :1000]).all() and np.isnan(runs[0][:2, 1000:]).all()
    assert runs[0].tobytes() == runs[1].tobytes()
    want = kernels.run("project", p, [*map(In, arrays), Out((3, 1008), np.float32)], make_step(3))
    assert want[0][:, :1000].tobytes() == runs[0][:, :1000].tobytes()
