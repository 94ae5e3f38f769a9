"""Owns the public Engine: loading a folder, generating text, sessions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from lily import _core
from lily.checkpoint import LoadPlan, TensorEntry, plan, read_checkpoint

Progress = Callable[[int, int], None]

_ACTIVATIONS = {"bfloat16": False, "float32": True}


def load_core(
    loaded: LoadPlan,
    device: str,
    exact: bool,
    max_context: int,
    token_limit: int,
    progress: Progress | None = None,
) -> _core.Engine:
    """Hands a validated plan to the core as flat tables and returns the loaded model."""
    c = loaded.config
    files: dict[Path, int] = {}

    def file_range(entry: TensorEntry, offset: int, length: int) -> tuple[int, int, int]:
        return files.setdefault(entry.file, len(files)), offset, length

    def whole(entry: TensorEntry | None) -> tuple[int, int, int]:
        return file_range(entry, entry.offset, entry.length) if entry else (0, 0, 0)

    linears = [
        (
            layer,
            name,
            s.weight.name,
            s.bits,
            s.group,
            s.scale_dtype or "BF16",
            s.n,
            s.k,
            s.experts,
            file_range(s.weight, s.offset, s.expert_stride * (s.experts - 1) + s.n * s.row_bytes),
            s.expert_stride,
            whole(s.scales),
            whole(s.biases),
        )
        for (layer, name), s in loaded.linears.items()
    ]
    vectors = [
        (layer, name, v.entry.name, v.entry.dtype, v.plus_one, whole(v.entry))
        for (layer, name), v in loaded.vectors.items()
    ]
    config = {
        "attention": [kind == "full_attention" for kind in c.layer_types],
        "hidden": c.hidden,
        "vocab": c.vocab,
        "token_limit": token_limit,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "rotary": c.rotary_dims,
        "key_heads": c.key_heads,
        "value_heads": c.value_heads,
        "experts": c.experts,
        "top_k": c.top_k,
        "expert_width": c.expert_width,
        "shared_width": c.shared_width,
        "max_position": c.max_position,
        "rope_theta": c.rope_theta,
        "eps": c.rms_eps,
    }
    names = [str(path) for path in files]
    return _core.load_engine(device, exact, config, names, linears, vectors, max_context, progress)


def _choose_device(name: str) -> str:
    if name != "auto":
        return name
    for status in _core.devices():
        if status.available:
            return status.name
    raise _core.LilyError("no device exists here")


class Engine:
    """A loaded model. Immutable and shared by its sessions; use it as a context manager.

    >>> with lily.Engine.load("path/to/model") as engine:  # doctest: +SKIP
    ...     print(engine.generate("The quick brown fox", max_tokens=16))
    """

    def __init__(self, core: _core.Engine, tokenizer: tokenizers.Tokenizer, loaded: LoadPlan) -> None:
        self._core: _core.Engine | None = core
        self.tokenizer = tokenizer
        self.plan = loaded

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: str = "auto",
        activations: str = "bfloat16",
        max_context: int | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads a checkpoint folder.

        device: "auto", "cpu", "cuda" or "sim". activations: "bfloat16", or "float32" for exact
        mode. max_context: tokens of one session, at most the model's own maximum. progress is
        called with (bytes done, bytes in all). Raises CheckpointError for a bad checkpoint,
        LilyError for a device that is missing or too small, ValueError for a bad argument.
        """
        if activations not in _ACTIVATIONS:
            raise ValueError(f"activations is {activations!r}, allowed {sorted(_ACTIVATIONS)}")
        folder = Path(model)
        loaded = plan(read_checkpoint(folder))
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise _core.CheckpointError(f"{file}: the tokenizer is missing")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise _core.CheckpointError(f"{file}: not a tokenizer: {error}") from error
        config = loaded.config
        context = min(config.max_position, 32768) if max_context is None else max_context
        limit = min(config.vocab, tokenizer.get_vocab_size(with_added_tokens=True))
        core = load_core(
            loaded, _choose_device(device), _ACTIVATIONS[activations], context, limit, progress
        )
        return cls(core, tokenizer, loaded)

    @property
    def core(self) -> _core.Engine:
        if self._core is None:
            raise _core.LilyError("the engine is closed")
        return self._core

    def session(self) -> _core.Session:
        """A new empty timeline on this model."""
        return _core.Session(self.core)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> str:
        """Continues a prompt (text or token ids) and returns the new text.

        temperature 0 is greedy. seed None is random. Ends at an end token or after max_tokens.
        """
        checks: list[tuple[str, Any, bool, str]] = [
            ("max_tokens", max_tokens, max_tokens >= 1, "1 or more"),
            ("temperature", temperature, 0 <= temperature <= 100, "0 to 100"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0, at most 1"),
            ("top_k", top_k, 0 <= top_k < 2**31, "0 (off) or more"),
            ("min_p", min_p, 0 <= min_p <= 1, "0 to 1"),
        ]
        for name, value, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name} is {value}, allowed {allowed}")
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("prompt is empty: it has 0 tokens, 1 or more are needed")
        limit = self.core.max_context
        if len(ids) >= limit:
            raise ValueError(f"prompt is too long: {len(ids)} tokens > {limit - 1} maximum")
        session = self.session()
        session.set_sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=secrets.randbits(64) if seed is None else seed & (2**64 - 1),
        )
        session.sync(np.asarray(ids, np.uint32))
        ends = set(self.plan.config.eos_ids)
        new: list[int] = []
        while len(new) < min(max_tokens, limit - len(ids)):
            token = session.step().id
            if token in ends:
                break
            new.append(token)
        return str(self.tokenizer.decode(new))

    def close(self) -> None:
        """Frees the weights once no session is left; later calls raise LilyError."""
        if self._core is not None:
            self._core.close()
            self._core = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_ids(ids: Sequence[int]) -> NDArray[np.uint32]:
    """Token ids as the core takes them."""
    return np.ascontiguousarray(ids, np.uint32)
