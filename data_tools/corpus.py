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
FORMATS = ("text", "tsv", "tmx", "jsonl", "parquet", "datasets", "shards")
"""The keys of a source that name its files, one for each format."""
GONE = {
    "zst": "text: [F.en.zst, F.de.zst], with links: F.aln.zst",
    "opus": "unzip the file, and give text: [F.en, F.de]",
    "conllu": "`grep '^# text = ' F | cut -c10-`, and give the result as text",
    "score": "filter the lines by their scores before, such as by awk",
    "boilerplate": "remove such lines before",
}
"""Keys of xscale 0.1 -> what to write instead."""


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
    identical: bool = False
    """False: a pair with the same text of four words or more on both sides is removed."""
    length: Length = Length()
    ratio: float | None = Field(default=None, ge=1)
    """The longer side of a pair has at most this many times the characters of the shorter side."""
    lid: bool | str = False
    """A pair or a document is removed if py3langid finds that a side is very probably in another language. A path names
    a fastText model, such as GlotLID's, that is used instead."""
    exclude: list[str] = []
    """Files of evaluation text. A pair or a sentence is removed if it has the same letters, marks and digits as a line
    of these files, or nearly the same characters."""
    dedup: Literal["exact", "near"] | None = None
    """Only the first of equal, or nearly equal, pairs or documents is kept, among all sources of the same languages."""

    @property
    def paths(self) -> list[str]:
        """Return the paths of the files that the rules need: evaluation text and a language identification model."""
        return [*self.exclude, self.lid] if isinstance(self.lid, str) else self.exclude


class SourceSpec(Strict):
    """A source of text. `pairs` or `mono` gives its languages; shards may name them themselves. One key of FORMATS,
    such as `tsv`, gives its files."""

    pairs: tuple[str, str] | None = Field(default=None, strict=False)
    mono: str | None = None
    text: str | list[str] | None = None
    """For pairs, two files whose lines n are translations of each other; for `mono`, files and folders of text."""
    tsv: str | None = None
    tmx: str | None = None
    jsonl: str | None = None
    parquet: str | None = None
    datasets: str | None = None
    """A folder of `save_to_disk`, another local data set, or the name of one on the hub, which is streamed."""
    config: str | None = None
    """The configuration of a data set. `split`: its part, by default `train`."""
    split: str | None = None
    shards: str | None = None
    """A folder of shards, whose index gives the languages; or tars of others that webdataset opens, with braces, as a
    URL or after `pipe:`."""
    columns: tuple[int | str, int | str] | None = Field(default=None, strict=False)
    """The columns of the two texts: numbers from 1 in a TSV, otherwise names (default: the names of the languages)."""
    field: str = "text"
    """The field that holds a document's text in JSON lines, parquet and data sets."""
    links: int | str | None = None
    """Word links in Pharaoh format, of words between spaces and tabs: a file with one line per pair, or the number of a
    TSV's column."""
    linked: tuple[str, str] | None = Field(default=None, strict=False)
    """Two files: the texts whose words `links` numbers, if an aligner read other texts than `text`."""
    documents: Literal["auto", "doc", "blank", "lines"] = "auto"
    """What a document of `text` is: see documents.FORMS. auto: as the first lines of each file show."""
    whole_lines: bool = False
    """True: a record of monolingual text is a line, and not a sentence."""
    line_keys: bool = False
    """True: the key of a record tells its file and line, as those of `write_shards` do, and not its source."""
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
        """Return the source's files and folders, as corpus.yaml names them; then those of links."""
        files = getattr(self, self.format)
        paths = [files] if isinstance(files, str) else list(files)
        if isinstance(self.links, str):
            paths += [self.links, *(self.linked or ())]
        return paths

    @property
    def is_foreign(self) -> bool:
        """Return True for tars that webdataset reads, instead of a folder with an index."""
        return bool(self.shards) and is_foreign(str(self.shards))

    def with_local_paths(self, paths: dict[str, str]) -> "SourceSpec":
        """Return a copy of the source that has the same name, and in the place of each URL the path of the downloaded
        file. paths: URL -> path."""
        files = getattr(self, self.format)
        local = paths.get(files, files) if isinstance(files, str) else [paths.get(file, file) for file in files]
        links = paths.get(self.links, self.links) if isinstance(self.links, str) else self.links
        name = self.name or default_name(self)
        return self.model_copy(update={self.format: local, "links": links, "name": name})

    @property
    def langs(self) -> tuple[str, ...]:
        return self.pairs or (self.mono or "",)

    @model_validator(mode="after")
    def check(self) -> Self:
        given = [name for name in FORMATS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of {', '.join(FORMATS)}, has {', '.join(given) or 'none'}")
        form = given[0]
        if (self.pairs is None) == (self.mono is None):
            raise ValueError("needs pairs: [en, de] or mono: en")
        if self.pairs and spelling_key(self.pairs[0]) == spelling_key(self.pairs[1]):
            raise ValueError(f"pairs: {list(self.pairs)} must be two languages")
        if self.mono and form in ("tsv", "tmx"):
            raise ValueError(f"mono: {form} holds pairs; write pairs: [en, de]")
        for language in self.langs:
            if not LANGUAGE.fullmatch(language):
                raise ValueError(f"{language!r} must have only letters, digits, _ and inner -, such as zh-Hant")
        if self.pairs and form == "text" and (isinstance(self.text, str) or len(self.text or ()) != 2):
            raise ValueError(f"text: {self.text!r} must be two files for pairs, such as [a.en, a.de]")
        if self.text == []:
            raise ValueError("text: [] must name files or folders")
        if form == "datasets" and is_url(str(self.datasets)):
            raise ValueError(f"datasets: {self.datasets!r} must be a folder, or a name on the hub")
        if form != "datasets" and (self.config or self.split):
            raise ValueError(f"config and split: a source of {form} has none; remove them")
        self._check_columns(form)
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} must have only letters, digits, _, - and ., and no leading - or .")
        return self

    def _check_columns(self, form: str) -> None:
        """Raise ValueError if `columns` or `links` do not fit the format `form`."""
        if self.links is not None and (self.mono or form not in ("text", "tsv")):
            raise ValueError(f"links: {self.links!r} must belong to pairs of text or tsv")
        if self.links is not None and isinstance(self.links, int) != (form == "tsv"):
            raise ValueError(f"links: {self.links!r} must be the number of a column for tsv, and else a file's path")
        if self.linked and not isinstance(self.links, str):
            raise ValueError("linked: needs the file of links, as links: F")
        if self.columns and (self.mono or form not in ("tsv", "jsonl", "parquet", "datasets")):
            raise ValueError(f"columns: a source of {form} in {'-'.join(self.langs)} has no columns; remove the key")
        numbers = [n for n in (*(self.columns or ()), self.links) if isinstance(n, int)]
        if form == "tsv" and (min(numbers, default=0) < 1 or len(set(numbers)) != 2 + (self.links is not None)):
            raise ValueError("columns and links: tsv needs the numbers of different columns, from 1, such as [1, 2]")
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
    tokenizer: TokenizerSpec | str | None = None
    """The tokenizer to train; or the folder or hub name of an existing one, by which lengths and the report count."""
    heldout: HeldoutSpec = HeldoutSpec()
    lexicons: list[str] = []
    """The dictionaries, such as en-de.txt, that are copied to the folder `lexicon` of the output."""

    @model_validator(mode="after")
    def check(self) -> Self:
        problems = list[str]()
        for number, source in enumerate(self.sources):
            try:
                if self.rules_of(source).length.tokens and not self.tokenizer:
                    problems.append(
                        f"sources[{number}].rules.length.tokens: needs tokenizer: {{vocab_size: N}} or a path"
                    )
            except ValidationError as error:
                problems += problem_lines(error, f"sources[{number}].rules.")
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        problems += [f"sources: two sources have the name {name}; give each source its own `name`" for name in twice]
        spellings = defaultdict[str, set[str]](set)
        for source in self.sources:
            for lang in source.langs:
                spellings[spelling_key(lang)].add(lang)
        for names in spellings.values():
            if len(names) > 1:
                problems.append(f"sources: {' and '.join(sorted(names))} are the same language; choose one spelling")
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


def is_foreign(shards: str) -> bool:
    return is_url(shards) or shards.startswith("pipe:") or shards.endswith(".tar") or "{" in shards


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
    return parse_corpus(tree, str(path))


def parse_corpus(tree: dict[str, Any], place: str) -> Corpus:
    """Return the corpus of a tree of corpus.yaml's keys. place: the file, for errors. Raises UserError with all
    problems."""
    for source in tree["sources"] if isinstance(tree.get("sources"), list) else ():
        if isinstance(source, dict) and isinstance(source.get("shards"), str):
            add_languages(place, source)
    try:
        return Corpus.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{place}:\n" + "\n".join(f"  {line}" for line in problem_lines(error))) from None


def add_languages(place: str, source: dict[str, Any]) -> None:
    """Add the languages of shards to their entry in corpus.yaml: those of the index, or of the first sample of others'
    tars. Raises UserError. place: the corpus.yaml."""
    named = source.keys() & {"pairs", "mono"}
    if is_foreign(source["shards"]):
        if named:
            return
        from .readers import webdataset_records

        record, _ = next(webdataset_records(source["shards"], ()), (None, False))
        langs = record.langs if record else ()
    else:
        langs = Source(source["shards"]).langs
    languages = {"pairs": list(langs)} if len(langs) == 2 else {"mono": "".join(langs)}
    if named:
        raise UserError(f"{place}: the index of shards: {source['shards']} says {languages}; remove pairs and mono")
    source.update(languages)


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
            remedy = GONE.get(str(problem["loc"][-1]), remedy)
            lines.append(f"{prefix}{place}: unknown key here; {remedy}")
        else:
            given = "" if problem["type"] == "missing" else f": {problem['input']!r}"
            quote = ""
            if problem["type"] == "string_type" and isinstance(problem["input"], bool):
                quote = "; YAML reads yes, no, on and off as truth values: quote it"
            lines.append(f"{prefix}{place}{given}: {problem['msg']}{quote}")
    return lines
