"""Shards and their index: any record of any WebDataset tar by one `pread`, verified.

A source directory holds NAME-%06d.tar, one .idx beside each, and index.json. An .idx is a raw array of
`IDX_DTYPE`, one entry a record: the byte range of the record in the tar, and its CRC-32. In the layout "lines"
a range is one line of JSON inside a `.jsonl` member; in the layout "samples" (tars others wrote) it is the run of
tar members that share a key.

Monolingual records with the same `doc` that follow one another in a shard are a document: the top bit of `length` is
set in each but the first. A monolingual text of more than PART_BYTES has an entry, with the same byte range, for each
of its parts, which are read as records of one document: they are bounded whatever the tar holds.
"""

import copy
import hashlib
import io
import json
import os
import resource
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale.data import words
from xscale.data.carry import carry_over
from xscale.data.text import stretch
from xscale.errors import UserError
from xscale.record import Record

FORMAT_VERSION = 2
"""Version 1, which knows neither documents nor parts, is read as it is."""
IDX_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4")])
LAYOUTS = ("lines", "samples")
SEGMENTATIONS = {"unicode": {"name": "unicode", "version": words.VERSION}, "whitespace": {"name": "whitespace"}}
"""Whose words a record's links count: those of data/words.py, or of the text as others split it."""
FOLLOWS = 1 << 31
"""Bit of `length`: the entry goes on the document of the entry before."""
PART_BYTES = 1024
"""A longer monolingual text is indexed in parts of at most so many UTF-8 bytes, about."""
OPEN_FILES = 4096
"""A process keeps so many files of all its sources open at once, or half of those it may: those it used last. An .idx
counts as one. It takes the windows of a few sources (data/order.py) as a whole."""
BLOCK = tarfile.BLOCKSIZE


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
        index = read_index(self.directory)
        self.index = index
        self.layout: str = index["layout"]
        self.langs: tuple[str, ...] = tuple(index["langs"])
        self.segmentation: dict[str, str] = index.get("segmentation", SEGMENTATIONS["whitespace"])
        self.shards = [Shard(**shard) for shard in index["shards"]]
        self.counts = np.array([shard.records for shard in self.shards], dtype=np.int64)
        self.records = int(self.counts.sum())
        self.bytes = sum(shard.bytes for shard in self.shards)
        self.fingerprint = fingerprint(index)
        self.swept = False
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
            return record._replace(links=carry_over(record.links, record.texts)[0])
        except ValueError as error:
            raise UserError(
                f"{self.directory}: record {record.key!r}: {error}; links are 0-based `first-second` numbers of the "
                f"white-space words of its texts"
            ) from None

    @property
    def pair(self) -> str:
        """The language, or the pair of languages whichever way round: en-hi and hi-en are one."""
        return "-".join(sorted(self.langs))

    def places(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """Shard, and record in it, of records by their number in the source."""
        ends = np.cumsum(self.counts)
        shards = np.searchsorted(ends, numbers, side="right")
        return list(zip(shards.tolist(), (numbers - (ends - self.counts)[shards]).tolist(), strict=True))

    def glance(self) -> "Source":
        """The same for a reader of a few records of many shards: none of them is swept."""
        source = copy.copy(self)
        source.swept = False
        return source

    def spread(self, most: int) -> "Source":
        """A glance at so many shards from all over the source. Its number of records is still that of all."""
        chosen = np.unique(np.linspace(0, len(self.counts) - 1, most).round().astype(int))
        source = self.glance()
        source.counts, source.shards = self.counts[chosen], [self.shards[shard] for shard in chosen]
        return source

    def check_sizes(self, number: int = 0, of: int = 1) -> None:
        """A cheap look at every file, or at one of `of` shares of them, so that an incomplete copy fails before step 1.
        Raises UserError."""
        for shard in self.shards[number::of]:
            path = f"{self.directory}/{shard.name}"  # of a Path for each file, making it takes longer than the look
            idx = path.removesuffix(".tar") + ".idx"
            for file, expected in ((path, shard.bytes), (idx, shard.records * IDX_DTYPE.itemsize)):
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
        idx = self._idx(shard)
        lengths = (idx["length"][records] & (FOLLOWS - 1)).astype(np.int64)
        if self.kind == "mono" and (lengths > PART_BYTES).any():
            offsets, of = np.ascontiguousarray(idx["offset"]), idx["offset"][records]
            lengths //= np.searchsorted(offsets, of, side="right") - np.searchsorted(offsets, of)
        return lengths

    def follows(self, shard: int, records: np.ndarray | slice) -> np.ndarray:
        """Whether records of one shard go on the document of the record before, read from the .idx alone."""
        return self._idx(shard)["length"][records] >= FOLLOWS

    def read(self, shard: int, record: int) -> Record:
        """Record number `record` of shard number `shard`. Raises UserError where its bytes are damaged."""
        fd = self._file(shard)
        idx = self._idx(shard)
        offset, length, crc = idx[record].item()
        length &= FOLLOWS - 1
        if not length:
            raise UserError(
                f"{idx_path(self.directory / self.shards[shard].name)} is damaged: record {record} has no bytes. Copy "
                f"it again, or run `python -m data_tools.index {self.directory}`"
            )
        data = os.pread(fd, length, offset)
        if zlib.crc32(data) != crc:
            data = os.pread(fd, length, offset)  # a shared file system may answer better the second time
            if zlib.crc32(data) != crc:
                raise UserError(
                    f"{self.directory / self.shards[shard].name}: record {record} (bytes {offset}-{offset + length}) "
                    f"is damaged, its checksum differs from the index. Restore the shard; "
                    f"`python -m data_tools.inspect {self.directory} --verify` names every damaged shard"
                )
        whole = self.parse(data)
        if whole.langs != self.langs:
            raise UserError(
                f"{self.directory}: record {whole.key!r} is of {', '.join(whole.langs)}, index.json says "
                f"{', '.join(self.langs)}; run `python -m data_tools.index {self.directory}`"
            )
        if length <= PART_BYTES or len(whole.texts) == 2:
            return whole
        most = length // PART_BYTES
        before, after = (idx["offset"][max(record - most, 0) : record], idx["offset"][record + 1 : record + 1 + most])
        number, behind = (int((offsets == offset).sum()) for offsets in (before, after))
        if number + behind == 0:
            return whole
        text = stretch(whole.texts[0], number, number + 1 + behind)
        return whole._replace(key=f"{whole.key}+{number}", texts=(text,))

    def parse(self, data: bytes) -> Record:
        return parse_line(data) if self.layout == "lines" else parse_sample(data, self.langs)

    def _idx(self, shard: int) -> np.ndarray:
        return _kept_open((id(self), shard, "idx"), self._open_idx)

    def _open_idx(self, shard: int) -> np.ndarray:
        path = str(idx_path(self.directory / self.shards[shard].name))  # numpy looks a Path up, folder by folder
        mapped, crc = np.memmap(path, dtype=IDX_DTYPE, mode="r"), self.shards[shard].idx_crc32
        if crc is not None and zlib.crc32(mapped.tobytes()) != crc:
            raise UserError(
                f"{path} is damaged, or another shard's: its checksum differs from index.json. Copy it again, or "
                f"run `python -m data_tools.index {self.directory}`"
            )
        return np.asarray(mapped)[: self.counts[shard]]  # a memmap looks a record up at a third of the speed

    def _file(self, shard: int) -> int:
        return _kept_open((id(self), shard, "tar"), self._open_tar)

    def _open_tar(self, shard: int) -> int:
        fd = os.open(self.directory / self.shards[shard].name, os.O_RDONLY)
        if self.swept:
            # The whole shard will be read in random order soon: ask for it in one sequential sweep.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        return fd

    def close(self, close: Any = os.close) -> None:
        """Let go of its files; they are opened again where they are read."""
        for key in [key for key in _open if key[0] == id(self)]:
            _let_go(_open.pop(key), close)

    def __del__(self, close: Any = os.close) -> None:  # os is gone when the interpreter ends
        self.close(close)


_open: OrderedDict[tuple[int, int, str], Any] = OrderedDict()
"""What this process keeps open of (source, shard, tar or idx): a file descriptor or an array, longest unused first."""


def _kept_open(key: tuple[int, int, str], opens: Callable[[int], Any]) -> Any:
    """What `opens` makes of the shard, once as long as it is among those used last."""
    found = _open.get(key)
    if found is None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = OPEN_FILES if soft == resource.RLIM_INFINITY else min(OPEN_FILES, soft // 2)
        while _open and len(_open) >= most:
            _let_go(_open.popitem(last=False)[1])
        found = _open[key] = opens(key[1])
    _open.move_to_end(key)
    return found


def _let_go(kept: Any, close: Callable[[int], None] = os.close) -> None:
    if isinstance(kept, int):
        close(kept)


def pair_name(name: str) -> str:
    """Of a source's or a dictionary's name: "en-hi" for en-hi and hi-en, the same pair of languages."""
    return "-".join(sorted(name.split("-")))


def idx_path(tar: Path) -> Path:
    return tar.with_suffix(".idx")


def read_index(directory: Path) -> dict[str, Any]:
    path = directory / "index.json"
    if not path.exists():
        raise UserError(f"{path} not found. Make it with `python -m data_tools.index {directory}`")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
        if type(version) is int and version in (1, FORMAT_VERSION):
            check_index(index)
            return index
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


def check_index(index: dict[str, Any]) -> None:
    """Raises ValueError, or what Python raises, where a field is absent, of another type, or at odds with others."""
    kinds = {"langs": list, "layout": str, "shards": list, "records": int, "bytes": int, "made_by": dict, "kind": str}
    for name, kind in kinds.items():
        if type(index[name]) is not kind:
            raise ValueError(f"{name} {index[name]!r} is no {kind.__name__}")
    check_languages(index["langs"])
    if index["kind"] != ("pair" if len(index["langs"]) == 2 else "mono") or index["layout"] not in LAYOUTS:
        raise ValueError(f"kind {index['kind']!r} and layout {index['layout']!r} do not fit")
    if not isinstance(index.get("segmentation", {}), dict):
        raise ValueError(f"segmentation {index['segmentation']!r} is no object")
    shards = [Shard(**shard) for shard in index["shards"]]
    for shard in shards:
        name, records, size, sha256, crc = shard
        numbers = (records, size, 0 if crc is None else crc)
        if set(map(type, numbers)) != {int} or min(numbers) < 0 or not records:
            raise ValueError(f"shard {name!r}: {numbers} are no numbers of records and bytes")
        if "/" in name or not name.endswith(".tar") or type(sha256) is not str:
            raise ValueError(f"shard {shard.name!r} is no file name, or has no hash")
    if len({shard.name for shard in shards}) < len(shards):
        raise ValueError("a shard stands twice")
    if not shards or index["records"] != sum(shard.records for shard in shards):
        raise ValueError(f"records {index['records']} are not those of its shards")


def check_languages(langs: list[str] | tuple[str, ...]) -> None:
    """Raises ValueError unless they are one name or two."""
    if not all(isinstance(lang, str) and lang and not set(lang) & set("/\\ \t\n\0") for lang in langs):
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
        sources += [Source(path) for path in found]
    seen: dict[str, Path] = {}
    for source in sources:
        if source.fingerprint in seen:
            raise UserError(
                f"--data: {source.directory} has the same content as {seen[source.fingerprint]}; give it once"
            )
        seen[source.fingerprint] = source.directory
    return sources


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


def parse_line(line: bytes) -> Record:
    return Record.from_dict(parse_json(line))


def parse_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


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
                texts[langs[0]] = text.decode().rstrip("\n")
            elif extension.endswith(".txt") and extension.count(".") == 1:
                texts[extension.removesuffix(".txt")] = text.decode().rstrip("\n")
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
