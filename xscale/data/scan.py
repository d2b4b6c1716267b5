"""One pass over a tar: where each record is, and whether all of them can be read."""

import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xscale.data.shards import BLOCK, IDX_DTYPE, Shard, parse_line, parse_sample, sample_key
from xscale.errors import UserError
from xscale.files import sha256_file
from xscale.record import Record


@dataclass(frozen=True)
class ScannedShard:
    """What one pass over a tar finds."""

    shard: Shard
    layout: str
    langs: tuple[str, ...]
    idx: np.ndarray


def scan_shard(path: Path, langs: tuple[str, ...] | None = None) -> ScannedShard:
    """One pass over a tar: the byte range and checksum of every record. Raises UserError naming shard and record."""
    ranges: list[tuple[int, int, int]] = []
    layouts: set[str] = set()
    found_langs: tuple[str, ...] | None = langs
    sample: list[tarfile.TarInfo] = []

    def check(record: Record) -> None:
        nonlocal found_langs
        if found_langs is None:
            found_langs = record.langs
        elif record.langs != found_langs:
            raise ValueError(f"languages {record.langs} in a source of {found_langs}; keep one directory for each")

    def add_sample() -> None:
        if not sample:
            return
        last = sample[-1]
        start, end = sample[0].offset, last.offset_data + -(-last.size // BLOCK) * BLOCK
        data = os.pread(file.fileno(), end - start, start)
        check(parse_sample(data, found_langs))
        ranges.append((start, end - start, zlib.crc32(data)))
        sample.clear()

    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.offset_data + member.size > size:
                        raise ValueError("the file ends inside a member")
                    if not member.isfile():
                        continue
                    layouts.add("lines" if member.name.endswith(".jsonl") else "samples")
                    if len(layouts) == 2:
                        raise ValueError(f"member {member.name}: .jsonl members and others cannot share a source")
                    if member.name.endswith(".jsonl"):
                        offset = member.offset_data
                        for line in os.pread(file.fileno(), member.size, offset).splitlines(keepends=True):
                            if line.strip():
                                check(parse_line(line))
                                ranges.append((offset, len(line), zlib.crc32(line)))
                            offset += len(line)
                    else:
                        if sample and sample_key(sample[-1].name) != sample_key(member.name):
                            add_sample()
                        sample.append(member)
                # tarfile takes a damaged header, or the file's end, for the end of the archive.
                rest = os.pread(file.fileno(), 1 << 20, tar.offset)
                if len(rest) < BLOCK or rest.strip(b"\0"):
                    raise ValueError("cut off or damaged after the record before: no end-of-archive mark follows it")
                add_sample()
        except (ValueError, tarfile.TarError, EOFError) as error:
            raise UserError(f"{path}: record {len(ranges)}: {error}") from None
    if not ranges or found_langs is None:
        raise UserError(f"{path} holds no record (an empty or cut-off tar)")
    shard = Shard(path.name, len(ranges), size, sha256_file(path))
    return ScannedShard(shard, layouts.pop(), found_langs, np.array(ranges, dtype=IDX_DTYPE))
