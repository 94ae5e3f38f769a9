"""Owns the meaning of config.json: the shapes of a qwen3_5_moe model, or a refusal that names the
field, its value and the rule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lily.errors import CheckpointError
from lily.safetensors_header import is_int, read_json_object, shown

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
LINEAR, FULL = "linear_attention", "full_attention"
HEAD_DIM = 256
DELTA_HEAD_DIM = 128
CONV_WIDTH = 4
MAX_QUERIES = 16  # query heads that share a KV head
MAX_VOCAB = 2**19  # the sampler's limit

# Settings that change the forward pass; only one value of each is implemented. Absent means it.
ONLY: dict[str, object] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_interleaved",
    "mrope_section",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How config.json says a module is quantised; whether that is supported, the plan decides."""

    bits: int
    group: int
    mode: str


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model, all checked."""

    layer_types: tuple[str, ...]
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    rope_theta: float
    key_heads: int
    value_heads: int
    delta_head_dim: int
    conv_width: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    rms_eps: float
    max_position: int
    eos_ids: tuple[int, ...]
    tied: bool
    quantization: Quantization | None
    # By canonical module name; None says that the module is not quantised.
    overrides: Mapping[str, Quantization | None]

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def key_dim(self) -> int:
        """Width of all DeltaNet queries, and of all keys."""
        return self.key_heads * self.delta_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.delta_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


def canonical_name(name: str) -> str:
    """The text-only name (model.X, lm_head.X) of a tensor or module of any flavour.

    mlx-lm and mlx-vlm write language_model.model.X and language_model.lm_head.X, the original
    model.language_model.X and lm_head.X.
    """
    name = name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    return name


class Section:
    """One JSON object of a file; whatever is wrong in it is refused by file, field and value."""

    def __init__(self, file: str, path: str, fields: Mapping[str, object]) -> None:
        self.file, self.path, self.fields = file, path, fields

    def get(self, key: str) -> object:
        return self.fields.get(key)

    def refusal(self, key: str, rule: str) -> CheckpointError:
        value = f"= {shown(self.fields[key])}" if key in self.fields else "is missing"
        return CheckpointError(f"{self.file}: {self.path}{shown(key)} {value}, expected {rule}")

    def section(self, key: str) -> Section:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return Section(self.file, f"{self.path}{shown(key)}.", value)

    def integer(self, key: str, low: int, high: int, multiple: int = 1) -> int:
        value = self.get(key)
        if is_int(value) and low <= value <= high and value % multiple == 0:
            return value
        rule = f"{low}" if low == high else f"an integer from {low} to {high}"
        raise self.refusal(key, rule + (f", a multiple of {multiple}" if multiple > 1 else ""))

    def number(self, key: str, low: float, high: float) -> float:
        value = self.get(key)
        # Compared before the conversion: a JSON integer may exceed every float.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.refusal(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.fields.get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "a string")
        return value

    def only(self, key: str, expected: object) -> None:
        value = self.get(key)
        if value is not None and (type(value) is not type(expected) or value != expected):
            raise self.refusal(key, f"{expected!r}, the only one supported")


def read_config(folder: str | Path) -> ModelConfig:
    """Reads and checks config.json (and generation_config.json, if any) of a checkpoint folder."""
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder")
    top = Section("config.json", "", read_json_object(folder / "config.json"))
    text = _text_section(top)
    top.only("tie_word_embeddings", False)
    for key, expected in ONLY.items():
        text.only(key, expected)

    heads = text.integer("num_attention_heads", 1, 1024)
    kv_heads = text.integer("num_key_value_heads", 1, 1024)
    if heads % kv_heads:
        raise text.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if heads // kv_heads > MAX_QUERIES:
        rule = f"at least 1 for {MAX_QUERIES} of num_attention_heads = {heads}"
        raise text.refusal("num_key_value_heads", rule)
    key_heads = text.integer("linear_num_key_heads", 1, 1024)
    value_heads = text.integer("linear_num_value_heads", 1, 1024)
    if value_heads % key_heads:
        raise text.refusal(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}"
        )
    head_dim = text.integer("head_dim", HEAD_DIM, HEAD_DIM)
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        text.integer(key, DELTA_HEAD_DIM, DELTA_HEAD_DIM)
    experts = text.integer("num_experts", 2, 1024)
    vocab = text.integer("vocab_size", 1, MAX_VOCAB)
    rope_theta, rotary_dims = _rope(text, head_dim)
    quantization, overrides = _quantization(top, text)
    return ModelConfig(
        layer_types=_layer_types(text),
        hidden=text.integer("hidden_size", 64, 65536, multiple=64),
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dims=rotary_dims,
        rope_theta=rope_theta,
        key_heads=key_heads,
        value_heads=value_heads,
        delta_head_dim=DELTA_HEAD_DIM,
        conv_width=text.integer("linear_conv_kernel_dim", CONV_WIDTH, CONV_WIDTH),
        experts=experts,
        top_k=text.integer("num_experts_per_tok", 1, min(16, experts)),
        expert_width=text.integer("moe_intermediate_size", 64, 65536, multiple=64),
        shared_width=text.integer("shared_expert_intermediate_size", 64, 65536, multiple=64),
        rms_eps=text.number("rms_norm_eps", 1e-12, 1e-2),
        # Positions are multiplied in fp32, which holds integers exactly up to 2^24.
        max_position=text.integer("max_position_embeddings", 1, 2**24),
        eos_ids=_eos_ids(folder, top, text, vocab),
        tied=False,
        quantization=quantization,
        overrides=overrides,
    )


def _text_section(top: Section) -> Section:
    """text_config of the multimodal wrapper, or the whole of a text-only config."""
    text = top.section("text_config") if top.get("text_config") is not None else top
    for section in (top, text) if text is not top else (top,):
        if section.get("model_type") not in MODEL_TYPES:
            raise section.refusal("model_type", " or ".join(MODEL_TYPES))
    names = top.get("architectures")
    if names is not None and not (
        isinstance(names, list) and names and all(name in ARCHITECTURES for name in names)
    ):
        raise top.refusal("architectures", " or ".join(ARCHITECTURES))
    return text


def _layer_types(text: Section) -> tuple[str, ...]:
    count = text.integer("num_hidden_layers", 1, 1024)
    given = text.get("layer_types")
    if given is None:
        interval = text.integer("full_attention_interval", 1, 1024)
        types = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
        key = "full_attention_interval"
    else:
        if not isinstance(given, list) or len(given) != count:
            raise text.refusal("layer_types", f"a list of num_hidden_layers = {count} names")
        for i, kind in enumerate(given):
            if not isinstance(kind, str) or kind not in (LINEAR, FULL):
                raise CheckpointError(
                    f"{text.file}: {text.path}layer_types[{i}] = {shown(kind)},"
                    f" expected {LINEAR} or {FULL}"
                )
        types, key = given, "layer_types"
    # The layout of its convolution is what tells an original from a converted checkpoint.
    if LINEAR not in types:
        raise text.refusal(key, f"at least one {LINEAR} layer")
    return tuple(types)


def _rope(text: Section, head_dim: int) -> tuple[float, int]:
    """Base and number of rotated dims, from rope_parameters and the older fields beside it."""
    places = [text]
    for key in ("rope_parameters", "rope_scaling"):
        if text.get(key) is not None:
            rope = text.section(key)
            rope.only("rope_type", "default")
            rope.only("type", "default")
            for field in rope.fields:
                if field not in ROPE_FIELDS:
                    raise rope.refusal(field, "no such field: scaled rope is not supported")
            places.insert(0, rope)

    def agreed(key: str, low: float, high: float) -> float:
        found = [place for place in places if key in place.fields] or places[:1]
        values = [place.number(key, low, high) for place in found]
        for place, value in zip(found, values, strict=True):
            if value != values[0]:
                raise place.refusal(key, f"{found[0].path}{key} = {values[0]:g}")
        return values[0]

    theta = agreed("rope_theta", 1.0, 1e12)
    dims = head_dim * agreed("partial_rotary_factor", 0.0, 1.0)
    if dims < 2 or dims % 2:
        place = next(place for place in places if "partial_rotary_factor" in place.fields)
        raise place.refusal(
            "partial_rotary_factor",
            f"an even share of head_dim = {head_dim}, this is {dims:g} dims",
        )
    return theta, int(dims)


def _eos_ids(folder: Path, top: Section, text: Section, vocab: int) -> tuple[int, ...]:
    """All ids that end a turn: configs often name one, generation_config.json the others."""
    sections = [top, text]
    if os.path.lexists(folder / "generation_config.json"):
        fields = read_json_object(folder / "generation_config.json")
        sections.append(Section("generation_config.json", "", fields))
    ids: set[int] = set()
    for section in sections:
        value = section.get("eos_token_id")
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if not is_int(item) or not 0 <= item < vocab:
                raise section.refusal("eos_token_id", f"ids from 0 to vocab_size - 1 = {vocab - 1}")
            ids.add(item)
    return tuple(sorted(ids))


def _quantization(
    top: Section, text: Section
) -> tuple[Quantization | None, Mapping[str, Quantization | None]]:
    """The default and the modules that differ; the copies in a config must all agree."""
    found: list[tuple[Section, Quantization, dict[str, Quantization | None]]] = []
    for section in (top, text) if text is not top else (top,):
        for key in ("quantization", "quantization_config"):
            if section.get(key) is not None:
                found.append(_quantization_section(section.section(key)))
    for section, default, overrides in found[1:]:
        if (default, overrides) != found[0][1:]:
            raise CheckpointError(
                f"{section.file}: {section.path.rstrip('.')} and"
                f" {found[0][0].path.rstrip('.')} disagree"
            )
    if not found:
        return None, MappingProxyType({})
    return found[0][1], MappingProxyType(found[0][2])


def _quantization_section(
    section: Section,
) -> tuple[Section, Quantization, dict[str, Quantization | None]]:
    def spec(fields: Section) -> Quantization:
        return Quantization(
            bits=fields.integer("bits", 1, 32),
            group=fields.integer("group_size", 1, 65536),
            mode=fields.text("mode", "affine"),
        )

    if "quant_method" in section.fields:
        raise section.refusal("quant_method", "no such field: only MLX affine is supported")
    default = spec(section)
    overrides: dict[str, Quantization | None] = {}
    for key, value in section.fields.items():
        if key in ("bits", "group_size", "mode"):
            continue
        entry: Quantization | None
        if isinstance(value, bool):
            entry = default if value else None
        elif isinstance(value, dict):
            entry = spec(section.section(key))
        else:
            raise section.refusal(key, "bits, group_size, mode, or a module's object or false")
        module = canonical_name(key)
        if overrides.get(module, entry) != entry:
            raise section.refusal(key, "the same as under the module's other prefix")
        overrides[module] = entry
    return section, default, overrides
