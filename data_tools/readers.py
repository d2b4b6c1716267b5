"""Readers of a corpus's sources. Each yields the units of a source one after the other.

A unit is a pair of sentences or a document. A unit without texts is a translation unit that lacks a language, or a
document without text. Texts are as the source gives them; `cleaning` removes byte-order marks and other control
characters. Every error names the file, the line or unit, and the remedy.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from xscale.data.scripts import names_of
from xscale.data.shards import Source
from xscale.data.text import check_not_datasets_folder, is_saved_data_set, read_blocks, read_lines
from xscale.data.words import split
from xscale.errors import UserError, can_be_encoded
from xscale.files import pointer_problem
from xscale.record import Record, parse_json

from .corpus import SourceSpec
from .documents import Passage, check_text, read_passages, take_head

PARAGRAPHS = 1000
"""A document with more paragraphs than this is split into several."""
UNIT_BYTES = 1 << 26
"""The maximum number of bytes of a translation unit. A TMX with a larger one is refused, so that memory is bounded."""
XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
NATIVE_CODES = ("bpt", "ept", "ph", "it", "ut")
"""The elements of TMX whose content is markup of the document's own format, and not text."""


class Unit(NamedTuple):
    number: int
    """The number of its line, row or translation unit in the source, from 1. A document has that of its first line."""
    texts: list[str]
    """Both sides of a pair, or a document's paragraphs."""
    links: str | None = None
    """A pair's word links in Pharaoh form, of the words between spaces and tabs."""
    linked: list[str] | None = None
    """The texts whose words `links` numbers; None: `texts`."""
    keys: list[str] | None = None
    """With `line_keys`: for each paragraph, the beginning of its sentences' keys."""


def read_units(source: SourceSpec, paragraphs: int = PARAGRAPHS) -> Iterator[Unit]:
    """Yield the units of a source, at most `source.first` units with texts. paragraphs: the most of a document, of
    which a longer one is split. Raises UserError."""
    unit, found = None, 0
    for unit in READERS[source.format](source, paragraphs):
        if not can_be_encoded("".join(unit.texts)):
            raise UserError(
                f"{source.paths[0]}: pair or document {unit.number} has an unpaired surrogate, such as \\ud800; fix it"
            )
        yield unit
        found += bool(unit.texts)
        if found == source.first:  # what follows is not read, so it may be damaged
            return
    if unit is None:
        raise UserError(f"{', '.join(source.paths)}: the source is empty; give another one")


def read_text(source: SourceSpec, paragraphs: int) -> Iterator[Unit]:
    return text_pairs(source) if source.pairs else text_documents(source, paragraphs)


def text_pairs(source: SourceSpec) -> Iterator[Unit]:
    paths = [Path(name) for name in source.paths]
    if paths[0].resolve() == paths[1].resolve() and not paths[0].is_fifo():
        raise UserError(f"{paths[0]} and {paths[1]} are the same file; give the translation for one of them")
    columns = [checked_lines(path) for path in paths[:2]] + [read_lines(path) for path in paths[2:]]
    for number, row in enumerate(zip_lines(paths, columns), start=1):
        links = row[2] if source.links else None
        yield Unit(number, row[:2], links, row[3:] or None)


def checked_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a file. Raises UserError if its first lines are not text."""
    lines = read_lines(path)
    head = take_head(lines)
    check_text(path, head)
    yield from chain(head, lines)


def zip_lines(paths: list[Path], columns: Sequence[Iterator[tuple[int, str]]]) -> Iterator[list[str]]:
    """Yield, for each line number, the list of that line of all files. columns: for each path an iterator of (number,
    line). Raises UserError if one file ends before the others."""
    for number, row in enumerate(zip_longest(*columns), start=1):
        if None in row:
            ended = row.index(None)
            others = " and ".join(str(path) for path, line in zip(paths, row, strict=True) if line)
            raise UserError(
                f"{paths[ended]} ends after line {number - 1}, but {others} goes on at line {number}: line n of one "
                f"must be the counterpart of line n of the other"
            )
        yield [line for _, line in row]


def tsv_pairs(source: SourceSpec, _: int) -> Iterator[Unit]:
    path = Path(source.paths[0])
    assert source.columns
    first, second = (int(column) for column in source.columns)
    links = int(source.links or 0)
    most = max(first, second, links)
    for number, line in read_lines(path):
        columns = ["", *line.split("\t")]
        if len(columns) <= most:
            raise UserError(
                f"{path}: line {number} has {len(columns) - 1} columns with tabs between them, needs {most}; fix it, "
                f"or keep the other lines: `awk -F'\\t' 'NF >= {most}'`"
            )
        yield Unit(number, [columns[first], columns[second]], columns[links] if links else None)


class _Translations:
    """The bytes of a TMX as a file, whose `read` raises UserError if a translation unit is longer than UNIT_BYTES."""

    def __init__(self, path: Path):
        self.path, self.blocks = path, read_blocks(path, is_xml=True)
        self.read_bytes = 0
        """The number of bytes that were read since the end of the last unit."""

    def read(self, _: int) -> bytes:
        data = next((block for block in self.blocks if block), b"")
        self.read_bytes += len(data)
        if self.read_bytes > UNIT_BYTES:
            raise UserError(f"{self.path}: a translation unit has more than {UNIT_BYTES:,} bytes; fix the TMX")
        return data


def tmx_pairs(source: SourceSpec, _: int) -> Iterator[Unit]:
    """Yield a unit for each translation unit, without texts if a language is missing. `de` also matches de-DE."""
    from defusedxml.ElementTree import ParseError, iterparse

    path, number, found = Path(source.paths[0]), 0, 0
    try:
        file = _Translations(path)
        elements = iterparse(file, events=("start", "end"))
        _, body = next(elements)
        if tag_of(body) != "tmx":
            raise UserError(f"{path}: its first element is {tag_of(body)}, not tmx; give a TMX")
        for event, element in elements:
            if event == "start" and tag_of(element) == "body":
                body = element
            if event == "end" and tag_of(element) == "tu":
                number += 1
                file.read_bytes = 0
                texts = translations(element, source.langs)
                body.clear()
                found += bool(texts)
                yield Unit(number, texts)
    except UserError:
        raise
    except (ParseError, ValueError, LookupError, StopIteration, RecursionError) as error:
        raise UserError(f"{path}: after translation unit {number}: {error or 'the file ends'}; fix the TMX") from None
    if not found:
        raise UserError(f"{path}: none of {number} translation units has both {' and '.join(source.langs)}")


def tag_of(element: Any) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def translations(unit: Any, langs: tuple[str, ...]) -> list[str]:
    """Return a translation unit's texts in both languages, or [] if one is missing."""
    texts = dict[str, str]()
    for variant in unit.iter():
        if tag_of(variant) == "tuv":
            segment = next((child for child in variant if tag_of(child) == "seg"), None)
            if segment is not None:
                language = variant.get(XML_LANG) or variant.get("lang") or ""
                texts.setdefault(language, segment_text(segment, True).replace("\n", " "))
    names = [fitting_name(lang, texts) for lang in langs]
    return [texts[name] for name in names if name] if all(names) else []


def segment_text(element: Any, is_text: bool) -> str:
    """Return the text of a segment or of an element inside it. is_text: its own content is text."""
    parts = [element.text or ""] if is_text else []
    for child in element:
        name = tag_of(child)
        inside = segment_text(child, is_text=name == "sub" or (is_text and name not in NATIVE_CODES))
        parts.append(f" {inside} " if name == "sub" else inside)
        if is_text:
            parts.append(child.tail or "")
    return "".join(parts)


def fitting_name(lang: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that means a language, such as de-DE or deu_Latn for de; None if there is none."""
    return next(iter(names_of(lang, names)), None)


def input_files(paths: list[Path]) -> list[Path]:
    """Return the files among the paths, and the sorted, not hidden files below the folders. Raises UserError."""
    files = list[Path]()
    for path in paths:
        files += files_in(path) if path.is_dir() else [path]
    if not files:
        raise UserError(f"no file in {', '.join(map(str, paths))}")
    for path in files:
        if path.exists() and not path.is_file() and path not in paths:  # reading a pipe would wait forever
            raise UserError(f"{path} is neither a file nor a directory; remove it, or name the files to read")
        if not can_be_encoded(str(path)):
            raise UserError(f"{str(path)!a} is not UTF-8, but keys of records contain file names; rename it")
    for name, times in Counter(os.path.abspath(path) for path in files).items():
        if times > 1:
            raise UserError(f"{name} is given twice, so its lines would be read twice")
    return files


def files_in(folder: Path) -> list[Path]:
    """Return the sorted files below a folder, without hidden ones."""
    check_not_datasets_folder(folder)
    files = list[Path]()
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and not path.is_dir():
            files.append(path)
    return files


def stem(path: Path) -> str:
    return path.name.partition(".")[0]


def key_prefixes(paths: list[Path]) -> list[str]:
    """Return the beginning of each file's record keys: the file's stem, or, if files share a stem (WikiExtractor's
    AA/wiki_00 and AB/wiki_00), its path below the files' common directory."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath([path.parent for path in absolute])
    times = Counter(map(stem, paths))
    return [stem(path) if times[stem(path)] == 1 else path.relative_to(common).as_posix() for path in absolute]


def text_documents(source: SourceSpec, paragraphs: int) -> Iterator[Unit]:
    """Yield documents: WikiExtractor's, lines between blank lines, or single lines."""
    files = input_files([Path(name) for name in source.paths])
    numbers = count(1)  # of the lines of all files
    for path, prefix in zip(files, key_prefixes(files), strict=True):
        passages = read_passages(path, source.documents)
        keys = f"{prefix}.{source.mono}" if source.line_keys else ""
        yield from join_passages(zip(passages, numbers, strict=False), paragraphs, keys)


def join_passages(passages: Iterable[tuple[Passage, int]], most: int, prefix: str = "") -> Iterator[Unit]:
    """Yield the documents that consecutive passages make up. passages: with the numbers of their lines in the source.
    most: the maximum number of paragraphs of a document. prefix: the beginning of their keys, if they have keys."""
    first, texts, keys = 0, list[str](), list[str]()
    for passage, number in passages:
        if texts and (passage.starts or len(texts) >= most):
            yield Unit(first, texts, keys=keys or None)
            texts, keys = [], []
        if not texts:
            first = number
        texts += passage.texts
        if prefix:
            keys += [f"{prefix}-{passage.line:09d}"] * len(passage.texts)
    if texts:
        yield Unit(first, texts, keys=keys or None)


def json_rows(source: SourceSpec, _: int) -> Iterator[Unit]:
    path = Path(source.paths[0])
    for number, line in read_lines(path):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):  # a number of more than 4,300 digits raises ValueError
            fields = None
        if not isinstance(fields, dict):
            raise UserError(f"{place} is not a JSON object; fix or remove it")
        yield row_unit(place, number, fields, source)


def row_unit(place: str, number: int, fields: dict[str, Any], source: SourceSpec) -> Unit:
    """Return the document or pair in the fields of a JSON object or table row. A text that is null is empty. place: its
    file and line, for errors."""
    if isinstance(fields.get("translation"), dict):
        fields = fields["translation"]
    if source.mono:
        names: list[str | None] = [source.field if source.field in fields else None]
        remedy = f"give the source another `field` than {source.field!r}"
    elif source.columns:
        names = [str(column) if column in fields else None for column in source.columns]
        remedy = "name two of them in `columns`"
    else:
        names = [fitting_name(lang, fields) for lang in source.langs]
        remedy = "name two of them in `columns`"
    if None in names:
        raise UserError(f"{place} has no text in it, but the fields {', '.join(fields) or 'none'}; {remedy}")
    texts = [fields[name] for name in names if name is not None]
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str | None):
            raise UserError(f"{place} has no text in `{name}`, but {text!r}; {remedy}, or remove the record")
    if source.mono:
        lines = (texts[0] or "").split("\n")
        return Unit(number, [line for line in lines if line.strip()])
    return Unit(number, [(text or "").replace("\n", " ") for text in texts])


def table_rows(source: SourceSpec, _: int) -> Iterator[Unit]:
    """Yield a unit for each row of a parquet file, or of a data set. Any exception becomes a UserError, since damaged
    files raise many."""
    name = source.paths[0]
    rows = parquet_rows(name) if source.format == "parquet" else data_set_rows(source)
    for number in count(1):
        try:
            fields = next(rows, None)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{name} is damaged after row {number - 1}, or is not a {source.format} source: {error}"
            ) from None
        if fields is None:
            return
        yield row_unit(f"{name}: row {number}", number, fields, source)


def parquet_rows(name: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    problem = pointer_problem(Path(name))
    if problem:
        raise UserError(problem)
    with pyarrow.parquet.ParquetFile(name) as table:
        for batch in table.iter_batches(1024):
            batch.validate(full=True)
            yield from batch.to_pylist()


def data_set_rows(source: SourceSpec) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder of `save_to_disk`, of another local data set, or of a hub's, which is streamed."""
    import datasets

    name, split = source.paths[0], source.split or "train"
    if is_saved_data_set(Path(name)):
        rows = datasets.load_from_disk(name)
        if isinstance(rows, datasets.DatasetDict):
            rows = rows[split]
        for batch in rows.with_format("arrow").iter(1024):
            batch.validate(full=True)
            yield from batch.to_pylist()
        return
    streaming = not Path(name).exists()
    yield from datasets.load_dataset(name, source.config, split=split, streaming=streaming)


class ShardRecord(NamedTuple):
    texts: tuple[str, ...]
    starts: bool
    """True if a monolingual record starts a document."""
    links: str | None
    counts_words: bool
    """True if the links number words as data/words.py divides a text; False: words between spaces and tabs."""


def shard_units(source: SourceSpec, paragraphs: int) -> Iterator[Unit]:
    """Yield the pairs or documents of shards, of our own or of others'."""
    records = enumerate(foreign_records(source) if source.is_foreign else own_records(source), start=1)
    if source.mono:
        passages = (Passage(number, record.starts, [*record.texts]) for number, record in records)
        yield from join_passages(((passage, passage.line) for passage in passages), paragraphs)
        return
    for number, record in records:
        linked = None
        if record.links is not None and record.counts_words:
            linked = [" ".join(words) for words, _ in split(list(record.texts))]
        yield Unit(number, [*record.texts], record.links, linked)


def own_records(source: SourceSpec) -> Iterator[ShardRecord]:
    shards = Source(source.paths[0])
    for shard, records in enumerate(shards.counts.tolist()):
        for place in range(records):
            record = shards.with_words(shards.read(shard, place))
            yield ShardRecord(record.texts, not shards.continues_document(shard, place), record.links, True)


def foreign_records(source: SourceSpec) -> Iterator[ShardRecord]:
    """Yield the records of tars that webdataset opens: paths and URLs with braces, `pipe:` and others. Raises
    UserError."""
    doc = None
    for record, counts_words in webdataset_records(source.paths[0], source.langs):
        starts = record.doc is None or record.doc != doc
        doc = record.doc
        yield ShardRecord(record.texts, starts, record.links, counts_words)


def webdataset_records(urls: str, langs: tuple[str, ...]) -> Iterator[tuple[Record, bool]]:
    """Yield the records of WebDataset tars in the languages `langs` (none: those of each sample), and whether their
    links number words as data/words.py divides texts. Raises UserError."""
    import webdataset

    place = "the start"
    try:
        for sample in webdataset.WebDataset(urls, shardshuffle=False):
            place = f"sample {sample['__key__']!r} of {sample['__url__']}"
            for record in sample_records(sample, langs):
                yield record, "jsonl" in sample
    except Exception as error:  # of tars, of servers, of programs behind pipes, of JSON: there are many
        raise UserError(f"{urls}: at or after {place}: {error}; correct the tar, or its address") from None


def sample_records(sample: dict[str, Any], langs: tuple[str, ...]) -> list[Record]:
    """Return the records of a sample of WebDataset: JSON lines, a JSON object, or a text for each language. Raises
    ValueError."""
    if "jsonl" in sample:
        records = [Record.from_dict(parse_json(line)) for line in sample["jsonl"].splitlines() if line.strip()]
    elif "json" in sample:
        records = [Record.from_dict({"key": sample["__key__"]} | parse_json(sample["json"]))]
    else:
        texts = dict[str, str]()
        for name, content in sample.items():
            if name == "txt" and len(langs) == 1:
                texts[langs[0]] = content.decode()
            elif name.endswith(".txt") and name.count(".") == 1 and name != "links.txt":
                texts[name.removesuffix(".txt")] = content.decode()
        links = sample["links.txt"].decode() if "links.txt" in sample else None
        fields = {"key": sample["__key__"], "langs": [*texts], "texts": [*texts.values()], "links": links}
        if len(texts) > len(langs) > 0:
            fields |= chosen_sides(texts, langs)
        records = [Record.from_dict(fields)]
    return [in_order(record, langs) for record in records]


def chosen_sides(texts: dict[str, str], langs: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the fields `langs` and `texts` of the texts in these languages."""
    names = [name for name in (fitting_name(lang, texts) for lang in langs) if name]
    return {"langs": names, "texts": [texts[name] for name in names]}


def in_order(record: Record, langs: tuple[str, ...]) -> Record:
    """Return the record with its sides in the order of `langs`. Raises ValueError if it has other languages."""
    if not langs or record.langs == langs:
        return record
    sides = dict(zip(record.langs, record.texts, strict=True))
    names = [fitting_name(lang, sides) for lang in langs]
    if None in names or len(names) != len(record.langs):
        raise ValueError(f"it has texts in {', '.join(record.langs)}, not in {' and '.join(langs)}")
    links = record.links
    if links is not None and names != [*record.langs]:
        flipped = (link.partition("-") for link in links.split())
        links = " ".join(f"{second}-{first}" for first, _, second in flipped)
    return record._replace(langs=langs, texts=tuple(sides[name] for name in names if name), links=links)


Reader = Callable[[SourceSpec, int], Iterator[Unit]]
READERS: dict[str, Reader] = {
    "text": read_text,
    "tsv": tsv_pairs,
    "tmx": tmx_pairs,
    "jsonl": json_rows,
    "parquet": table_rows,
    "datasets": table_rows,
    "shards": shard_units,
}
"""The key of a source that names its files -> the function that reads them, with the most paragraphs of a document."""

_encode = json.JSONEncoder(ensure_ascii=False).encode


def to_line(unit: Unit) -> str:
    return _encode(unit)


def from_line(line: str) -> Unit:
    return Unit(*json.loads(line))
