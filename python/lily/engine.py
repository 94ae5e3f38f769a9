"""Owns the public Engine: loading a folder, generating text, sessions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.checkpoint import LoadPlan, TensorEntry, plan, read_checkpoint
from lily.errors import LilyError
from lily.sampling import Sampling, SamplingParams, resolve, whole
from lily.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
FinishReason = Literal["stop", "length"]

DEVICES = ("metal", "cuda", "cpu", "sim")
AUTO = ("metal", "cuda", "cpu")  # sim checks kernels and is far too slow to be anyone's choice

_ACTIVATIONS = {"bfloat16": False, "float32": True}


@dataclass(frozen=True, slots=True)
class Token:
    """One step of a stream.

    text: the characters this token completes, possibly none. finish_reason: set on the last one:
    "stop" for an end token (whose id this is; its own text is left out), "length" when max_tokens
    or the context is used up.
    """

    id: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text; `str()` of it is the text. tokens: its ids, without the end token."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason

    def __str__(self) -> str:
        return self.text


class Engine:
    """A loaded model. Immutable, shared by its sessions and by threads; close it or use `with`.

    >>> import lily
    >>> with lily.Engine.load("tests/data/mlx4_calm", device="cpu") as engine:
    ...     done = engine.generate("The quick brown fox", max_tokens=4)
    >>> done.finish_reason, len(done.tokens)
    ('length', 4)
    """

    def __init__(self, core: _core.Engine, tokenizer: Tokenizer, loaded: LoadPlan) -> None:
        self._core: _core.Engine | None = core
        self.tokenizer = tokenizer
        self.plan = loaded

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        activations: str = "bfloat16",
        max_context: int | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads a checkpoint folder: config.json, tokenizer.json, safetensors.

        device: "metal", "cuda", "cpu" or "sim"; "auto" is the first of these that exists here,
        never sim. activations: "bfloat16", or "float32" for exact mode. max_context: tokens of one
        session; None takes the model's own maximum, or as much of it as the device's memory holds.
        progress: called with (bytes done, bytes in all) from the calling thread.

        Raises CheckpointError (what is wrong with the files), LilyError (no such device here, or
        too little memory), ValueError (an argument out of its range).
        """
        if activations not in _ACTIVATIONS:
            raise ValueError(f"activations is {activations!r}, allowed {list(_ACTIVATIONS)}")
        if device != "auto" and device not in DEVICES:
            raise ValueError(f"device is {device!r}, allowed {['auto', *DEVICES]}")
        folder = Path(model)
        loaded = plan(read_checkpoint(folder))
        if max_context is not None:
            whole("max_context", max_context, 1, loaded.config.max_position)
        tokenizer = Tokenizer.load(folder)
        core = load_core(
            loaded,
            _first_available() if device == "auto" else device,
            _ACTIVATIONS[activations],
            max_context or 0,
            min(loaded.config.vocab, tokenizer.size),
            progress,
        )
        return cls(core, tokenizer, loaded)

    @property
    def core(self) -> _core.Engine:
        """The compiled engine; LilyError once this one is closed."""
        if self._core is None:
            raise LilyError("the engine is closed")
        return self._core

    @property
    def device(self) -> str:
        """Name of the device: "cpu", "cuda" and so on."""
        return self.core.device

    @property
    def max_context(self) -> int:
        """Tokens of one session at most, prompt and answer."""
        return self.core.max_context

    def session(
        self, params: SamplingParams | None = None, **overrides: Unpack[Sampling]
    ) -> _core.Session:
        """A new empty timeline of token ids, drawing tokens by these options.

        One thread at a time may use it; the ids go in as uint32 arrays.

        >>> import lily, numpy
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> session = engine.session(temperature=0.8, seed=7)
        >>> ids = numpy.array([5, 6, 7], numpy.uint32)
        >>> session.sync(ids)  # none of them was there before
        0
        >>> session.logits().shape, session.logits().dtype
        ((2048,), dtype('float32'))
        >>> drawn = session.step().id
        >>> session.position
        4
        >>> session.rewind(3)
        >>> session.step().id == drawn  # the draw belongs to seed and position
        True
        """
        session = _core.Session(self.core)
        session.set_sampling(**resolve(params, overrides).for_core())
        return session

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[np.integer],
        params: SamplingParams | None = None,
        **overrides: Unpack[Sampling],
    ) -> Completion:
        """Continues a prompt, given as text or as token ids, up to an end token or max_tokens.

        The options are those of SamplingParams: params, with the keywords taking precedence.
        Raises ValueError for a prompt that is empty, too long or holds an unknown id.

        >>> import lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> warm = lily.SamplingParams(temperature=0.8, seed=1, max_tokens=8)
        >>> str(engine.generate("Once", warm)) == engine.generate("Once", warm).text
        True
        """
        drawn = list(self.stream(prompt, params, **overrides))
        reason = drawn[-1].finish_reason
        assert reason is not None
        ids = tuple(token.id for token in drawn)
        return Completion(
            "".join(token.text for token in drawn), ids[:-1] if reason == "stop" else ids, reason
        )

    def stream(
        self,
        prompt: str | Sequence[int] | NDArray[np.integer],
        params: SamplingParams | None = None,
        **overrides: Unpack[Sampling],
    ) -> Iterator[Token]:
        """As generate, token by token; leaving the loop ends the work.

        >>> import lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> pieces = [token.text for token in engine.stream("Once", max_tokens=8)]
        >>> "".join(pieces) == engine.generate("Once", max_tokens=8).text
        True
        """
        options = resolve(params, overrides)
        ids = self._prompt_ids(prompt)
        return self._tokens(self.session(options), ids, options.max_tokens)

    def _prompt_ids(self, prompt: str | Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
        ids: Sequence[int] | NDArray[np.integer]
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray):
            raise TypeError("prompt is bytes, text or token ids are needed")
        else:
            ids = prompt
            for i, token in enumerate(ids):
                whole(f"prompt[{i}]", token, 0, self.core.vocab - 1)
        limit = self.max_context - 1  # one place at least is for the answer
        if len(ids) == 0:
            raise ValueError("prompt has 0 tokens, 1 or more are needed")
        if len(ids) > limit:
            raise ValueError(f"prompt is too long: {len(ids)} tokens > {limit} maximum")
        return np.ascontiguousarray(ids, np.uint32)

    def _tokens(
        self, session: _core.Session, ids: NDArray[np.uint32], max_tokens: int | None
    ) -> Iterator[Token]:
        space = self.max_context - len(ids)
        last = min(space, max_tokens or space)
        text = self.tokenizer.stream()
        ends = self.tokenizer.stop_ids
        session.sync(ids)
        for count in range(1, last + 1):
            token = session.step().id
            if token in ends:
                yield Token(token, text.finish(), "stop")
                return
            piece = text.push(token)
            if count == last:
                yield Token(token, piece + text.finish(), "length")
            else:
                yield Token(token, piece, None)

    def close(self) -> None:
        """Ends it: this object and its sessions raise LilyError from now on.

        The memory is free when the last session is gone, too. Closing twice does nothing.
        """
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

    def __repr__(self) -> str:
        if self._core is None:
            return "<lily.Engine, closed>"
        layers, context = self.plan.config.layers, self.max_context
        return f"<lily.Engine of {layers} layers on {self.device}, {context} tokens of context>"


def _first_available() -> str:
    status = {s.name: s for s in _core.devices()}
    for name in AUTO:
        if status[name].available:
            return name
    raise LilyError("; ".join(f"{name}: {status[name].description}" for name in AUTO))


def load_core(
    loaded: LoadPlan,
    device: str,
    exact: bool,
    max_context: int,
    token_limit: int,
    progress: Progress | None = None,
) -> _core.Engine:
    """Hands a validated plan to the core as flat tables and returns the loaded model.

    max_context 0: as much as the model and the device's memory allow.
    """
    c = loaded.config
    files: dict[Path, int] = {}

    def file_range(entry: TensorEntry, offset: int, length: int) -> tuple[int, int, int]:
        return files.setdefault(entry.file, len(files)), offset, length

    def whole_tensor(entry: TensorEntry | None) -> tuple[int, int, int]:
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
            whole_tensor(s.scales),
            whole_tensor(s.biases),
        )
        for (layer, name), s in loaded.linears.items()
    ]
    vectors = [
        (layer, name, v.entry.name, v.entry.dtype, v.plus_one, whole_tensor(v.entry))
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
