"""Owns `lily selftest`: the kernels of a device against stored results, a model, speeds."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lily
from lily import _core, selftest_model
from lily.checkpoint import plan, read_checkpoint
from lily.engine import first_available, load_core

REFERENCES = Path(__file__).with_name("selftest.zlib")
MODES = {"exact": True, "bf16": False}

_GUARD = 64  # bytes of poison on both sides of what a kernel may write
_POISON = 0xFF
_CONTEXT = 512
_ERROR = 4000  # characters of an error that are kept: a compiler may have much to say

_VIEWS: dict[str, Any] = {"u32": np.uint32, "u64": np.uint64, "f32": np.float32, "bf16": np.uint16}

Show = Callable[[str], None]
Bytes = NDArray[np.uint8]


@dataclass
class References:
    """The stored cases and arrays; tests/make_selftest.py writes them."""

    cases: list[dict[str, Any]]
    model: dict[str, dict[str, Any]]  # "whole" and "quick": prompt's length, tokens, logits
    timed: list[dict[str, Any]]
    arrays: dict[str, NDArray[Any]]

    @classmethod
    def load(cls, file: Path = REFERENCES) -> References:
        """Reads the file beside this module: the length of the JSON, the JSON, flat arrays; all of
        it deflated."""
        raw = zlib.decompress(file.read_bytes())
        end = 16 + int.from_bytes(raw[:16], "little")
        about = json.loads(raw[16:end])
        arrays = {
            name: np.frombuffer(raw[end + at : end + at + nbytes], dtype)
            for name, (dtype, at, nbytes) in about["arrays"].items()
        }
        return cls(about["cases"], about["model"], about["timed"], arrays)


@dataclass
class Report:
    """What is found out; every failure is kept, none ends the rest."""

    values: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    passed: int = 0

    def check(self, name: str, work: Callable[[], Any]) -> Any:
        """Counts a check and gives back its result, or None when it fails."""
        try:
            result = work()
        except Exception as error:  # a report needs all of them, whatever they are
            text = f"{type(error).__name__}: {error}"
            self.failures.append({"check": name, "error": text[:_ERROR]})
            return None
        self.passed += 1
        return result

    def text(self) -> str:
        """As JSON, a line for each part."""
        values = {
            **self.values,
            "passed": self.passed,
            "failed": len(self.failures),
            "failures": self.failures,
        }
        lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        return "{\n" + ",\n".join(lines) + "\n}"


def run(
    device: str, show: Show, quick: bool = False, references: References | None = None
) -> Report:
    """Tests a device, "auto" or a name, and says on the way what is being done.

    quick: fewer tokens and small buffers; sim is always tested so.
    """
    begin = time.perf_counter()
    report = Report()
    stored = references or References.load()
    name = report.check("a device", first_available) if device == "auto" else device
    quick = quick or name == "sim"
    report.values |= machine()
    report.values |= {"device": name, "quick": quick}
    known = {status.name: status for status in _core.devices()}
    if name in known:
        report.values["description"] = known[name].description
    if name is not None:
        for mode, exact in MODES.items():
            _operations(report, name, mode, exact, stored, show)
        with tempfile.TemporaryDirectory() as folder:
            report.check("write the model", lambda: selftest_model.write(Path(folder)))
            _models(report, name, Path(folder), stored, quick, show)
        _speeds(report, name, stored, quick, show)
    report.values["seconds"] = round(time.perf_counter() - begin, 1)
    return report


# ---- the machine ---------------------------------------------------------------------------------
def machine() -> dict[str, Any]:
    """Versions and hardware, as far as the system tells."""
    values: dict[str, Any] = {
        "lily": lily.__version__,
        "git": _commit(),
        "kernels": _kernel_text(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "os": platform.platform(),
    }
    if sys.platform == "darwin":
        values["macos"] = platform.mac_ver()[0]
        for name, key in (("machine", "hw.model"), ("chip", "machdep.cpu.brand_string")):
            values[name] = _output("sysctl", "-n", key)
        values["memory"] = _output("sysctl", "-n", "hw.memsize")
    return values


def _commit() -> str | None:
    """Of the sources, where the package lies in them."""
    source = Path(__file__).resolve().parents[2]
    if not (source / "src/metal/kernels.h").exists():
        return None
    return _output("git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12")


def _kernel_text() -> str:
    """Which kernels these are: two reports with the same can be compared."""
    digest = hashlib.sha256()
    for file in sorted(_core.metal_files()):
        digest.update(_core.metal_source(file, False).encode())
    return digest.hexdigest()[:12]


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# ---- single kernels ------------------------------------------------------------------------------
class Bench:
    """A device in one mode. After a failure of the device a new one takes its place."""

    def __init__(self, device: str, exact: bool) -> None:
        self._device, self._exact = device, exact
        self._kernels: _core.Kernels | None = None

    @property
    def kernels(self) -> _core.Kernels:
        if self._kernels is None:
            self._kernels = _core.Kernels(self._device, self._exact)
        return self._kernels

    def run(self, case: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> dict[str, Bytes]:
        """Runs a case; the bytes of what it wrote, by argument, "step" and "slab"."""
        try:
            return self._run(case, arrays)
        except _core.DeviceError:
            self._kernels = None
            raise

    def _run(self, case: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> dict[str, Bytes]:
        kernels = self.kernels
        written: list[tuple[str, _core.KernelBuffer, int]] = []
        views, steps, slabs = [], [], []
        for i, arg in enumerate(case["args"]):
            if "none" in arg:
                views.append((kernels.buffer(16, f"argument {i}"), 0, 0, "u32"))
                continue
            kind = arg["type"]
            if "array" in arg:
                data = _bytes(arrays[arg["array"]])
            else:
                data = np.full(arg["count"] * np.dtype(_VIEWS[kind]).itemsize, _POISON, np.uint8)
            buffer = _place(kernels, data, f"argument {i}")
            views.append((buffer, _GUARD, data.size // np.dtype(_VIEWS[kind]).itemsize, kind))
            if "array" not in arg or arg.get("written"):
                written.append((str(i), buffer, data.size))
        if "slab" in case:
            data = _bytes(arrays[case["slab"]])
            buffer = _place(kernels, data, "KV blocks")
            slabs.append((buffer, _GUARD, data.size // 4, "u32"))
            written.append(("slab", buffer, data.size))
        if "step" in case:
            data = _bytes(arrays[case["step"]]).copy()
            if "pages" in case:  # stored as 1 + place in the slab, 0 where there is none
                table = data[case["pages"] :].view(np.uint64)
                table[table > 0] += np.uint64(slabs[0][0].address + _GUARD - 1)
            buffer = _place(kernels, data, "step")
            steps.append((buffer, _GUARD, data.size // 4, "u32"))
            written.append(("step", buffer, data.size))
        params = np.frombuffer(bytes.fromhex(case["params"]), np.uint8)
        kernels.run([(case["op"], params, views, steps, slabs)])
        return {name: _fetch(buffer, size, name) for name, buffer, size in written}


def _bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _place(kernels: _core.Kernels, data: Bytes, label: str) -> _core.KernelBuffer:
    """Data in device memory between guards."""
    whole = np.full(2 * _GUARD + (data.size + 15) // 16 * 16, _POISON, np.uint8)
    whole[_GUARD : _GUARD + data.size] = data
    buffer = kernels.buffer(whole.size, label)
    buffer.write(0, whole)
    return buffer


def _fetch(buffer: _core.KernelBuffer, size: int, name: str) -> Bytes:
    whole = np.empty(buffer.nbytes, np.uint8)
    buffer.read(0, whole)
    end = _GUARD + size
    if not (whole[:_GUARD] == _POISON).all() or not (whole[end:] == _POISON).all():
        raise ValueError(f"output {name}: written outside of its {size} bytes")
    return whole[_GUARD:end]


def compare(got: dict[str, Bytes], case: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> float:
    """The largest error as a part of what is allowed; ValueError where it is more than that."""
    worst = 0.0
    for part in case["expect"]:
        values = got[str(part["output"])].view(_VIEWS[part["type"]])
        want = arrays[part["values"]]
        at = arrays[part["at"]] if "at" in part else np.arange(want.size) * part["stride"]
        found = values[at]
        if part["type"] == "u32":
            wrong = found != want
            errors = np.where(wrong, np.inf, 0.0)
        else:
            stored = found.astype(np.uint32) << 16 if part["type"] == "bf16" else found
            read = stored.view(np.float32).astype(np.float64)
            sure = want.astype(np.float64)
            finite = np.isfinite(sure)
            scale = np.sqrt(np.square(sure[finite]).mean()) if finite.any() else 0.0
            allowed = part["rel"] * scale + part["own"] * np.abs(np.where(finite, sure, 0.0))
            with np.errstate(divide="ignore", invalid="ignore"):
                errors = np.where(read == sure, 0.0, np.abs(read - sure) / allowed)
            wrong = ~(errors <= 1)  # NaN is wrong too
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"output {part['output']}: {int(wrong.sum())} of {wrong.size} values are wrong, "
                f"the first at {int(at[i])}: {found[i]} ({part['type']}), expected {want[i]}"
            )
        worst = max(worst, float(errors.max()))
    return worst


def _operations(
    report: Report, device: str, mode: str, exact: bool, stored: References, show: Show
) -> None:
    """All cases of a mode: pipeline -> (milliseconds with compiling, error / what is allowed)."""
    bench = Bench(device, exact)
    show(f"{mode}: starting")
    if report.check(f"{mode}: start {device}", lambda: bench.kernels) is None:
        return
    results: dict[str, tuple[float, float]] = {}
    for case in stored.cases:
        if case["mode"] not in (mode, "both"):
            continue

        def one(case: dict[str, Any] = case) -> tuple[float, float]:
            begin = time.perf_counter()
            got = bench.run(case, stored.arrays)
            seconds = time.perf_counter() - begin
            return round(seconds * 1e3, 2), round(compare(got, case, stored.arrays), 3)

        show(f"{mode}: {case['name']}")
        result = report.check(f"{mode}: {case['name']}", one)
        if result is not None:
            results[case["name"]] = result
    report.values.setdefault("kernels_ms_error", {})[mode] = results
    report.values.setdefault("device_after", {})[mode] = bench.kernels.description  # with its tile


# ---- a model -------------------------------------------------------------------------------------
def _models(
    report: Report, device: str, folder: Path, stored: References, quick: bool, show: Show
) -> None:
    want = stored.model["quick" if quick else "whole"]
    logits = stored.arrays[want["logits"]].astype(np.float64)
    devices = [device] if device == "cpu" else [device, "cpu"]
    for name in devices:
        for mode, exact in MODES.items():

            def decode(name: str = name, exact: bool = exact) -> dict[str, Any]:
                return _decode(name, exact, folder, want, logits)

            show(f"{mode}: a model on {name}")
            result = report.check(f"{mode}: model on {name}", decode)
            if result is not None:
                report.values.setdefault("model", {})[f"{name} {mode}"] = result


def _decode(
    device: str, exact: bool, folder: Path, want: dict[str, Any], logits: NDArray[np.float64]
) -> dict[str, Any]:
    """Reads the prompt and draws greedily. Exact mode has the stored tokens; in bf16 the logits
    are close."""
    loaded = plan(read_checkpoint(folder))
    engine = load_core(loaded, device, exact, _CONTEXT, loaded.config.vocab)
    session = _core.Session(engine)
    begin = time.perf_counter()
    session.sync(selftest_model.prompt(want["prompt"]))
    error = float(np.abs(session.logits() - logits).max() / logits.std())
    middle = time.perf_counter()
    tokens = [session.step().id for _ in want["tokens"]]
    end = time.perf_counter()
    allowed = want["allowed"]["exact" if exact else "bf16"]
    if not error <= allowed:
        raise ValueError(f"logits are off by {error:.2g} of their deviation, allowed {allowed:.2g}")
    if exact and tokens != want["tokens"]:
        raise ValueError(f"the tokens are {tokens}, expected {want['tokens']}")
    return {
        "prompt_ms": round((middle - begin) * 1e3, 2),
        "token_ms": round((end - middle) * 1e3 / len(tokens), 3),
        "error": float(f"{error:.2g}"),
        "same_tokens": tokens == want["tokens"],
    }


# ---- speeds --------------------------------------------------------------------------------------
def _speeds(report: Report, device: str, stored: References, quick: bool, show: Show) -> None:
    bench = Bench(device, False)
    megabytes, launches, runs = (1, 8, 2) if quick else (256, 200, 20)
    show("bandwidth")
    report.values["copy_gb_per_s"] = report.check("copy", lambda: _copy(bench, megabytes << 20))
    show("cost of a launch")
    report.values["level_us"] = report.check(
        "launches in turn", lambda: _launches(bench, launches, True, runs)
    )
    report.values["launch_us"] = report.check(
        "launches together", lambda: _launches(bench, launches, False, runs)
    )
    if quick:
        return
    results: dict[str, tuple[float, float]] = {}
    for case in stored.timed:

        def one(case: dict[str, Any] = case) -> tuple[float, float]:
            return _time(bench, case)

        show(f"speed of {case['name']}")
        result = report.check(f"time {case['name']}", one)
        if result is not None:
            results[case["name"]] = result
    report.values["us_and_gb_per_s"] = results


def _copy(bench: Bench, size: int) -> float:
    """Bytes read and written in a second, in 10^9."""
    kernels = bench.kernels
    views = [(kernels.buffer(size, name), 0, size // 4, "u32") for name in ("from", "to")]
    data = np.full(min(size, 1 << 20), 0x5A, np.uint8)
    for start in range(0, size, data.size):  # pages that exist
        views[0][0].write(start, data)
    params = np.array([size], np.uint64).view(np.uint8)
    seconds = kernels.time([("copy_bytes", params, views, [], [])], 5)
    got = np.empty(data.size, np.uint8)
    views[1][0].read(size - data.size, got)
    if not (got == data).all():
        raise ValueError("the copy differs from what was copied")
    return round(2 * size / seconds / 1e9, 2)


def _launches(bench: Bench, count: int, dependent: bool, runs: int) -> float:
    """Microseconds of a tiny launch in a long list, each waiting for the one before or for none."""
    kernels = bench.kernels
    buffer = kernels.buffer(256 * (count + 1), "launches")
    buffer.write(0, np.full(buffer.nbytes, 0x5A, np.uint8))
    params = np.array([4], np.uint64).view(np.uint8)
    calls: list[Any] = []
    for i in range(count):
        from_, to = (i, i + 1) if dependent else (count, i)
        views = [(buffer, 256 * at, 1, "u32") for at in (from_, to)]
        calls.append(("copy_bytes", params, views, [], []))
    return round(kernels.time(calls, runs) / count * 1e6, 3)


def _time(bench: Bench, case: dict[str, Any]) -> tuple[float, float]:
    """(microseconds, 10^9 bytes of weights and state a second) of a kernel at the 35B's shape."""
    kernels = bench.kernels
    views, steps = [], []
    for i, arg in enumerate(case["args"]):
        size = np.dtype(_VIEWS[arg["type"]]).itemsize
        nbytes = (arg["count"] * size + 15) // 16 * 16
        buffer = kernels.buffer(nbytes, f"argument {i}")
        # Small finite numbers of every type; memory that nothing wrote would not be read for real.
        data = np.full(min(nbytes, 1 << 20) // 4, arg["fill"], np.uint32).view(np.uint8)
        for start in range(0, nbytes, data.size):
            buffer.write(start, data[: nbytes - start])
        views.append((buffer, 0, arg["count"], arg["type"]))
    if "step" in case:
        data = np.frombuffer(bytes.fromhex(case["step"]), np.uint8)
        buffer = kernels.buffer(data.size, "step")
        buffer.write(0, data)
        steps.append((buffer, 0, data.size // 4, "u32"))
    params = np.frombuffer(bytes.fromhex(case["params"]), np.uint8)
    seconds = kernels.time([(case["op"], params, views, steps, [])], 10)
    return round(seconds * 1e6, 2), round(case["bytes"] / seconds / 1e9, 2)
