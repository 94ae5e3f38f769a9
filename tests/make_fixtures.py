"""Owns the tiny random checkpoints of the tests: the same weights in every flavour lily loads.

    python tests/make_fixtures.py OUT [FLAVOUR ...]

writes OUT/<flavour> for each. numpy only. The outputs of the blocks are small and the router is
sharp ("calm"): rounding in bf16 does not flip experts, so logits of two routes can be compared.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4, "U8": 1}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# The shapes of the golden fixtures: three DeltaNet layers, one of attention.
TINY: dict[str, Any] = dict(
    num_hidden_layers=4,
    hidden_size=256,
    vocab_size=2048,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    max_position_embeddings=8192,
    eos_token_id=2000,
)
EOS = (2002, 2000)


@dataclass(frozen=True)
class Flavour:
    """How the same weights are written: names, layout, quantisation and types."""

    layout: str = "mlx"  # "hf": zero-centred gains, conv [C, 1, 4], gate and up in one tensor
    names: str = "language_model."  # "": text-only names
    bits: int = 4  # 16: no quantisation
    group: int = 64
    router_bits: int = 8
    scales: str = "BF16"
    vectors: str = "BF16"  # type of A_log, dt_bias, conv and norms
    mixed: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by end of module name

    def spec(self, module: str) -> tuple[int, int]:
        """Bits and group of a module; 16 bits is plain bf16."""
        if self.bits == 16:
            return 16, 0
        for end, spec in self.mixed.items():
            if module.endswith(end):
                return spec
        if module.endswith((".mlp.gate", ".shared_expert_gate")):
            return self.router_bits, self.group
        return self.bits, self.group


FLAVOURS: dict[str, Flavour] = {
    # Exactly equal weights: every gain - 1 is a bf16 number too.
    "hf": Flavour(layout="hf", bits=16),
    "mlx16": Flavour(bits=16),
    "mlx4": Flavour(),
    "mlx4_text": Flavour(names=""),
    "mlx4_f16": Flavour(scales="F16"),
    "mlx4_f32": Flavour(vectors="F32"),
    "mlx4_f16_vectors": Flavour(vectors="F16"),
    "mlx8": Flavour(bits=8),
    "mlx4_g32": Flavour(group=32),
    "mlx4_g128": Flavour(group=128),
    "mlx8_g32": Flavour(bits=8, group=32),
    "mlx4_router4": Flavour(router_bits=4),
    "mlx_mixed": Flavour(
        mixed={
            "in_proj_a": (16, 0),
            "in_proj_z": (8, 64),
            "out_proj": (4, 32),
            "q_proj": (8, 32),
            "v_proj": (16, 0),
            "o_proj": (4, 128),
            "mlp.gate": (16, 0),
            "shared_expert.gate_proj": (16, 0),
            "shared_expert.up_proj": (16, 0),
            "shared_expert.down_proj": (8, 64),
            "switch_mlp.up_proj": (8, 128),
            "switch_mlp.down_proj": (4, 32),
            "embed_tokens": (8, 32),
            "lm_head": (16, 0),
        }
    ),
}


def make_config(flavour: Flavour, **overrides: Any) -> dict[str, Any]:
    """config.json of the multimodal wrapper; `overrides` replace fields of text_config."""
    text: dict[str, Any] = dict(
        attention_bias=False,
        attn_output_gate=True,
        dtype="bfloat16",
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mamba_ssm_dtype="float32",
        model_type="qwen3_5_moe_text",
        rms_norm_eps=1e-6,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=10000000,
            partial_rotary_factor=0.25,
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
        ),
        tie_word_embeddings=False,
        **TINY,
    )
    text |= overrides
    interval = text["full_attention_interval"]
    text.setdefault(
        "layer_types",
        [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(text["num_hidden_layers"])
        ],
    )
    config = dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        model_type="qwen3_5_moe",
        text_config=text,
        tie_word_embeddings=False,
    )
    if flavour.bits != 16:
        quantization: dict[str, Any] = dict(
            group_size=flavour.group, bits=flavour.bits, mode="affine"
        )
        for module, _ in matrices(text):
            bits, group = flavour.spec(module)
            if bits == 16:
                quantization[flavour.names + module] = False
            elif (bits, group) != (flavour.bits, flavour.group):
                quantization[flavour.names + module] = dict(group_size=group, bits=bits)
        config |= dict(quantization=quantization, quantization_config=quantization)
    return config


def matrices(text: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every matrix by its text-only MLX module name, with its shape."""
    c, hidden = text, text["hidden_size"]
    keys, values = 128 * c["linear_num_key_heads"], 128 * c["linear_num_value_heads"]
    query, kv = 256 * c["num_attention_heads"], 256 * c["num_key_value_heads"]
    experts = c["num_experts"]
    width, shared = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    yield "model.embed_tokens", (c["vocab_size"], hidden)
    yield "lm_head", (c["vocab_size"], hidden)
    for i, kind in enumerate(c["layer_types"]):
        p = f"model.layers.{i}."
        if kind == "linear_attention":
            yield p + "linear_attn.in_proj_qkv", (2 * keys + values, hidden)
            yield p + "linear_attn.in_proj_z", (values, hidden)
            yield p + "linear_attn.in_proj_a", (c["linear_num_value_heads"], hidden)
            yield p + "linear_attn.in_proj_b", (c["linear_num_value_heads"], hidden)
            yield p + "linear_attn.out_proj", (hidden, values)
        else:
            yield p + "self_attn.q_proj", (2 * query, hidden)
            yield p + "self_attn.k_proj", (kv, hidden)
            yield p + "self_attn.v_proj", (kv, hidden)
            yield p + "self_attn.o_proj", (hidden, query)
        yield p + "mlp.gate", (experts, hidden)
        yield p + "mlp.shared_expert_gate", (1, hidden)
        yield p + "mlp.shared_expert.gate_proj", (shared, hidden)
        yield p + "mlp.shared_expert.up_proj", (shared, hidden)
        yield p + "mlp.shared_expert.down_proj", (hidden, shared)
        yield p + "mlp.switch_mlp.gate_proj", (experts, width, hidden)
        yield p + "mlp.switch_mlp.up_proj", (experts, width, hidden)
        yield p + "mlp.switch_mlp.down_proj", (experts, hidden, width)


def vectors(text: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every other tensor by its text-only MLX name, with its shape."""
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    yield "model.norm.weight", (hidden,)
    for i, kind in enumerate(text["layer_types"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        if kind == "linear_attention":
            channels = 128 * (2 * text["linear_num_key_heads"] + heads)
            yield p + "linear_attn.conv1d.weight", (channels, 4, 1)
            yield p + "linear_attn.A_log", (heads,)
            yield p + "linear_attn.dt_bias", (heads,)
            yield p + "linear_attn.norm.weight", (128,)
        else:
            yield p + "self_attn.q_norm.weight", (256,)
            yield p + "self_attn.k_norm.weight", (256,)


# Standard deviation of a matrix is its gain / sqrt(inputs): by the end of the module's name.
MATRIX_GAIN = {
    "embed_tokens": 0.0,  # set apart: 1 for every element
    "mlp.gate": 2.0,
    "shared_expert.gate_proj": 1.5,
    "shared_expert.up_proj": 1.5,
    "shared_expert.down_proj": 0.22,
    "switch_mlp.gate_proj": 1.5,
    "switch_mlp.up_proj": 1.5,
    "switch_mlp.down_proj": 0.2,
    "out_proj": 0.15,
    "o_proj": 0.15,
}
# (mean, deviation) of a vector, by the end of its name.
VECTOR_VALUES = {
    "model.norm.weight": (1.5, 0.1),
    "layernorm.weight": (1.0, 0.1),
    "linear_attn.norm.weight": (1.0, 0.1),
    "q_norm.weight": (1.3, 0.2),
    "k_norm.weight": (1.3, 0.2),
    "conv1d.weight": (0.0, 0.5),
    "dt_bias": (-1.0, 0.5),
}


def random_matrix(rng: np.random.Generator, module: str, shape: tuple[int, ...]) -> np.ndarray:
    gain = next((g for end, g in MATRIX_GAIN.items() if module.endswith(end)), 1.0)
    std = gain / math.sqrt(shape[-1]) if gain else 1.0
    return to_bf16(rng.standard_normal(shape, np.float32) * np.float32(std))


def random_vector(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("A_log"):  # decay exp(-exp(A_log) softplus(.)): from slow to fast forgetting
        return to_bf16(np.log(np.geomspace(0.02, 4.0, shape[0], dtype=np.float32)))
    mean, std = next(v for end, v in VECTOR_VALUES.items() if name.endswith(end))
    values = rng.standard_normal(shape, np.float32) * np.float32(std) + np.float32(mean)
    if is_gain(name):  # within [0.5, 4) gain - 1 is a bf16 number as well
        values = np.clip(values, 0.5, 3.9)
    return to_bf16(values)


def is_gain(name: str) -> bool:
    """A norm that the original stores as gain - 1."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to nearest even; the result stays fp32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return (to_bf16(values).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4", "U32": "<u4"}[dtype]).tobytes()


def quantise(
    values: np.ndarray, bits: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Affine codes, scales and biases [..., k / group], with scales of both signs.

    The extreme of larger magnitude becomes the bias, so that it is kept exactly; the scale has
    the sign that leads from there to the other extreme.
    """
    groups = values.reshape(*values.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)
    from_low = np.abs(low) > np.abs(high)
    step = np.maximum((high - low) / (2**bits - 1), 1e-7)
    scales, biases = np.where(from_low, step, -step), np.where(from_low, low, high)
    codes = np.rint((groups - biases[..., None]) / scales[..., None]).clip(0, 2**bits - 1)
    return codes.astype(np.uint32).reshape(values.shape), scales, biases


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., k] into words [..., k * bits / 32], the first in the lowest bits."""
    each = 32 // bits
    shifts = (np.arange(each, dtype=np.uint32) * bits).astype(np.uint32)
    lanes = codes.reshape(*codes.shape[:-1], -1, each) << shifts
    return np.bitwise_or.reduce(lanes, axis=-1)


@dataclass(frozen=True)
class Tensor:
    """One tensor as it goes into a file; without data only its place is written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def make_tensors(flavour: Flavour, text: Mapping[str, Any], seed: int | None) -> dict[str, Tensor]:
    """All tensors of a flavour; the same seed gives the same weights in each. None: no data."""
    out: dict[str, Tensor] = {}

    def generator(name: str) -> np.random.Generator:
        return np.random.default_rng([seed or 0, *name.encode()])

    def put(name: str, dtype: str, shape: tuple[int, ...], values: np.ndarray | None) -> None:
        if flavour.layout == "hf":
            name = name.replace("model.", "model.language_model.", 1)
        else:
            name = flavour.names + name
        out[name] = Tensor(dtype, shape, None if values is None else encode(values, dtype))

    gate: np.ndarray | None = None
    for module, shape in matrices(text):
        values = None if seed is None else random_matrix(generator(module), module, shape)
        bits, group = flavour.spec(module)
        if flavour.layout == "hf" and ".switch_mlp." in module:
            base, _, which = module.replace("switch_mlp", "experts").rpartition(".")
            experts, rows, inputs = shape
            if which == "gate_proj":
                gate = values
            elif which == "up_proj":
                both = None if values is None else np.concatenate([gate, values], axis=1)
                put(f"{base}.gate_up_proj", "BF16", (experts, 2 * rows, inputs), both)
            else:
                put(f"{base}.down_proj", "BF16", shape, values)
        elif bits == 16:
            put(f"{module}.weight", "BF16", shape, values)
        else:
            words, per_row = shape[-1] * bits // 32, shape[-1] // group
            parts: tuple[np.ndarray | None, ...] = (None, None, None)
            if values is not None:
                codes, scales, biases = quantise(values, bits, group)
                parts = (pack(codes, bits), scales, biases)
            put(f"{module}.weight", "U32", (*shape[:-1], words), parts[0])
            put(f"{module}.scales", flavour.scales, (*shape[:-1], per_row), parts[1])
            put(f"{module}.biases", flavour.scales, (*shape[:-1], per_row), parts[2])
    for name, shape in vectors(text):
        values = None if seed is None else random_vector(generator(name), name, shape)
        if flavour.layout == "hf":
            if len(shape) == 3:
                shape = (shape[0], shape[2], shape[1])
            if values is not None and is_gain(name):
                values = values - 1
        put(name, flavour.vectors, shape, values)
    return out


def extra_tensors(flavour: Flavour, vision: bool, mtp: bool, seed: int) -> dict[str, Tensor]:
    """A few tensors of the parts that lily skips, by the names of the flavour."""
    prefix = "model.visual." if flavour.layout == "hf" else "vision_tower."
    shapes: dict[str, tuple[int, ...]] = {}
    if vision:
        shapes[prefix + "patch_embed.proj.bias"] = (64,)
        shapes[prefix + "blocks.0.attn.qkv.weight"] = (192, 64)
    if mtp:
        shapes["mtp.norm.weight"] = (256,)
        shapes["mtp.layers.0.self_attn.q_norm.weight"] = (256,)
    rng = np.random.default_rng(seed)
    return {
        name: Tensor("BF16", shape, encode(rng.standard_normal(shape, np.float32), "BF16"))
        for name, shape in shapes.items()
    }


def write_safetensors(
    path: Path, tensors: Iterable[tuple[str, Tensor]], fmt: str = "mlx", pad: int = 1
) -> None:
    """Tensors in the order given. Tensors without data leave a hole in the file (sparse)."""
    header: dict[str, Any] = {"__metadata__": {"format": fmt}}
    tensors, begin = list(tensors), 0
    for name, tensor in tensors:
        header[name] = dict(
            dtype=tensor.dtype,
            shape=list(tensor.shape),
            data_offsets=[begin, begin + tensor.bytes],
        )
        begin += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % pad)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            if tensor.data is None:
                stream.seek(tensor.bytes, 1)
            else:
                stream.write(tensor.data)
        stream.truncate(8 + len(text) + begin)


def write_checkpoint(
    path: str | Path,
    flavour: str | Flavour = "mlx4",
    *,
    seed: int | None = 0,
    shards: int = 1,
    index: bool | None = None,
    vision: bool = False,
    mtp: bool = False,
    flat_config: bool = False,
    tokenizer: str | Path | None = None,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint folder and returns it.

    `seed=None` writes headers and sparse files of the right size; `index=None` writes an index
    when there are several shards; `tokenizer` is a folder whose tokenizer files are copied;
    `overrides` replace fields of text_config. The order of tensors in the files is random.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    kind = FLAVOURS[flavour] if isinstance(flavour, str) else flavour
    config = make_config(kind, **overrides)
    text = config["text_config"]
    tensors = make_tensors(kind, text, seed) | extra_tensors(kind, vision, mtp, seed or 0)
    order = np.random.default_rng([seed or 0, shards]).permutation(len(tensors))
    items = [list(tensors.items())[i] for i in order]
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        name = name if shards > 1 else "model.safetensors"
        part = items[shard::shards]
        hf = kind.layout == "hf"
        write_safetensors(path / name, part, "pt" if hf else "mlx", 8 if hf else 1)
        weight_map |= dict.fromkeys((tensor for tensor, _ in part), name)
    if index if index is not None else shards > 1:
        total = sum(tensor.bytes for tensor in tensors.values())
        listing = dict(metadata=dict(total_size=total), weight_map=dict(sorted(weight_map.items())))
        write_json(path / "model.safetensors.index.json", listing)
    if flat_config:
        rest = {k: v for k, v in config.items() if k not in ("text_config", "architectures")}
        config = rest | text | dict(architectures=["Qwen3_5MoeForCausalLM"])
    write_json(path / "config.json", config)
    eos = [i for i in EOS if i < text["vocab_size"]]
    write_json(
        path / "generation_config.json",
        dict(do_sample=True, eos_token_id=eos, temperature=1.0, top_k=20, top_p=0.95),
    )
    if tokenizer is not None:
        copy_tokenizer(tokenizer, path)
    return path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copies the tokenizer files that the source has; the first must be there."""
    for name in TOKENIZER_FILES:
        if name == TOKENIZER_FILES[0] or (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def main(arguments: list[str]) -> None:
    out, *chosen = arguments
    tokenizer = Path(__file__).parent / "data" / "mlx4_calm"
    for name in chosen or FLAVOURS:
        hf = FLAVOURS[name].layout == "hf"
        write_checkpoint(
            Path(out) / name,
            name,
            shards=2 if hf else 1,
            mtp=hf,
            vision=hf,
            tokenizer=tokenizer if tokenizer.exists() else None,
        )
        print(f"wrote {Path(out) / name}")


if __name__ == "__main__":
    main(sys.argv[1:])
