"""Several training runs in one launch, since importing torch and deepspeed costs seconds: `torchrun ... FILE.json`.

FILE.json: a list of argument lists of xscale/train.py.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

from xscale import ranks
from xscale.plugins import load_plugins
from xscale.ranks import Control
from xscale.run.start import train_run
from xscale.run.status import Status
from xscale.train import parse_arguments

process = ranks.find_process()
ranks.start(process)
control = Control()
try:
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        args = parse_arguments(arguments)
        load_plugins(args.plugin)
        code = train_run(args, process, control, Status(args.out, process))
        assert code == 0, arguments
        gc.collect()  # engines are cycles
    control.barrier()
    code = 0
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # as train.py does: an exit that tears the process group down may wait for the other ranks
