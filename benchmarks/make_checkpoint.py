"""Writes a random checkpoint with the shapes of Qwen3.6-35B-A3B in exact MLX 4-bit form.

    python benchmarks/make_checkpoint.py FOLDER [--layers 40] [--experts 256] [--seed 0] [--empty]

1,757 text tensors, 19,508,787,456 bytes in four shards with an index, unpadded headers and tensors
in hashed order, as the public conversions have them. Half of the scales are negative. Block outputs
are small and the router is sharp, so that the residual stream stays finite over 40 layers.
--empty leaves the tensors as holes in their files: enough for whoever reads headers only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HIDDEN, VOCAB, WIDTH, GROUP = 2048, 248320, 512, 64
CHANNELS, VALUES, HEADS, KV = 8192, 4096, 16, 2
SHARDS = 4
PIECE = 16 << 20  # bytes generated at a time
PREFIX = "language_model."


@dataclass(frozen=True)
class Spec:
    """One tensor: `kind` says how its bytes are drawn."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    kind: str  # "codes", "scales", "biases", "gain", "conv", "decay", "dt"
    std: float = 0.0  # of the matrix that codes, scales and biases make
    bits: int = 4

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.dtype == "U32" else 2)


def quantised(
    name: str, n: int, k: int, gain: float, bits: int = 4, experts: int = 0
) -> Iterator[Spec]:
    lead = (experts,) if experts else ()
    std = gain / np.sqrt(k)
    yield Spec(name + ".weight", "U32", (*lead, n, k * bits // 32), "codes", std, bits)
    for part in ("scales", "biases"):
        yield Spec(f"{name}.{part}", "BF16", (*lead, n, k // GROUP), part, std, bits)


def specs(layers: int, experts: int) -> Iterator[Spec]:
    """Every tensor of the text model."""
    yield from quantised(PREFIX + "model.embed_tokens", VOCAB, HIDDEN, np.sqrt(HIDDEN))
    yield from quantised(PREFIX + "lm_head", VOCAB, HIDDEN, 1.0)
    yield Spec(PREFIX + "model.norm.weight", "BF16", (HIDDEN,), "gain")
    for i in range(layers):
        p = f"{PREFIX}model.layers.{i}."
        if i % 4 == 3:
            yield from quantised(p + "self_attn.q_proj", 2 * HEADS * 256, HIDDEN, 1.0)
            yield from quantised(p + "self_attn.k_proj", KV * 256, HIDDEN, 1.0)
            yield from quantised(p + "self_attn.v_proj", KV * 256, HIDDEN, 1.0)
            yield from quantised(p + "self_attn.o_proj", HIDDEN, HEADS * 256, 0.15)
            for norm in ("q_norm", "k_norm"):
                yield Spec(f"{p}self_attn.{norm}.weight", "BF16", (256,), "gain")
        else:
            q = p + "linear_attn."
            yield from quantised(q + "in_proj_qkv", CHANNELS, HIDDEN, 1.0)
            yield from quantised(q + "in_proj_z", VALUES, HIDDEN, 1.0)
            yield from quantised(q + "in_proj_a", 32, HIDDEN, 1.0)
            yield from quantised(q + "in_proj_b", 32, HIDDEN, 1.0)
            yield from quantised(q + "out_proj", HIDDEN, VALUES, 0.15)
            yield Spec(q + "conv1d.weight", "BF16", (CHANNELS, 4, 1), "conv")
            yield Spec(q + "A_log", "BF16", (32,), "decay")
            yield Spec(q + "dt_bias", "BF16", (32,), "dt")
            yield Spec(q + "norm.weight", "BF16", (128,), "gain")
        m = p + "mlp."
        yield from quantised(m + "gate", experts, HIDDEN, 2.0, 8)
        yield from quantised(m + "shared_expert_gate", 1, HIDDEN, 1.0, 8)
        for part, n, k, gain in (
            ("gate_proj", WIDTH, HIDDEN, 1.5),
            ("up_proj", WIDTH, HIDDEN, 1.5),
            ("down_proj", HIDDEN, WIDTH, 0.2),
        ):
            yield from quantised(f"{m}shared_expert.{part}", n, k, gain)
            yield from quantised(f"{m}switch_mlp.{part}", n, k, gain, experts=experts)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Spec(f"{p}{norm}.weight", "BF16", (HIDDEN,), "gain")


def config(layers: int, experts: int) -> dict[str, object]:
    quantization: dict[str, object] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for i in range(layers):
        for gate in ("gate", "shared_expert_gate"):
            quantization[f"{PREFIX}model.layers.{i}.mlp.{gate}"] = {"group_size": GROUP, "bits": 8}
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    text = dict(
        model_type="qwen3_5_moe_text",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        layer_types=kinds,
        full_attention_interval=4,
        vocab_size=VOCAB,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=256,
        attn_output_gate=True,
        attention_bias=False,
        attention_dropout=0.0,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        partial_rotary_factor=0.25,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=10000000,
            partial_rotary_factor=0.25,
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
        ),
        bos_token_id=248044,
        eos_token_id=248044,
        dtype="bfloat16",
    )
    return dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        model_type="qwen3_5_moe",
        eos_token_id=[248046, 248044],
        tie_word_embeddings=False,
        text_config=text,
        quantization=quantization,
        quantization_config=quantization,
    )


def _bf16(x: np.ndarray) -> bytes:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def values(spec: Spec, seed: int, start: int, count: int) -> bytes:
    """Elements start .. start + count of a tensor; scales and biases agree as they share a seed."""
    base = spec.name.rsplit(".", 1)[0] if spec.kind in ("scales", "biases") else spec.name
    digest = hashlib.sha256(f"{seed} {base} {start}".encode()).digest()
    rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:8], "little")))
    if spec.kind == "codes":
        return rng.bytes(4 * count)
    if spec.kind in ("scales", "biases"):
        top = (1 << spec.bits) - 1
        scale = rng.random(count, np.float32)
        scale = (scale + np.float32(0.5)) * np.float32(spec.std * np.sqrt(12) / top)
        scale *= np.where(rng.integers(0, 2, count, np.uint8), np.float32(1), np.float32(-1))
        return _bf16(scale if spec.kind == "scales" else scale * np.float32(-top / 2))
    normal = rng.standard_normal(count)
    if spec.kind == "gain":
        return _bf16(1 + 0.1 * normal)
    if spec.kind == "conv":
        return _bf16(0.5 * normal)
    if spec.kind == "dt":
        return _bf16(0.5 * normal - 1)
    return _bf16(np.log(rng.uniform(0.02, 4.0, count)))


def write_pieces(path: str, seed: int, pieces: list[tuple[Spec, int, int, int]]) -> None:
    """Pieces (tensor, first element, count, byte offset) of one file."""
    fd = os.open(path, os.O_WRONLY)
    try:
        for spec, start, count, offset in pieces:
            data = values(spec, seed, start, count)
            while data:
                done = os.pwrite(fd, data, offset)
                data, offset = data[done:], offset + done
    finally:
        os.close(fd)


def write(folder: Path, layers: int, experts: int, seed: int, empty: bool = False) -> int:
    """Writes config, index and shards; returns the tensor bytes. empty: of holes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = sorted(specs(layers, experts), key=lambda s: hashlib.sha256(s.name.encode()).digest())
    total, share = sum(s.bytes for s in tensors), 0
    shards: list[list[Spec]] = [[] for _ in range(SHARDS)]
    for spec in tensors:
        shards[min(SHARDS - 1, share * SHARDS // total)].append(spec)
        share += spec.bytes
    weight_map: dict[str, str] = {}
    work: list[tuple[str, list[tuple[Spec, int, int, int]]]] = []
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
        at = 0
        for spec in shard:
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.bytes],
            }
            weight_map[spec.name] = name
            at += spec.bytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        path = folder / name
        with path.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + at)
        offset, batch, size = 8 + len(raw), [], 0
        for spec in shard:
            item = 4 if spec.dtype == "U32" else 2
            elements = spec.bytes // item
            # Scales and biases are drawn in the same pieces, so that they agree.
            for start in range(0, elements, PIECE // item):
                count = min(PIECE // item, elements - start)
                batch.append((spec, start, count, offset + start * item))
                size += count * item
                if size >= 8 * PIECE:
                    work.append((str(path), batch))
                    batch, size = [], 0
            offset += spec.bytes
        if batch:
            work.append((str(path), batch))
    if empty:
        work = []
    with ProcessPoolExecutor() as pool:
        for done in [pool.submit(write_pieces, path, seed, batch) for path, batch in work]:
            done.result()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config(layers, experts), indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--empty", action="store_true")
    a = parser.parse_args()
    start = time.perf_counter()
    total = write(a.folder, a.layers, a.experts, a.seed, a.empty)
    print(f"{a.folder}: {total:,} tensor bytes in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
