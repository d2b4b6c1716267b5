"""Readers of a corpus's sources. A reader yields the units of a source, which are pairs of sentences or documents.

A unit without texts is a translation unit that lacks a language, or a document without text. Texts are unchanged;
`cleaning` removes byte-order marks and other control characters later. Every error names the file, the line or unit,
and the remedy.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, count, islice, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from xscale.data.scripts import find_exact_name_or_spellings, parse_language
from xscale.data.shards import Source
from xscale.data.text import read_decompressed_blocks, read_lines
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError, can_be_encoded_as_utf8
from xscale.files import describe_empty_or_placeholder, list_visible_files_recursively
from xscale.record import Record, parse_json, record_from_members

from .corpus import SourceSpec

PARAGRAPHS = 1000
"""The maximum number of paragraphs of a unit. A longer document becomes several units."""
HEAD_LINES = 500
"""The number of first lines that show the form of a file."""
SHARE = 0.8
"""A file is refused if at least this share of its first lines look like another format. In real text, at most 6 % of
the lines do."""
BLOCK_LINES = 50
"""Blank lines are taken for ends of documents if there are, on average, at most this many lines between them."""
XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
NATIVE_CODES = ("bpt", "ept", "ph", "it", "ut")
"""The elements of TMX whose content is markup of the document's own format, and not text."""
TAG = re.compile(r"<([^\W\d_]|[/!?])")
NumberedLine = tuple[int, str]


class Unit(NamedTuple):
    """A pair of sentences, or a document."""

    number: int
    """The number of the unit's line, row or translation unit in the source, from 1. A document has the number of its
    first line."""
    texts: list[str]
    """Both sides of a pair, or a document's paragraphs."""
    links: str | None = None
    """A pair's word links in Pharaoh form. A word stands between spaces or tabs."""
    linked: list[str] | None = None
    """The texts that the word links belong to, if these are not `texts`."""
    record: str = ""
    """The key and the tar of a pair from shards, for errors; "" for other sources, which have lines."""


class Paragraph(NamedTuple):
    number: int
    """The number of the line or record in the source, from 1."""
    text: str
    starts: bool
    """True if the paragraph starts a document."""


def read_units(source: SourceSpec) -> Iterator[Unit]:
    """Yield the units of a source, at most `source.first` units with texts. Raises UserError."""
    complete = 0
    for unit in READERS[source.format](source):
        if not can_be_encoded_as_utf8("".join(unit.texts)):
            raise UserError(
                f"{source.all_paths[0]}: pair or document {unit.number} has an unpaired surrogate, such as \\ud800, "
                "which UTF-8 cannot encode. Correct the text"
            )
        yield unit
        complete += bool(unit.texts)
        if complete == source.first:  # the rest of the file is not read, so it may be damaged
            return
    if not complete:
        raise UserError(
            f"{', '.join(source.all_paths)}: the source has no text in {' and '.join(source.langs)}. Use other files, "
            "or correct the languages of the source in corpus.yaml"
        )


def read_text(source: SourceSpec) -> Iterator[Unit]:
    """Yield pairs of lines, or documents: WikiExtractor's, the lines between blank lines, or single lines."""
    paths = list(map(Path, source.all_paths))
    if source.pairs:
        return read_text_pairs(paths)
    numbers = count(1)  # the lines of all files are numbered together
    paragraphs = (read_paragraphs(path, source.documents, numbers) for path in input_files(paths))
    return join_paragraphs(chain.from_iterable(paragraphs))


def read_text_pairs(paths: list[Path]) -> Iterator[Unit]:
    """Yield the pairs of two files of lines. paths: the two files; if there are word links, also the file of links; if
    the aligner read other texts, also these two texts. Raises UserError."""
    for path in paths:
        if paths.count(path) > 1 and (paths[0] == paths[1] or not path.is_file()):
            raise UserError(
                f"{path} is listed {paths.count(path)} times. Use one file for each of the two languages, and "
                "another file for the word alignments"
            )
    columns = [read_checked_lines(path) for path in paths[:2]]
    columns += [read_lines(path) for path in paths[2:]]
    for number, row in enumerate(zip_lines(paths, columns), start=1):
        links = row[2] if len(row) > 2 else None
        yield Unit(number, row[:2], links, row[3:] or None)


def zip_lines(paths: list[Path], columns: Sequence[Iterator[NumberedLine]]) -> Iterator[list[str]]:
    """Yield the first lines of all files as a list, then their second lines, and so on. columns: for each path, an
    iterator of (line number, line). Raises UserError if one file ends before the others."""
    for number, row in enumerate(zip_longest(*columns), start=1):
        if None in row:
            ended = row.index(None)
            others = [str(path) for path, line in zip(paths, row, strict=True) if line]
            raise UserError(
                f"{paths[ended]} ends after line {number - 1}, but line {number} exists in {' and '.join(others)}. "
                "Line n of each file must belong to the same pair: correct the files"
            )
        yield [line for _, line in row]


def read_checked_lines(path: Path) -> Iterator[NumberedLine]:
    """Yield (line number, line) of a file of text. Raises UserError if most of its first lines are not text."""
    lines = read_lines(path)
    head = list(islice(lines, HEAD_LINES))
    texts = [line.strip(" ") for _, line in head if line.strip()]
    others = sum(map(is_table_json_or_markup, texts))
    if texts and (texts[0] in ("{", "[") or texts[0].lower().startswith(("<?xml", "<tmx"))):
        others = len(texts)
    if others >= SHARE * len(texts) > 0:
        raise UserError(
            f"{path} is not a file with lines of text: {others} of its first {len(texts)} lines are rows of a "
            "table, JSON or markup. Use a file with one text on each line. For a source of `xscale data prepare`, the "
            "keys `tsv:`, `jsonl:`, `tmx:` and `datasets:` in corpus.yaml can read such files, too"
        )
    yield from head
    yield from lines


def is_table_json_or_markup(line: str) -> bool:
    """Return whether a line is a row of a table (with tabs, or with each cell in quotation marks), a JSON object, or
    begins with a tag. A tag of WikiExtractor does not count."""
    is_object = line.startswith(("{", "[{")) and line.endswith(("}", "},"))
    is_tag = TAG.match(line) is not None and not line.startswith(("<doc ", "</doc>"))
    is_row = "\t" in line or (line.startswith('"') and '","' in line and line.endswith('"'))
    return is_object or is_tag or is_row


def read_paragraphs(path: Path, form: str, line_numbers: Iterator[int]) -> Iterator[Paragraph]:
    """Yield the lines of a file that have text. form: see SourceSpec.documents. line_numbers: an iterator of the lines'
    numbers, which goes on from file to file. Raises UserError."""
    lines = read_lines(path)
    if form == "auto":
        lines = read_checked_lines(path)
        head = list(islice(lines, HEAD_LINES))
        form = guess_text_form([line.strip() for _, line in head])
        lines = chain(head, lines)
    starts = True
    for line_number, line in lines:
        number = next(line_numbers)
        text = line.strip()
        is_tag = form == "doc" and text.startswith(("<doc ", "</doc>"))
        if is_tag and (not text.endswith(">") or "</doc>" in text[1:]):
            raise UserError(
                f"{path}: line {line_number} begins with a tag <doc ...> or </doc>, but the tag is incomplete, or more "
                "text follows the tag. Complete the tag, or move the text after the tag to a separate line"
            )
        if text and not is_tag:
            yield Paragraph(number, text, starts)
            starts = form == "lines"
        elif is_tag or form == "blank":
            starts = True


def guess_text_form(head: list[str]) -> Literal["doc", "blank", "lines"]:
    """Return the form of a file, given its first lines: "doc" if it begins with WikiExtractor's tag, "blank" if blank
    lines divide it into short blocks, else "lines"."""
    text = "\n".join(head).strip("\n")
    if text.startswith("<doc "):
        return "doc"
    blocks = len(re.split("\n\n+", text))
    if blocks > 1 and sum(map(bool, head)) <= BLOCK_LINES * blocks:
        return "blank"
    return "lines"


def join_paragraphs(paragraphs: Iterable[Paragraph]) -> Iterator[Unit]:
    """Yield a unit for each document, and several units for a document with more than PARAGRAPHS paragraphs."""
    first = 0
    texts = list[str]()
    for paragraph in paragraphs:
        if texts and (paragraph.starts or len(texts) == PARAGRAPHS):
            yield Unit(first, texts)
            texts = []
        if not texts:
            first = paragraph.number
        texts.append(paragraph.text)
    if texts:
        yield Unit(first, texts)


def input_files(paths: list[Path]) -> list[Path]:
    """Return the paths that are files, and the files below the paths that are folders, sorted and without hidden files.
    Raises UserError and OSError."""
    files = list[Path]()
    for path in paths:
        if path.is_dir():
            files += list_visible_files_recursively(path)
        else:
            files.append(path)
    if not files:
        raise UserError(f"{', '.join(map(str, paths))} has no files. Use files of text, or folders with files of text")
    for name, times in Counter(map(os.path.realpath, files)).items():
        if times > 1:
            raise UserError(f"{name} is listed twice, perhaps by a folder or a symbolic link. List the file once")
    return files


def read_tsv(source: SourceSpec) -> Iterator[Unit]:
    path = Path(source.all_paths[0])
    assert source.columns
    first, second = map(int, source.columns)
    links = int(source.links or 0)
    most = max(first, second, links)
    for number, line in read_lines(path):
        columns = ["", *line.split("\t")]
        if len(columns) <= most:
            raise UserError(
                f"{path}: line {number} must have at least {most} columns separated by tabs, but their number is "
                f"{len(columns) - 1}. Correct the line, or keep only the lines with enough columns: "
                f"awk -F'\\t' 'NF >= {most}' OLD > NEW"
            )
        yield Unit(number, [columns[first], columns[second]], columns[links] if links else None)


class BlockFile:
    """Blocks of bytes as a file, from which an XML parser reads."""

    def __init__(self, blocks: Iterator[bytes]):
        self.blocks = filter(None, blocks)

    def read(self, _: int) -> bytes:
        return next(self.blocks, b"")


def read_tmx(source: SourceSpec) -> Iterator[Unit]:
    """Yield a unit for each translation unit of a TMX, without texts if it lacks a language. `de` also matches
    de-DE."""
    from defusedxml.ElementTree import ParseError, iterparse

    path = Path(source.all_paths[0])
    number = 0
    try:
        elements = iterparse(BlockFile(read_decompressed_blocks(path, accept_utf16=True)), events=("start", "end"))
        _, body = next(elements)
        if local_tag_name(body) != "tmx":
            raise UserError(
                f"{path} is not a TMX, because its first element is {local_tag_name(body)} instead of tmx. Use a TMX"
            )
        for event, element in elements:
            if event == "start" and local_tag_name(element) == "body":
                body = element
            if event == "end" and local_tag_name(element) == "tu":
                number += 1
                texts = translated_texts(element, source.langs)
                body.clear()
                yield Unit(number, texts)
    except UserError:
        raise
    except (ParseError, ValueError, LookupError, StopIteration, RecursionError) as error:
        raise UserError(
            f"{path}: the XML after translation unit {number} is damaged ({error or 'the file ends'}). Correct the "
            "TMX, or download it again"
        ) from None


def local_tag_name(element: Any) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def translated_texts(translation_unit: Any, langs: tuple[str, ...]) -> list[str]:
    """Return the texts of a TMX's translation unit in two languages; [] if one of the languages is missing."""
    texts = dict[str, str]()
    for variant in translation_unit.iterfind("{*}tuv"):
        segment = variant.find("{*}seg")
        if segment is not None:
            language = variant.get(XML_LANG) or variant.get("lang") or ""
            texts.setdefault(language, segment_text(segment, True).replace("\n", " "))
    names = find_names_of_present_languages(langs, texts)
    if len(names) < 2:
        return []
    return [texts[names[0]], texts[names[1]]]


def segment_text(element: Any, is_text: bool) -> str:
    """Return the text of a TMX's segment, or of an element inside it. is_text: False if the element's own content is
    markup."""
    parts = [element.text or ""] if is_text else []
    for child in element:
        name = local_tag_name(child)
        inside = segment_text(child, is_text=name == "sub" or (is_text and name not in NATIVE_CODES))
        parts.append(f" {inside} " if name == "sub" else inside)
        if is_text:
            parts.append(child.tail or "")
    return "".join(parts)


def find_names_of_present_languages(langs: tuple[str, ...], names: Collection[str]) -> list[str]:
    """Return the name of each language among `names`, where de can be called de-DE or deu_Latn. Of several names, a
    language gets the nearest: of pt and PT-BR, pt-BR gets PT-BR; of zh and zh-TW, zh-Hant gets zh-TW. A name stands for
    one language only: if zh is the only name, zh-Hans gets it and zh-Hant does not. The language with the fewest names
    chooses first. A language without a name is left out."""
    name_of = dict.fromkeys(langs, "")
    for lang in sorted(langs, key=lambda lang: len(find_exact_name_or_spellings(lang, names))):
        free = [name for name in find_exact_name_or_spellings(lang, names) if name not in name_of.values()]
        name_of[lang] = min(free, key=lambda name: spelling_distance(lang, name), default="")
    return list(filter(None, name_of.values()))


def spelling_distance(lang: str, name: str) -> tuple[int, int]:
    """Return how many parts of `lang`, such as a script or a region, another name of the language lacks, and how many
    further parts that name has."""
    _, *wanted = vars(parse_language(lang)).values()
    _, *parts = vars(parse_language(name)).values()
    return len(set(wanted) - {*parts, ""}), len(set(parts) - {*wanted, ""})


def read_json_lines(source: SourceSpec) -> Iterator[Unit]:
    path = Path(source.all_paths[0])
    for number, line in read_lines(path):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):  # a number of more than 4,300 digits raises ValueError
            fields = None
        if not isinstance(fields, dict):
            raise UserError(f"{place} is not a JSON object. Correct or remove the line")
        yield make_unit(place, number, fields, source)


def make_unit(place: str, number: int, fields: dict[str, Any], source: SourceSpec) -> Unit:
    """Return the document or pair of a JSON object or of a row of a table. A text that is null becomes an empty text.
    place: the file and the line or row, for errors. Raises UserError."""
    if isinstance(fields.get("translation"), dict):
        fields = fields["translation"]
    remedy = (
        f"Set the key `columns` (now {source.columns or 'not set'}) in corpus.yaml to the names of the two fields with "
        "text"
    )
    if source.mono:
        names = [source.field]
        remedy = f"Set the key `field` (now {source.field!r}) in corpus.yaml to the name of the field with text"
    elif source.columns:
        names = list(map(str, source.columns))
    else:
        # A field `id` often has a record's number, and not Indonesian text.
        names = find_names_of_present_languages(source.langs, [name for name in fields if name != "id"])
        if len(names) < 2:
            names = find_names_of_present_languages(source.langs, fields)
    if len(names) < len(source.langs) or not fields.keys() >= set(names):
        raise UserError(
            f"{place}: xscale did not find the fields with the text in {' and '.join(source.langs)}. The fields are "
            f"{', '.join(fields) or 'none'}. {remedy}, or remove the record"
        )
    texts = list[str]()
    for name in names:
        if not isinstance(fields[name], str | None):
            raise UserError(
                f"{place}: the field `{name}` is {fields[name]!r}, and must be text. {remedy}, or remove the record"
            )
        texts.append(fields[name] or "")
    if source.mono:
        return Unit(number, [line for line in texts[0].split("\n") if line.strip()])
    return Unit(number, [text.replace("\n", " ") for text in texts])


def read_parquet_or_data_set_rows(source: SourceSpec) -> Iterator[Unit]:
    """Yield a unit for each row of a parquet file, or of a data set. Raises UserError for every exception, because
    damaged files raise exceptions of many types."""
    name = source.all_paths[0]
    rows = parquet_rows(Path(name)) if source.parquet else data_set_rows(source)
    for number in count(1):
        try:
            fields = next(rows, None)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{name}: row {number} cannot be read as `{source.format}` ({error}). Correct the keys of the source "
                "in corpus.yaml, or download the data again"
            ) from None
        if fields is None:
            return
        yield make_unit(f"{name}: row {number}", number, fields, source)


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    problem = describe_empty_or_placeholder(path)
    if problem:
        raise UserError(problem)
    with pyarrow.parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(1024):
            batch.validate(full=True)
            yield from batch.to_pylist()


def data_set_rows(source: SourceSpec) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder of `save_to_disk`, of another local data set, or of a data set on the hub, which is
    streamed."""
    import datasets

    name = source.all_paths[0]
    if not any(Path(name, file).exists() for file in ("dataset_dict.json", "state.json")):
        streaming = not Path(name).exists()
        yield from datasets.load_dataset(name, source.config, split=source.split, streaming=streaming)
        return
    rows = datasets.load_from_disk(name)
    if isinstance(rows, datasets.DatasetDict):
        if source.split not in rows:
            raise UserError(
                f"{name} has the splits {', '.join(rows)}, but no split {source.split}. Set the key `split` in "
                "corpus.yaml to one of these splits"
            )
        rows = rows[source.split]
    for batch in rows.with_format("arrow").iter(1024):
        batch.validate(full=True)
        yield from batch.to_pylist()


class ShardRecord(NamedTuple):
    record: Record
    starts: bool
    """True if a monolingual record starts a document."""
    counts_words: bool
    """True if the links number the words of data/words.py; False if they number words between spaces and tabs."""
    tar: str
    """The path or URL of the tar that has the record."""


def read_shards(source: SourceSpec) -> Iterator[Unit]:
    """Yield the pairs or documents of shards: of a folder with an index, or of tars of other programs."""
    if source.is_webdataset:
        records = webdataset_records(source.all_paths[0], source.langs)
    else:
        records = indexed_records(source.all_paths[0])
    numbered = enumerate(records, start=1)
    if source.mono:
        yield from join_paragraphs(Paragraph(n, stored.record.texts[0], stored.starts) for n, stored in numbered)
        return
    for number, stored in numbered:
        texts = list(stored.record.texts)
        linked = None
        if stored.record.links is not None and stored.counts_words:
            linked = [" ".join(words) for words, _ in split_words_and_symbols(texts)]
        yield Unit(number, texts, stored.record.links, linked, f"record {stored.record.key!r} of {stored.tar}")


def indexed_records(directory: str) -> Iterator[ShardRecord]:
    shards = Source(directory)
    for shard, records in enumerate(shards.counts.tolist()):
        tar = f"{directory}/{shards.shards[shard].name}"
        for place in range(records):
            record = shards.renumber_links_by_xscale_words(shards.read(shard, place))
            yield ShardRecord(record, not shards.continues_document(shard, place), True, tar)


def webdataset_records(urls: str, expected_langs: tuple[str, ...] = ()) -> Iterator[ShardRecord]:
    """Yield the records of tars that webdataset opens: paths and URLs with braces, `pipe:` and others. expected_langs:
    the languages of each record, in their order; (): any languages. Raises UserError."""
    import webdataset

    place = "the start"
    doc = None
    try:
        for sample in webdataset.WebDataset(urls, shardshuffle=False):
            place = f"sample {sample['__key__']!r} of {sample['__url__']}"
            for record in records_of_webdataset_sample(sample, expected_langs):
                if expected_langs and (
                    len(record.langs) != len(expected_langs)
                    or find_names_of_present_languages(expected_langs, record.langs) != list(record.langs)
                ):
                    raise ValueError(
                        f"the record has texts in {', '.join(record.langs)}, but corpus.yaml gives "
                        f"{' and '.join(expected_langs)}"
                    )
                starts = record.doc is None or record.doc != doc
                yield ShardRecord(record, starts, "jsonl" in sample, sample["__url__"])
                doc = record.doc
    except Exception as error:  # tars, servers, programs behind pipes and JSON raise many types of errors
        raise UserError(
            f"{urls}: the tar cannot be read at or after {place} ({error}). Correct the tar, or the source in "
            "corpus.yaml"
        ) from None


def records_of_webdataset_sample(sample: dict[str, Any], default_langs: tuple[str, ...]) -> list[Record]:
    """Return the records of a WebDataset's sample, which has JSON lines, a JSON object, or a text for each language
    (KEY.LANG.txt, KEY.links.txt; or KEY.txt). default_langs: the language of KEY.txt, or of both texts in order."""
    if "jsonl" in sample:
        return [Record.from_dict(parse_json(line)) for line in sample["jsonl"].splitlines() if line.strip()]
    names = [name.removesuffix(".txt") for name in sample if name.endswith(".txt")]
    spelled = tuple(find_names_of_present_languages(default_langs, names))
    return [record_from_members(sample["__key__"], sample, spelled or default_langs)]


READERS: dict[str, Callable[[SourceSpec], Iterator[Unit]]] = {
    "text": read_text,
    "tsv": read_tsv,
    "tmx": read_tmx,
    "jsonl": read_json_lines,
    "parquet": read_parquet_or_data_set_rows,
    "datasets": read_parquet_or_data_set_rows,
    "shards": read_shards,
}
"""The key of a source that names its files -> the function that reads them."""

unit_to_line: Callable[[Unit], str] = json.JSONEncoder(ensure_ascii=False).encode
"""The function that returns the line for a unit in the files of chunks."""


def unit_from_line(line: str) -> Unit:
    return Unit(*json.loads(line))
