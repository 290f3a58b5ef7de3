"""The tiny model's world: a word-level language whose causal structure is known.

Five kinds of sentence, each a small question with one right next word:

- **ioi**: two people, one of them named again; the other one receives. Pure context, nothing to know.
- **capital, language, continent**: one fact about a country, in several wordings. Each country has
  one language here and one continent; capitals are whole words ("Addis", "Port" have no place).
- **job, home**: one fact about a person, from Latin squares over first and last names: neither name
  alone says anything about the answer, so the two must meet before it can be looked up.
- **agreement**: the verb agrees with the subject, not with the noun beside it.
- **induction**: a list of random names is repeated; what followed a name follows it again.

What is held out: pairs of names and some combinations of templates (ioi), eight names (they occur in
lists, never in ioi), the wording in which a fact is asked (a fact itself can't be), pairs of nouns.
Everything follows from seeds: the splits from fixed ones, the draws from the `random.Random` given.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations, product

# --- words -------------------------------------------------------------------------------------

PAD, BOS, EOS, UNK = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")

NAMES = tuple(
    """Mary John Anna Paul Tom Lucy James Emma David Sarah Peter Laura Mark Julia Kevin Alice Brian
    Helen Simon Clara Jack Nina Oscar Rosa Henry Irene Frank Diana Victor Olga Martin Eva Robert Grace
    Edward Ruth Arthur Molly Leo Vera Hugo Lily Felix Amy Carl Nora Daniel Susan George Linda Steven
    Karen Philip Megan Alan Betty Walter Carol Eric Judy Louis Wendy Adam Holly Roger Ivy Neil Tina
    Oliver Sophie Ralph Stella Gary Paula Dennis Monica Bruce Gloria Ian Hannah""".split()
)
FIRST_NAMES = NAMES[:10]
LAST_NAMES = tuple("Smith Jones Brown Taylor Wilson Evans Walker Wright Green Baker".split())
JOBS = tuple("doctor teacher farmer lawyer painter singer cook pilot nurse judge".split())
HOMES = tuple("Paris Rome London Tokyo Cairo Lima Berlin Madrid Vienna Oslo".split())
PLACES = tuple("shop park school market station museum garden office library beach".split())
OBJECTS = tuple("drink book ball ring letter hat cake key lamp coin".split())
PREPOSITIONS = tuple("near behind beside under with".split())
ADJECTIVES = tuple("old new red small big good".split())
NOUNS = tuple(
    (noun, noun + ("es" if noun == "box" else "s"))
    for noun in "boy girl dog cat car house tree chair table picture bird horse window door box road".split()
)
VERBS = ("is", "are")

# Country, capital, language, continent. Only countries whose name and capital are one word each.
COUNTRIES = tuple(
    tuple(line.split())
    for line in """France Paris French Europe
    Germany Berlin German Europe
    Italy Rome Italian Europe
    Spain Madrid Spanish Europe
    Portugal Lisbon Portuguese Europe
    Greece Athens Greek Europe
    Poland Warsaw Polish Europe
    Hungary Budapest Hungarian Europe
    Austria Vienna German Europe
    Sweden Stockholm Swedish Europe
    Norway Oslo Norwegian Europe
    Finland Helsinki Finnish Europe
    Denmark Copenhagen Danish Europe
    Ireland Dublin English Europe
    England London English Europe
    Russia Moscow Russian Europe
    Ukraine Kyiv Ukrainian Europe
    Romania Bucharest Romanian Europe
    Bulgaria Sofia Bulgarian Europe
    Serbia Belgrade Serbian Europe
    Croatia Zagreb Croatian Europe
    Albania Tirana Albanian Europe
    Iceland Reykjavik Icelandic Europe
    Japan Tokyo Japanese Asia
    China Beijing Chinese Asia
    Pakistan Islamabad Urdu Asia
    Thailand Bangkok Thai Asia
    Vietnam Hanoi Vietnamese Asia
    Bangladesh Dhaka Bengali Asia
    Mongolia Ulaanbaatar Mongolian Asia
    Nepal Kathmandu Nepali Asia
    Iran Tehran Persian Asia
    Iraq Baghdad Arabic Asia
    Syria Damascus Arabic Asia
    Jordan Amman Arabic Asia
    Lebanon Beirut Arabic Asia
    Turkey Ankara Turkish Asia
    Laos Vientiane Lao Asia
    Armenia Yerevan Armenian Asia
    Oman Muscat Arabic Asia
    Qatar Doha Arabic Asia
    Egypt Cairo Arabic Africa
    Libya Tripoli Arabic Africa
    Tunisia Tunis Arabic Africa
    Morocco Rabat Arabic Africa
    Sudan Khartoum Arabic Africa
    Kenya Nairobi Swahili Africa
    Tanzania Dodoma Swahili Africa
    Ghana Accra English Africa
    Nigeria Abuja English Africa
    Uganda Kampala English Africa
    Zambia Lusaka English Africa
    Zimbabwe Harare English Africa
    Angola Luanda Portuguese Africa
    Mozambique Maputo Portuguese Africa
    Senegal Dakar French Africa
    Cameroon Yaounde French Africa
    Gabon Libreville French Africa
    Somalia Mogadishu Somali Africa
    Namibia Windhoek English Africa
    Canada Ottawa English America
    Cuba Havana Spanish America
    Jamaica Kingston English America
    Guyana Georgetown English America
    Brazil Brasilia Portuguese America
    Suriname Paramaribo Dutch America
    Chile Santiago Spanish America
    Peru Lima Spanish America
    Colombia Bogota Spanish America
    Ecuador Quito Spanish America
    Venezuela Caracas Spanish America
    Bolivia Sucre Spanish America
    Uruguay Montevideo Spanish America
    Paraguay Asuncion Spanish America
    Honduras Tegucigalpa Spanish America
    Nicaragua Managua Spanish America""".splitlines()
)

# --- templates ---------------------------------------------------------------------------------
# A word in braces is a slot. Slots carry the names of the spans in the prompt files.

IOI_OPENINGS = (
    "When {A} and {B} went to the {place} ,",
    "After {A} and {B} met at the {place} ,",
    "While {A} and {B} sat in the {place} ,",
    "Then {A} and {B} had a long talk , and",
    "{A} and {B} walked to the {place} and",
    "Yesterday {A} saw {B} at the {place} and",
)
IOI_CLOSINGS = (
    "{S2} gave a {object} to",
    "{S2} handed the {object} to",
    "{S2} passed a {object} to",
    "{S2} offered the {object} to",
    "{S2} sold a {object} to",
    "{S2} showed the {object} to",
)
RELATION_TEMPLATES = (
    "The {relation} of {subject} is",
    "{subject} 's {relation} is",
    "In {subject} , the {relation} is",
)
AGREEMENT_TEMPLATES = (
    "The {noun} {preposition} the {attractor}",
    "Today the {noun} {preposition} the {attractor}",
    "People say the {noun} {preposition} the {attractor}",
)


def relation_templates(relation: str, *more: str) -> tuple[str, ...]:
    """The wordings that ask for one relation: those that every relation shares, then its own."""
    return tuple(t.replace("{relation}", relation) for t in RELATION_TEMPLATES) + more


CAPITAL_TEMPLATES = relation_templates(
    "capital", "The capital city of {subject} is", "People in {subject} call their capital"
)
LANGUAGE_TEMPLATES = relation_templates("language", "People in {subject} speak")
CONTINENT_TEMPLATES = (
    "The continent of {subject} is",
    "{subject} 's continent is",
    "{subject} is in",
    "The country of {subject} is in",
)
JOB_TEMPLATES = (
    "{first} {last} is a",
    "{first} {last} works as a",
    "Yesterday {first} {last} worked as a",
    "People call {first} {last} a",
)
HOME_TEMPLATES = (
    "{first} {last} lives in",
    "{first} {last} has a house in",
    "The house of {first} {last} is in",
    "Yesterday {first} {last} went to",
)


@dataclass(frozen=True)
class Example:
    """One question: the template, the word in each of its slots, and the word that must follow."""

    template: str
    slots: Mapping[str, str]
    answer: str

    @property
    def words(self) -> list[str]:
        """The question's words, without the answer."""
        return [self.slots[w[1:-1]] if w.startswith("{") else w for w in self.template.split()]

    @property
    def text(self) -> str:
        """The question as the tokenizer reads it: words with one space between them."""
        return " ".join(self.words)

    def places(self, *slots: str) -> dict[str, tuple[int, int]]:
        """Where the named slots lie in the text: half-open ranges of characters; END, the last word."""
        wanted = {f"{{{slot}}}": slot for slot in slots}
        spans, start = {}, 0
        for mark, word in zip(self.template.split(), self.words, strict=True):
            last = (start, start + len(word))
            if mark in wanted:
                spans[wanted[mark]] = last
            start = last[1] + 1
        return {**spans, "END": last}


# --- facts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Facts of one kind: subjects (the words of the slots), their answers, and the wordings that ask.

    Each subject is held out in one wording; the wordings share the subjects evenly."""

    slots: tuple[str, ...]
    templates: tuple[str, ...]
    answers: Mapping[tuple[str, ...], str]
    held: Mapping[tuple[str, ...], str]

    def example(self, subject: tuple[str, ...], template: str) -> Example:
        """The question about one subject in one wording."""
        return Example(template, dict(zip(self.slots, subject, strict=True)), self.answers[subject])

    def draw(self, rng: random.Random, held: bool = False) -> Example:
        """A random subject, in the wording that is held out for it, or in one of the others."""
        subject = rng.choice(list(self.answers))
        others = [t for t in self.templates if t != self.held[subject]]
        return self.example(subject, self.held[subject] if held else rng.choice(others))


def facts_of(slots: str, templates: tuple[str, ...], answers: Mapping[tuple[str, ...], str], seed: str) -> Facts:
    """Facts with the held-out wording of each subject drawn from the seed."""
    order = random.Random(f"held {seed}").sample(list(answers), len(answers))
    held = {subject: templates[i % len(templates)] for i, subject in enumerate(order)}
    return Facts(tuple(slots.split()), templates, answers, held)


def latin_square(values: tuple[str, ...], seed: str) -> dict[tuple[str, ...], str]:
    """A value for each (first, last) name: each row and column holds every value once, order shuffled."""
    rng, size = random.Random(f"square {seed}"), len(values)
    rows, columns, symbols = (rng.sample(range(size), size) for _ in range(3))
    return {
        (first, last): values[symbols[(row + column) % size]]
        for first, row in zip(FIRST_NAMES, rows, strict=True)
        for last, column in zip(LAST_NAMES, columns, strict=True)
    }


FACTS = {
    "capital": facts_of("subject", CAPITAL_TEMPLATES, {(c[0],): c[1] for c in COUNTRIES}, "capital"),
    "language": facts_of("subject", LANGUAGE_TEMPLATES, {(c[0],): c[2] for c in COUNTRIES}, "language"),
    "continent": facts_of("subject", CONTINENT_TEMPLATES, {(c[0],): c[3] for c in COUNTRIES}, "continent"),
    "job": facts_of("first last", JOB_TEMPLATES, latin_square(JOBS, "job"), "job"),
    "home": facts_of("first last", HOME_TEMPLATES, latin_square(HOMES, "home"), "home"),
}

# --- the other kinds of sentence ---------------------------------------------------------------

IOI_NAMES, IOI_UNSEEN_NAMES = NAMES[:-8], NAMES[-8:]
IOI_TEMPLATES = tuple(
    f"{opening} {closing}"
    for (i, opening), (j, closing) in product(enumerate(IOI_OPENINGS), enumerate(IOI_CLOSINGS))
    if (i + 2 * j) % 6 != 3
)
# Six of the 36 combinations, so placed that every opening and closing is still seen in training.
IOI_HELD_TEMPLATES = tuple(
    f"{opening} {closing}"
    for (i, opening), (j, closing) in product(enumerate(IOI_OPENINGS), enumerate(IOI_CLOSINGS))
    if (i + 2 * j) % 6 == 3
)


def held_name_pairs(n: int) -> tuple[tuple[str, str], ...]:
    """Pairs of names that never meet in a training sentence of ioi, as (alphabetical) tuples."""
    pairs = [pair for pair in combinations(sorted(IOI_NAMES), 2) if pair != ("John", "Mary")]
    return ("John", "Mary"), *random.Random("held name pairs").sample(pairs, n - 1)


def held_noun_pairs(n: int) -> tuple[tuple[int, int], ...]:
    """Ordered pairs (subject, attractor) of noun numbers that never meet in training."""
    return tuple(random.Random("held noun pairs").sample(list(permutations(range(len(NOUNS)), 2)), n))


IOI_HELD_PAIRS = held_name_pairs(200)
HELD_NOUN_PAIRS = held_noun_pairs(72)


def ioi(template: str, first: str, second: str, subject: str, place: str, thing: str) -> Example:
    """The question in which `first` and `second` are named in this order and `subject` once more.

    The template's slots A and B become S1 and IO, so that a template says where each role stands."""
    other = second if subject == first else first
    roles = ("{S1}", "{IO}") if subject == first else ("{IO}", "{S1}")
    slots = {"S1": subject, "S2": subject, "IO": other, "place": place, "object": thing}
    return Example(template.replace("{A}", roles[0]).replace("{B}", roles[1]), slots, other)


def draw_ioi(
    rng: random.Random,
    templates: tuple[str, ...] = IOI_TEMPLATES,
    names: tuple[str, ...] = IOI_NAMES,
    held: bool = False,
) -> Example:
    """A random ioi question; `held` takes a pair of names that training has never seen together."""
    if held:
        first, second = rng.sample(rng.choice(IOI_HELD_PAIRS), 2)
    else:
        first, second = rng.sample(names, 2)
        while (min(first, second), max(first, second)) in _IOI_HELD:
            first, second = rng.sample(names, 2)
    subject = rng.choice((first, second))
    return ioi(rng.choice(templates), first, second, subject, rng.choice(PLACES), rng.choice(OBJECTS))


def agreement(template: str, nouns: tuple[int, int], plural: tuple[int, int], preposition: str) -> Example:
    """The question whose subject and attractor are these nouns (by number), plural or not."""
    noun, attractor = (NOUNS[noun][many] for noun, many in zip(nouns, plural, strict=True))
    slots = {"noun": noun, "attractor": attractor, "preposition": preposition}
    return Example(template, slots, VERBS[plural[0]])


def draw_agreement(rng: random.Random, held: bool = False) -> Example:
    """A random question of agreement; `held` takes a pair of nouns that training never shows."""
    pairs = HELD_NOUN_PAIRS if held else _SEEN_NOUN_PAIRS
    plural = rng.randrange(2), rng.randrange(2)
    return agreement(rng.choice(AGREEMENT_TEMPLATES), rng.choice(pairs), plural, rng.choice(PREPOSITIONS))


def induction(names: Iterable[str], start: int, shown: int) -> Example:
    """A list, a semicolon, and `shown` names of it again from the one numbered `start`.

    The slots: A1 and B1 are the last shown name and its successor where they first occur."""
    names = list(names)
    a1 = start + shown - 1
    first = ["{A1}" if i == a1 else "{B1}" if i == a1 + 1 else f"{{N{i}}}" for i in range(len(names))]
    again = [f"{{N{i}}}" if i != a1 else "{A1}" for i in range(start, start + shown)]
    again[-1] = "{A2}"
    slots = {f"N{i}": name for i, name in enumerate(names)}
    slots |= {"A1": names[a1], "B1": names[a1 + 1], "A2": names[a1]}
    return Example(" ".join([*first, ";", *again]), slots, names[a1 + 1])


def draw_induction(rng: random.Random, size: int = 10) -> Example:
    """A list of random names, cut at a random place of its repetition."""
    return induction(rng.sample(NAMES, size), 0, rng.randint(2, size - 1))


_IOI_HELD = frozenset(IOI_HELD_PAIRS)
_SEEN_NOUN_PAIRS = tuple(p for p in permutations(range(len(NOUNS)), 2) if p not in set(HELD_NOUN_PAIRS))

HELD_OUT: dict[str, Callable[[random.Random], Example]] = {
    "induction": draw_induction,
    "ioi": lambda rng: draw_ioi(rng, held=True),
    "ioi, held templates": lambda rng: draw_ioi(rng, templates=IOI_HELD_TEMPLATES),
    "ioi, unseen names": lambda rng: draw_ioi(rng, names=IOI_UNSEEN_NAMES),
    "capital": lambda rng: FACTS["capital"].draw(rng, held=True),
    "language": lambda rng: FACTS["language"].draw(rng, held=True),
    "continent": lambda rng: FACTS["continent"].draw(rng, held=True),
    "job": lambda rng: FACTS["job"].draw(rng, held=True),
    "home": lambda rng: FACTS["home"].draw(rng, held=True),
    "agreement": lambda rng: draw_agreement(rng, held=True),
}
"""By name, a generator of questions that training does not show."""

# --- documents ---------------------------------------------------------------------------------

ANSWER, IOI_ANSWER, TEMPLATE, NOISE = 1.0, 4.0, 0.1, 0.0
"""Loss weights of a word: what can be known, the same in ioi, the wording, what can't be known."""


@dataclass(frozen=True)
class Text:
    """Words with the weight that the loss gives to each; those that weigh 1 or more are answers."""

    words: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    def __add__(self, other: "Text") -> "Text":
        return Text(self.words + other.words, self.weights + other.weights)

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class Mix:
    """What documents are made of: the shares that hold a list or an ioi sentence, and the lists' lengths."""

    lists: float
    ioi: float
    list_length: tuple[int, int]
    shortest_repeat: int


LONG_LISTS = Mix(lists=1.0, ioi=0.0, list_length=(13, 15), shortest_repeat=10)
"""Phase 1. Long lists alone are what makes induction form; short or rare ones give 0.3 accuracy."""

ALL_KINDS = Mix(lists=0.25, ioi=0.35, list_length=(8, 15), shortest_repeat=6)
"""Phase 2."""

_SHARES = {"capital": 3, "language": 2, "continent": 1, "job": 4, "home": 4, "agreement": 1}
_FILLERS = tuple(kind for kind, share in _SHARES.items() for _ in range(share))


def sentence(rng: random.Random, kind: str) -> Text:
    """A whole sentence of a kind, from the part that training may see."""
    if kind == "ioi":
        example, tail = draw_ioi(rng), ["."]
    elif kind == "agreement":
        example, tail = draw_agreement(rng), [rng.choice(ADJECTIVES), "."]
    else:
        example, tail = FACTS[kind].draw(rng), ["."]
    question = example.words
    answer = IOI_ANSWER if kind == "ioi" else ANSWER
    weights = [TEMPLATE] * len(question) + [answer] + [TEMPLATE] * len(tail)
    return Text((*question, example.answer, *tail), tuple(weights))


def name_list(rng: random.Random, mix: Mix) -> Text:
    """Random names, then a stretch of them again; only what the repetition foretells has weight."""
    names = rng.sample(NAMES, rng.randint(*mix.list_length))
    start = rng.randint(0, len(names) - mix.shortest_repeat)
    repeat = names[start : start + rng.randint(mix.shortest_repeat, len(names) - start)]
    head = names + rng.choice(([], [";"]))
    weights = [NOISE] * (len(head) + 1) + [ANSWER] * (len(repeat) - 1) + [TEMPLATE]
    return Text((*head, *repeat, "."), tuple(weights))


def document(rng: random.Random, mix: Mix, size: int = 32) -> Text:
    """Shuffled sentences behind `<bos>`, as many as come to fit; at most `size` words."""
    share = rng.random()
    parts: list[Text] = []
    if share < mix.lists:
        parts.append(name_list(rng, mix))
    elif share < mix.lists + mix.ioi:
        parts.append(sentence(rng, "ioi"))
    room, misses = size - 1 - sum(map(len, parts)), 0
    while room >= 6 and misses < 4:
        part = sentence(rng, rng.choice(_FILLERS))
        if len(part) <= room:
            parts.append(part)
            room -= len(part)
        else:
            misses += 1
    rng.shuffle(parts)
    whole = sum(parts, Text((BOS,), (NOISE,)))
    return Text(whole.words[:size], whole.weights[:size])


# --- vocabulary --------------------------------------------------------------------------------


def _vocabulary() -> tuple[str, ...]:
    """Every word once: the special tokens, the templates' own words, then the open classes."""
    templates = " ".join(
        [
            *(*IOI_OPENINGS, *IOI_CLOSINGS, *AGREEMENT_TEMPLATES, *VERBS, ".", ";"),
            *(template for facts in FACTS.values() for template in facts.templates),
        ]
    )
    own = sorted({word for word in templates.split() if not word.startswith("{")})
    classes = (NAMES, LAST_NAMES, JOBS, PLACES, OBJECTS, *COUNTRIES, *NOUNS, PREPOSITIONS, ADJECTIVES)
    return tuple(dict.fromkeys([*SPECIALS, *own, *(word for words in classes for word in words)]))


VOCABULARY = _vocabulary()
"""The words by token id; `<pad>` 0, `<bos>` 1, `<eos>` 2, `<unk>` 3."""

ID = {word: i for i, word in enumerate(VOCABULARY)}
