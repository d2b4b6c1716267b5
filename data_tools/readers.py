"""Readers of a corpus's sources: each yields the units of its source, one after the other, whatever the format.

A unit is a pair of sentences, or a document: its number (of its line, row or sentence in the source, from 1), its texts
(both sides, or the document's paragraphs), and a pair's word links as the source has them. What looks like another
format is refused, and every error names the file, the place and the remedy.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from xscale.data.shards import find_sources
from xscale.data.text import files_of, read_lines
from xscale.errors import UserError, can_be_encoded

from .corpus import SourceSpec
from .documents import passages
from .formats import HEAD_LINES, check_sides, check_text, object_of

PARAGRAPHS = 1000
"""A document of more paragraphs goes on as another one."""
XML = "{http://www.w3.org/XML/1998/namespace}lang"


class Unit(NamedTuple):
    number: int
    texts: list[str]
    links: str | None = None


def place(name: str) -> Path:
    """A local path, or one of fsspec's with a protocol, as http://, s3:// or memory://. Raises UserError."""
    if "://" not in name:
        return Path(name)
    try:
        from upath import UPath

        return cast(Path, UPath(name))
    except (ImportError, ValueError) as error:
        raise UserError(f"{name} cannot be read ({error}): `pip install 'xscale[prepare]'` and fsspec's file system"
                        ) from None  # fmt: skip


def read(source: SourceSpec) -> Iterator[Unit]:
    """Its first units. Raises UserError."""
    units = READ["pairs" if source.pairs else "mono" if source.mono else "shards", source.reader](source)
    for unit in islice(units, source.first):
        if not all(map(can_be_encoded, unit.texts)):
            raise UserError(
                f"{source.paths[0]}: unit {unit.number} has half a character, as \\ud800; mend or remove it"
            )
        yield unit


def text_pairs(source: SourceSpec) -> Iterator[Unit]:
    paths = [place(name) for name in source.paths]
    sides = [_checked(path, side, source.langs) for side, path in enumerate(paths[:2])]
    heads = [list(islice(side, HEAD_LINES)) for side in sides]
    check_sides(paths[0], paths[1], [[line for _, line in head] for head in heads])
    columns = [chain(head, side) for head, side in zip(heads, sides, strict=True)] + [read_lines(p) for p in paths[2:]]
    for number, row in enumerate(zip_longest(*columns), start=1):
        if None in row:
            ended = paths[row.index(None)]
            raise UserError(
                f"{ended} ends after line {number - 1}, {' and '.join(str(p) for p in paths if p != ended)} go on: "
                f"line n of one must be the counterpart of line n of the other"
            )
        yield Unit(number, [row[0][1], row[1][1]], row[2][1] if len(row) > 2 else None)


def _checked(path: Path, side: int, langs: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    lines = read_lines(path)
    head = list(islice(lines, HEAD_LINES))
    check_text(path, [line for _, line in head], side, langs[side])
    yield from chain(head, lines)


def tsv_pairs(source: SourceSpec) -> Iterator[Unit]:
    path, wanted = place(source.paths[0]), [*(source.columns or ()), *([source.links] if source.links else [])]
    for number, line in read_lines(path):
        columns = line.split("\t")
        if len(columns) < max(cast(list[int], wanted)):
            raise UserError(f"{path}: line {number} has {len(columns)} columns, needs {max(wanted)}; mend or remove it")
        found = [columns[int(column) - 1] for column in wanted]
        yield Unit(number, found[:2], found[2] if source.links else None)


def tmx_pairs(source: SourceSpec) -> Iterator[Unit]:
    """Translation units with both languages, `de` also as de-DE; others hold nothing of these languages."""
    import defusedxml
    from defusedxml.ElementTree import ParseError, iterparse

    path, number, found = place(source.paths[0]), 0, 0
    opened = _open(path)
    with opened as file:
        try:
            elements = iterparse(file, events=("start", "end"))
            _, root = next(elements)
            if root.tag != "tmx":
                raise UserError(f"{path} is XML, but its first element is {root.tag}, not tmx; give a TMX")
            body = root
            for event, element in elements:
                body = element if event == "start" and element.tag == "body" else body
                if event == "end" and element.tag == "tu":
                    number += 1
                    sides = _variants(element, source.langs)
                    body.clear()
                    if None not in sides:
                        found += 1
                        yield Unit(number, cast(list[str], sides))
        except (ParseError, defusedxml.DefusedXmlException, StopIteration) as error:
            raise UserError(
                f"{path}: after translation unit {number}: {error or 'it is empty'}; mend the TMX"
            ) from None
    if not found:
        raise UserError(f"{path}: none of {number} translation units has both {' and '.join(source.langs)}")


def _variants(unit: Any, langs: tuple[str, ...]) -> list[str | None]:
    texts: dict[str, str] = {}
    for variant in unit.iter("tuv"):
        segment = variant.find("seg")
        if segment is not None:
            language = (variant.get(XML) or variant.get("lang") or "").lower().replace("_", "-")
            texts.setdefault(language, " ".join("".join(segment.itertext()).split("\n")))
    return [
        next(
            (text for name, text in texts.items() if name == lang.lower() or name.startswith(lang.lower() + "-")), None
        )
        for lang in langs
    ]


def _open(path: Path) -> BinaryIO:
    """A file's bytes, decompressed."""
    import fsspec

    try:
        return cast(BinaryIO, fsspec.open(str(path), "rb", compression="infer").open())
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None


def opus_pairs(source: SourceSpec) -> Iterator[Unit]:
    path = place(source.paths[0])
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            names = [
                [name for name in archive.namelist() if name.endswith(f".{lang}") and "/" not in name.strip("/")]
                for lang in source.langs
            ]
            if any(len(of_side) != 1 for of_side in names):
                raise UserError(
                    f"{path} has {', '.join(archive.namelist()[:8])}; a zip of OPUS in Moses form has one file whose "
                    f"name ends in .{' and one in .'.join(source.langs)}"
                )
            members = [cast(Path, zipfile.Path(archive, of_side[0])) for of_side in names]
            sides = zip_longest(*(_checked(member, side, source.langs) for side, member in enumerate(members)))
            for number, row in enumerate(sides, start=1):
                if None in row:
                    raise UserError(f"{members[row.index(None)]} ends after line {number - 1}, the other side goes on")
                yield Unit(number, [row[0][1], row[1][1]])
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is damaged, or no zip: {error}") from None


def documents(source: SourceSpec) -> Iterator[Unit]:
    """WikiExtractor's, JSON lines with `text` or `content`, blank lines between, or else a line each."""
    total = 0
    for path in chain(*([place(n)] if "://" in n else files_of([Path(n)]) for n in source.paths)):
        number, paragraphs = 0, list[str]()
        for _, starts, texts in passages(path, "auto")[1]:
            total += 1
            if (starts or len(paragraphs) >= PARAGRAPHS) and paragraphs:
                yield Unit(number, paragraphs)
                paragraphs = []
            number = number if paragraphs else total
            paragraphs = paragraphs + texts
        if paragraphs:
            yield Unit(number, paragraphs)


def json_documents(source: SourceSpec) -> Iterator[Unit]:
    path = place(source.paths[0])
    for number, line in read_lines(path):
        if not line.strip():
            continue
        fields = object_of(line)
        if fields is None:
            raise UserError(f"{path}: line {number} is not a JSON object; mend or remove it")
        yield _document(path, number, fields, source.field)


def _document(path: Path | str, number: int, fields: dict[str, Any], field: str) -> Unit:
    text = fields.get(field)
    if not isinstance(text, str):
        raise UserError(
            f"{path}: line {number} has no text in `{field}`, but the fields {', '.join(fields)}; name its `field`"
        )
    return Unit(number, [paragraph for paragraph in text.split("\n") if paragraph.strip()])


def rows(source: SourceSpec) -> Iterator[Unit]:
    """Rows of a parquet file, or of a data set of Hugging Face's: on disk, or streamed from the hub."""
    path = source.paths[0]
    table = _parquet(path) if source.reader == "parquet" else _data_set(path)
    for number, fields in enumerate(table, start=1):
        if source.mono:
            yield _document(path, number, fields, source.field)
            continue
        found = fields["translation"] if isinstance(fields.get("translation"), dict) else fields
        texts = [found.get(str(column)) for column in source.columns or source.langs]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{path}: row {number} has no texts in {' and '.join(map(str, source.columns or source.langs))}, but "
                f"the fields {', '.join(found)}; name two of them in `columns`"
            )
        yield Unit(number, [str(text).replace("\n", " ") for text in texts])


def _parquet(name: str) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with place(name).open("rb") as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024):
                yield from batch.to_pylist()
    except FileNotFoundError:
        raise UserError(f"{name} not found") from None
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{name} is damaged, or no parquet file: {error}") from None


def _data_set(name: str) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        if Path(name).exists():
            found = datasets.load_from_disk(name)
            return iter(found["train"] if isinstance(found, datasets.DatasetDict) else found)
        return iter(datasets.load_dataset(name, split="train", streaming=True))
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise UserError(f"{name} is no folder of save_to_disk, nor a data set within reach: {error}") from None


def conllu(source: SourceSpec) -> Iterator[Unit]:
    """A document's sentences, each a paragraph; a file without `# newdoc` is of sentences that are documents."""
    path, in_documents, number, sentences, words = place(source.paths[0]), False, 0, list[str](), list[str]()
    text = None
    for line_number, line in chain(read_lines(path), [(0, "")]):
        if line.startswith("# newdoc"):
            if sentences:
                yield Unit(number, sentences)
            sentences, in_documents = [], True
        elif line.startswith("# text ="):
            text = line.partition("=")[2].strip()
        elif line and not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != 10:
                raise UserError(f"{path}: line {line_number} has {len(columns)} columns, CoNLL-U has 10; mend it")
            if columns[0].isdecimal():
                words.append(columns[1] + ("" if "SpaceAfter=No" in columns[9] else " "))
        elif not line and (words or text):
            number = number if sentences else max(line_number - 1, 1)
            sentences.append(text or "".join(words).strip())
            text, words = None, []
            if not in_documents or len(sentences) == PARAGRAPHS:
                yield Unit(number, sentences)
                sentences = []
    if sentences:
        yield Unit(number, sentences)


def shard_units(source: SourceSpec) -> Iterator[Unit]:
    """Records of shards; of monolingual ones the documents."""
    number, paragraphs = 0, list[str]()
    for found in find_sources([place(source.paths[0])]):
        for shard, count in enumerate(found.counts.tolist()):
            for record in range(count):
                read = found.with_words(found.read(shard, record))
                if len(read.texts) == 2:
                    number += 1
                    yield Unit(number, list(read.texts), read.links)
                    continue
                if paragraphs and (not found.goes_on(shard, record) or len(paragraphs) >= PARAGRAPHS):
                    yield Unit(number, paragraphs)
                    paragraphs = []
                number, paragraphs = number if paragraphs else number + 1, [*paragraphs, read.texts[0]]
    if paragraphs:
        yield Unit(number, paragraphs)


def shard_langs(source: SourceSpec) -> tuple[str, ...]:
    """The languages of a source of shards. Raises UserError."""
    langs = {found.langs for found in find_sources([place(source.paths[0])])}
    if len(langs) != 1:
        raise UserError(f"{source.shards} holds {langs}; give each folder of shards as a source of its own")
    return langs.pop()


Reader = Callable[[SourceSpec], Iterator[Unit]]
READ: dict[tuple[str, str], Reader] = {
    ("pairs", "text"): text_pairs,
    ("pairs", "zst"): text_pairs,
    ("pairs", "tsv"): tsv_pairs,
    ("pairs", "tmx"): tmx_pairs,
    ("pairs", "opus"): opus_pairs,
    ("mono", "text"): documents,
    ("mono", "jsonl"): json_documents,
    ("mono", "conllu"): conllu,
    ("shards", "shards"): shard_units,
    **{(kind, reader): rows for kind in ("pairs", "mono") for reader in ("parquet", "datasets")},
}
"""What reads a kind of units in a format."""


_encode = json.JSONEncoder(ensure_ascii=False).encode


def to_line(unit: Unit) -> str:
    return _encode(unit)


def from_line(line: str) -> Unit:
    return Unit(*json.loads(line))
