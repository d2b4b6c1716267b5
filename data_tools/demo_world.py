"""A seeded world: parallel sentences with gold word links and monolingual documents, for demos and tests.

"xx" is an invented verb-final language with postpositions, adjectives after the noun, suffixes for case,
number, tense and person, no articles, and dropped first and second person subjects. A small grammar builds
each sentence in both languages at once: every rule samples its parts and puts them in the order of each
language. A token has the concepts that it expresses; tokens of the two sides that share a concept are linked.

Text looks like natural text: punctuation is attached to its word, a sentence begins with a capital, xx has a clitic
after an apostrophe, and names are the same in both languages except for suffixes. "yy" is xx in another script, one
without spaces, in which many words share a character. The sentences of a document reuse its words.
"""

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random
from typing import NamedTuple

LANGUAGES = ("en", "xx")
"""The languages in which a sentence is built."""
WRITTEN = (*LANGUAGES, "yy")
FIRST_YY = 1_000_000
"""The index of the first en-yy pair of a corpus. It is so high that en-yy and en-xx pairs have different sentences."""

# In the tables: word/irregular-form, word~ for a mass noun, word+particle for a phrasal verb, and capital
# letters for noun classes. Earlier words are more frequent.
NOUNS = {
    "P": "man/men woman/women child/children friend mother father teacher boy girl king farmer doctor "
    "queen soldier student merchant",
    "A": "dog horse cat bird cow wolf/wolves goat rabbit fox mouse/mice lion duck",
    "F": "bread~ apple rice~ soup~ meat~ cake cheese~ egg potato carrot onion",
    "D": "water~ milk~ tea~ wine~ coffee~ juice~",
    "T": "knife/knives hammer rope axe spoon basket needle bucket lamp broom",
    "L": "house city village garden river school market forest kitchen mountain temple island bridge",
    "C": "coat hat shirt shoe dress scarf/scarves glove ring",
    "X": "book letter story song map poem newspaper",
    "O": "door table box window chair bottle bed cup",
    "V": "car boat train cart bicycle",
}
NAMES = {"P": "Anna Tom Maria Peter Clara John Lucy Henry Emma David"}
FEMALE = {"woman", "mother", "girl", "queen", "Anna", "Maria", "Clara", "Lucy", "Emma"}
VERBS = {  # subject classes:object classes:verb
    "transitive": "PA:PALV:see/saw PA:F:eat/ate PA:FTCX:find/found P:FTCV:buy/bought PA:D:drink/drank "
    "P:X:read/read P:T:use P:PAFX:love P:O:open PA:PATX:look+for PA:PA:follow P:C:wear/wore P:F:cook "
    "P:X:write/wrote P:PL:visit P:TOF:carry P:P:help P:OL:clean P:V:drive/drove P:PV:wait+for P:COV:wash "
    "P:FTCV:sell/sold PA:TO:break/broke P:TOV:repair P:O:close P:LV:build/built A:PA:chase P:TCF:pick+up "
    "P:P:meet/met P:D:pour P:A:feed/fed P:C:take+off/took P:T:sharpen PA:FD:taste PA:PA:hear/heard "
    "P:TXV:borrow",
    "intransitive": "PA::sleep/slept PA::run/ran PA::sit/sat P::work PA::wake+up/woke P::laugh "
    "PAFTXO::fall/fell P::dance PA::swim/swam PV::arrive",
    "motion": "PA:L:go/went PAV:L:come/came PA:L:walk PAV:L:return P:L:travel",
    "giving": "P:FTCX:give/gave P:FDT:bring/brought P:XCV:show P:XF:send/sent",
    "saying": "P::say/said P::think/thought P::know/knew P::believe",
    "wanting": "PA::want PA::try P::begin/began P::forget/forgot",
}
ADJECTIVES = {
    "PATLCXOV": "old big good small new beautiful bad strange",
    "PA": "young hungry strong tired angry clever lazy",
    "P": "happy rich poor sad brave kind",
    "FD": "fresh hot cold sweet sour delicious",
    "TOV": "heavy broken wooden rusty",
    "ACOV": "white black red green brown",
    "XPL": "famous long boring",
    "L": "quiet dark distant",
    "C": "warm dirty",
}
PREPOSITIONS = {"L": "in from", "O": "on under", "LO": "near behind", "PT": "with without", "P": "for"}
PRONOUNS = {"P": "3sg:he/him 1sg:i/me 3sg:she/her 2:you/you 3pl:they/them 1pl:we/us", "A": "3sg:it/it"}
INVARIABLE = {  # part of speech and kind
    "adverb manner": "quickly slowly quietly carefully suddenly together",
    "adverb frequency": "often always sometimes usually rarely",
    "adverb past": "yesterday recently",
    "adverb pres": "today now",
    "adverb fut": "tomorrow soon",
    "adverb degree": "very quite too",
    "number number": "two three many four several five six seven ten",
    "determiner sg": "my this his her that your our their",
    "determiner pl": "my these his those her your our their",
    "conjunction subordinate": "because when if although before while",
    "conjunction coordinate": "and but",
    "conjunction and": "and",
    "conjunction that": "that",
    "conjunction who": "who",
    "conjunction which": "which",
}
OTHER_ENGLISH = {"a", "an", "the", "of", "to", "will", "do", "does", "did", "not", "up", "off"}
CONTENT = ("noun", "verb", "adjective", "adverb", "number")

CASES = {"nom": "", "acc": "n", "dat": "ke", "gen": "zo", "loc": "ma"}
PERSONS = {"1sg": "om", "2": "us", "3sg": "", "1pl": "omi", "3pl": "er"}
TENSES = {"past": "it", "pres": "ad", "fut": "osh"}
NOUN_SUFFIXES = {f"{n}.{c}": end + CASES[c] for n, end in (("sg", ""), ("pl", "ri")) for c in CASES}
VERB_SUFFIXES = {f"{t}.{p}": TENSES[t] + PERSONS[p] for t in TENSES for p in PERSONS} | {"inf": "ul"}
SUFFIXES = {"noun": NOUN_SUFFIXES, "verb": VERB_SUFFIXES, "copula": VERB_SUFFIXES, "pronoun": CASES}
ONSETS = ("k", "t", "p", "m", "n", "l", "r", "z", "v", "g", "b", "d", "sh", "j")
VOWELS, CODAS = ("a", "i", "o", "u", "ei"), "vzjh"  # hardly a word comes out as an English one
CHARACTERS = [chr(0x4E00 + 29 * i) for i in range(300)]
"""The characters from which stems of yy are made. A stem has two of them, and a suffix has one other character."""
_ALL_SUFFIXES = sorted({*NOUN_SUFFIXES.values(), *VERB_SUFFIXES.values(), *CASES.values()})
SUFFIX_CHARACTERS = {suffix: chr(0x7101 + number) for number, suffix in enumerate(_ALL_SUFFIXES)}
PARTICLE_CHARACTERS = "的了吗吧"
OF_YY = {".": "。", ",": "，", "?": "？"}
GLUED = re.compile(r" (?=[.,?])| ?’ ?")
"""Matches spaces between tokens that the written text does not have: those beside punctuation."""
RETURN = 0.35
"""The probability that a document reuses the word that it last sampled from a pool."""

TENSES_DRAWN = ("past",) * 3 + ("pres",) * 3 + ("fut",) * 2
SIMPLE_VERBS = ("transitive",) * 10 + ("intransitive",) * 3 + ("motion", "be") * 2 + ("giving",)
ALL_VERBS = (*SIMPLE_VERBS, "giving", "saying", "wanting")

Token = tuple[str, tuple[int, ...]]  # surface form, and the numbers of the concepts that it expresses


@dataclass(eq=False)
class Word:
    """A word of the lexicon. `en` and `xx` map the same grammatical keys to its forms; invariable words have ""."""

    pos: str
    kind: str  # noun class, verb class, ...
    rank: int
    en: dict[str, str]
    subjects: str = ""  # noun classes
    objects: str = ""  # noun classes; for adjectives, those of the nouns they go with
    particle: str = ""
    person: str = "3sg"
    xx: dict[str, str] = field(default_factory=dict)


class Phrase(NamedTuple):
    """Tokens of (a part of) a sentence in both languages, with the properties of its head that the grammar needs."""

    en: Sequence[Token] = ()
    xx: Sequence[Token] = ()
    head: Word = Word("", "", 0, {})
    concept: int = -1
    person: str = "3sg"


NOTHING = Phrase()


class Pool:
    """Words to sample from, Zipf-distributed by rank. If there is an `rng`, it perturbs the ranks, so that each pool
    has other frequent words."""

    def __init__(self, words: list[Word], rng: Random | None):
        self.words = sorted(words, key=lambda word: (word.rank + 4) * rng.random() if rng else word.rank)
        weights = list(accumulate(1 / (i + 1.5) for i in range(len(words))))
        self.bounds = [weight / weights[-1] for weight in weights[:-1]]

    def draw(self, rng: Random) -> Word:
        return self.words[bisect(self.bounds, rng.random())]


def choose(rng: Random, options: Sequence[str]) -> str:
    return options[int(rng.random() * len(options))]


def join(en: Sequence[Phrase], xx: Sequence[Phrase]) -> Phrase:
    """Return a phrase that joins phrases: in English in the order of `en`, in xx in the order of `xx`."""
    return Phrase([token for part in en for token in part.en], [token for part in xx for token in part.xx])


def written_text(tokens: Sequence[Token]) -> str:
    """Return the tokens as written text. Each token is one word or symbol of data/words.py."""
    spaced = re.sub(r"\ba (?=[aeiou])", "an ", " ".join(word for word, _ in tokens))
    written = GLUED.sub(lambda match: match[0].strip(), spaced)
    return written[0].upper() + written[1:]


def add_s(word: str) -> str:
    """Return the regular plural of an English noun, or the third person of a verb."""
    if word[-1] == "y" and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def english_verb(base: str, past: str = "") -> dict[str, str]:
    past = past or (base[:-1] + "ied" if base.endswith("ry") else base + ("d" if base[-1] == "e" else "ed"))
    forms = dict.fromkeys(VERB_SUFFIXES, base) | {"pres.3sg": add_s(base)}
    return forms | {f"past.{person}": past for person in PERSONS}


def table_items(table: dict[str, str]) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (label, rank, fields) for each item of a table such as NOUNS."""
    for label, items in table.items():
        for rank, item in enumerate(items.split()):
            yield label, rank, re.split("[:/]", item)


def english_lexicon() -> list[Word]:
    """Return all words. Their `xx` forms are empty."""
    words = []
    for kind, rank, (noun, *plural) in table_items(NOUNS):
        forms = {f"sg.{case}": noun.rstrip("~") for case in CASES}
        if not noun.endswith("~"):
            forms |= {f"pl.{case}": plural[0] if plural else add_s(noun) for case in CASES}
        words.append(Word("noun", kind, rank, forms))
    for kind, rank, (name,) in table_items(NAMES):
        words.append(Word("noun", kind, rank + 4, {f"sg.{case}": name for case in CASES}))
    for kind, rank, (subjects, objects, verb, *past) in table_items(VERBS):
        verb, _, particle = verb.partition("+")
        words.append(Word("verb", kind, rank, english_verb(verb, *past), subjects, objects, particle))
    be = {f"{t}.{p}": form for t, form in (("pres", "are"), ("past", "were"), ("fut", "be")) for p in PERSONS}
    be |= {"pres.1sg": "am", "pres.3sg": "is", "past.1sg": "was", "past.3sg": "was", "inf": "be"}
    words.append(Word("copula", "be", 0, be, "".join(NOUNS)))
    for classes, rank, (adjective,) in table_items(ADJECTIVES):
        words.append(Word("adjective", "", rank, {"": adjective}, objects=classes))
    for classes, rank, (preposition,) in table_items(PREPOSITIONS):
        words.append(Word("preposition", "", rank, {"": preposition}, objects=classes))
    for kind, rank, (person, subject, other) in table_items(PRONOUNS):
        forms = dict.fromkeys(CASES, other) | {"nom": subject}
        words.append(Word("pronoun", kind, rank, forms, person=person))
    for label, rank, (word,) in table_items(INVARIABLE):
        pos, kind = label.split()
        words.append(Word(pos, kind, rank, {"": word}))
    return words


def coin_xx_forms(rng: Random, pos: str, suffixes: dict[str, str], taken_forms: set[str]) -> dict[str, str]:
    """Return the forms of a new word of xx, by the keys of `suffixes`, and add them to `taken_forms`."""
    short = pos not in (*CONTENT, "copula")
    while True:
        syllables = 1 if short else 2 if rng.random() < 0.7 else 3
        stem = "".join(choose(rng, ONSETS) + choose(rng, VOWELS) for _ in range(syllables))
        if pos not in ("noun", "adjective", "adverb", "number", "pronoun"):
            stem += choose(rng, CODAS)
        forms = {key: stem + suffix for key, suffix in suffixes.items()}
        if taken_forms.isdisjoint(forms.values()):
            taken_forms.update(forms.values())
            return forms


def coin_yy_forms(
    rng: Random, forms: dict[str, str], suffixes: dict[str, str], taken_stems: set[str]
) -> dict[str, str]:
    """Return {xx form of a word: its yy form}. Their new stem is added to `taken_stems`."""
    while (stem := choose(rng, CHARACTERS) + choose(rng, CHARACTERS)) in taken_stems:
        pass
    taken_stems.add(stem)
    return {form: stem + (SUFFIX_CHARACTERS[suffixes[key]] if suffixes[key] else "") for key, form in forms.items()}


class World:
    """The three languages of a seed. A sentence depends only on the seed and the arguments of `pair` or `document`."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        rng = Random(f"{seed}/lexicon")
        self.words = english_lexicon()
        taken = {form for word in self.words for form in word.en.values()} | OTHER_ENGLISH
        coined: dict[object, dict[str, str]] = {}
        self.yy = {**OF_YY, "’": ""}
        """xx token -> its yy form."""
        stems: set[str] = set()
        for word in self.words:  # "he", "she" and "it" are one word in xx; some words are in two tables
            name = (word.pos, word.person if word.pos == "pronoun" else word.en.get("", word))
            if name not in coined:
                of_pos = SUFFIXES.get(word.pos, {"": ""})
                suffixes = {key: of_pos[key] for key in word.en}
                base = word.en.get("sg.nom", "")
                if base.istitle():
                    coined[name] = {key: base + suffix for key, suffix in suffixes.items()}
                else:
                    coined[name] = coin_xx_forms(rng, word.pos, suffixes, taken)
                self.yy |= coin_yy_forms(rng, coined[name], suffixes, stems)
            word.xx = coined[name]
        particles = ("topic", "question", "not", "after not")
        self.particles = {name: coin_xx_forms(rng, "particle", {"": ""}, taken)[""] for name in particles}
        for number, form in enumerate(self.particles.values()):
            self.yy[form] = PARTICLE_CHARACTERS[number]
        self.pronouns = {word.en["nom"]: word for word in self.words if word.pos == "pronoun"}
        groups = [(key, words) for key, words in self._groups().items() if words]
        self.pools = {key: Pool(words, rng if isinstance(key[0], Word) else None) for key, words in groups}

    def _groups(self) -> dict[tuple[Word | str, str], list[Word]]:
        """Return {key of a pool: its words}. If the key contains a Word, they can go with that word."""
        of: dict[str, list[Word]] = {}
        groups: dict[tuple[Word | str, str], list[Word]] = {}
        for word in self.words:
            of.setdefault(word.pos, []).append(word)
            groups.setdefault((word.pos, word.kind), []).append(word)
        for word in of["noun"] + of["pronoun"]:
            groups[word, "adjective"] = [other for other in of["adjective"] if word.kind in other.objects]
        for word in of["verb"] + of["copula"] + of["preposition"]:
            groups[word, "subject"] = [noun for noun in of["noun"] if noun.kind in word.subjects]
            groups[word, "object"] = [noun for noun in of["noun"] if noun.kind in word.objects]
            groups[word, "manner"] = groups["adverb", "manner"]
        for verb in of["verb"] + of["copula"]:
            groups.setdefault((verb.kind, ""), []).append(verb)
            for noun_kind in verb.subjects:
                groups.setdefault((verb.kind, noun_kind), []).append(verb)
            for noun_kind in verb.objects if verb.kind == "transitive" else "":
                groups.setdefault(("taking", noun_kind), []).append(verb)
        return groups

    def pair(self, index: int, other: str = "xx") -> tuple[str, str, str]:
        """Return the English text of parallel sentence `index`, its translation into `other` ("xx" or "yy"), and their
        links "i-j ..." between words and symbols."""
        sentence = Composer(self, Random(f"{self.seed}/pair/{index}")).sentence()
        places: dict[int, list[int]] = {}
        j = 0
        for token, concepts in sentence.xx:
            words = len(self.yy[token]) if other == "yy" else 1
            for concept in concepts:
                places.setdefault(concept, []).extend(range(j, j + words))
            j += words
        links = {(i, j) for i, (_, cs) in enumerate(sentence.en) for c in cs for j in places.get(c, ())}
        return written_text(sentence.en), self._written(sentence, other), " ".join(f"{i}-{j}" for i, j in sorted(links))

    def document(self, language: str, index: int) -> list[str]:
        """Return the sentences of monolingual document `index` of a language."""
        if language not in WRITTEN:
            raise ValueError(f"no language {language!r}, only {WRITTEN}")
        rng = Random(f"{self.seed}/{language}/{index}")
        topic: Topic = {}
        sentences = min(1 + int(rng.expovariate(1 / 5)), 40)
        return [self._written(Composer(self, rng, topic).sentence(), language) for _ in range(sentences)]

    def _written(self, sentence: Phrase, language: str) -> str:
        if language == "yy":
            return "".join(self.yy[token] for token, _ in sentence.xx)
        return written_text(sentence.en if language == "en" else sentence.xx)

    def dictionary(self) -> list[tuple[str, str]]:
        """Return (en form, xx form) of all content words, without duplicates."""
        entries = []
        for word in self.words:
            if word.pos in CONTENT:
                entries += [(form, word.xx[key]) for key, form in word.en.items()]
            if word.pos == "verb":  # the base form goes with auxiliaries in all tenses and persons
                entries += [(word.en["inf"], form) for form in word.xx.values()]
        return list(dict.fromkeys(entries))


Topic = dict[tuple[Word | str, str], Word]
"""Key of a pool of the world -> the word that a document last sampled from the pool."""


class Composer:
    """The grammar. Each rule is a method that samples a phrase in both languages."""

    def __init__(self, world: World, rng: Random, topic: Topic | None = None):
        self.world, self.rng, self.topic = world, rng, topic
        self.concepts = count()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def express(self, word: Word, key: str = "") -> Phrase:
        """Return a phrase of one form of a word in both languages, which expresses a new concept."""
        c = next(self.concepts)
        return Phrase([(word.en[key], (c,))], [(word.xx[key], (c,))], word, c, word.person)

    def draw(self, owner: Word | str, group: str) -> Word:
        """Return a word sampled from a pool of the world; in a document, often the word sampled last."""
        if self.topic is None:
            return self.world.pools[owner, group].draw(self.rng)
        known = self.topic.get((owner, group))
        if known is None or not self.chance(RETURN):
            known = self.topic[owner, group] = self.world.pools[owner, group].draw(self.rng)
        return known

    def maybe_word(self, pos: Word | str, kind: str, probability: float = 1.0) -> Phrase:
        """Return an invariable word from a pool with this probability, otherwise NOTHING."""
        return self.express(self.draw(pos, kind)) if self.chance(probability) else NOTHING

    def punctuation(self, sign: str) -> Phrase:
        c = next(self.concepts)
        return Phrase([(sign, (c,))], [(sign, (c,))])

    def particle(self, name: str, *concepts: int) -> Phrase:
        apostrophe: list[Token] = [("’", ())] if name == "topic" else []
        return Phrase(xx=[*apostrophe, (self.world.particles[name], concepts)])

    def adjective(self, noun: Word) -> Phrase:
        degree, adjective = self.maybe_word("adverb", "degree", 0.15), self.maybe_word(noun, "adjective")
        return join((degree, adjective), (adjective, degree))

    def noun_phrase(self, owner: Word | str, group: str, case: str, depth: int) -> Phrase:
        """Return a noun phrase. `depth` 0 allows all modifiers, 1 and 2 fewer."""
        noun = self.draw(owner, group)
        countable = "pl.nom" in noun.en
        if noun.kind == "P" and not countable:
            return self.express(noun, f"sg.{case}")
        number = "pl" if countable and self.chance(0.3) else "sg"
        core = self.express(noun, f"{number}.{case}")
        roll = self.rng.random()
        if roll < 0.14:
            front = self.maybe_word("determiner", number)
        elif roll < 0.4 and number == "pl":
            front = self.maybe_word("number", "number")
        elif roll < 0.7:
            front = Phrase([("the", ())])
        else:
            front = Phrase([("a", ())]) if countable and number == "sg" else NOTHING
        adjective = self.adjective(noun) if self.chance((0.4, 0.25, 0.15)[depth]) else NOTHING
        before = after = NOTHING  # in xx; both follow the noun in English
        person = "3pl" if number == "pl" else "3sg"
        roll = self.rng.random() if depth == 0 else 1.0
        if roll < 0.06:
            before = self.adposition("of", self.noun_phrase("noun", "P", "gen", 2))
        elif roll < 0.18:
            after = self.relative(noun, person)
        elif roll < 0.25:
            conjunction, other = self.maybe_word("conjunction", "and"), self.noun_phrase("noun", noun.kind, case, 2)
            after, person = join((conjunction, other), (other, conjunction)), "3pl"
        whole = join((front, adjective, core, before, after), (before, core, adjective, front, after))
        return Phrase(whole.en, whole.xx, noun, core.concept, person)

    def adposition(self, preposition: str, phrase: Phrase) -> Phrase:
        """Return the noun phrase after an English preposition. In xx, its case suffix has that meaning."""
        return phrase._replace(en=[(preposition, (phrase.concept,)), *phrase.en])

    def relative(self, noun: Word, person: str) -> Phrase:
        """Return a relative clause about a noun: what a living thing does, or what is done to anything else."""
        relativiser = self.maybe_word("conjunction", "who" if noun.kind == "P" else "which")
        tense = choose(self.rng, TENSES_DRAWN)
        if noun.kind in "PA":
            clause = self.clause(tense, 1, subject=Phrase(head=noun, person=person))
        else:
            clause = self.clause(tense, 1, gap=noun.kind)
        return join((relativiser, clause), (clause, relativiser))

    def participant(self, verb: Word, role: str, case: str, depth: int) -> Phrase:
        """Return the subject or object of a verb (role "subject" or "object")."""
        if "P" in getattr(verb, f"{role}s") and self.chance(0.15):
            return self.express(self.draw("pronoun", "P"), case)
        return self.noun_phrase(verb, role, case, depth)

    def back_reference(self, subject: Phrase) -> Phrase:
        """Return the pronoun that refers to an earlier subject."""
        noun = subject.head
        if noun.pos == "pronoun":
            return self.express(noun, "nom")
        singular = "it" if noun.kind == "A" else "she" if noun.en["sg.nom"] in FEMALE else "he"
        return self.express(self.world.pronouns["they" if subject.person == "3pl" else singular], "nom")

    def complements(self, verb: Word, subject: Phrase, depth: int, gap: str) -> Phrase:
        """Return the complements of a verb. In English they follow the verb; in the invented language xx
        they mostly precede it."""
        if verb.kind == "be":
            return self.adjective(subject.head)
        if verb.kind == "wanting":
            return self.clause("inf", 1, subject=Phrase(head=subject.head))
        if verb.kind == "saying":
            that, said = self.maybe_word("conjunction", "that"), self.clause(choose(self.rng, TENSES_DRAWN), 1)
            return join((that, said), (said, that))
        thing = goal = place = NOTHING
        if verb.kind in ("transitive", "giving") and not gap:
            thing = self.participant(verb, "object", "acc", depth)
        if verb.kind == "motion":
            goal = self.adposition("to", self.noun_phrase(verb, "object", "dat", 2))
        elif verb.kind == "giving":
            goal = self.adposition("to", self.noun_phrase("noun", "P", "dat", 2))
        if self.chance(0.1 if depth else 0.35):
            preposition = self.maybe_word("preposition", "")
            where = self.noun_phrase(preposition.head, "object", "loc", 2)
            place = join((preposition, where), (where, preposition))
        manner = self.maybe_word(verb, "manner", 0.12)
        return join((thing, goal, place, manner), (place, goal, thing, manner))

    def clause(self, tense: str, depth: int, subject: Phrase = NOTHING, gap: str = "", ask: bool = False) -> Phrase:
        """Return a clause. subject: the clause's subject, which may have no tokens; NOTHING: sample one. gap: the class
        of the noun that a relative clause is about and whose object is therefore left out."""
        kind = choose(self.rng, SIMPLE_VERBS if depth else ALL_VERBS)
        if gap:
            verb = self.draw("taking", gap)
        else:  # animals give nothing and say nothing
            known = (kind, subject.head.kind) in self.world.pools
            verb = self.draw(kind if known else "transitive", subject.head.kind)
        if subject is NOTHING:
            subject = self.participant(verb, "subject", "nom", depth)
        rest = self.complements(verb, subject, depth, gap)
        frequency = NOTHING if tense == "inf" else self.maybe_word("adverb", "frequency", 0.1)
        time = NOTHING if depth or verb.kind in ("saying", "wanting") else self.maybe_word("adverb", tense, 0.25)
        negated = tense != "inf" and self.chance(0.14)

        key = "inf" if tense == "inf" else f"{tense}.{subject.person}"
        action, denial = next(self.concepts), next(self.concepts)
        form: list[Token] = [(verb.en[key], (action,))]
        base: list[Token] = [(verb.en["inf"], (action,))]
        auxiliary: list[Token] = []
        main = form
        if tense in ("inf", "fut"):
            auxiliary, main = [("to" if tense == "inf" else "will", (action,))], base
        elif verb.kind == "be":
            auxiliary, main = form, []
        elif ask or negated:
            support = "did" if tense == "past" else "does" if key == "pres.3sg" else "do"
            auxiliary, main = [(support, ())], base
        if verb.particle:
            main = [*main, (verb.particle, (action,))]

        verbless = verb.kind == "be" and tense == "pres"
        dropped = subject.person[0] in "12" and not verbless  # only the verb's suffix expresses it
        suffixed = (action, subject.concept) if dropped else (action,)
        predicate = Phrase(main, [] if verbless else [(verb.xx[key], suffixed)])
        topic = self.particle("topic") if not (depth or dropped) and self.chance(0.3) else NOTHING
        denied = undone = NOTHING
        if negated:
            denied = self.particle("not", denial)._replace(en=[("not", (denial,))])
            undone = self.particle("after not", denial)
        asked = self.particle("question") if ask else NOTHING
        opening = (Phrase(auxiliary), subject) if ask else (subject, Phrase(auxiliary))
        whole = join(
            (*opening, denied, frequency, predicate, rest, time),
            (time, NOTHING if dropped else subject, topic, rest, frequency, denied, predicate, undone, asked),
        )
        return Phrase(whole.en, whole.xx, subject.head, subject.concept, subject.person)

    def sentence(self) -> Phrase:
        """Return a sentence of 5 to 22 English tokens."""
        while not 5 <= len((drawn := self._sentence()).en) <= 22:
            pass
        return drawn

    def _sentence(self) -> Phrase:
        roll = self.rng.random()
        question, subordinate, coordinate = roll < 0.14, 0.65 < roll < 0.85, roll > 0.85
        tense = choose(self.rng, TENSES_DRAWN)
        whole = main = self.clause(tense, 0, ask=question)
        if subordinate or coordinate:
            again = self.back_reference(main) if main.head.kind in "PA" and self.chance(0.4) else NOTHING
            other = self.clause(tense, 1, subject=again)
            conjunction = self.maybe_word("conjunction", "subordinate" if subordinate else "coordinate")
            comma = self.punctuation(",")
            fronted = (conjunction, other, comma, main)
            en = fronted if subordinate and self.chance(0.4) else (main, conjunction, other)
            xx = (other, conjunction, comma, main) if subordinate else (main, comma, conjunction, other)
            whole = join(en, xx)
        end = self.punctuation("?" if question else ".")
        return join((whole, end), (whole, end))
