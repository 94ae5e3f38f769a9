"""Owns the fuzzing of checkpoint folders: a CheckpointError or a plan that stays in its files."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import INDEX, SHARDS, fresh, load, put_header, split_file
from lily.checkpoint import LoadPlan
from lily.errors import CheckpointError
from make_fixtures import write_json

NUMBERS = b"-1 0 1 2 4 -0 1e3 1e999 NaN 9223372036854775807 18446744073709551616"
WORDS = b"null true false BF16 F16 F32 U32 U8 dtype shape data_offsets __metadata__ weight scales"
MARKS = b'{ } [ ] , : " .. / \\ \\ud800 \x00 \xff {} [] "" [[]]'
TOKENS = [*NUMBERS.split(b" "), *WORDS.split(b" "), *MARKS.split(b" ")]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 64, 2**31, 2**63, 2**64, 10**30, 0.5, 64.0),
    *("", "affine", "mxfp4", "BF16", "U32", "qwen3_5", "linear_attention", "../x.safetensors"),
    *([], [0], [0, 0], [1, 2, 3], [[]], {}, {"bits": 4}, {"a": {"b": []}}),
]


def mutate_text(text: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at, size = rng.randrange(len(text) + 1), rng.choice((1, 1, 2, 8, 100))
        kind = rng.randrange(5)
        if kind == 0 and at < len(text):
            text = text[:at] + bytes([text[at] ^ (1 << rng.randrange(8))]) + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at + size :]
        elif kind == 2:
            text = text[:at] + rng.choice(TOKENS) + text[at + rng.choice((0, size)) :]
        elif kind == 3:
            text = text[:at] + text[at : at + size] + text[at:]
        else:
            text = text[:at] + rng.randbytes(size) + text[at:]
    return text


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Replaces, removes, moves or nudges something anywhere below."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        if rng.random() < 0.9:
            value[key] = mutate_value(value[key], rng)
        elif rng.random() < 0.5:
            del value[key]
        else:
            value[key], other = value[rng.choice(list(value))], value[key]
            value[rng.choice(list(value))] = other
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        value[at] = mutate_value(value[at], rng)
        return value
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice((-2, -1, 1, 2, 64, -64))
    return copy.deepcopy(rng.choice(VALUES))


def fuzz_once(clean: Path, path: Path, rng: random.Random) -> bool:
    """One mutated folder; True when it still loads."""
    names = ("config.json", "generation_config.json", INDEX, *SHARDS, SHARDS[0], SHARDS[1])
    name = rng.choice(names)
    file = path / name
    if name in SHARDS:
        header, data_bytes = split_file(clean / name)
        as_value, length = rng.random() < 0.6, None
        if as_value:
            for _ in range(rng.choice((1, 1, 2, 4))):
                header = mutate_value(header, rng)
        text = json.dumps(header).encode()
        if not as_value:
            text = mutate_text(text, rng)
        if rng.random() < 0.1:
            length = max(0, len(text) + rng.choice((-9, -1, 1, 8, 10**6, 2**62)))
        put_header(file, text, max(0, data_bytes + rng.choice((0, 0, 0, 0, -1, 1))), length)
    elif rng.random() < 0.6:
        write_json(file, mutate_value(json.loads((clean / name).read_text()), rng))
    else:
        file.write_bytes(mutate_text((clean / name).read_bytes(), rng))
    try:
        assert_within_files(load(path))
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return False
    finally:
        shutil.copyfile(clean / name, file)
    return True


def assert_within_files(found: LoadPlan) -> None:
    parts = [vector.entry for vector in found.vectors.values()]
    for source in found.linears.values():
        last = source.offset + (source.experts - 1) * source.expert_stride
        end = source.weight.offset + source.weight.length
        assert source.weight.offset <= source.offset
        assert last + source.n * source.row_bytes <= end
        parts += [part for part in (source.weight, source.scales, source.biases) if part]
    for part in parts:
        assert 8 <= part.offset < part.offset + part.length <= part.file.stat().st_size
        assert part.file.name in SHARDS


def fuzz(clean: Path, path: Path, seed: int, seconds: float, rounds: int) -> int:
    shutil.copytree(clean, path)
    deadline, survived = time.monotonic() + seconds, 0
    for number in range(rounds):
        if time.monotonic() > deadline:
            break
        try:
            survived += fuzz_once(clean, path, random.Random(f"{seed}/{number}"))
        except Exception as error:
            raise AssertionError(f"fuzz_once with Random('{seed}/{number}')") from error
    return survived


def test_fuzz(tmp_path: Path) -> None:
    assert fuzz(fresh(tmp_path, "two"), tmp_path / "fuzz", 1, math.inf, 500) > 0


@pytest.mark.slow
def test_fuzz_for_five_minutes(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    assert fuzz(fresh(tmp_path, "two"), tmp_path / "fuzz", seed, 300.0, 10**9) > 0
