"""Shards and their index. With the index, one `pread` reads any record of a WebDataset tar, and a checksum verifies it.

A source directory has NAME-%06d.tar, one .idx beside each, and index.json. An .idx is an array of IDX_DTYPE with one
entry a record: the byte range of the record in the tar, and its CRC-32. In the layout "lines", the range is one line of
JSON inside a `.jsonl` member. In the layout "samples" (tars of other programs), the range is one sample of WebDataset:
the consecutive members that share a key. xscale reads the file `entries` in place of the .idx files. It has the entries
of all shards in the order of index.json, so that a reader opens a single file besides the tars.

The entries of a document's records stand one after the other, and all but the first have the bit FOLLOWS. A
monolingual text of more than PIECE_BYTES has several entries with the same byte range. Each of them is read as a record
with one piece of the text, and these records form one document. So a monolingual record is short in any tar.
"""

import copy
import hashlib
import json
import os
import resource
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from xscale.data import words
from xscale.data.link_projection import project_links_and_count_dropped
from xscale.data.ragged import evenly_spaced_indices
from xscale.data.remote import Remote, cache_folder, fetch_remote_index
from xscale.data.text import stripped_piece_of_text
from xscale.errors import UserError
from xscale.files import PARTIAL, check_link_is_not_broken, describe_empty_or_placeholder, sha256_file
from xscale.record import Record, Shard, parse_json, parse_tar_sample

FORMAT_VERSION = 2
IDX_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4")])
ENTRY = struct.Struct("<QII")
ENTRIES = "entries"
"""Name of the file with the entries of all shards of a source."""
SEGMENTATIONS = {"unicode": {"name": "unicode", "version": words.VERSION}, "whitespace": {"name": "whitespace"}}
"""The kinds of words that the links of a source can number: words of data/words.py, or words between white space."""
FOLLOWS = 1 << 31
"""The bit of `length` in an entry that continues the document of the entry before it."""
PIECE_BYTES = 1024
"""A monolingual text of more than this many UTF-8 bytes is indexed in pieces of about this size."""
OPEN_FILES = 1 << 14
"""A process keeps at most this many files open, or half of the process's limit if that is less: those that were used
last. They are enough for the windows of dozens of sources (a window is the shards of a source that are read together,
see data/order.py). With more sources, most reads open a tar."""
SAMPLE = 100_000
"""The maximum number of records of a language that `sample_texts` reads."""
RUN = 64
"""If a language has more than SAMPLE records, runs of this many consecutive records are read."""
LIST_RECORDS = 1024
"""The number of texts of a list that `sample_texts` yields."""


class Source:
    """One directory of shards, with one kind of record and one language or one ordered pair of languages."""

    def __init__(self, directory: Path | str, remote: Remote | None = None):
        """remote: None for a local source. The directory of a source at a URL is its folder in the cache."""
        self.directory = Path(directory)
        self.remote = remote
        index, self.shards = read_index(self.directory)
        self.fingerprint = source_fingerprint(index)
        self.index = index | {"shards": []}
        """The content of index.json, with an empty list of shards to save memory."""
        self.layout: str = index["layout"]
        self.written_langs: tuple[str, ...] = tuple(index["langs"])
        """The names of the languages in index.json and in the records."""
        self.langs = self.written_langs
        """The names of the languages in the program (see rename_languages)."""
        self.segmentation: dict[str, str] = index.get("segmentation", SEGMENTATIONS["whitespace"])
        self.counts = np.array([shard.records for shard in self.shards], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        """Number within the source of each shard's first record."""
        self.records = int(self.counts.sum())
        self._owner = object()
        """See open_file_for_cache."""
        if remote:
            self._fetch_entries_file(remote)

    @property
    def kind(self) -> str:
        return "pair" if len(self.langs) == 2 else "mono"

    @property
    def langs_name(self) -> str:
        """The languages in the order of the texts, such as "en-de"."""
        return "-".join(self.langs)

    @property
    def sorted_langs_name(self) -> str:
        """The languages in alphabetical order, such as "de-en"."""
        return sorted_pair_name(self.langs)

    @cached_property
    def linked_pair_count(self) -> int:
        """The number of pairs that have word links. If index.json does not say, as of an earlier version, the first
        pair tells whether all have."""
        if "linked" in self.index:
            return self.index["linked"]
        return self.index["records"] if self.read(0, 0).links is not None else 0

    def rename_languages(self, new_name_of_written_lang: Mapping[str, str]) -> None:
        """Change the names of the source's languages, also in the records that are read.
        new_name_of_written_lang: name in index.json -> new name. Raises UserError if both languages of a pair get the
        same name."""
        langs = tuple(new_name_of_written_lang[lang] for lang in self.written_langs)
        if len(set(langs)) < len(langs):
            raise UserError(
                f"{self.directory}: {' and '.join(self.written_langs)} are two names of one language. Write the "
                "shards again, with two languages in --langs"
            )
        self.langs = langs

    def drop_all_but_first(self, records: int) -> None:
        """Remove all records of the source but the first `records`."""
        counts = np.clip(records - self.starts, 0, self.counts)
        self.counts = counts[counts > 0]
        self.shards = self.shards[: len(self.counts)]
        self.records = int(self.counts.sum())

    def with_evenly_spaced_shards(self, max_shards: int) -> "Source":
        """Return a copy with at most `max_shards` of the shards, evenly spaced. Its `records` is still the number of
        records of all shards."""
        chosen = evenly_spaced_indices(len(self.counts), max_shards)
        source = copy.copy(self)
        source.shards = [self.shards[shard] for shard in chosen]
        source.counts = self.counts[chosen]
        source.starts = self.starts[chosen]
        return source

    def check_link_segmentation(self) -> None:
        """Raise UserError if the links number the words of an unknown segmentation."""
        if self.segmentation not in SEGMENTATIONS.values():
            raise UserError(
                f"{self.directory}: the word alignments number the words of the segmentation {self.segmentation} "
                "(field `segmentation` of index.json). This version of xscale cannot divide texts in this way. Use the "
                "version that wrote the shards, or write the shards again from the text: `xscale data write_shards "
                "pairs ... --align` (or `--links FILE`)"
            )

    def renumber_links_by_xscale_words(self, record: Record) -> Record:
        """Return the record with links that number the words of data/words.py. Raises UserError if a link is not
        valid."""
        if record.links is None:
            return record
        self.check_link_segmentation()
        if self.segmentation != SEGMENTATIONS["whitespace"]:
            return record
        try:
            return record._replace(links=project_links_and_count_dropped(record.links, record.texts)[0])
        except ValueError as error:
            raise UserError(
                f"{self.directory}: record {record.key!r}: {error}. A link `i-j` joins word i of the first text "
                "and word j of the second, counted from 0; white space divides words. Correct the links, and "
                "write the shards again"
            ) from None

    def locate_records(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """Return the shard of each record, and the record's number in the shard. numbers: the records' numbers in the
        source."""
        ends = np.cumsum(self.counts)
        shards = np.searchsorted(ends, numbers, side="right")
        return list(zip(shards.tolist(), (numbers - (ends - self.counts)[shards]).tolist(), strict=True))

    def check_local_file(self, shard: Shard) -> None:
        """Raise UserError if the .tar of a local shard is missing or has a wrong size. So a run on an incomplete copy
        fails before step 1. A remote shard is checked when it is fetched."""
        if self.remote:
            return
        path = f"{self.directory}/{shard.name}"  # to make a Path takes longer than the check
        problem = "is missing"
        with suppress(FileNotFoundError, NotADirectoryError):
            size = os.stat(path).st_size
            if size == shard.bytes:
                return
            if size and (pointer := describe_empty_or_placeholder(Path(path))):
                raise UserError(pointer)
            problem = f"has {size:,} bytes"
        raise UserError(
            f"{path} {problem}, and index.json says {shard.bytes:,} bytes. Copy the file again, or run `xscale data "
            f"index {self.directory}` if the shards were changed on purpose"
        )

    def byte_lengths(self, shard: int, records: np.ndarray | slice) -> np.ndarray:
        """Return the length in bytes of records of one shard [n_records], see byte_lengths_and_continuations."""
        return self.byte_lengths_and_continuations(shard, records)[0]

    def byte_lengths_and_continuations(self, shard: int, records: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the length in bytes of records of one shard [n_records], and True for each record that continues the
        document of the record before it [n_records]. The length of a piece of a long text is the mean of its pieces.
        Only the shard's entries are read. Raises UserError if they are damaged."""
        idx = self.index_entries(shard)
        lengths = (idx["length"][records] & (FOLLOWS - 1)).astype(np.int64)
        if self.kind == "mono" and (lengths > PIECE_BYTES).any():
            offsets = np.ascontiguousarray(idx["offset"])
            chosen = idx["offset"][records]
            # The pieces of a long text have entries with the same offset, and each entry has the length of the text.
            pieces = np.searchsorted(offsets, chosen, side="right") - np.searchsorted(offsets, chosen)
            lengths //= pieces
        return lengths, idx["length"][records] >= FOLLOWS

    def index_entries(self, shard: int) -> np.ndarray:
        """Return the entry of each record of a shard [n_records]. Raises UserError if the entries are damaged."""
        return np.frombuffer(self._verified_entry_bytes(shard, 0, int(self.counts[shard])), dtype=IDX_DTYPE)

    def _verified_entry_bytes(self, shard: int, first: int, end: int) -> bytes:
        """Return the bytes of the entries of records `first` to `end` - 1 of a shard. Raises UserError if they have
        another checksum than in the index.json that this process has read."""
        start = int(self.starts[shard])
        problem = "is missing"
        with suppress(FileNotFoundError):
            file = self._open_file(ENTRIES)
            if file.entries_have_checksum(shard, start, self.shards[shard]):
                return file.pread((end - first) * ENTRY.size, (start + first) * ENTRY.size)
            problem = "does not have the checksums that index.json gave at the start of the run"
        remedy = f"Copy the file again, or run `xscale data index {self.directory}`"
        if self.remote:
            remedy = f"Remove {self.directory}; the next start downloads the shards again"
        raise UserError(
            f"{self.directory}/{ENTRIES} {problem}. {remedy}. If the shards were replaced during the run, restore the "
            "old shards instead"
        )

    def _fetch_entries_file(self, remote: Remote) -> None:
        """Fetch the file `entries`, unless it is in the cache. Raises OSError, and UserError if there is no such
        file."""

        def is_download_whole(path: Path) -> bool:
            file = OpenFile(str(path))
            return all(map(file.entries_have_checksum, range(len(self.shards)), self.starts.tolist(), self.shards))

        try:
            remote.fetch(ENTRIES, self.records * ENTRY.size, is_download_whole)
        except FileNotFoundError:
            raise UserError(
                f"{remote.url} has no file {ENTRIES!r}. Run `xscale data index` on the folder of shards, and copy "
                "all files of the folder to the server"
            ) from None

    def continues_document(self, shard: int, record: int) -> bool:
        """Return whether the record continues the document of the record before it. Raises UserError if the shard's
        entries are damaged."""
        return bool(self._offset_flagged_length_crc_of_record(shard, record)[1] & FOLLOWS)

    def fetch_shard(self, shard: int, damaged_inode: int = 0) -> None:
        """Fetch a shard, unless the source is local or the shard is in the cache. damaged_inode: see Remote.fetch.
        Raises OSError."""
        if self.remote:
            about = self.shards[shard]
            self.remote.fetch(about.name, about.bytes, lambda path: sha256_file(path) == about.sha256, damaged_inode)

    def read(self, shard: int, record: int, readahead: bool = False) -> Record:
        """Return record number `record` of shard number `shard`. readahead: if the shard is opened, request the whole
        file from the file system, because all its records are read soon. Raises UserError if the record or the shard's
        entries are damaged or contradict index.json; IndexError if there is no such record; OSError if the shard cannot
        be read or fetched."""
        data = self._read_intact_bytes(shard, record, readahead)
        whole = self._parse_and_rename_languages(data, shard, record)
        if len(data) <= PIECE_BYTES or len(whole.texts) == 2:
            return whole
        # The entries of all pieces of a long text have the same byte range, so `whole` has the text of all pieces.
        return self._cut_record_to_its_piece_of_text(whole, shard, record, max_pieces=len(data) // PIECE_BYTES)

    def _read_intact_bytes(self, shard: int, record: int, readahead: bool) -> bytes:
        """Return the bytes of a record, which have the checksum of its entry. The arguments and exceptions are those of
        `read`."""
        offset, length, crc = self._offset_flagged_length_crc_of_record(shard, record)
        length &= FOLLOWS - 1  # without the bit FOLLOWS
        about = self.shards[shard]
        # A record beyond the end of the shard is damaged without a read. Otherwise a second read may succeed.
        attempts = 0 if offset + length > about.bytes else 2
        damaged_inode = 0
        for _ in range(attempts):
            self.fetch_shard(shard, damaged_inode)
            file = self._open_file(about.name, readahead)
            data = file.pread(length, offset)
            if data and zlib.crc32(data) == crc:  # an entry of zeros has the checksum of no bytes
                return data
            if self.remote:
                # For the second read, fetch_shard replaces the damaged file, and the new owner makes _open_file open
                # the new one.
                damaged_inode = os.fstat(file.fd).st_ino
                self._owner = object()
        raise UserError(
            f"{self.directory}/{about.name}: record {record} (bytes {offset} to {offset + length}) is damaged: its "
            f"checksum differs from the index. Copy the shard again; `xscale data inspect {self.directory} --verify` "
            "names every damaged shard"
        )

    def _parse_and_rename_languages(self, data: bytes, shard: int, record: int) -> Record:
        """Return the record that these bytes are, with the program's names of languages. Raises UserError if they are
        no record, or a record in other languages."""
        try:
            if self.layout == "lines":
                parsed = Record.from_dict(parse_json(data, refuse_repeated_fields=False))
            else:
                parsed = parse_tar_sample(data, self.written_langs)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, tarfile.TarError) as error:
            raise UserError(
                f"{self.directory}/{self.shards[shard].name}: record {record} cannot be read ({error}). The `layout` "
                f"in index.json, {self.layout!r}, may be wrong. Write the index again by `xscale data index "
                f"{self.directory}`"
            ) from None
        if parsed.langs != self.written_langs:
            raise UserError(
                f"{self.directory}: record {parsed.key!r} has the languages {', '.join(parsed.langs)}, but "
                f"index.json says {', '.join(self.written_langs)}. Write the index again by `xscale data index "
                f"{self.directory}`"
            )
        if self.langs != self.written_langs:
            return parsed._replace(langs=self.langs)
        return parsed

    def _cut_record_to_its_piece_of_text(self, whole: Record, shard: int, record: int, max_pieces: int) -> Record:
        """Return the record of one piece of a long text. whole: the record of the whole text. record: the number of the
        piece's entry in the shard. max_pieces: the maximum number of pieces."""
        # The entries of the text's pieces stand one after the other, at most `max_pieces` before and after this entry.
        first = max(record - max_pieces, 0)
        end = min(record + 1 + max_pieces, int(self.counts[shard]))
        near = np.frombuffer(self._verified_entry_bytes(shard, first, end), dtype=IDX_DTYPE)
        is_of_text = near["offset"] == near["offset"][record - first]
        number = int(is_of_text[: record - first].sum())  # of the piece, from 0 on
        pieces = int(is_of_text.sum())
        if pieces == 1:  # the text is short; the rest of the record has made it long
            return whole
        text = stripped_piece_of_text(whole.texts[0], number, pieces)
        return whole._replace(key=f"{whole.key}+{number}", texts=(text,))

    def _offset_flagged_length_crc_of_record(self, shard: int, record: int) -> tuple[int, int, int]:
        """Return the offset, the length with the bit FOLLOWS, and the CRC-32 of a record. Raises IndexError if there is
        no such record, and UserError if the shard's entries are damaged."""
        if not 0 <= record < self.counts[shard]:
            raise IndexError(record)
        return ENTRY.unpack(self._verified_entry_bytes(shard, record, record + 1))

    def _open_file(self, name: str, readahead: bool = False) -> "OpenFile":
        """Return a file of the directory, open for reading. readahead: see `read`."""
        return cached_file_opener()(self._owner, f"{self.directory}/{name}", readahead)


class OpenFile:
    """A file of a source that is open for reading."""

    fd = -1
    """The file descriptor; -1 if the file could not be opened."""

    def __init__(self, path: str):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not wait
        self.changed = 0
        """The file's change time when its entries were last verified, in nanoseconds."""
        self.intact: dict[int, bool] = {}
        """Number of a shard -> the result of entries_have_checksum."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be None when the interpreter ends
        if self.fd >= 0:
            close(self.fd)

    def pread(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self.fd, size, offset)
        except OSError as error:
            error.filename = self.path
            raise

    def entries_have_checksum(self, shard: int, first_entry: int, about: Shard) -> bool:
        """Return True if a shard's entries in this file have the checksum of index.json. shard: its number.
        first_entry: the number of its first entry in the file. about: its row in index.json.

        The checksum is computed again if the file has changed. So a run ends if somebody replaces a tar together
        with the entries.
        """
        changed = os.fstat(self.fd).st_ctime_ns
        if changed != self.changed:
            self.changed = changed
            self.intact = {}
        if shard not in self.intact:
            data = self.pread(about.records * ENTRY.size, first_entry * ENTRY.size)
            self.intact[shard] = zlib.crc32(data) == about.idx_crc32
        return self.intact[shard]


@cache
def cached_file_opener() -> Callable[[object, str, bool], OpenFile]:
    """Return `open_file_for_cache` with a cache of the open files: a file stays open while it is one of those that were
    used last. The cache is made at the first call, because a rank raises its limit of open files after the import."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if limit == resource.RLIM_INFINITY else min(OPEN_FILES, limit // 2)
    return lru_cache(most)(open_file_for_cache)


def open_file_for_cache(owner: object, path: str, readahead: bool) -> OpenFile:
    """Open a file for reading. owner: an object that a source and its copies have in common; it is only a part of the
    cache's key, so that the file is opened again for another owner. readahead: see Source.read."""
    file = OpenFile(path)
    if readahead:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_WILLNEED)
    return file


def sorted_pair_name(langs: Iterable[str]) -> str:
    """Return the name of a language, or of a pair of languages in either order: "en-hi" for (en, hi) and (hi, en)."""
    return "-".join(sorted(langs))


def read_index(directory: Path) -> tuple[dict[str, Any], list[Shard]]:
    """Return the content of a directory's index.json, and the shards that it lists. Raises UserError if there is no
    valid index.json."""
    path = directory / "index.json"
    if path.is_fifo():
        raise UserError(f"{path} is a named pipe instead of a file. Remove {path}, and copy the folder again")
    if not path.exists():
        raise UserError(f"{path} not found. {remedy_without_index(directory)}")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError("the file is not a JSON object")
        version = index["version"]
        if type(version) is int and version == FORMAT_VERSION:
            return index, parse_shards(index)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if pointer := describe_empty_or_placeholder(path):
            raise UserError(pointer) from None
        reason = f"the field `{error.args[0]}` is missing" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path} is not an index of shards ({reason}). Write the index again by `xscale data index {directory}`"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}). Correct the permissions, or copy the folder again"
        ) from None
    raise UserError(
        f"{path} has format version {version!r}, and this version of xscale reads only format version "
        f"{FORMAT_VERSION}. Write the index again by `xscale data index {directory}`"
    )


def remedy_without_index(directory: Path) -> str:
    """Return what to do about a folder without index.json, for an error."""
    if (directory / "shards").is_dir():
        return f"If {directory} is an output of `xscale data prepare`, use its folders of shards: {directory}/shards/*"
    return (
        "Write shards by `xscale data prepare` or `xscale data write_shards`, or write the index of existing tars by "
        f"`xscale data index {directory}`"
    )


class Index(BaseModel, strict=True):
    """The fields of an index.json."""

    langs: list[str]
    layout: Literal["lines", "samples"]
    shards: Annotated[list[Shard], Field(min_length=1)]
    records: int
    bytes: int
    made_by: dict[str, Any]
    segmentation: dict[str, Any] = {}
    linked: int = 0


def parse_shards(index: dict[str, Any]) -> list[Shard]:
    """Return the shards that an index.json lists. index: the content of index.json. Raises ValueError if a field is
    absent, has a wrong type or contradicts another field."""
    try:
        shards = Index.model_validate(index).shards
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"the field `{place}`: {first['msg']}") from None
    check_one_or_two_languages(index["langs"])
    for name, times in Counter(shard.name for shard in shards).items():
        if times > 1:
            raise ValueError(f"the shard name {name!r} occurs {times} times")
    total = sum(shard.records for shard in shards)
    if index["records"] != total:
        raise ValueError(
            f"the field `records` is {index['records']}, but the sum of `records` over the list `shards` is {total}. "
            "The two numbers must be equal"
        )
    return shards


def check_one_or_two_languages(langs: list[str] | tuple[str, ...]) -> None:
    """Raise ValueError unless `langs` are the names of one or two different languages."""
    if not all(isinstance(lang, str) and lang and lang.isprintable() and not set(lang) & set("/\\ ") for lang in langs):
        raise ValueError(f"`langs` {list(langs)} must be names of languages, such as en, without spaces and slashes")
    if len(langs) not in (1, 2) or len(set(langs)) < len(langs):
        raise ValueError(f"`langs` {list(langs)} must be one language or two different languages")


def source_fingerprint(index: dict[str, Any]) -> str:
    """Return a hash of a source's languages and of its shards in their order. It does not depend on the directory."""
    shards = [[shard["records"], shard["sha256"]] for shard in index["shards"]]
    content = [1, index["langs"], shards]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def languages_of(sources: Iterable[Source]) -> set[str]:
    return set(chain.from_iterable(source.langs for source in sources))


def source_folders_at_or_below(directory: Path) -> list[Path]:
    """Return the directory if it has an index.json, or else the folders in it that have one."""
    if (directory / "index.json").exists():
        return [directory]
    return sorted(path.parent for path in directory.glob("*/index.json") if path.exists())


def find_sources(locations: Sequence[Path | str], cache: str | None = None) -> list[Source]:
    """Return the source at each URL, and the sources of each directory: the one there, or those one level below. cache:
    the value of data.cache, for sources at a URL. Raises UserError for a directory or URL without a source, and for two
    sources with the same records."""
    sources: list[Source] = []
    for location in locations:
        if isinstance(location, str):
            remote = fetch_remote_index(location, cache_folder(cache))
            sources.append(Source(remote.folder, remote))
            continue
        check_link_is_not_broken(location)
        if not location.exists():
            raise UserError(f"{location} does not exist. Correct the path")
        folders = source_folders_at_or_below(location)
        check_folders_of_shards_have_index(location, folders)
        if not folders:
            raise UserError(
                f"--data {location}: there is no index.json in this folder or in a folder directly below it. "
                f"{remedy_without_index(location)}"
            )
        sources += map(Source, folders)
    seen: dict[str, Path] = {}
    for source in sources:
        if source.fingerprint in seen:
            raise UserError(
                f"--data: {source.directory} has the same records as {seen[source.fingerprint]}. Use only one of "
                "the two folders"
            )
        seen[source.fingerprint] = source.directory
    return sources


def check_folders_of_shards_have_index(directory: Path, with_index: list[Path]) -> None:
    """Raise UserError if a folder beside the sources cannot be read, or has shards but no index.json, like an
    incomplete copy."""
    if not with_index or directory in with_index:
        return
    for path in sorted(directory.iterdir()):
        check_link_is_not_broken(path)
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise UserError(
                f"{path} cannot be read, but may have shards. Correct the permissions of {path}, or pass only the "
                "other folders to --data"
            )
        being_written = path.name.endswith(PARTIAL)
        if path not in with_index and not being_written and path.is_dir() and any(path.glob("*.tar")):
            raise UserError(
                f"{path} has shards, but no index.json. Copy the folder again, or write its index by `xscale data "
                f"index {path}`. To train without this folder, pass only the other folders to --data"
            )


def drop_later_records_per_language(sources: list[Source], kept_records: int | None) -> list[Source]:
    """Remove all records of each language or pair but its first `kept_records`; None: keep all. Return the sources
    that still have records."""
    if kept_records is None:
        return sources
    taken: Counter[frozenset[str]] = Counter()
    for source in sources:
        pair = frozenset(source.langs)
        source.drop_all_but_first(kept_records - taken[pair])
        taken[pair] += source.records
    return [source for source in sources if source.records]


def sample_texts(language: str, sources: list[Source], max_records: int = SAMPLE) -> Iterator[list[str]]:
    """Yield lists of texts in a language, from at most `max_records` records of all its sources. They are runs of RUN
    consecutive records, evenly spaced, or all records if there are no more."""
    with_language = [source for source in sources if language in source.langs]
    records = sum(source.records for source in with_language)
    chosen = record_numbers_in_spaced_runs(records, max_records)
    first = 0
    for source in with_language:
        end = first + source.records
        numbers = chosen[(chosen >= first) & (chosen < end)] - first
        first = end
        side = source.langs.index(language)
        for start in range(0, len(numbers), LIST_RECORDS):
            places = source.locate_records(numbers[start : start + LIST_RECORDS])
            yield [source.read(*place).texts[side] for place in places]


def record_numbers_in_spaced_runs(record_count: int, max_records: int) -> np.ndarray:
    """Return the numbers of at most `max_records` of the records: all of them, or evenly spaced runs of RUN."""
    if record_count <= max_records:
        return np.arange(record_count)
    return (evenly_spaced_indices(record_count // RUN, max_records // RUN)[:, None] * RUN + np.arange(RUN)).ravel()
