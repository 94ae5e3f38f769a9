"""Owns the untrusted bytes on disk: strict JSON, safetensors headers, and which files a folder's
tensors come from. Only headers are read, never tensor data."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

from lily.errors import CheckpointError

MAX_JSON_BYTES = 16_000_000
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 100_000
MAX_RANK = 8
MAX_SIZE = 2**63 - 1  # of one dimension
INDEX = "model.safetensors.index.json"

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `length` bytes of `file` from the absolute byte `offset`.

    The offset is whatever the file says: it need not be aligned to anything.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    @property
    def where(self) -> str:
        """How a message names this tensor."""
        return f"{self.file.name}: tensor {shown(self.name)}"


def shown(value: object) -> str:
    """An untrusted value for a message: short, and printable whatever it holds."""
    text = value if isinstance(value, str) and value else reprlib.repr(value)
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def is_int(value: object) -> TypeGuard[int]:
    """JSON's true is an int to Python, but not to us."""
    return type(value) is int


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file; links are followed, a pipe is refused before it can block."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path.name}: not a regular file")
        return path.open("rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: missing from {path.parent}") from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from error


def parse_json_object(file: str, text: bytes) -> dict[str, object]:
    """One JSON object in UTF-8 without duplicate keys and without numbers that are not finite."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice = next(key for key, times in Counter(k for k, _ in pairs).items() if times > 1)
            raise ValueError(f"duplicate key {shown(twice)}")
        return fields

    def finite(literal: str) -> float:
        number = float(literal)
        if not math.isfinite(number):
            raise ValueError(f"number {shown(literal)} is not finite")
        return number

    # Counted before parsing, so that a hostile file costs no memory.
    for mark, limit in ((b"{", MAX_TENSORS + 2), (b"[", 2 * MAX_TENSORS), (b",", 16 * MAX_TENSORS)):
        if text.count(mark) > limit:
            raise CheckpointError(
                f"{file}: JSON has {text.count(mark)} {mark.decode()!r}, the limit is {limit}"
            )
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=finite,
            parse_constant=finite,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise CheckpointError(f"{file}: JSON is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, object]:
    with open_regular(path) as stream:
        text = stream.read(limit + 1)
    if len(text) > limit:
        raise CheckpointError(f"{path.name}: more than {limit} bytes, the limit for this file")
    return parse_json_object(path.name, text)


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file in the order of their bytes, which they must fill."""
    file = path.name
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: has {size} bytes, the header's length alone takes 8")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: header of {length} bytes, the limit is {MAX_HEADER_BYTES}"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{file}: header needs {8 + length} bytes, the file has {size}: truncated"
            )
        text = stream.read(min(length, 1))
        if text != b"{":
            raise CheckpointError(f"{file}: header starts with {text!r}, expected b'{{'")
        text += stream.read(length - 1)
    header = parse_json_object(file, text)
    _check_metadata(file, header.pop("__metadata__", {}))
    start = 8 + length
    entries = [_entry(path, name, fields, start, size) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.length))
    _check_filled(file, entries, start, size)
    return entries


def _check_metadata(file: str, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map strings to strings")


def _entry(path: Path, name: str, fields: object, start: int, size: int) -> TensorEntry:
    where = f"{path.name}: tensor {shown(name)}"
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where}: entry is {shown(fields)}, expected an object")
    expected = {"dtype", "shape", "data_offsets"}
    if fields.keys() != expected:
        odd = sorted(fields.keys() ^ expected)[0]
        state = "unknown field" if odd in fields else "no field"
        raise CheckpointError(f"{where}: {state} {shown(odd)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: dtype {shown(dtype)}, known are {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or not all(is_int(d) and 0 <= d <= MAX_SIZE for d in shape):
        raise CheckpointError(f"{where}: shape {shown(shape)}, expected a list of sizes")
    if len(shape) > MAX_RANK:
        raise CheckpointError(f"{where}: shape has {len(shape)} dimensions, limit is {MAX_RANK}")
    needed = math.prod(shape) * DTYPE_BYTES[dtype]  # exact: these integers do not overflow
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_int, offsets)):
        raise CheckpointError(f"{where}: data_offsets {shown(offsets)}, expected two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - start:
        raise CheckpointError(
            f"{where}: data_offsets [{shown(begin)}, {shown(end)}] are not within the file's"
            f" {size - start} data bytes"
        )
    if end - begin != needed:
        raise CheckpointError(
            f"{where}: dtype {dtype} shape {shown(shape)} needs {shown(needed)} bytes,"
            f" header gives {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, start + begin, needed)


def _check_filled(file: str, entries: list[TensorEntry], start: int, size: int) -> None:
    """Tensors follow each other without overlap or hole, and the last one ends the file."""
    end, before = start, "the header"
    for entry in entries:
        if entry.offset != end:
            kind = "overlaps" if entry.offset < end else "leaves a hole after"
            raise CheckpointError(
                f"{entry.where}: starts at data byte {entry.offset - start} and {kind} {before},"
                f" which ends at {end - start}"
            )
        end, before = entry.offset + entry.length, f"tensor {shown(entry.name)}"
    if end != size:
        raise CheckpointError(f"{file}: header describes {end} bytes, the file has {size}")


def read_tensors(folder: Path) -> tuple[str, dict[str, TensorEntry]]:
    """All tensors of a folder by their names in the files, and the file that lists them.

    With an index, its shards are the checkpoint and both must name the same tensors; without one,
    every *.safetensors file of the folder is. Shards are plain file names within the folder. Such a
    file may be a link to anywhere, as in the Hugging Face cache: a link in the user's folder is the
    user's choice, a path inside a downloaded index is not.
    """
    listed = os.path.lexists(folder / INDEX)
    index = _read_index(folder / INDEX) if listed else {}
    shards = sorted(set(index.values())) if listed else _find_shards(folder)
    missing = [shard for shard in shards if not os.path.exists(folder / shard)]
    if missing:
        raise CheckpointError(
            f"{shown(', '.join(missing))}: missing from {folder}"
            f" ({len(missing)} of {len(shards)} shards)"
        )
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in read_header(folder / shard):
            if entry.name in tensors:
                other = tensors[entry.name].file.name
                raise CheckpointError(f"{entry.where}: already in {other}")
            if listed and index.get(entry.name) != shard:
                says = (
                    f"places it in {shown(index[entry.name])}"
                    if entry.name in index
                    else "lacks it"
                )
                raise CheckpointError(f"{entry.where}: {INDEX} {says}")
            tensors[entry.name] = entry
    for name in index.keys() - tensors.keys():
        raise CheckpointError(
            f"{index[name]}: tensor {shown(name)}: {INDEX} places it here, the file lacks it"
        )
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(f"{folder}: has {len(tensors)} tensors, the limit is {MAX_TENSORS}")
    return INDEX if listed else ", ".join(shards), tensors


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path.name}: weight_map is {shown(weight_map)}, expected names with their files"
        )
    for name, shard in weight_map.items():
        if not (
            isinstance(shard, str)
            and shard.isprintable()
            and shard.endswith(".safetensors")
            and not shard.startswith(".")
            and not set(shard) & set("/\\:")
        ):
            raise CheckpointError(
                f"{path.name}: tensor {shown(name)} is placed in {shown(shard)},"
                " expected the name of a .safetensors file in the same folder"
            )
    return weight_map


def _find_shards(folder: Path) -> list[str]:
    # macOS leaves ._NAME files on foreign disks: hidden files are no shards.
    try:
        names = {
            name
            for name in os.listdir(folder)
            if name.endswith(".safetensors") and not name.startswith(".")
        }
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    if not names:
        raise CheckpointError(f"{folder}: holds no .safetensors file")
    # Without an index only the numbering tells that a shard is gone.
    wanted = set(names)
    for name in names:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name):
            stem, _, count = match.groups()
            wanted |= {f"{stem}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    return sorted(wanted)
