"""Owns the vocabulary of the training data: names, things, places, and words made up at random."""

from __future__ import annotations

import random

GIRLS = """Anna Mia Lena Ruby Clara Nora Ella Rosa Ida Lucy Emma Zoe Maya Sofia Greta Alice Ivy
Martha Nina Olga Paula Vera Wanda Elsa Julia Hanna Lily Daisy Flora Tara Molly Sally Penny Betty
Amelia Bella Carla Diana Edith Fiona""".split()
BOYS = """Tom Ben Max Leo Finn Paul Otto Hugo Sam Jack Oscar Felix Emil Anton Karl Peter Noah Adam
Theo Milo Jonas Simon Lucas Oliver Henry Arthur Victor Walter Robin Toby Nico Bruno Igor Kurt Liam
Marco Ralph Steve Frank George""".split()
NAMES = GIRLS + BOYS

ANIMALS = """fox bear rabbit mouse owl hedgehog squirrel wolf deer badger otter frog duck cat dog
goat pig hen goose horse donkey cow sheep lamb pony kitten puppy turtle snail bee ant beetle spider
crow raven robin swan seal whale dolphin crab penguin lion tiger elephant monkey parrot camel zebra
giraffe panda koala kangaroo lizard dragon unicorn mole bat hamster""".split()
PEOPLE = """girl boy baker farmer sailor king queen princess prince knight robot wizard witch giant
gardener teacher painter pirate shepherd clockmaker fisherman miller tailor doctor dancer singer
cook carpenter postman astronaut""".split()
VOWELS = "aeiou"

THINGS = """lantern kite drum bell key map boat ball hat scarf basket book flute coin ring button
blanket shell feather stone ladder bucket broom cup spoon mirror clock whistle umbrella sled pillow
candle rope wheel box letter pencil pear apple cake pie loaf jar""".split()
COLOURS = "red blue green yellow orange purple pink brown black white grey golden silver".split()
PLACES = [
    *("at the edge of a quiet forest", "beside a slow river", "on top of a windy hill"),
    *("in a small village by the sea", "under an old oak tree", "near a deep blue lake"),
    *("in a cottage behind the mill", "in a valley full of flowers", "at the end of a long road"),
    *("in a tall house with a red roof", "on a little island", "next to a dusty market"),
    *("in a hollow log by the path", "in a barn full of hay", "at the foot of a grey mountain"),
]
HIDING = [
    *("under a heap of dry leaves", "behind the garden wall", "inside an empty barrel"),
    *("between two big stones", "at the bottom of the well", "in the branches of a pine tree"),
    *("beneath the wooden bridge", "in the tall grass", "on the roof of the barn"),
    *("under the kitchen table", "beside the frozen pond", "in a hole near the fence"),
]
CITIES = """Rome Paris Oslo Berlin London Madrid Vienna Prague Lisbon Athens Dublin Warsaw Cairo
Tokyo Delhi Lima Boston Chicago Sydney Toronto Moscow Helsinki Zurich Geneva Hamburg Munich Milan
Venice Naples Porto Seville Bergen Krakow Havana Quito Nairobi Seoul Hanoi Denver Dallas""".split()
FOODS = """bread soup rice cheese honey pasta salad porridge pancakes noodles pizza curry beans
potatoes carrots plums cherries grapes melon yoghurt toast stew dumplings waffles""".split()
NOUNS = """time day night year house door window garden street river bridge tree forest flower grass
leaf seed field hill mountain valley lake sea wave island beach sand rock cloud rain snow wind storm
sun moon star sky fire water ice smoke light shadow morning evening winter summer spring autumn
table chair bed lamp floor wall roof room kitchen school shop market church tower castle road path
train bus car bike ship plane engine paper ink page story song game toy doll picture colour music
sound voice word number line circle square corner middle end friend family mother father sister
brother child baby neighbour guest bird fish wing tail nose ear eye hand foot head heart bone hair
shirt coat shoe sock glove pocket thread needle knife fork plate glass bottle bag milk tea coffee
sugar salt butter egg meat fruit nut corn flour metal iron gold wood wool cotton leather clay brick
hammer nail saw net hook oar sail flag gate fence yard farm stable nest cave hole dream secret""".split()
VERBS = """run walk jump sing dance read write draw paint build carry push pull open close lift drop
throw catch hold give take bring send find lose hide seek look listen hear see smell taste touch
feel think know learn teach help thank ask answer tell call shout whisper laugh cry smile sleep wake
eat drink cook bake wash clean mend cut dig plant grow pick climb swim fly ride drive sail row stop
start wait stay leave arrive return win play work rest""".split()
ADJECTIVES = """small big old young happy sad brave shy kind clever quick slow strong weak tall short
long round flat soft hard warm cold hot cool wet dry clean dirty bright dark loud quiet sweet sour
fresh heavy light rich poor proud calm busy lazy tired hungry thirsty curious gentle honest lucky
careful cheerful lonely""".split()
OPPOSITES = [
    *(("big", "small"), ("hot", "cold"), ("day", "night"), ("up", "down"), ("fast", "slow")),
    *(("happy", "sad"), ("old", "young"), ("wet", "dry"), ("light", "dark"), ("open", "closed")),
    *(("loud", "quiet"), ("hard", "soft"), ("full", "empty"), ("early", "late"), ("rich", "poor")),
    *(("tall", "short"), ("clean", "dirty"), ("strong", "weak"), ("near", "far"), ("high", "low")),
    *(("sweet", "sour"), ("first", "last"), ("left", "right"), ("true", "false"), ("in", "out")),
]
FACTS = [
    ("What colour is the sky?", "On a clear day the sky is blue."),
    ("What colour is grass?", "Grass is green."),
    ("What colour is snow?", "Snow is white."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How many legs does a bird have?", "A bird has two legs."),
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many hours are in a day?", "A day has twenty-four hours."),
    ("How many minutes are in an hour?", "An hour has sixty minutes."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows eat?", "Cows eat grass."),
    ("What do we call frozen water?", "Frozen water is called ice."),
    ("What comes after Monday?", "Tuesday comes after Monday."),
    ("What comes after Friday?", "Saturday comes after Friday."),
    ("What comes after winter?", "Spring comes after winter."),
    ("Which month comes after March?", "April comes after March."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Norway?", "The capital of Norway is Oslo."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of England?", "The capital of England is London."),
    ("Where do fish live?", "Fish live in water."),
    ("Where do birds sleep?", "Birds sleep in trees and nests."),
    ("What do you use an umbrella for?", "An umbrella keeps you dry when it rains."),
    ("What do you use a key for?", "A key opens a lock."),
    ("Why do we sleep?", "We sleep so that body and mind can rest."),
    ("Why is the night dark?", "At night the sun is on the other side of the earth."),
    ("Can penguins fly?", "No, penguins cannot fly, but they swim very well."),
    ("Is fire hot or cold?", "Fire is hot."),
    ("Is ice hot or cold?", "Ice is cold."),
    ("What is a triangle?", "A triangle is a shape with three sides."),
    ("What is a square?", "A square is a shape with four equal sides."),
    ("What shines at night?", "The moon and the stars shine at night."),
]

_ONSETS = "b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl pr st tr sh th".split()
_NUCLEI = "a e i o u a e i o ai ea oo ou".split()
_CODAS = ["", "", "", "n", "r", "l", "m", "s", "t", "k", "x", "nd", "sh", "rt"]


def made_up(rng: random.Random) -> str:
    """A word that nobody has used: two or three syllables."""
    count = rng.choice((2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_NUCLEI) for _ in range(count)]
    return "".join(parts) + rng.choice(_CODAS)


def name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.75 else made_up(rng).capitalize()


def word(rng: random.Random) -> str:
    """Any lower-case word, sometimes made up."""
    if rng.random() < 0.25:
        return made_up(rng)
    return rng.choice(rng.choice((NOUNS, VERBS, ADJECTIVES, ANIMALS, THINGS, FOODS, COLOURS)))


def a(noun: str) -> str:
    """With its article."""
    return ("an " if noun[0] in VOWELS and noun != "unicorn" else "a ") + noun
