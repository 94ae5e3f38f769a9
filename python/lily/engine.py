"""Owns the public Engine: loading a model, generating, chatting, sessions."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.asynchronous import finish, follow
from lily.checkpoint import LoadPlan, TensorEntry, plan, read_checkpoint
from lily.errors import LilyError
from lily.grammar import Grammar, GrammarTokens, checked_format
from lily.hub import PACKAGED_MODEL, fetch
from lily.parser import OutputParser
from lily.pool import SessionPool
from lily.results import Completion, Token
from lily.sampling import (
    Sampling,
    SamplingParams,
    checkpoint_defaults,
    plain_defaults,
    resolve,
    whole,
)
from lily.stream import Progress, Request, Stream
from lily.template import ChatTemplate
from lily.tokenizer import Tokenizer

DEVICES = ("metal", "cuda", "cpu", "sim")
AUTO = ("metal", "cuda", "cpu")  # sim checks kernels and is far too slow to be anyone's choice

_ACTIVATIONS = {"bfloat16": False, "float32": True}

# Shorter prompts are not worth a snapshot: they are read as fast as one is restored.
_WORTH_KEEPING = 16

Prompt = str | Sequence[int] | NDArray[np.integer]
Messages = str | Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Engine:
    """A loaded model, shared by its sessions and by threads; close it or use `with`.

    Calls from several threads run side by side, each with a session of its own. A few sessions
    are kept, so that a prompt that begins as an earlier one did is not read again.

    tokenizer: the checkpoint's. defaults: the options that its generation_config.json advises;
    chats begin with them, chats without thinking with plain_defaults (see lily.sampling), raw texts
    with SamplingParams(), which is greedy.

    >>> import lily
    >>> with lily.Engine.load("tests/data/mlx4_calm", device="cpu") as engine:
    ...     done = engine.generate("The quick brown fox", max_tokens=4)
    >>> done.finish_reason, len(done.tokens)
    ('length', 4)
    """

    def __init__(
        self, core: _core.Engine, tokenizer: Tokenizer, loaded: LoadPlan, folder: Path
    ) -> None:
        self._core: _core.Engine | None = core
        self._pool = SessionPool(core)
        self._folder = folder
        self._template: ChatTemplate | None = None
        self._grammar_tokens: GrammarTokens | None = None
        self.tokenizer = tokenizer
        self.plan = loaded
        self.defaults = checkpoint_defaults(folder)
        self.plain_defaults = plain_defaults(self.defaults)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = PACKAGED_MODEL,
        *,
        device: str = "auto",
        activations: str = "bfloat16",
        max_context: int | None = None,
        revision: str | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads a checkpoint: config.json, tokenizer.json, chat template, safetensors.

        model: a folder, or a hub id such as "mlx-community/Qwen3.6-35B-A3B-4bit", which is taken
        from the hub's cache or downloaded, see lily.hub.fetch; by default the small model of the
        package, which tells stories. revision: of a hub id. device: "metal", "cuda", "cpu" or
        "sim"; "auto" is the first of these that exists here, never sim. activations: "bfloat16",
        or "float32" for exact mode. max_context: tokens of one session; None takes the model's own
        maximum, or as much of it as the device's memory holds. progress: called with (bytes done,
        bytes in all) of the download, if there is one, and then of the loading, this from the
        calling thread.

        Raises CheckpointError (what is wrong with the files), LilyError (no such device here, too
        little memory, no such model), ValueError (an argument out of its range).
        """
        if activations not in _ACTIVATIONS:
            raise ValueError(f"activations is {activations!r}, allowed {list(_ACTIVATIONS)}")
        if device != "auto" and device not in DEVICES:
            raise ValueError(f"device is {device!r}, allowed {['auto', *DEVICES]}")
        folder = fetch(model, revision=revision, progress=progress)
        loaded = plan(read_checkpoint(folder))
        if max_context is not None:
            whole("max_context", max_context, 1, loaded.config.max_position)
        tokenizer = Tokenizer.load(folder)
        checkpoint_defaults(folder)  # refused before the long part
        core = load_core(
            loaded,
            first_available() if device == "auto" else device,
            _ACTIVATIONS[activations],
            max_context or 0,
            min(loaded.config.vocab, tokenizer.size),
            progress,
        )
        return cls(core, tokenizer, loaded, folder)

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
        options = resolve(params, overrides)
        if options.stop or checked_format(options.response_format) is not None:
            raise ValueError(
                "stop and response_format belong to answers, a session draws single tokens: "
                "see Session.step(allowed)"
            )
        session = _core.Session(self.core)
        session.set_sampling(**options.for_core())
        return session

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Unpack[Sampling]
    ) -> Completion:
        """Continues a prompt, given as text or as token ids, up to an end token or max_tokens.

        The text is taken as it is, without a chat template: that is `chat`. The options are those
        of SamplingParams: params, with the keywords taking precedence.
        Raises ValueError for a prompt that is empty, too long or holds an unknown id.

        >>> import lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> warm = lily.SamplingParams(temperature=0.8, seed=1, max_tokens=8)
        >>> str(engine.generate("Once", warm)) == engine.generate("Once", warm).text
        True
        """
        return _whole(self.stream(prompt, params, **overrides))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        **overrides: Unpack[Sampling],
    ) -> Stream:
        """As generate, token by token; leaving the loop ends the work.

        progress: called with (tokens read, tokens in all) while the prompt is read.

        >>> import lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> pieces = [token.text for token in engine.stream("Once", max_tokens=8)]
        >>> "".join(pieces) == engine.generate("Once", max_tokens=8).text
        True
        """
        options = resolve(params, overrides)
        ids = self._prompt_ids(prompt)
        kept = (len(ids) - 1,) if len(ids) > _WORTH_KEEPING else ()
        return self._start(options, ids, kept, progress)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        thinking: bool = True,
        preserve_thinking: bool = False,
        params: SamplingParams | None = None,
        **overrides: Unpack[Sampling],
    ) -> Completion:
        """Answers a conversation; the result has text, reasoning and tool_calls apart.

        messages: OpenAI's form, or a text as the only user message. tools: OpenAI's form.
        thinking: whether the answer begins with reasoning. preserve_thinking: whether reasoning
        of earlier turns stays in the prompt. The options begin with `defaults`, those of chats
        without thinking with `plain_defaults`.
        Raises ValueError, which names the message, tool or option that is wrong.

        >>> import lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> done = engine.chat("Why is the sky blue?", max_tokens=8)
        >>> done.text, len(done.reasoning) > 0  # all of it went into thinking
        ('', True)
        >>> done = engine.chat("Why?", thinking=False, max_tokens=8, temperature=0)
        >>> len(done.text) > 0, done.reasoning
        (True, '')
        """
        stream = self.stream_chat(
            messages,
            tools=tools,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            params=params,
            **overrides,
        )
        return _whole(stream)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        thinking: bool = True,
        preserve_thinking: bool = False,
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        **overrides: Unpack[Sampling],
    ) -> Stream:
        """As chat, token by token; a tool call comes when it is whole.

        >>> import lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> {token.kind for token in engine.stream_chat("Why?", max_tokens=8)}
        {'reasoning'}
        """
        options = resolve(params, overrides, self.defaults if thinking else self.plain_defaults)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if tools and checked_format(options.response_format) is not None:
            raise ValueError(
                "response_format and tools exclude each other: a call has its own form"
            )
        prompt = self.template.render(messages, tools, thinking, preserve_thinking)
        think_end = self.tokenizer.added.get("</think>")
        parser = OutputParser(tools, prompt.starts_in_thinking, think_end)
        stable = prompt.stable_prefixes
        kept = tuple(sorted({*stable[:1], *stable[-1:]}))
        ids = self._prompt_ids(prompt.ids)
        return self._start(
            options, ids, kept, progress, parser, prompt.starts_in_thinking, think_end
        )

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Unpack[Sampling]
    ) -> AsyncGenerator[Token]:
        """stream for asyncio: the work is done in a thread; a cancelled task ends it.

        >>> import asyncio, lily
        >>> engine = lily.Engine.load("tests/data/mlx4_calm", device="cpu")
        >>> async def count() -> int:
        ...     return len([token async for token in engine.astream("Once", max_tokens=8)])
        >>> asyncio.run(count())
        8
        """
        return follow(self.stream(prompt, params, **overrides))

    def astream_chat(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        thinking: bool = True,
        preserve_thinking: bool = False,
        params: SamplingParams | None = None,
        **overrides: Unpack[Sampling],
    ) -> AsyncGenerator[Token]:
        """stream_chat for asyncio."""
        stream = self.stream_chat(
            messages,
            tools=tools,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            params=params,
            **overrides,
        )
        return follow(stream)

    async def achat(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        thinking: bool = True,
        preserve_thinking: bool = False,
        params: SamplingParams | None = None,
        **overrides: Unpack[Sampling],
    ) -> Completion:
        """chat for asyncio: the work is done in a thread; a cancelled task ends it."""
        stream = self.stream_chat(
            messages,
            tools=tools,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            params=params,
            **overrides,
        )
        return await finish(stream)

    @property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template; CheckpointError if it has none."""
        if self._template is None:
            self._template = ChatTemplate.load(self._folder, self.tokenizer)
        return self._template

    def _start(
        self,
        options: SamplingParams,
        ids: NDArray[np.uint32],
        snapshot_at: tuple[int, ...],
        progress: Progress | None,
        parser: OutputParser | None = None,
        thinks: bool = False,
        think_end: int | None = None,
    ) -> Stream:
        vocab = self.core.vocab
        for token in options.logit_bias:
            if token >= vocab:
                raise ValueError(f"logit bias for token {token}, the vocabulary has {vocab}")
        grammar = None
        form = checked_format(options.response_format)
        if form is not None:
            if self._grammar_tokens is None:
                self._grammar_tokens = GrammarTokens(self.tokenizer, vocab)
            grammar = Grammar(form, self._grammar_tokens)
            parser = parser if thinks else None
        space = self.max_context - len(ids)
        request = Request(
            ids=ids,
            snapshot_at=snapshot_at,
            options=options,
            limit=min(space, options.max_tokens or space),
            chunk=self.core.chunk,
            vocab=vocab,
            parser=parser,
            grammar=grammar,
            thinks=thinks,
            think_end=think_end,
        )
        return Stream(self._pool, self.tokenizer, request, progress)

    def _prompt_ids(self, prompt: Prompt) -> NDArray[np.uint32]:
        ids: Sequence[int] | NDArray[np.integer]
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence | np.ndarray):
            raise TypeError(f"prompt is a {type(prompt).__name__}, text or token ids are needed")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
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

    def close(self) -> None:
        """Ends it: this object and its sessions raise LilyError from now on.

        The memory is free when the last session is gone, too. Closing twice does nothing.
        """
        if self._core is not None:
            self._pool.close()
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


def _whole(stream: Stream) -> Completion:
    """Reads a stream to its end."""
    for _ in stream:
        pass
    return stream.completion


def first_available() -> str:
    """The device that "auto" means here."""
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
    """Hands a validated plan to the core and returns the loaded model.

    max_context 0: as much as the model and the device's memory allow.
    """
    tables = core_tables(loaded, token_limit)
    return _core.load_engine(device, exact, *tables, max_context, progress)


def core_tables(loaded: LoadPlan, token_limit: int) -> tuple[Any, Any, Any, Any]:
    """A plan as the core reads it: config, file names, matrices, vectors."""
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
    return config, [str(path) for path in files], linears, vectors
