"""What a user can cause, told to the user."""

import errno
import faulthandler
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

TOOLS = "xscale.data_tools" if (Path(__file__).parent / "data_tools").is_dir() else "data_tools"
"""The package of the tools: where a wheel has it, or in a checkout."""


class UserError(ValueError):
    """Names the file, the value and the remedy; ends the program with exit code 2 and no traceback."""

    def __str__(self) -> str:
        return super().__str__().replace("python -m data_tools.", f"python -m {TOOLS}.")


_OF_MACHINE = (
    *("ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EACCES", "EPERM", "EMFILE", "ENFILE", "EADDRINUSE"),
    *("ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "EEXIST"),  # a folder that is gone, a path that is none
    *("ETIMEDOUT", "ENODEV", "ENXIO", "ENOTCONN", "EHOSTDOWN", "EREMOTEIO", "EBUSY"),  # a server, or a device
)
OF_MACHINE = {getattr(errno, name) for name in _OF_MACHINE}
"""What a file system or a network may answer to a program that does nothing wrong."""


class NotFinite(Exception):
    """A run whose loss or gradients are no numbers any more; all ranks raise it together. Exit code 3."""

    def __init__(self, message: str, step: int = 0, good: int | None = None):
        """step: whose update a run that goes back leaves out, 1 for the first. good: step of the newest checkpoint from
        before any of it."""
        super().__init__(message)
        self.step, self.good = step, good


class MachineError(Exception):
    """What the machine does to a program that does nothing wrong, with the remedy. Exit code 4."""


class Replaced(UserError):
    """Of a run whose directory another has: it must not write there, also not why it ends."""


class RankError(UserError):
    """A UserError that this rank alone has seen, such as a damaged record of its share."""


@contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Within, sys.exit is a fault: a run that it ends would look as if it were done."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{what} called sys.exit({'' if error.code is None else repr(error.code)})") from error


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """An error from within says whose it is, such as a plug-in's."""
    try:
        with no_exit(what):
            yield
    except Exception as error:
        error.add_note(what)
        raise


def is_environment_error(error: OSError) -> int:
    """Of a command: says what a file system answers, and returns exit code 4; raises what is a fault of ours."""
    if error.errno not in OF_MACHINE:
        raise error
    print(f"error: {error.filename or 'a file'}: {error.strerror}; mend that and start again", file=sys.stderr)
    return 4


def printable(text: str) -> str:
    """The text with control characters, but for line ends and tabs, as their numbers: a terminal would obey them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def check_arguments(words: list[str]) -> None:
    """Of a command line: raises UserError for an empty one, as of a variable that is unset, and for one that is not
    UTF-8, which no file of ours could name."""
    for before, word in zip(["", *words], words, strict=False):
        if not word or (word.startswith("--") and word.endswith("=")):
            raise UserError(f"{word or before} is empty; is a variable unset?".strip())
        if not can_be_encoded(word):
            raise UserError(f"{word!r} is not UTF-8; rename it, or set the locale that it is in")


def can_be_encoded(text: str) -> bool:
    """Whether it has no half of a character, as paths and JSON may have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def print_anything() -> None:
    """What a console's locale has no character for is printed as a number, instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run_command(main: Callable[[], int]) -> NoReturn:
    """End the process with the code that `main` returns; with 1 and a traceback where it raises.

    Without the interpreter's own way out: threads of libraries now and then abort it after a good run, and tearing down
    a process group may wait for other ranks.
    """
    print_anything()
    failed = ""
    try:
        code = main()
    except Exception:
        code, failed = 1, traceback.format_exc()
    try:  # both streams may be on a disk that is full, or closed
        sys.stderr.write(failed)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def number_of(variable: str, default: int) -> int:
    """A launcher's variable. Raises UserError."""
    value = os.environ.get(variable) or str(default)
    if not value.strip().isdecimal():
        raise UserError(f"{variable}={value!r} in the environment is no number; unset it, or let the launcher set it")
    return int(value)


def hold_signals() -> None:
    """Keep SIGUSR2 pending, where run/watch.py sees it, for this process and all that it starts.

    SLURM sends it to every process of a job: it would end one that is still importing, or a compiler. SIGUSR1, which
    asks for stacks, writes them to the console until the rank has its log.
    """
    faulthandler.register(signal.SIGUSR1, 2)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
