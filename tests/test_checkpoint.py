"""Owns the proof that a good checkpoint folder becomes the right plan, to the byte."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from checkpoint_files import (
    BIG,
    MICRO,
    ONE,
    QKV,
    SHARDS,
    edit_config,
    edit_header,
    edit_json,
    fresh,
    load,
    put_header,
    replace_linear,
    split_file,
)
from conftest import find_fixture
from lily.checkpoint import (
    LinearSource,
    LoadPlan,
    bytes_to_load,
    plan,
    read_checkpoint,
    read_config,
    weight_bytes,
)
from lily.safetensors_header import read_header
from make_fixtures import (
    FLAVOURS,
    TINY,
    Flavour,
    is_gain,
    make_config,
    make_tensors,
    matrices,
    to_bf16,
    vectors,
    write_checkpoint,
    write_json,
)


@pytest.mark.parametrize("name", FLAVOURS)
def test_flavour_gives_every_weight(tmp_path: Path, name: str) -> None:
    flavour = FLAVOURS[name]
    found = load(write_checkpoint(tmp_path, flavour, seed=None))
    text = make_config(flavour)["text_config"]
    assert found.format == flavour.layout
    assert found.skipped == ()
    # 2 matrices of no layer, 5 or 4 of the mixer and 8 of the experts in each layer.
    assert len(found.linears) == len(list(matrices(text))) == 2 + 3 * 13 + 12
    assert len(found.vectors) == len(list(vectors(text))) == 1 + 3 * 6 + 4
    by_module = dict(matrices(text))
    for module, source in zip(by_module, ordered(found, text), strict=True):
        bits, group = flavour.spec(module)
        assert (source.bits, source.group) == (bits, group), module
        assert (source.n, source.k) == by_module[module][-2:], module
        assert source.experts == (16 if "switch_mlp" in module else 1), module
        assert (source.scales is None) == (bits == 16)
        assert source.scale_dtype == ("" if bits == 16 else flavour.scales)
    files = sum(split_file(file)[1] for file in tmp_path.glob("*.safetensors"))
    assert bytes_to_load(found) == sum(weight_bytes(found).values()) == files


def ordered(found: LoadPlan, text: dict[str, Any]) -> list[LinearSource]:
    """The sources in the order in which the fixtures name the modules."""
    mixers = {
        "linear_attention": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
        "full_attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    }
    rest = ("router", "shared_gate", "shared_gate_proj", "shared_up_proj", "shared_down_proj")
    experts = ("expert_gate_proj", "expert_up_proj", "expert_down_proj")
    keys = [(-1, "embed_tokens"), (-1, "lm_head")]
    for layer, kind in enumerate(text["layer_types"]):
        keys += [(layer, name) for name in mixers[kind] + rest + experts]
    assert set(keys) == found.linears.keys()
    return [found.linears[key] for key in keys]


def read_plain(source: LinearSource) -> np.ndarray:
    """A bf16 matrix [experts, n, k] by the rule in LinearSource's docstring."""
    out = np.full((source.experts, source.n, source.k), np.nan, np.float32)
    with source.weight.file.open("rb") as stream:
        for expert, row in itertools.product(range(source.experts), range(source.n)):
            stream.seek(source.offset + expert * source.expert_stride + row * source.row_bytes)
            words = np.frombuffer(stream.read(source.row_bytes), "<u2").astype(np.uint32)
            out[expert, row] = (words << 16).view(np.float32)
    return out


def read_vector(found: LoadPlan, key: tuple[int, str]) -> np.ndarray:
    source = found.vectors[key]
    with source.entry.file.open("rb") as stream:
        stream.seek(source.entry.offset)
        data = stream.read(source.entry.length)
    if source.entry.dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[source.entry.dtype])
    return values.astype(np.float32) + np.float32(source.plus_one)


def test_original_and_converted_hold_the_same_values(tmp_path: Path) -> None:
    """Halves of gate_up_proj, turned convolutions and shifted gains, bit for bit."""
    hf = load(write_checkpoint(tmp_path / "hf", "hf", shards=3, **MICRO))
    mlx = load(write_checkpoint(tmp_path / "mlx", "mlx16", **MICRO))
    assert hf.linears.keys() == mlx.linears.keys()
    assert hf.vectors.keys() == mlx.vectors.keys()
    for key in mlx.linears:
        values = read_plain(mlx.linears[key])
        assert np.isfinite(values).all() and values.std() > 0
        assert (read_plain(hf.linears[key]) == values).all(), key
    for key in mlx.vectors:
        assert (read_vector(hf, key) == read_vector(mlx, key)).all(), key
    shifted = {name for (_, name), source in hf.vectors.items() if source.plus_one}
    assert shifted == {"input_norm", "post_norm", "q_norm", "k_norm", "final_norm"}
    assert not any(source.plus_one for source in mlx.vectors.values())


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_type_of_vectors_does_not_change_them(tmp_path: Path, dtype: str) -> None:
    other = load(write_checkpoint(tmp_path / "a", Flavour(vectors=dtype), **MICRO))
    usual = load(write_checkpoint(tmp_path / "b", **MICRO))
    assert other.vectors[0, "A_log"].entry.dtype == dtype
    for key in usual.vectors:
        assert (read_vector(other, key) == read_vector(usual, key)).all(), key


@pytest.mark.parametrize("name", ["mlx4", "mlx8", "mlx4_g32", "mlx4_f16", "mlx_mixed"])
def test_quantised_fixtures_are_near_their_weights(name: str) -> None:
    """Packing, scales of both signs, and no group further off than half a step."""
    quantised, plain = FLAVOURS[name], FLAVOURS["mlx16"]
    wide = MICRO | {"hidden_size": 128, "moe_intermediate_size": 128}  # for groups of 128
    text = make_config(plain, **wide)["text_config"]
    exact = make_tensors(plain, text, 1)
    packed = make_tensors(quantised, text, 1)
    signs = set()
    for module, _ in matrices(text):
        bits, group = quantised.spec(module)
        if bits == 16:
            continue
        base = "language_model." + module
        words = np.frombuffer(packed[base + ".weight"].data, "<u4")
        each = 32 // bits
        codes = (words[:, None] >> (np.arange(each, dtype=np.uint32) * bits)) & (2**bits - 1)
        scale, bias = (decode(packed[f"{base}.{part}"]) for part in ("scales", "biases"))
        values = codes.reshape(-1, group) * scale[:, None] + bias[:, None]
        want = decode(exact[base + ".weight"]).reshape(-1, group)
        # bf16 rounds scale and bias by 2^-9 of their size.
        slack = (2**bits * abs(scale) + abs(bias)) * 2.0**-8
        assert (abs(values - want) <= (abs(scale) * 0.51 + slack)[:, None]).all(), module
        signs |= set(np.sign(scale))
    assert signs == {-1.0, 1.0}


def decode(tensor: Any) -> np.ndarray:
    if tensor.dtype == "BF16":
        return (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(tensor.data, "<f2").astype(np.float32)


def test_bf16_rounding_is_to_nearest_even() -> None:
    ulp = 2.0**-7
    values = np.array([1 + ulp / 2, 1 + 1.5 * ulp, -1 - 0.51 * ulp], np.float32)
    assert to_bf16(values).tolist() == [1.0, 1 + 2 * ulp, -1 - ulp]
    assert is_gain("model.norm.weight") and not is_gain("model.layers.0.linear_attn.norm.weight")


@pytest.mark.parametrize("names", ["language_model.", "", "model.language_model."])
@pytest.mark.parametrize("flat", [False, True])
def test_names_and_wrappers(tmp_path: Path, names: str, flat: bool) -> None:
    path = write_checkpoint(tmp_path, seed=None, flat_config=flat, **MICRO)

    def rename(header: dict[str, Any]) -> None:
        for name in [name for name in header if name.startswith("language_model.")]:
            text = name.removeprefix("language_model.")
            if names == "model.language_model.":
                text = text.replace("model.", names, 1)
            else:
                text = names + text
            header[text] = header.pop(name)

    edit_header(path / ONE, rename)
    assert len(load(path).linears) == 27


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_both_model_types_of_a_flat_config(tmp_path: Path, kind: str) -> None:
    path = write_checkpoint(tmp_path, seed=None, flat_config=True, model_type=kind, **MICRO)
    assert read_config(path).layers == 2


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("index", [False, True])
def test_shards_with_and_without_index(tmp_path: Path, shards: int, index: bool) -> None:
    path = write_checkpoint(tmp_path, seed=None, shards=shards, index=index, **MICRO)
    checkpoint = read_checkpoint(path)
    assert len({entry.file for entry in checkpoint.tensors.values()}) == shards
    assert len(plan(checkpoint).linears) == 27


def test_data_need_not_be_aligned(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    header, data_bytes = split_file(path / ONE)
    for pad in range(8):
        put_header(path / ONE, json.dumps(header).encode() + b" " * pad, data_bytes)
        assert len(load(path).linears) == 27
        start = 8 + len(json.dumps(header)) + pad
        first = min(entry.offset for entry in read_checkpoint(path).tensors.values())
        assert first == start


def test_vision_and_mtp_are_skipped_by_name(tmp_path: Path) -> None:
    for name in ("one", "hf"):
        found = load(fresh(tmp_path, name))
        assert len(found.skipped) == 4
        assert any(source.plus_one for source in found.vectors.values()) == (name == "hf")


def test_hidden_files_and_files_beside_the_index_are_no_shards(
    tmp_path: Path,
) -> None:
    path = fresh(tmp_path, "two")
    (path / "adapters.safetensors").write_bytes(b"junk")
    (path / "._model.safetensors").write_bytes(b"junk")
    assert len(load(path).linears) == 27
    path = fresh(tmp_path)
    (path / "._model.safetensors").write_bytes(b"junk")
    assert len(load(path).linears) == 27


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    path = fresh(tmp_path, "two")
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for i, shard in enumerate(SHARDS):
        (path / shard).rename(blobs / f"{i}")
        (path / shard).symlink_to(blobs / f"{i}")
    assert len(load(path).linears) == 27


def test_layers_in_any_order(tmp_path: Path) -> None:
    kinds = ["full_attention", "full_attention", "linear_attention"]
    fields = MICRO | dict(num_hidden_layers=3, layer_types=kinds)
    path = write_checkpoint(tmp_path, seed=None, **fields)
    assert read_config(path).layer_types == tuple(kinds)
    found = load(path)
    assert (2, "in_proj_qkv") in found.linears and (1, "q_proj") in found.linears


def test_interval_stands_in_for_layer_types(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    edit_config(path, layer_types=..., full_attention_interval=2)
    assert read_config(path).layer_types == ("linear_attention", "full_attention")


@pytest.mark.parametrize(
    ("fields", "theta", "dims"),
    [
        (
            dict(rope_parameters=dict(type="default", rope_theta=5e6, partial_rotary_factor=1)),
            5e6,
            256,
        ),
        (dict(rope_parameters=..., rope_theta=1e4, partial_rotary_factor=0.5), 1e4, 128),
        (dict(partial_rotary_factor=0.25, rope_theta=10000000, rope_scaling=None), 1e7, 64),
        (dict(rope_scaling=dict(rope_type="default")), 1e7, 64),
    ],
)
def test_rope_by_either_field(
    tmp_path: Path, fields: dict[str, Any], theta: float, dims: int
) -> None:
    path = fresh(tmp_path)
    edit_config(path, **fields)
    config = read_config(path)
    assert (config.rope_theta, config.rotary_dims) == (theta, dims)


def test_eos_is_the_union_of_all_places(tmp_path: Path) -> None:
    path = fresh(tmp_path)
    write_json(path / "generation_config.json", dict(eos_token_id=[7, 3]))
    edit_json(path / "config.json", lambda config: config.update(eos_token_id=[9]))
    assert read_config(path).eos_ids == (3, 7, 9)
    (path / "generation_config.json").unlink()
    assert read_config(path).eos_ids == (3, 9)


def test_module_left_unquantised_by_the_converter(tmp_path: Path) -> None:
    """Mixed checkpoints keep some matrices in bf16, named in the config or not."""
    for entry in (None, False):
        path = fresh(tmp_path)

        def edit(config: dict[str, Any], entry: bool | None = entry) -> None:
            for key in ("quantization", "quantization_config"):
                if entry is not None:
                    config[key][QKV] = entry

        edit_json(path / "config.json", edit)
        replace_linear(path / ONE, QKV, {"weight": ("BF16", [512, 64])})
        assert load(path).linears[0, "in_proj_qkv"].bits == 16


# ---------------------------------------------------------------------------------------------
# The real shapes


def test_shapes_of_the_35b(tmp_path: Path) -> None:
    """Headers of the published 4-bit checkpoint over sparse files: tensors and bytes are known."""
    path = write_checkpoint(tmp_path, seed=None, shards=4, **BIG)
    begin = time.monotonic()
    checkpoint = read_checkpoint(path)
    found = plan(checkpoint)
    assert time.monotonic() - begin < 1.0
    assert len(checkpoint.tensors) == 1757
    assert bytes_to_load(found) == 19_508_787_456
    assert weight_bytes(found)["head"] == 286_064_640
    assert weight_bytes(found)["deltanet"] == 568_442_880
    assert weight_bytes(found)["experts"] == 40 * 256 * 1_769_472
    for key, n, k, bits in (
        ((0, "in_proj_qkv"), 8192, 2048, 4),
        ((0, "in_proj_z"), 4096, 2048, 4),
        ((0, "in_proj_a"), 32, 2048, 4),
        ((0, "out_proj"), 2048, 4096, 4),
        ((3, "q_proj"), 8192, 2048, 4),
        ((3, "k_proj"), 512, 2048, 4),
        ((3, "o_proj"), 2048, 4096, 4),
        ((39, "router"), 256, 2048, 8),
        ((39, "shared_gate"), 1, 2048, 8),
        ((39, "expert_gate_proj"), 512, 2048, 4),
        ((39, "expert_down_proj"), 2048, 512, 4),
        ((-1, "lm_head"), 248320, 2048, 4),
    ):
        source = found.linears[key]
        assert (source.n, source.k, source.bits) == (n, k, bits), key
    assert found.linears[39, "expert_gate_proj"].expert_stride == 524_288
    assert max(source.offset for source in found.linears.values()) > 2**32
    assert_config_of_the_35b(path)


def assert_config_of_the_35b(path: Path) -> None:
    config = read_config(path)
    assert config.layers == 40 and config.layer_types.count("full_attention") == 10
    assert config.layer_types[3] == "full_attention"
    assert (config.hidden, config.vocab, config.max_position) == (2048, 248320, 262144)
    assert (config.heads, config.kv_heads, config.head_dim) == (16, 2, 256)
    assert (config.rotary_dims, config.rope_theta, config.rms_eps) == (64, 1e7, 1e-6)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (2048, 4096, 8192)
    assert (config.experts, config.top_k) == (256, 8)
    assert (config.expert_width, config.shared_width) == (512, 512)
    assert config.quantization is not None and config.quantization.bits == 4
    assert len(config.overrides) == 80
    assert {spec.bits for spec in config.overrides.values() if spec} == {8}


def test_published_config(tmp_path: Path) -> None:
    source = find_fixture("qwen3.6-35b-a3b-4bit.config.json")
    shutil.copyfile(source, tmp_path / "config.json")
    assert_config_of_the_35b(tmp_path)
    assert read_config(tmp_path).eos_ids == (248044, 248046)


@pytest.mark.parametrize(("name", "skipped"), [("mlx4", 0), ("mlx4_calm", 0), ("mlx4_vlm", 21)])
def test_shared_fixtures(name: str, skipped: int) -> None:
    assert_golden_shapes(find_fixture(name), skipped)


def test_fixture_of_the_repository() -> None:
    assert_golden_shapes(Path(__file__).parent / "data" / "mlx4_calm", 0)


def assert_golden_shapes(path: Path, skipped: int) -> None:
    found = load(path)
    assert found.format == "mlx"
    assert bytes_to_load(found) == 6_319_856
    assert len(found.skipped) == skipped
    assert found.config.layers == TINY["num_hidden_layers"]
    assert found.config.eos_ids == (2000, 2002)


@pytest.mark.parametrize("flavour", ["hf", "mlx_mixed"])
def test_fixtures_are_files_to_others_too(tmp_path: Path, flavour: str) -> None:
    path = write_checkpoint(tmp_path, flavour, seed=None, shards=2)
    for shard in SHARDS:
        with safe_open(path / shard, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        assert shapes == {entry.name: entry.shape for entry in read_header(path / shard)}


def test_entries_are_in_file_order_and_fill_it(tmp_path: Path) -> None:
    file = fresh(tmp_path) / ONE
    entries = read_header(file)
    assert entries[-1].offset + entries[-1].length == file.stat().st_size
    for before, after in itertools.pairwise(entries):
        assert before.offset + before.length == after.offset
