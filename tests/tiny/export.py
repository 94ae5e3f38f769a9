"""Owns the way from trained weights to checkpoint folders.

    python export.py WEIGHTS FOLDER             MLX form: 4 bits, gates 8 (as the package has it)
    python export.py WEIGHTS FOLDER --bits 8    the same in 8 bits
    python export.py WEIGHTS FOLDER --original  the family's original form in bf16

The MLX form quantises the bf16 weights, as a conversion of the original form would. WEIGHTS: what
train.py wrote, or a folder of the MLX form, whose values are spelled out. That does not give back
what was rounded away: such a folder in 8 bits or bf16 says what the one in 4 bits says.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import encode
import layout as lay
import model
import torch
import train
from safetensors.torch import save_file
from torch import Tensor

GATES = ("mlp.gate", "mlp.shared_expert_gate")


def config(bits: int | None) -> dict[str, Any]:
    """config.json; bits is None for the original form."""
    kinds = ["full_attention" if lay.is_full(i) else "linear_attention" for i in range(lay.LAYERS)]
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": lay.HIDDEN,
        "num_hidden_layers": lay.LAYERS,
        "layer_types": kinds,
        "full_attention_interval": lay.INTERVAL,
        "vocab_size": lay.VOCAB,
        "num_attention_heads": lay.HEADS,
        "num_key_value_heads": lay.KV_HEADS,
        "head_dim": lay.HEAD_DIM,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_num_key_heads": lay.KEY_HEADS,
        "linear_num_value_heads": lay.VALUE_HEADS,
        "linear_key_head_dim": lay.DELTA_DIM,
        "linear_value_head_dim": lay.DELTA_DIM,
        "linear_conv_kernel_dim": lay.TAPS,
        "mamba_ssm_dtype": "float32",
        "num_experts": lay.EXPERTS,
        "num_experts_per_tok": lay.TOP_K,
        "moe_intermediate_size": lay.WIDTH,
        "shared_expert_intermediate_size": lay.SHARED,
        "hidden_act": "silu",
        "rms_norm_eps": lay.EPS,
        "max_position_embeddings": lay.CONTEXT,
        "partial_rotary_factor": lay.ROTARY / lay.HEAD_DIM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": lay.THETA,
            "partial_rotary_factor": lay.ROTARY / lay.HEAD_DIM,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "router_aux_loss_coef": train.BALANCE_SHARE,
        "output_router_logits": False,
        "initializer_range": 0.02,
        "bos_token_id": lay.ENDOFTEXT,
        "eos_token_id": lay.ENDOFTEXT,
        "pad_token_id": None,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    whole: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": [lay.IM_END, lay.ENDOFTEXT],
        "tie_word_embeddings": False,
        "text_config": text,
    }
    if bits is not None:
        rules: dict[str, Any] = {"group_size": lay.GROUP, "bits": bits, "mode": "affine"}
        layers = [f"language_model.model.layers.{i}" for i in range(lay.LAYERS)]
        for layer in (*layers, "mtp.layers.0"):
            for gate in GATES:
                rules[f"{layer}.{gate}"] = {"group_size": lay.GROUP, "bits": 8}
        whole |= {"quantization": rules, "quantization_config": rules}
    return whole


def mlx_tensors(parameters: model.Parameters, bits: int) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for spec in parameters.specs:
        value = parameters.view(spec.name).detach()
        name = spec.name if spec.name.startswith("mtp.") else "language_model." + spec.name
        if spec.bits == 16:
            value = value[..., None] if name.endswith("conv1d.weight") else value
            out[name] = value.bfloat16()
            continue
        width = 8 if spec.bits == 8 else bits
        scale, bias, codes = model.affine(value, width)
        per = 32 // width
        words = codes.to(torch.int64).view(*spec.shape[:-1], spec.shape[-1] // per, per)
        words = (words << (torch.arange(per) * width)).sum(-1)
        module = name.removesuffix(".weight")
        out[name] = (words & 0xFFFFFFFF).to(torch.uint32)
        for part, x in (("scales", scale), ("biases", bias)):
            out[f"{module}.{part}"] = x.view(*spec.shape[:-1], -1).bfloat16()
    return out


def original_tensors(parameters: model.Parameters) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for spec in parameters.specs:
        name, value = spec.name, parameters.view(spec.name).detach()
        if lay.is_gain(name):
            value = value.bfloat16().float() - 1  # exact in bf16 for gains from 0.5 on
        elif name.endswith("conv1d.weight"):
            value = value[:, None]
        elif name.endswith("switch_mlp.gate_proj.weight"):
            up = parameters.view(name.replace("gate_proj", "up_proj")).detach()
            value = torch.cat((value, up), 1)
            name = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
        elif name.endswith("switch_mlp.up_proj.weight"):
            continue
        else:
            name = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
        if name.startswith("model."):
            name = "model.language_model." + name.removeprefix("model.")
        out[name] = value.bfloat16()
    return out


def write(parameters: model.Parameters, folder: Path, bits: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kind = "pt" if bits is None else "mlx"
    tensors = original_tensors(parameters) if bits is None else mlx_tensors(parameters, bits)
    parts: dict[str, dict[str, Tensor]] = {"model.safetensors": {}, "mtp.safetensors": {}}
    for name, value in tensors.items():
        file = "mtp.safetensors" if name.startswith("mtp.") else "model.safetensors"
        parts[file][name] = value.contiguous()
    for file, part in parts.items():
        save_file(part, str(folder / file), metadata={"format": kind})
        (folder / file).chmod(0o644)

    def dump(file: str, value: Any) -> None:
        (folder / file).write_text(json.dumps(value, indent=2) + "\n")

    dump("config.json", config(bits))
    dump(
        "generation_config.json",
        {
            "bos_token_id": lay.ENDOFTEXT,
            "do_sample": True,
            "eos_token_id": [lay.IM_END, lay.ENDOFTEXT],
            "pad_token_id": lay.ENDOFTEXT,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    dump(
        "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": lay.CONTEXT,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "tool_parser_type": "qwen3_coder",
            "unk_token": None,
        },
    )
    for file in (encode.TOKENIZER, encode.TEMPLATE):  # which the package's own folder has
        if not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--original", action="store_true")
    a = parser.parse_args()
    parameters = model.Parameters("cpu")
    train.read_weights(parameters, a.weights)
    write(parameters, a.folder, None if a.original else a.bits)
    for file in sorted(a.folder.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file.name}")


if __name__ == "__main__":
    main()
