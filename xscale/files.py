"""Writes files and folders so that they are either complete or absent: they are written under another name, synced and
renamed. It also has locks of directories, and other helpers for files."""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from xscale.errors import DirectoryTaken, UserError

Value = TypeVar("Value")
PARTIAL = ".incomplete"
"""The suffix of a file or folder while it is being written or removed."""
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
LOCK = "lock"
LOCK_SECONDS = 20
"""The seconds for which a start waits for a previous run's lock, since ranks may outlive a killed launcher."""
THREADS = 32
"""The number of threads of `map_in_threads`."""
FEW_CALLS = 8
SLOW_CALL = 3e-4
"""`map_in_threads` uses threads after FEW_CALLS calls that take SLOW_CALL seconds or more on average."""
WEB_PAGE = "is a web page instead of the file, perhaps an error page of the server. Download the file again"
SERVER_ERROR = "has an error message of the server instead of the file's content. Download the file again"
PLACEHOLDERS = {
    b"version https://git-lfs": "is a pointer of Git LFS instead of the file. Run `git lfs pull` in the repository",
    b"/annex/objects/": "is a pointer of git-annex instead of the file. Run `git annex get` in the repository",
    b"<!doctype html": WEB_PAGE,
    b"<html": WEB_PAGE,
    b"<error><code>": "has an error message of an object store instead of the file's content. Download the file again",
    b"404: not found": SERVER_ERROR,
    b"entry not found": SERVER_ERROR,
}
"""Downloads and clones may leave something else in the place of a file. Its first bytes, in lower case -> what it is,
and the remedy."""
HEAD_BYTES = 512
"""The number of bytes of a file in which `describe_placeholder` looks."""


def describe_placeholder(head: bytes) -> str | None:
    """Return what was found in the place of a file's content, with the remedy, such as "is a pointer of Git LFS ...",
    or None. head: the file's first bytes, before any decompression."""
    start = head[:HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"<?xml"):
        start = start.partition(b"?>")[2].lstrip()
    for beginning, problem in PLACEHOLDERS.items():
        if start.startswith(beginning):
            return problem
    return None


def describe_empty_or_placeholder(path: Path, *patterns: str) -> str | None:
    """Return a message if a file is empty, or has a pointer or an error page in the place of its content:
    "model/model.safetensors is a pointer of Git LFS ...". Return None if there is no such file.

    patterns: patterns of names in the folder `path`, which are looked at in this order. Without them, `path` is the
    file. Pipes and devices are not read.
    """
    paths = [] if patterns else [path]
    for pattern in patterns:
        paths += sorted(path.glob(pattern))
    for file in paths:
        if file.is_file():
            with suppress(OSError), file.open("rb") as opened:
                head = opened.read(HEAD_BYTES)
                problem = describe_placeholder(head) if head else "is empty. Copy or download the file again"
                if problem:
                    return f"{file} {problem}"
    return None


def map_in_threads(function: Callable[..., Value], *items: Sequence[Any]) -> list[Value]:
    """Return list(map(function, *items)). As soon as calls are slow, because they wait for a network's file system,
    threads make all later calls. For the fast calls of a local disk, threads would only take time."""
    results = list[Value]()
    is_slow = False
    while not is_slow and len(results) < len(items[0]):
        begin = time.perf_counter()
        few = slice(len(results), len(results) + FEW_CALLS)
        results += map(function, *(item[few] for item in items))
        is_slow = time.perf_counter() - begin >= FEW_CALLS * SLOW_CALL
    left = [item[len(results) :] for item in items]
    with ThreadPoolExecutor(THREADS) as pool:
        results += pool.map(function, *left)
    return results


@contextmanager
def atomic_write(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield a temporary path. The file or directory that is written there then replaces `path` (an existing directory
    only if it is empty), unless an exception is raised. writer: a name that no other process has, if several processes
    may write `path` at the same time; it becomes a part of the temporary path."""
    partial = checked_partial_path(path)
    if writer:
        partial = path.with_name(f"{path.name}.{writer}{PARTIAL}")
    remove(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        rename_into_place(partial, path)
    except BaseException as error:
        remove(partial)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # errors of writes do not name the file
        if rust_errno := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(rust_errno[1]), os.strerror(int(rust_errno[1])), str(path)) from None
        raise


def checked_partial_path(path: Path) -> Path:
    """Return the temporary path at which `path` is written before it is renamed. Raises UserError if `path` is `.`,
    `..`, a link to no file, or a device, and OSError for a loop of links."""
    if path.name in ("", ".."):
        raise UserError(
            f"{str(path)!r} does not end in the name of a file or folder. Choose the name of a new file or folder"
        )
    if path.is_symlink() and not path.is_file():
        with suppress(FileNotFoundError):
            path.stat()  # a loop raises OSError here, and RuntimeError in path.resolve()
        raise UserError(f"{path} is a symbolic link. Use the target of the link instead: {path.resolve()}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a device or a pipe, not a file. Choose another output")
    return path.with_name(path.name + PARTIAL)


def rename_into_place(partial: Path, path: Path) -> None:
    """Rename `partial`, which several processes may have written together, to `path`."""
    if not partial.is_dir():
        fsync_file_or_directory(partial)
    elif path.is_dir():
        path.rmdir()
    os.replace(partial, path)
    fsync_file_or_directory(path.parent)


def check_writable_and_make_parent(path: Path) -> None:
    """Raise UserError if `atomic_write` could not write `path`, or if its suffix means compression."""
    checked_partial_path(path)
    if path.suffix in COMPRESSED:
        raise UserError(
            f"{path}: xscale writes this file without compression. Leave {path.suffix} out of the name, and "
            "compress the file afterwards"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({path.parent}: {error.strerror}). Choose another folder") from None


def check_output_file_and_make_parent(path: Path) -> None:
    """Raise UserError if `path`, the value of --out, cannot be written as a file. Its folder is made."""
    if path.is_dir():
        raise UserError(f"--out {path} is a directory. Choose a file")
    check_writable_and_make_parent(path)


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file. A kill at any moment leaves the old content or the new."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Lock:
    """A lock on a directory for as long as this object lives. Raises DirectoryTaken if another process has it."""

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self.file = self.path.open("a+")
        self.problem = ""
        """Why the lock does not work, or an empty string."""
        deadline = time.monotonic() + LOCK_SECONDS
        while not self._try_acquire():
            if time.monotonic() >= deadline:
                self.file.seek(0)
                owner = self.file.readline().strip()
                raise DirectoryTaken(
                    f"another process ({owner}) is training the run in {folder}. Stop the other process first"
                )
            time.sleep(1)
        self.text = f"host {os.uname().nodename}, process {os.getpid()}\n{os.urandom(8).hex()}\n"
        self.file.truncate(0)
        self.file.write(self.text)
        self.file.flush()

    def _try_acquire(self) -> bool:
        """Try to lock, and return False if another process holds the lock."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            folder = self.path.parent
            self.problem = (
                f"the file system of {folder} has no file locks ({error.strerror}), so xscale cannot notice if the "
                f"same run is started twice. Never start the run in {folder} while it is already running"
            )
        return True

    def check_not_taken_over(self) -> None:
        """Raise DirectoryTaken if another process has the directory. This can happen if the directory was removed and
        made again, or has no locks."""
        try:
            text = self.path.read_text()
        except (OSError, ValueError):  # the file was removed, or is not readable at the moment
            return
        if text.count("\n") == 2 and text != self.text:
            raise DirectoryTaken(
                f"{self.path.parent}: another process ({text.splitlines()[0]}) now writes to this folder. Either "
                "the folder was removed and made again, or its file system has no locks. This run ends and writes "
                f"nothing more to {self.path.parent}"
            )


def check_link_is_not_broken(path: Path) -> None:
    """Raise UserError if the path is a symbolic link to nothing."""
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path} is a symbolic link to {path.readlink()}, which does not exist. Restore {path.readlink()}, or "
            "remove the link"
        )


def list_visible_files_recursively(folder: Path) -> list[Path]:
    """Return the files in a folder and in the folders below it, sorted, without hidden ones. Symbolic links are
    followed, and a folder to which several links lead is read once. Raises UserError for a link to nothing, and
    OSError for a folder that cannot be read: without these errors, a part of a text would be lost."""

    def fail(error: OSError) -> None:
        raise error

    paths = list[Path]()
    seen = set[tuple[int, int]]()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(place, name)
            if name.startswith("."):
                continue
            check_link_is_not_broken(path)
            if path.is_file():
                paths.append(path)
    return sorted(paths)


def exists_or_is_hub_name(path: Path | str) -> bool:
    """Return whether the path exists or may be a hub name (NAME, or OWNER/NAME if there is no folder OWNER)."""
    has_folder = len(Path(path).parts) > 1 and Path(path).parent.exists()
    looks_like_name = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(path)) is not None
    return Path(path).exists() or (looks_like_name and not has_folder)


def apply_umask_recursively(folder: Path) -> None:
    """Give a folder and its contents the modes of the umask, because only the owner can read files that safetensors
    writes."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def fsync_file_or_directory(path: Path) -> None:
    """Sync a file's content, or a directory's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ends_and_entries_backwards(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of lines from the last to the first, each with the offset at which its line ends.
    Lines that are incomplete, or have no step, are left out."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        entry: Any = None
        with suppress(ValueError, RecursionError):
            entry = json.loads(data[start:end])
        # Numbers of more than 308 digits are no floats, so that math.isfinite would raise an error.
        if isinstance(entry, dict) and type(entry.get("step")) in (int, float) and abs(entry["step"]) < math.inf:
            yield end, entry
        end = start
