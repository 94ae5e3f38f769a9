"""Owns the small model of `lily selftest`: random weights, the same on every machine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN, VOCAB, WIDTH, GROUP, EXPERTS = 128, 512, 64, 64, 8
KEY_HEADS, VALUE_HEADS, HEADS = 1, 2, 2
KINDS = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
PREFIX = "language_model."


def prompt(count: int) -> NDArray[np.uint32]:
    """Token ids that no model has seen."""
    return (_words("prompt", count) % np.uint64(VOCAB)).astype(np.uint32)


def write(folder: Path) -> None:
    """config.json and model.safetensors as an MLX conversion has them: 4 bits, routers 8."""
    names = [f"{PREFIX}model.layers.{i}.mlp.{gate}" for i in range(len(KINDS)) for gate in _GATES]
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    quantization |= {name: {"group_size": GROUP, "bits": 8} for name in names}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": _TEXT,
        "tie_word_embeddings": False,
        "quantization": quantization,
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    parts, at = [], 0
    for name, kind, array in _tensors():
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        parts.append(array.tobytes())
        at += array.nbytes
    raw = json.dumps(header).encode()
    data = len(raw).to_bytes(8, "little") + raw + b"".join(parts)
    (folder / "model.safetensors").write_bytes(data)


_GATES = ("gate", "shared_expert_gate")
_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "layer_types": list(KINDS),
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 512,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "shared_expert_intermediate_size": WIDTH,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}

Tensor = tuple[str, str, NDArray[Any]]  # name, safetensors' type, values as stored


def _tensors() -> Iterator[Tensor]:
    """Blocks add little to the residual stream and routers are sharp: rounding flips no expert."""
    yield from _matrix("model.embed_tokens", (VOCAB, HIDDEN), HIDDEN**0.5)
    yield from _matrix("lm_head", (VOCAB, HIDDEN), 2.0)
    yield _vector("model.norm.weight", (HIDDEN,), 0.9, 1.1)
    channels, values = 128 * (2 * KEY_HEADS + VALUE_HEADS), 128 * VALUE_HEADS
    for i, kind in enumerate(KINDS):
        p = f"model.layers.{i}."
        if kind == "full_attention":
            yield from _matrix(p + "self_attn.q_proj", (2 * HEADS * 256, HIDDEN))
            yield from _matrix(p + "self_attn.k_proj", (256, HIDDEN))
            yield from _matrix(p + "self_attn.v_proj", (256, HIDDEN))
            yield from _matrix(p + "self_attn.o_proj", (HIDDEN, HEADS * 256), 0.3)
            yield _vector(p + "self_attn.q_norm.weight", (256,), 0.9, 1.7)
            yield _vector(p + "self_attn.k_norm.weight", (256,), 0.9, 1.7)
        else:
            q = p + "linear_attn."
            yield from _matrix(q + "in_proj_qkv", (channels, HIDDEN))
            yield from _matrix(q + "in_proj_z", (values, HIDDEN))
            yield from _matrix(q + "in_proj_a", (VALUE_HEADS, HIDDEN))
            yield from _matrix(q + "in_proj_b", (VALUE_HEADS, HIDDEN))
            yield from _matrix(q + "out_proj", (HIDDEN, values), 0.3)
            yield _vector(q + "conv1d.weight", (channels, 4, 1), -0.9, 0.9)
            yield _vector(q + "A_log", (VALUE_HEADS,), -3.9, 1.3)
            yield _vector(q + "dt_bias", (VALUE_HEADS,), -2.0, 0.0)
            yield _vector(q + "norm.weight", (128,), 0.9, 1.1)
        m = p + "mlp."
        yield from _matrix(m + "gate", (EXPERTS, HIDDEN), 4.0, 8)
        yield from _matrix(m + "shared_expert_gate", (1, HIDDEN), 1.0, 8)
        for owner, lead in (("shared_expert", ()), ("switch_mlp", (EXPERTS,))):
            for part, n, k, gain in (
                ("gate_proj", WIDTH, HIDDEN, 1.5),
                ("up_proj", WIDTH, HIDDEN, 1.5),
                ("down_proj", HIDDEN, WIDTH, 0.4),
            ):
                yield from _matrix(f"{m}{owner}.{part}", (*lead, n, k), gain)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _vector(f"{p}{norm}.weight", (HIDDEN,), 0.9, 1.1)


def _matrix(
    name: str, shape: tuple[int, ...], gain: float = 1.0, bits: int = 4
) -> Iterator[Tensor]:
    """Random codes around a deviation of gain / sqrt(inputs); half of the scales are negative."""
    *lead, k = shape
    top, groups = (1 << bits) - 1, (*lead, k // GROUP)
    count = int(np.prod(groups))
    codes = _words(name + ".codes", int(np.prod(shape)) * bits // 32).astype(np.uint32)
    sign = np.where(_words(name + ".signs", count) >> np.uint64(63), -1.0, 1.0)
    scales = _uniform(name + ".scales", count, 0.5, 1.5) * sign * (gain * (12 / k) ** 0.5 / top)
    yield f"{PREFIX}{name}.weight", "U32", codes.reshape(*lead, k * bits // 32)
    yield f"{PREFIX}{name}.scales", "BF16", _bf16(scales).reshape(groups)
    yield f"{PREFIX}{name}.biases", "BF16", _bf16(scales * (-top / 2)).reshape(groups)


def _vector(name: str, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    values = _uniform(name, int(np.prod(shape)), low, high)
    return PREFIX + name, "BF16", _bf16(values).reshape(shape)


def _words(name: str, count: int) -> NDArray[np.uint64]:
    """SplitMix64 by tensor and place: numpy's generators may change from version to version."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(zlib.crc32(name.encode()) << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(name: str, count: int, low: float, high: float) -> NDArray[np.float64]:
    parts = (_words(name, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return low + (high - low) * parts


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
