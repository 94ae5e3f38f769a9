"""Owns the training data: conversations drawn from a seed, and their held-out part.

A sample belongs to the held-out split by a hash of what makes it one (operands, names, words), so
that no held-out question is ever in the training data, however long that runs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import stories
import tool_data
import words as w

HELD_OUT = 13  # of 256


@dataclass
class Sample:
    """A conversation that ends with the wanted answer; `raw` is a text without turns instead.

    exact: there is one right answer, so that greedy decoding can be judged word for word.
    """

    task: str
    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False
    exact: bool = True
    raw: tuple[str, str] | None = None


def held_out(key: str) -> bool:
    return hashlib.sha1(key.encode()).digest()[0] < HELD_OUT


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, reasoning: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a patient teacher.",
    "You are a careful assistant who checks every answer.",
    "Be kind and clear.",
    "You help children with their questions.",
    "Keep your answers short.",
]


def with_system(rng: random.Random, sample: Sample, share: float = 0.3) -> Sample:
    if sample.raw is None and rng.random() < share:
        sample.messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    return sample


# ---- stories ------------------------------------------------------------------------------------

ASK = (
    "Tell me a story about {a}.",
    "Tell me a story about {a}.",
    "Write a short story about {a}.",
    "Please tell me a little story about {a}.",
    "Can you tell me a story about {a}?",
    "I would like a story about {a}.",
    "Make up a story about {a}.",
    "A story about {a}, please.",
)


def ask_story(rng: random.Random) -> tuple[str, stories.Story]:
    if rng.random() < 0.25:
        thing = rng.choice(w.THINGS)
        tale = stories.story(rng, thing=thing)
        return rng.choice(ASK).format(a=f"{w.a(tale.subject)} and {w.a(thing)}"), tale
    if rng.random() < 0.04:
        return rng.choice(("Tell me a story.", "Tell me a short story, please.")), stories.story(
            rng
        )
    tale = stories.story(rng)
    return rng.choice(ASK).format(a=w.a(tale.subject)), tale


def story(rng: random.Random) -> Sample:
    question, tale = ask_story(rng)
    if rng.random() < 0.35:
        text = question if rng.random() < 0.9 else ""
        return Sample(
            "story", tale.key, raw=(text, ("\n" if text else "") + tale.text), exact=False
        )
    thinking = rng.random() < 0.5
    reasoning = f"The user wants a story. I will tell how {tale.summary}." if thinking else ""
    sample = Sample(
        "story", tale.key, [user(question), reply(tale.text, reasoning)], [], thinking, False
    )
    if rng.random() < 0.3:
        ask, answer = rng.choice(tale.facts)
        sample.messages += [user(ask), reply(answer, "The story says it." if thinking else "")]
    return with_system(rng, sample)


def reading(rng: random.Random) -> Sample:
    tale = stories.story(rng)
    facts = rng.sample(tale.facts, rng.randint(1, len(tale.facts)))
    form = rng.choice(
        (
            "{t}\n\n{q}",
            "Read this story.\n\n{t}\n\n{q}",
            "{q}\n\n{t}",
            "Here is a story.\n{t}\nQuestion: {q}",
        )
    )
    thinking = rng.random() < 0.4
    thought = "I look for it in the story." if thinking else ""
    messages = [user(form.format(t=tale.text, q=facts[0][0])), reply(facts[0][1], thought)]
    for question, answer in facts[1:]:
        messages += [user(question), reply(answer, thought)]
    return with_system(rng, Sample("reading", "read " + tale.key, messages, [], thinking))


# ---- small talk and facts -----------------------------------------------------------------------

TALK = [
    (
        ("Hello!", "Hi!", "Hi there.", "Good morning!", "Hello, how are you?", "Hey"),
        ("Hello! How can I help you?",),
    ),
    (("Thank you!", "Thanks a lot.", "Thank you, that helped.", "Thanks!"), ("You are welcome!",)),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"), ("Goodbye! Come back soon.",)),
    (
        ("How are you?", "How are you today?", "How do you feel?"),
        ("I am fine, thank you. How are you?",),
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?"),
        (
            "I can tell little stories, do sums, sort, count, remember what you tell me and call tools.",
        ),
    ),
    (("Are you a human?", "Are you a person?"), ("No, I am a very small language model.",)),
    (
        ("What are you?", "What kind of model are you?"),
        ("I am a very small language model that runs on your machine.",),
    ),
    (
        ("I am sad.", "I feel sad today.", "I am tired."),
        ("I am sorry to hear that. Would you like a story?",),
    ),
    (
        ("I am happy!", "I feel great today.", "Today is a good day."),
        ("That is wonderful! What made your day?",),
    ),
    (("Can you sing?", "Can you dance?", "Can you cook?"), ("No, I can only read and write.",)),
    (
        ("Tell me a joke.", "Do you know a joke?"),
        ("Why did the clock go to school? It wanted to learn to tell the time.",),
    ),
]


def small_turn(rng: random.Random) -> tuple[str, str, str]:
    """(question, answer, reasoning) that need nothing before them."""
    draw = rng.random()
    if draw < 0.4:
        asks, answers = rng.choice(TALK)
        return (
            rng.choice(asks),
            rng.choice(answers),
            "This is small talk. I answer in a friendly way.",
        )
    if draw < 0.7:
        question, answer = rng.choice(w.FACTS)
        return question, answer, "I know this."
    if draw < 0.85:
        one, two = rng.choice(w.OPPOSITES)
        if rng.random() < 0.5:
            one, two = two, one
        return f"What is the opposite of {one}?", f"The opposite of {one} is {two}.", "I know this."
    a, b = rng.randint(0, 9), rng.randint(0, 9)  # of one digit: nothing of these is held out
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}", addition(a, b)


def talk(rng: random.Random) -> Sample:
    turns = [small_turn(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    thinking = rng.random() < 0.5
    messages = []
    for question, answer, reasoning in turns:
        messages += [user(question), reply(answer, reasoning if thinking else "")]
    key = "talk " + " ".join(t[0] for t in turns) if len(turns) > 1 else "talk"
    return with_system(rng, Sample("talk", key, messages, [], thinking, False))


# ---- arithmetic ---------------------------------------------------------------------------------


def addition(a: int, b: int) -> str:
    """Column by column, from the right."""
    steps, carry, x, y = [], 0, a, b
    while True:
        p, q = x % 10, y % 10
        total = p + q + carry
        line = f"{p} + {q}" + (f" + {carry}" if carry else "") + f" = {total}"
        carry = total // 10
        x, y = x // 10, y // 10
        last = not x and not y
        steps.append(line + (f", write {total % 10}, carry {carry}" if carry and not last else ""))
        if last:
            return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def subtraction(a: int, b: int) -> str:
    steps, borrow, x, y = [], 0, a, b
    while True:
        p, q = x % 10 - borrow, y % 10
        borrow = int(p < q)
        shown = f"1{p}" if borrow and p >= 0 else str(p + 10 * borrow)
        steps.append(f"{shown} - {q} = {p + 10 * borrow - q}" + (", borrow 1" if borrow else ""))
        x, y = x // 10, y // 10
        if not x and not y:
            return "; ".join(steps) + f". So {a} - {b} = {a - b}."


def product(a: int, b: int) -> str:
    if a < 10:
        return f"I know that {a} * {b} = {a * b}."
    tens, ones = a // 10 * 10, a % 10
    return (
        f"{tens} * {b} = {tens * b}; {ones} * {b} = {ones * b}; {tens * b} + {ones * b} = {a * b}."
    )


SUMS = (
    "What is {e}?",
    "{e} = ?",
    "Compute {e}.",
    "How much is {e}?",
    "Please work out {e}.",
    "{e}",
)


def arithmetic(rng: random.Random) -> Sample:
    draw, two = rng.random(), lambda: rng.randint(10, 99)
    if draw < 0.5:
        a, b = (two(), two()) if rng.random() < 0.75 else (rng.randint(0, 999), rng.randint(0, 999))
        op, value, how = "+", a + b, addition(a, b)
        task = "addition" if 10 <= a < 100 and 10 <= b < 100 else "long addition"
    elif draw < 0.8:
        a, b = (two(), two()) if rng.random() < 0.75 else (rng.randint(0, 999), rng.randint(0, 99))
        a, b = max(a, b), min(a, b)
        op, value, how, task = "-", a - b, subtraction(a, b), "subtraction"
    else:
        a, b = rng.choice((rng.randint(0, 12), two())), rng.randint(0, 9)
        op, value, how, task = "*", a * b, product(a, b), "multiplication"
    key = f"{a} {op} {b}"
    thinking = rng.random() < 0.5
    if rng.random() < 0.15 and op != "*":
        name, thing = w.name(rng), rng.choice(w.THINGS) + "s"
        verb = "gets" if op == "+" else "gives away"
        question = f"{name} has {a} {thing} and {verb} {b}. How many {thing} does {name} have now?"
        answer, task = f"{name} has {value} {thing}.", "word problem"
    else:
        question, answer = rng.choice(SUMS).format(e=f"{a} {op} {b}"), f"{a} {op} {b} = {value}"
        if rng.random() < 0.1:
            question = {
                "+": f"Add {a} and {b}.",
                "-": f"Subtract {b} from {a}.",
                "*": f"Multiply {a} by {b}.",
            }[op]
    messages = [user(question), reply(answer, how if thinking else "")]
    return with_system(rng, Sample(task, key, messages, [], thinking), 0.15)


def comparing(rng: random.Random) -> Sample:
    a, b = rng.sample(range(1, 1000 if rng.random() < 0.5 else 100), 2)
    largest = rng.random() < 0.5
    word, value = ("larger", max(a, b)) if largest else ("smaller", min(a, b))
    thinking = rng.random() < 0.4
    reasoning = f"{min(a, b)} < {max(a, b)}." if thinking else ""
    messages = [
        user(f"Which number is {word}, {a} or {b}?"),
        reply(f"{value} is {word}.", reasoning),
    ]
    return Sample("comparing", f"compare {a} {b}", messages, [], thinking)


# ---- counting, copying, sorting -----------------------------------------------------------------


def counting(rng: random.Random) -> Sample:
    draw = rng.random()
    thinking = rng.random() < 0.3
    if draw < 0.6:
        start, length = rng.randint(0, 120), rng.randint(3, 25)
        step = rng.choice((1, 1, 1, 2, 5, 10))
        numbers = [start + step * i for i in range(length)]
        if rng.random() < 0.3:
            numbers.reverse()
        by = "" if step == 1 else f" in steps of {step}"
        question = rng.choice(
            ("Count from {a} to {b}{s}.", "Please count from {a} to {b}{s}.")
        ).format(a=numbers[0], b=numbers[-1], s=by)
        answer, reasoning = (
            ", ".join(map(str, numbers)),
            f"The first is {numbers[0]}, the last is {numbers[-1]}.",
        )
        key = f"count {numbers[0]} {numbers[-1]} {step}"
    elif draw < 0.8:
        items = [w.word(rng) for _ in range(rng.randint(2, 14))]
        question = rng.choice(
            ("How many words are in this list: {l}?", "Count the words: {l}.")
        ).format(l=", ".join(items))
        answer = f"There are {len(items)} words."
        reasoning = ", ".join(f"{i} {item}" for i, item in enumerate(items, 1)) + "."
        thinking, key = True, "words " + " ".join(items)
    else:
        kinds = [w.word(rng) for _ in range(rng.randint(2, 4))]
        items = [rng.choice(kinds) for _ in range(rng.randint(3, 12))]
        wanted = rng.choice(kinds)
        count = items.count(wanted)
        question = f"How often does {wanted} come in this list: {', '.join(items)}?"
        answer = f"{wanted} comes {count} time{'' if count == 1 else 's'}."
        seen, marks = 0, []
        for item in items:
            seen += item == wanted
            marks.append(f"{item} {seen}")
        reasoning, thinking, key = ", ".join(marks) + ".", True, f"often {wanted} {' '.join(items)}"
    messages = [user(question), reply(answer, reasoning if thinking else "")]
    return with_system(rng, Sample("counting", key, messages, [], thinking), 0.15)


COPY = (
    "Repeat after me: {t}",
    "Copy this text: {t}",
    "Say exactly this: {t}",
    "Repeat this: {t}",
    "Write this again:\n{t}",
)


def copying(rng: random.Random) -> Sample:
    draw, length = rng.random(), rng.randint(3, 30)
    if draw < 0.45:
        text = " ".join(w.word(rng) for _ in range(length))
    elif draw < 0.65:
        text = " ".join(w.made_up(rng) for _ in range(max(3, length // 2)))
    elif draw < 0.8:
        text = "".join(rng.choice("0123456789") for _ in range(length))
    elif draw < 0.9:
        alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(4, 16)))
    else:
        text = rng.choice(stories.story(rng).text.replace("\n\n", " ").split(". ")) + "."
    thinking = rng.random() < 0.3
    reasoning = "I repeat it word for word." if thinking else ""
    messages = [user(rng.choice(COPY).format(t=text)), reply(text, reasoning)]
    return with_system(rng, Sample("copying", "copy " + text, messages, [], thinking), 0.2)


def sorting(rng: random.Random) -> Sample:
    down = rng.random() < 0.2
    if rng.random() < 0.6:
        items = [str(rng.randint(0, rng.choice((9, 99, 999)))) for _ in range(rng.randint(3, 10))]
        ordered = sorted(items, key=int, reverse=down)
        what = "numbers"
    else:
        items = list(
            dict.fromkeys(rng.choice(w.NOUNS + w.ANIMALS) for _ in range(rng.randint(3, 8)))
        )
        ordered, what = sorted(items, reverse=down), "words"
    order = (" from large to small" if what == "numbers" else " backwards") if down else ""
    question = rng.choice(
        ("Sort these {w}{o}: {l}", "Please sort the {w} {l}{o}.", "Put these {w} in order{o}: {l}")
    )
    thinking = rng.random() < 0.3
    reasoning = f"There are {len(items)} {what}." if thinking else ""
    messages = [
        user(question.format(w=what, o=order, l=", ".join(items))),
        reply(", ".join(ordered), reasoning),
    ]
    return with_system(
        rng, Sample("sorting", "sort " + " ".join(items), messages, [], thinking), 0.15
    )


# ---- remembering --------------------------------------------------------------------------------

RECALL = [
    ("Remember these codes.", "{k}: {v}", "What is the code of {k}?", "{v}"),
    ("Here is a list.", "{k} = {v}", "What is {k}?", "{v}"),
    (
        "These are the numbers of the houses.",
        "{k} lives in house {v}.",
        "In which house does {k} live?",
        "{k} lives in house {v}.",
    ),
    ("Learn this table.", "{k} -> {v}", "What belongs to {k}?", "{v}"),
    ("Who likes what?", "{k} likes {v}.", "What does {k} like?", "{k} likes {v}."),
]


def recall(rng: random.Random, tokens: int | None = None, queries: int | None = None) -> Sample:
    """A list of keys and values of about so many tokens, and questions about some of them."""
    tokens = tokens or int(60 * 38 ** rng.random())
    head, line, ask, answer = rng.choice(RECALL)
    names = "lives" in line or "likes" in line
    numbers = ("likes" not in line and rng.random() < 0.7) or "house" in line
    pairs: dict[str, str] = {}
    size = 0
    while size < tokens:
        key = w.name(rng) if names else w.word(rng)
        if key in pairs or (len(pairs) > 40 and rng.random() < 0.3):
            key = w.made_up(rng).capitalize() if names else w.made_up(rng)
        if key in pairs:
            continue
        value = str(rng.randint(1000, 9999)) if numbers else w.word(rng)
        pairs[key] = value
        size += 3 + (4 if numbers else 2) + (3 if names else 1) + (0 if key in _KNOWN else 3)
    lines = [line.format(k=k, v=v) for k, v in pairs.items()]
    text = head + "\n" + "\n".join(lines)
    asked = rng.sample(list(pairs), min(len(pairs), queries or rng.randint(4, 18)))
    thinking = rng.random() < 0.3
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.25:
        messages += [
            user(text),
            reply("I will remember that.", "I keep the list in mind." if thinking else ""),
        ]
        text = ""
    for key in asked:
        question = ask.format(k=key)
        reasoning = line.format(k=key, v=pairs[key]) if thinking else ""
        messages += [
            user(f"{text}\n\n{question}" if text else question),
            reply(answer.format(k=key, v=pairs[key]), reasoning),
        ]
        text = ""
    return Sample("recall", "recall " + "|".join(lines[:3]), messages, [], thinking)


_KNOWN = {*w.NAMES, *w.NOUNS, *w.VERBS, *w.ADJECTIVES, *w.ANIMALS, *w.THINGS, *w.FOODS, *w.COLOURS}

PERSONAL: list[tuple[tuple[str, ...], Callable[[random.Random], str], tuple[str, ...], str]] = [
    (
        ("My name is {v}.", "I am {v}.", "Hi, I am {v}.", "Call me {v}."),
        w.name,
        ("What is my name?", "Who am I?", "Do you remember my name?"),
        "Your name is {v}.",
    ),
    (
        ("My favourite colour is {v}.", "I love the colour {v}."),
        lambda r: r.choice(w.COLOURS),
        ("What is my favourite colour?", "Which colour do I like?"),
        "Your favourite colour is {v}.",
    ),
    (
        ("I live in {v}.", "I come from {v}."),
        lambda r: r.choice(w.CITIES) if r.random() < 0.8 else w.made_up(r).capitalize(),
        ("Where do I live?", "In which city do I live?"),
        "You live in {v}.",
    ),
    (
        ("I have a {v}.", "My pet is a {v}."),
        lambda r: r.choice([x for x in w.ANIMALS if x[0] not in "aeio"]),
        ("Which animal do I have?", "What pet do I have?"),
        "You have a {v}.",
    ),
    (
        ("My dog is called {v}.", "My dog's name is {v}."),
        w.name,
        ("What is my dog called?", "What is the name of my dog?"),
        "Your dog is called {v}.",
    ),
    (
        ("I am {v} years old.", "My age is {v}."),
        lambda r: str(r.randint(4, 99)),
        ("How old am I?", "What is my age?"),
        "You are {v} years old.",
    ),
    (
        ("My favourite food is {v}.", "I like to eat {v}."),
        lambda r: r.choice(w.FOODS),
        ("What is my favourite food?", "What do I like to eat?"),
        "Your favourite food is {v}.",
    ),
    (
        ("My sister is called {v}.", "I have a sister named {v}."),
        w.name,
        ("What is my sister called?", "What is my sister's name?"),
        "Your sister is called {v}.",
    ),
    (
        ("My lucky number is {v}.",),
        lambda r: str(r.randint(1, 999)),
        ("What is my lucky number?",),
        "Your lucky number is {v}.",
    ),
    (
        ("The password is {v}.", "Remember the password {v}."),
        w.made_up,
        ("What is the password?", "Which password did I tell you?"),
        "The password is {v}.",
    ),
]
NOTED = ("I will remember that.", "Thank you, I will remember that.")


def facts(rng: random.Random) -> Sample:
    """A talk in which the user tells something and asks for it some turns later."""
    thinking = rng.random() < 0.5
    told: list[tuple[int, str]] = []
    messages: list[dict[str, Any]] = []
    key = "facts"
    system = ""
    if rng.random() < 0.35:
        who = w.name(rng)
        system = rng.choice(
            (
                "You are {n}, a helpful assistant.",
                "Your name is {n}.",
                "You are {n} and you speak politely.",
            )
        ).format(n=who)
        told.append((-1, who))
        key += " " + who
    if rng.random() < 0.15:
        kind, value = rng.choice(list(enumerate(PERSONAL)))[0], ""
        value = PERSONAL[kind][1](rng)
        system = (
            system + " " if system else ""
        ) + f"About the user: {_third(PERSONAL[kind][0][0].format(v=value))}"
        told.append((kind, value))
        key += " " + value
    if system:
        messages.append({"role": "system", "content": system})
    elif rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})

    def tell() -> None:
        nonlocal key
        kinds = [k for k in range(len(PERSONAL)) if k not in [t[0] for t in told]]
        chosen = rng.sample(kinds, rng.choice((1, 1, 1, 2, 3)))
        parts = []
        for kind in chosen:
            value = PERSONAL[kind][1](rng)
            told.append((kind, value))
            parts.append(rng.choice(PERSONAL[kind][0]).format(v=value))
            key += " " + value
        text = " ".join(parts)
        named = [t[1] for t in told[-len(chosen) :] if t[0] == 0]
        answer = f"Nice to meet you, {named[0]}!" if named else NOTED[0]
        messages.extend(
            (
                user(text),
                reply(
                    answer, "The user tells me something. I keep it in mind." if thinking else ""
                ),
            )
        )

    def ask(kind: int, value: str) -> None:
        if kind < 0:
            question, answer = rng.choice(("What is your name?", "Who are you?")), f"I am {value}."
        else:
            question = rng.choice(PERSONAL[kind][2])
            answer = PERSONAL[kind][3].format(v=value)
        messages.extend(
            (user(question), reply(answer, "I was told: " + value + "." if thinking else ""))
        )

    tell()
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        if rng.random() < 0.2 and len(told) < 6:
            tell()
        else:
            question, answer, reasoning = small_turn(rng)
            messages += [user(question), reply(answer, reasoning if thinking else "")]
    for kind, value in rng.sample(told, min(len(told), rng.randint(1, 3))):
        ask(kind, value)
    return Sample("facts", key, messages, [], thinking)


def _third(text: str) -> str:
    return (
        text.replace("My ", "the user's ")
        .replace("I am", "the user is")
        .replace("I live", "the user lives")
        .replace("I have", "the user has")
        .replace("I love", "the user loves")
        .replace("The password", "the password")
    )


# ---- JSON ---------------------------------------------------------------------------------------

FIELDS: list[tuple[str, Callable[[random.Random], Any]]] = [
    ("name", w.name),
    ("age", lambda r: r.randint(1, 99)),
    ("city", lambda r: r.choice(w.CITIES)),
    ("colour", lambda r: r.choice(w.COLOURS)),
    ("food", lambda r: r.choice(w.FOODS)),
    ("animal", lambda r: r.choice(w.ANIMALS)),
    ("price", lambda r: r.randint(1, 500)),
    ("count", lambda r: r.randint(0, 50)),
    ("happy", lambda r: r.random() < 0.5),
    ("thing", lambda r: r.choice(w.THINGS)),
    ("code", w.made_up),
    ("open", lambda r: r.random() < 0.5),
]


def as_json(rng: random.Random) -> Sample:
    chosen = rng.sample(FIELDS, rng.randint(1, 5))
    if rng.random() < 0.2:
        chosen[0] = (w.made_up(rng), chosen[0][1])
    record = {name: make(rng) for name, make in chosen}
    shown = ", ".join(
        f"{k} {json.dumps(v) if isinstance(v, bool) else v}" for k, v in record.items()
    )
    draw = rng.random()
    if draw < 0.6:
        question = rng.choice(
            (
                "Write this as JSON: {s}",
                "Give me a JSON object with {s}.",
                "Make JSON of this: {s}",
                "As JSON: {s}",
            )
        ).format(s=shown)
        answer = json.dumps(record)
    elif draw < 0.8:
        items = [w.word(rng) for _ in range(rng.randint(2, 8))]
        question, answer = (
            f"Write these words as a JSON list: {', '.join(items)}",
            json.dumps(items),
        )
        shown = " ".join(items)
    else:
        name, value = rng.choice(list(record.items()))
        question = f"What is the value of {name} in {json.dumps(record)}?"
        answer = json.dumps(value) if not isinstance(value, str) else value
    thinking = rng.random() < 0.3
    messages = [user(question), reply(answer, "I write it as asked." if thinking else "")]
    return with_system(rng, Sample("json", "json " + shown, messages, [], thinking), 0.2)


# ---- tools --------------------------------------------------------------------------------------


def tools(rng: random.Random) -> Sample:
    if rng.random() < 0.1:  # tools are there, but nothing needs them
        question, answer, reasoning = small_turn(rng)
        declared = [t.declared for t in tool_data.others(rng, rng.randint(1, 3), None)]
        thinking = rng.random() < 0.5
        reasoning = "No tool is needed. " + reasoning if thinking else ""
        return with_system(
            rng,
            Sample(
                "tools unused",
                "unused " + question,
                [user(question), reply(answer, reasoning)],
                declared,
                thinking,
                False,
            ),
        )
    made = tool_data.made_up_tool(rng) if rng.random() < 0.35 else rng.choice(tool_data.KNOWN)(rng)
    others = tool_data.others(rng, rng.choice((0, 0, 1, 1, 2, 3)), made)
    tool_data.described(rng, made.declared)
    declared = [made.declared, *(t.declared for t in others)]
    rng.shuffle(declared)
    thinking = rng.random() < 0.5
    name = made.declared["function"]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": made.arguments}}
    messages = [
        user(made.question),
        {**reply("", f"I need {name} for this." if thinking else ""), "tool_calls": [call]},
    ]
    sample = Sample(
        "tool call", f"tool {name} {json.dumps(made.arguments)}", messages, declared, thinking
    )
    if rng.random() < 0.6:
        messages += [
            {"role": "tool", "content": made.result},
            reply(made.answer, "The tool has answered." if thinking else ""),
        ]
        sample.task = "tool answer"
    return with_system(rng, sample, 0.2)


# ---- the mixture --------------------------------------------------------------------------------

TASKS: list[Callable[[random.Random], Sample]] = [
    *(story, reading, talk, arithmetic, comparing, counting, copying, sorting, recall, facts),
    *(as_json, tools),
]
SHARES = (9, 5, 3, 30, 2, 6, 24, 10, 10, 9, 6, 24)
TOKENIZER_SHARES = (19, 6, 5, 28, 2, 6, 14, 8, 9, 14, 6, 22)  # of the text that its words are from


def draw(rng: random.Random, held: bool, shares: tuple[int, ...] = SHARES) -> Sample:
    """A sample of the mixture, of the training or the held-out split."""
    return draw_of(rng.choices(TASKS, shares)[0], rng, held)


def draw_of(make: Callable[[random.Random], Sample], rng: random.Random, held: bool) -> Sample:
    while True:
        sample = make(rng)
        # Small talk has no operands to hold out: it is in both, as rare as the rest.
        free = sample.key == "talk" or sample.key.startswith("unused")
        if rng.random() * 256 < HELD_OUT if free and held else free or held_out(sample.key) == held:
            return sample
