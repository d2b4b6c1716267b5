"""Several training runs in one launch, since importing torch and deepspeed costs seconds: `torchrun ... FILE.json`.

FILE.json: a list of argument lists of xscale/train.py. With UNTIL=N in the environment, a signal asks each run to stop
after its step N.
"""

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from xscale import ranks
from xscale.data import calibrate
from xscale.ranks import CpuGroup
from xscale.run.run_status import DONE, STOPPED, Status
from xscale.run.start import train_run
from xscale.train import parse_arguments

UNTIL = int(os.environ.get("UNTIL", "0"))
set_steps_done_for_next_write = Status.set_steps_done_for_next_write


def stopping_step(self: Status, step: int) -> None:
    set_steps_done_for_next_write(self, step)
    if UNTIL and step == UNTIL:
        os.kill(os.getpid(), signal.SIGTERM)


Status.set_steps_done_for_next_write = stopping_step  # type: ignore[method-assign]

calibrate.DRAWN, calibrate.READ = 256, 64  # fewer samples, which takes a second less of each run

process = ranks.read_launcher_and_set_environment()
ranks.join_process_group(process)
cpu_group = CpuGroup()
try:
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        args = parse_arguments(arguments)
        code = train_run(args, process, cpu_group, Status(args.out, process))
        assert code in ((DONE, STOPPED) if UNTIL else (DONE,)), arguments
        gc.collect()  # engines are cycles
    cpu_group.barrier()
    code = 0
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # as train.py does: an exit that tears the process group down may wait for the other ranks
