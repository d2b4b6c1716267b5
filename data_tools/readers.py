"""Readers of a corpus's sources. Each yields the units of a source one after the other.

A unit is a pair of sentences or a document. It has a number (of its line, row or translation unit in the source, from
1), texts (both sides, or the document's paragraphs), and the source's own word links and score. A unit without texts is
a translation unit that lacks a language. A source that looks like another format is refused. Every error names the
file, the line or unit, and the remedy.
"""

import gzip
import json
import lzma
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from xscale.data.shards import Source
from xscale.data.text import check_not_datasets_folder, read_lines
from xscale.errors import UserError, can_be_encoded

from .conllu import read_sentences
from .corpus import SourceSpec
from .documents import Passage, read_passages
from .formats import HEAD_LINES, check_pairs, check_sides_differ, check_text, parse_object, take_head

PARAGRAPHS = 1000
"""A document with more paragraphs than this is split into several."""
UNIT_BYTES = 1 << 26
"""The maximum number of bytes of a translation unit. A TMX with a larger one is refused, so that memory is bounded."""
XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"


class Unit(NamedTuple):
    number: int
    texts: list[str]
    links: str | None = None
    score: float | None = None


def read_units(source: SourceSpec) -> Iterator[Unit]:
    """Yield the units of a source, at most `source.first` units with texts. Raises UserError."""
    unit, found = None, 0
    units = READERS["pairs" if source.pairs else "mono", source.format](source)
    if source.pairs:
        head = take_head(units, min(HEAD_LINES, source.first or HEAD_LINES), lambda unit: sum(map(len, unit.texts)))
        check_pairs(source.paths, [unit.texts for unit in head if unit.texts], source.columns is not None)
        units = chain(head, units)
    for unit in units:
        if not all(map(can_be_encoded, unit.texts)):
            raise UserError(
                f"{source.paths[0]}: pair or document {unit.number} has an unpaired surrogate, such as \\ud800; fix it"
            )
        yield unit
        found += bool(unit.texts)
        if found == source.first:  # what follows is not read, so it may be damaged
            return
    if unit is None:
        raise UserError(f"{', '.join(source.paths)}: the source is empty; give another one")


def text_pairs(source: SourceSpec) -> Iterator[Unit]:
    for number, row in enumerate(parallel_lines([Path(name) for name in source.paths]), start=1):
        yield Unit(number, row[:2], row[2] if len(row) > 2 else None)


def parallel_lines(paths: list[Path]) -> Iterator[list[str]]:
    """Yield, for each line number, the list of that line of all files. The first two files are texts; others, such as
    links, go with them. Raises UserError if the first lines of a text are not plain text, if one text is a copy of the
    other, or if a file ends before the others."""
    heads, columns = [], []
    for path in paths[:2]:
        lines = read_lines(path)
        head = take_head(lines, HEAD_LINES)
        heads.append([line for _, line in head])
        columns.append(chain(head, lines))
        check_text(path, heads[-1])
    if isinstance(paths[0], Path) and paths[0].resolve() == paths[1].resolve() and not paths[0].is_fifo():
        raise UserError(f"{paths[0]} and {paths[1]} are the same file; give the translation for one of them")
    check_sides_differ(f"{paths[1]} looks like a copy of {paths[0]}", zip(*heads, strict=False))
    return zip_lines(paths, [*columns, *map(read_lines, paths[2:])])


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


def tsv_pairs(source: SourceSpec) -> Iterator[Unit]:
    path = Path(source.paths[0])
    first, second, links, score = (int(c) if c is not None else 0 for c in
                                   (*(source.columns or (0, 0)), source.links, source.score))  # fmt: skip
    most = max(first, second, links, score)
    lines = read_lines(path)
    for number, line in lines:
        columns = ["", *line.split("\t")]
        if len(columns) <= most:
            more = sum(other.count("\t") + 1 < most for _, other in lines)
            raise UserError(
                f"{path}: line {number} has {len(columns) - 1} columns with tabs between them, needs {most}; "
                f"{more:,} later lines also have too few. Fix them, or keep the others: `awk -F'\\t' 'NF >= {most}'`"
            )
        place = f"{path}: line {number}"
        yield Unit(
            number,
            [columns[first], columns[second]],
            columns[links] if links else None,
            _score(place, columns[score]) if score else None,
        )


def _score(place: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{place}: the score {value!r} is not a number; fix or remove it") from None


def tmx_pairs(source: SourceSpec) -> Iterator[Unit]:
    """Yield a unit for each translation unit, without texts if a language is missing. `de` also matches de-DE."""
    from defusedxml.ElementTree import ParseError, iterparse

    path, number, found = Path(source.paths[0]), 0, 0
    try:
        with _open_bytes(path) as file:
            bounded = _Bounded(file, path)
            elements = iterparse(bounded, events=("start", "end"))
            _, body = next(elements)
            if body.tag != "tmx":
                raise UserError(f"{path}: its first element is {body.tag}, not tmx; give a TMX")
            for event, element in elements:
                body = element if event == "start" and element.tag == "body" else body
                if event == "end" and element.tag == "tu":
                    number += 1
                    bounded.read_bytes = 0
                    texts = _texts_of_unit(element, source.langs)
                    body.clear()
                    found += None not in texts
                    yield Unit(number, [] if None in texts else cast(list[str], texts))
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except (ParseError, ValueError, LookupError, StopIteration, *_damage_errors()) as error:
        raise UserError(
            f"{path}: after translation unit {number}: {error or 'the file is empty'}; fix the TMX"
        ) from None
    if not found:
        raise UserError(f"{path}: none of {number} translation units has both {' and '.join(source.langs)}")


def _texts_of_unit(unit: Any, langs: tuple[str, ...]) -> list[str | None]:
    """Return a translation unit's text in each language, or None."""
    texts: dict[str, str] = {}
    for variant in unit.iter("tuv"):
        segment = variant.find("seg")
        if segment is not None:
            language = (variant.get(XML_LANG) or variant.get("lang") or "").lower().replace("_", "-")
            texts.setdefault(language, "".join(segment.itertext()).replace("\n", " "))
    return [next((text for name, text in texts.items() if f"{name}-".startswith(f"{lang.lower()}-")), None)
            for lang in langs]  # fmt: skip


class _Bounded:
    """A file of translation units, whose `read` raises UserError if a unit is longer than UNIT_BYTES."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path
        self.read_bytes = 0
        """The number of bytes read since the end of the last unit."""

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.read_bytes += len(data)
        if self.read_bytes > UNIT_BYTES:
            raise UserError(f"{self.path}: a translation unit has more than {UNIT_BYTES:,} bytes; fix the TMX")
        return data


def _open_bytes(path: Path) -> BinaryIO:
    """Open a file, decompressed by its suffix."""
    if path.suffix == ".zst":
        import zstandard

        return cast(BinaryIO, zstandard.open(path, "rb"))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(path.suffix, open)(path, "rb"))


def _damage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a damaged compressed file raises."""
    import zstandard

    return EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError


def opus_pairs(source: SourceSpec) -> Iterator[Unit]:
    path = Path(source.paths[0])
    try:
        with zipfile.ZipFile(path) as archive:
            names = [[name for name in archive.namelist() if name.endswith(f".{lang}")] for lang in source.langs]
            if any(len(of_side) != 1 for of_side in names):
                raise UserError(
                    f"{path} holds {', '.join(archive.namelist()[:8])}; a zip of OPUS in Moses form has one file whose "
                    f"name ends in .{' and one in .'.join(source.langs)}"
                )
            members = [cast(Path, zipfile.Path(archive, of_side[0])) for of_side in names]
            yield from (Unit(number, row) for number, row in enumerate(parallel_lines(members), start=1))
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except (zipfile.BadZipFile, RuntimeError, ValueError) as error:  # RuntimeError: a zip with a password
        raise UserError(f"{path} is damaged, or no zip: {error}; download it again") from None


def input_files(paths: list[Path]) -> list[Path]:
    """Return the files among the paths, and the sorted, not hidden files below the folders. Raises UserError."""

    def below(folder: Path) -> list[Path]:
        check_not_datasets_folder(folder)
        found = (path for path in folder.rglob("*") if not path.is_dir())
        return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts))

    files = [f for path in paths for f in (below(path) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"no file in {', '.join(map(str, paths))}")
    for path in files:
        if path.exists() and not path.is_file() and path not in paths:  # reading a pipe would wait forever
            raise UserError(f"{path} is neither a file nor a directory; remove it, or name the files to read")
        if not can_be_encoded(str(path)):
            raise UserError(f"{str(path)!a} is not UTF-8, but keys of records contain file names; rename it")
    twice = [path for path, times in Counter(os.path.abspath(path) for path in files).items() if times > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice, so its lines would be read twice")
    return files


def text_documents(source: SourceSpec) -> Iterator[Unit]:
    """Yield documents: WikiExtractor's, JSON lines with `text` or `content`, lines between blank lines, or single
    lines."""
    numbers = count(1)  # of the lines of all files
    for path in input_files([Path(name) for name in source.paths]):
        yield from join_passages((next(numbers), starts, texts) for _, starts, texts in read_passages(path, "auto")[1])


def join_passages(passages: Iterable[Passage]) -> Iterator[Unit]:
    """Yield the documents that consecutive passages make up."""
    first, document = 0, list[str]()
    for number, starts, texts in passages:
        if document and (starts or len(document) >= PARAGRAPHS):
            yield Unit(first, document)
            document = []
        first = first if document else number
        document += texts
    if document:
        yield Unit(first, document)


def json_rows(source: SourceSpec) -> Iterator[Unit]:
    path = Path(source.paths[0])
    for number, line in read_lines(path):
        if line.strip():
            fields = parse_object(line)
            if fields is None:
                raise UserError(f"{path}: line {number} is not a JSON object; fix or remove it")
            yield _row(f"{path}: line {number}", number, fields, source)


def _row(place: str, number: int, fields: dict[str, Any], source: SourceSpec) -> Unit:
    """Return the document or pair in the fields of a JSON object or table row. place: its file and line, for errors."""
    score = None if source.score is None else _score(place, fields.get(str(source.score)))
    if source.mono:
        text = fields.get(source.field)
        if not isinstance(text, str):
            kind = f", but {text!r}" if source.field in fields else f", but the fields {', '.join(fields)}"
            raise UserError(
                f"{place} has no text in `{source.field}`{kind}; give the source another `field`, or remove the record"
            )
        return Unit(number, [paragraph for paragraph in text.split("\n") if paragraph.strip()], None, score)
    found = fields["translation"] if isinstance(fields.get("translation"), dict) else fields
    names = [str(column) for column in source.columns or source.langs]
    texts = [found.get(name) for name in names]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{place} has no texts in {' and '.join(names)}, but the fields {', '.join(found)}; name two of them in "
            f"`columns`"
        )
    return Unit(number, [str(text).replace("\n", " ") for text in texts], None, score)


def conllu_documents(source: SourceSpec) -> Iterator[Unit]:
    """Yield the documents of a treebank, which start at `# newdoc`. Each sentence before the first one is a
    document."""

    def sentences() -> Iterator[Passage]:
        in_document = False
        for number, (where, sentence) in enumerate(read_sentences(Path(source.paths[0])), start=1):
            text = next((line for line in sentence.comments if line.startswith("# text =")), None)
            if text is None:
                raise UserError(f"{where}: the sentence has no `# text =`; add it")
            starts = any(re.match(r"# newdoc\b", line) for line in sentence.comments)
            yield number, starts or not in_document, [text.partition("=")[2].strip()]
            in_document = in_document or starts

    return join_passages(sentences())


def table_rows(source: SourceSpec) -> Iterator[Unit]:
    """Yield a unit for each row of a parquet file, or of a folder that `save_to_disk` wrote."""
    path = source.paths[0]
    for number, fields in enumerate(_rows_in(path, *TABLES[source.format]), start=1):
        yield _row(f"{path}: row {number}", number, fields, source)


def _rows_in(name: str, batches: Callable[[str], Iterator[Any]], form: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's batches. Any exception becomes a UserError, since damaged files raise many."""
    number = 0
    try:
        for batch in batches(name):
            batch.validate(full=True)
            for row in batch.to_pylist():
                yield row
                number += 1
    except Exception as error:
        raise UserError(f"{name} is damaged after row {number}, or is not a {form}: {error}") from None


def _parquet(name: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(name) as file:
        yield from file.iter_batches(1024)


def _data_set(name: str) -> Iterator[Any]:
    import datasets

    found = datasets.load_from_disk(name)
    found = found["train"] if isinstance(found, datasets.DatasetDict) else found
    yield from found.with_format("arrow").iter(1024)


TABLES = {
    "parquet": (_parquet, "parquet file"),
    "datasets": (_data_set, "folder of save_to_disk, with a split `train` or without splits"),
}


def shard_records(source: SourceSpec) -> Iterator[Unit]:
    """Yield the pairs or documents of shards. Their links number words as data/words.py divides a text."""
    shards = Source(source.paths[0])

    def places() -> Iterator[tuple[int, int]]:
        return ((shard, record) for shard, records in enumerate(shards.counts.tolist()) for record in range(records))

    records = enumerate((shards.with_words(shards.read(*place)) for place in places()), start=1)
    if source.pairs:
        return (Unit(number, [*record.texts], record.links) for number, record in records)
    starts = (not shards.continues_document(*place) for place in places())
    return join_passages((number, new, [*record.texts]) for (number, record), new in zip(records, starts, strict=True))


Reader = Callable[[SourceSpec], Iterator[Unit]]
READERS: dict[tuple[str, str], Reader] = {
    ("pairs", "text"): text_pairs,
    ("pairs", "zst"): text_pairs,
    ("pairs", "tsv"): tsv_pairs,
    ("pairs", "tmx"): tmx_pairs,
    ("pairs", "jsonl"): json_rows,
    ("pairs", "opus"): opus_pairs,
    ("pairs", "parquet"): table_rows,
    ("pairs", "datasets"): table_rows,
    ("pairs", "shards"): shard_records,
    ("mono", "shards"): shard_records,
    ("mono", "text"): text_documents,
    ("mono", "jsonl"): json_rows,
    ("mono", "conllu"): conllu_documents,
    ("mono", "parquet"): table_rows,
    ("mono", "datasets"): table_rows,
}

_encode = json.JSONEncoder(ensure_ascii=False).encode


def to_line(unit: Unit) -> str:
    return _encode(unit)


def from_line(line: str) -> Unit:
    return Unit(*json.loads(line))
