"""The macOS wheel that Linux builds: what dyld, Python and Metal will find in it."""

from __future__ import annotations

import base64
import collections
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("ziglang", reason="ziglang is not installed (Linux has it)")
lief = pytest.importorskip("lief", reason="lief is not installed: pip install '.[apple]'")
import pinned  # noqa: E402
import sdk  # noqa: E402

PYOBJC_CORE = pinned.Wheel(
    "pyobjc-core",
    "12.2.2",
    "macosx_10_13_universal2",
    "122e6ad302a2abf5d4d4adb0156db751600ddf2768441696cba17b31323085e7",
)
lief.logging.disable()


@functools.cache
def pythons() -> dict[str, str]:
    """Interpreters with headers by the kind of wheel that they build."""
    names = ("python3.11", "python3.12", "python3.13", "python3.14")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [sys.executable, *filter(None, map(shutil.which, names))]
    places += [str(p) for n in names for p in sorted(pyenv.glob(f"versions/3.1*/bin/{n}"))]
    ask = (
        "import os, sys, sysconfig, venv;"
        "assert os.path.exists(sysconfig.get_path('include') + '/Python.h');"
        "print(*sys.version_info[:2])"
    )
    found: dict[str, str] = {}
    for place in places:
        done = subprocess.run([place, "-c", ask], capture_output=True, text=True)
        if done.returncode == 0:
            kind = "cp311" if done.stdout.split() == ["3", "11"] else "abi3"
            found.setdefault(kind, place)
    return found


@dataclass
class Wheel:
    kind: str
    path: Path
    image: bytes
    file: Any  # lief's, which owns the next one
    macho: Any

    def bound(self) -> dict[str, set[str]]:
        """Names of the symbols that dyld has to find, by library; "" is anywhere."""
        found: dict[str, set[str]] = collections.defaultdict(set)
        for binding in self.macho.bindings:
            library = binding.library.name if binding.has_library else ""
            found[library].add(binding.symbol.name)
        return found


@pytest.fixture(scope="module", params=["cp311", "abi3"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Built by the documented command; LILY_MACOS_WHEELS names a folder of wheels built before."""
    kind = str(request.param)
    folder = Path(os.environ.get("LILY_MACOS_WHEELS") or tmp_path_factory.mktemp("wheels"))
    built = list(folder.glob(f"*{kind}-macosx_*.whl"))
    if not built:
        if kind not in pythons():
            version = "3.11" if kind == "cp311" else "3.12 or later"
            pytest.skip(f"no CPython {version} with headers is here to build the {kind} wheel")
        command = [sys.executable, str(ROOT / "tests/apple/wheel.py"), str(folder), pythons()[kind]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if "pip cannot download" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        built = [Path(done.stdout.splitlines()[-1])]
    (path,) = built
    with zipfile.ZipFile(path) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".so"))
        image = files.read(name)
    file = lief.MachO.parse(list(image))
    return Wheel(kind, path, image, file, file.at(0))


def test_name_and_contents(wheel: Wheel) -> None:
    tag = {"cp311": "cp311-cp311", "abi3": "cp312-abi3"}[wheel.kind] + "-macosx_14_0_arm64"
    suffix = {"cp311": ".cpython-311-darwin.so", "abi3": ".abi3.so"}[wheel.kind]
    assert wheel.path.name.endswith(f"-{tag}.whl")
    ours = [p for p in (ROOT / "python/lily").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    package = {str(p.relative_to(ROOT / "python")) for p in ours}
    with zipfile.ZipFile(wheel.path) as files:
        names = {name for name in files.namelist() if not name.endswith("/")}
        info = {name for name in names if ".dist-info/" in name}
        assert names - info == package | {f"lily/_core{suffix}"}
        (folder,) = {name.split("/")[0] for name in info}
        inside = {name.removeprefix(folder + "/") for name in info}
        assert inside == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
        about = files.read(f"{folder}/WHEEL").decode()
        assert f"Tag: {tag}\n" in about and "Root-Is-Purelib: false" in about
        for line in files.read(f"{folder}/RECORD").decode().splitlines():
            name, digest, _ = line.rsplit(",", 2)
            if digest:
                wanted = base64.urlsafe_b64encode(hashlib.sha256(files.read(name)).digest())
                assert digest == "sha256=" + wanted.decode().rstrip("="), name


def test_platform(wheel: Wheel) -> None:
    macho, version = wheel.macho, wheel.macho.build_version
    assert macho.header.cpu_type == lief.MachO.Header.CPU_TYPE.ARM64
    assert macho.header.file_type == lief.MachO.Header.FILE_TYPE.DYLIB
    assert version.platform == lief.MachO.BuildVersion.PLATFORMS.MACOS
    assert (version.minos, version.sdk) == ([14, 0, 0], [26, 0, 0])
    assert lief.MachO.LoadCommand.TYPE.LOAD_DYLINKER not in {c.command for c in macho.commands}


def test_libraries(wheel: Wheel, tmp_path: Path) -> None:
    """Each symbol comes from the library that has it; what macOS 14 lacks may be absent there."""
    sdk.write(tmp_path)
    header = (tmp_path / "include/Metal/Metal.h").read_text()
    known = {
        library: {*symbols, *(f"_OBJC_CLASS_$_{name}" for name in classes)}
        for library, (symbols, classes) in sdk.exports(header).items()
    }
    bound = wheel.bound()
    assert bound.keys() == {*known, sdk.SYSTEM, ""}
    for library in known:
        assert bound[library] <= known[library]
    assert {"_MTLCreateSystemDefaultDevice", "_OBJC_CLASS_$_MTLCompileOptions"} <= bound[sdk.METAL]
    # The system's libc++ is older than the headers: its own is inside. @available asks this one.
    assert not any("c++" in library.name for library in wheel.macho.libraries)
    assert "__availability_version_check" in bound[sdk.SYSTEM]
    newer = set(re.findall(r"API_AVAILABLE\S+\n@interface (\w+)", header))
    classes = "_OBJC_CLASS_$_"
    optional = {b.symbol.name for b in wheel.macho.bindings if b.weak_import}
    assert optional == {name for name in bound[sdk.METAL] if name.removeprefix(classes) in newer}


def test_python(wheel: Wheel) -> None:
    """Nothing is left to find anywhere but CPython's names, for abi3 the stable ones of 3.12."""
    names = {name.removeprefix("_") for name in wheel.bound()[""]}
    assert len(names) > 100 and all(re.match("_?Py", name) for name in names)
    if wheel.kind == "abi3":
        abi3info = pytest.importorskip("abi3info", reason="pip install '.[apple]'")
        stable = {
            symbol.name
            for table in (abi3info.FUNCTIONS, abi3info.DATAS)
            for symbol, facts in table.items()
            if (facts.added.major, facts.added.minor) <= (3, 12)
        }
        assert names - stable == set()
    elif sys.version_info[:2] == (3, 11):
        assert [name for name in names if not hasattr(ctypes.pythonapi, name)] == []


def test_exports_and_pointers(wheel: Wheel) -> None:
    """One name goes out. No pointer is left alone, and none may be moved to another library."""
    macho = wheel.macho
    assert [s.name for s in macho.symbols if s.has_export_info] == ["_PyInit__core"]
    assert not any("WEAK" in str(binding.binding_class) for binding in macho.bindings)
    flags = {str(flag).split(".")[-1] for flag in macho.header.flags_list}
    assert "TWOLEVEL" in flags and not flags & {"WEAK_DEFINES", "BINDS_TO_WEAK"}
    set_at_load = {b.address for b in macho.bindings} | {r.address for r in macho.relocations}
    tables = ("__got", "__la_symbol_ptr", "__objc_classrefs", "__objc_selrefs")
    slots = 0
    for section in macho.sections:
        if section.name in tables:
            for address in range(
                section.virtual_address, section.virtual_address + section.size, 8
            ):
                assert address in set_at_load, f"{section.name} {address:#x}"
                slots += 1
    assert slots > 300


def test_signature(wheel: Wheel) -> None:
    """Ad hoc, as Apple silicon demands of all code; every page's hash computed again."""
    at = wheel.macho.code_signature.data_offset
    assert wrong_pages(wheel.image, at) == []
    damaged = bytearray(wheel.image)
    damaged[5 << 14] ^= 1
    assert wrong_pages(bytes(damaged), at) == [5]


def wrong_pages(image: bytes, at: int) -> list[int]:
    """Pages whose hash in the signature at `at` is not theirs."""
    magic, _, count, kind, offset = struct.unpack_from(">5I", image, at)
    assert (magic, count, kind) == (0xFADE0CC0, 1, 0)
    directory = at + offset
    magic, _, _, flags, hashes, _, special, pages, limit = struct.unpack_from(
        ">9I", image, directory
    )
    assert magic == 0xFADE0C02 and flags == 0x20002  # ad hoc, by a linker
    hash_size, hash_kind, _, page_bits = struct.unpack_from(">4B", image, directory + 36)
    assert (hash_size, hash_kind, special, page_bits) == (32, 2, 0, 14)  # SHA-256
    assert limit == at and pages == (limit - 1 >> page_bits) + 1 > 100
    wrong = []
    for page in range(pages):
        content = image[page << page_bits : min(page + 1 << page_bits, limit)]
        kept = image[directory + hashes + 32 * page : directory + hashes + 32 * (page + 1)]
        if kept != hashlib.sha256(content).digest():
            wrong.append(page)
    return wrong


def test_what_is_inside(wheel: Wheel) -> None:
    """The kernel text as it is, the Metal device, NEON twins; nothing of the tests or other devices."""
    texts = [*(ROOT / "src/metal").glob("*.metal"), *(ROOT / "src/metal").glob("*.h")]
    assert len(texts) > 8
    for path in texts:
        assert path.read_bytes() in wheel.image, path.name
    for path in filter(Path.is_file, (ROOT / "src/metal/clang").rglob("*")):
        first = path.read_text().splitlines()[0].encode()
        assert first not in wheel.image, path.name
    symbols = "\n".join(symbol.name for symbol in wheel.macho.symbols)
    assert "make_metal" in symbols and "4neon" in symbols
    assert not re.search("N4lily3sim|tsan_|ptx_texts|[Ss]oftware|x86_v", symbols)
    for text in (b".target sm_", b"libcuda", b"SOFTWARE_METAL", b"LILY_SIM_SEED"):
        assert text not in wheel.image


def test_the_stubs_agree_with_programs_linked_on_a_mac(tmp_path: Path) -> None:
    """Which library has a name, against the bindings of pyobjc and mlx.

    That Metal's classes are in Metal was seen once in torch 2.7.1's libtorch_cpu.dylib.
    """
    sdk.write(tmp_path)
    ours = {}
    for library, (names, classes) in sdk.exports(
        (tmp_path / "include/Metal/Metal.h").read_text()
    ).items():
        for name in [*names, *(f"_OBJC_CLASS_$_{name}" for name in classes)]:
            ours[name] = library
    files = []
    try:
        files += pinned.fetch(PYOBJC_CORE, "/_objc.cpython-312-darwin.so").glob("objc/*.so")
        files += pinned.fetch(pinned.MACOS_15, "/libmlx.dylib").glob("mlx/lib/*.dylib")
    except pinned.Unavailable as error:
        pytest.skip(str(error))
    seen = {}
    for path in files:
        file = lief.MachO.parse(str(path))  # owns what comes out of it
        for macho in file:
            for binding in macho.bindings:
                if binding.has_library and binding.has_symbol:
                    seen[binding.symbol.name] = binding.library.name
    common = ours.keys() & seen.keys()
    assert len(common) > 40 and {ours[name] for name in common} == set(ours.values())
    assert {name: ours[name] for name in common} == {name: seen[name] for name in common}
    unseen = {n for n in ours if "NS" in n and n not in seen}
    assert unseen == {"_OBJC_CLASS_$_NSError"}
