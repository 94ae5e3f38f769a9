"""Owns the tools of the training data: schemas, questions that need them, results, answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import words as w


@dataclass(frozen=True)
class Use:
    """One tool as declared, one use of it, what it gives back and what to say then."""

    declared: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: str
    answer: str


def declare(name: str, description: str, required: list[str], /, **kinds: Any) -> dict[str, Any]:
    properties = {k: v if isinstance(v, dict) else {"type": v} for k, v in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def city(rng: random.Random) -> str:
    return rng.choice(w.CITIES) if rng.random() < 0.75 else w.made_up(rng).capitalize()


def described(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Schemas of others have descriptions of their parameters, or have not."""
    if rng.random() < 0.4:
        properties = schema["function"]["parameters"]["properties"]
        for name, kind in properties.items():
            properties[name] = {
                **kind,
                "description": rng.choice(("The {n}.", "{n} to use", "Name of the {n}")).format(
                    n=name
                ),
            }
    if rng.random() < 0.15:
        del schema["function"]["description"]
    return schema


def weather(rng: random.Random) -> Use:
    name, key = (
        rng.choice(("get_weather", "weather", "current_weather", "get_forecast")),
        rng.choice(("city", "city", "location", "place")),
    )
    where, degrees = city(rng), rng.randint(-15, 35)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))
    kinds: dict[str, Any] = {key: "string"}
    arguments: dict[str, Any] = {key: where}
    question = rng.choice(
        (
            "What is the weather in {c}?",
            "How is the weather in {c}?",
            "Is it warm in {c}?",
            "Weather in {c}, please.",
            "Do I need a coat in {c}?",
        )
    ).format(c=where)
    if rng.random() < 0.3:
        kinds["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.6:
            unit = rng.choice(("celsius", "fahrenheit"))
            question, arguments["unit"] = f"What is the weather in {where} in {unit}?", unit
    result = json.dumps({"temperature": degrees, "sky": sky})
    return Use(
        declare(name, "The weather of a place now", [key], **kinds),
        question,
        arguments,
        result,
        f"In {where} it is {sky} with {degrees} degrees.",
    )


def calculator(rng: random.Random) -> Use:
    a, b, op = rng.randint(100, 9999), rng.randint(11, 999), rng.choice("+-*")
    name, key = (
        rng.choice(("calculate", "calculator", "evaluate")),
        rng.choice(("expression", "formula")),
    )
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    question = rng.choice(
        ("What is {e}?", "Use the calculator for {e}.", "Compute {e} with the tool.")
    ).format(e=f"{a} {op} {b}")
    return Use(
        declare(name, "Works out an expression", [key], **{key: "string"}),
        question,
        {key: f"{a} {op} {b}"},
        str(value),
        f"{a} {op} {b} = {value}",
    )


def adder(rng: random.Random) -> Use:
    a, b = rng.randint(100, 9999), rng.randint(100, 9999)
    name = rng.choice(("add_numbers", "add", "sum"))
    return Use(
        declare(name, "Adds two numbers", ["a", "b"], a="integer", b="integer"),
        rng.choice((f"Add {a} and {b} with the tool.", f"Use {name} for {a} and {b}.")),
        {"a": a, "b": b},
        str(a + b),
        f"The sum of {a} and {b} is {a + b}.",
    )


def timer(rng: random.Random) -> Use:
    minutes = rng.randint(1, 90)
    name = rng.choice(("set_timer", "start_timer"))
    kinds, arguments = {"minutes": "integer"}, {"minutes": minutes}
    question = rng.choice(
        (
            "Set a timer for {m} minutes.",
            "Wake me in {m} minutes.",
            "Please start a timer of {m} minutes.",
        )
    ).format(m=minutes)
    return Use(
        declare(name, "Starts a timer", ["minutes"], **kinds),
        question,
        arguments,
        '{"ok": true}',
        f"The timer runs for {minutes} minutes.",
    )


def clock(rng: random.Random) -> Use:
    where, hour, minute = city(rng), rng.randint(0, 23), rng.randint(0, 59)
    key = rng.choice(("city", "place", "timezone"))
    question = rng.choice(
        ("What time is it in {c}?", "Tell me the time in {c}.", "How late is it in {c}?")
    ).format(c=where)
    return Use(
        declare(
            rng.choice(("get_time", "current_time", "time_in")),
            "The time in a place",
            [key],
            **{key: "string"},
        ),
        question,
        {key: where},
        f"{hour:02}:{minute:02}",
        f"It is {hour:02}:{minute:02} in {where}.",
    )


def message(rng: random.Random) -> Use:
    to, text = w.name(rng), " ".join(w.word(rng) for _ in range(rng.randint(2, 6)))
    name, who, what = rng.choice(
        (
            ("send_message", "to", "text"),
            ("send_mail", "recipient", "body"),
            ("notify", "person", "message"),
        )
    )
    question = rng.choice(
        ('Send {n} the message "{t}".', 'Write to {n}: "{t}"', 'Tell {n} "{t}".')
    ).format(n=to, t=text)
    return Use(
        declare(name, "Sends a text to a person", [who, what], **{who: "string", what: "string"}),
        question,
        {who: to, what: text},
        '{"sent": true}',
        f"I have sent it to {to}.",
    )


def lamp(rng: random.Random) -> Use:
    room, on = (
        rng.choice(("kitchen", "bedroom", "garden", "hall", "bathroom", "office", "cellar")),
        rng.random() < 0.5,
    )
    name, key = rng.choice((("set_light", "on"), ("switch_lamp", "state"), ("light", "on")))
    word = "on" if on else "off"
    question = rng.choice(
        (
            "Turn {w} the light in the {r}.",
            "Please switch {w} the {r} lamp.",
            "Light {w} in the {r}!",
        )
    ).format(w=word, r=room)
    return Use(
        declare(name, "Switches a light", ["room", key], room="string", **{key: "boolean"}),
        question,
        {"room": room, key: on},
        '{"ok": true}',
        f"The light in the {room} is {word}.",
    )


def search(rng: random.Random) -> Use:
    topic = " ".join(w.word(rng) for _ in range(rng.randint(1, 3)))
    found = " ".join(w.word(rng) for _ in range(rng.randint(3, 6)))
    name, key = (
        rng.choice(("search", "web_search", "look_up")),
        rng.choice(("query", "query", "text", "topic")),
    )
    kinds, arguments = {key: "string"}, {key: topic}
    question = rng.choice(("Search for {t}.", "Look up {t}.", "Find something about {t}.")).format(
        t=topic
    )
    if rng.random() < 0.3:
        limit = rng.randint(1, 20)
        kinds["limit"], arguments["limit"] = "integer", limit  # type: ignore[assignment]
        question = f"Search for {topic} and show {limit} results."
    return Use(
        declare(name, "Searches for a text", [key], **kinds),
        question,
        arguments,
        found,
        f"I found this: {found}.",
    )


def todo(rng: random.Random) -> Use:
    item = f"{rng.choice(w.VERBS)} the {rng.choice(w.THINGS + w.NOUNS)}"
    priority = rng.choice(("low", "medium", "high"))
    kinds: dict[str, Any] = {
        "title": "string",
        "priority": {"type": "string", "enum": ["low", "medium", "high"]},
    }
    question = rng.choice(
        ('Add "{i}" with {p} priority to my list.', 'New task of {p} priority: "{i}"')
    ).format(i=item, p=priority)
    return Use(
        declare(
            rng.choice(("add_task", "create_todo")), "Adds a task to the list", ["title"], **kinds
        ),
        question,
        {"title": item, "priority": priority},
        json.dumps({"id": rng.randint(1, 99)}),
        f'"{item}" is on the list.',
    )


def convert(rng: random.Random) -> Use:
    amount, value = rng.randint(1, 999), rng.randint(1, 999)
    one, two = rng.sample(("euro", "dollar", "yen", "pound", "franc", "krona"), 2)
    question = rng.choice(
        ("How many {b}s are {a} {o}s?", "Convert {a} {o}s to {b}s.", "Change {a} {o}s into {b}s.")
    ).format(a=amount, o=one, b=two)
    kinds = {"amount": "number", "source": "string", "target": "string"}
    return Use(
        declare(rng.choice(("convert", "exchange")), "Converts money", list(kinds), **kinds),
        question,
        {"amount": amount, "source": one, "target": two},
        str(value),
        f"{amount} {one}s are {value} {two}s.",
    )


def trip(rng: random.Random) -> Use:
    start, goal = city(rng), city(rng)
    minutes = rng.randint(20, 900)
    one, two = rng.choice((("from", "to"), ("start", "goal"), ("origin", "destination")))
    question = rng.choice(
        (
            "How long does it take from {a} to {b}?",
            "Find a train from {a} to {b}.",
            "I want to travel from {a} to {b}.",
        )
    ).format(a=start, b=goal)
    return Use(
        declare(
            rng.choice(("find_train", "route", "travel_time")),
            "Finds a way between two cities",
            [one, two],
            **{one: "string", two: "string"},
        ),
        question,
        {one: start, two: goal},
        json.dumps({"minutes": minutes}),
        f"From {start} to {goal} it takes {minutes} minutes.",
    )


def shopping(rng: random.Random) -> Use:
    items = rng.sample(w.FOODS, rng.randint(1, 4))
    key = rng.choice(("items", "products"))
    question = rng.choice(
        ("Put {i} on the shopping list.", "Please buy {i}.", "Order {i}.")
    ).format(i=", ".join(items))
    kinds = {key: {"type": "array", "items": {"type": "string"}}}
    return Use(
        declare(
            rng.choice(("add_to_cart", "shopping_list", "order")),
            "Adds things to buy",
            [key],
            **kinds,
        ),
        question,
        {key: items},
        '{"ok": true}',
        f"I have added {', '.join(items)}.",
    )


def price(rng: random.Random) -> Use:
    thing, cost = rng.choice(w.THINGS + w.FOODS), rng.randint(1, 300)
    key = rng.choice(("product", "item", "name"))
    question = rng.choice(
        ("What does the {t} cost?", "How much is the {t}?", "Find the price of the {t}.")
    ).format(t=thing)
    return Use(
        declare(
            rng.choice(("get_price", "price_of")),
            "The price of a product",
            [key],
            **{key: "string"},
        ),
        question,
        {key: thing},
        json.dumps({"price": cost}),
        f"The {thing} costs {cost}.",
    )


def dice(rng: random.Random) -> Use:
    sides = rng.choice((4, 6, 8, 10, 12, 20, 100))
    value = rng.randint(1, sides)
    question = rng.choice(("Roll a die with {s} sides.", "Throw a {s} sided die.")).format(s=sides)
    return Use(
        declare(rng.choice(("roll_dice", "roll")), "Throws a die", ["sides"], sides="integer"),
        question,
        {"sides": sides},
        str(value),
        f"The die shows {value}.",
    )


KNOWN: list[Callable[[random.Random], Use]] = [
    *(
        weather,
        weather,
        calculator,
        adder,
        timer,
        clock,
        message,
        lamp,
        search,
        todo,
        convert,
        trip,
    ),
    *(shopping, price, dice),
]


def made_up_tool(rng: random.Random) -> Use:
    """A tool that nobody knows: its name, keys and values are in the question."""
    noun = w.made_up(rng) if rng.random() < 0.5 else rng.choice(w.NOUNS + w.THINGS)
    verb = rng.choice(
        [*w.VERBS, "get", "set", "make", "check", "update", "delete", "create", "list"]
    )
    name = rng.choice(("{v}_{n}", "{v}_{n}", "{n}", "{v}{N}")).format(
        v=verb, n=noun, N=noun.capitalize()
    )
    kinds: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    shown = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        key = rng.choice(
            (w.word(rng), w.word(rng), "id", "name", "size", "colour", "level", "date", "count")
        )
        if key in kinds:
            continue
        kind = rng.choice(("string", "string", "integer", "number", "boolean"))
        value: Any = {
            "string": lambda: " ".join(w.word(rng) for _ in range(rng.choice((1, 1, 2)))),
            "integer": lambda: rng.randint(0, 9999),
            "number": lambda: rng.randint(0, 999) / rng.choice((10, 10, 2)),
            "boolean": lambda: rng.random() < 0.5,
        }[kind]()
        kinds[key], arguments[key] = kind, value
        shown.append(f"{key} {value if isinstance(value, str) else json.dumps(value)}")
    said = " and ".join(shown)
    question = rng.choice(
        ("Use {n} with {s}.", "Call {n} with {s}.", "Please {v} the {o} with {s}.", "{V} {o}: {s}")
    ).format(n=name, s=said, v=verb, V=verb.capitalize(), o=noun)
    schema = declare(
        name, f"Can {verb} the {noun}", list(kinds) if rng.random() < 0.7 else [], **kinds
    )
    result = w.word(rng)
    return Use(schema, question, arguments, result, f"The result is {result}.")


def others(rng: random.Random, count: int, beside: Use | None) -> list[Use]:
    """Further tools that do something else."""
    used = (
        {beside.declared["function"]["name"], beside.declared["function"].get("description")}
        if beside
        else set()
    )
    found: list[Use] = []
    while len(found) < count:
        use = rng.choice(KNOWN)(rng) if rng.random() < 0.7 else made_up_tool(rng)
        function = use.declared["function"]
        if function["name"] in used or function["description"] in used:
            continue
        used |= {function["name"], function.get("description")}
        described(rng, use.declared)
        found.append(use)
    return found
