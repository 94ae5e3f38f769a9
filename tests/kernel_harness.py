"""Runs single ops on any device against numpy: params parsed from kernels.h, poison and guards."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lily import _core

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "src/metal/kernels.h").read_text()
GUARD = 64  # bytes before and after each written array, checked after the run
_POISON = 0xFF


def _constants() -> dict[str, int]:
    found = {m[1]: int(m[2]) for m in re.finditer(r"#define (LILY_\w+) (\d+)", TEXT)}
    for body in re.findall(r"enum \w+ \{([^}]*)\}", TEXT):
        found |= {m[1]: int(m[2]) for m in re.finditer(r"(\w+) = (\d+)", body)}
    return found


CONST = _constants()


def _structs() -> dict[str, type[ctypes.Structure]]:
    """Every struct of kernels.h as ctypes, so that tests cannot drift from the header."""
    scalar = {"uint": ctypes.c_uint32, "ulong": ctypes.c_uint64, "float": ctypes.c_float}
    done: dict[str, Any] = {}
    plain = re.sub(r"//[^\n]*", "", TEXT)
    for name, body in re.findall(r"struct (\w+) \{([^}]*)\};", plain):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            kind, names = re.sub(r"^struct ", "", line).split(None, 1)
            base = scalar.get(kind) or done[kind]
            for item in names.split(","):
                m = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", item.strip())
                assert m, (name, line)
                size = CONST[m[2]] if m[2] in CONST else int(m[2] or 0)
                fields.append((m[1], base * size if m[2] else base))
        done[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return done


STRUCTS = _structs()
PARAMS = dict(re.findall(r"X\((\w+), ([A-Z]\w+)\)", TEXT.split("#define LILY_VARIANTS_")[0]))


def params(op: str, **values: Any) -> ctypes.Structure:
    """The params struct of `op`; every field has to be given, no other is taken."""
    return fill(STRUCTS[PARAMS[op]](), **values)


def fill(struct: ctypes.Structure, **values: Any) -> ctypes.Structure:
    names = {f[0] for f in struct._fields_}
    assert names == set(values), (type(struct).__name__, names ^ set(values))
    for name, value in values.items():
        setattr(struct, name, value)
    return struct


def linear(n: int, k: int, bits: int = 4, group: int = 64, f16: bool = False) -> ctypes.Structure:
    shift = group.bit_length() - 1
    return fill(STRUCTS["Linear"](), n=n, k=k, bits=bits, group_shift=shift, scale_f16=int(f16))


# ---- arrays ----------------------------------------------------------------------------------
def bf16(x: np.ndarray) -> np.ndarray:
    """float -> bf16 bits (uint16), round to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def act(x: np.ndarray, exact: bool) -> np.ndarray:
    """An array as the device's activation type."""
    return np.ascontiguousarray(x, np.float32) if exact else bf16(x)


def from_act(x: np.ndarray) -> np.ndarray:
    return from_bf16(x) if x.dtype == np.uint16 else x


def rounded(x: np.ndarray, exact: bool) -> np.ndarray:
    """What a kernel reads back from a stored activation, as float64."""
    return from_act(act(x, exact)).astype(np.float64)


@dataclass
class Weight:
    """A random matrix (or `experts` of them) in layout v1 and its float64 values [experts, n, k]."""

    codes: np.ndarray  # uint32
    pairs: np.ndarray  # uint32, empty for bf16
    values: np.ndarray
    linear: ctypes.Structure


def weight(
    rng: np.random.Generator,
    n: int,
    k: int,
    bits: int = 4,
    group: int = 64,
    f16: bool = False,
    experts: int = 1,
    scale: float | None = None,
) -> Weight:
    """Half of the scales are negative, as in real checkpoints."""
    std = scale if scale is not None else 1 / np.sqrt(k)
    spec = linear(n, k, bits, group, f16)
    if bits == 16:
        raw = bf16(rng.standard_normal((experts, n, k)) * std)
        return Weight(
            raw.reshape(-1).view(np.uint32),
            np.zeros(0, np.uint32),
            from_bf16(raw).astype(np.float64),
            spec,
        )
    top = (1 << bits) - 1
    q = rng.integers(0, top + 1, (experts, n, k), dtype=np.uint32)
    s = rng.uniform(0.5, 1.5, (experts, n, k // group)) * std * 3.4 / top
    s *= rng.choice([-1.0, 1.0], s.shape)
    b = -s * top / 2 + rng.standard_normal(s.shape) * std * 0.2
    if f16:
        sb, bb = s.astype(np.float16), b.astype(np.float16)
        s, b = sb.astype(np.float64), bb.astype(np.float64)
        low, high = sb.view(np.uint16), bb.view(np.uint16)
    else:
        low, high = bf16(s), bf16(b)
        s, b = from_bf16(low).astype(np.float64), from_bf16(high).astype(np.float64)
    pairs = low.astype(np.uint32) | (high.astype(np.uint32) << 16)
    per = 32 // bits
    shifts = np.arange(per, dtype=np.uint32) * bits
    words = (q.reshape(experts, n, k // per, per) << shifts).sum(-1, dtype=np.uint32)
    values = q.reshape(experts, n, k // group, group) * s[..., None] + b[..., None]
    return Weight(words.reshape(-1), pairs.reshape(-1), values.reshape(experts, n, k), spec)


# ---- running ---------------------------------------------------------------------------------
@dataclass
class In:
    """An input array; device memory beyond it is poison."""

    array: np.ndarray


@dataclass
class Out:
    """An output to be allocated: NaN-poisoned before, guards checked after."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass
class InOut:
    array: np.ndarray


Argument = In | Out | InOut | None

_NAMES = {
    np.dtype(np.uint32): "u32",
    np.dtype(np.uint64): "u64",
    np.dtype(np.float32): "f32",
    np.dtype(np.uint16): "bf16",
}


@functools.cache
def emulated(device: str) -> bool:
    """Whether kernels run there one thread at a time on the host: tests take less of everything."""
    described = {s.name: s.description for s in _core.devices()}
    return device == "sim" or "Software Metal" in described[device]


class Kernels:
    """One device in one activation mode."""

    def __init__(self, device: str, exact: bool) -> None:
        self.device, self.exact = device, exact
        self.core = _core.Kernels(device, exact)
        self.act_dtype = np.float32 if exact else np.uint16
        self.bytes_read = 0  # by the last run, each access counted; sim alone knows

    def act(self, x: np.ndarray) -> np.ndarray:
        return act(x, self.exact)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return rounded(x, self.exact)

    def out_act(self, *shape: int) -> Out:
        return Out(shape, self.act_dtype)

    def place(self, array: np.ndarray, label: str = "array") -> _core.KernelBuffer:
        """An array in device memory between guards; the data starts at byte GUARD."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        size = (raw.size + 15) // 16 * 16
        whole = np.full(2 * GUARD + size, _POISON, np.uint8)
        whole[GUARD : GUARD + raw.size] = raw
        buffer = self.core.buffer(whole.size, label)
        buffer.write(0, whole)
        return buffer

    def fetch(self, buffer: _core.KernelBuffer, like: np.ndarray) -> np.ndarray:
        whole = np.empty(buffer.nbytes, np.uint8)
        buffer.read(0, whole)
        end = GUARD + like.nbytes
        assert (whole[:GUARD] == _POISON).all(), "written before the start of an output"
        assert (whole[end:] == _POISON).all(), "written past the end of an output"
        return whole[GUARD:end].view(like.dtype).reshape(like.shape).copy()

    def run(
        self,
        op: str,
        params_: ctypes.Structure,
        args: Sequence[Argument],
        step: ctypes.Structure | np.ndarray | None = None,
        unbound: Sequence[_core.KernelBuffer] = (),
        times: int = 1,
    ) -> list[np.ndarray]:
        """Runs `op`; returns the Out and InOut arrays in order, then the Step bytes when given.

        `step`: a Step struct or its bytes with trailing arrays. `unbound`: buffers holding KV
        blocks (place() them yourself: their addresses go into the page table)."""
        views, results = [], []
        for a in args:
            if a is None:
                views.append((self.core.buffer(16, "none"), 0, 0, "u32"))
                continue
            if isinstance(a, Out):
                array = np.frombuffer(
                    bytes([_POISON]) * int(np.prod(a.shape) * np.dtype(a.dtype).itemsize), a.dtype
                ).reshape(a.shape)
            else:
                array = np.ascontiguousarray(a.array)
            if array.size == 0:
                views.append((self.core.buffer(16, "none"), 0, 0, "u32"))
                continue
            buffer = self.place(array)
            views.append((buffer, GUARD, array.size, _NAMES[array.dtype]))
            if not isinstance(a, In):
                results.append((buffer, array))
        steps = []
        if step is not None:
            raw = (
                np.frombuffer(bytes(step), np.uint8) if isinstance(step, ctypes.Structure) else step
            )
            padded = np.zeros((raw.size + 15) // 16 * 16, np.uint8)
            padded[: raw.size] = raw
            buffer = self.place(padded, "step")
            steps.append((buffer, GUARD, padded.size // 4, "u32"))
            results.append((buffer, padded))
        slabs = [(b, 0, b.nbytes // 4, "u32") for b in unbound]
        raw_params = np.frombuffer(bytes(params_), np.uint8)
        traffic = self.core.run([(op, raw_params, views, steps, slabs)], False, times)
        self.bytes_read = traffic[0][2] if traffic else 0
        return [self.fetch(b, a) for b, a in results]


def make_step(
    rows: int,
    slots: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
    pages: np.ndarray | None = None,
) -> np.ndarray:
    """Step bytes for `rows` rows with an optional page table uint64[slots, stride] behind it."""
    s = STRUCTS["Step"]()
    s.rows = rows
    for name, values in (("slot", slots), ("position", positions), ("id", ids)):
        for i, v in enumerate(values or []):
            getattr(s, name)[i] = v
    head = np.frombuffer(bytes(s), np.uint8).copy()
    if pages is None:
        return head
    size = (head.size + 15) // 16 * 16
    s.pages_offset, s.pages_stride = size, pages.shape[1]
    out = np.zeros(size + pages.nbytes, np.uint8)
    out[: ctypes.sizeof(s)] = np.frombuffer(bytes(s), np.uint8)
    out[size:] = np.ascontiguousarray(pages, np.uint64).view(np.uint8).reshape(-1)
    return out
