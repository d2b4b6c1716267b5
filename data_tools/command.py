"""Runs a tool as a command."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from xscale.errors import (
    READER_ENDED,
    MachineError,
    UserError,
    check_arguments,
    escape_unprintable,
    flush_output,
    print_error_or_reraise,
    stdout_reader_has_ended,
)


def run_tool_and_exit(main: Callable[[], None]) -> None:
    """Run a tool and exit. An error is printed as one line. Exit codes: 2 for a user's error, 4 if the machine
    failed."""
    escape_unprintable()
    code = 0
    try:
        check_arguments(sys.argv[1:])
        main()
        flush_output()
    except BrokenPipeError:
        if not stdout_reader_has_ended():
            raise
        os._exit(READER_ENDED)  # a normal exit would fail to write the rest of the output
    except (UserError, MachineError, OSError) as error:
        code = print_error_or_reraise(error)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def check_new_folder(out: Path) -> None:
    """Raise UserError unless `out` is absent or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder. Choose another --out, or remove {out}")
