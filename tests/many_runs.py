"""Several training runs in one launch, since importing torch and deepspeed costs seconds: `torchrun ... FILE.json`.

FILE.json: a list of argument lists of xscale/train.py.
"""

import gc
import json
import sys
from pathlib import Path

from xscale import distributed
from xscale.distributed import Control
from xscale.train import parse_arguments, train_run

place = distributed.find_place()
distributed.start(place)
control = Control()
for arguments in json.loads(Path(sys.argv[1]).read_text()):
    code = train_run(parse_arguments(arguments), place, control)
    assert code == 0, arguments
    gc.collect()  # engines are cycles
control.barrier()
