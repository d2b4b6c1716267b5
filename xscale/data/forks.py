"""Forks of a process whose native threads run on.

Python 3.11 does not hold the lock of its list of threads when it forks. Where a thread of a library is just asking for
the GIL, and so in that list (as one that torch made did here), the child waits for the lock for ever, inside of fork
(PyOS_AfterFork_Child, _PyThreadState_DeleteExcept), and its parent for the child's records. On a busy machine one start
in some hundreds hung so.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

BEGIN_SECONDS = 20
"""A child that takes longer to come out of its fork is replaced by another."""


@contextmanager
def children_that_begin() -> Iterator[None]:
    """A context in which os.fork returns to the parent once the child has come out of it too."""
    with mock.patch.object(os, "fork", partial(_fork, os.fork)):
        yield


def _fork(fork: Callable[[], int]) -> int:
    while True:
        ours, theirs = os.pipe()
        pid = fork()
        if not pid:
            os.close(ours)
            os.write(theirs, b".")
            os.close(theirs)
            return pid
        os.close(theirs)
        said = select.poll()  # select.select ends at 1,024 open files
        said.register(ours, select.POLLIN)
        begun = said.poll(1000 * BEGIN_SECONDS)
        if not begun:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ours)
        if begun:
            return pid
