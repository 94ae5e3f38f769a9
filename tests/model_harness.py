"""Loads checkpoints straight into the core and reads the goldens, for tests of the whole model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from lily import _core
from lily.checkpoint import plan, read_checkpoint
from lily.engine import load_core

DATA = Path(__file__).resolve().parent / "data"
CALM = DATA / "mlx4_calm"
Logits = NDArray[np.float32]


@cache
def engine(folder: Path, device: str, exact: bool, max_context: int = 8192) -> _core.Engine:
    """A loaded model, one per process and setting: loading is cheap, compiling kernels is not."""
    return fresh_engine(folder, device, exact, max_context)


def fresh_engine(folder: Path, device: str, exact: bool, max_context: int = 8192) -> _core.Engine:
    loaded = plan(read_checkpoint(folder))
    return load_core(loaded, device, exact, max_context, loaded.config.vocab)


@cache
def golden(path: Path) -> dict[str, np.ndarray]:
    return load_file(path)


def ids_of(values: np.ndarray) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values.reshape(-1), np.uint32)


def log_softmax(x: Logits) -> NDArray[np.float64]:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def max_kl(reference: Logits, got: Logits) -> float:
    """The largest KL divergence of any row, in nats."""
    p, q = log_softmax(reference), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(-1).max())
