"""Owns the way from a local folder to a validated plan: where the bytes of every weight lie.

Reads headers only and touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lily.errors import CheckpointError
from lily.model_config import LINEAR, ModelConfig, Quantization, canonical_name, read_config
from lily.safetensors_header import TensorEntry, read_tensors, shown

__all__ = [
    "Checkpoint",
    "LinearSource",
    "LoadPlan",
    "ModelConfig",
    "Quantization",
    "TensorEntry",
    "VectorSource",
    "bytes_to_load",
    "plan",
    "read_checkpoint",
    "read_config",
    "weight_bytes",
]

GLOBAL = -1  # the layer of what belongs to none: embed_tokens, lm_head, final_norm

SUPPORTED = (
    "supported: affine 4 and 8 bits in groups of 32, 64 or 128 (U32 codes, BF16 or F16 scales and"
    " biases of one type) and plain BF16"
)
BITS = (4, 8)
GROUPS = (32, 64, 128)
SCALE_DTYPES = ("BF16", "F16")
VECTOR_DTYPES = ("BF16", "F16", "F32")

# By canonical name. The text model needs neither the vision tower nor the multi-token head.
SKIPPED = ("vision_tower.", "model.visual.", "visual.", "mtp.")


@dataclass(frozen=True)
class Checkpoint:
    """A folder's config and the entries of all its tensors, by their names in the files."""

    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorEntry]
    listing: str  # the index, or else the shards: where a missing tensor should have been


@dataclass(frozen=True, slots=True)
class LinearSource:
    """One matrix [n, k], or one for each of `experts`, in the files.

    Row r of expert e begins at byte `offset + e * expert_stride + r * row_bytes` of `weight.file`;
    it may be a part of the tensor (the original keeps gate and up rows in one). Scales and biases
    [experts, n, k / group] are always whole tensors. Their values are not looked at here: the core
    refuses NaN and infinity while it loads.
    """

    bits: int
    group: int
    scale_dtype: str
    n: int
    k: int
    experts: int
    weight: TensorEntry
    scales: TensorEntry | None
    biases: TensorEntry | None
    offset: int
    expert_stride: int

    @property
    def row_bytes(self) -> int:
        return self.k * self.bits // 8

    @property
    def bytes(self) -> int:
        codes = self.experts * self.n * self.row_bytes
        return codes + sum(entry.length for entry in (self.scales, self.biases) if entry)


@dataclass(frozen=True, slots=True)
class VectorSource:
    """One small tensor; `plus_one`: the file holds a norm's gain minus one."""

    entry: TensorEntry
    plus_one: bool

    @property
    def bytes(self) -> int:
        return self.entry.length


@dataclass(frozen=True)
class LoadPlan:
    """All weights of a model by (layer, name), and the tensors that are not loaded."""

    config: ModelConfig
    format: str  # "mlx" (converted) or "hf" (the original layout)
    linears: dict[tuple[int, str], LinearSource]
    vectors: dict[tuple[int, str], VectorSource]
    skipped: tuple[str, ...]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads config.json and every safetensors header of a folder."""
    folder = Path(folder)
    config = read_config(folder)
    listing, tensors = read_tensors(folder)
    return Checkpoint(folder, config, tensors, listing)


def plan(checkpoint: Checkpoint) -> LoadPlan:
    """Finds every weight among the tensors; each tensor is used or skipped by name."""
    return _Planner(checkpoint).plan()


def weight_bytes(loaded: LoadPlan) -> dict[str, int]:
    """Bytes of weights in the files by part of the model, in the order of a memory table."""
    parts = dict.fromkeys(
        ("embedding", "head", "deltanet", "attention", "router", "shared expert", "experts"), 0
    )
    for (_, name), linear in loaded.linears.items():
        parts[_LINEAR_PART[name]] += linear.bytes
    parts["vectors"] = sum(vector.bytes for vector in loaded.vectors.values())
    return parts


def bytes_to_load(loaded: LoadPlan) -> int:
    """What the loader reads from the files in all."""
    return sum(weight_bytes(loaded).values())


# The core's name of a matrix, and the module that holds it below model.layers.N.
_DELTANET = {
    "in_proj_qkv": "linear_attn.in_proj_qkv",
    "in_proj_z": "linear_attn.in_proj_z",
    "in_proj_a": "linear_attn.in_proj_a",
    "in_proj_b": "linear_attn.in_proj_b",
    "out_proj": "linear_attn.out_proj",
}
_ATTENTION = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
_ROUTER = {"router": "mlp.gate"}
_SHARED = {
    "shared_gate": "mlp.shared_expert_gate",
    "shared_gate_proj": "mlp.shared_expert.gate_proj",
    "shared_up_proj": "mlp.shared_expert.up_proj",
    "shared_down_proj": "mlp.shared_expert.down_proj",
}
_EXPERTS = {
    "expert_gate_proj": "mlp.switch_mlp.gate_proj",
    "expert_up_proj": "mlp.switch_mlp.up_proj",
    "expert_down_proj": "mlp.switch_mlp.down_proj",
}
_MODULE = _DELTANET | _ATTENTION | _ROUTER | _SHARED | _EXPERTS
_LINEAR_PART = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    **dict.fromkeys(_DELTANET, "deltanet"),
    **dict.fromkeys(_ATTENTION, "attention"),
    **dict.fromkeys(_ROUTER, "router"),
    **dict.fromkeys(_SHARED, "shared expert"),
    **dict.fromkeys(_EXPERTS, "experts"),
}


def _matrix_shapes(config: ModelConfig, kind: str) -> Iterator[tuple[str, int, int, int]]:
    """(name, n, k, experts) of every matrix of one layer."""
    c, hidden = config, config.hidden
    if kind == LINEAR:
        yield "in_proj_qkv", c.conv_dim, hidden, 1
        yield "in_proj_z", c.value_dim, hidden, 1
        yield "in_proj_a", c.value_heads, hidden, 1
        yield "in_proj_b", c.value_heads, hidden, 1
        yield "out_proj", hidden, c.value_dim, 1
    else:
        yield "q_proj", 2 * c.heads * c.head_dim, hidden, 1  # per head: query rows, then gate rows
        yield "k_proj", c.kv_heads * c.head_dim, hidden, 1
        yield "v_proj", c.kv_heads * c.head_dim, hidden, 1
        yield "o_proj", hidden, c.heads * c.head_dim, 1
    yield "router", c.experts, hidden, 1
    yield "shared_gate", 1, hidden, 1
    yield "shared_gate_proj", c.shared_width, hidden, 1
    yield "shared_up_proj", c.shared_width, hidden, 1
    yield "shared_down_proj", hidden, c.shared_width, 1
    yield "expert_gate_proj", c.expert_width, hidden, c.experts
    yield "expert_up_proj", c.expert_width, hidden, c.experts
    yield "expert_down_proj", hidden, c.expert_width, c.experts


def _plain(weight: TensorEntry, n: int, k: int, experts: int) -> LinearSource:
    return LinearSource(
        bits=16,
        group=0,
        scale_dtype="",
        n=n,
        k=k,
        experts=experts,
        weight=weight,
        scales=None,
        biases=None,
        offset=weight.offset,
        expert_stride=2 * n * k,
    )


class _Planner:
    """Consumes the tensors by canonical name, checking each against what the config asks for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.left: dict[str, TensorEntry] = {}
        self.skipped: list[str] = []
        for entry in checkpoint.tensors.values():
            name = canonical_name(entry.name)
            if name.startswith(SKIPPED):
                self.skipped.append(entry.name)
            elif name in self.left:
                raise CheckpointError(f"{entry.where}: is {self.left[name].where} once more")
            else:
                self.left[name] = entry
        self.linears: dict[tuple[int, str], LinearSource] = {}  # by (layer, name)
        self.vectors: dict[tuple[int, str], VectorSource] = {}
        self.format = self._find_format()

    def plan(self) -> LoadPlan:
        c = self.config
        for name, module in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
            self.linears[GLOBAL, name] = self._linear(module, c.vocab, c.hidden)
        self._vector(GLOBAL, "final_norm", "model.norm.weight", (c.hidden,), gain=True)
        for layer, kind in enumerate(c.layer_types):
            self._layer(layer, kind)
        for _, entry in sorted(self.left.items()):
            raise CheckpointError(
                f"{entry.where}: not a tensor of this model, {len(self.left)} such in all"
            )
        return LoadPlan(c, self.format, self.linears, self.vectors, tuple(sorted(self.skipped)))

    def _find_format(self) -> str:
        """By the layout of the convolutions, which conversion turns over and always did.

        Whether a multi-token head is present says nothing: converters may keep or drop it.
        """
        channels, found = self.config.conv_dim, dict[str, TensorEntry]()
        for layer, kind in enumerate(self.config.layer_types):
            if kind != LINEAR:
                continue
            entry = self._peek(f"model.layers.{layer}.linear_attn.conv1d.weight")
            if entry.shape == (channels, self.config.conv_width, 1):
                found.setdefault("mlx", entry)
            elif entry.shape == (channels, 1, self.config.conv_width):
                found.setdefault("hf", entry)
            else:
                raise CheckpointError(
                    f"{entry.where}: shape {list(entry.shape)}, expected [{channels}, 4, 1]"
                    f" (converted) or [{channels}, 1, 4] (original)"
                )
        if len(found) > 1:
            mlx, hf = found["mlx"], found["hf"]
            raise CheckpointError(
                f"{hf.where}: shape {list(hf.shape)} is the original layout, but {mlx.where} has"
                f" the converted one, {list(mlx.shape)}"
            )
        return next(iter(found))

    def _peek(self, name: str) -> TensorEntry:
        if name not in self.left:
            raise CheckpointError(f"{shown(self.checkpoint.listing)}: tensor {name} is missing")
        return self.left[name]

    def _take(
        self, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]
    ) -> TensorEntry:
        """Consumes a tensor of one of these types and this shape, where None is any size from 1."""
        entry = self._peek(name)
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.where}: dtype {entry.dtype}, expected {' or '.join(dtypes)}; {SUPPORTED}"
            )
        if len(entry.shape) != len(shape) or not all(
            size == want or (want is None and size > 0)
            for size, want in zip(entry.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise CheckpointError(
                f"{entry.where}: shape {list(entry.shape)}, config.json gives [{wanted}]"
            )
        return self.left.pop(name)

    def _layer(self, layer: int, kind: str) -> None:
        c, prefix = self.config, f"model.layers.{layer}."

        def vector(name: str, tensor: str, *shape: int, gain: bool = False) -> None:
            self._vector(layer, name, prefix + tensor, shape, gain)

        vector("input_norm", "input_layernorm.weight", c.hidden, gain=True)
        vector("post_norm", "post_attention_layernorm.weight", c.hidden, gain=True)
        if kind == LINEAR:
            mlx = self.format == "mlx"
            taps = (c.conv_width, 1) if mlx else (1, c.conv_width)  # the same bytes either way
            vector("conv1d", "linear_attn.conv1d.weight", c.conv_dim, *taps)
            vector("A_log", "linear_attn.A_log", c.value_heads)
            vector("dt_bias", "linear_attn.dt_bias", c.value_heads)
            vector("delta_norm", "linear_attn.norm.weight", c.delta_head_dim)
        else:
            vector("q_norm", "self_attn.q_norm.weight", c.head_dim, gain=True)
            vector("k_norm", "self_attn.k_norm.weight", c.head_dim, gain=True)
        if self.format == "hf":
            self._original_experts(layer)
        for name, n, k, experts in _matrix_shapes(c, kind):
            if (layer, name) not in self.linears:
                self.linears[layer, name] = self._linear(prefix + _MODULE[name], n, k, experts)

    def _vector(
        self, layer: int, name: str, tensor: str, shape: tuple[int, ...], gain: bool
    ) -> None:
        entry = self._take(tensor, VECTOR_DTYPES, shape)
        self.vectors[layer, name] = VectorSource(entry, gain and self.format == "hf")

    def _original_experts(self, layer: int) -> None:
        """gate_up_proj [E, 2 I, H] holds each expert's gate rows, then its up rows."""
        c, prefix = self.config, f"model.layers.{layer}.mlp.experts."
        width, hidden, experts = c.expert_width, c.hidden, c.experts
        gate_up = self._take(prefix + "gate_up_proj", ("BF16",), (experts, 2 * width, hidden))
        down = self._take(prefix + "down_proj", ("BF16",), (experts, hidden, width))
        gate = _plain(gate_up, width, hidden, experts)
        half = width * gate.row_bytes
        gate = replace(gate, expert_stride=2 * half)
        self.linears[layer, "expert_gate_proj"] = gate
        self.linears[layer, "expert_up_proj"] = replace(gate, offset=gate.offset + half)
        self.linears[layer, "expert_down_proj"] = _plain(down, hidden, width, experts)

    def _linear(self, module: str, n: int, k: int, experts: int = 1) -> LinearSource:
        rows = (experts, n) if experts > 1 else (n,)
        weight = self._peek(f"{module}.weight")
        named = module in self.config.overrides
        spec = self.config.overrides[module] if named else self.config.quantization
        plain = weight.dtype != "U32" and f"{module}.scales" not in self.left
        if not plain and self.format == "mlx":
            return self._quantised(module, rows, k, spec)
        # A converter may leave any module as it is, but not one that config.json names.
        if named and spec is not None:
            raise CheckpointError(
                f"{weight.where}: {weight.dtype} without scales, config.json gives {spec.bits} bits"
            )
        return _plain(self._take(f"{module}.weight", ("BF16",), (*rows, k)), n, k, experts)

    def _quantised(
        self, module: str, rows: tuple[int, ...], k: int, spec: Quantization | None
    ) -> LinearSource:
        """Bits and group follow from the shapes and must be what config.json says."""
        where = self._peek(f"{module}.weight").where
        if spec is None:
            raise CheckpointError(f"{where}: quantised, config.json does not say how")
        if spec.mode != "affine":
            raise CheckpointError(f"{where}: mode {shown(spec.mode)}; {SUPPORTED}")
        weight = self._take(f"{module}.weight", ("U32",), (*rows, None))
        scales = self._take(f"{module}.scales", SCALE_DTYPES, (*rows, None))
        biases = self._take(f"{module}.biases", (scales.dtype,), scales.shape)
        for entry, what, found, given, known in (
            (weight, "bits", 32 * weight.shape[-1] / k, spec.bits, BITS),
            (scales, "inputs a group", k / scales.shape[-1], spec.group, GROUPS),
        ):
            if found != given:
                raise CheckpointError(
                    f"{entry.where}: shape {list(entry.shape)} makes {found:g} {what} with {k}"
                    f" inputs a row, config.json gives {given}"
                )
            if given not in known:
                raise CheckpointError(f"{entry.where}: {given} {what}; {SUPPORTED}")
        return LinearSource(
            bits=spec.bits,
            group=spec.group,
            scale_dtype=scales.dtype,
            n=rows[-1],
            k=k,
            experts=math.prod(rows[:-1]),
            weight=weight,
            scales=scales,
            biases=biases,
            offset=weight.offset,
            expert_stride=rows[-1] * k * spec.bits // 8,
        )
