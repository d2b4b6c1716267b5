"""Runs a tool as a command."""

import sys
from collections.abc import Callable

from xscale.errors import ENVIRONMENT_ERRNOS, MachineError, UserError, check_arguments, escape_unprintable


def run(main: Callable[[], None]) -> None:
    """Run a tool and exit. A UserError is printed, with exit code 2; an error of the machine exits with 4."""
    escape_unprintable()
    code = 0
    try:
        check_arguments(sys.argv[1:])
        main()
    except UserError as error:
        code = 2
        print(f"error: {error}", file=sys.stderr)
    except MachineError as error:
        code = 4
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        code = 4 if error.errno in ENVIRONMENT_ERRNOS else 2
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
