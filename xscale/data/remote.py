"""Sources at a URL. Whole shards are fetched into a cache on this machine, which all of its processes share.

Each source has a folder in the cache, whose name contains a hash of the source's index.json. The folder is like the
source's own directory, but has no .idx files, and only the most recently used shards. Every download is checked: shards
by the SHA-256 and entries by the CRC-32 in index.json; index.json itself is downloaded twice and compared.
"""

import errno
import fcntl
import json
import logging
import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from xscale.errors import UserError
from xscale.files import PARTIAL, sha256_file

TRIES = 7
"""The number of attempts to download a file."""
FIRST_WAIT = 0.5
"""The approximate seconds of waiting before the second attempt. They double before each further attempt."""
STALL = 30.0
"""An attempt to download has failed after this many seconds without a new byte."""
TOUCHED = 10.0
"""A read sets the modification time of a shard's file to now if it is more than this many seconds ago."""
FETCHERS = 4
"""The number of threads that fetch shards ahead of their use."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors of this machine's disk, which another attempt would not fix."""
REFUSED = {401, 403}
"""HTTP's status codes for a request without the right credentials."""
LOG = logging.getLogger("xscale")
Found = TypeVar("Found")


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
            shards = [path for path in self.folder.glob("*/*.tar*") if path.suffix != ".lock"]
            found = []
            for path in shards:
                try:
                    found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
                except FileNotFoundError:  # a partial file was completed, or a damaged one was removed
                    continue
            used = sum(bytes_of for _, bytes_of, _ in found)
            for _, bytes_of, path in sorted(found):
                if used + size <= self.size:
                    break
                path.unlink(missing_ok=True)
                used -= bytes_of


@dataclass(frozen=True)
class Remote:
    """A source at a URL, and its folder in the cache."""

    url: str
    folder: Path
    cache: Cache

    def read(self, shard: tuple[str, int, str], length: int, offset: int, again: bool) -> bytes:
        """Return bytes of a shard, fetched if the cache lacks it. shard: name, size and SHA-256. again: the bytes were
        damaged; fetch the shard anew. The file is not kept open, so that deleting a shard frees the disk."""
        path = f"{self.folder}/{shard[0]}"  # a Path would take longer than the read
        if again:
            Path(path).unlink(missing_ok=True)
        while True:
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                self.fetch(*shard)
                continue
            try:
                if time.time() - os.fstat(fd).st_mtime > TOUCHED:
                    os.utime(fd)  # make_room deletes the shards with the oldest times
                return os.pread(fd, length, offset)
            finally:
                os.close(fd)

    def fetch(self, name: str, size: int, sha256: str) -> None:
        """Fetch a shard unless the cache has it. Other processes that need it wait. Raises OSError."""

        def check(path: Path) -> None:
            if (found := path.stat().st_size) != size:
                raise ValueError(f"{found:,} bytes instead of {size:,}")
            if sha256_file(path) != sha256:
                raise ValueError("the SHA-256 is not that of index.json")

        with locked(self.folder / f"{name}.lock"):
            if not (self.folder / name).exists():
                self.cache.make_room(size)
                fetch_file(f"{self.url}/{name}", self.folder / name, check)
                self.cache.make_room(0)  # other processes may have fetched others meanwhile

    def fetch_entries(self, name: str, sizes: Sequence[int], checksums: Sequence[int]) -> None:
        """Fetch the file with the index entries of all shards unless the cache has it. sizes, checksums: bytes and
        CRC-32 of each shard's part of the file. Raises OSError, or UserError if the source has no such file."""

        def check(path: Path) -> None:
            with path.open("rb") as file:
                found = [zlib.crc32(file.read(size)) for size in sizes]
                if found != [*checksums] or file.read(1):
                    raise ValueError("the checksums are not those of index.json")

        with locked(self.folder / f"{name}.lock"):
            path = self.folder / name
            there = path.exists() and path.stat().st_size == sum(sizes)
            if not there and not fetch_file(f"{self.url}/{name}", path, check, optional=True):
                raise UserError(
                    f"{self.url} has no file {name!r}; run `python -m data_tools.index` where the shards are, and "
                    f"copy every file that it writes to the URL too"
                )


def start_fetchers() -> "SimpleQueue[Callable[[], None]]":
    """Start threads that call the functions put into the returned queue, each of which fetches a shard. If a fetch
    fails, the reader of its shard reports why."""
    wanted: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            fetch = wanted.get()
            try:
                fetch()
            except Exception as error:
                LOG.info(f"a shard could not be fetched ahead of its use: {error}")

    for _ in range(FETCHERS):
        threading.Thread(target=work, daemon=True).start()
    return wanted


def find_remote(url: str, cache: Cache) -> list[Remote]:
    """Return the source at a URL, or the sources one level below it, sorted by name. Raises OSError or UserError."""
    try:
        import fsspec

        file_system, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
        raise UserError(f"--data {url}: {error}") from None
    cache.folder.mkdir(parents=True, exist_ok=True)
    if found := find_one(url, cache):
        return [found]

    def list_folders() -> list[str]:
        try:
            entries = file_system.ls(path, detail=True, refresh=True)
        except (FileNotFoundError, NotADirectoryError, NotImplementedError):
            return []
        names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in names)

    names = retry(url, lambda _: call_unless_stalled(list_folders))
    return [found for name in names if (found := find_one(f"{url}/{name}", cache))]


def find_one(url: str, cache: Cache) -> Remote | None:
    """Return the source at a URL, after its index.json is cached; None if it has no index.json. Raises OSError."""

    def check(path: Path) -> None:
        again = path.with_name("again")
        download(f"{url}/index.json", again)
        if (answer := path.read_bytes()) != again.read_bytes():
            raise ValueError("two downloads of index.json differ")
        json.loads(answer)

    with tempfile.TemporaryDirectory(dir=cache.folder) as folder:
        index = Path(folder) / "index.json"
        if not fetch_file(f"{url}/index.json", index, check, optional=True):
            return None
        place = cache.folder / f"{url.rpartition('/')[2]}-{sha256_file(index)[:16]}"
        place.mkdir(exist_ok=True)
        os.replace(index, place / "index.json")  # an existing one has the same bytes
    return Remote(url, place, cache)


def fetch_file(
    url: str, path: Path, check: Callable[[Path], None], optional: bool = False, field: str = "data.cache"
) -> bool:
    """Fetch a file. check: raises an error if the downloaded file is damaged. optional: return False if the server has
    no such file. field: the recipe field of the local folder, for messages. Raises OSError if all attempts fail."""

    def attempt(number: int) -> bool:
        partial_path = path.with_name(f"{path.name}.{number}{PARTIAL}")  # a stalled attempt may still write
        try:
            download(url, partial_path)
            check(partial_path)
            os.replace(partial_path, path)
        except FileNotFoundError:
            if optional:
                return False
            raise
        finally:
            partial_path.unlink(missing_ok=True)
        return True

    return retry(url, attempt, f"{path.parent} ({field})")


def retry(url: str, attempt: Callable[[int], Found], folder: str = "") -> Found:
    """Call `attempt` with the numbers 1, 2, ... until it succeeds, and return its value. folder: where it writes.
    Raises OSError if TRIES attempts have failed, and UserError if the server refuses access."""
    for number in range(1, TRIES + 1):
        try:
            return attempt(number)
        except Exception as error:  # each file system has errors of its own
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise OSError(error.errno, error.strerror, folder) from None
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, PermissionError) or getattr(error, "status", None) in REFUSED:
                hint = "give credentials in fsspec's configuration"
                raise UserError(f"{url}: the server refuses access ({problem}); {hint}") from None
        if number < TRIES:
            wait = FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.5, 1.5)
            LOG.warning(f"{url}: try {number} of {TRIES} failed ({problem}); the next try is in {wait:.1f} s")
            time.sleep(wait)
    raise OSError(errno.EREMOTEIO, f"it could not be fetched in {TRIES} tries ({problem})", url)


def download(url: str, path: Path) -> None:
    """Download a file to a path, unchecked. Raises the file system's errors, or TimeoutError after STALL seconds."""
    import fsspec

    if url.startswith("http"):
        import aiohttp

        # The default is 5 minutes for a whole file.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=2 * STALL)
        for protocol in ("http", "https"):
            of_protocol = fsspec.config.conf.setdefault(protocol, {})
            of_protocol.setdefault("client_kwargs", {}).setdefault("timeout", timeout)

    def copy() -> None:
        file_system, remote_path = fsspec.url_to_fs(url)
        file_system.get_file(remote_path, str(path))

    call_unless_stalled(copy, lambda: path.stat().st_size if path.exists() else 0)


def call_unless_stalled(do: Callable[[], Found], progress: Callable[[], Any] = lambda: None) -> Found:
    """Call `do` in a thread, and return its value. If the value of `progress` stays the same for STALL seconds, raise
    TimeoutError and leave the thread running."""
    done: Future[Found] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    before = progress()
    while True:
        try:
            return done.result(timeout=STALL)
        except TimeoutError:
            if done.done() or before == (now := progress()):
                raise TimeoutError(f"no data came for {STALL:g} s") from None
            before = now


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context that only one thread of one process of this machine can enter at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
