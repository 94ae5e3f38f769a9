"""Owns the little stories: a plot is a page of sentences with choices; facts are kept for questions."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass

import words as w

Choices = tuple[str, ...]

OPENINGS: Choices = (
    "Once upon a time there was {a_hero} named {name} who lived {place}.",
    "There was once {a_hero} called {name}, and {he} lived {place}.",
    "{name} was {a_hero} who lived {place}.",
    "Long ago {a_hero} lived {place}, and everyone called {him} {name}.",
    "In a time before clocks, {a_hero} named {name} made {his} home {place}.",
)
TRAITS: dict[str, Choices] = {
    "curious": (
        "{He} asked questions from morning to evening.",
        "{He} wanted to know how everything worked.",
    ),
    "shy": (
        "{He} spoke so softly that few could hear {him}.",
        "{He} often hid when visitors came.",
    ),
    "brave": ("Even thunder could not frighten {him}.", "{He} was never afraid of the dark."),
    "kind": (
        "{He} shared {his} supper with anyone who was hungry.",
        "Nobody left {his} door without a smile.",
    ),
    "clever": ("{He} could solve any riddle.", "{He} always had a good idea."),
    "impatient": ("Waiting was the hardest thing {he} knew.", "{He} wanted everything at once."),
    "cheerful": ("{He} sang while {he} worked.", "{He} laughed louder than anyone else."),
    "lonely": (
        "Most evenings {he} sat alone and watched the stars.",
        "{He} wished for someone to talk to.",
    ),
    "careful": ("{He} looked twice before every step.", "{He} counted {his} things each night."),
    "lazy": ("{He} liked to sleep until noon.", "{He} thought that work could always wait."),
}

# Each plot: what it is about, then its sentences. {friend} and {helper} are animals or people with
# articles; The first mention has "a", later ones "the".
PLOTS: dict[str, tuple[str, tuple[Choices, ...]]] = {
    "lost": (
        "loses {his} {colour} {thing} and finds it with help from {a_friend}",
        (
            (
                "{name} owned a {colour} {thing} and loved it more than anything.",
                "{His} greatest treasure was a {colour} {thing}.",
            ),
            ("One {morning} it was gone.", "One {morning} {he} could not find it anywhere."),
            (
                "{He} looked in every corner, but found only dust.",
                "{He} searched the whole house and even under the bed.",
            ),
            ("Then {a_friend} came along the path.", "Just then {a_friend} knocked at the door."),
            (
                '"Why do you look so sad?" asked the {friend}.',
                '"What is wrong?" the {friend} wanted to know.',
            ),
            ('"My {thing} is lost," said {name}.', '"I have lost my {thing}," {name} whispered.'),
            ("Together they went out to search.", "The {friend} offered to help at once."),
            (
                "At last they found it {hiding}.",
                "Just before sunset they saw something {colour} {hiding}.",
            ),
            (
                "{name} was so happy that {he} danced in a circle.",
                "{name} thanked the {friend} again and again.",
            ),
            (
                "From that day on the two were best friends.",
                "That night they ate warm {food} together.",
                "Since then {he} has never lost anything again.",
            ),
        ),
    ),
    "rescue": (
        "rescues {a_friend} and is rewarded with a {colour} {thing}",
        (
            (
                "One {morning} {he} heard a cry for help.",
                "One {morning} a faint voice called from far away.",
            ),
            (
                "{He} followed the sound and saw {a_friend} stuck {hiding}.",
                "It came from {a_friend} who was trapped {hiding}.",
            ),
            (
                '"Please get me out!" begged the {friend}.',
                '"I have been here since yesterday," sobbed the {friend}.',
            ),
            (
                "{name} pulled with all {his} strength, but nothing moved.",
                "First {name} tried to push, which did not help at all.",
            ),
            (
                "So {he} fetched a long rope and tied it tight.",
                "Then {he} remembered an old plank and used it as a lever.",
            ),
            (
                "With a loud crack the {friend} was free.",
                "Slowly, very slowly, the {friend} came loose.",
            ),
            (
                "The {friend} wiped away a tear and smiled.",
                "For a moment neither of them could speak.",
            ),
            (
                '"Take this {colour} {thing} as a gift," the {friend} said.',
                "To say thank you, the {friend} gave {him} a {colour} {thing}.",
            ),
            (
                "{name} keeps it by the window to this day.",
                "{name} carried it home as if it were made of gold.",
                "It still hangs above the fireplace of {name}.",
            ),
        ),
    ),
    "fear": (
        "is afraid of {fear} and learns to be brave from {a_friend}",
        (
            (
                "But there was one thing {name} feared, and that was {fear}.",
                "Nobody knew that {name} was terribly afraid of {fear}.",
            ),
            (
                "Whenever it came near, {he} crept under a blanket.",
                "Just thinking of it made {his} knees shake.",
            ),
            (
                "One {morning} {a_friend} came to visit.",
                "One {morning} {he} met {a_friend} on the road.",
            ),
            (
                '"I used to be scared too," said the {friend}.',
                '"Everyone is afraid of something," the {friend} explained.',
            ),
            (
                '"Take a deep breath and count to ten."',
                '"Hold my hand and keep your eyes open."',
                '"Sing a little tune when your heart beats fast."',
            ),
            (
                "{name} did not believe it, but promised to try.",
                "{name} nodded and repeated the advice in a whisper.",
            ),
            ("That same evening the time came.", "Soon there was a chance to find out."),
            (
                "{He} trembled, yet {he} did exactly what the {friend} had told {him}.",
                "{His} heart pounded, but {he} stayed where {he} was.",
            ),
            (
                "And suddenly the fear was no bigger than a pea.",
                "Little by little the shaking stopped.",
            ),
            (
                "Now {name} tells every frightened child what {he} learned.",
                "{name} slept soundly that night.",
                "After that day {he} was called {name} the Brave.",
            ),
        ),
    ),
    "making": (
        "tries to make a {colour} {thing} and learns patience from {a_friend}",
        (
            (
                "{name} wanted to make a {colour} {thing} for the autumn fair.",
                "More than anything {name} wished to build a {colour} {thing} all alone.",
            ),
            (
                "{He} gathered wood, paper and string.",
                "{He} borrowed tools from half the neighbourhood.",
            ),
            (
                "The first try fell apart in {his} hands.",
                "The first one looked more like a broken chair.",
            ),
            ("The second was even worse.", "The next attempt rolled away and landed in a puddle."),
            (
                "{name} threw down the hammer and wanted to give up.",
                "Angry and tired, {name} sat down on the steps.",
            ),
            (
                "{A_friend} who was passing by stopped to watch.",
                "Then {a_friend} sat down beside {him}.",
            ),
            (
                '"Good things need time," the {friend} said.',
                '"Slow hands make fine work," said the {friend} with a wink.',
            ),
            (
                "So {name} began once more, one piece after another.",
                "They worked side by side until the stars came out.",
            ),
            (
                "When it was finished, it was the finest {thing} anybody had seen.",
                "This time everything held together.",
            ),
            (
                "At the fair {he} won first prize.",
                "{name} gave it away as a present and started the next one.",
                "People came from three villages to admire it.",
            ),
        ),
    ),
    "journey": (
        "travels to find {goal} and meets {a_friend} on the way",
        (
            (
                "One {morning} {name} decided to find {goal}.",
                "All {his} life {name} had dreamed of finding {goal}.",
            ),
            (
                "{He} packed some {food}, a bottle of water and a {colour} {thing}.",
                "With a {colour} {thing} under {his} arm {he} set out.",
            ),
            (
                "The road led over a bridge and through a dark wood.",
                "For three days {he} walked without meeting anybody.",
            ),
            ("On the fourth day {a_friend} blocked the way.", "At a crossing {he} met {a_friend}."),
            (
                '"Where are you going?" asked the {friend}.',
                '"Nobody passes without telling me a secret," the {friend} said.',
            ),
            (
                "{name} explained the plan, and the {friend} listened carefully.",
                "So {name} told the {friend} everything.",
            ),
            (
                '"I know the way, follow me," said the {friend}.',
                '"Then you must turn left at the white stone," was the reply.',
            ),
            (
                "By evening they stood before it, and it was more beautiful than any dream.",
                "When the fog lifted, there it was, shining in the last light.",
            ),
            (
                "{name} stayed for a long while and said nothing.",
                "For the first time {name} had no more wishes.",
            ),
            (
                "Then {he} turned around, for home is good too.",
                "The way back seemed only half as long.",
                "{He} left the {thing} there as a greeting for the next traveller.",
            ),
        ),
    ),
    "quarrel": (
        "quarrels with {a_friend} about a {colour} {thing} and learns to share",
        (
            ("{His} neighbour was {a_friend}.", "Next door lived {a_friend}."),
            (
                "One {morning} both of them saw a {colour} {thing} lying in the grass.",
                "One {morning} they found a {colour} {thing} at the very same moment.",
            ),
            ('"It is mine!" cried {name}.', '"I saw it first," said {name}.'),
            (
                '"No, it belongs to me," answered the {friend}.',
                '"You did not," the {friend} growled.',
            ),
            (
                "They pulled at it until it nearly broke.",
                "They argued so loudly that the birds flew away.",
            ),
            (
                "Tired from shouting, they sat down back to back.",
                "For the rest of the day they did not speak a single word.",
            ),
            (
                "In the evening it began to rain, and both felt cold and foolish.",
                "When night fell, {name} could not sleep.",
            ),
            (
                '"We could take turns," {name} said at last.',
                '"You may have it on even days," offered {name}.',
            ),
            (
                "The {friend} smiled and held out a hand.",
                '"And you on all the others," the {friend} replied.',
            ),
            (
                "So the {thing} brought them together after all.",
                "Ever since, they share everything, even the last piece of cake.",
                "It turned out that sharing was much more fun.",
            ),
        ),
    ),
    "storm": (
        "gives shelter to {a_friend} during a storm",
        (
            (
                "One night a terrible storm came over the land.",
                "One {season} evening the sky turned black and the wind began to howl.",
            ),
            (
                "{name} locked the door and lit a candle.",
                "{name} pulled the shutters closed and sat by the stove.",
            ),
            ("Then there was a knock.", "Suddenly something scratched at the door."),
            (
                "Outside stood {a_friend}, wet to the skin.",
                "On the step sat {a_friend}, shivering with cold.",
            ),
            (
                '"May I come in?" the {friend} asked.',
                '"The flood has taken my home," said the {friend}.',
            ),
            (
                "There was hardly room for two, but {name} did not think twice.",
                "{name} had only one bed, yet {he} opened the door wide.",
            ),
            (
                "They shared a bowl of {food} and told each other jokes.",
                "{name} brought a blanket and a plate of {food}.",
            ),
            (
                "Towards dawn the thunder grew quiet.",
                "When the sun rose, the world was washed clean.",
            ),
            (
                "As thanks the {friend} left a {colour} {thing} on the table.",
                "The {friend} found a {colour} {thing} in the mud and gave it to {name}.",
            ),
            (
                "Every year on that day they meet again.",
                "A small house can be big enough for two.",
                "{name} never felt alone in a storm again.",
            ),
        ),
    ),
    "race": (
        "runs a race against {a_friend}",
        (
            (
                "Every {season} there was a great race around the lake.",
                "In {season} the whole village met for the big race.",
            ),
            ("The prize was a {colour} {thing}.", "Whoever won would get a {colour} {thing}."),
            (
                "Nobody thought that {name} could win, least of all {a_friend}.",
                "{A_friend} laughed when {name} came to the start.",
            ),
            (
                '"You will still be running at midnight," said the {friend}.',
                '"I could beat you asleep," boasted the {friend}.',
            ),
            (
                "A whistle blew, and off they went.",
                "Someone dropped a flag and everybody began to run.",
            ),
            (
                "The {friend} was far ahead after the first bend.",
                "Soon {name} could see only the dust of the {friend}.",
            ),
            (
                "But {name} did not stop and did not look left or right.",
                "Step by step {name} kept going, breathing calmly.",
            ),
            (
                "Near the end the {friend} stumbled over a root and fell.",
                "Close to the goal the {friend} sat down to enjoy a plate of {food}.",
            ),
            (
                "{name} helped the {friend} up, and they crossed the line together.",
                "{name} walked past with a friendly nod and won.",
            ),
            (
                "The prize stands in the town hall, where all can see it.",
                "Boasting wins no race, the old people say.",
                "That evening even the {friend} clapped.",
            ),
        ),
    ),
    "seed": (
        "plants a seed and waits with {a_friend}",
        (
            (
                "One {morning} {a_friend} gave {name} a strange seed.",
                "In spring {name} traded a {colour} {thing} for a seed that {a_friend} had brought.",
            ),
            (
                '"Water it every day and do not lose heart," said the {friend}.',
                '"It will grow if you talk to it," the {friend} promised.',
            ),
            (
                "{name} dug a hole behind the house and put it in.",
                "{name} found a sunny spot for it.",
            ),
            ("After one week there was nothing to see.", "For many days the earth stayed bare."),
            (
                "After two weeks {he} wanted to dig it up again.",
                "The neighbours shook their heads and went on.",
            ),
            (
                "The {friend} only smiled and brought more water.",
                '"Not yet," said the {friend} each time.',
            ),
            ("Then one day a green tip came through the soil.", "At last a tiny leaf appeared."),
            (
                "It grew as high as the roof and carried {colour} flowers.",
                "By {season} it was a tree full of sweet fruit.",
            ),
            (
                "Children came from everywhere to sit in its shade.",
                "There was enough for the whole street.",
            ),
            (
                "{name} had learned that waiting is a kind of work.",
                "Each visitor gets one seed to take home.",
                "Some wonders are simply slow.",
            ),
        ),
    ),
    "newcomer": (
        "becomes friends with {a_friend} who is new in the neighbourhood",
        (
            (
                "One {morning} {a_friend} moved into the empty house nearby.",
                "One {season} day {a_friend} arrived with three suitcases.",
            ),
            (
                "Nobody greeted the newcomer, because nobody dared to.",
                "People whispered behind their curtains.",
            ),
            (
                "{name} watched from the window and felt sorry.",
                "{name} remembered how it is to be alone.",
            ),
            (
                "So {he} put some {food} on a plate and went over.",
                "{He} wrapped a {colour} {thing} in paper and walked across the street.",
            ),
            (
                '"Welcome, I am {name}," {he} said.',
                '"I thought you might be hungry or bored," said {name}.',
            ),
            (
                "The {friend} was so surprised that the door stayed open.",
                "The eyes of the {friend} grew wide and shiny.",
            ),
            (
                "They talked about far countries until the lamps were lit.",
                "It turned out that both loved old songs.",
            ),
            (
                "The next day two more neighbours came, and then five.",
                "Soon the whole street wanted to hear those stories.",
            ),
            ("A single hello had been enough.", "It had only taken one small step."),
            (
                "Today nobody can imagine the place without the {friend}.",
                "The two have had tea on Sundays ever since.",
                "And {name} was never bored again.",
            ),
        ),
    ),
}
FEARS = [
    "the dark",
    "thunder",
    "deep water",
    "strangers",
    "high places",
    "loud noises",
    "the old cellar",
    "big dogs",
]
GOALS = [
    "the end of the rainbow",
    "the singing waterfall",
    "the oldest tree in the world",
    "the city of glass",
    "the sea",
    "the hidden garden",
    "the place where the wind sleeps",
    "the smallest island",
]
MORNINGS = [
    "morning",
    "sunny morning",
    "cold morning",
    "foggy morning",
    "spring morning",
    "Sunday morning",
    "rainy afternoon",
    "warm evening",
]
SEASONS = ["spring", "summer", "autumn", "winter"]


@dataclass(frozen=True)
class Story:
    """text: the whole. summary: what it is about. facts: questions with answers."""

    subject: str
    thing: str
    text: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    key: str


def story(rng: random.Random, subject: str | None = None, thing: str | None = None) -> Story:
    """A story in which no four words come three times."""
    for _ in range(20):
        found = _story(rng, subject, thing)
        if not repeats(found.text):
            return found
    raise RuntimeError("no story without repetition in 20 tries")


def repeats(text: str) -> bool:
    parts = re.findall(r"\w+|[^\w\s]", text.lower())
    counts = Counter(zip(parts, parts[1:], parts[2:], parts[3:], strict=False))
    return max(counts.values(), default=0) >= 3


def _story(rng: random.Random, subject: str | None, thing: str | None) -> Story:
    draw = rng.random()
    if subject is None:
        subject = (
            rng.choice(w.ANIMALS)
            if draw < 0.6
            else rng.choice(w.PEOPLE)
            if draw < 0.9
            else w.made_up(rng)
        )
    female = subject in ("girl", "queen", "princess", "witch", "hen", "cow") or (
        subject not in ("boy", "king", "prince", "wizard", "knight", "fisherman", "postman")
        and rng.random() < 0.5
    )
    name = rng.choice(w.GIRLS if female else w.BOYS)
    friend = subject
    while friend == subject:
        friend = rng.choice(w.ANIMALS if rng.random() < 0.7 else w.PEOPLE[2:])
    plot = rng.choice(list(PLOTS))
    about, sentences = PLOTS[plot]
    trait = rng.choice(list(TRAITS))
    he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
    adjective = (
        trait if rng.random() < 0.6 else rng.choice(("young", "little", "small", "old", "tiny"))
    )
    slots = {
        "name": name,
        "hero": subject,
        "a_hero": w.a(f"{adjective} {subject}"),
        "he": he,
        "him": him,
        "his": his,
        "He": he.capitalize(),
        "His": his.capitalize(),
        "friend": friend,
        "a_friend": w.a(friend),
        "A_friend": w.a(friend).capitalize(),
        "place": rng.choice(w.PLACES),
        "hiding": rng.choice(w.HIDING),
        "thing": thing or rng.choice(w.THINGS),
        "colour": rng.choice(w.COLOURS),
        "food": rng.choice(w.FOODS),
        "fear": rng.choice(FEARS),
        "goal": rng.choice(GOALS),
        "morning": rng.choice(MORNINGS),
        "season": rng.choice(SEASONS),
    }
    lines = [rng.choice(OPENINGS), rng.choice(TRAITS[trait]), *(rng.choice(s) for s in sentences)]
    if thing and not any("{thing}" in line for line in lines):
        lines.insert(2, "Wherever {he} went, {he} took a {colour} {thing} along.")
    if rng.random() < 0.3:
        lines.append("The end.")
    split = rng.randint(4, len(lines) - 3)
    text = " ".join(lines[:split]) + "\n\n" + " ".join(lines[split:])
    text = _articles(text.format(**slots))
    summary = _articles(about.format(**slots))
    place = slots["place"]
    facts = [
        (f"What is the name of the {subject}?", f"The {subject} is called {name}."),
        (f"Where did {name} live?", f"{name} lived {place}."),
        (
            f"What kind of creature is {name}?" if subject in w.ANIMALS else f"Who is {name}?",
            f"{name} is {w.a(subject)}.",
        ),
        (f"Whom did {name} meet?", f"{name} met {w.a(friend)}."),
    ]
    if "{colour} {thing}" in " ".join(lines):
        colour = slots["colour"]
        facts.append(
            (f"What colour was the {slots['thing']}?", f"The {slots['thing']} was {colour}.")
        )
    if any("{hiding}" in line for line in lines) and plot == "lost":
        facts.append(
            (f"Where was the {slots['thing']}?", f"The {slots['thing']} was {slots['hiding']}.")
        )
    if plot == "fear":
        facts.append((f"What was {name} afraid of?", f"{name} was afraid of {slots['fear']}."))
    if plot == "journey":
        facts.append((f"What did {name} want to find?", f"{name} wanted to find {slots['goal']}."))
    key = f"story {plot} {subject} {friend} {slots['thing']}"
    return Story(
        subject, slots["thing"], text, f"{name} the {subject} {summary}", tuple(facts), key
    )


def _articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
