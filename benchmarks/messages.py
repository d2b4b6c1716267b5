"""Show that no step waits for the small message by which ranks agree on the step, since it is sent some steps ahead.

    python benchmarks/messages.py [--delay 0.05] [--steps 40]

Two ranks train `mixed` on the demo corpus, three times with normal messages and, in turn, three times with delayed
messages. The script prints each run's median time of a step; if steps waited, these times would differ by the delay.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import print_table

ROOT = Path(__file__).resolve().parent.parent


def train(arguments: list[str], delay: float) -> None:
    """Train one rank, whose messages arrive `delay` seconds after they are sent, or later."""
    from xscale import train
    from xscale.ranks import HostGroup, PendingSum

    begin = HostGroup.begin_sum

    class Late(PendingSum):
        """A message that arrives `delay` seconds after it is sent, or later."""

        def is_complete(self) -> bool:
            return time.monotonic() >= arrives[self.tensor] and super().is_complete()

        def wait(self) -> list[int]:
            time.sleep(max(0.0, arrives.pop(self.tensor) - time.monotonic()))
            return super().wait()

    def begin_sum(self: HostGroup, numbers: list[int]) -> PendingSum:
        message = begin(self, numbers)
        arrives[message.tensor] = time.monotonic() + delay
        return Late(message.tensor, message.work)

    arrives: dict[Any, float] = {}
    HostGroup.begin_sum = begin_sum  # type: ignore[method-assign]
    code = train.main(arguments)
    sys.stdout.flush()
    os._exit(code)


def median_step(delay: float, steps: int, folder: Path) -> float:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517"]
    common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mixed", "--out", str(folder)]
    words = [*common, "--steps", str(steps), "--set", "train.measure_every=0", "streams.ppa.queue_size=256"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DELAY": str(delay)}
    subprocess.run([*launcher, __file__, "--rank", *words], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    seconds = [json.loads(line)["step_s"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return median(seconds[len(seconds) // 2 :])


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2:], float(os.environ["DELAY"]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            pair = [median_step(d, args.steps, Path(folder) / f"{number}-{d}") for d in (0.0, args.delay)]
            rows.append([str(number), *(f"{1000 * s:.0f}" for s in pair), f"{pair[1] / pair[0]:.3f}"])
    print_table(
        "The message of a step", ["pair", "ms a step", f"with messages of {1000 * args.delay:.0f} ms", "ratio"], rows
    )


if __name__ == "__main__":
    main()
