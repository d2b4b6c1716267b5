"""Safe forks of a process that has native threads.

Python 3.11 forks without taking the lock of its list of threads. A thread of a library, such as torch, may hold this
lock at that moment, because it acquires the GIL. Then the child waits forever inside of fork (PyOS_AfterFork_Child,
_PyThreadState_DeleteExcept), and the parent waits for the child's records. On a busy machine, this made some runs hang
at their start.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

BEGIN_SECONDS = 20
"""A child that takes longer to return from fork is killed, and the fork is repeated."""


@contextmanager
def children_that_begin() -> Iterator[None]:
    """A context in which os.fork returns in the parent only after it has returned in the child."""
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
        said = select.poll()  # select.select fails beyond 1,024 open files
        said.register(ours, select.POLLIN)
        begun = said.poll(1000 * BEGIN_SECONDS)
        if not begun:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ours)
        if begun:
            return pid
