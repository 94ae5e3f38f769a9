"""Owns the tokenizer: text to ids and back, control tokens apart from text, stop ids."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

from lily.errors import CheckpointError
from lily.safetensors_header import read_json_object

_NAMED = ("bos_token", "eos_token", "pad_token")


class Tokenizer:
    """A checkpoint's byte-level tokenizer.

    stop_ids: the ids that end an answer: all that config.json, generation_config.json and the
    tokenizer's own eos_token name, for each file often names only some of them.
    added: the added tokens (control tokens), text to id. named: bos_token and its like, as far
    as the checkpoint has them. size: one more than the last id; ids from there on are padding.

    >>> tokenizer = Tokenizer.load("tests/data/mlx4_calm")
    >>> tokenizer.decode(tokenizer.encode("Hello, world"))
    'Hello, world'
    >>> sorted(tokenizer.stop_ids) == [tokenizer.added[t] for t in ("<|endoftext|>", "<|im_end|>")]
    True
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        stop_ids: Iterable[int] = (),
        named: Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        self.named = dict(named or {})
        entries = core.get_added_tokens_decoder()
        self.added = {entry.content: token for token, entry in entries.items()}
        self.size = 1 + max(core.get_vocab(with_added_tokens=True).values(), default=-1)
        self.stop_ids = frozenset(stop_ids) | self._named_eos()
        self._special = frozenset(token for token, entry in entries.items() if entry.special)
        self._control = frozenset(self.added.values())
        self._bytes: dict[int, bytes] = {}  # of the ids seen so far
        # The same model without the added tokens: text can never become one of them.
        self._plain = tokenizers.Tokenizer(core.model)
        if core.normalizer is not None:
            self._plain.normalizer = core.normalizer
        if core.pre_tokenizer is not None:
            self._plain.pre_tokenizer = core.pre_tokenizer
        # Longest first: where one literal begins with another, the longer one is meant.
        literals = sorted(self.added, key=lambda text: (-len(text), text))
        self._literal = re.compile("|".join(map(re.escape, literals)) or r"(?!)")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Reads tokenizer.json of a checkpoint folder and the stop ids of the files beside it."""
        folder = Path(folder)
        settings = _fields(folder / "tokenizer_config.json")
        named = {key: text for key in _NAMED if (text := _token_text(settings.get(key)))}
        return cls(_read_core(folder / "tokenizer.json"), stop_ids=_stop_ids(folder), named=named)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which added tokens count as control tokens; nothing is put before.

        For text whose author may steer the model; other people's text goes through encode_plain.
        """
        return self._core.encode(_encodable(text), add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text` as mere text: never an added token, whatever it says."""
        ids = self._plain.encode(_encodable(text), add_special_tokens=False).ids
        if not self._control.isdisjoint(ids):
            raise CheckpointError("tokenizer.json: its vocabulary reaches an added token by text")
        return ids

    def literals(self, text: str) -> Iterator[re.Match[str]]:
        """The places of `text` that read as added tokens, from left to right, the longest first."""
        return self._literal.finditer(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special tokens left out, bytes that are no UTF-8 as U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self) -> IncrementalDecoder:
        """A decoder for the ids of one text as they come."""
        return IncrementalDecoder(self)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; none for special and for unknown ids."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._read_bytes(token)
        return known

    def _read_bytes(self, token: int) -> bytes:
        if token < 0 or token in self._special:
            return b""
        word = self._core.id_to_token(token) or ""
        if all(char in _BYTE_OF for char in word):
            return bytes(_BYTE_OF[char] for char in word)
        return word.encode()  # an added token, written as it is

    def _named_eos(self) -> frozenset[int]:
        text = self.named.get("eos_token")
        if text is None:
            return frozenset()
        token = self._core.token_to_id(text)
        if token is None:
            raise CheckpointError(
                f"tokenizer_config.json: eos_token is {text!r}, which tokenizer.json lacks"
            )
        return frozenset({token})


class IncrementalDecoder:
    """Turns the ids of one text into characters, one id at a time; a character comes whole.

    The pieces joined are what Tokenizer.decode gives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; "" while one is still in pieces."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left when no further token comes."""
        return self._utf8.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """A byte-level vocabulary writes a byte as itself if printable, else as one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _read_core(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise CheckpointError(f"{file}: the tokenizer is missing")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    if not isinstance(core.decoder, decoders.ByteLevel):
        kind = type(core.decoder).__name__
        raise CheckpointError(f"{file}: the decoder is {kind}, supported is ByteLevel")
    for entry in core.get_added_tokens_decoder().values():
        # These eat neighbouring text or depend on it: text around a control token would change.
        if entry.lstrip or entry.rstrip or entry.single_word or not entry.content:
            raise CheckpointError(
                f"{file}: added token {entry.content!r} has lstrip, rstrip or single_word set "
                "or is empty; supported are plain literals"
            )
    # A file may ask for either; both would change the prompt.
    core.no_truncation()
    core.no_padding()
    return core


def _fields(file: Path) -> dict[str, object]:
    return read_json_object(file) if os.path.lexists(file) else {}


def _token_text(entry: object) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def _stop_ids(folder: Path) -> set[int]:
    config = _fields(folder / "config.json")
    text = config.get("text_config")
    sources: Sequence[tuple[str, object]] = (
        ("config.json", config.get("eos_token_id")),
        ("config.json", text.get("eos_token_id") if isinstance(text, dict) else None),
        (
            "generation_config.json",
            _fields(folder / "generation_config.json").get("eos_token_id"),
        ),
    )
    ids: set[int] = set()
    for file, value in sources:
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise CheckpointError(f"{file}: eos_token_id is {value!r}, ids are needed")
            ids.add(item)
    return ids


def _encodable(text: str) -> str:
    """`text`, which must be Unicode: a lone surrogate has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has the lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        ) from None
    return text
