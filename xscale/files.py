"""Files that are complete or absent: written beside their place, forced to disk, then moved there."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from xscale.errors import UserError

Found = TypeVar("Found")
PARTIAL = ".incomplete"
"""Suffix of what is being written, or removed."""
LOCK = "lock"
LOCK_SECONDS = 20
"""How long a start waits for the one before it to be gone; a killed launcher may leave ranks for a while."""
FIRST, FAR_SECONDS, THREADS = 8, 3e-4, 32
"""Of side_by_side."""


def side_by_side(look: Callable[..., Found], *items: Sequence[Any]) -> list[Found]:
    """`map` as a list, of looks at files: in threads where the first FIRST take FAR_SECONDS each, as they do across a
    network. On a disk of this machine threads would take longer."""
    begun = time.perf_counter()
    found = [*map(look, *(of[:FIRST] for of in items))]
    others = [of[FIRST:] for of in items]
    if time.perf_counter() - begun < FIRST * FAR_SECONDS or not others[0]:
        return [*found, *map(look, *others)]
    with ThreadPoolExecutor(THREADS) as pool:
        return [*found, *pool.map(look, *others)]


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """A path to write a file or a directory to; where no exception comes, it takes the place of `path`.

    What was at `path` stays until then. A directory there has to be empty.
    """
    partial = beside(path)
    remove(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        move_in(partial, path)
    except BaseException as error:
        remove(partial)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write that fails does not say of what
        raise


def beside(path: Path) -> Path:
    """Where `path` is written. Raises UserError for one without a name of its own, such as `.` and `..`."""
    if path.name in ("", ".."):
        raise UserError(f"{str(path)!r} is no name to write to; choose a new one")
    return path.with_name(path.name + PARTIAL)


def move_in(partial: Path, path: Path) -> None:
    """The last step of `publish`, for what several processes write together."""
    if not partial.is_dir():
        sync(partial)
    elif path.is_dir():
        path.rmdir()
    os.replace(partial, path)
    sync(path.parent)


def check_writable(path: Path) -> None:
    """Before the work: raises UserError where `publish` could not put anything at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({path.parent}: {error.strerror}); choose another place") from None


def write_text(path: Path, text: str) -> None:
    """`text` as the file's content; a kill at any moment leaves the old content or the new."""
    with publish(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """A file, a directory and all in it, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock(folder: Path) -> Any:
    """A lock on a directory that lives as long as the file returned. Raises UserError where another has it."""
    file = (folder / LOCK).open("a+")
    for _ in range(LOCK_SECONDS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(1)
        except OSError:
            return file  # a file system without locks
    else:
        file.seek(0)
        raise UserError(f"{folder} is being trained by another process ({file.read().strip()}); stop it first")
    file.truncate(0)
    file.write(f"host {os.uname().nodename}, process {os.getpid()}")
    file.flush()
    return file


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_speed(folder: Path, size: int = 64 << 20) -> float:
    """Bytes a second that get to disk in a folder, by one process."""
    data = os.urandom(1 << 20)  # a file system may compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        for _ in range(size >> 20):
            file.write(data)
        os.fsync(file.fileno())
        return size / (time.perf_counter() - started)


def nearest_folder(path: Path) -> Path:
    """The path, or what is there of those above it; that may be a link to nothing."""
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path
