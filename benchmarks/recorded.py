"""What a session submits at the 35B's shapes: launches, levels, flops, bytes as sim counts them.

Launches are those of lily's own Engine, Session and Model over all 40 layers, written down by a
device that keeps nothing (record_passes). Neither the weights nor the device are needed, only the
headers of a checkpoint, made here with holes for tensors. Bytes of a decode step are counted by
the access hooks of sim: each distinct launch (op, params, sizes) runs there once, at its recorded
params and grid, on random inputs, and counts as often as it was recorded.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lily import _core
from lily.checkpoint import plan, read_checkpoint
from lily.engine import core_tables

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import make_checkpoint

from kernel_harness import CONST, PARAMS, STRUCTS

VOCAB, EXPERTS, LAYERS = make_checkpoint.VOCAB, 256, 40
BLOCK, HEAD_DIM = CONST["LILY_KV_BLOCK"], CONST["LILY_HEAD_DIM"]
MAX_POSITION = 262144
_PIECE = 16 << 20  # bytes written at a time
_SIZES = {"bf16": 2, "u32": 4, "f32": 4, "u64": 8}


@dataclass
class Passes:
    """The launches of a prompt's chunks and of the step after it."""

    chunks: list[list[_core.RecordedLaunch]]
    step: list[_core.RecordedLaunch]


def record(context: int, device: str = "metal") -> Passes:
    """Of a prompt of `context` tokens in bf16 mode."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint.write(Path(folder), LAYERS, EXPERTS, 0, empty=True)
        loaded = plan(read_checkpoint(Path(folder)))
        tables = core_tables(loaded, loaded.config.vocab)
        chunks, step = _core.record_passes(device, False, *tables, context)
    return Passes(chunks, step)


def levels(launches: Sequence[_core.RecordedLaunch]) -> int:
    return max(launch.level for launch in launches) + 1


def declared_bytes(launches: Sequence[_core.RecordedLaunch]) -> int:
    """Every declared range once per launch, read and written apart; without KV pages and Step."""
    return sum(
        elements * _SIZES[dtype] * len(access)
        for launch in launches
        for _, _, _, dtype, elements, access in launch.args
    )


@dataclass
class Touched:
    """Bytes by kind: every access counted, and every byte once per launch."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    read_once: Counter[str] = field(default_factory=Counter)
    written_once: Counter[str] = field(default_factory=Counter)

    def add(self, other: Touched) -> None:
        self.read.update(other.read)
        self.written.update(other.written)
        self.read_once.update(other.read_once)
        self.written_once.update(other.written_once)

    @property
    def traffic(self) -> int:
        """What has to move where caches serve what a launch reads again."""
        return self.read_once.total() + self.written_once.total()


Rows = dict[str, tuple[int, Touched]]


def touched(
    step: Sequence[_core.RecordedLaunch], position: int, known: dict[Any, Touched] | None = None
) -> Rows:
    """Of a decode step that takes the token at `position`: (launches, their bytes) by name.

    known: what was counted before, to be used and added to."""
    known = {} if known is None else known
    rows: Rows = {}
    for launch in step:
        key = _key(launch, position)
        if key not in known:
            known[key] = _run(launch, position)
        times, bytes_ = rows.setdefault(_name(launch), (0, Touched()))
        bytes_.add(known[key])
        rows[_name(launch)] = (times + 1, bytes_)
    return rows


def in_all(rows: Rows) -> Touched:
    whole = Touched()
    for _, bytes_ in rows.values():
        whole.add(bytes_)
    return whole


def _params(launch: _core.RecordedLaunch) -> ctypes.Structure:
    struct = STRUCTS[PARAMS[launch.op]]
    assert len(launch.params) == ctypes.sizeof(struct)
    return struct.from_buffer_copy(launch.params)


def _key(launch: _core.RecordedLaunch, position: int) -> tuple[Any, ...]:
    """Launches of one key do the same to other buffers."""
    params = _params(launch)
    if launch.op == "attn_step":
        params.layer = 0  # says only where its pages are
    sizes = tuple((dtype, elements, access) for _, _, _, dtype, elements, access in launch.args)
    where = position if launch.op.startswith("attn_") else None
    return launch.op, bytes(params), launch.grid, sizes, where


def _name(launch: _core.RecordedLaunch) -> str:
    if launch.op != "project":
        return launch.op
    w = _params(launch).w
    return f"project {w.n} x {w.k}"


def _kind(launch: _core.RecordedLaunch, index: int) -> str:
    """What the bytes of an argument are."""
    _, label, _, dtype, _, _ = launch.args[index]
    if label == "weights" and dtype == "u32":  # codes and pairs take turns
        return "pairs" if index % 2 else "codes"
    kinds = {"weights": "vectors", "recurrent state": "state"}
    return kinds.get(label, "logits" if label.endswith("logits") else "activations")


# ---- one launch on sim -----------------------------------------------------------------------


def _run(launch: _core.RecordedLaunch, position: int) -> Touched:
    """On inputs that are sound as a model's are: valid ids, routes, pages, finite numbers."""
    kernels = _core.Kernels("sim", False)
    rng = np.random.default_rng(1)
    views, kinds = [], []
    for index, (_, label, _, dtype, elements, access) in enumerate(launch.args):
        kinds.append(_kind(launch, index))
        buffer = kernels.buffer(max(16, elements * _SIZES[dtype]), label)
        views.append((buffer, 0, elements, dtype))
        if "r" in access:
            _fill(buffer, rng, launch, index)
    unbound, blocks = [], np.zeros(0, np.uint64)
    if launch.unbound:
        pool, blocks = _pages(kernels, rng, launch, position)
        unbound = [(pool, 0, pool.nbytes // 4, "u32")]
        kinds.append("kv")
    steps = []
    if launch.step:
        kinds.append("activations")
        words = launch.step[0][4]
        buffer = kernels.buffer(words * 4, "step")
        buffer.write(0, _step(words * 4, position, blocks))
        steps = [(buffer, 0, words, "u32")]
    raw = np.frombuffer(launch.params, np.uint8)
    (parts,) = kernels.touched([(launch.op, raw, views, steps, unbound)])
    done = Touched()
    for kind, (read, written, read_once, written_once) in zip(kinds, parts):
        done.read[kind] += read
        done.written[kind] += written
        done.read_once[kind] += read_once
        done.written_once[kind] += written_once
    return done


def _halves(rng: np.random.Generator, count: int) -> np.ndarray:
    """bf16 of either sign between 2^-7 and 2^-6, as uint16."""
    return (rng.integers(0, 2, count) << 15 | 0x3C00 | rng.integers(0, 128, count)).astype(
        np.uint16
    )


def _fill(
    buffer: _core.KernelBuffer, rng: np.random.Generator, launch: _core.RecordedLaunch, index: int
) -> None:
    _, label, _, dtype, elements, _ = launch.args[index]
    data: np.ndarray
    if label == "step":  # embed's ids
        data = rng.integers(0, VOCAB, elements).astype(np.uint32)
    elif label == "routes":  # struct Route
        data = np.empty((elements // 2, 2), np.uint32)
        data[:, 0] = rng.permutation(EXPERTS)[: len(data)]
        data[:, 1] = np.float32(0.1).view(np.uint32)
    elif dtype == "f32":
        data = rng.standard_normal(elements).astype(np.float32)
        if launch.op == "delta_step" and index == 2:  # -exp(A_log)
            data = -np.abs(data)
    else:  # codes, pairs and activations: all of them are sound as bf16
        data = _halves(rng, min(elements * _SIZES[dtype], _PIECE) // 2)
    raw, size = data.reshape(-1).view(np.uint8), elements * _SIZES[dtype]
    for at in range(0, size, raw.size):
        buffer.write(at, raw[: min(raw.size, size - at)])


def _pages(
    kernels: _core.Kernels, rng: np.random.Generator, launch: _core.RecordedLaunch, position: int
) -> tuple[_core.KernelBuffer, np.ndarray]:
    """A pool of KV blocks of which the launch's layer is there, and the blocks' addresses."""
    p = _params(launch)
    one = 2 * p.kv_heads * BLOCK * HEAD_DIM * _SIZES["bf16"]  # of one layer
    block = LAYERS // 4 * one
    count = position // BLOCK + 1
    pool = kernels.buffer(count * block, "KV slab")
    data = _halves(rng, one // 2).view(np.uint8)
    for i in range(count):
        pool.write(i * block + p.layer * one, data)
    return pool, np.uint64(pool.address) + np.arange(count, dtype=np.uint64) * np.uint64(block)


def _step(size: int, position: int, blocks: np.ndarray) -> np.ndarray:
    """The bytes of Step as a session lays them out: greedy, one row."""
    s = STRUCTS["Step"]()
    stride = MAX_POSITION // BLOCK
    at = (ctypes.sizeof(s) + 15) // 16 * 16
    for name, bytes_ in (
        ("pages", stride * 8),
        ("counts", VOCAB * 4),
        ("prompt_counts", VOCAB * 4),
        ("mask", (VOCAB + 31) // 32 * 4),
        ("bias", VOCAB * 4),
    ):
        setattr(s, f"{name}_offset", at)
        at += (bytes_ + 15) // 16 * 16
    assert at == size, (at, size)
    s.rows, s.pages_stride = 1, stride
    s.position[0], s.id[0] = position, 1
    s.sampling[0].top_p = s.sampling[0].repetition = 1
    out = np.zeros(size, np.uint8)
    out[: ctypes.sizeof(s)] = np.frombuffer(bytes(s), np.uint8)
    out[s.pages_offset : s.pages_offset + blocks.nbytes] = blocks.view(np.uint8)
    return out
