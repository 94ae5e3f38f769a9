"""Owns the way from samples to token rows: the template, the tokenizer, weights of tokens, packing.

python encode.py tokenizer FILE     trains the tokenizer on the data and writes it
"""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import layout as lay
import numpy as np
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

import data

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ROOT / "python" / "lily" / "model"
TEMPLATE, TOKENIZER = PACKAGED / "chat_template.jinja", PACKAGED / "tokenizer.json"
# As the family splits text: words with the character before them, single digits, runs of signs.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROW = 2048
# Weights of tokens as targets: what others say, and what the model should say.
OTHERS, OWN = 1, 2
WEIGHT = np.array([0.0, 0.1, 1.0], np.float32)

_LITERAL = re.compile("(" + "|".join(map(re.escape, lay.SPECIALS)) + ")")


@dataclass(frozen=True)
class Encoded:
    """A sample as tokens; weights as codes of WEIGHT."""

    task: str
    exact: bool
    ids: list[int]
    weights: list[int]


class Encoder:
    def __init__(self, tokenizer: Path = TOKENIZER) -> None:
        self.core = tokenizers.Tokenizer.from_file(str(tokenizer))
        self.special = {text: lay.FIRST_SPECIAL + i for i, text in enumerate(lay.SPECIALS)}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        self.template = environment.from_string(TEMPLATE.read_text())

    def render(self, sample: data.Sample, prompt_only: bool = False) -> str:
        """The conversation; with prompt_only without its last answer, as generation begins."""
        return self.template.render(
            messages=sample.messages[:-1] if prompt_only else sample.messages,
            tools=sample.tools or None,
            enable_thinking=sample.thinking,
            add_generation_prompt=prompt_only,
        )

    def plain(self, text: str) -> list[int]:
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return ids

    def ids(self, text: str) -> list[int]:
        """Rendered text; literals of added tokens count as such."""
        ids: list[int] = []
        for piece in _LITERAL.split(text):
            if piece:
                ids += [self.special[piece]] if piece in self.special else self.plain(piece)
        return ids

    def encode(self, sample: data.Sample) -> Encoded:
        if sample.raw is not None:
            prompt, text = self.plain(sample.raw[0]), self.plain(sample.raw[1])
            weights = [OTHERS] * len(prompt) + [OWN] * (len(text) + 1)
            return Encoded(sample.task, sample.exact, [*prompt, *text, lay.ENDOFTEXT], weights)
        ids: list[int] = []
        weights: list[int] = []

        def add(new: list[int], weight: int) -> None:
            ids.extend(new)
            weights.extend([weight] * len(new))

        own = False  # inside a turn of the model
        given = ""  # what generation begins with, and the model need not learn to write
        before = ""
        for piece in _LITERAL.split(self.render(sample)):
            if not piece:
                continue
            if piece in self.special:
                if piece == "<think>" and own:
                    given = "<think>"
                elif piece == "</think>" and given == "empty":
                    given = "closed"
                weight = OWN if own and given not in ("<think>", "empty", "closed") else OTHERS
                add([self.special[piece]], weight)
                own = own and piece != "<|im_end|>"
                if piece == "<|im_end|>":
                    given = ""
            elif before == "<|im_start|>" and piece.startswith("assistant\n"):
                own = True
                add(self.plain("assistant\n"), OTHERS)
                add(self.plain(piece[10:]) if piece[10:] else [], OWN)
            elif given == "<think>":
                if piece == "\n\n":
                    given = "empty"
                    add(self.plain(piece), OTHERS)
                else:
                    given = ""
                    add(self.plain("\n"), OTHERS)
                    add(self.plain(piece[1:]), OWN)
            elif given == "closed":
                given = ""
                add(self.plain("\n\n"), OTHERS)
                add(self.plain(piece[2:]) if piece[2:] else [], OWN)
            else:
                add(self.plain(piece), OWN if own else OTHERS)
            before = piece
        return Encoded(sample.task, sample.exact, ids, weights)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass
class Rows:
    """Packed rows [n, 2048]: ids, weight codes, position in the document. documents: of each the
    row, start, end, task and whether it is exact."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.uint8]
    position: NDArray[np.uint16]
    documents: list[tuple[int, int, int, str, bool]]


def pack(documents: list[Encoded], row: int = ROW) -> Rows:
    """Each document goes whole into the first row that has room among the last few."""
    rows: list[list[Encoded]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.ids)
        if size > row:
            continue
        for i in range(max(0, len(rows) - 24), len(rows)):
            if room[i] >= size:
                rows[i].append(document)
                room[i] -= size
                break
        else:
            rows.append([document])
            room.append(row - size)
    ids = np.full((len(rows), row), lay.ENDOFTEXT, np.uint16)
    weights = np.zeros((len(rows), row), np.uint8)
    position = np.zeros((len(rows), row), np.uint16)
    placed = []
    for i, content in enumerate(rows):
        at = 0
        for document in content:
            end = at + len(document.ids)
            ids[i, at:end], weights[i, at:end] = document.ids, document.weights
            position[i, at:end] = np.arange(end - at)
            placed.append((i, at, end, document.task, document.exact))
            at = end
        position[i, at:] = np.arange(row - at)
    return Rows(ids, weights, position, placed)


def train_tokenizer(file: Path, samples: int = 60_000) -> None:
    core = tokenizers.Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    rng = random.Random(20)

    def texts() -> Any:
        for _ in range(samples):
            sample = data.draw(rng, False, data.TOKENIZER_SHARES)
            for message in sample.messages:
                yield message["content"]
                yield message.get("reasoning_content", "")
            yield json.dumps(sample.tools)
            yield "".join(sample.raw or ())
        form = "system\nuser\nassistant\nThese functions exist:\n<tools>\n</tools>\nCall one in this form:\n"
        form += "<function=NAME>\n<parameter=KEY>\nvalue\n</parameter>\n</function>\n"
        yield from (form + "\n</tools>\n</function>\n>\ntrue\n>\nfalse\n",) * 3000
        for words in (data.w.NOUNS, data.w.VERBS, data.w.ADJECTIVES, data.w.NAMES, data.w.CITIES):
            for word in words:  # each with and without a space before it, and as a name
                yield from (f"{word} {word} {word.capitalize()} {word.capitalize()}",) * 30

    trainer = trainers.BpeTrainer(
        vocab_size=lay.FIRST_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts(), trainer)
    if core.get_vocab_size() != lay.FIRST_SPECIAL:
        raise RuntimeError(f"the vocabulary has {core.get_vocab_size()} tokens")
    for text in lay.SPECIALS:
        token = AddedToken(text, special=text not in lay.PLAIN, normalized=False)
        (core.add_tokens if text in lay.PLAIN else core.add_special_tokens)([token])
    core.save(str(file))


if __name__ == "__main__":
    if sys.argv[1] != "tokenizer":
        sys.exit(__doc__)
    train_tokenizer(Path(sys.argv[2]))
