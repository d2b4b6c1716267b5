"""A seeded world: parallel sentences with gold word links and monolingual documents, for demos and tests.

"xx" is an invented language. The verb comes last, adjectives follow their noun, and there are postpositions, but no
articles. Suffixes express case, number, tense and person, and pronouns are left out. "yy" is xx in a script without
spaces. GRAMMAR builds a sentence in English and xx at once. Each token has the concepts that it expresses, and tokens
of both sides with a common concept are linked. Names and punctuation are the same in English and xx. The sentences of a
document reuse its words.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import count, product
from random import Random
from typing import NamedTuple

from xscale.data.link_projection import format_pharaoh

LANGUAGES = ("en", "xx")
"""The languages in which a sentence is built."""
WRITTEN = (*LANGUAGES, "yy")
FIRST_YY = 1_000_000
"""The index of the first en-yy pair of a corpus. The indices of en-xx pairs are lower, so their sentences differ."""

# Earlier words are more frequent; after a slash stand irregular plurals of nouns, and past tenses of verbs.
NOUNS = {
    "person": "man/men woman/women child/children friend mother father teacher boy girl king farmer doctor queen "
    "soldier student merchant",
    "animal": "dog horse cat bird cow wolf/wolves goat rabbit fox mouse/mice lion duck",
    "thing": "bread/breads apple cake egg knife/knives hammer rope axe spoon basket needle bucket lamp broom coat hat "
    "shirt shoe dress scarf/scarves glove ring book letter story song map poem door table box window chair bottle cup",
    "place": "house city village garden river school market forest kitchen mountain temple island bridge",
}
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
    "before": "yesterday recently",
    "after": "tomorrow soon",
    "number": "two three many four several five six seven ten",
    "determiner": "my his her your our their",
    "preposition": "in near behind under with without",
    "conjunction": "because and but when if although while",
    "negation": "not",
    "undone": "not-undone",
    "asked": "asked",
    "topic": "topic",
}
"""Words without inflection. The words of the last three pools are particles that only xx has."""
NAMES = "Anna Tom Maria Peter Clara John Lucy Henry Emma David"
SIGNS = {"stop": ".", "comma": ",", "question": "?"}
FUNCTION = ("determiner", "preposition", "conjunction", "negation", "undone", "asked", "topic", *SIGNS)
"""The pools whose words are not in the dictionary."""

CASES = {"nom": "", "acc": "n", "dat": "ke", "gen": "zo", "loc": "ma"}
NUMBERS = {"one": "", "many": "ri"}
PERSONS = {"one": "", "many": "er", "i": "om", "you": "us", "we": "omi"}
TENSES = {"past": "it", "did": "it", "pres": "ad", "fut": "osh"}
"""The tenses and the suffixes of xx; `did` is the past after "did", where the English verb has its base form."""

GRAMMAR = {
    "sentence": [
        "clause stop",
        "clause stop",
        "did one_subject predicate.did.one question = one_subject predicate.did.one asked question",
        "did many_subject predicate.did.many question = many_subject predicate.did.many asked question",
        "clause.a comma conjunction clause.b stop",
        "conjunction clause.a comma clause.b stop = clause.a conjunction comma clause.b stop",
        "clause.a conjunction clause.b stop = clause.b conjunction comma clause.a stop",
    ],
    "clause": [
        "one_subject predicate.past.one before = before one_subject topic predicate.past.one",
        "many_subject predicate.past.many",
        "one_subject predicate.pres.one",
        "many_subject predicate.pres.many = many_subject topic predicate.pres.many",
        "one_subject will+predicate.fut.one predicate.fut.one after = after one_subject predicate.fut.one",
        "i+predicate.pres.i predicate.pres.i = predicate.pres.i",
        "we+predicate.past.we predicate.past.we = predicate.past.we",
        "you+predicate.fut.you will+predicate.fut.you predicate.fut.you = predicate.fut.you",
        "one_subject did negation predicate.did.one = one_subject negation predicate.did.one undone+negation",
        "many_subject did negation predicate.did.many = many_subject negation predicate.did.many undone+negation",
    ],
    "predicate": [
        "*transitive.{0}.{1} noun.thing.acc adverb = noun.thing.acc adverb *transitive.{0}.{1}",
        "*transitive.{0}.{1} noun.animal.acc where = where noun.animal.acc *transitive.{0}.{1}",
        "*transitive.{0}.{1} noun.person.acc = noun.person.acc *transitive.{0}.{1}",
        "*transitive.{0}.{1} owned.acc = owned.acc *transitive.{0}.{1}",
        "*intransitive.{0}.{1} where adverb = where adverb *intransitive.{0}.{1}",
        "*motion.{0}.{1} to+noun.place.dat noun.place.dat = noun.place.dat *motion.{0}.{1}",
        "*giving.{0}.{1} noun.thing.acc to+noun.person.dat noun.person.dat = "
        "noun.person.dat noun.thing.acc *giving.{0}.{1}",
        "*giving.{0}.{1} noun.thing.acc to+name.one.dat name.one.dat = name.one.dat noun.thing.acc *giving.{0}.{1}",
    ],
    "one_subject": ["one.person.nom", "one.person.nom", "one.animal.nom", "name.one.nom"],
    "many_subject": ["many.person.nom", "many.person.nom", "many.animal.nom"],
    "where": [
        "preposition noun.place.loc = noun.place.loc preposition",
        "preposition noun.thing.loc = noun.thing.loc preposition",
    ],
    "owned": ["*noun.thing.{0} of+noun.person.gen noun.person.gen = noun.person.gen *noun.thing.{0}"],
    "noun": ["*one.{0}.{1}", "*one.{0}.{1}", "*many.{0}.{1}"],
    "one": [
        "the *{0}.one.{1} = *{0}.one.{1}",
        "a *{0}.one.{1} = *{0}.one.{1}",
        "the adjective *{0}.one.{1} = *{0}.one.{1} adjective",
        "a adjective *{0}.one.{1} = *{0}.one.{1} adjective",
        "determiner *{0}.one.{1} = *{0}.one.{1} determiner",
    ],
    "many": [
        "the *{0}.many.{1} = *{0}.many.{1}",
        "number *{0}.many.{1} = *{0}.many.{1} number",
        "adjective *{0}.many.{1} = *{0}.many.{1} adjective",
        "determiner adjective *{0}.many.{1} = *{0}.many.{1} adjective determiner",
    ],
}
"""{phrase: its rules}, of which one is chosen. A rule is the English form and, after " = ", the form in xx if it
differs. A part is a phrase or a pool of words, with its features after dots; {0} and {1} are the features of the whole
phrase. A star marks the head. `to+PART` is the word "to", which expresses the concept of PART. Another word expresses
no concept."""
LITERALS = {"a", "an", "the", "of", "to", "will", "did", "i", "we", "you"}
SYLLABLE = re.compile("[^aeiou]*[aeiou]+|[^aeiou]+")
ONSETS = ("k", "t", "p", "m", "n", "l", "r", "z", "v", "g", "b", "d", "sh", "j")
VOWELS = ("a", "i", "o", "u", "ei")
RETURN = 0.35
"""The probability that a document uses the last word from a pool again, instead of a new word."""

Token = tuple[str, tuple[int, ...]]
"""A form, and the numbers of the concepts that it expresses."""


class Word(NamedTuple):
    """A word. `en` and `xx` map the same grammatical keys to the word's forms; invariable words have the key ""."""

    en: dict[str, str]
    xx: dict[str, str]


class Phrase(NamedTuple):
    """The tokens of a sentence, or of a part of it, by language; and the concept of its head."""

    tokens: dict[str, list[Token]]
    concept: int


def choose_uniformly(rng: Random, options: Sequence[str]) -> str:
    return options[int(rng.random() * len(options))]


def to_yy_script(form: str) -> str:
    """Return a form of xx in the script of yy, which has a Chinese character for each syllable."""
    if form in SIGNS.values():
        return {".": "。", ",": "，", "?": "？"}[form]
    return "".join(chr(0x4E00 + zlib.crc32(syllable.encode()) % 20_000) for syllable in SYLLABLE.findall(form))


def regular_past(verb: str) -> str:
    """Return the regular past tense of an English verb."""
    return verb[:-1] + "ied" if verb.endswith("ry") else verb.removesuffix("e") + "ed"


def regular_s_form(word: str) -> str:
    """Return the regular plural of an English noun, or the regular third person of a verb."""
    if word[-1] == "y" and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def english_pools_and_forms() -> list[tuple[str, dict[str, str]]]:
    """Return the pool of each word, and its English forms by their grammatical keys."""
    words = list[tuple[str, dict[str, str]]]()
    for pool, items in NOUNS.items():
        for item in items.split():
            noun, _, plural = item.partition("/")
            forms = dict[str, str]()
            for case in CASES:
                forms[f"one.{case}"] = noun
                forms[f"many.{case}"] = plural or regular_s_form(noun)
            words.append((pool, forms))
    for name in NAMES.split():
        words.append(("name", {f"one.{case}": name for case in CASES}))
    for pool, items in VERBS.items():
        for item in items.split():
            base, _, past = item.partition("/")
            forms = {f"{tense}.{person}": base for tense, person in product(TENSES, PERSONS)}
            forms["pres.one"] = regular_s_form(base)
            for person in PERSONS:
                forms[f"past.{person}"] = past or regular_past(base)
            words.append((pool, forms))
    for pool, items in (OTHERS | SIGNS).items():
        for form in items.split():
            words.append((pool, {"": form}))
    return words


def xx_suffix(pool: str, grammar_key: str) -> str:
    """Return the suffix of a word of xx for its grammatical key, such as "many.acc" or "past.one"."""
    first, _, second = grammar_key.partition(".")
    if pool in VERBS:
        return TENSES[first] + PERSONS[second]
    return NUMBERS[first] + CASES[second] if grammar_key else ""


def choose_xx_stem(rng: Random, word_class: str, en: dict[str, str], taken_forms: set[str]) -> str:
    """Return the stem of a word of xx: for a name or a sign, the name or sign itself; for other words a new stem, none
    of whose forms is in `taken_forms`."""
    if word_class == "name" or word_class in SIGNS:
        return next(iter(en.values()))
    while True:
        stem = ""
        for _ in range(2 if rng.random() < 0.7 else 3):
            stem += choose_uniformly(rng, ONSETS) + choose_uniformly(rng, VOWELS)
        if taken_forms.isdisjoint(stem + xx_suffix(word_class, key) for key in en):
            return stem


class World:
    """The three languages of a seed. A sentence depends only on the seed and the arguments of `pair` or `document`."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.pools = defaultdict[str, list[Word]](list)
        rng = Random(f"{seed}/lexicon")
        words = english_pools_and_forms()
        taken = LITERALS.union(*(en.values() for _, en in words))
        for pool, en in words:
            stem = choose_xx_stem(rng, pool, en, taken)
            xx = {key: stem + xx_suffix(pool, key) for key in en}
            taken.update(xx.values())
            self.pools[pool].append(Word(en, xx))

    def pair(self, index: int, other: str = "xx") -> tuple[str, str, str]:
        """Return the English text of parallel sentence `index`, its translation into `other` ("xx" or "yy"), and their
        links "i-j ..." between words and symbols."""
        tokens = Composer(self, Random(f"{self.seed}/pair/{index}"), 0.0).sample_sentence()
        places = defaultdict[int, list[int]](list)
        end = 0
        for form, concepts in tokens["xx"]:
            start = end
            end += len(to_yy_script(form)) if other == "yy" else 1
            for concept in concepts:
                places[concept] += range(start, end)
        links = set[tuple[int, int]]()
        for i, (_, concepts) in enumerate(tokens["en"]):
            for concept in concepts:
                links.update((i, j) for j in places[concept])
        return sentence_text(tokens, "en"), sentence_text(tokens, other), format_pharaoh(sorted(links))

    def document(self, language: str, index: int) -> list[str]:
        """Return the sentences of monolingual document `index` of a language."""
        rng = Random(f"{self.seed}/{language}/{index}")
        sentences = min(1 + int(rng.expovariate(1 / 5)), 40)
        composer = Composer(self, rng, RETURN)
        return [sentence_text(composer.sample_sentence(), language) for _ in range(sentences)]

    def dictionary(self) -> list[tuple[str, str]]:
        """Return (en form, xx form) of all content words, without duplicates."""
        entries = dict[tuple[str, str], None]()
        for pool, words in self.pools.items():
            for word in words if pool not in FUNCTION else ():
                entries |= dict.fromkeys(zip(word.en.values(), word.xx.values(), strict=True))
        return list(entries)


def sentence_text(tokens: dict[str, list[Token]], language: str) -> str:
    """Return the text of a sentence in a language. A token is a word or symbol of data/words.py."""
    if language == "yy":
        return "".join(to_yy_script(form) for form, _ in tokens["xx"])
    text = " ".join(form for form, _ in tokens[language])
    text = re.sub(r"\ba (?=[aeiou])", "an ", re.sub(r" (?=[.,?])", "", text))
    return text[0].upper() + text[1:]


class Composer:
    """Writes phrases of GRAMMAR in both languages."""

    def __init__(self, world: World, rng: Random, returning: float):
        """returning: the probability that the last word from a pool is used again."""
        self.pools = world.pools
        self.rng = rng
        self.returning = returning
        self.last = dict[str, Word]()
        """The word that was sampled last from each pool."""
        self.concepts = count()

    def sample_sentence(self) -> dict[str, list[Token]]:
        """Return the tokens of a sentence, of 5 to 22 in English, by language."""
        tokens = {"en": list[Token]()}
        while not 5 <= len(tokens["en"]) <= 22:
            tokens = self.sample_phrase("sentence").tokens
        return tokens

    def sample_phrase(self, symbol: str) -> Phrase:
        """Return a phrase of GRAMMAR, or a word of a pool."""
        name, *features = symbol.split(".")
        if name not in GRAMMAR:
            return self.sample_word(name, ".".join(features))
        rule = choose_uniformly(self.rng, GRAMMAR[name]).format(*features)
        english, _, other = rule.partition(" = ")
        parts = dict[str, Phrase]()
        tokens: dict[str, list[Token]] = {}
        concept = -1
        for language, side in zip(LANGUAGES, (english, other or english), strict=True):
            tokens[language] = []
            for item in side.split():
                literal, _, part = item.removeprefix("*").rpartition("+")
                known = part.partition(".")[0] in (*GRAMMAR, *self.pools)
                if known and part not in parts:
                    parts[part] = self.sample_phrase(part)
                if item.startswith("*"):
                    concept = parts[part].concept
                if literal in self.pools:
                    tokens[language].append((self.pools[literal][0].xx[""], (parts[part].concept,)))
                elif literal:
                    tokens[language].append((literal, (parts[part].concept,)))
                elif known:
                    tokens[language] += parts[part].tokens[language]
                else:
                    tokens[language].append((part, ()))
        return Phrase(tokens, concept)

    def sample_word(self, pool: str, key: str) -> Phrase:
        """Return a word of a pool, which expresses a new concept. The n-th of N words is drawn about sqrt(N / n) times
        as often as the N-th."""
        if pool not in self.last or self.rng.random() >= self.returning:
            words = self.pools[pool]
            self.last[pool] = words[int(len(words) * self.rng.random() ** 2)]
        word = self.last[pool]
        concept = next(self.concepts)
        return Phrase({"en": [(word.en[key], (concept,))], "xx": [(word.xx[key], (concept,))]}, concept)
