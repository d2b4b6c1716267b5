"""The file corpus.yaml names the sources that `data_tools.prepare` reads and the rules that it applies. Unknown keys
are errors, and all problems are reported at once.

    sources:
      - {pairs: [en, cs], text: [a.en.gz, a.cs.gz], licence: CC-BY-4.0}
      - {mono: ja, text: wiki_ja/, first: 100000, rules: {lid: true}}
    rules: {normalise: [nfc, controls, spaces], length: {characters: [1, 2000]}, ratio: 4, dedup: exact}
    tokenizer: {type: wordpiece, vocab_size: 32000, alpha: 0.5}
    align: true
    heldout: {pairs: 1000, mono: 1000}
    lexicons: [muse/en-cs.txt]

Paths are relative to the folder in which the command is started. A source's file may be at a URL, which fsspec reads.
"""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xscale.data.scripts import spelling_key
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.files import COMPRESSED
from xscale.strict_yaml import read_yaml

LANGUAGE, NAME = re.compile(r"\w+(-\w+)*"), re.compile(r"\w[\w.-]*")
FORMATS = ("text", "zst", "tsv", "tmx", "opus", "jsonl", "parquet", "datasets", "conllu", "shards")
"""The keys of a source that name its files, one for each format."""
PAIRS_ONLY, MONO_ONLY, FOLDERS = ("zst", "tsv", "tmx", "opus"), ("conllu",), ("datasets", "shards")
"""The formats that hold only pairs, those that hold only monolingual text, and those whose path is a folder."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Length(Strict):
    characters: tuple[int, int] | None = Field(default=None, strict=False)
    """The fewest and the most characters of a sentence, and of each side of a pair."""
    tokens: tuple[int, int] | None = Field(default=None, strict=False)
    """The fewest tokens of a sentence or side, and the most tokens of a whole sequence, as data.max_length counts them.
    This rule needs `tokenizer`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        for name, bounds in (("characters", self.characters), ("tokens", self.tokens)):
            if bounds and not 0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"{name}: {list(bounds)} must be [fewest, most]")
        return self


class Rules(Strict):
    """Text passes the rules in the order below. A rule of a source replaces the corpus's rule of the same name."""

    normalise: list[Literal["ftfy", "nfc", "controls", "spaces"]] = ["nfc", "controls", "spaces"]
    """ftfy repairs, by the package ftfy, text that was decoded in a wrong encoding; nfc changes text to Unicode's
    composed form; controls replaces control characters by spaces; spaces replaces each run of white space by one
    space."""
    score: float | None = None
    """A pair or a document is removed if its `score`, a column of its source, is less than this number."""
    length: Length = Length()
    ratio: float | None = Field(default=None, ge=1)
    """The longer side of a pair has at most this many times the characters of the shorter side."""
    lid: bool | str = False
    """A pair or a document is removed if py3langid finds that a side is very probably in another language. A path names
    a fastText model, such as GlotLID's, that is used instead."""
    exclude: list[str] = []
    """Files of evaluation text. A pair or a sentence is removed if it has the same letters and digits as a line of
    these files, or nearly the same characters."""
    boilerplate: int | None = Field(default=None, ge=1)
    """A sentence, such as a menu or a licence, is removed from documents if more than this number of a chunk's
    documents have it. A chunk has 8,192 consecutive documents of a source, or 4 MB."""
    dedup: Literal["exact", "near"] | None = None
    """Only the first of equal, or nearly equal, pairs or documents is kept, among all sources of the same languages."""

    @property
    def paths(self) -> list[str]:
        """Return the paths of the files that the rules need: evaluation text and a language identification model."""
        return [*self.exclude, *([self.lid] if isinstance(self.lid, str) else [])]


class SourceSpec(Strict):
    """A source of text. `pairs` or `mono` gives its languages, except for `shards`, whose index gives them. One key of
    FORMATS, such as `tsv`, gives its files."""

    pairs: tuple[str, str] | None = Field(default=None, strict=False)
    mono: str | None = None
    text: str | list[str] | None = None
    """For pairs, two files whose lines n are translations of each other; for `mono`, files and folders of text."""
    zst: tuple[str, str] | None = Field(default=None, strict=False)
    """Two files of pairs as Mozilla's pipeline writes them. `links` may name a file with the pairs' word links."""
    tsv: str | None = None
    tmx: str | None = None
    opus: str | None = None
    """A zip file of OPUS in Moses format."""
    jsonl: str | None = None
    parquet: str | None = None
    datasets: str | None = None
    """A folder that `save_to_disk` of `datasets` has written. If it has several splits, `train` is read."""
    conllu: str | None = None
    """A CoNLL-U treebank. Only each sentence's comment `# text =` is read."""
    shards: str | None = None
    """A folder of shards. Its index gives the languages, so `pairs` and `mono` are left out."""
    columns: tuple[int | str, int | str] | None = Field(default=None, strict=False)
    """The columns of the two texts: numbers from 1 in a TSV, otherwise names (default: the names of the languages)."""
    field: str = "text"
    """The field that holds a document's text in JSON lines, parquet and datasets."""
    score: int | str | None = None
    """The column of a score that another program gave: a number in a TSV, else a name. rules.score is its bound."""
    links: int | str | None = None
    """Word links in Pharaoh format, of white-space words: a file with one line per pair, or the number of a TSV's
    column."""
    name: str | None = None
    """The name of the source's shards. The default joins the first file's name and the languages."""
    first: int | None = Field(default=None, gt=0)
    """The maximum number of pairs or documents that are read from the beginning of the source; None: all."""
    licence: str | None = None
    rules: dict[str, Any] = {}

    @property
    def format(self) -> str:
        """Return the key of FORMATS that is set."""
        return next(name for name in FORMATS if getattr(self, name) is not None)

    @property
    def paths(self) -> list[str]:
        """Return the source's files and folders, as corpus.yaml names them. A file of links is last."""
        given = getattr(self, self.format)
        return [*([given] if isinstance(given, str) else given), *([self.links] if isinstance(self.links, str) else [])]

    def with_local_paths(self, paths: dict[str, Path]) -> "SourceSpec":
        """Return a copy of the source that has the same name, and in the place of each URL the path of the downloaded
        file. paths: URL -> path."""
        given = {self.format: getattr(self, self.format), "links": self.links}
        for key, value in given.items():
            if isinstance(value, str):
                given[key] = str(paths.get(value, value))
            elif isinstance(value, list | tuple):
                given[key] = type(value)(str(paths.get(path, path)) for path in value)
        return self.model_copy(update={**given, "name": self.name or default_name(self)})

    @property
    def langs(self) -> tuple[str, ...]:
        return self.pairs or (self.mono or "",)

    @model_validator(mode="after")
    def check(self) -> Self:
        given = [name for name in FORMATS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of {', '.join(FORMATS)}, has {', '.join(given) or 'none'}")
        if (self.pairs is None) == (self.mono is None):
            raise ValueError("needs pairs: [en, de] or mono: en")
        if self.pairs and (given[0] in MONO_ONLY or self.pairs[0] == self.pairs[1]):
            raise ValueError(f"pairs: {list(self.pairs)} must be two languages, and {given[0]} must hold pairs")
        if self.mono and given[0] in PAIRS_ONLY:
            raise ValueError(f"mono: {given[0]} holds pairs; write pairs: [en, de]")
        for language in self.langs:
            if not LANGUAGE.fullmatch(language):
                raise ValueError(f"{language!r} must have only letters, digits, _ and inner -, such as zh-Hant")
        if self.pairs and given[0] == "text" and (isinstance(self.text, str) or len(self.text or ()) != 2):
            raise ValueError(f"text: {self.text!r} must be two files for pairs, such as [a.en, a.de]")
        if self.text == []:
            raise ValueError("text: [] must name files or folders")
        if any(map(is_url, self.paths)) and given[0] in FOLDERS:
            raise ValueError(f"{given[0]}: {self.paths[0]!r} is no local folder; download it, and name the copy")
        self._check_columns(given[0])
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} must have only letters, digits, _, - and ., and no leading - or .")
        return self

    def _check_columns(self, form: str) -> None:
        """Raise ValueError if `columns`, `links` or `score` do not fit the format `form`."""
        if self.links is not None and (self.mono or form not in ("text", "zst", "tsv")):
            raise ValueError(f"links: {self.links!r} must belong to pairs of text, zst or tsv")
        if self.links is not None and isinstance(self.links, int) != (form == "tsv"):
            raise ValueError(f"links: {self.links!r} must be the number of a column for tsv, and else a file's path")
        if self.columns and (self.mono or form not in ("tsv", "jsonl", "parquet", "datasets")):
            raise ValueError(f"columns: a source of {form} in {'-'.join(self.langs)} has no columns; remove the key")
        if self.score is not None and form not in ("tsv", "jsonl", "parquet", "datasets"):
            raise ValueError(f"score: a source of {form} has no columns; remove the key")
        given = [*(self.columns or ()), self.links, self.score]
        numbers = [n for n in given if isinstance(n, int)]
        wanted = 2 + (self.links is not None) + (self.score is not None)
        if form == "tsv" and (min(numbers, default=0) < 1 or len(set(numbers)) != wanted):
            raise ValueError(
                "columns, links and score: tsv needs the numbers of different columns, from 1, such as [1, 2]"
            )
        if form != "tsv" and numbers:
            raise ValueError(f"columns: {form} needs the names of columns, such as [en, de]")


class TokenizerSpec(Strict):
    type: Literal["wordpiece", "unigram", "bpe"] = "wordpiece"
    vocab_size: int = Field(default=32000, gt=0)
    alpha: float = Field(default=0.5, ge=0, le=1)
    """A language is sampled in proportion to its share of the text to the power of alpha."""


class HeldoutSpec(Strict):
    """The number of pairs of each language pair, and of sentences of each language, that are held out for evaluation.
    At most a tenth of the text is held out."""

    pairs: int = Field(default=0, ge=0)
    mono: int = Field(default=0, ge=0)


class Corpus(Strict):
    sources: list[SourceSpec] = Field(min_length=1)
    rules: Rules = Rules()
    align: bool = False
    """True: eflomal makes word links for the pairs that have none. Its links differ a little from run to run."""
    tokenizer: TokenizerSpec | None = None
    heldout: HeldoutSpec = HeldoutSpec()
    lexicons: list[str] = []
    """The dictionaries, such as en-de.txt, that are copied to the folder `lexicon` of the output."""

    @model_validator(mode="after")
    def check(self) -> Self:
        problems = []
        if self.rules.score is not None and all(source.score is None for source in self.sources):
            problems.append(
                "rules.score: no source has a `score`; name the column with scores in a source, such as score: 3"
            )
        for number, source in enumerate(self.sources):
            try:
                rules = self.rules_of(source)
                if rules.length.tokens and not self.tokenizer:
                    problems.append(f"sources[{number}].rules.length.tokens: needs tokenizer: {{vocab_size: N}}")
                if source.score is not None and rules.score is None:
                    problems.append(
                        f"sources[{number}].score: needs a lower bound of the scores, such as rules: {{score: 0.5}}"
                    )
                if source.score is None and "score" in source.rules:
                    problems.append(
                        f"sources[{number}].rules.score: needs the column with the scores, as the source's key score: 3"
                    )
            except ValidationError as error:
                problems += problem_lines(error, f"sources[{number}].rules.")
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        problems += [f"sources: two sources have the name {name}; give each source its own `name`" for name in twice]
        spelled = defaultdict[str, set[str]](set)
        for lang in (lang for source in self.sources for lang in source.langs):
            spelled[spelling_key(lang)].add(lang)
        problems += [f"sources: {' and '.join(sorted(names))} are the same language; choose one spelling"
                     for names in spelled.values() if len(names) > 1]  # fmt: skip
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def rules_of(self, source: SourceSpec) -> Rules:
        """Return the corpus's rules, with the source's own rules in the place of those of the same name."""
        return Rules.model_validate(self.rules.model_dump(exclude_unset=True) | source.rules)

    @property
    def names(self) -> list[str]:
        """Return the name of each source."""
        return [source.name or default_name(source) for source in self.sources]

    @property
    def directions(self) -> list[tuple[str, ...]]:
        """Return the ordered pairs of languages whose pairs are aligned; [] without `align`."""
        return sorted({source.langs for source in self.sources if source.pairs}) if self.align else []

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Return the sorted tuples of languages, of length 1 (monolingual) or 2 (pairs). Duplicates are searched among
        all text with the same tuple."""
        return sorted({language_group(source) for source in self.sources})


def is_url(path: str) -> bool:
    return "://" in path


def file_name(path: str) -> str:
    """Return the last part of a path or URL. If the query of a URL contains a file name with a suffix of compression,
    return that name, since the suffix tells readers how to decompress the file."""
    if not is_url(path):
        return path.rstrip("/").rpartition("/")[2]
    link = next(part for part in path.split("::") if is_url(part))  # the first of a chain, such as zip://a::https://b
    place, _, query = link.partition("://")[2].partition("?")
    names = [place.rpartition("/")[2], *re.split("[/&=]", query)]
    return next((name for name in names if name.endswith(COMPRESSED)), names[0])


def language_group(source: SourceSpec) -> tuple[str, ...]:
    """Return the source's languages, sorted: an element of Corpus.groups."""
    return tuple(sorted(source.langs))


def default_name(source: SourceSpec) -> str:
    stem = re.sub(r"[^\w-]", "_", file_name(source.paths[0]).partition(".")[0]).lstrip("-")
    return ".".join([*([stem] if stem else []), "-".join(source.langs)])


def load_corpus(path: Path) -> Corpus:
    """Return the corpus that a corpus.yaml describes. Raises UserError with all problems."""
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not YAML in UTF-8: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the path of a corpus.yaml") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must be a mapping with {', '.join(Corpus.model_fields)}")
    for source in tree["sources"] if isinstance(tree.get("sources"), list) else ():
        if isinstance(source, dict) and isinstance(source.get("shards"), str):
            if is_url(source["shards"]):
                raise UserError(
                    f"{path}: shards: {source['shards']!r} is no local folder; download it, and name the copy"
                )
            langs = Source(source["shards"]).langs
            given = {"pairs": list(langs)} if len(langs) == 2 else {"mono": langs[0]}
            if source.keys() & {"pairs", "mono"}:
                raise UserError(f"{path}: the index of shards: {source['shards']} says {given}; remove pairs and mono")
            source.update(given)
    try:
        return Corpus.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}:\n" + "\n".join(f"  {line}" for line in problem_lines(error))) from None


def problem_lines(error: ValidationError, prefix: str = "") -> list[str]:
    """Return a line for each of pydantic's problems: `prefix`, the field, its value, and what is wrong."""
    lines = []
    for problem in error.errors():
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
        if problem["type"] == "value_error":
            inner = str(problem["ctx"]["error"]).splitlines()
            lines += [f"{prefix}{place}{': ' if place else ''}{line}" for line in inner]
        elif problem["type"] == "extra_forbidden":
            kinds: dict[str, type[Strict]] = {"the corpus": Corpus, "a source": SourceSpec, "rules": Rules}
            homes = [kind for kind, model in kinds.items() if problem["loc"][-1] in model.model_fields]
            remedy = f"it is a key of {' and of '.join(homes)}: move it there" if homes else "remove it"
            lines.append(f"{prefix}{place}: unknown key here; {remedy}")
        else:
            given = "" if problem["type"] == "missing" else f": {problem['input']!r}"
            quote = "; YAML reads yes, no, on and off as truth values: quote it" * (
                problem["input"] in (True, False) and problem["type"] == "string_type"
            )
            lines.append(f"{prefix}{place}{given}: {problem['msg']}{quote}")
    return lines
