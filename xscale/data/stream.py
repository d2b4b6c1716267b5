"""A stream of a recipe: its objective, and the sources that it reads.

A recipe may have any spelling of a language (data/scripts.py): `de` means sources in deu_Latn, too.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from xscale.data.scripts import choose_language_names, may_name_same_language
from xscale.data.shards import Source
from xscale.errors import UserError

_CODE = re.compile(r"[a-z]{2,3}(_\w+)?")


@dataclass(frozen=True)
class Stream:
    """A stream of a recipe, in the steps of one phase or of the whole run."""

    name: str
    objective: Any
    """The Objective (objectives/base.py), whose `collate` makes the stream's batches."""
    options: Any
    """The values of the objective's own fields."""
    sources: tuple[int, ...]
    """Indices of the sources that the stream reads in any phase of the run. Before `with_sources_of_all_phases`, it has
    only those of the stream's own phase."""
    samples: int
    """Samples per optimizer step over all ranks."""
    lexicons: tuple[Any, ...] = ()
    """The stream's dictionaries (data/lexicon.py), without the withheld words."""
    idle: frozenset[int] = frozenset()
    """Those of `sources` that the stream does not read in this phase."""
    language_groups: tuple[str, ...] = ()
    """The languages and pairs of `sources`, whose losses are reported separately. `with_sources_of_all_phases` sets
    it."""
    objective_name: str = ""
    """The objective's name, for error messages."""

    @property
    def reads_running_text(self) -> bool:
        """True if a sample is running text that fills about one sequence, False if it is a pair."""
        return self.objective.record_kind == "mono"

    @property
    def needs_words(self) -> bool:
        """True if the objective's `collate` needs the words of the texts."""
        return self.objective.words(self.options)

    @property
    def active_sources(self) -> list[int]:
        """Indices of the sources that the stream reads in this phase."""
        return [source for source in self.sources if source not in self.idle]

    def with_sources_of_all_phases(self, sources: Sequence[Source], read_in_any_phase: Collection[int]) -> "Stream":
        """Return the stream with the sources that it reads in any phase. Those that it does not read in its own phase
        are idle. sources: the sources of the run."""
        names = set[str]()
        for number in read_in_any_phase:
            names.update((sources[number].sorted_langs_name, *sources[number].langs))
        return replace(
            self,
            sources=tuple(sorted(read_in_any_phase)),
            idle=frozenset(read_in_any_phase).difference(self.sources),
            language_groups=tuple(sorted(names)),
        )

    def active_record_count(self, sources: Sequence[Source]) -> int:
        """Return the number of records of the sources that the stream reads. sources: the sources of the run."""
        return sum(sources[source].records for source in self.active_sources)


def covers_every_language(languages: list[str], langs: tuple[str, ...]) -> bool:
    """Return True if `languages`, a list in a recipe, selects the language or pair `langs`. "en-de" or "de-en" selects
    the pair (en, de), and so do "en" and "de" together."""
    return set(langs) == set().union(*(languages_meant(name, langs) for name in languages))


def means_language(name: str, lang: str) -> bool:
    """Return True if a name means the language `lang`. A name whose second part has two or three small letters, such as
    en-de, means a pair. Regions have capitals, as in pt-BR."""
    is_pair = any(_CODE.fullmatch(part) for part in name.split("-")[1:])
    return name == lang or (not is_pair and may_name_same_language(name, lang))


def languages_meant(language_or_pair: str, langs: tuple[str, ...]) -> set[str]:
    """Return those of one or two languages that `language_or_pair` means: both if it means the pair, such as eng-deu
    or deu-eng for (en, de)."""
    parts = language_or_pair.split("-")
    for end in range(1, len(parts)):
        for first, second in permutations(langs, 2):
            if means_language("-".join(parts[:end]), first) and means_language("-".join(parts[end:]), second):
                return {first, second}
    return {lang for lang in langs if means_language(language_or_pair, lang)}


def unify_language_names(sources: list[Source], preferred: Collection[str] = ()) -> None:
    """Give each language one name in all sources, so that en, eng and eng_Latn are one language. preferred: the names
    to choose if there is a choice. Raises UserError if both languages of a pair get the same name."""
    written = list[str]()
    for source in sources:
        written += source.written_langs
    names = choose_language_names(written, preferred)
    for source in sources:
        source.rename_languages(names)


def languages_without_text(languages: list[str] | None, sources: list[Source]) -> list[str]:
    """Return the languages and pairs among `languages` in which no source has text."""
    absent = []
    for language in languages or []:
        if not any(languages_meant(language, source.langs) for source in sources):
            absent.append(language)
    return absent


def check_languages_have_text(languages: list[str] | None, sources: list[Source]) -> None:
    """Raise UserError unless the sources have data for each of `languages`, the value of data.languages."""
    absent = languages_without_text(languages, sources)
    if absent:
        available = set[str]()
        for source in sources:
            available |= {source.sorted_langs_name, *source.langs}
        raise UserError(
            f"data.languages: --data has no text in {', '.join(absent)}, only in {', '.join(sorted(available))}. "
            "Correct data.languages, or add shards to --data"
        )


def matching_source_indices(record_kind: str, languages: list[str] | None, sources: list[Source]) -> tuple[int, ...]:
    """Return the indices of the sources with this kind of record, in these languages; None: in any language."""
    chosen = list[int]()
    for number, source in enumerate(sources):
        if source.kind == record_kind and (languages is None or covers_every_language(languages, source.langs)):
            chosen.append(number)
    return tuple(chosen)


def select_source_indices(
    stream: str,
    record_kind: str,
    languages: list[str] | None,
    sources: list[Source],
    data_languages: list[str] | None = None,
) -> tuple[int, ...]:
    """Return the indices of the sources that a stream reads. record_kind: "pair" or "mono". languages: the stream's own
    languages; None: those of `data_languages`, which is data.languages. Raises UserError if the stream, or one of its
    own languages, has no source."""
    wanted = data_languages if languages is None else languages
    chosen = matching_source_indices(record_kind, wanted, sources)
    absent = languages_without_text(languages, [sources[number] for number in chosen])
    if absent or not chosen:
        available = ", ".join(f"{source.sorted_langs_name} ({source.kind})" for source in sources)
        missing = f" in {', '.join(absent or wanted or [])}" if absent or wanted else ""
        raise UserError(
            f"streams.{stream} reads {'sentence pairs' if record_kind == 'pair' else 'monolingual text'}{missing}, "
            f"but --data has only {available}. Add to --data a folder that `xscale data write_shards "
            f"{'pairs' if record_kind == 'pair' else 'mono'}` has written, or change streams.{stream}.languages (the "
            "list [en, de] selects the pair en-de, too, but [de] does not)"
        )
    return chosen
