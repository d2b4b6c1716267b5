"""The scan of a tar: one pass that finds every record and checks that it can be read."""

import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xscale.data.link_projection import project_links
from xscale.data.parse import parse_line, parse_sample, sample_key
from xscale.data.shards import BLOCK, FOLLOWS, IDX_DTYPE, PART_BYTES, Shard, check_languages
from xscale.data.survey import Survey
from xscale.errors import UserError
from xscale.files import sha256_file
from xscale.record import Record


@dataclass(frozen=True)
class ScannedShard:
    shard: Shard
    layout: str
    langs: tuple[str, ...]
    idx: np.ndarray
    survey: Survey

    @property
    def documents(self) -> int:
        return int((self.idx["length"] < FOLLOWS).sum())


def scan_shard(
    path: Path, langs: tuple[str, ...] | None = None, links_count: dict[str, str] | None = None
) -> ScannedShard:
    """Scan a tar: find the byte range and checksum of every record. Raises UserError naming shard and record.

    links_count: layout -> the kind of words that its links count (a key of SEGMENTATIONS), to check that links fit.
    """
    ranges: list[tuple[int, int, int]] = []
    layouts: set[str] = set()
    found_langs: tuple[str, ...] | None = langs
    sample: list[tarfile.TarInfo] = []
    doc: str | int | None = None
    survey: Survey | None = None

    def add(record: Record, offset: int, data: bytes) -> None:
        nonlocal found_langs, doc, survey
        if found_langs is None:
            check_languages(record.langs)
            found_langs = record.langs
        elif record.langs != found_langs:
            raise ValueError(f"languages {record.langs} in a source of {found_langs}; give each its own directory")
        if links_count and record.links is not None and len(record.langs) == 2:
            project_links(record.links, record.texts, by_words=links_count[min(layouts)] == "unicode")
        ranges.extend(entries(record, offset, data, follows=record.doc is not None and record.doc == doc))
        doc = record.doc
        survey = survey or Survey(len(record.texts))
        survey.add(record.texts)

    def add_sample() -> None:
        if not sample:
            return
        start, end = sample[0].offset, sample[-1].offset_data + -(-sample[-1].size // BLOCK) * BLOCK
        data = os.pread(file.fileno(), end - start, start)
        add(parse_sample(data, found_langs, whole=langs is None), start, data)
        sample.clear()

    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in _files_of(tar, size, layouts):
                    if member.name.endswith(".jsonl"):
                        offset = member.offset_data
                        for line in os.pread(file.fileno(), member.size, offset).splitlines(keepends=True):
                            if line.strip():
                                add(parse_line(line, unique_fields=True), offset, line)
                            offset += len(line)
                    else:
                        if sample and sample_key(sample[-1].name) != sample_key(member.name):
                            add_sample()
                        sample.append(member)
                _check_end(file.fileno(), tar.offset)
                add_sample()
        except (ValueError, tarfile.TarError, EOFError) as error:
            raise UserError(f"{path}: record {len(ranges)}: {error}") from None
    if not ranges or found_langs is None or survey is None:
        raise UserError(f"{path} holds no record (an empty or cut-off tar); write it again")
    idx = np.array(ranges, dtype=IDX_DTYPE)
    shard = Shard(path.name, len(ranges), size, sha256_file(path), zlib.crc32(idx.tobytes()))
    return ScannedShard(shard, layouts.pop(), found_langs, idx, survey)


def _check_end(fd: int, offset: int) -> None:
    """Raises ValueError if no tar ends at `offset`. tarfile takes a damaged header or a cut-off file for an end."""
    rest = os.pread(fd, 1 << 20, offset)
    if len(rest) < BLOCK or rest.strip(b"\0"):
        raise ValueError("the tar is cut off or damaged here: no end-of-archive mark follows the record before")


def _files_of(tar: tarfile.TarFile, size: int, layouts: set[str]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar except directories, and add their layout to `layouts`. size: bytes of the tar. Raises
    ValueError for a member that is no file, is cut off, or is of another layout than those before."""
    for member in tar:
        if member.offset_data + member.size > size:
            raise ValueError("the file ends inside a member")
        if not member.isfile() and not member.isdir():
            raise ValueError(f"member {member.name} is a link or a device; archive the file itself: tar --dereference")
        if not member.isfile():
            continue
        layouts.add("lines" if member.name.endswith(".jsonl") else "samples")
        if len(layouts) == 2:
            raise ValueError(f"member {member.name}: a source cannot have both .jsonl members and others")
        yield member


def entries(record: Record, offset: int, data: bytes, follows: bool) -> list[tuple[int, int, int]]:
    """A record's entries in the .idx: one, or for a long monolingual record one for each part."""
    if len(data) >= FOLLOWS:
        raise ValueError(f"record {record.key!r} has {len(data):,} bytes, more than 2 GiB; split its text")
    bytes_of = [len(text.encode()) for text in record.texts]  # raises for a lone surrogate, which no tokenizer takes
    mono, crc = len(record.langs) == 1, zlib.crc32(data)
    first = (offset, len(data) + FOLLOWS * (mono and follows), crc)
    parts = -(-bytes_of[0] // PART_BYTES) if mono else 1
    return [first, *[(offset, len(data) + FOLLOWS, crc)] * (parts - 1)]
