"""Answers divided into reasoning, content and calls: as reported, and for any text and division."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily.messages import ToolCall
from lily.parser import OutputParser
from lily.template import ChatTemplate
from lily.tokenizer import Tokenizer
from lily.tool_values import typed_value

DATA = Path(__file__).resolve().parent / "data"
TOKENIZER = Tokenizer.load(DATA / "mlx4_calm")
TEMPLATE = ChatTemplate((DATA / "chat_template.jinja").read_text(), TOKENIZER)
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
F = tool("f", x=INTEGER, s=STRING, b=BOOLEAN)
EDIT = tool("edit", path=STRING, old_string=STRING, new_string=STRING, replace_all=BOOLEAN)
WRITE = tool("write_file", path=STRING, content=STRING)
TOOLS = [F, EDIT, WRITE]


class Answer:
    """What a parser makes of an answer, the pieces of a kind joined."""

    def __init__(
        self,
        text: str | list[str],
        tools: list[dict[str, Any]] = TOOLS,
        thinking: bool = False,
        finish: str = "stop",
    ) -> None:
        parser = OutputParser(tools, thinking)
        pieces = [
            piece
            for part in ([text] if isinstance(text, str) else text)
            for piece in parser.push(part)
        ]
        tail, found = parser.finish(finish)
        self.pieces = pieces + tail
        self.content = "".join(p.text for p in self.pieces if p.kind == "content")
        self.reasoning = "".join(p.text for p in self.pieces if p.kind == "reasoning")
        self.calls = [(call.name, dict(call.arguments)) for call in found]
        self.found = found
        assert [p.call for p in self.pieces if p.kind == "tool"] == list(found)
        assert all(p.text for p in self.pieces)

    def order(self) -> list[tuple[str, str]]:
        """Kinds and texts in order, neighbours of a kind joined; ids left out, they are random."""
        merged: list[tuple[str, str]] = []
        for piece in self.pieces:
            if merged and merged[-1][0] == piece.kind != "tool":
                merged[-1] = (piece.kind, merged[-1][1] + piece.text)
            else:
                merged.append((piece.kind, piece.text))
        return merged


def call(name: str, **values: str) -> str:
    """A call as the checkpoint's template writes it."""
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


# ---- reasoning and content ---------------------------------------------------------------------


def test_report_1_the_end_of_thinking_alone_divides() -> None:
    answer = Answer("Two and two.\n</think>\n\n4", [], thinking=True)
    assert (answer.reasoning, answer.content) == ("Two and two.", "4")


def test_report_4_thinking_off_gives_content_only() -> None:
    answer = Answer("4</think> is no mark here", [], thinking=False)
    assert (answer.reasoning, answer.content) == ("", "4</think> is no mark here")


def test_report_5_truncated_thinking_stays_reasoning() -> None:
    answer = Answer("Let me think <tool_call>\n<function=f>", TOOLS, True, finish="length")
    assert answer.reasoning == "Let me think <tool_call>\n<function=f>"
    assert (answer.content, answer.calls) == ("", [])


@pytest.mark.parametrize("tail", ["<", "</th", "\n", "\n\n</think", "a\n"])
def test_report_6_the_held_tail_goes_to_the_active_field(tail: str) -> None:
    answer = Answer(["So", tail], [], thinking=True, finish="length")
    assert (answer.reasoning, answer.content) == ("So" + tail, "")
    answer = Answer(["So", tail], TOOLS, thinking=False, finish="length")
    assert (answer.reasoning, answer.content) == ("", "So" + tail)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_think_tag_that_leads_the_answer_opens_reasoning(thinking: bool) -> None:
    answer = Answer(["<thi", "nk>\nhm\n</think>\n\nyes"], [], thinking)
    assert (answer.reasoning, answer.content) == ("hm", "yes")
    later = Answer("a <think>b</think>", [], thinking=False)
    assert (later.reasoning, later.content) == ("", "a <think>b</think>")


def test_blank_lines_around_the_marks_belong_to_them() -> None:
    answer = Answer("\n\n a\n\n b \n\n</think>\n\n\n  c\n\nd \n\n", [], True)
    assert (answer.reasoning, answer.content) == (" a\n\n b ", "  c\n\nd \n\n")
    assert Answer("</think>4", [], True).order() == [("content", "4")]
    assert Answer("\n\n</think>\n\n", [], True).order() == []


def test_report_39_leading_space_is_the_same_in_pieces() -> None:
    for tools in ([], TOOLS):
        text = "\n\n  4\n"
        assert Answer(text, tools).content == Answer(list(text), tools).content == text


def test_given_its_id_only_the_token_ends_reasoning() -> None:
    end = TOKENIZER.added["</think>"]
    parser = OutputParser([], True, think_end=end)
    ids = TOKENIZER.encode_plain("It quotes </think> here.\n\n")
    ids += [end, *TOKENIZER.encode("\n\nThe tag is </think>.")]
    stream, seen = TOKENIZER.stream(), {"reasoning": "", "content": ""}
    for token in ids:
        for piece in parser.push(stream.push(token), token):
            seen[piece.kind] += piece.text
    for piece in parser.push(stream.finish()) + parser.finish("stop")[0]:
        seen[piece.kind] += piece.text
    assert seen == {"reasoning": "It quotes </think> here.", "content": "The tag is </think>."}


@pytest.mark.parametrize("first", ["", "<", "<think>", "<think>\n", "a"])
def test_the_closing_token_may_come_at_once(first: str) -> None:
    parser = OutputParser([], True, think_end=7)
    pieces = [*parser.push(first, 1), *parser.push("</think>", 7), *parser.push("b", 2)]
    assert [p.text for p in pieces if p.kind == "content"] == ["b"]
    shown = "".join(p.text for p in pieces if p.kind == "reasoning")
    assert shown == ("" if first.startswith("<think>") else first)


def test_report_36_and_37_whole_characters_in_every_field() -> None:
    text = "25 °C² 😀 ď\n</think>\n\n👩‍👩‍👧 ď" + call("f", s="👩‍👩‍👧 °")
    parser, stream, seen = OutputParser(TOOLS, True), TOKENIZER.stream(), []
    for token in TOKENIZER.encode(text):
        seen += parser.push(stream.push(token), token)
    tail, calls = parser.finish("stop")
    assert not any("\ufffd" in piece.text for piece in seen + tail)
    assert "".join(p.text for p in seen if p.kind == "reasoning") == "25 °C² 😀 ď"
    assert "".join(p.text for p in seen if p.kind == "content") == "👩‍👩‍👧 ď"
    assert calls[0].arguments == {"s": "👩‍👩‍👧 °"}


# ---- calls as reported -------------------------------------------------------------------------


def test_report_16_a_value_of_another_type_stays_text() -> None:
    assert Answer(call("f", x="2026-01-15")).calls == [("f", {"x": "2026-01-15"})]


def test_report_18_a_function_without_its_envelope() -> None:
    raw = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
    assert Answer(raw).calls == [("f", {"x": 1})]
    answer = Answer(f"I will.\n\n{raw}\n")
    assert (answer.content, answer.calls) == ("I will.", [("f", {"x": 1})])
    quoted = Answer(f"It is written as {raw}")
    assert (quoted.content, quoted.calls) == (f"It is written as {raw}", [])


def test_report_19_calls_work_with_and_without_tools() -> None:
    text = "Yes.\n\n" + call("f", x="1")
    assert Answer(text).order() == [("content", "Yes."), ("tool", '{"x": 1}')]
    assert Answer(text, []).order() == [("content", text)]


def test_report_20_booleans_in_python_spelling_and_strings_that_look_like_values() -> None:
    text = call("edit", path="a", old_string="false", new_string="42", replace_all="False")
    arguments = {"path": "a", "old_string": "false", "new_string": "42", "replace_all": False}
    assert Answer(text).calls == [("edit", arguments)]


def test_report_22_a_truncated_call_is_none() -> None:
    text = "Writing.\n\n" + call("write_file", path="a.py", content="print(1)\nprint(2)")
    for end in range(len("Writing.\n\n<tool_call>"), text.index("</function>") + 10):
        answer = Answer(text[:end], finish="length")
        assert (answer.order(), answer.calls) == ([("content", "Writing.")], []), text[:end]
    twice = text + "\n" + call("write_file", path="b.py", content="print(3)")
    assert len(Answer(twice[:-40], finish="length").calls) == 1


def test_report_23_only_declared_names_are_calls() -> None:
    for text in (
        'presidents=[{"name":"George Washington","arguments":{}}',
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        call("George Washington", x="1"),
        call("ff", x="1"),
        "<function=g>\n</function>",
        "<tool_call> is the tag; <function= too",
    ):
        answer = Answer(text)
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    "value",
    [
        "</think>",
        "a\n</think>\n\nb",
        "<think>",
        "<tool_call>",
        "<tool_call>\n<function=f>\n",
        "</tool_call>",
        "x </parameter> y",
        "x\n</parameter>\ny",
        "</function>",
        "x\n</function>\ny",
        "<parameter=path>",
        "a\n<parameter=nothing>\nb",
        "a\n<parameter=content>\nb",
        "<|im_end|>",
    ],
)
def test_report_25_marks_inside_a_value_are_part_of_it(value: str) -> None:
    text = "hm\n</think>\n\n" + call("write_file", path="a", content=value)
    for parts in (text, list(text)):
        answer = Answer(parts, thinking=True)
        assert answer.calls == [("write_file", {"path": "a", "content": value})]
        assert (answer.reasoning, answer.content) == ("hm", "")


HEAD = "<tool_call>\n<function=f>\n<parameter=x>\n1\n"


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "</parameter>\n</function>\n",
        HEAD + "</parameter>\n</function>",
        HEAD + "</parameter>\n</func",
        HEAD + "</parameter>\n",
        HEAD + "</parameter>",
        HEAD + "</parameter>\n</tool_call>",
        HEAD + "</function>\n</tool_call>",
        HEAD + "</function>",
        HEAD + "</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
        "\n\n<tool_call>\r\n  <function=f>\n\n<parameter=x>\n1\n</parameter>\n\n</function>\n \n</tool_call>\n",
    ],
)
def test_report_27_tags_missing_at_the_end(text: str) -> None:
    for parts in (text, list(text)):
        answer = Answer(parts)
        assert (answer.order(), answer.calls) == ([("tool", '{"x": 1}')], [("f", {"x": 1})])


def test_a_parameter_that_is_not_closed_ends_at_the_next_declared_one() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\na\n<b>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>"
    assert Answer(text).calls == [("f", {"s": "a\n<b>", "x": 2})]


def test_report_28_several_parameters_are_one_whole_json() -> None:
    answer = Answer(
        list(call("edit", path="a", old_string="ä\n", new_string="", replace_all="true"))
    )
    assert len(answer.pieces) == 1
    arguments = {"path": "a", "old_string": "ä\n", "new_string": "", "replace_all": True}
    assert (
        json.loads(answer.pieces[0].text) == json.loads(answer.found[0].arguments_json) == arguments
    )


def test_report_29_ids_and_order_of_several_calls() -> None:
    text = "Both.\n\n" + call("f", x="1") + "\n" + call("f", x="1") + "\n" + call("edit", path="p")
    answer = Answer(text)
    assert answer.calls == [("f", {"x": 1}), ("f", {"x": 1}), ("edit", {"path": "p"})]
    ids = [found.id for found in (*answer.found, *Answer(text).found)]
    assert len(set(ids)) == 6 and all(re.fullmatch(r"call_[0-9]_[0-9a-f]{16}", i) for i in ids)
    part = answer.found[0].as_message_part()
    assert part["type"] == "function" and part["function"] == {"name": "f", "arguments": '{"x": 1}'}


def test_several_functions_in_one_envelope() -> None:
    one = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n"
    assert Answer(f"<tool_call>\n{one}{one}</tool_call>").calls == [("f", {"x": 1})] * 2


def test_a_call_that_cannot_be_read_stays_content() -> None:
    for text in (
        "<tool_call>\n<function=f>\nJust text.\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1",
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f>\n<parameter=\n>1</parameter>",
        "<tool_call>\n<function=f>\n<parameter=" + "k" * 300 + ">",
    ):
        answer = Answer(text)
        assert (answer.content, answer.calls) == (text, [])
    after = Answer("<tool_call>\n<function=f>\nNo.\n" + call("f", x="1"))
    assert after.calls == [("f", {"x": 1})]
    assert after.content == "<tool_call>\n<function=f>\nNo."


def test_space_around_calls_is_markup_and_other_space_is_not() -> None:
    text = " a \n\n " + call("f") + "\n\n b \n"
    assert Answer(text).order() == [("content", " a"), ("tool", "{}"), ("content", "\n\n b \n")]
    assert Answer("\n\n" + call("f") + "\n\n").order() == [("tool", "{}")]
    assert Answer(call("f") + "\n\nb").order() == [("tool", "{}"), ("content", "b")]
    assert Answer(" a \n").order() == [("content", " a \n")]


@pytest.mark.parametrize("value", ["", "\n", " ", "a\n", "\na", "\n\na\n\n", "  a  ", "\ta\r\n"])
def test_whitespace_of_a_value_is_exact(value: str) -> None:
    for parts in (call("f", s=value), list(call("f", s=value))):
        assert Answer(parts).calls == [("f", {"s": value})]


def test_keys_undeclared_odd_and_twice() -> None:
    odd = tool("f", **{"a": STRING, "a>b": INTEGER, "</think>": INTEGER})
    text = call("f", **{"a": "1", "a>b": "2", "</think>": "3", "other": "4"})
    for parts in (text, list(text)):
        assert Answer(parts, [odd]).calls == [
            ("f", {"a": "1", "a>b": 2, "</think>": 3, "other": "4"})
        ]
    twice = call("f", x="1").replace("</function>", "<parameter=x>\n2\n</parameter>\n</function>")
    assert Answer(twice).calls == [("f", {"x": 2})]


def test_a_tool_without_parameters_and_a_bare_function() -> None:
    for declared in ({"name": "now"}, {"type": "function", "function": {"name": "now"}}):
        assert Answer(call("now"), [declared]).calls == [("now", {})]
        assert Answer(call("now", a="1"), [declared]).calls == [("now", {"a": "1"})]


# ---- types -------------------------------------------------------------------------------------

ROOT = {
    "$defs": {
        "Mode": {"enum": ["1", "true"]},
        "Deep~/": {"x": {"type": "object"}},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
}
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "false", "false"),
        ({"type": "string"}, ' {"a": 1} ', ' {"a": 1} '),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, " -7\n", -7),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "007", "007"),
        ({"type": "integer"}, "9" * 30, int("9" * 30)),
        ({"type": "integer"}, "9" * 9999, "9" * 9999),
        ({"type": "integer"}, "٣", "٣"),
        ({"type": "integer"}, "", ""),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "-2", -2),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, '{"a": [1, null, "é"]}', {"a": [1, None, "é"]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"type": "object"}, '{"a": 1e999}', '{"a": 1e999}'),
        ({"type": "object"}, '{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[" * 10**5, "[" * 10**5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "boolean"]}, "yes", "yes"),
        (NULLABLE, "null", None),
        (NULLABLE, "None", "None"),
        (NULLABLE, "42", "42"),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, '["a"]', ["a"]),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "a, b", "a, b"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "5", 5),
        ({"allOf": [{"description": "x"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {}]}, "5", "5"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"enum": [1, 2, "many"]}, "2", 2),
        ({"enum": [1, 2, "many"]}, "many", "many"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [True, None, 1.5, [], {}]}, "1.5", 1.5),
        ({"const": 3}, "3", 3),
        ({"$ref": "#/$defs/Mode"}, "1", "1"),
        ({"$ref": "#/$defs/Deep~0~1/x"}, "{}", {}),
        ({"$ref": "#/$defs/None"}, "5", "5"),
        ({"$ref": "https://example.org/x"}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({}, "5", "5"),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "[1]", [1]),
        ({}, "[1", "[1"),
        (True, "5", "5"),
        ({"type": 5}, "5", "5"),
        ({"type": ["any"]}, "5", "5"),
        ({"type": "any"}, "[5]", [5]),
    ],
)
def test_values_by_schema(schema: Any, text: str, value: Any) -> None:
    found = typed_value(text, schema, ROOT)
    assert found == value and type(found) is type(value)


@given(st.text(max_size=12), st.recursive(st.sampled_from([{}, True, None, 5, "string", {"type": "integer"}, {"$ref": "#"}]), lambda s: st.dictionaries(st.sampled_from(["type", "anyOf", "allOf", "enum", "const", "$ref"]), st.one_of(s, st.lists(s, max_size=3)), max_size=3), max_leaves=6))  # fmt: skip
@SLOW
def test_any_schema_and_text_give_a_json_value(text: str, schema: Any) -> None:
    value = typed_value(text, schema, schema if isinstance(schema, dict) else {})
    assert json.loads(json.dumps(value, allow_nan=False)) == value


# ---- any text, any division --------------------------------------------------------------------

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=f>", "<function=write_file>", "<function=", "</function>",
    "<parameter=x>", "<parameter=s>", "<parameter=content>", "<parameter=", "</parameter>", "<think>", "</think>",
    "\n", "\n\n", " ", "f", ">", "<", "</", "1", "true", "text", "é😀", "<tool", "\r\n", "\x1c", "{}",
]  # fmt: skip
WILD = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
FINISHES = st.sampled_from(["stop", "length"])


def divided(draw: Any, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


@given(WILD, st.booleans(), FINISHES, st.data())
@settings(SLOW, max_examples=600)
def test_never_raises_and_any_division_gives_the_same(
    text: str, thinking: bool, finish: str, data: Any
) -> None:
    once = Answer(text, TOOLS, thinking, finish)
    for parts in (divided(data.draw, text), list(text)):
        other = Answer(parts, TOOLS, thinking, finish)
        assert other.order() == once.order() and other.calls == once.calls


@given(WILD, st.booleans(), FINISHES)
@settings(SLOW, max_examples=300)
def test_nothing_is_lost_without_tools(text: str, thinking: bool, finish: str) -> None:
    answer = Answer(text, [], thinking, finish)
    words = re.sub(r"\s|</?think>", "", text)
    assert re.sub(r"\s|</?think>", "", answer.reasoning + answer.content) == words


@given(WILD)
@settings(SLOW, max_examples=300)
def test_text_without_a_declared_function_stays_as_it_is(text: str) -> None:
    if text.startswith("<think>"):
        return
    answer = Answer(text, [tool("another")])
    assert (answer.content, answer.reasoning, answer.calls) == (text, "", [])


PROSE = st.text("ab é.\n", max_size=12)
# Values that hold no end of a value: `</parameter>` with a tag after it is one, whoever wrote it.
VALUE = st.lists(
    st.sampled_from(["a", "\n", " ", "<", ">", "</", "é😀", "{", "</think>", "<tool_call>", "</tool_call>", "</parameter", "<function=f"]),
    max_size=8,
).map("".join).filter(lambda v: not re.search(r"</parameter>\s*</tool_call>", v))  # fmt: skip
CALLS = st.lists(
    st.tuples(st.sampled_from(["write_file", "edit"]), VALUE, VALUE), min_size=1, max_size=3
)


@given(PROSE, PROSE, CALLS, st.data())
@settings(SLOW, max_examples=300)
def test_whole_calls_leak_no_markup_and_keep_their_values(
    reasoning: str, prose: str, calls: list[tuple[str, str, str]], data: Any
) -> None:
    expected = [
        (name, {"path": one, "content" if name == "write_file" else "new_string": two})
        for name, one, two in calls
    ]
    markup = "\n".join(call(name, **values) for name, values in expected)
    text = f"{reasoning}\n</think>\n\n{prose}\n\n{markup}"
    answer = Answer(divided(data.draw, text), thinking=True)
    assert answer.calls == expected
    assert answer.reasoning == reasoning.strip("\n")
    assert answer.content == prose.lstrip("\n").rstrip() if prose.strip() else not answer.content
    # Cut anywhere, only whole calls are left, and nothing of the others.
    cut = data.draw(st.integers(0, len(text)))
    short = Answer(text[:cut], thinking=True, finish="length")
    assert short.calls == expected[: len(short.calls)]
    assert answer.content.startswith(re.sub(r"\s*(<[a-z_]*|<function=)?$", "", short.content))
    assert "<tool_call>" not in short.content and "<parameter" not in short.content


@given(
    VALUE.filter(str.strip), st.dictionaries(st.sampled_from(["s", "x", "b"]), VALUE, max_size=3)
)
@SLOW
def test_what_the_template_writes_is_read_back(prose: str, values: dict[str, str]) -> None:
    if any(mark in prose for mark in ("<tool_call>", "<function=", "<think>", "</think>")):
        prose = "text"
    written: dict[str, Any] = dict(values)
    written |= {"x": 5, "b": True} if "x" in values else {"b": False}
    part = ToolCall("call_0", "f", written).as_message_part()
    answer = {"role": "assistant", "content": prose, "reasoning_content": "r", "tool_calls": [part]}
    talk = [{"role": "user", "content": "q"}]
    asked = TEMPLATE.render(talk, TOOLS)
    told = TEMPLATE.render([*talk, answer], TOOLS, add_generation_prompt=False)
    assert told.text.startswith(asked.text) and told.ids[: len(asked.ids)] == asked.ids
    output = told.text[len(asked.text) :].removesuffix("<|im_end|>\n")
    read = Answer(output, TOOLS, asked.starts_in_thinking)
    assert read.calls == [("f", written)]
    assert (read.reasoning, read.content) == ("r", prose.strip())


def test_a_long_call_in_small_pieces_takes_linear_time() -> None:
    content = "some <b>words</b> of a file\n" * 8000
    text = call("write_file", path="a", content=content)
    start = time.monotonic()
    answer = Answer([text[i : i + 4] for i in range(0, len(text), 4)])
    assert answer.calls == [("write_file", {"path": "a", "content": content})]
    assert time.monotonic() - start < 20
    start = time.monotonic()
    Answer("<tool_call>\n<function=f>\n<parameter=x>\n" * 5000)
    Answer([" \n"] * 20000)
    assert time.monotonic() - start < 20
