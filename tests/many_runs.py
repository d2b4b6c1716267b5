"""Several training runs in one launch, since importing torch and deepspeed costs seconds: `torchrun ... FILE.json`.

FILE.json: a list of argument lists of xscale/train.py. With UNTIL=N in the environment a run is told to
stop after its step N.
OUT/sent.RANKS.json then says for each step what its collectives were given: {"all_reduce": bytes, ...}.
"""

import gc
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

SENT: Counter[str] = Counter()
"""By collective, bytes of whole tensors since the step began."""


def count(name: str, kind: str, place: int) -> None:
    """place: of the tensor among the arguments, or of a list of them."""
    original = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        keys = {"all_reduce": "tensor", "all_gather": "tensor_list", "all_gather_into_tensor": "output_tensor"}
        given = args[place] if len(args) > place else kwargs[keys.get(name, "input")]
        SENT[kind] += sum(tensor.nbytes for tensor in (given if isinstance(given, list) else [given]))
        return original(*args, **kwargs)

    setattr(dist, name, counted)


for _name, _kind, _place in (
    ("all_reduce", "all_reduce", 0),
    ("all_gather", "all_gather", 0),
    ("all_gather_into_tensor", "all_gather", 0),
    ("reduce_scatter_tensor", "reduce_scatter", 1),
):
    count(_name, _kind, _place)  # before deepspeed takes them

from xscale import ranks  # noqa: E402
from xscale.ranks import HostGroup  # noqa: E402
from xscale.run import loop  # noqa: E402
from xscale.run.folder import DONE, STOPPED, Status  # noqa: E402
from xscale.run.start import train_run  # noqa: E402
from xscale.run.state import TrainState  # noqa: E402
from xscale.run.stopper import Stopper  # noqa: E402
from xscale.train import parse_arguments  # noqa: E402

UNTIL = int(os.environ.get("UNTIL", "0"))
steps: list[dict[str, int]] = []
take_step, after_step = loop.optimizer_step, Stopper.after_step


def counted_step(*args: Any, **options: Any) -> Any:
    SENT.clear()
    made = take_step(*args, **options)
    steps.append(dict(SENT))
    return made


def stopping_step(self: Stopper, state: TrainState) -> None:
    after_step(self, state)
    if state.step == UNTIL:
        self.context.stop.reason = "the test"


vars(loop)["optimizer_step"] = counted_step
Stopper.after_step = stopping_step  # type: ignore[method-assign]

process = ranks.read_launcher()
ranks.join_process_group(process)
host_group = HostGroup()
try:
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        args = parse_arguments(arguments)
        steps.clear()
        code = train_run(args, process, host_group, Status(args.out, process))
        assert code in ((DONE, STOPPED) if UNTIL else (DONE,)), arguments
        if process.is_main:
            (args.out / f"sent.{process.world}.json").write_text(json.dumps(steps))
        gc.collect()  # engines are cycles
    host_group.barrier()
    code = 0
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # as train.py does: an exit that tears the process group down may wait for the other ranks
