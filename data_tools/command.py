"""Runs a tool as a command."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from xscale.errors import (
    ENVIRONMENT_ERRNOS,
    READER_ENDED,
    MachineError,
    UserError,
    check_arguments,
    escape_unprintable,
    flush_output,
    reader_has_ended,
)


def run(main: Callable[[], None]) -> None:
    """Run a tool and exit. An error is printed as one line. Exit codes: 2 for a user's error, 4 if the machine
    failed."""
    escape_unprintable()
    code = 0
    try:
        check_arguments(sys.argv[1:])
        main()
        flush_output()
    except BrokenPipeError:
        if not reader_has_ended():
            raise
        os._exit(READER_ENDED)  # a normal exit would fail to write the rest of the output
    except UserError as error:
        code = 2
        print(f"error: {error}", file=sys.stderr)
    except MachineError as error:
        code = 4
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        code = 4 if error.errno in ENVIRONMENT_ERRNOS else 2
        print(
            f"error: {error.filename or 'a file'}: {error.strerror or error}. Remove the cause of the error, then "
            "start the command again",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def check_new_folder(out: Path) -> None:
    """Raise UserError unless `out` is absent or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder. Choose another --out, or remove {out}")
