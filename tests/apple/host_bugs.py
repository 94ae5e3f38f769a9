"""Seeded bugs of the Metal device: `python tests/apple/host_bugs.py BUILD` says what finds each.

BUILD is a build with the software Metal (tests/apple/run.py makes one). Each bug is a change of
metal.mm or metal_tickets.h that compiles. It is compiled and linked beside BUILD, and has to fail
tests/test_metal.py, which also fails when a rule of Metal's is broken.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "src/cpp"
UNITS = ("metal.mm", "metal_tile.cpp")  # of these, the others are headers
FILES = (*UNITS, "metal_tickets.h")
SLOWEST = 3  # times a clean run: what takes longer hangs


@dataclass(frozen=True)
class Bug:
    name: str
    old: str  # in exactly one place of one of FILES
    new: str = ""


BUGS = (
    # ---- order ----
    Bug("no wait for the buffer before", "    if (fenced_) [encoder waitForFence:gpu_->fence];\n"),
    Bug("fence never updated", "    [encoder updateFence:gpu_->fence];\n    fenced_ = true;\n"),
    Bug("no barriers", "      if (k.barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];\n"),
    Bug("barrier for textures", "MTLBarrierScopeBuffers", "MTLBarrierScopeTextures"),
    Bug(
        "hazards with the launch before only",
        "launches.begin() + since, launches",
        "launches.begin() + std::max(since, i - (i > begin)), launches",
    ),
    Bug("the launch behind a barrier is forgotten", "        since = i;\n", "        since = i + 1;\n"),
    Bug(
        "barrier one launch late",
        "program.kernels[i].barrier",
        "program.kernels[std::min(i + 1, end - 1)].barrier",
    ),
    # ---- residency ----
    Bug("buffers not in the residency set", "      [set addAllocation:buffer];\n"),
    Bug(
        "residency set not committed",
        "      [set addAllocation:buffer];\n      [set commit];\n",
        "      [set addAllocation:buffer];\n",
    ),
    Bug("residency set not on the queue", "        [queue addResidencySet:set];\n"),
    Bug("freed buffers stay resident", "      [set removeAllocation:buffer];\n"),
    Bug("memory reached by address not named", "if (!part.reached.empty()) {", "if (false) {"),
    # ---- bindings ----
    Bug("tensors begin where their buffers do", "bind(resolve(t).mtl, t.offset,", "bind(resolve(t).mtl, 0,"),
    Bug("first launch's params for all", "bind(program.params->mtl, params,", "bind(program.params->mtl, 0,"),
    Bug(
        "params too close for constant memory",
        "(l.params_size + kParamsAlignment - 1) / kParamsAlignment * kParamsAlignment",
        "(l.params_size + 15) / 16 * 16",
    ),
    Bug(
        "step before params",
        "    if (l.params_size > 0) bind(program.params->mtl, params, kParamsAlignment);\n"
        "    if (l.step.access != Access::none) bind_tensor(l.step.tensor);\n",
        "    if (l.step.access != Access::none) bind_tensor(l.step.tensor);\n"
        "    if (l.params_size > 0) bind(program.params->mtl, params, kParamsAlignment);\n",
    ),
    Bug("step not bound", "    if (l.step.access != Access::none) bind_tensor(l.step.tensor);\n"),
    Bug("bindings begin at 1", "NSMakeRange(0, k.buffers.size())", "NSMakeRange(1, k.buffers.size())"),
    Bug("grid turned", "MTLSizeMake(g.x, g.y, g.z)", "MTLSizeMake(g.y, g.x, g.z)"),
    Bug("32 threads a group", "MTLSizeMake(g.threads, 1, 1)", "MTLSizeMake(32, 1, 1)"),
    Bug("threads not checked", "l.grid.threads <= pipeline.maxTotalThreadsPerThreadgroup", "true"),
    Bug("width not checked", "pipeline.threadExecutionWidth == 32", "true"),
    Bug(
        "threadgroup memory not checked",
        "pipeline.staticThreadgroupMemoryLength <= gpu_->device.maxThreadgroupMemoryLength",
        "true",
    ),
    Bug(
        "one pipeline for all launches",
        "pipelines.at(program->list.launches[i].variant)",
        "pipelines.begin()->second",
    ),
    # ---- command buffers ----
    Bug("encoder not ended", "    [encoder endEncoding];\n"),
    Bug("not committed", "    [buffer commit];\n"),
    Bug("committed twice", "    [buffer commit];\n", "    [buffer commit];\n    [buffer commit];\n"),
    Bug(
        "handler after the commit",
        "    [buffer addCompletedHandler:^",
        "    tickets_->take_off(flight);\n    [buffer commit];\n    [buffer addCompletedHandler:^",
    ),
    Bug("parts overlap", "        begin = end;\n"),
    Bug("the last launch of a part is lost", "i < part.end; ++i", "i + 1 < part.end; ++i"),
    Bug(
        "program let go before it has run",
        "        flight->program = program;\n",
        "        flight->program = std::make_shared<MetalProgram>();\n",
    ),
    Bug("the program does not keep its params", "    program.params = make_buffer(", "    auto params = make_buffer("),
    Bug("no autorelease pool around submissions", "      @autoreleasepool {\n        auto flight", "      {\n        auto flight"),
    Bug("no autorelease pool around entries", "  @autoreleasepool {\n    try {", "  {\n    try {"),
    # ---- tickets ----
    Bug("wait returns before the GPU is done", "    tickets_->wait(ticket);  // also of what was cancelled half-way\n"),
    Bug("a download does not wait", "    finish();\n    std::memcpy(to,", "    std::memcpy(to,"),
    Bug("an upload does not wait", "    finish();\n    std::memcpy(buffer", "    std::memcpy(buffer"),
    Bug("status and error not looked at", "if (buffer.status == MTLCommandBufferStatusCompleted && !buffer.error) {", "if (true) {"),
    Bug("a failure covers its own ticket only", "failures_.push_back({f.ticket, kUntold, f.error});", "failures_.push_back({f.ticket, f.ticket, f.error});"),
    Bug("a failure that was told still covers all", "    if (f->through == kUntold) f->through = last_;\n"),
    Bug("a fault in a part does not stop the rest", "      if (tickets_->fails(ticket)) return;\n"),
    Bug("the wrong step is named", "begun[begun.count - 1]", "begun[0]"),
    Bug("names of steps are one off", 'return concat("step ", i, " ",', 'return concat("step ", i + 1, " ",'),
    Bug("a lost device is taken for a fault", "code != MTLCommandBufferErrorDeviceRemoved &&", "true &&"),
    Bug("one hang loses the device", "++revoked_ >= kRevokedLimit", "++revoked_ >= 1"),
    Bug("hangs are never forgotten", "    revoked_ = 0;\n"),
    Bug("cancel flag not looked at", "check<Cancelled>(!(cancel && cancel->load(std::memory_order_relaxed)),", "check<Cancelled>(true,"),
    Bug("cancel flag looked at once", "!(cancel && cancel->load(", "p > 0 || !(cancel && cancel->load("),
    Bug("no check for a fork", "    queue_.check_process();\n    gpu_->check_alive();\n", "    gpu_->check_alive();\n"),
    Bug("no check for a lost device", "    queue_.check_process();\n    gpu_->check_alive();\n", "    queue_.check_process();\n"),
    # ---- pipelines ----
    Bug("no new archive for a damaged one", "    if (!archive_) archive_ =", "    if (!descriptor.url) archive_ ="),
    Bug(
        "a damaged archive is an error",
        "      descriptor.url = nil;\n",
        '      check(archive_ != nil, "the archive is damaged");\n      descriptor.url = nil;\n',
    ),
    Bug("an archive that lacks a pipeline is an error", "    if (!b.missed) return;\n", "    if (!b.missed || archive_) return;\n"),
    Bug("the archive is never written", "    if (grown) save();\n"),
    Bug("the archive is not moved into place", "std::filesystem::rename(fresh, path, ignored);", ";"),
    Bug("what failed to compile counts as loaded", "      if (!b.pipeline && !b.from->broken.empty()) b.from->by_kernel.clear();\n"),
    Bug("one archive for every system", "    mix(text(NSProcessInfo.processInfo.operatingSystemVersionString));  // with the build\n"),
    Bug("the same text in both modes", "metal_source(file, exact_)", "metal_source(file, false)"),
    Bug("the compiler's text is dropped", "if (!l.library) l.error = reason(error);", 'if (!l.library) l.error = "no";'),
    Bug("the newest language everywhere", "if (@available(macOS 26, *)) version", "version"),
    Bug("pipelines are built anew each time", "b.from->built[b.variant] = b.pipeline;", "b.pipeline;"),
    # ---- the tile ----
    Bug("tensor operations are not asked for", "supportsFamily:MTLGPUFamilyMetal4", "supportsFamily:MTLGPUFamilyApple10"),
    Bug("exact mode on tensor operations", "if (exact() || !there)", "if (!there)"),
    Bug("plain kernels in both forms", "tensor && tensor_.by_kernel.count(name) ? tensor_ : plain_", "plain_"),
    Bug("tensor operations in the files that compile", "    if (!tensor_.broken.empty()) tensor_.by_kernel.clear();\n"),
    Bug("the trial is not kept", "    pooled([&] { pipelines_.keep_trial(tile_form_name(tile_.form)); });\n"),
    Bug("what was kept is not believed", "kept == tile_form_name(form)", "false"),
    Bug("wrong products pass", "!(difference <= kSame * largest)", "false"),
    Bug("a NaN before other products passes", " || std::isnan(apart)"),
    Bug("what the other tile left passes", "    device.upload(product.y, nan.data());\n"),
    Bug("no memory for the trial is an error", "catch (const LilyError& e) {  // no memory", "catch (const DeviceError& e) {  // no memory"),
    Bug("a fault decides the trial", "    } catch (const DeviceError&) {\n      throw;\n"),
    Bug("the slower tile", "seconds[1] < seconds[0]", "seconds[1] > seconds[0]"),
    # ---- memory ----
    Bug("refused memory counts", "        *allocated_ -= bytes;\n"),
    Bug("freed memory counts", "    if (account) *account -= size;\n"),
    Bug("the limit is not looked at", "bytes > limit_ || before > limit_ - bytes", "bytes > limit_"),
    Bug("a buffer's limit is not looked at", "if (bytes > longest_) {", "if (false) {"),
    Bug("nothing is kept back", "working_set_ > kReserve ? working_set_ - kReserve : 0", "working_set_"),
    Bug("no memory is not noticed", "  if (!buffer) return nullptr;\n"),
    Bug("the host does not see shared memory", "      if (memory == Memory::shared) buffer->host = buffer->contents;\n"),
    Bug("addresses of buffers, not of tensors", "gpuAddress + t.offset", "gpuAddress"),
    Bug("poison is not asked for", "    if (poison_) std::memset", "    if (false) std::memset"),
    Bug("any value of LILY_POISON poisons", ' && environment("LILY_POISON") != "0"'),
    # ---- what a Mac would be slower or nameless for ----
    Bug("dispatches one after the other", "MTLDispatchTypeConcurrent", "MTLDispatchTypeSerial"),
    Bug("buffers that Metal tracks", " | MTLResourceHazardTrackingModeUntracked"),
    Bug("one command buffer in flight", "kMaxInFlight = 2;", "kMaxInFlight = 1;"),
    Bug("three command buffers in flight", "kMaxInFlight = 2;", "kMaxInFlight = 3;"),
    Bug("command buffers without a label", "    buffer.label = ns(where);\n"),
    Bug("time of all runs together", "timing->busy / n", "timing->busy"),
    # ---- what a Mac may refuse or be ----
    Bug("no command buffer is not noticed", "    if (!buffer) {\n      tickets_->", "    if (false) {\n      tickets_->"),
    Bug("no encoder is not noticed", "    if (!encoder) {", "    if (false) {"),
    Bug("no fence is not noticed", '    check<DeviceError>(fence != nil, "Metal gives no fence");\n'),
    Bug("fast functions", "MTLMathFloatingPointFunctionsPrecise", "MTLMathFloatingPointFunctionsFast"),
    Bug("memory reached by address for reading only", "usage:MTLResourceUsageRead | MTLResourceUsageWrite", "usage:MTLResourceUsageRead"),
    Bug("encoders do not say how far they came", "    descriptor.errorOptions = MTLCommandBufferErrorOptionEncoderExecutionStatus;\n"),
    Bug("one archive for every GPU", "    mix(text(gpu_->device.name));\n"),
    Bug("one archive for every text", "      mix(libraries.back().source);\n"),
    Bug("a file that does not compile fails all kernels", "    open_archive(hash);\n", "    check<DeviceError>(plain_.broken.empty(), plain_.broken);\n    open_archive(hash);\n"),
    Bug("what an archive could not write stays", "    std::filesystem::remove(fresh, ignored);\n"),
    Bug("arguments inside a word pass", "kArgumentAlignment = 4;", "kArgumentAlignment = 1;"),
    Bug("the list of devices is not asked", "      if (!found && all.count > 0) found = all[0];\n"),
    Bug("an older GPU passes", "MTLGPUFamilyApple7", "MTLGPUFamilyApple6"),
    Bug("an older system passes", "oldest = {14, 0, 0}", "oldest = {13, 0, 0}"),
    Bug("the machine's memory is said to be the GPU's", "gib(found.recommendedMaxWorkingSetSize)", "gib(info.physicalMemory)"),
)  # fmt: skip


def mutated(bug: Bug) -> dict[str, str]:
    """The files with the bug in the one place it names."""
    texts = {name: (SOURCES / name).read_text() for name in FILES}
    homes = [name for name, text in texts.items() if bug.old in text]
    if len(homes) != 1 or texts[homes[0]].count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: its text is in {homes}, it has to be in one place")
    texts[homes[0]] = texts[homes[0]].replace(bug.old, bug.new)
    return texts


def commands(build: Path, target: str) -> list[list[str]]:
    ninja = Path(sys.executable).parent / "ninja"
    tool = str(ninja) if ninja.exists() else "ninja"
    done = subprocess.run(
        [tool, "-C", str(build), "-t", "commands", target],
        capture_output=True,
        text=True,
        check=True,
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


class Builder:
    """Compiles the files from another folder and links them into a copy of the package."""

    def __init__(self, build: Path) -> None:
        self.build = build
        lines = commands(build, "_core")
        self.compile = {
            unit: next(c for c in lines if str(SOURCES / unit) in c and "-c" in c) for unit in UNITS
        }
        self.link = next(c for c in reversed(lines) if "-shared" in c)

    def make(self, bug: Bug | None, folder: Path) -> None:
        """The package with the bug in it, in `folder`."""
        if bug:
            for name, text in mutated(bug).items():
                (folder / name).write_text(text)
        else:
            for name in FILES:
                shutil.copy(SOURCES / name, folder)
        objects = []
        for unit, line in self.compile.items():
            compiler = list(line)
            objects.append(str((folder / unit).with_suffix(".o")))
            compiler[compiler.index(str(SOURCES / unit))] = str(folder / unit)
            compiler[compiler.index("-o") + 1] = objects[-1]
            for flag in ("-MT", "-MF"):
                compiler[compiler.index(flag) + 1] = str((folder / unit).with_suffix(".d"))
            # In half the time; zig adds checks to what is not optimized.
            self.run([*compiler, "-O0", "-fno-sanitize=all", f"-I{SOURCES}"])
        package = folder / "lily"
        shutil.copytree(self.build / "package/lily", package, symlinks=True)
        end = self.link.index("-shared")
        linker = self.link[
            : next((i for i, w in enumerate(self.link) if w == "&&" and i > end), None)
        ]
        linker = linker[linker.index("&&") + 1 :] if "&&" in linker else linker
        at = linker.index("-o") + 1
        made = package / Path(linker[at]).name
        made.unlink()
        linker[at] = str(made)
        self.run([*linker[: at + 1], *objects, *linker[at + 1 :]])

    def run(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.build, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def outcome(folder: Path, seconds: float) -> str:
    """What the tests say of the package in `folder`; empty when all of them pass."""
    where = os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT / "tests/apple/software_metal")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0"]
    # The main thread may hang in C++. No test alone takes a third of them all.
    command += ["--timeout-method", "thread", "--timeout", str(seconds / SLOWEST)]
    environment = os.environ | {"PYTHONPATH": where, "LILY_REQUIRE": "metal", "COLUMNS": "200"}
    try:
        done = subprocess.run(
            [*command, "tests/test_metal.py", "tests/test_metal_tile.py"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if "+ Timeout +" in done.stdout + done.stderr:
        return "hangs"
    if done.returncode < 0:
        return f"ends with signal {-done.returncode}"
    found = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)(?: - (.*))?", done.stdout, re.MULTILINE)
    if done.returncode == 0 and not found and re.search(r"\d+ passed", done.stdout):
        return ""
    said = "; ".join(f"{name}: {why[:90]}" for name, why in found)
    return said or f"ends with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


def check(bug: Bug | None, builder: Builder, seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="host-bug-") as name:
        builder.make(bug, Path(name))
        return outcome(Path(name), seconds)


def survivors(build: Path, only: str = "", jobs: int = 2) -> list[str]:
    """Plants the bugs whose name holds `only`, `jobs` at a time, and prints what found them."""
    builder = Builder(build)

    def timed(bug: Bug | None, seconds: float) -> tuple[str, float]:
        start = time.monotonic()
        return check(bug, builder, seconds), time.monotonic() - start

    survived = []
    with ThreadPoolExecutor(jobs) as pool:
        # As many clean runs side by side as there will be bugs: a busy machine makes no test hang.
        clean = list(pool.map(lambda _: timed(None, 3600), range(jobs)))
        for result, _ in clean:
            if result:
                raise SystemExit(f"without a bug: {result}")
        seconds = SLOWEST * max(took for _, took in clean)
        print(f"without a bug: {seconds / SLOWEST:.0f} s", flush=True)
        chosen = [bug for bug in BUGS if only in bug.name]
        for bug, (result, took) in zip(
            chosen, pool.map(lambda bug: timed(bug, seconds), chosen), strict=True
        ):
            if not result:
                survived.append(bug.name)
            print(f"{bug.name:48} {took:4.0f} s  {result or 'SURVIVED'}", flush=True)
    return survived


if __name__ == "__main__":
    found = survivors(Path(sys.argv[1]).resolve(), "".join(sys.argv[2:3]))
    print("survived:", ", ".join(found) or "none")
    sys.exit(bool(found))
