"""The planner: a process that plans steps ahead of the loader, once for all ranks of a node.

The planner and the loader's workers are forked from a process that has native threads. Python 3.11 does not take the
lock of its list of threads when it forks. If a thread of a library, such as torch, holds this lock at that moment, the
child waits for it for ever, inside of fork (PyOS_AfterFork_Child, _PyThreadState_DeleteExcept), and the parent waits
for the child's records. So some runs on a busy machine hung at their start. `retry_hung_forks` repeats such a fork.
"""

import atexit
import ctypes
import errno
import multiprocessing
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from xscale.data.mixture import Mixture, Plan
from xscale.data.shards import Source
from xscale.errors import ENVIRONMENT_ERRNOS, RankError, UserError
from xscale.ranks import CpuGroup

FETCHERS = 4
"""The number of threads of the planner that fetch remote shards before they are read."""
Failure = RankError | OSError
"""An error that a worker or planner process sends to the main process, which raises it."""
Plans = Iterator[Plan | Failure]
"""This rank's part of the plan of each step, or a failure in its place."""


def failure_or_raise_bug(error: UserError | OSError, message_start: str = "") -> Failure:
    """Return the failure for an error that a user can mend, such as a full disk. Raise any other error, because it is a
    bug. message_start: the beginning of the message of a UserError."""
    if isinstance(error, UserError):
        return RankError(f"{message_start}{error}")
    if error.errno not in {*ENVIRONMENT_ERRNOS, errno.ENOMEM}:
        raise error
    return OSError(error.errno, error.strerror, error.filename or "a file")


class Node(NamedTuple):
    """The ranks of one node. One planner makes the plans of all these ranks. The first of the ranks starts it."""

    rank_count: int
    address: bytes
    """The name of the planner's socket. It is an abstract socket of Linux, which leaves no file when processes are
    killed."""
    listener: socket.socket | None
    """The listening socket; None on all ranks of the node but the first."""


def gather_node_and_listen(cpu_group: CpuGroup) -> Node:
    """Return this rank's node. All ranks of `cpu_group` call it together."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux chooses a name
    listener.listen()
    host = (Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/net").st_ino)
    ranks = list[int]()
    addresses = list[bytes]()
    for rank, (host_of_rank, address) in enumerate(cpu_group.all_gather((host, listener.getsockname()))):
        if host_of_rank == host:
            ranks.append(rank)
            addresses.append(address)
    if cpu_group.rank == ranks[0]:
        return Node(len(ranks), addresses[0], listener)
    listener.close()
    return Node(len(ranks), addresses[0], None)


def start_planner(mixture: Mixture, steps: int, node: Node) -> Plans:
    """Return this rank's parts of the plans of the next steps.

    A background process, the planner, makes them before they are needed, until the buffers of its connections are full.
    So a step need not wait while the records of a new window are ordered. node: the ranks that share one planner.
    """
    planner = None
    if node.listener:
        planner = multiprocessing.Process(target=_run_planner, args=(mixture, steps, node), name="planner", daemon=True)
        with retry_hung_forks():
            planner.start()
        atexit.register(planner.kill)
        node.listener.close()  # so that the connection ends when the planner ends
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(node.address)
        connection = Connection(client.detach())
        connection.send_bytes(str(mixture.rank).encode())
    except ConnectionError:
        raise _planner_death_error(planner) from None
    return _received_plans(planner, connection, steps, shared=node.rank_count > 1)


def _accept_connections(node: Node) -> dict[int, Connection]:
    """Return a connection to each rank of the node, by rank, when all of them have connected."""
    connections: dict[int, Connection] = {}
    assert node.listener
    with node.listener as listener:
        while len(connections) < node.rank_count:
            client, _ = listener.accept()
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] == os.getuid():
                connection = Connection(client.detach())
                connections[int(connection.recv_bytes())] = connection
    return connections


def _received_plans(planner: multiprocessing.Process | None, connection: Connection, steps: int, shared: bool) -> Plans:
    """Yield the plans that the planner sends. planner: the planner's process, if this rank has started it. connection:
    this rank's connection to the planner. shared: whether other ranks get plans from the planner, too."""
    left = steps
    try:
        while left:
            if planner and planner.exitcode:  # the planner has died, and the last plan may be cut off
                raise EOFError
            plan = connection.recv()
            left -= 1
            yield plan
            if isinstance(plan, Failure):
                return
    except (EOFError, ConnectionResetError):
        raise _planner_death_error(planner) from None
    finally:
        if planner and (left or not shared):
            atexit.unregister(planner.kill)
            planner.kill()
            planner.join()
        connection.close()


def _planner_death_error(planner: multiprocessing.Process | None) -> RuntimeError:
    """Return the error that says how the planner has ended. planner: its process, if this rank has started it."""
    how = "has ended. It was started by another rank of this node"
    if planner:
        planner.join()
        code = planner.exitcode or 0
        how = f"was killed by signal: {signal.strsignal(-code)}" if code < 0 else f"has ended (exit code {code})"
    return RuntimeError(f"the process that plans the steps {how}")


def _run_planner(mixture: Mixture, steps: int, node: Node) -> None:
    """The main function of the planner: send each rank its part of the plan of each step."""
    ignore_signals_and_die_with_parent()
    connections = _accept_connections(node)

    def send(items: Sequence[Plan | Failure]) -> None:
        for rank, item in zip([*connections], items, strict=True):
            try:
                connections[rank].send(item)
            except (BrokenPipeError, ConnectionResetError):  # this rank has ended
                del connections[rank]

    requested = set[tuple[Source, int]]()
    fetchers = ThreadPoolExecutor(FETCHERS)
    try:
        for _ in range(steps):
            for source, shard in mixture.remote_shards_needed_soon():
                if (source, shard) not in requested:
                    requested.add((source, shard))
                    fetchers.submit(source.fetch_shard, shard)  # the reader of the shard reports a failure
            send(mixture.next_plan().parts_of_ranks([*connections]))
    except (UserError, OSError) as error:
        send([failure_or_raise_bug(error)] * len(connections))
    finally:
        fetchers.shutdown(wait=False, cancel_futures=True)


def ignore_signals_and_die_with_parent() -> None:
    """Ignore the signals on which the trainer stops, because only the trainer decides when to stop. Let the kernel kill
    this process when the trainer dies."""
    with suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


BEGIN_SECONDS = 20
"""The seconds after which a child that has not returned from fork is killed, and the fork is repeated."""


@contextmanager
def retry_hung_forks() -> Iterator[None]:
    """Return a context in which os.fork returns in the parent after it has returned in the child."""
    with mock.patch.object(os, "fork", partial(_fork_with_retries, os.fork)):
        yield


def _fork_with_retries(fork: Callable[[], int]) -> int:
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
