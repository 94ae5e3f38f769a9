"""Owns the shapes of the tiny model: which tensors it has, how each is stored and trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

HIDDEN, LAYERS, VOCAB = 256, 8, 4096
INTERVAL = 4  # every fourth layer has full attention
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 4, 1, 256, 64
KEY_HEADS, VALUE_HEADS, DELTA_DIM, TAPS = 2, 4, 128, 4
EXPERTS, TOP_K, WIDTH, SHARED = 16, 4, 64, 64
CONTEXT = 4096
THETA = 10_000_000
EPS = 1e-6
GROUP = 64

FIRST_SPECIAL = 4000  # base vocabulary 0..3999, then the added tokens, then rows never sampled
# In the family's order; those in PLAIN are not "special": decoding keeps them.
SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
    *("<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>"),
    *("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
]
PLAIN = {
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
}
ENDOFTEXT, IM_START, IM_END = FIRST_SPECIAL, FIRST_SPECIAL + 1, FIRST_SPECIAL + 2


@dataclass(frozen=True)
class Spec:
    """One tensor. bits: how it is rounded; muon: which optimiser; std: of its first values."""

    name: str
    shape: tuple[int, ...]
    bits: int  # 4, 8, or 16 for vectors
    muon: bool
    std: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_full(layer: int) -> bool:
    return layer % INTERVAL == INTERVAL - 1


def _layer(prefix: str, full: bool) -> list[Spec]:
    def matrix(name: str, *shape: int, out: bool = False) -> Spec:
        # What is added to the residual stream begins at zero.
        return Spec(prefix + name, shape, 4, True, 0.0 if out else shape[-1] ** -0.5)

    def vector(name: str, *shape: int) -> Spec:
        return Spec(prefix + name, shape, 16, False, 0.0)

    specs = [
        vector("input_layernorm.weight", HIDDEN),
        vector("post_attention_layernorm.weight", HIDDEN),
        Spec(prefix + "mlp.gate.weight", (EXPERTS, HIDDEN), 8, False, HIDDEN**-0.5),
        Spec(prefix + "mlp.shared_expert_gate.weight", (1, HIDDEN), 8, False, HIDDEN**-0.5),
        matrix("mlp.shared_expert.gate_proj.weight", SHARED, HIDDEN),
        matrix("mlp.shared_expert.up_proj.weight", SHARED, HIDDEN),
        matrix("mlp.shared_expert.down_proj.weight", HIDDEN, SHARED, out=True),
        matrix("mlp.switch_mlp.gate_proj.weight", EXPERTS, WIDTH, HIDDEN),
        matrix("mlp.switch_mlp.up_proj.weight", EXPERTS, WIDTH, HIDDEN),
        matrix("mlp.switch_mlp.down_proj.weight", EXPERTS, HIDDEN, WIDTH, out=True),
    ]
    if full:
        return [
            *specs,
            matrix("self_attn.q_proj.weight", 2 * HEADS * HEAD_DIM, HIDDEN),
            matrix("self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN),
            matrix("self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN),
            matrix("self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, out=True),
            vector("self_attn.q_norm.weight", HEAD_DIM),
            vector("self_attn.k_norm.weight", HEAD_DIM),
        ]
    channels, values = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM, VALUE_HEADS * DELTA_DIM
    small = HIDDEN**-0.5
    return [
        *specs,
        matrix("linear_attn.in_proj_qkv.weight", channels, HIDDEN),
        matrix("linear_attn.in_proj_z.weight", values, HIDDEN),
        Spec(prefix + "linear_attn.in_proj_a.weight", (VALUE_HEADS, HIDDEN), 4, False, small),
        Spec(prefix + "linear_attn.in_proj_b.weight", (VALUE_HEADS, HIDDEN), 4, False, small),
        matrix("linear_attn.out_proj.weight", HIDDEN, values, out=True),
        vector("linear_attn.conv1d.weight", channels, TAPS),
        vector("linear_attn.A_log", VALUE_HEADS),
        vector("linear_attn.dt_bias", VALUE_HEADS),
        vector("linear_attn.norm.weight", DELTA_DIM),
    ]


def specs() -> list[Spec]:
    """All tensors; norms are gains (1 + w). Those of one shape lie side by side in training."""
    found = [
        Spec("model.embed_tokens.weight", (VOCAB, HIDDEN), 4, False, 0.5),
        Spec("lm_head.weight", (VOCAB, HIDDEN), 4, False, 0.02),
        Spec("model.norm.weight", (HIDDEN,), 16, False, 0.0),
    ]
    for layer in range(LAYERS):
        found += _layer(f"model.layers.{layer}.", is_full(layer))
    found += [Spec(f"mtp.{name}.weight", (HIDDEN,), 16, False, 0.0) for name in MTP_NORMS]
    found.append(Spec("mtp.fc.weight", (HIDDEN, 2 * HIDDEN), 4, True, (2 * HIDDEN) ** -0.5))
    return found + _layer("mtp.layers.0.", True)


MTP_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def is_gain(name: str) -> bool:
    """Norms that the original stores as w of (1 + w); DeltaNet's own norm is stored as it is."""
    return (name.endswith("norm.weight") and "linear_attn" not in name) or "pre_fc_norm" in name
