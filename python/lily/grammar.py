"""Owns constrained output: a response_format becomes, step by step, the mask of legal tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from lily.errors import LilyError
from lily.messages import plain_json
from lily.tokenizer import Tokenizer

FORMATS = ("text", "json_object", "json_schema", "regex")
MAX_GRAMMAR_CHARS = 2**20

# One way to write a value: free white space could go on for ever.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarTokens:
    """A tokenizer as grammars see it; made once, shared by all of them.

    Control tokens have no text here: an answer can spell them, not contain them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        if not tokenizer.stop_ids:
            raise LilyError("response_format needs an end token, the checkpoint names none")
        self.vocab = vocab
        self.stop_ids = sorted(token for token in tokenizer.stop_ids if token < vocab)
        self._tokenizer = tokenizer
        # Names that the library reads.
        self.eos_token_id = self.stop_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.added.values())
        control = set(self.special_token_ids)
        self.tokens = [
            b"" if token in control else tokenizer.token_bytes(token)
            for token in range(tokenizer.size)
        ]
        self.core = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=self.stop_ids
        )

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(text)


class Grammar:
    """What may come next in an answer of the form that a response_format asks for.

    >>> tokens = GrammarTokens(Tokenizer.load("tests/data/mlx4_calm"), 2048)
    >>> grammar = Grammar({"type": "regex", "regex": "yes|no"}, tokens)
    >>> sorted(tokens.tokens[token] for token in range(2026) if grammar.allows(token))
    [b'n', b'no', b'y']
    >>> Grammar({"type": "json_schema", "schema": {"not": {}}}, tokens)
    Traceback (most recent call last):
    ValueError: response_format: the schema cannot be served: Unimplemented keys: ["not"]
    """

    def __init__(self, response_format: Mapping[str, Any], tokens: GrammarTokens) -> None:
        source = _source(response_format)
        what = "regex" if response_format["type"] == "regex" else "schema"
        if len(source) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"response_format: the {what} has {len(source)} characters, "
                f"allowed are {MAX_GRAMMAR_CHARS}"
            )
        wrong, notes = llguidance.LLMatcher.validate_grammar_with_warnings(source, tokens.core)
        if wrong:
            raise ValueError(_refusal(what, notes[0]))
        self._tokens = tokens
        self._matcher = llguidance.LLMatcher(tokens.core, source, log_level=0)
        if self._matcher.is_error():
            raise ValueError(_refusal(what, self._error()))
        if not self.mask().any():
            raise ValueError(_refusal(what, "no token can begin it"))

    def mask(self) -> NDArray[np.uint32]:
        """uint32 [(vocab + 31) / 32]: a bit for each token that may come next."""
        words = np.zeros((self._tokens.vocab + 31) // 32, np.uint32)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words[: len(bits)] = bits
        self._check()
        return words

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        return bool(self.mask()[token // 32] >> np.uint32(token % 32) & 1)

    def push(self, token: int) -> None:
        """Takes the token that has come."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise LilyError(f"response_format: {self._error()}")

    def _error(self) -> str:
        """What the library says is wrong, without its state and the grammar, which follow."""
        return self._matcher.get_error().split("\n<state>")[0]


def checked_format(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The option as it is, None for plain text; ValueError for one of another form."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind not in FORMATS:
        raise ValueError(f"response_format.type is {kind!r}, allowed {list(FORMATS)}")
    return None if kind == "text" else response_format


def everything_but(barred: list[int], vocab: int) -> NDArray[np.uint32]:
    """The mask of all tokens except these."""
    words = np.full((vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
    for token in barred:
        words[token // 32] &= ~np.uint32(1 << token % 32)
    return words


def _source(response_format: Mapping[str, Any]) -> str:
    """The library's grammar for a checked format."""
    kind = response_format["type"]
    if kind == "regex":
        regex = response_format.get("regex")
        if not isinstance(regex, str):
            raise ValueError("response_format.regex is missing or no string")
        return llguidance.LLMatcher.grammar_from_regex(regex)
    if kind == "json_object":
        schema: Any = {"type": "object"}
    else:
        holder = response_format.get("json_schema", response_format)
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError("response_format.json_schema.schema is missing or no object")
        schema = plain_json(schema, "response_format.json_schema.schema")
        # What an author's schema says to the library about layout would undo ours.
        schema.pop("x-guidance", None)
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_LAYOUT)


def _refusal(what: str, why: str) -> str:
    return f"response_format: the {what} cannot be served: {' '.join(why.split())}"
