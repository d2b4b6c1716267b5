"""A seeded world: parallel sentences with gold word links and monolingual documents, for demos and tests.

"xx" is an invented verb-final language with postpositions, adjectives after the noun, suffixes for case, number, tense
and person, no articles, and dropped first and second person subjects. A small grammar builds each sentence in both
languages at once: every rule samples its parts and puts them in the order of each language. A token has the concepts
that it expresses; tokens of the two sides that share a concept are linked.

Text looks like natural text: punctuation is attached to its word, a sentence begins with a capital, xx has a clitic
after an apostrophe, and names are the same in both languages except for suffixes. "yy" is xx in another script, one
without spaces, in which many words share a character. The sentences of a document reuse its words.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count, product
from random import Random
from typing import NamedTuple

LANGUAGES = ("en", "xx")
"""The languages in which a sentence is built."""
WRITTEN = (*LANGUAGES, "yy")
FIRST_YY = 1_000_000
"""The index of the first en-yy pair of a corpus. It is so high that en-yy and en-xx pairs have different sentences."""

# Earlier words are more frequent; after a slash stand irregular plurals of nouns, and past tenses of verbs.
NOUNS = {
    "person": "man/men woman/women child/children friend mother father teacher boy girl king farmer doctor queen "
    "soldier student merchant",
    "animal": "dog horse cat bird cow wolf/wolves goat rabbit fox mouse/mice lion duck",
    "thing": "bread/breads apple cake egg knife/knives hammer rope axe spoon basket needle bucket lamp broom coat hat "
    "shirt shoe dress scarf/scarves glove ring book letter story song map poem door table box window chair bottle cup",
    "place": "house city village garden river school market forest kitchen mountain temple island bridge",
}
NAMES = "Anna Tom Maria Peter Clara John Lucy Henry Emma David"
VERBS = {
    "transitive": "see/saw find/found buy/bought use love open follow carry help clean wash sell/sold break/broke "
    "repair close draw/drew meet/met feed/fed hear/heard borrow",
    "intransitive": "sleep/slept run/ran sit/sat work laugh fall/fell dance swim/swam",
    "motion": "go/went come/came walk return travel",
    "giving": "give/gave bring/brought show send/sent",
}
OTHERS = {
    "adjective": "old big good small new beautiful bad strange young hungry strong tired angry clever happy rich poor "
    "sad brave kind fresh cold sweet heavy broken white black red green brown famous long quiet dark warm dirty",
    "adverb": "quickly often slowly quietly always carefully sometimes suddenly usually together rarely",
    "past": "yesterday recently",
    "pres": "today now",
    "fut": "tomorrow soon",
    "number": "two three many four several five six seven ten",
    "determiner": "my his her your our their",
    "preposition": "in near behind under with without",
    "subordinate": "because when if although before while",
    "coordinate": "and but",
}
CONTENT = ("noun", "verb", "adjective", "adverb", "past", "pres", "fut", "number")
"""The parts of speech that the dictionary has."""
PRONOUNS = {"i": "1sg", "you": "2", "he": "3sg", "she": "3sg", "we": "1pl", "they": "3pl"}
"""Pronouns, which are subjects, and their persons."""
OTHER_ENGLISH = {"a", "an", "the", "of", "to", "will", "do", "does", "did", "not"}

CASES = {"nom": "", "acc": "n", "dat": "ke", "gen": "zo", "loc": "ma"}
PERSONS = {"1sg": "om", "2": "us", "3sg": "", "1pl": "omi", "3pl": "er"}
TENSES = {"past": "it", "pres": "ad", "fut": "osh"}


def suffix_table(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    """Return "a.b" -> the suffix of a, then that of b."""
    return {f"{a}.{b}": first[a] + second[b] for a, b in product(first, second)}


NOUN_SUFFIXES = suffix_table({"sg": "", "pl": "ri"}, CASES)
VERB_SUFFIXES = suffix_table(TENSES, PERSONS)
SUFFIXES = {"noun": NOUN_SUFFIXES, "verb": VERB_SUFFIXES}
PARTICLES = {"topic": "的", "question": "了", "not": "吗", "after not": "吧"}
"""The particles of xx, and how they are written in yy."""
ONSETS = ("k", "t", "p", "m", "n", "l", "r", "z", "v", "g", "b", "d", "sh", "j")
VOWELS = ("a", "i", "o", "u", "ei")
CODAS = "vzjh"
"""The ends of verbs and of short words. With them, hardly any word is also an English word."""
CHARACTERS = [chr(0x4E00 + 29 * number) for number in range(300)]
"""The characters from which stems of yy are made. A stem has two of them, and a suffix has one other character."""
ALL_SUFFIXES = sorted({*NOUN_SUFFIXES.values(), *VERB_SUFFIXES.values()} - {""})
SUFFIX_CHARACTERS = {"": ""} | {suffix: chr(0x7101 + number) for number, suffix in enumerate(ALL_SUFFIXES)}
GLUED = re.compile(r" (?=[.,?])| ?’ ?")
"""Matches spaces between tokens that the written text does not have: those beside punctuation."""
RETURN = 0.35
"""The probability that a document reuses the word that it last sampled from a pool."""

Token = tuple[str, tuple[int, ...]]
"""A form, and the numbers of the concepts that it expresses."""


@dataclass(eq=False)
class Word:
    """A word. `en` and `xx` map the same grammatical keys to its forms; invariable words have the key ""."""

    pos: str
    en: dict[str, str]
    person: str = "3sg"
    xx: dict[str, str] = field(default_factory=dict)


class Phrase(NamedTuple):
    """Tokens of (a part of) a sentence in both languages, and the concept and the person of its head."""

    en: Sequence[Token] = ()
    xx: Sequence[Token] = ()
    concept: int = -1
    person: str = "3sg"


NOTHING = Phrase()


def choose(rng: Random, options: Sequence[str]) -> str:
    return options[int(rng.random() * len(options))]


def join(en: Sequence[Phrase], xx: Sequence[Phrase]) -> Phrase:
    """Return a phrase that joins phrases: in English in the order of `en`, in xx in the order of `xx`."""
    en_tokens = list[Token]()
    for part in en:
        en_tokens += part.en
    xx_tokens = list[Token]()
    for part in xx:
        xx_tokens += part.xx
    return Phrase(en_tokens, xx_tokens)


def written_text(tokens: Sequence[Token]) -> str:
    """Return the tokens as written text. Each token is one word or symbol of data/words.py."""
    spaced = re.sub(r"\ba (?=[aeiou])", "an ", " ".join(word for word, _ in tokens))
    written = GLUED.sub(lambda match: match[0].strip(), spaced)
    return written[0].upper() + written[1:]


def add_ed(verb: str) -> str:
    """Return the regular past tense of an English verb."""
    return verb[:-1] + "ied" if verb.endswith("ry") else verb.removesuffix("e") + "ed"


def add_s(word: str) -> str:
    """Return the regular plural of an English noun, or the third person of a verb."""
    if word[-1] == "y" and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def english_lexicon() -> dict[str, list[Word]]:
    """Return the words of each pool, without xx forms."""
    pools = defaultdict[str, list[Word]](list)
    for pool, items in NOUNS.items():
        for item in items.split():
            noun, _, plural = item.partition("/")
            forms = dict[str, str]()
            for case in CASES:
                forms[f"sg.{case}"] = noun
                forms[f"pl.{case}"] = plural or add_s(noun)
            pools[pool].append(Word("noun", forms))
    for name in NAMES.split():
        pools["name"].append(Word("noun", {f"sg.{case}": name for case in CASES}))
    for pool, items in VERBS.items():
        for item in items.split():
            base, _, past = item.partition("/")
            forms = dict.fromkeys(VERB_SUFFIXES, base)
            forms["pres.3sg"] = add_s(base)
            for person in PERSONS:
                forms[f"past.{person}"] = past or add_ed(base)
            pools[pool].append(Word("verb", forms))
    for form, person in PRONOUNS.items():
        pools["pronoun"].append(Word("pronoun", {"": form}, person))
    for pool, items in OTHERS.items():
        for form in items.split():
            pools[pool].append(Word(pool, {"": form}))
    return pools


class World:
    """The three languages of a seed. A sentence depends only on the seed and the arguments of `pair` or `document`."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.pools = english_lexicon()
        self.yy = {".": "。", ",": "，", "?": "？", "’": ""}
        """xx token -> its yy form."""
        self.particles = dict[str, str]()
        rng = Random(f"{seed}/lexicon")
        taken = set(OTHER_ENGLISH)
        for word in chain.from_iterable(self.pools.values()):
            taken.update(word.en.values())
        yy_stems = set[str]()
        for word in chain.from_iterable(self.pools.values()):
            suffixes = {key: SUFFIXES.get(word.pos, {"": ""})[key] for key in word.en}
            stem = coin_stem(rng, word, suffixes, taken)
            yy_stem = coin_yy_stem(rng, yy_stems)
            for key, suffix in suffixes.items():
                word.xx[key] = stem + suffix
                self.yy[stem + suffix] = yy_stem + SUFFIX_CHARACTERS[suffix]
        for use, character in PARTICLES.items():
            particle = coin_stem(rng, Word("particle", {}), {"": ""}, taken)
            self.particles[use] = particle
            self.yy[particle] = character

    def pair(self, index: int, other: str = "xx") -> tuple[str, str, str]:
        """Return the English text of parallel sentence `index`, its translation into `other` ("xx" or "yy"), and their
        links "i-j ..." between words and symbols."""
        sentence = Composer(self, Random(f"{self.seed}/pair/{index}"), 0.0).sentence()
        places: dict[int, list[int]] = {}
        end = 0
        for token, concepts in sentence.xx:
            start = end
            end += len(self.yy[token]) if other == "yy" else 1
            for concept in concepts:
                places.setdefault(concept, []).extend(range(start, end))
        links = set[tuple[int, int]]()
        for i, (_, concepts) in enumerate(sentence.en):
            for concept in concepts:
                links.update((i, j) for j in places.get(concept, ()))
        pharaoh = " ".join(f"{i}-{j}" for i, j in sorted(links))
        return written_text(sentence.en), self._written(sentence, other), pharaoh

    def document(self, language: str, index: int) -> list[str]:
        """Return the sentences of monolingual document `index` of a language."""
        if language not in WRITTEN:
            raise ValueError(f"no language {language!r}, only {WRITTEN}")
        rng = Random(f"{self.seed}/{language}/{index}")
        sentences = min(1 + int(rng.expovariate(1 / 5)), 40)
        composer = Composer(self, rng, RETURN)
        return [self._written(composer.sentence(), language) for _ in range(sentences)]

    def _written(self, sentence: Phrase, language: str) -> str:
        if language == "yy":
            return "".join(self.yy[token] for token, _ in sentence.xx)
        return written_text(sentence.en if language == "en" else sentence.xx)

    def dictionary(self) -> list[tuple[str, str]]:
        """Return (en form, xx form) of all content words, without duplicates."""
        entries = dict[tuple[str, str], None]()
        for word in chain.from_iterable(self.pools.values()):
            if word.pos in CONTENT:
                for key, form in word.en.items():
                    entries[form, word.xx[key]] = None
            if word.pos == "verb":  # the base form goes with auxiliaries in all tenses and persons
                for form in word.xx.values():
                    entries[word.en["fut.3sg"], form] = None
        return list(entries)


def coin_stem(rng: Random, word: Word, suffixes: dict[str, str], taken_forms: set[str]) -> str:
    """Return a stem for a word of xx whose forms are all new, and add these forms to `taken_forms`. The stem of a name
    is the name itself."""
    if "sg.nom" in word.en and word.en["sg.nom"].istitle():
        return word.en["sg.nom"]
    while True:
        syllables = 1
        if word.pos in CONTENT:
            syllables = 2 if rng.random() < 0.7 else 3
        stem = ""
        for _ in range(syllables):
            stem += choose(rng, ONSETS) + choose(rng, VOWELS)
        if word.pos == "verb" or word.pos not in (*CONTENT, "pronoun"):
            stem += choose(rng, CODAS)
        forms = {stem + suffix for suffix in suffixes.values()}
        if taken_forms.isdisjoint(forms):
            taken_forms |= forms
            return stem


def coin_yy_stem(rng: Random, taken_stems: set[str]) -> str:
    """Return two characters that are not among `taken_stems`, and add them."""
    stem = ""
    while not stem or stem in taken_stems:
        stem = choose(rng, CHARACTERS) + choose(rng, CHARACTERS)
    taken_stems.add(stem)
    return stem


class Composer:
    """The grammar. Each rule is a method that samples a phrase in both languages."""

    def __init__(self, world: World, rng: Random, returning: float):
        """returning: the probability that a word that was sampled last from a pool is used again."""
        self.world = world
        self.rng = rng
        self.returning = returning
        self.last = dict[str, Word]()
        """The word that was sampled last from each pool."""
        self.concepts = count()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def draw(self, pool: str) -> Word:
        """Return a word of a pool. The n-th of N words is drawn about sqrt(N / n) times as often as the last."""
        if pool not in self.last or not self.chance(self.returning):
            words = self.world.pools[pool]
            self.last[pool] = words[int(len(words) * self.rng.random() ** 2)]
        return self.last[pool]

    def express(self, word: Word, key: str = "") -> Phrase:
        """Return a phrase of one form of a word in both languages, which expresses a new concept."""
        concept = next(self.concepts)
        return Phrase([(word.en[key], (concept,))], [(word.xx[key], (concept,))], concept, word.person)

    def maybe_word(self, pool: str, probability: float = 1.0) -> Phrase:
        """Return an invariable word from a pool with this probability, otherwise NOTHING."""
        return self.express(self.draw(pool)) if self.chance(probability) else NOTHING

    def particle(self, use: str, *concepts: int) -> Phrase:
        return Phrase(xx=[(self.world.particles[use], concepts)])

    def punctuation(self, sign: str) -> Phrase:
        concept = next(self.concepts)
        return Phrase([(sign, (concept,))], [(sign, (concept,))])

    def adposition(self, preposition: str, phrase: Phrase) -> Phrase:
        """Return the noun phrase after an English preposition. In xx, its case suffix has that meaning."""
        return phrase._replace(en=[(preposition, (phrase.concept,)), *phrase.en])

    def noun_phrase(self, pools: Sequence[str], case: str, depth: int = 1) -> Phrase:
        """Return a noun phrase. At depth 0 it may have an owner."""
        pool = choose(self.rng, pools)
        if pool == "name":
            return self.express(self.draw(pool), f"sg.{case}")
        number = "pl" if self.chance(0.3) else "sg"
        noun = self.express(self.draw(pool), f"{number}.{case}")
        roll = self.rng.random()
        front = NOTHING
        if roll < 0.14:
            front = self.maybe_word("determiner")
        elif roll < 0.35 and number == "pl":
            front = self.maybe_word("number")
        elif roll < 0.7:
            front = Phrase([("the", ())])
        elif number == "sg":
            front = Phrase([("a", ())])
        adjective = self.maybe_word("adjective", 0.4)
        owner = NOTHING
        if depth == 0 and self.chance(0.15):
            owner = self.adposition("of", self.noun_phrase(("person", "name"), "gen"))
        whole = join((front, adjective, noun, owner), (owner, noun, adjective, front))
        return whole._replace(concept=noun.concept, person="3pl" if number == "pl" else "3sg")

    def complements(self, kind: str) -> Phrase:
        """Return the complements of a verb of a kind. In English they follow it, in xx most precede it."""
        thing = goal = place = NOTHING
        if kind == "transitive":
            thing = self.noun_phrase(("thing", "thing", "animal", "person", "name"), "acc", 0)
        elif kind == "giving":
            thing = self.noun_phrase(("thing",), "acc")
            goal = self.adposition("to", self.noun_phrase(("person", "name"), "dat"))
        elif kind == "motion":
            goal = self.adposition("to", self.noun_phrase(("place",), "dat"))
        if self.chance(0.25):
            preposition = self.maybe_word("preposition")
            where = self.noun_phrase(("place", "thing"), "loc")
            place = join((preposition, where), (where, preposition))
        adverb = self.maybe_word("adverb", 0.2)
        return join((thing, goal, place, adverb), (place, goal, thing, adverb))

    def clause(self, ask: bool = False) -> Phrase:
        kind = choose(self.rng, ("transitive", "transitive", "transitive", "intransitive", "motion", "giving"))
        tense = choose(self.rng, ("past", "past", "past", "pres", "pres", "pres", "fut", "fut"))
        verb = self.draw(kind)
        if self.chance(0.2):
            subject = self.express(self.draw("pronoun"))
        else:
            subject = self.noun_phrase(("person", "person", "animal", "name"), "nom", 0)
        rest = self.complements(kind)
        time = self.maybe_word(tense, 0.25)
        is_negated = self.chance(0.14)

        key = f"{tense}.{subject.person}"
        action = next(self.concepts)
        auxiliary = NOTHING
        form = verb.en[key]
        if tense == "fut":
            auxiliary = Phrase([("will", (action,))])
        elif ask or is_negated:
            do = {"past": "did", "pres.3sg": "does"}
            auxiliary = Phrase([(do.get(tense) or do.get(key, "do"), ())])
            form = verb.en["fut.3sg"]
        is_dropped = subject.person[0] in "12"  # only the verb's suffix expresses the subject
        expressed = (action, subject.concept) if is_dropped else (action,)
        predicate = Phrase([(form, (action,))], [(verb.xx[key], expressed)])
        topic = denied = undone = asked = NOTHING
        if not is_dropped and self.chance(0.3):
            topic = Phrase(xx=[("’", ()), *self.particle("topic").xx])
        if is_negated:
            denial = next(self.concepts)
            denied = self.particle("not", denial)._replace(en=[("not", (denial,))])
            undone = self.particle("after not", denial)
        opening = (subject, auxiliary)
        if ask:
            asked = self.particle("question")
            opening = (auxiliary, subject)
        return join(
            (*opening, denied, predicate, rest, time),
            (time, NOTHING if is_dropped else subject, topic, rest, denied, predicate, undone, asked),
        )

    def sentence(self) -> Phrase:
        """Return a sentence of 5 to 22 English tokens."""
        sentence = NOTHING
        while not 5 <= len(sentence.en) <= 22:
            sentence = self.any_sentence()
        return sentence

    def any_sentence(self) -> Phrase:
        roll = self.rng.random()
        whole = main = self.clause(ask=roll < 0.14)
        if roll > 0.65:
            other = self.clause()
            conjunction = self.maybe_word("subordinate" if roll < 0.85 else "coordinate")
            comma = self.punctuation(",")
            if roll > 0.85:
                whole = join((main, conjunction, other), (main, comma, conjunction, other))
            elif self.chance(0.4):
                whole = join((conjunction, other, comma, main), (other, conjunction, comma, main))
            else:
                whole = join((main, conjunction, other), (other, conjunction, comma, main))
        end = self.punctuation("?" if roll < 0.14 else ".")
        return join((whole, end), (whole, end))
