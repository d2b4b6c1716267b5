"""Shards and their index: any record of any WebDataset tar by one `pread`, verified.

A source directory holds NAME-%06d.tar, one .idx beside each, and index.json. An .idx is a raw array of
`IDX_DTYPE`, one entry a record: the byte range of the record in the tar, and its CRC-32. In the layout "lines"
a range is one line of JSON inside a `.jsonl` member; in the layout "samples" (tars others wrote) it is the run of
tar members that share a key. The file `entries` has those of all shards, in the order of index.json: whoever plans a
run reads lengths of many shards, and opens it alone. Where it is not there, or does not fit index.json, .idx are read.

Monolingual records with the same `doc` that follow one another in a shard are a document: the top bit of `length` is
set in each but the first. A monolingual text of more than PART_BYTES has an entry, with the same byte range, for each
of its parts, which are read as records of one document: they are bounded whatever the tar holds.
"""

import copy
import gc
import hashlib
import io
import json
import mmap
import os
import resource
import struct
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale.data import words
from xscale.data.link_projection import project_links
from xscale.data.text import stretch
from xscale.errors import UserError
from xscale.files import PARTIAL, parallel_map
from xscale.record import Record

FORMAT_VERSION = 2
"""Version 1, which knows neither documents nor parts, is read as it is."""
IDX_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4")])
ENTRY = struct.Struct("<QII")
"""One of IDX_DTYPE."""
ENTRIES = "entries"
"""The name of a source's file of them."""
LAYOUTS = ("lines", "samples")
SEGMENTATIONS = {"unicode": {"name": "unicode", "version": words.VERSION}, "whitespace": {"name": "whitespace"}}
"""Whose words a record's links count: those of data/words.py, or of the text as others split it."""
FOLLOWS = 1 << 31
"""Bit of `length`: the entry goes on the document of the entry before."""
PART_BYTES = 1024
"""A longer monolingual text is indexed in parts of at most so many UTF-8 bytes, about."""
OPEN_FILES = 1 << 14
"""A process keeps so many files of all its sources open at once, or half of those it may: those it used last. A shard
has two. It takes the windows of dozens of sources (data/order.py) as a whole."""
BLOCK = tarfile.BLOCKSIZE
_BOM = "\ufeff"


class Shard(NamedTuple):
    name: str
    records: int
    bytes: int
    sha256: str
    idx_crc32: int | None = None
    """Of its .idx; None in indices from before it was noted."""


class Source:
    """One directory of shards: one kind of record, one language or one ordered pair of languages."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        collects = gc.isenabled()
        gc.disable()  # of what it makes nothing is garbage, and it may be hundreds of thousands of objects
        try:
            index, self.shards = read_index(self.directory)
        finally:
            if collects:
                gc.enable()
        self.fingerprint = fingerprint(index)
        self.index = index | {"shards": []}
        """What it says, but of its shards, which may be hundreds of thousands."""
        self.layout: str = index["layout"]
        self.langs: tuple[str, ...] = tuple(index["langs"])
        self.segmentation: dict[str, str] = index.get("segmentation", SEGMENTATIONS["whitespace"])
        self.counts = np.array([shard.records for shard in self.shards], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        """Of each shard, its first record in the whole source."""
        self.records = int(self.counts.sum())
        self.bytes = sum(shard.bytes for shard in self.shards)
        self.readahead = False
        """Whether a shard that is opened will be read through, so that it is asked for at once."""

    @property
    def kind(self) -> str:
        return "pair" if len(self.langs) == 2 else "mono"

    @property
    def name(self) -> str:
        return "-".join(self.langs)

    def keep_first(self, records: int) -> None:
        """From now on the source ends behind so many of its records."""
        ends = np.cumsum(self.counts)
        shards = int(np.searchsorted(ends, records)) + 1
        self.counts = np.clip(records - (ends - self.counts), 0, self.counts)[:shards]
        self.shards = self.shards[:shards]
        self.records = int(self.counts.sum())
        self.bytes = sum(shard.bytes for shard in self.shards)

    def check_links(self) -> None:
        """Raises UserError where its links count words that this version does not know."""
        if self.segmentation not in SEGMENTATIONS.values():
            raise UserError(
                f"{self.directory}: the word links count words of segmentation {self.segmentation}, this xscale has "
                f"version {words.VERSION}. Write the shards again from the text: `python -m data_tools.write_shards "
                f"pairs ... --links F` or `--align`"
            )

    def with_words(self, record: Record) -> Record:
        """The record with its links over words (data/words.py). Raises UserError."""
        if record.links is None:
            return record
        self.check_links()
        if self.segmentation != SEGMENTATIONS["whitespace"]:
            return record
        try:
            return record._replace(links=project_links(record.links, record.texts)[0])
        except ValueError as error:
            raise UserError(
                f"{self.directory}: record {record.key!r}: {error}; links are 0-based `first-second` numbers of the "
                f"white-space words of its texts"
            ) from None

    @property
    def pair(self) -> str:
        return pair_name(self.langs)

    def places(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """Shard, and record in it, of records by their number in the source."""
        ends = np.cumsum(self.counts)
        shards = np.searchsorted(ends, numbers, side="right")
        return list(zip(shards.tolist(), (numbers - (ends - self.counts)[shards]).tolist(), strict=True))

    def without_readahead(self) -> "Source":
        """The same for a reader of a few records of many shards: none of them is swept."""
        source = copy.copy(self)
        source.readahead = False
        return source

    def spread(self, most: int) -> "Source":
        """A glance at so many shards from all over the source. Its number of records is still that of all."""
        chosen = np.unique(np.linspace(0, len(self.counts) - 1, most).round().astype(int))
        source = self.without_readahead()
        source.counts, source.starts = self.counts[chosen], self.starts[chosen]
        source.shards = [self.shards[shard] for shard in chosen]
        return source

    def check_sizes(self) -> None:
        """A cheap look at every file, so that an incomplete copy fails before step 1. Raises UserError."""
        parallel_map(self.check_size, self.shards)

    def check_size(self, shard: Shard) -> None:
        """Of its two files. Raises UserError."""
        path = f"{self.directory}/{shard.name}"  # of a Path for each file, making it takes longer than the look
        for file, expected in ((path, shard.bytes), (f"{path[:-4]}.idx", shard.records * IDX_DTYPE.itemsize)):
            try:
                size = os.stat(file).st_size
            except (FileNotFoundError, NotADirectoryError):
                size = None
            if size != expected:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise UserError(
                    f"{file} {found}; index.json says {expected:,} bytes. Copy it again, or run "
                    f"`python -m data_tools.index {self.directory}` if the shards were changed on purpose"
                )

    def lengths(self, shard: int, records: np.ndarray | slice) -> np.ndarray:
        """Byte lengths of records of one shard, read from the .idx alone."""
        return self.look(shard, records)[0]

    def follows(self, shard: int, records: np.ndarray | slice) -> np.ndarray:
        """Whether records of one shard go on the document of the record before, read from the .idx alone."""
        return self.look(shard, records)[1]

    def look(self, shard: int, records: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """`lengths` and `follows` of records of one shard."""
        idx = self.entries(shard)
        lengths = (idx["length"][records] & (FOLLOWS - 1)).astype(np.int64)
        if self.kind == "mono" and (lengths > PART_BYTES).any():
            offsets, of = np.ascontiguousarray(idx["offset"]), idx["offset"][records]
            lengths //= np.searchsorted(offsets, of, side="right") - np.searchsorted(offsets, of)
        return lengths, idx["length"][records] >= FOLLOWS

    def entries(self, shard: int) -> np.ndarray:
        """A shard's entries, whole and verified [n_records]. Raises UserError."""
        about = self.shards[shard]
        of_all = _mapped.get(id(self)) or _mapped.setdefault(id(self), Mapped(self.directory / ENTRIES))
        of_all.look()
        found = of_all.entries[self.starts[shard] :][: about.records]
        if shard not in of_all.verified and about.idx_crc32 == zlib.crc32(found.data):
            of_all.verified.add(shard)
        if shard not in of_all.verified:
            fd = os.open(self._path(shard, ".idx"), os.O_RDONLY)
            try:
                found = np.frombuffer(self._verified(shard, fd), dtype=IDX_DTYPE)
            finally:
                os.close(fd)
        return found[: self.counts[shard]]

    def _verified(self, shard: int, fd: int) -> bytes:
        """A shard's .idx. Raises UserError where it is not the one that index.json had when this source was opened."""
        about, path = self.shards[shard], self._path(shard, ".idx")
        data = _pread(fd, about.records * IDX_DTYPE.itemsize, 0, path)
        if len(data) % IDX_DTYPE.itemsize or (about.idx_crc32 is not None and zlib.crc32(data) != about.idx_crc32):
            raise UserError(
                f"{path} is damaged, or another shard's: its checksum is not what index.json said when this process "
                f"read it. Shards must not change while they are read: bring the old ones back. Or copy it again, or "
                f"run `python -m data_tools.index {self.directory}`"
            )
        return data

    def continues_document(self, shard: int, record: int) -> bool:
        """As `follows`, of one record that is read."""
        return bool(self._entry(shard, record)[1] & FOLLOWS)

    def read(self, shard: int, record: int) -> Record:
        """Record number `record` of shard number `shard`. Raises UserError where its bytes are damaged."""
        offset, length, crc = self._entry(shard, record)
        length &= FOLLOWS - 1
        data = self._bytes(shard, offset, length)
        if zlib.crc32(data) != crc or not data:
            data = self._bytes(shard, offset, length)  # a shared file system may answer better the second time
            if zlib.crc32(data) != crc or not data:
                raise UserError(self._damage(shard, record, offset, length))
        try:
            whole = self.parse(data)
        except UserError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, tarfile.TarError) as error:
            raise UserError(
                f"{self._path(shard)}: record {record} is none of layout {self.layout!r} ({error}); run "
                f"`python -m data_tools.index {self.directory}`"
            ) from None
        if whole.langs != self.langs:
            raise UserError(
                f"{self.directory}: record {whole.key!r} is of {', '.join(whole.langs)}, index.json says "
                f"{', '.join(self.langs)}; run `python -m data_tools.index {self.directory}`"
            )
        if length <= PART_BYTES or len(whole.texts) == 2:
            return whole
        return self._part(whole, shard, record, offset, length // PART_BYTES)

    def _part(self, whole: Record, shard: int, record: int, offset: int, most: int) -> Record:
        """Of a long text, the part that this record is."""
        files = self._files(shard)
        first, end = max(record - most, 0), min(record + 1 + most, int(self.counts[shard]))
        near = _pread(files.idx, (end - first) * IDX_DTYPE.itemsize, first * IDX_DTYPE.itemsize, files.names[1])
        same = np.frombuffer(near, dtype=IDX_DTYPE)["offset"] == offset
        number, parts = int(same[: record - first].sum()), int(same.sum())
        if parts == 1:
            return whole
        text = stretch(whole.texts[0], number, parts)
        return whole._replace(key=f"{whole.key}+{number}", texts=(text,))

    def _entry(self, shard: int, record: int) -> tuple[int, int, int]:
        """Offset, length, which may say FOLLOWS, and CRC-32 of a record. The .idx is verified when it is opened, and
        again when it has changed since: one that was put in its place with its tar would fit that tar's bytes."""
        if not 0 <= record < self.counts[shard]:
            raise IndexError(record)
        files = self._files(shard)
        if (changed := os.fstat(files.idx).st_ctime_ns) != files.verified:
            self._verified(shard, files.idx)
            files.verified = changed
        entry = _pread(files.idx, ENTRY.size, record * ENTRY.size, files.names[1])
        if len(entry) < ENTRY.size:
            self.entries(shard)  # says what is wrong with it
            raise UserError(f"{self._path(shard, '.idx')} ends before record {record}. Copy it again")
        return ENTRY.unpack(entry)

    def _bytes(self, shard: int, offset: int, length: int) -> bytes:
        if offset + length > self.shards[shard].bytes:
            return b""
        files = self._files(shard)
        return _pread(files.tar, length, offset, files.names[0])

    def _damage(self, shard: int, record: int, offset: int, length: int) -> str:
        self.entries(shard)  # may say that it is at fault
        if not length:
            return (
                f"{self._path(shard, '.idx')} is damaged: record {record} has no bytes. Copy it again, or run "
                f"`python -m data_tools.index {self.directory}`"
            )
        return (
            f"{self._path(shard)}: record {record} (bytes {offset}-{offset + length}) is damaged, its checksum differs "
            f"from the index. Restore the shard; `python -m data_tools.inspect {self.directory} --verify` names every "
            f"damaged shard"
        )

    def parse(self, data: bytes) -> Record:
        return parse_line(data) if self.layout == "lines" else parse_sample(data, self.langs)

    def _path(self, shard: int, suffix: str = ".tar") -> str:
        return f"{self.directory}/{self.shards[shard].name.removesuffix('.tar')}{suffix}"

    def _files(self, shard: int) -> "Files":
        """Of a shard, opened once as long as it is among those that this process used last."""
        files = _open.get((id(self), shard))
        if files is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = OPEN_FILES if soft == resource.RLIM_INFINITY else min(OPEN_FILES, soft // 2)
            while _open and len(_open) >= most // 2:
                _open.popitem(last=False)[1].close()
            files = _open[id(self), shard] = Files(self._path(shard), self._path(shard, ".idx"), self.readahead)
        _open.move_to_end((id(self), shard))
        return files

    def close(self) -> None:
        """Let go of its files; they are opened again where they are read."""
        _mapped.pop(id(self), None)
        for key in [key for key in _open if key[0] == id(self)]:
            _open.pop(key).close()

    def __del__(self) -> None:
        if _open is not None:  # the interpreter ends
            self.close()


class Files:
    """Of a shard, open for reading."""

    def __init__(self, tar: str, idx: str, readahead: bool):
        self.names = tar, idx
        self.verified = 0
        """When the .idx had last changed as it was verified."""
        self.tar = os.open(tar, os.O_RDONLY)
        try:
            self.idx = os.open(idx, os.O_RDONLY)
        except OSError:
            os.close(self.tar)
            raise
        if readahead:
            # The whole shard will be read in random order soon: ask for it in one sequential sweep.
            os.posix_fadvise(self.tar, 0, 0, os.POSIX_FADV_WILLNEED)

    def close(self, close: Any = os.close) -> None:  # os is gone when the interpreter ends
        close(self.tar)
        close(self.idx)


class Mapped:
    """The file of all entries of a source."""

    def __init__(self, path: Path):
        self.entries, self.verified = np.empty(0, dtype=IDX_DTYPE), set[int]()
        """verified: shards whose entries are those of index.json."""
        self.file: io.FileIO | None = None
        with suppress(OSError, ValueError):  # it is not there, or empty
            self.file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # a pipe is not waited for
            about = os.fstat(self.file.fileno())
            self.changed = about.st_ctime_ns
            size = about.st_size // IDX_DTYPE.itemsize * IDX_DTYPE.itemsize
            self.entries = np.frombuffer(mmap.mmap(self.file.fileno(), size, prot=mmap.PROT_READ), dtype=IDX_DTYPE)

    def look(self) -> None:
        """One that was written to since is left alone, as where it is shorter now, reading it would end the process."""
        if self.file and os.fstat(self.file.fileno()).st_ctime_ns != self.changed:
            self.__del__()
            self.file, self.entries, self.verified = None, np.empty(0, dtype=IDX_DTYPE), set()

    def __del__(self) -> None:
        if self.file:
            self.file.close()


_mapped: dict[int, Mapped] = {}
"""What this process has mapped, by source."""
_open: OrderedDict[tuple[int, int], Files] = OrderedDict()
"""What this process keeps open of (source, shard), longest unused first."""


def pair_name(langs: Iterable[str]) -> str:
    """The language, or the pair of languages whichever way round: "en-hi" of en and hi, and of hi and en."""
    return "-".join(sorted(langs))


def _pread(fd: int, size: int, at: int, path: str) -> bytes:
    """os.pread, whose errors name the file."""
    try:
        return os.pread(fd, size, at)
    except OSError as error:
        error.filename = path
        raise


def idx_path(tar: Path) -> Path:
    return tar.with_suffix(".idx")


def read_index(directory: Path) -> tuple[dict[str, Any], list[Shard]]:
    """What it says, and of that its shards. Raises UserError."""
    path = directory / "index.json"
    if not path.exists():
        raise UserError(f"{path} not found. Make it with `python -m data_tools.index {directory}`")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
        if type(version) is int and version in (1, FORMAT_VERSION):
            return index, check_index(index)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not an index ({error}). Rebuild it: `python -m data_tools.index {directory}`"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    raise UserError(
        f"{path} has format version {version!r}, this xscale reads 1 and {FORMAT_VERSION}. Rebuild the index: "
        f"`python -m data_tools.index {directory}`"
    )


def check_index(index: dict[str, Any]) -> list[Shard]:
    """Its shards. Raises ValueError, or what Python raises, where a field is absent, of another type, or at odds with
    others."""
    kinds = {"langs": list, "layout": str, "shards": list, "records": int, "bytes": int, "made_by": dict, "kind": str}
    for name, kind in kinds.items():
        if type(index[name]) is not kind:
            raise ValueError(f"{name} {index[name]!r} is no {kind.__name__}")
    check_languages(index["langs"])
    if index["kind"] != ("pair" if len(index["langs"]) == 2 else "mono") or index["layout"] not in LAYOUTS:
        raise ValueError(f"kind {index['kind']!r} and layout {index['layout']!r} do not fit")
    if not isinstance(index.get("segmentation", {}), dict):
        raise ValueError(f"segmentation {index['segmentation']!r} is no object")
    if unknown := set().union(*index["shards"]) - {*Shard._fields}:
        raise ValueError(f"shards have no {', '.join(sorted(map(str, unknown)))}")
    shards = [Shard(s["name"], s["records"], s["bytes"], s["sha256"], s.get("idx_crc32")) for s in index["shards"]]
    for name, records, size, sha256, crc in shards:
        if not (type(records) is type(size) is int and records > 0 <= size and (crc is None or type(crc) is int)):
            raise ValueError(f"shard {name!r}: {(records, size, crc)} are no numbers of records and bytes")
        if type(sha256) is not str or "/" in name or not name.endswith(".tar") or not name.isprintable():
            raise ValueError(f"shard {name!r} is no file name, or has no hash")
    if len({shard.name for shard in shards}) < len(shards):
        raise ValueError("a shard stands twice")
    if not shards or index["records"] != sum(shard.records for shard in shards):
        raise ValueError(f"records {index['records']} are not those of its shards")
    return shards


def check_languages(langs: list[str] | tuple[str, ...]) -> None:
    """Raises ValueError unless they are one name or two."""
    if not all(isinstance(lang, str) and lang and lang.isprintable() and not set(lang) & set("/\\ ") for lang in langs):
        raise ValueError(f"langs {list(langs)} are not names of languages")
    if len(langs) not in (1, 2) or len(set(langs)) < len(langs):
        raise ValueError(f"langs {list(langs)}: needs one language, or two different ones")


def fingerprint(index: dict[str, Any]) -> str:
    """Identity of a source's content: languages, shard order and shard bytes, whatever the directory is called."""
    content = [1, index["langs"], [[s["records"], s["sha256"]] for s in index["shards"]]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def directories_below(directory: Path) -> list[Path]:
    """Shard directories one level below."""
    return sorted(path.parent for path in directory.glob("*/index.json")) if directory.is_dir() else []


def find_sources(directories: list[Path]) -> list[Source]:
    """Sources at, or one level below, each directory, in the order given. Raises UserError where there is none."""
    sources: list[Source] = []
    for directory in directories:
        found = [directory] if (directory / "index.json").exists() else directories_below(directory)
        if not found:
            raise UserError(
                f"--data {directory}: no index.json there or one level below. Write shards with "
                f"`python -m data_tools.write_shards`, or index existing tars: `python -m data_tools.index {directory}`"
            )
        check_none_forgotten(directory, found)
        sources += [Source(path) for path in found]
    seen: dict[str, Path] = {}
    for source in sources:
        if source.fingerprint in seen:
            raise UserError(
                f"--data: {source.directory} has the same content as {seen[source.fingerprint]}; give it once"
            )
        seen[source.fingerprint] = source.directory
    return sources


def check_none_forgotten(directory: Path, found: list[Path]) -> None:
    """Raises UserError where shards lie beside the sources without an index.json: a copy that is not whole."""
    for path in sorted(directory.iterdir()) if directory not in found else ():
        being_written = path.name.endswith(PARTIAL)
        if path not in found and not being_written and path.is_dir() and any(path.glob("*.tar")):
            raise UserError(
                f"{path} has shards and no index.json that can be read. Copy it again, or run "
                f"`python -m data_tools.index {path}`; or move it away, or name the others in --data"
            )


def take_first(sources: list[Source], first: int | None) -> list[Source]:
    """The sources, cut to the first records of each language, or pair of languages whichever way round, in the order
    given. Those of which nothing is left are left out."""
    if first is None:
        return sources
    left: dict[tuple[str, ...], int] = {}
    for source in sources:
        of = tuple(sorted(source.langs))
        room = left.get(of, first)
        if source.records > room:
            source.keep_first(room)
        left[of] = room - source.records
    return [source for source in sources if source.records]


def parse_line(line: bytes, strict: bool = False) -> Record:
    """strict: refuse what is said twice, which takes time."""
    return Record.from_dict(parse_json(line, strict))


def parse_json(data: bytes, strict: bool = True) -> Any:
    try:
        return json.loads(data.decode().removeprefix(_BOM), object_pairs_hook=_once if strict else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        raise ValueError(f"a field stands twice among {', '.join(name for name, _ in fields)}")
    return found


def parse_sample(data: bytes, langs: tuple[str, ...] | None, whole: bool = False) -> Record:
    """A record of a run of tar members: KEY.json, or KEY.LANG.txt for each language (+ KEY.links.txt), or KEY.txt.

    langs: which texts, in this order; whole: there may be no others.
    """
    texts: dict[str, str] = {}
    links, key, seen, fields = None, "", set[str](), None
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is None:
                continue
            key = sample_key(member.name)
            extension = member.name[len(key) + 1 :]
            kind = extension.rpartition(".")[2]
            if kind != kind.lower() and kind.lower() in ("json", "txt"):
                raise ValueError(f"member {member.name}: write its extension in lower case, .{kind.lower()}")
            if extension in seen:
                raise ValueError(f"{member.name} stands twice in a row; give each sample a key of its own")
            seen.add(extension)
            text = content.read()
            if extension == "json":
                fields = parse_json(text)
                if not isinstance(fields, dict):
                    raise ValueError(f"{member.name} is not a JSON object")
            elif extension == "links.txt":
                links = text.decode().strip()
            elif extension == "txt" and langs and len(langs) == 1:
                texts[langs[0]] = text.decode().removeprefix(_BOM).rstrip("\n")
            elif extension.endswith(".txt") and extension.count(".") == 1:
                texts[extension.removesuffix(".txt")] = text.decode().removeprefix(_BOM).rstrip("\n")
    if fields is not None:
        return Record.from_dict({"key": key} | fields)
    if not texts:
        raise ValueError(f"sample {key!r}: needs KEY.json, KEY.LANG.txt members, or KEY.txt with --lang")
    order = [lang for lang in langs if lang in texts] if langs else list(texts)
    if whole and len(order) < len(texts):
        raise ValueError(
            f"sample {key!r} has {', '.join(texts)}, the ones before {', '.join(order) or 'others'}: say which to read "
            f"by --langs, or keep one directory for each"
        )
    return Record.from_dict({"key": key, "langs": order, "texts": [texts[lang] for lang in order], "links": links})


def sample_key(name: str) -> str:
    """WebDataset's rule: the path up to the first dot of the file's name."""
    directory, slash, base = name.rpartition("/")
    return directory + slash + base.partition(".")[0]
