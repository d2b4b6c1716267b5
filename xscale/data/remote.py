"""Sources at a URL. fsspec copies whole files into a folder, the cache, that all processes of this machine share.

Each source has a folder in the cache. A hash of the source's index.json is part of the folder's name. The folder has
the files of the source's directory, except .idx files. A file gets its final name only if its size and checksums are
those of index.json. So a damaged answer of a server, and a killed process, do no harm. fsspec's own `filecache`
downloads to the final name, compares no hash, and does not share files between processes; so only fsspec's `get_file`
is used.
"""

import errno
import fcntl
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from xscale import files
from xscale.errors import LOG, UserError, redact

TRIES = 7
"""The number of attempts to download a file."""
FIRST_WAIT = 0.5
"""The seconds to wait before the second attempt. The wait doubles before each further attempt."""
STALL = 60.0
"""An attempt over HTTP fails after this many seconds without a new byte. Other protocols have their own limits."""
# A forked process must not collect the HTTP sessions that its parent left: to close each, fsspec would wait a second
# for the parent's event loop, which does not run there.
os.register_at_fork(after_in_child=gc.freeze)


def parse_location(text: str) -> Path | str:
    """Return a value of --data: a URL as a string, because a Path would change "//" to "/", and a directory as a
    Path."""
    return text.rstrip("/") if "://" in text else Path(text)


def cache_folder(setting: str | None) -> Path:
    """Return the folder of the cache. setting: the value of data.cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "xscale")
    return Path(setting or default).absolute()


@dataclass(frozen=True)
class Remote:
    """A source at a URL, and its folder in the cache."""

    url: str
    folder: Path

    def fetch(self, name: str, size: int, is_download_whole: Callable[[Path], bool], damaged_inode: int = 0) -> None:
        """Fetch a file of the source, unless it is in the cache. Other processes that need the file wait. size: the
        file's size in bytes. is_download_whole: returns True if a downloaded file of this size has the checksums of
        index.json. damaged_inode: the inode of a file that this process has found damaged. The file is replaced if it
        is still in the cache. Raises OSError, and UserError if the protocol of the URL is unknown."""
        path = self.folder / name

        def is_cached() -> bool:
            with suppress(FileNotFoundError):
                status = path.stat()
                return status.st_size == size and status.st_ino != damaged_inode
            return False

        def check_received(_: int | None, received: int) -> None:
            if received > size:
                raise ValueError(f"the server sends more than {size:,} bytes, the size of the file in index.json")

        def copy(file_system: Any, remote_path: str) -> None:
            with files.atomic_write(path) as partial:
                file_system.get_file(remote_path, str(partial), callback=Callback(hooks={"size": check_received}))
                if partial.stat().st_size != size or not is_download_whole(partial):
                    raise ValueError("the size or checksum of the file differs from index.json")

        if not is_cached():
            with locked(self.folder / f"{name}.lock"):
                if not is_cached():  # another process may have fetched it meanwhile
                    call_with_retries(f"{self.url}/{name}", copy)


def fetch_remote_index(url: str, cache: Path) -> Remote:
    """Fetch the index.json of the source at a URL, and return the source. cache: the folder of the cache. Raises
    OSError; UserError if there is no index.json, or no such protocol."""
    try:
        index = call_with_retries(f"{url}/index.json", lambda file_system, path: file_system.cat_file(path))
    except FileNotFoundError:
        raise UserError(
            f"--data {redact(url)}: there is no index.json at this URL. Pass the URLs of folders of shards to --data, "
            "and copy all files of these folders to the server"
        ) from None
    remote = Remote(url, cache / f"{url.rpartition('/')[2]}-{hashlib.sha256(index).hexdigest()[:16]}")
    remote.folder.mkdir(parents=True, exist_ok=True)
    path = remote.folder / "index.json"
    with locked(remote.folder / "index.json.lock"):
        if not path.exists():  # the folder's name has the hash, so an existing file has the same bytes
            with files.atomic_write(path) as partial:
                partial.write_bytes(index)
    return remote


def call_with_retries(url: str, call: Callable[[Any, str], Any]) -> Any:
    """Return the value of call(file system of the URL, path in it). If it fails, call it again, TRIES times in all.
    Three errors are raised at once: FileNotFoundError if the server has no such file, OSError if the disk is full, and
    UserError if there is no such protocol. Raises OSError, too, if all attempts fail."""
    problem = ""
    for number in range(TRIES):
        if number:
            LOG.warning(f"{redact(url)}: attempt {number} of {TRIES} to download this file failed ({problem})")
            time.sleep(FIRST_WAIT * 2 ** (number - 1))
        try:
            return call(*open_file_system(url))
        except FileNotFoundError:
            problem = "the server does not have this file. Copy the whole folder of shards to the server"
            raise FileNotFoundError(errno.ENOENT, problem, redact(url)) from None
        except Exception as error:  # each file system raises its own errors
            is_disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_disk_full or isinstance(error, UserError):
                raise
            problem = redact(f"{type(error).__name__}: {error}".splitlines()[0])
    raise OSError(errno.EREMOTEIO, f"the file could not be downloaded in {TRIES} attempts ({problem})", redact(url))


def open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. Raises UserError if there is no such protocol."""
    options = {}
    try:
        if url.startswith(("http://", "https://")):
            import aiohttp

            # By default, an attempt ends after 300 seconds in all, however large the file is.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL)
            configured = fsspec.config.apply_config(fsspec.get_filesystem_class("http"), {})
            options["client_kwargs"] = {"timeout": timeout} | configured.get("client_kwargs", {})
        return fsspec.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
        raise UserError(
            f"--data {redact(url)}: the URL cannot be opened ({error}). Correct the URL, or install the package "
            "for the protocol of the URL"
        ) from None


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Return a context that only one thread of this machine can enter at a time. Raises OSError if `lock_file`
    is a link, because a link may lead to any file."""
    fd = os.open(lock_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
