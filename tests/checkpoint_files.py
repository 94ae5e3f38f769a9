"""Owns tiny checkpoint folders for tests and the ways to damage them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lily.checkpoint import LoadPlan, plan, read_checkpoint
from lily.errors import CheckpointError
from make_fixtures import write_checkpoint, write_json

# One layer of each kind, as small as the rules allow; sparse files, because data is not read.
MICRO: dict[str, Any] = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    hidden_size=64,
    vocab_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    max_position_embeddings=512,
    eos_token_id=3,
)
BIG: dict[str, Any] = dict(
    num_hidden_layers=40,
    hidden_size=2048,
    vocab_size=248320,
    num_attention_heads=16,
    num_key_value_heads=2,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=262144,
    eos_token_id=248044,
)
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LAYER0 = "language_model.model.layers.0."
QKV = LAYER0 + "linear_attn.in_proj_qkv"


def fresh(base: Path, name: str = "one") -> Path:
    """Writes one of the micro checkpoints into a new folder."""
    options: dict[str, dict[str, Any]] = {
        "one": {"vision": True, "mtp": True},
        "two": {"shards": 2},
        "hf": {"flavour": "hf", "vision": True, "mtp": True},
        "mlx16": {"flavour": "mlx16"},
    }
    path = base / f"{name}{len(os.listdir(base))}"
    return write_checkpoint(path, seed=None, **options[name], **MICRO)


def load(path: Path) -> LoadPlan:
    return plan(read_checkpoint(path))


def assert_refused(path: Path, *said: str) -> None:
    begin = time.process_time()  # the other worker may hold the core: a refusal costs no work
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert time.process_time() - begin < 1.0
    for text in said:
        assert text in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    write_json(path, value)


def edit_config(path: Path, **fields: Any) -> None:
    """Replaces fields of text_config; `...` removes one."""

    def edit(config: dict[str, Any]) -> None:
        for key, value in fields.items():
            if value is ...:
                del config["text_config"][key]
            else:
                config["text_config"][key] = value

    edit_json(path / "config.json", edit)


def split_file(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the number of its data bytes."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return header, file.stat().st_size - 8 - length


def put_header(file: Path, text: bytes, data_bytes: int, length: int | None = None) -> None:
    with file.open("wb") as stream:
        stream.write((len(text) if length is None else length).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + data_bytes)


def edit_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    header, data_bytes = split_file(file)
    edit(header)
    put_header(file, json.dumps(header).encode(), data_bytes)


def replace_linear(file: Path, module: str, parts: dict[str, tuple[str, list[int]]]) -> None:
    """Puts other tensors in a module's place and lays the file out again."""
    header, _ = split_file(file)
    header = {k: v for k, v in header.items() if not k.startswith(module + ".")}
    for part, (dtype, shape) in parts.items():
        header[f"{module}.{part}"] = dict(dtype=dtype, shape=shape)
    lay_out(file, header)


def lay_out(file: Path, header: dict[str, Any]) -> int:
    """Writes a header with all offsets computed anew; returns the number of data bytes."""
    sizes = dict(BF16=2, F16=2, F32=4, U32=4, I32=4, U16=2, U8=1, F8_E4M3=1, F64=8)
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = end, end + math.prod(entry["shape"]) * sizes[entry["dtype"]]
            entry["data_offsets"] = [begin, end]
    put_header(file, json.dumps(header).encode(), end)
    return end
