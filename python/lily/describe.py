"""Owns `lily info`: what a checkpoint is, where it can run, what memory it takes."""

from __future__ import annotations

from pathlib import Path

from lily import _core
from lily.checkpoint import LoadPlan, plan, read_checkpoint, weight_bytes
from lily.engine import core_tables
from lily.hub import fetch, is_hub_id
from lily.model_config import ModelConfig, read_config
from lily.safetensors_header import read_json_object
from lily.sampling import SamplingParams, checkpoint_defaults, plain_defaults
from lily.tokenizer import Tokenizer

_BLOCK = 256  # tokens of one KV block


def describe(model: str, revision: str | None, activations: str = "bfloat16") -> str:
    """The text of `lily info`. Reads headers and settings; of a hub id it downloads only those."""
    folder = fetch(model, revision=revision, weights=False)
    config = read_config(folder)
    lines = [f"{model}", *_what(config)]
    if any(folder.glob("*.safetensors")) or not is_hub_id(model):
        loaded = plan(read_checkpoint(folder))
        lines += ["", *_weights(loaded)]
        tokens = min(config.vocab, Tokenizer.load(folder).size)
        lines += ["", *_devices(loaded, tokens, activations == "float32")]
    else:
        lines += ["", *_undownloaded(folder)]
    advice = checkpoint_defaults(folder)
    lines += ["", f"chats draw with {_drawing(advice)}"]
    if (plain := plain_defaults(advice)) != advice:
        lines.append(f"without thinking with {_drawing(plain)}")
    return "\n".join(lines)


def size(count: int) -> str:
    """Bytes for people.

    >>> size(20_400_000_000), size(512)
    ('20.4 GB', '512 B')
    """
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _drawing(advice: SamplingParams) -> str:
    return f"temperature {advice.temperature:g}, top_p {advice.top_p:g}, top_k {advice.top_k}"


def _what(config: ModelConfig) -> list[str]:
    attention = config.layer_types.count("full_attention")
    stored = config.quantization
    weights = f"{stored.bits} bit in groups of {stored.group}" if stored else "bf16"
    return [
        f"  qwen3_5_moe, {config.layers} layers: {config.layers - attention} DeltaNet, "
        f"{attention} attention",
        f"  width {config.hidden}, {config.experts} experts of which {config.top_k} at a time, "
        f"vocabulary {config.vocab}, context {config.max_position}",
        f"  weights: {weights}",
    ]


def _weights(loaded: LoadPlan) -> list[str]:
    parts = weight_bytes(loaded)
    rows = [("in the files", sum(parts.values())), *((f"  {k}", v) for k, v in parts.items())]
    return [f"{name:18}{size(count):>10}" for name, count in rows]


def _devices(loaded: LoadPlan, token_limit: int, exact: bool) -> list[str]:
    lines: list[str] = []
    shown = False
    tables = core_tables(loaded, token_limit)
    for status in _core.devices():
        if not status.available:
            lines.append(f"{status.name:6} no   {status.description}")
            continue
        table = _core.memory_table(status.name, exact, *tables)
        if not shown:  # nearly the same on each
            shown = True
            lines = [*_memory(table, loaded.config.max_position), "", *lines]
        if table.context == 0:
            needed = size(table.weights + table.prefill_scratch + table.kv_per_block)
            verdict = f"no   too small: {needed} are needed at least, {size(table.limit)} there"
        else:
            verdict = f"yes  {table.context} tokens of context in {size(table.limit)}"
        lines.append(f"{status.name:6} {verdict}")
    return lines


def _memory(table: _core.MemoryTable, context: int) -> list[str]:
    blocks = (context + _BLOCK - 1) // _BLOCK
    rows = [
        ("loaded weights", table.weights),
        ("reading prompts", table.prefill_scratch),
        ("a session", table.state + table.decode_scratch),
        ("1000 tokens", table.kv_per_block * 1000 // _BLOCK),
        (f"{context} tokens", table.kv_per_block * blocks),
    ]
    return [f"{name:18}{size(count):>10}" for name, count in rows]


def _undownloaded(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    total = None
    if index.exists():
        about = read_json_object(index).get("metadata")
        total = about.get("total_size") if isinstance(about, dict) else None
    there = f"{size(total)} of weights are" if isinstance(total, int) else "the weights are"
    return [f"{there} not downloaded yet: `lily chat --model …` does it"]
