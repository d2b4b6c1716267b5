"""Write index.json of a folder of WebDataset tars, including tars that other tools wrote.

    xscale data index DIR [--langs en de]

Tars may have `.jsonl` members (one record per line), or one sample per record: KEY.json, KEY.en.txt + KEY.de.txt (+
KEY.links.txt), or KEY.txt with --langs. The numbers in a sample's word alignments count words between white space.
In .jsonl members, they count words and symbols (xscale/data/words.py). The key `segmentation` of an existing index.json
can say otherwise: {"name": "whitespace"} stands for words between white space.
"""

import argparse
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from xscale import files
from xscale.data.link_projection import project_links_and_count_dropped
from xscale.data.shards import (
    ENTRIES,
    FOLLOWS,
    FORMAT_VERSION,
    IDX_DTYPE,
    PIECE_BYTES,
    SEGMENTATIONS,
    check_one_or_two_languages,
    read_index,
    source_fingerprint,
)
from xscale.errors import UserError
from xscale.record import Record, Shard, is_sample_member, parse_json, parse_tar_sample, sample_key

from .command import run_tool_and_exit
from .engine import worker_pool

WORKER_TARS = 8
"""The number of tars that a worker process scans at a time."""


class StoredRecord(NamedTuple):
    record: Record
    layout: str
    """How the tar stores records; "lines" or "samples"."""
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
    linked: int
    """The number of records with word links."""


def scan_tar(
    path: Path, langs: tuple[str, ...] | None = None, segmentations: Mapping[str, dict[str, str]] | None = None
) -> tuple[ScannedTar, np.ndarray]:
    """Return the facts for index.json, and the byte range and checksum of each record (IDX_DTYPE). Raises UserError,
    which names the file and the record.

    langs: the languages of samples that do not name theirs. segmentations: {layout: how its texts are split into the
    words that links count}, to check that the links fit the texts; None: the links are not checked.
    """
    if path.is_fifo():
        raise UserError(f"{path} is a named pipe instead of a file. Remove {path}, and copy the folder again")
    entries = list[tuple[int, int, int]]()
    layout = ""
    doc = None
    linked = 0
    try:
        for stored in read_records(path, langs):
            record = stored.record
            layout = stored.layout
            if langs is None:
                check_one_or_two_languages(record.langs)
                langs = record.langs
            elif record.langs != langs:
                raise ValueError(
                    f"the record has text in {'-'.join(record.langs)}, but all records of the folder must have text in "
                    f"{'-'.join(langs)}. Use one folder per language or language pair, or correct --langs"
                )
            if segmentations and record.links is not None and len(langs) == 2:
                project_links_and_count_dropped(
                    record.links, record.texts, links_number_xscale_words=segmentations[layout]["name"] == "unicode"
                )
            entries += make_idx_entries(stored, continues_document=record.doc is not None and record.doc == doc)
            doc = record.doc
            linked += record.links is not None
    except (ValueError, tarfile.TarError, EOFError) as error:
        raise UserError(f"{path}: record {len(entries)}: {error}") from None
    if langs is None or not entries:
        raise UserError(
            f"{path} has no record. The tar may be empty or cut off, or may lack members with text, such as "
            "NAME.jsonl or KEY.json. Write the tar again"
        )
    idx = np.array(entries, dtype=IDX_DTYPE)
    shard = Shard(path.name, len(idx), path.stat().st_size, files.sha256_file(path), zlib.crc32(idx.tobytes()))
    documents = int(np.count_nonzero(idx["length"] < FOLLOWS))
    return ScannedTar(shard, layout, langs, documents, linked), idx


def read_records(path: Path, langs: tuple[str, ...] | None) -> Iterator[StoredRecord]:
    """Yield the records of a tar. langs: see parse_tar_sample; None: all samples must have the languages of the first
    sample. Raises ValueError."""
    refuse_other_langs = langs is None
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        fd = file.fileno()
        members_of_samples = groupby(
            read_record_members(tar, fd), lambda member: (layout_of_member(member), sample_key(member.name))
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
            last_blocks = -(-sample[-1].size // tarfile.BLOCKSIZE)
            data = os.pread(fd, sample[-1].offset_data + last_blocks * tarfile.BLOCKSIZE - start, start)
            record = parse_tar_sample(data, langs, refuse_other_langs)
            langs = langs or record.langs
            yield StoredRecord(record, layout, start, data)


def layout_of_member(member: tarfile.TarInfo) -> Literal["lines", "samples"]:
    """Return the layout of a shard with this member: "lines" or "samples"."""
    return "lines" if member.name.endswith(".jsonl") else "samples"


def read_record_members(tar: tarfile.TarFile, fd: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members that hold records. Raises ValueError for a link or a device, for a member that is cut off or
    has another layout than the first, and for a tar without an end mark (which tarfile accepts)."""
    size = os.fstat(fd).st_size
    layouts = set[str]()
    for member in tar:
        if member.offset_data + member.size > size:
            raise ValueError("the file ends inside a member of the tar. Copy the tar again")
        if member.isdir():
            continue
        if not member.isfile():
            raise ValueError(
                f"the tar member {member.name} is a link or a device. Write the tar again without links and devices. "
                "`tar --dereference --hard-dereference` stores the linked files in place of links"
            )
        if not is_sample_member(member.name):
            continue
        layouts.add(layout_of_member(member))
        if len(layouts) == 2:
            raise ValueError(
                f"the tar member {member.name}: a tar cannot have both .jsonl members and other members. Write "
                "two tars, one with the .jsonl members and one with the others, into two different folders"
            )
        yield member
    rest = os.pread(fd, 1 << 20, tar.offset)
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise ValueError(
            "the end-of-archive mark is missing after the last record, so the tar is cut off or damaged. Copy the tar "
            "again"
        )


def make_idx_entries(stored: StoredRecord, continues_document: bool) -> list[tuple[int, int, int]]:
    """Return a record's entries (offset, length, CRC) in the .idx file: one entry, or for a long monolingual record an
    entry for each PIECE_BYTES of its text. continues_document: True if the record continues the document of
    the record before it."""
    record = stored.record
    length = len(stored.data)
    if length >= FOLLOWS:
        raise ValueError(f"record {record.key!r} has {length:,} bytes, more than 2 GiB. Split the text of the record")
    # Raises an error for a lone surrogate, which no tokenizer accepts.
    text_bytes = [len(text.encode()) for text in record.texts]
    crc = zlib.crc32(stored.data)
    if len(record.texts) == 2:
        return [(stored.offset, length, crc)]
    first = (stored.offset, length + FOLLOWS * continues_document, crc)
    pieces = -(-text_bytes[0] // PIECE_BYTES)
    return [first] + [(stored.offset, length + FOLLOWS, crc)] * (pieces - 1)


def build_index(
    directory: Path, langs: tuple[str, ...] | None, made_by: dict[str, Any], check_links: bool = False
) -> dict[str, Any]:
    """Scan all tars of a directory, and write an .idx file beside each tar, the file that joins all .idx files, and
    index.json. Return the content of index.json. Raises UserError.

    langs: the languages of samples that do not name theirs. check_links: refuse links that do not fit their texts.
    """
    paths = sorted(directory.glob("*.tar"))
    if not paths:
        raise UserError(f"{directory} has no .tar files. Choose a folder of tars")
    segmentations = read_link_segmentation_by_layout(directory) if check_links else None
    index_one = partial(write_idx_of_tar, langs=langs, segmentations=segmentations)
    index = make_index_content(directory, index_tars_in_processes(index_one, paths), made_by)
    write_index_and_joined_idx(directory, index)
    return index


def index_tars_in_processes(index_one: Callable[[Path], ScannedTar], paths: list[Path]) -> list[ScannedTar]:
    """Return list(map(index_one, paths)). If there are many tars, a process for each core computes a part."""
    if len(paths) < 2 * WORKER_TARS:
        return list(map(index_one, paths))
    workers = min(len(os.sched_getaffinity(0)), len(paths) // WORKER_TARS)
    with worker_pool(workers, f"that read tars in {paths[0].parent}", "Start the command again") as pool:
        return list(pool.map(index_one, paths, chunksize=WORKER_TARS))


def write_idx_of_tar(
    path: Path, langs: tuple[str, ...] | None = None, segmentations: Mapping[str, dict[str, str]] | None = None
) -> ScannedTar:
    """Write the .idx file of a tar. langs, segmentations: see scan_tar. Raises UserError."""
    tar, idx = scan_tar(path, langs, segmentations)
    with files.atomic_write(path.with_suffix(".idx")) as partial_path:
        partial_path.write_bytes(idx.tobytes())  # numpy's tofile hides the system's error
    return tar


def read_link_segmentation_by_layout(directory: Path) -> dict[str, dict[str, str]]:
    """Return {layout: the kind of words that its links number}. An existing index.json names this kind. Without an
    index.json, links in .jsonl members number the words of data/words.py, and links of samples number the words between
    white space."""
    try:
        existing = read_index(directory)[0].get("segmentation", SEGMENTATIONS["whitespace"])
    except UserError:
        return {"lines": SEGMENTATIONS["unicode"], "samples": SEGMENTATIONS["whitespace"]}
    return {"lines": existing, "samples": existing}


def make_index_content(directory: Path, tars: Sequence[ScannedTar], made_by: dict[str, Any]) -> dict[str, Any]:
    """Return the content of index.json. tars: all tars of the directory, in the order of their names. Raises UserError
    if they differ in their languages or their layout."""
    first = tars[0]
    records = documents = linked = size = 0
    shards = list[dict[str, Any]]()
    for tar in tars:
        if (tar.layout, tar.langs) != (first.layout, first.langs):
            raise UserError(
                f"the tars in {directory} must have the same languages and the same layout. {tar.shard.name} has "
                f"{'-'.join(tar.langs)} in the layout {tar.layout}, but {first.shard.name} has {'-'.join(first.langs)} "
                f"in the layout {first.layout}. (In the layout lines, the members are files NAME.jsonl; in the layout "
                "samples, they are other files.) Move one of the two tars to another folder"
            )
        records += tar.shard.records
        documents += tar.documents
        linked += tar.linked
        size += tar.shard.bytes
        shards.append(tar.shard._asdict())
    is_pair = len(first.langs) == 2
    return {
        "format": "xscale shards",
        "version": FORMAT_VERSION,
        "kind": "pair" if is_pair else "mono",
        "langs": list(first.langs),
        "languages": dict.fromkeys(first.langs, records),
        "layout": first.layout,
        "segmentation": read_link_segmentation_by_layout(directory)[first.layout],
        "records": records,
        **({"linked": linked} if is_pair else {"documents": documents}),
        "bytes": size,
        "made_by": made_by,
        "shards": shards,
    }


def write_index_and_joined_idx(directory: Path, index: dict[str, Any]) -> None:
    """Write the file that joins all shards' .idx files, and then index.json."""
    with files.atomic_write(directory / ENTRIES) as partial_path, partial_path.open("wb") as all_entries:
        for shard in index["shards"]:
            all_entries.write((directory / shard["name"]).with_suffix(".idx").read_bytes())
    files.write_text(directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False) + "\n")


def summary_line(directory: Path, index: dict[str, Any]) -> str:
    """Return a line about the records, shards and left-out lines of a directory."""
    documents = f" of {index['documents']:,} documents" if "documents" in index else ""
    line = (
        f"{directory}: {index['records']:,} {index['kind']} records ({' '.join(index['langs'])}){documents}, shards: "
        f"{len(index['shards'])}, {index['bytes'] / 1e6:,.1f} MB, fingerprint {source_fingerprint(index)}"
    )
    counts = dict(index["made_by"].get("counts", {}))
    dropped = counts.pop("dropped_links", 0)
    left_out = [f"{count:,} {reason}" for reason, count in counts.items() if reason not in ("lines", "records")]
    if left_out:
        line += f"; texts of the input that were left out: {', '.join(left_out)}"
    if dropped:
        line += (
            "; links of word alignments that were left out, such as links between a word and a punctuation mark: "
            f"{dropped:,}"
        )
    return line


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data index", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="folder of tars; index.json is written to the same folder")
    parser.add_argument(
        "--langs",
        nargs="+",
        action="extend",
        help="one or two languages of the text, such as en de, if the tar members do not name the languages",
    )
    args = parser.parse_args(argv)
    langs = tuple(args.langs) if args.langs else None
    try:
        check_one_or_two_languages(langs or ("en",))
    except ValueError as error:
        raise UserError(f"--langs: {error}") from None
    index = build_index(args.directory, langs, {"tool": "data_tools.index"}, check_links=True)
    print(summary_line(args.directory, index))


if __name__ == "__main__":
    run_tool_and_exit(main)
