"""Sources at a URL. fsspec copies whole shards into a cache that all processes of this machine share.

Each source has a folder in the cache. A hash of the source's index.json is part of the folder's name. The folder has
the files of the source's directory, except .idx files, but only those shards that were used last. A file gets its final
name only if its size and SHA-256 are those of index.json. So a damaged cache, a server that sends too much, and a
killed process do no harm. fsspec's own `filecache` downloads to the final name, compares no hash, has no limit, and
does not share files between processes; so only fsspec's `get_file` is used.
"""

import errno
import fcntl
import gc
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from xscale import files
from xscale.errors import LOG, UserError, redact
from xscale.record import Shard

TRIES = 7
"""The number of attempts to download a file."""
FIRST_WAIT = 0.5
"""The seconds to wait before the second attempt. The wait doubles before each further attempt."""
STALL = 60.0
"""An attempt over HTTP fails after this many seconds without a new byte. Other protocols have their own limits."""
LARGEST_INDEX = 1 << 30
IsWhole = Callable[[Path], bool]
"""A function that returns True if a file has the size and hash of index.json."""
# A forked process must not collect the HTTP sessions that its parent left: to close each, fsspec would wait a second
# for the parent's event loop, which does not run there.
os.register_at_fork(after_in_child=gc.freeze)


def parse_location(text: str) -> Path | str:
    """Return a value of --data: a URL as a string, because a Path would change "//" to "/", and a directory as a
    Path."""
    return text.rstrip("/") if "://" in text else Path(text)


@dataclass(frozen=True)
class Cache:
    """The cache of remote shards on this machine. Several runs may share it."""

    folder: Path
    size: int
    """The maximum number of bytes of all shards in the cache."""

    @classmethod
    def from_settings(cls, folder: str | None = None, gigabytes: float = 100.0) -> "Cache":
        """Return the cache for the values of data.cache and data.cache_gb."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xscale"
        return cls(Path(folder).absolute() if folder else default, round(gigabytes * 1e9))

    def make_room(self, size: int) -> None:
        """Delete the least recently used shards until `size` more bytes fit into the cache."""
        with locked(self.folder / "lock"):
            used = size
            shards = []
            for path in self.folder.glob("*/*.tar*"):
                if path.suffix != ".lock":
                    # Another process may have renamed or removed the file.
                    with suppress(FileNotFoundError):
                        status = path.lstat()
                        used += status.st_size
                        shards.append((status.st_mtime_ns, status.st_size, path))
            for _, shard_size, path in sorted(shards):
                if used > self.size:
                    path.unlink(missing_ok=True)
                    used -= shard_size


@dataclass(frozen=True)
class Remote:
    """A source at a URL, and its folder in the cache."""

    url: str
    folder: Path
    cache: Cache
    verified: set[str] = field(default_factory=set, compare=False)
    """The shards in the cache whose SHA-256 this process has compared."""

    def read(self, shard: Shard, length: int, offset: int, again: bool) -> bytes:
        """Return `length` bytes of a shard from `offset` on. Fetch the shard if it is not in the cache. again: fetch it
        in any case, because the bytes were damaged. The file is closed, so that deleting a shard frees the disk."""
        path = self.folder / shard.name
        if again:
            path.unlink(missing_ok=True)
        while True:
            self.fetch(shard)
            # Another process may have deleted the file meanwhile.
            with suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
                os.utime(file.fileno())  # make_room deletes the shards with the oldest times
                return os.pread(file.fileno(), length, offset)

    def fetch(self, shard: Shard) -> None:
        """Fetch a shard, unless it is in the cache. Other processes that need the shard wait. Raises OSError."""

        def is_whole(path: Path) -> bool:
            return path.stat().st_size == shard.bytes and files.sha256_file(path) == shard.sha256

        path = self.folder / shard.name
        if shard.name in self.verified and path.exists():
            return
        with locked(self.folder / f"{shard.name}.lock"):
            if not path.exists() or not is_whole(path):
                self.cache.make_room(shard.bytes)
                download(f"{self.url}/{shard.name}", path, shard.bytes, is_whole)
                self.cache.make_room(0)  # because other processes may have fetched other shards meanwhile
            self.verified.add(shard.name)

    def fetch_entries(self, name: str, sizes: Sequence[int], checksums: Sequence[int]) -> None:
        """Fetch the file with the index entries of all shards, unless it is in the cache. sizes, checksums: bytes and
        CRC-32 of each shard's part of the file. Raises OSError, or UserError if the source has no such file."""

        def is_whole(path: Path) -> bool:
            with path.open("rb") as file:
                parts = [zlib.crc32(file.read(size)) for size in sizes]
                return parts == list(checksums) and not file.read(1)

        path = self.folder / name
        with locked(self.folder / f"{name}.lock"):
            if path.exists() and path.stat().st_size == sum(sizes):
                return
            try:
                download(f"{self.url}/{name}", path, sum(sizes), is_whole)
            except FileNotFoundError:
                raise UserError(
                    f"{self.url} has no file {name!r}; run `xscale data index` on the shards, and copy all files that "
                    f"it writes to the URL, too"
                ) from None


def open_remote_sources(url: str, cache: Cache) -> list[Remote]:
    """Return the source at a URL, or if there is none, the sources one level below, sorted by name. Raises OSError or
    UserError."""
    cache.folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        return [open_remote_source(url, cache)]
    file_system, path = open_file_system(url)
    names = []
    with suppress(FileNotFoundError, NotADirectoryError, NotImplementedError):  # some servers do not list folders
        for entry in file_system.ls(path, detail=True, refresh=True):
            if entry["type"] == "directory":
                names.append(entry["name"].rstrip("/").rpartition("/")[2])
    sources = []
    for name in sorted(names):
        with suppress(FileNotFoundError):
            sources.append(open_remote_source(f"{url}/{name}", cache))
    return sources


def open_remote_source(url: str, cache: Cache) -> Remote:
    """Download the index.json of the source at a URL into the cache, and return the source. Raises OSError; if there is
    no index.json, FileNotFoundError."""
    with tempfile.TemporaryDirectory(dir=cache.folder) as folder:
        index = Path(folder) / "index.json"
        download(f"{url}/index.json", index, LARGEST_INDEX, is_whole=lambda path: True)
        place = cache.folder / f"{url.rpartition('/')[2]}-{files.sha256_file(index)[:16]}"
        place.mkdir(exist_ok=True)
        os.replace(index, place / "index.json")  # an existing file has the same bytes
    return Remote(url, place, cache)


class SizeLimit(Callback):
    """Raises ValueError during a download when it has more than `most` bytes."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def call(self, *_: Any, **__: Any) -> None:
        if max(self.value, self.size or 0) > self.most:
            raise ValueError(f"the server sends more than {self.most:,} bytes")


def download(url: str, path: Path, most: int, is_whole: IsWhole) -> None:
    """Download a file of at most `most` bytes. Raises FileNotFoundError if the server has no such file, and OSError if
    all attempts fail."""
    problem = ""
    for number in range(TRIES):
        if number:
            LOG.warning(f"{redact(url)}: try {number} of {TRIES} failed ({problem})")
            time.sleep(FIRST_WAIT * 2 ** (number - 1))
        try:
            file_system, remote_path = open_file_system(url)
            with files.publish(path) as partial:
                file_system.get_file(remote_path, str(partial), callback=SizeLimit(most))
                if not is_whole(partial):
                    raise ValueError("its size or checksum is not that of index.json")
            return
        except UserError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "the server has no such file", redact(url)) from None
        except Exception as error:  # each file system raises its own errors
            problem = redact(f"{type(error).__name__}: {error}".splitlines()[0])
    raise OSError(errno.EREMOTEIO, f"it could not be fetched in {TRIES} tries ({problem})", redact(url))


def open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. Raises UserError if there is no such protocol."""
    options = {}
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        import aiohttp

        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(refuse_other_host)
        options["client_kwargs"] = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL),
            "auto_decompress": False,  # index.json has the sizes and hashes of the stored files
            **fsspec.config.conf.get(protocol, {}).get("client_kwargs", {}),
            "trace_configs": [tracing],
        }
    try:
        return fsspec.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
        raise UserError(f"--data {url}: {error}") from None


async def refuse_other_host(session: Any, context: Any, request: Any) -> None:
    """Raise UserError if a server redirects to another host, which may be a private one in this network."""
    target = request.url.join(type(request.url)(request.response.headers.get("Location", "")))
    if target.host != request.url.host:
        raise UserError(
            f"{request.url} redirects to another host, {target.host}; give the URL there, or hf:// or s3://"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Return a context that only one thread of this machine can enter at a time. path: the lock's file. Raises OSError
    if it is a link, because a link may lead to any file."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
