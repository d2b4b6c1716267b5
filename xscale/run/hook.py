"""A user's command for each new checkpoint, `checkpoint.hook`, which runs beside the training."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from xscale import ranks
from xscale.config import HOOK_FIELDS
from xscale.run.metrics import LOG

CODE = Path(__file__).resolve().parents[2]
"""The folder of the package that runs."""


class Hook:
    """Starts the command and tells of its failures; the run neither waits for it nor reads what it writes."""

    def __init__(self, command: str | None, out: Path):
        """out: the run's directory."""
        self.command, self.folder = command, out / "evals"
        self.started: list[tuple[int, subprocess.Popen]] = []

    def start(self, step: int, checkpoint: Path) -> None:
        """For a checkpoint that is whole. Rank 0 only."""
        self.look()
        if self.command is None:
            return
        out, log = self.folder / f"step_{step}.json", self.folder / f"step_{step}.log"
        values = {"checkpoint": str(checkpoint.resolve()), "step": str(step), "out": str(out.resolve())}
        try:
            self.folder.mkdir(exist_ok=True)
            with log.open("wb") as file:
                process = subprocess.Popen(
                    words_of(self.command, values),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            LOG.warning(f"checkpoint.hook of step {step} could not be started: {error}")
            return
        self.started.append((step, process))

    def look(self) -> None:
        """Tells of those that have failed meanwhile."""
        for step, process in self.started:
            if process.poll():
                log = self.folder / f"step_{step}.log"
                LOG.warning(f"checkpoint.hook of step {step} failed (exit code {process.returncode}); {log} says why")
        self.started = [of_step for of_step in self.started if of_step[1].returncode is None]


def words_of(command: str, values: dict[str, str]) -> list[str]:
    """The command's words. A value stands within its word as it is, whatever characters it has."""
    fields = "|".join(HOOK_FIELDS)
    return [re.sub(rf"\{{({fields})\}}", lambda found: values[found[1]], word) for word in shlex.split(command)]


def environment() -> dict[str, str]:
    """That of a process which is no rank, and in which `python -m xscale...` is the code that runs here."""
    env = ranks.without_launcher(dict(os.environ))
    for name, own in (("PYTHONPATH", str(CODE)), ("PATH", str(Path(sys.executable).parent))):
        env[name] = os.pathsep.join(filter(None, [own, env.get(name)]))
    return env
