"""What Apple's linker would have done to an extension and zig's does not: edits of the linked file.

zig lets libc++ and its operators new and delete, which are inside the extension, be replaced by those
of any other library in the process, and exports them. Here they become private: the pointers to them
are right already, only the records that let dyld change them go. Of the exports PyInit_* stays.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

SDK = 26 << 16  # of the derived headers; zig writes its own libSystem's
LC_SYMTAB, LC_LOAD_DYLINKER, LC_CODE_SIGNATURE = 0x2, 0xE, 0x1D
LC_BUILD_VERSION, LC_DYLD_INFO_ONLY = 0x32, 0x80000022
WEAK_DEFINES, BINDS_TO_WEAK = 0x8000, 0x10000  # of the header's flags
HEADER = 32


def finish(path: Path) -> None:
    image = bytearray(path.read_bytes())
    assert image[:4] == b"\xcf\xfa\xed\xfe", f"{path} is not a thin 64-bit Mach-O file"
    commands = {command: at for command, at, _ in _commands(image)}

    info = struct.unpack_from("<10I", image, commands[LC_DYLD_INFO_ONLY] + 8)
    (_, _, _, _, weak, weak_size, _, _, exports, exports_size) = info
    image[weak : weak + weak_size] = bytes(weak_size)  # nothing but BIND_OPCODE_DONE
    (flags,) = struct.unpack_from("<I", image, 24)
    struct.pack_into("<I", image, 24, flags & ~(WEAK_DEFINES | BINDS_TO_WEAK))

    trie = _trie(*_init_function(image, commands[LC_SYMTAB]))
    assert len(trie) <= exports_size, (
        f"{len(trie)} bytes of exports, there is room for {exports_size}"
    )
    image[exports : exports + exports_size] = trie.ljust(exports_size, b"\0")

    struct.pack_into("<I", image, commands[LC_BUILD_VERSION] + 16, SDK)
    _drop(image, LC_LOAD_DYLINKER)  # a program's, not a library's
    _sign(image)
    path.write_bytes(image)


def _commands(image: bytearray) -> Iterator[tuple[int, int, int]]:
    """Kind, offset and size of each load command."""
    (count,) = struct.unpack_from("<I", image, 16)
    at = HEADER
    for _ in range(count):
        command, size = struct.unpack_from("<II", image, at)
        yield command, at, size
        at += size


def _init_function(image: bytearray, symtab: int) -> tuple[bytes, int]:
    """The name and address of PyInit_*, the image being at 0."""
    symbols, count, strings, _ = struct.unpack_from("<4I", image, symtab + 8)
    found = []
    for i in range(count):
        name_at, _, section, _, value = struct.unpack_from("<IBBHQ", image, symbols + 16 * i)
        start = strings + name_at
        name = bytes(image[start : image.index(b"\0", start)])
        if name.startswith(b"_PyInit_") and section:
            found.append((name, value))
    assert len(found) == 1, f"one PyInit_* is needed, there are {len(found)}"
    return found[0]


def _trie(name: bytes, address: int) -> bytes:
    """The export trie of one symbol: a root with one edge to a leaf with flags 0 and the address."""
    leaf = b"\0" + _uleb(address)
    edge = b"\0\1" + name + b"\0"
    return edge + bytes([len(edge) + 1]) + bytes([len(leaf)]) + leaf + b"\0"


def _uleb(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _drop(image: bytearray, unwanted: int) -> None:
    """Takes a load command out; those behind it move up, the rest of the file stays where it is."""
    for command, at, size in _commands(image):
        if command == unwanted:
            count, total = struct.unpack_from("<II", image, 16)
            image[at : HEADER + total] = image[at + size : HEADER + total] + bytes(size)
            struct.pack_into("<II", image, 16, count - 1, total - size)
            return


def _sign(image: bytearray) -> None:
    """Hashes the pages anew for the ad-hoc signature that zig has made."""
    commands = {command: at for command, at, _ in _commands(image)}
    blob, _ = struct.unpack_from("<II", image, commands[LC_CODE_SIGNATURE] + 8)
    magic, _, _, kind, directory = struct.unpack_from(">5I", image, blob)
    assert (magic, kind) == (0xFADE0CC0, 0), "the first blob of a signature is its code directory"
    at = blob + directory
    hashes, _, _, pages, limit = struct.unpack_from(">5I", image, at + 16)
    size, algorithm, _, page_bits = struct.unpack_from(">4B", image, at + 36)
    assert (size, algorithm) == (32, 2), "SHA-256"
    for page in range(pages):
        start = page << page_bits
        digest = hashlib.sha256(image[start : min(start + (1 << page_bits), limit)]).digest()
        image[at + hashes + 32 * page : at + hashes + 32 * (page + 1)] = digest
