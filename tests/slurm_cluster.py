"""A real SLURM on this machine, for tests: a controller and two nodes, in a folder of its own.

    python -m tests.slurm_cluster python -m pytest -m slow tests/test_slurm.py    # runs a command beside one

Needs root and Debian's packages: apt-get install slurm-wlm munge.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("n1", "n2")
CONFIG = """\
ClusterName=xscale
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
PartitionName=all Nodes=ALL Default=YES MaxTime=UNLIMITED State=UP
"""


class Cluster:
    """A running one: `environment` leads SLURM's commands to it."""

    def __init__(self, folder: Path):
        self.folder, self.environment = folder, os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: object) -> str:
        """A command's output."""
        done = subprocess.run([str(word) for word in words], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What the controller says of a job: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "show", "job", number, "-o").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Starts one and, at the end, cancels its jobs and stops it."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        raise RuntimeError(
            f"these tests need root and SLURM ({', '.join(missing) or 'not root'}): `apt-get install slurm-wlm munge`"
        )
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    made = Cluster(folder)
    started: list[subprocess.Popen] = []
    try:
        configure(folder)
        for words in daemons(folder):
            log = (folder / f"{words[0]}.{len(started)}.console.log").open("w")
            options = {"env": made.environment, "stdout": log, "stderr": log}
            started.append(subprocess.Popen(words, start_new_session=True, **options))  # type: ignore[call-overload]
        wait_for(lambda: ready(made), 60, made.logs)
        try:
            yield made
        finally:
            made.run("scancel", "--user=root")
            wait_for(lambda: not made.run("squeue", "-h"), 30, made.logs)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def configure(folder: Path) -> None:
    host, ports = socket.gethostname(), free_ports(1 + len(NODES))
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    text, node = (
        CONFIG.format(host=host, folder=folder, port=ports[0]),
        f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8",
    )
    nodes = [f"NodeName={name} {node} Port={port}\n" for name, port in zip(NODES, ports[1:], strict=True)]
    (folder / "slurm.conf").write_text(text + "".join(nodes))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o711)


def daemons(folder: Path) -> list[list[str]]:
    """Their commands, none of which goes to the background."""
    munge = ["munged", "--foreground", "--force", "--num-threads=2", f"--key-file={folder}/munge.key"]
    munge += [
        f"--{name}={folder}/munge.{end}"
        for name, end in (("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
    ]
    return [munge, ["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in NODES)]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def ready(made: Cluster) -> bool:
    done = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=made.environment, capture_output=True, text=True)
    return done.stdout.split() == ["idle", str(len(NODES))]


def wait_for(condition: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s\n{told()}")
        time.sleep(0.1)


def main() -> int:
    with cluster() as made:
        return subprocess.run(sys.argv[1:], env=made.environment).returncode


if __name__ == "__main__":
    sys.exit(main())
