"""What a user can cause, told to the user."""

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


class UserError(ValueError):
    """Names the file, the value and the remedy; ends the program with exit code 2 and no traceback."""


_OF_MACHINE = (
    *("ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EACCES", "EPERM", "EMFILE", "ENFILE", "EADDRINUSE"),
    *("ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP"),  # a folder that is gone, or a path that is none
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


class RankError(UserError):
    """A UserError that this rank alone has seen, such as a damaged record of its share."""


def of_machine(error: OSError) -> int:
    """Of a command: says what a file system answers, and returns exit code 4; raises what is a fault of ours."""
    if error.errno not in OF_MACHINE:
        raise error
    print(f"error: {error.filename or 'a file'}: {error.strerror}; mend that and start again", file=sys.stderr)
    return 4


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
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def number_of(variable: str, default: int) -> int:
    """A launcher's variable. Raises UserError."""
    value = os.environ.get(variable) or str(default)
    if not value.strip().isdecimal():
        raise UserError(f"{variable}={value!r} in the environment is no number; unset it, or let the launcher set it")
    return int(value)
