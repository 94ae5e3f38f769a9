"""Text to ids and back: whole characters, stop ids, control tokens apart from text."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.tokenizer import Tokenizer

CALM = Path(__file__).resolve().parent / "data/mlx4_calm"
LIBRARY = tokenizers.Tokenizer.from_file(str(CALM / "tokenizer.json"))
TOKENIZER = Tokenizer.load(CALM)
BYTES = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.size) if TOKENIZER.token_bytes(i)}
FAMILY = "👩‍👩‍👧 and ď, 25 °C² 😀"


def stream(ids: list[int]) -> list[str]:
    decoder = TOKENIZER.stream()
    return [*map(decoder.push, ids), decoder.finish()]


# ---- ids to text -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, TOKENIZER.size + 3), max_size=40))
@settings(deadline=None)
def test_pieces_join_to_the_librarys_text(ids: list[int]) -> None:
    pieces = stream(ids)
    known = [token for token in ids if token < TOKENIZER.size]
    assert "".join(pieces) == LIBRARY.decode(known) == TOKENIZER.decode(ids)


def test_every_byte_has_a_token() -> None:
    assert all(bytes([byte]) in BYTES for byte in range(256))


@given(st.text(max_size=20), st.data())
@settings(deadline=None)
def test_characters_come_whole_over_any_division_into_tokens(text: str, data: Any) -> None:
    # Tokens of one byte and of several, wherever they lie in a character.
    raw, ids, at = text.encode(), [], 0
    while at < len(raw):
        sizes = [n for n in (1, 2, 3, 4) if raw[at : at + n] in BYTES and at + n <= len(raw)]
        size = data.draw(st.sampled_from(sizes))
        ids.append(BYTES[raw[at : at + size]])
        at += size
    pieces = stream(ids)
    assert "".join(pieces) == text and pieces[-1] == ""
    assert all(text.startswith("".join(pieces[:count])) for count in range(len(pieces)))
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.sampled_from([bytes([b]) for b in range(256)]), max_size=12))
@settings(deadline=None)
def test_bytes_that_are_no_utf8_become_replacements(raw: list[bytes]) -> None:
    ids = [BYTES[byte] for byte in raw]
    assert "".join(stream(ids)) == b"".join(raw).decode(errors="replace") == LIBRARY.decode(ids)


def test_report_36_no_character_is_split() -> None:
    raw = FAMILY.encode()
    pieces = stream([BYTES[bytes([byte])] for byte in raw])
    assert "".join(pieces) == FAMILY and "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(FAMILY)


def test_special_tokens_have_no_text_and_marks_have() -> None:
    added = TOKENIZER.added
    ids = [added["<|im_start|>"], added["<think>"], added["<tool_call>"], added["<|im_end|>"]]
    assert TOKENIZER.decode(ids) == "<think><tool_call>"
    assert TOKENIZER.decode([-1, TOKENIZER.size, 10**9]) == ""


# ---- text to ids -------------------------------------------------------------------------------


@given(st.text(max_size=60).filter(lambda text: not any(TOKENIZER.literals(text))))
@settings(deadline=None)
def test_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == LIBRARY.encode(text).ids == TOKENIZER.encode_plain(text)
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)


LITERALS = sorted(TOKENIZER.added)


@given(st.lists(st.one_of(st.sampled_from(LITERALS), st.text(max_size=4)), max_size=8).map("".join))
@settings(deadline=None)
def test_plain_text_never_reaches_an_added_token(text: str) -> None:
    ids = TOKENIZER.encode_plain(text)
    assert not set(ids) & set(TOKENIZER.added.values())
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)
    # The places found are those at which the library finds added tokens.
    found = [TOKENIZER.added[match[0]] for match in TOKENIZER.literals(text)]
    assert found == [i for i in TOKENIZER.encode(text) if i in TOKENIZER.added.values()]


def test_a_lone_surrogate_is_refused() -> None:
    for encode in (TOKENIZER.encode, TOKENIZER.encode_plain):
        with pytest.raises(ValueError, match=re.escape("lone surrogate U+D83D at 2")):
            encode("ab\ud83d")


# ---- the files ---------------------------------------------------------------------------------


def folder(
    path: Path,
    *,
    config: Any = None,
    generation: Any = None,
    settings: Any = None,
    tokenizer: str | None = None,
) -> Path:
    whole = {"config.json": config, "generation_config.json": generation}
    for name, fields in {**whole, "tokenizer_config.json": settings}.items():
        if fields is not None:
            (path / name).write_text(json.dumps(fields))
    text = tokenizer or (CALM / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"config": {"eos_token_id": 2000}, "generation": {"eos_token_id": [2002, 2000]}}, {2000, 2002}),
        ({"config": {"eos_token_id": 2000}, "settings": {"eos_token": "<|im_end|>"}}, {2000, 2002}),
        ({"config": {"text_config": {"eos_token_id": 2000}}, "generation": {"eos_token_id": 2002}}, {2000, 2002}),
        ({"settings": {"eos_token": {"content": "<|im_end|>", "special": True}}}, {2002}),
        ({"config": {"eos_token_id": None}, "settings": {"eos_token": None}}, set()),
        ({}, set()),
    ],
)  # fmt: skip
def test_report_32_stop_ids_are_the_union_of_all_files(
    files: Any, stops: set[int], tmp_path: Path
) -> None:
    assert Tokenizer.load(folder(tmp_path, **files)).stop_ids == stops


def test_the_fixtures_stop_ids_and_size() -> None:
    assert TOKENIZER.stop_ids == {2000, 2002}
    assert TOKENIZER.size == 2026
    assert TOKENIZER.named == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"eos_token_id": "2"}}, "config.json: eos_token_id is '2', ids are needed"),
        ({"generation": {"eos_token_id": [1, True]}}, "generation_config.json: eos_token_id is [1, True]"),
        ({"config": {"eos_token_id": -1}}, "config.json: eos_token_id is -1"),
        ({"settings": {"eos_token": "<end>"}}, "eos_token is '<end>', which tokenizer.json lacks"),
        ({"tokenizer": "{}"}, "not a tokenizer"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(files: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(lily.CheckpointError, match=re.escape(message)):
        Tokenizer.load(folder(tmp_path, **files))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(lily.CheckpointError, match="the tokenizer is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_depend_on_their_neighbours_are_refused(
    flag: str, tmp_path: Path
) -> None:
    fields = json.loads((CALM / "tokenizer.json").read_text())
    fields["added_tokens"][2][flag] = True
    with pytest.raises(lily.CheckpointError, match=re.escape("'<|im_end|>' has lstrip, rstrip or")):
        Tokenizer.load(folder(tmp_path, tokenizer=json.dumps(fields)))


def test_a_vocabulary_that_reaches_an_added_token_by_text_is_refused(tmp_path: Path) -> None:
    fields = json.loads((CALM / "tokenizer.json").read_text())
    fields["added_tokens"].append({**fields["added_tokens"][2], "id": 0, "content": "!"})
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer=json.dumps(fields)))
    assert tokenizer.added["!"] == 0
    with pytest.raises(lily.CheckpointError, match="reaches an added token by text"):
        tokenizer.encode_plain("stop! ")


def test_the_longest_of_two_literals_counts(tmp_path: Path) -> None:
    fields = json.loads((CALM / "tokenizer.json").read_text())
    last = fields["added_tokens"][-1]
    more = [{**last, "id": 2026, "content": "<a>"}, {**last, "id": 2027, "content": "<a><b>"}]
    fields["added_tokens"] += more
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer=json.dumps(fields)))
    assert [m[0] for m in tokenizer.literals("<a><a><b>")] == ["<a>", "<a><b>"]
    assert tokenizer.encode("<a><a><b>") == [2026, 2027]


def test_an_added_token_that_is_no_byte_level_word_is_written_as_it_is(tmp_path: Path) -> None:
    fields = json.loads((CALM / "tokenizer.json").read_text())
    fields["added_tokens"].append({**fields["added_tokens"][-1], "id": 2026, "content": "<a – b>"})
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer=json.dumps(fields)))
    assert tokenizer.token_bytes(2026) == "<a – b>".encode()
    assert tokenizer.decode(tokenizer.encode("x<a – b>y")) == "x<a – b>y"


def test_no_added_tokens_at_all(tmp_path: Path) -> None:
    fields = {**json.loads((CALM / "tokenizer.json").read_text()), "added_tokens": []}
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer=json.dumps(fields)))
    assert list(tokenizer.literals("<think>")) == []
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"
