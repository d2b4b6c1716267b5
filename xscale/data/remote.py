"""Sources at a URL. fsspec copies whole shards into a cache on this machine, which all of its processes share.

Each source has a folder in the cache, whose name contains a hash of the source's index.json. The folder is like the
source's own directory, but has no .idx files, and only the most recently used shards. A file is downloaded under
another name, and takes its place once its size and its SHA-256 are those of index.json. So a cache that others can
write, a server that sends too much, and a killed process do no harm. fsspec's own `filecache` downloads in place, has
no hash and no bound, and its processes do not know each other's files; therefore only its `get_file` is used.
"""

import errno
import fcntl
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from xscale.errors import UserError, redact
from xscale.files import PARTIAL, sha256_file

TRIES = 7
"""The number of attempts to download a file."""
FIRST_WAIT = 0.5
"""The seconds of waiting before the second attempt. They double before each further attempt."""
STALL = 60.0
"""An attempt over HTTP has failed after this many seconds without a new byte. Other protocols have limits of theirs."""
LARGEST_INDEX = 1 << 30
TOUCHED = 10.0
"""A read sets the modification time of a shard's file to now if it is more than this many seconds ago."""
FETCHERS = 4
"""The number of threads that fetch shards ahead of their use."""
LOG = logging.getLogger("xscale")
IsWhole = Callable[[Path], bool]
"""A function that returns whether a file has the content that index.json says."""


def location(text: str) -> Path | str:
    """Return a value of --data as a Path, or as a string if it is a URL, which a Path would change."""
    return text.rstrip("/") if "://" in text else Path(text)


@dataclass(frozen=True)
class Cache:
    """The cache of remote shards on this machine. Several runs may share it."""

    folder: Path
    size: int
    """The maximum number of bytes of all shards in the cache."""

    @classmethod
    def of(cls, folder: str | None = None, gigabytes: float = 100.0) -> "Cache":
        """Return the cache for the values of data.cache and data.cache_gb."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xscale"
        return cls(Path(folder).absolute() if folder else default, round(gigabytes * 1e9))

    def make_room(self, size: int) -> None:
        """Delete the least recently used shards until `size` more bytes fit into the cache."""
        with locked(self.folder / "lock"):
            used = size
            shards = []
            for path in self.folder.glob("*/*.tar*"):
                with suppress(FileNotFoundError):  # it was completed under another name, or removed
                    status = path.lstat()
                    if path.suffix != ".lock":
                        shards.append((status.st_mtime_ns, status.st_size, path))
                        used += status.st_size
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

    def read(self, shard: tuple[str, int, str], length: int, offset: int, again: bool) -> bytes:
        """Return bytes of a shard, fetched if the cache lacks it. shard: name, size and SHA-256. again: the bytes were
        damaged; fetch the shard anew. The file is not kept open, so that deleting a shard frees the disk."""
        name, size, sha256 = shard
        path = f"{self.folder}/{name}"  # a Path would take longer than the read
        if again:
            Path(path).unlink(missing_ok=True)
        while True:
            if name not in self.verified:
                self.fetch(name, size, sha256)
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                self.verified.discard(name)
                continue
            try:
                if time.time() - os.fstat(fd).st_mtime > TOUCHED:
                    os.utime(fd)  # make_room deletes the shards with the oldest times
                return os.pread(fd, length, offset)
            finally:
                os.close(fd)

    def fetch(self, name: str, size: int, sha256: str) -> None:
        """Fetch a shard unless the cache has it. Other processes that need it wait. Raises OSError."""

        def is_whole(path: Path) -> bool:
            return path.stat().st_size == size and sha256_file(path) == sha256

        path = self.folder / name
        with locked(self.folder / f"{name}.lock"):
            if name in self.verified and path.exists():
                return
            if not path.exists() or not is_whole(path):  # others may have changed it in the cache
                self.cache.make_room(size)
                download(f"{self.url}/{name}", path, size, is_whole)
                self.cache.make_room(0)  # other processes may have fetched others meanwhile
            self.verified.add(name)

    def fetch_entries(self, name: str, sizes: Sequence[int], checksums: Sequence[int]) -> None:
        """Fetch the file with the index entries of all shards unless the cache has it. sizes, checksums: bytes and
        CRC-32 of each shard's part of the file. Raises OSError, or UserError if the source has no such file."""

        def is_whole(path: Path) -> bool:
            with path.open("rb") as file:
                return [zlib.crc32(file.read(size)) for size in sizes] == [*checksums] and not file.read(1)

        path = self.folder / name
        with locked(self.folder / f"{name}.lock"):
            if path.exists() and path.stat().st_size == sum(sizes):
                return
            try:
                download(f"{self.url}/{name}", path, sum(sizes), is_whole)
            except FileNotFoundError:
                raise UserError(
                    f"{self.url} has no file {name!r}; run `python -m data_tools.index` where the shards are, and "
                    f"copy every file that it writes to the URL too"
                ) from None


def start_fetchers() -> "SimpleQueue[Callable[[], None]]":
    """Start threads that call the functions put into the returned queue, each of which fetches a shard. If a fetch
    fails, the reader of its shard reports why."""
    wanted: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            fetch = wanted.get()
            with suppress(Exception):
                fetch()

    for _ in range(FETCHERS):
        threading.Thread(target=work, daemon=True).start()
    return wanted


def find_remote(url: str, cache: Cache) -> list[Remote]:
    """Return the source at a URL, or the sources one level below it, sorted by name. Raises OSError or UserError."""
    cache.folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        return [open_remote(url, cache)]
    file_system, path = open_file_system(url)
    try:
        entries = file_system.ls(path, detail=True, refresh=True)
    except (FileNotFoundError, NotADirectoryError, NotImplementedError):
        return []
    names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
    sources = []
    for name in sorted(names):
        with suppress(FileNotFoundError):
            sources.append(open_remote(f"{url}/{name}", cache))
    return sources


def open_remote(url: str, cache: Cache) -> Remote:
    """Return the source at a URL, after its index.json is cached. Raises OSError, of which FileNotFoundError without an
    index.json."""
    with tempfile.TemporaryDirectory(dir=cache.folder) as folder:
        index = Path(folder) / "index.json"
        download(f"{url}/index.json", index, LARGEST_INDEX, is_whole=lambda path: True)
        place = cache.folder / f"{url.rpartition('/')[2]}-{sha256_file(index)[:16]}"
        place.mkdir(exist_ok=True)
        os.replace(index, place / "index.json")  # an existing one has the same bytes
    return Remote(url, place, cache)


def download(url: str, path: Path, most: int, is_whole: IsWhole) -> None:
    """Download a file of at most `most` bytes. Raises FileNotFoundError if the server has no such file, and OSError if
    all attempts fail."""
    for number in range(TRIES):
        try:
            return download_once(url, path, most, is_whole)
        except UserError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "the server has no such file", redact(url)) from None
        except Exception as error:  # each file system has errors of its own
            problem = redact(f"{type(error).__name__}: {error}".splitlines()[0])
        LOG.warning(f"{redact(url)}: try {number + 1} of {TRIES} failed ({problem})")
        if number + 1 < TRIES:
            time.sleep(FIRST_WAIT * 2**number)
    raise OSError(errno.EREMOTEIO, f"it could not be fetched in {TRIES} tries ({problem})", redact(url))


def download_once(url: str, path: Path, most: int, is_whole: IsWhole) -> None:
    """Download a file of at most `most` bytes to another name, check it, and move it to its path."""
    from fsspec.callbacks import Callback

    class Bound(Callback):
        def call(self, *_: Any, **__: Any) -> None:
            if max(self.value, self.size or 0) > most:
                raise ValueError(f"the server sends more than {most:,} bytes")

    file_system, remote_path = open_file_system(url)
    fd, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=PARTIAL, dir=path.parent)  # nobody's link
    os.close(fd)
    try:
        file_system.get_file(remote_path, name, callback=Bound())
        if not is_whole(Path(name)):
            raise ValueError("its size or checksum is not that of index.json")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. Raises UserError if there is no such protocol."""
    import fsspec

    options = {}
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        import aiohttp

        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(refuse_other_host)
        options["client_kwargs"] = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL),
            "auto_decompress": False,  # the files are counted and hashed as they are stored
            **fsspec.config.conf.get(protocol, {}).get("client_kwargs", {}),
            "trace_configs": [tracing],
        }
    try:
        return fsspec.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
        raise UserError(f"--data {url}: {error}") from None


async def refuse_other_host(session: Any, context: Any, request: Any) -> None:
    """Raise UserError if a server answers by a redirection to another host, which may be one inside this network."""
    target = request.url.join(type(request.url)(request.response.headers.get("Location", "")))
    if target.host != request.url.host:
        raise UserError(
            f"{request.url} redirects to another host, {target.host}; give the URL there, or hf:// or s3://"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context that only one thread of one process of this machine can enter at a time. Raises OSError if the path is
    a link, which could lead to any file."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
