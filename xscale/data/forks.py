"""Safe forks of a process that has native threads.

Python 3.11 does not take the lock of its list of threads when it forks. If a thread of a library, such as torch, holds
this lock at that moment, the child waits for it for ever, inside of fork (PyOS_AfterFork_Child,
_PyThreadState_DeleteExcept), and the parent waits for the child's records. So some runs on a busy machine hung at their
start.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

BEGIN_SECONDS = 20
"""The seconds after which a child that has not returned from fork is killed, and the fork is repeated."""


@contextmanager
def safe_forks() -> Iterator[None]:
    """Return a context in which os.fork returns in the parent after it has returned in the child."""
    with mock.patch.object(os, "fork", partial(_fork, os.fork)):
        yield


def _fork(fork: Callable[[], int]) -> int:
    while True:
        read_end, write_end = os.pipe()
        pid = fork()
        if not pid:
            os.close(read_end)
            os.write(write_end, b".")
            os.close(write_end)
            return pid
        os.close(write_end)
        poll = select.poll()  # select.select fails beyond 1,024 open files
        poll.register(read_end, select.POLLIN)
        begun = poll.poll(1000 * BEGIN_SECONDS)
        if not begun:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(read_end)
        if begun:
            return pid
