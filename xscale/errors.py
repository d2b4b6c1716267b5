"""Errors that users or machines cause, and functions by which commands report them."""

import argparse
import errno
import faulthandler
import io
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from xscale.removed import message_if_removed_flag

TOOLS = "xscale.data_tools" if (Path(__file__).parent / "data_tools").is_dir() else "data_tools"
"""The name of the package of the data tools. It differs between a wheel and a checkout."""


LOG = logging.getLogger("xscale")
"""The log of this process. run/run_status.py says where it is written."""
ExitCode = int
"""The exit code of a command, 0 if it has succeeded. docs/reference/run.md lists those of a run."""


READER_ENDED = 128 + signal.SIGPIPE
"""The exit code of a command whose output is no longer read, as in `xscale data inspect DIR | head`."""


LAUNCHERS = {
    *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "torchrun", "torch.distributed.run"),
    *("mpirun", "mpiexec", "orterun", "prterun"),
}
"""The programs and Python modules that start ranks."""


class UserError(ValueError):
    """An error that the user can correct. Its message names the file, the value and the remedy. Exit code 2."""

    def __str__(self) -> str:
        return redact(super().__str__())


URL_SECRETS = re.compile(r"""(?<=://)[^\s/@"'<>]*(?=@)|(?<=[?])[^\s"'<>]*""")
URL = re.compile(r"""[a-zA-Z][\w+.-]*://[^\s"'<>]*""")


def redact(text: str) -> str:
    """Return the text without the user names, passwords and query strings of the URLs in it, which may be secrets."""
    return URL.sub(lambda url: URL_SECRETS.sub("***", url[0]), text)


ENVIRONMENT_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES, errno.EPERM),  # a disk
    *(errno.EMFILE, errno.ENFILE, errno.EADDRINUSE, errno.EFBIG, errno.EAGAIN, errno.ENOLCK),  # limits
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST),  # a wrong path
    *(
        errno.ETIMEDOUT,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EREMOTEIO,
        errno.EBUSY,
    ),
}
"""The error numbers of OSErrors that are taken for a failure of a file system, network or device, not for a bug."""


class NotFinite(Exception):
    """The loss or the gradients of a run are not finite. All ranks raise it together. Exit code 3."""


class MachineError(Exception):
    """The machine has failed, not the program. The message names the remedy. Exit code 4."""


class DirectoryTaken(UserError):
    """Another run has the directory, or has taken it over. This run must not write there, not even why it ends."""


class RankError(UserError):
    """A UserError that occurs on this rank only, such as a damaged record."""


@contextmanager
def sys_exit_as_runtime_error(caller: str) -> Iterator[None]:
    """A context that turns sys.exit, called by `caller`, into a RuntimeError, because a run that exits would look
    complete."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{caller} called sys.exit({'' if error.code is None else repr(error.code)})") from error


@contextmanager
def adding_note_to_errors(note: str) -> Iterator[None]:
    """A context that adds `note`, such as the name of a plug-in, to the errors that are raised in it."""
    try:
        with sys_exit_as_runtime_error(note):
            yield
    except Exception as error:
        error.add_note(note)
        raise


def print_error_or_reraise(error: UserError | MachineError | OSError) -> ExitCode:
    """Print an error that the user or the machine has caused, and return its exit code. Re-raise other errors."""
    if isinstance(error, UserError | MachineError):
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 4
    if error.errno not in ENVIRONMENT_ERRNOS:
        raise error
    place = redact(str(error.filename or "a file"))
    print(
        f"error: {place}: {error.strerror}. Remove the cause of the error, then start the command again",
        file=sys.stderr,
    )
    return 4


def redact_and_escape(text: str) -> str:
    """Return the text as people may see it: without the secrets of URLs, and with control characters escaped (except
    line ends and tabs), because a terminal would obey them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda control: f"\\x{ord(control[0]):02x}", redact(text))


def indent_lines(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def check_arguments(words: list[str]) -> None:
    """Raise UserError if an argument is empty (for example from an unset variable), is not UTF-8, or is a removed
    flag."""
    for before, word in zip(["", *words], words, strict=False):
        if removed := message_if_removed_flag(word):
            raise UserError(removed)
        if not word or (word.startswith("--") and word.endswith("=")):
            place = word or before
            if not place.startswith("-"):
                place = f"the argument after {before or 'the command'}"
            raise UserError(f"{place} is empty, perhaps because a shell variable is not set. Write a value")
        if not can_be_encoded_as_utf8(word):
            raise UserError(
                f"the argument {word!r} is not UTF-8. If the argument is the name of a file, rename the file, or set "
                "LC_ALL to a locale with the encoding of the file name"
            )


def can_be_encoded_as_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode the text. It cannot encode unpaired surrogates, which JSON may have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_unprintable() -> None:
    """Make print escape characters that the console's locale lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what print has buffered. Raises OSError, which a normal exit would only print."""
    if sys.stdout:  # None if the command was started with a closed standard output
        sys.stdout.flush()


def stdout_reader_has_ended() -> bool:
    """Return whether no process reads the standard output any more, as in `xscale data inspect DIR | head`."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def run_command(
    parser: argparse.ArgumentParser, words: list[str] | None, command: Callable[[argparse.Namespace], ExitCode]
) -> ExitCode:
    """Parse the words of a command line, and return the exit code of `command`. An error is printed as one line. words:
    None stands for those of this process."""
    words = sys.argv[1:] if words is None else words
    try:
        check_arguments(words)
        code = command(parser.parse_args(words))
        flush_output()
        return code
    except (UserError, OSError) as error:
        return print_error_or_reraise(error)


def run_and_exit(main: Callable[[], ExitCode]) -> NoReturn:
    """Run `main`, and end this process with the code that it returns, or with 1 and a traceback if it raises.

    The interpreter's normal exit is skipped, because threads of libraries sometimes abort it, and because tearing down
    a process group may wait for other ranks.
    """
    escape_unprintable()
    failed = ""
    try:
        code = main()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and stdout_reader_has_ended():
            code = READER_ENDED
        else:
            code = 1
            failed = redact(traceback.format_exc())
    try:  # the streams may be closed, or on a full disk
        sys.stderr.write(failed)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def env_number(variable: str, default: int) -> int:
    """Return the number in an environment variable, or `default` if it is unset. Raises UserError."""
    value = os.environ.get(variable) or str(default)
    if not value.strip().isdecimal():
        raise UserError(
            f"the environment variable {variable} has the value {value!r}, which is not a whole number. Unset "
            f"{variable}, or let the launcher set {variable}"
        )
    return int(value)


def block_sigusr2_and_trace_on_sigusr1() -> None:
    """Block SIGUSR2 in this process and in all processes that it starts. The signal stays pending until run/watch.py
    reads it.

    SLURM sends SIGUSR2 to every process of a job. If it were not blocked, it would end a process that is still
    importing, or a compiler. SIGUSR1 makes the process write its stacks, to the console until the rank's log is open.
    """
    faulthandler.register(signal.SIGUSR1, 2)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


@cache
def find_launchers() -> list[Any]:
    """Return the programs that started this rank, as they were at the first call, as processes of psutil."""
    import psutil  # only runs need it

    launchers = list[Any]()
    for process in psutil.Process().parents():
        with suppress(psutil.Error):
            if not LAUNCHERS.isdisjoint(Path(word).name for word in process.cmdline()[:4]):
                launchers.append(process)
    return launchers
