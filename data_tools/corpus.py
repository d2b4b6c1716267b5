"""The file corpus.yaml names the sources that `xscale data prepare` reads, and the rules that it applies. Unknown keys
are errors, and all problems are reported at once.

    sources:
      - {pairs: [en, cs], text: [a.en.gz, a.cs.gz], licence: CC-BY-4.0}
      - {mono: ja, text: wiki_ja/, first: 100000, rules: {lid: true}}
    rules: {normalise: [nfc, controls, spaces], length: {characters: [1, 2000]}, ratio: 4, dedup: exact}
    tokenizer: {type: wordpiece, vocab_size: 32000, alpha: 0.5}
    align: true
    heldout: {pairs: 1000, mono: 1000}
    lexicons: [muse/en-cs.txt]

Paths are relative to the folder in which the command is started.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xscale.data.scripts import check_language_name, choose_language_names, normalised_code_and_tags
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.removed import message_if_removed_corpus_key_or_command
from xscale.strict_yaml import parse_yaml

NAME = re.compile(r"\w[\w.-]*")
FORMATS: dict[str, set[str]] = {
    "text": {"links", "linked", "documents"},
    "tsv": {"columns", "links"},
    "tmx": set(),
    "jsonl": {"columns", "field"},
    "parquet": {"columns", "field"},
    "datasets": {"columns", "field", "config", "split"},
    "shards": set(),
}
"""{key of a source that names its files: the further keys of such a source}, without the keys of all sources."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Length(Strict):
    characters: tuple[int, int] | None = Field(default=None, strict=False)
    """The minimum and the maximum number of characters of a sentence, or of each side of a pair."""
    tokens: tuple[int, int] | None = Field(default=None, strict=False)
    """The minimum number of tokens of a sentence or side, and the maximum number of tokens of a whole sequence, which
    also counts special tokens, as data.max_length does. This rule needs `tokenizer`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        for bounds in (self.characters, self.tokens):
            if bounds and not 0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"the bounds {list(bounds)} must be [minimum, maximum], with 0 <= minimum <= maximum")
        return self


class Rules(Strict):
    """The rules are applied in the order below. A rule of a source replaces the corpus's rule of the same name."""

    normalise: list[Literal["nfc", "controls", "spaces"]] = ["nfc", "controls", "spaces"]
    """nfc changes text to Unicode's composed form; controls replaces control characters by spaces; spaces replaces each
    run of white space by one space."""
    identical: bool = False
    """False: a pair is removed if both sides have the same text, of four words or more."""
    length: Length = Length()
    ratio: float | None = Field(default=None, ge=1)
    """The longer side of a pair has at most this many times the characters of the shorter side."""
    lid: bool | str = False
    """True: a pair or a document is removed if py3langid finds that a side is very probably in another language. A path
    names a fastText model, such as GlotLID's, that replaces py3langid."""
    exclude: list[str] = []
    """Files of evaluation text. A pair or a sentence is removed if it has the same letters, marks and digits as a line
    of these files."""
    dedup: Literal["exact", "near"] | None = None
    """Only the first of equal, or nearly equal, pairs or documents is kept. The sources of the same languages are
    compared together."""

    @property
    def needed_files(self) -> list[str]:
        """Return the paths of the files that the rules need: evaluation text and a language identification model."""
        if isinstance(self.lid, str):
            return [*self.exclude, self.lid]
        return self.exclude


class SourceSpec(Strict):
    """A source of text. `pairs` or `mono` gives its languages; shards may name them themselves. One key of FORMATS,
    such as `tsv`, gives its files."""

    pairs: tuple[str, str] | None = Field(default=None, strict=False)
    mono: str | None = None
    text: str | list[str] | None = Field(default=None, min_length=1)
    """For pairs, two files whose lines n are translations of each other; for `mono`, files and folders of text."""
    tsv: str | None = None
    tmx: str | None = None
    jsonl: str | None = None
    parquet: str | None = None
    datasets: str | None = None
    """A folder of `save_to_disk`, another local data set, or the name of one on the hub, which is streamed."""
    config: str | None = None
    """The configuration of a data set."""
    split: str = "train"
    """The part of a data set."""
    shards: str | None = None
    """A folder of shards, whose index gives the languages; or tars of other programs, which webdataset opens: with
    braces, as a URL or after `pipe:`."""
    columns: tuple[int | str, int | str] | None = Field(default=None, strict=False)
    """The columns of the two texts: numbers from 1 in a TSV, otherwise names (default: the names of the languages)."""
    field: str = "text"
    """The field that holds a document's text in JSON lines, parquet and data sets."""
    links: int | str | None = None
    """Word links in Pharaoh format, which number words between spaces and tabs: a file with one line per pair, or the
    number of a column of the TSV."""
    linked: tuple[str, str] | None = Field(default=None, strict=False)
    """Two files: the texts whose words `links` numbers, if an aligner read other texts than `text`."""
    documents: Literal["auto", "doc", "blank", "lines"] = "auto"
    """What a document of `text` is. doc: the text from `<doc ...>` to `</doc>` (WikiExtractor); blank: the lines
    between blank lines; lines: one line; auto: as the first lines of each file show."""
    whole_lines: bool = False
    """True: a record of monolingual text is a line, and not a sentence."""
    name: str | None = None
    """The name of the source's shards. The default joins the first file's name and the languages."""
    first: int | None = Field(default=None, gt=0)
    """The maximum number of pairs or documents that are read from the beginning of the source; None: all."""
    licence: str | None = None
    rules: Rules = Rules()

    @property
    def format(self) -> str:
        """Return the key of FORMATS that is set."""
        return next(name for name in FORMATS if getattr(self, name) is not None)

    @property
    def all_paths(self) -> list[str]:
        """Return the source's files and folders, followed by the files of its links, as corpus.yaml names them."""
        paths = getattr(self, self.format)
        paths = [paths] if isinstance(paths, str) else list(paths)
        if isinstance(self.links, str):
            paths += [self.links, *(self.linked or ())]
        return paths

    @property
    def links_or_first_path(self) -> str:
        """Return the file that has the word links: the file `links`, or the TSV or folder of shards."""
        return self.links if isinstance(self.links, str) else self.all_paths[0]

    @property
    def is_webdataset(self) -> bool:
        """Return whether webdataset reads the source's shards, because they are tars without an index."""
        return self.shards is not None and is_tar_location(self.shards)

    @property
    def langs(self) -> tuple[str, ...]:
        return self.pairs or (self.mono or "",)

    @property
    def kind(self) -> Literal["pairs", "documents"]:
        """Return what the source consists of, in words for messages."""
        return "pairs" if self.pairs else "documents"

    @property
    def sorted_langs(self) -> tuple[str, ...]:
        """Return the sorted languages. Duplicates are sought among all sources of the same languages."""
        return tuple(sorted(self.langs))

    @model_validator(mode="after")
    def check(self) -> Self:
        formats = [name for name in FORMATS if getattr(self, name) is not None]
        if len(formats) != 1:
            raise ValueError(
                f"the source must have exactly one of the keys {', '.join(FORMATS)}, but it has "
                f"{', '.join(formats) or 'none of these keys'}"
            )
        if (self.pairs is None) == (self.mono is None):
            raise ValueError(
                "the source must have either the key `pairs`, such as pairs: [en, de], or the key `mono`, such as "
                "mono: en"
            )
        if self.mono and self.format in ("tsv", "tmx"):
            raise ValueError(f"mono: a source with `{self.format}` has pairs. Write pairs: [en, de] instead of mono")
        for language in self.langs if self.shards is None else ():  # index.json names those of shards
            check_language_name(language)
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(
                f"name: {self.name!r} may have only letters, digits, hyphens, dots and _, and must begin with a "
                "letter, a digit or _. Correct the name"
            )
        if self.pairs and self.text and (isinstance(self.text, str) or len(self.text) != 2):
            raise ValueError(
                f"text: {self.text!r} must be a list of two files, because the source has `pairs`; for example "
                "[a.en, a.de]"
            )
        for key in set[str]().union(*FORMATS.values()) & self.model_fields_set:
            if getattr(self, key) is not None and key not in FORMATS[self.format]:
                raise ValueError(f"{key}: a source with `{self.format}` cannot have this key. Remove the key")
        self._check_columns_and_links()
        return self

    def _check_columns_and_links(self) -> None:
        """Raise ValueError if `columns` or `links` do not fit the format."""
        columns = list(self.columns or ())
        if self.tsv and self.links is not None:
            columns.append(self.links)
        if self.mono and (columns or self.links is not None):
            raise ValueError(
                "columns and links: only a source with `pairs` can have these keys, and this source has `mono`. "
                "Remove the keys `columns` and `links`"
            )
        if self.tsv and not (self.columns and all(isinstance(column, int) and column > 0 for column in columns)):
            raise ValueError(
                "columns and links: in a source with `tsv`, columns are numbers, counted from 1. Write for example "
                "columns: [1, 2]; if column 3 has word alignments, also write links: 3"
            )
        if not self.tsv and not all(isinstance(name, str | None) for name in [*columns, self.links]):
            raise ValueError(
                f"columns and links: only a source with `tsv` can have column numbers, and this source has "
                f"`{self.format}`. Write names of fields as columns, such as columns: [en, de], and the path of a file "
                "as links, such as links: FILE"
            )
        if len(set(columns)) < len(columns):
            raise ValueError(f"columns and links: {columns} list the same column twice. List each column once")
        if self.linked and not self.links:
            raise ValueError(
                "linked: this key needs a file of word alignments. Add the key `links: FILE` to the source"
            )


class TokenizerSpec(Strict):
    type: Literal["wordpiece", "unigram", "bpe"] = "wordpiece"
    vocab_size: int = Field(default=32000, gt=0, le=10_000_000)
    alpha: float = Field(default=0.5, ge=0, le=1)
    """The tokenizer's training text is sampled by language, with probability proportional to (share of the
    text)^alpha."""


class HeldoutSpec(Strict):
    """The number of pairs of each language pair, and the number of sentences of each language, that are held out for
    evaluation. At most a tenth of the text is held out."""

    pairs: int = Field(default=0, ge=0)
    mono: int = Field(default=0, ge=0)

    def wanted_pair_or_sentence_count(self, group: tuple[str, ...]) -> int:
        """Return the number of pairs of two languages, or of sentences of one language, that corpus.yaml asks for."""
        return self.pairs if len(group) == 2 else self.mono


class Corpus(Strict):
    sources: list[SourceSpec] = Field(min_length=1)
    rules: Rules = Rules()
    align: bool = False
    """True: eflomal makes word links for the pairs that have none. Its links differ a little from run to run.
    corpus.yaml may also have {links: F}, which `parse_corpus` moves to the only source of pairs."""
    tokenizer: TokenizerSpec | str | None = None
    """The tokenizer to train; or the folder or hub name of an existing one, by which lengths count."""
    heldout: HeldoutSpec = HeldoutSpec()
    lexicons: list[str] = []
    """Dictionaries, such as en-de.txt. The output's folder `lexicon` gets them with each word in the spelling that the
    text uses most."""

    @model_validator(mode="after")
    def check(self) -> Self:
        problems = list[str]()
        for number, source in enumerate(self.sources):
            if self.rules_for(source).length.tokens and not self.tokenizer:
                problems.append(
                    f"sources.{number}.rules.length.tokens: this rule needs a tokenizer. Add the key "
                    "`tokenizer: {vocab_size: N}` or `tokenizer: PATH` to corpus.yaml, beside the key `sources`"
                )
        for name, times in Counter(self.source_names).items():
            if times > 1:
                problems.append(
                    f"sources: {times} sources have the name {name}. Set a different `name` for each source"
                )
        one_name = choose_language_names(self.languages)
        for number, source in enumerate(self.sources):
            if source.pairs and one_name[source.pairs[0]] == one_name[source.pairs[1]]:
                problems.append(
                    f"sources.{number}.pairs: {list(source.pairs)} names the same language twice. Write two different "
                    "languages"
                )
        spellings = dict[str, str]()
        for language in self.languages:
            other = spellings.setdefault(normalised_code_and_tags(one_name[language]), language)
            if other != language:
                problems.append(
                    f"sources: {other} and {language} are names of the same language. Use one of the two "
                    "names in all sources. A source of shards takes its language names from index.json: to change a "
                    "name, write the shards again"
                )
        if problems:
            raise ValueError("\n  ".join(problems))
        return self

    def rules_for(self, source: SourceSpec) -> Rules:
        """Return the corpus's rules; a rule of the source replaces the rule of the same name."""
        own = source.rules.model_dump(exclude_unset=True)
        return Rules.model_validate(self.rules.model_dump(exclude_unset=True) | own)

    @property
    def source_names(self) -> list[str]:
        return [source.name or default_name(source) for source in self.sources]

    @property
    def languages(self) -> list[str]:
        return sorted(set[str]().union(*(source.langs for source in self.sources)))

    @property
    def language_pairs_to_word_align(self) -> list[tuple[str, ...]]:
        """Return the ordered pairs of languages whose pairs are aligned; [] without `align`."""
        if not self.align:
            return []
        return sorted({source.langs for source in self.sources if source.pairs})

    @property
    def language_groups(self) -> list[tuple[str, ...]]:
        """Return the languages of each group of sources, sorted. The sources of a group have the same languages."""
        return sorted({source.sorted_langs for source in self.sources})


def is_tar_location(shards: str) -> bool:
    """Return whether `shards` names tars that webdataset opens, and not a folder."""
    return "://" in shards or shards.startswith("pipe:") or shards.endswith(".tar") or "{" in shards


def default_name(source: SourceSpec) -> str:
    """Return a name of the first file and the languages, such as `wiki.en`."""
    file_name = source.all_paths[0].rstrip("/").rpartition("/")[2]
    stem = re.sub(r"[^\w-]", "_", file_name.partition(".")[0]).lstrip("-")
    languages = "-".join(source.langs)
    return f"{stem}.{languages}" if stem else languages


def load_corpus(path: Path) -> Corpus:
    """Return the corpus that a corpus.yaml describes. Raises UserError with all problems."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not YAML in UTF-8 ({error}). Correct the file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Give the path of a readable corpus.yaml") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} must be a YAML mapping with the key `sources`. All possible keys are "
            f"{', '.join(Corpus.model_fields)}"
        )
    return parse_corpus(tree, str(path))


def parse_corpus(tree: dict[str, Any], place: str) -> Corpus:
    """Return the corpus of a tree of corpus.yaml's keys. place: the file, for errors. Raises UserError with all
    problems."""
    sources = tree.get("sources")
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, dict) and isinstance(source.get("shards"), str):
            add_shard_languages(place, source)
    move_align_links_to_source(place, tree)
    try:
        return Corpus.model_validate(tree)
    except ValidationError as error:
        lines = validation_error_lines(error, "  ")
        raise UserError("\n".join([f"{place}:", *lines])) from None


def add_shard_languages(place: str, source: dict[str, Any]) -> None:
    """Add `pairs` or `mono` to a source of shards. Its languages come from the index or, for tars of other programs,
    from the first sample. place: the corpus.yaml, for errors. Raises UserError."""
    named = source.keys() & {"pairs", "mono"}
    if is_tar_location(source["shards"]):
        if named:
            return
        from .readers import webdataset_records

        langs = next((stored.record.langs for stored in webdataset_records(source["shards"])), ())
    else:
        langs = Source(source["shards"]).langs
    if named:
        raise UserError(
            f"{place}: a source of shards must not have `pairs` or `mono`, because index.json in "
            f"{source['shards']} gives the languages ({'-'.join(langs)}). Remove the key `pairs` or `mono`"
        )
    source.update({"pairs": list(langs)} if len(langs) == 2 else {"mono": "".join(langs)})


def move_align_links_to_source(place: str, tree: dict[str, Any]) -> None:
    """Give the links of `align: {links: F}` to the only source of pairs. place: the corpus.yaml, for errors. Raises
    UserError."""
    align = tree.get("align")
    if not isinstance(align, dict):
        return
    sources = tree.get("sources")
    of_pairs = list[dict[str, Any]]()
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, dict) and "pairs" in source:
            of_pairs.append(source)
    if align.keys() != {"links"} or not align["links"] or len(of_pairs) != 1 or of_pairs[0].get("links") is not None:
        raise UserError(
            f"{place}: align is {align}, and must be true or false. Write `align: true` to make word alignments. To "
            "use files of word alignments, write `links: FILE` in each source of pairs"
        )
    of_pairs[0]["links"] = align["links"]
    tree["align"] = False


def validation_error_lines(error: ValidationError, prefix: str) -> list[str]:
    """Return a line for each of pydantic's problems: `prefix`, the field, its value, and the problem."""
    lines = list[str]()
    for problem in error.errors():
        place = ".".join(map(str, problem["loc"]))
        text = f"{problem['input']!r}: {problem['msg'].partition(' or instance of ')[0]}"
        if problem["type"] == "extra_forbidden":
            remedy = message_if_removed_corpus_key_or_command(str(problem["loc"][-1]))
            text = (
                "unknown key. "
                f"{remedy or 'Remove the key, or move it to the place that docs/reference/corpus.md names'}"
            )
        elif problem["type"] == "value_error":
            text = problem["msg"].removeprefix("Value error, ")
        elif problem["type"] == "string_type" and isinstance(problem["input"], bool | int | float):
            text += ". Put text that looks like a number or a truth value into quotation marks"
        lines.append(f"{prefix}{place}: {text}" if place else f"{prefix}{text}")
    return lines


def check_folder_is_outside_sources(out: Path, sources: list[SourceSpec]) -> None:
    """Raise UserError if `out` is in a folder of text, where the tasks would read each other's files as text."""
    for source in sources:
        for path in source.all_paths if source.text else []:
            if Path(path).is_dir() and Path(path).resolve() in out.resolve().parents:
                raise UserError(f"--out {out} is inside {path}, a folder of text. Choose a folder outside {path}")
