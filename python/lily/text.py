"""Owns the tokenizer and the way from token ids to text: a character appears once it is whole."""

from __future__ import annotations

import codecs
from pathlib import Path

import tokenizers
from tokenizers import decoders

from lily.errors import CheckpointError


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json of a checkpoint folder; it must be byte-level, as this family's is."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: the tokenizer is missing")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        kind = type(tokenizer.decoder).__name__
        raise CheckpointError(f"{file}: the decoder is {kind}, supported is ByteLevel")
    # A file may ask for either; both would change the prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_limit(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the last id; ids from here on are never sampled."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _byte_alphabet() -> dict[str, int]:
    """A byte-level vocabulary writes a byte as itself if printable, else as one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TextDecoder:
    """Turns the ids of one text into characters, one id at a time.

    The pieces joined are what `tokenizer.decode(ids)` gives: special tokens are left out, bytes
    that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The characters that `token` completes; "" while one is still in pieces."""
        word = None if token in self._special else self._tokenizer.id_to_token(token)
        if not word:
            return ""
        if all(char in _BYTE_OF for char in word):
            return self._utf8.decode(bytes(_BYTE_OF[char] for char in word))
        return self._utf8.decode(word.encode())  # an added token, written as it is

    def finish(self) -> str:
        """What is left when no further token comes."""
        return self._utf8.decode(b"", final=True)
