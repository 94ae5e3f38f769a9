"""The derived headers: read whole, equal to pyobjc's facts; metal.mm compiles, API mistakes do not."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
clang = pytest.importorskip("clang", reason="ziglang is not installed (Linux has it)")
import headers  # noqa: E402
import pinned  # noqa: E402
import pyobjc  # noqa: E402


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the headers; without network and cache the tests skip and say so."""
    folder = tmp_path_factory.mktemp("headers")
    try:
        headers.write(folder)
    except pinned.Unavailable as error:
        pytest.skip(str(error))
    return folder


# ---- what metal-cpp says, against what pyobjc found in the SDK -----------------------------------


def test_every_message_of_metal_cpp_is_read(include: Path) -> None:
    for version, api in headers.generations():
        assert api.unread == [], version
        assert len(api.protocols) > 50 and len(api.enums) > 90 and len(api.structs) > 30
        assert sum(len(methods) for methods in api.methods.values()) > 1600


def test_versions(include: Path) -> None:
    """Known first versions, some of each kind of declaration; unchanged files are not rewritten."""
    header = include / "Metal/Metal.h"
    text = header.read_text()
    new = "API_AVAILABLE(macos(15.0))"
    assert f"{new}\n@protocol MTLResidencySet <" in text
    assert f"{new}\n@interface MTLResidencySetDescriptor :" in text
    assert "API_AVAILABLE(macos(26.0))\n@protocol MTL4CommandQueue <" in text
    assert re.search(r"MTLLanguageVersion3_1 = 196609,\n", text)
    assert f"MTLLanguageVersion3_2 {new} = 196610," in text
    assert "MTLLanguageVersion4_0 API_AVAILABLE(macos(26.0)) = 262144," in text
    assert re.search(r"addResidencySet:\(id<MTLResidencySet>\)\w+ " + re.escape(new), text)
    assert "- (MTLGPUAddress)gpuAddress;" in text  # macOS 13
    # In a base since 15, in the class itself before.
    assert re.search(r"@protocol MTLResource <MTLAllocation>.*?allocatedSize;.*?@end", text, re.S)
    before = header.stat().st_mtime_ns
    headers.write(include)
    assert header.stat().st_mtime_ns == before


# Types that differ, by selector, and why ours stands.
SHARED = "pyobjc has one entry for the selector, other protocols have it with another type"
SLIP = "a slip of pyobjc's: Apple documents ours, and only older systems know its type"
TYPES_THAT_DIFFER = {
    "concurrentDispatchThreadgroups:threadsPerThreadgroup:": SLIP,
    "concurrentDispatchThreads:threadsPerThreadgroup:": SLIP,
    "fillBuffer:range:value:": "z is pyobjc's own sign for a byte that is a number",
    "imageblockMemoryLengthForDimensions:": SLIP,
    "imageblockSampleLength": SLIP,
    "newRenderPipelineStateWithTileDescriptor:options:reflection:error:": SLIP,
    "setImageblockWidth:height:": SLIP,
    "setKernelBuffer:offset:atIndex:": SLIP,
    "setSamplerState:atIndex:": SHARED,
    "setTexture:atIndex:": SHARED,
    "setTileSamplerState:lodMinClamp:lodMaxClamp:atIndex:": SLIP,
    "setTileSamplerStates:lodMinClamps:lodMaxClamps:withRange:": SLIP,
    "status": SHARED,
    "type": SHARED,
}
# Selectors of pyobjc that metal-cpp of macOS 26 leaves out; none concerns compute.
NOT_IN_METAL_CPP = {
    "executeCommandsInBuffer:inDirectBuffer:indirectBufferOffset:",
    "mtl4CommandQueue",
    "parseTileSizeInBytes",
    "setVertexAmplificationCount:viewMapping:",
    "sparseTileSizeWithTextureType_pixelFormat:sampleCount:",
    "supportsPlacementSparse",
}


@cache
def compiled_facts(include: Path) -> tuple[dict[str, int], dict[str, str], dict[str, list]]:
    """What clang makes of the headers: enum values, struct encodings, encodings by selector."""
    api = headers.generations()[-1][1]
    constants = sorted(name for enum in api.enums.values() for name in enum.members)
    lines = ["#import <Metal/Metal.h>"]
    lines += [f'extern "C" const unsigned long value_{n} = (unsigned long){n};' for n in constants]
    lines += [f'extern "C" const char struct_{n}[] = @encode({n});' for n in sorted(api.structs)]
    lines += [f"Protocol *use_{name} = @protocol({name});" for name in sorted(api.protocols)]
    command = clang.command(include, "-S", "-emit-llvm", "-w", "-o", "-", "-")
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ir = done.stdout.replace(r"\22", '"')
    values = {n: int(v) % 2**64 for n, v in re.findall(r"^@value_(\w+) = .* i64 (-?\d+)", ir, re.M)}
    texts = dict(re.findall(r'^@([\w.]+) = .*? c"(.*)\\00"', ir, re.M))
    structs = {n[7:]: text for n, text in texts.items() if n.startswith("struct_")}
    methods: dict[str, list] = {}
    for table in re.findall(r'^@"_OBJC_\$_PROTOCOL_INSTANCE_METHODS_MTL.*', ir, re.M):
        for name, kind in re.findall(r"ptr @(\S*_NAME_[.\d]*), ptr @(\S*_TYPE_[.\d]*)", table):
            methods.setdefault(texts[name], []).append(split_encoding(texts[kind]))
    return values, structs, methods


def split_encoding(encoding: str) -> list[str]:
    """The types of a method, result first, without stack offsets and qualifiers."""
    one = r'[rnNoORVA]*(?:\^[rnNoORVA]*)*(?:@\?|@"[^"]*"|(?P<group>[{(\[])|.)'
    types, at = [], 0
    while at < len(encoding):
        found = re.compile(one).match(encoding, at)
        assert found
        end = found.end()
        depth = 1 if found["group"] else 0
        while depth:
            depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(encoding[end], 0)
            end += 1
        types.append(plain(encoding[at:end]))
        at = re.compile(r"\d*").match(encoding, end).end()  # type: ignore[union-attr]
    return types


def plain(encoding: str) -> str:
    """Without const and direction; pyobjc writes Z for BOOL, and _MTL for some structs' tags."""
    encoding = re.sub(r"[rnNo](?=[\^@{*])", "", encoding)
    return re.sub(r"\bZ$", "B", encoding.replace("_MTL", "MTL"))


def pyobjc_metadata() -> pyobjc.Metadata:
    try:
        return pyobjc.metadata()
    except pinned.Unavailable as error:
        pytest.skip(str(error))


def test_enum_values_are_the_sdks(include: Path) -> None:
    known = pyobjc_metadata().enums
    values = compiled_facts(include)[0]
    common = values.keys() & known.keys()
    assert len(common) >= 900
    assert {n for n in common if values[n] != known[n] % 2**64} == set()
    old = "MTLFeatureSet_[wW]atchOS_GPUFamily|MTLStoreActionOptionValidMask"
    assert [n for n in values if n not in known and not re.match(old, n)] == []


def test_structs_are_the_sdks(include: Path) -> None:
    known = pyobjc_metadata().structs
    structs = compiled_facts(include)[1]
    assert len(structs) == len(known) - 1  # MTLCoordinate2D is a name for a MTLSamplePosition
    for name, encoding in structs.items():
        theirs = plain(known[name]).replace(
            "MTLPackedFloatQuaternion=ffff", "MTLPackedFloatQuaternion=[4f]"
        )
        assert encoding == theirs, name


def test_method_types_are_the_sdks(include: Path) -> None:
    known = pyobjc_metadata().methods
    methods = compiled_facts(include)[2]
    assert known.keys() - methods.keys() == NOT_IN_METAL_CPP
    equal, different = 0, set()
    for selector in known.keys() & methods.keys():
        for types in methods[selector]:
            for place, theirs in known[selector].items():
                ours = types[place + 1 if place else 0]  # self and _cmd come after the result
                equal += ours == plain(theirs)
                if ours != plain(theirs):
                    different.add(selector)
    assert equal > 2500 and different == TYPES_THAT_DIFFER.keys()


def test_strings_are_the_sdks(include: Path) -> None:
    known = pyobjc_metadata().strings
    declared = set(re.findall(r"NSString \*const (\w+)", (include / "Metal/Metal.h").read_text()))
    assert declared <= known, declared - known


# ---- metal.mm against the headers -----------------------------------------------------------------

SOURCE = ROOT / "src/cpp/metal.mm"


@pytest.fixture(scope="module")
def refusal(include: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What clang has against a text in place of metal.mm; "" for nothing."""
    options = (f"-I{SOURCE.parent}", "-fno-spell-checking", "-ferror-limit=1")  # fast
    precompiled = tmp_path_factory.mktemp("precompiled") / "metal.pch"
    clang.precompile(include, SOURCE.read_text(), precompiled, *options)

    def compile_text(text: str) -> str:
        done = clang.check(include, text, *options, "-include-pch", str(precompiled))
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        assert bool(errors) == bool(done.returncode), done.stderr
        return errors[0] if errors else ""

    return compile_text


# What -> (pattern, replacement) in metal.mm, once; each must be refused.
MISTAKES = {
    "a selector that does not exist": (r"memoryBarrierWithScope:", "memoryBarrierWithScopes:"),
    "a letter's case in a selector": (r"threadsPerThreadgroup:", "threadsPerThreadGroup:"),
    "an argument left out": (r"updateFence:[^\]]+\]", "updateFence]"),
    "a part of a selector left out": (r"\boptions:options\b", ""),
    "an argument too many": (r"(\w+) endEncoding\]", r"\1 endEncoding:nil]"),
    "a queue for a fence": (r"waitForFence:[^\]]+\]", "waitForFence:gpu_->queue]"),
    "a pipeline for a buffer": (r"addAllocation:\w+", "addAllocation:device"),
    "an error by value": (r"options:options(\s+)error:&error", r"options:options\1error:error"),
    "std::string for NSString": (r"newLibraryWithSource:ns\(([^)]*)\)", r"newLibraryWithSource:\1"),
    "NSString for a C string": (r"\[s UTF8String\]", "s"),
    "NSString for NSURL": (r"\[NSURL fileURLWithPath:(ns\([^)]*\))\]", r"\1"),
    "a number for MTLSize": (
        r"threadsPerThreadgroup:MTLSizeMake\([^)]*\)",
        "threadsPerThreadgroup:32",
    ),
    "an element for its array": (r"@\[ archive_ \]", "archive_"),
    "a C++ value in an array": (r"@\[ archive_ \]", "@[ path_ ]"),
    "an enumerator that does not exist": (r"MTLDispatchTypeConcurrent", "MTLDispatchTypeParallel"),
    "an enumerator of another enum": (r"MTLDispatchTypeConcurrent", "MTLMutabilityMutable"),
    "a comparison across enums": (
        r"== MTLCommandBufferStatusCompleted",
        "== MTLCommandEncoderErrorStateCompleted",
    ),
    "a property that does not exist": (r"\.computeFunction\b", ".function"),
    "a property that is read only": (r"queue\.label = [^;]*;", "queue.device = device;"),
    "a property's value of another enum": (
        r"mathMode = MTLMathModeSafe",
        "mathMode = MTLLanguageVersion3_1",
    ),
    "a class that does not exist": (r"\[MTLCompileOptions alloc\]", "[MTLCompilerOptions alloc]"),
    "another class": (r"\[\[MTLCompileOptions alloc\]", "[[MTLComputePipelineDescriptor alloc]"),
    "a block's parameter type": (r"\^\(id<MTLCommandBuffer>", "^(id<MTLComputeCommandEncoder>"),
    "a block's parameter count": (
        r"\^\(id<MTLCommandBuffer> (\w+)\)",
        r"^(id<MTLCommandBuffer> \1, id)",
    ),
    "a method of another protocol": (r"\[queue addResidencySet:", "[device addResidencySet:"),
    "a call with an argument of a C function": (
        r"MTLCreateSystemDefaultDevice\(\)",
        "MTLCreateSystemDefaultDevice(0)",
    ),
    "macOS 15 without a guard": (r"if \(@available\(macOS 15, \*\)\)", "if (true)"),
    "macOS 26 without a guard": (r"if \(@available\(macOS 26, \*\)\)", "if (true)"),
    "macOS 26 behind an older guard": (r"@available\(macOS 26, \*\)", "@available(macOS 15, *)"),
    "release under ARC": (r"\[(\w+) endEncoding\]", r"[\1 release]"),
    "an object as void* under ARC": (
        r"\[(\w+) endEncoding\]",
        r"static void* kept = \1; (void)kept",
    ),
}


def test_metal_mm_compiles_and_mistakes_do_not(refusal: Callable[[str], str]) -> None:
    text = SOURCE.read_text()
    mutants = {}
    for what, (pattern, replacement) in MISTAKES.items():
        mutants[what] = re.sub(pattern, replacement, text, count=1)
        assert mutants[what] != text, f"{what}: metal.mm has no {pattern}"
    with ThreadPoolExecutor(2) as pool:
        original = pool.submit(refusal, text)
        refused = dict(zip(mutants, pool.map(refusal, mutants.values())))
    assert original.result() == ""
    assert [what for what, error in refused.items() if not error] == []
