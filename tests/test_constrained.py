"""Constrained output: every finished answer has the form asked for, and no state is a dead end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

import lily
from lily.grammar import Grammar, GrammarTokens, everything_but
from text_harness import CALM, END, bytewise, say


@pytest.fixture(scope="module")
def engine() -> Iterator[lily.Engine]:
    with lily.Engine.load(CALM, device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tokens(engine: lily.Engine) -> GrammarTokens:
    return GrammarTokens(engine.tokenizer, engine.core.vocab)


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# ---- random schemas -----------------------------------------------------------------------------

PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][0-9]{1,3}$", "^(red|green|blue)$", r"^\d{4}-\d{2}$")
FORMATS = ("date", "time", "uuid", "ipv4")


def a_schema(draw: random.Random, depth: int, defined: list[str]) -> dict[str, Any]:
    """A schema whose values are short: what a model without a mind writes comes to an end."""
    simple = ["string", "string", "pattern", "format", "integer", "number", "boolean", "null"]
    nested = ["object", "object", "array", "tuple", "anyOf", "allOf", "ref"] if depth > 0 else []
    kind = draw.choice([*simple, "enum", "const", *nested, *nested])

    def inner() -> dict[str, Any]:
        return a_schema(draw, depth - 1, defined)

    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind == "integer":
        low = draw.randint(-300, 300)
        bounds = {"minimum": low, "maximum": low + draw.randint(0, 1000)}
        return {"type": "integer", **bounds}
    if kind == "number":
        return {"type": "number", "multipleOf": 0.25, "minimum": -4, "exclusiveMaximum": 9}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        values = ["a", "Ünïcode \u2603", 'quo"te\\', 12, -3.5, None, True, ["x", 1], {"k": "v"}]
        return {"enum": draw.sample(values, draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["on", 7, None, {"a": [1, 2]}])}
    if kind == "object":
        names = draw.sample(["id", "name", "größe", "a b", 'q"', "items"], draw.randint(1, 4))
        needed = draw.sample(names, draw.randint(0, len(names)))
        properties = {name: inner() for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": needed,
            "additionalProperties": False,
        }
    if kind == "array":
        low = draw.randint(0, 2)
        bounds = {"minItems": low, "maxItems": low + draw.randint(0, 2)}
        return {"type": "array", "items": inner(), **bounds}
    if kind == "tuple":
        parts = [inner() for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(draw.randint(2, 3))]}
    if kind == "allOf":
        return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]}
    return {"$ref": f"#/$defs/{draw.choice(defined)}"}


def random_schema(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    named = {name: a_schema(draw, 1, ["leaf"]) for name in ("part", "thing")}
    named["leaf"] = a_schema(draw, 0, [])
    parts = {f"part {i}": a_schema(draw, 3, sorted(named)) for i in range(3)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": parts,
        "required": list(parts)[: draw.randint(1, 3)],
        "additionalProperties": False,
        "$defs": named,
    }


@pytest.mark.parametrize("block", range(4))
def test_two_hundred_random_schemas(engine: lily.Engine, block: int) -> None:
    finished = 0
    for seed in range(block * 50, block * 50 + 50):
        schema = random_schema(seed)
        done = engine.chat(
            "?", thinking=False, temperature=1.0, top_k=0, top_p=1.0, seed=seed,
            max_tokens=400, response_format=form(schema),
        )  # fmt: skip
        if done.finish_reason == "length":
            continue
        finished += 1
        assert done.finish_reason == "stop"
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(done.text))
    assert finished >= 48  # the others ran out of tokens in a long one


# ---- forms --------------------------------------------------------------------------------------


def test_json_object(engine: lily.Engine) -> None:
    for seed in range(10):
        done = engine.generate(
            "Say it in JSON:", temperature=1.0, seed=seed, max_tokens=200,
            response_format={"type": "json_object"},
        )  # fmt: skip
        assert done.text.startswith("{")
        if done.finish_reason == "stop":
            assert isinstance(json.loads(done.text), dict)


@pytest.mark.parametrize(
    "regex", ["(yes|no)", r"[0-9]{3}-[a-f]{2}", "é+[\u4e00-\u4e20]{2}😀", "x?"]
)
def test_regex(engine: lily.Engine, regex: str) -> None:
    asked = {"type": "regex", "regex": regex}
    for seed in range(5):
        options: Any = {"temperature": 1.0, "seed": seed, "max_tokens": 60}
        done = engine.generate("Well?", response_format=asked, **options)
        if done.finish_reason == "stop":
            assert re.fullmatch(regex, done.text)
        stream = engine.stream("Well?", response_format=asked, **options)
        assert "".join(token.text for token in stream) == done.text


def test_text_is_no_constraint(engine: lily.Engine) -> None:
    free = engine.generate("Once", max_tokens=9)
    assert engine.generate("Once", max_tokens=9, response_format={"type": "text"}) == free


def test_it_ends_as_soon_as_nothing_can_follow(engine: lily.Engine) -> None:
    fixed = form({"const": {"a": 1}})
    done = engine.generate("Once", response_format=fixed)
    assert (done.text, done.finish_reason) == ('{"a": 1}', "stop")
    exact = engine.generate("Once", response_format=fixed, max_tokens=len(done.tokens))
    assert exact == done  # not "length": it is whole


def test_with_other_options(engine: lily.Engine) -> None:
    word = {"type": "regex", "regex": "[a-z]{8}"}
    letter = engine.tokenizer.encode("q")[0]
    barred = engine.generate("Once", response_format=word, logit_bias={letter: 100.0})
    assert barred.text == "q" * 8
    assert re.fullmatch("[a-z]{8}", engine.generate("Once", response_format=word, top_k=1).text)
    everything: Any = {"temperature": 1.2, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    penalties: Any = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    done = engine.generate("Once", response_format=word, seed=1, **everything, **penalties)
    assert re.fullmatch("[a-z]{8}", done.text)
    assert engine.generate("Once", response_format=word, seed=1, **everything, **penalties) == done
    stopped = engine.generate(
        "Once", response_format={"type": "regex", "regex": "abcdef"}, stop="cd"
    )
    assert (stopped.text, stopped.stop_string) == ("ab", "cd")


def test_report_99_the_reasoning_is_free(
    engine: lily.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'Hm, {"no": 1}?</think>{"a": "</think>"}'
    think = bytewise(engine, said[: said.index("{", 10)])
    answer = [i for c in '{"a": "</think>"}' for i in bytewise(engine, c)]
    script = say(monkeypatch, engine, think + answer)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    done = engine.chat("?", response_format=form(schema))
    assert done.reasoning == 'Hm, {"no": 1}?'
    assert (done.text, done.finish_reason) == ('{"a": "</think>"}', "stop")
    for step, token in enumerate([*think, *answer]):
        mask = script.masks[step]
        assert mask[token // 32] >> token % 32 & 1
        ends = [bool(mask[i // 32] >> i % 32 & 1) for i in sorted(engine.tokenizer.stop_ids)]
        assert ends == [False, False], "it cannot end before it has begun"
    assert np.array_equal(script.masks[0], everything_but([2000, END], 2048))


def test_without_thinking_marks_are_content(
    engine: lily.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "<think>a</think>"
    say(monkeypatch, engine, [i for c in text for i in bytewise(engine, c)])
    done = engine.chat(
        "?", thinking=False, response_format={"type": "regex", "regex": "<think>a</think>"}
    )
    assert (done.text, done.reasoning) == (text, "")


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "response_format.type is None, allowed ['text', 'json_object', 'json_schema', 'regex']"),
        ({"type": "xml"}, "response_format.type is 'xml'"),
        ({"type": "json_schema"}, "response_format.json_schema.schema is missing or no object"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "is missing or no object"),
        (form({"not": {"type": "string"}}), 'the schema cannot be served: Unimplemented keys: ["not"]'),
        (form({"type": "array", "uniqueItems": True}), '["uniqueItems"]'),
        (form({"if": {}, "then": {}}), '["if", "then"]'),
        (form({"type": "string", "format": "weird"}), "Unknown format: weird"),
        (form({"type": "frob"}), "Invalid type: frob"),
        (form({"enum": []}), "Unsatisfiable schema"),
        (form({"minimum": 5, "maximum": 3, "type": "integer"}), "Unsatisfiable schema"),
        (form({"$ref": "#/$defs/none"}), "Pointer '/$defs/none' does not exist"),
        (form({"$ref": "http://example.org/x"}), "http://example.org/x"),
        (form({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (form({"default": float("nan")}), "is nan, which JSON does not have"),
        ({"type": "regex"}, "response_format.regex is missing or no string"),
        ({"type": "regex", "regex": "(a"}, "the regex cannot be served: "),
        ({"type": "regex", "regex": "a" * 2**20}, "1048576"),
    ],
)  # fmt: skip
def test_report_100_what_cannot_be_served_is_refused(
    engine: lily.Engine, asked: dict[str, Any], message: str
) -> None:
    for call in (engine.stream, engine.generate, engine.stream_chat):
        with pytest.raises(ValueError, match=r"^response_format") as refusal:
            call("?", response_format=asked)
        assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_grammar_that_grows_too_large_says_so(engine: lily.Engine) -> None:
    """Later than at once, and without the library's state, which has the whole grammar in it."""
    with pytest.raises(lily.LilyError) as refusal:
        engine.generate("?", response_format={"type": "regex", "regex": "a{1000000}"}, max_tokens=8)
    assert str(refusal.value) == "response_format: lexer error: too many expressions constructed"


def test_a_schema_cannot_change_the_layout(engine: lily.Engine) -> None:
    schema = {"const": [1, 2], "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert engine.generate("Once", response_format=form(schema)).text == "[1, 2]"
    with pytest.raises(ValueError, match="Unimplemented"):
        engine.generate("Once", response_format=form({**schema, "not": {}}))


# ---- states -------------------------------------------------------------------------------------


def test_every_state_leaves_a_token(tokens: GrammarTokens) -> None:
    """Walks that take any legal token; control tokens are never among them, ends only at the end."""
    for seed in range(60):
        draw = random.Random(seed)
        grammar = Grammar(form(random_schema(seed + 1000)), tokens)
        for _ in range(80):
            bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
            legal = np.flatnonzero(bits)
            assert len(legal) and legal.max() < 2026
            control = set(legal.tolist()) & set(tokens.special_token_ids)
            assert control <= set(tokens.stop_ids)
            assert bool(control) == grammar.complete
            free = [token for token in legal.tolist() if token not in control]
            assert grammar.finished == (not free)
            if not free:
                break
            grammar.push(draw.choice(free))


def test_the_mask_covers_the_padding(tokens: GrammarTokens) -> None:
    assert Grammar({"type": "regex", "regex": ".*"}, tokens).mask().shape == (64,)
    few = everything_but([0, 33, 2047], 2048)
    assert few[0] == 0xFFFFFFFE and few[1] == 0xFFFFFFFD and few[63] == 0x7FFFFFFF
    assert (few[2:63] == 0xFFFFFFFF).all()
