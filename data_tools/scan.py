"""Scans a tar of records. One pass finds every record, and checks that it can be read."""

import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xscale.data.link_projection import project_links
from xscale.data.shards import BLOCK, FOLLOWS, IDX_DTYPE, PART_BYTES, check_languages
from xscale.errors import UserError
from xscale.files import sha256_file
from xscale.record import Record, Shard, is_sample_member, parse_json, parse_sample, sample_key


class StoredRecord(NamedTuple):
    record: Record
    layout: str
    """How the tar stores records; one of shards.LAYOUTS."""
    offset: int
    """The index of the record's first byte in the tar."""
    data: bytes
    """The record's bytes in the tar."""


@dataclass(frozen=True)
class ScannedTar:
    """The facts that index.json records about one tar."""

    shard: Shard
    layout: str
    langs: tuple[str, ...]
    documents: int


def scan_tar(
    path: Path, langs: tuple[str, ...] | None = None, segmentations: Mapping[str, dict[str, str]] | None = None
) -> tuple[ScannedTar, np.ndarray]:
    """Return the facts for index.json, and the byte range and checksum of each record (IDX_DTYPE). Raises UserError,
    which names the file and the record.

    langs: the languages of samples that do not name theirs. segmentations: {layout: how its texts are split into the
    words that links count}, to check that the links fit the texts; None: the links are not checked.
    """
    entries = list[tuple[int, int, int]]()
    layout = ""
    doc = None
    try:
        for stored in read_records(path, langs):
            record = stored.record
            layout = stored.layout
            if langs is None:
                check_languages(record.langs)
                langs = record.langs
            elif record.langs != langs:
                raise ValueError(f"languages {record.langs} after records with {langs}; give each its own directory")
            if segmentations and record.links is not None and len(langs) == 2:
                project_links(record.links, record.texts, by_words=segmentations[layout]["name"] == "unicode")
            entries += idx_entries(stored, follows=record.doc is not None and record.doc == doc)
            doc = record.doc
    except (ValueError, tarfile.TarError, EOFError) as error:
        raise UserError(f"{path}: record {len(entries)}: {error}") from None
    if langs is None or not entries:
        raise UserError(f"{path} holds no record, because the tar is empty or cut off; write it again")
    idx = np.array(entries, dtype=IDX_DTYPE)
    shard = Shard(path.name, len(idx), path.stat().st_size, sha256_file(path), zlib.crc32(idx.tobytes()))
    documents = int(np.count_nonzero(idx["length"] < FOLLOWS))
    return ScannedTar(shard, layout, langs, documents), idx


def read_records(path: Path, langs: tuple[str, ...] | None) -> Iterator[StoredRecord]:
    """Yield the records of a tar. langs: see parse_sample; None: all samples must have the languages of the first
    sample. Raises ValueError."""
    whole = langs is None
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        fd = file.fileno()
        members_of_samples = groupby(
            record_members(tar, fd), lambda member: (layout_name(member), sample_key(member.name))
        )
        for (layout, _), members in members_of_samples:
            if layout == "lines":
                for member in members:
                    offset = member.offset_data
                    for line in os.pread(fd, member.size, offset).splitlines(keepends=True):
                        if line.strip():
                            yield StoredRecord(Record.from_dict(parse_json(line)), layout, offset, line)
                        offset += len(line)
                continue
            sample = list(members)
            start = sample[0].offset
            last_blocks = -(-sample[-1].size // BLOCK)
            data = os.pread(fd, sample[-1].offset_data + last_blocks * BLOCK - start, start)
            record = parse_sample(data, langs, whole)
            langs = langs or record.langs
            yield StoredRecord(record, layout, start, data)


def layout_name(member: tarfile.TarInfo) -> str:
    return "lines" if member.name.endswith(".jsonl") else "samples"


def record_members(tar: tarfile.TarFile, fd: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members that hold records. Raises ValueError for a link or a device, for a member that is cut off or
    has another layout than the first, and for a tar without an end mark (which tarfile accepts)."""
    size = os.fstat(fd).st_size
    layouts = set[str]()
    for member in tar:
        if member.offset_data + member.size > size:
            raise ValueError("the file ends inside a member; copy the tar again")
        if member.isdir():
            continue
        if not member.isfile():
            raise ValueError(f"member {member.name} is a link or a device; archive the file itself: tar --dereference")
        if not is_sample_member(member.name):
            continue
        layouts.add(layout_name(member))
        if len(layouts) == 2:
            raise ValueError(f"member {member.name}: a source has either .jsonl members or others; separate them")
        yield member
    rest = os.pread(fd, 1 << 20, tar.offset)
    if len(rest) < BLOCK or rest.strip(b"\0"):
        raise ValueError("the tar is cut off or damaged here: no end-of-archive mark follows; copy the tar again")


def idx_entries(stored: StoredRecord, follows: bool) -> list[tuple[int, int, int]]:
    """Return a record's entries (offset, length, CRC) in the .idx file: one entry, or for a long monolingual record an
    entry for each PART_BYTES of its text. follows: True if the record continues the document of the record before
    it."""
    record = stored.record
    length = len(stored.data)
    if length >= FOLLOWS:
        raise ValueError(f"record {record.key!r} has {length:,} bytes, more than 2 GiB; split its text")
    # Raises an error for a lone surrogate, which no tokenizer accepts.
    text_bytes = [len(text.encode()) for text in record.texts]
    crc = zlib.crc32(stored.data)
    if len(record.texts) == 2:
        return [(stored.offset, length, crc)]
    first = (stored.offset, length + FOLLOWS * follows, crc)
    parts = -(-text_bytes[0] // PART_BYTES)
    return [first] + [(stored.offset, length + FOLLOWS, crc)] * (parts - 1)
