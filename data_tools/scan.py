"""Scans a tar of records: one pass finds every record and checks that it can be read."""

import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from xscale.data.link_projection import links_move, project_links
from xscale.data.shards import BLOCK, FOLLOWS, IDX_DTYPE, PART_BYTES, Shard, check_languages
from xscale.errors import UserError
from xscale.files import sha256_file
from xscale.record import Record, is_sample_member, parse_json, parse_sample, sample_key


@dataclass(frozen=True)
class ScannedShard:
    shard: Shard
    layout: str
    langs: tuple[str, ...]
    idx: np.ndarray
    moved: list[str]
    """Keys of pairs whose links would join other words if all white space divided words (link_projection.py)."""

    @property
    def documents(self) -> int:
        return int((self.idx["length"] < FOLLOWS).sum())


def scan_shard(
    path: Path, langs: tuple[str, ...] | None = None, links_count: dict[str, str] | None = None
) -> ScannedShard:
    """Return the byte range and checksum of every record of a tar, with its languages. Raises UserError, which names
    the file and the record.

    langs: the languages of samples that do not name theirs. links_count: {layout: the segmentation (a key of
    SEGMENTATIONS) whose words the links of this layout refer to}, to check that the links fit the texts.
    """
    ranges: list[tuple[int, int, int]] = []
    moved: list[str] = []
    found_langs, layout, doc = langs, "", None
    try:
        for layout, record, offset, data in _read_records(path, langs):
            if found_langs is None:
                check_languages(record.langs)
                found_langs = record.langs
            elif record.langs != found_langs:
                raise ValueError(
                    f"languages {record.langs} after records with {found_langs}; give each its own directory"
                )
            if links_count and record.links is not None and len(record.langs) == 2:
                by_words = links_count[layout] == "unicode"
                project_links(record.links, record.texts, by_words=by_words)
                if not by_words and links_move(record.links, record.texts):
                    moved.append(record.key)
            ranges += idx_entries(record, offset, data, follows=record.doc is not None and record.doc == doc)
            doc = record.doc
    except (ValueError, tarfile.TarError, EOFError) as error:
        raise UserError(f"{path}: record {len(ranges)}: {error}") from None
    if not ranges or found_langs is None:
        raise UserError(f"{path} holds no record, because the tar is empty or cut off; write it again")
    idx = np.array(ranges, dtype=IDX_DTYPE)
    shard = Shard(path.name, len(ranges), path.stat().st_size, sha256_file(path), zlib.crc32(idx.tobytes()))
    return ScannedShard(shard, layout, found_langs, idx, moved)


def _read_records(path: Path, langs: tuple[str, ...] | None) -> Iterator[tuple[str, Record, int, bytes]]:
    """Yield (layout, record, its offset, its bytes) for each record of a tar. langs: see parse_sample; None: the
    languages of the first sample, and samples in other languages are refused."""
    whole = langs is None
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        fd = file.fileno()
        for (layout, _), members in groupby(_file_members(tar, fd), lambda m: (_layout_of(m), sample_key(m.name))):
            if layout == "lines":
                for member in members:
                    offset = member.offset_data
                    for line in os.pread(fd, member.size, offset).splitlines(keepends=True):
                        if line.strip():
                            yield layout, Record.from_dict(parse_json(line)), offset, line
                        offset += len(line)
                continue
            sample = list(members)
            start, end = sample[0].offset, sample[-1].offset_data + -(-sample[-1].size // BLOCK) * BLOCK
            data = os.pread(fd, end - start, start)
            record = parse_sample(data, langs, whole)
            langs = langs or record.langs
            yield layout, record, start, data


def _layout_of(member: tarfile.TarInfo) -> str:
    return "lines" if member.name.endswith(".jsonl") else "samples"


def _file_members(tar: tarfile.TarFile, fd: int) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a tar. Raises ValueError for a link or device, a file that is cut off, a layout that differs
    from earlier files, and a tar without an end mark (which tarfile accepts)."""
    layouts, size = set[str](), os.fstat(fd).st_size
    for member in tar:
        if member.offset_data + member.size > size:
            raise ValueError("the file ends inside a member")
        if not member.isfile() and not member.isdir():
            raise ValueError(f"member {member.name} is a link or a device; archive the file itself: tar --dereference")
        if not member.isfile() or not is_sample_member(member.name):
            continue
        layouts.add(_layout_of(member))
        if len(layouts) == 2:
            raise ValueError(f"member {member.name}: a source cannot have both .jsonl members and others")
        yield member
    rest = os.pread(fd, 1 << 20, tar.offset)
    if len(rest) < BLOCK or rest.strip(b"\0"):
        raise ValueError("the tar is cut off or damaged here: no end-of-archive mark follows the record before")


def idx_entries(record: Record, offset: int, data: bytes, follows: bool) -> list[tuple[int, int, int]]:
    """Return a record's entries (offset, length, CRC) in the .idx file: one, or for a long monolingual record one for
    each PART_BYTES of its text. follows: the record continues the document of the record before."""
    if len(data) >= FOLLOWS:
        raise ValueError(f"record {record.key!r} has {len(data):,} bytes, more than 2 GiB; split its text")
    bytes_of = [len(text.encode()) for text in record.texts]  # raises for a lone surrogate, which no tokenizer takes
    mono, crc = len(record.langs) == 1, zlib.crc32(data)
    first = (offset, len(data) + FOLLOWS * (mono and follows), crc)
    parts = -(-bytes_of[0] // PART_BYTES) if mono else 1
    return [first, *[(offset, len(data) + FOLLOWS, crc)] * (parts - 1)]
