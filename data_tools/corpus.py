"""corpus.yaml: which sources `data_tools.prepare` reads, and what it does with them. Strict, all problems at once.

    sources:
      - {pairs: [en, cs], text: [a.en.gz, a.cs.gz], licence: CC-BY-4.0}
      - {mono: ja, text: wiki_ja/, first: 100000, rules: {lid: true}}
    rules: {normalise: [nfc, controls, spaces], length: {characters: [1, 2000]}, ratio: 4, dedup: exact}
    tokenizer: {type: wordpiece, vocab_size: 32000, alpha: 0.5}
    heldout: {pairs: 1000, mono: 1000}

Paths are relative to the folder where the command is started; with `://` they are read through fsspec.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xscale.config import read_yaml
from xscale.errors import UserError

LANGUAGE, NAME = re.compile(r"\w+(-\w+)*"), re.compile(r"\w[\w.-]*")
PAIRS_ONLY, MONO_ONLY = ("tmx", "tsv", "opus", "zst"), ("jsonl", "conllu")
READERS = ("text", "tmx", "tsv", "jsonl", "parquet", "datasets", "opus", "zst", "conllu", "shards")


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Length(Strict):
    characters: tuple[int, int] | None = Field(default=None, strict=False)
    """The fewest and the most characters of a sentence, and of each side of a pair."""
    tokens: tuple[int, int] | None = Field(default=None, strict=False)
    """The fewest tokens of a side, and the most of a whole sequence, as data.max_length counts; needs `tokenizer`."""

    @model_validator(mode="after")
    def in_order(self) -> Self:
        for name, bounds in (("characters", self.characters), ("tokens", self.tokens)):
            if bounds and not 0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"{name}: {list(bounds)} are not [fewest, most]")
        return self


class Rules(Strict):
    """The rules that text passes, in this order. A source's own rules take the place of the corpus's, each whole."""

    normalise: list[Literal["nfc", "controls", "spaces"]] = ["nfc", "controls", "spaces"]
    """nfc: Unicode's composed form; controls: control characters become spaces; spaces: a run of any white space
    becomes one space."""
    length: Length = Length()
    ratio: float | None = Field(default=None, ge=1)
    """The characters of a pair's longer side are at most so many times those of its shorter side."""
    lid: bool = False
    """A side that py3langid takes with confidence for another language drops the record."""
    exclude: list[str] = []
    """Files of evaluation text, a sentence a line: a sentence with the same letters and digits is dropped."""
    dedup: Literal["exact", "near"] | None = None
    """Of equal (or nearly equal) pairs or documents, over all sources of their languages, the first is kept."""


class SourceSpec(Strict):
    """A source: its languages, by `pairs` or `mono`, and one of READERS."""

    pairs: tuple[str, str] | None = Field(default=None, strict=False)
    mono: str | None = None
    text: str | list[str] | None = None
    """Two files of which lines n are translations; or files and folders of running text."""
    tmx: str | None = None
    tsv: str | None = None
    jsonl: str | None = None
    parquet: str | None = None
    datasets: str | None = None
    """A folder that `save_to_disk` wrote, or a name on the hub; its split `train`."""
    opus: str | None = None
    """A zip of OPUS in Moses form."""
    zst: tuple[str, str] | None = Field(default=None, strict=False)
    conllu: str | None = None
    shards: str | None = None
    """A folder of shards, with its index."""
    columns: tuple[int | str, int | str] | None = Field(default=None, strict=False)
    """Of a TSV the numbers, from 1, of both texts; of parquet and datasets their names (default: the languages)."""
    field: str = "text"
    """The field of a document's text in JSON lines, parquet and datasets."""
    links: int | str | None = None
    """Word links in Pharaoh form that count white-space words: a file with a line a pair, or a TSV's column."""
    name: str | None = None
    """The name of its shards; default: that of its file and languages."""
    first: int | None = Field(default=None, gt=0)
    """Only so many of its pairs or documents are read."""
    licence: str | None = None
    rules: dict[str, Any] = {}

    @property
    def reader(self) -> str:
        return next(name for name in READERS if getattr(self, name) is not None)

    @property
    def paths(self) -> list[str]:
        """Its files, as the corpus names them."""
        given = getattr(self, self.reader)
        return [*([given] if isinstance(given, str) else given), *([self.links] if isinstance(self.links, str) else [])]

    @property
    def langs(self) -> tuple[str, ...]:
        """Its languages; those of shards are known when they are read."""
        return self.pairs or ((self.mono,) if self.mono else ())

    @model_validator(mode="after")
    def fits(self) -> Self:
        given = [name for name in READERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of {', '.join(READERS)}, has {', '.join(given) or 'none'}")
        (reader,) = given
        kinds = [kind for kind in ("pairs", "mono") if getattr(self, kind) is not None]
        if len(kinds) != (reader != "shards"):
            raise ValueError("shards name their languages themselves" if kinds else "needs pairs: [en, de] or mono: en")
        if self.pairs and (reader in MONO_ONLY or self.pairs[0] == self.pairs[1]):
            raise ValueError(f"pairs: {list(self.pairs)} are not two languages, or {reader} holds no pairs")
        if self.mono and reader in PAIRS_ONLY:
            raise ValueError(f"mono: {reader} holds pairs; write pairs: [en, de]")
        for language in self.langs:
            if not LANGUAGE.fullmatch(language):
                raise ValueError(f"{language!r} names no language: letters, digits, _ and - between them, as zh-Hant")
        if self.pairs and reader == "text" and (isinstance(self.text, str) or len(self.text or ()) != 2):
            raise ValueError(f"text: {self.text!r} of pairs are two files, [a.en, a.de]")
        if self.links is not None and not (self.pairs and reader in ("text", "zst", "tsv")):
            raise ValueError(f"links: {reader} has none beside it; they go with pairs of text, zst or tsv")
        if isinstance(self.links, int) != (reader == "tsv") and self.links is not None:
            raise ValueError(f"links: {self.links!r}: a TSV's are the number of a column, others' a file")
        numbers = [n for n in (*(self.columns or ()), self.links) if isinstance(n, int)]
        if reader == "tsv" and (min(numbers, default=0) < 1 or len(set(numbers)) != 2 + (self.links is not None)):
            raise ValueError("columns: a TSV needs the numbers of two columns, from 1, such as [1, 2]")
        if self.columns and reader not in ("tsv", "parquet", "datasets"):
            raise ValueError(f"columns: {reader} has none")
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r}: letters, digits, _, - and . alone, and a letter or digit first")
        return self


class TokenizerSpec(Strict):
    type: Literal["wordpiece", "unigram", "bpe"] = "wordpiece"
    vocab_size: int = Field(default=32000, gt=0)
    alpha: float = Field(default=0.5, ge=0, le=1)
    """A language is sampled in proportion to its share of the text to the power of alpha."""


class LinksSpec(Strict):
    links: str


class HeldoutSpec(Strict):
    pairs: int = Field(default=0, ge=0)
    mono: int = Field(default=0, ge=0)
    """So many pairs and sentences of each pair of languages and each language, at most a tenth, are kept apart."""


class Corpus(Strict):
    sources: list[SourceSpec] = Field(min_length=1)
    rules: Rules = Rules()
    align: bool | LinksSpec = False
    """true: pairs without links get them by eflomal; {links: F}: the only source of pairs has them in a file."""
    tokenizer: TokenizerSpec | None = None
    lexicons: list[str] = []
    heldout: HeldoutSpec = HeldoutSpec()

    @model_validator(mode="after")
    def fits(self) -> Self:
        problems = []
        for number, source in enumerate(self.sources):
            try:
                rules = self.rules_of(source)
                if rules.length.tokens and not self.tokenizer:
                    problems.append(f"sources[{number}].rules.length.tokens: needs tokenizer: {{vocab_size: N}}")
            except ValidationError as error:
                problems += lines_of(error, f"sources[{number}].rules.")
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        problems += [f"sources: {name} is the name of two; give each its `name`" for name in twice]
        if isinstance(self.align, LinksSpec) and sum(source.pairs is not None for source in self.sources) != 1:
            problems.append("align.links: there is not one source of pairs; give each source its own `links`")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def rules_of(self, source: SourceSpec) -> Rules:
        return Rules.model_validate(self.rules.model_dump(exclude_unset=True) | source.rules)

    @property
    def names(self) -> list[str]:
        """The name of each source."""
        return [source.name or default_name(source) for source in self.sources]


def default_name(source: SourceSpec) -> str:
    stem = source.paths[0].rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^\w-]", "_", stem).lstrip("-") + "".join(f".{'-'.join(source.langs)}" if source.langs else "")


def load(path: Path) -> Corpus:
    """The corpus of a file. Raises UserError with all problems."""
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the corpus.yaml to prepare") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a corpus is a mapping with {', '.join(Corpus.model_fields)}")
    try:
        corpus = Corpus.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}:\n" + "\n".join(f"  {line}" for line in lines_of(error))) from None
    if isinstance(corpus.align, LinksSpec):
        links = corpus.align.links
        sources = [s.model_copy(update={"links": links}) if s.pairs else s for s in corpus.sources]
        corpus = corpus.model_copy(update={"sources": sources, "align": False})
    return corpus


def lines_of(error: ValidationError, where: str = "") -> list[str]:
    """A line about each of pydantic's problems: the place, the value and what is needed."""
    lines = []
    for problem in error.errors():
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
        if problem["type"] == "value_error":
            inner = str(problem["ctx"]["error"]).splitlines()
            lines += [f"{where}{place}{': ' if place else ''}{line}" for line in inner]
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{where}{place}: unknown key; remove it")
        else:
            given = "" if problem["type"] == "missing" else f": {problem['input']!r}"
            lines.append(f"{where}{place}{given}: {problem['msg']}")
    return lines
