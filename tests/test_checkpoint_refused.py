"""Owns the proof that a damaged checkpoint is refused, naming file and tensor, in a second."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import (
    INDEX,
    LAYER0,
    MICRO,
    ONE,
    QKV,
    SHARDS,
    assert_refused,
    edit_config,
    edit_header,
    edit_json,
    fresh,
    lay_out,
    load,
    put_header,
    replace_linear,
    split_file,
)
from lily import safetensors_header
from lily.checkpoint import read_checkpoint
from lily.errors import CheckpointError, LilyError
from lily.safetensors_header import MAX_HEADER_BYTES, read_header
from make_fixtures import FLAVOURS, Flavour, make_config, make_tensors, write_checkpoint, write_json

# ---------------------------------------------------------------------------------------------
# What is refused: config.json

INTEGERS = [
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "max_position_embeddings",
]
NOT_INTEGERS: dict[str, Any] = {
    "missing": ...,
    "null": None,
    "bool": True,
    "string": "64",
    "float": 256.0,
    "negative": -64,
    "zero": 0,
    "huge": 2**70,
    "4000 digits": 10**4000,
    "list": [64],
    "object": {"value": 64},
}


@pytest.mark.parametrize("kind", NOT_INTEGERS)
@pytest.mark.parametrize("field", INTEGERS)
def test_integers_of_the_config(tmp_path: Path, field: str, kind: str) -> None:
    path = fresh(tmp_path)
    edit_config(path, **{field: NOT_INTEGERS[kind]})
    assert_refused(path, "config.json: text_config." + field)


ROPE = make_config(FLAVOURS["mlx4"])["text_config"]["rope_parameters"]
CONFIG_RULES: list[tuple[dict[str, Any], str]] = [
    (
        dict(hidden_size=96),
        "hidden_size = 96, expected an integer from 64 to 65536, a multiple of 64",
    ),
    (dict(moe_intermediate_size=32), "moe_intermediate_size = 32"),
    (dict(shared_expert_intermediate_size=100), "shared_expert_intermediate_size = 100"),
    (dict(head_dim=128), "head_dim = 128, expected 256"),
    (dict(linear_key_head_dim=64), "linear_key_head_dim = 64, expected 128"),
    (dict(linear_value_head_dim=256), "linear_value_head_dim = 256, expected 128"),
    (dict(linear_conv_kernel_dim=3), "linear_conv_kernel_dim = 3, expected 4"),
    (dict(num_attention_heads=3, num_key_value_heads=2), "a divisor of num_attention_heads = 3"),
    (
        dict(num_attention_heads=17, num_key_value_heads=1),
        "num_key_value_heads = 1, expected at least 1 for 16 of num_attention_heads = 17",
    ),
    (dict(vocab_size=2**19 + 1), "vocab_size = 524289, expected an integer from 1 to 524288"),
    (dict(linear_num_key_heads=2, linear_num_value_heads=3), "a multiple of linear_num_key_heads"),
    (dict(num_experts=1), "num_experts = 1, expected an integer from 2 to 1024"),
    (dict(num_experts=1025), "num_experts = 1025"),
    (dict(num_experts_per_tok=5), "num_experts_per_tok = 5, expected an integer from 1 to 4"),
    (dict(num_experts=64, num_experts_per_tok=17), "expected an integer from 1 to 16"),
    (dict(max_position_embeddings=2**24 + 1), "max_position_embeddings"),
    (dict(layer_types=["linear_attention"]), "layer_types"),
    (dict(layer_types="linear_attention"), "layer_types"),
    (dict(layer_types=["linear_attention", "sliding_attention"]), "layer_types[1]"),
    (dict(layer_types=["linear_attention", None]), "layer_types[1]"),
    (dict(layer_types=["full_attention"] * 2), "at least one linear_attention"),
    (dict(layer_types=..., full_attention_interval=...), "full_attention_interval is missing"),
    (dict(layer_types=..., full_attention_interval=1), "at least one linear_attention"),
    (dict(layer_types=..., full_attention_interval=0), "full_attention_interval = 0"),
    (dict(attention_bias=True), "attention_bias = True"),
    (dict(attention_bias=0), "attention_bias = 0"),
    (dict(attn_output_gate=False), "attn_output_gate = False"),
    (dict(tie_word_embeddings=True), "tie_word_embeddings = True"),
    (dict(hidden_act="gelu"), "hidden_act = gelu"),
    (dict(norm_topk_prob=False), "norm_topk_prob = False"),
    (dict(mlp_only_layers=[0]), "mlp_only_layers = [0]"),
    (dict(decoder_sparse_step=2), "decoder_sparse_step = 2"),
    (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype = bfloat16"),
    (dict(use_sliding_window=True), "use_sliding_window"),
    (dict(model_type="qwen3_5_text"), "text_config.model_type = qwen3_5_text"),
    (dict(model_type=["qwen3_5_moe"]), "text_config.model_type"),
    (dict(rms_norm_eps=0), "rms_norm_eps = 0"),
    (dict(rms_norm_eps="1e-6"), "rms_norm_eps = 1e-6"),
    (dict(rms_norm_eps=True), "rms_norm_eps = True"),
    (dict(rms_norm_eps=10**400), "rms_norm_eps"),
    (dict(rms_norm_eps=...), "rms_norm_eps is missing"),
    (dict(rope_parameters=...), "rope_theta is missing"),
    (dict(rope_parameters=[]), "rope_parameters"),
    (dict(rope_parameters=ROPE | dict(rope_type="yarn")), "rope_parameters.rope_type = yarn"),
    (dict(rope_parameters=ROPE | dict(type="linear")), "rope_parameters.type = linear"),
    (dict(rope_parameters=ROPE | dict(factor=4.0)), "rope_parameters.factor = 4.0"),
    (dict(rope_parameters=ROPE | dict(rope_theta=-1)), "rope_parameters.rope_theta = -1"),
    (dict(rope_parameters=ROPE | dict(rope_theta=None)), "rope_parameters.rope_theta = None"),
    (dict(rope_parameters=ROPE | dict(partial_rotary_factor=0.3)), "head_dim = 256, this is 76.8"),
    (dict(rope_parameters=ROPE | dict(partial_rotary_factor=0.25 / 64)), "this is 1 dims"),
    (dict(rope_parameters=ROPE | dict(partial_rotary_factor=1.5)), "partial_rotary_factor = 1.5"),
    (dict(rope_parameters=ROPE | dict(partial_rotary_factor=0)), "partial_rotary_factor = 0"),
    (dict(rope_scaling=dict(type="yarn", factor=4)), "rope_scaling.type = yarn"),
    (dict(rope_theta=10000), "rope_theta = 10000, expected text_config.rope_parameters.rope_theta"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    (dict(eos_token_id=128), "eos_token_id = 128, expected ids from 0 to vocab_size - 1 = 127"),
    (dict(eos_token_id=[1, True]), "eos_token_id"),
    (dict(eos_token_id="</s>"), "eos_token_id"),
    (dict(quantization=dict(bits=8, group_size=64)), "text_config.quantization and quantization"),
]


@pytest.mark.parametrize(("fields", "said"), CONFIG_RULES, ids=[said for _, said in CONFIG_RULES])
def test_rules_of_the_config(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = fresh(tmp_path)
    edit_config(path, **fields)
    assert_refused(path, "config.json: ", said)


def quantised(**fields: Any) -> dict[str, Any]:
    section = dict(group_size=64, bits=4, mode="affine") | fields
    section = {key: value for key, value in section.items() if value is not ...}
    return dict(quantization=section, quantization_config=section)


TOP_RULES: list[tuple[dict[str, Any], str]] = [
    (dict(model_type="qwen3_5"), "model_type = qwen3_5, expected qwen3_5_moe or"),
    (dict(model_type="llama"), "model_type = llama"),
    (dict(model_type=None), "model_type = None"),
    (dict(architectures=["LlamaForCausalLM"]), "architectures"),
    (dict(architectures=[]), "architectures"),
    (dict(architectures="Qwen3_5MoeForCausalLM"), "architectures"),
    (dict(tie_word_embeddings=True), "tie_word_embeddings = True"),
    (dict(text_config=[]), "text_config = [], expected an object"),
    (dict(text_config={}), "text_config.model_type is missing"),
    (dict(eos_token_id=-1), "eos_token_id = -1"),
    (dict(quantization=[]), "quantization = []"),
    (dict(quantization_config=dict(quant_method="fp8")), "quantization_config.quant_method = fp8"),
    (dict(quantization_config=dict(bits=8, group_size=64)), "quantization_config and quantization"),
    (quantised(bits=...), "quantization.bits is missing"),
    (quantised(bits=4.0), "quantization.bits = 4.0"),
    (quantised(bits=True), "quantization.bits = True"),
    (quantised(group_size=None), "quantization.group_size = None"),
    (quantised(group_size=-64), "quantization.group_size = -64"),
    (quantised(mode=4), "quantization.mode = 4"),
    (quantised(surprise=8), "quantization.surprise = 8"),
    (quantised(**{QKV: [4, 64]}), f"quantization.{QKV} = [4, 64]"),
    (quantised(**{QKV: dict(bits=4)}), f"quantization.{QKV}.group_size is missing"),
    (
        quantised(**{QKV: False, QKV.removeprefix("language_model."): True}),
        "expected the same as under the module's other prefix",
    ),
]


@pytest.mark.parametrize(("fields", "said"), TOP_RULES, ids=[said for _, said in TOP_RULES])
def test_rules_of_the_wrapper(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = fresh(tmp_path)
    edit_json(path / "config.json", lambda config: config.update(fields))
    assert_refused(path, "config.json: ", said)


def test_eos_of_the_generation_config(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    write_json(path / "generation_config.json", dict(eos_token_id=[3, 128]))
    assert_refused(path, "generation_config.json: eos_token_id")


BAD_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b" ",
    "truncated": b'{"a": 1',
    "junk": b"{}{}",
    "list": b"[]",
    "string": b'"config"',
    "number": b"1",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": [-Infinity]}',
    "overflow": b'{"a": 1e999}',
    "duplicate key": b'{"a": 1, "b": {"c": 1, "c": 2}}',
    "not UTF-8": b'{"a": "\xff"}',
    "raw surrogate": b'{"a": "\xed\xa0\x80"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "nested": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "5000 digits": b'{"a": ' + b"7" * 5000 + b"}",
    "control characters": b'{"a": "\x00"}',
    "many lists": b'{"a": [' + b"[]," * 2_000_000 + b"[]]}",
}


@pytest.mark.parametrize("kind", BAD_JSON)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_json_files(tmp_path: Path, file: str, kind: str) -> None:
    path = fresh(tmp_path, "two")
    (path / file).write_bytes(BAD_JSON[kind])
    assert_refused(path, f"{file}: ")


@pytest.mark.parametrize("kind", BAD_JSON)
def test_json_of_the_header(tmp_path: Path, kind: str) -> None:
    path = fresh(tmp_path)
    put_header(path / ONE, BAD_JSON[kind], 0)
    assert_refused(path, f"{ONE}: ")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX, SHARDS[1]])
@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "looping link"])
def test_files_that_are_none(tmp_path: Path, file: str, kind: str) -> None:
    path = fresh(tmp_path, "two")
    (path / file).unlink()
    if kind == "folder":
        (path / file).mkdir()
    elif kind == "pipe":
        os.mkfifo(path / file)
    else:
        (path / file).symlink_to(path / (file if kind == "looping link" else "nowhere"))
    assert_refused(path, file)


def test_huge_json_is_not_read(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    with (path / "config.json").open("r+b") as stream:
        stream.truncate(2**40)
    assert_refused(path, "config.json: more than 16000000 bytes")


def test_folders(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere", "no such folder")
    assert_refused(fresh(tmp_path) / ONE, ONE, "no such folder")
    path = fresh(tmp_path)
    (path / "config.json").unlink()
    assert_refused(path, "config.json: missing")
    path = fresh(tmp_path)
    (path / ONE).unlink()
    assert_refused(path, "holds no .safetensors file")
    assert issubclass(CheckpointError, LilyError) and issubclass(LilyError, RuntimeError)


# ---------------------------------------------------------------------------------------------
# What is refused: headers and files

NAME = QKV + ".scales"  # BF16 [512, 1]: 1024 bytes
BAD_FIELDS: dict[str, dict[str, Any]] = {
    "dtype": {
        "missing": ...,
        "null": None,
        "integer": 16,
        "list": ["BF16"],
        "unknown": "BF17",
        "lower case": "bf16",
        "wider": "F32",
        "narrower": "U8",
        "unprintable": "B\x00\ud800",
    },
    "shape": {
        "missing": ...,
        "null": None,
        "string": "512",
        "integer": 512,
        "object": {"0": 512},
        "bool": [512, True],
        "float": [512.0, 1],
        "negative": [-512, -1],
        "null inside": [512, None],
        "nested": [[512, 1]],
        "larger": [513, 1],
        "smaller": [511, 1],
        "empty": [],
        "zero": [0, 1],
        "rank 9": [512] + [1] * 8,
        "product past 2^63": [2**32, 2**32],
        "product past 2^64 that wraps to the right bytes": [2**62, 4, 512],
        "size past 2^63": [2**63, 1],
        "size of 4000 digits": [10**4000, 1],
        "product of 8000 digits": [10**4000, 10**4000],
        "rank 8 of the largest sizes": [2**63 - 1] * 8,
        "past 2^63 beside zero": [2**63, 0],
    },
    "data_offsets": {
        "missing": ...,
        "null": None,
        "integer": 0,
        "string": "0,1024",
        "one": [0],
        "three": [0, 1024, 2048],
        "bool": [False, 1024],
        "float": [0.0, 1024.0],
        "negative": [-1024, 0],
        "reversed": [1024, 0],
        "past the end": [2**40, 2**40 + 1024],
        "past 2^64": [2**64, 2**64 + 1024],
        "4000 digits": [0, 10**4000],
        "nested": [[0], [1024]],
    },
}
HEADER_CASES = [(field, kind) for field, kinds in BAD_FIELDS.items() for kind in kinds]


@pytest.mark.parametrize(("field", "kind"), HEADER_CASES)
def test_fields_of_the_header(tmp_path: Path, field: str, kind: str) -> None:
    path = fresh(tmp_path)
    value = BAD_FIELDS[field][kind]

    def edit(header: dict[str, Any]) -> None:
        if value is ...:
            del header[NAME][field]
        else:
            header[NAME][field] = value

    edit_header(path / ONE, edit)
    assert_refused(path, f"{ONE}: tensor {NAME}: ")


def shift(header: dict[str, Any], name: str, begin: int, end: int) -> None:
    header[name]["data_offsets"][0] += begin
    header[name]["data_offsets"][1] += end


def at_edge(header: dict[str, Any], last: bool) -> str:
    """The tensor at the start or at the end of the data."""
    names = [name for name in header if name != "__metadata__"]
    return sorted(names, key=lambda name: header[name]["data_offsets"])[-1 if last else 0]


@pytest.mark.parametrize("kind", ["one byte less", "one byte more", "moved on", "moved back"])
def test_offsets_must_fit_the_shape_and_the_neighbours(tmp_path: Path, kind: str) -> None:
    path = fresh(tmp_path)
    by = {"one byte less": (0, -1), "one byte more": (0, 1), "moved on": (2, 2)}.get(kind, (-2, -2))
    edit_header(path / ONE, lambda header: shift(header, NAME, *by))
    size = {"one byte less": "1023", "one byte more": "1025"}
    if kind in size:
        text = f"dtype BF16 shape [512, 1] needs 1024 bytes, header gives {size[kind]}"
        assert_refused(path, f"{ONE}: tensor {NAME}: {text}")
    else:
        assert_refused(path, f"{ONE}: tensor ", "leaves a hole" if by[0] > 0 else "overlaps")


def test_two_tensors_over_the_same_bytes(tmp_path: Path) -> None:
    path, other = fresh(tmp_path), QKV + ".biases"
    header, _ = split_file(path / ONE)
    del header[other]
    data_bytes = lay_out(path / ONE, header)
    header[other] = header[NAME]
    put_header(path / ONE, json.dumps(header).encode(), data_bytes)
    assert_refused(path, f"{ONE}: tensor {other}: starts at data byte", f"overlaps tensor {NAME}")


@pytest.mark.parametrize("last", [False, True])
def test_holes_at_both_ends(tmp_path: Path, last: bool) -> None:
    path = fresh(tmp_path)
    header, _ = split_file(path / ONE)
    name = at_edge(header, last)
    edit_header(path / ONE, lambda header: header.pop(name))
    assert_refused(path, ONE, "header describes" if last else "leaves a hole after the header")


def test_more_header_shapes(tmp_path: Path) -> None:
    for edit, said in (
        (lambda h: h[NAME].update(strides=[1, 1]), f"tensor {NAME}: unknown field strides"),
        (lambda h: h.update({NAME: [0, 1]}), f"tensor {NAME}: entry is [0, 1]"),
        (lambda h: h.update({NAME: None}), f"tensor {NAME}: entry is None"),
        (lambda h: h.update(__metadata__=[]), "__metadata__"),
        (lambda h: h.update(__metadata__={"format": 1}), "__metadata__"),
        (lambda h: h.update(__metadata__={"format": {"a": "b"}}), "__metadata__"),
        (lambda h: h.clear(), "header describes"),
        (lambda h: h.update({"x" * 5000 + "\x1b\ud800": {}}), "tensor xxxx"),
    ):
        path = fresh(tmp_path)
        edit_header(path / ONE, edit)
        assert_refused(path, f"{ONE}: ", said)


def test_limits_of_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ONE
    lay_out(file, {"x": {"dtype": "BF16", "shape": [1] * 8}})
    assert [entry.shape for entry in read_header(file)] == [(1,) * 8]
    lay_out(file, {"x": {"dtype": "BF16", "shape": [1] * 9}})
    with pytest.raises(CheckpointError, match="tensor x: shape has 9 dimensions, limit is 8"):
        read_header(file)
    path = fresh(tmp_path, "two")
    count = len(read_checkpoint(path).tensors)
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", count)
    assert len(load(path).linears) == 27
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", count - 1)
    assert_refused(path, f"has {count} tensors, the limit is {count - 1}")
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 10)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: JSON has .* '{{', the limit is 12"):
        read_header(path / SHARDS[0])


def test_length_of_the_header(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    header, data_bytes = split_file(path / ONE)
    text = json.dumps(header).encode()
    for length, said in (
        (0, "header starts with b''"),
        (1, "not valid JSON"),
        (len(text) - 1, "not valid JSON"),
        (len(text) + 1, "JSON"),
        (len(text) + data_bytes + 1, f"the file has {8 + len(text) + data_bytes}: truncated"),
        (MAX_HEADER_BYTES + 1, "the limit is 100000000"),
        (2**63, f"header of {2**63} bytes"),
        (2**64 - 1, f"header of {2**64 - 1} bytes"),
    ):
        put_header(path / ONE, text, data_bytes, length)
        assert_refused(path, f"{ONE}: ", said)
    put_header(path / ONE, b" " + text, data_bytes)
    assert_refused(path, f"{ONE}: ", "header starts with b' '")


def test_huge_header_of_nothing(tmp_path: Path) -> None:
    """A sparse file may claim the largest header allowed."""
    path = fresh(tmp_path)
    put_header(path / ONE, b"", MAX_HEADER_BYTES, MAX_HEADER_BYTES)
    assert_refused(path, f"{ONE}: ", "header starts with")


@pytest.mark.parametrize("shard", SHARDS)
def test_truncated_and_grown_files(tmp_path: Path, shard: str) -> None:
    path = fresh(tmp_path, "two")
    size = (path / shard).stat().st_size
    header_end = size - split_file(path / shard)[1]
    for cut in (0, 1, 7, 8, 9, header_end - 1):
        os.truncate(path / shard, cut)
        assert_refused(path, f"{shard}: ", f"has {cut}")
        path = fresh(tmp_path, "two")
    for cut in (header_end, header_end + 1, size - 1):
        os.truncate(path / shard, cut)
        assert_refused(path, f"{shard}: tensor ", f"the file's {cut - header_end} data bytes")
        path = fresh(tmp_path, "two")
    os.truncate(path / shard, size + 1)
    assert_refused(path, f"{shard}: header describes {size} bytes, the file has {size + 1}")


# ---------------------------------------------------------------------------------------------
# What is refused: shards and index


def edit_index(path: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    edit_json(path / INDEX, lambda listing: edit(listing["weight_map"]))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("shard", SHARDS)
def test_missing_shard(tmp_path: Path, shard: str, index: bool) -> None:
    path = fresh(tmp_path, "two")
    (path / shard).unlink()
    if not index:
        (path / INDEX).unlink()
    assert_refused(path, f"{shard}: missing from", "1 of 2 shards")


@pytest.mark.parametrize(
    "place",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..",
        ".safetensors",
        "",
        "model.bin",
        "model\x00.safetensors",
        "model\ud800.safetensors",
        "model\n.safetensors",
        None,
        1,
        ["model.safetensors"],
    ],
)
def test_paths_of_the_index(tmp_path: Path, place: Any) -> None:
    path = fresh(tmp_path, "two")
    shutil.copyfile(path / SHARDS[0], path.parent / "model.safetensors")
    edit_index(path, lambda weight_map: weight_map.update({NAME: place}))
    assert_refused(path, f"{INDEX}: tensor {NAME} is placed in ")


def test_long_shard_name(tmp_path: Path) -> None:
    path = fresh(tmp_path, "two")
    edit_index(path, lambda weight_map: weight_map.update({NAME: "m" * 5000 + ".safetensors"}))
    assert_refused(path, "mmm", "missing from")


def test_index_against_shards(tmp_path: Path) -> None:
    path = fresh(tmp_path, "two")
    place = json.loads((path / INDEX).read_text())["weight_map"][NAME]
    other = SHARDS[1 - SHARDS.index(place)]
    for edit, *said in (
        (lambda w: w.update({NAME: other}), f"{place}: tensor {NAME}: ", f"places it in {other}"),
        (lambda w: w.pop(NAME), f"{place}: tensor {NAME}: {INDEX} lacks it"),
        (lambda w: w.update(ghost=place), f"{place}: tensor ghost: ", "the file lacks it"),
        (lambda w: w.clear(), f"{INDEX}: weight_map is {{}}"),
    ):
        path = fresh(tmp_path, "two")
        edit_index(path, edit)
        assert_refused(path, *said)
    for listing in ({}, {"weight_map": None}, {"weight_map": [NAME]}):
        write_json(path / INDEX, listing)
        assert_refused(path, f"{INDEX}: weight_map")


@pytest.mark.parametrize("index", [True, False])
def test_same_tensor_in_two_shards(tmp_path: Path, index: bool) -> None:
    path = fresh(tmp_path, "two")
    if not index:
        (path / INDEX).unlink()
    for shard in SHARDS:
        header, _ = split_file(path / shard)
        header[NAME] = dict(dtype="BF16", shape=[512, 1])
        lay_out(path / shard, header)
    # With an index, whichever shard comes first may be the one that the index does not name.
    assert_refused(path, f"tensor {NAME}: ", "" if index else "already in")


def test_same_tensor_under_two_prefixes(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    header, _ = split_file(path / ONE)
    header[NAME.removeprefix("language_model.")] = dict(dtype="BF16", shape=[512, 1])
    lay_out(path / ONE, header)
    assert_refused(path, f"{ONE}: tensor ", NAME, "once more")


def test_unnumbered_file_beside_numbered_shards(tmp_path: Path) -> None:
    path = fresh(tmp_path, "two")
    (path / INDEX).unlink()
    shutil.copyfile(path / SHARDS[0], path / ONE)
    assert_refused(path, "already in")


# ---------------------------------------------------------------------------------------------
# What is refused: tensors

MICRO_NAMES = {
    name: list(
        make_tensors(FLAVOURS[name], make_config(FLAVOURS[name], **MICRO)["text_config"], None)
    )
    for name in ("mlx4", "hf")
}
TENSOR_CASES = [
    (kind, name, corruption)
    for kind, names in MICRO_NAMES.items()
    for name in names
    for corruption in ("missing", "renamed", "wrong dtype", "wrong shape", "wrong rank")
]


@pytest.mark.parametrize(("kind", "name", "corruption"), TENSOR_CASES)
def test_every_tensor(tmp_path: Path, kind: str, name: str, corruption: str) -> None:
    path = fresh(tmp_path, "one" if kind == "mlx4" else kind)
    header, _ = split_file(path / ONE)
    entry = header[name]
    said = [f"{ONE}: tensor {name}: "]
    if corruption in ("missing", "renamed"):
        del header[name]
        if corruption == "renamed":
            header[name + "_"] = entry
        end = name.partition("model.")[2].removeprefix("language_model.")
        said = [f"{ONE}: tensor ", end or name, " is missing"]
        if name.endswith(".scales"):  # what is left is then no quantised module
            said = [f"{ONE}: tensor ", "missing"]
    elif corruption == "wrong dtype":
        entry["dtype"] = {"U32": "I32", "BF16": "U16"}[entry["dtype"]]
        said.append("dtype ")
    elif corruption == "wrong shape":
        entry["shape"][0] += 1
        said.append("shape ")
    else:
        entry["shape"] = [1, *entry["shape"]]
        said.append("shape ")
    lay_out(path / ONE, header)
    assert_refused(path, *said)


@pytest.mark.parametrize("kind", ["one", "hf"])
@pytest.mark.parametrize(
    "name",
    [
        "extra",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "visionary.weight",
        "",
    ],
)
def test_unknown_tensor(tmp_path: Path, kind: str, name: str) -> None:
    path = fresh(tmp_path, kind)
    header, _ = split_file(path / ONE)
    header[name] = dict(dtype="BF16", shape=[64])
    lay_out(path / ONE, header)
    assert_refused(path, f"{ONE}: tensor {name or repr(name)}: not a tensor of this model, 1 such")


def test_mixed_convolution_layouts(tmp_path: Path) -> None:
    fields = MICRO | dict(layer_types=["linear_attention"] * 2)
    for flavour in ("mlx4", "hf"):
        path = write_checkpoint(tmp_path / flavour, flavour, seed=None, **fields)
        prefix = "language_model.model" if flavour == "mlx4" else "model.language_model"
        name = f"{prefix}.layers.1.linear_attn.conv1d.weight"

        def turn(header: dict[str, Any], name: str = name) -> None:
            header[name]["shape"][1:] = header[name]["shape"][:0:-1]

        edit_header(path / ONE, turn)
        assert_refused(
            path, f"{ONE}: tensor ", name, "original layout", "[512, 1, 4]", "[512, 4, 1]"
        )


def test_layout_of_the_other_flavour(tmp_path: Path) -> None:
    """Turned convolutions make a checkpoint of the other kind, which then lacks its experts."""
    for kind, prefix in (("mlx16", LAYER0), ("hf", "model.language_model.layers.0.")):
        path, name = fresh(tmp_path, kind), f"{prefix}linear_attn.conv1d.weight"

        def turn(header: dict[str, Any], name: str = name) -> None:
            header[name]["shape"][1:] = header[name]["shape"][:0:-1]

        edit_header(path / ONE, turn)
        assert_refused(path, f"{ONE}: tensor ", "mlp.", "is missing")


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_other_bits(tmp_path: Path, bits: int) -> None:
    """Config and shapes agree: refused for what it is, by tensor."""
    path = write_checkpoint(tmp_path, Flavour(bits=bits, router_bits=8), seed=None, **MICRO)
    text = f"{bits} bits; supported: affine 4 and 8 bits in groups of 32, 64 or 128"
    assert_refused(path, f"{ONE}: tensor language_model.model.embed_tokens.weight: {text}")


def test_other_bits_of_one_module(tmp_path: Path) -> None:
    flavour = Flavour(mixed={"switch_mlp.down_proj": (6, 64)})
    path = write_checkpoint(tmp_path, flavour, seed=None, **MICRO)
    assert_refused(path, f"tensor {LAYER0}mlp.switch_mlp.down_proj.weight: 6 bits; supported")


@pytest.mark.parametrize("group", [16, 8])
def test_other_groups(tmp_path: Path, group: int) -> None:
    path = write_checkpoint(tmp_path, Flavour(group=group), seed=None, **MICRO)
    text = f"embed_tokens.scales: {group} inputs a group; supported"
    assert_refused(path, f"{ONE}: tensor language_model.model.{text}")


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4", "surprise", ""])
def test_other_modes(tmp_path: Path, mode: str) -> None:
    path = fresh(tmp_path)
    edit_json(path / "config.json", lambda config: config.update(quantised(mode=mode)))
    text = f"mode {mode or repr(mode)}; supported: affine"
    assert_refused(path, f"{ONE}: tensor language_model.model.embed_tokens.weight: {text}")
    path = fresh(tmp_path)
    entry = dict(bits=4, group_size=32, mode=mode)
    edit_json(path / "config.json", lambda config: config.update(quantised(**{QKV: entry})))
    assert_refused(path, f"{ONE}: tensor {QKV}.weight: {text}")


def test_config_against_shapes(tmp_path: Path) -> None:
    for module, entry, said in (
        (QKV, dict(bits=8, group_size=64), f"{QKV}.weight: shape [512, 8] makes 4 bits with 64"),
        (QKV, dict(bits=4, group_size=32), f"{QKV}.scales: shape [512, 1] makes 64 inputs a group"),
        (QKV, False, f"{QKV}.weight: quantised, config.json does not say how"),
        (
            QKV.removeprefix("language_model."),
            dict(bits=8, group_size=64),
            "config.json gives 8",
        ),
        (LAYER0 + "mlp.gate", True, "mlp.gate.weight: shape [4, 16] makes 8 bits"),
    ):
        path = fresh(tmp_path)

        def edit(config: dict[str, Any], module: str = module, entry: Any = entry) -> None:
            for key in ("quantization", "quantization_config"):
                config[key][module] = entry

        edit_json(path / "config.json", edit)
        assert_refused(path, f"{ONE}: tensor ", said)
    path = fresh(tmp_path)
    edit_json(
        path / "config.json",
        lambda config: [config.pop(key) for key in ("quantization", "quantization_config")],
    )
    assert_refused(path, f"{ONE}: tensor ", "quantised, config.json does not say how")
    path = fresh(tmp_path, "mlx16")
    entry = dict(bits=4, group_size=64)
    edit_json(path / "config.json", lambda config: config.update(quantised(**{QKV: entry})))
    assert_refused(path, f"{QKV}.weight: BF16 without scales, config.json gives 4 bits")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (dict(weight=("F16", [512, 64])), "weight: dtype F16, expected BF16"),
        (dict(weight=("F32", [512, 64])), "weight: dtype F32, expected BF16"),
        (dict(weight=("F8_E4M3", [512, 64])), "weight: dtype F8_E4M3, expected BF16"),
        (dict(weight=("U32", [512, 8])), "scales is missing"),
        (dict(weight=("U32", [512, 8]), scales=("U8", [512, 2])), "scales: dtype U8"),
        (
            dict(weight=("U32", [512, 8]), scales=("F32", [512, 1]), biases=("F32", [512, 1])),
            "scales: dtype F32, expected BF16 or F16",
        ),
        (
            dict(weight=("U32", [512, 8]), scales=("F16", [512, 1]), biases=("BF16", [512, 1])),
            "biases: dtype BF16, expected F16",
        ),
        (
            dict(weight=("U32", [512, 8]), scales=("BF16", [512, 1]), biases=("BF16", [512, 2])),
            "biases: shape [512, 2], config.json gives [512, 1]",
        ),
        (
            dict(weight=("U32", [512, 0]), scales=("BF16", [512, 1]), biases=("BF16", [512, 1])),
            "weight: shape [512, 0], config.json gives [512, any]",
        ),
        (
            dict(weight=("U32", [512, 8]), scales=("BF16", [512, 0]), biases=("BF16", [512, 0])),
            "scales: shape [512, 0]",
        ),
        (
            dict(weight=("U32", [512, 8]), scales=("BF16", [512, 3]), biases=("BF16", [512, 3])),
            "makes 21.3333 inputs a group",
        ),
        (
            dict(weight=("BF16", [512, 64]), scales=("BF16", [512, 1]), biases=("BF16", [512, 1])),
            "weight: dtype BF16, expected U32",
        ),
    ],
)
def test_parts_of_a_module(tmp_path: Path, parts: Any, said: str) -> None:
    path = fresh(tmp_path)
    replace_linear(path / ONE, QKV, parts)
    assert_refused(path, f"{ONE}: tensor ", said)


def test_quantised_original_layout(tmp_path: Path) -> None:
    path, name = fresh(tmp_path, "hf"), "model.language_model.layers.0.mlp.experts.gate_up_proj"
    header, _ = split_file(path / ONE)
    header[name] = dict(dtype="U32", shape=[4, 128, 8])
    lay_out(path / ONE, header)
    assert_refused(path, f"{ONE}: tensor {name}: dtype U32, expected BF16")
